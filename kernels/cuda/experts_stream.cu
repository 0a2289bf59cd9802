/* The experts of a layer in two launches, for calls of few rows: weights streamed past every
 * multiprocessor without a stop.
 *
 * Such a call reads each touched expert's weights once and does little else, so its floor is their
 * bytes over the read bandwidth, and what matters is that at every moment enough of them are under
 * way: bandwidth times latency, some 4.5 TB/s x 1 us / 132 = 34 KB a multiprocessor on an H200.
 * Here a warp has 3 chunks of 2 KB on their way behind the one that it multiplies, 16 warps 100 KB.
 *
 * First a small launch (experts_plan.cu) sorts rows by expert, puts them through the quantiser into
 * the halves that an mma takes, and clears the counters. Then one launch of warps that know nothing
 * of each other: a warp takes an item, 32 outputs of one matrix over some of its runs (tensor.cuh)
 * for up to 16 of an expert's rows, and before it has multiplied it the next one's weights are
 * being copied: each thread copies (cp.async) what it will read itself, so nobody waits for
 * anybody. Stage 0 is w1 and w3 of all experts, stage 1 their w2; the shared expert is one expert
 * more, the first. Sums of runs go to memory one by one ("parts"). The last warp to arrive at 128
 * columns of an expert's rows adds their parts up in the runs' order, does the gate and the
 * quantiser; the last to arrive at 32 channels of a row adds up the row's experts. Parts are a
 * fiftieth of the weights' bytes and stay in the second-level cache.
 *
 * Order of sums: that of tensor.cu, to the bit, whatever is dealt out and however: a part is a
 * run's or (shared expert, cut into groups) a group's sum, and who adds parts up does so in turn.
 * So a row's bits don't depend on its batch, and a call of more rows than this file takes goes to
 * tensor.cu and gives the same. Bound: as there.
 *
 * SCALED: the same with block-scaled products (tensor.cuh): images are e4m3 with their scales, put
 * there by who quantised them, and bits those of tensor.cu's SCALED.
 *
 * No deadlock: an item of stage 1 waits for all of stage 0 of its expert. Items are taken from one
 * counter, all of stage 0 before all of stage 1, and a warp does its items in the order in which it
 * took them. Of the items not done the lowest is next in some warp that runs (who takes runs), and
 * what it waits for is lower still, so done. This needs nothing of how many blocks are resident.
 *
 * Memory between warps: what is written, then __syncwarp, then a fence and an atomic add by one
 * lane (or by each that counts something); who sees the last count fences, then __syncwarp, and
 * reads past the first-level cache, or acquires. The parts of stage 1 lie where those of stage 0
 * lay: whoever writes them has waited for those who read these.
 */
#include "kernels/cuda/experts_stream.cuh"

