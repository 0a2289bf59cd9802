/* engine/kernels.h - which kernels an engine runs with, for those who start one.
 *
 * What is asked for by name is set once, before an engine is opened; what was chosen, and why the
 * rest was not, can be printed without opening one. The rules are kernels/registry.h's.
 */
#ifndef BATON_ENGINE_KERNELS_H
#define BATON_ENGINE_KERNELS_H

#include <stddef.h>
#include <stdio.h>

#include "base/status.h"

struct engine_options;
struct ops;
struct ops_dims;
struct ops_limits;
struct registry_choice;

/* --kernel OPERATION=VARIANT and --allow-reference NAME, for the whole process. INVALID. */
must_check enum status engine_kernels_wish(char *const *forced, size_t n_forced,
                                           char *const *allowed, size_t n_allowed,
                                           struct error *err);
/* Prints every variant of the options' device, chosen or not, with the reason; with a model_dir its
 * shapes are asked for (its config is read, its weights are not). Errors: what would stop the
 * start, after the table where there is one. Blocking. */
must_check enum status engine_kernels_print(const struct engine_options *options, FILE *out,
                                            struct error *err);

/* For engine/ alone: the table for a device of these dimensions, logged. Errors as
 * registry_select. */
must_check enum status engine_kernels_choose(const struct registry_choice *choice,
                                             const struct ops_dims *dims,
                                             const struct ops_limits *limits, struct ops *ret_table,
                                             struct error *err);

/* The same without a word, for a plan of the memory: where it would fail the table stays as it is.
 */
void engine_kernels_guess(const struct registry_choice *choice, const struct ops_dims *dims,
                          const struct ops_limits *limits, struct ops *table);

#endif
