#include <inttypes.h>
#include <stdio.h>

#include "engine/sampler.h"
#include "router/request_internal.h"

/*
 * The seed of choice i. The router makes it for a leg of one choice (a failover), the engine for
 * the samples of one request; an answer only goes on exactly if the two agree. Both are compared
 * with the published outputs of splitmix64 for the seed 0 (Steele, Lea, Flood 2014; the sequence
 * that Vigna's splitmix64.c gives), whose finaliser the rule uses.
 */
int main(void)
{
    static const uint64_t published[] = {0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4,
                                         0x06c45d188009454f};
    const uint64_t step = 0x9e3779b97f4a7c15, stride = 0xd1342543de82ef95;
    unsigned n_wrong = 0;
    for (uint32_t i = 1; i < 16; i++) {
        for (uint64_t k = 0; k < 3; k++) {
            uint64_t seed = (k + 1) * step ^ i * stride;
            n_wrong += request_sample_seed(seed, i) != published[k];
            n_wrong += sampler_seed(seed, i) != published[k];
        }
    }
    uint64_t seed = 1;
    for (unsigned k = 0; k < 100000; k++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint32_t i = (uint32_t)(seed >> 33) % 17;
        n_wrong += request_sample_seed(seed, i) != sampler_seed(seed, i);
        n_wrong += request_sample_seed(seed, 0) != seed;
        /* choices of one request differ, and those of a choice's own leg are that choice's */
        n_wrong += i > 0 && request_sample_seed(seed, i) == request_sample_seed(seed, i - 1);
        n_wrong +=
            request_sample_seed(request_sample_seed(seed, i), 0) != request_sample_seed(seed, i);
    }
    printf("%u wrong\n", n_wrong);
    return n_wrong != 0;
}
