/* kernels/ops.h - the model's operations: the table a backend fills, and the shapes they meet.
 *
 * Implementer's guide. A backend is one device (or one simulated device of a group). It is opened
 * with the model's dimensions and the largest call it will see, and allocates what it needs then;
 * no operation allocates, reads a file or keeps a pointer beyond what is said below. Operations are
 * called in the order of engine/forward.c by one thread. They may return before their work is done
 * as long as later calls on the same device see it; `wait` ends that. Arithmetic is that of the
 * reference with every rounding point of its quantised code, or, opened with `exact`, the same
 * without any rounding or simulated quantisation.
 *
 * What a row gets may depend on its sequence and inputs alone: not on how many rows the call has,
 * where the row stands in it, nor how its prompt was cut. So every sum has one order, fixed by
 * shape and position, and sums that grow along a sequence (the online triple of heavy layers) are
 * made token by token. tests/kernels hold each operation to a plain double reference, and the whole
 * graph to bitwise equality over chunkings and batches.
 *
 * Arrays are row-major floats in the device's memory; with rounding on they hold bfloat16 values.
 * So are the vectors and tables that a layer points to, a matrix's data and, or else shared, the
 * three regions of struct ops_kv; arrays of matrices and experts, struct ops_rows with all it
 * points to and head's `which` are host memory. T is rows->n_rows.
 *
 * To add a backend: fill the table, give it its variants in kernels/registry.c, which say what they
 * need, and run tests/kernels on it. To add an operation: it must be the model's own, at the grain
 * at which a GPU fuses it, with a CPU version first.
 *
 *   embed       token ids to the four streams
 *   mhc         hyper-connections: streams to a sublayer's normed input, and its output back
 *   project     q (normed, rotated), its low-rank form qr, kv (normed, rotated, quantised)
 *   compress    tokens to cache entries or index keys, with the state between calls
 *   indexer     index queries and head weights
 *   topk        index scores of every visible entry, and the best of them
 *   attend      window and entries, sink, inverse rotation; then the window takes the new rows
 *   oproj       grouped low-rank output projection
 *   route       experts of a row and their weights
 *   experts     routed and shared experts, summed
 *   head        streams to logits
 *   sample      the next token of each row from its logits; NULL: drawn on the host alone
 *               (engine/sampler over kernels/sample.h)
 *   comm        sum over the devices of a group, in rank order
 */
#ifndef BATON_KERNELS_OPS_H
#define BATON_KERNELS_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/made.h"
#include "base/status.h"
#include "kernels/formats.h"
#include "kernels/parcel.h"

/* The slot of a row that only fills a call up: see struct ops_seq. */
#define OPS_NO_SLOT UINT32_MAX

enum { OPS_HC = 4, OPS_HC_OUT = 24, OPS_SPARSE_RATIO = 4, OPS_STATE_RING = 16 };

/* What a device computes with. Under tensor parallelism the counts marked (local) are its share. */
struct ops_dims {
    uint32_t hidden;
    uint32_t vocab;   /* (local) rows of the head */
    uint32_t n_heads; /* (local) */
    uint32_t head_dim, rope_dim;
    uint32_t q_lora;
    uint32_t o_groups; /* (local) divides n_heads */
    uint32_t o_lora;
    uint32_t window;                             /* tokens, the query's own included */
    uint32_t ring;                               /* tokens a window slot holds, at least window */
    uint32_t index_heads, index_dim, index_topk; /* 0: no sparse layer */
    uint32_t n_experts;                          /* all of them */
    uint32_t n_experts_used;
    uint32_t expert_first, expert_end; /* (local) this device's experts */
    uint32_t expert_width;
    bool has_shared; /* (local) whether this device adds the shared expert */
    bool is_partial; /* of several devices: oproj and experts leave rounding to comm */
    float route_scale;
    float swiglu_limit; /* 0: no clamp */
    uint32_t hc_iters;
    float hc_eps, rms_eps;
    bool exact; /* no rounding, no simulated quantisation, f32 entries */
    enum formats_entry_kind entry_kind;
    double rope_theta, compress_theta; /* of window-only layers, and of the others */
    bool has_yarn;                     /* on the others */
    double yarn_factor, yarn_beta_fast, yarn_beta_slow, yarn_original;
};

