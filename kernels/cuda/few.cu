/* Products of few rows on tensor cores: weights streamed from memory, all products that don't wait
 * for each other in one launch.
 *
 * Such a call reads every weight once and does little else, so what counts is that at every moment
 * enough of them are on their way, from the first microsecond to the last. A panel is 32 outputs of
 * a matrix over a group of its inputs (tensor.cuh); a block takes panels one after the other, its
 * eight warps are the group's eight runs, and each warp has a ring of its own in shared memory,
 * into which it copies (cp.async, each thread what it will read itself) over the ends of panels, so
 * that nothing but the first copy is ever waited for in full. No warp waits for another but at the
 * end of a panel, where the eight sums meet in shared memory, in two places by turns.
 *
 * Work is dealt out beforehand: every block gets as many panels as any other, as near as can be,
 * one behind the other, so that the groups of a panel mostly fall to one block, which adds them up
 * itself. Where they don't, blocks leave their groups' sums in memory, and the last to arrive adds
 * them all up, in the groups' order. Hence bits: those of tensor.cu, whoever makes what.
 *
 * Inputs are floats; what an mma takes (halves in the order of tensor.cuh, through the quantiser
 * where the matrix wants that) is made by each block in its shared memory while the first weights
 * are on their way, or, of more rows than fit there, by a launch before.
 */
#include "kernels/cuda/experts_stream.cuh"

namespace
{

enum {
    WARPS = TENSOR_RUNS,
    WARPS_LOG2 = 3,
    THREADS = WARPS * CUDA_WARP,
    DEPTH = 3, /* chunks of a ring: one is used, two are on their way */
    GROUP = FORMATS_INPUT_GROUP,
    SHARED_INPUTS = 8192, /* that each block makes for itself */
    IMAGE_PAD = 32,       /* halves between rows of an image: other banks */
    BATCH = 4,            /* groups of 128 inputs that a warp of an image asks for at once */
    STATIC_BYTES = 1024,  /* of shared memory beside, the driver's too */
    MOST_BLOCKS_A_SM = 3
};

static_assert(WARPS == 1 << WARPS_LOG2, "its logarithm");

struct slot {
    uint4 units[TENSOR_CHUNK_BYTES / sizeof(uint4)]; /* as they are packed */
    uint32_t scales[CUDA_WARP]; /* the first eight: copies are quickest to lines of 128 bytes */
};

struct few_product {
    const uint8_t *data;
    const float *x;
    float *y, *partial; /* [panel, group, row, 32] */
    uint32_t *arrived;  /* [panel]: groups; zeroes between launches */
    size_t x_stride, y_stride, scales_at;
    uint32_t form, n_in, n_out, n_panels, n_chunks, scale_rows;
    uint32_t n_groups, groups_log2;
    uint32_t image; /* products of the same inputs have the same number */
    bool quant, round;
};

/* What every block reads first comes first: arguments that nobody has read yet are slow. */
struct few_list {
    uint32_t n_rows, each, n;       /* each: places of a block */
    uint32_t end[CUDA_MOST_JOINED]; /* of a product's places */
    few_product of[CUDA_MOST_JOINED];
    uint16_t *images; /* in memory: [image, row, image_stride]; else in shared memory, one */
    uint32_t image_stride;
};

/* A group of a panel of a product. */
struct place {
    uint32_t product, panel, group;
};

__device__ __forceinline__ void go_on(const few_list &list, place *at)
{
    const few_product &p = list.of[at->product];
    if (++at->group == p.n_groups) {
        at->group = 0;
        if (++at->panel == p.n_panels) {
            at->panel = 0;
            at->product++;
        }
    }
}

__device__ __forceinline__ place place_of(const few_list &list, uint32_t i)
{
    place at = {0, 0, 0};
    uint32_t before = 0;
    for (; i >= list.end[at.product]; at.product++) {
        before = list.end[at.product];
    }
    const uint32_t log2 = list.of[at.product].groups_log2;
    at.panel = (i - before) >> log2;
    at.group = (i - before) & ((1u << log2) - 1);
    return at;
}

/* --- weights */

__device__ __forceinline__ uint32_t first_chunk(const few_product &p, uint32_t run)
{
    return run * p.n_chunks >> (WARPS_LOG2 + p.groups_log2);
}

/* What a warp copies next. */
struct reader {
    place at;
    uint32_t left; /* places, this one too */
    uint32_t chunk, end, form;
    const uint8_t *units, *scales; /* scales: those of chunk 0 */
    uint32_t to;                   /* slot */
};

__device__ __forceinline__ void open(const few_list &list, uint32_t warp, reader *r)
{
    const few_product &p = list.of[r->at.product];
    const uint32_t run = r->at.group * WARPS + warp;
    r->form = p.form;
    r->chunk = first_chunk(p, run);
    r->end = first_chunk(p, run + 1);
    r->units = p.data + ((size_t)r->at.panel * p.n_chunks + r->chunk) * TENSOR_CHUNK_BYTES +
               cuda_lane() * CUDA_UNIT_BYTES;
    r->scales =
        p.data + p.scales_at + (size_t)r->at.panel * p.scale_rows * CUDA_BLOCK + 4 * cuda_lane();
}

/* Asks for one chunk more, if there is one, and closes a group in any case. */
__device__ __forceinline__ void read_on(const few_list &list, uint32_t warp, slot *ring, reader *r)
{
    while (r->left && r->chunk == r->end) {
        if (--r->left) {
            go_on(list, &r->at);
            open(list, warp, r);
        }
    }
    if (r->left) {
        slot *to = ring + r->to;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            arch_copy_16(to->units + i * CUDA_WARP + cuda_lane(),
                         r->units + i * CUDA_WARP * CUDA_UNIT_BYTES);
        }
        if (r->form == CUDA_FP8 && cuda_lane() < CUDA_BLOCK / 4) { /* those of two chunks */
            arch_copy_4(to->scales + cuda_lane(), r->scales + (size_t)(r->chunk / 2) * CUDA_BLOCK);
        }
        r->units += TENSOR_CHUNK_BYTES;
        r->chunk++;
        r->to = r->to + 1 == DEPTH ? 0 : r->to + 1;
    }
    arch_copy_close();
}

