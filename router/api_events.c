/*
 * Server-sent events of a stream. A token is an event, so this is the router's hot path: a copy of
 * what never changes, the number of the choice, the escaped text, and a fixed end. The bytes that
 * are fixed are written out as text here; test_api compares every event with the schema.
 */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "router/api_render.h"
#include "router/api_render_parts.h"

void api_head_init(struct api_head *head, const struct api_request *request, const char *unique,
                   int64_t created_s, const char *fingerprint)
{
    struct json_writer w;
    bool is_chat = request->kind == API_KIND_CHAT;
    *head = (struct api_head){.is_chat = is_chat, .include_usage = request->include_usage};
    buf_printf(&head->id, "%s%s", is_chat ? "chatcmpl-" : "cmpl-", unique);

    buf_printf(&head->identity, "\"created\":%lld,\"model\":", (long long)created_s);
    json_writer_init(&w, &head->identity);
    json_put_string(&w, request->model);
    buf_append_text(&head->identity, ",\"system_fingerprint\":");
    json_writer_init(&w, &head->identity);
    json_put_string(&w, fingerprint);

    buf_printf(&head->event, "data: {\"id\":\"%s\",\"object\":\"%s\",", buf_text(&head->id),
               is_chat ? "chat.completion.chunk" : "text_completion");
    buf_append(&head->event, head->identity.data, head->identity.bytes);
    buf_append_text(&head->event, ",\"choices\":[");
}

void api_head_fini(struct api_head *head)
{
    buf_fini(&head->identity);
    buf_fini(&head->event);
    buf_fini(&head->id);
}

static void put_number(struct buf *out, unsigned value)
{
    char digits[12];
    size_t i = sizeof(digits);
    do {
        digits[--i] = (char)('0' + value % 10);
        value /= 10;
    } while (value != 0);
    buf_append(out, digits + i, sizeof(digits) - i);
}

static void put_string(struct buf *out, const char *text, size_t bytes)
{
    struct json_writer w;
    json_writer_init(&w, out);
    json_put_string_n(&w, text, bytes);
}

/* About what an event of a short token has beside its head. */
enum { FRAME_BYTES = 128 };

#define PUT(out, literal) buf_append(out, literal, sizeof(literal) - 1)

/* Up to the value of the choice's delta or text. */
static void begin(const struct api_head *head, unsigned choice_i, struct buf *out)
{
    buf_reserve_only(out, head->event.bytes + FRAME_BYTES);
    buf_append(out, head->event.data, head->event.bytes);
    PUT(out, "{\"index\":");
    put_number(out, choice_i);
    if (head->is_chat) {
        PUT(out, ",\"delta\":");
    } else {
        PUT(out, ",\"text\":");
    }
}

/* From behind that value to the blank line; finish is JSON. */
static void end(const struct api_head *head, struct api_logprobs *logprobs, const char *finish,
                struct buf *out)
{
    PUT(out, ",\"logprobs\":");
    api_logprobs_put_piece(logprobs, out);
    PUT(out, ",\"finish_reason\":");
    buf_append_text(out, finish);
    if (head->include_usage) {
        PUT(out, "}],\"usage\":null}\n\n");
    } else {
        PUT(out, "}]}\n\n");
    }
}

void api_event_role(const struct api_head *head, unsigned choice_i, struct buf *out)
{
    if (!head->is_chat) {
        return;
    }
    begin(head, choice_i, out);
    PUT(out, "{\"role\":\"assistant\",\"content\":\"\"}");
    end(head, NULL, "null", out);
}

void api_event_text(const struct api_head *head, unsigned choice_i, const char *text, size_t bytes,
                    struct api_logprobs *logprobs, struct buf *out)
{
    begin(head, choice_i, out);
    if (head->is_chat) {
        PUT(out, "{\"content\":");
        put_string(out, text, bytes);
        PUT(out, "}");
    } else {
        put_string(out, text, bytes);
    }
    end(head, logprobs, "null", out);
}

void api_event_reasoning(const struct api_head *head, unsigned choice_i, const char *text,
                         size_t bytes, struct api_logprobs *logprobs, struct buf *out)
{
    begin(head, choice_i, out);
    PUT(out, "{\"reasoning_content\":");
    put_string(out, text, bytes);
    PUT(out, "}");
    end(head, logprobs, "null", out);
}

void api_event_call(const struct api_head *head, unsigned choice_i, unsigned call_i, const char *id,
                    const char *name, size_t name_bytes, struct buf *out)
{
    begin(head, choice_i, out);
    PUT(out, "{\"tool_calls\":[{\"index\":");
    put_number(out, call_i);
    PUT(out, ",\"id\":");
    put_string(out, id, strlen(id));
    PUT(out, ",\"type\":\"function\",\"function\":{\"name\":");
    put_string(out, name, name_bytes);
    PUT(out, ",\"arguments\":\"\"}}]}");
    end(head, NULL, "null", out);
}

void api_event_arguments(const struct api_head *head, unsigned choice_i, unsigned call_i,
                         const char *text, size_t bytes, struct buf *out)
{
    begin(head, choice_i, out);
    PUT(out, "{\"tool_calls\":[{\"index\":");
    put_number(out, call_i);
    PUT(out, ",\"function\":{\"arguments\":");
    put_string(out, text, bytes);
    PUT(out, "}}]}");
    end(head, NULL, "null", out);
}

void api_event_parsed(const struct api_head *head, unsigned choice_i,
                      const struct chat_event *event, struct buf *out)
{
    switch (event->kind) {
    case CHAT_EVENT_REASONING:
        api_event_reasoning(head, choice_i, event->text, event->bytes, NULL, out);
        break;
    case CHAT_EVENT_CONTENT:
        api_event_text(head, choice_i, event->text, event->bytes, NULL, out);
        break;
    case CHAT_EVENT_CALL:
        api_event_call(head, choice_i, event->call_i, event->id, event->text, event->bytes, out);
        break;
    case CHAT_EVENT_ARGUMENTS:
        api_event_arguments(head, choice_i, event->call_i, event->text, event->bytes, out);
        break;
    case CHAT_EVENT_CALL_END:
        break;
    }
}

void api_event_finish(const struct api_head *head, unsigned choice_i, enum api_finish finish,
                      struct api_logprobs *logprobs, struct buf *out)
{
    char quoted[24];
    snprintf(quoted, sizeof(quoted), "\"%s\"", api_finish_text(finish));
    begin(head, choice_i, out);
    if (head->is_chat) {
        PUT(out, "{}");
    } else {
        PUT(out, "\"\"");
    }
    end(head, logprobs, quoted, out);
}

void api_event_usage(const struct api_head *head, const struct api_usage *usage, struct buf *out)
{
    if (!head->include_usage) {
        return;
    }
    buf_append(out, head->event.data, head->event.bytes);
    PUT(out, "],\"usage\":");
    api_usage_put(usage, out);
    PUT(out, "}\n\n");
}

void api_event_done(struct buf *out)
{
    PUT(out, "data: [DONE]\n\n");
}

void api_event_error(const struct api_error *error, struct buf *out)
{
    PUT(out, "data: ");
    api_render_error(error, out);
    PUT(out, "\n\n");
}

void api_event_comment(const char *text, struct buf *out)
{
    PUT(out, ": ");
    buf_append_text(out, text);
    PUT(out, "\n\n");
}
