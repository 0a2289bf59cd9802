/* The dense products of a layer for few rows, one launch an operation: project, and oproj.
 *
 * Such a call reads its weights once and does little else, and of its few microseconds each launch
 * takes three. So products that need each other's results are stages of one launch here: a block
 * takes 32 outputs of one matrix after the other, and before it waits for what others make it has
 * asked for the first weights of what it does with that. Each of its 8 warps has an eighth of the
 * inputs, a row of chunks, and copies them (cp.async) into a ring of its own, over the ends of
 * items. A block's sums meet in shared memory, so blocks
 * tell each other only that a stage is over: one fence and one count an item.
 *
 * Inputs are taken as the floats that they are: a warp puts its eighth through the norm and the
 * quantiser, as far as the matrix wants them, into bfloat16 in the order that an mma takes.
 *
 * Order of sums: that of tensor.cu, to the bit: a warp's eighth is a run of each group, or several,
 * or whole groups, whose runs it adds up in turn ("pieces"); the pieces are added in turn, runs of
 * a group first. It hangs on the matrix's shape alone, so a row's bits don't depend on its batch,
 * and calls of more rows go to tensor.cu and give the same. Bound: as there.
 *
 * Blocks wait for each other, so all of a launch must run at once: there are as many as fit on the
 * device, which has nothing else to do that could wait for this launch. Ranks that share a GPU are
 * not served: there another rank's launch is such a thing.
 *
 * What is counted is never set back: each block knows how many launches it has been in, all the
 * same number, and waits for that many times what a launch counts.
 */
#include "kernels/cuda/group.h"
#include "kernels/cuda/dense_stream.cuh"

