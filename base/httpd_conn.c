/*
 * One connection: bytes in, bytes out, deadlines.
 *
 * Nothing is freed while a handler or callback of the user is on the stack: answers only append to
 * the output and mark the connection, and the end of the turn (httpd_conn_settle) sends, resumes or
 * closes. That is also what turns the many writes of a turn into one system call.
 *
 * A connection that waits holds no input buffer and at most a small output buffer, none in a
 * stream, so that thousands of silent streams are cheap: reads go into one buffer of the server
 * and are parsed there.
 */
#include "base/httpd_conn.h"

#include <assert.h>
#include <errno.h>
#include <linux/sockios.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    /* Buffers up to this size stay with an idle connection; larger ones are given back. */
    KEEP_BYTES = 4096,
};

/* How long a client may go on sending after our last byte, so that it reads our answer instead of
 * a reset: the time of a slow upload to notice. */
#define LINGER_NS (2 * NS_PER_S)

/* A reset makes some systems forget what they have not yet handed to the program, so it waits until
 * the peer's system has all; this is for a peer that answers no more. */
#define CUT_NS (2 * NS_PER_S)

static void conn_process_input(struct httpd_conn *conn);

size_t httpd_conn_pending(const struct httpd_conn *conn)
{
    return conn->out.bytes - conn->out_sent;
}

static void buf_give_back(struct buf *buf)
{
    if (buf->capacity > KEEP_BYTES) {
        buf_fini(buf);
    } else {
        buf_clear(buf);
    }
}

/* --- watching --- */

static bool reading(const struct httpd_conn *conn)
{
    return !conn->read_paused && !conn->eof && conn->state != HTTPD_CONN_DOOMED &&
           conn->state != HTTPD_CONN_CUT;
}

static void watch_update(struct httpd_conn *conn)
{
    unsigned events = (reading(conn) ? LOOP_READ : 0u) | (conn->write_wanted ? LOOP_WRITE : 0u);

    if (loop_fd_set(conn->watch, events) != STATUS_OK) {
        log_error("httpd", "cannot watch a connection: %m");
        conn->state = HTTPD_CONN_DOOMED;
        httpd_conn_mark(conn);
    }
}

void httpd_conn_mark(struct httpd_conn *conn)
{
    if (!list_linked(&conn->dirty)) {
        list_push_back(&conn->server->dirty, &conn->dirty);
        httpd_settle_later(conn->server);
    }
}

/* --- life --- */

static void state_set(struct httpd_conn *conn, enum httpd_conn_state state, uint64_t timeout_ns)
{
    conn->state = state;
    conn->deadline_ns = timeout_ns ? loop_now_ns() + timeout_ns : 0;
    if (state != HTTPD_CONN_HEAD) {
        list_remove(&conn->idle);
    }
}

