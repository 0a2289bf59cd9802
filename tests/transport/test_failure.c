/* tests/transport/test_failure.c - the peer dies, stops, or is given up while puts run: every put
 * ends once, in time, and nothing outside of landing slots changes; reconnecting leaks nothing;
 * cancel in every state.
 */
#include "tests/transport/pair.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"

enum { PAGE = 901120, SLOTS = 16, N_PUTS = 64 };

/* A stream of puts: whenever one ends well the next goes out, N_PUTS are alive. */
struct stream {
    struct side *side;
    struct pair pair;
    struct watched watched;
    struct region *source;
    uint8_t *memory;
    bool refill;
    unsigned n_submitted, n_done, n_ok, n_cancelled, n_lost;
    bool all_ended;
    uint64_t last_end_ns;
};

static void stream_put(struct stream *stream);

static void stream_done(void *cookie, const struct put_result *result)
{
    struct stream *stream = cookie;
    stream->n_done++;
    stream->n_ok += result->status == STATUS_OK;
    stream->n_cancelled += result->status == STATUS_CANCELLED;
    stream->n_lost += result->status == STATUS_PEER_LOST || result->status == STATUS_STALLED;
    stream->last_end_ns = loop_now_ns();
    assert_false(stream->watched.closed);
    if (stream->refill && result->status == STATUS_OK) {
        stream_put(stream);
    }
    stream->all_ended = stream->n_done == stream->n_submitted;
}

static void stream_put(struct stream *stream)
{
    struct put_run run = {(stream->n_submitted % SLOTS) * PAGE, REGION_ID,
                          (stream->n_submitted * 5 % SLOTS) * PAGE, PAGE};
    struct error err;
    enum status status =
        put_submit(stream->watched.peer, stream->source, &run, 1, stream_done, stream, NULL, &err);
    if (status == STATUS_OK) {
        stream->n_submitted++;
        stream->all_ended = false;
    } else {
        assert_int_equal(status, STATUS_PEER_LOST);
    }
}

static void stream_open(struct stream *stream, struct side *side, const char *tls)
{
    *stream = (struct stream){.side = side, .refill = true};
    pair_start(&stream->pair, tls, SLOTS * PAGE);
    watched_connect(&stream->watched, side, &stream->pair);
    struct error err = {""};
    stream->memory = mem_try_aligned(4096, SLOTS * PAGE);
    memset(stream->memory, 0x5a, SLOTS * PAGE);
    assert_int_equal(region_register_source(side->transport, stream->memory, SLOTS * PAGE,
                                            REGION_HOST, &stream->source, &err),
                     STATUS_OK);
    for (unsigned i = 0; i < N_PUTS; i++) {
        stream_put(stream);
    }
    uint64_t begin_ns = loop_now_ns();
    do {
        side_run(side, 100);
    } while (stream->n_ok == 0 && !lost_over(begin_ns, 5000));
    assert_true(stream->n_ok > 0);
}

/* Gives the peer up as a node does when the link is lost; every put ends in time, before the close.
 */
static void stream_give_up(struct stream *stream)
{
    uint64_t ordered_ns = loop_now_ns();
    watched_close(&stream->watched, stream->side);
    assert_true(stream->all_ended);
    assert_int_equal(stream->n_done, stream->n_submitted);
    assert_int_equal(stream->n_ok + stream->n_cancelled + stream->n_lost, stream->n_done);
    uint64_t ms = (stream->watched.closed_ns - ordered_ns) / NS_PER_MS;
    printf("closed %u ms after the order; %u puts: %u ok, %u cancelled, %u lost\n", (unsigned)ms,
           stream->n_done, stream->n_ok, stream->n_cancelled, stream->n_lost);
    assert_within("the close", ordered_ns, stream->watched.closed_ns, 1000);
    /* all are alike, and the first is right: byte by byte takes most of a second under TSan */
    assert_int_equal(stream->memory[0], 0x5a);
    assert_memory_equal(stream->memory, stream->memory + 1, SLOTS * PAGE - 1);
    region_free(stream->source);
    mem_free(stream->memory);
}

/* kill -9 of the receiver while puts run. UCX tells (tcp in milliseconds, shared memory by
 * keepalive); when it does the puts end without help. The caller's link may be faster: closing ends
 * them too. */
