/* Decode.Serve and the wiring of a decode node.
 *
 * Owns one `struct serving` a router link. A router's first message is its hello; what it says
 * after that goes to the requests. A link that is lost, or that does not take what it must be told,
 * ends all requests of that router: a router that can't be told is a router that is gone.
 */
#include "decode/service.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/workers.h"
#include "decode/handoff.h"
#include "decode/landing.h"
#include "decode/peers.h"
#include "decode/request.h"
#include "node/kv.h"
#include "rpc/hello.h"
#include "rpc/link.h"
#include "rpc/proto.h"
#include "transport/region.h"

enum { TICK_MS = 50, MESSAGE_ARENA_BYTES = 256 << 20, HELLO_TIMEOUT_MS = 3000 };

struct serving {
    struct request_sink sink;
    struct list link_in;
    struct decode *decode;
    struct link *link;
    char router_id[HELLO_NODE_ID_MAX + 1];
    uint64_t since_ns;
    bool greeted, clogged;
};

struct decode {
    struct node *node;
    struct transport *transport; /* the node's that has the landing area */
    struct landing *landing;
    struct workers *workers;
    struct peers *peers;
    struct requests *requests;
    struct handoff *handoff;
    struct loop_timer *tick;
    struct list servings;
    struct buf packed;
    void *shared; /* the landing area, while the engine has it */
};

/* ---- sending ---- */

static struct serving *serving_of(struct request_sink *sink)
{
    return list_entry(sink, struct serving, sink);
}

static enum status sink_send(struct request_sink *sink, const Baton__FromDecode *message)
{
    struct serving *serving = serving_of(sink);
    struct buf *packed = &serving->decode->packed;
    proto_pack(&message->base, packed);
    enum status status =
        link_send_message(serving->link, &message->base, packed->data, packed->bytes);
    if (status == STATUS_EXHAUSTED && message->what_case == BATON__FROM_DECODE__WHAT_FAILED) {
        serving->clogged = true; /* a refusal was not told: the tick ends the link */
    }
    return status;
}

static void serving_end(struct serving *serving, const char *why)
{
    struct decode *decode = serving->decode;
    if (serving->greeted) {
        log_info("serve", "router %s is gone: %s", serving->router_id, why);
    }
    link_close(serving->link);
    requests_sink_lost(decode->requests, &serving->sink);
    request_sink_fini(&serving->sink);
    list_remove(&serving->link_in);
    mem_free(serving);
    node_status_soon(decode->node);
}

/* ---- the link of a router ---- */

static enum status on_hello(struct serving *serving, const Baton__Hello *hello, struct error *err)
{
    struct decode *decode = serving->decode;
    const Baton__Hello *ours = node_hello(decode->node);
    enum status status = hello_check(ours, hello, err);
    if (!status && hello->role != BATON__ROLE__ROLE_ROUTER) {
        status = error_set(err, STATUS_PEER_REFUSED, "%s is no router", hello->node_id);
    }
    if (status) {
        return status;
    }
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    message.what_case = BATON__FROM_DECODE__WHAT_HELLO;
    message.hello = (Baton__Hello *)ours;
    snprintf(serving->router_id, sizeof(serving->router_id), "%s", hello->node_id);
    serving->greeted = true;
    log_info("serve", "router %s of incarnation %016" PRIx64 " is served", hello->node_id,
             hello->incarnation);
    return sink_send(&serving->sink, &message);
}

