/* Index queries and the weights of their heads. */
#include <math.h>

#include "kernels/cpu/cpu.h"

struct indexer_run {
    struct ops_device *dev;
    float *iq, *iw;
};

static void query_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    struct indexer_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    float *q = run->iq + (size_t)item * d->index_dim;
    cpu_rope_row(q, d->index_dim, d->rope_dim,
                 run->dev->rope[1] + (size_t)(item / d->index_heads) * d->rope_dim, false,
                 !d->exact);
    if (!d->exact) {
        cpu_hadamard(q, d->index_dim);
        cpu_round_row(q, d->index_dim);
        cpu_quant4(q, d->index_dim);
    }
}

void cpu_indexer(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, const float *qr, float *ret_iq, float *ret_iw)
{
    const struct ops_dims *d = &dev->d;
    uint32_t n = rows->n_rows;
    if (cpu_wants_quant(dev, &layer->index_wq_b)) {
        cpu_quant_rows(dev, qr, n, d->q_lora, dev->quant);
        qr = dev->quant;
    }
    struct cpu_job jobs[2] = {{.matrix = &layer->index_wq_b,
                               .x = qr,
                               .x_stride = d->q_lora,
                               .n_rows = n,
                               .y = ret_iq,
                               .y_stride = (size_t)d->index_heads * d->index_dim,
                               .round = !d->exact},
                              {.matrix = &layer->index_weights,
                               .x = x,
                               .x_stride = d->hidden,
                               .n_rows = n,
                               .y = ret_iw,
                               .y_stride = d->index_heads,
                               .round = !d->exact}};
    cpu_gemm(dev->threads, jobs, 2);
    float scale = (float)(1.0 / sqrt((double)d->index_dim * d->index_heads));
    for (size_t i = 0; i < (size_t)n * d->index_heads; i++) {
        float w = ret_iw[i] * scale;
        ret_iw[i] = d->exact ? w : bf16_round(w);
    }
    struct indexer_run run = {dev, ret_iq, ret_iw};
    cpu_threads_run(dev->threads, n * d->index_heads,
                    (uint64_t)n * d->index_heads * d->index_dim * 8, query_item, &run);
}
