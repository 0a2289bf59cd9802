#include "base/buf.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/mem.h"

/*
 * Growable bytes: the capacity doubles, so appending is constant time on average. The only
 * invariant is bytes <= capacity.
 */

enum { BUF_FIRST = 64 };

void buf_init(struct buf *buf)
{
    *buf = (struct buf)BUF_INIT;
}

void buf_fini(struct buf *buf)
{
    mem_free(buf->data);
    buf_init(buf);
}

void buf_clear(struct buf *buf)
{
    buf->bytes = 0;
}

uint8_t *buf_reserve(struct buf *buf, size_t bytes)
{
    if (buf->data == NULL || buf->capacity - buf->bytes < bytes) {
        size_t need, capacity = buf->capacity ? buf->capacity : BUF_FIRST;
        if (!size_add(buf->bytes, bytes, &need)) {
            need = SIZE_MAX; /* no such memory: mem_realloc says so and aborts */
        }
        while (capacity < need) {
            if (!size_mul(capacity, 2, &capacity)) {
                capacity = need;
            }
        }
        buf->data = mem_realloc(buf->data, capacity);
        buf->capacity = capacity;
    }
    return buf->data + buf->bytes;
}

void buf_append(struct buf *buf, const void *p, size_t bytes)
{
    if (bytes > 0) {
        memcpy(buf_reserve(buf, bytes), p, bytes);
        buf->bytes += bytes;
    }
}

void buf_append_byte(struct buf *buf, uint8_t byte)
{
    *buf_reserve(buf, 1) = byte;
    buf->bytes++;
}

void buf_append_text(struct buf *buf, const char *text)
{
    buf_append(buf, text, strlen(text));
}

void buf_printf(struct buf *buf, const char *format, ...)
{
    va_list args;
    /* Most texts fit in what is there; otherwise the first try tells how much to reserve. */
    size_t room = buf->capacity - buf->bytes;
    va_start(args, format);
    int n = vsnprintf(buf->data ? (char *)buf->data + buf->bytes : NULL, room, format, args);
    va_end(args);
    assert(n >= 0);
    if ((size_t)n >= room) {
        room = (size_t)n + 1;
        char *to = (char *)buf_reserve(buf, room);
        va_start(args, format);
        n = vsnprintf(to, room, format, args);
        va_end(args);
        assert(n >= 0 && (size_t)n < room);
    }
    buf->bytes += (size_t)n;
}

void buf_consume(struct buf *buf, size_t bytes)
{
    if (bytes >= buf->bytes) {
        buf->bytes = 0;
        return;
    }
    memmove(buf->data, buf->data + bytes, buf->bytes - bytes);
    buf->bytes -= bytes;
}

const char *buf_text(struct buf *buf)
{
    *buf_reserve(buf, 1) = '\0';
    return (const char *)buf->data;
}

void *buf_take(struct buf *buf, size_t *ret_bytes)
{
    (void)buf_text(buf);
    if (ret_bytes != NULL) {
        *ret_bytes = buf->bytes;
    }
    void *data = buf->data;
    buf_init(buf);
    return data;
}
