/* Event loop: order, cancel promises, timers under a flood, mailbox from several threads. */
#include "base/loop.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/lost.h"

static struct loop *loop;

static int setup(void **state)
{
    return loop_create(&loop);
}

static int teardown(void **state)
{
    loop_free(loop);
    return 0;
}

static void run(void)
{
    assert_int_equal(loop_run(loop), STATUS_OK);
}

static void stop(void *cookie)
{
    loop_stop(loop);
}

static void count(void *cookie)
{
    ++*(int *)cookie;
}

/* --- timers --- */

static char order[64];
static char letter_a[] = "a", letter_b[] = "b", letter_1[] = "1", letter_2[] = "2";

static void note(void *cookie)
{
    strncat(order, cookie, sizeof(order) - strlen(order) - 1);
}

static void test_timer_order_and_not_early(void **state)
{
    struct loop_timer *a = loop_timer_create(loop, note, letter_a);
    struct loop_timer *b = loop_timer_create(loop, note, letter_b);
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);
    uint64_t start = loop_now_ns();

    order[0] = '\0';
    loop_timer_arm(a, 10 * NS_PER_MS);
    loop_timer_arm(b, 5 * NS_PER_MS);
    loop_timer_arm(end, 20 * NS_PER_MS);
    assert_true(loop_timer_armed(a));
    run();
    assert_true(loop_now_ns() - start >= 20 * NS_PER_MS);
    assert_string_equal(order, "ba");
    assert_false(loop_timer_armed(a));
    loop_timer_free(a);
    loop_timer_free(b);
    loop_timer_free(end);
    loop_timer_free(NULL);
}

static void test_timer_counts_from_the_arm_not_from_the_turn(void **state)
{
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);
    uint64_t start = loop_now_ns();

    while (loop_now_ns() - start < 30 * NS_PER_MS) {
    }
    loop_timer_arm(end, 20 * NS_PER_MS);
    run();
    assert_true(loop_now_ns() - start >= 50 * NS_PER_MS);
    loop_timer_free(end);
}

enum { N_MANY = 3000 };

static struct many {
    struct loop_timer *timer;
    /* when it is due, by the clock before and behind its arming; 0: it is not armed */
    uint64_t from_ns, to_ns;
    unsigned n_runs;
} many[N_MANY];
static uint64_t many_last_ns;
static unsigned many_n_wrong;

static void many_run(void *cookie)
{
    struct many *one = cookie;

    one->n_runs++;
    many_n_wrong += one->to_ns < many_last_ns || loop_now_ns() < one->from_ns;
    many_last_ns = one->from_ns > many_last_ns ? one->from_ns : many_last_ns;
}

/* Armed, moved and disarmed in any order, each runs once, in time and in order. */
static void test_timers_many(void **state)
{
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);
    unsigned seed = 7, n_armed = 0;

    for (int i = 0; i < N_MANY; i++) {
        many[i].timer = loop_timer_create(loop, many_run, &many[i]);
    }
    for (int i = 0; i < 4 * N_MANY; i++) {
        struct many *one = &many[rand_r(&seed) % N_MANY];
        uint64_t delay_ns = (60 + (unsigned)rand_r(&seed) % 100) * NS_PER_MS;

        if (rand_r(&seed) % 4 == 0) {
            loop_timer_disarm(one->timer);
            one->to_ns = 0;
            continue;
        }
        one->from_ns = loop_now_ns() + delay_ns;
        loop_timer_arm(one->timer, delay_ns);
        one->to_ns = loop_now_ns() + delay_ns;
    }
    for (int i = 0; i < N_MANY; i++) {
        assert_int_equal(loop_timer_armed(many[i].timer), many[i].to_ns != 0);
        n_armed += many[i].to_ns != 0;
    }
    loop_timer_arm(end, 300 * NS_PER_MS);
    run();
    for (int i = 0; i < N_MANY; i++) {
        assert_int_equal(many[i].n_runs, many[i].to_ns != 0);
        assert_false(loop_timer_armed(many[i].timer));
        loop_timer_free(many[i].timer);
    }
    assert_true(n_armed > N_MANY / 2);
    assert_int_equal(many_n_wrong, 0);
    loop_timer_free(end);
}

static struct loop_timer *twin[2];

/* Both are due in the same turn: whichever runs first takes the other away. */
static void disarm_other(void *cookie)
{
    int self = *(int *)cookie;

    strcat(order, "x");
    loop_timer_disarm(twin[!self]);
}

static void free_other(void *cookie)
{
    int self = *(int *)cookie;

    strcat(order, "y");
    loop_timer_free(twin[!self]);
    twin[!self] = NULL;
}

