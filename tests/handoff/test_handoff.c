/*
 * Split prefill and decode, real processes: what comes out is what one node alone makes, whatever
 * the length, however few the slots, however many nodes; and whatever is cancelled, refused or late
 * gives everything back and says its own name.
 */
#include "cluster.h"

#include <inttypes.h>
#include <signal.h>

static const int PREFILL = BATON__ROLE__ROLE_PREFILL, DECODE = BATON__ROLE__ROLE_DECODE;
static const int READY = BATON__TO_ROUTER__PAIR__STATE__READY;

/* Every length around the page and chunk boundaries, n = 1..4: the tokens are the formula's, and
 * with sampling those of the same request prefilled locally. */
static void split_is_local(void **state)
{
    static const uint32_t lengths[] = {1,   2,   255,  256,  257,  511, 512,
                                       513, 767, 1024, 1025, 2049, 7000};
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--chunk 512");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--chunk 512");
    wait_pair(d0, "p0", READY, 5000);
    for (uint32_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        uint32_t *ids = ids_make(lengths[i], i + 1);
        struct start start = {.prefill = "p0", .ids = ids, .n_ids = lengths[i], .n = 1 + i % 4};
        struct test_request *split = request_start(d0, &start);
        wait_ended(split, 5000);
        assert_greedy(split, &start);
        assert_true(split->timings.bytes >=
                    (uint64_t)((lengths[i] + 255) / 256) * PAGE_BYTES + TAIL_BYTES);
        start.temperature = 0.8f;
        start.n = 4;
        split = request_start(d0, &start);
        start.prefill = NULL;
        struct test_request *local = request_start(d0, &start);
        wait_ended(split, 5000);
        wait_ended(local, 5000);
        for (uint32_t s = 0; s < 4; s++) {
            assert_int_equal(split->n_tokens[s], 12);
            assert_memory_equal(split->tokens[s], local->tokens[s], 12 * sizeof(uint32_t));
        }
        assert_memory_not_equal(split->tokens[0], split->tokens[1], 12 * sizeof(uint32_t));
        mem_free(ids);
    }
    assert_int_equal(node_metric(d0, "baton_protocol_errors_total"), 0);
    assert_int_equal(node_metric(d0, "baton_parcel_checksum_retries_total"), 0);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();
}

/* A failover's re-run: ids are prompt + emitted tokens, and the answer goes on where it was. */
static void continues_what_was_emitted(void **state)
{
    node_spawn(PREFILL, "p0", "");
    struct test_node *d0 = node_spawn(DECODE, "d0", "");
    wait_pair(d0, "p0", READY, 5000);
    uint32_t *ids = ids_make(320, 5);
    struct start start = {.ids = ids, .n_ids = 300, .max_tokens = 20};
    struct test_request *whole = request_start(d0, &start);
    wait_ended(whole, 5000);
    memcpy(ids + 300, whole->tokens[0], 7 * sizeof(*ids));
    start = (struct start){
        .prefill = "p0", .ids = ids, .n_ids = 307, .n_generated = 7, .max_tokens = 20};
    struct test_request *rest = request_start(d0, &start);
    wait_ended(rest, 5000);
    assert_int_equal(rest->n_tokens[0], 13);
    assert_memory_equal(rest->tokens[0], whole->tokens[0] + 7, 13 * sizeof(uint32_t));
    assert_int_equal(rest->prompt_tokens, 300);
    assert_int_equal(rest->reason[0], BATON__FROM_DECODE__REASON__REASON_LENGTH);
    mem_free(ids);
    nodes_end();
}

