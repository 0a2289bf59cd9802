/* kernels/cuda/experts_blocks.cuh - a warp's inputs as an mma takes them, in shared memory, and its
 * sums of a chunk.
 */
#ifndef BATON_KERNELS_CUDA_EXPERTS_BLOCKS_CUH
#define BATON_KERNELS_CUDA_EXPERTS_BLOCKS_CUH

#include "kernels/cuda/tensor.cuh"

enum { BLOCKS_WARPS_LOG2 = 3 }; /* of a block: TENSOR_RUNS */
static_assert(TENSOR_RUNS == 1 << BLOCKS_WARPS_LOG2, "its logarithm");

/* Of a power of two. */
static inline uint32_t blocks_log2(uint32_t n)
{
    uint32_t log2 = 0;
    while (1u << log2 < n) {
        log2++;
    }
    return log2;
}

/* Chunks (tensor.cuh) of 128 inputs, and how much an image has of one, in 16 bytes. */
__device__ __forceinline__ uint32_t blocks_chunks(uint32_t form)
{
    return form == CUDA_FP8 ? 2 : (form == CUDA_BF16 ? 4 : 1);
}
__device__ __forceinline__ uint32_t blocks_words(uint32_t form)
{
    return tensor_inputs_of(form) / 2;
}

/* Until a counter has come to `count`. One thread. */
__device__ __forceinline__ void blocks_wait(const uint32_t *counter, uint32_t count)
{
    while ((int32_t)(arch_load_acquire(counter) - count) < 0) {
    }
}

/* Of a warp's group of 128 of a row this lane's four, inputs 4 lane ... of the group: through the
 * quantiser (as warp_quant8), if `quant`, and into the row's image, k on from its start. Rows with
 * odd numbers have the halves of 128 bytes exchanged, so that eight rows are read without waiting
 * for each other. */
__device__ __forceinline__ void blocks_put(uint32_t form, bool quant, const float *x, uint32_t row,
                                           uint32_t k, uint4 *image)
{
    uint2 words; /* (0, 2), (1, 3) */
    if (quant) {
        const float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
        words = tensor_quant(x, warp_max(fmaxf(most, 1e-4f)));
    } else {
        words = make_uint2(arch_pair_bf16(x[0], x[2]), arch_pair_bf16(x[1], x[3]));
    }
    /* Four halves side by side, see tensor_half_of. */
    const uint32_t low = 0xffffu, inputs = tensor_inputs_of(form);
    const uint32_t unit = k / inputs, step = k % inputs / 8;
    const uint32_t at =
        ((unit / TENSOR_UNITS * (inputs / 8) + step) * TENSOR_UNITS + unit % TENSOR_UNITS) * 2 +
        k / 4 % 2;
    if (form == CUDA_BF16) { /* in their order */
        words = make_uint2((words.x & low) | words.y << 16, words.x >> 16 | (words.y & ~low));
    } else if (form == CUDA_FP4_E8M0) { /* each with the one four further on, of the lane beside */
        const uint2 other = make_uint2(__shfl_xor_sync(0xffffffffu, words.x, 1),
                                       __shfl_xor_sync(0xffffffffu, words.y, 1));
        words = cuda_lane() % 2
                    ? make_uint2(other.x >> 16 | (words.x & ~low), other.y >> 16 | (words.y & ~low))
                    : make_uint2((words.x & low) | other.x << 16, (words.y & low) | other.y << 16);
    }
    reinterpret_cast<uint2 *>(image)[at ^ row % 2 * 8] = words;
}

/* sums[mt][nt] += the chunk's weights times the rows' inputs: x says where those of row g lie (in
 * an odd row 4 is exchanged in it), and `second` how much further those of row g + 8. */
template <int FORM, int NT>
__device__ __forceinline__ void blocks_add(const uint4 *units, const uint32_t *scales,
                                           const uint4 *image, uint32_t x, uint32_t second,
                                           float (*sums)[NT][4])
{
    tensor_add_chunk<FORM, NT>(
        [&](int i) { return units[cuda_lane() % 4 * CUDA_BLOCK + cuda_lane() / 4 + 8 * i]; },
        scales, NT,
        [&](uint32_t nt, uint32_t step) { return image[(x ^ step * TENSOR_UNITS) + nt * second]; },
        sums);
}

/* A warp's sums as mma leaves them to [row, 32]. */
template <int NT>
__device__ __forceinline__ void blocks_store(const float (*sums)[NT][4], uint32_t n_rows, float *to)
{
    const uint32_t g = cuda_lane() / 4, t = cuda_lane() % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t row = 8 * nt + 2 * t + i;
            if (row < n_rows) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    to[row * CUDA_BLOCK + g + 8 * k] = sums[k / 2][nt][k % 2 * 2 + i];
                }
            }
        }
    }
}

#endif
