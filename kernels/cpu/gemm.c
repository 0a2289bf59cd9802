/* Matrix products with one order of sums.
 *
 * y[r][o] = sum over slices of 128 inputs, in order, of (sum over the slice's inputs, in order, of
 * x[k] w[o][k]), each a multiplication and an addition of their own, never fused. So a value
 * depends on its row and its output alone: not on how many rows share the call, which thread took
 * it, or how wide the host's registers are. The slices are those of the FP8 matrices' scales.
 *
 * Weights are packed once, 32 outputs side by side for each input, as bfloat16 where that is exact
 * (BF16, FP8 and MXFP4 with power-of-two scales) and as float otherwise. Scales are folded into the
 * packed weights: with powers of two that changes no bit of a product or sum.
 */
#include <assert.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/source.h"

typedef uint16_t v8h __attribute__((vector_size(16), aligned(2)));

enum { ROW_CHUNK = 32 }; /* rows of one item: keeps a block of weights in the first-level cache */

size_t cpu_matrix_bytes(const struct ops_source *s, uint8_t *ret_form)
{
    bool half = ops_source_is_half(s);
    size_t rows = s->rows;
    if (s->is_table) {
        *ret_form = half ? CPU_FORM_TABLE_BF16 : CPU_FORM_TABLE_F32;
    } else {
        *ret_form = half ? CPU_FORM_BF16 : CPU_FORM_F32;
        rows = (rows + CPU_BLOCK - 1) / CPU_BLOCK * CPU_BLOCK;
    }
    return rows * s->cols * (half ? 2 : 4);
}

size_t cpu_packed_bytes(const struct ops_matrix *m)
{
    bool is_table = m->form == CPU_FORM_TABLE_BF16 || m->form == CPU_FORM_TABLE_F32;
    bool half = m->form == CPU_FORM_BF16 || m->form == CPU_FORM_TABLE_BF16;
    size_t rows = is_table ? m->rows : (m->rows + CPU_BLOCK - 1) / CPU_BLOCK * CPU_BLOCK;
    return rows * m->cols * (half ? 2 : 4);
}

void cpu_matrix_pack(const struct ops_source *s, uint8_t form, void *dst)
{
    bool table = form == CPU_FORM_TABLE_BF16 || form == CPU_FORM_TABLE_F32;
    uint16_t *halves = dst;
    float *floats = dst;
    for (uint32_t r = 0; r < s->rows; r++) {
        size_t first = table ? (size_t)r * s->cols
                             : (size_t)(r / CPU_BLOCK) * CPU_BLOCK * s->cols + r % CPU_BLOCK;
        size_t step = table ? 1 : CPU_BLOCK;
        for (uint32_t k = 0; k < s->cols; k++) {
            float value = ops_source_element(s, r, k);
            if (form == CPU_FORM_BF16 || form == CPU_FORM_TABLE_BF16) {
                halves[first + k * step] = bf16_encode(value);
            } else {
                floats[first + k * step] = value;
            }
        }
    }
}

void cpu_table_row(const struct ops_matrix *table, uint32_t row, float *ret_row)
{
    if (table->form == CPU_FORM_TABLE_F32) {
        memcpy(ret_row, (const float *)table->data + (size_t)row * table->cols,
               (size_t)table->cols * sizeof(float));
        return;
    }
    const uint16_t *from = (const uint16_t *)table->data + (size_t)row * table->cols;
    for (uint32_t k = 0; k < table->cols; k++) {
        ret_row[k] = bf16_decode(from[k]);
    }
}

/* Eight weights of input k, outputs 8 p .. 8 p + 7 of the block. Vectors go by pointer: by value
 * their passing would depend on the instruction set. */
static inline __attribute__((always_inline)) void load_weights(const void *block, size_t k,
                                                               uint32_t p, bool half, v8 *ret_w)
{
    if (half) {
        v8h h = *(const v8h *)((const uint16_t *)block + k * CPU_BLOCK + 8 * p);
        v8u wide = __builtin_convertvector(h, v8u) << 16;
        *ret_w = (v8)wide;
    } else {
        *ret_w = *(const v8 *)((const float *)block + k * CPU_BLOCK + 8 * p);
    }
}

/* n_r rows (a constant where it is inlined) by n_p eighths of the block, from eighth p0. */
static inline __attribute__((always_inline)) void tile(const void *block, bool half, uint32_t n_k,
                                                       const float *x, size_t x_stride, int n_r,
                                                       int n_p, uint32_t p0, v8 *total)
{
    v8 sum[8];
    for (int i = 0; i < n_r * n_p; i++) {
        total[i] = (v8){0};
    }
    for (uint32_t k0 = 0; k0 < n_k; k0 += CPU_SLICE) {
        uint32_t k1 = n_k - k0 < CPU_SLICE ? n_k : k0 + CPU_SLICE;
        for (int i = 0; i < n_r * n_p; i++) {
            sum[i] = (v8){0};
        }
        for (uint32_t k = k0; k < k1; k++) {
            v8 w[4];
            for (int p = 0; p < n_p; p++) {
                load_weights(block, k, p0 + (uint32_t)p, half, &w[p]);
            }
            for (int r = 0; r < n_r; r++) {
                float one = x[(size_t)r * x_stride + k];
                v8 all = {one, one, one, one, one, one, one, one};
                for (int p = 0; p < n_p; p++) {
                    sum[r * n_p + p] += all * w[p];
                }
            }
        }
        for (int i = 0; i < n_r * n_p; i++) {
            total[i] += sum[i];
        }
    }
}

