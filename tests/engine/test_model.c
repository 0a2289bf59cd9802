/* test_model GOLDEN MODEL [cpu | apart | apart:N | cuda:0 | cuda:0,1 [PATTERN]]: the whole graph
 * through engine.h.
 *
 * Against logits of HF transformers and of the quantised reference (tests/golden, made by
 * tests/oracle/make_golden.py), and bit for bit against itself: chunkings, batches, threads, forks,
 * and a hand-off in the middle, which must all be as if nothing had happened. The same with pages
 * and slots in memory apart from the host's, as if the CPU's were, of one device or of each of a
 * group, and on a GPU or a group of them (77 without), whose bits are those of as many CPU devices.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/mem.h"
#include "engine/accept.h"
#include "engine/engine.h"
#include "engine/kernels.h"
#include "kernels/registry.h"

enum { CONTEXT = 512, MAX_VOCAB = 8192 };

static const char *golden, *tiny;
static const char *tested = "cpu"; /* the device */
static char peer[16] = "cpu";      /* as many CPU devices in one memory: the same bits */
static bool is_apart;              /* `tested`, though the CPU's memory is not */

/* A GPU gives the CPU's bits with its reference variants, where they are allowed and asked for; the
 * CPU has none of these. */
static void wish(const char *device)
{
    static const char *all[] = {"all"};
    static const char *references[] = {
        "mhc=reference",     "project=reference", "compress=reference", "indexer=reference",
        "topk=reference",    "attend=reference",  "oproj=reference",    "route=reference",
        "experts=reference", "head=reference"};
    size_t n = strncmp(device, "cuda", 4) == 0 ? sizeof(references) / sizeof(references[0]) : 0;
    struct error err;
    if (engine_kernels_wish((char *const *)(uintptr_t)references, n, (char *const *)(uintptr_t)all,
                            1, &err)) {
        fail_msg("%s", err.text);
    }
}

static struct engine *open_engine(const char *dir, bool exact, const char *device, uint32_t threads)
{
    bool apart = is_apart && device == tested;
    struct engine_options options = {.kind = "model",
                                     .model_dir = dir,
                                     .device = device,
                                     .exact = exact,
                                     .n_threads = threads,
                                     .apart = apart,
                                     .sends = true,
                                     .max_sequences = 6,
                                     .n_pages = 12,
                                     .max_context_tokens = CONTEXT,
                                     .max_chunk_tokens = 300,
                                     .max_batch_rows = 6};
    struct engine *engine;
    struct error err;
    wish(device);
    if (engine_open(&options, NULL, &engine, &err)) {
        fail_msg("%s: %s", dir, err.text);
    }
    assert_true(engine_info(engine)->vocab_size <= MAX_VOCAB);
    return engine;
}

static struct engine_seq *new_seq(struct engine *engine, uint32_t n_tokens)
{
    struct engine_seq *seq;
    assert_int_equal(engine_seq_create(engine, 1, &seq), STATUS_OK);
    assert_int_equal(engine_seq_reserve(seq, n_tokens), STATUS_OK);
    return seq;
}

/* ids in pieces of `chunk` (0: sizes drawn from `seed`); logits after the last. */
static void prefill(struct engine *engine, struct engine_seq *seq, const uint32_t *ids, uint32_t n,
                    uint32_t chunk, unsigned seed, float *ret_logits)
{
    struct engine_row row = {.logits = ret_logits};
    for (uint32_t at = 0; at < n;) {
        uint32_t m = chunk ? chunk : 1 + (uint32_t)rand_r(&seed) % 70;
        m = m < n - at ? m : n - at;
        assert_int_equal(
            engine_prefill(engine, seq, ids + at, m, at + m == n ? &row : NULL, NULL, NULL),
            STATUS_OK);
        at += m;
    }
}

static void step(struct engine *engine, struct engine_seq *seq, uint32_t token, float *ret_logits)
{
    struct engine_row row = {.seq = seq, .token = token, .logits = ret_logits};
    assert_int_equal(engine_step(engine, &row, 1), STATUS_OK);
}

