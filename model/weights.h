#ifndef BATON_MODEL_WEIGHTS_H
#define BATON_MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/made.h"
#include "base/status.h"
#include "model/config.h"

/*
 * The weights of a model in host memory, by slot. Shapes, dtypes and the presence of every tensor
 * are checked when they are opened, values when they are loaded. Nothing here is sharded: weights
 * are whole, and a rank takes its rows, columns, heads, groups or experts by the strides below. A
 * host that can't hold the model loads, uploads and releases layer by layer.
 *
 * Two forms. Matrices that are multiplied with stay as the file has them (struct weight). What the
 * arithmetic uses as fp32 and is small (norms, sinks, ape, biases, all of the hyper-connections)
 * is widened to fp32, exactly, and given as const float *. Every pointer is aligned to 64 bytes.
 */

enum weight_format {
    WEIGHT_NONE,      /* this layer has no such tensor */
    WEIGHT_F32,       /* float, row-major */
    WEIGHT_BF16,      /* uint16_t, row-major */
    WEIGHT_FP8_BLOCK, /* E4M3 bytes; a scale for each tile of 128 x 128, the last may be partial */
    WEIGHT_MXFP4,     /* two E2M1 a byte, even column in the low nibble; E8M0 scale per 1 x 32 */
    WEIGHT_NVFP4,     /* the same nibbles; E4M3 scale per 1 x 16, times global_scale */
};

enum weight_scale {
    WEIGHT_SCALE_NONE,
    WEIGHT_SCALE_E8M0, /* byte b: 2^(b-127); 255 never occurs */
    WEIGHT_SCALE_F32,
    WEIGHT_SCALE_E4M3, /* NaN never occurs */
};

/*
 * W [rows = outputs, cols = inputs], maps x to x W^T. element (r, c) of an FP8 or FP4 matrix has
 * scale[(r / block_rows) * scale_cols + c / block_cols]. row_bytes is cols * 4, 2, 1 or cols / 2.
 * Owned by struct weights; data and scale are NULL while not loaded.
 */
struct weight {
    const char *name; /* "layers.3.attn.wq_b.weight" */
    enum weight_format format;
    uint32_t rows, cols;
    size_t row_bytes;
    const void *data;
    enum weight_scale scale_format;
    uint32_t block_rows, block_cols, scale_rows, scale_cols;
    const void *scale;
    float global_scale;           /* NVFP4: weight_scale_2; else 1 */
    float input_scale;            /* NVFP4: of the static activation quantiser; else 1 */
    struct made made, made_scale; /* of synthetic weights: how to make what data and scale hold */
};

/* hc_attn_*, hc_ffn_*: rows x (4 D), rows, and 3 factors; of the head: 4 rows and 1 factor. */
struct weights_hc {
    const float *fn, *base, *scale;
};

/* attn.compressor or attn.indexer.compressor; c = 2 for ratio 4, else 1. d: head or index width. */
struct weights_compressor {
    struct weight wkv, wgate; /* [c d, D] */
    const float *ape;         /* [ratio, c d] */
    const float *norm;        /* [d] */
};

struct weights_expert {
    struct weight w1, w3; /* gate and up, [width, D] */
    struct weight w2;     /* down, [D, width] */
};

struct weights_layer {
    struct weights_hc hc_attn, hc_ffn; /* fn [24, 4 D], base [24], scale [3] */
    const float *attn_norm, *ffn_norm; /* [D] */

    const float *attn_sink; /* [n_heads] */
    struct weight wq_a;     /* [q_lora_rank, D] */
    const float *q_norm;    /* [q_lora_rank] */
    struct weight wq_b;     /* [n_heads head_dim, q_lora_rank] */
    struct weight wkv;      /* [head_dim, D] */
    const float *kv_norm;   /* [head_dim] */
    struct weight wo_a;     /* [o_groups o_lora_rank, n_heads / o_groups head_dim], by group */
    struct weight wo_b;     /* [D, o_groups o_lora_rank] */