static void killed(const char *tls, bool wait_for_ucx)
{
    struct side side;
    struct stream stream;
    struct transport_options options = {.tls = tls};
    side_open(&side, &options);
    stream_open(&stream, &side, tls);
    uint64_t killed_ns = loop_now_ns();
    pair_kill(&stream.pair);
    if (wait_for_ucx) {
        assert_true(side_wait(&side, &stream.watched.failed, 4000));
        printf("%s: death seen after %u ms (%s)\n", tls != NULL ? tls : "default",
               (unsigned)((stream.watched.failed_ns - killed_ns) / NS_PER_MS),
               stream.watched.failure_text);
        assert_int_equal(stream.watched.failure, STATUS_PEER_LOST);
        assert_true(side_wait(&side, &stream.all_ended, 1500));
    } else {
        side_run(&side, 20);
    }
    stream_give_up(&stream);
    struct transport_stats stats;
    transport_stats(side.transport, &stats);
    assert_int_equal(stats.bytes_in_flight, 0);
    assert_int_equal(stats.puts_alive, 0);
    assert_int_equal(stats.peers_alive, 0);
    side_close(&side);
}

static void killed_tcp(void **state)
{
    killed("tcp", true);
}

static void killed_posix(void **state)
{
    killed("posix", true);
}

static void killed_default(void **state)
{
    killed(NULL, true);
}

static void killed_and_given_up(void **state)
{
    killed("tcp", false);
    killed("sysv", false);
    killed("posix,cma", false);
}

enum { SAMPLES = 64 };

/* Runs until the peer has failed; when the last operation completed before that. */
static uint64_t wait_failed(struct stream *stream)
{
    struct transport_stats last = {0}, stats;
    uint64_t begin_ns = loop_now_ns(), moved_ns = begin_ns;
    unsigned n_ok[SAMPLES] = {0}, n_turns = 0;
    while (!stream->watched.failed && !lost_over(begin_ns, 5000)) {
        transport_stats(stream->side->transport, &stats);
        if (stats.bytes_in_flight != last.bytes_in_flight || stats.puts_done != last.puts_done) {
            moved_ns = loop_now_ns();
        }
        last = stats;
        n_ok[n_turns++ % SAMPLES] = stream->n_ok;
        side_run(stream->side, 1);
    }
    assert_true(stream->watched.failed);
    /* What breaks the connection completes nothing: UCX says of some puts that it did. */
    side_run(stream->side, 20);
    assert_true(n_turns > SAMPLES);
    assert_int_equal(stream->n_ok, n_ok[n_turns % SAMPLES]);
    return moved_ns;
}

/* SIGSTOP of the receiver: over tcp puts stop completing, and 1.5 s later that is a stall, or the
 * kernel gives up a connection whose window stays shut. The kernels' buffers take bytes for a while
 * after the stop; a link to the stopped process sees it itself in 2 s (tests/rpc). Over shared
 * memory puts "succeed", which is why nodes have leases, and closing works all the same. */
static void stopped_tcp(void **state)
{
    struct side side;
    struct stream stream;
    struct transport_options options = {.tls = "tcp"};
    side_open(&side, &options);
    stream_open(&stream, &side, "tcp");
    uint64_t stopped_ns = loop_now_ns();
    kill(stream.pair.pid, SIGSTOP);
    uint64_t moved_ns = wait_failed(&stream), failed_ns = stream.watched.failed_ns;
    printf("a stop is seen after %u ms; for %u ms the kernels took more\n",
           (unsigned)((failed_ns - stopped_ns) / NS_PER_MS),
           (unsigned)((moved_ns - stopped_ns) / NS_PER_MS));
    assert_true(stream.watched.failure == STATUS_STALLED ||
                stream.watched.failure == STATUS_PEER_LOST);
    /* what the machine took from the receiver before the stop was silence too */
    uint64_t lost_before_ns = lost_ns(stopped_ns - 2 * NS_PER_S, stopped_ns);
    assert_true(failed_ns - stopped_ns + lost_before_ns >= 900 * NS_PER_MS);
    assert_within("the sight of a stall", moved_ns, failed_ns, 1500 + 250);
    assert_true(side_wait(&side, &stream.all_ended, 1000));
    stream_give_up(&stream);
    pair_kill(&stream.pair);
    side_close(&side);
}

/* This process is paused amid the silence: that much does not count, and what was before it does.
 */
