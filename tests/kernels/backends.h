/* Two backends side by side, for tests and timings of operations: the same inputs in the memory of
 * both, poisoned outputs, matrices in every format, and a comparison bit by bit. Plain C, so that
 * it runs where nothing is installed. */
#ifndef BATON_TESTS_KERNELS_BACKENDS_H
#define BATON_TESTS_KERNELS_BACKENDS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/ops.h"
#include "kernels/registry.h"
#include "tests/kernels/random.h"

struct side {
    const struct ops *ops;
    struct ops_device *dev;
};

static struct side sides[2]; /* the reference, and the one that is tested */
static uint64_t seed;
static int n_failed, n_compared;
static size_t n_spare; /* words of an output that nobody is to write */
static char where[256];

static inline void stop(const char *what, const struct error *err)
{
    printf("%s: %s: %s\n", where, what, err ? err->text : "");
    exit(1);
}

static inline void wait_for(const struct side *s)
{
    struct error err;
    if (s->ops->wait(s->dev, &err)) {
        stop(s->ops->name, &err);
    }
}

static inline void *need(const struct side *s, void *memory)
{
    if (!memory) {
        stop(s->ops->name, &(struct error){"out of memory"});
    }
    return memory;
}

/* The same bytes in the memory of both. */
static inline void give(const void *data, size_t bytes, const void *ret[2])
{
    for (int i = 0; i < 2; i++) {
        ret[i] = need(&sides[i], sides[i].ops->upload(sides[i].dev, data, bytes));
    }
}

static inline void give_floats(size_t n, float scale, const float *ret[2])
{
    float *x = random_floats(&seed, n, scale);
    const void *given[2];
    give(x, n * sizeof(float), given);
    ret[0] = given[0];
    ret[1] = given[1];
    mem_free(x);
}

/* bfloat16 values, as every activation is once it is rounded. */
static inline void give_halves(size_t n, float scale, const float *ret[2])
{
    float *x = random_floats(&seed, n, scale);
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_round(x[i]);
    }
    const void *given[2];
    give(x, n * sizeof(float), given);
    ret[0] = given[0];
    ret[1] = given[1];
    mem_free(x);
}

static inline void poison(const struct side *s, void *memory, size_t n)
{
    void *x = mem_alloc(n * 4);
    memset(x, 0xff, n * 4);
    s->ops->write(s->dev, memory, x, n * 4);
    mem_free(x);
}

static inline void poisoned_rooms(size_t n, float *ret[2])
{
    for (int i = 0; i < 2; i++) {
        ret[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, n * sizeof(float)));
        poison(&sides[i], ret[i], n);
    }
}

/* n words of memory of one side. */
static inline uint32_t *fetch(const struct side *s, const void *memory, size_t n)
{
    uint32_t *x = mem_array(n, 4);
    s->ops->read(s->dev, x, memory, n * 4);
    wait_for(s);
    return x;
}

static inline void compare_words(const char *what, const uint32_t *want, const uint32_t *got,
                                 size_t n)
{
    size_t n_wrong = 0, first = 0, n_poison = 0;
    double worst = 0.0;
    for (size_t i = 0; i < n; i++) {
        n_poison += want[i] == 0xffffffffu;
        if (want[i] != 0xffffffffu && isnan(f32_from_bits(want[i]))) {
            stop(what, &(struct error){"the reference is not a number: these inputs test nothing"});
        }
        if (want[i] != got[i]) {
            double a = (double)f32_from_bits(want[i]), b = (double)f32_from_bits(got[i]);
            double off = fabs(a - b) / (fabs(a) > 1e-30 ? fabs(a) : 1e-30);
            worst = off > worst || isnan(off) ? off : worst;
            first = n_wrong++ ? first : i;
        }
    }
    n_compared++;
    if (n_poison != n_spare) {
        n_failed++;
        printf("UNWRITTEN %s, %s: %zu of %zu values\n", where, what, n_poison, n);
    }
    if (n_wrong) {
        n_failed++;
        printf("DIFFERS %s, %s: %zu of %zu values, worst by %.3g; first [%zu] is %.9g (%08x), "
               "should be %.9g (%08x)\n",
               where, what, n_wrong, n, worst, first, (double)f32_from_bits(got[first]), got[first],
               (double)f32_from_bits(want[first]), want[first]);
    }
}

static inline void compare(const char *what, float *const out[2], size_t n)
{
    uint32_t *want = fetch(&sides[0], out[0], n), *got = fetch(&sides[1], out[1], n);
    compare_words(what, want, got, n);
    mem_free(want);
    mem_free(got);
}

/* The CPU beside `device` with `forced`, OPERATION=VARIANT, in `ret_table`; false, and told, where
 * there is no such device. */
static inline bool choose_sides(const char *device, const char *forced, struct ops *ret_table)
{
    struct registry_choice cpu, choice;
    struct registry_wishes wishes;
    struct error err = {""};
    char *forced_item = (char *)(uintptr_t)forced, all[] = "all", *allowed = all;
    if (registry_find(device, &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return false;
    }
    const struct registry_query query = {.backend = choice.backend,
                                         .device = &choice.device,
                                         .wishes = &wishes,
                                         .layout = FORMATS_ENTRY_PACKED};
    if (registry_wishes_parse(&forced_item, 1, &allowed, 1, &wishes, &err) ||
        registry_find("cpu", &cpu, &err) || registry_select(&query, ret_table, NULL, NULL, &err)) {
        stop("registry", &err);
    }
    sides[0].ops = cpu.ops;
    sides[1].ops = ret_table;
    return true;
}

static inline uint32_t pick(const uint32_t *from, uint32_t n)
{
    return from[below(&seed, n)];
}

#define PICK(...)                         \
    pick((const uint32_t[]){__VA_ARGS__}, \
         (uint32_t)(sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t)))

