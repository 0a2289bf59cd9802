#ifndef BATON_RPC_LINK_H
#define BATON_RPC_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rpc/core.h"

/*
 * A link: one bidirectional stream of messages to a peer, as an object of the loop thread.
 *
 * The client's end (link_connect) dials, and dials again for ever with jittered, bounded backoff,
 * until it is closed; each time that it opens is a new stream, and the peer may be a new process:
 * the hello tells. The server's end (server.h hands it out) is one stream and never revives.
 *
 * Messages arrive whole, once and in order, or the link is lost; what was queued or on its way then
 * is gone, and neither end knows how much of it arrived.
 *
 * By agreement of this project the client speaks first: it sends its hello when the link opens, and
 * the server, when it has checked that, answers with its own or with link_refuse.
 *
 * A stopped or unreachable peer shows as lost within keepalive + keepalive timeout (1.5 s); a dead
 * process on a reachable host at once. A peer whose gRPC threads live and whose loop hangs is not
 * lost: its owner holds a lease against link_idle_ns.
 */

struct link;

/* A table of static life. All run on the loop thread and none after link_close has returned. */
struct link_events {
    /* Client: the server accepted the stream (not yet the hello). Server ends never get it: they
     * are open when handed out. */
    void (*opened)(void *cookie, struct link *link);
    /* One message; bytes (never NULL) live for the call. */
    void (*message)(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes);
    /* Server: the client will send nothing more, and still reads; or it was lost, which `closed`
     * tells next. NULL: link_finish is called for you. */
    void (*ended)(void *cookie, struct link *link);
    /*
     * An open link is over, once for each opening. status is STATUS_OK when the server finished in
     * order; STATUS_PEER_LOST; STATUS_PEER_REFUSED with the peer's words (link_refuse); or as
     * rpc_code_status. text lives for the call. A client end dials again by itself unless the
     * status is STATUS_OK after its own link_finish; a server end waits for link_close.
     */
    void (*closed)(void *cookie, struct link *link, enum status status, const char *text);
    /* Client, may be NULL: an attempt to open failed, for instance by a wrong token
     * (STATUS_PEER_REFUSED); the next follows. */
    void (*failed)(void *cookie, struct link *link, enum status status, const char *text);
    /* May be NULL: after link_send said STATUS_EXHAUSTED the queue is half empty again. */
    void (*writable)(void *cookie, struct link *link);
};

struct link_options {
    const char *host; /* name or literal, without brackets */
    uint16_t port;
    const char *method; /* "/baton.Decode/Serve" */
    const char *name;   /* of the peer, for logs; NULL: host and port */
    struct rpc_security security;
    struct rpc_limits limits;
    uint64_t backoff_min_ns; /* 0: 0.1 s */
    uint64_t backoff_max_ns; /* 0: 2 s */
};

/*
 * Starts to dial; all of options is copied. The link belongs to the caller until link_close.
 * STATUS_INVALID: host, port or method is missing, or the TLS texts do not go together.
 */
enum status must_check link_connect(struct rpc_core *core, const struct link_options *options,
                                    const struct link_events *events, void *cookie,
                                    struct link **ret_link, struct error *err);

/* Server's end, inside the accept callback or later: whom the events go to. Messages wait until
 * then. */
void link_attach(struct link *link, const struct link_events *events, void *cookie);

/*
 * Queues a copy of the message (n_bytes may be 0). STATUS_EXHAUSTED: the queue is full, nothing was
 * taken, `writable` will come. STATUS_TOO_LARGE: over max_message_bytes. STATUS_PEER_LOST: not
 * open, or finished by us.
 */
enum status must_check link_send(struct link *link, const void *bytes, size_t n_bytes);

/*
 * link_send at the fault point of the message, which was packed into bytes, or at one named
 * (base/fault.h); link_send itself in a build without them.
 */
#ifdef BATON_FAULT_POINTS
struct ProtobufCMessage;
enum status must_check link_send_message(struct link *link, const struct ProtobufCMessage *message,
                                         const void *bytes, size_t n_bytes);
enum status must_check link_send_point(struct link *link, int point, const void *bytes,
                                       size_t n_bytes);
#define LINK_SEND_POINT(link, point, bytes, n_bytes) \
    link_send_point(link, FAULT_##point, bytes, n_bytes)
#else
#define link_send_message(link, message, bytes, n_bytes) link_send(link, bytes, n_bytes)
#define LINK_SEND_POINT(link, point, bytes, n_bytes) link_send(link, bytes, n_bytes)
#endif

/*
 * True: no further message callback runs and nothing more is read, so the peer's queue fills and
 * in the end its link_send refuses. Keepalive goes on. False: reading resumes. A new stream of a
 * client end begins unpaused.
 */
void link_pause(struct link *link, bool paused);

/*
 * Ends our direction once the queue has been sent: a client half-closes and waits for the server,
 * and does not dial again after that; a server ends the stream with OK. closed follows.
 */
void link_finish(struct link *link);

/*
 * Server's end: sends what is queued, then ends the stream with FAILED_PRECONDITION and the text
 * (at most 1 KiB is sent), which the peer sees as STATUS_PEER_REFUSED. Takes the link: no callback
 * runs after this, and it must not be used again.
 */
void link_refuse(struct link *link, const char *text);

/* The same with any code but RPC_OK. */
void link_refuse_code(struct link *link, enum rpc_code code, const char *text);

/*
 * Ends the stream now, drops what is queued, and releases the link; the peer may not see what it
 * had not yet read either. A server's end that was finished still sends what is queued, for at most
 * 2 s, and its peer reads all of it before the end; rpc_core_n_unsent tells whether anything is.
 * NULL is allowed. May be called inside its own callbacks.
 */
void link_close(struct link *link);

/* Client's end: drops the stream (closed does not run) and dials again at once: for a peer that
 * missed its lease. */
void link_reset(struct link *link);

bool link_is_open(const struct link *link);

/* Since the last message came, or since the opening; 0 when not open. */
uint64_t link_idle_ns(const struct link *link);

/* What the other end is called: options.name, or for a server's end the address it came from. */
const char *link_name(const struct link *link);

struct link_stats {
    uint64_t messages_sent, bytes_sent; /* handed to gRPC, of all streams of the link */
    uint64_t messages_received, bytes_received;
    uint64_t n_opened, n_failed; /* openings and failed attempts */
    size_t queued_messages, queued_bytes;
    size_t queued_messages_max;
    uint64_t n_exhausted; /* link_send refused */
};

void link_stats(const struct link *link, struct link_stats *ret_stats);

#endif
