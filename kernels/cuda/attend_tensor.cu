/* Attention on tensor cores, one launch: a block a leaf of a row's entries.
 *
 * Entries are e4m3 times a power of two and bfloat16, queries bfloat16, so every product of a logit
 * is exact; logits, exponentials and sums are fp32. A block takes LEAF entries of a row for HEADS
 * heads: it decodes them once, to bfloat16 in shared memory, where they serve as keys and as
 * values. Each warp multiplies CHANNELS of the channels for all entries, the warps' sums are added
 * in turn, and each leaf has its own maximum, sum of exponentials and weighted sum of entries.
 * Exponentials are multiplied as two bfloat16 values, the second what the first leaves.
 *
 * Then the leaves are added up in order, each times e^(its maximum - the largest), the sink among
 * them, and the sums rotated back. Where a launch is so small that the card holds all its blocks at
 * once, those of a row and its heads wait until all of them have come, and each adds up a share of
 * the channels; else the last to come does it all. Either way what a row gets depends on its own
 * entries alone, whatever the card and whoever else is in the call; long calls go through the
 * leaves' room in turns.
 *
 * One row is a chain of loads, each of which costs more than all arithmetic: the row's sequence and
 * the numbers of its chosen entries, pages, entries, then what other blocks left. So a thread asks
 * for all that it can know of before it looks at the first.
 *
 * Bound: an output's sum within 2^-16 of the sum of its terms' sizes (what two bfloat16 leave of an
 * exponential, 2^-17, and the sums' roundings), beside the logits' 2^-19 of theirs.
 */
#include "kernels/cuda/attend.cuh"
#include "kernels/cuda/group.h"
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
    BODY_PIECES = 7, /* most units of e4m3 that a thread decodes of an entry */
    REST_PIECES = 2  /* and eights of bfloat16 */
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
    bool keeps;   /* every row is a sequence's only one, and the window takes it here */
    bool spreads; /* a row's blocks wait for each other, and each adds up a share of the outputs */
};

