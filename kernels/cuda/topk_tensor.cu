/* topk on tensor cores, one launch: scores of 16 entries by all heads at a time, and the block that
 * ends a row's last scores picks the best of them.
 *
 * A query is e2m1 times a power of two for 32 channels, as a key is: bfloat16 holds both, products
 * are exact, and so are sums as long as the powers of two of a head's groups differ by less than
 * 2^11. Then a dot product has the CPU's bits whatever the order of its sum; beyond that it is
 * within 2^-18 of the products' sizes. What follows has the CPU's order: heads one by one, each
 * product rounded.
 *
 * Who picks reads a long row's scores once, two in a register, and finds the k-th best in two steps
 * of a byte, since they are bfloat16; most share their upper byte, so lanes count in copies.
 *
 * Of an mma the keys are A (rows g and g + 8 are two entries), the heads B. The order of channels
 * in it is free: lane t takes word t of a group's four, eight channels, of keys and of queries.
 *
 * SCALED: keys are multiplied as pages have them, elements and scales, by arch_mma_mx4, two groups
 * at a time, for what a lane's word t is there is just that. Queries are put back into e2m1 and a
 * scale, which loses nothing: a group's scale that is found again is the one it had or a smaller
 * power of two, of which the elements are multiples of the same kind. The sums are of the same
 * exact products; where their powers of two lie farther apart, what an mma's sum keeps decides
 * (arch.cuh).
 */
#include "kernels/cuda/tensor.cuh"
#include "kernels/cuda/topk.cuh"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / CUDA_WARP,
    KEYS = 16, /* of a warp at a time */
    MAX_HEADS = 64,
    MAX_GROUPS = 4, /* of 32 channels */
    N_TILES = MAX_HEADS / 8,
    PAIR_STRIDE = MAX_HEADS / 2 + 1, /* of a key's products, two a word: rows on other banks */
    COPIES = 8,                      /* of counts */
    AT_ONCE = 8                      /* scores that a thread asks for before it looks at one */
};

/* Of the row. */
template <bool SCALED> struct queries;
template <> struct queries<false> {
    uint4 q[MAX_GROUPS][N_TILES][CUDA_WARP]; /* B of two mma */
};
template <> struct queries<true> {
    uint2 q[MAX_GROUPS / 2][N_TILES][CUDA_WARP]; /* B of one */
    alignas(uint32_t) uint8_t scales[MAX_HEADS][MAX_GROUPS];
};

template <bool SCALED> struct tile {
    queries<SCALED> of_row;
    uint32_t products[WARPS][KEYS][PAIR_STRIDE];
};

__device__ __forceinline__ uint32_t entries_of(const topk_args &args, uint32_t r)
{
    return (args.rows.positions[r] + 1) / OPS_SPARSE_RATIO;
}

/* The row's queries as operands; heads beyond the last are 0. */
__device__ __forceinline__ void load_queries(const topk_args &args, uint32_t r,
                                             queries<false> *shared)
{
    const uint32_t n_ch = args.v.index_dim, n_groups = n_ch / FORMATS_KEY_GROUP;
    const float *q = args.iq + (size_t)r * args.index_heads * n_ch;
    for (uint32_t i = threadIdx.x; i < n_groups * N_TILES * CUDA_WARP; i += THREADS) {
        const uint32_t lane = i % CUDA_WARP, nt = i / CUDA_WARP % N_TILES;
        const uint32_t group = i / (CUDA_WARP * N_TILES), head = nt * 8 + lane / 4;
        uint4 words = make_uint4(0, 0, 0, 0);
        if (head < args.index_heads) {
            const float4 *x = reinterpret_cast<const float4 *>(
                q + (size_t)head * n_ch + group * FORMATS_KEY_GROUP + lane % 4 * 8);
            const float4 a = x[0], b = x[1];
            words = make_uint4(arch_pair_bf16(a.x, b.x), arch_pair_bf16(a.y, b.y),
                               arch_pair_bf16(a.z, b.z), arch_pair_bf16(a.w, b.w));
        }
        shared->q[group][nt][lane] = words;
    }
}

