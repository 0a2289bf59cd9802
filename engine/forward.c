/* The layer graph: the order of operations and nothing else.
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

enum status forward_init(struct forward *f, struct error *err)
{
    const struct ops_dims *d = &f->ranks[0].dims;
    size_t t = f->max_rows;
    bool ok = true;
    f->streams = floats(f, 0, t, (size_t)OPS_HC * d->hidden, &ok);
    f->x = floats(f, 0, t, d->hidden, &ok);
    f->mix = floats(f, 0, t, OPS_HC_OUT, &ok);
    f->iq = floats(f, 0, t, (size_t)d->index_heads * d->index_dim, &ok);
    f->iw = floats(f, 0, t, d->index_heads, &ok);
    f->selection.n = (uint32_t *)(void *)floats(f, 0, t, 1, &ok);
    f->selection.index = (uint32_t *)(void *)floats(f, 0, t, d->index_topk, &ok);
    f->experts = (uint32_t *)(void *)floats(f, 0, t, d->n_experts_used, &ok);
    f->expert_weights = floats(f, 0, t, d->n_experts_used, &ok);
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        size_t wide = (size_t)rank->dims.n_heads * d->head_dim;
        rank->qr = floats(f, k, t, d->q_lora, &ok);
        rank->q = floats(f, k, t, wide, &ok);
        rank->kv_rows = floats(f, k, t, d->head_dim, &ok);
        rank->o = floats(f, k, t, wide, &ok);
        rank->y = floats(f, k, t, d->hidden, &ok);
    }
    return ok ? STATUS_OK
              : error_set(err, STATUS_EXHAUSTED,
                          "no memory for the activations of %u rows: lower the chunk length",
                          f->max_rows);
}

/* The ranks' parts of a sublayer's output become their sum; a group of one has it whole. */
static float *sum_ranks(struct forward *f, const struct ops_rows *rows)
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
    return f->ranks[0].y;
}

static void attention(struct forward *f, uint32_t layer_i, const struct ops_rows *rows)
{
    const struct ops *ops = f->ops;
    struct ops_device *first = f->ranks[0].device;
    const struct ops_layer *layer = &f->ranks[0].layers[layer_i];
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        ops->project(rank->device, rows, &rank->layers[layer_i], f->x, rank->qr, rank->q,
                     rank->kv_rows);
    }
    if (layer->place.ratio == OPS_SPARSE_RATIO) {
        ops->indexer(first, rows, layer, f->x, f->ranks[0].qr, f->iq, f->iw);
        ops->compress(first, rows, layer, true, f->x, &f->kv);
        ops->topk(first, rows, layer, f->iq, f->iw, &f->kv, &f->selection);
    }
    if (layer->place.ratio) {
        ops->compress(first, rows, layer, false, f->x, &f->kv);
    }
    struct ops_kv kv = f->kv;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        kv.stores_window = k == f->n_ranks - 1;
        ops->attend(rank->device, rows, &rank->layers[layer_i], rank->q, rank->kv_rows,
                    &f->selection, &kv, rank->o);
        ops->oproj(rank->device, rows, &rank->layers[layer_i], rank->o, rank->y);
    }
}

static void mixture(struct forward *f, uint32_t layer_i, const struct ops_rows *rows)
{
    f->ops->route(f->ranks[0].device, rows, &f->ranks[0].layers[layer_i], f->x, f->experts,
                  f->expert_weights);
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        f->ops->experts(rank->device, rows, &rank->layers[layer_i], f->x, f->experts,
                        f->expert_weights, rank->y);
    }
}

enum status forward_run(struct forward *f, const struct ops_rows *rows, const _Atomic bool *cancel,
                        void (*tick)(void *cookie, uint32_t n_layers), void *cookie)
{
    const struct ops *ops = f->ops;
    struct ops_device *first = f->ranks[0].device;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        ops->begin(f->ranks[k].device, rows);
    }
    ops->embed(first, rows, &f->ranks[0].globals.embed, f->streams);
    for (uint32_t i = 0; i < f->n_layers; i++) {
        if (cancel && atomic_load_explicit(cancel, memory_order_relaxed)) {
            return STATUS_CANCELLED;
        }
        const struct ops_layer *layer = &f->ranks[0].layers[i];
        ops->mhc_pre(first, rows, &layer->hc_attn, layer->attn_norm, f->streams, f->x, f->mix);
        attention(f, i, rows);
        ops->mhc_post(first, rows, sum_ranks(f, rows), f->mix, f->streams);
        tick(cookie, i + 1); /* half a layer: a large chunk on a slow host is no hang */
        ops->mhc_pre(first, rows, &layer->hc_ffn, layer->ffn_norm, f->streams, f->x, f->mix);
        mixture(f, i, rows);
        ops->mhc_post(first, rows, sum_ranks(f, rows), f->mix, f->streams);
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

enum status forward_logits(struct forward *f, const uint32_t *which, uint32_t n, float *ret_logits,
                           struct error *err)
{
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        f->ops->head(rank->device, &rank->globals, f->streams, which, n,
                     ret_logits + rank->vocab_first, f->vocab);
    }
    return forward_wait(f, err);
}