namespace
{

enum {
    WARPS = TENSOR_RUNS,
    THREADS = WARPS * CUDA_WARP,
    GROUP = FORMATS_INPUT_GROUP,
    MOST_ROWS = 8, /* of more the inputs take longer than the weights */
    NT = MOST_ROWS / 8,
    DEPTH = 5, /* chunks of a ring: one is used, four are on their way */
    MOST_MATRICES = CUDA_MOST_JOINED + 1,
    MOST_BLOCKS = 2048,  /* of a launch */
    MOST_HEAD_DIM = 512, /* floats that fit a warp's room */
    MANY_INPUTS = 1024,  /* a group of 128 for each warp: all come in multiples of it */
    ALONE = 0xffffffffu  /* no counter */
};

struct slot {
    uint4 units[TENSOR_CHUNK_BYTES / sizeof(uint4)]; /* as they are packed */
    uint32_t scales[CUDA_BLOCK / 4];
};

/* A warp's room holds the rows' inputs of one group of 128 or more, then its pieces, two at most.
 */
struct shared_block {
    slot rings[WARPS][DEPTH];
    uint4 room[WARPS][MOST_ROWS * GROUP / 8];
    float roots[MOST_ROWS];
};
static_assert(sizeof(shared_block) <= (size_t)ARCH_MAX_SHARED_BYTES, "fits everywhere");
static_assert(sizeof(shared_block::room[0]) >= MOST_HEAD_DIM * sizeof(float), "a head fits");

struct matrix {
    const uint8_t *data;
    size_t scales_at;
    uint32_t form, n_chunks, scale_rows;
    uint32_t n_groups, runs_log2, n_pieces; /* of the order of sums; runs; pieces of a warp */
    const float *x;
    size_t x_stride;
    const float *norm; /* weights of the norm that x goes through; NULL: none */
    bool quant, round;
    float *y;
    size_t y_stride;
    uint32_t waits, wanted; /* counter, and how much a launch counts there before x is whole */
    uint32_t counts, shift; /* counter of its first outputs, and of how many blocks: 1 << shift */
};

/* Heads that are finished once their columns are whole, in place. */
struct heads {
    float *x;
    uint32_t n; /* of a row */
    const float *norm;
    bool quant;
    uint32_t counts; /* of the first head */
};

/* Matrices, the second stage from `n_first_items` on, and who does its items. What every block
 * reads first comes first: arguments that nobody has read yet are slow. */
struct dense {
    uint32_t n_first_items, n_items;
    uint32_t second_block, n_second_blocks; /* the first of those with items of stage 1; how many */
    uint32_t end[MOST_MATRICES];            /* items up to here */
    matrix of[MOST_MATRICES];
    uint32_t n_rows;
    heads finished[2];
    uint32_t n_finished, head_dim, rope_dim, head_blocks;
    const float *rope;
    float eps;
    float *normed;                    /* what x is behind its norm, for others, ... */
    uint32_t norm_dim, n_norm_blocks; /* ... and how many blocks write it */
    uint32_t *counters, *launches;    /* [block] */
};

/* --- items: a block's, in their order */

__device__ __forceinline__ uint32_t first_of_second(const dense &d)
{
    const bool is_before = blockIdx.x < d.second_block;
    const uint32_t i = blockIdx.x + (is_before ? gridDim.x : 0) - d.second_block;
    return i < d.n_second_blocks ? d.n_first_items + i : d.n_items;
}

__device__ __forceinline__ uint32_t first_item(const dense &d)
{
    return blockIdx.x < d.n_first_items ? blockIdx.x : first_of_second(d);
}

__device__ __forceinline__ uint32_t next_item(const dense &d, uint32_t i)
{
    if (i >= d.n_first_items) {
        return i + d.n_second_blocks;
    }
    return i + gridDim.x < d.n_first_items ? i + gridDim.x : first_of_second(d);
}

__device__ __forceinline__ uint32_t matrix_of(const dense &d, uint32_t item, uint32_t *ret_block)
{
    uint32_t i = 0, first = 0;
    for (; item >= d.end[i]; i++) {
        first = d.end[i];
    }
    *ret_block = item - first;
    return i;
}

/* --- weights on their way */

/* Of a warp: chunk after chunk of its eighth of each item. */
struct reader {
    slot *ring;
    const uint8_t *units, *scales; /* of the next chunk: this lane's */
    uint32_t item, chunk, end, form, to;
};

__device__ __forceinline__ void begin(const dense &d, reader *r)
{
    uint32_t block;
    const matrix &m = d.of[matrix_of(d, r->item, &block)];
    const uint32_t lane = cuda_lane(), each = m.n_chunks / WARPS;
    r->form = m.form;
    r->chunk = threadIdx.x / CUDA_WARP * each;
    r->end = r->chunk + each;
    r->units = m.data + ((size_t)block * m.n_chunks + r->chunk) * TENSOR_CHUNK_BYTES +
               lane * CUDA_UNIT_BYTES;
    r->scales = m.data + m.scales_at + (size_t)block * m.scale_rows * CUDA_BLOCK + 4 * lane;
    r->item = next_item(d, r->item);
}

/* Asks for one chunk more, if there is one, and closes a group in any case. */
__device__ __forceinline__ void read_on(const dense &d, reader *r)
{
    if (r->chunk == r->end && r->item < d.n_items) {
        begin(d, r);
    }
    if (r->chunk < r->end) {
        slot *to = r->ring + r->to;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            arch_copy_16(to->units + i * CUDA_WARP + cuda_lane(),
                         r->units + i * CUDA_WARP * CUDA_UNIT_BYTES);
        }
        if (r->form == CUDA_FP8 && cuda_lane() < CUDA_BLOCK / 4) { /* for two chunks */
            arch_copy_4(to->scales + cuda_lane(), r->scales + (size_t)(r->chunk / 2) * CUDA_BLOCK);
        }
        r->units += TENSOR_CHUNK_BYTES;
        r->chunk++;
        r->to = r->to + 1 == DEPTH ? 0 : r->to + 1;
    }
    arch_copy_close();
}

/* --- inputs */

