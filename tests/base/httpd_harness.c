#include "httpd_harness.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/mem.h"

#define CHECK(x)                                                           \
    do {                                                                   \
        if (!(x)) {                                                        \
            fprintf(stderr, "%s:%d: %s failed\n", __FILE__, __LINE__, #x); \
            abort();                                                       \
        }                                                                  \
    } while (0)

/* --- routes --- */

static void on_hello(void *cookie, struct httpd_request *request)
{
    httpd_reply(request, 200, "text/plain", "hello", 5);
}

static void on_echo(void *cookie, struct httpd_request *request)
{
    size_t n;
    const uint8_t *body = httpd_request_body(request, &n);

    httpd_reply(request, 200, "application/octet-stream", body, n);
}

/* What the handler sees of the request, one fact a line. */
static void on_show(void *cookie, struct httpd_request *request)
{
    struct buf out = BUF_INIT;
    const char *a = httpd_request_header(request, "X-A");

    buf_printf(&out, "path=%s\nrest=%s\nquery=%s\na=%s\npeer=%d\n", httpd_request_path(request),
               httpd_request_rest(request), httpd_request_query(request), a ? a : "-",
               strncmp(httpd_request_peer(request), "127.0.0.1:", 10) == 0);
    CHECK(httpd_header_add(request, "X-Bad", "a\r\nEvil: 1") == STATUS_INVALID);
    CHECK(httpd_header_add(request, "X-Good", "fine") == STATUS_OK);
    httpd_reply(request, 200, "text/plain", out.data, out.bytes);
    buf_fini(&out);
}

static void on_closed(void *cookie, struct httpd_request *request)
{
    struct harness *h = cookie;

    if (h->held == request) {
        h->held = NULL;
    }
    atomic_fetch_add(&h->n_closed, 1);
}

static void on_hold(void *cookie, struct httpd_request *request)
{
    struct harness *h = cookie;

    h->held = request;
    httpd_request_on_close(request, on_closed, h);
    atomic_fetch_add(&h->n_held, 1);
}

static void on_stream(void *cookie, struct httpd_request *request)
{
    httpd_stream_start(request, 200, "text/event-stream");
    on_hold(cookie, request);
}

/* Writes as much as the marks let it, for ever: a producer that obeys the credit. */
static void flood(void *cookie, struct httpd_request *request)
{
    static char block[8192];
    struct harness *h = cookie;

    memset(block, 'x', sizeof(block));
    h->n_drained++;
    while (httpd_stream_pending_bytes(request) <= 64u << 10) {
        CHECK(httpd_stream_write(request, block, sizeof(block)) == STATUS_OK);
    }
}

static void on_flood(void *cookie, struct httpd_request *request)
{
    struct harness *h = cookie;

    httpd_stream_start(request, 200, "text/plain");
    on_hold(cookie, request);
    httpd_stream_on_drain(request, flood, h);
    flood(h, request);
}

/* --- loop thread --- */

struct call {
    struct harness *h;
    void (*fn)(struct harness *, void *);
    void *cookie;
    pthread_mutex_t lock;
    pthread_cond_t done_cond;
    bool done;
};

static void on_call(void *cookie, void *msg)
{
    struct call *call = msg;

    call->fn(call->h, call->cookie);
    pthread_mutex_lock(&call->lock);
    call->done = true;
    pthread_cond_signal(&call->done_cond);
    pthread_mutex_unlock(&call->lock);
}

void harness_call(struct harness *h, void (*fn)(struct harness *, void *), void *cookie)
{
    struct call call = {.h = h, .fn = fn, .cookie = cookie};

    pthread_mutex_init(&call.lock, NULL);
    pthread_cond_init(&call.done_cond, NULL);
    CHECK(mailbox_post(h->mailbox, &call) == STATUS_OK);
    pthread_mutex_lock(&call.lock);
    while (!call.done) {
        pthread_cond_wait(&call.done_cond, &call.lock);
    }
    pthread_mutex_unlock(&call.lock);
    pthread_mutex_destroy(&call.lock);
    pthread_cond_destroy(&call.done_cond);
}

static void *loop_main(void *cookie)
{
    struct harness *h = cookie;

    CHECK(loop_run(h->loop) == STATUS_OK);
    return NULL;
}

void harness_start(struct harness *h, const struct httpd_config *config)
{
    lost_watch();
    const struct httpd_route routes[] = {
        {HTTPD_GET, "/hello", 0, on_hello, h},
        {HTTPD_GET, "/open", HTTPD_ROUTE_OPEN, on_hello, h},
        {HTTPD_POST, "/echo", HTTPD_ROUTE_BODY, on_echo, h},
        {HTTPD_POST, "/json", HTTPD_ROUTE_BODY | HTTPD_ROUTE_JSON, on_echo, h},
        {HTTPD_GET, "/v1/models", 0, on_show, h},
        {HTTPD_GET, "/v1/models/", 0, on_show, h},
        {HTTPD_GET, "/hold", 0, on_hold, h},
        {HTTPD_GET, "/stream", 0, on_stream, h},
        {HTTPD_GET, "/flood", 0, on_flood, h},
    };
    struct error err = {.text = ""};

    memset(h, 0, sizeof(*h));
    CHECK(loop_create(&h->loop) == STATUS_OK);
    CHECK(mailbox_create(h->loop, 16, on_call, h, &h->mailbox) == STATUS_OK);
    if (httpd_create(h->loop, config, &err, &h->server) != STATUS_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    for (size_t i = 0; i < sizeof(routes) / sizeof(*routes); i++) {
        httpd_route_add(h->server, &routes[i]);
    }
    h->port = httpd_port(h->server);
    CHECK(pthread_create(&h->thread, NULL, loop_main, h) == 0);
}

static void stop_now(struct harness *h, void *cookie)
{
    loop_stop(h->loop);
}

void harness_stop(struct harness *h)
{
    harness_call(h, stop_now, NULL);
    pthread_join(h->thread, NULL);
    httpd_free(h->server);
    mailbox_free(h->mailbox);
    loop_free(h->loop);
}

static void copy_stats(struct harness *h, void *cookie)
{
    *(struct httpd_stats *)cookie = *httpd_stats(h->server);
}

struct httpd_stats harness_stats(struct harness *h)
{
    struct httpd_stats stats;

    harness_call(h, copy_stats, &stats);
    return stats;
}

bool harness_await(atomic_int *value, int wanted)
{
    uint64_t begin_ns = loop_now_ns();
    while (atomic_load(value) < wanted && !lost_over(begin_ns, 2000)) {
        usleep(1000);
    }
    return atomic_load(value) >= wanted;
}

/* --- client --- */

int client_connect(const struct harness *h)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(h->port)};
    struct timeval timeout = {.tv_sec = 5};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int on = 1;

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    return fd;
}

