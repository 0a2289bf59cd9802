/* Matrix products with the CPU's order of sums.
 *
 * A block of threads makes 32 outputs (a lane each) of up to eight rows. Its warps take slices of
 * 128 inputs in turn: each sums its slice in order, and after every eight slices one warp per row
 * adds the partial sums to its total, in the slices' order. So a value depends on its row and its
 * output alone, whichever warp made which part of it and whatever other rows there are. Inputs that
 * fill up a slice are zero, and so are the elements behind them: adding their product changes no
 * bit, for a sum that began at zero is never the negative one.
 *
 * Scales are multiplied into the elements first, as the CPU does when it packs.
 */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { WARPS = 8, THREADS = WARPS * CUDA_WARP };
static_assert((int)WARPS == (int)CUDA_TILE_ROWS, "a warp adds up one row");
static_assert((int)CUDA_WARP == (int)CUDA_BLOCK, "a lane makes one output");

struct shared_sums {
    float4 x[WARPS][CUDA_TILE_ROWS][CUDA_SLICE / 4]; /* each warp's slice of the rows */
    float partial[WARPS][CUDA_TILE_ROWS][CUDA_WARP];
};
static_assert(sizeof(shared_sums) <= 48 * 1024, "static shared memory ends there");

/* Elements of one unit and the group that shares a scale, by form. */
template <int FORM> struct form_of;
template <> struct form_of<CUDA_F32> {
    enum { UNIT = 4, GROUP = 0 };
};
template <> struct form_of<CUDA_BF16> {
    enum { UNIT = 8, GROUP = 0 };
};
template <> struct form_of<CUDA_FP8> {
    enum { UNIT = 16, GROUP = 128 };
};
template <> struct form_of<CUDA_FP4_E8M0> {
    enum { UNIT = 32, GROUP = 32 };
};
template <> struct form_of<CUDA_FP4_SCALED> {
    enum { UNIT = 32, GROUP = 32 };
};
template <> struct form_of<CUDA_FP4_E4M3> {
    enum { UNIT = 32, GROUP = 16 };
};

/* e4m3 by its bits: exponent and mantissa in a float's place, then 2^120, which makes subnormals
 * right too. */
__device__ __forceinline__ float e4m3_value(uint32_t code)
{
    float size = f32_from_bits((code & 0x7fu) << 20) * 1.329227995784916e36f;
    size = (code & 0x7fu) == 0x7fu ? f32_from_bits(0x7fc00000u) : size;
    return f32_from_bits(f32_bits(size) | (code & 0x80u) << 24);
}

/* e2m1 likewise, with 2^126. */
__device__ __forceinline__ float e2m1_value(uint32_t code)
{
    float size = f32_from_bits((code & 7u) << 22) * 8.507059173023462e37f;
    return f32_from_bits(f32_bits(size) | (code & 8u) << 28);
}

/* The elements of a unit times their scales; `scales` is the lane's first of this unit, the next
 * group's CUDA_BLOCK further. */
template <int FORM>
__device__ __forceinline__ void unit_values(const uint4 &unit, const uint8_t *scales, float global,
                                            float *w)
{
    const uint32_t word[4] = {unit.x, unit.y, unit.z, unit.w};
    if constexpr (FORM == CUDA_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[i] = f32_from_bits(word[i]);
        }
    } else if constexpr (FORM == CUDA_BF16) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[2 * i] = f32_from_bits(word[i] << 16);
            w[2 * i + 1] = f32_from_bits(word[i] & 0xffff0000u);
        }
    } else if constexpr (FORM == CUDA_FP8) {
        float scale = e8m0_decode(*scales);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            w[i] = e4m3_value(word[i / 4] >> 8 * (i % 4)) * scale;
        }
    } else {
        enum { GROUP = form_of<FORM>::GROUP };
        uint32_t plain[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            plain[i] = FORM == CUDA_FP4_E8M0     ? cuda_fp4_plain(word[i])
                       : FORM == CUDA_FP4_SCALED ? cuda_fp4_from_halves(word[i])
                                                 : word[i];
        }
#pragma unroll
        for (int g = 0; g < 32 / GROUP; g++) {
            uint8_t code = scales[g * CUDA_BLOCK];
            float scale = FORM == CUDA_FP4_E4M3 ? e4m3_decode(code) : e8m0_decode(code);
#pragma unroll
            for (int i = g * GROUP; i < (g + 1) * GROUP; i++) {
                w[i] = e2m1_value(plain[i / 8] >> 4 * (i % 8)) * scale * global;
            }
        }
    }
}

