/* The CUDA runtime that emulated kernels run on, see emulate.h: devices, memory, streams, events
 * and graphs, as far as kernels/cuda asks for them.
 *
 * One lock guards it all. A stream is a queue of operations; who waits runs whatever is ready, on
 * any stream. What a stream records for a graph is the same operations, kept instead of queued.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/emulate/runtime.h"

using emulate::fault;

thread_local int current_device = 0;

namespace
{

enum {
    PAGE_BYTES = 4096,
    POISON_BYTES = 128 << 20,
    STANDARD_SHARED_BYTES = 48 << 10,
    MAX_SHARED_BYTES = 99 << 10, /* what sm_120 has: more would not run there */
    ARCH_MAJOR = 9,
    ARCH_MINOR = 0
};

thread_local cudaError_t last_error = cudaSuccess;

} /* namespace */

uint32_t number_of(const char *name, uint32_t standard)
{
    const char *text = getenv(name);
    return text && *text ? (uint32_t)strtoul(text, NULL, 10) : standard;
}

namespace
{

extern "C" void on_bad_address(int, siginfo_t *info, void *)
{
    fault("bad address %p", info->si_addr);
}

} /* namespace */

runtime &rt()
{
    static runtime *made = [] {
        runtime *r = new runtime(); /* outlives everything that may still call */
        uint32_t n = number_of("EMULATED_DEVICES", 1);
        for (uint32_t i = 0; i < n && i < EMULATED_MAX_DEVICES; i++) {
            r->devices.emplace_back(new device());
            r->devices.back()->legacy.device = (int)i;
            r->streams.push_back(&r->devices.back()->legacy);
        }
        r->memory_bytes = (size_t)number_of("EMULATED_MEMORY_MB", 65536) << 20;
        r->lazy = number_of("EMULATED_LAZY", 0) != 0;
        struct sigaction action = {};
        action.sa_sigaction = on_bad_address;
        action.sa_flags = SA_SIGINFO;
        struct sigaction old;
        if (sigaction(SIGSEGV, NULL, &old) == 0 && old.sa_handler == SIG_DFL) {
            sigaction(SIGSEGV, &action, NULL);
        }
        return r;
    }();
    return *made;
}

cudaError_t told(cudaError_t code)
{
    if (code != cudaSuccess) {
        last_error = code;
    }
    return code;
}

