/*
 * weights: what is loaded is what the files hold, in each format; and a checkpoint that does not
 * fit its config, or holds what is not a number, is refused by the tensor's name. Run with the
 * folders of five toys: official, nvfp4, fp8, bf16, f32.
 */
#include "model/weights.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/safetensors.h"
#include "tests/model/folder.h"

enum { NAME_BYTES = 160 };
enum { OFFICIAL, NVFP4, FP8, BF16, F32, N_TOYS };
static const char *toys[N_TOYS];

static void join(char out[static NAME_BYTES], const char *a, const char *b)
{
    int n = snprintf(out, NAME_BYTES, "%s%s", a, b);
    assert(n >= 0 && n < NAME_BYTES - 1);
}

static struct weights *open_good(const char *dir, struct model_config *config)
{
    struct error err = {""};
    struct weights *weights = NULL;
    if (model_config_load(dir, config, &err) != STATUS_OK ||
        weights_open(dir, config, &weights, &err) != STATUS_OK) {
        fail_msg("%s: %s", dir, err.text);
    }
    return weights;
}

/* --- single values, by the definitions of the formats --- */

static void test_elements(void **state)
{
    static const struct {
        uint8_t code;
        double value;
    } e4m3[] = {{0x00, 0},       {0x01, 0x1p-9}, {0x07, 7 * 0x1p-9}, {0x08, 0x1p-6},
                {0x38, 1},       {0x39, 1.125},  {0x77, 240},        {0x7E, 448},
                {0x81, -0x1p-9}, {0xB8, -1},     {0xFE, -448}};
    for (size_t i = 0; i < sizeof(e4m3) / sizeof(e4m3[0]); i++) {
        const uint8_t scale[] = {127, 130}; /* 1 and 8 */
        uint8_t data[130] = {0};
        data[1] = data[129] = e4m3[i].code;
        struct weight w = {.format = WEIGHT_FP8_BLOCK,
                           .rows = 1,
                           .cols = 130,
                           .row_bytes = 130,
                           .data = data,
                           .scale_format = WEIGHT_SCALE_E8M0,
                           .block_rows = 128,
                           .block_cols = 128,
                           .scale_rows = 1,
                           .scale_cols = 2,
                           .scale = scale,
                           .global_scale = 1};
        assert_true(weight_element(&w, 0, 1) == e4m3[i].value);
        assert_true(weight_element(&w, 0, 129) == 8 * e4m3[i].value);
        const float scale_f32[] = {0.75f, 3};
        w.scale_format = WEIGHT_SCALE_F32;
        w.scale = scale_f32;
        assert_true(weight_element(&w, 0, 1) == 0.75 * e4m3[i].value);
        assert_true(weight_element(&w, 0, 129) == 3 * e4m3[i].value);
    }
    static const double e2m1[16] = {0,   0.5,  1,  1.5,  2,  3,  4,  6,
                                    -0., -0.5, -1, -1.5, -2, -3, -4, -6};
    uint8_t packed[2][32] = {0};
    const uint8_t e8m0[] = {127, 120, 0, 254}; /* rows of two groups */
    const uint8_t e4m3_scale[] = {0x38, 0x40, 0x30, 0x7E, 0x38, 0x38, 0x38, 0x38};
    for (unsigned i = 0; i < 16; i++) {
        packed[0][i] = (uint8_t)(i | (15 - i) << 4); /* column 2 i is i, column 2 i + 1 is 15 - i */
    }
    packed[0][16] = 0x70; /* column 33 */
    packed[1][31] = 0x21; /* columns 62, 63 */
    struct weight w = {.format = WEIGHT_MXFP4,
                       .rows = 2,
                       .cols = 64,
                       .row_bytes = 32,
                       .data = packed,
                       .scale_format = WEIGHT_SCALE_E8M0,
                       .block_rows = 1,
                       .block_cols = 32,
                       .scale_rows = 2,
                       .scale_cols = 2,
                       .scale = e8m0,
                       .global_scale = 1};
    for (unsigned i = 0; i < 16; i++) {
        assert_true(weight_element(&w, 0, 2 * i) == e2m1[i]);
        assert_true(weight_element(&w, 0, 2 * i + 1) == e2m1[15 - i]);
    }
    assert_true(weight_element(&w, 0, 33) == 6 * 0x1p-7);
    assert_true(weight_element(&w, 1, 62) == 0.5 * 0x1p127);
    assert_true(weight_element(&w, 1, 63) == 1 * 0x1p127);
    w.format = WEIGHT_NVFP4;
    w.scale_format = WEIGHT_SCALE_E4M3;
    w.block_cols = 16;
    w.scale_cols = 4;
    w.scale = e4m3_scale;
    w.global_scale = 0.125f;
    assert_true(weight_element(&w, 0, 3) == e2m1[14] * 0.125);     /* scale 1 */
    assert_true(weight_element(&w, 0, 18) == e2m1[9] * 2 * 0.125); /* scale 2 */
    assert_true(weight_element(&w, 0, 33) == 6 * 0.5 * 0.125);     /* scale 0.5 */
    const uint16_t bf16[] = {0x3F80, 0xC2F7};
    struct weight b = {.format = WEIGHT_BF16, .rows = 1, .cols = 2, .row_bytes = 4, .data = bf16};
    assert_true(weight_element(&b, 0, 0) == 1 && weight_element(&b, 0, 1) == -123.5);
}

