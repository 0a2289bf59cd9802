/* What is read from a Start: checked against this node before anything is kept of it. */
#include "decode/request_internal.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/mem.h"

const char *request_start_wrong(const struct requests *requests,
                                const Baton__ToDecode__Start *start)
{
    uint32_t vocab_size = engine_info(requests->options.engine)->vocab_size;
    if (start->n_ids_total == 0 || start->n_ids > start->n_ids_total ||
        start->n_generated >= start->n_ids_total) {
        return "the numbers of ids contradict each other";
    }
    if (!wire_ids_fit(start->ids, start->n_ids, vocab_size)) {
        return "a token id is outside the vocabulary";
    }
    return wire_sampling_wrong(start->sampling, vocab_size);
}

/* The prompt's full pages, which samples share, and for each sample one to write to: with less
 * nothing can be generated. */
static uint64_t pages_at_least(const struct engine *engine, uint32_t n_ids, uint32_t n_samples)
{
    return (uint64_t)n_ids / engine_info(engine)->page_tokens + n_samples;
}

/* Pages for the prompt, and a page of headroom for each sample to generate into; or as many as the
 * pool has, where that is enough to generate at all. */
uint32_t request_pages_needed(const struct request *request)
{
    const struct engine *engine = request->requests->options.engine;
    uint32_t pages = engine_pages_for(engine, request->n_ids) + request->n_samples;
    return pages <= engine_info(engine)->n_pages
               ? pages
               : (uint32_t)pages_at_least(engine, request->n_ids, request->n_samples);
}

bool request_start_fits(const struct requests *requests, const Baton__ToDecode__Start *start,
                        char *ret_text, size_t text_bytes)
{
    const struct engine_info *info = engine_info(requests->options.engine);
    uint64_t pages =
        pages_at_least(requests->options.engine, start->n_ids_total, start->sampling->n);
    if (start->n_ids_total < info->max_context_tokens && pages <= info->n_pages &&
        start->sampling->n <= info->max_sequences) {
        return true;
    }
    snprintf(ret_text, text_bytes,
             "%" PRIu32 " tokens in %" PRIu32 " samples; this node takes %" PRIu32
             " tokens, %" PRIu32 " pages of %" PRIu32 " and %" PRIu32 " sequences",
             start->n_ids_total, start->sampling->n, info->max_context_tokens, info->n_pages,
             info->page_tokens, info->max_sequences);
    return false;
}

/* The Sampling itself is kept as well: a Run hands it on. */
void request_sampling_copy(struct request *request, const Baton__Sampling *s)
{
    request->wire = *s;
    request->wire_biases = mem_array(s->n_logit_bias + 1, sizeof(*request->wire_biases));
    request->wire_bias_list = mem_array(s->n_logit_bias + 1, sizeof(*request->wire_bias_list));
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        request->wire_biases[i] = *s->logit_bias[i];
        request->wire_bias_list[i] = &request->wire_biases[i];
    }
    request->wire.logit_bias = request->wire_bias_list;
    request->wire.stop_token_ids = mem_array(s->n_stop_token_ids + 1, sizeof(uint32_t));
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        request->wire.stop_token_ids[i] = s->stop_token_ids[i];
    }
    wire_sampling_read(&request->draws, s, engine_info(request->requests->options.engine)->eos_id);
    request->n_samples = s->n;
    for (uint32_t i = 0; i < s->n; i++) {
        struct sample *sample = &request->samples[i];
        list_init(&sample->dirty);
        sample->request = request;
        sample->index = i;
        sample->n_generated = request->n_generated;
        sample->n_told = request->n_generated;
        sample->credit = request->credit;
        sample->sampling = wire_sampling_of(&request->draws, i);
    }
}
