#ifndef BATON_ROUTER_SSE_H
#define BATON_ROUTER_SSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/httpd.h"
#include "base/list.h"
#include "base/status.h"

/*
 * Streams of server-sent events: when their headers go out, and comment lines while nothing else
 * does. What the events say is the owner's (api_render.h). Loop thread.
 *
 * Headers wait for the first write, so that whatever fails before is a real status; after 10 s they
 * go out all the same, with a comment. A comment follows every 15 s of silence.
 */

enum { SSE_HEADERS_AFTER_S = 10, SSE_COMMENT_EVERY_S = 15 };

/* All streams of a process, and the one timer that watches them. */
struct sse;

/* One stream; in its owner's memory. */
struct sse_stream {
    struct list in_sse;
    struct sse *sse;
    struct httpd_request *http; /* NULL: not open */
    uint64_t written_ns;        /* last write, or the opening */
    bool started;               /* headers are out */
};

struct sse *sse_create(struct loop *loop) __attribute__((returns_nonnull)) must_check;

/* All streams must have been closed. NULL is allowed. */
void sse_free(struct sse *sse);

/* Watches the request from now on; nothing is sent yet. */
void sse_open(struct sse *sse, struct sse_stream *stream, struct httpd_request *http);

/*
 * Sends the events, and the headers before the first. Several events in one call are one write.
 * STATUS_EXHAUSTED: the client does not read and is dropped, its on_close follows.
 */
enum status must_check sse_write(struct sse_stream *stream, const struct buf *events);

/* The end: a clean one, or a cut after what was written. Both end the HTTP request. */
void sse_end(struct sse_stream *stream);
void sse_abort(struct sse_stream *stream);

/* Forgets the stream without a word: the client has left, or is answered otherwise. */
void sse_close(struct sse_stream *stream);

#endif