/* --- what is loaded is what the files hold --- */

struct seen {
    const struct safetensors *st;
    uint64_t bytes; /* of the tensors that were compared */
    size_t n;
};

static void expect_bytes(struct seen *seen, const char *name, const char *suffix, const void *data)
{
    char full[NAME_BYTES];
    struct error err;
    join(full, name, suffix);
    const struct safetensors_tensor *tensor = safetensors_find(seen->st, full);
    assert_non_null(tensor);
    assert_non_null(data);
    assert_int_equal((uintptr_t)data % 64, 0);
    uint8_t *raw = mem_alloc(tensor->bytes);
    assert_int_equal(safetensors_read(seen->st, tensor, 0, tensor->bytes, raw, &err), STATUS_OK);
    assert_memory_equal(raw, data, tensor->bytes);
    mem_free(raw);
    seen->bytes += tensor->bytes;
    seen->n++;
}

static void expect_matrix(struct seen *seen, const struct weight *weight, const char *name)
{
    static const char *const scales[] = {
        [WEIGHT_FP8_BLOCK] = ".scale", [WEIGHT_MXFP4] = ".scale", [WEIGHT_NVFP4] = ".weight_scale"};
    char full[NAME_BYTES];
    join(full, name, ".weight");
    assert_string_equal(weight->name, full);
    expect_bytes(seen, full, "", weight->data);
    if (weight->format >= WEIGHT_FP8_BLOCK) {
        expect_bytes(seen, name, scales[weight->format], weight->scale);
    } else {
        assert_null(weight->scale);
    }
    if (weight->format == WEIGHT_NVFP4) {
        seen->bytes += 8;
        seen->n += 2;
        assert_true(weight->global_scale > 0 && weight->global_scale != 1);
        assert_true(weight->input_scale > 0 && weight->input_scale != 1);
    }
}

/* Widened here by arithmetic, not by bits. */
static void expect_floats(struct seen *seen, const char *prefix, const char *name,
                          const float *values)
{
    char full[NAME_BYTES];
    struct error err;
    join(full, prefix, name);
    const struct safetensors_tensor *tensor = safetensors_find(seen->st, full);
    assert_non_null(tensor);
    assert_non_null(values);
    uint8_t *raw = mem_alloc(tensor->bytes);
    assert_int_equal(safetensors_read(seen->st, tensor, 0, tensor->bytes, raw, &err), STATUS_OK);
    for (size_t i = 0; i < tensor->n_elements; i++) {
        if (tensor->dtype == SAFETENSORS_F32) {
            assert_memory_equal(raw + 4 * i, values + i, 4);
            continue;
        }
        unsigned bits = raw[2 * i] | (unsigned)raw[2 * i + 1] << 8;
        int exponent = (int)(bits >> 7 & 255);
        double value =
            exponent ? ldexp(128 + (bits & 127), exponent - 134) : ldexp(bits & 127, -133);
        assert_true(values[i] == (bits >> 15 ? -value : value));
    }
    mem_free(raw);
    seen->bytes += tensor->bytes;
    seen->n++;
}

static void expect_hc(struct seen *seen, const char *prefix, const char *name,
                      const struct weights_hc *hc)
{
    char full[NAME_BYTES];
    join(full, name, "_fn");
    expect_floats(seen, prefix, full, hc->fn);
    join(full, name, "_base");
    expect_floats(seen, prefix, full, hc->base);
    join(full, name, "_scale");
    expect_floats(seen, prefix, full, hc->scale);
}

