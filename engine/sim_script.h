/* engine/sim_script.h - scripted outputs of the sim engine: the file of engine/sim.h.
 *
 * Read once at start, constant afterwards, so any thread may ask. Errors name the file and the
 * line.
 */
#ifndef BATON_ENGINE_SIM_SCRIPT_H
#define BATON_ENGINE_SIM_SCRIPT_H

#include <stdint.h>

#include "base/status.h"

struct sim_script;

must_check enum status sim_script_open(const char *path, uint32_t vocab_size,
                                       struct sim_script **ret_script, struct error *err);
void sim_script_close(struct sim_script *script);
/* Writes the id at output index n_generated and the pause before it, for the first entry that fits
 * the prompt; leaves both outputs alone if none does. */
void sim_script_next(const struct sim_script *script, const uint32_t *prompt, uint32_t n_prompt,
                     uint32_t n_generated, uint32_t eos_id, uint32_t *ret_id, double *ret_pause_ms);

#endif
