#ifndef BATON_TESTS_RPC_TEST_H
#define BATON_TESTS_RPC_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "rpc/core.h"

/* A loop that is run until a condition holds or a time is over. One a test program. */
static struct loop *loop;
static struct rpc_core *core;

static void loop_tick(void *cookie)
{
    loop_stop(loop);
}

/* The longest that one turn of run_until took since it was last set to 0: a machine that had no
 * time for this process shows here, a peer that was noticed late does not. */
static uint64_t longest_turn_ns;

/* Runs the loop until *flag or for at most ms; returns *flag. */
__attribute__((unused)) static bool run_until(const bool *flag, unsigned ms)
{
    struct loop_timer *timer = loop_timer_create(loop, loop_tick, NULL);
    uint64_t end_ns = loop_now_ns() + ms * NS_PER_MS;
    while (!*flag && loop_now_ns() < end_ns) {
        loop_timer_arm(timer, 2 * NS_PER_MS);
        uint64_t turn_ns = loop_now_ns();
        assert_int_equal(loop_run(loop), STATUS_OK);
        turn_ns = loop_now_ns() - turn_ns;
        longest_turn_ns = turn_ns > longest_turn_ns ? turn_ns : longest_turn_ns;
    }
    loop_timer_free(timer);
    return *flag;
}

__attribute__((unused)) static void run_ms(unsigned ms)
{
    bool never = false;
    run_until(&never, ms);
}

__attribute__((unused)) static int setup(void **state)
{
    struct error err = {""};
    assert_int_equal(loop_create(&loop), STATUS_OK);
    assert_int_equal(rpc_core_create(loop, &core, &err), STATUS_OK);
    return 0;
}

__attribute__((unused)) static int teardown(void **state)
{
    rpc_core_free(core);
    loop_free(loop);
    return 0;
}

#endif
