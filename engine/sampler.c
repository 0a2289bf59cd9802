/* Logits to tokens on the host: what a request asks for beyond kernels/sample.h, which draws.
 *
 * Owns scratch for one drawing at a time and keeps nothing between drawings. Greedy decoding
 * (temperature 0) without penalties never copies the logits.
 */
#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/sample.h"

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

double sampler_uniform(uint64_t seed, uint64_t position)
{
    return (double)sample_uniform(seed, position) * 0x1.0p-53;
}

uint64_t sampler_seed(uint64_t seed, uint32_t sample_i)
{
    return sample_i == 0 ? seed : sample_mix(seed ^ (sample_i * 0xd1342543de82ef95u));
}

bool sampler_has_penalties(const struct engine_sampling *sampling)
{
    return sampling->presence_penalty != 0 || sampling->frequency_penalty != 0 ||
           (sampling->repetition_penalty != 1 && sampling->repetition_penalty != 0);
}

static void raw_logprobs(const float *logits, uint32_t n, const struct engine_sampling *sampling,
                         uint32_t *scratch, struct engine_draw *draw)
{
    float top = logits[sample_best(logits, n)];
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += exp((double)logits[i] - top);
    }
    double log_sum = log(sum) + top;
    draw->logprob = (float)(logits[draw->id] - log_sum);
    draw->n_top = sample_top(logits, n, sampling->n_top_logprobs, scratch);
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

/* Whether it does more to the logits than kernels/sample.h does. */
static bool is_plain(const struct engine_sampling *sampling, uint32_t n_generated)
{
    return !sampling->n_logit_bias && !sampler_has_penalties(sampling) &&
           !(sampling->n_banned && n_generated < sampling->min_tokens);
}

bool sampler_can_be_there(const struct engine_sampling *sampling, uint32_t n_generated)
{
    return is_plain(sampling, n_generated) && !sampling->want_logprobs;
}

struct ops_draw sampler_there(const struct engine_sampling *sampling)
{
    return (struct ops_draw){.seed = sampling->seed,
                             .temperature = sampling->temperature,
                             .top_p = sampling->top_p,
                             .min_p = sampling->min_p,
                             .top_k = sampling->top_k,
                             .is_drawn = 1};
}

void sampler_draw(struct sampler *sampler, const float *logits,
                  const struct engine_sampling *sampling, const uint32_t *counts,
                  uint32_t n_generated, uint64_t position, struct engine_draw *ret_draw)
{
    uint32_t n = sampler->vocab_size;
    if (is_plain(sampling, n_generated) && sampling->temperature <= 0) {
        ret_draw->id = sample_best(logits, n);
    } else {
        struct ops_draw draw = sampler_there(sampling);
        memcpy(sampler->logits, logits, (size_t)n * sizeof(float));
        apply_bias_and_penalties(sampler->logits, n, sampling, counts, n_generated);
        ret_draw->id =
            sample_draw(sampler->logits, n, &draw, position, sampler->sorted, sampler->keep);
    }
    ret_draw->n_top = 0;
    ret_draw->logprob = 0;
    if (sampling->want_logprobs) {
        raw_logprobs(logits, n, sampling, sampler->sorted, ret_draw);
    }
}
