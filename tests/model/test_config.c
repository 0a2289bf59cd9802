/*
 * config: the official files give the official numbers, and a field that is missing, out of bounds,
 * at odds with another, or unknown, is refused by its name.
 */
#include "model/config.h"

#include <setjmp.h>
#include <stdarg.h>

#include <cmocka.h>

#include "tests/model/folder.h"

/* DeepSeek-V4-Flash of April, as its config.json has it. */
static const char flash_head[] =
    "{\"architectures\": [\"DeepseekV4ForCausalLM\"], \"model_type\": \"deepseek_v4\","
    "\"hidden_size\": 4096, \"num_hidden_layers\": 43, \"num_attention_heads\": 64,"
    "\"num_key_value_heads\": 1, \"head_dim\": 512, \"qk_rope_head_dim\": 64,"
    "\"q_lora_rank\": 1024, \"o_groups\": 8, \"o_lora_rank\": 1024, \"sliding_window\": 128,"
    "\"index_n_heads\": 64, \"index_head_dim\": 128, \"index_topk\": 512,"
    "\"n_routed_experts\": 256, \"num_experts_per_tok\": 6, \"n_shared_experts\": 1,"
    "\"moe_intermediate_size\": 2048, \"scoring_func\": \"sqrtsoftplus\","
    "\"topk_method\": \"noaux_tc\", \"norm_topk_prob\": true, \"routed_scaling_factor\": 1.5,"
    "\"num_hash_layers\": 3, \"hc_mult\": 4, \"hc_sinkhorn_iters\": 20, \"hc_eps\": 1e-06,"
    "\"swiglu_limit\": 10.0, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-06,"
    "\"vocab_size\": 129280, \"num_nextn_predict_layers\": 1,"
    "\"max_position_embeddings\": 1048576, \"rope_theta\": 10000,"
    "\"compress_rope_theta\": 160000, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16,"
    "\"original_max_position_embeddings\": 65536, \"beta_fast\": 32, \"beta_slow\": 1},"
    "\"bos_token_id\": 0, \"eos_token_id\": 1, \"tie_word_embeddings\": false,"
    "\"attention_bias\": false, \"attention_dropout\": 0.0, \"initializer_range\": 0.02,"
    "\"use_cache\": true, \"torch_dtype\": \"bfloat16\", \"transformers_version\": \"4.57.1\","
    "\"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\","
    "\"scale_fmt\": \"ue8m0\", \"activation_scheme\": \"dynamic\","
    "\"weight_block_size\": [128, 128]}, \"compress_ratios\": [0, 0";

static const char flash_generation[] =
    "{\"_from_model_config\": true, \"bos_token_id\": 0, \"eos_token_id\": 1, \"do_sample\": true,"
    "\"temperature\": 1.0, \"top_p\": 1.0, \"transformers_version\": \"4.46.3\"}";

/* With n entries after the 43 of the main layers. */
static void flash_text(struct buf *out, unsigned n_extra)
{
    buf_init(out);
    buf_append_text(out, flash_head);
    for (unsigned i = 2; i < 43; i++) {
        buf_append_text(out, i % 2 ? ", 128" : ", 4");
    }
    for (unsigned i = 0; i < n_extra; i++) {
        buf_append_text(out, ", 0");
    }
    buf_append_text(out, "]}");
}

/* Replaces the one occurrence of old. */
static void text_replace(struct buf *text, const char *old, const char *new)
{
    const char *all = buf_text(text);
    const char *at = strstr(all, old);
    assert_non_null(at);
    struct buf out = BUF_INIT;
    buf_append(&out, all, (size_t)(at - all));
    buf_append_text(&out, new);
    buf_append_text(&out, at + strlen(old));
    buf_fini(text);
    *text = out;
}

static enum status parse(struct buf *text, const char *generation, struct model_config *config,
                         struct error *err)
{
    return model_config_parse("flash", text->data, text->bytes, generation,
                              generation ? strlen(generation) : 0, config, err);
}

