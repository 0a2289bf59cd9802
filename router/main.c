/*
 * baton-router: wiring. What it does is in router/DESIGN.md.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/net.h"
#include "base/service.h"
#include "base/workers.h"
#include "model/config.h"
#include "router/http.h"
#include "router/options.h"
#include "rpc/health.h"
#include "rpc/hello.h"

enum { MAX_ALIASES = 64, WORKER_QUEUE = 1024, PEM_BYTES_MAX = 1 << 20 };

struct router {
    struct options options;
    struct loop *loop;
    struct service *service;
    struct loop_timer *look; /* at the listener of gRPC */
    struct metrics *metrics;
    struct httpd *httpd;
    struct rpc_core *rpc;
    struct rpc_server *server;
    struct health *health;
    struct workers *workers;
    struct tokenizer *tokenizer;
    struct chat_format *format;
    struct model_config config;
    struct registry *registry;
    struct policy *policy;
    struct requests *requests;
    struct http *http;
    char *tls_ca, *tls_cert, *tls_key;
    char id[HELLO_NODE_ID_MAX + 1];
    Baton__Hello hello;
    Baton__Address grpc_address, http_address;
    Baton__Limits limits;
};

/* ---- events of nodes ---- */

static void on_node_message(void *cookie, struct node *node, const Baton__FromDecode *message)
{
    struct router *router = cookie;
    requests_message(router->requests, node, message);
}

static void on_node_lost(void *cookie, struct node *node, const char *text)
{
    struct router *router = cookie;
    requests_node_lost(router->requests, node, text);
}

static void on_node_writable(void *cookie, struct node *node)
{
    struct router *router = cookie;
    requests_node_writable(router->requests, node);
}

static void on_node_status(void *cookie, struct node *node)
{
    struct router *router = cookie;
    policy_status(router->policy, node);
}

/* Ready: a request sent now would be run. */
static void on_nodes_changed(void *cookie)
{
    struct router *router = cookie;
    char text[400];
    bool is_ready =
        registry_can_run(router->registry, router->options.local_prefill != LOCAL_PREFILL_NEVER,
                         router->options.local_prefill != LOCAL_PREFILL_ONLY, text, sizeof(text));
    http_nodes_changed(router->http);
    requests_nodes_changed(router->requests);
    if (is_ready) {
        service_reason_clear(router->service, "nodes");
    } else {
        service_reason_set(router->service, "nodes", "%s", text);
    }
    health_set(router->health, "", is_ready && !service_draining(router->service));
}

static void on_look(void *cookie)
{
    struct router *router = cookie;
    if (rpc_core_is_deaf()) {
        service_reason_set(
            router->service, "gRPC",
            "no node can join any more: its listener is gone, start the router again");
        health_set(router->health, "", false);
        return;
    }
    loop_timer_arm(router->look, NS_PER_S);
}

static const struct registry_events registry_events = {
    .message = on_node_message,
    .lost = on_node_lost,
    .writable = on_node_writable,
    .status = on_node_status,
    .changed = on_nodes_changed,
};

/* ---- events of the service ---- */

static void on_grace_end(void *cookie)
{
    struct router *router = cookie;
    requests_fail_all(router->requests, API_CODE_DRAINING, "this router is being stopped");
}

static void version_extra(void *cookie, struct buf *out)
{
    struct router *router = cookie;
    char fingerprint[2 * HELLO_FINGERPRINT_MAX + 1] = "";
    struct list *first = list_first(registry_nodes(router->registry));
    if (first) {
        const struct node *node = list_entry(first, struct node, in_registry);
        hello_fingerprint_text(node->fingerprint, node->fingerprint_bytes, fingerprint);
    }
    struct json_writer w;
    buf_append_text(out, ",\"protocol\":");
    buf_printf(out, "%d,\"model\":", HELLO_PROTOCOL);
    json_writer_init(&w, out);
    json_put_string(&w, router->hello.model);
    buf_append_text(out, ",\"fingerprint\":");
    json_writer_init(&w, out);
    json_put_string(&w, fingerprint[0] ? fingerprint : NULL);
}

/* ---- opening ---- */

static enum status read_pem(const char *path, char **ret_text, struct error *err)
{
    struct buf text = BUF_INIT;
    if (!path) {
        return STATUS_OK;
    }
    FILE *file = fopen(path, "re");
    if (!file) {
        return error_set(err, STATUS_NOT_FOUND, "%s: %m", path);
    }
    size_t n;
    do {
        n = fread(buf_reserve(&text, 4096), 1, 4096, file);
        text.bytes += n;
    } while (n > 0 && text.bytes <= PEM_BYTES_MAX);
    fclose(file);
    *ret_text = buf_take(&text, NULL);
    return STATUS_OK;
}

