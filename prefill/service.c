/* Prefill.Serve and the wiring of a prefill node.
 *
 * Owns one `struct client` a decode node's link: its UCX endpoint, made from the hello, and the
 * target of its runs. Link and endpoint live and die together: when either fails the other is
 * closed, all runs of the client end, and the decode node dials anew. A client is freed when its
 * endpoint's close has come back and its last run is gone.
 */
#include "prefill/service.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/hmap.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/workers.h"
#include "node/kv.h"
#include "prefill/cancels.h"
#include "prefill/handoff.h"
#include "rpc/hello.h"
#include "rpc/link.h"
#include "rpc/proto.h"

enum { TICK_MS = 100, MESSAGE_ARENA_BYTES = 256 << 20, HELLO_TIMEOUT_MS = 3000 };

struct client {
    struct run_target target;
    struct list link_in;
    struct prefill *prefill;
    struct link *link; /* NULL: gone */
    char node_id[HELLO_NODE_ID_MAX + 1];
    uint64_t since_ns, pattern;
    bool greeted, closing, peer_closing, clogged;
    uint32_t preflight_runs[2 * PUT_PREFLIGHT_MAX_SLOTS];
    uint32_t n_preflight_runs;
    uint64_t preflight_bytes;
    struct put_preflight_source preflight_source; /* in the device's memory; its region NULL: none
                                                     is taken */
    char path[PUT_MAX_LANES_TEXT + 32];           /* lanes, and where puts read */
};

struct prefill {
    struct node *node;
    struct workers *workers;
    struct runs *runs;
    struct cancels *cancels;
    struct loop_timer *tick;
    struct list clients;
    struct buf packed;
    bool reaping;
    uint64_t n_preflights, n_preflights_failed;
};

static enum status target_send(struct run_target *target, const Baton__FromPrefill *message)
{
    struct client *client = list_entry(target, struct client, target);
    struct buf *packed = &client->prefill->packed;
    if (!client->link) {
        return STATUS_PEER_LOST;
    }
    if (message->what_case == BATON__FROM_PREFILL__WHAT_DRAINED) {
        cancels_drained(client->prefill->cancels, client, message->drained->transfer);
    }
    proto_pack(&message->base, packed);
    enum status status =
        link_send_message(client->link, &message->base, packed->data, packed->bytes);
    client->clogged = client->clogged || status == STATUS_EXHAUSTED;
    return status;
}

/* ---- the end of a client ---- */

static void reap(void *cookie)
{
    struct prefill *prefill = cookie;
    prefill->reaping = false;
    list_for_each_safe(at, &prefill->clients)
    {
        struct client *client = list_entry(at, struct client, link_in);
        if (client->closing && !client->target.peer && list_empty(&client->target.runs)) {
            run_target_fini(&client->target);
            list_remove(&client->link_in);
            mem_free(client);
        }
    }
    node_status_soon(prefill->node);
}

static void reap_soon(struct prefill *prefill)
{
    if (!prefill->reaping) {
        prefill->reaping = true;
        loop_defer(node_loop(prefill->node), reap, prefill);
    }
}

static void on_target_idle(struct run_target *target)
{
    reap_soon(list_entry(target, struct client, target)->prefill);
}

static void on_peer_closed(void *cookie, struct put_peer *peer)
{
    struct client *client = cookie;
    client->target.peer = NULL;
    reap_soon(client->prefill);
}

/* With `refusal` the decode node hears why. */
static void client_close(struct client *client, const char *why, bool refuse)
{
    struct prefill *prefill = client->prefill;
    if (client->closing) {
        return;
    }
    client->closing = true;
    if (client->greeted) {
        log_warn("serve", "decode node %s is let go: %s", client->node_id, why);
    }
    struct link *link = client->link;
    client->link = NULL;
    if (refuse) {
        link_refuse(link, why);
    } else {
        link_close(link);
    }
    runs_target_lost(prefill->runs, &client->target);
    cancels_forget(prefill->cancels, client);
    if (client->target.peer) {
        put_peer_close(client->target.peer, on_peer_closed, client);
    }
    reap_soon(prefill);
}

/* ---- endpoint and preflight ---- */

static void on_peer_up(void *cookie, struct put_peer *peer)
{
    struct client *client = cookie;
    log_info("serve", "%s is reached by %s", client->node_id, put_peer_lanes(peer));
}

