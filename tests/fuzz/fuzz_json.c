#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"

/*
 * Whatever the bytes: no crash, no read beyond them, and what is accepted says the same when it is
 * written and read again. The same bytes put as a string are always JSON.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct json_limits limits = {.max_bytes = 1 << 20, .max_depth = 32};
    struct buf first = BUF_INIT, second = BUF_INIT;
    struct json *value, *again;
    struct error err;
    enum status status = json_parse(data, bytes, &limits, &value, &err);
    if (status == STATUS_OK) {
        json_dump_python(value, &first);
        require(json_parse(first.data, first.bytes, NULL, &again, NULL) == STATUS_OK);
        json_dump_python(again, &second);
        require(first.bytes == second.bytes && memcmp(first.data, second.data, first.bytes) == 0);
        json_free(again);
        json_free(value);
    } else {
        require(status == STATUS_INVALID || status == STATUS_TOO_LARGE);
        require(strncmp(err.text, "line ", 5) == 0 || status == STATUS_TOO_LARGE);
    }
    buf_clear(&first);
    struct json_writer writer;
    json_writer_init(&writer, &first);
    json_put_string_n(&writer, (const char *)data, bytes);
    require(json_parse(first.data, first.bytes, NULL, &value, NULL) == STATUS_OK);
    json_free(value);
    buf_fini(&first);
    buf_fini(&second);
    return 0;
}
