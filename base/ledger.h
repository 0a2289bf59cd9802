#ifndef BATON_BASE_LEDGER_H
#define BATON_BASE_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "base/metrics.h"
#include "base/status.h"

/*
 * n items, numbered from 0, each in exactly one of a few named states, so that the counts always
 * sum to n. Pages, slots, landing slots and send buffers are kept in ledgers: a leak is then an
 * item that is not in state 0, with who holds it, since when and why. Every operation takes
 * constant time and allocates nothing. One thread at a time. Misuse is our own bug and asserted.
 */
struct ledger;

enum { LEDGER_STATES_MAX = 16 };

/*
 * All items start in state 0 (the free one), owner 0, in order of their number. name and
 * state_names are copied; state names are metric label values ("free", "landing", ...).
 */
struct ledger *ledger_create(const char *name, size_t n_items, const char *const *state_names,
                             size_t n_states) __attribute__((returns_nonnull)) must_check;

/* NULL is allowed. A metrics registry that ledger_register told of it must be gone before. */
void ledger_free(struct ledger *ledger);

/*
 * Moves an item from one state to another (or to the same, which renews its time and its place in
 * the queue). from must be the state that it is in. reason is a string of static life, or NULL.
 */
void ledger_move(struct ledger *ledger, size_t item, unsigned from, unsigned to, uint64_t owner,
                 const char *reason);

/*
 * Moves the item that has been longest in state from to state to, and gives its number; false when
 * there is none. So freed items are used again oldest first.
 */
bool ledger_take(struct ledger *ledger, unsigned from, unsigned to, uint64_t owner,
                 const char *reason, size_t *ret_item) must_check;

/* Items in a state; items in all. */
size_t ledger_n(const struct ledger *ledger, unsigned state);
size_t ledger_n_items(const struct ledger *ledger);

/* What is known of one item. */
unsigned ledger_state(const struct ledger *ledger, size_t item);
uint64_t ledger_owner(const struct ledger *ledger, size_t item);
uint64_t ledger_since_ns(const struct ledger *ledger, size_t item); /* CLOCK_MONOTONIC */
const char *ledger_reason(const struct ledger *ledger, size_t item);

/* Items of a state, longest in it first: -1 ends. To move items while stepping, ask next first. */
int64_t ledger_first(const struct ledger *ledger, unsigned state) must_check;
int64_t ledger_next(const struct ledger *ledger, size_t item) must_check;

/*
 * Writes one object: name, the count of each state, and every item that is not in state 0 with its
 * state, owner, age in seconds and reason, oldest first within a state; at most max_items of them
 * (0: all), and how many were left out.
 */
void ledger_write_json(const struct ledger *ledger, struct json_writer *writer, size_t max_items);

/*
 * Registers the gauge <metric>{ledger="<name>",state="<state>"} for each state. metric is a metric
 * name such as "baton_ledger_items". The ledger must outlive the registry.
 */
void ledger_register(struct ledger *ledger, struct metrics *metrics, const char *metric);

#endif
