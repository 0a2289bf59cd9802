/* Products on tensor cores, for few rows and many: bfloat16 in, sums in fp32.
 *
 * Weights are FP8, MXFP4 (with power-of-two scales) or bfloat16, inputs bfloat16 values, so every
 * product is exact; what differs from the CPU is the order and the rounding of sums alone. The
 * order is fixed by the matrix's shape, see tensor.cuh. Who makes which of them depends on the
 * number of rows (few: a group is a block, and the last to finish adds them up; many: a block makes
 * them all), what comes out does not. Nor does the column of the tile that a row gets: columns
 * don't meet.
 *
 * SCALED: inputs that the quantiser made are put back into e4m3 and a scale, and multiplied with
 * FP8 and MXFP4 weights as they are (tensor.cuh). That loses nothing: of a chunk's inputs (64 or
 * 128, of one of the quantiser's groups) the scale that is found again is the one they had or a
 * smaller power of two, of which the values are multiples of the same kind.
 *
 * Bound, of one value before it is rounded: 2^-18 times the sum of the products' sizes, for up to
 * 8,192 inputs (a step adds 16 products and the sum so far, with an error of 2^-22 of their sizes
 * at most).
 */
#include "kernels/cuda/tensor.cuh"

namespace
{

enum {
    WARPS = TENSOR_RUNS,
    THREADS = WARPS * CUDA_WARP,
    UNITS = TENSOR_UNITS,
    FEW_ROWS = CUDA_FEW_ROWS,
    TILE_ROWS = 32 /* of a block, where there are many */
};

struct product {
    const uint8_t *data;
    uint32_t n_out, n_in, n_groups;
    const float *x;
    size_t x_stride;
    const uint32_t *x_row; /* NULL: the row itself */
    float *y;
    size_t y_stride;
    uint32_t first, n_rows; /* of this launch, or of the tile */
    bool round;
    float *partial; /* [output blocks, groups, rows, 32] where groups are blocks */
    uint32_t *arrived;
    uint32_t block; /* 32 outputs */
};

/* What a thread reads of a chunk. SCALED: one word of scales, of output g + 8 t. */
struct loaded {
    uint4 unit[4];
    uint32_t scale[4];
};

template <int FORM, bool SCALED>
__device__ __forceinline__ void load(const product &p, uint32_t chunk, uint32_t n_units,
                                     loaded *ret)
{
    const uint32_t lane = cuda_lane(), g = lane / 4, u = chunk * UNITS + lane % 4;
    const uint4 *units =
        reinterpret_cast<const uint4 *>(p.data) + ((size_t)p.block * n_units + u) * CUDA_BLOCK;
    const uint8_t *scales = NULL;
    if constexpr (FORM != CUDA_BF16) {
        const uint32_t inputs = tensor_unit<FORM>::INPUTS, group = tensor_unit<FORM>::GROUP;
        const uint32_t first = SCALED ? chunk * UNITS : u;
        scales = p.data + cuda_scales_offset(p.n_out, p.n_in, inputs) +
                 ((size_t)p.block * cuda_groups(p.n_in, inputs, group) + first * inputs / group) *
                     CUDA_BLOCK;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        ret->unit[i] = u < n_units ? __ldcs(units + g + 8 * i) : make_uint4(0, 0, 0, 0);
        if constexpr (!SCALED) {
            ret->scale[i] = FORM == CUDA_BF16 || u >= n_units ? 0 : scales[g + 8 * i];
        }
    }
    if constexpr (SCALED) {
        const uint32_t out = g + lane % 4 * 8;
        ret->scale[0] =
            FORM == CUDA_FP8 ? scales[out] : reinterpret_cast<const uint32_t *>(scales)[out];
    }
}

/* sums += the chunk times rows whose inputs go through bfloat16. */
template <int FORM, int NT>
__device__ __forceinline__ void add_chunk(const product &p, const loaded &now, uint32_t chunk,
                                          const float *const *x, float (*sums)[NT][4])
{
    enum { INPUTS = tensor_unit<FORM>::INPUTS };
    const uint32_t k0 = (chunk * UNITS + cuda_lane() % 4) * INPUTS;
#pragma unroll
    for (uint32_t step = 0; step < INPUTS / 8; step++) {
        uint32_t w[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            tensor_weights<FORM, false>(now.unit[i], step, tensor_unit<FORM>::BACK,
                                        tensor_scale_pair(now.scale[i]), w[i]);
        }
        const uint32_t k = k0 + 8 * step;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b = a;
            if (x[nt] && k < p.n_in) {
                a = *reinterpret_cast<const float4 *>(x[nt] + k);
                b = *reinterpret_cast<const float4 *>(x[nt] + k + 4);
            }
            uint32_t v[4];
            tensor_inputs<FORM>(a, b, v);
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
                const uint32_t *low = w[2 * mt], *high = w[2 * mt + 1];
                arch_mma_bf16(sums[mt][nt], low[0], high[0], low[1], high[1], v[0], v[1]);
                arch_mma_bf16(sums[mt][nt], low[2], high[2], low[3], high[3], v[2], v[3]);
            }
        }
    }
}

