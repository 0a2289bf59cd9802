/* Tuned products and hyper-connections of a GPU, held to the bounds that they state.
 *
 * Products: every form and shapes on and off the kernels' edges, against a sum in double of the
 * same elements; each row's bits in calls of 1 to 40 rows, whatever its place. Experts and mhc:
 * against the reference kernels of the same device, with the same demand on bits. Long calls by
 * products=tiles: the bits of the same call without. Outputs are poisoned.
 *
 * `scaled`: the products and experts by block-scaled products instead, on inputs that the quantiser
 * made and weights in their form; without mhc.
 *
 * test_tensor cuda:N [tiny|small|long|mhc|all [scaled]]. tiny: small products alone; long: long
 * calls of small ones; mhc: the hyper-connections alone. 77 without it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/cuda.h"
#include "kernels/registry.h"
#include "kernels/source.h"
#include "tests/kernels/random.h"
#include "tests/kernels/small.h"

enum { MOST_ROWS = 40, HIDDEN = 4096, N_EXPERTS = 9, N_USED = 3, WIDTH = 256, LONG_ROWS = 200 };
static uint64_t seed = 5;
static const struct ops *ops;
static struct ops_device *dev;
static int n_wrong;
static bool scaled;

static void must(enum status status, const struct error *err)
{
    if (status) {
        printf("%s\n", err->text);
        exit(1);
    }
}

static void *need(void *memory)
{
    must(memory ? STATUS_OK : STATUS_EXHAUSTED, &(struct error){"no memory"});
    return memory;
}

static void fetch(void *to, const void *from, size_t bytes)
{
    struct error err = {""};
    ops->read(dev, to, from, bytes);
    must(ops->wait(dev, &err), &err);
}

static float *upload_halves(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = bf16_round(x[i]);
    }
    return need(ops->upload(dev, x, n * sizeof(float)));
}

static float *poisoned_there(size_t n)
{
    float *bad = poisoned(n), *there = need(ops->upload(dev, bad, n * sizeof(float)));
    mem_free(bad);
    return there;
}

/* A matrix that is made: with its bytes for the host, and packed. */
struct matrix {
    struct ops_source source;
    struct ops_matrix packed;
    uint8_t *data, *scale;
};

static struct matrix make(enum ops_format format, uint32_t rows, uint32_t cols)
{
    struct matrix m = {.source = {.format = format,
                                  .rows = rows,
                                  .cols = cols,
                                  .block_rows = format == OPS_FP8_BLOCK ? 128 : 1,
                                  .block_cols = format == OPS_FP8_BLOCK ? 128
                                                : format == OPS_MXFP4   ? 32
                                                                        : 1,
                                  .global_scale = 1.0f}};
    struct ops_source *s = &m.source;
    s->row_bytes = format == OPS_BF16 ? 2 * (size_t)cols : (format == OPS_MXFP4 ? cols / 2 : cols);
    size_t bytes = rows * s->row_bytes;
    m.data = mem_alloc(bytes);
    for (size_t i = 0; i < bytes; i++) { /* any e4m3 but NaN, any e2m1; halves of some size */
        m.data[i] = (uint8_t)next_random(&seed);
        m.data[i] = format == OPS_FP8_BLOCK && (m.data[i] & 0x7f) == 0x7f ? 0x80 : m.data[i];
        m.data[i] = format == OPS_BF16 && i % 2 ? (m.data[i] & 0x80) | 0x3c : m.data[i];
    }
    if (format != OPS_BF16) {
        s->scale_format = OPS_SCALE_E8M0;
        s->scale_cols = (cols + s->block_cols - 1) / s->block_cols;
        size_t n = (size_t)((rows + s->block_rows - 1) / s->block_rows) * s->scale_cols;
        m.scale = mem_alloc(n);
        for (size_t i = 0; i < n; i++) {
            m.scale[i] = (uint8_t)(110 + below(&seed, 20));
        }
    }
    s->data = m.data;
    s->scale = m.scale;
    must(scaled ? cuda_pack_scaled(dev, s, &m.packed) : ops->pack(dev, s, &m.packed),
         &(struct error){"no memory to pack"});
    return m;
}

static void drop(struct matrix *m)
{
    mem_free(m->data);
    mem_free(m->scale);
}

