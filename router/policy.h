#ifndef BATON_ROUTER_POLICY_H
#define BATON_ROUTER_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "router/registry.h"

/*
 * Who runs a request: a decode node, and a prefill node or none (then decode prefills). A policy
 * chooses, and is told how its choice ended. Loop thread.
 */

enum local_prefill { LOCAL_PREFILL_AUTO, LOCAL_PREFILL_NEVER, LOCAL_PREFILL_ONLY };

enum { POLICY_MAX_TRIED = 16 };

/* A pair that failed this request already; the last entries win when there are more. */
struct policy_tried {
    struct node_ref decode, prefill;
};

struct policy_question {
    uint32_t n_ids;     /* prompt + already generated */
    uint32_t n_samples; /* that run at once */
    /* Avoided while there is anything else; never a reason to refuse. */
    const struct policy_tried *tried;
    size_t n_tried;
    /* Decode nodes that said QUEUE_FULL to this request: not asked again. */
    const struct node_ref *full;
    size_t n_full;
};

struct policy_choice {
    struct node *decode;
    struct node *prefill; /* NULL: local */
    uint64_t wait_ns;     /* predicted, to the first token */
};

enum policy_outcome {
    POLICY_FINISHED,
    POLICY_CANCELLED,  /* by the client or a deadline: says nothing of the nodes */
    POLICY_QUEUE_FULL, /* decode's queue */
    POLICY_DECODE_FAILED,
    POLICY_PAIR_FAILED, /* the prefill node or the way from it */
};

struct policy;

struct policy_ops {
    /*
     * STATUS_OK with a choice, which the policy counts as running until `ended`.
     * STATUS_NOT_FOUND: no node could take it, now or soon. STATUS_EXHAUSTED: all that could have
     * a full queue; *ret_wait_ns, written then too, says for about how long.
     */
    enum status (*choose)(struct policy *policy, const struct policy_question *question,
                          struct policy_choice *ret_choice, uint64_t *ret_wait_ns);
    /* decode or prefill NULL: gone. leg_ns: how long the attempt lasted. */
    void (*ended)(struct policy *policy, struct node *decode, struct node *prefill,
                  enum policy_outcome outcome, uint64_t leg_ns);
    /* A Status came. */
    void (*status)(struct policy *policy, struct node *node);
    void (*free)(struct policy *policy);
};

struct policy {
    const struct policy_ops *ops;
};

static inline enum status must_check policy_choose(struct policy *policy,
                                                   const struct policy_question *question,
                                                   struct policy_choice *ret_choice,
                                                   uint64_t *ret_wait_ns)
{
    return policy->ops->choose(policy, question, ret_choice, ret_wait_ns);
}

static inline void policy_ended(struct policy *policy, struct node *decode, struct node *prefill,
                                enum policy_outcome outcome, uint64_t leg_ns)
{
    policy->ops->ended(policy, decode, prefill, outcome, leg_ns);
}

static inline void policy_status(struct policy *policy, struct node *node)
{
    policy->ops->status(policy, node);
}

/* NULL is allowed. */
static inline void policy_free(struct policy *policy)
{
    if (policy) {
        policy->ops->free(policy);
    }
}

/* Least predicted wait; policy_load.c says how it is predicted. */
struct policy *policy_load_create(struct registry *registry, enum local_prefill local)
    __attribute__((returns_nonnull)) must_check;

#endif
