/* node/options.h - the options that prefill and decode nodes share: one struct, one block of table
 * rows.
 *
 * A daemon embeds `struct node_options node` in its own options struct and puts
 * NODE_OPTION_SPECS(struct its_options, node) into its table. node_engine_options turns the
 * engine's part into what engine_open takes.
 */
#ifndef BATON_NODE_OPTIONS_H
#define BATON_NODE_OPTIONS_H

#include <stddef.h>

#include "base/log.h"
#include "base/opts.h"
#include "engine/engine.h"

struct node_options {
    /* identity and network */
    char *node_id, *host, *advertise_host;
    struct opt_list routers;
    int64_t grpc_port, http_port;
    char *cluster_token, *tls_cert, *tls_key, *tls_ca;
    /* engine */
    int engine;
    char *model, *weights, *device;
    struct opt_list kernels, allow_reference;
    bool list_kernels;
    bool exact;
    int graphs, lookahead, early_launches;
    int64_t threads, max_sequences, pages, max_context_tokens, chunk_tokens;
    uint64_t memory_limit;
    double sim_prefill_tokens_per_s, sim_step_ms;
    uint64_t sim_page_bytes, sim_tail_bytes;
    int64_t sim_vocab_size;
    char *script;
    /* transport */
    char *ucx_tls, *ucx_net_devices, *ucx_tcp_port_range;
    bool allow_slow_transport;
    int kv_buffer_device; /* enum node_kv_buffer */
    /* process */
    uint64_t grace_ns, lease_ns;
    int log_level;
    bool log_json, die_with_parent;
};

enum node_kv_buffer { NODE_KV_CPU, NODE_KV_CUDA, NODE_KV_AUTO };

extern const char *const node_kv_buffer_names[]; /* cpu, cuda, auto */
extern const char *const node_engine_names[];    /* model, sim */
extern const char *const node_switch_names[];    /* off, on */

void node_engine_options(const struct node_options *options, struct engine_options *ret_options);

/* Before a node is opened: what is asked for by name holds from now on. True: this process has
 * nothing more to do, for --list-kernels was answered or what was asked for can't be; *ret_code is
 * its exit code. */
bool node_options_answered(const struct node_options *options, const char *program, int *ret_code);

#define NODE_OPTION(type, member, kind_, field, name_, value_, initial_, min_, max_, help_) \
    {                                                                                       \
        .kind = kind_, .name = name_, .value = value_, .initial = initial_, .help = help_,  \
        .offset = offsetof(type, member.field), .min = min_, .max = max_                    \
    }
#define NODE_CHOICE(type, member, field, name_, initial_, choices_, help_)                        \
    {                                                                                             \
        .kind = OPT_ENUM, .name = name_, .initial = initial_, .help = help_, .choices = choices_, \
        .offset = offsetof(type, member.field)                                                    \
    }