static void expect_matrix_at(struct seen *seen, const char *prefix, const char *name,
                             const struct weight *weight)
{
    char full[NAME_BYTES];
    join(full, prefix, name);
    expect_matrix(seen, weight, full);
}

static void expect_compressor(struct seen *seen, const char *prefix, const char *name,
                              const struct weights_compressor *compressor)
{
    char full[NAME_BYTES];
    join(full, prefix, name);
    strcat(full, ".");
    expect_matrix_at(seen, full, "wkv", &compressor->wkv);
    expect_matrix_at(seen, full, "wgate", &compressor->wgate);
    expect_floats(seen, full, "ape", compressor->ape);
    expect_floats(seen, full, "norm.weight", compressor->norm);
}

static void expect_expert_ids(struct seen *seen, const struct model_config *config,
                              const char *prefix, const uint16_t *ids)
{
    char full[NAME_BYTES];
    struct error err;
    join(full, prefix, "ffn.gate.tid2eid");
    const struct safetensors_tensor *tensor = safetensors_find(seen->st, full);
    int64_t *raw = mem_alloc(tensor->bytes);
    assert_int_equal(safetensors_read(seen->st, tensor, 0, tensor->bytes, raw, &err), STATUS_OK);
    for (size_t i = 0; i < (size_t)config->vocab_size * config->n_experts_used; i++) {
        assert_int_equal(ids[i], raw[i]);
    }
    mem_free(raw);
    seen->bytes += tensor->bytes;
    seen->n++;
}

static void expect_layer(struct seen *seen, const struct model_config *config,
                         const struct weights_layer *layer, uint32_t i)
{
    char prefix[64], name[NAME_BYTES];
    snprintf(prefix, sizeof(prefix), "layers.%u.", i);
    expect_hc(seen, prefix, "hc_attn", &layer->hc_attn);
    expect_hc(seen, prefix, "hc_ffn", &layer->hc_ffn);
    expect_floats(seen, prefix, "attn_norm.weight", layer->attn_norm);
    expect_floats(seen, prefix, "ffn_norm.weight", layer->ffn_norm);
    expect_floats(seen, prefix, "attn.attn_sink", layer->attn_sink);
    expect_floats(seen, prefix, "attn.q_norm.weight", layer->q_norm);
    expect_floats(seen, prefix, "attn.kv_norm.weight", layer->kv_norm);
    expect_matrix_at(seen, prefix, "attn.wq_a", &layer->wq_a);
    expect_matrix_at(seen, prefix, "attn.wq_b", &layer->wq_b);
    expect_matrix_at(seen, prefix, "attn.wkv", &layer->wkv);
    expect_matrix_at(seen, prefix, "attn.wo_a", &layer->wo_a);
    expect_matrix_at(seen, prefix, "attn.wo_b", &layer->wo_b);
    if (config->layers[i].kind != MODEL_LAYER_WINDOW) {
        expect_compressor(seen, prefix, "attn.compressor", &layer->compressor);
    } else {
        assert_int_equal(layer->compressor.wkv.format, WEIGHT_NONE);
    }
    if (config->layers[i].kind == MODEL_LAYER_SPARSE) {
        expect_matrix_at(seen, prefix, "attn.indexer.wq_b", &layer->index_wq_b);
        expect_matrix_at(seen, prefix, "attn.indexer.weights_proj", &layer->index_weights_proj);
        expect_compressor(seen, prefix, "attn.indexer.compressor", &layer->index_compressor);
    } else {
        assert_int_equal(layer->index_wq_b.format, WEIGHT_NONE);
    }
    expect_matrix_at(seen, prefix, "ffn.gate", &layer->gate);
    if (config->layers[i].is_hash_routed) {
        assert_null(layer->gate_bias);
        expect_expert_ids(seen, config, prefix, layer->tid2eid);
    } else {
        assert_null(layer->tid2eid);
        expect_floats(seen, prefix, "ffn.gate.bias", layer->gate_bias);
    }
    for (uint32_t e = 0; e <= config->n_experts; e++) {
        const struct weights_expert *expert =
            e < config->n_experts ? &layer->experts[e] : &layer->shared;
        if (e < config->n_experts) {
            snprintf(name, sizeof(name), "%sffn.experts.%u.", prefix, e);
        } else {
            join(name, prefix, "ffn.shared_experts.");
        }
        expect_matrix_at(seen, name, "w1", &expert->w1);
        expect_matrix_at(seen, name, "w2", &expert->w2);
        expect_matrix_at(seen, name, "w3", &expert->w3);
    }
}

