/* The copy-and-checksum pass on the CPU.
 *
 * Owns nothing but arithmetic. The one property that matters: what is summed is what was stored to
 * dst, never a second read of src. A peer may still be writing to src (a landing slot), so each
 * block is copied to dst first and summed from there, while it is still in the first-level cache; a
 * write that lands between the two spoils nothing. The sums are integers, so the AVX2 and the
 * generic loop agree exactly and each host may choose its own.
 */
#include "kernels/parcel.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Small enough to stay in a 32 KiB first-level cache beside the source block. */
enum { BLOCK_BYTES = 4096 };

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void parcel_key_make(struct parcel_key *ret_key, uint64_t transfer_id, uint32_t parcel_seq)
{
    uint64_t state = mix64(transfer_id) ^ (parcel_seq * 0x9e3779b97f4a7c15u);
    for (int j = 0; j < 2; j++) {
        state += 0x9e3779b97f4a7c15u;
        uint64_t ab = mix64(state);
        state += 0x9e3779b97f4a7c15u;
        uint64_t cd = mix64(state);
        ret_key->a[j] = (uint32_t)ab;
        ret_key->b[j] = (uint32_t)(ab >> 32) | 1;
        ret_key->c[j] = (uint32_t)cd;
        ret_key->d[j] = (uint32_t)(cd >> 32) | 1;
    }
}

static void sum_generic(const struct parcel_key *key, struct parcel_sum *sum, const uint8_t *data,
                        size_t n_words, uint64_t first_word)
{
    for (size_t i = 0; i < n_words; i++) {
        uint64_t w;
        memcpy(&w, data + 8 * i, 8);
        uint32_t lo = (uint32_t)w, hi = (uint32_t)(w >> 32), n = (uint32_t)(first_word + i);
        for (int j = 0; j < 2; j++) {
            uint32_t x = lo + key->a[j] + key->b[j] * n, y = hi + key->c[j] + key->d[j] * n;
            sum->lane[j] += (uint64_t)x * y;
        }
    }
}

#if defined(__x86_64__)
/* Four words a turn. `x` holds a + b n in the low half of each 64-bit lane and c + d n in the high
 * half, so that one 32-bit add keys the whole word and one 32-bit add moves the keys on. */
__attribute__((target("avx2"))) static void sum_avx2(const struct parcel_key *key,
                                                     struct parcel_sum *sum, const uint8_t *data,
                                                     size_t n_words, uint64_t first_word)
{
    size_t n_quads = n_words / 4;
    __m256i keys[2], steps[2], lanes[2];
    for (int j = 0; j < 2; j++) {
        uint32_t k[8];
        for (int i = 0; i < 4; i++) {
            uint32_t n = (uint32_t)(first_word + (uint64_t)i);
            k[2 * i] = key->a[j] + key->b[j] * n;
            k[2 * i + 1] = key->c[j] + key->d[j] * n;
        }
        keys[j] = _mm256_loadu_si256((const __m256i *)(const void *)k);
        steps[j] = _mm256_set1_epi64x(
            (int64_t)(((uint64_t)(key->d[j] * 4u) << 32) | (uint32_t)(key->b[j] * 4u)));
        lanes[j] = _mm256_setzero_si256();
    }
    for (size_t q = 0; q < n_quads; q++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(const void *)(data + 32 * q));
        for (int j = 0; j < 2; j++) {
            __m256i x = _mm256_add_epi32(w, keys[j]);
            lanes[j] = _mm256_add_epi64(lanes[j], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
            keys[j] = _mm256_add_epi32(keys[j], steps[j]);
        }
    }
    for (int j = 0; j < 2; j++) {
        uint64_t part[4];
        _mm256_storeu_si256((__m256i *)(void *)part, lanes[j]);
        sum->lane[j] += part[0] + part[1] + part[2] + part[3];
    }
    sum_generic(key, sum, data + 32 * n_quads, n_words - 4 * n_quads, first_word + 4 * n_quads);
}
#endif

static bool force_generic;

void parcel_force_generic(bool on)
{
    force_generic = on;
}

static bool use_avx2(void)
{
#if defined(__x86_64__)
    return !force_generic && __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

const char *parcel_variant(void)
{
    return use_avx2() ? "avx2" : "generic";
}

static void sum_words(const struct parcel_key *key, struct parcel_sum *sum, const uint8_t *data,
                      size_t n_words, uint64_t first_word)
{
#if defined(__x86_64__)
    if (use_avx2()) {
        sum_avx2(key, sum, data, n_words, first_word);
        return;
    }
#endif
    sum_generic(key, sum, data, n_words, first_word);
}

void parcel_copy_sum(const struct parcel_key *key, struct parcel_sum *sum, void *dst,
                     const void *src, size_t bytes, uint64_t first_word)
{
    if (!dst) {
        sum_words(key, sum, src, bytes / 8, first_word);
        return;
    }
    for (size_t at = 0; at < bytes; at += BLOCK_BYTES) {
        size_t n = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
        memcpy((uint8_t *)dst + at, (const uint8_t *)src + at, n);
        sum_words(key, sum, (const uint8_t *)dst + at, n / 8, first_word + at / 8);
    }
}

uint64_t parcel_digest(const struct parcel_sum *sum, uint64_t n_bytes)
{
    uint64_t high = mix64(sum->lane[1]);
    return mix64(sum->lane[0] ^ n_bytes) + ((high << 32) | (high >> 32));
}