/* clang-format off: one row an option reads as the table it is. */
#define NODE_OPTION_SPECS(T, M)                                                                    \
    {.kind = OPT_GROUP, .name = "Identity and network"},                                           \
        NODE_OPTION(                                                                               \
            T, M, OPT_STRING, node_id, "node-id", "NAME", NULL, 0, 0,                              \
            "Name of this node, unique in the cluster. Default: role, host name and process id."), \
        NODE_OPTION(T, M, OPT_LIST, routers, "router", "HOST:PORT", NULL, 0, 0,                    \
                    "gRPC address of a router to join."),                                          \
        NODE_OPTION(T, M, OPT_STRING, host, "host", "HOST", "127.0.0.1", 0, 0,                     \
                    "Address to listen on, for gRPC and for the HTTP probes."),                    \
        NODE_OPTION(T, M, OPT_STRING, advertise_host, "advertise-host", "HOST", NULL, 0, 0,        \
                    "Address that others reach this node by. Default: the listening address; "     \
                    "needed when that is a wildcard."),                                            \
        NODE_OPTION(T, M, OPT_INT, grpc_port, "grpc-port", "PORT", "0", 0, 65535,                  \
                    "gRPC port; 0 lets the system choose, and the router learns it."),             \
        NODE_OPTION(T, M, OPT_INT, http_port, "http-port", "PORT", "0", 0, 65535,                  \
                    "Port of /healthz, /readyz, /metrics and /debug; 0 lets the system choose."),  \
        NODE_OPTION(T, M, OPT_STRING, cluster_token, "cluster-token", "TEXT", NULL, 0, 0,          \
                    "Shared secret that every inner gRPC call must carry; /debug then needs it "   \
                    "as bearer key. Better in the "                                                \
                    "environment (BATON_CLUSTER_TOKEN) or a file than on the command line."),      \
        NODE_OPTION(T, M, OPT_STRING, tls_cert, "tls-cert", "FILE", NULL, 0, 0,                    \
                    "PEM certificate for inner gRPC."),                                            \
        NODE_OPTION(T, M, OPT_STRING, tls_key, "tls-key", "FILE", NULL, 0, 0,                      \
                    "PEM key of --tls-cert."),                                                     \
        NODE_OPTION(                                                                               \
            T, M, OPT_STRING, tls_ca, "tls-ca", "FILE", NULL, 0, 0,                                \
            "PEM certificates that peers must be signed by; turns TLS on for outgoing links."),    \
        {.kind = OPT_GROUP, .name = "Engine"},                                                     \
        NODE_CHOICE(                                                                               \
            T, M, engine, "engine", "model", node_engine_names,                                    \
            "model: a checkpoint; sim: no arithmetic, full-size pages with checked contents."),    \
        NODE_OPTION(T, M, OPT_STRING, model, "model", "DIR", NULL, 0, 0,                           \
                    "Checkpoint folder (config.json, *.safetensors)."),                            \
        NODE_OPTION(T, M, OPT_STRING, weights, "weights", "synthetic:SEED", NULL, 0, 0,            \
                    "Random weights of the model's shape in place of the checkpoint's, to time a " \
                    "model that isn't here: only its config.json is read."),                       \
        NODE_OPTION(T, M, OPT_STRING, device, "device", "DEVICE", "cpu", 0, 0,                     \
                    "cpu, cpu:N for a tensor-parallel group of N simulated devices, cuda:N for "   \
                    "GPU N, cuda:N,N for a group of GPUs."),                                       \
        NODE_OPTION(                                                                               \
            T, M, OPT_LIST, kernels, "kernel", "OPERATION=VARIANT", NULL, 0, 0,                    \
            "Compute an operation by this variant, which must serve this device, the cache's "     \
            "layout and the model's shapes. Default: the best that serves."),                      \
        NODE_OPTION(T, M, OPT_LIST, allow_reference, "allow-reference", "NAME", NULL, 0, 0,        \
                    "Let the reference kernel of this operation serve, which is right but slow, "  \
                    "where no tuned one does: a name, several with commas, or all. Without it "    \
                    "such a start is refused. On the CPU no operation needs it."),                 \
        NODE_OPTION(T, M, OPT_BOOL, list_kernels, "list-kernels", NULL, "no", 0, 0,                \
                    "Print for each operation which variant --device runs and why each other "     \
                    "doesn't, with --model for its shapes, and exit: 1 if a start would fail."),   \
        NODE_OPTION(T, M, OPT_BOOL, exact, "exact", NULL, "no", 0, 0,                              \
                    "Turn the quantisers' simulation off: for comparison with fp32 references."),  \
        NODE_CHOICE(                                                                               \
            T, M, graphs, "graphs", "auto", engine_graphs_names,                                   \
            "on: a GPU records its decode steps at start, one graph for each size of batch, and "  \
            "a start that can't is refused; off: every kernel is launched by itself; auto: on "    \
            "with one GPU, off with a group, whose sums no card has recorded yet. The same "       \
            "tokens. A CPU and a prefill node record nothing."),                                   \
        NODE_CHOICE(                                                                               \
            T, M, lookahead, "lookahead", "off", node_switch_names,                                \
            "on: a step is asked of the GPU before the host has seen the tokens of the one "       \
            "before, which it draws itself (sample=device), on one GPU; where that can't be "      \
            "the start is refused. off: one after the other. The same tokens. A prefill node "     \
            "makes no steps."),                                                                    \
        NODE_CHOICE(                                                                               \
            T, M, early_launches, "early-launches", "off", node_switch_names,                      \
            "on: a kernel of a GPU begins while the one in front of it ends, and waits for it "    \
            "on the card; off: one after the other. The same tokens. A CPU has no kernels."),      \
        NODE_OPTION(T, M, OPT_INT, threads, "threads", "N", "0", 0, 1024,                          \
                    "Threads of the CPU backend; 0: one per core."),                               \
        NODE_OPTION(T, M, OPT_INT, max_sequences, "max-sequences", "N", "16", 1, 65536,            \
                    "Sequences that may hold KV at once (window and state slots)."),               \
        NODE_OPTION(T, M, OPT_INT, pages, "pages", "N", "256", 1, 16777216,                        \
                    "Pages of 256 tokens in the KV pool."),                                        \
        NODE_OPTION(T, M, OPT_INT, max_context_tokens, "max-context", "TOKENS", "0", 0, 1048576,   \
                    "Longest prompt plus answer; 0: what model and pool allow."),                  \
        NODE_OPTION(T, M, OPT_INT, chunk_tokens, "chunk", "TOKENS", "0", 0, 65536,                 \
                    "Most prompt tokens computed at once; 0: the engine's default."),              \
        NODE_OPTION(                                                                               \
            T, M, OPT_SIZE, memory_limit, "memory-limit", "BYTES", "0", 0, 0,                      \
            "Most host memory that the sum at start may come to; 0: what host, control group and " \
            "ulimit leave."),                                                                      \
        NODE_OPTION(T, M, OPT_REAL, sim_prefill_tokens_per_s, "sim-prefill-speed", "TOKENS/S",     \
                    "50000", 0, 1000000000, "sim: prompt tokens a second; 0: at once."),           \
        NODE_OPTION(T, M, OPT_REAL, sim_step_ms, "sim-step", "MS", "10", 0, 60000,                 \
                    "sim: milliseconds of a decode step."),                                        \
        NODE_OPTION(T, M, OPT_SIZE, sim_page_bytes, "sim-page-bytes", "BYTES", "901120", 4096,     \
                    1073741824, "sim: size of a page; V4-Flash's by default."),                    \
        NODE_OPTION(T, M, OPT_SIZE, sim_tail_bytes, "sim-tail-bytes", "BYTES", "4412416", 8,       \
                    1073741824, "sim: size of a tail; V4-Flash's largest by default."),            \
        NODE_OPTION(T, M, OPT_INT, sim_vocab_size, "sim-vocab", "N", "129280", 128, 1048576,       \
                    "sim: size of the vocabulary."),                                               \
        NODE_OPTION(                                                                               \
            T, M, OPT_STRING, script, "script", "FILE", NULL, 0, 0,                                \
            "sim: play outputs from this file of JSON lines (scripts/sim-script makes one)."),     \
        {.kind = OPT_GROUP, .name = "KV transport"},                                               \
        NODE_CHOICE(                                                                               \
            T, M, kv_buffer_device, "kv-buffer-device", "cpu", node_kv_buffer_names,               \
            "Memory that KV is handed over in. cpu: a GPU's passes pinned host memory at either "  \
            "end. cuda: it leaves from and lands in the GPU's memory, for which UCX must have "    \
            "been built with CUDA; a start that can't is refused. auto: cuda if UCX reaches that " \
            "memory and a put to ourselves at start comes out right, else cpu, with the reason "   \
            "in the log; a prefill node then serves both kinds. Not yet run on a card."),          \
        NODE_OPTION(T, M, OPT_STRING, ucx_tls, "ucx-tls", "LIST", NULL, 0, 0,                      \
                    "UCX transports; default: UCX's own choice."),                                 \
        NODE_OPTION(T, M, OPT_STRING, ucx_net_devices, "ucx-net-devices", "LIST", NULL, 0, 0,      \
                    "UCX network devices."),                                                       \
        NODE_OPTION(T, M, OPT_STRING, ucx_tcp_port_range, "ucx-tcp-ports", "LOW-HIGH", NULL, 0, 0, \
                    "Ports that UCX's tcp transport may bind."),                                   \
        NODE_OPTION(T, M, OPT_BOOL, allow_slow_transport, "allow-slow-transport", NULL, "no", 0,   \
                    0, "Accept a peer on this host that can be reached by tcp only."),             \
        {.kind = OPT_GROUP, .name = "Process"},                                                    \
        NODE_OPTION(T, M, OPT_DURATION, grace_ns, "grace", "TIME", "30s", 0, 3600000000000,        \
                    "Time that running work gets after the first SIGTERM."),                       \
        NODE_OPTION(T, M, OPT_DURATION, lease_ns, "lease", "TIME", "1500ms", 100000000,            \
                    60000000000, "Silence after which a peer counts as dead."),                    \
        NODE_CHOICE(T, M, log_level, "log-level", "info", log_level_names, "What is logged."),     \
        NODE_OPTION(T, M, OPT_BOOL, log_json, "log-json", NULL, "no", 0, 0,                        \
                    "Log JSON objects instead of text."),                                          \
        NODE_OPTION(T, M, OPT_BOOL, die_with_parent, "die-with-parent", NULL, "no", 0, 0,          \
                    "End when the parent process ends.")
/* clang-format on */

#endif
