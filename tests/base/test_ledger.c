#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/ledger.h"

enum { FREE, LANDING, LIVE, N_STATES };
static const char *const names[] = {"free", "landing", "live"};

static void test_oldest_first(void **state)
{
    struct ledger *ledger = ledger_create("pages", 3, names, N_STATES);
    size_t item = 99;
    for (size_t want = 0; want < 3; want++) {
        assert_true(ledger_take(ledger, FREE, LANDING, 7, "prompt", &item));
        assert_int_equal(item, want);
    }
    item = 99;
    assert_false(ledger_take(ledger, FREE, LANDING, 7, "prompt", &item));
    assert_int_equal(item, 99);
    ledger_move(ledger, 2, LANDING, FREE, 0, NULL);
    ledger_move(ledger, 0, LANDING, LIVE, 7, "decoding");
    ledger_move(ledger, 0, LIVE, FREE, 0, NULL);
    assert_true(ledger_take(ledger, FREE, LIVE, 8, "next", &item));
    assert_int_equal(item, 2);
    assert_true(ledger_take(ledger, FREE, LIVE, 8, "next", &item));
    assert_int_equal(item, 0);
    /* A move within one state renews the place in the queue. */
    ledger_move(ledger, 2, LIVE, LIVE, 9, "again");
    assert_int_equal(ledger_first(ledger, LIVE), 0);
    assert_int_equal(ledger_next(ledger, 0), 2);
    assert_int_equal(ledger_next(ledger, 2), -1);
    assert_int_equal(ledger_owner(ledger, 2), 9);
    assert_string_equal(ledger_reason(ledger, 2), "again");
    ledger_free(ledger);
    ledger_free(NULL);
}

/* Whatever is moved, the counts sum to n and each list holds exactly what its count says. */
static void test_counts_always_sum(void **state)
{
    enum { N = 200 };
    struct ledger *ledger = ledger_create("slots", N, names, N_STATES);
    unsigned seed = 3, model[N] = {0};
    for (int step = 0; step < 20000; step++) {
        size_t item = (size_t)rand_r(&seed) % N;
        unsigned to = (unsigned)rand_r(&seed) % N_STATES;
        uint64_t before = ledger_since_ns(ledger, item);
        ledger_move(ledger, item, model[item], to, item, "test");
        assert_true(ledger_since_ns(ledger, item) >= before);
        model[item] = to;
        size_t sum = 0;
        for (unsigned s = 0; s < N_STATES; s++) {
            sum += ledger_n(ledger, s);
        }
        assert_int_equal(sum, N);
    }
    for (unsigned s = 0; s < N_STATES; s++) {
        size_t n = 0;
        uint64_t since = 0;
        for (int64_t i = ledger_first(ledger, s); i >= 0; i = ledger_next(ledger, (size_t)i)) {
            assert_int_equal(model[i], s);
            assert_int_equal(ledger_state(ledger, (size_t)i), s);
            assert_true(ledger_since_ns(ledger, (size_t)i) >= since);
            since = ledger_since_ns(ledger, (size_t)i);
            n++;
        }
        assert_int_equal(n, ledger_n(ledger, s));
    }
    ledger_free(ledger);
}

static void test_listing(void **state)
{
    struct ledger *ledger = ledger_create("pages", 5, names, N_STATES);
    struct buf out = BUF_INIT;
    struct json_writer writer;
    struct json *root;
    ledger_move(ledger, 3, FREE, LIVE, UINT64_MAX / 2, "sequence");
    ledger_move(ledger, 1, FREE, LANDING, 5, "parcel 2 of 4");
    ledger_move(ledger, 2, FREE, LANDING, 6, NULL);
    json_writer_init(&writer, &out);
    ledger_write_json(ledger, &writer, 2);
    assert_int_equal(json_parse(out.data, out.bytes, NULL, &root, NULL), STATUS_OK);
    int64_t n;
    double age;
    const struct json *items = json_get(root, "items");
    assert_true(json_text_is(json_get(root, "name"), "pages"));
    assert_true(json_int(json_get(root, "total"), &n) && n == 5);
    assert_true(json_int(json_get(json_get(root, "states"), "free"), &n) && n == 2);
    assert_true(json_int(json_get(json_get(root, "states"), "landing"), &n) && n == 2);
    assert_true(json_int(json_get(root, "items_left_out"), &n) && n == 1);
    assert_int_equal(json_array_n(items), 2);
    const struct json *first = json_array_at(items, 0);
    assert_true(json_int(json_get(first, "item"), &n) && n == 1);
    assert_true(json_int(json_get(first, "owner"), &n) && n == 5);
    assert_true(json_text_is(json_get(first, "state"), "landing"));
    assert_true(json_text_is(json_get(first, "reason"), "parcel 2 of 4"));
    assert_true(json_number(json_get(first, "age_seconds"), &age) && age >= 0 && age < 60);
    assert_int_equal(json_kind_of(json_get(json_array_at(items, 1), "reason")), JSON_KIND_NULL);
    json_free(root);
    buf_fini(&out);
    ledger_free(ledger);
}

static void test_gauges(void **state)
{
    struct ledger *ledger = ledger_create("pages", 5, names, N_STATES);
    struct metrics *metrics = metrics_create();
    struct buf out = BUF_INIT;
    ledger_register(ledger, metrics, "baton_ledger_items");
    ledger_move(ledger, 4, FREE, LIVE, 1, "x");
    metrics_write(metrics, &out);
    assert_string_equal(buf_text(&out),
                        "# HELP baton_ledger_items Items of a ledger in each state.\n"
                        "# TYPE baton_ledger_items gauge\n"
                        "baton_ledger_items{ledger=\"pages\",state=\"free\"} 4\n"
                        "baton_ledger_items{ledger=\"pages\",state=\"landing\"} 0\n"
                        "baton_ledger_items{ledger=\"pages\",state=\"live\"} 1\n");
    buf_fini(&out);
    metrics_free(metrics);
    ledger_free(ledger);
}

/* Moving an item from a state that it is not in is our own bug, and ends the process. */
static void test_wrong_from_aborts(void **state)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        struct ledger *ledger = ledger_create("pages", 5, names, N_STATES);
        ledger_move(ledger, 0, LIVE, FREE, 1, "x");
        _exit(0);
    }
    int how;
    assert_int_equal(waitpid(pid, &how, 0), pid);
    assert_true(WIFSIGNALED(how) && WTERMSIG(how) == SIGABRT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oldest_first),      cmocka_unit_test(test_counts_always_sum),
        cmocka_unit_test(test_listing),           cmocka_unit_test(test_gauges),
        cmocka_unit_test(test_wrong_from_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
