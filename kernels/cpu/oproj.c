/* Grouped low-rank output projection. */
#include "kernels/cpu/cpu.h"

enum { MAX_GROUPS = 256 };

void cpu_oproj(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *o, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    size_t wide = (size_t)d->n_heads * d->head_dim, narrow = (size_t)d->o_groups * d->o_lora;
    float *z = dev->wide;
    for (uint32_t g0 = 0; g0 < d->o_groups; g0 += MAX_GROUPS) {
        struct cpu_job jobs[MAX_GROUPS];
        uint32_t n = d->o_groups - g0 < MAX_GROUPS ? d->o_groups - g0 : MAX_GROUPS;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t g = g0 + i;
            jobs[i] = (struct cpu_job){.matrix = &layer->wo_a[g],
                                       .x = o + g * (wide / d->o_groups),
                                       .x_stride = wide,
                                       .n_rows = rows->n_rows,
                                       .y = z + (size_t)g * d->o_lora,
                                       .y_stride = narrow,
                                       .round = !d->exact};
        }
        cpu_gemm(dev->threads, jobs, n);
    }
    if (cpu_wants_quant(dev, &layer->wo_b)) {
        cpu_quant_rows(dev, z, rows->n_rows, narrow, z);
    }
    struct cpu_job job = {.matrix = &layer->wo_b,
                          .x = z,
                          .x_stride = narrow,
                          .n_rows = rows->n_rows,
                          .y = ret_y,
                          .y_stride = d->hidden,
                          .round = !d->exact && !d->is_partial};
    cpu_gemm(dev->threads, &job, 1);
}
