/*
 * What proto_unpack takes and what it refuses, on bytes written by hand; and the messages of our
 * own that are the densest.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "proto/cluster.pb-c.h"
#include "proto/decode.pb-c.h"
#include "proto/prefill.pb-c.h"
#include "rpc/proto.h"

static enum status read_as(const ProtobufCMessageDescriptor *descriptor, const void *bytes,
                           size_t n_bytes, struct error *err)
{
    struct arena *arena = arena_create(0);
    ProtobufCMessage *message;
    enum status status = proto_unpack(descriptor, bytes, n_bytes, arena, &message, err);
    arena_free(arena);
    return status;
}

#define assert_read(want, descriptor, bytes)                                              \
    do {                                                                                  \
        struct error read_err = {""};                                                     \
        assert_int_equal(read_as(descriptor, bytes, sizeof(bytes) - 1, &read_err), want); \
    } while (0)

static void test_refused(void **state)
{
    const ProtobufCMessageDescriptor *hello = &baton__hello__descriptor;
    assert_read(STATUS_OK, hello, "");
    assert_read(STATUS_OK, hello,
                "\x12\x03"
                "abc");
    assert_read(STATUS_OK, hello, "\x12\x02\xc3\xa4");
    assert_read(STATUS_OK, hello, "\xc0\x3e\x01"); /* a field of a later version: 1000 */
    assert_read(STATUS_CORRUPT, hello,
                "\x12\x03"
                "a\0c");
    assert_read(STATUS_CORRUPT, hello, "\x12\x02\xc3\x28");     /* not utf-8 */
    assert_read(STATUS_CORRUPT, hello, "\x12\x03\xed\xa0\x80"); /* a surrogate */
    assert_read(STATUS_CORRUPT, hello,
                "\x12\x04"
                "abc"); /* cut short */
    assert_read(STATUS_CORRUPT, hello, "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
    assert_read(STATUS_CORRUPT, hello, "\x08\x01\x08\x01"); /* protocol twice */
    assert_read(STATUS_CORRUPT, hello, "\x42\x00\x42\x00"); /* a message twice */
    assert_read(STATUS_CORRUPT, hello, "\x10\x01");         /* a number for text */
    assert_read(STATUS_CORRUPT, hello, "\x0b\x0c");         /* a group */
    assert_read(STATUS_CORRUPT, hello, "\x00");             /* field 0 */
    assert_read(STATUS_CORRUPT, hello, "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01");
    const ProtobufCMessageDescriptor *to_decode = &baton__to_decode__descriptor;
    assert_read(STATUS_OK, to_decode, "\x22\x00");
    assert_read(STATUS_CORRUPT, to_decode, "\x22\x00\x2a\x00"); /* two members of the oneof */
    assert_read(STATUS_CORRUPT, to_decode, "\x22\x00\x22\x00");

    struct error err = {""};
    assert_int_equal(read_as(hello, "\x12\x01\xff", 3, &err), STATUS_CORRUPT);
    assert_string_equal(err.text, "field node_id is not text: not utf-8");
}

/* 2 bytes each on the wire, a struct and a pointer each in memory. */
static void test_bomb(void **state)
{
    enum { N = 1000000 };
    uint8_t *bytes = mem_alloc(2 * N + 8);
    /* FromDecode.step of 2 N bytes of empty rows */
    size_t n = 0;
    bytes[n++] = 0x1a;
    for (size_t left = 2 * N;; left >>= 7) {
        bytes[n++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
        if (left <= 0x7f) {
            break;
        }
    }
    for (size_t i = 0; i < N; i++) {
        bytes[n++] = 0x0a;
        bytes[n++] = 0x00;
    }
    struct error err = {""};
    assert_int_equal(read_as(&baton__from_decode__descriptor, bytes, n, &err), STATUS_TOO_LARGE);
    mem_free(bytes);
}

/* The arena's own limit holds too. */
static void test_arena_limit(void **state)
{
    struct arena *arena = arena_create(1000);
    struct error err = {""};
    ProtobufCMessage *message;
    static uint8_t bytes[4099] = {0x2a, 0x80, 0x20}; /* fingerprint of 4096 bytes */
    assert_int_equal(
        proto_unpack(&baton__hello__descriptor, bytes, sizeof bytes, arena, &message, &err),
        STATUS_CORRUPT);
    arena_free(arena);
}

/* A step of 256 rows, each token with 20 alternatives, there and back. */
static void test_dense(void **state)
{
    enum { ROWS = 256, TOP = 20 };
    static Baton__FromDecode__Row rows[ROWS];
    static Baton__FromDecode__Row *row_list[ROWS];
    static Baton__TokenLogprobs logprobs[ROWS];
    static Baton__TokenLogprobs *logprob_lists[ROWS];
    static Baton__Logprob tops[TOP];
    static Baton__Logprob *top_list[TOP];
    static uint32_t ids[ROWS];
    for (unsigned i = 0; i < TOP; i++) {
        baton__logprob__init(&tops[i]);
        tops[i].id = 1000 * i;
        tops[i].logprob = -0.5f * (float)i;
        top_list[i] = &tops[i];
    }
    for (unsigned i = 0; i < ROWS; i++) {
        baton__from_decode__row__init(&rows[i]);
        baton__token_logprobs__init(&logprobs[i]);
        logprobs[i].token = &tops[0];
        logprobs[i].n_top = TOP;
        logprobs[i].top = top_list;
        logprob_lists[i] = &logprobs[i];
        ids[i] = i;
        rows[i].request = ~0ull - i;
        rows[i].attempt = 1;
        rows[i].n_ids = 1;
        rows[i].ids = &ids[i];
        rows[i].n_logprobs = 1;
        rows[i].logprobs = &logprob_lists[i];
        row_list[i] = &rows[i];
    }
    Baton__FromDecode__Step step = BATON__FROM_DECODE__STEP__INIT;
    step.n_rows = ROWS;
    step.rows = row_list;
    Baton__FromDecode envelope = BATON__FROM_DECODE__INIT;
    envelope.what_case = BATON__FROM_DECODE__WHAT_STEP;
    envelope.step = &step;
    struct buf out = BUF_INIT;
    proto_pack(&envelope.base, &out);

    struct arena *arena = arena_create(0);
    struct error err = {""};
    ProtobufCMessage *message;
    assert_int_equal(
        proto_unpack(&baton__from_decode__descriptor, out.data, out.bytes, arena, &message, &err),
        STATUS_OK);
    Baton__FromDecode *back = (Baton__FromDecode *)(void *)message;
    print_message("%zu bytes on the wire, %zu in memory\n", out.bytes, arena_bytes(arena));
    assert_int_equal(back->what_case, BATON__FROM_DECODE__WHAT_STEP);
    assert_int_equal(back->step->n_rows, ROWS);
    for (unsigned i = 0; i < ROWS; i++) {
        const Baton__FromDecode__Row *row = back->step->rows[i];
        assert_true(row->request == ~0ull - i);
        assert_int_equal(row->ids[0], i);
        assert_int_equal(row->logprobs[0]->n_top, TOP);
        assert_int_equal(row->logprobs[0]->top[19]->id, 19000);
        assert_true(row->logprobs[0]->top[19]->logprob == -9.5f);
    }
    arena_free(arena);
    buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bomb),
        cmocka_unit_test(test_arena_limit),
        cmocka_unit_test(test_dense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
