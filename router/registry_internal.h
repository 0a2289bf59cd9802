#ifndef BATON_ROUTER_REGISTRY_INTERNAL_H
#define BATON_ROUTER_REGISTRY_INTERNAL_H

#include "base/buf.h"
#include "base/mem.h"
#include "router/registry.h"

/*
 * What registry.c (membership), registry_serve.c (Serve links) and registry_show.c (JSON, gauges)
 * share; nobody else includes it.
 */

enum { REGISTRY_SERVE_ARENA_BYTES = 256 << 20 };

struct registry {
    struct registry_options options;
    const struct registry_events *events;
    void *cookie;
    struct list nodes, joiners;
    size_t n_nodes, n_joiners;
    struct loop_timer *tick;
    uint64_t tick_ns;
    uint64_t generation;
    bool change_deferred, view_is_old;
    struct buf packed, view;
    struct arena *arena; /* of one message of a Serve link at a time */
    uint64_t n_lost, n_refused, n_serve_messages;
};

/* Tells `changed` at the end of the turn, and first all nodes the view if that changed. */
void registry_changed(struct registry *registry, bool view_too);

/* At each tick: a Serve link on which no hello came in time is dialled anew. */
void registry_serve_check(struct node *node);

/* Deferred by registry_drop_serve, to be cancelled with the registry. */
void registry_serve_drops(void *cookie);

/* Dials the node's Decode service. */
enum status must_check registry_serve_connect(struct node *node, struct error *err);

#endif
