/* tests/transport/test_put.c - bytes between two processes, every byte checked where it arrived:
 * over each transport and size; merging and cutting; bounds; preflight; and the frames of foreign
 * bytes.
 */
#include "tests/transport/pair.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mem.h"

enum { PAGE = 901120, GAP = 512, LANDING = 10 << 20 };

static uint8_t *source_memory(struct side *side, size_t bytes, struct region **ret_source)
{
    struct error err = {""};
    uint8_t *memory = mem_try_aligned(4096, bytes);
    assert_non_null(memory);
    if (region_register_source(side->transport, memory, bytes, REGION_HOST, ret_source, &err) !=
        STATUS_OK) {
        fail_msg("%s", err.text);
    }
    return memory;
}

/* So many of a size are put at once, and the landing area that has room for them and ends in a
 * megabyte that nothing may write to. */
static uint32_t content_n(size_t page_bytes)
{
    size_t n = (12u << 20) / (page_bytes + GAP);
    return n > 64 ? 64 : (uint32_t)n;
}

static size_t content_landing(size_t page_bytes)
{
    size_t bytes = content_n(page_bytes) * (page_bytes + GAP) + (1 << 20);
    return (bytes + 4095) / 4096 * 4096;
}

/* n pages, in a scattered order on both sides with gaps between them, as one put. Everything is
 * checked: the pages and that no byte of the gaps changed. */
static void content_of(struct side *side, struct pair *pair, struct watched *watched,
                       size_t page_bytes)
{
    uint32_t n = content_n(page_bytes);
    struct region *source;
    uint8_t *memory = source_memory(side, n * page_bytes, &source);
    struct put_run *runs = mem_array(n, sizeof runs[0]);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = (i * 7 + 3) % n, from = (i * 5 + 1) % n;
        if (n % 7 == 0 || n % 5 == 0) {
            slot = n - 1 - i;
            from = i;
        }
        put_pattern_fill(memory + from * page_bytes, page_bytes, slot + page_bytes);
        runs[i] =
            (struct put_run){from * page_bytes, REGION_ID, slot * (page_bytes + GAP), page_bytes};
    }
    struct noted noted = {0};
    struct error err = {""};
    assert_int_equal(put_submit(watched->peer, source, runs, n, noted_done, &noted, NULL, &err),
                     STATUS_OK);
    assert_true(side_wait(side, &noted.done, 20000));
    assert_int_equal(noted.result.status, STATUS_OK);
    assert_int_equal(noted.result.bytes, n * page_bytes);
    assert_int_equal(noted.result.bytes_posted, n * page_bytes);
    assert_int_equal(noted.result.n_posts, n);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = i * (page_bytes + GAP);
        assert_true(pair_check(pair, at, page_bytes, i + page_bytes));
        assert_true(pair_check_canary(pair, at + page_bytes, GAP));
    }
    uint64_t end = n * (page_bytes + GAP);
    assert_true(pair_check_canary(pair, end, content_landing(page_bytes) - end));
    region_free(source);
    mem_free(runs);
    mem_free(memory);
}

static void content_over(const char *tls, bool direct, const char *lane)
{
    static const size_t sizes[] = {4096, 36864, PAGE};
    for (size_t i = 0; i < 3; i++) {
        struct side side;
        struct pair pair;
        struct watched watched;
        struct transport_options options = {.tls = tls};
        side_open(&side, &options);
        pair_start(&pair, tls, content_landing(sizes[i]));
        watched_connect(&watched, &side, &pair);
        assert_non_null(strstr(put_peer_lanes(watched.peer), lane));
        assert_int_equal(put_peer_is_direct(watched.peer), direct);
        content_of(&side, &pair, &watched, sizes[i]);
        watched_close(&watched, &side);
        pair_end(&pair);
        side_close(&side);
    }
}

static void content_posix(void **state)
{
    content_over("posix", true, "posix/");
}

static void content_sysv(void **state)
{
    content_over("sysv", true, "sysv/");
}

static void content_cma(void **state)
{
    content_over("posix,cma", true, "posix/");
}

static void content_tcp(void **state)
{
    content_over("tcp", false, "tcp/");
}

static void content_default(void **state)
{
    content_over(NULL, true, "sysv/");
}

/* ---- far away ---- */

/*
 * NUM-02: pages of a source far beyond 2 and 4 GiB, on both sides of each bound: a product of index
 * and page in 32 bits would take other bytes. The memory is sparse: only these pages exist, and all
 * hold something else.
 */