/* --- inputs */

/* A lane's four of a group of 128 of a row, from input k on, into the row's image. */
__device__ __forceinline__ void put_four(uint32_t form, bool quant, uint32_t k, float4 x,
                                         bool is_in, uint16_t *row)
{
    uint2 words;
    if (quant && form == CUDA_FP8) {
        const float of[4] = {x.x, x.y, x.z, x.w};
        const float most = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
        words = tensor_quant(of, warp_max(most > 1e-4f ? most : 1e-4f)); /* as warp_quant8 */
    } else {
        const bool apart = form == CUDA_FP8; /* the second and third change places */
        words = make_uint2(arch_pair_bf16(x.x, apart ? x.z : x.y),
                           arch_pair_bf16(apart ? x.y : x.z, x.w));
    }
    if (is_in) {
        *reinterpret_cast<uint2 *>(row + stream_image_at(form, k)) = words;
    }
}

/* Groups first, first + step, ... of all rows of a product, by a warp. */
__device__ __forceinline__ void put_image(const few_product &p, uint32_t n_rows, uint32_t first,
                                          uint32_t step, uint32_t stride, uint16_t *image)
{
    const uint32_t n_groups = (p.n_in + GROUP - 1) / GROUP, n = n_rows * n_groups;
    for (uint32_t i = first; i < n; i += step * BATCH) {
        float4 x[BATCH];
#pragma unroll
        for (uint32_t b = 0; b < BATCH; b++) {
            const uint32_t at = i + b * step, k = at % n_groups * GROUP + 4 * cuda_lane();
            x[b] =
                at < n && k < p.n_in
                    ? __ldcg(reinterpret_cast<const float4 *>(p.x + at / n_groups * p.x_stride + k))
                    : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (uint32_t b = 0; b < BATCH; b++) {
            const uint32_t at = i + b * step, k = at % n_groups * GROUP + 4 * cuda_lane();
            if (at < n) {
                put_four(p.form, p.quant, k, x[b], k < p.n_in,
                         image + (size_t)(at / n_groups) * stride);
            }
        }
    }
}

/* Blocks (some groups, image). */
__global__ void __launch_bounds__(THREADS) few_image_kernel(const __grid_constant__ few_list list)
{
    cuda_grid_begin();
    uint32_t i = 0;
    while (list.of[i].image != blockIdx.y) {
        i++;
    }
    put_image(list.of[i], list.n_rows, blockIdx.x * WARPS + threadIdx.x / CUDA_WARP,
              gridDim.x * WARPS, list.image_stride,
              list.images + (size_t)blockIdx.y * list.n_rows * list.image_stride);
}

/* --- sums */

/* sums[mt][nt] += the chunk times the rows whose inputs x[nt] has, of this thread's unit. */
template <int FORM, int NT>
__device__ __forceinline__ void add_any(const slot &at, const uint4 **x, float (*sums)[NT][4])
{
    tensor_add_chunk<FORM, NT>(
        [&](int i) { return at.units[cuda_lane() % 4 * CUDA_BLOCK + cuda_lane() / 4 + 8 * i]; },
        at.scales, NT, [&](uint32_t nt, uint32_t step) { return x[nt][step * TENSOR_UNITS]; },
        sums);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        x[nt] += TENSOR_UNITS * (tensor_unit<FORM>::INPUTS / 8);
    }
}

