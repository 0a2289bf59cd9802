/* The cache's operations on a device against the CPU's, bit for bit: calls of random sequences that
 * go on from random pages, windows and states, in every form of entry. And each sequence alone
 * against the call that has them all, and that call filled up with rows of no sequence.
 *
 * What a sequence reads of its past is random bytes in the stored form, so a context of 32k tokens
 * costs no more than its attention. Selection, output, and every byte of pages and slots is
 * compared; what nobody should have written is poison on both sides.
 */
#include "util.h"

enum { SHARED_PAGES = 48, MAX_SEQS = 70, MAX_ROWS = 4096, FILL = 3 };

static bool is_tuned;

struct shape {
    const char *name;
    bool exact;
    uint32_t head_dim, rope_dim, n_heads, index_heads, index_dim, index_topk, window, ring;
    uint32_t page_tokens, heavy_ratio, hidden, q_lora;
};

static const struct shape shapes[] = {
    {"exact", true, 40, 8, 5, 3, 16, 3, 8, 16, 32, 16, 72, 33},
    {"exact, wide", true, 128, 64, 9, 8, 64, 32, 24, 32, 64, 32, 96, 64},
    {"packed", false, 128, 64, 4, 3, 64, 16, 8, 16, 32, 16, 72, 33},
    {"packed, heads of V4", false, 512, 64, 12, 64, 128, 512, 128, 136, 256, 128, 128, 64},
};

/* Where a sequence begins and how many tokens it has in the call. */
struct span {
    uint32_t position, n;
};

struct batch {
    const char *name;
    bool long_limits; /* a device opened for a million tokens: its scratch holds few rows */
    struct span spans[8];
    uint32_t n_random; /* besides, as many of one token anywhere */
};

static const struct batch batches[] = {
    {"first token", false, {{0, 1}}, 0},
    {"three tokens", false, {{0, 3}}, 0},
    {"four tokens", false, {{0, 4}}, 0},
    {"five tokens", false, {{0, 5}}, 0},
    {"127 tokens", false, {{0, 127}}, 0},
    {"128 tokens", false, {{0, 128}}, 0},
    {"129 tokens", false, {{0, 129}}, 0},
    {"more than the ring", false, {{77, 300}}, 0},
    {"2,051st token", false, {{2050, 1}}, 0},
    {"from 2,049 on", false, {{2049, 5}}, 0},
    {"32k", false, {{32767, 1}, {32764, 5}}, 0},
    {"over a page's end", false, {{250, 20}, {255, 1}, {256, 1}, {31, 2}, {63, 4}}, 0},
    {"mixed", false, {{0, 5}, {127, 2}, {3, 1}, {2048, 9}, {500, 70}}, 0},
    {"64 steps", false, {{0, 1}, {3, 1}, {126, 1}, {127, 1}, {128, 1}, {2047, 1}, {32766, 1}}, 57},
    {"70 rows, long limits", true, {{127, 6}}, 64},
    {"17 steps", false, {{1, 1}}, 16},
};

struct call_case {
    const struct shape *shape;
    struct ops_dims d;
    struct ops_place place;
    struct ops_limits limits;
    uint32_t n_pages, n_slots, width; /* width: of a row of K */
    size_t page_bytes, window_bytes, state_bytes;
    struct call call;
    uint32_t *pages[MAX_SEQS];
    uint64_t seed;
    /* host: inputs of every row, weights, and the memory before the call */
    float *x, *qr, *q, *kv_rows, *w, *vectors, *index_w;
    uint8_t *pool, *windows, *states;
};

/* What a call leaves, on the host. */
struct result {
    float *iq, *iw, *o;
    uint32_t *chosen[4]; /* of each kind of scores: n of every row, then the indexes */
    uint8_t *pool, *windows, *states;
};

static float *inputs(struct call_case *c, size_t n)
{
    float *x = random_floats(&c->seed, n, 1.0f);
    if (!c->d.exact) {
        cpu_round_row(x, n);
    }
    return x;
}

