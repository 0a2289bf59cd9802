/* See model_load.h. The one place that knows both how a checkpoint names things (model/weights.h)
 * and what an operation wants (kernels/ops.h).
 *
 * Shares: heads and their output groups, experts, and rows of the vocabulary are divided; the
 * low-rank forms, the one key-value head, compressors, indexer and routing are whole on each rank.
 * The shared expert is rank 0's.
 */
#include "engine/model_load.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "engine/kernels.h"
#include "engine/profile.h"
#include "model/weights.h"

/* One rank being loaded; the first failure sticks and the rest of the layer is skipped. */
struct loader {
    const struct ops *ops;
    struct forward_rank *rank;
    const struct model_config *config;
    bool shares;    /* of a group */
    bool is_plan;   /* weights have no data, and what is asked for is only counted */
    bool is_hashed; /* this layer's gate looks experts up */
    enum status status;
    struct error *err;
};

static void fail(struct loader *l, enum status status, const char *what)
{
    if (!l->status) {
        l->status = error_set(l->err, status, "no memory for %s", what);
    }
}

static const void *copy(struct loader *l, const void *data, size_t bytes, const char *what)
{
    if ((!data && !l->is_plan) || l->status) {
        return NULL;
    }
    const void *memory = l->ops->upload(l->rank->device, data, bytes);
    if (!memory) {
        fail(l, STATUS_EXHAUSTED, what);
    }
    return memory;
}

static const float *vector(struct loader *l, const float *values, size_t n, const char *what)
{
    return copy(l, values, n * sizeof(float), what);
}

static struct ops_source source_of(const struct weight *w)
{
    static const enum ops_format formats[] = {[WEIGHT_F32] = OPS_F32,
                                              [WEIGHT_BF16] = OPS_BF16,
                                              [WEIGHT_FP8_BLOCK] = OPS_FP8_BLOCK,
                                              [WEIGHT_MXFP4] = OPS_MXFP4,
                                              [WEIGHT_NVFP4] = OPS_NVFP4};
    static const enum ops_scale scales[] = {[WEIGHT_SCALE_NONE] = OPS_SCALE_NONE,
                                            [WEIGHT_SCALE_E8M0] = OPS_SCALE_E8M0,
                                            [WEIGHT_SCALE_F32] = OPS_SCALE_F32,
                                            [WEIGHT_SCALE_E4M3] = OPS_SCALE_E4M3};
    return (struct ops_source){.format = formats[w->format],
                               .rows = w->rows,
                               .cols = w->cols,
                               .row_bytes = w->row_bytes,
                               .data = w->data,
                               .scale_format = scales[w->scale_format],
                               .block_rows = w->block_rows ? w->block_rows : 1,
                               .block_cols = w->block_cols ? w->block_cols : 1,
                               .scale_cols = w->scale_cols,
                               .scale = w->scale,
                               .global_scale = w->global_scale,
                               .made = w->made,
                               .made_scale = w->made_scale};
}

static struct ops_matrix pack(struct loader *l, const struct ops_source *source, const char *what)
{
    struct ops_matrix matrix = {0};
    if (!l->status) {
        enum status status = l->ops->pack(l->rank->device, source, &matrix);
        if (status) {
            fail(l, status, what);
        }
    }
    return matrix;
}

static struct ops_matrix whole(struct loader *l, const struct weight *w)
{
    struct ops_source source = source_of(w);
    return pack(l, &source, w->name);
}

/* Rows [first, first + n); plain: its inputs are never quantised. */
static struct ops_matrix some_rows(struct loader *l, const struct weight *w, uint32_t first,
                                   uint32_t n, bool plain)
{
    struct ops_source source = source_of(w);
    source.row_first = first;
    source.rows = n;
    source.plain_inputs = plain;
    return pack(l, &source, w->name);
}

static struct ops_matrix plain(struct loader *l, const struct weight *w)
{
    return some_rows(l, w, 0, w->rows, true);
}

