/* kernels/cuda/cuda.h - what the files of the CUDA backend share. Private to kernels/cuda and its
 * tests; read by the C compiler and by nvcc.
 *
 * The device is one struct: a stream, memory and scratch made at open, and the rows of the call in
 * device memory. An operation launches kernels by cuda_run (launch.cuh, which says how every kernel
 * has to begin) and returns: it never waits and never allocates. What fails is kept in the device
 * and told by `wait`; later operations may launch on, nobody uses what they give.
 *
 * These kernels are the reference on a device: every sum has the order of kernels/cpu, nothing is
 * contracted (-fmad=false, see meson.build), and division, roots and the functions of
 * kernels/cpu/math.h are exact or shared. So every operation gives the CPU's bits, in exact and in
 * quantised arithmetic, which is what tests/kernels asks for. Tuned variants may not, and then
 * state their bound.
 */
#ifndef BATON_KERNELS_CUDA_CUDA_H
#define BATON_KERNELS_CUDA_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CUDA_MAX_EXPERTS = 512,   /* of one device */
    CUDA_MAX_ROUTED = 1024,   /* of all devices */
    CUDA_MAX_CHOICES = 32,    /* experts of one row */
    CUDA_MAX_ROPE = 1024,     /* rotated channels */
    CUDA_TILE_ROWS = 8,       /* rows that a product takes at once, ... */
    CUDA_LONG_TILE_ROWS = 64, /* ... and of a long call: as many, or more */
    CUDA_BLOCK = 32,          /* outputs packed side by side: a lane each */
    CUDA_SLICE = 128,         /* inputs summed before they join the total */
    CUDA_MAX_GRID_Y = 65535,
    CUDA_MOST_JOINED = 16, /* products of one launch, ... */
    CUDA_FEW_ROWS = 16,    /* ... of up to as many rows: few.cu */
    CUDA_UNIT_BYTES = 16   /* one load: consecutive inputs of one output */
};

/* How a packed matrix keeps its elements: blocks of 32 outputs; in each, for every 16 bytes' worth
 * of inputs, those of output 0, of output 1, ... The rest is zero. Then scales, in each block the
 * 32 outputs' for every group of inputs, and for fp4 a float for the whole matrix. Tables are
 * plain rows. */
enum cuda_form {
    CUDA_F32,
    CUDA_BF16,
    CUDA_FP8,      /* e4m3, an e8m0 scale for 128 inputs */
    CUDA_FP4_E8M0, /* e2m1, for 32; bits of a word lie as cuda_fp4_packed puts them */
    CUDA_FP4_E4M3, /* e2m1, an e4m3 scale for 16 */
    CUDA_TABLE_F32,
    CUDA_TABLE_BF16,
    CUDA_FP4_SCALED /* as CUDA_FP4_E8M0, for block-scaled products: see cuda_fp4_halves */
};

/* Memory of experts_stream.cu, for as many rows as it takes; parts NULL: it serves nothing here. */
struct cuda_stream {
    float *parts;
    size_t lane_floats[2];
    uint16_t *x[2], *act;
    uint32_t *row_lanes, *counters, n_counters;
    struct cuda_tile *tiles;
};

/* Eight e2m1, four bits each, and how CUDA_FP4_E8M0 keeps them: in each half of a word the sign and
 * size of elements 0 .. 3 (4 .. 7) lie at bits 15 and 8 .. 6, at 12 and 5 .. 3, at 14 and 2 .. 0,
 * at 13 and 11 .. 9. So the first two pairs (i, i + 4) are as far apart as a bfloat16's sign and
 * last exponent bits, and are taken out whole: one instruction less for every second weight. */
