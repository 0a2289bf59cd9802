/*
 * The fault points of messages, in a drill build only: see base/fault.h.
 *
 * Sits before link_send. What a fault delays waits in a queue here, and what is sent after it waits
 * behind it, for a link keeps its order; a reordered message stands aside until the next one has
 * gone. A message that was held back and then finds the link's queue full ends the link: its sender
 * was told that it went.
 */
#include "rpc/link_fault.h"

#include <string.h>

#include <protobuf-c/protobuf-c.h>

#include "base/fault.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"

enum { ROOM_AFTER_MS = 10 };

struct held {
    struct held *next;
    uint64_t due_ns;
    size_t n_bytes;
    uint8_t bytes[];
};

struct link_fault {
    struct link *link;
    struct loop_timer *timer;
    struct held *first, **last; /* in order */
    struct held *aside;         /* to go after the next */
    uint64_t room_ns;           /* when to say writable; 0: not */
    bool cut;
};

static void timer_set(struct link_fault *fault)
{
    uint64_t now_ns = loop_now_ns(), due_ns = UINT64_MAX;
    if (fault->cut) {
        due_ns = now_ns;
    }
    if (fault->first != NULL && fault->first->due_ns < due_ns) {
        due_ns = fault->first->due_ns;
    }
    if (fault->aside != NULL && fault->aside->due_ns < due_ns) {
        due_ns = fault->aside->due_ns;
    }
    if (fault->room_ns != 0 && fault->room_ns < due_ns) {
        due_ns = fault->room_ns;
    }
    if (due_ns != UINT64_MAX) {
        loop_timer_arm(fault->timer, due_ns > now_ns ? due_ns - now_ns : 0);
    }
}

static struct held *held_new(const void *bytes, size_t n_bytes, uint32_t ms)
{
    struct held *held = mem_alloc(sizeof(*held) + n_bytes);
    held->next = NULL;
    held->due_ns = loop_now_ns() + ms * NS_PER_MS;
    held->n_bytes = n_bytes;
    if (n_bytes > 0) {
        memcpy(held->bytes, bytes, n_bytes);
    }
    return held;
}

static void held_push(struct link_fault *fault, struct held *held)
{
    *fault->last = held;
    fault->last = &held->next;
}

static void held_send(struct link_fault *fault, struct held *held)
{
    enum status status = link_send(fault->link, held->bytes, held->n_bytes);
    if (status) {
        fault->cut = true;
    }
    mem_free(held);
}

static void on_timer(void *cookie)
{
    struct link_fault *fault = cookie;
    struct link *link = fault->link;
    uint64_t now_ns = loop_now_ns();
    while (fault->first != NULL && fault->first->due_ns <= now_ns) {
        struct held *held = fault->first;
        fault->first = held->next;
        if (fault->first == NULL) {
            fault->last = &fault->first;
        }
        held_send(fault, held);
    }
    if (fault->aside != NULL && fault->aside->due_ns <= now_ns) {
        struct held *aside = fault->aside;
        fault->aside = NULL;
        held_send(fault, aside);
    }
    bool room = fault->room_ns != 0 && fault->room_ns <= now_ns;
    bool cut = fault->cut;
    fault->room_ns = room ? 0 : fault->room_ns;
    fault->cut = false;
    timer_set(fault);
    if (cut) { /* the link may be gone after either */
        link_fault_cut(link);
    } else if (room) {
        link_fault_writable(link);
    }
}

static struct link_fault *fault_of(struct link *link)
{
    struct link_fault **at = link_fault_of(link);
    if (*at == NULL) {
        struct link_fault *fault = mem_zalloc(sizeof(*fault));
        fault->link = link;
        fault->last = &fault->first;
        fault->timer = loop_timer_create(link_fault_loop(link), on_timer, fault);
        *at = fault;
    }
    return *at;
}

