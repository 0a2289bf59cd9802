/* The step profile must name a bad kernel. One is put in the place of topk that gives the right
 * entries after making them 100 times over; and a backend with marks of its own is made of the
 * CPU's, so that the way a GPU will take is gone here too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/loop.h"
#include "engine/engine.h"
#include "engine/profile.h"
#include "kernels/ops.h"

enum { BATCH = 2, CONTEXT = 600, TIMES = 100 };

static const char *tiny;

static void bad_topk(struct ops_device *device, const struct ops_rows *rows,
                     const struct ops_layer *layer, const float *iq, const float *iw,
                     const struct ops_kv *kv, struct ops_selection *ret_selection)
{
    for (int i = 0; i < TIMES; i++) { /* work, not time, so that a busy host slows all alike */
        ops_cpu.topk(device, rows, layer, iq, iw, kv, ret_selection);
    }
}

static void with_bad_topk(struct ops *table)
{
    table->topk = bad_topk;
}

static double marks_s[OPS_MAX_MARKS];
static uint32_t n_marks;

static void mark(struct ops_device *device, uint32_t i)
{
    assert_true(i < OPS_MAX_MARKS);
    marks_s[i] = (double)loop_now_ns() * 1e-9;
    n_marks++;
}

static double between_s(struct ops_device *device, uint32_t first, uint32_t last)
{
    return marks_s[last] - marks_s[first];
}

static void with_bad_topk_and_marks(struct ops *table)
{
    table->topk = bad_topk;
    table->mark = mark;
    table->between_s = between_s;
}

static struct engine_profile profile_of(const char *device, void (*alter)(struct ops *table))
{
    struct engine_options options = {
        .kind = "model", .model_dir = tiny, .device = device, .n_threads = 1};
    struct engine_profile_request request = {.batch = BATCH, .context = CONTEXT, .alter = alter};
    struct engine_profile p;
    struct error err = {""};
    if (engine_profile_run(&options, &request, &p, &err)) {
        fail_msg("%s", err.text);
    }
    return p;
}

static const struct engine_profile_line *line_of(const struct engine_profile *p, const char *name)
{
    for (uint32_t i = 0; i < p->n_lines; i++) {
        if (strcmp(p->lines[i].operation, name) == 0) {
            return &p->lines[i];
        }
    }
    fail_msg("no operation '%s' in the profile", name);
    return NULL;
}

/* The same bytes, but for how far the sequences grew in one run's steps and in the other's. */
static void about(double a, double b)
{
    assert_true(a >= 0.9 * b && b >= 0.9 * a);
}

/* What holds of any profile: parts make the whole, longest first, and nothing is negative. */
static void adds_up(const struct engine_profile *p)
{
    double share = 0, us = 0;
    for (uint32_t i = 0; i < p->n_lines; i++) {
        const struct engine_profile_line *l = &p->lines[i];
        assert_true(l->us > 0 && l->bytes >= 0 && l->byte_share >= 0 && l->launches >= 1);
        assert_true(i == 0 || l->us <= p->lines[i - 1].us);
        share += l->share;
        us += l->us;
    }
    assert_true(share > 0 && share <= 1.0001);
    assert_true(us + p->other_us > 0.999 * p->step_us && us + p->other_us < 1.001 * p->step_us);
    assert_true(p->read_bytes_per_s > 0 && p->multiply_adds_per_s > 0 && p->launch_us >= 0);
    assert_true(p->n_steps >= 5);
}

static struct engine_profile one, two; /* as they are, on one device and on two */

/* Launches and bytes are facts of the model: 5 layers, one of them sparse or more. */
static void test_facts(void **state)
{
    one = profile_of("cpu", NULL);
    two = profile_of("cpu:2", NULL);
    adds_up(&one);
    adds_up(&two);
    assert_int_equal((int)line_of(&one, "embed")->launches, 1);
    assert_int_equal((int)line_of(&one, "head")->launches, 1);
    assert_int_equal((int)line_of(&one, "attend")->launches, 5);
    assert_int_equal((int)line_of(&one, "mhc")->launches, 4 * 5);
    assert_int_equal((int)line_of(&two, "attend")->launches, 2 * 5);
    assert_int_equal((int)line_of(&two, "comm")->launches, 2 * 5);
    /* Two ranks share the heads' and experts' weights, and each reads all cache entries. */
    assert_true(line_of(&two, "attend")->bytes > 1.9 * line_of(&one, "attend")->bytes);
    assert_true(line_of(&two, "oproj")->bytes < 1.1 * line_of(&one, "oproj")->bytes);
    assert_true(line_of(&two, "experts")->bytes < 1.1 * line_of(&one, "experts")->bytes);
}