static void test_timer_disarmed_when_already_due(void **state)
{
    static int ids[2] = {0, 1};
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);

    for (int pass = 0; pass < 2; pass++) {
        order[0] = '\0';
        for (int i = 0; i < 2; i++) {
            twin[i] = loop_timer_create(loop, pass ? free_other : disarm_other, &ids[i]);
            loop_timer_arm(twin[i], 0);
        }
        usleep(2000);
        loop_timer_arm(end, 10 * NS_PER_MS);
        run();
        assert_string_equal(order, pass ? "y" : "x");
        loop_timer_free(twin[0]);
        loop_timer_free(twin[1]);
    }
    loop_timer_free(end);
}

/* --- deferred calls --- */

static uint64_t turn_first;
static uint64_t turn_second;

static void second(void *cookie)
{
    turn_second = loop_n_turns(loop);
    loop_stop(loop);
}

static void first(void *cookie)
{
    turn_first = loop_n_turns(loop);
    loop_defer(loop, second, NULL);
}

static void test_deferred_from_deferred_waits_a_turn(void **state)
{
    loop_defer(loop, first, NULL);
    run();
    assert_int_equal(turn_second, turn_first + 1);
}

static void cancel_count(void *cookie)
{
    loop_defer_cancel(loop, count, cookie);
}

static void test_defer_order_and_cancel(void **state)
{
    int n = 0;

    order[0] = '\0';
    loop_defer(loop, note, letter_1);
    loop_defer(loop, note, letter_2);
    loop_defer(loop, cancel_count, &n);
    loop_defer(loop, count, &n); /* cancelled by its forerunner in the same turn */
    loop_defer(loop, stop, NULL);
    run();
    assert_string_equal(order, "12");
    assert_int_equal(n, 0);
}

/* --- signals and descriptors --- */

static void test_signal(void **state)
{
    struct loop_signal *sig = NULL;
    struct sigaction before;
    struct sigaction after;

    sigaction(SIGUSR1, NULL, &before);
    assert_int_equal(loop_signal_create(loop, SIGUSR1, stop, NULL, &sig), STATUS_OK);
    kill(getpid(), SIGUSR1);
    run();
    loop_signal_free(sig);
    sigaction(SIGUSR1, NULL, &after);
    assert_ptr_equal(before.sa_handler, after.sa_handler);
}

struct pipe_case {
    int fds[2];
    struct loop_fd *watch;
    int n;
};

static void on_pipe(void *cookie, unsigned events)
{
    struct pipe_case *c = cookie;
    char byte;

    assert_int_equal(events, LOOP_READ);
    assert_int_equal(read(c->fds[0], &byte, 1), 1);
    if (++c->n == 3) {
        loop_fd_free(c->watch); /* inside its own callback, with bytes left */
        c->watch = NULL;
        loop_stop(loop);
    }
}

static void test_fd_watch(void **state)
{
    struct pipe_case c = {.n = 0};
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);

    assert_int_equal(pipe(c.fds), 0);
    assert_int_equal(loop_fd_create(loop, c.fds[0], 0, on_pipe, &c, &c.watch), STATUS_OK);
    assert_int_equal(write(c.fds[1], "abcd", 4), 4);
    loop_timer_arm(end, 5 * NS_PER_MS);
    run();
    assert_int_equal(c.n, 0); /* watched nothing */
    assert_int_equal(loop_fd_set(c.watch, LOOP_READ), STATUS_OK);
    run();
    assert_int_equal(c.n, 3);
    close(c.fds[0]);
    close(c.fds[1]);
    loop_timer_free(end);
}

/* --- mailbox --- */

enum {
    N_POSTERS = 4,
    N_EACH = 20000,
    FLOOD_CAPACITY = 512,
};

struct flood {
    struct mailbox *mailbox;
    uintptr_t next[N_POSTERS]; /* what each thread must post next, if order holds */
    size_t n;
    atomic_uint n_full;
};

struct poster {
    struct flood *flood;
    uintptr_t id;
};

static void *post_all(void *arg)
{
    struct poster *poster = arg;

    for (uintptr_t i = 0; i < N_EACH; i++) {
        void *msg = (void *)((i * N_POSTERS + poster->id) + 1);

        while (mailbox_post(poster->flood->mailbox, msg) != STATUS_OK) {
            atomic_fetch_add(&poster->flood->n_full, 1);
            sched_yield();
        }
    }
    return NULL;
}

