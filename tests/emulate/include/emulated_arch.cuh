/* The instructions of kernels/cuda/arch.cuh on the processor, lane by lane from PTX's text. */
#ifndef BATON_TESTS_EMULATE_ARCH_CUH
#define BATON_TESTS_EMULATE_ARCH_CUH

#include <math.h>
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

static inline uint32_t arch_pair_e4m3(float low, float high)
{
    return e4m3_encode(low) | (uint32_t)e4m3_encode(high) << 8;
}

/* mma with block_scale, K = 8 n products of `bits` each. Where element k of a row or column lies:
 * its half of k says the word, its n-th of the half the lane. Scales: one for all k, or one for
 * each half. */
struct emulate_scaled {
    const char *what;
    unsigned bits, n_scales;
    bool is_shifted; /* a is e2m1 in the middle of bytes */
    unsigned byte_a, thread_a, byte_b, thread_b;
};

/* What a byte stands for: looked up, for a test asks often. */
struct emulate_values {
    double e4m3[256], e2m1[16];
};

static inline const emulate_values &emulate_tables()
{
    static const emulate_values values = [] {
        emulate_values v;
        for (unsigned i = 0; i < 256; i++) {
            v.e4m3[i] = (double)e4m3_decode((uint8_t)i);
            v.e2m1[i % 16] = (double)e2m1_decode((uint8_t)(i % 16));
        }
        return v;
    }();
    return values;
}

/* Element i of a word. */
static inline double emulate_small(const emulate_values &v, uint32_t word, unsigned i,
                                   unsigned bits, bool is_shifted)
{
    if (bits == 4) {
        return v.e2m1[word >> 4 * i & 15u];
    }
    uint32_t byte = word >> 8 * i & 255u;
    if (is_shifted && byte & 0xc3) {
        emulate::fault("e2m1 in a byte with other bits: %#x", byte);
    }
    return is_shifted ? v.e2m1[byte >> 2] : v.e4m3[byte];
}

static inline double emulate_e8m0(uint32_t word, unsigned byte)
{
    uint32_t code = word >> 8 * byte & 255u;
    return code == 255 ? (double)NAN : ldexp(1.0, (int)code - 127);
}

static inline __attribute__((always_inline)) void
emulate_mma_scaled(const struct emulate_scaled &m, float *sum, const uint32_t *a, const uint32_t *b,
                   uint32_t scale_a, uint32_t scale_b)
{
    emulate::value mine = {};
    const uint32_t words[8] = {a[0], a[1], a[2], a[3], b[0], b[1], scale_a, scale_b};
    memcpy(mine.words, words, sizeof(words));
    const emulate::value *all = emulate::meet(0xffffffffu, m.what, mine);
    const unsigned lane = emulate::self_lane(), n = 32 / m.bits;
    const emulate_values &v = emulate_tables();
    for (unsigned i = 0; i < 4; i++) {
        const unsigned row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double total = sum[i];
        for (unsigned half = 0; half < 2; half++) {
            const unsigned scale_i = m.n_scales == 2 ? half : 0;
            const uint32_t of_row = all[4 * (row % 8) + 2 * m.thread_a + row / 8].words[6];
            const uint32_t of_column = all[4 * column + m.thread_b].words[7];
            double part = 0.0;
            for (unsigned k = 0; k < 4 * n; k++) {
                const unsigned t = k / n;
                part += emulate_small(v, all[4 * (row % 8) + t].words[2 * half + row / 8], k % n,
                                      m.bits, m.is_shifted) *
                        emulate_small(v, all[4 * column + t].words[4 + half], k % n, m.bits, false);
            }
            total += part * emulate_e8m0(of_row, m.byte_a + scale_i) *
                     emulate_e8m0(of_column, m.byte_b + scale_i);
        }
        sum[i] = (float)total;
    }
}