namespace
{

enum {
    WARPS = 4, /* of a block: there is no other reason for blocks than that they carry warps */
    THREADS = WARPS * CUDA_WARP,
    BLOCKS_A_SM = 4,
    DEPTH = 4,       /* chunks of a warp's ring */
    FIRST_ITEMS = 2, /* that a block takes at once for each of its warps: the counter is one word */
    GROUP = FORMATS_INPUT_GROUP,
    GROUP_BLOCKS = GROUP / CUDA_BLOCK,
    FEW_ROWS = 3 /* up to which items are cut small, so that one row's fill the card */
};

struct slot {
    uint4 units[TENSOR_CHUNK_BYTES / sizeof(uint4)]; /* [i, lane]: each lane's own */
    uint32_t scales[CUDA_WARP];
};
static_assert(WARPS * DEPTH * sizeof(slot) <= 48 * 1024, "static shared memory ends there");
static_assert(BLOCKS_A_SM / 2 * WARPS * DEPTH * sizeof(slot) <= (size_t)ARCH_MAX_SHARED_BYTES,
              "half of them fit everywhere");

/* A matrix of an expert. */
struct shape {
    uint32_t form, n_units, n_chunks, n_runs, n_blocks;
    uint32_t runs_an_item, items_a_block;
    uint32_t parts; /* that a value is the sum of */
    bool folds;     /* an item is a group, and a part */
    uint32_t scale_rows;
    size_t scales_at;
};

/* All that the launch knows; [is_shared] where there are two. */
struct stream {
    shape of[2][2]; /* [stage][is_shared] */
    const uint8_t *shared[3];
    uint32_t n_own, n_used, n_rows, hidden, width, n_shared_tiles, max_lanes;
    bool has_shared, round, quant[2];
    float limit;
    const uint16_t *x[2]; /* [row, hidden] halves, as w1 takes them */
    uint16_t *act;        /* [lane, width], as w2 does */
    float *parts;
    size_t lane_floats[2]; /* of a lane's parts; those of the shared expert come behind */
    const uint32_t *lane_row, *row_lanes;
    const float *lane_weight;
    const cuda_tile *tiles; /* the shared expert's first */
    const uint32_t *tile_count;
    uint32_t *next, *ready, *arrived, *done;
    float *y;
    bool early; /* this launch begins before the plan is there */
};

/* --- items */

struct item {
    uint32_t stage, is_shared, tile, matrix, block, first_run;
};

/* Items of a tile. */
__device__ __forceinline__ uint32_t items_of(const stream &s, uint32_t stage, uint32_t is_shared)
{
    const shape &m = s.of[stage][is_shared];
    return m.n_blocks * m.items_a_block * (stage ? 1 : 2);
}

__device__ __forceinline__ uint32_t items_of_stage(const stream &s, uint32_t stage,
                                                   uint32_t n_tiles)
{
    return items_of(s, stage, 1) * s.n_shared_tiles +
           items_of(s, stage, 0) * (n_tiles - s.n_shared_tiles);
}

/* In stage 0 both matrices of 128 columns come one after the other: their sum is soon whole. */
__device__ __forceinline__ item item_of(const stream &s, uint32_t i, uint32_t n_tiles)
{
    item to;
    const uint32_t first_stage = items_of_stage(s, 0, n_tiles);
    to.stage = i >= first_stage;
    i -= to.stage ? first_stage : 0;
    const uint32_t of_shared = items_of(s, to.stage, 1) * s.n_shared_tiles;
    to.is_shared = i < of_shared;
    i -= to.is_shared ? 0 : of_shared;
    const shape &m = s.of[to.stage][to.is_shared];
    const uint32_t each = items_of(s, to.stage, to.is_shared);
    to.tile = i / each + (to.is_shared ? 0 : s.n_shared_tiles);
    i %= each;
    to.first_run = i % m.items_a_block * m.runs_an_item;
    i /= m.items_a_block;
    to.matrix = to.stage ? 2 : i / GROUP_BLOCKS % 2;
    to.block = to.stage ? i : i / (2 * GROUP_BLOCKS) * GROUP_BLOCKS + i % GROUP_BLOCKS;
    return to;
}

__device__ __forceinline__ uint32_t first_chunk(const shape &m, uint32_t run)
{
    return run * m.n_chunks / m.n_runs;
}

/* What a warp has on its way: chunk after chunk, over the ends of items. */
struct reader {
    slot *ring;
    const uint8_t *units, *scales; /* of the next chunk: this lane's */
    uint32_t chunk, end, form;     /* of its item */
    uint32_t loaded;               /* chunks */
    uint32_t taken;                /* lane 0: the item to begin next; lane 1: the second of all */
    uint32_t pushed, queue;        /* lane k: the item that was begun as the k-th, modulo 32 */
    bool is_over;
};

struct weights {
    const cuda_weights &w1, &w3, &w2;
};

__device__ __forceinline__ void begin(const stream &s, const weights &w, const item &to, reader *r)
{
    const shape &m = s.of[to.stage][to.is_shared];
    const uint32_t lane = cuda_lane(), expert = s.tiles[to.tile].expert;
    const uint8_t *data;
    if (to.is_shared) {
        data = s.shared[to.matrix];
    } else {
        const cuda_weights &of = to.matrix == 0 ? w.w1 : (to.matrix == 1 ? w.w3 : w.w2);
        data = static_cast<const uint8_t *>(of.data[expert]);
    }
    r->form = m.form;
    r->chunk = first_chunk(m, to.first_run);
    r->end = first_chunk(m, to.first_run + m.runs_an_item);
    r->units = data + ((size_t)to.block * m.n_units * CUDA_BLOCK + lane / 4) * CUDA_UNIT_BYTES +
               (size_t)r->chunk * TENSOR_CHUNK_BYTES + lane % 4 * CUDA_BLOCK * CUDA_UNIT_BYTES;
    r->scales = data + m.scales_at + (size_t)to.block * m.scale_rows * CUDA_BLOCK + 4 * lane;
}

/* Asks for one chunk more, if there is one, and closes a group in any case. */
__device__ __forceinline__ void read_on(const stream &s, const weights &w, uint32_t n_tiles,
                                        uint32_t n_items, reader *r)
{
    if (r->chunk == r->end && !r->is_over) {
        const uint32_t i = __shfl_sync(0xffffffffu, r->taken, r->pushed == 1);
        r->queue = cuda_lane() == r->pushed % CUDA_WARP ? i : r->queue;
        r->pushed++;
        r->is_over = i >= n_items;
        if (!r->is_over) {
            if (cuda_lane() == 0 && r->pushed > 1) {
                r->taken = arch_count(s.next);
            }
            begin(s, w, item_of(s, i, n_tiles), r);
        }
    }
    if (!r->is_over) {
        slot *to = r->ring + r->loaded % DEPTH;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            arch_copy_16(to->units + i * CUDA_WARP + cuda_lane(),
                         r->units + i * 8 * CUDA_UNIT_BYTES);
        }
        if (r->form == CUDA_FP4_E8M0 || r->form == CUDA_FP4_SCALED) { /* a scale for each unit */
            arch_copy_4(to->scales + cuda_lane(),
                        r->scales + (size_t)r->chunk * TENSOR_UNITS * CUDA_BLOCK);
        } else if (r->form == CUDA_FP8 && cuda_lane() < CUDA_BLOCK / 4) { /* for two chunks */
            arch_copy_4(to->scales + cuda_lane(), r->scales + (size_t)(r->chunk / 2) * CUDA_BLOCK);
        }
        r->units += TENSOR_CHUNK_BYTES;
        r->chunk++;
        r->loaded++;
    }
    arch_copy_close();
}