/* n entries or keys in the stored form, at random. */
static void random_body(struct call_case *c, uint8_t *body, size_t bytes, size_t n_e4m3)
{
    if (c->d.entry_kind == FORMATS_ENTRY_F32) {
        for (size_t i = 0; i < bytes; i += 4) {
            float x = normal(&c->seed);
            memcpy(body + i, &x, 4);
        }
        return;
    }
    for (size_t i = 0; i < bytes; i++) {
        body[i] = (uint8_t)next_random(&c->seed);
        body[i] = i < n_e4m3 && (body[i] & 0x7f) == 0x7f ? 0x31 : body[i];
    }
    for (size_t i = n_e4m3; n_e4m3 && i < bytes; i += 2) {
        uint16_t half = bf16_encode(normal(&c->seed));
        memcpy(body + i, &half, 2);
    }
}

static void random_scales(struct call_case *c, uint8_t *scales, size_t bytes, uint32_t around)
{
    for (size_t i = 0; i < bytes; i++) {
        scales[i] = (uint8_t)(around + below(&c->seed, 6));
    }
}

static void fill_entries(struct call_case *c, uint8_t *body, uint8_t *scales, uint32_t n)
{
    const struct ops_dims *d = &c->d;
    size_t entry = formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    size_t scale = formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    for (uint32_t i = 0; i < n; i++) {
        random_body(c, body + i * entry, entry, d->head_dim - d->rope_dim);
        random_scales(c, scales + i * scale, scale, 117);
    }
}

static void make_memory(struct call_case *c)
{
    const struct ops_dims *d = &c->d;
    const struct ops_place *p = &c->place;
    c->pool = mem_alloc(c->n_pages * c->page_bytes);
    c->windows = mem_alloc(c->n_slots * c->window_bytes);
    c->states = mem_alloc(c->n_slots * c->state_bytes);
    memset(c->pool, 0xff, c->n_pages * c->page_bytes);
    memset(c->windows, 0xff, c->n_slots * c->window_bytes);
    for (uint32_t i = 0; p->ratio && i < c->n_pages; i++) {
        uint8_t *page = c->pool + i * c->page_bytes;
        fill_entries(c, page + p->entry, page + p->entry_scale, p->entries_a_page);
        if (p->ratio == OPS_SPARSE_RATIO) {
            random_body(c, page + p->key,
                        p->entries_a_page * formats_key_bytes(d->entry_kind, d->index_dim), 0);
            random_scales(c, page + p->key_scale,
                          p->entries_a_page * formats_key_scale_bytes(d->entry_kind, d->index_dim),
                          124);
        }
    }
    for (uint32_t i = 0; i < c->n_slots; i++) {
        uint8_t *slot = c->windows + i * c->window_bytes;
        fill_entries(c, slot + p->window, slot + p->window_scale, d->ring);
        float *state = (float *)(void *)(c->states + i * c->state_bytes);
        for (size_t k = 0; k < c->state_bytes / 4; k++) {
            state[k] = normal(&c->seed);
        }
        if (p->ratio > OPS_SPARSE_RATIO) {
            for (uint32_t ch = 0; ch < d->head_dim; ch++) { /* sums of exponentials are positive */
                state[d->head_dim + ch] = 1.0f + fabsf(state[d->head_dim + ch]);
            }
        }
    }
}

/* As at the start of a sequence. */
static void reset_slot(struct call_case *c, uint32_t slot)
{
    float *state = (float *)(void *)(c->states + slot * c->state_bytes);
    memset(state, 0, c->state_bytes);
    if (c->place.ratio == 0) {
        return;
    }
    if (c->place.ratio != OPS_SPARSE_RATIO) {
        for (uint32_t ch = 0; ch < c->d.head_dim; ch++) {
            state[ch] = -INFINITY;
        }
        return;
    }
    for (uint32_t row = 0; row < 2 * OPS_STATE_RING; row++) {
        uint32_t n = row < OPS_STATE_RING ? c->d.head_dim : c->d.index_dim;
        for (uint32_t ch = 0; ch < 2 * n; ch++) {
            state[2 * n + ch] = -INFINITY;
        }
        state += 4 * (size_t)n;
    }
}

