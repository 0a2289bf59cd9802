#include "rpc/stream.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>

#include "base/log.h"
#include "base/mem.h"
#include "rpc/wall.h"

/*
 * The batches of one call. There are at most four out at a time, each with its own tag: opening
 * (initial metadata both ways), reading one message, writing one message or the end, and the end of
 * the call. n_ops counts those whose fn has not returned; the call is over when the batch of its
 * end is back and n_ops is 0, and only then may the struct go. So an event handler may drop the
 * stream at any point: the batch it stands in still counts.
 *
 * Order at the end. gRPC gives the status of a client's call only after all its messages were
 * pulled, or when the connection broke; so nothing that arrived before an orderly end is lost. A
 * message that was pulled while the owner paused is held here, and an orderly end waits for it.
 *
 * A server of ours marks its initial metadata. Without the mark the stream does not count as
 * opened: a refusal may also come with initial metadata, and a port may belong to somebody else.
 */

enum {
    TEXT_MAX = 1024,
    KEEP_BYTES = 256 * 1024, /* a larger message's memory is not kept for the next */
    FINISH_PATIENCE_S = 2,   /* for a dropped stream that has still something to say */
};

static const char mark_key[] = "x-baton-link";
static const char mark_value[] = "1";

struct message {
    struct message *next;
    grpc_slice slice;
};

struct stream {
    struct rpc_core *core;
    struct rpc_limits limits;
    const struct stream_events *events; /* NULL: nobody is attached yet */
    void *cookie;
    bool is_server;
    bool dropped; /* the owner has let go */
    bool opened;  /* client: marked initial metadata came; server: from the start */
    bool paused;
    bool reading;      /* op_read is out */
    bool read_at_once; /* the last read completed inside the call that started it */
    bool read_due;     /* the next one was deferred */
    bool read_put_off; /* and again */
    bool read_ended;
    bool writing;             /* op_write is out */
    bool write_due;           /* write_next was deferred to the end of this turn */
    bool write_broke;         /* a write failed: the connection is gone, its status follows */
    bool finishing, finished; /* end wanted; its batch was started */
    bool over_seen;           /* op_over is back */
    bool closed_told;
    bool was_full;
    unsigned n_ops;

    grpc_channel *channel; /* client */
    grpc_call *call;
    char *peer;
    void (*gone)(void *cookie);
    void *gone_cookie;
    struct loop_timer *patience;

    struct rpc_op op_open, op_read, op_write, op_over;
    grpc_metadata mark, auth;
    grpc_metadata_array initial_metadata, trailing_metadata;
    grpc_byte_buffer *incoming;
    grpc_byte_buffer *held;
    struct buf bytes; /* content of the message being delivered */

    struct message *first, **last;
    struct stream_counts counts;

    enum rpc_code finish_code;
    grpc_slice finish_text;

    grpc_status_code over_code;
    grpc_slice over_text;
    const char *over_error; /* client: gRPC's long form, unused but to be freed */
    int over_cancelled;     /* server */
};

#define STREAM_OF(op, member) \
    ((struct stream *)(void *)((char *)(op)-offsetof(struct stream, member)))

static void read_start(struct stream *stream);
static void read_later(struct stream *stream);
static void write_next(struct stream *stream);

/* True: it completed inside this call. */
static bool batch_start(struct stream *stream, struct rpc_op *op, const grpc_op *ops, size_t n_ops)
{
    stream->n_ops++;
    return rpc_core_batch_start(stream->core, stream->call, ops, n_ops, op);
}

static void message_free(struct message *message)
{
    grpc_slice_unref(message->slice);
    mem_free(message);
}

static void queue_clear(struct stream *stream)
{
    while (stream->first != NULL) {
        struct message *message = stream->first;
        stream->first = message->next;
        message_free(message);
    }
    stream->last = &stream->first;
    struct rpc_totals *totals = rpc_core_totals(stream->core);
    totals->queued_messages -= stream->counts.queued_messages;
    totals->queued_bytes -= stream->counts.queued_bytes;
    stream->counts.queued_messages = 0;
    stream->counts.queued_bytes = 0;
}

