#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/mem.h"
#include "router/policy.h"
#include "router/registry_internal.h"

/*
 * The policy alone: nodes as the registry keeps them, no process behind them. What a wait should be
 * is worked out here by hand, from what policy.h and the essay of policy_load.c say.
 */

enum { MAX_NODES = 8, PAGE_BYTES = 1000000 };

static struct registry registry;
static struct node nodes[MAX_NODES];
static struct node_pair pairs[MAX_NODES][MAX_NODES];
static size_t n_nodes;
static struct policy *policy;

static int set_up(void **state)
{
    memset(&registry, 0, sizeof(registry));
    memset(nodes, 0, sizeof(nodes));
    memset(pairs, 0, sizeof(pairs));
    n_nodes = 0;
    policy = NULL;
    list_init(&registry.nodes);
    return 0;
}

static int tear_down(void **state)
{
    policy_free(policy);
    return 0;
}

static struct node *add(Baton__Role role)
{
    struct node *node = &nodes[n_nodes];
    node->registry = &registry;
    snprintf(node->ref.id, sizeof(node->ref.id), "n%zu", n_nodes);
    node->ref.incarnation = 100 + n_nodes;
    node->role = role;
    node->has_status = node->ready = node->serving = true;
    node->max_sequences = 8;
    node->sequences_free = 8;
    node->page_bytes = PAGE_BYTES;
    node->prefill_tokens_per_s = 1000;
    node->pairs = pairs[n_nodes++];
    list_init(&node->legs);
    list_push_back(&registry.nodes, &node->in_registry);
    return node;
}

static struct node *add_decode(void)
{
    return add(BATON__ROLE__ROLE_DECODE);
}

static struct node *add_prefill(void)
{
    return add(BATON__ROLE__ROLE_PREFILL);
}

static struct node_pair *join(struct node *decode, const struct node *prefill)
{
    struct node_pair *pair = &decode->pairs[decode->n_pairs++];
    pair->prefill = prefill->ref;
    pair->state = BATON__TO_ROUTER__PAIR__STATE__READY;
    pair->put_cost_ns = 1000000;               /* 1 ms */
    pair->bandwidth_bytes_per_s = 1000000000u; /* a page in 1 ms */
    return pair;
}

static struct policy_choice ask(const struct policy_question *question)
{
    struct policy_choice choice = {NULL, NULL, 0};
    uint64_t wait_ns = 0;
    assert_int_equal(policy_choose(policy, question, &choice, &wait_ns), STATUS_OK);
    assert_non_null(choice.decode);
    return choice;
}

static struct policy_choice ask_n(uint32_t n_ids)
{
    struct policy_question question = {.n_ids = n_ids, .n_samples = 1};
    return ask(&question);
}

/* Asks, and takes the choice back as if nothing had come of it. */
static struct policy_choice look(uint32_t n_ids)
{
    struct policy_choice choice = ask_n(n_ids);
    struct node *computing = choice.prefill ? choice.prefill : choice.decode;
    policy_ended(policy, choice.decode, choice.prefill, POLICY_CANCELLED, 0);
    computing->load.unseen_old_tokens = computing->load.unseen_new_tokens = 0;
    return choice;
}

static enum status refused(const struct policy_question *question, uint64_t *ret_wait_ns)
{
    struct policy_choice choice = {NULL, NULL, 7};
    enum status status = policy_choose(policy, question, &choice, ret_wait_ns);
    assert_null(choice.decode); /* written on success only */
    assert_int_equal(choice.wait_ns, 7);
    return status;
}

static void sleep_ms(long ms)
{
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&time, &time) != 0) {
    }
}

static void wait_is(const struct policy_choice *choice, double wanted_ms)
{
    double found_ms = (double)choice->wait_ns * 1e-6;
    if (found_ms < wanted_ms - 0.01 || found_ms > wanted_ms + 0.01) {
        fail_msg("predicted wait %.3f ms, wanted %.3f ms", found_ms, wanted_ms);
    }
}

/* ---- the wait ---- */

