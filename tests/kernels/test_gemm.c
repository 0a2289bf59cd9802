/* Products: against double, in every format, in awkward sizes; the same bits for a row whoever
 * shares the call and whatever the instruction set; and the pool of threads under them. */
#include "util.h"

#include <time.h>

/* A random matrix in `format`; values in ret_w as doubles. */
struct sample {
    struct ops_source source;
    uint8_t *data, *scale;
};

static struct sample make_sample(uint64_t *seed, enum ops_format format, uint32_t rows,
                                 uint32_t cols)
{
    struct sample s = {.source = {.format = format,
                                  .rows = rows,
                                  .cols = cols,
                                  .block_rows = 1,
                                  .block_cols = 1,
                                  .global_scale = 1.0f}};
    struct ops_source *o = &s.source;
    static const size_t bits[] = {32, 16, 8, 4, 4};
    o->row_bytes = cols * bits[format] / 8;
    s.data = mem_array(rows, o->row_bytes);
    for (size_t i = 0; i < rows * o->row_bytes; i++) {
        s.data[i] = (uint8_t)next_random(seed);
        if (format == OPS_FP8_BLOCK && (s.data[i] & 0x7f) == 0x7f) {
            s.data[i] = 0x31;
        }
    }
    for (size_t i = 0; format <= OPS_BF16 && i < (size_t)rows * cols; i++) {
        float x = normal(seed);
        uint16_t h = bf16_encode(x);
        memcpy(s.data + i * (format == OPS_F32 ? 4 : 2),
               format == OPS_F32 ? (const void *)&x : (const void *)&h, format == OPS_F32 ? 4 : 2);
    }
    if (format > OPS_BF16) {
        o->block_rows = format == OPS_FP8_BLOCK ? 128 : 1;
        o->block_cols = format == OPS_FP8_BLOCK ? 128 : format == OPS_MXFP4 ? 32 : 16;
        o->scale_cols = (cols + o->block_cols - 1) / o->block_cols;
        o->scale_format = format == OPS_NVFP4 ? OPS_SCALE_E4M3 : OPS_SCALE_E8M0;
        o->global_scale = format == OPS_NVFP4 ? 0.0123f : 1.0f;
        size_t n = (size_t)((rows + o->block_rows - 1) / o->block_rows) * o->scale_cols;
        s.scale = mem_array(n, 1);
        for (size_t i = 0; i < n; i++) {
            s.scale[i] =
                (uint8_t)(format == OPS_NVFP4 ? 0x20 + below(seed, 40) : 116 + below(seed, 12));
        }
    }
    o->data = s.data;
    o->scale = s.scale;
    return s;
}

static void free_sample(struct sample *s)
{
    mem_free(s->data);
    mem_free(s->scale);
}

/* An element by the format's definition, written apart from the code under test. */
static double element(const struct ops_source *s, uint32_t r, uint32_t c)
{
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const uint8_t *row = (const uint8_t *)s->data + r * s->row_bytes;
    const uint8_t *scale = s->scale;
    size_t at = (size_t)(r / s->block_rows) * s->scale_cols + c / s->block_cols;
    if (s->format == OPS_F32) {
        return (double)((const float *)(const void *)row)[c];
    }
    if (s->format == OPS_BF16) {
        return (double)f32_from_bits((uint32_t)(row[2 * c] | row[2 * c + 1] << 8) << 16);
    }
    if (s->format == OPS_FP8_BLOCK) {
        uint8_t b = row[c];
        int e = b >> 3 & 15;
        double m = e ? ldexp(8 + (b & 7), e - 10) : ldexp(b & 7, -9);
        return (b & 128 ? -m : m) * ldexp(1.0, scale[at] - 127);
    }
    uint8_t n = c & 1 ? row[c / 2] >> 4 : row[c / 2] & 15;
    double x = n & 8 ? -e2m1[n & 7] : e2m1[n & 7];
    if (s->format == OPS_MXFP4) {
        return x * ldexp(1.0, scale[at] - 127);
    }
    return x * ldexp(8 + (scale[at] & 7), (scale[at] >> 3) - 10) * (double)s->global_scale;
}