static void run_many(struct test_node *const *decodes, uint32_t n_decodes,
                     const char *const *prefills, uint32_t n_prefills, uint32_t n)
{
    struct test_request *all[64];
    struct start starts[64];
    assert_true(n <= 64);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t n_ids = 1 + (i * 397) % 3000;
        starts[i] = (struct start){.prefill = prefills[i % n_prefills],
                                   .ids = ids_make(n_ids, 1000 + i),
                                   .n_ids = n_ids,
                                   .n = 1 + i % 3};
        all[i] = request_start(decodes[i % n_decodes], &starts[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        wait_ended(all[i], 15000);
        assert_greedy(all[i], &starts[i]);
        mem_free((void *)starts[i].ids);
    }
}

/* Two of each, all pairs at once, far more transfers than landing slots. */
static void many_to_many(void **state)
{
    static const char *const prefills[] = {"p0", "p1"};
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--chunk 512");
    struct test_node *p1 = node_spawn(PREFILL, "p1", "");
    struct test_node *decodes[2] = {node_spawn(DECODE, "d0", "--landing-slots 8"),
                                    node_spawn(DECODE, "d1", "")};
    for (uint32_t d = 0; d < 2; d++) {
        wait_pair(decodes[d], "p0", READY, 5000);
        wait_pair(decodes[d], "p1", READY, 5000);
    }
    run_many(decodes, 1, prefills, 2, 24); /* several prefill nodes to one decode */
    run_many(decodes, 2, prefills, 1, 24); /* several decode nodes to one prefill */
    run_many(decodes, 2, prefills, 2, 48);
    wait_baseline(decodes[0], 2000);
    wait_baseline(decodes[1], 2000);
    wait_baseline(p0, 2000);
    wait_baseline(p1, 2000);
    nodes_end();
}

/* Two landing slots and one send buffer for tails: every transfer waits for one or the other, and
 * none for both in the wrong order. */
static void few_slots(void **state)
{
    static const char *const prefills[] = {"p0"};
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--tail-buffers 1 --chunk 256");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--landing-slots 2 --max-sequences 64");
    wait_pair(d0, "p0", READY, 5000);
    run_many(&d0, 1, prefills, 1, 32);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();
}

/* The pages of the last chunk leave in pieces while it computes: the same bytes, each once,
 * with slots for all of them or one for one piece after the other. */
static void last_chunk_in_pieces(void **state)
{
    static const uint32_t lengths[] = {255, 256, 257, 1100, 1536, 2048, 2049, 7000};
    static const uint32_t n_slots[] = {1, 5, 32};
    for (uint32_t i = 0; i < 3; i++) {
        char args[64];
        struct test_node *p0 =
            node_spawn(PREFILL, "p0", "--last-chunk-pieces 5 --sim-prefill-speed 25000");
        snprintf(args, sizeof(args), "--landing-slots %" PRIu32, n_slots[i]);
        struct test_node *d0 = node_spawn(DECODE, "d0", args);
        wait_pair(d0, "p0", READY, 5000);
        double wanted = 0;
        for (uint32_t k = 0; k < sizeof(lengths) / sizeof(lengths[0]); k++) {
            struct start start = {
                .prefill = "p0", .ids = ids_make(lengths[k], k), .n_ids = lengths[k]};
            struct test_request *request = request_start(d0, &start);
            wait_ended(request, 8000);
            assert_greedy(request, &start);
            uint64_t bytes = (lengths[k] + 255) / 256 * (uint64_t)PAGE_BYTES + TAIL_BYTES;
            assert_int_equal(request->timings.bytes, bytes);
            wanted += (double)bytes;
            mem_free((void *)start.ids);
        }
        double early = node_metric(p0, "baton_transfer_early_bytes_total");
        assert_true(node_metric(p0, "baton_transfer_bytes_total") == wanted);
        assert_true(early > 0 && early < wanted);
        assert_int_equal(node_metric(d0, "baton_protocol_errors_total"), 0);
        wait_baseline(d0, 2000);
        wait_baseline(p0, 2000);
        nodes_end();
    }
}

/* A pool that holds few prompts: transfers wait open, rows that run short are preempted and say
 * so, and nothing stands still. */
static void small_pool(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--pages 12");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--pages 12 --max-sequences 8");
    struct test_request *all[24];
    struct start starts[24];
    uint32_t n_ok = 0;
    wait_pair(d0, "p0", READY, 5000);
    for (uint32_t i = 0; i < 24; i++) {
        starts[i] = (struct start){.prefill = i % 4 ? "p0" : NULL,
                                   .ids = ids_make(1000, i),
                                   .n_ids = 1000,
                                   .max_tokens = 300};
        all[i] = request_start(d0, &starts[i]);
    }
    for (uint32_t i = 0; i < 24; i++) {
        WAIT_FOR(all[i]->ended, 40000);
        if (all[i]->failed) {
            assert_int_equal(all[i]->code, BATON__FAIL_CODE__FAIL_PREEMPTED);
            assert_true(all[i]->retryable);
        } else {
            assert_greedy(all[i], &starts[i]);
            n_ok++;
        }
        mem_free((void *)starts[i].ids);
    }
    assert_true(n_ok >= 8);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();
}

