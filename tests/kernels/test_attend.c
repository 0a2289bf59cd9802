/* Attention on tensor cores (attend=tensor) at the real widths, against the CPU's.
 *
 * Pages and windows hold random entries, e4m3 with scales and bfloat16, in pages of any order. Rows
 * are sequences of their own (a decode step) or a chunk of one (a prefill), at positions around the
 * window's and the leaves' edges, over the window alone, over chosen entries and over all. Outputs
 * are bfloat16, so nearly all must be the CPU's own bits and no other may be further than a unit
 * and what the kernel states; what the window holds afterwards must be equal. Each row's bits must
 * be those of its row alone, and of the chunk cut in two.
 *
 * test_attend cuda:N [small|all]. 77 without it.
 */
#include "tests/kernels/backends.h"
#include "tests/kernels/small.h"

enum {
    HEAD = 512,
    ROPE = 64,
    WINDOW = 128,
    RING = 144,
    TOPK = 512,
    PAGE_TOKENS = 256,
    MOST_ROWS = 70,
    ENTRY = 576,
    SCALES = 8
};

struct call {
    struct ops_dims d;
    uint32_t ratio, n_seqs, n_rows, max_tokens;
    struct ops_layer layer[2];
    struct ops_kv kv[2];
    size_t window_bytes;
    uint8_t *windows; /* as they are before */
    const float *q[2], *kv_rows[2];
    struct ops_selection selection[2];
    uint32_t *pages[MOST_ROWS];
    struct ops_seq seqs[MOST_ROWS];
    uint32_t tokens[MOST_ROWS], positions[MOST_ROWS], seq_of[MOST_ROWS];
};

/* Bytes of n entries at `body` and their scales: e4m3, then bfloat16 of some size. */
static void make_entries(uint8_t *body, uint8_t *scales, uint32_t n)
{
    for (uint32_t i = 0; i < n * ENTRY; i++) {
        uint32_t at = i % ENTRY;
        body[i] = at < HEAD - ROPE ? e4m3_byte() : (uint8_t)next_random(&seed);
        if (at >= HEAD - ROPE && at % 2) {
            body[i] = (body[i] & 0x80) | 0x3e;
        }
    }
    for (uint32_t i = 0; i < n * SCALES; i++) {
        scales[i] = i % SCALES < 7 ? (uint8_t)(116 + below(&seed, 4)) : 0;
    }
}

static void make_pool(struct call *c)
{
    const uint32_t a_page = c->ratio ? PAGE_TOKENS / c->ratio : 0;
    const uint32_t a_seq = c->max_tokens / PAGE_TOKENS + 1, n_pages = c->n_seqs * a_seq;
    struct ops_place place = {.ratio = c->ratio, .entries_a_page = a_page, .entry = 32};
    place.entry_scale = place.entry + (size_t)a_page * ENTRY;
    place.window = 64;
    place.window_scale = place.window + (size_t)RING * ENTRY;
    const size_t page_bytes = place.entry_scale + (size_t)a_page * SCALES + 24;
    c->window_bytes = place.window_scale + (size_t)RING * SCALES;
    uint8_t *pool = mem_alloc(n_pages * page_bytes);
    c->windows = mem_alloc(c->n_seqs * c->window_bytes);
    memset(pool, 0xff, n_pages * page_bytes);
    memset(c->windows, 0xff, c->n_seqs * c->window_bytes);
    for (uint32_t i = 0; i < n_pages; i++) {
        uint8_t *page = pool + i * page_bytes;
        make_entries(page + place.entry, page + place.entry_scale, a_page);
    }
    for (uint32_t i = 0; i < c->n_seqs; i++) {
        uint8_t *window = c->windows + i * c->window_bytes;
        make_entries(window + place.window, window + place.window_scale, RING);
    }
    const void *given[2];
    give(pool, n_pages * page_bytes, given);
    float *sink[2];
    give_floats(c->d.n_heads, 1.0f, (const float **)sink);
    for (int i = 0; i < 2; i++) {
        c->layer[i] = (struct ops_layer){.place = place, .attn_sink = sink[i]};
        c->kv[i] = (struct ops_kv){.pool = (uint8_t *)(uintptr_t)given[i],
                                   .page_bytes = page_bytes,
                                   .window_bytes = c->window_bytes,
                                   .stores_window = true};
        c->kv[i].windows =
            need(&sides[i], sides[i].ops->alloc(sides[i].dev, c->n_seqs * c->window_bytes));
    }
    mem_free(pool);
    for (uint32_t s = 0; s < c->n_seqs; s++) {
        c->pages[s] = mem_array(a_seq, sizeof(uint32_t));
        for (uint32_t i = 0; i < a_seq; i++) { /* in reverse, shifted */
            c->pages[s][i] = n_pages - 1 - (s * a_seq + i);
        }
    }
}