/* ... through e4m3 with a scale: each four lanes find theirs. */
template <int FORM, int NT>
__device__ __forceinline__ void add_scaled_chunk(const product &p, const loaded &now,
                                                 uint32_t chunk, const float *const *x,
                                                 float (*sums)[NT][4])
{
    enum { STEPS = tensor_steps<FORM>::N, INPUTS = tensor_unit<FORM>::INPUTS };
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        float4 v[2 * STEPS];
        float most = 1e-4f; /* as warp_quant8 */
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            const uint32_t k =
                chunk * UNITS * INPUTS + tensor_scaled_input<FORM>(cuda_lane() % 4, j);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float4 &four = v[2 * j + i];
                four = x[nt] && k < p.n_in ? *reinterpret_cast<const float4 *>(x[nt] + k + 4 * i)
                                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                most = fmaxf(fmaxf(fmaxf(most, fabsf(four.x)), fmaxf(fabsf(four.y), fabsf(four.z))),
                             fabsf(four.w));
            }
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const uint32_t code = e8m0_scale_for(most, 1.0f / 448.0f);
        const float inverse = 1.0f / e8m0_decode((uint8_t)code);
        uint32_t words[2 * STEPS];
#pragma unroll
        for (int i = 0; i < 2 * STEPS; i++) {
            words[i] = arch_pair_e4m3(v[i].x * inverse, v[i].y * inverse) |
                       arch_pair_e4m3(v[i].z * inverse, v[i].w * inverse) << 16;
        }
        tensor_scaled_chunk<FORM>(now.unit, now.scale[0], words, code, sums[0][nt], sums[1][nt]);
    }
}

/* One warp's run of chunks for rows first .. first + 8 NT - 1: sums[mt][nt] as mma leaves them.
 * WAITS: the launch in front of this one has not been waited for, so weights alone may be read. */