static void test_flash(void **state)
{
    struct model_config c;
    struct error err = {""};
    struct buf text;
    flash_text(&text, 1);
    if (parse(&text, flash_generation, &c, &err) != STATUS_OK) {
        fail_msg("%s", err.text);
    }
    assert_string_equal(c.name, "flash");
    assert_int_equal(c.hidden_size, 4096);
    assert_int_equal(c.n_layers, 43);
    assert_int_equal(c.n_sparse, 21);
    assert_int_equal(c.n_heavy, 20);
    assert_int_equal(c.heavy_ratio, 128);
    assert_int_equal(c.n_hash_layers, 3);
    assert_int_equal(c.n_extra_layers, 1);
    assert_int_equal(c.n_mtp, 1);
    assert_int_equal(c.layers[1].kind, MODEL_LAYER_WINDOW);
    assert_int_equal(c.layers[41].kind, MODEL_LAYER_HEAVY);
    assert_int_equal(c.layers[41].ratio, 128);
    assert_int_equal(c.layers[42].kind, MODEL_LAYER_SPARSE); /* the last main layer is not window */
    assert_int_equal(c.layers[43].kind, MODEL_LAYER_WINDOW);
    assert_true(c.layers[2].is_hash_routed);
    assert_false(c.layers[3].is_hash_routed);
    assert_int_equal(c.n_heads, 64);
    assert_int_equal(c.head_dim, 512);
    assert_int_equal(c.rope_dim, 64);
    assert_int_equal(c.index_topk, 512);
    assert_int_equal(c.n_experts, 256);
    assert_int_equal(c.n_experts_used, 6);
    assert_int_equal(c.expert_width, 2048);
    assert_true(c.route_scale == 1.5f);
    assert_true(c.hc_eps == 1e-6f && c.rms_norm_eps == 1e-6f);
    assert_true(c.rope_theta == 10000 && c.compress_rope_theta == 160000);
    assert_true(c.has_yarn && c.yarn_factor == 16 && c.yarn_original_positions == 65536);
    assert_true(c.yarn_beta_fast == 32 && c.yarn_beta_slow == 1);
    assert_int_equal(c.expert_dtype, MODEL_EXPERTS_UNSAID);
    assert_true(c.is_fp8);
    assert_false(c.says_nvfp4);
    assert_int_equal(c.bos_id, 0);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos_ids[0], 1);
    assert_true(c.temperature == 1 && c.top_p == 1 && c.top_k == 0);
    buf_fini(&text);
}

/* One change each to the official file that is still a model we run. */
static void test_variants(void **state)
{
    struct model_config c;
    struct error err = {""};
    struct buf text;

    /* the 0731 release: DSpark */
    flash_text(&text, 3);
    text_replace(&text, "\"use_cache\"",
                 "\"dspark_block_size\": 5, \"dspark_markov_rank\": 256, "
                 "\"expert_dtype\": \"fp4\", \"use_cache\"");
    assert_int_equal(parse(&text, NULL, &c, &err), STATUS_OK);
    assert_true(c.has_dspark);
    assert_int_equal(c.n_extra_layers, 3);
    assert_int_equal(c.expert_dtype, MODEL_EXPERTS_FP4);
    buf_fini(&text);

    /* NVFP4 experts */
    flash_text(&text, 1);
    text_replace(&text, "\"quant_method\"",
                 "\"quant_algo\": \"MIXED_PRECISION\", \"moe_quant_algo\": \"NVFP4\","
                 "\"group_size\": 16, \"kv_cache_quant_algo\": null, \"ignore\": [\"head\"],"
                 "\"quant_method\"");
    assert_int_equal(parse(&text, NULL, &c, &err), STATUS_OK);
    assert_true(c.says_nvfp4);
    buf_fini(&text);

    /* another heavy ratio, no YaRN, nothing quantised, several ends */
    flash_text(&text, 1);
    for (int i = 0; i < 20; i++) {
        text_replace(&text, " 128, 4", " 16, 4");
    }
    text_replace(&text, "\"quantization_config\"", "\"_quantization_config\"");
    text_replace(&text, "\"type\": \"yarn\", \"factor\": 16",
                 "\"rope_type\": \"yarn\", \"factor\": 4");
    text_replace(&text, "\"eos_token_id\": 1", "\"eos_token_id\": [7, 1]");
    assert_int_equal(parse(&text,
                           "{\"do_sample\": false, \"temperature\": 0.6, \"top_p\": 0.95, "
                           "\"top_k\": 50, \"eos_token_id\": [1, 9]}",
                           &c, &err),
                     STATUS_OK);
    assert_int_equal(c.heavy_ratio, 16);
    assert_int_equal(c.layers[3].kind, MODEL_LAYER_HEAVY);
    assert_false(c.is_fp8);
    assert_true(c.yarn_factor == 4);
    assert_int_equal(c.n_eos, 3);
    assert_int_equal(c.eos_ids[0], 7);
    assert_int_equal(c.eos_ids[2], 9);
    assert_true(c.temperature == 0 && c.top_p == 0.95f);
    assert_int_equal(c.top_k, 50);
    buf_fini(&text);

    flash_text(&text, 1);
    text_replace(&text, "\"rope_scaling\": {", "\"rope_scaling\": null, \"_\": {");
    assert_int_equal(parse(&text, NULL, &c, &err), STATUS_OK);
    assert_false(c.has_yarn);
    buf_fini(&text);
}

