/* Attention of each row over its window and its chosen entries, with a sink in the denominator.
 *
 * The order of kernels/cpu/attend.c: window positions ascending, then entries ascending; the sums
 * over them run one by one. So the work is cut across entries only where that leaves no trace (the
 * logits), and across heads and channels elsewhere: logits to scratch, then maximum, exponentials
 * and their sum for each head, then the mixture, then the window takes the new rows. Scratch holds
 * the logits of some rows at a time; a call with more goes through it in turns. Grids follow from
 * the number of rows alone: each block walks what its row has.
 *
 * The variant "leaves" cuts the mixture into leaves of 64 entries, whatever the card: each is
 * summed one by one, then the leaves are added in order. Few rows leave that to a block a leaf and
 * one more kernel, many to one block; the bits are the same. Its sum of exponentials is taken by 32
 * lanes. Bound: an output's sum within 2^-19 of the sum of its terms' sizes, for up to 2,048
 * entries.
 */
#include "kernels/cuda/attend.cuh"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / CUDA_WARP,
    LOGIT_TILE = 16,  /* entries in shared memory at a time: 32 KiB of 512 channels */
    LOGIT_HEADS = 32, /* heads of a block */
    MIX_TILE = 16,
    MIX_HEADS = 8, /* heads of a block, four to a thread */
    MIX_NARROW = 128,
    MIX_CHANNELS = 512, /* channels of a block: few rows, many */
    LEAF = 64,          /* entries; whole tiles */
    FEW_ROWS = 16,      /* whose leaves there is room for */
    MOST_CHANNELS = ATTENTION_SHARED_BYTES / LOGIT_TILE / 4,
    SCRATCH_FLOATS = 1 << 24, /* 64 MiB: some hundred rows a turn */
};

struct mix_args : attend_args {
    float *logits; /* [rows of this turn, n_heads, max_attended], then probabilities */
    float *sums;   /* [rows of this turn, n_heads] */
    float *leaves; /* [rows of this turn, max_leaves, n_heads, head_dim] */
    uint32_t max_leaves;
};

/* Channels ch .. ch + 3 of the a-th. */
__device__ __forceinline__ float4 attended_load(const mix_args &args, const struct attended &at,
                                                uint32_t a, uint32_t ch)
{
    if (a < at.n_window) {
        uint32_t k = at.first + a;
        if (k >= at.seq.position) {
            size_t row = at.seq.first_row + (k - at.seq.position);
            return *reinterpret_cast<const float4 *>(args.kv_rows + row * args.v.head_dim + ch);
        }
        return cache_entry_load(args.v, cache_window_at(args.v, at.seq.slot, k), ch);
    }
    uint32_t i = a - at.n_window;
    return cache_entry_load(args.v,
                            cache_entry_at(args.v, at.seq.pages, at.chosen ? at.chosen[i] : i), ch);
}

__global__ void __launch_bounds__(THREADS) attend_logits_kernel(mix_args args)
{
    cuda_grid_begin();
    extern __shared__ float4 shared4[];
    const float *tile = reinterpret_cast<const float *>(shared4);
    uint32_t r = args.row_first + blockIdx.x, n_ch = args.v.head_dim, n_quads = n_ch / 4;
    uint32_t h0 = blockIdx.y * LOGIT_HEADS, warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
    uint32_t n_h = args.n_heads - h0 < LOGIT_HEADS ? args.n_heads - h0 : LOGIT_HEADS;
    const float *q = args.q + ((size_t)r * args.n_heads + h0) * n_ch;
    float *logits = args.logits + ((size_t)blockIdx.x * args.n_heads + h0) * args.max_attended;
    struct attended at = attended_of(args, r);
    for (uint32_t base = blockIdx.z * LOGIT_TILE; base < at.n; base += gridDim.z * LOGIT_TILE) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < LOGIT_TILE * n_quads; i += THREADS) {
            uint32_t a = base + i / n_quads;
            shared4[i] = a < at.n ? attended_load(args, at, a, i % n_quads * 4)
                                  : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        __syncthreads();
        const uint32_t n_columns = LOGIT_TILE / DOTS_COLUMNS;
        uint32_t n_items = (n_h + DOTS_ROWS - 1) / DOTS_ROWS * n_columns;
        for (uint32_t item = warp; item < n_items; item += WARPS) {
            uint32_t h = item / n_columns * DOTS_ROWS, e = item % n_columns * DOTS_COLUMNS;
            float dot = warp_dots(q + (size_t)h * n_ch, n_ch, n_h - h, tile + e * n_ch, n_ch, n_ch);
            h += lane / DOTS_COLUMNS;
            e += base + lane % DOTS_COLUMNS;
            if (h < n_h && e < at.n) {
                logits[(size_t)h * args.max_attended + e] = dot * args.scale;
            }
        }
    }
}