/* All rows' inputs of n groups of 128 from `first` on. */
__device__ __forceinline__ void convert(const matrix &m, uint32_t n_rows, uint32_t first,
                                        uint32_t n, const float *roots, uint4 *image)
{
    enum { AT_ONCE = 4 };
    __syncwarp(); /* what was there is used */
    uint32_t row = 0, group = 0;
    for (uint32_t left = n_rows * n; left > 0;) {
        const uint32_t now = left < AT_ONCE ? left : AT_ONCE;
        float4 x[AT_ONCE];
        uint32_t r = row, g = group;
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (i < now) {
                const uint32_t k = (first + g) * GROUP + 4 * cuda_lane();
                x[i] = __ldcg(reinterpret_cast<const float4 *>(m.x + r * m.x_stride + k));
                g++;
                r += g == n;
                g = g == n ? 0 : g;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            if (i < now) {
                const uint32_t k = (first + group) * GROUP + 4 * cuda_lane();
                float v[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
                if (m.norm) { /* as warp_rms_norm */
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        v[c] = bf16_round(v[c] / roots[row] * m.norm[k + c]);
                    }
                }
                dense_put(m.form, m.quant, v, row, group * GROUP + 4 * cuda_lane(),
                          image + (size_t)row * n * (GROUP / 8));
                group++;
                row += group == n;
                group = group == n ? 0 : group;
            }
        }
        left -= now;
    }
    __syncwarp();
}

/* --- an item */

/* Pieces of a warp as mma leaves them: the first of two, and the one that is being summed. */
struct pieces {
    float first[2][NT][4], last[2][NT][4];
};

/* This warp's eighth: its pieces. */
__device__ __forceinline__ void sum_pieces(const dense &d, const matrix &m, shared_block *s,
                                           reader *r, uint32_t *used, pieces *p)
{
    const uint32_t warp = threadIdx.x / CUDA_WARP, g = cuda_lane() / 4;
    const uint32_t chunks_a_set = dense_chunks(m.form), words_a_chunk = dense_words(m.form);
    const uint32_t n_sets = m.n_chunks / WARPS / chunks_a_set, fit = MOST_ROWS / d.n_rows;
    const uint32_t at_once = fit < n_sets ? fit : n_sets;
    const bool folds = m.n_groups % TENSOR_RUNS == 0;
    uint4 *image = s->room[warp];
    uint32_t run = warp * m.n_groups, run_end = (run + 1) * m.n_chunks >> m.runs_log2;
    uint32_t chunk = warp * (m.n_chunks / WARPS);
    float sums[2][NT][4];
#pragma unroll
    for (int k = 0; k < 8 * NT; k++) {
        sums[k / (4 * NT)][k / 4 % NT][k % 4] = 0.0f;
    }
    for (uint32_t set = 0; set < n_sets; set += at_once) {
        const uint32_t n = n_sets - set < at_once ? n_sets - set : at_once;
        convert(m, d.n_rows, warp * n_sets + set, n, s->roots, image);
        /* Where there are fewer rows, any row's: nobody stores their sums. */
        const uint32_t row = g < d.n_rows ? g : 0, row_words = n * (GROUP / 8);
        const uint32_t second = NT > 1 && g + 8 < d.n_rows ? 8 * row_words : 0;
        uint32_t x = row * row_words + cuda_lane() % 4;
        for (uint32_t k = 0; k < n * chunks_a_set; k++) {
            arch_copy_wait<DEPTH - 2>();
            __syncwarp(); /* scales are there, and the slot before this one is free */
            read_on(d, r);
            const slot &at = r->ring[*used];
            *used = *used + 1 == DEPTH ? 0 : *used + 1;
            if (m.form == CUDA_FP8) {
                dense_add<CUDA_FP8, NT>(at.units, at.scales, image, x ^ row % 2 * 4, second, sums);
            } else {
                dense_add<CUDA_BF16, NT>(at.units, at.scales, image, x ^ row % 2 * 4, second, sums);
            }
            x += words_a_chunk;
            if (++chunk == run_end) {
                const bool fresh = !folds || run % TENSOR_RUNS == 0;
                const bool second_begins = fresh && run != warp * m.n_groups;
#pragma unroll
                for (int i = 0; i < 8 * NT; i++) {
                    float &last = p->last[i / (4 * NT)][i / 4 % NT][i % 4];
                    float &sum = sums[i / (4 * NT)][i / 4 % NT][i % 4];
                    float &first = p->first[i / (4 * NT)][i / 4 % NT][i % 4];
                    first = second_begins ? last : first;
                    last = fresh ? sum : last + sum;
                    sum = 0.0f;
                }
                run++;
                run_end = (run + 1) * m.n_chunks >> m.runs_log2;
            }
        }
    }
}