static size_t aligned(size_t n)
{
    return (n + 31) / 32 * 32;
}

static void make_layout(struct call_case *c, uint32_t ratio)
{
    const struct ops_dims *d = &c->d;
    struct ops_place *p = &c->place;
    size_t entry = formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    size_t scale = formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    p->ratio = ratio;
    p->entries_a_page = ratio ? c->shape->page_tokens / ratio : 0;
    p->entry = 96;
    p->entry_scale = p->entry + p->entries_a_page * entry;
    p->key = aligned(p->entry_scale + p->entries_a_page * scale);
    p->key_scale = p->key + p->entries_a_page * formats_key_bytes(d->entry_kind, d->index_dim);
    c->page_bytes = aligned(
        p->key_scale + p->entries_a_page * formats_key_scale_bytes(d->entry_kind, d->index_dim));
    p->window = 32;
    p->window_scale = p->window + d->ring * entry;
    c->window_bytes = aligned(p->window_scale + d->ring * scale);
    p->state = 64;
    p->index_state = p->state + (size_t)OPS_STATE_RING * 4 * d->head_dim * 4;
    c->state_bytes = aligned(p->index_state + (size_t)OPS_STATE_RING * 4 * d->index_dim * 4);
}

/* Adds a sequence: old pages are shared by all, those it writes to are its own. */
static void add_sequence(struct call_case *c, uint32_t position, uint32_t n)
{
    uint32_t i = c->call.rows.n_seqs, per = c->shape->page_tokens;
    uint32_t n_pages = (position + n + per - 1) / per;
    c->pages[i] = mem_array(n_pages, sizeof(uint32_t));
    for (uint32_t k = 0; k < n_pages; k++) {
        bool old = (k + 1) * per <= position / c->shape->heavy_ratio * c->shape->heavy_ratio;
        c->pages[i][k] = old ? below(&c->seed, SHARED_PAGES) : c->n_pages++;
    }
    call_add(&c->call, c->pages[i], (i * 37 + 5) % c->n_slots, position, n);
}

static void make_case(struct call_case *c, const struct shape *s, const struct batch *b,
                      uint32_t ratio, uint64_t seed)
{
    memset(c, 0, sizeof(*c));
    c->shape = s;
    c->seed = seed;
    c->d = small_dims(s->exact);
    c->d.head_dim = s->head_dim;
    c->d.rope_dim = s->rope_dim;
    c->d.n_heads = s->n_heads;
    c->d.index_heads = s->index_heads;
    c->d.index_dim = s->index_dim;
    c->d.index_topk = s->index_topk;
    c->d.window = s->window;
    c->d.ring = s->ring;
    c->d.hidden = s->hidden;
    c->d.q_lora = s->q_lora;
    c->d.o_groups = 1;
    c->n_slots = MAX_SEQS + 2; /* 37 and it have no common factor */
    c->n_pages = SHARED_PAGES;
    make_layout(c, ratio);
    call_clear(&c->call);
    for (size_t i = 0; i < sizeof(b->spans) / sizeof(b->spans[0]) && b->spans[i].n; i++) {
        add_sequence(c, b->spans[i].position, b->spans[i].n);
    }
    for (uint32_t i = 0; i < b->n_random; i++) {
        add_sequence(c, below(&c->seed, i % 4 == 0 ? 9000 : 300), 1);
    }
    c->width = (ratio == OPS_SPARSE_RATIO ? 2 : 1) * s->head_dim;
    make_memory(c);
    for (uint32_t i = 0; i < c->call.rows.n_seqs; i++) {
        if (c->call.seqs[i].position == 0) {
            reset_slot(c, c->call.seqs[i].slot);
        }
    }
    size_t t = c->call.rows.n_rows + FILL;
    c->limits = (struct ops_limits){.n_rows = (uint32_t)t,
                                    .n_tokens = b->long_limits ? 1 << 20 : 33000,
                                    .page_tokens = s->page_tokens,
                                    .heavy_ratio = s->heavy_ratio};
    c->x = inputs(c, t * s->hidden);
    c->qr = inputs(c, t * s->q_lora);
    c->q = inputs(c, t * s->n_heads * s->head_dim);
    c->kv_rows = inputs(c, t * s->head_dim);
    for (size_t r = 0; !s->exact && r < t; r++) {
        float *row = c->kv_rows + r * s->head_dim;
        cpu_quant8(row, s->head_dim - s->rope_dim, FORMATS_KV_GROUP, row);
    }
    c->w = random_floats(&c->seed, 2 * (size_t)c->width * s->hidden, 0.2f);
    c->vectors = random_floats(&c->seed, (size_t)(s->heavy_ratio + 8) * c->width, 0.7f);
    c->index_w = random_floats(
        &c->seed, (size_t)s->index_heads * (s->index_dim * s->q_lora + s->hidden), 0.2f);
}