static void check_product(struct ops_device *dev, struct cpu_threads *threads, uint64_t *seed,
                          enum ops_format format, uint32_t rows, uint32_t cols, uint32_t n)
{
    struct sample s = make_sample(seed, format, rows, cols);
    struct ops_matrix m;
    assert_int_equal(ops_cpu.pack(dev, &s.source, &m), STATUS_OK);
    assert_int_equal(m.quant_input, format > OPS_BF16);
    size_t x_stride = cols + below(seed, 5), y_stride = rows + 3;
    float *x = random_floats(seed, n * x_stride, 1.0f), *y = poisoned(n * y_stride),
          *alone = poisoned(rows), *generic = poisoned(n * y_stride);
    struct cpu_job job = {
        .matrix = &m, .x = x, .x_stride = x_stride, .n_rows = n, .y = y, .y_stride = y_stride};
    cpu_gemm(threads, &job, 1);
    for (uint32_t r = 0; r < n; r++) {
        for (uint32_t o = 0; o < rows; o++) {
            double want = 0.0, size = 0.0;
            for (uint32_t k = 0; k < cols; k++) {
                double term = element(&s.source, o, k) * (double)x[r * x_stride + k];
                want += term;
                size += fabs(term);
            }
            assert_close(y[r * y_stride + o], want, size * 2e-6 + 1e-30);
        }
        for (uint32_t o = rows; o < y_stride; o++) {
            assert_int_equal(f32_bits(y[r * y_stride + o]), 0xffffffff);
        }
        struct cpu_job one = job;
        one.x = x + r * x_stride;
        one.n_rows = 1;
        one.y = alone;
        cpu_gemm(NULL, &one, 1);
        assert_memory_equal(alone, y + r * y_stride, rows * sizeof(float));
    }
    job.y = generic;
    cpu_gemm_force_generic(true);
    cpu_gemm(threads, &job, 1);
    cpu_gemm_force_generic(false);
    assert_memory_equal(generic, y, n * y_stride * sizeof(float));
    mem_free(x);
    mem_free(y);
    mem_free(alone);
    mem_free(generic);
    free_sample(&s);
}

static void test_products(void **state)
{
    struct ops_dims d = small_dims(true);
    struct ops_device *dev = open_device(&d, 4, 64, 16);
    struct cpu_threads *threads = cpu_threads_create(3);
    uint64_t seed = 11;
    for (int round = 0; round < 60; round++) {
        enum ops_format format = (enum ops_format)(round % 5);
        uint32_t cols = 1 + below(&seed, 300);
        if (format == OPS_MXFP4 || format == OPS_NVFP4) {
            cols = (cols + 31) / 32 * 32;
        }
        check_product(dev, threads, &seed, format, 1 + below(&seed, 140), cols,
                      1 + below(&seed, round % 10 == 0 ? 70 : 9));
    }
    cpu_threads_free(threads);
    ops_cpu.close(dev);
}

/* A part of a matrix is packed as that part: rows and columns from anywhere, across scales. */
static void test_parts(void **state)
{
    struct ops_dims d = small_dims(true);
    struct ops_device *dev = open_device(&d, 4, 64, 16);
    uint64_t seed = 12;
    struct sample s = make_sample(&seed, OPS_FP8_BLOCK, 300, 280);
    struct ops_source part = s.source;
    part.row_first = 77;
    part.col_first = 101;
    part.rows = 50;
    part.cols = 90;
    part.is_table = true;
    struct ops_matrix m;
    assert_int_equal(ops_cpu.pack(dev, &part, &m), STATUS_OK);
    float row[90];
    for (uint32_t r = 0; r < part.rows; r++) {
        cpu_table_row(&m, r, row);
        for (uint32_t c = 0; c < part.cols; c++) {
            assert_true((double)row[c] == element(&s.source, 77 + r, 101 + c));
        }
    }
    free_sample(&s);
    ops_cpu.close(dev);
}

struct count {
    _Atomic uint32_t hits[5000];
};

static void count_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    struct count *count = cookie;
    count->hits[item]++;
}

/* Every item once, whether threads are awake or asleep. */
static void test_threads(void **state)
{
    struct cpu_threads *threads = cpu_threads_create(4);
    static struct count count;
    uint64_t seed = 13;
    for (uint32_t round = 1; round <= 300; round++) {
        uint32_t n = 1 + below(&seed, round % 7 ? 12 : 5000);
        memset(&count, 0, sizeof(count));
        cpu_threads_run(threads, n, UINT64_MAX, count_item, &count);
        for (uint32_t i = 0; i < n; i++) {
            assert_int_equal(count.hits[i], 1);
        }
        if (round % 100 == 0) {
            nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        }
    }
    cpu_threads_free(threads);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products),
                                       cmocka_unit_test(test_parts),
                                       cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
