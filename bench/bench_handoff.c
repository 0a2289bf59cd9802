/* bench/bench_handoff.c - how fast the hand-off moves pages, next to what bounds it.
 *
 * Two processes, page images of 901,120 B, put and flushed through transport/ as a prefill node
 * does. Rows, all measured in turn in each round of the same invocation, best round of each: ours
 * scattered pages to scattered slots, the working set far above the caches memcpy    one thread
 * copying the same scattered pages into a shared mapping: the limit of shared memory ours, hot one
 * page to one slot over and over: what ucx_perftest does perftest  ucx_perftest -t ucp_put_bw, same
 * size, transport and UCX_ settings accept    the receiver's copy with checksum (kernels/parcel.h),
 * and memcpy over the same pages The goal is ours, hot >= 90 % of perftest over shared memory.
 * Numbers are printed, never asserted: exit 1 only when something fails. usage: bench_handoff
 * [rounds [pages]]
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "kernels/parcel.h"
#include "transport/put.h"

enum {
    PAGE = 901120,
    N_SLOTS = 96, /* 86 MB on each side: above any cache here */
    RUNS = 8,     /* pages a parcel */
    ALIVE = 4,    /* parcels in flight: one is posting while others flush */
    REGION_ID = 1,
};

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_handoff: %s: %s\n", what, why);
    exit(1);
}

/* ---- the receiver ---- */

struct hello {
    uint64_t base, bytes;
    uint32_t address_bytes, rkey_bytes;
    uint8_t address[TRANSPORT_MAX_ADDRESS_BYTES], rkey[TRANSPORT_MAX_RKEY_BYTES];
};

static void move_all(int fd, void *bytes, size_t n, bool out)
{
    for (size_t at = 0; at < n;) {
        uint8_t *p = (uint8_t *)bytes + at;
        ssize_t moved = out ? write(fd, p, n - at) : read(fd, p, n - at);
        if (moved <= 0) {
            die("socket", strerror(errno));
        }
        at += (size_t)moved;
    }
}

static int receiver(const char *tls)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct loop *loop;
    struct transport *t;
    struct region *landing;
    struct error err;
    struct transport_options options = {.tls = tls};
    if (loop_create(&loop) != STATUS_OK || transport_open(loop, &options, &t, &err) != STATUS_OK ||
        region_create_landing(t, (size_t)N_SLOTS * PAGE, &landing, &err) != STATUS_OK) {
        die("receiver", err.text);
    }
    struct hello *hello = mem_zalloc(sizeof *hello);
    size_t address_bytes, rkey_bytes;
    const uint8_t *address = transport_worker_address(t, &address_bytes);
    const uint8_t *rkey = region_rkey(landing, &rkey_bytes);
    hello->base = (uintptr_t)region_base(landing);
    hello->bytes = region_bytes(landing);
    hello->address_bytes = (uint32_t)address_bytes;
    hello->rkey_bytes = (uint32_t)rkey_bytes;
    memcpy(hello->address, address, address_bytes);
    memcpy(hello->rkey, rkey, rkey_bytes);
    move_all(3, hello, sizeof *hello, true);
    char end;
    ssize_t n = read(3, &end, 1);
    (void)n;
    mem_free(hello);
    transport_close(t);
    loop_free(loop);
    return 0;
}

static pid_t spawn(const char *const *arguments, int child_fd, int to_fd, bool search)
{
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, child_fd, to_fd);
    pid_t pid;
    char *const *argv = (char *const *)(uintptr_t)arguments;
    int error = search ? posix_spawnp(&pid, argv[0], &actions, NULL, argv, environ)
                       : posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return error == 0 ? pid : -1;
}

/* ---- this side ---- */

struct bench {
    struct loop *loop;
    struct transport *transport;
    struct region *source;
    struct put_peer *peer;
    uint8_t *pool;
    pid_t receiver;
    int fd;
    bool hot, failed;
    uint32_t n_to_submit, n_alive, next;
};

static uint32_t scattered(uint32_t i, uint32_t factor)
{
    return i * factor %
           N_SLOTS; /* factors are coprime to 96: every page once a lap, far from the last */
}

static void bench_put(struct bench *bench);

static void bench_done(void *cookie, const struct put_result *result)
{
    struct bench *bench = cookie;
    bench->n_alive--;
    bench->failed |= result->status != STATUS_OK;
    if (bench->n_to_submit > 0 && !bench->failed) {
        bench_put(bench);
    }
    if (bench->n_alive == 0) {
        loop_stop(bench->loop);
    }
}

