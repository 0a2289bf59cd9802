#include "base/ledger.h"

#include <assert.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"

/*
 * Every item is a link in the ring of its state, in order of arrival; heads and items share one
 * array of links, so a move is a fixed number of stores. The invariant that matters, that counts
 * sum to n, holds because an item is unlinked from one ring and linked into another in the only
 * function that changes either count.
 */

struct link {
    uint32_t prev, next;
};

struct item {
    uint64_t owner;
    uint64_t since_ns;
    const char *reason;
    unsigned state;
};

/* What a gauge callback needs to know. */
struct gauge_cookie {
    struct ledger *ledger;
    unsigned state;
};

struct ledger {
    char *name;
    size_t n_items;
    size_t n_states;
    char *state_names[LEDGER_STATES_MAX];
    size_t counts[LEDGER_STATES_MAX];
    struct gauge_cookie cookies[LEDGER_STATES_MAX];
    struct item *items;
    struct link *links; /* the items, then one head per state */
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint32_t head(const struct ledger *ledger, unsigned state)
{
    return (uint32_t)(ledger->n_items + state);
}

static void link_last(struct ledger *ledger, unsigned state, uint32_t item)
{
    struct link *links = ledger->links;
    uint32_t at = head(ledger, state);
    uint32_t last = links[at].prev;
    links[item] = (struct link){.prev = last, .next = at};
    links[last].next = item;
    links[at].prev = item;
    ledger->counts[state]++;
}

static void unlink_item(struct ledger *ledger, unsigned state, uint32_t item)
{
    struct link *links = ledger->links;
    links[links[item].prev].next = links[item].next;
    links[links[item].next].prev = links[item].prev;
    ledger->counts[state]--;
}

struct ledger *ledger_create(const char *name, size_t n_items, const char *const *state_names,
                             size_t n_states)
{
    assert(n_states >= 1 && n_states <= LEDGER_STATES_MAX);
    assert(n_items < UINT32_MAX - LEDGER_STATES_MAX);
    struct ledger *ledger = mem_zalloc(sizeof(*ledger));
    ledger->name = mem_strdup(name);
    ledger->n_items = n_items;
    ledger->n_states = n_states;
    ledger->items = mem_array(n_items, sizeof(*ledger->items));
    ledger->links = mem_array(n_items + n_states, sizeof(*ledger->links));
    for (unsigned s = 0; s < n_states; s++) {
        uint32_t at = head(ledger, s);
        ledger->state_names[s] = mem_strdup(state_names[s]);
        ledger->links[at] = (struct link){.prev = at, .next = at};
    }
    uint64_t now = now_ns();
    for (size_t i = 0; i < n_items; i++) {
        ledger->items[i].since_ns = now;
        link_last(ledger, 0, (uint32_t)i);
    }
    return ledger;
}

void ledger_free(struct ledger *ledger)
{
    if (ledger == NULL) {
        return;
    }
    for (unsigned s = 0; s < ledger->n_states; s++) {
        mem_free(ledger->state_names[s]);
    }
    mem_free(ledger->items);
    mem_free(ledger->links);
    mem_free(ledger->name);
    mem_free(ledger);
}

void ledger_move(struct ledger *ledger, size_t item, unsigned from, unsigned to, uint64_t owner,
                 const char *reason)
{
    assert(item < ledger->n_items && to < ledger->n_states);
    assert(ledger->items[item].state == from && "the item is not where its mover thinks");
    unlink_item(ledger, from, (uint32_t)item);
    link_last(ledger, to, (uint32_t)item);
    ledger->items[item] =
        (struct item){.owner = owner, .since_ns = now_ns(), .reason = reason, .state = to};
}

bool ledger_take(struct ledger *ledger, unsigned from, unsigned to, uint64_t owner,
                 const char *reason, size_t *ret_item)
{
    int64_t item = ledger_first(ledger, from);
    if (item < 0) {
        return false;
    }
    ledger_move(ledger, (size_t)item, from, to, owner, reason);
    *ret_item = (size_t)item;
    return true;
}

size_t ledger_n(const struct ledger *ledger, unsigned state)
{
    assert(state < ledger->n_states);
    return ledger->counts[state];
}

size_t ledger_n_items(const struct ledger *ledger)
{
    return ledger->n_items;
}

static const struct item *item_at(const struct ledger *ledger, size_t item)
{
    assert(item < ledger->n_items);
    return &ledger->items[item];
}

unsigned ledger_state(const struct ledger *ledger, size_t item)
{
    return item_at(ledger, item)->state;
}

uint64_t ledger_owner(const struct ledger *ledger, size_t item)
{
    return item_at(ledger, item)->owner;
}

uint64_t ledger_since_ns(const struct ledger *ledger, size_t item)
{
    return item_at(ledger, item)->since_ns;
}

const char *ledger_reason(const struct ledger *ledger, size_t item)
{
    return item_at(ledger, item)->reason;
}

static int64_t item_or_end(const struct ledger *ledger, uint32_t link)
{
    return link < ledger->n_items ? (int64_t)link : -1;
}

int64_t ledger_first(const struct ledger *ledger, unsigned state)
{
    assert(state < ledger->n_states);
    return item_or_end(ledger, ledger->links[head(ledger, state)].next);
}

int64_t ledger_next(const struct ledger *ledger, size_t item)
{
    assert(item < ledger->n_items);
    return item_or_end(ledger, ledger->links[item].next);
}

void ledger_write_json(const struct ledger *ledger, struct json_writer *writer, size_t max_items)
{
    uint64_t now = now_ns();
    size_t written = 0, held = ledger->n_items - ledger->counts[0];
    json_begin_object(writer);
    json_pair_string(writer, "name", ledger->name);
    json_pair_uint(writer, "total", ledger->n_items);
    json_key(writer, "states");
    json_begin_object(writer);
    for (unsigned s = 0; s < ledger->n_states; s++) {
        json_pair_uint(writer, ledger->state_names[s], ledger->counts[s]);
    }
    json_end_object(writer);
    json_key(writer, "items");
    json_begin_array(writer);
    for (unsigned s = 1; s < ledger->n_states; s++) {
        for (int64_t i = ledger_first(ledger, s); i >= 0; i = ledger_next(ledger, (size_t)i)) {
            if (max_items != 0 && written == max_items) {
                break;
            }
            const struct item *item = &ledger->items[i];
            json_begin_object(writer);
            json_pair_int(writer, "item", i);
            json_pair_string(writer, "state", ledger->state_names[s]);
            json_pair_uint(writer, "owner", item->owner);
            json_pair_real(writer, "age_seconds", (double)((now - item->since_ns) / 1000000) / 1e3);
            json_pair_string(writer, "reason", item->reason);
            json_end_object(writer);
            written++;
        }
    }
    json_end_array(writer);
    json_pair_uint(writer, "items_left_out", held - written);
    json_end_object(writer);
}

static double gauge_value(void *cookie)
{
    const struct gauge_cookie *which = cookie;
    return (double)which->ledger->counts[which->state];
}

void ledger_register(struct ledger *ledger, struct metrics *metrics, const char *metric)
{
    for (unsigned s = 0; s < ledger->n_states; s++) {
        ledger->cookies[s] = (struct gauge_cookie){.ledger = ledger, .state = s};
        metrics_gauge_call(
            metrics, metric, "Items of a ledger in each state.",
            METRIC_LABELS({"ledger", ledger->name}, {"state", ledger->state_names[s]}), gauge_value,
            &ledger->cookies[s]);
    }
}