/* --- sums of a chunk */

/* The same by block-scaled products; x: of images for these. */
template <int FORM>
__device__ __forceinline__ void add_scaled(const slot &at, const uint4 *x, int32_t second,
                                           bool wide, float (*sums)[2][4])
{
    enum { STEPS = tensor_steps<FORM>::N };
    const uint32_t out = cuda_lane() / 4 + cuda_lane() % 4 * 8;
    const uint32_t scale =
        FORM == CUDA_FP8 ? reinterpret_cast<const uint8_t *>(at.scales)[out] : at.scales[out];
    uint4 unit[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unit[i] = at.units[i * CUDA_WARP + cuda_lane()];
    }
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
        if (nt == 0 || wide) {
            const uint4 *row = x + (nt ? second : 0);
            uint32_t words[2 * STEPS];
#pragma unroll
            for (int i = 0; i < STEPS / 2; i++) {
                const uint4 two = row[i * TENSOR_UNITS];
                words[4 * i] = two.x;
                words[4 * i + 1] = two.y;
                words[4 * i + 2] = two.z;
                words[4 * i + 3] = two.w;
            }
            const uint32_t code = *reinterpret_cast<const uint8_t *>(
                row + STEPS / 2 * TENSOR_UNITS - cuda_lane() % 4);
            tensor_scaled_chunk<FORM>(unit, scale, words, code, sums[0][nt], sums[1][nt]);
        }
    }
}

/* sums[mt][nt] += the chunk's weights times the rows' inputs: x is row g's, `second` further on
 * row g + 8's. */
template <int FORM>
__device__ __forceinline__ void add_any(const slot &at, const uint4 *x, int32_t second, bool wide,
                                        float (*sums)[2][4])
{
    tensor_add_chunk<FORM, 2>(
        [&](int i) { return at.units[i * CUDA_WARP + cuda_lane()]; }, at.scales, wide ? 2 : 1,
        [&](uint32_t nt, uint32_t step) { return (x + step * TENSOR_UNITS)[nt ? second : 0]; },
        sums);
}

/* --- parts, and who adds them up */

__device__ __forceinline__ float *parts_of(const stream &s, uint32_t lane)
{
    const uint32_t routed = lane < s.max_lanes ? lane : s.max_lanes;
    return s.parts + routed * s.lane_floats[0] + (size_t)(lane - routed) * s.lane_floats[1];
}

/* A run's sums as mma leaves them, of the tile's rows (read again: registers are dear). Where a
 * part is a group they are added to what this thread stored there before. */
