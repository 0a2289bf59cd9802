#include "base/opts_value.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/json_text.h"
#include "base/mem.h"

/*
 * Text to value and back. Everything here is exact: a size or duration is scaled in integers, and
 * what does not fit is an error, never a rounded or wrapped number. Messages say what would be
 * right, since the reader is the person who typed it.
 */

struct unit {
    const char *name;
    uint64_t factor;
};

/* In the order in which a value is written: largest first, and the first name of a factor wins. */
static const struct unit size_units[] = {
    {"T", UINT64_C(1) << 40},
    {"G", UINT64_C(1) << 30},
    {"M", UINT64_C(1) << 20},
    {"K", UINT64_C(1) << 10},
    {"TiB", UINT64_C(1) << 40},
    {"GiB", UINT64_C(1) << 30},
    {"MiB", UINT64_C(1) << 20},
    {"KiB", UINT64_C(1) << 10},
    {"TB", UINT64_C(1000000000000)},
    {"GB", 1000000000},
    {"MB", 1000000},
    {"KB", 1000},
    {"B", 1},
    {"", 1},
    {NULL, 0},
};

static const struct unit duration_units[] = {
    {"d", UINT64_C(86400000000000)},
    {"h", UINT64_C(3600000000000)},
    {"m", UINT64_C(60000000000)},
    {"s", 1000000000},
    {"ms", 1000000},
    {"us", 1000},
    {"ns", 1},
    {NULL, 0},
};

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* Digits, perhaps a fraction, then a unit; 0 alone needs none. False when it is not that. */
static bool parse_scaled(const char *text, const struct unit *units, uint64_t *ret)
{
    unsigned __int128 whole = 0, fraction = 0, scale = 1;
    const char *p = text;
    if (!is_digit(*p)) {
        return false;
    }
    for (; is_digit(*p); p++) {
        whole = whole * 10 + (unsigned)(*p - '0');
        if (whole > UINT64_MAX) {
            return false;
        }
    }
    if (*p == '.') {
        if (!is_digit(*++p)) {
            return false;
        }
        for (; is_digit(*p); p++) {
            /* Twelve places are finer than a nanosecond of any unit that people write. */
            if (scale < 1000000000000u) {
                fraction = fraction * 10 + (unsigned)(*p - '0');
                scale *= 10;
            }
        }
    }
    if (*p == '\0' && whole == 0 && fraction == 0) {
        *ret = 0;
        return true;
    }
    for (const struct unit *unit = units; unit->name != NULL; unit++) {
        if (strcasecmp(p, unit->name) == 0) {
            unsigned __int128 value = whole * unit->factor + fraction * unit->factor / scale;
            if (value > UINT64_MAX) {
                return false;
            }
            *ret = (uint64_t)value;
            return true;
        }
    }
    return false;
}

enum status opts_parse_size(const char *text, uint64_t *ret_bytes, struct error *err)
{
    if (!parse_scaled(text, size_units, ret_bytes)) {
        return error_set(err, STATUS_INVALID, "\"%.80s\" is no size: write 4096, 64K, 1.5G or 2GB",
                         text);
    }
    return STATUS_OK;
}

enum status opts_parse_duration(const char *text, uint64_t *ret_ns, struct error *err)
{
    if (!parse_scaled(text, duration_units, ret_ns)) {
        return error_set(err, STATUS_INVALID,
                         "\"%.80s\" is no duration: write a number and its unit, as in 250ms, "
                         "1.5s, 2m or 1h",
                         text);
    }
    return STATUS_OK;
}

static void write_scaled(uint64_t value, const struct unit *units, const char *smallest,
                         struct buf *out)
{
    for (const struct unit *unit = units; value != 0 && unit->factor > 1; unit++) {
        if (value % unit->factor == 0) {
            buf_printf(out, "%" PRIu64 "%s", value / unit->factor, unit->name);
            return;
        }
    }
    buf_printf(out, "%" PRIu64 "%s", value, value ? smallest : "");
}

void opts_value_size(uint64_t bytes, struct buf *out)
{
    write_scaled(bytes, size_units, "", out);
}

void opts_value_duration(uint64_t ns, struct buf *out)
{
    write_scaled(ns, duration_units, "ns", out);
}

