#ifndef BATON_ROUTER_REQUEST_H
#define BATON_ROUTER_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "router/intake.h"
#include "router/policy.h"
#include "router/registry.h"
#include "router/sse.h"

/*
 * The life of each request, from its ids to the last byte of its answer. Loop thread.
 *
 * A request has one choice for each answer that was asked for, and runs them by legs: a leg is one
 * prompt with one or more choices on one decode node, tried again elsewhere when it fails. A leg
 * whose choices were partly generated is split, and each unfinished choice goes on as a leg of its
 * own from prompt + what it has, so that the client's answer goes on exactly.
 *
 *   leg:  waiting -> running -> ended
 *            ^          |
 *            +----------+  failed, and may be tried again
 */
struct requests;

struct requests_options {
    struct loop *loop;
    struct registry *registry;
    struct policy *policy;
    const struct tokenizer *tokenizer;
    const uint32_t *eos_ids; /* end the answer; the first is the engine's own */
    size_t n_eos_ids;
    const char *version; /* of this build, for system_fingerprint */
    uint64_t queue_timeout_ns, prefill_timeout_ns, transfer_timeout_ns;
    uint64_t generation_timeout_ns; /* 0: none */
    unsigned n_attempts;            /* of a leg, the first included */
    size_t max_requests;
};

struct requests *requests_create(const struct requests_options *options, struct metrics *metrics)
    __attribute__((returns_nonnull)) must_check;

/* Requests that live are dropped without an answer: free the HTTP server first. NULL is allowed. */
void requests_free(struct requests *requests);

/* Takes an intake that did not fail, and answers its http in the end, whatever happens. */
void requests_begin(struct requests *requests, struct intake *intake);

/* Whether another may begin; false: answer 429. */
bool requests_have_room(const struct requests *requests);

size_t requests_n_live(const struct requests *requests);

/* Ends all with this error. */
void requests_fail_all(struct requests *requests, enum api_code code, const char *text);

/* From the registry's events. */
void requests_message(struct requests *requests, struct node *node,
                      const Baton__FromDecode *message);
void requests_node_lost(struct requests *requests, struct node *node, const char *text);
void requests_node_writable(struct requests *requests, struct node *node);
void requests_nodes_changed(struct requests *requests);

/* The array of /debug/requests. */
void requests_write_json(struct requests *requests, struct json_writer *w);

#endif
