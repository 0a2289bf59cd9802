#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "model/chat.h"

/*
 * A chat request's messages and tools, whatever they are: refused with a path and words, or
 * rendered in every mode to a prompt that is UTF-8, with spans that lie in it in order.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const char encoding[] =
    "{\"release\":\"x\",\"tools_prefix\":\"[\",\"tools_suffix\":\"]\",\"response_format_heading\":"
    "\"h\",\"response_format_instruction\":\"i\",\"effort\":{\"none\":\"\",\"low\":\"l\",\"high\":"
    "\"h\",\"max\":\"m\"}}";

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

static void render(const struct chat_format *format, const struct chat_thread *thread,
                   unsigned mode)
{
    struct chat_options options = {
        .thinking = (mode & 1) != 0,
        .keep_reasoning = (mode & 2) != 0,
        .force_call = (mode & 4) != 0,
        .effort = CHAT_EFFORT_MAX,
    };
    struct buf text = BUF_INIT, spans = BUF_INIT;
    require(chat_render(format, thread->messages, thread->n_messages, &options, &text, &spans,
                        NULL) == STATUS_OK);
    require(utf8_valid(text.data, text.bytes));
    size_t end = 0;
    for (size_t at = 0; at < spans.bytes; at += sizeof(struct tokenizer_span)) {
        struct tokenizer_span span;
        memcpy(&span, spans.data + at, sizeof(span));
        require(span.begin >= end && span.begin < span.end && span.end <= text.bytes);
        end = span.end;
    }
    buf_fini(&spans);
    buf_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static struct chat_format *format;
    struct json *root;
    struct chat_thread thread;
    struct error err = {""};
    char param[CHAT_PARAM_BYTES] = "";
    if (format == NULL) {
        require(chat_format_parse(encoding, sizeof(encoding) - 1, &format, NULL) == STATUS_OK);
    }
    if (json_parse(data, bytes, NULL, &root, NULL) != STATUS_OK) {
        return 0;
    }
    enum status status = chat_thread_from_json(json_get(root, "messages"), json_get(root, "tools"),
                                               NULL, &thread, param, &err);
    if (status == STATUS_OK) {
        for (unsigned mode = 0; mode < 8; mode++) {
            render(format, &thread, mode);
        }
        chat_thread_fini(&thread);
    } else {
        require(param[0] != '\0' && err.text[0] != '\0');
    }
    json_free(root);
    return 0;
}