template <int FORMAT_A, int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
static inline void arch_mma_mx8(float *sum, const uint32_t *a, const uint32_t *b, uint32_t scale_a,
                                uint32_t scale_b)
{
    static_assert(BYTE_A < 4 && THREAD_A < 2 && BYTE_B < 4 && THREAD_B < 4, "as ptxas asks");
    emulate_mma_scaled(
        {"mma.m16n8k32 with scales", 8, 1, FORMAT_A != 0, BYTE_A, THREAD_A, BYTE_B, THREAD_B}, sum,
        a, b, scale_a, scale_b);
}

template <int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
static inline void arch_mma_mx4(float *sum, const uint32_t *a, const uint32_t *b, uint32_t scale_a,
                                uint32_t scale_b)
{
    static_assert(BYTE_A % 2 == 0 && THREAD_A < 2 && BYTE_B % 2 == 0 && THREAD_B < 4, "as asked");
    emulate_mma_scaled(
        {"mma.m16n8k64 with scales", 4, 2, false, BYTE_A, THREAD_A, BYTE_B, THREAD_B}, sum, a, b,
        scale_a, scale_b);
}

static inline void arch_load_transposed(const uint16_t *row, uint32_t *ret_words)
{
    emulate::value mine = {};
    if ((uintptr_t)row % 16) {
        emulate::fault("ldmatrix of a row at %p", static_cast<const void *>(row));
    }
    memcpy(mine.bytes, row, 16);
    const emulate::value *all = emulate::meet(0xffffffffu, "ldmatrix", mine);
    unsigned lane = emulate::self_lane(), g = lane / 4, t = lane % 4;
    for (unsigned m = 0; m < 4; m++) {
        uint16_t low, high;
        memcpy(&low, all[8 * m + 2 * t].bytes + 2 * g, 2);
        memcpy(&high, all[8 * m + 2 * t + 1].bytes + 2 * g, 2);
        ret_words[m] = low | (uint32_t)high << 16;
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

static inline void arch_grid_go()
{
    emulate::grid_go();
}

static inline void arch_grid_wait()
{
    emulate::grid_wait();
}

/* Memory that is none's is a fault, as it may be there. */
static inline void arch_fetch_ahead(const void *from, uint32_t bytes)
{
    const volatile uint8_t *at = static_cast<const volatile uint8_t *>(from);
    if ((uintptr_t)from % 16 || bytes % 16) {
        emulate::fault("%u bytes at %p are not in sixteens", bytes, from);
    }
    for (uint32_t i = 0; i < bytes; i += 4096) {
        (void)at[i];
    }
    (void)at[bytes - 1];
}

static inline void arch_barrier(uint32_t id, uint32_t n_threads)
{
    emulate::barrier(id, n_threads);
}

static inline float arch_inverse(float x)
{
    return 1.0f / x;
}

static inline uint32_t arch_load_acquire(const uint32_t *word)
{
    emulate::spin();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

/* Halves come one after the other, in either order. */
static inline void arch_store_there(uint4 *to, uint4 words)
{
    uint64_t halves[2], *at = reinterpret_cast<uint64_t *>(to);
    bool last_first = emulate::self_lane() % 2;
    memcpy(halves, &words, sizeof(halves));
    __atomic_store_n(at + last_first, halves[last_first], __ATOMIC_RELEASE);
    emulate::spin();
    __atomic_store_n(at + !last_first, halves[!last_first], __ATOMIC_RELEASE);
}

static inline uint4 arch_load_there(const uint4 *from)
{
    uint4 words;
    uint64_t halves[2];
    const uint64_t *at = reinterpret_cast<const uint64_t *>(from);
    emulate::spin();
    halves[0] = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    halves[1] = __atomic_load_n(at + 1, __ATOMIC_ACQUIRE);
    memcpy(&words, halves, sizeof(words));
    return words;
}

static inline uint32_t arch_count(uint32_t *word)
{
    return __atomic_fetch_add(word, 1u, __ATOMIC_RELAXED);
}

#endif