FORMATS_FN uint32_t cuda_fp4_packed(uint32_t w)
{
    return (w << 12 & 0x80008000u) | (w << 6 & 0x01c001c0u) | (w << 5 & 0x10001000u) |
           (w >> 1 & 0x00380038u) | (w << 3 & 0x40004000u) | (w >> 8 & 0x00070007u) |
           (w >> 2 & 0x20002000u) | (w >> 3 & 0x0e000e00u);
}
FORMATS_FN uint32_t cuda_fp4_plain(uint32_t w)
{
    return (w >> 12 & 0x00080008u) | (w >> 6 & 0x00070007u) | (w >> 5 & 0x00800080u) |
           (w << 1 & 0x00700070u) | (w >> 3 & 0x08000800u) | (w << 8 & 0x07000700u) |
           (w << 2 & 0x80008000u) | (w << 3 & 0x70007000u);
}

/* CUDA_FP4_SCALED, of matrices whose inputs are a multiple of 128: of each four units of an output
 * (128 inputs, four groups) word w of unit t holds inputs 8 t .. 8 t + 7 of group w, so that the
 * four lanes that hold the units have a group's inputs between them; and of a block's four scales
 * of an output, which follow each other, a word. A word has element i in the lower half of byte i,
 * and element 4 + i in the upper. */
FORMATS_FN uint32_t cuda_fp4_halves(uint32_t w)
{
    uint32_t low = w & 0xffffu, high = w >> 16;
    low = (low | low << 8) & 0x00ff00ffu;
    high = (high | high << 8) & 0x00ff00ffu;
    return ((low | low << 4) & 0x0f0f0f0fu) | ((high | high << 4) & 0x0f0f0f0fu) << 4;
}
FORMATS_FN uint32_t cuda_fp4_from_halves(uint32_t w)
{
    uint32_t low = w & 0x0f0f0f0fu, high = w >> 4 & 0x0f0f0f0fu;
    low = (low | low >> 4) & 0x00ff00ffu;
    high = (high | high >> 4) & 0x00ff00ffu;
    return ((low | low >> 8) & 0xffffu) | (high | high >> 8) << 16;
}

/* Of experts_blocks.cu: what each block knows, and the counters. */
struct cuda_blocks {
    uint32_t blocks_a_sm; /* 0: it serves nothing here */
    uint32_t *launches, *counters;
};

struct cuda_memory;
struct cuda_staging;
struct cuda_beside;
struct cuda_group;

struct ops_device {
    struct ops_dims d;
    struct ops_limits limits;
    uint32_t n_sms;
    cudaStream_t stream; /* cuda_run's and, for all else, cuda_stream_for's */
    bool behind_kernel;  /* what was put there last is a kernel that cuda_run launched */
    cudaEvent_t reached; /* comm: marks a place in the stream */
    enum status failed;  /* OK, or the first failure, in `failure` */
    struct error failure;
    struct cuda_memory *memory; /* list of what was taken from the driver */
    struct cuda_memory *shared; /* list of host memory that was registered with it */
    size_t allocated;
    uint64_t n_launches; /* since open: kernels, and graphs of them */
    /* record.c */
    bool recording;                     /* what is launched is kept, not done */
    uint64_t launches_before;           /* of this recording */
    volatile uint32_t *passed;          /* pinned: the last number of record_progress */
    struct ops_device *given_up_before; /* list of such devices, once closed */
    bool given_up;                      /* it hangs: nothing waits for it any more */
    cudaEvent_t fences[OPS_FENCES];
    cudaEvent_t *marks; /* OPS_MAX_MARKS, once there is one: measure.c */
    struct cuda_staging *staging;
    struct cuda_beside *beside;
    struct cuda_group *group;    /* NULL: of one */
    float *gathered;             /* group.c: [ranks, n_rows, hidden] */
    void *inbox;                 /* push.cu: what the other ranks write into, or NULL */
    uint32_t *push_left;         /* zeroes between launches */
    uint32_t *sums, *sums_there; /* that this stream came to: its own count, and the watch's */
    /* The rows of this call, since `begin`: all pointers, seqs[].pages too, are the device's. */
    struct ops_rows rows;
    float *freqs[2]; /* [rope_dim / 2]: window-only layers, the others */
    float *rope[2];  /* [n_rows, rope_dim]: of each row's position, pairs (cos, sin) */
    uint32_t max_entries, max_attended; /* of one row: in a sparse layer; entries and window */
    float *quant;                       /* [n_rows, widest input] through the FP8 quantiser */
    float *wide, *wide2;                /* [n_rows, widest output between two products] */
    float *head_x;                      /* [n_rows, hidden] */
    uint32_t *which;                    /* [n_rows]: head's */
    uint32_t *ids;                      /* [n_seqs]: what sample drew last */
    float *attention; /* scratch of compress, topk and attend: cuda_attention_room */
    size_t attention_floats;
    uint32_t *leaf_arrived; /* of attend_tensor.cu: zeroes between launches */
    uint32_t *topk_arrived; /* [n_rows] of topk_tensor.cu: zeroes between launches */
    bool tensor;            /* products on tensor cores, where tensor.cu serves them */
    bool scaled;            /* ... by block-scaled ones, where inputs are quantised */
    bool leaves;            /* attend by leaves */
    float *partial;         /* of tensor.cu and few.cu */
    uint32_t *arrived;      /* zeroes between launches */
    float *compressed[2];   /* inputs.c: a compressor's products, of CUDA_FEW_ROWS */
    uint16_t *few_images;   /* few.cu: few_halves of them */
    size_t few_halves, sm_shared_bytes;
    bool tiles_wanted; /* long calls by tiles.cu, ... */
    void *image;       /* ... which needs room for inputs; NULL: it serves nothing */
    size_t image_bytes;
    float *mhc_parts;      /* mhc_split.cu */
    uint32_t *mhc_arrived; /* zeroes between launches */
    /* experts.cu: a lane is a row at an expert */
    float *lane_a, *lane_b, *lane_y;
    float *lane_weight;
    uint32_t *lane_row, *lane_of; /* of lane: its row; of (row, choice): its lane */
    uint32_t *expert_lanes;       /* [n_own]: how many */
    struct cuda_tile *tiles;      /* as many as tile_count says */
    uint32_t *tile_count;         /* of the tiles, and of the lanes in them */
    struct cuda_stream stream_room;
    struct cuda_blocks blocks;
    uint32_t attend_blocks_a_sm; /* of attend_tensor.cu: what a multiprocessor has room for */
};