static void bench_put(struct bench *bench)
{
    struct put_run runs[RUNS];
    for (uint32_t i = 0; i < RUNS; i++) {
        uint32_t n = bench->next++;
        runs[i] = (struct put_run){(uint64_t)(bench->hot ? 0 : scattered(n, 35)) * PAGE, REGION_ID,
                                   (uint64_t)(bench->hot ? 0 : scattered(n, 61)) * PAGE, PAGE};
    }
    struct error err;
    if (put_submit(bench->peer, bench->source, runs, RUNS, bench_done, bench, NULL, &err) !=
        STATUS_OK) {
        die("put", err.text);
    }
    bench->n_alive++;
    bench->n_to_submit--;
}

/* GB/s of n_pages through the transport, flush included. */
static double measure_ours(struct bench *bench, uint32_t n_pages, bool hot)
{
    bench->hot = hot;
    bench->n_to_submit = n_pages / RUNS;
    uint64_t begin_ns = loop_now_ns();
    for (int i = 0; i < ALIVE && bench->n_to_submit > 0; i++) {
        bench_put(bench);
    }
    if (loop_run(bench->loop) != STATUS_OK || bench->failed) {
        die("puts", "failed");
    }
    return (double)(n_pages / RUNS * RUNS) * PAGE / (double)(loop_now_ns() - begin_ns);
}

static void peer_up(void *cookie, struct put_peer *peer)
{
    (void)peer;
    loop_stop(((struct bench *)cookie)->loop);
}

static void peer_failed(void *cookie, struct put_peer *peer, enum status status, const char *text)
{
    (void)cookie;
    (void)peer;
    die(status_name(status), text);
}

static const struct put_peer_events events = {peer_up, peer_failed};

static void bench_open(struct bench *bench, const char *tls)
{
    int fds[2];
    struct error err;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) {
        die("socketpair", strerror(errno));
    }
    const char *arguments[] = {"bench_handoff", "--receiver", tls, NULL};
    bench->fd = fds[0];
    bench->receiver = spawn(arguments, fds[1], 3, false);
    close(fds[1]);
    struct hello *hello = mem_alloc(sizeof *hello);
    move_all(bench->fd, hello, sizeof *hello, false);
    struct transport_options options = {.tls = tls};
    if (loop_create(&bench->loop) != STATUS_OK ||
        transport_open(bench->loop, &options, &bench->transport, &err) != STATUS_OK ||
        region_register_source(bench->transport, bench->pool, (size_t)N_SLOTS * PAGE, REGION_HOST,
                               &bench->source, &err) != STATUS_OK) {
        die("transport", err.text);
    }
    struct put_remote_region region = {REGION_ID, hello->base, hello->bytes, hello->rkey,
                                       hello->rkey_bytes};
    struct put_peer_options peer = {.name = "receiver",
                                    .address = hello->address,
                                    .address_bytes = hello->address_bytes,
                                    .regions = &region,
                                    .n_regions = 1,
                                    .same_host = true,
                                    .allow_slow = true,
                                    .events = &events,
                                    .cookie = bench};
    if (put_peer_connect(bench->transport, &peer, &bench->peer, &err) != STATUS_OK) {
        die("connect", err.text);
    }
    if (loop_run(bench->loop) != STATUS_OK) {
        die("loop", "failed");
    }
    mem_free(hello);
}

static void bench_close(struct bench *bench)
{
    transport_close(bench->transport);
    loop_free(bench->loop);
    close(bench->fd);
    waitpid(bench->receiver, NULL, 0);
}

/* ---- what bounds it ---- */

static double measure_memcpy(const uint8_t *pool, uint8_t *to, uint32_t n_pages)
{
    uint64_t begin_ns = loop_now_ns();
    for (uint32_t i = 0; i < n_pages; i++) {
        memcpy(to + (size_t)scattered(i, 61) * PAGE, pool + (size_t)scattered(i, 35) * PAGE, PAGE);
    }
    return (double)n_pages * PAGE / (double)(loop_now_ns() - begin_ns);
}

static double measure_accept(const uint8_t *pool, uint8_t *to, uint32_t n_pages,
                             uint64_t *ret_digest)
{
    uint64_t digest = 0;
    uint64_t begin_ns = loop_now_ns();
    for (uint32_t i = 0; i < n_pages; i++) {
        struct parcel_key key;
        struct parcel_sum sum = {{0, 0}};
        parcel_key_make(&key, 1, i);
        parcel_copy_sum(&key, &sum, to + (size_t)scattered(i, 61) * PAGE,
                        pool + (size_t)scattered(i, 35) * PAGE, PAGE, 0);
        digest ^= parcel_digest(&sum, PAGE);
    }
    *ret_digest = digest;
    return (double)n_pages * PAGE / (double)(loop_now_ns() - begin_ns);
}

