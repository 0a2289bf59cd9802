/* The dense products of a layer's attention, but for its output's, in two launches.
 *
 * What a layer makes of its input, low-rank q, the key-value row, the compressors' values and
 * scores, the index's weights, waits for that input alone; both kinds of heads wait for the
 * low-rank q. So few rows have two launches of products here instead of five, whose ends and
 * beginnings, a few microseconds each, are a good part of such a step. Each product, and what is
 * done with it, is that of the operation it belongs to, bit for bit.
 */
#include "kernels/cuda/cuda.h"

static uint32_t compressor_width(const struct ops_device *dev)
{
    return 2 * dev->d.head_dim; /* of a sparse layer's, the widest */
}

bool cuda_inputs_room(struct ops_device *dev)
{
    bool ok = true;
    for (int i = 0; i < 2; i++) {
        dev->compressed[i] = cuda_room(dev, CUDA_FEW_ROWS, compressor_width(dev), &ok);
    }
    return ok;
}

void cuda_inputs_joined(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *x, const struct ops_kv *kv,
                        float *ret_qr, float *ret_q, float *ret_kv, float *ret_iq, float *ret_iw)
{
    const struct ops_dims *d = &dev->d;
    const bool is_sparse = layer->place.ratio == OPS_SPARSE_RATIO, round = !d->exact;
    const struct ops_compressor *c = &layer->compressor, *ic = &layer->index_compressor;
    if (rows->n_rows > CUDA_FEW_ROWS ||
        (layer->place.ratio && c->wkv.rows > compressor_width(dev))) {
        cuda_project_tensor(dev, rows, layer, x, ret_qr, ret_q, ret_kv);
        if (is_sparse) {
            cuda_indexer_tensor(dev, rows, layer, x, ret_qr, ret_iq, ret_iw);
            cuda_compress_tensor(dev, rows, layer, true, x, kv);
        }
        if (layer->place.ratio) {
            cuda_compress_tensor(dev, rows, layer, false, x, kv);
        }
        return;
    }
    struct cuda_gemm_item items[7];
    uint32_t n = 0;
    items[n++] = cuda_item(dev, &layer->wq_a, x, ret_qr, d->q_lora, round);
    items[n++] = cuda_item(dev, &layer->wkv, x, ret_kv, d->head_dim, round);
    if (layer->place.ratio) {
        items[n++] = cuda_item(dev, &c->wkv, x, dev->compressed[0], c->wkv.rows, false);
        items[n++] = cuda_item(dev, &c->wgate, x, dev->compressed[1], c->wkv.rows, false);
    }
    if (is_sparse) {
        items[n++] = cuda_item(dev, &ic->wkv, x, dev->wide, ic->wkv.rows, false);
        items[n++] = cuda_item(dev, &ic->wgate, x, dev->wide2, ic->wkv.rows, false);
        items[n++] = cuda_item(dev, &layer->index_weights, x, ret_iw, d->index_heads, round);
    }
    dev->tensor = true;
    cuda_gemms(dev, items, n, rows->n_rows);
    cuda_project_narrow(dev, rows, layer, ret_qr, ret_kv);
    n = 0;
    items[n++] =
        cuda_item(dev, &layer->wq_b, ret_qr, ret_q, (size_t)d->n_heads * d->head_dim, round);
    if (is_sparse) {
        items[n++] = cuda_item(dev, &layer->index_wq_b, ret_qr, ret_iq,
                               (size_t)d->index_heads * d->index_dim, round);
    }
    cuda_gemms(dev, items, n, rows->n_rows);
    dev->tensor = false;
    cuda_project_heads(dev, rows, layer, ret_q);
    if (is_sparse) {
        cuda_indexer_heads(dev, rows, ret_iq, ret_iw);
        cuda_compress_entries(dev, rows, layer, true, kv, dev->wide, dev->wide2);
    }
    if (layer->place.ratio) {
        cuda_compress_entries(dev, rows, layer, false, kv, dev->compressed[0], dev->compressed[1]);
    }
}
