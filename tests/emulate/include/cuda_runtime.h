/* What nvcc gives device code, for the C++ compiler: found in place of the toolkit's header by the
 * emulated build. See tests/emulate/emulate.h. */
#ifndef BATON_TESTS_EMULATE_CUDA_RUNTIME_H
#define BATON_TESTS_EMULATE_CUDA_RUNTIME_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus /* a C file wants the runtime's calls alone */
#include <math.h>
#include <string.h>
#include <vector_functions.h>

#include "tests/emulate/emulate.h"

#define BATON_EMULATED 1

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict

/* threadIdx and its like: no macros, since structs have members of these names. */
#define EMULATE_INDEX(name, of)              \
    static const struct {                    \
        struct {                             \
            operator unsigned() const        \
            {                                \
                return emulate::self().of.x; \
            }                                \
        } x;                                 \
        struct {                             \
            operator unsigned() const        \
            {                                \
                return emulate::self().of.y; \
            }                                \
        } y;                                 \
        struct {                             \
            operator unsigned() const        \
            {                                \
                return emulate::self().of.z; \
            }                                \
        } z;                                 \
    } name = {}
EMULATE_INDEX(threadIdx, thread);
EMULATE_INDEX(blockIdx, block);
EMULATE_INDEX(blockDim, block_dim);
EMULATE_INDEX(gridDim, grid_dim);
#undef EMULATE_INDEX

/* --- barriers and fences */

static inline void __syncthreads()
{
    emulate::barrier(0, 0);
}

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    emulate::value none = {};
    (void)emulate::meet(mask, "__syncwarp", none);
}

static inline void __threadfence()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void __threadfence_block()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void __threadfence_system()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void __nanosleep(unsigned)
{
    emulate::spin();
}

/* --- lanes */

/* Each lane brings x and the lane whose it wants, and gets that one's; its own beyond the edge. */
template <typename T>
static inline T emulate_shuffle(unsigned mask, const char *what, T x, unsigned from, bool inside)
{
    static_assert(sizeof(T) <= 8, "shuffles move up to eight bytes");
    emulate::value mine = {};
    memcpy(mine.bytes, &x, sizeof(x));
    const emulate::value *all = emulate::meet(mask, what, mine);
    if (!inside) {
        return x;
    }
    if (!(mask >> from & 1)) {
        emulate::fault("%s from lane %u, which the mask %#x leaves out", what, from, mask);
    }
    T y;
    memcpy(&y, all[from].bytes, sizeof(y));
    return y;
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T x, int from, int width = emulate::WARP)
{
    unsigned lane = emulate::self_lane(), w = (unsigned)width;
    return emulate_shuffle(mask, "__shfl_sync", x, lane / w * w + (unsigned)from % w, true);
}

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T x, int with, int width = emulate::WARP)
{
    unsigned lane = emulate::self_lane(), from = lane ^ (unsigned)with, w = (unsigned)width;
    return emulate_shuffle(mask, "__shfl_xor_sync", x, from, from / w <= lane / w);
}

template <typename T>
static inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = emulate::WARP)
{
    unsigned lane = emulate::self_lane(), w = (unsigned)width, from = lane + by;
    return emulate_shuffle(mask, "__shfl_down_sync", x, from, from / w == lane / w);
}

template <typename T>
static inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = emulate::WARP)
{
    unsigned lane = emulate::self_lane(), w = (unsigned)width, from = lane - by;
    return emulate_shuffle(mask, "__shfl_up_sync", x, from, lane % w >= by);
}

static inline unsigned __ballot_sync(unsigned mask, int yes)
{
    emulate::value mine = {};
    mine.words[0] = yes != 0;
    const emulate::value *all = emulate::meet(mask, "__ballot_sync", mine);
    unsigned votes = 0;
    for (unsigned i = 0; i < emulate::WARP; i++) {
        votes |= (mask >> i & 1) && all[i].words[0] ? 1u << i : 0u;
    }
    return votes;
}