static bool count_progress(void *cookie, uint64_t done, uint64_t total)
{
    uint64_t *last = cookie;
    assert_true(done > last[0] && done <= total);
    last[0] = done;
    last[1] = total;
    return true;
}

/* Every tensor but those of speculative blocks is in exactly one slot, bit for bit. */
static void test_loaded(void **state)
{
    static const enum weight_format linear[] = {
        [OFFICIAL] = WEIGHT_FP8_BLOCK, [NVFP4] = WEIGHT_FP8_BLOCK, [FP8] = WEIGHT_FP8_BLOCK,
        [BF16] = WEIGHT_BF16,          [F32] = WEIGHT_F32,
    };
    static const enum weight_format expert[] = {
        [OFFICIAL] = WEIGHT_MXFP4, [NVFP4] = WEIGHT_NVFP4, [FP8] = WEIGHT_FP8_BLOCK,
        [BF16] = WEIGHT_BF16,      [F32] = WEIGHT_F32,
    };
    static const enum weight_scale scale[] = {
        [OFFICIAL] = WEIGHT_SCALE_E8M0, [NVFP4] = WEIGHT_SCALE_E8M0, [FP8] = WEIGHT_SCALE_F32,
        [BF16] = WEIGHT_SCALE_NONE,     [F32] = WEIGHT_SCALE_NONE,
    };
    for (int t = 0; t < N_TOYS; t++) {
        struct model_config config;
        struct error err = {""};
        struct seen seen = {0};
        struct safetensors *st;
        uint64_t progress[2] = {0};
        uint64_t skipped_bytes = 0;
        struct weights *w = open_good(toys[t], &config);
        assert_null(w->embed.data);
        if (weights_load(w, count_progress, progress, &err) != STATUS_OK) {
            fail_msg("%s: %s", toys[t], err.text);
        }
        assert_int_equal(progress[0] > 0, 1);
        assert_int_equal(w->loaded_bytes, w->total_bytes);
        assert_int_equal(safetensors_open(toys[t], &st, &err), STATUS_OK);
        seen.st = st;
        expect_matrix(&seen, &w->embed, "embed");
        expect_matrix(&seen, &w->head, "head");
        expect_floats(&seen, "", "norm.weight", w->norm);
        expect_hc(&seen, "", "hc_head", &w->hc_head);
        for (uint32_t i = 0; i < w->n_layers; i++) {
            expect_layer(&seen, &config, &w->layers[i], i);
            assert_int_equal(w->layers[i].wq_b.format, linear[t]);
            assert_int_equal(w->layers[i].wq_b.scale_format, scale[t]);
            assert_int_equal(w->layers[i].experts[1].w2.format, expert[t]);
        }
        for (size_t i = 0; i < safetensors_n(st); i++) {
            if (strncmp(safetensors_at(st, i)->name, "mtp.", 4) == 0) {
                skipped_bytes += safetensors_at(st, i)->bytes;
            }
        }
        assert_int_equal(seen.n + w->n_skipped, safetensors_n(st));
        assert_int_equal(seen.bytes + skipped_bytes, safetensors_data_bytes(st));
        safetensors_close(st);
        weights_close(w);
    }
}

static void test_shapes(void **state)
{
    struct model_config config;
    struct weights *w = open_good(toys[OFFICIAL], &config);
    const struct weights_layer *layer = &w->layers[1];
    assert_int_equal(layer->wo_a.rows, config.o_groups * config.o_lora_rank);
    assert_int_equal(layer->wo_a.cols, config.n_heads * config.head_dim / config.o_groups);
    assert_int_equal(layer->wq_b.scale_rows, 2); /* 256 rows */
    assert_int_equal(layer->experts[0].w1.cols, config.hidden_size);
    assert_int_equal(layer->experts[0].w1.row_bytes, config.hidden_size / 2);
    assert_int_equal(layer->experts[0].w1.scale_cols, config.hidden_size / 32);
    assert_int_equal(layer->shared.w1.rows, 64); /* part of a tile */
    assert_int_equal(layer->shared.w1.scale_rows, 1);
    assert_int_equal(layer->compressor.wkv.rows, 2 * config.head_dim);
    assert_int_equal(w->layers[2].compressor.wkv.rows, config.head_dim);
    weights_close(w);
}

