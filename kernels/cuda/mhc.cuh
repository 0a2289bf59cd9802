/* kernels/cuda/mhc.cuh - what the hyper-connections of layers and of the head share. */
#ifndef BATON_KERNELS_CUDA_MHC_CUH
#define BATON_KERNELS_CUDA_MHC_CUH

#include "kernels/cuda/cuda.cuh"

/* Device memory. */
struct ops_hc_device {
    const float *base, *scale;
};

/* sqrt(mean f^2 + eps) over n channels, in every lane. */
__device__ __forceinline__ float warp_root(const float *f, size_t n, float eps)
{
    return sqrtf(warp_dot(f, f, n) / (float)n + eps);
}

/* y = sum over the streams k of w[k] x_k, n channels. */
__device__ __forceinline__ void warp_weigh_streams(const float *streams, const float *w, uint32_t n,
                                                   bool round, float *y)
{
    for (uint32_t first = cuda_lane(); first < n; first += CUDA_BATCH * CUDA_WARP) {
        float x[CUDA_BATCH][OPS_HC];
#pragma unroll
        for (int b = 0; b < CUDA_BATCH * OPS_HC; b++) {
            const uint32_t i = first + b / OPS_HC * CUDA_WARP, k = b % OPS_HC;
            x[b / OPS_HC][k] = i < n ? streams[(size_t)k * n + i] : 0.0f;
        }
#pragma unroll
        for (int b = 0; b < CUDA_BATCH; b++) {
            const uint32_t i = first + b * CUDA_WARP;
            float sum = w[0] * x[b][0];
#pragma unroll
            for (uint32_t k = 1; k < OPS_HC; k++) {
                sum += w[k] * x[b][k];
            }
            if (i < n) {
                y[i] = cuda_rounded(sum, round);
            }
        }
    }
    __syncwarp();
}

/* A lane's element of the mixing matrix over the sum of its row or column plus eps: lane 4 j + k
 * (all modulo 16) holds c[j][k]. */
__device__ __forceinline__ float mhc_normalised(float c, float eps, bool columns)
{
    const uint32_t lane = cuda_lane(), row = lane & ~3u, column = (lane & 16u) | (lane & 3u);
    float sum = 0.0f;
#pragma unroll
    for (uint32_t b = 0; b < OPS_HC; b++) {
        sum += __shfl_sync(0xffffffffu, c, (int)(columns ? column + 4 * b : row + b));
    }
    return c / (sum + eps);
}

/* A channel of stream k behind a sublayer whose output is `from`: post[4] and the matrix at mix. */
__device__ __forceinline__ float mhc_out(const float *mix, uint32_t k, const float *in, float from,
                                         bool round)
{
    const float *comb = mix + OPS_HC;
    float sum = comb[k] * in[0];
#pragma unroll
    for (uint32_t j = 1; j < OPS_HC; j++) {
        sum += comb[OPS_HC * j + k] * in[j];
    }
    return cuda_rounded(mix[k] * from + sum, round);
}

/* m[24] to pre[4] in every lane, and post and the matrix to `mix`. */
__device__ __forceinline__ void mhc_split(const float *m, float root, const ops_hc_device &hc,
                                          uint32_t iters, float eps, float *ret_pre, float *mix)
{
    const uint32_t lane = cuda_lane(), i = 2 * OPS_HC + (lane & 15u);
    float product = m[lane < OPS_HC_OUT ? lane : 0], entry = m[i];
    __syncwarp(); /* mix may be m: all have read */
    float gate = 0.0f;
    if (lane < 2 * OPS_HC) {
        float scale = lane < OPS_HC ? hc.scale[0] : hc.scale[1];
        gate = cuda_sigmoid(product / root * scale + hc.base[lane]);
        gate = lane < OPS_HC ? gate + eps : 2.0f * gate;
    }
#pragma unroll
    for (int k = 0; k < OPS_HC; k++) {
        ret_pre[k] = __shfl_sync(0xffffffffu, gate, k);
    }
    float c = entry / root * hc.scale[2] + hc.base[i], most = c, sum = 0.0f;
#pragma unroll
    for (int step = 1; step < OPS_HC; step *= 2) {
        float other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most ? other : most;
    }
    c = cpu_exp(c - most);
#pragma unroll
    for (uint32_t k = 0; k < OPS_HC; k++) {
        sum += __shfl_sync(0xffffffffu, c, (int)((lane & ~3u) + k));
    }
    c = mhc_normalised(c / sum + eps, eps, true);
    for (uint32_t turn = 1; turn < iters; turn++) {
        c = mhc_normalised(c, eps, false);
        c = mhc_normalised(c, eps, true);
    }
    if (lane >= OPS_HC && lane < 2 * OPS_HC) {
        mix[lane - OPS_HC] = gate;
    }
    if (lane < OPS_HC * OPS_HC) {
        mix[OPS_HC + lane] = c;
    }
}

#endif
