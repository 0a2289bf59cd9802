/*
 * The gate in front of every handler.
 *
 * Written by hand rather than left to the HTTP part of libevent, which was measured to answer 200
 * to bare LF, "Host :", a missing Host, repeated and signed lengths, unknown transfer codings and
 * signed chunk sizes; a filter in front of it would have had to parse all of this anyway, and to
 * agree with it byte for byte. The rule here is that a message has one reading or is refused:
 * whatever two parsers could take differently is 400 and ends the connection, because no later byte
 * of it can be trusted to begin where it seems to.
 */
#include "base/httpd_parse.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"

enum {
    METHOD_MAX_BYTES = 32,
    /* More digits than any size below the limit needs; stops a line of zeros without end. */
    CHUNK_DIGITS_MAX = 16,
    /* Extensions mean nothing to us. A sender of many small chunks with a short one each still
     * passes; one that hides data in them does not. */
    CHUNK_EXTENSIONS_MAX_BYTES = 16 << 10,
};

static enum httpd_parse_result refuse(struct httpd_parse_refusal *refusal, int status,
                                      const char *format, ...) PRINTF_LIKE(3, 4);

static enum httpd_parse_result refuse(struct httpd_parse_refusal *refusal, int status,
                                      const char *format, ...)
{
    va_list args;

    refusal->status = status;
    refusal->code = status == 431   ? "headers_too_large"
                    : status == 413 ? "request_too_large"
                                    : "invalid_http";
    va_start(args, format);
    vsnprintf(refusal->text, sizeof(refusal->text), format, args);
    va_end(args);
    return HTTPD_PARSE_REFUSED;
}

/* --- classes of bytes --- */

static bool is_token_byte(uint8_t c)
{
    static const uint8_t token[256] = {
        ['!'] = 1, ['#'] = 1, ['$'] = 1, ['%'] = 1,         ['&'] = 1,         ['\''] = 1,
        ['*'] = 1, ['+'] = 1, ['-'] = 1, ['.'] = 1,         ['^'] = 1,         ['_'] = 1,
        ['`'] = 1, ['|'] = 1, ['~'] = 1, ['0' ... '9'] = 1, ['A' ... 'Z'] = 1, ['a' ... 'z'] = 1,
    };

    return token[c] != 0;
}

/* A header's value: visible bytes, blanks, and bytes of another charset, which pass as they are. */
static bool is_value_byte(uint8_t c)
{
    return c == '\t' || (c >= 0x20 && c != 0x7f);
}

static bool is_host_byte(uint8_t c)
{
    return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
           (c != '\0' && strchr("-._~%!$&'()*+;=:[]", c) != NULL);
}

static int hex_value(uint8_t c)
{
    if (c >= '0' && c <= '9') {
        return c - '0';
    }
    if (c >= 'a' && c <= 'f') {
        return c - 'a' + 10;
    }
    if (c >= 'A' && c <= 'F') {
        return c - 'A' + 10;
    }
    return -1;
}

bool httpd_parse_is_token(const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        if (!is_token_byte((uint8_t)text[i])) {
            return false;
        }
    }
    return bytes > 0;
}

bool httpd_parse_list_has(const char *list, const char *token)
{
    size_t bytes = strlen(token);

    while (*list) {
        size_t item;
        size_t end;

        list += strspn(list, " \t,");
        item = strcspn(list, ",");
        end = item;
        while (end > 0 && (list[end - 1] == ' ' || list[end - 1] == '\t')) {
            end--;
        }
        if (end == bytes && strncasecmp(list, token, bytes) == 0) {
            return true;
        }
        list += item;
    }
    return false;
}

/* --- end of the head --- */

enum httpd_parse_result httpd_parse_scan(struct httpd_parse_scan *scan, const uint8_t *bytes,
                                         size_t n, const struct httpd_parse_limits *limits,
                                         size_t *ret_bytes, struct httpd_parse_refusal *refusal)
{
    if (n > 0 && scan->from == 0 && !is_token_byte(bytes[0])) {
        /* TLS and other protocols show themselves here, long before a line ends */
        return refuse(refusal, 400, "the request begins with byte 0x%02x, which no method has",
                      bytes[0]);
    }
    while (scan->from < n) {
        const uint8_t *start = bytes + scan->from;
        const uint8_t *lf = memchr(start, '\n', n - scan->from);
        size_t end;

        if (!lf) {
            scan->from = n;
            break;
        }
        end = (size_t)(lf - bytes);
        if (end + 1 > limits->max_head_bytes) {
            scan->from = end + 1;
            break;
        }
        if (end == scan->line || bytes[end - 1] != '\r') {
            return refuse(refusal, 400, "line %zu of the head ends with a bare LF; want CR LF",
                          scan->n_lines + 1);
        }
        scan->from = end + 1;
        if (end - 1 == scan->line) {
            *ret_bytes = end + 1;
            return HTTPD_PARSE_DONE;
        }
        scan->line = end + 1;
        if (scan->n_lines > limits->max_headers) {
            return refuse(refusal, 431, "more than %zu headers", limits->max_headers);
        }
        scan->n_lines++;
    }
    if (scan->from > limits->max_head_bytes) {
        return refuse(refusal, 431, "request line and headers of more than %zu bytes",
                      limits->max_head_bytes);
    }
    return HTTPD_PARSE_MORE;
}