static void test_least_wait(void **state)
{
    struct node *decode = add_decode(), *a = add_prefill(), *b = add_prefill();
    join(decode, a);
    join(decode, b);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    /* 400 tokens before ours at 1,000 a second, or none at 800 */
    a->queued_tokens = 400;
    b->prefill_tokens_per_s = 800;
    struct policy_choice choice = look(100);
    assert_ptr_equal(choice.prefill, b);
    wait_is(&choice, 100 / 0.8 + 2);
    /* a prompt so long that the faster node's queue is worth waiting for: 2400 / 1000 < 2000 / 800
     */
    choice = look(2000);
    assert_ptr_equal(choice.prefill, a);
    wait_is(&choice, 2402);
    /* the way: half a second a page */
    decode->pairs[0].bandwidth_bytes_per_s = 2 * PAGE_BYTES;
    choice = look(2000);
    assert_ptr_equal(choice.prefill, b);
    wait_is(&choice, 2502);
    decode->pairs[1].put_cost_ns = 700000000;
    assert_ptr_equal(look(2000).prefill, a);
}

static void test_decode_queue(void **state)
{
    struct node *a = add_decode(), *b = add_decode();
    policy = policy_load_create(&registry, LOCAL_PREFILL_ONLY);
    /* no free sequence, three that wait, attempts of half a second on eight rows */
    a->sequences_free = 0;
    a->n_running = 8;
    a->n_queued = 3;
    a->load.leg_s = 0.5;
    assert_ptr_equal(look(100).decode, b);
    b->ready = false;
    struct policy_choice choice = look(100);
    assert_ptr_equal(choice.decode, a);
    wait_is(&choice, 100 + 4 * 500 / 8.0);
    /* an unknown duration is two seconds */
    a->load.leg_s = 0;
    choice = look(100);
    wait_is(&choice, 100 + 4 * 2000 / 8.0);
    /* four samples need four sequences */
    a->n_queued = a->n_running = 0;
    a->sequences_free = 3;
    a->load.leg_s = 0.5;
    wait_is((choice = look(100), &choice), 100);
    choice = ask(&(struct policy_question){.n_ids = 100, .n_samples = 4});
    wait_is(&choice, 100 + 4 * 500 / 8.0);
}

static void test_legs_are_measured(void **state)
{
    struct node *a = add_decode();
    policy = policy_load_create(&registry, LOCAL_PREFILL_ONLY);
    policy_ended(policy, a, NULL, POLICY_FINISHED, 4 * NS_PER_S);
    assert_true(a->load.leg_s > 3.999 && a->load.leg_s < 4.001);
    policy_ended(policy, a, NULL, POLICY_FINISHED, 2 * NS_PER_S);
    assert_true(a->load.leg_s > 2 && a->load.leg_s < 4);
    /* what was cancelled says nothing */
    double leg_s = a->load.leg_s;
    policy_ended(policy, a, NULL, POLICY_CANCELLED, 1);
    assert_true(a->load.leg_s >= leg_s && a->load.leg_s <= leg_s);
}

/* A burst between two statuses is spread: what was sent and can't have been counted is added. */
static void test_burst(void **state)
{
    struct node *decode = add_decode(), *a = add_prefill(), *b = add_prefill();
    unsigned n[2] = {0, 0};
    join(decode, a);
    join(decode, b);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    decode->sequences_free = decode->max_sequences = 100;
    a->prefill_tokens_per_s = 3000;
    for (unsigned i = 0; i < 40; i++) {
        n[ask_n(300).prefill == b]++;
    }
    /* three times the speed, three times the share */
    assert_int_equal(n[0] + n[1], 40);
    assert_in_range(n[0], 29, 31);
    assert_int_equal(decode->load.n_live, 40);
    assert_int_equal(a->load.n_live + b->load.n_live, 40);
    /* a status that comes at once can't have counted them; one that comes later has */
    policy_status(policy, a);
    assert_int_equal(a->load.unseen_old_tokens + a->load.unseen_new_tokens, 300 * n[0]);
    sleep_ms(35);
    policy_status(policy, a);
    assert_int_equal(a->load.unseen_old_tokens + a->load.unseen_new_tokens, 0);
    for (unsigned i = 0; i < 40; i++) {
        policy_ended(policy, decode, i < n[0] ? a : b, POLICY_FINISHED, NS_PER_S);
    }
    assert_int_equal(decode->load.n_live + a->load.n_live + b->load.n_live, 0);
}

/* ---- local prefill ---- */

