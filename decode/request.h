/* decode/request.h - the life of a request on a decode node.
 *
 * One attempt of one request of one router, with its samples. States, moved by one function:
 *
 *     receiving -> queued -> transfer -> opening -> running -> ended
 *                         -> local --------------^
 *
 * receiving: ids are still coming in parts. queued: in the bounded queue. transfer: Run was sent;
 * nothing of ours is held. opening: prefill computes and there is no room here yet. local: the
 * prompt is computed here. running: samples are in the batch. Every attempt ends with one Finished
 * a sample or with one Failed.
 *
 * Thread: loop. Bounds: max_queued waiting, max_transfers in flight, the pool for the rest.
 */
#ifndef BATON_DECODE_REQUEST_H
#define BATON_DECODE_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "decode/handoff.h"
#include "decode/peers.h"
#include "node/batcher.h"
#include "proto/decode.pb-c.h"

struct hmap;
struct requests;
struct request;

/* Where a request's messages go: one router's link, with what waits to be sent on it. */
struct request_sink {
    struct list requests; /* of this router */
    struct hmap *by_key;  /* the same by (id, attempt) */
    struct list dirty;    /* samples with tokens or an end to tell */
    /* Sends, or EXHAUSTED: then requests_flush_sink is called again when there is room. */
    enum status (*send)(struct request_sink *sink, const Baton__FromDecode *message);
    bool full;
};

struct requests_options {
    struct loop *loop;
    struct engine *engine;
    const char *node_id;
    uint32_t max_queued;
    double prefill_share;
};

struct json_writer;

struct requests_stats {
    uint64_t n_started, n_finished, n_failed, n_cancelled, n_refused, n_preempted;
    uint64_t n_tokens;
    uint32_t n_queued, n_transfers, n_opening, n_local, n_running;
    uint64_t oldest_queued_ns; /* age; 0: none */
    uint64_t queued_tokens;
};

/* `broken`: the engine failed, the node must end. */
must_check enum status requests_create(const struct requests_options *options, struct peers *peers,
                                       void (*broken)(void *cookie, enum status status),
                                       void *cookie, struct requests **ret_requests);
/* The hand-off is made after the requests it reports to. */
void requests_set_handoff(struct requests *requests, struct handoff *handoff);
struct batcher *requests_batcher(struct requests *requests);
/* Ends everything without a word. NULL is fine. */
void requests_free(struct requests *requests);

/* A sink begins empty; fini after requests_sink_lost. */
void request_sink_init(struct request_sink *sink);
void request_sink_fini(struct request_sink *sink);

/* Messages of a router. What is wrong with a Start is answered by Failed; so is every Start while
 * the node is draining. */
void requests_start(struct requests *requests, struct request_sink *sink,
                    const Baton__ToDecode__Start *start, bool draining);
void requests_ids(struct requests *requests, struct request_sink *sink, const Baton__IdsPart *part);
void requests_credit(struct requests *requests, struct request_sink *sink,
                     const Baton__ToDecode__Credit *credit);
void requests_cancel(struct requests *requests, struct request_sink *sink,
                     const Baton__ToDecode__Cancel *cancel);
/* The router is gone: all its requests end, unsaid. */
void requests_sink_lost(struct requests *requests, struct request_sink *sink);
/* There is room on the link again. */
void requests_flush_sink(struct requests *requests, struct request_sink *sink);

/* Deadlines; and whoever may start now. Every 50 ms, and after pairs or slots changed. */
void requests_tick(struct requests *requests);
/* Ends every live request with Failed{code, text, retryable}. */
void requests_fail_all(struct requests *requests, Baton__FailCode code, const char *text,
                       bool retryable);
uint32_t requests_n_live(const struct requests *requests);
void requests_stats(const struct requests *requests, struct requests_stats *ret_stats);

/* Elements of the array that is open: every request that holds anything, by its id (the owner of
 * its pages and sequence slots) and its transfer's (the owner of its landing slots). */
void requests_debug_json(const struct requests *requests, struct json_writer *w);

/* handoff_events of the owner side. */
extern const struct handoff_events requests_handoff_events;

#endif
