/* The request machine of a decode node: see request.h for its states.
 *
 * Owns requests and their samples. Two rules carry the rest. First, a sequence is freed only when
 * nobody computes with it: rows and prompts that are in the unit in flight come back by event, and
 * the request waits for them in `ended`. Second, tokens are told in order and an end after the last
 * of them: everything leaves through flush_sink, which keeps what the link does not take.
 */
#include "decode/request.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/hmap.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/request_internal.h"

const char *const request_state_names[] = {"receiving", "queued",  "transfer", "opening",
                                           "local",     "running", "ended"};

static void admit_soon(struct requests *requests);
static void request_fail(struct request *request, Baton__FailCode code, const char *node,
                         bool retryable, const char *format, ...) PRINTF_LIKE(5, 6);

/* The one place where a request changes its state. */
void request_move(struct request *request, enum request_state state)
{
    struct requests *requests = request->requests;
    log_debug("request", "%016" PRIx64 ".%" PRIu32 ": %s -> %s", request->id, request->attempt,
              request_state_names[request->state], request_state_names[state]);
    if (list_linked(&request->in_state)) {
        list_remove(&request->in_state);
        requests->n_in_state[request->state]--;
    }
    request->state = state;
    request->state_ns = loop_now_ns();
    requests->n_in_state[state]++;
    if (state == REQUEST_QUEUED && request->front) {
        list_push_front(&requests->states[state], &request->in_state);
    } else {
        list_push_back(&requests->states[state], &request->in_state);
    }
}

/* ---- room ---- */

static void claim_drop(struct request *request)
{
    request->requests->claimed_pages -= request->claimed_pages;
    request->requests->claimed_slots -= request->claimed_slots;
    request->claimed_pages = request->claimed_slots = 0;
}

static bool claim_room(struct request *request)
{
    struct requests *requests = request->requests;
    uint32_t pages = request_pages_needed(request);
    if (engine_pages_free(requests->options.engine) < requests->claimed_pages + pages ||
        engine_slots_free(requests->options.engine) <
            requests->claimed_slots + request->n_samples) {
        return false;
    }
    enum status status = engine_seq_create(requests->options.engine, request->id, &request->seq);
    if (status) {
        return false;
    }
    status =
        engine_seq_history_set(request->seq, request->ids, request->n_ids, request->n_generated);
    if (status) {
        engine_seq_free(request->seq);
        request->seq = NULL;
        return false;
    }
    request->claimed_pages = pages;
    request->claimed_slots = request->n_samples - 1; /* the first is taken now */
    requests->claimed_pages += pages;
    requests->claimed_slots += request->claimed_slots;
    return true;
}

/* ---- ending ---- */

struct request_key {
    uint64_t id, attempt;
};

static struct request *find(struct request_sink *sink, uint64_t id, uint32_t attempt)
{
    struct request_key key = {id, attempt};
    struct request *request = hmap_get(sink->by_key, &key, sizeof(key));
    return request && request->state != REQUEST_ENDED ? request : NULL;
}

void request_sink_init(struct request_sink *sink)
{
    list_init(&sink->requests);
    list_init(&sink->dirty);
    sink->by_key = hmap_create();
    sink->full = false;
}

void request_sink_fini(struct request_sink *sink)
{
    hmap_free(sink->by_key);
}

static void sink_forget(struct request *request)
{
    struct request_key key = {request->id, request->attempt};
    if (request->sink) {
        if (hmap_get(request->sink->by_key, &key, sizeof(key)) == request) {
            hmap_remove(request->sink->by_key, &key, sizeof(key));
        }
        list_remove(&request->in_sink);
        request->sink = NULL;
    }
}

