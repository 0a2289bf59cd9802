/*
 * From tensor names to slots. Opening walks the model as the config describes it and asks for every
 * tensor by its official name; each request checks the shape and the dtype and leaves a task: read
 * these bytes, make sure that they are numbers, put the pointer there. When the walk is done, a
 * tensor that nobody asked for is an error as much as one that is missing, so a config and a
 * checkpoint that are not of one model never get further than this.
 *
 * Tasks are grouped by layer, and a group's data lies in one allocation, so that a host smaller
 * than the model can take layers through it one by one. The format of a matrix follows from the
 * dtype of its own tensor and never from what the config says: there are checkpoints whose config
 * says fp8 while their experts are NVFP4, and MXFP4 again in the speculative block.
 */
#include "model/weights.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/safetensors.h"
#include "model/weights_file.h"

enum { FP8_BLOCK = 128, MXFP4_BLOCK = 32, NVFP4_BLOCK = 16 };

/* Which formats a matrix may have. */
enum {
    ALLOW_PLAIN = 1 << 0, /* F32, BF16 */
    ALLOW_FP8 = 1 << 1,
    ALLOW_FP4 = 1 << 2, /* both kinds */
    ALLOW_LINEAR = ALLOW_PLAIN | ALLOW_FP8,
    ALLOW_EXPERT = ALLOW_LINEAR | ALLOW_FP4,
};

/* The walk: where we are in it. */
struct walk {
    struct weights *weights;
    const struct model_config *config;
    struct weights_group *group;
    char prefix[96]; /* "layers.3.attn.compressor." */
    uint8_t *used;   /* one a tensor, in the order of safetensors_at */
    size_t n_used;
    struct error *err;
};

const char *weight_format_name(enum weight_format format)
{
    static const char *const names[] = {
        [WEIGHT_NONE] = "none",           [WEIGHT_F32] = "f32",     [WEIGHT_BF16] = "bf16",
        [WEIGHT_FP8_BLOCK] = "fp8-block", [WEIGHT_MXFP4] = "mxfp4", [WEIGHT_NVFP4] = "nvfp4",
    };
    return (unsigned)format < sizeof(names) / sizeof(names[0]) ? names[format] : "unknown";
}

static const struct safetensors *walk_st(const struct walk *walk)
{
    return walk->weights->file->st;
}

static void walk_at(struct walk *walk, const char *format, ...) PRINTF_LIKE(2, 3);
static void walk_at(struct walk *walk, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(walk->prefix, sizeof(walk->prefix), format, args);
    va_end(args);
}

static const char *shard_of(const struct walk *walk, const struct safetensors_tensor *tensor)
{
    return safetensors_shard_name(walk_st(walk), tensor->shard_i);
}

/* What synthetic weights have in a tensor's place. */
struct made_up {
    enum safetensors_dtype dtype;
    uint32_t n_dims;
    const uint64_t *dims;
    uint64_t n_inputs;
};

/* The tensor prefix + name + suffix, which counts as asked for; NULL if there is none. */
static const struct safetensors_tensor *walk_find(struct walk *walk, const char *name,
                                                  const char *suffix, struct made_up made_up)
{
    char full[160];
    snprintf(full, sizeof(full), "%s%s%s", walk->prefix, name, suffix);
    if (walk->weights->file->synthetic) {
        return synthetic_tensor(walk->weights->file->synthetic, full, made_up.dtype, made_up.n_dims,
                                made_up.dims, made_up.n_inputs);
    }
    const struct safetensors_tensor *tensor = safetensors_find(walk_st(walk), full);
    if (tensor) {
        size_t i = (size_t)(tensor - safetensors_at(walk_st(walk), 0));
        walk->n_used += !walk->used[i];
        walk->used[i] = 1;
    }
    return tensor;
}

static enum status walk_missing(const struct walk *walk, const char *name, const char *suffix)
{
    const struct safetensors *st = walk_st(walk);
    if (safetensors_find(st, "model.embed_tokens.weight")) {
        return error_set(
            walk->err, STATUS_UNSUPPORTED,
            "the tensors have the names of the transformers library "
            "(model.embed_tokens.weight); the official layout (embed.weight) is needed");
    }
    return error_set(walk->err, STATUS_NOT_FOUND,
                     "%s%s%s is missing: config.json asks for it, and none of the %zu files of the "
                     "checkpoint (%s ...) has it",
                     walk->prefix, name, suffix, safetensors_n_shards(st),
                     safetensors_shard_name(st, 0));
}