/* A packed matrix. */
struct packed {
    const uint8_t *data;
    uint32_t rows, cols;
};

/* The rows of x and y that a tile takes: row i of it is x_row(i), y_row(i). */
struct rows_of {
    const float *x;
    size_t x_stride;
    const uint32_t *x_row; /* NULL: first + i */
    float *y;
    size_t y_stride;
    uint32_t first, n;
    bool round;
};

__device__ __forceinline__ size_t x_row_of(const rows_of &r, uint32_t i)
{
    return r.x_row ? r.x_row[r.first + i] : r.first + i;
}

/* sum[r] = slice of row r of the tile times the lane's output. */
template <int FORM, int R>
__device__ __forceinline__ void slice_sums(const packed &m, const rows_of &rows, uint32_t slice,
                                           float4 (*x)[CUDA_SLICE / 4], float *sum)
{
    enum { UNIT = form_of<FORM>::UNIT, GROUP = form_of<FORM>::GROUP };
    const uint32_t lane = cuda_lane(), first = slice * CUDA_SLICE;
    const uint32_t n_k = m.cols - first < CUDA_SLICE ? m.cols - first : CUDA_SLICE;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float *from = r < rows.n ? rows.x + x_row_of(rows, r) * rows.x_stride + first : NULL;
        float *to = reinterpret_cast<float *>(x[r]);
#pragma unroll
        for (int i = 0; i < CUDA_SLICE; i += CUDA_WARP) {
            to[i + lane] = from && i + lane < n_k ? from[i + lane] : 0.0f;
        }
        sum[r] = 0.0f;
    }
    __syncwarp();
    const uint32_t n_units = (m.cols + UNIT - 1) / UNIT, u0 = first / UNIT;
    const uint4 *units = reinterpret_cast<const uint4 *>(m.data) +
                         ((size_t)blockIdx.x * n_units + u0) * CUDA_BLOCK + lane;
    const uint8_t *scales = NULL;
    float global = 1.0f;
    if constexpr (GROUP != 0) {
        const uint32_t n_groups = cuda_groups(m.cols, UNIT, GROUP);
        const uint8_t *all = m.data + cuda_scales_offset(m.rows, m.cols, UNIT);
        scales = all + ((size_t)blockIdx.x * n_groups + first / GROUP) * CUDA_BLOCK + lane;
        if constexpr (FORM != CUDA_FP8) {
            size_t n = (size_t)((m.rows + CUDA_BLOCK - 1) / CUDA_BLOCK) * n_groups * CUDA_BLOCK;
            global = *reinterpret_cast<const float *>(all + n);
        }
    }
#pragma unroll 2
    for (uint32_t u = 0; u < (n_k + UNIT - 1) / UNIT; u++) {
        float w[UNIT];
        const uint8_t *scale = NULL;
        uint4 unit;
        if constexpr (FORM == CUDA_FP4_SCALED) { /* a slice is four units: group u lies in all */
            const uint32_t *words = reinterpret_cast<const uint32_t *>(units) + u;
            enum { STEP = CUDA_BLOCK * CUDA_UNIT_BYTES / sizeof(uint32_t) };
            unit = make_uint4(words[0], words[STEP], words[2 * STEP], words[3 * STEP]);
            scale = scales + 3 * lane + u;
        } else {
            unit = units[(size_t)u * CUDA_BLOCK];
            if constexpr (GROUP != 0) {
                scale = scales + u * UNIT / GROUP * CUDA_BLOCK;
            }
        }
        unit_values<FORM>(unit, scale, global, w);
#pragma unroll
        for (int i = 0; i < UNIT; i += 4) {
#pragma unroll
            for (int r = 0; r < R; r++) {
                const float4 four = x[r][(u * UNIT + i) / 4];
                sum[r] += four.x * w[i];
                sum[r] += four.y * w[i + 1];
                sum[r] += four.z * w[i + 2];
                sum[r] += four.w * w[i + 3];
            }
        }
    }
    __syncwarp();
}

