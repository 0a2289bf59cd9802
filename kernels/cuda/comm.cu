/* Sums over the devices of a group, in rank order: the same bits on every rank and for every batch.
 *
 * On one GPU the first device reads every part and writes every sum; its stream waits for the
 * others' and they for it, so the host does not. On several each gathers the parts of all
 * (group.c) and adds them itself. Either can be captured in a graph that holds all streams.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/group.h"

namespace
{

enum { THREADS = 256, BLOCKS = 1024 };

struct parts {
    const float *from[CUDA_MAX_GROUP];
    float *to[CUDA_MAX_GROUP];
    uint32_t n_from, n_to;
};

/* sums, sums_there: NULL, or counters of the sums that this stream came to. */
__global__ void __launch_bounds__(THREADS)
    sum_kernel(const __grid_constant__ parts p, size_t n, bool round, uint32_t *sums,
               volatile uint32_t *sums_there)
{
    cuda_grid_begin();
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        float sum = p.from[0][i];
        for (uint32_t k = 1; k < p.n_from; k++) {
            sum += p.from[k][i];
        }
        sum = cuda_rounded(sum, round);
        for (uint32_t k = 0; k < p.n_to; k++) {
            p.to[k][i] = sum;
        }
    }
    if (sums && blockIdx.x == 0 && threadIdx.x == 0) {
        *sums += 1;
        *sums_there = *sums;
    }
}

void add(struct ops_device *dev, const parts &p, size_t n)
{
    const size_t blocks = (n + THREADS - 1) / THREADS;
    cuda_run(dev, "the sum over a group", sum_kernel, (unsigned)(blocks < BLOCKS ? blocks : BLOCKS),
             THREADS, 0, p, n, !dev->d.exact, dev->sums, dev->sums_there);
}

/* Ranks on a GPU each. */
void sum_gathered(struct ops_device *const *devices, uint32_t n_devices, size_t n, float *const *y)
{
    if (!cuda_group_gather(devices[0]->group, y, n)) {
        cuda_group_end(devices[0]); /* keeps why */
        return;
    }
    for (uint32_t k = 0; k < n_devices; k++) {
        struct ops_device *dev = devices[k];
        parts p = {};
        p.n_from = n_devices;
        p.n_to = 1;
        p.to[0] = y[k];
        for (uint32_t j = 0; j < n_devices; j++) {
            p.from[j] = dev->gathered + j * n;
        }
        (void)cuda_kept(dev, cudaSetDevice((int)dev->limits.device_i), "choosing the device");
        add(dev, p, n);
    }
}

} /* namespace */

void cuda_comm(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
               float *const *y)
{
    struct ops_device *first = devices[0];
    const size_t n = (size_t)n_rows * first->d.hidden;
    parts p = {};
    if (n == 0) {
        return;
    }
    if (cuda_group_has_parts(first->group)) {
        sum_gathered(devices, n_devices, n, y);
        return;
    }
    if (n_devices > CUDA_MAX_GROUP || cudaSetDevice((int)first->limits.device_i) != cudaSuccess) {
        cuda_failed(first, STATUS_INVALID, "a sum over %u devices", n_devices);
        return;
    }
    uint32_t came_to;
    if (first->group && !cuda_group_next(first->group, false, &came_to)) {
        cuda_group_end(first); /* keeps why */
        return;
    }
    p.n_from = p.n_to = n_devices;
    for (uint32_t k = 0; k < n_devices; k++) {
        p.from[k] = p.to[k] = y[k];
        if (devices[k]->limits.device_i != first->limits.device_i) {
            cuda_failed(first, STATUS_UNSUPPORTED, "a sum over GPUs that were not joined");
            return;
        }
        if (k &&
            (cudaEventRecord(devices[k]->reached, cuda_stream_for(devices[k])) != cudaSuccess ||
             cudaStreamWaitEvent(cuda_stream_for(first), devices[k]->reached, 0) != cudaSuccess)) {
            cuda_launched(first, "waiting for a device of the group");
        }
    }
    add(first, p, n);
    if (n_devices > 1 && cudaEventRecord(first->reached, cuda_stream_for(first)) != cudaSuccess) {
        cuda_launched(first, "a mark for the group");
    }
    for (uint32_t k = 1; k < n_devices; k++) {
        if (cudaStreamWaitEvent(cuda_stream_for(devices[k]), first->reached, 0) != cudaSuccess) {
            cuda_launched(devices[k], "waiting for the sum");
        }
    }
}