static void request_destroy(struct request *request)
{
    list_remove(&request->in_state);
    request->requests->n_in_state[request->state]--;
    sink_forget(request);
    for (uint32_t i = 0; i < request->n_samples; i++) {
        list_remove(&request->samples[i].dirty);
        mem_free(request->samples[i].pending);
    }
    claim_drop(request);
    mem_free(request->ids);
    wire_sampling_fini(&request->draws);
    mem_free(request->wire_biases);
    mem_free(request->wire_bias_list);
    mem_free(request->wire.stop_token_ids);
    mem_free(request);
}

static bool request_settled(const struct request *request)
{
    bool settled = request->state == REQUEST_ENDED && !request->prompt_out;
    for (uint32_t i = 0; i < request->n_samples; i++) {
        const struct sample *sample = &request->samples[i];
        settled = settled && !sample->live && !list_linked(&sample->dirty);
    }
    return settled;
}

static void reap(void *cookie)
{
    struct requests *requests = cookie;
    requests->reaping = false;
    list_for_each_safe(at, &requests->states[REQUEST_ENDED])
    {
        struct request *request = list_entry(at, struct request, in_state);
        if (request_settled(request)) {
            request_destroy(request);
        }
    }
    admit_soon(requests);
}

/* Frees an ended request once nobody computes for it and everything was told; at the end of the
 * turn, so that whoever ended it may still look at it. */
void request_settle(struct request *request)
{
    struct requests *requests = request->requests;
    if (!requests->reaping && request_settled(request)) {
        requests->reaping = true;
        loop_defer(requests->options.loop, reap, requests);
    }
}

/* The sample computes no more; its sequence goes as soon as the step in flight is over. */
static void sample_stop(struct sample *sample)
{
    if (sample->live && batcher_row_remove(sample->request->requests->batcher, &sample->row)) {
        sample->live = false;
        engine_seq_free(sample->row.seq);
        sample->row.seq = NULL;
    }
}

/* Lets go of everything that the request holds; the request is then only waiting to be freed. */
static void request_release(struct request *request)
{
    struct requests *requests = request->requests;
    if (request->transfer) {
        struct transfer *transfer = request->transfer;
        request->transfer = NULL;
        if (request->state == REQUEST_TRANSFER && request->seq) {
            request->seq = NULL; /* the hand-off has it and frees it */
        }
        handoff_cancel(transfer);
    }
    if (request->prompt_out && batcher_prompt_remove(requests->batcher, &request->prompt)) {
        request->prompt_out = false;
    }
    if (!request->prompt_out) {
        engine_seq_free(request->seq);
        request->seq = NULL;
    }
    for (uint32_t i = 0; i < request->n_samples; i++) {
        struct sample *sample = &request->samples[i];
        sample_stop(sample);
        list_remove(&sample->dirty);
        sample->n_pending = 0;
    }
    claim_drop(request);
}

/* Ends the request without a word. */
static void request_drop(struct request *request)
{
    request_release(request);
    request_move(request, REQUEST_ENDED);
    request_settle(request);
}

static void request_fail(struct request *request, Baton__FailCode code, const char *node,
                         bool retryable, const char *format, ...)
{
    struct requests *requests = request->requests;
    char text[320];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    log_debug("request", "%016" PRIx64 ".%" PRIu32 ": failed: %s", request->id, request->attempt,
              text);
    if (code == BATON__FAIL_CODE__FAIL_CANCELLED) {
        requests->stats.n_cancelled++;
    } else {
        requests->stats.n_failed++;
    }
    if (request->sink) {
        requests_flush_sink(requests, request->sink); /* tokens first */
        request_tell_failed(requests, request->sink, request->id, request->attempt, code, node,
                            retryable, text);
    }
    request_drop(request);
}

/* ---- tokens ---- */

static bool is_end_id(const struct request *request, uint32_t id, Baton__FromDecode__Reason *reason)
{
    for (uint32_t i = 0; i < request->draws.n_stop_ids; i++) {
        if (request->draws.banned[i] == id) {
            *reason = BATON__FROM_DECODE__REASON__REASON_STOP_TOKEN;
            return true;
        }
    }
    if (!request->wire.ignore_eos && id == engine_info(request->requests->options.engine)->eos_id) {
        *reason = BATON__FROM_DECODE__REASON__REASON_EOS;
        return true;
    }
    return false;
}

