/* transport/envelope.c - see the header. The one invariant: UCX is never shown a byte of a peer
 * that did not come whole, in the frame of the same UCX version. Both ends of a pair must therefore
 * run the same UCX: its address format has changed between releases, and a mismatch shows up
 * otherwise as a slow transport or an abort, not as an error.
 */
#include "transport/envelope.h"

#include <string.h>

#include "base/buf.h"
#include "base/mem.h"

enum { MAGIC = 0x31787462 }; /* "btx1" */

static uint64_t hash_bytes(uint64_t hash, const uint8_t *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    }
    return hash;
}

static uint64_t frame_hash(const uint8_t *frame, size_t contents_bytes)
{
    uint64_t hash = hash_bytes(0xcbf29ce484222325ull, frame, 16);
    return hash_bytes(hash, frame + ENVELOPE_HEADER_BYTES, contents_bytes);
}

uint8_t *envelope_seal(enum envelope_kind kind, struct ucx_version version, const void *contents,
                       size_t bytes, size_t *ret_bytes)
{
    uint8_t *frame = mem_zalloc(ENVELOPE_HEADER_BYTES + bytes);
    put_le32(frame, MAGIC);
    frame[4] = (uint8_t)kind;
    frame[5] = version.major;
    frame[6] = version.minor;
    put_le32(frame + 8, (uint32_t)bytes);
    memcpy(frame + ENVELOPE_HEADER_BYTES, contents, bytes);
    put_le64(frame + 16, frame_hash(frame, bytes));
    *ret_bytes = ENVELOPE_HEADER_BYTES + bytes;
    return frame;
}

enum status envelope_open(enum envelope_kind kind, struct ucx_version version, const uint8_t *frame,
                          size_t frame_bytes, size_t max_bytes, uint8_t **ret_contents,
                          size_t *ret_bytes, struct error *err)
{
    const char *what = kind == ENVELOPE_ADDRESS ? "transport address" : "region key";
    if (frame_bytes > max_bytes) {
        return error_set(err, STATUS_TOO_LARGE,
                         "%s of the peer has %zu bytes, at most %zu are legal", what, frame_bytes,
                         max_bytes);
    }
    if (frame == NULL || frame_bytes <= ENVELOPE_HEADER_BYTES || get_le32(frame) != MAGIC ||
        frame[4] != kind || frame[7] != 0 || get_le32(frame + 12) != 0) {
        return error_set(err, STATUS_CORRUPT, "%s of the peer is not one", what);
    }
    size_t bytes = frame_bytes - ENVELOPE_HEADER_BYTES;
    if (get_le32(frame + 8) != bytes || get_le64(frame + 16) != frame_hash(frame, bytes)) {
        return error_set(err, STATUS_CORRUPT, "%s of the peer arrived damaged", what);
    }
    if (frame[5] != version.major || frame[6] != version.minor) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "the peer runs UCX %u.%u and this process %u.%u: install the same on both",
                         frame[5], frame[6], version.major, version.minor);
    }
    uint8_t *contents = mem_zalloc(bytes + ENVELOPE_MARGIN_BYTES);
    memcpy(contents, frame + ENVELOPE_HEADER_BYTES, bytes);
    *ret_contents = contents;
    *ret_bytes = bytes;
    return STATUS_OK;
}
