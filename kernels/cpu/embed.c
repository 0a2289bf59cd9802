/* Token ids to the four streams, and what a call needs to know of its positions. */
#include <string.h>

#include "kernels/cpu/cpu.h"

void cpu_begin(struct ops_device *dev, const struct ops_rows *rows)
{
    uint32_t rd = dev->d.rope_dim;
    for (uint32_t r = 0; r < rows->n_rows; r++) {
        for (int k = 0; k < 2; k++) {
            cpu_rope_table(dev->freqs[k], rd, rows->positions[r], dev->rope[k] + (size_t)r * rd);
        }
    }
}

void cpu_embed(struct ops_device *dev, const struct ops_rows *rows, const struct ops_matrix *table,
               float *ret_streams)
{
    size_t n = dev->d.hidden;
    for (uint32_t r = 0; r < rows->n_rows; r++) {
        float *to = ret_streams + (size_t)r * OPS_HC * n;
        cpu_table_row(table, rows->tokens[r], to);
        for (uint32_t s = 1; s < OPS_HC; s++) {
            memcpy(to + s * n, to, n * sizeof(float));
        }
    }
}