static void sample_finish(struct sample *sample, Baton__FromDecode__Reason reason)
{
    sample->finished = true;
    sample->reason = reason;
    sample_stop(sample);
    request_tell_soon(sample->request->requests, sample);
}

/* A token was drawn for the sample: keep it, and see whether it was the last. */
static void sample_token(struct sample *sample, const struct engine_draw *draw)
{
    struct request *request = sample->request;
    struct requests *requests = request->requests;
    const struct engine_info *info = engine_info(requests->options.engine);
    if (sample->n_pending == sample->pending_capacity) {
        sample->pending_capacity = sample->pending_capacity ? 2 * sample->pending_capacity : 4;
        sample->pending =
            mem_realloc_array(sample->pending, sample->pending_capacity, sizeof(*sample->pending));
    }
    sample->pending[sample->n_pending++] = *draw;
    sample->n_generated++;
    requests->stats.n_tokens++;
    Baton__FromDecode__Reason reason;
    uint32_t n_all = request->n_ids - request->n_generated + sample->n_generated;
    if (is_end_id(request, draw->id, &reason)) {
        sample_finish(sample, reason);
    } else if (sample->n_generated >= request->wire.max_tokens) {
        sample_finish(sample, BATON__FROM_DECODE__REASON__REASON_LENGTH);
    } else if (n_all >= info->max_context_tokens) {
        sample_finish(sample, BATON__FROM_DECODE__REASON__REASON_CONTEXT);
    } else {
        sample->credit -= sample->credit > 0;
        if (sample->credit == 0) {
            batcher_row_pause(requests->batcher, &sample->row, true);
        }
        request_tell_soon(requests, sample);
    }
}

/* The prompt is in request->seq and each sample has its first draw: into the batch. */
static void request_run(struct request *request, const struct engine_draw *const *draws)
{
    struct requests *requests = request->requests;
    uint64_t now_ns = loop_now_ns();
    request->first_token_ns = now_ns;
    request->timings.first_token_ns = now_ns - request->arrival_ns;
    claim_drop(request);
    for (uint32_t i = 1; i < request->n_samples; i++) {
        if (engine_seq_fork(request->seq, request->id, &request->samples[i].row.seq)) {
            for (uint32_t k = 1; k < i; k++) {
                engine_seq_free(request->samples[k].row.seq);
                request->samples[k].row.seq = NULL;
            }
            request_fail(request, BATON__FAIL_CODE__FAIL_NO_ROOM, "", true,
                         "no room for %" PRIu32 " samples", request->n_samples);
            return;
        }
    }
    request->samples[0].row.seq = request->seq;
    request->seq = NULL;
    request_move(request, REQUEST_RUNNING);
    for (uint32_t i = 0; i < request->n_samples; i++) {
        struct sample *sample = &request->samples[i];
        sample->row.sampling = &sample->sampling;
        sample->row.token = draws[i]->id;
        sample->row.n_generated = sample->n_generated + 1;
        sample->row.cookie = sample;
        sample->live = true;
        batcher_row_add(requests->batcher, &sample->row);
    }
    for (uint32_t i = 0; i < request->n_samples; i++) {
        sample_token(&request->samples[i], draws[i]);
    }
}

/* ---- events of the batcher ---- */

static void on_token(void *cookie, struct batch_row *row, const struct engine_draw *draw)
{
    sample_token(row->cookie, draw);
}

/* What sample_token will find after one more token, as far as numbers tell. */
static bool on_goes_on(void *cookie, const struct batch_row *row)
{
    const struct requests *requests = cookie;
    const struct sample *sample = row->cookie;
    const struct request *request = sample->request;
    uint32_t n_then = sample->n_generated + 1;
    return sample->credit > 1 && n_then < request->wire.max_tokens &&
           request->n_ids - request->n_generated + n_then <
               engine_info(requests->options.engine)->max_context_tokens;
}

