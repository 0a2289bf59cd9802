/* engine/ahead.h - decode steps on a device that draws: asked for whole, waited for later.
 *
 * A step is begun: its rows are staged and all it takes is asked for, the drawing and the copies
 * that the host wants of it included; and ended, which waits for it alone. Between the two the next
 * may be begun, whose tokens need not be known (OPS_FOLLOWS): OPS_FENCES are open at most. What a
 * step says lies in memory of its own until it was ended and read. One device. Owner: the engine;
 * compute thread.
 */
#ifndef BATON_ENGINE_AHEAD_H
#define BATON_ENGINE_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/forward.h"
#include "engine/graphs.h"

struct ahead {
    struct forward *forward;
    struct graphs *graphs;
    uint32_t *ids;   /* [OPS_FENCES, max_rows], shared with the device; not owned */
    uint32_t *which; /* [max_rows]: all of them */
    uint32_t max_rows;
    uint32_t n_begun, n_ended; /* since the start: at most OPS_FENCES apart */
    bool by_graph[OPS_FENCES];
};

void ahead_init(struct ahead *ahead, struct forward *forward, struct graphs *graphs,
                uint32_t max_rows, uint32_t *ids);
void ahead_fini(struct ahead *ahead);
/* Rows with draws, one a sequence. Of the rows host_rows[0 .. n_host) the logits go to
 * ret_logits[row * vocab ..], in shared memory. A failure is told by the end. */
void ahead_begin(struct ahead *ahead, const struct ops_rows *rows, bool by_graph,
                 const uint32_t *host_rows, uint32_t n_host, float *ret_logits,
                 void (*tick)(void *cookie), void *cookie);
/* Of the oldest that is begun: waits, and gives the ids of its rows, until the next but one is
 * begun. SYSTEM: the device failed, or by graph has done nothing for two seconds. */
must_check enum status ahead_end(struct ahead *ahead, const uint32_t **ret_ids,
                                 void (*tick)(void *cookie), void *cookie, struct error *err);

#endif
