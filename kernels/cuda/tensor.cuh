/* kernels/cuda/tensor.cuh - operands of products on tensor cores, from the packed form, and the
 * order of their sums: what tensor.cu and experts_stream.cu must have in common so that a row's
 * bits don't depend on which of them made it.
 *
 * Order: a matrix's inputs are cut into chunks of four units, the chunks into 8 G runs as even as
 * can be; a warp sums a run chunk by chunk, in each the eights of inputs of a unit in turn, and two
 * mma an eight; the 8 sums of a group are added in turn, then the G groups.
 *
 * A thread's share of an mma is chosen to suit the packed form (enum cuda_form), whose units hold
 * consecutive inputs of one output: thread (g, t) of a warp takes unit t of a chunk, of outputs g,
 * g + 8, g + 16, g + 24, and the inputs at the same places of row g. The order of the inputs inside
 * an mma is free as long as both sides agree.
 */
#ifndef BATON_KERNELS_CUDA_TENSOR_CUH
#define BATON_KERNELS_CUDA_TENSOR_CUH

#include "kernels/cuda/cuda.cuh"

enum {
    TENSOR_RUNS = 8,                                                  /* of a group */
    TENSOR_UNITS = 4,                                                 /* of a chunk */
    TENSOR_CHUNK_BYTES = TENSOR_UNITS * CUDA_BLOCK * CUDA_UNIT_BYTES, /* of 32 outputs, any form */
    TENSOR_AIM_BLOCKS = 320,
    TENSOR_MAX_GROUPS = 16
};

/* INPUTS: of a unit. GROUP: inputs of a scale, 0: there is none. BACK: what the elements' bits, put
 * where bfloat16 has exponent and mantissa, are to be multiplied by (twice in a word). MOST: the
 * largest code of a scale whose product with BACK is a bfloat16. */
template <int FORM> struct tensor_unit;
template <> struct tensor_unit<CUDA_BF16> {
    enum { INPUTS = 8, GROUP = 0, BACK = 0, MOST = 0 };
};
template <> struct tensor_unit<CUDA_FP8> {
    enum { INPUTS = 16, GROUP = 128, BACK = 0x7b807b80, MOST = 134 }; /* 2^120 */
};
template <> struct tensor_unit<CUDA_FP4_SCALED> {
    enum { INPUTS = 32, GROUP = 32, BACK = 0, MOST = 0 };
};
template <> struct tensor_unit<CUDA_FP4_E8M0> {
    enum { INPUTS = 32, GROUP = 32, BACK = 0x7e807e80, MOST = 128 }; /* 2^126 */
};

/* 2^(code - 127) twice. */
__device__ __forceinline__ uint32_t tensor_scale_pair(uint32_t code)
{
    uint32_t half = code ? code << 7 : 0x40u;
    return half | half << 16;
}

/* Eight inputs of one output, words[0 .. 3]: operands (0, 1) of the first mma and (2, 3) of the
 * second. `step` counts the eights of the unit. The elements' bits times `by`, and unless ONCE
 * times `scale`: BACK and the scale, or both in one. Every product is exact. */
template <int FORM, bool ONCE>
__device__ __forceinline__ void tensor_weights(const uint4 &unit, uint32_t step, uint32_t by,
                                               uint32_t scale, uint32_t *words)
{
    const uint32_t word[4] = {unit.x, unit.y, unit.z, unit.w};
    if constexpr (FORM == CUDA_BF16) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = word[i];
        }
    } else if constexpr (FORM == CUDA_FP8) {
        /* Bytes 0 and 2, then 1 and 3: exponent and mantissa where bfloat16 has them is 2^-120 of
         * the value, subnormals included. */
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t w = word[2 * step + i];
            uint32_t even = (w << 4 & 0x07f007f0u) | (w << 8 & 0x80008000u);
            uint32_t odd = (w >> 4 & 0x07f007f0u) | (w & 0x80008000u);
            words[2 * i] = arch_times_bf16(even, by);
            words[2 * i + 1] = arch_times_bf16(odd, by);
        }
    } else {
        const uint32_t w = word[step], sign = 0x80008000u, size = 0x01c001c0u;
        words[0] = arch_times_bf16(w & (sign | size), by); /* see cuda_fp4_packed */
        words[1] = arch_times_bf16(w << 3 & (sign | size), by);
        words[2] = arch_times_bf16((w << 1 & sign) | (w << 6 & size), by);
        words[3] = arch_times_bf16((w << 2 & sign) | (w >> 3 & size), by);
    }
    if constexpr (FORM != CUDA_BF16 && !ONCE) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i] = arch_times_bf16(words[i], scale);
        }
    }
}

