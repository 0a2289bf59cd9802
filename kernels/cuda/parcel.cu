/* Copy and checksum in one launch over all pieces of a parcel.
 *
 * Each block walks the pieces with a stride of the whole grid, so that one large piece and many
 * small ones load the machine alike. A thread keeps both lanes in registers, and a block adds to
 * the two sums once: 64-bit integer atomics commute, so the digest is that of the CPU whatever the
 * order.
 */
#include "kernels/cuda/parcel.h"

#include <cuda_runtime.h>

#include "kernels/cuda/arch.cuh"

namespace
{

enum { THREADS = 256, BLOCKS = 512, UNROLL = 4 };

__device__ __forceinline__ void add_word(const parcel_key &key, uint32_t lo, uint32_t hi,
                                         uint32_t n, uint64_t lane[2])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t x = lo + key.a[j] + key.b[j] * n, y = hi + key.c[j] + key.d[j] * n;
        lane[j] += (uint64_t)x * y;
    }
}

/* A piece that does not lie on 16 bytes at both ends. */
__device__ void copy_sum_words(const parcel_key &key, const parcel_piece_device &piece,
                               uint64_t stride, uint64_t lane[2])
{
    const uint2 *src = static_cast<const uint2 *>(piece.src);
    uint2 *dst = static_cast<uint2 *>(piece.dst);
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < piece.bytes / 8;
         i += stride) {
        uint2 word = src[i];
        if (dst) {
            dst[i] = word;
        }
        add_word(key, word.x, word.y, (uint32_t)(piece.first_word + i), lane);
    }
}

__global__ void __launch_bounds__(THREADS)
    copy_sum_kernel(parcel_key key, const parcel_piece_device *pieces, uint32_t n_pieces,
                    unsigned long long *sums)
{
    uint64_t lane[2] = {0, 0};
    const uint64_t stride = (uint64_t)gridDim.x * THREADS;
    for (uint32_t p = 0; p < n_pieces; p++) {
        const parcel_piece_device piece = pieces[p];
        if (((uintptr_t)piece.src | (uintptr_t)piece.dst | piece.bytes) % 16 != 0) {
            copy_sum_words(key, piece, stride, lane);
            continue;
        }
        const uint4 *src = static_cast<const uint4 *>(piece.src);
        uint4 *dst = static_cast<uint4 *>(piece.dst);
        const uint64_t n_quads = piece.bytes / 16;
        for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < n_quads;
             i += stride * UNROLL) {
            uint4 held[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (i + u * stride < n_quads) {
                    held[u] = src[i + u * stride];
                }
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                uint64_t at = i + u * stride;
                if (at < n_quads) {
                    if (dst) {
                        dst[at] = held[u];
                    }
                    uint32_t n = (uint32_t)(piece.first_word + 2 * at);
                    add_word(key, held[u].x, held[u].y, n, lane);
                    add_word(key, held[u].z, held[u].w, n + 1, lane);
                }
            }
        }
    }
    __shared__ unsigned long long block_sum[2];
    if (threadIdx.x < 2) {
        block_sum[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int j = 0; j < 2; j++) {
        unsigned long long sum = lane[j];
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_down_sync(0xffffffffu, sum, offset);
        }
        if (threadIdx.x % 32 == 0) {
            atomicAdd(&block_sum[j], sum);
        }
    }
    __syncthreads();
    if (threadIdx.x < 2) {
        atomicAdd(&sums[threadIdx.x], block_sum[threadIdx.x]);
    }
}

} /* namespace */

enum status parcel_copy_sum_launch(const struct parcel_key *key,
                                   const struct parcel_piece_device *pieces, uint32_t n_pieces,
                                   uint64_t *sums, void *stream)
{
    copy_sum_kernel<<<BLOCKS, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        *key, pieces, n_pieces, reinterpret_cast<unsigned long long *>(sums));
    return cudaGetLastError() == cudaSuccess ? STATUS_OK : STATUS_SYSTEM;
}