static void shape_text(const uint64_t *dims, uint32_t n_dims, char out[static 96])
{
    size_t n = (size_t)snprintf(out, 96, "[");
    for (uint32_t i = 0; i < n_dims && n < 80; i++) {
        n +=
            (size_t)snprintf(out + n, 96 - n, "%s%llu", i ? ", " : "", (unsigned long long)dims[i]);
    }
    if (n < 95) {
        snprintf(out + n, 96 - n, "]");
    }
}

static enum status check_shape(const struct walk *walk, const struct safetensors_tensor *tensor,
                               uint32_t n_dims, const uint64_t *dims)
{
    if (tensor->n_dims == n_dims && memcmp(tensor->dims, dims, n_dims * sizeof(*dims)) == 0) {
        return STATUS_OK;
    }
    char got[96], wanted[96];
    shape_text(tensor->dims, tensor->n_dims, got);
    shape_text(dims, n_dims, wanted);
    return error_set(walk->err, STATUS_CORRUPT,
                     "%.120s in %.80s is %s of %s, config.json makes it %s", tensor->name,
                     shard_of(walk, tensor), safetensors_dtype_name(tensor->dtype), got, wanted);
}

static enum status wrong_dtype(const struct walk *walk, const struct safetensors_tensor *tensor,
                               const char *wanted)
{
    return error_set(walk->err, STATUS_UNSUPPORTED, "%.120s in %.80s is %s, must be %s",
                     tensor->name, shard_of(walk, tensor), safetensors_dtype_name(tensor->dtype),
                     wanted);
}

/* --- requests --- */

/* The bytes of a matrix or of its scales. */
static void want_bytes(struct walk *walk, const struct safetensors_tensor *tensor,
                       const void **slot, struct made *ret_made)
{
    if (walk->weights->file->synthetic) {
        *ret_made = synthetic_made(tensor);
    }
    if (!walk->weights->file->only_small) {
        weights_group_add(walk->group, WEIGHTS_TASK_BYTES, tensor, tensor->bytes, slot);
    }
}

/* A small tensor, wanted as fp32. */
static enum status want_floats(struct walk *walk, const char *name, uint32_t n_dims,
                               const uint64_t *dims, const float **slot)
{
    const struct safetensors_tensor *tensor = walk_find(
        walk, name, "", (struct made_up){SAFETENSORS_F32, n_dims, dims, dims[n_dims - 1]});
    if (!tensor) {
        return walk_missing(walk, name, "");
    }
    enum status status = check_shape(walk, tensor, n_dims, dims);
    if (status != STATUS_OK) {
        return status;
    }
    if (tensor->dtype != SAFETENSORS_F32 && tensor->dtype != SAFETENSORS_BF16) {
        return wrong_dtype(walk, tensor, "F32 or BF16");
    }
    weights_group_add(walk->group, WEIGHTS_TASK_FLOATS, tensor, tensor->n_elements * sizeof(float),
                      slot);
    return STATUS_OK;
}

static enum status want_vector(struct walk *walk, const char *name, uint64_t n, const float **slot)
{
    return want_floats(walk, name, 1, &n, slot);
}

static enum status want_table(struct walk *walk, const char *name, uint64_t rows, uint64_t cols,
                              const float **slot)
{
    const uint64_t dims[] = {rows, cols};
    return want_floats(walk, name, 2, dims, slot);
}

/* One fp32 factor of NVFP4, read at once: it is part of the slot and not data behind a pointer. */
static enum status want_factor(struct walk *walk, const char *name, const char *suffix, float *ret)
{
    const struct safetensors_tensor *tensor =
        walk_find(walk, name, suffix, (struct made_up){SAFETENSORS_F32});
    float value;
    if (!tensor) {
        return walk_missing(walk, name, suffix);
    }
    if (tensor->dtype != SAFETENSORS_F32) {
        return wrong_dtype(walk, tensor, "F32");
    }
    if (tensor->n_elements != 1 || tensor->n_dims > 1) {
        return check_shape(walk, tensor, 0, NULL);
    }
    enum status status =
        safetensors_read(walk_st(walk), tensor, 0, sizeof(value), &value, walk->err);
    if (status != STATUS_OK) {
        return status;
    }
    if (!isfinite(value) || value <= 0) {
        return error_set(walk->err, STATUS_CORRUPT, "%.120s in %.80s is %g, must be above 0",
                         tensor->name, shard_of(walk, tensor), (double)value);
    }
    *ret = value;
    return STATUS_OK;
}

