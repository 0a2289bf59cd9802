/* Streams, clients that leave or stall, drain and stop. */
#include "httpd_harness.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define H "Host: x\r\n"

static struct harness h;
static struct buf out;

static int start(void **state)
{
    struct httpd_config config;

    httpd_config_init(&config);
    config.stall_timeout_ns = NS_PER_S;
    harness_start(&h, &config);
    return 0;
}

static int stop(void **state)
{
    harness_stop(&h);
    buf_fini(&out);
    return 0;
}

static bool has(const char *text)
{
    return strstr(buf_text(&out), text) != NULL;
}

/* Opens a connection and asks; returns once the handler holds the request. */
static int ask_held(const char *text)
{
    int before = atomic_load(&h.n_held);
    int fd = client_connect(&h);

    client_text(fd, text);
    assert_true(harness_await(&h.n_held, before + 1));
    return fd;
}

static void write_two(struct harness *self, void *cookie)
{
    assert_int_equal(httpd_stream_write(self->held, "data: 1\n\n", 9), STATUS_OK);
    assert_int_equal(httpd_stream_write(self->held, "", 0), STATUS_OK);
    assert_int_equal(httpd_stream_write(self->held, "data: 2\n\n", 9), STATUS_OK);
}

static void end(struct harness *self, void *cookie)
{
    httpd_stream_end(self->held);
}

static void cut(struct harness *self, void *cookie)
{
    httpd_stream_abort(self->held);
}

static void reply(struct harness *self, void *cookie)
{
    httpd_reply(self->held, 200, "text/plain", "late", 4);
}

static void test_stream_in_chunks_keeps_the_connection(void **state)
{
    int fd = ask_held("GET /stream HTTP/1.1\r\n" H "\r\nGET /hello HTTP/1.1\r\n" H "\r\n");

    harness_call(&h, write_two, NULL);
    harness_call(&h, end, NULL);
    buf_clear(&out);
    assert_false(client_read_all(fd, &out, 100));
    assert_true(has("Transfer-Encoding: chunked\r\n"));
    assert_true(has("X-Accel-Buffering: no\r\n"));
    assert_true(has("Content-Type: text/event-stream\r\n"));
    assert_true(
        has("\r\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n"));
    assert_true(has("\r\n\r\nhello"));
    assert_int_equal(harness_stats(&h).live_streams, 0);
    assert_int_equal(atomic_load(&h.n_closed), 0);
    close(fd);
}

static void test_stream_to_one_point_oh_ends_by_closing(void **state)
{
    int fd = ask_held("GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");

    harness_call(&h, write_two, NULL);
    harness_call(&h, end, NULL);
    buf_clear(&out);
    assert_true(client_read_all(fd, &out, 1000));
    assert_true(has("Connection: close\r\n"));
    assert_false(has("chunked"));
    assert_true(has("\r\n\r\ndata: 1\n\ndata: 2\n\n"));
    close(fd);
}

static void test_head_of_a_stream(void **state)
{
    int fd = ask_held("HEAD /stream HTTP/1.1\r\n" H "\r\n");

    harness_call(&h, write_two, NULL);
    harness_call(&h, end, NULL);
    buf_clear(&out);
    assert_false(client_read_all(fd, &out, 100));
    assert_string_equal(strstr(buf_text(&out), "\r\n\r\n"), "\r\n\r\n");
    close(fd);
}

/* No client may take a failed stream for a whole one: no last chunk on 1.1, a reset on 1.0. */
static void test_aborted_stream(void **state)
{
    char byte;
    int fd = ask_held("GET /stream HTTP/1.1\r\n" H "\r\n");

    harness_call(&h, write_two, NULL);
    harness_call(&h, cut, NULL);
    buf_clear(&out);
    assert_true(client_read_all(fd, &out, 1000));
    assert_true(has("data: 2\n\n\r\n"));
    assert_false(has("0\r\n\r\n"));
    close(fd);

    fd = ask_held("GET /stream HTTP/1.0\r\n\r\n");
    harness_call(&h, write_two, NULL);
    harness_call(&h, cut, NULL);
    usleep(700000);
    buf_clear(&out);
    while (recv(fd, &byte, 1, 0) == 1) {
        buf_append_byte(&out, (uint8_t)byte);
    }
    assert_int_equal(errno, ECONNRESET);
    assert_true(has("data: 2\n\n")); /* all of it came before the reset */
    close(fd);
    assert_int_equal(atomic_load(&h.n_closed), 0);
}