/* Largest call, and where. */
struct ops_limits {
    uint32_t n_rows;
    uint32_t n_seqs;      /* most sequences of a call; 0: as many as rows */
    uint32_t n_tokens;    /* longest sequence */
    uint32_t page_tokens; /* a page, in every layer with entries; 0: no call has pages */
    uint32_t heavy_ratio; /* of heavy layers; 0: none */
    uint32_t n_threads;   /* of a host backend; 0: one a core */
    uint32_t device_i;    /* which one, of a backend with several: N of cuda:N */
    bool early_launches;  /* kernels begin before those in front of them end
                             (kernels/cuda/launch.cuh) */
    /* The device is opened to know what it would take: open, alloc, pack and upload only count (see
     * `allocated`), what they return is not memory, sources have no data, and nothing else may be
     * called but close. No GPU is needed. */
    bool only_plan;
};

/* The floors of a step profile. */
struct ops_rates {
    double read_bytes_per_s;
    double multiply_adds_per_s;
    double launch_s; /* of an operation without work */
};
enum { OPS_MAX_MARKS = 16384, OPS_FENCES = 2 };

enum ops_format { OPS_F32, OPS_BF16, OPS_FP8_BLOCK, OPS_MXFP4, OPS_NVFP4 };
enum ops_scale { OPS_SCALE_NONE, OPS_SCALE_E8M0, OPS_SCALE_F32, OPS_SCALE_E4M3 };

/* A matrix [rows = outputs, cols = inputs] as a checkpoint has it, or a part of it: element (r, c)
 * is element (row_first + r, col_first + c) of what `data` and `scale` describe. Host memory. */
struct ops_source {
    enum ops_format format;
    uint32_t rows, cols, row_first, col_first;
    size_t row_bytes;
    const void *data;
    enum ops_scale scale_format;
    uint32_t block_rows, block_cols, scale_cols;
    const void *scale;
    float global_scale;
    struct made made, made_scale; /* how to make what data and scale hold, where those are NULL */
    bool is_table;                /* rows are looked up, not multiplied with */
    bool plain_inputs;            /* inputs are not quantised even where the weights are (wo_a) */
};

/* A matrix in the backend's own form. Owner: the device that packed it; freed with it. */
struct ops_matrix {
    void *data;
    uint32_t rows, cols;
    uint8_t form;     /* the backend's */
    bool quant_input; /* inputs go through the FP8 quantiser, groups of 128 */
};

struct ops_hc {
    struct ops_matrix fn;      /* [24, 4 hidden]; of the head [4, 4 hidden] */
    const float *base, *scale; /* [24] [3]; of the head [4] [1] */
};

struct ops_compressor {
    struct ops_matrix wkv, wgate; /* [c d, hidden], c = 2 for ratio 4, else 1 */
    const float *ape;             /* [ratio, c d] */
    const float *norm;            /* [d] */
};

struct ops_expert {
    struct ops_matrix w1, w3, w2;
};

/* Where a layer's part of a page, of a window slot and of a state slot lies, in bytes. Entry j of a
 * sequence is entry j % entries_a_page of page j / entries_a_page; position p is window row
 * p % ring. */
struct ops_place {
    uint32_t ratio;                            /* 0: window only */
    uint32_t entries_a_page;                   /* page tokens / ratio */
    size_t entry, entry_scale, key, key_scale; /* in a page: the first of each */
    size_t window, window_scale;               /* in a window slot */
    size_t state, index_state;                 /* in a state slot */
};

struct ops_layer {
    struct ops_place place;
    struct ops_hc hc_attn, hc_ffn;
    const float *attn_norm, *ffn_norm;
    const float *attn_sink; /* [n_heads] */
    struct ops_matrix wq_a, wq_b, wkv, wo_b;
    const struct ops_matrix *wo_a; /* [o_groups], each [o_lora, n_heads / o_groups head_dim] */
    const float *q_norm, *kv_norm;
    struct ops_compressor compressor, index_compressor;
    struct ops_matrix index_wq_b, index_weights;
    struct ops_matrix gate;
    const float *gate_bias;           /* NULL: hash routed */
    const uint16_t *tid2eid;          /* [vocab, n_experts_used] or NULL */
    const struct ops_expert *experts; /* n_experts; only the device's own are packed */
    struct ops_expert shared;
};

struct ops_globals {
    struct ops_matrix embed; /* a table */
    struct ops_matrix head;
    const float *norm;
    struct ops_hc hc_head;
};

/* Pool and slots of a device. */
struct ops_kv {
    uint8_t *pool;
    size_t page_bytes;
    uint8_t *windows, *states;
    size_t window_bytes, state_bytes; /* of one slot */
    bool stores_window; /* false: another device of a group that shares this memory does */
};

/* One sequence of a call: rows [first_row, first_row + n_rows) are its tokens at positions
 * `position`, `position` + 1, ...
 *
 * With the slot OPS_NO_SLOT it is none, but one row at position 0 that fills a call up, to as many
 * rows as one that was recorded. It reads and writes no page, no window and no state, of nobody's;
 * its pages may be NULL, and what comes of it means nothing. */
