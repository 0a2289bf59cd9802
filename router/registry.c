/*
 * Membership: see registry.h.
 *
 * Owns the joiners (streams that have not said hello yet, and the Join streams of nodes) and the
 * nodes. A node dies in one function, node_remove, whatever ended it; what ran on it is told first.
 * Everything a node says was written by another process: lengths, counts and numbers are bounded
 * here, once, so that the policy may calculate with them.
 */
#include "router/registry.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/net.h"
#include "router/registry_internal.h"
#include "rpc/proto.h"

enum {
    TICK_MS = 100,
    HELLO_TIMEOUT_MS = 3000,
    MESSAGE_ARENA_BYTES = 16 << 20,
    MAX_JOINERS = 2 * REGISTRY_MAX_NODES,
    RATE_MAX = 1000000000, /* tokens/s and the like beyond this are noise */
};

/* One Join stream. */
struct joiner {
    struct registry *registry;
    struct list in_registry;
    struct link *link;
    struct node *node; /* NULL until its hello was taken */
    uint64_t since_ns;
};

static void send_views(struct registry *registry);

/* ---- what may change a choice ---- */

static void changed_tell(void *cookie)
{
    struct registry *registry = cookie;
    registry->change_deferred = false;
    if (registry->view_is_old) {
        send_views(registry);
    }
    registry->events->changed(registry->cookie);
}

void registry_changed(struct registry *registry, bool view_too)
{
    registry->view_is_old = registry->view_is_old || view_too;
    if (!registry->change_deferred) {
        registry->change_deferred = true;
        loop_defer(registry->options.loop, changed_tell, registry);
    }
}

/* ---- view ---- */

static void pack_view(struct registry *registry)
{
    struct arena *arena = arena_create(0);
    Baton__ToNode message = BATON__TO_NODE__INIT;
    Baton__ToNode__View view = BATON__TO_NODE__VIEW__INIT;
    view.generation = ++registry->generation;
    view.peers = arena_alloc(arena, (registry->n_nodes + 1) * sizeof(*view.peers));
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        Baton__ToNode__Peer *peer = arena_alloc(arena, sizeof(*peer));
        Baton__NodeRef *ref = arena_alloc(arena, sizeof(*ref));
        Baton__Address *grpc = arena_alloc(arena, sizeof(*grpc));
        baton__to_node__peer__init(peer);
        baton__node_ref__init(ref);
        baton__address__init(grpc);
        ref->node_id = node->ref.id;
        ref->incarnation = node->ref.incarnation;
        grpc->host = node->grpc_host;
        grpc->port = node->grpc_port;
        peer->node = ref;
        peer->role = node->role;
        peer->grpc = grpc;
        peer->draining = node->draining;
        view.peers[view.n_peers++] = peer;
    }
    message.what_case = BATON__TO_NODE__WHAT_VIEW;
    message.view = &view;
    proto_pack(&message.base, &registry->view);
    arena_free(arena);
}

static void send_views(struct registry *registry)
{
    registry->view_is_old = false;
    pack_view(registry);
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        if (LINK_SEND_POINT(node->join, TO_NODE_VIEW, registry->view.data, registry->view.bytes)) {
            log_warn("registry", "%s: the view could not be sent", node->ref.id);
        }
    }
}

/* ---- the end of a node ---- */

static void joiner_free(struct joiner *joiner)
{
    link_close(joiner->link);
    list_remove(&joiner->in_registry);
    joiner->registry->n_joiners--;
    mem_free(joiner);
}

static void node_free(struct node *node)
{
    assert(list_empty(&node->legs));
    link_close(node->serve);
    list_remove(&node->in_registry);
    node->registry->n_nodes--;
    mem_free(node->pairs);
    mem_free(node);
}

/* The Join stream stays with its joiner, whom the caller ends. */
static void node_remove(struct node *node, const char *why)
{
    struct registry *registry = node->registry;
    log_warn("registry", "%s (%016" PRIx64 ") is gone: %s", node->ref.id, node->ref.incarnation,
             why);
    registry->n_lost++;
    node->serving = false;
    node->ready = false;
    registry->events->lost(registry->cookie, node, why);
    node_free(node);
    registry_changed(registry, true);
}

static void joiner_end(struct joiner *joiner, const char *why)
{
    struct node *node = joiner->node;
    joiner->node = NULL;
    if (node) {
        node->join = NULL;
        node_remove(node, why);
    }
    joiner_free(joiner);
}

