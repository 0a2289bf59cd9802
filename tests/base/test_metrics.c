#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/metrics.h"

/*
 * With the argument "print" it prints one exposition that has a bit of everything, for the checkers
 * outside this program (check_metrics.py and promtool).
 */

static double answer(void *cookie)
{
    return *(const double *)cookie;
}

static double load = 0.25;

static struct metrics *everything(void)
{
    struct metrics *m = metrics_create();
    static const double bounds[] = {0.0001, 1, 2.5, 1e20};
    metric_counter_add(metrics_counter(m, "baton_requests_total", "Requests \\ by\nend.",
                                       METRIC_LABELS({"status", "ok"}, {"route", "/v1/chat"})),
                       UINT64_C(18446744073709551615));
    metric_counter_add(
        metrics_counter(m, "baton_requests_total", "Requests \\ by\nend.",
                        METRIC_LABELS({"status", "a\"b\\c\nd\xff\xe2\x82\xac"}, {"route", ""})),
        3);
    metric_gauge_set(metrics_gauge(m, "baton_pages", "Pages now.", METRIC_NO_LABELS), -0.1);
    metrics_gauge_call(m, "baton_load_ratio", "Load.", METRIC_NO_LABELS, answer, &load);
    struct metric_histogram *h =
        metrics_histogram(m, "baton_wait_seconds", "Waits.", bounds, 4, METRIC_NO_LABELS);
    metric_histogram_observe(h, 0.0001); /* a bound belongs to its own bucket */
    metric_histogram_observe(h, 0.5);
    metric_histogram_observe(h, INFINITY);
    h = metrics_histogram(m, "baton_wait_seconds", "Waits.", bounds, 4,
                          METRIC_LABELS({"side", "in"}));
    metric_histogram_observe(h, 2);
    metric_histogram_observe(h, NAN);
    return m;
}

static void test_exposition(void **state)
{
    struct metrics *m = everything();
    struct buf out = BUF_INIT;
    metrics_write(m, &out);
    assert_string_equal(
        buf_text(&out),
        "# HELP baton_requests_total Requests \\\\ by\\nend.\n"
        "# TYPE baton_requests_total counter\n"
        "baton_requests_total{route=\"/v1/chat\",status=\"ok\"} 18446744073709551615\n"
        "baton_requests_total{route=\"\",status=\"a\\\"b\\\\c\\nd\xef\xbf\xbd\xe2\x82\xac\"} 3\n"
        "# HELP baton_pages Pages now.\n"
        "# TYPE baton_pages gauge\n"
        "baton_pages -0.1\n"
        "# HELP baton_load_ratio Load.\n"
        "# TYPE baton_load_ratio gauge\n"
        "baton_load_ratio 0.25\n"
        "# HELP baton_wait_seconds Waits.\n"
        "# TYPE baton_wait_seconds histogram\n"
        "baton_wait_seconds_bucket{le=\"0.0001\"} 1\n"
        "baton_wait_seconds_bucket{le=\"1\"} 2\n"
        "baton_wait_seconds_bucket{le=\"2.5\"} 2\n"
        "baton_wait_seconds_bucket{le=\"1e+20\"} 2\n"
        "baton_wait_seconds_bucket{le=\"+Inf\"} 3\n"
        "baton_wait_seconds_sum +Inf\n"
        "baton_wait_seconds_count 3\n"
        "baton_wait_seconds_bucket{side=\"in\",le=\"0.0001\"} 0\n"
        "baton_wait_seconds_bucket{side=\"in\",le=\"1\"} 0\n"
        "baton_wait_seconds_bucket{side=\"in\",le=\"2.5\"} 1\n"
        "baton_wait_seconds_bucket{side=\"in\",le=\"1e+20\"} 1\n"
        "baton_wait_seconds_bucket{side=\"in\",le=\"+Inf\"} 2\n"
        "baton_wait_seconds_sum{side=\"in\"} 2\n"
        "baton_wait_seconds_count{side=\"in\"} 2\n");
    buf_fini(&out);
    metrics_free(m);
    metrics_free(NULL);
}

static void test_same_sample_again(void **state)
{
    struct metrics *m = metrics_create();
    struct metric_counter *a =
        metrics_counter(m, "x_total", "X.", METRIC_LABELS({"a", "1"}, {"b", "2"}));
    struct metric_counter *b =
        metrics_counter(m, "x_total", "X.", METRIC_LABELS({"b", "2"}, {"a", "1"}));
    struct metric_counter *c =
        metrics_counter(m, "x_total", "X.", METRIC_LABELS({"a", "2"}, {"b", "1"}));
    assert_ptr_equal(a, b);
    assert_ptr_not_equal(a, c);
    metrics_free(m);
}

