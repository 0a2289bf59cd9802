/* Stop strings: every case in every way to cut the text in two, and byte by byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "model/stop.h"

struct stop_case {
    const char *stops[STOP_MAX_STRINGS];
    const char *text, *shown;
    bool found;
};

static const struct stop_case cases[] = {
    {{NULL}, "red green blue.", "red green blue.", false},
    {{"blue\nZZ"}, "red green blue.", "red green blue.", false},
    {{"green b"}, "red green blue.", "red ", true},
    {{"\n", "red g"}, "red green blue.", "", true},
    {{"\u00f1"}, "ma\u00f1ana", "ma", true},
    {{"."}, "red green blue.", "red green blue", true},
    {{"red", "green"}, "red green", "", true},
    {{"abcd", "bc"}, "xabcd", "xa", true}, /* ends first */
    {{"bc", "abc"}, "xabcd", "x", true},   /* both end together: starts first */
    {{"aab"}, "aaab", "a", true},          /* overlaps itself */
    {{"abab"}, "ababa", "", true},
    {{"ababc"}, "abababc", "ab", true},
    {{"stop"}, "sto", "sto", false}, /* held to the end */
    {{"stop"}, "stostop", "sto", true},
    {{"x"}, "", "", false},
    {{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "z"},
     "wxyz",
     "wxy",
     true},
};

static size_t count(const struct stop_case *c, size_t bytes[STOP_MAX_STRINGS])
{
    size_t n = 0;
    while (n < STOP_MAX_STRINGS && c->stops[n] != NULL) {
        bytes[n] = strlen(c->stops[n]);
        n++;
    }
    return n;
}

/* Pushes the text in pieces of step bytes after a first one of first bytes. */
static void check(const struct stop_case *c, size_t first, size_t step)
{
    size_t bytes[STOP_MAX_STRINGS], n = count(c, bytes), text_bytes = strlen(c->text);
    struct stop *stop;
    struct buf out = BUF_INIT;
    assert_int_equal(stop_create(c->stops, bytes, n, &stop, NULL), STATUS_OK);
    for (size_t at = 0; at < text_bytes;) {
        size_t piece = at == 0 && first > 0 ? first : step;
        piece = piece < text_bytes - at ? piece : text_bytes - at;
        assert_true(stop_push(stop, c->text + at, piece, &out) == stop_found(stop));
        at += piece;
    }
    stop_finish(stop, &out);
    assert_string_equal(buf_text(&out), c->shown);
    assert_true(stop_found(stop) == c->found);
    stop_free(stop);
    buf_fini(&out);
}

static void test_cases(void **state)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (size_t first = 0; first < strlen(cases[i].text) + 1; first++) {
            check(&cases[i], first, 1000);
            check(&cases[i], first, 1);
            check(&cases[i], first, 2);
        }
    }
}

/* What can't start a stop string is shown at once. */
static void test_holds_no_more_than_needed(void **state)
{
    const char *stops[] = {"<end>"};
    const size_t bytes[] = {5};
    struct stop *stop;
    struct buf out = BUF_INIT;
    assert_int_equal(stop_create(stops, bytes, 1, &stop, NULL), STATUS_OK);
    assert_false(stop_push(stop, "a < b <en", 9, &out));
    assert_string_equal(buf_text(&out), "a < b ");
    assert_false(stop_push(stop, "c", 1, &out));
    assert_string_equal(buf_text(&out), "a < b <enc");
    stop_free(stop);
    buf_fini(&out);
}

static void test_nul(void **state)
{
    const char *stops[] = {"b\0c"};
    const size_t bytes[] = {3};
    struct stop *stop;
    struct buf out = BUF_INIT;
    assert_int_equal(stop_create(stops, bytes, 1, &stop, NULL), STATUS_OK);
    assert_false(stop_push(stop, "ab\0d", 4, &out));
    assert_int_equal(out.bytes, 4);
    assert_true(stop_push(stop, "ab\0c", 4, &out));
    assert_int_equal(out.bytes, 5);
    stop_free(stop);
    buf_fini(&out);
}

static void test_refusals(void **state)
{
    const char *stops[STOP_MAX_STRINGS + 1];
    size_t bytes[STOP_MAX_STRINGS + 1];
    struct stop *stop = NULL;
    struct error err;
    char *longest = mem_zalloc(STOP_MAX_BYTES + 1);
    for (size_t i = 0; i <= STOP_MAX_STRINGS; i++) {
        stops[i] = longest;
        bytes[i] = STOP_MAX_BYTES;
    }
    assert_int_equal(stop_create(stops, bytes, STOP_MAX_STRINGS + 1, &stop, &err), STATUS_INVALID);
    bytes[3] = 0;
    assert_int_equal(stop_create(stops, bytes, STOP_MAX_STRINGS, &stop, &err), STATUS_INVALID);
    bytes[3] = STOP_MAX_BYTES + 1;
    assert_int_equal(stop_create(stops, bytes, STOP_MAX_STRINGS, &stop, &err), STATUS_INVALID);
    assert_null(stop);
    bytes[3] = STOP_MAX_BYTES;
    assert_int_equal(stop_create(stops, bytes, STOP_MAX_STRINGS, &stop, &err), STATUS_OK);
    stop_free(stop);
    stop_free(NULL);
    mem_free(longest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_holds_no_more_than_needed),
        cmocka_unit_test(test_nul),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
