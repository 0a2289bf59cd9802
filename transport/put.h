/* transport/put.h - peers and puts: post, flush, cancel, fail, close; the preflight of a pair.
 *
 * A peer is one endpoint to another process's worker and the keys of its landing regions. It
 * belongs to one incarnation of that process and is never revived: after a failure close it, wait
 * for its close, then connect a new one with the new address. States: connecting -> up -> failed ->
 * closing -> closed.
 *
 * A put moves runs of bytes from one source region into a peer's landing regions and ends with one
 * flush: `done` with STATUS_OK means that every byte of it is in the peer's memory, so the caller
 * may now tell the peer; a flush that ends as the peer fails counts for nothing. It does not mean
 * that the peer lives: puts into the shared memory of a dead process succeed.
 *
 * Thread: loop, for every call and every callback. A callback never runs inside the call that
 * caused it.
 */
#ifndef BATON_TRANSPORT_PUT_H
#define BATON_TRANSPORT_PUT_H

#include "transport/region.h"

struct put;
struct put_peer;

enum {
    PUT_MAX_REGIONS = 16,    /* landing regions of one peer */
    PUT_MAX_RUNS = 4096,     /* runs of one put, before merging */
    PUT_MAX_LANES_TEXT = 512 /* bytes of put_peer_lanes with its end */
};

/* A landing region of the peer as it came over the wire: hostile until put_peer_connect took it. */
struct put_remote_region {
    uint32_t id;         /* the peer's number for it, unique among its regions */
    uint64_t base;       /* its region_base */
    uint64_t bytes;      /* its region_bytes */
    const uint8_t *rkey; /* its region_rkey */
    size_t rkey_bytes;
};

/* What the peer tells its owner. Neither runs after put_peer_close was called. */
struct put_peer_events {
    /* The endpoint is connected and its lanes are acceptable; runs at most once, before any
     * `failed`. */
    void (*up)(void *cookie, struct put_peer *peer);
    /* The peer is lost: STATUS_PEER_LOST, STATUS_STALLED (bytes outstanding, nothing completed for
     * stall_ns) or STATUS_UNSUPPORTED (no acceptable lane). Runs at most once. Its puts end by
     * themselves, each through its own `done`, at the latest when the forced close that is already
     * under way has ended. `text` lives for the call. The owner still has to call put_peer_close.
     */
    void (*failed)(void *cookie, struct put_peer *peer, enum status status, const char *text);
};

struct put_peer_options {
    const char *name;       /* for logs; copied */
    const uint8_t *address; /* the peer's transport_worker_address; borrowed */
    size_t address_bytes;
    const struct put_remote_region *regions; /* borrowed */
    uint32_t n_regions;                      /* 0 .. PUT_MAX_REGIONS */
    bool same_host;  /* the caller compared host boot ids: then a peer that got only tcp is an error
                        ... */
    bool allow_slow; /* ... unless the operator allowed it by name */
    const struct put_peer_events *events; /* must outlive the peer */
    void *cookie;
};

/* Starts to connect. The other process needs no call of its own: it only has to run its transport.
 * Errors: STATUS_INVALID (lengths, overlap or duplicates of regions, null bases), STATUS_CORRUPT (a
 * damaged address or key), STATUS_UNSUPPORTED (the peer's UCX has another version),
 * STATUS_EXHAUSTED (too much queued). What UCX itself refuses comes as `failed`. Puts may be
 * submitted at once: they wait for up. */
must_check enum status put_peer_connect(struct transport *transport,
                                        const struct put_peer_options *options,
                                        struct put_peer **ret_peer, struct error *err);

/* Called with the peer's memory still valid for this call and gone after it. */
typedef void (*put_peer_closed_fn)(void *cookie, struct put_peer *peer);

/* Closes by force, whatever the state: nothing more is posted, each put that is alive ends
 * (STATUS_CANCELLED, or STATUS_PEER_LOST if the peer had failed), outstanding requests are
 * collected, keys destroyed, and then `closed` runs, after the last `done` of the peer's puts. Call
 * it once. Takes milliseconds, at most about a second; only after `closed` may the same node's next
 * incarnation be connected. `closed` may be NULL. */
void put_peer_close(struct put_peer *peer, put_peer_closed_fn closed, void *cookie);

/* Lanes and transports in use as one line of text, "" until up. Owned by the peer. */
const char *put_peer_lanes(const struct put_peer *peer);

/* Does every landing region of this peer map into our address space (shared memory, one copy)?
 * False until up. */
bool put_peer_is_direct(const struct put_peer *peer);

/* A piece of a put. Everything is checked against both regions. */
struct put_run {
    uint64_t source_offset; /* in the source region */
    uint32_t remote_region; /* put_remote_region.id */
    uint64_t remote_offset; /* in that region */
    uint64_t bytes;         /* > 0 */
};

