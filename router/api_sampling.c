/*
 * How an answer is drawn and where it ends: the fields that chat and completions share. The node
 * that samples takes these numbers as they stand, so every default and every bound is applied
 * here, before anything is scheduled.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "router/api_read.h"

/* Above 0, as a bound that is itself allowed: no client means less than this. */
static const double REPETITION_PENALTY_MIN = 1e-6;

static uint32_t clamp_u32(int64_t value)
{
    return value > UINT32_MAX ? UINT32_MAX : (uint32_t)value;
}

static enum status read_numbers(struct api_reader *r)
{
    struct api_sampling *s = &r->request->sampling;
    const struct {
        const char *key;
        double min, max, *to;
    } fields[] = {
        {"temperature", 0, 2, &s->temperature},
        {"top_p", 0, 1, &s->top_p},
        {"min_p", 0, 1, &s->min_p},
        {"presence_penalty", -2, 2, &s->presence_penalty},
        {"frequency_penalty", -2, 2, &s->frequency_penalty},
        {"repetition_penalty", REPETITION_PENALTY_MIN, 10, &s->repetition_penalty},
    };
    int64_t top_k = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        enum status status = api_read_number(r, api_read_field(r, fields[i].key), fields[i].key,
                                             fields[i].min, fields[i].max, fields[i].to);
        if (status != STATUS_OK) {
            return status;
        }
    }
    enum status status =
        api_read_int(r, api_read_field(r, "top_k"), "top_k", -1, INT64_MAX, &top_k);
    if (status != STATUS_OK) {
        return status;
    }
    s->top_k = top_k < 0 ? 0 : top_k > INT32_MAX ? INT32_MAX : (int32_t)top_k;
    s->seed_given = api_read_field(r, "seed") != NULL;
    return api_read_int(r, api_read_field(r, "seed"), "seed", INT64_MIN, INT64_MAX, &s->seed);
}

/* max_completion_tokens and its older name; min_tokens; n. */
static enum status read_limits(struct api_reader *r)
{
    struct api_sampling *s = &r->request->sampling;
    int64_t newer = 0, older = 0, min_tokens = 0, n = 1;
    const struct {
        const char *key;
        int64_t min, max, *to;
    } fields[] = {
        {"max_completion_tokens", 1, INT64_MAX, &newer},
        {"max_tokens", 1, INT64_MAX, &older},
        {"min_tokens", 0, INT64_MAX, &min_tokens},
        {"n", 1, API_MAX_N, &n},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        enum status status = api_read_int(r, api_read_field(r, fields[i].key), fields[i].key,
                                          fields[i].min, fields[i].max, fields[i].to);
        if (status != STATUS_OK) {
            return status;
        }
    }
    if (newer != 0 && older != 0 && newer != older) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "max_completion_tokens",
                               "max_completion_tokens is %" PRId64 " and max_tokens is %" PRId64
                               ": give one of them, or both equal",
                               newer, older);
    }
    s->max_tokens = clamp_u32(newer != 0 ? newer : older);
    s->min_tokens = clamp_u32(min_tokens);
    r->request->n = (uint32_t)n;
    return STATUS_OK;
}

static enum status read_stop(struct api_reader *r, const struct json *value, const char *path,
                             const char **ret, size_t *ret_bytes)
{
    size_t bytes = 0;
    const char *text = json_text(value, &bytes);
    if (text == NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path, "%s must be a string, not %s", path,
                               api_read_show(value).text);
    }
    if (bytes < 1 || bytes > API_MAX_STOP_BYTES) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path,
                               "%s must have from 1 to %d bytes, not %zu", path, API_MAX_STOP_BYTES,
                               bytes);
    }
    *ret = text;
    *ret_bytes = bytes;
    return STATUS_OK;
}

