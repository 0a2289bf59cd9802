/*
 * The server: listener, limits on connections, clock, stop.
 *
 * One slow timer looks at all connections instead of one timer for each: deadlines here are seconds
 * long, and a request that comes and goes in microseconds then never touches the timer queue. The
 * walk costs about 0.1 ms for 5,000 connections four times a second.
 */
#include "base/httpd.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/httpd_conn.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/net.h"

enum {
    /* A storm of 4,000 connects took 13.7 s through retries with the usual 128, 0.4 s with this. */
    BACKLOG = 4096,
    /* Connections accepted a turn, so that a storm of them leaves time for the living. */
    ACCEPT_BATCH = 64,
    OTHER_FILES =
        1024, /* descriptors that connections leave alone, where there are twice as many */
    /* The kernel doubles it. Together with the low mark for unsent bytes this bounds what a
     * connection hides in the kernel, which is 4 MB by default. */
    SEND_BUFFER_BYTES = 128 << 10,
    UNSENT_LOW_BYTES = 16 << 10,
    /* A client whose machine died says nothing, and to a request that is being computed nothing is
     * sent either: a minute of silent probes tells. */
    KEEPALIVE_IDLE_S = 30,
    KEEPALIVE_INTERVAL_S = 10,
    KEEPALIVE_PROBES = 3,
};

/* A limit that is hit is hit many times a second: one line of log for all of them. */
#define ACCEPT_WARN_NS (10 * NS_PER_S)

#define TICK_NS (250 * NS_PER_MS)
/* How long a drain waits for the head of a request that may be on its way. */
#define DRAIN_HEAD_NS NS_PER_S

void httpd_config_init(struct httpd_config *config)
{
    *config = (struct httpd_config){
        .host = "127.0.0.1",
        .max_body_bytes = 32u << 20,
        .max_bodies_bytes = 1u << 30,
        .max_head_bytes = 32u << 10,
        .max_headers = 100,
        .max_connections = 10000,
        .head_timeout_ns = 10 * NS_PER_S,
        .body_timeout_ns = 30 * NS_PER_S,
        .idle_timeout_ns = 120 * NS_PER_S,
        .stall_timeout_ns = 30 * NS_PER_S,
        .stream_high_bytes = 64u << 10,
        .stream_low_bytes = 16u << 10,
        .stream_max_bytes = 1u << 20,
    };
}

/* --- end of turn --- */

/* Connections marked while this runs wait for the next turn, so that none can hold the loop. */
static void settle(void *cookie)
{
    struct httpd *server = cookie;
    struct list batch;

    server->dirty_deferred = false;
    list_init(&batch);
    while (!list_empty(&server->dirty)) {
        struct list *first = list_first(&server->dirty);

        list_remove(first);
        list_push_back(&batch, first);
    }
    while (!list_empty(&batch)) {
        struct list *first = list_first(&batch);

        list_remove(first);
        httpd_conn_settle(list_entry(first, struct httpd_conn, dirty));
    }
}

void httpd_settle_later(struct httpd *server)
{
    if (!server->dirty_deferred) {
        server->dirty_deferred = true;
        loop_defer(server->loop, settle, server);
    }
}

/* --- accepting --- */

static void accept_pause(struct httpd *server, bool pause)
{
    if (!server->listen_watch || pause == server->accept_paused) {
        return;
    }
    server->accept_paused = pause;
    server->stats.n_accept_paused += pause;
    if (loop_fd_set(server->listen_watch, pause ? 0 : LOOP_READ) != STATUS_OK) {
        log_error("httpd", "cannot watch the listening socket: %m");
    }
}

static void stopped(void *cookie)
{
    struct httpd *server = cookie;
    loop_fn fn = server->on_stopped;

    server->on_stopped = NULL;
    if (fn) {
        fn(server->stopped_cookie);
    }
}

void httpd_conn_gone(struct httpd *server)
{
    server->stats.connections--;
    if (server->accept_paused) {
        accept_pause(server, false);
    }
    if (server->stopping && server->stats.connections == 0) {
        loop_defer(server->loop, stopped, server);
    }
}

static void accept_refuse(struct httpd *server, const char *why)
{
    uint64_t now = loop_now_ns();

    if (server->accept_warned_ns == 0 || now - server->accept_warned_ns > ACCEPT_WARN_NS) {
        server->accept_warned_ns = now;
        log_warn("httpd", "accepting pauses at %zu connections: %s", server->stats.connections,
                 why);
    }
    accept_pause(server, true);
}

