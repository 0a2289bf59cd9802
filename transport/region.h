/* transport/region.h - memory that puts read from and land in.
 *
 * Two kinds. A *landing area* is what peers may write to: its key can be packed and given away. A
 * *source* is what puts read from (the page pool, send buffers): it is mapped for local reading and
 * its key is never packed, so no peer can reach it. A host landing area is allocated by UCX, which
 * makes shared memory truly one-sided (one memcpy, the target's CPU idle); such memory can't be
 * fenced, which is why nothing but landing slots may lie in it.
 *
 * Thread: loop. The three calls that create or free wait for the put thread to do it (microseconds
 * to a few hundred milliseconds for large landing areas, which are prefaulted): call them at start
 * and at exit.
 */
#ifndef BATON_TRANSPORT_REGION_H
#define BATON_TRANSPORT_REGION_H

#include "transport/transport.h"

struct region;

enum region_memory { REGION_HOST = 0, REGION_DEVICE = 1 };

/* Host memory of `bytes` (> 0), zeroed, page aligned, allocated by UCX, that peers can put into.
 * The region lives until region_free or transport_close. Errors: STATUS_EXHAUSTED with what to
 * enlarge (/dev/shm). */
must_check enum status region_create_landing(struct transport *transport, size_t bytes,
                                             struct region **ret_region, struct error *err);

/* Registers memory [base, base + bytes) of the caller's as a landing area. It should be an
 * allocation of its own: over cuda_ipc a peer maps the whole allocation. STATUS_UNSUPPORTED when
 * it is device memory and this UCX has no CUDA support or takes it for host memory: use a host
 * landing area and copy. The memory must outlive the region. */
must_check enum status region_register_landing(struct transport *transport, void *base,
                                               size_t bytes, enum region_memory memory,
                                               struct region **ret_region, struct error *err);

/* Registers [base, base + bytes) as a source of puts, for local reading only. The memory (the
 * caller's) must outlive the region. Errors as above. */
must_check enum status region_register_source(struct transport *transport, void *base, size_t bytes,
                                              enum region_memory memory, struct region **ret_region,
                                              struct error *err);

/* How a put to ourselves went. */
struct region_probe {
    uint64_t put_ns; /* put and flush of it */
    char lanes[256]; /* of the endpoint, as put_peer_lanes */
};

/* Puts the first `bytes` of a source into a landing area of the same transport, by an endpoint to
 * this process, and waits for it, a few seconds at most: at start, before there are peers. What
 * then lies there is for the caller to compare. Errors: those of putting, with a text. */
must_check enum status region_probe(struct region *source, struct region *landing, size_t bytes,
                                    struct region_probe *ret_probe, struct error *err);

/* Unmaps. No put that reads from it may be alive (a bug of the caller, asserted). Peers that hold
 * its key may still hold a mapping of shared memory: the memory of a landing area is gone for this
 * process only. NULL is legal. */
void region_free(struct region *region);

/* First byte, length, kind. For a landing area base is also what goes on the wire as its remote
 * base. */
uint8_t *region_base(const struct region *region);
size_t region_bytes(const struct region *region);
enum region_memory region_memory(const struct region *region);

/* The key to send to peers, at most TRANSPORT_MAX_RKEY_BYTES; owned by the region. A source has
 * none: asking is a bug of the caller, asserted. */
const uint8_t *region_rkey(const struct region *region, size_t *ret_bytes);

#endif
