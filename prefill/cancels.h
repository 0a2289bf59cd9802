/* prefill/cancels.h - what a cancel costs: from a Cancel to its Drained.
 *
 * A decode node's Cancel of a transfer is answered by Drained when nothing computes for it, no put
 * of it is alive, and its pages, sequence and tail buffer are given back. Counted between the two:
 * time, by this node's clock, and the progress of the engine, half a layer a count, which says how
 * far the device ran on, however slow the machine was.
 *
 * Thread: loop. Bounds: one entry a transfer that lives, which its caller sees to.
 */
#ifndef BATON_PREFILL_CANCELS_H
#define BATON_PREFILL_CANCELS_H

#include <stdint.h>

struct cancels;
struct metrics;
struct node;

/* Registers its two histograms with the node's metrics, which must live as long. */
struct cancels *cancels_create(const struct node *node, struct metrics *metrics);
/* NULL is fine. */
void cancels_free(struct cancels *cancels);

/* A Cancel of a transfer that lives came at came_ns and has been obeyed: the device is told. Only
 * the first of a transfer counts. `client` tells apart transfers of two links. */
void cancels_came(struct cancels *cancels, const void *client, uint64_t transfer, uint64_t came_ns);
/* Drained is about to be said of it; of a transfer that no Cancel came for, nothing is counted. */
void cancels_drained(struct cancels *cancels, const void *client, uint64_t transfer);
/* The link is gone: nobody will be told. */
void cancels_forget(struct cancels *cancels, const void *client);

#endif
