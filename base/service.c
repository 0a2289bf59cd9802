/*
 * The frame of a daemon.
 *
 * The order of a stop is the one thing to get right here: readiness drops first and the listener
 * stays, so that balancers and clients are told 503 instead of refused; then the daemon's own work
 * ends; then the listener closes and the last answers are flushed; then the loop. Each step has a
 * bound in time, and a second signal jumps to the end.
 *
 * Liveness is one counter. While nothing is busy it advances with the clock of the loop, so a loop
 * that stands still is seen; while something is busy only work advances it, so that work that
 * stands still is seen too, although the loop runs.
 */
#include "base/service.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/json.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"

enum {
    SERVICE_MAX_SERVERS = 8,
    REASON_WHAT_BYTES = 64,
    REASON_TEXT_BYTES = 256,
};

/* What answers and error events may take to leave once the work is over. */
#define FLUSH_NS (NS_PER_S / 2)

struct reason {
    char what[REASON_WHAT_BYTES];
    char text[REASON_TEXT_BYTES];
};

/* Owned by main; loop thread, but for the counter. */
struct service {
    struct loop *loop;
    struct service_config config;
    struct metrics *own_metrics;

    struct httpd *servers[SERVICE_MAX_SERVERS];
    struct server_field *server_fields[SERVICE_MAX_SERVERS];
    size_t n_servers;
    size_t n_stopped;

    struct reason *reasons;
    size_t n_reasons;
    size_t reasons_capacity;
    bool told_ready;

    struct loop_signal *on_term;
    struct loop_signal *on_int;
    struct loop_timer *tick;
    struct loop_timer *end; /* grace, then flush */
    bool draining;
    bool finishing;
    bool stopped;
    int exit_code;

    atomic_uint_fast64_t progress;
    uint64_t progress_seen;
    uint64_t progress_ns; /* when it was last seen to move */
    uint64_t tick_ns;     /* last tick */
    uint64_t watchdog_ns; /* 0: the service manager asks for none */
    uint64_t watchdog_told_ns;
    unsigned n_busy;
};

static pid_t parent_at_start;

/* --- process --- */

static void crash_handlers_restore(void)
{
    static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};

    for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++) {
        struct sigaction action;
        Dl_info info;

        if (sigaction(signals[i], NULL, &action) < 0 || action.sa_handler == SIG_DFL ||
            action.sa_handler == SIG_IGN) {
            continue;
        }
        /* Only those of UCX: its handler prints and waits for a debugger where we want a core. A
         * sanitizer's or profiler's is there because someone asked for it. */
        if (dladdr((void *)action.sa_sigaction, &info) && info.dli_fname &&
            strstr(info.dli_fname, "libucs")) {
            signal(signals[i], SIG_DFL);
        }
    }
}

static void files_limit_raise(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) < 0) {
            log_warn("service", "cannot raise the limit of open files: %m");
        }
    }
}

void service_init(void)
{
    parent_at_start = getppid();
    signal(SIGPIPE, SIG_IGN);
    crash_handlers_restore();
    files_limit_raise();
}

/* One datagram to the service manager, if there is one (the protocol of sd_notify). */
static void manager_tell(const char *text)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t bytes = path ? strlen(path) : 0;
    int fd;

    if (bytes == 0 || bytes >= sizeof(address.sun_path) || (path[0] != '/' && path[0] != '@')) {
        return;
    }
    memcpy(address.sun_path, path, bytes);
    if (path[0] == '@') {
        address.sun_path[0] = '\0';
    }
    fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return;
    }
    if (sendto(fd, text, strlen(text), MSG_NOSIGNAL, (struct sockaddr *)&address,
               (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes)) < 0) {
        log_warn("service", "cannot notify the service manager: %m");
    }
    close(fd);
}

/* --- reasons --- */

static struct reason *reason_find(const struct service *service, const char *what)
{
    for (size_t i = 0; i < service->n_reasons; i++) {
        if (strcmp(service->reasons[i].what, what) == 0) {
            return &service->reasons[i];
        }
    }
    return NULL;
}

static void ready_tell(struct service *service)
{
    if (!service->told_ready && service_ready(service)) {
        service->told_ready = true;
        log_info("service", "%s is ready", service->config.name);
        manager_tell("READY=1");
    }
}