/* A warp for each row and head: logits become e^(l - most), the sum includes the sink. */
template <bool LEAVES>
__global__ void __launch_bounds__(THREADS) attend_softmax_kernel(mix_args args)
{
    cuda_grid_begin();
    uint32_t r = args.row_first + blockIdx.x, lane = cuda_lane();
    uint32_t h = blockIdx.y * WARPS + threadIdx.x / CUDA_WARP;
    if (h >= args.n_heads) {
        return;
    }
    size_t at = (size_t)blockIdx.x * args.n_heads + h;
    uint32_t n = attended_of(args, r).n;
    float *l = args.logits + at * args.max_attended, sink = args.sink[h], most = sink, z = 0.0f;
    for (uint32_t a = lane; a < n; a += CUDA_WARP) {
        most = l[a] > most ? l[a] : most;
    }
    most = warp_max(most);
    for (uint32_t base = 0; base < n; base += CUDA_WARP) {
        float p = 0.0f;
        if (base + lane < n) {
            p = cpu_exp(l[base + lane] - most);
            l[base + lane] = p;
        }
        if constexpr (LEAVES) {
            z += p;
        } else { /* one by one; the zeros behind the last change nothing */
#pragma unroll
            for (int i = 0; i < CUDA_WARP; i++) {
                z += __shfl_sync(0xffffffffu, p, i);
            }
        }
    }
    z = LEAVES ? warp_sum(z) : z;
    z += cpu_exp(sink - most);
    if (lane == 0) {
        args.sums[at] = z;
    }
}

enum mix { MIX_ONE_BY_ONE, MIX_LEAVES, MIX_A_LEAF };

/* Block: a row, MIX_HEADS heads, n_ch channels; of MIX_A_LEAF one leaf of them, for which grid z
 * counts channels first. Thread (x, y): channels 4 x .., heads 4 y .. */