static void wrong(const char *what, uint32_t row, uint32_t i, double got, double want, double bound)
{
    if (n_wrong++ < 20) {
        printf("%s: row %u, %u: %.9g, should be %.9g within %.3g\n", what, row, i, got, want,
               bound);
    }
}

/* --- products */

static void call(const struct matrix *m, const float *x, uint32_t n, float *y)
{
    dev->tensor = true;
    dev->scaled = scaled;
    cuda_gemm(dev, &m->packed, x, m->source.cols, n, y, m->source.rows, false);
    dev->tensor = dev->scaled = false;
}

static void check_product(enum ops_format format, uint32_t rows, uint32_t cols)
{
    static const uint32_t counts[] = {1, 3, 8, 9, 16, 17, 33};
    struct matrix m = make(format, rows, cols);
    size_t n = (size_t)MOST_ROWS * cols;
    float *x = random_floats(&seed, n, 1.0f), *there = upload_halves(x, n);
    float *y = poisoned_there((size_t)MOST_ROWS * rows),
          *z = poisoned_there((size_t)MOST_ROWS * rows);
    float *all = mem_array((size_t)MOST_ROWS * rows, 4),
          *some = mem_array((size_t)MOST_ROWS * rows, 4);
    double worst = 0;
    int before = n_wrong;
    if (scaled) {
        cuda_quant_rows(dev, there, MOST_ROWS, cols, there);
        fetch(x, there, n * sizeof(float));
    }
    call(&m, there, MOST_ROWS, y);
    fetch(all, y, (size_t)MOST_ROWS * rows * 4);
    uint32_t step = rows > 200 ? rows / 61 : 1;
    for (uint32_t r = 0; r < MOST_ROWS; r += 13) {
        for (uint32_t o = 0; o < rows; o += step) {
            double sum = 0, sizes = 0;
            for (uint32_t k = 0; k < cols; k++) {
                double p = (double)ops_source_element(&m.source, o, k) * (double)x[r * cols + k];
                sum += p;
                sizes += fabs(p);
            }
            double got = (double)all[r * rows + o], off = fabs(got - sum);
            worst = sizes > 0 && off / sizes > worst ? off / sizes : worst;
            if (!(off <= sizes * 0x1p-20)) { /* stated: 2^-18, with all of one sign */
                wrong("product", r, o, got, sum, sizes * 0x1p-20);
            }
        }
    }
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        uint32_t first = MOST_ROWS - counts[i];
        call(&m, there + (size_t)first * cols, counts[i], z);
        fetch(some, z, (size_t)counts[i] * rows * 4);
        for (size_t k = 0; k < (size_t)counts[i] * rows; k++) {
            if (f32_bits(some[k]) != f32_bits(all[(size_t)first * rows + k])) {
                wrong("bits", counts[i], (uint32_t)k, (double)some[k],
                      (double)all[(size_t)first * rows + k], 0);
            }
        }
    }
    printf("product %u of %u x %u: worst 2^%.1f of the sizes, %d wrong\n", format, rows, cols,
           worst > 0 ? log2(worst) : -99.0, n_wrong - before);
    mem_free(x);
    mem_free(all);
    mem_free(some);
    drop(&m);
}

/* --- operations against the reference of the same device */

/* MOST_ROWS rows, the first `width` of every `stride` values. */
static void compare(const char *what, size_t n_rows, const float *got, const float *want,
                    size_t stride, size_t width, double of_value, double of_row)
{
    int before = n_wrong;
    double worst = 0;
    for (size_t r = 0; r < n_rows; r++) {
        double most = 0;
        for (size_t i = 0; i < width; i++) {
            most = fmax(most, fabs((double)want[r * stride + i]));
        }
        for (size_t i = 0; i < width; i++) {
            double a = (double)got[r * stride + i], b = (double)want[r * stride + i];
            double bound = of_value * fabs(b) + of_row * most;
            worst = fmax(worst, fabs(a - b) / bound);
            if (!(fabs(a - b) <= bound)) {
                wrong(what, (uint32_t)r, (uint32_t)i, a, b, bound);
            }
        }
    }
    printf("%s: %zu values, worst %.3f of the bound, %d wrong\n", what, n_rows * width, worst,
           n_wrong - before);
}

static void same_bits(const char *what, const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (f32_bits(got[i]) != f32_bits(want[i])) {
            wrong(what, 0, (uint32_t)i, (double)got[i], (double)want[i], 0);
        }
    }
}