static void on_peer_failed(void *cookie, struct put_peer *peer, enum status status,
                           const char *text)
{
    struct client *client = cookie;
    char why[320];
    snprintf(why, sizeof(why), "the KV transport to %s failed (%s): %s", client->node_id,
             status_name(status), text);
    client_close(client, why, true);
}

static const struct put_peer_events peer_events = {.up = on_peer_up, .failed = on_peer_failed};

static void on_preflight(void *cookie, const struct put_preflight_result *result)
{
    struct client *client = cookie;
    Baton__FromPrefill__Preflight preflight = BATON__FROM_PREFILL__PREFLIGHT__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    char error[160];
    if (client->preflight_source.region) {
        runs_preflight_give(client->prefill->runs, &client->preflight_source);
        client->preflight_source.region = NULL;
    }
    if (client->closing) {
        return;
    }
    preflight.region = client->target.region_id;
    preflight.slot_runs = client->preflight_runs;
    preflight.n_slot_runs = client->n_preflight_runs;
    preflight.pattern = client->pattern;
    preflight.bytes = client->preflight_bytes;
    client->prefill->n_preflights++;
    if (result->status) {
        client->prefill->n_preflights_failed++;
        snprintf(error, sizeof(error), "the preflight's puts ended with %s",
                 status_name(result->status));
        preflight.error = error;
    } else {
        snprintf(client->path, sizeof(client->path), "%s from %s memory", result->lanes,
                 client->target.from_device ? "device" : "host");
        preflight.transport = client->path;
        preflight.direct = result->direct;
        preflight.put_cost_ns = result->put_cost_ns;
        preflight.bandwidth_bytes_per_s = result->bandwidth_bytes_per_s;
    }
    message.what_case = BATON__FROM_PREFILL__WHAT_PREFLIGHT;
    message.preflight = &preflight;
    if (target_send(&client->target, &message)) {
        client_close(client, "the link is full", false);
    }
}

/* From where puts to this peer will read. */
static enum status preflight_put(struct client *client, const struct put_slot *slots, uint32_t n,
                                 struct error *err)
{
    struct put_preflight_source *source = &client->preflight_source;
    struct runs *runs = client->prefill->runs;
    struct put_peer *peer = client->target.peer;
    if (!client->target.from_device) {
        return put_preflight(peer, slots, n, client->pattern, on_preflight, client, err);
    }
    if (source->region || runs_preflight_take(runs, source)) {
        return error_set(err, STATUS_EXHAUSTED, "too many preflights run at once");
    }
    enum status status =
        put_preflight_from(peer, source, slots, n, client->pattern, on_preflight, client, err);
    if (status) {
        runs_preflight_give(runs, source);
        source->region = NULL;
    }
    return status;
}

static enum status preflight_start(struct client *client, const Baton__ToPrefill__Slots *message,
                                   struct error *err)
{
    struct run_target *target = &client->target;
    struct put_slot slots[PUT_PREFLIGHT_MAX_SLOTS];
    uint32_t n = 0;
    client->n_preflight_runs = 0;
    client->preflight_bytes = target->slot_bytes < (16u << 20) ? target->slot_bytes : 16u << 20;
    for (size_t r = 0; r + 1 < message->n_slot_runs; r += 2) {
        for (uint32_t k = 0; k < message->slot_runs[r + 1]; k++) {
            uint32_t slot = message->slot_runs[r] + k;
            if (n == PUT_PREFLIGHT_MAX_SLOTS || slot < target->first_slot ||
                slot - target->first_slot >= target->n_slots) {
                return error_set(err, STATUS_CORRUPT, "preflight slots outside the landing area");
            }
            slots[n++] = (struct put_slot){target->region_id,
                                           (slot - target->first_slot) * target->slot_bytes,
                                           client->preflight_bytes};
            client->preflight_runs[client->n_preflight_runs++] = slot;
            client->preflight_runs[client->n_preflight_runs++] = 1;
        }
    }
    if (n == 0) {
        return error_set(err, STATUS_CORRUPT, "a preflight without slots");
    }
    enum status status = hello_incarnation_draw(&client->pattern, err);
    enum fault_action fault = FAULT_HIT(PUT_PREFLIGHT);
    if (fault == FAULT_FAIL) {
        return error_set(err, STATUS_PEER_LOST, "the preflight failed at a fault point");
    }
    if (!status) {
        status = preflight_put(client, slots, n, err);
    }
    client->pattern += fault == FAULT_CORRUPT;
    return status;
}

