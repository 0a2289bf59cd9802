/* Cache entries and index keys between floats and their stored form.
 *
 * What is stored has been through the same quantiser already (attend sees the simulated values of
 * this very call before they are stored), so store followed by load gives the same bits.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

static float e4m3_table[256];

__attribute__((constructor)) static void fill_table(void)
{
    for (int i = 0; i < 256; i++) {
        e4m3_table[i] = e4m3_decode((uint8_t)i);
    }
}

static float largest(const float *x, uint32_t n, float floor)
{
    float most = floor;
    for (uint32_t i = 0; i < n; i++) {
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    }
    return most;
}

void cpu_entry_store(const struct ops_dims *d, const float *x, uint8_t *body, uint8_t *scales)
{
    if (d->entry_kind == FORMATS_ENTRY_F32) {
        memcpy(body, x, (size_t)d->head_dim * sizeof(float));
        return;
    }
    uint32_t n = d->head_dim - d->rope_dim;
    memset(scales, 0, formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim));
    for (uint32_t g = 0; g < n; g += FORMATS_KV_GROUP) {
        uint8_t code = e8m0_scale_for(largest(x + g, FORMATS_KV_GROUP, 1e-4f), 1.0f / 448.0f);
        float inverse = 1.0f / e8m0_decode(code);
        scales[g / FORMATS_KV_GROUP] = code;
        for (uint32_t i = g; i < g + FORMATS_KV_GROUP; i++) {
            body[i] = e4m3_encode(x[i] * inverse);
        }
    }
    for (uint32_t i = 0; i < d->rope_dim; i++) {
        uint16_t half = bf16_encode(x[n + i]);
        body[n + 2 * i] = (uint8_t)half;
        body[n + 2 * i + 1] = (uint8_t)(half >> 8);
    }
}

void cpu_entry_load(const struct ops_dims *d, const uint8_t *body, const uint8_t *scales,
                    float *ret_x)
{
    if (d->entry_kind == FORMATS_ENTRY_F32) {
        memcpy(ret_x, body, (size_t)d->head_dim * sizeof(float));
        return;
    }
    uint32_t n = d->head_dim - d->rope_dim;
    for (uint32_t g = 0; g < n; g += FORMATS_KV_GROUP) {
        float scale = e8m0_decode(scales[g / FORMATS_KV_GROUP]);
        for (uint32_t i = g; i < g + FORMATS_KV_GROUP; i++) {
            ret_x[i] = e4m3_table[body[i]] * scale;
        }
    }
    for (uint32_t i = 0; i < d->rope_dim; i++) {
        ret_x[n + i] =
            bf16_decode((uint16_t)(body[n + 2 * i] | (uint32_t)body[n + 2 * i + 1] << 8));
    }
}

void cpu_key_store(const struct ops_dims *d, const float *x, uint8_t *body, uint8_t *scales)
{
    uint32_t n = d->index_dim;
    if (d->entry_kind == FORMATS_ENTRY_F32) {
        memcpy(body, x, (size_t)n * sizeof(float));
        return;
    }
    for (uint32_t g = 0; g < n; g += FORMATS_KEY_GROUP) {
        uint8_t code =
            e8m0_scale_for(largest(x + g, FORMATS_KEY_GROUP, 6.0f * 1.17549435e-38f), 1.0f / 6.0f);
        float scale = e8m0_decode(code);
        scales[g / FORMATS_KEY_GROUP] = code;
        for (uint32_t i = g; i < g + FORMATS_KEY_GROUP; i += 2) {
            body[i / 2] = (uint8_t)(e2m1_encode(x[i] / scale) | e2m1_encode(x[i + 1] / scale) << 4);
        }
    }
}

void cpu_key_load(const struct ops_dims *d, const uint8_t *body, const uint8_t *scales,
                  float *ret_x)
{
    uint32_t n = d->index_dim;
    if (d->entry_kind == FORMATS_ENTRY_F32) {
        memcpy(ret_x, body, (size_t)n * sizeof(float));
        return;
    }
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    for (uint32_t g = 0; g < n; g += FORMATS_KEY_GROUP) {
        float scale = e8m0_decode(scales[g / FORMATS_KEY_GROUP]);
        for (uint32_t i = g; i < g + FORMATS_KEY_GROUP; i += 2) {
            ret_x[i] = values[body[i / 2] & 15] * scale;
            ret_x[i + 1] = values[body[i / 2] >> 4] * scale;
        }
    }
}

void cpu_page_entry(const struct ops_dims *d, const struct ops_kv *kv, const struct ops_place *p,
                    const uint32_t *pages, uint32_t j, bool is_key, uint8_t **ret_body,
                    uint8_t **ret_scales)
{
    /* 64-bit products: a V4-Flash page has 901,120 bytes, so page 2,384 starts beyond 2^31. */
    uint8_t *page = kv->pool + (uint64_t)pages[j / p->entries_a_page] * kv->page_bytes;
    size_t i = j % p->entries_a_page;
    if (is_key) {
        *ret_body = page + p->key + i * formats_key_bytes(d->entry_kind, d->index_dim);
        *ret_scales =
            page + p->key_scale + i * formats_key_scale_bytes(d->entry_kind, d->index_dim);
    } else {
        *ret_body =
            page + p->entry + i * formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
        *ret_scales = page + p->entry_scale +
                      i * formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    }
}
