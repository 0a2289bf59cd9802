/* Logits to tokens on the host.
 *
 * Owns scratch for one drawing at a time and keeps nothing between drawings. The one invariant: the
 * set of ids that survives the cuts is defined by the total order (probability descending, id
 * ascending), so it can't depend on how it was found; the draw then walks that set in ascending id
 * order. Greedy decoding (temperature 0) without penalties never sorts.
 *
 * Cost of a sampled draw is one pass for the maximum, one for exp, and a sort of the survivors of
 * top_k only when top_p or top_k is set: a few hundred microseconds at 129,280 ids.
 */
#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

struct sampler {
    uint32_t vocab_size;
    float *logits;    /* after bias, penalties, temperature; then weights */
    uint32_t *sorted; /* candidate ids */
    uint8_t *keep;
};

struct sampler *sampler_create(uint32_t vocab_size)
{
    struct sampler *sampler = mem_zalloc(sizeof(*sampler));
    sampler->vocab_size = vocab_size;
    sampler->logits = mem_array(vocab_size, sizeof(float));
    sampler->sorted = mem_array(vocab_size, sizeof(uint32_t));
    sampler->keep = mem_array(vocab_size, 1);
    return sampler;
}

void sampler_free(struct sampler *sampler)
{
    if (!sampler) {
        return;
    }
    mem_free(sampler->logits);
    mem_free(sampler->sorted);
    mem_free(sampler->keep);
    mem_free(sampler);
}

static uint64_t mix64(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

double sampler_uniform(uint64_t seed, uint64_t position)
{
    uint64_t z = mix64(mix64(seed + 0x9e3779b97f4a7c15u) + position * 0x9e3779b97f4a7c15u);
    return (double)(z >> 11) * 0x1.0p-53;
}

uint64_t sampler_seed(uint64_t seed, uint32_t sample_i)
{
    return sample_i == 0 ? seed : mix64(seed ^ (sample_i * 0xd1342543de82ef95u));
}

bool sampler_has_penalties(const struct engine_sampling *sampling)
{
    return sampling->presence_penalty != 0 || sampling->frequency_penalty != 0 ||
           (sampling->repetition_penalty != 1 && sampling->repetition_penalty != 0);
}

static uint32_t best_id(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return best;
}

/* Strict order: larger value first, then the lower id. */
static bool before(const float *values, uint32_t a, uint32_t b)
{
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

static void sift_down(const float *values, uint32_t *heap, uint32_t n, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) {
            return;
        }
        if (child + 1 < n && before(values, heap[child], heap[child + 1])) {
            child++;
        }
        if (before(values, heap[child], heap[at])) {
            return;
        }
        uint32_t held = heap[at];
        heap[at] = heap[child];
        heap[child] = held;
        at = child;
    }
}

/* The k ids that come first in the order, first one first, into `ids`: a heap whose root is the
 * last of those kept. */
static uint32_t top_ids(const float *values, uint32_t n, uint32_t k, uint32_t *ids)
{
    if (k > n) {
        k = n;
    }
    for (uint32_t i = 0; i < k; i++) {
        ids[i] = i;
    }
    for (uint32_t i = k / 2; i-- > 0;) {
        sift_down(values, ids, k, i);
    }
    for (uint32_t i = k; i < n; i++) {
        if (before(values, i, ids[0])) {
            ids[0] = i;
            sift_down(values, ids, k, 0);
        }
    }
    for (uint32_t left = k; left-- > 1;) {
        uint32_t held = ids[0];
        ids[0] = ids[left];
        ids[left] = held;
        sift_down(values, ids, left, 0);
    }
    return k;
}

static void raw_logprobs(const float *logits, uint32_t n, const struct engine_sampling *sampling,
                         uint32_t *scratch, struct engine_draw *draw)
{
    float top = logits[best_id(logits, n)];
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += exp((double)logits[i] - top);
    }
    double log_sum = log(sum) + top;
    draw->logprob = (float)(logits[draw->id] - log_sum);
    draw->n_top = top_ids(logits, n, sampling->n_top_logprobs, scratch);
    for (uint32_t i = 0; i < draw->n_top; i++) {
        draw->top[i].id = scratch[i];
        draw->top[i].logprob = (float)(logits[scratch[i]] - log_sum);
    }
}