static enum status on_router_message(struct serving *serving, const Baton__ToDecode *message,
                                     struct error *err)
{
    struct requests *requests = serving->decode->requests;
    if (message->what_case == BATON__TO_DECODE__WHAT_HELLO) {
        return serving->greeted ? error_set(err, STATUS_CORRUPT, "a second hello")
                                : on_hello(serving, message->hello, err);
    }
    if (!serving->greeted) {
        return error_set(err, STATUS_CORRUPT, "the first message is no hello");
    }
    switch (message->what_case) {
    case BATON__TO_DECODE__WHAT_START:
        requests_start(requests, &serving->sink, message->start,
                       node_draining(serving->decode->node));
        break;
    case BATON__TO_DECODE__WHAT_IDS:
        requests_ids(requests, &serving->sink, message->ids);
        break;
    case BATON__TO_DECODE__WHAT_CREDIT:
        requests_credit(requests, &serving->sink, message->credit);
        break;
    case BATON__TO_DECODE__WHAT_CANCEL:
        requests_cancel(requests, &serving->sink, message->cancel);
        break;
    default:
        break; /* a later build's message */
    }
    return STATUS_OK;
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct serving *serving = cookie;
    struct error err = {""};
    struct arena *arena = arena_create(MESSAGE_ARENA_BYTES);
    ProtobufCMessage *unpacked;
    enum status status =
        proto_unpack(&baton__to_decode__descriptor, bytes, n_bytes, arena, &unpacked, &err);
    if (!status) {
        status = on_router_message(serving, (const Baton__ToDecode *)unpacked, &err);
    }
    arena_free(arena);
    if (status) {
        log_warn("serve", "%s: %s", link_name(link), err.text);
        serving->link = NULL;
        link_refuse(link, err.text);
        serving_end(serving, err.text);
    }
}

static void on_ended(void *cookie, struct link *link)
{
    serving_end(cookie, "it left");
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    serving_end(cookie, text[0] ? text : status_name(status));
}

static void on_writable(void *cookie, struct link *link)
{
    struct serving *serving = cookie;
    requests_flush_sink(serving->decode->requests, &serving->sink);
}

static const struct link_events serving_events = {
    .message = on_message,
    .ended = on_ended,
    .closed = on_closed,
    .writable = on_writable,
};

static void on_stream(void *cookie, struct link *link)
{
    struct decode *decode = cookie;
    struct serving *serving = mem_zalloc(sizeof(*serving));
    serving->decode = decode;
    serving->link = link;
    serving->since_ns = loop_now_ns();
    request_sink_init(&serving->sink);
    serving->sink.send = sink_send;
    list_push_back(&decode->servings, &serving->link_in);
    link_attach(link, &serving_events, serving);
}

/* ---- pairs and transfers ---- */

static void on_peer_message(void *cookie, struct peer *peer, const Baton__FromPrefill *message)
{
    struct decode *decode = cookie;
    handoff_message(decode->handoff, peer, message);
}

static void on_peer_lost(void *cookie, struct peer *peer, const char *text)
{
    struct decode *decode = cookie;
    handoff_peer_lost(decode->handoff, peer, text);
}

static void on_pairs_changed(void *cookie)
{
    struct decode *decode = cookie;
    node_status_soon(decode->node);
}

static const struct peers_events peers_events = {
    .message = on_peer_message,
    .lost = on_peer_lost,
    .changed = on_pairs_changed,
};

static void on_slots_freed(void *cookie)
{
    struct decode *decode = cookie;
    if (decode->handoff) {
        handoff_slots_freed(decode->handoff);
    }
}

static void on_tick(void *cookie)
{
    struct decode *decode = cookie;
    uint64_t now_ns = loop_now_ns();
    handoff_tick(decode->handoff);
    requests_tick(decode->requests);
    list_for_each_safe(at, &decode->servings)
    {
        struct serving *serving = list_entry(at, struct serving, link_in);
        if (serving->clogged) {
            serving_end(serving, "it does not read");
        } else if (!serving->greeted && now_ns - serving->since_ns > HELLO_TIMEOUT_MS * NS_PER_MS) {
            serving_end(serving, "it said no hello");
        }
    }
    loop_timer_arm(decode->tick, TICK_MS * NS_PER_MS);
}

static void on_broken(void *cookie, enum status status)
{
    struct decode *decode = cookie;
    log_error("decode", "the engine failed (%s): this node ends", status_name(status));
    service_stop(node_service(decode->node), 1);
}

/* ---- the node's questions ---- */

