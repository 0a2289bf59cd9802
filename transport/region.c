/* transport/region.c - landing areas and sources. The one invariant: the key of a source is never
 * packed, so whatever a peer does, the page pool is out of its reach.
 */
#include "transport/region.h"

#include <assert.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "transport/region_internal.h"
#include "transport/thread.h"

/* No machine has more, and sums of such numbers can't overflow. */
static const size_t max_region_bytes = (size_t)1 << 46;

struct open_call {
    struct region *region;
    void *base; /* NULL: allocate */
    bool landing;
    enum status status;
    struct error *err;
};

static void open_on_thread(struct transport *t, void *arg)
{
    struct open_call *call = arg;
    struct region *region = call->region;
    if (call->base == NULL) {
        call->status =
            ucx_memory_allocate(t->ucx, region->bytes, &region->memory, &region->base, call->err);
    } else {
        region->base = call->base;
        call->status = ucx_memory_register(t->ucx, call->base, region->bytes, region->kind,
                                           call->landing, &region->memory, call->err);
    }
    if (call->status == STATUS_OK && call->landing) {
        call->status =
            ucx_memory_pack(t->ucx, region->memory, &region->rkey, &region->rkey_bytes, call->err);
        if (call->status != STATUS_OK) {
            ucx_memory_free(t->ucx, region->memory);
        }
    }
}

static enum status region_open(struct transport *t, void *base, size_t bytes, bool landing,
                               enum region_memory kind, struct region **ret_region,
                               struct error *err)
{
    if (bytes == 0 || bytes > max_region_bytes) {
        return error_set(err, STATUS_INVALID, "a region of %zu bytes", bytes);
    }
    if (t->closing) {
        return error_set(err, STATUS_CANCELLED, "the transport is closing");
    }
    struct region *region = mem_zalloc(sizeof *region);
    region->transport = t;
    region->bytes = bytes;
    region->kind = kind;
    struct open_call call = {.region = region, .base = base, .landing = landing, .err = err};
    thread_call(t, open_on_thread, &call);
    if (call.status != STATUS_OK) {
        mem_free(region);
        return call.status;
    }
    list_push_back(&t->regions, &region->link);
    atomic_fetch_add(&t->counters.region_bytes, bytes);
    log_info("transport", "%s of %zu bytes, %s memory", landing ? "landing area" : "source", bytes,
             kind == REGION_DEVICE ? "device" : "host");
    *ret_region = region;
    return STATUS_OK;
}

enum status region_create_landing(struct transport *t, size_t bytes, struct region **ret_region,
                                  struct error *err)
{
    struct region *region = NULL;
    enum status status = region_open(t, NULL, bytes, true, REGION_HOST, &region, err);
    if (status == STATUS_OK) {
        /* also commits it: sysv memory is lazy, and the first put should not pay for page faults */
        memset(region->base, 0, bytes);
        *ret_region = region;
    }
    return status;
}

enum status region_register_landing(struct transport *t, void *base, size_t bytes,
                                    enum region_memory memory, struct region **ret_region,
                                    struct error *err)
{
    if (base == NULL) {
        return error_set(err, STATUS_INVALID, "a landing area without an address");
    }
    return region_open(t, base, bytes, true, memory, ret_region, err);
}

enum status region_register_source(struct transport *t, void *base, size_t bytes,
                                   enum region_memory memory, struct region **ret_region,
                                   struct error *err)
{
    if (base == NULL) {
        return error_set(err, STATUS_INVALID, "a source without an address");
    }
    return region_open(t, base, bytes, false, memory, ret_region, err);
}

void region_unmap(struct transport *t, struct region *region)
{
    ucx_memory_free(t->ucx, region->memory);
    region->memory = NULL;
    atomic_fetch_sub(&t->counters.region_bytes, region->bytes);
}

static void unmap_on_thread(struct transport *t, void *arg)
{
    region_unmap(t, arg);
}

static void region_struct_free(struct region *region)
{
    list_remove(&region->link);
    mem_free(region->rkey);
    mem_free(region);
}

void region_free(struct region *region)
{
    if (region == NULL) {
        return;
    }
    struct transport *t = region->transport;
    if (t->closing) {
        return; /* unmapped already; transport_close frees the rest */
    }
    assert(region->n_puts == 0);
    thread_call(t, unmap_on_thread, region);
    region_struct_free(region);
}

void regions_free(struct transport *t)
{
    list_for_each_safe(p, &t->regions)
    {
        region_struct_free(list_entry(p, struct region, link));
    }
}

uint8_t *region_base(const struct region *region)
{
    return region->base;
}

size_t region_bytes(const struct region *region)
{
    return region->bytes;
}

enum region_memory region_memory(const struct region *region)
{
    return region->kind;
}

const uint8_t *region_rkey(const struct region *region, size_t *ret_bytes)
{
    assert(region->rkey != NULL);
    *ret_bytes = region->rkey_bytes;
    return region->rkey;
}