static float *vector_there(size_t n, float scale)
{
    float *x = random_floats(&seed, n, scale),
          *there = need(ops->upload(dev, x, n * sizeof(float)));
    mem_free(x);
    return there;
}

enum { S = OPS_HC * HIDDEN, MIX = OPS_HC + OPS_HC * OPS_HC };

static void make_hc(uint32_t hidden, struct ops_hc *ret)
{
    struct ops_source fn = {.format = OPS_F32,
                            .rows = OPS_HC_OUT,
                            .cols = OPS_HC * hidden,
                            .row_bytes = OPS_HC * hidden * sizeof(float),
                            .block_rows = 1,
                            .block_cols = 1,
                            .global_scale = 1.0f};
    float *f = random_floats(&seed, (size_t)OPS_HC_OUT * OPS_HC * hidden, 0.01f);
    fn.data = f;
    must(ops->pack(dev, &fn, &ret->fn), &(struct error){"no memory"});
    ret->base = vector_there(OPS_HC_OUT, 0.5f);
    ret->scale = vector_there(3, 0.5f);
    mem_free(f);
}

/* From one sublayer to the next, against the reference's two steps; then every `step`th row alone.
 */
static void check_turn(uint32_t hidden, uint32_t n_rows, uint32_t step)
{
    const size_t n_x = (size_t)n_rows * hidden, n_mix = (size_t)n_rows * OPS_HC_OUT,
                 a_row = (size_t)OPS_HC * hidden, n_f = n_rows * a_row;
    const uint32_t usual = dev->d.hidden;
    struct ops_hc hc;
    dev->d.hidden = hidden;
    make_hc(hidden, &hc);
    const float *norm = vector_there(hidden, 0.3f);
    float *y = random_floats(&seed, n_x, 1.0f), *y_there = upload_halves(y, n_x);
    float *before = random_floats(&seed, n_mix, 0.5f), *streams = random_floats(&seed, n_f, 2.0f);
    float *x[2], *mix[2], *f[2], *got_x[2], *got_mix[2], *got_f[2];
    struct ops_rows rows = {.n_rows = n_rows}, alone = {.n_rows = 1};
    for (int i = 0; i < 2; i++) {
        x[i] = poisoned_there(n_x);
        mix[i] = need(ops->upload(dev, before, n_mix * sizeof(float)));
        f[i] = upload_halves(streams, n_f);
        got_x[i] = mem_array(n_x, 4);
        got_mix[i] = mem_array(n_mix, 4);
        got_f[i] = mem_array(n_f, 4);
        if (i) {
            cuda_mhc_turn(dev, &rows, y_there, &hc, norm, f[i], x[i], mix[i]);
        } else {
            cuda_mhc_post(dev, &rows, y_there, mix[i], f[i]);
            cuda_mhc_pre(dev, &rows, &hc, norm, f[i], x[i], mix[i]);
        }
        fetch(got_x[i], x[i], n_x * sizeof(float));
        fetch(got_mix[i], mix[i], n_mix * sizeof(float));
        fetch(got_f[i], f[i], n_f * sizeof(float));
    }
    same_bits("mhc_turn, streams", got_f[1], got_f[0], n_f);
    compare("mhc_turn, mix", n_rows, got_mix[1], got_mix[0], OPS_HC_OUT, MIX, 0x1p-19, 0x1p-19);
    compare("mhc_turn, x", n_rows, got_x[1], got_x[0], hidden, hidden, 0x1p-6, 0x1p-16);
    for (uint32_t r = 0; r < n_rows; r += step) {
        ops->write(dev, f[0], streams + r * a_row, a_row * sizeof(float));
        ops->write(dev, mix[0], before + (size_t)r * OPS_HC_OUT, OPS_HC_OUT * sizeof(float));
        cuda_mhc_turn(dev, &alone, y_there + (size_t)r * hidden, &hc, norm, f[0], x[0], mix[0]);
        fetch(got_x[0], x[0], hidden * sizeof(float));
        fetch(got_mix[0], mix[0], MIX * sizeof(float));
        same_bits("mhc_turn alone", got_x[0], got_x[1] + (size_t)r * hidden, hidden);
        same_bits("mhc_turn alone, mix", got_mix[0], got_mix[1] + (size_t)r * OPS_HC_OUT, MIX);
    }
    dev->d.hidden = usual;
    for (int i = 0; i < 2; i++) {
        mem_free(got_x[i]);
        mem_free(got_mix[i]);
        mem_free(got_f[i]);
    }
    mem_free(before);
    mem_free(streams);
    mem_free(y);
}

