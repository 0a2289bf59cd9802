/* The choice on tensor cores (topk=tensor, topk=scaled), as the registry installs it, against the
 * CPU's: the same entries, whatever ties.
 *
 * Pages hold random keys, e2m1 with scales that differ by less than what leaves every sum exact,
 * and lie in any order; queries are of the same kind. Rows see from no entry to more than a block
 * keeps in registers, alone and as a chunk, in batches of 1 to 33; every batch gives the bits of
 * the call with all rows, and leaves what is behind its rows alone.
 *
 * test_topk cuda:N [tiny|small|all [topk=VARIANT]]. small: shorter sequences, for where a GPU is
 * emulated. What it refuses is checked without a device too. 77 without it.
 */
#include "kernels/cuda/tuned.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/small.h"

enum { PAGE_ENTRIES = 32, MOST_ROWS = 33, SPARE = 32 };

struct shape {
    uint32_t heads, channels, topk, most_entries;
};

static const struct shape shapes[] = {
    {64, 128, 512, 2100}, {64, 128, 512, 9000}, {3, 64, 3, 300},  {17, 128, 16, 700},
    {64, 32, 8, 300},     {8, 64, 5, 400},      {1, 32, 1, 9000}, {2, 32, 600, 33000},
};

/* The same on both sides. */
struct call {
    const float *iq[2], *iw[2];
    const uint8_t *pool[2];
    struct ops_layer layer;
    size_t page_bytes;
    uint32_t *pages[MOST_ROWS]; /* of each row's sequence */
    uint32_t positions[MOST_ROWS];
};

/* e2m1 times a power of two: of each 32 channels one. */
static void give_queries(size_t n, const float *ret[2])
{
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    float *x = mem_array(n, sizeof(*x));
    float scale = 1.0f;
    for (size_t i = 0; i < n; i++) {
        scale = i % 32 ? scale : ldexpf(1.0f, (int)below(&seed, 5) - 2);
        x[i] = values[below(&seed, 8)] * scale * (below(&seed, 2) ? 1.0f : -1.0f);
    }
    const void *given[2];
    give(x, n * sizeof(*x), given);
    ret[0] = given[0];
    ret[1] = given[1];
    mem_free(x);
}

