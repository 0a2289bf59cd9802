/*
 * config.json, read so that a mistake in it can't become strange text. Every field that has a part
 * in the arithmetic is in a table with its bounds; fields whose other values would mean another
 * model must have the value that is implemented; fields without a part in the arithmetic are
 * listed; and any other field is an error, because nobody can know what it would change. A person
 * who knows that it is harmless renames it to begin with an underscore.
 *
 * The bounds are there to keep sums and products of these numbers far from overflow, not to say
 * what is sensible. What a kernel can do is the kernel's to say.
 */
#include "model/config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

#define MAX_CONFIG_BYTES ((size_t)4 << 20)
#define MAX_TOKENIZER_BYTES ((size_t)64 << 20)

enum field_kind { FIELD_U32, FIELD_FLOAT, FIELD_DOUBLE };

struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
    double min, max;
    bool is_optional; /* absent: 0 */
};

#define U32(key, member, min, max)                                             \
    {                                                                          \
        key, FIELD_U32, offsetof(struct model_config, member), min, max, false \
    }
#define U32_OPTIONAL(key, member, min, max)                                   \
    {                                                                         \
        key, FIELD_U32, offsetof(struct model_config, member), min, max, true \
    }
#define FLOAT(key, member, min, max)                                             \
    {                                                                            \
        key, FIELD_FLOAT, offsetof(struct model_config, member), min, max, false \
    }
#define DOUBLE(key, member, min, max)                                             \
    {                                                                             \
        key, FIELD_DOUBLE, offsetof(struct model_config, member), min, max, false \
    }

static const struct field fields[] = {
    U32("hidden_size", hidden_size, 8, 65536),
    U32("num_hidden_layers", n_layers, 1, MODEL_MAX_LAYERS - 8),
    U32("vocab_size", vocab_size, 8, 1 << 20),
    U32("max_position_embeddings", max_position_embeddings, 1, 1 << 24),
    U32("num_attention_heads", n_heads, 1, 1024),
    U32("head_dim", head_dim, 2, 4096),
    U32("qk_rope_head_dim", rope_dim, 2, 4096),
    U32("q_lora_rank", q_lora_rank, 1, 65536),
    U32("o_groups", o_groups, 1, 1024),
    U32("o_lora_rank", o_lora_rank, 1, 65536),
    U32("sliding_window", window, 1, 4096),
    U32_OPTIONAL("index_n_heads", index_n_heads, 1, 1024),
    U32_OPTIONAL("index_head_dim", index_head_dim, 2, 1024),
    U32_OPTIONAL("index_topk", index_topk, 1, 1 << 20),
    U32("n_routed_experts", n_experts, 1, MODEL_MAX_EXPERTS),
    U32("num_experts_per_tok", n_experts_used, 1, MODEL_MAX_TOP_K),
    U32("moe_intermediate_size", expert_width, 1, 65536),
    U32("num_hash_layers", n_hash_layers, 0, MODEL_MAX_LAYERS),
    U32_OPTIONAL("num_nextn_predict_layers", n_mtp, 0, 8),
    U32("hc_mult", hc_mult, MODEL_HC_MULT, MODEL_HC_MULT),
    U32("hc_sinkhorn_iters", hc_sinkhorn_iters, 1, 1000),
    FLOAT("hc_eps", hc_eps, 1e-30, 1e-1),
    FLOAT("rms_norm_eps", rms_norm_eps, 1e-30, 1e-1),
    FLOAT("routed_scaling_factor", route_scale, 1e-6, 1e6),
    FLOAT("swiglu_limit", swiglu_limit, 0, 1e6),
    DOUBLE("rope_theta", rope_theta, 1.5, 1e12),
    DOUBLE("compress_rope_theta", compress_rope_theta, 1.5, 1e12),
};