static void on_step_done(void *cookie)
{
    struct requests *requests = cookie;
    if (requests->flushing) {
        loop_defer_cancel(requests->options.loop, requests_flush_all, requests);
        requests_flush_all(requests);
    }
}

static void on_row_released(void *cookie, struct batch_row *row)
{
    struct sample *sample = row->cookie;
    sample->live = false;
    engine_seq_free(row->seq);
    row->seq = NULL;
    request_settle(sample->request);
    admit_soon(cookie);
}

/* The youngest goes: it has the least to lose, and starts again elsewhere or first in the queue. */
static bool on_short_of_pages(void *cookie, struct batch_row *row)
{
    struct requests *requests = cookie;
    struct request *youngest = NULL;
    list_for_each(at, &requests->states[REQUEST_RUNNING])
    {
        struct request *request = list_entry(at, struct request, in_state);
        if (!youngest || request->first_token_ns >= youngest->first_token_ns) {
            youngest = request;
        }
    }
    if (!youngest) {
        return false;
    }
    requests->stats.n_preempted++;
    log_info("request", "%016" PRIx64 ": preempted after %" PRIu32 " tokens, the pool is full",
             youngest->id, youngest->samples[0].n_generated);
    request_fail(youngest, BATON__FAIL_CODE__FAIL_PREEMPTED, "", true,
                 "preempted: the page pool of this node ran short");
    return true;
}

/* Until here it waited: behind other prompts, or for a step to end. */
static void on_prompt_started(void *cookie, struct batch_prompt *prompt)
{
    struct request *request = prompt->cookie;
    request->state_ns = loop_now_ns();
    request->computing = true;
    request->timings.queue_ns = request->state_ns - request->arrival_ns;
}

static void on_prompt_progress(void *cookie, struct batch_prompt *prompt, uint32_t n_done)
{
}

static void on_prompt_done(void *cookie, struct batch_prompt *prompt, enum status status,
                           const struct engine_draw *draw)
{
    struct requests *requests = cookie;
    struct request *request = prompt->cookie;
    request->prompt_out = false;
    if (request->state == REQUEST_ENDED) {
        engine_seq_free(request->seq);
        request->seq = NULL;
        request_settle(request);
        return;
    }
    request->timings.prefill_ns = loop_now_ns() - request->state_ns;
    struct engine_draw extra[WIRE_MAX_SAMPLES];
    const struct engine_draw *draws[WIRE_MAX_SAMPLES] = {draw};
    for (uint32_t i = 1; !status && i < request->n_samples; i++) {
        struct sample *sample = &request->samples[i];
        status = engine_draw_again(requests->options.engine, request->seq, &sample->sampling,
                                   sample->n_generated, &extra[i]);
        draws[i] = &extra[i];
    }
    if (status) {
        request_fail(request, BATON__FAIL_CODE__FAIL_INTERNAL, "", true,
                     "the engine failed in prefill: %s", status_name(status));
        return;
    }
    request_run(request, draws);
}

static void on_broken(void *cookie, enum status status)
{
    struct requests *requests = cookie;
    requests_fail_all(requests, BATON__FAIL_CODE__FAIL_INTERNAL, "the engine of this node failed",
                      true);
    requests->broken(requests->cookie, status);
}

static const struct batcher_events batcher_events = {
    .token = on_token,
    .step_done = on_step_done,
    .row_released = on_row_released,
    .goes_on = on_goes_on,
    .short_of_pages = on_short_of_pages,
    .prompt_started = on_prompt_started,
    .prompt_progress = on_prompt_progress,
    .prompt_done = on_prompt_done,
    .broken = on_broken,
};

/* ---- events of the hand-off ---- */

static void try_open(struct request *request)
{
    if (claim_room(request)) {
        request_move(request, REQUEST_TRANSFER);
        handoff_open(request->transfer, request->seq);
    }
}

