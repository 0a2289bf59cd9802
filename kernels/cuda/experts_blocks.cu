/* The experts of a layer in one launch, for calls of few rows.
 *
 * A block takes 32 outputs of one matrix after the other; its eight warps have an eighth of the
 * inputs each, a run of tensor.cuh, and copy its weights (cp.async) into rings of their own, over
 * the ends of items, so that a block has asked for its next weights before it waits for anything.
 * Every block sorts the rows by expert for itself, which of a few rows takes less than a launch
 * would. A tile is up to eight of an expert's rows; the shared expert's are the first. Stage 0
 * makes 32 columns of w1 and of w3 and from both the activations, stage 1 32 channels by w2, in the
 * same blocks, which wait for the tile's activations alone. Of the inputs a warp puts its run
 * through the quantiser into the order of an mma, in shared memory, and there the runs' sums meet.
 * The last block to come to 32 channels of a row adds up the row's experts.
 *
 * Order of sums: that of tensor.cu, whatever is dealt out and however; so a row's bits don't depend
 * on its batch, and what isn't served here, calls of more rows for one, goes there. Bound: as
 * there.
 *
 * Blocks wait for each other, so all of a launch must run at once: there are as many as fit on the
 * device, which has nothing else to do that could wait for this launch. Ranks that share a GPU are
 * not served: there another rank's launch is such a thing. There are two sets of counters, taken by
 * turns: a launch clears those that the next one takes.
 */
#include "kernels/cuda/experts_blocks.cuh"
#include "kernels/cuda/group.h"