static struct ops_hc hc_of(struct loader *l, const struct weights_hc *w, uint32_t rows)
{
    uint32_t cols = OPS_HC * l->config->hidden_size;
    struct ops_source source = {.format = OPS_F32,
                                .rows = rows,
                                .cols = cols,
                                .row_bytes = (size_t)cols * sizeof(float),
                                .data = w->fn,
                                .block_rows = 1,
                                .block_cols = 1,
                                .global_scale = 1.0f};
    return (struct ops_hc){.fn = pack(l, &source, "hyper-connections"),
                           .base = vector(l, w->base, rows, "hyper-connections"),
                           .scale =
                               vector(l, w->scale, rows == OPS_HC ? 1 : 3, "hyper-connections")};
}

static struct ops_compressor compressor_of(struct loader *l, const struct weights_compressor *w,
                                           uint32_t ratio, uint32_t d)
{
    uint32_t width = (ratio == OPS_SPARSE_RATIO ? 2 : 1) * d;
    return (struct ops_compressor){.wkv = plain(l, &w->wkv),
                                   .wgate = plain(l, &w->wgate),
                                   .ape = vector(l, w->ape, (size_t)ratio * width, "a compressor"),
                                   .norm = vector(l, w->norm, d, "a compressor")};
}

static struct ops_expert expert_of(struct loader *l, const struct weights_expert *w)
{
    return (struct ops_expert){
        .w1 = whole(l, &w->w1), .w3 = whole(l, &w->w3), .w2 = whole(l, &w->w2)};
}

static void load_attention(struct loader *l, const struct weights_layer *w, uint32_t rank_i,
                           struct ops_layer *ret)
{
    const struct model_config *c = l->config;
    const struct ops_dims *d = &l->rank->dims;
    uint32_t head_first = rank_i * d->n_heads, group_first = rank_i * d->o_groups;
    ret->attn_sink =
        vector(l, w->attn_sink ? w->attn_sink + head_first : NULL, d->n_heads, "sinks");
    ret->q_norm = vector(l, w->q_norm, c->q_lora_rank, "norms");
    ret->kv_norm = vector(l, w->kv_norm, c->head_dim, "norms");
    ret->wq_a = whole(l, &w->wq_a);
    ret->wkv = whole(l, &w->wkv);
    ret->wq_b = some_rows(l, &w->wq_b, head_first * c->head_dim, d->n_heads * c->head_dim, false);
    struct ops_matrix *groups = mem_array(d->o_groups, sizeof(*groups));
    ret->wo_a = groups;
    for (uint32_t g = 0; g < d->o_groups; g++) {
        groups[g] =
            some_rows(l, &w->wo_a, (group_first + g) * c->o_lora_rank, c->o_lora_rank, true);
    }
    struct ops_source wo_b = source_of(&w->wo_b);
    wo_b.col_first = group_first * c->o_lora_rank;
    wo_b.cols = d->o_groups * c->o_lora_rank;
    ret->wo_b = pack(l, &wo_b, w->wo_b.name);
    if (l->shares && ret->wo_b.quant_input && wo_b.cols % FORMATS_INPUT_GROUP) {
        l->status = error_set(l->err, STATUS_INVALID,
                              "a group of this size would cut wo_b's inputs into %" PRIu32
                              " columns, which is no multiple of its scales' %d",
                              wo_b.cols, FORMATS_INPUT_GROUP);
    }
    if (ret->place.ratio) {
        ret->compressor = compressor_of(l, &w->compressor, ret->place.ratio, c->head_dim);
    }
    if (ret->place.ratio == OPS_SPARSE_RATIO) {
        ret->index_compressor =
            compressor_of(l, &w->index_compressor, ret->place.ratio, c->index_head_dim);
        ret->index_wq_b = whole(l, &w->index_wq_b);
        ret->index_weights = plain(l, &w->index_weights_proj);
    }
}

