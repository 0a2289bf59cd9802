/*
 * The Decode.Serve link to each decode node: see registry.h. This end is the client, which speaks
 * first. The link dials on by itself for as long as the node is joined.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "router/registry_internal.h"
#include "rpc/link.h"
#include "rpc/proto.h"

enum { HELLO_TIMEOUT_MS = 3000 };

static void serve_lost(struct node *node, const char *text)
{
    struct registry *registry = node->registry;
    snprintf(node->serve_text, sizeof(node->serve_text), "%s", text);
    if (node->serving) {
        log_warn("registry", "%s: the link for requests is lost: %s", node->ref.id, text);
        node->serving = false;
        registry->events->lost(registry->cookie, node, text);
        registry_changed(registry, false);
    }
}

static void on_opened(void *cookie, struct link *link)
{
    struct node *node = cookie;
    struct registry *registry = node->registry;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    message.what_case = BATON__TO_DECODE__WHAT_HELLO;
    message.hello = (Baton__Hello *)registry->options.hello;
    if (registry_send(node, &message)) {
        link_reset(link);
    }
}

static void on_hello(struct node *node, const Baton__Hello *hello)
{
    struct registry *registry = node->registry;
    struct error err = {""};
    enum status status = hello_check(registry->options.hello, hello, &err);
    if (!status && (strcmp(hello->node_id, node->ref.id) != 0 ||
                    hello->incarnation != node->ref.incarnation)) {
        /* Another process has the address now; the one that joined will be missed soon. */
        status = error_set(&err, STATUS_PEER_REFUSED,
                           "at its address answers %s of incarnation %016" PRIx64, hello->node_id,
                           hello->incarnation);
    }
    if (status) {
        log_warn("registry", "%s: %s", node->ref.id, err.text);
        snprintf(node->serve_text, sizeof(node->serve_text), "%.*s",
                 (int)sizeof(node->serve_text) - 1, err.text);
        return;
    }
    node->serving = true;
    node->serve_text[0] = '\0';
    registry_changed(registry, false);
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct node *node = cookie;
    struct registry *registry = node->registry;
    struct error err = {""};
    ProtobufCMessage *unpacked;
    registry->n_serve_messages++;
    enum status status = proto_unpack(&baton__from_decode__descriptor, bytes, n_bytes,
                                      registry->arena, &unpacked, &err);
    if (!status) {
        const Baton__FromDecode *message = (const Baton__FromDecode *)unpacked;
        if (node->serving) {
            registry->events->message(registry->cookie, node, message);
        } else if (message->what_case == BATON__FROM_DECODE__WHAT_HELLO) {
            on_hello(node, message->hello);
        }
    }
    arena_reset(registry->arena);
    if (status) {
        serve_lost(node, err.text);
        link_reset(link);
    }
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    serve_lost(cookie, text[0] ? text : status_name(status));
}

static void on_failed(void *cookie, struct link *link, enum status status, const char *text)
{
    serve_lost(cookie, text[0] ? text : status_name(status));
}

static void on_writable(void *cookie, struct link *link)
{
    struct node *node = cookie;
    if (node->serving) {
        node->registry->events->writable(node->registry->cookie, node);
    }
}

static const struct link_events serve_events = {
    .opened = on_opened,
    .message = on_message,
    .closed = on_closed,
    .failed = on_failed,
    .writable = on_writable,
};

enum status registry_serve_connect(struct node *node, struct error *err)
{
    struct link_options options = {
        .host = node->grpc_host,
        .port = node->grpc_port,
        .method = "/baton.Decode/Serve",
        .name = node->ref.id,
        .security = node->registry->options.security,
    };
    snprintf(node->serve_text, sizeof(node->serve_text), "the link for requests is being opened");
    return link_connect(node->registry->options.rpc, &options, &serve_events, node, &node->serve,
                        err);
}

enum status registry_send(struct node *node, const Baton__ToDecode *message)
{
    struct buf *packed = &node->registry->packed;
    proto_pack(&message->base, packed);
    return link_send_message(node->serve, &message->base, packed->data, packed->bytes);
}

void registry_serve_check(struct node *node)
{
    if (node->serve && !node->serving && link_is_open(node->serve) &&
        link_idle_ns(node->serve) > HELLO_TIMEOUT_MS * NS_PER_MS) {
        serve_lost(node, node->serve_text[0] ? node->serve_text : "no hello came");
        link_reset(node->serve);
    }
}

void registry_serve_drops(void *cookie)
{
    struct registry *registry = cookie;
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        if (node->serve_dropped) {
            node->serve_dropped = false;
            link_reset(node->serve);
            serve_lost(node, node->drop_text);
        }
    }
}

void registry_drop_serve(struct node *node, const char *text)
{
    if (!node->serve_dropped) {
        node->serve_dropped = true;
        node->drop_text = text;
        loop_defer(node->registry->options.loop, registry_serve_drops, node->registry);
    }
}