namespace
{

enum {
    WARPS = TENSOR_RUNS,
    THREADS = WARPS * CUDA_WARP,
    GROUP = FORMATS_INPUT_GROUP,
    MOST_ROWS = 4, /* of more tensor's launches are quicker */
    TILE_ROWS = 8, /* of an expert, that its weights meet at once */
    NT = TILE_ROWS / 8,
    MOST_SHARED_TILES = (MOST_ROWS + TILE_ROWS - 1) / TILE_ROWS,
    DEPTH = 4,     /* chunks of a ring: one is used, three are on their way */
    MOST_USED = 8, /* experts of a row */
    MOST_CHOICES = MOST_ROWS * MOST_USED,
    MOST_BLOCKS = 2048, /* of a launch */
    NOT_OWN = 0xffff
};

struct slot {
    uint4 units[TENSOR_CHUNK_BYTES / sizeof(uint4)]; /* as they are packed */
    uint32_t scales[CUDA_WARP];
};

/* Who goes where. Lanes are rows at an expert, of all experts in turn; those of the shared one are
 * the rows, behind `max_lanes`. */
struct plan {
    uint16_t id[MOST_CHOICES], lane_of[MOST_CHOICES], is_first[MOST_CHOICES];
    uint16_t row_of[MOST_CHOICES]; /* of a lane */
    float weight_of[MOST_CHOICES];
    cuda_tile tiles[MOST_SHARED_TILES + MOST_CHOICES];
    uint16_t row_lanes[MOST_ROWS][MOST_USED]; /* ascending, ... */
    uint16_t n_lanes[MOST_ROWS];              /* ... and how many */
    uint32_t n_tiles;
};

/* Items of both stages, and the first block that had less of stage 0, and how many items of stage 1
 * make up for that. */
struct deal {
    uint32_t n[2], spare, early;
};

/* A warp's room holds its inputs, then its sums. */
struct shared_block {
    slot rings[WARPS][DEPTH];
    uint4 room[WARPS][TILE_ROWS * GROUP / 8];
    plan where;
    deal dealt;
    uint32_t *ready, *done; /* counters: [tile], [row, block] */
};
static_assert(sizeof(shared_block) <= (size_t)ARCH_MAX_SHARED_BYTES, "fits everywhere");

/* A matrix of an expert. */
struct shape {
    uint32_t form, n_chunks, n_groups, runs_log2, n_blocks, scale_rows;
    size_t scales_at;
    bool quant;
};

/* What every block reads first comes first: arguments that nobody has read yet are slow. */
struct few_experts {
    const uint32_t *ids; /* [n_rows, n_used] */
    const float *weights;
    uint32_t n_rows, n_used, first, end, max_lanes, n_shared_tiles;
    uint32_t dear; /* how many items of stage 1 one of stage 0 counts for */
    uint32_t *counters, n_counters, *launches;
    bool has_shared, round;
    float limit;
    shape of[2][2]; /* [stage][is_shared] */
    const uint8_t *shared[3];
    const float *x;
    uint32_t hidden, width;
    float *act, *parts; /* [lane, width], [lane, hidden] */
    float *y;
};

/* --- the plan */

__device__ __forceinline__ void make_plan(const few_experts &e, plan *p)
{
    const uint32_t n = e.n_rows * e.n_used, i = threadIdx.x;
    uint32_t row = 0, lower = 0, earlier = 0, same = 0;
    static_assert((int)MOST_CHOICES <= (int)THREADS, "a choice a thread");
    if (i < n) {
        const uint32_t id = e.ids[i];
        row = i / e.n_used;
        p->id[i] = id >= e.first && id < e.end ? (uint16_t)(id - e.first) : (uint16_t)NOT_OWN;
    }
    if (i == 0) {
        p->n_tiles = e.n_shared_tiles;
    }
    if (i < e.n_shared_tiles) {
        const uint32_t first = i * TILE_ROWS, left = e.n_rows - first;
        p->tiles[i] = {0, e.max_lanes + first, left < TILE_ROWS ? left : (uint32_t)TILE_ROWS};
    }
    __syncthreads();
    const bool is_own = i < n && p->id[i] != NOT_OWN;
    if (is_own) {
        for (uint32_t j = 0; j < n; j++) {
            lower += p->id[j] < p->id[i];
            earlier += p->id[j] == p->id[i] && j < i;
            same += p->id[j] == p->id[i];
        }
        p->lane_of[i] = (uint16_t)(lower + earlier);
        p->row_of[lower + earlier] = (uint16_t)row;
        p->weight_of[lower + earlier] = e.weights[i];
    }
    if (i < n) {
        p->is_first[i] = is_own && earlier % TILE_ROWS == 0;
    }
    __syncthreads();
    if (is_own && earlier % TILE_ROWS == 0) {
        const uint32_t left = same - earlier;
        uint32_t tile = e.n_shared_tiles;
        for (uint32_t j = 0; j < n; j++) {
            const bool is_before = p->id[j] < p->id[i] || (p->id[j] == p->id[i] && j < i);
            tile += p->is_first[j] && is_before;
        }
        p->tiles[tile] = {p->id[i], lower + earlier, left < TILE_ROWS ? left : (uint32_t)TILE_ROWS};
        atomicAdd(&p->n_tiles, 1u);
    }
    if (i < n) {
        uint32_t all = 0, before = 0;
        for (uint32_t j = row * e.n_used; j < (row + 1) * e.n_used; j++) {
            const bool counts = p->id[j] != NOT_OWN;
            all += counts;
            before += counts && is_own && p->lane_of[j] < p->lane_of[i];
        }
        if (is_own) {
            p->row_lanes[row][before] = p->lane_of[i];
        }
        if (i % e.n_used == 0) {
            p->n_lanes[row] = (uint16_t)all;
        }
    }
    __syncthreads();
}

/* --- items, a block's in their order: those of stage 0 in turn; of stage 1 first those blocks get
 * some that had less of stage 0 */

__device__ __forceinline__ void deal_out(const few_experts &e, uint32_t n_tiles, deal *ret)
{
    for (int stage = 0; stage < 2; stage++) {
        ret->n[stage] = e.of[stage][0].n_blocks * (n_tiles - e.n_shared_tiles) +
                        e.of[stage][1].n_blocks * e.n_shared_tiles;
    }
    ret->spare = ret->n[0] % gridDim.x;
    ret->early = e.dear * (gridDim.x - ret->spare);
}

__device__ __forceinline__ uint32_t first_of_second(const deal &d)
{
    const uint32_t i = blockIdx.x >= d.spare ? blockIdx.x - d.spare : d.early + blockIdx.x;
    return d.n[0] + i;
}

__device__ __forceinline__ uint32_t first_item(const deal &d)
{
    return blockIdx.x < d.n[0] ? blockIdx.x : first_of_second(d);
}

__device__ __forceinline__ uint32_t next_item(const deal &d, uint32_t i)
{
    if (i < d.n[0]) {
        return i + gridDim.x < d.n[0] ? i + gridDim.x : first_of_second(d);
    }
    i -= d.n[0];
    if (i >= d.early) {
        return d.n[0] + i + gridDim.x;
    }
    i += gridDim.x - d.spare;
    return d.n[0] + (i < d.early ? i : d.early + blockIdx.x);
}

struct item {
    uint32_t stage, is_shared, tile, block;
};

__device__ __forceinline__ item item_of(const few_experts &e, const deal &d, uint32_t i)
{
    item to;
    to.stage = i >= d.n[0];
    i -= to.stage ? d.n[0] : 0;
    const uint32_t of_shared = e.of[to.stage][1].n_blocks * e.n_shared_tiles;
    to.is_shared = i < of_shared;
    i -= to.is_shared ? 0 : of_shared;
    const uint32_t each = e.of[to.stage][to.is_shared].n_blocks;
    to.tile = i / each + (to.is_shared ? 0 : e.n_shared_tiles);
    to.block = i % each;
    return to;
}

/* --- weights on their way */

struct weights {
    const cuda_weights &w1, &w3, &w2;
};

/* Of a warp: chunk after chunk of its run of each group of each matrix of each item. */
struct reader {
    slot *ring;
    const uint8_t *units, *scales; /* of the next chunk: this lane's */
    uint32_t item, matrix, group;  /* to begin next: matrix 0 is w1 or w2, 1 is w3 */
    uint32_t chunk, end, form, to;
};

__device__ __forceinline__ uint32_t first_chunk(const shape &m, uint32_t run)
{
    return run * m.n_chunks >> m.runs_log2;
}

__device__ __forceinline__ void begin(const few_experts &e, const weights &w, const deal &d,
                                      const plan &p, reader *r)
{
    const item to = item_of(e, d, r->item);
    const shape &m = e.of[to.stage][to.is_shared];
    const uint32_t lane = cuda_lane(), run = r->group * WARPS + threadIdx.x / CUDA_WARP;
    const uint32_t which = to.stage ? 2 : r->matrix;
    const uint8_t *data;
    if (to.is_shared) {
        data = e.shared[which];
    } else {
        const cuda_weights &of = which == 0 ? w.w1 : (which == 1 ? w.w3 : w.w2);
        data = static_cast<const uint8_t *>(of.data[p.tiles[to.tile].expert]);
    }
    r->form = m.form;
    r->chunk = first_chunk(m, run);
    r->end = first_chunk(m, run + 1);
    r->units = data + ((size_t)to.block * m.n_chunks + r->chunk) * TENSOR_CHUNK_BYTES +
               lane * CUDA_UNIT_BYTES;
    r->scales = data + m.scales_at + (size_t)to.block * m.scale_rows * CUDA_BLOCK + 4 * lane;
    if (++r->group == m.n_groups) {
        r->group = 0;
        if (to.stage || ++r->matrix == 2) {
            r->matrix = 0;
            r->item = next_item(d, r->item);
        }
    }
}

/* Asks for one chunk more, if there is one, and closes a group in any case. */
__device__ __forceinline__ void read_on(const few_experts &e, const weights &w, const deal &d,
                                        const plan &p, reader *r)
{
    while (r->chunk == r->end && r->item < d.n[0] + d.n[1]) {
        begin(e, w, d, p, r);
    }
    if (r->chunk < r->end) {
        slot *to = r->ring + r->to;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            arch_copy_16(to->units + i * CUDA_WARP + cuda_lane(),
                         r->units + i * CUDA_WARP * CUDA_UNIT_BYTES);
        }
        if (r->form == CUDA_FP4_E8M0) { /* a scale for each unit */
            arch_copy_4(to->scales + cuda_lane(),
                        r->scales + (size_t)r->chunk * TENSOR_UNITS * CUDA_BLOCK);
        } else if (r->form == CUDA_FP8 && cuda_lane() < CUDA_BLOCK / 4) { /* for two chunks */
            arch_copy_4(to->scales + cuda_lane(), r->scales + (size_t)(r->chunk / 2) * CUDA_BLOCK);
        }
        r->units += TENSOR_CHUNK_BYTES;
        r->chunk++;
        r->to = r->to + 1 == DEPTH ? 0 : r->to + 1;
    }
    arch_copy_close();
}

