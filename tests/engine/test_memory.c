/* The memory sum: what is planned is what an engine then has taken, and what the refusal says would
 * fit does fit, while one more of it does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "engine/memory.h"
#include "engine/model_load.h"

static const char *golden, *tiny;
#ifdef BATON_CUDA
static const char *flash;
#endif

struct taken {
    uint64_t device, slots, pages, empty, image, copies;
};

static void note_taken(void *cookie, const char *item, size_t bytes)
{
    struct taken *t = cookie;
    if (strncmp(item, "pages", 5) == 0) {
        t->pages += bytes;
    } else if (strcmp(item, "windows") == 0 || strcmp(item, "states") == 0) {
        t->slots += bytes;
    } else if (strcmp(item, "empty slot") == 0) {
        t->empty += bytes;
    } else if (strcmp(item, "slot image") == 0) {
        t->image += bytes;
    } else if (strcmp(item, "page copies") == 0) {
        t->copies += bytes;
    } else {
        t->device += bytes;
    }
}

static uint64_t planned(const struct engine_memory *memory, const char *name)
{
    for (uint32_t i = 0; i < memory->n_items; i++) {
        if (strcmp(memory->items[i].name, name) == 0) {
            return memory->items[i].n * memory->items[i].each;
        }
    }
    fail_msg("no item '%s'", name);
    return 0;
}

static void same_as_taken(const struct engine_options *options)
{
    struct engine_memory memory;
    struct engine *engine;
    struct error err = {""};
    struct taken taken = {0};
    if (engine_memory_plan(options, &memory, &err) || engine_open(options, NULL, &engine, &err)) {
        fail_msg("%s", err.text);
    }
    engine_memory_report(engine, note_taken, &taken);
    const struct engine_info *info = engine_info(engine);
    if (strcmp(options->kind, "model") == 0) {
        assert_int_equal(planned(&memory, "weights") + planned(&memory, "scratch") +
                             planned(&memory, "rows of a call"),
                         taken.device);
        assert_int_equal(planned(&memory, "sequence slots"), taken.slots);
        assert_int_equal(planned(&memory, "logits"),
                         (info->max_batch_rows + 1ull) * info->vocab_size * sizeof(float));
    }
    assert_int_equal(planned(&memory, "pages"), taken.pages);
    if (options->apart) {
        assert_int_equal(planned(&memory, "empty slot"), taken.empty);
        assert_int_equal(planned(&memory, "slot image"), taken.image);
        assert_true(taken.empty > 0 && 2 * taken.image >= taken.empty); /* of two devices at most */
    } else {
        assert_int_equal(taken.empty + taken.image, 0);
    }
    if (options->apart && options->sends) {
        assert_int_equal(planned(&memory, "page copies"), taken.copies);
        assert_int_equal(taken.copies, info->n_pages * info->page_bytes);
    } else {
        assert_int_equal(taken.copies, 0);
    }
    assert_int_equal(memory.page_bytes, info->page_bytes);
    assert_int_equal(memory.tail_bytes, info->tail_bytes);
    engine_close(engine);
}

static void test_planned_is_taken(void **state)
{
    char toy[512], toy_fp8[512];
    snprintf(toy, sizeof(toy), "%s/toy", golden);
    snprintf(toy_fp8, sizeof(toy_fp8), "%s/toy_fp8", golden);
    struct engine_options o = {.kind = "model", .model_dir = tiny};
    same_as_taken(&o); /* every default */
    o.n_threads = 3;
    o.device = "cpu:2";
    o.max_sequences = 5;
    o.n_pages = 7;
    o.max_chunk_tokens = 100;
    same_as_taken(&o);
    o.device = "cpu";
    o.sends = true;
    same_as_taken(&o);
    o.apart = true;
    same_as_taken(&o);
    o.sends = false;
    same_as_taken(&o);
    o.device = "cpu:2"; /* each with pages and slots of its own */
    same_as_taken(&o);
    o.sends = true;
    same_as_taken(&o);
    o.sends = false;
    o.apart = false;
    o.device = "cpu:2";
    o.max_batch_rows = 40; /* more than sequences, and with a chunk of fewer rows */
    o.max_chunk_tokens = 30;
    o.exact = true;
    same_as_taken(&o);
    o = (struct engine_options){.kind = "model", .model_dir = toy, .exact = true, .n_threads = 1};
    same_as_taken(&o);
    o.max_context_tokens = 100;
    o.max_batch_rows = 1;
    o.max_chunk_tokens = 1;
    same_as_taken(&o);
    o = (struct engine_options){.kind = "model", .model_dir = toy_fp8, .n_threads = 2};
    same_as_taken(&o);
    o.weights = "synthetic:7";
    same_as_taken(&o);
    o = (struct engine_options){
        .kind = "model", .model_dir = tiny, .n_threads = 2, .n_pages = 3, .rank = "1/2"};
    same_as_taken(&o);
    o = (struct engine_options){
        .kind = "sim", .sim_page_bytes = 8192, .sim_tail_bytes = 64, .n_pages = 3};
    same_as_taken(&o);
    o.n_pages = 0;
    same_as_taken(&o);
}