void httpd_conn_drop(struct httpd_conn *conn, bool reset)
{
    struct httpd *server = conn->server;
    struct httpd_request *request = &conn->request;

    if (request->live) {
        httpd_close_fn fn = request->on_close;

        server->stats.n_client_closed++;
        server->stats.n_by_class[4]++;
        request->on_close = NULL;
        if (fn) {
            fn(request->close_cookie, request);
        }
    }
    httpd_answer_reset(request);
    httpd_answer_fini(request);
    list_remove(&conn->all);
    list_remove(&conn->idle);
    list_remove(&conn->dirty);
    loop_fd_free(conn->watch);
    if (reset) {
        struct linger at_once = {.l_onoff = 1, .l_linger = 0};

        setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    close(conn->fd);
    buf_fini(&conn->in);
    buf_fini(&conn->out);
    mem_free(conn->peer);
    mem_free(conn);
    httpd_conn_gone(server);
}

void httpd_conn_answered(struct httpd_conn *conn, enum httpd_conn_next next)
{
    if (conn->state != HTTPD_CONN_DOOMED) {
        if (next == HTTPD_NEXT_KEEP) {
            state_set(conn, HTTPD_CONN_HEAD, conn->server->config.idle_timeout_ns);
            list_push_back(&conn->server->idle, &conn->idle);
        } else {
            state_set(conn, HTTPD_CONN_FLUSH, 0);
            conn->cut = next == HTTPD_NEXT_CUT;
        }
    }
    httpd_conn_mark(conn);
}

/* Our last byte is out. */
static void conn_shut(struct httpd_conn *conn)
{
    if (conn->cut) {
        state_set(conn, HTTPD_CONN_CUT, CUT_NS);
    } else {
        shutdown(conn->fd, SHUT_WR);
        state_set(conn, HTTPD_CONN_LINGER, LINGER_NS);
    }
    buf_fini(&conn->in);
    conn->eof = false;
    watch_update(conn);
}

/* --- output --- */

/* False when the peer is gone. */
static bool conn_send(struct httpd_conn *conn)
{
    size_t before = conn->out_sent;

    while (httpd_conn_pending(conn) > 0) {
        ssize_t n = send(conn->fd, conn->out.data + conn->out_sent, httpd_conn_pending(conn),
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                return false;
            }
            break;
        }
        conn->out_sent += (size_t)n;
    }
    conn->server->stats.n_bytes_out += conn->out_sent - before;
    if (conn->out_sent > before || !conn->write_wanted) {
        conn->progress_ns = loop_now_ns();
    }
    conn->write_wanted = httpd_conn_pending(conn) > 0;
    if (!conn->write_wanted) {
        if (conn->request.streaming) {
            buf_fini(&conn->out); /* most of a stream's life is waiting for the next token */
        } else {
            buf_give_back(&conn->out);
        }
        conn->out_sent = 0;
    } else if (conn->out_sent > conn->out.bytes / 2) {
        buf_consume(&conn->out, conn->out_sent);
        conn->out_sent = 0;
    }
    return true;
}

static void drain_report(struct httpd_conn *conn)
{
    struct httpd_request *request = &conn->request;

    if (request->above_high && httpd_conn_pending(conn) <= conn->server->config.stream_low_bytes) {
        request->above_high = false;
        if (request->live && request->on_drain) {
            request->on_drain(request->drain_cookie, request);
        }
    }
}

/* Whether the connection takes another request now. */
static bool wants_request(const struct httpd_conn *conn)
{
    return httpd_conn_pending(conn) < conn->server->config.stream_high_bytes;
}

static void read_update(struct httpd_conn *conn)
{
    bool waits =
        conn->state == HTTPD_CONN_ANSWER || (conn->state == HTTPD_CONN_HEAD && conn->input_blocked);

    conn->read_paused = waits && conn->in.bytes >= HTTPD_PIPELINE_BYTES;
    watch_update(conn);
}

void httpd_conn_settle(struct httpd_conn *conn)
{
    if (conn->state == HTTPD_CONN_DOOMED) {
        httpd_conn_drop(conn, true);
        return;
    }
    if (conn->state == HTTPD_CONN_HEAD && conn->in.bytes > 0) {
        conn_process_input(conn); /* requests that came while one was being answered */
    }
    if (!conn_send(conn)) {
        httpd_conn_drop(conn, true);
        return;
    }
    drain_report(conn);
    if (conn->state == HTTPD_CONN_FLUSH && httpd_conn_pending(conn) == 0) {
        conn_shut(conn);
        return;
    }
    if (conn->input_blocked && wants_request(conn)) {
        httpd_conn_mark(conn); /* others have their turn first */
    }
    read_update(conn);
}

/* --- input --- */

/* Uses bytes of a body that nobody reads, and one empty line before a request. */
static size_t input_skip(struct httpd_conn *conn, const uint8_t *bytes, size_t n)
{
    size_t used = 0;

    if (conn->skip_bytes > 0) {
        used = n < conn->skip_bytes ? n : (size_t)conn->skip_bytes;
        conn->skip_bytes -= used;
    } else if (!conn->blank_line_seen && conn->scan.from == 0 && n >= 2 && bytes[0] == '\r' &&
               bytes[1] == '\n') {
        conn->blank_line_seen = true;
        used = 2;
    }
    return used;
}