/* --- inputs */

/* Row r of a tile, before the quantiser. */
__device__ __forceinline__ const float *input_row(const few_experts &e, const plan &p,
                                                  const item &now, uint32_t first, uint32_t r)
{
    if (now.stage) {
        return e.act + (size_t)(first + r) * e.width;
    }
    return e.x + (size_t)(now.is_shared ? first + r - e.max_lanes : p.row_of[first + r]) * e.hidden;
}

/* n groups of 128 inputs, from `from` on, of all rows of the tile. */
__device__ __forceinline__ void convert(const few_experts &e, const plan &p, const item &now,
                                        const cuda_tile &tile, const shape &m, uint32_t from,
                                        uint32_t n, uint4 *image)
{
    enum { AT_ONCE = 4 };
    __syncwarp(); /* what was there is used */
    uint32_t row = 0, group = 0;
    for (uint32_t left = tile.n * n; left > 0;) {
        const uint32_t many = left < AT_ONCE ? left : (uint32_t)AT_ONCE;
        float4 x[AT_ONCE];
        uint32_t r = row, g = group;
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (i < many) {
                const uint32_t k = (from + g) * GROUP + 4 * cuda_lane();
                x[i] = __ldcg(
                    reinterpret_cast<const float4 *>(input_row(e, p, now, tile.first, r) + k));
                g++;
                r += g == n;
                g = g == n ? 0 : g;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (i < many) {
                const float v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
                blocks_put(m.form, m.quant, v, row, group * GROUP + 4 * cuda_lane(),
                           image + (size_t)row * n * (GROUP / 8));
                group++;
                row += group == n;
                group = group == n ? 0 : group;
            }
        }
        left -= many;
    }
    __syncwarp();
}

