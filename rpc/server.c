#include "rpc/server.h"

#include <arpa/inet.h>
#include <assert.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <grpc/slice.h>

#include "base/list.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/net.h"
#include "base/secret.h"
#include "rpc/accept.h"
#include "rpc/stream.h"
#include "rpc/wall.h"

/*
 * All calls come through grpc's unregistered path and are looked up here by name: one place that
 * asks for the token before it looks at anything else, and that answers methods nobody added (with
 * registered methods alone such a call would hang until its own deadline).
 *
 * Several requests for a call are armed at a time, for bursts; each is armed again before its call
 * is handled.
 *
 * Binding. gRPC shares ports by SO_REUSEPORT unless told not to, binds as many of a name's
 * addresses as it can, and says nothing of why it failed. So the address is first resolved and
 * bound by base/net, which names the holder of a taken port, and gRPC is given the numeric address
 * that worked.
 *
 * Life. The struct goes when its owner has freed it, gRPC has told the end of the server, and every
 * armed request and every accepted call has come back. gRPC waits with that end for the open calls,
 * which are cancelled when the server is freed.
 */

enum {
    N_ARMED = 16,
    MAX_METHODS = 16,
    REFUSED_TELL_MS = 10000,
    MAX_EXEMPT = 64, /* calls to the health service at once: no token guards it */
};

struct method {
    const char *name;
    rpc_server_stream_fn stream_fn;
    rpc_server_unary_fn unary_fn;
    void *cookie;
    bool exempt; /* no token is asked for */
};

struct request {
    struct rpc_op op;
    struct rpc_server *server;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
};

struct rpc_server {
    struct rpc_core *core;
    grpc_server *server;
    struct rpc_limits limits;
    char *token;
    size_t max_calls;
    uint16_t port;
    struct method methods[MAX_METHODS];
    size_t n_methods;
    size_t n_requests; /* armed */
    size_t n_streams;  /* accepted and not gone */
    size_t n_exempt;   /* of those, the unguarded */
    size_t n_holds;    /* functions that stand in the struct and call others */
    struct list unary_calls;
    struct rpc_op op_shutdown;
    bool started, stopping, stopped, freed;
    struct rpc_server_stats stats;
    uint64_t told_ns; /* when a refusal was last logged: they come in floods */
};

/* One accepted call; lives as long as its stream. */
struct accepted {
    struct rpc_server *server;
    bool exempt;
};

struct rpc_server_call {
    struct list node; /* in server->unary_calls until it is answered */
    struct rpc_server *server;
    struct stream *stream;
    const struct method *method;
    bool asked; /* the handler has it */
    bool gone;  /* the client left while the handler had it */
};

static void request_arm(struct rpc_server *server);

static void server_settle(struct rpc_server *server)
{
    if (!server->freed || !server->stopped || server->n_requests > 0 || server->n_streams > 0 ||
        server->n_holds > 0) {
        return;
    }
    grpc_server_destroy(server->server);
    if (server->token != NULL) {
        explicit_bzero(server->token, strlen(server->token));
        mem_free(server->token);
    }
    rpc_core_live_add(server->core, -1);
    mem_free(server);
}

static void on_stream_gone(void *cookie)
{
    struct accepted *accepted = cookie;
    struct rpc_server *server = accepted->server;
    server->n_streams--;
    server->n_exempt -= accepted->exempt;
    mem_free(accepted);
    server_settle(server);
}

/* ---- unary calls ---- */

static void unary_message(void *cookie, const uint8_t *bytes, size_t n_bytes)
{
    struct rpc_server_call *call = cookie;
    if (call->asked) {
        return; /* a second message on a unary call says nothing */
    }
    call->asked = true;
    call->method->unary_fn(call->method->cookie, call, bytes, n_bytes);
}

static void unary_end(struct rpc_server_call *call)
{
    list_remove(&call->node);
    stream_drop(call->stream);
    mem_free(call);
}

static void unary_ended(void *cookie)
{
    struct rpc_server_call *call = cookie;
    if (!call->asked) {
        stream_finish(call->stream, RPC_INTERNAL, "the call carried no message");
        unary_end(call);
    }
}

