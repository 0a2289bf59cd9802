/* What is read from a Start: checked against this node before anything is kept of it. */
#include "decode/request_internal.h"

#include <string.h>

#include "base/mem.h"
#include "engine/sampler.h"

/* What is wrong with a Start, or NULL. */
const char *request_start_wrong(const struct requests *requests,
                                const Baton__ToDecode__Start *start)
{
    const struct engine_info *info = engine_info(requests->options.engine);
    const Baton__Sampling *s = start->sampling;
    if (!s) {
        return "no sampling";
    }
    if (start->n_ids_total == 0 || start->n_ids > start->n_ids_total ||
        start->n_generated >= start->n_ids_total) {
        return "the numbers of ids contradict each other";
    }
    if (s->n == 0 || s->n > REQUEST_MAX_SAMPLES || s->n_top_logprobs > ENGINE_MAX_LOGPROBS ||
        s->n_stop_token_ids > REQUEST_MAX_STOP_IDS || s->n_logit_bias > REQUEST_MAX_BIASES ||
        s->max_tokens == 0) {
        return "sampling is out of range";
    }
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        if (s->stop_token_ids[i] >= info->vocab_size) {
            return "a stop token id is outside the vocabulary";
        }
    }
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        if (s->logit_bias[i]->id >= info->vocab_size) {
            return "a logit bias is outside the vocabulary";
        }
    }
    for (size_t i = 0; i < start->n_ids; i++) {
        if (start->ids[i] >= info->vocab_size) {
            return "a token id is outside the vocabulary";
        }
    }
    return NULL;
}

void request_sampling_copy(struct request *request, const Baton__Sampling *s)
{
    const struct engine_info *info = engine_info(request->requests->options.engine);
    request->biases = mem_array(s->n_logit_bias ? s->n_logit_bias : 1, sizeof(*request->biases));
    request->wire = *s;
    request->wire_biases = mem_array(s->n_logit_bias + 1, sizeof(*request->wire_biases));
    request->wire_bias_list = mem_array(s->n_logit_bias + 1, sizeof(*request->wire_bias_list));
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        request->biases[i] = (struct engine_bias){s->logit_bias[i]->id, s->logit_bias[i]->bias};
        request->wire_biases[i] = *s->logit_bias[i];
        request->wire_bias_list[i] = &request->wire_biases[i];
    }
    request->wire.logit_bias = request->wire_bias_list;
    request->wire.stop_token_ids = mem_array(s->n_stop_token_ids + 1, sizeof(uint32_t));
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        request->banned[request->n_banned++] = s->stop_token_ids[i];
        request->wire.stop_token_ids[i] = s->stop_token_ids[i];
    }
    request->n_stop_ids = request->n_banned;
    request->ignore_eos = s->ignore_eos;
    if (!s->ignore_eos) {
        request->banned[request->n_banned++] = info->eos_id;
    }
    request->max_tokens = s->max_tokens;
    request->n_samples = s->n;
    for (uint32_t i = 0; i < s->n; i++) {
        struct sample *sample = &request->samples[i];
        list_init(&sample->dirty);
        sample->request = request;
        sample->index = i;
        sample->n_generated = request->n_generated;
        sample->n_told = request->n_generated;
        sample->credit = request->credit;
        sample->sampling = (struct engine_sampling){
            .temperature = s->temperature,
            .top_p = s->top_p,
            .min_p = s->min_p,
            .top_k = s->top_k,
            .presence_penalty = s->presence_penalty,
            .frequency_penalty = s->frequency_penalty,
            .repetition_penalty = s->repetition_penalty,
            .n_logit_bias = (uint32_t)s->n_logit_bias,
            .logit_bias = request->biases,
            .seed = sampler_seed(s->seed, i),
            .n_banned = request->n_banned,
            .banned = request->banned,
            .min_tokens = s->min_tokens,
            .want_logprobs = s->logprobs,
            .n_top_logprobs = s->n_top_logprobs,
        };
    }
}