/* --- sums */

/* Everything that a block goes by. */
struct place {
    const few_experts &e;
    const weights &w;
    shared_block *s;
    reader *r;
    uint32_t *used;
};

/* This warp's run. */
__device__ __forceinline__ void sum_run(const place &at, const item &now, const cuda_tile &tile,
                                        uint32_t run, float (*sums)[NT][4])
{
    const shape &m = at.e.of[now.stage][now.is_shared];
    const uint32_t warp = threadIdx.x / CUDA_WARP, g = cuda_lane() / 4;
    const uint32_t a_set = blocks_chunks(m.form), words = blocks_words(m.form);
    const uint32_t end = first_chunk(m, run + 1);
    uint32_t chunk = first_chunk(m, run), set = chunk / a_set;
    const uint32_t end_set = (end + a_set - 1) / a_set, fit = TILE_ROWS / tile.n;
    uint4 *image = at.s->room[warp];
#pragma unroll
    for (int k = 0; k < 8 * NT; k++) {
        sums[k / (4 * NT)][k / 4 % NT][k % 4] = 0.0f;
    }
    while (chunk < end) {
        const uint32_t n = end_set - set < fit ? end_set - set : fit;
        convert(at.e, at.s->where, now, tile, m, set, n, image);
        /* Where there are fewer rows, any row's: nobody stores their sums. */
        const uint32_t row = g < tile.n ? g : 0, row_words = n * (GROUP / 8);
        const uint32_t second = NT > 1 && g + 8 < tile.n ? 8 * row_words : 0;
        const uint32_t stop = (set + n) * a_set < end ? (set + n) * a_set : end;
        uint32_t x = row * row_words + cuda_lane() % 4 + (chunk - set * a_set) * words;
        for (; chunk < stop; chunk++) {
            arch_copy_wait<DEPTH - 2>();
            __syncwarp(); /* all lanes' copies are there, and the slot before is free */
            read_on(at.e, at.w, at.s->dealt, at.s->where, at.r);
            const slot &from = at.r->ring[*at.used];
            *at.used = *at.used + 1 == DEPTH ? 0 : *at.used + 1;
            const uint32_t x_there = x ^ row % 2 * 4;
            if (m.form == CUDA_FP4_E8M0) {
                blocks_add<CUDA_FP4_E8M0, NT>(from.units, from.scales, image, x_there, second,
                                              sums);
            } else if (m.form == CUDA_FP8) {
                blocks_add<CUDA_FP8, NT>(from.units, from.scales, image, x_there, second, sums);
            } else {
                blocks_add<CUDA_BF16, NT>(from.units, from.scales, image, x_there, second, sums);
            }
            x += words;
        }
        set += n;
    }
}

