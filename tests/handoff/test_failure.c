/*
 * Nodes that die, stop and come back. A lost prefill node fails its transfers by name within a
 * second and nothing else; a lost decode node costs its prefill nodes nothing.
 */
#include "cluster.h"

#include <signal.h>

static const int PREFILL = BATON__ROLE__ROLE_PREFILL, DECODE = BATON__ROLE__ROLE_DECODE;
static const int READY = BATON__TO_ROUTER__PAIR__STATE__READY;
static const int LOST = BATON__FAIL_CODE__FAIL_PEER_LOST;

/* A transfer that takes long: one slot, and 79 pages that have to pass it one by one; with it a row
 * that generates all the while. */
struct scene {
    struct test_node *p0, *d0;
    uint32_t *ids;
    struct start start, other_start;
    struct test_request *moving, *other;
};

static void scene_open(struct scene *scene)
{
    scene->p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 0 --log-level info --lease 1500ms");
    scene->d0 = node_spawn(DECODE, "d0", "--landing-slots 1 --sim-step 5");
    scene->ids = ids_make(20000, 3);
    wait_pair(scene->d0, "p0", READY, 5000);
    scene->other_start = (struct start){.ids = scene->ids, .n_ids = 300, .max_tokens = 400};
    scene->other = request_start(scene->d0, &scene->other_start);
    WAIT_FOR(scene->other->n_tokens[0] > 2, 5000);
    scene->start = (struct start){.prefill = "p0", .ids = scene->ids, .n_ids = 20000};
    scene->moving = request_start(scene->d0, &scene->start);
    WAIT_FOR(node_metric(scene->d0, "baton_parcels_total") >= 2, 5000);
    assert_false(scene->moving->ended);
}

static void scene_close(struct scene *scene)
{
    wait_ended(scene->other, 10000);
    assert_greedy(scene->other, &scene->other_start);
    mem_free(scene->ids);
}

/* kill -9 of prefill in the middle of a transfer. */
static void prefill_killed_mid_transfer(void **state)
{
    struct scene scene;
    scene_open(&scene);
    uint64_t killed_ns = loop_now_ns();
    node_kill(scene.p0);
    wait_code(scene.moving, LOST, 1000);
    assert_within("the sight of a death", killed_ns, scene.moving->end_ns, 1000);
    assert_true(scene.moving->retryable);
    assert_string_equal(scene.moving->node, "p0");
    assert_int_equal(scene.moving->n_tokens[0], 0);
    scene.start.prefill = NULL;
    scene.start.n_ids = 1000;
    struct test_request *local = request_start(scene.d0, &scene.start);
    wait_ended(local, 5000);
    assert_greedy(local, &scene.start);
    scene_close(&scene);
    wait_baseline(scene.d0, 500); /* not the ten seconds of a writer that nobody saw end */
    /* The same name comes back as another incarnation and serves. */
    scene.ids = ids_make(1000, 3);
    scene.p0 = node_spawn(PREFILL, "p0", "");
    wait_pair(scene.d0, "p0", READY, 5000);
    struct start start = {.prefill = "p0", .ids = scene.ids, .n_ids = 1000};
    struct test_request *again = request_start(scene.d0, &start);
    wait_ended(again, 5000);
    assert_greedy(again, &start);
    mem_free(scene.ids);
    nodes_end();
}

/* kill -9 while the prompt computes, and while it waits: no slot was granted, nothing to wait for.
 */
static void prefill_killed_while_computing(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 2000 --chunk 256");
    struct test_node *d0 = node_spawn(DECODE, "d0", "");
    uint32_t *ids = ids_make(5000, 2);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 4000};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *computes = request_start(d0, &start);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    start.n_ids = 5000;
    struct test_request *waits = request_start(d0, &start);
    WAIT_FOR(waits->admitted, 1000);
    node_kill(p0);
    wait_code(computes, LOST, 1000);
    wait_code(waits, LOST, 1000);
    wait_baseline(d0, 500);
    wait_code(request_start(d0, &start), BATON__FAIL_CODE__FAIL_PAIR_NOT_READY, 1000);
    mem_free(ids);
    nodes_end();
}

/* A stopped prefill node: keepalive finds it within two seconds. Awake again it takes a new
 * incarnation, gives everything back and serves. */
static void prefill_stopped_and_continued(void **state)
{
    struct scene scene;
    scene_open(&scene);
    uint64_t incarnation = scene.p0->incarnation, stopped_ns = loop_now_ns();
    kill(scene.p0->pid, SIGSTOP);
    wait_code(scene.moving, LOST, 2000);
    assert_within("the sight of a stop", stopped_ns, scene.moving->end_ns, 2000);
    assert_int_equal(scene.moving->n_tokens[0], 0);
    run_ms(300);
    kill(scene.p0->pid, SIGCONT);
    WAIT_FOR(scene.p0->join && scene.p0->incarnation != incarnation, 10000);
    wait_pair(scene.d0, "p0", READY, 10000);
    scene.start.n_ids = 3000;
    struct test_request *again = request_start(scene.d0, &scene.start);
    wait_ended(again, 5000);
    assert_greedy(again, &scene.start);
    wait_baseline(scene.p0, 2000);
    scene_close(&scene);
    wait_baseline(scene.d0, 12000); /* its process lives: silence is only known after ten seconds */
    nodes_end();
}

