/* Which experts a row goes to, and with what weight: see kernels/cpu/route.c. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 256, EACH = CUDA_MAX_ROUTED / CUDA_WARP };

struct routing {
    const float *bias;
    const uint16_t *tid2eid;
    uint32_t n_experts, n_used;
    float scale;
};

/* The best of a warp's values, of which lane i has those of experts i, i + 32, ...; `taken`: this
 * lane's that are not to be looked at. Ties to the lowest id. */
__device__ __forceinline__ uint32_t best_of(const float *value, uint32_t n_experts, uint32_t taken)
{
    uint32_t best = n_experts;
    float most = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t e = i * CUDA_WARP + cuda_lane();
        if (e < n_experts && !(taken >> i & 1u) && (best == n_experts || value[i] > most)) {
            best = e;
            most = value[i];
        }
    }
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, best, m);
        float theirs = __shfl_xor_sync(0xffffffffu, most, m);
        bool better = best == n_experts || theirs > most || (theirs == most && other < best);
        if (other != n_experts && better) {
            best = other;
            most = theirs;
        }
    }
    return __shfl_sync(0xffffffffu, best, 0);
}

/* A block for each row, all of whose threads make scores of their products with the gate, [row,
 * expert]; one warp then chooses. */
__global__ void __launch_bounds__(THREADS)
    route_kernel(ops_rows rows, routing to, const float *products, uint32_t *experts,
                 float *weights)
{
    __shared__ float score[CUDA_MAX_ROUTED];
    __shared__ uint32_t ids[CUDA_MAX_CHOICES];
    cuda_grid_begin();
    const uint32_t r = blockIdx.x;
    for (uint32_t e = threadIdx.x; e < to.n_experts; e += THREADS) {
        score[e] = sqrtf(cpu_softplus(products[(size_t)r * to.n_experts + e]));
    }
    if (threadIdx.x < to.n_used && to.tid2eid) {
        ids[threadIdx.x] = to.tid2eid[(size_t)rows.tokens[r] * to.n_used + threadIdx.x];
    }
    __syncthreads();
    if (threadIdx.x >= CUDA_WARP) {
        return;
    }
    if (!to.tid2eid) {
        float value[EACH];
        uint32_t taken = 0;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            const uint32_t e = i * CUDA_WARP + cuda_lane();
            value[i] = e < to.n_experts ? score[e] + to.bias[e] : 0.0f;
        }
        for (uint32_t k = 0; k < to.n_used; k++) {
            const uint32_t id = best_of(value, to.n_experts, taken);
            taken |= id % CUDA_WARP == cuda_lane() ? 1u << id / CUDA_WARP : 0;
            if (cuda_lane() == 0) {
                ids[k] = id;
            }
        }
    }
    __syncwarp();
    float sum = 0.0f;
    for (uint32_t k = 0; k < to.n_used; k++) {
        sum += score[ids[k]];
    }
    if (cuda_lane() < to.n_used) {
        const size_t at = (size_t)r * to.n_used + cuda_lane();
        experts[at] = ids[cuda_lane()];
        weights[at] = score[ids[cuda_lane()]] / sum * to.scale;
    }
}

} /* namespace */

void cuda_route(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *x, uint32_t *ret_experts, float *ret_weights)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n = rows->n_rows;
    if (n == 0) {
        return;
    }
    cuda_gemm(dev, &layer->gate, x, d->hidden, n, dev->wide, d->n_experts, false);
    const routing to = {layer->gate_bias, layer->tid2eid, d->n_experts, d->n_experts_used,
                        d->route_scale};
    cuda_run(dev, "route", route_kernel, n, THREADS, 0, dev->rows, to, dev->wide, ret_experts,
             ret_weights);
}
