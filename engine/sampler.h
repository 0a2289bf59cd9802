/* engine/sampler.h - logits to tokens.
 *
 * The steps and their order (http.md, 4): logit_bias and the ban of end tokens; repetition penalty,
 * then presence and frequency; temperature; top_k; top_p; min_p; draw. Every cut and every maximum
 * resolves ties to the lowest id. Log probabilities are of the raw distribution. The draw is u =
 * U(seed, position) in [0, 1) walked over the kept ids in ascending order: it depends on the seed
 * and the absolute position of the token drawn, and on nothing else. From temperature on the steps
 * are those of kernels/sample.h, which a device may take in the host's place, with the same token.
 *
 * Penalties: repetition divides positive and multiplies negative logits of every id seen in prompt
 * or answer (CTRL, Keskar et al. 2019, section 4.1); presence subtracts once, frequency once for
 * each time the id was generated.
 */
#ifndef BATON_ENGINE_SAMPLER_H
#define BATON_ENGINE_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"
#include "kernels/ops.h"

/* Scratch of one drawing thread: 12 bytes an id. */
struct sampler;

struct sampler *sampler_create(uint32_t vocab_size);
void sampler_free(struct sampler *sampler);

/* `logits` (vocab_size) is read only. `counts`: see engine_seq, or NULL if no penalty is set. */
void sampler_draw(struct sampler *sampler, const float *logits,
                  const struct engine_sampling *sampling, const uint32_t *counts,
                  uint32_t n_generated, uint64_t position, struct engine_draw *ret_draw);
/* U(seed, position): 53 bits of splitmix64's finaliser over both. Shared with other backends and
 * tests. */
double sampler_uniform(uint64_t seed, uint64_t position);
/* True if the sampling needs counts. */
bool sampler_has_penalties(const struct engine_sampling *sampling);
/* Whether a device that draws can draw it: logits and nothing else are needed, and nothing but the
 * id is wanted. The host draws the rest. And how it draws it. */
bool sampler_can_be_there(const struct engine_sampling *sampling, uint32_t n_generated);
struct ops_draw sampler_there(const struct engine_sampling *sampling);
/* The seed of sample i of a request (handoff.md, Several samples): the request's own for i = 0. */
uint64_t sampler_seed(uint64_t seed, uint32_t sample_i);

#endif
