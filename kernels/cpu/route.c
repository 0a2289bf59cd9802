/* Which experts a row goes to, and with what weight.
 *
 * The bias counts in the choice and never in the weights. Ties go to the lowest id.
 */
#include <math.h>

#include "kernels/cpu/cpu.h"

struct route_run {
    struct ops_device *dev;
    const struct ops_rows *rows;
    const struct ops_layer *layer;
    float *scores; /* [T, n_experts] */
    uint32_t *experts;
    float *weights;
};

static void choose(const struct route_run *run, const float *score, uint32_t *ret_ids)
{
    const struct ops_dims *d = &run->dev->d;
    for (uint32_t k = 0; k < d->n_experts_used; k++) {
        uint32_t best = d->n_experts;
        float most = 0.0f;
        for (uint32_t e = 0; e < d->n_experts; e++) {
            float value = score[e] + run->layer->gate_bias[e];
            bool taken = false;
            for (uint32_t i = 0; i < k; i++) {
                taken = taken || ret_ids[i] == e;
            }
            if (!taken && (best == d->n_experts || value > most)) {
                best = e;
                most = value;
            }
        }
        ret_ids[k] = best;
    }
}

static void route_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct route_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    float *score = run->scores + (size_t)r * d->n_experts;
    for (uint32_t e = 0; e < d->n_experts; e++) {
        score[e] = sqrtf(cpu_softplus(score[e]));
    }
    uint32_t *ids = run->experts + (size_t)r * d->n_experts_used;
    float *w = run->weights + (size_t)r * d->n_experts_used, sum = 0.0f;
    if (run->layer->tid2eid) {
        for (uint32_t k = 0; k < d->n_experts_used; k++) {
            ids[k] = run->layer->tid2eid[(size_t)run->rows->tokens[r] * d->n_experts_used + k];
        }
    } else {
        choose(run, score, ids);
    }
    for (uint32_t k = 0; k < d->n_experts_used; k++) {
        w[k] = score[ids[k]];
        sum += w[k];
    }
    for (uint32_t k = 0; k < d->n_experts_used; k++) {
        w[k] = w[k] / sum * d->route_scale;
    }
}

void cpu_route(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *x, uint32_t *ret_experts, float *ret_weights)
{
    struct cpu_job job = {.matrix = &layer->gate,
                          .x = x,
                          .x_stride = dev->d.hidden,
                          .n_rows = rows->n_rows,
                          .y = dev->wide,
                          .y_stride = dev->d.n_experts};
    cpu_gemm(dev->threads, &job, 1);
    struct route_run run = {dev, rows, layer, dev->wide, ret_experts, ret_weights};
    cpu_threads_run(dev->threads, rows->n_rows, (uint64_t)rows->n_rows * dev->d.n_experts * 32,
                    route_row, &run);
}
