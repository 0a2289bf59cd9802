#include "base/json.h"

#include <assert.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "base/utf8.h"

/*
 * The writer: no tree, only a buffer and two bits a level. It refuses nothing at run time, since
 * what is written is ours; a wrong order is a bug and asserted. What it promises is that the result
 * is JSON whatever strings and numbers are put.
 */

/* ---- spelling ---- */

void json_text_string(struct buf *out, const char *text, size_t bytes)
{
    static const char names[0x20] = {
        ['\b'] = 'b', ['\f'] = 'f', ['\n'] = 'n', ['\r'] = 'r', ['\t'] = 't'};
    const unsigned char *p = (const unsigned char *)text;
    size_t plain = 0; /* start of the run that can be copied as it is */
    buf_append_byte(out, '"');
    for (size_t i = 0; i < bytes;) {
        unsigned char c = p[i];
        size_t n = c < 0x80 ? 1 : utf8_next(p + i, bytes - i, NULL);
        if (n > 0 && c >= 0x20 && c != '"' && c != '\\') {
            i += n;
            continue;
        }
        buf_append(out, p + plain, i - plain);
        if (n == 0) {
            buf_append_text(out, "\xef\xbf\xbd");
        } else if (c >= 0x20 || names[c] != 0) {
            buf_append(out, (const char[]){'\\', (char)(c >= 0x20 ? c : names[c])}, 2);
        } else {
            buf_printf(out, "\\u%04x", c);
        }
        plain = ++i;
    }
    buf_append(out, p + plain, bytes - plain);
    buf_append_byte(out, '"');
}

/* Significant digits d1d2d3..., with the value d1.d2d3... x 10^exponent. */
struct digits {
    char text[20];
    int n, exponent;
};

/* Splits "d.ddde+XX" as printf writes it, without trailing zeros. */
static struct digits digits_split(const char *text)
{
    struct digits digits = {.n = 0};
    const char *p = text;
    for (; *p != 'e'; p++) {
        if (*p != '.') {
            digits.text[digits.n++] = *p;
        }
    }
    digits.exponent = atoi(p + 1);
    while (digits.n > 1 && digits.text[digits.n - 1] == '0') {
        digits.n--;
    }
    return digits;
}

/*
 * The layout of Python's repr: plain from 1e-4 up to below 1e16, else with an exponent of at least
 * two digits; a plain number always shows a fraction, so that it reads back as a real.
 */
static void digits_write(struct buf *out, bool negative, const struct digits *digits)
{
    const char *d = digits->text;
    int n = digits->n, exponent = digits->exponent;
    if (negative) {
        buf_append_byte(out, '-');
    }
    if (exponent < -4 || exponent >= 16) {
        buf_printf(out, n > 1 ? "%.1s.%.*se%c%02d" : "%.1s%.*se%c%02d", d, n - 1, d + 1,
                   exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        buf_printf(out, "0.%.*s%.*s", -exponent - 1, "0000", n, d);
    } else if (n <= exponent + 1) {
        buf_printf(out, "%.*s%.*s.0", n, d, exponent + 1 - n, "0000000000000000");
    } else {
        buf_printf(out, "%.*s.%.*s", exponent + 1, d, n - exponent - 1, d + exponent + 1);
    }
}

/*
 * Any decimal of DBL_DIG (15) digits survives a normal double, so if a text that short exists, the
 * first try has it with zeros behind. Subnormals hold fewer digits: there every length is tried.
 * Just above a power of two the doubles below are closer than those above, and the nearest decimal
 * of 16 digits can fail where its upper neighbour reads back: that one is tried too.
 */
void json_text_real(struct buf *out, double value)
{
    char text[40];
    double size = fabs(value);
    int precision = size >= DBL_MIN ? DBL_DIG : 1;
    for (; precision <= 17; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision - 1, size);
        if (strtod(text, NULL) == size) {
            break;
        }
        char *last = strchr(text, 'e') - 1;
        if (precision == 16 && *last < '9') {
            ++*last;
            if (strtod(text, NULL) == size) {
                break;
            }
        }
    }
    struct digits digits = digits_split(text);
    digits_write(out, signbit(value), &digits);
}

void json_text_float(struct buf *out, float value)
{
    char text[40];
    float size = fabsf(value);
    int precision = size >= FLT_MIN ? FLT_DIG : 1;
    for (; precision <= 9; precision++) {
        snprintf(text, sizeof(text), "%.*e", precision - 1, (double)size);
        if (strtof(text, NULL) == size) {
            break;
        }
    }
    struct digits digits = digits_split(text);
    digits_write(out, signbit(value), &digits);
}

/* ---- the writer ---- */

