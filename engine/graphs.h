/* engine/graphs.h - decode steps that a device has recorded, one for each size of batch.
 *
 * On a device that records (kernels/ops.h), a step of n rows is asked for in one piece, with the
 * bits of one whose operations are asked for one by one. Which sizes there are follows from the
 * largest batch: every one up to 32, then in steps of an eighth or less; a batch in between is
 * filled up to the next with rows of no sequence (OPS_NO_SLOT), which touch nothing of anyone's and
 * whose logits nobody reads. Owner: the engine; compute thread.
 */
#ifndef BATON_ENGINE_GRAPHS_H
#define BATON_ENGINE_GRAPHS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/forward.h"

enum { GRAPHS_MAX = 264 }; /* sizes up to 2^32 - 1 */
/* Who waits for a step gives the devices up once nothing has come of it for so long. Longer than a
 * lease, after which others have already been told that this node stands still, and short enough
 * that a hung device ends the node rather than an operator. */
#define GRAPHS_STALL_NS UINT64_C(2000000000)

struct graphs {
    struct forward *forward;
    struct ops_recording recordings[GRAPHS_MAX]; /* by number of rows, rising */
    uint32_t n;                                  /* 0: none, steps run one operation at a time */
    /* The rows of a call that is filled up. */
    struct ops_seq *seqs;
    uint32_t *tokens, *positions, *seq_of;
    struct ops_draw *draws;
    uint64_t bytes; /* of device memory, as far as the device tells */
    double seconds; /* that recording took */
};

/* Whether this backend records. */
bool graphs_are_here(const struct ops *ops);
/* How many recordings steps of up to max_rows rows have; their sizes, rising, in ret_sizes
 * [GRAPHS_MAX] unless NULL. */
uint32_t graphs_sizes(uint32_t max_rows, uint32_t *ret_sizes);
/* What one takes of a device's memory, about: for the sum of a start, before there is any. */
uint64_t graphs_planned_bytes(uint32_t n_layers);
/* Records steps of up to max_rows rows, after forward->kv is there. Their logits go to `logits`
 * [max_rows, vocab], in shared memory, row by row; or where the device draws (forward->logits) they
 * stay there, and the rows of every step have draws. `tick` is called in between. EXHAUSTED,
 * SYSTEM: a recording failed; the devices serve no more. Blocking. After an error, too,
 * graphs_free. */
must_check enum status graphs_record(struct graphs *graphs, struct forward *forward,
                                     uint32_t max_rows, float *logits, void (*tick)(void *cookie),
                                     void *cookie, struct error *err);
/* A step, one row a sequence; its logits are there when it returns. `tick` is called as it moves
 * on. SYSTEM: a device failed, or has done nothing for two seconds. */
must_check enum status graphs_run(struct graphs *graphs, const struct ops_rows *rows,
                                  void (*tick)(void *cookie), void *cookie, struct error *err);
/* The same without the wait, which is the caller's (ahead.h). */
void graphs_start(struct graphs *graphs, const struct ops_rows *rows);
/* Before the devices are closed; of zeroed ones too. */
void graphs_free(struct graphs *graphs);

#endif