union entries_or_weights {
    uint16_t entry[LEAF][PADDED];
    float weight[1]; /* [leaves, HEADS], then the leaves' sums of exponentials */
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

/* A quarter of an entry, thread q of four: every fourth unit of 16 channels, and of the eights that
 * are rotated. All loads of it are under way before the first is looked at. */
struct packed {
    uint2 body[BODY_PIECES][2], rest[REST_PIECES][2];
    uint32_t scale[BODY_PIECES];
};

__device__ __forceinline__ void load_packed(const cache_view &v, struct cache_at at, uint32_t q,
                                            bool is_there, packed *ret)
{
    const uint32_t n_plain = v.head_dim - v.rope_dim;
    const uint2 *body = reinterpret_cast<const uint2 *>(at.body);
#pragma unroll
    for (uint32_t i = 0; i < BODY_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 16;
        ret->body[i][0] = ret->body[i][1] = make_uint2(0, 0);
        ret->scale[i] = 0;
        if (is_there && ch < n_plain) {
            ret->body[i][0] = body[ch / 8];
            ret->body[i][1] = body[ch / 8 + 1];
            ret->scale[i] = at.scales[ch / FORMATS_KV_GROUP];
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < REST_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 8;
        ret->rest[i][0] = ret->rest[i][1] = make_uint2(0, 0);
        if (is_there && ch < v.rope_dim) {
            ret->rest[i][0] = body[(n_plain + 2 * ch) / 8];
            ret->rest[i][1] = body[(n_plain + 2 * ch) / 8 + 1];
        }
    }
}

/* What was not there is zeroes: then all of it is. */
__device__ __forceinline__ void store_packed(const cache_view &v, const packed &p, uint32_t q,
                                             uint16_t *to)
{
    const uint32_t n_plain = v.head_dim - v.rope_dim;
#pragma unroll
    for (uint32_t i = 0; i < BODY_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 16;
        const uint32_t words[4] = {p.body[i][0].x, p.body[i][0].y, p.body[i][1].x, p.body[i][1].y};
        uint32_t w[8];
        if (ch >= n_plain) {
            continue;
        }
        decode(words, p.scale[i], w);
        uint4 *at16 = reinterpret_cast<uint4 *>(to + ch);
        at16[0] = make_uint4(w[0], w[1], w[2], w[3]);
        at16[1] = make_uint4(w[4], w[5], w[6], w[7]);
    }
#pragma unroll
    for (uint32_t i = 0; i < REST_PIECES; i++) {
        const uint32_t ch = (4 * i + q) * 8;
        if (ch < v.rope_dim) {
            *reinterpret_cast<uint4 *>(to + n_plain + ch) =
                make_uint4(p.rest[i][0].x, p.rest[i][0].y, p.rest[i][1].x, p.rest[i][1].y);
        }
    }
}

/* Where the thread's entry lies, for one that is packed. The number of a chosen entry is asked for
 * beside the sequence, so that its page follows at once. */
__device__ __forceinline__ struct cache_at packed_at(const tensor_args &args,
                                                     const struct attended &at, uint32_t a)
{
    uint32_t j = a - at.n_window;
    if (a < at.n_window) {
        return cache_window_at(args.v, at.seq.slot, at.first + a);
    }
    j = at.chosen ? at.chosen[j] : j;
    return cache_entry_at(args.v, at.seq.pages, j);
}

/* Entry e of the leaf, a row of this call, by a whole warp. */
__device__ __forceinline__ void load_fresh(const tensor_args &args, size_t row, uint16_t *to)
{
    const float *from = args.kv_rows + row * args.v.head_dim;
    float4 x[MOST_CHANNELS / 128];
#pragma unroll
    for (uint32_t i = 0; i < MOST_CHANNELS / 128; i++) {
        const uint32_t ch = 128 * i + 4 * cuda_lane();
        x[i] = ch < args.v.head_dim ? *reinterpret_cast<const float4 *>(from + ch)
                                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (uint32_t i = 0; i < MOST_CHANNELS / 128; i++) {
        const uint32_t ch = 128 * i + 4 * cuda_lane();
        if (ch < args.v.head_dim) {
            *reinterpret_cast<uint2 *>(to + ch) =
                make_uint2(arch_pair_bf16(x[i].x, x[i].y), arch_pair_bf16(x[i].z, x[i].w));
        }
    }
}

/* The leaf's entries; behind the last, zeroes. */
__device__ __forceinline__ void load_entries(const tensor_args &args, const struct attended &at,
                                             uint32_t first, uint16_t (*to)[PADDED])
{
    const uint32_t e = threadIdx.x / 4, q = threadIdx.x % 4, a = first + e;
    static_assert((int)THREADS == 4 * (int)LEAF, "four threads an entry");
    const uint32_t n_kept = at.seq.position > at.first ? at.seq.position - at.first : 0;
    const uint32_t fresh = n_kept < at.n_window ? n_kept : at.n_window; /* .. n_window - 1 */
    const bool is_packed = a < at.n && (a < fresh || a >= at.n_window);
    struct cache_at lies = {};
    packed p;
    if (is_packed) {
        lies = packed_at(args, at, a);
    }
    load_packed(args.v, lies, q, is_packed, &p);
    const uint32_t of_warp = first + threadIdx.x / CUDA_WARP * 8, behind = of_warp + 8;
    const uint32_t end = behind < at.n_window ? behind : at.n_window;
#pragma unroll 2
    for (uint32_t i = of_warp > fresh ? of_warp : fresh; i < end; i++) {
        load_fresh(args, at.seq.first_row + (at.first + i - at.seq.position), to[i - first]);
    }
    if (is_packed || a >= at.n) {
        store_packed(args.v, p, q, to[e]);
    }
}

/* The warp's channels of the heads' queries, as operands. */
struct queries {
    uint32_t a[CHANNELS / 16][4];
};

__device__ __forceinline__ void load_queries(const tensor_args &args, uint32_t r, uint32_t h0,
                                             queries *ret)
{
    const uint32_t g = cuda_lane() / 4, t = cuda_lane() % 4;
    const uint32_t ch0 = threadIdx.x / CUDA_WARP * CHANNELS;
    const bool low = ch0 < args.v.head_dim && h0 + g < args.n_heads;
    const bool high = ch0 < args.v.head_dim && h0 + g + 8 < args.n_heads;
    const float *q = args.q + ((size_t)r * args.n_heads + h0 + g) * args.v.head_dim + ch0 + 2 * t;
    float2 x[CHANNELS / 16][4];
#pragma unroll
    for (uint32_t k = 0; k < CHANNELS / 16; k++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const float *from = q + (size_t)(i % 2 * 8) * args.v.head_dim + 16 * k + i / 2 * 8;
            x[k][i] = (i % 2 ? high : low) ? *reinterpret_cast<const float2 *>(from)
                                           : make_float2(0.0f, 0.0f);
        }
    }
#pragma unroll
    for (uint32_t k = 0; k < CHANNELS / 16; k++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            ret->a[k][i] = arch_pair_bf16(x[k][i].x, x[k][i].y);
        }
    }
}

/* Where a head has the parts of four entries: so that neither who writes nor who reads them finds
 * others on its banks. */
__device__ __forceinline__ uint32_t part_at(uint32_t h, uint32_t e)
{
    return e ^ h % 4 * 8;
}

/* The warp's channels of all dot products, to part[warp]. */
__device__ __forceinline__ void partial_logits(const tensor_args &args, const queries &q,
                                               const uint16_t (*entry)[PADDED], float (*part)[LEAF])
{
    const uint32_t g = cuda_lane() / 4, t = cuda_lane() % 4;
    const uint32_t ch0 = threadIdx.x / CUDA_WARP * CHANNELS;
    float sums[N_TILES][4] = {};
    if (ch0 < args.v.head_dim) {
#pragma unroll
        for (uint32_t k = 0; k < CHANNELS / 16; k++) {
#pragma unroll
            for (uint32_t nt = 0; nt < N_TILES; nt++) {
                const uint16_t *b = entry[8 * nt + g] + ch0 + 16 * k + 2 * t;
                arch_mma_bf16(sums[nt], q.a[k][0], q.a[k][1], q.a[k][2], q.a[k][3], word_at(b),
                              word_at(b + 8));
            }
        }
    }
#pragma unroll
    for (uint32_t nt = 0; nt < N_TILES; nt++) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i += 2) {
            const uint32_t h = g + i / 2 * 8;
            *reinterpret_cast<float2 *>(&part[h][part_at(h, 8 * nt + 2 * t)]) =
                make_float2(sums[nt][i], sums[nt][i + 1]);
        }
    }
}