/* The page as it lies where it was computed, which is also what is there to be sent. */
static void read_page(struct engine *engine, const struct engine_seq *seq, uint32_t page_i,
                      uint8_t *ret_bytes)
{
    const struct engine_info *info = engine_info(engine);
    uint32_t page = engine_seq_page(seq, page_i);
    assert_int_equal(engine_page_read(engine, page, ret_bytes), STATUS_OK);
    assert_memory_equal(ret_bytes, info->pool_base + page * info->page_bytes, info->page_bytes);
}

static void random_ids(uint32_t *ids, uint32_t n, uint32_t vocab, unsigned seed)
{
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint32_t)rand_r(&seed) % vocab;
    }
}

/* --- against others */

struct vectors {
    struct json *root;
    uint32_t ids[CONTEXT], n;
};

static struct vectors load_vectors(const char *name)
{
    char path[512];
    snprintf(path, sizeof(path), "%s/%s.json", golden, name);
    struct vectors v = {0};
    struct error err;
    if (json_parse_file(path, NULL, &v.root, &err)) {
        fail_msg("%s", err.text);
    }
    const struct json *ids = json_get(v.root, "ids");
    v.n = (uint32_t)json_array_n(ids);
    assert_in_range(v.n, 1, CONTEXT);
    for (uint32_t i = 0; i < v.n; i++) {
        int64_t id;
        assert_true(json_int(json_array_at(ids, i), &id));
        v.ids[i] = (uint32_t)id;
    }
    return v;
}

/* Largest difference of row i of `key` to logits; the row's position in ret_row, its range in
 * ret_range. */
static double distance(const struct vectors *v, const char *key, size_t i, const float *logits,
                       int64_t *ret_row, double *ret_range)
{
    const struct json *row = json_array_at(json_get(v->root, key), i);
    double most = 0.0, low = INFINITY, high = -INFINITY;
    size_t n = json_array_n(row);
    assert_true(n > 0 && json_int(json_array_at(json_get(v->root, "rows"), i), ret_row));
    for (size_t k = 0; k < n; k++) {
        double want;
        assert_true(json_number(json_array_at(row, k), &want));
        most = fmax(most, fabs(want - (double)logits[k]));
        low = fmin(low, want);
        high = fmax(high, want);
    }
    *ret_range = high - low;
    return most;
}

static void test_exact_golden(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    struct vectors v = load_vectors("toy");
    const char *const devices[] = {tested, "cpu:2"};
    for (int k = 0; k < 2; k++) {
        struct engine *engine = open_engine(dir, true, devices[k], 2);
        float logits[MAX_VOCAB];
        size_t n_rows = json_array_n(json_get(v.root, "rows"));
        assert_true(n_rows >= 4);
        for (size_t i = 0; i < n_rows; i++) {
            int64_t row;
            double range;
            distance(&v, "logits", i, logits, &row, &range);
            struct engine_seq *seq = new_seq(engine, v.n);
            prefill(engine, seq, v.ids, (uint32_t)row + 1, 11, 0, logits);
            assert_true(distance(&v, "logits", i, logits, &row, &range) < 2e-4 * range);
            engine_seq_free(seq);
        }
        engine_close(engine);
    }
    json_free(v.root);
}

/* Rows equal to 2 % of the distance between exact and quantised arithmetic: at least 40 %. */
static void test_quantised_golden(void **state)
{
    char dir[512];
    if (strcmp(peer, "cpu") != 0) {
        skip(); /* it has one output group, which no group of devices can share */
    }
    snprintf(dir, sizeof(dir), "%s/toy_fp8", golden);
    struct vectors v = load_vectors("toy_fp8");
    struct engine *engine = open_engine(dir, false, tested, 2);
    size_t n_rows = json_array_n(json_get(v.root, "rows")), n_exact = 0, row_i = 0;
    float logits[MAX_VOCAB];
    struct engine_seq *seq = new_seq(engine, v.n);
    for (uint32_t t = 0; t < v.n; t++) {
        step(engine, seq, v.ids[t], logits);
        int64_t row;
        double range;
        if (row_i >= n_rows) {
            break;
        }
        double quantised = distance(&v, "logits", row_i, logits, &row, &range);
        if (row == (int64_t)t) {
            double exact = distance(&v, "exact", row_i, logits, &row, &range);
            assert_true(exact > 0.0);
            n_exact += quantised <= 0.02 * exact;
            row_i++;
        }
    }
    assert_int_equal(row_i, n_rows);
    if (n_exact * 10 < n_rows * 4) {
        fail_msg("%zu of %zu rows are exact", n_exact, n_rows);
    }
    engine_seq_free(seq);
    engine_close(engine);
    json_free(v.root);
}