/* ---- the link of a decode node ---- */

static enum status hello_region(struct client *client, const Baton__PrefillHello *hello,
                                struct put_remote_region *ret_region, struct error *err)
{
    size_t page_bytes = engine_info(node_engine(client->prefill->node))->page_bytes;
    if (hello->n_regions != 1) {
        return error_set(err, STATUS_CORRUPT, "%zu landing regions, one is understood",
                         hello->n_regions);
    }
    const Baton__Region *region = hello->regions[0];
    if (region->slot_bytes != page_bytes || region->n_slots == 0 ||
        region->bytes / region->slot_bytes < region->n_slots) {
        return error_set(err, STATUS_PEER_REFUSED,
                         "landing slots of %" PRIu64 " bytes there, pages of %zu bytes here",
                         region->slot_bytes, page_bytes);
    }
    *ret_region = (struct put_remote_region){.id = region->id,
                                             .base = region->address,
                                             .bytes = region->bytes,
                                             .rkey = region->rkey.data,
                                             .rkey_bytes = region->rkey.len};
    client->target.region_id = region->id;
    client->target.first_slot = region->first_slot;
    client->target.n_slots = region->n_slots;
    client->target.slot_bytes = region->slot_bytes;
    return STATUS_OK;
}

static enum status on_hello(struct client *client, const Baton__PrefillHello *message,
                            struct error *err)
{
    struct node *node = client->prefill->node;
    const Baton__Hello *hello = message->hello, *ours = node_hello(node);
    struct put_remote_region region;
    if (!hello) {
        return error_set(err, STATUS_CORRUPT, "a hello without a hello");
    }
    enum status status = hello_check(ours, hello, err);
    if (!status && hello->role != BATON__ROLE__ROLE_DECODE) {
        status = error_set(err, STATUS_PEER_REFUSED, "%s is no decode node", hello->node_id);
    }
    if (!status) {
        status = hello_region(client, message, &region, err);
    }
    if (status) {
        return status;
    }
    snprintf(client->node_id, sizeof(client->node_id), "%s", hello->node_id);
    struct put_peer_options peer = {
        .name = client->node_id,
        .address = message->ucx_address.data,
        .address_bytes = message->ucx_address.len,
        .regions = &region,
        .n_regions = 1,
        .same_host =
            ours->host_boot_id.len > 0 && hello->host_boot_id.len == ours->host_boot_id.len &&
            memcmp(hello->host_boot_id.data, ours->host_boot_id.data, ours->host_boot_id.len) == 0,
        .allow_slow = node_allows_slow_transport(node),
        .events = &peer_events,
        .cookie = client,
    };
    /* From the device into the device; what has to pass host memory at one end passes it at both.
     */
    struct node_kv *kv = node_kv(node);
    client->target.from_device =
        kv && (message->regions[0]->memory == BATON__MEMORY_KIND__MEMORY_DEVICE ||
               !runs_have_host_copy(client->prefill->runs));
    struct transport *transport =
        client->target.from_device ? node_kv_transport(kv) : node_transport(node);
    status = put_peer_connect(transport, &peer, &client->target.peer, err);
    if (status) {
        return status;
    }
    Baton__PrefillHello answer = BATON__PREFILL_HELLO__INIT;
    Baton__FromPrefill reply = BATON__FROM_PREFILL__INIT;
    answer.hello = (Baton__Hello *)ours;
    answer.ucx_address.data =
        (uint8_t *)transport_worker_address(transport, &answer.ucx_address.len);
    reply.what_case = BATON__FROM_PREFILL__WHAT_HELLO;
    reply.hello = &answer;
    client->greeted = true;
    log_info("serve", "decode node %s of incarnation %016" PRIx64 " is served", hello->node_id,
             hello->incarnation);
    return target_send(&client->target, &reply);
}

static void on_cancel(struct client *client, uint64_t transfer)
{
    struct prefill *prefill = client->prefill;
    uint64_t now_ns = loop_now_ns();
    bool lives = hmap_get_u64(client->target.by_id, transfer) != NULL;
    runs_cancel(prefill->runs, &client->target, transfer);
    if (lives) {
        cancels_came(prefill->cancels, client, transfer, now_ns);
    }
}

