/* See join.h. The view of each router is kept packed, as it came, and read again whenever any of
 * them changes: the union of all views is what a node believes.
 */
#include "node/join.h"

#include <string.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/net.h"
#include "rpc/hello.h"
#include "rpc/link.h"
#include "rpc/proto.h"

enum { STATUS_EVERY_MS = 500, VIEW_ARENA_BYTES = 16 << 20, MAX_PEERS = 4096 };

struct router {
    struct join *join;
    struct link *link;
    bool greeted, warned;
    struct buf view; /* packed ToNode of its last view */
};

struct join {
    struct join_options options;
    const struct join_events *events;
    void *cookie;
    struct router *routers;
    size_t n_routers;
    struct loop_timer *timer;
    struct buf packed;
    bool soon;
};

static void send_status(struct join *join)
{
    Baton__ToRouter__Status status = BATON__TO_ROUTER__STATUS__INIT;
    Baton__ToRouter message = BATON__TO_ROUTER__INIT;
    join->events->status(join->cookie, &status);
    message.what_case = BATON__TO_ROUTER__WHAT_STATUS;
    message.status = &status;
    proto_pack(&message.base, &join->packed);
    for (size_t i = 0; i < join->n_routers; i++) {
        struct router *router = &join->routers[i];
        if (router->greeted &&
            link_send_message(router->link, &message.base, join->packed.data, join->packed.bytes)) {
            log_debug("join", "%s: a status could not be sent", link_name(router->link));
        }
    }
}

static void on_timer(void *cookie)
{
    struct join *join = cookie;
    send_status(join);
    loop_timer_arm(join->timer, STATUS_EVERY_MS * NS_PER_MS);
}

static void send_soon(void *cookie)
{
    struct join *join = cookie;
    join->soon = false;
    send_status(join);
}

void join_status_soon(struct join *join)
{
    if (!join->soon) {
        join->soon = true;
        loop_defer(join->options.loop, send_soon, join);
    }
}

static void views_merge(struct join *join)
{
    struct arena *arena = arena_create(VIEW_ARENA_BYTES);
    const Baton__ToNode__Peer **nodes = arena_alloc(arena, MAX_PEERS * sizeof(*nodes));
    size_t n = 0;
    for (size_t i = 0; i < join->n_routers; i++) {
        ProtobufCMessage *unpacked;
        struct router *router = &join->routers[i];
        if (!router->view.bytes || proto_unpack(&baton__to_node__descriptor, router->view.data,
                                                router->view.bytes, arena, &unpacked, NULL)) {
            continue;
        }
        const Baton__ToNode__View *view = ((const Baton__ToNode *)unpacked)->view;
        for (size_t k = 0; k < view->n_peers && n < MAX_PEERS; k++) {
            nodes[n++] = view->peers[k];
        }
    }
    join->events->view(join->cookie, nodes, n);
    arena_free(arena);
}

static void on_opened(void *cookie, struct link *link)
{
    struct router *router = cookie;
    Baton__ToRouter message = BATON__TO_ROUTER__INIT;
    message.what_case = BATON__TO_ROUTER__WHAT_HELLO;
    message.hello = (Baton__Hello *)router->join->options.hello;
    proto_pack(&message.base, &router->join->packed);
    router->greeted = false;
    if (link_send_message(link, &message.base, router->join->packed.data,
                          router->join->packed.bytes)) {
        link_reset(link);
    }
}

