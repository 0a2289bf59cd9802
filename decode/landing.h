/* decode/landing.h - the landing area: the only memory of a decode node that a peer can write to.
 *
 * Slots of one page image each, numbered from 0, in a ledger: free -> granted -> landed -> free, or
 * granted -> revoked -> free. Owner of a slot is a transfer id, or a preflight's number.
 * Correctness never depends on when a revoked slot comes back (handoff.md: a late write spoils a
 * slot at worst, and a spoiled parcel fails its checksum); a free slot is reused oldest first, so
 * that a late writer has the longest time to fall silent.
 *
 * Thread: loop.
 */
#ifndef BATON_DECODE_LANDING_H
#define BATON_DECODE_LANDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct landing;
struct loop;
struct metrics;
struct region;
struct engine;
struct json_writer;

/* A revoked slot is free again after this long, whatever its peer says. */
enum { LANDING_REVOKED_MS = 10000 };

/* The slots of a region, as many as it has room for (STATUS_INVALID: for none). `device` is NULL
 * where it is host memory, or the engine whose memory it is: then nobody but that engine reads it.
 * `freed` runs whenever slots became free, in whatever way: a transfer may wait for one. It may run
 * inside a call, so it only notes that. */
must_check enum status landing_create(struct loop *loop, struct region *region, size_t slot_bytes,
                                      struct engine *device, void (*freed)(void *cookie),
                                      void *cookie, struct landing **ret_landing,
                                      struct error *err);
/* The region itself is the transport's. NULL is fine. */
void landing_free(struct landing *landing);

struct region *landing_region(const struct landing *landing);
uint32_t landing_n_slots(const struct landing *landing);
size_t landing_slot_bytes(const struct landing *landing);
uint32_t landing_n_free(const struct landing *landing);
uint8_t *landing_slot(const struct landing *landing, uint32_t slot);
/* Whether the slots lie in the device's memory. */
bool landing_on_device(const struct landing *landing);
/* Copies bytes of a slot to host memory, whatever it lies in. Any thread. SYSTEM. */
must_check enum status landing_read(const struct landing *landing, const uint8_t *at, size_t bytes,
                                    void *ret_bytes);

/* Grants up to n free slots to `owner` into ret_slots; returns how many. */
uint32_t landing_grant(struct landing *landing, uint64_t owner, uint32_t n, uint32_t *ret_slots);
/* A parcel says that bytes lie there. False: not granted to this owner. */
must_check bool landing_land(struct landing *landing, uint32_t slot, uint64_t owner);
/* Its bytes were copied out (or are of no use): free at once, for its put was flushed. */
void landing_release(struct landing *landing, uint32_t slot);
/* Every slot still granted to `owner` becomes revoked. Returns how many. */
uint32_t landing_revoke(struct landing *landing, uint64_t owner);
/* The peer can't write for `owner` any more (Drained, or its process is gone): revoked slots are
 * free now. */
void landing_drained(struct landing *landing, uint64_t owner);

void landing_register(struct landing *landing, struct metrics *metrics);
void landing_debug_json(const struct landing *landing, struct json_writer *w);

#endif
