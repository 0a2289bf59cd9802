/* Sums of few rows between GPUs, in one launch a rank: each rank writes its part into every other's
 * memory and adds what was written into its own, in rank order. The bits are those of comm.cu.
 *
 * A part arrives as pairs of a word and the number of the sum, eight bytes that arrive together or
 * not at all. So the number says that the word is there, and nothing else has to be ordered or
 * waited for: what takes the time is one way between two GPUs.
 *
 * There are two places for a part, taken by turns. Who writes the part of sum e + 2 has ended sum
 * e + 1, so it has had a word of e + 1 from every rank; that rank's launch of e + 1 was behind its
 * launch of e in a stream, so all of e had been read. A sum by NCCL between them orders as much.
 *
 * A rank that never comes is not waited for longer than the watch of the group lets it: then `stop`
 * is set, and the launch ends without a sum that anybody will use.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/group.h"

namespace
{

enum { THREADS = 256, LOOKS_PER_STOP = 128 };

struct push {
    uint4 *inbox[CUDA_MAX_GROUP]; /* of each rank: [2, n_ranks, capacity] */
    uint32_t rank, n_ranks;
    size_t capacity, n; /* in pairs of floats */
    float2 *y;
    uint32_t *sums, *left; /* counters: sums that this stream came to; blocks that left this one */
    volatile uint32_t *sums_there, *came;
    uint32_t came_to; /* what to write to `came`, where there is one */
    const volatile uint32_t *stop;
    bool round;
};

/* The pair of sum `number` once it is there; false if it will not be waited for. */
__device__ bool receive(const uint4 *from, uint32_t number, const volatile uint32_t *stop,
                        float2 *ret)
{
    for (uint32_t n = 1;; n++) {
        uint4 words = arch_load_there(from);
        if (words.y == number && words.w == number) {
            *ret = make_float2(__uint_as_float(words.x), __uint_as_float(words.z));
            return true;
        }
        if (n % LOOKS_PER_STOP == 0 && *stop) {
            return false;
        }
    }
}

__global__ void __launch_bounds__(THREADS) push_kernel(const __grid_constant__ push p)
{
    cuda_grid_begin();
    const size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const size_t step = (size_t)gridDim.x * THREADS;
    /* Words that were never written have 0. */
    const uint32_t next = *p.sums + 1, number = next ? next : 2;
    const size_t place = (number & 1) * p.n_ranks;
    bool there = true;
    if (p.came && first == 0) {
        *p.came = p.came_to;
    }
    for (size_t i = first; i < p.n; i += step) {
        float2 mine = p.y[i];
        uint4 words = make_uint4(__float_as_uint(mine.x), number, __float_as_uint(mine.y), number);
        for (uint32_t k = 1; k < p.n_ranks; k++) {
            uint32_t to = p.rank + k < p.n_ranks ? p.rank + k : p.rank + k - p.n_ranks;
            arch_store_there(p.inbox[to] + (place + p.rank) * p.capacity + i, words);
        }
    }
    for (size_t i = first; i < p.n && there; i += step) {
        float2 sum, part;
        for (uint32_t k = 0; k < p.n_ranks && there; k++) {
            if (k == p.rank) {
                part = p.y[i];
            } else {
                there =
                    receive(p.inbox[p.rank] + (place + k) * p.capacity + i, number, p.stop, &part);
            }
            sum = k ? make_float2(sum.x + part.x, sum.y + part.y) : part;
        }
        if (there) {
            p.y[i] = make_float2(cuda_rounded(sum.x, p.round), cuda_rounded(sum.y, p.round));
        }
    }
    __syncthreads(); /* all threads have read the counter, ... */
    if (threadIdx.x == 0 && there && atomicAdd(p.left, 1u) == gridDim.x - 1) {
        *p.left = 0;
        *p.sums = number; /* ... and all blocks */
        *p.sums_there = number;
    }
}

} /* namespace */

void cuda_comm_push(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
                    float *const *y)
{
    struct ops_device *first = devices[0];
    const size_t n = (size_t)n_rows * first->d.hidden / 2;
    push p = {};
    if (n == 0) {
        return;
    }
    if (n_rows > CUDA_PUSH_ROWS || !cuda_group_pushes(first->group)) {
        cuda_comm(devices, n_devices, n_rows, y);
        return;
    }
    if (!cuda_group_next(first->group, true, &p.came_to)) {
        cuda_group_end(first); /* keeps why */
        return;
    }
    p.n_ranks = n_devices;
    p.capacity = cuda_push_pairs(first);
    p.n = n;
    p.stop = cuda_group_stop(first->group);
    p.round = !first->d.exact;
    for (uint32_t k = 0; k < n_devices; k++) {
        p.inbox[k] = (uint4 *)devices[k]->inbox;
    }
    for (uint32_t k = 0; k < n_devices; k++) {
        struct ops_device *dev = devices[k];
        const size_t blocks = (n + THREADS - 1) / THREADS;
        p.rank = k;
        p.y = (float2 *)y[k];
        p.sums = dev->sums;
        p.left = dev->push_left;
        p.sums_there = dev->sums_there;
        p.came = p.came_to ? cuda_group_came(first->group, k) : NULL;
        (void)cuda_kept(dev, cudaSetDevice((int)dev->limits.device_i), "choosing the device");
        /* A block waits for those of its number alone, and has sent before: however few of a
         * launch there is room for, the first of them get on. */
        cuda_run(dev, "a sum over a group", push_kernel,
                 (unsigned)(blocks < dev->n_sms ? blocks : dev->n_sms), THREADS, 0, p);
    }
}
