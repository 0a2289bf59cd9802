/*
 * What a failure means: another attempt, or which error the client is told.
 *
 * Nothing is ever taken back: a leg whose choices have tokens goes on from them. So the only bounds
 * are the number of attempts, two re-runs after preemption, and the time that a leg may look for a
 * node.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "router/request_internal.h"

enum {
    RETRY_MIN_MS = 10,
    RETRY_MAX_MS = 100,
    NODE_WAIT_MS = 5000, /* for a node to come, once the request has been with one */
    RETRY_AFTER_MAX_S = 60,
};

static unsigned jitter_ms(struct requests *requests)
{
    return RETRY_MIN_MS + (unsigned)(requests_random(requests) % (RETRY_MAX_MS - RETRY_MIN_MS));
}

static void note_tried(struct leg *leg, const struct node *node)
{
    if (!leg->history) {
        leg->history = mem_zalloc(sizeof(*leg->history));
    }
    struct leg_history *history = leg->history;
    struct policy_tried *tried = &history->tried[history->n_tried++ % POLICY_MAX_TRIED];
    tried->decode = node->ref;
    tried->prefill = leg->prefill;
}

static void note_full(struct leg *leg, const struct node *node)
{
    if (!leg->history) {
        leg->history = mem_zalloc(sizeof(*leg->history));
    }
    struct leg_history *history = leg->history;
    if (history->n_full < POLICY_MAX_TRIED) {
        history->full[history->n_full++] = node->ref;
    }
}

static enum policy_outcome outcome_of(Baton__FailCode code)
{
    switch (code) {
    case BATON__FAIL_CODE__FAIL_QUEUE_FULL:
        return POLICY_QUEUE_FULL;
    case BATON__FAIL_CODE__FAIL_PEER_REFUSED:
    case BATON__FAIL_CODE__FAIL_PAIR_NOT_READY:
    case BATON__FAIL_CODE__FAIL_STALLED:
    case BATON__FAIL_CODE__FAIL_CHECKSUM:
    case BATON__FAIL_CODE__FAIL_TILING:
        return POLICY_PAIR_FAILED;
    case BATON__FAIL_CODE__FAIL_PEER_LOST: /* of a prefill node: it shuns itself by being gone */
    case BATON__FAIL_CODE__FAIL_INVALID:
    case BATON__FAIL_CODE__FAIL_TOO_LONG:
    case BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE:
    case BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL:
    case BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER:
    case BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION:
    case BATON__FAIL_CODE__FAIL_PREEMPTED:
    case BATON__FAIL_CODE__FAIL_CANCELLED:
        return POLICY_CANCELLED;
    default:
        return POLICY_DECODE_FAILED;
    }
}

/* Codes that end the request whatever else might be tried; false: it may go on. */
static bool is_final(Baton__FailCode code, enum api_code *ret_code)
{
    switch (code) {
    case BATON__FAIL_CODE__FAIL_INVALID:
        *ret_code = API_CODE_INVALID_VALUE;
        return true;
    case BATON__FAIL_CODE__FAIL_TOO_LONG:
        *ret_code = API_CODE_CONTEXT_LENGTH_EXCEEDED;
        return true;
    case BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE:
        *ret_code = API_CODE_QUEUE_TIMEOUT;
        return true;
    case BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL:
        *ret_code = API_CODE_PREFILL_TIMEOUT;
        return true;
    case BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER:
        *ret_code = API_CODE_TRANSFER_TIMEOUT;
        return true;
    case BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION:
        *ret_code = API_CODE_GENERATION_TIMEOUT;
        return true;
    default:
        return false;
    }
}

static bool end_with(struct leg *leg, enum api_code code, const char *format, ...)
    PRINTF_LIKE(3, 4);

/* Ends the whole request; always false, for the caller to return. */
static bool end_with(struct leg *leg, enum api_code code, const char *format, ...)
{
    struct api_error error;
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    api_error_set(&error, code, NULL, "%s", text);
    request_fail(leg->request, &error);
    return false;
}

static bool has_tokens(const struct leg *leg)
{
    const struct request *request = leg->request;
    for (unsigned i = 0; i < leg->n_choices; i++) {
        const struct choice *choice = &request->choices[leg->first_choice + i];
        if (choice->n_ids || choice->finished) {
            return true;
        }
    }
    return false;
}

/* A choice that has all its tokens and whose end was lost with the node. */
static bool choice_is_whole(const struct leg *leg, const struct choice *choice, bool *ret_was_cut)
{
    const struct intake *intake = leg->request->intake;
    size_t n_prompt = intake->prompts[leg->prompt_i].n;
    if (choice->saw_end) {
        *ret_was_cut = false;
        return true;
    }
    if (choice->n_ids >= api_max_tokens(intake->request, &intake->context, n_prompt)) {
        *ret_was_cut = true;
        return true;
    }
    return false;
}

