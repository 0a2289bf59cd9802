/*
 * Logprobs in the two shapes that OpenAI has: a list of objects for chat, four lists side by side
 * for completions. They are rendered token by token, because a long answer with 20 alternatives a
 * token is mostly these, and a stream must not build it twice.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "router/api_render.h"
#include "router/api_render_parts.h"

/* What OpenAI gives for a token that is all but impossible; JSON has no -inf. */
static const float LOGPROB_FLOOR = -9999.0f;

void api_logprobs_init(struct api_logprobs *logprobs, bool is_chat, uint64_t text_offset)
{
    *logprobs = (struct api_logprobs){.is_chat = is_chat, .text_offset = text_offset};
}

void api_logprobs_fini(struct api_logprobs *logprobs)
{
    buf_fini(&logprobs->a);
    buf_fini(&logprobs->tokens);
    buf_fini(&logprobs->top);
    buf_fini(&logprobs->offsets);
}

static void put_comma(const struct api_logprobs *logprobs, struct buf *out)
{
    if (logprobs->n > 0) {
        buf_append_byte(out, ',');
    }
}

static void put_logprob(struct json_writer *w, float logprob)
{
    json_put_float(w, isfinite(logprob) ? logprob : LOGPROB_FLOOR);
}

static const char *token_text(const struct tokenizer *tokenizer, uint32_t id, size_t *ret_bytes)
{
    const char *text = tokenizer_token(tokenizer, id, ret_bytes);
    if (text == NULL) {
        *ret_bytes = 0;
        return "";
    }
    return text;
}

/* ----------------------------------------------------------------------------------------- chat */

static void put_chat_members(struct json_writer *w, const struct tokenizer *tokenizer,
                             const struct api_logprob *token)
{
    size_t bytes;
    const char *text = token_text(tokenizer, token->id, &bytes);
    json_key(w, "token");
    json_put_string_n(w, text, bytes);
    json_key(w, "logprob");
    put_logprob(w, token->logprob);
    json_key(w, "bytes");
    json_begin_array(w);
    for (size_t i = 0; i < bytes; i++) {
        json_put_uint(w, (unsigned char)text[i]);
    }
    json_end_array(w);
}

static void add_chat(struct api_logprobs *logprobs, const struct tokenizer *tokenizer,
                     const struct api_logprob *token, const struct api_logprob *top, size_t n_top)
{
    struct json_writer w;
    put_comma(logprobs, &logprobs->a);
    json_writer_init(&w, &logprobs->a);
    json_begin_object(&w);
    put_chat_members(&w, tokenizer, token);
    json_key(&w, "top_logprobs");
    json_begin_array(&w);
    for (size_t i = 0; i < n_top; i++) {
        json_begin_object(&w);
        put_chat_members(&w, tokenizer, &top[i]);
        json_end_object(&w);
    }
    json_end_array(&w);
    json_end_object(&w);
}

/* ---------------------------------------------------------------------------------- completions */

/* Whether text is whole UTF-8: the writer would have nothing to replace. */
static bool is_utf8(const char *text, size_t bytes)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + bytes;
    while (p < end) {
        unsigned n = *p < 0x80 ? 0 : *p >= 0xc2 && *p <= 0xdf ? 1 : (*p & 0xf0) == 0xe0 ? 2 : 3;
        if ((n == 3 && (*p < 0xf0 || *p > 0xf4)) || (size_t)(end - p) <= n) {
            return false;
        }
        for (unsigned i = 1; i <= n; i++) {
            if ((p[i] & 0xc0) != 0x80) {
                return false;
            }
        }
        /* too long a form, a surrogate, or above U+10FFFF */
        if ((*p == 0xe0 && p[1] < 0xa0) || (*p == 0xed && p[1] > 0x9f) ||
            (*p == 0xf0 && p[1] < 0x90) || (*p == 0xf4 && p[1] > 0x8f)) {
            return false;
        }
        p += n + 1;
    }
    return true;
}

/* A token as legacy completions name it: its text, or its bytes in hex after `bytes:`. */
static void name_token(const struct tokenizer *tokenizer, uint32_t id, struct buf *out)
{
    size_t bytes;
    const char *text = token_text(tokenizer, id, &bytes);
    if (is_utf8(text, bytes)) {
        buf_append(out, text, bytes);
        return;
    }
    buf_append_text(out, "bytes:");
    for (size_t i = 0; i < bytes; i++) {
        buf_printf(out, "\\x%02x", (unsigned char)text[i]);
    }
}

