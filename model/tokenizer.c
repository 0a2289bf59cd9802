/*
 * Encoding and decoding. A text is cut three times: at the added tokens of each of two passes (the
 * reference's order, which matters where tokens of the two overlap), then into pieces
 * (pretoken.c). Most pieces are words that are one token; whether a token's bytes encode to itself
 * was found out once, when the file was read, so such a piece costs one look-up and needs no cache
 * that threads would have to share.
 */
#include "model/tokenizer.h"

#include <assert.h>
#include <string.h>

#include <xxhash.h>

#include "base/mem.h"
#include "model/pretoken.h"
#include "model/tokenizer_table.h"

/* ------------------------------------------------------------------------------- lists of ids */

void token_ids_fini(struct token_ids *ids)
{
    mem_free(ids->id);
    *ids = (struct token_ids)TOKEN_IDS_INIT;
}

enum status token_ids_append(struct token_ids *ids, const uint32_t *id, size_t n)
{
    if (n > ids->capacity - ids->n) {
        size_t capacity = ids->capacity < 64 ? 64 : ids->capacity;
        while (capacity - ids->n < n) {
            if (capacity > SIZE_MAX / 16) {
                return STATUS_EXHAUSTED;
            }
            capacity *= 2;
        }
        uint32_t *grown = mem_try_alloc(capacity * sizeof(*grown));
        if (grown == NULL) {
            return STATUS_EXHAUSTED;
        }
        if (ids->n > 0) {
            memcpy(grown, ids->id, ids->n * sizeof(*grown));
        }
        mem_free(ids->id);
        ids->id = grown;
        ids->capacity = capacity;
    }
    for (size_t i = 0; i < n; i++) {
        ids->id[ids->n + i] = id[i];
    }
    ids->n += n;
    return STATUS_OK;
}

/* ---------------------------------------------------------------------------------- the table */

static const uint8_t *token_text(const struct tokenizer *t, uint32_t id, size_t *ret_bytes)
{
    *ret_bytes = t->offset[id + 1] - t->offset[id];
    return t->text + t->offset[id];
}

uint32_t tokenizer_table_slot(const struct tokenizer *t, const uint8_t *bytes, size_t n)
{
    uint32_t i = (uint32_t)XXH3_64bits(bytes, n) & (t->n_slots - 1);
    while (t->slot[i] != BPE_NONE) {
        size_t token_bytes;
        const uint8_t *text = token_text(t, t->slot[i], &token_bytes);
        if (token_bytes == n && memcmp(text, bytes, n) == 0) {
            break;
        }
        i = (i + 1) & (t->n_slots - 1);
    }
    return i;
}

uint32_t tokenizer_table_find(const struct tokenizer *t, const uint8_t *bytes, size_t n)
{
    return n > t->longest_bytes ? BPE_NONE : t->slot[tokenizer_table_slot(t, bytes, n)];
}

uint32_t tokenizer_n_vocab(const struct tokenizer *t)
{
    return t->n_vocab;
}

void tokenizer_digest(const struct tokenizer *t, uint8_t ret[TOKENIZER_DIGEST_BYTES])
{
    memcpy(ret, t->digest, TOKENIZER_DIGEST_BYTES);
}

const char *tokenizer_token(const struct tokenizer *t, uint32_t id, size_t *ret_bytes)
{
    if (id >= t->n_vocab) {
        return NULL;
    }
    return (const char *)token_text(t, id, ret_bytes);
}

bool tokenizer_is_added(const struct tokenizer *t, uint32_t id)
{
    return id < t->n_vocab && (t->flags[id] & TOKEN_ADDED) != 0;
}

bool tokenizer_is_special(const struct tokenizer *t, uint32_t id)
{
    return id < t->n_vocab && (t->flags[id] & TOKEN_SPECIAL) != 0;
}

/* ------------------------------------------------------------------------------ added tokens */