/* --- the request line --- */

static enum httpd_method method_of(const char *text)
{
    static const struct {
        const char *text;
        enum httpd_method method;
    } known[] = {
        {"GET", HTTPD_GET},         {"POST", HTTPD_POST}, {"HEAD", HTTPD_HEAD},
        {"OPTIONS", HTTPD_OPTIONS}, {"PUT", HTTPD_PUT},   {"DELETE", HTTPD_DELETE},
        {"PATCH", HTTPD_PATCH},
    };

    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
        if (strcmp(text, known[i].text) == 0) {
            return known[i].method;
        }
    }
    return HTTPD_OTHER;
}

/* Splits the target, a string inside the head, into path and query. */
static enum httpd_parse_result target_split(struct httpd_parse_head *head, char *target,
                                            struct httpd_parse_refusal *refusal)
{
    char *query;

    if (strncasecmp(target, "http://", 7) == 0 || strncasecmp(target, "https://", 8) == 0) {
        /* absolute form, as sent to proxies: the authority is not ours to judge */
        target = strstr(target, "//") + 2;
        target += strcspn(target, "/?");
    } else if (target[0] != '/' && strcmp(target, "*") != 0 && head->method != HTTPD_OTHER) {
        return refuse(refusal, 400, "the request target does not begin with '/'");
    }
    query = strchr(target, '?');
    if (query) {
        *query++ = '\0';
    }
    head->path = target[0] ? target : "/";
    head->query = query ? query : "";
    return HTTPD_PARSE_DONE;
}

/* line is the request line without CR LF, followed by NUL. */
static enum httpd_parse_result request_line_parse(struct httpd_parse_head *head, char *line,
                                                  size_t bytes, struct httpd_parse_refusal *refusal)
{
    char *target = memchr(line, ' ', bytes);
    char *version = target ? memchr(target + 1, ' ', bytes - (size_t)(target + 1 - line)) : NULL;

    if (!version) {
        return refuse(refusal, 400, "the request line is not METHOD TARGET VERSION");
    }
    *target++ = '\0';
    *version++ = '\0';
    /* the version ends where the line does, not at a NUL that the client put in */
    if ((size_t)(line + bytes - version) != 8 || memcmp(version, "HTTP/1.", 7) != 0 ||
        (version[7] != '0' && version[7] != '1')) {
        return refuse(refusal, 400, "the request line does not end with HTTP/1.1 or HTTP/1.0");
    }
    head->minor = version[7] == '1';
    if ((size_t)(target - 1 - line) > METHOD_MAX_BYTES ||
        !httpd_parse_is_token(line, (size_t)(target - 1 - line))) {
        return refuse(refusal, 400, "the method is not a token of 1 to %d bytes", METHOD_MAX_BYTES);
    }
    head->method_text = line;
    head->method = method_of(line);
    if (version - 1 == target) {
        return refuse(refusal, 400, "the request target is empty");
    }
    for (const char *p = target; p < version - 1; p++) {
        uint8_t c = (uint8_t)*p;

        if (c <= 0x20 || c >= 0x7f || c == '#') {
            return refuse(refusal, 400, "the request target has byte 0x%02x, which must be encoded",
                          c);
        }
    }
    return target_split(head, target, refusal);
}

/* --- headers --- */

static enum httpd_parse_result length_parse(struct httpd_parse_head *head, const char *value,
                                            struct httpd_parse_refusal *refusal)
{
    uint64_t length = 0;