static bool bounded(const struct opt_spec *spec)
{
    return spec->min != 0 || spec->max != 0;
}

void opts_value_range(const struct opt_spec *spec, struct buf *out)
{
    if (!bounded(spec)) {
        return;
    }
    if (spec->kind == OPT_SIZE || spec->kind == OPT_DURATION) {
        void (*write)(uint64_t, struct buf *) =
            spec->kind == OPT_SIZE ? opts_value_size : opts_value_duration;
        write((uint64_t)spec->min, out);
        buf_append_text(out, " to ");
        write((uint64_t)spec->max, out);
    } else {
        buf_printf(out, "%" PRId64 " to %" PRId64, spec->min, spec->max);
    }
}

const char *opts_value_name(const struct opt_spec *spec)
{
    if (spec->value != NULL) {
        return spec->value;
    }
    switch (spec->kind) {
    case OPT_INT:
    case OPT_REAL:
        return "N";
    case OPT_SIZE:
        return "SIZE";
    case OPT_DURATION:
        return "TIME";
    case OPT_ENUM:
        return "WORD";
    case OPT_GROUP:
    case OPT_STRING:
    case OPT_BOOL:
    case OPT_LIST:
    case OPT_OPERANDS:
        break;
    }
    return "TEXT";
}

/* ---- text to field ---- */

static enum status out_of_range(const struct opt_spec *spec, const char *text, const char *where,
                                struct error *err)
{
    struct buf range = BUF_INIT;
    opts_value_range(spec, &range);
    enum status status = error_set(err, STATUS_INVALID, "%s: %.80s is out of range: %s", where,
                                   text, buf_text(&range));
    buf_fini(&range);
    return status;
}

static enum status set_int(const struct opt_spec *spec, int64_t *field, const char *text,
                           const char *where, struct error *err)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (!(is_digit(text[0]) || text[0] == '-') || end == text || *end != '\0' || errno != 0) {
        return error_set(err, STATUS_INVALID, "%s: \"%.80s\" is no whole number", where, text);
    }
    if (bounded(spec) && (value < spec->min || value > spec->max)) {
        return out_of_range(spec, text, where, err);
    }
    *field = value;
    return STATUS_OK;
}

static enum status set_real(const struct opt_spec *spec, double *field, const char *text,
                            const char *where, struct error *err)
{
    char *end;
    double value = strtod(text, &end);
    if (text[0] == '\0' || strspn(text, "0123456789+-.eE") != strlen(text) || *end != '\0' ||
        !isfinite(value)) {
        return error_set(err, STATUS_INVALID, "%s: \"%.80s\" is no number", where, text);
    }
    if (bounded(spec) && (value < (double)spec->min || value > (double)spec->max)) {
        return out_of_range(spec, text, where, err);
    }
    *field = value;
    return STATUS_OK;
}

static enum status set_scaled(const struct opt_spec *spec, uint64_t *field, const char *text,
                              const char *where, struct error *err)
{
    uint64_t value;
    struct error why;
    enum status status = spec->kind == OPT_SIZE ? opts_parse_size(text, &value, &why)
                                                : opts_parse_duration(text, &value, &why);
    if (status != STATUS_OK) {
        return error_set(err, status, "%s: %s", where, why.text);
    }
    if (bounded(spec) && (value < (uint64_t)spec->min || value > (uint64_t)spec->max)) {
        return out_of_range(spec, text, where, err);
    }
    *field = value;
    return STATUS_OK;
}

static enum status set_bool(bool *field, const char *text, const char *where, struct error *err)
{
    static const char *const words[][2] = {
        {"no", "yes"}, {"false", "true"}, {"off", "on"}, {"0", "1"}};
    for (size_t i = 0; i < 4; i++) {
        for (int value = 0; value < 2; value++) {
            if (strcasecmp(text, words[i][value]) == 0) {
                *field = value == 1;
                return STATUS_OK;
            }
        }
    }
    return error_set(err, STATUS_INVALID, "%s: \"%.80s\" is neither yes nor no", where, text);
}

