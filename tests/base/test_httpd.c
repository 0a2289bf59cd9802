/* The gate and the answers, by raw bytes against the real server. */
#include "httpd_harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/json.h"

#define H "Host: x\r\n"

static struct harness h;
static struct buf out;

static int start_plain(void **state)
{
    struct httpd_config config;

    httpd_config_init(&config);
    config.max_body_bytes = 100000;
    harness_start(&h, &config);
    return 0;
}

static int start_keyed(void **state)
{
    static const char *const keys[] = {"first-key", "second"};
    static const char *const origins[] = {"http://localhost:5173"};
    struct httpd_config config;

    httpd_config_init(&config);
    config.keys = keys;
    config.n_keys = 2;
    config.cors_origins = origins;
    config.n_cors_origins = 1;
    harness_start(&h, &config);
    return 0;
}

static int start_quick(void **state)
{
    struct httpd_config config;

    httpd_config_init(&config);
    /* long beside the pauses of a busy machine between a connect and the bytes after it */
    config.head_timeout_ns = 800 * NS_PER_MS;
    config.body_timeout_ns = 500 * NS_PER_MS;
    config.idle_timeout_ns = 400 * NS_PER_MS;
    harness_start(&h, &config);
    return 0;
}

static int start_small(void **state)
{
    struct httpd_config config;

    httpd_config_init(&config);
    config.max_bodies_bytes = 1000;
    config.max_connections = 4;
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

static const char *body_of(void)
{
    const char *end = strstr(buf_text(&out), "\r\n\r\n");

    assert_non_null(end);
    return end + 4;
}

static int ask(const char *text, bool *ret_closed)
{
    return exchange(&h, text, strlen(text), ret_closed, &out);
}

/* Every error is OpenAI's object: four members, message not empty, and the code that we want. */
static void check_error(const char *code)
{
    struct json *root = NULL;
    struct error err = {.text = ""};
    const struct json *error;
    const struct json *found;
    size_t n;

    assert_true(has("Content-Type: application/json\r\n"));
    assert_int_equal(json_parse((const uint8_t *)body_of(), strlen(body_of()), NULL, &root, &err),
                     STATUS_OK);
    error = json_get(root, "error");
    assert_non_null(error);
    assert_non_null(json_get(error, "message"));
    assert_non_null(json_get(error, "type"));
    assert_non_null(json_get(error, "param"));
    found = json_get(error, "code");
    assert_non_null(found);
    assert_string_equal(json_text(found, &n), code);
    json_free(root);
}

struct hostile {
    const char *text;
    size_t bytes; /* 0: strlen */
    int status;
    const char *code;
};

#define WITH_NUL(text) text, sizeof(text) - 1

static const struct hostile hostile[] = {
    {"GET /hello HTTP/1.1\nHost: x\n\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\nHost: x\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n" H H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\nHost : x\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\nHost: a b\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\nHost: a,b\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n" H "X-A: 1\r\n folded\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n Host: x\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n" H ": x\r\n\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n" H "no colon\r\n\r\n", 0, 400, "invalid_http"},
    {WITH_NUL("GET /hello HTTP/1.1\r\n" H "X-A: a\0b\r\n\r\n"), 400, "invalid_http"},
    {WITH_NUL("GET /hello HTTP/1.1\r\n" H "X\0A: b\r\n\r\n"), 400, "invalid_http"},
    {WITH_NUL("GET /hel\0lo HTTP/1.1\r\n" H "\r\n"), 400, "invalid_http"},
    {WITH_NUL("GET /hello HTTP/1.1\0\r\n" H "\r\n"), 400, "invalid_http"},
    {"GET /hello HTTP/1.1\r\n" H "X-A: a\rb\r\n\r\n", 0, 400, "invalid_http"},
    {"GET  /hello HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello  HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/1.2\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello HTTP/2.0\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello http/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET hello HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /h\xc3\xa9 HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"GET /hello#x HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"G(T /hello HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 0, 400, "invalid_http"},
    {WITH_NUL("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), 400, "invalid_http"},
    {"\r\n\r\nGET /hello HTTP/1.1\r\n" H "\r\n", 0, 400, "invalid_http"},
    /* lengths */
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", 0, 400,
     "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 1, 1\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: +1\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: -1\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 0x1\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 1 \t\x0b\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length:\r\n\r\na", 0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 100001\r\n\r\na", 0, 413, "request_too_large"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 99999999999999999999999\r\n\r\na", 0, 413,
     "request_too_large"},
    {"POST /echo HTTP/1.1\r\n" H "Content-Length: 18446744073709551617\r\n\r\na", 0, 413,
     "request_too_large"},
    /* transfer codings */
    {"POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 0, 400,
     "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 0, 400,
     "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 0, 400,
     "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H
     "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     0, 400, "invalid_http"},
    {"POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
     0, 400, "invalid_http"},
    {"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 0, 400, "invalid_http"},
#define CHUNKED "POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n"
    {CHUNKED "+5\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "-5\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "0x5\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED " 5\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "5 \r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "5\nhello\n0\n\n", 0, 400, "invalid_http"},
    {CHUNKED "5\r\nhelloX\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "5\r\nhello\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED ";a=b\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "5;a\nb\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "00000000000000005\r\nhello\r\n0\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "ffffffffffffffff\r\nhello\r\n0\r\n\r\n", 0, 413, "request_too_large"},
    {CHUNKED "186a1\r\nhello\r\n", 0, 413, "request_too_large"},
    {CHUNKED "0\r\nbad trailer\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "0\r\n: x\r\n\r\n", 0, 400, "invalid_http"},
    {CHUNKED "0\r\nA: b\rc\r\n\r\n", 0, 400, "invalid_http"},
};

/* Each must be refused, closed, and counted; the server lives on. */
static void test_hostile_input_is_refused(void **state)
{
    bool closed;

    for (size_t i = 0; i < sizeof(hostile) / sizeof(*hostile); i++) {
        size_t n = hostile[i].bytes ? hostile[i].bytes : strlen(hostile[i].text);
        int status = exchange(&h, hostile[i].text, n, &closed, &out);

        if (status != hostile[i].status || !closed) {
            print_error("case %zu: %s\n-> %d %s\n%s\n", i, hostile[i].text, status,
                        closed ? "closed" : "open", buf_text(&out));
        }
        assert_int_equal(status, hostile[i].status);
        assert_true(closed);
        assert_true(has("Connection: close\r\n"));
        check_error(hostile[i].code);
    }
    assert_int_equal(ask("GET /hello HTTP/1.1\r\n" H "\r\n", &closed), 200);
    assert_int_equal(harness_stats(&h).n_refused + 3, sizeof(hostile) / sizeof(*hostile));
    EVENTUALLY(harness_stats(&h).connections == 0); /* clients that left leave nothing behind */
}

static void test_limits_of_the_head(void **state)
{
    struct buf head = BUF_INIT;
    bool closed;

    buf_append_text(&head, "GET /hello HTTP/1.1\r\n" H "X-A: ");
    for (int i = 0; i < 33000; i++) {
        buf_append_byte(&head, 'a');
    }
    assert_int_equal(exchange(&h, (char *)head.data, head.bytes, &closed, &out), 431);
    check_error("headers_too_large");
    assert_true(closed);

    buf_clear(&head);
    buf_append_text(&head, "GET /hello HTTP/1.1\r\n" H);
    for (int i = 0; i < 99; i++) {
        buf_printf(&head, "X-%d: a\r\n", i);
    }
    buf_append_text(&head, "\r\n");
    assert_int_equal(exchange(&h, (char *)head.data, head.bytes, &closed, &out), 200);
    buf_consume(&head, 0);
    head.bytes -= 2;
    buf_append_text(&head, "X-last: a\r\n\r\n");
    assert_int_equal(exchange(&h, (char *)head.data, head.bytes, &closed, &out), 431);
    check_error("headers_too_large");
    buf_fini(&head);
}

static void test_paths_are_matched_byte_for_byte(void **state)
{
    static const char *const unknown[] = {
        "//hello", "/hello/", "/Hello", "/%68ello", "/./hello", "/x/../hello", "/v1/models/", "/",
    };
    char text[200];
    bool closed;

    for (size_t i = 0; i < sizeof(unknown) / sizeof(*unknown); i++) {
        snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\n" H "\r\n", unknown[i]);
        assert_int_equal(ask(text, &closed), 404);
        check_error("unknown_url");
        assert_false(closed);
    }
    assert_int_equal(
        ask("GET /v1/models/a/b?c=d%20&e HTTP/1.1\r\n" H "X-a: \t v w \r\n\r\n", &closed), 200);
    assert_string_equal(body_of(),
                        "path=/v1/models/a/b\nrest=a/b\nquery=c=d%20&e\na=v w\npeer=1\n");
    assert_true(has("X-Good: fine\r\n"));
    assert_false(has("Evil"));
    assert_int_equal(ask("GET http://other:80/v1/models HTTP/1.1\r\n" H "\r\n", &closed), 200);
    assert_string_equal(body_of(), "path=/v1/models\nrest=\nquery=\na=-\npeer=1\n");
    assert_int_equal(ask("\r\nGET /hello HTTP/1.1\r\n" H "\r\n", &closed), 200);
}

static void test_methods(void **state)
{
    bool closed;

    assert_int_equal(ask("POST /hello HTTP/1.1\r\n" H "Content-Length: 2\r\n\r\nab", &closed), 405);
    assert_true(has("Allow: GET, HEAD\r\n"));
    check_error("method_not_supported");
    assert_false(closed);
    assert_int_equal(ask("GET /echo HTTP/1.1\r\n" H "\r\n", &closed), 405);
    assert_true(has("Allow: POST\r\n"));
    assert_int_equal(ask("TRACE / HTTP/1.1\r\n" H "\r\n", &closed), 405);
    assert_true(has("Allow: GET, HEAD, POST\r\n"));
    assert_int_equal(ask("CONNECT x:80 HTTP/1.1\r\n" H "\r\n", &closed), 405);
    assert_int_equal(ask("OPTIONS /hello HTTP/1.1\r\n" H "\r\n", &closed), 405);
    assert_int_equal(ask("OPTIONS * HTTP/1.1\r\n" H "\r\n", &closed), 404);
    assert_int_equal(ask("HEAD /hello HTTP/1.1\r\n" H "\r\n", &closed), 200);
    assert_true(has("Content-Length: 5\r\n"));
    assert_string_equal(body_of(), "");
    assert_int_equal(ask("HEAD /echo HTTP/1.1\r\n" H "\r\n", &closed), 405);
    assert_string_equal(body_of(), "");
}

static void test_bodies(void **state)
{
    bool closed;

    assert_int_equal(ask("POST /echo HTTP/1.1\r\n" H "\r\n", &closed), 411);
    check_error("length_required");
    assert_int_equal(ask("POST /echo HTTP/1.1\r\n" H "Content-Length: 0\r\n\r\n", &closed), 200);
    assert_int_equal(ask("POST /echo HTTP/1.1\r\n" H "Content-Length: 003\r\n\r\nabc", &closed),
                     200);
    assert_string_equal(body_of(), "abc");
    assert_int_equal(
        ask(CHUNKED
            "1\r\na\r\n0000000001\r\nb\r\n00000000A;x=y;z\r\n0123456789\r\n0\r\nT: u\r\n\r\n",
            &closed),
        200);
    assert_string_equal(body_of(), "ab0123456789");
    assert_false(closed);
    assert_int_equal(ask("POST /json HTTP/1.1\r\n" H
                         "Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
                         &closed),
                     415);
    check_error("unsupported_media_type");
    assert_int_equal(ask("POST /json HTTP/1.1\r\n" H
                         "Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
                         &closed),
                     415);
    assert_int_equal(ask("POST /json HTTP/1.1\r\n" H
                         "content-type: Application/JSON; charset=utf-8\r\nContent-Length: "
                         "2\r\n\r\n{}",
                         &closed),
                     200);
    assert_int_equal(ask("POST /json HTTP/1.1\r\n" H "Content-Length: 2\r\n\r\n{}", &closed), 200);
}

/* A client that sends a megabyte nobody wants still gets to read why, and no byte of it is kept. */
static void test_large_bodies_refused_by_the_head(void **state)
{
    static const struct {
        const char *head;
        int status;
    } cases[] = {
        {"POST /hello HTTP/1.1\r\n" H "Content-Length: 1000000\r\n\r\n", 405},
        {"POST /none HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\nf4240\r\n", 404},
        {"POST /echo HTTP/1.1\r\n" H "Content-Length: 1000000\r\n\r\n", 413},
        {"POST /echo HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\nf4240\r\n", 413},
        {"GET /hello HTTP/1.1\r\n" H "Content-Length: 1000000\r\n\r\n", 200},
    };
    struct buf text = BUF_INIT;
    bool closed;

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        buf_clear(&text);
        buf_append_text(&text, cases[i].head);
        memset(buf_reserve(&text, 1000000), '[', 1000000);
        text.bytes += 1000000;
        assert_int_equal(exchange(&h, (char *)text.data, text.bytes, &closed, &out),
                         cases[i].status);
        assert_true(closed);
        assert_int_equal(harness_stats(&h).bodies_bytes, 0);
    }
    buf_fini(&text);
}

/* Many bodies on the way share one bound. */
static void test_bodies_share_a_bound(void **state)
{
    static char part[600];
    int first = client_connect(&h);
    int second = client_connect(&h);

    memset(part, 'a', sizeof(part));
    client_text(first, "POST /echo HTTP/1.1\r\n" H "Content-Length: 700\r\n\r\n");
    client_send(first, part, 600);
    EVENTUALLY(harness_stats(&h).bodies_bytes == 600);
    client_text(second, "POST /echo HTTP/1.1\r\n" H "Content-Length: 700\r\n\r\n");
    client_send(second, part, 600);
    buf_clear(&out);
    assert_int_equal(client_answer(second, false, &out), 429);
    check_error("queue_full");
    assert_true(has("Retry-After: 1\r\n"));
    client_send(first, part, 100);
    buf_clear(&out);
    assert_int_equal(client_answer(first, false, &out), 200);
    assert_int_equal(harness_stats(&h).bodies_bytes, 0);
    close(first);
    close(second);
}

static void test_expect(void **state)
{
    static const char head[] =
        "POST /echo HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 3\r\n\r\n";
    uint64_t start;
    bool closed;
    int fd = client_connect(&h);

    buf_clear(&out);
    start = loop_now_ns();
    client_text(fd, head);
    assert_int_equal(client_answer(fd, false, &out), 100);
    assert_within("100 Continue", start, loop_now_ns(), 500); /* curl waits a second */
    client_text(fd, "abc");
    buf_clear(&out);
    assert_int_equal(client_answer(fd, false, &out), 200);
    assert_string_equal(body_of(), "abc");
    close(fd);

    assert_int_equal(ask("POST /echo HTTP/1.1\r\n" H
                         "Expect: 100-continue\r\nContent-Length: 200000\r\n\r\n",
                         &closed),
                     413);
    assert_true(closed);
    assert_int_equal(
        ask("POST /echo HTTP/1.1\r\n" H "Expect: miracles\r\nContent-Length: 3\r\n\r\n", &closed),
        417);
    check_error("expectation_failed");
    assert_int_equal(ask("POST /none HTTP/1.1\r\n" H
                         "Expect: 100-continue\r\nContent-Length: 3\r\n\r\n",
                         &closed),
                     404);
    assert_int_equal(
        ask("POST /echo HTTP/1.0\r\nExpect: x\r\nContent-Length: 3\r\n\r\nabc", &closed), 200);
}

static void test_one_point_oh_and_pipelining(void **state)
{
    bool closed;
    int fd;

    assert_int_equal(ask("GET /hello HTTP/1.0\r\n\r\n", &closed), 200);
    assert_true(closed);
    assert_true(has("Connection: close\r\n"));
    assert_int_equal(ask("GET /hello HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", &closed), 200);
    assert_false(closed);
    assert_true(has("Connection: keep-alive\r\n"));
    assert_int_equal(ask("GET /hello HTTP/1.1\r\n" H "Connection: x, close\r\n\r\n", &closed), 200);
    assert_true(closed);

    fd = client_connect(&h);
    buf_clear(&out);
    client_text(fd, "GET /hello HTTP/1.1\r\n" H "\r\n"
                    "POST /echo HTTP/1.1\r\n" H "Content-Length: 2\r\n\r\nab"
                    "GET /nothing HTTP/1.1\r\n" H "Content-Length: 4\r\n\r\nskip"
                    "HEAD /hello HTTP/1.1\r\n" H "\r\n"
                    "GET /hello HTTP/1.1\r\n" H "\r\n");
    assert_int_equal(client_answer(fd, false, &out), 200);
    assert_int_equal(client_answer(fd, false, &out), 200);
    assert_int_equal(client_answer(fd, false, &out), 404);
    assert_int_equal(client_answer(fd, true, &out), 200);
    assert_int_equal(client_answer(fd, false, &out), 200);
    close(fd);
}

/* Far more pipelined requests than any buffer holds, their answers read late. */
static void test_pipelining_is_bounded(void **state)
{
    enum {
        N = 20000,
    };
    static const char one[] = "GET /hello HTTP/1.1\r\n" H "\r\n";
    size_t one_answer;
    size_t total = 0;
    int fd = client_connect(&h);
    pid_t child;

    buf_clear(&out);
    client_text(fd, one);
    assert_int_equal(client_answer(fd, false, &out), 200);
    one_answer = out.bytes;
    child = fork();
    if (child == 0) {
        for (int i = 0; i < N; i++) {
            client_text(fd, one);
        }
        _exit(0);
    }
    usleep(300000);
    assert_true(harness_stats(&h).pending_bytes < 200000);
    while (total < N * one_answer) {
        buf_clear(&out);
        assert_int_equal(recv(fd, buf_reserve(&out, 65536), 65536, MSG_PEEK) > 0, 1);
        total += (size_t)recv(fd, out.data, 65536, 0);
    }
    assert_int_equal(total, N * one_answer);
    usleep(50000);
    assert_int_equal(recv(fd, &total, sizeof(total), MSG_DONTWAIT), -1); /* and no byte more */
    close(fd);
}

static void test_pieces_of_one_byte(void **state)
{
    static const char text[] = CHUNKED "3\r\nabc\r\n0\r\n\r\nGET /hello HTTP/1.1\r\n" H "\r\n";
    int fd = client_connect(&h);

    for (size_t i = 0; i < sizeof(text) - 1; i++) {
        client_send(fd, text + i, 1);
        if (i % 8 == 0) {
            usleep(500);
        }
    }
    buf_clear(&out);
    assert_int_equal(client_answer(fd, false, &out), 200);
    assert_string_equal(body_of(), "abc");
    assert_int_equal(client_answer(fd, false, &out), 200);
    close(fd);
}

static void test_label(void **state)
{
    bool closed;
    char text[400];

    ask("GET /hello HTTP/1.1\r\n" H "X-Request-Id: my label 7\r\n\r\n", &closed);
    assert_true(has("X-Request-Id: my label 7\r\n"));
    ask("GET /hello HTTP/1.1\r\n" H "X-Request-Id: caf\xc3\xa9\r\n\r\n", &closed);
    assert_true(has("X-Request-Id: req-"));
    snprintf(text, sizeof(text), "GET /hello HTTP/1.1\r\n" H "X-Request-Id: %0129d\r\n\r\n", 1);
    ask(text, &closed);
    assert_true(has("X-Request-Id: req-"));
}

/* --- keys and CORS --- */

#define KEY "Authorization: Bearer first-key\r\n"

static void test_keys(void **state)
{
    static const char *const wrong[] = {
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer first-ke\r\n",
        "Authorization: Bearer first-key2\r\n",
        "Authorization: Basic first-key\r\n",
        "Authorization: first-key\r\n",
        "X-Api-Key: first-key\r\n",
    };
    static const char *const targets[] = {
        "/hello", "/hello?key=first-key", "/none", "//hello", "/HELLO", "/hello/", "/%68ello",
        "/open/", "/v1/models/x",
    };
    static const char *const methods[] = {"GET", "HEAD", "POST", "DELETE", "TRACE", "OPTIONS"};
    char text[300];
    bool closed;

    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        snprintf(text, sizeof(text), "GET /hello HTTP/1.1\r\n" H "%s\r\n", wrong[i]);
        assert_int_equal(ask(text, &closed), 401);
        assert_true(has("WWW-Authenticate: Bearer\r\n"));
        check_error("invalid_api_key");
    }
    for (size_t i = 0; i < sizeof(targets) / sizeof(*targets); i++) {
        for (size_t m = 0; m < sizeof(methods) / sizeof(*methods); m++) {
            int fd = client_connect(&h);

            snprintf(text, sizeof(text), "%s %s HTTP/1.1\r\n" H "\r\n", methods[m], targets[i]);
            client_text(fd, text);
            buf_clear(&out);
            assert_int_equal(client_answer(fd, m == 1, &out), 401);
            close(fd);
        }
    }
    assert_int_equal(ask("GET /open HTTP/1.1\r\n" H "\r\n", &closed), 200);
    assert_int_equal(ask("GET /hello HTTP/1.1\r\n" H KEY "\r\n", &closed), 200);
    assert_int_equal(
        ask("GET /hello HTTP/1.1\r\n" H "authorization: bearer second\r\n\r\n", &closed), 200);
    assert_int_equal(ask("GET /none HTTP/1.1\r\n" H KEY "\r\n", &closed), 404);
}

static void test_cors(void **state)
{
    bool closed;

    assert_int_equal(
        ask("OPTIONS /json HTTP/1.1\r\n" H
            "Origin: http://localhost:5173\r\nAccess-Control-Request-Method: POST\r\n"
            "Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n",
            &closed),
        204);
    assert_true(has("Access-Control-Allow-Origin: http://localhost:5173\r\n"));
    assert_true(has("Access-Control-Allow-Headers: authorization,content-type,x-stainless-os\r\n"));
    assert_true(has("Access-Control-Allow-Methods: GET, HEAD, POST, OPTIONS\r\n"));
    assert_string_equal(body_of(), "");
    assert_false(closed);
    assert_int_equal(ask("OPTIONS /json HTTP/1.1\r\n" H
                         "Origin: http://evil\r\nAccess-Control-Request-Method: POST\r\n\r\n",
                         &closed),
                     401);
    assert_false(has("Access-Control"));
    assert_int_equal(
        ask("GET /hello HTTP/1.1\r\n" H "Origin: http://localhost:5173\r\n\r\n", &closed), 401);
    assert_true(has("Access-Control-Allow-Origin: http://localhost:5173\r\n"));
}

/* --- time and numbers --- */

static void test_timeouts(void **state)
{
    static const char *const starts[] = {
        "",
        "GET /he",
        "GET /hello HTTP/1.1\r\n" H,
        "POST /echo HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nabc",
        CHUNKED "5\r\nab",
    };
    int fd;

    for (size_t i = 0; i < sizeof(starts) / sizeof(*starts); i++) {
        fd = client_connect(&h);
        client_text(fd, starts[i]);
        buf_clear(&out);
        assert_true(client_read_all(fd, &out, 3000));
        assert_true(has("HTTP/1.1 408 "));
        check_error("request_timeout");
        close(fd);
    }
    fd = client_connect(&h);
    client_text(fd, "GET /hello HTTP/1.1\r\n" H "\r\n");
    buf_clear(&out);
    assert_true(client_read_all(fd, &out, 3000)); /* idle: closed without a word */
    assert_true(has("HTTP/1.1 200 "));
    assert_false(has("408"));
    close(fd);
    assert_int_equal(harness_stats(&h).n_timeouts, sizeof(starts) / sizeof(*starts));
}

static void test_idle_ones_make_room(void **state)
{
    int fds[7];

    for (int i = 0; i < 7; i++) {
        fds[i] = client_connect(&h);
        client_text(fds[i], "GET /hello HTTP/1.1\r\n" H "\r\n");
        buf_clear(&out);
        assert_int_equal(client_answer(fds[i], false, &out), 200);
    }
    assert_int_equal(harness_stats(&h).connections, 4);
    for (int i = 0; i < 7; i++) {
        close(fds[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hostile_input_is_refused, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_limits_of_the_head, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_paths_are_matched_byte_for_byte, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_methods, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_bodies, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_large_bodies_refused_by_the_head, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_bodies_share_a_bound, start_small, stop),
        cmocka_unit_test_setup_teardown(test_expect, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_one_point_oh_and_pipelining, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_pipelining_is_bounded, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_pieces_of_one_byte, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_label, start_plain, stop),
        cmocka_unit_test_setup_teardown(test_keys, start_keyed, stop),
        cmocka_unit_test_setup_teardown(test_cors, start_keyed, stop),
        cmocka_unit_test_setup_teardown(test_timeouts, start_quick, stop),
        cmocka_unit_test_setup_teardown(test_idle_ones_make_room, start_small, stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