static void on_write_due(void *cookie);
static void on_read_due(void *cookie);

static void stream_free(struct stream *stream)
{
    if (stream->read_due) {
        loop_defer_cancel(rpc_core_loop(stream->core), on_read_due, stream);
    }
    if (stream->write_due) {
        loop_defer_cancel(rpc_core_loop(stream->core), on_write_due, stream);
    }
    loop_timer_free(stream->patience);
    queue_clear(stream);
    if (stream->held != NULL) {
        grpc_byte_buffer_destroy(stream->held);
    }
    buf_fini(&stream->bytes);
    grpc_metadata_array_destroy(&stream->initial_metadata);
    grpc_metadata_array_destroy(&stream->trailing_metadata);
    grpc_slice_unref(stream->auth.value);
    grpc_slice_unref(stream->finish_text);
    grpc_slice_unref(stream->over_text);
    gpr_free((void *)stream->over_error);
    mem_free(stream->peer);
    grpc_call_unref(stream->call);
    if (stream->channel != NULL) {
        grpc_channel_destroy(stream->channel);
    }
    if (stream->gone != NULL) {
        stream->gone(stream->gone_cookie);
    }
    rpc_core_live_add(stream->core, -1);
    mem_free(stream);
}

/* What the end of the call means, as code and a text for people. */
static enum rpc_code over_text_make(struct stream *stream, char text[TEXT_MAX + 64])
{
    if (stream->is_server) {
        if (stream->over_cancelled) {
            strcpy(text, "the client left or the connection broke");
            return RPC_UNAVAILABLE;
        }
        strcpy(text, "finished");
        return stream->finish_code;
    }
    enum rpc_code code = (enum rpc_code)stream->over_code;
    size_t bytes = GRPC_SLICE_LENGTH(stream->over_text);
    bytes = bytes > TEXT_MAX ? TEXT_MAX : bytes;
    const char *details = (const char *)GRPC_SLICE_START_PTR(stream->over_text);
    if (code == RPC_OK) {
        strcpy(text, "finished");
    } else if (bytes > 0 && code == RPC_FAILED_PRECONDITION) {
        snprintf(text, TEXT_MAX + 64, "%.*s", (int)bytes, details);
    } else {
        snprintf(text, TEXT_MAX + 64, "%s: %.*s", rpc_code_name(code), (int)bytes, details);
    }
    return code;
}

/* Ends the stream's life, or tells its owner, if all batches are back. The last thing a function
 * does with the stream. */
static void settle(struct stream *stream)
{
    if (stream->n_ops > 0 || !stream->over_seen) {
        return;
    }
    if (stream->dropped) {
        stream_free(stream);
        return;
    }
    if (stream->closed_told || stream->events == NULL) {
        return;
    }
    char text[TEXT_MAX + 64];
    enum rpc_code code = over_text_make(stream, text);
    if (stream->held != NULL && code == RPC_OK) {
        return; /* the owner paused: the end comes after the message */
    }
    stream->closed_told = true;
    stream->events->closed(stream->cookie, code, text);
}

static void op_done(struct stream *stream)
{
    assert(stream->n_ops > 0);
    stream->n_ops--;
    settle(stream);
}

static void deliver(struct stream *stream, grpc_byte_buffer *buffer)
{
    rpc_bytes_read(buffer, &stream->bytes);
    grpc_byte_buffer_destroy(buffer);
    stream->counts.messages_received++;
    stream->counts.bytes_received += stream->bytes.bytes;
    struct rpc_totals *totals = rpc_core_totals(stream->core);
    totals->messages_received++;
    totals->bytes_received += stream->bytes.bytes;
    const uint8_t *bytes = stream->bytes.bytes > 0 ? stream->bytes.data : (const uint8_t *)"";
    stream->events->message(stream->cookie, bytes, stream->bytes.bytes);
    if (stream->bytes.capacity > KEEP_BYTES) {
        buf_fini(&stream->bytes);
    }
}

