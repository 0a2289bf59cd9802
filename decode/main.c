/* baton-decode: options and wiring. What it does is in decode/DESIGN.md. */
#include <stdio.h>

#include "base/buf.h"
#include "base/fault.h"
#include "base/json.h"
#include "base/log.h"
#include "decode/service.h"
#include "engine/profile.h"

struct options {
    struct node_options node;
    int64_t landing_slots, max_queued, max_transfers, slots_a_transfer, workers;
    double prefill_share;
    char *profile_step, *rank;
    bool json;
};

/* clang-format off */
static const struct opt_spec specs[] = {
    NODE_OPTION_SPECS(struct options, node),
    {.kind = OPT_GROUP, .name = "Decode"},
    {.kind = OPT_INT, .name = "landing-slots", .value = "N", .initial = "32", .min = 1, .max = 65536,
     .offset = offsetof(struct options, landing_slots),
     .help = "Slots of one page each that prefill nodes may write to."},
    {.kind = OPT_INT, .name = "slots-per-transfer", .value = "N", .initial = "16", .min = 1, .max = 4096,
     .offset = offsetof(struct options, slots_a_transfer),
     .help = "Most landing slots granted to one transfer at once."},
    {.kind = OPT_INT, .name = "queue", .value = "N", .initial = "64", .min = 1, .max = 1048576,
     .offset = offsetof(struct options, max_queued),
     .help = "Requests that may wait to start; further ones are refused."},
    {.kind = OPT_INT, .name = "max-transfers", .value = "N", .initial = "64", .min = 1, .max = 65536,
     .offset = offsetof(struct options, max_transfers),
     .help = "Transfers that may be open at once, those waiting in a prefill node's queue included."},
    {.kind = OPT_REAL, .name = "prefill-share", .value = "SHARE", .initial = "0.5", .min = 0, .max = 1,
     .offset = offsetof(struct options, prefill_share),
     .help = "Most of the compute time that local prefill may take while samples generate."},
    {.kind = OPT_INT, .name = "accept-threads", .value = "N", .initial = "2", .min = 1, .max = 64,
     .offset = offsetof(struct options, workers),
     .help = "Threads that copy parcels out of the landing area and check them."},
    {.kind = OPT_GROUP, .name = "Instead of serving"},
    {.kind = OPT_STRING, .name = "profile-step", .value = "BATCH,CONTEXT",
     .offset = offsetof(struct options, profile_step),
     .help = "Run decode steps of BATCH rows whose sequences hold CONTEXT tokens, print for each operation "
             "launches, microseconds, share of the step, bytes, share of its floors and what bounds it, and "
             "exit. The floors are measured in the same run. The sequences bring pages and slots of their "
             "own: --pages and --max-sequences do not count."},
    {.kind = OPT_STRING, .name = "rank", .value = "K/N", .offset = offsetof(struct options, rank),
     .help = "With --profile-step: --device is rank K of a group of N whose others are missing. It takes its share "
             "of the weights and sums its own part alone, so what is computed means nothing, and what it costs is "
             "what such a rank costs without the exchange."},
    {.kind = OPT_BOOL, .name = "json", .offset = offsetof(struct options, json),
     .help = "Print the profile as one JSON object."},
};
/* clang-format on */

static const struct opt_program program = {
    .name = "baton-decode",
    .version = "0.1.0",
    .summary = "generates tokens from KV that prefill nodes hand over, or that it prefills itself",
    .description =
        "A decode node joins the routers it is told of, takes requests from them, has a prefill "
        "node compute the prompt (or computes it itself between two steps), and streams tokens "
        "back. What a prefill node sends lands in slots that nothing is ever decoded from: it is "
        "copied into the page pool, and the checksum is taken over the copy.\n\n"
        "A router and one decode node are a complete server.\n\n"
        "Memory. At start the node logs what it is going to take, item by item: weights, scratch, "
        "rows of a call (--chunk), sequence slots (--max-sequences), logits, pages (--pages), "
        "landing slots (--landing-slots). "
        "If the sum is more than is there (on the GPU; on the host, in its control group and "
        "under its ulimits; under --memory-limit) it ends before it allocates, and says by how "
        "much and which options would make it fit.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
};

/* --profile-step: the exit code. */
static int profile_step(const struct options *options)
{
    struct engine_options engine;
    struct engine_profile_request request;
    struct engine_profile profile;
    struct error err = {""};
    node_engine_options(&options->node, &engine);
    engine.rank = options->rank;
    if (engine_profile_parse(options->profile_step, &request, &err)) {
        fprintf(stderr, "%s: %s\n", program.name, err.text);
        return 2;
    }
    if (!engine.model_dir && options->node.engine == 0) {
        fprintf(stderr, "%s: --profile-step needs --model DIR\n", program.name);
        return 2;
    }
    if (engine_profile_run(&engine, &request, &profile, &err)) {
        log_error("decode", "%s", err.text);
        return 1;
    }
    if (options->json) {
        struct buf out = BUF_INIT;
        struct json_writer w;
        json_writer_init(&w, &out);
        engine_profile_json(&profile, &w);
        printf("%.*s\n", (int)out.bytes, (const char *)out.data);
        buf_fini(&out);
    } else {
        engine_profile_print(&profile, stdout);
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct options options;
    struct error err = {""};
    struct node *node;
    struct decode *decode = NULL;
    service_init();
    FAULT_START(&argc, argv);
    opts_parse_or_exit(&program, argc, argv, &options);
    log_init((enum log_level)options.node.log_level, options.node.log_json, NULL);
    int code;
    if (node_options_answered(&options.node, program.name, &code)) {
        opts_free(&program, &options);
        return code;
    }
    if (options.profile_step) {
        code = profile_step(&options);
        opts_free(&program, &options);
        return code;
    }
    if (options.rank) {
        fprintf(stderr, "%s: --rank is for --profile-step: a rank alone serves nobody\n",
                program.name);
        opts_free(&program, &options);
        return 2;
    }
    struct node_config config = {
        .name = program.name,
        .role = BATON__ROLE__ROLE_DECODE,
        .options = &options.node,
        .max_queued = (uint32_t)options.max_queued,
        .ops = &decode_node_ops,
        .cookie = &decode,
        .memory = {"landing slots", "--landing-slots", (uint32_t)options.landing_slots, false},
    };
    if (node_open(&config, &node, &err)) {
        log_error("decode", "%s", err.text);
        opts_free(&program, &options);
        return 1;
    }
    struct decode_options decode_options = {
        .landing_slots = (uint32_t)options.landing_slots,
        .max_queued = (uint32_t)options.max_queued,
        .max_transfers = (uint32_t)options.max_transfers,
        .max_slots_a_transfer = (uint32_t)options.slots_a_transfer,
        .n_workers = (uint32_t)options.workers,
        .prefill_share = options.prefill_share,
    };
    code = 1;
    if (decode_create(node, &decode_options, &decode, &err)) {
        log_error("decode", "%s", err.text);
    } else {
        code = node_run(node);
    }
    decode_free(decode);
    node_close(node);
    opts_free(&program, &options);
    return code;
}