static enum status read_stops(struct api_reader *r)
{
    const struct json *stop = api_read_field(r, "stop");
    bool is_array = json_kind_of(stop) == JSON_KIND_ARRAY;
    size_t n = is_array ? json_array_n(stop) : stop != NULL;
    if (n > API_MAX_STOPS) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "stop",
                               "stop has %zu strings, at most %d are taken", n, API_MAX_STOPS);
    }
    const char **stops = arena_alloc(r->request->arena, n * sizeof(*stops));
    size_t *bytes = arena_alloc(r->request->arena, n * sizeof(*bytes));
    for (size_t i = 0; i < n; i++) {
        char path[API_PARAM_BYTES] = "stop";
        if (is_array) {
            snprintf(path, sizeof(path), "stop.%zu", i);
        }
        enum status status =
            read_stop(r, is_array ? json_array_at(stop, i) : stop, path, &stops[i], &bytes[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    r->request->stops = stops;
    r->request->stop_bytes = bytes;
    r->request->n_stops = n;
    return STATUS_OK;
}

static enum status read_stop_ids(struct api_reader *r)
{
    struct api_sampling *s = &r->request->sampling;
    const struct json *ids = api_read_field(r, "stop_token_ids");
    enum status status =
        api_read_bool(r, api_read_field(r, "ignore_eos"), "ignore_eos", &s->ignore_eos);
    if (status != STATUS_OK || ids == NULL) {
        return status;
    }
    if (json_array_n(ids) > API_MAX_STOP_IDS) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "stop_token_ids",
                               "stop_token_ids has %zu ids, at most %d are taken",
                               json_array_n(ids), API_MAX_STOP_IDS);
    }
    return api_read_ids(r, ids, "stop_token_ids", &s->stop_token_ids, &s->n_stop_token_ids);
}

/*
 * A key of logit_bias: an id as JSON keys hold it, digits alone and no zero before others. As one
 * id has one such form and a parsed object no key twice, no id comes twice.
 */
static bool key_to_int(const char *key, size_t bytes, int64_t *ret)
{
    bool negative = bytes > 0 && key[0] == '-';
    size_t i = negative;
    int64_t value = 0;
    if (bytes == i || bytes - i > 18 || (key[i] == '0' && bytes - i > 1)) {
        return false;
    }
    for (; i < bytes; i++) {
        if (key[i] < '0' || key[i] > '9') {
            return false;
        }
        value = value * 10 + (key[i] - '0');
    }
    *ret = negative ? -value : value;
    return true;
}

static enum status read_bias(struct api_reader *r, const struct json_iter *it,
                             struct api_logit_bias *ret)
{
    char path[API_PARAM_BYTES];
    int64_t id;
    double bias = 0;
    uint32_t n =
        r->context->n_vocab != 0 ? r->context->n_vocab : tokenizer_n_vocab(r->context->tokenizer);
    snprintf(path, sizeof(path), "logit_bias.%.24s", it->key);
    if (!key_to_int(it->key, it->key_bytes, &id)) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "logit_bias",
                               "keys of logit_bias must be token ids, not '%.24s'", it->key);
    }
    if (id < 0 || id >= n) {
        return api_read_refuse(
            r, API_CODE_INVALID_VALUE, path,
            "logit_bias: %" PRId64 " is outside the vocabulary of %" PRIu32 " tokens", id, n);
    }
    if (json_kind_of(it->value) == JSON_KIND_NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path, "%s must be a number, not null",
                               path);
    }
    enum status status = api_read_number(r, it->value, path, -100, 100, &bias);
    if (status == STATUS_OK) {
        *ret = (struct api_logit_bias){(uint32_t)id, (float)bias};
    }
    return status;
}