/* Outputs 32 blockIdx.x .. + 31 of the tile's rows, at most R of them. */
template <int FORM, int R>
__device__ __forceinline__ void tile(const packed &m, const rows_of &rows, shared_sums *shared)
{
    const uint32_t lane = cuda_lane(), warp = threadIdx.x / CUDA_WARP;
    const uint32_t n_slices = (m.cols + CUDA_SLICE - 1) / CUDA_SLICE;
    float total = 0.0f; /* of row `warp` */
    for (uint32_t s0 = 0; s0 < n_slices; s0 += WARPS) {
        if (s0 + warp < n_slices) {
            float sum[R];
            slice_sums<FORM, R>(m, rows, s0 + warp, shared->x[warp], sum);
#pragma unroll
            for (int r = 0; r < R; r++) {
                shared->partial[warp][r][lane] = sum[r];
            }
        }
        __syncthreads();
        if (warp < R) {
            for (uint32_t j = 0; j < WARPS && s0 + j < n_slices; j++) {
                total += shared->partial[j][warp][lane];
            }
        }
        __syncthreads();
    }
    const uint32_t output = blockIdx.x * CUDA_BLOCK + lane;
    if (warp < rows.n && output < m.rows) {
        rows.y[(rows.first + warp) * rows.y_stride + output] = cuda_rounded(total, rows.round);
    }
}

template <int FORM> __device__ __forceinline__ void any_tile(const packed &m, const rows_of &rows)
{
    __shared__ shared_sums shared;
    if (rows.n == 1) {
        tile<FORM, 1>(m, rows, &shared);
    } else if (rows.n <= 4) {
        tile<FORM, 4>(m, rows, &shared);
    } else {
        tile<FORM, CUDA_TILE_ROWS>(m, rows, &shared);
    }
}

template <int FORM> __global__ void __launch_bounds__(THREADS) product_kernel(packed m, rows_of all)
{
    cuda_grid_begin();
    rows_of rows = all;
    rows.first = blockIdx.y * CUDA_TILE_ROWS;
    rows.n = all.n - rows.first < CUDA_TILE_ROWS ? all.n - rows.first : CUDA_TILE_ROWS;
    any_tile<FORM>(m, rows);
}

template <int FORM>
__global__ void __launch_bounds__(THREADS)
    expert_product_kernel(packed shape, const __grid_constant__ cuda_weights weights, rows_of all,
                          const cuda_tile *tiles, const uint32_t *tile_count)
{
    cuda_grid_begin();
    if (blockIdx.y >= *tile_count) {
        return;
    }
    const cuda_tile t = tiles[blockIdx.y];
    packed m = shape;
    rows_of rows = all;
    m.data = static_cast<const uint8_t *>(weights.data[t.expert]);
    rows.first = t.first;
    rows.n = t.n;
    any_tile<FORM>(m, rows);
}

/* A warp for each group of a row. */
__global__ void __launch_bounds__(THREADS)
    quant_kernel(const float *x, uint32_t n_rows, size_t n, uint32_t n_groups, float *y)
{
    cuda_grid_begin();
    const size_t item = (size_t)blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    const size_t r = item / n_groups, first = item % n_groups * FORMATS_INPUT_GROUP;
    if (r < n_rows) {
        const size_t m = n - first < FORMATS_INPUT_GROUP ? n - first : FORMATS_INPUT_GROUP;
        warp_quant8(x + r * n + first, m, FORMATS_INPUT_GROUP, y + r * n + first);
    }
}

uint32_t blocks_of(uint32_t rows)
{
    return (rows + CUDA_BLOCK - 1) / CUDA_BLOCK;
}

} /* namespace */

cudaError_t cuda_has_code(void)
{
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, quant_kernel);
}

void cuda_gemm_some(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                    size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                    size_t y_stride, bool round)
{
    if (n_rows == 0 || (dev->tensor && cuda_tensor_gemm(dev, matrix, x, x_stride, x_row, n_rows, y,
                                                        y_stride, round))) {
        return;
    }
    const packed m = {static_cast<const uint8_t *>(matrix->data), matrix->rows, matrix->cols};
    const rows_of rows = {x, x_stride, x_row, y, y_stride, 0, n_rows, round};
    const dim3 grid(blocks_of(m.rows), (n_rows + CUDA_TILE_ROWS - 1) / CUDA_TILE_ROWS);
    switch (matrix->form) {
    case CUDA_F32:
        cuda_run(dev, "a product", product_kernel<CUDA_F32>, grid, THREADS, 0, m, rows);
        break;
    case CUDA_BF16:
        cuda_run(dev, "a product", product_kernel<CUDA_BF16>, grid, THREADS, 0, m, rows);
        break;
    case CUDA_FP8:
        cuda_run(dev, "a product", product_kernel<CUDA_FP8>, grid, THREADS, 0, m, rows);
        break;
    case CUDA_FP4_E8M0:
        cuda_run(dev, "a product", product_kernel<CUDA_FP4_E8M0>, grid, THREADS, 0, m, rows);
        break;
    case CUDA_FP4_SCALED:
        cuda_run(dev, "a product", product_kernel<CUDA_FP4_SCALED>, grid, THREADS, 0, m, rows);
        break;
    case CUDA_FP4_E4M3:
        cuda_run(dev, "a product", product_kernel<CUDA_FP4_E4M3>, grid, THREADS, 0, m, rows);
        break;
    default:
        cuda_failed(dev, STATUS_INVALID, "a table was given to a product");
        return;
    }
}