__device__ __forceinline__ void store_part(const stream &s, const item &now, uint32_t run,
                                           const float (*sums)[2][4])
{
    const cuda_tile tile = s.tiles[now.tile];
    const uint32_t g = cuda_lane() / 4, t = cuda_lane() % 4;
    const shape &m = s.of[now.stage][now.is_shared];
    const uint32_t part = run / (m.folds ? TENSOR_RUNS : 1) + (now.matrix == 1 ? m.parts : 0);
    const bool adds = m.folds && run != now.first_run;
    float *to = parts_of(s, tile.first) + (size_t)part * (now.stage ? s.hidden : s.width) +
                now.block * CUDA_BLOCK + g;
#pragma unroll
    for (int nt = 0; nt < 2; nt++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t row = 8 * nt + 2 * t + i;
            if (row < tile.n) {
                float *of_row = to + row * s.lane_floats[now.is_shared];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float sum = sums[k / 2][nt][k % 2 * 2 + i];
                    of_row[8 * k] = adds ? of_row[8 * k] + sum : sum;
                }
            }
        }
    }
}

__device__ __forceinline__ float4 sum_of_parts(const float *from, uint32_t n, size_t step)
{
    float4 sum = __ldcg(reinterpret_cast<const float4 *>(from));
#pragma unroll 7
    for (uint32_t i = 1; i < n; i++) {
        const float4 part = __ldcg(reinterpret_cast<const float4 *>(from + i * step));
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
    }
    return sum;
}

/* 128 activations of each of a tile's rows: for w2 to take. */
template <bool SCALED>
__device__ __forceinline__ void finish_group(const stream &s, const cuda_tile &tile,
                                             uint32_t is_shared, uint32_t group)
{
    const uint32_t n = s.of[0][is_shared].parts, form = s.of[1][is_shared].form;
    const uint32_t k = group * GROUP + 4 * cuda_lane();
    for (uint32_t lane = tile.first; lane < tile.first + tile.n; lane++) {
        const float *from = parts_of(s, lane) + k;
        const float4 gate = sum_of_parts(from, n, s.width);
        const float4 up = sum_of_parts(from + (size_t)n * s.width, n, s.width);
        const float weight = is_shared ? 1.0f : s.lane_weight[lane];
        const float a[4] = {gate.x, gate.y, gate.z, gate.w}, b[4] = {up.x, up.y, up.z, up.w};
        float h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            h[i] = bf16_round(cuda_gated(bf16_round(a[i]), bf16_round(b[i]), s.limit, weight));
        }
        stream_put<4>(form, s.quant[is_shared], SCALED, group, 4 * cuda_lane(), 1, h,
                      s.act + (size_t)lane * s.width);
    }
}

/* 32 channels of a row: its experts' in ascending order, then the shared one's. */
__device__ __forceinline__ void finish_row(const stream &s, uint32_t row, uint32_t block)
{
    const uint32_t *lanes = s.row_lanes + row * (s.n_used + 1), n = lanes[0];
    const uint32_t channel = block * CUDA_BLOCK + cuda_lane();
    float total = 0.0f;
    for (uint32_t k = 0; k < n + s.has_shared; k++) {
        const uint32_t is_shared = k == n, n_parts = s.of[1][is_shared].parts;
        const float *from = parts_of(s, is_shared ? s.max_lanes + row : lanes[1 + k]) + channel;
        float sum = __ldcg(from);
#pragma unroll 7
        for (uint32_t i = 1; i < n_parts; i++) {
            sum += __ldcg(from + (size_t)i * s.hidden);
        }
        total += bf16_round(sum);
    }
    s.y[(size_t)row * s.hidden + channel] = cuda_rounded(total, s.round);
}

/* This warp's item of stage 0 is stored. */
template <bool SCALED>
__device__ __forceinline__ void arrive_at_group(const stream &s, const item &now)
{
    const uint32_t group = now.block / GROUP_BLOCKS, n_groups = s.width / GROUP;
    const uint32_t all = 2 * GROUP_BLOCKS * s.of[0][now.is_shared].items_a_block;
    uint32_t before = 0;
    __syncwarp();
    if (cuda_lane() == 0) {
        __threadfence();
        before = atomicAdd(s.arrived + now.tile * n_groups + group, 1u);
    }
    if (__shfl_sync(0xffffffffu, before, 0) + 1 != all) {
        return;
    }
    __threadfence();
    __syncwarp();
    finish_group<SCALED>(s, s.tiles[now.tile], now.is_shared, group);
    __syncwarp();
    if (cuda_lane() == 0) {
        __threadfence();
        atomicAdd(s.ready + now.tile, 1u);
    }
}