static void op_status(void *cookie, Baton__ToRouter__Status *status)
{
    struct decode *decode = *(struct decode **)cookie;
    struct requests_stats requests;
    struct batcher_stats batcher;
    requests_stats(decode->requests, &requests);
    batcher_stats(requests_batcher(decode->requests), &batcher);
    status->n_queued = requests.n_queued;
    status->queued_tokens = requests.queued_tokens;
    status->n_running =
        requests.n_running + requests.n_local + requests.n_transfers + requests.n_opening;
    status->unit = strcmp(batcher.running, "step") == 0    ? BATON__TO_ROUTER__STATUS__UNIT__STEP
                   : strcmp(batcher.running, "chunk") == 0 ? BATON__TO_ROUTER__STATUS__UNIT__CHUNK
                                                           : BATON__TO_ROUTER__STATUS__UNIT__IDLE;
    status->unit_age_ms = (loop_now_ns() - batcher.running_since_ns) / NS_PER_MS;
    status->slots_free = landing_n_free(decode->landing);
    status->slots_total = landing_n_slots(decode->landing);
    status->prefill_tokens_per_s = (float)batcher.tokens_per_s_prefill;
    status->step_ms = (float)(batcher.step_s * 1000);
    peers_fill_status(decode->peers, status);
}

static void op_view(void *cookie, const Baton__ToNode__Peer *const *nodes, size_t n_nodes)
{
    struct decode *decode = *(struct decode **)cookie;
    peers_set_view(decode->peers, nodes, n_nodes);
}

static bool op_busy(void *cookie)
{
    struct decode *decode = *(struct decode **)cookie;
    struct batcher_stats batcher;
    batcher_stats(requests_batcher(decode->requests), &batcher);
    return strcmp(batcher.running, "idle") != 0;
}

static uint32_t op_n_live(void *cookie)
{
    struct decode *decode = *(struct decode **)cookie;
    return requests_n_live(decode->requests);
}

static void op_fail_all(void *cookie, const char *text)
{
    struct decode *decode = *(struct decode **)cookie;
    requests_fail_all(decode->requests, BATON__FAIL_CODE__FAIL_DRAINING, text, true);
}

static void op_paused(void *cookie)
{
    struct decode *decode = *(struct decode **)cookie;
    struct list *first;
    while ((first = list_first(&decode->servings)) != NULL) {
        serving_end(list_entry(first, struct serving, link_in), "this node was paused");
    }
    peers_reset(decode->peers);
}

static void op_debug(void *cookie, struct json_writer *w)
{
    struct decode *decode = *(struct decode **)cookie;
    json_key(w, "landing");
    landing_debug_json(decode->landing, w);
}

static void op_debug_requests(void *cookie, struct json_writer *w)
{
    struct decode *decode = *(struct decode **)cookie;
    requests_debug_json(decode->requests, w);
}

const struct node_ops decode_node_ops = {
    .status = op_status,
    .view = op_view,
    .busy = op_busy,
    .n_live = op_n_live,
    .fail_all = op_fail_all,
    .paused = op_paused,
    .debug = op_debug,
    .debug_requests = op_debug_requests,
};

/* ---- gauges ---- */

enum gauge {
    GAUGE_QUEUED,
    GAUGE_OLDEST_WAIT,
    GAUGE_TRANSFERS,
    GAUGE_RUNNING,
    GAUGE_ROWS,
    GAUGE_PAIRS_READY,
    GAUGE_PAIRS,
    GAUGE_MAX_GAP,
    GAUGE_ROUTERS,
};

enum counter {
    COUNTER_STARTED,
    COUNTER_FINISHED,
    COUNTER_FAILED,
    COUNTER_CANCELLED,
    COUNTER_REFUSED,
    COUNTER_PREEMPTED,
    COUNTER_TOKENS,
    COUNTER_STEPS,
    COUNTER_STEPS_AHEAD,
    COUNTER_ROWS_TOO_MANY,
    COUNTER_CHUNK_TOKENS,
    COUNTER_TRANSFER_BYTES,
    COUNTER_PARCELS,
    COUNTER_CHECKSUM_RETRIES,
    COUNTER_CHECKSUM_FAILURES,
    COUNTER_STRAY,
    COUNTER_PROTOCOL,
};

