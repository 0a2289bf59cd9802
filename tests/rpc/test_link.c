/*
 * Links between two real processes on loopback: order, loss, stop, restart, bound of the queue,
 * refusal. argv[1] is the link_peer program.
 */
#include "rpc_test.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/metrics.h"
#include "rpc/server.h"

extern char **environ;
static const char *peer_program;

struct child {
    pid_t pid;
    uint16_t port;
};

static struct child child_spawn(const char *first, const char *second)
{
    struct child child;
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    char *argv[] = {(char *)peer_program, (char *)first, (char *)second, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 1);
    assert_int_equal(posix_spawn(&child.pid, peer_program, &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    char text[16] = "";
    assert_true(read(fds[0], text, sizeof text - 1) > 0);
    close(fds[0]);
    child.port = (uint16_t)atoi(text);
    assert_true(child.port != 0);
    return child;
}

static struct child child_start(uint16_t port)
{
    char port_text[16];
    snprintf(port_text, sizeof port_text, "%u", port);
    return child_spawn(port_text, NULL);
}

static void child_kill(struct child *child)
{
    kill(child->pid, SIGKILL);
    waitpid(child->pid, NULL, 0);
}

/* What a link told. */
struct seen {
    struct link *link;
    const char *first; /* message sent at each opening */
    bool opened, closed, failed, writable, hello;
    bool stop_at_message;
    unsigned n_messages, n_opened;
    uint64_t closed_ns, hello_ns;
    int peer_pid;
    enum status status;
    char text[1200];
    char last[256];
};

static void on_opened(void *cookie, struct link *link)
{
    struct seen *seen = cookie;
    seen->opened = true;
    seen->n_opened++;
    assert_int_equal(link_send(link, seen->first, strlen(seen->first)), STATUS_OK);
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct seen *seen = cookie;
    seen->n_messages++;
    size_t n = n_bytes < sizeof seen->last - 1 ? n_bytes : sizeof seen->last - 1;
    memcpy(seen->last, bytes, n);
    seen->last[n] = '\0';
    if (sscanf(seen->last, "hello %d", &seen->peer_pid) == 1) {
        seen->hello = true;
        seen->hello_ns = loop_now_ns();
    }
    if (seen->stop_at_message) {
        loop_stop(loop);
    }
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct seen *seen = cookie;
    seen->closed = true;
    seen->closed_ns = loop_now_ns();
    seen->status = status;
    snprintf(seen->text, sizeof seen->text, "%s", text);
}

static void on_failed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct seen *seen = cookie;
    seen->failed = true;
    seen->status = status;
    snprintf(seen->text, sizeof seen->text, "%s", text);
}

static void on_writable(void *cookie, struct link *link)
{
    struct seen *seen = cookie;
    seen->writable = true;
}

static const struct link_events events = {
    .opened = on_opened,
    .message = on_message,
    .closed = on_closed,
    .failed = on_failed,
    .writable = on_writable,
};

static void open_to(struct seen *seen, uint16_t port, const char *first, struct rpc_limits limits)
{
    struct link_options options = {
        .host = "127.0.0.1", .port = port, .method = "/test.Peer/Serve", .limits = limits};
    struct error err = {""};
    *seen = (struct seen){.first = first};
    assert_int_equal(link_connect(core, &options, &events, seen, &seen->link, &err), STATUS_OK);
}

static void test_echo(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_int_equal(link_send(seen.link, "x", 1), STATUS_PEER_LOST); /* not open yet */
    assert_true(run_until(&seen.hello, 5000));
    assert_int_equal(seen.peer_pid, child.pid);

    size_t big = (8u << 20) - 64;
    char *bytes = mem_alloc(big);
    memset(bytes, 'a', big);
    assert_int_equal(link_send(seen.link, bytes, big), STATUS_OK);
    assert_int_equal(link_send(seen.link, "", 0), STATUS_OK);
    assert_int_equal(link_send(seen.link, bytes, 9u << 20), STATUS_TOO_LARGE);
    RUN_WHILE(seen.n_messages < 3, 5000);
    assert_int_equal(seen.n_messages, 3);
    struct link_stats stats;
    link_stats(seen.link, &stats);
    struct metrics *metrics = metrics_create();
    struct buf text = BUF_INIT;
    char line[96];
    rpc_core_metrics_register(core, metrics);
    metrics_write(metrics, &text);
    snprintf(line, sizeof line, "baton_rpc_message_bytes_total{direction=\"in\"} %llu\n",
             (unsigned long long)stats.bytes_received);
    assert_non_null(strstr(buf_text(&text), line));
    assert_non_null(strstr(buf_text(&text), "baton_rpc_queued_bytes 0\n"));
    buf_fini(&text);
    metrics_free(metrics);
    assert_int_equal(stats.bytes_received, big + strlen("hello ") + (child.pid > 99999 ? 6 : 5) -
                                               (child.pid < 10000) - (child.pid < 1000));
    assert_true(link_idle_ns(seen.link) < 5 * NS_PER_S);
    mem_free(bytes);

    enum { ROUNDS = 300 };
    uint64_t start_ns = loop_now_ns();
    for (unsigned i = 0; i < ROUNDS; i++) {
        unsigned before = seen.n_messages;
        assert_int_equal(link_send(seen.link, "ping", 4), STATUS_OK);
        while (seen.n_messages == before) {
            assert_false(lost_over(start_ns, 20000));
            seen.stop_at_message = true;
            assert_int_equal(loop_run(loop), STATUS_OK);
        }
    }
    seen.stop_at_message = false;
    print_message("there and back in %.0f us\n", (double)(loop_now_ns() - start_ns) / 1e3 / ROUNDS);
    link_close(seen.link);
    child_kill(&child);
}

static void test_order(void **state)
{
    enum { N = 200000 };
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "c", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    uint64_t start_ns = loop_now_ns();
    for (uint32_t i = 1; i <= N;) {
        uint8_t bytes[16] = {0};
        put_le32(bytes, i);
        enum status status = link_send(seen.link, bytes, sizeof bytes);
        if (status == STATUS_OK) {
            i++;
            continue;
        }
        assert_int_equal(status, STATUS_EXHAUSTED);
        seen.writable = false;
        assert_true(run_until(&seen.writable, 5000));
    }
    while (link_send(seen.link, "end", 3) == STATUS_EXHAUSTED) {
        run_ms(2);
    }
    RUN_WHILE(seen.n_messages < 2, 20000);
    double seconds = (double)(loop_now_ns() - start_ns) / 1e9;
    assert_string_equal(seen.last, "200000 in order");
    print_message("200000 messages of 16 bytes in %.2f s, %.0f a second\n", seconds, N / seconds);
    link_close(seen.link);
    child_kill(&child);
}

static void test_killed(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    uint64_t start_ns = loop_now_ns();
    child_kill(&child);
    assert_true(run_until(&seen.closed, 3000));
    double ms = (double)(seen.closed_ns - start_ns) / 1e6;
    print_message("kill -9 seen after %.1f ms: %s\n", ms, seen.text);
    assert_int_equal(seen.status, STATUS_PEER_LOST);
    assert_within("the sight of a death", start_ns, seen.closed_ns, 1000);
    link_close(seen.link);
}

static void test_stopped(void **state)
{
    for (unsigned round = 0; round < 3; round++) {
        struct child child = child_start(0);
        struct seen seen;
        open_to(&seen, child.port, "e", (struct rpc_limits){0});
        assert_true(run_until(&seen.hello, 5000));
        run_ms(300 * round);
        uint64_t start_ns = loop_now_ns();
        kill(child.pid, SIGSTOP);
        assert_true(run_until(&seen.closed, 5000));
        print_message("SIGSTOP seen after %.1f ms: %s\n", (double)(seen.closed_ns - start_ns) / 1e6,
                      seen.text);
        assert_within("the sight of a stop", start_ns, seen.closed_ns, 2000);
        assert_int_equal(seen.status, STATUS_PEER_LOST);
        link_close(seen.link);
        child_kill(&child);
    }
}

/* The sender of a flood sees the stop as well, though it always has something to write. */
static void test_stopped_under_load(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "c", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    kill(child.pid, SIGSTOP);
    uint64_t start_ns = loop_now_ns();
    uint8_t bytes[1024] = {0};
    while (!seen.closed && !lost_over(start_ns, 5000)) {
        while (link_send(seen.link, bytes, sizeof bytes) == STATUS_OK) {
        }
        run_ms(2);
    }
    double ms = (double)(seen.closed_ns - start_ns) / 1e6;
    print_message("SIGSTOP under load seen after %.1f ms: %s\n", ms, seen.text);
    assert_true(seen.closed);
    assert_within("the sight of a stop", start_ns, seen.closed_ns, 2000);
    link_close(seen.link);
    child_kill(&child);
}

/* Our own loop is held up for longer than the peer waits for its pings: the link must outlive it.
 */
static void test_loop_held_up(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    run_ms(100);
    struct timespec pause = {.tv_sec = 4};
    nanosleep(&pause, NULL);
    run_ms(1000);
    assert_false(seen.closed);
    assert_int_equal(seen.n_opened, 1);
    link_close(seen.link);
    child_kill(&child);
}

static void test_restart(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    int first_pid = seen.peer_pid;
    child_kill(&child);
    assert_true(run_until(&seen.closed, 3000));
    assert_false(link_is_open(seen.link));
    assert_true(run_until(&seen.failed, 5000));
    run_ms(300); /* a few more attempts fail */
    seen.hello = false;
    child = child_start(child.port);
    uint64_t start_ns = loop_now_ns();
    assert_true(run_until(&seen.hello, 5000));
    print_message("open again %.0f ms after the restart\n",
                  (double)(seen.hello_ns - start_ns) / 1e6);
    assert_int_not_equal(seen.peer_pid, first_pid);
    assert_int_equal(seen.n_opened, 2);
    assert_within("opening again", start_ns, seen.hello_ns, 3000);
    link_close(seen.link);
    child_kill(&child);
}

static void test_queue_bound(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    struct rpc_limits limits = {.queue_messages = 100, .queue_bytes = 1u << 20};
    open_to(&seen, child.port, "p", limits);
    assert_true(run_until(&seen.hello, 5000));
    run_ms(50);
    uint32_t n_sent = 0;
    bool full = false;
    static uint8_t bytes[4096];
    /* the peer reads nothing: first the windows of HTTP/2 and TCP fill, then our queue */
    for (unsigned i = 0; i < 100; i++) {
        enum status status = STATUS_OK;
        while (status == STATUS_OK) {
            put_le32(bytes, n_sent + 1);
            status = link_send(seen.link, bytes, sizeof bytes);
            n_sent += status == STATUS_OK;
        }
        assert_int_equal(status, STATUS_EXHAUSTED);
        full = true;
        seen.writable = false;
        run_ms(2);
    }
    struct link_stats stats;
    link_stats(seen.link, &stats);
    print_message("%u messages of 4 KiB taken while the peer paused, %zu of them queued here\n",
                  n_sent, stats.queued_messages);
    assert_true(full && stats.queued_messages <= 100 && stats.queued_messages_max == 100);
    assert_int_equal(rpc_core_n_unsent(core), stats.queued_messages + 1); /* and one is with gRPC */
    assert_true(stats.n_exhausted > 0);
    assert_true(run_until(&seen.writable, 5000));
    while (link_send(seen.link, "end", 3) == STATUS_EXHAUSTED) {
        run_ms(2);
    }
    RUN_WHILE(seen.n_messages < 2, 5000);
    char want[64];
    snprintf(want, sizeof want, "%u in order", n_sent);
    assert_string_equal(seen.last, want);
    RUN_WHILE(rpc_core_n_unsent(core) > 0, 1000);
    assert_int_equal(rpc_core_n_unsent(core), 0);
    link_close(seen.link);
    child_kill(&child);
}

static void test_refused(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "r", (struct rpc_limits){0});
    assert_true(run_until(&seen.closed, 5000));
    assert_int_equal(seen.status, STATUS_PEER_REFUSED);
    print_message("%s\n", seen.text);
    assert_non_null(strstr(seen.text, "decode-0 has 0102030405060708"));
    assert_non_null(strstr(seen.text, "prefill-0 has 090a0b0c00000000"));
    link_close(seen.link);
    child_kill(&child);
}

