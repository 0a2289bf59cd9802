/* transport/peer.c - the life of a peer and of its puts on the put thread.
 *
 * Invariants. (1) A put ends exactly once, and not before UCX is done with its source bytes: its
 * operations have completed, or the endpoint's close has. (2) Callbacks of UCX only mark and count;
 * endpoints are closed and keys destroyed from peer_step alone, outside of ucp_worker_progress. (3)
 * After a failure nothing is posted any more. (4) An operation that completes inside the post call
 * takes the same path as one that completes later.
 *
 * What it refuses to believe: that a completed put means a live peer. Over shared memory puts into
 * a dead process succeed; only the caller's link knows.
 */
#include "transport/peer.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    MAX_POSTS = 1024,      /* operations outstanding per peer: bounds UCX's memory, not the wire */
    TURN_BUDGET = 2 << 20, /* bytes posted per peer and turn: a put over shared memory is a memcpy
                              inside the post call, and cancels and other peers wait meanwhile */
};

/* A forced close takes milliseconds. Requests that it leaves behind (1.13 leaves some) are given up
 * soon after. */
static const uint64_t leftover_limit_ns = 200 * NS_PER_MS;
static const uint64_t close_limit_ns = NS_PER_S;

enum post_kind { POST_CONNECT, POST_PUT, POST_FLUSH, POST_CLOSE };

/* One UCX operation. Owned by the peer's list, or by transport.orphans when it outlived the peer.
 */
struct post {
    struct ucx_op op;
    struct list link;
    struct put_peer *peer; /* NULL: orphan */
    struct put *put;       /* of POST_PUT and POST_FLUSH, until the put ended */
    enum post_kind kind;
    uint64_t bytes;
};

static void put_settle(struct put *put);

/* ---- failure marks ---- */

static void peer_mark_failed(struct put_peer *peer, enum status failure, const char *text)
{
    if (peer->failure == STATUS_OK && peer->state != PEER_CLOSING && peer->state != PEER_CLOSED) {
        peer->failure = failure;
        snprintf(peer->failure_text, sizeof peer->failure_text, "%s", text);
    }
}

static void peer_ep_failed(void *cookie, const char *text)
{
    peer_mark_failed(cookie, STATUS_PEER_LOST, text);
}

static enum status peer_end_status(const struct put_peer *peer)
{
    return peer->failure != STATUS_OK ? peer->failure : STATUS_CANCELLED;
}

/* ---- operations ---- */

static void post_done(struct ucx_op *op, enum status status);

static struct post *post_start(struct put_peer *peer, struct put *put, enum post_kind kind,
                               uint64_t bytes)
{
    struct post *post = mem_zalloc(sizeof *post);
    post->op.done = post_done;
    post->peer = peer;
    post->put = put;
    post->kind = kind;
    post->bytes = bytes;
    if (peer->n_posts == 0) {
        peer->last_completion_ns = peer->transport->now_ns;
    }
    peer->n_posts++;
    peer->bytes_in_flight += bytes;
    atomic_fetch_add(&peer->transport->counters.bytes_in_flight, bytes);
    if (put != NULL) {
        put->n_outstanding++;
    }
    list_push_back(&peer->posts, &post->link);
    return post;
}

/* Out of the peer's books. */
static void post_unlink(struct post *post)
{
    struct put_peer *peer = post->peer;
    list_remove(&post->link);
    peer->n_posts--;
    peer->bytes_in_flight -= post->bytes;
    atomic_fetch_sub(&peer->transport->counters.bytes_in_flight, post->bytes);
    if (post->put != NULL) {
        post->put->n_outstanding--;
    }
}

static void post_done(struct ucx_op *op, enum status status)
{
    struct post *post = list_entry(op, struct post, op);
    struct put_peer *peer = post->peer;
    struct put *put = post->put;
    if (peer == NULL) {
        list_remove(&post->link);
        mem_free(post);
        return;
    }
    post_unlink(post);
    peer->last_completion_ns = loop_now_ns();
    if (post->kind == POST_CLOSE) {
        peer->ep_closed = true;
    } else if (status != STATUS_OK) {
        peer_mark_failed(peer, STATUS_PEER_LOST, "a put or flush failed");
    } else if (post->kind == POST_CONNECT) {
        peer->connected = true;
    } else if (post->kind == POST_FLUSH) {
        put->flushed = true;
        peer->n_flushed++;
    }
    mem_free(post);
    if (put != NULL) {
        put_settle(put);
    }
}