void link_fault_clear(struct link_fault *fault)
{
    if (fault == NULL) {
        return;
    }
    while (fault->first != NULL) {
        struct held *held = fault->first;
        fault->first = held->next;
        mem_free(held);
    }
    fault->last = &fault->first;
    mem_free(fault->aside);
    fault->aside = NULL;
    fault->room_ns = 0;
    fault->cut = false;
    loop_timer_disarm(fault->timer);
}

void link_fault_free(struct link_fault *fault)
{
    if (fault != NULL) {
        link_fault_clear(fault);
        loop_timer_free(fault->timer);
        mem_free(fault);
    }
}

/* Behind what is held back, if there is any; after it goes what stands aside. */
static enum status pass(struct link *link, const void *bytes, size_t n_bytes)
{
    struct link_fault *fault = *link_fault_of(link);
    if (fault == NULL || (fault->first == NULL && fault->aside == NULL)) {
        return link_send(link, bytes, n_bytes);
    }
    if (fault->first != NULL) {
        held_push(fault, held_new(bytes, n_bytes, 0));
    } else {
        enum status status = link_send(link, bytes, n_bytes);
        if (status) {
            return status;
        }
    }
    struct held *aside = fault->aside;
    fault->aside = NULL;
    if (aside != NULL && fault->first != NULL) {
        held_push(fault, aside);
    } else if (aside != NULL) {
        held_send(fault, aside);
    }
    timer_set(fault);
    return STATUS_OK;
}

static enum status pass_damaged(struct link *link, const void *bytes, size_t n_bytes)
{
    struct held *damaged = held_new(bytes, n_bytes, 0);
    if (n_bytes > 0) {
        damaged->bytes[0] |= 7; /* a wire type that there is not */
    }
    enum status status = pass(link, damaged->bytes, n_bytes);
    mem_free(damaged);
    return status;
}

enum status link_send_point(struct link *link, int point, const void *bytes, size_t n_bytes)
{
    if (!link_is_open(link)) {
        return link_send(link, bytes, n_bytes);
    }
    struct fault_hit hit = fault_hit((enum fault_point)point);
    enum status status;
    switch (hit.action) {
    case FAULT_FAIL:
        fault_of(link)->room_ns = loop_now_ns() + ROOM_AFTER_MS * NS_PER_MS;
        status = STATUS_EXHAUSTED;
        break;
    case FAULT_CUT:
        fault_of(link)->cut = true;
        status = STATUS_OK;
        break;
    case FAULT_DELAY:
        held_push(fault_of(link), held_new(bytes, n_bytes, hit.ms));
        status = STATUS_OK;
        break;
    case FAULT_REORDER:
        if (fault_of(link)->aside != NULL) {
            return pass(link, bytes, n_bytes);
        }
        fault_of(link)->aside = held_new(bytes, n_bytes, hit.ms);
        status = STATUS_OK;
        break;
    case FAULT_DROP:
        return STATUS_OK;
    case FAULT_DUPLICATE:
        status = pass(link, bytes, n_bytes);
        return status ? status : pass(link, bytes, n_bytes);
    case FAULT_CORRUPT:
        return pass_damaged(link, bytes, n_bytes);
    default:
        return pass(link, bytes, n_bytes);
    }
    timer_set(fault_of(link));
    return status;
}

/* Which member of the message's oneof is set: all of ours have just one. */
static const char *case_name(const struct ProtobufCMessage *message)
{
    const ProtobufCMessageDescriptor *descriptor = message->descriptor;
    for (unsigned i = 0; i < descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &descriptor->fields[i];
        uint32_t which;
        memcpy(&which, (const char *)message + field->quantifier_offset, sizeof(which));
        if (which == field->id) {
            return field->name;
        }
    }
    return "";
}

enum status link_send_message(struct link *link, const struct ProtobufCMessage *message,
                              const void *bytes, size_t n_bytes)
{
    enum fault_point point = fault_find(message->descriptor->short_name, case_name(message));
    if (point == FAULT_N_POINTS) {
        log_error("fault", "no point %s.%s", message->descriptor->short_name, case_name(message));
        return link_send(link, bytes, n_bytes);
    }
    return link_send_point(link, (int)point, bytes, n_bytes);
}
