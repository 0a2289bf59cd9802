/* Sums over the devices of a group, in rank order: the same bits on every rank and for every batch.
 *
 * The first device reads every part and writes every sum; its stream waits for the others' and they
 * for it, so the host does not. All parts must lie in memory that it can reach: one GPU's.
 */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 256, BLOCKS = 1024, MAX_RANKS = 16 };

struct parts {
    float *y[MAX_RANKS];
};

__global__ void __launch_bounds__(THREADS)
    sum_kernel(const __grid_constant__ parts p, uint32_t n_ranks, size_t n, bool round)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        float sum = p.y[0][i];
        for (uint32_t k = 1; k < n_ranks; k++) {
            sum += p.y[k][i];
        }
        sum = cuda_rounded(sum, round);
        for (uint32_t k = 0; k < n_ranks; k++) {
            p.y[k][i] = sum;
        }
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
    if (n_devices > MAX_RANKS) {
        cuda_failed(first, STATUS_INVALID, "a sum over %u devices", n_devices);
        return;
    }
    for (uint32_t k = 0; k < n_devices; k++) {
        p.y[k] = y[k];
        if (devices[k]->limits.device_i != first->limits.device_i) {
            cuda_failed(first, STATUS_UNSUPPORTED, "a sum over several GPUs");
            return;
        }
        if (k && (cudaEventRecord(devices[k]->reached, devices[k]->stream) != cudaSuccess ||
                  cudaStreamWaitEvent(first->stream, devices[k]->reached, 0) != cudaSuccess)) {
            cuda_launched(first, "waiting for a device of the group");
        }
    }
    const size_t blocks = (n + THREADS - 1) / THREADS;
    sum_kernel<<<(unsigned)(blocks < BLOCKS ? blocks : BLOCKS), THREADS, 0, first->stream>>>(
        p, n_devices, n, !first->d.exact);
    cuda_launched(first, "the sum over a group");
    if (n_devices > 1 && cudaEventRecord(first->reached, first->stream) != cudaSuccess) {
        cuda_launched(first, "a mark for the group");
    }
    for (uint32_t k = 1; k < n_devices; k++) {
        if (cudaStreamWaitEvent(devices[k]->stream, first->reached, 0) != cudaSuccess) {
            cuda_launched(devices[k], "waiting for the sum");
        }
    }
}