static void far_over(const char *tls)
{
    static const uint64_t indexes[] = {1, 2065, 2066, 2383, 2384, 4766, 4767, 20000};
    enum { N = sizeof(indexes) / sizeof(indexes[0]) };
    const size_t bytes = 20001 * (size_t)PAGE;
    struct side side;
    struct pair pair;
    struct watched watched;
    struct error err = {""};
    struct region *source;
    struct put_run runs[N];
    struct noted noted = {0};
    struct transport_options options = {.tls = tls};
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(memory != MAP_FAILED);
    side_open(&side, &options);
    pair_start(&pair, tls, LANDING);
    watched_connect(&watched, &side, &pair);
    assert_int_equal(
        region_register_source(side.transport, memory, bytes, REGION_HOST, &source, &err),
        STATUS_OK);
    assert_int_equal(region_bytes(source), bytes);
    for (uint32_t i = 0; i < N; i++) {
        put_pattern_fill(memory + indexes[i] * PAGE, PAGE, 100 + i);
        runs[i] =
            (struct put_run){indexes[i] * PAGE, REGION_ID, (N - 1 - i) * (uint64_t)PAGE, PAGE};
    }
    assert_int_equal(put_submit(watched.peer, source, runs, N, noted_done, &noted, NULL, &err),
                     STATUS_OK);
    assert_true(side_wait(&side, &noted.done, 20000));
    assert_int_equal(noted.result.status, STATUS_OK);
    for (uint32_t i = 0; i < N; i++) {
        assert_true(pair_check(&pair, (N - 1 - i) * (uint64_t)PAGE, PAGE, 100 + i));
    }
    /* one byte beyond the end is refused, and so is what would wrap around */
    const uint64_t outside[][2] = {{bytes - PAGE + 1, PAGE},
                                   {bytes, 1},
                                   {UINT64_MAX - 7, 16},
                                   {(1ull << 32) * PAGE, PAGE},
                                   {4, UINT64_MAX - 3}};
    for (size_t i = 0; i < sizeof(outside) / sizeof(outside[0]); i++) {
        runs[0] = (struct put_run){outside[i][0], REGION_ID, 0, outside[i][1]};
        assert_int_equal(put_submit(watched.peer, source, runs, 1, noted_done, &noted, NULL, &err),
                         STATUS_INVALID);
    }
    watched_close(&watched, &side);
    region_free(source);
    pair_end(&pair);
    side_close(&side);
    munmap(memory, bytes);
}

static void far_pages(void **state)
{
    far_over("posix");
    far_over("tcp");
    far_over(NULL);
}

/* ---- merging, cutting, bounds ---- */

static void merges_and_cuts(void **state)
{
    struct side side;
    struct pair pair;
    struct watched watched;
    struct transport_options options = {.window_bytes = 1 << 20};
    side_open(&side, &options);
    pair_start(&pair, NULL, LANDING);
    watched_connect(&watched, &side, &pair);
    struct region *source;
    uint8_t *memory = source_memory(&side, 4 << 20, &source);
    put_pattern_fill(memory, 4 << 20, 9);
    /* four adjacent runs are one, cut into pieces of half a window */
    struct put_run runs[5];
    for (uint32_t i = 0; i < 4; i++) {
        runs[i] = (struct put_run){i << 20, REGION_ID, (i << 20) + 4096, 1 << 20};
    }
    struct noted noted = {0};
    struct error err = {""};
    assert_int_equal(put_submit(watched.peer, source, runs, 4, noted_done, &noted, NULL, &err),
                     STATUS_OK);
    assert_true(side_wait(&side, &noted.done, 5000));
    assert_int_equal(noted.result.status, STATUS_OK);
    assert_int_equal(noted.result.n_posts, 8);
    assert_true(pair_check(&pair, 4096, 4 << 20, 9));
    assert_true(pair_check_canary(&pair, 0, 4096));
    /* adjacent in one memory only: stays apart */
    runs[0] = (struct put_run){0, REGION_ID, 0, 4096};
    runs[1] = (struct put_run){4096, REGION_ID, 8192, 4096};
    runs[2] = (struct put_run){0, REGION_ID, 12288, 4096};
    noted = (struct noted){0};
    assert_int_equal(put_submit(watched.peer, source, runs, 3, noted_done, &noted, NULL, &err),
                     STATUS_OK);
    assert_true(side_wait(&side, &noted.done, 5000));
    assert_int_equal(noted.result.n_posts, 3);
    struct transport_stats stats;
    transport_stats(side.transport, &stats);
    assert_int_equal(stats.puts_done, 2);
    assert_int_equal(stats.posts, 11);
    assert_int_equal(stats.bytes_done, (4 << 20) + 3 * 4096);
    assert_int_equal(stats.bytes_in_flight, 0);
    assert_int_equal(stats.puts_alive, 0);
    watched_close(&watched, &side);
    region_free(source);
    pair_end(&pair);
    side_close(&side);
    mem_free(memory);
}