static enum status on_client_message(struct client *client, const Baton__ToPrefill *message,
                                     struct error *err)
{
    struct runs *runs = client->prefill->runs;
    struct run_target *target = &client->target;
    if (message->what_case == BATON__TO_PREFILL__WHAT_HELLO) {
        return client->greeted ? error_set(err, STATUS_CORRUPT, "a second hello")
                               : on_hello(client, message->hello, err);
    }
    if (!client->greeted) {
        return error_set(err, STATUS_CORRUPT, "the first message is no hello");
    }
    switch (message->what_case) {
    case BATON__TO_PREFILL__WHAT_RUN:
        runs_run(runs, target, message->run, node_draining(client->prefill->node));
        break;
    case BATON__TO_PREFILL__WHAT_IDS:
        runs_ids(runs, target, message->ids);
        break;
    case BATON__TO_PREFILL__WHAT_SLOTS:
        if (message->slots->transfer == 0) {
            return preflight_start(client, message->slots, err);
        }
        runs_slots(runs, target, message->slots);
        break;
    case BATON__TO_PREFILL__WHAT_CANCEL:
        on_cancel(client, message->cancel->transfer);
        break;
    case BATON__TO_PREFILL__WHAT_VERIFIED:
        if (message->verified->ok) {
            log_info("serve", "the pair with %s is ready", client->node_id);
        } else {
            log_warn("serve", "the pair with %s failed its preflight: %s", client->node_id,
                     message->verified->text);
        }
        break;
    default:
        break; /* Accepted holds nothing of ours; a later build's message is skipped */
    }
    return STATUS_OK;
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct client *client = cookie;
    struct error err = {""};
    struct arena *arena = arena_create(MESSAGE_ARENA_BYTES);
    ProtobufCMessage *unpacked;
    enum status status =
        proto_unpack(&baton__to_prefill__descriptor, bytes, n_bytes, arena, &unpacked, &err);
    if (!status) {
        status = on_client_message(client, (const Baton__ToPrefill *)unpacked, &err);
    }
    arena_free(arena);
    if (status) {
        log_warn("serve", "%s: %s", link_name(link), err.text);
        client_close(client, err.text, true);
    }
}

static void on_ended(void *cookie, struct link *link)
{
    client_close(cookie, "it left", false);
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    client_close(cookie, text[0] ? text : status_name(status), false);
}

static const struct link_events client_events = {
    .message = on_message,
    .ended = on_ended,
    .closed = on_closed,
};

static void on_stream(void *cookie, struct link *link)
{
    struct prefill *prefill = cookie;
    struct client *client = mem_zalloc(sizeof(*client));
    client->prefill = prefill;
    client->link = link;
    client->since_ns = loop_now_ns();
    run_target_init(&client->target);
    client->target.name = client->node_id;
    client->target.send = target_send;
    client->target.idle = on_target_idle;
    list_push_back(&prefill->clients, &client->link_in);
    link_attach(link, &client_events, client);
}

static void on_tick(void *cookie)
{
    struct prefill *prefill = cookie;
    uint64_t now_ns = loop_now_ns();
    runs_tick(prefill->runs);
    list_for_each_safe(at, &prefill->clients)
    {
        struct client *client = list_entry(at, struct client, link_in);
        if (client->clogged) {
            client_close(client, "it does not read", false);
        } else if (!client->greeted && now_ns - client->since_ns > HELLO_TIMEOUT_MS * NS_PER_MS) {
            client_close(client, "it said no hello", false);
        }
    }
    loop_timer_arm(prefill->tick, TICK_MS * NS_PER_MS);
}

static void on_broken(void *cookie, enum status status)
{
    struct prefill *prefill = cookie;
    log_error("prefill", "the engine failed (%s): this node ends", status_name(status));
    service_stop(node_service(prefill->node), 1);
}

/* ---- the node's questions ---- */

static void op_status(void *cookie, Baton__ToRouter__Status *status)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    struct runs_stats runs;
    struct batcher_stats batcher;
    runs_stats(prefill->runs, &runs);
    batcher_stats(runs_batcher(prefill->runs), &batcher);
    status->n_queued = runs.n_queued;
    status->queued_tokens = runs.queued_tokens;
    status->n_running = runs.n_computing + runs.n_sending;
    status->unit = strcmp(batcher.running, "chunk") == 0 ? BATON__TO_ROUTER__STATUS__UNIT__CHUNK
                                                         : BATON__TO_ROUTER__STATUS__UNIT__IDLE;
    status->unit_age_ms = (loop_now_ns() - batcher.running_since_ns) / NS_PER_MS;
    status->prefill_tokens_per_s = (float)batcher.tokens_per_s_prefill;
}

