/* kernels/cuda/topk.cuh - what the variants of topk share: their arguments, and how the k-th
 * largest of words is found a byte at a time. */
#ifndef BATON_KERNELS_CUDA_TOPK_CUH
#define BATON_KERNELS_CUDA_TOPK_CUH

#include "kernels/cuda/attention.cuh"

struct topk_args {
    struct cache_view v;
    struct ops_rows rows;
    struct ops_selection selection;
    const float *iq, *iw;
    float *scores; /* [rows of this turn, max_entries] */
    uint32_t row_first, index_heads, index_topk, max_entries;
    bool round;
};

/* A word that orders as the float does. */
__device__ __forceinline__ uint32_t sortable(float x)
{
    uint32_t u = f32_bits(x + 0.0f); /* -0 becomes 0: they tie */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* What the search for the k-th largest word knows so far. */
struct select_state {
    uint32_t prefix, mask, wanted;
};

/* The byte at `shift` of the k-th largest word, by the first warp: lane l has the eight bins from
 * 255 - 8 l down. */
__device__ __forceinline__ void select_byte(const uint32_t *count, int shift,
                                            struct select_state *state)
{
    uint32_t top = 255 - 8 * cuda_lane(), here = 0, wanted = state->wanted;
    for (uint32_t i = 0; i < 8; i++) {
        here += count[top - i];
    }
    uint32_t upto = here;
    for (uint32_t step = 1; step < CUDA_WARP; step *= 2) {
        uint32_t other = __shfl_up_sync(0xffffffffu, upto, step);
        upto += cuda_lane() >= step ? other : 0;
    }
    __syncwarp();
    if (upto >= wanted && upto - here < wanted) {
        wanted -= upto - here;
        while (count[top] < wanted) {
            wanted -= count[top--];
        }
        state->wanted = wanted;
        state->prefix |= top << shift;
        state->mask |= 255u << shift;
    }
}

/* Of a call: all but which rows. */
static inline struct topk_args topk_args_make(struct ops_device *dev, const struct ops_layer *layer,
                                              const float *iq, const float *iw,
                                              const struct ops_kv *kv,
                                              const struct ops_selection *selection)
{
    const struct ops_dims *d = &dev->d;
    struct topk_args args;
    args.v = cache_view_make(d, kv, &layer->place);
    args.rows = dev->rows;
    args.selection = *selection;
    args.iq = iq;
    args.iw = iw;
    args.scores = dev->attention;
    args.row_first = 0;
    args.index_heads = d->index_heads;
    args.index_topk = d->index_topk;
    args.max_entries = dev->max_entries;
    args.round = !d->exact;
    return args;
}

#endif