/* Sums of a panel, of row i WARPS + warp and output `lane`, where they belong. */
template <int NT>
__device__ __forceinline__ void store(const few_product &p, uint32_t n_rows, uint32_t panel,
                                      const float *sums)
{
    const uint32_t out = panel * CUDA_BLOCK + cuda_lane();
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = i * WARPS + threadIdx.x / CUDA_WARP;
        if (row < n_rows && out < p.n_out) {
            p.y[row * p.y_stride + out] = cuda_rounded(sums[i], p.round);
        }
    }
}

/* The block's groups of a panel, n of them, are in memory: the last block to come adds all up. */
template <int NT>
__device__ __forceinline__ void join(const few_product &p, uint32_t n_rows, uint32_t panel,
                                     uint32_t n)
{
    __shared__ bool is_last;
    const uint32_t warp = threadIdx.x / CUDA_WARP;
    if (warp < n_rows) {
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(p.arrived + panel, n) + n == p.n_groups;
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    if (warp < n_rows) {
        __threadfence();
    }
    const float *from = p.partial + (size_t)panel * p.n_groups * n_rows * CUDA_BLOCK;
    float sums[NT];
#pragma unroll
    for (int i = 0; i < NT; i++) {
        const uint32_t row = i * WARPS + warp, at = row * CUDA_BLOCK + cuda_lane();
        float of_group[TENSOR_MAX_GROUPS]; /* all are asked for before the first is used */
#pragma unroll
        for (uint32_t g = 0; g < TENSOR_MAX_GROUPS; g++) {
            of_group[g] =
                row < n_rows && g < p.n_groups ? __ldcg(from + g * n_rows * CUDA_BLOCK + at) : 0.0f;
        }
        sums[i] = of_group[0];
#pragma unroll
        for (uint32_t g = 1; g < TENSOR_MAX_GROUPS; g++) {
            sums[i] = g < p.n_groups ? sums[i] + of_group[g] : sums[i];
        }
    }
    store<NT>(p, n_rows, panel, sums);
    if (threadIdx.x == 0) {
        p.arrived[panel] = 0;
    }
}

__device__ __forceinline__ size_t meeting_floats(uint32_t n_rows)
{
    return (size_t)WARPS * n_rows * CUDA_BLOCK;
}

template <int NT, bool SHARED>
__global__ void __launch_bounds__(THREADS, ARCH_SM120A ? 1 : (SHARED ? MOST_BLOCKS_A_SM : 2))
    few_kernel(const __grid_constant__ few_list list)
{
    arch_grid_go();
    extern __shared__ uint4 few_shared[]; /* rings, sums (twice), image */
    const uint32_t warp = threadIdx.x / CUDA_WARP, g = cuda_lane() / 4, t = cuda_lane() % 4;
    const uint32_t n_rows = list.n_rows;
    slot *ring = reinterpret_cast<slot *>(few_shared) + warp * DEPTH;
    float *meeting =
        reinterpret_cast<float *>(reinterpret_cast<slot *>(few_shared) + WARPS * DEPTH);
    uint16_t *image = reinterpret_cast<uint16_t *>(meeting + 2 * meeting_floats(n_rows));
    const uint32_t first = blockIdx.x * list.each, end = list.end[list.n - 1];
    place at = place_of(list, first);
    uint32_t left = end - first < list.each ? end - first : list.each;
    reader r = {at, left, 0, 0, 0, NULL, NULL, 0};
    open(list, warp, &r);
#pragma unroll
    for (int i = 0; i < DEPTH - 1; i++) {
        read_on(list, warp, ring, &r);
    }
    arch_grid_wait(); /* weights alone are older than this step */
    uint32_t image_is = UINT32_MAX, used = 0, first_group = at.group;
    float sum_of_groups[NT];
    for (; left; left--, go_on(list, &at)) {
        const few_product &p = list.of[at.product];
        if (SHARED && image_is != p.image) {
            image_is = p.image;
            put_image(p, n_rows, warp, WARPS, list.image_stride, image);
            __syncthreads();
        }
        const uint32_t run = at.group * WARPS + warp;
        uint32_t chunk = first_chunk(p, run);
        const uint32_t end = first_chunk(p, run + 1), steps = tensor_inputs_of(p.form) / 8;
        const uint4 *x[NT];
        float sums[2][NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            const uint32_t row = 8 * nt + g < n_rows ? 8 * nt + g : 0;
            const uint16_t *of_row =
                (SHARED ? image : list.images + (size_t)p.image * n_rows * list.image_stride) +
                (size_t)row * list.image_stride;
            x[nt] = reinterpret_cast<const uint4 *>(of_row) + chunk * steps * TENSOR_UNITS + t;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[0][nt][i] = sums[1][nt][i] = 0.0f;
            }
        }
        for (; chunk < end; chunk++) {
            arch_copy_wait<DEPTH - 2>();
            __syncwarp(); /* all lanes' copies are there, and the slot before is free */
            const slot &now = ring[used];
            used = used + 1 == DEPTH ? 0 : used + 1;
            read_on(list, warp, ring, &r);
            if (p.form == CUDA_BF16) {
                add_any<CUDA_BF16, NT>(now, x, sums);
            } else {
                add_any<CUDA_FP8, NT>(now, x, sums);
            }
        }
        float *to = meeting + left % 2 * meeting_floats(n_rows) + warp * n_rows * CUDA_BLOCK;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const uint32_t row = 8 * nt + 2 * t + i % 2, out = i / 4 * 16 + i / 2 % 2 * 8 + g;
                if (row < n_rows) {
                    to[row * CUDA_BLOCK + out] = sums[i / 4][nt][i % 4];
                }
            }
        }
        __syncthreads();
        float total[NT];
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint32_t row = i * WARPS + warp;
            const float *from =
                meeting + left % 2 * meeting_floats(n_rows) + row * CUDA_BLOCK + cuda_lane();
            total[i] = 0.0f;
            if (row < n_rows) {
                total[i] = from[0];
#pragma unroll
                for (int k = 1; k < WARPS; k++) {
                    total[i] += from[k * n_rows * CUDA_BLOCK];
                }
            }
        }
        first_group = at.group == 0 ? 0 : first_group;
        /* Whole: this block has all of the panel's groups. */
        const bool is_whole = first_group == 0 && left >= p.n_groups - at.group;
        if (is_whole) {
#pragma unroll
            for (int i = 0; i < NT; i++) {
                sum_of_groups[i] = at.group == 0 ? total[i] : sum_of_groups[i] + total[i];
            }
            if (at.group + 1 == p.n_groups) {
                store<NT>(p, n_rows, at.panel, sum_of_groups);
            }
            continue;
        }
        float *mine = p.partial + ((size_t)at.panel * p.n_groups + at.group) * n_rows * CUDA_BLOCK;