template <int FORM, bool SCALED, int NT, bool WAITS>
__device__ __forceinline__ void run_sums(const product &p, uint32_t run, float (*sums)[NT][4])
{
    enum { INPUTS = tensor_unit<FORM>::INPUTS };
    const uint32_t n_units = (p.n_in + INPUTS - 1) / INPUTS;
    const uint32_t n_chunks = (n_units + UNITS - 1) / UNITS, n_runs = WARPS * p.n_groups;
    const uint32_t end = (run + 1) * n_chunks / n_runs, g = cuda_lane() / 4;
    uint32_t chunk = run * n_chunks / n_runs;
    loaded next;
    if (chunk < end) {
        load<FORM, SCALED>(p, chunk, n_units, &next);
    }
    if constexpr (WAITS) {
        arch_grid_wait();
    }
    const float *x[NT];
#pragma unroll
    for (uint32_t nt = 0; nt < NT; nt++) {
        uint32_t r = 8 * nt + g;
        size_t row = r < p.n_rows ? (p.x_row ? p.x_row[p.first + r] : p.first + r) : 0;
        x[nt] = r < p.n_rows ? p.x + row * p.x_stride : NULL;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[0][nt][i] = sums[1][nt][i] = 0.0f;
        }
    }
    for (; chunk < end; chunk++) {
        const loaded now = next;
        if (chunk + 1 < end) {
            load<FORM, SCALED>(p, chunk + 1, n_units, &next);
        }
        if constexpr (SCALED) {
            add_scaled_chunk<FORM, NT>(p, now, chunk, x, sums);
        } else {
            add_chunk<FORM, NT>(p, now, chunk, x, sums);
        }
    }
}

/* The sums of a group's eight runs, added in turn: those of thread i are elements i, i + THREADS,
 * ... of [8 NT rows, 32 outputs]. */
template <int FORM, bool SCALED, int NT, bool WAITS>
__device__ __forceinline__ void group_sums(const product &p, uint32_t group,
                                           float (*shared)[8 * NT][CUDA_BLOCK], float *ret)
{
    const uint32_t warp = threadIdx.x / CUDA_WARP, g = cuda_lane() / 4, t = cuda_lane() % 4;
    float sums[2][NT][4];
    run_sums<FORM, SCALED, NT, WAITS>(p, group * WARPS + warp, sums);
    __syncthreads(); /* what an earlier group left is read */
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t row = 8 * nt + 2 * t + i % 2, out = i / 4 * 16 + i / 2 % 2 * 8 + g;
            shared[warp][row][out] = sums[i / 4][nt][i % 4];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = i * WARPS + warp;
        float sum = shared[0][row][cuda_lane()];
#pragma unroll
        for (int k = 1; k < WARPS; k++) {
            sum += shared[k][row][cuda_lane()];
        }
        ret[i] = sum;
    }
}

template <int NT> __device__ __forceinline__ void store(const product &p, const float *total)
{
    const uint32_t out = p.block * CUDA_BLOCK + cuda_lane();
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = i * WARPS + threadIdx.x / CUDA_WARP;
        if (row < p.n_rows && out < p.n_out) {
            p.y[(p.first + row) * p.y_stride + out] = cuda_rounded(total[i], p.round);
        }
    }
}

/* All groups in one block. */
template <int FORM, bool SCALED, int NT>
__device__ __forceinline__ void whole_tile(const product &p)
{
    __shared__ float shared[WARPS][8 * NT][CUDA_BLOCK];
    float total[NT];
    group_sums<FORM, SCALED, NT, false>(p, 0, shared, total);
    for (uint32_t group = 1; group < p.n_groups; group++) {
        float sums[NT];
        group_sums<FORM, SCALED, NT, false>(p, group, shared, sums);
#pragma unroll
        for (int i = 0; i < NT; i++) {
            total[i] += sums[i];
        }
    }
    store<NT>(p, total);
}

/* Blocks of a multiprocessor that registers are left for. Of 16 rows by MXFP4 one, since a chunk's
 * inputs are looked at before the first is used; and where products are emulated. */
template <int FORM, bool SCALED, int NT> constexpr int blocks_at_once()
{
    return SCALED && (!ARCH_SM120A || (FORM == CUDA_FP4_SCALED && NT > 1)) ? 1 : 2;
}

/* Blocks (32 outputs, tile of rows). */
template <int FORM, bool SCALED>
__global__ void __launch_bounds__(THREADS) tensor_many_kernel(product all)
{
    cuda_grid_begin();
    product p = all;
    p.block = blockIdx.x;
    p.first = blockIdx.y * TILE_ROWS;
    p.n_rows = all.n_rows - p.first < TILE_ROWS ? all.n_rows - p.first : TILE_ROWS;
    whole_tile<FORM, SCALED, TILE_ROWS / 8>(p);
}