/* Cancel in each phase. Everything is back at once, and the node goes on. */
static void cancel_in_every_phase(void **state)
{
    const int cancelled = BATON__FAIL_CODE__FAIL_CANCELLED;
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 4000 --chunk 512");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--landing-slots 1 --sim-step 4");
    uint32_t *ids = ids_make(20000, 3);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 3000, .max_tokens = 500};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *computing = request_start(d0, &start);
    start.n_ids = 5000;
    struct test_request *queued = request_start(d0, &start);
    WAIT_FOR(queued->admitted, 2000);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    request_cancel(d0, queued);
    wait_code(queued, cancelled, 300);
    assert_false(computing->ended);
    request_cancel(d0, computing);
    wait_code(computing, cancelled, 300);
    wait_baseline(d0, 1000);
    wait_baseline(p0, 1000);
    nodes_end();

    p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 0 --log-level info");
    d0 = node_spawn(DECODE, "d0", "--landing-slots 1 --sim-step 4");
    wait_pair(d0, "p0", READY, 5000);
    start.n_ids = 20000;
    struct test_request *moving = request_start(d0, &start);
    WAIT_FOR(node_metric(d0, "baton_parcels_total") >= 3, 4000);
    request_cancel(d0, moving);
    wait_code(moving, cancelled, 300);
    assert_true(node_metric(d0, "baton_parcels_total") < 79);
    wait_baseline(d0, 1000);
    wait_baseline(p0, 1000);

    start.n_ids = 700;
    start.n = 3;
    struct test_request *generating = request_start(d0, &start);
    WAIT_FOR(generating->n_tokens[2] > 3, 8000);
    request_cancel(d0, generating);
    wait_code(generating, cancelled, 300);
    start.prefill = NULL;
    start.n = 1;
    start.n_ids = 20000;
    struct test_request *local = request_start(d0, &start);
    run_ms(20);
    request_cancel(d0, local);
    wait_code(local, cancelled, 1000);
    wait_baseline(d0, 1000);
    wait_baseline(p0, 1000);
    mem_free(ids);
    nodes_end();
}

/* Cancels at moments that nobody chose. What was not cancelled in time is right to the token. */
static void cancel_at_any_moment(void **state)
{
    struct test_node *p0 =
        node_spawn(PREFILL, "p0", "--chunk 512 --last-chunk-pieces 3 --sim-prefill-speed 100000");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--landing-slots 3 --max-sequences 64");
    struct test_request *all[60];
    struct start starts[60];
    uint32_t n_cancelled = 0, n_whole = 0;
    wait_pair(d0, "p0", READY, 5000);
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t n_ids = 1 + (i * 131) % 2500;
        starts[i] = (struct start){
            .prefill = i % 5 ? "p0" : NULL, .ids = ids_make(n_ids, i), .n_ids = n_ids};
        all[i] = request_start(d0, &starts[i]);
        run_ms(1 + (i * 7) % 9);
        if (i % 3 == 2) {
            request_cancel(d0, all[i - i / 3 % 3]); /* this one, or one or two before it */
        }
    }
    for (uint32_t i = 0; i < 60; i++) {
        WAIT_FOR(all[i]->ended, 20000);
        if (all[i]->failed) {
            assert_int_equal(all[i]->code, BATON__FAIL_CODE__FAIL_CANCELLED);
            n_cancelled++;
        } else {
            assert_greedy(all[i], &starts[i]);
            n_whole++;
        }
        mem_free((void *)starts[i].ids);
    }
    assert_true(n_cancelled > 5 && n_whole > 5);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();
}