/* Common end of the calls that start an operation: completed inside, comes later, or failed. */
static void post_started(struct post *post, enum status status)
{
    if (status != STATUS_PENDING) {
        post_done(&post->op, status);
    }
}

/* ---- puts ---- */

static void put_end(struct put *put, enum status status)
{
    struct put_peer *peer = put->peer;
    struct thread_counters *counters = &peer->transport->counters;
    assert(put->state != PUT_ENDED);
    list_remove(&put->link);
    peer->n_flushed -= put->flushed;
    put->state = PUT_ENDED;
    put->result.status = status;
    if (put->first_post_ns != 0) {
        put->result.span_ns = loop_now_ns() - put->first_post_ns;
    }
    if (status == STATUS_OK) {
        atomic_fetch_add(&counters->puts_done, 1);
        atomic_fetch_add(&counters->bytes_done, put->result.bytes);
    } else if (status == STATUS_CANCELLED) {
        atomic_fetch_add(&counters->puts_cancelled, 1);
    } else {
        atomic_fetch_add(&counters->puts_failed, 1);
    }
    put_return_done(put);
}

/* Ends the put of a closing peer if nothing of it is outstanding. A failed peer's puts end when its
 * close begins, not at once: the caller may be in the middle of posting this one. */
static void put_settle(struct put *put)
{
    struct put_peer *peer = put->peer;
    if (put->state != PUT_ENDED && put->n_outstanding == 0 && peer->state >= PEER_CLOSING) {
        put_end(put, peer_end_status(peer));
    }
}

/* Ends what was flushed in earlier turns, of a peer that lives. Not within the turn: as a
 * connection breaks, UCX completes flushes of puts whose bytes never arrived with UCS_OK, and only
 * then says that the endpoint has failed. */
static void peer_end_flushed(struct put_peer *peer)
{
    list_for_each_safe(p, &peer->flushing)
    {
        struct put *put = list_entry(p, struct put, link);
        if (put->flushed && put->n_outstanding == 0) {
            put_end(put, put->cut ? STATUS_CANCELLED : STATUS_OK);
        }
    }
}

/* All runs are posted, or what was left of them was dropped. */
static void put_flush(struct put *put)
{
    struct put_peer *peer = put->peer;
    list_remove(&put->link);
    list_push_back(&peer->flushing, &put->link);
    put->state = PUT_FLUSHING;
    struct post *post = post_start(peer, put, POST_FLUSH, 0);
    post_started(post, ucx_ep_flush(peer->ep, &post->op));
}

/* Posts the next piece of the put at the head of the queue; its length. */
static uint64_t put_post(struct put *put)
{
    struct put_peer *peer = put->peer;
    struct transport *t = peer->transport;
    const struct put_plan_run *run = &put->runs[put->run_i];
    uint64_t piece = run->bytes - put->run_offset;
    uint64_t most = t->options.window_bytes / 2;
    if (piece > most) {
        piece = most;
    }
    const uint8_t *source = put->source->base + run->source_offset + put->run_offset;
    uint64_t remote = run->remote_address + put->run_offset;
    put->run_offset += piece;
    if (put->run_offset == run->bytes) {
        put->run_i++;
        put->run_offset = 0;
    }
    put->state = PUT_POSTING;
    put->result.bytes_posted += piece;
    put->result.n_posts++;
    atomic_fetch_add(&t->counters.posts, 1);

    struct post *post = post_start(peer, put, POST_PUT, piece);
    uint64_t begin_ns = loop_now_ns();
    if (put->first_post_ns == 0) {
        put->first_post_ns = begin_ns;
    }
    enum status status = ucx_ep_put(peer->ep, put->source->memory, source, piece,
                                    peer->regions[run->region_i].unpacked, remote, &post->op);
    put->result.post_ns += loop_now_ns() - begin_ns;
    post_started(post, status);
    return piece;
}

