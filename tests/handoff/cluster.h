/* tests/handoff/cluster.h - a router in the test's own process, with real nodes around it.
 *
 * Nodes are processes of the built daemons over the sim engine with small pages. The router here
 * does what a router must: it serves Cluster.Join, tells every node the view, and drives
 * Decode.Serve. One cluster a test program; everything runs on its one loop, and the functions that
 * wait run that loop.
 */
#ifndef BATON_TESTS_HANDOFF_CLUSTER_H
#define BATON_TESTS_HANDOFF_CLUSTER_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include <cmocka.h>

#include "base/loop.h"
#include "base/mem.h"
#include "proto/cluster.pb-c.h"
#include "proto/decode.pb-c.h"
#include "proto/prefill.pb-c.h"
#include "rpc/core.h"
#include "rpc/link.h"
#include "rpc/server.h"
#include "tests/lost.h"

enum {
    VOCAB = 1000,
    PAGE_TOKENS = 256,
    PAGE_BYTES = 8192,
    TAIL_BYTES = 20480, /* two and a half slots */
    MAX_TEST_NODES = 8,
    MAX_TEST_PAIRS = 8,
    MAX_TEST_SAMPLES = 4,
    MAX_TEST_TOKENS = 512,
};

/* What the last Status of a node said. */
struct said {
    uint32_t n, n_queued, n_running, pages_free, pages_total, slots_free, slots_total;
    uint32_t sequences_free;
    bool draining;
    uint32_t n_pairs;
    struct {
        char id[32], text[256];
        uint64_t incarnation;
        int state;
    } pairs[MAX_TEST_PAIRS];
};

struct test_node {
    char name[32];
    int role;
    pid_t pid; /* 0: not running; a fake has none */
    int exit_status;
    bool listed; /* in the view */
    uint64_t incarnation;
    char host[64];
    uint32_t port, http_port;
    uint8_t fingerprint[64];
    size_t fingerprint_bytes;
    struct link *join, *serve;
    bool serving; /* the hello of Serve came */
    struct said said;
};

/* One attempt of a request, as its router sees it. */
struct test_request {
    uint64_t id;
    uint32_t attempt, n_samples, n_generated;
    bool admitted, failed, ended;
    uint32_t n_finished, tokens_after_end;
    int code;
    bool retryable;
    char node[80], text[400];
    uint32_t tokens[MAX_TEST_SAMPLES][MAX_TEST_TOKENS];
    uint32_t n_tokens[MAX_TEST_SAMPLES];
    int reason[MAX_TEST_SAMPLES];
    uint64_t start_ns, end_ns;
    Baton__Timings timings;
    bool have_timings;
    uint32_t prompt_tokens;
};

struct start {
    const char *prefill; /* NULL: local */
    const uint32_t *ids;
    uint32_t n_ids, n_generated, n, max_tokens, credit;
    uint32_t n_sent; /* 0: all ids; else the first so many, and the others never come */
    float temperature;
    uint32_t queue_ms, prefill_ms, transfer_ms, generation_ms;
};

extern struct loop *loop;
extern struct rpc_core *core;
extern struct rpc_server *server;

/* cmocka group fixtures; `build` is the folder of the built daemons. */
extern const char *build_folder;
/* Adds further streams to the server before it starts; may be NULL. */
extern void (*cluster_streams)(void);
int cluster_setup(void **state);
int cluster_teardown(void **state);

/* Starts a daemon; `args` is further options, split at spaces. */
struct test_node *node_spawn(int role, const char *name, const char *args);
/* A prefill node that the test itself plays, on the router's own server. */
struct test_node *node_fake(const char *name, uint64_t incarnation);
/* Kills (SIGKILL), reaps and takes it out of the view as its lost link does. */
void node_kill(struct test_node *node);
/* Ends all nodes with SIGTERM and checks that each exits with 0; the next test starts afresh. */
void nodes_end(void);
/* Teardown of each test: kills what a failed one left. */
int nodes_abandon(void **state);
#define NODE_TEST(name) cmocka_unit_test_teardown(name, nodes_abandon)
struct test_node *node_find(const char *name);
void view_push(void);
/* The pair's state in the decode node's last Status, or -1. */
int pair_state(const struct test_node *decode, const char *prefill);
void wait_pair(const struct test_node *decode, const char *prefill, int state, unsigned ms);
/* Every ledger of the node has all its items free again; prints those that do not. */
void wait_baseline(const struct test_node *node, unsigned ms);
/* Value of a metric without labels, or of the series with that exact text before the blank. */
double node_metric(const struct test_node *node, const char *series);
/* Whether the node's log has said this since it was started. */
bool node_said(const struct test_node *node, const char *text);
/* The request's state on its decode node, as the log has it last; "" before the first. */
void request_state(const struct test_node *decode, const struct test_request *request,
                   char *ret_state, size_t capacity);
/* Whole body of a GET, mem_free; NULL if there was no answer. */
char *node_get(const struct test_node *node, const char *path);

struct test_request *request_start(struct test_node *decode, const struct start *start);
void request_cancel(struct test_node *decode, const struct test_request *request);
void request_credit(struct test_node *decode, const struct test_request *request, uint32_t tokens);
void wait_ended(const struct test_request *request, unsigned ms);
void wait_code(const struct test_request *request, int code, unsigned ms);
/* The tokens of the greedy sample as the sim engine's formula has them. */
void assert_greedy(const struct test_request *request, const struct start *start);
/* `n` ids drawn from a seed. mem_free. */
uint32_t *ids_make(uint32_t n, uint64_t seed);

/* Runs the loop until the condition or for ms beside what the machine lost; a macro so that the
 * condition is looked at anew. */
void run_ms(unsigned ms);
#define WAIT_FOR(condition, ms)                                               \
    do {                                                                      \
        uint64_t begin_ns_ = loop_now_ns();                                   \
        while (!(condition) && !lost_over(begin_ns_, ms)) {                   \
            run_ms(2);                                                        \
        }                                                                     \
        if (!(condition)) {                                                   \
            print_error("waited %u ms for %s\n", (unsigned)(ms), #condition); \
        }                                                                     \
        assert_true(condition);                                               \
    } while (0)

#endif
