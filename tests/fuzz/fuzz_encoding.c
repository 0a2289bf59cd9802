#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/utf8.h"
#include "model/chat.h"

/*
 * Whatever the bytes of an encoding.json: refused with words, or texts with which every effort,
 * with tools and without, renders to UTF-8; the same bytes give the same prompt again.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

static void render(const struct chat_format *format, enum chat_effort effort, struct buf *out)
{
    struct chat_message messages[2];
    struct chat_options options = {.thinking = true, .effort = effort};
    memset(messages, 0, sizeof(messages));
    messages[0].role = CHAT_ROLE_SYSTEM;
    messages[0].content.data = "s";
    messages[0].content.bytes = 1;
    messages[1].role = CHAT_ROLE_USER;
    messages[1].content.data = "u";
    messages[1].content.bytes = 1;
    require(chat_render(format, messages, 2, &options, out, NULL, NULL) == STATUS_OK);
    require(utf8_valid(out->data, out->bytes));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct chat_format *format, *again;
    struct error err = {""};
    enum status status = chat_format_parse(data, bytes, &format, &err);
    if (status != STATUS_OK) {
        require(err.text[0] != '\0');
        return 0;
    }
    require(chat_format_parse(data, bytes, &again, NULL) == STATUS_OK);
    require(strcmp(chat_format_release(format), chat_format_release(again)) == 0);
    for (int effort = CHAT_EFFORT_NONE; effort <= CHAT_EFFORT_MAX; effort++) {
        struct buf first = BUF_INIT, second = BUF_INIT;
        render(format, (enum chat_effort)effort, &first);
        render(again, (enum chat_effort)effort, &second);
        require(first.bytes == second.bytes && memcmp(first.data, second.data, first.bytes) == 0);
        buf_fini(&first);
        buf_fini(&second);
    }
    chat_format_close(format);
    chat_format_close(again);
    return 0;
}