struct ops_seq {
    const uint32_t *pages; /* page ids, covering all of these positions */
    uint32_t slot;
    uint32_t first_row, n_rows;
    uint32_t position;
};

/* How a row's next token is drawn: see kernels/sample.h. */
struct ops_draw {
    uint64_t seed;
    float temperature; /* 0: greedy */
    float top_p;       /* >= 1: off */
    float min_p;
    int32_t top_k;     /* <= 0: off */
    uint32_t is_drawn; /* 0: it isn't, not there */
};

/* A token that the host does not know yet, where the device draws: what `sample` drew last for the
 * row of this number. */
#define OPS_FOLLOWS(row) (UINT32_C(1) << 31 | (uint32_t)(row))

struct ops_rows {
    uint32_t n_rows, n_seqs;
    const uint32_t *tokens;    /* [n_rows] ids or, of one row a sequence, OPS_FOLLOWS */
    const uint32_t *positions; /* [n_rows] */
    const uint32_t *seq_of;    /* [n_rows] index into seqs */
    const struct ops_seq *seqs;
    const struct ops_draw *draws; /* [n_rows], of one row a sequence; NULL: `sample` isn't called */
};

/* Entries a row attends to in a sparse layer: ascending indexes. */
struct ops_selection {
    uint32_t *n;     /* [T] */
    uint32_t *index; /* [T, index_topk] */
};

/* A call that a backend has kept to do it again. Freed by recording_free. */
struct ops_recording {
    void *graph; /* the backend's */
    uint32_t n_rows, n_seqs;
    bool draws;          /* rows->draws was there */
    uint32_t n_launches; /* kernels in it */
    uint64_t bytes;      /* of the device's memory that it took, as far as the device tells */
};

struct ops_device;

/* What memory is to others: a transport that asks for its kind. */
enum ops_memory { OPS_MEMORY_HOST, OPS_MEMORY_CUDA };

struct ops {
    const char *name; /* "cpu" */
    bool makes;       /* pack takes a source that has no data, but says how to make it */
    bool own_memory;  /* what alloc gives is not the host's to read and write */

    enum status (*open)(const struct ops_dims *dims, const struct ops_limits *limits,
                        struct ops_device **ret_device, struct error *err);
    void (*close)(struct ops_device *device);
    /* The devices, opened alike, become the ranks 0 .. n - 1 of a group, n > 1, before any of them
     * is used; takes what comm needs. NULL: that is nothing. UNSUPPORTED, EXHAUSTED, SYSTEM. */
    must_check enum status (*join)(struct ops_device *const *devices, uint32_t n,
                                   struct error *err);
    /* Memory of the device, zeroed; NULL when out. Freed by close. */
    void *(*alloc)(struct ops_device *device, size_t bytes);
    /* The same as an allocation of its own, for memory that a transport shows to other processes:
     * they may see all of the allocation. ret_kind is what the transport has to take it for. NULL
     * when out. */
    void *(*alloc_shown)(struct ops_device *device, size_t bytes, enum ops_memory *ret_kind);
    /* Bytes handed out so far. */
    size_t (*allocated)(const struct ops_device *device);
    /* Packs a matrix, or copies bytes, into the device's memory. EXHAUSTED, or NULL. */
    enum status (*pack)(struct ops_device *device, const struct ops_source *source,
                        struct ops_matrix *ret_matrix);
    void *(*upload)(struct ops_device *device, const void *data, size_t bytes);
    /* Lets operations use this host memory at its own address, as the pool and the slots of struct
     * ops_kv and as logits, until the device is closed; it must live that long. What they wrote is
     * there after wait. UNSUPPORTED, EXHAUSTED. */
    must_check enum status (*share)(struct ops_device *device, void *memory, size_t bytes,
                                    struct error *err);
    /* The end of that: nothing of the device uses the memory any more. */
    void (*unshare)(struct ops_device *device, void *memory);
    /* Copies between host memory and the device's, in the order of the calls. `write` has read its
     * source when it returns; what `read` asks for is there after wait, and ret_data may be the
     * device's too. */
    void (*write)(struct ops_device *device, void *memory, const void *data, size_t bytes);
    void (*read)(struct ops_device *device, void *ret_data, const void *memory, size_t bytes);
    /* Until all that was asked for is done. SYSTEM, now and ever after: something failed since
     * open, and err has the first that did; no result since then may be used. */
    must_check enum status (*wait)(struct ops_device *device, struct error *err);

