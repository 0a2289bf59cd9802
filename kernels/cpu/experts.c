/* Routed and shared experts.
 *
 * Rows are gathered by expert (a "lane" is one row at one expert; the shared expert's lanes come
 * last), so an expert's weights are read once a call. A row's sum runs over its experts in
 * ascending id and then the shared one, whoever else was in the call.
 */
#include <string.h>

#include "kernels/cpu/cpu.h"

struct experts_run {
    struct ops_device *dev;
    const struct ops_rows *rows;
    const struct ops_layer *layer;
    const float *x;
    uint32_t n_lanes; /* of routed experts */
    bool quant_hidden;
    float *y;
};

/* Fills dev->lane_row, lane_weight and row_lanes; ret_first[e - expert_first] is the first lane of
 * expert e. */
static uint32_t sort_lanes(struct ops_device *dev, uint32_t n_rows, const uint32_t *experts,
                           const float *weights, uint32_t *ret_first)
{
    const struct ops_dims *d = &dev->d;
    uint32_t n_used = d->n_experts_used, n_own = d->expert_end - d->expert_first;
    memset(ret_first, 0, (n_own + 1) * sizeof(*ret_first));
    for (uint32_t i = 0; i < n_rows * n_used; i++) {
        if (experts[i] >= d->expert_first && experts[i] < d->expert_end) {
            ret_first[experts[i] - d->expert_first + 1]++;
        }
    }
    for (uint32_t e = 0; e < n_own; e++) {
        ret_first[e + 1] += ret_first[e];
    }
    /* row_lanes: n_used + 1 words a row, a count and then its lanes. Experts in the outer loop make
     * them ascend by expert. */
    for (uint32_t r = 0; r < n_rows; r++) {
        dev->row_lanes[r * (n_used + 1)] = 0;
    }
    for (uint32_t e = 0; e < n_own; e++) {
        uint32_t lane = ret_first[e];
        for (uint32_t i = 0; lane < ret_first[e + 1] && i < n_rows * n_used; i++) {
            if (experts[i] == e + d->expert_first) {
                uint32_t *of_row = dev->row_lanes + i / n_used * (n_used + 1);
                dev->lane_row[lane] = i / n_used;
                dev->lane_weight[lane] = weights[i];
                of_row[++of_row[0]] = lane++;
            }
        }
    }
    return ret_first[n_own];
}

static void gather_lane(void *cookie, uint32_t lane, uint32_t thread_i)
{
    struct experts_run *run = cookie;
    size_t n = run->dev->d.hidden;
    uint32_t row = lane < run->n_lanes ? run->dev->lane_row[lane] : lane - run->n_lanes;
    const struct ops_matrix *w1 = lane < run->n_lanes
                                      ? &run->layer->experts[run->dev->d.expert_first].w1
                                      : &run->layer->shared.w1;
    float *to = run->dev->lane_x + lane * n;
    if (cpu_wants_quant(run->dev, w1)) {
        cpu_quant8(run->x + row * n, n, FORMATS_INPUT_GROUP, to);
    } else {
        memcpy(to, run->x + row * n, n * sizeof(float));
    }
}

/* silu(a) b, clamped, times the routing weight: before w2, and so before its quantiser. */
static void gate_lane(void *cookie, uint32_t lane, uint32_t thread_i)
{
    struct experts_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    bool routed = lane < run->n_lanes;
    float *a = run->dev->lane_a + (size_t)lane * d->expert_width;
    const float *b = run->dev->lane_b + (size_t)lane * d->expert_width;
    float weight = routed ? run->dev->lane_weight[lane] : 1.0f, limit = d->swiglu_limit;
    for (uint32_t i = 0; i < d->expert_width; i++) {
        float gate = a[i], up = b[i];
        if (limit > 0.0f) {
            gate = gate > limit ? limit : gate;
            up = up > limit ? limit : (up < -limit ? -limit : up);
        }
        float h = gate * cpu_sigmoid(gate) * up * weight;
        a[i] = d->exact ? h : bf16_round(h);
    }
    const struct ops_matrix *w2 =
        routed ? &run->layer->experts[d->expert_first].w2 : &run->layer->shared.w2;
    if (cpu_wants_quant(run->dev, w2)) {
        cpu_quant8(a, d->expert_width, FORMATS_INPUT_GROUP, a);
    }
}

