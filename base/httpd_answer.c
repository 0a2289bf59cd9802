/*
 * What a request is answered with: routing, keys, CORS, refusals, replies and streams.
 *
 * The order of the checks is a decision: the key comes before everything that would tell an
 * unauthorised client which routes exist, and every check that needs only the head is made before a
 * byte of the body is read or asked for by "100 Continue".
 */
#include "base/httpd_conn.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/net.h"
#include "base/secret.h"

enum {
    ERROR_MESSAGE_MAX = 2000,
    /* A head up to this size stays allocated for the next one; nearly all are smaller. */
    HEAD_KEEP_BYTES = 4096,
    CHUNK_FRAME_BYTES = 2 * sizeof(size_t) + 4, /* around a chunk */
};

static const char invalid_request[] = "invalid_request_error";

/* --- request accessors --- */

enum httpd_method httpd_request_method(const struct httpd_request *request)
{
    return request->is_head ? HTTPD_GET : request->head.method;
}

bool httpd_request_is_head(const struct httpd_request *request)
{
    return request->is_head;
}

const char *httpd_request_path(const struct httpd_request *request)
{
    return request->head.path;
}

const char *httpd_request_rest(const struct httpd_request *request)
{
    return request->rest;
}

const char *httpd_request_query(const struct httpd_request *request)
{
    return request->head.query;
}

const char *httpd_request_header(const struct httpd_request *request, const char *name)
{
    return httpd_parse_header_find(&request->head, name);
}

const uint8_t *httpd_request_body(const struct httpd_request *request, size_t *ret_bytes)
{
    *ret_bytes = request->body.bytes;
    return request->body.data;
}

void httpd_request_take_body(struct httpd_request *request, struct buf *ret_body)
{
    request->conn->server->stats.bodies_bytes -= request->body.bytes;
    *ret_body = request->body;
    buf_init(&request->body);
}

const char *httpd_request_label(const struct httpd_request *request)
{
    return request->label;
}

const char *httpd_request_peer(const struct httpd_request *request)
{
    struct httpd_conn *conn = request->conn;
    struct sockaddr_storage address;
    socklen_t bytes = sizeof(address);
    char text[128] = "unknown";

    /* formatted when asked for: most requests are never logged */
    if (!conn->peer) {
        if (getpeername(conn->fd, (struct sockaddr *)&address, &bytes) == 0) {
            net_sockaddr_format((struct sockaddr *)&address, bytes, text, sizeof(text));
        }
        conn->peer = mem_strdup(text);
    }
    return conn->peer;
}

uint64_t httpd_request_start_ns(const struct httpd_request *request)
{
    return request->start_ns;
}

void httpd_request_on_close(struct httpd_request *request, httpd_close_fn fn, void *cookie)
{
    request->on_close = fn;
    request->close_cookie = cookie;
}

void httpd_stream_on_drain(struct httpd_request *request, httpd_drain_fn fn, void *cookie)
{
    request->on_drain = fn;
    request->drain_cookie = cookie;
}

/* --- life of a request --- */

void httpd_answer_release_body(struct httpd_request *request)
{
    request->conn->server->stats.bodies_bytes -= request->body.bytes;
    buf_fini(&request->body);
}

void httpd_answer_reset(struct httpd_request *request)
{
    struct httpd_stats *stats = &request->conn->server->stats;

    httpd_answer_release_body(request);
    buf_clear(&request->extra);
    if (request->head.text.capacity > HEAD_KEEP_BYTES) {
        buf_fini(&request->head.text);
    }
    if (request->live) {
        stats->live_requests--;
    }
    if (request->streaming) {
        stats->live_streams--;
    }
    memset(&request->chunks, 0, sizeof(request->chunks));
    request->body_left = 0;
    request->route = NULL;
    request->rest = "";
    request->label = NULL;
    request->cors_origin = NULL;
    request->on_close = NULL;
    request->on_drain = NULL;
    request->is_head = false;
    request->live = false;
    request->started = false;
    request->streaming = false;
    request->chunked = false;
    request->close_after = false;
    request->above_high = false;
}

