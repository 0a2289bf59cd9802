/*
 * The tokenizer against vectors of the reference library (tests/oracle/make_tokenizer_vectors.py),
 * and what a file must be to be taken. argv: folder of the vectors, folder of the bundled model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/tokenizer.h"

static const char *golden_dir, *tiny_dir;
static struct buf file;         /* tokenizer_small.json */
static struct tokenizer *small; /* the same, opened */

static void read_file(const char *path, struct buf *ret)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n;
    while ((n = fread(buf_reserve(ret, 65536), 1, 65536, f)) > 0) {
        ret->bytes += n;
    }
    fclose(f);
}

static int setup(void **state)
{
    struct error err = {""};
    char *path = mem_printf("%s/tokenizer_small.json", golden_dir);
    read_file(path, &file);
    if (tokenizer_open(path, &small, &err) != STATUS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    mem_free(path);
    return 0;
}

static int teardown(void **state)
{
    tokenizer_close(small);
    buf_fini(&file);
    return 0;
}

static void assert_round_trip(const void *text, size_t bytes, const struct token_ids *ids)
{
    struct buf back = BUF_INIT;
    tokenizer_decode(small, ids->id, ids->n, true, &back);
    assert_int_equal(back.bytes, bytes);
    assert_true(bytes == 0 || memcmp(back.data, text, bytes) == 0);
    buf_fini(&back);
}

static void test_vectors(void **state)
{
    char *path = mem_printf("%s/tokenizer_vectors.json", golden_dir);
    struct token_ids ids = TOKEN_IDS_INIT;
    struct json *vectors;
    assert_int_equal(json_parse_file(path, NULL, &vectors, NULL), STATUS_OK);
    assert_true(json_array_n(vectors) > 2000);
    for (size_t i = 0; i < json_array_n(vectors); i++) {
        const struct json *pair = json_array_at(vectors, i), *want = json_array_at(pair, 1);
        size_t bytes;
        const char *text = json_text(json_array_at(pair, 0), &bytes);
        ids.n = 0;
        assert_int_equal(tokenizer_encode(small, text, bytes, NULL, 0, SIZE_MAX, &ids, NULL),
                         STATUS_OK);
        bool same = ids.n == json_array_n(want);
        for (size_t k = 0; same && k < ids.n; k++) {
            int64_t id = -1;
            same = json_int(json_array_at(want, k), &id) && id == ids.id[k];
        }
        if (!same) {
            fail_msg("vector %zu: '%s'", i, text);
        }
        assert_round_trip(text, bytes, &ids);
    }
    json_free(vectors);
    token_ids_fini(&ids);
    mem_free(path);
}

static void test_any_bytes(void **state)
{
    static const uint8_t likely[] = {0xc3, 0xa9, 0xe2, 0x82, 0xac, 0xf0, 0x9f, 0x98,
                                     0x80, 0xed, 0xa0, 0xc0, 0xff, ' ',  'a',  '\n'};
    struct token_ids ids = TOKEN_IDS_INIT;
    uint64_t random = 1;
    for (unsigned round = 0; round < 5000; round++) {
        uint8_t text[40];
        size_t n = round % sizeof(text);
        for (size_t i = 0; i < n; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            uint8_t byte = (uint8_t)(random >> 56);
            text[i] = round % 2 == 0 ? byte : likely[byte % sizeof(likely)];
        }
        ids.n = 0;
        assert_int_equal(tokenizer_encode(small, text, n, NULL, 0, SIZE_MAX, &ids, NULL),
                         STATUS_OK);
        assert_round_trip(text, n, &ids);
    }
    token_ids_fini(&ids);
}

static size_t n_added(const struct token_ids *ids)
{
    size_t n = 0;
    for (size_t i = 0; i < ids->n; i++) {
        n += tokenizer_is_added(small, ids->id[i]);
    }
    return n;
}

static void test_plain_spans(void **state)
{
    static const char text[] = "<think>a<think>b</think><|a|>b";
    const size_t bytes = sizeof(text) - 1;
    const struct {
        struct tokenizer_span spans[3];
        size_t n_spans, n_added;
    } cases[] = {
        {{{0, 0}}, 0, 4},
        {{{0, bytes}}, 1, 0},
        {{{8, 15}}, 1, 3},
        {{{0, 1}}, 1, 3},
        {{{6, 7}}, 1, 3},
        {{{7, 8}}, 1, 4},
        {{{3, 3}}, 1, 4},
        {{{0, 7}, {8, 15}}, 2, 2},
        {{{0, 7}, {7, 24}}, 2, 1},
        {{{bytes - 1, bytes}}, 1, 4}, /* of the overlapping ones, the longest that is free */
    };
    struct token_ids ids = TOKEN_IDS_INIT;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ids.n = 0;
        assert_int_equal(tokenizer_encode(small, text, bytes, cases[i].spans, cases[i].n_spans,
                                          SIZE_MAX, &ids, NULL),
                         STATUS_OK);
        assert_int_equal(n_added(&ids), cases[i].n_added);
        assert_round_trip(text, bytes, &ids);
    }
    token_ids_fini(&ids);
}