static void load_mixture(struct loader *l, const struct weights_layer *w, struct ops_layer *ret)
{
    const struct model_config *c = l->config;
    const struct ops_dims *d = &l->rank->dims;
    ret->gate = plain(l, &w->gate);
    if (l->is_hashed) {
        ret->tid2eid =
            copy(l, w->tid2eid, (size_t)c->vocab_size * c->n_experts_used * sizeof(uint16_t),
                 "the gate");
    } else {
        ret->gate_bias = vector(l, w->gate_bias, c->n_experts, "the gate");
    }
    struct ops_expert *experts = mem_array(c->n_experts, sizeof(*experts));
    ret->experts = experts;
    for (uint32_t e = d->expert_first; e < d->expert_end && !l->status; e++) {
        experts[e] = expert_of(l, &w->experts[e]);
        if (experts[e].w1.quant_input != experts[d->expert_first].w1.quant_input ||
            experts[e].w3.quant_input != experts[e].w1.quant_input ||
            experts[e].w2.quant_input != experts[e].w1.quant_input) {
            l->status = error_set(l->err, STATUS_UNSUPPORTED,
                                  "'%s': the experts of a layer must be all quantised or none",
                                  w->experts[e].w1.name);
        }
    }
    if (d->has_shared) {
        ret->shared = expert_of(l, &w->shared);
    }
}

static void load_layer(struct loader *l, const struct weights_layer *w, uint32_t rank_i,
                       struct ops_layer *ret)
{
    const struct model_config *c = l->config;
    ret->hc_attn = hc_of(l, &w->hc_attn, OPS_HC_OUT);
    ret->hc_ffn = hc_of(l, &w->hc_ffn, OPS_HC_OUT);
    ret->attn_norm = vector(l, w->attn_norm, c->hidden_size, "norms");
    ret->ffn_norm = vector(l, w->ffn_norm, c->hidden_size, "norms");
    load_attention(l, w, rank_i, ret);
    load_mixture(l, w, ret);
}

static void load_globals(struct loader *l, const struct weights *w, bool embeds)
{
    struct forward_rank *rank = l->rank;
    if (embeds) {
        struct ops_source embed = source_of(&w->embed);
        embed.is_table = true;
        rank->globals.embed = pack(l, &embed, w->embed.name);
    }
    rank->globals.head = some_rows(l, &w->head, rank->vocab_first, rank->dims.vocab, true);
    rank->globals.norm = vector(l, w->norm, l->config->hidden_size, "norms");
    rank->globals.hc_head = hc_of(l, &w->hc_head, OPS_HC);
}

static struct ops_dims dims_of(const struct model_config *c, bool exact)
{
    return (struct ops_dims){.hidden = c->hidden_size,
                             .vocab = c->vocab_size,
                             .n_heads = c->n_heads,
                             .head_dim = c->head_dim,
                             .rope_dim = c->rope_dim,
                             .q_lora = c->q_lora_rank,
                             .o_groups = c->o_groups,
                             .o_lora = c->o_lora_rank,
                             .window = c->window,
                             .ring = c->window + LAYOUT_DRAFT_TOKENS,
                             .index_heads = c->index_n_heads,
                             .index_dim = c->index_head_dim,
                             .index_topk = c->index_topk,
                             .n_experts = c->n_experts,
                             .n_experts_used = c->n_experts_used,
                             .expert_end = c->n_experts,
                             .expert_width = c->expert_width,
                             .has_shared = true,
                             .route_scale = c->route_scale,
                             .swiglu_limit = c->swiglu_limit,
                             .hc_iters = c->hc_sinkhorn_iters,
                             .hc_eps = c->hc_eps,
                             .rms_eps = c->rms_norm_eps,
                             .exact = exact,
                             .entry_kind = exact ? FORMATS_ENTRY_F32 : FORMATS_ENTRY_PACKED,
                             .rope_theta = c->rope_theta,
                             .compress_theta = c->compress_rope_theta,
                             .has_yarn = c->has_yarn,
                             .yarn_factor = c->yarn_factor,
                             .yarn_beta_fast = c->yarn_beta_fast,
                             .yarn_beta_slow = c->yarn_beta_slow,
                             .yarn_original = c->yarn_original_positions};
}

