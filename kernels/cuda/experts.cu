/* Routed and shared experts.
 *
 * As on the CPU a lane is one row at one expert, lanes lie sorted by expert, and a row's sum runs
 * over its experts in ascending id and then the shared one. The sorting is done here, on the
 * device: one warp an expert counts its rows, then places them in row order and cuts them into
 * tiles of rows that a product takes at once. The host does not know how many tiles there are; it
 * launches for the most there can be, and blocks without a tile end. The shared expert's lanes come
 * behind the most that the routed can be.
 */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 128, WARPS = THREADS / CUDA_WARP };

/* Rows routed, and what is this device's. */
struct choices {
    const uint32_t *experts; /* [n_rows, n_used] */
    uint32_t n_rows, n_used, first, end;
};

/* Calls for each entry of an expert's warp: `mine` in which lanes it is the expert's own. */
template <typename FN>
__device__ __forceinline__ void each_entry(const choices &c, uint32_t expert, FN fn)
{
    const uint32_t n = c.n_rows * c.n_used;
    for (uint32_t i0 = 0; i0 < n; i0 += CUDA_WARP) {
        uint32_t i = i0 + cuda_lane();
        bool mine = i < n && c.experts[i] == expert;
        fn(i, mine, __ballot_sync(0xffffffffu, mine));
    }
}

__global__ void __launch_bounds__(CUDA_WARP) count_kernel(choices c, uint32_t *expert_lanes)
{
    cuda_grid_begin();
    uint32_t count = 0;
    each_entry(c, c.first + blockIdx.x,
               [&](uint32_t, bool, uint32_t all) { count += (uint32_t)__popc(all); });
    if (cuda_lane() == 0) {
        expert_lanes[blockIdx.x] = count;
    }
}

__device__ __forceinline__ uint32_t warp_total(uint32_t x)
{
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, m);
    }
    return x;
}

/* tile_count[0]: how many tiles; [1]: how many lanes. */
__global__ void __launch_bounds__(CUDA_WARP)
    place_kernel(choices c, const float *weights, const uint32_t *expert_lanes, uint32_t *lane_row,
                 float *lane_weight, uint32_t *lane_of, uint32_t tile_rows, cuda_tile *tiles,
                 uint32_t *tile_count)
{
    cuda_grid_begin();
    uint32_t lane = 0, tile = 0;
    for (uint32_t e = cuda_lane(); e < blockIdx.x; e += CUDA_WARP) {
        lane += expert_lanes[e];
        tile += (expert_lanes[e] + tile_rows - 1) / tile_rows;
    }
    lane = warp_total(lane);
    tile = warp_total(tile);
    const uint32_t n = expert_lanes[blockIdx.x];
    const uint32_t n_tiles = (n + tile_rows - 1) / tile_rows;
    for (uint32_t t = cuda_lane(); t < n_tiles; t += CUDA_WARP) {
        uint32_t at = t * tile_rows, left = n - at;
        tiles[tile + t] = {blockIdx.x, lane + at, left < tile_rows ? left : tile_rows};
    }
    if (blockIdx.x == gridDim.x - 1 && cuda_lane() == 0) {
        tile_count[0] = tile + n_tiles;
        tile_count[1] = lane + n;
    }
    each_entry(c, c.first + blockIdx.x, [&](uint32_t i, bool mine, uint32_t all) {
        if (mine) {
            uint32_t at = lane + (uint32_t)__popc(all & ((1u << cuda_lane()) - 1u));
            lane_row[at] = i / c.n_used;
            lane_weight[at] = weights[i];
            lane_of[i] = at;
        }
        lane += (uint32_t)__popc(all);
    });
}

/* silu(a) b, clamped, times the routing weight: before w2, and so before its quantiser. A warp for
 * each of the quantiser's groups of a lane; lane_weight NULL: 1. */
