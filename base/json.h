#ifndef BATON_BASE_JSON_H
#define BATON_BASE_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * JSON: a strict parser into a read-only tree, and a writer without a tree. The parser takes
 * foreign bytes and refuses duplicates, NaN, lone surrogates, trailing commas or text, raw control
 * bytes, a byte order mark, invalid UTF-8, integers outside int64 and numbers outside double.
 * Strings are UTF-8 with a length, and may hold NUL (from \u0000); keys may not.
 */
struct json;

enum json_kind {
    JSON_KIND_NULL,
    JSON_KIND_BOOL,
    JSON_KIND_INT,  /* written without fraction and exponent */
    JSON_KIND_REAL, /* written with either: 1.0 and 1e2 are reals */
    JSON_KIND_STRING,
    JSON_KIND_ARRAY,
    JSON_KIND_OBJECT,
};

struct json_limits {
    size_t max_bytes;   /* of the text; 0: 64 MiB */
    unsigned max_depth; /* of arrays and objects in one another; 0: 128, at most 1024 */
};

/*
 * Parses bytes bytes at text, which must hold exactly one value. limits may be NULL (defaults).
 * STATUS_INVALID with line and column in err, or STATUS_TOO_LARGE. On success the caller owns
 * *ret and releases it with json_free; everything below it lives as long. Any thread, and a tree
 * may be read by several threads at once.
 */
enum status json_parse(const void *text, size_t bytes, const struct json_limits *limits,
                       struct json **ret, struct error *err) must_check;

/* Reads a whole file (regular, up to the limit) and parses it; the error text names the file. */
enum status json_parse_file(const char *path, const struct json_limits *limits, struct json **ret,
                            struct error *err) must_check;

/* Releases the root of a tree, and only a root; NULL is allowed. */
void json_free(struct json *root);

/*
 * Reading. Each takes any value, also NULL (an absent member), and answers false, NULL or 0 for
 * one of another kind, so a chain of lookups needs one check at its end.
 */
enum json_kind json_kind_of(const struct json *value); /* NULL reads as JSON_KIND_NULL */
const char *json_kind_name(enum json_kind kind);       /* "object", "integer", ... */
bool json_int(const struct json *value, int64_t *ret) must_check;
bool json_number(const struct json *value, double *ret) must_check; /* integers too */
bool json_bool(const struct json *value, bool *ret) must_check;

/* The text of a string, also terminated by NUL; ret_bytes may be NULL when NUL can't matter. */
const char *json_text(const struct json *value, size_t *ret_bytes) must_check;

/* Whether it is a string equal to text. */
bool json_text_is(const struct json *value, const char *text) must_check;

size_t json_array_n(const struct json *array) must_check;
const struct json *json_array_at(const struct json *array, size_t i) must_check; /* NULL past it */

/* Member of an object; NULL when absent. A member that is null is not absent: JSON_KIND_NULL. */
const struct json *json_get(const struct json *object, const char *key) must_check;
size_t json_object_n(const struct json *object) must_check;

/*
 * Steps through the members in the order of the text:
 *     struct json_iter it = json_iterate(object);
 *     while (json_iterate_next(&it)) { ... it.key, it.key_bytes, it.value ... }
 */
struct json_iter {
    const struct json *object, *value;
    const char *key;
    size_t key_bytes;
    void *position;
    bool started;
};
struct json_iter json_iterate(const struct json *object);
bool json_iterate_next(struct json_iter *iter) must_check;

/*
 * Appends the value exactly as Python's json.dumps(value, ensure_ascii=False) writes it after
 * json.loads: ", " and ": " between, members in order, floats as repr writes them. Chat templates
 * depend on these bytes. NULL is written as null.
 */
void json_dump_python(const struct json *value, struct buf *out);

/* The same without any spaces. */
void json_dump_compact(const struct json *value, struct buf *out);

/*
 * Writing. A writer appends to a buf and keeps track of commas; it knows nothing else. Order and
 * nesting are the caller's duty (asserted). Borrow of out until the writer is done with.
 */
enum { JSON_WRITER_DEPTH_MAX = 64 };

struct json_writer {
    struct buf *out;
    unsigned depth;
    bool after_key;
    uint64_t has_member; /* bit d: something was written at depth d */
    uint64_t is_object;  /* bit d: depth d is an object */
};

void json_writer_init(struct json_writer *writer, struct buf *out);

void json_begin_object(struct json_writer *writer);
void json_end_object(struct json_writer *writer);
void json_begin_array(struct json_writer *writer);
void json_end_array(struct json_writer *writer);

/* The name of the next member. */
void json_key(struct json_writer *writer, const char *key);
void json_key_n(struct json_writer *writer, const char *key, size_t bytes);

/*
 * Values. Text passes through as UTF-8; quotes, backslashes and control bytes are escaped, and
 * bytes that are not UTF-8 become U+FFFD, so that what is written is always JSON. NULL text is
 * written as null.
 */
void json_put_string(struct json_writer *writer, const char *text);
void json_put_string_n(struct json_writer *writer, const char *text, size_t bytes);
void json_put_int(struct json_writer *writer, int64_t value);
void json_put_uint(struct json_writer *writer, uint64_t value);
void json_put_bool(struct json_writer *writer, bool value);
void json_put_null(struct json_writer *writer);

/* Shortest text that reads back as the same double; not finite becomes null. */
void json_put_real(struct json_writer *writer, double value);

/* Shortest of up to nine digits that reads back as the same float; not finite becomes null. */
void json_put_float(struct json_writer *writer, float value);

/* A value that is JSON already; not checked. */
void json_put_raw(struct json_writer *writer, const void *text, size_t bytes);

/* A parsed value, again as JSON without spaces. */
void json_put_value(struct json_writer *writer, const struct json *value);

/* Key and value in one call. */
void json_pair_string(struct json_writer *writer, const char *key, const char *text);
void json_pair_int(struct json_writer *writer, const char *key, int64_t value);
void json_pair_uint(struct json_writer *writer, const char *key, uint64_t value);
void json_pair_real(struct json_writer *writer, const char *key, double value);
void json_pair_bool(struct json_writer *writer, const char *key, bool value);

#endif