static void test_refusals_of_a_plan(void **state)
{
    struct engine_memory memory = {.n_items = 99};
    struct error err = {""};
    struct engine_options o = {.kind = "model", .model_dir = "/nonexistent"};
    assert_int_equal(engine_memory_plan(&o, &memory, &err), STATUS_NOT_FOUND);
    o.model_dir = tiny;
    o.device = "cpu:3";
    assert_int_equal(engine_memory_plan(&o, &memory, &err), STATUS_INVALID);
    o.device = "cpu";
    o.weights = "synthetic:";
    assert_int_equal(engine_memory_plan(&o, &memory, &err), STATUS_INVALID);
    assert_int_equal(memory.n_items, 99);
}

static uint64_t weights_of(const struct engine_options *options)
{
    struct engine_memory memory;
    struct error err = {""};
    if (engine_memory_plan(options, &memory, &err)) {
        fail_msg("%s", err.text);
    }
    return planned(&memory, "weights");
}

/* Ranks that run alone take what they take in their group; each has an embedding, of which a group
 * here has one. */
static void test_ranks(void **state)
{
    struct engine_options o = {.kind = "model", .model_dir = tiny, .n_threads = 1};
    struct engine_memory memory;
    struct error err = {""};
    uint64_t whole = weights_of(&o);
    o.rank = "0/1";
    assert_int_equal(weights_of(&o), whole);
    o.device = "cpu:2";
    o.rank = NULL;
    uint64_t group = weights_of(&o);
    o.device = "cpu";
    o.rank = "0/2";
    uint64_t ranks = weights_of(&o);
    o.rank = "1/2";
    ranks += weights_of(&o);
    struct model_config *config = mem_zalloc(sizeof(*config));
    assert_int_equal(model_config_load(tiny, config, &err), STATUS_OK);
    assert_int_equal(ranks - group, (uint64_t)config->vocab_size * config->hidden_size * 2);
    mem_free(config);
    static const char *const bad[] = {"", "2/2", "0", "0/", "/2", "-1/2", "0/2x", "0/3", "0/99"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        o.rank = bad[i];
        assert_int_equal(engine_memory_plan(&o, &memory, &err), STATUS_INVALID);
    }
    o.device = "cpu:2";
    o.rank = "0/2";
    assert_int_equal(engine_memory_plan(&o, &memory, &err), STATUS_INVALID);
}

/* The value behind `option` in the text of a refusal, or -1. */
static long long advised(const struct error *err, const char *option)
{
    const char *at = strstr(err->text, option);
    return at ? strtoll(at + strlen(option), NULL, 10) : -1;
}

static struct engine_memory made_up(uint64_t n_pages, uint64_t n_slots, uint64_t n_landing)
{
    struct engine_memory memory = {.n_items = 0};
    engine_memory_add(&memory, "weights", NULL, 1, 1000, false);
    engine_memory_add(&memory, "sequence slots", "--max-sequences", n_slots, 7, false);
    engine_memory_add(&memory, "pages", "--pages", n_pages, 50, false);
    engine_memory_add(&memory, "landing slots", "--landing-slots", n_landing, 50, false);
    return memory;
}

