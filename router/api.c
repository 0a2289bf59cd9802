/*
 * A body becomes a request here, or one error. The order of checks is the order in which a client
 * can act on them: JSON, model, then the fields. The tree of the body stays with the request, for
 * texts are used where they lie in it, with their lengths: NUL is a character like any other.
 */
#include "router/api.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "router/api_read.h"

/* --------------------------------------------------------------------------------------- errors */

static const char INVALID_REQUEST[] = "invalid_request_error";
static const char RATE_LIMIT[] = "rate_limit_error";
static const char SERVER[] = "server_error";

static const struct {
    int status;
    const char *type, *text;
} codes[API_N_CODES] = {
    [API_CODE_INVALID_JSON] = {400, INVALID_REQUEST, "invalid_json"},
    [API_CODE_INVALID_VALUE] = {400, INVALID_REQUEST, "invalid_value"},
    [API_CODE_UNSUPPORTED_VALUE] = {400, INVALID_REQUEST, "unsupported_value"},
    [API_CODE_CONTEXT_LENGTH_EXCEEDED] = {400, INVALID_REQUEST, "context_length_exceeded"},
    [API_CODE_INVALID_HTTP] = {400, INVALID_REQUEST, "invalid_http"},
    [API_CODE_INVALID_API_KEY] = {401, INVALID_REQUEST, "invalid_api_key"},
    [API_CODE_MODEL_NOT_FOUND] = {404, INVALID_REQUEST, "model_not_found"},
    [API_CODE_UNKNOWN_URL] = {404, INVALID_REQUEST, "unknown_url"},
    [API_CODE_METHOD_NOT_SUPPORTED] = {405, INVALID_REQUEST, "method_not_supported"},
    [API_CODE_REQUEST_TIMEOUT] = {408, INVALID_REQUEST, "request_timeout"},
    [API_CODE_LENGTH_REQUIRED] = {411, INVALID_REQUEST, "length_required"},
    [API_CODE_REQUEST_TOO_LARGE] = {413, INVALID_REQUEST, "request_too_large"},
    [API_CODE_UNSUPPORTED_MEDIA_TYPE] = {415, INVALID_REQUEST, "unsupported_media_type"},
    [API_CODE_EXPECTATION_FAILED] = {417, INVALID_REQUEST, "expectation_failed"},
    [API_CODE_QUEUE_FULL] = {429, RATE_LIMIT, "queue_full"},
    [API_CODE_HEADERS_TOO_LARGE] = {431, INVALID_REQUEST, "headers_too_large"},
    [API_CODE_INTERNAL_ERROR] = {500, SERVER, "internal_error"},
    [API_CODE_NO_READY_NODE] = {503, SERVER, "no_ready_node"},
    [API_CODE_ATTEMPTS_EXHAUSTED] = {503, SERVER, "attempts_exhausted"},
    [API_CODE_DRAINING] = {503, SERVER, "draining"},
    [API_CODE_QUEUE_TIMEOUT] = {504, SERVER, "queue_timeout"},
    [API_CODE_PREFILL_TIMEOUT] = {504, SERVER, "prefill_timeout"},
    [API_CODE_TRANSFER_TIMEOUT] = {504, SERVER, "transfer_timeout"},
    [API_CODE_GENERATION_TIMEOUT] = {504, SERVER, "generation_timeout"},
};

int api_code_status(enum api_code code)
{
    return codes[code].status;
}

const char *api_code_type(enum api_code code)
{
    return codes[code].type;
}

const char *api_code_text(enum api_code code)
{
    return codes[code].text;
}

void api_error_set(struct api_error *ret, enum api_code code, const char *param, const char *format,
                   ...)
{
    char text[sizeof(ret->message.text) * 2];
    va_list args;
    assert(code >= 0 && code < API_N_CODES);
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    ret->status = codes[code].status;
    ret->type = codes[code].type;
    ret->code = codes[code].text;
    snprintf(ret->param, sizeof(ret->param), "%s", param != NULL ? param : "");
    (void)error_set(&ret->message, STATUS_INVALID, "%s", text); /* cuts between characters */
}

/* -------------------------------------------------------------------------------------- parsing */

/*
 * Fields that are understood, or that OpenAI has and that change nothing about an answer here.
 * Whatever else a body holds is counted, so that a field that clients come to rely on is noticed.
 */