/* This warp's item of stage 1 is stored: a lane for each row of the tile. */
__device__ __forceinline__ void arrive_at_rows(const stream &s, const item &now)
{
    const cuda_tile tile = s.tiles[now.tile];
    uint32_t row = 0;
    bool is_last = false;
    __syncwarp();
    if (cuda_lane() < tile.n) {
        const uint32_t lane = tile.first + cuda_lane();
        row = now.is_shared ? lane - s.max_lanes : s.lane_row[lane];
        const uint32_t all = s.row_lanes[row * (s.n_used + 1)] * s.of[1][0].items_a_block +
                             s.has_shared * s.of[1][1].items_a_block;
        __threadfence();
        is_last = atomicAdd(s.done + row * (s.hidden / CUDA_BLOCK) + now.block, 1u) + 1 == all;
    }
    for (uint32_t which = __ballot_sync(0xffffffffu, is_last); which; which &= which - 1) {
        __threadfence();
        __syncwarp();
        finish_row(s, __shfl_sync(0xffffffffu, row, __ffs((int)which) - 1), now.block);
    }
}

/* --- the launch */

/* How much of an image a chunk takes, in 16 bytes. */
template <bool SCALED> __device__ __forceinline__ uint32_t chunk_of_image(uint32_t form)
{
    const uint32_t inputs = tensor_inputs_of(form);
    return SCALED && form != CUDA_BF16 ? inputs / 4 + 1 : inputs / 2;
}

/* Rows g and g + 8 of the tile: their inputs from chunk `chunk` on, of this thread's units. Where
 * there are fewer, any row's: nobody stores their sums. */
template <bool SCALED>
__device__ __forceinline__ void find_inputs(const stream &s, const item &now, const cuda_tile &tile,
                                            uint32_t chunk, const uint4 **ret_x,
                                            int32_t *ret_second)
{
    const uint32_t step = chunk_of_image<SCALED>(s.of[now.stage][now.is_shared].form);
    const uint4 *x[2];
#pragma unroll
    for (uint32_t nt = 0; nt < 2; nt++) {
        const uint32_t i = 8 * nt + cuda_lane() / 4, lane = tile.first + (i < tile.n ? i : 0);
        const uint16_t *row;
        if (now.stage) {
            row = s.act + (size_t)lane * s.width;
        } else {
            row = s.x[now.is_shared] +
                  (size_t)(now.is_shared ? lane - s.max_lanes : s.lane_row[lane]) * s.hidden;
        }
        x[nt] = reinterpret_cast<const uint4 *>(row) + chunk * step + cuda_lane() % 4;
    }
    *ret_x = x[0];
    *ret_second = (int32_t)(x[1] - x[0]);
}

/* While the plan is made: this block's part of the shared expert's w1 and w3, into the second-level
 * cache. Which others are wanted the plan says. */
__device__ __forceinline__ void fetch_shared(const stream &s)
{
    const shape &m = s.of[0][1];
    const uint32_t n = m.n_blocks * m.n_chunks, first = (uint64_t)n * blockIdx.x / gridDim.x;
    const uint32_t end = (uint64_t)n * (blockIdx.x + 1) / gridDim.x;
    if (threadIdx.x < 2 && end > first) {
        arch_fetch_ahead(s.shared[threadIdx.x] + (size_t)first * TENSOR_CHUNK_BYTES,
                         (end - first) * TENSOR_CHUNK_BYTES);
    }
}

