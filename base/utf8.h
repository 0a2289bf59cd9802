#ifndef BATON_BASE_UTF8_H
#define BATON_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Bytes of the UTF-8 character that starts at text, of which bytes bytes may be read: 1 to 4, or 0
 * when there is none (overlong, surrogate, beyond U+10FFFF, cut short or bytes is 0). ret_code may
 * be NULL.
 */
static inline size_t utf8_next(const void *text, size_t bytes, uint32_t *ret_code)
{
    const uint8_t *p = (const uint8_t *)text;
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (bytes == 0) {
        return 0;
    }
    size_t n = p[0] < 0x80 ? 1 : p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (n == 0 || p[0] > 0xf4 || n > bytes) {
        return 0;
    }
    uint32_t code = n == 1 ? p[0] : p[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
        code = code << 6 | (p[i] & 0x3f);
    }
    if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
        return 0;
    }
    if (ret_code != NULL) {
        *ret_code = code;
    }
    return n;
}

/* Whether all of it is UTF-8. */
static inline bool utf8_valid(const void *text, size_t bytes)
{
    const uint8_t *p = (const uint8_t *)text;
    while (bytes > 0) {
        size_t n = utf8_next(p, bytes, NULL);
        if (n == 0) {
            return false;
        }
        p += n;
        bytes -= n;
    }
    return true;
}

#endif