static void test_forget(void **state)
{
    struct metrics *m = metrics_create();
    struct buf out = BUF_INIT;
    const char *odd = "p\",x=\"1";
    metrics_counter(m, "x_total", "X.", METRIC_LABELS({"peer", "p"}, {"x", "1"}));
    metrics_counter(m, "x_total", "X.", METRIC_LABELS({"peer", odd}, {"y", "1"}));
    metrics_counter(m, "x_total", "X.", METRIC_LABELS({"peer", "p2"}, {"x", "1"}));
    metrics_gauge(m, "y", "Y.", METRIC_LABELS({"peer", "p"}));
    metrics_forget(m, "peer", "p");
    metrics_write(m, &out);
    /* Only the family that still has samples is shown. */
    assert_string_equal(buf_text(&out), "# HELP x_total X.\n# TYPE x_total counter\n"
                                        "x_total{peer=\"p\\\",x=\\\"1\",y=\"1\"} 0\n"
                                        "x_total{peer=\"p2\",x=\"1\"} 0\n");
    metrics_forget(m, "peer", odd);
    metrics_gauge(m, "y", "Y.", METRIC_LABELS({"peer", "p"}));
    buf_clear(&out);
    metrics_write(m, &out);
    assert_non_null(strstr(buf_text(&out), "y{peer=\"p\"} 0\n"));
    assert_null(strstr(buf_text(&out), "\\\""));
    buf_fini(&out);
    metrics_free(m);
}

static void test_long_label(void **state)
{
    struct metrics *m = metrics_create();
    struct buf out = BUF_INIT;
    char value[1000];
    memset(value, 'x', sizeof(value));
    memcpy(value + 127, "\xe2\x82\xac", 3); /* straddles the limit: left out whole */
    value[999] = '\0';
    metrics_gauge(m, "y", "Y.", METRIC_LABELS({"peer", value}));
    metrics_write(m, &out);
    const char *start = strstr(buf_text(&out), "peer=\"");
    assert_int_equal(strspn(start + 6, "x"), 127);
    assert_memory_equal(start + 6 + 127, "\"} 0\n", 5);
    buf_fini(&out);
    metrics_free(m);
}

struct shared {
    struct metric_counter *counter;
    struct metric_gauge *gauge;
    struct metric_histogram *histogram;
};

static void *count_much(void *cookie)
{
    struct shared *shared = cookie;
    for (int i = 0; i < 20000; i++) {
        metric_counter_add(shared->counter, 1);
        metric_gauge_add(shared->gauge, 0.5);
        metric_histogram_observe(shared->histogram, i % 2 ? 0x1p-10 : 1000);
    }
    return NULL;
}

static void test_threads(void **state)
{
    struct metrics *m = metrics_create();
    struct buf out = BUF_INIT;
    struct shared shared = {metrics_counter(m, "x_total", "X.", METRIC_NO_LABELS),
                            metrics_gauge(m, "y", "Y.", METRIC_NO_LABELS),
                            metrics_histogram(m, "z_seconds", "Z.", metrics_seconds_bounds,
                                              metrics_seconds_n_bounds, METRIC_NO_LABELS)};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, count_much, &shared), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(metric_counter_value(shared.counter), 80000);
    assert_true(metric_gauge_value(shared.gauge) == 40000.0);
    metrics_write(m, &out);
    assert_non_null(strstr(buf_text(&out), "z_seconds_bucket{le=\"0.001\"} 40000\n"));
    assert_non_null(strstr(buf_text(&out), "z_seconds_bucket{le=\"300\"} 40000\n"));
    assert_non_null(strstr(buf_text(&out), "z_seconds_count 80000\n"));
    assert_non_null(strstr(buf_text(&out), "z_seconds_sum 40000039.0625\n"));
    buf_fini(&out);
    metrics_free(m);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "print") == 0) {
        struct metrics *m = everything();
        struct buf out = BUF_INIT;
        metrics_write(m, &out);
        fwrite(out.data, 1, out.bytes, stdout);
        buf_fini(&out);
        metrics_free(m);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exposition), cmocka_unit_test(test_same_sample_again),
        cmocka_unit_test(test_forget),     cmocka_unit_test(test_long_label),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