static bool op_busy(void *cookie)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    struct batcher_stats batcher;
    batcher_stats(runs_batcher(prefill->runs), &batcher);
    return strcmp(batcher.running, "idle") != 0;
}

static uint32_t op_n_live(void *cookie)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    return runs_n_live(prefill->runs);
}

static void op_fail_all(void *cookie, const char *text)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    runs_fail_all(prefill->runs, BATON__FAIL_CODE__FAIL_DRAINING, text);
}

static void op_paused(void *cookie)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    list_for_each_safe(at, &prefill->clients)
    {
        client_close(list_entry(at, struct client, link_in), "this node was paused", false);
    }
}

static void op_debug(void *cookie, struct json_writer *w)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    json_key(w, "tails");
    runs_debug_json(prefill->runs, w);
}

static void op_debug_requests(void *cookie, struct json_writer *w)
{
    struct prefill *prefill = *(struct prefill **)cookie;
    runs_debug_requests_json(prefill->runs, w);
}

const struct node_ops prefill_node_ops = {
    .status = op_status,
    .busy = op_busy,
    .n_live = op_n_live,
    .fail_all = op_fail_all,
    .paused = op_paused,
    .debug = op_debug,
    .debug_requests = op_debug_requests,
};

/* ---- gauges ---- */

enum metric {
    GAUGE_QUEUED,
    GAUGE_OLDEST_WAIT,
    GAUGE_RUNNING,
    GAUGE_TRANSFERS,
    GAUGE_CLIENTS,
    COUNTER_STARTED,
    COUNTER_DONE,
    COUNTER_FAILED,
    COUNTER_CANCELLED,
    COUNTER_REFUSED,
    COUNTER_PARCELS,
    COUNTER_BYTES,
    COUNTER_EARLY_BYTES,
    COUNTER_TOKENS,
    COUNTER_PREFLIGHTS,
    COUNTER_PREFLIGHTS_FAILED,
    N_METRICS
};

struct value {
    struct prefill *prefill;
    enum metric what;
};

static double value_of(void *cookie)
{
    const struct value *value = cookie;
    struct prefill *prefill = value->prefill;
    struct runs_stats r;
    struct batcher_stats b;
    double n_clients = 0;
    runs_stats(prefill->runs, &r);
    batcher_stats(runs_batcher(prefill->runs), &b);
    list_for_each(at, &prefill->clients)
    {
        n_clients += list_entry(at, struct client, link_in)->greeted;
    }
    const double values[N_METRICS] = {
        [GAUGE_QUEUED] = r.n_queued,
        [GAUGE_OLDEST_WAIT] = (double)r.oldest_queued_ns * 1e-9,
        [GAUGE_RUNNING] = r.n_computing,
        [GAUGE_TRANSFERS] = r.n_computing + r.n_sending + r.n_ending,
        [GAUGE_CLIENTS] = n_clients,
        [COUNTER_STARTED] = (double)r.n_started,
        [COUNTER_DONE] = (double)r.n_done,
        [COUNTER_FAILED] = (double)r.n_failed,
        [COUNTER_CANCELLED] = (double)r.n_cancelled,
        [COUNTER_REFUSED] = (double)r.n_refused,
        [COUNTER_PARCELS] = (double)r.n_parcels,
        [COUNTER_BYTES] = (double)r.n_bytes,
        [COUNTER_EARLY_BYTES] = (double)r.n_early_bytes,
        [COUNTER_TOKENS] = (double)b.n_chunk_tokens,
        [COUNTER_PREFLIGHTS] = (double)prefill->n_preflights,
        [COUNTER_PREFLIGHTS_FAILED] = (double)prefill->n_preflights_failed,
    };
    return values[value->what];
}

