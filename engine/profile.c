/* See profile.h. Steps of sequences that hold real KV: one is prefilled, and its pages are copied
 * for the others up to the context asked for, so that a long context costs memory and no hours.
 * Copies repeat themselves every 256 tokens; which entries are chosen is not what is measured here.
 */
#include "engine/profile.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/hostmem.h"
#include "base/json.h"
#include "base/loop.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "engine/memory.h"
#include "engine/profile_table.h"

enum {
    WARM_STEPS = 2,
    MIN_STEPS = 5,
    MAX_STEPS = 64,
    N_RUNS = 3, /* of steps: in parts, and whole both ways */
    SPARE_TOKENS = N_RUNS * (WARM_STEPS + MAX_STEPS) + 1,
    PAGE_TOKENS = 256,
    MAX_BATCH = 1024,
    MAX_CONTEXT = 1 << 20
};
static const double ENOUGH_S = 1.0;       /* of measured steps */
static const double EXPLAINS = 0.25;      /* a floor that is less of the time is no bound */
static const uint64_t TOKEN_SEED = 20260; /* any: the prompt's tokens must only differ */

enum status engine_profile_parse(const char *text, struct engine_profile_request *ret_request,
                                 struct error *err)
{
    char *comma = NULL, *end = NULL;
    unsigned long batch = text[0] >= '1' && text[0] <= '9' ? strtoul(text, &comma, 10) : 0;
    unsigned long context = 0;
    if (batch && *comma == ',' && comma[1] >= '1' && comma[1] <= '9') {
        context = strtoul(comma + 1, &end, 10);
    }
    if (!context || *end || batch > MAX_BATCH || context > MAX_CONTEXT) {
        return error_set(err, STATUS_INVALID,
                         "--profile-step %.40s: it is BATCH,CONTEXT: 1 to %d rows of sequences of "
                         "1 to %d tokens",
                         text, MAX_BATCH, MAX_CONTEXT);
    }
    *ret_request =
        (struct engine_profile_request){.batch = (uint32_t)batch, .context = (uint32_t)context};
    return STATUS_OK;
}

/* --- the sequences */

struct bench {
    struct engine *engine;
    const struct engine_info *info;
    struct engine_seq *pattern; /* prefilled */
    struct engine_row *rows;
    uint32_t batch, context, n_pattern; /* tokens of the pattern */
};

/* How long the pattern must be for a sequence of `context` tokens to be made of its pages and its
 * tail: the same tail, and a full page if the context has one. */
static uint32_t pattern_tokens(const struct engine *engine, uint32_t context)
{
    uint32_t n = PAGE_TOKENS + context % PAGE_TOKENS;
    bool is_long = context >= 2 * PAGE_TOKENS &&
                   engine_tail_bytes(engine, n) == engine_tail_bytes(engine, context);
    return is_long ? n : context;
}

static enum status make_pattern(struct bench *b, struct error *err)
{
    b->n_pattern = pattern_tokens(b->engine, b->context);
    enum status status = engine_seq_create(b->engine, 1, &b->pattern);
    if (!status) {
        status = engine_seq_reserve(b->pattern, b->n_pattern);
    }
    uint64_t random = TOKEN_SEED;
    uint32_t *ids = mem_array(b->n_pattern, sizeof(*ids));
    for (uint32_t i = 0; i < b->n_pattern; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        ids[i] = (uint32_t)((random >> 33) % b->info->vocab_size);
    }
    for (uint32_t at = 0; at < b->n_pattern && !status;) {
        uint32_t rest = b->n_pattern - at, most = b->info->max_chunk_tokens;
        uint32_t n = rest < most ? rest : most;
        status = engine_prefill(b->engine, b->pattern, ids + at, n, NULL, NULL, NULL);
        at += n;
    }
    mem_free(ids);
    return status ? error_set(err, status, "the prompt before the step failed: %s",
                              status_name(status))
                  : STATUS_OK;
}