/* Rows that a product takes at once: of one expert's lanes. */
struct cuda_tile {
    uint32_t expert, first, n;
};

/* --- backend.c */
/* The stream, for what is put there otherwise than by cuda_run: the kernel behind it is launched as
 * usual. */
static inline cudaStream_t cuda_stream_for(struct ops_device *dev)
{
    dev->behind_kernel = false;
    return dev->stream;
}
/* After each launch of `what`. */
void cuda_launched(struct ops_device *dev, const char *what);
/* Keeps the first failure. */
void cuda_failed(struct ops_device *dev, enum status status, const char *format, ...)
    PRINTF_LIKE(3, 4);
/* n * m floats or words of device memory, for `open`; *ok becomes false when there are none. */
void *cuda_room(struct ops_device *dev, size_t n, size_t m, bool *ok);

/* Whether all of it is the device's own, or registered host memory at an address that it may use.
 */
bool cuda_is_usable(const struct ops_device *dev, const void *memory, size_t bytes);

/* ops->pack for the variants that multiply by blocks with scales. */
must_check enum status cuda_pack_scaled(struct ops_device *dev, const struct ops_source *source,
                                        struct ops_matrix *ret_matrix);

/* Keeps `code` if it is a failure, of doing `what`; whether it is none. */
bool cuda_kept(struct ops_device *dev, cudaError_t code, const char *what);
/* The calling thread's device is this one. Every call that a thread may begin with enters. */
void cuda_enter(struct ops_device *dev);
/* dev->rows become these, in device memory by the time that what is launched now runs. False, and
 * the device failed: too many, or a failure. */
bool cuda_stage(struct ops_device *dev, const struct ops_rows *rows);

/* --- record.c, see kernels/ops.h; and progress.cu for it */
/* From `open`. */
bool cuda_record_make(struct ops_device *dev);
void cuda_record_free(struct ops_device *dev);
enum status cuda_record_begin(struct ops_device *const *devices, uint32_t n_devices,
                              struct error *err);
