#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/status.h"
#include "base/utf8.h"

/* status, log, mem, buf and list: the parts that everything else stands on. */

static void test_sizes_overflow(void **state)
{
    size_t out = 7;
    assert_false(size_mul(SIZE_MAX / 2, 3, &out));
    assert_int_equal(out, 7);
    assert_true(size_mul(1 << 20, 1 << 20, &out));
    assert_int_equal(out, (size_t)1 << 40);
    assert_false(size_add(SIZE_MAX, 1, &out));
    assert_true(size_add(SIZE_MAX - 1, 1, &out));
    assert_true(out == SIZE_MAX);
    assert_null(mem_try_array(SIZE_MAX / 4, 8));
}

static void test_arena(void **state)
{
    struct arena *arena = arena_create(100000);
    char *kept[200];
    for (int i = 0; i < 200; i++) {
        char text[32];
        snprintf(text, sizeof(text), "entry %d", i);
        kept[i] = arena_strdup(arena, text);
        unsigned char *p = arena_alloc(arena, (size_t)i * 7);
        for (int k = 0; k < i * 7; k++) {
            assert_int_equal(p[k], 0);
        }
        memset(p, 0xee, (size_t)i * 7);
        assert_int_equal((uintptr_t)p % 16, 0);
    }
    for (int i = 0; i < 200; i++) {
        char text[32];
        snprintf(text, sizeof(text), "entry %d", i);
        assert_string_equal(kept[i], text);
    }
    /* The limit binds the try variant only, and exactly. */
    arena_reset(arena);
    assert_int_equal(arena_bytes(arena), 0);
    assert_non_null(arena_try_alloc(arena, 99984));
    assert_non_null(arena_try_alloc(arena, 16));
    assert_null(arena_try_alloc(arena, 1));
    assert_null(arena_try_alloc(arena, SIZE_MAX));
    memset(arena_alloc(arena, 50000), 1, 50000);
    arena_free(arena);
    arena_free(NULL);
}

static void test_buf(void **state)
{
    struct buf buf = BUF_INIT;
    buf_append(&buf, NULL, 0);
    assert_int_equal(buf.bytes, 0);
    for (int i = 0; i < 1000; i++) {
        buf_printf(&buf, "%d,", i);
    }
    assert_int_equal(buf.bytes, 10 * 2 + 90 * 3 + 900 * 4);
    assert_int_equal(strlen(buf_text(&buf)), buf.bytes);
    buf_consume(&buf, 20);
    assert_memory_equal(buf.data, "10,11,12,", 9);
    buf_consume(&buf, SIZE_MAX);
    assert_int_equal(buf.bytes, 0);
    buf_append_text(&buf, "ab");
    buf_append_byte(&buf, 'c');
    size_t bytes;
    char *taken = buf_take(&buf, &bytes);
    assert_int_equal(bytes, 3);
    assert_string_equal(taken, "abc");
    assert_null(buf.data);
    mem_free(taken);
    buf_fini(&buf);
}

static void test_little_endian(void **state)
{
    uint8_t raw[9] = {0};
    put_le64(raw + 1, 0x0102030405060708ull);
    assert_memory_equal(raw, "\0\x8\x7\x6\x5\x4\x3\x2\x1", 9);
    assert_true(get_le64(raw + 1) == 0x0102030405060708ull);
    put_le32(raw + 1, 0xfffefdfcu);
    assert_memory_equal(raw + 1, "\xfc\xfd\xfe\xff", 4);
    assert_true(get_le32(raw + 1) == 0xfffefdfcu);
    put_le16(raw + 1, 0xabcd);
    assert_memory_equal(raw + 1, "\xcd\xab", 2);
    assert_int_equal(get_le16(raw + 1), 0xabcd);
}

struct member {
    int number;
    struct list link;
};

static void test_list(void **state)
{
    struct list head;
    struct member members[5] = {0};
    list_init(&head);
    assert_true(list_empty(&head));
    assert_null(list_first(&head));
    list_remove(&members[0].link); /* never linked: nothing happens */
    for (int i = 0; i < 5; i++) {
        members[i].number = i;
        assert_false(list_linked(&members[i].link));
        list_push_back(&head, &members[i].link);
        assert_true(list_linked(&members[i].link));
    }
    list_for_each_safe(p, &head)
    {
        if (list_entry(p, struct member, link)->number % 2 == 1) {
            list_remove(p);
            list_remove(p);
        }
    }
    list_push_front(&head, &members[3].link);
    int seen = 0;
    list_for_each(p, &head)
    {
        seen = seen * 10 + list_entry(p, struct member, link)->number;
    }
    assert_int_equal(seen, 3024);
    assert_ptr_equal(list_last(&head), &members[4].link);
}

