/* Products of long calls on tensor cores: 128 outputs of 64 rows a block.
 *
 * tensor.cu makes 32 outputs of 32 rows with every warp on inputs of its own, which is right for
 * few rows: weights are read once, as wide as the card. In a long call that decodes each weight
 * again for every 32 rows and brings each input from the second-level cache again for every 32
 * outputs. Here a block decodes a stretch of its weights once into shared memory, in the order in
 * which the threads of an mma want them, while its warps multiply the stretch before; inputs come
 * as bfloat16 that was laid out so beforehand (`image`), and so can be copied behind the threads'
 * backs.
 *
 * The bits are those of tensor.cu, and its text says why they may not differ: each output is the
 * same sums of the same mma in the same order (tensor.cuh), runs of chunks one after the other
 * where the warps of a block there have one each. That costs two more sums a result beside the one
 * that the tensor cores add to: of the group, and, in shared memory, of the groups before.
 *
 * So few outputs and rows that there is not a tile for each multiprocessor are left to tensor.cu,
 * whose tiles are an eighth of these: which of the two it is changes no bit.
 *
 * A stage is STEPS eights of inputs of each unit of a chunk, that is two or four mma deep.
 */
#include "kernels/cuda/tensor.cuh"

namespace
{

enum {
    OUTS = 128,
    ROWS = CUDA_LONG_TILE_ROWS,
    THREADS = 256,
    WARPS = THREADS / CUDA_WARP,
    M_TILES = OUTS / 16, /* sixteens of outputs */
    WARP_ROWS = 32,      /* of a warp's part of the tile, ... */
    N_TILES = WARP_ROWS / 8,
    N_WARPS = ROWS / WARP_ROWS,     /* ... so many of which lie side by side, ... */
    MT = M_TILES * N_WARPS / WARPS, /* ... each of so many sixteens of outputs */
    X_STAGES = 3
};

template <int FORM> struct stage_of {
    enum {
        EIGHTS = tensor_unit<FORM>::INPUTS / 8, /* of a unit */
        STEPS = EIGHTS < 2 ? EIGHTS : 2,
        A_CHUNK = EIGHTS / STEPS /* stages */
    };
};

struct product {
    const uint8_t *data;
    uint32_t n_out, n_in, n_groups;
    const uint4 *image;    /* [rows, stages, STEPS, units of a chunk] */
    const uint32_t *x_row; /* NULL: the row itself */
    float *y;
    size_t y_stride;
    uint32_t first, n_rows; /* of this launch, or of the tile */
    bool round;
};

template <int FORM> FORMATS_FN uint32_t stages_of(uint32_t n_in)
{
    const uint32_t inputs = tensor_unit<FORM>::INPUTS * TENSOR_UNITS;
    return (n_in + inputs - 1) / inputs * stage_of<FORM>::A_CHUNK;
}

/* Rows of floats become rows of an image: a thread for eight inputs. */
template <int FORM>
__global__ void __launch_bounds__(THREADS)
    image_kernel(const float *x, size_t x_stride, const uint32_t *x_row, uint32_t n_rows,
                 uint32_t n_in, uint32_t n_pieces, uint4 *image)
{
    cuda_grid_begin();
    enum { STEPS = stage_of<FORM>::STEPS, A_CHUNK = stage_of<FORM>::A_CHUNK };
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)n_rows * n_pieces) {
        return;
    }
    const uint32_t piece = (uint32_t)(i % n_pieces), unit = piece % TENSOR_UNITS;
    const uint32_t step = piece / TENSOR_UNITS % STEPS, stage = piece / TENSOR_UNITS / STEPS;
    const uint32_t k = (stage / A_CHUNK * TENSOR_UNITS + unit) * tensor_unit<FORM>::INPUTS +
                       (stage % A_CHUNK * STEPS + step) * 8;
    const uint32_t r = (uint32_t)(i / n_pieces);
    uint4 words = make_uint4(0, 0, 0, 0);
    if (k < n_in) {
        const float4 *from =
            reinterpret_cast<const float4 *>(x + (x_row ? x_row[r] : r) * x_stride + k);
        uint32_t w[4];
        tensor_inputs<FORM>(from[0], from[1], w);
        words = make_uint4(w[0], w[1], w[2], w[3]);
    }
    image[i] = words;
}