static void on_read(struct rpc_op *op, bool ok)
{
    struct stream *stream = STREAM_OF(op, op_read);
    stream->reading = false;
    grpc_byte_buffer *buffer = stream->incoming;
    stream->incoming = NULL;
    if (!ok || buffer == NULL) {
        if (buffer != NULL) {
            grpc_byte_buffer_destroy(buffer);
        }
        stream->read_ended = true;
        if (!stream->dropped && stream->is_server && !stream->over_seen &&
            stream->events->ended != NULL) {
            stream->events->ended(stream->cookie);
        }
    } else if (stream->dropped) {
        grpc_byte_buffer_destroy(buffer);
    } else if (stream->paused) {
        stream->held = buffer;
    } else {
        deliver(stream, buffer);
        if (stream->read_at_once) {
            read_start(stream);
        } else {
            read_later(stream);
        }
    }
    op_done(stream);
}

static void read_start(struct stream *stream)
{
    if (stream->reading || stream->read_due || stream->read_ended || stream->dropped ||
        stream->paused || !stream->opened || stream->events == NULL) {
        return;
    }
    stream->reading = true;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &stream->incoming};
    stream->read_at_once = batch_start(stream, &stream->op_read, &op, 1);
}

/*
 * A read that finds nothing sends the peer new credit (HTTP/2's window), a packet that wakes it.
 * What the message before has to say comes first: it is deferred by callbacks, and what they cause
 * is deferred once more. While messages come faster than they are handled each read has its message
 * at once, and this is not done.
 */
static void on_read_due(void *cookie)
{
    struct stream *stream = cookie;
    if (!stream->read_put_off) {
        stream->read_put_off = true;
        loop_defer(rpc_core_loop(stream->core), on_read_due, stream);
        return;
    }
    stream->read_due = false;
    read_start(stream);
}

static void read_later(struct stream *stream)
{
    if (!stream->read_due) {
        stream->read_due = true;
        stream->read_put_off = false;
        loop_defer(rpc_core_loop(stream->core), on_read_due, stream);
    }
}

static bool is_mark(const grpc_metadata *metadata)
{
    return grpc_slice_str_cmp(metadata->key, mark_key) == 0;
}

static void on_open(struct rpc_op *op, bool ok)
{
    struct stream *stream = STREAM_OF(op, op_open);
    if (!stream->is_server && ok && !stream->dropped) {
        for (size_t i = 0; i < stream->initial_metadata.count; i++) {
            stream->opened = stream->opened || is_mark(&stream->initial_metadata.metadata[i]);
        }
        /* unary calls go to any server and have no use for the mark */
        bool wants_mark = stream->events->opened != NULL;
        if (stream->opened && wants_mark) {
            stream->events->opened(stream->cookie);
        }
        stream->opened = stream->opened || !wants_mark;
        read_start(stream);
    }
    op_done(stream);
}

static void on_over(struct rpc_op *op, bool ok)
{
    struct stream *stream = STREAM_OF(op, op_over);
    stream->over_seen = true;
    if (!ok && !stream->is_server) {
        stream->over_code = GRPC_STATUS_UNKNOWN;
    }
    queue_clear(stream);
    op_done(stream);
}

static void writing_set(struct stream *stream, bool writing)
{
    stream->writing = writing;
    struct rpc_totals *totals = rpc_core_totals(stream->core);
    totals->writing = writing ? totals->writing + 1 : totals->writing - 1;
}

static void finish_start(struct stream *stream)
{
    stream->finished = true;
    writing_set(stream, true);
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    if (stream->is_server) {
        op.op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        op.data.send_status_from_server.status = (grpc_status_code)stream->finish_code;
        op.data.send_status_from_server.status_details = &stream->finish_text;
    }
    batch_start(stream, &stream->op_write, &op, 1);
}

static void on_write(struct rpc_op *op, bool ok)
{
    struct stream *stream = STREAM_OF(op, op_write);
    writing_set(stream, false);
    if (!ok) {
        stream->write_broke = true;
        queue_clear(stream);
    }
    write_next(stream);
    if (stream->was_full && !stream->dropped && !stream->write_broke &&
        stream->counts.queued_messages <= stream->limits.queue_messages / 2 &&
        stream->counts.queued_bytes <= stream->limits.queue_bytes / 2) {
        stream->was_full = false;
        if (stream->events != NULL && stream->events->writable != NULL) {
            stream->events->writable(stream->cookie);
        }
    }
    op_done(stream);
}

