/*
 * See secret.h. The difference is volatile so that no compiler ends the loop early.
 */
#include "base/secret.h"

#include <string.h>

bool secret_equal(const char *secret, const void *sent, size_t sent_bytes)
{
    const unsigned char *theirs = sent;
    size_t bytes = strlen(secret);
    volatile size_t different = bytes ^ sent_bytes;
    for (size_t i = 0; i < bytes; i++) {
        /* Past their end our own last byte stands for theirs: the lengths differ already. */
        unsigned char c = i < sent_bytes ? theirs[i] : (unsigned char)secret[bytes - 1];
        different |= (size_t)(c ^ (unsigned char)secret[i]);
    }
    return different == 0;
}