enum status cuda_record_end(struct ops_device *const *devices, uint32_t n_devices,
                            struct ops_recording *ret_recording, struct error *err);
void cuda_record_progress(struct ops_device *dev, uint32_t value);
void cuda_replay(struct ops_device *const *devices, uint32_t n_devices,
                 const struct ops_recording *recording, const struct ops_rows *rows);
void cuda_recording_free(struct ops_device *dev, struct ops_recording *recording);
enum status cuda_wait_moving(struct ops_device *const *devices, uint32_t n_devices,
                             uint64_t stall_ns, void (*moved)(void *cookie), void *cookie,
                             struct error *err);
void cuda_fence(struct ops_device *dev, uint32_t fence_i);
enum status cuda_wait_fence(struct ops_device *dev, uint32_t fence_i, uint64_t stall_ns,
                            void (*moved)(void *cookie), void *cookie, struct error *err);
/* *to = value, where the host sees it. */
void cuda_run_progress(struct ops_device *dev, volatile uint32_t *to, uint32_t value);

/* --- beside.c */
/* From `open`: false when out of memory. The second takes NULL too. */
bool cuda_beside_make(struct ops_device *dev);
void cuda_beside_free(struct cuda_beside *beside);
enum status cuda_move(struct ops_device *dev, void *dst, const void *src, size_t bytes,
                      struct error *err);
enum status cuda_accept(struct ops_device *dev, const struct parcel_key *key,
                        const struct parcel_piece *pieces, uint32_t n, struct parcel_sum *ret_sum,
                        struct error *err);

/* --- pack.c */
/* Bytes of the packed matrix, and its form: with `scaled`, MXFP4 is CUDA_FP4_SCALED where it can.
 */
size_t cuda_matrix_bytes(const struct ops_source *source, bool scaled, uint8_t *ret_form);
/* Writes it, in host memory. */
void cuda_matrix_pack(const struct ops_source *source, uint8_t form, void *dst);
/* Bytes of a packed one. */
size_t cuda_packed_bytes(const struct ops_matrix *matrix);
/* Where a packed matrix keeps its scales, behind the elements. */
FORMATS_FN size_t cuda_scales_offset(uint32_t rows, uint32_t cols, uint32_t unit)
{
    return (size_t)((rows + CUDA_BLOCK - 1) / CUDA_BLOCK) * ((cols + unit - 1) / unit) *
           CUDA_BLOCK * CUDA_UNIT_BYTES;
}
/* Groups of a block's inputs that have a scale: whole units, where a unit has several. */
FORMATS_FN uint32_t cuda_groups(uint32_t cols, uint32_t unit, uint32_t group)
{
    return group < unit ? (cols + unit - 1) / unit * (unit / group) : (cols + group - 1) / group;
}

/* --- measure.c, see kernels/ops.h; and rates.cu for it */
void cuda_mark(struct ops_device *dev, uint32_t mark);
double cuda_between_s(struct ops_device *dev, uint32_t first, uint32_t last);
void cuda_marks_free(struct ops_device *dev);
uint64_t cuda_launches(const struct ops_device *dev);
must_check enum status cuda_rates(struct ops_device *dev, struct ops_rates *ret_rates,
                                  struct error *err);
void cuda_run_nothing(struct ops_device *dev);
/* `scratch`: a few bytes that nothing is written to. */
void cuda_run_read(struct ops_device *dev, const void *data, size_t bytes, void *scratch);
/* Returns the multiply-adds of one launch. */
double cuda_run_products(struct ops_device *dev, void *scratch);

/* --- fill.cu */
/* Fills a packed matrix of such a source as says how to make its data (base/made.h). */
void cuda_fill(struct ops_device *dev, const struct ops_source *source, uint8_t form, void *to);

/* --- gemm.cu */
/* As cudaFuncGetAttributes: whether the build holds code for the current device. */
cudaError_t cuda_has_code(void);
/* y[r][0 .. matrix->rows) = x[r] W^T for n_rows rows, in the order of kernels/cpu/gemm.c; strides
 * in floats. round: to bfloat16. x is taken as it is: see cuda_quant_rows. */