/* What a thread decodes of a stage: of unit lane % 4, outputs 16 warp + lane / 4 and that + 8. */
struct raw {
    uint4 unit[2];
    uint32_t scale[2];
};

template <int FORM>
__device__ __forceinline__ void load_weights(const product &p, uint32_t stage, raw *ret)
{
    enum { A_CHUNK = stage_of<FORM>::A_CHUNK, INPUTS = tensor_unit<FORM>::INPUTS };
    const uint32_t warp = threadIdx.x / CUDA_WARP, g = cuda_lane() / 4;
    const uint32_t u = stage / A_CHUNK * TENSOR_UNITS + cuda_lane() % 4;
    const uint32_t n_units = (p.n_in + INPUTS - 1) / INPUTS;
    const uint32_t block = blockIdx.x * (OUTS / CUDA_BLOCK) + warp / 2;
    const bool there = u < n_units && block * CUDA_BLOCK < p.n_out;
    const size_t at = ((size_t)block * n_units + u) * CUDA_BLOCK;
    const uint4 *units = reinterpret_cast<const uint4 *>(p.data) + at;
    const uint8_t *scales = NULL;
    if constexpr (FORM != CUDA_BF16) {
        const uint32_t group = tensor_unit<FORM>::GROUP;
        scales =
            p.data + cuda_scales_offset(p.n_out, p.n_in, INPUTS) +
            ((size_t)block * cuda_groups(p.n_in, INPUTS, group) + u * INPUTS / group) * CUDA_BLOCK;
    }
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t out = warp % 2 * 16 + g + 8 * i;
        ret->unit[i] = make_uint4(0, 0, 0, 0);
        ret->scale[i] = 0;
        if (!there) {
            continue;
        }
        if constexpr (A_CHUNK == 2) { /* half of the unit */
            const uint2 half = reinterpret_cast<const uint2 *>(units + out)[stage % A_CHUNK];
            ret->unit[i].x = half.x;
            ret->unit[i].y = half.y;
        } else {
            ret->unit[i] = units[out];
        }
        if constexpr (FORM != CUDA_BF16) {
            ret->scale[i] = scales[out];
        }
    }
}

/* Into `to` [STEPS, 2 mma, M_TILES, 32]: what each thread of an mma wants of its weights. */
template <int FORM> __device__ __forceinline__ void decode(const raw &w, uint4 *to)
{
    enum { STEPS = stage_of<FORM>::STEPS };
    const uint32_t at = threadIdx.x / CUDA_WARP * CUDA_WARP + cuda_lane();
#pragma unroll
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t low[4], high[4];
        tensor_weights<FORM, false>(w.unit[0], step, tensor_unit<FORM>::BACK,
                                    tensor_scale_pair(w.scale[0]), low);
        tensor_weights<FORM, false>(w.unit[1], step, tensor_unit<FORM>::BACK,
                                    tensor_scale_pair(w.scale[1]), high);
#pragma unroll
        for (uint32_t m = 0; m < 2; m++) {
            to[(step * 2 + m) * M_TILES * CUDA_WARP + at] =
                make_uint4(low[2 * m], high[2 * m], low[2 * m + 1], high[2 * m + 1]);
        }
    }
}

/* The inputs of a stage into `to` [STEPS, ROWS / 8, 32]; rows that are not there are the last. */
template <int FORM>
__device__ __forceinline__ void copy_inputs(const product &p, uint32_t stage, uint32_t n_stages,
                                            uint4 *to)
{
    enum { STEPS = stage_of<FORM>::STEPS, PIECES = STEPS * TENSOR_UNITS };
    for (uint32_t i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        const uint32_t piece = i % PIECES, r = i / PIECES;
        const uint32_t at = p.first + (r < p.n_rows ? r : p.n_rows - 1);
        const size_t row = p.x_row ? p.x_row[at] : at;
        arch_copy_16(to + (piece / TENSOR_UNITS * (ROWS / 8) + r / 8) * CUDA_WARP + r % 8 * 4 +
                         piece % TENSOR_UNITS,
                     p.image + (row * n_stages + stage) * PIECES + piece);
    }
}

