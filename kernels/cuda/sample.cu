/* Logits to the next token, a block for each row: the steps and the arithmetic of kernels/sample.h.
 *
 * Sums are whole numbers, so how ids are shared out changes nothing. What top_k and top_p keep is
 * found without a sort: the order is by a weight's bits, then by id, so the last weight that is
 * kept is found digit by digit, each time from how many ids, and how much weight, every value of
 * the digit has; among equal weights the first ids are kept. Weights are made anew in each pass,
 * for they cost less than the memory that would hold them.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/sample.h"

namespace
{

enum { THREADS = 512, WARPS = THREADS / CUDA_WARP, DIGIT_BITS = 8, DIGITS = 4, BINS = 256 };
/* Bits of a weight, which is at most 1.0f: thirty, and digits take 32 from the top. */
enum { WEIGHT_BITS = 30 };

using mass = unsigned long long;

struct row_of {
    const float *logits;
    uint32_t n, from, to; /* this warp's ids: [from, to) */
    float top;
    ops_draw draw;
};

/* What is kept: weights of more than `bits`, and of those that have these the first n_equal. */
struct cut {
    uint32_t bits, n_equal;
    mass sum;
};

struct room {
    uint32_t count[BINS];
    mass sum[BINS];
    float best[WARPS];
    uint32_t best_id[WARPS], equal[WARPS];
    mass part[WARPS];
    cut found;
    uint32_t digit, n_above, warp;
    mass above, target;
};

__device__ __forceinline__ bool comes_first(float a, uint32_t i, float b, uint32_t k)
{
    return a > b || (a == b && i < k);
}

__device__ __forceinline__ float weight_of(const row_of &row, uint32_t i)
{
    return sample_weight(row.logits[i], row.top, row.draw.temperature);
}

/* The first of the largest, and what it is, in every thread: UINT32_MAX if all are -infinity. */
__device__ uint32_t find_best(const row_of &row, room *shared, float *ret_best)
{
    float best = -INFINITY;
    uint32_t id = UINT32_MAX;
    for (uint32_t i = row.from + cuda_lane(); i < row.to; i += CUDA_WARP) {
        float x = row.logits[i];
        if (x > best) {
            best = x;
            id = i;
        }
    }
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, best, m);
        uint32_t other_id = __shfl_xor_sync(0xffffffffu, id, m);
        if (comes_first(other, other_id, best, id)) {
            best = other;
            id = other_id;
        }
    }
    if (cuda_lane() == 0) {
        shared->best[threadIdx.x / CUDA_WARP] = best;
        shared->best_id[threadIdx.x / CUDA_WARP] = id;
    }
    __syncthreads();
    best = shared->best[0];
    id = shared->best_id[0];
    for (uint32_t w = 1; w < WARPS; w++) { /* ids rise with the warps */
        if (shared->best[w] > best) {
            best = shared->best[w];
            id = shared->best_id[w];
        }
    }
    *ret_best = best;
    return id;
}

/* By one thread: the first value of this digit, from the largest, at which enough is reached. */
template <typename F> __device__ void choose_digit(room *shared, F enough)
{
    uint32_t digit = BINS - 1;
    for (; digit > 0; digit--) {
        uint32_t n = shared->count[digit];
        if (n && enough(shared->n_above + n, shared->above + shared->sum[digit])) {
            break;
        }
        shared->n_above += n;
        shared->above += shared->sum[digit];
    }
    shared->digit = digit;
}

