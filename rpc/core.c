#include "rpc/core.h"

#include <arpa/inet.h>
#include <assert.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/slice.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>

#include "base/log.h"
#include "base/mem.h"
#include "rpc/queue.h"
#include "rpc/wall.h"

/*
 * The process's gRPC: its queue (queue.c), what is live, and the small things that all of rpc/
 * needs.
 *
 * Shutdown. gRPC aborts the process when a batch is started on a queue that is shut down, and the
 * tag of a server's shutdown may come before the batches of its calls. So every object that has
 * batches out counts as live here; rpc_core_free hands events on until the count is 0, and only
 * then ends the queue and the library. Inside that wait no callback of an
 * owner runs, since owners have closed their objects.
 *
 * The library's headers change with its versions: what is used here was compiled against core 29
 * (gRPC 1.51); arguments are given by their names as strings, which have not changed since.
 */

/* An object that is still live after this long was forgotten by its owner. */
enum { FREE_PATIENCE_S = 10 };

struct rpc_core {
    struct loop *loop;
    struct rpc_queue *queue;
    size_t n_live;
    struct rpc_totals totals;
};

bool rpc_core_batch_start(struct rpc_core *core, grpc_call *call, const grpc_op *ops, size_t n_ops,
                          struct rpc_op *op)
{
    return rpc_queue_batch_start(core->queue, call, ops, n_ops, op);
}

void rpc_core_look(struct rpc_core *core)
{
    rpc_queue_look(core->queue);
}

static _Atomic bool is_deaf;

bool rpc_core_is_deaf(void)
{
    return atomic_load_explicit(&is_deaf, memory_order_relaxed);
}

/* Any thread. What gRPC says of lost connections is left out: ours is logged. */
static void grpc_said(gpr_log_func_args *said)
{
    if (strstr(said->message, "Failed accept") && !atomic_exchange(&is_deaf, true)) {
        log_error("rpc",
                  "gRPC stopped accepting connections for good (%s): start this process again",
                  said->message);
    }
}

enum status rpc_core_create(struct loop *loop, struct rpc_core **ret_core, struct error *err)
{
    struct rpc_core *core = mem_zalloc(sizeof *core);
    core->loop = loop;
    if (getenv("GRPC_VERBOSITY") == NULL) {
        gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
        gpr_set_log_function(grpc_said);
    }
    /* names resolve as everywhere else on this machine, not by the library's own client */
    setenv("GRPC_DNS_RESOLVER", "native", 0);
    enum status status = rpc_queue_create(loop, &core->queue, err);
    if (status != STATUS_OK) {
        mem_free(core);
        return status;
    }
    *ret_core = core;
    return STATUS_OK;
}

void rpc_core_free(struct rpc_core *core)
{
    if (core == NULL) {
        return;
    }
    uint64_t start_ns = loop_now_ns();
    while (core->n_live > 0) {
        if (rpc_queue_take(core->queue)) {
            continue;
        }
        assert(loop_now_ns() - start_ns < FREE_PATIENCE_S * NS_PER_S &&
               "a link, call or server was not closed before rpc_core_free");
        struct timespec pause = {.tv_nsec = 200000};
        nanosleep(&pause, NULL);
    }
    rpc_queue_free(core->queue);
    mem_free(core);
}

size_t rpc_core_n_live(const struct rpc_core *core)
{
    return core->n_live;
}

size_t rpc_core_n_unsent(const struct rpc_core *core)
{
    return (size_t)(core->totals.queued_messages + core->totals.writing);
}

struct loop *rpc_core_loop(struct rpc_core *core)
{
    return core->loop;
}

grpc_completion_queue *rpc_core_queue(struct rpc_core *core)
{
    return rpc_queue_grpc(core->queue);
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
    return (double)rpc_queue_depth(((struct rpc_core *)cookie)->queue);
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
    metrics_gauge_call(metrics, "baton_rpc_events_waiting",
                       "Events of grpc posted by a thread and not yet handled.", METRIC_NO_LABELS,
                       mailbox_depth_value, core);
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