static void joiner_refuse(struct joiner *joiner, const char *why)
{
    struct link *link = joiner->link;
    joiner->registry->n_refused++;
    joiner->link = NULL;
    link_refuse(link, why);
    joiner_end(joiner, why);
}

/* ---- hello ---- */

static void text_copy(char *to, size_t capacity, const char *from)
{
    snprintf(to, capacity, "%s", from ? from : "");
}

static struct joiner *joiner_of(struct registry *registry, const struct node *node)
{
    list_for_each(at, &registry->joiners)
    {
        struct joiner *joiner = list_entry(at, struct joiner, in_registry);
        if (joiner->node == node) {
            return joiner;
        }
    }
    return NULL;
}

static bool is_same_process(const struct node *node, const Baton__Hello *hello)
{
    return node->has_boot_id && hello->host_boot_id.len == sizeof(node->boot_id) &&
           memcmp(node->boot_id, hello->host_boot_id.data, sizeof(node->boot_id)) == 0 &&
           node->pid != 0 && node->pid == hello->pid;
}

/* A name that is taken: by a node that lives, or by one that is being replaced. */
static enum status name_claim(struct registry *registry, const Baton__Hello *hello,
                              struct error *err)
{
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        if (strcmp(node->ref.id, hello->node_id) != 0) {
            continue;
        }
        if (!is_same_process(node, hello)) {
            char theirs[NET_HOST_MAX + 16], ours[NET_HOST_MAX + 16];
            net_address_format(node->grpc_host, node->grpc_port, ours, sizeof(ours));
            net_address_format(hello->grpc->host, (uint16_t)hello->grpc->port, theirs,
                               sizeof(theirs));
            return error_set(err, STATUS_PEER_REFUSED,
                             "node_id %s is taken by the node at %s, which is alive; the one at "
                             "%s needs another --node-id",
                             hello->node_id, ours, theirs);
        }
        joiner_end(joiner_of(registry, node), "it joined again");
        return STATUS_OK;
    }
    return STATUS_OK;
}

/* An answer may be begun by one decode node and ended by another: they serve one checkpoint. The
 * first says which, until the last of it has left. (A prefill node of another one finds no pair.)
 */
static enum status checkpoint_claim(struct registry *registry, const Baton__Hello *hello,
                                    struct error *err)
{
    size_t n = hello->fingerprint.len;
    if (hello->role != BATON__ROLE__ROLE_DECODE || n == 0 || n > HELLO_FINGERPRINT_MAX) {
        return STATUS_OK;
    }
    list_for_each(at, &registry->nodes)
    {
        const struct node *node = list_entry(at, struct node, in_registry);
        if (node->role != BATON__ROLE__ROLE_DECODE || node->fingerprint_bytes == 0 ||
            (node->fingerprint_bytes == n &&
             memcmp(node->fingerprint, hello->fingerprint.data, n) == 0)) {
            continue;
        }
        char ours[2 * HELLO_FINGERPRINT_MAX + 1], theirs[2 * HELLO_FINGERPRINT_MAX + 1];
        hello_fingerprint_text(node->fingerprint, node->fingerprint_bytes, ours);
        hello_fingerprint_text(hello->fingerprint.data, n, theirs);
        return error_set(err, STATUS_PEER_REFUSED,
                         "page fingerprint differs: %s has %s, %s, which serves here, %s; the "
                         "decode nodes of a router must serve one checkpoint",
                         hello->node_id, theirs, node->ref.id, ours);
    }
    return STATUS_OK;
}

static enum status hello_judge(struct registry *registry, const Baton__Hello *hello,
                               struct error *err)
{
    enum status status = hello_check(registry->options.hello, hello, err);
    if (status) {
        return status;
    }
    if (hello->role != BATON__ROLE__ROLE_PREFILL && hello->role != BATON__ROLE__ROLE_DECODE) {
        return error_set(err, STATUS_PEER_REFUSED, "%s is neither a prefill nor a decode node",
                         hello->node_id);
    }
    if (!hello->limits || !hello->grpc || !hello->grpc->host || !hello->grpc->host[0] ||
        hello->grpc->port == 0 || hello->grpc->port > UINT16_MAX) {
        return error_set(err, STATUS_CORRUPT, "%s says no limits or no gRPC address",
                         hello->node_id);
    }
    if (hello->limits->vocab_size != registry->options.vocab_size) {
        return error_set(err, STATUS_PEER_REFUSED,
                         "vocabulary differs: %s has %u ids, the tokenizer of %s %u; both must be "
                         "of one checkpoint",
                         hello->node_id, hello->limits->vocab_size,
                         registry->options.hello->node_id, registry->options.vocab_size);
    }
    if (registry->n_nodes >= REGISTRY_MAX_NODES) {
        return error_set(err, STATUS_EXHAUSTED, "%d nodes have joined, which is the most",
                         REGISTRY_MAX_NODES);
    }
    status = name_claim(registry, hello, err);
    return status ? status : checkpoint_claim(registry, hello, err);
}

