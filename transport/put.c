/* transport/put.c - the loop's side of peers and puts: checks, plans, and hands over to the put
 * thread.
 *
 * Everything that a peer sent is checked here, before the put thread or UCX sees it: frames of
 * addresses and keys, ranges of regions, and each run of each put against both memories. The
 * invariant: a put that was accepted is inside its source and inside one remote region, run by run.
 */
#include "transport/put.h"

#include <assert.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "transport/peer.h"
#include "transport/preflight.h"

/* ---- peers ---- */

static void peer_up_deliver(struct job *job)
{
    struct put_peer *peer = list_entry(job, struct put_peer, up_job);
    if (!peer->is_closing && !peer->transport->closing) {
        peer->events->up(peer->cookie, peer);
    }
}

static void peer_failed_deliver(struct job *job)
{
    struct put_peer *peer = list_entry(job, struct put_peer, failed_job);
    peer->is_failed = true;
    if (!peer->is_closing && !peer->transport->closing) {
        peer->events->failed(peer->cookie, peer, peer->failure, peer->failure_text);
    }
}

static void peer_free(struct put_peer *peer)
{
    for (uint32_t i = 0; i < peer->n_regions; i++) {
        mem_free(peer->regions[i].rkey);
    }
    mem_free(peer->address);
    mem_free(peer->name);
    mem_free(peer);
}

static void peer_closed_deliver(struct job *job)
{
    struct put_peer *peer = list_entry(job, struct put_peer, closed_job);
    peer->transport->n_peers--;
    assert(peer->preflight == NULL);
    if (peer->closed != NULL) {
        peer->closed(peer->closed_cookie, peer);
    }
    peer_free(peer);
}

/* One region of the peer: range, identity, key. */
static enum status region_take(struct put_peer *peer, const struct put_remote_region *remote,
                               struct error *err)
{
    uint64_t end;
    if (remote->base == 0 || remote->bytes == 0 || remote->bytes > (uint64_t)1 << 46 ||
        __builtin_add_overflow(remote->base, remote->bytes, &end)) {
        return error_set(err, STATUS_INVALID, "region %u of peer %s has no legal range", remote->id,
                         peer->name);
    }
    for (uint32_t i = 0; i < peer->n_regions; i++) {
        const struct peer_region *other = &peer->regions[i];
        if (other->id == remote->id) {
            return error_set(err, STATUS_INVALID, "peer %s names region %u twice", peer->name,
                             remote->id);
        }
        if (remote->base < other->base + other->bytes && other->base < end) {
            return error_set(err, STATUS_INVALID, "regions %u and %u of peer %s overlap", other->id,
                             remote->id, peer->name);
        }
    }
    struct peer_region *region = &peer->regions[peer->n_regions];
    size_t bytes;
    enum status status =
        envelope_open(ENVELOPE_RKEY, ucx_version(peer->transport->ucx), remote->rkey,
                      remote->rkey_bytes, TRANSPORT_MAX_RKEY_BYTES, &region->rkey, &bytes, err);
    if (status != STATUS_OK) {
        return status;
    }
    region->id = remote->id;
    region->base = remote->base;
    region->bytes = remote->bytes;
    peer->n_regions++;
    return STATUS_OK;
}

static enum status peer_fill(struct put_peer *peer, const struct put_peer_options *options,
                             struct error *err)
{
    size_t bytes;
    enum status status = envelope_open(ENVELOPE_ADDRESS, ucx_version(peer->transport->ucx),
                                       options->address, options->address_bytes,
                                       TRANSPORT_MAX_ADDRESS_BYTES, &peer->address, &bytes, err);
    for (uint32_t i = 0; status == STATUS_OK && i < options->n_regions; i++) {
        status = region_take(peer, &options->regions[i], err);
    }
    return status;
}

enum status put_peer_connect(struct transport *t, const struct put_peer_options *options,
                             struct put_peer **ret_peer, struct error *err)
{
    if (options->n_regions > PUT_MAX_REGIONS) {
        return error_set(err, STATUS_INVALID, "%u regions of one peer: at most %d",
                         options->n_regions, PUT_MAX_REGIONS);
    }
    if (t->closing || t->n_peers >= TRANSPORT_MAX_PEERS) {
        return error_set(err, STATUS_EXHAUSTED, "%u peers are connected: at most %d", t->n_peers,
                         TRANSPORT_MAX_PEERS);
    }
    struct put_peer *peer = mem_zalloc(sizeof *peer);
    peer->transport = t;
    peer->name = mem_strdup(options->name != NULL ? options->name : "?");
    peer->same_host = options->same_host;
    peer->allow_slow = options->allow_slow;
    peer->events = options->events;
    peer->cookie = options->cookie;
    peer->connect_job.run = peer_connect_run;
    peer->close_job.run = peer_close_run;
    peer->up_job.run = peer_up_deliver;
    peer->failed_job.run = peer_failed_deliver;
    peer->closed_job.run = peer_closed_deliver;
    list_init(&peer->waiting);
    list_init(&peer->flushing);
    list_init(&peer->posts);
    enum status status = peer_fill(peer, options, err);
    if (status != STATUS_OK) {
        peer_free(peer);
        return status;
    }
    t->n_peers++;
    atomic_fetch_add(&t->counters.peers_connected, 1);
    thread_submit(t, &peer->connect_job);
    *ret_peer = peer;
    return STATUS_OK;
}

