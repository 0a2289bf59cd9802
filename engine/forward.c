/* The layer graph: the order of operations and nothing else.
 *
 * What all ranks would compute alike, those that have memory of their own compute, each for itself;
 * with one memory that is rank 0 alone. The bits are the same either way, and so are the pages.
 *
 * Order within a layer matters in one place: entries and keys that a token completes are in their
 * pages before that token attends, and the window takes new rows only after every rank has
 * attended.
 */
#include "engine/forward.h"

#include <float.h>

static float *floats(struct forward *f, uint32_t rank, size_t n, size_t m, bool *ok)
{
    float *memory = f->ops->alloc(f->ranks[rank].device, n * m * sizeof(float));
    *ok = *ok && memory;
    return memory;
}

/* What one rank computes for itself, or rank 0 for all. */
static void init_alike(struct forward *f, uint32_t k, bool *ok)
{
    struct forward_rank *rank = &f->ranks[k];
    const struct ops_dims *d = &rank->dims;
    size_t t = f->max_rows;
    rank->streams = floats(f, k, t, (size_t)OPS_HC * d->hidden, ok);
    rank->x = floats(f, k, t, d->hidden, ok);
    rank->mix = floats(f, k, t, OPS_HC_OUT, ok);
    rank->iq = floats(f, k, t, (size_t)d->index_heads * d->index_dim, ok);
    rank->iw = floats(f, k, t, d->index_heads, ok);
    rank->selection.n = (uint32_t *)(void *)floats(f, k, t, 1, ok);
    rank->selection.index = (uint32_t *)(void *)floats(f, k, t, d->index_topk, ok);
    rank->experts = (uint32_t *)(void *)floats(f, k, t, d->n_experts_used, ok);
    rank->expert_weights = floats(f, k, t, d->n_experts_used, ok);
}

enum status forward_init(struct forward *f, struct error *err)
{
    const struct forward_rank *first = &f->ranks[0];
    size_t t = f->max_rows;
    bool ok = true;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        const struct ops_dims *d = &rank->dims;
        size_t wide = (size_t)d->n_heads * d->head_dim;
        if (k < forward_n_memories(f)) {
            init_alike(f, k, &ok);
        } else {
            rank->streams = first->streams;
            rank->x = first->x;
            rank->mix = first->mix;
            rank->iq = first->iq;
            rank->iw = first->iw;
            rank->selection = first->selection;
            rank->experts = first->experts;
            rank->expert_weights = first->expert_weights;
        }
        rank->qr = floats(f, k, t, d->q_lora, &ok);
        rank->q = floats(f, k, t, wide, &ok);
        rank->kv_rows = floats(f, k, t, d->head_dim, &ok);
        rank->o = floats(f, k, t, wide, &ok);
        rank->y = floats(f, k, t, d->hidden, &ok);
    }
    if (f->ops->sample && f->group_ranks == 1) {
        f->logits = floats(f, 0, f->max_draws, f->vocab, &ok);
    }
    return ok ? STATUS_OK
              : error_set(err, STATUS_EXHAUSTED,
                          "no memory for the activations of %u rows: lower the chunk length",
                          f->max_rows);
}

/* The rank whose operations come next: a thread that drives several devices tells them which. */
static struct forward_rank *turn(struct forward *f, uint32_t k)
{
    if (f->n_ranks > 1 && f->ops->enter) {
        f->ops->enter(f->ranks[k].device);
    }
    return &f->ranks[k];
}

/* The ranks' parts of a sublayer's output become their sum; a group of one has it whole. */
static void sum_ranks(struct forward *f, const struct ops_rows *rows)
{
    if (f->group_ranks > 1) {
        struct ops_device *devices[FORWARD_MAX_RANKS];
        float *parts[FORWARD_MAX_RANKS];
        for (uint32_t k = 0; k < f->n_ranks; k++) {
            devices[k] = f->ranks[k].device;
            parts[k] = f->ranks[k].y;
        }
        f->ops->comm(devices, f->n_ranks, rows->n_rows, parts);
    }
}

/* A sublayer's output into the streams, unless there was none before, and the streams to the input
 * of the next: layer_i's attention or mixture. Layer n_layers: there is none. */
static void turn_sublayer(struct forward *f, uint32_t layer_i, bool is_attention,
                          const struct ops_rows *rows)
{
    const struct ops *ops = f->ops;
    const bool is_first = layer_i == 0 && is_attention;
    if (!is_first) {
        sum_ranks(f, rows);
    }
    for (uint32_t k = 0; k < forward_n_memories(f); k++) {
        struct forward_rank *rank = turn(f, k);
        const struct ops_layer *layer = layer_i < f->n_layers ? &rank->layers[layer_i] : NULL;
        const struct ops_hc *hc = !layer ? NULL : is_attention ? &layer->hc_attn : &layer->hc_ffn;
        const float *norm = !layer ? NULL : is_attention ? layer->attn_norm : layer->ffn_norm;
        if (ops->mhc_turn && !is_first && layer) {
            ops->mhc_turn(rank->device, rows, rank->y, hc, norm, rank->streams, rank->x, rank->mix);
            continue;
        }
        if (!is_first) {
            ops->mhc_post(rank->device, rows, rank->y, rank->mix, rank->streams);
        }
        if (layer) {
            ops->mhc_pre(rank->device, rows, hc, norm, rank->streams, rank->x, rank->mix);
        }
    }
}