static bool names_equal(const struct buf *names, const size_t *ends, size_t i, const char *name,
                        size_t bytes)
{
    size_t begin = i > 0 ? ends[i - 1] : 0;
    return ends[i] - begin == bytes &&
           (bytes == 0 || memcmp(names->data + begin, name, bytes) == 0);
}

/*
 * The map of alternatives. Two ids may have one text (an added token and a plain one), and a key
 * may not come twice: the first, which is the better, stays. The token itself is put last if it is
 * not among the best.
 */
static void put_top_map(struct json_writer *w, const struct tokenizer *tokenizer,
                        const struct api_logprob *token, const struct api_logprob *top,
                        size_t n_top)
{
    struct buf names = BUF_INIT;
    size_t ends[API_MAX_TOP_LOGPROBS + 1], n = 0;
    json_begin_object(w);
    for (size_t i = 0; i <= n_top; i++) {
        const struct api_logprob *next = i < n_top ? &top[i] : token;
        size_t begin = names.bytes;
        bool seen = false;
        name_token(tokenizer, next->id, &names);
        const char *name = names.data != NULL ? (const char *)names.data + begin : "";
        for (size_t j = 0; j < n && !seen; j++) {
            seen = names_equal(&names, ends, j, name, names.bytes - begin);
        }
        if (seen) {
            names.bytes = begin;
            continue;
        }
        ends[n++] = names.bytes;
        json_key_n(w, name, names.bytes - begin);
        put_logprob(w, next->logprob);
    }
    json_end_object(w);
    buf_fini(&names);
}

static uint64_t count_characters(const char *text, size_t bytes)
{
    uint64_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        n += ((unsigned char)text[i] & 0xc0) != 0x80;
    }
    return n;
}

static void add_completion(struct api_logprobs *logprobs, const struct tokenizer *tokenizer,
                           const struct api_logprob *token, const struct api_logprob *top,
                           size_t n_top)
{
    struct json_writer w;
    struct buf name = BUF_INIT;
    size_t bytes;
    const char *text = token_text(tokenizer, token->id, &bytes);

    put_comma(logprobs, &logprobs->tokens);
    name_token(tokenizer, token->id, &name);
    json_writer_init(&w, &logprobs->tokens);
    json_put_string_n(&w, name.data != NULL ? (const char *)name.data : "", name.bytes);
    buf_fini(&name);

    put_comma(logprobs, &logprobs->a);
    json_writer_init(&w, &logprobs->a);
    put_logprob(&w, token->logprob);

    put_comma(logprobs, &logprobs->top);
    json_writer_init(&w, &logprobs->top);
    put_top_map(&w, tokenizer, token, top, n_top);

    put_comma(logprobs, &logprobs->offsets);
    json_writer_init(&w, &logprobs->offsets);
    json_put_uint(&w, logprobs->text_offset);
    logprobs->text_offset += count_characters(text, bytes);
}

/* ------------------------------------------------------------------------------------- together */

void api_logprobs_add(struct api_logprobs *logprobs, const struct tokenizer *tokenizer,
                      const struct api_logprob *token, const struct api_logprob *top, size_t n_top)
{
    n_top = n_top < API_MAX_TOP_LOGPROBS ? n_top : API_MAX_TOP_LOGPROBS;
    if (logprobs->is_chat) {
        add_chat(logprobs, tokenizer, token, top, n_top);
    } else {
        add_completion(logprobs, tokenizer, token, top, n_top);
    }
    logprobs->n++;
}

static void put_list(struct buf *out, const char *before, const struct buf *items)
{
    buf_append_text(out, before);
    buf_append(out, items->data, items->bytes);
}

void api_logprobs_put(struct api_logprobs *logprobs, struct buf *out)
{
    if (logprobs == NULL) {
        buf_append_text(out, "null");
        return;
    }
    if (logprobs->is_chat) {
        put_list(out, "{\"content\":[", &logprobs->a);
        buf_append_text(out, "],\"refusal\":null}");
    } else {
        put_list(out, "{\"tokens\":[", &logprobs->tokens);
        put_list(out, "],\"token_logprobs\":[", &logprobs->a);
        put_list(out, "],\"top_logprobs\":[", &logprobs->top);
        put_list(out, "],\"text_offset\":[", &logprobs->offsets);
        buf_append_text(out, "]}");
    }
    logprobs->n = 0;
    buf_clear(&logprobs->a);
    buf_clear(&logprobs->tokens);
    buf_clear(&logprobs->top);
    buf_clear(&logprobs->offsets);
}

void api_logprobs_put_piece(struct api_logprobs *logprobs, struct buf *out)
{
    api_logprobs_put(logprobs != NULL && logprobs->n > 0 ? logprobs : NULL, out);
}