bool peer_can_post(const struct put_peer *peer)
{
    return peer->state == PEER_UP && peer->failure == STATUS_OK && !peer->close_wanted &&
           !list_empty(&peer->waiting) && peer->n_posts < MAX_POSTS &&
           peer->bytes_in_flight < peer->transport->options.window_bytes;
}

bool peer_post(struct put_peer *peer)
{
    uint64_t window = peer->transport->options.window_bytes;
    uint64_t posted = 0;
    bool any = false;
    while (posted < TURN_BUDGET && peer_can_post(peer)) {
        struct put *put = list_entry(list_first(&peer->waiting), struct put, link);
        uint64_t next = put->runs[put->run_i].bytes - put->run_offset;
        if (peer->bytes_in_flight > 0 &&
            peer->bytes_in_flight + (next < window / 2 ? next : window / 2) > window) {
            break;
        }
        posted += put_post(put);
        any = true;
        if (put->state == PUT_POSTING && put->run_i == put->n_runs && peer->failure == STATUS_OK) {
            put_flush(put);
        }
    }
    return any;
}

void peer_submit_run(struct job *job)
{
    struct put *put = list_entry(job, struct put, job);
    struct put_peer *peer = put->peer;
    list_push_back(&peer->waiting, &put->link);
    if (peer->failure != STATUS_OK || peer->state >= PEER_FAILED || peer->close_wanted) {
        put_end(put, peer_end_status(peer));
    }
}

void peer_cancel_run(struct job *job)
{
    struct put *put = list_entry(job, struct put, cancel_job);
    if (put->state == PUT_QUEUED) {
        put_end(put, STATUS_CANCELLED);
    } else if (put->state == PUT_POSTING) {
        put->cut = true;
        struct put_peer *peer = put->peer;
        if (peer->state == PEER_UP && peer->failure == STATUS_OK) {
            put_flush(put);
        }
    }
    put_return_cancel(put); /* an ended put may have outlived its peer */
}

/* ---- states of a peer ---- */

static void peer_set_state(struct put_peer *peer, enum peer_state state)
{
    static const char *const names[] = {"connecting", "up", "failed", "closing", "closed"};
    static const uint8_t legal[] = {
        [PEER_CONNECTING] = 1 << PEER_UP | 1 << PEER_FAILED | 1 << PEER_CLOSING,
        [PEER_UP] = 1 << PEER_FAILED | 1 << PEER_CLOSING,
        [PEER_FAILED] = 1 << PEER_CLOSING,
        [PEER_CLOSING] = 1 << PEER_CLOSED,
        [PEER_CLOSED] = 0,
    };
    assert((legal[peer->state] & 1 << state) != 0);
    log_debug("transport", "peer %s: %s -> %s", peer->name, names[peer->state], names[state]);
    peer->state = state;
    peer->since_ns = peer->transport->now_ns;
}

void peer_connect_run(struct job *job)
{
    struct put_peer *peer = list_entry(job, struct put_peer, connect_job);
    struct transport *t = peer->transport;
    list_push_back(&t->peers, &peer->link);
    peer->since_ns = t->now_ns;
    peer->last_completion_ns = t->now_ns;
    struct error err;
    enum status status =
        ucx_ep_create(t->ucx, peer->address, peer_ep_failed, peer, &peer->ep, &err);
    for (uint32_t i = 0; status == STATUS_OK && i < peer->n_regions; i++) {
        struct peer_region *region = &peer->regions[i];
        status = ucx_rkey_unpack(peer->ep, region->rkey, &region->unpacked, &err);
    }
    if (status != STATUS_OK) {
        peer_mark_failed(peer, status, err.text);
        return;
    }
    struct post *post = post_start(peer, NULL, POST_CONNECT, 0);
    post_started(post, ucx_ep_flush(peer->ep, &post->op));
}

