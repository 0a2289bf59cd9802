/* kernels/cuda/attend.cuh - what the kernels of attend share: what a row attends to, how a sum
 * becomes an output, how the window takes new rows.
 */
#ifndef BATON_KERNELS_CUDA_ATTEND_CUH
#define BATON_KERNELS_CUDA_ATTEND_CUH

#include <math.h>

#include "kernels/cuda/attention.cuh"

struct attend_args {
    struct cache_view v;
    struct ops_rows rows;
    struct ops_selection selection;
    const float *q, *kv_rows, *rope, *sink;
    float *o;
    uint32_t row_first, n_heads, index_topk, max_attended;
    float scale;
    bool round;
};

/* What row r attends to: n_window positions from `first` on, then entries. */
struct attended {
    struct ops_seq seq;
    const uint32_t *chosen; /* NULL: all from the first on */
    uint32_t first, n_window, n;
};

__device__ __forceinline__ struct attended attended_of(const struct attend_args &args, uint32_t r)
{
    struct attended at;
    uint32_t t = args.rows.positions[r], ratio = args.v.place.ratio;
    bool sparse = ratio == OPS_SPARSE_RATIO;
    uint32_t n_chosen = sparse ? args.selection.n[r] : 0; /* asked for beside the others */
    at.seq = args.rows.seqs[args.rows.seq_of[r]];
    at.first = t + 1 > args.v.window ? t + 1 - args.v.window : 0;
    at.n_window = t + 1 - at.first;
    at.chosen = sparse ? args.selection.index + (size_t)r * args.index_topk : NULL;
    at.n = at.n_window + (ratio == 0 ? 0 : (sparse ? n_chosen : (t + 1) / ratio));
    return at;
}

/* Four channels of one head from their sums: quotient, rounding, rotation back. */
__device__ __forceinline__ float4 attend_finish(const struct attend_args &args, const float sum[4],
                                                float z, const float *rope, uint32_t ch)
{
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = cuda_rounded(sum[i] / z, args.round);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t n_plain = args.v.head_dim - args.v.rope_dim;
        if (ch + i >= n_plain) {
            float c = rope[ch + i - n_plain], s = -rope[ch + i - n_plain + 1];
            float even = x[i], odd = x[i + 1];
            x[i] = cuda_rounded(even * c - odd * s, args.round);
            x[i + 1] = cuda_rounded(even * s + odd * c, args.round);
        }
    }
    return make_float4(x[0], x[1], x[2], x[3]);
}

/* A row of the call into the window, if it stays there: by warps, warp_i of n_warps. */
__device__ __forceinline__ void attend_keep(const struct attend_args &args, uint32_t r,
                                            uint32_t warp_i, uint32_t n_warps)
{
    struct ops_seq seq = args.rows.seqs[args.rows.seq_of[r]];
    if (seq.slot == OPS_NO_SLOT || seq.n_rows - (r - seq.first_row) > args.v.ring) {
        return;
    }
    cache_entry_store(args.v, args.kv_rows + (size_t)r * args.v.head_dim,
                      cache_window_at(args.v, seq.slot, args.rows.positions[r]), warp_i, n_warps);
}

/* Of a call, from its first row on. */
static inline struct attend_args attend_args_of(const struct ops_device *dev,
                                                const struct ops_layer *layer, const float *q,
                                                const float *kv_rows,
                                                const struct ops_selection *selection,
                                                const struct ops_kv *kv, float *ret_o)
{
    const struct ops_dims *d = &dev->d;
    struct attend_args args;
    args.v = cache_view_make(d, kv, &layer->place);
    args.rows = dev->rows;
    args.selection = *selection;
    args.q = q;
    args.kv_rows = kv_rows;
    args.rope = dev->rope[layer->place.ratio != 0];
    args.sink = layer->attn_sink;
    args.o = ret_o;
    args.row_first = 0;
    args.n_heads = d->n_heads;
    args.index_topk = d->index_topk;
    args.max_attended = dev->max_attended;
    args.scale = (float)(1.0 / sqrt((double)d->head_dim));
    args.round = !d->exact;
    return args;
}

/* Rows of a call that stay in the window go there: behind all kernels that read it (attend.cu). */
void cuda_attend_keep(struct ops_device *dev, const struct attend_args &args);

#endif