/* Close, half-close and reset, while waiting and while streaming, with nothing being sent. */
static void test_leaving_is_noticed(void **state)
{
    static const char *const asks[] = {
        "GET /hold HTTP/1.1\r\n" H "\r\n",
        "GET /stream HTTP/1.1\r\n" H "\r\n",
    };
    struct linger at_once = {.l_onoff = 1, .l_linger = 0};
    int n = 0;

    for (size_t i = 0; i < 2; i++) {
        for (int how = 0; how < 3; how++) {
            uint64_t begin = loop_now_ns();
            int fd = ask_held(asks[i]);

            if (how == 1) {
                shutdown(fd, SHUT_WR);
            } else {
                if (how == 2) {
                    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
                }
                close(fd);
            }
            assert_true(harness_await(&h.n_closed, ++n));
            assert_within("the sight of a client that left", begin, loop_now_ns(), 1000);
            if (how == 1) {
                close(fd);
            }
        }
    }
    assert_int_equal(harness_stats(&h).n_client_closed, n);
    assert_int_equal(harness_stats(&h).live_requests, 0);
    assert_int_equal(harness_stats(&h).live_streams, 0);
}

/* The same for one that has filled its connection with later requests, whose reading is paused. */
static void test_leaving_with_much_unread_is_noticed(void **state)
{
    static char junk[40000];
    int fd = ask_held("GET /hold HTTP/1.1\r\n" H "\r\n");

    memset(junk, 'G', sizeof(junk));
    client_send(fd, junk, sizeof(junk));
    usleep(100000);
    close(fd);
    assert_true(harness_await(&h.n_closed, 1));
}

static void test_late_reply_after_handler(void **state)
{
    int fd = ask_held("GET /hold HTTP/1.1\r\n" H "\r\n");

    harness_call(&h, reply, NULL);
    buf_clear(&out);
    assert_int_equal(client_answer(fd, false, &out), 200);
    assert_true(has("\r\n\r\nlate"));
    close(fd);
    usleep(50000);
    assert_int_equal(atomic_load(&h.n_closed), 0);
}

static void get_drained(struct harness *self, void *cookie)
{
    *(int *)cookie = self->n_drained;
}

static void test_marks_pull_the_producer(void **state)
{
    static uint8_t sink[1 << 16];
    size_t total = 0;
    int n_drained = 0;
    int fd = ask_held("GET /flood HTTP/1.1\r\n" H "\r\n");

    while (total < 8u << 20) {
        ssize_t n = recv(fd, sink, sizeof(sink), 0);

        assert_true(n > 0);
        total += (size_t)n;
    }
    harness_call(&h, get_drained, &n_drained);
    assert_true(n_drained > 10);
    assert_true(harness_stats(&h).pending_bytes < 100000);
    close(fd);
    assert_true(harness_await(&h.n_closed, 1));
}

static void test_stopped_reader_is_dropped(void **state)
{
    uint64_t begin = loop_now_ns();
    int small = 4096;
    int fd = ask_held("GET /flood HTTP/1.1\r\n" H "\r\n");

    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    while (atomic_load(&h.n_closed) == 0 && !lost_over(begin, 5000)) {
        usleep(10000);
    }
    assert_int_equal(atomic_load(&h.n_closed), 1);
    assert_true(loop_now_ns() - begin >= NS_PER_S);
    assert_int_equal(harness_stats(&h).n_slow_dropped, 1);
    assert_int_equal(harness_stats(&h).pending_bytes, 0);
    close(fd);
}

static void overrun(struct harness *self, void *cookie)
{
    static char block[100000];
    enum status s = STATUS_OK;
    int n = 0;

    while (s == STATUS_OK && n < 100) {
        s = httpd_stream_write(self->held, block, sizeof(block));
        n++;
    }
    assert_int_equal(s, STATUS_EXHAUSTED);
    assert_int_equal(n, 11); /* one MiB holds ten */
    assert_int_equal(httpd_stream_write(self->held, block, 1), STATUS_EXHAUSTED);
    assert_int_equal(atomic_load(&self->n_closed), 0); /* never inside the call */
}

static void test_output_is_bounded(void **state)
{
    int fd = ask_held("GET /stream HTTP/1.1\r\n" H "\r\n");

    harness_call(&h, overrun, NULL);
    assert_true(harness_await(&h.n_closed, 1));
    close(fd);
}

/* --- drain and stop --- */

static atomic_int n_stopped;

static void on_stopped(void *cookie)
{
    atomic_fetch_add(&n_stopped, 1);
}

/* With a request in the socket that the server has not read yet. */
static void ask_and_drain(struct harness *self, void *cookie)
{
    client_text(*(int *)cookie, "GET /hello HTTP/1.1\r\n" H "\r\n");
    usleep(20000);
    httpd_drain(self->server);
}

static void stop_server(struct harness *self, void *cookie)
{
    httpd_stop(self->server, on_stopped, NULL);
}