static struct rpc_security security_of(const struct router *router)
{
    return (struct rpc_security){
        .token = router->options.cluster_token,
        .tls_ca = router->tls_ca,
        .tls_cert = router->tls_cert,
        .tls_key = router->tls_key,
    };
}

static enum status open_model(struct router *router, struct error *err)
{
    const struct options *options = &router->options;
    enum status status = model_config_load(options->model, &router->config, err);
    if (!status) {
        status = tokenizer_open(options->model, &router->tokenizer, err);
    }
    if (!status) {
        struct error why;
        status = chat_format_open(options->encoding ? options->encoding : options->model,
                                  &router->format, &why);
        if (status) {
            error_set(err, status, "%s%s", why.text,
                      status == STATUS_NOT_FOUND ? "; scripts/import-encoding makes it" : "");
        }
    }
    if (status) {
        return status;
    }
    log_info("router", "model %s: %u ids, encoding %s", router->config.name,
             tokenizer_n_vocab(router->tokenizer), chat_format_release(router->format));
    return STATUS_OK;
}

static enum status fill_hello(struct router *router, const char *host, struct error *err)
{
    char name[40] = "router";
    gethostname(name, sizeof(name) - 1);
    for (char *at = name; *at; at++) {
        bool is_plain = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
                        (*at >= '0' && *at <= '9') || *at == '-' || *at == '.';
        *at = is_plain ? *at : '-';
    }
    snprintf(router->id, sizeof(router->id), "router-%s-%d", name, (int)getpid());
    baton__hello__init(&router->hello);
    baton__address__init(&router->grpc_address);
    baton__address__init(&router->http_address);
    baton__limits__init(&router->limits);
    router->grpc_address.host = router->http_address.host = (char *)host;
    router->grpc_address.port = rpc_server_port(router->server);
    router->http_address.port = httpd_port(router->httpd);
    router->limits.vocab_size = tokenizer_n_vocab(router->tokenizer);
    router->limits.max_message_bytes = 8 << 20;
    router->hello.protocol = HELLO_PROTOCOL;
    router->hello.node_id = router->id;
    router->hello.role = BATON__ROLE__ROLE_ROUTER;
    router->hello.model = router->options.served_names.n ? router->options.served_names.items[0]
                                                         : router->config.name;
    router->hello.limits = &router->limits;
    router->hello.grpc = &router->grpc_address;
    router->hello.http = &router->http_address;
    router->hello.pid = (uint32_t)getpid();
    router->hello.version = (char *)BATON_VERSION;
    return hello_incarnation_draw(&router->hello.incarnation, err);
}

static enum status open_network(struct router *router, struct error *err)
{
    const struct options *options = &router->options;
    struct httpd_config http;
    httpd_config_init(&http);
    http.host = options->host;
    http.port = (uint16_t)options->http_port;
    http.keys = (const char *const *)options->api_keys.items;
    http.n_keys = options->api_keys.n;
    http.cors_origins = (const char *const *)options->cors_origins.items;
    http.n_cors_origins = options->cors_origins.n;
    http.max_body_bytes = options->max_body_bytes;
    http.max_connections = (size_t)options->max_connections;
    enum status status = httpd_create(router->loop, &http, err, &router->httpd);
    if (status) {
        return status;
    }
    status = rpc_core_create(router->loop, &router->rpc, err);
    if (status) {
        return status;
    }
    struct net_address address;
    status =
        net_address_parse(options->grpc_host ? options->grpc_host : options->host, &address, err);
    if (status) {
        return status;
    }
    struct rpc_server_options server = {
        .host = address.host,
        .port = (uint16_t)options->grpc_port,
        .security = security_of(router),
    };
    status = rpc_server_create(router->rpc, &server, &router->server, err);
    if (status) {
        return status;
    }
    router->health = health_create(router->server);
    /* Nobody dials the router by what its hello says: nodes know its address already. */
    return fill_hello(router, net_host_is_wildcard(address.host) ? "localhost" : options->host,
                      err);
}

static void fill_context(struct router *router, struct api_context *context)
{
    const struct options *options = &router->options;
    const char *text = options_efforts[options->effort];
    enum chat_effort effort = CHAT_EFFORT_HIGH;
    /* The table holds words of the encoding only. */
    (void)!chat_effort_from_text(text, strlen(text), &effort);
    *context = (struct api_context){
        .model = router->hello.model,
        .tokenizer = router->tokenizer,
        .format = router->format,
        .temperature = (double)router->config.temperature,
        .top_p = (double)router->config.top_p,
        .thinking = options->thinking && effort != CHAT_EFFORT_NONE,
        .effort = effort,
    };
    if (options->served_names.n > 1) {
        context->aliases = (const char *const *)options->served_names.items + 1;
        context->n_aliases = options->served_names.n - 1;
    }
}

