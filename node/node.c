/* The process around an engine: see node.h.
 *
 * Owns what is opened here, in the order of node_open, and closes it in reverse. Progress: the
 * engine's counter moves with every layer and step on the compute thread; a timer carries it to the
 * service, which decides liveness, and to the routers, which decide about leases.
 */
#include "node/node.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/hostmem.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/net.h"
#include "engine/memory.h"
#include "node/join.h"
#include "node/kv.h"
#include "proto/node.pb-c.h"
#include "rpc/hello.h"
#include "rpc/proto.h"

enum {
    TICK_MS = 100,
    DRAIN_TICK_MS = 10,
    DEFAULT_LEASE_MS = 1500,
    REST_MS = 200,        /* of a drain behind the last work */
    LAST_WORDS_MS = 1000, /* and for what a peer does not take */
};

struct node {
    struct node_config config;
    struct loop *loop;
    struct service *service;
    struct metrics *metrics;
    struct httpd *httpd;
    struct rpc_core *rpc;
    struct rpc_server *server;
    struct health *health;
    struct transport *transport;
    struct node_kv *kv;
    struct engine *engine;
    struct join *join;
    struct loop_timer *tick;
    _Atomic uint64_t progress;
    uint64_t progress_seen;
    bool busy, joined, ticked, drained_told;
    bool held; /* drained by call, and not to end */
    Baton__Hello hello;
    Baton__Limits limits;
    Baton__Address grpc, http;
    char node_id[HELLO_NODE_ID_MAX + 1], advertise[NET_HOST_MAX], build[HELLO_TEXT_MAX];
    uint8_t boot_id[16];
    char *tls_ca, *tls_cert, *tls_key;
    const char *http_keys[1];
    struct drain_call {
        struct rpc_server_call *call;
        uint64_t due_ns;
    } drains[8];
    size_t n_drains;
    uint64_t worked_ns; /* when something was last done that peers are told of */
    uint64_t drain_ns;  /* when the drain began */
};

struct loop *node_loop(struct node *node)
{
    return node->loop;
}
struct engine *node_engine(struct node *node)
{
    return node->engine;
}
struct transport *node_transport(struct node *node)
{
    return node->transport;
}
struct node_kv *node_kv(struct node *node)
{
    return node->kv;
}
struct rpc_core *node_rpc(struct node *node)
{
    return node->rpc;
}
struct rpc_server *node_server(struct node *node)
{
    return node->server;
}
struct service *node_service(struct node *node)
{
    return node->service;
}
struct metrics *node_metrics(struct node *node)
{
    return node->metrics;
}
const Baton__Hello *node_hello(const struct node *node)
{
    return &node->hello;
}
bool node_draining(const struct node *node)
{
    return node->held || service_draining(node->service);
}

uint64_t node_progress(const struct node *node)
{
    return atomic_load_explicit(&node->progress, memory_order_relaxed);
}

bool node_allows_slow_transport(const struct node *node)
{
    return node->config.options->allow_slow_transport;
}

void node_transport_close(struct node *node)
{
    node_kv_close(node->kv);
    transport_close(node->transport);
    node->kv = NULL;
    node->transport = NULL;
}

struct rpc_security node_security(const struct node *node)
{
    return (struct rpc_security){
        .token = node->config.options->cluster_token,
        .tls_ca = node->tls_ca,
        .tls_cert = node->tls_cert,
        .tls_key = node->tls_key,
    };
}

void node_status_soon(struct node *node)
{
    if (node->join) {
        join_status_soon(node->join);
    }
}

/* ---- drain ---- */

/* Notes whether there was work since the last tick, of requests that have ended by now too. */
static void work_note(struct node *node)
{
    if (node->config.ops->n_live(node->config.cookie) > 0 ||
        node_progress(node) != node->progress_seen) {
        node->worked_ns = loop_now_ns();
    }
}