void json_writer_init(struct json_writer *writer, struct buf *out)
{
    *writer = (struct json_writer){.out = out};
}

static bool bit(uint64_t bits, unsigned i)
{
    return bits >> i & 1;
}

/* Before any value: a comma where one is due, and the check that an object gets keys. */
static void begin_value(struct json_writer *writer)
{
    uint64_t here = UINT64_C(1) << writer->depth;
    if (writer->after_key) {
        writer->after_key = false;
        return;
    }
    assert(!(writer->is_object & here) && "a member needs its key first");
    assert((writer->depth > 0 || !(writer->has_member & here)) && "one value is the whole text");
    if (writer->has_member & here) {
        buf_append_byte(writer->out, ',');
    }
    writer->has_member |= here;
}

static void begin(struct json_writer *writer, bool object)
{
    begin_value(writer);
    assert(writer->depth + 1 < JSON_WRITER_DEPTH_MAX);
    writer->depth++;
    uint64_t here = UINT64_C(1) << writer->depth;
    writer->has_member &= ~here;
    writer->is_object = object ? writer->is_object | here : writer->is_object & ~here;
    buf_append_byte(writer->out, object ? '{' : '[');
}

static void end(struct json_writer *writer, bool object)
{
    assert(writer->depth > 0 && !writer->after_key);
    assert(bit(writer->is_object, writer->depth) == object);
    writer->depth--;
    buf_append_byte(writer->out, object ? '}' : ']');
}

void json_begin_object(struct json_writer *writer)
{
    begin(writer, true);
}

void json_end_object(struct json_writer *writer)
{
    end(writer, true);
}

void json_begin_array(struct json_writer *writer)
{
    begin(writer, false);
}

void json_end_array(struct json_writer *writer)
{
    end(writer, false);
}

void json_key_n(struct json_writer *writer, const char *key, size_t bytes)
{
    uint64_t here = UINT64_C(1) << writer->depth;
    assert((writer->is_object & here) && !writer->after_key);
    if (writer->has_member & here) {
        buf_append_byte(writer->out, ',');
    }
    writer->has_member |= here;
    json_text_string(writer->out, key, bytes);
    buf_append_byte(writer->out, ':');
    writer->after_key = true;
}

void json_key(struct json_writer *writer, const char *key)
{
    json_key_n(writer, key, strlen(key));
}

void json_put_string_n(struct json_writer *writer, const char *text, size_t bytes)
{
    begin_value(writer);
    if (text == NULL) {
        buf_append_text(writer->out, "null");
    } else {
        json_text_string(writer->out, text, bytes);
    }
}

void json_put_string(struct json_writer *writer, const char *text)
{
    json_put_string_n(writer, text, text ? strlen(text) : 0);
}

void json_put_int(struct json_writer *writer, int64_t value)
{
    begin_value(writer);
    buf_printf(writer->out, "%" PRId64, value);
}

void json_put_uint(struct json_writer *writer, uint64_t value)
{
    begin_value(writer);
    buf_printf(writer->out, "%" PRIu64, value);
}

void json_put_bool(struct json_writer *writer, bool value)
{
    begin_value(writer);
    buf_append_text(writer->out, value ? "true" : "false");
}

void json_put_null(struct json_writer *writer)
{
    begin_value(writer);
    buf_append_text(writer->out, "null");
}

void json_put_real(struct json_writer *writer, double value)
{
    if (!isfinite(value)) {
        json_put_null(writer);
        return;
    }
    begin_value(writer);
    json_text_real(writer->out, value);
}

void json_put_float(struct json_writer *writer, float value)
{
    if (!isfinite(value)) {
        json_put_null(writer);
        return;
    }
    begin_value(writer);
    json_text_float(writer->out, value);
}

void json_put_raw(struct json_writer *writer, const void *text, size_t bytes)
{
    begin_value(writer);
    buf_append(writer->out, text, bytes);
}

void json_put_value(struct json_writer *writer, const struct json *value)
{
    begin_value(writer);
    json_dump_compact(value, writer->out);
}

void json_pair_string(struct json_writer *writer, const char *key, const char *text)
{
    json_key(writer, key);
    json_put_string(writer, text);
}

void json_pair_int(struct json_writer *writer, const char *key, int64_t value)
{
    json_key(writer, key);
    json_put_int(writer, value);
}

void json_pair_uint(struct json_writer *writer, const char *key, uint64_t value)
{
    json_key(writer, key);
    json_put_uint(writer, value);
}

void json_pair_real(struct json_writer *writer, const char *key, double value)
{
    json_key(writer, key);
    json_put_real(writer, value);
}

void json_pair_bool(struct json_writer *writer, const char *key, bool value)
{
    json_key(writer, key);
    json_put_bool(writer, value);
}
