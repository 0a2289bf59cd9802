/* prefill/handoff_internal.h - what the files of the sending end share. Not for others.
 *
 * handoff.c holds the states of runs and reads messages, parcels.c cuts, puts and tells parcels.
 */
#ifndef BATON_PREFILL_HANDOFF_INTERNAL_H
#define BATON_PREFILL_HANDOFF_INTERNAL_H

#include "base/ledger.h"
#include "engine/accept.h"
#include "node/wire.h"
#include "prefill/handoff.h"

enum {
    MAX_PARCEL_PAGES = 32, /* 28 MB of V4-Flash: one flush a parcel is then far below 1 % */
    MAX_HELD_SLOTS = 4096,
    MAX_PAGE_PIECES = 8, /* decode nodes take pieces of a sixteenth of a page and up */
    PROGRESS_EVERY_MS = 500,
    LIFE_MARGIN_MS = 3000,
    RECEIVING_TIMEOUT_MS = 10000, /* parts follow their Run at once */
};

enum run_state { RUN_RECEIVING, RUN_QUEUED, RUN_COMPUTING, RUN_SENDING, RUN_ENDING, N_RUN_STATES };

enum tail_state { TAIL_FREE, TAIL_USED, N_TAIL_STATES };

struct run;

struct parcel {
    struct list link; /* in its run, in order of seq */
    struct run *run;
    struct put *put;
    uint32_t seq;
    bool is_tail, put_out, sum_out, put_ok;
    uint32_t first_page, n_pages, n_slots;
    uint32_t slots[MAX_PARCEL_PAGES];
    uint64_t offset, bytes, checksum; /* offset: in each page, or in the tail */
    uint32_t n_pieces;
    bool from_device, sum_failed;
    struct parcel_piece pieces[MAX_PARCEL_PAGES];
};

struct run {
    struct list in_state, in_target;
    struct runs *runs;
    struct run_target *target; /* NULL: lost */
    uint64_t id, request;
    enum run_state state;
    uint32_t *ids;
    uint32_t n_ids, n_ids_total, n_generated;
    uint32_t n_samples;
    struct engine_sampling sampling[WIRE_MAX_SAMPLES];
    struct wire_sampling wire;
    struct engine_seq *seq;
    struct batch_prompt prompt;
    bool prompt_out, call_out;
    bool started; /* its first chunk has begun: the decode node was told */
    uint32_t n_done;
    struct engine_draw draws[WIRE_MAX_SAMPLES];
    uint32_t slots[MAX_HELD_SLOTS]; /* granted and not used yet, a ring */
    uint32_t slots_first, n_slots;
    /* Of the pages below pages_ready all bytes may go, of those from there below pages_open the
     * first open_bytes. pages_sent[i] bytes of page i have gone; those below next_page whole. */
    uint32_t n_pages, pages_ready, pages_open, next_page, next_seq;
    size_t open_bytes, *pages_sent;
    int64_t tail; /* buffer, or -1 */
    bool tail_ready, tail_to_device;
    uint64_t tail_bytes, tail_at;
    struct list parcels;
    uint64_t life_ms; /* all that the decode node gives it, and a margin; 0: no limit */
    uint64_t arrival_ns, start_ns, computed_ns, progress_ns, put_ns, bytes;
};

/* What puts read from; all NULL: nothing leaves from there. */
struct run_source {
    struct region *pool_region, *tail_region;
    uint8_t *pool, *tails; /* page i at i * page_bytes, tail buffer i at i * tail_stride */
};

enum { N_PREFLIGHTS = 4 }; /* that may run from the device's memory at once */

struct runs {
    struct runs_options options;
    struct batcher *batcher;
    struct run_source sources[2]; /* in the host's memory, and in the device's */
    bool shares_tails;
    uint32_t preflights_out; /* bit i: place i of the device's is taken */
    size_t tail_stride, tails_bytes;
    struct ledger *tail_ledger;
    void (*broken)(void *cookie, enum status status);
    void *cookie;
    struct list states[N_RUN_STATES];
    uint32_t n_in_state[N_RUN_STATES];
    struct runs_stats stats;
    bool starting, reaping;
};

/* handoff.c: sends to the run's decode node; ends a run with a word about why; destroys one that
 * has nothing under way. */
must_check enum status run_send(struct run *run, Baton__FromPrefill *message);
void run_fail(struct run *run, Baton__FailCode code, bool retryable, const char *format, ...)
    PRINTF_LIKE(4, 5);
void run_settle(struct run *run);
void run_destroy(struct run *run);

/* parcels.c: sends whatever there is to send and slots for; drops a parcel without put and sum. */
void run_pump(struct run *run);
void run_parcel_drop(struct parcel *parcel);
/* put_submit of a parcel, through its fault point in a drill build (put_fault.c). */
#ifdef BATON_FAULT_POINTS
must_check enum status parcel_put_fault(struct parcel *parcel, struct region *source,
                                        struct put_run *puts, put_done_fn done, struct error *err);
/* The peer is lost (NULL: all are): what is held back of it ends. */
void parcel_put_fault_lost(const struct put_peer *peer);
void parcel_put_fault_stop(void);
#define PARCEL_PUT(parcel, source, puts, done, err) \
    parcel_put_fault(parcel, source, puts, done, err)
#else
#define PARCEL_PUT(parcel, source, puts, done, err)                                        \
    put_submit((parcel)->run->target->peer, source, puts, (parcel)->n_slots, done, parcel, \
               &(parcel)->put, err)
#endif

/* The first tokens. */
void run_first_send(struct run *run);

#endif