void client_send(int fd, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;

    while (n > 0) {
        ssize_t sent = send(fd, p, n, MSG_NOSIGNAL);

        if (sent < 0) {
            return; /* the server refused it halfway; what it answered is read next */
        }
        p += sent;
        n -= (size_t)sent;
    }
}

void client_text(int fd, const char *text)
{
    client_send(fd, text, strlen(text));
}

static bool client_can_read(int fd, unsigned wait_ms)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    uint64_t begin_ns = loop_now_ns();
    int n;
    do {
        n = poll(&ready, 1, wait_ms < 100 ? (int)wait_ms : 100);
    } while (n == 0 && !lost_over(begin_ns, wait_ms));
    return n > 0;
}

bool client_read_all(int fd, struct buf *out, int wait_ms)
{
    for (;;) {
        ssize_t n;

        /* the first bytes may take their time on a busy machine */
        if (!client_can_read(fd, (unsigned)(out->bytes == 0 && wait_ms < 3000 ? 3000 : wait_ms))) {
            return false;
        }
        n = recv(fd, buf_reserve(out, 65536), 65536, 0);
        if (n <= 0) {
            return true;
        }
        out->bytes += (size_t)n;
    }
}

int client_answer(int fd, bool is_head, struct buf *out)
{
    size_t start = out->bytes;
    size_t want = SIZE_MAX;

    while (out->bytes - start < want) {
        const char *text;
        const char *end;
        const char *length;

        /* byte by byte, so that nothing of a pipelined answer behind it is taken */
        if (recv(fd, buf_reserve(out, 1), 1, 0) != 1) {
            return 0;
        }
        out->bytes++;
        if (want != SIZE_MAX) {
            continue;
        }
        text = buf_text(out) + start;
        end = strstr(text, "\r\n\r\n");
        if (end) {
            length = strstr(text, "Content-Length: ");
            want = (size_t)(end + 4 - text);
            if (length && !is_head) {
                want += strtoul(length + 16, NULL, 10);
            }
        }
    }
    return atoi(buf_text(out) + start + 9);
}

int exchange(struct harness *h, const char *text, size_t n, bool *ret_closed, struct buf *out)
{
    int fd = client_connect(h);
    int status = 0;

    buf_clear(out);
    client_send(fd, text, n);
    *ret_closed = client_read_all(fd, out, 40);
    if (out->bytes >= 12 && memcmp(out->data, "HTTP/1.1 ", 9) == 0) {
        status = atoi(buf_text(out) + 9);
    }
    close(fd);
    return status;
}
