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

static inline void __threadfence_system()
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
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

/* --- memory */

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

template <typename T> static inline T __ldcs(const T *at)
{
    return *at;
}
template <typename T> static inline T __ldcg(const T *at)
{
    return *at;
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

/* --- numbers */

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

/* --- the runtime's templates */

template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                             A &&...arguments)
{
    std::tuple<std::decay_t<P>...> kept(static_cast<A &&>(arguments)...);
    const void *at = reinterpret_cast<const void *>(kernel);
    enum emulate::way way = emulate::WAITING;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const cudaLaunchAttribute &a = config->attrs[i];
        if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization &&
            a.val.programmaticStreamSerializationAllowed) {
            way = emulate::EARLY;
        }
    }
    return emulate::enqueue_kernel(at, emulate::name_of(at, NULL), config->gridDim,
                                   config->blockDim, config->dynamicSmemBytes, config->stream, way,
                                   [=]() { std::apply(kernel, kept); });
}

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
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *ret_n, F *kernel,
                                                                        int n_threads, size_t bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        ret_n, reinterpret_cast<const void *>(kernel), n_threads, bytes);
}

#endif

#endif