static enum status make_row(struct bench *b, uint32_t row_i, const void *tail, size_t tail_bytes)
{
    struct engine_row *row = &b->rows[row_i];
    enum status status = engine_seq_create(b->engine, row_i + 2, &row->seq);
    if (!status) {
        status = engine_seq_reserve(row->seq, b->context + SPARE_TOKENS);
    }
    uint32_t n_full = b->context / PAGE_TOKENS, n_pages = engine_pages_for(b->engine, b->context);
    for (uint32_t i = 0; i < n_pages && !status; i++) {
        uint32_t from = b->n_pattern == b->context ? i : (i < n_full ? 0 : 1);
        status = engine_page_copy(b->engine, engine_seq_page(row->seq, i),
                                  engine_seq_page(b->pattern, from));
    }
    return status ? status : engine_tail_read(b->engine, row->seq, b->context, tail, tail_bytes);
}

static enum status make_rows(struct bench *b, const struct engine_sampling *greedy,
                             struct error *err)
{
    size_t tail_bytes = engine_tail_bytes(b->engine, b->n_pattern);
    void *tail = mem_zalloc(tail_bytes);
    enum status status = engine_tail_write(b->engine, b->pattern, tail, tail_bytes);
    for (uint32_t i = 0; i < b->batch && !status; i++) {
        status = make_row(b, i, tail, tail_bytes);
        b->rows[i].sampling = greedy;
        b->rows[i].token = i % b->info->vocab_size;
    }
    mem_free(tail);
    return status ? error_set(err, status,
                              "no sequences of %" PRIu32 " tokens and %d more for the steps: the "
                              "longest here is %" PRIu32,
                              b->context, SPARE_TOKENS, b->info->max_context_tokens)
                  : STATUS_OK;
}

/* --- the steps */

static double now_s(void)
{
    return (double)loop_now_ns() * 1e-9;
}

/* in_parts: each operation between two marks, into the table's cells. */
static enum status run_steps(struct bench *b, bool in_parts, uint32_t *ret_n, double *ret_s,
                             struct error *err)
{
    double sum_s = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < WARM_STEPS + MAX_STEPS; i++) {
        if (i == WARM_STEPS && in_parts) {
            profile_table_reset();
        }
        double begin_s = now_s();
        enum status status = engine_step(b->engine, b->rows, b->batch);
        double step_s = now_s() - begin_s;
        if (status) {
            return error_set(err, status, "a step failed: %s", status_name(status));
        }
        profile_table_collect();
        for (uint32_t k = 0; k < b->batch; k++) {
            b->rows[k].token = b->rows[k].draw.id;
        }
        if (i >= WARM_STEPS) {
            sum_s += step_s;
            n++;
        }
        if (n >= MIN_STEPS && sum_s >= ENOUGH_S) {
            break;
        }
    }
    *ret_n = n;
    *ret_s = sum_s;
    return STATUS_OK;
}

/* All runs: in parts, which the marks between the operations make longer; then, where steps are
 * recorded, as they are served without recordings and with them. */
static enum status run_all(struct bench *b, struct engine_profile *p, double *ret_sum_s,
                           struct error *err)
{
    struct engine_graphs graphs;
    double whole_s[2];
    engine_graphs_report(b->engine, &graphs);
    engine_graphs_use(b->engine, false);
    enum status status = run_steps(b, true, &p->n_steps, ret_sum_s, err);
    profile_table_pause();
    for (int by_graph = 0; by_graph < 2 && !status && graphs.n; by_graph++) {
        uint32_t n = 0;
        engine_graphs_use(b->engine, by_graph);
        status = run_steps(b, false, &n, &whole_s[by_graph], err);
        whole_s[by_graph] /= n ? n : 1;
    }
    if (!status && graphs.n) {
        p->graph_kernels = graphs.n_launches;
        p->whole_us = whole_s[0] * 1e6;
        p->graph_us = whole_s[1] * 1e6;
    }
    return status;
}

static void name_bound(struct engine_profile_line *line, double launch_share)
{
    double most = line->byte_share;
    line->bound = "bandwidth";
    if (line->tensor_share > most) {
        most = line->tensor_share;
        line->bound = "tensor";
    }
    if (launch_share > most) {
        most = launch_share;
        line->bound = "launches";
    }
    if (most < EXPLAINS) {
        line->bound = "latency";
    }
}