static void unary_closed(void *cookie, enum rpc_code code, const char *text)
{
    struct rpc_server_call *call = cookie;
    if (!call->asked) {
        unary_end(call);
        return;
    }
    call->gone = true; /* the handler still owes its answer, which then goes nowhere */
}

static const struct stream_events unary_events = {
    .message = unary_message,
    .ended = unary_ended,
    .closed = unary_closed,
};

void rpc_server_call_reply(struct rpc_server_call *call, const void *bytes, size_t n_bytes)
{
    enum status status = STATUS_OK;
    if (!call->gone) {
        status = stream_send(call->stream, bytes, n_bytes);
    }
    if (status == STATUS_TOO_LARGE) {
        stream_finish(call->stream, RPC_INTERNAL, "the answer is over the limit on messages");
    } else {
        stream_finish(call->stream, RPC_OK, NULL);
    }
    unary_end(call);
}

void rpc_server_call_fail(struct rpc_server_call *call, enum rpc_code code, const char *text)
{
    assert(code != RPC_OK);
    stream_finish(call->stream, code, text);
    unary_end(call);
}

/* ---- taking calls ---- */

static bool token_is_right(const struct rpc_server *server, const grpc_metadata_array *metadata)
{
    if (server->token == NULL) {
        return true;
    }
    static const char scheme[] = "Bearer ";
    enum { SCHEME_BYTES = sizeof scheme - 1 };
    for (size_t i = 0; i < metadata->count; i++) {
        const grpc_metadata *entry = &metadata->metadata[i];
        if (grpc_slice_str_cmp(entry->key, "authorization") != 0) {
            continue;
        }
        const uint8_t *value = GRPC_SLICE_START_PTR(entry->value);
        size_t bytes = GRPC_SLICE_LENGTH(entry->value);
        return bytes > SCHEME_BYTES && memcmp(value, scheme, SCHEME_BYTES) == 0 &&
               secret_equal(server->token, value + SCHEME_BYTES, bytes - SCHEME_BYTES);
    }
    return false;
}

static const struct method *method_find(const struct rpc_server *server, grpc_slice name)
{
    for (size_t i = 0; i < server->n_methods; i++) {
        if (grpc_slice_str_cmp(name, server->methods[i].name) == 0) {
            return &server->methods[i];
        }
    }
    return NULL;
}

/* Decides what becomes of a call. Takes it. */
static void call_take(struct rpc_server *server, grpc_call *grpc_call, grpc_slice name,
                      const grpc_metadata_array *metadata)
{
    server->stats.n_calls++;
    const struct method *method = method_find(server, name);
    bool exempt = method != NULL && method->exempt;
    enum rpc_code code = RPC_OK;
    const char *text = NULL;
    bool is_told = false;
    if (!exempt && !token_is_right(server, metadata)) {
        server->stats.n_unauthenticated++;
        is_told = loop_now_ns() - server->told_ns > REFUSED_TELL_MS * NS_PER_MS;
        server->told_ns = is_told ? loop_now_ns() : server->told_ns;
        code = RPC_UNAUTHENTICATED;
        text = "this cluster asks for its token: authorization: Bearer TOKEN";
    } else if (method == NULL) {
        server->stats.n_unimplemented++;
        code = RPC_UNIMPLEMENTED;
        text = "no such method here";
    } else if (server->stopping) {
        code = RPC_UNAVAILABLE;
        text = "the server is stopping";
    } else if (server->n_streams >= server->max_calls ||
               (exempt && server->n_exempt >= MAX_EXEMPT)) {
        server->stats.n_exhausted++;
        code = RPC_RESOURCE_EXHAUSTED;
        text = "too many calls at once";
    }
    struct accepted *accepted = mem_zalloc(sizeof *accepted);
    accepted->server = server;
    accepted->exempt = exempt;
    server->n_streams++;
    server->n_exempt += exempt;
    struct stream *stream = stream_accept(server->core, grpc_call, &server->limits, code, text,
                                          on_stream_gone, accepted);
    if (is_told) {
        log_warn("rpc", "%s asks without the cluster's token, or with another (%llu calls so far)",
                 stream_peer(stream), (unsigned long long)server->stats.n_unauthenticated);
    }
    if (code != RPC_OK) {
        log_debug("rpc", "call from %s answered %s", stream_peer(stream), rpc_code_name(code));
        stream_drop(stream);
    } else if (method->stream_fn != NULL) {
        method->stream_fn(method->cookie, link_accept(server->core, stream));
    } else {
        struct rpc_server_call *call = mem_zalloc(sizeof *call);
        call->server = server;
        call->stream = stream;
        call->method = method;
        list_push_back(&server->unary_calls, &call->node);
        stream_attach(stream, &unary_events, call);
    }
}