static void test_refused(void **state)
{
    static const struct {
        const char *old, *new;
        enum status status;
        const char *part;
    } cases[] = {
        {"DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM", STATUS_UNSUPPORTED, "DeepSeek-V4.1"},
        {"DeepseekV4ForCausalLM", "LlamaForCausalLM", STATUS_UNSUPPORTED, "LlamaForCausalLM"},
        {"[\"DeepseekV4ForCausalLM\"]", "[]", STATUS_INVALID, "architectures"},
        {"\"deepseek_v4\"", "\"deepseek_v3\"", STATUS_UNSUPPORTED, "model_type"},
        {"\"use_cache\"", "\"attention_temperature\"", STATUS_UNSUPPORTED,
         "rename it to _attention_temperature"},
        {"\"hidden_size\": 4096", "\"_hidden_size\": 4096", STATUS_INVALID,
         "hidden_size is missing"},
        {"\"hidden_size\": 4096", "\"hidden_size\": 4096.5", STATUS_INVALID,
         "hidden_size is 4096.5"},
        {"\"hidden_size\": 4096", "\"hidden_size\": \"4096\"", STATUS_INVALID, "hidden_size"},
        {"\"hidden_size\": 4096", "\"hidden_size\": -1", STATUS_INVALID, "hidden_size is -1"},
        {"\"hidden_size\": 4096", "\"hidden_size\": 4294967297", STATUS_INVALID, "hidden_size"},
        {"\"hidden_size\": 4096", "\"hidden_size\": 0", STATUS_INVALID, "hidden_size"},
        {"\"num_hidden_layers\": 43", "\"num_hidden_layers\": 42", STATUS_INVALID,
         "compress_ratios has 44 entries"},
        {"\"num_hidden_layers\": 43", "\"num_hidden_layers\": 44", STATUS_INVALID,
         "compress_ratios has 44 entries"},
        {"\"num_hidden_layers\": 43", "\"num_hidden_layers\": 1000000", STATUS_INVALID,
         "num_hidden_layers"},
        {"[0, 0, 4", "[0, 0, 3", STATUS_INVALID, "compress_ratios[2] is 3"},
        {"[0, 0, 4", "[0, 0, 512", STATUS_INVALID, "compress_ratios[2] is 512"},
        {"[0, 0, 4", "[0, 0, 1", STATUS_INVALID, "compress_ratios[2] is 1"},
        {"[0, 0, 4", "[0, 0, 64", STATUS_UNSUPPORTED, "both 64 and 128"},
        {"[0, 0, 4", "[0, 0, null", STATUS_INVALID, "compress_ratios[2] is null"},
        {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2", STATUS_UNSUPPORTED,
         "num_key_value_heads is 2"},
        {"\"sqrtsoftplus\"", "\"sigmoid\"", STATUS_UNSUPPORTED, "scoring_func is \"sigmoid\""},
        {"\"norm_topk_prob\": true", "\"norm_topk_prob\": false", STATUS_UNSUPPORTED,
         "norm_topk_prob"},
        {"\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true", STATUS_UNSUPPORTED,
         "tie_word_embeddings"},
        {"\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", STATUS_UNSUPPORTED, "hidden_act"},
        {"\"hc_mult\": 4", "\"hc_mult\": 2", STATUS_INVALID, "hc_mult is 2"},
        {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 63", STATUS_INVALID, "even"},
        {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 1024", STATUS_INVALID, "head_dim"},
        {"\"qk_rope_head_dim\": 64", "\"qk_rope_head_dim\": 256", STATUS_INVALID, "index_head_dim"},
        {"\"o_groups\": 8", "\"o_groups\": 7", STATUS_INVALID, "o_groups 7"},
        {"\"num_experts_per_tok\": 6", "\"num_experts_per_tok\": 257", STATUS_INVALID,
         "num_experts_per_tok"},
        {"\"n_routed_experts\": 256", "\"n_routed_experts\": 4", STATUS_INVALID,
         "num_experts_per_tok is 6 of n_routed_experts 4"},
        {"\"num_hash_layers\": 3", "\"num_hash_layers\": 44", STATUS_INVALID, "num_hash_layers"},
        {"\"index_head_dim\": 128", "\"index_head_dim\": 96", STATUS_INVALID, "power of two"},
        {"\"index_topk\": 512,", "", STATUS_INVALID, "index_topk"},
        {"\"head_dim\": 512, \"qk",
         "\"head_dim\": 4096, \"_\": 0, \"num_attention_heads_\": 0, \"qk", STATUS_UNSUPPORTED,
         "num_attention_heads_"},
        {"\"num_attention_heads\": 64,", "\"num_attention_heads\": 1024, \"_x\": 1,", STATUS_OK,
         NULL},
        {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 0", STATUS_INVALID, "rms_norm_eps"},
        {"\"swiglu_limit\": 10.0", "\"swiglu_limit\": -1", STATUS_INVALID, "swiglu_limit"},
        {"\"type\": \"yarn\"", "\"type\": \"linear\"", STATUS_UNSUPPORTED, "rope_scaling"},
        {"\"beta_fast\": 32", "\"beta_fast\": 32, \"mscale\": 1.2", STATUS_UNSUPPORTED, "mscale"},
        {"\"beta_slow\": 1}", "\"beta_slow\": 33}", STATUS_INVALID, "beta_slow"},
        {"[128, 128]", "[32, 32]", STATUS_UNSUPPORTED, "weight_block_size"},
        {"\"dynamic\"", "\"static\"", STATUS_UNSUPPORTED, "activation_scheme"},
        {"\"quant_method\": \"fp8\"", "\"quant_method\": \"awq\"", STATUS_UNSUPPORTED,
         "quantization_config"},
        {"\"fmt\": \"e4m3\"", "\"fmt\": \"e4m3\", \"zero_point\": true", STATUS_UNSUPPORTED,
         "zero_point"},
        {"\"use_cache\"", "\"expert_dtype\": \"int4\", \"use_cache\"", STATUS_UNSUPPORTED,
         "expert_dtype is \"int4\""},
        {"\"bos_token_id\": 0", "\"bos_token_id\": 129280", STATUS_INVALID, "bos_token_id"},
        {"\"eos_token_id\": 1", "\"eos_token_id\": 129280", STATUS_INVALID, "eos_token_id"},
        {"\"eos_token_id\": 1", "\"eos_token_id\": []", STATUS_INVALID, "eos_token_id is empty"},
        {"\"eos_token_id\": 1", "\"eos_token_id\": [1, -1]", STATUS_INVALID, "eos_token_id"},
        {"\"hidden_size\": 4096", "\"hidden_size\": 4096, \"hidden_size\": 4096", STATUS_CORRUPT,
         "config.json"},
        {"\"hidden_size\": 4096", "\"hidden_size\": NaN", STATUS_CORRUPT, "config.json"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct model_config c;
        struct error err = {""};
        struct buf text;
        flash_text(&text, 1);
        text_replace(&text, cases[i].old, cases[i].new);
        enum status status = parse(&text, NULL, &c, &err);
        if (status != cases[i].status || (cases[i].part && !strstr(err.text, cases[i].part))) {
            fail_msg("case %zu, %s: %s \"%s\"", i, cases[i].new, status_name(status), err.text);
        }
        buf_fini(&text);
    }
}

static void test_generation_refused(void **state)
{
    static const struct {
        const char *text;
        enum status status;
        const char *part;
    } cases[] = {
        {"[]", STATUS_CORRUPT, "not an object"},
        {"{\"temperature\": -1}", STATUS_INVALID, "temperature"},
        {"{\"temperature\": \"hot\"}", STATUS_INVALID, "temperature"},
        {"{\"top_p\": 1.5}", STATUS_INVALID, "top_p"},
        {"{\"top_k\": 0.5}", STATUS_INVALID, "top_k"},
        {"{\"do_sample\": 1}", STATUS_INVALID, "do_sample"},
        {"{\"bos_token_id\": 1}", STATUS_INVALID, "bos_token_id is 1"},
        {"{\"eos_token_id\": 129280}", STATUS_INVALID, "generation_config.json: eos_token_id"},
        {"{", STATUS_CORRUPT, "generation_config.json"},
        {"{\"temperature\": null, \"unheard_of\": 1}", STATUS_OK, NULL},
    };
    struct buf text;
    flash_text(&text, 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct model_config c;
        struct error err = {""};
        enum status status = parse(&text, cases[i].text, &c, &err);
        if (status != cases[i].status || (cases[i].part && !strstr(err.text, cases[i].part))) {
            fail_msg("%s: %s \"%s\"", cases[i].text, status_name(status), err.text);
        }
    }
    buf_fini(&text);
}

/* CKPT-03: a tokenizer with fewer or more entries than the model, or none. */
static void test_tokenizer(void **state)
{
    static const struct {
        const char *text;
        enum status status;
        const char *part;
    } cases[] = {
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":2}},\"added_tokens\":[{\"id\":3},{\"id\":0}]"
         "}",
         STATUS_OK, NULL},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":2}},\"added_tokens\":[]}", STATUS_INVALID,
         "names 3 ids, but config.json says vocab_size 4"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"d\":3,\"e\":4}}}", STATUS_INVALID,
         "has the id 4, but config.json says vocab_size 4"},
        {"{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"d\":2}}}", STATUS_INVALID,
         "names 3 ids"},
        {"{\"model\":{\"vocab\":{\"a\":-1}}}", STATUS_CORRUPT, "id -1"},
        {"{\"model\":{\"vocab\":{\"a\":\"0\"}}}", STATUS_CORRUPT, "id"},
        {"{}", STATUS_INVALID, "names 0 ids"},
        {"", STATUS_INVALID, "tokenizer.json"},
    };
    struct model_config c = {.vocab_size = 4};
    struct folder folder = folder_create();
    struct error err = {""};
    assert_int_equal(model_config_check_tokenizer(&c, folder.path, &err), STATUS_NOT_FOUND);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        folder_write_text(&folder, "tokenizer.json", cases[i].text);
        enum status status = model_config_check_tokenizer(&c, folder.path, &err);
        if (status != cases[i].status || (cases[i].part && !strstr(err.text, cases[i].part))) {
            fail_msg("%s: %s \"%s\"", cases[i].text, status_name(status), err.text);
        }
    }
    folder_remove(&folder);
}

static void test_folder(void **state)
{
    struct folder folder = folder_create();
    struct model_config c;
    struct error err = {""};
    struct buf text;
    assert_int_equal(model_config_load(folder.path, &c, &err), STATUS_NOT_FOUND);
    assert_non_null(strstr(err.text, "config.json"));
    flash_text(&text, 1);
    folder_write(&folder, "config.json", text.data, text.bytes);
    assert_int_equal(model_config_load(folder.path, &c, &err), STATUS_OK);
    assert_string_equal(c.name, strrchr(folder.path, '/') + 1);
    assert_true(c.temperature == 1 && c.top_p == 1);
    folder_write_text(&folder, "generation_config.json", "{\"temperature\": 0.25}");
    assert_int_equal(model_config_load(folder.path, &c, &err), STATUS_OK);
    assert_true(c.temperature == 0.25f);
    assert_int_equal(mkfifo(folder_file(&folder, "fifo"), 0600), 0);
    assert_int_equal(rename(folder_file(&folder, "fifo"), folder_file(&folder, "config.json")), 0);
    assert_int_not_equal(model_config_load(folder.path, &c, &err), STATUS_OK);
    folder_remove(&folder);
    buf_fini(&text);
}

/* What a digest is made of differs whenever the arithmetic does, and only then. */
static void test_describe(void **state)
{
    static const struct {
        const char *old, *new;
        bool is_same;
    } cases[] = {
        {"\"use_cache\": true", "\"use_cache\": false", true},
        {"\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-05", false},
        {"\"compress_rope_theta\": 160000", "\"compress_rope_theta\": 40000", false},
        {"[0, 0, 4", "[0, 4, 4", false},
        {"\"factor\": 16", "\"factor\": 8", false},
        {"\"index_topk\": 512", "\"index_topk\": 1024", false},
    };
    struct model_config c;
    struct error err = {""};
    struct buf text, first = BUF_INIT;
    flash_text(&text, 1);
    assert_int_equal(parse(&text, NULL, &c, &err), STATUS_OK);
    model_config_describe(&c, &first);
    buf_fini(&text);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct buf other = BUF_INIT;
        flash_text(&text, 1);
        text_replace(&text, cases[i].old, cases[i].new);
        assert_int_equal(parse(&text, NULL, &c, &err), STATUS_OK);
        model_config_describe(&c, &other);
        bool is_same =
            first.bytes == other.bytes && memcmp(first.data, other.data, first.bytes) == 0;
        assert_int_equal(is_same, cases[i].is_same);
        buf_fini(&text);
        buf_fini(&other);
    }
    buf_fini(&first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flash),     cmocka_unit_test(test_variants),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_generation_refused),
        cmocka_unit_test(test_tokenizer), cmocka_unit_test(test_folder),
        cmocka_unit_test(test_describe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
