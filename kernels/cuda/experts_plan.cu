/* The first launch of experts_stream.cu: who goes where.
 *
 * One block sorts: every choice of a row counts those that come before it, by expert and then by
 * row, which is quick for the few there are and has one outcome, whoever runs first. The others put
 * the rows through the quantiser and lay them out as an mma takes them, once for all experts.
 */
#include "kernels/cuda/experts_stream.cuh"

namespace
{

enum {
    WARPS = 8,
    THREADS = WARPS * CUDA_WARP,
    GROUP = FORMATS_INPUT_GROUP,
    MOST_CHOICES = STREAM_MOST_ROWS * CUDA_MAX_CHOICES,
    NOT_OWN = -1
};

__device__ __forceinline__ bool is_own(const stream_plan &p, uint32_t expert)
{
    return expert >= p.first && expert < p.end;
}

/* A warp's 128 inputs of a row; and zeros for a row that nobody will write to. */
__device__ __forceinline__ void prepare(const stream_plan &p, uint32_t row, uint32_t group)
{
    enum { EACH = GROUP / CUDA_WARP };
    const size_t at = (size_t)row * p.hidden + group * GROUP + cuda_lane();
    float x[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        x[i] = p.x[at + i * CUDA_WARP];
    }
#pragma unroll
    for (int is_shared = 0; is_shared < 2; is_shared++) {
        if (!p.has[is_shared]) {
            continue;
        }
        stream_put<EACH>(p.form[is_shared], p.quant[is_shared], p.scaled, group, cuda_lane(),
                         CUDA_WARP, x, p.image[is_shared] + (size_t)row * p.hidden);
    }
    bool has_some = p.has[1];
    for (uint32_t k = 0; k < p.n_used; k++) {
        has_some = has_some || is_own(p, p.experts[(size_t)row * p.n_used + k]);
    }
    if (!has_some) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            p.y[at + i * CUDA_WARP] = 0.0f;
        }
    }
}

/* Lanes in the order of experts and rows, cut into tiles: every choice counts those before it. */
__device__ __forceinline__ void sort(const stream_plan &p)
{
    __shared__ int ids[MOST_CHOICES];
    __shared__ uint16_t rank[MOST_CHOICES], lane_of[MOST_CHOICES]; /* among the expert's, all */
    __shared__ uint32_t n_tiles;
    const uint32_t n = p.n_rows * p.n_used;
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        const uint32_t expert = p.experts[i];
        ids[i] = is_own(p, expert) ? (int)(expert - p.first) : NOT_OWN;
    }
    if (threadIdx.x == 0) {
        n_tiles = p.n_shared_tiles;
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        uint32_t lower = 0, earlier = 0;
        for (uint32_t j = 0; j < n; j++) {
            lower += ids[j] != NOT_OWN && ids[j] < ids[i];
            earlier += ids[j] == ids[i] && j < i;
        }
        rank[i] = (uint16_t)earlier;
        lane_of[i] = (uint16_t)(lower + earlier);
        if (ids[i] != NOT_OWN) {
            p.lane_row[lower + earlier] = i / p.n_used;
            p.lane_weight[lower + earlier] = p.weights[i];
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        if (ids[i] == NOT_OWN || rank[i] % STREAM_TILE_ROWS) {
            continue;
        }
        uint32_t tile = p.n_shared_tiles + rank[i] / STREAM_TILE_ROWS, left = 0;
        for (uint32_t j = 0; j < n; j++) {
            tile += ids[j] != NOT_OWN && ids[j] < ids[i] && rank[j] % STREAM_TILE_ROWS == 0;
            left += ids[j] == ids[i] && rank[j] >= rank[i];
        }
        p.tiles[tile] = {(uint32_t)ids[i], lane_of[i],
                         left < STREAM_TILE_ROWS ? left : STREAM_TILE_ROWS};
        atomicAdd(&n_tiles, 1u);
    }
    for (uint32_t i = threadIdx.x; i < p.n_shared_tiles; i += THREADS) {
        uint32_t at = i * STREAM_TILE_ROWS, left = p.n_rows - at;
        p.tiles[i] = {0, p.max_lanes + at, left < STREAM_TILE_ROWS ? left : STREAM_TILE_ROWS};
    }
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) { /* ascending by expert */
        const uint32_t row = i / p.n_used;
        uint32_t *of_row = p.row_lanes + row * (p.n_used + 1), lower = 0, all = 0;
        for (uint32_t j = row * p.n_used; j < (row + 1) * p.n_used; j++) {
            all += ids[j] != NOT_OWN;
            lower += ids[j] != NOT_OWN && lane_of[j] < lane_of[i];
        }
        if (i == row * p.n_used) {
            of_row[0] = all;
        }
        if (ids[i] != NOT_OWN) {
            of_row[1 + lower] = lane_of[i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        *p.tile_count = n_tiles;
    }
}

/* Block 0 sorts; the others prepare eight groups of a row each. */
__global__ void __launch_bounds__(THREADS) plan_kernel(const __grid_constant__ stream_plan p)
{
    cuda_grid_begin();
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < p.n_counters;
         i += gridDim.x * THREADS) {
        p.counters[i] = 0;
    }
    if (blockIdx.x == 0) {
        sort(p);
        return;
    }
    const uint32_t n_groups = p.hidden / GROUP, n = (n_groups + WARPS - 1) / WARPS;
    const uint32_t row = (blockIdx.x - 1) / n;
    const uint32_t group = (blockIdx.x - 1) % n * WARPS + threadIdx.x / CUDA_WARP;
    if (group < n_groups) {
        prepare(p, row, group);
    }
}

} /* namespace */

void cuda_experts_plan(struct ops_device *dev, const struct stream_plan &plan)
{
    const uint32_t blocks_a_row = (plan.hidden / GROUP + WARPS - 1) / WARPS;
    cuda_run(dev, "the experts' plan", plan_kernel, 1 + plan.n_rows * blocks_a_row, THREADS, 0,
             plan);
}
