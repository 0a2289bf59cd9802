/* Sums over the devices of a group, in rank order: the same bits on every rank and for every batch.
 */
#include "kernels/cpu/cpu.h"

void cpu_comm(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
              float *const *y)
{
    const struct ops_dims *d = &devices[0]->d;
    for (size_t i = 0; i < (size_t)n_rows * d->hidden; i++) {
        float sum = y[0][i];
        for (uint32_t k = 1; k < n_devices; k++) {
            sum += y[k][i];
        }
        sum = d->exact ? sum : bf16_round(sum);
        for (uint32_t k = 0; k < n_devices; k++) {
            y[k][i] = sum;
        }
    }
}