template <bool SCALED>
__global__ void __launch_bounds__(THREADS, ARCH_SM120A || SCALED ? 2 : BLOCKS_A_SM)
    stream_kernel(const __grid_constant__ stream s, const __grid_constant__ cuda_weights w1,
                  const __grid_constant__ cuda_weights w3, const __grid_constant__ cuda_weights w2)
{
    arch_grid_go();
    if (s.early && s.has_shared) {
        fetch_shared(s);
    }
    arch_grid_wait();
    __shared__ slot rings[WARPS][DEPTH];
    __shared__ uint32_t first;
    const weights w = {w1, w3, w2};
    const uint32_t n_tiles = *s.tile_count, n_groups = s.width / GROUP;
    const uint32_t n_items = items_of_stage(s, 0, n_tiles) + items_of_stage(s, 1, n_tiles);
    reader r = {};
    r.ring = rings[threadIdx.x / CUDA_WARP];
    if (threadIdx.x == 0) {
        first = atomicAdd(s.next, (uint32_t)FIRST_ITEMS * WARPS);
    }
    __syncthreads();
    r.taken = first + cuda_lane() % FIRST_ITEMS * WARPS + threadIdx.x / CUDA_WARP;
    for (int i = 0; i < DEPTH - 1; i++) {
        read_on(s, w, n_tiles, n_items, &r);
    }
    uint32_t used = 0; /* chunks */
    for (uint32_t popped = 0;; popped++) {
        const uint32_t i = __shfl_sync(0xffffffffu, r.queue, popped % CUDA_WARP);
        if (i >= n_items) {
            break;
        }
        const item now = item_of(s, i, n_tiles);
        const shape &m = s.of[now.stage][now.is_shared];
        const cuda_tile tile = s.tiles[now.tile];
        if (now.stage) {
            while (cuda_lane() == 0 && arch_load_acquire(s.ready + now.tile) != n_groups) {
            }
            __syncwarp();
        }
        const uint4 *x;
        int32_t second;
        find_inputs<SCALED>(s, now, tile, first_chunk(m, now.first_run), &x, &second);
        const bool wide = __any_sync(0xffffffffu, tile.n > 8);
        float sums[2][2][4];
        for (uint32_t run = now.first_run; run < now.first_run + m.runs_an_item; run++) {
#pragma unroll
            for (int k = 0; k < 16; k++) {
                sums[k / 8][k / 4 % 2][k % 4] = 0.0f;
            }
            for (uint32_t n = first_chunk(m, run + 1) - first_chunk(m, run); n > 0; n--) {
                arch_copy_wait<DEPTH - 2>();
                __syncwarp(); /* scales are there, and the slot before this one is free */
                read_on(s, w, n_tiles, n_items, &r);
                const slot &at = r.ring[used++ % DEPTH];
                if (m.form == CUDA_BF16) {
                    add_any<CUDA_BF16>(at, x, second, wide, sums);
                } else if constexpr (SCALED) {
                    if (m.form == CUDA_FP8) {
                        add_scaled<CUDA_FP8>(at, x, second, wide, sums);
                    } else {
                        add_scaled<CUDA_FP4_SCALED>(at, x, second, wide, sums);
                    }
                } else if (m.form == CUDA_FP8) {
                    add_any<CUDA_FP8>(at, x, second, wide, sums);
                } else {
                    add_any<CUDA_FP4_E8M0>(at, x, second, wide, sums);
                }
                x += chunk_of_image<SCALED>(m.form);
            }
            store_part(s, now, run, sums);
        }
        if (now.stage) {
            arrive_at_rows(s, now);
        } else {
            arrive_at_group<SCALED>(s, now);
        }
    }
}

/* --- shapes, memory */

uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* routed: its products are those of tensor_experts_kernel, which knows one group. */
uint32_t parts_of_shape(uint32_t n_out, uint32_t n_in, uint32_t form, bool routed)
{
    const uint32_t n_groups = routed ? 1 : tensor_groups_of(n_out, n_in, form);
    return n_groups > 1 ? n_groups : TENSOR_RUNS;
}

shape shape_of(const struct ops_matrix *m, bool routed, uint32_t most_runs, uint32_t aim)
{
    const uint32_t inputs = tensor_inputs_of(m->form), group = m->form == CUDA_FP8 ? 128 : 32;
    shape to = {};
    to.form = m->form;
    to.n_units = m->cols / inputs;
    to.n_chunks = to.n_units / TENSOR_UNITS;
    to.n_blocks = m->rows / CUDA_BLOCK;
    to.parts = parts_of_shape(m->rows, m->cols, m->form, routed);
    const uint32_t n_groups = routed ? 1 : tensor_groups_of(m->rows, m->cols, m->form);
    to.n_runs = n_groups * TENSOR_RUNS;
    to.folds = n_groups > 1;
    to.runs_an_item = to.folds ? TENSOR_RUNS : 1;
    /* Every item has a chunk at least. */
    while (to.runs_an_item < TENSOR_RUNS &&
           (to.runs_an_item < most_runs || to.n_chunks * to.runs_an_item < aim * to.n_runs)) {
        to.runs_an_item *= 2;
    }
    to.items_a_block = to.n_runs / to.runs_an_item;
    if (m->form != CUDA_BF16) {
        to.scale_rows = cuda_groups(m->cols, inputs, group);
        to.scales_at = cuda_scales_offset(m->rows, m->cols, inputs);
    }
    return to;
}