struct value {
    struct decode *decode;
    int what;
};

static double gauge_value(void *cookie)
{
    const struct value *value = cookie;
    struct requests_stats requests;
    struct batcher_stats batcher;
    requests_stats(value->decode->requests, &requests);
    batcher_stats(requests_batcher(value->decode->requests), &batcher);
    switch ((enum gauge)value->what) {
    case GAUGE_QUEUED:
        return requests.n_queued;
    case GAUGE_OLDEST_WAIT:
        return (double)requests.oldest_queued_ns * 1e-9;
    case GAUGE_TRANSFERS:
        return requests.n_transfers + requests.n_opening;
    case GAUGE_RUNNING:
        return requests.n_running + requests.n_local;
    case GAUGE_ROWS:
        return batcher.rows;
    case GAUGE_PAIRS_READY:
        return peers_n_ready(value->decode->peers);
    case GAUGE_PAIRS:
        return peers_n(value->decode->peers);
    case GAUGE_MAX_GAP:
        return (double)batcher.max_gap_ns * 1e-9;
    case GAUGE_ROUTERS:
        break;
    }
    double n = 0;
    list_for_each(at, &value->decode->servings)
    {
        n += list_entry(at, struct serving, link_in)->greeted;
    }
    return n;
}

static double counter_value(void *cookie)
{
    const struct value *value = cookie;
    struct requests_stats r;
    struct handoff_stats h;
    struct batcher_stats b;
    requests_stats(value->decode->requests, &r);
    handoff_stats(value->decode->handoff, &h);
    batcher_stats(requests_batcher(value->decode->requests), &b);
    const uint64_t values[] = {
        [COUNTER_STARTED] = r.n_started,
        [COUNTER_FINISHED] = r.n_finished,
        [COUNTER_FAILED] = r.n_failed,
        [COUNTER_CANCELLED] = r.n_cancelled,
        [COUNTER_REFUSED] = r.n_refused,
        [COUNTER_PREEMPTED] = r.n_preempted,
        [COUNTER_TOKENS] = r.n_tokens,
        [COUNTER_STEPS] = b.n_steps,
        [COUNTER_STEPS_AHEAD] = b.n_ahead,
        [COUNTER_ROWS_TOO_MANY] = b.n_too_many,
        [COUNTER_CHUNK_TOKENS] = b.n_chunk_tokens,
        [COUNTER_TRANSFER_BYTES] = h.n_bytes,
        [COUNTER_PARCELS] = h.n_parcels,
        [COUNTER_CHECKSUM_RETRIES] = h.n_checksum_retries,
        [COUNTER_CHECKSUM_FAILURES] = h.n_checksum_failures,
        [COUNTER_STRAY] = h.n_stray,
        [COUNTER_PROTOCOL] = h.n_protocol,
    };
    return (double)values[value->what];
}

struct metric_row {
    int what;
    const char *name, *help;
};

static const struct metric_row gauges[] = {
    {GAUGE_QUEUED, "baton_requests_queued", "Requests waiting to start."},
    {GAUGE_OLDEST_WAIT, "baton_requests_oldest_wait_seconds",
     "How long the request that waits longest has waited."},
    {GAUGE_TRANSFERS, "baton_transfers_in_flight", "Transfers from prefill nodes that are open."},
    {GAUGE_RUNNING, "baton_requests_running", "Requests that are prefilled here or generate."},
    {GAUGE_ROWS, "baton_batch_rows", "Samples in the batch."},
    {GAUGE_PAIRS_READY, "baton_pairs_ready", "Prefill nodes whose preflight passed."},
    {GAUGE_PAIRS, "baton_pairs", "Prefill nodes known."},
    {GAUGE_MAX_GAP, "baton_step_gap_max_seconds",
     "Longest time between the starts of two steps while a sample waited."},
    {GAUGE_ROUTERS, "baton_routers_served", "Router links."},
};

