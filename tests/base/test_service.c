/*
 * The daemon's frame, in a real process of its own: probes over HTTP, signals, drain, death of the
 * parent. The child tells its port over a pipe; its exit closes that pipe.
 */
#include "base/service.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/mem.h"

/* --- the daemon --- */

struct daemon_setup {
    uint64_t grace_ns;
    bool die_with_parent;
    bool own_drain; /* has an on_drain, and drains when its held request has ended */
    bool stuck;     /* busy without progress */
    bool working;   /* busy with progress */
};

struct daemon {
    struct service *service;
    struct httpd_request *held;
    struct loop_timer *work;
    bool own_drain;
    int notes_fd;
};

static void note(struct daemon *d, const char *text)
{
    if (write(d->notes_fd, text, strlen(text)) < 0) {
        abort();
    }
}

static void on_drain(void *cookie)
{
    struct daemon *d = cookie;

    note(d, "drain\n");
    if (!d->held) {
        service_drained(d->service);
    }
}

static void on_grace_end(void *cookie)
{
    struct daemon *d = cookie;

    note(d, "grace\n");
    if (d->held) {
        httpd_reply_error(d->held, 504, "server_error", "generation_timeout", NULL, "cut");
        d->held = NULL;
    }
}

static void on_pause(void *cookie, uint64_t gap_ns)
{
    note(cookie, gap_ns > NS_PER_S ? "paused long\n" : "paused\n");
}

static void version_extra(void *cookie, struct buf *out)
{
    buf_append_text(out, ",\"protocol\":7");
}

static void held_closed(void *cookie, struct httpd_request *request)
{
    ((struct daemon *)cookie)->held = NULL;
}

static void on_hold(void *cookie, struct httpd_request *request)
{
    struct daemon *d = cookie;

    d->held = request;
    httpd_request_on_close(request, held_closed, d);
    note(d, "held\n");
}

static void on_release(void *cookie, struct httpd_request *request)
{
    struct daemon *d = cookie;

    httpd_reply(request, 200, "text/plain", "ok", 2);
    httpd_reply(d->held, 200, "text/plain", "done", 4);
    d->held = NULL;
    if (d->own_drain) {
        service_drained(d->service);
    }
}

static void on_clear(void *cookie, struct httpd_request *request)
{
    struct daemon *d = cookie;

    service_reason_set(d->service, "pair", "no pair with %s", "prefill-0");
    service_reason_clear(d->service, "starting");
    service_reason_clear(d->service, httpd_request_query(request));
    httpd_reply(request, 200, "text/plain", "ok", 2);
}

static void on_work(void *cookie)
{
    struct daemon *d = cookie;

    service_progress_add(d->service);
    loop_timer_arm(d->work, 20 * NS_PER_MS);
}

static int daemon_main(const struct daemon_setup *setup, int notes_fd)
{
    struct daemon d = {.notes_fd = notes_fd, .own_drain = setup->own_drain};
    struct metrics *metrics = metrics_create();
    struct service_config config;
    struct httpd_config http;
    struct httpd *server = NULL;
    struct loop *loop = NULL;
    struct error err;
    char text[64];
    int rc;

    service_init();
    service_config_init(&config);
    config.name = "test-daemon";
    config.version = "1.2.3";
    config.lease_ns = 300 * NS_PER_MS;
    config.grace_ns = setup->grace_ns ? setup->grace_ns : 20 * NS_PER_S;
    config.die_with_parent = setup->die_with_parent;
    config.on_drain = setup->own_drain ? on_drain : NULL;
    config.on_grace_end = on_grace_end;
    config.on_pause = on_pause;
    config.version_extra = version_extra;
    config.cookie = &d;
    httpd_config_init(&http);
    if (loop_create(&loop) || service_create(loop, &config, &err, &d.service) ||
        httpd_create(loop, &http, &err, &server)) {
        return 99;
    }
    service_attach_httpd(d.service, server, metrics);
    httpd_route_add(server, &(struct httpd_route){HTTPD_GET, "/hold", 0, on_hold, &d});
    httpd_route_add(server, &(struct httpd_route){HTTPD_GET, "/release", 0, on_release, &d});
    httpd_route_add(server, &(struct httpd_route){HTTPD_GET, "/clear", 0, on_clear, &d});
    d.work = loop_timer_create(loop, on_work, &d);
    if (setup->stuck || setup->working) {
        service_busy_begin(d.service);
    }
    if (setup->working) {
        loop_timer_arm(d.work, 0);
    }
    snprintf(text, sizeof(text), "%u\n", httpd_port(server));
    note(&d, text);
    rc = service_run(d.service);
    httpd_free(server);
    metrics_free(metrics);
    service_free(d.service);
    loop_timer_free(d.work);
    loop_free(loop);
    return rc;
}

/* --- the test's side --- */

struct child {
    pid_t pid;
    int notes;
    FILE *notes_file;
    uint16_t port;
    char answer[65536];
};

static struct child child;