namespace
{

/* The allocation that all of it lies in, or NULL. */
std::pair<char *const, allocation> *allocation_of(const void *at, size_t bytes)
{
    runtime &r = rt();
    char *first = static_cast<char *>(const_cast<void *>(at));
    auto next = r.memory.upper_bound(first);
    if (next == r.memory.begin()) {
        return NULL;
    }
    --next;
    return first + bytes <= next->first + next->second.bytes ? &*next : NULL;
}

/* Part of it lies in device memory, but not all in one allocation. */
bool straddles(const void *at, size_t bytes)
{
    for (auto &item : rt().memory) {
        if (static_cast<const char *>(at) < item.first + item.second.bytes &&
            static_cast<const char *>(at) + bytes > item.first && item.second.device >= 0) {
            return !allocation_of(at, bytes);
        }
    }
    return false;
}

bool is_pageable(const void *at, size_t bytes)
{
    return !allocation_of(at, bytes);
}

/* A kernel of `device` may touch its memory alone; -1: everything. Stays until another has
 * to: to open and close costs more than a small kernel. */
void open_memory(int device)
{
    runtime &r = rt();
    device = r.peers ? -1 : device;
    if (r.devices.size() < 2 || r.open_for == device) {
        return;
    }
    r.open_for = device;
    for (auto &item : r.memory) {
        int owner = item.second.device;
        if (owner < 0) {
            continue;
        }
        bool open = device < 0 || owner == device;
        size_t bytes = (item.second.bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        mprotect(item.first, bytes, open ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
}

/* A copy may touch these (NULL: nothing). */
void open_for_copy(const void *a, const void *b)
{
    int owners[2] = {-1, -1};
    const void *const ends[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        auto *item = ends[i] ? allocation_of(ends[i], 1) : NULL;
        owners[i] = item ? item->second.device : -1;
    }
    if (owners[0] >= 0 && owners[1] >= 0 && owners[0] != owners[1]) {
        open_memory(-1);
    } else if (rt().open_for >= 0 && (owners[0] >= 0 || owners[1] >= 0)) {
        open_memory(owners[0] >= 0 ? owners[0] : owners[1]);
    }
}

} /* namespace */

void open_all_memory()
{
    open_memory(-1);
}

namespace emulate
{

/* A grid that runs while its device's others wait; under the lock. */
static void start(const launched &what, const std::function<void()> &body)
{
    CUstream_st *s = rt().stepping;
    uint64_t bit = 1ull << what.device;
    rt().running |= bit;
    s->running |= bit;
    s->kernel = what.name;
    start_grid(what, body, [=]() {
        guard hold(rt().lock);
        rt().running &= ~bit;
        s->running &= ~bit;
        s->kernel = s->running ? s->kernel : NULL;
        rt().changed.notify_all();
    });
}

cudaError_t enqueue_kernel(const void *kernel, const char *name, dim3 grid, dim3 block,
                           size_t shared_bytes, cudaStream_t stream, enum way way,
                           std::function<void()> body)
{
    guard hold(rt().lock);
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    auto limit = rt().shared_limits.find(kernel);
    size_t most = limit == rt().shared_limits.end() ? (size_t)STANDARD_SHARED_BYTES : limit->second;
    if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 ||
        grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
        return told(cudaErrorInvalidConfiguration);
    }
    if (shared_bytes > most) {
        return told(cudaErrorInvalidValue);
    }
    CUstream_st *s = stream_of(stream);
    int device = s->device;
    if (device != current_device) {
        return told(cudaErrorInvalidResourceHandle);
    }
    if (way == EARLY && !s->behind_kernel) {
        fault("%s may begin early, and what is in front of it is no kernel", name);
    }
    launched what = {name, grid, block, shared_bytes, device, way != AS_USUAL};
    operation op = {name, nullptr, nullptr};
    op.kernel_of = device;
    if (rt().peers) {
        op.run = [=]() { start(what, body); };
        op.device = device;
    } else {
        op.run = [=]() {
            open_memory(device);
            run_grid(what, body);
        };
    }
    if (way == EARLY && !rt().peers) {
        op.begin = [=]() { return begin_grid(what, body); };
    }
    push(s, op);
    return cudaSuccess;
}

const char *name_of(const void *kernel, const char *name)
{
    static std::map<const void *, const char *> names;
    guard hold(rt().lock);
    const char *&known = names[kernel];
    known = known ? known : name;
    return known ? known : "a kernel";
}

void enqueue(cudaStream_t stream, const char *name, std::function<bool()> ready,
             std::function<void()> run)
{
    guard hold(rt().lock);
    push(stream_of(stream), {name, std::move(ready), std::move(run)});
}

} /* namespace emulate */

extern "C" {

/* --- errors */

cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorString(cudaError_t code)
{
    switch (code) {
    case cudaErrorPeerAccessUnsupported:
        return "peer access is not supported between these two devices";
    case cudaSuccess:
        return "no error";
    case cudaErrorInvalidValue:
        return "invalid argument";
    case cudaErrorMemoryAllocation:
        return "out of memory";
    case cudaErrorInvalidConfiguration:
        return "invalid configuration argument";
    case cudaErrorInvalidDevice:
        return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
        return "invalid resource handle";
    case cudaErrorNotReady:
        return "device not ready";
    case cudaErrorStreamCaptureUnsupported:
        return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
        return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
        return "capture has streams that were not joined";
    default:
        return "another error of the emulated runtime";
    }
}

/* --- devices */

cudaError_t cudaGetDeviceCount(int *n)
{
    *n = (int)rt().devices.size();
    return *n ? cudaSuccess : told(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || (size_t)device >= rt().devices.size()) {
        return told(cudaErrorInvalidDevice);
    }
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = rt().devices.empty() ? 0 : CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    if (device < 0 || (size_t)device >= rt().devices.size()) {
        return told(cudaErrorInvalidDevice);
    }
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = ARCH_MAJOR;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = ARCH_MINOR;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = (int)number_of("EMULATED_SMS", 4);
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = MAX_SHARED_BYTES;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = STANDARD_SHARED_BYTES;
        break;
    case cudaDevAttrCooperativeLaunch:
        *value = 1;
        break;
    default:
        *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    if (device < 0 || (size_t)device >= rt().devices.size()) {
        return told(cudaErrorInvalidDevice);
    }
    memset(prop, 0, sizeof(*prop));
    snprintf(prop->name, sizeof(prop->name), "emulated");
    prop->major = ARCH_MAJOR;
    prop->minor = ARCH_MINOR;
    prop->multiProcessorCount = (int)number_of("EMULATED_SMS", 4);
    prop->totalGlobalMem = rt().memory_bytes;
    prop->sharedMemPerBlockOptin = MAX_SHARED_BYTES;
    prop->sharedMemPerBlock = STANDARD_SHARED_BYTES;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    *can = device != peer && !number_of("EMULATED_NO_PEERS", 0);
    return cudaSuccess;
}

/* Of all devices at once. */
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned)
{
    guard hold(rt().lock);
    int can = 0;
    (void)cudaDeviceCanAccessPeer(&can, current_device, peer);
    if (!can) {
        return told(cudaErrorPeerAccessUnsupported);
    }
    rt().peers = true;
    open_memory(-1);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    if (refuse_in_capture() != cudaSuccess) {
        return cudaErrorStreamCaptureUnsupported;
    }
    wait_until([] {
        for (CUstream_st *s : rt().streams) {
            if (s->device == current_device && !is_idle(s)) {
                return false;
            }
        }
        return true;
    });
    return cudaSuccess;
}

/* --- memory */

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes)
{
    guard hold(rt().lock);
    *all_bytes = rt().memory_bytes;
    *free_bytes = rt().memory_bytes - rt().devices[(size_t)current_device]->used;
    return cudaSuccess;
}

/* Fresh memory is 0xff, as far as it is not large, and ends in a page that nobody may touch. */
static char *fresh(size_t bytes)
{
    size_t pages = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    void *memory = mmap(NULL, pages + PAGE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        return NULL;
    }
    mprotect(static_cast<char *>(memory) + pages, PAGE_BYTES, PROT_NONE);
    memset(memory, 0xff, bytes < POISON_BYTES ? bytes : (size_t)POISON_BYTES);
    return static_cast<char *>(memory);
}

static void gone(char *memory, size_t bytes)
{
    munmap(memory, (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES);
}

cudaError_t cudaMalloc(void **ret, size_t bytes)
{
    guard hold(rt().lock);
    if (refuse_in_capture() != cudaSuccess) {
        return cudaErrorStreamCaptureUnsupported;
    }
    if (rt().devices.empty()) {
        return told(cudaErrorNoDevice);
    }
    device &d = *rt().devices[(size_t)current_device];
    char *memory = bytes <= rt().memory_bytes - d.used ? fresh(bytes) : NULL;
    if (!memory) {
        return told(cudaErrorMemoryAllocation);
    }
    d.used += bytes;
    rt().memory[memory] = {bytes, current_device, false};
    *ret = memory;
    return cudaSuccess;
}

cudaError_t cudaFree(void *memory)
{
    if (!memory) {
        return cudaSuccess;
    }
    cudaDeviceSynchronize();
    guard hold(rt().lock);
    auto item = rt().memory.find(static_cast<char *>(memory));
    if (item == rt().memory.end() || item->second.device < 0) {
        return told(cudaErrorInvalidValue);
    }
    rt().devices[(size_t)item->second.device]->used -= item->second.bytes;
    gone(item->first, item->second.bytes);
    rt().memory.erase(item);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **ret, size_t bytes, unsigned)
{
    guard hold(rt().lock);
    if (refuse_in_capture() != cudaSuccess) {
        return cudaErrorStreamCaptureUnsupported;
    }
    char *memory = fresh(bytes);
    if (!memory) {
        return told(cudaErrorMemoryAllocation);
    }
    rt().memory[memory] = {bytes, -1, false};
    *ret = memory;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *memory)
{
    if (!memory) {
        return cudaSuccess;
    }
    cudaDeviceSynchronize();
    guard hold(rt().lock);
    auto item = rt().memory.find(static_cast<char *>(memory));
    if (item == rt().memory.end() || item->second.device >= 0 || item->second.registered) {
        return told(cudaErrorInvalidValue);
    }
    gone(item->first, item->second.bytes);
    rt().memory.erase(item);
    return cudaSuccess;
}

/* All memory here is the host's, and so it is to whoever asks: UCX, which moves it between
 * processes.
 */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *ret, const void *memory)
{
    guard hold(rt().lock);
    auto *item = allocation_of(memory, 1);
    *ret = {};
    ret->type = item ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    ret->device = item && item->second.device >= 0 ? item->second.device : 0;
    ret->devicePointer = ret->hostPointer = const_cast<void *>(memory);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned)
{
    guard hold(rt().lock);
    if (allocation_of(memory, 1)) {
        return told(cudaErrorHostMemoryAlreadyRegistered);
    }
    rt().memory[static_cast<char *>(memory)] = {bytes, -1, true};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *memory)
{
    guard hold(rt().lock);
    auto item = rt().memory.find(static_cast<char *>(memory));
    if (item == rt().memory.end() || !item->second.registered) {
        return told(cudaErrorHostMemoryNotRegistered);
    }
    rt().memory.erase(item);
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **ret, void *host, unsigned)
{
    guard hold(rt().lock);
    auto *item = allocation_of(host, 1);
    if (!item || item->second.device >= 0) {
        return told(cudaErrorInvalidValue);
    }
    *ret = host;
    return cudaSuccess;
}

static cudaError_t copy_async(void *dst, const void *src, size_t bytes, CUstream_st *s, bool waits)
{
    {
        guard hold(rt().lock);
        if (bytes == 0) {
            return cudaSuccess;
        }
        if (straddles(dst, bytes) || straddles(src, bytes)) {
            return told(cudaErrorInvalidValue);
        }
        bool from_pageable = is_pageable(src, bytes), to_pageable = is_pageable(dst, bytes);
        if (s->capture) {
            if (from_pageable || to_pageable) {
                s->capture->broken = true;
                return told(cudaErrorStreamCaptureUnsupported);
            }
        }
        if (from_pageable && !waits) { /* read before the call returns, written later */
            auto kept = std::make_shared<std::vector<char>>(static_cast<const char *>(src),
                                                            static_cast<const char *>(src) + bytes);
            push(s, {"a copy", nullptr, [=]() {
                         open_for_copy(dst, NULL);
                         memcpy(dst, kept->data(), bytes);
                     }});
        } else {
            push(s, {"a copy", nullptr, [=]() {
                         open_for_copy(dst, src);
                         memmove(dst, src, bytes);
                     }});
        }
        waits = waits || to_pageable;
    }
    return waits ? cudaStreamSynchronize(s) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind,
                            cudaStream_t stream)
{
    return copy_async(dst, src, bytes, stream_of(stream), false);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind)
{
    return copy_async(dst, src, bytes, stream_of(NULL), true);
}

/* Large zeroes are given back to the system, which has more memory than there is. */
static void fill(void *dst, int byte, size_t bytes)
{
    auto *item = allocation_of(dst, bytes);
    char *first = static_cast<char *>(dst);
    size_t skew = (PAGE_BYTES - (uintptr_t)first % PAGE_BYTES) % PAGE_BYTES;
    if (byte == 0 && bytes > POISON_BYTES / 2 && item && !item->second.registered) {
        size_t inner = (bytes - skew) / PAGE_BYTES * PAGE_BYTES;
        memset(first, 0, skew);
        madvise(first + skew, inner, MADV_DONTNEED);
        memset(first + skew + inner, 0, bytes - skew - inner);
        return;
    }
    memset(dst, byte, bytes);
}

cudaError_t cudaMemsetAsync(void *dst, int byte, size_t bytes, cudaStream_t stream)
{
    guard hold(rt().lock);
    if (bytes == 0) {
        return cudaSuccess;
    }
    if (is_pageable(dst, bytes)) {
        return told(cudaErrorInvalidValue);
    }
    push(stream_of(stream), {"a fill", nullptr, [=]() {
                                 open_for_copy(dst, NULL);
                                 fill(dst, byte, bytes);
                             }});
    return cudaSuccess;
}

cudaError_t cudaMemset(void *dst, int byte, size_t bytes)
{
    cudaError_t code = cudaMemsetAsync(dst, byte, bytes, NULL);
    return code == cudaSuccess ? cudaStreamSynchronize(NULL) : code;
}

/* --- kernels */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *ret, const void *)
{
    memset(ret, 0, sizeof(*ret));
    return cudaSuccess;
}

/* A host thread runs one block at a time. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *ret_n, const void *, int, size_t)
{
    *ret_n = 1;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    guard hold(rt().lock);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || value > MAX_SHARED_BYTES) {
            return told(cudaErrorInvalidValue);
        }
        rt().shared_limits[kernel] = (size_t)value;
    }
    return cudaSuccess;
}

} /* extern "C" */
