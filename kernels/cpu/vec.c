/* Row arithmetic: norms, rotation, the quantisers, Hadamard.
 *
 * Sums over a row have the order of cpu_dot_inline, whatever the host's registers are: one order
 * for every caller.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

float cpu_dot(const float *a, const float *b, size_t n)
{
    return cpu_dot_inline(a, b, n);
}

float cpu_sum_squares(const float *x, size_t n)
{
    return cpu_dot(x, x, n);
}

void cpu_round_row(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_round(x[i]);
    }
}

void cpu_rms_norm(const float *x, const float *w, size_t n, float eps, bool round, float *y)
{
    float root = sqrtf(cpu_sum_squares(x, n) / (float)n + eps);
    for (size_t i = 0; i < n; i++) {
        y[i] = x[i] / root;
    }
    for (size_t i = 0; w && i < n; i++) {
        y[i] *= w[i];
    }
    if (round) {
        cpu_round_row(y, n);
    }
}

float cpu_sigmoid(float x)
{
    return 1.0f / (1.0f + cpu_exp(-x));
}

void cpu_rope_table(const float *freqs, uint32_t rope_dim, uint32_t position, float *ret_table)
{
    for (uint32_t i = 0; i < rope_dim / 2; i++) {
        /* The angle is rounded to float, as the reference does: at a position of a million that is
         * worth 0.03 rad. */
        float angle = (float)position * freqs[i];
        cpu_sincos(angle, &ret_table[2 * i + 1], &ret_table[2 * i]);
    }
}

void cpu_rope_row(float *x, size_t n, uint32_t rope_dim, const float *table, bool inverse,
                  bool round)
{
    float *tail = x + n - rope_dim;
    for (uint32_t i = 0; i < rope_dim; i += 2) {
        float c = table[i], s = inverse ? -table[i + 1] : table[i + 1];
        float even = tail[i], odd = tail[i + 1];
        tail[i] = even * c - odd * s;
        tail[i + 1] = even * s + odd * c;
    }
    if (round) {
        cpu_round_row(tail, rope_dim);
    }
}

static float largest(const float *x, size_t n, float floor)
{
    float most = floor;
    for (size_t i = 0; i < n; i++) {
        float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    return most;
}

/* e4m3_round without its branch, so that the compiler may take eight at a time: below 2^-6 the sum
 * with 3 * 2^13 rounds, above it the integer does. */
static inline float round8(float x)
{
    uint32_t u = f32_bits(x);
    float low = (x + 24576.0f) - 24576.0f;
    float high = f32_from_bits((u + 0x7ffffu + ((u >> 20) & 1)) & 0xfff00000u);
    return (u & 0x7fffffffu) < 0x3c800000u ? low : high;
}

void cpu_quant8(const float *x, size_t n, uint32_t group, float *y)
{
    for (size_t g = 0; g < n; g += group) {
        size_t m = n - g < group ? n - g : group;
        uint8_t code = e8m0_scale_for(largest(x + g, m, 1e-4f), 1.0f / 448.0f);
        /* The inverse of 2^(code-127); amax is at least 1e-4 and finite, so it is normal. */
        float scale = e8m0_decode(code), inverse = 1.0f / scale;
        for (size_t i = 0; i < m; i++) {
            y[g + i] = round8(x[g + i] * inverse) * scale;
        }
    }
}

void cpu_quant4(float *x, size_t n)
{
    for (size_t g = 0; g < n; g += FORMATS_KEY_GROUP) {
        size_t m = n - g < FORMATS_KEY_GROUP ? n - g : FORMATS_KEY_GROUP;
        float scale =
            e8m0_decode(e8m0_scale_for(largest(x + g, m, 6.0f * 1.17549435e-38f), 1.0f / 6.0f));
        for (size_t i = 0; i < m; i++) {
            x[g + i] = e2m1_decode(e2m1_encode(x[g + i] / scale)) * scale;
        }
    }
}

void cpu_hadamard(float *x, size_t n)
{
    for (size_t h = 1; h < n; h *= 2) {
        for (size_t base = 0; base < n; base += 2 * h) {
            for (size_t i = base; i < base + h; i++) {
                float a = x[i], b = x[i + h];
                x[i] = a + b;
                x[i + h] = a - b;
            }
        }
    }
    float norm = (float)(1.0 / sqrt((double)n));
    for (size_t i = 0; i < n; i++) {
        x[i] *= norm;
    }
}

struct quant_run {
    const float *x;
    float *y;
    size_t n;
};

static void quant_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    const struct quant_run *run = cookie;
    cpu_quant8(run->x + r * run->n, run->n, FORMATS_INPUT_GROUP, run->y + r * run->n);
}

void cpu_quant_rows(struct ops_device *dev, const float *x, uint32_t n_rows, size_t n, float *y)
{
    struct quant_run run = {x, y, n};
    cpu_threads_run(dev->threads, n_rows, (uint64_t)n_rows * n * 4, quant_row, &run);
}
