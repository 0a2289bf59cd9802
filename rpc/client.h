#ifndef BATON_RPC_CLIENT_H
#define BATON_RPC_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#include "rpc/core.h"

/*
 * One unary call to a peer, on a connection of its own: for Node.Drain and health, which are rare
 * and go to processes that may be gone. Loop thread.
 */

struct rpc_call;

struct rpc_call_options {
    const char *host; /* without brackets */
    uint16_t port;
    const char *method;
    uint64_t deadline_ns; /* from now, connecting included; must not be 0 */
    struct rpc_security security;
    struct rpc_limits limits;
};

/*
 * How it ended: STATUS_OK with the reply (which may be of 0 bytes), else as rpc_code_status, the
 * reply empty and the peer's or gRPC's words in text. All live for the call; `call` is gone after
 * it.
 */
typedef void (*rpc_call_fn)(void *cookie, enum status status, enum rpc_code code, const char *text,
                            const uint8_t *bytes, size_t n_bytes);

/* Copies options and bytes. done runs exactly once unless the call is cancelled. STATUS_INVALID as
 * link_connect; then done does not run. ret_call may be NULL. */
enum status must_check rpc_call_start(struct rpc_core *core, const struct rpc_call_options *options,
                                      const void *bytes, size_t n_bytes, rpc_call_fn done,
                                      void *cookie, struct rpc_call **ret_call, struct error *err);

/* Gives the call up; done never runs. Not after it ran. NULL is allowed. */
void rpc_call_cancel(struct rpc_call *call);

#endif
