/* The least model that a backend opens: for tests of single operations, which then set what they
 * are about. */
#ifndef BATON_TESTS_KERNELS_SMALL_H
#define BATON_TESTS_KERNELS_SMALL_H

#include <stdlib.h>

#include "kernels/ops.h"

/* Whether kernels are to begin before those in front of them end, which changes no result: where
 * EARLY_LAUNCHES is set. */
static inline bool early_launches(void)
{
    return getenv("EARLY_LAUNCHES") != NULL;
}

static inline struct ops_dims small_dims(uint32_t hidden)
{
    return (struct ops_dims){.hidden = hidden,
                             .vocab = 16,
                             .n_heads = 1,
                             .head_dim = 128,
                             .rope_dim = 64,
                             .q_lora = 64,
                             .o_groups = 1,
                             .o_lora = 16,
                             .window = 8,
                             .ring = 16,
                             .n_experts = 2,
                             .n_experts_used = 1,
                             .expert_end = 2,
                             .expert_width = 16,
                             .hc_iters = 20,
                             .hc_eps = 1e-6f,
                             .rms_eps = 1e-6f,
                             .rope_theta = 10000.0,
                             .compress_theta = 160000.0};
}

#endif