static void test_advice(void **state)
{
    struct error err = {""};
    struct engine_memory memory = made_up(100, 16, 4);
    uint64_t sum = 1000 + 16 * 7 + 5000 + 200;
    assert_int_equal(engine_memory_sum(&memory, false), sum);
    assert_int_equal(engine_memory_sum(&memory, true), 0);
    assert_int_equal(engine_memory_check(&memory, sum, "x", &err), STATUS_OK);
    assert_int_equal(engine_memory_check(&memory, sum - 1, "x", &err), STATUS_EXHAUSTED);
    assert_int_equal(advised(&err, "--pages "), 99);

    /* Each limit: what is said fits, and one more of it does not. */
    for (uint64_t limit = 1107; limit < sum; limit += 13) {
        assert_int_equal(engine_memory_check(&memory, limit, "the limit", &err), STATUS_EXHAUSTED);
        assert_non_null(strstr(err.text, "the limit"));
        long long pages = advised(&err, "--pages "), slots = advised(&err, "--max-sequences "),
                  landing = advised(&err, "--landing-slots ");
        assert_true(pages >= 1);
        struct engine_memory less = made_up((uint64_t)pages, slots < 0 ? 16 : (uint64_t)slots,
                                            landing < 0 ? 4 : (uint64_t)landing);
        assert_int_equal(engine_memory_check(&less, limit, "x", NULL), STATUS_OK);
        less.items[slots >= 0 ? 1 : (landing >= 0 ? 3 : 2)].n++;
        assert_int_equal(engine_memory_check(&less, limit, "x", NULL), STATUS_EXHAUSTED);
    }
    /* With one of each it takes 1,107. */
    assert_int_equal(engine_memory_check(&memory, 1106, "x", &err), STATUS_EXHAUSTED);
    assert_null(strstr(err.text, "--"));
    assert_non_null(strstr(err.text, "with the least of everything"));

    /* The device's own memory, and numbers that would wrap. */
    engine_memory_add(&memory, "weights there", NULL, 1, 500, true);
    memory.device_free_bytes = 499;
    snprintf(memory.device, sizeof(memory.device), "cuda:0");
    assert_int_equal(engine_memory_check(&memory, sum, "x", &err), STATUS_EXHAUSTED);
    assert_non_null(strstr(err.text, "cuda:0"));
    memory.device_free_bytes = 500;
    assert_int_equal(engine_memory_check(&memory, sum, "x", &err), STATUS_OK);
    memory.items[2].n = UINT64_MAX / 2;
    assert_true(engine_memory_sum(&memory, false) == UINT64_MAX);
    assert_int_equal(engine_memory_check(&memory, UINT64_MAX - 1, "x", &err), STATUS_EXHAUSTED);
}

#ifdef BATON_CUDA
/* What a GPU would take, summed without one: packed FP8 and FP4 keep the checkpoint's bytes, so the
 * weights come to what the files hold and a little for what is widened or padded. */
static void test_cuda_plan(void **state)
{
    struct model_config *config = mem_zalloc(sizeof(*config));
    struct layout *layout = mem_zalloc(sizeof(*layout));
    struct model_load_plan plan, small;
    struct registry_choice choice = {
        .ops = &ops_cuda, .n_devices = 1, .n_ranks = 1, .devices_i = {250}};
    struct ops_limits limits = {
        .n_rows = 512, .n_seqs = 16, .n_tokens = 8192, .page_tokens = 256, .only_plan = true};
    struct error err = {""};
    assert_int_equal(model_config_load(tiny, config, &err), STATUS_OK);
    assert_int_equal(layout_make(config, false, layout, &err), STATUS_OK);
    limits.heavy_ratio = config->heavy_ratio;
    if (model_load_plan(&choice, config, layout, tiny, NULL, false, &limits, true, &plan, &err)) {
        fail_msg("%s", err.text);
    }
    assert_true(plan.scratch_bytes > 0 && plan.scratch_bytes % (64 << 20) == 0); /* whole blocks */
    limits.n_rows = 65536;
    assert_int_equal(
        model_load_plan(&choice, config, layout, tiny, NULL, false, &limits, false, &small, &err),
        STATUS_OK);
    assert_true(small.weights_bytes == 0 && small.scratch_bytes > plan.scratch_bytes);
    mem_free(layout);
    mem_free(config);
}

/* On a GPU each, ranks have room for the others' parts; sharing one they read them where they lie.
 */
