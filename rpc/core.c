#include "rpc/core.h"

#include <arpa/inet.h>
#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/time.h>

#include "base/log.h"
#include "base/mem.h"
#include "rpc/wall.h"

/*
 * Threads. gRPC moves bytes only while some thread sits in grpc_completion_queue_next, so one
 * thread of ours does nothing else. A completed batch is a tag, a tag is a struct rpc_op, and the
 * thread posts it to the loop's mailbox, where its fn runs. All batches are started on the loop
 * thread, and the queue's thread never looks into a tag: whether the batch succeeded rides in
 * the lowest bit of the pointer. So no object of rpc/ needs a lock, the calls of
 * grpc_call_start_batch on one call are serial as gRPC asks, and the order in which a call's
 * batches of one kind completed is kept. When the mailbox is full the thread waits: gRPC's own flow
 * control then holds the peers.
 *
 * Most writes, and reads of what has arrived already, complete inside the call that starts them.
 * Queued like the others they would wake the thread, which would wake the loop: two switches a
 * message, more than all else that a small message costs. So rpc_core_batch_start has gRPC hand
 * such an event back to it (the queue's cache for this thread), and the loop takes it at the end of
 * its turn.
 *
 * Shutdown. gRPC aborts the process when a batch is started on a queue that is shut down, and the
 * tag of a server's shutdown may come before the batches of its calls. So every object that has
 * batches out counts as live here; rpc_core_free hands events on until the count is 0, and only
 * then shuts the queue down, joins the thread and the library. Inside that wait no callback of an
 * owner runs, since owners have closed their objects.
 *
 * The library's headers change with its versions: what is used here was compiled against core 29
 * (gRPC 1.51); arguments are given by their names as strings, which have not changed since.
 */

enum {
    MAILBOX_CAPACITY = 16384,
    /* Completions in one go; then timers and descriptors have their turn. */
    READY_BATCH = 256,
    /* An object that is still live after this long was forgotten by its owner. */
    FREE_PATIENCE_S = 10,
};

struct rpc_core {
    struct loop *loop;
    grpc_completion_queue *queue;
    struct mailbox *mailbox;
    pthread_t thread;
    void **ready; /* completed inside the call that started them; as in the mailbox */
    size_t n_ready, ready_capacity, ready_first;
    bool ready_deferred;
    size_t n_live;
    struct rpc_totals totals;
};

static void short_sleep(long ns)
{
    struct timespec pause = {.tv_nsec = ns};
    nanosleep(&pause, NULL);
}

static void *queue_thread(void *arg)
{
    struct rpc_core *core = arg;
    for (;;) {
        grpc_event event =
            grpc_completion_queue_next(core->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            return NULL;
        }
        if (event.type != GRPC_OP_COMPLETE) {
            continue;
        }
        void *msg = (void *)((uintptr_t)event.tag | (event.success != 0));
        while (mailbox_post(core->mailbox, msg) != STATUS_OK) {
            short_sleep(200000);
        }
    }
}

static void mailbox_event(void *cookie, void *msg)
{
    struct rpc_op *op = (struct rpc_op *)((uintptr_t)msg & ~(uintptr_t)1);
    op->fn(op, ((uintptr_t)msg & 1) != 0);
}

static void *ready_take(struct rpc_core *core)
{
    if (core->ready_first == core->n_ready) {
        core->ready_first = core->n_ready = 0;
        return NULL;
    }
    return core->ready[core->ready_first++];
}

static void ready_run(void *cookie)
{
    struct rpc_core *core = cookie;
    void *msg;
    for (unsigned i = 0; i < READY_BATCH && (msg = ready_take(core)) != NULL; i++) {
        mailbox_event(core, msg);
    }
    core->ready_deferred = core->ready_first < core->n_ready;
    if (core->ready_deferred) {
        loop_defer(core->loop, ready_run, core);
    }
}

static void ready_add(struct rpc_core *core, void *msg)
{
    if (core->n_ready == core->ready_capacity) {
        core->ready_capacity = core->ready_capacity > 0 ? 2 * core->ready_capacity : 64;
        core->ready = mem_realloc_array(core->ready, core->ready_capacity, sizeof *core->ready);
    }
    core->ready[core->n_ready++] = msg;
    if (!core->ready_deferred) {
        core->ready_deferred = true;
        loop_defer(core->loop, ready_run, core);
    }
}