static inline int __any_sync(unsigned mask, int yes)
{
    return __ballot_sync(mask, yes) != 0;
}

static inline int __all_sync(unsigned mask, int yes)
{
    return __ballot_sync(mask, yes) == mask;
}

/* Integers only, as on the device. */
static inline unsigned __reduce_add_sync(unsigned mask, unsigned x)
{
    emulate::value mine = {};
    mine.words[0] = x;
    const emulate::value *all = emulate::meet(mask, "__reduce_add_sync", mine);
    unsigned sum = 0;
    for (unsigned i = 0; i < emulate::WARP; i++) {
        sum += mask >> i & 1 ? all[i].words[0] : 0u;
    }
    return sum;
}

static inline unsigned __reduce_max_sync(unsigned mask, unsigned x)
{
    emulate::value mine = {};
    mine.words[0] = x;
    const emulate::value *all = emulate::meet(mask, "__reduce_max_sync", mine);
    unsigned most = 0;
    for (unsigned i = 0; i < emulate::WARP; i++) {
        most = (mask >> i & 1) && all[i].words[0] > most ? all[i].words[0] : most;
    }
    return most;
}

/* --- memory */

template <typename T> static inline T __ldg(const T *at)
{
    return *at;
}
template <typename T> static inline T __ldcs(const T *at)
{
    return *at;
}
template <typename T> static inline T __ldcg(const T *at)
{
    return *at;
}
template <typename T> static inline void __stcs(T *at, T x)
{
    *at = x;
}
template <typename T> static inline void __stcg(T *at, T x)
{
    *at = x;
}

template <typename T> static inline T atomicAdd(T *at, T x)
{
    if constexpr (std::is_floating_point_v<T>) {
        T old, sum;
        __atomic_load(at, &old, __ATOMIC_RELAXED);
        do {
            sum = old + x;
        } while (
            !__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return old;
    } else {
        return __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
    }
}

template <typename T> static inline T atomicSub(T *at, T x)
{
    return __atomic_fetch_sub(at, x, __ATOMIC_RELAXED);
}

template <typename T> static inline T atomicOr(T *at, T x)
{
    return __atomic_fetch_or(at, x, __ATOMIC_RELAXED);
}

template <typename T> static inline T atomicExch(T *at, T x)
{
    return __atomic_exchange_n(at, x, __ATOMIC_RELAXED);
}

template <typename T> static inline T atomicMax(T *at, T x)
{
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < x &&
           !__atomic_compare_exchange_n(at, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <typename T> static inline T atomicMin(T *at, T x)
{
    T old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (x < old &&
           !__atomic_compare_exchange_n(at, &old, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return old;
}

template <typename T> static inline T atomicCAS(T *at, T expected, T x)
{
    __atomic_compare_exchange_n(at, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

/* --- numbers */

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline unsigned __float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
static inline float __uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select)
{
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        result |= (unsigned)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
    }
    return result;
}
template <typename T> static inline T min(T a, T b)
{
    return b < a ? b : a;
}
template <typename T> static inline T max(T a, T b)
{
    return a < b ? b : a;
}

/* --- the runtime's templates */

template <typename F>
static inline cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, F *kernel)
{
    return cudaFuncGetAttributes(ret, reinterpret_cast<const void *>(kernel));
}
template <typename F>
static inline cudaError_t cudaFuncSetAttribute(F *kernel, enum cudaFuncAttribute attribute,
                                               int value)
{
    return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), attribute, value);
}
template <typename F>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, F *kernel,
                                                                        int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, reinterpret_cast<const void *>(kernel),
                                                         threads, shared);
}
template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                             A &&...arguments)
{
    emulate::launch(kernel, "a kernel", config->gridDim, config->blockDim, config->dynamicSmemBytes,
                    config->stream, arguments...);
    return cudaPeekAtLastError();
}

#endif

#endif
