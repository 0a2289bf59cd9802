#include "base/mem.h"

#include <assert.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/*
 * Allocation that aborts, allocation that may fail, and the arena. An arena is a chain of chunks
 * that double in size up to a cap; what does not fit in the current chunk gets a new one, and what
 * is larger than a quarter of a chunk gets its own, so that little is wasted behind it. The limit
 * binds only arena_try_alloc: our own bookkeeping in a request's arena must not fail because the
 * request is large.
 */

static void *must(void *p, size_t bytes)
{
    if (p == NULL) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        abort();
    }
    return p;
}

static size_t array_bytes(size_t n, size_t size)
{
    size_t bytes;
    if (!size_mul(n, size, &bytes)) {
        fprintf(stderr, "out of memory: %zu elements of %zu bytes\n", n, size);
        abort();
    }
    return bytes;
}

void *mem_alloc(size_t bytes)
{
    return must(malloc(bytes ? bytes : 1), bytes);
}

void *mem_zalloc(size_t bytes)
{
    return must(calloc(1, bytes ? bytes : 1), bytes);
}

void *mem_array(size_t n, size_t size)
{
    return mem_zalloc(array_bytes(n, size));
}

void *mem_realloc(void *p, size_t bytes)
{
    return must(realloc(p, bytes ? bytes : 1), bytes);
}

void *mem_realloc_array(void *p, size_t n, size_t size)
{
    return mem_realloc(p, array_bytes(n, size));
}

char *mem_strdup(const char *text)
{
    return mem_dup(text, strlen(text) + 1);
}

char *mem_strndup(const char *text, size_t bytes)
{
    char *copy = mem_alloc(bytes + 1);
    if (bytes > 0) {
        memcpy(copy, text, bytes);
    }
    copy[bytes] = '\0';
    return copy;
}

void *mem_dup(const void *p, size_t bytes)
{
    void *copy = mem_alloc(bytes);
    if (bytes > 0) {
        memcpy(copy, p, bytes);
    }
    return copy;
}

char *mem_printf(const char *format, ...)
{
    va_list args;
    char *text = NULL;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    return must(n < 0 ? NULL : text, 0);
}

void *mem_try_alloc(size_t bytes)
{
    return malloc(bytes ? bytes : 1);
}

void *mem_try_array(size_t n, size_t size)
{
    size_t bytes;
    if (!size_mul(n, size, &bytes)) {
        return NULL;
    }
    return calloc(1, bytes ? bytes : 1);
}

void *mem_try_aligned(size_t alignment, size_t bytes)
{
    void *p = NULL;
    if (alignment < sizeof(void *)) {
        alignment = sizeof(void *);
    }
    return posix_memalign(&p, alignment, bytes ? bytes : 1) == 0 ? p : NULL;
}

void mem_free(void *p)
{
    free(p);
}

/* ---- arena ---- */

enum {
    ARENA_ALIGN = 16,
    /* A router has two arenas a request, and most requests are short. */
    ARENA_CHUNK_FIRST = 512,
    /* Beyond this, doubling only holds more unused memory at the end of a request. */
    ARENA_CHUNK_MAX = 256 * 1024,
};

struct chunk {
    struct chunk *next;
    size_t bytes, used;
    alignas(ARENA_ALIGN) unsigned char data[];
};

struct arena {
    struct chunk *chunks; /* the first is the one being filled */
    size_t next_bytes;
    size_t limit_bytes;
    size_t bytes;
};

struct arena *arena_create(size_t limit_bytes)
{
    struct arena *arena = mem_zalloc(sizeof(*arena));
    arena->limit_bytes = limit_bytes;
    arena->next_bytes = ARENA_CHUNK_FIRST;
    return arena;
}

void arena_reset(struct arena *arena)
{
    struct chunk *chunk = arena->chunks;
    while (chunk != NULL) {
        struct chunk *next = chunk->next;
        free(chunk);
        chunk = next;
    }
    arena->chunks = NULL;
    arena->next_bytes = ARENA_CHUNK_FIRST;
    arena->bytes = 0;
}

void arena_free(struct arena *arena)
{
    if (arena != NULL) {
        arena_reset(arena);
        free(arena);
    }
}

static struct chunk *chunk_create(size_t bytes)
{
    size_t total;
    if (!size_add(sizeof(struct chunk), bytes, &total)) {
        return NULL;
    }
    struct chunk *chunk = calloc(1, total);
    if (chunk != NULL) {
        chunk->bytes = bytes;
    }
    return chunk;
}

static void *arena_get(struct arena *arena, size_t bytes)
{
    struct chunk *chunk = arena->chunks;
    if (chunk == NULL || chunk->bytes - chunk->used < bytes) {
        bool own = bytes > arena->next_bytes / 4;
        struct chunk *fresh = chunk_create(own ? bytes : arena->next_bytes);
        if (fresh == NULL) {
            return NULL;
        }
        if (own && chunk != NULL) {
            fresh->next = chunk->next;
            chunk->next = fresh;
        } else {
            fresh->next = chunk;
            arena->chunks = fresh;
        }
        if (!own && arena->next_bytes < ARENA_CHUNK_MAX) {
            arena->next_bytes *= 2;
        }
        chunk = fresh;
    }
    void *p = chunk->data + chunk->used;
    chunk->used += bytes;
    arena->bytes += bytes;
    return p;
}

static bool arena_round(size_t bytes, size_t *ret)
{
    size_t up;
    if (!size_add(bytes ? bytes : 1, ARENA_ALIGN - 1, &up)) {
        return false;
    }
    *ret = up & ~(size_t)(ARENA_ALIGN - 1);
    return true;
}

void *arena_alloc(struct arena *arena, size_t bytes)
{
    size_t rounded;
    return must(arena_round(bytes, &rounded) ? arena_get(arena, rounded) : NULL, bytes);
}

void *arena_try_alloc(struct arena *arena, size_t bytes)
{
    size_t rounded;
    if (!arena_round(bytes, &rounded)) {
        return NULL;
    }
    if (arena->limit_bytes != 0 &&
        (arena->bytes > arena->limit_bytes || rounded > arena->limit_bytes - arena->bytes)) {
        return NULL;
    }
    return arena_get(arena, rounded);
}

char *arena_strdup(struct arena *arena, const char *text)
{
    return arena_strndup(arena, text, strlen(text));
}

char *arena_strndup(struct arena *arena, const char *text, size_t bytes)
{
    assert(bytes < SIZE_MAX);
    char *copy = arena_alloc(arena, bytes + 1);
    if (bytes > 0) {
        memcpy(copy, text, bytes);
    }
    return copy;
}

size_t arena_bytes(const struct arena *arena)
{
    return arena->bytes;
}
