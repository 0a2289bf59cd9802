/* Random inputs for the tests of operations, and poison for their outputs. */
#ifndef BATON_TESTS_KERNELS_RANDOM_H
#define BATON_TESTS_KERNELS_RANDOM_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/mem.h"

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 0 .. n - 1 */
static inline uint32_t below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(next_random(state) % n);
}

/* Roughly normal, deviation 1. */
static inline float normal(uint64_t *state)
{
    double sum = 0.0;
    for (int i = 0; i < 6; i++) {
        sum += (double)(next_random(state) >> 11) * 0x1p-53;
    }
    return (float)((sum - 3.0) * 1.4142135);
}

static inline float *random_floats(uint64_t *state, size_t n, float scale)
{
    float *x = (float *)mem_array(n, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        x[i] = normal(state) * scale;
    }
    return x;
}

/* An output nobody has written to: every element a NaN with a pattern of its own. */
static inline float *poisoned(size_t n)
{
    float *x = (float *)mem_array(n, sizeof(float));
    memset(x, 0xff, n * sizeof(float));
    return x;
}

#endif
