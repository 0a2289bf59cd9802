/* kernels/cuda/dense_stream.cuh - what dense_stream.cu and experts_blocks.cu share: a warp's inputs
 * as an mma takes them, in shared memory, and its sums of a chunk.
 */
#ifndef BATON_KERNELS_CUDA_DENSE_STREAM_CUH
#define BATON_KERNELS_CUDA_DENSE_STREAM_CUH

#include "kernels/cuda/tensor.cuh"

enum { DENSE_WARPS_LOG2 = 3 }; /* of a block: TENSOR_RUNS */
static_assert(TENSOR_RUNS == 1 << DENSE_WARPS_LOG2, "its logarithm");

/* Of a power of two. */
static inline uint32_t dense_log2(uint32_t n)
{
    uint32_t log2 = 0;
    while (1u << log2 < n) {
        log2++;
    }
    return log2;
}

/* Chunks (tensor.cuh) of 128 inputs, and how much an image has of one, in 16 bytes. */
__device__ __forceinline__ uint32_t dense_chunks(uint32_t form)
{
    return form == CUDA_FP8 ? 2 : (form == CUDA_BF16 ? 4 : 1);
}
__device__ __forceinline__ uint32_t dense_words(uint32_t form)
{
    return tensor_inputs_of(form) / 2;
}

/* Until a counter has come to `count`. One thread. */
__device__ __forceinline__ void dense_wait(const uint32_t *counter, uint32_t count)
{
    while ((int32_t)(arch_load_acquire(counter) - count) < 0) {
    }
}

/* Four numbers through the quantiser of a group whose largest is `most`, as pairs of bfloat16: the
 * first and third, the second and fourth. They are e4m3 times a power of two, made of the bits as
 * weights are. */
__device__ __forceinline__ uint2 dense_quant(const float *x, float most)
{
    const uint32_t code = e8m0_scale_for(most, 1.0f / 448.0f);
    const float inverse = f32_from_bits((254 - code) << 23); /* 105 .. 246 */
    const uint32_t w = arch_pair_e4m3(x[0] * inverse, x[1] * inverse) |
                       arch_pair_e4m3(x[2] * inverse, x[3] * inverse) << 16;
    const uint32_t back = tensor_unit<CUDA_FP8>::BACK, scale = tensor_scale_pair(code);
    const uint32_t even = (w << 4 & 0x07f007f0u) | (w << 8 & 0x80008000u);
    const uint32_t odd = (w >> 4 & 0x07f007f0u) | (w & 0x80008000u);
    const float sum = x[0] + x[1] + x[2] + x[3];
    if (code == 255 || sum != sum) { /* what is no number stays none */
        return make_uint2(0x7fc07fc0u, 0x7fc07fc0u);
    }
    return make_uint2(arch_times_bf16(arch_times_bf16(even, back), scale),
                      arch_times_bf16(arch_times_bf16(odd, back), scale));
}

/* Of a warp's group of 128 of a row this lane's four, inputs 4 lane ... of the group: through the
 * quantiser (as warp_quant8), if `quant`, and into the row's image, k on from its start. Rows with
 * odd numbers have the halves of 128 bytes exchanged, so that eight rows are read without waiting
 * for each other. */
__device__ __forceinline__ void dense_put(uint32_t form, bool quant, const float *x, uint32_t row,
                                          uint32_t k, uint4 *image)
{
    uint2 words; /* (0, 2), (1, 3) */
    if (quant) {
        const float most = fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
        words = dense_quant(x, warp_max(fmaxf(most, 1e-4f)));
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
template <int FORM, bool ONCE, int NT>
__device__ __forceinline__ void dense_add_chunk(const uint4 *units, const uint32_t *code,
                                                const uint4 *image, uint32_t x, uint32_t second,
                                                float (*sums)[NT][4])
{
    enum {
        STEPS = tensor_unit<FORM>::INPUTS / 8,
        BACK = tensor_unit<FORM>::BACK,
        ONE = 0x3f803f80
    };
    uint4 unit[4];
    uint32_t by[4], scale[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unit[i] = units[cuda_lane() % 4 * CUDA_BLOCK + cuda_lane() / 4 + 8 * i];
        by[i] = ONCE ? (uint32_t)BACK - (uint32_t)ONE + code[i] * 0x800080u : BACK;
        scale[i] = tensor_scale_pair(code[i]);
    }
#pragma unroll
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t v[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            tensor_weights<FORM, ONCE>(unit[i], step, by[i], scale[i], v[i]);
        }
#pragma unroll
        for (uint32_t nt = 0; nt < NT; nt++) {
            const uint4 b = image[(x ^ step * TENSOR_UNITS) + nt * second];
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
                const uint32_t *low = v[2 * mt], *high = v[2 * mt + 1];
                arch_mma_bf16(sums[mt][nt], low[0], high[0], low[1], high[1], b.x, b.y);
                arch_mma_bf16(sums[mt][nt], low[2], high[2], low[3], high[3], b.z, b.w);
            }
        }
    }
}

template <int FORM, int NT>
__device__ __forceinline__ void dense_add(const uint4 *units, const uint32_t *scales,
                                          const uint4 *image, uint32_t x, uint32_t second,
                                          float (*sums)[NT][4])
{
    uint32_t code[4] = {0, 0, 0, 0};
    if constexpr (FORM != CUDA_BF16) {
        const uint32_t unit = FORM == CUDA_FP4_E8M0 ? cuda_lane() % 4 : 0;
        const uint8_t *codes = reinterpret_cast<const uint8_t *>(scales) + unit * CUDA_BLOCK;
        bool is_large = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            code[i] = codes[cuda_lane() / 4 + 8 * i];
            is_large = is_large || code[i] > tensor_unit<FORM>::MOST;
        }
        if (__any_sync(0xffffffffu, is_large)) {
            dense_add_chunk<FORM, false, NT>(units, code, image, x, second, sums);
            return;
        }
    }
    dense_add_chunk<FORM, true, NT>(units, code, image, x, second, sums);
}

/* A warp's sums as mma leaves them to [row, 32]. */
template <int NT>
__device__ __forceinline__ void dense_store(const float (*sums)[NT][4], uint32_t n_rows, float *to)
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