static void on_accept(void *cookie, unsigned events)
{
    struct httpd *server = cookie;

    for (int i = 0; i < ACCEPT_BATCH; i++) {
        struct list *oldest = list_first(&server->idle);
        bool full = server->stats.connections >= server->config.max_connections;
        int fd;

        if (full && !oldest) {
            accept_refuse(server, "all are in use, the limit");
            return;
        }
        fd = accept4(server->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                accept_refuse(server, strerror(errno));
            }
            return;
        }
        if (full) {
            httpd_conn_drop(list_entry(oldest, struct httpd_conn, idle), false);
        }
        server->stats.n_accepted++;
        httpd_conn_open(server, fd);
    }
}

static void on_tick(void *cookie)
{
    struct httpd *server = cookie;
    uint64_t now = loop_now_ns();

    list_for_each_safe(p, &server->conns)
    {
        httpd_conn_tick(list_entry(p, struct httpd_conn, all), now);
    }
    if (server->accept_paused) {
        accept_pause(server, false); /* files may be free again */
    }
    loop_timer_arm(server->tick, TICK_NS);
}

/* --- create and free --- */

static enum status config_check(const struct httpd_config *config, struct error *err)
{
    if (config->max_head_bytes < 64 || config->max_head_bytes > UINT16_MAX) {
        return error_set(err, STATUS_INVALID, "max_head_bytes is %zu; want 64 to %d",
                         config->max_head_bytes, UINT16_MAX);
    }
    if (config->max_headers < 1 || config->max_headers > 255) {
        return error_set(err, STATUS_INVALID, "max_headers is %zu; want 1 to 255",
                         config->max_headers);
    }
    if (config->max_connections < 1) {
        return error_set(err, STATUS_INVALID, "max_connections is 0");
    }
    if (config->stream_low_bytes > config->stream_high_bytes ||
        config->stream_high_bytes > config->stream_max_bytes) {
        return error_set(
            err, STATUS_INVALID, "stream marks are %zu, %zu, %zu; want low <= high <= max",
            config->stream_low_bytes, config->stream_high_bytes, config->stream_max_bytes);
    }
    for (size_t i = 0; i < config->n_keys; i++) {
        if (config->keys[i][0] == '\0') {
            return error_set(err, STATUS_INVALID, "API key %zu is empty", i + 1);
        }
    }
    return STATUS_OK;
}

/* Connections that this process's descriptors allow. Half of few, or a thousand, are for everything
 * else: a listener of gRPC that finds none when it accepts never accepts again. */
static size_t connections_bound(size_t wanted)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY) {
        return wanted;
    }
    size_t all = (size_t)limit.rlim_cur;
    size_t most = all - (all / 2 < OTHER_FILES ? all / 2 : OTHER_FILES);
    if (most < wanted) {
        log_info("httpd", "%zu connections at most, not %zu: %zu files can be open (ulimit -n)",
                 most, wanted, all);
        return most ? most : 1;
    }
    return wanted;
}

static char **texts_copy(const char *const *texts, size_t n)
{
    char **copy = mem_array(n ? n : 1, sizeof(*copy));

    for (size_t i = 0; i < n; i++) {
        copy[i] = mem_strdup(texts[i]);
    }
    return copy;
}

static void texts_free(char **texts, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        mem_free(texts[i]);
    }
    mem_free(texts);
}

/* Options that every accepted socket inherits. None is worth failing for. */
static void listener_tune(int fd)
{
    int send_bytes = SEND_BUFFER_BYTES;
    int unsent_bytes = UNSENT_LOW_BYTES;
    int on = 1;
    int keep_idle_s = KEEPALIVE_IDLE_S;
    int keep_interval_s = KEEPALIVE_INTERVAL_S;
    int keep_probes = KEEPALIVE_PROBES;

    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_bytes, sizeof(send_bytes)) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_bytes, sizeof(unsent_bytes)) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) < 0 ||
        setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on)) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &keep_idle_s, sizeof(keep_idle_s)) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &keep_interval_s, sizeof(keep_interval_s)) < 0 ||
        setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &keep_probes, sizeof(keep_probes)) < 0) {
        log_warn("httpd", "cannot set an option of the listening socket: %m");
    }
}

static void address_set(struct httpd *server)
{
    struct sockaddr_storage address;
    socklen_t bytes = sizeof(address);
    char text[128] = "unknown";

    if (getsockname(server->listen_fd, (struct sockaddr *)&address, &bytes) == 0) {
        net_sockaddr_format((struct sockaddr *)&address, bytes, text, sizeof(text));
    }
    server->address = mem_strdup(text);
}

enum status httpd_create(struct loop *loop, const struct httpd_config *config, struct error *err,
                         struct httpd **ret_server)
{
    enum status s = config_check(config, err);
    struct httpd *server;

