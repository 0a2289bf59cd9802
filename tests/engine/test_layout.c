/* Layout: V4-Flash's sizes as the design states them, images that hold what a sequence needs and
 * nothing else, and slices that do not overlap.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "engine/layout.h"

static void add_layer(struct model_config *c, uint32_t ratio)
{
    struct model_layer *layer = &c->layers[c->n_layers++];
    layer->ratio = ratio;
    layer->kind = ratio == 0   ? MODEL_LAYER_WINDOW
                  : ratio == 4 ? MODEL_LAYER_SPARSE
                               : MODEL_LAYER_HEAVY;
    c->n_sparse += ratio == 4;
    c->n_heavy += ratio != 0 && ratio != 4;
}

static struct model_config flash(void)
{
    struct model_config c = {.head_dim = 512, .rope_dim = 64, .index_head_dim = 128, .window = 128};
    add_layer(&c, 0);
    add_layer(&c, 0);
    for (int i = 2; i < 43; i++) {
        add_layer(&c, i % 2 ? 128 : 4);
    }
    return c;
}

static struct layout make(const struct model_config *c, bool exact)
{
    struct layout layout;
    struct error err;
    if (layout_make(c, exact, &layout, &err)) {
        fail_msg("%s", err.text);
    }
    return layout;
}

static void test_flash(void **state)
{
    struct model_config c = flash();
    struct layout l = make(&c, false);
    assert_int_equal(c.n_sparse, 21);
    assert_int_equal(c.n_heavy, 20);
    assert_int_equal(l.page_used_bytes, 899840);
    assert_int_equal(l.page_bytes, 901120);
    assert_int_equal(l.places[2].entry, 0);
    assert_int_equal(l.places[2].entry_scale, 64 * 576);
    assert_int_equal(l.places[2].key, 64 * 584);
    assert_int_equal(l.places[2].key_scale, 64 * 584 + 64 * 64);
    assert_int_equal(l.places[4].entry, 41728);
    assert_int_equal(l.places[42].entry, 20 * 41728);
    assert_int_equal(l.places[3].entry, 21 * 41728);
    assert_int_equal(l.places[41].entry, 21 * 41728 + 38 * 576);
    assert_int_equal(l.places[41].entry_scale, 21 * 41728 + 40 * 576 + 38 * 8);
    assert_int_equal(l.window_bytes, 3415232);
    assert_int_equal(l.state_bytes, 3440640 + 122880);
    assert_int_equal(layout_tail_max_bytes(&l), 4412416);
    assert_int_equal(layout_tail_bytes(&l, 256), 3644416);
    assert_int_equal(layout_tail_bytes(&l, 1 << 20), 3644416);
    assert_int_equal(layout_tail_bytes(&l, 0), 0);
    /* one token: a window row a layer, an open row of each sparse one, a triple of each heavy one
     */
    assert_int_equal(layout_tail_bytes(&l, 1), 43 * 584 + 21 * (8192 + 2048) + 20 * 6144);
}

/* No two parts of a page share a byte, and all lie within it. */
static void test_no_overlap(void **state)
{
    for (int exact = 0; exact < 2; exact++) {
        struct model_config c = flash();
        struct layout l = make(&c, exact);
        uint8_t *taken = mem_zalloc(l.page_bytes);
        size_t n = 0;
        for (uint32_t i = 0; i < l.n_layers; i++) {
            const struct ops_place *p = &l.places[i];
            bool sparse = p->ratio == 4;
            const size_t parts[4][2] = {
                {p->entry, p->entries_a_page * l.entry_bytes},
                {p->entry_scale, p->entries_a_page * l.entry_scale_bytes},
                {p->key, sparse ? p->entries_a_page * l.key_bytes : 0},
                {p->key_scale, sparse ? p->entries_a_page * l.key_scale_bytes : 0}};
            for (int k = 0; k < 4; k++) {
                assert_true(parts[k][0] + parts[k][1] <= l.page_used_bytes);
                for (size_t b = 0; b < parts[k][1]; b++) {
                    assert_int_equal(taken[parts[k][0] + b]++, 0);
                    n++;
                }
            }
        }
        assert_true(n <= l.page_used_bytes && l.page_used_bytes - n < 256 * 22);
        mem_free(taken);
    }
}

/* What is final after n layers: nothing that a later layer writes, and all of the page in the end.
 * V4-Flash's pages are nineteen twentieths slices of sparse layers, so most of a page goes early.
 */
static void test_page_final(void **state)
{
    struct model_config c = flash();
    struct layout l = make(&c, false);
    for (uint32_t n = 0; n <= l.n_layers; n++) {
        size_t bytes = layout_page_final(&l, n);
        assert_true(bytes % 8 == 0 && (n == 0 || bytes >= layout_page_final(&l, n - 1)));
        for (uint32_t i = n; i < l.n_layers; i++) {
            const struct ops_place *p = &l.places[i];
            assert_true(!p->ratio || (p->entry >= bytes && p->entry_scale >= bytes));
            assert_true(p->ratio != 4 || (p->key >= bytes && p->key_scale >= bytes));
        }
    }
    assert_int_equal(layout_page_final(&l, 0), 0);
    assert_int_equal(layout_page_final(&l, 22), 10 * 41728);
    assert_int_equal(layout_page_final(&l, 42), 20 * 41728);
    assert_int_equal(layout_page_final(&l, 43), l.page_bytes);
}

