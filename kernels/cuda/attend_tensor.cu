/* Attention on tensor cores, one launch: a block a leaf of a row's entries.
 *
 * Entries are e4m3 times a power of two and bfloat16, queries bfloat16, so every product of a logit
 * is exact; logits, exponentials and sums are fp32. A block takes LEAF entries of a row for HEADS
 * heads: it decodes them once, to bfloat16 in shared memory, where they serve as keys and as
 * values. Each warp multiplies CHANNELS of the channels for all entries, the warps' sums are added
 * in turn, and each leaf has its own maximum, sum of exponentials and weighted sum of entries.
 * Exponentials are multiplied as two bfloat16 values, the second what the first leaves.
 *
 * The last block of a row and its heads to end adds the leaves up in order, each times
 * e^(its maximum - the largest), the sink among them, and rotates back. So what a row gets depends
 * on its own entries alone, whatever the card and whoever else is in the call; long calls go
 * through the leaves' room in turns.
 *
 * Bound: an output's sum within 2^-16 of the sum of its terms' sizes (what two bfloat16 leave of an
 * exponential, 2^-17, and the sums' roundings), beside the logits' 2^-19 of theirs.
 */
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/tensor.cuh"

namespace
{

enum {
    WARPS = 8,
    THREADS = WARPS * CUDA_WARP,
    LEAF = 64,
    HEADS = 16,
    CHANNELS = 64, /* of a warp */
    MOST_CHANNELS = WARPS * CHANNELS,
    PADDED = MOST_CHANNELS + 8, /* so that rows of shared memory start in different banks */
    LEAF_PADDED = LEAF + 8,
    N_TILES = LEAF / 8,
    OUT_TILES = CHANNELS / 8,
    BODY_PIECES = 7 /* most units of e4m3 that a thread decodes of an entry */
};

/* What a row's leaf leaves for some heads: sums [HEADS, MOST_CHANNELS], maxima, sums of
 * exponentials. */
struct leaf_sums {
    float sum[HEADS][MOST_CHANNELS];
    float most[HEADS], z[HEADS];
};

struct tensor_args : attend_args {
    leaf_sums *leaves; /* [rows of this turn, groups of heads, max_leaves] */
    uint32_t *arrived; /* [rows of this turn, groups of heads]; zeroes between launches */
    uint32_t max_leaves;
    bool keeps; /* every row is a sequence's only one, and the window takes it here */
};

union entries_or_weights {
    uint16_t entry[LEAF][PADDED];
    float weight[1]; /* [leaves, HEADS], of the last block */
};

struct shared_leaf {
    entries_or_weights at;
    union {
        float part[WARPS][HEADS][LEAF];
        uint16_t p[2][HEADS][LEAF_PADDED]; /* exponentials, and what bfloat16 leaves of them */
    };
};
static_assert(sizeof(shared_leaf) <= ARCH_MAX_SHARED_BYTES, "a block must be able to have it");

__device__ __forceinline__ uint32_t word_at(const uint16_t *at)
{
    return *reinterpret_cast<const uint32_t *>(at);
}

/* Sixteen e4m3 to as many bfloat16, in order. A NaN makes four channels NaN: that is its word. */
__device__ __forceinline__ void decode(const uint32_t *words, uint32_t scale, uint32_t *ret)
{
    const uint32_t back = tensor_unit<CUDA_FP8>::BACK, by = tensor_scale_pair(scale);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t w = words[i];
        const bool nan = scale == 0xff || (((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u);
        /* Bytes 0 and 2, then 1 and 3: see tensor_weights. */
        uint32_t even = arch_times_bf16((w << 4 & 0x07f007f0u) | (w << 8 & 0x80008000u), back);
        uint32_t odd = arch_times_bf16((w >> 4 & 0x07f007f0u) | (w & 0x80008000u), back);
        even = arch_times_bf16(even, by);
        odd = arch_times_bf16(odd, by);
        ret[2 * i] = nan ? 0x7fff7fffu : (even & 0xffffu) | odd << 16;
        ret[2 * i + 1] = nan ? 0x7fff7fffu : even >> 16 | (odd & 0xffff0000u);
    }
}

/* A quarter of an entry, thread q of four: every fourth unit of 16 channels, and of eight. */
__device__ __forceinline__ void load_packed(const cache_view &v, struct cache_at at, uint32_t q,
                                            uint16_t *to)
{
    const uint32_t n_plain = v.head_dim - v.rope_dim;
    const uint2 *body = reinterpret_cast<const uint2 *>(at.body);
    uint2 raw[BODY_PIECES][2];
    uint32_t scale[BODY_PIECES];
#pragma unroll
    for (uint32_t i = 0; i < BODY_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 16;
        raw[i][0] = raw[i][1] = make_uint2(0, 0);
        scale[i] = 0;
        if (ch < n_plain) {
            raw[i][0] = body[ch / 8];
            raw[i][1] = body[ch / 8 + 1];
            scale[i] = at.scales[ch / FORMATS_KV_GROUP];
        }
    }
    for (uint32_t ch = 8 * q; ch < v.rope_dim; ch += 32) {
        const uint2 *from = body + (n_plain + 2 * ch) / 8;
        const uint2 a = from[0], b = from[1];
        *reinterpret_cast<uint4 *>(to + n_plain + ch) = make_uint4(a.x, a.y, b.x, b.y);
    }
#pragma unroll
    for (uint32_t i = 0; i < BODY_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 16;
        const uint32_t words[4] = {raw[i][0].x, raw[i][0].y, raw[i][1].x, raw[i][1].y};
        uint32_t w[8];
        if (ch >= n_plain) {
            continue;
        }
        decode(words, scale[i], w);
        uint4 *at16 = reinterpret_cast<uint4 *>(to + ch);
        at16[0] = make_uint4(w[0], w[1], w[2], w[3]);
        at16[1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
}

/* The leaf's entries; behind the last, zeroes. */
__device__ __forceinline__ void load_entries(const tensor_args &args, const struct attended &at,
                                             uint32_t first, uint16_t (*to)[PADDED])
{
    const uint32_t e = threadIdx.x / 4, q = threadIdx.x % 4, a = first + e;
    static_assert((int)THREADS == 4 * (int)LEAF, "four threads an entry");
    if (a >= at.n) {
        for (uint32_t ch = 8 * q; ch < args.v.head_dim; ch += 32) {
            *reinterpret_cast<uint4 *>(to[e] + ch) = make_uint4(0, 0, 0, 0);
        }
    } else if (a < at.n_window && at.first + a >= at.seq.position) {
        const size_t row = at.seq.first_row + (at.first + a - at.seq.position);
        const float4 *from = reinterpret_cast<const float4 *>(args.kv_rows + row * args.v.head_dim);
        for (uint32_t ch = 8 * q; ch < args.v.head_dim; ch += 32) {
            const float4 x = from[ch / 4], y = from[ch / 4 + 1];
            *reinterpret_cast<uint4 *>(to[e] + ch) =
                make_uint4(arch_pair_bf16(x.x, x.y), arch_pair_bf16(x.z, x.w),
                           arch_pair_bf16(y.x, y.y), arch_pair_bf16(y.z, y.w));
        }
    } else if (a < at.n_window) {
        load_packed(args.v, cache_window_at(args.v, at.seq.slot, at.first + a), q, to[e]);
    } else {
        const uint32_t i = a - at.n_window;
        load_packed(args.v, cache_entry_at(args.v, at.seq.pages, at.chosen ? at.chosen[i] : i), q,
                    to[e]);
    }
}

/* The warp's channels of all dot products, to part[warp]. */
__device__ __forceinline__ void partial_logits(const tensor_args &args, uint32_t r, uint32_t h0,
                                               const uint16_t (*entry)[PADDED], float (*part)[LEAF])
{
    const uint32_t g = cuda_lane() / 4, t = cuda_lane() % 4;
    const uint32_t ch0 = threadIdx.x / CUDA_WARP * CHANNELS;
    const bool low = h0 + g < args.n_heads, high = h0 + g + 8 < args.n_heads;
    const float *q = args.q + ((size_t)r * args.n_heads + h0 + g) * args.v.head_dim;
    float sums[N_TILES][4] = {};
    for (uint32_t ch = ch0; ch < ch0 + CHANNELS && ch < args.v.head_dim; ch += 16) {
        uint32_t a[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float *from = q + (size_t)(i % 2 * 8) * args.v.head_dim + ch + i / 2 * 8 + 2 * t;
            const float2 x = (i % 2 ? high : low) ? *reinterpret_cast<const float2 *>(from)
                                                  : make_float2(0.0f, 0.0f);
            a[i] = arch_pair_bf16(x.x, x.y);
        }
#pragma unroll
        for (uint32_t nt = 0; nt < N_TILES; nt++) {
            const uint16_t *b = entry[8 * nt + g] + ch + 2 * t;
            arch_mma_bf16(sums[nt], a[0], a[1], a[2], a[3], word_at(b), word_at(b + 8));
        }
    }
#pragma unroll
    for (uint32_t nt = 0; nt < N_TILES; nt++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            part[g + i / 2 * 8][8 * nt + 2 * t + i % 2] = sums[nt][i];
        }
    }
}

/* Sixteen threads a head: its logits of the leaf become exponentials in two parts. */
__device__ __forceinline__ void leaf_softmax(const tensor_args &args, uint32_t n, shared_leaf *s,
                                             leaf_sums *to)
{
    enum { EACH = LEAF / 16 };
    const uint32_t h = threadIdx.x / 16, a0 = threadIdx.x % 16 * EACH;
    float l[EACH], most = -INFINITY, z = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        float sum = s->part[0][h][a0 + i];
#pragma unroll
        for (int w = 1; w < WARPS; w++) {
            sum += s->part[w][h][a0 + i];
        }
        l[i] = sum * args.scale;
        most = a0 + i < n && (l[i] > most || l[i] != l[i]) ? l[i] : most;
    }
#pragma unroll
    for (int step = 8; step >= 1; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most || other != other ? other : most;
    }
    __syncthreads(); /* all parts are read */
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const float p = a0 + i < n ? cpu_exp(l[i] - most) : 0.0f;
        const float high = bf16_round(p);
        s->p[0][h][a0 + i] = bf16_encode(high);
        s->p[1][h][a0 + i] = bf16_encode(p - high);
        z += p;
    }
#pragma unroll
    for (int step = 8; step >= 1; step /= 2) {
        z += __shfl_xor_sync(0xffffffffu, z, step);
    }
    if (threadIdx.x % 16 == 0) {
        to->most[h] = most;
        to->z[h] = z;
    }
}

/* The warp's channels of the weighted sums. */
__device__ __forceinline__ void weighted_sums(const tensor_args &args, const shared_leaf *s,
                                              leaf_sums *to)
{
    const uint32_t lane = cuda_lane(), g = lane / 4, t = lane % 4;
    const uint32_t ch0 = threadIdx.x / CUDA_WARP * CHANNELS;
    float sums[OUT_TILES][4] = {};
    if (ch0 >= args.v.head_dim) {
        return;
    }
#pragma unroll
    for (uint32_t e = 0; e < LEAF; e += 16) {
        uint32_t a[2][4];
#pragma unroll
        for (uint32_t k = 0; k < 2; k++) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                a[k][i] = word_at(s->p[k][g + i % 2 * 8] + e + i / 2 * 8 + 2 * t);
            }
        }
#pragma unroll
        for (uint32_t nt = 0; nt < OUT_TILES; nt += 2) {
            uint32_t b[4]; /* of 16 entries: channels 8 nt .., and the eight behind */
            arch_load_transposed(&s->at.entry[e + lane % 16][ch0 + 8 * nt + lane / 16 * 8], b);
#pragma unroll
            for (uint32_t k = 0; k < 2; k++) {
                arch_mma_bf16(sums[nt], a[k][0], a[k][1], a[k][2], a[k][3], b[0], b[1]);
                arch_mma_bf16(sums[nt + 1], a[k][0], a[k][1], a[k][2], a[k][3], b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (uint32_t nt = 0; nt < OUT_TILES; nt++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i += 2) {
            *reinterpret_cast<float2 *>(&to->sum[g + i / 2 * 8][ch0 + 8 * nt + 2 * t]) =
                make_float2(sums[nt][i], sums[nt][i + 1]);
        }
    }
}

/* By the last block: a row's leaves in order. */
__device__ __forceinline__ void combine(const tensor_args &args, uint32_t r, uint32_t h0,
                                        const leaf_sums *leaves, uint32_t n_leaves, float *weight)
{
    __shared__ float z[HEADS];
    if (threadIdx.x < HEADS) {
        const uint32_t h = threadIdx.x;
        const float sink = h0 + h < args.n_heads ? args.sink[h0 + h] : 0.0f;
        float most = sink, sum = 0.0f;
        for (uint32_t l = 0; l < n_leaves; l++) {
            const float m = __ldcg(&leaves[l].most[h]);
            most = m > most || m != m ? m : most;
        }
        for (uint32_t l = 0; l < n_leaves; l++) {
            const float w = cpu_exp(__ldcg(&leaves[l].most[h]) - most);
            weight[l * HEADS + h] = w;
            sum = __fmaf_rn(w, __ldcg(&leaves[l].z[h]), sum);
        }
        z[h] = sum + cpu_exp(sink - most);
    }
    __syncthreads();
    const uint32_t n_quads = args.v.head_dim / 4;
    for (uint32_t i = threadIdx.x; i < HEADS * n_quads; i += THREADS) {
        const uint32_t h = i / n_quads, ch = i % n_quads * 4;
        if (h0 + h >= args.n_heads) {
            continue;
        }
        float sum[4] = {};
#pragma unroll 4
        for (uint32_t l = 0; l < n_leaves; l++) {
            const float4 x = __ldcg(reinterpret_cast<const float4 *>(&leaves[l].sum[h][ch]));
            const float w = weight[l * HEADS + h];
            sum[0] = __fmaf_rn(w, x.x, sum[0]);
            sum[1] = __fmaf_rn(w, x.y, sum[1]);
            sum[2] = __fmaf_rn(w, x.z, sum[2]);
            sum[3] = __fmaf_rn(w, x.w, sum[3]);
        }
        const size_t to = ((size_t)r * args.n_heads + h0 + h) * args.v.head_dim + ch;
        *reinterpret_cast<float4 *>(args.o + to) =
            attend_finish(args, sum, z[h], args.rope + (size_t)r * args.v.rope_dim, ch);
    }
}

/* Blocks (leaf, row of this turn, group of heads). */
__global__ void __launch_bounds__(THREADS)
    attend_tensor_kernel(const __grid_constant__ tensor_args args)
{
    cuda_grid_begin();
    extern __shared__ uint4 attend_shared[];
    __shared__ bool is_last;
    shared_leaf *s = reinterpret_cast<shared_leaf *>(attend_shared);
    const uint32_t r = args.row_first + blockIdx.y, h0 = blockIdx.z * HEADS;
    const uint32_t first = blockIdx.x * LEAF, warp = threadIdx.x / CUDA_WARP;
    const struct attended at = attended_of(args, r);
    const uint32_t n_leaves = (at.n + LEAF - 1) / LEAF;
    if (first >= at.n) {
        return;
    }
    const size_t of_row = (size_t)blockIdx.y * gridDim.z + blockIdx.z;
    leaf_sums *leaves = args.leaves + of_row * args.max_leaves, *mine = leaves + blockIdx.x;
    load_entries(args, at, first, s->at.entry);
    __syncthreads();
    partial_logits(args, r, h0, s->at.entry, s->part[warp]);
    __syncthreads();
    leaf_softmax(args, at.n - first < LEAF ? at.n - first : (uint32_t)LEAF, s, mine);
    __syncthreads();
    weighted_sums(args, s, mine);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(args.arrived + of_row, 1u) == n_leaves - 1;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    if (threadIdx.x == 0) {
        args.arrived[of_row] = 0; /* for the next launch */
    }
    combine(args, r, h0, leaves, n_leaves, s->at.weight);
    if (args.keeps && blockIdx.z == 0 && warp == 0) {
        attend_keep(args, r); /* over a position that no row's window has any more */
    }
}

uint32_t max_leaves_of(const struct ops_device *dev)
{
    return (dev->max_attended + LEAF - 1) / LEAF;
}

uint32_t groups_of(const struct ops_dims *d)
{
    return (d->n_heads + HEADS - 1) / HEADS;
}

} /* namespace */

bool cuda_attend_tensor_serves(const struct ops_dims *d, struct error *why)
{
    const uint32_t n_plain = d->head_dim - d->rope_dim;
    if (d->exact || d->entry_kind != FORMATS_ENTRY_PACKED) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it multiplies bfloat16 values, exact arithmetic has others") == STATUS_OK;
    }
    if (d->head_dim % CHANNELS || d->head_dim > MOST_CHANNELS || d->rope_dim % 8 ||
        n_plain % FORMATS_KV_GROUP || n_plain > BODY_PIECES * 64 || d->ring < d->window) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it takes heads of up to %d channels by the %d, up to %d of them not "
                         "rotated, and a ring as long as the window: not %u, %u, %u for %u",
                         MOST_CHANNELS, CHANNELS, BODY_PIECES * 64, d->head_dim, n_plain, d->ring,
                         d->window) == STATUS_OK;
    }
    return true;
}

