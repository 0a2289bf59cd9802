/* See store.h. A slot or a page that the host has to read or write apart is made in `image`, which
 * is pinned, and travels whole: one copy each for window and state, where the spans of a tail would
 * be thousands. Whoever fills it holds its lock until it has travelled. */
#include "engine/store.h"

#include <inttypes.h>
#include <string.h>

#include "base/mem.h"
#include "engine/accept.h"

static const struct ops *ops_of(const struct store *s)
{
    return s->forward->ops;
}

static struct ops_device *device_of(const struct store *s, uint32_t room)
{
    return s->forward->ranks[room].device;
}

static uint8_t *window_of(const struct store *s, uint32_t room, uint32_t slot)
{
    return s->rooms[room].windows + (size_t)slot * s->layout->window_bytes;
}

static uint8_t *state_of(const struct store *s, uint32_t room, uint32_t slot)
{
    return s->rooms[room].states + (size_t)slot * s->layout->state_bytes;
}

static uint8_t *page_of(const struct store *s, uint32_t room, uint32_t page)
{
    return s->rooms[room].pool + (size_t)page * s->layout->page_bytes;
}

uint8_t *store_page(const struct store *s, uint32_t page)
{
    return page_of(s, 0, page);
}

static size_t slot_bytes(const struct layout *layout)
{
    return layout->window_bytes + layout->state_bytes;
}

static size_t round_up(size_t bytes)
{
    return (bytes + LAYOUT_PAGE_ALIGN - 1) / LAYOUT_PAGE_ALIGN * LAYOUT_PAGE_ALIGN;
}

size_t store_image_bytes(const struct layout *layout)
{
    size_t slot = slot_bytes(layout);
    return round_up(slot > layout->page_bytes ? slot : layout->page_bytes);
}

/* --- taking it */

static enum status too_many(const char *what, uint32_t n, size_t each, const char *option,
                            struct error *err)
{
    return error_set(err, STATUS_EXHAUSTED,
                     "no memory for %" PRIu32 " %s of %zu bytes each: lower %s", n, what, each,
                     option);
}

/* The slots and pages of one device; the image holds an empty slot. */
static enum status open_room(struct store *s, uint32_t room, struct error *err)
{
    const struct ops *ops = ops_of(s);
    struct ops_device *device = device_of(s, room);
    const struct layout *l = s->layout;
    struct store_room *r = &s->rooms[room];
    size_t n = (size_t)s->n_slots + 1;
    r->windows = ops->alloc(device, n * l->window_bytes);
    r->states = ops->alloc(device, n * l->state_bytes);
    if (!r->windows || !r->states) {
        return too_many("sequences", s->n_slots, slot_bytes(l), "--max-sequences", err);
    }
    r->pool = ops->alloc(device, s->n_pages * l->page_bytes);
    if (!r->pool) {
        return too_many("pages", s->n_pages, l->page_bytes, "--pages", err);
    }
    ops->write(device, window_of(s, room, s->n_slots), s->image, l->window_bytes);
    ops->write(device, state_of(s, room, s->n_slots), s->image + l->window_bytes, l->state_bytes);
    return STATUS_OK;
}

static enum status open_apart(struct store *s, struct error *err)
{
    const struct layout *l = s->layout;
    s->image = mem_try_aligned(LAYOUT_PAGE_ALIGN, store_image_bytes(l));
    if (!s->image) {
        return error_set(err, STATUS_EXHAUSTED, "no memory for the image of a sequence slot");
    }
    enum status status = forward_share(s->forward, s->image, store_image_bytes(l), err);
    if (status) {
        return status;
    }
    memset(s->image, 0, l->window_bytes);
    layout_state_reset(l, s->image + l->window_bytes);
    for (uint32_t room = 0; room < s->n_rooms && !status; room++) {
        status = open_room(s, room, err);
    }
    if (!status && s->mirror) {
        status = forward_share(s->forward, s->mirror, s->n_pages * l->page_bytes, err);
    }
    return status ? status : forward_wait(s->forward, err);
}

