#ifndef BATON_MODEL_PRETOKEN_H
#define BATON_MODEL_PRETOKEN_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 * The regular expressions that split a text into the pieces which BPE works on, for the one
 * sequence of expressions that the DeepSeek family uses: numbers in groups of three; runs of
 * ideographs and kana; words, punctuation and white space. Each splits what the one before it left
 * whole. Classes are those of Unicode 16.0. Stateless; any thread.
 */

/* The expressions, in order, exactly as tokenizer.json must state them. */
enum { PRETOKEN_N_PATTERNS = 3 };
extern const char *const pretoken_patterns[PRETOKEN_N_PATTERNS];

/*
 * Length in bytes of the piece that starts at offset from of text, which must be 0 or the end of
 * the piece before it; 1 or more when from < bytes. A byte that is no UTF-8 counts as a character
 * without a class.
 */
size_t pretoken_next(const void *text, size_t bytes, size_t from) must_check;

#endif
