#include "base/json.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "base/json_text.h"
#include "base/mem.h"

/*
 * The parser, over jansson: nothing of it shows outside this file. A struct json is a json_t under
 * another name; the tree is never changed, so it needs no locks. Depth is counted by a scan before
 * the recursive parser runs, because its own limit (2048) is fixed and a request body is worth
 * less stack than that. The scan follows strings exactly as the grammar does, so up to the first
 * error of the text it sees the depth that the parser would reach.
 *
 * The names that this file defines must not be among those that the library exports: it would
 * then call ours. That is why the accessors are json_text, json_number and not json_string, ...
 */

enum {
    DEPTH_DEFAULT = 128,
    DEPTH_MAX = 1024,
    BYTES_DEFAULT = 64 << 20,
};

static const json_t *inner(const struct json *value)
{
    return (const json_t *)(const void *)value;
}

static const struct json *outer(const json_t *value)
{
    return (const struct json *)(const void *)value;
}

/* Where a byte of the text is, for a person. */
static void position(const char *text, size_t at, size_t *ret_line, size_t *ret_column)
{
    size_t line = 1, start = 0;
    for (size_t i = 0; i < at; i++) {
        if (text[i] == '\n') {
            line++;
            start = i + 1;
        }
    }
    *ret_line = line;
    *ret_column = at - start + 1;
}

static enum status check_depth(const char *text, size_t bytes, unsigned max_depth,
                               struct error *err)
{
    unsigned depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (in_string) {
            if (c == '\\') {
                i++;
            } else if (c == '"') {
                in_string = false;
            }
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > max_depth) {
                size_t line, column;
                position(text, i, &line, &column);
                return error_set(err, STATUS_TOO_LARGE,
                                 "line %zu column %zu: nested deeper than %u levels", line, column,
                                 max_depth);
            }
        } else if ((c == ']' || c == '}') && depth > 0) {
            depth--;
        }
    }
    return STATUS_OK;
}

enum status json_parse(const void *text, size_t bytes, const struct json_limits *limits,
                       struct json **ret, struct error *err)
{
    size_t max_bytes = limits && limits->max_bytes ? limits->max_bytes : BYTES_DEFAULT;
    unsigned max_depth = limits && limits->max_depth ? limits->max_depth : DEPTH_DEFAULT;
    assert(max_depth <= DEPTH_MAX);
    if (bytes > max_bytes) {
        return error_set(err, STATUS_TOO_LARGE, "%zu bytes of json, more than the %zu allowed",
                         bytes, max_bytes);
    }
    if (bytes == 0) {
        return error_set(err, STATUS_INVALID, "line 1 column 1: no json at all");
    }
    /* The parser takes a NUL outside a string for the end of the text, and what follows as unsaid.
     */
    const char *nul = memchr(text, '\0', bytes);
    if (nul != NULL) {
        size_t line, column;
        position(text, (size_t)(nul - (const char *)text), &line, &column);
        return error_set(err, STATUS_INVALID, "line %zu column %zu: a NUL byte", line, column);
    }
    enum status status = check_depth(text, bytes, max_depth, err);
    if (status != STATUS_OK) {
        return status;
    }
    json_error_t error;
    json_t *root =
        json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (root == NULL) {
        if (json_error_code(&error) == json_error_out_of_memory) {
            return error_set(err, STATUS_EXHAUSTED, "no memory for the json");
        }
        return error_set(err, STATUS_INVALID, "line %d column %d: %s", error.line, error.column,
                         error.text);
    }
    *ret = (struct json *)(void *)root;
    return STATUS_OK;
}

enum status json_parse_file(const char *path, const struct json_limits *limits, struct json **ret,
                            struct error *err)
{
    size_t max_bytes = limits && limits->max_bytes ? limits->max_bytes : BYTES_DEFAULT;
    enum status status;
    char *text = NULL;
    size_t bytes = 0;
    struct stat stat;

    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        status = errno == ENOENT ? STATUS_NOT_FOUND : STATUS_SYSTEM;
        return error_set(err, status, "%s: %m", path);
    }
    if (fstat(fd, &stat) != 0) {
        status = error_set(err, STATUS_SYSTEM, "%s: %m", path);
        goto close;
    }
    if (!S_ISREG(stat.st_mode)) {
        status = error_set(err, STATUS_INVALID, "%s: not a regular file", path);
        goto close;
    }
    if ((uint64_t)stat.st_size > max_bytes) {
        status = error_set(err, STATUS_TOO_LARGE, "%s: %lld bytes, more than the %zu allowed", path,
                           (long long)stat.st_size, max_bytes);
        goto close;
    }
    text = mem_try_alloc((size_t)stat.st_size);
    if (text == NULL) {
        status = error_set(err, STATUS_EXHAUSTED, "%s: no memory for %lld bytes", path,
                           (long long)stat.st_size);
        goto close;
    }
    /* What the file grew by since is left out; what it shrank by is an early end. */
    while (bytes < (size_t)stat.st_size) {
        ssize_t n = read(fd, text + bytes, (size_t)stat.st_size - bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            status = error_set(err, STATUS_SYSTEM, "%s: %m", path);
            goto free_text;
        }
        if (n == 0) {
            break;
        }
        bytes += (size_t)n;
    }
    struct error why;
    status = json_parse(text, bytes, limits, ret, &why);
    if (status != STATUS_OK) {
        status = error_set(err, status, "%s: %s", path, why.text);
    }
free_text:
    mem_free(text);
close:
    close(fd);
    return status;
}

void json_free(struct json *root)
{
    json_decref((json_t *)(void *)root);
}