/* Goes on with each unfinished choice as a leg of its own; this leg is then gone. */
static void leg_split(struct leg *leg, unsigned delay_ms)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    for (unsigned i = 0; i < leg->n_choices; i++) {
        struct choice *choice = &request->choices[leg->first_choice + i];
        bool was_cut;
        if (choice->finished) {
            continue;
        }
        if (choice_is_whole(leg, choice, &was_cut)) {
            choice_ended(choice, was_cut);
            continue;
        }
        struct leg *part = leg_create(request, leg->prompt_i, leg->first_choice + i, 1);
        part->n_attempts = leg->n_attempts;
        part->n_preempted = leg->n_preempted;
        part->front = leg->front;
        part->waiting_ns = leg->waiting_ns;
        part->prefill = leg->prefill;
        if (leg->history) {
            part->history = mem_dup(leg->history, sizeof(*leg->history));
        }
        metric_counter_add(requests->count.failed_over, choice->n_ids > 0);
        leg_start_later(part, delay_ms);
    }
    leg_free(leg);
    /* Choices that were whole may have been the last: the flush completes the request. */
    request_dirty(request);
}

static void leg_again(struct leg *leg, unsigned delay_ms)
{
    metric_counter_add(leg->request->requests->count.retried, 1);
    if (has_tokens(leg)) {
        leg_split(leg, delay_ms);
    } else {
        leg_start_later(leg, delay_ms);
    }
}

bool leg_failed(struct leg *leg, Baton__FailCode code, const char *where, bool retryable,
                const char *text)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    enum api_code final_code;
    char node_id[HELLO_NODE_ID_MAX + 1];
    snprintf(node_id, sizeof(node_id), "%s", where && where[0] ? where : leg->node->ref.id);
    log_at(code == BATON__FAIL_CODE__FAIL_QUEUE_FULL ? LOG_LEVEL_DEBUG : LOG_LEVEL_INFO, "request",
           "%016" PRIx64 ".%" PRIu32 " failed at %s: %d, %s", leg->id, leg->attempt, node_id,
           (int)code, text);
    if (code == BATON__FAIL_CODE__FAIL_QUEUE_FULL) {
        note_full(leg, leg->node);
        leg_detach(leg, POLICY_QUEUE_FULL);
        return leg_start(leg);
    }
    note_tried(leg, leg->node);
    leg_detach(leg, outcome_of(code));
    /* Limits differ between nodes: what is too long for one may fit another, or local prefill. */
    bool may_fit_elsewhere = code == BATON__FAIL_CODE__FAIL_TOO_LONG && retryable &&
                             leg->n_attempts + 1 < requests->options.n_attempts;
    if (is_final(code, &final_code) && !may_fit_elsewhere) {
        return end_with(leg, final_code, "%s: %s", node_id, text);
    }
    if (code == BATON__FAIL_CODE__FAIL_PREEMPTED && leg->n_preempted < REQUEST_MAX_PREEMPTED) {
        metric_counter_add(requests->count.preempted, 1);
        leg->n_preempted++;
        leg->front = true;
        leg_again(leg, RETRY_MIN_MS);
        return true;
    }
    if (!retryable) {
        return end_with(leg, API_CODE_INTERNAL_ERROR, "%s: %s", node_id, text);
    }
    if (++leg->n_attempts >= requests->options.n_attempts) {
        return end_with(leg, API_CODE_ATTEMPTS_EXHAUSTED, "%u attempts failed, the last at %s: %s",
                        leg->n_attempts, node_id, text);
    }
    leg_again(leg, jitter_ms(requests));
    return true;
}

static unsigned retry_after_s(uint64_t wait_ns)
{
    uint64_t s = (wait_ns + NS_PER_S - 1) / NS_PER_S;
    s = s < 1 ? 1 : s;
    return s < RETRY_AFTER_MAX_S ? (unsigned)s : RETRY_AFTER_MAX_S;
}

bool leg_refused(struct leg *leg, enum status status, uint64_t wait_ns)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    uint64_t now_ns = loop_now_ns();
    bool is_full = status == STATUS_EXHAUSTED;
    bool has_begun = request->first_ns || request->sse.started || request->n_legs > 1;
    request->retry_after_s = retry_after_s(wait_ns);
    if (!has_begun && is_full) {
        metric_counter_add(requests->count.refused, 1);
        return end_with(leg, API_CODE_QUEUE_FULL,
                        "the queue of every node is full; a place is likely in %u s",
                        request->retry_after_s);
    }
    if (!has_begun && leg->n_attempts == 0 && leg->n_preempted == 0) {
        metric_counter_add(requests->count.refused, 1);
        return end_with(leg, API_CODE_NO_READY_NODE,
                        "no decode node is ready, or none with a way to prefill; see /readyz");
    }
    if (!leg->waiting_ns) {
        leg->waiting_ns = now_ns;
    }
    uint64_t limit_ns = is_full ? requests->options.queue_timeout_ns : NODE_WAIT_MS * NS_PER_MS;
    if (limit_ns && now_ns - leg->waiting_ns > limit_ns) {
        return end_with(leg, is_full ? API_CODE_QUEUE_TIMEOUT : API_CODE_ATTEMPTS_EXHAUSTED,
                        is_full ? "every node's queue stayed full"
                                : "no other node was there to go on with the request");
    }
    if (leg->history) {
        leg->history->n_full = 0;
    }
    leg_start_later(leg, jitter_ms(requests));
    return true;
}
