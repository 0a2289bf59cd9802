/* What leaves on a router's link: rows of new tokens, ends, refusals.
 *
 * Tokens are told in order and an end after the last of them. What the link does not take stays
 * with its sample, bounded by the sample's credit, and leaves when there is room again.
 */
#include "decode/request_internal.h"

#include <inttypes.h>

#include "base/log.h"
#include "base/mem.h"

/* More rows a Step message than this go into a second one: far below the message limit. */
enum { ROWS_A_MESSAGE = 2048 };

void request_tell_failed(struct requests *requests, struct request_sink *sink, uint64_t id,
                         uint32_t attempt, Baton__FailCode code, const char *node, bool retryable,
                         const char *text)
{
    Baton__FromDecode__Failed failed = BATON__FROM_DECODE__FAILED__INIT;
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    failed.request = id;
    failed.attempt = attempt;
    failed.code = code;
    failed.node = (char *)(node[0] ? node : requests->options.node_id);
    failed.text = (char *)text;
    failed.retryable = retryable;
    message.what_case = BATON__FROM_DECODE__WHAT_FAILED;
    message.failed = &failed;
    if (sink->send(sink, &message)) {
        /* The link is clogged beyond its bound: its router counts as lost, and the link's owner
         * closes it. */
        log_warn("request", "%016" PRIx64 ": its router does not read", id);
    }
}

void request_tell_admitted(struct request *request, uint32_t n_ahead)
{
    if (request->admission_told || !request->sink) {
        return;
    }
    Baton__FromDecode__Admitted admitted = BATON__FROM_DECODE__ADMITTED__INIT;
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    admitted.request = request->id;
    admitted.attempt = request->attempt;
    admitted.n_ahead = n_ahead;
    message.what_case = BATON__FROM_DECODE__WHAT_ADMITTED;
    message.admitted = &admitted;
    request->admission_told = request->sink->send(request->sink, &message) == STATUS_OK;
}

static void pack_row(struct sample *sample, Baton__FromDecode__Row *row, struct arena *arena)
{
    struct request *request = sample->request;
    uint32_t n = sample->n_pending;
    baton__from_decode__row__init(row);
    row->request = request->id;
    row->attempt = request->attempt;
    row->sample = sample->index;
    row->first_index = sample->n_told;
    row->n_ids = n;
    row->ids = arena_alloc(arena, n * sizeof(*row->ids));
    for (uint32_t i = 0; i < n; i++) {
        row->ids[i] = sample->pending[i].id;
    }
    if (!request->timings_told) {
        row->timings = &request->timings;
        request->timings_told = true;
    }
    if (!sample->sampling.want_logprobs) {
        return;
    }
    row->n_logprobs = n;
    row->logprobs = arena_alloc(arena, n * sizeof(*row->logprobs));
    for (uint32_t i = 0; i < n; i++) {
        row->logprobs[i] = wire_logprobs_make(&sample->pending[i], arena);
    }
}

static enum status send_finished(struct sample *sample)
{
    struct request *request = sample->request;
    Baton__Usage usage = BATON__USAGE__INIT;
    Baton__FromDecode__Finished finished = BATON__FROM_DECODE__FINISHED__INIT;
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    usage.prompt_tokens = request->n_ids - request->n_generated;
    usage.completion_tokens = sample->n_generated;
    usage.cached_tokens = request->cached_tokens;
    finished.request = request->id;
    finished.attempt = request->attempt;
    finished.sample = sample->index;
    finished.reason = sample->reason;
    finished.n_generated = sample->n_generated;
    finished.usage = &usage;
    finished.timings = &request->timings;
    message.what_case = BATON__FROM_DECODE__WHAT_FINISHED;
    message.finished = &finished;
    return request->sink->send(request->sink, &message);
}

