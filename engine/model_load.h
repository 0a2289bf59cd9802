/* engine/model_load.h - a checkpoint onto a group of devices: dimensions, shares, packed weights.
 *
 * Layers are read, packed and released one at a time, so that the checkpoint's own form and the
 * packed one are in memory together for one layer only.
 */
#ifndef BATON_ENGINE_MODEL_LOAD_H
#define BATON_ENGINE_MODEL_LOAD_H

#include "engine/forward.h"
#include "engine/layout.h"
#include "kernels/registry.h"
#include "model/config.h"

/* weights: NULL for those in `dir`, or "synthetic:SEED". Opens the group's devices and loads every
 * layer. `tick` is called after each. On error what was opened is closed. Errors: those of
 * model/weights.h; INVALID (no such weights; the group can't share this model, with the number that
 * does not divide); EXHAUSTED. Blocking. */
must_check enum status model_load(struct forward *f, const struct registry_choice *choice,
                                  const struct model_config *config, const struct layout *layout,
                                  const char *dir, const char *weights, bool exact,
                                  const struct ops_limits *limits, void (*tick)(void *cookie),
                                  void *cookie, uint8_t ret_identity[16], struct error *err);
/* text: NULL, or "K/N": the one device of the choice is that rank of a group whose others are
 * missing. INVALID: it is not understood, or the choice has several devices. */
must_check enum status model_load_rank(const char *text, struct registry_choice *choice,
                                       struct error *err);
/* What rank_i of n devices computes with. INVALID: the group can't share this model, with the
 * number that does not divide. */
must_check enum status model_load_dims(const struct model_config *config, bool exact,
                                       uint32_t rank_i, uint32_t n, struct ops_dims *ret_dims,
                                       struct error *err);
/* What model_load would take, of all devices together. */
struct model_load_plan {
    uint64_t weights_bytes;
    uint64_t scratch_bytes; /* of the devices, and the activations */
    uint64_t uneven_bytes;  /* what both would come to more if every device took what the one that
                               takes most does */
};
/* As model_load with limits->only_plan: no weights are read and nothing is allocated. Without
 * with_weights only the scratch is summed. Errors: the same; a variant that can't serve is none. */
must_check enum status model_load_plan(const struct registry_choice *choice,
                                       const struct model_config *config,
                                       const struct layout *layout, const char *dir,
                                       const char *weights, bool exact,
                                       const struct ops_limits *limits, bool with_weights,
                                       struct model_load_plan *ret_plan, struct error *err);
/* Closes the devices. */
void model_unload(struct forward *f);

#endif
