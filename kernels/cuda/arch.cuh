/* kernels/cuda/arch.cuh - all that differs between sm_90a and sm_120a, and every instruction that
 * CUDA C++ has no name for: inline assembly stands in this file alone. Where kernels run on the
 * processor, tests/emulate/include/emulated_arch.cuh says what each does.
 *
 * One source serves both: a kernel asks here and never tests __CUDA_ARCH__ itself. Kernels stay
 * declared for every architecture; what an architecture lacks is left out inside the body, for a
 * guarded __global__ breaks the host stub.
 */
#ifndef BATON_KERNELS_CUDA_ARCH_CUH
#define BATON_KERNELS_CUDA_ARCH_CUH

#include <stdint.h>

#include "kernels/formats.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ARCH_SM90A 1
#else
#define ARCH_SM90A 0
#endif

#if defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define ARCH_SM120A 1
#else
#define ARCH_SM120A 0
#endif

/* Most shared memory a block may use anywhere: sm_120 has 99 KiB (CUDA C++ Programming Guide,
 * compute capabilities), and what fits there fits on sm_90 too. */
enum { ARCH_MAX_SHARED_BYTES = 99 * 1024 };

/* Of a function that is called rather than copied. */
#ifdef BATON_EMULATED
#define ARCH_APART
#include <emulated_arch.cuh>
#else
#define ARCH_APART __noinline__

/* --- pairs of bfloat16 in a word, the first in its low half */

__device__ __forceinline__ uint32_t arch_times_bf16(uint32_t a, uint32_t b)
{
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ uint32_t arch_pair_bf16(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* sum += a b of a warp, 16 x 16 by 16 x 8 (mma.m16n8k16): of lane (g, t) = (lane / 4, lane % 4)
 * a0 .. a3 are (row g, k 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8) and the k behind each;
 * b0, b1 are (k 2t, column g), (2t + 8, g) likewise; sum[0 .. 3] are (g, 2t), (g, 2t + 1),
 * (g + 8, 2t), (g + 8, 2t + 1). */
__device__ __forceinline__ void arch_mma_bf16(float *sum, uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Four 8 x 8 matrices of halves from shared memory, transposed (ldmatrix): lane 8 m + i gives the
 * address of row i of matrix m, 16 bytes; word m of lane (g, t) is rows 2t and 2t + 1 of its column
 * g, the first in its low half. So the first two are the b of arch_mma_bf16 for 16 rows, k, of 8
 * columns, and the last two those of another matrix. */
__device__ __forceinline__ void arch_load_transposed(const uint16_t *row, uint32_t *ret_words)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ret_words[0]), "=r"(ret_words[1]), "=r"(ret_words[2]), "=r"(ret_words[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

/* Two numbers within e4m3's range to the nearest e4m3, the first in the low byte. */
__device__ __forceinline__ uint32_t arch_pair_e4m3(float low, float high)
{
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

/* --- copies into shared memory behind a thread's back (cp.async)
 *
 * A thread's copies since its last arch_copy_close are one group; groups end in order. What
 * arch_copy_wait has waited for, the thread itself may read; others after a barrier with it. */

/* 16 bytes past the first-level cache; both addresses are multiples of 16. */
__device__ __forceinline__ void arch_copy_16(void *shared, const void *from)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(from)
                 : "memory");
}

/* 4 bytes; both addresses are multiples of 4. */
__device__ __forceinline__ void arch_copy_4(void *shared, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(from)
                 : "memory");
}

__device__ __forceinline__ void arch_copy_close()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most N of the thread's groups are not yet there. */
template <int N> __device__ __forceinline__ void arch_copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* --- launches that begin before those in front of them end: launch.cuh has the rule */

/* The blocks of the launch behind this one may be handed out, once all blocks here came by. */
__device__ __forceinline__ void arch_grid_go()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/* Until the launch in front of this one has completed, and all it wrote is there. */
__device__ __forceinline__ void arch_grid_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Asks for memory into the second-level cache; both are multiples of 16. */
__device__ __forceinline__ void arch_fetch_ahead(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)),
                 "r"(bytes)
                 : "memory");
}

/* --- within a block */

/* A barrier of the first n_threads to come to it, whole warps; 0 is __syncthreads's. */
__device__ __forceinline__ void arch_barrier(uint32_t id, uint32_t n_threads)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");
}

