#include "rpc/link.h"

#include <assert.h>
#include <string.h>
#include <sys/random.h>

#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "rpc/accept.h"
#include "rpc/link_fault.h"
#include "rpc/stream.h"
#include "rpc/wall.h"

/*
 * What a link adds to a stream: a client's end gets a new stream whenever it has none, on a new
 * connection each time, so that nothing of a lost peer (half-dead connection, backoff, queue)
 * reaches the next one. Between streams the timer waits; while one is being opened the same timer
 * bounds the attempt, for a process whose gRPC threads live and whose loop hangs accepts TCP and
 * answers nothing.
 *
 * Backoff doubles from min to max with a jitter of a quarter, and starts over only after a link
 * that lasted: a peer that accepts and refuses, or dies at the first message, is not hammered.
 *
 * The invariant: an owner's callback is the last thing a function does, because the owner may close
 * the link inside it, and close frees at once. The stream lives on by itself until gRPC has given
 * back its batches.
 */

enum { OPEN_PATIENCE_S = 5 };

struct link {
    struct rpc_core *core;
    const struct link_events *events;
    void *cookie;
    bool is_server;
    bool open;
    bool finishing;
    struct stream *stream; /* client: NULL between attempts; server: NULL once closed */
    char *name;

    /* client */
    char *host, *method;
    uint16_t port;
    struct rpc_security security;
    struct rpc_limits limits;
    uint64_t backoff_min_ns, backoff_max_ns, backoff_ns;
    struct loop_timer *timer;

    uint64_t opened_ns, heard_ns;
    struct link_stats totals; /* of the streams before this one */
#ifdef BATON_FAULT_POINTS
    struct link_fault *fault; /* NULL: nothing has gone wrong yet */
#endif
};

static void dial(struct link *link);

/* Lets go of the stream and keeps its numbers. */
static void stream_release(struct link *link)
{
    if (link->stream == NULL) {
        return;
    }
    struct link_stats sum;
    link_stats(link, &sum);
    link->totals = sum;
    link->totals.queued_messages = 0;
    link->totals.queued_bytes = 0;
    struct stream *stream = link->stream;
    link->stream = NULL;
    link->open = false;
#ifdef BATON_FAULT_POINTS
    link_fault_clear(link->fault);
#endif
    stream_drop(stream);
}

static void dial_later(struct link *link)
{
    uint32_t draw = 0;
    if (getrandom(&draw, sizeof draw, GRND_NONBLOCK) != sizeof draw) {
        draw = (uint32_t)loop_now_ns();
    }
    uint64_t quarter = link->backoff_ns / 4;
    uint64_t delay_ns = link->backoff_ns - quarter + (uint64_t)draw * 2 * quarter / UINT32_MAX;
    loop_timer_arm(link->timer, delay_ns);
    link->backoff_ns *= 2;
    if (link->backoff_ns > link->backoff_max_ns) {
        link->backoff_ns = link->backoff_max_ns;
    }
}

static void attempt_failed(struct link *link, enum status status, const char *text)
{
    link->totals.n_failed++;
    log_debug("rpc", "link to %s: no stream, %s", link->name, text);
    dial_later(link);
    if (link->events->failed != NULL) {
        link->events->failed(link->cookie, link, status, text);
    }
}

static void on_opened(void *cookie)
{
    struct link *link = cookie;
    loop_timer_disarm(link->timer);
    link->open = true;
    link->opened_ns = link->heard_ns = loop_now_ns();
    link->totals.n_opened++;
    link->events->opened(link->cookie, link);
}

static void on_closed(void *cookie, enum rpc_code code, const char *text);

static void on_message(void *cookie, const uint8_t *bytes, size_t n_bytes)
{
    struct link *link = cookie;
    if (FAULT_HIT(LINK_RECEIVE) == FAULT_CUT) {
        on_closed(link, RPC_UNAVAILABLE, "cut at a fault point");
        return;
    }
    link->heard_ns = loop_now_ns();
    link->events->message(link->cookie, link, bytes, n_bytes);
}