static void drains_answer(struct node *node)
{
    uint32_t n_left = node->config.ops->n_live(node->config.cookie);
    uint64_t now_ns = loop_now_ns();
    for (size_t i = 0; i < node->n_drains;) {
        struct drain_call *drain = &node->drains[i];
        if (n_left > 0 && now_ns < drain->due_ns) {
            i++;
            continue;
        }
        struct buf packed = BUF_INIT;
        Baton__DrainReply reply = BATON__DRAIN_REPLY__INIT;
        reply.drained = n_left == 0;
        reply.n_left = n_left;
        proto_pack(&reply.base, &packed);
        rpc_server_call_reply(drain->call, packed.data, packed.bytes);
        buf_fini(&packed);
        *drain = node->drains[--node->n_drains];
        node->worked_ns = now_ns;
    }
    /* The end of the last request, like the answer to a drain, must leave this process before its
     * links close: what is still queued then is dropped. And routers see the end of this node on
     * its join link, which they may read before the link that bore the last words: behind work
     * there is a rest. */
    bool rested = now_ns - node->worked_ns > REST_MS * NS_PER_MS;
    uint64_t since_ns = node->worked_ns > node->drain_ns ? node->worked_ns : node->drain_ns;
    bool said = rpc_core_n_unsent(node->rpc) == 0 || now_ns - since_ns > LAST_WORDS_MS * NS_PER_MS;
    if (n_left == 0 && rested && said && service_draining(node->service) && !node->drained_told) {
        node->drained_told = true;
        service_drained(node->service);
    }
}

static void on_drain(void *cookie)
{
    struct node *node = cookie;
    log_info("node", "draining: %" PRIu32 " left", node->config.ops->n_live(node->config.cookie));
    health_set(node->health, "", false);
    node_status_soon(node);
    work_note(node);
    node->drain_ns = loop_now_ns();
    /* not at once: routers hear first that this node drains */
    loop_timer_arm(node->tick, DRAIN_TICK_MS * NS_PER_MS);
}

static void on_drain_call(void *cookie, struct rpc_server_call *call, const uint8_t *bytes,
                          size_t n_bytes)
{
    struct node *node = cookie;
    struct arena *arena = arena_create(4096);
    ProtobufCMessage *unpacked;
    struct error err;
    if (proto_unpack(&baton__drain_request__descriptor, bytes, n_bytes, arena, &unpacked, &err)) {
        rpc_server_call_fail(call, RPC_INVALID_ARGUMENT, err.text);
    } else if (node->n_drains == sizeof(node->drains) / sizeof(node->drains[0])) {
        rpc_server_call_fail(call, RPC_RESOURCE_EXHAUSTED, "too many drains at once");
    } else {
        const Baton__DrainRequest *request = (const Baton__DrainRequest *)unpacked;
        uint64_t wait_ns = request->deadline_ms ? request->deadline_ms * NS_PER_MS
                                                : node->config.options->grace_ns;
        node->drains[node->n_drains++] = (struct drain_call){call, loop_now_ns() + wait_ns};
        if (request->stop) {
            service_drain(node->service);
        } else if (!node_draining(node)) {
            node->held = true;
            service_reason_set(node->service, "draining", "a Drain call has stopped new work");
            on_drain(node);
        }
    }
    arena_free(arena);
}

static void on_grace_end(void *cookie)
{
    struct node *node = cookie;
    node->config.ops->fail_all(node->config.cookie, "this node is being stopped");
}

static void on_pause(void *cookie, uint64_t gap_ns)
{
    struct node *node = cookie;
    struct error err;
    uint64_t incarnation;
    /* Loading weights is no pause: nobody knew this node yet. */
    if (!node->ticked || gap_ns < node->config.options->lease_ns / 2) {
        return;
    }
    log_warn("node", "this process stood still for %.1f s: it joins anew", (double)gap_ns * 1e-9);
    if (hello_incarnation_draw(&incarnation, &err)) {
        log_error("node", "%s", err.text);
        service_stop(node->service, 1);
        return;
    }
    node->hello.incarnation = incarnation;
    node->config.ops->paused(node->config.cookie);
    join_reset(node->join);
}

static void on_tick(void *cookie)
{
    struct node *node = cookie;
    uint64_t progress = node_progress(node);
    work_note(node);
    (void)FAULT_WAIT(COMPUTE_LOOP);
    bool busy = node->config.ops->busy(node->config.cookie);
    if (progress != node->progress_seen) {
        node->progress_seen = progress;
        service_progress_add(node->service);
    }
    if (busy != node->busy) {
        node->busy = busy;
        if (busy) {
            service_busy_begin(node->service);
        } else {
            service_busy_end(node->service);
        }
    }
    node->ticked = true;
    if (rpc_core_is_deaf()) {
        service_reason_set(node->service, "gRPC", "its listener is gone: start this node again");
    }
    bool joined = join_n_joined(node->join) > 0;
    if (joined != node->joined) {
        node->joined = joined;
        if (joined) {
            service_reason_clear(node->service, "router");
        } else {
            service_reason_set(node->service, "router", "no router is joined");
        }
        health_set(node->health, "", service_ready(node->service));
    }
    bool drains = node->n_drains || service_draining(node->service);
    if (drains) {
        drains_answer(node);
    }
    loop_timer_arm(node->tick, (drains ? DRAIN_TICK_MS : TICK_MS) * NS_PER_MS);
}

