/*
 * Weights that no file has: the same bytes from the same seed however they are read, other ones
 * from another; every value a number of the size that its matrix asks for; formats as the official
 * checkpoints have them. Run with a folder that has a config.json.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/made.h"
#include "base/mem.h"
#include "model/synthetic.h"
#include "model/weights.h"

static const char *folder;

static struct weights *load(uint64_t seed, struct model_config *config)
{
    struct error err = {""};
    struct weights *w = NULL;
    if (model_config_load(folder, config, &err) ||
        weights_open_synthetic(seed, config, false, &w, &err) ||
        weights_load(w, NULL, NULL, &err)) {
        fail_msg("%s", err.text);
    }
    return w;
}

/* Root mean square of the first rows. */
static double size_of(const struct weight *w)
{
    double sum = 0;
    uint32_t rows = w->rows < 16 ? w->rows : 16;
    for (uint32_t r = 0; r < rows; r++) {
        for (uint32_t c = 0; c < w->cols; c++) {
            double x = weight_element(w, r, c);
            assert_true(isfinite(x));
            sum += x * x;
        }
    }
    return sqrt(sum / rows / w->cols);
}

static void check_matrix(const struct weight *w, enum weight_format format)
{
    double wanted = 1 / sqrt(w->cols), got = size_of(w);
    if (w->format != format || got < wanted / 2.5 || got > wanted * 2.5) {
        fail_msg("%s: %s, root mean square %g, should be %s near %g", w->name,
                 weight_format_name(w->format), got, weight_format_name(format), wanted);
    }
}

static void test_values(void **state)
{
    struct model_config c;
    struct weights *w = load(7, &c);
    uint32_t n_hash = 0;
    check_matrix(&w->embed, WEIGHT_BF16);
    check_matrix(&w->head, WEIGHT_BF16);
    for (uint32_t i = 0; i < c.n_layers; i++) {
        const struct weights_layer *l = &w->layers[i];
        check_matrix(&l->wq_a, WEIGHT_FP8_BLOCK);
        check_matrix(&l->wo_b, WEIGHT_FP8_BLOCK);
        check_matrix(&l->gate, WEIGHT_BF16);
        check_matrix(&l->shared.w2, WEIGHT_FP8_BLOCK);
        for (uint32_t e = 0; e < c.n_experts; e += c.n_experts - 1) {
            check_matrix(&l->experts[e].w1, WEIGHT_MXFP4);
            check_matrix(&l->experts[e].w2, WEIGHT_MXFP4);
        }
        for (uint32_t k = 0; k < c.hidden_size; k++) {
            assert_true(l->attn_norm[k] >= 0.75f && l->attn_norm[k] <= 1.25f);
        }
        assert_true(memcmp(l->experts[0].w1.data, l->experts[1].w1.data, 64) != 0);
        if (!l->tid2eid) {
            continue;
        }
        n_hash++;
        for (size_t t = 0; t < (size_t)c.vocab_size * c.n_experts_used; t++) {
            assert_true(l->tid2eid[t] < c.n_experts);
        }
    }
    assert_true(n_hash > 0); /* else the ids were not looked at */
    weights_close(w);
}

static void test_seeds(void **state)
{
    struct model_config c;
    struct weights *a = load(7, &c), *b = load(7, &c), *other = load(8, &c);
    size_t bytes = a->head.row_bytes * a->head.rows;
    assert_memory_equal(a->head.data, b->head.data, bytes);
    assert_memory_equal(a->identity, b->identity, 16);
    assert_true(memcmp(a->head.data, other->head.data, bytes) != 0);
    assert_true(memcmp(a->identity, other->identity, 16) != 0);
    weights_close(a);
    weights_close(b);
    weights_close(other);
}

static void test_pieces(void **state)
{
    struct model_config c;
    struct error err = {""};
    assert_int_equal(model_config_load(folder, &c, &err), STATUS_OK);
    struct synthetic *s = synthetic_create(3, &c);
    const uint64_t dims[] = {37, 29};
    static const enum safetensors_dtype dtypes[] = {SAFETENSORS_I8, SAFETENSORS_F8_E4M3,
                                                    SAFETENSORS_F8_E8M0, SAFETENSORS_BF16,
                                                    SAFETENSORS_F32};
    for (size_t k = 0; k < sizeof(dtypes) / sizeof(dtypes[0]); k++) {
        const struct safetensors_tensor *t =
            synthetic_tensor(s, "a.weight", dtypes[k], 2, dims, 29);
        uint8_t *whole = mem_alloc(t->bytes), *parts = mem_alloc(t->bytes);
        assert_int_equal(t->bytes, 37 * 29 * safetensors_dtype_bytes(dtypes[k]));
        synthetic_read(t, 0, t->bytes, whole);
        for (uint64_t at = 0; at < t->bytes; at += 40) {
            synthetic_read(t, at, t->bytes - at < 40 ? t->bytes - at : 40, parts + at);
        }
        assert_memory_equal(whole, parts, t->bytes);
        mem_free(whole);
        mem_free(parts);
    }
    synthetic_free(s);
}

static void check_made(const struct weight *whole, const struct weight *small)
{
    const uint8_t *data = whole->data, *scale = whole->scale;
    assert_true(data && !small->data && !small->scale);
    for (uint64_t at = 0; at + 8 <= whole->rows * whole->row_bytes; at += 1000) {
        uint64_t eight = made_bytes(&small->made, at);
        assert_memory_equal(&eight, data + at, 8); /* of a little-endian host, as everywhere */
    }
    if (scale) {
        uint64_t eight = made_bytes(&small->made_scale, 0);
        assert_memory_equal(&eight, scale, 1);
    }
}

/* What is left out can be made from the slot, and the model is the same one. */
static void test_only_small(void **state)
{
    struct model_config c;
    struct error err = {""};
    struct weights *whole = load(7, &c), *small = NULL;
    assert_int_equal(weights_open_synthetic(7, &c, true, &small, &err), STATUS_OK);
    assert_int_equal(weights_load(small, NULL, NULL, &err), STATUS_OK);
    assert_true(small->total_bytes < whole->total_bytes / 2);
    assert_memory_equal(small->identity, whole->identity, 16);
    check_made(&whole->head, &small->head);
    for (uint32_t i = 0; i < c.n_layers; i++) {
        const struct weights_layer *w = &whole->layers[i], *s = &small->layers[i];
        assert_memory_equal(w->attn_norm, s->attn_norm, c.hidden_size * sizeof(float));
        assert_memory_equal(w->hc_attn.fn, s->hc_attn.fn, 1024);
        check_made(&w->wq_b, &s->wq_b);
        check_made(&w->gate, &s->gate);
        check_made(&w->experts[c.n_experts - 1].w2, &s->experts[c.n_experts - 1].w2);
    }
    weights_close(whole);
    weights_close(small);
}

int main(int argc, char **argv)
{
    folder = argc > 1 ? argv[1] : ".";
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values), cmocka_unit_test(test_seeds),
                                       cmocka_unit_test(test_pieces),
                                       cmocka_unit_test(test_only_small)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
