/* The instructions of kernels/cuda/arch.cuh on the processor, lane by lane from PTX's text. */
#ifndef BATON_TESTS_EMULATE_ARCH_CUH
#define BATON_TESTS_EMULATE_ARCH_CUH

#include <string.h>

#include "tests/emulate/emulate.h"

static inline float emulate_bf16(uint32_t bits)
{
    uint32_t wide = bits << 16;
    float x;
    memcpy(&x, &wide, sizeof(x));
    return x;
}

/* To nearest, ties to even; every NaN becomes one. */
static inline uint32_t emulate_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fffu;
    }
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

/* The product of two bfloat16 values is exact in fp32, but for the very small. */
static inline uint32_t arch_times_bf16(uint32_t a, uint32_t b)
{
    return emulate_to_bf16(emulate_bf16(a & 0xffffu) * emulate_bf16(b & 0xffffu)) |
           emulate_to_bf16(emulate_bf16(a >> 16) * emulate_bf16(b >> 16)) << 16;
}

static inline uint32_t arch_pair_bf16(float low, float high)
{
    return emulate_to_bf16(low) | emulate_to_bf16(high) << 16;
}

/* Sums in double, rounded once: closer than the card's, so bounds for it are not tried here. */
static inline void arch_mma_bf16(float *sum, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                 uint32_t b0, uint32_t b1)
{
    emulate::value mine = {};
    const uint32_t words[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(mine.words, words, sizeof(words));
    const emulate::value *all = emulate::meet(0xffffffffu, "mma.m16n8k16", mine);
    unsigned lane = emulate::self_lane(), g = lane / 4, t = lane % 4;
    for (unsigned i = 0; i < 4; i++) {
        unsigned row_half = i / 2, column = 2 * t + i % 2;
        double total = sum[i];
        for (unsigned k = 0; k < 16; k++) {
            const uint32_t *a = all[4 * g + k % 8 / 2].words,
                           *b = all[4 * column + k % 8 / 2].words;
            uint32_t x = a[row_half + 2 * (k / 8)] >> 16 * (k % 2);
            uint32_t y = b[4 + k / 8] >> 16 * (k % 2);
            total += (double)emulate_bf16(x & 0xffffu) * (double)emulate_bf16(y & 0xffffu);
        }
        sum[i] = (float)total;
    }
}

/* A copy is made when it is waited for, at the latest moment there is: who reads before finds what
 * stood there. */
static inline void emulate_copy(void *to, const void *from, size_t bytes)
{
    if ((uintptr_t)to % bytes || (uintptr_t)from % bytes) {
        emulate::fault("a copy of %zu bytes between %p and %p", bytes, to, from);
    }
    emulate::copy_later(to, from, bytes);
}

static inline void arch_copy_16(void *shared, const void *from)
{
    emulate_copy(shared, from, 16);
}

static inline void arch_copy_4(void *shared, const void *from)
{
    emulate_copy(shared, from, 4);
}

static inline void arch_copy_close()
{
    emulate::copies_close();
}

template <int N> static inline void arch_copy_wait()
{
    emulate::copies_wait(N);
}

static inline uint32_t arch_load_acquire(const uint32_t *word)
{
    emulate::spin();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint32_t arch_count(uint32_t *word)
{
    return __atomic_fetch_add(word, 1u, __ATOMIC_RELAXED);
}

#endif