static enum status want_scale(struct walk *walk, const char *name, const char *suffix,
                              uint32_t block_rows, uint32_t block_cols, struct weight *weight)
{
    weight->block_rows = block_rows;
    weight->block_cols = block_cols;
    weight->scale_rows = (weight->rows + block_rows - 1) / block_rows;
    weight->scale_cols = (weight->cols + block_cols - 1) / block_cols;
    const uint64_t dims[] = {weight->scale_rows, weight->scale_cols};
    /* e2m1 numbers at random are four times as large as e4m3's. */
    uint64_t n_inputs = (uint64_t)weight->cols * (weight->format == WEIGHT_MXFP4 ? 16 : 1);
    const struct safetensors_tensor *tensor =
        walk_find(walk, name, suffix, (struct made_up){SAFETENSORS_F8_E8M0, 2, dims, n_inputs});
    if (!tensor) {
        return walk_missing(walk, name, suffix);
    }
    enum status status = check_shape(walk, tensor, 2, dims);
    if (status != STATUS_OK) {
        return status;
    }
    enum safetensors_dtype dtype = tensor->dtype;
    if (weight->format == WEIGHT_NVFP4
            ? dtype != SAFETENSORS_F8_E4M3
            : dtype != SAFETENSORS_F8_E8M0 &&
                  (weight->format != WEIGHT_FP8_BLOCK || dtype != SAFETENSORS_F32)) {
        return wrong_dtype(walk, tensor,
                           weight->format == WEIGHT_NVFP4   ? "F8_E4M3"
                           : weight->format == WEIGHT_MXFP4 ? "F8_E8M0"
                                                            : "F8_E8M0 or F32");
    }
    weight->scale_format = dtype == SAFETENSORS_F8_E8M0   ? WEIGHT_SCALE_E8M0
                           : dtype == SAFETENSORS_F8_E4M3 ? WEIGHT_SCALE_E4M3
                                                          : WEIGHT_SCALE_F32;
    want_bytes(walk, tensor, &weight->scale, &weight->made_scale);
    return STATUS_OK;
}

static enum weight_format format_of(enum safetensors_dtype dtype, unsigned allow)
{
    switch (dtype) {
    case SAFETENSORS_F32:
        return WEIGHT_F32;
    case SAFETENSORS_BF16:
        return WEIGHT_BF16;
    case SAFETENSORS_F8_E4M3:
        return allow & ALLOW_FP8 ? WEIGHT_FP8_BLOCK : WEIGHT_NONE;
    case SAFETENSORS_I8:
        return allow & ALLOW_FP4 ? WEIGHT_MXFP4 : WEIGHT_NONE;
    case SAFETENSORS_U8:
        return allow & ALLOW_FP4 ? WEIGHT_NVFP4 : WEIGHT_NONE;
    default:
        return WEIGHT_NONE;
    }
}

/* Scales and factors that belong to the format of weight. */
static enum status want_scales(struct walk *walk, const char *name, struct weight *weight)
{
    enum status status;
    switch (weight->format) {
    case WEIGHT_FP8_BLOCK:
        return want_scale(walk, name, ".scale", FP8_BLOCK, FP8_BLOCK, weight);
    case WEIGHT_MXFP4:
        return want_scale(walk, name, ".scale", 1, MXFP4_BLOCK, weight);
    case WEIGHT_NVFP4:
        status = want_scale(walk, name, ".weight_scale", 1, NVFP4_BLOCK, weight);
        if (status == STATUS_OK) {
            status = want_factor(walk, name, ".weight_scale_2", &weight->global_scale);
        }
        if (status == STATUS_OK) {
            status = want_factor(walk, name, ".input_scale", &weight->input_scale);
        }
        return status;
    default:
        return STATUS_OK;
    }
}