/* The server finishes; the client had not: it is told OK, and dials again. After its own finish it
 * does not. */
static void test_finish(void **state)
{
    struct child child = child_start(0);
    struct seen seen;
    open_to(&seen, child.port, "f", (struct rpc_limits){0});
    assert_true(run_until(&seen.closed, 5000));
    assert_int_equal(seen.status, STATUS_OK);
    assert_true(seen.hello);
    seen.hello = false;
    assert_true(run_until(&seen.hello, 5000));
    link_close(seen.link);

    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_true(run_until(&seen.hello, 5000));
    assert_int_equal(link_send(seen.link, "last", 4), STATUS_OK);
    link_finish(seen.link);
    assert_int_equal(link_send(seen.link, "too late", 8), STATUS_PEER_LOST);
    assert_true(run_until(&seen.closed, 5000));
    assert_int_equal(seen.status, STATUS_OK);
    assert_string_equal(seen.last, "last");
    run_ms(500);
    assert_int_equal(seen.n_opened, 1);
    link_close(seen.link);
    child_kill(&child);
}

static void on_stream(void *cookie, struct link *link)
{
    struct seen *seen = cookie;
    seen->link = link;
    link_attach(link, &events, seen);
}

/* The server's end: the client is killed, or stopped, or the server stops taking calls. */
static void test_client_lost(void **state)
{
    struct seen seen = {.first = ""};
    struct error err = {""};
    struct rpc_server *server;
    struct rpc_server_options options = {.host = "127.0.0.1"};
    assert_int_equal(rpc_server_create(core, &options, &server, &err), STATUS_OK);
    rpc_server_add_stream(server, "/test.Parent/Serve", on_stream, &seen);
    rpc_server_start(server);
    char port_text[16];
    snprintf(port_text, sizeof port_text, "%u", rpc_server_port(server));
    for (unsigned round = 0; round < 2; round++) {
        struct child child = child_spawn("dial", port_text);
        RUN_WHILE(seen.n_messages <= round, 5000);
        assert_int_equal(seen.n_messages, round + 1);
        if (round == 1) {
            rpc_server_stop(server); /* what is open goes on */
            run_ms(300);
            assert_true(link_is_open(seen.link));
            assert_int_equal(link_send(seen.link, "still here", 10), STATUS_OK);
        }
        seen.closed = false;
        uint64_t start_ns = loop_now_ns();
        kill(child.pid, round == 0 ? SIGKILL : SIGSTOP);
        assert_true(run_until(&seen.closed, 5000));
        print_message("client %s seen after %.1f ms: %s\n", round == 0 ? "killed" : "stopped",
                      (double)(seen.closed_ns - start_ns) / 1e6, seen.text);
        assert_int_equal(seen.status, STATUS_PEER_LOST);
        assert_within("the sight of a client's end", start_ns, seen.closed_ns,
                      round == 0 ? 1000 : 2000);
        link_close(seen.link);
        child_kill(&child);
    }
    rpc_server_free(server);
}