/* The same in e2m1: each four lanes find the scale of a head's group. What is not there is 0. */
__device__ __forceinline__ void load_queries(const topk_args &args, uint32_t r,
                                             queries<true> *shared)
{
    const uint32_t n_ch = args.v.index_dim, n_groups = n_ch / FORMATS_KEY_GROUP;
    const uint32_t lane = cuda_lane(), nt = threadIdx.x / CUDA_WARP, head = nt * 8 + lane / 4;
    const float *q = args.iq + ((size_t)r * args.index_heads + head) * n_ch + lane % 4 * 8;
    static_assert((int)THREADS == (int)N_TILES * CUDA_WARP, "a warp has eight heads");
    for (uint32_t group = 0; group < MAX_GROUPS; group++) {
        const bool is_there = head < args.index_heads && group < n_groups;
        float x[8], most = 6.0f * 1.17549435e-38f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = is_there ? q[group * FORMATS_KEY_GROUP + i] : 0.0f;
            most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        }
#pragma unroll
        for (int m = 1; m <= 2; m *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, most, m);
            most = other > most ? other : most;
        }
        const uint8_t code = e8m0_scale_for(most, 1.0f / 6.0f);
        const float inverse = 1.0f / e8m0_decode(code);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            word |= (uint32_t)e2m1_encode(x[i] * inverse) << 4 * i;
        }
        uint2 *to = &shared->q[group / 2][nt][lane];
        *(group % 2 ? &to->y : &to->x) = word;
        if (lane % 4 == 0) {
            shared->scales[head][group] = code;
        }
    }
}

/* Eight channels of a key, as a page has them: word i has channels i and i + 4. */
__device__ __forceinline__ void key_words(uint32_t eight, uint32_t scale, uint32_t *words)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t two = eight >> 4 * i;
        const uint32_t pair = (two << 6 & 0x01c001c0u) | (two << 12 & 0x80008000u);
        words[i] = arch_times_bf16(arch_times_bf16(pair, tensor_unit<CUDA_FP4_E8M0>::BACK), scale);
    }
}

/* relu(dot) w, each rounded: 16 bits. */
__device__ __forceinline__ uint32_t product_of(float dot, float w)
{
    dot = bf16_round(dot);
    return f32_bits(bf16_round((dot > 0.0f ? dot : 0.0f) * w)) >> 16;
}

/* sums += keys (entries g and g + 8 of the warp's) times all heads. */
__device__ __forceinline__ void add_keys(const cache_at *at, uint32_t n_groups, uint32_t n_tiles,
                                         const queries<false> &shared, float (*sums)[4])
{
    const uint32_t lane = cuda_lane(), t = lane % 4;
#pragma unroll
    for (uint32_t group = 0; group < MAX_GROUPS; group++) {
        if (group >= n_groups) {
            continue;
        }
        uint32_t k[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t word = reinterpret_cast<const uint32_t *>(at[i].body)[group * 4 + t];
            key_words(word, tensor_scale_pair(at[i].scales[group]), k[i]);
        }
#pragma unroll
        for (uint32_t nt = 0; nt < N_TILES; nt++) {
            if (nt < n_tiles) {
                const uint4 q = shared.q[group][nt][lane];
                arch_mma_bf16(sums[nt], k[0][0], k[1][0], k[0][1], k[1][1], q.x, q.y);
                arch_mma_bf16(sums[nt], k[0][2], k[1][2], k[0][3], k[1][3], q.z, q.w);
            }
        }
    }
}