/* One output of a row: all warps' pieces, in turn. */
__device__ __forceinline__ float sum_of_pieces(const matrix &m, const shared_block &s,
                                               uint32_t n_rows, uint32_t row)
{
    const bool folds = m.n_groups % TENSOR_RUNS == 0;
    const uint32_t each = m.n_pieces, n = WARPS * each, last = (folds ? n : (uint32_t)WARPS) - 1;
    float total = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (uint32_t q = 0; q < n; q++) {
        const uint32_t warp = each == 2 ? q / 2 : q, piece = each == 2 ? q % 2 : 0;
        const float value = reinterpret_cast<const float *>(
            s.room[warp])[(piece * n_rows + row) * CUDA_BLOCK + cuda_lane()];
        sum = (q & last) == 0 ? value : sum + value;
        if ((q & last) == last) {
            total = q == last ? sum : total + sum;
        }
    }
    return total;
}

__device__ __forceinline__ void make_item(const dense &d, const matrix &m, uint32_t block,
                                          shared_block *s, reader *r, uint32_t *used)
{
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    pieces p;
    sum_pieces(d, m, s, r, used, &p);
    __syncwarp(); /* the image is used, and pieces take its place */
    float *room = reinterpret_cast<float *>(s->room[warp]);
    if (m.n_pieces == 2) {
        dense_store<NT>(p.first, d.n_rows, room);
        room += d.n_rows * CUDA_BLOCK;
    }
    dense_store<NT>(p.last, d.n_rows, room);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = i * WARPS + warp;
        if (row < d.n_rows) {
            const float total = sum_of_pieces(m, *s, d.n_rows, row);
            m.y[row * m.y_stride + block * CUDA_BLOCK + cuda_lane()] = cuda_rounded(total, m.round);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && m.counts != ALONE) {
        __threadfence();
        atomicAdd(d.counters + m.counts + (block >> m.shift), 1u);
    }
}

/* --- what waits for others */

/* The rows' roots for the norm, in every block; and some blocks write a row of what comes out. The
 * sum is warp_dot's, with more of it under way. */
__device__ __forceinline__ void find_roots(const dense &d, const matrix &m, float *roots)
{
    enum { AT_ONCE = 16 };
    static_assert(MANY_INPUTS % (AT_ONCE * CUDA_WARP) == 0, "whole turns");
    const uint32_t n = d.norm_dim, i = first_of_second(d) - d.n_first_items;
    for (uint32_t row = threadIdx.x / CUDA_WARP; row < d.n_rows; row += WARPS) {
        const float *x = m.x + row * m.x_stride + cuda_lane();
        float sum = 0.0f;
        for (uint32_t k = 0; k < n; k += AT_ONCE * CUDA_WARP) {
            float v[AT_ONCE];
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                v[c] = __ldcg(x + k + c * CUDA_WARP);
            }
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++) {
                sum += v[c] * v[c];
            }
        }
        const float root = sqrtf(warp_sum(sum) / (float)n + d.eps);
        if (cuda_lane() == 0) {
            roots[row] = root;
        }
    }
    __syncthreads();
    for (uint32_t row = i; row < d.n_rows; row += d.n_norm_blocks) {
        for (uint32_t k = threadIdx.x; k < n; k += THREADS) {
            d.normed[(size_t)row * n + k] =
                bf16_round(__ldcg(m.x + row * m.x_stride + k) / roots[row] * m.norm[k]);
        }
    }
}