/* Fields with one implemented value; absent means that value. */
static const struct {
    const char *key;
    const char *json; /* as JSON text */
} fixed[] = {
    {"model_type", "\"deepseek_v4\""},
    {"num_key_value_heads", "1"},
    {"n_shared_experts", "1"},
    {"scoring_func", "\"sqrtsoftplus\""},
    {"topk_method", "\"noaux_tc\""},
    {"norm_topk_prob", "true"},
    {"hidden_act", "\"silu\""},
    {"tie_word_embeddings", "false"},
    {"attention_bias", "false"},
    {"n_group", "1"},
    {"topk_group", "1"},
};

/* No part in inference, or read elsewhere in this file. */
static const char *const harmless[] = {
    "architectures",        "compress_ratios",
    "rope_scaling",         "bos_token_id",
    "eos_token_id",         "pad_token_id",
    "quantization_config",  "expert_dtype",
    "torch_dtype",          "dtype",
    "initializer_range",    "use_cache",
    "transformers_version", "attention_dropout",
    "output_router_logits", "router_aux_loss_coef",
    "output_attentions",    "output_hidden_states",
    "return_dict",          "attn_implementation",
};

static bool name_is_in(const char *name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (strcmp(name, list[i]) == 0) {
            return true;
        }
    }
    return false;
}

#define IS_IN(name, list) name_is_in((name), (list), sizeof(list) / sizeof((list)[0]))

/* The value as JSON, cut to fit an error text. */
static const char *show(const struct json *value, char out[static 64])
{
    struct buf buf = BUF_INIT;
    json_dump_python(value, &buf);
    size_t n = buf.bytes < 60 ? buf.bytes : 60;
    while (n < buf.bytes && n > 0 && (buf.data[n] & 0xC0) == 0x80) {
        n--;
    }
    memcpy(out, n ? buf.data : (const uint8_t *)"", n);
    out[n] = '\0';
    buf_fini(&buf);
    return out;
}

/* --- single fields --- */

static enum status read_number(const struct json *object, const char *where, const char *key,
                               double min, double max, bool is_whole, double *ret,
                               struct error *err)
{
    char shown[64];
    const struct json *value = json_get(object, key);
    double number;
    int64_t whole;
    if (!value) {
        return error_set(err, STATUS_INVALID, "%s: %s is missing", where, key);
    }
    bool good = is_whole ? json_int(value, &whole) : json_number(value, &number);
    if (good && is_whole) {
        number = (double)whole;
    }
    if (!good || !isfinite(number) || number < min || number > max) {
        return error_set(err, STATUS_INVALID, "%s: %s is %s, must be %s from %.10g to %.10g", where,
                         key, show(value, shown), is_whole ? "a whole number" : "a number", min,
                         max);
    }
    *ret = number;
    return STATUS_OK;
}

static enum status read_fields(const struct json *root, struct model_config *config,
                               struct error *err)
{
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const struct field *field = &fields[i];
        double number;
        if (field->is_optional && !json_get(root, field->key)) {
            continue;
        }
        enum status status = read_number(root, "config.json", field->key, field->min, field->max,
                                         field->kind == FIELD_U32, &number, err);
        if (status != STATUS_OK) {
            return status;
        }
        void *to = (char *)config + field->offset;
        if (field->kind == FIELD_U32) {
            *(uint32_t *)to = (uint32_t)number;
        } else if (field->kind == FIELD_FLOAT) {
            *(float *)to = (float)number;
        } else {
            *(double *)to = number;
        }
    }
    return STATUS_OK;
}

static enum status check_fixed(const struct json *root, struct error *err)
{
    char shown[64];
    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        const struct json *value = json_get(root, fixed[i].key);
        if (value && strcmp(show(value, shown), fixed[i].json) != 0) {
            return error_set(err, STATUS_UNSUPPORTED,
                             "config.json: %s is %s; only %s is implemented", fixed[i].key, shown,
                             fixed[i].json);
        }
    }
    return STATUS_OK;
}

