/*
 * Prompts that are no conversation: text or ids, one or several. A list says by its first element
 * what it is; a list of two kinds is refused at the element that differs, never sorted out.
 */
#include <stdio.h>
#include <string.h>

#include "router/api_read.h"

static enum status read_text_prompt(struct api_reader *r, const struct json *value,
                                    const char *path, struct api_prompt *ret)
{
    struct chat_text text;
    text.data = json_text(value, &text.bytes);
    if (text.data == NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path,
                               "%s must be a string like those before it, not %s", path,
                               api_read_show(value).text);
    }
    if (text.bytes == 0 && r->request->kind != API_KIND_TOKENIZE) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path, "%s is empty", path);
    }
    ret->text = text;
    return STATUS_OK;
}

static enum status read_ids_prompt(struct api_reader *r, const struct json *value, const char *path,
                                   struct api_prompt *ret)
{
    size_t n = json_array_n(value);
    if (json_kind_of(value) == JSON_KIND_ARRAY && n == 0) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path, "%s is empty", path);
    }
    if (n >= r->context->max_context_tokens) {
        return api_read_refuse(r, API_CODE_CONTEXT_LENGTH_EXCEEDED, path,
                               "%s has %zu tokens, and the model takes %u with the answer", path, n,
                               (unsigned)r->context->max_context_tokens);
    }
    return api_read_ids(r, value, path, &ret->ids, &ret->n_ids);
}

/* A list of strings, or a list of lists of ids. */
static enum status read_list(struct api_reader *r, const struct json *list)
{
    size_t n = json_array_n(list);
    bool is_text = json_kind_of(json_array_at(list, 0)) == JSON_KIND_STRING;
    if (n > API_MAX_PROMPTS) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "prompt",
                               "prompt has %zu prompts, at most %d are taken", n, API_MAX_PROMPTS);
    }
    struct api_prompt *prompts = arena_alloc(r->request->arena, n * sizeof(*prompts));
    for (size_t i = 0; i < n; i++) {
        char path[API_PARAM_BYTES];
        snprintf(path, sizeof(path), "prompt.%zu", i);
        const struct json *value = json_array_at(list, i);
        enum status status = is_text ? read_text_prompt(r, value, path, &prompts[i])
                                     : read_ids_prompt(r, value, path, &prompts[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    r->request->prompts = prompts;
    r->request->n_prompts = n;
    return STATUS_OK;
}

static enum status read_prompt(struct api_reader *r)
{
    const struct json *prompt = api_read_field(r, "prompt");
    struct api_prompt *one = arena_alloc(r->request->arena, sizeof(*one));
    enum status status;
    switch (json_kind_of(prompt)) {
    case JSON_KIND_NULL:
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "prompt", "prompt is missing");
    case JSON_KIND_STRING:
        status = read_text_prompt(r, prompt, "prompt", one);
        break;
    case JSON_KIND_ARRAY: {
        const struct json *first = json_array_at(prompt, 0);
        if (json_kind_of(first) == JSON_KIND_STRING || json_kind_of(first) == JSON_KIND_ARRAY) {
            return read_list(r, prompt);
        }
        status = read_ids_prompt(r, prompt, "prompt", one);
        break;
    }
    default:
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "prompt",
                               "prompt must be a string, an array of strings, an array of token "
                               "ids or an array of such arrays, not %s",
                               api_read_show(prompt).text);
    }
    if (status == STATUS_OK) {
        r->request->prompts = one;
        r->request->n_prompts = 1;
    }
    return status;
}

enum status api_read_prompts(struct api_reader *reader)
{
    struct api_request *request = reader->request;
    const struct json *suffix = api_read_field(reader, "suffix");
    enum status status =
        api_read_bool(reader, api_read_field(reader, "echo"), "echo", &request->echo);
    if (status != STATUS_OK) {
        return status;
    }
    /* before all limits: evaluations ask for both with max_tokens 0, and must be told which */
    if (request->echo && api_read_field(reader, "logprobs") != NULL) {
        return api_read_refuse(reader, API_CODE_UNSUPPORTED_VALUE, "echo",
                               "echo together with logprobs is not supported: logprobs of the "
                               "prompt are not computed");
    }
    if (suffix != NULL && !json_text_is(suffix, "")) {
        return api_read_refuse(reader, API_CODE_UNSUPPORTED_VALUE, "suffix",
                               "suffix is not supported");
    }
    status = read_prompt(reader);
    if (status == STATUS_OK) {
        status = api_read_sampling(reader);
    }
    if (status == STATUS_OK && request->n_prompts * request->n > API_MAX_CHOICES) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, "n",
                               "%zu prompts with n %u are %zu choices, at most %d are taken",
                               request->n_prompts, (unsigned)request->n,
                               request->n_prompts * request->n, API_MAX_CHOICES);
    }
    return status;
}

enum status api_read_tokenize(struct api_reader *reader)
{
    struct api_request *request = reader->request;
    const struct json *prompt = api_read_field(reader, "prompt");
    const struct json *messages = api_read_field(reader, "messages");
    if (prompt != NULL && messages != NULL) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, "prompt",
                               "give prompt or messages, not both");
    }
    if (messages != NULL) {
        return api_read_chat(reader);
    }
    if (json_kind_of(prompt) != JSON_KIND_STRING) {
        return api_read_refuse(reader, API_CODE_INVALID_VALUE, "prompt",
                               "prompt must be a string, not %s", api_read_show(prompt).text);
    }
    request->prompts = arena_alloc(request->arena, sizeof(*request->prompts));
    request->n_prompts = 1;
    return read_text_prompt(reader, prompt, "prompt", &request->prompts[0]);
}

enum status api_read_detokenize(struct api_reader *reader)
{
    struct api_request *request = reader->request;
    request->prompts = arena_alloc(request->arena, sizeof(*request->prompts));
    request->n_prompts = 1;
    return api_read_ids(reader, api_read_field(reader, "tokens"), "tokens",
                        &request->prompts[0].ids, &request->prompts[0].n_ids);
}
