/* transport/peer.h - peers and puts as the put thread sees them. Private to transport/.
 *
 * A struct is shared by two threads and each field has one owner, named below; what crosses goes
 * through jobs. The loop frees a put when its `done` was delivered and no cancel is on its way, and
 * a peer when `closed` was.
 */
#ifndef BATON_TRANSPORT_PEER_H
#define BATON_TRANSPORT_PEER_H

#include "transport/put.h"
#include "transport/region_internal.h"
#include "transport/thread.h"

enum peer_state { PEER_CONNECTING, PEER_UP, PEER_FAILED, PEER_CLOSING, PEER_CLOSED };
enum put_state { PUT_QUEUED, PUT_POSTING, PUT_FLUSHING, PUT_ENDED };

struct peer_region {
    uint32_t id;
    uint64_t base, bytes;
    uint8_t *rkey; /* opened envelope; put thread frees it once unpacked */
    struct ucx_rkey *unpacked;
};

struct preflight;

struct put_peer {
    struct transport *transport;
    struct list link; /* put thread: transport.peers */

    /* fixed at connect */
    char *name;
    uint8_t *address; /* opened envelope; put thread frees it once used */
    bool same_host, allow_slow;
    const struct put_peer_events *events;
    void *cookie;
    struct peer_region regions[PUT_MAX_REGIONS];
    uint32_t n_regions;

    /* jobs: connect and close go to the thread, the others to the loop, each at most once */
    struct job connect_job, close_job, up_job, failed_job, closed_job;

    /* loop thread */
    bool is_failed, is_closing;
    put_peer_closed_fn closed;
    void *closed_cookie;
    struct preflight *preflight;
    uint64_t put_cost_ns, bandwidth_bytes_per_s;

    /* written by the put thread before up_job, read by the loop after it */
    char lanes[PUT_MAX_LANES_TEXT];
    bool is_direct;

    /* written by the put thread before failed_job */
    enum status failure; /* STATUS_OK: has not failed */
    char failure_text[512];

    /* put thread */
    enum peer_state state;
    struct ucx_ep *ep;
    struct list waiting;  /* puts, in order: the first may be posting, the others are queued */
    struct list flushing; /* puts all of whose runs are posted or dropped */
    struct list posts;    /* operations of this peer that UCX has not completed */
    uint32_t n_posts;
    uint32_t n_flushed; /* puts of `flushing` that end at the next step */
    uint64_t bytes_in_flight;
    uint64_t since_ns; /* of the state */
    uint64_t last_completion_ns;
    bool connected;    /* the first flush completed */
    bool ep_closed;    /* or there never was one */
    bool close_wanted; /* the owner called put_peer_close, or the transport closes */
};

struct put {
    struct transport *transport;
    struct put_peer *peer; /* valid until the put ended */
    struct region *source;
    struct list link; /* put thread: waiting or flushing */
    struct job job;   /* submit, then done */
    struct job cancel_job;

    /* fixed at submit */
    put_done_fn done;
    void *cookie;

    /* loop thread */
    bool cancel_sent, cancel_back, delivered;

    /* put thread, until done is delivered */
    enum put_state state;
    bool cut;     /* cancelled before all was posted */
    bool flushed; /* UCX said so; it ends at the next step, if the peer has not failed by then */
    uint32_t n_outstanding; /* posts and the flush */
    uint32_t run_i;
    uint64_t run_offset;
    uint64_t first_post_ns;
    struct put_result result;

    uint32_t n_runs;
    struct put_plan_run {
        uint64_t source_offset, remote_address, bytes;
        uint32_t region_i;
    } runs[];
};

/* All below: put thread. */

/* Send a put's `done` and the receipt of its cancel to the loop (put.c). */
void put_return_done(struct put *put);
void put_return_cancel(struct put *put);

/* The jobs of put_peer_connect and put_submit, and put_cancel's. */
void peer_connect_run(struct job *job);
void peer_submit_run(struct job *job);
void peer_cancel_run(struct job *job);
void peer_close_run(struct job *job);

/* Wants the close; calling it again does nothing. */
void peer_close(struct put_peer *peer);

/* Moves the state as far as it goes now. False: closed and handed back to the loop. */
bool peer_step(struct put_peer *peer);

/* Posts up to the window and a budget of this turn; whether anything was. */
bool peer_post(struct put_peer *peer);
bool peer_can_post(const struct put_peer *peer);
bool peer_is_busy(const struct put_peer *peer);

/* This process was paused for so long until now: that much silence is not the peer's fault. */
void peer_excuse(struct put_peer *peer, uint64_t now_ns, uint64_t paused_ns);

/* Ends a peer whose close does not end. */
void peer_abandon(struct put_peer *peer);

/* The operations that never completed, once the worker is destroyed. */
void peer_orphans_free(struct transport *t);

#endif