static void on_talker(void *cookie, struct link *link)
{
    struct seen *seen = cookie;
    while (seen->link) {
        seen++;
    }
    on_stream(seen, link);
}

static unsigned n_closed(const struct seen *seen, unsigned n)
{
    unsigned n_found = 0;
    for (unsigned i = 0; i < n; i++) {
        n_found += seen[i].closed;
    }
    return n_found;
}

/* The server's end of links that were talking until the moment of the stop: no other ping may stand
 * in the way of the keepalive's. */
static void test_talkers_stopped(void **state)
{
    enum { N = 12 };
    struct seen seen[N + 1] = {{.first = ""}};
    struct child children[N];
    struct error err = {""};
    struct rpc_server *server;
    struct rpc_server_options options = {.host = "127.0.0.1"};
    assert_int_equal(rpc_server_create(core, &options, &server, &err), STATUS_OK);
    rpc_server_add_stream(server, "/test.Parent/Serve", on_talker, seen);
    rpc_server_start(server);
    char port_text[16];
    snprintf(port_text, sizeof port_text, "%u", rpc_server_port(server));
    for (unsigned i = 0; i < N; i++) {
        children[i] = child_spawn("talk", port_text);
        RUN_WHILE(seen[i].n_messages < 20, 5000);
        assert_true(seen[i].n_messages >= 20);
    }
    for (unsigned i = 0; i < N; i++) {
        kill(children[i].pid, SIGSTOP);
    }
    uint64_t start_ns = loop_now_ns();
    RUN_WHILE(n_closed(seen, N) < N, 5000);
    double worst_ms = 0;
    for (unsigned i = 0; i < N; i++) {
        assert_true(seen[i].closed);
        double ms = (double)(seen[i].closed_ns - start_ns) / 1e6;
        worst_ms = ms > worst_ms ? ms : worst_ms;
        assert_within("the sight of a stop", start_ns, seen[i].closed_ns, 1800);
        assert_int_equal(seen[i].status, STATUS_PEER_LOST);
        link_close(seen[i].link);
        child_kill(&children[i]);
    }
    print_message("%d talkers stopped: the last is seen after %.1f ms\n", N, worst_ms);
    rpc_server_free(server);
}

/* Nobody listens; then close while an attempt is under way. */
static void test_nobody(void **state)
{
    struct child child = child_start(0);
    child_kill(&child);
    struct seen seen;
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    assert_true(run_until(&seen.failed, 3000));
    assert_int_equal(seen.status, STATUS_PEER_LOST);
    assert_false(seen.opened);
    link_reset(seen.link);
    link_close(seen.link);
    open_to(&seen, child.port, "e", (struct rpc_limits){0});
    link_close(seen.link);
    run_ms(200);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: test_link LINK_PEER [TEST]\n");
        return 1;
    }
    peer_program = argv[1];
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    signal(SIGPIPE, SIG_IGN);
    log_init(LOG_LEVEL_ERROR, false, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_echo, setup, teardown),
        cmocka_unit_test_setup_teardown(test_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stopped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stopped_under_load, setup, teardown),
        cmocka_unit_test_setup_teardown(test_loop_held_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_restart, setup, teardown),
        cmocka_unit_test_setup_teardown(test_queue_bound, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_finish, setup, teardown),
        cmocka_unit_test_setup_teardown(test_client_lost, setup, teardown),
        cmocka_unit_test_setup_teardown(test_talkers_stopped, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nobody, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