static enum status set_enum(const struct opt_spec *spec, int *field, const char *text,
                            const char *where, struct error *err)
{
    struct buf list = BUF_INIT;
    for (int i = 0; spec->choices[i] != NULL; i++) {
        if (strcmp(text, spec->choices[i]) == 0) {
            *field = i;
            buf_fini(&list);
            return STATUS_OK;
        }
        buf_printf(&list, "%s%s", i > 0 ? ", " : "", spec->choices[i]);
    }
    enum status status = error_set(err, STATUS_INVALID, "%s: \"%.80s\" is none of: %s", where, text,
                                   buf_text(&list));
    buf_fini(&list);
    return status;
}

static void add_item(struct opt_list *list, const char *text)
{
    list->items = mem_realloc_array(list->items, list->n + 1, sizeof(list->items[0]));
    list->items[list->n++] = mem_strdup(text);
}

enum status opts_value_set(const struct opt_spec *spec, void *values, const char *text,
                           const char *where, struct error *err)
{
    void *field = (char *)values + spec->offset;
    switch (spec->kind) {
    case OPT_GROUP:
        break;
    case OPT_STRING:
        mem_free(*(char **)field);
        *(char **)field = mem_strdup(text);
        break;
    case OPT_INT:
        return set_int(spec, field, text, where, err);
    case OPT_REAL:
        return set_real(spec, field, text, where, err);
    case OPT_SIZE:
    case OPT_DURATION:
        return set_scaled(spec, field, text, where, err);
    case OPT_BOOL:
        return set_bool(field, text, where, err);
    case OPT_ENUM:
        return set_enum(spec, field, text, where, err);
    case OPT_LIST:
    case OPT_OPERANDS:
        add_item(field, text);
        break;
    }
    return STATUS_OK;
}

void opts_value_clear(const struct opt_spec *spec, void *values)
{
    void *field = (char *)values + spec->offset;
    struct opt_list *list = field;
    switch (spec->kind) {
    case OPT_GROUP:
        break;
    case OPT_STRING:
        mem_free(*(char **)field);
        *(char **)field = NULL;
        break;
    case OPT_INT:
        *(int64_t *)field = 0;
        break;
    case OPT_REAL:
        *(double *)field = 0;
        break;
    case OPT_SIZE:
    case OPT_DURATION:
        *(uint64_t *)field = 0;
        break;
    case OPT_BOOL:
        *(bool *)field = false;
        break;
    case OPT_ENUM:
        *(int *)field = 0;
        break;
    case OPT_LIST:
    case OPT_OPERANDS:
        for (size_t i = 0; i < list->n; i++) {
            mem_free(list->items[i]);
        }
        mem_free(list->items);
        *list = (struct opt_list){NULL, 0};
        break;
    }
}

/* ---- field to text ---- */

void opts_value_quote(const char *text, struct buf *out)
{
    buf_append_byte(out, '"');
    for (const char *p = text; *p != '\0'; p++) {
        if (*p == '"' || *p == '\\') {
            buf_append_byte(out, '\\');
        }
        if (*p == '\n') {
            buf_append_text(out, "\\n");
        } else {
            buf_append_byte(out, (uint8_t)*p);
        }
    }
    buf_append_byte(out, '"');
}

void opts_value_text(const struct opt_spec *spec, const void *values, struct buf *out)
{
    const void *field = (const char *)values + spec->offset;
    switch (spec->kind) {
    case OPT_STRING:
        opts_value_quote(*(char *const *)field, out);
        break;
    case OPT_INT:
        buf_printf(out, "%" PRId64, *(const int64_t *)field);
        break;
    case OPT_REAL:
        json_text_real(out, *(const double *)field);
        break;
    case OPT_SIZE:
        opts_value_size(*(const uint64_t *)field, out);
        break;
    case OPT_DURATION:
        opts_value_duration(*(const uint64_t *)field, out);
        break;
    case OPT_BOOL:
        buf_append_text(out, *(const bool *)field ? "yes" : "no");
        break;
    case OPT_ENUM:
        buf_append_text(out, spec->choices[*(const int *)field]);
        break;
    case OPT_GROUP:
    case OPT_LIST:
    case OPT_OPERANDS:
        assert(false && "not one value");
        break;
    }
}