#pragma unroll
        for (int i = 0; i < NT; i++) {
            const uint32_t row = i * WARPS + warp;
            if (row < n_rows) {
                mine[row * CUDA_BLOCK + cuda_lane()] = total[i];
            }
        }
        if (at.group + 1 == p.n_groups || left == 1) {
            join<NT>(p, n_rows, at.panel, at.group + 1 - first_group);
        }
    }
}

/* --- launches */

size_t shared_bytes(uint32_t n_rows, uint32_t image_stride, bool shared)
{
    return WARPS * DEPTH * sizeof(slot) + 2 * (size_t)WARPS * n_rows * CUDA_BLOCK * sizeof(float) +
           (shared ? (size_t)n_rows * image_stride * sizeof(uint16_t) : 0);
}

uint32_t stride_of(uint32_t n_in)
{
    return n_in + IMAGE_PAD;
}

bool is_served(const struct ops_device *dev, const struct cuda_gemm_item *item)
{
    const struct ops_matrix *m = item->matrix;
    return ((m->form == CUDA_BF16 && !item->quant) || (m->form == CUDA_FP8 && !dev->scaled)) &&
           m->cols % (TENSOR_UNITS * tensor_inputs_of(m->form)) == 0 && item->x_stride % 4 == 0 &&
           (uintptr_t)item->x % sizeof(float4) == 0;
}

