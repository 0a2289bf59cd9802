/*
 * What the compute thread does next: rows join, leave and pause between steps, prompts get their
 * share and no more, nobody starves, and calls run between units. Over the sim engine, whose steps
 * and chunks take the time they are told to.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/loop.h"
#include "base/mem.h"
#include "engine/sim.h"
#include "node/batcher.h"
#include "tests/lost.h"

enum { VOCAB = 1000, MAX_ROWS = 8, MAX_TOKENS = 4096, MAX_PROMPTS = 16, MAX_ORDER = 4096 };

static struct loop *loop;
static struct engine *engine;
static struct batcher *batcher;
static _Atomic uint64_t progress;
static const struct engine_sampling greedy = {.top_p = 1, .repetition_penalty = 1};

struct test_row {
    struct batch_row row;
    uint32_t tokens[MAX_TOKENS], n_tokens, prompt_n;
    uint32_t *prompt;
    bool released, short_of_pages;
};

struct test_prompt {
    struct batch_prompt prompt;
    uint32_t *ids, n_started, n_progress;
    bool done;
    enum status status;
    struct engine_draw draw;
    uint64_t started_ns, done_ns;
};

static struct test_row rows[MAX_ROWS];
static struct test_prompt prompts[MAX_PROMPTS];
static char order[MAX_ORDER]; /* s: a step ended, c: a chunk, k: a call */
static uint32_t n_order, n_steps, n_broken, n_short;
static struct test_row *victim, *stop_in_token;

static void note(char what)
{
    if (n_order < MAX_ORDER) {
        order[n_order++] = what;
    }
}

static void on_token(void *cookie, struct batch_row *row, const struct engine_draw *draw)
{
    struct test_row *test = row->cookie;
    if (test->n_tokens < MAX_TOKENS) {
        test->tokens[test->n_tokens++] = draw->id;
    }
    if (stop_in_token == test) {
        test->released = batcher_row_remove(batcher, row);
    }
}

static void on_step_done(void *cookie)
{
    n_steps++;
    note('s');
}

static void on_row_released(void *cookie, struct batch_row *row)
{
    ((struct test_row *)row->cookie)->released = true;
}

static bool on_short(void *cookie, struct batch_row *row)
{
    n_short++;
    ((struct test_row *)row->cookie)->short_of_pages = true;
    if (!victim) {
        return false;
    }
    if (!batcher_row_remove(batcher, &victim->row)) {
        abort(); /* nothing is stepping now */
    }
    engine_seq_free(victim->row.seq);
    victim->row.seq = NULL;
    victim = NULL;
    return true;
}

static void on_started(void *cookie, struct batch_prompt *prompt)
{
    struct test_prompt *test = prompt->cookie;
    test->n_started++;
    test->started_ns = loop_now_ns();
}

static void on_progress(void *cookie, struct batch_prompt *prompt, uint32_t n_done)
{
    ((struct test_prompt *)prompt->cookie)->n_progress++;
    note('c');
}

static void on_done(void *cookie, struct batch_prompt *prompt, enum status status,
                    const struct engine_draw *draw)
{
    struct test_prompt *test = prompt->cookie;
    test->done = true;
    test->status = status;
    test->draw = *draw;
    test->done_ns = loop_now_ns();
}

static void on_broken(void *cookie, enum status status)
{
    n_broken++;
}

static const struct batcher_events events = {
    .token = on_token,
    .step_done = on_step_done,
    .row_released = on_row_released,
    .short_of_pages = on_short,
    .prompt_started = on_started,
    .prompt_progress = on_progress,
    .prompt_done = on_done,
    .broken = on_broken,
};

static void on_run_end(void *cookie)
{
    loop_stop(loop);
}

static void run_ms(unsigned ms)
{
    struct loop_timer *timer = loop_timer_create(loop, on_run_end, NULL);
    loop_timer_arm(timer, ms * NS_PER_MS);
    assert_int_equal(loop_run(loop), STATUS_OK);
    loop_timer_free(timer);
}

