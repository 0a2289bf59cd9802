#include "rpc/hello.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/buf.h"

/*
 * Who may talk to whom. Two processes that differ in protocol or in the layout of a page must never
 * exchange one, so the check comes before anything else and its text holds the values of both: the
 * person who reads it on one machine need not look at the other.
 */

enum { HEX_SHOWN = 8 }; /* bytes of a fingerprint in a text: enough to tell two apart */

void hello_fingerprint_text(const uint8_t *bytes, size_t n,
                            char ret_text[2 * HELLO_FINGERPRINT_MAX + 1])
{
    n = n < HELLO_FINGERPRINT_MAX ? n : HELLO_FINGERPRINT_MAX;
    for (size_t i = 0; i < n; i++) {
        snprintf(ret_text + 2 * i, 3, "%02x", bytes[i]);
    }
    ret_text[2 * n] = '\0';
}

static void shown(const ProtobufCBinaryData *bytes, char ret_text[2 * HELLO_FINGERPRINT_MAX + 1])
{
    hello_fingerprint_text(bytes->data, bytes->len < HEX_SHOWN ? bytes->len : HEX_SHOWN, ret_text);
}

static bool node_id_is_good(const char *id)
{
    size_t n = strnlen(id, HELLO_NODE_ID_MAX + 1);
    return n > 0 && n <= HELLO_NODE_ID_MAX &&
           strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == n;
}

static bool text_fits(const char *text)
{
    return strnlen(text, HELLO_TEXT_MAX + 1) <= HELLO_TEXT_MAX;
}

static bool address_is_good(const Baton__Address *address)
{
    return address == NULL || (text_fits(address->host) && address->port <= UINT16_MAX);
}

static enum status fields_check(const Baton__Hello *theirs, struct error *err)
{
    if (!node_id_is_good(theirs->node_id)) {
        return error_set(err, STATUS_CORRUPT,
                         "hello: a node_id is 1 to %d of letters, digits, '.', '_' and '-'",
                         HELLO_NODE_ID_MAX);
    }
    if (theirs->incarnation == 0 || theirs->role <= BATON__ROLE__ROLE_UNKNOWN ||
        theirs->role > BATON__ROLE__ROLE_DECODE) {
        return error_set(err, STATUS_CORRUPT, "hello of %s: no incarnation or no role",
                         theirs->node_id);
    }
    if (theirs->fingerprint.len > HELLO_FINGERPRINT_MAX || theirs->host_boot_id.len > 64 ||
        !text_fits(theirs->model) || !text_fits(theirs->version) || !text_fits(theirs->build) ||
        !address_is_good(theirs->grpc) || !address_is_good(theirs->http)) {
        return error_set(err, STATUS_CORRUPT, "hello of %s: a field is too long or out of range",
                         theirs->node_id);
    }
    return STATUS_OK;
}

enum status hello_check(const Baton__Hello *mine, const Baton__Hello *theirs, struct error *err)
{
    if (theirs->protocol != HELLO_PROTOCOL && node_id_is_good(theirs->node_id)) {
        /* first: the other fields of another protocol may mean something else */
        return error_set(err, STATUS_PEER_REFUSED,
                         "protocol differs: %s speaks %u, %.64s speaks %u; run one version of "
                         "baton everywhere",
                         mine->node_id, mine->protocol, theirs->node_id, theirs->protocol);
    }
    enum status status = fields_check(theirs, err);
    if (status != STATUS_OK) {
        return status;
    }
    const ProtobufCBinaryData *a = &mine->fingerprint, *b = &theirs->fingerprint;
    if (a->len != 0 && b->len != 0 && (a->len != b->len || memcmp(a->data, b->data, a->len) != 0)) {
        char mine_hex[2 * HELLO_FINGERPRINT_MAX + 1], theirs_hex[2 * HELLO_FINGERPRINT_MAX + 1];
        shown(a, mine_hex);
        shown(b, theirs_hex);
        return error_set(err, STATUS_PEER_REFUSED,
                         "page fingerprint differs: %s has %s (%.60s, %.60s), %s has %s (%.60s, "
                         "%.60s); both must serve the same checkpoint with the same cache layout",
                         mine->node_id, mine_hex, mine->model, mine->build, theirs->node_id,
                         theirs_hex, theirs->model, theirs->build);
    }
    if (mine->incarnation == theirs->incarnation) {
        return error_set(err, STATUS_PEER_REFUSED, "%s says hello to itself", mine->node_id);
    }
    return STATUS_OK;
}

enum status hello_incarnation_draw(uint64_t *ret_incarnation, struct error *err)
{
    uint64_t value = 0;
    while (value == 0) {
        ssize_t n = getrandom(&value, sizeof value, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n != (ssize_t)sizeof value) {
            return error_set(err, STATUS_SYSTEM, "no random bytes: %m");
        }
    }
    *ret_incarnation = value;
    return STATUS_OK;
}

size_t hello_host_boot_id(uint8_t ret_id[16])
{
    char text[64];
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    size_t n_bytes = 0;
    unsigned high = 0;
    bool have_high = false;
    for (ssize_t i = 0; i < n && n_bytes < 16; i++) {
        const char *digits = "0123456789abcdef";
        const char *at = text[i] != '\0' ? strchr(digits, text[i]) : NULL;
        if (at == NULL) {
            continue; /* the dashes */
        }
        unsigned digit = (unsigned)(at - digits);
        if (have_high) {
            ret_id[n_bytes++] = (uint8_t)(high << 4 | digit);
        }
        high = digit;
        have_high = !have_high;
    }
    return n_bytes == 16 ? 16 : 0;
}