/* Chosen entries of each row: as many as there are, at most TOPK, ascending. */
static void make_selection(struct call *c)
{
    uint32_t *words = mem_array((size_t)c->n_rows * (TOPK + 1), sizeof(uint32_t));
    memset(words, 0xff, (size_t)c->n_rows * (TOPK + 1) * sizeof(uint32_t));
    for (uint32_t r = 0; r < c->n_rows; r++) {
        uint32_t there = (c->positions[r] + 1) / OPS_SPARSE_RATIO, n = 0;
        for (uint32_t j = 0; j < there && n < TOPK; j++) {
            uint32_t left = there - j, wanted = TOPK - n;
            if (left <= wanted || below(&seed, left) < wanted) {
                words[c->n_rows + (size_t)r * TOPK + n++] = j;
            }
        }
        words[r] = n;
    }
    const void *given[2];
    give(words, (size_t)c->n_rows * (TOPK + 1) * sizeof(uint32_t), given);
    for (int i = 0; i < 2; i++) {
        c->selection[i].n = (uint32_t *)(uintptr_t)given[i];
        c->selection[i].index = c->selection[i].n + c->n_rows;
    }
    mem_free(words);
}

/* As `project` leaves them: what the window keeps of them is what they are. */
static void give_kv_rows(struct call *c)
{
    const size_t n = (size_t)c->n_rows * HEAD;
    float *x = mem_array(n, sizeof(float));
    const void *given[2];
    for (size_t i = 0; i < n; i++) {
        bool is_plain = i % HEAD < HEAD - ROPE;
        x[i] = is_plain ? e4m3_decode(e4m3_byte()) * 0x1p-9f : bf16_round(normal(&seed));
    }
    give(x, n * sizeof(float), given);
    c->kv_rows[0] = given[0];
    c->kv_rows[1] = given[1];
    mem_free(x);
}

/* Rows first .. first + n - 1 of a side, the windows as they were unless `goes_on`; each sequence's
 * rows begin with the first of them. */
static float *run(struct call *c, int i, uint32_t first, uint32_t n, bool goes_on)
{
    const struct side *side = &sides[i];
    const size_t wide = (size_t)c->d.n_heads * HEAD;
    struct ops_seq seqs[MOST_ROWS];
    uint32_t seq_of[MOST_ROWS], n_seqs = 0;
    if (!goes_on) {
        side->ops->write(side->dev, c->kv[i].windows, c->windows, c->n_seqs * c->window_bytes);
    }
    for (uint32_t r = 0; r < n; r++) {
        if (r == 0 || c->seq_of[first + r] != c->seq_of[first + r - 1]) {
            seqs[n_seqs++] = c->seqs[c->seq_of[first + r]];
            seqs[n_seqs - 1].first_row = r;
            seqs[n_seqs - 1].position = c->positions[first + r];
            seqs[n_seqs - 1].n_rows = 0;
        }
        seqs[n_seqs - 1].n_rows++;
        seq_of[r] = n_seqs - 1;
    }
    const struct ops_rows rows = {.n_rows = n,
                                  .n_seqs = n_seqs,
                                  .tokens = c->tokens,
                                  .positions = c->positions + first,
                                  .seq_of = seq_of,
                                  .seqs = seqs};
    float *o = need(side, side->ops->alloc(side->dev, n * wide * sizeof(float)));
    struct ops_selection selection = {.n = c->selection[i].n + first,
                                      .index = c->selection[i].index + (size_t)first * TOPK};
    poison(side, o, n * wide);
    side->ops->begin(side->dev, &rows);
    side->ops->attend(side->dev, &rows, &c->layer[i], c->q[i] + first * wide,
                      c->kv_rows[i] + (size_t)first * HEAD, &selection, &c->kv[i], o);
    return (float *)(void *)fetch(side, o, n * wide);
}

/* Values of about one: nearly all the same bits, none further than a unit of bfloat16 and 2^-12. */
static void hold_against(const float *want, const float *got, size_t n)
{
    size_t n_other = 0, n_wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        double a = (double)want[i], b = (double)got[i], off = fabs(a - b);
        double bound = 0x1p-7 * fabs(a) + 0x1p-12;
        n_other += f32_bits(want[i]) != f32_bits(got[i]);
        n_wrong += !(off <= bound);
        worst = fmax(worst, off / bound);
    }
    n_compared++;
    if (n_wrong || n_other * 20 > n) {
        n_failed++;
        printf("DIFFERS %s: ", where);
    }
    printf("%s: %zu values, %zu not the same, worst %.3f of the bound, %zu wrong\n", where, n,
           n_other, worst, n_wrong);
}

static void must_equal(const char *what, uint32_t row, const void *want, const void *got,
                       size_t bytes)
{
    n_compared++;
    if (memcmp(want, got, bytes)) {
        n_failed++;
        printf("BITS %s: %s, row %u\n", where, what, row);
    }
}

static uint32_t *windows_of(const struct call *c, int i)
{
    return fetch(&sides[i], c->kv[i].windows, c->n_seqs * c->window_bytes / 4);
}

