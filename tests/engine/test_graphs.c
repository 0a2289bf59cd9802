/* test_graphs MODEL DEVICE [ROWS] [tuned] [early] [OPERATION=VARIANT]: decode steps that a device
 * has recorded, against the same steps asked for one operation at a time. 77 where the device is
 * none.
 *
 * Every sequence is there twice, from contexts that the CPU computed: one side steps by graph, the
 * other does not. Batches of every size up to ROWS, drawn anew each time from sequences of all
 * lengths, so that a graph meets contexts of any length, over the ends of pages; then every logit,
 * every page and every tail is compared, bit for bit. A row that only fills a batch up would show
 * there too, had it touched anyone's memory.
 *
 * early: each side has a device of its own, and where steps are recorded kernels begin before those
 * in front of them end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "engine/accept.h"
#include "engine/engine.h"
#include "engine/graphs.h"
#include "engine/kernels.h"
#include "kernels/parcel.h"
#include "kernels/registry.h"

enum { MAX_ROWS = 64, STEPS_LATER = 80, LONGEST = 2051, PAGE_TOKENS = 256 };

/* Rising: they are cut from one prompt. */
static const uint32_t lengths[] = {1,   2,   3,   4,   5,   63,  126, 127,  128,
                                   129, 253, 254, 255, 256, 300, 511, 1023, LONGEST};