static const char *const known_shared[] = {
    "model",
    "max_completion_tokens",
    "max_tokens",
    "n",
    "stream",
    "stream_options",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "response_format",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    NULL,
};
static const char *const known_chat[] = {
    "messages",     "tools",
    "tool_choice",  "parallel_tool_calls",
    "top_logprobs", "reasoning_effort",
    "thinking",     "chat_template_kwargs",
    NULL,
};
static const char *const known_prompt[] = {"prompt", "echo", "suffix", NULL};
static const char *const known_tokens[] = {"model", "tokens", NULL};

static bool is_among(const char *const *names, const char *key, size_t bytes)
{
    for (; *names != NULL; names++) {
        if ((*names)[0] == key[0] && strlen(*names) == bytes && memcmp(*names, key, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static unsigned count_unknown(const struct api_request *request, const struct json *root)
{
    bool is_detokenize = request->kind == API_KIND_DETOKENIZE;
    const char *const *shared = is_detokenize ? known_tokens : known_shared;
    const char *const *own = request->is_chat ? known_chat : known_prompt;
    unsigned n = 0;
    for (struct json_iter it = json_iterate(root); json_iterate_next(&it);) {
        bool known = is_among(shared, it.key, it.key_bytes) ||
                     (!is_detokenize && is_among(own, it.key, it.key_bytes));
        n += !known;
    }
    return n;
}

const char *api_model_find(const struct api_context *context, const char *name, size_t bytes)
{
    if (strlen(context->model) == bytes && memcmp(context->model, name, bytes) == 0) {
        return context->model;
    }
    for (size_t i = 0; i < context->n_aliases; i++) {
        if (strlen(context->aliases[i]) == bytes && memcmp(context->aliases[i], name, bytes) == 0) {
            return context->aliases[i];
        }
    }
    return NULL;
}

static enum status read_model(struct api_reader *r)
{
    const struct json *value = api_read_field(r, "model");
    size_t bytes = 0;
    const char *text = json_text(value, &bytes);
    if (value != NULL && text == NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "model", "model must be a string, not %s",
                               api_read_show(value).text);
    }
    const char *found = text == NULL ? r->context->model : api_model_find(r->context, text, bytes);
    if (found == NULL) {
        return api_read_refuse(r, API_CODE_MODEL_NOT_FOUND, "model",
                               "there is no model '%.*s' here, the served one is '%s'",
                               API_NAME_BYTES, text, r->context->model);
    }
    r->request->model = arena_strdup(r->request->arena, found);
    return STATUS_OK;
}

static enum status read_all(struct api_reader *r)
{
    enum status status = read_model(r);
    if (status != STATUS_OK) {
        return status;
    }
    switch (r->request->kind) {
    case API_KIND_CHAT:
        return api_read_chat(r);
    case API_KIND_COMPLETIONS:
        return api_read_prompts(r);
    case API_KIND_TOKENIZE:
        return api_read_tokenize(r);
    case API_KIND_DETOKENIZE:
        return api_read_detokenize(r);
    }
    return api_read_refuse(r, API_CODE_INTERNAL_ERROR, NULL, "a kind of request without a reader");
}

enum status api_parse(enum api_kind kind, const void *body, size_t bytes,
                      const struct api_context *context, struct api_request **ret,
                      struct api_error *ret_error)
{
    static const struct json_limits limits = {.max_depth = API_MAX_JSON_DEPTH};
    struct error err = {""};
    struct json *root = NULL;
    enum status status = json_parse(body, bytes, &limits, &root, &err);
    if (status != STATUS_OK) {
        api_error_set(ret_error, API_CODE_INVALID_JSON, NULL, "the body is not JSON: %s", err.text);
        return STATUS_INVALID;
    }
    if (json_kind_of(root) != JSON_KIND_OBJECT) {
        api_error_set(ret_error, API_CODE_INVALID_JSON, NULL,
                      "the body must be one JSON object, not %s", api_read_show(root).text);
        json_free(root);
        return STATUS_INVALID;
    }
    struct arena *arena = arena_create(0);
    struct api_request *request = arena_alloc(arena, sizeof(*request));
    struct api_error error;
    struct api_reader reader = {context, root, request, &error};
    request->arena = arena;
    request->tree = root;
    request->kind = kind;
    request->n = 1;
    status = read_all(&reader);
    if (status != STATUS_OK) {
        *ret_error = error;
        api_request_free(request);
        return status;
    }
    request->n_unknown = count_unknown(request, root);
    *ret = request;
    return STATUS_OK;
}

void api_request_free(struct api_request *request)
{
    if (request == NULL) {
        return;
    }
    if (request->thread.arena != NULL) {
        chat_thread_fini(&request->thread);
    }
    json_free(request->tree);
    arena_free(request->arena);
}

/* ------------------------------------------------------------------------------------- encoding */

static const char *prompt_param(const struct api_request *request)
{
    return request->is_chat ? "messages" : "prompt";
}

/* Turns what the encoders say into the answer. */
static enum status refuse_encode(const struct api_request *request, enum status status,
                                 size_t max_ids, const struct error *err, struct api_error *ret)
{
    switch (status) {
    case STATUS_TOO_LARGE:
        api_error_set(ret, API_CODE_CONTEXT_LENGTH_EXCEEDED, prompt_param(request),
                      "the prompt has more than %zu tokens, and the model takes as many with the "
                      "answer",
                      max_ids);
        return STATUS_INVALID;
    case STATUS_EXHAUSTED:
        api_error_set(ret, API_CODE_INTERNAL_ERROR, NULL, "no memory to encode the prompt");
        return STATUS_EXHAUSTED;
    default:
        api_error_set(ret, API_CODE_INVALID_VALUE, prompt_param(request), "%s", err->text);
        return STATUS_INVALID;
    }
}

enum status api_encode(const struct api_request *request, const struct api_context *context,
                       size_t prompt_i, struct token_ids *ids, struct api_error *ret_error)
{
    bool unbounded = request->kind == API_KIND_TOKENIZE;
    size_t max_ids = unbounded ? SIZE_MAX : context->max_context_tokens, n_before = ids->n;
    struct error err = {""};
    enum status status;
    if (request->is_chat) {
        status = chat_encode(context->format, context->tokenizer, request->thread.messages,
                             request->thread.n_messages, &request->options, max_ids, ids, &err);
    } else {
        assert(prompt_i < request->n_prompts);
        const struct api_prompt *prompt = &request->prompts[prompt_i];
        status = prompt->text.data != NULL
                     ? tokenizer_encode(context->tokenizer, prompt->text.data, prompt->text.bytes,
                                        NULL, 0, max_ids, ids, &err)
                     : token_ids_append(ids, prompt->ids, prompt->n_ids);
    }
    if (status != STATUS_OK) {
        return refuse_encode(request, status, max_ids, &err, ret_error);
    }
    size_t n = ids->n - n_before;
    if (unbounded || (n > 0 && n < context->max_context_tokens)) {
        return STATUS_OK;
    }
    ids->n = n_before;
    if (n == 0) {
        api_error_set(ret_error, API_CODE_INVALID_VALUE, prompt_param(request),
                      "the prompt is empty");
    } else {
        api_error_set(ret_error, API_CODE_CONTEXT_LENGTH_EXCEEDED, prompt_param(request),
                      "the prompt has %zu tokens, and the model takes %" PRIu32
                      " with the answer, which leaves no room for one",
                      n, context->max_context_tokens);
    }
    return STATUS_INVALID;
}

uint32_t api_max_tokens(const struct api_request *request, const struct api_context *context,
                        size_t n_prompt)
{
    uint32_t asked = request->sampling.max_tokens, max = context->max_context_tokens;
    uint32_t fits = n_prompt < max ? max - (uint32_t)n_prompt : 0;
    return asked != 0 && asked < fits ? asked : fits;
}

void api_prompt_text(const struct api_request *request, const struct api_context *context,
                     size_t prompt_i, struct buf *out)
{
    assert(!request->is_chat && prompt_i < request->n_prompts);
    const struct api_prompt *prompt = &request->prompts[prompt_i];
    if (prompt->text.data != NULL) {
        buf_append(out, prompt->text.data, prompt->text.bytes);
    } else {
        tokenizer_decode(context->tokenizer, prompt->ids, prompt->n_ids, true, out);
    }
}