/* Starts the next write, if one is due and none is out. */
static void write_next(struct stream *stream)
{
    if (stream->writing || stream->write_broke || stream->finished || stream->over_seen) {
        return;
    }
    struct message *message = stream->first;
    if (message == NULL) {
        if (stream->finishing) {
            finish_start(stream);
        }
        return;
    }
    stream->first = message->next;
    if (stream->first == NULL) {
        stream->last = &stream->first;
    }
    size_t bytes = GRPC_SLICE_LENGTH(message->slice);
    stream->counts.queued_messages--;
    stream->counts.queued_bytes -= bytes;
    stream->counts.messages_sent++;
    stream->counts.bytes_sent += bytes;
    struct rpc_totals *totals = rpc_core_totals(stream->core);
    totals->queued_messages--;
    totals->queued_bytes -= bytes;
    totals->messages_sent++;
    totals->bytes_sent += bytes;
    /* the batch moves the slices out; the buffer itself stays ours and goes at once */
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&message->slice, 1);
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = buffer};
    if (stream->first != NULL) {
        op.flags = GRPC_WRITE_BUFFER_HINT; /* more follows at once: one packet for both */
    }
    writing_set(stream, true);
    batch_start(stream, &stream->op_write, &op, 1);
    grpc_byte_buffer_destroy(buffer);
    message_free(message);
}

static void on_write_due(void *cookie)
{
    struct stream *stream = cookie;
    stream->write_due = false;
    write_next(stream);
}

enum status stream_send(struct stream *stream, const void *bytes, size_t n_bytes)
{
    if (stream->finishing || stream->write_broke || stream->over_seen) {
        return STATUS_PEER_LOST;
    }
    if (n_bytes > stream->limits.max_message_bytes) {
        return STATUS_TOO_LARGE;
    }
    struct stream_counts *counts = &stream->counts;
    if (counts->queued_messages >= stream->limits.queue_messages ||
        (counts->queued_messages > 0 &&
         counts->queued_bytes + n_bytes > stream->limits.queue_bytes)) {
        stream->was_full = true;
        counts->n_exhausted++;
        rpc_core_totals(stream->core)->n_exhausted++;
        return STATUS_EXHAUSTED;
    }
    struct message *message = mem_alloc(sizeof *message);
    message->next = NULL;
    message->slice = grpc_slice_from_copied_buffer(bytes == NULL ? "" : bytes, n_bytes);
    *stream->last = message;
    stream->last = &message->next;
    counts->queued_messages++;
    counts->queued_bytes += n_bytes;
    rpc_core_totals(stream->core)->queued_messages++;
    rpc_core_totals(stream->core)->queued_bytes += n_bytes;
    if (counts->queued_messages > counts->queued_messages_max) {
        counts->queued_messages_max = counts->queued_messages;
    }
    /* at the end of the turn: the messages of one turn then go as one packet */
    if (!stream->write_due && !stream->writing) {
        stream->write_due = true;
        loop_defer(rpc_core_loop(stream->core), on_write_due, stream);
    }
    return STATUS_OK;
}

void stream_pause(struct stream *stream, bool paused)
{
    stream->paused = paused;
    if (!paused && stream->events != NULL) {
        /* a held message is delivered by the loop, not inside this call */
        if (stream->held != NULL) {
            loop_timer_arm(stream->patience, 0);
        } else {
            read_start(stream);
        }
    }
}

/* The timer has two uses that never meet: while the owner holds the stream, to tell it by the loop
 * what waited for a pause to end or for an owner; and the end of patience after it has let go. */
static void on_timer(void *cookie)
{
    struct stream *stream = cookie;
    if (stream->dropped) {
        grpc_call_cancel_with_status(stream->call, GRPC_STATUS_UNAVAILABLE,
                                     "closed by the other end", NULL);
        rpc_core_look(stream->core);
        return;
    }
    if (stream->closed_told) {
        return;
    }
    stream->n_ops++; /* the owner may drop it while it reads the message */
    if (stream->held != NULL && !stream->paused) {
        grpc_byte_buffer *buffer = stream->held;
        stream->held = NULL;
        deliver(stream, buffer);
        read_start(stream);
    }
    op_done(stream);
}