/* The endpoint is connected: is it the one that was wanted? */
static void peer_come_up(struct put_peer *peer)
{
    struct ucx_lanes lanes;
    if (ucx_ep_lanes(peer->ep, &lanes) != STATUS_OK) {
        peer_mark_failed(peer, STATUS_SYSTEM, "the lanes of the endpoint can't be read");
        return;
    }
    bool direct = peer->n_regions > 0 && lanes.beyond_tcp;
    for (uint32_t i = 0; i < peer->n_regions; i++) {
        const struct peer_region *region = &peer->regions[i];
        direct = direct && ucx_rkey_is_direct(region->unpacked, region->base);
    }
    snprintf(peer->lanes, sizeof peer->lanes, "%s%s", lanes.text, direct ? " (direct)" : "");
    peer->is_direct = direct;
    bool device = peer->transport->options.device_regions;
    if (!peer->allow_slow && (peer->same_host || device) && !lanes.beyond_tcp) {
        char text[sizeof peer->failure_text];
        snprintf(text, sizeof text,
                 "only %.64s between two processes of one host%s: give them a common /dev/shm, IPC "
                 "and PID namespace%s, or allow slow transports by name",
                 lanes.text, device ? " with device memory" : "",
                 device ? " and a UCX with cuda_ipc" : "");
        peer_mark_failed(peer, STATUS_UNSUPPORTED, text);
        return;
    }
    if (device && !lanes.device_capable && !peer->allow_slow) {
        peer_mark_failed(peer, STATUS_UNSUPPORTED,
                         "device memory without cuda_ipc or RDMA: install a UCX that has them, or "
                         "allow slow transports by name");
        return;
    }
    peer_set_state(peer, PEER_UP);
    log_info("transport", "peer %s is up over %s", peer->name, peer->lanes);
    thread_reply(peer->transport, &peer->up_job);
}

/* Ends the puts of which UCX holds nothing. */
static void peer_settle_puts(struct put_peer *peer)
{
    struct list *lists[] = {&peer->flushing, &peer->waiting};
    for (size_t i = 0; i < 2; i++) {
        list_for_each_safe(p, lists[i])
        {
            put_settle(list_entry(p, struct put, link));
        }
    }
}

static void peer_begin_close(struct put_peer *peer)
{
    peer_set_state(peer, PEER_CLOSING);
    peer_settle_puts(peer);
    if (peer->ep == NULL) {
        peer->ep_closed = true;
        return;
    }
    struct post *post = post_start(peer, NULL, POST_CLOSE, 0);
    post_started(post, ucx_ep_close(peer->ep, &post->op));
}

static void peer_fail(struct put_peer *peer)
{
    struct thread_counters *counters = &peer->transport->counters;
    peer_set_state(peer, PEER_FAILED);
    atomic_fetch_add(&counters->peers_failed, 1);
    if (peer->failure == STATUS_STALLED) {
        atomic_fetch_add(&counters->peers_stalled, 1);
    }
    log_warn("transport", "peer %s failed: %s (%s)", peer->name, peer->failure_text,
             status_name(peer->failure));
    thread_reply(peer->transport, &peer->failed_job);
    peer_begin_close(peer);
}

/* UCX may still complete what is left here: it must find the memory of the operation, and nobody
 * behind it. */
static void peer_orphan_posts(struct put_peer *peer)
{
    while (!list_empty(&peer->posts)) {
        struct post *post = list_entry(list_first(&peer->posts), struct post, link);
        struct put *put = post->put;
        post_unlink(post);
        post->peer = NULL;
        post->put = NULL;
        list_push_back(&peer->transport->orphans, &post->link);
        if (put != NULL) {
            put_settle(put);
        }
    }
}

static void peer_finish_close(struct put_peer *peer)
{
    struct transport *t = peer->transport;
    if (peer->n_posts > 0) {
        log_warn("transport", "peer %s: %u operations were left open by the close%s", peer->name,
                 peer->n_posts, peer->ep_closed ? "" : ", which has not ended");
    }
    bool keys_are_idle = peer->ep_closed;
    peer_orphan_posts(peer);
    peer_settle_puts(peer);
    assert(list_empty(&peer->waiting) && list_empty(&peer->flushing));
    for (uint32_t i = 0; i < peer->n_regions; i++) {
        struct peer_region *region = &peer->regions[i];
        if (keys_are_idle) {
            ucx_rkey_free(region->unpacked);
        }
        region->unpacked = NULL;
    }
    if (keys_are_idle) {
        ucx_ep_free(peer->ep);
    }
    peer->ep = NULL;
    peer_set_state(peer, PEER_CLOSED);
    atomic_fetch_add(&t->counters.peers_closed, 1);
}

