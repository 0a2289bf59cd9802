/* Tokens to cache entries (or index keys), with the state that lives between calls.
 *
 * The sums of kernels/cpu/compress.c, cut where they are independent: a block for each row that
 * completes an entry of a sparse layer, reading the eight slots from this call's rows or from the
 * ring as it was before the call; a block for each window of a heavy layer, folding its tokens in
 * one by one. The state takes what the call leaves in a launch of its own, after everyone has read
 * it.
 */
#include <math.h>

#include "kernels/cuda/attention.cuh"

namespace
{

enum { THREADS = 256 };

struct compress_args {
    struct cache_view v;
    struct ops_rows rows;
    const float *k, *s; /* [T, width] */
    const float *ape, *norm, *freqs;
    float *carry; /* [n_seqs, 3 d] heavy: the triple that a call leaves */
    uint32_t d, width;
    float eps;
    bool index, round;
};

/* The entry that row r completes, from its sums in shared memory: norm, rotation at its first
 * token, quantiser, page. By the first warp; `table` has room for rope_dim. */
__device__ __forceinline__ void finish_entry(const struct compress_args &args, uint32_t r, float *e,
                                             float *table)
{
    uint32_t d = args.d, ratio = args.v.place.ratio, position = args.rows.positions[r];
    if (args.round) {
        warp_round_row(e, d);
    }
    warp_rms_norm(e, args.norm, d, args.eps, args.round, e);
    warp_rope_table(args.freqs, args.v.rope_dim, position + 1 - ratio, table);
    warp_rope(e, d, args.v.rope_dim, table, false, args.round);
    if (args.round && args.index) {
        warp_hadamard(e, d);
        warp_round_row(e, d);
        warp_quant4(e, d);
    } else if (args.round) {
        warp_quant8(e, d - args.v.rope_dim, FORMATS_KV_GROUP, e);
    }
    const uint32_t *pages = args.rows.seqs[args.rows.seq_of[r]].pages;
    if (args.index) {
        cache_key_store(args.v, e, cache_key_at(args.v, pages, position / ratio), 0, 1);
    } else {
        cache_entry_store(args.v, e, cache_entry_at(args.v, pages, position / ratio), 0, 1);
    }
}

/* Softmax over the eight slots of the entry that row r completes, weighted sum, channel ch. */
__device__ __forceinline__ float pool_slots(const struct compress_args &args,
                                            const struct ops_seq &seq, const float *ring,
                                            uint32_t r, uint32_t ch)
{
    uint32_t d = args.d, last = args.rows.positions[r], n_own = last - seq.position + 1;
    float k[8], s[8], most = -INFINITY, sum = 0.0f, pooled = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t back = 7 - i, at = ch + (i < 4 ? 0 : d);
        if (back < n_own) {
            size_t row = (size_t)(r - back) * args.width;
            k[i] = args.k[row + at];
            s[i] = args.s[row + at] + args.ape[(last - back) % OPS_SPARSE_RATIO * 2 * d + at];
        } else {
            /* Below position 0 unsigned arithmetic lands on rows that still are as at the start. */
            const float *slot = ring + (size_t)((last - back) % OPS_STATE_RING) * 4 * d;
            k[i] = slot[at];
            s[i] = slot[2 * d + at];
        }
        most = s[i] > most ? s[i] : most;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        s[i] = cpu_exp(s[i] - most);
        sum += s[i];
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        pooled += k[i] * (s[i] / sum);
    }
    return pooled;
}

/* A block for each row. */
__global__ void __launch_bounds__(THREADS) compress_sparse_kernel(struct compress_args args)
{
    cuda_grid_begin();
    extern __shared__ float shared[];
    uint32_t r = blockIdx.x;
    if (args.rows.positions[r] % OPS_SPARSE_RATIO != OPS_SPARSE_RATIO - 1) {
        return;
    }
    struct ops_seq seq = args.rows.seqs[args.rows.seq_of[r]];
    const float *ring = cache_state_at(args.v, seq.slot, args.index);
    for (uint32_t ch = threadIdx.x; ch < args.d; ch += THREADS) {
        shared[ch] = pool_slots(args, seq, ring, r, ch);
    }
    __syncthreads();
    if (threadIdx.x < CUDA_WARP) {
        finish_entry(args, r, shared, shared + args.d);
    }
}

/* A block for each row: those that stay in the ring go there. */
__global__ void __launch_bounds__(THREADS) compress_ring_kernel(struct compress_args args)
{
    cuda_grid_begin();
    uint32_t r = blockIdx.x, position = args.rows.positions[r], width = args.width;
    struct ops_seq seq = args.rows.seqs[args.rows.seq_of[r]];
    if (seq.slot == OPS_NO_SLOT || seq.n_rows - (r - seq.first_row) > OPS_STATE_RING) {
        return;
    }
    float *to = cache_state_at(args.v, seq.slot, args.index) +
                (size_t)(position % OPS_STATE_RING) * 2 * width;
    const float *ape = args.ape + (size_t)(position % OPS_SPARSE_RATIO) * width;
    for (uint32_t ch = threadIdx.x; ch < width; ch += THREADS) {
        to[ch] = args.k[(size_t)r * width + ch];
        to[width + ch] = args.s[(size_t)r * width + ch] + ape[ch];
    }
}

