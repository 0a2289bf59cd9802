#ifndef BATON_RPC_STREAM_H
#define BATON_RPC_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <grpc/grpc.h>

#include "rpc/core.h"

/*
 * One gRPC call seen as a stream of messages each way: what links, unary calls and unary handlers
 * are made of. Internal to rpc/. Loop thread.
 *
 * A stream belongs to whoever made it until stream_drop, which is called exactly once and after
 * which no event runs; it then frees itself when gRPC has given back its batches. Events run from
 * the loop, never inside the call that caused them.
 */

struct stream;

/* Entries may be NULL, except message and closed. */
struct stream_events {
    void (*opened)(void *cookie); /* client: a server of ours took the stream */
    void (*message)(void *cookie, const uint8_t *bytes, size_t n_bytes);
    void (*ended)(void *cookie); /* server: the client half-closed, or is about to be lost */
    void (*closed)(void *cookie, enum rpc_code code, const char *text); /* last event */
    void (*writable)(void *cookie); /* the queue is half empty, after EXHAUSTED */
};

struct stream_counts {
    uint64_t messages_sent, bytes_sent, messages_received, bytes_received, n_exhausted;
    size_t queued_messages, queued_bytes, queued_messages_max;
};

struct stream_target {
    const char *host;
    uint16_t port;
    const char *method;
    const struct rpc_security *security;
    const struct rpc_limits *limits; /* filled */
    uint64_t deadline_ns;            /* of the whole stream, from now; 0: none */
};

/*
 * Dials on a connection of its own. Messages may be queued at once. Fails only for TLS texts that
 * gRPC can't use (STATUS_INVALID).
 */
enum status must_check stream_dial(struct rpc_core *core, const struct stream_target *target,
                                   const struct stream_events *events, void *cookie,
                                   struct stream **ret_stream, struct error *err);

/*
 * Takes a server's call. With RPC_OK it is accepted and messages wait until stream_attach; any
 * other code is the answer, and the stream is good for nothing but stream_drop. gone (may be NULL)
 * runs when the stream is freed, whoever holds it: the server counts its calls by that.
 */
struct stream *stream_accept(struct rpc_core *core, grpc_call *call,
                             const struct rpc_limits *limits, enum rpc_code code, const char *text,
                             void (*gone)(void *cookie), void *gone_cookie)
    __attribute__((returns_nonnull)) must_check;

void stream_attach(struct stream *stream, const struct stream_events *events, void *cookie);

/* As link_send. */
enum status must_check stream_send(struct stream *stream, const void *bytes, size_t n_bytes);

void stream_pause(struct stream *stream, bool paused);

/* After what is queued: a client half-closes (code and text are ignored); a server ends the stream
 * with them. A second call does nothing. */
void stream_finish(struct stream *stream, enum rpc_code code, const char *text);

/* Releases the stream. A server's that was finished still sends what is queued, for at most 2 s;
 * any other ends now. */
void stream_drop(struct stream *stream);

/* Address of the other end. */
const char *stream_peer(const struct stream *stream);

void stream_counts(const struct stream *stream, struct stream_counts *ret_counts);

#endif
