/*
 * The HTTP gate on a stream of bytes. The first byte says how the stream is cut into pieces; the
 * transcript of what the gate made of the pieces must be that of the whole, since two readings of
 * one stream are what request smuggling is made of. Limits are small, so that they are reached.
 */
#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/httpd_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const struct httpd_parse_limits limits = {
    .max_head_bytes = 512,
    .max_headers = 8,
    .max_body_bytes = 256,
};

/* A connection as httpd_conn.c drives the gate, without sockets. */
struct stream {
    struct buf in;
    struct httpd_parse_scan scan;
    struct httpd_parse_head head;
    struct httpd_parse_chunks chunks;
    struct buf body;
    bool in_body;
    bool refused;
    struct buf transcript;
};

static void check_text(const struct httpd_parse_head *head, const char *text)
{
    for (const char *p = text; *p; p++) {
        assert(*p == '\t' || (uint8_t)*p >= 0x20);
        assert((const uint8_t *)p < head->text.data + head->text.bytes);
    }
}

static void note_head(struct stream *s)
{
    const struct httpd_parse_head *head = &s->head;
    const char *text = (const char *)head->text.data;

    assert(head->n_headers <= limits.max_headers);
    assert(!(head->chunked && head->has_length));
    check_text(head, head->query);
    buf_printf(&s->transcript, "%s %s ? %s 1.%u keep %d\n", head->method_text, head->path,
               head->query, head->minor, head->keep_alive);
    for (size_t i = 0; i < head->n_headers; i++) {
        check_text(head, text + head->headers[i].name);
        check_text(head, text + head->headers[i].value);
        assert(httpd_parse_is_token(text + head->headers[i].name,
                                    strlen(text + head->headers[i].name)));
        assert(httpd_parse_header_find(head, text + head->headers[i].name));
        buf_printf(&s->transcript, "%s: %s\n", text + head->headers[i].name,
                   text + head->headers[i].value);
    }
}

static void refuse(struct stream *s, const struct httpd_parse_refusal *refusal)
{
    assert(refusal->status == 400 || refusal->status == 413 || refusal->status == 431);
    buf_printf(&s->transcript, "refused %d %s %s\n", refusal->status, refusal->code, refusal->text);
    s->refused = true;
}

static void body_end(struct stream *s)
{
    assert(s->body.bytes <= limits.max_body_bytes);
    buf_append(&s->transcript, s->body.data, s->body.bytes);
    buf_append_text(&s->transcript, "\nend\n");
    buf_clear(&s->body);
    memset(&s->chunks, 0, sizeof(s->chunks));
    s->in_body = false;
}

/* One step over what has arrived; false when it needs more. */
static bool step(struct stream *s)
{
    struct httpd_parse_refusal refusal = {.status = 0};
    enum httpd_parse_result r;
    size_t used = 0;

    if (!s->in_body) {
        r = httpd_parse_scan(&s->scan, s->in.data, s->in.bytes, &limits, &used, &refusal);
        if (r == HTTPD_PARSE_DONE) {
            memset(&s->scan, 0, sizeof(s->scan));
            r = httpd_parse_head(&s->head, s->in.data, used, &limits, &refusal);
            assert(r != HTTPD_PARSE_MORE);
        }
        if (r == HTTPD_PARSE_DONE) {
            note_head(s);
            s->in_body = true;
            if (s->head.length > limits.max_body_bytes) {
                s->refused = true;
            }
        }
    } else if (s->head.chunked) {
        r = httpd_parse_chunks(&s->chunks, s->in.data, s->in.bytes, &limits, &s->body, &used,
                               &refusal);
        if (r == HTTPD_PARSE_DONE) {
            body_end(s);
        }
    } else {
        r = HTTPD_PARSE_MORE;
        if (s->in.bytes >= s->head.length) {
            used = (size_t)s->head.length;
            buf_append(&s->body, s->in.data, used);
            body_end(s);
            r = HTTPD_PARSE_DONE;
        }
    }
    if (r == HTTPD_PARSE_REFUSED) {
        refuse(s, &refusal);
        return false;
    }
    assert(used <= s->in.bytes);
    buf_consume(&s->in, used);
    return r == HTTPD_PARSE_DONE;
}

static struct buf run(const uint8_t *data, size_t bytes, unsigned cut)
{
    struct stream s = {.refused = false};
    struct buf transcript;
    size_t at = 0;

    while (at < bytes && !s.refused) {
        size_t n = cut == 0 ? bytes - at : 1 + (at * 7 + cut) % cut;

        n = n < bytes - at ? n : bytes - at;
        buf_append(&s.in, data + at, n);
        at += n;
        while (!s.refused && s.in.bytes > 0 && step(&s)) {
        }
    }
    transcript = s.transcript;
    buf_fini(&s.in);
    buf_fini(&s.body);
    httpd_parse_head_fini(&s.head);
    return transcript;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct buf whole;
    struct buf pieces;

    if (bytes < 1) {
        return 0;
    }
    whole = run(data + 1, bytes - 1, 0);
    pieces = run(data + 1, bytes - 1, 1 + data[0] % 31);
    if (whole.bytes != pieces.bytes ||
        (whole.bytes > 0 && memcmp(whole.data, pieces.data, whole.bytes) != 0)) {
        abort();
    }
    buf_fini(&whole);
    buf_fini(&pieces);
    return 0;
}