/* What model this is, before any other complaint. */
static enum status check_architecture(const struct json *root, struct error *err)
{
    const struct json *list = json_get(root, "architectures");
    const char *name = json_text(json_array_at(list, 0), NULL);
    if (!name || json_array_n(list) != 1) {
        return error_set(err, STATUS_INVALID,
                         "config.json: architectures must be a list of one name");
    }
    if (strcmp(name, "DeepseekV41ForCausalLM") == 0) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "config.json: this is DeepSeek-V4.1 (%s), another model than DeepSeek-V4; "
                         "only DeepseekV4ForCausalLM is implemented",
                         name);
    }
    if (strcmp(name, "DeepseekV4ForCausalLM") != 0) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "config.json: the architecture is %.100s; only DeepseekV4ForCausalLM is "
                         "implemented",
                         name);
    }
    return STATUS_OK;
}

static bool is_known(const char *key)
{
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (strcmp(key, fields[i].key) == 0) {
            return true;
        }
    }
    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        if (strcmp(key, fixed[i].key) == 0) {
            return true;
        }
    }
    return IS_IN(key, harmless) || key[0] == '_';
}

static enum status check_unknown(const struct json *root, struct model_config *config,
                                 struct error *err)
{
    struct json_iter it = json_iterate(root);
    while (json_iterate_next(&it)) {
        if (strncmp(it.key, "dspark_", 7) == 0) {
            config->has_dspark = true;
        } else if (!is_known(it.key)) {
            return error_set(err, STATUS_UNSUPPORTED,
                             "config.json: the field %.100s is unknown and could change the "
                             "arithmetic; if it doesn't, rename it to _%.100s",
                             it.key, it.key);
        }
    }
    return STATUS_OK;
}

/* --- groups of fields --- */

static enum status read_layer(const struct json *value, uint32_t i, struct model_config *config,
                              struct error *err)
{
    char shown[64];
    struct model_layer *layer = &config->layers[i];
    int64_t ratio;
    if (!json_int(value, &ratio) || ratio < 0 || ratio > MODEL_PAGE_TOKENS || ratio == 1 ||
        (ratio > 0 && MODEL_PAGE_TOKENS % ratio != 0)) {
        return error_set(err, STATUS_INVALID,
                         "config.json: compress_ratios[%u] is %s, must be 0, 4, or another divisor "
                         "of %d above 1",
                         i, show(value, shown), MODEL_PAGE_TOKENS);
    }
    layer->ratio = (uint32_t)ratio;
    layer->kind = ratio == 0                    ? MODEL_LAYER_WINDOW
                  : ratio == MODEL_SPARSE_RATIO ? MODEL_LAYER_SPARSE
                                                : MODEL_LAYER_HEAVY;
    if (i >= config->n_layers) {
        return STATUS_OK;
    }
    layer->is_hash_routed = i < config->n_hash_layers;
    config->n_sparse += layer->kind == MODEL_LAYER_SPARSE;
    if (layer->kind == MODEL_LAYER_HEAVY) {
        if (config->heavy_ratio != 0 && config->heavy_ratio != layer->ratio) {
            return error_set(err, STATUS_UNSUPPORTED,
                             "config.json: compress_ratios has both %u and %u; beside 0 and 4 only "
                             "one ratio is implemented",
                             config->heavy_ratio, layer->ratio);
        }
        config->heavy_ratio = layer->ratio;
        config->n_heavy++;
    }
    return STATUS_OK;
}