void cuda_gemm(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
               size_t x_stride, uint32_t n_rows, float *y, size_t y_stride, bool round);
/* Products of the same n_rows rows that don't need each other's results: as cuda_gemm of one after
 * the other, in fewer launches where that can be. quant: x, whose rows follow each other, goes
 * through the FP8 quantiser first (and is left as it was). */
struct cuda_gemm_item {
    const struct ops_matrix *matrix;
    const float *x;
    size_t x_stride;
    float *y;
    size_t y_stride;
    bool round, quant;
};
void cuda_gemms(struct ops_device *dev, const struct cuda_gemm_item *items, uint32_t n,
                uint32_t n_rows);
/* Of rows x that follow each other, quantised if the matrix wants that. */
static inline struct cuda_gemm_item cuda_item(const struct ops_device *dev,
                                              const struct ops_matrix *matrix, const float *x,
                                              float *y, size_t y_stride, bool round)
{
    const struct cuda_gemm_item item = {
        matrix, x, matrix->cols, y, y_stride, round, matrix->quant_input && !dev->d.exact};
    return item;
}
/* The same for rows x_row[0 .. n_rows) of x, in device memory. */
void cuda_gemm_some(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                    size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                    size_t y_stride, bool round);
/* One matrix an expert, all of the shape and form of `shape`, on the lanes that dev->tiles lists.
 * x_row: the row of x of a lane, or NULL: the lane itself. */
struct cuda_weights {
    const void *data[CUDA_MAX_EXPERTS];
};
/* Of n_own experts; false, and the device failed, when they differ in kind (experts.cu). */
bool cuda_experts_gather(struct ops_device *dev, const struct ops_expert *experts, uint32_t n_own,
                         struct cuda_weights *w1, struct cuda_weights *w3, struct cuda_weights *w2);
struct cuda_lanes {
    const uint32_t *x_row;
    uint32_t n_x, max_tiles; /* rows of x; tiles that there can be, ... */
    bool is_long;            /* ... of CUDA_LONG_TILE_ROWS, for tiles.cu */
};
void cuda_gemm_experts(struct ops_device *dev, const struct ops_matrix *shape,
                       const struct cuda_weights *matrices, const float *x, size_t x_stride,
                       const struct cuda_lanes *lanes, float *y, size_t y_stride);
/* Rows of n channels through the FP8 quantiser, groups of 128, into y (which may be x). */
void cuda_quant_rows(struct ops_device *dev, const float *x, uint32_t n_rows, size_t n, float *y);
/* x, or its quantised copy in dev->quant where `matrix` wants that. */
const float *cuda_inputs(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                         uint32_t n_rows, size_t n);
/* Whether `matrix` wants its inputs quantised. */
static inline bool cuda_wants_quant(const struct ops_device *dev, const struct ops_matrix *matrix)
{
    return matrix->quant_input && !dev->d.exact;
}

/* --- tensor.cu: products of bfloat16 inputs on tensor cores; false: not this one, nothing is done.
 * Arguments as those of cuda_gemm_some and cuda_gemm_experts. Bound: 2^-18 of the sum of the
 * products' sizes, for up to 8,192 inputs; of experts, between whose products activations are
 * rounded to e4m3, 0.003 of each value and of the row's largest, and what a step of those that lie
 * on an edge of that rounding changes: tests/kernels/edges.h. */
bool cuda_tensor_room(struct ops_device *dev);
bool cuda_tensor_serves(const struct ops_matrix *matrix);
bool cuda_tensor_gemm(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                      size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                      size_t y_stride, bool round);
bool cuda_tensor_experts(struct ops_device *dev, const struct ops_matrix *shape,
                         const struct cuda_weights *matrices, const float *x, size_t x_stride,
                         const uint32_t *x_row, uint32_t max_tiles, float *y, size_t y_stride);

/* --- inputs.c: project, indexer and both compressors, each as its tensor, with the products that
 * don't wait for each other in one launch. */
bool cuda_inputs_room(struct ops_device *dev);
void cuda_inputs_joined(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *x, const struct ops_kv *kv,
                        float *ret_qr, float *ret_q, float *ret_kv, float *ret_iq, float *ret_iw);