/* Blocks (32 outputs, tile of an expert's lanes). */
template <int FORM, bool SCALED>
__global__ void __launch_bounds__(THREADS, blocks_at_once<FORM, SCALED, 1>())
    tensor_experts_kernel(product all, const __grid_constant__ cuda_weights weights,
                          const cuda_tile *tiles, const uint32_t *tile_count)
{
    cuda_grid_begin();
    if (blockIdx.y >= *tile_count) {
        return;
    }
    const cuda_tile t = tiles[blockIdx.y];
    product p = all;
    p.block = blockIdx.x;
    p.data = static_cast<const uint8_t *>(weights.data[t.expert]);
    p.first = t.first;
    p.n_rows = t.n;
    whole_tile<FORM, SCALED, CUDA_TILE_ROWS / 8>(p);
}

/* A group's sums of 32 outputs; the last of an output's groups adds them up. Waits for the launch
 * in front of this one, once the first weights are asked for. */
template <int FORM, bool SCALED, int NT>
__device__ __forceinline__ void few_rows(const product &p, uint32_t group)
{
    __shared__ float shared[WARPS][8 * NT][CUDA_BLOCK];
    __shared__ bool is_last;
    float total[NT];
    group_sums<FORM, SCALED, NT, true>(p, group, shared, total);
    if (p.n_groups > 1) {
        float *mine = p.partial + (size_t)p.block * p.n_groups * 8 * NT * CUDA_BLOCK;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            mine[(group * NT + i) * THREADS + threadIdx.x] = total[i];
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            is_last = atomicAdd(p.arrived + p.block, 1u) == p.n_groups - 1;
        }
        __syncthreads();
        if (!is_last) {
            return;
        }
        __threadfence();
#pragma unroll
        for (int i = 0; i < NT; i++) {
            total[i] = __ldcg(mine + i * THREADS + threadIdx.x);
        }
        for (uint32_t k = 1; k < p.n_groups; k++) {
#pragma unroll
            for (int i = 0; i < NT; i++) {
                total[i] += __ldcg(mine + (k * NT + i) * THREADS + threadIdx.x);
            }
        }
        if (threadIdx.x == 0) {
            p.arrived[p.block] = 0; /* for the next launch */
        }
    }
    store<NT>(p, total);
}

/* Blocks (32 outputs, group). */
template <int FORM, bool SCALED, int NT>
__global__ void __launch_bounds__(THREADS, blocks_at_once<FORM, SCALED, NT>())
    tensor_few_kernel(product all)
{
    arch_grid_go();
    product p = all;
    p.block = blockIdx.x;
    few_rows<FORM, SCALED, NT>(p, blockIdx.y);
}

uint32_t blocks_of(uint32_t outputs)
{
    return (outputs + CUDA_BLOCK - 1) / CUDA_BLOCK;
}

/* Whether a product with it is a block-scaled one. */
bool is_scaled(const struct ops_device *dev, const struct ops_matrix *m)
{
    return cuda_wants_quant(dev, m) &&
           (m->form == CUDA_FP4_SCALED || (m->form == CUDA_FP8 && dev->scaled));
}

bool is_served(const struct ops_device *dev, const struct ops_matrix *m, const float *x,
               size_t x_stride)
{
    return (cuda_tensor_serves(m) || (is_scaled(dev, m) && m->cols % 8 == 0)) &&
           x_stride % 4 == 0 && (uintptr_t)x % 16 == 0;
}