/* A head of a row: norm, rotation, and for a key-value row the quantiser. A warp's. */
__device__ __forceinline__ void finish_head(const dense &d, const heads &h, uint32_t row,
                                            uint32_t head, float *room)
{
    float *x = h.x + ((size_t)row * h.n + head) * d.head_dim;
    enum { AT_ONCE = 8 };
    for (uint32_t i = cuda_lane(); i < d.head_dim; i += AT_ONCE * CUDA_WARP) {
        float v[AT_ONCE];
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            const uint32_t k = i + c * CUDA_WARP;
            v[c] = k < d.head_dim ? __ldcg(x + k) : 0.0f;
        }
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            const uint32_t k = i + c * CUDA_WARP;
            if (k < d.head_dim) {
                room[k] = v[c];
            }
        }
    }
    warp_rms_norm(room, h.norm, d.head_dim, d.eps, true, room);
    warp_rope(room, d.head_dim, d.rope_dim, d.rope + (size_t)row * d.rope_dim, false, true);
    if (h.quant) {
        warp_quant8(room, d.head_dim - d.rope_dim, FORMATS_KV_GROUP, room);
    }
    for (uint32_t i = cuda_lane(); i < d.head_dim; i += CUDA_WARP) {
        x[i] = room[i];
    }
    __syncwarp();
}

__device__ __forceinline__ void finish_heads(const dense &d, uint32_t launches, float *room)
{
    uint32_t first = 0;
    for (uint32_t k = 0; k < d.n_finished; k++) {
        const heads &h = d.finished[k];
        const uint32_t end = first + d.n_rows * h.n;
        for (uint32_t i = blockIdx.x + gridDim.x * (threadIdx.x / CUDA_WARP); i < end;
             i += gridDim.x * WARPS) {
            if (i < first) {
                continue;
            }
            const uint32_t row = (i - first) / h.n, head = (i - first) % h.n;
            if (cuda_lane() == 0) {
                dense_wait(d.counters + h.counts + head, d.head_blocks * launches);
            }
            __syncwarp();
            finish_head(d, h, row, head, room);
        }
        first = end;
    }
}

/* --- the launch */

__global__ void __launch_bounds__(THREADS, ARCH_SM120A ? 1 : 2)
    dense_stream_kernel(const __grid_constant__ dense d)
{
    arch_grid_go();
    extern __shared__ uint4 dense_shared[];
    shared_block *s = reinterpret_cast<shared_block *>(dense_shared);
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    uint32_t used = 0;
    reader r = {};
    r.ring = s->rings[warp];
    r.item = first_item(d);
    for (int i = 0; i < DEPTH - 1; i++) {
        read_on(d, &r);
    }
    arch_grid_wait(); /* weights alone are older than this step */
    const uint32_t launches = d.launches[blockIdx.x] + 1;
    bool has_waited = false;
    for (uint32_t item = first_item(d); item < d.n_items; item = next_item(d, item)) {
        uint32_t block;
        const matrix &m = d.of[matrix_of(d, item, &block)];
        if (m.waits != ALONE && !has_waited) {
            if (threadIdx.x == 0) {
                dense_wait(d.counters + m.waits, m.wanted * launches);
            }
            __syncthreads();
            if (m.norm) {
                find_roots(d, m, s->roots);
            }
            has_waited = true;
        }
        make_item(d, m, block, s, &r, &used);
    }
    finish_heads(d, launches, reinterpret_cast<float *>(s->room[warp]));
    __syncthreads(); /* all have read how many launches there were */
    if (threadIdx.x == 0) {
        d.launches[blockIdx.x] = launches;
    }
}

/* --- which matrices */

bool is_served(const struct ops_device *dev, const struct ops_matrix *m)
{
    const uint32_t n_groups = tensor_groups_of(m->rows, m->cols, m->form);
    return (m->form == CUDA_FP8 || (m->form == CUDA_BF16 && !cuda_wants_quant(dev, m))) &&
           m->rows % CUDA_BLOCK == 0 && m->cols % MANY_INPUTS == 0 &&
           (n_groups <= 2 || n_groups % TENSOR_RUNS == 0);
}