/* --- against itself: the toy in exact arithmetic at length, the bundled model briefly */

static void check_chunks(const char *dir, bool exact, uint32_t n, unsigned n_cuts)
{
    struct engine *engine = open_engine(dir, exact, tested, 2);
    struct engine *single = open_engine(dir, exact, peer, 1);
    const struct engine_info *info = engine_info(engine);
    size_t bytes = info->vocab_size * sizeof(float);
    float *want = mem_alloc(bytes), *got = mem_alloc(bytes);
    uint8_t *tail = mem_alloc(info->tail_bytes), *tail2 = mem_alloc(info->tail_bytes);
    uint8_t *page = mem_alloc(info->page_bytes), *page2 = mem_alloc(info->page_bytes);
    uint32_t ids[CONTEXT];
    random_ids(ids, n, info->vocab_size, 1);
    struct engine_seq *whole = new_seq(engine, n);
    prefill(engine, whole, ids, n, n, 0, want);
    assert_int_equal(engine_tail_write(engine, whole, tail, info->tail_bytes), STATUS_OK);
    for (unsigned k = 0; k < n_cuts; k++) {
        struct engine *other = k + 1 == n_cuts ? single : engine;
        struct engine_seq *seq = new_seq(other, n);
        prefill(other, seq, ids, n, k == 1 ? 127 : 0, k, got);
        assert_memory_equal(got, want, bytes);
        assert_int_equal(engine_tail_bytes(other, n), engine_tail_bytes(engine, n));
        assert_int_equal(engine_tail_write(other, seq, tail2, info->tail_bytes), STATUS_OK);
        assert_memory_equal(tail2, tail, engine_tail_bytes(engine, n));
        for (uint32_t p = 0; p < engine_seq_n_pages(seq); p++) {
            read_page(other, seq, p, page2);
            read_page(engine, whole, p, page);
            assert_memory_equal(page2, page, info->page_bytes);
        }
        engine_seq_free(seq);
    }
    engine_seq_free(whole);
    void *all[] = {want, got, tail, tail2, page, page2};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    engine_close(engine);
    engine_close(single);
}

static void test_chunks(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    check_chunks(dir, true, 290, 5);
    check_chunks(tiny, false, 140, 1);
}

/* Steps of one sequence are the rows of a prompt; rows of a batch do not see each other. */
static void test_batch(void **state)
{
    struct engine *engine = open_engine(tiny, false, tested, 2);
    uint32_t vocab = engine_info(engine)->vocab_size, ids[5][CONTEXT],
             lengths[5] = {3, 124, 1, 9, 20};
    size_t bytes = vocab * sizeof(float);
    float *alone = mem_alloc(5 * bytes), *batch = mem_alloc(5 * bytes);
    struct engine_seq *seqs[5];
    for (uint32_t s = 0; s < 5; s++) {
        random_ids(ids[s], lengths[s] + 8, vocab, 10 + s);
        struct engine_seq *seq = new_seq(engine, lengths[s] + 8);
        prefill(engine, seq, ids[s], lengths[s] + 8, 300, 0, alone + s * vocab);
        engine_seq_free(seq);
        seqs[s] = new_seq(engine, lengths[s] + 8);
        prefill(engine, seqs[s], ids[s], lengths[s], 50, 0, batch);
    }
    for (uint32_t i = 0; i < 8; i++) {
        struct engine_row rows[5];
        for (uint32_t k = 0; k < 5; k++) {
            uint32_t s = (k * 2 + i) % 5; /* another order each time */
            rows[k] = (struct engine_row){
                .seq = seqs[s], .token = ids[s][lengths[s] + i], .logits = batch + s * vocab};
        }
        assert_int_equal(engine_step(engine, rows, 5), STATUS_OK);
    }
    assert_memory_equal(batch, alone, 5 * bytes);
    for (uint32_t s = 0; s < 5; s++) {
        engine_seq_free(seqs[s]);
    }
    mem_free(alone);
    mem_free(batch);
    engine_close(engine);
}