static void on_request(struct rpc_op *op, bool ok)
{
    struct request *request = (struct request *)(void *)op;
    struct rpc_server *server = request->server;
    server->n_requests--;
    if (ok) {
        if (!server->stopping) {
            request_arm(server);
        }
        server->n_holds++; /* the handler may free the server */
        call_take(server, request->call, request->details.method, &request->metadata);
        server->n_holds--;
    }
    grpc_call_details_destroy(&request->details);
    grpc_metadata_array_destroy(&request->metadata);
    mem_free(request);
    server_settle(server);
}

static void request_arm(struct rpc_server *server)
{
    struct request *request = mem_zalloc(sizeof *request);
    request->op.fn = on_request;
    request->server = server;
    grpc_call_details_init(&request->details);
    grpc_metadata_array_init(&request->metadata);
    grpc_completion_queue *queue = rpc_core_queue(server->core);
    grpc_call_error error =
        grpc_server_request_call(server->server, &request->call, &request->details,
                                 &request->metadata, queue, queue, &request->op);
    assert(error == GRPC_CALL_OK);
    (void)error;
    rpc_core_look(server->core);
    server->n_requests++;
}

static void on_shutdown(struct rpc_op *op, bool ok)
{
    struct rpc_server *server =
        (struct rpc_server *)(void *)((char *)op - offsetof(struct rpc_server, op_shutdown));
    server->stopped = true;
    server_settle(server);
}

/* ---- life ---- */

/* The numeric address, as gRPC wants it, at which host and port can be bound. */
static enum status address_probe(const char *host, uint16_t port, char *ret_address,
                                 size_t capacity, struct error *err)
{
    int fd;
    uint16_t bound;
    enum status status = net_listen(host, port, 1, &fd, &bound, err);
    if (status != STATUS_OK) {
        return status;
    }
    struct sockaddr_storage address;
    socklen_t bytes = sizeof address;
    int rc = getsockname(fd, (struct sockaddr *)&address, &bytes);
    close(fd);
    if (rc != 0) {
        return error_set(err, STATUS_SYSTEM, "can't read back the address of %s: %m", host);
    }
    if (address.ss_family == AF_INET6) {
        ((struct sockaddr_in6 *)&address)->sin6_port = htons(port);
    } else {
        ((struct sockaddr_in *)&address)->sin_port = htons(port);
    }
    net_sockaddr_format((struct sockaddr *)&address, bytes, ret_address, capacity);
    return STATUS_OK;
}

static grpc_server_credentials *credentials_make(const struct rpc_security *security)
{
    if (security->tls_cert == NULL || security->tls_cert[0] == '\0') {
        return grpc_insecure_server_credentials_create();
    }
    bool asks = security->tls_ca != NULL && security->tls_ca[0] != '\0';
    grpc_ssl_pem_key_cert_pair pair = {.private_key = security->tls_key,
                                       .cert_chain = security->tls_cert};
    return grpc_ssl_server_credentials_create_ex(
        asks ? security->tls_ca : NULL, &pair, 1,
        asks ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
             : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
        NULL);
}