/* 1 / x, to a unit in the last place; of what is subnormal infinity. */
__device__ __forceinline__ float arch_inverse(float x)
{
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

/* --- words between blocks of one launch */

/* What other blocks wrote before they released the value that is read here is seen by what this
 * thread reads after it. To be called in a loop that waits. */
__device__ __forceinline__ uint32_t arch_load_acquire(const uint32_t *word)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

/* Words in another GPU's memory, or that another writes into this one's: of the four the first two
 * go together, and the last two; no order is asked for beside that. */
__device__ __forceinline__ void arch_store_there(uint4 *to, uint4 words)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ __forceinline__ uint4 arch_load_there(const uint4 *from)
{
    uint4 words;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(from)
                 : "memory");
    return words;
}

/* As atomicAdd(word, 1), which the compiler lets wait at once for a value that is wanted later: it
 * gathers the warp's lanes. */
__device__ __forceinline__ uint32_t arch_count(uint32_t *word)
{
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(word)
                 : "memory");
    return before;
}

#endif

/* --- products of elements with scales (mma with block_scale; sm_120a)
 *
 * sum += (a times its scales) (b times its scales) of a warp, 16 x K by K x 8. A word holds N
 * elements of consecutive k, the first in its low bits, and K is 8 N: of lane (g, t) are
 *     a[0], a[1]  rows g, g + 8   k = N t ...            b[0]  k = N t ...            of column g
 *     a[2], a[3]  the same rows   k = K / 2 + N t ...    b[1]  k = K / 2 + N t ...
 * and sums as in arch_mma_bf16. A scale is a byte s for 2^(s - 127), 0xff for NaN, and is taken
 * from some lanes' words alone: row g's from lane (g, 2 THREAD_A), row g + 8's from
 * (g, 2 THREAD_A + 1), column g's from (g, THREAD_B); the byte is BYTE_A or BYTE_B, and where there
 * are two scales, the one behind for the second half of k. THREAD_A is 0 or 1, THREAD_B and bytes
 * 0 .. 3, of two scales 0 or 2.
 *
 *     mx8  N = 4, K = 32, one scale: bytes, a of e4m3 or e2m1 (bits 5 .. 2 of a byte, the others
 *          zero), b of e4m3
 *     mx4  N = 8, K = 64, two scales: halves of bytes, both e2m1
 *
 * Layouts from the PTX ISA ("Block scaling for mma.sync", "Matrix fragments for mma.m16n8k32" and
 * "m16n8k64", kinds mxf8f6f4 and mxf4), held against CUTLASS's ALayout, BLayout, SFALayout,
 * SFBLayout and fp4_shift_A (cute/atom/mma_traits_sm120.hpp). tests/kernels/test_scaled.cu has them
 * once more, from the matrices' side.
 *
 * What is exact: every product, scaled. What is not documented is how many bits the sum of K
 * products keeps; no card of this kind was at hand to find out. Elsewhere these are
 * arch_scaled_by_shuffles, from the same words, with one rounding a call.
 */
enum { ARCH_E4M3, ARCH_E2M1 };

/* Element i of a word: a byte, or with NIBBLES half of one. */
template <int FORMAT, bool NIBBLES>
__device__ __forceinline__ float arch_element(uint32_t word, int i)
{
    if (NIBBLES) {
        return e2m1_decode((uint8_t)(word >> 4 * i & 15u));
    }
    const uint8_t code = (uint8_t)(word >> 8 * i);
    return FORMAT == ARCH_E2M1 ? e2m1_decode(code >> 2 & 15) : e4m3_decode(code);
}

__device__ __forceinline__ double arch_scale(uint32_t word, uint32_t byte)
{
    const uint64_t code = word >> 8 * byte & 255u;
    const uint64_t bits = code == 255 ? UINT64_C(0x7ff8) << 48 : (code + 1023 - 127) << 52;
    double scale;
    memcpy(&scale, &bits, sizeof(scale));
    return scale;
}

/* What the instructions do, from each lane's words by shuffles, for where they are not. A half of k
 * is summed without error, and what comes out is rounded once. Not inline: a kernel has dozens. */