/* Bytes outstanding and nothing completed: a stopped or cut-off peer, of which UCX itself never
 * hears. */
static bool peer_is_stalled(const struct put_peer *peer)
{
    const struct transport *t = peer->transport;
    return peer->n_posts > 0 && t->now_ns > peer->last_completion_ns &&
           t->now_ns - peer->last_completion_ns > t->options.stall_ns;
}

static void peer_watch(struct put_peer *peer)
{
    struct transport *t = peer->transport;
    if (peer->failure != STATUS_OK) {
        return;
    }
    if (peer->state == PEER_CONNECTING) {
        if (peer->connected) {
            peer_come_up(peer);
        } else if (t->now_ns - peer->since_ns > t->options.connect_timeout_ns) {
            peer_mark_failed(peer, STATUS_PEER_LOST, "no answer to the connection");
        }
    } else if (peer_is_stalled(peer)) {
        char text[96];
        snprintf(text, sizeof text, "%llu bytes outstanding and nothing completed for %llu ms",
                 (unsigned long long)peer->bytes_in_flight,
                 (unsigned long long)((t->now_ns - peer->last_completion_ns) / NS_PER_MS));
        peer_mark_failed(peer, STATUS_STALLED, text);
    }
}

bool peer_step(struct put_peer *peer)
{
    struct transport *t = peer->transport;
    if (peer->state <= PEER_UP) {
        peer_watch(peer);
        if (peer->failure != STATUS_OK) {
            peer_fail(peer);
        } else {
            if (peer->n_flushed > 0) {
                peer_end_flushed(peer);
            }
            if (peer->close_wanted) {
                peer_begin_close(peer);
            }
        }
    }
    if (peer->state == PEER_CLOSING) {
        uint64_t age_ns = t->now_ns - peer->since_ns;
        if (peer->ep_closed ? peer->n_posts == 0 || age_ns > leftover_limit_ns
                            : age_ns > close_limit_ns) {
            peer_finish_close(peer);
        }
    }
    if (peer->state == PEER_CLOSED && peer->close_wanted) {
        list_remove(&peer->link);
        thread_reply(t, &peer->closed_job);
        return false;
    }
    return true;
}

void peer_close_run(struct job *job)
{
    peer_close(list_entry(job, struct put_peer, close_job));
}

void peer_close(struct put_peer *peer)
{
    peer->close_wanted = true;
}

bool peer_is_busy(const struct put_peer *peer)
{
    return peer->n_posts > 0 || peer->n_flushed > 0 || peer->state == PEER_CONNECTING ||
           peer->state == PEER_CLOSING;
}

static void clock_stand_still(uint64_t *since_ns, uint64_t now_ns, uint64_t paused_ns)
{
    *since_ns = now_ns - *since_ns < paused_ns ? now_ns : *since_ns + paused_ns;
}

void peer_excuse(struct put_peer *peer, uint64_t now_ns, uint64_t paused_ns)
{
    clock_stand_still(&peer->last_completion_ns, now_ns, paused_ns);
    if (peer->state == PEER_CONNECTING) {
        clock_stand_still(&peer->since_ns, now_ns, paused_ns);
    }
}

void peer_abandon(struct put_peer *peer)
{
    if (peer->state <= PEER_UP) {
        peer_begin_close(peer);
    }
    if (peer->state == PEER_CLOSING) {
        peer_finish_close(peer);
    }
    list_remove(&peer->link);
    thread_reply(peer->transport, &peer->closed_job);
}

void peer_orphans_free(struct transport *t)
{
    list_for_each_safe(p, &t->orphans)
    {
        mem_free(list_entry(p, struct post, link));
    }
}
