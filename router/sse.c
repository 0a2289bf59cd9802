/*
 * See sse.h. One timer looks at all streams once a second: a timer a stream would be armed again
 * with every token.
 */
#include "router/sse.h"

#include <assert.h>

#include "base/loop.h"
#include "base/mem.h"
#include "router/api_render.h"

enum { LOOK_EVERY_MS = 500 };

struct sse {
    struct loop *loop;
    struct loop_timer *timer;
    struct list streams;
    struct buf comment;
};

static void start(struct sse_stream *stream)
{
    if (!stream->started) {
        stream->started = true;
        httpd_stream_start(stream->http, 200, "text/event-stream");
    }
}

static void on_timer(void *cookie)
{
    struct sse *sse = cookie;
    uint64_t now_ns = loop_now_ns();
    list_for_each_safe(at, &sse->streams)
    {
        struct sse_stream *stream = list_entry(at, struct sse_stream, in_sse);
        uint64_t limit_s = stream->started ? SSE_COMMENT_EVERY_S : SSE_HEADERS_AFTER_S;
        if (now_ns - stream->written_ns < limit_s * NS_PER_S) {
            continue;
        }
        /* A refusal means that the client is dropped; on_close tells the owner. */
        (void)!sse_write(stream, &sse->comment);
    }
    loop_timer_arm(sse->timer, LOOK_EVERY_MS * NS_PER_MS);
}

struct sse *sse_create(struct loop *loop)
{
    struct sse *sse = mem_zalloc(sizeof(*sse));
    sse->loop = loop;
    list_init(&sse->streams);
    sse->timer = loop_timer_create(loop, on_timer, sse);
    api_event_comment("waiting", &sse->comment);
    loop_timer_arm(sse->timer, LOOK_EVERY_MS * NS_PER_MS);
    return sse;
}

void sse_free(struct sse *sse)
{
    if (!sse) {
        return;
    }
    assert(list_empty(&sse->streams));
    loop_timer_free(sse->timer);
    buf_fini(&sse->comment);
    mem_free(sse);
}

void sse_open(struct sse *sse, struct sse_stream *stream, struct httpd_request *http)
{
    stream->sse = sse;
    stream->http = http;
    stream->started = false;
    stream->written_ns = loop_now_ns();
    list_push_back(&sse->streams, &stream->in_sse);
}

enum status sse_write(struct sse_stream *stream, const struct buf *events)
{
    start(stream);
    stream->written_ns = loop_now_ns();
    return httpd_stream_write(stream->http, events->data, events->bytes);
}

void sse_end(struct sse_stream *stream)
{
    struct httpd_request *http = stream->http;
    start(stream);
    sse_close(stream);
    httpd_stream_end(http);
}

void sse_abort(struct sse_stream *stream)
{
    struct httpd_request *http = stream->http;
    start(stream);
    sse_close(stream);
    httpd_stream_abort(http);
}

void sse_close(struct sse_stream *stream)
{
    if (stream->http) {
        list_remove(&stream->in_sse);
        stream->http = NULL;
    }
}
