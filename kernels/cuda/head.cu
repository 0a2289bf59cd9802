/* Streams to logits: one weight a stream, made by the token itself, then norm and vocabulary. */
#include "kernels/cuda/mhc.cuh"

namespace
{

enum { H = OPS_HC, THREADS = 128, WARPS = THREADS / CUDA_WARP, SOME = 512 };

/* Row numbers travel as an argument: they are few, and the host keeps them no longer. */
struct some_rows {
    uint32_t row[SOME];
};

__global__ void __launch_bounds__(THREADS)
    which_kernel(const __grid_constant__ some_rows some, uint32_t n, uint32_t *which)
{
    cuda_grid_begin();
    for (uint32_t i = threadIdx.x; i < n; i += THREADS) {
        which[i] = some.row[i];
    }
}

/* A warp for each row; products [n, 4] are those with fn. */
__global__ void __launch_bounds__(THREADS)
    head_kernel(const uint32_t *which, uint32_t n_rows, uint32_t n, ops_hc_device hc,
                const float *norm, float rms_eps, float hc_eps, bool round, const float *streams,
                const float *products, float *x)
{
    cuda_grid_begin();
    uint32_t i = blockIdx.x * WARPS + threadIdx.x / CUDA_WARP;
    if (i >= n_rows) {
        return;
    }
    const float *f = streams + (size_t)which[i] * H * n;
    const float root = warp_root(f, (size_t)H * n, rms_eps);
    float w[H], *h = x + (size_t)i * n;
#pragma unroll
    for (int k = 0; k < H; k++) {
        w[k] = cuda_sigmoid(products[(size_t)i * H + k] / root * hc.scale[0] + hc.base[k]) + hc_eps;
    }
    warp_weigh_streams(f, w, n, round, h);
    warp_rms_norm(h, norm, n, rms_eps, round, h);
}

} /* namespace */

void cuda_head(struct ops_device *dev, const struct ops_globals *globals, const float *streams,
               const uint32_t *which, uint32_t n, float *ret_logits, size_t stride)
{
    const struct ops_dims *d = &dev->d;
    if (n > dev->limits.n_rows) {
        cuda_failed(dev, STATUS_INVALID, "logits of %u rows of %u", n, dev->limits.n_rows);
        return;
    }
    for (uint32_t first = 0; first < n; first += SOME) {
        some_rows some;
        uint32_t m = n - first < SOME ? n - first : SOME;
        for (uint32_t i = 0; i < m; i++) {
            some.row[i] = which[first + i];
        }
        cuda_run(dev, "head", which_kernel, 1, THREADS, 0, some, m, dev->which + first);
    }
    if (n == 0) {
        return;
    }
    cuda_gemm_some(dev, &globals->hc_head.fn, streams, (size_t)H * d->hidden, dev->which, n,
                   dev->wide, H, false);
    const ops_hc_device hc = {globals->hc_head.base, globals->hc_head.scale};
    cuda_run(dev, "head", head_kernel, (n + WARPS - 1) / WARPS, THREADS, 0, dev->which, n,
             d->hidden, hc, globals->norm, d->rms_eps, d->hc_eps, !d->exact, streams, dev->wide,
             dev->head_x);
    cuda_gemm(dev, &globals->head, dev->head_x, d->hidden, n, ret_logits, stride, false);
}