void put_peer_close(struct put_peer *peer, put_peer_closed_fn closed, void *cookie)
{
    assert(!peer->is_closing);
    peer->is_closing = true;
    peer->closed = closed;
    peer->closed_cookie = cookie;
    thread_submit(peer->transport, &peer->close_job);
}

const char *put_peer_lanes(const struct put_peer *peer)
{
    return peer->lanes;
}

bool put_peer_is_direct(const struct put_peer *peer)
{
    return peer->is_direct;
}

/* ---- puts ---- */

static void put_release(struct put *put)
{
    if (put->delivered && put->cancel_sent == put->cancel_back) {
        mem_free(put);
    }
}

static void put_done_deliver(struct job *job)
{
    struct put *put = list_entry(job, struct put, job);
    put->transport->n_puts--;
    put->source->n_puts--;
    put->done(put->cookie, &put->result);
    put->delivered = true;
    put_release(put);
}

static void put_cancel_deliver(struct job *job)
{
    struct put *put = list_entry(job, struct put, cancel_job);
    put->cancel_back = true;
    put_release(put);
}

/* Adds a checked run to the plan; adjacent ones become one. */
static enum status plan_add(struct put *put, const struct put_run *run, struct error *err)
{
    struct put_peer *peer = put->peer;
    uint32_t region_i = 0;
    while (region_i < peer->n_regions && peer->regions[region_i].id != run->remote_region) {
        region_i++;
    }
    if (region_i == peer->n_regions) {
        return error_set(err, STATUS_INVALID, "peer %s has no region %u", peer->name,
                         run->remote_region);
    }
    const struct peer_region *region = &peer->regions[region_i];
    if (run->bytes == 0 || run->bytes > put->source->bytes ||
        run->source_offset > put->source->bytes - run->bytes) {
        return error_set(err, STATUS_INVALID, "a run of %llu bytes at %llu of a source of %zu",
                         (unsigned long long)run->bytes, (unsigned long long)run->source_offset,
                         put->source->bytes);
    }
    if (run->bytes > region->bytes || run->remote_offset > region->bytes - run->bytes) {
        return error_set(err, STATUS_INVALID,
                         "a run of %llu bytes at %llu of region %u of peer %s, which has %llu",
                         (unsigned long long)run->bytes, (unsigned long long)run->remote_offset,
                         region->id, peer->name, (unsigned long long)region->bytes);
    }
    uint64_t remote_address = region->base + run->remote_offset;
    put->result.bytes += run->bytes;
    if (put->n_runs > 0) {
        struct put_plan_run *last = &put->runs[put->n_runs - 1];
        if (last->region_i == region_i && last->source_offset + last->bytes == run->source_offset &&
            last->remote_address + last->bytes == remote_address) {
            last->bytes += run->bytes;
            return STATUS_OK;
        }
    }
    put->runs[put->n_runs++] = (struct put_plan_run){
        .source_offset = run->source_offset,
        .remote_address = remote_address,
        .bytes = run->bytes,
        .region_i = region_i,
    };
    return STATUS_OK;
}

enum status put_submit(struct put_peer *peer, struct region *source, const struct put_run *runs,
                       uint32_t n_runs, put_done_fn done, void *cookie, struct put **ret_put,
                       struct error *err)
{
    struct transport *t = peer->transport;
    if (n_runs == 0 || n_runs > PUT_MAX_RUNS || source->transport != t) {
        return error_set(err, STATUS_INVALID, "a put of %u runs (1 to %d)%s", n_runs, PUT_MAX_RUNS,
                         source->transport != t ? " from another transport's source" : "");
    }
    if (peer->is_failed || peer->is_closing || t->closing) {
        return error_set(err, STATUS_PEER_LOST, "peer %s is %s", peer->name,
                         peer->is_closing ? "being closed" : "lost");
    }
    if (t->n_puts >= t->options.max_puts) {
        return error_set(err, STATUS_EXHAUSTED, "%u puts are alive", t->n_puts);
    }
    struct put *put = mem_try_array(1, sizeof *put + n_runs * sizeof put->runs[0]);
    if (put == NULL) {
        return error_set(err, STATUS_EXHAUSTED, "no memory for a put of %u runs", n_runs);
    }
    put->transport = t;
    put->peer = peer;
    put->source = source;
    put->done = done;
    put->cookie = cookie;
    for (uint32_t i = 0; i < n_runs; i++) {
        enum status status = plan_add(put, &runs[i], err);
        if (status != STATUS_OK) {
            mem_free(put);
            return status;
        }
    }
    put->job.run = peer_submit_run;
    put->cancel_job.run = peer_cancel_run;
    t->n_puts++;
    source->n_puts++;
    atomic_fetch_add(&t->counters.puts_submitted, 1);
    atomic_fetch_add(&t->counters.bytes_submitted, put->result.bytes);
    if (ret_put != NULL) {
        *ret_put = put;
    }
    thread_submit(t, &put->job);
    return STATUS_OK;
}

void put_cancel(struct put *put)
{
    if (!put->cancel_sent) {
        put->cancel_sent = true;
        thread_submit(put->transport, &put->cancel_job);
    }
}

void put_return_done(struct put *put)
{
    put->job.run = put_done_deliver;
    thread_reply(put->transport, &put->job);
}

void put_return_cancel(struct put *put)
{
    put->cancel_job.run = put_cancel_deliver;
    thread_reply(put->transport, &put->cancel_job);
}
