/* tests/test_lost.c - the ticks of lost.h: what was taken from this process is lost, once, and to
 * the bounds of the question; what the process spends by itself is not.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/loop.h"
#include "tests/lost.h"

static void sleep_ms(unsigned ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
    while (nanosleep(&time, &time) != 0) {
    }
}

/* Whether a process is stopped by now: one of its threads has to run for that. */
static bool is_stopped(pid_t pid)
{
    char path[32], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return true;
    }
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    return line == NULL || strstr(line, ") T ") != NULL;
}

/* Another process stops this one for so long, and tells at which instants. */
static void stand_still(unsigned ms, uint64_t *ret_from_ns, uint64_t *ret_to_ns)
{
    uint64_t told[2];
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        kill(getppid(), SIGSTOP);
        while (!is_stopped(getppid())) {
        }
        told[0] = loop_now_ns();
        sleep_ms(ms);
        told[1] = loop_now_ns();
        kill(getppid(), SIGCONT);
        _exit(write(fds[1], told, sizeof told) != sizeof told);
    }
    assert_int_equal(read(fds[0], told, sizeof told), sizeof told);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    close(fds[0]);
    close(fds[1]);
    *ret_from_ns = told[0];
    *ret_to_ns = told[1];
}

static void test_stopped(void **state)
{
    uint64_t from_ns, to_ns;
    uint64_t before_ns = loop_now_ns();
    sleep_ms(50);
    stand_still(400, &from_ns, &to_ns);
    uint64_t after_ns = loop_now_ns();
    double took_ms = (double)(to_ns - from_ns) / 1e6;
    double lost_ms = (double)lost_ns(before_ns, after_ns) / 1e6;
    print_message("stopped for %.1f ms: lost %.1f ms\n", took_ms, lost_ms);
    /* a tick may be on its way as the first thread stops; the rest was not ours */
    assert_true(lost_ms >= took_ms - 20);
    assert_true(lost_ms <= (double)(after_ns - before_ns) / 1e6);
    /* half of it, and what comes after it */
    lost_ms = (double)lost_ns(from_ns + 100 * NS_PER_MS, from_ns + 300 * NS_PER_MS) / 1e6;
    assert_true(lost_ms > 199.9 && lost_ms < 200.1);
    assert_true(lost_within("a stop of 400 ms", from_ns, to_ns, 50));
    assert_false(lost_over(from_ns, (after_ns - from_ns) / NS_PER_MS));
}

/* The time that we take ourselves is ours, asleep or not. A machine that takes nothing for half a
 * second is not to be had everywhere: what it takes is taken off. */
static void test_ours(void **state)
{
    for (int busy = 0; busy < 2; busy++) {
        uint64_t from_ns = loop_now_ns(), to_ns = from_ns;
        if (!busy) {
            sleep_ms(500);
        }
        while ((to_ns = loop_now_ns()) < from_ns + 500 * NS_PER_MS) {
        }
        for (int tries = 0; lost_ns(from_ns, to_ns) > 100 * NS_PER_MS && tries < 20; tries++) {
            from_ns = loop_now_ns(); /* a bad moment */
            while ((to_ns = loop_now_ns()) < from_ns + 500 * NS_PER_MS) {
            }
        }
        print_message("%s for %.0f ms: lost %.1f ms\n", busy ? "busy" : "asleep",
                      (double)(to_ns - from_ns) / 1e6, (double)lost_ns(from_ns, to_ns) / 1e6);
        if (lost_ns(from_ns, to_ns) > 100 * NS_PER_MS) {
            print_message("a machine that takes that much at all times can't tell\n");
            skip();
        }
        assert_false(lost_within("500 ms", from_ns, to_ns, 350));
        assert_true(lost_over(from_ns, 350));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stopped),
        cmocka_unit_test(test_ours),
    };
    lost_watch();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
