/* Index queries and the weights of their heads: two products, then a warp for each row and head. */
#include <math.h>

#include "kernels/cuda/attention.cuh"

namespace
{

enum { THREADS = 256, WARPS = THREADS / CUDA_WARP };

struct indexer_args {
    const float *rope;
    float *iq, *iw;
    uint32_t n_items, index_heads, index_dim, rope_dim;
    float scale;
    bool round;
};

__global__ void __launch_bounds__(THREADS) indexer_kernel(struct indexer_args args)
{
    cuda_grid_begin();
    extern __shared__ float shared[];
    uint32_t warp = threadIdx.x / CUDA_WARP, item = blockIdx.x * WARPS + warp, n = args.index_dim;
    if (item >= args.n_items) {
        return;
    }
    float *x = shared + (size_t)warp * n, *q = args.iq + (size_t)item * n;
    for (uint32_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        x[i] = q[i];
    }
    warp_rope(x, n, args.rope_dim, args.rope + (size_t)(item / args.index_heads) * args.rope_dim,
              false, args.round);
    if (args.round) {
        warp_hadamard(x, n);
        warp_round_row(x, n);
        warp_quant4(x, n);
    }
    for (uint32_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        q[i] = x[i];
    }
    if (cuda_lane() == 0) {
        args.iw[item] = cuda_rounded(args.iw[item] * args.scale, args.round);
    }
}

} /* namespace */

void cuda_indexer_heads(struct ops_device *dev, const struct ops_rows *rows, float *iq, float *iw)
{
    const struct ops_dims *d = &dev->d;
    struct indexer_args args;
    args.rope = dev->rope[1];
    args.iq = iq;
    args.iw = iw;
    args.n_items = rows->n_rows * d->index_heads;
    args.index_heads = d->index_heads;
    args.index_dim = d->index_dim;
    args.rope_dim = d->rope_dim;
    args.scale = (float)(1.0 / sqrt((double)d->index_dim * d->index_heads));
    args.round = !d->exact;
    cuda_run(dev, "indexer", indexer_kernel, (args.n_items + WARPS - 1) / WARPS, THREADS,
             WARPS * d->index_dim * sizeof(float), args);
}

void cuda_indexer(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, const float *qr, float *ret_iq,
                  float *ret_iw)
{
    const struct ops_dims *d = &dev->d;
    const struct cuda_gemm_item items[] = {
        cuda_item(dev, &layer->index_wq_b, qr, ret_iq, (size_t)d->index_heads * d->index_dim,
                  !d->exact),
        cuda_item(dev, &layer->index_weights, x, ret_iw, d->index_heads, !d->exact)};
    cuda_gemms(dev, items, 2, rows->n_rows);
    cuda_indexer_heads(dev, rows, ret_iq, ret_iw);
}