/* A run's sum is whole: it joins its group's, and the last of a group the groups before, which
 * each thread keeps at `total`, THREADS apart. */
__device__ __forceinline__ void fold(uint32_t run, float (&now)[MT][N_TILES][4],
                                     float (&group)[MT][N_TILES][4], float *total)
{
    const uint32_t within = run % TENSOR_RUNS;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
#pragma unroll
        for (int nt = 0; nt < N_TILES; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = within ? group[mt][nt][i] + now[mt][nt][i] : now[mt][nt][i];
                float *t = total + ((mt * N_TILES + nt) * 4 + i) * THREADS;
                group[mt][nt][i] = sum;
                now[mt][nt][i] = 0.0f;
                if (within == TENSOR_RUNS - 1) {
                    *t = run == TENSOR_RUNS - 1 ? sum : *t + sum;
                }
            }
        }
    }
}

template <int FORM> __device__ __forceinline__ void whole_tile(const product &p)
{
    enum {
        STEPS = stage_of<FORM>::STEPS,
        A_CHUNK = stage_of<FORM>::A_CHUNK,
        W_STAGE = STEPS * 2 * M_TILES * CUDA_WARP,
        X_STAGE = STEPS * (ROWS / 8) * CUDA_WARP
    };
    extern __shared__ uint4 tiles_shared[];
    uint4 *weights = tiles_shared, *inputs = tiles_shared + 2 * W_STAGE;
    float *total = reinterpret_cast<float *>(inputs + X_STAGES * X_STAGE) + threadIdx.x;
    const uint32_t warp = threadIdx.x / CUDA_WARP, lane = cuda_lane();
    const uint32_t m0 = warp / N_WARPS * MT, row0 = warp % N_WARPS * WARP_ROWS;
    const uint32_t n_stages = stages_of<FORM>(p.n_in), n_chunks = n_stages / A_CHUNK;
    const uint32_t n_runs = TENSOR_RUNS * p.n_groups;
    const uint32_t n_tiles = p.n_rows > row0 ? (p.n_rows - row0 + 7) / 8 : 0; /* or more */
    float now[MT][N_TILES][4] = {}, group[MT][N_TILES][4] = {};
    raw next;
    uint32_t run = 0;
    for (uint32_t s = 0; s < X_STAGES - 1; s++) {
        if (s < n_stages) {
            copy_inputs<FORM>(p, s, n_stages, inputs + s * X_STAGE);
        }
        arch_copy_close();
    }
    load_weights<FORM>(p, 0, &next);
    decode<FORM>(next, weights);
    for (uint32_t s = 0; s < n_stages; s++) {
        arch_copy_wait<X_STAGES - 2>();
        __syncthreads(); /* stage s is there, and what stage s - 1 was in is read */
        if (s + X_STAGES - 1 < n_stages) {
            copy_inputs<FORM>(p, s + X_STAGES - 1, n_stages,
                              inputs + (s + X_STAGES - 1) % X_STAGES * X_STAGE);
        }
        arch_copy_close();
        if (s + 1 < n_stages) {
            load_weights<FORM>(p, s + 1, &next);
        }
        /* Runs of no chunks are sums of nothing, as they are in tensor.cu. */
        for (; (run + 1) * n_chunks / n_runs <= s / A_CHUNK; run++) {
            fold(run, now, group, total);
        }
        const uint4 *w = weights + s % 2 * W_STAGE + m0 * CUDA_WARP + lane;
        const uint4 *x = inputs + s % X_STAGES * X_STAGE + row0 / 8 * CUDA_WARP + lane;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint4 v[N_TILES];
#pragma unroll
            for (int nt = 0; nt < N_TILES; nt++) {
                v[nt] = x[(step * (ROWS / 8) + nt) * CUDA_WARP];
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++) {
                    const uint4 a = w[((step * 2 + m) * M_TILES + mt) * CUDA_WARP];
#pragma unroll
                    for (int nt = 0; nt < N_TILES; nt++) {
                        if (nt < n_tiles) {
                            arch_mma_bf16(now[mt][nt], a.x, a.y, a.z, a.w, m ? v[nt].z : v[nt].x,
                                          m ? v[nt].w : v[nt].y);
                        }
                    }
                }
            }
        }
        if (s + 1 < n_stages) {
            decode<FORM>(next, weights + (s + 1) % 2 * W_STAGE);
        }
    }
    for (; run < n_runs; run++) {
        fold(run, now, group, total);
    }
