/* engine/forward.h - the layer graph over a group of devices.
 *
 * A rank is one device with its share of the weights and its own activations; `cpu` is a group of
 * one. Ranks of one memory (the CPU's) share what every rank would compute alike (streams, norms,
 * routing): rank 0 computes it for all, and there is one pool, so that each cache entry is written
 * once. Ranks *apart*, each with memory of its own (GPUs), compute it each for itself, and each has
 * the whole of the KV: nothing but the parts of comm's sums goes from one to another.
 * Owner: the engine; compute thread.
 */
#ifndef BATON_ENGINE_FORWARD_H
#define BATON_ENGINE_FORWARD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/ops.h"

enum { FORWARD_MAX_RANKS = 16 };

struct forward_rank {
    struct ops_dims dims;
    struct ops_device *device;
    struct ops_layer *layers; /* n_layers */
    struct ops_globals globals;
    uint32_t vocab_first; /* of the whole vocabulary */
    float *qr, *q, *kv_rows, *o, *y;
    /* Not apart: rank 0's, as is all that they point to. */
    float *streams, *x, *mix, *iq, *iw;
    struct ops_selection selection;
    uint32_t *experts;
    float *expert_weights;
    struct ops_kv kv;
};

struct forward {
    const struct ops *ops;
    uint32_t n_ranks, n_layers, max_rows, vocab;
    uint32_t rank_first, group_ranks; /* ranks[0] in its group, which may have more than are here */
    bool apart;                       /* the ranks share no memory */
    uint32_t max_draws;               /* rows of a call that draws */
    float
        *logits; /* [max_draws, vocab] of the last such call, the device's: NULL where none does */
    struct forward_rank ranks[FORWARD_MAX_RANKS];
};

/* How many of the ranks, from 0, have memory of their own, and compute what is alike. */
static inline uint32_t forward_n_memories(const struct forward *f)
{
    return f->apart ? f->n_ranks : 1;
}

/* Allocates the activations of calls of up to max_rows rows, and the logits of max_draws where one
 * device is all there is and draws; ranks[] must be open. EXHAUSTED. */
must_check enum status forward_init(struct forward *f, struct error *err);
/* Runs every layer over the rows. `tick` is called twice a layer, with the number of layers whose
 * cache entries have been asked for; `cancel` (may be NULL) is looked at before each: CANCELLED. */
must_check enum status forward_run(struct forward *f, const struct ops_rows *rows,
                                   const _Atomic bool *cancel,
                                   void (*tick)(void *cookie, uint32_t n_layers), void *cookie);
/* Memory that every device may use, and no more so: see `share` in kernels/ops.h. */
must_check enum status forward_share(struct forward *f, void *memory, size_t bytes,
                                     struct error *err);
void forward_unshare(struct forward *f, void *memory);
/* Until the last run is done. SYSTEM: a device failed, now or earlier. */
must_check enum status forward_wait(struct forward *f, struct error *err);
/* For a group of which not all ranks are here: the lowest float in n_rows rows of shared memory
 * that logits will be written to, since the missing ranks' never are. */
void forward_clear_logits(const struct forward *f, float *logits, uint32_t n_rows);
/* Asks for the logits of n rows of the last run: ret_logits [n, vocab], in shared memory. They are
 * there after forward_wait. */
void forward_ask_logits(struct forward *f, const uint32_t *which, uint32_t n, float *ret_logits);
/* Asks for the logits of all rows of the last run, in f->logits, and has them drawn from as
 * rows->draws says. `which` is 0, 1, ... */
void forward_draw(struct forward *f, const struct ops_rows *rows, const uint32_t *which);
/* As forward_ask_logits, and waits. SYSTEM: a device failed, now or earlier in the run. */
must_check enum status forward_logits(struct forward *f, const uint32_t *which, uint32_t n,
                                      float *ret_logits, struct error *err);

#endif