static void free_case(struct call_case *c)
{
    void *all[] = {c->x,       c->qr,      c->q,    c->kv_rows, c->w,
                   c->vectors, c->index_w, c->pool, c->windows, c->states};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    for (uint32_t i = 0; i < c->call.rows.n_seqs; i++) {
        mem_free(c->pages[i]);
    }
}

/* The layer in the memory of a device. */
static struct ops_layer make_layer(const struct call_case *c, const struct ops *ops,
                                   struct ops_device *dev)
{
    const struct ops_dims *d = &c->d;
    size_t n_vectors = (size_t)(c->shape->heavy_ratio + 8) * c->width;
    const float *vectors = to_device(ops, dev, c->vectors, n_vectors * 4);
    const float *gate = c->w + (size_t)c->width * d->hidden;
    struct ops_layer layer = {
        .place = c->place,
        .attn_sink = vectors,
        .compressor = {.wkv = pack_floats_on(ops, dev, c->w, c->width, d->hidden),
                       .wgate = pack_floats_on(ops, dev, gate, c->width, d->hidden),
                       .ape = vectors + 2 * c->width,
                       .norm = vectors + c->width},
        .index_wq_b =
            pack_floats_on(ops, dev, c->index_w, d->index_heads * d->index_dim, d->q_lora),
        .index_weights =
            pack_floats_on(ops, dev, c->index_w + (size_t)d->index_heads * d->index_dim * d->q_lora,
                           d->index_heads, d->hidden)};
    if (c->place.ratio == OPS_SPARSE_RATIO) {
        layer.index_compressor = (struct ops_compressor){
            .wkv = pack_floats_on(ops, dev, gate, 2 * d->index_dim, d->hidden),
            .wgate = pack_floats_on(ops, dev, c->w, 2 * d->index_dim, d->hidden),
            .ape = vectors + c->width,
            .norm = vectors};
    }
    return layer;
}

/* Index queries and weights that make the scores special: all 0; few values, so that the best k end
 * among equals; -infinity but for those that are 0. */
static void special_scores(const struct call_case *c, int kind, float *iq, float *iw)
{
    const struct ops_dims *d = &c->d;
    size_t t = c->call.rows.n_rows + FILL;
    for (size_t i = 0; i < t * d->index_heads * d->index_dim; i++) {
        iq[i] = kind == 3 ? 1e30f : (i % d->index_dim == 3 ? 1.0f : 0.0f);
    }
    for (size_t i = 0; i < t * d->index_heads; i++) {
        iw[i] = kind == 1 ? 0.0f : (kind == 2 ? (i % d->index_heads ? 0.0f : 1.0f) : -1e10f);
    }
}

