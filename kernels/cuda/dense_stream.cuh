/* kernels/cuda/dense_stream.cuh - what dense_stream.cu and experts_blocks.cu share: a warp's inputs
 * as an mma takes them, in shared memory, and its sums of a chunk.
 */
#ifndef BATON_KERNELS_CUDA_DENSE_STREAM_CUH
#define BATON_KERNELS_CUDA_DENSE_STREAM_CUH

#include "kernels/cuda/tensor.cuh"

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

/* Of a warp's group of 128 of a row this lane's four, inputs 4 lane ... of the group: through the
 * quantiser (as warp_quant8), if `quant`, and into the row's image, k on from its start. Rows with
 * odd numbers have the halves of 128 bytes exchanged, so that eight rows are read without waiting
 * for each other. */
__device__ __forceinline__ void dense_put(uint32_t form, bool quant, const float *x, uint32_t row,
                                          uint32_t k, uint4 *image)
{
    float v[4] = {x[0], x[1], x[2], x[3]};
    if (quant) {
        const float most = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
        const uint8_t code = e8m0_scale_for(warp_max(fmaxf(most, 1e-4f)), 1.0f / 448.0f);
        const float scale = e8m0_decode(code), inverse = 1.0f / scale;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = e4m3_round(v[i] * inverse) * scale;
        }
    }
    /* Four halves side by side, see tensor_half_of. */
    const uint32_t inputs = tensor_inputs_of(form), unit = k / inputs, step = k % inputs / 8;
    uint32_t at =
        ((unit / TENSOR_UNITS * (inputs / 8) + step) * TENSOR_UNITS + unit % TENSOR_UNITS) * 2 +
        k / 4 % 2;
    uint2 words;
    if (form == CUDA_FP8) {
        words = make_uint2(arch_pair_bf16(v[0], v[2]), arch_pair_bf16(v[1], v[3]));
    } else if (form == CUDA_BF16) {
        words = make_uint2(arch_pair_bf16(v[0], v[1]), arch_pair_bf16(v[2], v[3]));
    } else { /* each with the one four further on, which the lane beside has */
        float w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = __shfl_xor_sync(0xffffffffu, v[i], 1);
        }
        words = cuda_lane() % 2
                    ? make_uint2(arch_pair_bf16(w[2], v[2]), arch_pair_bf16(w[3], v[3]))
                    : make_uint2(arch_pair_bf16(v[0], w[0]), arch_pair_bf16(v[1], w[1]));
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
