/* engine/pool.h - pages and slots: who holds which, counted.
 *
 * Owns the pool's memory and two ledgers: pages (free, live, sending, cached) and sequence slots
 * (free, live). A page is reference-counted here and nowhere else. Thread: loop. The memory is
 * anonymous and mapped at open; pages are page-aligned and contiguous, so that one region covers
 * them as a source of puts. Where pages lie in a device and none is sent, there are the ledgers
 * alone.
 */
#ifndef BATON_ENGINE_POOL_H
#define BATON_ENGINE_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct pool;
struct json_writer;
struct metrics;

must_check enum status pool_create(uint32_t n_pages, size_t page_bytes, bool has_memory,
                                   uint32_t n_slots, struct pool **ret_pool, struct error *err);
/* Every page and slot must be free: a leak is our own bug. */
void pool_free(struct pool *pool);
/* Of a pool with memory. */
uint8_t *pool_page(const struct pool *pool, uint32_t page);
uint32_t pool_pages_free(const struct pool *pool);
uint32_t pool_slots_free(const struct pool *pool);

/* EXHAUSTED: none free. A page comes back oldest first. */
must_check enum status pool_page_acquire(struct pool *pool, uint64_t owner, uint32_t *ret_page);
/* One more holder of a live page. */
void pool_page_share(struct pool *pool, uint32_t page);
/* One holder less; the last one frees it, unless it is being sent. */
void pool_page_release(struct pool *pool, uint32_t page);
void pool_page_sending(struct pool *pool, uint32_t page);
void pool_page_sent(struct pool *pool, uint32_t page);

must_check enum status pool_slot_acquire(struct pool *pool, uint64_t owner, uint32_t *ret_slot);
void pool_slot_release(struct pool *pool, uint32_t slot);

/* {"pages": {...}, "slots": {...}}: every item that is not free with owner, age and reason. */
void pool_debug_json(const struct pool *pool, struct json_writer *w);
/* Gauges baton_ledger_items{ledger,state} of both ledgers. */
void pool_register(struct pool *pool, struct metrics *metrics);

#endif
