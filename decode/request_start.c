/* What is read from a Start: checked against this node before anything is kept of it. */
#include "decode/request_internal.h"

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