#define WAIT_FOR(condition, ms)                             \
    do {                                                    \
        uint64_t begin_ns_ = loop_now_ns();                 \
        while (!(condition) && !lost_over(begin_ns_, ms)) { \
            run_ms(1);                                      \
        }                                                   \
        assert_true(condition);                             \
    } while (0)

static void open_batcher(double step_ms, double tokens_per_s, uint32_t n_pages, double share,
                         uint32_t max_rows)
{
    struct engine_options options = {.kind = "sim",
                                     .max_sequences = 32,
                                     .n_pages = n_pages,
                                     .max_chunk_tokens = 256,
                                     .max_context_tokens = 65536,
                                     .sim_page_bytes = 4096,
                                     .sim_tail_bytes = 64,
                                     .sim_vocab_size = VOCAB,
                                     .sim_step_ms = step_ms,
                                     .sim_prefill_tokens_per_s = tokens_per_s};
    struct batcher_options batching = {.prefill_share = share, .max_rows = max_rows};
    struct error err = {""};
    memset(rows, 0, sizeof(rows));
    memset(prompts, 0, sizeof(prompts));
    n_order = n_steps = n_broken = n_short = 0;
    victim = stop_in_token = NULL;
    assert_int_equal(loop_create(&loop), STATUS_OK);
    assert_int_equal(engine_open(&options, &progress, &engine, &err), STATUS_OK);
    assert_int_equal(batcher_create(loop, engine, &batching, &events, NULL, &batcher), STATUS_OK);
}

static void close_batcher(void)
{
    batcher_free(batcher);
    for (uint32_t i = 0; i < MAX_ROWS; i++) {
        engine_seq_free(rows[i].row.seq);
        mem_free(rows[i].prompt);
    }
    for (uint32_t i = 0; i < MAX_PROMPTS; i++) {
        engine_seq_free(prompts[i].prompt.seq);
        mem_free(prompts[i].ids);
    }
    assert_int_equal(n_broken, 0);
    engine_close(engine);
    loop_free(loop);
}

static uint32_t *ids_make(uint32_t n, uint32_t seed)
{
    uint32_t *ids = mem_array(n, sizeof(*ids));
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = 3 + (seed * 7919 + i * 104729) % (VOCAB - 3);
    }
    return ids;
}

static struct test_prompt *prompt_add(uint32_t i, uint32_t n_ids)
{
    struct test_prompt *test = &prompts[i];
    test->ids = ids_make(n_ids, i);
    test->prompt = (struct batch_prompt){
        .ids = test->ids, .n_ids = n_ids, .sampling = &greedy, .cookie = test};
    assert_int_equal(engine_seq_create(engine, i, &test->prompt.seq), STATUS_OK);
    assert_int_equal(engine_seq_reserve(test->prompt.seq, n_ids), STATUS_OK);
    batcher_prompt_add(batcher, &test->prompt);
    return test;
}

/* A row whose prompt was computed by the batcher itself. */
static struct test_row *row_add(uint32_t i, uint32_t n_ids)
{
    struct test_row *test = &rows[i];
    struct test_prompt *prompt = prompt_add(i, n_ids);
    WAIT_FOR(prompt->done, 20000);
    assert_int_equal(prompt->status, STATUS_OK);
    test->prompt = prompt->ids;
    test->prompt_n = n_ids;
    test->row = (struct batch_row){.seq = prompt->prompt.seq,
                                   .sampling = &greedy,
                                   .token = prompt->draw.id,
                                   .n_generated = 1,
                                   .cookie = test};
    test->tokens[test->n_tokens++] = prompt->draw.id;
    prompt->ids = NULL;
    prompt->prompt.seq = NULL;
    batcher_row_add(batcher, &test->row);
    return test;
}

static void assert_row_right(const struct test_row *test)
{
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < test->prompt_n; i++) {
        prefix = sim_prefix_next(prefix, test->prompt[i]);
    }
    assert_true(test->n_tokens > 1);
    for (uint32_t i = 0; i < test->n_tokens; i++) {
        uint32_t id = sim_token(prefix, VOCAB);
        assert_int_equal(test->tokens[i], id);
        prefix = sim_prefix_next(prefix, id);
    }
}