template <int FORMAT_A, bool NIBBLES>
__device__ ARCH_APART float4 arch_scaled_sums(float4 sum, uint4 a, uint2 b, uint32_t scale_a,
                                              uint32_t scale_b, uint32_t byte_a, uint32_t thread_a,
                                              uint32_t byte_b, uint32_t thread_b)
{
    const uint32_t lane = threadIdx.x % 32, quad = lane / 4 * 4, left = lane % 4 * 8;
    const uint32_t all = 0xffffffffu;
    double total[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll 1
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t upper = half ? a.z : a.x, lower = half ? a.w : a.y,
                       beside = half ? b.y : b.x;
        double part[4] = {0.0, 0.0, 0.0, 0.0};
#pragma unroll 1
        for (uint32_t t = 0; t < 4; t++) {
            const uint32_t row[2] = {__shfl_sync(all, upper, quad + t),
                                     __shfl_sync(all, lower, quad + t)};
            const uint32_t column[2] = {__shfl_sync(all, beside, left + t),
                                        __shfl_sync(all, beside, left + 4 + t)};
#pragma unroll 1
            for (int i = 0; i < (NIBBLES ? 8 : 4); i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    part[k] += (double)arch_element<FORMAT_A, NIBBLES>(row[k / 2], i) *
                               (double)arch_element<ARCH_E4M3, NIBBLES>(column[k % 2], i);
                }
            }
        }
        const uint32_t more = NIBBLES ? half : 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t of_row = __shfl_sync(all, scale_a, quad + 2 * thread_a + k / 2);
            const uint32_t of_column = __shfl_sync(all, scale_b, left + 4 * (k % 2) + thread_b);
            total[k] +=
                part[k] * arch_scale(of_row, byte_a + more) * arch_scale(of_column, byte_b + more);
        }
    }
    return make_float4((float)total[0], (float)total[1], (float)total[2], (float)total[3]);
}

template <int FORMAT_A, bool NIBBLES, int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
__device__ __forceinline__ void arch_scaled_by_shuffles(float *sum, const uint32_t *a,
                                                        const uint32_t *b, uint32_t scale_a,
                                                        uint32_t scale_b)
{
    const float4 to = arch_scaled_sums<FORMAT_A, NIBBLES>(
        make_float4(sum[0], sum[1], sum[2], sum[3]), make_uint4(a[0], a[1], a[2], a[3]),
        make_uint2(b[0], b[1]), scale_a, scale_b, BYTE_A, THREAD_A, BYTE_B, THREAD_B);
    sum[0] = to.x;
    sum[1] = to.y;
    sum[2] = to.z;
    sum[3] = to.w;
}

#ifndef BATON_EMULATED

template <int FORMAT_A, int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
__device__ __forceinline__ void arch_mma_mx8(float *sum, const uint32_t *a, const uint32_t *b,
                                             uint32_t scale_a, uint32_t scale_b)
{
#if ARCH_SM120A
    if constexpr (FORMAT_A == ARCH_E2M1) {
        asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e2m1."
            "e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%11,%12}, "
            "%13, {%14,%15};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
              "n"(BYTE_A), "n"(THREAD_A), "r"(scale_b), "n"(BYTE_B), "n"(THREAD_B));
    } else {
        asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3."
            "e4m3.f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%11,%12}, "
            "%13, {%14,%15};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
              "n"(BYTE_A), "n"(THREAD_A), "r"(scale_b), "n"(BYTE_B), "n"(THREAD_B));
    }
#else
    arch_scaled_by_shuffles<FORMAT_A, false, BYTE_A, THREAD_A, BYTE_B, THREAD_B>(sum, a, b, scale_a,
                                                                                 scale_b);
#endif
}

template <int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
__device__ __forceinline__ void arch_mma_mx4(float *sum, const uint32_t *a, const uint32_t *b,
                                             uint32_t scale_a, uint32_t scale_b)
{
#if ARCH_SM120A
    asm("mma.sync.aligned.kind::mxf4.block_scale.scale_vec::2X.m16n8k64.row.col.f32.e2m1.e2m1.f32."
        "ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, %10, {%11,%12}, %13, "
        "{%14,%15};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
          "n"(BYTE_A), "n"(THREAD_A), "r"(scale_b), "n"(BYTE_B), "n"(THREAD_B));
#else
    arch_scaled_by_shuffles<ARCH_E2M1, true, BYTE_A, THREAD_A, BYTE_B, THREAD_B>(sum, a, b, scale_a,
                                                                                 scale_b);
#endif
}

#endif

#endif
