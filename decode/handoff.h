/* decode/handoff.h - the receiving end of transfers.
 *
 * A transfer is one attempt's KV from one prefill node: Run is sent, slots are granted once the
 * owner has given it a sequence (`handoff_open`), parcels are copied and verified into the pool,
 * and when they tile the prompt exactly the tail is read and the owner gets the sequence with its
 * first tokens. States: open -> done | cancelling -> closed; every transfer ends in exactly one
 * `ended`.
 *
 * Thread: loop; callbacks from the event loop. Bound: max_transfers.
 */
#ifndef BATON_DECODE_HANDOFF_H
#define BATON_DECODE_HANDOFF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/workers.h"
#include "decode/landing.h"
#include "decode/peers.h"
#include "engine/engine.h"
#include "proto/decode.pb-c.h"

struct handoff;
struct transfer;

/* The first tokens of one sample, as prefill drew them. */
struct handoff_first {
    struct engine_draw draw;
};

/* How a transfer ended. Lives for the call. */
struct handoff_end {
    bool ok;
    /* not ok: */
    Baton__FailCode code;
    const char *node; /* where */
    const char *text;
    bool retryable;
    /* ok: the sequence given to handoff_open holds the prompt. */
    const struct handoff_first *first; /* n_samples */
    uint32_t n_samples;
    uint32_t cached_tokens;
    uint64_t queue_ns, prefill_ns, transfer_ns; /* of prefill's and our own clock */
    uint64_t bytes;
};

struct handoff_events {
    /* Prefill has begun to compute: give the transfer a sequence with handoff_open, now or when
     * there is room. */
    void (*started)(void *cookie, void *owner);
    /* The end. The sequence given to it (if any) belongs to the owner again when ok, and is freed
     * by the hand-off when not ok or cancelled. */
    void (*ended)(void *cookie, void *owner, const struct handoff_end *end);
};

struct handoff_options {
    struct loop *loop;
    struct engine *engine;
    struct landing *landing;
    struct workers *workers; /* for copy and checksum */
    uint32_t max_transfers;
    uint32_t max_slots_a_transfer; /* granted at once */
};

/* What is asked of a prefill node; borrowed until the transfer ended. */
struct handoff_request {
    uint64_t request;
    uint32_t attempt;
    const uint32_t *ids;
    uint32_t n_ids, n_generated;
    const Baton__Sampling *sampling;
    uint32_t n_samples;
    uint32_t queue_ms, prefill_ms, transfer_ms; /* 0: none */
    uint64_t cache_salt;
};

struct handoff_stats {
    uint64_t n_started, n_done, n_failed, n_cancelled;
    uint64_t n_parcels, n_bytes;
    uint64_t n_checksum_retries, n_checksum_failures;
    uint64_t n_stray;    /* messages of transfers that are not open */
    uint64_t n_protocol; /* messages that break the rules */
    uint32_t n_open, n_cancelling;
};

must_check enum status handoff_create(const struct handoff_options *options,
                                      const struct handoff_events *events, void *cookie,
                                      struct handoff **ret_handoff);
/* Ends what is left without `ended`, waits for copies under way. NULL is fine. */
void handoff_free(struct handoff *handoff);

/* Sends Run. EXHAUSTED: max_transfers, or the link is full. */
must_check enum status handoff_start(struct handoff *handoff, struct peer *peer,
                                     const struct handoff_request *request, void *owner,
                                     struct transfer **ret_transfer);
/* Takes the sequence (empty, history set): slots are granted from now on. */
void handoff_open(struct transfer *transfer, struct engine_seq *seq);
/* Gives the transfer up: `ended` does not run. */
void handoff_cancel(struct transfer *transfer);

/* What decode/peers hands on. */
void handoff_message(struct handoff *handoff, struct peer *peer, const Baton__FromPrefill *message);
void handoff_peer_lost(struct handoff *handoff, struct peer *peer, const char *text);
/* Landing slots became free: grants go on. */
void handoff_slots_freed(struct handoff *handoff);
/* Looks at the deadlines; the owner calls it every 50 ms or so. */
void handoff_tick(struct handoff *handoff);

/* The owner of its landing slots. */
uint64_t handoff_transfer_id(const struct transfer *transfer);

void handoff_stats(const struct handoff *handoff, struct handoff_stats *ret_stats);

#endif
