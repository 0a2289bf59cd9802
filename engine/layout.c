/* See layout.h. Everything is offsets: what a byte means is the business of kernels/formats.h and
 * of the operations. The invariant: an image's form follows from the layout and n_tokens alone, so
 * both ends of a hand-off agree on it by agreeing on the fingerprint.
 */
#include "engine/layout.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static size_t round_up(size_t n, size_t step)
{
    return (n + step - 1) / step * step;
}

static enum status check_packed(const struct model_config *c, struct error *err)
{
    uint32_t plain = c->head_dim - c->rope_dim;
    if (plain % FORMATS_KV_GROUP) {
        return error_set(err, STATUS_INVALID,
                         "head_dim %" PRIu32 " less the %" PRIu32 " rotated channels must be a "
                         "multiple of %d for quantised cache entries: use exact arithmetic",
                         c->head_dim, c->rope_dim, FORMATS_KV_GROUP);
    }
    if (c->n_sparse &&
        (c->index_head_dim % FORMATS_KEY_GROUP || (c->index_head_dim & (c->index_head_dim - 1)))) {
        return error_set(err, STATUS_INVALID,
                         "index_head_dim %" PRIu32 " must be a power of two and at least %d for "
                         "quantised index keys: use exact arithmetic",
                         c->index_head_dim, FORMATS_KEY_GROUP);
    }
    return STATUS_OK;
}

/* The page: one slice a sparse layer, one for all heavy layers. */
static void place_pages(const struct model_config *c, struct layout *l)
{
    size_t at = 0, n_heavy_entries = 0;
    for (uint32_t i = 0; i < l->n_layers; i++) {
        struct ops_place *p = &l->places[i];
        p->ratio = c->layers[i].ratio;
        p->entries_a_page = p->ratio ? l->page_tokens / p->ratio : 0;
        if (c->layers[i].kind == MODEL_LAYER_HEAVY) {
            n_heavy_entries += p->entries_a_page;
        }
        if (c->layers[i].kind != MODEL_LAYER_SPARSE) {
            continue;
        }
        p->entry = at;
        p->entry_scale = p->entry + p->entries_a_page * l->entry_bytes;
        p->key = p->entry_scale + p->entries_a_page * l->entry_scale_bytes;
        p->key_scale = p->key + p->entries_a_page * l->key_bytes;
        at = round_up(p->key_scale + p->entries_a_page * l->key_scale_bytes, LAYOUT_SLICE_ALIGN);
    }
    size_t entry_i = 0;
    for (uint32_t i = 0; i < l->n_layers; i++) {
        struct ops_place *p = &l->places[i];
        if (c->layers[i].kind == MODEL_LAYER_HEAVY) {
            p->entry = at + entry_i * l->entry_bytes;
            p->entry_scale = at + n_heavy_entries * l->entry_bytes + entry_i * l->entry_scale_bytes;
            entry_i += p->entries_a_page;
        }
    }
    at = round_up(at + n_heavy_entries * (l->entry_bytes + l->entry_scale_bytes),
                  LAYOUT_SLICE_ALIGN);
    l->page_used_bytes = at;
    l->page_bytes = round_up(at ? at : 1, LAYOUT_PAGE_ALIGN);
}

static void place_slots(struct layout *l)
{
    size_t window = 0, state = 0;
    for (uint32_t i = 0; i < l->n_layers; i++) {
        struct ops_place *p = &l->places[i];
        p->window = window;
        p->window_scale = window + l->ring * l->entry_bytes;
        window = p->window_scale + l->ring * l->entry_scale_bytes;
        p->state = state;
        if (p->ratio == MODEL_SPARSE_RATIO) {
            /* rows of K [2 d] and S [2 d] */
            p->index_state = state + OPS_STATE_RING * 4 * (size_t)l->head_dim * sizeof(float);
            state = p->index_state + OPS_STATE_RING * 4 * (size_t)l->index_dim * sizeof(float);
        } else if (p->ratio) {
            state += 3 * (size_t)l->head_dim * sizeof(float);
        }
    }
    l->window_bytes = round_up(window, 64);
    l->state_bytes = round_up(state ? state : 1, 64);
}