template <int NT, bool SHARED> bool allow()
{
    return cudaFuncSetAttribute(few_kernel<NT, SHARED>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                ARCH_MAX_SHARED_BYTES - STATIC_BYTES) == cudaSuccess;
}

/* As many blocks as run at once, or fewer that all have the same to do. */
template <int NT, bool SHARED> void launch(struct ops_device *dev, few_list list)
{
    const size_t bytes = shared_bytes(list.n_rows, list.image_stride, SHARED);
    const size_t most = SHARED ? MOST_BLOCKS_A_SM : 2;
    const size_t fit = dev->sm_shared_bytes / (bytes + STATIC_BYTES);
    const uint32_t n = dev->n_sms * (uint32_t)(fit < 1 ? 1 : (fit < most ? fit : most));
    const uint32_t n_places = list.end[list.n - 1];
    list.each = (n_places + n - 1) / n;
    const uint32_t grid = (n_places + list.each - 1) / list.each;
    cuda_run(dev, "products of few rows", few_kernel<NT, SHARED>, grid, THREADS, bytes, list);
}

} /* namespace */

bool cuda_few_room(struct ops_device *dev)
{
    int bytes = 0;
    bool ok = true;
    const struct ops_dims *d = &dev->d;
    size_t widest = d->hidden > d->q_lora ? d->hidden : d->q_lora;
    const size_t wo = (size_t)d->o_groups * d->o_lora, heads = (size_t)d->n_heads * d->head_dim;
    widest = wo > widest ? wo : widest;
    widest = heads > widest ? heads : widest;
    widest += CUDA_MOST_JOINED * (size_t)IMAGE_PAD;
    dev->few_halves = CUDA_FEW_ROWS * 2 * widest;
    dev->few_images = static_cast<uint16_t *>(cuda_room(dev, CUDA_FEW_ROWS, widest, &ok));
    if (!ok || dev->limits.only_plan) {
        return ok;
    }
    ok = cuda_kept(dev,
                   cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor,
                                          (int)dev->limits.device_i),
                   "shared memory") &&
         allow<1, true>() && allow<1, false>() && allow<2, false>();
    dev->sm_shared_bytes = (size_t)bytes;
    return ok;
}

