#include "rpc/proto.h"

#include <assert.h>
#include <string.h>

#include "base/utf8.h"

/*
 * protobuf-c trusts more than we do: strings lose their length when they hold a NUL, are not
 * checked to be UTF-8, a field given twice is merged by code that nobody exercises, and two bytes
 * may become a struct of a hundred. So the bytes are walked first, against the same descriptor, and
 * protobuf-c sees only what passed. The walk allocates nothing, and adds up the structs and
 * pointers that unpacking will make.
 *
 * No message of proto/ contains itself, so the depth of the walk is bounded by the descriptors; the
 * limit below is there for the day when somebody adds one that does.
 */

enum {
    MAX_DEPTH = 12,
    MAX_FIELDS = 64, /* of one message, for the set of fields seen */
    NOTE_BYTES = 48, /* what protobuf-c keeps of a field while it unpacks */
    WIRE_VARINT = 0,
    WIRE_64 = 1,
    WIRE_BYTES = 2,
    WIRE_32 = 5,
};

struct walk {
    size_t memory_bytes, memory_limit;
    struct error *err;
};

struct span {
    const uint8_t *p, *end;
};

/* One varint of at most 10 bytes; false when there is none. */
static bool varint_read(struct span *span, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < 10 && span->p + i < span->end; i++) {
        value |= (uint64_t)(span->p[i] & 0x7f) << (7 * i);
        if ((span->p[i] & 0x80) == 0) {
            span->p += i + 1;
            *ret_value = value;
            return true;
        }
    }
    return false;
}

static const ProtobufCFieldDescriptor *field_find(const ProtobufCMessageDescriptor *descriptor,
                                                  uint64_t number)
{
    for (unsigned i = 0; i < descriptor->n_fields; i++) {
        if (descriptor->fields[i].id == number) {
            return &descriptor->fields[i];
        }
    }
    return NULL;
}

static enum status text_check(const struct walk *walk, const ProtobufCFieldDescriptor *field,
                              struct span content)
{
    while (content.p < content.end) {
        uint32_t code;
        size_t n = utf8_next(content.p, (size_t)(content.end - content.p), &code);
        if (n == 0 || code == 0) {
            return error_set(walk->err, STATUS_CORRUPT, "field %s is not text: %s", field->name,
                             n == 0 ? "not utf-8" : "it holds a nul");
        }
        content.p += n;
    }
    return STATUS_OK;
}

static enum status memory_add(struct walk *walk, size_t bytes)
{
    if (bytes > walk->memory_limit - walk->memory_bytes) {
        return error_set(walk->err, STATUS_TOO_LARGE,
                         "the message would take more than %zu bytes of memory",
                         walk->memory_limit);
    }
    walk->memory_bytes += bytes;
    return STATUS_OK;
}