enum { N_LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

static const char *model, *device;
static bool tuned, early;
static const char *wished;   /* a variant, or NULL */
static uint32_t n_rows = 34; /* of which 33 is filled up */
static uint64_t seed = 5;

static uint32_t below(uint32_t n)
{
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((seed >> 33) % n);
}

/* What a context is: as it is handed from one node to another. */
struct image {
    uint32_t n_tokens, n_pages;
    uint8_t *pages, *tail;
    size_t tail_bytes;
};
static struct image images[N_LENGTHS];

static struct engine *open_engine(const char *name, bool no_graphs, bool early_launches,
                                  uint32_t rows)
{
    uint32_t pages_each = (LONGEST + STEPS_LATER) / PAGE_TOKENS + 1;
    struct engine_options options = {.kind = "model",
                                     .model_dir = model,
                                     .device = name,
                                     .no_graphs = no_graphs,
                                     .early_launches = early_launches,
                                     .max_sequences = 2 * rows + 2,
                                     .n_pages = (2 * rows + 2) * pages_each,
                                     .max_context_tokens = pages_each * PAGE_TOKENS,
                                     .max_chunk_tokens = 64,
                                     .max_batch_rows = rows};
    struct engine *engine;
    struct error err;
    if (engine_open(&options, NULL, &engine, &err)) {
        fail_msg("%s", err.text);
    }
    return engine;
}

static struct engine_seq *new_seq(struct engine *engine, uint32_t n_tokens)
{
    struct engine_seq *seq;
    assert_int_equal(engine_seq_create(engine, 1, &seq), STATUS_OK);
    assert_int_equal(engine_seq_reserve(seq, n_tokens), STATUS_OK);
    return seq;
}

static struct image take(struct engine *engine, struct engine_seq *seq)
{
    size_t page_bytes = engine_info(engine)->page_bytes;
    uint32_t n = engine_seq_n_tokens(seq);
    struct image image = {.n_tokens = n,
                          .n_pages = engine_pages_for(engine, n),
                          .tail_bytes = engine_tail_bytes(engine, n)};
    image.tail = mem_zalloc(image.tail_bytes);
    image.pages = mem_alloc(image.n_pages * page_bytes);
    assert_int_equal(engine_tail_write(engine, seq, image.tail, image.tail_bytes), STATUS_OK);
    for (uint32_t i = 0; i < image.n_pages; i++) {
        assert_int_equal(
            engine_page_read(engine, engine_seq_page(seq, i), image.pages + i * page_bytes),
            STATUS_OK);
    }
    return image;
}

static void image_free(struct image *image)
{
    mem_free(image->pages);
    mem_free(image->tail);
}

static struct engine_seq *give(struct engine *engine, const struct image *image)
{
    size_t page_bytes = engine_info(engine)->page_bytes;
    struct engine_seq *seq = new_seq(engine, image->n_tokens + STEPS_LATER);
    for (uint32_t i = 0; i < image->n_pages; i++) {
        struct parcel_piece piece = {.dst = engine_page_address(engine, engine_seq_page(seq, i)),
                                     .src = image->pages + i * page_bytes,
                                     .bytes = page_bytes};
        assert_int_equal(
            engine_accept_parcel(engine, 7, i, &piece, 1, accept_parcel_checksum(7, i, &piece, 1)),
            STATUS_OK);
    }
    assert_int_equal(engine_tail_read(engine, seq, image->n_tokens, image->tail, image->tail_bytes),
                     STATUS_OK);
    return seq;
}

/* From here on, whatever opens: references, whose bits are the CPU's, or what serves. */
static void wish(void)
{
    struct error err;
    static const char *all[] = {"all"};
    static const char *references[] = {
        "mhc=reference",     "project=reference", "compress=reference", "indexer=reference",
        "topk=reference",    "attend=reference",  "oproj=reference",    "route=reference",
        "experts=reference", "head=reference"};
    const char *forced[1 + sizeof(references) / sizeof(references[0])] = {wished};
    size_t n = wished != NULL;
    for (size_t i = 0; i < sizeof(references) / sizeof(references[0]) && !tuned; i++) {
        forced[n++] = references[i];
    }
    assert_int_equal(engine_kernels_wish((char *const *)(uintptr_t)forced, n,
                                         (char *const *)(uintptr_t)all, 1, &err),
                     STATUS_OK);
}

/* The contexts, on the CPU: prefixes of one prompt. */
static int make_images(void **state)
{
    struct engine *cpu = open_engine("cpu", true, false, 1);
    struct engine_seq *seq = new_seq(cpu, LONGEST);
    for (uint32_t i = 0, at = 0; i < N_LENGTHS; i++) {
        while (at < lengths[i]) {
            uint32_t ids[64], n = lengths[i] - at < 64 ? lengths[i] - at : 64;
            for (uint32_t k = 0; k < n; k++) {
                ids[k] = below(engine_info(cpu)->vocab_size);
            }
            assert_int_equal(engine_prefill(cpu, seq, ids, n, NULL, NULL, NULL), STATUS_OK);
            at += n;
        }
        images[i] = take(cpu, seq);
    }
    engine_seq_free(seq);
    engine_close(cpu);
    wish();
    return 0;
}

static int free_images(void **state)
{
    for (uint32_t i = 0; i < N_LENGTHS; i++) {
        image_free(&images[i]);
    }
    return 0;
}

/* --- both sides of a batch */

enum { BY_OPERATIONS, BY_GRAPH };

struct sides {
    struct engine *engines[2]; /* the same, if not early */
    uint32_t n;
    struct engine_seq *seqs[2][MAX_ROWS];
    float *logits[2]; /* [MAX_ROWS, vocab] */
    uint32_t n_steps[2];
};

static struct sides open_sides(uint32_t rows)
{
    struct engine *engine = open_engine(device, false, early, rows);
    struct sides s = {.engines = {early ? open_engine(device, true, false, rows) : engine, engine},
                      .n = rows};
    size_t vocab = engine_info(engine)->vocab_size;
    struct engine_graphs graphs;
    engine_graphs_report(engine, &graphs);
    assert_int_equal(graphs.n, graphs_sizes(rows, NULL));
    assert_true(graphs.n_launches > 10 && graphs.seconds > 0);
    for (int side = 0; side < 2; side++) {
        s.logits[side] = mem_array(MAX_ROWS * vocab, sizeof(float));
    }
    return s;
}

static void close_sides(struct sides *s)
{
    for (int side = 0; side < 2; side++) {
        for (uint32_t i = 0; i < s->n; i++) {
            engine_seq_free(s->seqs[side][i]);
        }
        mem_free(s->logits[side]);
    }
    if (early) {
        engine_close(s->engines[BY_OPERATIONS]);
    }
    engine_close(s->engines[BY_GRAPH]);
}

/* One step of the sequences `which` on one side. Rows that no bit of `wanted` names get no logits;
 * those of the others begin as poison. */
static void step_side(struct sides *s, int side, const uint32_t *which, const uint32_t *tokens,
                      uint32_t n, uint64_t wanted)
{
    struct engine *engine = s->engines[side];
    size_t vocab = engine_info(engine)->vocab_size;
    struct engine_row rows[MAX_ROWS];
    memset(s->logits[side], 0xff, MAX_ROWS * vocab * sizeof(float));
    for (uint32_t i = 0; i < n; i++) {
        rows[i] = (struct engine_row){
            .seq = s->seqs[side][which[i]],
            .token = tokens[i],
            .logits = wanted >> i & 1 ? s->logits[side] + i * vocab : NULL,
        };
    }
    engine_graphs_use(engine, side == BY_GRAPH);
    assert_int_equal(engine_step(engine, rows, n), STATUS_OK);
    s->n_steps[side]++;
}

/* By graph first: what it left out would hold the logits of an older step. */
static void step_both(struct sides *s, const uint32_t *which, const uint32_t *tokens, uint32_t n,
                      uint64_t wanted)
{
    size_t vocab = engine_info(s->engines[0])->vocab_size;
    step_side(s, BY_GRAPH, which, tokens, n, wanted);
    step_side(s, BY_OPERATIONS, which, tokens, n, wanted);
    for (uint32_t i = 0; i < n; i++) {
        const float *a = s->logits[BY_OPERATIONS] + i * vocab, *b = s->logits[BY_GRAPH] + i * vocab;
        if (memcmp(a, b, vocab * sizeof(float)) != 0) {
            fail_msg("row %u of %u, at %u tokens: logits by graph differ", i, n,
                     engine_seq_n_tokens(s->seqs[0][which[i]]));
        }
        uint32_t word;
        memcpy(&word, a + vocab - 1, sizeof(word));
        assert_true((word != 0xffffffffu) == (wanted >> i & 1));
    }
}

/* Pages and tails of both sides. */
static void compare_memory(struct sides *s)
{
    size_t page_bytes = engine_info(s->engines[0])->page_bytes;
    for (uint32_t i = 0; i < s->n; i++) {
        struct image a = take(s->engines[0], s->seqs[0][i]), b = take(s->engines[1], s->seqs[1][i]);
        assert_int_equal(a.n_tokens, b.n_tokens);
        if (memcmp(a.tail, b.tail, a.tail_bytes) ||
            memcmp(a.pages, b.pages, a.n_pages * page_bytes)) {
            fail_msg("sequence %u, of %u tokens: its memory differs by graph", i, a.n_tokens);
        }
        image_free(&a);
        image_free(&b);
    }
}

static void check_counts(const struct sides *s)
{
    for (int side = 0; side < 2; side++) {
        struct metrics *metrics = metrics_create();
        struct buf text = BUF_INIT;
        char wanted[96];
        engine_metrics_register(s->engines[side], metrics);
        metrics_write(metrics, &text);
        buf_append(&text, "", 1);
        snprintf(wanted, sizeof(wanted), "baton_engine_steps_total{by=\"%s\"} %u\n",
                 side ? "graph" : "operations", s->n_steps[side]);
        if (!strstr((const char *)text.data, wanted)) {
            fail_msg("no '%s' in the metrics", wanted);
        }
        buf_fini(&text);
        metrics_free(metrics);
    }
}

/* n of the sequences, in any order, with tokens. */
static void draw(const struct sides *s, uint32_t n, uint32_t *which, uint32_t *tokens)
{
    uint32_t all[MAX_ROWS];
    for (uint32_t i = 0; i < s->n; i++) {
        all[i] = i;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i + below(s->n - i), other = all[k];
        all[k] = all[i];
        which[i] = all[i] = other;
        tokens[i] = below(engine_info(s->engines[0])->vocab_size);
    }
}

static void test_every_size(void **state)
{
    struct sides s = open_sides(n_rows);
    uint32_t which[MAX_ROWS], tokens[MAX_ROWS];
    for (uint32_t i = 0; i < s.n; i++) {
        for (int side = 0; side < 2; side++) {
            s.seqs[side][i] = give(s.engines[side], &images[i % N_LENGTHS]);
        }
    }
    for (uint32_t n = 1; n <= s.n; n++) {
        draw(&s, n, which, tokens);
        step_both(&s, which, tokens, n, UINT64_MAX);
    }
    /* Of some rows the logits, of others none; then a prompt in between, which has the same
     * scratch; and each over the ends of a window and a page. */
    for (uint32_t k = 0; k < 6; k++) {
        uint32_t n = 1 + below(s.n);
        draw(&s, n, which, tokens);
        step_both(&s, which, tokens, n, k == 1 ? 0 : below(1u << 30));
        if (k == 3) {
            struct engine_seq *seq = new_seq(s.engines[BY_GRAPH], 9);
            assert_int_equal(
                engine_prefill(s.engines[BY_GRAPH], seq, tokens, n < 9 ? n : 9, NULL, NULL, NULL),
                STATUS_OK);
            engine_seq_free(seq);
        }
    }
    check_counts(&s);
    compare_memory(&s);
    close_sides(&s);
}

/* Sequences that begin with a step, in slots that others had; two of them go over the ends of a
 * heavy window (128) and a page (256). */
static void test_from_nothing(void **state)
{
    struct sides s = open_sides(4);
    uint32_t tokens[MAX_ROWS];
    static const uint32_t which[] = {2, 0, 3, 1}, from[] = {1, 8, 12, 14};
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < s.n; i++) {
            for (int side = 0; side < 2; side++) {
                engine_seq_free(s.seqs[side][i]);
                s.seqs[side][i] = i < 2 ? new_seq(s.engines[side], 20)
                                        : give(s.engines[side], &images[from[round + i - 1]]);
            }
        }
        for (uint32_t k = 0; k < 6; k++) {
            for (uint32_t i = 0; i < s.n; i++) {
                tokens[i] = below(engine_info(s.engines[0])->vocab_size);
            }
            step_both(&s, which, tokens, k == 2 ? 3 : 4, UINT64_MAX);
        }
        compare_memory(&s);
    }
    close_sides(&s);
}