/* The pages of n tokens as one parcel, in pieces that part each page where it is no multiple of 16:
 * damaged first, which must be noticed, then as they are. */
static void accept_pages(struct engine *to, const struct engine_seq *b, struct engine *from,
                         const struct engine_seq *a, uint32_t n, uint64_t transfer)
{
    const struct engine_info *info = engine_info(from);
    uint32_t n_pages = engine_pages_for(from, n);
    size_t cut = transfer % 2 ? info->page_bytes / 3 / 8 * 8 : info->page_bytes / 2;
    uint8_t *landed = mem_try_aligned(4096, n_pages * info->page_bytes);
    assert_non_null(landed);
    struct parcel_piece *pieces = mem_array(2 * (size_t)n_pages, sizeof(*pieces));
    struct error err;
    bool shared = transfer % 3 != 0;
    assert_true(!shared || !engine_share(to, landed, n_pages * info->page_bytes, &err));
    for (uint32_t p = 0; p < n_pages; p++) {
        uint8_t *src = landed + p * info->page_bytes;
        uint8_t *dst = engine_page_address(to, engine_seq_page(b, p));
        memcpy(src, info->pool_base + engine_seq_page(a, p) * info->page_bytes, info->page_bytes);
        pieces[2 * p] = (struct parcel_piece){dst, src, cut};
        pieces[2 * p + 1] = (struct parcel_piece){dst + cut, src + cut, info->page_bytes - cut};
    }
    uint64_t sum = accept_parcel_checksum(transfer, 5, pieces, 2 * n_pages);
    landed[cut + 3] ^= 1;
    assert_int_equal(engine_accept_parcel(to, transfer, 5, pieces, 2 * n_pages, sum),
                     STATUS_CHECKSUM);
    landed[cut + 3] ^= 1;
    assert_int_equal(engine_accept_parcel(to, transfer, 6, pieces, 2 * n_pages, sum),
                     STATUS_CHECKSUM);
    assert_int_equal(engine_accept_parcel(to, transfer, 5, pieces, 2 * n_pages, sum), STATUS_OK);
    if (shared) {
        engine_unshare(to, landed);
    }
    mem_free(pieces);
    mem_free(landed);
}

/* After n tokens the sequence moves to another engine through page images and a tail image. */
static void check_hand_off_between(const char *dir, bool exact, const char *device_from,
                                   const char *device_to, const uint32_t *lengths, size_t n_lengths)
{
    struct engine *from = open_engine(dir, exact, device_from, 2);
    struct engine *to = open_engine(dir, exact, device_to, 1);
    const struct engine_info *info = engine_info(from);
    assert_memory_equal(info->fingerprint, engine_info(to)->fingerprint, ENGINE_FINGERPRINT_BYTES);
    size_t bytes = info->vocab_size * sizeof(float);
    float *want = mem_alloc(bytes), *got = mem_alloc(bytes);
    uint8_t *tail = mem_alloc(info->tail_bytes);
    uint32_t ids[CONTEXT];
    random_ids(ids, CONTEXT, info->vocab_size, 3);
    for (size_t k = 0; k < n_lengths; k++) {
        uint32_t n = lengths[k];
        struct engine_seq *a = new_seq(from, n + 6), *b = new_seq(to, n + 6);
        prefill(from, a, ids, n, 200, 0, want);
        memset(tail, 0xa5, info->tail_bytes);
        assert_int_equal(engine_tail_write(from, a, tail, info->tail_bytes), STATUS_OK);
        accept_pages(to, b, from, a, n, 1000 + k);
        assert_int_equal(engine_tail_read(to, b, n, tail, engine_tail_bytes(from, n)), STATUS_OK);
        assert_int_equal(engine_seq_n_tokens(b), n);
        for (uint32_t i = 0; i < 6; i++) {
            step(from, a, ids[n + i], want);
            step(to, b, ids[n + i], got);
            assert_memory_equal(got, want, bytes);
        }
        engine_seq_free(a);
        engine_seq_free(b);
    }
    mem_free(want);
    mem_free(got);
    mem_free(tail);
    engine_close(from);
    engine_close(to);
}