static void on_transfer_started(void *cookie, void *owner)
{
    struct request *request = owner;
    request->timings.queue_ns = loop_now_ns() - request->arrival_ns;
    request_move(request, REQUEST_OPENING);
    try_open(request);
}

static void on_transfer_ended(void *cookie, void *owner, const struct handoff_end *end)
{
    struct request *request = owner;
    request->transfer = NULL;
    if (!end->ok) {
        request->seq = NULL; /* freed by the hand-off */
        claim_drop(request);
        request_fail(request, end->code, end->node, end->retryable, "%s", end->text);
        return;
    }
    request->cached_tokens = end->cached_tokens;
    request->timings.prefill_ns = end->prefill_ns;
    request->timings.transfer_ns = end->transfer_ns;
    request->timings.bytes = end->bytes;
    const struct engine_draw *draws[WIRE_MAX_SAMPLES];
    for (uint32_t i = 0; i < request->n_samples; i++) {
        draws[i] = &end->first[i].draw;
    }
    request_run(request, draws);
}

const struct handoff_events requests_handoff_events = {
    .started = on_transfer_started,
    .ended = on_transfer_ended,
};

/* ---- admission ---- */

/* False: the head of the queue can't start yet. */
static bool try_start(struct request *request)
{
    struct requests *requests = request->requests;
    if (request->remote) {
        char why[256];
        Baton__NodeRef ref = BATON__NODE_REF__INIT;
        ref.node_id = request->prefill_id;
        ref.incarnation = request->prefill_incarnation;
        struct peer *peer = peers_find_ready(requests->peers, &ref, why);
        if (!peer) {
            request_fail(request, BATON__FAIL_CODE__FAIL_PAIR_NOT_READY, request->prefill_id, true,
                         "%s", why);
            return true;
        }
        uint64_t waited_ms = (loop_now_ns() - request->arrival_ns) / NS_PER_MS;
        struct handoff_request run = {
            .request = request->id,
            .attempt = request->attempt,
            .ids = request->ids,
            .n_ids = request->n_ids,
            .n_generated = request->n_generated,
            .sampling = &request->wire,
            .n_samples = request->n_samples,
            .queue_ms = request->deadlines.queue_ms > waited_ms
                            ? (uint32_t)(request->deadlines.queue_ms - waited_ms)
                            : request->deadlines.queue_ms != 0,
            .prefill_ms = request->deadlines.prefill_ms,
            .transfer_ms = request->deadlines.transfer_ms,
            .cache_salt = request->cache_salt,
        };
        enum status status =
            handoff_start(requests->handoff, peer, &run, request, &request->transfer);
        if (status == STATUS_EXHAUSTED) {
            return false;
        }
        if (status) {
            request_fail(request, BATON__FAIL_CODE__FAIL_PEER_LOST, request->prefill_id, true,
                         "prefill node %s can't be reached", request->prefill_id);
        } else {
            request_move(request, REQUEST_TRANSFER);
        }
        return true;
    }
    if (!claim_room(request)) {
        return false;
    }
    if (engine_seq_reserve(request->seq, request->n_ids)) {
        engine_seq_free(request->seq);
        request->seq = NULL;
        claim_drop(request);
        return false;
    }
    request->prompt = (struct batch_prompt){
        .seq = request->seq,
        .ids = request->ids,
        .n_ids = request->n_ids,
        .sampling = &request->samples[0].sampling,
        .n_generated = request->samples[0].n_generated,
        .cookie = request,
    };
    request_move(request, REQUEST_LOCAL);
    request->prompt_out = true;
    batcher_prompt_add(requests->batcher, &request->prompt);
    return true;
}