/* Groups 2 PAIR and 2 PAIR + 1. */
template <int PAIR>
__device__ __forceinline__ void add_key_pair(const cache_at *at, uint32_t scales, uint32_t n_groups,
                                             uint32_t n_tiles, const queries<true> &shared,
                                             float (*sums)[4])
{
    const uint32_t lane = cuda_lane(), first = 2 * PAIR * 4 + lane % 4;
    const uint32_t *low = reinterpret_cast<const uint32_t *>(at[0].body) + first;
    const uint32_t *high = reinterpret_cast<const uint32_t *>(at[1].body) + first;
    const bool is_two = 2 * PAIR + 1 < n_groups;
    const uint32_t k[4] = {low[0], high[0], is_two ? low[4] : 0, is_two ? high[4] : 0};
#pragma unroll
    for (uint32_t nt = 0; nt < N_TILES; nt++) {
        if (nt < n_tiles) {
            const uint2 two = shared.q[PAIR][nt][lane];
            const uint32_t q[2] = {two.x, two.y};
            arch_mma_mx4<2 * PAIR, 0, 2 * PAIR, 0>(
                sums[nt], k, q, scales,
                *reinterpret_cast<const uint32_t *>(shared.scales[nt * 8 + lane / 4]));
        }
    }
}

__device__ __forceinline__ void add_keys(const cache_at *at, uint32_t n_groups, uint32_t n_tiles,
                                         const queries<true> &shared, float (*sums)[4])
{
    const uint8_t *codes = cuda_lane() % 2 ? at[1].scales : at[0].scales;
    uint32_t scales = 0;
#pragma unroll
    for (uint32_t group = 0; group < MAX_GROUPS; group++) {
        scales |= (group < n_groups ? codes[group] : 127u) << 8 * group;
    }
    add_key_pair<0>(at, scales, n_groups, n_tiles, shared, sums);
    if (n_groups > 2) {
        add_key_pair<1>(at, scales, n_groups, n_tiles, shared, sums);
    }
}

/* Scores of entries base .. base + 15 of a row with n, by one warp. */
template <bool SCALED>
__device__ __forceinline__ void score_keys(const topk_args &args, uint32_t r, uint32_t base,
                                           uint32_t n, const queries<SCALED> &shared,
                                           uint32_t (*products)[PAIR_STRIDE])
{
    const uint32_t lane = cuda_lane(), g = lane / 4, t = lane % 4;
    const uint32_t n_groups = args.v.index_dim / FORMATS_KEY_GROUP;
    const uint32_t n_tiles = (args.index_heads + 7) / 8;
    const uint32_t *pages = args.rows.seqs[args.rows.seq_of[r]].pages;
    cache_at at[2];
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t e = base + g + 8 * i;
        at[i] = cache_key_at(args.v, pages, e < n ? e : n - 1);
    }
    float sums[N_TILES][4];
#pragma unroll
    for (int nt = 0; nt < N_TILES; nt++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[nt][i] = 0.0f;
        }
    }
    add_keys(at, n_groups, n_tiles, shared, sums);
    const float *w = args.iw + (size_t)r * args.index_heads;
#pragma unroll
    for (uint32_t nt = 0; nt < N_TILES; nt++) {
        const uint32_t h = nt * 8 + 2 * t;
        const float w0 = h < args.index_heads ? w[h] : 0.0f;
        const float w1 = h + 1 < args.index_heads ? w[h + 1] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            products[g + 8 * i][h / 2] =
                product_of(sums[nt][2 * i], w0) | product_of(sums[nt][2 * i + 1], w1) << 16;
        }
    }
    __syncwarp();
    if (lane < KEYS && base + lane < n) {
        float sum = 0.0f;
        for (uint32_t h = 0; h < args.index_heads; h += 2) {
            const uint32_t pair = products[lane][h / 2];
            sum += f32_from_bits(pair << 16);
            if (h + 1 < args.index_heads) {
                sum += f32_from_bits(pair & 0xffff0000u);
            }
        }
        args.scores[(size_t)(r - args.row_first) * args.max_entries + base + lane] =
            bf16_round(sum);
    }
    __syncwarp();
}

struct selecting {
    uint32_t some[COPIES][256 + 1]; /* counts of lanes that differ by COPIES, each on other banks */
    uint32_t count[256], above[WARPS], equal[WARPS];
    select_state state;
};