static uint32_t vocab_first(const struct model_config *c, uint32_t rank_i, uint32_t n)
{
    return (uint32_t)((uint64_t)c->vocab_size * rank_i / n);
}

/* Whether n devices can share the model. */
static bool divides(const struct model_config *c, uint32_t n)
{
    return c->n_heads % n == 0 && c->o_groups % n == 0 && c->n_experts % n == 0;
}

enum status model_load_dims(const struct model_config *c, bool exact, uint32_t rank_i, uint32_t n,
                            struct ops_dims *ret_dims, struct error *err)
{
    struct ops_dims d = dims_of(c, exact);
    if (!divides(c, n)) {
        char sizes[80];
        size_t at = 0;
        sizes[0] = '\0';
        for (uint32_t i = 1; i <= FORWARD_MAX_RANKS; i++) {
            if (divides(c, i) && at < sizeof(sizes)) {
                at += (size_t)snprintf(sizes + at, sizeof(sizes) - at, "%s%" PRIu32,
                                       i > 1 ? ", " : "", i);
            }
        }
        return error_set(err, STATUS_INVALID,
                         "a group of %" PRIu32 " devices must divide the model's %" PRIu32
                         " heads, %" PRIu32 " output groups and %" PRIu32
                         " experts; what would do: %s",
                         n, c->n_heads, c->o_groups, c->n_experts, sizes);
    }
    d.n_heads /= n;
    d.o_groups /= n;
    d.expert_first = c->n_experts / n * rank_i;
    d.expert_end = d.expert_first + c->n_experts / n;
    d.has_shared = rank_i == 0;
    d.is_partial = n > 1;
    d.vocab = vocab_first(c, rank_i + 1, n) - vocab_first(c, rank_i, n);
    *ret_dims = d;
    return STATUS_OK;
}

static enum status join_ranks(struct forward *f, struct error *err)
{
    struct ops_device *devices[FORWARD_MAX_RANKS];
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        devices[k] = f->ranks[k].device;
    }
    return f->n_ranks > 1 && f->ops->join ? f->ops->join(devices, f->n_ranks, err) : STATUS_OK;
}

/* The ranks' shapes are alike, so the first rank's choice is everyone's: it fills `table`, which is
 * f->ops. is_plan: the table is filled. */
static enum status open_ranks(struct forward *f, const struct registry_choice *choice, bool is_plan,
                              struct ops *table, const struct model_config *config,
                              const struct layout *layout, bool exact,
                              const struct ops_limits *limits, struct error *err)
{
    struct ops_limits each = *limits;
    each.n_threads = limits->n_threads ? (limits->n_threads + f->n_ranks - 1) / f->n_ranks : 0;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        struct forward_rank *rank = &f->ranks[k];
        uint32_t rank_i = f->rank_first + k;
        each.device_i = choice->devices_i[k];
        enum status status =
            model_load_dims(config, exact, rank_i, f->group_ranks, &rank->dims, err);
        rank->vocab_first = vocab_first(config, rank_i, f->group_ranks);
        if (!status && k == 0 && !is_plan) {
            status = engine_kernels_choose(choice, &rank->dims, &each, table, err);
            status = status ? status : engine_profile_wrap(table, err);
        }
        if (!status) {
            status = f->ops->open(&rank->dims, &each, &rank->device, err);
        }
        if (status) {
            return status;
        }
        rank->layers = mem_array(f->n_layers, sizeof(*rank->layers));
        for (uint32_t i = 0; i < f->n_layers; i++) {
            rank->layers[i].place = layout->places[i];
        }
    }
    return join_ranks(f, err);
}

