/* The hyper-connections over the whole card, in place of a product by one block and a warp's walk
 * over 16,384 channels.
 *
 * `split`, the way in, is two launches. The first cuts the channels of a row into PARTS runs of
 * equal length, whatever the card: a block makes the 24 products of its run and the sum of its
 * squares, eight warps in turn. The second, a block a row, adds the runs up in order, makes weights
 * and mixing matrix as the reference does, and the normed sum of the streams.
 *
 * `turn`, the way from a sublayer to the next, cuts into TURN_PARTS runs of channels of all four
 * streams, so that a block can bring the output into them before it makes their products.
 *
 *   - Of few rows it is one launch, a block for a part of a row, which has asked for its weights
 *     before it waits for anything else. The last block of a row to end makes the row's weights and
 *     next input while one warp more makes the mixing matrix, which only the next turn needs.
 *   - Of more rows, a block keeps the weights of its part and takes sixteen rows after the other
 *     through them: what bounds a row at a time is that each reads all weights (1.6 MB of V4-Flash)
 *     again. A second launch, a block a row, does the rest, the rows brought last first: they may
 *     still be in the second-level cache.
 *
 * A warp has the same units in both and adds their products in the same order, lane for output, so
 * a row's bits don't depend on the others. fn is fp32, so are these products; no tensor cores.
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
    TURN_PARTS = 64,
    TURN_THREADS = THREADS + CUDA_WARP, /* a warp for the matrix */
    FEW_UNITS = 8,                      /* of a warp of `turn`: 4,096 channels, or ... */
    MOST_UNITS = 16,                    /* ... 8,192 */
    FEW_ROWS = 7,                       /* in one launch */
    CHUNK = 16,                         /* rows at a time, of more */
    AT_ONCE = 4,                        /* of them in a warp's registers */
    MOST_CHUNKS = 4                     /* of a block */
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

/* Units of each stream that are a block's. */
struct turn_part {
    uint32_t first, n;
};

__device__ __forceinline__ turn_part turn_part_of(uint32_t part, uint32_t n_quads)
{
    const uint32_t first = part * n_quads / TURN_PARTS;
    return {first, (part + 1) * n_quads / TURN_PARTS - first};
}

/* A part's units are stream by stream; warp k has UNITS of them from k UNITS on. */
template <int UNITS>
__device__ __forceinline__ void load_weights(const float4 *fn, uint32_t n_quads,
                                             const turn_part &part, float4 (&w)[UNITS])
{
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
#pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) {
        const uint32_t at = warp * UNITS + i;
        w[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (at < H * part.n && lane < OPS_HC_OUT) {
            const uint32_t k = at / part.n;
            w[i] = fn[((size_t)k * n_quads + part.first + at - k * part.n) * CUDA_BLOCK + lane];
        }
    }
}

/* By a warp: sums of its units of R rows, in a lane those of its output; to `sums`, of each row
 * WARPS by 32. */
template <int UNITS, int R>
__device__ __forceinline__ void add_units(const float4 *rows, uint32_t n_units,
                                          const float4 (&w)[UNITS], float *sums)
{
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
    float sum[R];
#pragma unroll
    for (int j = 0; j < R; j++) {
        sum[j] = 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < UNITS; i++) {
        const uint32_t at = warp * UNITS + i;
        if (at < n_units) {
#pragma unroll
            for (uint32_t j = 0; j < R; j++) {
                sum[j] = add_products(rows[j * (UNITS * WARPS) + at], w[i], sum[j]);
            }
        }
    }
#pragma unroll
    for (uint32_t j = 0; j < R; j++) {
        if (lane != SQUARES) {
            sums[(j * WARPS + warp) * CUDA_WARP + lane] = sum[j];
        }
    }
    /* Squares: a lane for each unit, and as many rows at a time as that leaves room for. */
    const uint32_t at = warp * UNITS + lane % UNITS;
#pragma unroll
    for (uint32_t first = 0; first < R; first += CUDA_WARP / UNITS) {
        const uint32_t j = first + lane / UNITS;
        float squares = 0.0f;
        if (j < R && at < n_units) {
            const float4 f = rows[j * (UNITS * WARPS) + at];
            squares = add_products(f, f, squares);
        }
#pragma unroll
        for (int step = UNITS / 2; step >= 1; step /= 2) {
            squares += __shfl_xor_sync(0xffffffffu, squares, step);
        }
        if (j < R && lane % UNITS == 0) {
            sums[(j * WARPS + warp) * CUDA_WARP + SQUARES] = squares;
        }
    }
}