/* Scores are bfloat16: of a word that orders as they do the upper half says it all. */
__device__ __forceinline__ uint32_t order_of(const float *score)
{
    return sortable(__ldcg(score)) >> 16;
}

/* The best k of n scores, n > k, by the whole block. Up to CACHE words a thread stay with it, two
 * in a register; 0: all are read again. A warp has a run of the entries. */
template <int CACHE>
__device__ __forceinline__ void select(const float *scores, uint32_t n, uint32_t k,
                                       selecting *shared, uint32_t *index)
{
    const uint32_t lane = cuda_lane(), warp = threadIdx.x / CUDA_WARP;
    const uint32_t steps = (n + THREADS - 1) / THREADS, first = warp * steps * CUDA_WARP + lane;
    uint32_t kept[CACHE ? CACHE / 2 : 1];
#pragma unroll
    for (int j = 0; j < CACHE; j++) {
        const uint32_t i = first + j * CUDA_WARP;
        const uint32_t word = (uint32_t)j < steps && i < n ? order_of(scores + i) : 0;
        kept[j / 2] = j % 2 ? kept[j / 2] | word << 16 : word;
    }
    /* Calls fn(entry, word) for each of the thread's; entries from n on are not there. */
    auto each = [&](auto fn) {
        if constexpr (CACHE > 0) {
#pragma unroll
            for (int j = 0; j < CACHE; j++) {
                if ((uint32_t)j < steps) {
                    fn(first + j * CUDA_WARP, kept[j / 2] >> j % 2 * 16 & 0xffffu);
                }
            }
        } else {
            for (uint32_t j = 0; j < steps; j += AT_ONCE) {
                uint32_t words[AT_ONCE];
#pragma unroll
                for (uint32_t m = 0; m < AT_ONCE; m++) {
                    const uint32_t i = first + (j + m) * CUDA_WARP;
                    words[m] = j + m < steps && i < n ? order_of(scores + i) : 0;
                }
#pragma unroll
                for (uint32_t m = 0; m < AT_ONCE; m++) {
                    if (j + m < steps) {
                        fn(first + (j + m) * CUDA_WARP, words[m]);
                    }
                }
            }
        }
    };
    if (threadIdx.x == 0) {
        shared->state = {0, 0, k};
    }
    for (int shift = 8; shift >= 0; shift -= 8) {
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            shared->some[c][threadIdx.x] = 0;
        }
        __syncthreads();
        const uint32_t mask = shared->state.mask, prefix = shared->state.prefix;
        each([&](uint32_t i, uint32_t word) {
            if (i < n && (word & mask) == prefix) {
                atomicAdd(&shared->some[lane % COPIES][word >> shift & 255], 1u);
            }
        });
        __syncthreads();
        uint32_t count = 0;
#pragma unroll
        for (int c = 0; c < COPIES; c++) {
            count += shared->some[c][threadIdx.x];
        }
        shared->count[threadIdx.x] = count;
        __syncthreads();
        if (warp == 0) {
            select_byte(shared->count, shift, &shared->state);
        }
        __syncthreads();
    }
    const uint32_t limit = shared->state.prefix, ties = shared->state.wanted;
    uint32_t n_above = 0, n_equal = 0;
    each([&](uint32_t i, uint32_t word) {
        n_above += (uint32_t)__popc(__ballot_sync(0xffffffffu, i < n && word > limit));
        n_equal += (uint32_t)__popc(__ballot_sync(0xffffffffu, i < n && word == limit));
    });
    if (lane == 0) {
        shared->above[warp] = n_above;
        shared->equal[warp] = n_equal;
    }
    __syncthreads();
    n_above = n_equal = 0;
    for (uint32_t i = 0; i < warp; i++) {
        n_above += shared->above[i];
        n_equal += shared->equal[i];
    }
    each([&](uint32_t i, uint32_t word) {
        const bool is_above = i < n && word > limit, is_equal = i < n && word == limit;
        const uint32_t all_above = __ballot_sync(0xffffffffu, is_above);
        const uint32_t all_equal = __ballot_sync(0xffffffffu, is_equal);
        const uint32_t before = (1u << lane) - 1,
                       up = n_above + (uint32_t)__popc(all_above & before);
        const uint32_t level = n_equal + (uint32_t)__popc(all_equal & before);
        if (is_above || (is_equal && level < ties)) {
            index[up + (level < ties ? level : ties)] = i;
        }
        n_above += (uint32_t)__popc(all_above);
        n_equal += (uint32_t)__popc(all_equal);
    });
}