size_t cuda_attend_tensor_floats(const struct ops_device *dev)
{
    const size_t a_row = groups_of(&dev->d) * (size_t)max_leaves_of(dev);
    return cuda_attend_tensor_serves(&dev->d, NULL) ? a_row * (sizeof(leaf_sums) / sizeof(float))
                                                    : 0;
}

bool cuda_attend_tensor_room(struct ops_device *dev)
{
    bool ok = true;
    if (!cuda_attend_tensor_serves(&dev->d, NULL)) {
        return true;
    }
    dev->leaf_arrived =
        static_cast<uint32_t *>(cuda_room(dev, dev->limits.n_rows, groups_of(&dev->d), &ok));
    return ok && (dev->limits.only_plan ||
                  cuda_kept(dev,
                            cudaFuncSetAttribute(attend_tensor_kernel,
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 (int)sizeof(shared_leaf)),
                            "shared memory for attend"));
}

void cuda_attend_tensor(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *q, const float *kv_rows,
                        const struct ops_selection *selection, const struct ops_kv *kv,
                        float *ret_o)
{
    tensor_args args;
    static_cast<attend_args &>(args) = attend_args_of(dev, layer, q, kv_rows, selection, kv, ret_o);
    args.leaves = reinterpret_cast<leaf_sums *>(dev->attention);
    args.arrived = dev->leaf_arrived;
    args.max_leaves = max_leaves_of(dev);
    args.keeps = kv->stores_window && rows->n_rows == rows->n_seqs;
    const size_t a_row = cuda_attend_tensor_floats(dev);
    const size_t turn = a_row ? dev->attention_floats / a_row : 0;
    if (turn == 0 || args.max_leaves * HEADS * sizeof(float) > sizeof(entries_or_weights)) {
        cuda_failed(dev, STATUS_INVALID, "attend: no room for %u leaves of a row", args.max_leaves);
        return;
    }
    for (uint32_t row = 0, n; row < rows->n_rows; row += n) {
        n = rows->n_rows - row < turn ? rows->n_rows - row : (uint32_t)turn;
        args.row_first = row;
        cuda_run(dev, "attend", attend_tensor_kernel, dim3(args.max_leaves, n, groups_of(&dev->d)),
                 THREADS, sizeof(shared_leaf), args);
    }
    if (kv->stores_window && !args.keeps) {
        cuda_attend_keep(dev, args);
    }
}