/* Runs sequences [first, first + n) of the case as one call, with `fill` rows of none behind. */
static void run_some(const struct call_case *c, const struct ops *ops, struct ops_device *dev,
                     const struct ops_layer *layer, const struct ops_kv *kv, uint32_t first,
                     uint32_t n, uint32_t fill, struct result *ret)
{
    static struct call part;
    const struct ops_dims *d = &c->d;
    call_clear(&part);
    for (uint32_t i = first; i < first + n; i++) {
        const struct ops_seq *seq = &c->call.seqs[i];
        call_add(&part, seq->pages, seq->slot, seq->position, seq->n_rows);
    }
    for (uint32_t i = 0; i < fill; i++) {
        call_add(&part, NULL, OPS_NO_SLOT, 0, 1);
    }
    size_t row = c->call.seqs[first].first_row, t = part.rows.n_rows;
    size_t one_iq = (size_t)d->index_heads * d->index_dim, wide = (size_t)d->n_heads * d->head_dim;
    const float *x = to_device(ops, dev, c->x + row * d->hidden, t * d->hidden * 4);
    const float *qr = to_device(ops, dev, c->qr + row * d->q_lora, t * d->q_lora * 4);
    const float *q = to_device(ops, dev, c->q + row * wide, t * wide * 4);
    const float *rows = to_device(ops, dev, c->kv_rows + row * d->head_dim, t * d->head_dim * 4);
    float *iq = poisoned_on(ops, dev, t * one_iq * 4);
    float *iw = poisoned_on(ops, dev, t * d->index_heads * 4);
    float *o = poisoned_on(ops, dev, t * wide * 4);
    size_t n_chosen = t * ((size_t)d->index_topk + 1);
    *ret = (struct result){NULL};
    ops->begin(dev, &part.rows);
    struct ops_selection first_selection = {NULL, NULL};
    if (c->place.ratio == OPS_SPARSE_RATIO) {
        ops->indexer(dev, &part.rows, layer, x, qr, iq, iw);
        ret->iq = from_device(ops, dev, iq, t * one_iq * 4);
        ret->iw = from_device(ops, dev, iw, t * d->index_heads * 4);
        ops->compress(dev, &part.rows, layer, true, x, kv);
        float *host_iq = poisoned((c->call.rows.n_rows + FILL) * one_iq);
        float *host_iw = poisoned((c->call.rows.n_rows + FILL) * d->index_heads);
        for (int kind = 0; kind < 4; kind++) {
            if (kind) {
                special_scores(c, kind, host_iq, host_iw);
                ops->write(dev, iq, host_iq, t * one_iq * 4);
                ops->write(dev, iw, host_iw, t * d->index_heads * 4);
            }
            uint32_t *chosen = poisoned_on(ops, dev, n_chosen * 4);
            struct ops_selection selection = {chosen, chosen + t};
            ops->topk(dev, &part.rows, layer, iq, iw, kv, &selection);
            ret->chosen[kind] = from_device(ops, dev, chosen, n_chosen * 4);
            first_selection = kind ? first_selection : selection;
        }
        mem_free(host_iq);
        mem_free(host_iw);
    }
    if (c->place.ratio) {
        ops->compress(dev, &part.rows, layer, false, x, kv);
    }
    ops->attend(dev, &part.rows, layer, q, rows, &first_selection, kv, o);
    ret->o = from_device(ops, dev, o, t * wide * 4);
}

static void free_result(struct result *r)
{
    void *all[] = {r->iq,        r->iw,        r->o,    r->chosen[0], r->chosen[1],
                   r->chosen[2], r->chosen[3], r->pool, r->windows,   r->states};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
}

static struct ops_kv make_kv(const struct call_case *c, const struct ops *ops,
                             struct ops_device *dev)
{
    return (struct ops_kv){.pool = to_device(ops, dev, c->pool, c->n_pages * c->page_bytes),
                           .page_bytes = c->page_bytes,
                           .windows = to_device(ops, dev, c->windows, c->n_slots * c->window_bytes),
                           .states = to_device(ops, dev, c->states, c->n_slots * c->state_bytes),
                           .window_bytes = c->window_bytes,
                           .state_bytes = c->state_bytes,
                           .stores_window = true};
}