/* The matrix prefix + name + ".weight". */
static enum status want_matrix(struct walk *walk, const char *name, unsigned allow, uint64_t rows,
                               uint64_t cols, struct weight *weight)
{
    bool fp4_fits = allow & ALLOW_FP4 && cols % MXFP4_BLOCK == 0;
    const uint64_t made_up_dims[] = {rows, fp4_fits ? cols / 2 : cols};
    const struct safetensors_tensor *tensor =
        walk_find(walk, name, ".weight",
                  (struct made_up){fp4_fits            ? SAFETENSORS_I8
                                   : allow & ALLOW_FP8 ? SAFETENSORS_F8_E4M3
                                                       : SAFETENSORS_BF16,
                                   2, made_up_dims, cols});
    if (!tensor) {
        return walk_missing(walk, name, ".weight");
    }
    enum weight_format format = format_of(tensor->dtype, allow);
    if (format == WEIGHT_NONE) {
        return wrong_dtype(walk, tensor,
                           allow & ALLOW_FP4
                               ? "F8_E4M3, I8 (MXFP4), U8 (NVFP4), BF16 or F32"
                               : (allow & ALLOW_FP8 ? "F8_E4M3, BF16 or F32" : "BF16 or F32"));
    }
    bool is_fp4 = format == WEIGHT_MXFP4 || format == WEIGHT_NVFP4;
    if (is_fp4 && cols % MXFP4_BLOCK != 0) {
        return error_set(walk->err, STATUS_UNSUPPORTED,
                         "%.120s has %llu columns; FP4 needs a multiple of %d", tensor->name,
                         (unsigned long long)cols, MXFP4_BLOCK);
    }
    const uint64_t dims[] = {rows, is_fp4 ? cols / 2 : cols};
    enum status status = check_shape(walk, tensor, 2, dims);
    if (status != STATUS_OK) {
        return status;
    }
    *weight = (struct weight){
        .name = tensor->name,
        .format = format,
        .rows = (uint32_t)rows,
        .cols = (uint32_t)cols,
        .row_bytes = dims[1] * safetensors_dtype_bytes(tensor->dtype),
        .global_scale = 1,
        .input_scale = 1,
    };
    want_bytes(walk, tensor, &weight->data, &weight->made);
    return want_scales(walk, name, weight);
}

/* --- the walk --- */

/* Runs one request and leaves the function on failure. */
#define WANT(request)                  \
    do {                               \
        enum status want_ = (request); \
        if (want_ != STATUS_OK) {      \
            return want_;              \
        }                              \
    } while (0)

static enum status walk_hc(struct walk *walk, const char *name, uint32_t rows, uint32_t factors,
                           struct weights_hc *hc)
{
    char full[32];
    uint64_t streams = (uint64_t)walk->config->hc_mult * walk->config->hidden_size;
    snprintf(full, sizeof(full), "%s_fn", name);
    WANT(want_table(walk, full, rows, streams, &hc->fn));
    snprintf(full, sizeof(full), "%s_base", name);
    WANT(want_vector(walk, full, rows, &hc->base));
    snprintf(full, sizeof(full), "%s_scale", name);
    return want_vector(walk, full, factors, &hc->scale);
}

/* The prefix is that of the compressor. width: of an entry. */
static enum status walk_compressor(struct walk *walk, const struct model_layer *layer,
                                   uint32_t width, struct weights_compressor *compressor)
{
    /* Ratio 4 overlaps: each token has a part in two entries, with channels for each. */
    uint64_t wide = layer->kind == MODEL_LAYER_SPARSE ? 2 * (uint64_t)width : width;
    uint64_t hidden = walk->config->hidden_size;
    WANT(want_matrix(walk, "wkv", ALLOW_PLAIN, wide, hidden, &compressor->wkv));
    WANT(want_matrix(walk, "wgate", ALLOW_PLAIN, wide, hidden, &compressor->wgate));
    WANT(want_table(walk, "ape", layer->ratio, wide, &compressor->ape));
    return want_vector(walk, "norm.weight", width, &compressor->norm);
}

static enum status walk_attention(struct walk *walk, uint32_t i, struct weights_layer *slots)
{
    const struct model_config *c = walk->config;
    uint64_t q_wide = (uint64_t)c->n_heads * c->head_dim;
    uint64_t o_wide = (uint64_t)c->o_groups * c->o_lora_rank;

