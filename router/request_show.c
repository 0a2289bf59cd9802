/*
 * Requests for people and machines: /debug/requests and the counters. No text of a client is in
 * either.
 */
#include <inttypes.h>
#include <stdio.h>

#include "router/request_internal.h"

static const char *leg_state_name(const struct leg *leg)
{
    if (leg->state == LEG_WAITING) {
        return "waiting";
    }
    if (leg->has_first) {
        return "generating";
    }
    return leg->admitted ? "admitted" : "started";
}

static void write_leg(struct json_writer *w, const struct leg *leg)
{
    const struct request *request = leg->request;
    char id[17];
    uint64_t n_tokens = 0;
    snprintf(id, sizeof(id), "%016" PRIx64, leg->id);
    for (unsigned i = 0; i < leg->n_choices; i++) {
        n_tokens += request->choices[leg->first_choice + i].n_ids;
    }
    json_begin_object(w);
    json_pair_string(w, "id", id);
    json_pair_uint(w, "attempt", leg->attempt);
    json_pair_string(w, "state", leg_state_name(leg));
    json_pair_string(w, "decode", leg->node ? leg->node->ref.id : NULL);
    json_pair_string(w, "prefill",
                     !leg->node           ? NULL
                     : leg->prefill.id[0] ? leg->prefill.id
                                          : "local");
    json_pair_uint(w, "samples", leg->n_choices);
    json_pair_uint(w, "prompt_tokens", request->intake->prompts[leg->prompt_i].n);
    json_pair_uint(w, "tokens", n_tokens);
    json_pair_uint(w, "credit", leg->node ? leg->credit - leg->received : 0);
    json_pair_uint(w, "failed_attempts", leg->n_attempts);
    json_end_object(w);
}

void requests_write_json(struct requests *requests, struct json_writer *w)
{
    uint64_t now_ns = loop_now_ns();
    json_begin_array(w);
    list_for_each(at, &requests->live)
    {
        struct request *request = list_entry(at, struct request, in_requests);
        char id[17];
        snprintf(id, sizeof(id), "%016" PRIx64, request->id);
        json_begin_object(w);
        json_pair_string(w, "id", id);
        json_pair_string(w, "label", httpd_request_label(request->http));
        json_pair_string(w, "kind", request->is_chat ? "chat" : "completions");
        json_pair_bool(w, "stream", request->is_stream);
        json_pair_real(w, "age_s", (double)(now_ns - request->start_ns) * 1e-9);
        json_pair_uint(w, "choices", request->n_choices);
        json_pair_uint(w, "choices_finished", request->n_finished);
        json_key(w, "legs");
        json_begin_array(w);
        list_for_each(leg, &request->legs)
        {
            write_leg(w, list_entry(leg, struct leg, in_request));
        }
        json_end_array(w);
        json_end_object(w);
    }
    json_end_array(w);
}

/* ---- counters ---- */

static double live(void *cookie)
{
    return (double)((struct requests *)cookie)->n_live;
}

static double running(void *cookie)
{
    return (double)hmap_n(((struct requests *)cookie)->legs);
}

void requests_metrics_register(struct requests *requests, struct metrics *metrics)
{
    struct {
        struct metric_counter **counter;
        const char *name, *help;
    } rows[] = {
        {&requests->count.begun, "baton_requests_total", "Requests that were well formed."},
        {&requests->count.finished, "baton_requests_finished_total", "Requests answered whole."},
        {&requests->count.failed, "baton_requests_failed_total",
         "Requests that ended with an error after they were well formed."},
        {&requests->count.cancelled, "baton_requests_cancelled_total",
         "Requests whose client left (499)."},
        {&requests->count.refused, "baton_requests_refused_total",
         "Requests refused because no node could take them, or all queues were full."},
        {&requests->count.retried, "baton_attempts_retried_total",
         "Attempts that failed and were followed by another."},
        {&requests->count.failed_over, "baton_failovers_total",
         "Choices that went on elsewhere after they had tokens."},
        {&requests->count.preempted, "baton_preemptions_total",
         "Attempts ended by a node whose pages ran short, and run again."},
        {&requests->count.stray, "baton_stray_messages_total",
         "Messages of attempts that are over."},
        {&requests->count.tokens_in, "baton_prompt_tokens_total", "Tokens of prompts."},
        {&requests->count.tokens_out, "baton_generated_tokens_total", "Tokens from nodes."},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        *rows[i].counter = metrics_counter(metrics, rows[i].name, rows[i].help, METRIC_NO_LABELS);
    }
    requests->count.first_s = metrics_histogram(
        metrics, "baton_first_token_seconds", "From the request's head to its first token.",
        metrics_seconds_bounds, metrics_seconds_n_bounds, METRIC_NO_LABELS);
    requests->count.gap_s = metrics_histogram(
        metrics, "baton_token_gap_seconds", "Time between two tokens of a choice.",
        metrics_seconds_bounds, metrics_seconds_n_bounds, METRIC_NO_LABELS);
    requests->count.all_s = metrics_histogram(
        metrics, "baton_request_seconds", "From the request's head to the end of its answer.",
        metrics_seconds_bounds, metrics_seconds_n_bounds, METRIC_NO_LABELS);
    metrics_gauge_call(metrics, "baton_requests_live", "Requests not answered whole yet.",
                       METRIC_NO_LABELS, live, requests);
    metrics_gauge_call(metrics, "baton_legs_running", "Attempts that run on decode nodes.",
                       METRIC_NO_LABELS, running, requests);
}
