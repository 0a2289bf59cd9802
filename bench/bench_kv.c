/* bench/bench_kv.c - what the hand-off of a prompt's KV costs between two GPUs, on either path.
 *
 * Two processes with a device each, pages and tail of V4-Flash's sizes, random bytes. A prompt is
 * handed over as a prefill and a decode node do it: puts and their flush, a word to the receiver,
 * its pass of copy and checksum into pages of its own on its device, a word back; the checksum is
 * compared with the sender's in every round. `device`: from device memory into device memory.
 * `pinned`: a copy into pinned host memory, a put from there into a landing area of host memory,
 * which the device reads. What of it a real prefill hides behind computing is not hidden here: the
 * whole prompt is handed over after its end. The floor, in the same run: one driver copy of as many
 * bytes between the two devices. With the time to first token of such a prompt, which
 * --profile-step or a router tells, the share is printed. Numbers are printed, never asserted: exit
 * 1 when something fails, bytes that are wrong included.
 *
 * usage: bench_kv SENDER RECEIVER [rounds [ttft_ms of 1k, 8k, 32k]]     devices: 0, 1, ..
 */
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/parcel.h"
#include "transport/put.h"

enum {
    PAGE = 901120,
    TAIL = 4412416,
    N_PAGES = 128, /* of 32k tokens */
    AREA = N_PAGES * PAGE + TAIL,
    RUNS = 32, /* pages a put, as a node's parcels have */
    REGION_ID = 1,
};

static void must(enum status status, const char *what, const struct error *err)
{
    if (status) {
        fprintf(stderr, "bench_kv: %s: %s %s\n", what, status_name(status), err ? err->text : "");
        exit(1);
    }
}

static void move_all(int fd, void *bytes, size_t n, bool out)
{
    for (size_t at = 0; at < n;) {
        uint8_t *p = (uint8_t *)bytes + at;
        ssize_t moved = out ? write(fd, p, n - at) : read(fd, p, n - at);
        if (moved <= 0) {
            exit(1);
        }
        at += (size_t)moved;
    }
}

/* ---- one side: a device, what is summed there, and what is put from or lands */

struct side {
    int device_i;
    bool on_device; /* KV is handed over in device memory */
    struct loop *loop;
    struct transport *transport;
    uint8_t *pool;   /* device memory */
    uint8_t *handed; /* what puts read or write: device memory, or pinned host memory */
    struct region *region;
    struct parcel_piece_device *piece; /* device memory */
    uint64_t *sums;
};

static void attach(void *cookie)
{
    char text[128];
    struct error err;
    must(device_select(((struct side *)cookie)->device_i, text, sizeof text, &err), "device", &err);
}

static void side_open(struct side *side, bool receives)
{
    struct error err;
    struct transport_options options = {
        .device_regions = side->on_device, .attach = attach, .attach_cookie = side};
    void *memory;
    must(loop_create(&side->loop), "loop", NULL);
    must(transport_open(side->loop, &options, &side->transport, &err), "transport", &err);
    must(device_alloc(AREA, &memory, &err), "pool", &err);
    side->pool = memory;
    must(device_alloc(sizeof *side->piece, &memory, &err), "piece", &err);
    side->piece = memory;
    must(device_alloc(2 * sizeof *side->sums, &memory, &err), "sums", &err);
    side->sums = memory;
    if (side->on_device && receives) {
        must(device_alloc(AREA, &memory, &err), "landing area", &err);
        side->handed = memory;
    } else if (side->on_device) {
        side->handed = side->pool;
    } else if (!receives) {
        side->handed = mem_try_aligned(4096, AREA);
    }
    bool is_cuda = side->on_device && device_memory_is_cuda(side->handed);
    enum region_memory kind = is_cuda ? REGION_DEVICE : REGION_HOST;
    if (receives && !side->on_device) {
        must(region_create_landing(side->transport, AREA, &side->region, &err), "landing", &err);
        side->handed = region_base(side->region);
    } else if (receives) {
        must(
            region_register_landing(side->transport, side->handed, AREA, kind, &side->region, &err),
            "landing", &err);
    } else {
        must(region_register_source(side->transport, side->handed, AREA, kind, &side->region, &err),
             "source", &err);
    }
    if (!side->on_device) {
        must(device_pin(side->handed, AREA, &err), "pinning", &err);
    }
}

/* Copies (dst NULL: not) and sums n_bytes on the device. */
static uint64_t side_sum(struct side *side, void *dst, const uint8_t *src, uint64_t n_bytes)
{
    struct parcel_piece_device piece = {dst, src, n_bytes, 0};
    struct parcel_key key;
    struct parcel_sum sum;
    struct error err;
    parcel_key_make(&key, 7, 1);
    must(device_copy(side->piece, &piece, sizeof piece, NULL), "piece", NULL);
    must(device_fill(side->sums, 0, 16, NULL), "sums", NULL);
    must(parcel_copy_sum_launch(&key, side->piece, 1, side->sums, NULL), "sum", NULL);
    must(device_copy(&sum, side->sums, 16, NULL), "sums", NULL);
    must(device_wait(NULL, &err), "sum", &err);
    return parcel_digest(&sum, n_bytes);
}