/* A lane's sum over the warps, in order. */
__device__ __forceinline__ float add_warps(const float *sums)
{
    float total = sums[cuda_lane()];
#pragma unroll
    for (int k = 1; k < WARPS; k++) {
        total += sums[k * CUDA_WARP + cuda_lane()];
    }
    return total;
}

/* What a lane takes for the gates, in the warp behind the others for the matrix. */
struct turn_gate {
    float scale, base;
};

__device__ __forceinline__ turn_gate turn_gate_of(const ops_hc_device &hc)
{
    const uint32_t lane = cuda_lane();
    if (threadIdx.x / CUDA_WARP == WARPS) {
        return {hc.scale[2], hc.base[2 * H + (lane & 15u)]};
    }
    return {hc.scale[lane < H ? 0 : 1], hc.base[lane < 2 * H ? lane : 0]};
}

/* A lane's sum over a row (STEP 1) or a column (STEP H) of the matrix. */
template <int STEP> __device__ __forceinline__ float add_four(float c)
{
    const uint32_t all = 0xffffffffu;
    const float a = __shfl_xor_sync(all, c, STEP), b = __shfl_xor_sync(all, c, 2 * STEP),
                d = __shfl_xor_sync(all, c, 3 * STEP);
    return (c + a) + (b + d);
}

/* By a warp: the matrix, of which lane 4 j + k (modulo 16) has c[j][k]. It is all latency, so its
 * divisions are products with an inverse. */
__device__ __forceinline__ void make_matrix(float c, uint32_t iters, float eps, float *mix)
{
    const uint32_t lane = cuda_lane();
    float most = c;
#pragma unroll
    for (int step = 1; step < H; step *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
    }
    c = expf(c - most);
    c = c * arch_inverse(add_four<1>(c)) + eps;
    c *= arch_inverse(add_four<H>(c) + eps);
    for (uint32_t turn = 1; turn < iters; turn++) {
        c *= arch_inverse(add_four<1>(c) + eps);
        c *= arch_inverse(add_four<H>(c) + eps);
    }
    if (lane < H * H) {
        mix[H + lane] = c;
    }
}

__device__ __forceinline__ float weigh(const float (&pre)[H], float a, float b, float c, float d,
                                       bool round)
{
    return cuda_rounded(pre[0] * a + pre[1] * b + pre[2] * c + pre[3] * d, round);
}

/* Quad i of all streams, zeroes behind the last. */
__device__ __forceinline__ void load_quad(const float4 *streams, uint32_t i, uint32_t n_quads,
                                          float4 (&ret)[H])
{
#pragma unroll
    for (uint32_t k = 0; k < H; k++) {
        ret[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < n_quads) {
            ret[k] = __ldcg(streams + (size_t)k * n_quads + i);
        }
    }
}

/* By a block of TURN_THREADS: what the parts of a row lead to. Other blocks of the launch may have
 * written what is read. */
