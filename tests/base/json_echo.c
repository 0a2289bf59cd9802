#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"

/*
 * For check_json_python.py. Each line of input is a JSON text; the answer is one line: the value as
 * json_dump_python writes it, or "!" and the status. With the argument "float", each line is a
 * number instead, and the answer is that number as json_put_float writes it.
 */

static void answer(const char *line, size_t bytes, bool as_float, struct buf *out)
{
    struct json *value;
    struct error err;
    if (as_float) {
        struct json_writer writer;
        json_writer_init(&writer, out);
        json_put_float(&writer, strtof(line, NULL));
        return;
    }
    enum status status = json_parse(line, bytes, NULL, &value, &err);
    if (status != STATUS_OK) {
        buf_printf(out, "!%s %s", status_name(status), err.text);
        return;
    }
    json_dump_python(value, out);
    json_free(value);
}

int main(int argc, char **argv)
{
    bool as_float = argc > 1 && strcmp(argv[1], "float") == 0;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    struct buf out = BUF_INIT;
    while ((bytes = getline(&line, &capacity, stdin)) > 0) {
        buf_clear(&out);
        bytes -= line[bytes - 1] == '\n';
        answer(line, (size_t)bytes, as_float, &out);
        buf_append_byte(&out, '\n');
        fwrite(out.data, 1, out.bytes, stdout);
    }
    buf_fini(&out);
    free(line);
    return 0;
}
