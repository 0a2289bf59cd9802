#ifndef BATON_BASE_MEM_H
#define BATON_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/*
 * Host memory in two policies that the name shows. mem_alloc and its kin are for small things
 * whose size we chose: they abort when memory is out. mem_try_* are for anything whose size comes
 * from a request, file or peer: they return NULL, and the caller answers STATUS_EXHAUSTED. All of
 * it is released by mem_free (or free). Any thread.
 */

/* bytes uninitialised bytes, never NULL (one byte when bytes is 0). */
void *mem_alloc(size_t bytes) __attribute__((malloc, returns_nonnull)) must_check;

/* The same, zeroed. */
void *mem_zalloc(size_t bytes) __attribute__((malloc, returns_nonnull)) must_check;

/* n zeroed elements of size bytes each; aborts also when the product overflows. */
void *mem_array(size_t n, size_t size) __attribute__((malloc, returns_nonnull)) must_check;

/* Grows or shrinks p (may be NULL); what is added is uninitialised. */
void *mem_realloc(void *p, size_t bytes) __attribute__((returns_nonnull)) must_check;

/* Like mem_realloc for n elements of size bytes; aborts also when the product overflows. */
void *mem_realloc_array(void *p, size_t n, size_t size) __attribute__((returns_nonnull)) must_check;

/* A copy of text, or of the first bytes bytes at text, terminated by NUL. */
char *mem_strdup(const char *text) __attribute__((malloc, returns_nonnull)) must_check;
char *mem_strndup(const char *text, size_t bytes)
    __attribute__((malloc, returns_nonnull)) must_check;

/* Copy of bytes bytes. */
void *mem_dup(const void *p, size_t bytes) __attribute__((malloc, returns_nonnull)) must_check;

/* A formatted string. */
char *mem_printf(const char *format, ...) PRINTF_LIKE(1, 2)
    __attribute__((malloc, returns_nonnull)) must_check;

/* Uninitialised (mem_try_alloc) or zeroed (mem_try_array) memory, or NULL. */
void *mem_try_alloc(size_t bytes) __attribute__((malloc)) must_check;
void *mem_try_array(size_t n, size_t size) __attribute__((malloc)) must_check;

/* bytes uninitialised bytes at a multiple of alignment (a power of two); NULL when out. */
void *mem_try_aligned(size_t alignment, size_t bytes) __attribute__((malloc)) must_check;

/* Releases p; NULL is allowed. */
void mem_free(void *p);

/* *ret = a * b, or a + b; false, and *ret unchanged, when that overflows. */
static inline bool must_check size_mul(size_t a, size_t b, size_t *ret)
{
    size_t value;
    if (__builtin_mul_overflow(a, b, &value)) {
        return false;
    }
    *ret = value;
    return true;
}

static inline bool must_check size_add(size_t a, size_t b, size_t *ret)
{
    size_t value;
    if (__builtin_add_overflow(a, b, &value)) {
        return false;
    }
    *ret = value;
    return true;
}

/*
 * An arena: many allocations with one end, such as all that a request owns. Owned by whoever
 * created it; one thread at a time. Memory is aligned to 16 bytes.
 */
struct arena;

/* limit_bytes bounds the sum of what arena_try_alloc hands out; 0 is no bound. */
struct arena *arena_create(size_t limit_bytes) __attribute__((returns_nonnull)) must_check;

/* Releases every allocation of the arena and the arena; NULL is allowed. */
void arena_free(struct arena *arena);

/* Releases every allocation and keeps the arena for use again. */
void arena_reset(struct arena *arena);

/* Zeroed memory that lives as long as the arena; aborts when memory is out. Ignores the limit. */
void *arena_alloc(struct arena *arena, size_t bytes) __attribute__((returns_nonnull)) must_check;

/* The same for a size that a request chose: NULL over the limit or when memory is out. */
void *arena_try_alloc(struct arena *arena, size_t bytes) must_check;

/* Terminated copies in the arena. */
char *arena_strdup(struct arena *arena, const char *text)
    __attribute__((returns_nonnull)) must_check;
char *arena_strndup(struct arena *arena, const char *text, size_t bytes)
    __attribute__((returns_nonnull)) must_check;

/* Sum of the bytes handed out, rounded as they were. */
size_t arena_bytes(const struct arena *arena);

#endif