template <int MIX>
__global__ void __launch_bounds__(THREADS, 2) attend_mix_kernel(mix_args args, uint32_t n_ch)
{
    cuda_grid_begin();
    extern __shared__ float4 shared4[];
    __shared__ float4 p4[MIX_TILE * MIX_HEADS / 4];
    float *p = reinterpret_cast<float *>(p4);
    uint32_t r = args.row_first + blockIdx.x, h0 = blockIdx.y * MIX_HEADS, n_quads = n_ch / 4;
    const uint32_t n_cuts = (args.v.head_dim + n_ch - 1) / n_ch;
    const uint32_t leaf = MIX == MIX_A_LEAF ? blockIdx.z / n_cuts : 0;
    uint32_t ch0 = blockIdx.z % n_cuts * n_ch, ch = ch0 + 4 * threadIdx.x;
    uint32_t thread = threadIdx.y * blockDim.x + threadIdx.x, n_threads = blockDim.x * blockDim.y;
    const float *rows_p = args.logits + (size_t)blockIdx.x * args.n_heads * args.max_attended;
    struct attended at = attended_of(args, r);
    const uint32_t first = leaf * LEAF;
    const uint32_t end = MIX == MIX_A_LEAF && at.n > first + LEAF ? first + LEAF : at.n;
    if (first >= end) {
        return;
    }
    float sum[4][4], total[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        sum[i / 4][i % 4] = total[i / 4][i % 4] = 0.0f;
    }
    for (uint32_t base = first; base < end; base += MIX_TILE) {
        if (MIX == MIX_LEAVES && base && base % LEAF == 0) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                total[i / 4][i % 4] += sum[i / 4][i % 4];
                sum[i / 4][i % 4] = 0.0f;
            }
        }
        uint32_t n = at.n - base < MIX_TILE ? at.n - base : MIX_TILE;
        __syncthreads();
        for (uint32_t i = thread; i < n * n_quads; i += n_threads) {
            uint32_t c = ch0 + i % n_quads * 4;
            shared4[i] = c < args.v.head_dim ? attended_load(args, at, base + i / n_quads, c)
                                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        for (uint32_t i = thread; i < MIX_TILE * MIX_HEADS; i += n_threads) {
            uint32_t h = h0 + i / MIX_TILE, a = i % MIX_TILE;
            p[a * MIX_HEADS + i / MIX_TILE] =
                a < n && h < args.n_heads ? rows_p[(size_t)h * args.max_attended + base + a] : 0.0f;
        }
        __syncthreads();
        for (uint32_t a = 0; a < n; a++) {
            float4 x4 = shared4[a * n_quads + threadIdx.x];
            float4 w4 = p4[a * (MIX_HEADS / 4) + threadIdx.y];
            const float x[4] = {x4.x, x4.y, x4.z, x4.w}, w[4] = {w4.x, w4.y, w4.z, w4.w};
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float *to = &sum[i / 4][i % 4];
                *to = MIX == MIX_ONE_BY_ONE ? *to + w[i / 4] * x[i % 4]
                                            : __fmaf_rn(w[i / 4], x[i % 4], *to);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        sum[i / 4][i % 4] += MIX == MIX_LEAVES ? total[i / 4][i % 4] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t h = h0 + 4 * threadIdx.y + i;
        if (h >= args.n_heads || ch >= args.v.head_dim) {
            continue;
        }
        if (MIX == MIX_A_LEAF) {
            size_t to = (((size_t)blockIdx.x * args.max_leaves + leaf) * args.n_heads + h) *
                            args.v.head_dim +
                        ch;
            *reinterpret_cast<float4 *>(args.leaves + to) =
                make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        } else {
            float z = args.sums[(size_t)blockIdx.x * args.n_heads + h];
            size_t to = ((size_t)r * args.n_heads + h) * args.v.head_dim + ch;
            *reinterpret_cast<float4 *>(args.o + to) =
                attend_finish(args, sum[i], z, args.rope + (size_t)r * args.v.rope_dim, ch);
        }
    }
}

/* A thread for each four channels of a row's head: its leaves in order. */
__global__ void __launch_bounds__(THREADS) attend_combine_kernel(mix_args args)
{
    cuda_grid_begin();
    const uint32_t r = args.row_first + blockIdx.x, n_quads = args.v.head_dim / 4;
    const uint32_t i = blockIdx.y * THREADS + threadIdx.x, h = i / n_quads, ch = i % n_quads * 4;
    if (h >= args.n_heads) {
        return;
    }
    const uint32_t n = (attended_of(args, r).n + LEAF - 1) / LEAF;
    const size_t leaf_floats = (size_t)args.n_heads * args.v.head_dim;
    const float *from = args.leaves + (size_t)blockIdx.x * args.max_leaves * leaf_floats +
                        (size_t)h * args.v.head_dim + ch;
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (uint32_t leaf = 0; leaf < n; leaf++) {
        const float4 x = *reinterpret_cast<const float4 *>(from + leaf * leaf_floats);
        sum[0] += x.x;
        sum[1] += x.y;
        sum[2] += x.z;
        sum[3] += x.w;
    }
    const size_t to = ((size_t)r * args.n_heads + h) * args.v.head_dim + ch;
    *reinterpret_cast<float4 *>(args.o + to) =
        attend_finish(args, sum, args.sums[(size_t)blockIdx.x * args.n_heads + h],
                      args.rope + (size_t)r * args.v.rope_dim, ch);
}

