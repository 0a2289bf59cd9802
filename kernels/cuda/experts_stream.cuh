/* kernels/cuda/experts_stream.cuh - what the two launches of experts_stream.cu share; the first is
 * experts_plan.cu.
 */
#ifndef BATON_KERNELS_CUDA_EXPERTS_STREAM_CUH
#define BATON_KERNELS_CUDA_EXPERTS_STREAM_CUH

#include "kernels/cuda/tensor.cuh"

enum {
    STREAM_TILE_ROWS = 16, /* of an expert's, that its weights meet at once: two mma's columns */
    STREAM_MOST_ROWS = 64  /* of a call; more go to tensor.cu */
};

/* [is_shared] where there are two. */
struct stream_plan {
    const uint32_t *experts; /* [n_rows, n_used] */
    const float *weights, *x;
    uint32_t n_rows, n_used, first, end, hidden, n_shared_tiles, max_lanes;
    bool has[2], quant[2]; /* [is_shared] */
    uint32_t form[2];
    uint16_t *image[2];
    uint32_t *lane_row, *row_lanes; /* of each row: how many lanes, then these */
    float *lane_weight;
    cuda_tile *tiles;
    uint32_t *tile_count, *counters, n_counters;
    float *y;
};

/* Sorts the rows by expert into lanes and tiles (the shared expert's first), writes their images,
 * zeroes the counters and what nobody else will write of y. One launch. */
void cuda_experts_plan(struct ops_device *dev, const struct stream_plan &plan);

/* Where input k of a row lies among the halves of its image. */
__device__ __forceinline__ uint32_t stream_image_at(uint32_t form, uint32_t k)
{
    const uint32_t inputs = tensor_inputs_of(form), unit = k / inputs, step = k % inputs / 8;
    return ((unit / TENSOR_UNITS * (inputs / 8) + step) * TENSOR_UNITS + unit % TENSOR_UNITS) * 8 +
           tensor_half_of(form, k % 8);
}

/* As warp_quant8, of a group of which each lane has N. */
template <int N> __device__ __forceinline__ void stream_quantise(float *x)
{
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    const float scale = e8m0_decode(e8m0_scale_for(warp_max(most), 1.0f / 448.0f));
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = e4m3_round(x[i] * inverse) * scale;
    }
}

#endif