static enum status open_shared(struct store *s, uint8_t *pool, struct error *err)
{
    const struct layout *l = s->layout;
    size_t bytes;
    bool ok = size_mul(s->n_slots, slot_bytes(l), &bytes) && bytes <= SIZE_MAX - LAYOUT_PAGE_ALIGN;
    s->slots = ok ? mem_try_aligned(LAYOUT_PAGE_ALIGN, round_up(bytes)) : NULL;
    if (!s->slots) {
        return too_many("sequences", s->n_slots, slot_bytes(l), "--max-sequences", err);
    }
    s->rooms[0] = (struct store_room){pool, s->slots, s->slots + s->n_slots * l->window_bytes};
    enum status status = forward_share(s->forward, s->slots, round_up(bytes), err);
    return status ? status : forward_share(s->forward, pool, s->n_pages * l->page_bytes, err);
}

enum status store_open(struct store *s, struct forward *forward, const struct layout *layout,
                       uint32_t n_pages, uint32_t n_slots, uint8_t *pool, struct error *err)
{
    *s = (struct store){.forward = forward,
                        .layout = layout,
                        .n_pages = n_pages,
                        .n_slots = n_slots,
                        .apart = forward->apart,
                        .n_rooms = forward_n_memories(forward),
                        .mirror = forward->apart ? pool : NULL};
    pthread_mutex_init(&s->image_lock, NULL);
    enum status status = s->apart ? open_apart(s, err) : open_shared(s, pool, err);
    for (uint32_t k = 0; k < forward->n_ranks; k++) {
        const struct store_room *room = &s->rooms[k < s->n_rooms ? k : 0];
        forward->ranks[k].kv = (struct ops_kv){.pool = room->pool,
                                               .page_bytes = layout->page_bytes,
                                               .windows = room->windows,
                                               .states = room->states,
                                               .window_bytes = layout->window_bytes,
                                               .state_bytes = layout->state_bytes};
    }
    return status;
}

void store_close(struct store *s)
{
    if (!s->forward) {
        return;
    }
    mem_free(s->slots);
    mem_free(s->image);
    pthread_mutex_destroy(&s->image_lock);
}

size_t store_device_bytes(const struct store *s)
{
    size_t slots = ((size_t)s->n_slots + 1) * slot_bytes(s->layout);
    size_t each = slots + (size_t)s->n_pages * s->layout->page_bytes;
    return s->apart ? s->n_rooms * each : 0;
}

/* --- slots */

void store_slot_reset(struct store *s, uint32_t slot)
{
    const struct layout *l = s->layout;
    if (!s->apart) {
        memset(window_of(s, 0, slot), 0, l->window_bytes);
        layout_state_reset(l, state_of(s, 0, slot));
        return;
    }
    for (uint32_t k = 0; k < s->n_rooms; k++) {
        ops_of(s)->read(device_of(s, k), window_of(s, k, slot), window_of(s, k, s->n_slots),
                        l->window_bytes);
        ops_of(s)->read(device_of(s, k), state_of(s, k, slot), state_of(s, k, s->n_slots),
                        l->state_bytes);
    }
}

/* A copy on any thread: of host memory without asking the device. */
static enum status move(struct store *s, uint32_t room, void *dst, const void *src, size_t bytes,
                        struct error *err)
{
    if (!s->apart) {
        memcpy(dst, src, bytes);
        return STATUS_OK;
    }
    return ops_of(s)->move(device_of(s, room), dst, src, bytes, err);
}

enum status store_slot_copy(struct store *s, uint32_t dst, uint32_t src, struct error *err)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < s->n_rooms && !status; k++) {
        status =
            move(s, k, window_of(s, k, dst), window_of(s, k, src), s->layout->window_bytes, err);
        if (!status) {
            status =
                move(s, k, state_of(s, k, dst), state_of(s, k, src), s->layout->state_bytes, err);
        }
    }
    return status;
}

