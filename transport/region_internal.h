/* transport/region_internal.h - what put.c and the put thread see of a region. Private to
 * transport/. */
#ifndef BATON_TRANSPORT_REGION_INTERNAL_H
#define BATON_TRANSPORT_REGION_INTERNAL_H

#include "base/list.h"
#include "transport/region.h"
#include "transport/ucx.h"

/* Owner: the loop thread; `memory` is the put thread's. */
struct region {
    struct transport *transport;
    struct list link;
    struct ucx_memory *memory;
    uint8_t *base;
    size_t bytes;
    enum region_memory kind;
    uint32_t n_puts; /* alive, reading from it */
    uint8_t *rkey;   /* NULL for a source */
    size_t rkey_bytes;
};

/* Put thread. */
void region_unmap(struct transport *t, struct region *region);

/* The structs that are left, after the put thread unmapped them. */
void regions_free(struct transport *t);

#endif