static void admit(void *cookie)
{
    struct requests *requests = cookie;
    requests->admitting = false;
    /* First those whose prefill already runs: they hold pages over there. */
    list_for_each_safe(at, &requests->states[REQUEST_OPENING])
    {
        try_open(list_entry(at, struct request, in_state));
    }
    struct list *first;
    while (list_empty(&requests->states[REQUEST_OPENING]) &&
           (first = list_first(&requests->states[REQUEST_QUEUED])) != NULL) {
        if (!try_start(list_entry(first, struct request, in_state))) {
            break;
        }
    }
}

static void admit_soon(struct requests *requests)
{
    if (!requests->admitting) {
        requests->admitting = true;
        loop_defer(requests->options.loop, admit, requests);
    }
}

/* ---- what routers say ---- */

static void enqueue(struct request *request)
{
    request_move(request, REQUEST_QUEUED);
    admit_soon(request->requests);
}

void requests_start(struct requests *requests, struct request_sink *sink,
                    const Baton__ToDecode__Start *start, bool draining)
{
    const char *wrong = request_start_wrong(requests, start);
    uint32_t n_waiting =
        requests->n_in_state[REQUEST_QUEUED] + requests->n_in_state[REQUEST_RECEIVING];
    requests->stats.n_started++;
    if (find(sink, start->request, start->attempt)) {
        wrong = "this attempt is running already";
    }
    if (wrong) {
        requests->stats.n_refused++;
        request_tell_failed(requests, sink, start->request, start->attempt,
                            BATON__FAIL_CODE__FAIL_INVALID, "", false, wrong);
        return;
    }
    if (draining) {
        requests->stats.n_refused++;
        request_tell_failed(requests, sink, start->request, start->attempt,
                            BATON__FAIL_CODE__FAIL_DRAINING, "", true,
                            "this node takes no new work");
        return;
    }
    char text[160];
    if (!request_start_fits(requests, start, text, sizeof(text))) {
        requests->stats.n_refused++;
        request_tell_failed(requests, sink, start->request, start->attempt,
                            BATON__FAIL_CODE__FAIL_TOO_LONG, "", true, text);
        return;
    }
    if (n_waiting >= requests->options.max_queued && !start->front) {
        requests->stats.n_refused++;
        request_tell_failed(requests, sink, start->request, start->attempt,
                            BATON__FAIL_CODE__FAIL_QUEUE_FULL, "", true,
                            "the queue of this node is full");
        return;
    }
    struct request *request = mem_zalloc(sizeof(*request));
    request->requests = requests;
    request->sink = sink;
    request->id = start->request;
    request->attempt = start->attempt;
    request->n_ids_total = start->n_ids_total;
    request->n_generated = start->n_generated;
    request->credit = start->credit;
    request->front = start->front;
    request->cache_salt = start->cache_salt;
    request->arrival_ns = loop_now_ns();
    baton__deadlines__init(&request->deadlines);
    if (start->deadlines) {
        request->deadlines = *start->deadlines;
    }
    baton__timings__init(&request->timings);
    request->remote = start->prefill != NULL;
    if (start->prefill) {
        snprintf(request->prefill_id, sizeof(request->prefill_id), "%s", start->prefill->node_id);
        request->prefill_incarnation = start->prefill->incarnation;
    }
    request->ids = mem_array(start->n_ids_total, sizeof(*request->ids));
    memcpy(request->ids, start->ids, start->n_ids * sizeof(*request->ids));
    request->n_ids = (uint32_t)start->n_ids;
    request_sampling_copy(request, start->sampling);
    list_init(&request->in_state);
    struct request_key key = {request->id, request->attempt};
    list_push_back(&sink->requests, &request->in_sink);
    hmap_put(sink->by_key, &key, sizeof(key), request);
    request_move(request, REQUEST_RECEIVING);
    if (request->n_ids == request->n_ids_total) {
        enqueue(request);
    }
}