/* ---- what routers see ---- */

static void fill_status(void *cookie, Baton__ToRouter__Status *status)
{
    struct node *node = cookie;
    const struct engine_info *info = engine_info(node->engine);
    status->pages_free = engine_pages_free(node->engine);
    status->pages_total = info->n_pages;
    status->sequences_free = engine_slots_free(node->engine);
    node->config.ops->status(node->config.cookie, status);
    status->progress = service_progress(node->service);
    status->ready = service_ready(node->service);
    status->draining = node_draining(node);
}

static void on_view(void *cookie, const Baton__ToNode__Peer *const *nodes, size_t n_nodes)
{
    struct node *node = cookie;
    if (node->config.ops->view) {
        node->config.ops->view(node->config.cookie, nodes, n_nodes);
    }
}

static const struct join_events join_events = {.status = fill_status, .view = on_view};

/* ---- /debug/pages, /debug/requests ---- */

/* An object with this node's id and the members that are written by `members`. */
static void debug_answer(struct node *node, struct httpd_request *request,
                         void (*members)(struct node *node, struct json_writer *w))
{
    struct buf out = BUF_INIT;
    struct json_writer w;
    json_writer_init(&w, &out);
    json_begin_object(&w);
    json_pair_string(&w, "node_id", node->node_id);
    members(node, &w);
    json_end_object(&w);
    httpd_reply(request, 200, "application/json", out.data, out.bytes);
    buf_fini(&out);
}

static void page_members(struct node *node, struct json_writer *w)
{
    json_key(w, "engine");
    engine_debug_json(node->engine, w);
    if (node->config.ops->debug) {
        node->config.ops->debug(node->config.cookie, w);
    }
}

static void request_members(struct node *node, struct json_writer *w)
{
    json_key(w, "requests");
    json_begin_array(w);
    if (node->config.ops->debug_requests) {
        node->config.ops->debug_requests(node->config.cookie, w);
    }
    json_end_array(w);
}

static void debug_pages(void *cookie, struct httpd_request *request)
{
    debug_answer(cookie, request, page_members);
}

static void debug_requests(void *cookie, struct httpd_request *request)
{
    debug_answer(cookie, request, request_members);
}

/* ---- opening ---- */

static enum status read_file(const char *path, char **ret_text, struct error *err)
{
    FILE *file = fopen(path, "re");
    struct buf text = BUF_INIT;
    if (!file) {
        return error_set(err, STATUS_NOT_FOUND, "%s: %m", path);
    }
    for (;;) {
        uint8_t *at = buf_reserve(&text, 4096);
        size_t n = fread(at, 1, 4096, file);
        text.bytes += n;
        if (n == 0 || text.bytes > 1 << 20) {
            break;
        }
    }
    fclose(file);
    *ret_text = buf_take(&text, NULL);
    return STATUS_OK;
}

static enum status read_tls(struct node *node, struct error *err)
{
    const struct node_options *options = node->config.options;
    enum status status = STATUS_OK;
    if (options->tls_ca) {
        status = read_file(options->tls_ca, &node->tls_ca, err);
    }
    if (!status && options->tls_cert) {
        status = read_file(options->tls_cert, &node->tls_cert, err);
    }
    if (!status && options->tls_key) {
        status = read_file(options->tls_key, &node->tls_key, err);
    }
    return status;
}

/* What a router would refuse, or nobody could dial: told before weights are loaded, which may take
 * minutes. */
