#include "rpc/client.h"

#include "base/buf.h"
#include "base/mem.h"
#include "rpc/stream.h"
#include "rpc/wall.h"

/*
 * A unary call is a stream on which each side says one thing and then ends. The reply is kept until
 * the status comes, because only the status says whether it counts.
 */

struct rpc_call {
    struct stream *stream;
    rpc_call_fn done;
    void *cookie;
    struct buf reply;
    unsigned n_replies;
};

static void call_free(struct rpc_call *call)
{
    stream_drop(call->stream);
    buf_fini(&call->reply);
    mem_free(call);
}

static void on_message(void *cookie, const uint8_t *bytes, size_t n_bytes)
{
    struct rpc_call *call = cookie;
    if (call->n_replies++ == 0) {
        buf_append(&call->reply, bytes, n_bytes);
    }
}

static void on_closed(void *cookie, enum rpc_code code, const char *text)
{
    struct rpc_call *call = cookie;
    enum status status = rpc_code_status(code);
    if (status == STATUS_OK && call->n_replies != 1) {
        status = STATUS_CORRUPT;
        text = "the peer did not answer with exactly one message";
    }
    size_t n_bytes = status == STATUS_OK ? call->reply.bytes : 0;
    call->done(call->cookie, status, code, text,
               n_bytes > 0 ? call->reply.data : (const uint8_t *)"", n_bytes);
    call_free(call);
}

static const struct stream_events call_events = {.message = on_message, .closed = on_closed};

enum status rpc_call_start(struct rpc_core *core, const struct rpc_call_options *options,
                           const void *bytes, size_t n_bytes, rpc_call_fn done, void *cookie,
                           struct rpc_call **ret_call, struct error *err)
{
    if (options->host == NULL || options->host[0] == '\0' || options->port == 0 ||
        options->method == NULL || options->method[0] != '/' || options->deadline_ns == 0) {
        return error_set(err, STATUS_INVALID,
                         "a call needs a host, a port, a method and a deadline");
    }
    enum status status = rpc_security_check(&options->security, false, err);
    if (status != STATUS_OK) {
        return status;
    }
    struct rpc_security security;
    rpc_security_copy(&security, &options->security); /* "" becomes NULL */
    struct rpc_limits limits = rpc_limits_fill(&options->limits);
    struct stream_target target = {.host = options->host,
                                   .port = options->port,
                                   .method = options->method,
                                   .security = &security,
                                   .limits = &limits,
                                   .deadline_ns = options->deadline_ns};
    struct rpc_call *call = mem_zalloc(sizeof *call);
    call->done = done;
    call->cookie = cookie;
    buf_init(&call->reply);
    status = stream_dial(core, &target, &call_events, call, &call->stream, err);
    rpc_security_fini(&security);
    if (status != STATUS_OK) {
        goto free_call;
    }
    status = stream_send(call->stream, bytes, n_bytes);
    if (status != STATUS_OK) {
        error_set(err, status, "the message of %zu bytes is over the limit", n_bytes);
        goto drop_stream;
    }
    stream_finish(call->stream, RPC_OK, NULL);
    if (ret_call != NULL) {
        *ret_call = call;
    }
    return STATUS_OK;

drop_stream:
    stream_drop(call->stream);
free_call:
    mem_free(call);
    return status;
}

void rpc_call_cancel(struct rpc_call *call)
{
    if (call != NULL) {
        call_free(call);
    }
}