static void on_ended(void *cookie)
{
    struct link *link = cookie;
    if (link->events->ended == NULL) {
        link_finish(link);
        return;
    }
    link->events->ended(link->cookie, link);
}

static void on_writable(void *cookie)
{
    struct link *link = cookie;
    if (link->events->writable != NULL) {
        link->events->writable(link->cookie, link);
    }
}

static void on_closed(void *cookie, enum rpc_code code, const char *text)
{
    struct link *link = cookie;
    bool was_open = link->open;
    enum status status = rpc_code_status(code);
    if (status == STATUS_CANCELLED) {
        status = STATUS_PEER_LOST; /* not by us: then nobody would be told */
    }
    stream_release(link);
    if (link->is_server) {
        link->events->closed(link->cookie, link, status, text);
        return;
    }
    loop_timer_disarm(link->timer);
    if (!was_open) {
        if (status == STATUS_OK) {
            status = STATUS_UNSUPPORTED;
            text = "what answers there is not a server of this cluster";
        }
        attempt_failed(link, status, text);
        return;
    }
    if (loop_now_ns() - link->opened_ns > 2 * link->backoff_max_ns) {
        link->backoff_ns = link->backoff_min_ns;
    }
    if (!link->finishing || status != STATUS_OK) {
        link->finishing = false;
        dial_later(link);
    }
    link->events->closed(link->cookie, link, status, text);
}

static const struct stream_events client_events = {
    .opened = on_opened,
    .message = on_message,
    .closed = on_closed,
    .writable = on_writable,
};

static const struct stream_events server_events = {
    .message = on_message,
    .ended = on_ended,
    .closed = on_closed,
    .writable = on_writable,
};

static void dial(struct link *link)
{
    struct stream_target target = {.host = link->host,
                                   .port = link->port,
                                   .method = link->method,
                                   .security = &link->security,
                                   .limits = &link->limits};
    struct error err;
    if (FAULT_HIT(LINK_OPEN) == FAULT_FAIL) {
        attempt_failed(link, STATUS_PEER_LOST, "failed at a fault point");
        return;
    }
    enum status status =
        stream_dial(link->core, &target, &client_events, link, &link->stream, &err);
    if (status != STATUS_OK) {
        attempt_failed(link, status, err.text);
        return;
    }
    loop_timer_arm(link->timer, OPEN_PATIENCE_S * NS_PER_S);
}

static void on_timer(void *cookie)
{
    struct link *link = cookie;
    if (link->stream == NULL) {
        dial(link);
        return;
    }
    stream_release(link);
    attempt_failed(link, STATUS_DEADLINE, "connected, and no answer in 5 seconds");
}

enum status link_connect(struct rpc_core *core, const struct link_options *options,
                         const struct link_events *events, void *cookie, struct link **ret_link,
                         struct error *err)
{
    if (options->host == NULL || options->host[0] == '\0' || options->port == 0 ||
        options->method == NULL || options->method[0] != '/') {
        return error_set(err, STATUS_INVALID, "a link needs a host, a port and a method");
    }
    enum status status = rpc_security_check(&options->security, false, err);
    if (status != STATUS_OK) {
        return status;
    }
    struct link *link = mem_zalloc(sizeof *link);
    link->core = core;
    link->events = events;
    link->cookie = cookie;
    link->host = mem_strdup(options->host);
    link->port = options->port;
    link->method = mem_strdup(options->method);
    rpc_security_copy(&link->security, &options->security);
    link->limits = rpc_limits_fill(&options->limits);
    link->backoff_min_ns = options->backoff_min_ns != 0 ? options->backoff_min_ns : NS_PER_S / 10;
    link->backoff_max_ns = options->backoff_max_ns != 0 ? options->backoff_max_ns : 2 * NS_PER_S;
    if (link->backoff_max_ns < link->backoff_min_ns) {
        link->backoff_max_ns = link->backoff_min_ns;
    }
    link->backoff_ns = link->backoff_min_ns;
    if (options->name != NULL) {
        link->name = mem_strdup(options->name);
    } else if (strchr(link->host, ':') != NULL) {
        link->name = mem_printf("[%s]:%u", link->host, link->port);
    } else {
        link->name = mem_printf("%s:%u", link->host, link->port);
    }
    link->timer = loop_timer_create(rpc_core_loop(core), on_timer, link);
    loop_timer_arm(link->timer, 0); /* callbacks come from the loop only */
    *ret_link = link;
    return STATUS_OK;
}

