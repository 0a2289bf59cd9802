/* Which experts a row goes to, and with what weight: see kernels/cpu/route.c. */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 128, WARPS = THREADS / CUDA_WARP };

struct routing {
    const float *bias;
    const uint16_t *tid2eid;
    uint32_t n_experts, n_used;
    float scale;
};

/* The best expert that the row has not taken yet, ties to the lowest id: every lane looks at its
 * own, then the lanes agree. */
__device__ __forceinline__ uint32_t best_of(const float *score, const routing &to,
                                            const uint32_t *taken, uint32_t n_taken)
{
    uint32_t best = to.n_experts;
    float most = 0.0f;
    for (uint32_t e = cuda_lane(); e < to.n_experts; e += CUDA_WARP) {
        bool is_taken = false;
        for (uint32_t i = 0; i < n_taken; i++) {
            is_taken = is_taken || taken[i] == e;
        }
        float value = score[e] + to.bias[e];
        if (!is_taken && (best == to.n_experts || value > most)) {
            best = e;
            most = value;
        }
    }
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, best, m);
        float value = __shfl_xor_sync(0xffffffffu, most, m);
        bool better = best == to.n_experts || value > most || (value == most && other < best);
        if (other != to.n_experts && better) {
            best = other;
            most = value;
        }
    }
    return __shfl_sync(0xffffffffu, best, 0);
}

/* A warp for each row; scores [T, n_experts] are the products with the gate. */
__global__ void __launch_bounds__(THREADS)
    route_kernel(ops_rows rows, routing to, float *scores, uint32_t *experts, float *weights)
{
    cuda_grid_begin();
    uint32_t r = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (r >= rows.n_rows) {
        return;
    }
    float *score = scores + (size_t)r * to.n_experts;
    uint32_t *ids = experts + (size_t)r * to.n_used;
    float *w = weights + (size_t)r * to.n_used;
    for (uint32_t e = cuda_lane(); e < to.n_experts; e += CUDA_WARP) {
        score[e] = sqrtf(cpu_softplus(score[e]));
    }
    __syncwarp();
    for (uint32_t k = 0; k < to.n_used; k++) {
        uint32_t id = to.tid2eid ? to.tid2eid[(size_t)rows.tokens[r] * to.n_used + k]
                                 : best_of(score, to, ids, k);
        if (cuda_lane() == 0) {
            ids[k] = id;
        }
        __syncwarp();
    }
    if (cuda_lane() == 0) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < to.n_used; k++) {
            sum += score[ids[k]];
        }
        for (uint32_t k = 0; k < to.n_used; k++) {
            w[k] = score[ids[k]] / sum * to.scale;
        }
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
    cuda_run(dev, "route", route_kernel, (n + WARPS - 1) / WARPS, THREADS, 0, dev->rows, to,
             dev->wide, ret_experts, ret_weights);
}
