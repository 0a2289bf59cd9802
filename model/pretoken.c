/*
 * The three splits as one hand-written scanner. A regex engine was the other choice; its classes
 * are those of the Unicode version it was built with (14.0 in PCRE2 10.42, and 16.0 is asked for),
 * it costs several times the time, and a long run can exhaust its stack or its match limit. Here
 * every run is walked once, so time is linear whatever the text.
 *
 * What makes one pass possible: the first split cuts out numbers and the second cuts out
 * ideographs and kana, so for the third a text ends where either begins. "End" below thus means
 * the end of the text or a character of those two kinds; in particular `\s+(?!\S)` takes all the
 * space before a number, but leaves one before a word.
 */
#include "model/pretoken.h"

#include <stdbool.h>

#include "base/utf8.h"
#include "model/unicode_tables.h"

const char *const pretoken_patterns[PRETOKEN_N_PATTERNS] = {
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+"
    "|\\s+(?!\\S)"
    "|\\s+",
};

enum class {
    CLASS_OTHER = '.', /* no expression of the third split starts with it */
    CLASS_WORD = 'L',  /* letters */
    CLASS_MARK = 'M',
    CLASS_NUMBER = 'N',
    CLASS_PUNCT = 'P', /* symbols too */
    CLASS_SPACE = 'W',
    CLASS_NEWLINE = 'R', /* CR and LF, which are space too */
    CLASS_KANA = 'K',    /* the second split's: ideographs and kana, assigned or not */
};

struct scan {
    const uint8_t *text;
    size_t bytes;
};

struct character {
    enum class class;
    uint32_t code;
    unsigned bytes; /* 0: the end of the text */
};

static enum class class_of(uint32_t code) { if (code == '\r' || code == '\n'){return CLASS_NEWLINE;}
if ((code >= 0x4e00 && code <= 0x9fa5) || (code >= 0x3040 && code <= 0x30ff))
{
    return CLASS_KANA;
}
if (code >= UNICODE_N_CODES) {
    return CLASS_OTHER;
}
unsigned block = unicode_group[unicode_top[code >> 12]][code >> 6 & 63];
return (enum class)unicode_block[block][code & 63];
}

static struct character character_at(const struct scan *scan, size_t at)
{
    struct character c = {CLASS_OTHER, 0, 0};
    if (at >= scan->bytes) {
        return c;
    }
    c.code = scan->text[at];
    c.bytes = 1;
    if (c.code >= 0x80) {
        size_t n = utf8_next(scan->text + at, scan->bytes - at, &c.code);
        if (n == 0) {
            c.code = 0x110000; /* a stray byte */
            return c;
        }
        c.bytes = (unsigned)n;
    }
    c.class = class_of(c.code);
    return c;
}

static bool is_letter_or_mark(struct character c)
{
    return c.class == CLASS_WORD || c.class == CLASS_MARK;
}

static bool is_ascii_letter(uint8_t byte)
{
    return (uint8_t)((byte | 0x20) - 'a') < 26;
}

/* The end of the text as the third split sees it. */
static bool is_end(struct character c)
{
    return c.bytes == 0 || c.class == CLASS_NUMBER || c.class == CLASS_KANA;
}

/* [\p{L}\p{M}]* */
static size_t skip_word(const struct scan *scan, size_t at)
{
    for (;;) {
        while (at < scan->bytes && is_ascii_letter(scan->text[at])) {
            at++;
        }
        struct character c = character_at(scan, at);
        if (!is_letter_or_mark(c)) {
            return at;
        }
        at += c.bytes;
    }
}

/* \p{N}{1,3}, at a number */
static size_t skip_number(const struct scan *scan, size_t at)
{
    struct character c = character_at(scan, at);
    for (unsigned n = 0; n < 3 && c.class == CLASS_NUMBER; n++) {
        at += c.bytes;
        c = character_at(scan, at);
    }
    return at;
}

static size_t skip_kana(const struct scan *scan, size_t at)
{
    struct character c = character_at(scan, at);
    while (c.class == CLASS_KANA) {
        at += c.bytes;
        c = character_at(scan, at);
    }
    return at;
}

/* [\p{P}\p{S}]+[\r\n]*, at a punctuation character */
static size_t skip_punct(const struct scan *scan, size_t at)
{
    struct character c = character_at(scan, at);
    while (c.class == CLASS_PUNCT) {
        at += c.bytes;
        c = character_at(scan, at);
    }
    while (at < scan->bytes && (scan->text[at] == '\r' || scan->text[at] == '\n')) {
        at++;
    }
    return at;
}

/* \s*[\r\n]+|\s+(?!\S)|\s+, at a space that starts neither a word nor punctuation */
static size_t skip_space(const struct scan *scan, size_t at)
{
    size_t start = at, after_newline = at, last = at;
    struct character c = character_at(scan, at);
    while (c.class == CLASS_SPACE || c.class == CLASS_NEWLINE) {
        last = at;
        at += c.bytes;
        if (c.class == CLASS_NEWLINE) {
            after_newline = at;
        }
        c = character_at(scan, at);
    }
    if (after_newline > start) {
        return after_newline;
    }
    return is_end(c) || last == start ? at : last;
}

/*
 * Characters that no expression starts with, up to one that does: what lies between two matches
 * stays one piece. Such a character starts a match only where a letter or mark follows.
 */
static size_t skip_other(const struct scan *scan, size_t at)
{
    struct character c = character_at(scan, at);
    for (;;) {
        size_t next_at = at + c.bytes;
        struct character next = character_at(scan, next_at);
        if (is_letter_or_mark(next)) {
            return at;
        }
        at = next_at;
        if (next.bytes == 0 || next.class != CLASS_OTHER) {
            return at;
        }
        c = next;
    }
}

size_t pretoken_next(const void *text, size_t bytes, size_t from)
{
    const struct scan scan = {text, bytes};
    struct character c = character_at(&scan, from), next;
    if (c.bytes == 0) {
        return 0;
    }
    size_t after = from + c.bytes;
    switch (c.class) {
    case CLASS_WORD:
    case CLASS_MARK:
        return skip_word(&scan, after) - from;
    case CLASS_NUMBER:
        return skip_number(&scan, from) - from;
    case CLASS_KANA:
        return skip_kana(&scan, from) - from;
    case CLASS_PUNCT:
        if (c.code < 0x80 && after < bytes && is_ascii_letter(scan.text[after])) {
            while (after < bytes && is_ascii_letter(scan.text[after])) {
                after++;
            }
            return after - from;
        }
        return skip_punct(&scan, from) - from;
    case CLASS_NEWLINE:
        return skip_space(&scan, from) - from;
    case CLASS_SPACE:
        next = character_at(&scan, after);
        if (is_letter_or_mark(next)) {
            return skip_word(&scan, after) - from;
        }
        if (c.code == ' ' && next.class == CLASS_PUNCT) {
            return skip_punct(&scan, after) - from;
        }
        return skip_space(&scan, from) - from;
    case CLASS_OTHER:
        break;
    }
    next = character_at(&scan, after);
    if (is_letter_or_mark(next)) {
        return skip_word(&scan, after) - from;
    }
    return skip_other(&scan, from) - from;
}
