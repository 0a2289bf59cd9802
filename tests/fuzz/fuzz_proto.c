#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cluster.pb-c.h"
#include "proto/decode.pb-c.h"
#include "proto/health.pb-c.h"
#include "proto/node.pb-c.h"
#include "proto/prefill.pb-c.h"
#include "rpc/proto.h"

/*
 * The first byte chooses a message, the rest is read as one. Whatever is accepted must stay within
 * the stated memory, hold text only where text is due (strlen of each string says so by not running
 * off), and after one packing be a fixed point: pack(unpack(x)) = x.
 */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static const ProtobufCMessageDescriptor *const descriptors[] = {
    &baton__to_decode__descriptor,     &baton__from_decode__descriptor,
    &baton__to_prefill__descriptor,    &baton__from_prefill__descriptor,
    &baton__to_router__descriptor,     &baton__to_node__descriptor,
    &baton__drain_request__descriptor, &grpc__health__v1__health_check_request__descriptor,
};

static void must(bool truth)
{
    if (!truth) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    size_t n_descriptors = sizeof descriptors / sizeof descriptors[0];
    const ProtobufCMessageDescriptor *descriptor = descriptors[data[0] % n_descriptors];
    struct error err = {""};
    struct buf first = BUF_INIT, second = BUF_INIT;
    struct arena *arena = arena_create(0), *again = arena_create(0);
    ProtobufCMessage *message;
    if (proto_unpack(descriptor, data + 1, bytes - 1, arena, &message, &err) == STATUS_OK) {
        must(protobuf_c_message_check(message));
        must(arena_bytes(arena) <= PROTO_UNPACK_FACTOR * bytes + PROTO_UNPACK_FLOOR_BYTES + 4096);
        proto_pack(message, &first);
        must(proto_unpack(descriptor, first.data, first.bytes, again, &message, &err) == STATUS_OK);
        proto_pack(message, &second);
        must(first.bytes == second.bytes && memcmp(first.data, second.data, first.bytes) == 0);
    } else {
        must(err.text[0] != '\0');
    }
    buf_fini(&first);
    buf_fini(&second);
    arena_free(arena);
    arena_free(again);
    return 0;
}
