#ifndef BATON_RPC_CORE_H
#define BATON_RPC_CORE_H

#include <stddef.h>
#include <stdint.h>

#include "base/loop.h"
#include "base/metrics.h"
#include "base/status.h"

/*
 * gRPC of a process: the library's life and its one completion queue, which the loop asks itself.
 * Everything of rpc/ is called on the loop thread and every callback runs there, never from inside
 * the call that caused it. One a process.
 */

struct rpc_core;

/* How a call ended, in gRPC's own numbers, as they stand on the wire. */
enum rpc_code {
    RPC_OK = 0,
    RPC_CANCELLED = 1,
    RPC_UNKNOWN = 2,
    RPC_INVALID_ARGUMENT = 3,
    RPC_DEADLINE_EXCEEDED = 4,
    RPC_NOT_FOUND = 5,
    RPC_ALREADY_EXISTS = 6,
    RPC_PERMISSION_DENIED = 7,
    RPC_RESOURCE_EXHAUSTED = 8,
    RPC_FAILED_PRECONDITION = 9,
    RPC_ABORTED = 10,
    RPC_OUT_OF_RANGE = 11,
    RPC_UNIMPLEMENTED = 12,
    RPC_INTERNAL = 13,
    RPC_UNAVAILABLE = 14,
    RPC_DATA_LOSS = 15,
    RPC_UNAUTHENTICATED = 16,
};

/* "UNAVAILABLE"; "?" outside the set. */
const char *rpc_code_name(enum rpc_code code);

/*
 * What a code means here: OK; CANCELLED; DEADLINE; PEER_LOST for UNAVAILABLE; PEER_REFUSED for
 * those with which a living peer says no (UNAUTHENTICATED, PERMISSION_DENIED, FAILED_PRECONDITION,
 * ALREADY_EXISTS, INVALID_ARGUMENT); UNSUPPORTED for UNIMPLEMENTED; EXHAUSTED; NOT_FOUND;
 * CORRUPT for DATA_LOSS; PEER_LOST for the rest.
 */
enum status rpc_code_status(enum rpc_code code);

/*
 * How a connection is secured and watched; the same on both ends of a cluster. Strings are
 * borrowed for the call that takes them. Zero is a default everywhere.
 */
struct rpc_security {
    const char *token; /* of the cluster; NULL or "": none is sent, none is asked for */
    /* PEM texts, not file names. A server with cert and key speaks TLS only; with ca as well it
     * asks clients for certificates of that ca. A client with ca speaks TLS; cert and key are
     * what it shows. */
    const char *tls_ca, *tls_cert, *tls_key;
    const char *tls_name; /* client: the name in the server's certificate, if not its host */
};

struct rpc_limits {
    size_t max_message_bytes;      /* received or sent; 0: 8 MiB */
    uint64_t keepalive_ns;         /* silence before a ping; 0: 1 s */
    uint64_t keepalive_timeout_ns; /* silence after it; 0: 0.5 s */
    size_t queue_messages;         /* of one link waiting to be sent; 0: 8192 */
    size_t queue_bytes;            /* of the same; 0: 32 MiB */
};

/*
 * Starts gRPC and a thread beside it. Signals that the process handles must be blocked or handled
 * before: gRPC's threads inherit the mask; and no fork without exec may follow. STATUS_SYSTEM when
 * a thread or the mailbox can't be had.
 */
enum status must_check rpc_core_create(struct loop *loop, struct rpc_core **ret_core,
                                       struct error *err);

/*
 * Whether a listener of this process has stopped accepting for good, which gRPC does without a word
 * when it finds no descriptor left as it accepts. Links that stand go on. Only a new start mends
 * it.
 */
bool rpc_core_is_deaf(void);

/*
 * Ends gRPC: waits until everything that was cancelled has come back (milliseconds; links and calls
 * that were closed before go on ending until then), joins the thread, shuts the library down.
 * Servers, links and client calls must have been freed or closed. NULL is allowed.
 */
void rpc_core_free(struct rpc_core *core);

/* Calls, streams and servers that have not ended yet, closed ones included: 0 when all is quiet. */
size_t rpc_core_n_live(const struct rpc_core *core);

/*
 * What links and calls were given to say and gRPC has not yet written: queued messages, and writes
 * (messages, ends of streams) that have not completed. 0: all of it has left, in order, and a
 * link_finish now goes out behind it. A peer that does not read keeps it above 0.
 */
size_t rpc_core_n_unsent(const struct rpc_core *core);

/*
 * Registers baton_rpc_* of the whole process: messages and bytes each way, what waits in the queues
 * of all links, events that a thread has posted to the loop, live objects, refusals of full queues.
 * core must outlive the last metrics_write.
 */
void rpc_core_metrics_register(struct rpc_core *core, struct metrics *metrics);

#endif
