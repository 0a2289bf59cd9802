/* engine/batch.h - the sequences of one call in the form that kernels want: rows and their
 * positions.
 *
 * Owner: the engine that runs the call; compute thread.
 */
#ifndef BATON_ENGINE_BATCH_H
#define BATON_ENGINE_BATCH_H

#include <stdint.h>

#include "engine/engine_ops.h"
#include "kernels/ops.h"

struct batch {
    struct ops_rows rows; /* points into the arrays below */
    struct ops_seq *seqs;
    uint32_t *tokens, *positions, *seq_of;
    struct ops_draw *draws; /* max_seqs of them */
};

/* For calls of at most max_rows rows, steps of at most max_seqs. */
void batch_init(struct batch *batch, uint32_t max_rows, uint32_t max_seqs);
void batch_fini(struct batch *batch);
/* n ids appended to one sequence; or one token to each of n sequences. */
void batch_set_prefill(struct batch *batch, const struct engine_seq *seq, const uint32_t *ids,
                       uint32_t n);
void batch_set_step(struct batch *batch, const struct engine_row *rows, uint32_t n);
/* The same for a device that draws: tokens that follow, and how each row is drawn there. */
void batch_set_drawn_step(struct batch *batch, const struct engine_row *rows, uint32_t n);

#endif