static void check_hand_off(const char *dir, bool exact, const uint32_t *lengths, size_t n_lengths)
{
    check_hand_off_between(dir, exact, tested, tested, lengths, n_lengths);
    if (is_apart || strcmp(tested, "cpu") != 0) {
        check_hand_off_between(dir, exact, tested, peer, lengths, n_lengths);
        check_hand_off_between(dir, exact, peer, tested, lengths, n_lengths);
    }
}

static void test_hand_off(void **state)
{
    static const uint32_t lengths[] = {1, 2, 37, 128, 255, 256, 258, 387};
    static const uint32_t few[] = {3, 130};
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    check_hand_off(dir, true, lengths, sizeof(lengths) / sizeof(lengths[0]));
    check_hand_off(tiny, false, few, sizeof(few) / sizeof(few[0]));
}

static void test_fork_and_draw(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    struct engine *engine = open_engine(dir, true, tested, 2);
    uint32_t vocab = engine_info(engine)->vocab_size, ids[CONTEXT], n = 261;
    float *logits = mem_alloc(vocab * sizeof(float)), *other = mem_alloc(vocab * sizeof(float));
    random_ids(ids, CONTEXT, vocab, 4);
    struct engine_seq *seq = new_seq(engine, n + 4), *copy;
    struct engine_sampling greedy = {.top_p = 1.0f, .repetition_penalty = 1.0f};
    struct engine_row row = {.logits = logits, .sampling = &greedy};
    assert_int_equal(engine_prefill(engine, seq, ids, n, &row, NULL, NULL), STATUS_OK);
    for (uint32_t i = 0; i < vocab; i++) {
        assert_true(logits[i] < logits[row.draw.id] ||
                    (logits[i] == logits[row.draw.id] && i >= row.draw.id));
    }
    struct engine_draw again;
    assert_int_equal(engine_draw_again(engine, seq, &greedy, 0, &again), STATUS_OK);
    assert_int_equal(again.id, row.draw.id);
    assert_int_equal(engine_seq_fork(seq, 2, &copy), STATUS_OK);
    assert_int_equal(engine_seq_reserve(copy, n + 4), STATUS_OK);
    for (uint32_t i = 0; i < 4; i++) {
        step(engine, seq, ids[n + i], logits);
    }
    for (uint32_t i = 0; i < 4; i++) {
        step(engine, copy, ids[n + i], other);
    }
    assert_memory_equal(logits, other, vocab * sizeof(float));
    engine_seq_free(seq);
    engine_seq_free(copy);
    mem_free(logits);
    mem_free(other);
    engine_close(engine);
}

enum { MAX_PIECES = 16 };

struct pieces_seen {
    const struct engine_info *info;
    const struct engine_seq *seq;
    uint32_t n_pages, n;
    size_t bytes[MAX_PIECES];
    uint8_t *copies[MAX_PIECES]; /* of every page as it was then */
};

static uint8_t *pages_copy(const struct pieces_seen *seen)
{
    size_t page_bytes = seen->info->page_bytes;
    uint8_t *copy = mem_alloc(seen->n_pages * page_bytes);
    for (uint32_t i = 0; i < seen->n_pages; i++) {
        uint32_t page = engine_seq_page(seen->seq, i);
        memcpy(copy + i * page_bytes, seen->info->pool_base + page * page_bytes, page_bytes);
    }
    return copy;
}

static void pieces_ready(void *cookie, size_t page_bytes)
{
    struct pieces_seen *seen = cookie;
    assert_true(seen->n < MAX_PIECES);
    seen->bytes[seen->n] = page_bytes;
    seen->copies[seen->n++] = pages_copy(seen);
}