static void test_group_plan(void **state)
{
    struct model_config *config = mem_zalloc(sizeof(*config));
    struct layout *layout = mem_zalloc(sizeof(*layout));
    struct model_load_plan apart, together;
    struct registry_choice choice = {.ops = &ops_cuda, .n_devices = 2, .n_ranks = 2, .apart = true};
    struct ops_limits limits = {
        .n_rows = 4096, .n_seqs = 16, .n_tokens = 8192, .page_tokens = 256, .only_plan = true};
    struct error err = {""};
    assert_int_equal(model_config_load(flash, config, &err), STATUS_OK);
    assert_int_equal(layout_make(config, false, layout, &err), STATUS_OK);
    limits.heavy_ratio = config->heavy_ratio;
    if (model_load_plan(&choice, config, layout, NULL, NULL, false, &limits, false, &together,
                        &err)) {
        fail_msg("%s", err.text);
    }
    choice.devices_i[1] = 1;
    if (model_load_plan(&choice, config, layout, NULL, NULL, false, &limits, false, &apart, &err)) {
        fail_msg("%s", err.text);
    }
    uint64_t parts = UINT64_C(2) * 2 * limits.n_rows * config->hidden_size * sizeof(float);
    assert_true(apart.scratch_bytes >= together.scratch_bytes + parts);
    assert_true(apart.scratch_bytes < 2 * (together.scratch_bytes + parts)); /* whole blocks */
    /* Rank 0 alone has the shared expert's lanes. */
    assert_true(apart.uneven_bytes > 0 && apart.uneven_bytes < apart.scratch_bytes / 2);
    choice.n_devices = choice.n_ranks = 3;
    choice.devices_i[2] = 1; /* two on one GPU, one on another */
    config->n_heads = config->o_groups = config->n_experts = 12;
    assert_int_equal(
        model_load_plan(&choice, config, layout, NULL, NULL, false, &limits, false, &apart, &err),
        STATUS_UNSUPPORTED);
    mem_free(layout);
    mem_free(config);
}

/* V4-Flash's own shape: of 160 GB a rank of two takes half of what is shared. */
static void test_flash_plan(void **state)
{
    struct model_config *config = mem_zalloc(sizeof(*config));
    struct layout *layout = mem_zalloc(sizeof(*layout));
    struct model_load_plan plan;
    struct registry_choice choice = {.ops = &ops_cuda, .n_devices = 1, .n_ranks = 1};
    struct ops_limits limits = {
        .n_rows = 512, .n_seqs = 16, .n_tokens = 8320, .page_tokens = 256, .only_plan = true};
    struct error err = {""};
    assert_int_equal(model_load_rank("0/2", &choice, &err), STATUS_OK);
    assert_int_equal(model_config_load(flash, config, &err), STATUS_OK);
    assert_int_equal(layout_make(config, false, layout, &err), STATUS_OK);
    assert_int_equal(layout->page_bytes, 901120);
    limits.heavy_ratio = config->heavy_ratio;
    if (model_load_plan(&choice, config, layout, flash, "synthetic:1", false, &limits, true, &plan,
                        &err)) {
        fail_msg("%s", err.text);
    }
    printf("V4-Flash, rank 0 of 2: %.1f GB of weights, %.2f GB of scratch\n",
           (double)plan.weights_bytes * 1e-9, (double)plan.scratch_bytes * 1e-9);
    assert_true(plan.weights_bytes > UINT64_C(78000000000));
    assert_true(plan.weights_bytes < UINT64_C(90000000000));
    assert_true(plan.scratch_bytes < UINT64_C(8000000000));
    mem_free(layout);
    mem_free(config);
}
#endif

int main(int argc, char **argv)
{
    if (argc < 4) {
        return 2;
    }
    golden = argv[1];
    tiny = argv[2];
#ifdef BATON_CUDA
    flash = argv[3];
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_planned_is_taken), cmocka_unit_test(test_refusals_of_a_plan),
        cmocka_unit_test(test_advice),           cmocka_unit_test(test_ranks),
#ifdef BATON_CUDA
        cmocka_unit_test(test_cuda_plan),        cmocka_unit_test(test_flash_plan),
        cmocka_unit_test(test_group_plan),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