void requests_ids(struct requests *requests, struct request_sink *sink, const Baton__IdsPart *part)
{
    uint32_t vocab_size = engine_info(requests->options.engine)->vocab_size;
    struct request *request = find(sink, part->key, part->attempt);
    if (!request || request->state != REQUEST_RECEIVING) {
        return;
    }
    bool fits = part->first == request->n_ids && part->n_ids > 0 &&
                part->n_ids <= request->n_ids_total - request->n_ids;
    fits = fits && wire_ids_fit(part->ids, part->n_ids, vocab_size);
    if (!fits) {
        request_fail(request, BATON__FAIL_CODE__FAIL_INVALID, "", false,
                     "a part of the ids does not fit");
        return;
    }
    memcpy(request->ids + request->n_ids, part->ids, part->n_ids * sizeof(*request->ids));
    request->n_ids += (uint32_t)part->n_ids;
    if (request->n_ids == request->n_ids_total) {
        enqueue(request);
    }
}

void requests_credit(struct requests *requests, struct request_sink *sink,
                     const Baton__ToDecode__Credit *credit)
{
    struct request *request = find(sink, credit->request, credit->attempt);
    if (!request) {
        return;
    }
    for (uint32_t i = 0; i < request->n_samples; i++) {
        struct sample *sample = &request->samples[i];
        uint32_t sum;
        if (!__builtin_add_overflow(sample->credit, credit->tokens, &sum)) {
            sample->credit = sum;
        }
        if (sample->credit > 0 && sample->live && !sample->finished) {
            batcher_row_pause(requests->batcher, &sample->row, false);
        }
    }
}

void requests_cancel(struct requests *requests, struct request_sink *sink,
                     const Baton__ToDecode__Cancel *cancel)
{
    struct request *request = find(sink, cancel->request, cancel->attempt);
    if (!request) {
        return;
    }
    if (cancel->all_samples || request->state != REQUEST_RUNNING) {
        request_fail(request, BATON__FAIL_CODE__FAIL_CANCELLED, "", false, "cancelled");
        return;
    }
    if (cancel->sample < request->n_samples && !request->samples[cancel->sample].finished) {
        struct sample *sample = &request->samples[cancel->sample];
        sample->n_pending = 0; /* beyond the stop string: nobody wants them */
        sample_finish(sample, BATON__FROM_DECODE__REASON__REASON_CANCELLED);
    }
}

void requests_sink_lost(struct requests *requests, struct request_sink *sink)
{
    struct list *first;
    while ((first = list_first(&sink->requests)) != NULL) {
        struct request *request = list_entry(first, struct request, in_sink);
        sink_forget(request);
        requests->stats.n_cancelled += request->state != REQUEST_ENDED;
        request_drop(request);
    }
}

/* ---- time, life, numbers ---- */

static bool overdue(const struct request *request, uint64_t since_ns, uint32_t limit_ms,
                    uint64_t now_ns)
{
    return limit_ms && now_ns - since_ns > limit_ms * NS_PER_MS;
}

static bool expire_one(struct requests *requests, uint64_t now_ns)
{
    static const enum request_state waiting[] = {REQUEST_RECEIVING, REQUEST_QUEUED,
                                                 REQUEST_OPENING};
    for (size_t s = 0; s < sizeof(waiting) / sizeof(waiting[0]); s++) {
        list_for_each(at, &requests->states[waiting[s]])
        {
            struct request *request = list_entry(at, struct request, in_state);
            if (overdue(request, request->arrival_ns, request->deadlines.queue_ms, now_ns)) {
                request_fail(request, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, "", false,
                             "waited %" PRIu32 " ms in the queue of this node",
                             request->deadlines.queue_ms);
                return true;
            }
        }
    }
    list_for_each(at, &requests->states[REQUEST_LOCAL])
    {
        struct request *request = list_entry(at, struct request, in_state);
        if (!request->computing &&
            overdue(request, request->arrival_ns, request->deadlines.queue_ms, now_ns)) {
            request_fail(request, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, "", false,
                         "waited %" PRIu32 " ms in the queue of this node",
                         request->deadlines.queue_ms);
            return true;
        }
        if (request->computing &&
            overdue(request, request->state_ns, request->deadlines.prefill_ms, now_ns)) {
            request_fail(request, BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL, "", false,
                         "prefill took more than %" PRIu32 " ms", request->deadlines.prefill_ms);
            return true;
        }
    }
    list_for_each(at, &requests->states[REQUEST_RUNNING])
    {
        struct request *request = list_entry(at, struct request, in_state);
        if (overdue(request, request->first_token_ns, request->deadlines.generation_ms, now_ns)) {
            request_fail(request, BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION, "", false,
                         "generation took more than %" PRIu32 " ms",
                         request->deadlines.generation_ms);
            return true;
        }
    }
    return false;
}