static int longest_first(const void *a, const void *b)
{
    double x = ((const struct engine_profile_line *)a)->us;
    double y = ((const struct engine_profile_line *)b)->us;
    return x < y ? 1 : (x > y ? -1 : 0);
}

static void sum_up(struct engine_profile *p, double sum_s, const struct ops_rates *rates)
{
    const struct profile_cell *cells = profile_table_cells();
    double n = p->n_steps, inside_us = 0;
    p->step_us = sum_s / n * 1e6;
    p->read_bytes_per_s = rates->read_bytes_per_s;
    p->multiply_adds_per_s = rates->multiply_adds_per_s;
    p->launch_us = rates->launch_s * 1e6;
    for (int i = 0; i < PROFILE_N_CELLS; i++) {
        const struct profile_cell *cell = &cells[i];
        if (cell->n_calls == 0) {
            continue;
        }
        struct engine_profile_line *line = &p->lines[p->n_lines++];
        double s = cell->s > 0 ? cell->s : 1e-12;
        line->operation = cell->operation;
        line->launches = (double)cell->n_launches / n;
        line->us = cell->s / n * 1e6;
        line->share = cell->s / sum_s;
        line->bytes = cell->bytes / n;
        line->byte_share = cell->bytes / rates->read_bytes_per_s / s;
        line->tensor_share = cell->multiply_adds / rates->multiply_adds_per_s / s;
        name_bound(line, (double)cell->n_launches * rates->launch_s / s);
        inside_us += line->us;
        p->bytes += line->bytes;
    }
    p->other_us = p->step_us - inside_us;
    qsort(p->lines, p->n_lines, sizeof(p->lines[0]), longest_first);
}

static enum status open_bench(struct bench *b, const struct engine_options *options,
                              struct error *err)
{
    struct engine_options own = *options;
    struct engine_memory memory;
    struct hostmem host;
    uint32_t wanted = b->context + SPARE_TOKENS;
    uint32_t pages_each = (wanted + PAGE_TOKENS - 1) / PAGE_TOKENS;
    own.max_sequences = b->batch + 1;
    own.max_batch_rows = b->batch;
    own.n_pages = (b->batch + 1) * pages_each;
    own.max_context_tokens = own.max_context_tokens > wanted ? own.max_context_tokens : wanted;
    enum status status = engine_memory_plan(&own, &memory, err);
    for (uint32_t i = 0; i < memory.n_items && !status; i++) {
        memory.items[i].least = memory.items[i].n; /* the request counts them */
    }
    if (!status) {
        hostmem_read(&host);
        status = engine_memory_check(&memory, host.free_bytes, host.limit, err);
    }
    if (!status) {
        status = engine_open(&own, NULL, &b->engine, err);
    }
    if (!status) {
        b->info = engine_info(b->engine);
    }
    return status;
}

enum status engine_profile_run(const struct engine_options *options,
                               const struct engine_profile_request *request,
                               struct engine_profile *ret_profile, struct error *err)
{
    struct bench b = {.batch = request->batch, .context = request->context};
    struct engine_profile p = {.batch = request->batch, .context = request->context};
    const struct engine_sampling greedy = {.temperature = 0, .top_p = 1};
    struct ops_rates rates;
    double sum_s = 0;
    if (strcmp(options->kind, "model") != 0) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "the %s engine has no kernels to profile: say --model DIR", options->kind);
    }
    profile_table_begin(request->alter);
    b.rows = mem_array(b.batch, sizeof(*b.rows));
    enum status status = open_bench(&b, options, err);
    if (!status) {
        status = make_pattern(&b, err);
    }
    if (!status) {
        status = make_rows(&b, &greedy, err);
    }
    if (!status) {
        status = profile_table_rates(&rates, err);
    }
    if (!status) {
        status = run_all(&b, &p, &sum_s, err);
    }
    if (!status) {
        snprintf(p.device, sizeof(p.device), "%s", b.info->device_name);
        snprintf(p.model, sizeof(p.model), "%s", b.info->model_name);
        sum_up(&p, sum_s, &rates);
        *ret_profile = p;
    }
    profile_table_end();
    for (uint32_t i = 0; i < b.batch; i++) {
        engine_seq_free(b.rows[i].seq);
    }
    engine_seq_free(b.pattern);
    engine_close(b.engine);
    profile_table_free();
    mem_free(b.rows);
    return status;
}

