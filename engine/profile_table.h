/* engine/profile_table.h - the table that times: between profile.c, which runs steps, and
 * profile_table.c, which stands between them and the kernels. Included by these two alone.
 *
 * State of the process, for an operation has no other place for it: one profile at a time.
 */
#ifndef BATON_ENGINE_PROFILE_TABLE_H
#define BATON_ENGINE_PROFILE_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/ops.h"

/* What passed of one operation since profile_table_reset. */
struct profile_cell {
    const char *operation;
    uint64_t n_calls, n_launches;
    double s, bytes, multiply_adds;
};

enum { PROFILE_N_CELLS = 14 };

/* From here on model_load gives out a table that times, once profile_table_reset was called; alter
 * as in engine_profile_request. */
void profile_table_begin(void (*alter)(struct ops *table));
void profile_table_end(void);
/* Once the devices are closed. */
void profile_table_free(void);
/* Forgets what passed, and notes what does now. */
void profile_table_reset(void);
/* Notes nothing more, until it is reset; what was noted stays. */
void profile_table_pause(void);
/* After a step, its devices waited for: adds what could not be added while it ran. */
void profile_table_collect(void);
const struct profile_cell *profile_table_cells(void);
/* Of the first device. */
must_check enum status profile_table_rates(struct ops_rates *ret_rates, struct error *err);

#endif