struct hello {
    uint64_t base;
    uint32_t address_bytes, rkey_bytes;
    uint8_t address[TRANSPORT_MAX_ADDRESS_BYTES], rkey[TRANSPORT_MAX_RKEY_BYTES];
};

static int receiver(int device_i, bool on_device)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct side side = {.device_i = device_i, .on_device = on_device};
    struct hello *hello = mem_zalloc(sizeof *hello);
    size_t address_bytes, rkey_bytes;
    uint64_t n_bytes;
    side_open(&side, true);
    const uint8_t *address = transport_worker_address(side.transport, &address_bytes);
    const uint8_t *rkey = region_rkey(side.region, &rkey_bytes);
    hello->base = (uintptr_t)region_base(side.region);
    hello->address_bytes = (uint32_t)address_bytes;
    hello->rkey_bytes = (uint32_t)rkey_bytes;
    memcpy(hello->address, address, address_bytes);
    memcpy(hello->rkey, rkey, rkey_bytes);
    move_all(3, hello, sizeof *hello, true);
    for (;;) {
        move_all(3, &n_bytes, sizeof n_bytes, false); /* ends with the sender */
        if (n_bytes == 0) {
            transport_close(side.transport);
            return 0;
        }
        uint64_t digest = side_sum(&side, side.pool, side.handed, n_bytes);
        move_all(3, &digest, sizeof digest, true);
    }
}

/* ---- the sender */

struct bench {
    struct side side;
    struct put_peer *peer;
    int fd;
    pid_t child;
    uint32_t n_alive;
};

static void on_up(void *cookie, struct put_peer *peer)
{
    loop_stop(((struct bench *)cookie)->side.loop);
}

static void on_failed(void *cookie, struct put_peer *peer, enum status status, const char *text)
{
    fprintf(stderr, "bench_kv: the peer failed: %s: %s\n", status_name(status), text);
    exit(1);
}

static const struct put_peer_events events = {on_up, on_failed};

static void on_put(void *cookie, const struct put_result *result)
{
    struct bench *bench = cookie;
    must(result->status, "put", NULL);
    if (--bench->n_alive == 0) {
        loop_stop(bench->side.loop);
    }
}

static void bench_open(struct bench *bench, const char *receiver_device)
{
    int fds[2];
    const char *const arguments[] = {"bench_kv", "--receiver", receiver_device,
                                     bench->side.on_device ? "device" : "pinned", NULL};
    posix_spawn_file_actions_t actions;
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) ? STATUS_SYSTEM : STATUS_OK,
         "socketpair", NULL);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, fds[1], 3);
    must(posix_spawn(&bench->child, "/proc/self/exe", &actions, NULL,
                     (char *const *)(uintptr_t)arguments, environ)
             ? STATUS_SYSTEM
             : STATUS_OK,
         "spawn", NULL);
    posix_spawn_file_actions_destroy(&actions);
    close(fds[1]);
    bench->fd = fds[0];
    struct hello *hello = mem_alloc(sizeof *hello);
    struct error err;
    move_all(bench->fd, hello, sizeof *hello, false);
    side_open(&bench->side, false);
    struct put_remote_region region = {REGION_ID, hello->base, AREA, hello->rkey,
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
    must(put_peer_connect(bench->side.transport, &peer, &bench->peer, &err), "connect", &err);
    must(loop_run(bench->side.loop), "loop", NULL);
    mem_free(hello);
}

static void put_bytes(struct bench *bench, uint64_t from, uint64_t bytes)
{
    struct put_run run = {from, REGION_ID, from, bytes};
    struct error err;
    must(put_submit(bench->peer, bench->side.region, &run, 1, on_put, bench, NULL, &err), "put",
         &err);
    bench->n_alive++;
}