/* By layer, released, and loaded again. */
static void test_by_layer(void **state)
{
    struct model_config config;
    struct error err = {""};
    struct weights *w = open_good(toys[OFFICIAL], &config);
    assert_int_equal(weights_load_layer(w, 1, &err), STATUS_OK);
    assert_null(w->layers[0].wq_a.data);
    assert_null(w->norm);
    double before = weight_element(&w->layers[1].wq_a, 5, 7);
    uint64_t bytes = w->loaded_bytes;
    assert_true(bytes > 0 && bytes < w->total_bytes);
    weights_release_layer(w, 1);
    weights_release_layer(w, 1);
    assert_null(w->layers[1].wq_a.data);
    assert_null(w->layers[1].attn_sink);
    assert_int_equal(w->loaded_bytes, 0);
    assert_int_equal(weights_load_layer(w, 99, &err), STATUS_INVALID);
    assert_int_equal(weights_load_globals(w, &err), STATUS_OK);
    assert_non_null(w->norm);
    assert_int_equal(weights_load(w, NULL, NULL, &err), STATUS_OK);
    assert_true(weight_element(&w->layers[1].wq_a, 5, 7) == before);
    assert_int_equal(w->loaded_bytes, w->total_bytes);
    weights_release_globals(w);
    assert_null(w->embed.data);
    weights_close(w);
}

static bool stop_at_once(void *cookie, uint64_t done, uint64_t total)
{
    return false;
}

static void test_stopped(void **state)
{
    struct model_config config;
    struct error err = {""};
    struct weights *w = open_good(toys[OFFICIAL], &config);
    assert_int_equal(weights_load(w, stop_at_once, NULL, &err), STATUS_CANCELLED);
    assert_int_equal(w->loaded_bytes, 0);
    assert_int_equal(weights_load(w, NULL, NULL, &err), STATUS_OK);
    weights_close(w);
}

/* CKPT-02: the files shrink to nothing under a running server. */
static void test_cut_while_loaded(void **state)
{
    struct folder folder = folder_create();
    struct model_config config;
    struct error err = {""};
    folder_copy(toys[F32], &folder);
    struct weights *w = open_good(folder.path, &config);
    assert_int_equal(weights_load(w, NULL, NULL, &err), STATUS_OK);
    double before = 0, after = 0;
    for (int pass = 0; pass < 2; pass++) {
        double sum = 0;
        for (uint32_t r = 0; r < w->embed.rows; r++) {
            sum += weight_element(&w->embed, r, r % w->embed.cols);
        }
        for (uint32_t i = 0; i < w->n_layers; i++) {
            sum += weight_element(&w->layers[i].wq_b, i, i) + w->layers[i].attn_sink[0];
        }
        *(pass ? &after : &before) = sum;
        for (int s = 1; s <= 3; s++) {
            char name[64];
            snprintf(name, sizeof(name), "model-%05d-of-00003.safetensors", s);
            assert_int_equal(truncate(folder_file(&folder, name), 0), 0);
        }
    }
    assert_true(before == after && before != 0);
    weights_release_layer(w, 0);
    assert_int_equal(weights_load_layer(w, 0, &err), STATUS_CORRUPT);
    assert_non_null(strstr(err.text, "bytes short"));
    weights_close(w);
    folder_remove(&folder);
}

/* --- refused --- */

static const char *shard_holding(const struct folder *folder, const char *name,
                                 uint64_t *ret_offset)
{
    static char shard[64];
    struct safetensors *st;
    struct error err;
    assert_int_equal(safetensors_open(folder->path, &st, &err), STATUS_OK);
    const struct safetensors_tensor *tensor = safetensors_find(st, name);
    assert_non_null(tensor);
    snprintf(shard, sizeof(shard), "%s", safetensors_shard_name(st, tensor->shard_i));
    *ret_offset = tensor->offset;
    safetensors_close(st);
    return shard;
}

static void folder_patch(const struct folder *folder, const char *tensor, size_t at,
                         const void *bytes, size_t n)
{
    uint64_t offset;
    const char *shard = shard_holding(folder, tensor, &offset);
    FILE *f = fopen(folder_file(folder, shard), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)(offset + at), SEEK_SET), 0);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

