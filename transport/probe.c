/* transport/probe.c - a put to ourselves, at start: does this UCX move bytes of this memory at all?
 *
 * That UCX registers device memory does not say that it moves it: the driver may lack what its
 * modules ask for. So one put goes the way that a peer's would: an endpoint to our own address, a
 * key that was packed and unpacked, a flush. All of it on the put thread, before there are peers;
 * it waits there, at most PROBE_LIMIT_NS, while nothing else has to be done. What arrived is the
 * caller's to look at: this side can't read device memory.
 */
#include "transport/region.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "transport/region_internal.h"
#include "transport/thread.h"

static const uint64_t probe_limit_ns = 5 * NS_PER_S;

/* An operation that is waited for. On the heap: one that never ends is left to UCX. */
struct probe_op {
    struct ucx_op op;
    bool done;
    enum status status;
};

struct probe_call {
    struct region *source, *landing;
    size_t bytes;
    struct region_probe *ret;
    enum status status;
    struct error *err;
};

static void op_done(struct ucx_op *op, enum status status)
{
    struct probe_op *probe = list_entry(op, struct probe_op, op);
    probe->done = true;
    probe->status = status;
}

static struct probe_op *op_new(void)
{
    struct probe_op *op = mem_zalloc(sizeof(*op));
    op->op.done = op_done;
    return op;
}

/* Frees it, unless UCX still has it. */
static enum status op_wait(struct transport *t, struct probe_op *op, enum status started)
{
    enum status status = started;
    if (started == STATUS_PENDING) {
        uint64_t begin_ns = loop_now_ns();
        while (!op->done && loop_now_ns() - begin_ns < probe_limit_ns) {
            ucx_progress(t->ucx);
        }
        if (!op->done) {
            return STATUS_STALLED;
        }
        status = op->status;
    }
    mem_free(op);
    return status;
}

static void ep_failed(void *cookie, const char *text)
{
    (void)text; /* the operations that it ends say so */
    *(bool *)cookie = true;
}

static enum status opened(const struct transport *t, enum envelope_kind kind, const uint8_t *frame,
                          size_t frame_bytes, uint8_t **ret_contents, struct error *err)
{
    size_t bytes,
        most = kind == ENVELOPE_RKEY ? TRANSPORT_MAX_RKEY_BYTES : TRANSPORT_MAX_ADDRESS_BYTES;
    return envelope_open(kind, ucx_version(t->ucx), frame, frame_bytes, most, ret_contents, &bytes,
                         err);
}

static enum status probe_put(struct transport *t, struct ucx_ep *ep, const struct ucx_rkey *rkey,
                             struct probe_call *call)
{
    struct probe_op *op = op_new();
    enum status status = op_wait(t, op, ucx_ep_flush(ep, &op->op)); /* connected */
    struct ucx_lanes lanes;
    if (!status && ucx_ep_lanes(ep, &lanes) == STATUS_OK) {
        snprintf(call->ret->lanes, sizeof(call->ret->lanes), "%.255s", lanes.text);
    }
    uint64_t begin_ns = loop_now_ns();
    if (!status) {
        op = op_new();
        status = op_wait(t, op,
                         ucx_ep_put(ep, call->source->memory, call->source->base, call->bytes, rkey,
                                    (uintptr_t)call->landing->base, &op->op));
    }
    if (!status) {
        op = op_new();
        status = op_wait(t, op, ucx_ep_flush(ep, &op->op));
    }
    call->ret->put_ns = loop_now_ns() - begin_ns;
    return status;
}

static void probe_on_thread(struct transport *t, void *arg)
{
    struct probe_call *call = arg;
    uint8_t *address = NULL, *key = NULL;
    struct ucx_ep *ep = NULL;
    struct ucx_rkey *rkey = NULL;
    static bool failed; /* outlives an endpoint that can't be closed */
    size_t address_bytes;
    const uint8_t *frame = ucx_address(t->ucx, &address_bytes);
    call->status = opened(t, ENVELOPE_ADDRESS, frame, address_bytes, &address, call->err);
    if (!call->status) {
        call->status = opened(t, ENVELOPE_RKEY, call->landing->rkey, call->landing->rkey_bytes,
                              &key, call->err);
    }
    if (!call->status) {
        call->status = ucx_ep_create(t->ucx, address, ep_failed, &failed, &ep, call->err);
    }
    if (!call->status) {
        call->status = ucx_rkey_unpack(ep, key, &rkey, call->err);
    }
    if (!call->status) {
        call->status = probe_put(t, ep, rkey, call);
        if (call->status) {
            error_set(call->err, call->status, "a put of %zu bytes to ourselves ended with %s",
                      call->bytes, status_name(call->status));
        }
    }
    ucx_rkey_free(rkey);
    if (ep) {
        struct probe_op *op = op_new();
        if (op_wait(t, op, ucx_ep_close(ep, &op->op)) != STATUS_STALLED) {
            ucx_ep_free(ep);
        }
    }
    mem_free(key);
    mem_free(address);
    t->now_ns = loop_now_ns(); /* this was no pause */
}

enum status region_probe(struct region *source, struct region *landing, size_t bytes,
                         struct region_probe *ret_probe, struct error *err)
{
    struct transport *t = landing->transport;
    struct region_probe probe = {.put_ns = 0};
    if (source->transport != t || bytes > source->bytes || bytes > landing->bytes ||
        !landing->rkey) {
        return error_set(err, STATUS_INVALID, "a probe of %zu bytes between these regions", bytes);
    }
    struct probe_call call = {
        .source = source, .landing = landing, .bytes = bytes, .ret = &probe, .err = err};
    thread_call(t, probe_on_thread, &call);
    if (!call.status) {
        *ret_probe = probe;
    }
    return call.status;
}