/* The next matrix of `d`; of the second stage if it waits. */
matrix *add(const struct ops_device *dev, dense *d, uint32_t *n, const struct ops_matrix *m,
            const float *x, size_t x_stride, float *y, size_t y_stride)
{
    const uint32_t inputs = tensor_inputs_of(m->form);
    matrix *to = &d->of[*n];
    to->data = static_cast<const uint8_t *>(m->data);
    to->form = m->form;
    to->n_chunks = m->cols / inputs / TENSOR_UNITS;
    if (m->form == CUDA_FP8) {
        to->scale_rows = cuda_groups(m->cols, inputs, GROUP);
        to->scales_at = cuda_scales_offset(m->rows, m->cols, inputs);
    }
    to->n_groups = tensor_groups_of(m->rows, m->cols, m->form);
    to->runs_log2 = dense_log2(to->n_groups) + DENSE_WARPS_LOG2;
    to->n_pieces = to->n_groups % TENSOR_RUNS ? to->n_groups : to->n_groups / (uint32_t)TENSOR_RUNS;
    to->x = x;
    to->x_stride = x_stride;
    to->quant = cuda_wants_quant(dev, m);
    to->round = true;
    to->y = y;
    to->y_stride = y_stride;
    to->waits = to->counts = ALONE;
    d->n_items += m->rows / CUDA_BLOCK;
    d->end[(*n)++] = d->n_items;
    return to;
}

/* Who does the second stage: where the first leaves half of the blocks alone, these; else all, from
 * the first on that has one item less. */
void deal(dense *d, uint32_t n_blocks)
{
    const bool few = d->n_first_items <= n_blocks / 2;
    d->second_block = d->n_first_items % n_blocks;
    d->n_second_blocks = few ? n_blocks - d->n_first_items : n_blocks;
    const uint32_t n_second = d->n_items - d->n_first_items;
    d->n_norm_blocks = n_second < d->n_second_blocks ? n_second : d->n_second_blocks;
}

/* Whether calls of so many rows are for this file: not of ranks that share a GPU. */
bool is_few(const struct ops_device *dev, uint32_t n_rows)
{
    return n_rows > 0 && n_rows <= MOST_ROWS && dev->dense.blocks_a_sm &&
           (!dev->group || cuda_group_has_parts(dev->group));
}

void run(struct ops_device *dev, dense *d, uint32_t n_rows, const char *what)
{
    const uint32_t fit = dev->n_sms * dev->dense.blocks_a_sm;
    const uint32_t n_blocks = fit < MOST_BLOCKS ? fit : (uint32_t)MOST_BLOCKS;
    d->n_rows = n_rows;
    deal(d, n_blocks);
    cuda_run(dev, what, dense_stream_kernel, n_blocks, THREADS, sizeof(shared_block), *d);
}

enum { Q_LORA, KEY_VALUE, HEADS }; /* counters of project; oproj has one */

} /* namespace */

bool cuda_dense_room(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    struct cuda_dense *room = &dev->dense;
    bool ok = true;
    int n = 0;
    if (d->exact) {
        return true;
    }
    for (int i = 0; i < 2; i++) {
        room->launches[i] = static_cast<uint32_t *>(cuda_room(dev, MOST_BLOCKS, 1, &ok));
        room->counters[i] = static_cast<uint32_t *>(cuda_room(dev, HEADS + d->n_heads, 1, &ok));
    }
    room->raw = static_cast<float *>(cuda_room(dev, MOST_ROWS, d->q_lora, &ok));
    if (ok && !dev->limits.only_plan &&
        cuda_kept(dev,
                  cudaFuncSetAttribute(dense_stream_kernel,
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       (int)sizeof(shared_block)),
                  "shared memory for dense products") &&
        cuda_kept(dev,
                  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, dense_stream_kernel, THREADS,
                                                                sizeof(shared_block)),
                  "room for dense products")) {
        room->blocks_a_sm = (uint32_t)n;
    }
    return ok && !dev->failed;
}

