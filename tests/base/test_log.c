/* Where a line goes that nobody takes: nowhere, at once, and it is counted. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/log.h"

enum { LINES = 2000 };

/* All that lies in the pipe, as text. */
static size_t drain(int fd, char *text, size_t text_bytes)
{
    size_t n = 0;
    ssize_t got;
    while (n + 1 < text_bytes && (got = read(fd, text + n, text_bytes - 1 - n)) > 0) {
        n += (size_t)got;
    }
    text[n] = '\0';
    return n;
}

/* Lines into a pipe that is read only afterwards; an alarm ends the test where it would hang. */
static void test_reader_stands_still(void **state)
{
    static char text[1 << 20];
    int ends[2], before = dup(STDERR_FILENO);
    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_true(fcntl(ends[0], F_SETFL, O_NONBLOCK) >= 0);
    assert_int_equal(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
    alarm(20);
    for (int i = 0; i < LINES; i++) {
        log_error("test", "line %d of many, which together are more than a pipe holds", i);
    }
    drain(ends[0], text, sizeof(text));
    unsigned n_written = 0;
    for (const char *p = text; (p = strstr(p, " of many")); p++) {
        n_written++;
    }
    log_error("test", "after the pipe was read");
    log_error("test", "and once more");
    alarm(0);
    dup2(before, STDERR_FILENO);
    close(before);
    assert_true(n_written > 100 && n_written < LINES);
    assert_non_null(strstr(text, "line 0 of many"));

    char want[80];
    drain(ends[0], text, sizeof(text));
    snprintf(want, sizeof(want), "log: %u lines could not be written\n", LINES - n_written);
    assert_non_null(strstr(text, want));
    assert_non_null(strstr(text, "after the pipe was read\n"));
    assert_non_null(strstr(text, "and once more\n"));
    assert_null(strstr(strstr(text, want) + strlen(want), "could not be written"));
    close(ends[0]);
    close(ends[1]);
}

/* A full disk takes nothing either. */
static void test_full_disk(void **state)
{
    int before = dup(STDERR_FILENO), full = open("/dev/full", O_WRONLY | O_CLOEXEC);
    (void)state;
    if (full < 0) {
        close(before);
        skip();
    }
    dup2(full, STDERR_FILENO);
    log_error("test", "lost");
    log_error("test", "lost too");
    int ends[2];
    char text[4096];
    assert_int_equal(pipe(ends), 0);
    assert_true(fcntl(ends[0], F_SETFL, O_NONBLOCK) >= 0);
    dup2(ends[1], STDERR_FILENO);
    log_error("test", "taken");
    dup2(before, STDERR_FILENO);
    drain(ends[0], text, sizeof(text));
    assert_non_null(strstr(text, "log: 2 lines could not be written\n"));
    assert_non_null(strstr(text, "taken\n"));
    close(before);
    close(full);
    close(ends[0]);
    close(ends[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reader_stands_still),
        cmocka_unit_test(test_full_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