static void take_memory(const struct call_case *c, const struct ops *ops, struct ops_device *dev,
                        const struct ops_kv *kv, struct result *r)
{
    r->pool = from_device(ops, dev, kv->pool, c->n_pages * c->page_bytes);
    r->windows = from_device(ops, dev, kv->windows, c->n_slots * c->window_bytes);
    r->states = from_device(ops, dev, kv->states, c->n_slots * c->state_bytes);
}

/* The whole case on a backend. */
static void run_case(const struct call_case *c, const struct ops *ops, uint32_t fill,
                     struct result *ret)
{
    struct ops_device *dev = open_on(ops, &c->d, &c->limits);
    struct ops_layer layer = make_layer(c, ops, dev);
    struct ops_kv kv = make_kv(c, ops, dev);
    run_some(c, ops, dev, &layer, &kv, 0, c->call.rows.n_seqs, fill, ret);
    take_memory(c, ops, dev, &kv, ret);
    ops->close(dev);
}

static uint32_t n_bad;

static void compare(const char *name, const char *what, const void *got, const void *want,
                    size_t bytes)
{
    if ((!got && !want) || memcmp(got, want, bytes) == 0) {
        return;
    }
    const uint32_t *a = got, *b = want;
    size_t i = 0, n = 0, first = bytes / 4;
    for (; i < bytes / 4; i++) {
        first = a[i] != b[i] && n == 0 ? i : first;
        n += a[i] != b[i];
    }
    print_error("%s: %s: %zu of %zu words differ, first %zu: %08x (%g), should be %08x (%g)\n",
                name, what, n, bytes / 4, first, a[first], (double)f32_from_bits(a[first]),
                b[first], (double)f32_from_bits(b[first]));
    n_bad++;
}

static void compare_results(const struct call_case *c, const char *name, const struct result *got,
                            const struct result *want)
{
    const struct ops_dims *d = &c->d;
    size_t t = c->call.rows.n_rows;
    static const char *const kinds[] = {"topk", "topk of zeros", "topk of few values",
                                        "topk of -infinity"};
    compare(name, "index queries", got->iq, want->iq, t * d->index_heads * d->index_dim * 4);
    compare(name, "index weights", got->iw, want->iw, t * d->index_heads * 4);
    for (int i = 0; i < 4; i++) {
        compare(name, kinds[i], got->chosen[i], want->chosen[i], t * (d->index_topk + 1) * 4);
    }
    compare(name, "pages", got->pool, want->pool, c->n_pages * c->page_bytes);
    compare(name, "states", got->states, want->states, c->n_slots * c->state_bytes);
    compare(name, "output", got->o, want->o, t * d->n_heads * d->head_dim * 4);
    compare(name, "windows", got->windows, want->windows, c->n_slots * c->window_bytes);
}

/* Shapes to go through: all, or as many as the second argument says, and then only against the CPU:
 * for checkers that make every launch slow. */
static uint32_t n_shapes = sizeof(shapes) / sizeof(shapes[0]);

static void each_case(void (*fn)(struct call_case *c, const char *name), uint32_t n)
{
    static struct call_case c;
    uint64_t seed = 71;
    n_bad = 0;
    for (uint32_t s = 0; s < n; s++) {
        for (size_t b = 0; b < sizeof(batches) / sizeof(batches[0]); b++) {
            const uint32_t ratios[] = {0, OPS_SPARSE_RATIO, shapes[s].heavy_ratio};
            for (int k = 0; k < 3; k++) {
                char name[128];
                snprintf(name, sizeof(name), "%s, ratio %u, %s", shapes[s].name, ratios[k],
                         batches[b].name);
                make_case(&c, &shapes[s], &batches[b], ratios[k], seed++);
                fn(&c, name);
                free_case(&c);
            }
        }
    }
    assert_int_equal(n_bad, 0);
}

