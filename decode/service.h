/* decode/service.h - the decode node as a whole: Decode.Serve, what routers are told, gauges.
 *
 * Owns the links of routers, the landing area, the pairs, the hand-off and the requests, and ties
 * them to the node.
 *
 * Thread: loop.
 */
#ifndef BATON_DECODE_SERVICE_H
#define BATON_DECODE_SERVICE_H

#include "node/node.h"

struct decode;

struct decode_options {
    uint32_t landing_slots, max_queued, max_transfers, max_slots_a_transfer, n_workers;
    double prefill_share;
};

/* The ops to give to node_open with a `struct decode **` as cookie, which decode_create fills. */
extern const struct node_ops decode_node_ops;

must_check enum status decode_create(struct node *node, const struct decode_options *options,
                                     struct decode **ret_decode, struct error *err);
/* Before node_close. NULL is fine. */
void decode_free(struct decode *decode);

#endif