/* kill -9 of decode: its prefill node frees pages, sequences and tails at once and serves others.
 */
static void decode_killed(void **state)
{
    struct scene scene;
    scene_open(&scene);
    struct test_node *d1 = node_spawn(DECODE, "d1", "");
    wait_pair(d1, "p0", READY, 5000);
    node_kill(scene.d0);
    wait_baseline(scene.p0, 1000);
    scene.start.n_ids = 3000;
    struct test_request *elsewhere = request_start(d1, &scene.start);
    wait_ended(elsewhere, 5000);
    assert_greedy(elsewhere, &scene.start);
    wait_baseline(d1, 1000);
    mem_free(scene.ids);
    nodes_end();
}

/* The router's link goes: its requests are cancelled, unsaid, and everything is free for the next.
 */
static void router_link_lost(void **state)
{
    struct scene scene;
    scene_open(&scene);
    link_reset(scene.d0->serve);
    scene.d0->serving = false;
    WAIT_FOR(scene.d0->serving, 5000);
    wait_baseline(scene.d0, 2000);
    wait_baseline(scene.p0, 2000);
    assert_false(scene.moving->ended);
    struct test_request *again = request_start(scene.d0, &scene.start);
    wait_ended(again, 10000);
    assert_greedy(again, &scene.start);
    mem_free(scene.ids);
    nodes_end();
}

/* KV-07: drain of a prefill node with a deadline that runs out. Decode hears it with its true code.
 */
static void kv07_drain_runs_out(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 1000 --grace 300ms");
    struct test_node *d0 = node_spawn(DECODE, "d0", "");
    uint32_t *ids = ids_make(2000, 2);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 2000};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *computes = request_start(d0, &start);
    WAIT_FOR(node_metric(p0, "baton_requests_running") == 1, 4000);
    kill(p0->pid, SIGTERM);
    WAIT_FOR(p0->said.draining, 1000);
    struct test_request *late = request_start(d0, &start);
    wait_code(late, BATON__FAIL_CODE__FAIL_DRAINING, 200);
    assert_string_equal(late->node, "p0");
    wait_code(computes, BATON__FAIL_CODE__FAIL_DRAINING, 1300);
    assert_true(computes->retryable);
    assert_int_equal(computes->n_tokens[0], 0);
    wait_baseline(d0, 1000);
    mem_free(ids);
    nodes_end();
}

/* KV-07: a prompt that prefill can't hold, and decode could. */
static void kv07_prefill_limit_is_smaller(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--pages 8");
    struct test_node *d0 = node_spawn(DECODE, "d0", "--pages 64");
    uint32_t *ids = ids_make(4000, 2);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 4000};
    wait_pair(d0, "p0", READY, 5000);
    struct test_request *large = request_start(d0, &start);
    wait_code(large, BATON__FAIL_CODE__FAIL_TOO_LONG, 1000);
    assert_string_equal(large->node, "p0");
    assert_true(large->retryable);
    assert_within("a refusal", large->start_ns, large->end_ns, 1000);
    wait_baseline(p0, 500);
    mem_free(ids);
    nodes_end();
}

/* KV-03: nodes of other page sizes never become a pair, and each side names both values. */
static void kv03_other_page_size(void **state)
{
    node_spawn(PREFILL, "p0", "--sim-page-bytes 16384");
    struct test_node *d0 = node_spawn(DECODE, "d0", "");
    WAIT_FOR(d0->said.n_pairs == 1 && strstr(d0->said.pairs[0].text, "fingerprint"), 8000);
    assert_int_not_equal(d0->said.pairs[0].state, READY);
    assert_non_null(strstr(d0->said.pairs[0].text, "8192"));
    assert_non_null(strstr(d0->said.pairs[0].text, "16384"));
    uint32_t *ids = ids_make(10, 2);
    struct start start = {.prefill = "p0", .ids = ids, .n_ids = 10};
    wait_code(request_start(d0, &start), BATON__FAIL_CODE__FAIL_PAIR_NOT_READY, 500);
    mem_free(ids);
    nodes_end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest all[] = {
        NODE_TEST(prefill_killed_mid_transfer),
        NODE_TEST(prefill_killed_while_computing),
        NODE_TEST(prefill_stopped_and_continued),
        NODE_TEST(decode_killed),
        NODE_TEST(router_link_lost),
        NODE_TEST(kv07_drain_runs_out),
        NODE_TEST(kv07_prefill_limit_is_smaller),
        NODE_TEST(kv03_other_page_size),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: test_failure BUILD-FOLDER [TEST]\n");
        return 1;
    }
    build_folder = argv[1];
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    return cmocka_run_group_tests(all, cluster_setup, cluster_teardown);
}