template <int FORM, bool SCALED> void launch_dense(struct ops_device *dev, product p)
{
    p.n_groups = tensor_groups_of(p.n_out, p.n_in, FORM);
    const unsigned blocks = blocks_of(p.n_out);
    const dim3 groups(blocks, p.n_groups);
    if constexpr (FORM == CUDA_FP4_SCALED) { /* rare but for experts: one kernel, again and again */
        for (uint32_t n = p.n_rows; n > 0; n -= p.n_rows, p.first += p.n_rows) {
            p.n_rows = n < FEW_ROWS ? n : (uint32_t)FEW_ROWS;
            cuda_run(dev, "a product on tensor cores", tensor_few_kernel<FORM, SCALED, 2>, groups,
                     THREADS, 0, p);
        }
    } else if (p.n_rows > FEW_ROWS) {
        const dim3 tiles(blocks, (p.n_rows + TILE_ROWS - 1) / TILE_ROWS);
        cuda_run(dev, "a product on tensor cores", tensor_many_kernel<FORM, SCALED>, tiles, THREADS,
                 0, p);
    } else if (p.n_rows > 8) {
        cuda_run(dev, "a product on tensor cores", tensor_few_kernel<FORM, SCALED, 2>, groups,
                 THREADS, 0, p);
    } else {
        cuda_run(dev, "a product on tensor cores", tensor_few_kernel<FORM, SCALED, 1>, groups,
                 THREADS, 0, p);
    }
}

template <int FORM, bool SCALED>
void launch_experts(struct ops_device *dev, const product &p, const struct cuda_weights &weights,
                    uint32_t max_tiles)
{
    cuda_run(dev, "the experts' products on tensor cores", tensor_experts_kernel<FORM, SCALED>,
             dim3(blocks_of(p.n_out), max_tiles), THREADS, 0, p, weights, dev->tiles,
             dev->tile_count);
}

} /* namespace */

bool cuda_tensor_serves(const struct ops_matrix *m)
{
    return (m->form == CUDA_BF16 || m->form == CUDA_FP8 || m->form == CUDA_FP4_E8M0) &&
           m->cols % 8 == 0;
}

bool cuda_tensor_room(struct ops_device *dev)
{
    bool ok = true;
    const size_t n = CUDA_MOST_JOINED * TENSOR_AIM_BLOCKS;
    dev->partial = static_cast<float *>(cuda_room(dev, n * FEW_ROWS, CUDA_BLOCK, &ok));
    dev->arrived = static_cast<uint32_t *>(cuda_room(dev, n, 1, &ok));
    return ok;
}

bool cuda_tensor_gemm(struct ops_device *dev, const struct ops_matrix *m, const float *x,
                      size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                      size_t y_stride, bool round)
{
    if (!is_served(dev, m, x, x_stride) || (n_rows + TILE_ROWS - 1) / TILE_ROWS > CUDA_MAX_GRID_Y) {
        return false;
    }
    if (!is_scaled(dev, m) &&
        cuda_tiles_gemm(dev, m, x, x_stride, x_row, n_rows, y, y_stride, round)) {
        return true;
    }
    const product p = {static_cast<const uint8_t *>(m->data),
                       m->rows,
                       m->cols,
                       1,
                       x,
                       x_stride,
                       x_row,
                       y,
                       y_stride,
                       0,
                       n_rows,
                       round,
                       dev->partial,
                       dev->arrived,
                       0};
    switch (m->form) {
    case CUDA_BF16:
        launch_dense<CUDA_BF16, false>(dev, p);
        break;
    case CUDA_FP8:
        if (is_scaled(dev, m)) {
            launch_dense<CUDA_FP8, true>(dev, p);
        } else {
            launch_dense<CUDA_FP8, false>(dev, p);
        }
        break;
    case CUDA_FP4_SCALED:
        launch_dense<CUDA_FP4_SCALED, true>(dev, p);
        break;
    default:
        launch_dense<CUDA_FP4_E8M0, false>(dev, p);
        break;
    }
    return true;
}

