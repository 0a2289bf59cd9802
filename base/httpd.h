#ifndef BATON_BASE_HTTPD_H
#define BATON_BASE_HTTPD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/loop.h"
#include "base/status.h"

/*
 * A strict HTTP/1.1 server on the loop. It owns framing, limits, keys, CORS, timeouts and the
 * noticing of clients that leave; what the routes mean is the caller's. All of it is called on the
 * loop thread, and all callbacks run there.
 *
 * What the gate refuses is refused before a handler sees it, with the JSON error object of the API
 * and "Connection: close": a repeated Host, Content-Length or Transfer-Encoding, 1.1 without Host,
 * both a length and chunks, a transfer coding other than exactly "chunked", a length that is not
 * plain digits, bare LF or CR, space before a header's colon, folded headers, control bytes, chunk
 * sizes that are not plain hex. Paths are matched byte for byte: nothing is decoded or normalised.
 */

struct httpd;
struct httpd_request;

enum httpd_method {
    HTTPD_GET = 1u << 0,
    HTTPD_HEAD = 1u << 1, /* never in a route: what takes GET takes HEAD */
    HTTPD_POST = 1u << 2,
    HTTPD_PUT = 1u << 3,
    HTTPD_DELETE = 1u << 4,
    HTTPD_PATCH = 1u << 5,
    HTTPD_OPTIONS = 1u << 6,
    HTTPD_OTHER = 1u << 7, /* TRACE, CONNECT and unknown ones; always 405 or 404 */
};

enum {
    HTTPD_ROUTE_OPEN = 1u << 0, /* needs no key even where keys are set */
    HTTPD_ROUTE_BODY = 1u << 1, /* reads a body: the handler runs once it is whole; 411 without */
    HTTPD_ROUTE_JSON = 1u << 2, /* 415 for another Content-Type and for any Content-Encoding */
};

/*
 * Answers the request now (httpd_reply, httpd_reply_error, httpd_stream_start) or keeps it and
 * answers later. One that keeps it sets httpd_request_on_close.
 */
typedef void (*httpd_handler_fn)(void *cookie, struct httpd_request *request);

/* The request is gone when this returns; nothing may be called on it inside but accessors. */
typedef void (*httpd_close_fn)(void *cookie, struct httpd_request *request);

/* The output fell to or below the low mark after it had been above the high mark. */
typedef void (*httpd_drain_fn)(void *cookie, struct httpd_request *request);

struct httpd_route {
    unsigned methods; /* HTTPD_GET | HTTPD_POST ... */
    const char *path; /* exact; one that ends with '/' matches what begins with it and is longer */
    unsigned flags;
    httpd_handler_fn handler;
    void *cookie;
};

/* Start from httpd_config_init. Strings and lists are copied by httpd_create. */
struct httpd_config {
    const char *host;        /* "127.0.0.1" */
    uint16_t port;           /* 0: the kernel picks, see httpd_port */
    const char *const *keys; /* any of these is accepted as bearer key; none: no keys asked */
    size_t n_keys;
    const char *const *cors_origins; /* exact origins, or "*"; none: CORS is off */
    size_t n_cors_origins;
    size_t max_body_bytes;     /* 32 MiB */
    size_t max_bodies_bytes;   /* 1 GiB, of all requests being read; beyond: 429 */
    size_t max_head_bytes;     /* 32 KiB, request line and headers */
    size_t max_headers;        /* 100, at most 255 */
    size_t max_connections;    /* 10,000, and what RLIMIT_NOFILE leaves; beyond, idle ones
                                * are closed, else accepting waits */
    uint64_t head_timeout_ns;  /* 10 s from the first byte (or the accept) to whole headers */
    uint64_t body_timeout_ns;  /* 30 s from the headers to a whole body */
    uint64_t idle_timeout_ns;  /* 120 s between requests */
    uint64_t stall_timeout_ns; /* 30 s with bytes to send of which the peer takes none */
    size_t stream_high_bytes;  /* 64 KiB */
    size_t stream_low_bytes;   /* 16 KiB */
    size_t stream_max_bytes;   /* 1 MiB: a stream that is written beyond it is dropped */
};

/* Counters since the start and gauges; plain numbers of the loop thread. */
struct httpd_stats {
    uint64_t n_accepted;
    uint64_t n_requests;    /* heads that passed the gate */
    uint64_t n_refused;     /* by the gate */
    uint64_t n_by_class[6]; /* answers by status / 100; [4] has the 499 too */
    uint64_t n_unauthorized;
    uint64_t n_client_closed; /* left before their answer was whole: 499 */
    uint64_t n_slow_dropped;  /* dropped by stall time-out or stream_max_bytes */
    uint64_t n_timeouts;      /* 408 */
    uint64_t n_accept_paused; /* times that accepting stopped at the cap or for want of files */
    uint64_t n_bytes_in;
    uint64_t n_bytes_out;
    size_t connections;   /* gauge */
    size_t live_requests; /* gauge: accepted by the gate, answer not whole */
    size_t live_streams;  /* gauge */
    size_t pending_bytes; /* gauge: output not yet taken by the kernel */
    size_t bodies_bytes;  /* gauge: request bodies being read or held */
};

void httpd_config_init(struct httpd_config *config);

/*
 * Binds and listens; accepts from the first loop turn on. Fails as net_listen does, STATUS_INVALID
 * for a config that contradicts itself.
 */
enum status must_check httpd_create(struct loop *loop, const struct httpd_config *config,
                                    struct error *err, struct httpd **ret_server);