static void check_mhc(void)
{
    struct ops_hc hc;
    make_hc(HIDDEN, &hc);
    const float *norm = vector_there(HIDDEN, 0.3f);
    float *streams = random_floats(&seed, (size_t)MOST_ROWS * S, 2.0f);
    float *there = upload_halves(streams, (size_t)MOST_ROWS * S);
    enum { X = MOST_ROWS * HIDDEN, M = MOST_ROWS * OPS_HC_OUT };
    float *x[2], *mix[2], *got_x[2], *got_mix[2];
    struct ops_rows rows = {.n_rows = MOST_ROWS};
    for (int i = 0; i < 2; i++) {
        x[i] = poisoned_there(X);
        mix[i] = poisoned_there(M);
        got_x[i] = mem_array(X, 4);
        got_mix[i] = mem_array(M, 4);
        (i ? cuda_mhc_pre_split : cuda_mhc_pre)(dev, &rows, &hc, norm, there, x[i], mix[i]);
        fetch(got_x[i], x[i], X * sizeof(float));
        fetch(got_mix[i], mix[i], M * sizeof(float));
    }
    compare("mhc_pre, mix", MOST_ROWS, got_mix[1], got_mix[0], OPS_HC_OUT, MIX, 0x1p-19, 0x1p-19);
    /* Two roundings to bf16, of the sum and of what is normed: each may go to the next. */
    compare("mhc_pre, x", MOST_ROWS, got_x[1], got_x[0], HIDDEN, HIDDEN, 0x1p-6, 0x1p-16);
    rows.n_rows = 1;
    for (uint32_t r = 0; r < MOST_ROWS; r += 7) {
        cuda_mhc_pre_split(dev, &rows, &hc, norm, there + (size_t)r * S, x[0], mix[0]);
        fetch(got_x[0], x[0], HIDDEN * sizeof(float));
        same_bits("mhc_pre alone", got_x[0], got_x[1] + (size_t)r * HIDDEN, HIDDEN);
    }
    for (int i = 0; i < 2; i++) {
        mem_free(got_x[i]);
        mem_free(got_mix[i]);
    }
    mem_free(streams);
    /* In one launch and in chunks, one and several a block; channels that the parts share unevenly,
     * and more than the first instance takes. */
    check_turn(HIDDEN, MOST_ROWS, 7);
    check_turn(HIDDEN, 7, 3);
    check_turn(HIDDEN, LONG_ROWS, 66);
    check_turn(5000, 19, 6);
    check_turn(100, 9, 4);
}

static void make_experts(struct ops_expert *ret_experts)
{
    for (int e = 0; e <= N_EXPERTS; e++) {
        enum ops_format format = e < N_EXPERTS ? OPS_MXFP4 : OPS_FP8_BLOCK;
        struct matrix m[3] = {make(format, WIDTH, HIDDEN), make(format, WIDTH, HIDDEN),
                              make(format, HIDDEN, WIDTH)};
        ret_experts[e] = (struct ops_expert){m[0].packed, m[1].packed, m[2].packed};
        for (int k = 0; k < 3; k++) {
            (&ret_experts[e].w1)[k].quant_input = true;
            drop(&m[k]);
        }
    }
}