void httpd_answer_fini(struct httpd_request *request)
{
    httpd_parse_head_fini(&request->head);
    buf_fini(&request->extra);
}

static void request_end(struct httpd_request *request, enum httpd_conn_next next)
{
    struct httpd_conn *conn = request->conn;

    if (next == HTTPD_NEXT_KEEP && (request->close_after || conn->server->draining)) {
        next = HTTPD_NEXT_CLOSE;
    }
    httpd_answer_reset(request);
    httpd_conn_answered(conn, next);
}

/* --- the head of an answer --- */

static const char *reason_of(int status)
{
    static const struct {
        int status;
        const char *text;
    } known[] = {
        {200, "OK"},
        {202, "Accepted"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {408, "Request Timeout"},
        {409, "Conflict"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {415, "Unsupported Media Type"},
        {417, "Expectation Failed"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {502, "Bad Gateway"},
        {503, "Service Unavailable"},
        {504, "Gateway Timeout"},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (known[i].status == status) {
            return known[i].text;
        }
    }
    return "Status";
}

static const char *date_line(struct httpd *server)
{
    time_t now = time(NULL);

    if (now != server->date_s) {
        struct tm utc;

        server->date_s = now;
        gmtime_r(&now, &utc);
        strftime(server->date, sizeof(server->date), "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &utc);
    }
    return server->date;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

/* A label is no secret: it need only differ from the others of this and other processes. */
static void label_make(struct httpd_request *request)
{
    struct httpd *server = request->conn->server;

    snprintf(request->label_made, sizeof(request->label_made), "req-%016llx",
             (unsigned long long)mix(server->label_seed + server->n_labels++));
    request->label = request->label_made;
}

static void label_choose(struct httpd_request *request)
{
    const char *asked = httpd_request_header(request, "x-request-id");
    size_t n = 0;

    if (asked) {
        while (asked[n] >= 0x20 && asked[n] < 0x7f) {
            n++;
        }
    }
    if (n > 0 && asked[n] == '\0' && n < HTTPD_LABEL_BYTES) {
        request->label = asked;
    } else {
        label_make(request);
    }
}

/* Status line and headers but those that frame the body, which the caller adds. */
static void head_write(struct httpd_request *request, int status, const char *content_type)
{
    struct httpd *server = request->conn->server;
    struct buf *out = &request->conn->out;

    assert(!request->started);
    request->started = true;
    if (server->draining || !request->head.keep_alive) {
        request->close_after = true;
    }
    if (!request->label) {
        label_make(request);
    }
    server->stats.n_by_class[status / 100]++;
    buf_printf(out, "HTTP/1.1 %d %s\r\n%sX-Request-Id: %s\r\n", status, reason_of(status),
               date_line(server), request->label);
    if (content_type) {
        buf_printf(out, "Content-Type: %s\r\n", content_type);
    }
    if (request->close_after) {
        buf_append_text(out, "Connection: close\r\n");
    } else if (request->head.minor == 0) {
        buf_append_text(out, "Connection: keep-alive\r\n");
    }
    if (request->cors_origin) {
        buf_printf(out,
                   "Access-Control-Allow-Origin: %s\r\nVary: Origin\r\n"
                   "Access-Control-Expose-Headers: X-Request-Id, Retry-After\r\n",
                   request->cors_origin);
    }
    buf_append(out, request->extra.data, request->extra.bytes);
}

static bool text_is_clean(const char *text)
{
    for (; *text; text++) {
        if ((uint8_t)*text < 0x20 || *text == 0x7f) {
            return false;
        }
    }
    return true;
}

enum status httpd_header_add(struct httpd_request *request, const char *name, const char *value)
{
    if (!httpd_parse_is_token(name, strlen(name)) || !text_is_clean(value)) {
        return STATUS_INVALID;
    }
    buf_printf(&request->extra, "%s: %s\r\n", name, value);
    return STATUS_OK;
}

void httpd_close_after(struct httpd_request *request)
{
    request->close_after = true;
}

void httpd_retry_after(struct httpd_request *request, unsigned seconds)
{
    buf_printf(&request->extra, "Retry-After: %u\r\n", seconds);
}

/* --- whole answers --- */

void httpd_reply(struct httpd_request *request, int status, const char *content_type,
                 const void *bytes, size_t n_bytes)
{
    struct buf *out = &request->conn->out;

    head_write(request, status, content_type);
    if (status == 204 || status == 304) {
        buf_append_text(out, "\r\n");
    } else {
        buf_printf(out, "Content-Length: %zu\r\n\r\n", n_bytes);
        if (!request->is_head) {
            buf_append(out, bytes, n_bytes);
        }
    }
    request_end(request, HTTPD_NEXT_KEEP);
}

void httpd_error_write(struct buf *out, const char *type, const char *code, const char *param,
                       const char *message)
{
    struct json_writer writer;
    size_t bytes = strlen(message);

    if (bytes > ERROR_MESSAGE_MAX) {
        bytes = ERROR_MESSAGE_MAX;
        while (bytes > 0 && ((uint8_t)message[bytes] & 0xc0) == 0x80) {
            bytes--; /* not inside a character */
        }
    }
    json_writer_init(&writer, out);
    json_begin_object(&writer);
    json_key(&writer, "error");
    json_begin_object(&writer);
    json_key(&writer, "message");
    json_put_string_n(&writer, message, bytes);
    json_pair_string(&writer, "type", type);
    json_pair_string(&writer, "param", param);
    json_pair_string(&writer, "code", code);
    json_end_object(&writer);
    json_end_object(&writer);
}

void httpd_reply_error(struct httpd_request *request, int status, const char *type,
                       const char *code, const char *param, const char *fmt, ...)
{
    struct buf body = BUF_INIT;
    char message[ERROR_MESSAGE_MAX + 8];
    va_list args;

    va_start(args, fmt);
    vsnprintf(message, sizeof(message), fmt, args);
    va_end(args);
    httpd_error_write(&body, type, code, param, message);
    if (status == 401) {
        buf_append_text(&request->extra, "WWW-Authenticate: Bearer\r\n");
    }
    httpd_reply(request, status, "application/json", body.data, body.bytes);
    buf_fini(&body);
}

void httpd_answer_refusal(struct httpd_conn *conn, int status, const char *code, const char *text)
{
    struct httpd_request *request = &conn->request;

    if (!request->live) {
        /* what an earlier request left in the head must not show in this answer */
        request->live = true;
        conn->server->stats.live_requests++;
        request->head.minor = 1;
        request->is_head = false;
    }
    request->close_after = true;
    if (status == 429) {
        httpd_retry_after(request, 1);
    }
    httpd_reply_error(request, status, status == 429 ? "rate_limit_error" : invalid_request, code,
                      NULL, "%s", text);
}

/* --- streams --- */

void httpd_stream_start(struct httpd_request *request, int status, const char *content_type)
{
    struct buf *out = &request->conn->out;

    request->chunked = request->head.minor == 1;
    if (!request->chunked) {
        request->close_after = true; /* the body ends where the connection does */
    }
    buf_append_text(&request->extra, "X-Accel-Buffering: no\r\nCache-Control: no-store\r\n");
    head_write(request, status, content_type);
    if (request->chunked) {
        buf_append_text(out, "Transfer-Encoding: chunked\r\n");
    }
    buf_append_text(out, "\r\n");
    httpd_answer_release_body(request);
    buf_fini(&request->extra);
    request->streaming = true;
    request->conn->server->stats.live_streams++;
    httpd_conn_mark(request->conn);
}

/* The length in hex and the line's end: once a token, so without printf. */
static void chunk_head(struct buf *out, size_t n_bytes)
{
    static const char hex[] = "0123456789abcdef";
    char text[2 * sizeof(n_bytes) + 2];
    size_t i = sizeof(text);

    text[--i] = '\n';
    text[--i] = '\r';
    do {
        text[--i] = hex[n_bytes & 15];
        n_bytes >>= 4;
    } while (n_bytes > 0);
    buf_append(out, text + i, sizeof(text) - i);
}

enum status httpd_stream_write(struct httpd_request *request, const void *bytes, size_t n_bytes)
{
    struct httpd_conn *conn = request->conn;
    struct httpd *server = conn->server;

    assert(request->streaming);
    if (conn->state == HTTPD_CONN_DOOMED) {
        return STATUS_EXHAUSTED;
    }
    if (n_bytes == 0 || request->is_head) {
        return STATUS_OK; /* an empty chunk would be the last one */
    }
    if (httpd_conn_pending(conn) + n_bytes > server->config.stream_max_bytes) {
        conn->state = HTTPD_CONN_DOOMED;
        server->stats.n_slow_dropped++;
        httpd_conn_mark(conn);
        return STATUS_EXHAUSTED;
    }
    buf_reserve_only(&conn->out, n_bytes + CHUNK_FRAME_BYTES);
    if (request->chunked) {
        chunk_head(&conn->out, n_bytes);
    }
    buf_append(&conn->out, bytes, n_bytes);
    if (request->chunked) {
        buf_append(&conn->out, "\r\n", 2);
    }
    if (httpd_conn_pending(conn) > server->config.stream_high_bytes) {
        request->above_high = true;
    }
    httpd_conn_mark(conn);
    return STATUS_OK;
}

size_t httpd_stream_pending_bytes(const struct httpd_request *request)
{
    return httpd_conn_pending(request->conn);
}

void httpd_stream_end(struct httpd_request *request)
{
    assert(request->streaming);
    if (request->chunked && !request->is_head) {
        buf_append_text(&request->conn->out, "0\r\n\r\n");
    }
    request_end(request, HTTPD_NEXT_KEEP);
}

void httpd_stream_abort(struct httpd_request *request)
{
    assert(request->streaming);
    request_end(request, request->chunked ? HTTPD_NEXT_CLOSE : HTTPD_NEXT_CUT);
}

/* --- keys and origins --- */

static bool key_ok(const struct httpd_request *request)
{
    const struct httpd *server = request->conn->server;
    const char *sent = httpd_request_header(request, "authorization");
    bool ok = false;

    if (server->config.n_keys == 0) {
        return true;
    }
    if (!sent || strncasecmp(sent, "bearer ", 7) != 0) {
        return false;
    }
    sent += 7;
    sent += strspn(sent, " ");
    for (size_t i = 0; i < server->config.n_keys; i++) {
        ok |= secret_equal(server->keys[i], sent, strlen(sent)); /* all are compared */
    }
    return ok;
}

static const char *origin_allowed(const struct httpd_request *request)
{
    const struct httpd *server = request->conn->server;
    const char *origin;

    if (server->config.n_cors_origins == 0) {
        return NULL;
    }
    origin = httpd_request_header(request, "origin");
    for (size_t i = 0; origin && i < server->config.n_cors_origins; i++) {
        if (strcmp(server->origins[i], "*") == 0 || strcmp(server->origins[i], origin) == 0) {
            return origin;
        }
    }
    return NULL;
}

static void preflight_answer(struct httpd_request *request)
{
    const char *headers = httpd_request_header(request, "access-control-request-headers");
    struct buf *extra = &request->extra;

    buf_append_text(extra, "Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"
                           "Access-Control-Max-Age: 600\r\n");
    if (headers) {
        /* a header's value has passed the gate, so it holds no line end */
        buf_printf(extra, "Access-Control-Allow-Headers: %s\r\n", headers);
    }
    httpd_reply(request, 204, NULL, NULL, 0);
}

/* --- routing --- */

static bool route_fits(const struct httpd_route *route, const char *path, const char **ret_rest)
{
    size_t bytes = strlen(route->path);

    if (bytes > 1 && route->path[bytes - 1] == '/') {
        if (strncmp(route->path, path, bytes) != 0 || path[bytes] == '\0') {
            return false;
        }
        *ret_rest = path + bytes;
        return true;
    }
    return strcmp(route->path, path) == 0;
}

struct lookup {
    const struct httpd_route *route; /* of path and method, or NULL */
    const char *rest;
    unsigned methods; /* of the path; 0: unknown path */
    bool open;        /* the path needs no key */
};

static struct lookup route_look_up(const struct httpd_request *request)
{
    const struct httpd *server = request->conn->server;
    struct lookup found = {.rest = ""};
    unsigned wanted = httpd_request_method(request);

    for (size_t i = 0; i < server->n_routes; i++) {
        const struct httpd_route *route = &server->routes[i];
        const char *rest = "";

        if (!route_fits(route, request->head.path, &rest)) {
            continue;
        }
        found.open = (route->flags & HTTPD_ROUTE_OPEN) != 0 && (found.methods == 0 || found.open);
        found.methods |= route->methods;
        if (!found.route && (route->methods & wanted)) {
            found.route = route;
            found.rest = rest;
        }
    }
    return found;
}

static void method_refuse(struct httpd_request *request, unsigned methods)
{
    static const struct {
        enum httpd_method method;
        const char *text;
    } names[] = {
        {HTTPD_GET, "GET, HEAD"}, {HTTPD_POST, "POST"},   {HTTPD_PUT, "PUT"},
        {HTTPD_DELETE, "DELETE"}, {HTTPD_PATCH, "PATCH"}, {HTTPD_OPTIONS, "OPTIONS"},
    };
    char allow[80] = "";

    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if (methods & names[i].method) {
            snprintf(allow + strlen(allow), sizeof(allow) - strlen(allow), "%s%s",
                     allow[0] ? ", " : "", names[i].text);
        }
    }
    buf_printf(&request->extra, "Allow: %s\r\n", allow);
    httpd_reply_error(request, 405, invalid_request, "method_not_supported", NULL,
                      "%.32s is not supported here; allowed: %s", request->head.method_text, allow);
}

/* --- bodies --- */

static bool has_body(const struct httpd_request *request)
{
    return request->head.chunked || request->head.length > 0;
}

/* The body that follows will not be read: skips it if that is cheap, else gives up the connection.
 */
static void body_forgo(struct httpd_request *request)
{
    const struct httpd_parse_head *head = &request->head;

    if (!has_body(request)) {
        return;
    }
    if (head->chunked || head->expect_continue || head->length > HTTPD_SKIP_BYTES) {
        request->close_after = true;
    } else {
        request->conn->skip_bytes = head->length;
    }
}

static bool media_type_ok(const char *type)
{
    static const char json[] = "application/json";
    size_t bytes = sizeof(json) - 1;

    if (!type) {
        return true;
    }
    return strncasecmp(type, json, bytes) == 0 &&
           (type[bytes] == '\0' || type[bytes] == ';' || type[bytes] == ' ' || type[bytes] == '\t');
}

/* Checks of a route that reads a body, by the head alone. False when it was refused. */
static bool body_admit(struct httpd_request *request)
{
    const struct httpd *server = request->conn->server;
    const struct httpd_parse_head *head = &request->head;

    if (!head->chunked && !head->has_length) {
        httpd_reply_error(request, 411, invalid_request, "length_required", NULL,
                          "a body is needed, with Content-Length or chunks");
        return false;
    }
    if (head->length > server->config.max_body_bytes) {
        request->close_after = true;
        httpd_reply_error(request, 413, invalid_request, "request_too_large", NULL,
                          "the body is larger than %zu bytes", server->config.max_body_bytes);
        return false;
    }
    if (request->route->flags & HTTPD_ROUTE_JSON) {
        const char *type = httpd_request_header(request, "content-type");
        const char *encoding = httpd_request_header(request, "content-encoding");

        if (!media_type_ok(type)) {
            body_forgo(request);
            httpd_reply_error(request, 415, invalid_request, "unsupported_media_type", NULL,
                              "Content-Type is '%.100s'; want application/json", type);
            return false;
        }
        if (encoding) {
            body_forgo(request);
            httpd_reply_error(request, 415, invalid_request, "unsupported_media_type", NULL,
                              "Content-Encoding is '%.100s'; want none", encoding);
            return false;
        }
    }
    return true;
}

static void body_begin(struct httpd_conn *conn)
{
    struct httpd_request *request = &conn->request;

    request->body_left = request->head.length;
    conn->state = HTTPD_CONN_BODY;
    if (request->head.expect_continue) {
        buf_append_text(&conn->out, "HTTP/1.1 100 Continue\r\n\r\n");
        httpd_conn_mark(conn);
    }
}

/* --- dispatch --- */

void httpd_answer_handle(struct httpd_conn *conn)
{
    conn->request.route->handler(conn->request.route->cookie, &conn->request);
}

/* Answers for which no route is needed or found. True when one was given. */
static bool dispatch_refuse(struct httpd_request *request, const struct lookup *found)
{
    if (!found->open && !key_ok(request)) {
        body_forgo(request);
        request->conn->server->stats.n_unauthorized++;
        httpd_reply_error(request, 401, invalid_request, "invalid_api_key", NULL,
                          "missing or wrong API key; want 'Authorization: Bearer KEY'");
        return true;
    }
    if (found->route) {
        if (!request->head.expect_unknown) {
            return false;
        }
        request->close_after = true; /* whether the body follows is anyone's guess */
        httpd_reply_error(request, 417, invalid_request, "expectation_failed", NULL,
                          "Expect is '%.100s'; only 100-continue is known",
                          httpd_request_header(request, "expect"));
        return true;
    }
    body_forgo(request);
    if (found->methods) {
        method_refuse(request, found->methods);
    } else if (request->head.method == HTTPD_OTHER) {
        method_refuse(request, HTTPD_GET | HTTPD_POST);
    } else {
        httpd_reply_error(request, 404, invalid_request, "unknown_url", NULL,
                          "unknown request URL: %.16s %.300s", request->head.method_text,
                          request->head.path);
    }
    return true;
}

void httpd_answer_dispatch(struct httpd_conn *conn)
{
    struct httpd_request *request = &conn->request;
    struct httpd_stats *stats = &conn->server->stats;
    struct lookup found;

    stats->n_requests++;
    stats->live_requests++;
    request->live = true;
    request->start_ns = loop_now_ns();
    request->is_head = request->head.method == HTTPD_HEAD;
    label_choose(request);
    request->cors_origin = origin_allowed(request);
    if (request->cors_origin && request->head.method == HTTPD_OPTIONS &&
        httpd_request_header(request, "access-control-request-method")) {
        body_forgo(request);
        preflight_answer(request);
        return;
    }
    found = route_look_up(request);
    if (dispatch_refuse(request, &found)) {
        return;
    }
    request->route = found.route;
    request->rest = found.rest;
    if (!(found.route->flags & HTTPD_ROUTE_BODY)) {
        body_forgo(request);
        httpd_answer_handle(conn);
    } else if (body_admit(request)) {
        if (has_body(request)) {
            body_begin(conn);
        } else {
            httpd_answer_handle(conn);
        }
    }
}
