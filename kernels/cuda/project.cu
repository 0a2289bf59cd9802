/* The attention's inputs: q through its low-rank form, and the one key-value row of a token. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 128, WARPS = THREADS / CUDA_WARP };

struct norms {
    const float *q, *kv;
    float eps;
    bool exact;
};

/* Two warps for each row: the low-rank q, and the key-value row. */
__global__ void __launch_bounds__(THREADS)
    narrow_kernel(uint32_t n_rows, uint32_t q_lora, uint32_t head_dim, uint32_t rope_dim,
                  norms norm, const float *rope, float *qr, float *kv)
{
    cuda_grid_begin();
    const uint32_t item = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP, r = item / 2;
    if (r >= n_rows) {
        return;
    }
    float *q = qr + (size_t)r * q_lora, *row = kv + (size_t)r * head_dim;
    if (item % 2 == 0) {
        warp_rms_norm(q, norm.q, q_lora, norm.eps, !norm.exact, q);
        return;
    }
    warp_rms_norm(row, norm.kv, head_dim, norm.eps, !norm.exact, row);
    warp_rope(row, head_dim, rope_dim, rope + (size_t)r * rope_dim, false, !norm.exact);
    if (!norm.exact) {
        warp_quant8(row, head_dim - rope_dim, FORMATS_KV_GROUP, row);
    }
}

/* A warp for each head of a row. */
__global__ void __launch_bounds__(THREADS)
    head_kernel(size_t n_heads_all, uint32_t n_heads, uint32_t head_dim, uint32_t rope_dim,
                float eps, bool round, const float *rope, float *q)
{
    cuda_grid_begin();
    size_t item = (size_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (item < n_heads_all) {
        float *head = q + item * head_dim;
        warp_rms_norm(head, NULL, head_dim, eps, round, head);
        warp_rope(head, head_dim, rope_dim, rope + item / n_heads * rope_dim, false, round);
    }
}

} /* namespace */

void cuda_project_narrow(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, float *qr, float *kv)
{
    const struct ops_dims *d = &dev->d;
    const norms norm = {layer->q_norm, layer->kv_norm, d->rms_eps, d->exact};
    cuda_run(dev, "project", narrow_kernel, (2 * rows->n_rows + WARPS - 1) / WARPS, THREADS, 0,
             rows->n_rows, d->q_lora, d->head_dim, d->rope_dim, norm,
             dev->rope[layer->place.ratio != 0], qr, kv);
}

void cuda_project_heads(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, float *q)
{
    const struct ops_dims *d = &dev->d;
    const size_t heads = (size_t)rows->n_rows * d->n_heads;
    cuda_run(dev, "project", head_kernel, (unsigned)((heads + WARPS - 1) / WARPS), THREADS, 0,
             heads, d->n_heads, d->head_dim, d->rope_dim, d->rms_eps, !d->exact,
             dev->rope[layer->place.ratio != 0], q);
}

void cuda_project(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                  float *ret_kv)
{
    if (rows->n_rows == 0) {
        return;
    }
    struct cuda_gemm_item items[2] = {
        cuda_item(dev, &layer->wq_a, x, ret_qr, dev->d.q_lora, !dev->d.exact),
        cuda_item(dev, &layer->wkv, x, ret_kv, dev->d.head_dim, !dev->d.exact)};
    cuda_gemms(dev, items, 2, rows->n_rows);
    cuda_project_narrow(dev, rows, layer, ret_qr, ret_kv);
    items[0] = cuda_item(dev, &layer->wq_b, ret_qr, ret_q, (size_t)dev->d.n_heads * dev->d.head_dim,
                         !dev->d.exact);
    cuda_gemms(dev, items, 1, rows->n_rows);
    cuda_project_heads(dev, rows, layer, ret_q);
}

void cuda_oproj(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *o, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    const size_t wide = (size_t)d->n_heads * d->head_dim, narrow = (size_t)d->o_groups * d->o_lora;
    for (uint32_t g = 0; g < d->o_groups;) {
        struct cuda_gemm_item items[CUDA_MOST_JOINED];
        uint32_t m = 0;
        for (; m < CUDA_MOST_JOINED && g < d->o_groups; m++, g++) {
            items[m] = {&layer->wo_a[g],
                        o + g * (wide / d->o_groups),
                        wide,
                        dev->wide + (size_t)g * d->o_lora,
                        narrow,
                        !d->exact,
                        false};
        }
        cuda_gemms(dev, items, m, rows->n_rows);
    }
    const struct cuda_gemm_item last =
        cuda_item(dev, &layer->wo_b, dev->wide, ret_y, d->hidden, !d->exact && !d->is_partial);
    cuda_gemms(dev, &last, 1, rows->n_rows);
}
