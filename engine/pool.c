/* See pool.h. The ledgers say where each page and slot is; this file adds reference counts and the
 * one rule that a page whose bytes are still being read by a put (`sending`) is not free, whoever
 * let go of it.
 */
#include "engine/pool.h"

#include <assert.h>
#include <inttypes.h>
#include <sys/mman.h>

#include "base/json.h"
#include "base/ledger.h"
#include "base/mem.h"

enum page_state { PAGE_FREE, PAGE_LIVE, PAGE_SENDING, PAGE_CACHED, N_PAGE_STATES };
enum slot_state { SLOT_FREE, SLOT_LIVE, N_SLOT_STATES };

static const char *const page_state_names[] = {"free", "live", "sending", "cached"};
static const char *const slot_state_names[] = {"free", "live"};

struct page {
    uint32_t n_holders; /* sequences */
    uint32_t n_puts;    /* reading it now */
};

struct pool {
    uint8_t *base;
    size_t bytes, page_bytes;
    struct page *pages;
    struct ledger *page_ledger, *slot_ledger;
};

enum status pool_create(uint32_t n_pages, size_t page_bytes, bool has_memory, uint32_t n_slots,
                        struct pool **ret_pool, struct error *err)
{
    size_t bytes;
    if (n_pages == 0 || n_slots == 0 || !size_mul(n_pages, page_bytes, &bytes)) {
        return error_set(err, STATUS_INVALID, "a pool needs at least one page and one sequence");
    }
    void *base = has_memory ? mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                            : NULL;
    if (base == MAP_FAILED) {
        return error_set(err, STATUS_EXHAUSTED,
                         "no memory for %" PRIu32 " pages of %zu bytes (%zu MiB): lower --pages",
                         n_pages, page_bytes, bytes >> 20);
    }
    struct pool *pool = mem_zalloc(sizeof(*pool));
    pool->base = base;
    pool->bytes = bytes;
    pool->page_bytes = page_bytes;
    pool->pages = mem_array(n_pages, sizeof(*pool->pages));
    pool->page_ledger = ledger_create("pages", n_pages, page_state_names, N_PAGE_STATES);
    pool->slot_ledger = ledger_create("sequence_slots", n_slots, slot_state_names, N_SLOT_STATES);
    *ret_pool = pool;
    return STATUS_OK;
}

void pool_free(struct pool *pool)
{
    if (!pool) {
        return;
    }
    ledger_free(pool->page_ledger);
    ledger_free(pool->slot_ledger);
    mem_free(pool->pages);
    if (pool->base) {
        munmap(pool->base, pool->bytes);
    }
    mem_free(pool);
}

uint8_t *pool_page(const struct pool *pool, uint32_t page)
{
    assert(pool->base);
    return pool->base + (size_t)page * pool->page_bytes;
}

uint32_t pool_pages_free(const struct pool *pool)
{
    return (uint32_t)ledger_n(pool->page_ledger, PAGE_FREE);
}

uint32_t pool_slots_free(const struct pool *pool)
{
    return (uint32_t)ledger_n(pool->slot_ledger, SLOT_FREE);
}

enum status pool_page_acquire(struct pool *pool, uint64_t owner, uint32_t *ret_page)
{
    size_t page;
    if (!ledger_take(pool->page_ledger, PAGE_FREE, PAGE_LIVE, owner, "sequence", &page)) {
        return STATUS_EXHAUSTED;
    }
    pool->pages[page].n_holders = 1;
    *ret_page = (uint32_t)page;
    return STATUS_OK;
}

void pool_page_share(struct pool *pool, uint32_t page)
{
    assert(pool->pages[page].n_holders > 0);
    pool->pages[page].n_holders++;
}

/* Where a page belongs by its counts. The owner of a page is the first that took it, also when
 * others share it. */
static void page_settle(struct pool *pool, uint32_t page)
{
    const struct page *p = &pool->pages[page];
    unsigned from = ledger_state(pool->page_ledger, page);
    unsigned to = p->n_puts ? PAGE_SENDING : p->n_holders ? PAGE_LIVE : PAGE_FREE;
    if (from != to) {
        uint64_t owner = to == PAGE_FREE ? 0 : ledger_owner(pool->page_ledger, page);
        const char *reason = to == PAGE_SENDING ? "put" : to == PAGE_LIVE ? "sequence" : NULL;
        ledger_move(pool->page_ledger, page, from, to, owner, reason);
    }
}

void pool_page_release(struct pool *pool, uint32_t page)
{
    assert(pool->pages[page].n_holders > 0);
    pool->pages[page].n_holders--;
    page_settle(pool, page);
}

void pool_page_sending(struct pool *pool, uint32_t page)
{
    assert(pool->pages[page].n_holders > 0);
    pool->pages[page].n_puts++;
    page_settle(pool, page);
}

void pool_page_sent(struct pool *pool, uint32_t page)
{
    assert(pool->pages[page].n_puts > 0);
    pool->pages[page].n_puts--;
    page_settle(pool, page);
}

enum status pool_slot_acquire(struct pool *pool, uint64_t owner, uint32_t *ret_slot)
{
    size_t slot;
    if (!ledger_take(pool->slot_ledger, SLOT_FREE, SLOT_LIVE, owner, "sequence", &slot)) {
        return STATUS_EXHAUSTED;
    }
    *ret_slot = (uint32_t)slot;
    return STATUS_OK;
}

void pool_slot_release(struct pool *pool, uint32_t slot)
{
    ledger_move(pool->slot_ledger, slot, SLOT_LIVE, SLOT_FREE, 0, NULL);
}

void pool_debug_json(const struct pool *pool, struct json_writer *w)
{
    json_begin_object(w);
    json_key(w, "pages");
    ledger_write_json(pool->page_ledger, w, 0);
    json_key(w, "slots");
    ledger_write_json(pool->slot_ledger, w, 0);
    json_end_object(w);
}

void pool_register(struct pool *pool, struct metrics *metrics)
{
    ledger_register(pool->page_ledger, metrics, "baton_ledger_items");
    ledger_register(pool->slot_ledger, metrics, "baton_ledger_items");
}
