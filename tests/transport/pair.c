/* tests/transport/pair.c - see the header. */
#include "tests/transport/pair.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"

struct command {
    uint8_t what; /* 'c' check, 'w' write, 'q' quit */
    uint64_t offset, bytes, seed;
};

struct hello {
    uint64_t base, bytes;
    uint32_t address_bytes, rkey_bytes;
};

static void die(const char *what)
{
    fprintf(stderr, "pair: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void send_all(int fd, const void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t sent = send(fd, (const uint8_t *)bytes + at, n - at, MSG_NOSIGNAL);
        if (sent <= 0) {
            die("send");
        }
        at += (size_t)sent;
    }
}

static bool receive_all(int fd, void *bytes, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t got = recv(fd, (uint8_t *)bytes + at, n - at, 0);
        if (got <= 0) {
            return false;
        }
        at += (size_t)got;
    }
    return true;
}

/* ---- the child ---- */

/* canary: what the landing area held before anything was written to it. */
static bool check(const uint8_t *landing, const uint8_t *canary, const struct command *command)
{
    const uint8_t *at = landing + command->offset;
    if (command->seed == CANARY_SEED) {
        return memcmp(at, canary + command->offset, command->bytes) == 0;
    }
    return put_pattern_check(at, command->bytes, command->seed, NULL);
}

static void writer_nothing(void *cookie, struct put_peer *peer)
{
    (void)cookie;
    (void)peer;
}

static void writer_failed(void *cookie, struct put_peer *peer, enum status status, const char *text)
{
    (void)cookie;
    (void)peer;
    fprintf(stderr, "pair: the writer's peer failed: %s (%s)\n", text, status_name(status));
}

struct writer {
    struct put_peer *peer;
    struct region *source;
    uint8_t *memory;
    uint64_t slot_bytes;
    uint64_t n;
};

static void writer_put(void *cookie, const struct put_result *result)
{
    struct writer *writer = cookie;
    if (result != NULL && result->status != STATUS_OK) {
        return;
    }
    put_pattern_fill(writer->memory, writer->slot_bytes, 1000 + writer->n++);
    struct put_run run = {0, 0, 0, writer->slot_bytes};
    struct error err;
    if (put_submit(writer->peer, writer->source, &run, 1, writer_put, writer, NULL, &err) !=
        STATUS_OK) {
        fprintf(stderr, "pair: writer: %s\n", err.text);
    }
}

static void write_for_ever(struct loop *loop, struct transport *t, int fd,
                           const struct command *command)
{
    static const struct put_peer_events events = {writer_nothing, writer_failed};
    struct hello hello;
    static uint8_t address[TRANSPORT_MAX_ADDRESS_BYTES], rkey[TRANSPORT_MAX_RKEY_BYTES];
    if (!receive_all(fd, &hello, sizeof hello) || !receive_all(fd, address, hello.address_bytes) ||
        !receive_all(fd, rkey, hello.rkey_bytes)) {
        die("writer's hello");
    }
    struct put_remote_region region = {0, hello.base, hello.bytes, rkey, hello.rkey_bytes};
    struct put_peer_options options = {.name = "reader",
                                       .address = address,
                                       .address_bytes = hello.address_bytes,
                                       .regions = &region,
                                       .n_regions = 1,
                                       .allow_slow = true,
                                       .events = &events};
    static struct writer writer;
    struct error err;
    writer.slot_bytes = command->bytes;
    writer.memory = mem_alloc(command->bytes);
    if (region_register_source(t, writer.memory, command->bytes, REGION_HOST, &writer.source,
                               &err) != STATUS_OK ||
        put_peer_connect(t, &options, &writer.peer, &err) != STATUS_OK) {
        fprintf(stderr, "pair: %s\n", err.text);
        exit(1);
    }
    for (int i = 0; i < 8; i++) {
        writer_put(&writer, NULL);
    }
    enum status status = loop_run(loop);
    (void)status;
    exit(1);
}