static void bounds(void **state)
{
    struct side side;
    struct pair pair;
    struct watched watched;
    side_open(&side, NULL);
    pair_start(&pair, NULL, 1 << 20);
    watched_connect(&watched, &side, &pair);
    struct region *source;
    uint8_t *memory = source_memory(&side, 1 << 20, &source);
    const struct put_run bad[] = {
        {0, REGION_ID, 0, 0},          {0, REGION_ID, 1, 1 << 20},
        {1, REGION_ID, 0, 1 << 20},    {0, REGION_ID, (1 << 20) + 1, 1},
        {UINT64_MAX, REGION_ID, 0, 2}, {0, REGION_ID, UINT64_MAX, 2},
        {0, REGION_ID, 0, UINT64_MAX}, {0, REGION_ID + 1, 0, 16},
    };
    struct noted noted = {0};
    struct error err;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct put_run runs[2] = {{0, REGION_ID, 0, 16}, bad[i]};
        assert_int_equal(put_submit(watched.peer, source, runs, 2, noted_done, &noted, NULL, &err),
                         STATUS_INVALID);
    }
    assert_int_equal(put_submit(watched.peer, source, bad, 0, noted_done, &noted, NULL, &err),
                     STATUS_INVALID);
    assert_int_equal(
        put_submit(watched.peer, source, bad, PUT_MAX_RUNS + 1, noted_done, &noted, NULL, &err),
        STATUS_INVALID);
    side_run(&side, 20);
    assert_int_equal(noted.n_done, 0);
    assert_true(pair_check_canary(&pair, 0, 1 << 20));
    watched_close(&watched, &side);
    region_free(source);
    pair_end(&pair);
    side_close(&side);
    mem_free(memory);
}

/* ---- foreign bytes ---- */

static enum status try_changed(struct side *side, const struct pair *pair, struct error *err)
{
    struct watched watched;
    enum status status = watched_try(&watched, side, pair, true, true, err);
    if (status == STATUS_OK) {
        watched_close(&watched, side);
    }
    return status;
}

static void foreign_bytes(void **state)
{
    struct side side;
    struct pair good, pair;
    struct error err;
    side_open(&side, NULL);
    pair_start(&good, NULL, 1 << 20);
    for (size_t i = 0; i < good.address_bytes; i++) {
        pair = good;
        pair.address[i] ^= 0x10;
        enum status status = try_changed(&side, &pair, &err);
        assert_true(status == STATUS_CORRUPT || status == STATUS_UNSUPPORTED);
    }
    for (size_t i = 0; i < good.rkey_bytes; i++) {
        pair = good;
        pair.rkey[i] ^= 0x01;
        enum status status = try_changed(&side, &pair, &err);
        assert_true(status == STATUS_CORRUPT || status == STATUS_UNSUPPORTED);
        pair = good;
        pair.rkey_bytes = i;
        assert_int_equal(try_changed(&side, &pair, &err), STATUS_CORRUPT);
    }
    for (size_t i = 0; i < good.address_bytes; i++) {
        pair = good;
        pair.address_bytes = i;
        assert_int_equal(try_changed(&side, &pair, &err), STATUS_CORRUPT);
    }
    pair = good;
    pair.rkey_bytes = TRANSPORT_MAX_RKEY_BYTES + 1;
    assert_int_equal(try_changed(&side, &pair, &err), STATUS_TOO_LARGE);
    pair = good;
    pair.base = UINT64_MAX - 4096;
    assert_int_equal(try_changed(&side, &pair, &err), STATUS_INVALID);
    pair = good;
    pair.bytes = 0;
    assert_int_equal(try_changed(&side, &pair, &err), STATUS_INVALID);
    assert_int_equal(try_changed(&side, &good, &err), STATUS_OK);
    pair_end(&good);
    side_close(&side);
}

/* ---- preflight ---- */

struct flight {
    bool done;
    struct put_preflight_result result;
};

static void flight_done(void *cookie, const struct put_preflight_result *result)
{
    struct flight *flight = cookie;
    flight->done = true;
    flight->result = *result;
}