#pragma unroll
    for (uint32_t i = 0; i < MT * N_TILES * 4; i++) {
        const uint32_t mt = i / (N_TILES * 4), nt = i / 4 % N_TILES;
        const uint32_t row = row0 + 8 * nt + lane % 4 * 2 + i % 2;
        const uint32_t out = blockIdx.x * OUTS + (m0 + mt) * 16 + i / 2 % 2 * 8 + lane / 4;
        if (row < p.n_rows && out < p.n_out) {
            p.y[(p.first + row) * p.y_stride + out] = cuda_rounded(total[i * THREADS], p.round);
        }
    }
}

/* Blocks (128 outputs, tile of rows). */
template <int FORM> __global__ void __launch_bounds__(THREADS, 2) tiles_kernel(product all)
{
    cuda_grid_begin();
    product p = all;
    p.first = blockIdx.y * ROWS;
    p.n_rows = all.n_rows - p.first < ROWS ? all.n_rows - p.first : ROWS;
    whole_tile<FORM>(p);
}

/* Blocks (128 outputs, tile of an expert's lanes). */
template <int FORM>
__global__ void __launch_bounds__(THREADS, 2)
    tiles_experts_kernel(product all, const __grid_constant__ cuda_weights weights,
                         const cuda_tile *tiles, const uint32_t *tile_count)
{
    cuda_grid_begin();
    if (blockIdx.y >= *tile_count) {
        return;
    }
    const cuda_tile t = tiles[blockIdx.y];
    product p = all;
    p.data = static_cast<const uint8_t *>(weights.data[t.expert]);
    p.first = t.first;
    p.n_rows = t.n;
    whole_tile<FORM>(p);
}

template <int FORM> size_t shared_bytes()
{
    const size_t words =
        2 * stage_of<FORM>::STEPS * 2 * M_TILES + X_STAGES * stage_of<FORM>::STEPS * (ROWS / 8);
    return words * CUDA_WARP * sizeof(uint4) + MT * N_TILES * 4 * THREADS * sizeof(float);
}

template <typename KERNEL> bool allow(struct ops_device *dev, KERNEL kernel, size_t bytes)
{
    return cuda_kept(
        dev, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
        "shared memory for products of long calls");
}

template <int FORM> bool allow_form(struct ops_device *dev)
{
    return allow(dev, tiles_kernel<FORM>, shared_bytes<FORM>()) &&
           allow(dev, tiles_experts_kernel<FORM>, shared_bytes<FORM>());
}

