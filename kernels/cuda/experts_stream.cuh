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
    bool scaled;                    /* images for block-scaled products, see stream_put */
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

/* Where input k of a row lies among the bytes of its image for block-scaled products: chunk after
 * chunk, in each what the lanes have of two steps (tensor.cuh), lane after lane, then 16 bytes with
 * the scale. No longer than an image of halves. */
__device__ __forceinline__ uint32_t stream_scaled_at(uint32_t form, uint32_t k)
{
    const uint32_t inputs = TENSOR_UNITS * tensor_inputs_of(form), in = k % inputs;
    const uint32_t at =
        form == CUDA_FP8 ? in : in / 64 * 64 + in % 32 / 8 * 16 + in / 32 % 2 * 8 + in % 8;
    return k / inputs * (inputs + 16) + at;
}

/* A warp's group of 128 of a row, `group`, of which a lane has inputs first + i step: through the
 * quantiser (as warp_quant8), if `quant`, and into the row's image. `scaled`: quant too, or
 * bfloat16. */
template <int N>
__device__ __forceinline__ void stream_put(uint32_t form, bool quant, bool scaled, uint32_t group,
                                           uint32_t first, uint32_t step, const float *x,
                                           uint16_t *row)
{
    float most = 1e-4f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float size = fabsf(x[i]);
        most = size > most ? size : most;
    }
    const uint8_t code = quant ? e8m0_scale_for(warp_max(most), 1.0f / 448.0f) : 127;
    const float scale = e8m0_decode(code), inverse = 1.0f / scale;
    group *= FORMATS_INPUT_GROUP;
    if (scaled && form != CUDA_BF16) {
        uint8_t *to = reinterpret_cast<uint8_t *>(row);
#pragma unroll
        for (int i = 0; i < N; i++) {
            to[stream_scaled_at(form, group + first + i * step)] =
                (uint8_t)arch_pair_e4m3(x[i] * inverse, 0.0f);
        }
        const uint32_t inputs = TENSOR_UNITS * tensor_inputs_of(form);
        if (cuda_lane() < FORMATS_INPUT_GROUP / inputs) {
            to[(group / inputs + cuda_lane()) * (inputs + 16) + inputs] = code;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        row[stream_image_at(form, group + first + i * step)] =
            bf16_encode(quant ? e4m3_round(x[i] * inverse) * scale : x[i]);
    }
}

#endif