static struct node *node_create(struct registry *registry, const Baton__Hello *hello)
{
    struct node *node = mem_zalloc(sizeof(*node));
    node->registry = registry;
    list_init(&node->legs);
    text_copy(node->ref.id, sizeof(node->ref.id), hello->node_id);
    node->ref.incarnation = hello->incarnation;
    node->role = hello->role;
    text_copy(node->model, sizeof(node->model), hello->model);
    text_copy(node->version, sizeof(node->version), hello->version);
    text_copy(node->build, sizeof(node->build), hello->build);
    text_copy(node->grpc_host, sizeof(node->grpc_host), hello->grpc->host);
    node->grpc_port = (uint16_t)hello->grpc->port;
    if (hello->http) {
        text_copy(node->http_host, sizeof(node->http_host), hello->http->host);
        node->http_port = (uint16_t)hello->http->port;
    }
    if (hello->fingerprint.len > 0 && hello->fingerprint.len <= sizeof(node->fingerprint)) {
        memcpy(node->fingerprint, hello->fingerprint.data, hello->fingerprint.len);
        node->fingerprint_bytes = hello->fingerprint.len;
    }
    if (hello->host_boot_id.len == sizeof(node->boot_id)) {
        memcpy(node->boot_id, hello->host_boot_id.data, sizeof(node->boot_id));
        node->has_boot_id = true;
    }
    node->pid = hello->pid;
    node->max_context_tokens = hello->limits->max_context_tokens;
    node->max_sequences = hello->limits->max_sequences;
    node->max_queued = hello->limits->max_queued;
    node->max_samples = hello->limits->max_samples;
    node->vocab_size = hello->limits->vocab_size;
    node->page_tokens = hello->limits->page_tokens;
    node->page_bytes = hello->limits->page_bytes;
    node->joined_ns = node->status_ns = node->progress_ns = loop_now_ns();
    list_push_back(&registry->nodes, &node->in_registry);
    registry->n_nodes++;
    return node;
}

static void on_hello(struct joiner *joiner, const Baton__Hello *hello)
{
    struct registry *registry = joiner->registry;
    struct error err = {""};
    if (hello_judge(registry, hello, &err)) {
        joiner_refuse(joiner, err.text);
        return;
    }
    struct node *node = node_create(registry, hello);
    node->join = joiner->link;
    joiner->node = node;
    Baton__ToNode message = BATON__TO_NODE__INIT;
    message.what_case = BATON__TO_NODE__WHAT_HELLO;
    message.hello = (Baton__Hello *)registry->options.hello;
    proto_pack(&message.base, &registry->packed);
    if (link_send_message(node->join, &message.base, registry->packed.data,
                          registry->packed.bytes)) {
        joiner_end(joiner, "it left at once");
        return;
    }
    log_info("registry", "%s node %s (%016" PRIx64 ") joined: gRPC at %s port %u",
             node->role == BATON__ROLE__ROLE_DECODE ? "decode" : "prefill", node->ref.id,
             node->ref.incarnation, node->grpc_host, node->grpc_port);
    if (node->role == BATON__ROLE__ROLE_DECODE && registry_serve_connect(node, &err)) {
        joiner_refuse(joiner, err.text);
        return;
    }
    registry_changed(registry, true);
}

/* ---- status ---- */

static float rate(float value)
{
    return value > 0 && value < (float)RATE_MAX ? value : 0;
}

static void pairs_take(struct node *node, const Baton__ToRouter__Status *status)
{
    size_t n = status->n_pairs < REGISTRY_MAX_PAIRS ? status->n_pairs : REGISTRY_MAX_PAIRS;
    uint64_t now_ns = loop_now_ns();
    node->pairs = mem_realloc_array(node->pairs, n + 1, sizeof(*node->pairs));
    node->n_pairs = 0;
    for (size_t i = 0; i < n; i++) {
        const Baton__ToRouter__Pair *from = status->pairs[i];
        struct node_pair *pair = &node->pairs[node->n_pairs];
        if (!from->prefill || !from->prefill->node_id) {
            continue;
        }
        memset(pair, 0, sizeof(*pair));
        text_copy(pair->prefill.id, sizeof(pair->prefill.id), from->prefill->node_id);
        pair->prefill.incarnation = from->prefill->incarnation;
        pair->state = from->state;
        text_copy(pair->text, sizeof(pair->text), from->text);
        pair->put_cost_ns = from->put_cost_ns;
        pair->bandwidth_bytes_per_s = from->bandwidth_bytes_per_s;
        uint64_t age_ns =
            from->age_ms < UINT64_MAX / NS_PER_MS ? from->age_ms * NS_PER_MS : UINT64_MAX;
        pair->since_ns = now_ns > age_ns ? now_ns - age_ns : 0;
        node->n_pairs++;
    }
}