static const struct metric_row counters[] = {
    {COUNTER_STARTED, "baton_requests_started_total", "Attempts that routers started."},
    {COUNTER_FINISHED, "baton_requests_finished_total", "Attempts that ended well."},
    {COUNTER_FAILED, "baton_requests_failed_total", "Attempts that failed."},
    {COUNTER_CANCELLED, "baton_requests_cancelled_total", "Attempts that were cancelled."},
    {COUNTER_REFUSED, "baton_requests_refused_total", "Attempts refused at once."},
    {COUNTER_PREEMPTED, "baton_requests_preempted_total", "Attempts ended for want of pages."},
    {COUNTER_TOKENS, "baton_tokens_generated_total", "Tokens generated."},
    {COUNTER_STEPS, "baton_steps_total", "Decode steps."},
    {COUNTER_STEPS_AHEAD, "baton_steps_ahead_total",
     "Decode steps that were begun before the one before was over."},
    {COUNTER_ROWS_TOO_MANY, "baton_step_rows_dropped_total",
     "Rows of decode steps whose token was dropped: their sample had ended."},
    {COUNTER_CHUNK_TOKENS, "baton_prefill_tokens_total", "Prompt tokens computed here."},
    {COUNTER_TRANSFER_BYTES, "baton_transfer_bytes_total", "Bytes of parcels taken in."},
    {COUNTER_PARCELS, "baton_parcels_total", "Parcels taken in."},
    {COUNTER_CHECKSUM_RETRIES, "baton_parcel_checksum_retries_total",
     "Parcels copied a second time because their checksum was wrong."},
    {COUNTER_CHECKSUM_FAILURES, "baton_parcel_checksum_failures_total",
     "Parcels whose checksum stayed wrong."},
    {COUNTER_STRAY, "baton_stray_messages_total",
     "Messages of transfers that are not open any more."},
    {COUNTER_PROTOCOL, "baton_protocol_errors_total", "Messages that broke the rules."},
};

enum {
    N_GAUGES = sizeof(gauges) / sizeof(gauges[0]),
    N_COUNTERS = sizeof(counters) / sizeof(counters[0])
};

static void register_metrics(struct decode *decode)
{
    static struct value gauge_values[N_GAUGES], counter_values[N_COUNTERS];
    struct metrics *metrics = node_metrics(decode->node);
    for (size_t i = 0; i < N_GAUGES; i++) {
        gauge_values[i] = (struct value){decode, gauges[i].what};
        metrics_gauge_call(metrics, gauges[i].name, gauges[i].help, METRIC_NO_LABELS, gauge_value,
                           &gauge_values[i]);
    }
    for (size_t i = 0; i < N_COUNTERS; i++) {
        counter_values[i] = (struct value){decode, counters[i].what};
        metrics_counter_call(metrics, counters[i].name, counters[i].help, METRIC_NO_LABELS,
                             counter_value, &counter_values[i]);
    }
    landing_register(decode->landing, metrics);
}

/* ---- life ---- */

/* The landing area: in the device's memory where KV is handed over there, else in the host's, which
 * the device then reads. */
static enum status landing_open(struct decode *decode, uint32_t n_slots, struct error *err)
{
    struct node *node = decode->node;
    struct engine *engine = node_engine(node);
    struct node_kv *kv = node_kv(node);
    size_t slot_bytes = engine_info(engine)->page_bytes, bytes;
    struct region *region;
    enum engine_memory_kind kind;
    enum status status;
    if (!size_mul(n_slots, slot_bytes, &bytes)) {
        return error_set(err, STATUS_INVALID, "%" PRIu32 " landing slots", n_slots);
    }
    decode->transport = kv ? node_kv_transport(kv) : node_transport(node);
    if (kv) {
        uint8_t *memory;
        status = engine_device_alloc(engine, bytes, &memory, &kind, err);
        if (!status) {
            status = region_register_landing(decode->transport, memory, bytes, node_kv_memory(kv),
                                             &region, err);
        }
    } else {
        status = region_create_landing(decode->transport, bytes, &region, err);
    }
    if (status) {
        return status;
    }
    return landing_create(node_loop(node), region, slot_bytes, kv ? engine : NULL, on_slots_freed,
                          decode, &decode->landing, err);
}