bool is_served(const struct ops_expert *e, bool scaled)
{
    const struct ops_matrix *m[3] = {&e->w1, &e->w3, &e->w2};
    const uint8_t fp4 = scaled ? CUDA_FP4_SCALED : CUDA_FP4_E8M0;
    bool ok = e->w1.form == e->w3.form && e->w1.quant_input == e->w3.quant_input;
    for (int i = 0; i < 3; i++) {
        ok = ok && (m[i]->form == CUDA_BF16 || ((m[i]->form == CUDA_FP8 || m[i]->form == fp4) &&
                                                (!scaled || m[i]->quant_input)));
    }
    return ok;
}

/* What both launches use, sized by the most rows of a call. */
struct sizes {
    uint32_t rows, max_lanes, max_tiles, n_shared_tiles;
};

sizes sizes_of(const struct ops_device *dev, uint32_t n_rows)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n_own = d->expert_end - d->expert_first;
    sizes to;
    to.rows = n_rows;
    to.max_lanes = n_rows * least(d->n_experts_used, n_own);
    to.n_shared_tiles = d->has_shared ? (n_rows + STREAM_TILE_ROWS - 1) / STREAM_TILE_ROWS : 0;
    to.max_tiles = to.n_shared_tiles + least(to.max_lanes, n_own + to.max_lanes / STREAM_TILE_ROWS);
    return to;
}

} /* namespace */

bool cuda_stream_room(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    struct cuda_stream *room = &dev->stream_room;
    if (d->exact || d->hidden % GROUP || d->expert_width % GROUP) {
        return true;
    }
    const sizes n = sizes_of(dev, least(dev->limits.n_rows, STREAM_MOST_ROWS));
    const size_t n_lanes = n.max_lanes + (d->has_shared ? n.rows : 0);
    size_t routed = 0, shared = 0;
    const uint8_t forms[] = {CUDA_BF16, CUDA_FP8, CUDA_FP4_E8M0};
    for (int i = 0; i < 6; i++) {
        const bool is_routed = i % 2;
        size_t first = 2 * (size_t)d->expert_width *
                       parts_of_shape(d->expert_width, d->hidden, forms[i / 2], is_routed);
        size_t second =
            (size_t)d->hidden * parts_of_shape(d->hidden, d->expert_width, forms[i / 2], is_routed);
        size_t *most = is_routed ? &routed : &shared;
        *most = first > *most ? first : *most;
        *most = second > *most ? second : *most;
    }
    bool ok = true;
    room->lane_floats[0] = routed;
    room->lane_floats[1] = shared;
    room->parts = static_cast<float *>(
        cuda_room(dev, n.max_lanes * routed + (d->has_shared ? n.rows * shared : 0), 1, &ok));
    for (int i = 0; i < 2; i++) {
        room->x[i] = static_cast<uint16_t *>(cuda_room(dev, n.rows, d->hidden / 2, &ok));
    }
    room->act = static_cast<uint16_t *>(cuda_room(dev, n_lanes, d->expert_width / 2, &ok));
    room->row_lanes = static_cast<uint32_t *>(cuda_room(dev, n.rows, d->n_experts_used + 1, &ok));
    room->tiles = static_cast<struct cuda_tile *>(
        cuda_room(dev, n.max_tiles, sizeof(struct cuda_tile) / sizeof(uint32_t), &ok));
    room->n_counters =
        1 + n.max_tiles * (1 + d->expert_width / GROUP) + n.rows * (d->hidden / CUDA_BLOCK);
    room->counters = static_cast<uint32_t *>(cuda_room(dev, room->n_counters, 1, &ok));
    return ok;
}