static enum status check_options(const struct node_options *options, struct error *err)
{
    if (options->node_id) {
        size_t bytes = strlen(options->node_id);
        size_t plain =
            strspn(options->node_id, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                     "0123456789._-");
        if (bytes < 1 || bytes > HELLO_NODE_ID_MAX || plain != bytes) {
            return error_set(err, STATUS_INVALID,
                             "--node-id \"%s\": want 1 to %d letters, digits, '.', '_' and '-'",
                             options->node_id, HELLO_NODE_ID_MAX);
        }
    }
    for (size_t i = 0; i < options->routers.n; i++) {
        struct net_address address;
        struct error why = {""};
        enum status status = net_address_parse(options->routers.items[i], &address, &why);
        if (!status && (!address.has_port || !address.host[0])) {
            status = error_set(&why, STATUS_INVALID, "it needs a host and a port");
        }
        if (status) {
            return error_set(err, status, "--router %s: %s", options->routers.items[i], why.text);
        }
    }
    return STATUS_OK;
}

/* A name or literal that others can reach. */
static enum status choose_advertised(struct node *node, struct error *err)
{
    const struct node_options *options = node->config.options;
    struct net_address address;
    const char *text = options->advertise_host ? options->advertise_host : options->host;
    enum status status = check_options(options, err);
    if (!status) {
        status = net_address_parse(text, &address, err);
    }
    if (status) {
        return status;
    }
    if (net_host_is_wildcard(address.host)) {
        return error_set(err, STATUS_INVALID,
                         "--host %s is a wildcard: say with --advertise-host where others reach "
                         "this node",
                         options->host);
    }
    snprintf(node->advertise, sizeof(node->advertise), "%s", address.host);
    return STATUS_OK;
}

static enum status open_network(struct node *node, struct error *err)
{
    const struct node_options *options = node->config.options;
    struct net_address host;
    enum status status = net_address_parse(options->host, &host, err);
    if (status) {
        return status;
    }
    status = rpc_core_create(node->loop, &node->rpc, err);
    if (status) {
        return status;
    }
    struct rpc_server_options server = {
        .host = host.host,
        .port = (uint16_t)options->grpc_port,
        .security = node_security(node),
    };
    /* A node shows its certificate; it asks for one only if it was given an authority as well. */
    status = rpc_server_create(node->rpc, &server, &node->server, err);
    if (status) {
        return status;
    }
    node->health = health_create(node->server);
    rpc_server_add_unary(node->server, "/baton.Node/Drain", on_drain_call, node);
    struct httpd_config http;
    httpd_config_init(&http);
    http.host = host.host;
    http.port = (uint16_t)options->http_port;
    if (options->cluster_token) {
        node->http_keys[0] = options->cluster_token;
        http.keys = node->http_keys;
        http.n_keys = 1;
    }
    status = httpd_create(node->loop, &http, err, &node->httpd);
    if (status) {
        return status;
    }
    httpd_route_add(node->httpd, &(struct httpd_route){.methods = HTTPD_GET,
                                                       .path = "/debug/pages",
                                                       .handler = debug_pages,
                                                       .cookie = node});
    httpd_route_add(node->httpd, &(struct httpd_route){.methods = HTTPD_GET,
                                                       .path = "/debug/requests",
                                                       .handler = debug_requests,
                                                       .cookie = node});
    service_attach_httpd(node->service, node->httpd, node->metrics);
    struct transport_options transport = {
        .tls = options->ucx_tls,
        .net_devices = options->ucx_net_devices,
        .tcp_port_range = options->ucx_tcp_port_range,
    };
    return transport_open(node->loop, &transport, &node->transport, err);
}

static double progress_value(void *cookie)
{
    return (double)node_progress(cookie);
}

static void log_item(const char *name, uint64_t bytes, const char *note)
{
    log_info("memory", "%-22s %10.1f MiB%s%s", name, (double)bytes / (1 << 20), *note ? "  " : "",
             note);
}