static size_t n_pairs_ready(const struct node *node)
{
    size_t n = 0;
    for (size_t i = 0; i < node->n_pairs; i++) {
        n += node->pairs[i].state == BATON__TO_ROUTER__PAIR__STATE__READY;
    }
    return n;
}

static void on_status(struct node *node, const Baton__ToRouter__Status *status)
{
    struct registry *registry = node->registry;
    bool was_ready = node->ready, was_draining = node->draining, was_wedged = node->wedged;
    size_t n_ready_before = n_pairs_ready(node);
    uint64_t now_ns = loop_now_ns();
    node->status_ns = now_ns;
    node->has_status = true;
    /* What a node without work last said is no time that its work has taken. */
    if (status->progress != node->progress ||
        status->unit == BATON__TO_ROUTER__STATUS__UNIT__IDLE ||
        node->unit == BATON__TO_ROUTER__STATUS__UNIT__IDLE) {
        node->progress = status->progress;
        node->progress_ns = now_ns;
        node->wedged = false;
    }
    node->ready = status->ready;
    node->draining = status->draining;
    text_copy(node->reason, sizeof(node->reason), status->reason);
    node->n_queued = status->n_queued;
    node->n_running = status->n_running;
    node->queued_tokens = status->queued_tokens < UINT32_MAX ? status->queued_tokens : UINT32_MAX;
    node->unit = status->unit;
    node->pages_free = status->pages_free;
    node->pages_total = status->pages_total;
    node->slots_free = status->slots_free;
    node->slots_total = status->slots_total;
    node->sequences_free = status->sequences_free;
    node->prefill_tokens_per_s = rate(status->prefill_tokens_per_s);
    node->step_ms = rate(status->step_ms);
    pairs_take(node, status);
    registry->events->status(registry->cookie, node);
    if (was_ready != node->ready || was_draining != node->draining || was_wedged != node->wedged ||
        n_ready_before != n_pairs_ready(node)) {
        if (was_draining != node->draining) {
            log_info("registry", "%s drains", node->ref.id);
        }
        registry_changed(registry, was_draining != node->draining);
    }
}

/* ---- the Join stream ---- */

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct joiner *joiner = cookie;
    struct error err = {""};
    struct arena *arena = arena_create(MESSAGE_ARENA_BYTES);
    ProtobufCMessage *unpacked;
    if (proto_unpack(&baton__to_router__descriptor, bytes, n_bytes, arena, &unpacked, &err)) {
        joiner_refuse(joiner, err.text);
        arena_free(arena);
        return;
    }
    const Baton__ToRouter *message = (const Baton__ToRouter *)unpacked;
    bool is_hello = message->what_case == BATON__TO_ROUTER__WHAT_HELLO;
    if (!joiner->node && is_hello) {
        on_hello(joiner, message->hello);
    } else if (!joiner->node || is_hello) {
        joiner_refuse(joiner, is_hello ? "a second hello" : "the first message is no hello");
    } else if (message->what_case == BATON__TO_ROUTER__WHAT_STATUS) {
        on_status(joiner->node, message->status);
    }
    arena_free(arena);
}

static void on_ended(void *cookie, struct link *link)
{
    joiner_end(cookie, "it left");
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    joiner_end(cookie, text[0] ? text : status_name(status));
}

static const struct link_events join_events = {
    .message = on_message,
    .ended = on_ended,
    .closed = on_closed,
};

static void on_stream(void *cookie, struct link *link)
{
    struct registry *registry = cookie;
    if (registry->n_joiners >= MAX_JOINERS) {
        link_refuse_code(link, RPC_RESOURCE_EXHAUSTED, "too many nodes are joining");
        return;
    }
    struct joiner *joiner = mem_zalloc(sizeof(*joiner));
    joiner->registry = registry;
    joiner->link = link;
    joiner->since_ns = loop_now_ns();
    list_push_back(&registry->joiners, &joiner->in_registry);
    registry->n_joiners++;
    link_attach(link, &join_events, joiner);
}