void rpc_core_batch_start(struct rpc_core *core, grpc_call *call, const grpc_op *ops, size_t n_ops,
                          struct rpc_op *op)
{
    void *tag;
    int ok;
    grpc_completion_queue_thread_local_cache_init(core->queue);
    grpc_call_error error = grpc_call_start_batch(call, ops, n_ops, op, NULL);
    if (grpc_completion_queue_thread_local_cache_flush(core->queue, &tag, &ok)) {
        ready_add(core, (void *)((uintptr_t)tag | (ok != 0)));
    }
    if (error != GRPC_CALL_OK) {
        /* only a batch that breaks gRPC's rules is refused: our own bug */
        log_error("rpc", "grpc refuses a batch: %s", grpc_call_error_to_string(error));
        assert(error == GRPC_CALL_OK);
    }
}

enum status rpc_core_create(struct loop *loop, struct rpc_core **ret_core, struct error *err)
{
    struct rpc_core *core = mem_zalloc(sizeof *core);
    core->loop = loop;
    enum status status =
        mailbox_create(loop, MAILBOX_CAPACITY, mailbox_event, core, &core->mailbox);
    if (status != STATUS_OK) {
        error_set(err, status, "no mailbox for the thread of grpc");
        goto free_core;
    }
    /* gRPC writes its own opinion of each lost connection to standard error; ours is logged. */
    setenv("GRPC_VERBOSITY", "NONE", 0);
    /* names resolve as everywhere else on this machine, not by the library's own client */
    setenv("GRPC_DNS_RESOLVER", "native", 0);
    grpc_init();
    core->queue = grpc_completion_queue_create_for_next(NULL);
    int rc = pthread_create(&core->thread, NULL, queue_thread, core);
    if (rc != 0) {
        status = error_set(err, STATUS_SYSTEM, "no thread for grpc: %s", strerror(rc));
        goto destroy_queue;
    }
    pthread_setname_np(core->thread, "rpc");
    *ret_core = core;
    return STATUS_OK;

destroy_queue:
    grpc_completion_queue_shutdown(core->queue);
    while (grpc_completion_queue_next(core->queue, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(core->queue);
    grpc_shutdown_blocking();
    mailbox_free(core->mailbox);
free_core:
    mem_free(core);
    return status;
}

void rpc_core_free(struct rpc_core *core)
{
    if (core == NULL) {
        return;
    }
    uint64_t start_ns = loop_now_ns();
    while (core->n_live > 0) {
        void *msg = ready_take(core);
        if (msg == NULL) {
            msg = mailbox_take(core->mailbox);
        }
        if (msg != NULL) {
            mailbox_event(core, msg);
            continue;
        }
        assert(loop_now_ns() - start_ns < FREE_PATIENCE_S * NS_PER_S &&
               "a link, call or server was not closed before rpc_core_free");
        short_sleep(200000);
    }
    loop_defer_cancel(core->loop, ready_run, core);
    grpc_completion_queue_shutdown(core->queue);
    pthread_join(core->thread, NULL);
    grpc_completion_queue_destroy(core->queue);
    grpc_shutdown_blocking();
    mailbox_free(core->mailbox);
    mem_free(core->ready);
    mem_free(core);
}

size_t rpc_core_n_live(const struct rpc_core *core)
{
    return core->n_live;
}

struct loop *rpc_core_loop(struct rpc_core *core)
{
    return core->loop;
}

grpc_completion_queue *rpc_core_queue(struct rpc_core *core)
{
    return core->queue;
}

void rpc_core_live_add(struct rpc_core *core, int difference)
{
    assert(difference > 0 || core->n_live >= (size_t)-difference);
    core->n_live += (size_t)difference;
}

struct rpc_totals *rpc_core_totals(struct rpc_core *core)
{
    return &core->totals;
}

static double mailbox_depth_value(void *cookie)
{
    return (double)mailbox_depth(((struct rpc_core *)cookie)->mailbox);
}

static double live_value(void *cookie)
{
    return (double)((struct rpc_core *)cookie)->n_live;
}

static double total_value(void *cookie)
{
    return (double)*(const uint64_t *)cookie;
}

void rpc_core_metrics_register(struct rpc_core *core, struct metrics *metrics)
{
    struct rpc_totals *totals = &core->totals;
    metrics_gauge_call(metrics, "baton_rpc_events_waiting", "Events of grpc not yet handled.",
                       METRIC_NO_LABELS, mailbox_depth_value, core);
    metrics_gauge_call(metrics, "baton_rpc_live_objects", "Streams, calls and servers.",
                       METRIC_NO_LABELS, live_value, core);
    metrics_gauge_call(metrics, "baton_rpc_queued_messages", "Messages that wait to be sent.",
                       METRIC_NO_LABELS, total_value, &totals->queued_messages);
    metrics_gauge_call(metrics, "baton_rpc_queued_bytes", "Bytes that wait to be sent.",
                       METRIC_NO_LABELS, total_value, &totals->queued_bytes);
    metrics_counter_call(metrics, "baton_rpc_queue_full_total",
                         "Messages not taken because a queue was full.", METRIC_NO_LABELS,
                         total_value, &totals->n_exhausted);
    const struct {
        const char *direction;
        uint64_t *messages, *bytes;
    } ways[] = {{"out", &totals->messages_sent, &totals->bytes_sent},
                {"in", &totals->messages_received, &totals->bytes_received}};
    for (unsigned i = 0; i < 2; i++) {
        metrics_counter_call(metrics, "baton_rpc_messages_total", "Messages of all links.",
                             METRIC_LABELS({"direction", ways[i].direction}), total_value,
                             ways[i].messages);
        metrics_counter_call(
            metrics, "baton_rpc_message_bytes_total", "Bytes of the messages of all links.",
            METRIC_LABELS({"direction", ways[i].direction}), total_value, ways[i].bytes);
    }
}

const char *rpc_code_name(enum rpc_code code)
{
    static const char *const names[] = {
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    };
    return (unsigned)code < sizeof names / sizeof names[0] ? names[code] : "?";
}

enum status rpc_code_status(enum rpc_code code)
{
    switch (code) {
    case RPC_OK:
        return STATUS_OK;
    case RPC_CANCELLED:
        return STATUS_CANCELLED;
    case RPC_DEADLINE_EXCEEDED:
        return STATUS_DEADLINE;
    case RPC_UNAUTHENTICATED:
    case RPC_PERMISSION_DENIED:
    case RPC_FAILED_PRECONDITION:
    case RPC_ALREADY_EXISTS:
    case RPC_INVALID_ARGUMENT:
        return STATUS_PEER_REFUSED;
    case RPC_UNIMPLEMENTED:
        return STATUS_UNSUPPORTED;
    case RPC_RESOURCE_EXHAUSTED:
        return STATUS_EXHAUSTED;
    case RPC_NOT_FOUND:
        return STATUS_NOT_FOUND;
    case RPC_DATA_LOSS:
        return STATUS_CORRUPT;
    case RPC_UNKNOWN:
    case RPC_ABORTED:
    case RPC_OUT_OF_RANGE:
    case RPC_INTERNAL:
    case RPC_UNAVAILABLE:
        break;
    }
    return STATUS_PEER_LOST;
}

struct rpc_limits rpc_limits_fill(const struct rpc_limits *limits)
{
    struct rpc_limits full = *limits;
    if (full.max_message_bytes == 0) {
        full.max_message_bytes = 8u << 20;
    }
    if (full.keepalive_ns == 0) {
        full.keepalive_ns = NS_PER_S;
    }
    if (full.keepalive_timeout_ns == 0) {
        full.keepalive_timeout_ns = NS_PER_S / 2;
    }
    if (full.queue_messages == 0) {
        full.queue_messages = 8192;
    }
    if (full.queue_bytes == 0) {
        full.queue_bytes = 32u << 20;
    }
    return full;
}

static char *copy_or_null(const char *text)
{
    return text == NULL || text[0] == '\0' ? NULL : mem_strdup(text);
}

void rpc_security_copy(struct rpc_security *to, const struct rpc_security *from)
{
    to->token = copy_or_null(from->token);
    to->tls_ca = copy_or_null(from->tls_ca);
    to->tls_cert = copy_or_null(from->tls_cert);
    to->tls_key = copy_or_null(from->tls_key);
    to->tls_name = copy_or_null(from->tls_name);
}

static void wipe_free(const char *text)
{
    if (text != NULL) {
        explicit_bzero((char *)text, strlen(text));
        mem_free((char *)text);
    }
}

void rpc_security_fini(struct rpc_security *security)
{
    wipe_free(security->token);
    wipe_free(security->tls_ca);
    wipe_free(security->tls_cert);
    wipe_free(security->tls_key);
    wipe_free(security->tls_name);
    memset(security, 0, sizeof *security);
}

static bool given(const char *text)
{
    return text != NULL && text[0] != '\0';
}

enum status rpc_security_check(const struct rpc_security *security, bool server, struct error *err)
{
    if (given(security->tls_cert) != given(security->tls_key)) {
        return error_set(err, STATUS_INVALID, "tls needs a certificate and its key together");
    }
    if (server && given(security->tls_ca) && !given(security->tls_cert)) {
        return error_set(err, STATUS_INVALID,
                         "tls with a ca needs the server's own certificate and key too");
    }
    if (!server && given(security->tls_cert) && !given(security->tls_ca)) {
        return error_set(err, STATUS_INVALID,
                         "tls with a client certificate needs the ca of the server too");
    }
    for (const char *p = security->token; p != NULL && *p != '\0'; p++) {
        if (*p <= ' ' || *p > '~') {
            return error_set(err, STATUS_INVALID,
                             "the cluster token must be of visible ascii characters");
        }
    }
    return STATUS_OK;
}

char *rpc_target_make(const char *host, uint16_t port)
{
    struct in_addr v4;
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return mem_printf("ipv4:%s:%u", host, port);
    }
    if (strchr(host, ':') != NULL) {
        /* a scope is percent-encoded in a URI: fe80::1%eth0 -> fe80::1%25eth0 */
        const char *scope = strchr(host, '%');
        if (scope == NULL) {
            return mem_printf("ipv6:[%s]:%u", host, port);
        }
        return mem_printf("ipv6:[%.*s%%25%s]:%u", (int)(scope - host), host, scope + 1, port);
    }
    return mem_printf("dns:///%s:%u", host, port);
}

void rpc_args_int(struct rpc_args *args, const char *key, int value)
{
    assert(args->list.num_args < sizeof args->args / sizeof args->args[0]);
    args->args[args->list.num_args++] =
        (grpc_arg){.type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = value};
}

void rpc_args_string(struct rpc_args *args, const char *key, const char *value)
{
    assert(args->list.num_args < sizeof args->args / sizeof args->args[0]);
    args->args[args->list.num_args++] =
        (grpc_arg){.type = GRPC_ARG_STRING, .key = (char *)key, .value.string = (char *)value};
}

static int clamp_int(uint64_t value)
{
    return value > INT32_MAX ? INT32_MAX : (int)value;
}

void rpc_args_init(struct rpc_args *args, const struct rpc_limits *limits)
{
    args->list = (grpc_channel_args){.num_args = 0, .args = args->args};
    rpc_args_int(args, "grpc.max_receive_message_length", clamp_int(limits->max_message_bytes));
    rpc_args_int(args, "grpc.max_send_message_length", clamp_int(limits->max_message_bytes));
    rpc_args_int(args, "grpc.keepalive_time_ms", clamp_int(limits->keepalive_ns / NS_PER_MS));
    rpc_args_int(args, "grpc.keepalive_timeout_ms",
                 clamp_int(limits->keepalive_timeout_ns / NS_PER_MS));
    rpc_args_int(args, "grpc.keepalive_permit_without_calls", 1);
    /* without this an idle stream stops pinging after two pings */
    rpc_args_int(args, "grpc.http2.max_pings_without_data", 0);
    /* Bandwidth probes are pings too. One under way holds the keepalive's ping back, and on a
     * server each puts it off: a stopped peer was seen after 2.4 s instead of 1.5. */
    rpc_args_int(args, "grpc.http2.bdp_probe", 0);
    /* identity only: a few compressed kilobytes could otherwise become gigabytes before the limit
     * on a message's length is looked at */
    rpc_args_int(args, "grpc.compression_enabled_algorithms_bitset", 1);
    rpc_args_int(args, "grpc.per_message_decompression", 0);
}

void rpc_bytes_read(grpc_byte_buffer *from, struct buf *out)
{
    buf_clear(out);
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, from)) {
        return;
    }
    grpc_slice slice;
    while (grpc_byte_buffer_reader_next(&reader, &slice)) {
        buf_append(out, GRPC_SLICE_START_PTR(slice), GRPC_SLICE_LENGTH(slice));
        grpc_slice_unref(slice);
    }
    grpc_byte_buffer_reader_destroy(&reader);
}
