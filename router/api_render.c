/*
 * Whole answers, errors and the lists of models. Every member that OpenAI's schema requires is
 * written, null where it has nothing to say: typed clients break on a missing one.
 */
#include "router/api_render.h"

#include <string.h>

#include "base/json.h"
#include "router/api_render_parts.h"

const char *api_finish_text(enum api_finish finish)
{
    static const char *const names[] = {"stop", "length", "tool_calls"};
    return names[finish];
}

enum api_finish api_finish_of(bool was_cut, unsigned n_calls)
{
    return was_cut ? API_FINISH_LENGTH : n_calls > 0 ? API_FINISH_TOOL_CALLS : API_FINISH_STOP;
}

void api_usage_put(const struct api_usage *usage, struct buf *out)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_begin_object(&w);
    json_pair_uint(&w, "prompt_tokens", usage->prompt_tokens);
    json_pair_uint(&w, "completion_tokens", usage->completion_tokens);
    json_pair_uint(&w, "total_tokens", usage->prompt_tokens + usage->completion_tokens);
    json_key(&w, "prompt_tokens_details");
    json_begin_object(&w);
    json_pair_uint(&w, "cached_tokens", usage->cached_tokens);
    json_end_object(&w);
    json_key(&w, "completion_tokens_details");
    json_begin_object(&w);
    json_pair_uint(&w, "reasoning_tokens", usage->reasoning_tokens);
    json_end_object(&w);
    json_end_object(&w);
}

/* ------------------------------------------------------------------------------------ answers */

static void put_buf(struct json_writer *w, const char *key, const struct buf *text)
{
    json_key(w, key);
    json_put_string_n(w, text->data != NULL ? (const char *)text->data : "", text->bytes);
}

static void put_calls(struct json_writer *w, const struct chat_answer *answer)
{
    json_key(w, "tool_calls");
    json_begin_array(w);
    for (unsigned i = 0; i < answer->n_calls; i++) {
        const struct chat_answer_call *call = &answer->calls[i];
        json_begin_object(w);
        put_buf(w, "id", &call->id);
        json_pair_string(w, "type", "function");
        json_key(w, "function");
        json_begin_object(w);
        put_buf(w, "name", &call->name);
        put_buf(w, "arguments", &call->arguments);
        json_end_object(w);
        json_end_object(w);
    }
    json_end_array(w);
}

static void put_message(struct json_writer *w, const struct chat_answer *answer)
{
    json_begin_object(w);
    json_pair_string(w, "role", "assistant");
    if (answer->n_calls > 0 && answer->content.bytes == 0) {
        json_key(w, "content");
        json_put_null(w);
    } else {
        put_buf(w, "content", &answer->content);
    }
    if (answer->has_reasoning) {
        put_buf(w, "reasoning_content", &answer->reasoning);
    }
    json_key(w, "refusal");
    json_put_null(w);
    if (answer->n_calls > 0) {
        put_calls(w, answer);
    }
    json_end_object(w);
}

static void put_choice(const struct api_head *head, const struct api_choice *choice,
                       unsigned choice_i, struct buf *out)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_begin_object(&w);
    json_pair_uint(&w, "index", choice_i);
    if (head->is_chat) {
        json_key(&w, "message");
        put_message(&w, choice->answer);
    } else {
        json_key(&w, "text");
        json_put_string_n(&w, choice->text != NULL ? choice->text : "", choice->text_bytes);
    }
    json_key(&w, "logprobs");
    struct buf logprobs = BUF_INIT;
    api_logprobs_put(choice->logprobs, &logprobs);
    json_put_raw(&w, logprobs.data, logprobs.bytes);
    buf_fini(&logprobs);
    json_pair_string(&w, "finish_reason", api_finish_text(choice->finish));
    json_end_object(&w);
}

void api_render_answer(const struct api_head *head, const struct api_choice *choices, size_t n,
                       const struct api_usage *usage, struct buf *out)
{
    buf_append_text(out, "{\"id\":\"");
    buf_append(out, head->id.data, head->id.bytes);
    buf_append_text(out, head->is_chat ? "\",\"object\":\"chat.completion\","
                                       : "\",\"object\":\"text_completion\",");
    buf_append(out, head->identity.data, head->identity.bytes);
    buf_append_text(out, ",\"choices\":[");
    for (size_t i = 0; i < n; i++) {
        if (i > 0) {
            buf_append_byte(out, ',');
        }
        put_choice(head, &choices[i], (unsigned)i, out);
    }
    buf_append_text(out, "],\"usage\":");
    api_usage_put(usage, out);
    buf_append_byte(out, '}');
}

void api_render_error(const struct api_error *error, struct buf *out)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_begin_object(&w);
    json_key(&w, "error");
    json_begin_object(&w);
    json_pair_string(&w, "message", error->message.text);
    json_pair_string(&w, "type", error->type);
    json_pair_string(&w, "param", error->param[0] != '\0' ? error->param : NULL);
    json_pair_string(&w, "code", error->code);
    json_end_object(&w);
    json_end_object(&w);
}

/* ------------------------------------------------------------------------- models and tokens */

static void put_model(struct json_writer *w, const struct api_context *context, const char *name,
                      int64_t created_s)
{
    json_begin_object(w);
    json_pair_string(w, "id", name);
    json_pair_string(w, "object", "model");
    json_pair_int(w, "created", created_s);
    json_pair_string(w, "owned_by", "baton");
    json_pair_uint(w, "max_model_len", context->max_context_tokens);
    json_end_object(w);
}

void api_render_models(const struct api_context *context, int64_t created_s, struct buf *out)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_begin_object(&w);
    json_pair_string(&w, "object", "list");
    json_key(&w, "data");
    json_begin_array(&w);
    put_model(&w, context, context->model, created_s);
    for (size_t i = 0; i < context->n_aliases; i++) {
        put_model(&w, context, context->aliases[i], created_s);
    }
    json_end_array(&w);
    json_end_object(&w);
}

enum status api_render_model(const struct api_context *context, const char *name, size_t bytes,
                             int64_t created_s, struct buf *out, struct api_error *ret_error)
{
    struct json_writer w;
    const char *found = api_model_find(context, name, bytes);
    if (found == NULL) {
        api_error_set(ret_error, API_CODE_MODEL_NOT_FOUND, "model",
                      "there is no model '%.*s' here, the served one is '%s'",
                      (int)(bytes < API_NAME_BYTES ? bytes : API_NAME_BYTES), name, context->model);
        return STATUS_NOT_FOUND;
    }
    json_writer_init(&w, out);
    put_model(&w, context, found, created_s);
    return STATUS_OK;
}

void api_render_tokens(const struct api_context *context, const struct token_ids *ids,
                       struct buf *out)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_begin_object(&w);
    json_pair_uint(&w, "count", ids->n);
    json_pair_uint(&w, "max_model_len", context->max_context_tokens);
    json_key(&w, "tokens");
    json_begin_array(&w);
    for (size_t i = 0; i < ids->n; i++) {
        json_put_uint(&w, ids->id[i]);
    }
    json_end_array(&w);
    json_end_object(&w);
}

void api_render_text(const struct api_request *request, const struct api_context *context,
                     struct buf *out)
{
    struct json_writer w;
    struct buf text = BUF_INIT;
    const struct api_prompt *prompt = &request->prompts[0];
    tokenizer_decode(context->tokenizer, prompt->ids, prompt->n_ids, true, &text);
    json_writer_init(&w, out);
    json_begin_object(&w);
    put_buf(&w, "prompt", &text);
    json_end_object(&w);
    buf_fini(&text);
}
