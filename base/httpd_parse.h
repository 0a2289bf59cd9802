#ifndef BATON_BASE_HTTPD_PARSE_H
#define BATON_BASE_HTTPD_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/httpd.h"

/*
 * The gate: HTTP/1.x framing from foreign bytes. Pure: no sockets, no clock, no state but what is
 * passed in. Bytes may arrive in any pieces; the result does not depend on how they were cut.
 */

enum httpd_parse_result {
    HTTPD_PARSE_MORE,    /* all bytes looked at, not whole yet */
    HTTPD_PARSE_DONE,    /* whole */
    HTTPD_PARSE_REFUSED, /* the refusal says why; the connection is of no further use */
};

struct httpd_parse_refusal {
    int status;
    const char *code;
    char text[160];
};

struct httpd_parse_limits {
    size_t max_head_bytes; /* at most 65,535 */
    size_t max_headers;
    size_t max_body_bytes;
};

/* --- the head --- */

/* Zero before the first byte of a head. */
struct httpd_parse_scan {
    size_t from; /* bytes looked at */
    size_t line; /* where the current line began */
    size_t n_lines;
};

/*
 * Looks for the end of the head that begins at bytes, of which n have arrived (the same bytes and
 * more in the next call). ret_bytes is its length with the empty line, on DONE.
 */
enum httpd_parse_result httpd_parse_scan(struct httpd_parse_scan *scan, const uint8_t *bytes,
                                         size_t n, const struct httpd_parse_limits *limits,
                                         size_t *ret_bytes, struct httpd_parse_refusal *refusal);

struct httpd_parse_header {
    uint16_t name, value; /* offsets of NUL-terminated texts in the head */
};

/* Owned by a connection and used again for each request on it. */
struct httpd_parse_head {
    struct buf text; /* a copy of the head, cut into strings in place */
    struct httpd_parse_header *headers;
    size_t n_headers;
    size_t headers_capacity;

    enum httpd_method method;
    const char *method_text;
    const char *path;
    const char *query;
    unsigned minor; /* of HTTP/1.minor */
    bool chunked;
    bool has_length;
    uint64_t length; /* UINT64_MAX when it is larger than that */
    bool keep_alive;
    bool expect_continue;
    bool expect_unknown;
};

/* Parses a whole head as found by the scan. DONE or REFUSED. */
enum httpd_parse_result httpd_parse_head(struct httpd_parse_head *head, const uint8_t *bytes,
                                         size_t n, const struct httpd_parse_limits *limits,
                                         struct httpd_parse_refusal *refusal);

/* First value of that name in any case, or NULL. */
const char *httpd_parse_header_find(const struct httpd_parse_head *head, const char *name);

/* Whether a comma-separated list of tokens has this one, in any case. */
bool httpd_parse_list_has(const char *list, const char *token);

/* Whether all bytes may stand in a token (a header's name). */
bool httpd_parse_is_token(const char *text, size_t bytes);

/* Releases what it holds and leaves it as new. */
void httpd_parse_head_fini(struct httpd_parse_head *head);

/* --- a chunked body --- */

/* Zero before the first byte of a body. */
struct httpd_parse_chunks {
    unsigned state;
    unsigned n_digits;
    uint64_t left;          /* of the size being read, then of the data */
    size_t extension_bytes; /* of all chunks */
    size_t trailer_bytes;
};

/*
 * Appends the data of n bytes to body, which never grows beyond max_body_bytes. ret_used is set on
 * MORE (then n) and DONE: bytes after the body stay untouched.
 */
enum httpd_parse_result httpd_parse_chunks(struct httpd_parse_chunks *chunks, const uint8_t *bytes,
                                           size_t n, const struct httpd_parse_limits *limits,
                                           struct buf *body, size_t *ret_used,
                                           struct httpd_parse_refusal *refusal);

#endif