static void on_flood(void *cookie, void *msg)
{
    struct flood *flood = cookie;
    uintptr_t value = (uintptr_t)msg - 1;

    assert_int_equal(value / N_POSTERS, flood->next[value % N_POSTERS]);
    flood->next[value % N_POSTERS]++;
    if (++flood->n == (size_t)N_POSTERS * N_EACH) {
        loop_stop(loop);
    }
}

static void test_mailbox_keeps_order_of_each_thread(void **state)
{
    struct flood flood = {.n = 0};
    struct poster posters[N_POSTERS];
    pthread_t threads[N_POSTERS];

    assert_int_equal(mailbox_create(loop, FLOOD_CAPACITY, on_flood, &flood, &flood.mailbox),
                     STATUS_OK);
    for (uintptr_t i = 0; i < N_POSTERS; i++) {
        posters[i].flood = &flood;
        posters[i].id = i;
        pthread_create(&threads[i], NULL, post_all, &posters[i]);
    }
    run();
    for (int i = 0; i < N_POSTERS; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(mailbox_depth(flood.mailbox), 0);
    assert_in_range(mailbox_depth_max(flood.mailbox), 1, FLOOD_CAPACITY);
    mailbox_free(flood.mailbox);
}

static int n_handled;

/* Each message posts its successor: a mailbox that never runs dry. */
static void on_endless(void *cookie, void *msg)
{
    n_handled++;
    assert_int_equal(mailbox_post(*(struct mailbox **)cookie, msg), STATUS_OK);
}

static void test_timer_not_starved_by_mailbox(void **state)
{
    struct mailbox *mailbox = NULL;
    struct loop_timer *end = loop_timer_create(loop, stop, NULL);
    uint64_t start = loop_now_ns();

    n_handled = 0;
    assert_int_equal(mailbox_create(loop, 8, on_endless, &mailbox, &mailbox), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &n_handled), STATUS_OK);
    loop_timer_arm(end, 20 * NS_PER_MS);
    run();
    assert_within("a timer of 20 ms", start, loop_now_ns(), 1000);
    assert_true(n_handled > 256);
    mailbox_free(mailbox);
    loop_timer_free(end);
}

static void on_full(void *cookie, void *msg)
{
    fail();
}

static void test_mailbox_full_and_take(void **state)
{
    struct mailbox *mailbox = NULL;
    int messages[3];

    assert_int_equal(mailbox_create(loop, 2, on_full, NULL, &mailbox), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &messages[0]), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &messages[1]), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &messages[2]), STATUS_EXHAUSTED);
    assert_int_equal(mailbox_depth(mailbox), 2);
    assert_ptr_equal(mailbox_take(mailbox), &messages[0]);
    assert_int_equal(mailbox_post(mailbox, &messages[2]), STATUS_OK);
    assert_ptr_equal(mailbox_take(mailbox), &messages[1]);
    assert_ptr_equal(mailbox_take(mailbox), &messages[2]);
    assert_null(mailbox_take(mailbox));
    loop_defer(loop, stop, NULL);
    run(); /* emptied: fn must not run */
    mailbox_free(mailbox);
}

static void on_last(void *cookie, void *msg)
{
    struct mailbox **mailbox = cookie;

    n_handled++;
    mailbox_free(*mailbox); /* a second message is inside */
    *mailbox = NULL;
    loop_stop(loop);
}

static void test_mailbox_freed_by_its_message(void **state)
{
    struct mailbox *mailbox = NULL;

    n_handled = 0;
    assert_int_equal(mailbox_create(loop, 2, on_last, &mailbox, &mailbox), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &n_handled), STATUS_OK);
    assert_int_equal(mailbox_post(mailbox, &n_handled), STATUS_OK);
    run();
    assert_int_equal(n_handled, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_timer_order_and_not_early, setup, teardown),
        cmocka_unit_test_setup_teardown(test_timer_counts_from_the_arm_not_from_the_turn, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_timers_many, setup, teardown),
        cmocka_unit_test_setup_teardown(test_timer_disarmed_when_already_due, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deferred_from_deferred_waits_a_turn, setup, teardown),
        cmocka_unit_test_setup_teardown(test_defer_order_and_cancel, setup, teardown),
        cmocka_unit_test_setup_teardown(test_signal, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fd_watch, setup, teardown),
        cmocka_unit_test_setup_teardown(test_mailbox_keeps_order_of_each_thread, setup, teardown),
        cmocka_unit_test_setup_teardown(test_timer_not_starved_by_mailbox, setup, teardown),
        cmocka_unit_test_setup_teardown(test_mailbox_full_and_take, setup, teardown),
        cmocka_unit_test_setup_teardown(test_mailbox_freed_by_its_message, setup, teardown),
    };

    lost_watch();
    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
