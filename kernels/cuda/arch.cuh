/* kernels/cuda/arch.cuh - all that differs between sm_90a and sm_120a.
 *
 * One source serves both: a kernel asks here and never tests __CUDA_ARCH__ itself. Kernels stay
 * declared for every architecture; what an architecture lacks is left out inside the body, for a
 * guarded __global__ breaks the host stub.
 */
#ifndef BATON_KERNELS_CUDA_ARCH_CUH
#define BATON_KERNELS_CUDA_ARCH_CUH

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

#endif