enum status rpc_server_create(struct rpc_core *core, const struct rpc_server_options *options,
                              struct rpc_server **ret_server, struct error *err)
{
    enum status status = rpc_security_check(&options->security, true, err);
    if (status != STATUS_OK) {
        return status;
    }
    char address[NET_HOST_MAX + 16];
    status = address_probe(options->host, options->port, address, sizeof address, err);
    if (status != STATUS_OK) {
        return status;
    }
    grpc_server_credentials *credentials = credentials_make(&options->security);
    if (credentials == NULL) {
        return error_set(err, STATUS_INVALID, "grpc can't use the tls certificate and key");
    }
    struct rpc_server *server = mem_zalloc(sizeof *server);
    server->core = core;
    server->limits = rpc_limits_fill(&options->limits);
    server->max_calls = options->max_calls != 0 ? options->max_calls : 1024;
    if (options->security.token != NULL && options->security.token[0] != '\0') {
        server->token = mem_strdup(options->security.token);
    }
    list_init(&server->unary_calls);
    server->op_shutdown.fn = on_shutdown;

    struct rpc_args args;
    rpc_args_init(&args, &server->limits);
    rpc_args_int(&args, "grpc.so_reuseport", 0);
    rpc_args_int(&args, "grpc.max_concurrent_streams", 1024);
    /* peers ping each keepalive_ns: a server that takes that for abuse sends them away */
    rpc_args_int(&args, "grpc.http2.min_ping_interval_without_data_ms", 50);
    rpc_args_int(&args, "grpc.http2.max_ping_strikes", 0);
    server->server = grpc_server_create(&args.list, NULL);
    grpc_server_register_completion_queue(server->server, rpc_core_queue(core), NULL);
    int port = grpc_server_add_http2_port(server->server, address, credentials);
    grpc_server_credentials_release(credentials);
    if (port <= 0) {
        /* net_listen had it a moment ago: taken since, or the certificate is of no use */
        status = error_set(err, options->security.tls_cert != NULL ? STATUS_INVALID : STATUS_EXISTS,
                           "grpc can't listen on %s%s", address,
                           options->security.tls_cert != NULL
                               ? ": see whether certificate and key belong together"
                               : ": the port was taken just now");
        goto end_server;
    }
    server->port = (uint16_t)port;
    rpc_core_live_add(core, 1);
    *ret_server = server;
    return STATUS_OK;

end_server:
    rpc_core_live_add(core, 1);
    rpc_server_free(server);
    return status;
}

uint16_t rpc_server_port(const struct rpc_server *server)
{
    return server->port;
}

static struct method *method_add(struct rpc_server *server, const char *name, void *cookie)
{
    assert(!server->started && server->n_methods < MAX_METHODS);
    for (size_t i = 0; i < server->n_methods; i++) {
        assert(strcmp(server->methods[i].name, name) != 0);
    }
    static const char health[] = "/grpc.health.v1.Health/";
    struct method *method = &server->methods[server->n_methods++];
    method->name = name;
    method->cookie = cookie;
    method->exempt = strncmp(name, health, sizeof health - 1) == 0;
    return method;
}

void rpc_server_add_stream(struct rpc_server *server, const char *method, rpc_server_stream_fn fn,
                           void *cookie)
{
    method_add(server, method, cookie)->stream_fn = fn;
}

void rpc_server_add_unary(struct rpc_server *server, const char *method, rpc_server_unary_fn fn,
                          void *cookie)
{
    method_add(server, method, cookie)->unary_fn = fn;
}

void rpc_server_start(struct rpc_server *server)
{
    assert(!server->started);
    server->started = true;
    grpc_server_start(server->server);
    for (unsigned i = 0; i < N_ARMED; i++) {
        request_arm(server);
    }
}

void rpc_server_stop(struct rpc_server *server)
{
    if (!server->stopping) {
        server->stopping = true;
        grpc_server_shutdown_and_notify(server->server, rpc_core_queue(server->core),
                                        &server->op_shutdown);
        rpc_core_look(server->core);
    }
}

void rpc_server_free(struct rpc_server *server)
{
    if (server == NULL) {
        return;
    }
    rpc_server_stop(server);
    grpc_server_cancel_all_calls(server->server);
    rpc_core_look(server->core);
    server->n_holds++;
    while (!list_empty(&server->unary_calls)) {
        unary_end(list_entry(list_first(&server->unary_calls), struct rpc_server_call, node));
    }
    server->n_holds--;
    server->freed = true;
    server_settle(server);
}

void rpc_server_stats(const struct rpc_server *server, struct rpc_server_stats *ret_stats)
{
    *ret_stats = server->stats;
    ret_stats->n_open = server->n_streams;
}