/* How a put went; times are of the put thread's clock. */
struct put_result {
    enum status status;    /* STATUS_OK, STATUS_CANCELLED, STATUS_PEER_LOST, STATUS_STALLED,
                              STATUS_UNSUPPORTED */
    uint64_t bytes;        /* of all runs */
    uint64_t bytes_posted; /* of those handed to UCX: what may have reached the peer */
    uint32_t
        n_posts; /* UCX puts it became, after merging adjacent runs and cutting at the window */
    uint64_t post_ns; /* spent inside UCX's post calls */
    uint64_t span_ns; /* first post to completed flush */
};

/* The put has ended and its source bytes are the caller's again. `put` is gone after the call. */
typedef void (*put_done_fn)(void *cookie, const struct put_result *result);

/* Queues a put of n runs (1 .. PUT_MAX_RUNS, borrowed). Runs that are adjacent in both memories
 * become one. The order in which bytes of one put arrive is not defined; a peer's puts are posted
 * in the order of submission. The source bytes may not change until `done`, which runs exactly
 * once, in every case but an error here: STATUS_INVALID (bounds, unknown region, foreign source),
 * STATUS_EXHAUSTED (max_puts are alive), STATUS_PEER_LOST (the peer failed or is being closed).
 * ret_put may be NULL. */
must_check enum status put_submit(struct put_peer *peer, struct region *source,
                                  const struct put_run *runs, uint32_t n_runs, put_done_fn done,
                                  void *cookie, struct put **ret_put, struct error *err);

/* Asks a put to end early: what is not posted is dropped, what is posted is flushed, then `done`
 * runs with STATUS_CANCELLED, or with STATUS_OK if everything had been posted by then. Unlike other
 * cancels of this code base the callback still runs, for it is what gives the source bytes back.
 * Valid until `done` runs; a second call does nothing. */
void put_cancel(struct put *put);

/* ---- preflight ---- */

/* A granted slot of the peer that the preflight may write. */
struct put_slot {
    uint32_t remote_region;
    uint64_t remote_offset;
    uint64_t bytes; /* a multiple of 8, 4 KiB .. 16 MiB */
};

enum { PUT_PREFLIGHT_MAX_SLOTS = 64 };

struct put_preflight_result {
    enum status status;             /* as of a put; the rest holds only for STATUS_OK */
    const char *lanes;              /* put_peer_lanes */
    bool direct;                    /* put_peer_is_direct */
    uint64_t put_cost_ns;           /* of the posting thread, for one 4 KiB put; at least 1 */
    uint64_t bandwidth_bytes_per_s; /* of 16 MiB in slot-sized puts, flush included */
};

typedef void (*put_preflight_fn)(void *cookie, const struct put_preflight_result *result);

/* Fills the slots with pattern, times small puts and 16 MiB over the same slots, and leaves slot i
 * holding the pattern of put_pattern_seed(seed, i), for the peer to check. Allocates its own
 * source. Remembers cost and bandwidth for put_plan_pieces. `done` runs exactly once; closing the
 * peer ends it with STATUS_CANCELLED. Errors as put_submit, and STATUS_EXISTS when one is running
 * on this peer. */
must_check enum status put_preflight(struct put_peer *peer, const struct put_slot *slots,
                                     uint32_t n_slots, uint64_t seed, put_preflight_fn done,
                                     void *cookie, struct error *err);

/* Where a preflight's puts read from when that is no memory of its own: device memory. Nobody else
 * writes there before `done`, or before the transport is closed. */
struct put_preflight_source {
    struct region *region;
    uint64_t offset, bytes; /* as many as the largest slot */
    /* Copies host memory into that of the region. */
    enum status (*write)(void *cookie, void *dst, const void *src, size_t bytes);
    void *cookie;
};

/* The same from there; `source` is copied. */
must_check enum status put_preflight_from(struct put_peer *peer,
                                          const struct put_preflight_source *source,
                                          const struct put_slot *slots, uint32_t n_slots,
                                          uint64_t seed, put_preflight_fn done, void *cookie,
                                          struct error *err);

/* The seed of slot i, and word w (8 bytes, little-endian) of a pattern: splitmix64's output
 * function of seed + (w + 1) * 0x9e3779b97f4a7c15. */
uint64_t put_pattern_seed(uint64_t seed, uint32_t slot_i);
void put_pattern_fill(uint8_t *bytes, size_t n_bytes, uint64_t seed);

/* Does [bytes, +n_bytes) hold the pattern? Any thread. On false *ret_offset (may be NULL) is the
 * first wrong word. */
bool put_pattern_check(const uint8_t *bytes, size_t n_bytes, uint64_t seed, size_t *ret_offset);

/* Into how many pieces may `bytes` be cut, so that each can leave as soon as it is ready? As many
 * as keep posting (n_puts_per_piece puts a piece) below a tenth of the time the bytes take; 1 when
 * they take under a millisecond or the peer has not been measured; at most `max_pieces` (>= 1). */
uint32_t put_plan_pieces(const struct put_peer *peer, uint64_t bytes, uint32_t n_puts_per_piece,
                         uint32_t max_pieces);

/* The arithmetic of it, for tests and logs. */
uint32_t put_plan_pieces_of(uint64_t put_cost_ns, uint64_t bandwidth_bytes_per_s, uint64_t bytes,
                            uint32_t n_puts_per_piece, uint32_t max_pieces);

#endif