static void stopped_and_paused(void **state)
{
    struct side side;
    struct stream stream;
    struct transport_options options = {.tls = "tcp", .stall_ns = 600 * NS_PER_MS};
    side_open(&side, &options);
    stream_open(&stream, &side, "tcp");
    kill(stream.pair.pid, SIGSTOP);
    pid_t us = getpid(), pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        usleep(450 * 1000);
        kill(us, SIGSTOP);
        usleep(600 * 1000);
        kill(us, SIGCONT);
        _exit(0);
    }
    uint64_t moved_ns = wait_failed(&stream);
    assert_within("the sight of a stall", moved_ns, stream.watched.failed_ns, 600 + 100);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    stream_give_up(&stream);
    pair_kill(&stream.pair);
    side_close(&side);
}

static void stopped_posix(void **state)
{
    struct side side;
    struct stream stream;
    struct transport_options options = {.tls = "posix"};
    side_open(&side, &options);
    stream_open(&stream, &side, "posix");
    kill(stream.pair.pid, SIGSTOP);
    unsigned before = stream.n_ok;
    uint64_t stopped_ns = loop_now_ns();
    while (stream.n_ok == before && !lost_over(stopped_ns, 5000)) {
        side_run(&side, 10);
    }
    assert_true(stream.n_ok > before);
    side_run(&side, 300);
    assert_false(stream.watched.failed);
    stream_give_up(&stream);
    pair_kill(&stream.pair);
    side_close(&side);
}

/* A peer that goes on writing after we closed our endpoint to it: it may change the landing slots
 * that it was granted, and nothing else: not the slots beside them, not our pool. */
static void late_writer(const char *tls)
{
    enum { POOL = 4 << 20, LANDING = 8 * PAGE };
    struct side side;
    struct pair pair;
    struct watched watched;
    struct region *landing;
    struct error err = {""};
    struct transport_options options = {.tls = tls};
    side_open(&side, &options);
    uint8_t *pool = mem_try_aligned(4096, POOL);
    struct region *source;
    put_pattern_fill(pool, POOL, 1);
    assert_int_equal(region_register_source(side.transport, pool, POOL, REGION_HOST, &source, &err),
                     STATUS_OK);
    assert_int_equal(region_create_landing(side.transport, LANDING, &landing, &err), STATUS_OK);
    put_pattern_fill(region_base(landing), LANDING, 2);
    uint8_t *expected = mem_dup(region_base(landing), LANDING);
    pair_start(&pair, tls, PAGE);
    watched_connect(&watched, &side, &pair);
    size_t address_bytes, rkey_bytes;
    const uint8_t *address = transport_worker_address(side.transport, &address_bytes);
    const uint8_t *rkey = region_rkey(landing, &rkey_bytes);
    pair_write_for_ever(&pair, address, address_bytes, (uintptr_t)region_base(landing), LANDING,
                        rkey, rkey_bytes, PAGE);
    const volatile uint8_t *slot = region_base(landing);
    uint8_t first[8];
    uint64_t begin_ns = loop_now_ns();
    while (memcmp(region_base(landing), expected, 8) == 0 && !lost_over(begin_ns, 5000)) {
        side_run(&side, 10);
    }
    memcpy(first, (const uint8_t *)slot, 8);
    assert_memory_not_equal(first, expected, 8);
    watched_close(&watched, &side);
    side_run(&side, 300);
    bool still_written = memcmp(first, (const uint8_t *)slot, 8) != 0;
    printf("%s: the slot %s after the close\n", tls,
           still_written ? "is still written" : "is silent");
    assert_memory_equal(region_base(landing) + PAGE, expected + PAGE, LANDING - PAGE);
    assert_true(put_pattern_check(pool, POOL, 1, NULL));
    pair_kill(&pair);
    region_free(landing);
    region_free(source);
    side_close(&side);
    mem_free(pool);
    mem_free(expected);
}

static void late_writers(void **state)
{
    late_writer("posix");
    late_writer("sysv");
    late_writer("tcp");
}

/* kill -9 of the writer in the middle of its puts: the receiver, which did nothing wrong, lives on.
 */