/* --- matrices */

enum kind { K_F32, K_BF16, K_FP8, K_MXFP4, K_NVFP4, K_FP8_F32, N_KINDS };

static inline uint8_t e4m3_byte(void)
{
    uint8_t code = (uint8_t)next_random(&seed);
    return (code & 0x7f) == 0x7f ? code ^ 1 : code;
}

/* A matrix of about deviation `scale`, as a checkpoint has it: from its row and column on. */
static inline void pack_part(enum kind kind, uint32_t rows, uint32_t cols, float scale,
                             bool is_table, uint32_t row_first, uint32_t col_first,
                             struct ops_matrix ret[2])
{
    uint32_t all_rows = rows + row_first, all_cols = (cols + col_first + 1) / 2 * 2;
    struct ops_source s = {.rows = rows,
                           .cols = cols,
                           .row_first = row_first,
                           .col_first = col_first,
                           .block_rows = 1,
                           .block_cols = 1,
                           .global_scale = 1.0f,
                           .is_table = is_table};
    size_t n = (size_t)all_rows * all_cols;
    uint8_t *data = mem_alloc(n * 4 + 8), *scales = NULL;
    int exponent = 127 + (int)log2f(scale);
    s.data = data;
    if (kind == K_F32 || kind == K_BF16) {
        s.format = kind == K_F32 ? OPS_F32 : OPS_BF16;
        s.row_bytes = (size_t)all_cols * (kind == K_F32 ? 4 : 2);
        for (size_t i = 0; i < n; i++) {
            /* even, which is cheaper to draw than normal */
            float x = ((float)(next_random(&seed) >> 40) * 0x1p-23f - 1.0f) * 1.7f * scale;
            uint16_t half = bf16_encode(x);
            memcpy(data + i * (kind == K_F32 ? 4 : 2), kind == K_F32 ? (void *)&x : (void *)&half,
                   kind == K_F32 ? 4 : 2);
        }
    } else {
        bool fp8 = kind == K_FP8 || kind == K_FP8_F32;
        s.format = fp8 ? OPS_FP8_BLOCK : (kind == K_MXFP4 ? OPS_MXFP4 : OPS_NVFP4);
        s.row_bytes = fp8 ? all_cols : all_cols / 2;
        for (size_t i = 0; i < n; i += 8) { /* room is for four bytes an element */
            uint64_t bytes = next_random(&seed);
            memcpy(data + i, &bytes, 8);
        }
        for (size_t i = 0; fp8 && i < n; i++) {
            data[i] ^= (data[i] & 0x7f) == 0x7f; /* no NaN */
        }
        s.block_rows = fp8 ? 128 : 1;
        s.block_cols = fp8 ? 128 : (kind == K_MXFP4 ? 32 : 16);
        s.scale_cols = (all_cols + s.block_cols - 1) / s.block_cols;
        size_t n_scales = (size_t)s.scale_cols * ((all_rows + s.block_rows - 1) / s.block_rows);
        scales = mem_alloc(n_scales * 4);
        s.scale = scales;
        s.scale_format = kind == K_NVFP4     ? OPS_SCALE_E4M3
                         : kind == K_FP8_F32 ? OPS_SCALE_F32
                                             : OPS_SCALE_E8M0;
        for (size_t i = 0; i < n_scales; i++) {
            float x = scale * (0.01f + 0.001f * (float)below(&seed, 9));
            if (kind == K_NVFP4) {
                scales[i] = e4m3_byte() & 0x7f;
            } else if (kind == K_FP8_F32) {
                memcpy(scales + 4 * i, &x, 4);
            } else {
                scales[i] = (uint8_t)(exponent - (fp8 ? 7 : 2) + (int)below(&seed, 3));
            }
        }
        s.global_scale = kind == K_NVFP4 ? scale * 0.0123f : 1.0f;
    }
    for (int i = 0; i < 2; i++) {
        if (sides[i].ops->pack(sides[i].dev, &s, &ret[i])) {
            stop("pack", &(struct error){"failed"});
        }
    }
    mem_free(data);
    mem_free(scales);
}

/* Whole, or part of a larger one, on the groups of its scales or not. */
static inline uint32_t any_column(void)
{
    return below(&seed, 4) ? 0 : PICK(32, 128, 160);
}

static inline void pack_matrix(enum kind kind, uint32_t rows, uint32_t cols, float scale,
                               bool is_table, struct ops_matrix ret[2])
{
    uint32_t row_first = below(&seed, 2) ? below(&seed, 40) : 0, col_first = any_column();
    pack_part(kind, rows, cols, scale, is_table, row_first, col_first, ret);
}

static inline enum kind any_kind(void)
{
    return (enum kind)below(&seed, N_KINDS);
}

#endif
