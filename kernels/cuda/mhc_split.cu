/* The hyper-connections over the whole card, in place of a product by one block and a warp's walk
 * over 16,384 channels.
 *
 * `split`, the way in, is two launches. The first cuts the channels of a row into PARTS runs of
 * equal length, whatever the card: a block makes the 24 products of its run and the sum of its
 * squares, eight warps in turn. The second, a block a row, adds the runs up in order, makes weights
 * and mixing matrix as the reference does, and the normed sum of the streams.
 *
 * `turn`, the way from a sublayer to the next, is one: a block has a run of channels of all four
 * streams, so that it can bring the output into them before it makes their products, whose weights
 * are on their way meanwhile; the last block of a row to end does what the second launch does.
 *
 * All orders follow from the shape, so a row's bits don't depend on the others. fn is fp32, so are
 * these products; no tensor cores.
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
    FEW_UNITS = 16, /* of a warp of `turn`: 4,096 channels, or ... */
    MOST_UNITS = 32 /* ... 8,192 */
};

__device__ __forceinline__ float add_products(const float4 &a, const float4 &b, float sum)
{
    sum = __fmaf_rn(a.x, b.x, sum);
    sum = __fmaf_rn(a.y, b.y, sum);
    sum = __fmaf_rn(a.z, b.z, sum);
    return __fmaf_rn(a.w, b.w, sum);
}

/* By a block: its warps' sums, in each lane of one output, added in turn, and of the squares. */
__device__ __forceinline__ void store_part(float sum, float squares, float *to)
{
    __shared__ float shared[WARPS][CUDA_WARP];
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
    squares = warp_sum(squares);
    shared[warp][lane] = lane == SQUARES ? squares : sum;
    __syncthreads();
    if (warp == 0) {
        float total = shared[0][lane];
#pragma unroll
        for (int k = 1; k < WARPS; k++) {
            total += shared[k][lane];
        }
        to[lane] = total;
    }
}

/* Blocks (part, row). fn is packed: unit u of output o is unit 32 u + o. */
__global__ void __launch_bounds__(THREADS)
    mhc_parts_kernel(const float4 *fn, uint32_t n_units, const float *streams, float *parts)
{
    cuda_grid_begin();
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane(), n_runs = PARTS * WARPS;
    const uint32_t run = blockIdx.x * WARPS + warp;
    const uint32_t first = (uint32_t)((uint64_t)run * n_units / n_runs);
    const uint32_t end = (uint32_t)((uint64_t)(run + 1) * n_units / n_runs);
    const float4 *x = reinterpret_cast<const float4 *>(streams) + (size_t)blockIdx.y * n_units;
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 8
    for (uint32_t u = first; u < end; u++) {
        const float4 f = x[u], w = fn[(size_t)u * CUDA_BLOCK + lane];
        sum = add_products(f, w, sum);
    }
    for (uint32_t u = first + lane; u < end; u += CUDA_WARP) {
        const float4 f = x[u];
        squares = add_products(f, f, squares);
    }
    store_part(sum, squares, parts + ((size_t)blockIdx.y * PARTS + blockIdx.x) * CUDA_WARP);
}

/* What the sums of a row's parts lead to. */
struct row_args {
    uint32_t n; /* channels of a stream */
    ops_hc_device hc;
    const float *norm;
    float rms_eps, hc_eps;
    uint32_t iters;
    bool round;
};

/* By a block of T threads: a row's weights and mixing matrix from its parts, and the normed sum of
 * its streams. Other blocks of the launch may have written what is read. */
template <int T>
__device__ __forceinline__ void finish_row(const row_args &a, const float *parts,
                                           const float *streams, float *u, float *mix)
{
    enum { T_WARPS = T / CUDA_WARP };
    __shared__ float m[CUDA_WARP], pre[H], squares[T_WARPS];
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane(), n = a.n;
    if (warp == 0) {
        float total = __ldcg(parts + lane), w[H];
#pragma unroll
        for (int k = 1; k < PARTS; k++) {
            total += __ldcg(parts + k * CUDA_WARP + lane);
        }
        m[lane] = total;
        const float mean = __shfl_sync(0xffffffffu, total, SQUARES) / (float)(H * n);
        __syncwarp();
        mhc_split(m, sqrtf(mean + a.rms_eps), a.hc, a.iters, a.hc_eps, w, mix);
        if (lane == 0) {
#pragma unroll
            for (int k = 0; k < H; k++) {
                pre[k] = w[k];
            }
        }
    }
    __syncthreads();
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < n; i += T) {
        float value = pre[0] * __ldcg(streams + i);
#pragma unroll
        for (uint32_t k = 1; k < H; k++) {
            value += pre[k] * __ldcg(streams + (size_t)k * n + i);
        }
        value = cuda_rounded(value, a.round);
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
    for (int k = 1; k < T_WARPS; k++) {
        all += squares[k];
    }
    const float root = sqrtf(all / (float)n + a.rms_eps);
    for (uint32_t i = threadIdx.x; i < n; i += T) {
        u[i] = cuda_rounded(u[i] / root * a.norm[i], a.round);
    }
}