/* The sum of what will be taken, as a table, and whether it fits: before any of it is. */
static enum status check_memory(struct node *node, const struct engine_options *options,
                                struct error *err)
{
    const struct node_memory *own = &node->config.memory;
    struct engine_memory memory;
    struct hostmem host;
    char note[96];
    enum status status = engine_memory_plan(options, &memory, err);
    if (status) {
        return status;
    }
    size_t tail = (memory.tail_bytes + 4095) / 4096 * 4096;
    size_t each = own->is_tail ? tail : memory.page_bytes;
    /* With `auto` in both, since only the start itself shows which. */
    int where = node->config.options->kv_buffer_device;
    if (where != NODE_KV_CUDA || own->is_tail || memory.device_free_bytes == 0) {
        engine_memory_add(&memory, own->name, own->option, own->n, each, false);
    }
    if (where != NODE_KV_CPU && memory.device_free_bytes > 0) {
        engine_memory_add(&memory, own->name, own->option, own->n, each, true);
    }
    hostmem_read(&host);
    if (node->config.options->memory_limit &&
        node->config.options->memory_limit < host.free_bytes) {
        host = (struct hostmem){node->config.options->memory_limit, "--memory-limit"};
    }
    for (uint32_t i = 0; i < memory.n_items; i++) {
        const struct engine_memory_item *item = &memory.items[i];
        note[0] = '\0';
        if (item->option) {
            snprintf(note, sizeof(note), "%s %" PRIu64 ", each %" PRIu64 " bytes%s", item->option,
                     item->n, item->each, item->on_device ? ", on the device" : "");
        } else if (item->on_device) {
            snprintf(note, sizeof(note), "on the device");
        }
        log_item(item->name, item->n * item->each, note);
    }
    if (engine_memory_sum(&memory, true)) {
        snprintf(note, sizeof(note), "of %.1f MiB free on %s",
                 (double)memory.device_free_bytes / (1 << 20), memory.device);
        log_item("all on the device", engine_memory_sum(&memory, true), note);
    }
    snprintf(note, sizeof(note), "of %.1f MiB free: %s", (double)host.free_bytes / (1 << 20),
             host.limit);
    log_item("all on the host", engine_memory_sum(&memory, false), note);
    return engine_memory_check(&memory, host.free_bytes, host.limit, err);
}

static enum status open_engine(struct node *node, struct error *err)
{
    struct engine_options options;
    node_engine_options(node->config.options, &options);
    bool sends = node->config.role == BATON__ROLE__ROLE_PREFILL;
    options.sends = sends && node->config.options->kv_buffer_device != NODE_KV_CUDA;
    options.no_graphs = options.no_graphs || sends; /* it makes no decode steps */
    options.lookahead = options.lookahead && !sends;
    if (strcmp(options.kind, "model") == 0 && !options.model_dir) {
        return error_set(
            err, STATUS_INVALID,
            "--model DIR is missing: the checkpoint folder to serve (or --engine sim)");
    }
    enum status status = check_memory(node, &options, err);
    if (!status) {
        status = engine_open(&options, &node->progress, &node->engine, err);
    }
    if (status) {
        return status;
    }
    const struct engine_info *info = engine_info(node->engine);
    log_info("engine",
             "%s on %s: %" PRIu32 " pages of %" PRIu32 " tokens, %" PRIu32
             " sequences, context of %" PRIu32 " tokens",
             info->model_name, info->device_name, info->n_pages, info->page_tokens,
             info->max_sequences, info->max_context_tokens);
    engine_metrics_register(node->engine, node->metrics);
    metrics_counter_call(
        node->metrics, "baton_engine_progress_total",
        "The engine's progress: two a layer of a chunk or step, one at its end; of a "
        "step by graph one each four layers.",
        METRIC_NO_LABELS, progress_value, node);
    return STATUS_OK;
}

static enum status fill_hello(struct node *node, struct error *err)
{
    const struct node_options *options = node->config.options;
    const struct engine_info *info = engine_info(node->engine);
    Baton__Hello *hello = &node->hello;
    if (options->node_id) {
        snprintf(node->node_id, sizeof(node->node_id), "%s", options->node_id);
    } else {
        char host[40] = "host";
        gethostname(host, sizeof(host) - 1);
        for (char *at = host; *at; at++) {
            bool plain = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                         (*at >= '0' && *at <= '9') || *at == '-' || *at == '.';
            *at = plain ? *at : '-';
        }
        snprintf(node->node_id, sizeof(node->node_id), "%s-%s-%d",
                 node->config.role == BATON__ROLE__ROLE_PREFILL ? "prefill" : "decode", host,
                 (int)getpid());
    }
    baton__hello__init(hello);
    baton__limits__init(&node->limits);
    baton__address__init(&node->grpc);
    baton__address__init(&node->http);
    node->limits.max_context_tokens = info->max_context_tokens;
    node->limits.max_sequences = info->max_sequences;
    node->limits.max_queued = node->config.max_queued;
    node->limits.n_pages = info->n_pages;
    node->limits.page_tokens = info->page_tokens;
    node->limits.page_bytes = info->page_bytes;
    node->limits.tail_bytes = info->tail_bytes;
    node->limits.vocab_size = info->vocab_size;
    node->limits.max_samples = 16;
    node->limits.max_message_bytes = 8 << 20;
    node->grpc.host = node->advertise;
    node->grpc.port = rpc_server_port(node->server);
    node->http.host = node->advertise;
    node->http.port = httpd_port(node->httpd);
    hello->protocol = HELLO_PROTOCOL;
    hello->node_id = node->node_id;
    hello->role = node->config.role;
    hello->fingerprint =
        (ProtobufCBinaryData){ENGINE_FINGERPRINT_BYTES, (uint8_t *)info->fingerprint};
    hello->model = (char *)info->model_name;
    hello->limits = &node->limits;
    hello->grpc = &node->grpc;
    hello->http = &node->http;
    hello->host_boot_id = (ProtobufCBinaryData){hello_host_boot_id(node->boot_id), node->boot_id};
    hello->pid = (uint32_t)getpid();
    hello->version = (char *)BATON_VERSION;
    snprintf(node->build, sizeof(node->build), "%s, page %zu bytes, tail %zu bytes",
             info->model_name, info->page_bytes, info->tail_bytes);
    hello->build = node->build;
    return hello_incarnation_draw(&hello->incarnation, err);
}