static void test_local_is_a_choice(void **state)
{
    struct node *decode = add_decode(), *prefill = add_prefill();
    join(decode, prefill);
    policy = policy_load_create(&registry, LOCAL_PREFILL_AUTO);
    /* equal speed: the prefill node */
    struct policy_choice choice = look(100);
    assert_ptr_equal(choice.prefill, prefill);
    wait_is(&choice, 102);
    /* Locally the prompt counts twice and 25 ms more: 225 ms against 202, then against 227. */
    prefill->queued_tokens = 100;
    assert_ptr_equal(look(100).prefill, prefill);
    prefill->queued_tokens = 130;
    choice = look(100);
    assert_ptr_equal(choice.decode, decode);
    assert_null(choice.prefill);
    wait_is(&choice, 100); /* the bias is no prediction */
    /* as others see it: local when forced to, whatever it costs, and never */
    policy_free(policy);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    prefill->queued_tokens = 1000000;
    assert_ptr_equal(look(100).prefill, prefill);
    policy_free(policy);
    policy = policy_load_create(&registry, LOCAL_PREFILL_ONLY);
    prefill->queued_tokens = 0;
    decode->queued_tokens = 1000000;
    choice = look(100);
    assert_null(choice.prefill);
    wait_is(&choice, 1000100);
}

/* ---- ties ---- */

static void test_ties(void **state)
{
    struct node *d[3];
    unsigned n[3] = {0, 0, 0};
    for (unsigned i = 0; i < 3; i++) {
        d[i] = add_decode();
        d[i]->prefill_tokens_per_s = 1e6f; /* a few tokens are no difference */
    }
    policy = policy_load_create(&registry, LOCAL_PREFILL_ONLY);
    for (unsigned i = 0; i < 30; i++) {
        struct policy_choice choice = look(1);
        n[choice.decode - nodes]++;
    }
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(n[i], 10); /* in turn */
    }
    /* fewer attempts of ours first */
    d[0]->load.n_live = 2;
    d[1]->load.n_live = 1;
    d[2]->load.n_live = 2;
    for (unsigned i = 0; i < 5; i++) {
        assert_ptr_equal(look(1).decode, d[1]);
    }
    /* half a millisecond is equal, two are not */
    d[1]->queued_tokens = 500;
    assert_ptr_equal(look(1).decode, d[1]);
    d[1]->queued_tokens = 2000;
    assert_ptr_not_equal(look(1).decode, d[1]);
}

/* ---- what is not known ---- */

static void test_unknown_speed(void **state)
{
    struct node *decode = add_decode(), *a = add_prefill(), *b = add_prefill(), *c = add_prefill();
    join(decode, c);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    /* no node of the role has measured: 5,000 a second; decode's own speed is none of it */
    a->prefill_tokens_per_s = b->prefill_tokens_per_s = c->prefill_tokens_per_s = 0;
    struct policy_choice choice = look(1000);
    wait_is(&choice, 1000 / 5.0 + 2);
    /* else the mean of those that have */
    a->prefill_tokens_per_s = 1000;
    b->prefill_tokens_per_s = 3000;
    choice = look(1000);
    assert_ptr_equal(choice.prefill, c);
    wait_is(&choice, 1000 / 2.0 + 2);
    /* a pair that has measured no bandwidth */
    decode->pairs[0].bandwidth_bytes_per_s = 0;
    choice = look(1000);
    wait_is(&choice, 1000 / 2.0 + 1);
    /* a decode node that says nothing of its sequences */
    decode->max_sequences = decode->sequences_free = 0;
    choice = look(1000);
    wait_is(&choice, 1000 / 2.0 + 1 + 2000);
}

/* ---- who is not asked ---- */