/* A block for each row. */
__global__ void __launch_bounds__(ROW_THREADS)
    mhc_row_kernel(row_args a, const float *parts, const float *streams, float *x, float *mix)
{
    cuda_grid_begin();
    const size_t r = blockIdx.x;
    finish_row<ROW_THREADS>(a, parts + r * PARTS * CUDA_WARP, streams + r * H * a.n, x + r * a.n,
                            mix + r * OPS_HC_OUT);
}

/* Blocks (part, row): channels of all streams, as mhc_post has them, then their products. */
template <int UNITS>
__global__ void __launch_bounds__(THREADS)
    mhc_turn_kernel(row_args a, const float4 *fn, const float *y, float *all_streams, float *parts,
                    uint32_t *arrived, float *x, float *all_mix)
{
    arch_grid_go();
    __shared__ float4 run[UNITS * WARPS];
    __shared__ bool is_last;
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane(), n_quads = a.n / UNIT;
    const uint32_t first = blockIdx.x * n_quads / PARTS, end = (blockIdx.x + 1) * n_quads / PARTS;
    const uint32_t n = end - first; /* units of a stream, here */
    const size_t r = blockIdx.y;
    float *streams = all_streams + r * H * a.n, *mix = all_mix + r * OPS_HC_OUT;
    /* Warp k's units of fn: every WARPSth, whatever lies between. */
    float4 w[UNITS];
#pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) {
        const uint32_t at = i * WARPS + warp, k = at / n;
        w[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < H * n) {
            w[i] = fn[((size_t)k * n_quads + first + at - k * n) * CUDA_BLOCK + lane];
        }
    }
    arch_grid_wait(); /* these are older than this step */
    float *there = reinterpret_cast<float *>(run);
    for (uint32_t c = threadIdx.x; c < UNIT * n; c += THREADS) {
        const size_t i = (size_t)UNIT * first + c;
        const float from = y[r * a.n + i];
        float in[H];
#pragma unroll
        for (uint32_t j = 0; j < H; j++) {
            in[j] = streams[(size_t)j * a.n + i];
        }
#pragma unroll
        for (uint32_t k = 0; k < H; k++) {
            const float out = mhc_out(mix, k, in, from, a.round);
            streams[(size_t)k * a.n + i] = out;
            there[(size_t)k * UNIT * n + c] = out;
        }
    }
    __syncthreads();
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) {
        if (i * WARPS + warp < H * n) {
            const float4 f = run[i * WARPS + warp];
            sum = add_products(f, w[i], sum);
        }
    }
    for (uint32_t u = threadIdx.x; u < H * n; u += THREADS) {
        const float4 f = run[u];
        squares = add_products(f, f, squares);
    }
    store_part(sum, squares, parts + (r * PARTS + blockIdx.x) * CUDA_WARP);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(arrived + r, 1u) == PARTS - 1;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    finish_row<THREADS>(a, parts + r * PARTS * CUDA_WARP, streams, x + r * a.n, mix);
    if (threadIdx.x == 0) {
        arrived[r] = 0; /* for the next launch */
    }
}

row_args args_of(const struct ops_device *dev, const struct ops_hc *hc, const float *norm)
{
    const struct ops_dims *d = &dev->d;
    return {d->hidden, {hc->base, hc->scale}, norm, d->rms_eps, d->hc_eps, d->hc_iters, !d->exact};
}

} /* namespace */

bool cuda_mhc_split_room(struct ops_device *dev)
{
    bool ok = true;
    dev->mhc_parts =
        static_cast<float *>(cuda_room(dev, dev->limits.n_rows, PARTS * CUDA_WARP, &ok));
    dev->mhc_arrived = static_cast<uint32_t *>(cuda_room(dev, dev->limits.n_rows, 1, &ok));
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
    cuda_run(dev, "mhc_pre (parts)", mhc_parts_kernel, dim3(PARTS, n), THREADS, 0,
             static_cast<const float4 *>(hc->fn.data), n_units, streams, dev->mhc_parts);
    cuda_run(dev, "mhc_pre (rows)", mhc_row_kernel, n, ROW_THREADS, 0, args_of(dev, hc, norm),
             dev->mhc_parts, streams, ret_x, ret_mix);
}

void cuda_mhc_turn(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                   const struct ops_hc *hc, const float *norm, float *streams, float *ret_x,
                   float *mix)
{
    const uint32_t n = rows->n_rows, hidden = dev->d.hidden;
    const uint32_t n_units = H * ((hidden / UNIT + PARTS - 1) / PARTS); /* of a block */
    if (n > CUDA_MAX_GRID_Y || n > dev->limits.n_rows || hc->fn.form != CUDA_F32 || hidden % UNIT ||
        n_units > MOST_UNITS * WARPS) {
        cuda_mhc_post(dev, rows, y, mix, streams);
        cuda_mhc_pre(dev, rows, hc, norm, streams, ret_x, mix);
        return;
    }
    if (n == 0) {
        return;
    }
    const auto kernel =
        n_units > FEW_UNITS * WARPS ? mhc_turn_kernel<MOST_UNITS> : mhc_turn_kernel<FEW_UNITS>;
    cuda_run(dev, "mhc_turn", kernel, dim3(PARTS, n), THREADS, 0, args_of(dev, hc, norm),
             static_cast<const float4 *>(hc->fn.data), y, streams, dev->mhc_parts, dev->mhc_arrived,
             ret_x, mix);
}