/* What is over a bound is refused at once, by name, and by the node whose bound it is. */
static void bounds_are_answered(void **state)
{
    struct test_node *p0 =
        node_spawn(PREFILL, "p0", "--queue 1 --tail-buffers 1 --sim-prefill-speed 2000");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--queue 2 --max-transfers 3 --pages 64");
    uint32_t *ids = ids_make(20000, 9);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 2000, .queue_ms = 60000};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *first = request_start(d0, &start);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    struct test_request *second = request_start(d0, &start); /* waits at p0 */
    run_ms(100);
    struct test_request *third = request_start(d0, &start);
    wait_code(third, BATON__FAIL_CODE__FAIL_QUEUE_FULL, 500);
    assert_string_equal(third->node, "p0");
    assert_true(third->retryable);
    start.n_ids = 20000;
    struct test_request *long_one = request_start(d0, &start);
    wait_code(long_one, BATON__FAIL_CODE__FAIL_TOO_LONG, 500);
    assert_string_equal(long_one->node, "d0");
    start.n_ids = 10;
    start.prefill = "p9";
    wait_code(request_start(d0, &start), BATON__FAIL_CODE__FAIL_PAIR_NOT_READY, 500);
    ids[3] = VOCAB;
    start.prefill = NULL;
    wait_code(request_start(d0, &start), BATON__FAIL_CODE__FAIL_INVALID, 500);
    ids[3] = 3;
    wait_ended(first, 8000);
    wait_ended(second, 8000);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();

    /* The decode node's own queue: one sequence, so everything behind the first waits there. */
    d0 = node_spawn(DECODE, "d0", "--queue 2 --max-sequences 1 --sim-step 5");
    struct test_request *all[5];
    start.max_tokens = 200;
    for (uint32_t i = 0; i < 5; i++) {
        all[i] = request_start(d0, &start);
        WAIT_FOR(all[i]->admitted || all[i]->ended || all[i]->n_tokens[0] > 0, 2000);
        run_ms(30);
    }
    wait_code(all[3], BATON__FAIL_CODE__FAIL_QUEUE_FULL, 500);
    wait_code(all[4], BATON__FAIL_CODE__FAIL_QUEUE_FULL, 500);
    for (uint32_t i = 0; i < 3; i++) {
        wait_ended(all[i], 8000);
    }
    wait_baseline(d0, 2000);
    mem_free(ids);
    nodes_end();
}

/* Each deadline names itself and the node where the time went. */
static void deadlines_name_themselves(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 2000 --chunk 256");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--sim-step 5");
    uint32_t *ids = ids_make(9000, 4);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 4000};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *ahead = request_start(d0, &start);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    start.n_ids = 5000; /* longer: the one ahead goes first */
    start.queue_ms = 300;
    struct test_request *waits = request_start(d0, &start);
    wait_code(waits, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, 600);
    assert_string_equal(waits->node, "p0");
    request_cancel(d0, ahead);
    start.queue_ms = 0;
    start.prefill_ms = 300;
    struct test_request *computes = request_start(d0, &start);
    wait_code(computes, BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL, 1500);
    assert_string_equal(computes->node, "p0");
    start = (struct start){.ids = ids, .n_ids = 100, .max_tokens = 500, .generation_ms = 200};
    struct test_request *generates = request_start(d0, &start);
    wait_code(generates, BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION, 1500);
    assert_string_equal(generates->node, "d0");
    assert_true(generates->n_tokens[0] > 0);
    wait_baseline(d0, 2000);
    wait_baseline(p0, 2000);
    nodes_end();

    d0 = node_spawn(DECODE, "d0", "--sim-prefill-speed 2000 --chunk 256 --max-sequences 1");
    start = (struct start){.ids = ids, .n_ids = 4000, .prefill_ms = 300};
    computes = request_start(d0, &start);
    start.queue_ms = 200;
    start.prefill_ms = 0;
    waits = request_start(d0, &start);
    wait_code(waits, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, 600);
    wait_code(computes, BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL, 1500);
    assert_string_equal(waits->node, "d0");
    wait_baseline(d0, 2000);
    mem_free(ids);
    nodes_end();
}

/* Time in the queue is not time of the prefill: a short prompt behind a long chunk keeps its own
 * prefill deadline, and its timings say where it waited. */