static inline __attribute__((always_inline)) void store_tile(const struct cpu_job *job,
                                                             uint32_t row, uint32_t output, int n_r,
                                                             int n_p, const v8 *total)
{
    for (int r = 0; r < n_r; r++) {
        float *y = job->y + (row + (size_t)r) * job->y_stride;
        for (int i = 0; i < 8 * n_p; i++) {
            uint32_t o = output + (uint32_t)i;
            if (o < job->matrix->rows) {
                float value = total[r * n_p + i / 8][i % 8];
                y[o] = job->round ? bf16_round(value) : value;
            }
        }
    }
}

static inline __attribute__((always_inline)) void
block_rows(const struct cpu_job *job, uint32_t block_i, uint32_t row, uint32_t end, bool half)
{
    uint32_t n_k = job->matrix->cols, output = block_i * CPU_BLOCK;
    const uint8_t *block =
        (const uint8_t *)job->matrix->data + (size_t)output * n_k * (half ? 2 : 4);
    v8 total[8];
    for (; row + 4 <= end; row += 4) {
        const float *x = job->x + row * job->x_stride;
        for (uint32_t p = 0; p < 4; p += 2) {
            tile(block, half, n_k, x, job->x_stride, 4, 2, p, total);
            store_tile(job, row, output + 8 * p, 4, 2, total);
        }
    }
    for (; row < end; row++) {
        tile(block, half, n_k, job->x + row * job->x_stride, job->x_stride, 1, 4, 0, total);
        store_tile(job, row, output, 1, 4, total);
    }
}

typedef void (*block_fn)(const struct cpu_job *job, uint32_t block_i, uint32_t row, uint32_t end);

static void block_generic(const struct cpu_job *job, uint32_t block_i, uint32_t row, uint32_t end)
{
    if (job->matrix->form == CPU_FORM_BF16) {
        block_rows(job, block_i, row, end, true);
    } else {
        block_rows(job, block_i, row, end, false);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void block_avx2(const struct cpu_job *job, uint32_t block_i,
                                                       uint32_t row, uint32_t end)
{
    if (job->matrix->form == CPU_FORM_BF16) {
        block_rows(job, block_i, row, end, true);
    } else {
        block_rows(job, block_i, row, end, false);
    }
}
#endif

static bool force_generic;

void cpu_gemm_force_generic(bool on)
{
    force_generic = on;
}

static bool use_avx2(void)
{
#if defined(__x86_64__)
    return !force_generic && __builtin_cpu_supports("avx2");
#else
    return false;
#endif
}

const char *cpu_gemm_variant(void)
{
    return use_avx2() ? "avx2" : "generic";
}

struct gemm_run {
    const struct cpu_job *jobs;
    uint32_t n_jobs;
    block_fn fn;
};

static uint32_t job_items(const struct cpu_job *job)
{
    return (job->matrix->rows + CPU_BLOCK - 1) / CPU_BLOCK *
           ((job->n_rows + ROW_CHUNK - 1) / ROW_CHUNK);
}

static void gemm_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    const struct gemm_run *run = cookie;
    const struct cpu_job *job = run->jobs;
    while (item >= job_items(job)) {
        item -= job_items(job);
        job++;
    }
    uint32_t n_blocks = (job->matrix->rows + CPU_BLOCK - 1) / CPU_BLOCK;
    uint32_t row = item / n_blocks * ROW_CHUNK;
    uint32_t end = job->n_rows - row < ROW_CHUNK ? job->n_rows : row + ROW_CHUNK;
    run->fn(job, item % n_blocks, row, end);
}

void cpu_gemm(struct cpu_threads *threads, const struct cpu_job *jobs, uint32_t n_jobs)
{
    struct gemm_run run = {jobs, n_jobs, block_generic};
#if defined(__x86_64__)
    if (use_avx2()) {
        run.fn = block_avx2;
    }
#endif
    uint32_t n_items = 0;
    uint64_t work = 0;
    for (uint32_t i = 0; i < n_jobs; i++) {
        assert(jobs[i].matrix->form == CPU_FORM_BF16 || jobs[i].matrix->form == CPU_FORM_F32);
        n_items += job_items(&jobs[i]);
        work += (uint64_t)jobs[i].matrix->rows * jobs[i].matrix->cols * jobs[i].n_rows;
    }
    cpu_threads_run(threads, n_items, work, gemm_item, &run);
}