/* --- printing */

void engine_profile_print(const struct engine_profile *p, FILE *out)
{
    double floor_us = p->bytes / p->read_bytes_per_s * 1e6;
    const struct engine_profile_line *worst = &p->lines[0];
    fprintf(out,
            "%s on %s: a step of %" PRIu32 " rows at %" PRIu32 " tokens, mean of %" PRIu32 "\n",
            p->model, p->device, p->batch, p->context, p->n_steps);
    fprintf(
        out,
        "floors of this run: reads %.1f GB/s, %.1f G multiply-adds/s, an empty launch %.1f us\n",
        p->read_bytes_per_s * 1e-9, p->multiply_adds_per_s * 1e-9, p->launch_us);
    fprintf(out, "%-10s %8s %12s %7s %14s %11s %7s  %s\n", "operation", "launches", "us", "share",
            "bytes", "byte floor", "tensor", "bound");
    for (uint32_t i = 0; i < p->n_lines; i++) {
        const struct engine_profile_line *l = &p->lines[i];
        fprintf(out, "%-10s %8.0f %12.1f %6.1f%% %14.0f %10.1f%% %6.1f%%  %s\n", l->operation,
                l->launches, l->us, 100 * l->share, l->bytes, 100 * l->byte_share,
                100 * l->tensor_share, l->bound);
    }
    fprintf(out, "%-10s %8s %12.1f %6.1f%%\n", "other", "", p->other_us,
            100 * p->other_us / p->step_us);
    fprintf(out, "%-10s %8s %12.1f %6.1f%% %14.0f %10.1f%%\n", "step", "", p->step_us, 100.0,
            p->bytes, 100 * floor_us / p->step_us);
    if (p->graph_kernels) {
        fprintf(out,
                "without marks a step takes %.1f us; by graph, 1 launch of %" PRIu32 " kernels, "
                "%.1f us\n",
                p->whole_us, p->graph_kernels, p->graph_us);
    }
    fprintf(out, "%s takes %.0f%% of the step at %.1f%% of its byte floor; its bound: %s\n",
            worst->operation, 100 * worst->share, 100 * worst->byte_share, worst->bound);
}

static void pair_real(struct json_writer *w, const char *key, double value)
{
    json_key(w, key);
    json_put_real(w, value);
}

void engine_profile_json(const struct engine_profile *p, struct json_writer *w)
{
    json_begin_object(w);
    json_pair_string(w, "model", p->model);
    json_pair_string(w, "device", p->device);
    json_pair_int(w, "batch", p->batch);
    json_pair_int(w, "context", p->context);
    json_pair_int(w, "steps", p->n_steps);
    pair_real(w, "step_us", p->step_us);
    pair_real(w, "other_us", p->other_us);
    if (p->graph_kernels) {
        pair_real(w, "whole_us", p->whole_us);
        pair_real(w, "graph_us", p->graph_us);
        json_pair_int(w, "graph_launches", 1);
        json_pair_int(w, "graph_kernels", p->graph_kernels);
    }
    pair_real(w, "bytes", p->bytes);
    pair_real(w, "byte_floor_share", p->bytes / p->read_bytes_per_s * 1e6 / p->step_us);
    pair_real(w, "read_bytes_per_s", p->read_bytes_per_s);
    pair_real(w, "multiply_adds_per_s", p->multiply_adds_per_s);
    pair_real(w, "launch_us", p->launch_us);
    json_key(w, "operations");
    json_begin_array(w);
    for (uint32_t i = 0; i < p->n_lines; i++) {
        const struct engine_profile_line *l = &p->lines[i];
        json_begin_object(w);
        json_pair_string(w, "operation", l->operation);
        pair_real(w, "launches", l->launches);
        pair_real(w, "us", l->us);
        pair_real(w, "share", l->share);
        pair_real(w, "bytes", l->bytes);
        pair_real(w, "byte_floor_share", l->byte_share);
        pair_real(w, "tensor_share", l->tensor_share);
        json_pair_string(w, "bound", l->bound);
        json_end_object(w);
    }
    json_end_array(w);
    json_end_object(w);
}