bool cuda_few_gemms(struct ops_device *dev, const struct cuda_gemm_item *items, uint32_t n,
                    uint32_t n_rows)
{
    few_list list = {};
    uint32_t n_places = 0, n_images = 0, widest = 0;
    if (n_rows == 0 || n_rows > CUDA_FEW_ROWS || n > CUDA_MOST_JOINED) {
        return false;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct cuda_gemm_item *item = &items[i];
        const struct ops_matrix *m = item->matrix;
        if (!is_served(dev, item)) {
            return false;
        }
        few_product *p = &list.of[i];
        const uint32_t inputs = tensor_inputs_of(m->form);
        p->data = static_cast<const uint8_t *>(m->data);
        p->x = item->x;
        p->y = item->y;
        p->x_stride = item->x_stride;
        p->y_stride = item->y_stride;
        p->form = m->form;
        p->n_in = m->cols;
        p->n_out = m->rows;
        p->n_panels = (m->rows + CUDA_BLOCK - 1) / CUDA_BLOCK;
        p->n_groups = tensor_groups_of(m->rows, m->cols, m->form);
        p->n_chunks = m->cols / inputs / TENSOR_UNITS;
        p->partial = dev->partial + (size_t)i * TENSOR_AIM_BLOCKS * CUDA_FEW_ROWS * CUDA_BLOCK;
        p->arrived = dev->arrived + (size_t)i * TENSOR_AIM_BLOCKS;
        if (m->form == CUDA_FP8) {
            p->scales_at = cuda_scales_offset(m->rows, m->cols, inputs);
            p->scale_rows = cuda_groups(m->cols, inputs, tensor_unit<CUDA_FP8>::GROUP);
        }
        p->quant = item->quant;
        p->round = item->round;
        p->image = n_images;
        for (uint32_t k = 0; k < i && p->image == n_images; k++) {
            const few_product &other = list.of[k];
            if (other.x == p->x && other.form == p->form && other.quant == p->quant &&
                other.n_in == p->n_in) {
                p->image = other.image;
            }
        }
        n_images += p->image == n_images;
        while (1u << p->groups_log2 < p->n_groups) {
            p->groups_log2++;
        }
        n_places += p->n_panels * p->n_groups;
        list.end[i] = n_places;
        widest = p->n_in > widest ? p->n_in : widest;
    }
    list.n = n;
    list.n_rows = n_rows;
    list.image_stride = stride_of(widest);
    /* More than that a launch of its own quantises sooner than each block does. */
    if (n_rows <= 8 && n_rows * widest <= SHARED_INPUTS &&
        shared_bytes(n_rows, list.image_stride, true) <=
            (size_t)ARCH_MAX_SHARED_BYTES - STATIC_BYTES) {
        launch<1, true>(dev, list);
        return true;
    }
    if ((size_t)n_images * n_rows * list.image_stride > dev->few_halves) {
        return false;
    }
    list.images = dev->few_images;
    const uint32_t n_groups = n_rows * ((widest + GROUP - 1) / GROUP);
    cuda_run(dev, "inputs of products", few_image_kernel,
             dim3((n_groups + WARPS - 1) / WARPS, n_images), THREADS, 0, list);
    if (n_rows > 8) {
        launch<2, false>(dev, list);
    } else {
        launch<1, false>(dev, list);
    }
    return true;
}
