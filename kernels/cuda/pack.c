/* A checkpoint's matrix to the form that the products read: see enum cuda_form.
 *
 * Elements keep the checkpoint's bits (MXFP4 in another place, see cuda_fp4_packed) wherever its
 * scales lie on the kernels' groups; a share of a matrix that cuts through a group, or scales of
 * another kind, are multiplied out here, as the CPU does.
 */
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/source.h"

/* Inputs of one scale, of one unit of 16 bytes. */
struct form {
    uint32_t unit, group;
};

static struct form form_of(uint8_t form)
{
    switch ((enum cuda_form)form) {
    case CUDA_F32:
        return (struct form){4, 0};
    case CUDA_BF16:
        return (struct form){8, 0};
    case CUDA_FP8:
        return (struct form){16, 128};
    case CUDA_FP4_E8M0:
    case CUDA_FP4_SCALED:
        return (struct form){32, 32};
    case CUDA_FP4_E4M3:
        return (struct form){32, 16};
    case CUDA_TABLE_F32:
    case CUDA_TABLE_BF16:
        break;
    }
    return (struct form){1, 0};
}

static bool on_groups(const struct ops_source *s, uint32_t group)
{
    return s->block_cols % group == 0 && s->col_first % group == 0;
}

static uint8_t choose(const struct ops_source *s, bool scaled)
{
    bool half = ops_source_is_half(s);
    if (s->is_table) {
        return half ? CUDA_TABLE_BF16 : CUDA_TABLE_F32;
    }
    bool fp4 = s->format == OPS_MXFP4 || s->format == OPS_NVFP4;
    if (s->format == OPS_FP8_BLOCK && s->scale_format == OPS_SCALE_E8M0 && on_groups(s, 128)) {
        return CUDA_FP8;
    }
    if (fp4 && s->scale_format == OPS_SCALE_E8M0 && on_groups(s, 32)) {
        return scaled && s->cols % 128 == 0 && !s->plain_inputs ? CUDA_FP4_SCALED : CUDA_FP4_E8M0;
    }
    if (fp4 && s->scale_format == OPS_SCALE_E4M3 && on_groups(s, 16)) {
        return CUDA_FP4_E4M3;
    }
    return half ? CUDA_BF16 : CUDA_F32;
}

static bool is_table(uint8_t form)
{
    return form == CUDA_TABLE_F32 || form == CUDA_TABLE_BF16;
}

size_t cuda_packed_bytes(const struct ops_matrix *m)
{
    if (is_table(m->form)) {
        return (size_t)m->rows * m->cols * (m->form == CUDA_TABLE_BF16 ? 2 : 4);
    }
    struct form f = form_of(m->form);
    size_t bytes = cuda_scales_offset(m->rows, m->cols, f.unit);
    if (f.group) {
        bytes += (size_t)((m->rows + CUDA_BLOCK - 1) / CUDA_BLOCK) * CUDA_BLOCK *
                 cuda_groups(m->cols, f.unit, f.group);
    }
    return bytes + sizeof(float);
}

size_t cuda_matrix_bytes(const struct ops_source *s, bool scaled, uint8_t *ret_form)
{
    struct ops_matrix m = {.rows = s->rows, .cols = s->cols, .form = choose(s, scaled)};
    *ret_form = m.form;
    return cuda_packed_bytes(&m);
}

/* n elements from column col on, at most a unit's; `to` is zero. */
static void pack_unit(const struct ops_source *s, uint8_t form, uint32_t row, uint32_t col,
                      uint32_t n, uint8_t *to)
{
    switch ((enum cuda_form)form) {
    case CUDA_FP8:
        memcpy(to, ops_source_bytes(s, row, col), n);
        break;
    case CUDA_FP4_E8M0:
    case CUDA_FP4_E4M3:
    case CUDA_FP4_SCALED:
        memcpy(to, ops_source_bytes(s, row, col), (n + 1) / 2);
        if (n % 2) {
            to[n / 2] &= 15;
        }
        for (uint32_t i = 0; form == CUDA_FP4_E8M0 && i < CUDA_UNIT_BYTES; i += 4) {
            uint32_t word;
            memcpy(&word, to + i, sizeof(word));
            word = cuda_fp4_packed(word);
            memcpy(to + i, &word, sizeof(word));
        }
        break;
    case CUDA_BF16:
    case CUDA_TABLE_BF16:
        if (s->format == OPS_BF16) {
            memcpy(to, ops_source_bytes(s, row, col), (size_t)n * 2);
            break;
        }
        for (uint32_t i = 0; i < n; i++) {
            uint16_t half = bf16_encode(ops_source_element(s, row, col + i));
            memcpy(to + (size_t)i * 2, &half, 2);
        }
        break;
    case CUDA_F32:
    case CUDA_TABLE_F32:
        for (uint32_t i = 0; i < n; i++) {
            float value = ops_source_element(s, row, col + i);
            memcpy(to + (size_t)i * 4, &value, 4);
        }
        break;
    }
}