/* By one thread: of the n equal weights of `bits` the fewest with which it is. */
template <typename F> __device__ void choose_equal(room *shared, uint32_t bits, F enough)
{
    mass each = sample_units(f32_from_bits(bits));
    uint32_t least = 1, most = shared->count[shared->digit];
    while (least < most) {
        uint32_t middle = least + (most - least) / 2;
        if (enough(shared->n_above + middle, shared->above + middle * each)) {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    shared->found.bits = bits;
    shared->found.n_equal = least;
    shared->found.sum = shared->above + least * each;
}

/* The shortest part of the order, from its front, of which enough(ids, their weight) is true: it
 * is of the whole, and once true it stays so. */
template <typename F> __device__ cut find_cut(const row_of &row, room *shared, F enough)
{
    uint32_t bits = 0;
    if (threadIdx.x == 0) {
        shared->n_above = 0;
        shared->above = 0;
    }
    for (int d = 0; d < DIGITS; d++) {
        int shift = WEIGHT_BITS - DIGIT_BITS * (d + 1);
        shift = shift > 0 ? shift : 0; /* the last digit has bits of the one before */
        int above = d == 0 ? 31 : WEIGHT_BITS - DIGIT_BITS * d;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < BINS; i += THREADS) {
            shared->count[i] = 0;
            shared->sum[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = row.from + cuda_lane(); i < row.to; i += CUDA_WARP) {
            float weight = weight_of(row, i);
            uint32_t b = f32_bits(weight);
            if (b >> above == bits >> above) {
                atomicAdd(&shared->count[b >> shift & (BINS - 1)], 1u);
                atomicAdd(&shared->sum[b >> shift & (BINS - 1)], (mass)sample_units(weight));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            choose_digit(shared, enough);
        }
        __syncthreads();
        bits |= shared->digit << shift;
    }
    if (threadIdx.x == 0) {
        choose_equal(shared, bits, enough);
    }
    __syncthreads();
    return shared->found;
}

__device__ cut cut_of(const row_of &row, room *shared)
{
    const ops_draw &draw = row.draw;
    cut kept = {0, UINT32_MAX, 0};
    uint32_t k = draw.top_k > 0 && (uint32_t)draw.top_k < row.n ? (uint32_t)draw.top_k : row.n;
    if (k == row.n && !(draw.top_p < 1.0f)) {
        return kept;
    }
    kept = find_cut(row, shared, [=](uint32_t n, mass) { return n >= k; });
    if (draw.top_p < 1.0f) {
        float top_p = draw.top_p;
        mass total = kept.sum;
        kept = find_cut(row, shared,
                        [=](uint32_t, mass sum) { return sample_enough(sum, top_p, total); });
    }
    return kept;
}

/* Units that id i counts with, for a warp's 32 ids in a row; n_equal counts those before them that
 * have the cut's bits. All lanes; i may be past the end. */
__device__ __forceinline__ mass kept_units(const row_of &row, const cut &kept, uint32_t i,
                                           uint32_t *n_equal)
{
    float weight = i < row.to ? weight_of(row, i) : 0.0f;
    bool equal = i < row.to && f32_bits(weight) == kept.bits;
    uint32_t all = __ballot_sync(0xffffffffu, equal);
    uint32_t rank = *n_equal + __popc(all & ((1u << cuda_lane()) - 1));
    *n_equal += __popc(all);
    bool is_kept = f32_bits(weight) > kept.bits || (equal && rank < kept.n_equal);
    return is_kept && !(weight < row.draw.min_p) ? sample_units(weight) : 0;
}

/* How many of the ids of warps before this one have the cut's bits. */
__device__ uint32_t equal_before(const row_of &row, const cut &kept, room *shared)
{
    uint32_t n = 0, before = 0, warp = threadIdx.x / CUDA_WARP;
    for (uint32_t i = row.from; i < row.to; i += CUDA_WARP) {
        bool equal =
            i + cuda_lane() < row.to && f32_bits(weight_of(row, i + cuda_lane())) == kept.bits;
        n += __popc(__ballot_sync(0xffffffffu, equal));
    }
    if (cuda_lane() == 0) {
        shared->equal[warp] = n;
    }
    __syncthreads();
    for (uint32_t w = 0; w < warp; w++) {
        before += shared->equal[w];
    }
    return before;
}

/* By the one warp in whose ids the sum passes `target`, counted from its first. */
__device__ uint32_t walk(const row_of &row, const cut &kept, uint32_t n_equal, mass target)
{
    for (uint32_t i = row.from; i < row.to; i += CUDA_WARP) {
        mass sum = kept_units(row, kept, i + cuda_lane(), &n_equal);
#pragma unroll
        for (int m = 1; m < CUDA_WARP; m *= 2) {
            mass other = __shfl_up_sync(0xffffffffu, sum, m);
            sum += cuda_lane() >= m ? other : 0;
        }
        uint32_t passed = __ballot_sync(0xffffffffu, sum > target);
        if (passed) {
            return i + __ffs((int)passed) - 1;
        }
        target -= __shfl_sync(0xffffffffu, sum, CUDA_WARP - 1);
    }
    return UINT32_MAX;
}

__device__ uint32_t draw_row(const row_of &row, uint32_t best, uint64_t position, room *shared)
{
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    const cut kept = cut_of(row, shared);
    const uint32_t n_before = kept.n_equal == UINT32_MAX ? 0 : equal_before(row, kept, shared);
    uint32_t n_equal = n_before;
    mass sum = 0;
    for (uint32_t i = row.from; i < row.to; i += CUDA_WARP) {
        sum += kept_units(row, kept, i + cuda_lane(), &n_equal);
    }
#pragma unroll
    for (int m = 16; m >= 1; m /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, m);
    }
    if (cuda_lane() == 0) {
        shared->part[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mass total = 0;
        for (uint32_t w = 0; w < WARPS; w++) {
            total += shared->part[w];
        }
        mass target = sample_target(row.draw.seed, position, total);
        uint32_t at = 0;
        while (at < WARPS && shared->part[at] <= target) {
            target -= shared->part[at++];
        }
        shared->warp = total ? at : UINT32_MAX; /* min_p above 1 leaves nothing */
        shared->target = target;
        shared->best_id[0] = best;
    }
    __syncthreads();
    if (warp == shared->warp) {
        uint32_t id = walk(row, kept, n_before, shared->target);
        if (cuda_lane() == 0) {
            shared->best_id[0] = id;
        }
    }
    __syncthreads();
    return shared->best_id[0];
}

__global__ void __launch_bounds__(THREADS)
    sample_kernel(ops_rows rows, const float *logits, size_t stride, uint32_t n, uint32_t *ids)
{
    cuda_grid_begin();
    __shared__ room shared;
    const uint32_t r = blockIdx.x, warp = threadIdx.x / CUDA_WARP;
    row_of row = {logits + r * stride, n, 0, 0, 0.0f, rows.draws[r]};
    if (!row.draw.is_drawn) {
        return;
    }
    uint32_t each = (n + WARPS * CUDA_WARP - 1) / (WARPS * CUDA_WARP) * CUDA_WARP;
    row.from = warp * each < n ? warp * each : n;
    row.to = row.from + each < n ? row.from + each : n;
    uint32_t id = find_best(row, &shared, &row.top);
    id = id == UINT32_MAX ? 0 : id;
    __syncthreads();
    if (!(row.draw.temperature <= 0.0f) && sample_is_finite(row.top)) {
        id = draw_row(row, id, (uint64_t)rows.positions[r] + 1, &shared);
    }
    if (threadIdx.x == 0) {
        ids[r] = id;
    }
}

} /* namespace */

void cuda_sample(struct ops_device *dev, const struct ops_rows *rows, const float *logits,
                 size_t stride)
{
    if (!dev->rows.draws || rows->n_rows > dev->limits.n_seqs || dev->d.vocab > SAMPLE_MAX_IDS) {
        cuda_failed(dev, STATUS_INVALID, "cuda:%u: nothing says how %u rows are to be drawn",
                    dev->limits.device_i, rows->n_rows);
        return;
    }
    if (rows->n_rows) {
        cuda_run(dev, "sample", sample_kernel, rows->n_rows, THREADS, 0, dev->rows, logits, stride,
                 dev->d.vocab, dev->ids);
    }
}