enum status node_open(const struct node_config *config, struct node **ret_node, struct error *err)
{
    struct node *node = mem_zalloc(sizeof(*node));
    node->config = *config;
    enum status status = loop_create(&node->loop);
    if (status) {
        error_set(err, status, "the event loop can't be made: %m");
        goto fail;
    }
    node->metrics = metrics_create();
    struct service_config service;
    service_config_init(&service);
    service.name = config->name;
    service.version = BATON_VERSION;
    service.commit = BATON_COMMIT;
    service.lease_ns = config->options->lease_ns;
    service.grace_ns = config->options->grace_ns;
    service.die_with_parent = config->options->die_with_parent;
    service.on_drain = on_drain;
    service.on_grace_end = on_grace_end;
    service.on_pause = on_pause;
    service.cookie = node;
    status = service_create(node->loop, &service, err, &node->service);
    if (!status) {
        status = choose_advertised(node, err);
    }
    if (!status) {
        status = read_tls(node, err);
    }
    if (!status) {
        status = open_network(node, err);
    }
    if (!status) {
        status = open_engine(node, err);
    }
    if (!status) {
        status = node_kv_open(node->loop, node->engine, node->config.options, &node->kv, err);
    }
    if (!status) {
        status = fill_hello(node, err);
    }
    if (status) {
        goto fail;
    }
    node->tick = loop_timer_create(node->loop, on_tick, node);
    *ret_node = node;
    return STATUS_OK;

fail:
    node_close(node);
    return status;
}

int node_run(struct node *node)
{
    struct error err = {""};
    struct join_options join = {
        .loop = node->loop,
        .rpc = node->rpc,
        .security = node_security(node),
        .routers = &node->config.options->routers,
        .hello = &node->hello,
    };
    if (join_create(&join, &join_events, node, &node->join, &err)) {
        log_error("node", "%s", err.text);
        return 2;
    }
    rpc_server_start(node->server);
    if (node->config.options->routers.n == 0) {
        log_warn("node", "no --router is given: nobody will send this node work");
    }
    service_reason_set(node->service, "router", "no router has been joined");
    service_reason_clear(node->service, "starting");
    loop_timer_arm(node->tick, TICK_MS * NS_PER_MS);
    log_info("node", "%s %s: gRPC on %s port %" PRIu32 ", probes on %s", node->config.name,
             node->node_id, node->advertise, node->grpc.port, httpd_address(node->httpd));
    int code = service_run(node->service);
    join_free(node->join);
    node->join = NULL;
    return code;
}

void node_close(struct node *node)
{
    if (!node) {
        return;
    }
    loop_timer_free(node->tick);
    join_free(node->join);
    health_free(node->health);
    rpc_server_free(node->server);
    rpc_core_free(node->rpc);
    node_kv_close(node->kv);
    transport_close(node->transport);
    service_free(node->service);
    httpd_free(node->httpd);
    metrics_free(node->metrics);
    engine_close(node->engine);
    loop_free(node->loop);
    mem_free(node->tls_ca);
    mem_free(node->tls_cert);
    mem_free(node->tls_key);
    mem_free(node);
}
