/* Streams to logits: one weight a stream, made by the token itself, then norm and vocabulary. */
#include <math.h>

#include "kernels/cpu/cpu.h"

enum { H = OPS_HC };

struct head_run {
    struct ops_device *dev;
    const struct ops_globals *g;
    const float *streams;
    const uint32_t *which;
};

static void head_row(void *cookie, uint32_t i, uint32_t thread_i)
{
    struct head_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    size_t n = d->hidden;
    const float *f = run->streams + (size_t)run->which[i] * H * n;
    float m[H], *h = run->dev->head_x + i * n;
    struct cpu_job job = {.matrix = &run->g->hc_head.fn,
                          .x = f,
                          .x_stride = H * n,
                          .n_rows = 1,
                          .y = m,
                          .y_stride = H};
    cpu_gemm(NULL, &job, 1);
    float root = sqrtf(cpu_sum_squares(f, H * n) / (float)(H * n) + d->rms_eps);
    for (int k = 0; k < H; k++) {
        m[k] = cpu_sigmoid(m[k] / root * run->g->hc_head.scale[0] + run->g->hc_head.base[k]) +
               d->hc_eps;
    }
    cpu_weigh_streams(f, m, n, !d->exact, h);
    cpu_rms_norm(h, run->g->norm, n, d->rms_eps, !d->exact, h);
}

void cpu_head(struct ops_device *dev, const struct ops_globals *globals, const float *streams,
              const uint32_t *which, uint32_t n, float *ret_logits, size_t stride)
{
    struct head_run run = {dev, globals, streams, which};
    cpu_threads_run(dev->threads, n, (uint64_t)n * dev->d.hidden * 16, head_row, &run);
    struct cpu_job job = {.matrix = &globals->head,
                          .x = dev->head_x,
                          .x_stride = dev->d.hidden,
                          .n_rows = n,
                          .y = ret_logits,
                          .y_stride = stride};
    cpu_gemm(dev->threads, &job, 1);
}