/* Length of the longest token of the tree that text starts with, or 0. */
static size_t longest_added(const struct added_tree *tree, const uint8_t *text, size_t bytes,
                            uint32_t *ret_id)
{
    size_t longest = 0;
    uint32_t at = 0;
    for (size_t i = 0; i < bytes; i++) {
        uint32_t child = tree->node[at].child;
        while (child != 0 && tree->node[child].byte != text[i]) {
            child = tree->node[child].sibling;
        }
        if (child == 0) {
            break;
        }
        at = child;
        if (tree->node[at].id != BPE_NONE) {
            longest = i + 1;
            *ret_id = tree->node[at].id;
        }
    }
    return longest;
}

enum status tokenizer_find_added(const struct tokenizer *t, const char *text, uint32_t *ret_id)
{
    size_t bytes = strlen(text);
    for (unsigned pass = 0; pass < N_ADDED_PASSES; pass++) {
        uint32_t id = BPE_NONE;
        if (bytes > 0 && t->added[pass].n_nodes > 0 &&
            longest_added(&t->added[pass], (const uint8_t *)text, bytes, &id) == bytes) {
            *ret_id = id;
            return STATUS_OK;
        }
    }
    return STATUS_NOT_FOUND;
}

/* ----------------------------------------------------------------------------------- encoding */

/* One call of tokenizer_encode. */
struct encode {
    const struct tokenizer *t;
    const uint8_t *text;
    const struct tokenizer_span *plain;
    size_t n_plain;
    size_t plain_i[N_ADDED_PASSES]; /* first span that doesn't end before where the pass is */
    size_t max_n;                   /* ids->n may become this */
    struct token_ids *ids;
};

/* The first added token of the pass in [from, end); false when there is none. */
static bool find_added(struct encode *e, unsigned pass, size_t from, size_t end, size_t *ret_begin,
                       size_t *ret_end, uint32_t *ret_id)
{
    const struct added_tree *tree = &e->t->added[pass];
    size_t *span_i = &e->plain_i[pass];
    while (from < end) {
        while (*span_i < e->n_plain && (e->plain[*span_i].end <= from ||
                                        e->plain[*span_i].begin == e->plain[*span_i].end)) {
            (*span_i)++;
        }
        size_t limit = end;
        if (*span_i < e->n_plain) {
            if (e->plain[*span_i].begin <= from) {
                from = e->plain[*span_i].end;
                continue;
            }
            limit = e->plain[*span_i].begin < end ? e->plain[*span_i].begin : end;
        }
        for (; from < limit; from++) {
            if (!tree->starts[e->text[from]]) {
                continue;
            }
            size_t bytes = longest_added(tree, e->text + from, limit - from, ret_id);
            if (bytes > 0) {
                *ret_begin = from;
                *ret_end = from + bytes;
                return true;
            }
        }
    }
    return false;
}

static enum status append(struct encode *e, const uint32_t *id)
{
    return e->ids->n < e->max_n ? token_ids_append(e->ids, id, 1) : STATUS_TOO_LARGE;
}

static enum status encode_plain(struct encode *e, size_t from, size_t end)
{
    while (from < end) {
        /* the pieces of [from, end) alone: what lies beyond must not be seen */
        size_t bytes = pretoken_next(e->text, end, from);
        const uint8_t *piece = e->text + from;
        uint32_t id = tokenizer_table_find(e->t, piece, bytes);
        enum status status;
        if (id != BPE_NONE && (e->t->flags[id] & TOKEN_WHOLE) != 0) {
            status = append(e, &id);
        } else {
            status = bpe_encode(&e->t->bpe, piece, bytes, e->ids);
            if (status == STATUS_OK && e->ids->n > e->max_n) {
                status = STATUS_TOO_LARGE;
            }
        }
        if (status != STATUS_OK) {
            return status;
        }
        from += bytes;
    }
    return STATUS_OK;
}

static enum status encode_pass(struct encode *e, unsigned pass, size_t from, size_t end)
{
    if (pass == N_ADDED_PASSES) {
        return encode_plain(e, from, end);
    }
    size_t begin, after;
    uint32_t id;
    while (find_added(e, pass, from, end, &begin, &after, &id)) {
        enum status status = encode_pass(e, pass + 1, from, begin);
        if (status == STATUS_OK) {
            status = append(e, &id);
        }
        if (status != STATUS_OK) {
            return status;
        }
        from = after;
    }
    return encode_pass(e, pass + 1, from, end);
}

