#ifndef BATON_MODEL_SYNTHETIC_H
#define BATON_MODEL_SYNTHETIC_H

#include <stddef.h>
#include <stdint.h>

#include "base/made.h"
#include "model/config.h"
#include "model/safetensors.h"

/*
 * Tensors that no file has: random values of a size that keeps a model's numbers in range, so that
 * a model of any shape can be run and timed. A tensor's bytes follow from the seed and its name,
 * its shape and its dtype; the same seed is the same model everywhere. Read-only once all tensors
 * are made: any thread.
 */
struct synthetic;

struct synthetic *synthetic_create(uint64_t seed, const struct model_config *config);
void synthetic_free(struct synthetic *s);

/* The tensor of that name, made at the first call. n_inputs: how many inputs a row of the matrix
 * multiplies, also for its scales; 0 for what is no matrix. */
const struct safetensors_tensor *synthetic_tensor(struct synthetic *s, const char *name,
                                                  enum safetensors_dtype dtype, uint32_t n_dims,
                                                  const uint64_t *dims, uint64_t n_inputs);

/* As safetensors_read: bytes of the tensor from offset on, a multiple of 8. */
void synthetic_read(const struct safetensors_tensor *tensor, uint64_t offset, size_t bytes,
                    void *ret_data);

/* How to make the bytes of a matrix, or of its scales, elsewhere. */
struct made synthetic_made(const struct safetensors_tensor *tensor);

/* Of config and seed. */
void synthetic_identity(const struct synthetic *s, uint8_t ret_identity[16]);

#endif
