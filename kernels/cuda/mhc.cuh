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
    for (uint32_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        float sum = w[0] * streams[i];
#pragma unroll
        for (uint32_t k = 1; k < OPS_HC; k++) {
            sum += w[k] * streams[(size_t)k * n + i];
        }
        y[i] = cuda_rounded(sum, round);
    }
    __syncwarp();
}

#endif
