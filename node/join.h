/* node/join.h - the links of a node to its routers.
 *
 * One link a router of the list, dialled for ever. On each: our hello, then Status every 500 ms and
 * whenever asked; the router's view comes back. A router that goes away keeps its last word until
 * it or another one says something new, so that a restart of a router tears no pair apart.
 *
 * Thread: loop.
 */
#ifndef BATON_NODE_JOIN_H
#define BATON_NODE_JOIN_H

#include <stddef.h>

#include "base/opts.h"
#include "proto/cluster.pb-c.h"
#include "rpc/core.h"

struct join;
struct loop;

struct join_options {
    struct loop *loop;
    struct rpc_core *rpc;
    struct rpc_security security;
    const struct opt_list *routers; /* "host:port" */
    const Baton__Hello *hello;      /* read whenever a link opens */
};

struct join_events {
    void (*status)(void *cookie, Baton__ToRouter__Status *status);
    void (*view)(void *cookie, const Baton__ToNode__Peer *const *nodes, size_t n_nodes);
};

/* INVALID: an address that can't be read, named. */
must_check enum status join_create(const struct join_options *options,
                                   const struct join_events *events, void *cookie,
                                   struct join **ret_join, struct error *err);
void join_free(struct join *join);
void join_status_soon(struct join *join);
/* Drops every link and dials anew: with a new incarnation. */
void join_reset(struct join *join);
/* Routers that accepted us. */
size_t join_n_joined(const struct join *join);

#endif
