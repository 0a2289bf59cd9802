/* What a step profile asks of a GPU: marks in its stream, launches, and what it can do at best.
 *
 * Best of several passes, since whatever else the card runs only ever slows one. The launch floor
 * is that of kernels launched one by one, as the operations are.
 */
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/cuda.h"

enum { PASSES = 5, EMPTY_LAUNCHES = 500 };
static const size_t READ_BYTES = (size_t)2 << 30, LEAST_READ_BYTES = (size_t)256 << 20;

/* Events and memory belong to the device that is the thread's, which of a group is any. */
static void use(struct ops_device *dev)
{
    if (cudaSetDevice((int)dev->limits.device_i) != cudaSuccess) {
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: choosing the device", dev->limits.device_i);
    }
}

void cuda_mark(struct ops_device *dev, uint32_t mark)
{
    use(dev);
    if (!dev->marks) {
        dev->marks = mem_array(OPS_MAX_MARKS, sizeof(*dev->marks));
    }
    if (!dev->marks[mark] && cudaEventCreate(&dev->marks[mark]) != cudaSuccess) {
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: no event for a mark", dev->limits.device_i);
        return;
    }
    if (cudaEventRecord(dev->marks[mark], cuda_stream_for(dev)) != cudaSuccess) {
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: a mark", dev->limits.device_i);
    }
}

double cuda_between_s(struct ops_device *dev, uint32_t first, uint32_t last)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, dev->marks[first], dev->marks[last]) != cudaSuccess) {
        (void)cudaGetLastError();
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: the time between two marks",
                    dev->limits.device_i);
    }
    return ms * 1e-3;
}

void cuda_marks_free(struct ops_device *dev)
{
    for (uint32_t i = 0; dev->marks && i < OPS_MAX_MARKS; i++) {
        if (dev->marks[i]) {
            (void)cudaEventDestroy(dev->marks[i]);
        }
    }
    mem_free(dev->marks);
    dev->marks = NULL;
}

uint64_t cuda_launches(const struct ops_device *dev)
{
    return dev->n_launches;
}

enum what { NOTHING, READS, PRODUCTS };

/* The shortest of the passes; the work of one is in ret_work. */
static double best_s(struct ops_device *dev, enum what what, void *memory, size_t bytes,
                     double *ret_work)
{
    double best = 0;
    for (int pass = 0; pass <= PASSES && !dev->failed; pass++) { /* the first warms up */
        cuda_mark(dev, 0);
        if (what == NOTHING) {
            for (int i = 0; i < EMPTY_LAUNCHES; i++) {
                cuda_run_nothing(dev);
            }
            *ret_work = EMPTY_LAUNCHES;
        } else if (what == READS) {
            cuda_run_read(dev, memory, bytes, memory);
            *ret_work = (double)bytes;
        } else {
            *ret_work = cuda_run_products(dev, memory);
        }
        cuda_mark(dev, 1);
        if (cudaStreamSynchronize(dev->stream) != cudaSuccess) {
            cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: a measurement", dev->limits.device_i);
            break;
        }
        double s = cuda_between_s(dev, 0, 1);
        best = pass == 1 || (pass > 1 && s < best) ? s : best;
    }
    return best > 0 ? best : 1e-9;
}

enum status cuda_rates(struct ops_device *dev, struct ops_rates *ret_rates, struct error *err)
{
    void *memory = NULL;
    size_t bytes = READ_BYTES;
    double work = 0;
    use(dev);
    while (cudaMalloc(&memory, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        bytes /= 2;
        if (bytes < LEAST_READ_BYTES) {
            return error_set(err, STATUS_EXHAUSTED,
                             "cuda:%u: no memory to measure reading with: %zu MiB",
                             dev->limits.device_i, LEAST_READ_BYTES >> 20);
        }
    }
    if (cudaMemsetAsync(memory, 1, bytes, cuda_stream_for(dev)) != cudaSuccess) {
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: memory to read", dev->limits.device_i);
    }
    struct ops_rates rates;
    double s = best_s(dev, READS, memory, bytes, &work);
    rates.read_bytes_per_s = work / s;
    s = best_s(dev, PRODUCTS, memory, bytes, &work);
    rates.multiply_adds_per_s = work / s;
    s = best_s(dev, NOTHING, memory, bytes, &work);
    rates.launch_s = s / work;
    (void)cudaFree(memory);
    if (dev->failed) {
        return error_set(err, dev->failed, "%s", dev->failure.text);
    }
    *ret_rates = rates;
    return STATUS_OK;
}