void service_reason_set(struct service *service, const char *what, const char *fmt, ...)
{
    struct reason *reason = reason_find(service, what);
    va_list args;

    if (!reason) {
        if (service->n_reasons == service->reasons_capacity) {
            service->reasons_capacity = service->reasons_capacity * 2 + 4;
            service->reasons = mem_realloc_array(service->reasons, service->reasons_capacity,
                                                 sizeof(*service->reasons));
        }
        reason = &service->reasons[service->n_reasons++];
        snprintf(reason->what, sizeof(reason->what), "%s", what);
    }
    va_start(args, fmt);
    vsnprintf(reason->text, sizeof(reason->text), fmt, args);
    va_end(args);
}

void service_reason_clear(struct service *service, const char *what)
{
    struct reason *reason = reason_find(service, what);

    if (reason) {
        *reason = service->reasons[--service->n_reasons];
        ready_tell(service);
    }
}

bool service_ready(const struct service *service)
{
    return service->n_reasons == 0 && !service->draining;
}

bool service_draining(const struct service *service)
{
    return service->draining;
}

/* --- liveness --- */

void service_progress_add(struct service *service)
{
    atomic_fetch_add_explicit(&service->progress, 1, memory_order_relaxed);
}

uint64_t service_progress(const struct service *service)
{
    return atomic_load_explicit(&service->progress, memory_order_relaxed);
}

static void progress_look(struct service *service, uint64_t now)
{
    uint64_t progress = service_progress(service);

    if (progress != service->progress_seen) {
        service->progress_seen = progress;
        service->progress_ns = now;
    }
}

void service_busy_begin(struct service *service)
{
    if (service->n_busy++ == 0) {
        service->progress_ns = loop_now_ns();
    }
}

void service_busy_end(struct service *service)
{
    service->n_busy--;
}

bool service_alive(const struct service *service)
{
    uint64_t now = loop_now_ns();
    bool moved = service_progress(service) != service->progress_seen;

    return now - service->tick_ns <= service->config.lease_ns &&
           (moved || now - service->progress_ns <= service->config.lease_ns);
}

static size_t live_requests(const struct service *service)
{
    size_t n = 0;

    for (size_t i = 0; i < service->n_servers; i++) {
        n += httpd_stats(service->servers[i])->live_requests;
    }
    return n;
}

static void on_tick(void *cookie)
{
    struct service *service = cookie;
    uint64_t now = loop_now_ns();
    uint64_t gap = now - service->tick_ns;

    service->tick_ns = now;
    loop_timer_arm(service->tick, service->config.lease_ns / 6);
    if (service->n_busy == 0) {
        service_progress_add(service);
    }
    progress_look(service, now);
    if (service->watchdog_ns && service_alive(service) &&
        now - service->watchdog_told_ns >= service->watchdog_ns / 3) {
        service->watchdog_told_ns = now;
        manager_tell("WATCHDOG=1");
    }
    if (gap > service->config.lease_ns / 2) {
        log_warn("service", "the loop stood still for %llu ms",
                 (unsigned long long)(gap / NS_PER_MS));
        if (service->config.on_pause) {
            service->config.on_pause(service->config.cookie, gap);
        }
    }
    if (service->draining && !service->config.on_drain && live_requests(service) == 0) {
        service_drained(service);
    }
}

/* --- stop --- */

void service_stop(struct service *service, int exit_code)
{
    service->stopped = true;
    service->exit_code = exit_code;
    loop_stop(service->loop);
}

static void on_flush_end(void *cookie)
{
    service_stop(cookie, 0);
}

static void on_server_stopped(void *cookie)
{
    struct service *service = cookie;

    if (++service->n_stopped == service->n_servers) {
        service_stop(service, 0);
    }
}

static void finish(struct service *service)
{
    service->finishing = true;
    loop_timer_arm(service->end, FLUSH_NS);
    for (size_t i = 0; i < service->n_servers; i++) {
        httpd_stop(service->servers[i], on_server_stopped, service);
    }
    if (service->n_servers == 0) {
        service_stop(service, 0);
    }
}

void service_drained(struct service *service)
{
    if (service->draining && !service->finishing) {
        log_info("service", "%s has drained", service->config.name);
        finish(service);
    }
}

static void on_end(void *cookie)
{
    struct service *service = cookie;

    if (service->finishing) {
        on_flush_end(service);
        return;
    }
    log_warn("service", "%s ends with %zu requests running: the grace has passed",
             service->config.name, live_requests(service));
    if (service->config.on_grace_end) {
        service->config.on_grace_end(service->config.cookie);
    }
    if (!service->finishing) {
        finish(service);
    }
}