/* Rows of the next message: what is allocated is what is sent, since most messages have one. */
static uint32_t count_rows(const struct request_sink *sink)
{
    uint32_t n = 0;
    list_for_each(at, &sink->dirty)
    {
        n += list_entry(at, struct sample, dirty)->n_pending > 0;
    }
    return n < ROWS_A_MESSAGE ? n : ROWS_A_MESSAGE;
}

static enum status send_rows(struct request_sink *sink)
{
    uint32_t n_rows = count_rows(sink), n = 0;
    struct arena *arena = arena_create(0);
    Baton__FromDecode__Row *rows = arena_alloc(arena, n_rows * sizeof(*rows));
    Baton__FromDecode__Row **list = arena_alloc(arena, n_rows * sizeof(*list));
    struct sample **members = arena_alloc(arena, n_rows * sizeof(*members));
    list_for_each(at, &sink->dirty)
    {
        struct sample *sample = list_entry(at, struct sample, dirty);
        if (sample->n_pending > 0 && n < n_rows) {
            pack_row(sample, &rows[n], arena);
            list[n] = &rows[n];
            members[n++] = sample;
        }
    }
    enum status status = STATUS_OK;
    if (n > 0) {
        Baton__FromDecode__Step step = BATON__FROM_DECODE__STEP__INIT;
        Baton__FromDecode message = BATON__FROM_DECODE__INIT;
        step.n_rows = n;
        step.rows = list;
        message.what_case = BATON__FROM_DECODE__WHAT_STEP;
        message.step = &step;
        status = sink->send(sink, &message);
        for (uint32_t i = 0; i < n; i++) {
            struct request *request = members[i]->request;
            if (!status) {
                members[i]->n_told += members[i]->n_pending;
                members[i]->n_pending = 0;
            } else if (rows[i].timings) {
                request->timings_told = false;
            }
        }
        if (!status && n == ROWS_A_MESSAGE) {
            status = STATUS_PENDING; /* there may be more */
        }
    }
    arena_free(arena);
    return status;
}

void requests_flush_sink(struct requests *requests, struct request_sink *sink)
{
    enum status status;
    do {
        status = send_rows(sink);
    } while (status == STATUS_PENDING);
    sink->full = status != STATUS_OK;
    if (sink->full) {
        return;
    }
    list_for_each_safe(at, &sink->dirty)
    {
        struct sample *sample = list_entry(at, struct sample, dirty);
        struct request *request = sample->request;
        if (sample->finished && !sample->end_told) {
            if (send_finished(sample)) {
                sink->full = true;
                return;
            }
            sample->end_told = true;
        }
        list_remove(&sample->dirty);
        bool all_told = request->state != REQUEST_ENDED;
        for (uint32_t i = 0; i < request->n_samples; i++) {
            all_told = all_told && request->samples[i].end_told;
        }
        if (all_told) {
            requests->stats.n_finished++;
            request_move(request, REQUEST_ENDED);
        }
        request_settle(request);
    }
}

void requests_flush_all(void *cookie)
{
    struct requests *requests = cookie;
    requests->flushing = false;
    for (int s = 0; s < N_REQUEST_STATES; s++) {
        list_for_each(at, &requests->states[s])
        {
            struct request *request = list_entry(at, struct request, in_state);
            if (request->sink && !request->sink->full && !list_empty(&request->sink->dirty)) {
                requests_flush_sink(requests, request->sink);
                /* The lists changed; whatever is left dirty is flushed in the next turn. */
                requests->flushing = true;
                loop_defer(requests->options.loop, requests_flush_all, requests);
                return;
            }
        }
    }
}

void request_tell_soon(struct requests *requests, struct sample *sample)
{
    struct request_sink *sink = sample->request->sink;
    if (!sink) {
        return;
    }
    if (!list_linked(&sample->dirty)) {
        list_push_back(&sink->dirty, &sample->dirty);
    }
    if (!requests->flushing) {
        requests->flushing = true;
        loop_defer(requests->options.loop, requests_flush_all, requests);
    }
}
