/* Manifold-constrained hyper-connections: see kernels/cpu/mhc.c for the equations' order. */
#include "kernels/cuda/mhc.cuh"

namespace
{

enum { H = OPS_HC, THREADS = 128, WARPS = THREADS / CUDA_WARP };

/* A warp for each row; `mix` holds the products with fn. */
__global__ void __launch_bounds__(THREADS)
    pre_kernel(uint32_t n_rows, uint32_t n, ops_hc_device hc, const float *norm, float rms_eps,
               float hc_eps, uint32_t iters, bool round, const float *streams, float *x, float *mix)
{
    cuda_grid_begin();
    uint32_t r = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (r >= n_rows) {
        return;
    }
    const float *f = streams + (size_t)r * H * n;
    float pre[H], *u = x + (size_t)r * n;
    mhc_split(mix + (size_t)r * OPS_HC_OUT, warp_root(f, (size_t)H * n, rms_eps), hc, iters, hc_eps,
              pre, mix + (size_t)r * OPS_HC_OUT);
    warp_weigh_streams(f, pre, n, round, u);
    warp_rms_norm(u, norm, n, rms_eps, round, u);
}

/* A thread for each channel of a row. */
__global__ void __launch_bounds__(THREADS)
    post_kernel(uint32_t n, bool round, const float *y, const float *mix, float *streams)
{
    cuda_grid_begin();
    const uint32_t r = blockIdx.y, i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) {
        return;
    }
    float *x = streams + (size_t)r * H * n + i, in[H];
    const float from = y[(size_t)r * n + i];
#pragma unroll
    for (uint32_t j = 0; j < H; j++) {
        in[j] = x[(size_t)j * n];
    }
#pragma unroll
    for (uint32_t k = 0; k < H; k++) {
        x[(size_t)k * n] = mhc_out(mix + (size_t)r * OPS_HC_OUT, k, in, from, round);
    }
}

} /* namespace */

void cuda_mhc_pre(struct ops_device *dev, const struct ops_rows *rows, const struct ops_hc *hc,
                  const float *norm, const float *streams, float *ret_x, float *ret_mix)
{
    const struct ops_dims *d = &dev->d;
    uint32_t n = rows->n_rows;
    if (n == 0) {
        return;
    }
    cuda_gemm(dev, &hc->fn, streams, (size_t)H * d->hidden, n, ret_mix, OPS_HC_OUT, false);
    const ops_hc_device there = {hc->base, hc->scale};
    cuda_run(dev, "mhc_pre", pre_kernel, (n + WARPS - 1) / WARPS, THREADS, 0, n, d->hidden, there,
             norm, d->rms_eps, d->hc_eps, d->hc_iters, !d->exact, streams, ret_x, ret_mix);
}

void cuda_mhc_post(struct ops_device *dev, const struct ops_rows *rows, const float *y,
                   const float *mix, float *streams)
{
    const struct ops_dims *d = &dev->d;
    for (uint32_t r = 0; r < rows->n_rows; r += CUDA_MAX_GRID_Y) {
        uint32_t n = rows->n_rows - r < CUDA_MAX_GRID_Y ? rows->n_rows - r : CUDA_MAX_GRID_Y;
        const dim3 grid((d->hidden + THREADS - 1) / THREADS, n);
        cuda_run(dev, "mhc_post", post_kernel, grid, THREADS, 0, d->hidden, !d->exact,
                 y + (size_t)r * d->hidden, mix + (size_t)r * OPS_HC_OUT,
                 streams + (size_t)r * H * d->hidden);
    }
}