static void check_experts(void)
{
    void (*tuned)(struct ops_device *, const struct ops_rows *, const struct ops_layer *,
                  const float *, const uint32_t *, const float *, float *) =
        scaled ? cuda_experts_tensor_scaled : cuda_experts_tensor;
    static struct ops_expert experts[N_EXPERTS + 1];
    make_experts(experts);
    struct ops_layer layer = {.experts = experts, .shared = experts[N_EXPERTS]};
    enum { Y = MOST_ROWS * HIDDEN };
    float *x = random_floats(&seed, Y, 1e-3f), *there = upload_halves(x, Y);
    uint32_t ids[MOST_ROWS * N_USED];
    float weights[MOST_ROWS * N_USED];
    for (uint32_t r = 0; r < MOST_ROWS; r++) {
        uint32_t first = below(&seed, N_EXPERTS);
        for (uint32_t k = 0; k < N_USED; k++) {
            ids[r * N_USED + k] = (first + k * 2) % N_EXPERTS;
            weights[r * N_USED + k] = 0.2f + 0.1f * (float)k;
        }
    }
    uint32_t *ids_there = need(ops->upload(dev, ids, sizeof(ids)));
    float *weights_there = need(ops->upload(dev, weights, sizeof(weights)));
    float *y = poisoned_there(Y), *got[2];
    struct ops_rows rows = {.n_rows = MOST_ROWS};
    for (int i = 0; i < 2; i++) {
        got[i] = mem_array(Y, 4);
        (i ? tuned : cuda_experts)(dev, &rows, &layer, there, ids_there, weights_there, y);
        fetch(got[i], y, Y * sizeof(float));
    }
    /* An activation between the products may round to the next e4m3: 2^-4 of one of many. */
    compare("experts", MOST_ROWS, got[1], got[0], HIDDEN, HIDDEN, 0.003, 0.003);
    rows.n_rows = 1;
    for (uint32_t r = 0; r < MOST_ROWS; r += 7) {
        tuned(dev, &rows, &layer, there + (size_t)r * HIDDEN, ids_there + r * N_USED,
              weights_there + r * N_USED, y);
        fetch(got[0], y, HIDDEN * sizeof(float));
        same_bits("experts alone", got[0], got[1] + (size_t)r * HIDDEN, HIDDEN);
    }
    mem_free(got[0]);
    mem_free(got[1]);
    mem_free(x);
}

/* --- long calls: the same bits with tiles.cu and without */

static void *image; /* the device's room for it, which it does without while that is NULL */

static void long_call(const struct matrix *m, const float *x, const uint32_t *x_row, uint32_t n,
                      bool tiles, float *y)
{
    const uint32_t n_sms = dev->n_sms;
    dev->tensor = true;
    dev->image = tiles ? image : NULL;
    dev->n_sms = tiles ? 1 : n_sms; /* any tile is enough */
    cuda_gemm_some(dev, &m->packed, x, m->source.cols, x_row, n, y, m->source.rows, false);
    dev->n_sms = n_sms;
    dev->image = NULL;
    dev->tensor = false;
}

/* Two tiles of outputs by two of rows: tiles.cu takes the call of a device that four blocks fill,
 * and leaves that of a larger one. */
static void check_long_choice(void)
{
    enum { OUTS = 256, INS = 128, ROWS = 65 };
    struct matrix m = make(OPS_BF16, OUTS, INS);
    float *x = random_floats(&seed, ROWS * INS, 1.0f), *there = upload_halves(x, ROWS * INS);
    float *y = poisoned_there(ROWS * OUTS);
    const uint32_t n_sms = dev->n_sms;
    dev->image = image;
    for (uint32_t n = 4; n <= 5; n++) {
        dev->n_sms = n;
        bool taken = cuda_tiles_gemm(dev, &m.packed, there, INS, NULL, ROWS, y, OUTS, false);
        if (taken != (n == 4)) {
            wrong("tiles: choice", n, 0, taken, n == 4, 0);
        }
    }
    dev->n_sms = n_sms;
    dev->image = NULL;
    mem_free(x);
    drop(&m);
}

static void check_long_product(enum ops_format format, uint32_t rows, uint32_t cols)
{
    static const uint32_t counts[] = {64, 65, 127, LONG_ROWS};
    struct matrix m = make(format, rows, cols);
    size_t n_x = (size_t)LONG_ROWS * cols, n_y = (size_t)(LONG_ROWS + 1) * rows;
    float *x = random_floats(&seed, n_x, 1.0f), *there = upload_halves(x, n_x);
    float *want = mem_array(n_y, 4), *got = mem_array(n_y, 4);
    uint32_t picked[LONG_ROWS];
    int before = n_wrong;
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        uint32_t n = counts[i];
        for (uint32_t r = 0; r < n; r++) {
            picked[r] = below(&seed, LONG_ROWS);
        }
        const uint32_t *x_row = i % 2 ? need(ops->upload(dev, picked, n * 4)) : NULL;
        float *y = poisoned_there(n_y), *z = poisoned_there(n_y);
        long_call(&m, there, x_row, n, false, y);
        long_call(&m, there, x_row, n, true, z);
        fetch(want, y, n_y * 4);
        fetch(got, z, n_y * 4);
        for (size_t k = 0; k < n_y; k++) { /* what lies behind the rows stays as it was */
            if (f32_bits(got[k]) != f32_bits(want[k])) {
                wrong("long", (uint32_t)(k / rows), (uint32_t)(k % rows), (double)got[k],
                      (double)want[k], 0);
            }
        }
    }
    printf("long calls, product %u of %u x %u: %d wrong\n", format, rows, cols, n_wrong - before);
    mem_free(x);
    mem_free(want);
    mem_free(got);
    drop(&m);
}