/* Rows come, go and pause at any moment; each gets its own tokens, whoever else is in the step. */
static void rows_join_leave_pause(void **state)
{
    open_batcher(1, 0, 64, 0.5, 0);
    for (uint32_t i = 0; i < 6; i++) {
        row_add(i, 50 + 100 * i);
        run_ms(7);
    }
    batcher_row_pause(batcher, &rows[1].row, true);
    uint32_t other = rows[0].n_tokens;
    WAIT_FOR(rows[0].n_tokens > other + 2, 2000); /* the step that ran has ended */
    uint32_t paused_at = rows[1].n_tokens;
    WAIT_FOR(rows[0].n_tokens > other + 12, 2000);
    assert_int_equal(rows[1].n_tokens, paused_at);
    struct batcher_stats stats;
    batcher_stats(batcher, &stats);
    assert_int_equal(stats.rows, 6);
    assert_int_equal(stats.rows_paused, 1);
    batcher_row_pause(batcher, &rows[1].row, false);
    WAIT_FOR(rows[1].n_tokens > paused_at + 3, 2000);
    /* Out in the middle of a step: no token follows, the sequence comes back by event. */
    uint32_t n = rows[2].n_tokens;
    rows[2].released = batcher_row_remove(batcher, &rows[2].row);
    WAIT_FOR(rows[2].released, 2000);
    assert_int_equal(rows[2].n_tokens, n);
    /* Out inside its own token: at once. */
    stop_in_token = &rows[3];
    WAIT_FOR(rows[3].released, 2000);
    n = rows[3].n_tokens;
    other = rows[0].n_tokens;
    WAIT_FOR(rows[0].n_tokens > other + 10, 2000);
    assert_int_equal(rows[3].n_tokens, n);
    for (uint32_t i = 0; i < 6; i++) {
        assert_row_right(&rows[i]);
    }
    batcher_stats(batcher, &stats);
    assert_int_equal(stats.rows, 4);
    close_batcher();
}

/* More rows than a step holds: all advance alike. */
static void rows_beyond_a_step_take_turns(void **state)
{
    open_batcher(1, 0, 64, 0.5, 2);
    for (uint32_t i = 0; i < 7; i++) {
        row_add(i, 30);
    }
    uint32_t before[7];
    for (uint32_t i = 0; i < 7; i++) {
        before[i] = rows[i].n_tokens;
    }
    for (uint32_t i = 0; i < 7; i++) {
        WAIT_FOR(rows[i].n_tokens > before[i] + 20, 5000);
    }
    uint32_t least = UINT32_MAX, most = 0;
    for (uint32_t i = 0; i < 7; i++) {
        uint32_t got = rows[i].n_tokens - before[i];
        least = got < least ? got : least;
        most = got > most ? got : most;
        assert_row_right(&rows[i]);
    }
    assert_true(most - least <= 2);
    close_batcher();
}

static uint32_t longest_run_of(char what)
{
    uint32_t longest = 0, n = 0;
    for (uint32_t i = 0; i < n_order; i++) {
        n = order[i] == what ? n + 1 : 0;
        longest = n > longest ? n : longest;
    }
    return longest;
}

/* While a row waits for steps at most one chunk runs between two of them, and chunks together stay
 * near their share of the time; the long prompt still gets through. */
static void chunks_keep_their_share(void **state)
{
    open_batcher(4, 256000.0 / 12, 256, 0.5, 0); /* a chunk of 256 takes 12 ms, a step 4 */
    row_add(0, 30);
    struct batcher_stats before, after;
    run_ms(50);
    n_order = 0;
    uint64_t begin_ns = loop_now_ns();
    batcher_stats(batcher, &before);
    struct test_prompt *prompt = prompt_add(1, 256 * 30);
    WAIT_FOR(prompt->done, 20000);
    batcher_stats(batcher, &after);
    assert_int_equal(prompt->status, STATUS_OK);
    assert_int_equal(prompt->n_progress, 30);
    assert_int_equal(prompt->n_started, 1);
    assert_int_equal(longest_run_of('c'), 1);
    double chunk_ns = (double)(after.chunk_ns - before.chunk_ns);
    double step_ns = (double)(after.step_ns - before.step_ns);
    print_message("  share of chunks %.2f, longest gap %.1f ms\n", chunk_ns / (chunk_ns + step_ns),
                  (double)after.max_gap_ns * 1e-6);
    /* what the machine took was counted in the one or the other */
    double lost = (double)lost_ns(begin_ns, loop_now_ns());
    double fewer_ns = chunk_ns > lost ? chunk_ns - lost : 0;
    double shorter_ns = step_ns > lost ? step_ns - lost : 0;
    assert_true(fewer_ns / (fewer_ns + step_ns) < 0.62);
    assert_true(chunk_ns / (chunk_ns + shorter_ns) > 0.25);
    assert_row_right(&rows[0]);
    close_batcher();
}