void cuda_gemm(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
               size_t x_stride, uint32_t n_rows, float *y, size_t y_stride, bool round)
{
    const struct cuda_gemm_item item = {matrix, x, x_stride, y, y_stride, round, false};
    cuda_gemms(dev, &item, 1, n_rows);
}

void cuda_gemms(struct ops_device *dev, const struct cuda_gemm_item *items, uint32_t n,
                uint32_t n_rows)
{
    if (n_rows == 0 || n == 0 || (dev->tensor && cuda_few_gemms(dev, items, n, n_rows))) {
        return;
    }
    const float *quantised = NULL; /* what dev->quant has */
    for (uint32_t i = 0; i < n; i++) {
        const struct cuda_gemm_item *item = &items[i];
        const float *x = item->x;
        if (item->quant) {
            if (x != quantised) {
                cuda_quant_rows(dev, x, n_rows, item->matrix->cols, dev->quant);
            }
            quantised = x;
            x = dev->quant;
        }
        cuda_gemm_some(dev, item->matrix, x, item->x_stride, NULL, n_rows, item->y, item->y_stride,
                       item->round);
    }
}

void cuda_gemm_experts(struct ops_device *dev, const struct ops_matrix *shape,
                       const struct cuda_weights *matrices, const float *x, size_t x_stride,
                       const struct cuda_lanes *lanes, float *y, size_t y_stride)
{
    const uint32_t *x_row = lanes->x_row;
    if (lanes->is_long) {
        cuda_tiles_experts(dev, shape, matrices, x, x_stride, lanes, y, y_stride);
        return;
    }
    if (dev->tensor && cuda_tensor_experts(dev, shape, matrices, x, x_stride, x_row,
                                           lanes->max_tiles, y, y_stride)) {
        return;
    }
    const packed m = {NULL, shape->rows, shape->cols};
    const rows_of rows = {x, x_stride, x_row, y, y_stride, 0, 0, !dev->d.exact};
    const dim3 grid(blocks_of(m.rows), lanes->max_tiles);
    switch (shape->form) {
    case CUDA_F32:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_F32>, grid, THREADS, 0, m,
                 *matrices, rows, dev->tiles, dev->tile_count);
        break;
    case CUDA_BF16:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_BF16>, grid, THREADS, 0,
                 m, *matrices, rows, dev->tiles, dev->tile_count);
        break;
    case CUDA_FP8:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_FP8>, grid, THREADS, 0, m,
                 *matrices, rows, dev->tiles, dev->tile_count);
        break;
    case CUDA_FP4_E8M0:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_FP4_E8M0>, grid, THREADS,
                 0, m, *matrices, rows, dev->tiles, dev->tile_count);
        break;
    case CUDA_FP4_SCALED:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_FP4_SCALED>, grid,
                 THREADS, 0, m, *matrices, rows, dev->tiles, dev->tile_count);
        break;
    case CUDA_FP4_E4M3:
        cuda_run(dev, "the experts' products", expert_product_kernel<CUDA_FP4_E4M3>, grid, THREADS,
                 0, m, *matrices, rows, dev->tiles, dev->tile_count);
        break;
    default:
        cuda_failed(dev, STATUS_INVALID, "a table was given to a product");
        return;
    }
}

void cuda_quant_rows(struct ops_device *dev, const float *x, uint32_t n_rows, size_t n, float *y)
{
    if (n_rows) {
        const uint32_t n_groups = (uint32_t)((n + FORMATS_INPUT_GROUP - 1) / FORMATS_INPUT_GROUP);
        const size_t n_items = (size_t)n_rows * n_groups;
        cuda_run(dev, "the quantiser", quant_kernel, (unsigned)((n_items + WARPS - 1) / WARPS),
                 THREADS, 0, x, n_rows, n, n_groups, y);
    }
}

const float *cuda_inputs(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                         uint32_t n_rows, size_t n)
{
    if (!cuda_wants_quant(dev, matrix)) {
        return x;
    }
    cuda_quant_rows(dev, x, n_rows, n, dev->quant);
    return dev->quant;
}