static void names_topk(const struct engine_profile *p)
{
    adds_up(p);
    const struct engine_profile_line *worst = &p->lines[0];
    assert_string_equal(worst->operation, "topk");
    assert_string_equal(worst->bound, "latency");
    assert_true(worst->share > 0.5 && worst->byte_share < 0.01);
}

static void test_names_bad_kernel(void **state)
{
    char text[4096] = "";
    FILE *out = fmemopen(text, sizeof(text) - 1, "w");
    struct engine_profile p = profile_of("cpu", with_bad_topk);
    names_topk(&p);
    assert_non_null(out);
    engine_profile_print(&p, out);
    fclose(out);
    const char *last = strstr(text, "topk takes ");
    assert_non_null(last);
    assert_non_null(strstr(last, "its bound: latency"));
    /* What it had to touch is what the good one has to. */
    about(line_of(&one, "topk")->bytes, line_of(&p, "topk")->bytes);
}

/* Marks in the device's stream in place of the host's clock. */
static void test_marks(void **state)
{
    n_marks = 0;
    struct engine_profile p = profile_of("cpu:2", with_bad_topk_and_marks);
    assert_true(n_marks > 0);
    names_topk(&p);
    assert_int_equal(p.n_lines, two.n_lines);
    for (uint32_t i = 0; i < p.n_lines; i++) {
        const struct engine_profile_line *same = line_of(&two, p.lines[i].operation);
        assert_true(p.lines[i].launches == same->launches);
        if (strcmp(same->operation, "experts") != 0) { /* its bytes follow the tokens drawn */
            about(p.lines[i].bytes, same->bytes);
        }
    }
}

static enum status records_nothing(struct ops_device *const *devices, uint32_t n_devices,
                                   struct error *err)
{
    return error_set(err, STATUS_SYSTEM, "nothing can be kept");
}

static void with_no_recordings(struct ops *table)
{
    table->record_begin = records_nothing;
}

/* A device that should record its steps and can't ends the start, unless nobody asks it to. */
static void test_no_recordings(void **state)
{
    struct engine_options options = {.kind = "model", .model_dir = tiny, .n_threads = 1};
    struct engine_profile_request request = {
        .batch = BATCH, .context = 5, .alter = with_no_recordings};
    struct engine_profile p;
    struct error err = {""};
    assert_int_equal(engine_profile_run(&options, &request, &p, &err), STATUS_SYSTEM);
    assert_non_null(strstr(err.text, "nothing can be kept"));
    assert_non_null(strstr(err.text, "--graphs off"));
    options.no_graphs = true;
    assert_int_equal(engine_profile_run(&options, &request, &p, &err), STATUS_OK);
    assert_true(p.graph_kernels == 0 && p.graph_us == 0);
    adds_up(&p);
}

static void test_refusals(void **state)
{
    struct engine_profile_request request = {.batch = 7};
    struct engine_profile p;
    struct error err = {""};
    static const char *const bad[] = {
        "",     "1",    "1,",   ",1",   "0,1",    "1,0",       "1,2,",
        "1,2x", "-1,2", "1 ,2", "1, 2", "2000,1", "1,9999999", "99999999999999999999,1"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(engine_profile_parse(bad[i], &request, &err), STATUS_INVALID);
        assert_non_null(strstr(err.text, "BATCH,CONTEXT"));
    }
    assert_int_equal(request.batch, 7);
    assert_int_equal(engine_profile_parse("16,8192", &request, &err), STATUS_OK);
    assert_true(request.batch == 16 && request.context == 8192);

    struct engine_options options = {.kind = "sim"};
    request = (struct engine_profile_request){.batch = 1, .context = 1};
    assert_int_equal(engine_profile_run(&options, &request, &p, &err), STATUS_UNSUPPORTED);
    options = (struct engine_options){.kind = "model", .model_dir = tiny};
    request.context = 1 << 20; /* longer than the model goes */
    assert_true(engine_profile_run(&options, &request, &p, &err) != STATUS_OK);
    /* A failed one leaves nothing behind. */
    request.context = 5;
    assert_int_equal(engine_profile_run(&options, &request, &p, &err), STATUS_OK);
    adds_up(&p);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        return 2;
    }
    tiny = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_facts),    cmocka_unit_test(test_names_bad_kernel),
        cmocka_unit_test(test_marks),    cmocka_unit_test(test_no_recordings),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