static void test_limits(void **state)
{
    static const char text[] = "<think>Hello, world! 123456789</think>";
    struct token_ids all = TOKEN_IDS_INIT, ids = TOKEN_IDS_INIT;
    struct error err;
    const uint32_t before = 7;
    assert_int_equal(tokenizer_encode(small, text, strlen(text), NULL, 0, SIZE_MAX, &all, NULL),
                     STATUS_OK);
    assert_int_equal(token_ids_append(&ids, &before, 1), STATUS_OK);
    for (size_t max = 0; max < all.n; max++) {
        assert_int_equal(tokenizer_encode(small, text, strlen(text), NULL, 0, max, &ids, &err),
                         STATUS_TOO_LARGE);
        assert_int_equal(ids.n, 1);
    }
    assert_int_equal(tokenizer_encode(small, text, strlen(text), NULL, 0, all.n, &ids, &err),
                     STATUS_OK);
    assert_int_equal(ids.n, all.n + 1);
    assert_memory_equal(ids.id + 1, all.id, all.n * sizeof(uint32_t));
    token_ids_fini(&all);
    token_ids_fini(&ids);
}

/* A prompt of a megabyte without a space: quadratic work would take hours. */
static void test_long_pieces(void **state)
{
    const size_t bytes = 1 << 20;
    struct token_ids ids = TOKEN_IDS_INIT;
    char *text = mem_alloc(bytes);
    for (unsigned kind = 0; kind < 3; kind++) {
        uint32_t random = 1;
        for (size_t i = 0; i < bytes; i++) {
            random = random * 1103515245 + 12345;
            text[i] = kind == 0 ? 'a' : kind == 1 ? ' ' : (char)('a' + (random >> 16) % 26);
        }
        ids.n = 0;
        assert_int_equal(tokenizer_encode(small, text, bytes, NULL, 0, SIZE_MAX, &ids, NULL),
                         STATUS_OK);
        assert_round_trip(text, bytes, &ids);
    }
    mem_free(text);
    token_ids_fini(&ids);
}

static void test_tokens(void **state)
{
    uint32_t id, bos;
    size_t bytes;
    assert_int_equal(tokenizer_find_added(small, "<think>", &id), STATUS_OK);
    assert_true(tokenizer_is_added(small, id));
    assert_false(tokenizer_is_special(small, id));
    assert_memory_equal(tokenizer_token(small, id, &bytes), "<think>", 7);
    assert_int_equal(bytes, 7);
    assert_int_equal(tokenizer_find_added(small, "<\uff5cbegin\u2581of\u2581sentence\uff5c>", &bos),
                     STATUS_OK);
    assert_int_equal(bos, 0);
    assert_true(tokenizer_is_special(small, bos));
    assert_int_equal(tokenizer_find_added(small, "<thin", &id), STATUS_NOT_FOUND);
    assert_int_equal(tokenizer_find_added(small, "the", &id), STATUS_NOT_FOUND);
    assert_int_equal(tokenizer_find_added(small, "", &id), STATUS_NOT_FOUND);
    assert_null(tokenizer_token(small, tokenizer_n_vocab(small), &bytes));
    assert_non_null(tokenizer_token(small, tokenizer_n_vocab(small) - 1, &bytes));
    assert_false(tokenizer_is_added(small, UINT32_MAX));

    struct buf with = BUF_INIT, without = BUF_INIT;
    const uint32_t ids[] = {bos, 3, UINT32_MAX, bos};
    tokenizer_decode(small, ids, 4, true, &with);
    tokenizer_decode(small, ids, 4, false, &without);
    assert_string_equal(buf_text(&without), "!");
    assert_int_equal(with.bytes, 1 + 2 * strlen("<\uff5cbegin\u2581of\u2581sentence\uff5c>"));
    buf_fini(&with);
    buf_fini(&without);
}