static void child_start(const struct daemon_setup *setup)
{
    char line[64];
    int fds[2];

    assert_int_equal(pipe(fds), 0);
    child.pid = fork();
    if (child.pid == 0) {
        close(fds[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a failed test leaves nothing behind */
        _exit(daemon_main(setup, fds[1]));
    }
    close(fds[1]);
    child.notes = fds[0];
    child.notes_file = fdopen(fds[0], "r");
    assert_non_null(fgets(line, sizeof(line), child.notes_file));
    child.port = (uint16_t)atoi(line);
}

static void expect_note(const char *text)
{
    char line[64];

    assert_non_null(fgets(line, sizeof(line), child.notes_file));
    assert_string_equal(line, text);
}

/* Exit code of the child, which must end by itself. That it ends soon shows where nothing else
 * would end it: held requests are held for ever, and the grace is longer than this waits. */
static int child_exit(void)
{
    int status = 0;
    uint64_t begin_ns = loop_now_ns();

    while (loop_now_ns() - begin_ns < 15 * NS_PER_S) {
        if (waitpid(child.pid, &status, WNOHANG) == child.pid) {
            fclose(child.notes_file);
            return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
        }
        usleep(5000);
    }
    kill(child.pid, SIGKILL);
    waitpid(child.pid, &status, 0);
    fclose(child.notes_file);
    return -1;
}

static int connect_child(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(child.port)};
    struct timeval timeout = {.tv_sec = 5};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    return fd;
}

static int read_answer(int fd)
{
    size_t n = 0;
    ssize_t got;

    while ((got = recv(fd, child.answer + n, sizeof(child.answer) - 1 - n, 0)) > 0) {
        n += (size_t)got;
    }
    child.answer[n] = '\0';
    close(fd);
    return n > 12 ? atoi(child.answer + 9) : 0;
}

static int send_get(const char *path)
{
    char text[256];
    int fd = connect_child();

    snprintf(text, sizeof(text), "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path);
    assert_int_equal(send(fd, text, strlen(text), 0), strlen(text));
    return fd;
}

static int get(const char *path)
{
    return read_answer(send_get(path));
}

/* Asks until the answer has this status. */
static void await_status(const char *path, int status)
{
    uint64_t begin_ns = loop_now_ns();
    int found;

    while ((found = get(path)) != status && loop_now_ns() - begin_ns < 15 * NS_PER_S) {
        usleep(10000);
    }
    assert_int_equal(found, status);
}

static bool has(const char *text)
{
    return strstr(child.answer, text) != NULL;
}

static void test_probes_and_reasons(void **state)
{
    char wanted[128];

    child_start(&(struct daemon_setup){.grace_ns = 0});
    assert_int_equal(get("/healthz"), 200);
    assert_int_equal(get("/livez"), 200);
    assert_int_equal(get("/readyz"), 503);
    assert_true(has("{\"what\":\"starting\",\"why\":\"test-daemon is starting\"}"));
    assert_true(has("\"code\":\"not_ready\""));
    assert_int_equal(get("/clear"), 200);
    assert_int_equal(get("/health"), 503);
    assert_false(has("starting"));
    assert_true(has("\"why\":\"no pair with prefill-0\""));
    assert_int_equal(get("/clear?pair"), 200);
    assert_int_equal(get("/readyz"), 200);
    assert_int_equal(get("/version"), 200);
    assert_true(has("{\"version\":\"1.2.3\",\"commit\":\"\",\"protocol\":7}"));
    assert_int_equal(get("/metrics"), 200);
    assert_true(has("baton_ready 1\n"));
    assert_true(has("baton_http_requests_total{"));
    snprintf(wanted, sizeof(wanted),
             "baton_http_responses_total{code=\"5xx\",listener=\"127.0.0.1:%u\"} 2\n", child.port);
    assert_true(has(wanted));
    usleep(700000); /* idle for more than two leases */
    assert_int_equal(get("/healthz"), 200);
    kill(child.pid, SIGTERM);
    assert_int_equal(child_exit(), 0);
}

static void test_work_that_stands_still(void **state)
{
    child_start(&(struct daemon_setup){.stuck = true});
    assert_int_equal(get("/healthz"), 200);
    await_status("/healthz", 503);
    kill(child.pid, SIGKILL);
    assert_int_equal(child_exit(), 1000 + SIGKILL);

    child_start(&(struct daemon_setup){.working = true});
    usleep(700000);
    assert_int_equal(get("/healthz"), 200);
    kill(child.pid, SIGINT);
    assert_int_equal(child_exit(), 0);
}

static void test_drain_finishes_what_runs(void **state)
{
    int held;

    for (int own = 0; own < 2; own++) {
        child_start(&(struct daemon_setup){.own_drain = own});
        assert_int_equal(get("/clear?pair"), 200);
        held = send_get("/hold");
        expect_note("held\n");
        kill(child.pid, SIGTERM);
        if (own) {
            expect_note("drain\n");
        }
        await_status("/readyz", 503);
        assert_true(has("\"code\":\"draining\""));
        assert_true(has("Connection: close\r\n"));
        assert_int_equal(get("/healthz"), 200);
        assert_int_equal(get("/release"), 200);
        assert_int_equal(read_answer(held), 200);
        assert_true(has("done"));
        assert_int_equal(child_exit(), 0);
    }
}

static void test_second_signal_ends_now(void **state)
{
    int held;

    child_start(&(struct daemon_setup){.own_drain = true});
    held = send_get("/hold");
    expect_note("held\n");
    kill(child.pid, SIGTERM);
    expect_note("drain\n");
    kill(child.pid, SIGTERM);
    assert_int_equal(child_exit(), 0);
    assert_int_equal(read_answer(held), 0);
}

static void test_grace_has_an_end(void **state)
{
    uint64_t start = loop_now_ns();
    int held;

    child_start(&(struct daemon_setup){.own_drain = true, .grace_ns = 300 * NS_PER_MS});
    held = send_get("/hold");
    expect_note("held\n");
    kill(child.pid, SIGTERM);
    expect_note("drain\n");
    expect_note("grace\n");
    assert_int_equal(read_answer(held), 504);
    assert_int_equal(child_exit(), 0);
    assert_true(loop_now_ns() - start >= 300 * NS_PER_MS);
}

static void test_pause_is_noticed(void **state)
{
    child_start(&(struct daemon_setup){.grace_ns = 0});
    assert_int_equal(get("/healthz"), 200);
    kill(child.pid, SIGSTOP);
    usleep(1200000);
    kill(child.pid, SIGCONT);
    expect_note("paused long\n");
    assert_int_equal(get("/healthz"), 200);
    kill(child.pid, SIGTERM);
    assert_int_equal(child_exit(), 0);
}

static void test_dies_with_parent(void **state)
{
    char line[64];
    char byte;
    int fds[2];
    pid_t middle;
    struct pollfd gone;

    assert_int_equal(pipe(fds), 0);
    middle = fork();
    if (middle == 0) {
        pid_t pid = fork();

        if (pid == 0) {
            close(fds[0]);
            _exit(daemon_main(&(struct daemon_setup){.die_with_parent = true}, fds[1]));
        }
        close(fds[1]);
        pause();
    }
    close(fds[1]);
    assert_true(read(fds[0], line, sizeof(line)) > 0); /* it runs */
    kill(middle, SIGKILL);
    waitpid(middle, NULL, 0);
    gone = (struct pollfd){.fd = fds[0], .events = POLLIN};
    assert_int_equal(poll(&gone, 1, 15000), 1);
    assert_int_equal(read(fds[0], &byte, 1), 0);
    close(fds[0]);
}

static void test_service_manager_is_told(void **state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval timeout = {.tv_sec = 15};
    char text[64] = "";
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "/tmp/baton-notify-%d", getpid());
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    setenv("NOTIFY_SOCKET", address.sun_path, 1);
    child_start(&(struct daemon_setup){.grace_ns = 0});
    unsetenv("NOTIFY_SOCKET");
    assert_int_equal(recv(fd, text, sizeof(text), MSG_DONTWAIT), -1); /* not ready yet */
    assert_int_equal(get("/clear?pair"), 200);
    assert_int_equal(recv(fd, text, sizeof(text), 0), 7);
    assert_memory_equal(text, "READY=1", 7);
    kill(child.pid, SIGTERM);
    assert_int_equal(recv(fd, text, sizeof(text), 0), 10);
    assert_memory_equal(text, "STOPPING=1", 10);
    assert_int_equal(child_exit(), 0);
    close(fd);
    unlink(address.sun_path);
}

static bool handler_is_foreign(int signo)
{
    struct sigaction action;
    Dl_info info;

    sigaction(signo, NULL, &action);
    return action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN &&
           dladdr((void *)action.sa_sigaction, &info) && strstr(info.dli_fname, "libucs");
}

static void test_init(void **state)
{
    static const int crashes[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction action;
    struct rlimit limit;
    void *ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_LOCAL);

    if (!ucs) {
        print_message("libucs is not here: its handlers are not tried\n");
    } else if (handler_is_foreign(SIGSEGV)) {
        print_message("libucs has installed its handlers\n");
    }
    service_init();
    for (size_t i = 0; i < 4; i++) {
        assert_false(handler_is_foreign(crashes[i]));
    }
    sigaction(SIGPIPE, NULL, &action);
    assert_ptr_equal(action.sa_handler, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(limit.rlim_cur, limit.rlim_max);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_probes_and_reasons),
        cmocka_unit_test(test_work_that_stands_still),
        cmocka_unit_test(test_drain_finishes_what_runs),
        cmocka_unit_test(test_second_signal_ends_now),
        cmocka_unit_test(test_grace_has_an_end),
        cmocka_unit_test(test_pause_is_noticed),
        cmocka_unit_test(test_dies_with_parent),
        cmocka_unit_test(test_service_manager_is_told),
        cmocka_unit_test(test_init),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
