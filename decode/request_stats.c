/* Numbers of the request machine, for Status and /metrics. */
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
