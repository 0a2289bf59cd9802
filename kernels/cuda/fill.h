/* kernels/cuda/fill.h - a packed matrix of synthetic weights, eight bytes at a time.
 *
 * What cuda_matrix_pack makes of a source whose data are those that base/made.h gives, without the
 * data: each word of the packed image for itself, so a device fills its memory at once. Read by the
 * C compiler too, and held to cuda_matrix_pack there (tests/kernels/test_fill.c).
 */
#ifndef BATON_KERNELS_CUDA_FILL_H
#define BATON_KERNELS_CUDA_FILL_H

#include "kernels/cuda/cuda.h"
#include "kernels/source.h"

/* Element (row, col) as ops_source_element gives it. */
FORMATS_FN float fill_element(const struct ops_source *s, uint32_t row, uint32_t col)
{
    size_t r = (size_t)(row + s->row_first) * s->row_bytes, c = col + s->col_first;
    if (s->format == OPS_BF16) {
        return bf16_decode((uint16_t)made_bytes(&s->made, r + 2 * c));
    }
    float scale = e8m0_decode((uint8_t)made_bytes(&s->made_scale, ops_source_scale_i(s, row, col)));
    if (s->format == OPS_FP8_BLOCK) {
        return e4m3_decode((uint8_t)made_bytes(&s->made, r + c)) * scale;
    }
    uint8_t two = (uint8_t)made_bytes(&s->made, r + c / 2);
    return e2m1_decode(c % 2 ? two >> 4 : two & 15) * scale * s->global_scale;
}

/* Elements from column col on, at most n, in eight bytes of `form`; the rest is zero. */
FORMATS_FN uint64_t fill_eight(const struct ops_source *s, uint8_t form, uint32_t row, uint32_t col,
                               uint32_t n)
{
    if (form == CUDA_FP4_SCALED) { /* two words, of two groups: `col` is the first's first input */
        uint64_t eight = 0;
        for (uint32_t i = 0; i < 2; i++) {
            size_t at =
                (size_t)(row + s->row_first) * s->row_bytes + (col + 32 * i + s->col_first) / 2;
            eight |= (uint64_t)cuda_fp4_halves((uint32_t)made_bytes(&s->made, at)) << 32 * i;
        }
        return eight;
    }
    if (form == CUDA_FP8 || form == CUDA_FP4_E8M0) {
        uint32_t a_byte = form == CUDA_FP8 ? 1 : 2, bits = 8 / a_byte * n;
        size_t at = (size_t)(row + s->row_first) * s->row_bytes + (col + s->col_first) / a_byte;
        uint64_t eight = made_bytes(&s->made, at);
        eight = bits < 64 ? eight & ((UINT64_C(1) << bits) - 1) : eight;
        return form == CUDA_FP8 ? eight
                                : (uint64_t)cuda_fp4_packed((uint32_t)(eight >> 32)) << 32 |
                                      cuda_fp4_packed((uint32_t)eight);
    }
    bool is_half = form == CUDA_BF16 || form == CUDA_TABLE_BF16;
    uint32_t width = is_half ? 16 : 32;
    uint64_t eight = 0;
    for (uint32_t i = 0; i < 64 / width && i < n; i++) {
        float value = fill_element(s, row, col + i);
        uint32_t bits = is_half ? bf16_encode(value) : f32_bits(value);
        eight |= (uint64_t)bits << i * width;
    }
    return eight;
}

/* Elements of eight bytes. */
FORMATS_FN uint32_t fill_width(uint8_t form)
{
    return form == CUDA_FP4_E8M0 || form == CUDA_FP4_SCALED ? 16
           : form == CUDA_FP8                               ? 8
           : form == CUDA_BF16 || form == CUDA_TABLE_BF16   ? 4
                                                            : 2;
}

/* Inputs that share a scale; 0: the form has none. */
FORMATS_FN uint32_t fill_group(uint8_t form)
{
    return form == CUDA_FP8 ? 128 : (form == CUDA_FP4_E8M0 || form == CUDA_FP4_SCALED ? 32 : 0);
}

FORMATS_FN bool fill_is_table(uint8_t form)
{
    return form == CUDA_TABLE_F32 || form == CUDA_TABLE_BF16;
}

/* Word i of the packed elements: of a product's matrix half a unit, of a table up to four elements
 * in a row of it. */
FORMATS_FN uint64_t fill_word(const struct ops_source *s, uint8_t form, size_t i)
{
    uint32_t width = fill_width(form), n_units = (s->cols + 2 * width - 1) / (2 * width);
    size_t unit = i / 2 / CUDA_BLOCK;
    uint32_t lane = (uint32_t)(i / 2 % CUDA_BLOCK);
    uint32_t row = (uint32_t)(unit / n_units) * CUDA_BLOCK + lane;
    uint32_t of_row = (uint32_t)(unit % n_units), half = (uint32_t)(i % 2);
    uint32_t col = form == CUDA_FP4_SCALED ? of_row / 4 * 128 + 64 * half + of_row % 4 * 8
                                           : of_row * 2 * width + half * width;
    return row < s->rows && col < s->cols ? fill_eight(s, form, row, col, s->cols - col) : 0;
}

/* Byte i of the packed scales. */
FORMATS_FN uint8_t fill_scale(const struct ops_source *s, uint8_t form, size_t i)
{
    uint32_t group = fill_group(form), n_groups = cuda_groups(s->cols, 2 * fill_width(form), group);
    size_t block = i / CUDA_BLOCK / n_groups;
    uint32_t row = (uint32_t)(block * CUDA_BLOCK + i % CUDA_BLOCK);
    uint32_t col = (uint32_t)(i / CUDA_BLOCK % n_groups) * group;
    if (form == CUDA_FP4_SCALED) { /* of 128 inputs, all scales of an output in turn */
        const uint32_t of_chunk = (uint32_t)(i % (4 * CUDA_BLOCK));
        row = (uint32_t)(block * CUDA_BLOCK + of_chunk / 4);
        col = (col / 128 * 4 + of_chunk % 4) * 32;
    }
    return row < s->rows && col < s->cols
               ? (uint8_t)made_bytes(&s->made_scale, ops_source_scale_i(s, row, col))
               : 0;
}

/* How many of each there are; elements of a table are counted in elements. */
struct fill_sizes {
    size_t n_words, n_scales, n_elements;
};

FORMATS_FN struct fill_sizes fill_sizes_of(const struct ops_source *s, uint8_t form)
{
    struct fill_sizes n = {0, 0, 0};
    uint32_t unit = 2 * fill_width(form), group = fill_group(form);
    if (fill_is_table(form)) {
        n.n_elements = (size_t)s->rows * s->cols;
        return n;
    }
    n.n_words = cuda_scales_offset(s->rows, s->cols, unit) / 8;
    n.n_scales = group ? (size_t)((s->rows + CUDA_BLOCK - 1) / CUDA_BLOCK) * CUDA_BLOCK *
                             cuda_groups(s->cols, unit, group)
                       : 0;
    return n;
}

#endif
