#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"

static struct json *parse(const char *text)
{
    struct json *value = NULL;
    struct error err = {""};
    enum status status = json_parse(text, strlen(text), NULL, &value, &err);
    if (status != STATUS_OK) {
        fail_msg("%s: %s", text, err.text);
    }
    return value;
}

static void refuse(const void *text, size_t bytes, const struct json_limits *limits,
                   enum status want, const char *want_text)
{
    struct json *value = (struct json *)(void *)&value;
    struct json *before = value;
    struct error err = {""};
    assert_int_equal(json_parse(text, bytes, limits, &value, &err), want);
    assert_ptr_equal(value, before); /* written only on success */
    if (strstr(err.text, want_text) == NULL) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, want_text);
    }
}

static void test_reading(void **state)
{
    struct json *root = parse("{\"z\": [1, 2.0, \"a\\u0000b\", null, true, {}], \"a\": -7,"
                              " \"n\": null, \"\": \"empty\"}");
    int64_t integer = 5;
    double number;
    bool flag;
    size_t bytes;
    const struct json *list = json_get(root, "z");
    assert_int_equal(json_object_n(root), 4);
    assert_int_equal(json_array_n(list), 6);
    assert_true(json_int(json_array_at(list, 0), &integer));
    assert_int_equal(integer, 1);
    assert_false(json_int(json_array_at(list, 1), &integer)); /* 2.0 is no integer */
    assert_int_equal(integer, 1);
    assert_true(json_number(json_array_at(list, 1), &number));
    assert_true(number == 2.0);
    assert_true(json_number(json_get(root, "a"), &number));
    assert_true(number == -7.0);
    const char *text = json_text(json_array_at(list, 2), &bytes);
    assert_int_equal(bytes, 3);
    assert_memory_equal(text, "a\0b", 4);
    assert_false(json_text_is(json_array_at(list, 2), "a"));
    assert_true(json_text_is(json_get(root, ""), "empty"));
    assert_true(json_bool(json_array_at(list, 4), &flag) && flag);
    assert_non_null(json_get(root, "n"));
    assert_int_equal(json_kind_of(json_get(root, "n")), JSON_KIND_NULL);
    assert_null(json_get(root, "absent"));
    assert_null(json_array_at(list, 6));
    /* Whatever the kind, also none: no reader steps on it. */
    const struct json *values[] = {NULL, root, list, json_array_at(list, 0),
                                   json_array_at(list, 3)};
    for (size_t i = 0; i < 5; i++) {
        assert_false(json_bool(values[i], &flag));
        assert_null(json_text(values[i], &bytes));
        assert_null(json_get(values[i], "k"));
        assert_null(json_array_at(values[i], 99));
        assert_string_not_equal(json_kind_name(json_kind_of(values[i])), "unknown");
    }
    json_free(root);
    json_free(NULL);
}

static void test_order(void **state)
{
    /* Far more members than one resize of any table, in an order that no sort would give. */
    struct buf text = BUF_INIT;
    for (unsigned i = 0; i < 5000; i++) {
        buf_printf(&text, "%s\"k%u\":%u", i ? "," : "{", i * 7919u % 5000u, i);
    }
    buf_append_byte(&text, '}');
    struct json *root = parse(buf_text(&text));
    struct json_iter iter = json_iterate(root);
    unsigned seen = 0;
    while (json_iterate_next(&iter)) {
        char key[16];
        int64_t value;
        snprintf(key, sizeof(key), "k%u", seen * 7919u % 5000u);
        assert_string_equal(iter.key, key);
        assert_int_equal(iter.key_bytes, strlen(key));
        assert_true(json_int(iter.value, &value) && value == seen);
        seen++;
    }
    assert_int_equal(seen, 5000);
    assert_false(json_iterate_next(&iter));
    iter = json_iterate(NULL);
    assert_false(json_iterate_next(&iter));
    json_free(root);
    buf_fini(&text);
}

static void test_refused(void **state)
{
    static const char *const bad[] = {"\"\xff\"",
                                      "\"\xc0\x80\"",
                                      "\"\xed\xa0\x80\"",
                                      "\"\xf4\x90\x80\x80\"",
                                      "\"\xe2\x82\"",
                                      "{1:2}",
                                      "]",
                                      "\"\\u12\""};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        refuse(bad[i], strlen(bad[i]), NULL, STATUS_INVALID, "line 1 column ");
    }
    refuse("1\0", 2, NULL, STATUS_INVALID, "line 1 column 2: a NUL byte");
    refuse("[1]\0garbage", 11, NULL, STATUS_INVALID, "line 1 column 4");
    refuse("\"a\0b\"", 5, NULL, STATUS_INVALID, "line 1");
    refuse("", 0, NULL, STATUS_INVALID, "no json at all");
    refuse("{\n \"a\": 1,\n  x}", 15, NULL, STATUS_INVALID, "line 3 column 3");
}