/* A singular field may come once, and of a oneof one member. */
static enum status once_check(const struct walk *walk, const ProtobufCMessageDescriptor *descriptor,
                              const ProtobufCFieldDescriptor *field, uint64_t *seen)
{
    uint64_t bit = 1ull << (field - descriptor->fields);
    bool again = (*seen & bit) != 0;
    if ((field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0) {
        for (unsigned i = 0; i < descriptor->n_fields; i++) {
            again = again || ((*seen & 1ull << i) != 0 &&
                              descriptor->fields[i].quantifier_offset == field->quantifier_offset &&
                              (descriptor->fields[i].flags & PROTOBUF_C_FIELD_FLAG_ONEOF) != 0);
        }
    }
    *seen |= bit;
    if (again && field->label != PROTOBUF_C_LABEL_REPEATED) {
        return error_set(walk->err, STATUS_CORRUPT, "field %s of %s is given twice", field->name,
                         descriptor->short_name);
    }
    return STATUS_OK;
}

/* Reads past one value of a wire type; *ret_content is what lies inside a WIRE_BYTES. */
static bool value_skip(struct span *span, unsigned wire, struct span *ret_content)
{
    uint64_t value;
    size_t left;
    switch (wire) {
    case WIRE_VARINT:
        return varint_read(span, &value);
    case WIRE_BYTES:
        if (!varint_read(span, &value) || value > (uint64_t)(span->end - span->p)) {
            return false;
        }
        *ret_content = (struct span){span->p, span->p + value};
        span->p += value;
        return true;
    case WIRE_64:
    case WIRE_32:
        left = (size_t)(span->end - span->p);
        value = wire == WIRE_64 ? 8 : 4;
        if (value > left) {
            return false;
        }
        span->p += value;
        return true;
    default:
        return false;
    }
}

static enum status message_walk(struct walk *walk, const ProtobufCMessageDescriptor *descriptor,
                                struct span span, unsigned depth);

static enum status field_walk(struct walk *walk, const ProtobufCFieldDescriptor *field,
                              unsigned wire, struct span content, unsigned depth)
{
    bool is_message = field->type == PROTOBUF_C_TYPE_MESSAGE;
    bool is_text = field->type == PROTOBUF_C_TYPE_STRING;
    if (wire != WIRE_BYTES) {
        if (is_message || is_text || field->type == PROTOBUF_C_TYPE_BYTES) {
            return error_set(walk->err, STATUS_CORRUPT, "field %s has a wrong type", field->name);
        }
        return memory_add(walk, 8);
    }
    size_t bytes = sizeof(void *);
    if (!is_message) {
        /* a copy with its end, or a packed list: up to 8 bytes for one on the wire */
        bytes += field->label == PROTOBUF_C_LABEL_REPEATED && !is_text
                     ? 8 * (size_t)(content.end - content.p)
                     : (size_t)(content.end - content.p) + 16;
    }
    enum status status = memory_add(walk, bytes);
    if (status == STATUS_OK && is_text) {
        status = text_check(walk, field, content);
    } else if (status == STATUS_OK && is_message) {
        status = message_walk(walk, field->descriptor, content, depth + 1);
    }
    return status;
}

static enum status message_walk(struct walk *walk, const ProtobufCMessageDescriptor *descriptor,
                                struct span span, unsigned depth)
{
    assert(descriptor->n_fields <= MAX_FIELDS);
    if (depth > MAX_DEPTH) {
        return error_set(walk->err, STATUS_CORRUPT, "messages nested too deep");
    }
    enum status status = memory_add(walk, descriptor->sizeof_message + 2 * sizeof(void *));
    uint64_t seen = 0;
    /* protobuf-c notes each field it meets, 16 on its stack, the rest in slabs that double */
    size_t n_met = 0, slab_n = 32, slab_end = 16;
    while (status == STATUS_OK && span.p < span.end) {
        uint64_t tag;
        if (n_met++ == slab_end) {
            status = memory_add(walk, slab_n * NOTE_BYTES);
            slab_end += slab_n;
            slab_n *= 2;
            if (status != STATUS_OK) {
                break;
            }
        }
        struct span content = {NULL, NULL};
        if (!varint_read(&span, &tag) || tag >> 3 == 0 || tag >> 3 > 0x1fffffff ||
            !value_skip(&span, tag & 7, &content)) {
            return error_set(walk->err, STATUS_CORRUPT, "the bytes are not a %s",
                             descriptor->short_name);
        }
        const ProtobufCFieldDescriptor *field = field_find(descriptor, tag >> 3);
        if (field == NULL) {
            status = memory_add(walk, sizeof(ProtobufCMessageUnknownField) +
                                          (size_t)(content.end - content.p) + 16);
            continue;
        }
        status = once_check(walk, descriptor, field, &seen);
        if (status == STATUS_OK) {
            status = field_walk(walk, field, tag & 7, content, depth);
        }
    }
    return status;
}

static void *allocator_alloc(void *data, size_t bytes)
{
    return arena_try_alloc(data, bytes);
}

static void allocator_free(void *data, void *p)
{
}

enum status proto_unpack(const ProtobufCMessageDescriptor *descriptor, const uint8_t *bytes,
                         size_t n_bytes, struct arena *arena, ProtobufCMessage **ret_message,
                         struct error *err)
{
    struct walk walk = {.err = err};
    if (!size_mul(n_bytes, PROTO_UNPACK_FACTOR, &walk.memory_limit) ||
        !size_add(walk.memory_limit, PROTO_UNPACK_FLOOR_BYTES, &walk.memory_limit)) {
        return error_set(err, STATUS_TOO_LARGE, "%zu bytes are no message", n_bytes);
    }
    static const uint8_t nothing[1];
    bytes = bytes == NULL ? nothing : bytes;
    enum status status = message_walk(&walk, descriptor, (struct span){bytes, bytes + n_bytes}, 0);
    if (status != STATUS_OK) {
        return status;
    }
    /* arena memory is zeroed, which some versions of protobuf-c silently rely on */
    ProtobufCAllocator allocator = {
        .alloc = allocator_alloc, .free = allocator_free, .allocator_data = arena};
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, n_bytes, bytes);
    if (message == NULL) {
        return error_set(err, STATUS_CORRUPT, "the bytes are not a %s, or over the memory limit",
                         descriptor->short_name);
    }
    *ret_message = message;
    return STATUS_OK;
}

void proto_pack(const ProtobufCMessage *message, struct buf *out)
{
    buf_clear(out);
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *to = buf_reserve(out, bytes + 1);
    out->bytes += protobuf_c_message_pack(message, to);
    assert(out->bytes == bytes);
}
