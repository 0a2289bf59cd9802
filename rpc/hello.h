#ifndef BATON_RPC_HELLO_H
#define BATON_RPC_HELLO_H

#include "base/status.h"
#include "proto/hello.pb-c.h"

/*
 * The first message of every link. Any thread.
 */

/* Bump with any change that an older build would misread. */
enum { HELLO_PROTOCOL = 2 };

enum {
    HELLO_NODE_ID_MAX = 64,
    HELLO_FINGERPRINT_MAX = 64,
    HELLO_TEXT_MAX = 256, /* model, version, build, host */
};

/*
 * May the two talk? mine is trusted, theirs as it came. STATUS_PEER_REFUSED with both sides' values
 * in err when protocol or fingerprint differ (a fingerprint that is empty on either side is not
 * compared: routers hold no pages), or when both have the same node_id and incarnation;
 * STATUS_CORRUPT when theirs breaks the rules of its fields (node_id, role, lengths, ports).
 */
enum status must_check hello_check(const Baton__Hello *mine, const Baton__Hello *theirs,
                                   struct error *err);

/* Bytes of a fingerprint as hexadecimal text, at most 2 * HELLO_FINGERPRINT_MAX characters. */
void hello_fingerprint_text(const uint8_t *bytes, size_t n,
                            char ret_text[2 * HELLO_FINGERPRINT_MAX + 1]);

/* A random incarnation, never 0. STATUS_SYSTEM when the kernel gives no random bytes. */
enum status must_check hello_incarnation_draw(uint64_t *ret_incarnation, struct error *err);

/* Boot id of this host as 16 bytes; returns 16, or 0 when it is not known. */
size_t hello_host_boot_id(uint8_t ret_id[16]);

#endif