/* A warp for each row: those that stay in the ring are stored. */
__global__ void __launch_bounds__(THREADS) attend_keep_kernel(struct attend_args args)
{
    cuda_grid_begin();
    uint32_t r = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (r < args.rows.n_rows) {
        attend_keep(args, r, 0, 1);
    }
}

void attend_mix(struct ops_device *dev, const mix_args *args, uint32_t n_rows)
{
    const uint32_t n_heads = args->n_heads, n_ch = args->v.head_dim;
    const uint32_t n_mix = (n_heads + MIX_HEADS - 1) / MIX_HEADS;
    uint32_t wide = n_rows * n_mix < 2 * dev->n_sms ? MIX_NARROW : MIX_CHANNELS;
    wide = wide < n_ch ? wide : n_ch;
    const uint32_t n_cuts = (n_ch + wide - 1) / wide;
    const dim3 threads(wide / 4, MIX_HEADS / 4);
    const size_t shared = MIX_TILE * wide * sizeof(float);
    if (!dev->leaves) {
        cuda_run(dev, "attend (mix)", attend_mix_kernel<MIX_ONE_BY_ONE>,
                 dim3(n_rows, n_mix, n_cuts), threads, shared, *args, wide);
    } else if (args->leaves && wide == MIX_NARROW) {
        cuda_run(dev, "attend (leaves)", attend_mix_kernel<MIX_A_LEAF>,
                 dim3(n_rows, n_mix, n_cuts * args->max_leaves), threads, shared, *args, wide);
        cuda_run(dev, "attend (mix)", attend_combine_kernel,
                 dim3(n_rows, (n_heads * n_ch / 4 + THREADS - 1) / THREADS), THREADS, 0, *args);
    } else {
        cuda_run(dev, "attend (mix)", attend_mix_kernel<MIX_LEAVES>, dim3(n_rows, n_mix, n_cuts),
                 threads, shared, *args, wide);
    }
}

void attend_turn(struct ops_device *dev, const mix_args *args, uint32_t n_rows)
{
    uint32_t n_heads = args->n_heads, n_ch = args->v.head_dim;
    uint32_t n_groups = (n_heads + LOGIT_HEADS - 1) / LOGIT_HEADS;
    uint32_t n_tiles = (args->max_attended + LOGIT_TILE - 1) / LOGIT_TILE;
    uint32_t n_splits = attention_splits(dev, n_rows * n_groups, n_tiles);
    cuda_run(dev, "attend (logits)", attend_logits_kernel, dim3(n_rows, n_groups, n_splits),
             THREADS, LOGIT_TILE * n_ch * sizeof(float), *args);
    const dim3 heads(n_rows, (n_heads + WARPS - 1) / WARPS);
    if (dev->leaves) {
        cuda_run(dev, "attend (softmax)", attend_softmax_kernel<true>, heads, THREADS, 0, *args);
    } else {
        cuda_run(dev, "attend (softmax)", attend_softmax_kernel<false>, heads, THREADS, 0, *args);
    }
    attend_mix(dev, args, n_rows);
}

} /* namespace */

void cuda_attend_keep(struct ops_device *dev, const struct attend_args &args)
{
    cuda_run(dev, "attend (window)", attend_keep_kernel, (args.rows.n_rows + WARPS - 1) / WARPS,
             THREADS, 0, args);
}