/* Lets the device read what lands in host memory. */
static void landing_share(struct decode *decode)
{
    const struct region *region = landing_region(decode->landing);
    struct error why;
    if (landing_on_device(decode->landing)) {
        return;
    }
    if (engine_share(node_engine(decode->node), region_base(region), region_bytes(region), &why)) {
        log_warn("decode", "parcels are copied by way of the driver, which is slower: %s",
                 why.text);
    } else {
        decode->shared = region_base(region);
    }
}

enum status decode_create(struct node *node, const struct decode_options *options,
                          struct decode **ret_decode, struct error *err)
{
    struct decode *decode = mem_zalloc(sizeof(*decode));
    decode->node = node;
    list_init(&decode->servings);
    enum status status = landing_open(decode, options->landing_slots, err);
    if (status) {
        goto fail;
    }
    landing_share(decode);
    status = workers_create(node_loop(node), options->n_workers, 1024, &decode->workers);
    if (status) {
        error_set(err, status, "worker threads can't be started");
        goto fail;
    }
    struct peers_options peers = {
        .loop = node_loop(node),
        .rpc = node_rpc(node),
        .landing = decode->landing,
        .security = node_security(node),
        .hello = node_hello(node),
    };
    peers.ucx_address = transport_worker_address(decode->transport, &peers.ucx_address_bytes);
    status = peers_create(&peers, &peers_events, decode, &decode->peers);
    if (status) {
        goto fail;
    }
    struct requests_options requests = {
        .loop = node_loop(node),
        .engine = node_engine(node),
        .node_id = node_hello(node)->node_id,
        .max_queued = options->max_queued,
        .prefill_share = options->prefill_share,
    };
    status = requests_create(&requests, decode->peers, on_broken, decode, &decode->requests);
    if (status) {
        error_set(err, status, "the compute thread can't be started");
        goto fail;
    }
    struct handoff_options handoff = {
        .loop = node_loop(node),
        .engine = node_engine(node),
        .landing = decode->landing,
        .workers = decode->workers,
        .max_transfers = options->max_transfers,
        .max_slots_a_transfer = options->max_slots_a_transfer,
    };
    status = handoff_create(&handoff, &requests_handoff_events, decode->requests, &decode->handoff);
    if (status) {
        goto fail;
    }
    requests_set_handoff(decode->requests, decode->handoff);
    rpc_server_add_stream(node_server(node), "/baton.Decode/Serve", on_stream, decode);
    register_metrics(decode);
    decode->tick = loop_timer_create(node_loop(node), on_tick, decode);
    loop_timer_arm(decode->tick, TICK_MS * NS_PER_MS);
    *ret_decode = decode;
    return STATUS_OK;

fail:
    decode_free(decode);
    return status;
}

void decode_free(struct decode *decode)
{
    if (!decode) {
        return;
    }
    loop_timer_free(decode->tick);
    struct list *first;
    while ((first = list_first(&decode->servings)) != NULL) {
        struct serving *serving = list_entry(first, struct serving, link_in);
        /* In order where nothing runs: its end is then read behind all that was said before. */
        if (decode->requests && requests_n_live(decode->requests) == 0) {
            link_finish(serving->link);
        }
        serving_end(serving, "this node ends");
    }
    /* Copies under way first: they write to pages of sequences that the rest frees. */
    workers_free(decode->workers);
    handoff_free(decode->handoff);
    requests_free(decode->requests);
    peers_free(decode->peers);
    if (decode->shared) {
        engine_unshare(node_engine(decode->node), decode->shared);
    }
    landing_free(decode->landing);
    buf_fini(&decode->packed);
    mem_free(decode);
}
