/* test_lookahead MODEL DEVICE [quick]: the batcher over an engine that looks ahead. The tokens that
 * each row is told, with and without looking ahead, by graph and by operations, against what the
 * CPU generates for it alone: rows that end by what they draw, by length, that are removed while
 * they are in steps, one that the host draws, and pages that run short, so that the youngest row
 * is ended and starts again from its tokens. 77 where the device isn't.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/loop.h"
#include "base/mem.h"
#include "engine/kernels.h"
#include "kernels/registry.h"
#include "node/batcher.h"

enum { N_ROWS = 6, MAX_TOKENS = 24, MAX_PROMPT = 254, CHUNK = 64, N_PAGES = 3, PAGE_TOKENS = 256 };

static struct loop *loop;
static struct engine *engine;
static struct batcher *batcher;
static const char *model;
static bool exact;
static unsigned n_wrong, n_preempted, n_released_late;

struct test_row {
    struct batch_row row;
    struct batch_prompt prompt;
    struct engine_sampling sampling;
    uint32_t ids[MAX_PROMPT + MAX_TOKENS], n_ids; /* prompt, then tokens */
    uint32_t least, most;                         /* tokens, whatever is drawn */
    uint32_t want[MAX_TOKENS], n_want;
    uint32_t n_tokens, cancelled_at; /* told; removed once another row has so many, 0: never */
    uint64_t age;
    bool waits, done, live;
};
static struct test_row rows[N_ROWS];
static uint64_t age;

static void expect(bool is_so, const char *what, uint32_t row, uint32_t n)
{
    if (!is_so) {
        n_wrong++;
        printf("NOT SO: %s, row %u, %u tokens\n", what, row, n);
    }
}

/* Unlike an end by length nobody can know it before. */
static bool is_end(const struct test_row *test, uint32_t id, uint32_t n_tokens)
{
    return id % 23 == 4 && n_tokens >= test->least;
}

static void make_rows(uint32_t vocab)
{
    static const uint32_t n_prompt[N_ROWS] = {253, 254, 9, 3, 17, 5};
    uint64_t seed = 77;
    memset(rows, 0, sizeof(rows));
    for (uint32_t k = 0; k < N_ROWS; k++) {
        rows[k].n_ids = n_prompt[k];
        for (uint32_t i = 0; i < n_prompt[k]; i++) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            rows[k].ids[i] = (uint32_t)((seed >> 33) % vocab);
        }
        rows[k].least = n_prompt[k] > PAGE_TOKENS / 2 ? 6 : 1; /* the long ones need two pages */
        rows[k].most = k == 2 ? 4 : (exact ? 16 : MAX_TOKENS);
        rows[k].sampling = (struct engine_sampling){.temperature = 1.0f + 0.2f * (float)k,
                                                    .top_p = k == 4 ? 0.95f : 1,
                                                    .repetition_penalty = 1,
                                                    .seed = 90 + k};
    }
    rows[4].sampling.want_logprobs = true; /* the host's */
    rows[4].most = 3;
    rows[5].cancelled_at = 5;
}

/* --- the CPU, a row after the other */

static struct engine *open_engine(const char *device, bool no_graphs, bool lookahead)
{
    static const char *all[] = {"all"};
    static const char *forced[] = {"mhc=reference",     "project=reference", "compress=reference",
                                   "indexer=reference", "topk=reference",    "attend=reference",
                                   "oproj=reference",   "route=reference",   "experts=reference",
                                   "head=reference",    "sample=device"};
    struct engine_options options = {.kind = "model",
                                     .model_dir = model,
                                     .device = device,
                                     .exact = exact,
                                     .no_graphs = no_graphs,
                                     .lookahead = lookahead,
                                     .n_threads = 1,
                                     .max_sequences = N_ROWS,
                                     .n_pages = N_PAGES,
                                     .max_context_tokens = 2 * PAGE_TOKENS,
                                     .max_chunk_tokens = CHUNK,
                                     .max_batch_rows = N_ROWS};
    struct engine *opened;
    struct error err;
    enum status status =
        engine_kernels_wish((char *const *)(uintptr_t)forced,
                            strcmp(device, "cpu") ? sizeof(forced) / sizeof(forced[0]) : 0,
                            (char *const *)(uintptr_t)all, 1, &err);
    status = status ? status : engine_open(&options, NULL, &opened, &err);
    if (status) {
        printf("%s\n", err.text);
        exit(1);
    }
    return opened;
}