void service_drain(struct service *service)
{
    if (service->draining) {
        return;
    }
    service->draining = true;
    log_info("service", "%s drains, for at most %llu ms", service->config.name,
             (unsigned long long)(service->config.grace_ns / NS_PER_MS));
    manager_tell("STOPPING=1");
    for (size_t i = 0; i < service->n_servers; i++) {
        httpd_drain(service->servers[i]);
    }
    loop_timer_arm(service->end, service->config.grace_ns);
    if (service->config.on_drain) {
        service->config.on_drain(service->config.cookie);
    }
}

static void on_stop_signal(void *cookie)
{
    struct service *service = cookie;

    if (!service->draining) {
        service_drain(service);
    } else {
        log_warn("service", "%s stops now: a second signal", service->config.name);
        service_stop(service, 0);
    }
}

int service_run(struct service *service)
{
    ready_tell(service);
    if (!service->stopped && loop_run(service->loop) != STATUS_OK) {
        log_error("service", "the event loop failed: %m");
        return 1;
    }
    return service->exit_code;
}

/* --- routes --- */

static void reply_json(struct httpd_request *request, int status, struct buf *body)
{
    httpd_reply(request, status, "application/json", body->data, body->bytes);
    buf_fini(body);
}

static void on_live(void *cookie, struct httpd_request *request)
{
    struct service *service = cookie;
    struct buf body = BUF_INIT;

    if (!service_alive(service)) {
        httpd_reply_error(request, 503, "server_error", "not_alive", NULL,
                          "%s: no progress for more than %llu ms", service->config.name,
                          (unsigned long long)(service->config.lease_ns / NS_PER_MS));
        return;
    }
    buf_append_text(&body, "{\"status\":\"ok\"}");
    reply_json(request, 200, &body);
}

static void reason_write(struct json_writer *writer, const char *what, const char *text)
{
    json_begin_object(writer);
    json_pair_string(writer, "what", what);
    json_pair_string(writer, "why", text);
    json_end_object(writer);
}

static void on_ready(void *cookie, struct httpd_request *request)
{
    struct service *service = cookie;
    struct json_writer writer;
    struct buf body = BUF_INIT;

    json_writer_init(&writer, &body);
    json_begin_object(&writer);
    if (service_ready(service)) {
        json_pair_string(&writer, "status", "ready");
        json_end_object(&writer);
        reply_json(request, 200, &body);
        return;
    }
    json_key(&writer, "error");
    json_begin_object(&writer);
    json_pair_string(&writer, "message", "not ready; see reasons");
    json_pair_string(&writer, "type", "server_error");
    json_pair_string(&writer, "param", NULL);
    json_pair_string(&writer, "code", service->draining ? "draining" : "not_ready");
    json_end_object(&writer);
    json_key(&writer, "reasons");
    json_begin_array(&writer);
    if (service->draining) {
        reason_write(&writer, "draining", "shutting down");
    }
    for (size_t i = 0; i < service->n_reasons; i++) {
        reason_write(&writer, service->reasons[i].what, service->reasons[i].text);
    }
    json_end_array(&writer);
    json_end_object(&writer);
    httpd_retry_after(request, 1);
    reply_json(request, 503, &body);
}

static void on_version(void *cookie, struct httpd_request *request)
{
    struct service *service = cookie;
    struct json_writer writer;
    struct buf body = BUF_INIT;

    json_writer_init(&writer, &body);
    json_begin_object(&writer);
    json_pair_string(&writer, "version", service->config.version);
    json_pair_string(&writer, "commit", service->config.commit);
    json_end_object(&writer);
    if (service->config.version_extra) {
        body.bytes--; /* the closing brace */
        service->config.version_extra(service->config.cookie, &body);
        buf_append_text(&body, "}");
    }
    reply_json(request, 200, &body);
}

static void on_metrics(void *cookie, struct httpd_request *request)
{
    struct buf body = BUF_INIT;

    metrics_write(cookie, &body);
    httpd_reply(request, 200, METRICS_CONTENT_TYPE, body.data, body.bytes);
    buf_fini(&body);
}

/* --- metrics --- */

enum field_kind {
    FIELD_COUNTER, /* uint64_t */
    FIELD_GAUGE,   /* size_t */
};

/* A row a number of struct httpd_stats. */
struct field {
    const char *name, *help;
    const char *code; /* label, or NULL */
    enum field_kind kind;
    size_t offset;
};

#define STAT(member) offsetof(struct httpd_stats, member)

