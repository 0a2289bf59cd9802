/*
 * The registry for people and machines: /workers and the gauges of nodes.
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/net.h"
#include "router/registry_internal.h"

static const char *role_name(Baton__Role role)
{
    return role == BATON__ROLE__ROLE_DECODE ? "decode" : "prefill";
}

const char *registry_node_state(const struct node *node)
{
    if (node->wedged) {
        return "wedged";
    }
    if (node->draining) {
        return "draining";
    }
    if (!node->has_status || (node->role == BATON__ROLE__ROLE_DECODE && !node->serving)) {
        return "connecting";
    }
    return node->ready ? "ready" : "not_ready";
}

static const char *pair_state_name(Baton__ToRouter__Pair__State state)
{
    static const char *const names[] = {"connecting", "preflight", "ready", "failed"};
    return (unsigned)state < sizeof(names) / sizeof(names[0]) ? names[state] : "unknown";
}

/* Why a node is not ready, "" when it is. */
static const char *node_reason(const struct node *node)
{
    if (node->wedged) {
        return "it has work and makes no progress";
    }
    if (node->draining) {
        return "draining";
    }
    if (node->role == BATON__ROLE__ROLE_DECODE && !node->serving) {
        return node->serve_text;
    }
    if (node->ready) {
        return "";
    }
    return node->reason[0] ? node->reason : "no status yet";
}

static void write_address(struct json_writer *w, const char *key, const char *host, uint16_t port)
{
    char text[NET_HOST_MAX + 16];
    if (!port) {
        json_key(w, key);
        json_put_null(w);
        return;
    }
    net_address_format(host, port, text, sizeof(text));
    json_pair_string(w, key, text);
}

static void write_pairs(struct json_writer *w, const struct node *node)
{
    uint64_t now_ns = loop_now_ns();
    json_key(w, "pairs");
    json_begin_array(w);
    for (size_t i = 0; i < node->n_pairs; i++) {
        const struct node_pair *pair = &node->pairs[i];
        bool is_ready = pair->state == BATON__TO_ROUTER__PAIR__STATE__READY;
        json_begin_object(w);
        json_pair_string(w, "prefill", pair->prefill.id);
        json_pair_string(w, "state", pair_state_name(pair->state));
        json_pair_string(w, is_ready ? "transport" : "text", pair->text);
        json_pair_real(w, "put_cost_us", (double)pair->put_cost_ns * 1e-3);
        json_pair_uint(w, "bandwidth_bytes_per_s", pair->bandwidth_bytes_per_s);
        json_pair_real(w, "age_s", (double)(now_ns - pair->since_ns) * 1e-9);
        json_end_object(w);
    }
    json_end_array(w);
}

static void write_node(struct json_writer *w, const struct node *node)
{
    uint64_t now_ns = loop_now_ns();
    char incarnation[17];
    snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, node->ref.incarnation);
    json_begin_object(w);
    json_pair_string(w, "id", node->ref.id);
    json_pair_string(w, "role", role_name(node->role));
    json_pair_string(w, "incarnation", incarnation);
    json_pair_string(w, "state", registry_node_state(node));
    write_address(w, "grpc", node->grpc_host, node->grpc_port);
    write_address(w, "http", node->http_host, node->http_port);
    json_pair_uint(w, "queued", node->n_queued);
    json_pair_uint(w, "queued_tokens", node->queued_tokens);
    json_pair_uint(w, "running", node->n_running);
    json_pair_uint(w, "free_pages", node->pages_free);
    json_pair_uint(w, "total_pages", node->pages_total);
    json_pair_uint(w, "free_sequences", node->sequences_free);
    json_pair_uint(w, "landing_slots_free", node->slots_free);
    json_pair_uint(w, "landing_slots_total", node->slots_total);
    json_pair_real(w, "prefill_tokens_per_s", node->prefill_tokens_per_s);
    json_pair_real(w, "step_ms", node->step_ms);
    json_pair_uint(w, "max_context_tokens", node->max_context_tokens);
    json_pair_uint(w, "attempts_of_this_router", node->load.n_live);
    json_pair_string(w, "model", node->model);
    json_pair_string(w, "version", node->version);
    char fingerprint[2 * HELLO_FINGERPRINT_MAX + 1];
    hello_fingerprint_text(node->fingerprint, node->fingerprint_bytes, fingerprint);
    json_pair_string(w, "fingerprint", fingerprint);
    json_pair_uint(w, "pid", node->pid);
    json_pair_real(w, "joined_s", (double)(now_ns - node->joined_ns) * 1e-9);
    json_pair_real(w, "status_age_s", (double)(now_ns - node->status_ns) * 1e-9);
    if (node->role == BATON__ROLE__ROLE_DECODE) {
        write_pairs(w, node);
    }
    const char *reason = node_reason(node);
    json_key(w, "reason");
    if (reason[0]) {
        json_put_string(w, reason);
    } else {
        json_put_null(w);
    }
    json_end_object(w);
}

