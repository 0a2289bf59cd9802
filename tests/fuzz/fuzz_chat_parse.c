#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/utf8.h"
#include "model/chat_parse.h"

/*
 * A completion, whatever it is: the first byte chooses the mode, the rest comes whole and byte by
 * byte. Both must add up to the same answer, in UTF-8, and whole calls have arguments that are
 * JSON.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

static void parse(uint8_t mode, const uint8_t *data, size_t bytes, size_t step,
                  struct chat_answer *ret)
{
    chat_answer_init(ret);
    const struct chat_parse_options options = {
        .thinking = (mode & 1) != 0,
        .without_calls = (mode & 2) != 0,
        .id_seed = "s",
        .fn = chat_answer_event,
        .cookie = ret,
    };
    struct chat_parse *p = chat_parse_create(&options);
    for (size_t at = 0; at < bytes; at += step) {
        chat_parse_text(p, (const char *)data + at, step < bytes - at ? step : bytes - at);
    }
    chat_parse_finish(p, (mode & 4) != 0);
    chat_parse_free(p);
}

static void require_equal(const struct buf *a, const struct buf *b)
{
    require(a->bytes == b->bytes && (a->bytes == 0 || memcmp(a->data, b->data, a->bytes) == 0));
    require(utf8_valid(a->data, a->bytes));
}

/* JSON that json_parse does not take: integers beyond 64 bits, and NUL in a key. */
static int is_beyond_parser(const struct buf *text)
{
    size_t run = 0;
    if (memmem(text->data, text->bytes, "\\u0000", 6) != NULL) {
        return 1;
    }
    for (size_t i = 0; i < text->bytes; i++) {
        run = text->data[i] >= '0' && text->data[i] <= '9' ? run + 1 : 0;
        if (run > 18) {
            return 1;
        }
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct chat_answer whole, cut;
    if (bytes == 0) {
        return 0;
    }
    parse(data[0], data + 1, bytes - 1, bytes, &whole);
    parse(data[0], data + 1, bytes - 1, 1, &cut);
    require_equal(&whole.reasoning, &cut.reasoning);
    require_equal(&whole.content, &cut.content);
    require(whole.n_calls == cut.n_calls);
    for (unsigned i = 0; i < whole.n_calls; i++) {
        const struct chat_answer_call *call = &whole.calls[i];
        struct json *arguments;
        require_equal(&call->name, &cut.calls[i].name);
        require_equal(&call->arguments, &cut.calls[i].arguments);
        require(call->is_whole == cut.calls[i].is_whole);
        if (call->is_whole && !is_beyond_parser(&call->arguments)) {
            const struct json_limits limits = {.max_depth = 256};
            require(json_parse(call->arguments.data, call->arguments.bytes, &limits, &arguments,
                               NULL) == STATUS_OK);
            json_free(arguments);
        }
    }
    chat_answer_fini(&whole);
    chat_answer_fini(&cut);
    return 0;
}