/* Products of a launch or two, of both forms, some of inputs that the launch quantises: each has
 * the bits of its own call, on inputs quantised before. */
static void check_joined(void)
{
    static const struct {
        uint32_t rows, cols;
        enum ops_format format;
        bool quant;
    } shapes[] = {{64, 1024, OPS_FP8_BLOCK, true},  {33, 1024, OPS_BF16, false},
                  {200, 128, OPS_FP8_BLOCK, true},  {8, 4096, OPS_BF16, false},
                  {96, 4096, OPS_FP8_BLOCK, false}, {40, 192, OPS_FP8_BLOCK, true}};
    enum { N = sizeof(shapes) / sizeof(shapes[0]), MOST = 16 };
    struct matrix m[N];
    const float *x[N];
    int before = n_wrong;
    for (int i = 0; i < N; i++) {
        size_t n = (size_t)MOST * shapes[i].cols;
        float *values = random_floats(&seed, n, 1.0f);
        m[i] = make(shapes[i].format, shapes[i].rows, shapes[i].cols);
        x[i] = i == 1 ? x[0] : upload_halves(values, n);
        mem_free(values);
    }
    for (uint32_t rows = 1; rows <= MOST; rows = rows == 8 ? 9 : rows == 9 ? 16 : rows + 7) {
        struct cuda_gemm_item items[N];
        uint64_t launches = 0;
        for (int i = 0; i < N; i++) {
            items[i] = (struct cuda_gemm_item){
                &m[i].packed,   x[i],
                shapes[i].cols, poisoned_there((size_t)rows * shapes[i].rows),
                shapes[i].rows, false,
                shapes[i].quant};
        }
        dev->tensor = true;
        launches = cuda_launches(dev);
        cuda_gemms(dev, items, N, rows);
        launches = cuda_launches(dev) - launches;
        for (int i = 0; i < N; i++) {
            size_t n = (size_t)rows * shapes[i].rows;
            float *y = poisoned_there(n), *got = mem_array(n, 4), *want = mem_array(n, 4);
            const float *inputs = x[i];
            if (shapes[i].quant) {
                cuda_quant_rows(dev, x[i], rows, shapes[i].cols, dev->quant);
                inputs = dev->quant;
            }
            cuda_gemm(dev, items[i].matrix, inputs, shapes[i].cols, rows, y, shapes[i].rows, false);
            fetch(want, y, n * 4);
            fetch(got, items[i].y, n * 4);
            same_bits("joined", got, want, n);
            mem_free(got);
            mem_free(want);
        }
        dev->tensor = false;
        if (launches > 2) {
            wrong("joined: launches", rows, 0, (double)launches, 2, 0);
        }
    }
    printf("joined products: %d wrong\n", n_wrong - before);
    for (int i = 0; i < N; i++) {
        drop(&m[i]);
    }
}

/* Experts of no rows, of a few, of more than a tile. */
static void check_long_experts(void)
{
    static struct ops_expert experts[N_EXPERTS + 1];
    make_experts(experts);
    struct ops_layer layer = {.experts = experts, .shared = experts[N_EXPERTS]};
    enum { Y = LONG_ROWS * HIDDEN };
    float *x = random_floats(&seed, Y, 1e-3f), *there = upload_halves(x, Y);
    static uint32_t ids[LONG_ROWS * N_USED];
    static float weights[LONG_ROWS * N_USED];
    for (uint32_t r = 0; r < LONG_ROWS; r++) {
        const uint32_t of_row[N_USED] = {1, r < 30 ? 3 : 4, r % 2 ? 5 : 7 + r % 3 / 2};
        for (uint32_t k = 0; k < N_USED; k++) {
            ids[r * N_USED + k] = of_row[(k + r) % N_USED];
            weights[r * N_USED + k] = 0.2f + 0.1f * (float)k;
        }
    }
    uint32_t *ids_there = need(ops->upload(dev, ids, sizeof(ids)));
    float *weights_there = need(ops->upload(dev, weights, sizeof(weights)));
    float *got[2];
    int before = n_wrong;
    struct ops_rows rows = {.n_rows = LONG_ROWS};
    for (int i = 0; i < 2; i++) {
        float *y = poisoned_there(Y);
        got[i] = mem_array(Y, 4);
        dev->image = i ? image : NULL;
        cuda_experts_tensor(dev, &rows, &layer, there, ids_there, weights_there, y);
        dev->image = NULL;
        fetch(got[i], y, Y * sizeof(float));
    }
    same_bits("experts of a long call", got[1], got[0], Y);
    printf("experts of a long call: %d wrong\n", n_wrong - before);
    mem_free(got[0]);
    mem_free(got[1]);
    mem_free(x);
}

