#ifndef BATON_MODEL_CONFIG_H
#define BATON_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * What config.json and generation_config.json of a model folder say, checked: every number is
 * within the bounds below and agrees with the others, so that whoever computes with them needs no
 * check of its own against overflow. Plain data without owner: copy it freely, any thread.
 */

enum {
    MODEL_MAX_LAYERS = 256, /* main layers and speculative blocks together */
    MODEL_MAX_EOS = 16,
    MODEL_MAX_EXPERTS = 4096,
    MODEL_MAX_TOP_K = 32,
    MODEL_SPARSE_RATIO = 4,
    MODEL_HC_MULT = 4,
    MODEL_PAGE_TOKENS = 256, /* every compression ratio divides it */
};

/* How a layer sees what lies before its window. */
enum model_layer_kind {
    MODEL_LAYER_WINDOW, /* ratio 0: not at all */
    MODEL_LAYER_SPARSE, /* ratio 4: an indexer chooses among overlapping entries */
    MODEL_LAYER_HEAVY,  /* another ratio (V4: 128): all entries */
};

struct model_layer {
    enum model_layer_kind kind;
    uint32_t ratio;      /* tokens an entry; 0 for MODEL_LAYER_WINDOW */
    bool is_hash_routed; /* experts by token id and not by score */
};

/* What config.json says about the experts; the tensors' own dtypes decide (weights.h). */
enum model_expert_dtype {
    MODEL_EXPERTS_UNSAID,
    MODEL_EXPERTS_FP4,
    MODEL_EXPERTS_FP8,
};

struct model_config {
    char name[128]; /* last part of the folder's path */

    uint32_t hidden_size;
    uint32_t n_layers; /* main layers */
    uint32_t n_mtp;    /* speculative blocks named by the file; their tensors are not loaded */
    struct model_layer layers[MODEL_MAX_LAYERS]; /* n_layers main ones, then n_extra_layers */
    uint32_t n_extra_layers;                     /* entries of compress_ratios beyond n_layers */
    uint32_t n_sparse, n_heavy, n_hash_layers;   /* among the main layers */
    uint32_t heavy_ratio; /* the one ratio of all heavy layers; 0: there are none */
    uint32_t vocab_size;
    uint32_t max_position_embeddings;

    uint32_t n_heads;
    uint32_t head_dim; /* width of a head and of the one key-value entry, rotated part included */
    uint32_t rope_dim; /* even; the last rope_dim channels are rotated */
    uint32_t q_lora_rank;
    uint32_t o_groups;    /* divides n_heads */
    uint32_t o_lora_rank; /* of one group */
    uint32_t window;      /* tokens, the query's own included */

    uint32_t index_n_heads, index_head_dim, index_topk; /* 0 where no layer is sparse */

    uint32_t n_experts, n_experts_used, expert_width; /* the one shared expert is as wide */
    float route_scale;
    float swiglu_limit; /* 0: no clamp */

    uint32_t hc_mult; /* MODEL_HC_MULT */
    uint32_t hc_sinkhorn_iters;
    float hc_eps;
    float rms_norm_eps;

    double rope_theta, compress_rope_theta;
    bool has_yarn; /* on the layers with compression alone */
    double yarn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_original_positions;

    enum model_expert_dtype expert_dtype;
    bool is_fp8;     /* a quantization_config of fp8 blocks, 128 x 128 */
    bool says_nvfp4; /* and its extension for NVFP4 experts */
    bool has_dspark; /* fields of the later drafter are there */

    uint32_t bos_id;
    uint32_t n_eos;
    uint32_t eos_ids[MODEL_MAX_EOS]; /* of both files, no repeats; the first is the main one */

    /* generation_config.json; what it leaves out has the neutral value */
    float temperature;        /* 1; 0 if do_sample is false */
    float top_p;              /* 1 */
    int32_t top_k;            /* 0: off */
    float min_p;              /* 0: off */
    float repetition_penalty; /* 1 */
};

/*
 * Reads DIR/config.json and, if there is one, DIR/generation_config.json. Errors: NOT_FOUND (no
 * config.json), UNSUPPORTED (an architecture or a feature that is not implemented, named), CORRUPT
 * or INVALID (names the field, what it is and what it may be), TOO_LARGE. Blocking; any thread.
 */
enum status must_check model_config_load(const char *dir, struct model_config *ret_config,
                                         struct error *err);

/* The same from the texts; generation may be NULL. name may be NULL. What the fuzz target calls. */
enum status must_check model_config_parse(const char *name, const void *config, size_t config_bytes,
                                          const void *generation, size_t generation_bytes,
                                          struct model_config *ret_config, struct error *err);

/*
 * Checks that DIR/tokenizer.json names exactly the ids 0 .. vocab_size - 1. Errors: NOT_FOUND,
 * CORRUPT, INVALID (says both numbers).
 */
enum status must_check model_config_check_tokenizer(const struct model_config *config,
                                                    const char *dir, struct error *err);

/*
 * Appends every field that has a part in what the model computes, as lines of text, the same for
 * the same model: what a digest is made of.
 */
void model_config_describe(const struct model_config *config, struct buf *out);

#endif
