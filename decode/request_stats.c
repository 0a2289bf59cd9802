/* Numbers of the request machine, for Status and /metrics, and its listing. */
#include <inttypes.h>
#include <stdio.h>

#include "base/json.h"
#include "decode/request_internal.h"

uint32_t requests_n_live(const struct requests *requests)
{
    uint32_t n = 0;
    for (int s = 0; s < REQUEST_ENDED; s++) {
        n += requests->n_in_state[s];
    }
    return n;
}

void requests_stats(const struct requests *requests, struct requests_stats *ret_stats)
{
    *ret_stats = requests->stats;
    ret_stats->n_queued =
        requests->n_in_state[REQUEST_QUEUED] + requests->n_in_state[REQUEST_RECEIVING];
    ret_stats->n_transfers = requests->n_in_state[REQUEST_TRANSFER];
    ret_stats->n_opening = requests->n_in_state[REQUEST_OPENING];
    ret_stats->n_local = requests->n_in_state[REQUEST_LOCAL];
    ret_stats->n_running = requests->n_in_state[REQUEST_RUNNING];
    uint64_t now_ns = loop_now_ns();
    list_for_each(at, &requests->states[REQUEST_QUEUED])
    {
        const struct request *request = list_entry(at, struct request, in_state);
        uint64_t age_ns = now_ns - request->arrival_ns;
        ret_stats->queued_tokens += request->n_ids;
        if (age_ns > ret_stats->oldest_queued_ns) {
            ret_stats->oldest_queued_ns = age_ns;
        }
    }
    list_for_each(at, &requests->states[REQUEST_LOCAL])
    {
        const struct request *request = list_entry(at, struct request, in_state);
        ret_stats->queued_tokens += request->n_ids - request->prompt.prompt.n_done;
    }
}

static void request_write(const struct request *request, uint64_t now_ns, struct json_writer *w)
{
    char id[24];
    uint32_t n_tokens = 0;
    snprintf(id, sizeof(id), "%016" PRIx64, request->id);
    for (uint32_t i = 0; i < request->n_samples; i++) {
        n_tokens += request->samples[i].n_generated;
    }
    json_begin_object(w);
    json_pair_string(w, "id", id);
    json_pair_uint(w, "owner", request->id);
    json_pair_uint(w, "attempt", request->attempt);
    json_pair_string(w, "state", request_state_names[request->state]);
    json_pair_real(w, "age_seconds", (double)((now_ns - request->arrival_ns) / 1000000) / 1e3);
    json_pair_real(w, "state_age_seconds", (double)((now_ns - request->state_ns) / 1000000) / 1e3);
    json_pair_string(w, "reason",
                     !request->sink    ? "its router is gone"
                     : request->remote ? "prefill elsewhere"
                                       : "prefill here");
    json_pair_string(w, "prefill", request->prefill_id);
    json_pair_uint(w, "transfer", request->transfer ? handoff_transfer_id(request->transfer) : 0);
    json_pair_uint(w, "prompt_tokens", request->n_ids_total);
    json_pair_uint(w, "samples", request->n_samples);
    json_pair_uint(w, "tokens", n_tokens);
    json_end_object(w);
}

void requests_debug_json(const struct requests *requests, struct json_writer *w)
{
    uint64_t now_ns = loop_now_ns();
    for (int s = 0; s < N_REQUEST_STATES; s++) {
        list_for_each(at, &requests->states[s])
        {
            request_write(list_entry(at, struct request, in_state), now_ns, w);
        }
    }
}
