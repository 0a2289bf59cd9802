/* base/made.h - numbers that nobody trained: the bytes of synthetic weights (model/synthetic.h).
 *
 * Eight bytes of a tensor at a time, from its key and their place alone, so whoever holds any part
 * of it, host or device, in whatever order, makes the same bytes. Plain C without libraries, which
 * nvcc reads too.
 */
#ifndef BATON_BASE_MADE_H
#define BATON_BASE_MADE_H

#include <stdint.h>

#ifdef __CUDACC__
#define MADE_FN static __host__ __device__ inline
#else
#define MADE_FN static inline
#endif

/* What a tensor's bytes are read as. */
enum made_kind {
    MADE_NONE, /* it is not made */
    MADE_E4M3,
    MADE_E8M0,
    MADE_BF16,
    MADE_E2M1 /* two a byte */
};

struct made {
    uint64_t key;     /* of seed and name */
    int32_t exponent; /* its values are about 2^exponent */
    uint32_t kind;
};

/* Word i of the tensor: a mix of key and i. */
MADE_FN uint64_t made_word(uint64_t key, uint64_t i)
{
    uint64_t z = key + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Bytes 8 i to 8 i + 7 of the tensor, the first in the lowest. */
MADE_FN uint64_t made_eight(const struct made *m, uint64_t i)
{
    const uint64_t each = UINT64_C(0x0101010101010101), half = UINT64_C(0x0001000100010001);
    switch (m->kind) {
    case MADE_E4M3: /* any sign and mantissa, exponent 5 or 7 of bias 7 */
        return (made_word(m->key, i) & 0x97 * each) | 0x28 * each;
    case MADE_E8M0:
        return (uint64_t)(127 + m->exponent) * each;
    case MADE_BF16: /* any sign and mantissa */
        return (made_word(m->key, i) & 0x807f * half) | ((uint64_t)(126 + m->exponent) << 7) * half;
    case MADE_E2M1:
        return made_word(m->key, i);
    default:
        return 0;
    }
}

/* Eight bytes from byte `at` on, wherever that is. */
MADE_FN uint64_t made_bytes(const struct made *m, uint64_t at)
{
    uint32_t shift = 8 * (uint32_t)(at % 8);
    uint64_t eight = made_eight(m, at / 8) >> shift;
    return shift ? eight | made_eight(m, at / 8 + 1) << (64 - shift) : eight;
}

#endif
