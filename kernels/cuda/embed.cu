/* Token ids to the four streams, and what a call needs to know of its positions. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 128, WARPS = THREADS / CUDA_WARP, EMBED_BLOCKS = 8 };

/* ids: what was drawn last, and `tokens`, which are the rows' own, that may follow it; or NULL. */
__global__ void __launch_bounds__(THREADS)
    rope_kernel(ops_rows rows, const float *freqs, uint32_t rope_dim, float *table,
                const uint32_t *ids, uint32_t *tokens)
{
    cuda_grid_begin();
    uint32_t r = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (r >= rows.n_rows) {
        return;
    }
    if (ids && cuda_lane() == 0 && tokens[r] >= OPS_FOLLOWS(0)) {
        tokens[r] = ids[tokens[r] - OPS_FOLLOWS(0)];
    }
    warp_rope_table(freqs, rope_dim, rows.positions[r], table + (size_t)r * rope_dim);
}

/* EMBED_BLOCKS blocks (y) for each row (x). */
__global__ void __launch_bounds__(THREADS)
    embed_kernel(ops_rows rows, const void *table, bool half, uint32_t n, float *streams)
{
    cuda_grid_begin();
    const size_t from = (size_t)rows.tokens[blockIdx.x] * n;
    float *to = streams + (size_t)blockIdx.x * OPS_HC * n;
    for (uint32_t i = blockIdx.y * THREADS + threadIdx.x; i < n; i += EMBED_BLOCKS * THREADS) {
        float x = half ? bf16_decode(static_cast<const uint16_t *>(table)[from + i])
                       : static_cast<const float *>(table)[from + i];
#pragma unroll
        for (uint32_t s = 0; s < OPS_HC; s++) {
            to[(size_t)s * n + i] = x;
        }
    }
}

} /* namespace */

void cuda_positions(struct ops_device *dev)
{
    uint32_t n = dev->rows.n_rows, rope_dim = dev->d.rope_dim;
    for (int k = 0; k < 2 && n; k++) {
        bool follow = k == 0 && dev->rows.draws;
        cuda_run(dev, "the rotation tables", rope_kernel, (n + WARPS - 1) / WARPS, THREADS, 0,
                 dev->rows, dev->freqs[k], rope_dim, dev->rope[k], follow ? dev->ids : NULL,
                 const_cast<uint32_t *>(dev->rows.tokens));
    }
}

void cuda_embed(struct ops_device *dev, const struct ops_rows *rows, const struct ops_matrix *table,
                float *ret_streams)
{
    if (table->form != CUDA_TABLE_BF16 && table->form != CUDA_TABLE_F32) {
        cuda_failed(dev, STATUS_INVALID, "embed was given a matrix for products");
    } else if (rows->n_rows) {
        cuda_run(dev, "embed", embed_kernel, dim3(rows->n_rows, EMBED_BLOCKS), THREADS, 0,
                 dev->rows, table->data, table->form == CUDA_TABLE_BF16, dev->d.hidden,
                 ret_streams);
    }
}