static void killed_writer(const char *tls, int n)
{
    struct side side;
    struct region *landing;
    struct error err = {""};
    struct transport_options options = {.tls = tls};
    side_open(&side, &options);
    assert_int_equal(region_create_landing(side.transport, PAGE, &landing, &err), STATUS_OK);
    size_t address_bytes, rkey_bytes;
    const uint8_t *address = transport_worker_address(side.transport, &address_bytes);
    const uint8_t *rkey = region_rkey(landing, &rkey_bytes);
    for (int i = 0; i < n; i++) {
        struct pair pair;
        memset(region_base(landing), 0, PAGE);
        pair_start(&pair, tls, 4096);
        pair_write_for_ever(&pair, address, address_bytes, (uintptr_t)region_base(landing), PAGE,
                            rkey, rkey_bytes, PAGE);
        const volatile uint8_t *slot = region_base(landing);
        uint64_t begin_ns = loop_now_ns();
        while ((slot[0] | slot[1] | slot[2]) == 0 && !lost_over(begin_ns, 5000)) {
            side_run(&side, 1);
        }
        assert_true((slot[0] | slot[1] | slot[2]) != 0);
        side_run(&side, (unsigned)(5 + i % 7 * 3));
        pair_kill(&pair);
        side_run(&side, 30);
    }
    region_free(landing);
    side_close(&side);
}

static void killed_writers(void **state)
{
    killed_writer("tcp", 20);
    killed_writer("posix", 5);
    killed_writer("posix,cma", 5);
}

/* The same made certain: the receiver is stopped, the writer fills its socket and is gone, the
 * receiver goes on and finds puts from a peer to which it can't answer any more. */
static void writer_gone_meanwhile(void **state)
{
    for (int i = 0; i < 5; i++) {
        struct side side;
        struct stream stream;
        struct transport_options options = {.tls = "tcp"};
        side_open(&side, &options);
        stream_open(&stream, &side, "tcp");
        kill(stream.pair.pid, SIGSTOP);
        side_run(&side, 50);
        stream_give_up(&stream);
        side_close(&side);
        kill(stream.pair.pid, SIGCONT);
        usleep(100 * 1000); /* for what it may do wrong now */
        assert_true(pair_check_canary(&stream.pair, SLOTS * PAGE, 0));
        pair_end(&stream.pair);
    }
}

/* ---- cycles ---- */

static unsigned count_descriptors(void)
{
    unsigned n = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder) != NULL) {
        n++;
    }
    closedir(folder);
    return n;
}

/* Lines of the address map: what a mapping that was not given back adds to. */
static unsigned count_mappings(void)
{
    unsigned n = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[1024];
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        n += strstr(line, "rw-s") != NULL;
    }
    fclose(maps);
    return n;
}

static void cycle(struct side *side, struct region *source, const char *tls, bool kill_it)
{
    struct pair pair;
    struct watched watched;
    struct noted noted[4] = {{0}};
    struct error err = {""};
    pair_start(&pair, tls, 1 << 20);
    watched_connect(&watched, side, &pair);
    for (uint32_t i = 0; i < 4; i++) {
        struct put_run run = {0, REGION_ID, i * 65536, 65536};
        assert_int_equal(
            put_submit(watched.peer, source, &run, 1, noted_done, &noted[i], &noted[i].put, &err),
            STATUS_OK);
    }
    if (kill_it) {
        pair_kill(&pair);
    } else {
        assert_true(side_wait(side, &noted[3].done, 5000));
        assert_int_equal(noted[3].result.status, STATUS_OK);
    }
    watched_close(&watched, side);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(noted[i].n_done, 1);
    }
    if (!kill_it) {
        pair_end(&pair);
    }
}

static void cycles_over(const char *tls, unsigned n)
{
    struct side side;
    struct region *source;
    struct error err = {""};
    struct transport_options options = {.tls = tls};
    side_open(&side, &options);
    uint8_t *memory = mem_try_aligned(4096, 65536);
    memset(memory, 1, 65536);
    assert_int_equal(
        region_register_source(side.transport, memory, 65536, REGION_HOST, &source, &err),
        STATUS_OK);
    unsigned descriptors = 0, mappings = 0;
    for (unsigned i = 0; i < n; i++) {
        cycle(&side, source, tls, i % 4 != 3);
        if (i == 7) {
            descriptors = count_descriptors();
            mappings = count_mappings();
        }
    }
    side_run(&side, 100);
    printf("%s: %u cycles, descriptors %u -> %u, shared mappings %u -> %u\n",
           tls != NULL ? tls : "default", n, descriptors, count_descriptors(), mappings,
           count_mappings());
    assert_true(count_descriptors() <= descriptors + 2);
    assert_true(count_mappings() <= mappings + 2);
    struct transport_stats stats;
    transport_stats(side.transport, &stats);
    assert_int_equal(stats.peers_closed, n);
    assert_int_equal(stats.puts_done + stats.puts_failed + stats.puts_cancelled,
                     stats.puts_submitted);
    region_free(source);
    side_close(&side);
    mem_free(memory);
}