/* Sixteen threads a head: its logits of the leaf become exponentials in two parts. */
__device__ __forceinline__ void leaf_softmax(const tensor_args &args, uint32_t n, shared_leaf *s,
                                             leaf_sums *to)
{
    enum { EACH = LEAF / 16 };
    const uint32_t h = threadIdx.x / 16, a0 = threadIdx.x % 16 * EACH;
    float l[EACH], sums[EACH], most = -INFINITY, z = 0.0f;
    static_assert((int)EACH == 4, "a float4 of each part");
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float4 x = *reinterpret_cast<const float4 *>(&s->part[w][h][part_at(h, a0)]);
        sums[0] = w ? sums[0] + x.x : x.x;
        sums[1] = w ? sums[1] + x.y : x.y;
        sums[2] = w ? sums[2] + x.z : x.z;
        sums[3] = w ? sums[3] + x.w : x.w;
    }
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        l[i] = sums[i] * args.scale;
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

/* Four channels of a row's head of leaves first .., as many as there are of N. */
template <int N>
__device__ __forceinline__ void load_leaves(const leaf_sums *leaves, uint32_t n_leaves,
                                            uint32_t first, uint32_t h, uint32_t ch, bool is_there,
                                            float4 *ret)
{
#pragma unroll
    for (uint32_t k = 0; k < N; k++) {
        ret[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (is_there && first + k < n_leaves) {
            ret[k] = __ldcg(reinterpret_cast<const float4 *>(&leaves[first + k].sum[h][ch]));
        }
    }
}

/* What each leaf counts of each head, and the heads' denominators: sixteen threads a head. */
__device__ __forceinline__ void weigh_leaves(const tensor_args &args, uint32_t h0,
                                             const leaf_sums *leaves, uint32_t n_leaves,
                                             float *weight, float *z)
{
    const uint32_t h = threadIdx.x / 16, first = threadIdx.x % 16;
    const float sink = h0 + h < args.n_heads ? args.sink[h0 + h] : 0.0f;
    float *of_leaf = weight + n_leaves * HEADS, most = sink, sum = 0.0f;
    for (uint32_t l = first; l < n_leaves; l += 16) {
        const float m = __ldcg(&leaves[l].most[h]), leaf_z = __ldcg(&leaves[l].z[h]);
        weight[l * HEADS + h] = m;
        of_leaf[l * HEADS + h] = leaf_z;
        most = m > most || m != m ? m : most;
    }
#pragma unroll
    for (int step = 8; step >= 1; step /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, most, step);
        most = other > most || other != other ? other : most;
    }
    for (uint32_t l = first; l < n_leaves; l += 16) {
        weight[l * HEADS + h] = cpu_exp(weight[l * HEADS + h] - most);
    }
    __syncwarp();
    if (first == 0) {
        for (uint32_t l = 0; l < n_leaves; l++) {
            sum = __fmaf_rn(weight[l * HEADS + h], of_leaf[l * HEADS + h], sum);
        }
        z[h] = sum + cpu_exp(sink - most);
    }
}