/* What was said to be final before the chunk's end is what stands there after it; the rest was not
 * yet. The chunk completes one page that an earlier one began, and one of its own. */
static void test_pieces(void **state)
{
    struct engine *engine = open_engine(tiny, false, tested, 1);
    const struct engine_info *info = engine_info(engine);
    uint32_t n = 2 * info->page_tokens, n_before = 250;
    struct engine_seq *seq = new_seq(engine, n);
    struct pieces_seen seen = {.info = info, .seq = seq, .n_pages = 2};
    struct engine_pieces pieces = {4, pieces_ready, &seen};
    uint32_t *ids = mem_array(n, sizeof(*ids));
    random_ids(ids, n, info->vocab_size, 77);
    assert_int_equal(engine_prefill(engine, seq, ids, n_before, NULL, NULL, NULL), STATUS_OK);
    assert_int_equal(engine_prefill(engine, seq, ids + n_before, n - n_before, NULL, NULL, &pieces),
                     STATUS_OK);
    assert_in_range(seen.n, 1, 4);
    uint8_t *whole = pages_copy(&seen), *page = mem_alloc(info->page_bytes);
    for (uint32_t p = 0; p < seen.n_pages; p++) {
        read_page(engine, seq, p, page);
        assert_memory_equal(whole + p * info->page_bytes, page, info->page_bytes);
    }
    mem_free(page);
    size_t page_bytes = info->page_bytes;
    for (uint32_t k = 0; k < seen.n; k++) {
        size_t before = k ? seen.bytes[k - 1] : 0;
        assert_true(seen.bytes[k] < page_bytes && seen.bytes[k] - before >= page_bytes / 4);
        for (uint32_t i = 0; i < seen.n_pages; i++) {
            const uint8_t *then = seen.copies[k] + i * page_bytes;
            const uint8_t *now = whole + i * page_bytes;
            assert_memory_equal(then, now, seen.bytes[k]);
            assert_memory_not_equal(then, now, page_bytes);
        }
        mem_free(seen.copies[k]);
    }
    mem_free(whole);
    mem_free(ids);
    engine_seq_free(seq);
    engine_close(engine);
}

static void test_cancel(void **state)
{
    struct engine *engine = open_engine(tiny, false, tested, 1);
    struct engine_seq *seq = new_seq(engine, 4);
    _Atomic bool cancel = true;
    uint32_t ids[4] = {1, 2, 3, 4};
    assert_int_equal(engine_prefill(engine, seq, ids, 4, NULL, &cancel, NULL), STATUS_CANCELLED);
    engine_seq_free(seq);
    engine_close(engine);
}

static void test_refusals(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    struct engine_options options = {.kind = "model", .model_dir = dir, .device = "cpu"};
    struct engine *engine;
    struct error err;
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_INVALID);
    assert_non_null(strstr(err.text, "exact"));
    options.exact = true;
    options.device = "cpu:3";
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_INVALID);
    assert_non_null(strstr(err.text, "3 devices"));
    assert_non_null(strstr(err.text, "what would do: 1, 2"));
    options.device = "cuda:0,0,1"; /* wherever this runs */
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_INVALID);
    assert_non_null(strstr(err.text, "all different"));
    options.device = "cuda:0,";
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_INVALID);
    options.device = "cuda:250,251"; /* GPUs that no host has */
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_UNSUPPORTED);
    options.device = "cpu";
    options.model_dir = golden;
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_NOT_FOUND);
}