/* ---- leases ---- */

static void joiner_check(struct joiner *joiner, uint64_t now_ns)
{
    struct registry *registry = joiner->registry;
    struct node *node = joiner->node;
    if (!node) {
        if (now_ns - joiner->since_ns > HELLO_TIMEOUT_MS * NS_PER_MS) {
            joiner_refuse(joiner, "no hello came");
        }
        return;
    }
    if (now_ns - node->status_ns > registry->options.lease_ns) {
        char text[64];
        snprintf(text, sizeof(text), "silent for %.1f s",
                 (double)(now_ns - node->status_ns) * 1e-9);
        joiner_end(joiner, text);
        return;
    }
    registry_serve_check(node);
    if (!node->wedged && node->unit != BATON__TO_ROUTER__STATUS__UNIT__IDLE &&
        now_ns - node->progress_ns > registry->options.lease_ns) {
        log_warn("registry", "%s is wedged: it has work and made no progress for %.1f s",
                 node->ref.id, (double)(now_ns - node->progress_ns) * 1e-9);
        node->wedged = true;
        registry->events->lost(registry->cookie, node, "it has work and makes no progress");
        registry_changed(registry, false);
    }
}

static void on_tick(void *cookie)
{
    struct registry *registry = cookie;
    uint64_t now_ns = loop_now_ns();
    bool was_paused = now_ns - registry->tick_ns > registry->options.lease_ns / 2;
    registry->tick_ns = now_ns;
    list_for_each_safe(at, &registry->joiners)
    {
        struct joiner *joiner = list_entry(at, struct joiner, in_registry);
        if (!was_paused) {
            joiner_check(joiner, now_ns);
        } else if (joiner->node) {
            /* It was us who stood still: nobody's silence counts, its words may wait unread. */
            joiner->node->status_ns = joiner->node->progress_ns = now_ns;
        }
    }
    loop_timer_arm(registry->tick, TICK_MS * NS_PER_MS);
}

/* ---- reading ---- */

struct list *registry_nodes(struct registry *registry)
{
    return &registry->nodes;
}

struct node *registry_find(struct registry *registry, const char *id, uint64_t incarnation)
{
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        if (node->ref.incarnation == incarnation && strcmp(node->ref.id, id) == 0) {
            return node;
        }
    }
    return NULL;
}

bool registry_node_usable(const struct node *node)
{
    return node->role == BATON__ROLE__ROLE_DECODE && node->serving && node->ready &&
           !node->draining && !node->wedged;
}

bool registry_prefill_usable(const struct node *node)
{
    return node->role == BATON__ROLE__ROLE_PREFILL && node->ready && !node->draining &&
           !node->wedged;
}

uint32_t registry_max_context_tokens(struct registry *registry)
{
    uint32_t least = 0;
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        if (registry_node_usable(node) && (!least || node->max_context_tokens < least)) {
            least = node->max_context_tokens;
        }
    }
    return least;
}

/* ---- life ---- */

struct registry *registry_create(const struct registry_options *options,
                                 const struct registry_events *events, void *cookie)
{
    struct registry *registry = mem_zalloc(sizeof(*registry));
    registry->options = *options;
    registry->events = events;
    registry->cookie = cookie;
    list_init(&registry->nodes);
    list_init(&registry->joiners);
    registry->arena = arena_create(REGISTRY_SERVE_ARENA_BYTES);
    registry->tick = loop_timer_create(options->loop, on_tick, registry);
    registry->tick_ns = loop_now_ns();
    loop_timer_arm(registry->tick, TICK_MS * NS_PER_MS);
    rpc_server_add_stream(options->server, "/baton.Cluster/Join", on_stream, registry);
    return registry;
}

void registry_free(struct registry *registry)
{
    if (!registry) {
        return;
    }
    loop_timer_free(registry->tick);
    loop_defer_cancel(registry->options.loop, changed_tell, registry);
    loop_defer_cancel(registry->options.loop, registry_serve_drops, registry);
    list_for_each_safe(at, &registry->joiners)
    {
        struct joiner *joiner = list_entry(at, struct joiner, in_registry);
        if (joiner->node) {
            node_free(joiner->node);
        }
        joiner_free(joiner);
    }
    buf_fini(&registry->packed);
    buf_fini(&registry->view);
    arena_free(registry->arena);
    mem_free(registry);
}