/* Milliseconds of a whole hand-off; *ret_put_ms of its puts and their flush. */
static double hand_over(struct bench *bench, uint32_t n_pages, uint64_t want, double *ret_put_ms)
{
    uint64_t pages = (uint64_t)n_pages * PAGE, all = pages + TAIL, digest;
    struct error err;
    uint64_t begin_ns = loop_now_ns();
    if (!bench->side.on_device) {
        must(device_copy(bench->side.handed, bench->side.pool, all, NULL), "copy", NULL);
        must(device_wait(NULL, &err), "copy", &err);
    }
    uint64_t put_ns = loop_now_ns();
    for (uint64_t at = 0; at < pages; at += (uint64_t)RUNS * PAGE) {
        put_bytes(bench, at, pages - at < (uint64_t)RUNS * PAGE ? pages - at : RUNS * PAGE);
    }
    put_bytes(bench, pages, TAIL);
    must(loop_run(bench->side.loop), "loop", NULL);
    *ret_put_ms = (double)(loop_now_ns() - put_ns) * 1e-6;
    move_all(bench->fd, &all, sizeof all, true);
    move_all(bench->fd, &digest, sizeof digest, false);
    double ms = (double)(loop_now_ns() - begin_ns) * 1e-6;
    if (digest != want) {
        fprintf(stderr, "bench_kv: %u pages arrived wrong\n", n_pages);
        exit(1);
    }
    return ms;
}

static double floor_ms(struct bench *bench, uint8_t *there, uint64_t bytes)
{
    struct error err;
    uint64_t begin_ns = loop_now_ns();
    must(device_copy(there, bench->side.pool, bytes, NULL), "floor", NULL);
    must(device_wait(NULL, &err), "floor", &err);
    return (double)(loop_now_ns() - begin_ns) * 1e-6;
}

static void bench_path(char **argv, bool on_device, int rounds, const char *const *ttft_ms)
{
    static const uint32_t n_tokens[] = {1024, 8192, 32768};
    struct bench bench = {.side = {.device_i = atoi(argv[1]), .on_device = on_device}};
    struct side other = {.device_i = atoi(argv[2])};
    struct error err;
    void *there;
    attach(&other);
    must(device_alloc(AREA, &there, &err), "floor", &err);
    attach(&bench.side);
    bench_open(&bench, argv[2]);
    uint8_t *bytes = mem_alloc(AREA);
    put_pattern_fill(bytes, AREA, loop_now_ns());
    must(device_copy(bench.side.pool, bytes, AREA, NULL), "fill", NULL);
    must(device_wait(NULL, &err), "fill", &err);
    mem_free(bytes);
    printf("%s, %s, %s\n", on_device ? "device" : "pinned", put_peer_lanes(bench.peer),
           transport_ucx_text(bench.side.transport));
    for (int i = 0; i < 3; i++) {
        uint32_t n_pages = n_tokens[i] / 256;
        uint64_t all = (uint64_t)n_pages * PAGE + TAIL;
        uint64_t want = side_sum(&bench.side, NULL, bench.side.pool, all);
        double best = 1e9, best_put = 1e9, best_floor = 1e9, put;
        for (int round = -1; round < rounds; round++) { /* the first maps */
            double ms = hand_over(&bench, n_pages, want, &put);
            double least = floor_ms(&bench, there, all);
            if (round >= 0) {
                best = ms < best ? ms : best;
                best_put = put < best_put ? put : best_put;
                best_floor = least < best_floor ? least : best_floor;
            }
        }
        printf(
            "  %5u tokens %6.1f MB  %8.3f ms %7.2f GB/s   puts %8.3f ms %7.2f GB/s   driver's copy "
            "%8.3f ms %7.2f GB/s",
            n_tokens[i], (double)all * 1e-6, best, (double)all / best * 1e-6, best_put,
            (double)all / best_put * 1e-6, best_floor, (double)all / best_floor * 1e-6);
        if (ttft_ms[i]) {
            printf("   %.2f %% of %s ms", 100 * best / atof(ttft_ms[i]), ttft_ms[i]);
        }
        printf("\n");
        fflush(stdout);
    }
    uint64_t end = 0;
    move_all(bench.fd, &end, sizeof end, true);
    transport_close(bench.side.transport);
    waitpid(bench.child, NULL, 0);
    close(bench.fd);
    device_free(there);
}

int main(int argc, char **argv)
{
    log_init(LOG_LEVEL_WARN, false, NULL);
    if (argc == 4 && strcmp(argv[1], "--receiver") == 0) {
        return receiver(atoi(argv[2]), strcmp(argv[3], "device") == 0);
    }
    if (argc != 3 && argc != 4 && argc != 7) {
        fprintf(stderr, "usage: bench_kv SENDER RECEIVER [rounds [ttft_ms of 1k, 8k, 32k]]\n");
        return 2;
    }
    int rounds = argc > 3 ? atoi(argv[3]) : 10;
    const char *const ttft_ms[3] = {argc > 6 ? argv[4] : NULL, argc > 6 ? argv[5] : NULL,
                                    argc > 6 ? argv[6] : NULL};
    const char *only = getenv("BENCH_KV_PATH"); /* device or pinned; both unless said */
    if (!only || strcmp(only, "pinned") == 0) {
        bench_path(argv, false, rounds, ttft_ms);
    }
    if (!only || strcmp(only, "device") == 0) {
        bench_path(argv, true, rounds, ttft_ms);
    }
    return 0;
}