__global__ void __launch_bounds__(THREADS)
    gate_kernel(uint32_t n_lanes, const uint32_t *tile_count, const float *lane_weight,
                uint32_t width, float limit, bool round, bool quant, float *lane_a,
                const float *lane_b)
{
    enum { EACH = FORMATS_INPUT_GROUP / CUDA_WARP };
    cuda_grid_begin();
    const uint32_t n_groups = (width + FORMATS_INPUT_GROUP - 1) / FORMATS_INPUT_GROUP;
    const size_t item = (size_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    const size_t lane = item / n_groups;
    if (lane >= (tile_count ? tile_count[1] : n_lanes)) {
        return;
    }
    const uint32_t first = (uint32_t)(item % n_groups) * FORMATS_INPUT_GROUP + cuda_lane();
    float *a = lane_a + lane * width;
    const float *b = lane_b + lane * width;
    const float weight = lane_weight ? lane_weight[lane] : 1.0f;
    float h[EACH];
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        const uint32_t i = first + k * CUDA_WARP;
        h[k] = i < width ? cuda_rounded(cuda_gated(a[i], b[i], limit, weight), round) : 0.0f;
    }
    if (quant) {
        warp_quant8_group(h);
    }
#pragma unroll
    for (uint32_t k = 0; k < EACH; k++) {
        const uint32_t i = first + k * CUDA_WARP;
        if (i < width) {
            a[i] = h[k];
        }
    }
}

/* A thread for each channel of a row. first_shared: lane of row 0 at the shared expert, or none. */
__global__ void __launch_bounds__(THREADS)
    sum_kernel(choices c, uint32_t row0, const uint32_t *lane_of, bool has_shared,
               uint32_t first_shared, bool round, uint32_t n, const float *lane_y, float *y)
{
    cuda_grid_begin();
    __shared__ uint32_t lanes[CUDA_MAX_CHOICES], ids[CUDA_MAX_CHOICES];
    __shared__ uint32_t n_lanes;
    const uint32_t r = row0 + blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    if (threadIdx.x == 0) {
        uint32_t m = 0;
        for (uint32_t k = 0; k < c.n_used; k++) { /* ascending by expert */
            uint32_t id = c.experts[(size_t)r * c.n_used + k], at = m;
            if (id < c.first || id >= c.end) {
                continue;
            }
            for (; at > 0 && ids[at - 1] > id; at--) {
                ids[at] = ids[at - 1];
                lanes[at] = lanes[at - 1];
            }
            ids[at] = id;
            lanes[at] = lane_of[(size_t)r * c.n_used + k];
            m++;
        }
        n_lanes = m;
    }
    __syncthreads();
    if (i >= n) {
        return;
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < n_lanes; k++) {
        sum += lane_y[(size_t)lanes[k] * n + i];
    }
    if (has_shared) {
        sum += lane_y[(size_t)(first_shared + r) * n + i];
    }
    y[(size_t)r * n + i] = cuda_rounded(sum, round);
}

bool same_shape(const struct ops_matrix *a, const struct ops_matrix *b)
{
    return a->form == b->form && a->rows == b->rows && a->cols == b->cols &&
           a->quant_input == b->quant_input;
}

void gate(struct ops_device *dev, uint32_t n_lanes, bool routed, const struct ops_matrix *w2,
          float *a, const float *b)
{
    const size_t n_groups = (dev->d.expert_width + FORMATS_INPUT_GROUP - 1) / FORMATS_INPUT_GROUP;
    const size_t n = n_lanes * n_groups;
    cuda_run(dev, "experts", gate_kernel, (unsigned)((n + WARPS - 1) / WARPS), THREADS, 0, n_lanes,
             routed ? dev->tile_count : NULL, routed ? dev->lane_weight : NULL, dev->d.expert_width,
             dev->d.swiglu_limit, !dev->d.exact, cuda_wants_quant(dev, w2), a, b);
}