static const struct field fields[] = {
    {"baton_http_connections_total", "Connections accepted.", NULL, FIELD_COUNTER,
     STAT(n_accepted)},
    {"baton_http_requests_total", "Requests whose head passed the gate.", NULL, FIELD_COUNTER,
     STAT(n_requests)},
    {"baton_http_responses_total", "Answers by class of status; 499 counts as 4xx.", "2xx",
     FIELD_COUNTER, STAT(n_by_class) + 2 * sizeof(uint64_t)},
    {"baton_http_responses_total", "Answers by class of status; 499 counts as 4xx.", "4xx",
     FIELD_COUNTER, STAT(n_by_class) + 4 * sizeof(uint64_t)},
    {"baton_http_responses_total", "Answers by class of status; 499 counts as 4xx.", "5xx",
     FIELD_COUNTER, STAT(n_by_class) + 5 * sizeof(uint64_t)},
    {"baton_http_refused_total", "Requests refused for their framing.", NULL, FIELD_COUNTER,
     STAT(n_refused)},
    {"baton_http_unauthorized_total", "Requests without a right key.", NULL, FIELD_COUNTER,
     STAT(n_unauthorized)},
    {"baton_http_client_closed_total", "Requests whose client left before the end.", NULL,
     FIELD_COUNTER, STAT(n_client_closed)},
    {"baton_http_slow_readers_dropped_total", "Connections dropped because nothing was read.", NULL,
     FIELD_COUNTER, STAT(n_slow_dropped)},
    {"baton_http_timeouts_total", "Requests that did not come whole in time.", NULL, FIELD_COUNTER,
     STAT(n_timeouts)},
    {"baton_http_accept_paused_total", "Times that accepting paused at a limit.", NULL,
     FIELD_COUNTER, STAT(n_accept_paused)},
    {"baton_http_received_bytes_total", "Bytes received.", NULL, FIELD_COUNTER, STAT(n_bytes_in)},
    {"baton_http_sent_bytes_total", "Bytes taken by the kernel.", NULL, FIELD_COUNTER,
     STAT(n_bytes_out)},
    {"baton_http_connections", "Open connections.", NULL, FIELD_GAUGE, STAT(connections)},
    {"baton_http_live_requests", "Requests not answered whole.", NULL, FIELD_GAUGE,
     STAT(live_requests)},
    {"baton_http_live_streams", "Answers that stream now.", NULL, FIELD_GAUGE, STAT(live_streams)},
    {"baton_http_pending_output_bytes", "Output that the kernel has not taken.", NULL, FIELD_GAUGE,
     STAT(pending_bytes)},
    {"baton_http_body_bytes", "Request bodies held.", NULL, FIELD_GAUGE, STAT(bodies_bytes)},
};

enum {
    N_FIELDS = sizeof(fields) / sizeof(fields[0]),
};

struct server_field {
    struct httpd *server;
    const struct field *field;
};

static double field_value(void *cookie)
{
    const struct server_field *own = cookie;
    const uint8_t *at = (const uint8_t *)httpd_stats(own->server) + own->field->offset;

    return own->field->kind == FIELD_COUNTER ? (double)*(const uint64_t *)(const void *)at
                                             : (double)*(const size_t *)(const void *)at;
}

static double ready_value(void *cookie)
{
    return service_ready(cookie);
}

static double draining_value(void *cookie)
{
    return service_draining(cookie);
}

static double progress_value(void *cookie)
{
    return (double)service_progress(cookie);
}

/* Several servers of a process are told apart by their address. */
static void server_metrics_register(struct service *service, struct httpd *server,
                                    struct metrics *metrics)
{
    struct server_field *own = mem_array(N_FIELDS, sizeof(*own));

    service->server_fields[service->n_servers] = own;
    for (size_t i = 0; i < N_FIELDS; i++) {
        const struct metric_label labels[] = {
            {"listener", httpd_address(server)},
            {"code", fields[i].code},
        };
        size_t n_labels = fields[i].code ? 2 : 1;

        own[i].server = server;
        own[i].field = &fields[i];
        if (fields[i].kind == FIELD_COUNTER) {
            metrics_counter_call(metrics, fields[i].name, fields[i].help, labels, n_labels,
                                 field_value, &own[i]);
        } else {
            metrics_gauge_call(metrics, fields[i].name, fields[i].help, labels, n_labels,
                               field_value, &own[i]);
        }
    }
    metrics_gauge_call(metrics, "baton_ready", "Whether this process is ready.", METRIC_NO_LABELS,
                       ready_value, service);
    metrics_gauge_call(metrics, "baton_draining", "Whether this process drains.", METRIC_NO_LABELS,
                       draining_value, service);
    metrics_counter_call(metrics, "baton_progress_total",
                         "Steps of work, or of the clock while there is no work.", METRIC_NO_LABELS,
                         progress_value, service);
}

