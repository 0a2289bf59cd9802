/* What the tests of operations share: the backend under test, random inputs, poison, a small
 * device, comparison in double.
 */
#ifndef BATON_TESTS_KERNELS_UTIL_H
#define BATON_TESTS_KERNELS_UTIL_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "tests/kernels/random.h"
#include "kernels/registry.h"

/* What is tested: the CPU, or the device that the program's argument names. */
static const struct ops *backend __attribute__((unused)) = &ops_cpu;

/* Skips the whole program where the device named by the first argument isn't there. A second one,
 * OPERATION=VARIANT, is that variant among references. */
static inline void backend_choose(int argc, char **argv)
{
    static struct ops table;
    struct registry_choice choice;
    struct registry_wishes wishes;
    struct ops_limits limits = {.n_rows = 0};
    struct error err = {""};
    char all[] = "all", *allowed[] = {all};
    if (argc > 1 && registry_find(argv[1], &choice, &err)) {
        printf("%s: skipped\n", err.text);
        exit(77);
    }
    if (argc > 1) {
        backend = choice.ops;
    }
    if (argc > 2 && strchr(argv[2], '=')) {
        struct registry_query query = {.backend = choice.backend,
                                       .device = &choice.device,
                                       .wishes = &wishes,
                                       .limits = &limits};
        table = *choice.ops;
        if (registry_wishes_parse(argv + 2, 1, allowed, 1, &wishes, &err) ||
            registry_select(&query, &table, NULL, NULL, &err)) {
            printf("%s\n", err.text);
            exit(1);
        }
        struct ops chosen = table;
        table = *choice.ops;
        table.attend =
            chosen.attend; /* of the operations tested with this, the one with variants */
        backend = &table;
    }
}

#define assert_close(got, want, tolerance)                             \
    do {                                                               \
        double got_ = (double)(got), want_ = (want);                   \
        if (!(fabs(got_ - want_) <= (tolerance))) {                    \
            fail_msg("%s is %.9g, should be %.9g", #got, got_, want_); \
        }                                                              \
    } while (0)

static inline struct ops_dims small_dims(bool exact)
{
    return (struct ops_dims){.hidden = 72,
                             .vocab = 50,
                             .n_heads = 4,
                             .head_dim = exact ? 40 : 128,
                             .rope_dim = exact ? 8 : 64,
                             .q_lora = 33,
                             .o_groups = 2,
                             .o_lora = 12,
                             .window = 8,
                             .ring = 16,
                             .index_heads = 3,
                             .index_dim = exact ? 16 : 64,
                             .index_topk = 3,
                             .n_experts = 7,
                             .n_experts_used = 3,
                             .expert_end = 7,
                             .expert_width = 24,
                             .has_shared = true,
                             .route_scale = 1.5f,
                             .swiglu_limit = 0.7f,
                             .hc_iters = 20,
                             .hc_eps = 1e-6f,
                             .rms_eps = 1e-6f,
                             .exact = exact,
                             .entry_kind = exact ? FORMATS_ENTRY_F32 : FORMATS_ENTRY_PACKED,
                             .rope_theta = 10000.0,
                             .compress_theta = 160000.0};
}

static inline struct ops_device *open_on(const struct ops *ops, const struct ops_dims *dims,
                                         const struct ops_limits *limits)
{
    struct ops_device *device;
    struct error err;
    if (ops->open(dims, limits, &device, &err)) {
        fail_msg("%s", err.text);
    }
    return device;
}

static inline struct ops_device *open_device(const struct ops_dims *dims, uint32_t n_rows,
                                             uint32_t n_tokens, uint32_t heavy_ratio)
{
    struct ops_limits limits = {.n_rows = n_rows,
                                .n_tokens = n_tokens,
                                .page_tokens = 32,
                                .heavy_ratio = heavy_ratio,
                                .n_threads = 2};
    return open_on(backend, dims, &limits);
}

/* A copy in the device's memory, and back; what comes back is the caller's. */
static inline void *to_device(const struct ops *ops, struct ops_device *device, const void *data,
                              size_t bytes)
{
    void *copy = ops->upload(device, data, bytes);
    assert_non_null(copy);
    return copy;
}

static inline void *from_device(const struct ops *ops, struct ops_device *device,
                                const void *memory, size_t bytes)
{
    struct error err;
    void *data = mem_alloc(bytes);
    ops->read(device, data, memory, bytes);
    if (ops->wait(device, &err)) {
        fail_msg("%s", err.text);
    }
    return data;
}

/* Memory of the device that nobody has written to, see poisoned. */
static inline void *poisoned_on(const struct ops *ops, struct ops_device *device, size_t bytes)
{
    void *data = mem_alloc(bytes);
    memset(data, 0xff, bytes);
    void *copy = to_device(ops, device, data, bytes);
    mem_free(data);
    return copy;
}

/* Packs w [rows, cols], which the caller keeps. */
static inline struct ops_matrix pack_floats_on(const struct ops *ops, struct ops_device *device,
                                               const float *w, uint32_t rows, uint32_t cols)
{
    struct ops_source source = {.format = OPS_F32,
                                .rows = rows,
                                .cols = cols,
                                .row_bytes = (size_t)cols * sizeof(float),
                                .data = w,
                                .block_rows = 1,
                                .block_cols = 1,
                                .global_scale = 1.0f};
    struct ops_matrix matrix;
    assert_int_equal(ops->pack(device, &source, &matrix), STATUS_OK);
    return matrix;
}

static inline struct ops_matrix pack_floats(struct ops_device *device, const float *w,
                                            uint32_t rows, uint32_t cols)
{
    return pack_floats_on(backend, device, w, rows, cols);
}

/* y[o] = sum_k w[o][k] x[k] in double. */
static inline void product(const float *w, const float *x, uint32_t rows, uint32_t cols,
                           double *ret_y)
{
    for (uint32_t o = 0; o < rows; o++) {
        ret_y[o] = 0.0;
        for (uint32_t k = 0; k < cols; k++) {
            ret_y[o] += (double)w[(size_t)o * cols + k] * (double)x[k];
        }
    }
}

/* Rows of one call: the tokens of n_seqs sequences, one after the other. */
struct call {
    struct ops_rows rows;
    uint32_t tokens[4096], positions[4096], seq_of[4096];
    struct ops_seq seqs[80];
};

static inline void call_clear(struct call *call)
{
    call->rows = (struct ops_rows){.tokens = call->tokens,
                                   .positions = call->positions,
                                   .seq_of = call->seq_of,
                                   .seqs = call->seqs};
}

static inline void call_add(struct call *call, const uint32_t *pages, uint32_t slot,
                            uint32_t position, uint32_t n)
{
    struct ops_rows *rows = &call->rows;
    call->seqs[rows->n_seqs] = (struct ops_seq){
        .pages = pages, .slot = slot, .first_row = rows->n_rows, .n_rows = n, .position = position};
    for (uint32_t i = 0; i < n; i++) {
        call->tokens[rows->n_rows] = position + i;
        call->positions[rows->n_rows] = position + i;
        call->seq_of[rows->n_rows++] = rows->n_seqs;
    }
    rows->n_seqs++;
}

#endif