static void test_status(void **state)
{
    struct error err;
    assert_string_equal(status_name(STATUS_PEER_REFUSED), "peer_refused");
    assert_string_equal(status_name((enum status)99), "unknown");
    assert_int_equal(error_set(&err, STATUS_CORRUPT, "byte %d", 4), STATUS_CORRUPT);
    assert_int_equal(error_set(&err, STATUS_CORRUPT, "file: %s", err.text), STATUS_CORRUPT);
    assert_string_equal(err.text, "file: byte 4");
    assert_int_equal(error_set(NULL, STATUS_FATAL, "x"), STATUS_FATAL);
    /* Cut whole characters: whatever the offset, no partial sequence stays at the end. */
    static const char *const characters[] = {"\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    for (int c = 0; c < 3; c++) {
        for (int shift = 0; shift < 4; shift++) {
            char text[1024];
            size_t width = strlen(characters[c]);
            memset(text, 'x', (size_t)shift);
            for (size_t at = (size_t)shift; at + width < sizeof(text); at += width) {
                strcpy(text + at, characters[c]);
            }
            assert_int_equal(error_set(&err, STATUS_INVALID, "%s", text), STATUS_INVALID);
            size_t bytes = strlen(err.text);
            assert_int_equal((bytes - (size_t)shift) % width, 0);
            assert_true(bytes > sizeof(err.text) - 1 - width);
        }
    }
}

static void test_log_lines(void **state)
{
    char out[512];
    size_t bytes = log_format(out, sizeof(out), false, "decode-0", 1700000000123456789LL,
                              LOG_LEVEL_WARN, "http", "bad \x1b[2Jname\n");
    assert_string_equal(out, "2023-11-14T22:13:20.123456Z warn decode-0 http: "
                             "bad \\x1b[2Jname\\x0a\n");
    assert_int_equal(bytes, strlen(out));
    log_format(out, sizeof(out), true, NULL, 1700000000000001000LL, LOG_LEVEL_INFO, "http",
               "say \"\\\"\n");
    assert_string_equal(out, "{\"time\":\"2023-11-14T22:13:20.000001Z\",\"level\":\"info\","
                             "\"component\":\"http\",\"text\":\"say \\\"\\\\\\\"\\u000a\"}\n");
    /* However short the room, a line that is cut is one line, and in JSON still an object. */
    const char *foreign =
        "a \xff\xfe \"text\" \\ with \xf0\x9f\x98\x80 \x01\n in it, and more of it";
    for (size_t room = 100; room < 260; room++) {
        struct json *value;
        bytes = log_format(out, room, true, "p", 0, LOG_LEVEL_INFO, "c", foreign);
        assert_true(bytes < room);
        assert_int_equal(json_parse(out, bytes, NULL, &value, NULL), STATUS_OK);
        assert_non_null(json_get(value, "text"));
        json_free(value);
        bytes = log_format(out, room, false, "p", 0, LOG_LEVEL_INFO, "c", foreign);
        assert_ptr_equal(memchr(out, '\n', bytes), out + bytes - 1);
        assert_true(utf8_valid(out, bytes));
    }
}

static int evaluated;

static int evaluate(void)
{
    return ++evaluated;
}

static void test_log_levels(void **state)
{
    log_init(LOG_LEVEL_ERROR, false, "test");
    log_debug("test", "not shown %d", evaluate());
    assert_int_equal(evaluated, 0);
    log_error("test", "shown %d", evaluate());
    assert_int_equal(evaluated, 1);
    log_set_level(LOG_LEVEL_INFO);
    assert_true(log_enabled(LOG_LEVEL_INFO));
    assert_false(log_enabled(LOG_LEVEL_DEBUG));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes_overflow),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_buf),
        cmocka_unit_test(test_little_endian),
        cmocka_unit_test(test_list),
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_log_lines),
        cmocka_unit_test(test_log_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