enum status layout_make(const struct model_config *config, bool exact, struct layout *ret_layout,
                        struct error *err)
{
    if (!exact) {
        enum status status = check_packed(config, err);
        if (status) {
            return status;
        }
    }
    struct layout l = {.entry_kind = exact ? FORMATS_ENTRY_F32 : FORMATS_ENTRY_PACKED,
                       .n_layers = config->n_layers,
                       .page_tokens = MODEL_PAGE_TOKENS,
                       .head_dim = config->head_dim,
                       .index_dim = config->index_head_dim,
                       .window = config->window,
                       .ring = config->window + LAYOUT_DRAFT_TOKENS};
    l.entry_bytes = formats_entry_bytes(l.entry_kind, l.head_dim, config->rope_dim);
    l.entry_scale_bytes = formats_entry_scale_bytes(l.entry_kind, l.head_dim, config->rope_dim);
    l.key_bytes = formats_key_bytes(l.entry_kind, l.index_dim);
    l.key_scale_bytes = formats_key_scale_bytes(l.entry_kind, l.index_dim);
    place_pages(config, &l);
    place_slots(&l);
    *ret_layout = l;
    return STATUS_OK;
}

void layout_describe(const struct layout *l, struct buf *out)
{
    buf_printf(out,
               "layout 1: %s entries of %zu + %zu, keys of %zu + %zu, page %" PRIu32 " tokens "
               "%zu bytes, window %" PRIu32 ", ring of state %d;",
               l->entry_kind == FORMATS_ENTRY_F32 ? "f32" : "packed", l->entry_bytes,
               l->entry_scale_bytes, l->key_bytes, l->key_scale_bytes, l->page_tokens,
               l->page_bytes, l->window, OPS_STATE_RING);
    for (uint32_t i = 0; i < l->n_layers; i++) {
        const struct ops_place *p = &l->places[i];
        buf_printf(out, " %" PRIu32 " %zu %zu %zu %zu", p->ratio, p->entry, p->entry_scale, p->key,
                   p->key_scale);
    }
}

/* All that a layer writes to a page lies behind its entries. */
size_t layout_page_final(const struct layout *l, uint32_t n_layers)
{
    size_t bytes = l->page_bytes;
    for (uint32_t i = n_layers; i < l->n_layers; i++) {
        if (l->places[i].ratio && l->places[i].entry < bytes) {
            bytes = l->places[i].entry;
        }
    }
    return bytes - bytes % 8;
}

/* One run of bytes of a tail image and of the slot it belongs to. */
struct tail {
    enum { TAIL_MEASURE, TAIL_WRITE, TAIL_READ } what;
    const struct layout *layout;
    uint32_t n_tokens;
    uint8_t *window, *state; /* slots; NULL to measure */
    const uint8_t *src;      /* TAIL_READ */
    uint8_t *dst;            /* TAIL_WRITE */
    size_t at;               /* bytes of the image so far */
};

static void tail_span(struct tail *t, uint8_t *slot, size_t offset, size_t bytes)
{
    if (t->what == TAIL_WRITE) {
        memcpy(t->dst + t->at, slot + offset, bytes);
    } else if (t->what == TAIL_READ) {
        memcpy(slot + offset, t->src + t->at, bytes);
    }
    t->at += bytes;
}

static void tail_window(struct tail *t, const struct ops_place *p)
{
    const struct layout *l = t->layout;
    uint32_t n = t->n_tokens < l->window ? t->n_tokens : l->window;
    for (int scales = 0; scales < 2; scales++) {
        size_t base = scales ? p->window_scale : p->window;
        size_t bytes = scales ? l->entry_scale_bytes : l->entry_bytes;
        for (uint32_t k = t->n_tokens - n; k < t->n_tokens; k++) {
            tail_span(t, t->window, base + k % l->ring * bytes, bytes);
        }
    }
}

/* Rows of one sparse compressor of width d: K [2 d] then S [2 d] a row. */
static void tail_sparse(struct tail *t, size_t base, uint32_t d)
{
    size_t half = (size_t)d * sizeof(float), row = 4 * half;
    uint32_t closed = t->n_tokens - t->n_tokens % MODEL_SPARSE_RATIO;
    for (uint32_t k = closed ? closed - MODEL_SPARSE_RATIO : 0; k < closed; k++) {
        tail_span(t, t->state, base + k % OPS_STATE_RING * row, half);
        tail_span(t, t->state, base + k % OPS_STATE_RING * row + 2 * half, half);
    }
    for (uint32_t k = closed; k < t->n_tokens; k++) {
        tail_span(t, t->state, base + k % OPS_STATE_RING * row, row);
    }
}

