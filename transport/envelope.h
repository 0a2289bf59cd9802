/* transport/envelope.h - the frame around bytes that UCX made for another process.
 *
 * UCX unpacks worker addresses and region keys without being told their length, and asserts on what
 * it does not understand. So each travels in a frame of ours: what it is, which UCX made it, its
 * length and a hash. envelope_open refuses anything else, and copies the contents into a buffer
 * with a margin of zeroes behind it, so that even a parser that runs on for a while stays inside
 * our memory.
 *
 * Layout, little-endian: magic u32 | kind u8 | UCX major u8 | minor u8 | zero u8 | bytes u32 | zero
 * u32 | hash u64 | contents. The hash is FNV-1a (64 bits) over kind, versions, length and contents:
 * it finds damage, not malice.
 */
#ifndef BATON_TRANSPORT_ENVELOPE_H
#define BATON_TRANSPORT_ENVELOPE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum envelope_kind { ENVELOPE_ADDRESS = 1, ENVELOPE_RKEY = 2 };

enum {
    ENVELOPE_HEADER_BYTES = 24,
    ENVELOPE_MARGIN_BYTES = 32768, /* 64 memory domains of at most 256 bytes each, twice over */
};

struct ucx_version {
    uint8_t major, minor;
};

/* Returns a new frame (mem_free) around [contents, +bytes). */
uint8_t *envelope_seal(enum envelope_kind kind, struct ucx_version version, const void *contents,
                       size_t bytes, size_t *ret_bytes);

/* Checks a foreign frame of at most `max_bytes` and copies its contents, with the margin, into new
 * memory (mem_free). Errors: STATUS_TOO_LARGE, STATUS_CORRUPT, STATUS_UNSUPPORTED (another UCX
 * version). */
must_check enum status envelope_open(enum envelope_kind kind, struct ucx_version version,
                                     const uint8_t *frame, size_t frame_bytes, size_t max_bytes,
                                     uint8_t **ret_contents, size_t *ret_bytes, struct error *err);

#endif