static enum status read_layers(const struct json *root, struct model_config *config,
                               struct error *err)
{
    const struct json *list = json_get(root, "compress_ratios");
    size_t n = json_array_n(list);
    size_t least = config->n_layers + config->n_mtp;
    /* DSpark has more blocks than num_nextn_predict_layers says. */
    if (n < least || n > MODEL_MAX_LAYERS || (n > least && !config->has_dspark)) {
        return error_set(err, STATUS_INVALID,
                         "config.json: compress_ratios has %zu entries; %u layers and %u "
                         "speculative blocks need %zu",
                         n, config->n_layers, config->n_mtp, least);
    }
    if (config->n_hash_layers > config->n_layers) {
        return error_set(err, STATUS_INVALID, "config.json: num_hash_layers is %u for %u layers",
                         config->n_hash_layers, config->n_layers);
    }
    for (size_t i = 0; i < n; i++) {
        enum status status = read_layer(json_array_at(list, i), (uint32_t)i, config, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    config->n_extra_layers = (uint32_t)n - config->n_layers;
    return STATUS_OK;
}

static enum status read_rope_scaling(const struct json *root, struct model_config *config,
                                     struct error *err)
{
    static const char *const known[] = {"type",      "rope_type",
                                        "factor",    "beta_fast",
                                        "beta_slow", "original_max_position_embeddings"};
    const char *where = "config.json: rope_scaling";
    const struct json *scaling = json_get(root, "rope_scaling");
    if (json_kind_of(scaling) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    const struct json *type = json_get(scaling, "type");
    if (!json_text_is(type ? type : json_get(scaling, "rope_type"), "yarn")) {
        return error_set(err, STATUS_UNSUPPORTED, "%s must be null or an object of type yarn",
                         where);
    }
    struct json_iter it = json_iterate(scaling);
    while (json_iterate_next(&it)) {
        if (!IS_IN(it.key, known)) {
            return error_set(err, STATUS_UNSUPPORTED, "%s has the field %.100s, not implemented",
                             where, it.key);
        }
    }
    double original;
    enum status status =
        read_number(scaling, where, "factor", 1, 1e4, false, &config->yarn_factor, err);
    if (status == STATUS_OK) {
        status = read_number(scaling, where, "original_max_position_embeddings", 1, 1 << 24, true,
                             &original, err);
    }
    if (status == STATUS_OK) {
        status = read_number(scaling, where, "beta_fast", 1e-3, 1e6, false, &config->yarn_beta_fast,
                             err);
    }
    if (status == STATUS_OK) {
        status = read_number(scaling, where, "beta_slow", 1e-3, config->yarn_beta_fast, false,
                             &config->yarn_beta_slow, err);
    }
    if (status == STATUS_OK) {
        config->yarn_original_positions = (uint32_t)original;
        config->has_yarn = true;
    }
    return status;
}

static bool is_block_128(const struct json *value)
{
    int64_t rows, cols;
    return json_array_n(value) == 2 && json_int(json_array_at(value, 0), &rows) &&
           json_int(json_array_at(value, 1), &cols) && rows == 128 && cols == 128;
}

static enum status read_quantisation(const struct json *root, struct model_config *config,
                                     struct error *err)
{
    static const char *const known[] = {
        "quant_method", "fmt",           "scale_fmt",   "activation_scheme", "weight_block_size",
        "quant_algo",   "group_size",    "ignore",      "moe_quant_algo",    "kv_cache_quant_algo",
        "producer",     "config_groups", "expert_dtype"};
    const char *where = "config.json: quantization_config";
    const struct json *quant = json_get(root, "quantization_config");
    const struct json *expert = json_get(root, "expert_dtype");

    if (expert && !json_text_is(expert, "fp4") && !json_text_is(expert, "fp8")) {
        char shown[64];
        return error_set(err, STATUS_UNSUPPORTED,
                         "config.json: expert_dtype is %s; fp4 and fp8 are implemented",
                         show(expert, shown));
    }
    config->expert_dtype = !expert                       ? MODEL_EXPERTS_UNSAID
                           : json_text_is(expert, "fp4") ? MODEL_EXPERTS_FP4
                                                         : MODEL_EXPERTS_FP8;
    if (json_kind_of(quant) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    const struct json *scale = json_get(quant, "scale_fmt");
    const struct json *kv = json_get(quant, "kv_cache_quant_algo");
    const struct json *algo = json_get(quant, "moe_quant_algo");
    if (!json_text_is(json_get(quant, "quant_method"), "fp8") ||
        !json_text_is(json_get(quant, "fmt"), "e4m3") ||
        (json_kind_of(scale) != JSON_KIND_NULL && !json_text_is(scale, "ue8m0")) ||
        !json_text_is(json_get(quant, "activation_scheme"), "dynamic") ||
        !is_block_128(json_get(quant, "weight_block_size")) || json_kind_of(kv) != JSON_KIND_NULL) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "%s: only quant_method fp8, fmt e4m3, scale_fmt ue8m0, activation_scheme "
                         "dynamic, weight_block_size [128, 128] and no kv_cache_quant_algo are "
                         "implemented",
                         where);
    }
    config->says_nvfp4 = json_text_is(algo, "NVFP4");
    if (algo &&
        (!config->says_nvfp4 || !json_text_is(json_get(quant, "quant_algo"), "MIXED_PRECISION"))) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "%s: of mixed formats only quant_algo MIXED_PRECISION with moe_quant_algo "
                         "NVFP4 is implemented",
                         where);
    }
    struct json_iter it = json_iterate(quant);
    while (json_iterate_next(&it)) {
        if (!IS_IN(it.key, known)) {
            return error_set(err, STATUS_UNSUPPORTED, "%s has the field %.100s, not implemented",
                             where, it.key);
        }
    }
    config->is_fp8 = true;
    return STATUS_OK;
}