template <int UNITS>
__device__ __forceinline__ void finish_turn(const row_args &a, const turn_gate &of,
                                            const float *parts, const float *all_streams, float *x,
                                            float *mix)
{
    /* Of a thread, and those that registers hold before the weights are known; parts of a warp. */
    enum { QUADS = UNITS / 2, AHEAD = FEW_UNITS / 2, EACH = TURN_PARTS / WARPS };
    __shared__ float sums[WARPS * CUDA_WARP], squares[WARPS];
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane(), n_quads = a.n / UNIT;
    const float4 *streams = reinterpret_cast<const float4 *>(all_streams);
    const float4 *norm = reinterpret_cast<const float4 *>(a.norm);
    float4 in[QUADS][H];
    if (warp < WARPS) {
        float part[EACH];
#pragma unroll
        for (uint32_t k = 0; k < EACH; k++) {
            part[k] = __ldcg(parts + (warp * EACH + k) * CUDA_WARP + lane);
        }
#pragma unroll
        for (uint32_t q = 0; q < AHEAD; q++) {
            load_quad(streams, threadIdx.x + q * THREADS, n_quads, in[q]);
        }
        float total = part[0];
#pragma unroll
        for (uint32_t k = 1; k < EACH; k++) {
            total += part[k];
        }
        sums[warp * CUDA_WARP + lane] = total;
    }
    __syncthreads();
    const float total = add_warps(sums);
    const float mean = __shfl_sync(0xffffffffu, total, SQUARES) / (float)(H * a.n);
    const float root = sqrtf(mean + a.rms_eps);
    if (warp == WARPS) {
        const float entry = __shfl_sync(0xffffffffu, total, 2 * H + (lane & 15u));
        make_matrix(entry / root * of.scale + of.base, a.iters, a.hc_eps, mix);
        return;
    }
    float4 gain[QUADS]; /* the matrix takes longer than these, which is no matter therefore */
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        const uint32_t i = threadIdx.x + q * THREADS;
        gain[q] = i < n_quads ? norm[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    float gate = 1.0f / (1.0f + expf(-(total / root * of.scale + of.base))), pre[H];
    gate = lane < H ? gate + a.hc_eps : 2.0f * gate;
    if (warp == 0 && lane >= H && lane < 2 * H) {
        mix[lane - H] = gate;
    }
#pragma unroll
    for (int k = 0; k < H; k++) {
        pre[k] = __shfl_sync(0xffffffffu, gate, k);
    }
    float sum = 0.0f;
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        if (q >= AHEAD) {
            load_quad(streams, threadIdx.x + q * THREADS, n_quads, in[q]);
        }
        const float4(&f)[H] = in[q];
        float4 u;
        u.x = weigh(pre, f[0].x, f[1].x, f[2].x, f[3].x, a.round);
        u.y = weigh(pre, f[0].y, f[1].y, f[2].y, f[3].y, a.round);
        u.z = weigh(pre, f[0].z, f[1].z, f[2].z, f[3].z, a.round);
        u.w = weigh(pre, f[0].w, f[1].w, f[2].w, f[3].w, a.round);
        sum = add_products(u, u, sum); /* zeroes behind the last channel */
        in[q][0] = u;
    }
    sum = warp_sum(sum);
    if (lane == 0) {
        squares[warp] = sum;
    }
    arch_barrier(1, THREADS);
    float all = squares[0];
#pragma unroll
    for (int k = 1; k < WARPS; k++) {
        all += squares[k];
    }
    const float inverse = 1.0f / sqrtf(all / (float)a.n + a.rms_eps);
#pragma unroll
    for (uint32_t q = 0; q < QUADS; q++) {
        const uint32_t i = threadIdx.x + q * THREADS;
        const float4 u = in[q][0], g = gain[q];
        if (i < n_quads) {
            reinterpret_cast<float4 *>(x)[i] =
                make_float4(cuda_rounded(u.x * inverse * g.x, a.round),
                            cuda_rounded(u.y * inverse * g.y, a.round),
                            cuda_rounded(u.z * inverse * g.z, a.round),
                            cuda_rounded(u.w * inverse * g.w, a.round));
        }
    }
}

