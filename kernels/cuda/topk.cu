/* Index scores of every visible entry, and the best of them.
 *
 * Scores go to scratch, for as many rows at a time as it holds; then a block for each row finds the
 * k-th largest word a byte at a time and writes what lies above it, and the first of what equals
 * it, in ascending order. Rows that may see no more than k entries take them all and have no
 * scores.
 */
#include "kernels/cuda/topk.cuh"

namespace
{

enum {
    SCORE_THREADS = 256,
    SCORE_WARPS = SCORE_THREADS / CUDA_WARP,
    SCORE_TILE = 32,   /* keys in shared memory at a time */
    SCORE_STRIDE = 40, /* of a head's products: the rows of a warp's four fall on other banks */
    SELECT_THREADS = 512,
    SELECT_WARPS = SELECT_THREADS / CUDA_WARP,
};

__global__ void __launch_bounds__(SCORE_THREADS) topk_scores_kernel(struct topk_args args)
{
    cuda_grid_begin();
    extern __shared__ float4 shared4[];
    uint32_t r = args.row_first + blockIdx.x, n_ch = args.v.index_dim, n_h = args.index_heads;
    uint32_t n = (args.rows.positions[r] + 1) / OPS_SPARSE_RATIO, lane = cuda_lane();
    if (n <= args.index_topk) {
        return;
    }
    float *tile = reinterpret_cast<float *>(shared4), *products = tile + SCORE_TILE * n_ch;
    const uint32_t *pages = args.rows.seqs[args.rows.seq_of[r]].pages;
    const float *q = args.iq + (size_t)r * n_h * n_ch, *w = args.iw + (size_t)r * n_h;
    for (uint32_t base = blockIdx.y * SCORE_TILE; base < n; base += gridDim.y * SCORE_TILE) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < SCORE_TILE * (n_ch / 8); i += SCORE_THREADS) {
            uint32_t e = i / (n_ch / 8), ch = i % (n_ch / 8) * 8;
            float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (base + e < n) {
                cache_key_load(args.v, cache_key_at(args.v, pages, base + e), ch, x);
            }
            shared4[(e * n_ch + ch) / 4] = make_float4(x[0], x[1], x[2], x[3]);
            shared4[(e * n_ch + ch) / 4 + 1] = make_float4(x[4], x[5], x[6], x[7]);
        }
        __syncthreads();
        const uint32_t n_columns = SCORE_TILE / DOTS_COLUMNS;
        uint32_t n_items = (n_h + DOTS_ROWS - 1) / DOTS_ROWS * n_columns;
        for (uint32_t item = threadIdx.x / CUDA_WARP; item < n_items; item += SCORE_WARPS) {
            uint32_t h = item / n_columns * DOTS_ROWS, e = item % n_columns * DOTS_COLUMNS;
            float dot = cuda_rounded(
                warp_dots(q + (size_t)h * n_ch, n_ch, n_h - h, tile + e * n_ch, n_ch, n_ch),
                args.round);
            h += lane / DOTS_COLUMNS;
            if (h < n_h) {
                products[h * SCORE_STRIDE + e + lane % DOTS_COLUMNS] =
                    cuda_rounded((dot > 0.0f ? dot : 0.0f) * w[h], args.round);
            }
        }
        __syncthreads();
        if (threadIdx.x < SCORE_TILE && base + threadIdx.x < n) {
            float sum = 0.0f;
            for (uint32_t h = 0; h < n_h; h++) {
                sum += products[h * SCORE_STRIDE + threadIdx.x];
            }
            args.scores[(size_t)blockIdx.x * args.max_entries + base + threadIdx.x] =
                cuda_rounded(sum, args.round);
        }
    }
}