static void queue_time_is_not_prefill_time(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 2000 --chunk 2048");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--sim-prefill-speed 2000 --chunk 2048");
    uint32_t *ids = ids_make(2048, 4);
    wait_pair(d0, "p0", READY, 5000);
    for (int local = 0; local < 2; local++) {
        struct start start = {.prefill = local ? NULL : "p0", .ids = ids, .n_ids = 2048};
        struct test_request *ahead = request_start(d0, &start);
        WAIT_FOR(node_metric(local ? d0 : p0, "baton_requests_running") == 1, 4000);
        run_ms(100);
        start.n_ids = 20;
        start.prefill_ms = 500;
        struct test_request *behind = request_start(d0, &start);
        wait_ended(behind, 5000);
        wait_ended(ahead, 5000);
        assert_true(behind->have_timings);
        uint64_t lost_ms = lost_ns(ahead->start_ns, behind->end_ns) / NS_PER_MS;
        assert_in_range(behind->timings.queue_ns / NS_PER_MS + lost_ms, 400, 5000 + lost_ms * 2);
        /* 10 ms, of which a loop that comes late to its begin sees less */
        assert_in_range(behind->timings.prefill_ns, 1, (399 + lost_ms) * NS_PER_MS);
        assert_in_range(ahead->timings.prefill_ns / NS_PER_MS, 1000, 5000 + lost_ms);
    }
    mem_free(ids);
    nodes_end();
}

/* Credits: what a client does not read stops its own row and nobody else's. */
static void credits_stop_their_own_row(void **state)
{
    struct test_node *d0 = node_spawn(DECODE, "d0", "");
    uint32_t *ids = ids_make(100, 1);
    struct start start = {.ids = ids, .n_ids = 100, .max_tokens = 60, .credit = 5};
    struct test_request *slow = request_start(d0, &start);
    struct start other = {.ids = ids, .n_ids = 90, .max_tokens = 60};
    struct test_request *fast = request_start(d0, &other);
    wait_ended(fast, 4000);
    assert_greedy(fast, &other);
    assert_int_equal(slow->n_tokens[0], 5);
    request_credit(d0, slow, 10);
    WAIT_FOR(slow->n_tokens[0] == 15, 4000);
    run_ms(50);
    assert_int_equal(slow->n_tokens[0], 15);
    request_credit(d0, slow, 1000);
    wait_ended(slow, 4000);
    assert_greedy(slow, &start);
    mem_free(ids);
    nodes_end();
}

/* SIGTERM: what runs goes on to its end, what is new is refused, and the process ends with 0. */
static void drain_lets_streams_finish(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 2000");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--sim-step 5");
    uint32_t *ids = ids_make(2000, 1);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 1500, .max_tokens = 100};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *runs = request_start(d0, &start);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    kill(p0->pid, SIGTERM);
    kill(d0->pid, SIGTERM);
    WAIT_FOR(d0->said.draining && p0->said.draining, 2000);
    struct test_request *late = request_start(d0, &start);
    wait_code(late, BATON__FAIL_CODE__FAIL_DRAINING, 500);
    assert_true(late->retryable);
    assert_false(runs->ended);
    wait_ended(runs, 5000);
    assert_greedy(runs, &start);
    mem_free(ids);
    nodes_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest all[] = {
        NODE_TEST(split_is_local),
        NODE_TEST(continues_what_was_emitted),
        NODE_TEST(many_to_many),
        NODE_TEST(few_slots),
        NODE_TEST(last_chunk_in_pieces),
        NODE_TEST(small_pool),
        NODE_TEST(cancel_in_every_phase),
        NODE_TEST(cancel_at_any_moment),
        NODE_TEST(bounds_are_answered),
        NODE_TEST(deadlines_name_themselves),
        NODE_TEST(queue_time_is_not_prefill_time),
        NODE_TEST(credits_stop_their_own_row),
        NODE_TEST(drain_lets_streams_finish),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: test_handoff BUILD-FOLDER [TEST]\n");
        return 1;
    }
    build_folder = argv[1];
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    return cmocka_run_group_tests(all, cluster_setup, cluster_teardown);
}