/* Few rows, blocks (part, row). What is read in front of the wait is weights. */
template <int UNITS>
__global__ void __launch_bounds__(TURN_THREADS)
    mhc_turn_kernel(row_args a, const float4 *fn, const float *y, float *all_streams,
                    float *all_parts, uint32_t *arrived, float *x, float *all_mix)
{
    enum { EACH = UNITS * WARPS * UNIT / THREADS }; /* channels of a thread */
    arch_grid_go();
    __shared__ float4 run[UNITS * WARPS];
    __shared__ float sums[WARPS * CUDA_WARP];
    __shared__ bool is_last;
    const uint32_t warp = threadIdx.x / CUDA_WARP, n_quads = a.n / UNIT;
    const turn_part part = turn_part_of(blockIdx.x, n_quads);
    const uint32_t n = UNIT * part.n; /* channels of a stream, here */
    const size_t r = blockIdx.y;
    float4 w[UNITS];
    load_weights<UNITS>(fn, n_quads, part, w); /* of the last warp: none */
    const turn_gate gate = turn_gate_of(a.hc);
    arch_grid_wait();
    float *streams = all_streams + r * H * a.n, *parts = all_parts + r * TURN_PARTS * CUDA_WARP;
    float *mix = all_mix + r * OPS_HC_OUT, out[EACH];
    float *from_here = streams + (size_t)UNIT * part.first;
    /* A thread has one channel of one stream, and needs what that is of all: all read first. */
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t c = threadIdx.x + i * THREADS;
        out[i] = 0.0f;
        if (warp < WARPS && c < H * n) {
            const uint32_t k = c / n, at = c - k * n;
            float in[H];
#pragma unroll
            for (uint32_t j = 0; j < H; j++) {
                in[j] = from_here[(size_t)j * a.n + at];
            }
            out[i] = mhc_out(mix, k, in, y[r * a.n + UNIT * part.first + at], a.round);
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t c = threadIdx.x + i * THREADS;
        if (warp < WARPS && c < H * n) {
            const uint32_t k = c / n;
            from_here[(size_t)k * a.n + c - k * n] = out[i];
            reinterpret_cast<float *>(run)[c] = out[i];
        }
    }
    __syncthreads();
    if (warp < WARPS) {
        add_units<UNITS, 1>(run, H * part.n, w, sums);
    }
    __syncthreads();
    if (warp == 0) {
        parts[blockIdx.x * CUDA_WARP + cuda_lane()] = add_warps(sums);
        __syncwarp();
        if (threadIdx.x == 0) {
            __threadfence(); /* with all that the block wrote in front of its barriers */
            is_last = atomicAdd(arrived + r, 1u) == TURN_PARTS - 1;
            __threadfence();
        }
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    if (threadIdx.x == 0) {
        arrived[r] = 0; /* for the next launch */
    }
    finish_turn<UNITS>(a, gate, parts, streams, x + r * a.n, mix);
}

/* A quad of channels of all streams of a row, as mhc_post has them; to `run` too, from stream to
 * stream n units on. */
__device__ __forceinline__ void bring_quad(const float *mix, const float *y, float *streams,
                                           uint32_t n_quads, bool round, uint32_t n, float4 *run)
{
    const float4 *weights = reinterpret_cast<const float4 *>(mix);
    float m[H + H * H];
#pragma unroll
    for (int k = 0; k < 1 + H; k++) {
        const float4 four = weights[k];
        m[4 * k] = four.x;
        m[4 * k + 1] = four.y;
        m[4 * k + 2] = four.z;
        m[4 * k + 3] = four.w;
    }
    float4 *at = reinterpret_cast<float4 *>(streams), in[H];
    const float4 from = *reinterpret_cast<const float4 *>(y);
#pragma unroll
    for (uint32_t j = 0; j < H; j++) {
        in[j] = at[(size_t)j * n_quads];
    }
    const float x[H] = {in[0].x, in[1].x, in[2].x, in[3].x};
    const float y_[H] = {in[0].y, in[1].y, in[2].y, in[3].y};
    const float z[H] = {in[0].z, in[1].z, in[2].z, in[3].z};
    const float w[H] = {in[0].w, in[1].w, in[2].w, in[3].w};
#pragma unroll
    for (uint32_t k = 0; k < H; k++) {
        const float4 out =
            make_float4(mhc_out(m, k, x, from.x, round), mhc_out(m, k, y_, from.y, round),
                        mhc_out(m, k, z, from.z, round), mhc_out(m, k, w, from.w, round));
        at[(size_t)k * n_quads] = out;
        run[k * n] = out;
    }
}

/* More rows, blocks (part, chunks): n_chunks of CHUNK rows after the other. */
template <int UNITS>
__global__ void __launch_bounds__(THREADS, UNITS == FEW_UNITS ? 2 : 1)
    mhc_chunks_kernel(row_args a, uint32_t n_rows, uint32_t n_chunks, const float4 *fn,
                      const float *y, float *streams, float *parts, const float *mix)
{
    arch_grid_go();
    __shared__ float4 run[CHUNK * UNITS * WARPS];
    __shared__ float sums[CHUNK * WARPS * CUDA_WARP];
    const uint32_t warp = threadIdx.x / CUDA_WARP, n_quads = a.n / UNIT;
    const turn_part part = turn_part_of(blockIdx.x, n_quads);
    float4 w[UNITS];
    load_weights<UNITS>(fn, n_quads, part, w);
    arch_grid_wait();
    for (uint32_t chunk = 0; chunk < n_chunks; chunk++) {
        const uint32_t first = (blockIdx.y * n_chunks + chunk) * CHUNK;
        if (first >= n_rows) {
            break;
        }
        const uint32_t n = n_rows - first < CHUNK ? n_rows - first : CHUNK;
        for (uint32_t i = threadIdx.x; i < n * part.n; i += THREADS) {
            const uint32_t j = i / part.n, quad = i - j * part.n;
            const size_t r = first + j, c = (size_t)UNIT * (part.first + quad);
            bring_quad(mix + r * OPS_HC_OUT, y + r * a.n + c, streams + r * H * a.n + c, n_quads,
                       a.round, part.n, run + j * (UNITS * WARPS) + quad);
        }
        __syncthreads();
        for (uint32_t j = 0; j < n; j += AT_ONCE) { /* behind the last row are sums of nothing */
            add_units<UNITS, AT_ONCE>(run + j * (UNITS * WARPS), H * part.n, w,
                                      sums + j * (WARPS * CUDA_WARP));
        }
        __syncthreads();
        for (uint32_t j = warp; j < n; j += WARPS) {
            parts[((size_t)(first + j) * TURN_PARTS + blockIdx.x) * CUDA_WARP + cuda_lane()] =
                add_warps(sums + j * (WARPS * CUDA_WARP));
        }
    }
}

/* Behind it, a block for each row, the last first. */
template <int UNITS>
__global__ void __launch_bounds__(TURN_THREADS)
    mhc_ends_kernel(row_args a, const float *parts, const float *streams, float *x, float *mix)
{
    cuda_grid_begin();
    const size_t r = gridDim.x - 1 - blockIdx.x;
    finish_turn<UNITS>(a, turn_gate_of(a.hc), parts + r * TURN_PARTS * CUDA_WARP,
                       streams + r * H * a.n, x + r * a.n, mix + r * OPS_HC_OUT);
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
        static_cast<float *>(cuda_room(dev, dev->limits.n_rows, TURN_PARTS * CUDA_WARP, &ok));
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

template <int UNITS>
static void turn_rows(struct ops_device *dev, uint32_t n, const float *y, const struct ops_hc *hc,
                      const float *norm, float *streams, float *ret_x, float *mix)
{
    const row_args args = args_of(dev, hc, norm);
    const float4 *fn = static_cast<const float4 *>(hc->fn.data);
    if (n <= FEW_ROWS) {
        cuda_run(dev, "mhc_turn", mhc_turn_kernel<UNITS>, dim3(TURN_PARTS, n), TURN_THREADS, 0,
                 args, fn, y, streams, dev->mhc_parts, dev->mhc_arrived, ret_x, mix);
        return;
    }
    const uint32_t n_all = (n + CHUNK - 1) / CHUNK;
    const uint32_t n_chunks = n_all < 2 * MOST_CHUNKS ? 1 : MOST_CHUNKS; /* of a block */
    cuda_run(dev, "mhc_turn (chunks)", mhc_chunks_kernel<UNITS>,
             dim3(TURN_PARTS, (n_all + n_chunks - 1) / n_chunks), THREADS, 0, args, n, n_chunks, fn,
             y, streams, dev->mhc_parts, mix);
    cuda_run(dev, "mhc_turn (ends)", mhc_ends_kernel<UNITS>, n, TURN_THREADS, 0, args,
             dev->mhc_parts, streams, ret_x, mix);
}

void cuda_mhc_turn(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                   const struct ops_hc *hc, const float *norm, float *streams, float *ret_x,
                   float *mix)
{
    const uint32_t n = rows->n_rows, hidden = dev->d.hidden;
    const uint32_t n_units = H * ((hidden / UNIT + TURN_PARTS - 1) / TURN_PARTS); /* of a block */
    if (n > dev->limits.n_rows || hc->fn.form != CUDA_F32 || hidden % UNIT ||
        n_units > MOST_UNITS * WARPS) {
        cuda_mhc_post(dev, rows, y, mix, streams);
        cuda_mhc_pre(dev, rows, hc, norm, streams, ret_x, mix);
        return;
    }
    if (n == 0) {
        return;
    }
    (n_units > FEW_UNITS * WARPS ? turn_rows<MOST_UNITS>
                                 : turn_rows<FEW_UNITS>)(dev, n, y, hc, norm, streams, ret_x, mix);
}