static size_t input_head(struct httpd_conn *conn, const uint8_t *bytes, size_t n)
{
    struct httpd_parse_refusal refusal;
    struct httpd *server = conn->server;
    size_t used = input_skip(conn, bytes, n);
    enum httpd_parse_result r;

    if (used > 0 || (n == 1 && bytes[0] == '\r' && !conn->blank_line_seen)) {
        return used;
    }
    if (list_linked(&conn->idle)) {
        list_remove(&conn->idle);
        conn->deadline_ns = loop_now_ns() + server->config.head_timeout_ns;
    }
    r = httpd_parse_scan(&conn->scan, bytes, n, &server->limits, &used, &refusal);
    if (r == HTTPD_PARSE_MORE) {
        return 0;
    }
    if (r == HTTPD_PARSE_DONE) {
        memset(&conn->scan, 0, sizeof(conn->scan));
        conn->blank_line_seen = false;
        r = httpd_parse_head(&conn->request.head, bytes, used, &server->limits, &refusal);
    }
    if (r == HTTPD_PARSE_REFUSED) {
        server->stats.n_refused++;
        httpd_answer_refusal(conn, refusal.status, refusal.code, refusal.text);
        return n;
    }
    state_set(conn, HTTPD_CONN_ANSWER, 0);
    httpd_answer_dispatch(conn);
    if (conn->state == HTTPD_CONN_BODY) {
        conn->deadline_ns = loop_now_ns() + server->config.body_timeout_ns;
    }
    return used;
}

static size_t input_body(struct httpd_conn *conn, const uint8_t *bytes, size_t n)
{
    struct httpd_request *request = &conn->request;
    struct httpd *server = conn->server;
    struct httpd_parse_refusal refusal;
    enum httpd_parse_result r = HTTPD_PARSE_MORE;
    size_t before = request->body.bytes;
    size_t used = 0;

    if (request->head.chunked) {
        r = httpd_parse_chunks(&request->chunks, bytes, n, &server->limits, &request->body, &used,
                               &refusal);
    } else {
        used = n < request->body_left ? n : (size_t)request->body_left;
        buf_append(&request->body, bytes, used);
        request->body_left -= used;
        r = request->body_left == 0 ? HTTPD_PARSE_DONE : HTTPD_PARSE_MORE;
    }
    server->stats.bodies_bytes += request->body.bytes - before;
    if (r == HTTPD_PARSE_REFUSED) {
        server->stats.n_refused++;
        httpd_answer_refusal(conn, refusal.status, refusal.code, refusal.text);
        return n;
    }
    if (r == HTTPD_PARSE_DONE) {
        state_set(conn, HTTPD_CONN_ANSWER, 0);
        httpd_answer_handle(conn);
    } else if (server->stats.bodies_bytes > server->config.max_bodies_bytes) {
        httpd_answer_refusal(conn, 429, "queue_full",
                             "the bodies of the requests being read fill the memory for them");
        return n;
    }
    return used;
}

/* Returns how many bytes were used; the rest waits for more, or for the answer to be given. */
static size_t input_use(struct httpd_conn *conn, const uint8_t *bytes, size_t n)
{
    size_t used = 0;

    conn->input_blocked = false;
    while (used < n) {
        size_t step = 0;

        if (conn->state == HTTPD_CONN_HEAD) {
            if (!wants_request(conn)) {
                conn->input_blocked = true;
                break;
            }
            step = input_head(conn, bytes + used, n - used);
        } else if (conn->state == HTTPD_CONN_BODY) {
            step = input_body(conn, bytes + used, n - used);
        } else if (conn->state != HTTPD_CONN_ANSWER) {
            return n; /* whatever follows a closing answer */
        }
        if (step == 0) {
            break;
        }
        used += step;
    }
    return used;
}

/* Processes what is kept in conn->in. */
static void conn_process_input(struct httpd_conn *conn)
{
    size_t used;

    if (conn->in.bytes == 0) {
        return;
    }
    used = input_use(conn, conn->in.data, conn->in.bytes);
    buf_consume(&conn->in, used);
    if (conn->in.bytes == 0) {
        buf_fini(&conn->in);
    }
}

/* The client ended its side: it has left, unless all its answers are given. */
static void on_eof(struct httpd_conn *conn)
{
    if (conn->state == HTTPD_CONN_FLUSH ||
        (conn->state == HTTPD_CONN_HEAD && httpd_conn_pending(conn) > 0)) {
        state_set(conn, HTTPD_CONN_FLUSH, 0);
        conn->eof = true; /* not asked again: it would be ready for ever */
        httpd_conn_mark(conn);
        watch_update(conn);
        return;
    }
    httpd_conn_drop(conn, false);
}

