/* node/node.h - what a prefill and a decode node have in common: the process around an engine.
 *
 * Owns loop, service, metrics, probes, gRPC server, UCX, engine, identity and the links to routers.
 * A daemon fills struct node_config, calls node_open, adds its own services and gauges, calls
 * node_run, and node_close.
 *
 * Order matters and is fixed here: ports are bound before weights are loaded, UCX is opened before
 * the engine (which may allocate device memory), and routers hear of the node when it can work.
 *
 * Thread: loop.
 */
#ifndef BATON_NODE_NODE_H
#define BATON_NODE_NODE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/httpd.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "base/service.h"
#include "engine/engine.h"
#include "node/options.h"
#include "proto/cluster.pb-c.h"
#include "rpc/core.h"
#include "rpc/health.h"
#include "rpc/server.h"
#include "transport/transport.h"

struct node;
struct json_writer;

/* What the daemon does for the node; all on the loop thread. */
struct node_ops {
    /* Fills everything of the Status but progress, ready, draining and reason. */
    void (*status)(void *cookie, Baton__ToRouter__Status *status);
    /* The nodes of the cluster, as the routers list them. May be NULL. */
    void (*view)(void *cookie, const Baton__ToNode__Peer *const *nodes, size_t n_nodes);
    /* Something is being computed: a progress counter that stands still then means wedged. */
    bool (*busy)(void *cookie);
    /* Live requests or transfers: a drain ends when there are none. */
    uint32_t (*n_live)(void *cookie);
    /* The grace is over: end what is left with an error. */
    void (*fail_all)(void *cookie, const char *text);
    /* This process stood still: a new incarnation was drawn; drop all links. */
    void (*paused)(void *cookie);
    /* The rest of /debug/pages, as members of the object that is open. May be NULL. */
    void (*debug)(void *cookie, struct json_writer *w);
    /* Elements of the array of /debug/requests: what the owners in /debug/pages are. May be NULL.
     */
    void (*debug_requests)(void *cookie, struct json_writer *w);
};

/* Memory that the daemon takes itself once the node is open, for the sum at start. */
struct node_memory {
    const char *name, *option; /* "landing slots", "--landing-slots" */
    uint32_t n;
    bool is_tail; /* n of the largest tail, each on pages of its own; else n of a page */
};

struct node_config {
    const char *name; /* "baton-decode" */
    Baton__Role role;
    const struct node_options *options;
    uint32_t max_queued;
    const struct node_ops *ops;
    void *cookie;
    struct node_memory memory;
};

/* Errors are one line for a person. EXHAUSTED before anything large is allocated: the sum of what
 * engine and daemon take does not fit; the line says by how much and what would. */
must_check enum status node_open(const struct node_config *config, struct node **ret_node,
                                 struct error *err);
/* Starts the gRPC server, joins the routers, runs until stopped; the exit code. */
int node_run(struct node *node);
/* NULL is fine. The engine's sequences, peers and puts must be gone. */
void node_close(struct node *node);

struct loop *node_loop(struct node *node);
struct engine *node_engine(struct node *node);
struct transport *node_transport(struct node *node);
/* NULL: KV is handed over in host memory, by node_transport. */
struct node_kv *node_kv(struct node *node);
struct rpc_core *node_rpc(struct node *node);
struct rpc_server *node_server(struct node *node);
struct service *node_service(struct node *node);
struct metrics *node_metrics(struct node *node);
/* Ours, as it is now: its incarnation changes after a pause. */
const Baton__Hello *node_hello(const struct node *node);
/* For outgoing links. */
struct rpc_security node_security(const struct node *node);
/* Tells the routers now rather than at the next half second. */
void node_status_soon(struct node *node);
bool node_draining(const struct node *node);
/* The engine's counter as it stands: two a layer of a chunk or step, and one at its end; the sim
 * engine's has one for 5 ms. */
uint64_t node_progress(const struct node *node);
bool node_allows_slow_transport(const struct node *node);
/* Ends all puts and peers now, their callbacks run inside; regions are gone after it. */
void node_transport_close(struct node *node);

#endif
