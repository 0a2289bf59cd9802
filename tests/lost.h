/* tests/lost.h - the time that the machine did not give.
 *
 * "A stop is seen within 2 s" can be kept only where there is a processor to keep it on. A machine
 * that others use too takes processors away, now and then for most of a second. So threads tick,
 * one on each processor: where a tick comes late nothing of ours ran there. What lies between two
 * instants of such spells, on any processor, is lost, and a bound is its limit and what was lost.
 * The ticks know nothing of what is tested: what is slow or late by itself stays so, and fails.
 *
 * Instants are those of loop_now_ns. Python has the same by tests/lost.py.
 */
#ifndef BATON_TESTS_LOST_H
#define BATON_TESTS_LOST_H

#include <stdbool.h>
#include <stdint.h>

/* Starts the ticks, once a process; before the first instant that is asked about. */
void lost_watch(void);

/* How much of [from_ns, to_ns) was lost. Waits for the ticks that tell it, some milliseconds. */
uint64_t lost_ns(uint64_t from_ns, uint64_t to_ns);

/* Whether it took at most limit_ms beside what was lost; says so where it took more. */
bool lost_within(const char *what, uint64_t from_ns, uint64_t to_ns, unsigned limit_ms);
#define assert_within(what, from_ns, to_ns, limit_ms) \
    assert_true(lost_within(what, from_ns, to_ns, limit_ms))

/* Whether ms, beside what was lost, have passed since from_ns: the end of a wait. */
bool lost_over(uint64_t from_ns, uint64_t ms);

#endif