/* Copies the route. Two routes may share a path with different methods. Not while running. */
void httpd_route_add(struct httpd *server, const struct httpd_route *route);

uint16_t httpd_port(const struct httpd *server);
/* "127.0.0.1:8000", "[::]:8000" */
const char *httpd_address(const struct httpd *server);
/* Valid until the next turn. */
const struct httpd_stats *httpd_stats(struct httpd *server);

/*
 * First step of a stop: every answer from now on carries "Connection: close", idle connections are
 * closed. New connections are still accepted, so that probes and new work get their 503.
 */
void httpd_drain(struct httpd *server);

/*
 * Second step: closes the listening socket, and calls fn(cookie) (may be NULL) from the loop once
 * the last connection is gone. May follow httpd_drain or stand alone (it drains as well).
 */
void httpd_stop(struct httpd *server, loop_fn fn, void *cookie);

/*
 * Closes all connections at once; on_close runs for each live request before this returns. Not from
 * inside a handler or callback of this server. NULL is allowed.
 */
void httpd_free(struct httpd *server);

/* --- the request: valid until it is answered whole, or until on_close returned --- */

enum httpd_method httpd_request_method(const struct httpd_request *request); /* HEAD shows as GET */
bool httpd_request_is_head(const struct httpd_request *request);

/* The raw path, without the query; and the part after the prefix of a prefix route, else "". */
const char *httpd_request_path(const struct httpd_request *request);
const char *httpd_request_rest(const struct httpd_request *request);

/* Raw text after '?', "" if none. */
const char *httpd_request_query(const struct httpd_request *request);

/* First header of that name (any case), blanks trimmed; NULL if there is none. */
const char *httpd_request_header(const struct httpd_request *request, const char *name);

/*
 * The body; released when the answer starts (reply or stream start). Take hands its bytes over to
 * the caller, who calls buf_fini; the request then has none.
 */
const uint8_t *httpd_request_body(const struct httpd_request *request, size_t *ret_bytes);
void httpd_request_take_body(struct httpd_request *request, struct buf *ret_body);

/* X-Request-Id: the client's if it is 1-128 bytes of printable ASCII, else one made here. */
const char *httpd_request_label(const struct httpd_request *request);

/* Numeric "address:port" of the client. */
const char *httpd_request_peer(const struct httpd_request *request);

/* When the head was whole, by loop_now_ns. */
uint64_t httpd_request_start_ns(const struct httpd_request *request);

/*
 * fn runs once, from the loop, if the request ends before it was answered whole: the client closed,
 * reset, or half-closed its side, was dropped as a slow reader, or the server is freed. It never
 * runs once httpd_reply*, httpd_stream_end or httpd_stream_abort was called. NULL fn: none.
 */
void httpd_request_on_close(struct httpd_request *request, httpd_close_fn fn, void *cookie);

/* --- answers: each request gets exactly one --- */

/*
 * Adds a header to the coming answer; not one that httpd makes itself (Content-Length,
 * Transfer-Encoding, Connection, Date, Content-Type, X-Request-Id). STATUS_INVALID, and nothing is
 * added, when the value has a control byte.
 */
enum status httpd_header_add(struct httpd_request *request, const char *name, const char *value);

/* The connection is closed after this answer. */
void httpd_close_after(struct httpd_request *request);

/* Whole answer; bytes are copied. content_type NULL: none (and with n_bytes 0 no body). Ends it. */
void httpd_reply(struct httpd_request *request, int status, const char *content_type,
                 const void *bytes, size_t n_bytes);

/*
 * Ends the request with {"error": {"message", "type", "param", "code"}}; param NULL writes null,
 * the message is cut at 2,000 bytes and made valid UTF-8 and JSON. Adds WWW-Authenticate to 401.
 */
void httpd_reply_error(struct httpd_request *request, int status, const char *type,
                       const char *code, const char *param, const char *fmt, ...) PRINTF_LIKE(6, 7);

/* The same object appended to out, for error events inside a stream. */
void httpd_error_write(struct buf *out, const char *type, const char *code, const char *param,
                       const char *message);

/* "Retry-After: seconds" on the coming answer. */
void httpd_retry_after(struct httpd_request *request, unsigned seconds);

/*
 * Sends status and headers now ("X-Accel-Buffering: no" and "Cache-Control: no-store" among them)
 * and leaves the body open: chunks on 1.1, until close on 1.0, none for HEAD.
 */
void httpd_stream_start(struct httpd_request *request, int status, const char *content_type);

/*
 * Appends to the body; what one loop turn writes leaves in one system call. STATUS_EXHAUSTED when
 * the output would pass stream_max_bytes: the client is dropped, on_close follows from the loop.
 */
enum status must_check httpd_stream_write(struct httpd_request *request, const void *bytes,
                                          size_t n_bytes);

/* Output not yet taken by the kernel. Stop producing above stream_high_bytes. */
size_t httpd_stream_pending_bytes(const struct httpd_request *request);

/* Called each time the output falls to the low mark after having been above the high one. */
void httpd_stream_on_drain(struct httpd_request *request, httpd_drain_fn fn, void *cookie);

/* A clean end: the last chunk. Ends the request. */
void httpd_stream_end(struct httpd_request *request);

/*
 * A failed end: what was written is sent, then the connection is cut without a last chunk, so that
 * no client takes the body for whole. Ends the request.
 */
void httpd_stream_abort(struct httpd_request *request);

#endif