/* --- life --- */

void service_config_init(struct service_config *config)
{
    *config = (struct service_config){
        .name = "baton",
        .version = "",
        .commit = "",
        .lease_ns = 3 * NS_PER_S / 2,
        .grace_ns = 30 * NS_PER_S,
    };
}

void service_attach_httpd(struct service *service, struct httpd *server, struct metrics *metrics)
{
    unsigned version_flags = service->config.version_needs_key ? 0 : HTTPD_ROUTE_OPEN;

    assert(service->n_servers < SERVICE_MAX_SERVERS);
    if (!metrics) {
        if (!service->own_metrics) {
            service->own_metrics = metrics_create();
        }
        metrics = service->own_metrics;
    }
    {
        const struct httpd_route routes[] = {
            {HTTPD_GET, "/healthz", HTTPD_ROUTE_OPEN, on_live, service},
            {HTTPD_GET, "/livez", HTTPD_ROUTE_OPEN, on_live, service},
            {HTTPD_GET, "/readyz", HTTPD_ROUTE_OPEN, on_ready, service},
            {HTTPD_GET, "/health", HTTPD_ROUTE_OPEN, on_ready, service},
            {HTTPD_GET, "/metrics", HTTPD_ROUTE_OPEN, on_metrics, metrics},
            {HTTPD_GET, "/version", version_flags, on_version, service},
        };

        for (size_t i = 0; i < sizeof(routes) / sizeof(*routes); i++) {
            httpd_route_add(server, &routes[i]);
        }
    }
#ifdef BATON_FAULT_POINTS
    fault_attach_httpd(server);
#endif
    server_metrics_register(service, server, metrics);
    service->servers[service->n_servers++] = server;
}

static void watchdog_read(struct service *service)
{
    const char *text = getenv("WATCHDOG_USEC");
    unsigned long long us = text ? strtoull(text, NULL, 10) : 0;

    if (us > 0 && us < 86400ull * 1000000ull) {
        service->watchdog_ns = us * NS_PER_US;
    }
}

enum status service_create(struct loop *loop, const struct service_config *config,
                           struct error *err, struct service **ret_service)
{
    struct service *service;
    enum status s;

    if (config->lease_ns < 10 * NS_PER_MS) {
        return error_set(err, STATUS_INVALID, "a lease of less than 10 ms");
    }
    if (config->die_with_parent) {
        if (prctl(PR_SET_PDEATHSIG, SIGTERM) < 0) {
            return error_set(err, STATUS_SYSTEM, "cannot tie this process to its parent: %s",
                             strerror(errno));
        }
        /* it may have died between our start and the call above */
        if (parent_at_start != 0 && getppid() != parent_at_start) {
            return error_set(err, STATUS_CANCELLED, "the parent process is gone already");
        }
    }
    service = mem_zalloc(sizeof(*service));
    service->loop = loop;
    service->config = *config;
    service->tick_ns = loop_now_ns();
    service->progress_ns = service->tick_ns;
    atomic_init(&service->progress, 0);
    watchdog_read(service);
    s = loop_signal_create(loop, SIGTERM, on_stop_signal, service, &service->on_term);
    if (s == STATUS_OK) {
        s = loop_signal_create(loop, SIGINT, on_stop_signal, service, &service->on_int);
    }
    if (s) {
        loop_signal_free(service->on_term);
        mem_free(service);
        return error_set(err, s, "cannot handle SIGTERM and SIGINT: %s", strerror(errno));
    }
    service->tick = loop_timer_create(loop, on_tick, service);
    service->end = loop_timer_create(loop, on_end, service);
    loop_timer_arm(service->tick, config->lease_ns / 6);
    service_reason_set(service, "starting", "%s is starting", config->name);
    *ret_service = service;
    return STATUS_OK;
}

void service_free(struct service *service)
{
    if (!service) {
        return;
    }
    loop_signal_free(service->on_term);
    loop_signal_free(service->on_int);
    loop_timer_free(service->tick);
    loop_timer_free(service->end);
    metrics_free(service->own_metrics);
    for (size_t i = 0; i < service->n_servers; i++) {
        mem_free(service->server_fields[i]);
    }
    mem_free(service->reasons);
    mem_free(service);
}