static void child(const char *tls, size_t landing_bytes)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = 3;
    struct error err;
    struct loop *loop;
    struct transport *t;
    struct region *landing;
    struct transport_options options = {.tls = tls[0] != 0 ? tls : NULL};
    if (loop_create(&loop) != STATUS_OK || transport_open(loop, &options, &t, &err) != STATUS_OK ||
        region_create_landing(t, landing_bytes, &landing, &err) != STATUS_OK) {
        fprintf(stderr, "pair: %s\n", err.text);
        exit(1);
    }
    uint8_t *canary = mem_alloc(landing_bytes);
    put_pattern_fill(canary, landing_bytes, CANARY_SEED);
    memcpy(region_base(landing), canary, landing_bytes);
    size_t address_bytes, rkey_bytes;
    const uint8_t *address = transport_worker_address(t, &address_bytes);
    const uint8_t *rkey = region_rkey(landing, &rkey_bytes);
    struct hello hello = {(uintptr_t)region_base(landing), landing_bytes, (uint32_t)address_bytes,
                          (uint32_t)rkey_bytes};
    send_all(fd, &hello, sizeof hello);
    send_all(fd, address, address_bytes);
    send_all(fd, rkey, rkey_bytes);
    struct command command;
    while (receive_all(fd, &command, sizeof command) && command.what != 'q') {
        if (command.what == 'w') {
            write_for_ever(loop, t, fd, &command);
        }
        uint8_t good = check(region_base(landing), canary, &command);
        send_all(fd, &good, 1);
    }
    region_free(landing);
    mem_free(canary);
    transport_close(t);
    loop_free(loop);
    exit(0);
}

void pair_main(int argc, char **argv)
{
    log_init(LOG_LEVEL_WARN, false, argc > 1 ? "child" : NULL);
    if (argc == 4 && strcmp(argv[1], "--child") == 0) {
        child(argv[2], strtoull(argv[3], NULL, 10));
    }
    lost_watch();
}

/* ---- this side ---- */

static void side_timeout(void *cookie)
{
    struct side *side = cookie;
    side->timed_out = true;
    loop_stop(side->loop);
}

void side_open(struct side *side, const struct transport_options *options)
{
    struct transport_options none = {0};
    struct error err = {""};
    *side = (struct side){0};
    assert_int_equal(loop_create(&side->loop), STATUS_OK);
    if (transport_open(side->loop, options != NULL ? options : &none, &side->transport, &err) !=
        STATUS_OK) {
        fail_msg("%s", err.text);
    }
    side->timer = loop_timer_create(side->loop, side_timeout, side);
}

void side_close(struct side *side)
{
    transport_close(side->transport);
    loop_timer_free(side->timer);
    loop_free(side->loop);
}

/* The callbacks of the tests only set flags, so the wait looks at them every millisecond. */
bool side_wait(struct side *side, const bool *flag, unsigned timeout_ms)
{
    uint64_t begin_ns = loop_now_ns();
    while (!*flag && !lost_over(begin_ns, timeout_ms)) {
        side_run(side, 1);
    }
    return *flag;
}

void side_run(struct side *side, unsigned ms)
{
    loop_timer_arm(side->timer, ms * NS_PER_MS);
    assert_int_equal(loop_run(side->loop), STATUS_OK);
}

/* ---- the other side ---- */