static void preflight_over(const char *tls)
{
    struct side side;
    struct pair pair;
    struct watched watched;
    struct transport_options options = {.tls = tls};
    side_open(&side, &options);
    pair_start(&pair, tls, LANDING);
    watched_connect(&watched, &side, &pair);
    struct put_slot slots[3] = {
        {REGION_ID, PAGE, PAGE}, {REGION_ID, 8 * PAGE, PAGE}, {REGION_ID, 4 * PAGE, 4096}};
    struct flight flight = {0};
    struct error err = {""};
    uint64_t begin_ns = loop_now_ns();
    assert_int_equal(
        put_preflight(watched.peer, slots, 3, 0x1234567890abcdef, flight_done, &flight, &err),
        STATUS_OK);
    assert_int_equal(put_preflight(watched.peer, slots, 3, 1, flight_done, &flight, &err),
                     STATUS_EXISTS);
    assert_true(side_wait(&side, &flight.done, 20000));
    assert_int_equal(flight.result.status, STATUS_OK);
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t seed = put_pattern_seed(0x1234567890abcdef, i);
        assert_true(pair_check(&pair, slots[i].remote_offset, slots[i].bytes, seed));
        assert_false(pair_check(&pair, slots[i].remote_offset, slots[i].bytes, seed + 1));
    }
    assert_true(pair_check_canary(&pair, 0, PAGE));
    assert_true(pair_check_canary(&pair, 2 * PAGE, PAGE));
    printf("preflight over %s: a put costs %llu ns, %.2f GB/s\n", flight.result.lanes,
           (unsigned long long)flight.result.put_cost_ns,
           (double)flight.result.bandwidth_bytes_per_s * 1e-9);
    /* no machine moves 4 KiB in less than 10 ns or 16 MiB at less than 1 MB/s, in its own time */
    uint64_t machine_ns = lost_ns(begin_ns, loop_now_ns());
    assert_in_range(flight.result.put_cost_ns, 10, 10 * 1000 * 1000 + machine_ns);
    assert_true(flight.result.bandwidth_bytes_per_s > 1000000 || machine_ns > NS_PER_S);
    assert_true(put_plan_pieces(watched.peer, 1ull << 40, 1, 8) == 8);
    /* closing ends one that is on its way, once */
    flight.done = false;
    assert_int_equal(put_preflight(watched.peer, slots, 3, 2, flight_done, &flight, &err),
                     STATUS_OK);
    watched_close(&watched, &side);
    assert_true(flight.done);
    assert_int_equal(flight.result.status, STATUS_CANCELLED);
    pair_end(&pair);
    side_close(&side);
}

static void preflight_shared(void **state)
{
    preflight_over(NULL);
}

static void preflight_tcp(void **state)
{
    preflight_over("tcp");
}

static void plan(void **state)
{
    /* the table of an NVLink pair: 4.7 us a put, 390 GB/s. 32 MB take 82 us: one piece */
    assert_int_equal(put_plan_pieces_of(4700, 390000000000ull, 32000000, 32, 41), 1);
    /* 3 GB/s, 32 MB take 10.7 ms: a tenth pays for 7 pieces of 32 puts */
    assert_int_equal(put_plan_pieces_of(4700, 3000000000ull, 32000000, 32, 41), 7);
    assert_int_equal(put_plan_pieces_of(4700, 3000000000ull, 32000000, 32, 4), 4);
    assert_int_equal(put_plan_pieces_of(4700, 0, 32000000, 32, 41), 1);
    assert_int_equal(put_plan_pieces_of(0, 1000000, 32000000, 0, UINT32_MAX), 3200000000u);
    /* first words of the pattern, as published for splitmix64 with seed 0 */
    uint8_t bytes[16];
    put_pattern_fill(bytes, 16, 0);
    const uint8_t expected[16] = {0xaf, 0xcd, 0x1d, 0x7b, 0x39, 0xa8, 0x20, 0xe2,
                                  0xf4, 0x65, 0xb9, 0xa1, 0x6a, 0x9e, 0x78, 0x6e};
    assert_memory_equal(bytes, expected, 16);
    size_t offset = 99;
    assert_true(put_pattern_check(bytes, 16, 0, &offset));
    bytes[9] ^= 1;
    assert_false(put_pattern_check(bytes, 16, 0, &offset));
    assert_int_equal(offset, 8);
}

int main(int argc, char **argv)
{
    pair_main(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plan),
        cmocka_unit_test(content_posix),
        cmocka_unit_test(content_sysv),
        cmocka_unit_test(content_cma),
        cmocka_unit_test(content_tcp),
        cmocka_unit_test(content_default),
        cmocka_unit_test(far_pages),
        cmocka_unit_test(merges_and_cuts),
        cmocka_unit_test(bounds),
        cmocka_unit_test(foreign_bytes),
        cmocka_unit_test(preflight_shared),
        cmocka_unit_test(preflight_tcp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
