/* prefill/service.h - the prefill node as a whole: Prefill.Serve, endpoints, preflight, gauges.
 *
 * Owns the links of decode nodes, the UCX endpoint to each, and the runs, and ties them to the
 * node.
 *
 * Thread: loop.
 */
#ifndef BATON_PREFILL_SERVICE_H
#define BATON_PREFILL_SERVICE_H

#include "node/node.h"

struct prefill;

struct prefill_options {
    uint32_t max_queued, n_tails, n_workers;
    uint32_t n_pieces; /* prefill/handoff.h */
};

/* The ops to give to node_open with a `struct prefill **` as cookie, which prefill_create fills. */
extern const struct node_ops prefill_node_ops;

must_check enum status prefill_create(struct node *node, const struct prefill_options *options,
                                      struct prefill **ret_prefill, struct error *err);
/* Before node_close. NULL is fine. */
void prefill_free(struct prefill *prefill);

#endif