/* --- few.cu: the same products of up to CUDA_FEW_ROWS rows, with the same bits, all in a launch or
 * two. False, and nothing is done: too many rows or products, or one that is not served. */
bool cuda_few_room(struct ops_device *dev);
bool cuda_few_gemms(struct ops_device *dev, const struct cuda_gemm_item *items, uint32_t n,
                    uint32_t n_rows);

void cuda_project_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                         float *ret_kv);
void cuda_oproj_tensor(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *o, float *ret_y);
void cuda_experts_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y);
void cuda_head_tensor(struct ops_device *dev, const struct ops_globals *globals,
                      const float *streams, const uint32_t *which, uint32_t n, float *ret_logits,
                      size_t stride);
void cuda_indexer_tensor(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const float *qr,
                         float *ret_iq, float *ret_iw);
void cuda_compress_tensor(struct ops_device *dev, const struct ops_rows *rows,
                          const struct ops_layer *layer, bool index, const float *x,
                          const struct ops_kv *kv);
void cuda_route_tensor(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *x, uint32_t *ret_experts,
                       float *ret_weights);

/* By block-scaled products where inputs are quantised, else as those above. The same bound, as far
 * as sums are those of the emulation: what sm_120a keeps of them is not known (arch.cuh). */
void cuda_project_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                         float *ret_kv);
void cuda_oproj_scaled(struct ops_device *dev, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *o, float *ret_y);
void cuda_indexer_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const float *qr,
                         float *ret_iq, float *ret_iw);
void cuda_experts_tensor_scaled(struct ops_device *dev, const struct ops_rows *rows,
                                const struct ops_layer *layer, const float *x,
                                const uint32_t *experts, const float *weights, float *ret_y);

/* --- tiles.cu: the same products of long calls, with the same bits; matrices that tensor.cu
 * serves. False, and nothing is done: the call is short, or has fewer tiles than the device has
 * multiprocessors, or the device was opened without. */
bool cuda_tiles_room(struct ops_device *dev);
bool cuda_tiles_gemm(struct ops_device *dev, const struct ops_matrix *matrix, const float *x,
                     size_t x_stride, const uint32_t *x_row, uint32_t n_rows, float *y,
                     size_t y_stride, bool round);
void cuda_tiles_experts(struct ops_device *dev, const struct ops_matrix *shape,
                        const struct cuda_weights *weights, const float *x, size_t x_stride,
                        const struct cuda_lanes *lanes, float *y, size_t y_stride);
enum status cuda_open_tiles(const struct ops_dims *dims, const struct ops_limits *limits,
                            struct ops_device **ret_device, struct error *err);

/* --- experts_stream.cu: experts in two launches, up to 64 rows; what it doesn't serve goes to
 * cuda_experts_tensor, whose bits it gives. */
bool cuda_stream_room(struct ops_device *dev);
void cuda_experts_stream(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y);
/* By block-scaled products, where inputs are quantised or weights bfloat16; else by
 * cuda_experts_tensor_scaled, whose bits it gives. */
void cuda_experts_scaled(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y);

/* --- experts_blocks.cu: experts in one launch, up to 4 rows; what it doesn't serve goes to
 * cuda_experts_tensor, whose bits it gives. */
bool cuda_experts_blocks_room(struct ops_device *dev);
void cuda_experts_blocks(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const uint32_t *experts,
                         const float *weights, float *ret_y);

/* --- attend_tensor.cu, see there for its bound */
bool cuda_attend_tensor_serves(const struct ops_dims *d, struct error *why);
size_t cuda_attend_tensor_floats(const struct ops_device *dev); /* of a row, in dev->attention */
bool cuda_attend_tensor_room(struct ops_device *dev);
void cuda_attend_tensor(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *q, const float *kv_rows,
                        const struct ops_selection *selection, const struct ops_kv *kv,
                        float *ret_o);