static enum status open_parts(struct router *router, struct error *err)
{
    const struct options *options = &router->options;
    enum status status =
        workers_create(router->loop, (size_t)options->n_workers, WORKER_QUEUE, &router->workers);
    if (status) {
        return error_set(err, status, "worker threads can't be started: %m");
    }
    struct registry_options registry = {
        .loop = router->loop,
        .rpc = router->rpc,
        .server = router->server,
        .security = security_of(router),
        .hello = &router->hello,
        .vocab_size = tokenizer_n_vocab(router->tokenizer),
        .lease_ns = options->lease_ns,
    };
    router->registry = registry_create(&registry, &registry_events, router);
    registry_metrics_register(router->registry, router->metrics);
    router->policy =
        policy_load_create(router->registry, (enum local_prefill)options->local_prefill);
    struct requests_options requests = {
        .loop = router->loop,
        .registry = router->registry,
        .policy = router->policy,
        .tokenizer = router->tokenizer,
        .eos_ids = router->config.eos_ids,
        .n_eos_ids = router->config.n_eos,
        .version = BATON_VERSION,
        .queue_timeout_ns = options->queue_timeout_ns,
        .prefill_timeout_ns = options->prefill_timeout_ns,
        .transfer_timeout_ns = options->transfer_timeout_ns,
        .generation_timeout_ns = options->generation_timeout_ns,
        .n_attempts = (unsigned)options->n_attempts,
        .max_requests = (size_t)options->max_requests,
    };
    router->requests = requests_create(&requests, router->metrics);
    struct http_options http = {
        .service = router->service,
        .workers = router->workers,
        .registry = router->registry,
        .requests = router->requests,
        .max_context_tokens = router->config.max_position_embeddings,
    };
    fill_context(router, &http.context);
    router->http = http_create(&http, router->httpd, router->metrics);
    return STATUS_OK;
}

static enum status router_open(struct router *router, struct error *err)
{
    const struct options *options = &router->options;
    enum status status = loop_create(&router->loop);
    if (status) {
        return error_set(err, status, "the event loop can't be made: %m");
    }
    router->metrics = metrics_create();
    struct service_config service;
    service_config_init(&service);
    service.name = options_program.name;
    service.version = BATON_VERSION;
    service.commit = BATON_COMMIT;
    service.lease_ns = options->lease_ns;
    service.grace_ns = options->grace_ns;
    service.die_with_parent = options->die_with_parent;
    service.version_needs_key = true;
    service.on_grace_end = on_grace_end;
    service.version_extra = version_extra;
    service.cookie = router;
    status = service_create(router->loop, &service, err, &router->service);
    if (!status) {
        status = read_pem(options->tls_ca, &router->tls_ca, err);
    }
    if (!status) {
        status = read_pem(options->tls_cert, &router->tls_cert, err);
    }
    if (!status) {
        status = read_pem(options->tls_key, &router->tls_key, err);
    }
    if (!status) {
        status = open_model(router, err);
    }
    if (!status) {
        status = open_network(router, err);
    }
    if (!status) {
        status = open_parts(router, err);
    }
    if (status) {
        return status;
    }
    service_attach_httpd(router->service, router->httpd, router->metrics);
    on_nodes_changed(router);
    service_reason_clear(router->service, "starting");
    rpc_server_start(router->server);
    router->look = loop_timer_create(router->loop, on_look, router);
    loop_timer_arm(router->look, NS_PER_S);
    log_info("router", "HTTP on %s, nodes join at port %u", httpd_address(router->httpd),
             rpc_server_port(router->server));
    return STATUS_OK;
}

static void router_close(struct router *router)
{
    loop_timer_free(router->look);
    httpd_free(router->httpd);
    workers_free(router->workers);
    requests_free(router->requests);
    registry_free(router->registry);
    policy_free(router->policy);
    http_free(router->http);
    health_free(router->health);
    rpc_server_free(router->server);
    rpc_core_free(router->rpc);
    service_free(router->service);
    metrics_free(router->metrics);
    chat_format_close(router->format);
    tokenizer_close(router->tokenizer);
    loop_free(router->loop);
    mem_free(router->tls_ca);
    mem_free(router->tls_cert);
    mem_free(router->tls_key);
}

int main(int argc, char **argv)
{
    struct router router = {.loop = NULL};
    struct error err = {""};
    int code = 1;
    service_init();
    FAULT_START(&argc, argv);
    opts_parse_or_exit(&options_program, argc, argv, &router.options);
    log_init((enum log_level)router.options.log_level, router.options.log_json, NULL);
    if (router_open(&router, &err)) {
        log_error("router", "%s", err.text);
    } else {
        code = service_run(router.service);
    }
    router_close(&router);
    opts_free(&options_program, &router.options);
    return code;
}
