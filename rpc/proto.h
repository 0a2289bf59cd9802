#ifndef BATON_RPC_PROTO_H
#define BATON_RPC_PROTO_H

#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/status.h"

/*
 * Foreign bytes to a message of proto/ and back, within bounds. Any thread.
 */

/*
 * Reads n_bytes as one message of the descriptor, all of it from the arena: it lives as long as
 * the arena and is never freed singly. Refused as STATUS_CORRUPT, with the field in err: bytes that
 * are not such a message; a string with a NUL or that is not UTF-8; a singular field or a oneof
 * given twice (no writer of ours does that, and merging is where parsers disagree). Fields not
 * known are skipped, so that a later build may add some. STATUS_TOO_LARGE: the message would take
 * more than PROTO_UNPACK_FACTOR times its bytes, or the arena's limit.
 *
 * Enum values outside the set and lists of any length are let through: the owner checks meaning.
 */
enum status must_check proto_unpack(const ProtobufCMessageDescriptor *descriptor,
                                    const uint8_t *bytes, size_t n_bytes, struct arena *arena,
                                    ProtobufCMessage **ret_message, struct error *err);

enum {
    /* Memory for a byte, at most. Our densest message, a token with 20 alternatives, takes 9; an
     * empty message in a list, which nobody sends, would take 60. */
    PROTO_UNPACK_FACTOR = 16,
    PROTO_UNPACK_FLOOR_BYTES = 65536 /* memory that any message may take */
};

/* Replaces the content of out by the packed message. A NULL string counts as "". */
void proto_pack(const ProtobufCMessage *message, struct buf *out);

#endif
