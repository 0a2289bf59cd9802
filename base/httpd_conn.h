#ifndef BATON_BASE_HTTPD_CONN_H
#define BATON_BASE_HTTPD_CONN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/httpd.h"
#include "base/httpd_parse.h"
#include "base/list.h"

/*
 * Inside of the server, shared by httpd.c (server, accept, clock), httpd_conn.c (bytes in and out
 * of a connection) and httpd_answer.c (what is written). Nobody else includes it.
 */

enum {
    HTTPD_SCRATCH_BYTES = 64 << 10, /* one read */
    /* Bytes of later requests kept while one is being answered; more stays in the kernel. */
    HTTPD_PIPELINE_BYTES = 16 << 10,
    /* A body nobody reads is skipped up to here, to keep the connection; above, it is closed. */
    HTTPD_SKIP_BYTES = 64 << 10,
    HTTPD_LABEL_BYTES = 129,
};

enum httpd_conn_state {
    HTTPD_CONN_HEAD,   /* between requests, or in the head of one */
    HTTPD_CONN_BODY,   /* reading a body */
    HTTPD_CONN_ANSWER, /* with its handler */
    HTTPD_CONN_FLUSH,  /* closes once the output is gone */
    HTTPD_CONN_LINGER, /* our side is shut; what the client still sends is thrown away */
    HTTPD_CONN_CUT,    /* a cut 1.0 stream waits until the peer has what was sent */
    HTTPD_CONN_DOOMED, /* to be dropped at the end of the turn */
};

struct httpd_conn;

/* Part of its connection, used again for each request on it; loop thread. */
struct httpd_request {
    struct httpd_conn *conn;
    struct httpd_parse_head head;
    struct httpd_parse_chunks chunks;
    struct buf body;
    uint64_t body_left; /* of a body with a length */
    const struct httpd_route *route;
    const char *rest;
    const char *label;
    const char *cors_origin; /* allowed origin to name in the answer, or NULL */
    struct buf extra;        /* header lines added by the handler */
    uint64_t start_ns;

    httpd_close_fn on_close;
    void *close_cookie;
    httpd_drain_fn on_drain;
    void *drain_cookie;

    bool is_head;
    bool live;    /* accepted by the gate and not answered whole */
    bool started; /* the answer's head is written */
    bool streaming;
    bool chunked; /* the answer's body is in chunks */
    bool close_after;
    bool above_high;
    char label_made[24];
};

/* Owned by its server; loop thread. */
struct httpd_conn {
    struct httpd *server;
    struct list all;   /* in server->conns */
    struct list idle;  /* in server->idle while it waits for a request */
    struct list dirty; /* in server->dirty when it has something to do at the end of the turn */
    struct loop_fd *watch;
    int fd;
    enum httpd_conn_state state;

    struct buf in; /* bytes read and not yet used */
    struct httpd_parse_scan scan;
    uint64_t skip_bytes; /* of a body that nobody reads */
    bool input_blocked;  /* a request in conn->in waits until earlier answers have left */
    bool read_paused;
    bool eof;
    bool blank_line_seen; /* the one empty line that may stand before a request */

    struct buf out;
    size_t out_sent;
    bool write_wanted;
    bool cut;             /* ends by a reset once the peer has all that was sent */
    uint64_t progress_ns; /* when the peer last took bytes, or when there were some again */
    uint64_t deadline_ns; /* of the state; 0: none */
    char *peer;           /* text of its address once asked for */

    struct httpd_request request;
};

struct httpd {
    struct loop *loop;
    struct httpd_config config;
    struct httpd_parse_limits limits;
    char **keys;
    char **origins;
    struct httpd_route *routes;
    size_t n_routes;

    int listen_fd;
    struct loop_fd *listen_watch;
    bool accept_paused;
    uint64_t accept_warned_ns;
    uint16_t port;
    char *address;

    struct list conns;
    struct list idle; /* longest idle first */
    struct list dirty;
    bool dirty_deferred;
    struct loop_timer *tick;

    bool draining;
    bool stopping;
    loop_fn on_stopped;
    void *stopped_cookie;

    struct httpd_stats stats;
    uint64_t stats_turn; /* turn in which pending_bytes was summed */
    uint64_t label_seed;
    uint64_t n_labels;
    char date[64]; /* "Date: ...\r\n" of date_s */
    int64_t date_s;
    uint8_t *scratch;
};

/* --- httpd.c --- */

/* Called once for each connection that goes. */
void httpd_conn_gone(struct httpd *server);

/* Has httpd_conn_settle called for the connections in server->dirty when the turn ends. */
void httpd_settle_later(struct httpd *server);

/* --- httpd_conn.c --- */

/* Takes the descriptor, also on failure. */
void httpd_conn_open(struct httpd *server, int fd);

/* Drops it; on_close runs if a request was live. The connection is freed. */
void httpd_conn_drop(struct httpd_conn *conn, bool reset);

/* To be flushed and looked at again when the turn ends. */
void httpd_conn_mark(struct httpd_conn *conn);

enum httpd_conn_next {
    HTTPD_NEXT_KEEP,  /* takes another request */
    HTTPD_NEXT_CLOSE, /* closes when the output is gone */
    HTTPD_NEXT_CUT,   /* the same by a reset, for a body that ends with the connection */
};

/* The answer is whole. */
void httpd_conn_answered(struct httpd_conn *conn, enum httpd_conn_next next);

/* End of turn: flushes, resumes or closes. May free it. */
void httpd_conn_settle(struct httpd_conn *conn);

/* Looks at its deadlines. May free it. */
void httpd_conn_tick(struct httpd_conn *conn, uint64_t now_ns);

size_t httpd_conn_pending(const struct httpd_conn *conn);

/* --- httpd_answer.c --- */

/* The head is whole: answers at once, or leaves the state at BODY or ANSWER. */
void httpd_answer_dispatch(struct httpd_conn *conn);

/* The body is whole: runs the handler. */
void httpd_answer_handle(struct httpd_conn *conn);

/* An answer to a request that the gate refused, or that took too long; closes. */
void httpd_answer_refusal(struct httpd_conn *conn, int status, const char *code, const char *text);

/* Forgets the request, answered or not. */
void httpd_answer_reset(struct httpd_request *request);

/* Releases what the request has kept for the next one. */
void httpd_answer_fini(struct httpd_request *request);

void httpd_answer_release_body(struct httpd_request *request);

#endif