/* Layer i of every rank, or the globals for i == n_layers. */
static enum status pack_part(struct forward *f, const struct model_config *config,
                             const struct weights *weights, uint32_t i, bool is_plan,
                             struct error *err)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < f->n_ranks && !status; k++) {
        struct loader l = {.ops = f->ops,
                           .rank = &f->ranks[k],
                           .config = config,
                           .shares = f->group_ranks > 1,
                           .is_plan = is_plan,
                           .err = err};
        if (i < f->n_layers) {
            l.is_hashed = config->layers[i].is_hash_routed;
            load_layer(&l, &weights->layers[i], f->rank_first + k, &f->ranks[k].layers[i]);
        } else {
            load_globals(&l, weights, k < forward_n_memories(f));
        }
        status = l.status;
    }
    return status;
}

/* The same from the checkpoint, whose own form is let go at once. */
static enum status load_part(struct forward *f, const struct model_config *config,
                             struct weights *weights, uint32_t i, struct error *err)
{
    enum status status =
        i < f->n_layers ? weights_load_layer(weights, i, err) : weights_load_globals(weights, err);
    if (!status) {
        status = pack_part(f, config, weights, i, false, err);
    }
    if (i < f->n_layers) {
        weights_release_layer(weights, i);
    } else {
        weights_release_globals(weights);
    }
    return status;
}

/* makes: the device makes the matrices of synthetic weights itself. */
static enum status open_source(const char *dir, const char *source,
                               const struct model_config *config, bool makes,
                               struct weights **ret_weights, struct error *err)
{
    static const char prefix[] = "synthetic:";
    if (!source) {
        return weights_open(dir, config, ret_weights, err);
    }
    const char *digits = source + sizeof(prefix) - 1;
    char *end = NULL;
    if (strncmp(source, prefix, sizeof(prefix) - 1) != 0 || *digits < '0' || *digits > '9') {
        return error_set(err, STATUS_INVALID,
                         "weights '%s': they are those of the checkpoint, or synthetic:SEED with a "
                         "number",
                         source);
    }
    errno = 0;
    unsigned long long seed = strtoull(digits, &end, 10);
    if (*end != '\0' || errno) {
        return error_set(err, STATUS_INVALID, "weights '%s': the seed is no number below 2^64",
                         source);
    }
    return weights_open_synthetic(seed, config, makes, ret_weights, err);
}

enum status model_load_rank(const char *text, struct registry_choice *choice, struct error *err)
{
    unsigned rank = 0, n = 0;
    int end = 0;
    if (!text) {
        return STATUS_OK;
    }
    bool is_read = *text >= '0' && *text <= '9' && strlen(text) < 8 &&
                   sscanf(text, "%u/%u%n", &rank, &n, &end) == 2 && !text[end];
    if (!is_read || rank >= n || n > FORWARD_MAX_RANKS) {
        return error_set(err, STATUS_INVALID,
                         "rank '%s' is not understood: K/N is rank K, from 0, of N devices, %d at "
                         "most",
                         text, FORWARD_MAX_RANKS);
    }
    if (choice->n_devices > 1) {
        return error_set(err, STATUS_INVALID,
                         "rank '%s' runs alone: the device is one, not a group of %" PRIu32, text,
                         choice->n_devices);
    }
    choice->rank_first = rank;
    choice->n_ranks = n;
    return STATUS_OK;
}

static void begin(struct forward *f, const struct registry_choice *choice,
                  const struct model_config *config, const struct ops_limits *limits)
{
    f->n_ranks = choice->n_devices;
    f->rank_first = choice->rank_first;
    f->group_ranks = choice->n_ranks;
    f->apart = choice->apart;
    f->n_layers = config->n_layers;
    f->max_rows = limits->n_rows;
    f->max_draws = limits->n_seqs;
    f->vocab = config->vocab_size;
}

