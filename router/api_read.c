/*
 * Typed values out of a body. What is refused here is named by its path and shown as it was found,
 * because clients that get a 400 without that drop one field after another and try again.
 */
#include "router/api_read.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum status api_read_refuse(struct api_reader *reader, enum api_code code, const char *param,
                            const char *format, ...)
{
    struct error text;
    va_list args;
    va_start(args, format);
    vsnprintf(text.text, sizeof(text.text), format, args);
    va_end(args);
    api_error_set(reader->error, code, param, "%s", text.text);
    return STATUS_INVALID;
}

const struct json *api_read_field(const struct api_reader *reader, const char *key)
{
    const struct json *value = json_get(reader->root, key);
    return json_kind_of(value) == JSON_KIND_NULL ? NULL : value;
}

struct api_shown api_read_show(const struct json *value)
{
    struct api_shown shown;
    size_t bytes;
    const char *text = json_text(value, &bytes);
    enum json_kind kind = json_kind_of(value);
    if (kind == JSON_KIND_ARRAY || kind == JSON_KIND_OBJECT) {
        snprintf(shown.text, sizeof(shown.text), "an %s", json_kind_name(kind));
    } else if (text != NULL && bytes <= 24) {
        snprintf(shown.text, sizeof(shown.text), "'%s'", text);
    } else if (text != NULL) {
        snprintf(shown.text, sizeof(shown.text), "a string of %zu bytes", bytes);
    } else {
        struct buf dump = BUF_INIT;
        json_dump_compact(value, &dump);
        snprintf(shown.text, sizeof(shown.text), "%s", buf_text(&dump));
        buf_fini(&dump);
    }
    return shown;
}

enum status api_read_bool(struct api_reader *reader, const struct json *value, const char *path,
                          bool *ret)
{
    if (json_kind_of(value) == JSON_KIND_NULL || json_bool(value, ret)) {
        return STATUS_OK;
    }
    return api_read_refuse(reader, API_CODE_INVALID_VALUE, path, "%s must be a boolean, not %s",
                           path, api_read_show(value).text);
}

/* An integer, perhaps written as a real; false for anything else and for what int64 can't hold. */
static bool as_int(const struct json *value, int64_t *ret)
{
    double real;
    if (json_int(value, ret)) {
        return true;
    }
    /* beyond 2^53 a real may not be the number that was meant */
    if (!json_number(value, &real) || real != floor(real) || fabs(real) > 9007199254740992.0) {
        return false;
    }
    *ret = (int64_t)real;
    return true;
}

enum status api_read_int(struct api_reader *reader, const struct json *value, const char *path,
                         int64_t min, int64_t max, int64_t *ret)
{
    int64_t found;
    if (json_kind_of(value) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    if (!as_int(value, &found)) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s must be an integer, not %s", path, api_read_show(value).text);
    }
    if (found >= min && found <= max) {
        *ret = found;
        return STATUS_OK;
    }
    if (max == INT64_MAX) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s must be at least %" PRId64 ", not %" PRId64, path, min, found);
    }
    return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                           "%s must be from %" PRId64 " to %" PRId64 ", not %" PRId64, path, min,
                           max, found);
}

enum status api_read_number(struct api_reader *reader, const struct json *value, const char *path,
                            double min, double max, double *ret)
{
    double found;
    if (json_kind_of(value) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    if (!json_number(value, &found)) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path, "%s must be a number, not %s",
                               path, api_read_show(value).text);
    }
    if (!(found >= min && found <= max)) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s must be from %g to %g, not %s", path, min, max,
                               api_read_show(value).text);
    }
    *ret = found;
    return STATUS_OK;
}

static uint32_t n_vocab(const struct api_context *context)
{
    return context->n_vocab != 0 ? context->n_vocab : tokenizer_n_vocab(context->tokenizer);
}

enum status api_read_id(struct api_reader *reader, const struct json *value, const char *path,
                        uint32_t *ret)
{
    int64_t id;
    uint32_t n = n_vocab(reader->context);
    if (!as_int(value, &id)) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s must be a token id, not %s", path, api_read_show(value).text);
    }
    if (id < 0 || id >= n) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s: %" PRId64 " is outside the vocabulary of %" PRIu32 " tokens",
                               path, id, n);
    }
    *ret = (uint32_t)id;
    return STATUS_OK;
}

enum status api_read_ids(struct api_reader *reader, const struct json *array, const char *path,
                         const uint32_t **ret, size_t *ret_n)
{
    size_t n = json_array_n(array);
    if (json_kind_of(array) != JSON_KIND_ARRAY) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, path,
                               "%s must be an array of token ids, not %s", path,
                               api_read_show(array).text);
    }
    /* a body of 32 MiB holds at most 16 M ids */
    uint32_t *ids = arena_try_alloc(reader->request->arena, n * sizeof(*ids));
    if (ids == NULL) {
        api_error_set(reader->error, API_CODE_INTERNAL_ERROR, path, "no memory for %zu ids", n);
        return STATUS_EXHAUSTED;
    }
    for (size_t i = 0; i < n; i++) {
        const struct json *value = json_array_at(array, i);
        int64_t id;
        if (json_int(value, &id) && id >= 0 && id < n_vocab(reader->context)) {
            ids[i] = (uint32_t)id;
            continue;
        }
        char element[API_PARAM_BYTES];
        snprintf(element, sizeof(element), "%s.%zu", path, i);
        enum status status = api_read_id(reader, value, element, &ids[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    *ret = ids;
    *ret_n = n;
    return STATUS_OK;
}