/* Slots filled with random bytes, saved and loaded for many lengths: a second save is the same, and
 * every float a later token reads is there. */
static void test_tail(void **state)
{
    struct model_config c = flash();
    c.n_layers = 5;
    for (int exact = 0; exact < 2; exact++) {
        struct layout l = make(&c, exact);
        uint8_t *window = mem_alloc(l.window_bytes), *st = mem_alloc(l.state_bytes);
        uint8_t *window2 = mem_alloc(l.window_bytes), *st2 = mem_alloc(l.state_bytes);
        size_t most = layout_tail_max_bytes(&l);
        uint8_t *image = mem_alloc(most + 8), *image2 = mem_alloc(most + 8);
        srand(7);
        for (size_t i = 0; i < l.window_bytes; i++) {
            window[i] = (uint8_t)rand();
        }
        for (size_t i = 0; i < l.state_bytes; i++) {
            st[i] = (uint8_t)rand();
        }
        static const uint32_t lengths[] = {1,   2,   3,   4,   5,   37,   48,
                                           127, 128, 129, 255, 256, 1000, 4099};
        for (size_t k = 0; k < sizeof(lengths) / sizeof(lengths[0]); k++) {
            uint32_t n = lengths[k];
            size_t bytes = layout_tail_bytes(&l, n);
            assert_true(bytes <= most && bytes % 8 == 0);
            memset(image, 0xa5, most + 8);
            layout_tail_write(&l, window, st, n, image);
            for (int b = 0; b < 8; b++) {
                assert_int_equal(image[bytes + b], 0xa5);
            }
            memset(window2, 0x5a, l.window_bytes);
            memset(st2, 0x5a, l.state_bytes);
            layout_tail_read(&l, n, image, window2, st2);
            layout_tail_write(&l, window2, st2, n, image2);
            assert_memory_equal(image, image2, bytes);
            for (uint32_t p = n > 127 ? n - 127 : 0; p < n; p++) { /* what the next query sees */
                size_t at = l.places[4].window + p % l.ring * l.entry_bytes;
                assert_memory_equal(window + at, window2 + at, l.entry_bytes);
            }
            for (uint32_t p = n - n % 4; p < n; p++) {
                size_t row = 4 * (size_t)512 * 4, at = l.places[2].state + p % 16 * row;
                assert_memory_equal(st + at, st2 + at, row);
            }
            /* rows that nobody may have seen are as at the start */
            const float *fresh =
                (const float *)(const void *)(st2 + l.places[2].state + (n + 1) % 16 * 4 * 512 * 4);
            assert_true(fresh[0] == 0.0f && isinf(fresh[1024]));
        }
        void *all[] = {window, st, window2, st2, image, image2};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
            mem_free(all[i]);
        }
    }
}

static void test_trim(void **state)
{
    struct model_config c = flash();
    struct layout l = make(&c, false);
    uint8_t *page = mem_alloc(l.page_bytes);
    memset(page, 0xff, l.page_bytes);
    layout_page_trim(&l, page, 2, 512 + 131); /* 32 of 64 entries, 1 of 2 */
    assert_int_equal(page[l.places[2].entry + 32 * 576 - 1], 0xff);
    assert_int_equal(page[l.places[2].entry + 32 * 576], 0);
    assert_int_equal(page[l.places[2].entry_scale - 1], 0);
    assert_int_equal(page[l.places[2].entry_scale + 32 * 8 - 1], 0xff);
    assert_int_equal(page[l.places[2].key + 32 * 64], 0);
    assert_int_equal(page[l.places[2].key + 32 * 64 - 1], 0xff);
    assert_int_equal(page[l.places[2].key_scale + 32 * 4 - 1], 0xff);
    assert_int_equal(page[l.places[2].key_scale + 32 * 4], 0);
    assert_int_equal(page[l.places[3].entry + 575], 0xff);
    assert_int_equal(page[l.places[3].entry + 576], 0);
    assert_int_equal(page[l.places[5].entry], 0xff);
    mem_free(page);
}

static void test_refusals(void **state)
{
    struct model_config c = flash();
    struct layout layout;
    struct error err;
    c.head_dim = 100;
    assert_int_equal(layout_make(&c, false, &layout, &err), STATUS_INVALID);
    assert_non_null(strstr(err.text, "head_dim 100"));
    assert_int_equal(layout_make(&c, true, &layout, &err), STATUS_OK);
    c.head_dim = 512;
    c.index_head_dim = 96;
    assert_int_equal(layout_make(&c, false, &layout, &err), STATUS_INVALID);
}

/* Two layouts that differ anywhere are described differently. */
static void test_describe(void **state)
{
    struct model_config a = flash(), b = flash(), w = flash();
    b.layers[41].ratio = 64;
    w.window = 64;
    struct layout layouts[] = {make(&a, false), make(&a, true), make(&b, false), make(&w, false)};
    struct buf text[4];
    for (int i = 0; i < 4; i++) {
        buf_init(&text[i]);
        layout_describe(&layouts[i], &text[i]);
        for (int j = 0; j < i; j++) {
            assert_false(text[i].bytes == text[j].bytes &&
                         memcmp(text[i].data, text[j].data, text[i].bytes) == 0);
        }
    }
    for (int i = 0; i < 4; i++) {
        buf_fini(&text[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flash),      cmocka_unit_test(test_no_overlap),
        cmocka_unit_test(test_page_final), cmocka_unit_test(test_tail),
        cmocka_unit_test(test_trim),       cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_describe)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