struct link *link_accept(struct rpc_core *core, struct stream *stream)
{
    struct link *link = mem_zalloc(sizeof *link);
    link->core = core;
    link->is_server = true;
    link->open = true;
    link->stream = stream;
    link->name = mem_strdup(stream_peer(stream));
    link->opened_ns = link->heard_ns = loop_now_ns();
    link->totals.n_opened = 1;
    return link;
}

void link_attach(struct link *link, const struct link_events *events, void *cookie)
{
    assert(link->is_server && link->events == NULL && events->message != NULL &&
           events->closed != NULL);
    link->events = events;
    link->cookie = cookie;
    stream_attach(link->stream, &server_events, link);
}

enum status link_send(struct link *link, const void *bytes, size_t n_bytes)
{
    if (!link->open) {
        return STATUS_PEER_LOST;
    }
    return stream_send(link->stream, bytes, n_bytes);
}

void link_pause(struct link *link, bool paused)
{
    if (link->open) {
        stream_pause(link->stream, paused);
    }
}

void link_finish(struct link *link)
{
    if (link->open) {
        link->finishing = true;
        stream_finish(link->stream, RPC_OK, NULL);
    }
}

void link_refuse_code(struct link *link, enum rpc_code code, const char *text)
{
    assert(code != RPC_OK);
    if (link->is_server && link->open) {
        log_warn("rpc", "link from %s refused: %s", link->name, text);
        stream_finish(link->stream, code, text);
    }
    link_close(link);
}

void link_refuse(struct link *link, const char *text)
{
    link_refuse_code(link, RPC_FAILED_PRECONDITION, text);
}

void link_close(struct link *link)
{
    if (link == NULL) {
        return;
    }
    stream_release(link);
#ifdef BATON_FAULT_POINTS
    link_fault_free(link->fault);
#endif
    loop_timer_free(link->timer);
    rpc_security_fini(&link->security);
    mem_free(link->host);
    mem_free(link->method);
    mem_free(link->name);
    mem_free(link);
}

void link_reset(struct link *link)
{
    assert(!link->is_server);
    stream_release(link);
    link->finishing = false;
    loop_timer_arm(link->timer, 0);
}

bool link_is_open(const struct link *link)
{
    return link->open;
}

uint64_t link_idle_ns(const struct link *link)
{
    return link->open ? loop_now_ns() - link->heard_ns : 0;
}

const char *link_name(const struct link *link)
{
    return link->name;
}

void link_stats(const struct link *link, struct link_stats *ret_stats)
{
    *ret_stats = link->totals;
    if (link->stream == NULL) {
        return;
    }
    struct stream_counts now;
    stream_counts(link->stream, &now);
    ret_stats->messages_sent += now.messages_sent;
    ret_stats->bytes_sent += now.bytes_sent;
    ret_stats->messages_received += now.messages_received;
    ret_stats->bytes_received += now.bytes_received;
    ret_stats->n_exhausted += now.n_exhausted;
    ret_stats->queued_messages = now.queued_messages;
    ret_stats->queued_bytes = now.queued_bytes;
    if (now.queued_messages_max > ret_stats->queued_messages_max) {
        ret_stats->queued_messages_max = now.queued_messages_max;
    }
}

#ifdef BATON_FAULT_POINTS
struct link_fault **link_fault_of(struct link *link)
{
    return &link->fault;
}

struct loop *link_fault_loop(struct link *link)
{
    return rpc_core_loop(link->core);
}

void link_fault_cut(struct link *link)
{
    if (link->open && link->events != NULL) {
        on_closed(link, RPC_UNAVAILABLE, "cut at a fault point");
    }
}

void link_fault_writable(struct link *link)
{
    if (link->open && link->events != NULL) {
        on_writable(link);
    }
}
#endif
