/* Manifold-constrained hyper-connections: four residual streams, mixed by a doubly stochastic
 * matrix that each token makes for itself (model.md has the equations; the first index of the
 * matrix is the source stream).
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { H = OPS_HC };

/* Each column (or row) of c becomes itself over its sum plus eps. */
static void normalise(float c[H][H], float eps, bool columns)
{
    for (int a = 0; a < H; a++) {
        float sum = 0.0f;
        for (int b = 0; b < H; b++) {
            sum += columns ? c[b][a] : c[a][b];
        }
        for (int b = 0; b < H; b++) {
            float *x = columns ? &c[b][a] : &c[a][b];
            *x /= sum + eps;
        }
    }
}

void cpu_mhc_split(const float *m, const float *scale, const float *base, uint32_t iters, float eps,
                   float *ret_pre, float *ret_post, float *ret_comb)
{
    for (int k = 0; k < H; k++) {
        ret_pre[k] = cpu_sigmoid(m[k] * scale[0] + base[k]) + eps;
        ret_post[k] = 2.0f * cpu_sigmoid(m[H + k] * scale[1] + base[H + k]);
    }
    float c[H][H];
    for (int j = 0; j < H; j++) {
        float most = -INFINITY, sum = 0.0f;
        for (int k = 0; k < H; k++) {
            int i = 2 * H + H * j + k;
            c[j][k] = m[i] * scale[2] + base[i];
            most = c[j][k] > most ? c[j][k] : most;
        }
        for (int k = 0; k < H; k++) {
            c[j][k] = cpu_exp(c[j][k] - most);
            sum += c[j][k];
        }
        for (int k = 0; k < H; k++) {
            c[j][k] = c[j][k] / sum + eps;
        }
    }
    normalise(c, eps, true);
    for (uint32_t i = 1; i < iters; i++) {
        normalise(c, eps, false);
        normalise(c, eps, true);
    }
    memcpy(ret_comb, c, sizeof(c));
}

void cpu_weigh_streams(const float *streams, const float *w, size_t n, bool round, float *y)
{
    for (size_t i = 0; i < n; i++) {
        float sum = w[0] * streams[i];
        for (size_t k = 1; k < H; k++) {
            sum += w[k] * streams[k * n + i];
        }
        y[i] = round ? bf16_round(sum) : sum;
    }
}

struct mhc_run {
    struct ops_device *dev;
    const struct ops_hc *hc;
    const float *norm, *streams, *y, *mix_in;
    float *x, *mix, *streams_out;
};

static void pre_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct mhc_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    size_t n = d->hidden;
    const float *f = run->streams + (size_t)r * H * n;
    float *mix = run->mix + (size_t)r * OPS_HC_OUT, m[OPS_HC_OUT], pre[H], *u = run->x + r * n;
    float root = sqrtf(cpu_sum_squares(f, H * n) / (float)(H * n) + d->rms_eps);
    for (int i = 0; i < OPS_HC_OUT; i++) {
        m[i] = mix[i] / root;
    }
    cpu_mhc_split(m, run->hc->scale, run->hc->base, d->hc_iters, d->hc_eps, pre, mix, mix + H);
    cpu_weigh_streams(f, pre, n, !d->exact, u);
    cpu_rms_norm(u, run->norm, n, d->rms_eps, !d->exact, u);
}

void cpu_mhc_pre(struct ops_device *dev, const struct ops_rows *rows, const struct ops_hc *hc,
                 const float *norm, const float *streams, float *ret_x, float *ret_mix)
{
    size_t wide = (size_t)H * dev->d.hidden;
    struct cpu_job job = {.matrix = &hc->fn,
                          .x = streams,
                          .x_stride = wide,
                          .n_rows = rows->n_rows,
                          .y = ret_mix,
                          .y_stride = OPS_HC_OUT};
    cpu_gemm(dev->threads, &job, 1);
    struct mhc_run run = {
        .dev = dev, .hc = hc, .norm = norm, .streams = streams, .x = ret_x, .mix = ret_mix};
    cpu_threads_run(dev->threads, rows->n_rows, rows->n_rows * wide, pre_row, &run);
}

static void post_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct mhc_run *run = cookie;
    size_t n = run->dev->d.hidden;
    const float *y = run->y + (size_t)r * n, *post = run->mix_in + (size_t)r * OPS_HC_OUT;
    const float *comb = post + H;
    float *x = run->streams_out + (size_t)r * H * n;
    bool round = !run->dev->d.exact;
    for (size_t i = 0; i < n; i++) {
        float in[H], out[H];
        for (size_t j = 0; j < H; j++) {
            in[j] = x[j * n + i];
        }
        for (size_t k = 0; k < H; k++) {
            float sum = comb[k] * in[0];
            for (size_t j = 1; j < H; j++) {
                sum += comb[H * j + k] * in[j];
            }
            out[k] = post[k] * y[i] + sum;
        }
        for (size_t k = 0; k < H; k++) {
            x[k * n + i] = round ? bf16_round(out[k]) : out[k];
        }
    }
}

void cpu_mhc_post(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                  const float *mix, float *streams)
{
    struct mhc_run run = {.dev = dev, .y = y, .mix_in = mix, .streams_out = streams};
    cpu_threads_run(dev->threads, rows->n_rows, (uint64_t)rows->n_rows * dev->d.hidden * H * H,
                    post_row, &run);
}
