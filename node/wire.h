/* node/wire.h - what both daemons read from and write into the messages that they share: how
 * tokens are drawn, and what is known of a drawn one. Any thread.
 */
#ifndef BATON_NODE_WIRE_H
#define BATON_NODE_WIRE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "proto/request.pb-c.h"

enum { WIRE_MAX_SAMPLES = 16, WIRE_MAX_STOP_IDS = 64, WIRE_MAX_BIASES = 1024 };

/* A Sampling as an engine wants it. Owner: whoever read it; wire_sampling_fini. */
struct wire_sampling {
    struct engine_sampling sampling; /* of sample 0; points into this struct */
    struct engine_bias *biases;
    uint32_t banned[WIRE_MAX_STOP_IDS + 1]; /* the stop ids, then eos unless it is ignored */
    uint32_t n_stop_ids;
    uint64_t seed;
};

/* Ids of a foreign message: all inside the vocabulary? */
bool wire_ids_fit(const uint32_t *ids, size_t n, uint32_t vocab_size);
/* What is wrong with a Sampling, or NULL. */
const char *wire_sampling_wrong(const Baton__Sampling *s, uint32_t vocab_size);
/* Reads one that nothing is wrong with. */
void wire_sampling_read(struct wire_sampling *ret, const Baton__Sampling *s, uint32_t eos_id);
void wire_sampling_fini(struct wire_sampling *wire);
/* How sample i is drawn; points into `wire`. */
struct engine_sampling wire_sampling_of(const struct wire_sampling *wire, uint32_t sample_i);

/* Log probabilities of a drawn token, in the arena. */
Baton__TokenLogprobs *wire_logprobs_make(const struct engine_draw *draw, struct arena *arena);
/* The way back. False: an id outside the vocabulary, or no token. */
must_check bool wire_logprobs_read(const Baton__TokenLogprobs *logprobs, uint32_t vocab_size,
                                   struct engine_draw *draw);

#endif