/* Opens and loads; expects the first failure. */
static void expect_refused(const struct folder *folder, const char *case_name, enum status wanted,
                           const char *part)
{
    struct model_config config;
    struct error err = {""};
    struct weights *w = NULL;
    enum status status = model_config_load(folder->path, &config, &err);
    if (status == STATUS_OK) {
        status = weights_open(folder->path, &config, &w, &err);
    }
    if (status == STATUS_OK) {
        status = weights_load(w, NULL, NULL, &err);
    }
    if (status != wanted || (part && !strstr(err.text, part))) {
        fail_msg("%s: %s \"%s\", wanted %s with \"%s\"", case_name, status_name(status), err.text,
                 status_name(wanted), part ? part : "");
    }
    weights_close(w);
}

/* CKPT-03: names, shapes, dtypes and counts. `file` is the one to change; "*" is every shard and
 * the index. */
static void test_structure_refused(void **state)
{
    static const struct {
        const char *name, *file, *old, *new;
        enum status status;
        const char *part;
    } cases[] = {
        {"a tensor is missing", "*", "layers.2.attn.wq_a.weight", "layers.2.attn.wq_x.weight",
         STATUS_NOT_FOUND, "layers.2.attn.wq_a.weight is missing"},
        {"a scale is missing", "*", "layers.2.attn.wq_a.scale", "layers.2.attn.wq_a.skale",
         STATUS_NOT_FOUND, "layers.2.attn.wq_a.scale is missing"},
        {"an expert's scale is missing", "*", "layers.0.ffn.experts.3.w2.scale",
         "layers.0.ffn.experts.3.w2.skale", STATUS_NOT_FOUND,
         "layers.0.ffn.experts.3.w2.scale is missing"},
        {"names of another library", "*", "\"embed.weight\"", "\"model.embed_tokens.weight\"",
         STATUS_UNSUPPORTED, "model.embed_tokens.weight"},
        {"shape", "*", "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[128,128]",
         "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[64,256]", STATUS_CORRUPT,
         "layers.0.attn.wq_a.weight in model-00001-of-00003.safetensors is F8_E4M3 of [64, 256], "
         "config.json makes it [128, 128]"},
        {"dimensions", "*", "\"layers.0.attn.attn_sink\":{\"dtype\":\"F32\",\"shape\":[2]",
         "\"layers.0.attn.attn_sink\":{\"dtype\":\"F32\",\"shape\":[1,2]", STATUS_CORRUPT,
         "config.json makes it [2]"},
        {"dtype of a vector", "*", "\"layers.0.attn.attn_sink\":{\"dtype\":\"F32\"",
         "\"layers.0.attn.attn_sink\":{\"dtype\":\"I32\"", STATUS_UNSUPPORTED,
         "is I32, must be F32 or BF16"},
        {"dtype of a matrix", "*", "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\"",
         "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"F8_E5M2\"", STATUS_UNSUPPORTED,
         "is F8_E5M2, must be F8_E4M3, BF16 or F32"},
        {"FP4 where it can't be", "*", "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\"",
         "\"layers.0.attn.wq_a.weight\":{\"dtype\":\"I8\"", STATUS_UNSUPPORTED, "is I8, must be"},
        {"dtype of a scale", "*", "\"layers.0.attn.wq_a.scale\":{\"dtype\":\"F8_E8M0\"",
         "\"layers.0.attn.wq_a.scale\":{\"dtype\":\"U8\"", STATUS_UNSUPPORTED,
         "must be F8_E8M0 or F32"},
        {"fewer layers", "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2",
         STATUS_INVALID, "compress_ratios"},
        {"fewer layers, consistently", "config.json", "\"num_nextn_predict_layers\": 1",
         "\"num_nextn_predict_layers\": 2", STATUS_INVALID, "compress_ratios"},
        {"more experts", "config.json", "\"n_routed_experts\": 4", "\"n_routed_experts\": 5",
         STATUS_CORRUPT, "layers.0.ffn.gate.weight"},
        {"vocabulary", "config.json", "\"vocab_size\": 320", "\"vocab_size\": 321", STATUS_CORRUPT,
         "embed.weight"},
        {"hash layers", "config.json", "\"num_hash_layers\": 2", "\"num_hash_layers\": 1",
         STATUS_NOT_FOUND, "layers.1.ffn.gate.bias is missing"},
        {"width", "config.json", "\"hidden_size\": 128", "\"hidden_size\": 256", STATUS_CORRUPT,
         "config.json makes it [320, 256]"},
        {"heads", "config.json", "\"num_attention_heads\": 2", "\"num_attention_heads\": 4",
         STATUS_CORRUPT, "layers.0.attn.attn_sink"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct folder folder = folder_create();
        folder_copy(toys[OFFICIAL], &folder);
        if (cases[i].file[0] != '*') {
            folder_replace(&folder, cases[i].file, cases[i].old, cases[i].new);
        } else {
            struct safetensors *st;
            struct error err;
            const char *end = strchr(cases[i].old + 1, '"');
            char name[96];
            snprintf(name, sizeof(name), "%.*s", end ? (int)(end - cases[i].old - 1) : 95,
                     cases[i].old + (cases[i].old[0] == '"'));
            uint64_t offset;
            const char *shard = shard_holding(&folder, name, &offset);
            struct buf data;
            folder_read(folder_file(&folder, shard), &data);
            uint64_t json_bytes = get_le64(data.data);
            struct buf head = BUF_INIT;
            buf_append(&head, data.data + 8, json_bytes);
            const char *at = strstr(buf_text(&head), cases[i].old);
            assert_non_null(at);
            struct buf out = BUF_INIT;
            uint8_t length[8];
            put_le64(length, json_bytes - strlen(cases[i].old) + strlen(cases[i].new));
            buf_append(&out, length, 8);
            buf_append(&out, head.data, (size_t)(at - (const char *)head.data));
            buf_append_text(&out, cases[i].new);
            buf_append_text(&out, at + strlen(cases[i].old));
            buf_append(&out, data.data + 8 + json_bytes, data.bytes - 8 - json_bytes);
            folder_write(&folder, shard, out.data, out.bytes);
            buf_fini(&out);
            buf_fini(&head);
            buf_fini(&data);
            if (!strchr(cases[i].old, ':')) { /* a name: the index has it too */
                folder_replace(&folder, "model.safetensors.index.json", cases[i].old, cases[i].new);
            }
            if (safetensors_open(folder.path, &st, &err) != STATUS_OK) {
                fail_msg("%s: the test itself broke the file: %s", cases[i].name, err.text);
            }
            safetensors_close(st);
        }
        expect_refused(&folder, cases[i].name, cases[i].status, cases[i].part);
        folder_remove(&folder);
    }
}

/* The config has one layer less than the checkpoint, in all its fields. */
static void test_layer_too_many(void **state)
{
    struct folder folder = folder_create();
    folder_copy(toys[OFFICIAL], &folder);
    folder_replace(&folder, "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    folder_replace(&folder, "config.json", "  16,\n", "");
    expect_refused(&folder, "a layer too many", STATUS_CORRUPT, "layers.2.");
    folder_remove(&folder);
}

static void test_values_refused(void **state)
{
    static const struct {
        const char *name;
        int toy;
        const char *tensor;
        size_t at, n;
        const char *bytes, *part;
    } cases[] = {
        {"E8M0 255", OFFICIAL, "layers.1.ffn.experts.2.w1.scale", 5, 1, "\377",
         "element 5 (F8_E8M0)"},
        {"E8M0 255, block", OFFICIAL, "layers.1.attn.wq_b.scale", 1, 1, "\377", "wq_b.scale"},
        {"E4M3 NaN", OFFICIAL, "layers.1.attn.wq_a.weight", 777, 1, "\177",
         "layers.1.attn.wq_a.weight in model-0000"},
        {"E4M3 negative NaN", OFFICIAL, "layers.1.attn.wq_a.weight", 16383, 1, "\377",
         "element 16383 (F8_E4M3)"},
        {"bf16 infinity", BF16, "layers.0.attn.wkv.weight", 20, 2, "\200\177", "element 10 (BF16)"},
        {"bf16 NaN in a norm", BF16, "norm.weight", 6, 2, "\1\177", NULL},
        {"bf16 NaN in the middle", BF16, "layers.2.attn_norm.weight", 6, 2, "\300\377",
         "layers.2.attn_norm.weight"},
        {"f32 NaN", F32, "layers.2.attn.attn_sink", 4, 4, "\0\0\300\177", "element 1 (F32)"},
        {"f32 infinity", F32, "head.weight", 400, 4, "\0\0\200\377", "element 100 (F32)"},
        {"E4M3 NaN in a scale", NVFP4, "layers.0.ffn.experts.0.w3.weight_scale", 9, 1, "\177",
         "element 9 (F8_E4M3)"},
        {"NaN in a float scale", FP8, "layers.0.ffn.experts.1.w2.scale", 0, 4, "\0\0\300\377",
         "element 0 (F32)"},
        {"factor 0", NVFP4, "layers.0.ffn.experts.0.w3.weight_scale_2", 0, 4, "\0\0\0\0",
         "must be above 0"},
        {"factor NaN", NVFP4, "layers.0.ffn.experts.0.w3.input_scale", 0, 4, "\0\0\300\177",
         "must be above 0"},
        {"expert out of range", OFFICIAL, "layers.1.ffn.gate.tid2eid", 16 * 100, 8,
         "\4\0\0\0\0\0\0\0", "token 100 has expert 4 of 4"},
        {"negative expert", OFFICIAL, "layers.1.ffn.gate.tid2eid", 16 * 319 + 8, 8,
         "\377\377\377\377\377\377\377\377", "token 319 has expert -1 of 4"},
        {"65536 too many", OFFICIAL, "layers.1.ffn.gate.tid2eid", 16, 8, "\0\0\1\0\0\0\0\0",
         "token 1 has expert 65536"},
        {"expert twice", OFFICIAL, "layers.0.ffn.gate.tid2eid", 16 * 7, 16,
         "\2\0\0\0\0\0\0\0\2\0\0\0\0\0\0", "token 7 has expert 2 twice"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct folder folder = folder_create();
        folder_copy(toys[cases[i].toy], &folder);
        folder_patch(&folder, cases[i].tensor, cases[i].at, cases[i].bytes, cases[i].n);
        /* 0x7F01 is 1.7e38: large, and a number */
        expect_refused(&folder, cases[i].name, cases[i].part ? STATUS_CORRUPT : STATUS_OK,
                       cases[i].part);
        folder_remove(&folder);
    }
}

/* --- identity --- */

static void identity_of(const char *dir, uint8_t ret[16])
{
    struct model_config config;
    struct weights *w = open_good(dir, &config);
    memcpy(ret, w->identity, 16);
    weights_close(w);
}

static void test_identity(void **state)
{
    uint8_t first[16], again[16], other[16];
    struct folder folder = folder_create();
    identity_of(toys[OFFICIAL], first);
    folder_copy(toys[OFFICIAL], &folder);
    identity_of(folder.path, again);
    assert_memory_equal(first, again, 16);

    /* neither the shards' names nor the spelling of the config are part of it */
    assert_int_equal(rename(folder_file(&folder, "model-00001-of-00003.safetensors"),
                            folder_file(&folder, "one")),
                     0);
    folder_replace(&folder, "model.safetensors.index.json", "model-00001-of-00003.safetensors",
                   "one");
    folder_replace(&folder, "config.json", "\"hidden_act\"", "\"use_cache\": true, \"hidden_act\"");
    identity_of(folder.path, again);
    assert_memory_equal(first, again, 16);

    /* what a tensor of more than a sample holds in its middle is, */
    folder_patch(&folder, "embed.weight", 320 * 128, "\1\2\3", 3);
    identity_of(folder.path, again);
    assert_memory_not_equal(first, again, 16);

    /* and so are a small one and a field of the config */
    folder_patch(&folder, "layers.1.attn.attn_sink", 0, "\1\2\3", 3);
    identity_of(folder.path, other);
    assert_memory_not_equal(again, other, 16);
    folder_replace(&folder, "config.json", "\"routed_scaling_factor\": 1.5",
                   "\"routed_scaling_factor\": 2.5");
    identity_of(folder.path, again);
    assert_memory_not_equal(other, again, 16);
    assert_memory_not_equal(first, again, 16);
    folder_remove(&folder);
}

int main(int argc, char **argv)
{
    if (argc != 1 + N_TOYS) {
        fprintf(stderr, "usage: %s TOY-OFFICIAL TOY-NVFP4 TOY-FP8 TOY-BF16 TOY-F32\n", argv[0]);
        return 1;
    }
    memcpy(toys, argv + 1, sizeof(toys));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elements),
        cmocka_unit_test(test_loaded),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_by_layer),
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_cut_while_loaded),
        cmocka_unit_test(test_structure_refused),
        cmocka_unit_test(test_layer_too_many),
        cmocka_unit_test(test_values_refused),
        cmocka_unit_test(test_identity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
