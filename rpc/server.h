#ifndef BATON_RPC_SERVER_H
#define BATON_RPC_SERVER_H

#include <stddef.h>
#include <stdint.h>

#include "rpc/core.h"
#include "rpc/link.h"

/*
 * A gRPC server on one address. It is bound when created, so that a taken port is known before
 * weights load, and takes calls from rpc_server_start on. Loop thread.
 *
 * With a token set, every call must bear the metadata `authorization: Bearer TOKEN`; all others,
 * of methods that do not exist as well, are answered UNAUTHENTICATED. Only the health service is
 * exempt. Methods that nobody added are UNIMPLEMENTED.
 */

struct rpc_server;
struct rpc_server_call;

struct rpc_server_options {
    const char *host; /* name or literal, without brackets; NULL, "", "::" or "0.0.0.0": every
                         address, of both families where the system has them */
    uint16_t port;    /* 0: the kernel picks */
    struct rpc_security security;
    struct rpc_limits limits;
    size_t max_calls; /* at once, of all peers; more are RESOURCE_EXHAUSTED; 0: 1024 */
};

/*
 * Binds and listens; options is copied. STATUS_EXISTS when the port is taken (err names it, and its
 * holder if /proc shows it); STATUS_NOT_FOUND when the host does not resolve; STATUS_INVALID for
 * TLS texts that do not go together; STATUS_SYSTEM else.
 */
enum status must_check rpc_server_create(struct rpc_core *core,
                                         const struct rpc_server_options *options,
                                         struct rpc_server **ret_server, struct error *err);

/* The port bound. */
uint16_t rpc_server_port(const struct rpc_server *server);

/*
 * A new stream, open. The callback calls link_attach, or gives it back by link_refuse or
 * link_close; it owns the link. link_name(link) is the address that it came from.
 */
typedef void (*rpc_server_stream_fn)(void *cookie, struct link *link);

/*
 * A unary request; bytes live for the call. The handler answers exactly once, now or later, with
 * rpc_server_call_reply or rpc_server_call_fail; a client that left meanwhile makes the answer
 * void, not an error. Calls still unanswered when the server is freed are ended by it, and may not
 * be used after.
 */
typedef void (*rpc_server_unary_fn)(void *cookie, struct rpc_server_call *call,
                                    const uint8_t *bytes, size_t n_bytes);

/* Before rpc_server_start. method ("/baton.Decode/Serve") must be of static life; adding one twice
 * is our own bug. */
void rpc_server_add_stream(struct rpc_server *server, const char *method, rpc_server_stream_fn fn,
                           void *cookie);
void rpc_server_add_unary(struct rpc_server *server, const char *method, rpc_server_unary_fn fn,
                          void *cookie);

void rpc_server_start(struct rpc_server *server);

/* Takes the call. Copies bytes. */
void rpc_server_call_reply(struct rpc_server_call *call, const void *bytes, size_t n_bytes);
void rpc_server_call_fail(struct rpc_server_call *call, enum rpc_code code, const char *text);

/* Stops listening and taking calls; streams and calls that are open go on. */
void rpc_server_stop(struct rpc_server *server);

/*
 * Ends what is left and releases the server. Links handed out stay their owners' and see `closed`
 * unless they are closed first. NULL is allowed.
 */
void rpc_server_free(struct rpc_server *server);

struct rpc_server_stats {
    uint64_t n_calls; /* all that arrived */
    uint64_t n_unauthenticated, n_unimplemented, n_exhausted;
    size_t n_open; /* now */
};

void rpc_server_stats(const struct rpc_server *server, struct rpc_server_stats *ret_stats);

#endif