void stream_finish(struct stream *stream, enum rpc_code code, const char *text)
{
    if (stream->finishing) {
        return;
    }
    stream->finishing = true;
    stream->finish_code = code;
    if (text != NULL) {
        size_t bytes = strnlen(text, TEXT_MAX);
        grpc_slice_unref(stream->finish_text);
        stream->finish_text = grpc_slice_from_copied_buffer(text, bytes);
    }
    write_next(stream);
}

void stream_drop(struct stream *stream)
{
    stream->dropped = true;
    loop_timer_disarm(stream->patience);
    if (!stream->over_seen) {
        if (stream->finishing && stream->is_server && !stream->write_broke) {
            loop_timer_arm(stream->patience, FINISH_PATIENCE_S * NS_PER_S);
        } else {
            queue_clear(stream);
            grpc_call_cancel_with_status(stream->call, GRPC_STATUS_UNAVAILABLE,
                                         "closed by the other end", NULL);
            rpc_core_look(stream->core);
        }
    }
    settle(stream);
}

const char *stream_peer(const struct stream *stream)
{
    return stream->peer;
}

void stream_counts(const struct stream *stream, struct stream_counts *ret_counts)
{
    *ret_counts = stream->counts;
}

static struct stream *stream_create(struct rpc_core *core, const struct rpc_limits *limits)
{
    struct stream *stream = mem_zalloc(sizeof *stream);
    stream->core = core;
    stream->limits = *limits;
    stream->last = &stream->first;
    stream->patience = loop_timer_create(rpc_core_loop(core), on_timer, stream);
    stream->op_open.fn = on_open;
    stream->op_read.fn = on_read;
    stream->op_write.fn = on_write;
    stream->op_over.fn = on_over;
    stream->mark.key = grpc_slice_from_static_string(mark_key);
    stream->mark.value = grpc_slice_from_static_string(mark_value);
    stream->auth.key = grpc_slice_from_static_string("authorization");
    stream->auth.value = grpc_empty_slice();
    stream->finish_text = grpc_empty_slice();
    stream->over_text = grpc_empty_slice();
    grpc_metadata_array_init(&stream->initial_metadata);
    grpc_metadata_array_init(&stream->trailing_metadata);
    buf_init(&stream->bytes);
    rpc_core_live_add(core, 1);
    return stream;
}

/* A channel of its own: its connection, backoff and keepalive are this stream's and no other's. */
static grpc_channel *channel_create(const struct stream_target *target)
{
    const struct rpc_security *security = target->security;
    struct rpc_args args;
    rpc_args_init(&args, target->limits);
    rpc_args_int(&args, "grpc.use_local_subchannel_pool", 1);
    rpc_args_int(&args, "grpc.enable_http_proxy", 0);
    rpc_args_int(&args, "grpc.enable_retries", 0);
    rpc_args_int(&args, "grpc.service_config_disable_resolution", 1);
    /* this is also how long one attempt to connect may take */
    rpc_args_int(&args, "grpc.min_reconnect_backoff_ms", 1500);
    rpc_args_int(&args, "grpc.initial_reconnect_backoff_ms", 100);
    rpc_args_int(&args, "grpc.max_reconnect_backoff_ms", 2000);
    grpc_channel_credentials *credentials;
    if (security->tls_ca != NULL) {
        grpc_ssl_pem_key_cert_pair pair = {.private_key = security->tls_key,
                                           .cert_chain = security->tls_cert};
        credentials = grpc_ssl_credentials_create(
            security->tls_ca, security->tls_cert != NULL ? &pair : NULL, NULL, NULL);
        if (security->tls_name != NULL) {
            rpc_args_string(&args, "grpc.ssl_target_name_override", security->tls_name);
        }
    } else {
        credentials = grpc_insecure_credentials_create();
    }
    if (credentials == NULL) {
        return NULL;
    }
    char *name = rpc_target_make(target->host, target->port);
    grpc_channel *channel = grpc_channel_create(name, credentials, &args.list);
    mem_free(name);
    grpc_channel_credentials_release(credentials);
    return channel;
}