static unsigned n_cycles(void)
{
    const char *text = getenv("BATON_TEST_CYCLES");
    return text != NULL ? (unsigned)strtoul(text, NULL, 10) : 100;
}

static void cycles_default(void **state)
{
    cycles_over(NULL, n_cycles());
}

static void cycles_tcp(void **state)
{
    cycles_over("tcp", n_cycles());
}

/* ---- cancel ---- */

struct canceller {
    struct stream *stream;
    struct noted noted;
};

static void submit_all(struct stream *stream, struct noted *noted)
{
    struct put_run runs[SLOTS];
    struct error err = {""};
    for (uint32_t i = 0; i < SLOTS; i++) {
        runs[i] = (struct put_run){(SLOTS - 1 - i) * PAGE, REGION_ID, i * PAGE, PAGE};
    }
    *noted = (struct noted){0};
    assert_int_equal(put_submit(stream->watched.peer, stream->source, runs, SLOTS, noted_done,
                                noted, &noted->put, &err),
                     STATUS_OK);
}

static void cancels(const char *tls)
{
    struct side side;
    struct stream stream;
    struct transport_options options = {.tls = tls, .window_bytes = 2 << 20};
    side_open(&side, &options);
    stream_open(&stream, &side, tls);
    stream.refill = false;
    assert_true(side_wait(&side, &stream.all_ended, 10000));
    struct noted noted[8];
    /* queued behind others */
    for (int i = 0; i < 8; i++) {
        submit_all(&stream, &noted[i]);
    }
    put_cancel(noted[7].put);
    put_cancel(noted[7].put);
    put_cancel(noted[3].put);
    for (int i = 0; i < 8; i++) {
        assert_true(side_wait(&side, &noted[i].done, 10000));
    }
    assert_int_equal(noted[7].result.status, STATUS_CANCELLED);
    assert_int_equal(noted[7].result.bytes_posted, 0);
    assert_int_equal(noted[6].result.status, STATUS_OK);
    assert_int_equal(noted[3].result.status, STATUS_CANCELLED);
    /* at any moment of its life, which the delay sweeps over */
    unsigned n_cut = 0, n_none = 0, n_whole = 0;
    for (unsigned delay_us = 0; delay_us < 4000; delay_us += 50) {
        submit_all(&stream, &noted[0]);
        uint64_t until_ns = loop_now_ns() + delay_us * NS_PER_US;
        while (loop_now_ns() < until_ns) {
        }
        put_cancel(noted[0].put);
        assert_true(side_wait(&side, &noted[0].done, 5000));
        side_run(&side, 2);
        assert_int_equal(noted[0].n_done, 1);
        const struct put_result *result = &noted[0].result;
        if (result->status == STATUS_OK) {
            assert_int_equal(result->bytes_posted, result->bytes);
            n_whole++;
        } else {
            assert_int_equal(result->status, STATUS_CANCELLED);
            assert_true(result->bytes_posted < result->bytes);
            n_cut += result->bytes_posted > 0;
            n_none += result->bytes_posted == 0;
        }
    }
    printf("%s: cancelled before posting %u, while posting %u, too late %u\n", tls, n_none, n_cut,
           n_whole);
    assert_true(n_cut > 0);
    /* after a cancel the peer works as before */
    submit_all(&stream, &noted[0]);
    assert_true(side_wait(&side, &noted[0].done, 5000));
    assert_int_equal(noted[0].result.status, STATUS_OK);
    /* cancel, then close at once; and cancel after close */
    submit_all(&stream, &noted[0]);
    submit_all(&stream, &noted[1]);
    put_cancel(noted[0].put);
    put_peer_close(stream.watched.peer, NULL, NULL);
    put_cancel(noted[1].put);
    struct put_run run = {0, REGION_ID, 0, PAGE};
    assert_int_equal(
        put_submit(stream.watched.peer, stream.source, &run, 1, noted_done, &noted[2], NULL, NULL),
        STATUS_PEER_LOST);
    assert_true(side_wait(&side, &noted[0].done, 3000));
    assert_true(side_wait(&side, &noted[1].done, 3000));
    side_run(&side, 50);
    assert_int_equal(noted[0].n_done + noted[1].n_done, 2);
    region_free(stream.source);
    pair_end(&stream.pair);
    side_close(&side);
    mem_free(stream.memory);
}