enum status tokenizer_encode(const struct tokenizer *t, const void *text, size_t bytes,
                             const struct tokenizer_span *plain, size_t n_plain, size_t max_ids,
                             struct token_ids *ids, struct error *err)
{
    size_t n_before = ids->n;
    struct encode e = {.t = t, .text = text, .plain = plain, .n_plain = n_plain, .ids = ids};
    e.max_n = max_ids < SIZE_MAX - n_before ? n_before + max_ids : SIZE_MAX;
    /* no token is longer, so this much text can't fit: seen before any work or memory is spent */
    enum status status = STATUS_TOO_LARGE;
    if (bytes / t->longest_bytes <= max_ids) {
        status = encode_pass(&e, 0, 0, bytes);
    }
    if (status == STATUS_OK) {
        return STATUS_OK;
    }
    ids->n = n_before;
    if (status == STATUS_TOO_LARGE) {
        return error_set(err, status, "the text has more than %zu tokens", max_ids);
    }
    return error_set(err, status, "no memory to encode %zu bytes", bytes);
}

/* ----------------------------------------------------------------------------------- decoding */

void tokenizer_decode(const struct tokenizer *t, const uint32_t *ids, size_t n, bool with_special,
                      struct buf *out)
{
    for (size_t i = 0; i < n; i++) {
        size_t bytes;
        const char *text = tokenizer_token(t, ids[i], &bytes);
        if (text != NULL && (with_special || !tokenizer_is_special(t, ids[i]))) {
            buf_append(out, text, bytes);
        }
    }
}

void tokenizer_stream_init(struct tokenizer_stream *stream, bool with_special)
{
    *stream = (struct tokenizer_stream){.with_special = with_special};
}

/* Bytes of the character that a first byte announces; 0 when none starts so. */
static unsigned announced_bytes(uint8_t first)
{
    if (first < 0x80) {
        return 1;
    }
    if (first < 0xc2 || first > 0xf4) {
        return 0;
    }
    return first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

/* Whether byte can follow what is held (not empty). */
static bool can_follow(const struct tokenizer_stream *stream, uint8_t byte)
{
    uint8_t least = 0x80, most = 0xbf;
    if (stream->n_held == 1) {
        switch (stream->held[0]) {
        case 0xe0:
            least = 0xa0; /* below: overlong */
            break;
        case 0xed:
            most = 0x9f; /* above: surrogates */
            break;
        case 0xf0:
            least = 0x90; /* below: overlong */
            break;
        case 0xf4:
            most = 0x8f; /* above: beyond U+10FFFF */
            break;
        default:
            break;
        }
    }
    return byte >= least && byte <= most;
}

static void put_replacement(struct buf *out)
{
    buf_append(out, "\xef\xbf\xbd", 3);
}

void tokenizer_stream_push_bytes(struct tokenizer_stream *stream, const void *bytes, size_t n,
                                 struct buf *out)
{
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++) {
        if (stream->n_held > 0 && !can_follow(stream, p[i])) {
            put_replacement(out);
            stream->n_held = 0;
        }
        if (stream->n_held == 0 && announced_bytes(p[i]) == 0) {
            put_replacement(out);
            continue;
        }
        stream->held[stream->n_held++] = p[i];
        if (stream->n_held == announced_bytes(stream->held[0])) {
            buf_append(out, stream->held, stream->n_held);
            stream->n_held = 0;
        }
    }
}

void tokenizer_stream_push(struct tokenizer_stream *stream, const struct tokenizer *t, uint32_t id,
                           struct buf *out)
{
    size_t bytes;
    const char *text = tokenizer_token(t, id, &bytes);
    if (text != NULL && (stream->with_special || !tokenizer_is_special(t, id))) {
        tokenizer_stream_push_bytes(stream, text, bytes, out);
    }
}

void tokenizer_stream_finish(struct tokenizer_stream *stream, struct buf *out)
{
    if (stream->n_held > 0) {
        put_replacement(out);
        stream->n_held = 0;
    }
}