    if (head->has_length) {
        return refuse(refusal, 400, "Content-Length is there twice");
    }
    if (*value == '\0') {
        return refuse(refusal, 400, "Content-Length is empty");
    }
    for (; *value; value++) {
        if (*value < '0' || *value > '9') {
            return refuse(refusal, 400, "Content-Length is not plain digits");
        }
        if (length > (UINT64_MAX - 9) / 10) {
            length = UINT64_MAX; /* stays there; the limit of the body answers it */
        } else {
            length = length * 10 + (uint64_t)(*value - '0');
        }
    }
    head->has_length = true;
    head->length = length;
    return HTTPD_PARSE_DONE;
}

static enum httpd_parse_result host_check(const char *value, bool seen,
                                          struct httpd_parse_refusal *refusal)
{
    if (seen) {
        return refuse(refusal, 400, "Host is there twice");
    }
    for (; *value; value++) {
        if (!is_host_byte((uint8_t)*value)) {
            return refuse(refusal, 400, "Host has byte 0x%02x, which no host name has",
                          (uint8_t)*value);
        }
    }
    return HTTPD_PARSE_DONE;
}

/* Facts gathered while the headers are read, judged when all are known. */
struct framing {
    bool host;
    bool close;
    bool keep_alive;
};

/* Looks at the headers that frame the message; others pass. */
static enum httpd_parse_result header_weigh(struct httpd_parse_head *head, struct framing *framing,
                                            const char *name, const char *value,
                                            struct httpd_parse_refusal *refusal)
{
    enum httpd_parse_result r;

    switch (strlen(name)) {
    case 4:
        if (strcasecmp(name, "host") == 0) {
            r = host_check(value, framing->host, refusal);
            framing->host = true;
            return r;
        }
        break;
    case 6:
        if (strcasecmp(name, "expect") == 0) {
            if (strcasecmp(value, "100-continue") == 0) {
                head->expect_continue = true;
            } else {
                head->expect_unknown = true;
            }
        }
        break;
    case 10:
        if (strcasecmp(name, "connection") == 0) {
            framing->close |= httpd_parse_list_has(value, "close");
            framing->keep_alive |= httpd_parse_list_has(value, "keep-alive");
        }
        break;
    case 14:
        if (strcasecmp(name, "content-length") == 0) {
            return length_parse(head, value, refusal);
        }
        break;
    case 17:
        if (strcasecmp(name, "transfer-encoding") == 0) {
            if (head->chunked) {
                return refuse(refusal, 400, "Transfer-Encoding is there twice");
            }
            if (strcasecmp(value, "chunked") != 0) {
                return refuse(refusal, 400, "Transfer-Encoding is not exactly 'chunked'");
            }
            head->chunked = true;
        }
        break;
    default:
        break;
    }
    return HTTPD_PARSE_DONE;
}

/*
 * Splits one header line in place. line is followed by CR LF, whose CR becomes the NUL. Bytes are
 * checked against their class, so a NUL of the client's cannot pass for an end.
 */
static enum httpd_parse_result header_split(char *line, size_t bytes, size_t line_i,
                                            char **ret_value, struct httpd_parse_refusal *refusal)
{
    size_t name = 0;
    size_t end = bytes;
    size_t start;

    while (name < bytes && is_token_byte((uint8_t)line[name])) {
        name++;
    }
    if (name == 0 && (line[0] == ' ' || line[0] == '\t')) {
        return refuse(refusal, 400, "header %zu is folded; want one line a header", line_i);
    }
    if (name == 0 || name == bytes || line[name] != ':') {
        return refuse(refusal, 400, "header %zu is not a name that a colon follows directly",
                      line_i);
    }
    for (start = name + 1; start < bytes && (line[start] == ' ' || line[start] == '\t');) {
        start++;
    }
    while (end > start && (line[end - 1] == ' ' || line[end - 1] == '\t')) {
        end--;
    }
    for (size_t i = start; i < end; i++) {
        if (!is_value_byte((uint8_t)line[i])) {
            return refuse(refusal, 400, "header %zu has control byte 0x%02x in its value", line_i,
                          (uint8_t)line[i]);
        }
    }
    line[name] = '\0';
    line[end] = '\0';
    *ret_value = line + start;
    return HTTPD_PARSE_DONE;
}

static enum httpd_parse_result framing_judge(struct httpd_parse_head *head,
                                             const struct framing *framing,
                                             struct httpd_parse_refusal *refusal)
{
    if (head->minor == 1 && !framing->host) {
        return refuse(refusal, 400, "Host is missing");
    }
    if (head->chunked && head->has_length) {
        return refuse(refusal, 400, "both Content-Length and Transfer-Encoding");
    }
    if (head->chunked && head->minor == 0) {
        return refuse(refusal, 400, "Transfer-Encoding in an HTTP/1.0 request");
    }
    if (head->minor == 0) {
        head->expect_continue = false;
        head->expect_unknown = false;
    }
    head->keep_alive = !framing->close && (head->minor == 1 || framing->keep_alive);
    return HTTPD_PARSE_DONE;
}