    struct weights_compressor compressor; /* sparse and heavy layers */
    struct weight index_wq_b;             /* sparse: [index_n_heads index_head_dim, q_lora_rank] */
    struct weight index_weights_proj;     /* sparse: [index_n_heads, D] */
    struct weights_compressor index_compressor; /* sparse */

    struct weight gate;             /* [n_experts, D] */
    const float *gate_bias;         /* [n_experts]; NULL where hash routed */
    const uint16_t *tid2eid;        /* [vocab_size, n_experts_used], distinct in a row; else NULL */
    struct weights_expert *experts; /* n_experts */
    struct weights_expert shared;
};

/* Written only by the functions below. Owner: whoever opened it. */
struct weights {
    uint32_t n_layers, n_experts;
    struct weight embed, head;    /* [vocab_size, D] */
    const float *norm;            /* [D] */
    struct weights_hc hc_head;    /* fn [4, 4 D], base [4], scale [1] */
    struct weights_layer *layers; /* n_layers */

    uint8_t identity[16];      /* of config, names, dtypes, shapes, and 4 KiB of every tensor; or
                                 of config and seed */
    uint64_t total_bytes;      /* host memory of everything loaded */
    uint64_t loaded_bytes;     /* of what is loaded now */
    uint32_t n_skipped;        /* tensors of speculative blocks, which are not loaded */
    uint64_t skipped_bytes;    /* theirs; loading the globals says so */
    struct weights_file *file; /* private */
};

/* Bytes read so far of the bytes of this load; false stops it (STATUS_CANCELLED). */
typedef bool (*weights_progress_fn)(void *cookie, uint64_t done_bytes, uint64_t total_bytes);

/*
 * Opens the checkpoint in dir, checks names, shapes and dtypes against config (copied) and fills in
 * every slot but its data. Errors: as safetensors_open; NOT_FOUND names a missing tensor and where
 * it was looked for; CORRUPT or UNSUPPORTED a tensor, its shape or dtype and what was expected.
 * Blocking; the struct may be read by any thread once it is loaded.
 */
enum status must_check weights_open(const char *dir, const struct model_config *config,
                                    struct weights **ret_weights, struct error *err);

/*
 * The same slots without a checkpoint: random values from seed (model/synthetic.h), matrices in the
 * official formats: FP8, experts MXFP4 where their width allows it, BF16 where those are not.
 * only_small: matrices of struct weight stay without data, for who makes them where they are used.
 */
enum status must_check weights_open_synthetic(uint64_t seed, const struct model_config *config,
                                              bool only_small, struct weights **ret_weights,
                                              struct error *err);

/*
 * Loads everything that is not loaded yet. progress may be NULL. Errors: EXHAUSTED (says how many
 * bytes were needed), CORRUPT (a value that can't be: NaN, infinity, an expert out of range or
 * twice in a row of tid2eid; or a file cut meanwhile), CANCELLED. On error nothing is lost of what
 * was loaded before.
 */
enum status must_check weights_load(struct weights *weights, weights_progress_fn progress,
                                    void *cookie, struct error *err);

/* embed, head, norm and hc_head alone. */
enum status must_check weights_load_globals(struct weights *weights, struct error *err);
enum status must_check weights_load_layer(struct weights *weights, uint32_t layer_i,
                                          struct error *err);

/* Gives the memory back; data pointers of the group become NULL. Loaded or not. */
void weights_release_globals(struct weights *weights);
void weights_release_layer(struct weights *weights, uint32_t layer_i);

/* NULL is allowed. */
void weights_close(struct weights *weights);

/* "fp8", "mxfp4", ...: for the start-up table. */
const char *weight_format_name(enum weight_format format);

/* Element (row, col) as a double; slow, for tests and small tools. Loaded, and in range. */
double weight_element(const struct weight *weight, uint32_t row, uint32_t col);

#endif