static void sum_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct experts_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    const uint32_t *lanes = run->dev->row_lanes + (size_t)r * (d->n_experts_used + 1);
    size_t n = d->hidden;
    float *y = run->y + r * n;
    memset(y, 0, n * sizeof(float));
    for (uint32_t k = 1; k <= lanes[0] + d->has_shared; k++) {
        uint32_t lane = k <= lanes[0] ? lanes[k] : run->n_lanes + r;
        const float *from = run->dev->lane_y + lane * n;
        for (size_t i = 0; i < n; i++) {
            y[i] += from[i];
        }
    }
    if (!d->exact && !d->is_partial) {
        cpu_round_row(y, n);
    }
}

static struct cpu_job lane_job(const struct ops_device *dev, const struct ops_matrix *matrix,
                               uint32_t first, uint32_t n, const float *x, float *y)
{
    return (struct cpu_job){.matrix = matrix,
                            .x = x + (size_t)first * matrix->cols,
                            .x_stride = matrix->cols,
                            .n_rows = n,
                            .y = y + (size_t)first * matrix->rows,
                            .y_stride = matrix->rows,
                            .round = !dev->d.exact};
}

void cpu_experts(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, const uint32_t *experts, const float *weights, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    uint32_t n_own = d->expert_end - d->expert_first, *first = dev->lane_first, n = 0;
    struct experts_run run = {.dev = dev, .rows = rows, .layer = layer, .x = x, .y = ret_y};
    run.n_lanes = sort_lanes(dev, rows->n_rows, experts, weights, first);
    uint32_t n_all = run.n_lanes + (d->has_shared ? rows->n_rows : 0);
    cpu_threads_run(dev->threads, n_all, (uint64_t)n_all * d->hidden * 4, gather_lane, &run);
    for (uint32_t e = 0; e < n_own; e++) {
        const struct ops_expert *own = &layer->experts[d->expert_first + e];
        if (first[e + 1] > first[e]) {
            uint32_t m = first[e + 1] - first[e];
            dev->jobs[n++] = lane_job(dev, &own->w1, first[e], m, dev->lane_x, dev->lane_a);
            dev->jobs[n++] = lane_job(dev, &own->w3, first[e], m, dev->lane_x, dev->lane_b);
        }
    }
    if (d->has_shared) {
        dev->jobs[n++] =
            lane_job(dev, &layer->shared.w1, run.n_lanes, rows->n_rows, dev->lane_x, dev->lane_a);
        dev->jobs[n++] =
            lane_job(dev, &layer->shared.w3, run.n_lanes, rows->n_rows, dev->lane_x, dev->lane_b);
    }
    cpu_gemm(dev->threads, dev->jobs, n);
    cpu_threads_run(dev->threads, n_all, (uint64_t)n_all * d->expert_width * 32, gate_lane, &run);
    n = 0;
    for (uint32_t e = 0; e < n_own; e++) {
        if (first[e + 1] > first[e]) {
            dev->jobs[n++] = lane_job(dev, &layer->experts[d->expert_first + e].w2, first[e],
                                      first[e + 1] - first[e], dev->lane_a, dev->lane_y);
        }
    }
    if (d->has_shared) {
        dev->jobs[n++] =
            lane_job(dev, &layer->shared.w2, run.n_lanes, rows->n_rows, dev->lane_a, dev->lane_y);
    }
    cpu_gemm(dev->threads, dev->jobs, n);
    cpu_threads_run(dev->threads, rows->n_rows,
                    (uint64_t)rows->n_rows * d->hidden * (d->n_experts_used + 1), sum_row, &run);
}
