/*
 * The chat encoding and the completion parser as a filter: one JSON object a line in, one JSON
 * value a line out. For comparisons with tests/oracle/chat_reference.py.
 *
 * usage: chat_tool ENCODING_JSON [TOKENIZER_JSON]
 *
 *   {"render": [messages in the encoding's own form], "thinking", "effort", "keep_reasoning"}
 *       -> the prompt
 *   {"http": messages, "tools", "thinking", "effort"}  -> the prompt, or {"param", "error"}
 *   {"parse": [pieces of text], "thinking", "was_cut", "without_calls"}
 *       -> {"reasoning", "content", "calls": [[name, arguments, is_whole], ...]}
 *   {"tokens": messages, "thinking", "plain"}          -> ids (needs TOKENIZER_JSON)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/chat.h"
#include "model/chat_parse.h"

static struct chat_text text_of(const struct json *object, const char *key)
{
    struct chat_text text = {NULL, 0};
    text.data = json_text(json_get(object, key), &text.bytes);
    return text;
}

static bool flag_of(const struct json *object, const char *key)
{
    bool flag = false;
    return json_bool(json_get(object, key), &flag) && flag;
}

static enum chat_role role_of(const struct json *message)
{
    static const char *const names[] = {"system", "user",      "assistant",
                                        "tool",   "developer", "latest_reminder"};
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (json_text_is(json_get(message, "role"), names[i])) {
            return (enum chat_role)i;
        }
    }
    fprintf(stderr, "chat_tool: no such role\n");
    exit(1);
}

static enum chat_task task_of(const struct json *message)
{
    static const char *const names[] = {"",       "action", "query",   "authority",
                                        "domain", "title",  "read_url"};
    for (unsigned i = 1; i < sizeof(names) / sizeof(names[0]); i++) {
        if (json_text_is(json_get(message, "task"), names[i])) {
            return (enum chat_task)i;
        }
    }
    return CHAT_TASK_NONE;
}

static void read_message(const struct json *json, struct chat_message *m, struct arena *arena)
{
    const struct json *calls = json_get(json, "tool_calls"), *tools = json_get(json, "tools");
    m->role = role_of(json);
    m->content = text_of(json, "content");
    m->reasoning = text_of(json, "reasoning_content");
    m->tool_call_id = text_of(json, "tool_call_id");
    m->task = task_of(json);
    m->without_eos = flag_of(json, "wo_eos");
    m->response_format = json_get(json, "response_format");
    struct chat_call *to = arena_alloc(arena, json_array_n(calls) * sizeof(*to));
    m->calls = to;
    for (; m->n_calls < json_array_n(calls); m->n_calls++) {
        const struct json *call = json_array_at(calls, m->n_calls);
        to[m->n_calls].id = text_of(call, "id");
        to[m->n_calls].name = text_of(json_get(call, "function"), "name");
        to[m->n_calls].arguments = text_of(json_get(call, "function"), "arguments");
    }
    const struct json **functions = arena_alloc(arena, json_array_n(tools) * sizeof(*functions));
    m->tools = functions;
    for (; m->n_tools < json_array_n(tools); m->n_tools++) {
        functions[m->n_tools] = json_get(json_array_at(tools, m->n_tools), "function");
    }
}

static void read_options(const struct json *line, struct chat_options *options)
{
    struct chat_text effort = text_of(line, "effort");
    options->thinking = flag_of(line, "thinking");
    options->keep_reasoning = flag_of(line, "keep_reasoning");
    options->plain_content = flag_of(line, "plain");
    if (effort.data != NULL &&
        chat_effort_from_text(effort.data, effort.bytes, &options->effort) != STATUS_OK) {
        fprintf(stderr, "chat_tool: no such effort\n");
        exit(1);
    }
}

static void put_error(struct json_writer *out, const char *param, const struct error *err)
{
    json_begin_object(out);
    json_pair_string(out, "param", param);
    json_pair_string(out, "error", err->text);
    json_end_object(out);
}

static void put_ids(struct json_writer *out, const struct token_ids *ids)
{
    json_begin_array(out);
    for (size_t i = 0; i < ids->n; i++) {
        json_put_uint(out, ids->id[i]);
    }
    json_end_array(out);
}

static void put_prompt(struct json_writer *out, const struct chat_format *format,
                       const struct tokenizer *tokenizer, const struct chat_message *messages,
                       size_t n, const struct chat_options *options)
{
    struct error err = {""};
    struct buf text = BUF_INIT;
    struct token_ids ids = TOKEN_IDS_INIT;
    if (tokenizer != NULL) {
        if (chat_encode(format, tokenizer, messages, n, options, SIZE_MAX, &ids, &err) !=
            STATUS_OK) {
            put_error(out, "", &err);
        } else {
            put_ids(out, &ids);
        }
    } else if (chat_render(format, messages, n, options, &text, NULL, &err) != STATUS_OK) {
        put_error(out, "", &err);
    } else {
        json_put_string_n(out, (const char *)text.data, text.bytes);
    }
    token_ids_fini(&ids);
    buf_fini(&text);
}

static void render_line(const struct json *line, const struct json *messages,
                        const struct chat_format *format, const struct tokenizer *tokenizer,
                        struct json_writer *out)
{
    struct chat_options options = {0};
    struct arena *arena = arena_create(0);
    size_t n = json_array_n(messages);
    struct chat_message *to = arena_alloc(arena, n * sizeof(*to));
    for (size_t i = 0; i < n; i++) {
        read_message(json_array_at(messages, i), &to[i], arena);
    }
    read_options(line, &options);
    put_prompt(out, format, tokenizer, to, n, &options);
    arena_free(arena);
}

static void http_line(const struct json *line, const struct chat_format *format,
                      struct json_writer *out)
{
    char param[CHAT_PARAM_BYTES];
    struct error err = {""};
    struct chat_thread thread;
    struct chat_options options = {0};
    read_options(line, &options);
    if (chat_thread_from_json(json_get(line, "http"), json_get(line, "tools"), NULL, &thread, param,
                              &err) != STATUS_OK) {
        put_error(out, param, &err);
        return;
    }
    put_prompt(out, format, NULL, thread.messages, thread.n_messages, &options);
    chat_thread_fini(&thread);
}

static void put_buf(struct json_writer *out, const char *key, bool is_there, const struct buf *buf)
{
    json_key(out, key);
    if (is_there) {
        json_put_string_n(out, (const char *)buf->data, buf->bytes);
    } else {
        json_put_null(out);
    }
}

static void parse_line(const struct json *line, struct json_writer *out)
{
    struct chat_answer answer;
    const struct json *pieces = json_get(line, "parse");
    chat_answer_init(&answer);
    struct chat_parse_options options = {
        .thinking = flag_of(line, "thinking"),
        .without_calls = flag_of(line, "without_calls"),
        .id_seed = "x",
        .fn = chat_answer_event,
        .cookie = &answer,
    };
    struct chat_parse *parse = chat_parse_create(&options);
    for (size_t i = 0; i < json_array_n(pieces); i++) {
        size_t bytes;
        const char *text = json_text(json_array_at(pieces, i), &bytes);
        chat_parse_text(parse, text, bytes);
    }
    chat_parse_finish(parse, flag_of(line, "was_cut"));
    chat_parse_free(parse);
    json_begin_object(out);
    put_buf(out, "reasoning", answer.has_reasoning, &answer.reasoning);
    put_buf(out, "content", answer.has_content, &answer.content);
    json_key(out, "calls");
    json_begin_array(out);
    for (unsigned i = 0; i < answer.n_calls; i++) {
        const struct chat_answer_call *call = &answer.calls[i];
        json_begin_array(out);
        json_put_string_n(out, (const char *)call->name.data, call->name.bytes);
        json_put_string_n(out, (const char *)call->arguments.data, call->arguments.bytes);
        json_put_bool(out, call->is_whole);
        json_end_array(out);
    }
    json_end_array(out);
    json_end_object(out);
    chat_answer_fini(&answer);
}

int main(int argc, char **argv)
{
    struct chat_format *format;
    struct tokenizer *tokenizer = NULL;
    struct error err;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    if (argc < 2 || chat_format_open(argv[1], &format, &err) != STATUS_OK ||
        (argc > 2 && tokenizer_open(argv[2], &tokenizer, &err) != STATUS_OK)) {
        fprintf(stderr, "chat_tool: %s\n", argc < 2 ? "needs an encoding.json" : err.text);
        return 1;
    }
    while ((n = getline(&line, &capacity, stdin)) > 0) {
        struct json *json;
        struct buf text = BUF_INIT;
        struct json_writer out;
        if (json_parse(line, (size_t)n, NULL, &json, &err) != STATUS_OK) {
            fprintf(stderr, "chat_tool: %s\n", err.text);
            return 1;
        }
        json_writer_init(&out, &text);
        if (json_get(json, "parse") != NULL) {
            parse_line(json, &out);
        } else if (json_get(json, "http") != NULL) {
            http_line(json, format, &out);
        } else if (json_get(json, "tokens") != NULL) {
            render_line(json, json_get(json, "tokens"), format, tokenizer, &out);
        } else {
            render_line(json, json_get(json, "render"), format, NULL, &out);
        }
        puts(buf_text(&text));
        buf_fini(&text);
        json_free(json);
    }
    free(line);
    tokenizer_close(tokenizer);
    chat_format_close(format);
    return 0;
}
