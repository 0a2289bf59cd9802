/* kernels/cpu/cpu.h - what the files of the CPU backend share. Private to kernels/cpu and its
 * tests.
 *
 * The device is one struct: dimensions, scratch sized at open, and a small pool of threads. Work is
 * cut into items; which thread takes an item never matters, because an item's result depends on the
 * item alone.
 */
#ifndef BATON_KERNELS_CPU_CPU_H
#define BATON_KERNELS_CPU_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/math.h"
#include "kernels/formats.h"
#include "kernels/ops.h"

/* Eight floats; arithmetic on it is elementwise, so every instruction set gives the same bits. */
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef uint32_t v8u __attribute__((vector_size(32), aligned(4)));

enum {
    CPU_BLOCK = 32,  /* outputs packed side by side */
    CPU_SLICE = 128, /* inputs summed before they join the total */
    CPU_MAX_THREADS = 64
};

enum cpu_form { CPU_FORM_BF16, CPU_FORM_F32, CPU_FORM_TABLE_BF16, CPU_FORM_TABLE_F32 };

struct cpu_threads;

/* Runs item i, 0 <= i < n_items, on some thread; thread_i is below n_threads. */
typedef void (*cpu_item_fn)(void *cookie, uint32_t item, uint32_t thread_i);

struct cpu_threads *cpu_threads_create(uint32_t n);
void cpu_threads_free(struct cpu_threads *threads);
/* Returns when all items are done. `work` is a count of multiply-adds: little work stays on the
 * calling thread. */
void cpu_threads_run(struct cpu_threads *threads, uint32_t n_items, uint64_t work, cpu_item_fn fn,
                     void *cookie);

struct cpu_memory;

/* Scratch of one thread. */
struct cpu_scratch {
    float *entries;         /* attend: cache entries as floats [max_attended, head_dim] */
    float *logits;          /* attend: [n_heads, max_attended] */
    float *scores;          /* topk: [max_entries] */
    uint32_t *keys;         /* topk: [max_entries] */
    float *row;             /* [head_dim or index_dim] */
    const float **attended; /* attend: [max_attended] */
};

struct ops_device {
    struct ops_dims d;
    struct ops_limits limits;
    uint32_t n_threads;
    struct cpu_threads *threads;
    struct cpu_scratch *scratch; /* [n_threads] */
    struct cpu_memory *memory;   /* list of what alloc gave out */
    size_t allocated;
    float *freqs[2];                          /* [rope_dim / 2]: window-only layers, the others */
    float *rope[2];                           /* [n_rows, rope_dim / 2, cos and sin] of this call */
    uint32_t max_attended;                    /* most entries one row attends to */
    uint32_t max_entries;                     /* most entries of a sequence in a sparse layer */
    float *quant;                             /* [n_rows, widest input] through the FP8 quantiser */
    float *wide;                              /* [n_rows, widest output between two products] */
    float *wide2;                             /* a second one */
    float *lane_a, *lane_b, *lane_x, *lane_y; /* experts: rows gathered by expert */
    struct cpu_job *jobs;                     /* experts: [2 (n_experts + 1)] */
    uint32_t *lane_row, *row_lanes;           /* experts: which row, and back, by expert id */
    float *lane_weight;
    uint32_t *lane_first; /* experts: [n_experts + 1] */
    float *head_x;        /* [n_rows, hidden] */
};

/* One product y[r] = x[r] W^T for rows r. */
struct cpu_job {
    const struct ops_matrix *matrix;
    const float *x;
    size_t x_stride;
    uint32_t n_rows;
    float *y;
    size_t y_stride;
    bool round; /* y to bfloat16 */
};

/* --- rates.c */
must_check enum status cpu_rates(struct ops_device *device, struct ops_rates *ret_rates,
                                 struct error *err);

/* --- gemm.c */
size_t cpu_matrix_bytes(const struct ops_source *source, uint8_t *ret_form);
void cpu_matrix_pack(const struct ops_source *source, uint8_t form, void *dst);
/* Row of a table as floats. */
void cpu_table_row(const struct ops_matrix *table, uint32_t row, float *ret_row);
void cpu_gemm(struct cpu_threads *threads, const struct cpu_job *jobs, uint32_t n_jobs);
/* Of a packed matrix. */
size_t cpu_packed_bytes(const struct ops_matrix *matrix);
/* Which instruction set the products use: "avx2" or "generic". */
const char *cpu_gemm_variant(void);
/* Use the generic loop whatever the processor has: see kernels/registry.h. */
void cpu_gemm_force_generic(bool on);