    /* For who asks for a call before the one before it is done: marks the end of what was asked for
     * so far as fence_i < OPS_FENCES; and waits until that is reached, whatever was asked for
     * since. stall_ns and moved as in wait_moving; 0: however long. Both NULL where `sample` is. */
    void (*fence)(struct ops_device *device, uint32_t fence_i);
    must_check enum status (*wait_fence)(struct ops_device *device, uint32_t fence_i,
                                         uint64_t stall_ns, void (*moved)(void *cookie),
                                         void *cookie, struct error *err);

    /* --- beside the operations: on any thread, of memory that no operation under way uses, and
     * done when they return. SYSTEM: the device failed. */

    /* A copy between any two of host memory and the device's. */
    must_check enum status (*move)(struct ops_device *device, void *dst, const void *src,
                                   size_t bytes, struct error *err);
    /* Copies the pieces of a parcel from host memory, fastest from what is shared, or from the
     * device's, into the device's memory, and sums the words as they lie there: see
     * kernels/parcel.h. Pieces without a dst lie in the device's memory, or shared, and are summed
     * in place. */
    must_check enum status (*accept)(struct ops_device *device, const struct parcel_key *key,
                                     const struct parcel_piece *pieces, uint32_t n,
                                     struct parcel_sum *ret_sum, struct error *err);

    /* The calling thread, a transport's, is going to use this device's memory by other ways than
     * these. NULL: nothing has to be told. */
    void (*attach)(struct ops_device *device);

    /* Operations asked for next are this device's: before each device's turn where one thread
     * drives several, begin and comm included. NULL: nothing has to be told. */
    void (*enter)(struct ops_device *device);
    /* First of a call: whatever depends on positions alone, and the rows for a device that can't
     * read the host's memory. The rows of the operations that follow are these. */
    void (*begin)(struct ops_device *device, const struct ops_rows *rows);
    /* ret_streams [T, 4, hidden] */
    void (*embed)(struct ops_device *device, const struct ops_rows *rows,
                  const struct ops_matrix *table, float *ret_streams);
    /* ret_x [T, hidden] normed by `norm`, ret_mix [T, 4 + 16]: post, then the mixing matrix with
     * the source stream first. */
    void (*mhc_pre)(struct ops_device *device, const struct ops_rows *rows, const struct ops_hc *hc,
                    const float *norm, const float *streams, float *ret_x, float *ret_mix);
    void (*mhc_post)(struct ops_device *device, const struct ops_rows *rows, const float *y,
                     const float *mix, float *streams);
    /* From a sublayer to the next: mhc_post with `mix`, then mhc_pre, whose mix is left there.
     * NULL: the two are to be asked for. */
    void (*mhc_turn)(struct ops_device *device, const struct ops_rows *rows, const float *y,
                     const struct ops_hc *hc, const float *norm, float *streams, float *ret_x,
                     float *mix);
    /* ret_qr [T, q_lora], ret_q [T, n_heads, head_dim], ret_kv [T, head_dim]. */
    void (*project)(struct ops_device *device, const struct ops_rows *rows,
                    const struct ops_layer *layer, const float *x, float *ret_qr, float *ret_q,
                    float *ret_kv);
    /* All that a layer's attention makes of its input: project; with a ratio compress of entries;
     * in a sparse layer indexer and compress of keys. NULL: these are to be asked for. */
    void (*inputs)(struct ops_device *device, const struct ops_rows *rows,
                   const struct ops_layer *layer, const float *x, const struct ops_kv *kv,
                   float *ret_qr, float *ret_q, float *ret_kv, float *ret_iq, float *ret_iw);
    /* Entries (or, with index, keys) that these tokens complete go to their pages. */
    void (*compress)(struct ops_device *device, const struct ops_rows *rows,
                     const struct ops_layer *layer, bool index, const float *x,
                     const struct ops_kv *kv);
    /* ret_iq [T, index_heads, index_dim], ret_iw [T, index_heads] */
    void (*indexer)(struct ops_device *device, const struct ops_rows *rows,
                    const struct ops_layer *layer, const float *x, const float *qr, float *ret_iq,
                    float *ret_iw);
    /* Best index_topk of the entries that each row may see; ties to the lowest index. */
    void (*topk)(struct ops_device *device, const struct ops_rows *rows,
                 const struct ops_layer *layer, const float *iq, const float *iw,
                 const struct ops_kv *kv, struct ops_selection *ret_selection);
    /* selection is read in sparse layers alone. ret_o [T, n_heads, head_dim] */
    void (*attend)(struct ops_device *device, const struct ops_rows *rows,
                   const struct ops_layer *layer, const float *q, const float *kv_rows,
                   const struct ops_selection *selection, const struct ops_kv *kv, float *ret_o);
    /* ret_y [T, hidden]; partial under tensor parallelism. */
    void (*oproj)(struct ops_device *device, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *o, float *ret_y);
    /* ret_experts, ret_weights [T, n_experts_used]: distinct ids */
    void (*route)(struct ops_device *device, const struct ops_rows *rows,
                  const struct ops_layer *layer, const float *x, uint32_t *ret_experts,
                  float *ret_weights);
    /* ret_y [T, hidden]; partial under tensor parallelism. */
    void (*experts)(struct ops_device *device, const struct ops_rows *rows,
                    const struct ops_layer *layer, const float *x, const uint32_t *experts,
                    const float *weights, float *ret_y);
    /* Logits of n of the rows: ret_logits[i * stride ..], vocab of them, for row which[i]. */
    void (*head)(struct ops_device *device, const struct ops_globals *globals, const float *streams,
                 const uint32_t *which, uint32_t n, float *ret_logits, size_t stride);
    /* Draws of n rows, in their order, from logits [n * stride ..] in the device's memory, what
     * rows->draws asks for. Kept in the device for OPS_FOLLOWS of later calls, until the next. Not
     * for a group. */
    void (*sample)(struct ops_device *device, const struct ops_rows *rows, const float *logits,
                   size_t stride);
    /* The first n of them, into shared memory, once what was asked for before is done. */
    void (*drawn)(struct ops_device *device, uint32_t *ret_ids, uint32_t n);
    /* y[rank] [T, hidden] of every device becomes the sum over ranks in rank order, rounded once.
     */
    void (*comm)(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
                 float *const *y);

