/* engine/store.h - where pages and slots of the model engine lie, and how bytes get there.
 *
 * In host memory that the device uses (the CPU), or *apart*: in the memory of a device that has its
 * own. Then pages that are sent have a copy in the host's memory, the mirror, from which they
 * leave, and whatever the host says of a slot or a page travels. Slots are windows and states;
 * apart there is one slot more, which stays as a slot is at 0 tokens.
 *
 * Devices of a group apart have a store each, of the same bytes: what is said of a slot or a page
 * is said to all of them, what is read comes from the first, and what landed is summed where it
 * lies in each.
 *
 * Thread: what says so may run on any, beside a compute call that does not use that slot or page;
 * the rest belongs to the compute thread, and is done once forward_wait returns.
 */
#ifndef BATON_ENGINE_STORE_H
#define BATON_ENGINE_STORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/forward.h"
#include "engine/layout.h"
#include "kernels/parcel.h"

/* Where pages and slots begin, in one memory. */
struct store_room {
    uint8_t *pool, *windows, *states;
};

struct store {
    struct forward *forward;
    const struct layout *layout;
    uint32_t n_pages, n_slots;
    bool apart;
    uint32_t n_rooms;                           /* 1, or apart one a rank: device memory */
    struct store_room rooms[FORWARD_MAX_RANKS]; /* all alike */
    uint8_t *slots;                             /* not apart: windows and states, owned */
    uint8_t *mirror; /* apart, and pages are sent: of the whole pool. Borrowed */
    uint8_t *image;  /* apart: room for a page or a slot; owned */
    pthread_mutex_t image_lock;
};

/* Bytes of `image`. */
size_t store_image_bytes(const struct layout *layout);
/* Takes the memory and tells the ranks. `pool` is n_pages of host memory: the pages themselves or,
 * with a forward that is apart, the mirror (NULL: there is none). EXHAUSTED, UNSUPPORTED, SYSTEM.
 * After an error, too, store_close. */
must_check enum status store_open(struct store *store, struct forward *forward,
                                  const struct layout *layout, uint32_t n_pages, uint32_t n_slots,
                                  uint8_t *pool, struct error *err);
/* After the devices were closed, which use this memory; of a zeroed store too. */
void store_close(struct store *store);
/* What of it was taken from the devices, of all together. */
size_t store_device_bytes(const struct store *store);

/* As a slot is at 0 tokens. */
void store_slot_reset(struct store *store, uint32_t slot);
/* Any thread. */
must_check enum status store_slot_copy(struct store *store, uint32_t dst, uint32_t src,
                                       struct error *err);
/* Bytes [from, to) of a page that is sent become the mirror's, where there is one. */
void store_mirror(struct store *store, uint32_t page, size_t from, size_t to);
/* As layout_tail_write and layout_page_trim of `page`, the partial one of n_tokens if there is one.
 * Waits. */
must_check enum status store_tail_write(struct store *store, uint32_t slot, uint32_t n_tokens,
                                        uint32_t page, uint8_t *dst, struct error *err);
/* Any thread. */
must_check enum status store_tail_read(struct store *store, uint32_t slot, uint32_t n_tokens,
                                       const uint8_t *src, struct error *err);
/* Any thread: the whole page. */
must_check enum status store_page_copy(struct store *store, uint32_t dst, uint32_t src,
                                       struct error *err);
must_check enum status store_page_read(struct store *store, uint32_t page, uint8_t *dst,
                                       struct error *err);
/* Apart: memory of the first device that others are shown, and what that is to them. EXHAUSTED;
 * UNSUPPORTED: not apart. */
must_check enum status store_alloc_shown(struct store *store, size_t bytes, uint8_t **ret_memory,
                                         enum ops_memory *ret_kind, struct error *err);
/* Any thread: between the memory of the first device and the host's. */
must_check enum status store_move(struct store *store, void *dst, const void *src, size_t bytes,
                                  struct error *err);
/* Any thread: the checksum of pieces in the memory of the first device, in place. */
must_check enum status store_sum(struct store *store, uint64_t transfer_id, uint32_t parcel_seq,
                                 const struct parcel_piece *pieces, uint32_t n_pieces,
                                 uint64_t *ret_checksum, struct error *err);
/* In the memory of the first device: see engine_page_address. */
uint8_t *store_page(const struct store *store, uint32_t page);
/* Any thread. See engine_accept_parcel. */
must_check enum status store_accept(struct store *store, uint64_t transfer_id, uint32_t parcel_seq,
                                    const struct parcel_piece *pieces, uint32_t n_pieces,
                                    uint64_t expected_checksum, struct error *err);

#endif
