#ifndef BATON_MODEL_TOKENIZER_H
#define BATON_MODEL_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * Text to token ids and back, as a model folder's tokenizer.json says. The one kind of tokenizer
 * that is implemented is byte-level BPE behind the three splits of the DeepSeek family; a file that
 * asks for anything else is refused by name. Ids equal those of the reference library on every
 * text.
 *
 * A tokenizer never changes after it was opened: any number of threads may use one at once.
 */
struct tokenizer;

enum {
    TOKENIZER_MAX_VOCAB = 1 << 21,       /* ids of a file, added tokens included */
    TOKENIZER_MAX_TOKEN_BYTES = 4096,    /* of one token's text */
    TOKENIZER_MAX_FILE_BYTES = 64 << 20, /* of tokenizer.json */
    TOKENIZER_DIGEST_BYTES = 16,
};

/*
 * Reads a tokenizer.json, or the one in the folder at path. STATUS_NOT_FOUND, STATUS_SYSTEM,
 * STATUS_CORRUPT (not such a file, or one that contradicts itself) or STATUS_UNSUPPORTED (asks for
 * what is not implemented; the text names it). The caller ends it with tokenizer_close.
 */
enum status tokenizer_open(const char *path, struct tokenizer **ret, struct error *err) must_check;

/* The same from the bytes of such a file, which are not needed afterwards. */
enum status tokenizer_parse(const void *json, size_t bytes, struct tokenizer **ret,
                            struct error *err) must_check;

/* NULL is allowed. */
void tokenizer_close(struct tokenizer *tokenizer);

/* Valid ids are those below this number. */
uint32_t tokenizer_n_vocab(const struct tokenizer *tokenizer);

/*
 * A hash of what the tokenizer does (tokens, merges, flags), not of how its file is laid out: two
 * files with one digest encode and decode alike.
 */
void tokenizer_digest(const struct tokenizer *tokenizer, uint8_t ret[TOKENIZER_DIGEST_BYTES]);

/* A growable list of ids. Owned by whoever holds the struct. */
struct token_ids {
    uint32_t *id;
    size_t n, capacity;
};

#define TOKEN_IDS_INIT \
    {                  \
        NULL, 0, 0     \
    }

void token_ids_fini(struct token_ids *ids);

/* Appends n ids; STATUS_EXHAUSTED when memory is out. */
enum status token_ids_append(struct token_ids *ids, const uint32_t *id, size_t n) must_check;

/* Bytes of the text, from begin on and before end. */
struct tokenizer_span {
    size_t begin, end;
};

/*
 * Appends the ids of the text to ids. Added tokens (such as the turn marks of the prompt) that
 * stand in the text become their ids, as the reference library does it, except where they touch
 * one of the n_plain spans (ascending, not overlapping): there they are text like any other. One
 * span over the whole text thus switches them off. Neither BOS nor EOS is added.
 *
 * Any bytes are taken; those that are no UTF-8 become byte tokens, so that decoding gives the
 * text back. Takes O(n log n). STATUS_TOO_LARGE when more than max_ids would be appended,
 * STATUS_EXHAUSTED when memory is out; ids is then as it was.
 */
enum status tokenizer_encode(const struct tokenizer *tokenizer, const void *text, size_t bytes,
                             const struct tokenizer_span *plain, size_t n_plain, size_t max_ids,
                             struct token_ids *ids, struct error *err) must_check;

/* The bytes that id stands for (may be part of a character); NULL for an id without a token. */
const char *tokenizer_token(const struct tokenizer *tokenizer, uint32_t id,
                            size_t *ret_bytes) must_check;

/* Whether id is an added token, and whether the file flags it as special (not part of a text). */
bool tokenizer_is_added(const struct tokenizer *tokenizer, uint32_t id) must_check;
bool tokenizer_is_special(const struct tokenizer *tokenizer, uint32_t id) must_check;

/* The id of the added token with exactly this text. STATUS_NOT_FOUND. */
enum status tokenizer_find_added(const struct tokenizer *tokenizer, const char *text,
                                 uint32_t *ret_id) must_check;

/*
 * Appends the bytes of n ids to out: the exact inverse of tokenizer_encode, hence perhaps not
 * UTF-8. Ids without a token add nothing; special ones do only with with_special.
 */
void tokenizer_decode(const struct tokenizer *tokenizer, const uint32_t *ids, size_t n,
                      bool with_special, struct buf *out);

/*
 * Decoding as tokens come, in whole characters: the bytes of an unfinished character are held back
 * until they are complete, and bytes that can't become one are given out as U+FFFD (one for each
 * longest start of a character, as browsers and Python do). The sum of what is given out depends
 * on the ids alone. In the caller's memory; needs no release.
 */
struct tokenizer_stream {
    uint8_t held[4];
    uint8_t n_held;
    bool with_special;
};

void tokenizer_stream_init(struct tokenizer_stream *stream, bool with_special);

/* Appends what id makes certain to out. An id that is left out leaves the held bytes alone. */
void tokenizer_stream_push(struct tokenizer_stream *stream, const struct tokenizer *tokenizer,
                           uint32_t id, struct buf *out);

/* The same for bytes. */
void tokenizer_stream_push_bytes(struct tokenizer_stream *stream, const void *bytes, size_t n,
                                 struct buf *out);

/* The end: held bytes come out as U+FFFD. The stream may be used again. */
void tokenizer_stream_finish(struct tokenizer_stream *stream, struct buf *out);

#endif
