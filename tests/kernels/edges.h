/* tests/kernels/edges.h - how far a backend's experts may be from the CPU's.
 *
 * What goes into w2 is rounded to e4m3, in steps of up to an eighth. Where the sums behind such a
 * value end within their last bits of where it would be rounded the other way, two backends that
 * add in different orders may differ by a step, and every output of the row by that step times a
 * column of w2. Few values lie so, one in some thousands, but a large one's step shows: so a bound
 * that leaves it out is wrong, and one that allows for it everywhere tells nothing. Here those
 * values are found and their columns added up.
 */
#ifndef BATON_TESTS_KERNELS_EDGES_H
#define BATON_TESTS_KERNELS_EDGES_H

#include "kernels/ops.h"

/* Adds to ret_off[hidden] what the steps of this expert's values, as the CPU packed it, may change
 * in its outputs for inputs x[hidden]. weight: of the row, 1 for the shared expert. Returns how
 * many values lie on an edge. */
uint32_t edges_of_expert(const struct ops_dims *d, const struct ops_expert *expert, const float *x,
                         float weight, double *ret_off);

#endif