/* Most requests have their first token before the next tick, and then the router need not be told
 * that they were admitted: that would be a message in three. */
static void tell_waiting(struct requests *requests)
{
    static const enum request_state waiting[] = {REQUEST_QUEUED, REQUEST_OPENING, REQUEST_TRANSFER,
                                                 REQUEST_LOCAL};
    for (size_t s = 0; s < sizeof(waiting) / sizeof(waiting[0]); s++) {
        uint32_t n_ahead = 0;
        list_for_each(at, &requests->states[waiting[s]])
        {
            request_tell_admitted(list_entry(at, struct request, in_state), n_ahead);
            n_ahead += waiting[s] == REQUEST_QUEUED;
        }
    }
}

void requests_tick(struct requests *requests)
{
    uint64_t now_ns = loop_now_ns();
    while (expire_one(requests, now_ns)) {
    }
    tell_waiting(requests);
    admit_soon(requests);
}

void requests_fail_all(struct requests *requests, Baton__FailCode code, const char *text,
                       bool retryable)
{
    for (int s = 0; s < REQUEST_ENDED; s++) {
        struct list *first;
        while ((first = list_first(&requests->states[s])) != NULL) {
            request_fail(list_entry(first, struct request, in_state), code, "", retryable, "%s",
                         text);
        }
    }
}

enum status requests_create(const struct requests_options *options, struct peers *peers,
                            void (*broken)(void *cookie, enum status status), void *cookie,
                            struct requests **ret_requests)
{
    struct requests *requests = mem_zalloc(sizeof(*requests));
    struct batcher_options batching = {.prefill_share = options->prefill_share};
    enum status status = batcher_create(options->loop, options->engine, &batching, &batcher_events,
                                        requests, &requests->batcher);
    if (status) {
        mem_free(requests);
        return status;
    }
    requests->options = *options;
    requests->peers = peers;
    requests->broken = broken;
    requests->cookie = cookie;
    for (int s = 0; s < N_REQUEST_STATES; s++) {
        list_init(&requests->states[s]);
    }
    *ret_requests = requests;
    return STATUS_OK;
}

void requests_set_handoff(struct requests *requests, struct handoff *handoff)
{
    requests->handoff = handoff;
}

struct batcher *requests_batcher(struct requests *requests)
{
    return requests->batcher;
}

void requests_free(struct requests *requests)
{
    if (!requests) {
        return;
    }
    loop_defer_cancel(requests->options.loop, requests_flush_all, requests);
    loop_defer_cancel(requests->options.loop, admit, requests);
    loop_defer_cancel(requests->options.loop, reap, requests);
    requests->flushing = requests->admitting = requests->reaping = true;
    batcher_free(requests->batcher);
    for (int s = 0; s < N_REQUEST_STATES; s++) {
        struct list *first;
        while ((first = list_first(&requests->states[s])) != NULL) {
            struct request *request = list_entry(first, struct request, in_state);
            /* The hand-off frees the sequences that it was given. */
            if (!request->transfer) {
                engine_seq_free(request->seq);
            }
            for (uint32_t i = 0; i < request->n_samples; i++) {
                engine_seq_free(request->samples[i].row.seq);
            }
            request_destroy(request);
        }
    }
    mem_free(requests);
}