/* Sum of a[i] b[i]: element i in lane i % 32, lanes added in a fixed tree. */
static inline __attribute__((always_inline)) float cpu_dot_inline(const float *a, const float *b,
                                                                  size_t n)
{
    v8 sum[4] = {{0}, {0}, {0}, {0}};
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int j = 0; j < 4; j++) {
            sum[j] += *(const v8 *)(a + i + 8 * j) * *(const v8 *)(b + i + 8 * j);
        }
    }
    for (; i + 8 <= n; i += 8) {
        sum[i / 8 % 4] += *(const v8 *)(a + i) * *(const v8 *)(b + i);
    }
    for (int j = 0; i < n; i++, j++) {
        sum[3][j] += a[i] * b[i];
    }
    v8 all = (sum[0] + sum[2]) + (sum[1] + sum[3]);
    return ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
}

/* --- vec.c: one row at a time, fixed order of sums */
float cpu_sum_squares(const float *x, size_t n);
float cpu_dot(const float *a, const float *b, size_t n);
/* y[i] = x[i] / sqrt(mean x^2 + eps) * w[i]; w may be NULL. */
void cpu_rms_norm(const float *x, const float *w, size_t n, float eps, bool round, float *y);
void cpu_round_row(float *x, size_t n);
/* Pairs of the last rope_dim of n channels; table is (cos, sin) pairs. */
void cpu_rope_row(float *x, size_t n, uint32_t rope_dim, const float *table, bool inverse,
                  bool round);
void cpu_rope_table(const float *freqs, uint32_t rope_dim, uint32_t position, float *ret_table);
/* Quantise and dequantise, groups of `group` (the last may be short). */
void cpu_quant8(const float *x, size_t n, uint32_t group, float *y);
void cpu_quant4(float *x, size_t n);
void cpu_hadamard(float *x, size_t n);
float cpu_sigmoid(float x);

/* --- cache.c: entries and keys in their stored form */
void cpu_entry_store(const struct ops_dims *d, const float *x, uint8_t *body, uint8_t *scales);
void cpu_entry_load(const struct ops_dims *d, const uint8_t *body, const uint8_t *scales,
                    float *ret_x);
void cpu_key_store(const struct ops_dims *d, const float *x, uint8_t *body, uint8_t *scales);
void cpu_key_load(const struct ops_dims *d, const uint8_t *body, const uint8_t *scales,
                  float *ret_x);
/* Entry (or key) j of a sequence in a layer. */
void cpu_page_entry(const struct ops_dims *d, const struct ops_kv *kv, const struct ops_place *p,
                    const uint32_t *pages, uint32_t j, bool is_key, uint8_t **ret_body,
                    uint8_t **ret_scales);

/* --- the operations, one file each */
void cpu_begin(struct ops_device *dev, const struct ops_rows *rows);
void cpu_embed(struct ops_device *dev, const struct ops_rows *rows, const struct ops_matrix *table,
               float *ret_streams);
void cpu_mhc_pre(struct ops_device *dev, const struct ops_rows *rows, const struct ops_hc *hc,
                 const float *norm, const float *streams, float *ret_x, float *ret_mix);
void cpu_mhc_post(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                  const float *mix, float *streams);
/* sum over the streams k of w[k] x_k, n channels. */
void cpu_weigh_streams(const float *streams, const float *w, size_t n, bool round, float *y);
/* m[24] to pre[4], post[4] and the mixing matrix [4][4], source stream first. */
void cpu_mhc_split(const float *m, const float *scale, const float *base, uint32_t iters, float eps,
                   float *ret_pre, float *ret_post, float *ret_comb);
void cpu_project(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, float *ret_qr, float *ret_q, float *ret_kv);
void cpu_compress(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, bool index, const float *x,
                  const struct ops_kv *kv);
void cpu_indexer(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, const float *qr, float *ret_iq, float *ret_iw);
void cpu_topk(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
              const float *iq, const float *iw, const struct ops_kv *kv,
              struct ops_selection *ret_selection);
/* The k largest of scores[n], ties to the lowest index, as ascending indexes; keys: n words of
 * scratch. */
void cpu_topk_select(const float *scores, uint32_t n, uint32_t k, uint32_t *keys,
                     uint32_t *ret_index);
void cpu_attend(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *q, const float *kv_rows, const struct ops_selection *selection,
                const struct ops_kv *kv, float *ret_o);
void cpu_oproj(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *o, float *ret_y);
void cpu_route(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *x, uint32_t *ret_experts, float *ret_weights);
void cpu_experts(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *x, const uint32_t *experts, const float *weights, float *ret_y);
void cpu_head(struct ops_device *dev, const struct ops_globals *globals, const float *streams,
              const uint32_t *which, uint32_t n, float *ret_logits, size_t stride);
void cpu_comm(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
              float *const *y);

/* Rows of n channels through the FP8 quantiser into y (which may be x). */
void cpu_quant_rows(struct ops_device *dev, const float *x, uint32_t n_rows, size_t n, float *y);
/* Whether `matrix` wants its inputs quantised. */
static inline bool cpu_wants_quant(const struct ops_device *dev, const struct ops_matrix *matrix)
{
    return matrix->quant_input && !dev->d.exact;
}

#endif