enum status cuda_attention_check(const struct ops_dims *d, struct error *err)
{
    bool quantised = d->entry_kind == FORMATS_ENTRY_PACKED || !d->exact;
    if (d->head_dim % 8 || d->head_dim > MOST_CHANNELS || d->rope_dim % 2 ||
        d->rope_dim > d->head_dim ||
        (quantised && (d->head_dim - d->rope_dim) % FORMATS_KV_GROUP)) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "attend: no kernel for heads of %u channels, %u of them rotated: it takes "
                         "a multiple of 8, at most %d; quantised, those not rotated must be a "
                         "multiple of %d",
                         d->head_dim, d->rope_dim, MOST_CHANNELS, FORMATS_KV_GROUP);
    }
    if (d->index_topk == 0) {
        return STATUS_OK;
    }
    uint32_t n = d->index_dim;
    if (n % 8 || d->rope_dim > n || (quantised && (n % FORMATS_KEY_GROUP || (n & (n - 1)))) ||
        cuda_topk_shared_bytes(d) > ATTENTION_SHARED_BYTES) {
        return error_set(
            err, STATUS_UNSUPPORTED,
            "topk: no kernel for %u index heads of %u channels: it takes a multiple of "
            "8 (quantised, a power of two and at least %d) and %d bytes of shared "
            "memory",
            d->index_heads, n, FORMATS_KEY_GROUP, ATTENTION_SHARED_BYTES);
    }
    return STATUS_OK;
}

bool cuda_attention_room(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    size_t row = (size_t)d->n_heads * ((size_t)dev->max_attended + 1), n = dev->limits.n_rows;
    row = d->index_topk && dev->max_entries > row ? dev->max_entries : row;
    size_t triples = dev->limits.heavy_ratio ? n * 3 * d->head_dim : 0;
    size_t all = row * n > SCRATCH_FLOATS ? (size_t)SCRATCH_FLOATS : row * n;
    all = all < row ? row : all;
    all = all < triples ? triples : all;
    size_t few = n < FEW_ROWS ? n : FEW_ROWS;
    size_t leaves = few * ((dev->max_attended + LEAF - 1) / LEAF) * d->n_heads * d->head_dim;
    all += leaves < SCRATCH_FLOATS ? leaves : SCRATCH_FLOATS;
    const size_t of_tensor = few * cuda_attend_tensor_floats(dev);
    all = all < of_tensor ? of_tensor : all;
    bool ok = true;
    dev->attention = static_cast<float *>(cuda_room(dev, all, 1, &ok));
    dev->attention_floats = all;
    dev->topk_arrived = static_cast<uint32_t *>(cuda_room(dev, n, 1, &ok));
    return ok && cuda_attend_tensor_room(dev);
}

void cuda_attend(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *q, const float *kv_rows, const struct ops_selection *selection,
                 const struct ops_kv *kv, float *ret_o)
{
    const struct ops_dims *d = &dev->d;
    mix_args args;
    static_cast<attend_args &>(args) = attend_args_of(dev, layer, q, kv_rows, selection, kv, ret_o);
    args.max_leaves = (dev->max_attended + LEAF - 1) / LEAF;
    size_t row_floats = (size_t)d->n_heads * ((size_t)dev->max_attended + 1);
    size_t turn = dev->attention_floats / row_floats;
    args.sums = dev->attention;
    for (uint32_t row = 0, n; row < rows->n_rows; row += n) {
        n = rows->n_rows - row < turn ? rows->n_rows - row : (uint32_t)turn;
        args.row_first = row;
        args.logits = args.sums + (size_t)n * d->n_heads;
        /* What is left holds the leaves of few rows, from a multiple of four floats on. */
        size_t used = (n * row_floats + 3) / 4 * 4;
        size_t wanted = (size_t)n * args.max_leaves * d->n_heads * d->head_dim;
        args.leaves = used + wanted <= dev->attention_floats ? args.sums + used : NULL;
        attend_turn(dev, &args, n);
    }
    if (kv->stores_window) {
        cuda_attend_keep(dev, args);
    }
}

void cuda_attend_leaves(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *q, const float *kv_rows,
                        const struct ops_selection *selection, const struct ops_kv *kv,
                        float *ret_o)
{
    dev->leaves = true;
    cuda_attend(dev, rows, layer, q, kv_rows, selection, kv, ret_o);
    dev->leaves = false;
}
