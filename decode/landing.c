/* See landing.h. Slots are few (some dozens), so what is done by owner walks the ledger's list of a
 * state instead of keeping an index that could disagree with it.
 */
#include "decode/landing.h"

#include <string.h>

#include "base/json.h"
#include "base/ledger.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "engine/engine.h"
#include "transport/region.h"

enum slot_state { SLOT_FREE, SLOT_GRANTED, SLOT_LANDED, SLOT_REVOKED, N_SLOT_STATES };
static const char *const slot_state_names[] = {"free", "granted", "landed", "revoked"};

struct landing {
    struct region *region;
    struct engine *device; /* NULL: host memory */
    struct ledger *ledger;
    struct metric_histogram *revoked_seconds; /* NULL until registered */
    struct loop_timer *sweep;
    size_t slot_bytes;
    uint32_t n_slots;
    void (*freed)(void *cookie);
    void *cookie;
};

static const double revoked_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                        0.25,  0.5,    1,     2.5,  5,     11};

static void revoked_free(struct landing *landing, size_t slot, uint64_t now_ns)
{
    if (landing->revoked_seconds) {
        uint64_t waited_ns = now_ns - ledger_since_ns(landing->ledger, slot);
        metric_histogram_observe(landing->revoked_seconds, (double)waited_ns * 1e-9);
    }
    ledger_move(landing->ledger, slot, SLOT_REVOKED, SLOT_FREE, 0, NULL);
}

/* Frees what has been revoked long enough and sleeps until the next is due. */
static void sweep(void *cookie)
{
    struct landing *landing = cookie;
    uint64_t now_ns = loop_now_ns();
    bool any = false;
    int64_t slot;
    while ((slot = ledger_first(landing->ledger, SLOT_REVOKED)) >= 0) {
        uint64_t due_ns =
            ledger_since_ns(landing->ledger, (size_t)slot) + LANDING_REVOKED_MS * NS_PER_MS;
        if (due_ns > now_ns) {
            loop_timer_arm(landing->sweep, due_ns - now_ns);
            break;
        }
        revoked_free(landing, (size_t)slot, now_ns);
        any = true;
    }
    if (any) {
        landing->freed(landing->cookie);
    }
}

enum status landing_create(struct loop *loop, struct region *region, size_t slot_bytes,
                           struct engine *device, void (*freed)(void *cookie), void *cookie,
                           struct landing **ret_landing, struct error *err)
{
    size_t n_slots = region_bytes(region) / slot_bytes;
    if (n_slots == 0 || n_slots > UINT32_MAX) {
        return error_set(err, STATUS_INVALID, "a landing area of %zu slots", n_slots);
    }
    struct landing *landing = mem_zalloc(sizeof(*landing));
    landing->region = region;
    landing->device = device;
    landing->ledger = ledger_create("landing_slots", n_slots, slot_state_names, N_SLOT_STATES);
    landing->sweep = loop_timer_create(loop, sweep, landing);
    landing->slot_bytes = slot_bytes;
    landing->n_slots = (uint32_t)n_slots;
    landing->freed = freed;
    landing->cookie = cookie;
    *ret_landing = landing;
    return STATUS_OK;
}

void landing_free(struct landing *landing)
{
    if (landing) {
        loop_timer_free(landing->sweep);
        ledger_free(landing->ledger);
        mem_free(landing);
    }
}

struct region *landing_region(const struct landing *landing)
{
    return landing->region;
}

uint32_t landing_n_slots(const struct landing *landing)
{
    return landing->n_slots;
}

size_t landing_slot_bytes(const struct landing *landing)
{
    return landing->slot_bytes;
}

uint32_t landing_n_free(const struct landing *landing)
{
    return (uint32_t)ledger_n(landing->ledger, SLOT_FREE);
}

uint8_t *landing_slot(const struct landing *landing, uint32_t slot)
{
    return region_base(landing->region) + (size_t)slot * landing->slot_bytes;
}

bool landing_on_device(const struct landing *landing)
{
    return landing->device != NULL;
}

enum status landing_read(const struct landing *landing, const uint8_t *at, size_t bytes,
                         void *ret_bytes)
{
    if (landing->device) {
        return engine_device_move(landing->device, ret_bytes, at, bytes);
    }
    memcpy(ret_bytes, at, bytes);
    return STATUS_OK;
}

uint32_t landing_grant(struct landing *landing, uint64_t owner, uint32_t n, uint32_t *ret_slots)
{
    uint32_t n_got = 0;
    size_t slot;
    while (n_got < n &&
           ledger_take(landing->ledger, SLOT_FREE, SLOT_GRANTED, owner, "transfer", &slot)) {
        ret_slots[n_got++] = (uint32_t)slot;
    }
    return n_got;
}

bool landing_land(struct landing *landing, uint32_t slot, uint64_t owner)
{
    if (slot >= landing->n_slots || ledger_state(landing->ledger, slot) != SLOT_GRANTED ||
        ledger_owner(landing->ledger, slot) != owner) {
        return false;
    }
    ledger_move(landing->ledger, slot, SLOT_GRANTED, SLOT_LANDED, owner, "accepting");
    return true;
}

void landing_release(struct landing *landing, uint32_t slot)
{
    ledger_move(landing->ledger, slot, SLOT_LANDED, SLOT_FREE, 0, NULL);
    landing->freed(landing->cookie);
}

uint32_t landing_revoke(struct landing *landing, uint64_t owner)
{
    uint32_t n = 0;
    int64_t next;
    for (int64_t slot = ledger_first(landing->ledger, SLOT_GRANTED); slot >= 0; slot = next) {
        next = ledger_next(landing->ledger, (size_t)slot);
        if (ledger_owner(landing->ledger, (size_t)slot) == owner) {
            ledger_move(landing->ledger, (size_t)slot, SLOT_GRANTED, SLOT_REVOKED, owner,
                        "waits for its writer to fall silent");
            n++;
        }
    }
    if (n && !loop_timer_armed(landing->sweep)) {
        loop_timer_arm(landing->sweep, LANDING_REVOKED_MS * NS_PER_MS);
    }
    return n;
}

void landing_drained(struct landing *landing, uint64_t owner)
{
    uint64_t now_ns = loop_now_ns();
    bool any = false;
    int64_t next;
    for (int64_t slot = ledger_first(landing->ledger, SLOT_REVOKED); slot >= 0; slot = next) {
        next = ledger_next(landing->ledger, (size_t)slot);
        if (ledger_owner(landing->ledger, (size_t)slot) == owner) {
            revoked_free(landing, (size_t)slot, now_ns);
            any = true;
        }
    }
    if (any) {
        landing->freed(landing->cookie);
    }
}

void landing_register(struct landing *landing, struct metrics *metrics)
{
    ledger_register(landing->ledger, metrics, "baton_ledger_items");
    landing->revoked_seconds = metrics_histogram(
        metrics, "baton_landing_revoked_seconds",
        "How long a slot that was taken back from its writer waited until it was free.",
        revoked_bounds, sizeof(revoked_bounds) / sizeof(revoked_bounds[0]), METRIC_NO_LABELS);
}

void landing_debug_json(const struct landing *landing, struct json_writer *w)
{
    ledger_write_json(landing->ledger, w, 0);
}