static void test_limits(void **state)
{
    struct json_limits limits = {.max_bytes = 16, .max_depth = 3};
    struct json *value;
    refuse("[1,2,3,4,5,6,7,8]", 17, &limits, STATUS_TOO_LARGE, "17 bytes");
    refuse("[\n[{\"a\":[1]}]]", 14, &limits, STATUS_TOO_LARGE, "line 2 column 7: nested deeper");
    assert_int_equal(json_parse("[[{\"a\":\"[[[\"}]]", 15, &limits, &value, NULL), STATUS_OK);
    json_free(value);
    assert_int_equal(json_parse("[\"\\\"[[[\",[[]]]", 14, &limits, &value, NULL), STATUS_OK);
    json_free(value);
    /* By default 128 levels pass and 129 do not, however many more there are. */
    size_t many = 1 << 20;
    char *deep = mem_alloc(many);
    memset(deep, '[', 129);
    memset(deep + 128, ']', 128);
    assert_int_equal(json_parse(deep, 256, NULL, &value, NULL), STATUS_OK);
    struct buf out = BUF_INIT;
    json_dump_python(value, &out);
    assert_int_equal(out.bytes, 256);
    json_free(value);
    buf_fini(&out);
    memset(deep, '[', many);
    refuse(deep, many, NULL, STATUS_TOO_LARGE, "line 1 column 129: nested deeper than 128");
    mem_free(deep);
}

static void test_files(void **state)
{
    char path[] = "/tmp/test_json_XXXXXX";
    struct json *value;
    struct error err;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, "{\"a\": 1}\n", 9), 9);
    assert_int_equal(json_parse_file(path, NULL, &value, &err), STATUS_OK);
    assert_int_equal(json_object_n(value), 1);
    json_free(value);
    assert_int_equal(write(fd, "x", 1), 1);
    close(fd);
    assert_int_equal(json_parse_file(path, NULL, &value, &err), STATUS_INVALID);
    assert_non_null(strstr(err.text, path));
    assert_non_null(strstr(err.text, "line 2 column 1"));
    struct json_limits limits = {.max_bytes = 9};
    assert_int_equal(json_parse_file(path, &limits, &value, &err), STATUS_TOO_LARGE);
    unlink(path);
    assert_int_equal(json_parse_file(path, NULL, &value, &err), STATUS_NOT_FOUND);
    assert_int_equal(json_parse_file("/", NULL, &value, &err), STATUS_INVALID);
    assert_int_equal(json_parse_file("/dev/zero", NULL, &value, &err), STATUS_INVALID);
}

static void test_writing(void **state)
{
    struct buf out = BUF_INIT;
    struct json_writer w;
    json_writer_init(&w, &out);
    json_begin_object(&w);
    json_pair_string(&w, "text", "q\" b\\ nl\n del\x7f nul-free \xe2\x82\xac bad\xff\xe2\x82");
    json_key(&w, "n");
    json_put_string_n(&w, "a\0b", 3);
    json_pair_string(&w, "none", NULL);
    json_key(&w, "list");
    json_begin_array(&w);
    json_begin_object(&w);
    json_end_object(&w);
    json_begin_array(&w);
    json_end_array(&w);
    json_put_int(&w, INT64_MIN);
    json_put_uint(&w, UINT64_MAX);
    json_put_real(&w, 0.1);
    json_put_real(&w, 0.0 / 0.0);
    json_put_float(&w, 0.1f);
    json_put_float(&w, 1e30f * 1e30f);
    json_put_raw(&w, "[1]", 3);
    json_end_array(&w);
    json_pair_bool(&w, "yes", true);
    json_pair_real(&w, "one", 1);
    json_end_object(&w);
    assert_string_equal(
        buf_text(&out),
        "{\"text\":\"q\\\" b\\\\ nl\\n del\x7f nul-free \xe2\x82\xac bad\xef\xbf\xbd\xef\xbf\xbd"
        "\xef\xbf\xbd\",\"n\":\"a\\u0000b\",\"none\":null,\"list\":[{},[],-9223372036854775808,"
        "18446744073709551615,0.1,null,0.1,null,[1]],\"yes\":true,\"one\":1.0}");
    buf_fini(&out);
}

static void test_writer_reads_back(void **state)
{
    /* Any bytes at all, put as a string, are JSON again. */
    unsigned seed = 1;
    for (int round = 0; round < 3000; round++) {
        char raw[24];
        size_t bytes = (size_t)rand_r(&seed) % sizeof(raw);
        for (size_t i = 0; i < bytes; i++) {
            raw[i] = (char)rand_r(&seed);
        }
        struct buf out = BUF_INIT, again = BUF_INIT;
        struct json_writer w;
        json_writer_init(&w, &out);
        json_put_string_n(&w, raw, bytes);
        struct json *value;
        assert_int_equal(json_parse(out.data, out.bytes, NULL, &value, NULL), STATUS_OK);
        json_writer_init(&w, &again);
        json_put_value(&w, value);
        assert_int_equal(out.bytes, again.bytes);
        assert_memory_equal(out.data, again.data, out.bytes);
        json_free(value);
        buf_fini(&out);
        buf_fini(&again);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reading),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_writing),
        cmocka_unit_test(test_writer_reads_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
