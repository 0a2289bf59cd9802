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
#include "tests/lost.h"

/* A loop that is run until a condition holds or a time is over. One a test program. */
static struct loop *loop;
static struct rpc_core *core;

static void loop_tick(void *cookie)
{
    loop_stop(loop);
}

/* Runs the loop until *flag or for at most ms beside what the machine lost; returns *flag. */
__attribute__((unused)) static bool run_until(const bool *flag, unsigned ms)
{
    struct loop_timer *timer = loop_timer_create(loop, loop_tick, NULL);
    uint64_t begin_ns = loop_now_ns();
    while (!*flag && !lost_over(begin_ns, ms)) {
        loop_timer_arm(timer, 2 * NS_PER_MS);
        assert_int_equal(loop_run(loop), STATUS_OK);
    }
    loop_timer_free(timer);
    return *flag;
}

__attribute__((unused)) static void run_ms(unsigned ms)
{
    struct loop_timer *timer = loop_timer_create(loop, loop_tick, NULL);
    loop_timer_arm(timer, ms * NS_PER_MS);
    assert_int_equal(loop_run(loop), STATUS_OK);
    loop_timer_free(timer);
}

/* Runs the loop while the condition holds, for at most so long. */
#define RUN_WHILE(condition, ms)                                                          \
    for (uint64_t begin_ns_ = loop_now_ns(); (condition) && !lost_over(begin_ns_, ms);) { \
        run_ms(2);                                                                        \
    }

__attribute__((unused)) static int setup(void **state)
{
    struct error err = {""};
    lost_watch();
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
