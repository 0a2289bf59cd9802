/* Kernels that do one thing as fast as the card allows: the floors of a step profile, see
 * measure.c.
 */
#include "kernels/cuda/cuda.cuh"

namespace
{

enum { THREADS = 256, SETS = 4, SUMS = 8, TURNS = 512, LOADS = 4 };

__global__ void __launch_bounds__(THREADS) nothing_kernel()
{
    cuda_grid_begin();
}

/* Reads n units of 16 bytes; writes only what nobody will see. */
__global__ void __launch_bounds__(THREADS) read_kernel(const uint4 *data, size_t n, uint32_t *out)
{
    cuda_grid_begin();
    const size_t step = (size_t)gridDim.x * THREADS;
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += LOADS * step) {
        uint4 units[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            units[k] = i + k * step < n ? __ldcs(data + i + k * step) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            sum += units[k].x ^ units[k].y ^ units[k].z ^ units[k].w;
        }
    }
    if (sum == 0x9e3779b9u) {
        *out = sum;
    }
}

/* bfloat16 tensor cores from registers, with other operands at every step. */
__global__ void __launch_bounds__(THREADS) product_kernel(uint32_t seed, float *out)
{
    cuda_grid_begin();
    uint32_t a[SETS][4], b[SETS][2];
    float sums[SUMS][4] = {};
#pragma unroll
    for (int s = 0; s < SETS; s++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            a[s][i] = 0x3f803f80u ^ ((seed + threadIdx.x * 7 + s * 4 + i) & 0x807f807fu);
        }
        b[s][0] = a[s][0] ^ 0x00110022u;
        b[s][1] = a[s][1] ^ 0x80330044u;
    }
    for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const int s = i % SETS, t = (i + i / SETS) % SETS;
            arch_mma_bf16(sums[i], a[s][0], a[s][1], a[s][2], a[s][3], b[t][0], b[t][1]);
        }
    }
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
        all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    }
    if (all == 1.2345f) {
        *out = all;
    }
}

} /* namespace */

void cuda_run_nothing(struct ops_device *dev)
{
    cuda_run(dev, "an empty kernel", nothing_kernel, 1, THREADS, 0);
}

void cuda_run_read(struct ops_device *dev, const void *data, size_t bytes, void *scratch)
{
    cuda_run(dev, "the reading kernel", read_kernel, dev->n_sms * 8, THREADS, 0,
             static_cast<const uint4 *>(data), bytes / sizeof(uint4),
             static_cast<uint32_t *>(scratch));
}

double cuda_run_products(struct ops_device *dev, void *scratch)
{
    const unsigned blocks = dev->n_sms * 2;
    cuda_run(dev, "the multiplying kernel", product_kernel, blocks, THREADS, 0, 0x1234567u,
             static_cast<float *>(scratch));
    return (double)blocks * (THREADS / CUDA_WARP) * TURNS * SUMS * (16 * 8 * 16);
}