enum status stream_dial(struct rpc_core *core, const struct stream_target *target,
                        const struct stream_events *events, void *cookie,
                        struct stream **ret_stream, struct error *err)
{
    grpc_channel *channel = channel_create(target);
    if (channel == NULL) {
        return error_set(err, STATUS_INVALID, "grpc can't use these tls certificates for %s",
                         target->host);
    }
    struct stream *stream = stream_create(core, target->limits);
    stream->events = events;
    stream->cookie = cookie;
    stream->channel = channel;
    stream->peer = strchr(target->host, ':') != NULL
                       ? mem_printf("[%s]:%u", target->host, target->port)
                       : mem_printf("%s:%u", target->host, target->port);
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_REALTIME);
    if (target->deadline_ns != 0) {
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                gpr_time_from_nanos((int64_t)target->deadline_ns, GPR_TIMESPAN));
    }
    grpc_slice method = grpc_slice_from_copied_string(target->method);
    stream->call = grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                            rpc_core_queue(core), method, NULL, deadline, NULL);
    grpc_slice_unref(method);
    grpc_op over = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    over.data.recv_status_on_client.trailing_metadata = &stream->trailing_metadata;
    over.data.recv_status_on_client.status = &stream->over_code;
    over.data.recv_status_on_client.status_details = &stream->over_text;
    over.data.recv_status_on_client.error_string = &stream->over_error;
    batch_start(stream, &stream->op_over, &over, 1);

    grpc_op open[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                       {.op = GRPC_OP_RECV_INITIAL_METADATA}};
    if (target->security->token != NULL) {
        char *bearer = mem_printf("Bearer %s", target->security->token);
        stream->auth.value = grpc_slice_from_copied_string(bearer);
        explicit_bzero(bearer, strlen(bearer));
        mem_free(bearer);
        open[0].data.send_initial_metadata.count = 1;
        open[0].data.send_initial_metadata.metadata = &stream->auth;
    }
    open[1].data.recv_initial_metadata.recv_initial_metadata = &stream->initial_metadata;
    batch_start(stream, &stream->op_open, open, 2);
    *ret_stream = stream;
    return STATUS_OK;
}

struct stream *stream_accept(struct rpc_core *core, grpc_call *call,
                             const struct rpc_limits *limits, enum rpc_code code, const char *text,
                             void (*gone)(void *cookie), void *gone_cookie)
{
    struct stream *stream = stream_create(core, limits);
    stream->is_server = true;
    stream->opened = true;
    stream->call = call;
    stream->gone = gone;
    stream->gone_cookie = gone_cookie;
    char *peer = grpc_call_get_peer(call);
    stream->peer = mem_strdup(peer != NULL ? peer : "?");
    gpr_free(peer);

    grpc_op over = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER,
                    .data.recv_close_on_server.cancelled = &stream->over_cancelled};
    batch_start(stream, &stream->op_over, &over, 1);
    if (code != RPC_OK) {
        stream->finishing = stream->finished = true;
        writing_set(stream, true);
        stream->finish_code = code;
        stream->finish_text = grpc_slice_from_copied_string(text);
        grpc_op no[2] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                         {.op = GRPC_OP_SEND_STATUS_FROM_SERVER}};
        no[1].data.send_status_from_server.status = (grpc_status_code)code;
        no[1].data.send_status_from_server.status_details = &stream->finish_text;
        batch_start(stream, &stream->op_write, no, 2);
        return stream;
    }
    grpc_op open = {.op = GRPC_OP_SEND_INITIAL_METADATA,
                    .data.send_initial_metadata.count = 1,
                    .data.send_initial_metadata.metadata = &stream->mark};
    batch_start(stream, &stream->op_open, &open, 1);
    return stream;
}

void stream_attach(struct stream *stream, const struct stream_events *events, void *cookie)
{
    assert(stream->events == NULL && !stream->dropped);
    stream->events = events;
    stream->cookie = cookie;
    read_start(stream);
    loop_timer_arm(stream->patience, 0); /* it may have ended while nobody listened */
}