/* 32 outputs of a matrix: of row 8 i + warp and output `lane`, all inputs. */
__device__ __forceinline__ void sum_block(const place &at, const item &now, const cuda_tile &tile,
                                          float *ret)
{
    const shape &m = at.e.of[now.stage][now.is_shared];
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    for (uint32_t group = 0; group < m.n_groups; group++) {
        float sums[2][NT][4];
        sum_run(at, now, tile, group * WARPS + warp, sums);
        __syncwarp(); /* the image is used, and sums take its place */
        blocks_store<NT>(sums, tile.n, reinterpret_cast<float *>(at.s->room[warp]));
        __syncthreads();
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint32_t row = 8 * i + warp;
            if (row < tile.n) {
                float sum = 0.0f;
#pragma unroll
                for (int k = 0; k < WARPS; k++) {
                    const float one = reinterpret_cast<const float *>(
                        at.s->room[k])[row * CUDA_BLOCK + cuda_lane()];
                    sum = k ? sum + one : one;
                }
                ret[i] = group ? ret[i] + sum : sum;
            }
        }
        __syncthreads();
    }
}

/* --- a stage's end */

/* 32 channels of a row have come from one more of its experts: the last adds them all up, in
 * ascending order, the shared one's last. A warp's. */
__device__ __forceinline__ void arrive(const few_experts &e, const plan &p, uint32_t row,
                                       uint32_t block, uint32_t *done)
{
    const uint32_t n = p.n_lanes[row] + e.has_shared, channel = block * CUDA_BLOCK + cuda_lane();
    uint32_t before = 0;
    __syncwarp();
    if (cuda_lane() == 0) {
        __threadfence();
        before = atomicAdd(done + row * (e.hidden / CUDA_BLOCK) + block, 1u);
    }
    if (__shfl_sync(0xffffffffu, before, 0) + 1 != n) {
        return;
    }
    __threadfence();
    __syncwarp();
    float part[MOST_USED + 1];
#pragma unroll
    for (uint32_t k = 0; k < MOST_USED + 1; k++) {
        if (k < n) {
            const uint32_t lane = k < p.n_lanes[row] ? p.row_lanes[row][k] : e.max_lanes + row;
            part[k] = __ldcg(e.parts + (size_t)lane * e.hidden + channel);
        }
    }
    float total = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < MOST_USED + 1; k++) {
        if (k < n) {
            total += part[k];
        }
    }
    e.y[(size_t)row * e.hidden + channel] = cuda_rounded(total, e.round);
}