static void on_readable(struct httpd_conn *conn)
{
    struct httpd *server = conn->server;
    bool busy = conn->state == HTTPD_CONN_ANSWER || conn->input_blocked;
    ssize_t n = recv(conn->fd, server->scratch, busy ? HTTPD_PIPELINE_BYTES : HTTPD_SCRATCH_BYTES,
                     MSG_DONTWAIT);

    if (n < 0) {
        if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            httpd_conn_drop(conn, false);
        }
        return;
    }
    if (n == 0) {
        on_eof(conn);
        return;
    }
    server->stats.n_bytes_in += (size_t)n;
    if (conn->state == HTTPD_CONN_LINGER || conn->state == HTTPD_CONN_FLUSH) {
        return; /* thrown away */
    }
    if (busy) {
        buf_append(&conn->in, server->scratch, (size_t)n);
    } else if (conn->in.bytes > 0) {
        buf_append(&conn->in, server->scratch, (size_t)n);
        conn_process_input(conn);
    } else {
        size_t used = input_use(conn, server->scratch, (size_t)n);

        if (used < (size_t)n) {
            buf_append(&conn->in, server->scratch + used, (size_t)n - used);
        }
    }
    read_update(conn);
}

static void on_conn(void *cookie, unsigned events)
{
    struct httpd_conn *conn = cookie;

    if (events & LOOP_WRITE) {
        httpd_conn_mark(conn);
    }
    if (events & LOOP_READ) {
        on_readable(conn);
    }
}

void httpd_conn_open(struct httpd *server, int fd)
{
    struct httpd_conn *conn = mem_zalloc(sizeof(*conn));

    conn->server = server;
    conn->fd = fd;
    conn->request.conn = conn;
    if (loop_fd_create(server->loop, fd, LOOP_READ, on_conn, conn, &conn->watch) != STATUS_OK) {
        log_error("httpd", "cannot watch a new connection: %m");
        close(fd);
        mem_free(conn);
        return;
    }
    list_push_back(&server->conns, &conn->all);
    list_push_back(&server->idle, &conn->idle);
    server->stats.connections++;
    conn->deadline_ns = loop_now_ns() + server->config.head_timeout_ns;
}

/* --- deadlines --- */

static void on_deadline(struct httpd_conn *conn)
{
    struct httpd *server = conn->server;
    bool first = conn->request.start_ns == 0;

    bool idle = list_linked(&conn->idle) && !first;

    if (conn->state == HTTPD_CONN_HEAD && (idle || (server->draining && conn->in.bytes == 0))) {
        httpd_conn_drop(conn, false);
    } else if (conn->state == HTTPD_CONN_HEAD) {
        server->stats.n_timeouts++;
        httpd_answer_refusal(conn, 408, "request_timeout", "the headers were not whole in time");
    } else if (conn->state == HTTPD_CONN_BODY) {
        server->stats.n_timeouts++;
        httpd_answer_refusal(conn, 408, "request_timeout", "the body was not whole in time");
    } else {
        httpd_conn_drop(conn, conn->state == HTTPD_CONN_CUT);
    }
}

/* A connection whose reading is paused has no watch; it is asked here whether the peer is gone. */
static bool peer_gone(const struct httpd_conn *conn)
{
    struct pollfd probe = {.fd = conn->fd, .events = POLLRDHUP};

    return poll(&probe, 1, 0) == 1 && (probe.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

void httpd_conn_tick(struct httpd_conn *conn, uint64_t now_ns)
{
    struct httpd *server = conn->server;

    if (httpd_conn_pending(conn) > 0 && conn->write_wanted &&
        now_ns - conn->progress_ns > server->config.stall_timeout_ns) {
        server->stats.n_slow_dropped++;
        httpd_conn_drop(conn, true);
    } else if (conn->state == HTTPD_CONN_CUT) {
        int unacked = 0;

        if (ioctl(conn->fd, SIOCOUTQ, &unacked) < 0 || unacked == 0) {
            httpd_conn_drop(conn, true);
        } else if (now_ns > conn->deadline_ns) {
            on_deadline(conn);
        }
    } else if (conn->deadline_ns != 0 && now_ns > conn->deadline_ns) {
        on_deadline(conn);
    } else if (conn->read_paused && conn->state == HTTPD_CONN_ANSWER && peer_gone(conn)) {
        httpd_conn_drop(conn, false);
    }
}