/* Of a row's outputs of HEADS heads, fours of channels first .. end - 1: its leaves in order. A
 * thread has ITEMS fours at a time, and loads of AHEAD leaves of each under way. */
template <int ITEMS, int AHEAD>
__device__ __forceinline__ void combine(const tensor_args &args, uint32_t r, uint32_t h0,
                                        const leaf_sums *leaves, uint32_t n_leaves, uint32_t first,
                                        uint32_t end, float *weight)
{
    __shared__ float z[HEADS];
    const uint32_t n_quads = args.v.head_dim / 4;
    bool is_weighed = false;
    for (uint32_t base = first; base < end || !is_weighed; base += ITEMS * THREADS) {
        float4 x[ITEMS][AHEAD];
        float sum[ITEMS][4] = {};
        uint32_t h[ITEMS], ch[ITEMS];
        bool is_there[ITEMS];
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            const uint32_t i = base + k * THREADS + threadIdx.x;
            h[k] = i / n_quads;
            ch[k] = i % n_quads * 4;
            is_there[k] = i < end && h0 + h[k] < args.n_heads;
            load_leaves<AHEAD>(leaves, n_leaves, 0, h[k], ch[k], is_there[k], x[k]);
        }
        if (!is_weighed) { /* the first loads are under way */
            weigh_leaves(args, h0, leaves, n_leaves, weight, z);
            __syncthreads();
            is_weighed = true;
        }
#pragma unroll
        for (uint32_t k = 0; k < ITEMS; k++) {
            if (!is_there[k]) {
                continue;
            }
            for (uint32_t l = 0; l < n_leaves; l += AHEAD) {
                if (l > 0) {
                    load_leaves<AHEAD>(leaves, n_leaves, l, h[k], ch[k], true, x[k]);
                }
#pragma unroll
                for (uint32_t j = 0; j < AHEAD; j++) {
                    if (l + j < n_leaves) {
                        const float w = weight[(l + j) * HEADS + h[k]];
                        sum[k][0] = __fmaf_rn(w, x[k][j].x, sum[k][0]);
                        sum[k][1] = __fmaf_rn(w, x[k][j].y, sum[k][1]);
                        sum[k][2] = __fmaf_rn(w, x[k][j].z, sum[k][2]);
                        sum[k][3] = __fmaf_rn(w, x[k][j].w, sum[k][3]);
                    }
                }
            }
            const size_t to = ((size_t)r * args.n_heads + h0 + h[k]) * args.v.head_dim + ch[k];
            *reinterpret_cast<float4 *>(args.o + to) = attend_finish(
                args, sum[k], z[h[k]], args.rope + (size_t)r * args.v.rope_dim, ch[k]);
        }
    }
}

/* Blocks (leaf, row of this turn, group of heads); if the window takes rows here, one more than
 * there are leaves, and that one does it. */
__global__ void __launch_bounds__(THREADS, 2)
    attend_tensor_kernel(const __grid_constant__ tensor_args args)
{
    cuda_grid_begin();
    extern __shared__ uint4 attend_shared[];
    __shared__ uint32_t before_shared;
    shared_leaf *s = reinterpret_cast<shared_leaf *>(attend_shared);
    const uint32_t r = args.row_first + blockIdx.y, h0 = blockIdx.z * HEADS;
    const uint32_t leaf = blockIdx.x, first = leaf * LEAF, warp = threadIdx.x / CUDA_WARP;
    if (args.keeps && leaf == gridDim.x - 1) {
        if (blockIdx.z == 0) { /* over a position that no row's window has any more */
            attend_keep(args, r, warp, WARPS);
        }
        return;
    }
    const struct attended at = attended_of(args, r);
    const uint32_t n_leaves = (at.n + LEAF - 1) / LEAF;
    if (first >= at.n) {
        return;
    }
    const size_t of_row = (size_t)blockIdx.y * gridDim.z + blockIdx.z;
    leaf_sums *leaves = args.leaves + of_row * args.max_leaves, *mine = leaves + leaf;
    uint32_t *arrived = args.arrived + of_row, before = 0;
    queries q;
    load_queries(args, r, h0, &q);
    load_entries(args, at, first, s->at.entry);
    __syncthreads();
    partial_logits(args, q, s->at.entry, s->part[warp]);
    __syncthreads();
    leaf_softmax(args, at.n - first < LEAF ? at.n - first : (uint32_t)LEAF, s, mine);
    __syncthreads();
    weighted_sums(args, s, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); /* of what the block wrote: the barrier lies between */
        before = atomicAdd(arrived, 1u);
        if (args.spreads && before != n_leaves - 1) {
            while (arch_load_acquire(arrived) < n_leaves) {
            }
        }
        __threadfence();
        before_shared = before;
    }
    __syncthreads();
    uint32_t n_fours = args.v.head_dim / 4 * HEADS, four = 0;
    if (args.spreads) {
        four = n_fours * leaf / n_leaves;
        n_fours = n_fours * (leaf + 1) / n_leaves;
    } else if (before_shared != n_leaves - 1) {
        return;
    }
    if (n_leaves <= 4) {
        combine<3, 4>(args, r, h0, leaves, n_leaves, four, n_fours, s->at.weight);
    } else {
        combine<1, 10>(args, r, h0, leaves, n_leaves, four, n_fours, s->at.weight);
    }
    /* For the next launch, by the last that looks at it. */
    if (threadIdx.x == 0 && (!args.spreads || atomicAdd(arrived, 1u) == 2 * n_leaves - 1)) {
        *arrived = 0;
    }
}