static void make_pool(const struct shape *s, struct call *c, const struct ops_dims *d)
{
    const uint32_t a_row = s->most_entries / PAGE_ENTRIES + 1, n_pages = MOST_ROWS * a_row;
    const size_t key = formats_key_bytes(d->entry_kind, d->index_dim);
    const size_t scale = formats_key_scale_bytes(d->entry_kind, d->index_dim);
    struct ops_place *p = &c->layer.place;
    *p = (struct ops_place){.ratio = OPS_SPARSE_RATIO, .entries_a_page = PAGE_ENTRIES};
    p->key = 16;
    p->key_scale = p->key + PAGE_ENTRIES * key;
    c->page_bytes = p->key_scale + PAGE_ENTRIES * scale + 16;
    uint8_t *pool = mem_alloc(n_pages * c->page_bytes);
    for (size_t i = 0; i < n_pages * c->page_bytes; i++) {
        size_t at = i % c->page_bytes;
        bool is_scale = at >= p->key_scale && at < p->key_scale + PAGE_ENTRIES * scale;
        pool[i] = is_scale ? (uint8_t)(122 + below(&seed, 6)) : (uint8_t)next_random(&seed);
    }
    const void *given[2];
    give(pool, n_pages * c->page_bytes, given);
    c->pool[0] = given[0];
    c->pool[1] = given[1];
    mem_free(pool);
    uint32_t *order = mem_array(n_pages, sizeof(*order));
    for (uint32_t i = 0; i < n_pages; i++) {
        uint32_t j = below(&seed, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t r = 0; r < MOST_ROWS; r++) {
        c->pages[r] = mem_array(a_row, sizeof(uint32_t));
        memcpy(c->pages[r], order + r * a_row, a_row * sizeof(uint32_t));
    }
    mem_free(order);
}

/* How many entries each row sees: around every edge first, then anything. */
static void choose_lengths(const struct shape *s, struct call *c)
{
    const uint32_t k = s->topk, edges[] = {s->most_entries,
                                           k + 1,
                                           k,
                                           0,
                                           1,
                                           k + 2,
                                           16,
                                           17,
                                           127,
                                           128,
                                           129,
                                           255,
                                           256,
                                           257,
                                           2048,
                                           2049};
    for (uint32_t r = 0; r < MOST_ROWS; r++) {
        uint32_t n =
            r < sizeof(edges) / sizeof(edges[0]) ? edges[r] : below(&seed, s->most_entries);
        n = n > s->most_entries ? s->most_entries : n;
        if (s->most_entries > 2100 && r > 2 && n > 600) {
            n = 600;
        }
        c->positions[r] = n * OPS_SPARSE_RATIO + below(&seed, OPS_SPARSE_RATIO);
        c->positions[r] -= c->positions[r] && n == s->most_entries ? 1 : 0;
    }
}

/* Rows first .. first + n - 1: counts, then indexes, then SPARE words that nobody may write. */
static uint32_t *run(const struct shape *s, const struct call *c, int i, uint32_t first, uint32_t n)
{
    const struct side *side = &sides[i];
    struct ops_seq seqs[MOST_ROWS];
    uint32_t tokens[MOST_ROWS] = {0}, seq_of[MOST_ROWS];
    for (uint32_t r = 0; r < n; r++) {
        seq_of[r] = r;
        seqs[r] = (struct ops_seq){.pages = c->pages[first + r],
                                   .slot = 0,
                                   .first_row = r,
                                   .n_rows = 1,
                                   .position = c->positions[first + r]};
    }
    const struct ops_rows rows = {.n_rows = n,
                                  .n_seqs = n,
                                  .tokens = tokens,
                                  .positions = c->positions + first,
                                  .seq_of = seq_of,
                                  .seqs = seqs};
    const size_t n_words = n + (size_t)n * s->topk + SPARE;
    uint32_t *there = need(side, side->ops->alloc(side->dev, n_words * 4));
    poison(side, there, n_words);
    struct ops_selection selection = {.n = there, .index = there + n};
    const struct ops_kv kv = {.pool = (uint8_t *)(uintptr_t)c->pool[i],
                              .page_bytes = c->page_bytes};
    side->ops->begin(side->dev, &rows);
    side->ops->topk(side->dev, &rows, &c->layer, c->iq[i] + (size_t)first * s->heads * s->channels,
                    c->iw[i] + (size_t)first * s->heads, &kv, &selection);
    return fetch(side, there, n_words);
}

/* What row r of a call of n chose, and how many words that is. */
static const uint32_t *row_of(const struct shape *s, const uint32_t *got, uint32_t n, uint32_t r)
{
    return got + n + (size_t)r * s->topk;
}

static void compare_rows(const struct shape *s, const char *what, const uint32_t *want,
                         uint32_t n_want, uint32_t first, const uint32_t *got, uint32_t n)
{
    for (uint32_t r = 0; r < n; r++) {
        uint32_t chosen = want[first + r];
        n_compared++;
        if (got[r] != chosen || memcmp(row_of(s, want, n_want, first + r), row_of(s, got, n, r),
                                       chosen * sizeof(uint32_t))) {
            n_failed++;
            printf("DIFFERS %s, %s: row %u of %u from %u, %u entries chosen, should be %u\n", where,
                   what, r, n, first, got[r], chosen);
        }
    }
    for (uint32_t i = 0; i < SPARE; i++) {
        if (got[n + (size_t)n * s->topk + i] != 0xffffffffu) {
            n_failed++;
            printf("WRITTEN %s, %s: behind the %u rows\n", where, what, n);
            return;
        }
    }
}

static void check(const struct shape *s)
{
    struct ops_dims d = small_dims(256);
    struct error err = {""};
    d.index_heads = s->heads;
    d.index_dim = s->channels;
    d.index_topk = s->topk;
    d.head_dim = 80;
    d.rope_dim = 16;
    d.entry_kind = FORMATS_ENTRY_PACKED;
    const struct ops_limits limits = {.n_rows = MOST_ROWS,
                                      .n_tokens = (s->most_entries + 1) * OPS_SPARSE_RATIO,
                                      .page_tokens = PAGE_ENTRIES * OPS_SPARSE_RATIO,
                                      .n_threads = 2,
                                      .early_launches = early_launches()};
    struct call c = {.page_bytes = 0};
    snprintf(where, sizeof(where), "%u heads of %u, best %u of %u", s->heads, s->channels, s->topk,
             s->most_entries);
    for (int i = 0; i < 2; i++) {
        if (sides[i].ops->open(&d, &limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
    }
    make_pool(s, &c, &d);
    choose_lengths(s, &c);
    give_queries((size_t)MOST_ROWS * s->heads * s->channels, c.iq);
    give_halves((size_t)MOST_ROWS * s->heads, 1.0f, c.iw);
    uint32_t *want = run(s, &c, 0, 0, MOST_ROWS);
    static const uint32_t sizes[] = {MOST_ROWS, 1, 2, 3, 5, 8, 16, 32};
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        uint32_t n = sizes[k], first = k == 1 ? 0 : below(&seed, MOST_ROWS - n + 1);
        uint32_t *got = run(s, &c, 1, first, n);
        compare_rows(s, "a batch", want, MOST_ROWS, first, got, n);
        mem_free(got);
    }
    mem_free(want);
    for (uint32_t r = 0; r < MOST_ROWS; r++) {
        mem_free(c.pages[r]);
    }
    sides[0].ops->close(sides[0].dev);
    sides[1].ops->close(sides[1].dev);
}

static void must_refuse(uint32_t heads, uint32_t channels, bool exact, const char *reason)
{
    struct ops_dims d = small_dims(256);
    const struct ops_limits limits = {.n_rows = 1};
    struct error why = {""};
    d.index_heads = heads;
    d.index_dim = channels;
    d.index_topk = 8;
    d.exact = exact;
    if (tuned_tensor_topk_serves(&d, &limits, &why) || !strstr(why.text, reason)) {
        n_failed++;
        printf("REFUSAL: '%s', should say '%s'\n", why.text, reason);
    }
}

int main(int argc, char **argv)
{
    static struct ops table;
    setvbuf(stdout, NULL, _IOLBF, 0);
    must_refuse(65, 128, false, "not 65 of 128");
    must_refuse(64, 160, false, "not 64 of 160");
    must_refuse(64, 48, false, "not 64 of 48");
    must_refuse(64, 128, true, "exact arithmetic");
    const bool tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    const bool small = argc > 2 && strcmp(argv[2], "small") == 0;
    if (!choose_sides(argc > 1 ? argv[1] : "cuda:0", argc > 3 ? argv[3] : "topk=tensor", &table)) {
        return n_failed ? 1 : 77;
    }
    seed = 20261201;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        struct shape s = shapes[i];
        if (tiny && (s.most_entries > 700 || s.heads > 17)) {
            continue;
        }
        if (small && s.most_entries > 2100 && s.heads > 1) {
            continue;
        }
        check(&s);
    }
    printf("%d rows compared, %d wrong\n", n_compared, n_failed);
    return n_failed ? 1 : 0;
}
