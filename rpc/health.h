#ifndef BATON_RPC_HEALTH_H
#define BATON_RPC_HEALTH_H

#include <stdbool.h>

#include "rpc/server.h"

/*
 * grpc.health.v1.Health on a server: Check and Watch. Loop thread. A service that was never set is
 * NOT_FOUND for Check and SERVICE_UNKNOWN for Watch. "" is the process as a whole, not serving
 * until it is set.
 */

struct health;

/* Adds both methods; before rpc_server_start. */
struct health *health_create(struct rpc_server *server) __attribute__((returns_nonnull)) must_check;

/* Tells every watcher if that changes something. service is copied; at most 16 are kept, more are
 * our own bug. */
void health_set(struct health *health, const char *service, bool serving);

/* Ends the watchers. Before rpc_server_free. NULL is allowed. */
void health_free(struct health *health);

#endif