/* GB/s that ucx_perftest reports at its end, 0 when it isn't there or fails. */
static double measure_perftest(const char *tls, uint32_t n_pages, int round)
{
    char port[16], count[16], size[16];
    snprintf(port, sizeof port, "%d", 20000 + (getpid() + round * 7) % 20000);
    snprintf(count, sizeof count, "%u", n_pages);
    snprintf(size, sizeof size, "%d", PAGE);
    setenv("UCX_TLS", tls, 1);
    int server_out[2], client_out[2];
    if (pipe2(server_out, O_CLOEXEC) != 0 || pipe2(client_out, O_CLOEXEC) != 0) {
        die("pipe", strerror(errno));
    }
    const char *server_arguments[] = {"ucx_perftest", "-p", port, NULL};
    const char *client_arguments[] = {"ucx_perftest", "127.0.0.1", "-p", port, "-t",
                                      "ucp_put_bw",   "-s",        size, "-n", count,
                                      "-w",           "16",        "-v", NULL};
    pid_t server = spawn(server_arguments, server_out[1], 1, true);
    usleep(300000); /* it has no sign of readiness */
    pid_t client = server > 0 ? spawn(client_arguments, client_out[1], 1, true) : -1;
    unsetenv("UCX_TLS");
    close(server_out[1]);
    close(client_out[1]);
    double mib_per_s = 0;
    FILE *lines = fdopen(client_out[0], "r");
    char line[512];
    while (lines != NULL && client > 0 && fgets(line, sizeof line, lines) != NULL) {
        double median_us, average_us, overall_us, bandwidth, overall;
        unsigned long n;
        const char *at = strchr(line, ']');
        if (sscanf(at != NULL ? at + 1 : line, " %lu,%lf,%lf,%lf,%lf,%lf", &n, &median_us,
                   &average_us, &overall_us, &bandwidth, &overall) == 6) {
            mib_per_s = overall;
        }
    }
    if (lines != NULL) {
        fclose(lines);
    }
    if (client > 0) {
        waitpid(client, NULL, 0);
    }
    if (server > 0) {
        kill(server, SIGTERM);
        waitpid(server, NULL, 0);
    }
    close(server_out[0]);
    return mib_per_s * 1048576e-9;
}

static double max_of(double a, double b)
{
    return a > b ? a : b;
}

static void bench_transport(uint8_t *pool, uint8_t *to, const char *tls, int rounds,
                            uint32_t n_pages)
{
    struct bench bench = {.pool = pool};
    double ours = 0, hot = 0, copy = 0, perftest = 0;
    bench_open(&bench, tls);
    measure_ours(&bench, N_SLOTS, false); /* first touches and mappings */
    for (int i = 0; i < rounds; i++) {
        ours = max_of(ours, measure_ours(&bench, n_pages, false));
        copy = max_of(copy, measure_memcpy(pool, to, n_pages));
        hot = max_of(hot, measure_ours(&bench, n_pages, true));
        perftest = max_of(perftest, measure_perftest(tls, n_pages, i));
    }
    printf("%-6s %-32s ours %6.2f  memcpy %6.2f (%3.0f %%)   ours, hot %6.2f  perftest %6.2f", tls,
           put_peer_lanes(bench.peer), ours, copy, 100 * ours / copy, hot, perftest);
    if (perftest > 0) {
        printf(" (%3.0f %%)\n", 100 * hot / perftest);
    } else {
        printf(" (no ucx_perftest)\n");
    }
    bench_close(&bench);
}

int main(int argc, char **argv)
{
    log_init(LOG_LEVEL_WARN, false, NULL);
    if (argc == 3 && strcmp(argv[1], "--receiver") == 0) {
        return receiver(argv[2]);
    }
    int rounds = argc > 1 ? atoi(argv[1]) : 3;
    uint32_t n_pages = argc > 2 ? (uint32_t)atoi(argv[2]) : 480;
    size_t bytes = (size_t)N_SLOTS * PAGE;
    uint8_t *pool = mem_try_aligned(4096, bytes);
    uint8_t *own = mem_try_aligned(4096, bytes);
    uint8_t *to = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (pool == NULL || own == NULL || to == MAP_FAILED || rounds < 1 || n_pages < RUNS) {
        die("start", "memory or arguments");
    }
    put_pattern_fill(pool, bytes, 1);
    memset(own, 1, bytes);
    memset(to, 1, bytes);
    printf("GB/s, pages of %d B, best of %d rounds of %u pages\n", PAGE, rounds, n_pages);
    static const char *const transports[] = {"sysv", "posix", "tcp"};
    for (size_t i = 0; i < 3; i++) {
        bench_transport(pool, to, transports[i], rounds, n_pages);
    }
    double accept = 0, copy = 0;
    uint64_t digest = 0;
    for (int i = 0; i < rounds; i++) {
        accept = max_of(accept, measure_accept(to, own, n_pages, &digest));
        copy = max_of(copy, measure_memcpy(to, own, n_pages));
    }
    printf("accept: copy + checksum (%s) %.2f, memcpy %.2f (%.0f %%), digest %016llx\n",
           parcel_variant(), accept, copy, 100 * accept / copy, (unsigned long long)digest);
    mem_free(pool);
    mem_free(own);
    munmap(to, bytes);
    return 0;
}
