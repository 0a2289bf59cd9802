/* kernels/source.h - what every backend needs on the host: elements of a checkpoint's matrix, and
 * the frequencies of rotation. Any thread.
 */
#ifndef BATON_KERNELS_SOURCE_H
#define BATON_KERNELS_SOURCE_H

#include "kernels/ops.h"

/* Element (row, col) of the matrix that `source` describes, with its scale. */
float ops_source_element(const struct ops_source *source, uint32_t row, uint32_t col);
/* Whether bfloat16 holds every element: BF16 itself, and small elements with power-of-two scales.
 */
bool ops_source_is_half(const struct ops_source *source);
/* The bytes of row `row` from column `col` on; with fp4 elements `col` must be even. */
const uint8_t *ops_source_bytes(const struct ops_source *source, uint32_t row, uint32_t col);
/* Index of the scale of element (row, col). */
FORMATS_FN size_t ops_source_scale_i(const struct ops_source *source, uint32_t row, uint32_t col)
{
    row += source->row_first;
    col += source->col_first;
    return (size_t)(row / source->block_rows) * source->scale_cols + col / source->block_cols;
}
/* ret_freqs[rope_dim / 2]: radians a token for each pair, in window-only layers or in the others.
 */
void ops_rope_freqs(const struct ops_dims *dims, bool compressed, float *ret_freqs);

#endif
