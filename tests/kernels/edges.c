/* See edges.h. Sums are off by at most 2^-22 of their products' sizes in either backend
 * (test_tensor prints 2^-23 and less), and the sizes of products of random signs add to about the
 * square root of their number times the sums themselves. */
#include "tests/kernels/edges.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"

enum { GROUP = FORMATS_INPUT_GROUP, N_NEAR = 3 };

struct sums {
    const struct ops_dims *d;
    float *gate, *up, *h; /* [expert_width]; h is not yet through the quantiser */
    double gate_off, up_off;
    float weight;
    bool quantises;
};

static void product(struct cpu_threads *threads, const struct ops_matrix *m, const float *x,
                    float *y)
{
    struct cpu_job job = {
        .matrix = m, .x = x, .x_stride = m->cols, .n_rows = 1, .y = y, .y_stride = m->rows};
    cpu_gemm(threads, &job, 1);
}

static double off_of(const float *y, uint32_t n, uint32_t n_products)
{
    double squares = 0;
    for (uint32_t i = 0; i < n; i++) {
        squares += (double)y[i] * (double)y[i];
    }
    return 0x1p-22 * sqrt((double)n_products * squares / n);
}

/* kernels/cpu/experts.c, gate_lane, of one value. */
static float gated(const struct sums *s, double gate_sum, double up_sum)
{
    float gate = bf16_round((float)gate_sum), up = bf16_round((float)up_sum);
    float limit = s->d->swiglu_limit;
    if (limit > 0.0f) {
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : (up < -limit ? -limit : up);
    }
    return bf16_round(gate * cpu_sigmoid(gate) * up * s->weight);
}

/* e[i..] of value i's group: how it changes where value i is h; false if it doesn't. */
static bool changes(const struct sums *s, uint32_t i, float h, float *ret_e)
{
    float values[GROUP], now[GROUP];
    const uint32_t first = i / GROUP * GROUP;
    const uint32_t n = s->d->expert_width - first < GROUP ? s->d->expert_width - first : GROUP;
    bool any = false;
    memcpy(values, s->h + first, n * sizeof(float));
    if (s->quantises) {
        cpu_quant8(values, n, GROUP, now);
    } else {
        memcpy(now, values, sizeof(now));
    }
    values[i - first] = h;
    if (s->quantises) {
        cpu_quant8(values, n, GROUP, values);
    }
    for (uint32_t k = 0; k < n; k++) {
        ret_e[first + k] = values[k] - now[k];
        any = any || ret_e[first + k] != 0.0f;
    }
    return any;
}

/* What each value that value i may as well be would change. */
static uint32_t add_edge(struct cpu_threads *threads, const struct sums *s,
                         const struct ops_matrix *w2, uint32_t i, float *e, float *column,
                         double *ret_off)
{
    float tried[N_NEAR * N_NEAR];
    uint32_t n_tried = 0;
    for (int g = -1; g <= 1; g++) {
        for (int u = -1; u <= 1; u++) {
            float h =
                gated(s, (double)s->gate[i] + g * s->gate_off, (double)s->up[i] + u * s->up_off);
            bool again = h == s->h[i];
            for (uint32_t k = 0; k < n_tried; k++) {
                again = again || tried[k] == h;
            }
            memset(e, 0, s->d->expert_width * sizeof(float));
            if (again || !changes(s, i, h, e)) {
                continue;
            }
            tried[n_tried++] = h;
            product(threads, w2, e, column);
            for (uint32_t k = 0; k < s->d->hidden; k++) {
                ret_off[k] += fabs((double)column[k]);
            }
        }
    }
    return n_tried > 0;
}

uint32_t edges_of_expert(const struct ops_dims *d, const struct ops_expert *expert, const float *x,
                         float weight, double *ret_off)
{
    struct cpu_threads *threads = cpu_threads_create(1);
    float *inputs = mem_array(d->hidden, sizeof(float));
    float *rooms = mem_array(4 * (size_t)d->expert_width + d->hidden, sizeof(float));
    struct sums s = {.d = d,
                     .gate = rooms,
                     .up = rooms + d->expert_width,
                     .h = rooms + 2 * (size_t)d->expert_width,
                     .weight = weight,
                     .quantises = expert->w2.quant_input};
    float *e = rooms + 3 * (size_t)d->expert_width, *column = e + d->expert_width;
    uint32_t n = 0;
    if (expert->w1.quant_input) {
        cpu_quant8(x, d->hidden, GROUP, inputs);
    } else {
        memcpy(inputs, x, d->hidden * sizeof(float));
    }
    product(threads, &expert->w1, inputs, s.gate);
    product(threads, &expert->w3, inputs, s.up);
    s.gate_off = off_of(s.gate, d->expert_width, d->hidden);
    s.up_off = off_of(s.up, d->expert_width, d->hidden);
    for (uint32_t i = 0; i < d->expert_width; i++) {
        s.h[i] = gated(&s, (double)s.gate[i], (double)s.up[i]);
    }
    for (uint32_t i = 0; i < d->expert_width; i++) {
        n += add_edge(threads, &s, &expert->w2, i, e, column, ret_off);
    }
    cpu_threads_free(threads);
    mem_free(inputs);
    mem_free(rooms);
    return n;
}