/* Which sizes there are: every one, then never more filled up with than an eighth. */
static void test_sizes(void **state)
{
    static const uint32_t most[] = {0, 1, 2, 31, 32, 33, 34, 100, 1024, 65536, UINT32_MAX};
    for (size_t k = 0; k < sizeof(most) / sizeof(most[0]); k++) {
        uint32_t sizes[GRAPHS_MAX], n = graphs_sizes(most[k], sizes);
        assert_true(n <= GRAPHS_MAX && n == graphs_sizes(most[k], NULL));
        assert_true(n == 0 ? most[k] == 0 : sizes[n - 1] == most[k]);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t before = i ? sizes[i - 1] : 0;
            assert_true(sizes[i] > before && (i >= 32 || sizes[i] == i + 1));
            assert_true((uint64_t)8 * (sizes[i] - before - 1) <= before);
        }
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 2;
    }
    model = argv[1];
    device = argv[2];
    if (argc > 3) {
        n_rows = (uint32_t)atoi(argv[3]);
    }
    for (int i = 4; i < argc; i++) {
        tuned = tuned || strcmp(argv[i], "tuned") == 0;
        early = early || strcmp(argv[i], "early") == 0;
        wished = strchr(argv[i], '=') ? argv[i] : wished;
    }
    if (n_rows < 1 || n_rows > MAX_ROWS) {
        return 2;
    }
    const struct CMUnitTest sizes[] = {cmocka_unit_test(test_sizes)};
    int failed = cmocka_run_group_tests(sizes, NULL, NULL);
    struct registry_choice choice;
    struct error err;
    if (!failed && registry_find(device, &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    if (failed) {
        return failed;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_size),
        cmocka_unit_test(test_from_nothing),
    };
    return cmocka_run_group_tests(tests, make_images, free_images);
}