/* The same places of a row: eight inputs of it, words[0 .. 1] of the first mma and [2 .. 3] of the
 * second. */
template <int FORM>
__device__ __forceinline__ void tensor_inputs(const float4 &a, const float4 &b, uint32_t *words)
{
    if constexpr (FORM == CUDA_BF16) {
        words[0] = arch_pair_bf16(a.x, a.y);
        words[1] = arch_pair_bf16(a.z, a.w);
        words[2] = arch_pair_bf16(b.x, b.y);
        words[3] = arch_pair_bf16(b.z, b.w);
    } else if constexpr (FORM == CUDA_FP8) {
        words[0] = arch_pair_bf16(a.x, a.z);
        words[1] = arch_pair_bf16(a.y, a.w);
        words[2] = arch_pair_bf16(b.x, b.z);
        words[3] = arch_pair_bf16(b.y, b.w);
    } else {
        words[0] = arch_pair_bf16(a.x, b.x);
        words[1] = arch_pair_bf16(a.y, b.y);
        words[2] = arch_pair_bf16(a.z, b.z);
        words[3] = arch_pair_bf16(a.w, b.w);
    }
}

/* A chunk of weights times rows by the eight: sums[mt][nt] += this thread's units, of outputs
 * g + 8 i, as unit_of(i) gives them, times the eights that inputs_of(nt, step) gives, nt < n.
 * codes: of the units' scales, by output. Where no scale is too large for it, they and BACK are
 * one. */
template <int FORM, bool ONCE, int NT, typename UNIT, typename INPUTS>
__device__ __forceinline__ void tensor_add_units(UNIT unit_of, const uint32_t *code, uint32_t n,
                                                 INPUTS inputs_of, float (*sums)[NT][4])
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
        unit[i] = unit_of(i);
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
            if (nt < n) {
                const uint4 b = inputs_of(nt, step);
#pragma unroll
                for (int mt = 0; mt < 2; mt++) {
                    const uint32_t *low = v[2 * mt], *high = v[2 * mt + 1];
                    arch_mma_bf16(sums[mt][nt], low[0], high[0], low[1], high[1], b.x, b.y);
                    arch_mma_bf16(sums[mt][nt], low[2], high[2], low[3], high[3], b.z, b.w);
                }
            }
        }
    }
}

template <int FORM, int NT, typename UNIT, typename INPUTS>
__device__ __forceinline__ void tensor_add_chunk(UNIT unit_of, const uint32_t *scales, uint32_t n,
                                                 INPUTS inputs_of, float (*sums)[NT][4])
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
            tensor_add_units<FORM, false, NT>(unit_of, code, n, inputs_of, sums);
            return;
        }
    }
    tensor_add_units<FORM, true, NT>(unit_of, code, n, inputs_of, sums);
}

/* Four numbers through the quantiser of a group whose largest is `most`, as pairs of bfloat16: the
 * first and third, the second and fourth. They are e4m3 times a power of two, made of the bits as
 * weights are. */
__device__ __forceinline__ uint2 tensor_quant(const float *x, float most)
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

/* Where among the eight halves of such words input i of an eight lies. */
FORMATS_FN uint32_t tensor_half_of(uint32_t form, uint32_t i)
{
    return form == CUDA_FP4_E8M0 ? i % 4 * 2 + i / 4
           : form == CUDA_FP8    ? i / 4 * 4 + i % 2 * 2 + i / 2 % 2
                                 : i;
}

FORMATS_FN uint32_t tensor_inputs_of(uint32_t form)
{
    return form == CUDA_FP4_E8M0 || form == CUDA_FP4_SCALED ? 32 : (form == CUDA_FP8 ? 16 : 8);
}