/* See cuda_fp4_halves. */
static void pack_scaled(const struct ops_source *s, uint8_t *bytes)
{
    const size_t n_units = s->cols / 32;
    uint8_t *scales = bytes + cuda_scales_offset(s->rows, s->cols, 32);
    for (uint32_t r = 0; r < s->rows; r++) {
        const size_t block = r / CUDA_BLOCK, lane = r % CUDA_BLOCK;
        for (uint32_t group = 0; group < n_units; group++) {
            const size_t chunk = block * n_units + group / 4 * 4;
            uint32_t plain[4];
            pack_unit(s, CUDA_FP4_SCALED, r, group * 32, 32, (uint8_t *)plain);
            for (uint32_t t = 0; t < 4; t++) {
                const uint32_t word = cuda_fp4_halves(plain[t]);
                memcpy(bytes + ((chunk + t) * CUDA_BLOCK + lane) * CUDA_UNIT_BYTES + group % 4 * 4,
                       &word, sizeof(word));
            }
            scales[(chunk * CUDA_BLOCK + lane * 4) + group % 4] =
                ((const uint8_t *)s->scale)[ops_source_scale_i(s, r, group * 32)];
        }
    }
    const size_t n_blocks = (s->rows + CUDA_BLOCK - 1) / CUDA_BLOCK;
    memcpy(scales + n_blocks * n_units * CUDA_BLOCK, &s->global_scale, sizeof(float));
}

void cuda_matrix_pack(const struct ops_source *s, uint8_t form, void *dst)
{
    uint8_t *bytes = dst;
    if (is_table(form)) {
        size_t row_bytes = (size_t)s->cols * (form == CUDA_TABLE_BF16 ? 2 : 4);
        for (uint32_t r = 0; r < s->rows; r++) {
            pack_unit(s, form, r, 0, s->cols, bytes + r * row_bytes);
        }
        return;
    }
    struct form f = form_of(form);
    memset(bytes, 0,
           cuda_packed_bytes(&(struct ops_matrix){.rows = s->rows, .cols = s->cols, .form = form}));
    if (form == CUDA_FP4_SCALED) {
        pack_scaled(s, bytes);
        return;
    }
    size_t n_units = (s->cols + f.unit - 1) / f.unit;
    size_t n_groups = f.group ? cuda_groups(s->cols, f.unit, f.group) : 0;
    size_t scales = cuda_scales_offset(s->rows, s->cols, f.unit);
    for (uint32_t r = 0; r < s->rows; r++) {
        size_t block = r / CUDA_BLOCK, lane = r % CUDA_BLOCK;
        for (size_t u = 0; u < n_units; u++) {
            uint32_t col = (uint32_t)u * f.unit;
            uint32_t n = s->cols - col < f.unit ? s->cols - col : f.unit;
            pack_unit(s, form, r, col, n,
                      bytes + ((block * n_units + u) * CUDA_BLOCK + lane) * CUDA_UNIT_BYTES);
        }
        for (size_t g = 0; g < n_groups && g * f.group < s->cols; g++) {
            bytes[scales + (block * n_groups + g) * CUDA_BLOCK + lane] =
                ((const uint8_t *)s->scale)[ops_source_scale_i(s, r, (uint32_t)g * f.group)];
        }
    }
    size_t n_blocks = (s->rows + CUDA_BLOCK - 1) / CUDA_BLOCK;
    memcpy(bytes + scales + n_blocks * n_groups * CUDA_BLOCK, &s->global_scale, sizeof(float));
}