enum json_kind json_kind_of(const struct json *value)
{
    if (value == NULL) {
        return JSON_KIND_NULL;
    }
    switch (json_typeof(inner(value))) {
    case JSON_OBJECT:
        return JSON_KIND_OBJECT;
    case JSON_ARRAY:
        return JSON_KIND_ARRAY;
    case JSON_STRING:
        return JSON_KIND_STRING;
    case JSON_INTEGER:
        return JSON_KIND_INT;
    case JSON_REAL:
        return JSON_KIND_REAL;
    case JSON_TRUE:
    case JSON_FALSE:
        return JSON_KIND_BOOL;
    case JSON_NULL:
        break;
    }
    return JSON_KIND_NULL;
}

const char *json_kind_name(enum json_kind kind)
{
    switch (kind) {
    case JSON_KIND_NULL:
        return "null";
    case JSON_KIND_BOOL:
        return "boolean";
    case JSON_KIND_INT:
        return "integer";
    case JSON_KIND_REAL:
        return "number";
    case JSON_KIND_STRING:
        return "string";
    case JSON_KIND_ARRAY:
        return "array";
    case JSON_KIND_OBJECT:
        return "object";
    }
    return "unknown";
}

bool json_int(const struct json *value, int64_t *ret)
{
    if (json_kind_of(value) != JSON_KIND_INT) {
        return false;
    }
    *ret = json_integer_value(inner(value));
    return true;
}

bool json_number(const struct json *value, double *ret)
{
    enum json_kind kind = json_kind_of(value);
    if (kind != JSON_KIND_INT && kind != JSON_KIND_REAL) {
        return false;
    }
    *ret = json_number_value(inner(value));
    return true;
}

bool json_bool(const struct json *value, bool *ret)
{
    if (json_kind_of(value) != JSON_KIND_BOOL) {
        return false;
    }
    *ret = json_is_true(inner(value));
    return true;
}

const char *json_text(const struct json *value, size_t *ret_bytes)
{
    if (json_kind_of(value) != JSON_KIND_STRING) {
        return NULL;
    }
    if (ret_bytes != NULL) {
        *ret_bytes = json_string_length(inner(value));
    }
    return json_string_value(inner(value));
}

bool json_text_is(const struct json *value, const char *text)
{
    size_t bytes;
    const char *have = json_text(value, &bytes);
    return have != NULL && bytes == strlen(text) && memcmp(have, text, bytes) == 0;
}

size_t json_array_n(const struct json *array)
{
    return json_kind_of(array) == JSON_KIND_ARRAY ? json_array_size(inner(array)) : 0;
}

const struct json *json_array_at(const struct json *array, size_t i)
{
    return json_kind_of(array) == JSON_KIND_ARRAY ? outer(json_array_get(inner(array), i)) : NULL;
}

const struct json *json_get(const struct json *object, const char *key)
{
    return json_kind_of(object) == JSON_KIND_OBJECT ? outer(json_object_get(inner(object), key))
                                                    : NULL;
}

size_t json_object_n(const struct json *object)
{
    return json_kind_of(object) == JSON_KIND_OBJECT ? json_object_size(inner(object)) : 0;
}

struct json_iter json_iterate(const struct json *object)
{
    return (struct json_iter){.object = object};
}

bool json_iterate_next(struct json_iter *iter)
{
    if (json_kind_of(iter->object) != JSON_KIND_OBJECT) {
        return false;
    }
    json_t *object = (json_t *)(uintptr_t)iter->object;
    if (!iter->started) {
        iter->started = true;
        iter->position = json_object_iter(object);
    } else if (iter->position != NULL) {
        iter->position = json_object_iter_next(object, iter->position);
    }
    if (iter->position == NULL) {
        return false;
    }
    iter->key = json_object_iter_key(iter->position);
    iter->key_bytes = json_object_iter_key_len(iter->position);
    iter->value = outer(json_object_iter_value(iter->position));
    return true;
}

/* ---- a tree back to text ---- */

/* Recursion is bounded by DEPTH_MAX, which every tree was checked against when it was parsed. */
static void dump(const struct json *value, const char *comma, const char *colon, struct buf *out)
{
    const char *text;
    size_t bytes;
    int64_t integer;
    double real;
    bool flag;
    switch (json_kind_of(value)) {
    case JSON_KIND_NULL:
        buf_append_text(out, "null");
        break;
    case JSON_KIND_BOOL:
        buf_append_text(out, json_bool(value, &flag) && flag ? "true" : "false");
        break;
    case JSON_KIND_INT:
        if (json_int(value, &integer)) {
            buf_printf(out, "%lld", (long long)integer);
        }
        break;
    case JSON_KIND_REAL:
        if (json_number(value, &real)) {
            json_text_real(out, real);
        }
        break;
    case JSON_KIND_STRING:
        text = json_text(value, &bytes);
        json_text_string(out, text, bytes);
        break;
    case JSON_KIND_ARRAY:
        buf_append_byte(out, '[');
        for (size_t i = 0; i < json_array_n(value); i++) {
            buf_append_text(out, i > 0 ? comma : "");
            dump(json_array_at(value, i), comma, colon, out);
        }
        buf_append_byte(out, ']');
        break;
    case JSON_KIND_OBJECT: {
        struct json_iter iter = json_iterate(value);
        buf_append_byte(out, '{');
        for (bool first = true; json_iterate_next(&iter); first = false) {
            buf_append_text(out, first ? "" : comma);
            json_text_string(out, iter.key, iter.key_bytes);
            buf_append_text(out, colon);
            dump(iter.value, comma, colon, out);
        }
        buf_append_byte(out, '}');
        break;
    }
    }
}

void json_dump_python(const struct json *value, struct buf *out)
{
    dump(value, ", ", ": ", out);
}

void json_dump_compact(const struct json *value, struct buf *out)
{
    dump(value, ",", ":", out);
}