static const struct {
    enum metric what;
    const char *name, *help;
} metric_rows[N_METRICS] = {
    {GAUGE_QUEUED, "baton_requests_queued", "Transfers waiting to start."},
    {GAUGE_OLDEST_WAIT, "baton_requests_oldest_wait_seconds",
     "How long the transfer that waits longest has waited."},
    {GAUGE_RUNNING, "baton_requests_running", "Prompts being computed."},
    {GAUGE_TRANSFERS, "baton_transfers_in_flight", "Transfers that hold pages."},
    {GAUGE_CLIENTS, "baton_decode_nodes_served", "Decode nodes linked."},
    {COUNTER_STARTED, "baton_transfers_started_total", "Transfers asked for."},
    {COUNTER_DONE, "baton_transfers_done_total", "Transfers sent whole."},
    {COUNTER_FAILED, "baton_transfers_failed_total", "Transfers that failed."},
    {COUNTER_CANCELLED, "baton_transfers_cancelled_total", "Transfers that were cancelled."},
    {COUNTER_REFUSED, "baton_transfers_refused_total", "Transfers refused at once."},
    {COUNTER_PARCELS, "baton_parcels_total", "Parcels sent."},
    {COUNTER_BYTES, "baton_transfer_bytes_total", "Bytes of parcels sent."},
    {COUNTER_EARLY_BYTES, "baton_transfer_early_bytes_total",
     "Bytes of the last chunks' pages that left while their layers still computed."},
    {COUNTER_TOKENS, "baton_prefill_tokens_total", "Prompt tokens computed."},
    {COUNTER_PREFLIGHTS, "baton_preflights_total", "Preflights run."},
    {COUNTER_PREFLIGHTS_FAILED, "baton_preflights_failed_total", "Preflights that failed."},
};

static void register_metrics(struct prefill *prefill)
{
    static struct value values[N_METRICS];
    struct metrics *metrics = node_metrics(prefill->node);
    for (size_t i = 0; i < N_METRICS; i++) {
        values[i] = (struct value){prefill, metric_rows[i].what};
        if (metric_rows[i].what < COUNTER_STARTED) {
            metrics_gauge_call(metrics, metric_rows[i].name, metric_rows[i].help, METRIC_NO_LABELS,
                               value_of, &values[i]);
        } else {
            metrics_counter_call(metrics, metric_rows[i].name, metric_rows[i].help,
                                 METRIC_NO_LABELS, value_of, &values[i]);
        }
    }
    runs_register(prefill->runs, metrics);
}

/* ---- life ---- */

enum status prefill_create(struct node *node, const struct prefill_options *options,
                           struct prefill **ret_prefill, struct error *err)
{
    struct prefill *prefill = mem_zalloc(sizeof(*prefill));
    prefill->node = node;
    list_init(&prefill->clients);
    enum status status =
        workers_create(node_loop(node), options->n_workers, 1024, &prefill->workers);
    if (status) {
        error_set(err, status, "worker threads can't be started");
        goto fail;
    }
    struct runs_options runs = {
        .loop = node_loop(node),
        .engine = node_engine(node),
        .transport = node_transport(node),
        .kv = node_kv(node),
        .workers = prefill->workers,
        .node_id = node_hello(node)->node_id,
        .max_queued = options->max_queued,
        .n_tails = options->n_tails,
        .n_pieces = options->n_pieces,
    };
    status = runs_create(&runs, on_broken, prefill, &prefill->runs, err);
    if (status) {
        goto fail;
    }
    rpc_server_add_stream(node_server(node), "/baton.Prefill/Serve", on_stream, prefill);
    register_metrics(prefill);
    prefill->cancels = cancels_create(node, node_metrics(node));
    prefill->tick = loop_timer_create(node_loop(node), on_tick, prefill);
    loop_timer_arm(prefill->tick, TICK_MS * NS_PER_MS);
    *ret_prefill = prefill;
    return STATUS_OK;

fail:
    prefill_free(prefill);
    return status;
}

void prefill_free(struct prefill *prefill)
{
    if (!prefill) {
        return;
    }
    loop_timer_free(prefill->tick);
    list_for_each_safe(at, &prefill->clients)
    {
        struct client *client = list_entry(at, struct client, link_in);
        /* In order where nothing runs: its end is then read behind all that was said before. */
        if (client->link && list_empty(&client->target.runs)) {
            link_finish(client->link);
        }
        client_close(client, "this node ends", false);
    }
    workers_free(prefill->workers);
    /* Ends every put and peer: their callbacks run inside, and the runs see them. */
    node_transport_close(prefill->node);
    runs_free(prefill->runs);
    cancels_free(prefill->cancels);
    loop_defer_cancel(node_loop(prefill->node), reap, prefill);
    list_for_each_safe(at, &prefill->clients)
    {
        struct client *client = list_entry(at, struct client, link_in);
        run_target_fini(&client->target);
        mem_free(client);
    }
    buf_fini(&prefill->packed);
    mem_free(prefill);
}