static void head_reset(struct httpd_parse_head *head)
{
    buf_clear(&head->text);
    head->n_headers = 0;
    head->method = HTTPD_OTHER;
    head->method_text = "";
    head->path = "";
    head->query = "";
    head->minor = 0;
    head->chunked = false;
    head->has_length = false;
    head->length = 0;
    head->keep_alive = false;
    head->expect_continue = false;
    head->expect_unknown = false;
}

static void header_add(struct httpd_parse_head *head, const char *name, const char *value)
{
    const char *text = (const char *)head->text.data;

    if (head->n_headers == head->headers_capacity) {
        head->headers_capacity = head->headers_capacity ? head->headers_capacity * 2 : 16;
        head->headers =
            mem_realloc_array(head->headers, head->headers_capacity, sizeof(*head->headers));
    }
    head->headers[head->n_headers].name = (uint16_t)(name - text);
    head->headers[head->n_headers].value = (uint16_t)(value - text);
    head->n_headers++;
}

enum httpd_parse_result httpd_parse_head(struct httpd_parse_head *head, const uint8_t *bytes,
                                         size_t n, const struct httpd_parse_limits *limits,
                                         struct httpd_parse_refusal *refusal)
{
    struct framing framing = {.host = false};
    enum httpd_parse_result r;
    char *line;
    char *end;

    assert(n >= 4 && n <= UINT16_MAX);
    head_reset(head);
    buf_append(&head->text, bytes, n);
    line = (char *)head->text.data;
    end = line + n - 2; /* the empty line */
    for (size_t line_i = 0; line < end; line_i++) {
        char *lf = memchr(line, '\n', (size_t)(end - line));
        size_t line_bytes = (size_t)(lf - 1 - line); /* the scan saw CR LF at every end */
        char *value = NULL;

        if (line_i == 0) {
            lf[-1] = '\0';
            r = request_line_parse(head, line, line_bytes, refusal);
        } else {
            r = header_split(line, line_bytes, line_i, &value, refusal);
            if (r == HTTPD_PARSE_DONE) {
                header_add(head, line, value);
                r = header_weigh(head, &framing, line, value, refusal);
            }
        }
        if (r != HTTPD_PARSE_DONE) {
            return r;
        }
        line = lf + 1;
    }
    return framing_judge(head, &framing, refusal);
}

const char *httpd_parse_header_find(const struct httpd_parse_head *head, const char *name)
{
    const char *text = (const char *)head->text.data;

    for (size_t i = 0; i < head->n_headers; i++) {
        if (strcasecmp(text + head->headers[i].name, name) == 0) {
            return text + head->headers[i].value;
        }
    }
    return NULL;
}

void httpd_parse_head_fini(struct httpd_parse_head *head)
{
    head_reset(head);
    buf_fini(&head->text);
    mem_free(head->headers);
    head->headers = NULL;
    head->headers_capacity = 0;
}

/* --- chunks --- */

enum chunk_state {
    CHUNK_SIZE,
    CHUNK_EXTENSION,
    CHUNK_SIZE_LF,
    CHUNK_DATA,
    CHUNK_DATA_CR,
    CHUNK_DATA_LF,
    CHUNK_TRAILER_START,
    CHUNK_TRAILER_NAME,
    CHUNK_TRAILER_VALUE,
    CHUNK_TRAILER_LF,
    CHUNK_END_LF,
};

static enum httpd_parse_result size_byte(struct httpd_parse_chunks *chunks, uint8_t c,
                                         const struct httpd_parse_limits *limits,
                                         const struct buf *body,
                                         struct httpd_parse_refusal *refusal)
{
    int digit = hex_value(c);

    if (digit >= 0) {
        if (chunks->n_digits == CHUNK_DIGITS_MAX) {
            return refuse(refusal, 400, "a chunk size of more than %d digits", CHUNK_DIGITS_MAX);
        }
        chunks->n_digits++;
        chunks->left = chunks->left << 4 | (unsigned)digit;
        return HTTPD_PARSE_MORE;
    }
    if (chunks->n_digits == 0 || (c != ';' && c != '\r')) {
        return refuse(refusal, 400, "a chunk size is not plain hex digits: byte 0x%02x", c);
    }
    if (chunks->left > limits->max_body_bytes - body->bytes) {
        return refuse(refusal, 413, "the body is larger than %zu bytes", limits->max_body_bytes);
    }
    chunks->state = c == ';' ? CHUNK_EXTENSION : CHUNK_SIZE_LF;
    return HTTPD_PARSE_MORE;
}

