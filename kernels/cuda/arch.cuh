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

#ifdef BATON_EMULATED
#include <emulated_arch.cuh>
#else

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

/* --- words between blocks of one launch */

/* What other blocks wrote before they released the value that is read here is seen by what this
 * thread reads after it. To be called in a loop that waits. */
__device__ __forceinline__ uint32_t arch_load_acquire(const uint32_t *word)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
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

#endif
