/* See wire.h. Both daemons draw with the same numbers, so there is one place that reads them: a
 * sample that prefill draws first and decode goes on with can't be read in two ways.
 */
#include "node/wire.h"

#include "engine/sampler.h"

bool wire_ids_fit(const uint32_t *ids, size_t n, uint32_t vocab_size)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= vocab_size) {
            return false;
        }
    }
    return true;
}

const char *wire_sampling_wrong(const Baton__Sampling *s, uint32_t vocab_size)
{
    if (!s) {
        return "no sampling";
    }
    if (s->n == 0 || s->n > WIRE_MAX_SAMPLES || s->n_top_logprobs > ENGINE_MAX_LOGPROBS ||
        s->n_stop_token_ids > WIRE_MAX_STOP_IDS || s->n_logit_bias > WIRE_MAX_BIASES ||
        s->max_tokens == 0) {
        return "sampling is out of range";
    }
    if (!wire_ids_fit(s->stop_token_ids, s->n_stop_token_ids, vocab_size)) {
        return "a stop token id is outside the vocabulary";
    }
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        if (s->logit_bias[i]->id >= vocab_size) {
            return "a logit bias is outside the vocabulary";
        }
    }
    return NULL;
}

void wire_sampling_read(struct wire_sampling *ret, const Baton__Sampling *s, uint32_t eos_id)
{
    uint32_t n_banned = 0;
    ret->biases = mem_array(s->n_logit_bias + 1, sizeof(*ret->biases));
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        ret->biases[i] = (struct engine_bias){s->logit_bias[i]->id, s->logit_bias[i]->bias};
    }
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        ret->banned[n_banned++] = s->stop_token_ids[i];
    }
    ret->n_stop_ids = n_banned;
    if (!s->ignore_eos) {
        ret->banned[n_banned++] = eos_id;
    }
    ret->seed = s->seed;
    ret->sampling = (struct engine_sampling){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .top_k = s->top_k,
        .presence_penalty = s->presence_penalty,
        .frequency_penalty = s->frequency_penalty,
        .repetition_penalty = s->repetition_penalty,
        .n_logit_bias = (uint32_t)s->n_logit_bias,
        .logit_bias = ret->biases,
        .seed = s->seed,
        .n_banned = n_banned,
        .banned = ret->banned,
        .min_tokens = s->min_tokens,
        .want_logprobs = s->logprobs,
        .n_top_logprobs = s->n_top_logprobs,
    };
}

void wire_sampling_fini(struct wire_sampling *wire)
{
    mem_free(wire->biases);
    wire->biases = NULL;
}

struct engine_sampling wire_sampling_of(const struct wire_sampling *wire, uint32_t sample_i)
{
    struct engine_sampling sampling = wire->sampling;
    sampling.seed = sampler_seed(wire->seed, sample_i);
    return sampling;
}

Baton__TokenLogprobs *wire_logprobs_make(const struct engine_draw *draw, struct arena *arena)
{
    Baton__TokenLogprobs *logprobs = arena_alloc(arena, sizeof(*logprobs));
    Baton__Logprob *entries = arena_alloc(arena, (draw->n_top + 1) * sizeof(*entries));
    baton__token_logprobs__init(logprobs);
    logprobs->token = &entries[0];
    logprobs->n_top = draw->n_top;
    logprobs->top = arena_alloc(arena, (draw->n_top + 1) * sizeof(*logprobs->top));
    for (uint32_t k = 0; k <= draw->n_top; k++) {
        baton__logprob__init(&entries[k]);
        entries[k].id = k ? draw->top[k - 1].id : draw->id;
        entries[k].logprob = k ? draw->top[k - 1].logprob : draw->logprob;
        if (k) {
            logprobs->top[k - 1] = &entries[k];
        }
    }
    return logprobs;
}

bool wire_logprobs_read(const Baton__TokenLogprobs *logprobs, uint32_t vocab_size,
                        struct engine_draw *draw)
{
    if (!logprobs->token) {
        return false;
    }
    draw->logprob = logprobs->token->logprob;
    draw->n_top = 0;
    for (size_t k = 0; k < logprobs->n_top && k < ENGINE_MAX_LOGPROBS; k++) {
        if (logprobs->top[k]->id >= vocab_size) {
            return false;
        }
        draw->top[draw->n_top].id = logprobs->top[k]->id;
        draw->top[draw->n_top++].logprob = logprobs->top[k]->logprob;
    }
    return true;
}