    if (s) {
        return s;
    }
    server = mem_zalloc(sizeof(*server));
    server->listen_fd = -1;
    s = net_listen(config->host, config->port, BACKLOG, &server->listen_fd, &server->port, err);
    if (s) {
        goto free_server;
    }
    listener_tune(server->listen_fd);
    s = loop_fd_create(loop, server->listen_fd, LOOP_READ, on_accept, server,
                       &server->listen_watch);
    if (s) {
        error_set(err, s, "cannot watch the listening socket: %s", strerror(errno));
        goto close_fd;
    }
    server->loop = loop;
    server->config = *config;
    server->config.max_connections = connections_bound(config->max_connections);
    server->config.host = NULL;
    server->config.keys = NULL;
    server->config.cors_origins = NULL;
    server->limits.max_head_bytes = config->max_head_bytes;
    server->limits.max_headers = config->max_headers;
    server->limits.max_body_bytes = config->max_body_bytes;
    server->keys = texts_copy(config->keys, config->n_keys);
    server->origins = texts_copy(config->cors_origins, config->n_cors_origins);
    address_set(server);
    list_init(&server->conns);
    list_init(&server->idle);
    list_init(&server->dirty);
    server->scratch = mem_alloc(HTTPD_SCRATCH_BYTES);
    if (getrandom(&server->label_seed, sizeof(server->label_seed), 0) < 0) {
        server->label_seed = loop_now_ns();
    }
    server->stats_turn = UINT64_MAX;
    server->tick = loop_timer_create(loop, on_tick, server);
    loop_timer_arm(server->tick, TICK_NS);
    *ret_server = server;
    return STATUS_OK;

close_fd:
    close(server->listen_fd);
free_server:
    mem_free(server);
    return s;
}

static void listener_close(struct httpd *server)
{
    loop_fd_free(server->listen_watch);
    server->listen_watch = NULL;
    if (server->listen_fd >= 0) {
        close(server->listen_fd);
        server->listen_fd = -1;
    }
}

void httpd_free(struct httpd *server)
{
    if (!server) {
        return;
    }
    listener_close(server);
    while (!list_empty(&server->conns)) {
        httpd_conn_drop(list_entry(list_first(&server->conns), struct httpd_conn, all), false);
    }
    loop_timer_free(server->tick);
    loop_defer_cancel(server->loop, settle, server);
    loop_defer_cancel(server->loop, stopped, server);
    texts_free(server->keys, server->config.n_keys);
    texts_free(server->origins, server->config.n_cors_origins);
    for (size_t i = 0; i < server->n_routes; i++) {
        mem_free((char *)server->routes[i].path);
    }
    mem_free(server->routes);
    mem_free(server->scratch);
    mem_free(server->address);
    mem_free(server);
}

void httpd_route_add(struct httpd *server, const struct httpd_route *route)
{
    server->routes =
        mem_realloc_array(server->routes, server->n_routes + 1, sizeof(*server->routes));
    server->routes[server->n_routes] = *route;
    server->routes[server->n_routes].path = mem_strdup(route->path);
    server->n_routes++;
}

uint16_t httpd_port(const struct httpd *server)
{
    return server->port;
}

const char *httpd_address(const struct httpd *server)
{
    return server->address;
}

const struct httpd_stats *httpd_stats(struct httpd *server)
{
    server->stats.pending_bytes = 0;
    list_for_each(p, &server->conns)
    {
        server->stats.pending_bytes += httpd_conn_pending(list_entry(p, struct httpd_conn, all));
    }
    return &server->stats;
}

/* --- stop --- */

/* A request may be on its way: one that is there already, or the first of a connection. To close
 * in its face is a reset, which no client tries again. */
static bool expects_request(const struct httpd_conn *conn)
{
    char byte;
    return conn->request.start_ns == 0 || recv(conn->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

void httpd_drain(struct httpd *server)
{
    server->draining = true;
    while (!list_empty(&server->idle)) {
        struct httpd_conn *conn = list_entry(list_first(&server->idle), struct httpd_conn, idle);

        /* one whose last answer is not out yet closes when it is */
        list_remove(&conn->idle);
        if (httpd_conn_pending(conn) > 0) {
            httpd_conn_answered(conn, HTTPD_NEXT_CLOSE);
        } else if (!server->stopping && expects_request(conn)) {
            conn->deadline_ns = loop_now_ns() + DRAIN_HEAD_NS;
        } else {
            httpd_conn_drop(conn, false);
        }
    }
}

void httpd_stop(struct httpd *server, loop_fn fn, void *cookie)
{
    server->on_stopped = fn;
    server->stopped_cookie = cookie;
    server->stopping = true;
    listener_close(server);
    httpd_drain(server);
    if (server->stats.connections == 0) {
        loop_defer(server->loop, stopped, server);
    }
}
