#include "rpc/health.h"

#include <assert.h>
#include <string.h>

#include "base/list.h"
#include "base/mem.h"
#include "proto/health.pb-c.h"
#include "rpc/proto.h"

/*
 * The standard health service. Check answers from the table; Watch is a link that gets one message
 * at once and one at each change. Both are open to callers without the token, so what they can make
 * us hold is bounded: the server caps their calls, and a request is read into a small arena.
 */

enum {
    MAX_SERVICES = 16,
    SERVICE_NAME_MAX = 256,
};

struct service {
    char *name;
    bool serving;
};

struct health {
    struct service services[MAX_SERVICES];
    size_t n_services;
    struct list watchers;
};

struct watcher {
    struct list node;
    struct health *health;
    struct link *link;
    char *service; /* NULL until the request came */
    Grpc__Health__V1__HealthCheckResponse__ServingStatus told;
};

static const struct service *service_find(const struct health *health, const char *name)
{
    for (size_t i = 0; i < health->n_services; i++) {
        if (strcmp(health->services[i].name, name) == 0) {
            return &health->services[i];
        }
    }
    return NULL;
}

/* The service asked for, for mem_free; NULL if the bytes are no request. */
static char *request_read(const uint8_t *bytes, size_t n_bytes)
{
    struct arena *arena = arena_create(0);
    ProtobufCMessage *message;
    char *name = NULL;
    if (n_bytes <= 2 * SERVICE_NAME_MAX &&
        proto_unpack(&grpc__health__v1__health_check_request__descriptor, bytes, n_bytes, arena,
                     &message, NULL) == STATUS_OK) {
        name = mem_strdup(((Grpc__Health__V1__HealthCheckRequest *)(void *)message)->service);
    }
    arena_free(arena);
    return name;
}

static void response_pack(Grpc__Health__V1__HealthCheckResponse__ServingStatus status,
                          struct buf *out)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = status;
    proto_pack(&response.base, out);
}

static void on_check(void *cookie, struct rpc_server_call *call, const uint8_t *bytes,
                     size_t n_bytes)
{
    struct health *health = cookie;
    char *name = request_read(bytes, n_bytes);
    if (name == NULL) {
        rpc_server_call_fail(call, RPC_INVALID_ARGUMENT, "not a HealthCheckRequest");
        return;
    }
    const struct service *service = service_find(health, name);
    mem_free(name);
    if (service == NULL) {
        rpc_server_call_fail(call, RPC_NOT_FOUND, "no such service here");
        return;
    }
    struct buf out = BUF_INIT;
    response_pack(service->serving
                      ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                      : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING,
                  &out);
    rpc_server_call_reply(call, out.data, out.bytes);
    buf_fini(&out);
}

static void watcher_free(struct watcher *watcher)
{
    list_remove(&watcher->node);
    link_close(watcher->link);
    mem_free(watcher->service);
    mem_free(watcher);
}

/* Tells the state if it is another than was told. */
static void watcher_tell(struct watcher *watcher)
{
    Grpc__Health__V1__HealthCheckResponse__ServingStatus status =
        GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    const struct service *service = service_find(watcher->health, watcher->service);
    if (service != NULL) {
        status = service->serving
                     ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
                     : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING;
    }
    if (status == watcher->told) {
        return;
    }
    struct buf out = BUF_INIT;
    response_pack(status, &out);
    /* A watcher whose queue is full has not read thousands of changes; it gets the next one. */
    if (link_send(watcher->link, out.data, out.bytes) == STATUS_OK) {
        watcher->told = status;
    }
    buf_fini(&out);
}

static void watch_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct watcher *watcher = cookie;
    if (watcher->service != NULL) {
        return;
    }
    watcher->service = request_read(bytes, n_bytes);
    if (watcher->service == NULL) {
        watcher->link = NULL;
        link_refuse_code(link, RPC_INVALID_ARGUMENT, "not a HealthCheckRequest");
        watcher_free(watcher);
        return;
    }
    watcher_tell(watcher);
}

static void watch_ended(void *cookie, struct link *link)
{
    struct watcher *watcher = cookie;
    if (watcher->service == NULL) {
        watcher->link = NULL;
        link_refuse_code(link, RPC_INVALID_ARGUMENT, "no HealthCheckRequest came");
        watcher_free(watcher);
    }
}

static void watch_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    watcher_free(cookie);
}

static const struct link_events watch_events = {
    .message = watch_message,
    .ended = watch_ended,
    .closed = watch_closed,
};

static void on_watch(void *cookie, struct link *link)
{
    struct health *health = cookie;
    struct watcher *watcher = mem_zalloc(sizeof *watcher);
    watcher->health = health;
    watcher->link = link;
    list_push_back(&health->watchers, &watcher->node);
    link_attach(link, &watch_events, watcher);
}

struct health *health_create(struct rpc_server *server)
{
    struct health *health = mem_zalloc(sizeof *health);
    list_init(&health->watchers);
    health_set(health, "", false);
    rpc_server_add_unary(server, "/grpc.health.v1.Health/Check", on_check, health);
    rpc_server_add_stream(server, "/grpc.health.v1.Health/Watch", on_watch, health);
    return health;
}

void health_set(struct health *health, const char *name, bool serving)
{
    struct service *service = (struct service *)service_find(health, name);
    if (service == NULL) {
        assert(health->n_services < MAX_SERVICES && strlen(name) <= SERVICE_NAME_MAX);
        service = &health->services[health->n_services++];
        service->name = mem_strdup(name);
    }
    service->serving = serving;
    list_for_each(node, &health->watchers)
    {
        struct watcher *watcher = list_entry(node, struct watcher, node);
        if (watcher->service != NULL) {
            watcher_tell(watcher);
        }
    }
}

void health_free(struct health *health)
{
    if (health == NULL) {
        return;
    }
    while (!list_empty(&health->watchers)) {
        watcher_free(list_entry(list_first(&health->watchers), struct watcher, node));
    }
    for (size_t i = 0; i < health->n_services; i++) {
        mem_free(health->services[i].name);
    }
    mem_free(health);
}
