/*
 * Cancel in each state that a request can be in on a decode node, and in each phase of its
 * transfer. Nothing is left to time: the request is held in its state by what does not come (the
 * rest of its ids, room, a word of its prefill node, credit), its log says that it is there, and
 * then it is cancelled. Everything is free again at once and the node serves.
 */
#include "fake.h"

static const int DECODE = BATON__ROLE__ROLE_DECODE;
static const int READY = BATON__TO_ROUTER__PAIR__STATE__READY;

enum { N_IDS = 600 };

static uint32_t *ids;

static struct test_node *scene(enum fake_mode mode, const char *options)
{
    fake_mode = MODE_GOOD;
    fake_n_runs = fake_n_links = fake_n_cancels = 0;
    node_fake("f0", 0x2000 + (uint64_t)mode);
    struct test_node *d0 = node_spawn(DECODE, "d0", options);
    wait_pair(d0, "f0", READY, 5000);
    fake_mode = mode;
    return d0;
}

static bool is_in(const struct test_node *d0, const struct test_request *request, const char *state)
{
    char found[64];
    request_state(d0, request, found, sizeof(found));
    return strcmp(found, state) == 0;
}

/* It is in the state, stays there, and a cancel ends it there. */
static void cancel_in(struct test_node *d0, const struct test_request *request, const char *state)
{
    WAIT_FOR(is_in(d0, request, state), 5000);
    run_ms(60); /* a tick of the node: it waits, it does not only pass */
    assert_true(is_in(d0, request, state));
    assert_false(request->ended);
    double before = node_metric(d0, "baton_requests_cancelled_total");
    request_cancel(d0, request);
    wait_code(request, BATON__FAIL_CODE__FAIL_CANCELLED, 300);
    assert_false(request->retryable);
    WAIT_FOR(is_in(d0, request, "ended"), 1000);
    assert_int_equal(node_metric(d0, "baton_requests_cancelled_total"), before + 1);
    /* a second one finds nobody, and is no error */
    request_cancel(d0, request);
    run_ms(20);
    assert_int_equal(node_metric(d0, "baton_requests_cancelled_total"), before + 1);
}

static void still_serves(struct test_node *d0, const char *prefill)
{
    struct start start = {.prefill = prefill, .ids = ids, .n_ids = N_IDS};
    wait_baseline(d0, 1000);
    fake_mode = MODE_GOOD;
    if (prefill) {
        wait_pair(d0, prefill, READY, 5000);
    }
    struct test_request *good = request_start(d0, &start);
    wait_ended(good, 5000);
    assert_greedy(good, &start);
    wait_baseline(d0, 1000);
}

static void receiving(void **state)
{
    struct test_node *d0 = scene(MODE_GOOD, "");
    for (int remote = 0; remote < 2; remote++) {
        struct start start = {
            .prefill = remote ? "f0" : NULL, .ids = ids, .n_ids = N_IDS, .n_sent = 1};
        cancel_in(d0, request_start(d0, &start), "receiving");
    }
    assert_int_equal(fake_n_runs, 0);
    still_serves(d0, "f0");
    nodes_end();
}

/* One sequence, and somebody has it: a local request waits in the queue, and those behind it. */
static void waiting_for_a_slot(void **state)
{
    struct test_node *d0 = scene(MODE_GOOD, "--max-sequences 1");
    struct start start = {.ids = ids, .n_ids = 300, .max_tokens = 400, .credit = 2};
    struct test_request *holder = request_start(d0, &start);
    WAIT_FOR(holder->n_tokens[0] == 2, 5000); /* it pauses for credit, for ever */
    struct test_request *first = request_start(d0, &start), *second = request_start(d0, &start);
    WAIT_FOR(first->admitted && second->admitted, 1000); /* they are told that they wait */
    cancel_in(d0, first, "queued");
    cancel_in(d0, second, "queued");
    assert_int_equal(holder->n_tokens[0], 2);
    assert_false(holder->ended);
    request_credit(d0, holder, 1000);
    wait_ended(holder, 10000);
    assert_greedy(holder, &start);
    still_serves(d0, NULL);
    nodes_end();
}