/* A block for each row; it works if a window begins there, or the sequence does in this call. */
__global__ void __launch_bounds__(THREADS) compress_heavy_kernel(struct compress_args args)
{
    cuda_grid_begin();
    extern __shared__ float shared[];
    uint32_t r = blockIdx.x, position = args.rows.positions[r], ratio = args.v.place.ratio;
    uint32_t seq_i = args.rows.seq_of[r], d = args.d;
    struct ops_seq seq = args.rows.seqs[seq_i];
    if (seq.slot == OPS_NO_SLOT || (position % ratio != 0 && r != seq.first_row)) {
        return;
    }
    uint32_t left = ratio - position % ratio, here = seq.n_rows - (r - seq.first_row);
    uint32_t n = left < here ? left : here;
    const float *state = cache_state_at(args.v, seq.slot, false);
    for (uint32_t ch = threadIdx.x; ch < d; ch += THREADS) {
        float m = -INFINITY, z = 0.0f, a = 0.0f;
        if (r == seq.first_row) {
            m = state[ch];
            z = state[d + ch];
            a = state[2 * d + ch];
        }
        for (uint32_t i = 0; i < n; i++) {
            size_t at = (size_t)(r + i) * d + ch;
            float score = args.s[at] + args.ape[(size_t)((position + i) % ratio) * d + ch];
            float most = score > m ? score : m;
            float keep = cpu_exp(m - most), add = cpu_exp(score - most);
            z = z * keep + add;
            a = a * keep + args.k[at] * add;
            m = most;
        }
        if (n == left) {
            shared[ch] = a / z;
        } else {
            float *carry = args.carry + (size_t)seq_i * 3 * d;
            carry[ch] = m;
            carry[d + ch] = z;
            carry[2 * d + ch] = a;
        }
    }
    __syncthreads();
    if (n == left && threadIdx.x < CUDA_WARP) {
        finish_entry(args, r + n - 1, shared, shared + d);
    }
}

/* A block for each sequence: its triple, or that of an empty window. */
__global__ void __launch_bounds__(THREADS) compress_triple_kernel(struct compress_args args)
{
    cuda_grid_begin();
    uint32_t d = args.d;
    struct ops_seq seq = args.rows.seqs[blockIdx.x];
    if (seq.slot == OPS_NO_SLOT) {
        return;
    }
    float *state = cache_state_at(args.v, seq.slot, false);
    const float *carry = args.carry + (size_t)blockIdx.x * 3 * d;
    bool closed = (seq.position + seq.n_rows) % args.v.place.ratio == 0;
    for (uint32_t i = threadIdx.x; i < 3 * d; i += THREADS) {
        state[i] = closed ? (i < d ? -INFINITY : 0.0f) : carry[i];
    }
}

} /* namespace */

void cuda_compress_entries(struct ops_device *dev, const struct ops_rows *rows,
                           const struct ops_layer *layer, bool index, const struct ops_kv *kv,
                           const float *k, const float *s)
{
    const struct ops_compressor *c = index ? &layer->index_compressor : &layer->compressor;
    struct compress_args args;
    args.v = cache_view_make(&dev->d, kv, &layer->place);
    args.rows = dev->rows;
    args.k = k;
    args.s = s;
    args.ape = c->ape;
    args.norm = c->norm;
    args.freqs = dev->freqs[1];
    args.carry = dev->attention;
    args.d = index ? dev->d.index_dim : dev->d.head_dim;
    args.width = c->wkv.rows;
    args.eps = dev->d.rms_eps;
    args.index = index;
    args.round = !dev->d.exact;
    size_t shared = (args.d + dev->d.rope_dim) * sizeof(float);
    if (layer->place.ratio == OPS_SPARSE_RATIO) {
        cuda_run(dev, "compress", compress_sparse_kernel, rows->n_rows, THREADS, shared, args);
        cuda_run(dev, "compress (state)", compress_ring_kernel, rows->n_rows, THREADS, 0, args);
    } else {
        cuda_run(dev, "compress", compress_heavy_kernel, rows->n_rows, THREADS, shared, args);
        cuda_run(dev, "compress (state)", compress_triple_kernel, rows->n_seqs, THREADS, 0, args);
    }
}

void cuda_compress(struct ops_device *dev, const struct ops_rows *rows,
                   const struct ops_layer *layer, bool index, const float *x,
                   const struct ops_kv *kv)
{
    const struct ops_compressor *c = index ? &layer->index_compressor : &layer->compressor;
    const struct cuda_gemm_item items[] = {
        cuda_item(dev, &c->wkv, x, dev->wide, c->wkv.rows, false),
        cuda_item(dev, &c->wgate, x, dev->wide2, c->wkv.rows, false)};
    cuda_gemms(dev, items, 2, rows->n_rows);
    cuda_compress_entries(dev, rows, layer, index, kv, dev->wide, dev->wide2);
}