static void same_case(struct call_case *c, const char *name)
{
    struct result got, want;
    run_case(c, &ops_cpu, 0, &want);
    run_case(c, backend, 0, &got);
    compare_results(c, name, &got, &want);
    free_result(&got);
    free_result(&want);
}

static void test_same_as_cpu(void **state)
{
    if (backend == &ops_cpu || is_tuned) {
        skip();
    }
    each_case(same_case, n_shapes);
}

/* The sequences one by one, last first. */
static void alone_case(struct call_case *c, const char *name)
{
    const struct ops_dims *d = &c->d;
    const struct ops *ops = backend;
    uint32_t n = c->call.rows.n_seqs;
    if (n == 1) {
        return;
    }
    struct result all, one, end = {NULL};
    run_case(c, ops, 0, &all);
    struct ops_device *dev = open_on(ops, d, &c->limits);
    struct ops_layer layer = make_layer(c, ops, dev);
    struct ops_kv kv = make_kv(c, ops, dev);
    for (uint32_t i = n; i-- > 0;) {
        size_t row = c->call.seqs[i].first_row, t = c->call.seqs[i].n_rows;
        size_t one_iq = (size_t)d->index_heads * d->index_dim;
        size_t wide = (size_t)d->n_heads * d->head_dim, k = d->index_topk;
        run_some(c, ops, dev, &layer, &kv, i, 1, 0, &one);
        compare(name, "output alone", one.o, all.o + row * wide, t * wide * 4);
        if (one.iq) {
            compare(name, "index queries alone", one.iq, all.iq + row * one_iq, t * one_iq * 4);
            compare(name, "topk alone", one.chosen[0] + t,
                    all.chosen[0] + c->call.rows.n_rows + row * k, t * k * 4);
        }
        free_result(&one);
    }
    take_memory(c, ops, dev, &kv, &end);
    compare(name, "pages alone", end.pool, all.pool, c->n_pages * c->page_bytes);
    compare(name, "states alone", end.states, all.states, c->n_slots * c->state_bytes);
    compare(name, "windows alone", end.windows, all.windows, c->n_slots * c->window_bytes);
    free_result(&end);
    free_result(&all);
    ops->close(dev);
}

static void test_alone(void **state)
{
    if (n_shapes < sizeof(shapes) / sizeof(shapes[0])) {
        skip();
    }
    each_case(alone_case, backend == &ops_cpu ? 1 : n_shapes);
}

/* Rows that only fill a call up: the others get what they got, and no memory was touched. */
static void filled_case(struct call_case *c, const char *name)
{
    const struct ops_dims *d = &c->d;
    size_t t = c->call.rows.n_rows, k = d->index_topk;
    struct result with, without;
    run_case(c, backend, FILL, &with);
    run_case(c, backend, 0, &without);
    for (int i = 0; i < 4 && with.iq; i++) {
        compare(name, "filled up: topk, numbers", with.chosen[i], without.chosen[i], t * 4);
        compare(name, "filled up: topk", with.chosen[i] + t + FILL, without.chosen[i] + t,
                t * k * 4);
        mem_free(with.chosen[i]);
        mem_free(without.chosen[i]);
        with.chosen[i] = without.chosen[i] = NULL;
    }
    compare_results(c, name, &with, &without);
    free_result(&with);
    free_result(&without);
}

static void test_filled(void **state)
{
    if (n_shapes < sizeof(shapes) / sizeof(shapes[0])) {
        skip();
    }
    each_case(filled_case, backend == &ops_cpu ? 1 : n_shapes);
}

int main(int argc, char **argv)
{
    backend_choose(argc, argv);
    is_tuned = argc > 2 && strchr(argv[2], '='); /* its bits are its own, whoever else is there */
    if (argc > 2 && atoi(argv[2]) > 0 && (uint32_t)atoi(argv[2]) < n_shapes) {
        n_shapes = (uint32_t)atoi(argv[2]);
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_as_cpu),
                                       cmocka_unit_test(test_alone), cmocka_unit_test(test_filled)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