/* The gap between two steps is a step and at most one chunk, in time as well: 62 ms of sleep, and
 * two chunks would be 122. A busy machine may add to it once; a wrong choice does so every time.
 * What the machine took is its own. */
static void gap_is_one_chunk_at_most(void **state)
{
    uint64_t gap_ms = 0, most_ms = 118;
    for (int attempt = 0; attempt < 4 && (gap_ms < 60 || gap_ms > most_ms); attempt++) {
        struct batcher_stats stats;
        uint64_t begin_ns = loop_now_ns();
        open_batcher(2, 256000.0 / 60, 256, 1.0, 0); /* all the share: still one chunk at a time */
        row_add(0, 30);
        run_ms(30);
        n_order = 0;
        for (uint32_t i = 1; i < 4; i++) {
            prompt_add(i, 256 * 2);
        }
        WAIT_FOR(prompts[1].done && prompts[2].done && prompts[3].done, 20000);
        batcher_stats(batcher, &stats);
        assert_int_equal(longest_run_of('c'), 1);
        gap_ms = stats.max_gap_ns / NS_PER_MS;
        most_ms = 118 + lost_ns(begin_ns, loop_now_ns()) / NS_PER_MS;
        close_batcher();
    }
    assert_in_range(gap_ms, 60, most_ms);
}

/* Short prompts go first, and a long one still starts and ends under a flood of them. */
static void long_prompt_does_not_starve(void **state)
{
    open_batcher(1, 256000.0 / 4, 512, 0.5, 0);
    struct test_prompt *large = prompt_add(0, 256 * 6);
    uint32_t n_short_done = 0, next = 1;
    uint64_t begin_ns = loop_now_ns();
    while (!large->done && !lost_over(begin_ns, 20000)) {
        for (uint32_t i = 1; i < 5; i++) { /* four short ones wait at any moment */
            if (prompts[i].done || !prompts[i].ids) {
                n_short_done += prompts[i].done;
                engine_seq_free(prompts[i].prompt.seq);
                mem_free(prompts[i].ids);
                memset(&prompts[i], 0, sizeof(prompts[i]));
                prompt_add(i, 100 + next++ % 50);
            }
        }
        run_ms(1);
    }
    assert_true(large->done);
    assert_int_equal(large->status, STATUS_OK);
    /* At most PROMPT_MAX_OVERTAKEN short ones between two of its six chunks. */
    assert_in_range(n_short_done, 6, 6 * (PROMPT_MAX_OVERTAKEN + 1) + 8);
    for (uint32_t i = 1; i < 5; i++) {
        if (batcher_prompt_remove(batcher, &prompts[i].prompt)) {
            prompts[i].done = true;
        }
        WAIT_FOR(prompts[i].done, 2000);
    }
    close_batcher();
}

/* A prompt leaves while its chunk runs: CANCELLED, once, and soon; one that waits: at once. */
static void prompt_leaves(void **state)
{
    open_batcher(1, 256000.0 / 300, 64, 0.5, 0);
    struct test_prompt *runs = prompt_add(0, 1024), *waits = prompt_add(1, 2048);
    WAIT_FOR(runs->n_started == 1, 2000);
    assert_true(batcher_prompt_remove(batcher, &waits->prompt));
    run_ms(20);
    uint64_t asked_ns = loop_now_ns();
    assert_false(batcher_prompt_remove(batcher, &runs->prompt));
    WAIT_FOR(runs->done, 2000);
    assert_int_equal(runs->status, STATUS_CANCELLED);
    assert_within("leaving", asked_ns, runs->done_ns, 100); /* not the chunk's 300 ms */
    run_ms(50);
    assert_false(waits->done);
    assert_int_equal(waits->n_started, 0);
    close_batcher();
}

