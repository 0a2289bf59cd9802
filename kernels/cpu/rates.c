/* What this host can do at best, measured as the operations would do it: the same threads, the same
 * products. Best of several passes, since whatever else the host runs only ever slows one.
 */
#include <stdint.h>
#include <string.h>

#include "base/loop.h"
#include "base/mem.h"
#include "kernels/cpu/cpu.h"

enum {
    READ_BYTES = 256 << 20, /* well above a last-level cache */
    READ_PASSES = 5,
    PRODUCT_INPUTS = 1024,
    PRODUCT_ROWS = 64,
    PRODUCT_PASSES = 20,
    WAKES = 500,
    ITEMS_A_THREAD = 4
};

static double now_s(void)
{
    return (double)loop_now_ns() * 1e-9;
}

struct reading {
    const v8u *data;
    size_t n_each; /* vectors of an item */
    uint64_t *sums;
};

static void read_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    const struct reading *r = cookie;
    const v8u *at = r->data + item * r->n_each;
    v8u sum[4] = {{0}, {0}, {0}, {0}};
    for (size_t i = 0; i + 4 <= r->n_each; i += 4) {
        for (int k = 0; k < 4; k++) {
            sum[k] += at[i + (size_t)k];
        }
    }
    v8u all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    r->sums[item] = all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
}

static enum status measure_reads(struct ops_device *dev, double *ret_bytes_per_s, struct error *err)
{
    uint32_t n_items = dev->n_threads * ITEMS_A_THREAD;
    void *data = mem_try_aligned(64, READ_BYTES);
    if (!data) {
        return error_set(err, STATUS_EXHAUSTED, "no memory to measure reading with: %d MiB",
                         READ_BYTES >> 20);
    }
    memset(data, 1, READ_BYTES);
    struct reading r = {.data = data, .n_each = READ_BYTES / sizeof(v8u) / n_items};
    r.sums = mem_array(n_items, sizeof(*r.sums));
    double best = 0;
    for (int pass = 0; pass < READ_PASSES; pass++) {
        double begin = now_s();
        cpu_threads_run(dev->threads, n_items, UINT64_MAX, read_item, &r);
        double rate = (double)(n_items * r.n_each * sizeof(v8u)) / (now_s() - begin);
        best = rate > best ? rate : best;
    }
    mem_free(r.sums);
    mem_free(data);
    *ret_bytes_per_s = best;
    return STATUS_OK;
}

static double measure_products(struct ops_device *dev)
{
    uint32_t n = dev->n_threads * ITEMS_A_THREAD * CPU_BLOCK;
    struct ops_matrix matrix = {.rows = n, .cols = PRODUCT_INPUTS, .form = CPU_FORM_BF16};
    matrix.data = mem_array((size_t)n * PRODUCT_INPUTS, sizeof(uint16_t));
    float *x = mem_array((size_t)PRODUCT_ROWS * PRODUCT_INPUTS, sizeof(float));
    float *y = mem_array((size_t)PRODUCT_ROWS * n, sizeof(float));
    struct cpu_job job = {.matrix = &matrix,
                          .x = x,
                          .x_stride = PRODUCT_INPUTS,
                          .n_rows = PRODUCT_ROWS,
                          .y = y,
                          .y_stride = n};
    double best = 0;
    for (int pass = 0; pass < PRODUCT_PASSES; pass++) {
        double begin = now_s();
        cpu_gemm(dev->threads, &job, 1);
        double rate = (double)n * PRODUCT_INPUTS * PRODUCT_ROWS / (now_s() - begin);
        best = rate > best ? rate : best;
    }
    mem_free(matrix.data);
    mem_free(x);
    mem_free(y);
    return best;
}

static void no_work(void *cookie, uint32_t item, uint32_t thread_i)
{
}

static double measure_launch(struct ops_device *dev)
{
    double begin = now_s();
    for (int i = 0; i < WAKES; i++) {
        cpu_threads_run(dev->threads, dev->n_threads, UINT64_MAX, no_work, NULL);
    }
    return (now_s() - begin) / WAKES;
}

enum status cpu_rates(struct ops_device *dev, struct ops_rates *ret_rates, struct error *err)
{
    struct ops_rates rates;
    enum status status = measure_reads(dev, &rates.read_bytes_per_s, err);
    if (status) {
        return status;
    }
    rates.multiply_adds_per_s = measure_products(dev);
    rates.launch_s = measure_launch(dev);
    *ret_rates = rates;
    return STATUS_OK;
}