static void apply_bias_and_penalties(float *logits, uint32_t n,
                                     const struct engine_sampling *sampling, const uint32_t *counts,
                                     uint32_t n_generated)
{
    for (uint32_t i = 0; i < sampling->n_logit_bias; i++) {
        if (sampling->logit_bias[i].id < n) {
            logits[sampling->logit_bias[i].id] += sampling->logit_bias[i].bias;
        }
    }
    if (n_generated < sampling->min_tokens) {
        for (uint32_t i = 0; i < sampling->n_banned; i++) {
            if (sampling->banned[i] < n) {
                logits[sampling->banned[i]] = -INFINITY;
            }
        }
    }
    if (!counts) {
        return;
    }
    float repeat = sampling->repetition_penalty == 0 ? 1 : sampling->repetition_penalty;
    for (uint32_t i = 0; i < n; i++) {
        if (!counts[i]) {
            continue;
        }
        logits[i] = logits[i] > 0 ? logits[i] / repeat : logits[i] * repeat;
        uint32_t generated = counts[i] & 0x7fffffff;
        if (generated) {
            logits[i] -=
                sampling->presence_penalty + sampling->frequency_penalty * (float)generated;
        }
    }
}

/* Cuts by top_k and top_p: marks survivors in keep, returns their number. `weights` are exp(logit -
 * max). */
static uint32_t cut_candidates(struct sampler *sampler, const struct engine_sampling *sampling)
{
    uint32_t n = sampler->vocab_size;
    uint32_t k =
        sampling->top_k > 0 && (uint32_t)sampling->top_k < n ? (uint32_t)sampling->top_k : n;
    const float *weights = sampler->logits;
    if (k == n && sampling->top_p >= 1) {
        memset(sampler->keep, 1, n);
        return n;
    }
    uint32_t n_sorted = top_ids(weights, n, k, sampler->sorted);
    double total = 0, sum = 0;
    for (uint32_t i = 0; i < n_sorted; i++) {
        total += weights[sampler->sorted[i]];
    }
    memset(sampler->keep, 0, n);
    uint32_t n_kept = 0;
    while (n_kept < n_sorted) {
        sampler->keep[sampler->sorted[n_kept]] = 1;
        sum += weights[sampler->sorted[n_kept]];
        n_kept++;
        if (sampling->top_p < 1 && sum >= (double)sampling->top_p * total) {
            break;
        }
    }
    return n_kept;
}

static uint32_t draw_sampled(struct sampler *sampler, const struct engine_sampling *sampling,
                             uint64_t position)
{
    uint32_t n = sampler->vocab_size;
    float *weights = sampler->logits;
    float top = weights[best_id(weights, n)];
    if (!isfinite(top)) {
        return best_id(weights, n);
    }
    for (uint32_t i = 0; i < n; i++) {
        weights[i] = expf((weights[i] - top) / sampling->temperature);
    }
    cut_candidates(sampler, sampling);
    double total = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < n; i++) {
        /* The best weight is exactly 1, so min_p compares with the value itself. */
        if (sampler->keep[i] && (weights[i] < sampling->min_p || weights[i] == 0)) {
            sampler->keep[i] = 0;
        }
        if (sampler->keep[i]) {
            total += weights[i];
            last = i;
        }
    }
    double target = sampler_uniform(sampling->seed, position) * total, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (sampler->keep[i]) {
            sum += weights[i];
            if (sum > target) {
                return i;
            }
        }
    }
    return last;
}

void sampler_draw(struct sampler *sampler, const float *logits,
                  const struct engine_sampling *sampling, const uint32_t *counts,
                  uint32_t n_generated, uint64_t position, struct engine_draw *ret_draw)
{
    uint32_t n = sampler->vocab_size;
    bool plain = !sampling->n_logit_bias && !counts &&
                 !(sampling->n_banned && n_generated < sampling->min_tokens);
    if (plain && sampling->temperature <= 0) {
        ret_draw->id = best_id(logits, n);
    } else {
        memcpy(sampler->logits, logits, (size_t)n * sizeof(float));
        apply_bias_and_penalties(sampler->logits, n, sampling, counts, n_generated);
        ret_draw->id = sampling->temperature <= 0 ? best_id(sampler->logits, n)
                                                  : draw_sampled(sampler, sampling, position);
    }
    ret_draw->n_top = 0;
    ret_draw->logprob = 0;
    if (sampling->want_logprobs) {
        raw_logprobs(logits, n, sampling, sampler->sorted, ret_draw);
    }
}
