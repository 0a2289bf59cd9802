#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hmap.h"

static char values[4096]; /* addresses serve as values */

/* Random work, against plain arrays that say what the map should hold and in which order. */
static void test_against_model(void **state)
{
    enum { KEYS = 500 };
    struct hmap *map = hmap_create();
    void *model[KEYS] = {NULL};
    unsigned order[KEYS], n = 0, seed = 7;
    for (int step = 0; step < 60000; step++) {
        /* The share of removals swings, so that the map grows and empties several times. */
        unsigned key = (unsigned)rand_r(&seed) % KEYS;
        char text[16];
        snprintf(text, sizeof(text), "key-%u", key);
        if ((unsigned)rand_r(&seed) % 100 < (step / 5000 % 2 ? 80u : 20u)) {
            assert_ptr_equal(hmap_remove_text(map, text), model[key]);
            for (unsigned i = 0; model[key] != NULL && i < n; i++) {
                if (order[i] == key) {
                    memmove(order + i, order + i + 1, (n - i - 1) * sizeof(order[0]));
                    n--;
                    break;
                }
            }
            model[key] = NULL;
        } else {
            void *value = &values[(unsigned)rand_r(&seed) % sizeof(values)];
            assert_ptr_equal(hmap_put_text(map, text, value), model[key]);
            if (model[key] == NULL) {
                order[n++] = key;
            }
            model[key] = value;
        }
        assert_int_equal(hmap_n(map), n);
        if (step % 997 != 0) {
            continue;
        }
        const void *got;
        size_t position = 0, bytes, i = 0;
        void *value;
        while (hmap_next(map, &position, &got, &bytes, &value)) {
            snprintf(text, sizeof(text), "key-%u", order[i]);
            assert_int_equal(bytes, strlen(text));
            assert_memory_equal(got, text, bytes);
            assert_ptr_equal(value, model[order[i]]);
            assert_ptr_equal(hmap_get_text(map, text), value);
            i++;
        }
        assert_int_equal(i, n);
    }
    hmap_free(map);
}

static void test_remove_while_stepping(void **state)
{
    struct hmap *map = hmap_create();
    for (uint64_t i = 0; i < 1000; i++) {
        assert_null(hmap_put_u64(map, i, &values[i]));
    }
    size_t position = 0, seen = 0;
    const void *key;
    void *value;
    while (hmap_next(map, &position, &key, NULL, &value)) {
        uint64_t number;
        memcpy(&number, key, sizeof(number));
        if (number % 3 != 0) {
            assert_ptr_equal(hmap_remove_u64(map, number), value);
        }
        seen++;
    }
    assert_int_equal(seen, 1000);
    assert_int_equal(hmap_n(map), 334);
    assert_null(hmap_get_u64(map, 1));
    assert_ptr_equal(hmap_get_u64(map, 999), &values[999]);
    hmap_free(map);
    hmap_free(NULL);
}

static void test_odd_keys(void **state)
{
    struct hmap *map = hmap_create();
    assert_null(hmap_get(map, "", 0));
    assert_null(hmap_put(map, NULL, 0, &values[0]));
    assert_null(hmap_put(map, "\0", 1, &values[1]));
    assert_null(hmap_put(map, "\0\0", 2, &values[2]));
    assert_null(hmap_put(map, "a\0b", 3, &values[3]));
    assert_null(hmap_get(map, "a", 1));
    assert_ptr_equal(hmap_get(map, "", 0), &values[0]);
    assert_ptr_equal(hmap_get(map, "\0\0", 2), &values[2]);
    assert_ptr_equal(hmap_put(map, "\0", 1, &values[9]), &values[1]);
    assert_int_equal(hmap_n(map), 4);
    hmap_free(map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_model),
        cmocka_unit_test(test_remove_while_stepping),
        cmocka_unit_test(test_odd_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