static enum httpd_parse_result trailer_byte(struct httpd_parse_chunks *chunks, uint8_t c,
                                            const struct httpd_parse_limits *limits,
                                            struct httpd_parse_refusal *refusal)
{
    if (++chunks->trailer_bytes > limits->max_head_bytes) {
        return refuse(refusal, 431, "trailers of more than %zu bytes", limits->max_head_bytes);
    }
    if (chunks->state == CHUNK_TRAILER_VALUE) {
        if (c == '\r') {
            chunks->state = CHUNK_TRAILER_LF;
        } else if (!is_value_byte(c)) {
            return refuse(refusal, 400, "a trailer has control byte 0x%02x", c);
        }
    } else if (is_token_byte(c)) {
        chunks->state = CHUNK_TRAILER_NAME;
    } else if (c == ':' && chunks->state == CHUNK_TRAILER_NAME) {
        chunks->state = CHUNK_TRAILER_VALUE;
    } else if (c == '\r' && chunks->state == CHUNK_TRAILER_START) {
        chunks->state = CHUNK_END_LF;
    } else {
        return refuse(refusal, 400, "a trailer is not a name that a colon follows directly");
    }
    return HTTPD_PARSE_MORE;
}

/* Every byte that is not data. DONE after the last one of the body. */
static enum httpd_parse_result frame_byte(struct httpd_parse_chunks *chunks, uint8_t c,
                                          const struct httpd_parse_limits *limits,
                                          const struct buf *body,
                                          struct httpd_parse_refusal *refusal)
{
    switch (chunks->state) {
    case CHUNK_SIZE:
        return size_byte(chunks, c, limits, body, refusal);
    case CHUNK_EXTENSION:
        if (c == '\r') {
            chunks->state = CHUNK_SIZE_LF;
        } else if (!is_value_byte(c)) {
            return refuse(refusal, 400, "a chunk extension has control byte 0x%02x", c);
        } else if (++chunks->extension_bytes > CHUNK_EXTENSIONS_MAX_BYTES) {
            return refuse(refusal, 400, "chunk extensions of more than %d bytes",
                          CHUNK_EXTENSIONS_MAX_BYTES);
        }
        return HTTPD_PARSE_MORE;
    case CHUNK_DATA_CR:
        chunks->state = CHUNK_DATA_LF;
        return c == '\r' ? HTTPD_PARSE_MORE
                         : refuse(refusal, 400, "a chunk is longer than its size says");
    case CHUNK_TRAILER_START:
    case CHUNK_TRAILER_NAME:
    case CHUNK_TRAILER_VALUE:
        return trailer_byte(chunks, c, limits, refusal);
    default:
        break;
    }
    if (c != '\n') {
        return refuse(refusal, 400, "a bare CR in the framing of the chunks");
    }
    switch (chunks->state) {
    case CHUNK_SIZE_LF:
        chunks->state = chunks->left > 0 ? CHUNK_DATA : CHUNK_TRAILER_START;
        break;
    case CHUNK_DATA_LF:
        chunks->state = CHUNK_SIZE;
        chunks->n_digits = 0;
        break;
    case CHUNK_TRAILER_LF:
        chunks->state = CHUNK_TRAILER_START;
        break;
    default:
        return HTTPD_PARSE_DONE;
    }
    return HTTPD_PARSE_MORE;
}

enum httpd_parse_result httpd_parse_chunks(struct httpd_parse_chunks *chunks, const uint8_t *bytes,
                                           size_t n, const struct httpd_parse_limits *limits,
                                           struct buf *body, size_t *ret_used,
                                           struct httpd_parse_refusal *refusal)
{
    size_t i = 0;

    while (i < n) {
        enum httpd_parse_result r;

        if (chunks->state == CHUNK_DATA) {
            size_t take = n - i < chunks->left ? n - i : (size_t)chunks->left;

            buf_append(body, bytes + i, take);
            i += take;
            chunks->left -= take;
            if (chunks->left == 0) {
                chunks->state = CHUNK_DATA_CR;
            }
            continue;
        }
        r = frame_byte(chunks, bytes[i], limits, body, refusal);
        i++;
        if (r == HTTPD_PARSE_REFUSED) {
            return r;
        }
        if (r == HTTPD_PARSE_DONE) {
            *ret_used = i;
            return r;
        }
    }
    *ret_used = n;
    return HTTPD_PARSE_MORE;
}