/* The image of n_rows rows in dev->image, of which *p tells the rest. */
template <int FORM>
void make_image(struct ops_device *dev, product *p, const float *x, size_t x_stride,
                const uint32_t *x_row, uint32_t n_rows)
{
    const uint32_t n_pieces = stages_of<FORM>(p->n_in) * stage_of<FORM>::STEPS * TENSOR_UNITS;
    const size_t n = (size_t)n_rows * n_pieces;
    uint4 *image = static_cast<uint4 *>(dev->image);
    p->image = image;
    if (n * sizeof(uint4) > dev->image_bytes) {
        cuda_failed(dev, STATUS_INVALID, "%u rows of %u inputs are too many for a product", n_rows,
                    p->n_in);
        return;
    }
    cuda_run(dev, "the inputs of a product", image_kernel<FORM>,
             (unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, x, x_stride, x_row, n_rows,
             p->n_in, n_pieces, image);
}

template <int FORM>
void launch(struct ops_device *dev, product p, const float *x, size_t x_stride,
            const uint32_t *x_row)
{
    p.n_groups = tensor_groups_of(p.n_out, p.n_in, FORM);
    make_image<FORM>(dev, &p, x, x_stride, x_row, p.n_rows);
    const dim3 grid((p.n_out + OUTS - 1) / OUTS, (p.n_rows + ROWS - 1) / ROWS);
    cuda_run(dev, "a product of a long call", tiles_kernel<FORM>, grid, THREADS,
             shared_bytes<FORM>(), p);
}

template <int FORM>
void launch_experts(struct ops_device *dev, product p, const struct cuda_weights *weights,
                    const float *x, size_t x_stride, const struct cuda_lanes *lanes)
{
    make_image<FORM>(dev, &p, x, x_stride, NULL, lanes->n_x);
    cuda_run(dev, "the experts' products of a long call", tiles_experts_kernel<FORM>,
             dim3((p.n_out + OUTS - 1) / OUTS, lanes->max_tiles), THREADS, shared_bytes<FORM>(), p,
             *weights, dev->tiles, dev->tile_count);
}

} /* namespace */

bool cuda_tiles_room(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    const size_t t = dev->limits.n_rows, n_own = d->expert_end - d->expert_first;
    const size_t used = d->n_experts_used < n_own ? d->n_experts_used : n_own;
    const size_t o_in = d->o_groups ? (size_t)d->n_heads * d->head_dim / d->o_groups : 0;
    const size_t of_rows[] = {d->hidden, d->q_lora, (size_t)d->o_groups * d->o_lora, o_in};
    size_t most = t * used * ((d->expert_width + 127) / 128 * 128);
    bool ok = true;
    for (size_t width : of_rows) {
        const size_t n = t * ((width + 127) / 128 * 128);
        most = n > most ? n : most;
    }
    dev->image_bytes = most * sizeof(uint16_t);
    dev->image = cuda_room(dev, most / 2, 1, &ok);
    return ok &&
           (dev->limits.only_plan || (allow_form<CUDA_BF16>(dev) && allow_form<CUDA_FP8>(dev) &&
                                      allow_form<CUDA_FP4_E8M0>(dev)));
}

bool cuda_tiles_gemm(struct ops_device *dev, const struct ops_matrix *m, const float *x,
                     size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                     size_t y_stride, bool round)
{
    const product p = {static_cast<const uint8_t *>(m->data),
                       m->rows,
                       m->cols,
                       1,
                       NULL,
                       NULL,
                       y,
                       y_stride,
                       0,
                       n_rows,
                       round};
    const uint32_t n_tiles = (n_rows + ROWS - 1) / ROWS;
    const size_t n_blocks = (size_t)((m->rows + OUTS - 1) / OUTS) * n_tiles;
    if (!dev->image || n_rows < CUDA_LONG_TILE_ROWS || n_blocks < dev->n_sms) {
        return false;
    }
    switch (m->form) {
    case CUDA_BF16:
        launch<CUDA_BF16>(dev, p, x, x_stride, x_row);
        break;
    case CUDA_FP8:
        launch<CUDA_FP8>(dev, p, x, x_stride, x_row);
        break;
    default:
        launch<CUDA_FP4_E8M0>(dev, p, x, x_stride, x_row);
        break;
    }
    return true;
}

void cuda_tiles_experts(struct ops_device *dev, const struct ops_matrix *shape,
                        const struct cuda_weights *weights, const float *x, size_t x_stride,
                        const struct cuda_lanes *lanes, float *y, size_t y_stride)
{
    const product p = {NULL, shape->rows, shape->cols, 1, NULL, lanes->x_row,
                       y,    y_stride,    0,           0, true};
    switch (shape->form) {
    case CUDA_BF16:
        launch_experts<CUDA_BF16>(dev, p, weights, x, x_stride, lanes);
        break;
    case CUDA_FP8:
        launch_experts<CUDA_FP8>(dev, p, weights, x, x_stride, lanes);
        break;
    default:
        launch_experts<CUDA_FP4_E8M0>(dev, p, weights, x, x_stride, lanes);
        break;
    }
}