bool cuda_tensor_experts(struct ops_device *dev, const struct ops_matrix *shape,
                         const struct cuda_weights *weights, const float *x, size_t x_stride,
                         const uint32_t *x_row, uint32_t max_tiles, float *y, size_t y_stride)
{
    if (!is_served(dev, shape, x, x_stride)) {
        return false;
    }
    const product p = {NULL,     shape->rows, shape->cols, 1,    x,    x_stride, x_row, y,
                       y_stride, 0,           0,           true, NULL, NULL,     0};
    switch (shape->form) {
    case CUDA_BF16:
        launch_experts<CUDA_BF16, false>(dev, p, *weights, max_tiles);
        break;
    case CUDA_FP8:
        if (is_scaled(dev, shape)) {
            launch_experts<CUDA_FP8, true>(dev, p, *weights, max_tiles);
        } else {
            launch_experts<CUDA_FP8, false>(dev, p, *weights, max_tiles);
        }
        break;
    case CUDA_FP4_SCALED:
        launch_experts<CUDA_FP4_SCALED, true>(dev, p, *weights, max_tiles);
        break;
    default:
        launch_experts<CUDA_FP4_E8M0, false>(dev, p, *weights, max_tiles);
        break;
    }
    return true;
}

/* --- the operations with these products */

void cuda_project_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                         float *ret_kv)
{
    dev->tensor = true;
    cuda_project(dev, rows, layer, x, ret_qr, ret_q, ret_kv);
    dev->tensor = false;
}

void cuda_oproj_tensor(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *o, float *ret_y)
{
    dev->tensor = true;
    cuda_oproj(dev, rows, layer, o, ret_y);
    dev->tensor = false;
}

void cuda_experts_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y)
{
    dev->tensor = true;
    cuda_experts(dev, rows, layer, x, experts, weights, ret_y);
    dev->tensor = false;
}

void cuda_head_tensor(struct ops_device *dev, const struct ops_globals *globals,
                      const float *streams, const uint32_t *which, uint32_t n, float *ret_logits,
                      size_t stride)
{
    dev->tensor = true;
    cuda_head(dev, globals, streams, which, n, ret_logits, stride);
    dev->tensor = false;
}

void cuda_indexer_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const float *qr,
                         float *ret_iq, float *ret_iw)
{
    dev->tensor = true;
    cuda_indexer(dev, rows, layer, x, qr, ret_iq, ret_iw);
    dev->tensor = false;
}

void cuda_compress_tensor(struct ops_device *dev, const struct ops_rows *rows,
                          const struct ops_layer *layer, bool index, const float *x,
                          const struct ops_kv *kv)
{
    dev->tensor = true;
    cuda_compress(dev, rows, layer, index, x, kv);
    dev->tensor = false;
}

void cuda_route_tensor(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *x, uint32_t *ret_experts,
                       float *ret_weights)
{
    dev->tensor = true;
    cuda_route(dev, rows, layer, x, ret_experts, ret_weights);
    dev->tensor = false;
}

/* --- and with block-scaled ones */

void cuda_project_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                         float *ret_kv)
{
    dev->scaled = true;
    cuda_project_tensor(dev, rows, layer, x, ret_qr, ret_q, ret_kv);
    dev->scaled = false;
}

void cuda_oproj_scaled(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *o, float *ret_y)
{
    dev->scaled = true;
    cuda_oproj_tensor(dev, rows, layer, o, ret_y);
    dev->scaled = false;
}

void cuda_indexer_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const float *qr,
                         float *ret_iq, float *ret_iw)
{
    dev->scaled = true;
    cuda_indexer_tensor(dev, rows, layer, x, qr, ret_iq, ret_iw);
    dev->scaled = false;
}

void cuda_experts_tensor_scaled(struct ops_device *dev, const struct ops_rows *rows,
                                const struct ops_layer *layer, const float *x,
                                const uint32_t *experts, const float *weights, float *ret_y)
{
    dev->scaled = true;
    cuda_experts_tensor(dev, rows, layer, x, experts, weights, ret_y);
    dev->scaled = false;
}
