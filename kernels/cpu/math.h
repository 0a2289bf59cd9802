/* kernels/cpu/math.h - exp, log(1 + x), sine and cosine with the same bits on every host.
 *
 * The C library picks its versions by the processor (with and without fused multiply-add), so two
 * hosts of one build may differ in a last bit. These are plain double arithmetic, rounded once to
 * float: within 0.501 units in the last place, which tests/kernels/test_ops.c checks. Inline, so
 * that loops around them can be vectorised; for the host and, by nvcc, for devices, where they must
 * be compiled without contraction to keep their bits (-fmad=false).
 */
#ifndef BATON_KERNELS_CPU_MATH_H
#define BATON_KERNELS_CPU_MATH_H

#include <stdint.h>
#include <string.h>

#include "kernels/formats.h"

/* 2^52 + 2^51: adding and subtracting it rounds a double below 2^51 to an integer. */
#define CPU_ROUND_DOUBLE 6755399441055744.0

/* e^x before it is rounded; x is taken within -110 and 90, beyond which the float is 0 or infinity.
 */
FORMATS_FN double cpu_exp_wide(float x)
{
    double y = (double)(x < -110.0f ? -110.0f : (x > 90.0f ? 90.0f : x));
    double k = (y * 1.4426950408889634074 + CPU_ROUND_DOUBLE) - CPU_ROUND_DOUBLE;
    double r = y - k * 0.69314718055994530942;
    /* |r| <= 0.347: the series to r^10 / 10! is exact to 1e-13. */
    double p = 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits = (uint64_t)((int64_t)k + 1023) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

/* e^x; 0 for -infinity. */
FORMATS_FN float cpu_exp(float x)
{
    return (float)cpu_exp_wide(x);
}

/* log(1 + e^z): 2 atanh(s) with s = u / (2 + u), u = e^-|z| in (0, 1], plus z where z > 0. */
FORMATS_FN float cpu_softplus(float z)
{
    double u = cpu_exp_wide(z > 0.0f ? -z : z), s = u / (2.0 + u), q = s * s, p = 0.0;
    for (int n = 23; n >= 1; n -= 2) { /* s <= 1/3: the rest is below 1e-12 */
        p = p * q + 1.0 / n;
    }
    return (float)((z > 0.0f ? (double)z : 0.0) + 2.0 * s * p);
}

/* Sine and cosine of x, |x| < 1.6 million. */
FORMATS_FN void cpu_sincos(float x, float *ret_sin, float *ret_cos)
{
    /* pi / 2 in two parts, the first of 33 bits: its product with k is exact for k below 2^20. */
    double y = (double)x;
    double k = (y * 0.63661977236758134308 + CPU_ROUND_DOUBLE) - CPU_ROUND_DOUBLE;
    double r = (y - k * 1.57079632673412561417) - k * 6.07710050650619224932e-11, q = r * r;
    double s = -1.0 / 1307674368000.0, c = -1.0 / 87178291200.0;
    s = s * q + 1.0 / 6227020800.0;
    s = s * q - 1.0 / 39916800.0;
    s = s * q + 1.0 / 362880.0;
    s = s * q - 1.0 / 5040.0;
    s = s * q + 1.0 / 120.0;
    s = s * q - 1.0 / 6.0;
    s = s * q * r + r;
    c = c * q + 1.0 / 479001600.0;
    c = c * q - 1.0 / 3628800.0;
    c = c * q + 1.0 / 40320.0;
    c = c * q - 1.0 / 720.0;
    c = c * q + 1.0 / 24.0;
    c = c * q - 0.5;
    c = c * q + 1.0;
    int quarter = (int)((int64_t)k & 3);
    double sine = quarter & 1 ? c : s, cosine = quarter & 1 ? s : c;
    *ret_sin = (float)(quarter & 2 ? -sine : sine);
    *ret_cos = (float)(quarter == 1 || quarter == 2 ? -cosine : cosine);
}

#endif