void pair_start(struct pair *pair, const char *tls, size_t landing_bytes)
{
    int fds[2];
    char bytes_text[32];
    memset(pair, 0, sizeof *pair);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    snprintf(bytes_text, sizeof bytes_text, "%zu", landing_bytes);
    char program[] = "pair", child_option[] = "--child";
    char *arguments[] = {program, child_option, (char *)(uintptr_t)(tls != NULL ? tls : ""),
                         bytes_text, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
    assert_int_equal(posix_spawn(&pair->pid, "/proc/self/exe", &actions, NULL, arguments, environ),
                     0);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    pair->fd = fds[0];
    struct hello hello;
    assert_true(receive_all(pair->fd, &hello, sizeof hello));
    assert_true(hello.address_bytes <= sizeof pair->address);
    assert_true(hello.rkey_bytes <= sizeof pair->rkey);
    assert_true(receive_all(pair->fd, pair->address, hello.address_bytes));
    assert_true(receive_all(pair->fd, pair->rkey, hello.rkey_bytes));
    pair->base = hello.base;
    pair->bytes = hello.bytes;
    pair->address_bytes = hello.address_bytes;
    pair->rkey_bytes = hello.rkey_bytes;
}

bool pair_check(struct pair *pair, uint64_t offset, uint64_t bytes, uint64_t seed)
{
    struct command command = {.what = 'c', .offset = offset, .bytes = bytes, .seed = seed};
    uint8_t good = 0;
    send_all(pair->fd, &command, sizeof command);
    assert_true(receive_all(pair->fd, &good, 1));
    return good == 1;
}

bool pair_check_canary(struct pair *pair, uint64_t offset, uint64_t bytes)
{
    return bytes == 0 || pair_check(pair, offset, bytes, CANARY_SEED);
}

void pair_write_for_ever(struct pair *pair, const uint8_t *address, size_t address_bytes,
                         uint64_t base, uint64_t bytes, const uint8_t *rkey, size_t rkey_bytes,
                         uint64_t slot_bytes)
{
    struct command command = {.what = 'w', .bytes = slot_bytes};
    struct hello hello = {base, bytes, (uint32_t)address_bytes, (uint32_t)rkey_bytes};
    send_all(pair->fd, &command, sizeof command);
    send_all(pair->fd, &hello, sizeof hello);
    send_all(pair->fd, address, address_bytes);
    send_all(pair->fd, rkey, rkey_bytes);
}

void pair_end(struct pair *pair)
{
    struct command command = {.what = 'q'};
    int status = -1;
    send_all(pair->fd, &command, sizeof command);
    assert_int_equal(waitpid(pair->pid, &status, 0), pair->pid);
    assert_int_equal(status, 0);
    close(pair->fd);
}

void pair_kill(struct pair *pair)
{
    kill(pair->pid, SIGKILL);
    assert_int_equal(waitpid(pair->pid, NULL, 0), pair->pid);
    close(pair->fd);
}

/* ---- watched peers, noted puts ---- */

static void watched_up(void *cookie, struct put_peer *peer)
{
    struct watched *watched = cookie;
    (void)peer;
    assert_false(watched->up || watched->failed || watched->closed);
    watched->up = true;
}

static void watched_failed(void *cookie, struct put_peer *peer, enum status status,
                           const char *text)
{
    struct watched *watched = cookie;
    (void)peer;
    assert_false(watched->failed || watched->closed);
    watched->failed = true;
    watched->failure = status;
    watched->failed_ns = loop_now_ns();
    snprintf(watched->failure_text, sizeof watched->failure_text, "%s", text);
}

static void watched_closed(void *cookie, struct put_peer *peer)
{
    struct watched *watched = cookie;
    assert_ptr_equal(peer, watched->peer);
    watched->closed = true;
    watched->closed_ns = loop_now_ns();
    watched->peer = NULL;
}

enum status watched_try(struct watched *watched, struct side *side, const struct pair *pair,
                        bool same_host, bool allow_slow, struct error *err)
{
    static const struct put_peer_events events = {watched_up, watched_failed};
    struct put_remote_region region = {REGION_ID, pair->base, pair->bytes, pair->rkey,
                                       pair->rkey_bytes};
    struct put_peer_options options = {
        .name = "child",
        .address = pair->address,
        .address_bytes = pair->address_bytes,
        .regions = &region,
        .n_regions = 1,
        .same_host = same_host,
        .allow_slow = allow_slow,
        .events = &events,
        .cookie = watched,
    };
    *watched = (struct watched){0};
    return put_peer_connect(side->transport, &options, &watched->peer, err);
}

void watched_connect(struct watched *watched, struct side *side, const struct pair *pair)
{
    struct error err = {""};
    if (watched_try(watched, side, pair, true, true, &err) != STATUS_OK) {
        fail_msg("%s", err.text);
    }
    side_wait(side, &watched->up, 5000);
    if (!watched->up) {
        fail_msg("the peer did not come up: %s", watched->failure_text);
    }
}

void watched_close(struct watched *watched, struct side *side)
{
    put_peer_close(watched->peer, watched_closed, watched);
    assert_true(side_wait(side, &watched->closed, 3000));
}

void noted_done(void *cookie, const struct put_result *result)
{
    struct noted *noted = cookie;
    noted->done = true;
    noted->n_done++;
    noted->done_ns = loop_now_ns();
    noted->result = *result;
}