/* By all ranks; ret_uneven (may be NULL): what they would have more if all had the most. */
static uint64_t allocated(const struct forward *f, uint64_t *ret_uneven)
{
    uint64_t bytes = 0, most = 0;
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        uint64_t own = f->ops->allocated(f->ranks[k].device);
        most = own > most ? own : most;
        bytes += own;
    }
    if (ret_uneven) {
        *ret_uneven = f->n_ranks * most - bytes;
    }
    return bytes;
}

enum status model_load_plan(const struct registry_choice *choice, const struct model_config *config,
                            const struct layout *layout, const char *dir, const char *source,
                            bool exact, const struct ops_limits *limits, bool with_weights,
                            struct model_load_plan *ret_plan, struct error *err)
{
    struct weights *weights = NULL;
    struct model_load_plan plan = {0, 0, 0};
    enum status status = with_weights
                             ? open_source(dir, source, config, choice->ops->makes, &weights, err)
                             : STATUS_OK;
    if (status) {
        return status;
    }
    struct forward *f = mem_zalloc(sizeof(*f));
    struct ops *table = mem_zalloc(sizeof(*table));
    begin(f, choice, config, limits);
    *table = *choice->ops;
    f->ops = table;
    status = open_ranks(f, choice, true, table, config, layout, exact, limits, err);
    if (!status) {
        engine_kernels_guess(choice, &f->ranks[0].dims, limits, table);
        status = forward_init(f, err);
    }
    if (!status) {
        plan.scratch_bytes = allocated(f, NULL);
    }
    for (uint32_t i = 0; with_weights && i <= f->n_layers && !status; i++) {
        status = pack_part(f, config, weights, i, true, err);
    }
    if (!status) {
        plan.weights_bytes = allocated(f, &plan.uneven_bytes) - plan.scratch_bytes;
        *ret_plan = plan;
    }
    weights_close(weights);
    model_unload(f);
    mem_free(f);
    return status;
}

enum status model_load(struct forward *f, const struct registry_choice *choice,
                       const struct model_config *config, const struct layout *layout,
                       const char *dir, const char *source, bool exact,
                       const struct ops_limits *limits, void (*tick)(void *cookie), void *cookie,
                       uint8_t ret_identity[16], struct error *err)
{
    struct weights *weights = NULL;
    enum status status = open_source(dir, source, config, choice->ops->makes, &weights, err);
    if (status) {
        return status;
    }
    if (source) {
        log_warn("engine", "weights %s: the model's shape without its knowledge", source);
    }
    if (choice->n_ranks > choice->n_devices) {
        log_warn("engine",
                 "rank %" PRIu32 " of %" PRIu32 " alone: sums hold its own part, so what it says "
                 "means nothing",
                 choice->rank_first, choice->n_ranks);
    }
    begin(f, choice, config, limits);
    struct ops *table = mem_zalloc(sizeof(*table));
    f->ops = table; /* freed by unload */
    status = open_ranks(f, choice, false, table, config, layout, exact, limits, err);
    for (uint32_t i = 0; i <= f->n_layers && !status; i++) {
        status = load_part(f, config, weights, i, err);
        tick(cookie);
    }
    if (!status) {
        memcpy(ret_identity, weights->identity, 16);
        status = forward_init(f, err);
    }
    weights_close(weights);
    if (status) {
        model_unload(f);
    }
    return status;
}

void model_unload(struct forward *f)
{
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        if (f->ranks[k].device) {
            f->ops->close(f->ranks[k].device);
        }
        for (uint32_t i = 0; f->ranks[k].layers && i < f->n_layers; i++) {
            mem_free((void *)(uintptr_t)f->ranks[k].layers[i].wo_a);
            mem_free((void *)(uintptr_t)f->ranks[k].layers[i].experts);
        }
        mem_free(f->ranks[k].layers);
        f->ranks[k] = (struct forward_rank){0};
    }
    mem_free((void *)(uintptr_t)f->ops);
    f->ops = NULL;
}
