/* The hyper-connections' way in, over the whole card: two launches in place of a product by one
 * block and a warp's walk over 16,384 channels.
 *
 * The first cuts the channels of a row into PARTS runs of equal length, whatever the card: a block
 * makes the 24 products of its run and the sum of its squares, eight warps in turn. The second, a
 * block a row, adds the runs up in order, makes weights and mixing matrix as the reference does,
 * and the normed sum of the streams. All orders follow from the shape, so a row's bits don't depend
 * on the others. fn is fp32, so are these products; no tensor cores.
 */
#include "kernels/cuda/mhc.cuh"

namespace
{

enum {
    H = OPS_HC,
    PARTS = 32,
    THREADS = 256,
    WARPS = THREADS / CUDA_WARP,
    UNIT = 4,             /* floats */
    SQUARES = OPS_HC_OUT, /* place of the sum of squares among a part's 32 sums */
    ROW_THREADS = 512,
    ROW_WARPS = ROW_THREADS / CUDA_WARP
};

/* Blocks (part, row). fn is packed: unit u of output o is unit 32 u + o. */
__global__ void __launch_bounds__(THREADS)
    mhc_parts_kernel(const float4 *fn, uint32_t n_units, const float *streams, float *parts)
{
    __shared__ float shared[WARPS][CUDA_WARP];
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane(), n_runs = PARTS * WARPS;
    const uint32_t run = blockIdx.x * WARPS + warp;
    const uint32_t first = (uint32_t)((uint64_t)run * n_units / n_runs);
    const uint32_t end = (uint32_t)((uint64_t)(run + 1) * n_units / n_runs);
    const float4 *x = reinterpret_cast<const float4 *>(streams) + (size_t)blockIdx.y * n_units;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 8
    for (uint32_t u = first; u < end; u++) {
        const float4 f = x[u], w = fn[(size_t)u * CUDA_BLOCK + lane];
        sum = __fmaf_rn(f.x, w.x, sum);
        sum = __fmaf_rn(f.y, w.y, sum);
        sum = __fmaf_rn(f.z, w.z, sum);
        sum = __fmaf_rn(f.w, w.w, sum);
    }
    for (uint32_t u = first + lane; u < end; u += CUDA_WARP) {
        const float4 f = x[u];
        squares = __fmaf_rn(f.x, f.x, squares);
        squares = __fmaf_rn(f.y, f.y, squares);
        squares = __fmaf_rn(f.z, f.z, squares);
        squares = __fmaf_rn(f.w, f.w, squares);
    }
    squares = warp_sum(squares);
    shared[warp][lane] = lane == SQUARES ? squares : sum;
    __syncthreads();
    if (warp == 0) {
        float total = shared[0][lane];
#pragma unroll
        for (int k = 1; k < WARPS; k++) {
            total += shared[k][lane];
        }
        parts[((size_t)blockIdx.y * PARTS + blockIdx.x) * CUDA_WARP + lane] = total;
    }
}

/* A block for each row of n channels a stream. */
__global__ void __launch_bounds__(ROW_THREADS)
    mhc_row_kernel(const float *parts, uint32_t n, ops_hc_device hc, const float *norm,
                   float rms_eps, float hc_eps, uint32_t iters, bool round, const float *streams,
                   float *x, float *mix)
{
    __shared__ float m[CUDA_WARP], pre[H], squares[ROW_WARPS];
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
    const size_t r = blockIdx.x;
    if (warp == 0) {
        const float *part = parts + r * PARTS * CUDA_WARP + lane;
        float total = part[0], w[H];
#pragma unroll
        for (int k = 1; k < PARTS; k++) {
            total += part[k * CUDA_WARP];
        }
        m[lane] = total;
        const float mean = __shfl_sync(0xffffffffu, total, SQUARES) / (float)(H * n);
        __syncwarp();
        mhc_split(m, sqrtf(mean + rms_eps), hc, iters, hc_eps, w, mix + r * OPS_HC_OUT);
        if (lane == 0) {
#pragma unroll
            for (int k = 0; k < H; k++) {
                pre[k] = w[k];
            }
        }
    }
    __syncthreads();
    const float *f = streams + r * H * n;
    float *u = x + r * n, sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < n; i += ROW_THREADS) {
        float value = pre[0] * f[i];
#pragma unroll
        for (uint32_t k = 1; k < H; k++) {
            value += pre[k] * f[(size_t)k * n + i];
        }
        value = cuda_rounded(value, round);
        u[i] = value;
        sum = __fmaf_rn(value, value, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        squares[warp] = sum;
    }
    __syncthreads();
    float all = squares[0];
#pragma unroll
    for (int k = 1; k < ROW_WARPS; k++) {
        all += squares[k];
    }
    const float root = sqrtf(all / (float)n + rms_eps);
    for (uint32_t i = threadIdx.x; i < n; i += ROW_THREADS) {
        u[i] = cuda_rounded(u[i] / root * norm[i], round);
    }
}

} /* namespace */

bool cuda_mhc_split_room(struct ops_device *dev)
{
    bool ok = true;
    dev->mhc_parts =
        static_cast<float *>(cuda_room(dev, dev->limits.n_rows, PARTS * CUDA_WARP, &ok));
    return ok;
}

void cuda_mhc_pre_split(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_hc *hc, const float *norm, const float *streams,
                        float *ret_x, float *ret_mix)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n = rows->n_rows, n_units = H * d->hidden / UNIT;
    if (n > CUDA_MAX_GRID_Y || n > dev->limits.n_rows || hc->fn.form != CUDA_F32) {
        cuda_mhc_pre(dev, rows, hc, norm, streams, ret_x, ret_mix);
        return;
    }
    if (n == 0) {
        return;
    }
    mhc_parts_kernel<<<dim3(PARTS, n), THREADS, 0, dev->stream>>>(
        static_cast<const float4 *>(hc->fn.data), n_units, streams, dev->mhc_parts);
    cuda_launched(dev, "mhc_pre (parts)");
    const ops_hc_device there = {hc->base, hc->scale};
    mhc_row_kernel<<<n, ROW_THREADS, 0, dev->stream>>>(dev->mhc_parts, d->hidden, there, norm,
                                                       d->rms_eps, d->hc_eps, d->hc_iters,
                                                       !d->exact, streams, ret_x, ret_mix);
    cuda_launched(dev, "mhc_pre (rows)");
}