void run_routed(struct ops_device *dev, const choices &c, const struct ops_layer *layer,
                const float *x, const float *weights, uint32_t max_lanes)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n_own = d->expert_end - d->expert_first;
    const struct ops_expert *own = layer->experts + d->expert_first;
    cuda_weights w1, w3, w2;
    if (!cuda_experts_gather(dev, own, n_own, &w1, &w3, &w2)) {
        return;
    }
    const bool is_long = dev->tensor && !dev->scaled && dev->image &&
                         c.n_rows >= CUDA_LONG_TILE_ROWS && cuda_tensor_serves(&own->w1) &&
                         cuda_tensor_serves(&own->w2);
    const uint32_t tile_rows = is_long ? CUDA_LONG_TILE_ROWS : CUDA_TILE_ROWS;
    cuda_run(dev, "experts", count_kernel, n_own, CUDA_WARP, 0, c, dev->expert_lanes);
    cuda_run(dev, "experts", place_kernel, n_own, CUDA_WARP, 0, c, weights, dev->expert_lanes,
             dev->lane_row, dev->lane_weight, dev->lane_of, tile_rows, dev->tiles, dev->tile_count);
    uint32_t max_tiles = max_lanes / tile_rows + n_own;
    max_tiles = max_tiles < max_lanes ? max_tiles : max_lanes;
    if (max_tiles > CUDA_MAX_GRID_Y) {
        cuda_failed(dev, STATUS_INVALID, "a call of %u rows is too long for the experts", c.n_rows);
        return;
    }
    const float *inputs = cuda_inputs(dev, &own->w1, x, c.n_rows, d->hidden);
    const struct cuda_lanes lanes = {dev->lane_row, c.n_rows, max_tiles, is_long};
    const struct cuda_lanes between = {NULL, max_lanes, max_tiles, is_long};
    cuda_gemm_experts(dev, &own->w1, &w1, inputs, d->hidden, &lanes, dev->lane_a, d->expert_width);
    cuda_gemm_experts(dev, &own->w3, &w3, inputs, d->hidden, &lanes, dev->lane_b, d->expert_width);
    gate(dev, max_lanes, true, &own->w2, dev->lane_a, dev->lane_b);
    cuda_gemm_experts(dev, &own->w2, &w2, dev->lane_a, d->expert_width, &between, dev->lane_y,
                      d->hidden);
}

} /* namespace */

bool cuda_experts_gather(struct ops_device *dev, const struct ops_expert *experts, uint32_t n_own,
                         struct cuda_weights *w1, struct cuda_weights *w3, struct cuda_weights *w2)
{
    for (uint32_t e = 0; e < n_own; e++) {
        if (!same_shape(&experts[e].w1, &experts->w1) ||
            !same_shape(&experts[e].w3, &experts->w1) ||
            !same_shape(&experts[e].w2, &experts->w2)) {
            cuda_failed(dev, STATUS_UNSUPPORTED, "the experts of a layer differ in their formats");
            return false;
        }
        w1->data[e] = experts[e].w1.data;
        w3->data[e] = experts[e].w3.data;
        w2->data[e] = experts[e].w2.data;
    }
    return true;
}

void cuda_experts(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, const uint32_t *experts,
                  const float *weights, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n = rows->n_rows, n_own = d->expert_end - d->expert_first;
    const uint32_t used = d->n_experts_used < n_own ? d->n_experts_used : n_own;
    const uint32_t max_lanes = n * used;
    const choices c = {experts, n, d->n_experts_used, d->expert_first, d->expert_end};
    if (n == 0) {
        return;
    }
    if (max_lanes) {
        run_routed(dev, c, layer, x, weights, max_lanes);
    }
    if (d->has_shared) {
        const struct ops_expert *shared = &layer->shared;
        float *a = dev->lane_a + (size_t)max_lanes * d->expert_width;
        float *b = dev->lane_b + (size_t)max_lanes * d->expert_width;
        const struct cuda_gemm_item items[] = {
            cuda_item(dev, &shared->w1, x, a, d->expert_width, !d->exact),
            cuda_item(dev, &shared->w3, x, b, d->expert_width, !d->exact)};
        cuda_gemms(dev, items, 2, n);
        gate(dev, n, false, &shared->w2, a, b);
        cuda_gemm(dev, &shared->w2, a, d->expert_width, n,
                  dev->lane_y + (size_t)max_lanes * d->hidden, d->hidden, !d->exact);
    }
    for (uint32_t r = 0; r < n; r += CUDA_MAX_GRID_Y) {
        const dim3 grid((d->hidden + THREADS - 1) / THREADS,
                        n - r < CUDA_MAX_GRID_Y ? n - r : CUDA_MAX_GRID_Y);
        cuda_run(dev, "experts", sum_kernel, grid, THREADS, 0, c, r, dev->lane_of, d->has_shared,
                 max_lanes, !d->exact && !d->is_partial, d->hidden, dev->lane_y, ret_y);
    }
}
