/* The attention's inputs: q through its low-rank form, and the one key-value row of a token. */
#include "kernels/cpu/cpu.h"

struct project_run {
    struct ops_device *dev;
    const struct ops_layer *layer;
    const float *rope; /* [T, rope_dim] */
    float *qr, *q, *kv;
};

static void narrow_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct project_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    bool round = !d->exact;
    float *qr = run->qr + (size_t)r * d->q_lora, *kv = run->kv + (size_t)r * d->head_dim;
    cpu_rms_norm(qr, run->layer->q_norm, d->q_lora, d->rms_eps, round, qr);
    cpu_rms_norm(kv, run->layer->kv_norm, d->head_dim, d->rms_eps, round, kv);
    cpu_rope_row(kv, d->head_dim, d->rope_dim, run->rope + (size_t)r * d->rope_dim, false, round);
    if (!d->exact) {
        cpu_quant8(kv, d->head_dim - d->rope_dim, FORMATS_KV_GROUP, kv);
    }
}

static void head_row(void *cookie, uint32_t item, uint32_t thread_i)
{
    struct project_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    uint32_t r = item / d->n_heads;
    float *q = run->q + (size_t)item * d->head_dim;
    cpu_rms_norm(q, NULL, d->head_dim, d->rms_eps, !d->exact, q);
    cpu_rope_row(q, d->head_dim, d->rope_dim, run->rope + (size_t)r * d->rope_dim, false,
                 !d->exact);
}

void cpu_project(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, float *ret_qr, float *ret_q, float *ret_kv)
{
    const struct ops_dims *d = &dev->d;
    uint32_t n = rows->n_rows;
    const float *xq = x;
    if (cpu_wants_quant(dev, &layer->wq_a) || cpu_wants_quant(dev, &layer->wkv)) {
        cpu_quant_rows(dev, x, n, d->hidden, dev->quant);
        xq = dev->quant;
    }
    struct cpu_job jobs[2] = {{.matrix = &layer->wq_a,
                               .x = cpu_wants_quant(dev, &layer->wq_a) ? xq : x,
                               .x_stride = d->hidden,
                               .n_rows = n,
                               .y = ret_qr,
                               .y_stride = d->q_lora,
                               .round = !d->exact},
                              {.matrix = &layer->wkv,
                               .x = cpu_wants_quant(dev, &layer->wkv) ? xq : x,
                               .x_stride = d->hidden,
                               .n_rows = n,
                               .y = ret_kv,
                               .y_stride = d->head_dim,
                               .round = !d->exact}};
    cpu_gemm(dev->threads, jobs, 2);
    struct project_run run = {dev,    layer, dev->rope[layer->place.ratio != 0],
                              ret_qr, ret_q, ret_kv};
    cpu_threads_run(dev->threads, n, (uint64_t)n * (d->q_lora + d->head_dim) * 8, narrow_row, &run);

    const float *qr = ret_qr;
    if (cpu_wants_quant(dev, &layer->wq_b)) {
        cpu_quant_rows(dev, ret_qr, n, d->q_lora, dev->quant);
        qr = dev->quant;
    }
    struct cpu_job wide = {.matrix = &layer->wq_b,
                           .x = qr,
                           .x_stride = d->q_lora,
                           .n_rows = n,
                           .y = ret_q,
                           .y_stride = (size_t)d->n_heads * d->head_dim,
                           .round = !d->exact};
    cpu_gemm(dev->threads, &wide, 1);
    cpu_threads_run(dev->threads, n * d->n_heads, (uint64_t)n * d->n_heads * d->head_dim * 4,
                    head_row, &run);
}
