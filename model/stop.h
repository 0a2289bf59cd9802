#ifndef BATON_MODEL_STOP_H
#define BATON_MODEL_STOP_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * Stop strings, found in text as it comes, however the text is cut. Text that may be the start of
 * one is held back and given out when it turns out not to be. The match that ends first wins; of
 * several that end together the one that starts first (the longest).
 */
enum { STOP_MAX_STRINGS = 16, STOP_MAX_BYTES = 1024 };

/* Owned by its creator; one thread at a time. */
struct stop;

/* n strings of 1..STOP_MAX_BYTES bytes, copied. STATUS_INVALID otherwise, or for more than
 * STOP_MAX_STRINGS; 0 strings never match. */
enum status stop_create(const char *const *strings, const size_t *bytes, size_t n,
                        struct stop **ret, struct error *err) must_check;
void stop_free(struct stop *stop);

/* Takes text and appends what is safe to show to out. True: a stop string was found; the text
 * before it has been given out, the rest is dropped, and so is all text from now on. */
bool stop_push(struct stop *stop, const char *text, size_t bytes, struct buf *out);

/* The text ends: what is held back is appended to out, unless a stop string was found. */
void stop_finish(struct stop *stop, struct buf *out);

/* Whether one was found. */
bool stop_found(const struct stop *stop) must_check;

#endif
