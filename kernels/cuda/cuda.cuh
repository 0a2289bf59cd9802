/* kernels/cuda/cuda.cuh - row arithmetic of a warp, with the bits of kernels/cpu/vec.c.
 *
 * All functions here are called by the 32 lanes of a warp together, lane = threadIdx.x % 32, on a
 * row in global or shared memory; those that write end in __syncwarp, so that every lane may read
 * what the others wrote. Element i belongs to lane i % 32: rows handed on in place must be shared
 * out alike or pass through a __syncwarp.
 */
#ifndef BATON_KERNELS_CUDA_CUDA_CUH
#define BATON_KERNELS_CUDA_CUDA_CUH

#include <cuda_runtime.h>

#include "kernels/cpu/math.h"
#include "kernels/cuda/arch.cuh"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/formats.h"

enum { CUDA_WARP = 32 };

__device__ __forceinline__ uint32_t cuda_lane()
{
    return threadIdx.x % CUDA_WARP;
}

__device__ __forceinline__ float cuda_rounded(float x, bool round)
{
    return round ? bf16_round(x) : x;
}

/* Sum of the lanes' values, in every lane, in the order in which cpu_dot_inline adds its 32
 * partial sums: halves, then halves of halves. */
__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, m);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, x, m);
        x = other > x ? other : x;
    }
    return x;
}

/* What a lane asks memory for before it uses the first of it: one warp alone waits for little else.
 */
enum { CUDA_BATCH = 8 };

/* cpu_dot: element i in lane i % 32 for all whole eights; of the rest, j in lane 24 + j. */
__device__ __forceinline__ float warp_dot(const float *a, const float *b, size_t n)
{
    float sum = 0.0f;
    size_t whole = n / 8 * 8, i = cuda_lane();
    for (; i + (CUDA_BATCH - 1) * CUDA_WARP < whole; i += CUDA_BATCH * CUDA_WARP) {
        float x[CUDA_BATCH], y[CUDA_BATCH];
#pragma unroll
        for (int k = 0; k < CUDA_BATCH; k++) {
            x[k] = a[i + k * CUDA_WARP];
            y[k] = b[i + k * CUDA_WARP];
        }
#pragma unroll
        for (int k = 0; k < CUDA_BATCH; k++) {
            sum += x[k] * y[k];
        }
    }
    for (; i < whole; i += CUDA_WARP) {
        sum += a[i] * b[i];
    }
    if (cuda_lane() >= 24 && whole + cuda_lane() - 24 < n) {
        i = whole + cuda_lane() - 24;
        sum += a[i] * b[i];
    }
    return warp_sum(sum);
}

__device__ __forceinline__ void warp_round_row(float *x, size_t n)
{
    for (size_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        x[i] = bf16_round(x[i]);
    }
    __syncwarp();
}

/* y[i] = x[i] / sqrt(mean x^2 + eps) * w[i]; w may be NULL, y may be x. */
__device__ __forceinline__ void warp_rms_norm(const float *x, const float *w, size_t n, float eps,
                                              bool round, float *y)
{
    __syncwarp();
    float root = sqrtf(warp_dot(x, x, n) / (float)n + eps);
    __syncwarp();
    for (size_t first = cuda_lane(); first < n; first += CUDA_BATCH * CUDA_WARP) {
        float value[CUDA_BATCH], by[CUDA_BATCH];
#pragma unroll
        for (int k = 0; k < CUDA_BATCH; k++) {
            const size_t i = first + k * CUDA_WARP;
            value[k] = i < n ? x[i] : 0.0f;
            by[k] = w && i < n ? w[i] : 1.0f;
        }
#pragma unroll
        for (int k = 0; k < CUDA_BATCH; k++) {
            const size_t i = first + k * CUDA_WARP;
            if (i < n) {
                y[i] = cuda_rounded(value[k] / root * by[k], round);
            }
        }
    }
    __syncwarp();
}