namespace
{

/* False: not this one, nothing is done. */
template <bool SCALED>
bool run(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
         const float *x, const uint32_t *experts, const float *weights, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    const struct cuda_stream *room = &dev->stream_room;
    const uint32_t n_own = d->expert_end - d->expert_first;
    const struct ops_expert *own = n_own ? layer->experts + d->expert_first : NULL;
    if (rows->n_rows == 0) {
        return true;
    }
    if (rows->n_rows > STREAM_MOST_ROWS || !room->parts || (own && !is_served(own, SCALED)) ||
        (d->has_shared && !is_served(&layer->shared, SCALED))) {
        return false;
    }
    cuda_weights w1, w3, w2;
    if (!cuda_experts_gather(dev, own, n_own, &w1, &w3, &w2)) {
        return true; /* and the device failed */
    }
    const sizes n = sizes_of(dev, rows->n_rows);
    const bool has[2] = {n_own > 0, d->has_shared};
    const struct ops_expert *of[2] = {own, &layer->shared};
    const bool few = rows->n_rows <= FEW_ROWS;
    stream_plan p = {};
    stream s = {};
    for (int i = 0; i < 2; i++) {
        if (!has[i]) {
            continue;
        }
        s.of[0][i] = shape_of(&of[i]->w1, i == 0, few ? 1 : 4, 4);
        s.of[1][i] = shape_of(&of[i]->w2, i == 0, few ? 1 : 4, 4);
        s.quant[i] = cuda_wants_quant(dev, &of[i]->w2);
        p.has[i] = true;
        p.quant[i] = cuda_wants_quant(dev, &of[i]->w1);
        p.form[i] = of[i]->w1.form;
        p.image[i] = room->x[i];
        s.x[i] = room->x[i];
        s.lane_floats[i] = room->lane_floats[i];
    }
    p.experts = experts;
    p.weights = weights;
    p.x = x;
    p.n_rows = s.n_rows = rows->n_rows;
    p.n_used = s.n_used = d->n_experts_used;
    p.first = d->expert_first;
    p.end = d->expert_end;
    p.hidden = s.hidden = d->hidden;
    p.n_shared_tiles = s.n_shared_tiles = n.n_shared_tiles;
    p.max_lanes = s.max_lanes = n.max_lanes;
    p.lane_row = dev->lane_row;
    p.row_lanes = room->row_lanes;
    p.lane_weight = dev->lane_weight;
    p.tiles = room->tiles;
    p.tile_count = dev->tile_count;
    p.counters = room->counters;
    p.y = ret_y;
    s.shared[0] = static_cast<const uint8_t *>(layer->shared.w1.data);
    s.shared[1] = static_cast<const uint8_t *>(layer->shared.w3.data);
    s.shared[2] = static_cast<const uint8_t *>(layer->shared.w2.data);
    s.n_own = n_own;
    s.width = d->expert_width;
    s.has_shared = d->has_shared;
    s.round = !d->is_partial;
    s.limit = d->swiglu_limit;
    s.act = room->act;
    s.parts = room->parts;
    s.lane_row = dev->lane_row;
    s.row_lanes = room->row_lanes;
    s.lane_weight = dev->lane_weight;
    s.tiles = room->tiles;
    s.tile_count = dev->tile_count;
    s.next = room->counters;
    s.ready = s.next + 1;
    s.arrived = s.ready + n.max_tiles;
    s.done = s.arrived + (size_t)n.max_tiles * (d->expert_width / GROUP);
    s.y = ret_y;
    s.early = dev->limits.early_launches;
    p.scaled = SCALED;
    p.n_counters = (uint32_t)(s.done - s.next) + n.rows * (d->hidden / CUDA_BLOCK);
    cuda_experts_plan(dev, p);
    cuda_run(dev, "the experts", stream_kernel<SCALED>, dev->n_sms * BLOCKS_A_SM, THREADS, 0, s, w1,
             w3, w2);
    return true;
}

} /* namespace */

void cuda_experts_stream(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y)
{
    if (!run<false>(dev, rows, layer, x, experts, weights, ret_y)) {
        cuda_experts_tensor(dev, rows, layer, x, experts, weights, ret_y);
    }
}

void cuda_experts_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y)
{
    if (!run<true>(dev, rows, layer, x, experts, weights, ret_y)) {
        cuda_experts_tensor_scaled(dev, rows, layer, x, experts, weights, ret_y);
    }
}