__device__ __forceinline__ void make_item(const place &at, const item &now)
{
    const few_experts &e = at.e;
    const plan &p = at.s->where;
    const cuda_tile tile = p.tiles[now.tile];
    const uint32_t warp = threadIdx.x / CUDA_WARP, out = now.block * CUDA_BLOCK + cuda_lane();
    float a[NT], b[NT];
#pragma unroll
    for (int i = 0; i < NT; i++) {
        b[i] = 0.0f;
    }
#pragma unroll 1
    for (uint32_t matrix = now.stage; matrix < 2; matrix++) { /* w1, then w3; or w2 */
#pragma unroll
        for (int i = 0; i < NT; i++) {
            a[i] = b[i];
        }
        sum_block(at, now, tile, b);
    }
    if (now.stage == 0) {
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint32_t row = 8 * i + warp;
            if (row < tile.n) {
                const float weight = now.is_shared ? 1.0f : p.weight_of[tile.first + row];
                e.act[(size_t)(tile.first + row) * e.width + out] =
                    bf16_round(cuda_gated(bf16_round(a[i]), bf16_round(b[i]), e.limit, weight));
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(at.s->ready + now.tile, 1u);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = 8 * i + warp;
        if (row < tile.n) {
            e.parts[(size_t)(tile.first + row) * e.hidden + out] = bf16_round(b[i]);
            arrive(e, p,
                   now.is_shared ? tile.first + row - e.max_lanes : p.row_of[tile.first + row],
                   now.block, at.s->done);
        }
    }
}

/* --- the launch */

/* The next launch's counters, and rows that no expert here has. */
__device__ __forceinline__ void clear(const few_experts &e, const shared_block &s)
{
    uint32_t *others = s.ready == e.counters ? e.counters + e.n_counters : e.counters;
    for (uint32_t i = blockIdx.x * THREADS + threadIdx.x; i < e.n_counters;
         i += gridDim.x * THREADS) {
        others[i] = 0;
    }
    for (uint32_t row = blockIdx.x; row < e.n_rows && !e.has_shared; row += gridDim.x) {
        for (uint32_t i = threadIdx.x; i < e.hidden && s.where.n_lanes[row] == 0; i += THREADS) {
            e.y[(size_t)row * e.hidden + i] = 0.0f;
        }
    }
}

__global__ void __launch_bounds__(THREADS, ARCH_SM120A ? 1 : 2)
    experts_blocks_kernel(const __grid_constant__ few_experts e,
                          const __grid_constant__ cuda_weights w1,
                          const __grid_constant__ cuda_weights w3,
                          const __grid_constant__ cuda_weights w2)
{
    cuda_grid_begin();
    extern __shared__ uint4 experts_shared[];
    shared_block *s = reinterpret_cast<shared_block *>(experts_shared);
    const weights w = {w1, w3, w2};
    make_plan(e, &s->where);
    const deal &d = s->dealt;
    if (threadIdx.x == 0) {
        const uint32_t launches = e.launches[blockIdx.x];
        e.launches[blockIdx.x] = launches + 1;
        s->ready = e.counters + launches % 2 * e.n_counters;
        s->done = s->ready + MOST_SHARED_TILES + MOST_CHOICES;
        deal_out(e, s->where.n_tiles, &s->dealt);
    }
    __syncthreads();
    uint32_t used = 0;
    reader r = {};
    r.ring = s->rings[threadIdx.x / CUDA_WARP];
    r.item = first_item(d);
    for (int i = 0; i < DEPTH - 1; i++) {
        read_on(e, w, d, s->where, &r);
    }
    clear(e, *s);
    const place at = {e, w, s, &r, &used};
    uint32_t waited_for = UINT32_MAX; /* tile */
    for (uint32_t i = first_item(d); i < d.n[0] + d.n[1]; i = next_item(d, i)) {
        const item now = item_of(e, d, i);
        if (now.stage && now.tile != waited_for) {
            if (threadIdx.x == 0) {
                blocks_wait(s->ready + now.tile, e.of[0][now.is_shared].n_blocks);
            }
            __syncthreads();
            waited_for = now.tile;
        }
        make_item(at, now);
    }
}

/* --- which experts */

shape shape_of(const struct ops_device *dev, const struct ops_matrix *m, bool routed)
{
    const uint32_t inputs = tensor_inputs_of(m->form), group = m->form == CUDA_FP8 ? 128 : 32;
    shape to = {};
    to.form = m->form;
    to.n_chunks = m->cols / inputs / TENSOR_UNITS;
    to.n_groups = routed ? 1 : tensor_groups_of(m->rows, m->cols, m->form);
    to.runs_log2 = blocks_log2(to.n_groups) + BLOCKS_WARPS_LOG2;
    to.n_blocks = m->rows / CUDA_BLOCK;
    to.quant = cuda_wants_quant(dev, m);
    if (m->form != CUDA_BF16) {
        to.scale_rows = cuda_groups(m->cols, inputs, group);
        to.scales_at = cuda_scales_offset(m->rows, m->cols, inputs);
    }
    return to;
}

bool is_served(const struct ops_expert *e)
{
    const struct ops_matrix *m[3] = {&e->w1, &e->w3, &e->w2};
    bool ok = e->w1.form == e->w3.form && e->w1.quant_input == e->w3.quant_input;
    for (int i = 0; i < 3; i++) {
        ok = ok &&
             (m[i]->form == CUDA_BF16 || m[i]->form == CUDA_FP8 || m[i]->form == CUDA_FP4_E8M0);
    }
    return ok;
}

uint32_t counters_of(const struct ops_dims *d)
{
    return MOST_SHARED_TILES + MOST_CHOICES + MOST_ROWS * (d->hidden / CUDA_BLOCK);
}

/* False: not this one, nothing is done. */
bool run(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
         const float *x, const uint32_t *experts, const float *weights, float *ret_y)
{
    const struct ops_dims *d = &dev->d;
    const uint32_t n_own = d->expert_end - d->expert_first, n = rows->n_rows;
    const struct ops_expert *own = n_own ? layer->experts + d->expert_first : NULL;
    if (n == 0) {
        return true;
    }
    if (n > MOST_ROWS || d->n_experts_used > MOST_USED || !dev->blocks.blocks_a_sm ||
        (dev->group && !cuda_group_has_parts(dev->group)) || (own && !is_served(own)) ||
        (d->has_shared && !is_served(&layer->shared))) {
        return false;
    }
    cuda_weights w1, w3, w2;
    if (!cuda_experts_gather(dev, own, n_own, &w1, &w3, &w2)) {
        return true; /* and the device failed */
    }
    few_experts e = {};
    const struct ops_expert *of[2] = {own, d->has_shared ? &layer->shared : NULL};
    for (int i = 0; i < 2; i++) {
        if (of[i]) {
            e.of[0][i] = shape_of(dev, &of[i]->w1, i == 0);
            e.of[1][i] = shape_of(dev, &of[i]->w2, i == 0);
        }
    }
    e.shared[0] = static_cast<const uint8_t *>(layer->shared.w1.data);
    e.shared[1] = static_cast<const uint8_t *>(layer->shared.w3.data);
    e.shared[2] = static_cast<const uint8_t *>(layer->shared.w2.data);
    e.ids = experts;
    e.weights = weights;
    e.x = x;
    e.n_rows = n;
    e.n_used = d->n_experts_used;
    e.first = d->expert_first;
    e.end = d->expert_end;
    e.hidden = d->hidden;
    e.width = d->expert_width;
    e.max_lanes = n * (d->n_experts_used < n_own ? d->n_experts_used : n_own);
    e.has_shared = d->has_shared;
    e.n_shared_tiles = d->has_shared ? (n + TILE_ROWS - 1) / TILE_ROWS : 0;
    e.round = !d->is_partial;
    e.limit = d->swiglu_limit;
    e.act = dev->lane_a;
    e.parts = dev->lane_y;
    e.dear = d->expert_width ? 2 * d->hidden / d->expert_width : 0;
    e.counters = dev->blocks.counters;
    e.n_counters = counters_of(d);
    e.launches = dev->blocks.launches;
    e.y = ret_y;
    const uint32_t fit = dev->n_sms * dev->blocks.blocks_a_sm;
    const uint32_t n_blocks = fit < MOST_BLOCKS ? fit : (uint32_t)MOST_BLOCKS;
    cuda_run(dev, "the experts", experts_blocks_kernel, n_blocks, THREADS, sizeof(shared_block), e,
             w1, w3, w2);
    return true;
}

} /* namespace */

bool cuda_experts_blocks_room(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    bool ok = true;
    int n = 0;
    if (d->exact || d->hidden % GROUP || d->expert_width % GROUP) {
        return true;
    }
    dev->blocks.launches = static_cast<uint32_t *>(cuda_room(dev, MOST_BLOCKS, 1, &ok));
    dev->blocks.counters = static_cast<uint32_t *>(cuda_room(dev, counters_of(d), 2, &ok));
    if (ok && !dev->limits.only_plan &&
        cuda_kept(dev,
                  cudaFuncSetAttribute(experts_blocks_kernel,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)sizeof(shared_block)),
                  "shared memory for experts") &&
        cuda_kept(dev,
                  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, experts_blocks_kernel, THREADS,
                                                                sizeof(shared_block)),
                  "room for experts")) {
        dev->blocks.blocks_a_sm = (uint32_t)n;
    }
    return ok && !dev->failed;
}

void cuda_experts_blocks(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y)
{
    if (!run(dev, rows, layer, x, experts, weights, ret_y)) {
        cuda_experts_tensor(dev, rows, layer, x, experts, weights, ret_y);
    }
}
