/* kernels/formats.h - the number formats of weights and cache, and where a cache entry keeps what.
 *
 * One definition for host and device: plain C without libraries, so that nvcc reads it too.
 *   bf16   the upper half of a float
 *   e4m3   1-4-3 bits, bias 7, no infinity, 0x7f and 0xff are NaN, largest 448, smallest 2^-9
 *   e8m0   a byte b stands for 2^(b-127)
 *   e2m1   bit 3 is the sign, the rest an index into 0 .5 1 1.5 2 3 4 6
 * All roundings are to nearest, ties to even. Encoders take finite values inside the format's range
 * after scaling; nothing here looks at NaN.
 */
#ifndef BATON_KERNELS_FORMATS_H
#define BATON_KERNELS_FORMATS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define FORMATS_FN static __host__ __device__ inline
#else
#define FORMATS_FN static inline
#endif

enum {
    FORMATS_KV_GROUP = 64,    /* channels of a cache entry that share a scale */
    FORMATS_KEY_GROUP = 32,   /* channels of an index key that share a scale */
    FORMATS_INPUT_GROUP = 128 /* inputs of an FP8 or FP4 matrix that share a scale */
};

FORMATS_FN uint32_t f32_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

FORMATS_FN float f32_from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

FORMATS_FN uint16_t bf16_encode(float x)
{
    uint32_t u = f32_bits(x);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

FORMATS_FN float bf16_decode(uint16_t h)
{
    return f32_from_bits((uint32_t)h << 16);
}

/* The bfloat16 nearest to x, as a float. */
FORMATS_FN float bf16_round(float x)
{
    uint32_t u = f32_bits(x);
    return f32_from_bits((u + 0x7fffu + ((u >> 16) & 1)) & 0xffff0000u);
}

/* The e4m3 number nearest to x, |x| <= 448, as a float. The sum with 3 * 2^13 leaves bits down to
 * 2^-9 alone, which is the spacing of e4m3's subnormals. */
FORMATS_FN float e4m3_round(float x)
{
    uint32_t u = f32_bits(x);
    if ((u & 0x7fffffffu) < 0x3c800000u) { /* 2^-6 */
        float shifted = x + 24576.0f;
        return shifted - 24576.0f;
    }
    return f32_from_bits((u + 0x7ffffu + ((u >> 20) & 1)) & 0xfff00000u);
}

FORMATS_FN uint8_t e4m3_encode(float x)
{
    float rounded = e4m3_round(x);
    uint32_t u = f32_bits(rounded), sign = (f32_bits(x) >> 24) & 0x80u, size = u & 0x7fffffffu;
    if (size < 0x3c800000u) {
        float eighths = f32_from_bits(size) * 512.0f;
        return (uint8_t)(sign | (uint32_t)eighths);
    }
    return (uint8_t)(sign | ((size >> 20) - (120u << 3)));
}

FORMATS_FN float e4m3_decode(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, e = (code >> 3) & 15u, m = code & 7u;
    if ((code & 0x7fu) == 0x7fu) {
        return f32_from_bits(sign | 0x7fc00000u);
    }
    if (e == 0) {
        float size = (float)m * 0.001953125f; /* 2^-9 */
        return f32_from_bits(sign | f32_bits(size));
    }
    return f32_from_bits(sign | ((e + 120u) << 23) | (m << 20));
}

FORMATS_FN float e8m0_decode(uint8_t code)
{
    return code ? f32_from_bits((uint32_t)code << 23) : 5.877471754111438e-39f;
}

/* e8m0 code of 2^ceil(log2(amax * inverse)): inverse is 1/448 or 1/6 as a float. For every normal
 * bfloat16 amax the product's own rounding does not move the result across a power of two. */
FORMATS_FN uint8_t e8m0_scale_for(float amax, float inverse)
{
    uint32_t u = f32_bits(amax * inverse);
    return (uint8_t)((u >> 23) + ((u & 0x7fffffu) != 0));
}

FORMATS_FN float e2m1_decode(uint8_t code)
{
    uint32_t i = code & 7u;
    float size = i < 4 ? 0.5f * (float)i : (i < 6 ? (float)(i - 2) : (i == 6 ? 4.0f : 6.0f));
    return (code & 8u) ? -size : size;
}

FORMATS_FN uint8_t e2m1_encode(float x)
{
    float size = f32_from_bits(f32_bits(x) & 0x7fffffffu);
    uint32_t i = size <= 0.25f   ? 0
                 : size < 0.75f  ? 1
                 : size <= 1.25f ? 2
                 : size < 1.75f  ? 3
                 : size <= 2.5f  ? 4
                 : size < 3.5f   ? 5
                 : size <= 5.0f  ? 6
                                 : 7;
    return (uint8_t)(i | ((f32_bits(x) >> 28) & 8u));
}

/* How cache entries and index keys are kept. PACKED is lossless for values that went through the
 * reference's own quantisers; F32 is for comparison with unquantised references. */
enum formats_entry_kind { FORMATS_ENTRY_PACKED, FORMATS_ENTRY_F32 };

/* A packed entry of head_dim channels, rope_dim of them rotated: body = (head_dim - rope_dim) e4m3
 * bytes, then rope_dim bf16; apart from it a scale byte for each 64 channels, padded to 8. 512 and
 * 64: 576 + 8. */
FORMATS_FN size_t formats_entry_bytes(enum formats_entry_kind kind, uint32_t head_dim,
                                      uint32_t rope_dim)
{
    return kind == FORMATS_ENTRY_F32 ? (size_t)head_dim * 4
                                     : (size_t)(head_dim - rope_dim) + 2 * (size_t)rope_dim;
}

FORMATS_FN size_t formats_entry_scale_bytes(enum formats_entry_kind kind, uint32_t head_dim,
                                            uint32_t rope_dim)
{
    return kind == FORMATS_ENTRY_F32
               ? 0
               : (((size_t)(head_dim - rope_dim) / FORMATS_KV_GROUP + 7) & ~(size_t)7);
}

/* A packed index key: two channels a byte, the even one in the low nibble; apart from it a scale
 * byte for each 32 channels. 128: 64 + 4. */
FORMATS_FN size_t formats_key_bytes(enum formats_entry_kind kind, uint32_t index_dim)
{
    return kind == FORMATS_ENTRY_F32 ? (size_t)index_dim * 4 : (size_t)index_dim / 2;
}

FORMATS_FN size_t formats_key_scale_bytes(enum formats_entry_kind kind, uint32_t index_dim)
{
    return kind == FORMATS_ENTRY_F32 ? 0 : (size_t)index_dim / FORMATS_KEY_GROUP;
}

#endif