/* Prefill computes already, and there is no room here yet. */
static void opening(void **state)
{
    struct test_node *d0 = scene(MODE_STARTED, "--max-sequences 1");
    struct start start = {.ids = ids, .n_ids = 300, .max_tokens = 400, .credit = 2};
    struct test_request *holder = request_start(d0, &start);
    WAIT_FOR(holder->n_tokens[0] == 2, 5000);
    start.prefill = "f0";
    struct test_request *request = request_start(d0, &start);
    cancel_in(d0, request, "opening");
    WAIT_FOR(fake_n_cancels == 1, 1000); /* the prefill node is told */
    assert_int_equal(fake_n_runs, 1);
    request_cancel(d0, holder);
    wait_code(holder, BATON__FAIL_CODE__FAIL_CANCELLED, 300);
    still_serves(d0, "f0");
    nodes_end();
}

/* The transfer: unanswered; computing, slots granted; computed, nothing sent. */
static void transfer(void **state)
{
    static const enum fake_mode modes[] = {MODE_SILENT, MODE_STARTED, MODE_COMPUTED};
    for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++) {
        struct test_node *d0 = scene(modes[i], "");
        struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
        struct test_request *request = request_start(d0, &start);
        WAIT_FOR(fake_n_runs == 1, 2000);
        bool granted = modes[i] != MODE_SILENT;
        const char *series = "baton_ledger_items{ledger=\"landing_slots\",state=\"granted\"}";
        WAIT_FOR((node_metric(d0, series) > 0) == granted, 2000);
        cancel_in(d0, request, "transfer");
        WAIT_FOR(fake_n_cancels == 1, 1000);
        assert_int_equal(request->n_tokens[0], 0);
        still_serves(d0, "f0");
        nodes_end();
    }
}

/* A prompt that this node computes itself: its first chunk, and one that waits behind it. */
static void local(void **state)
{
    struct test_node *d0 = node_spawn(DECODE, "d0", "--sim-prefill-speed 100 --chunk 512");
    struct start start = {.ids = ids, .n_ids = N_IDS};
    struct test_request *computes = request_start(d0, &start); /* five seconds a chunk */
    struct test_request *waits = request_start(d0, &start);
    WAIT_FOR(is_in(d0, computes, "local") && is_in(d0, waits, "local"), 2000);
    WAIT_FOR(node_metric(d0, "baton_requests_running") >= 1, 2000);
    cancel_in(d0, waits, "local");
    cancel_in(d0, computes, "local"); /* told at once; the chunk's pages come back when it ends */
    wait_baseline(d0, 8000);
    nodes_end();
}

static void running(void **state)
{
    struct test_node *d0 = scene(MODE_GOOD, "--sim-step 2");
    struct start start = {.ids = ids, .n_ids = N_IDS, .n = 3, .max_tokens = 500};
    /* paused for credit, and in full run */
    start.credit = 1;
    struct test_request *paused = request_start(d0, &start);
    WAIT_FOR(paused->n_tokens[0] == 1 && paused->n_tokens[2] == 1, 5000);
    start.credit = 0;
    struct test_request *runs = request_start(d0, &start);
    WAIT_FOR(runs->n_tokens[2] > 3, 5000);
    cancel_in(d0, runs, "running");
    uint32_t n = runs->n_tokens[0];
    cancel_in(d0, paused, "running");
    run_ms(100);
    assert_int_equal(runs->n_tokens[0], n); /* no token after the end */
    assert_int_equal(paused->n_tokens[0], 1);
    still_serves(d0, "f0");
    nodes_end();
}

static int group_setup(void **state)
{
    cluster_streams = fake_streams;
    ids = ids_make(N_IDS, 17);
    return cluster_setup(state);
}

static int group_teardown(void **state)
{
    fake_close();
    mem_free(ids);
    return cluster_teardown(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest all[] = {
        NODE_TEST(receiving), NODE_TEST(waiting_for_a_slot),
        NODE_TEST(opening),   NODE_TEST(transfer),
        NODE_TEST(local),     NODE_TEST(running),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: test_cancel BUILD-FOLDER [TEST]\n");
        return 1;
    }
    build_folder = argv[1];
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    return cmocka_run_group_tests(all, group_setup, group_teardown);
}
