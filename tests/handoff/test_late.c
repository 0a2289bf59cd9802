/*
 * The late writer. A prefill node was granted slots, its transfer was cancelled, it says that it is
 * silent, and it goes on writing into those slots: while its link lives, after the link is gone,
 * after a rest. The slots belong to the transfers of an honest node by then.
 *
 * What must hold: a parcel that was spoiled is noticed by its checksum, counted, and its attempt
 * fails as one that may be tried again; what ends well has the right tokens; a stream whose pages
 * were taken before goes on undisturbed; when the writer rests everything comes through, and in the
 * end nothing is held. Incidents E5, E6, C4, KV of the project's lists.
 *
 *     test_late BUILD-FOLDER UCX-TLS
 */
#include "fake.h"

static const int PREFILL = BATON__ROLE__ROLE_PREFILL, DECODE = BATON__ROLE__ROLE_DECODE;
static const int READY = BATON__TO_ROUTER__PAIR__STATE__READY;

enum { N_IDS = 600, N_SLOTS = 8 };

static const char *tls;

struct tally {
    uint32_t n_good, n_spoiled;
};

/* n honest transfers, three at a time, each new prompt; those that failed are tried again once the
 * writer rests. */
static struct tally transfers(struct test_node *d0, uint32_t n, uint64_t seed)
{
    struct tally tally = {0, 0};
    for (uint32_t i = 0; i < n; i += 3) {
        struct test_request *requests[3];
        struct start starts[3];
        uint32_t *ids[3];
        for (uint32_t k = 0; k < 3; k++) {
            ids[k] = ids_make(N_IDS, seed + i + k);
            starts[k] = (struct start){
                .prefill = "p0", .ids = ids[k], .n_ids = N_IDS, .max_tokens = 20, .credit = 20};
            requests[k] = request_start(d0, &starts[k]);
        }
        for (uint32_t k = 0; k < 3; k++) {
            WAIT_FOR(requests[k]->ended || requests[k]->failed, 10000);
            if (requests[k]->failed) {
                /* A spoiled parcel, and nothing else. */
                assert_int_equal(requests[k]->code, BATON__FAIL_CODE__FAIL_CHECKSUM);
                assert_true(requests[k]->retryable);
                assert_int_equal(requests[k]->n_tokens[0], 0);
                tally.n_spoiled++;
            } else {
                assert_greedy(requests[k], &starts[k]);
                tally.n_good++;
            }
            mem_free(ids[k]);
        }
    }
    return tally;
}

static void all_good(struct test_node *d0, uint32_t n, uint64_t seed)
{
    struct tally tally = transfers(d0, n, seed);
    assert_int_equal(tally.n_good, n);
}

/* Until the writer has demonstrably spoiled something that was under way; each spoiled parcel is
 * counted by the node. */
static void spoiled(struct test_node *d0, uint64_t seed)
{
    struct tally sum = {0, 0};
    double failures = node_metric(d0, "baton_parcel_checksum_failures_total");
    uint64_t written = fake_n_written;
    for (uint32_t i = 0; i < 20 && sum.n_spoiled == 0; i++) {
        struct tally tally = transfers(d0, 9, seed + 100 * i);
        sum.n_good += tally.n_good;
        sum.n_spoiled += tally.n_spoiled;
    }
    failures = node_metric(d0, "baton_parcel_checksum_failures_total") - failures;
    print_message("  %u good, %u spoiled, %g counted, %llu slots written late\n", sum.n_good,
                  sum.n_spoiled, failures, (unsigned long long)(fake_n_written - written));
    assert_true(fake_n_written > written);
    assert_true(sum.n_spoiled > 0);
    assert_true(failures >= sum.n_spoiled);
}

static void late_writer(void **state)
{
    char args[128];
    snprintf(args, sizeof(args), "--landing-slots %d --ucx-tls %s --allow-slow-transport", N_SLOTS,
             tls);
    fake_mode = MODE_WRITER;
    node_fake("f0", 0x77);
    struct test_node *d0 = node_spawn(DECODE, "d0", args);
    snprintf(args, sizeof(args), "--ucx-tls %s --allow-slow-transport", tls);
    node_spawn(PREFILL, "p0", args);
    wait_pair(d0, "f0", READY, 10000);
    wait_pair(d0, "p0", READY, 10000);
    all_good(d0, 6, 1); /* the control */

    /* A long answer whose pages are in the pool before it begins. */
    uint32_t *long_ids = ids_make(N_IDS, 5);
    struct start long_start = {
        .prefill = "p0", .ids = long_ids, .n_ids = N_IDS, .max_tokens = 480, .credit = 20};
    struct test_request *stream = request_start(d0, &long_start);
    WAIT_FOR(stream->n_tokens[0] >= 20, 5000);

    /* Slots, a cancel, "drained": they are free, and written to from now on. */
    uint32_t *ids = ids_make(N_IDS, 4);
    struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
    struct test_request *cancelled = request_start(d0, &start);
    WAIT_FOR(d0->said.slots_free == 2, 5000);
    request_cancel(d0, cancelled);
    wait_code(cancelled, BATON__FAIL_CODE__FAIL_CANCELLED, 500);
    WAIT_FOR(d0->said.slots_free == N_SLOTS, 3000);
    fake_write_on(true);
    print_message("  while its link lives:\n");
    spoiled(d0, 10000);

    fake_write_on(false); /* a rest, as of a stopped process */
    run_ms(300);
    all_good(d0, 9, 20000);
    fake_write_on(true);
    print_message("  after a rest:\n");
    spoiled(d0, 30000);

    fake_link_close();
    WAIT_FOR(pair_state(d0, "f0") != READY, 3000);
    fake_mode = MODE_GOOD;
    print_message("  after its link is gone:\n");
    spoiled(d0, 40000);

    /* What was taken before any of it is as it was. */
    request_credit(d0, stream, 460);
    wait_ended(stream, 20000);
    assert_greedy(stream, &long_start);

    fake_write_on(false);
    run_ms(300);
    all_good(d0, 9, 50000);
    wait_baseline(d0, 12000);
    mem_free(ids);
    mem_free(long_ids);
    nodes_end();
}

static int group_setup(void **state)
{
    cluster_streams = fake_streams;
    fake_tls = tls;
    return cluster_setup(state);
}

static int group_teardown(void **state)
{
    fake_close();
    return cluster_teardown(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest all[] = {NODE_TEST(late_writer)};
    if (argc < 3) {
        fprintf(stderr, "usage: test_late BUILD-FOLDER UCX-TLS\n");
        return 1;
    }
    build_folder = argv[1];
    tls = argv[2];
    return cmocka_run_group_tests(all, group_setup, group_teardown);
}
