/* kernels/sample.h - how a token is drawn from logits: the arithmetic, shared by host and devices.
 *
 * All of it has one result, whoever computes it and in whatever order: weights are made of single
 * float operations, each rounded by itself, and sums of them are whole numbers of 2^-43 of the
 * largest weight, which have no order. So a device that sums in parallel draws what the host draws,
 * always, and not but for a last bit.
 *
 * A row is drawn in these steps. The weight of an id is e^((logit - largest) / temperature), a
 * logit that is no number counting as -infinity. top_k keeps the k first in the order (weight
 * falling, id rising); top_p the shortest part of those from the front that holds top_p of their
 * weight; min_p drops what is below min_p of the largest weight, which is 1. Of what is left the
 * first id, ids rising, at which the sum of the weights is above u times the whole of it is drawn,
 * u = U(seed, position). What weighs less than 2^-43 is never drawn. Greedy (temperature 0), and
 * where the largest logit is infinite, it is the first of the largest.
 */
#ifndef BATON_KERNELS_SAMPLE_H
#define BATON_KERNELS_SAMPLE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/formats.h"
#include "kernels/ops.h"

/* Ids that weights can be summed of: 2^63 is the most that they come to. */
enum { SAMPLE_MAX_IDS = 1 << 20, SAMPLE_UNIT_BITS = 43 };

FORMATS_FN uint64_t sample_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* U(seed, position) times 2^53: splitmix64's finaliser over both. */
FORMATS_FN uint64_t sample_uniform(uint64_t seed, uint64_t position)
{
    return sample_mix(sample_mix(seed + 0x9e3779b97f4a7c15u) + position * 0x9e3779b97f4a7c15u) >>
           11;
}

/* e^x of x <= 0, exactly 1 at 0, never above, within 2^-22 of itself; 0 below -87, where no weight
 * counts, and of what is no number. */
FORMATS_FN float sample_exp(float x)
{
    if (!(x >= -87.0f)) {
        return 0.0f;
    }
    float k = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* 2^23 + 2^22: rounds to a whole */
    float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    float p = 1.0f / 5040.0f; /* |r| <= 0.35: what the series leaves out is below 2^-27 */
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    p = p > 1.0f && k == 0.0f ? 1.0f : p;
    return p * f32_from_bits((uint32_t)((int32_t)k + 127) << 23);
}

FORMATS_FN float sample_weight(float logit, float largest, float temperature)
{
    return sample_exp((logit - largest) / temperature);
}

/* The weight in units of 2^-43, the rest cut off. */
FORMATS_FN uint64_t sample_units(float weight)
{
    uint32_t bits = f32_bits(weight), exponent = bits >> 23;
    uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
    int shift = (int)exponent - (127 + 23 - SAMPLE_UNIT_BITS);
    return shift >= 0 ? mantissa << shift : (shift > -24 ? mantissa >> -shift : 0);
}

/* Whether weights that come to `sum`, from the front, are top_p of `total`. */
FORMATS_FN bool sample_enough(uint64_t sum, float top_p, uint64_t total)
{
    return (double)sum >= (double)top_p * (double)total;
}

/* The sum at which the drawn id is passed is the first above this: u * total, cut off. */
FORMATS_FN uint64_t sample_target(uint64_t seed, uint64_t position, uint64_t total)
{
    return (uint64_t)((unsigned __int128)(sample_uniform(seed, position) << 11) * total >> 64);
}

FORMATS_FN bool sample_is_finite(float x)
{
    return (f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

/* --- on the host: cpu/sample.c */

/* The first of the largest of n > 0; 0 if none is a number above -infinity. */
uint32_t sample_best(const float *logits, uint32_t n);
/* The k ids that come first in the order (value falling, id rising), first one first, into `ids`;
 * min(k, n), which it returns. None of them may be NaN. */
uint32_t sample_top(const float *values, uint32_t n, uint32_t k, uint32_t *ret_ids);
/* Draws one of n ids. `logits` become weights; `sorted` [n] and `keep` [n] are scratch. `position`
 * is that of the token drawn. */
uint32_t sample_draw(float *logits, uint32_t n, const struct ops_draw *draw, uint64_t position,
                     uint32_t *sorted, uint8_t *keep);

#endif