uint32_t max_leaves_of(const struct ops_device *dev)
{
    return (dev->max_attended + LEAF - 1) / LEAF;
}

/* That a row of such a layer can have. */
uint32_t leaves_of(const struct ops_device *dev, uint32_t ratio)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t chosen = d->index_topk < dev->max_entries ? d->index_topk : dev->max_entries;
    const uint32_t most = ratio == 0                  ? d->window
                          : ratio == OPS_SPARSE_RATIO ? d->window + chosen
                                                      : dev->max_attended;
    return (most + LEAF - 1) / LEAF;
}

/* No other rank shares the GPU, so that blocks that wait never hold what another's wait for. */
bool is_alone(const struct ops_device *dev)
{
    return !dev->group || cuda_group_has_parts(dev->group);
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
        d->rope_dim > REST_PIECES * 32 || n_plain % FORMATS_KV_GROUP ||
        n_plain > BODY_PIECES * 64 || d->ring < d->window) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it takes heads of up to %d channels by the %d, up to %d of them not "
                         "rotated and %d rotated, and a ring as long as the window: not %u, %u "
                         "and %u, %u for %u",
                         MOST_CHANNELS, CHANNELS, BODY_PIECES * 64, REST_PIECES * 32, d->head_dim,
                         n_plain, d->rope_dim, d->ring, d->window) == STATUS_OK;
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
    if (!ok || dev->limits.only_plan) {
        return ok;
    }
    int n = 0;
    ok = cuda_kept(dev,
                   cudaFuncSetAttribute(attend_tensor_kernel,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)sizeof(shared_leaf)),
                   "shared memory for attend") &&
         cuda_kept(dev,
                   cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, attend_tensor_kernel, THREADS,
                                                                 sizeof(shared_leaf)),
                   "room for attend");
    dev->attend_blocks_a_sm = ok ? (uint32_t)n : 0;
    return ok;
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
    const uint32_t n_groups = groups_of(&dev->d);
    const uint32_t n_blocks = leaves_of(dev, layer->place.ratio) + (args.keeps ? 1 : 0);
    const size_t fit = is_alone(dev) ? (size_t)dev->n_sms * dev->attend_blocks_a_sm : 0;
    const size_t a_row = cuda_attend_tensor_floats(dev);
    const size_t turn = a_row ? dev->attention_floats / a_row : 0;
    if (turn == 0 || 2 * args.max_leaves * HEADS * sizeof(float) > sizeof(entries_or_weights)) {
        cuda_failed(dev, STATUS_INVALID, "attend: no room for %u leaves of a row", args.max_leaves);
        return;
    }
    for (uint32_t row = 0, n; row < rows->n_rows; row += n) {
        n = rows->n_rows - row < turn ? rows->n_rows - row : (uint32_t)turn;
        args.row_first = row;
        args.spreads = (size_t)n * n_groups * n_blocks <= fit;
        cuda_run(dev, "attend", attend_tensor_kernel, dim3(n_blocks, n, n_groups), THREADS,
                 sizeof(shared_leaf), args);
    }
    if (kv->stores_window && !args.keeps) {
        cuda_attend_keep(dev, args);
    }
}