/* --- by block-scaled products (arch_mma_mx8): e4m3 inputs, of which a chunk's share a scale
 *
 * The weights stay as they are packed. A chunk is two mma of CUDA_FP8 and four of CUDA_FP4_SCALED,
 * tensor_steps, summed in turn; else the order is the one above, and so are the products: what
 * differs is the rounding of sums, once an mma or as the hardware does it. */

template <int FORM> struct tensor_steps {
    enum { N = FORM == CUDA_FP8 ? 2 : 4 };
};

/* Weights of step J, of one output: inputs that lane t has in both halves of k. */
template <int FORM, int J>
__device__ __forceinline__ void tensor_scaled_weights(const uint4 &unit, uint32_t *words)
{
    const uint32_t word[4] = {unit.x, unit.y, unit.z, unit.w};
    if constexpr (FORM == CUDA_FP8) {
        words[0] = word[2 * J];
        words[1] = word[2 * J + 1];
    } else {
        words[0] = word[J] << 2 & 0x3c3c3c3cu;
        words[1] = word[J] >> 2 & 0x3c3c3c3cu;
    }
}

/* sums of outputs g, g + 8 (low) and g + 16, g + 24 (high) += step J of a chunk. unit: of outputs
 * g + 8 i. scale: of output g + 8 t, in byte J if each step has its own, else in byte 0. inputs:
 * e4m3 of the row g, in both halves of k; their scale is in byte 0. */
template <int FORM, int J>
__device__ __forceinline__ void tensor_scaled_step(const uint4 *unit, uint32_t scale,
                                                   const uint32_t *inputs, uint32_t inputs_scale,
                                                   float *low, float *high)
{
    enum { FORMAT = FORM == CUDA_FP8 ? ARCH_E4M3 : ARCH_E2M1, BYTE = FORM == CUDA_FP8 ? 0 : J };
    uint32_t w[4][2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        tensor_scaled_weights<FORM, J>(unit[i], w[i]);
    }
    const uint32_t a[2][4] = {{w[0][0], w[1][0], w[0][1], w[1][1]},
                              {w[2][0], w[3][0], w[2][1], w[3][1]}};
    arch_mma_mx8<FORMAT, BYTE, 0, 0, 0>(low, a[0], inputs, scale, inputs_scale);
    arch_mma_mx8<FORMAT, BYTE, 1, 0, 0>(high, a[1], inputs, scale, inputs_scale);
}

/* All steps of a chunk; inputs: two words of each. */
template <int FORM>
__device__ __forceinline__ void tensor_scaled_chunk(const uint4 *unit, uint32_t scale,
                                                    const uint32_t *inputs, uint32_t inputs_scale,
                                                    float *low, float *high)
{
    tensor_scaled_step<FORM, 0>(unit, scale, inputs, inputs_scale, low, high);
    tensor_scaled_step<FORM, 1>(unit, scale, inputs + 2, inputs_scale, low, high);
    if constexpr (tensor_steps<FORM>::N > 2) {
        tensor_scaled_step<FORM, 2>(unit, scale, inputs + 4, inputs_scale, low, high);
        tensor_scaled_step<FORM, 3>(unit, scale, inputs + 6, inputs_scale, low, high);
    }
}

/* Where in a chunk the first of the inputs lies that a lane has in step j: eight of them. */
template <int FORM> __device__ __forceinline__ uint32_t tensor_scaled_input(uint32_t t, uint32_t j)
{
    return FORM == CUDA_FP8 ? t * 16 + j * 8 : j * 32 + t * 8;
}

/* G, by shape and form alone. */
FORMATS_FN uint32_t tensor_groups_of(uint32_t n_out, uint32_t n_in, uint32_t form)
{
    uint32_t inputs = tensor_inputs_of(form) * TENSOR_UNITS,
             n_chunks = (n_in + inputs - 1) / inputs;
    uint32_t n_blocks = (n_out + CUDA_BLOCK - 1) / CUDA_BLOCK, n = 1;
    while (n < TENSOR_MAX_GROUPS && n_blocks * n * 2 <= TENSOR_AIM_BLOCKS &&
           n_chunks >= 2 * n * TENSOR_RUNS) {
        n *= 2;
    }
    return n;
}

#endif