    walk_at(walk, "layers.%u.attn.", i);
    WANT(want_vector(walk, "attn_sink", c->n_heads, &slots->attn_sink));
    WANT(want_matrix(walk, "wq_a", ALLOW_LINEAR, c->q_lora_rank, c->hidden_size, &slots->wq_a));
    WANT(want_vector(walk, "q_norm.weight", c->q_lora_rank, &slots->q_norm));
    WANT(want_matrix(walk, "wq_b", ALLOW_LINEAR, q_wide, c->q_lora_rank, &slots->wq_b));
    WANT(want_matrix(walk, "wkv", ALLOW_LINEAR, c->head_dim, c->hidden_size, &slots->wkv));
    WANT(want_vector(walk, "kv_norm.weight", c->head_dim, &slots->kv_norm));
    WANT(want_matrix(walk, "wo_a", ALLOW_LINEAR, o_wide, q_wide / c->o_groups, &slots->wo_a));
    WANT(want_matrix(walk, "wo_b", ALLOW_LINEAR, c->hidden_size, o_wide, &slots->wo_b));
    if (c->layers[i].kind == MODEL_LAYER_WINDOW) {
        return STATUS_OK;
    }
    walk_at(walk, "layers.%u.attn.compressor.", i);
    WANT(walk_compressor(walk, &c->layers[i], c->head_dim, &slots->compressor));
    if (c->layers[i].kind == MODEL_LAYER_HEAVY) {
        return STATUS_OK;
    }
    walk_at(walk, "layers.%u.attn.indexer.", i);
    WANT(want_matrix(walk, "wq_b", ALLOW_LINEAR, (uint64_t)c->index_n_heads * c->index_head_dim,
                     c->q_lora_rank, &slots->index_wq_b));
    WANT(want_matrix(walk, "weights_proj", ALLOW_PLAIN, c->index_n_heads, c->hidden_size,
                     &slots->index_weights_proj));
    walk_at(walk, "layers.%u.attn.indexer.compressor.", i);
    return walk_compressor(walk, &c->layers[i], c->index_head_dim, &slots->index_compressor);
}

static enum status walk_router(struct walk *walk, uint32_t i, struct weights_layer *slots)
{
    const struct model_config *c = walk->config;
    walk_at(walk, "layers.%u.ffn.gate", i);
    WANT(want_matrix(walk, "", ALLOW_PLAIN, c->n_experts, c->hidden_size, &slots->gate));
    if (!c->layers[i].is_hash_routed) {
        return want_vector(walk, ".bias", c->n_experts, &slots->gate_bias);
    }
    const uint64_t dims[] = {c->vocab_size, c->n_experts_used};
    const struct safetensors_tensor *tensor =
        walk_find(walk, ".tid2eid", "", (struct made_up){SAFETENSORS_I64, 2, dims, 0});
    if (!tensor) {
        return walk_missing(walk, ".tid2eid", "");
    }
    WANT(check_shape(walk, tensor, 2, dims));
    if (tensor->dtype != SAFETENSORS_I64) {
        return wrong_dtype(walk, tensor, "I64");
    }
    weights_group_add(walk->group, WEIGHTS_TASK_EXPERT_IDS, tensor,
                      tensor->n_elements * sizeof(uint16_t), &slots->tid2eid);
    return STATUS_OK;
}

static enum status walk_expert(struct walk *walk, unsigned allow, struct weights_expert *expert)
{
    uint64_t hidden = walk->config->hidden_size, width = walk->config->expert_width;
    WANT(want_matrix(walk, "w1", allow, width, hidden, &expert->w1));
    WANT(want_matrix(walk, "w3", allow, width, hidden, &expert->w3));
    return want_matrix(walk, "w2", allow, hidden, width, &expert->w2);
}

static enum status walk_layer(struct walk *walk, uint32_t i)
{
    const struct model_config *c = walk->config;
    struct weights_layer *slots = &walk->weights->layers[i];
    uint32_t hc_rows = c->hc_mult * (c->hc_mult + 2);

    walk->group = &walk->weights->file->groups[i];
    walk_at(walk, "layers.%u.", i);
    WANT(walk_hc(walk, "hc_attn", hc_rows, 3, &slots->hc_attn));
    WANT(walk_hc(walk, "hc_ffn", hc_rows, 3, &slots->hc_ffn));
    WANT(want_vector(walk, "attn_norm.weight", c->hidden_size, &slots->attn_norm));
    WANT(want_vector(walk, "ffn_norm.weight", c->hidden_size, &slots->ffn_norm));
    WANT(walk_attention(walk, i, slots));
    WANT(walk_router(walk, i, slots));
    walk_at(walk, "layers.%u.ffn.shared_experts.", i);
    WANT(walk_expert(walk, ALLOW_LINEAR, &slots->shared));
    slots->experts = mem_array(c->n_experts, sizeof(*slots->experts));
    for (uint32_t e = 0; e < c->n_experts; e++) {
        walk_at(walk, "layers.%u.ffn.experts.%u.", i, e);
        WANT(walk_expert(walk, ALLOW_EXPERT, &slots->experts[e]));
    }
    return STATUS_OK;
}

