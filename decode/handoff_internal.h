/* decode/handoff_internal.h - what the files of the receiving end share. Not for others.
 *
 * handoff.c moves transfers, handoff_check.c holds what a prefill node says against what was asked.
 */
#ifndef BATON_DECODE_HANDOFF_INTERNAL_H
#define BATON_DECODE_HANDOFF_INTERNAL_H

#include "base/list.h"
#include "decode/handoff.h"

enum transfer_phase { PHASE_QUEUED, PHASE_COMPUTING, PHASE_COMPUTED, PHASE_READING };

struct transfer {
    struct list link;
    struct handoff *handoff;
    struct peer *peer;
    void *owner; /* NULL once ended or cancelled */
    uint64_t id;
    struct handoff_request request;
    struct engine_seq *seq;
    enum transfer_phase phase;
    bool cancelling;
    uint64_t phase_ns, start_ns, computing_ns, computed_ns;
    uint32_t n_pages, n_pages_whole;
    size_t *page_at; /* [n_pages] bytes of each, accepted or being accepted, from its start */
    uint32_t next_seq;
    uint32_t n_slots_wanted, n_slots_granted_all, n_slots_held;
    uint8_t *tail;
    size_t tail_bytes, tail_at;
    uint32_t n_jobs;
    bool have_first, have_done;
    uint32_t n_parcels_said, cached_tokens;
    uint64_t prefill_queue_ns, prefill_prefill_ns, bytes;
    struct handoff_first *first;
};

/* One parcel being copied. Owner: the job; the transfer outlives it. */
struct accept_job {
    struct list link; /* in the handoff's jobs */
    struct transfer *transfer;
    struct loop_timer *retry;
    uint64_t transfer_id, checksum;
    uint32_t seq, n_pieces;
    enum status status;
    bool retried, is_tail; /* a tail's bytes go to the transfer's own memory */
    struct parcel_piece *pieces;
    uint32_t *slots;
};

struct handoff {
    struct handoff_options options;
    const struct handoff_events *events;
    void *cookie;
    struct list open, cancelling, jobs;
    struct hmap *by_id;
    struct handoff_stats stats;
    bool granting;
};

/* handoff_check.c: the number of slots that a parcel must have, or 0 if its numbers are wrong. */
uint32_t handoff_parcel_n_slots(const struct transfer *transfer,
                                const Baton__FromPrefill__Parcel *parcel);
/* Takes the first tokens. False: they are not what was asked for. */
must_check bool handoff_first_read(struct transfer *transfer,
                                   const Baton__FromPrefill__First *first);

#endif
