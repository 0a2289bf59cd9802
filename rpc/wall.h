#ifndef BATON_RPC_WALL_H
#define BATON_RPC_WALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>

#include "base/buf.h"
#include "rpc/core.h"

/*
 * What the files of rpc/ share behind the wall: gRPC's types end here. Loop thread.
 */

/*
 * The tag of one batch. Embedded in its owner, which may not go before fn has run. fn runs on the
 * loop thread; ok is what the completion queue said.
 */
struct rpc_op {
    void (*fn)(struct rpc_op *op, bool ok);
};

struct loop *rpc_core_loop(struct rpc_core *core);
grpc_completion_queue *rpc_core_queue(struct rpc_core *core);

/* Starts a batch with op as its tag. True: it completed at once; its fn runs at the end of the
 * loop's turn. A batch that breaks gRPC's rules is our own bug and ends the process. */
bool rpc_core_batch_start(struct rpc_core *core, grpc_call *call, const grpc_op *ops, size_t n_ops,
                          struct rpc_op *op);

/* After any other call into gRPC that may complete something. */
void rpc_core_look(struct rpc_core *core);

/* Counts objects that still have batches out: rpc_core_free waits for them. */
void rpc_core_live_add(struct rpc_core *core, int difference);

/* Sums over all streams of the process, ended ones included but in what is queued. */
struct rpc_totals {
    uint64_t messages_sent, bytes_sent, messages_received, bytes_received, n_exhausted;
    uint64_t queued_messages, queued_bytes;
    uint64_t writing; /* messages and ends that gRPC has not yet given back */
};

struct rpc_totals *rpc_core_totals(struct rpc_core *core);

/* Limits with the defaults filled in. */
struct rpc_limits rpc_limits_fill(const struct rpc_limits *limits);

/* A copy of security that owns its strings, and its end. */
void rpc_security_copy(struct rpc_security *to, const struct rpc_security *from);
void rpc_security_fini(struct rpc_security *security);

/* Do the TLS texts go together? */
enum status must_check rpc_security_check(const struct rpc_security *security, bool server,
                                          struct error *err);

/* "ipv4:1.2.3.4:5", "ipv6:[::1]:5" or "dns:///name:5"; for mem_free. */
char *rpc_target_make(const char *host, uint16_t port);

/* Channel arguments under construction; strings must outlive it. */
struct rpc_args {
    grpc_arg args[24];
    grpc_channel_args list;
};

void rpc_args_init(struct rpc_args *args, const struct rpc_limits *limits);
void rpc_args_int(struct rpc_args *args, const char *key, int value);
void rpc_args_string(struct rpc_args *args, const char *key, const char *value);

/* Replaces the content of out by the content of the byte buffer. */
void rpc_bytes_read(grpc_byte_buffer *from, struct buf *out);

#endif
