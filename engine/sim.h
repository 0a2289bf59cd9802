/* engine/sim.h - the engine without arithmetic.
 *
 * For whole clusters, soak tests and fault drills on a laptop: full-size pages move, and every byte
 * of them is a function of the token ids before it, so what arrives can be checked against the
 * prompt alone. Speeds and pool sizes are options.
 *
 * Tokens. Without a script the token at position p is a function of all ids before p: any lost,
 * doubled or foreign token changes everything after it. With `sim_script`, a file of JSON lines,
 * the first entry whose "when_ids" occur in the prompt (or that has none) gives the output:
 *
 *     {"when_ids": [ids], "ids": [ids], "pause_ms": 20, "pauses": {"3": 500}, "loop": false}
 *
 * `ids` are played from index n_generated on, then eos_id (or from the start again with "loop");
 * pause_ms is slept before every token, pauses[i] before the one at index i. scripts/sim-script
 * makes such a file from texts with a model's tokenizer: no text ever reaches a node.
 */
#ifndef BATON_ENGINE_SIM_H
#define BATON_ENGINE_SIM_H

#include <stddef.h>
#include <stdint.h>

/* The size of V4-Flash's page and of its largest tail (engine/layout.h proves both for the real
 * config). */
enum { SIM_PAGE_BYTES = 901120, SIM_TAIL_BYTES = 4412416, SIM_VOCAB_SIZE = 129280 };

/* Folds one id into the running prefix hash; starts at SIM_PREFIX_START. */
#define SIM_PREFIX_START 0x6a09e667f3bcc908u
uint64_t sim_prefix_next(uint64_t prefix, uint32_t id);
/* The token after a prefix. */
uint32_t sim_token(uint64_t prefix, uint32_t vocab_size);
/* Fills or checks an image of a prefix; returns the index of the first wrong byte, or `bytes` if
 * all is right. */
void sim_image_fill(void *dst, size_t bytes, uint64_t prefix);
size_t sim_image_check(const void *src, size_t bytes, uint64_t prefix);

#endif