static void test_drain_then_stop(void **state)
{
    bool closed;
    int idle = client_connect(&h);
    int held = ask_held("GET /hold HTTP/1.1\r\n" H "\r\n");
    int stream = ask_held("GET /hold HTTP/1.1\r\n" H "\r\n");

    close(held); /* leaves the second one held */
    atomic_store(&n_stopped, 0);
    buf_clear(&out);
    client_text(idle, "GET /hello HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(client_answer(idle, false, &out), 200);
    int fresh = client_connect(&h), asking = client_connect(&h);
    client_text(asking, "GET /hello HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(client_answer(asking, false, &out), 200);
    EVENTUALLY(harness_stats(&h).connections == 4); /* the fresh one is accepted */
    harness_call(&h, ask_and_drain, &asking);
    /* Who is just asking is answered: a reset is nothing that a client tries again. */
    buf_clear(&out);
    assert_int_equal(client_answer(asking, false, &out), 200);
    client_text(fresh, "GET /hello HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(client_answer(fresh, false, &out), 200);
    close(asking);
    close(fresh);
    buf_clear(&out);
    assert_int_equal(recv(idle, buf_reserve(&out, 10), 10, 0), 0); /* idle ones go at once */
    close(idle);
    assert_int_equal(exchange(&h, "GET /hello HTTP/1.1\r\n" H "\r\n", 32, &closed, &out), 200);
    assert_true(closed);
    assert_true(has("Connection: close\r\n"));

    harness_call(&h, stop_server, NULL);
    usleep(50000);
    assert_int_equal(atomic_load(&n_stopped), 0); /* one is still running */
    harness_call(&h, reply, NULL);
    buf_clear(&out);
    assert_true(client_read_all(stream, &out, 1000));
    assert_true(has("\r\n\r\nlate"));
    close(stream);
    assert_true(harness_await(&n_stopped, 1));
}

static void test_free_tells_live_requests(void **state)
{
    int fd;

    start(state);
    fd = ask_held("GET /hold HTTP/1.1\r\n" H "\r\n");
    harness_stop(&h);
    assert_int_equal(atomic_load(&h.n_closed), 1);
    close(fd);
}

/* --- 2,000 streams --- */

enum {
    N_STREAMS = 2000,
};

struct crowd {
    struct httpd_request *requests[N_STREAMS];
    size_t n;
};

static struct crowd crowd;

static void on_crowd(void *cookie, struct httpd_request *request)
{
    httpd_stream_start(request, 200, "text/event-stream");
    crowd.requests[crowd.n++] = request;
    atomic_fetch_add(&h.n_held, 1);
}

static void add_crowd_route(struct harness *self, void *cookie)
{
    const struct httpd_route route = {HTTPD_GET, "/crowd", 0, on_crowd, NULL};

    httpd_route_add(self->server, &route);
}

static void crowd_write(struct harness *self, void *cookie)
{
    for (size_t i = 0; i < crowd.n; i++) {
        assert_int_equal(httpd_stream_write(crowd.requests[i], "data: 1234567\n\n", 15), STATUS_OK);
        assert_int_equal(httpd_stream_write(crowd.requests[i], "data: 7654321\n\n", 15), STATUS_OK);
    }
}

static void test_many_streams_lose_nothing(void **state)
{
    static int fds[N_STREAMS];
    static char text[4096];
    static const char last[] = "data: 7654321\n\n\r\n";

    harness_call(&h, add_crowd_route, NULL);
    for (int i = 0; i < N_STREAMS; i++) {
        fds[i] = client_connect(&h);
        client_text(fds[i], "GET /crowd HTTP/1.1\r\n" H "\r\n");
    }
    assert_true(harness_await(&h.n_held, N_STREAMS));
    for (int round = 0; round < 20; round++) {
        harness_call(&h, crowd_write, NULL);
    }
    for (int i = 0; i < N_STREAMS; i++) {
        size_t n = 0;
        size_t seen = 0;

        while (seen < 20) {
            ssize_t got = recv(fds[i], text + n, sizeof(text) - 1 - n, 0);

            assert_true(got > 0);
            n += (size_t)got;
            text[n] = '\0';
            seen = 0;
            for (const char *p = text; (p = strstr(p, last)); p += sizeof(last) - 1) {
                seen++;
            }
        }
        close(fds[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_stream_in_chunks_keeps_the_connection, start, stop),
        cmocka_unit_test_setup_teardown(test_stream_to_one_point_oh_ends_by_closing, start, stop),
        cmocka_unit_test_setup_teardown(test_head_of_a_stream, start, stop),
        cmocka_unit_test_setup_teardown(test_aborted_stream, start, stop),
        cmocka_unit_test_setup_teardown(test_leaving_is_noticed, start, stop),
        cmocka_unit_test_setup_teardown(test_leaving_with_much_unread_is_noticed, start, stop),
        cmocka_unit_test_setup_teardown(test_late_reply_after_handler, start, stop),
        cmocka_unit_test_setup_teardown(test_marks_pull_the_producer, start, stop),
        cmocka_unit_test_setup_teardown(test_stopped_reader_is_dropped, start, stop),
        cmocka_unit_test_setup_teardown(test_output_is_bounded, start, stop),
        cmocka_unit_test_setup_teardown(test_drain_then_stop, start, stop),
        cmocka_unit_test(test_free_tells_live_requests),
        cmocka_unit_test_setup_teardown(test_many_streams_lose_nothing, start, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