enum status store_tail_read(struct store *s, uint32_t slot, uint32_t n_tokens, const uint8_t *src,
                            struct error *err)
{
    const struct layout *l = s->layout;
    if (!s->apart) {
        layout_tail_read(l, n_tokens, src, window_of(s, 0, slot), state_of(s, 0, slot));
        return STATUS_OK;
    }
    uint8_t *window = s->image, *state = s->image + l->window_bytes;
    enum status status = STATUS_OK;
    pthread_mutex_lock(&s->image_lock);
    layout_tail_read(l, n_tokens, src, window, state);
    for (uint32_t k = 0; k < s->n_rooms && !status; k++) {
        status = move(s, k, window_of(s, k, slot), window, l->window_bytes, err);
        if (!status) {
            status = move(s, k, state_of(s, k, slot), state, l->state_bytes, err);
        }
    }
    pthread_mutex_unlock(&s->image_lock);
    return status;
}

/* Trims the partial page where it lies, and in the mirror. */
static enum status trim_apart(struct store *s, uint32_t n_tokens, uint32_t page, struct error *err)
{
    const struct layout *l = s->layout;
    ops_of(s)->read(device_of(s, 0), s->image, page_of(s, 0, page), l->page_bytes);
    enum status status = forward_wait(s->forward, err);
    if (status) {
        return status;
    }
    layout_page_trim(l, s->image, n_tokens / l->page_tokens, n_tokens);
    if (s->mirror) {
        memcpy(s->mirror + (size_t)page * l->page_bytes, s->image, l->page_bytes);
    }
    for (uint32_t k = 0; k < s->n_rooms; k++) {
        ops_of(s)->write(device_of(s, k), page_of(s, k, page), s->image, l->page_bytes);
    }
    return forward_wait(s->forward, err);
}

static enum status tail_write_apart(struct store *s, uint32_t slot, uint32_t n_tokens,
                                    uint32_t page, uint8_t *dst, struct error *err)
{
    const struct layout *l = s->layout;
    uint8_t *window = s->image, *state = s->image + l->window_bytes;
    ops_of(s)->read(device_of(s, 0), window, window_of(s, 0, slot), l->window_bytes);
    ops_of(s)->read(device_of(s, 0), state, state_of(s, 0, slot), l->state_bytes);
    enum status status = forward_wait(s->forward, err);
    if (status) {
        return status;
    }
    layout_tail_write(l, window, state, n_tokens, dst);
    return n_tokens % l->page_tokens ? trim_apart(s, n_tokens, page, err) : STATUS_OK;
}

enum status store_tail_write(struct store *s, uint32_t slot, uint32_t n_tokens, uint32_t page,
                             uint8_t *dst, struct error *err)
{
    const struct layout *l = s->layout;
    if (s->apart) {
        pthread_mutex_lock(&s->image_lock);
        enum status status = tail_write_apart(s, slot, n_tokens, page, dst, err);
        pthread_mutex_unlock(&s->image_lock);
        return status;
    }
    layout_tail_write(l, window_of(s, 0, slot), state_of(s, 0, slot), n_tokens, dst);
    if (n_tokens % l->page_tokens) {
        layout_page_trim(l, store_page(s, page), n_tokens / l->page_tokens, n_tokens);
    }
    return STATUS_OK;
}

/* --- pages */

void store_mirror(struct store *s, uint32_t page, size_t from, size_t to)
{
    if (s->mirror && from < to) {
        ops_of(s)->read(device_of(s, 0), s->mirror + (size_t)page * s->layout->page_bytes + from,
                        page_of(s, 0, page) + from, to - from);
    }
}

enum status store_page_copy(struct store *s, uint32_t dst, uint32_t src, struct error *err)
{
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < s->n_rooms && !status; k++) {
        status = move(s, k, page_of(s, k, dst), page_of(s, k, src), s->layout->page_bytes, err);
    }
    return status;
}

enum status store_page_read(struct store *s, uint32_t page, uint8_t *dst, struct error *err)
{
    return move(s, 0, dst, page_of(s, 0, page), s->layout->page_bytes, err);
}