static enum status add_eos(const char *file, const struct json *value, struct model_config *config,
                           struct error *err)
{
    char shown[64];
    int64_t id;
    if (!json_int(value, &id) || id < 0 || id >= config->vocab_size) {
        return error_set(err, STATUS_INVALID,
                         "%s: eos_token_id has %s, must be ids below vocab_size %u", file,
                         show(value, shown), config->vocab_size);
    }
    for (uint32_t i = 0; i < config->n_eos; i++) {
        if (config->eos_ids[i] == (uint32_t)id) {
            return STATUS_OK;
        }
    }
    if (config->n_eos == MODEL_MAX_EOS) {
        return error_set(err, STATUS_INVALID, "%s: more than %d ids in eos_token_id", file,
                         MODEL_MAX_EOS);
    }
    config->eos_ids[config->n_eos++] = (uint32_t)id;
    return STATUS_OK;
}

/* One id or a list of them. */
static enum status read_eos(const char *file, const struct json *value, struct model_config *config,
                            struct error *err)
{
    if (json_kind_of(value) != JSON_KIND_ARRAY) {
        return add_eos(file, value, config, err);
    }
    for (size_t i = 0; i < json_array_n(value); i++) {
        enum status status = add_eos(file, json_array_at(value, i), config, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status read_special_ids(const struct json *root, struct model_config *config,
                                    struct error *err)
{
    double bos;
    enum status status = read_number(root, "config.json", "bos_token_id", 0,
                                     (double)config->vocab_size - 1, true, &bos, err);
    if (status == STATUS_OK) {
        config->bos_id = (uint32_t)bos;
        status = read_eos("config.json", json_get(root, "eos_token_id"), config, err);
    }
    if (status == STATUS_OK && config->n_eos == 0) {
        status = error_set(err, STATUS_INVALID, "config.json: eos_token_id is empty");
    }
    return status;
}

/* What the single bounds can't say. */
static enum status check_together(const struct model_config *config, struct error *err)
{
    if (config->rope_dim % 2 != 0 || config->rope_dim > config->head_dim) {
        return error_set(
            err, STATUS_INVALID,
            "config.json: qk_rope_head_dim is %u, must be even and at most head_dim %u",
            config->rope_dim, config->head_dim);
    }
    if (config->n_heads % config->o_groups != 0) {
        return error_set(err, STATUS_INVALID,
                         "config.json: o_groups %u does not divide num_attention_heads %u",
                         config->o_groups, config->n_heads);
    }
    if ((uint64_t)config->n_heads * config->head_dim > 1 << 20 ||
        (uint64_t)config->o_groups * config->o_lora_rank > 1 << 20 ||
        (uint64_t)config->index_n_heads * config->index_head_dim > 1 << 20) {
        return error_set(err, STATUS_TOO_LARGE,
                         "config.json: heads x head_dim, o_groups x o_lora_rank and index heads x "
                         "width may be at most %d",
                         1 << 20);
    }
    if (config->n_experts_used > config->n_experts) {
        return error_set(err, STATUS_INVALID,
                         "config.json: num_experts_per_tok is %u of n_routed_experts %u",
                         config->n_experts_used, config->n_experts);
    }
    if (config->n_sparse == 0) {
        return STATUS_OK;
    }
    if (config->index_n_heads == 0 || config->index_topk == 0 ||
        config->index_head_dim < config->rope_dim ||
        (config->index_head_dim & (config->index_head_dim - 1)) != 0) {
        return error_set(err, STATUS_INVALID,
                         "config.json: layers of ratio 4 need index_n_heads, index_topk, and an "
                         "index_head_dim that is a power of two and at least qk_rope_head_dim %u; "
                         "it is %u",
                         config->rope_dim, config->index_head_dim);
    }
    return STATUS_OK;
}

static enum status parse_root(const struct json *root, struct model_config *config,
                              struct error *err)
{
    if (json_kind_of(root) != JSON_KIND_OBJECT) {
        return error_set(err, STATUS_CORRUPT, "config.json is not an object");
    }
    enum status status = check_architecture(root, err);
    if (status == STATUS_OK) {
        status = check_fixed(root, err);
    }
    if (status == STATUS_OK) {
        status = check_unknown(root, config, err);
    }
    if (status == STATUS_OK) {
        status = read_fields(root, config, err);
    }
    if (status == STATUS_OK) {
        status = read_layers(root, config, err);
    }
    if (status == STATUS_OK) {
        status = read_rope_scaling(root, config, err);
    }
    if (status == STATUS_OK) {
        status = read_quantisation(root, config, err);
    }
    if (status == STATUS_OK) {
        status = read_special_ids(root, config, err);
    }
    return status == STATUS_OK ? check_together(config, err) : status;
}

/* --- generation_config.json --- */

static enum status read_default(const struct json *root, const char *key, double min, double max,
                                bool is_whole, double *inout, struct error *err)
{
    if (json_kind_of(json_get(root, key)) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    return read_number(root, "generation_config.json", key, min, max, is_whole, inout, err);
}

static enum status read_generation(const struct json *root, struct model_config *config,
                                   struct error *err)
{
    static const char *const known[] = {"temperature",  "top_p",
                                        "top_k",        "min_p",
                                        "do_sample",    "repetition_penalty",
                                        "bos_token_id", "eos_token_id",
                                        "pad_token_id", "transformers_version"};
    if (json_kind_of(root) != JSON_KIND_OBJECT) {
        return error_set(err, STATUS_CORRUPT, "generation_config.json is not an object");
    }
    double temperature = 1, top_p = 1, top_k = 0, min_p = 0, repetition = 1;
    double bos = config->bos_id;
    const struct {
        const char *key;
        double min, max;
        bool is_whole;
        double *to;
    } numbers[] = {
        {"temperature", 0, 100, false, &temperature},
        {"top_p", 0, 1, false, &top_p},
        {"top_k", -1, 1 << 20, true, &top_k},
        {"min_p", 0, 1, false, &min_p},
        {"repetition_penalty", 1e-3, 1e3, false, &repetition},
        {"bos_token_id", config->bos_id, config->bos_id, true, &bos},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        enum status status = read_default(root, numbers[i].key, numbers[i].min, numbers[i].max,
                                          numbers[i].is_whole, numbers[i].to, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    const struct json *sample = json_get(root, "do_sample");
    bool do_sample = true;
    if (sample && !json_bool(sample, &do_sample)) {
        return error_set(err, STATUS_INVALID, "generation_config.json: do_sample is not a boolean");
    }
    const struct json *eos = json_get(root, "eos_token_id");
    if (json_kind_of(eos) != JSON_KIND_NULL) {
        enum status status = read_eos("generation_config.json", eos, config, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    struct json_iter it = json_iterate(root);
    while (json_iterate_next(&it)) {
        if (!IS_IN(it.key, known) && it.key[0] != '_') {
            log_warn("model", "generation_config.json: %s is not a default we know, ignored",
                     it.key);
        }
    }
    config->temperature = do_sample ? (float)temperature : 0;
    config->top_p = (float)top_p;
    config->top_k = top_k > 0 ? (int32_t)top_k : 0;
    config->min_p = (float)min_p;
    config->repetition_penalty = (float)repetition;
    return STATUS_OK;
}

/* --- entries --- */

static enum status parse_trees(const char *name, const struct json *config_root,
                               const struct json *generation_root, struct model_config *ret_config,
                               struct error *err)
{
    struct model_config *config = mem_zalloc(sizeof(*config));
    config->temperature = config->top_p = config->repetition_penalty = 1;
    size_t bytes = strnlen(name, sizeof(config->name) - 1);
    memcpy(config->name, name, bytes);

    enum status status = parse_root(config_root, config, err);
    if (status == STATUS_OK && generation_root) {
        status = read_generation(generation_root, config, err);
    }
    if (status == STATUS_OK) {
        *ret_config = *config;
    }
    mem_free(config);
    return status;
}

enum status model_config_parse(const char *name, const void *config, size_t config_bytes,
                               const void *generation, size_t generation_bytes,
                               struct model_config *ret_config, struct error *err)
{
    const struct json_limits limits = {.max_bytes = MAX_CONFIG_BYTES, .max_depth = 16};
    struct json *config_root = NULL, *generation_root = NULL;
    struct error why;

    enum status status = json_parse(config, config_bytes, &limits, &config_root, &why);
    if (status != STATUS_OK) {
        return error_set(err, STATUS_CORRUPT, "config.json: %s", why.text);
    }
    if (generation) {
        status = json_parse(generation, generation_bytes, &limits, &generation_root, &why);
        if (status != STATUS_OK) {
            json_free(config_root);
            return error_set(err, STATUS_CORRUPT, "generation_config.json: %s", why.text);
        }
    }
    status = parse_trees(name ? name : "model", config_root, generation_root, ret_config, err);
    json_free(generation_root);
    json_free(config_root);
    return status;
}

/* "/a/b/" -> "b"; the folder's real name, so that "." is not a name. */
static char *folder_name(const char *dir)
{
    char *real = realpath(dir, NULL);
    const char *slash = real ? strrchr(real, '/') : NULL;
    char *name = mem_strdup(slash && slash[1] ? slash + 1 : "model");
    free(real);
    return name;
}

/* *ret_root is NULL when the file is not there and that is allowed. */
static enum status load_json(const char *dir, const char *file, size_t max_bytes, bool is_optional,
                             struct json **ret_root, struct error *err)
{
    const struct json_limits limits = {.max_bytes = max_bytes, .max_depth = 32};
    struct error why;
    char *path = mem_printf("%s/%s", dir, file);
    enum status status = STATUS_OK;
    if (is_optional && access(path, F_OK) != 0) {
        *ret_root = NULL;
    } else {
        status = json_parse_file(path, &limits, ret_root, &why);
        if (status != STATUS_OK) {
            error_set(err, status, "%s", why.text);
        }
    }
    mem_free(path);
    return status;
}

enum status model_config_load(const char *dir, struct model_config *ret_config, struct error *err)
{
    struct json *config_root = NULL, *generation_root = NULL;
    enum status status = load_json(dir, "config.json", MAX_CONFIG_BYTES, false, &config_root, err);
    if (status == STATUS_OK) {
        status =
            load_json(dir, "generation_config.json", MAX_CONFIG_BYTES, true, &generation_root, err);
    }
    if (status == STATUS_OK) {
        char *name = folder_name(dir);
        status = parse_trees(name, config_root, generation_root, ret_config, err);
        mem_free(name);
    }
    json_free(generation_root);
    json_free(config_root);
    if (status == STATUS_OK && (ret_config->n_mtp > 0 || ret_config->has_dspark)) {
        /* who loads weights says what of them is left out; nobody else has use for it */
        log_debug("model", "%s has speculative blocks (%s); they are not used", ret_config->name,
                  ret_config->has_dspark ? "dspark" : "mtp");
    }
    return status;
}

/* --- a digest's text --- */

void model_config_describe(const struct model_config *config, struct buf *out)
{
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        const char *from = (const char *)config + fields[i].offset;
        buf_printf(out, "%s ", fields[i].key);
        if (fields[i].kind == FIELD_U32) {
            buf_printf(out, "%u\n", *(const uint32_t *)from);
        } else if (fields[i].kind == FIELD_FLOAT) {
            buf_printf(out, "%.9g\n", (double)*(const float *)from);
        } else {
            buf_printf(out, "%.17g\n", *(const double *)from);
        }
    }
    buf_append_text(out, "compress_ratios");
    for (uint32_t i = 0; i < config->n_layers + config->n_extra_layers; i++) {
        buf_printf(out, " %u", config->layers[i].ratio);
    }
    buf_printf(out, "\nyarn %d %.17g %u %.17g %.17g\n", config->has_yarn, config->yarn_factor,
               config->yarn_original_positions, config->yarn_beta_fast, config->yarn_beta_slow);
    buf_printf(out, "bos %u\n", config->bos_id);
}

/* --- tokenizer.json --- */

static enum status mark_id(const struct json *value, uint32_t vocab_size, uint8_t *seen,
                           uint32_t *inout_n, struct error *err)
{
    char shown[64];
    int64_t id;
    if (!json_int(value, &id) || id < 0) {
        return error_set(err, STATUS_CORRUPT, "tokenizer.json has the id %s", show(value, shown));
    }
    if (id >= vocab_size) {
        return error_set(err, STATUS_INVALID,
                         "tokenizer.json has the id %lld, but config.json says vocab_size %u: the "
                         "two are not of one model",
                         (long long)id, vocab_size);
    }
    *inout_n += !seen[id];
    seen[id] = 1;
    return STATUS_OK;
}

enum status model_config_check_tokenizer(const struct model_config *config, const char *dir,
                                         struct error *err)
{
    struct json *root;
    enum status status = load_json(dir, "tokenizer.json", MAX_TOKENIZER_BYTES, false, &root, err);
    if (status != STATUS_OK) {
        return status;
    }
    uint8_t *seen = mem_array(config->vocab_size, 1);
    uint32_t n = 0;
    struct json_iter it = json_iterate(json_get(json_get(root, "model"), "vocab"));
    while (status == STATUS_OK && json_iterate_next(&it)) {
        status = mark_id(it.value, config->vocab_size, seen, &n, err);
    }
    const struct json *added = json_get(root, "added_tokens");
    for (size_t i = 0; status == STATUS_OK && i < json_array_n(added); i++) {
        status =
            mark_id(json_get(json_array_at(added, i), "id"), config->vocab_size, seen, &n, err);
    }
    if (status == STATUS_OK && n != config->vocab_size) {
        status = error_set(err, STATUS_INVALID,
                           "tokenizer.json names %u ids, but config.json says vocab_size %u: the "
                           "two are not of one model",
                           n, config->vocab_size);
    }
    mem_free(seen);
    json_free(root);
    return status;
}
