#ifndef BATON_ROUTER_REGISTRY_H
#define BATON_ROUTER_REGISTRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "base/status.h"
#include "proto/cluster.pb-c.h"
#include "proto/decode.pb-c.h"
#include "rpc/hello.h"
#include "rpc/server.h"

/*
 * The nodes that are there: who joined over Cluster.Join, what each last said of itself, and the
 * Decode.Serve link to each decode node. Loop thread.
 *
 * A node is live from its hello until its Join stream ends or is silent for a lease; then it is
 * freed, after `lost` has run. A decode node can be given work while `serving`: its Serve link is
 * greeted, too. A node with work whose progress counter stands still for a lease is wedged: what
 * runs on it is taken away (`lost`), and nothing new is given to it until the counter moves.
 */

struct registry;

enum { REGISTRY_MAX_NODES = 1024, REGISTRY_MAX_PAIRS = 1024, REGISTRY_TEXT_BYTES = 160 };

struct node_ref {
    char id[HELLO_NODE_ID_MAX + 1]; /* "": none */
    uint64_t incarnation;
};

/* A decode node's view of one prefill node, from its last Status. */
struct node_pair {
    struct node_ref prefill;
    Baton__ToRouter__Pair__State state;
    char text[REGISTRY_TEXT_BYTES];
    uint64_t put_cost_ns, bandwidth_bytes_per_s;
    uint64_t since_ns; /* in this state, by our clock */
};

/* What the policy keeps of a node; zero at the start. Nobody else writes to it. */
struct node_load {
    /* Prompt tokens given to the node by this router and perhaps not in its last Status yet. */
    uint64_t unseen_old_tokens, unseen_new_tokens;
    uint64_t unseen_new_since_ns;
    uint32_t n_live;           /* attempts of ours that have not ended */
    uint64_t full_until_ns;    /* said QUEUE_FULL just now */
    uint64_t shunned_until_ns; /* failed just now */
    double leg_s;              /* mean duration of an attempt, 0: none ended yet */
};

/* One process of the cluster. Read it freely; only registry.c writes to it, but for `load` and
 * `legs`. */
struct node {
    struct registry *registry;
    struct list in_registry;
    struct node_ref ref;
    Baton__Role role;
    uint64_t joined_ns;

    /* from its hello */
    char model[HELLO_TEXT_MAX + 1], version[HELLO_TEXT_MAX + 1], build[HELLO_TEXT_MAX + 1];
    char grpc_host[HELLO_TEXT_MAX + 1], http_host[HELLO_TEXT_MAX + 1];
    uint16_t grpc_port, http_port;
    uint8_t fingerprint[HELLO_FINGERPRINT_MAX];
    size_t fingerprint_bytes;
    uint8_t boot_id[16];
    bool has_boot_id;
    uint32_t pid;
    uint32_t max_context_tokens, max_sequences, max_queued, max_samples, vocab_size, page_tokens;
    uint64_t page_bytes;

    /* from its last Status */
    uint64_t status_ns; /* when it came; the hello counts as one */
    bool has_status, ready, draining;
    uint32_t n_queued, n_running, pages_free, pages_total, slots_free, slots_total, sequences_free;
    uint64_t queued_tokens;
    float prefill_tokens_per_s, step_ms;
    Baton__ToRouter__Status__Unit unit;
    char reason[REGISTRY_TEXT_BYTES];
    uint64_t progress, progress_ns; /* when the counter last moved, or the device last was idle */
    struct node_pair *pairs;
    size_t n_pairs;

    bool wedged, serving, serve_dropped;
    const char *drop_text;
    struct link *join, *serve;
    char serve_text[REGISTRY_TEXT_BYTES]; /* why it is not serving */

    struct node_load load;
    struct list legs; /* of request.c: what runs on this decode node */
};

/* All on the loop thread; none may free the registry. */
struct registry_events {
    /* From the Serve link of a decode node, after its hello. The message lives for the call. */
    void (*message)(void *cookie, struct node *node, const Baton__FromDecode *message);
    /* What this router had running on the node is over. The node may be freed right after. */
    void (*lost)(void *cookie, struct node *node, const char *text);
    /* The Serve link takes messages again after STATUS_EXHAUSTED. */
    void (*writable)(void *cookie, struct node *node);
    /* A Status came and is taken. */
    void (*status)(void *cookie, struct node *node);
    /* Nodes, pairs, readiness: something that a choice may depend on. */
    void (*changed)(void *cookie);
};

struct registry_options {
    struct loop *loop;
    struct rpc_core *rpc;
    struct rpc_server *server; /* Cluster.Join is added to it */
    struct rpc_security security;
    const Baton__Hello *hello; /* the router's own, borrowed */
    uint32_t vocab_size;       /* of the tokenizer: a node of another one is refused */
    uint64_t lease_ns;
};

/* Before rpc_server_start. The events table and cookie are borrowed. */
struct registry *registry_create(const struct registry_options *options,
                                 const struct registry_events *events, void *cookie)
    __attribute__((returns_nonnull)) must_check;

/* Closes all links; no event runs. NULL is allowed. */
void registry_free(struct registry *registry);

/*
 * Sends on the Serve link. STATUS_EXHAUSTED: nothing was taken, `writable` follows.
 * STATUS_PEER_LOST: the link is not open, `lost` has run or follows. STATUS_TOO_LARGE.
 */
enum status must_check registry_send(struct node *node, const Baton__ToDecode *message);

/* Gives the Serve link up and dials anew, at the end of this turn: `lost` runs then. text: static.
 */
void registry_drop_serve(struct node *node, const char *text);

/* The head of the list of nodes, in order of joining; entries by list_entry(p, struct node,
 * in_registry). */
struct list *registry_nodes(struct registry *registry);

/* The live node of this reference, or NULL. */
struct node *registry_find(struct registry *registry, const char *id, uint64_t incarnation);

/* A decode node that may be given work: serving, ready, neither draining nor wedged. */
bool registry_node_usable(const struct node *node);

/* A prefill node whose own state allows work. */
bool registry_prefill_usable(const struct node *node);

/* "ready", "not_ready", "draining", "wedged", "connecting". */
const char *registry_node_state(const struct node *node);

/* The smallest max_context_tokens of the usable decode nodes; 0: there is none. */
uint32_t registry_max_context_tokens(struct registry *registry);

/*
 * Whether a request could be run now: a usable decode node, with local prefill or a ready pair as
 * far as these are allowed. If not, text says what is missing.
 */
bool registry_can_run(struct registry *registry, bool local_allowed, bool pairs_allowed,
                      char *ret_text, size_t capacity);

/* The member "workers": an array of objects. */
void registry_write_json(struct registry *registry, struct json_writer *w);

/* Gauges of nodes by role and state, messages received, refusals. */
void registry_metrics_register(struct registry *registry, struct metrics *metrics);

#endif