/* Visits the image in order. */
static void tail_walk(struct tail *t)
{
    const struct layout *l = t->layout;
    for (uint32_t i = 0; i < l->n_layers; i++) {
        const struct ops_place *p = &l->places[i];
        tail_window(t, p);
        if (p->ratio == MODEL_SPARSE_RATIO) {
            tail_sparse(t, p->state, l->head_dim);
            tail_sparse(t, p->index_state, l->index_dim);
        } else if (p->ratio && t->n_tokens % p->ratio) {
            tail_span(t, t->state, p->state, 3 * (size_t)l->head_dim * sizeof(float));
        }
    }
}

size_t layout_tail_bytes(const struct layout *layout, uint32_t n_tokens)
{
    struct tail t = {.what = TAIL_MEASURE, .layout = layout, .n_tokens = n_tokens};
    tail_walk(&t);
    return round_up(t.at, 8);
}

size_t layout_tail_max_bytes(const struct layout *layout)
{
    size_t most = 0;
    /* Every remainder of every ratio, past a full window. */
    for (uint32_t r = 0; r < layout->page_tokens; r++) {
        size_t bytes = layout_tail_bytes(layout, layout->page_tokens * layout->window + r);
        most = bytes > most ? bytes : most;
    }
    return most;
}

void layout_tail_write(const struct layout *layout, const uint8_t *window, const uint8_t *state,
                       uint32_t n_tokens, uint8_t *dst)
{
    /* Writing only reads the slots; the walk that serves both directions could also write them. */
    struct tail t = {.what = TAIL_WRITE,
                     .layout = layout,
                     .n_tokens = n_tokens,
                     .window = (uint8_t *)(uintptr_t)window,
                     .state = (uint8_t *)(uintptr_t)state,
                     .dst = dst};
    tail_walk(&t);
    memset(dst + t.at, 0, round_up(t.at, 8) - t.at);
}

void layout_tail_read(const struct layout *layout, uint32_t n_tokens, const uint8_t *src,
                      uint8_t *window, uint8_t *state)
{
    memset(window, 0, layout->window_bytes);
    layout_state_reset(layout, state);
    struct tail t = {.what = TAIL_READ,
                     .layout = layout,
                     .n_tokens = n_tokens,
                     .window = window,
                     .state = state,
                     .src = src};
    tail_walk(&t);
}

static void reset_sparse(uint32_t d, uint8_t *state)
{
    float *row = (float *)(void *)state;
    for (uint32_t r = 0; r < OPS_STATE_RING; r++, row += 4 * (size_t)d) {
        for (uint32_t ch = 0; ch < 2 * d; ch++) {
            row[ch] = 0.0f;
            row[2 * (size_t)d + ch] = -INFINITY;
        }
    }
}

void layout_state_reset(const struct layout *layout, uint8_t *state)
{
    memset(state, 0, layout->state_bytes);
    for (uint32_t i = 0; i < layout->n_layers; i++) {
        const struct ops_place *p = &layout->places[i];
        if (p->ratio == MODEL_SPARSE_RATIO) {
            reset_sparse(layout->head_dim, state + p->state);
            reset_sparse(layout->index_dim, state + p->index_state);
        } else if (p->ratio) {
            float *triple = (float *)(void *)(state + p->state);
            for (uint32_t ch = 0; ch < layout->head_dim; ch++) {
                triple[ch] = -INFINITY;
            }
        }
    }
}

void layout_page_trim(const struct layout *layout, uint8_t *page, uint32_t page_i,
                      uint32_t n_tokens)
{
    for (uint32_t i = 0; i < layout->n_layers; i++) {
        const struct ops_place *p = &layout->places[i];
        if (p->ratio == 0) {
            continue;
        }
        uint64_t first = (uint64_t)page_i * p->entries_a_page, done = n_tokens / p->ratio;
        size_t n = done > first ? (size_t)(done - first) : 0;
        if (n >= p->entries_a_page) {
            continue;
        }
        size_t rest = p->entries_a_page - n;
        memset(page + p->entry + n * layout->entry_bytes, 0, rest * layout->entry_bytes);
        memset(page + p->entry_scale + n * layout->entry_scale_bytes, 0,
               rest * layout->entry_scale_bytes);
        if (p->ratio == MODEL_SPARSE_RATIO) {
            memset(page + p->key + n * layout->key_bytes, 0, rest * layout->key_bytes);
            memset(page + p->key_scale + n * layout->key_scale_bytes, 0,
                   rest * layout->key_scale_bytes);
        }
    }
}