int main(int argc, char **argv)
{
    struct registry_choice choice;
    struct error err = {""};
    struct ops_dims dims = small_dims(HIDDEN);
    dims.n_experts = dims.expert_end = N_EXPERTS;
    dims.n_experts_used = N_USED;
    dims.expert_width = WIDTH;
    dims.has_shared = true;
    const struct ops_limits limits = {
        .n_rows = LONG_ROWS, .n_tokens = 16, .early_launches = early_launches()};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (registry_find(argc > 1 ? argv[1] : "cuda:0", &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    const bool tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    const bool small = argc > 2 && strcmp(argv[2], "small") == 0; /* for tools that slow it down */
    const bool mhc = argc > 2 && strcmp(argv[2], "mhc") == 0;
    const bool is_long = argc > 2 && strcmp(argv[2], "long") == 0;
    const uint32_t most = mhc ? 0 : tiny ? 30000 : is_long ? 90000 : (small ? 300000 : UINT32_MAX);
    scaled = argc > 3 && strcmp(argv[3], "scaled") == 0;
    ops = choice.ops;
    dims.o_groups = 1; /* room for the widest inputs below */
    dims.o_lora = 16384;
    must(cuda_open_tiles(&dims, &limits, &dev, &err), &err);
    image = dev->image;
    dev->image = NULL;
    static const struct {
        enum ops_format format;
        uint32_t rows, cols;
    } shapes[] = {
        {OPS_BF16, 64, 4096},        {OPS_BF16, 33, 8},          {OPS_BF16, 1, 72},
        {OPS_BF16, 256, 4096},       {OPS_BF16, 1500, 520},      {OPS_BF16, 2048, 4096},
        {OPS_FP8_BLOCK, 1024, 4096}, {OPS_FP8_BLOCK, 512, 4096}, {OPS_FP8_BLOCK, 4096, 1024},
        {OPS_FP8_BLOCK, 100, 136},   {OPS_FP8_BLOCK, 31, 40},    {OPS_FP8_BLOCK, 4096, 8192},
        {OPS_MXFP4, 2048, 4096},     {OPS_MXFP4, 4096, 2048},    {OPS_MXFP4, 77, 96},
        {OPS_MXFP4, 32, 32},         {OPS_MXFP4, 200, 1056},     {OPS_MXFP4, 33, 128},
        {OPS_MXFP4, 72, 1408},       {OPS_FP8_BLOCK, 72, 1472},  {OPS_MXFP4, 33, 768},
        {OPS_FP8_BLOCK, 33, 832},    {OPS_MXFP4, 256, 4096},     {OPS_MXFP4, 4096, 256},
        {OPS_FP8_BLOCK, 256, 4096},  {OPS_FP8_BLOCK, 4096, 256}, {OPS_FP8_BLOCK, 40, 2048},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if ((scaled && shapes[i].format == OPS_BF16) || shapes[i].rows * shapes[i].cols >= most) {
            continue;
        }
        if (!is_long) {
            check_product(shapes[i].format, shapes[i].rows, shapes[i].cols);
        }
        if (!scaled && !tiny) {
            check_long_product(shapes[i].format, shapes[i].rows, shapes[i].cols);
        }
    }
    if (is_long) {
        check_joined();
    }
    if (!tiny && !is_long && !mhc) {
        check_experts();
    }
    if (!tiny && !is_long && !scaled) {
        check_mhc();
    }
    if (!tiny && !scaled && !mhc) {
        check_long_choice();
    }
    if (!tiny && !is_long && !scaled && !mhc) {
        check_long_experts();
    }
    dev->image = image;
    ops->close(dev);
    printf("%d wrong\n", n_wrong);
    return n_wrong ? 1 : 0;
}