/* A slot that another sequence had is one at 0 tokens again, and pages that it had are no one's. */
static void test_reuse(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    struct engine *engine = open_engine(dir, true, tested, 2);
    uint32_t vocab = engine_info(engine)->vocab_size, ids[CONTEXT], n = 270;
    size_t bytes = vocab * sizeof(float);
    float *want = mem_alloc(bytes), *got = mem_alloc(bytes);
    random_ids(ids, CONTEXT, vocab, 9);
    struct engine_seq *seq = new_seq(engine, n);
    prefill(engine, seq, ids, n, 0, 5, want);
    engine_seq_free(seq);
    for (uint32_t i = 0; i < 8; i++) { /* more than there are slots */
        seq = new_seq(engine, CONTEXT);
        prefill(engine, seq, ids + i, 1 + 40 * i, 200, 0, got);
        engine_seq_free(seq);
    }
    struct engine_seq *others[5];
    for (int i = 0; i < 5; i++) {
        others[i] = new_seq(engine, 3);
        prefill(engine, others[i], ids, 3, 0, 1, got);
    }
    seq = new_seq(engine, n); /* the slot that is left; begun by steps */
    for (uint32_t i = 0; i < n; i++) {
        step(engine, seq, ids[i], got);
    }
    assert_memory_equal(got, want, bytes);
    engine_seq_free(seq);
    for (int i = 0; i < 5; i++) {
        engine_seq_free(others[i]);
    }
    mem_free(want);
    mem_free(got);
    engine_close(engine);
}

/* Without `sends` there is nothing to send from apart, and all else goes on. */
static void test_nothing_sent(void **state)
{
    char dir[512];
    snprintf(dir, sizeof(dir), "%s/toy", golden);
    struct engine_options options = {.kind = "model",
                                     .model_dir = dir,
                                     .exact = true,
                                     .device = tested,
                                     .apart = is_apart,
                                     .n_pages = 2,
                                     .max_context_tokens = CONTEXT,
                                     .max_chunk_tokens = 300};
    struct engine *engine;
    struct error err;
    wish(tested);
    assert_int_equal(engine_open(&options, NULL, &engine, &err), STATUS_OK);
    const struct engine_info *info = engine_info(engine);
    bool apart = is_apart || strncmp(tested, "cuda", 4) == 0;
    assert_true(apart == (info->pool_base == NULL));
    struct engine_seq *seq = new_seq(engine, 258);
    uint32_t ids[258];
    uint8_t *tail = mem_alloc(info->tail_bytes), *page = mem_alloc(info->page_bytes);
    random_ids(ids, 258, info->vocab_size, 8);
    assert_int_equal(engine_prefill(engine, seq, ids, 258, NULL, NULL, NULL), STATUS_OK);
    assert_int_equal(engine_tail_write(engine, seq, tail, info->tail_bytes), STATUS_OK);
    assert_int_equal(engine_page_read(engine, engine_seq_page(seq, 1), page), STATUS_OK);
    mem_free(tail);
    mem_free(page);
    engine_seq_free(seq);
    engine_close(engine);
}

static bool have_device(void)
{
    struct registry_choice choice;
    struct error err;
    if (strncmp(tested, "cpu", 3) != 0 && registry_find(tested, &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return false;
    }
    return true;
}

/* "apart:2": cpu:2 apart. The peer of "cuda:0,1", and of it, is cpu:2. */
static void choose(const char *text)
{
    static char apart[16];
    unsigned n = 1;
    is_apart = strncmp(text, "apart", 5) == 0;
    if (is_apart) {
        snprintf(apart, sizeof(apart), "cpu%.8s", text + 5);
        n = text[5] ? (unsigned)atoi(text + 6) : 1;
    }
    tested = is_apart ? apart : text;
    if (strncmp(text, "cpu:", 4) == 0) {
        n = (unsigned)atoi(text + 4);
    }
    for (const char *c = text; *c; c++) {
        n += *c == ',';
    }
    snprintf(peer, sizeof(peer), n > 1 ? "cpu:%u" : "cpu", n);
}

int main(int argc, char **argv)
{
    if (argc < 3 || argc > 5) {
        return 2;
    }
    golden = argv[1];
    tiny = argv[2];
    choose(argc > 3 ? argv[3] : "cpu");
    if (argc > 4) {
        cmocka_set_test_filter(argv[4]); /* those that match, as 'test_*off' */
    }
    if (!have_device()) {
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exact_golden), cmocka_unit_test(test_quantised_golden),
        cmocka_unit_test(test_chunks),       cmocka_unit_test(test_batch),
        cmocka_unit_test(test_hand_off),     cmocka_unit_test(test_fork_and_draw),
        cmocka_unit_test(test_pieces),       cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_reuse),        cmocka_unit_test(test_nothing_sent),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