static enum status walk_globals(struct walk *walk)
{
    const struct model_config *c = walk->config;
    struct weights *w = walk->weights;

    walk->group = &w->file->groups[c->n_layers];
    walk_at(walk, "%s", "");
    WANT(want_matrix(walk, "embed", ALLOW_PLAIN, c->vocab_size, c->hidden_size, &w->embed));
    WANT(want_matrix(walk, "head", ALLOW_PLAIN, c->vocab_size, c->hidden_size, &w->head));
    WANT(want_vector(walk, "norm.weight", c->hidden_size, &w->norm));
    return walk_hc(walk, "hc_head", c->hc_mult, 1, &w->hc_head);
}

/* What was not asked for: a speculative block's is skipped, anything else contradicts the config.
 */
static enum status walk_leftover(struct walk *walk)
{
    const struct safetensors *st = walk_st(walk);
    for (size_t i = 0; i < safetensors_n(st); i++) {
        const struct safetensors_tensor *tensor = safetensors_at(st, i);
        if (walk->used[i]) {
            continue;
        }
        if (strncmp(tensor->name, "mtp.", 4) != 0) {
            return error_set(walk->err, STATUS_CORRUPT,
                             "%.120s in %.80s has no place in the model that config.json "
                             "describes (%u layers, %u experts)",
                             tensor->name, shard_of(walk, tensor), walk->config->n_layers,
                             walk->config->n_experts);
        }
        walk->weights->n_skipped++;
        walk->weights->skipped_bytes += tensor->bytes;
    }
    return STATUS_OK;
}

static enum status walk_all(struct walk *walk)
{
    WANT(walk_globals(walk));
    for (uint32_t i = 0; i < walk->config->n_layers; i++) {
        WANT(walk_layer(walk, i));
    }
    return walk->weights->file->synthetic ? STATUS_OK : walk_leftover(walk);
}

/* Takes st, or synthetic. */
static enum status open_weights(struct safetensors *st, struct synthetic *synthetic,
                                bool only_small, const struct model_config *config,
                                struct weights **ret_weights, struct error *err)
{
    struct weights *weights = mem_zalloc(sizeof(*weights));
    struct weights_file *file = mem_zalloc(sizeof(*file));
    weights->file = file;
    weights->n_layers = config->n_layers;
    weights->n_experts = config->n_experts;
    weights->layers = mem_array(config->n_layers, sizeof(*weights->layers));
    file->st = st;
    file->synthetic = synthetic;
    file->only_small = only_small;
    file->config = *config;
    file->n_groups = config->n_layers + 1;
    file->groups = mem_array(file->n_groups, sizeof(*file->groups));

    struct walk walk = {
        .weights = weights,
        .config = &file->config,
        .used = mem_array(st ? safetensors_n(st) + 1 : 1, 1),
        .err = err,
    };
    enum status status = walk_all(&walk);
    mem_free(walk.used);
    if (synthetic) {
        synthetic_identity(synthetic, weights->identity);
    } else if (status == STATUS_OK) {
        status = weights_identity(file, weights->identity, err);
    }
    if (status != STATUS_OK) {
        weights_close(weights);
        return status;
    }
    for (uint32_t i = 0; i < file->n_groups; i++) {
        weights->total_bytes += file->groups[i].bytes;
    }
    *ret_weights = weights;
    return STATUS_OK;
}

enum status weights_open(const char *dir, const struct model_config *config,
                         struct weights **ret_weights, struct error *err)
{
    struct safetensors *st;
    enum status status = safetensors_open(dir, &st, err);
    return status ? status : open_weights(st, NULL, false, config, ret_weights, err);
}

enum status weights_open_synthetic(uint64_t seed, const struct model_config *config,
                                   bool only_small, struct weights **ret_weights, struct error *err)
{
    return open_weights(NULL, synthetic_create(seed, config), only_small, config, ret_weights, err);
}

void weights_close(struct weights *weights)
{
    if (!weights) {
        return;
    }
    for (uint32_t i = 0; i < weights->file->n_groups; i++) {
        weights_group_release(weights, &weights->file->groups[i]);
        mem_free(weights->file->groups[i].tasks);
    }
    for (uint32_t i = 0; i < weights->n_layers; i++) {
        mem_free(weights->layers[i].experts);
    }
    mem_free(weights->file->groups);
    safetensors_close(weights->file->st);
    synthetic_free(weights->file->synthetic);
    mem_free(weights->file);
    mem_free(weights->layers);
    mem_free(weights);
}