static enum status on_hello(struct router *router, const Baton__Hello *hello, struct error *err)
{
    enum status status = hello_check(router->join->options.hello, hello, err);
    if (!status && hello->role != BATON__ROLE__ROLE_ROUTER) {
        status = error_set(err, STATUS_PEER_REFUSED, "%s is no router", hello->node_id);
    }
    if (!status) {
        router->greeted = true;
        router->warned = false;
        log_info("join", "joined router %s at %s", hello->node_id, link_name(router->link));
        join_status_soon(router->join);
    }
    return status;
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct router *router = cookie;
    struct error err = {""};
    struct arena *arena = arena_create(VIEW_ARENA_BYTES);
    ProtobufCMessage *unpacked;
    enum status status =
        proto_unpack(&baton__to_node__descriptor, bytes, n_bytes, arena, &unpacked, &err);
    if (!status) {
        const Baton__ToNode *message = (const Baton__ToNode *)unpacked;
        if (message->what_case == BATON__TO_NODE__WHAT_HELLO && !router->greeted) {
            status = on_hello(router, message->hello, &err);
        } else if (message->what_case == BATON__TO_NODE__WHAT_VIEW && router->greeted) {
            buf_clear(&router->view);
            buf_append(&router->view, bytes, n_bytes);
            views_merge(router->join);
        } else if (!router->greeted) {
            status = error_set(&err, STATUS_CORRUPT, "the first message is no hello");
        }
    }
    arena_free(arena);
    if (status) {
        log_warn("join", "%s: %s", link_name(link), err.text);
        router->greeted = false;
        link_reset(link);
    }
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct router *router = cookie;
    router->greeted = false;
    log_warn("join", "router %s is gone: %s", link_name(link),
             text[0] ? text : status_name(status));
}

static void on_failed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct router *router = cookie;
    if (!router->warned) {
        log_warn("join", "router %s does not answer (%s); trying on", link_name(link),
                 text[0] ? text : status_name(status));
        router->warned = true;
    }
}

static const struct link_events router_events = {
    .opened = on_opened,
    .message = on_message,
    .closed = on_closed,
    .failed = on_failed,
};

enum status join_create(const struct join_options *options, const struct join_events *events,
                        void *cookie, struct join **ret_join, struct error *err)
{
    struct join *join = mem_zalloc(sizeof(*join));
    enum status status = STATUS_OK;
    join->options = *options;
    join->events = events;
    join->cookie = cookie;
    join->routers = mem_array(options->routers->n ? options->routers->n : 1, sizeof(struct router));
    join->timer = loop_timer_create(options->loop, on_timer, join);
    for (size_t i = 0; !status && i < options->routers->n; i++) {
        struct router *router = &join->routers[i];
        struct net_address address;
        struct error why = {""};
        router->join = join;
        status = net_address_parse(options->routers->items[i], &address, &why);
        if (!status && (!address.has_port || !address.host[0])) {
            status = error_set(&why, STATUS_INVALID, "it needs a host and a port");
        }
        if (!status) {
            struct link_options link = {
                .host = address.host,
                .port = address.port,
                .method = "/baton.Cluster/Join",
                .security = options->security,
            };
            status = link_connect(options->rpc, &link, &router_events, router, &router->link, &why);
            join->n_routers += !status;
        }
        if (status) {
            error_set(err, status, "--router %s: %s", options->routers->items[i], why.text);
        }
    }
    if (status) {
        join_free(join);
        return status;
    }
    loop_timer_arm(join->timer, STATUS_EVERY_MS * NS_PER_MS);
    *ret_join = join;
    return STATUS_OK;
}

void join_free(struct join *join)
{
    if (!join) {
        return;
    }
    loop_defer_cancel(join->options.loop, send_soon, join);
    loop_timer_free(join->timer);
    for (size_t i = 0; i < join->n_routers; i++) {
        link_close(join->routers[i].link);
        buf_fini(&join->routers[i].view);
    }
    mem_free(join->routers);
    buf_fini(&join->packed);
    mem_free(join);
}

void join_reset(struct join *join)
{
    for (size_t i = 0; i < join->n_routers; i++) {
        join->routers[i].greeted = false;
        link_reset(join->routers[i].link);
    }
}

size_t join_n_joined(const struct join *join)
{
    size_t n = 0;
    for (size_t i = 0; i < join->n_routers; i++) {
        n += join->routers[i].greeted;
    }
    return n;
}