static enum status read_logit_bias(struct api_reader *r)
{
    const struct json *object = api_read_field(r, "logit_bias");
    size_t n = json_object_n(object), i = 0;
    if (object == NULL) {
        return STATUS_OK;
    }
    if (json_kind_of(object) != JSON_KIND_OBJECT) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "logit_bias",
                               "logit_bias must be an object of token ids and numbers, not %s",
                               api_read_show(object).text);
    }
    if (n > API_MAX_LOGIT_BIASES) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "logit_bias",
                               "logit_bias has %zu ids, at most %d are taken", n,
                               API_MAX_LOGIT_BIASES);
    }
    struct api_logit_bias *bias = arena_alloc(r->request->arena, n * sizeof(*bias));
    for (struct json_iter it = json_iterate(object); json_iterate_next(&it) && i < n; i++) {
        enum status status = read_bias(r, &it, &bias[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    r->request->sampling.logit_bias = bias;
    r->request->sampling.n_logit_bias = n;
    return STATUS_OK;
}

/* Chat has a switch and a number, completions the number alone. */
static enum status read_logprobs(struct api_reader *r)
{
    struct api_sampling *s = &r->request->sampling;
    const struct json *logprobs = api_read_field(r, "logprobs");
    int64_t n_top = 0;
    enum status status;
    if (r->request->kind == API_KIND_COMPLETIONS) {
        status = api_read_int(r, logprobs, "logprobs", 0, API_MAX_TOP_LOGPROBS, &n_top);
        s->logprobs = logprobs != NULL;
        s->n_top_logprobs = (uint32_t)n_top;
        return status;
    }
    status = api_read_bool(r, logprobs, "logprobs", &s->logprobs);
    if (status == STATUS_OK) {
        status = api_read_int(r, api_read_field(r, "top_logprobs"), "top_logprobs", 0,
                              API_MAX_TOP_LOGPROBS, &n_top);
    }
    if (status == STATUS_OK && n_top > 0 && !s->logprobs) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "top_logprobs",
                               "top_logprobs is %" PRId64 " and logprobs is not true", n_top);
    }
    s->n_top_logprobs = (uint32_t)n_top;
    return status;
}

static enum status read_stream(struct api_reader *r)
{
    struct api_request *request = r->request;
    enum status status = api_read_bool(r, api_read_field(r, "stream"), "stream", &request->stream);
    const struct json *options = api_read_field(r, "stream_options");
    if (status != STATUS_OK || !request->stream || options == NULL) {
        return status;
    }
    if (json_kind_of(options) != JSON_KIND_OBJECT) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "stream_options",
                               "stream_options must be an object, not %s",
                               api_read_show(options).text);
    }
    return api_read_bool(r, json_get(options, "include_usage"), "stream_options.include_usage",
                         &request->include_usage);
}

/* Output can't be constrained, so any format but text is refused and not ignored. */
static enum status read_response_format(struct api_reader *r)
{
    const struct json *format = api_read_field(r, "response_format");
    const struct json *type = json_get(format, "type");
    if (format == NULL || json_text_is(type, "text")) {
        return STATUS_OK;
    }
    if (json_text_is(type, "json_object") || json_text_is(type, "json_schema")) {
        return api_read_refuse(r, API_CODE_UNSUPPORTED_VALUE, "response_format.type",
                               "response_format.type %s is not supported, 'text' is",
                               api_read_show(type).text);
    }
    if (json_kind_of(format) != JSON_KIND_OBJECT) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "response_format",
                               "response_format must be an object, not %s",
                               api_read_show(format).text);
    }
    return api_read_refuse(r, API_CODE_INVALID_VALUE, "response_format.type",
                           "response_format.type must be 'text', not %s", api_read_show(type).text);
}

enum status api_read_sampling(struct api_reader *reader)
{
    enum status (*const parts[])(struct api_reader *) = {
        read_response_format, read_numbers,    read_limits,   read_stops,
        read_stop_ids,        read_logit_bias, read_logprobs, read_stream,
    };
    struct api_sampling *s = &reader->request->sampling;
    s->temperature = reader->context->temperature;
    s->top_p = reader->context->top_p;
    s->repetition_penalty = 1;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        enum status status = parts[i](reader);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}