void cuda_oproj_stream(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *o, float *ret_y)
{
    const struct ops_dims *dims = &dev->d;
    const size_t wide = (size_t)dims->n_heads * dims->head_dim;
    const size_t narrow = (size_t)dims->o_groups * dims->o_lora;
    bool ok =
        is_few(dev, rows->n_rows) && dims->o_groups < MOST_MATRICES && is_served(dev, &layer->wo_b);
    for (uint32_t g = 0; g < dims->o_groups && ok; g++) {
        ok = is_served(dev, &layer->wo_a[g]);
    }
    if (!ok) {
        cuda_oproj_tensor(dev, rows, layer, o, ret_y);
        return;
    }
    dense d = {};
    uint32_t n = 0;
    for (uint32_t g = 0; g < dims->o_groups; g++) {
        matrix *m = add(dev, &d, &n, &layer->wo_a[g], o + g * (wide / dims->o_groups), wide,
                        dev->wide + (size_t)g * dims->o_lora, narrow);
        m->quant = false;
        m->counts = 0;
        m->shift = 31; /* all of it one counter's */
    }
    d.n_first_items = d.n_items;
    matrix *m = add(dev, &d, &n, &layer->wo_b, dev->wide, narrow, ret_y, dims->hidden);
    m->round = !dims->is_partial;
    m->waits = 0;
    m->wanted = d.n_first_items;
    d.counters = dev->dense.counters[0];
    d.launches = dev->dense.launches[0];
    run(dev, &d, rows->n_rows, "the output projection");
}

void cuda_project_stream(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                         float *ret_kv)
{
    const struct ops_dims *dims = &dev->d;
    const uint32_t head_shift = dense_log2(dims->head_dim / CUDA_BLOCK);
    uint32_t n = 0;
    if (!is_few(dev, rows->n_rows) || !is_served(dev, &layer->wq_a) ||
        !is_served(dev, &layer->wkv) || !is_served(dev, &layer->wq_b) ||
        ((uint32_t)CUDA_BLOCK << head_shift) != dims->head_dim || dims->head_dim > MOST_HEAD_DIM) {
        cuda_project_tensor(dev, rows, layer, x, ret_qr, ret_q, ret_kv);
        return;
    }
    dense d = {};
    matrix *m = add(dev, &d, &n, &layer->wq_a, x, dims->hidden, dev->dense.raw, dims->q_lora);
    m->counts = Q_LORA;
    m->shift = 31;
    const uint32_t q_blocks = d.n_items;
    m = add(dev, &d, &n, &layer->wkv, x, dims->hidden, ret_kv, dims->head_dim);
    m->counts = KEY_VALUE;
    m->shift = 31;
    d.n_first_items = d.n_items;
    m = add(dev, &d, &n, &layer->wq_b, dev->dense.raw, dims->q_lora, ret_q,
            (size_t)dims->n_heads * dims->head_dim);
    m->norm = layer->q_norm;
    m->waits = Q_LORA;
    m->wanted = q_blocks;
    m->counts = HEADS;
    m->shift = head_shift;
    d.finished[0] = {ret_kv, 1, layer->kv_norm, true, KEY_VALUE};
    d.finished[1] = {ret_q, dims->n_heads, NULL, false, HEADS};
    d.n_finished = 2;
    d.head_dim = dims->head_dim;
    d.rope_dim = dims->rope_dim;
    d.head_blocks = 1u << head_shift;
    d.rope = dev->rope[layer->place.ratio != 0];
    d.eps = dims->rms_eps;
    d.normed = ret_qr;
    d.norm_dim = dims->q_lora;
    d.counters = dev->dense.counters[1];
    d.launches = dev->dense.launches[1];
    run(dev, &d, rows->n_rows, "project");
}