static void check_call(struct call *c)
{
    const size_t wide = (size_t)c->d.n_heads * HEAD;
    float *want = run(c, 0, 0, c->n_rows, false), *got = run(c, 1, 0, c->n_rows, false);
    uint32_t *kept = windows_of(c, 0), *kept_there = windows_of(c, 1);
    hold_against(want, got, c->n_rows * wide);
    must_equal("windows afterwards", 0, kept, kept_there, c->n_seqs * c->window_bytes);
    if (c->n_seqs == c->n_rows) {
        for (uint32_t r = 0; r < c->n_rows; r++) {
            float *alone = run(c, 1, r, 1, false);
            must_equal("alone", r, got + r * wide, alone, wide * sizeof(float));
            mem_free(alone);
        }
    } else {
        uint32_t n = c->n_rows / 3;
        float *first = run(c, 1, 0, n, false), *rest = run(c, 1, n, c->n_rows - n, true);
        must_equal("cut, first", 0, got, first, n * wide * sizeof(float));
        must_equal("cut, rest", n, got + n * wide, rest, (c->n_rows - n) * wide * sizeof(float));
        mem_free(first);
        mem_free(rest);
    }
    mem_free(want);
    mem_free(got);
    mem_free(kept);
    mem_free(kept_there);
}

/* Single rows at these positions, or, with n_rows, a chunk from the first of them on. */
static void check(uint32_t heads, uint32_t ratio, const uint32_t *positions, uint32_t n,
                  uint32_t n_rows)
{
    struct call c = {.d = small_dims(256), .ratio = ratio, .n_seqs = n_rows ? 1 : n};
    struct error err = {""};
    uint32_t last = 0;
    c.n_rows = n_rows ? n_rows : n;
    c.d.n_heads = heads;
    c.d.head_dim = HEAD;
    c.d.rope_dim = ROPE;
    c.d.window = WINDOW;
    c.d.ring = RING;
    c.d.index_topk = TOPK;
    c.d.index_heads = 2;
    c.d.index_dim = 128;
    c.d.entry_kind = FORMATS_ENTRY_PACKED;
    for (uint32_t r = 0; r < c.n_rows; r++) {
        c.positions[r] = n_rows ? positions[0] + r : positions[r];
        c.seq_of[r] = n_rows ? 0 : r;
        last = c.positions[r] > last ? c.positions[r] : last;
    }
    c.max_tokens = last + 1;
    snprintf(where, sizeof(where), "%u heads, ratio %u, %u rows%s, up to position %u", heads, ratio,
             c.n_rows, n_rows ? " of one" : "", last);
    const struct ops_limits limits = {.n_rows = c.n_rows,
                                      .n_tokens = c.max_tokens,
                                      .page_tokens = PAGE_TOKENS,
                                      .heavy_ratio = ratio == 128 ? 128 : 0,
                                      .n_threads = 2,
                                      .early_launches = early_launches()};
    for (int i = 0; i < 2; i++) {
        if (sides[i].ops->open(&c.d, &limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
    }
    make_pool(&c);
    for (uint32_t s = 0; s < c.n_seqs; s++) {
        c.seqs[s] = (struct ops_seq){.pages = c.pages[s], .slot = s};
    }
    give_halves((size_t)c.n_rows * heads * HEAD, 0.5f, c.q);
    give_kv_rows(&c);
    make_selection(&c);
    check_call(&c);
    for (uint32_t s = 0; s < c.n_seqs; s++) {
        mem_free(c.pages[s]);
    }
    mem_free(c.windows);
    sides[0].ops->close(sides[0].dev);
    sides[1].ops->close(sides[1].dev);
}

int main(int argc, char **argv)
{
    static struct ops table;
    static const uint32_t near[] = {0, 63, 64, 127, 128, 129, 200, 511}, far[] = {700, 2047, 3000},
                          further[] = {8191, 16000, 32767}, chunk[] = {90};
    setvbuf(stdout, NULL, _IOLBF, 0);
    const bool small = argc > 2 && strcmp(argv[2], "small") == 0;
    if (!choose_sides(argc > 1 ? argv[1] : "cuda:0", "attend=tensor", &table)) {
        return 77;
    }
    seed = 20261201;
    check(4, 0, near, 8, 0);
    check(20, 4, small ? near + 4 : near, small ? 4 : 8, 0);
    check(5, 128, near + 3, 5, 0);
    check(3, 4, chunk, 1, small ? 20 : 70);
    check(64, 4, far, small ? 1 : 3, 0);
    if (!small) {
        check(17, 0, chunk, 1, 70);
        check(16, 128, far, 3, 0);
        check(32, 4, further, 3, 0);
        check(32, 128, further, 3, 0);
    }
    printf("%d compared, %d wrong\n", n_compared, n_failed);
    return n_failed ? 1 : 0;
}
