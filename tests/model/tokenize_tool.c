/*
 * The tokenizer as a filter, for comparisons with other ones.
 *
 * usage: tokenize_tool TOKENIZER_JSON            one JSON string a line in, its ids a line out
 *        tokenize_tool TOKENIZER_JSON --decode   one JSON array of ids a line in, a JSON string out
 *        tokenize_tool TOKENIZER_JSON --bench FILE [REPEATS]   MB/s and bytes per token
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/tokenizer.h"

static int fail(const char *what)
{
    fprintf(stderr, "tokenize_tool: %s\n", what);
    return 1;
}

static bool encode_line(const struct tokenizer *t, const struct json *line, struct error *err)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    struct buf back = BUF_INIT;
    size_t bytes;
    const char *text = json_text(line, &bytes);
    if (text == NULL) {
        (void)error_set(err, STATUS_INVALID, "not a string");
        return false;
    }
    if (tokenizer_encode(t, text, bytes, NULL, 0, SIZE_MAX, &ids, err) != STATUS_OK) {
        return false;
    }
    for (size_t i = 0; i < ids.n; i++) {
        printf(i == 0 ? "%u" : " %u", ids.id[i]);
    }
    putchar('\n');
    tokenizer_decode(t, ids.id, ids.n, true, &back);
    bool same = back.bytes == bytes && (bytes == 0 || memcmp(back.data, text, bytes) == 0);
    if (!same) {
        (void)error_set(err, STATUS_INVALID, "decoding does not give back %.200s", text);
    }
    buf_fini(&back);
    token_ids_fini(&ids);
    return same;
}

static bool decode_line(const struct tokenizer *t, const struct json *line, struct error *err)
{
    struct tokenizer_stream stream;
    struct json_writer writer;
    struct buf text = BUF_INIT, out = BUF_INIT;
    tokenizer_stream_init(&stream, true);
    for (size_t i = 0; i < json_array_n(line); i++) {
        int64_t id;
        if (!json_int(json_array_at(line, i), &id) || id < 0 || id > UINT32_MAX) {
            (void)error_set(err, STATUS_INVALID, "not an array of ids");
            return false;
        }
        tokenizer_stream_push(&stream, t, (uint32_t)id, &text);
    }
    tokenizer_stream_finish(&stream, &text);
    json_writer_init(&writer, &out);
    json_put_string_n(&writer, (const char *)text.data, text.bytes);
    puts(buf_text(&out));
    buf_fini(&out);
    buf_fini(&text);
    return true;
}

static int filter(const struct tokenizer *t, bool decode)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    struct error err = {""};
    int rc = 0;
    while (rc == 0 && (n = getline(&line, &capacity, stdin)) > 0) {
        struct json *json;
        if (json_parse(line, (size_t)n, NULL, &json, &err) != STATUS_OK) {
            rc = fail(err.text);
            break;
        }
        if (!(decode ? decode_line(t, json, &err) : encode_line(t, json, &err))) {
            rc = fail(err.text);
        }
        json_free(json);
    }
    free(line);
    return rc;
}

static double now_s(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static int bench(const struct tokenizer *t, const char *path, int repeats)
{
    struct buf text = BUF_INIT;
    struct token_ids ids = TOKEN_IDS_INIT;
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return fail(path);
    }
    size_t n;
    while ((n = fread(buf_reserve(&text, 1 << 20), 1, 1 << 20, file)) > 0) {
        text.bytes += n;
    }
    fclose(file);
    for (int i = 0; i < repeats; i++) {
        ids.n = 0;
        double start = now_s();
        if (tokenizer_encode(t, text.data, text.bytes, NULL, 0, SIZE_MAX, &ids, NULL) !=
            STATUS_OK) {
            return fail("out of memory");
        }
        double s = now_s() - start;
        printf("%zu bytes, %zu tokens, %.1f MB/s\n", text.bytes, ids.n,
               (double)text.bytes / s / 1e6);
    }
    token_ids_fini(&ids);
    buf_fini(&text);
    return 0;
}

int main(int argc, char **argv)
{
    struct tokenizer *t;
    struct error err;
    int rc;
    if (argc < 2) {
        return fail("usage: tokenize_tool TOKENIZER_JSON [--decode | --bench FILE [REPEATS]]");
    }
    double start = now_s();
    if (tokenizer_open(argv[1], &t, &err) != STATUS_OK) {
        return fail(err.text);
    }
    if (argc > 3 && strcmp(argv[2], "--bench") == 0) {
        printf("opened in %.0f ms\n", (now_s() - start) * 1e3);
        rc = bench(t, argv[3], argc > 4 ? atoi(argv[4]) : 3);
    } else {
        rc = filter(t, argc > 2 && strcmp(argv[2], "--decode") == 0);
    }
    tokenizer_close(t);
    return rc;
}
