/* See source.h; model.md has the YaRN ramp. */
#include "kernels/source.h"

#include <math.h>
#include <string.h>

static float scale_at(const struct ops_source *s, uint32_t row, uint32_t col)
{
    switch (s->scale_format) {
    case OPS_SCALE_E8M0:
        return e8m0_decode(((const uint8_t *)s->scale)[ops_source_scale_i(s, row, col)]);
    case OPS_SCALE_E4M3:
        return e4m3_decode(((const uint8_t *)s->scale)[ops_source_scale_i(s, row, col)]);
    case OPS_SCALE_F32:
        return ((const float *)s->scale)[ops_source_scale_i(s, row, col)];
    case OPS_SCALE_NONE:
        break;
    }
    return 1.0f;
}

const uint8_t *ops_source_bytes(const struct ops_source *s, uint32_t row, uint32_t col)
{
    static const uint8_t half_bytes[] = {
        [OPS_F32] = 8, [OPS_BF16] = 4, [OPS_FP8_BLOCK] = 2, [OPS_MXFP4] = 1, [OPS_NVFP4] = 1};
    return (const uint8_t *)s->data + (size_t)(row + s->row_first) * s->row_bytes +
           (size_t)(col + s->col_first) * half_bytes[s->format] / 2;
}

float ops_source_element(const struct ops_source *s, uint32_t row, uint32_t col)
{
    const uint8_t *at = ops_source_bytes(s, row, col);
    uint16_t half;
    float value;
    switch (s->format) {
    case OPS_F32:
        memcpy(&value, at, 4);
        return value;
    case OPS_BF16:
        memcpy(&half, at, 2);
        return bf16_decode(half);
    case OPS_FP8_BLOCK:
        return e4m3_decode(*at) * scale_at(s, row, col);
    case OPS_MXFP4:
    case OPS_NVFP4:
        value = e2m1_decode((col + s->col_first) & 1 ? *at >> 4 : *at & 15);
        return value * scale_at(s, row, col) * s->global_scale;
    }
    return 0.0f;
}

bool ops_source_is_half(const struct ops_source *s)
{
    return s->format == OPS_BF16 || (s->format != OPS_F32 && s->scale_format == OPS_SCALE_E8M0 &&
                                     f32_bits(s->global_scale) == f32_bits(1.0f));
}

void ops_rope_freqs(const struct ops_dims *d, bool compressed, float *ret)
{
    double base = compressed ? d->compress_theta : d->rope_theta, rd = d->rope_dim;
    double low = 0.0, high = 1.0;
    bool yarn = compressed && d->has_yarn;
    if (yarn) {
        double turns = rd / (2.0 * log(base)), circle = 2.0 * M_PI;
        low = floor(turns * log(d->yarn_original / (d->yarn_beta_fast * circle)));
        high = ceil(turns * log(d->yarn_original / (d->yarn_beta_slow * circle)));
        low = low < 0.0 ? 0.0 : low;
        high = high > rd - 1.0 ? rd - 1.0 : high;
        high = low == high ? high + 0.001 : high;
    }
    for (uint32_t i = 0; i < d->rope_dim / 2; i++) {
        double f = pow(base, -2.0 * i / rd);
        if (yarn) {
            double ramp = (i - low) / (high - low);
            ramp = ramp < 0.0 ? 0.0 : (ramp > 1.0 ? 1.0 : ramp);
            f = f / d->yarn_factor * ramp + f * (1.0 - ramp);
        }
        ret[i] = (float)f;
    }
}