static void test_unusable_nodes(void **state)
{
    struct node *a = add_decode(), *b = add_decode(), *p = add_prefill(), *q = add_prefill();
    const struct policy_question question = {.n_ids = 1, .n_samples = 1};
    uint64_t wait_ns = 7;
    join(a, p);
    join(a, q);
    join(b, p);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    bool *const breaks_decode[] = {&a->draining, &a->wedged}, *const needs[] = {&a->ready,
                                                                                &a->serving};
    for (unsigned i = 0; i < 4; i++) {
        bool *flag = i < 2 ? breaks_decode[i] : needs[i - 2];
        *flag = i < 2;
        for (unsigned k = 0; k < 4; k++) {
            assert_ptr_equal(look(1).decode, b);
        }
        *flag = i >= 2;
    }
    bool *const breaks_prefill[] = {&p->draining, &p->wedged, &p->ready};
    for (unsigned i = 0; i < 3; i++) {
        *breaks_prefill[i] = i < 2;
        for (unsigned k = 0; k < 4; k++) {
            struct policy_choice choice = look(1);
            assert_ptr_equal(choice.decode, a); /* b has no other way */
            assert_ptr_equal(choice.prefill, q);
        }
        *breaks_prefill[i] = i >= 2;
    }
    /* pairs: not ready, or of a prefill node that has started anew */
    b->ready = q->ready = false;
    assert_ptr_equal(look(1).prefill, p);
    for (int pair = 0; pair < 4; pair++) {
        a->pairs[0].state = (Baton__ToRouter__Pair__State)pair;
        if (pair != BATON__TO_ROUTER__PAIR__STATE__READY) {
            assert_int_equal(refused(&question, &wait_ns), STATUS_NOT_FOUND);
        }
    }
    a->pairs[0].state = BATON__TO_ROUTER__PAIR__STATE__READY;
    p->ref.incarnation++;
    assert_int_equal(refused(&question, &wait_ns), STATUS_NOT_FOUND);
    assert_int_equal(wait_ns, 7);
    p->ref.incarnation--;
    assert_ptr_equal(look(1).prefill, p);
    /* no node at all */
    list_init(&registry.nodes);
    assert_int_equal(refused(&question, &wait_ns), STATUS_NOT_FOUND);
}

static void test_full(void **state)
{
    struct node *a = add_decode(), *b = add_decode();
    uint64_t wait_ns = 0;
    policy = policy_load_create(&registry, LOCAL_PREFILL_ONLY);
    a->sequences_free = b->sequences_free = 0;
    a->n_queued = 16;
    b->n_queued = 40;
    a->load.leg_s = b->load.leg_s = 1;
    /* they said so to this request */
    const struct policy_question question = {
        .n_ids = 1, .n_samples = 1, .full = (struct node_ref[]){a->ref, b->ref}, .n_full = 1};
    assert_ptr_equal(ask(&question).decode, b);
    policy_ended(policy, b, NULL, POLICY_QUEUE_FULL, 1);
    /* and b to another one a moment ago: for about how long, by the queue that is shorter */
    assert_int_equal(refused(&question, &wait_ns), STATUS_EXHAUSTED);
    assert_in_range(wait_ns, 17 * NS_PER_S / 8 - 1000, 17 * NS_PER_S / 8 + 1000);
    sleep_ms(55);
    assert_ptr_equal(ask(&question).decode, b);
    /* a full node and one that is not usable: full, not absent */
    b->draining = true;
    assert_int_equal(refused(&question, &wait_ns), STATUS_EXHAUSTED);
}

static void test_shunned_and_tried(void **state)
{
    struct node *a = add_decode(), *b = add_decode(), *p = add_prefill(), *q = add_prefill();
    join(a, p);
    join(a, q);
    join(b, p);
    join(b, q);
    policy = policy_load_create(&registry, LOCAL_PREFILL_NEVER);
    policy_ended(policy, a, p, POLICY_DECODE_FAILED, 1);
    b->queued_tokens = 0;
    for (unsigned i = 0; i < 4; i++) {
        assert_ptr_equal(look(1).decode, b);
    }
    policy_ended(policy, b, p, POLICY_PAIR_FAILED, 1);
    for (unsigned i = 0; i < 4; i++) {
        struct policy_choice choice = look(1);
        assert_ptr_equal(choice.decode, b); /* a failed pair is the prefill node's */
        assert_ptr_equal(choice.prefill, q);
    }
    /* the pairs that failed this request, in each order; what is left is taken, then anything */
    const struct policy_tried tried[] = {
        {a->ref, p->ref}, {a->ref, q->ref}, {b->ref, q->ref}, {b->ref, p->ref}};
    struct policy_question question = {.n_ids = 1, .n_samples = 1, .tried = tried, .n_tried = 3};
    struct policy_choice choice = ask(&question);
    assert_ptr_equal(choice.decode, b);
    assert_ptr_equal(choice.prefill, p); /* shunned, but never tried */
    question.n_tried = 4;
    choice = ask(&question);
    assert_ptr_equal(choice.decode, b);
    assert_ptr_equal(choice.prefill, q);
    /* after a second all is forgiven: both decode nodes again */
    sleep_ms(1010);
    unsigned n_a = 0;
    for (unsigned i = 0; i < 8; i++) {
        n_a += look(1).decode == a;
    }
    assert_true(n_a > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_least_wait, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_decode_queue, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_legs_are_measured, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_burst, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_local_is_a_choice, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_ties, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unknown_speed, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unusable_nodes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_full, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_shunned_and_tried, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