__global__ void __launch_bounds__(SELECT_THREADS) topk_select_kernel(struct topk_args args)
{
    cuda_grid_begin();
    __shared__ uint32_t count[256], above[SELECT_WARPS], equal[SELECT_WARPS];
    __shared__ struct select_state state;
    uint32_t r = args.row_first + blockIdx.x, k = args.index_topk, lane = cuda_lane();
    uint32_t n = (args.rows.positions[r] + 1) / OPS_SPARSE_RATIO, warp = threadIdx.x / CUDA_WARP;
    uint32_t *index = args.selection.index + (size_t)r * k;
    const float *scores = args.scores + (size_t)blockIdx.x * args.max_entries;
    if (threadIdx.x == 0) {
        args.selection.n[r] = n < k ? n : k;
        state = {0, 0, k};
    }
    if (n <= k) {
        for (uint32_t i = threadIdx.x; i < n; i += SELECT_THREADS) {
            index[i] = i;
        }
        return;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256) {
            count[threadIdx.x] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += SELECT_THREADS) {
            uint32_t key = sortable(scores[i]);
            if ((key & state.mask) == state.prefix) {
                atomicAdd(&count[key >> shift & 255], 1u);
            }
        }
        __syncthreads();
        if (warp == 0) {
            select_byte(count, shift, &state);
        }
        __syncthreads();
    }
    /* Each warp has a run of the entries: how many it takes, then which. */
    const uint32_t limit = state.prefix, ties = state.wanted;
    uint32_t run = (n + SELECT_THREADS - 1) / SELECT_THREADS * CUDA_WARP, first = warp * run;
    uint32_t end = first + run < n ? first + run : n, n_above = 0, n_equal = 0;
    for (uint32_t i = first; i < end; i += CUDA_WARP) {
        uint32_t key = i + lane < end ? sortable(scores[i + lane]) : 0;
        n_above += __popc(__ballot_sync(0xffffffffu, i + lane < end && key > limit));
        n_equal += __popc(__ballot_sync(0xffffffffu, i + lane < end && key == limit));
    }
    if (lane == 0) {
        above[warp] = n_above;
        equal[warp] = n_equal;
    }
    __syncthreads();
    n_above = n_equal = 0;
    for (uint32_t i = 0; i < warp; i++) {
        n_above += above[i];
        n_equal += equal[i];
    }
    for (uint32_t i = first; i < end; i += CUDA_WARP) {
        uint32_t key = i + lane < end ? sortable(scores[i + lane]) : 0;
        bool is_above = i + lane < end && key > limit, is_equal = i + lane < end && key == limit;
        uint32_t all_above = __ballot_sync(0xffffffffu, is_above);
        uint32_t all_equal = __ballot_sync(0xffffffffu, is_equal), before = (1u << lane) - 1;
        uint32_t up = n_above + __popc(all_above & before);
        uint32_t level = n_equal + __popc(all_equal & before);
        if (is_above || (is_equal && level < ties)) {
            index[up + (level < ties ? level : ties)] = i + lane;
        }
        n_above += __popc(all_above);
        n_equal += __popc(all_equal);
    }
}

} /* namespace */

size_t cuda_topk_shared_bytes(const struct ops_dims *d)
{
    return (SCORE_TILE * (size_t)d->index_dim + SCORE_STRIDE * (size_t)d->index_heads) *
           sizeof(float);
}

void cuda_topk(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *iq, const float *iw, const struct ops_kv *kv,
               struct ops_selection *ret_selection)
{
    const struct ops_dims *d = &dev->d;
    struct topk_args args = topk_args_make(dev, layer, iq, iw, kv, ret_selection);
    size_t turn = dev->attention_floats / dev->max_entries;
    size_t shared = cuda_topk_shared_bytes(d);
    for (uint32_t row = 0, n; row < rows->n_rows; row += n) {
        n = rows->n_rows - row < turn ? rows->n_rows - row : (uint32_t)turn;
        args.row_first = row;
        if (dev->max_entries > d->index_topk) {
            uint32_t n_tiles = (dev->max_entries + SCORE_TILE - 1) / SCORE_TILE;
            cuda_run(dev, "topk (scores)", topk_scores_kernel,
                     dim3(n, attention_splits(dev, n, n_tiles)), SCORE_THREADS, shared, args);
        }
        cuda_run(dev, "topk (select)", topk_select_kernel, n, SELECT_THREADS, 0, args);
    }
}