/* Started means started: the second prompt's first chunk, not its admission. */
static void started_is_when_it_computes(void **state)
{
    open_batcher(1, 256000.0 / 60, 64, 0.5, 0);
    struct test_prompt *first = prompt_add(0, 256), *second = prompt_add(1, 256);
    WAIT_FOR(first->n_started == 1, 2000);
    assert_int_equal(second->n_started, 0);
    WAIT_FOR(second->done, 5000);
    assert_int_equal(second->n_started, 1);
    assert_true(second->started_ns >= first->done_ns);
    close_batcher();
}

/* No page for the next token: the owner ends a row of its choice, or the row waits for pages. */
static void short_of_pages(void **state)
{
    open_batcher(1, 0, 4, 0.5, 0);
    row_add(0, 250);
    row_add(1, 250);
    row_add(2, 250);
    row_add(3, 250); /* four pages, all taken; each needs a second after six tokens */
    victim = &rows[3];
    WAIT_FOR(n_short >= 1, 5000);
    WAIT_FOR(rows[0].n_tokens > 10 || rows[1].n_tokens > 10 || rows[2].n_tokens > 10, 5000);
    WAIT_FOR(n_short >= 2, 5000); /* the next is answered false: paused */
    run_ms(50);
    struct batcher_stats stats;
    batcher_stats(batcher, &stats);
    assert_int_equal(stats.rows, 3);
    assert_true(stats.rows_paused >= 1);
    for (uint32_t i = 0; i < 3; i++) {
        assert_row_right(&rows[i]);
    }
    close_batcher();
}

static uint32_t n_calls_run, n_calls_done;

static void call_run(void *cookie)
{
    n_calls_run++; /* the loop reads it after `done` */
}

static void call_done(void *cookie)
{
    n_calls_done++;
    note('k');
}

/* Calls run on the compute thread between units, before what else waits, and are bounded. */
static void calls_between_units(void **state)
{
    open_batcher(2, 256000.0 / 4, 64, 0.5, 0);
    row_add(0, 30);
    prompt_add(1, 2048);
    run_ms(20);
    n_order = n_calls_run = n_calls_done = 0;
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(batcher_call(batcher, call_run, call_done, NULL), STATUS_OK);
    }
    WAIT_FOR(n_calls_done == 10, 2000);
    assert_int_equal(n_calls_run, 10);
    uint32_t first = 0;
    while (order[first] != 'k') {
        first++;
    }
    assert_true(first <= 1); /* at most the unit that was running came before */
    for (uint32_t i = 0; i < 10; i++) {
        assert_int_equal(order[first + i], 'k');
    }
    uint32_t n = 0;
    while (batcher_call(batcher, call_run, call_done, NULL) == STATUS_OK) {
        n++;
    }
    assert_in_range(n, 200, 300);
    WAIT_FOR(n_calls_done == 10 + n, 5000);
    WAIT_FOR(prompts[1].done, 5000);
    assert_row_right(&rows[0]);
    close_batcher();
}

int main(void)
{
    const struct CMUnitTest all[] = {
        cmocka_unit_test(rows_join_leave_pause),
        cmocka_unit_test(rows_beyond_a_step_take_turns),
        cmocka_unit_test(chunks_keep_their_share),
        cmocka_unit_test(gap_is_one_chunk_at_most),
        cmocka_unit_test(long_prompt_does_not_starve),
        cmocka_unit_test(prompt_leaves),
        cmocka_unit_test(started_is_when_it_computes),
        cmocka_unit_test(short_of_pages),
        cmocka_unit_test(calls_between_units),
    };
    lost_watch();
    return cmocka_run_group_tests(all, NULL, NULL);
}