static void must(enum status status)
{
    if (status) {
        printf("%s\n", status_name(status));
        exit(1);
    }
}

static void by_cpu(void)
{
    struct engine *cpu = open_engine("cpu", true, false);
    make_rows(engine_info(cpu)->vocab_size);
    for (uint32_t k = 0; k < N_ROWS; k++) {
        struct test_row *test = &rows[k];
        struct engine_row row = {.sampling = &test->sampling};
        must(engine_seq_create(cpu, k, &row.seq));
        must(engine_seq_reserve(row.seq, test->n_ids + test->most));
        for (uint32_t at = 0; at < test->n_ids; at += CHUNK) {
            uint32_t n = test->n_ids - at < CHUNK ? test->n_ids - at : CHUNK;
            must(engine_prefill(cpu, row.seq, test->ids + at, n,
                                at + n == test->n_ids ? &row : NULL, NULL, NULL));
        }
        for (;;) {
            row.token = test->want[test->n_want++] = row.draw.id;
            row.n_generated = test->n_want;
            if (is_end(test, row.token, test->n_want) || test->n_want == test->most) {
                break;
            }
            must(engine_step(cpu, &row, 1));
        }
        engine_seq_free(row.seq);
        printf("row %u: %u tokens\n", k, test->n_want);
    }
    engine_close(cpu);
}

/* --- the batcher */

/* The others come once the two long ones run: who needs a second page then finds none, for these
 * are more than three, each behind the other, and the page is needed within four tokens. */
static void start_waiting(void)
{
    bool long_run = rows[0].n_tokens > 0 && rows[1].n_tokens > 0;
    for (uint32_t k = 0; k < N_ROWS; k++) {
        struct test_row *test = &rows[k];
        if (!test->waits || (k > 1 && !long_run) || engine_seq_create(engine, k, &test->row.seq)) {
            continue;
        }
        uint32_t n = test->n_ids + test->n_tokens;
        if (engine_seq_reserve(test->row.seq, n)) {
            engine_seq_free(test->row.seq);
            test->row.seq = NULL;
            continue;
        }
        test->waits = false;
        test->prompt = (struct batch_prompt){.seq = test->row.seq,
                                             .ids = test->ids,
                                             .n_ids = n,
                                             .sampling = &test->sampling,
                                             .n_generated = test->n_tokens,
                                             .cookie = test};
        batcher_prompt_add(batcher, &test->prompt);
    }
}

static void gone(struct test_row *test)
{
    engine_seq_free(test->row.seq);
    test->row.seq = NULL;
    test->live = false;
    start_waiting();
    bool all = true;
    for (uint32_t k = 0; k < N_ROWS; k++) {
        all = all && rows[k].done && !rows[k].live;
    }
    if (all) {
        loop_stop(loop);
    }
}

static void end_row(struct test_row *test)
{
    test->done = true;
    if (!test->live) {
        return; /* its prompt is on the way */
    }
    if (batcher_row_remove(batcher, &test->row)) {
        gone(test);
    } else {
        n_released_late++;
    }
}

static void told(struct test_row *test, uint32_t id)
{
    uint32_t k = (uint32_t)(test - rows);
    expect(!test->done, "no token after the end", k, test->n_tokens);
    expect(test->n_tokens < test->n_want && id == test->want[test->n_tokens], "the CPU's token", k,
           test->n_tokens);
    test->ids[test->n_ids + test->n_tokens++] = id;
    if (is_end(test, id, test->n_tokens) || test->n_tokens >= test->most) {
        end_row(test);
    }
    start_waiting();
    for (uint32_t i = 0; i < N_ROWS; i++) {
        struct test_row *other = &rows[i];
        if (other != test && other->live && !other->done && other->cancelled_at == test->n_tokens) {
            end_row(other);
        }
    }
}

static void on_token(void *cookie, struct batch_row *row, const struct engine_draw *draw)
{
    told(row->cookie, draw->id);
}

static void on_step_done(void *cookie)
{
}

