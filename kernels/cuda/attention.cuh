/* kernels/cuda/attention.cuh - what the attention side's kernels share beside cuda.cuh.
 *
 * As in cuda.cuh, functions are called by whole warps and give the bits of kernels/cpu.
 */
#ifndef BATON_KERNELS_CUDA_ATTENTION_CUH
#define BATON_KERNELS_CUDA_ATTENTION_CUH

extern "C" {
#include "base/status.h" /* error_set is C's */
}
#include "kernels/cuda/cache.cuh"
#include "kernels/cuda/cuda.cuh"

enum {
    DOTS_ROWS = 4,                     /* of queries that a warp multiplies at once */
    DOTS_COLUMNS = 8,                  /* with as many entries */
    ATTENTION_SHARED_BYTES = 48 * 1024 /* what a launch gets without asking */
};

/* A step of the 32 trees: each lane keeps the half of the sums that it will end with. */
template <int HALF>
static __device__ __forceinline__ void warp_fold(float (&sum)[DOTS_ROWS * DOTS_COLUMNS])
{
    bool upper = (cuda_lane() & HALF) != 0;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float keep = upper ? sum[i + HALF] : sum[i], give = upper ? sum[i] : sum[i + HALF];
        sum[i] = keep + __shfl_xor_sync(0xffffffffu, give, HALF);
    }
}

/* The dot products of n channels of DOTS_ROWS rows of `a` with DOTS_COLUMNS rows of `b`: lane l has
 * that of row l / 8 with row l % 8. Rows of a from n_a on are not read (the last is taken in their
 * place); n is a multiple of 8. Each product has the order of cpu_dot_inline: channel i in lane
 * i % 32, then halves of halves. */
static __device__ __forceinline__ float warp_dots(const float *a, uint32_t a_stride, uint32_t n_a,
                                                  const float *b, uint32_t b_stride, uint32_t n)
{
    uint32_t lane = cuda_lane();
    float sum[DOTS_ROWS * DOTS_COLUMNS];
    const float *row[DOTS_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < DOTS_ROWS; i++) {
        row[i] = a + (size_t)(i < n_a ? i : n_a - 1) * a_stride;
    }
#pragma unroll
    for (int i = 0; i < DOTS_ROWS * DOTS_COLUMNS; i++) {
        sum[i] = 0.0f;
    }
    for (uint32_t ch = lane; ch < n; ch += CUDA_WARP) {
        float x[DOTS_ROWS];
#pragma unroll
        for (int i = 0; i < DOTS_ROWS; i++) {
            x[i] = row[i][ch];
        }
#pragma unroll
        for (uint32_t j = 0; j < DOTS_COLUMNS; j++) {
            float y = b[j * b_stride + ch];
#pragma unroll
            for (uint32_t i = 0; i < DOTS_ROWS; i++) {
                sum[i * DOTS_COLUMNS + j] += x[i] * y;
            }
        }
    }
    __syncwarp();
    warp_fold<16>(sum);
    warp_fold<8>(sum);
    warp_fold<4>(sum);
    warp_fold<2>(sum);
    warp_fold<1>(sum);
    return sum[0];
}

/* In shared memory; n is a power of two. */
static __device__ __forceinline__ void warp_hadamard(float *x, uint32_t n)
{
    for (uint32_t h = 1; h < n; h *= 2) {
        __syncwarp();
        for (uint32_t i = cuda_lane(); i < n / 2; i += CUDA_WARP) {
            uint32_t at = i / h * 2 * h + i % h;
            float a = x[at], b = x[at + h];
            x[at] = a + b;
            x[at + h] = a - b;
        }
    }
    __syncwarp();
    float norm = (float)(1.0 / sqrt((double)n));
    for (uint32_t i = cuda_lane(); i < n; i += CUDA_WARP) {
        x[i] *= norm;
    }
    __syncwarp();
}

/* Blocks for each of n_rows rows so that all of the device has work, at most `most`. It follows
 * from the number of rows and the device alone, and what a row gets does not depend on it. */
static inline uint32_t attention_splits(const struct ops_device *dev, uint32_t n_blocks,
                                        uint32_t most)
{
    uint32_t wanted = 4 * dev->n_sms / (n_blocks ? n_blocks : 1);
    most = most ? most : 1;
    return wanted < 1 ? 1 : (wanted > most ? most : wanted);
}

/* Shared memory that the scores of topk take. */
size_t cuda_topk_shared_bytes(const struct ops_dims *d);

#endif
