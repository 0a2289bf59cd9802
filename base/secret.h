#ifndef BATON_BASE_SECRET_H
#define BATON_BASE_SECRET_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/*
 * Whether what a stranger sent is the secret, compared as CRYPTO_memcmp does: every byte of the
 * secret is looked at wherever the first difference is, and nothing branches on a byte's value. The
 * time says the length of the secret and of what was sent, and no more. Never fails.
 */
bool secret_equal(const char *secret, const void *sent, size_t sent_bytes) must_check;

#endif