static void on_row_released(void *cookie, struct batch_row *row)
{
    gone(row->cookie);
}

static bool on_goes_on(void *cookie, const struct batch_row *row)
{
    const struct test_row *test = row->cookie;
    return test->n_tokens + 1 < test->most;
}

static bool on_short(void *cookie, struct batch_row *row)
{
    struct test_row *youngest = NULL;
    for (uint32_t k = 0; k < N_ROWS; k++) {
        if (rows[k].live && (!youngest || rows[k].age > youngest->age)) {
            youngest = &rows[k];
        }
    }
    assert(youngest && youngest->row.n_begun == 0);
    n_preempted++;
    bool is_mine = batcher_row_remove(batcher, &youngest->row);
    assert(is_mine); /* nothing is stepping now */
    (void)is_mine;
    engine_seq_free(youngest->row.seq);
    youngest->row.seq = NULL;
    youngest->live = false;
    youngest->waits = !youngest->done;
    return true;
}

static void on_progress(void *cookie, struct batch_prompt *prompt, uint32_t n_done)
{
}

static void on_done(void *cookie, struct batch_prompt *prompt, enum status status,
                    const struct engine_draw *draw)
{
    struct test_row *test = prompt->cookie;
    must(status);
    test->row = (struct batch_row){.seq = prompt->seq,
                                   .sampling = &test->sampling,
                                   .token = draw->id,
                                   .n_generated = test->n_tokens + 1,
                                   .cookie = test};
    test->age = ++age;
    test->live = true;
    batcher_row_add(batcher, &test->row);
    told(test, draw->id);
}

static void on_broken(void *cookie, enum status status)
{
    must(status);
}

static const struct batcher_events events = {
    .token = on_token,
    .step_done = on_step_done,
    .row_released = on_row_released,
    .goes_on = on_goes_on,
    .short_of_pages = on_short,
    .prompt_progress = on_progress,
    .prompt_done = on_done,
    .broken = on_broken,
};

/* All rows, until they are done. */
static void run(const char *device, bool no_graphs, bool lookahead)
{
    struct batcher_options options = {.prefill_share = 0.5};
    struct batcher_stats stats;
    engine = open_engine(device, no_graphs, lookahead);
    n_preempted = n_released_late = 0;
    must(loop_create(&loop));
    must(batcher_create(loop, engine, &options, &events, NULL, &batcher));
    for (uint32_t k = 0; k < N_ROWS; k++) {
        rows[k].n_tokens = 0;
        rows[k].done = rows[k].live = false;
        rows[k].waits = true;
    }
    start_waiting();
    must(loop_run(loop));
    batcher_stats(batcher, &stats);
    for (uint32_t k = 0; k < N_ROWS; k++) {
        bool is_whole = rows[k].n_tokens == rows[k].n_want;
        expect(is_whole || rows[k].cancelled_at, "all of its tokens", k, rows[k].n_tokens);
    }
    printf("graphs %d, lookahead %d: %u steps, %u begun ahead, %u rows too many, %u preempted, "
           "%u released late\n",
           !no_graphs, lookahead, (unsigned)stats.n_steps, (unsigned)stats.n_ahead,
           (unsigned)stats.n_too_many, n_preempted, n_released_late);
    expect((stats.n_ahead > 0) == lookahead, "steps were begun ahead", 0, 0);
    expect(n_preempted > 0, "pages ran short", 0, 0);
    batcher_free(batcher);
    expect(engine_pages_free(engine) == N_PAGES && engine_slots_free(engine) == N_ROWS,
           "nothing is left", 0, 0);
    engine_close(engine);
    loop_free(loop);
}

int main(int argc, char **argv)
{
    struct registry_choice choice;
    struct error err;
    if (argc < 3) {
        return 2;
    }
    model = argv[1];
    bool is_quick = argc > 3; /* in exact arithmetic, which toys need, and by graph ahead alone */
    exact = is_quick;
    if (registry_find(argv[2], &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    by_cpu();
    for (int how = is_quick ? 2 : 0; how < (is_quick ? 3 : 4); how++) {
        run(argv[2], how & 1, how & 2);
    }
    printf("%u wrong\n", n_wrong);
    return n_wrong ? 1 : 0;
}