static void cancels_shared(void **state)
{
    cancels("posix");
}

static void cancels_tcp(void **state)
{
    cancels("tcp");
}

/* transport_close with all in flight ends every put inside the call. */
static void close_ends_all(void **state)
{
    static const char *const transports[] = {"tcp", "posix"};
    for (int i = 0; i < 2; i++) {
        struct side side;
        struct stream stream;
        struct transport_options options = {.tls = transports[i]};
        side_open(&side, &options);
        stream_open(&stream, &side, transports[i]);
        uint64_t begin_ns = loop_now_ns();
        side_close(&side);
        assert_true(stream.all_ended);
        assert_int_equal(stream.n_done, stream.n_submitted);
        assert_within("the close of all", begin_ns, loop_now_ns(), 2500);
        mem_free(stream.memory);
        pair_end(&stream.pair);
    }
}

/* An address whose process is gone, and one whose process never answers. */
static void nobody_there(void **state)
{
    struct side side;
    struct pair pair;
    struct watched watched;
    struct error err = {""};
    struct noted noted = {0};
    struct transport_options options = {.tls = "tcp", .connect_timeout_ns = 500 * NS_PER_MS};
    side_open(&side, &options);
    uint8_t *memory = mem_zalloc(4096);
    struct region *source;
    assert_int_equal(
        region_register_source(side.transport, memory, 4096, REGION_HOST, &source, &err),
        STATUS_OK);
    for (int i = 0; i < 2; i++) {
        pair_start(&pair, "tcp", 4096);
        if (i == 0) {
            pair_kill(&pair);
        } else {
            kill(pair.pid, SIGSTOP);
        }
        assert_int_equal(watched_try(&watched, &side, &pair, true, true, &err), STATUS_OK);
        struct put_run run = {0, REGION_ID, 0, 4096};
        noted = (struct noted){0};
        assert_int_equal(put_submit(watched.peer, source, &run, 1, noted_done, &noted, NULL, &err),
                         STATUS_OK);
        assert_true(side_wait(&side, &watched.failed, 2000));
        assert_false(watched.up);
        assert_int_equal(watched.failure, STATUS_PEER_LOST);
        assert_true(side_wait(&side, &noted.done, 1500));
        assert_int_equal(noted.result.status, STATUS_PEER_LOST);
        watched_close(&watched, &side);
        if (i == 1) {
            pair_kill(&pair);
        }
    }
    region_free(source);
    side_close(&side);
    mem_free(memory);
}

int main(int argc, char **argv)
{
    pair_main(argc, argv);
    const struct CMUnitTest death[] = {
        cmocka_unit_test(killed_tcp),
        cmocka_unit_test(killed_posix),
        cmocka_unit_test(killed_default),
        cmocka_unit_test(killed_and_given_up),
        cmocka_unit_test(stopped_tcp),
        cmocka_unit_test(stopped_and_paused),
        cmocka_unit_test(stopped_posix),
        cmocka_unit_test(late_writers),
        cmocka_unit_test(nobody_there),
        cmocka_unit_test(killed_writers),
        cmocka_unit_test(writer_gone_meanwhile),
    };
    const struct CMUnitTest cancel[] = {
        cmocka_unit_test(cancels_shared),
        cmocka_unit_test(cancels_tcp),
        cmocka_unit_test(close_ends_all),
    };
    const struct CMUnitTest cycles[] = {
        cmocka_unit_test(cycles_default),
        cmocka_unit_test(cycles_tcp),
    };
    const char *what = argc > 1 ? argv[1] : "";
    cmocka_set_test_filter(getenv("BATON_TEST_ONLY"));
    int rc = 0;
    if (strcmp(what, "cycles") != 0 && strcmp(what, "cancel") != 0) {
        rc |= cmocka_run_group_tests(death, NULL, NULL);
    }
    if (strcmp(what, "cycles") != 0 && strcmp(what, "death") != 0) {
        rc |= cmocka_run_group_tests(cancel, NULL, NULL);
    }
    if (strcmp(what, "death") != 0 && strcmp(what, "cancel") != 0) {
        rc |= cmocka_run_group_tests(cycles, NULL, NULL);
    }
    return rc != 0;
}