/* What tokens leave in the cache, and which entries they attend to. */
static void cache(struct forward *f, uint32_t layer_i, const struct ops_rows *rows)
{
    const struct ops *ops = f->ops;
    for (uint32_t k = 0; k < forward_n_memories(f); k++) {
        struct forward_rank *rank = turn(f, k);
        const struct ops_layer *layer = &rank->layers[layer_i];
        const bool is_sparse = layer->place.ratio == OPS_SPARSE_RATIO;
        if (is_sparse && !ops->inputs) {
            ops->indexer(rank->device, rows, layer, rank->x, rank->qr, rank->iq, rank->iw);
            ops->compress(rank->device, rows, layer, true, rank->x, &rank->kv);
        }
        if (is_sparse) {
            ops->topk(rank->device, rows, layer, rank->iq, rank->iw, &rank->kv, &rank->selection);
        }
        if (layer->place.ratio && !ops->inputs) {
            ops->compress(rank->device, rows, layer, false, rank->x, &rank->kv);
        }
    }
}

static void attention(struct forward *f, uint32_t layer_i, const struct ops_rows *rows)
{
    const struct ops *ops = f->ops;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = turn(f, k);
        const struct ops_layer *layer = &rank->layers[layer_i];
        if (ops->inputs && k < forward_n_memories(f)) {
            ops->inputs(rank->device, rows, layer, rank->x, &rank->kv, rank->qr, rank->q,
                        rank->kv_rows, rank->iq, rank->iw);
        } else {
            ops->project(rank->device, rows, layer, rank->x, rank->qr, rank->q, rank->kv_rows);
        }
    }
    cache(f, layer_i, rows);
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = turn(f, k);
        struct ops_kv kv = rank->kv;
        kv.stores_window = f->apart || k == f->n_ranks - 1;
        ops->attend(rank->device, rows, &rank->layers[layer_i], rank->q, rank->kv_rows,
                    &rank->selection, &kv, rank->o);
        ops->oproj(rank->device, rows, &rank->layers[layer_i], rank->o, rank->y);
    }
}

static void mixture(struct forward *f, uint32_t layer_i, const struct ops_rows *rows)
{
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = turn(f, k);
        const struct ops_layer *layer = &rank->layers[layer_i];
        if (k < forward_n_memories(f)) {
            f->ops->route(rank->device, rows, layer, rank->x, rank->experts, rank->expert_weights);
        }
        f->ops->experts(rank->device, rows, layer, rank->x, rank->experts, rank->expert_weights,
                        rank->y);
    }
}

enum status forward_run(struct forward *f, const struct ops_rows *rows, const _Atomic bool *cancel,
                        void (*tick)(void *cookie, uint32_t n_layers), void *cookie)
{
    const struct ops *ops = f->ops;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = turn(f, k);
        ops->begin(rank->device, rows);
        if (k < forward_n_memories(f)) {
            ops->embed(rank->device, rows, &rank->globals.embed, rank->streams);
        }
    }
    for (uint32_t i = 0; i < f->n_layers; i++) {
        if (cancel && atomic_load_explicit(cancel, memory_order_relaxed)) {
            return STATUS_CANCELLED;
        }
        if (i == 0) {
            turn_sublayer(f, i, true, rows);
        }
        attention(f, i, rows);
        turn_sublayer(f, i, false, rows);
        tick(cookie, i + 1); /* half a layer: a large chunk on a slow host is no hang */
        mixture(f, i, rows);
        turn_sublayer(f, i + 1, true, rows);
        tick(cookie, i + 1);
    }
    return STATUS_OK;
}

enum status forward_share(struct forward *f, void *memory, size_t bytes, struct error *err)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < f->n_ranks && !status; k++) {
        status = f->ops->share(f->ranks[k].device, memory, bytes, err);
    }
    return status;
}

/* The rank that was told first holds it for the others, so it goes last. */
void forward_unshare(struct forward *f, void *memory)
{
    for (uint32_t k = f->n_ranks; k-- > 0;) {
        f->ops->unshare(f->ranks[k].device, memory);
    }
}

enum status forward_wait(struct forward *f, struct error *err)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < f->n_ranks && !status; k++) {
        status = f->ops->wait(f->ranks[k].device, err);
    }
    return status;
}

void forward_clear_logits(const struct forward *f, float *logits, uint32_t n_rows)
{
    for (size_t i = 0; f->group_ranks > f->n_ranks && i < (size_t)n_rows * f->vocab; i++) {
        logits[i] = -FLT_MAX;
    }
}

void forward_ask_logits(struct forward *f, const uint32_t *which, uint32_t n, float *ret_logits)
{
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = turn(f, k);
        f->ops->head(rank->device, &rank->globals, rank->streams, which, n,
                     ret_logits + rank->vocab_first, f->vocab);
    }
}

void forward_draw(struct forward *f, const struct ops_rows *rows, const uint32_t *which)
{
    forward_ask_logits(f, which, rows->n_rows, f->logits);
    f->ops->sample(f->ranks[0].device, rows, f->logits, f->vocab);
}

enum status forward_logits(struct forward *f, const uint32_t *which, uint32_t n, float *ret_logits,
                           struct error *err)
{
    forward_ask_logits(f, which, n, ret_logits);
    return forward_wait(f, err);
}