/* --- mhc_split.cu: mhc_pre over many blocks, and mhc_turn. Bound: of the mixing
 * 2^-19 of each value and of the row's largest, of a channel, which is rounded twice, two units of
 * bfloat16 (2^-6 of it) and 2^-16 of the row's largest. */
bool cuda_mhc_split_room(struct ops_device *dev);
void cuda_mhc_pre_split(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_hc *hc, const float *norm, const float *streams,
                        float *ret_x, float *ret_mix);
void cuda_mhc_turn(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                   const struct ops_hc *hc, const float *norm, float *streams, float *ret_x,
                   float *mix);

/* --- the operations, one file each */
/* `begin` once the rows are there: rope tables, and tokens that follow become ids. */
void cuda_positions(struct ops_device *dev);
void cuda_embed(struct ops_device *dev, const struct ops_rows *rows, const struct ops_matrix *table,
                float *ret_streams);
void cuda_mhc_pre(struct ops_device *dev, const struct ops_rows *rows, const struct ops_hc *hc,
                  const float *norm, const float *streams, float *ret_x, float *ret_mix);
void cuda_mhc_post(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                   const float *mix, float *streams);
void cuda_project(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                  float *ret_kv);
/* Whether the four operations on the cache serve these widths, from `open`: UNSUPPORTED says why
 * not. */
must_check enum status cuda_attention_check(const struct ops_dims *dims, struct error *err);
/* Their scratch, from `open` once max_entries and max_attended are known: false when out of memory.
 */
bool cuda_attention_room(struct ops_device *dev);
void cuda_compress(struct ops_device *dev, const struct ops_rows *rows,
                   const struct ops_layer *layer, bool index, const float *x,
                   const struct ops_kv *kv);
void cuda_indexer(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, const float *qr, float *ret_iq,
                  float *ret_iw);
void cuda_topk(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
               const float *iq, const float *iw, const struct ops_kv *kv,
               struct ops_selection *ret_selection);
void cuda_topk_tensor(struct ops_device *dev, const struct ops_rows *rows,
                      const struct ops_layer *layer, const float *iq, const float *iw,
                      const struct ops_kv *kv, struct ops_selection *ret_selection);
void cuda_topk_scaled(struct ops_device *dev, const struct ops_rows *rows,
                      const struct ops_layer *layer, const float *iq, const float *iw,
                      const struct ops_kv *kv, struct ops_selection *ret_selection);
void cuda_attend(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                 const float *q, const float *kv_rows, const struct ops_selection *selection,
                 const struct ops_kv *kv, float *ret_o);
void cuda_attend_leaves(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *q, const float *kv_rows,
                        const struct ops_selection *selection, const struct ops_kv *kv,
                        float *ret_o);
/* What project does once the products are there: of qr and kv, and of q. */
void cuda_project_narrow(struct ops_device *dev, const struct ops_rows *rows,
                         const struct ops_layer *layer, float *qr, float *kv);
void cuda_project_heads(struct ops_device *dev, const struct ops_rows *rows,
                        const struct ops_layer *layer, float *q);
/* What the indexer does then, of iq and iw, and a compressor, of k and s. */
void cuda_indexer_heads(struct ops_device *dev, const struct ops_rows *rows, float *iq, float *iw);
void cuda_compress_entries(struct ops_device *dev, const struct ops_rows *rows,
                           const struct ops_layer *layer, bool index, const struct ops_kv *kv,
                           const float *k, const float *s);
void cuda_oproj(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *o, float *ret_y);
void cuda_route(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *x, uint32_t *ret_experts, float *ret_weights);
void cuda_experts(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, const uint32_t *experts,
                  const float *weights, float *ret_y);
void cuda_head(struct ops_device *dev, const struct ops_globals *globals, const float *streams,
               const uint32_t *which, uint32_t n, float *ret_logits, size_t stride);
void cuda_sample(struct ops_device *dev, const struct ops_rows *rows, const float *logits,
                 size_t stride);
void cuda_drawn(struct ops_device *dev, uint32_t *ret_ids, uint32_t n);
void cuda_comm(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
               float *const *y);
void cuda_comm_push(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
                    float *const *y);

#ifdef __cplusplus
}
#endif

#endif
