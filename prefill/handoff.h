/* prefill/handoff.h - the sending end of transfers: runs, parcels, puts.
 *
 * A run is one transfer that a decode node asked for. States: receiving -> queued -> computing ->
 * sending -> ending. Its prompt is cut into chunks by the batcher; pages leave as they fill and
 * slots are granted, the tail follows the last, then Done. A run that failed or was cancelled ends
 * when nothing of it can be written any more, and says so: Drained.
 *
 * Thread: loop. Bounds: max_queued runs waiting; the pool, and n_tails send buffers for tails, for
 * those that compute and send.
 */
#ifndef BATON_PREFILL_HANDOFF_H
#define BATON_PREFILL_HANDOFF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/workers.h"
#include "node/batcher.h"
#include "proto/prefill.pb-c.h"
#include "transport/put.h"

struct hmap;
struct node_kv;
struct metrics;
struct runs;
struct json_writer;

/* Where the runs of one decode node go: embedded in what holds its link. */
struct run_target {
    struct list runs;
    struct hmap *by_id;
    struct put_peer *peer; /* NULL: gone */
    const char *name;
    /* Geometry of the landing area: slot s of region 0 at (s - first_slot) * slot_bytes. */
    uint32_t region_id, first_slot, n_slots;
    uint64_t slot_bytes;
    bool from_device; /* puts read the device's memory, not the host's */
    enum status (*send)(struct run_target *target, const Baton__FromPrefill *message);
    /* The last run is gone: for whoever waits to free the target. */
    void (*idle)(struct run_target *target);
};

struct runs_options {
    struct loop *loop;
    struct engine *engine;
    struct transport *transport;
    struct node_kv *kv;      /* NULL: nothing leaves from the device's memory */
    struct workers *workers; /* for checksums */
    const char *node_id;
    uint32_t max_queued, n_tails;
    uint32_t n_pieces; /* of the last chunk's pages; 0: as the preflight's numbers say */
};

struct runs_stats {
    uint64_t n_started, n_done, n_failed, n_cancelled, n_refused;
    uint64_t n_parcels, n_bytes, put_ns;
    uint64_t n_early_bytes; /* sent while the chunk that made them still ran */
    uint32_t n_queued, n_computing, n_sending, n_ending;
    uint64_t oldest_queued_ns, queued_tokens;
};

must_check enum status runs_create(const struct runs_options *options,
                                   void (*broken)(void *cookie, enum status status), void *cookie,
                                   struct runs **ret_runs, struct error *err);
/* After transport's peers are closed and workers freed. NULL is fine. */
void runs_free(struct runs *runs);
struct batcher *runs_batcher(struct runs *runs);

/* Whether there is a copy of what leaves in the host's memory, from where it goes to peers whose
 * landing areas lie there. */
bool runs_have_host_copy(const struct runs *runs);
/* A place of the device's memory for a preflight's pattern, until it is given back. EXHAUSTED: as
 * many run as there are places. */
must_check enum status runs_preflight_take(struct runs *runs,
                                           struct put_preflight_source *ret_source);
void runs_preflight_give(struct runs *runs, const struct put_preflight_source *source);

void run_target_init(struct run_target *target);
void run_target_fini(struct run_target *target);
/* Nobody listens any more: its runs end without a word. */
void runs_target_lost(struct runs *runs, struct run_target *target);

/* Messages of the decode node. */
void runs_run(struct runs *runs, struct run_target *target, const Baton__ToPrefill__Run *run,
              bool draining);
void runs_ids(struct runs *runs, struct run_target *target, const Baton__IdsPart *part);
void runs_slots(struct runs *runs, struct run_target *target, const Baton__ToPrefill__Slots *slots);
void runs_cancel(struct runs *runs, struct run_target *target, uint64_t transfer);

/* Progress messages; every 100 ms or so. */
void runs_tick(struct runs *runs);
void runs_fail_all(struct runs *runs, Baton__FailCode code, const char *text);
uint32_t runs_n_live(const struct runs *runs);
void runs_stats(const struct runs *runs, struct runs_stats *ret_stats);
void runs_register(struct runs *runs, struct metrics *metrics);
/* Elements of the array that is open: every transfer, by its id, which owns its pages. */
void runs_debug_requests_json(const struct runs *runs, struct json_writer *w);
void runs_debug_json(const struct runs *runs, struct json_writer *w);

#endif