/* Blocks (row, share of its entries). arrived: zeroes, of each row of the launch, and left so. */
template <bool SCALED>
__global__ void __launch_bounds__(THREADS) topk_tensor_kernel(topk_args args, uint32_t *arrived)
{
    cuda_grid_begin();
    __shared__ tile<SCALED> shared;
    __shared__ selecting sel;
    __shared__ bool is_last;
    const uint32_t r = args.row_first + blockIdx.x, n = entries_of(args, r), k = args.index_topk;
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    uint32_t *index = args.selection.index + (size_t)r * k;
    if (n <= k) {
        for (uint32_t i = blockIdx.y * THREADS + threadIdx.x; i < n; i += gridDim.y * THREADS) {
            index[i] = i;
        }
        if (blockIdx.y == 0 && threadIdx.x == 0) {
            args.selection.n[r] = n;
        }
        return;
    }
    load_queries(args, r, &shared.of_row);
    __syncthreads();
    for (uint32_t base = (blockIdx.y * WARPS + warp) * KEYS; base < n;
         base += gridDim.y * WARPS * KEYS) {
        score_keys<SCALED>(args, r, base, n, shared.of_row, shared.products[warp]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = arch_count(arrived + blockIdx.x) == gridDim.y - 1;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    __threadfence();
    const float *scores = args.scores + (size_t)blockIdx.x * args.max_entries;
    if (n <= 8 * THREADS) {
        select<8>(scores, n, k, &sel, index);
    } else if (n <= 64 * THREADS) {
        select<64>(scores, n, k, &sel, index);
    } else {
        select<0>(scores, n, k, &sel, index);
    }
    if (threadIdx.x == 0) {
        args.selection.n[r] = k;
        arrived[blockIdx.x] = 0; /* for the next launch */
    }
}

template <bool SCALED>
void run(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
         const float *iq, const float *iw, const struct ops_kv *kv,
         struct ops_selection *ret_selection)
{
    topk_args args = topk_args_make(dev, layer, iq, iw, kv, ret_selection);
    const size_t turn = dev->attention_floats / dev->max_entries;
    const uint32_t n_shares = (dev->max_entries + WARPS * KEYS - 1) / (WARPS * KEYS);
    for (uint32_t row = 0, n; row < rows->n_rows; row += n) {
        n = rows->n_rows - row < turn ? rows->n_rows - row : (uint32_t)turn;
        const dim3 grid(n, attention_splits(dev, n, n_shares));
        args.row_first = row;
        cuda_run(dev, "topk", topk_tensor_kernel<SCALED>, grid, THREADS, 0, args,
                 dev->topk_arrived);
    }
}

} /* namespace */

void cuda_topk_tensor(struct ops_device *dev, const struct ops_rows *rows,
                      const struct ops_layer *layer, const float *iq, const float *iw,
                      const struct ops_kv *kv, struct ops_selection *ret_selection)
{
    run<false>(dev, rows, layer, iq, iw, kv, ret_selection);
}

void cuda_topk_scaled(struct ops_device *dev, const struct ops_rows *rows,
                      const struct ops_layer *layer, const float *iq, const float *iw,
                      const struct ops_kv *kv, struct ops_selection *ret_selection)
{
    run<true>(dev, rows, layer, iq, iw, kv, ret_selection);
}
