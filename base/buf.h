#ifndef BATON_BASE_BUF_H
#define BATON_BASE_BUF_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/status.h"

/*
 * Growable bytes. Owned by whoever holds the struct; one thread at a time. Growth aborts when
 * memory is out, so a caller that appends foreign data bounds it first. data may be NULL while
 * bytes is 0, and moves whenever bytes are appended or reserved.
 */
struct buf {
    uint8_t *data;
    size_t bytes;    /* in use */
    size_t capacity; /* allocated */
};

#define BUF_INIT   \
    {              \
        NULL, 0, 0 \
    }

/* Makes an empty buffer that has allocated nothing. */
void buf_init(struct buf *buf);

/* Releases the bytes and leaves an empty buffer. */
void buf_fini(struct buf *buf);

/* Makes it empty and keeps the memory for use again. */
void buf_clear(struct buf *buf);

/* Appends a copy of bytes bytes at p, which must not lie inside the buffer; p may be NULL for 0. */
void buf_append(struct buf *buf, const void *p, size_t bytes);
void buf_append_byte(struct buf *buf, uint8_t byte);

/* Appends the string without its NUL. */
void buf_append_text(struct buf *buf, const char *text);

/* Appends formatted text without its NUL. */
void buf_printf(struct buf *buf, const char *format, ...) PRINTF_LIKE(2, 3);

/*
 * Makes room for at least bytes more and returns where they go. The caller writes there and then
 * adds what it wrote to buf->bytes.
 */
uint8_t *buf_reserve(struct buf *buf, size_t bytes) __attribute__((returns_nonnull)) must_check;

/* Makes room for what is appended next, so that it allocates once. */
static inline void buf_reserve_only(struct buf *buf, size_t bytes)
{
    uint8_t *room = buf_reserve(buf, bytes);
    (void)room;
}

/* Drops the first bytes bytes (at most all); the rest moves to the front. */
void buf_consume(struct buf *buf, size_t bytes);

/*
 * Terminates the content with a NUL that does not count in bytes, and returns it as text; good
 * until the buffer changes.
 */
const char *buf_text(struct buf *buf) __attribute__((returns_nonnull));

/*
 * Hands the bytes over as one allocation for mem_free, terminated by a NUL that does not count,
 * and leaves an empty buffer. ret_bytes may be NULL.
 */
void *buf_take(struct buf *buf, size_t *ret_bytes) __attribute__((returns_nonnull)) must_check;

/* Little-endian integers at any alignment. */
static inline void put_le16(void *to, uint16_t value)
{
    uint8_t *p = to;
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
}

static inline void put_le32(void *to, uint32_t value)
{
    uint8_t *p = to;
    for (unsigned i = 0; i < 4; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

static inline void put_le64(void *to, uint64_t value)
{
    uint8_t *p = to;
    for (unsigned i = 0; i < 8; i++) {
        p[i] = (uint8_t)(value >> (8 * i));
    }
}

static inline uint16_t get_le16(const void *from)
{
    const uint8_t *p = from;
    return (uint16_t)(p[0] | (uint16_t)p[1] << 8);
}

static inline uint32_t get_le32(const void *from)
{
    const uint8_t *p = from;
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get_le64(const void *from)
{
    const uint8_t *p = from;
    return get_le32(p) | (uint64_t)get_le32(p + 4) << 32;
}

#endif