void registry_write_json(struct registry *registry, struct json_writer *w)
{
    json_begin_array(w);
    list_for_each(at, &registry->nodes)
    {
        write_node(w, list_entry(at, struct node, in_registry));
    }
    json_end_array(w);
}

/* ---- readiness ---- */

static bool has_ready_pair(struct registry *registry, const struct node *decode)
{
    for (size_t i = 0; i < decode->n_pairs; i++) {
        const struct node_pair *pair = &decode->pairs[i];
        const struct node *prefill =
            pair->state == BATON__TO_ROUTER__PAIR__STATE__READY
                ? registry_find(registry, pair->prefill.id, pair->prefill.incarnation)
                : NULL;
        if (prefill && registry_prefill_usable(prefill)) {
            return true;
        }
    }
    return false;
}

bool registry_can_run(struct registry *registry, bool local_allowed, bool pairs_allowed,
                      char *ret_text, size_t capacity)
{
    const struct node *shown = NULL;
    size_t n_decode = 0, n_usable = 0;
    list_for_each(at, &registry->nodes)
    {
        const struct node *node = list_entry(at, struct node, in_registry);
        if (node->role != BATON__ROLE__ROLE_DECODE) {
            continue;
        }
        n_decode++;
        if (!registry_node_usable(node)) {
            shown = node;
            continue;
        }
        n_usable++;
        if (local_allowed || (pairs_allowed && has_ready_pair(registry, node))) {
            return true;
        }
    }
    if (n_usable) {
        snprintf(ret_text, capacity,
                 "%zu decode nodes are ready, none has a ready pair, and local prefill is off",
                 n_usable);
    } else if (shown) {
        snprintf(ret_text, capacity, "none of %zu decode nodes is ready; %s is %s: %s", n_decode,
                 shown->ref.id, registry_node_state(shown), node_reason(shown));
    } else {
        snprintf(ret_text, capacity, "no decode node has joined");
    }
    return false;
}

/* ---- gauges ---- */

static double count_nodes(struct registry *registry, Baton__Role role, bool ready)
{
    double n = 0;
    list_for_each(at, &registry->nodes)
    {
        struct node *node = list_entry(at, struct node, in_registry);
        bool is_ready = registry_node_usable(node) || registry_prefill_usable(node);
        n += node->role == role && is_ready == ready;
    }
    return n;
}

static double decode_ready(void *cookie)
{
    return count_nodes(cookie, BATON__ROLE__ROLE_DECODE, true);
}

static double decode_other(void *cookie)
{
    return count_nodes(cookie, BATON__ROLE__ROLE_DECODE, false);
}

static double prefill_ready(void *cookie)
{
    return count_nodes(cookie, BATON__ROLE__ROLE_PREFILL, true);
}

static double prefill_other(void *cookie)
{
    return count_nodes(cookie, BATON__ROLE__ROLE_PREFILL, false);
}

static double nodes_lost(void *cookie)
{
    return (double)((struct registry *)cookie)->n_lost;
}

static double joins_refused(void *cookie)
{
    return (double)((struct registry *)cookie)->n_refused;
}

static double serve_messages(void *cookie)
{
    return (double)((struct registry *)cookie)->n_serve_messages;
}

void registry_metrics_register(struct registry *registry, struct metrics *metrics)
{
    static const char name[] = "baton_nodes", help[] = "Nodes that are joined.";
    metrics_gauge_call(metrics, name, help, METRIC_LABELS({"role", "decode"}, {"state", "ready"}),
                       decode_ready, registry);
    metrics_gauge_call(metrics, name, help, METRIC_LABELS({"role", "decode"}, {"state", "other"}),
                       decode_other, registry);
    metrics_gauge_call(metrics, name, help, METRIC_LABELS({"role", "prefill"}, {"state", "ready"}),
                       prefill_ready, registry);
    metrics_gauge_call(metrics, name, help, METRIC_LABELS({"role", "prefill"}, {"state", "other"}),
                       prefill_other, registry);
    metrics_counter_call(metrics, "baton_nodes_lost_total", "Nodes that left or were missed.",
                         METRIC_NO_LABELS, nodes_lost, registry);
    metrics_counter_call(metrics, "baton_joins_refused_total", "Nodes that were refused.",
                         METRIC_NO_LABELS, joins_refused, registry);
    metrics_counter_call(metrics, "baton_serve_messages_total", "Messages from decode nodes.",
                         METRIC_NO_LABELS, serve_messages, registry);
}