/* Pairs of the last rope_dim of n channels; table is (cos, sin) pairs. */
__device__ __forceinline__ void warp_rope(float *x, size_t n, uint32_t rope_dim, const float *table,
                                          bool inverse, bool round)
{
    __syncwarp();
    float *tail = x + n - rope_dim;
    for (uint32_t i = 2 * cuda_lane(); i < rope_dim; i += 2 * CUDA_WARP) {
        float c = table[i], s = inverse ? -table[i + 1] : table[i + 1];
        float even = tail[i], odd = tail[i + 1];
        tail[i] = cuda_rounded(even * c - odd * s, round);
        tail[i + 1] = cuda_rounded(even * s + odd * c, round);
    }
    __syncwarp();
}

/* Largest |x[i]|, at least `floor`, in every lane. */
__device__ __forceinline__ float warp_largest(const float *x, size_t n, float floor)
{
    float most = floor;
    for (size_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    return warp_max(most);
}

/* Quantise and dequantise, groups of `group` (the last may be short); y may be x. */
__device__ __forceinline__ void warp_quant8(const float *x, size_t n, uint32_t group, float *y)
{
    __syncwarp();
    for (size_t g = 0; g < n; g += group) {
        size_t m = n - g < group ? n - g : group;
        uint8_t code = e8m0_scale_for(warp_largest(x + g, m, 1e-4f), 1.0f / 448.0f);
        float scale = e8m0_decode(code), inverse = 1.0f / scale;
        for (size_t i = cuda_lane(); i < m; i += CUDA_WARP) {
            y[g + i] = e4m3_round(x[g + i] * inverse) * scale;
        }
    }
    __syncwarp();
}

/* The same of one group that the warp has in its registers, in any order; zeros are nothing. */
__device__ __forceinline__ void warp_quant8_group(float (&x)[FORMATS_INPUT_GROUP / CUDA_WARP])
{
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < FORMATS_INPUT_GROUP / CUDA_WARP; i++) {
        const float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    const float scale = e8m0_decode(e8m0_scale_for(warp_max(most), 1.0f / 448.0f));
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < FORMATS_INPUT_GROUP / CUDA_WARP; i++) {
        x[i] = e4m3_round(x[i] * inverse) * scale;
    }
}

/* As warp_quant8, for index keys: groups of 32 to e2m1. */
__device__ __forceinline__ void warp_quant4(float *x, size_t n)
{
    __syncwarp();
    for (size_t g = 0; g < n; g += FORMATS_KEY_GROUP) {
        size_t m = n - g < FORMATS_KEY_GROUP ? n - g : FORMATS_KEY_GROUP;
        float scale = e8m0_decode(
            e8m0_scale_for(warp_largest(x + g, m, 6.0f * 1.17549435e-38f), 1.0f / 6.0f));
        for (size_t i = cuda_lane(); i < m; i += CUDA_WARP) {
            x[g + i] = e2m1_decode(e2m1_encode(x[g + i] / scale)) * scale;
        }
    }
    __syncwarp();
}

__device__ __forceinline__ float cuda_sigmoid(float x)
{
    return 1.0f / (1.0f + cpu_exp(-x));
}

/* silu(gate) up, clamped, times the routing weight. */
__device__ __forceinline__ float cuda_gated(float gate, float up, float limit, float weight)
{
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : (up < -limit ? -limit : up);
    }
    return gate * cuda_sigmoid(gate) * up * weight;
}

/* (cos, sin) pairs of one position. */
__device__ __forceinline__ void warp_rope_table(const float *freqs, uint32_t rope_dim,
                                                uint32_t position, float *ret_table)
{
    for (uint32_t i = cuda_lane(); i < rope_dim / 2; i += CUDA_WARP) {
        float angle = (float)position * freqs[i];
        cpu_sincos(angle, &ret_table[2 * i + 1], &ret_table[2 * i]);
    }
    __syncwarp();
}

#endif