    /* --- a call that is kept and done again with other rows, in one piece. All NULL: this backend
     * keeps none. A group takes part as one: `devices` are all of it that is here, in rank order.
     */

    /* What is asked of the devices from here to record_end is kept in place of being done. That is
     * the operations of one call, `begin` first, which looks at n_rows and n_seqs of its rows
     * alone; nothing that waits, allocates or copies. The same operations on as many rows must have
     * been done before, so that all they need is there. SYSTEM. */
    must_check enum status (*record_begin)(struct ops_device *const *devices, uint32_t n_devices,
                                           struct error *err);
    /* The end of that, also after errors of operations, which it tells: then nothing was kept, and
     * the devices serve no more. INVALID, EXHAUSTED, SYSTEM. */
    must_check enum status (*record_end)(struct ops_device *const *devices, uint32_t n_devices,
                                         struct ops_recording *ret_recording, struct error *err);
    /* While recording: a replay that is done with what was asked for so far says so with this
     * number, other than those before it, where wait_moving sees it. */
    void (*record_progress)(struct ops_device *device, uint32_t value);
    /* What was recorded, for these rows, as many and of as many sequences as then. All that the
     * operations were given besides is as it was: matrices, memory, numbers of rows. */
    void (*replay)(struct ops_device *const *devices, uint32_t n_devices,
                   const struct ops_recording *recording, const struct ops_rows *rows);
    /* While nothing of it runs. */
    void (*recording_free)(struct ops_device *device, struct ops_recording *recording);
    /* As wait of each device, after a replay; and calls `moved` when it has come to another
     * record_progress. If for stall_ns it did not and is not done, the devices are given up: SYSTEM
     * now and ever after, and `close` waits for nothing of them. */
    must_check enum status (*wait_moving)(struct ops_device *const *devices, uint32_t n_devices,
                                          uint64_t stall_ns, void (*moved)(void *cookie),
                                          void *cookie, struct error *err);

    /* --- for the step profile (engine/profile.h) alone; without the first two there is none */

    /* What the device can do at best, measured now. Blocking: a second or so. EXHAUSTED, SYSTEM. */
    must_check enum status (*rates)(struct ops_device *device, struct ops_rates *ret_rates,
                                    struct error *err);
    /* Bytes of a packed matrix, which a product with it has to read. */
    size_t (*matrix_bytes)(const struct ops_matrix *matrix);
    /* Marks a place behind what was asked for so far, 0 <= mark < OPS_MAX_MARKS; and, after wait,
     * the seconds between two of them. Both NULL: an operation is done when it returns, so the
     * host's clock serves. */
    void (*mark)(struct ops_device *device, uint32_t mark);
    double (*between_s)(struct ops_device *device, uint32_t first, uint32_t last);
    /* Kernels launched since open; NULL: an operation counts as one. */
    uint64_t (*launches)(const struct ops_device *device);
};

extern const struct ops ops_cpu;
extern const struct ops ops_cuda; /* where the build has it: see kernels/registry.h */

#endif