/* Expected texts are what Python's bytes.decode('utf-8', 'replace') gives. */
static void test_stream(void **state)
{
    static const struct {
        const char *bytes, *text;
    } cases[] = {
        {"plain", "plain"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "\u00e9\u20ac\U0001f600"},
        {"\xf0\x9f\x98", "\ufffd"},
        {"\xf0\x9f\x98z", "\ufffdz"},
        {"\xe2\x82\xe2\x82\xac", "\ufffd\u20ac"},
        {"\x80\xbf", "\ufffd\ufffd"},
        {"\xc0\xaf", "\ufffd\ufffd"},
        {"\xed\xa0\x80", "\ufffd\ufffd\ufffd"},
        {"\xe0\x80\x80", "\ufffd\ufffd\ufffd"},
        {"\xf0\x80\x80", "\ufffd\ufffd\ufffd"},
        {"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"},
        {"\xf5\xff\xc3", "\ufffd\ufffd\ufffd"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tokenizer_stream stream;
        struct buf out = BUF_INIT;
        tokenizer_stream_init(&stream, true);
        for (const char *p = cases[i].bytes; *p != '\0'; p++) {
            size_t before = out.bytes;
            tokenizer_stream_push_bytes(&stream, p, 1, &out);
            /* never half a character */
            assert_true(out.bytes == before || ((uint8_t)out.data[before] & 0xc0) != 0x80);
        }
        tokenizer_stream_finish(&stream, &out);
        assert_string_equal(buf_text(&out), cases[i].text);
        buf_fini(&out);
    }
}

/* Replaces the first `from` in the file and opens the result. */
static enum status open_changed(const char *from, const char *to, struct tokenizer **ret,
                                struct error *err)
{
    struct buf changed = BUF_INIT;
    const char *text = buf_text(&file), *at = strstr(text, from);
    if (at == NULL) {
        fail_msg("no '%s' in the file", from);
    }
    buf_append(&changed, text, (size_t)(at - text));
    buf_append_text(&changed, to);
    buf_append_text(&changed, at + strlen(from));
    enum status status = tokenizer_parse(changed.data, changed.bytes, ret, err);
    buf_fini(&changed);
    return status;
}

static void test_refusals(void **state)
{
    static const struct {
        const char *from, *to;
        enum status status;
        const char *word; /* that the text must name */
    } cases[] = {
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"NFC\"}", STATUS_UNSUPPORTED, "NFC"},
        {"\"normalizer\":null",
         "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKC\"}]}",
         STATUS_UNSUPPORTED, "NFKC"},
        {"\"truncation\":null", "\"truncation\":{\"max_length\":1}", STATUS_UNSUPPORTED, "object"},
        {"\"padding\":null", "\"padding\":{}", STATUS_UNSUPPORTED, "object"},
        {"{\"type\":\"Split\"", "{\"type\":\"Digits\"", STATUS_UNSUPPORTED, "Digits"},
        {"\\\\p{N}{1,3}", "\\\\p{N}{1,2}", STATUS_UNSUPPORTED, "{1,2}"},
        {"\"behavior\":\"Isolated\"", "\"behavior\":\"Removed\"", STATUS_UNSUPPORTED, "Removed"},
        {"\"invert\":false", "\"invert\":true", STATUS_UNSUPPORTED, "invert"},
        {"\"add_prefix_space\":false", "\"add_prefix_space\":true", STATUS_UNSUPPORTED,
         "add_prefix_space"},
        {"\"use_regex\":false", "\"use_regex\":true", STATUS_UNSUPPORTED, "use_regex"},
        {"\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"Metaspace\"",
         STATUS_UNSUPPORTED, "Metaspace"},
        {"\"post_processor\":null", "\"post_processor\":{\"type\":\"TemplateProcessing\"}",
         STATUS_UNSUPPORTED, "TemplateProcessing"},
        {"\"type\":\"BPE\"", "\"type\":\"Unigram\"", STATUS_UNSUPPORTED, "Unigram"},
        {"\"dropout\":null", "\"dropout\":0.5", STATUS_UNSUPPORTED, "dropout"},
        {"\"unk_token\":null", "\"unk_token\":\"<unk>\"", STATUS_UNSUPPORTED, "unk"},
        {"\"byte_fallback\":false", "\"byte_fallback\":true", STATUS_UNSUPPORTED, "byte_fallback"},
        {"\"ignore_merges\":false", "\"ignore_merges\":true", STATUS_UNSUPPORTED, "ignore_merges"},
        {"\"lstrip\":false", "\"lstrip\":true", STATUS_UNSUPPORTED, "lstrip"},
        {"\"!\":3", "\"!\":4", STATUS_CORRUPT, "share"},
        {"\"!\":3", "\"!\":99999", STATUS_CORRUPT, "id below"},
        {"\"!\":3", "\"!\":-1", STATUS_CORRUPT, "id below"},
        {"\"!\":3", "\"!\":3.0", STATUS_CORRUPT, "id below"},
        {"\"!\":3", "\"!!!!\":3", STATUS_CORRUPT, "byte 0x21"},
        {"\"!\":3", "\"\u6f22\":3", STATUS_CORRUPT, "alphabet"},
        {"\"merges\":[[", "\"merges\":[[\"!\",\"~!\"],[", STATUS_CORRUPT, "no token"},
        {"\"merges\":[[", "\"merges\":[\"a b c\",[", STATUS_CORRUPT, "pair"},
        {"\"merges\":[[", "\"merges\":[[\"a\"],[", STATUS_CORRUPT, "pair"},
        {"\"merges\":[[", "\"merges\":[7,[", STATUS_CORRUPT, "pair"},
        {"{\"id\":0,", "{\"id\":1,", STATUS_CORRUPT, "share"},
        {"{\"id\":0,", "{\"id\":3,", STATUS_CORRUPT, "share"},
        {"{\"id\":0,", "{\"id\":5000,", STATUS_CORRUPT, ""},
        {"\"content\":\"xyz\"", "\"content\":\"\"", STATUS_CORRUPT, "content"},
        {"\"content\":\"xyz\"", "\"content\":\"zwv\"", STATUS_CORRUPT, "twice"},
        {"\"model\":{", "\"other\":{", STATUS_CORRUPT, "tokens"},
        {"{", "[", STATUS_CORRUPT, "line"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct tokenizer *t = NULL;
        struct error err = {""};
        enum status status = open_changed(cases[i].from, cases[i].to, &t, &err);
        if (status != cases[i].status || strstr(err.text, cases[i].word) == NULL) {
            fail_msg("%s -> %s: %s '%s'", cases[i].from, cases[i].to, status_name(status),
                     err.text);
        }
        assert_null(t);
    }
    struct tokenizer *t = NULL;
    struct error err;
    assert_int_equal(tokenizer_open("/nonexistent", &t, &err), STATUS_NOT_FOUND);
    assert_int_equal(tokenizer_open(golden_dir, &t, &err), STATUS_NOT_FOUND);
    assert_int_equal(tokenizer_parse("", 0, &t, &err), STATUS_CORRUPT);
}

/* The digest is of what the file says, not of how: older files write merges as "a b". */
static void test_digest(void **state)
{
    uint8_t digest[TOKENIZER_DIGEST_BYTES], other[TOKENIZER_DIGEST_BYTES];
    struct tokenizer *t;
    struct error err;
    struct json *root;
    assert_int_equal(json_parse(file.data, file.bytes, NULL, &root, &err), STATUS_OK);
    const struct json *merge = json_array_at(json_get(json_get(root, "model"), "merges"), 0);
    char *pair = mem_printf("[\"%s\",\"%s\"]", json_text(json_array_at(merge, 0), NULL),
                            json_text(json_array_at(merge, 1), NULL));
    char *joined = mem_printf("\"%s %s\"", json_text(json_array_at(merge, 0), NULL),
                              json_text(json_array_at(merge, 1), NULL));
    tokenizer_digest(small, digest);
    assert_int_equal(open_changed(pair, joined, &t, &err), STATUS_OK);
    tokenizer_digest(t, other);
    assert_memory_equal(digest, other, sizeof(digest));
    tokenizer_close(t);
    static const char *const changes[][2] = {{"\"special\":true", "\"special\":false"},
                                             {"\"normalized\":true", "\"normalized\":false"},
                                             {"\"content\":\"xyz\"", "\"content\":\"xyy\""}};
    for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
        assert_int_equal(open_changed(changes[i][0], changes[i][1], &t, &err), STATUS_OK);
        tokenizer_digest(t, other);
        assert_memory_not_equal(digest, other, sizeof(digest));
        tokenizer_close(t);
    }
    mem_free(joined);
    mem_free(pair);
    json_free(root);
}

static void test_bundled(void **state)
{
    struct tokenizer *t;
    struct error err;
    struct token_ids ids = TOKEN_IDS_INIT;
    assert_int_equal(tokenizer_open(tiny_dir, &t, &err), STATUS_OK);
    assert_int_equal(tokenizer_n_vocab(t), 2560);
    static const char text[] = "<\uff5cUser\uff5c>hello<\uff5cAssistant\uff5c></think>";
    assert_int_equal(tokenizer_encode(t, text, strlen(text), NULL, 0, SIZE_MAX, &ids, NULL),
                     STATUS_OK);
    assert_true(tokenizer_is_added(t, ids.id[0]));
    assert_true(tokenizer_is_added(t, ids.id[ids.n - 1]));
    assert_true(tokenizer_is_added(t, ids.id[ids.n - 2]));
    token_ids_fini(&ids);
    tokenizer_close(t);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 1;
    }
    golden_dir = argv[1];
    tiny_dir = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),     cmocka_unit_test(test_any_bytes),
        cmocka_unit_test(test_plain_spans), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_long_pieces), cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_stream),      cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_digest),      cmocka_unit_test(test_bundled),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
