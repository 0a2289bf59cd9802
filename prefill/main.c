/* baton-prefill: options and wiring. What it does is in prefill/DESIGN.md. */
#include <stdio.h>

#include "base/fault.h"
#include "base/log.h"
#include "prefill/service.h"

struct options {
    struct node_options node;
    int64_t max_queued, tails, workers, pieces;
};

/* clang-format off */
static const struct opt_spec specs[] = {
    NODE_OPTION_SPECS(struct options, node),
    {.kind = OPT_GROUP, .name = "Prefill"},
    {.kind = OPT_INT, .name = "queue", .value = "N", .initial = "64", .min = 1, .max = 1048576,
     .offset = offsetof(struct options, max_queued),
     .help = "Transfers that may wait to start; further ones are refused."},
    {.kind = OPT_INT, .name = "tail-buffers", .value = "N", .initial = "16", .min = 1, .max = 256,
     .offset = offsetof(struct options, tails),
     .help = "Send buffers for tails, and so the most transfers that compute and send at once."},
    {.kind = OPT_INT, .name = "checksum-threads", .value = "N", .initial = "2", .min = 1, .max = 64,
     .offset = offsetof(struct options, workers), .help = "Threads that sum parcels."},
    {.kind = OPT_INT, .name = "last-chunk-pieces", .value = "N", .initial = "0", .min = 0, .max = 8,
     .offset = offsetof(struct options, pieces),
     .help = "Pieces that the pages of a prompt's last chunk leave in, while its layers compute; 0: as many as "
             "pay, by the preflight's numbers."},
};
/* clang-format on */

static const struct opt_program program = {
    .name = "baton-prefill",
    .version = "0.1.0",
    .summary = "computes prompts and hands their KV to decode nodes",
    .description =
        "A prefill node joins the routers it is told of. Decode nodes link to it, and it computes "
        "the prompts that they send, in chunks; while the next chunk computes, the finished pages "
        "are put into the landing area of the decode node by UCX.\n\n"
        "Memory. At start the node logs what it is going to take, item by item: weights, scratch, "
        "rows of a call (--chunk), sequence slots (--max-sequences), logits, pages (--pages), tail "
        "buffers (--tail-buffers). "
        "If the sum is more than is there (on the GPU; on the host, in its control group and "
        "under its ulimits; under --memory-limit) it ends before it allocates, and says by how "
        "much and which options would make it fit.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
};

int main(int argc, char **argv)
{
    struct options options;
    struct error err = {""};
    struct node *node;
    struct prefill *prefill = NULL;
    service_init();
    FAULT_START(&argc, argv);
    opts_parse_or_exit(&program, argc, argv, &options);
    log_init((enum log_level)options.node.log_level, options.node.log_json, NULL);
    int code;
    if (node_options_answered(&options.node, program.name, &code)) {
        opts_free(&program, &options);
        return code;
    }
    struct node_config config = {
        .name = program.name,
        .role = BATON__ROLE__ROLE_PREFILL,
        .options = &options.node,
        .max_queued = (uint32_t)options.max_queued,
        .ops = &prefill_node_ops,
        .cookie = &prefill,
        .memory = {"tail buffers", "--tail-buffers", (uint32_t)options.tails, true},
    };
    if (node_open(&config, &node, &err)) {
        log_error("prefill", "%s", err.text);
        opts_free(&program, &options);
        return 1;
    }
    struct prefill_options prefill_options = {
        .max_queued = (uint32_t)options.max_queued,
        .n_tails = (uint32_t)options.tails,
        .n_workers = (uint32_t)options.workers,
        .n_pieces = (uint32_t)options.pieces,
    };
    code = 1;
    if (prefill_create(node, &prefill_options, &prefill, &err)) {
        log_error("prefill", "%s", err.text);
    } else {
        code = node_run(node);
    }
    prefill_free(prefill);
    node_close(node);
    opts_free(&program, &options);
    return code;
}