/* The pieces into one room, and the checksum of what then lies there. */
static enum status take(struct store *s, uint32_t room, const struct parcel_key *key,
                        const struct parcel_piece *pieces, uint32_t n_pieces,
                        uint64_t *ret_checksum, struct error *err)
{
    struct parcel_sum sum;
    uint64_t bytes = 0;
    enum status status = ops_of(s)->accept(device_of(s, room), key, pieces, n_pieces, &sum, err);
    if (status) {
        return status;
    }
    for (uint32_t i = 0; i < n_pieces; i++) {
        bytes += pieces[i].bytes;
    }
    *ret_checksum = parcel_digest(&sum, bytes);
    return STATUS_OK;
}

/* The parcel into one room, and whether it lies there as it was sent. */
static enum status accept_one(struct store *s, uint32_t room, const struct parcel_key *key,
                              const struct parcel_piece *pieces, uint32_t n_pieces,
                              uint64_t expected_checksum, struct error *err)
{
    uint64_t checksum;
    enum status status = take(s, room, key, pieces, n_pieces, &checksum, err);
    return status ? status : checksum == expected_checksum ? STATUS_OK : STATUS_CHECKSUM;
}

enum status store_accept(struct store *s, uint64_t transfer_id, uint32_t parcel_seq,
                         const struct parcel_piece *pieces, uint32_t n_pieces,
                         uint64_t expected_checksum, struct error *err)
{
    if (!s->apart) {
        return accept_parcel(transfer_id, parcel_seq, pieces, n_pieces, expected_checksum);
    }
    struct parcel_key key;
    parcel_key_make(&key, transfer_id, parcel_seq);
    enum status status = accept_one(s, 0, &key, pieces, n_pieces, expected_checksum, err);
    struct parcel_piece *there =
        s->n_rooms > 1 && !status ? mem_array(n_pieces, sizeof(*there)) : NULL;
    for (uint32_t k = 1; k < s->n_rooms && !status; k++) {
        for (uint32_t i = 0; i < n_pieces; i++) {
            there[i] = pieces[i];
            there[i].dst = s->rooms[k].pool + ((uint8_t *)pieces[i].dst - s->rooms[0].pool);
        }
        status = accept_one(s, k, &key, there, n_pieces, expected_checksum, err);
    }
    mem_free(there);
    return status;
}

/* --- memory that others are shown */

enum status store_alloc_shown(struct store *s, size_t bytes, uint8_t **ret_memory,
                              enum ops_memory *ret_kind, struct error *err)
{
    if (!s->apart) {
        return error_set(
            err, STATUS_UNSUPPORTED,
            "pages lie in the host's memory, there is no device's to hand them over in");
    }
    uint8_t *memory = ops_of(s)->alloc_shown(device_of(s, 0), bytes, ret_kind);
    if (!memory) {
        return error_set(err, STATUS_EXHAUSTED, "no device memory for %zu bytes of hand-off",
                         bytes);
    }
    *ret_memory = memory;
    return forward_wait(s->forward, err); /* zeroed before a peer writes to it */
}

enum status store_move(struct store *s, void *dst, const void *src, size_t bytes, struct error *err)
{
    return move(s, 0, dst, src, bytes, err);
}

enum status store_sum(struct store *s, uint64_t transfer_id, uint32_t parcel_seq,
                      const struct parcel_piece *pieces, uint32_t n_pieces, uint64_t *ret_checksum,
                      struct error *err)
{
    struct parcel_key key;
    parcel_key_make(&key, transfer_id, parcel_seq);
    struct parcel_piece *in_place = mem_array(n_pieces, sizeof(*in_place));
    for (uint32_t i = 0; i < n_pieces; i++) {
        in_place[i] = (struct parcel_piece){NULL, pieces[i].src, pieces[i].bytes};
    }
    enum status status = take(s, 0, &key, in_place, n_pieces, ret_checksum, err);
    mem_free(in_place);
    return status;
}
