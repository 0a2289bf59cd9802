/* Synthetic weights filled where they are used: see fill.h. A model of 80 GB takes the time of
 * writing it.
 */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/fill.h"

namespace
{

enum { THREADS = 256, BLOCKS_A_SM = 8 };

__global__ void __launch_bounds__(THREADS)
    fill_kernel(const __grid_constant__ ops_source s, uint8_t form, struct fill_sizes n,
                uint8_t *to)
{
    cuda_grid_begin();
    const size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = first; i < n.n_words; i += step) {
        reinterpret_cast<uint64_t *>(to)[i] = fill_word(&s, form, i);
    }
    uint8_t *scales = to + 8 * n.n_words;
    for (size_t i = first; i < n.n_scales; i += step) {
        scales[i] = fill_scale(&s, form, i);
    }
    if (first == 0) {
        *reinterpret_cast<float *>(scales + n.n_scales) = s.global_scale;
    }
}

__global__ void __launch_bounds__(THREADS)
    fill_table_kernel(const __grid_constant__ ops_source s, bool is_half, size_t n, void *to)
{
    cuda_grid_begin();
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        float value = fill_element(&s, (uint32_t)(i / s.cols), (uint32_t)(i % s.cols));
        if (is_half) {
            static_cast<uint16_t *>(to)[i] = bf16_encode(value);
        } else {
            static_cast<float *>(to)[i] = value;
        }
    }
}

} /* namespace */

void cuda_fill(struct ops_device *dev, const struct ops_source *source, uint8_t form, void *to)
{
    const struct fill_sizes n = fill_sizes_of(source, form);
    const size_t most = n.n_words + n.n_elements, blocks = (most + THREADS - 1) / THREADS;
    const unsigned grid =
        (unsigned)(blocks < dev->n_sms * BLOCKS_A_SM ? blocks : dev->n_sms * BLOCKS_A_SM);
    if (fill_is_table(form)) {
        cuda_run(dev, "filling weights", fill_table_kernel, grid, THREADS, 0, *source,
                 form == CUDA_TABLE_BF16, n.n_elements, to);
    } else {
        cuda_run(dev, "filling weights", fill_kernel, grid, THREADS, 0, *source, form, n,
                 static_cast<uint8_t *>(to));
    }
    (void)cuda_stream_for(dev); /* who reads weights reads them before it waits */
}
