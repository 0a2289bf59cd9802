/* See device.h. The only file, with backend.c, that speaks to the CUDA runtime from C. */
#include "kernels/cuda/device.h"

#include <cuda_runtime_api.h>
#include <stdio.h>

#include "kernels/cuda/cuda.h"

static enum status from_cuda(cudaError_t code, const char *what, struct error *err)
{
    if (code == cudaSuccess) {
        return STATUS_OK;
    }
    (void)cudaGetLastError();
    return error_set(err, code == cudaErrorMemoryAllocation ? STATUS_EXHAUSTED : STATUS_SYSTEM,
                     "%s: %s", what, cudaGetErrorString(code));
}

int device_count(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    return n;
}

enum status device_probe(uint32_t device_i, struct error *err)
{
    int n = 0, driver = 0;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
            return error_set(err, STATUS_UNSUPPORTED,
                             "device 'cuda:%u': no CUDA device can be used: this host has no "
                             "NVIDIA driver",
                             device_i);
        }
        return error_set(err, STATUS_UNSUPPORTED,
                         "device 'cuda:%u': no CUDA device can be used: %s", device_i,
                         cudaGetErrorString(code));
    }
    if (device_i >= (uint32_t)n) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "device 'cuda:%u': this host has %d CUDA device%s, numbered from 0",
                         device_i, n, n == 1 ? "" : "s");
    }
    struct cudaDeviceProp prop;
    code = cudaSetDevice((int)device_i);
    code = code == cudaSuccess ? cudaGetDeviceProperties(&prop, (int)device_i) : code;
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return error_set(err, STATUS_SYSTEM, "device 'cuda:%u': %s", device_i,
                         cudaGetErrorString(code));
    }
    if (cuda_has_code() != cudaSuccess) {
        (void)cudaGetLastError();
        return error_set(err, STATUS_UNSUPPORTED,
                         "device 'cuda:%u': this build has no code for %s (sm_%d%d); see the "
                         "build option gpu_archs",
                         device_i, prop.name, prop.major, prop.minor);
    }
    return STATUS_OK;
}

enum status device_shape(uint32_t device_i, uint32_t *ret_arch, size_t *ret_shared_bytes,
                         size_t *ret_free_bytes, struct error *err)
{
    int major = 0, minor = 0, shared = 0, i = (int)device_i;
    cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, i);
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, i);
    }
    if (code == cudaSuccess) {
        code = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, i);
    }
    if (code != cudaSuccess) {
        return from_cuda(code, "what the device has", err);
    }
    size_t free_bytes = 0, all_bytes = 0;
    code = cudaMemGetInfo(&free_bytes, &all_bytes);
    if (code != cudaSuccess) {
        return from_cuda(code, "how much memory is free", err);
    }
    *ret_arch = (uint32_t)(10 * major + minor);
    *ret_shared_bytes = (size_t)shared;
    *ret_free_bytes = free_bytes;
    return STATUS_OK;
}

enum status device_select(int device_i, char *ret_text, size_t text_bytes, struct error *err)
{
    struct cudaDeviceProp prop;
    enum status status = from_cuda(cudaSetDevice(device_i), "cudaSetDevice", err);
    if (!status) {
        status =
            from_cuda(cudaGetDeviceProperties(&prop, device_i), "cudaGetDeviceProperties", err);
    }
    if (!status) {
        snprintf(ret_text, text_bytes, "%s, sm_%d%d, %d SMs, %zu GiB", prop.name, prop.major,
                 prop.minor, prop.multiProcessorCount, prop.totalGlobalMem >> 30);
    }
    return status;
}

enum status device_alloc(size_t bytes, void **ret_memory, struct error *err)
{
    void *memory = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    enum status status = from_cuda(cudaMalloc(&memory, bytes), "cudaMalloc", err);
    if (status == STATUS_EXHAUSTED && cudaMemGetInfo(&free_bytes, &all_bytes) == cudaSuccess) {
        return error_set(err, status, "device memory: %zu MiB wanted, %zu of %zu MiB free",
                         bytes >> 20, free_bytes >> 20, all_bytes >> 20);
    }
    if (!status) {
        *ret_memory = memory;
    }
    return status;
}

void device_free(void *memory)
{
    if (memory && cudaFree(memory) != cudaSuccess) {
        (void)cudaGetLastError();
    }
}

bool device_memory_is_cuda(const void *memory)
{
    struct cudaPointerAttributes attributes;
    bool known = cudaPointerGetAttributes(&attributes, memory) == cudaSuccess;
    (void)cudaGetLastError();
    return known && attributes.type == cudaMemoryTypeDevice;
}

enum status device_pin(void *memory, size_t bytes, struct error *err)
{
    cudaError_t code = cudaHostRegister(memory, bytes, cudaHostRegisterMapped);
    if (code == cudaErrorHostMemoryAlreadyRegistered) { /* by a UCX with CUDA, as a rule */
        (void)cudaGetLastError();
        return STATUS_OK;
    }
    return from_cuda(code, "pinning", err);
}

void device_unpin(void *memory)
{
    if (cudaHostUnregister(memory) != cudaSuccess) {
        (void)cudaGetLastError();
    }
}

enum status device_copy(void *dst, const void *src, size_t bytes, void *stream)
{
    return from_cuda(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream), "copy", NULL);
}

enum status device_fill(void *dst, int byte, size_t bytes, void *stream)
{
    return from_cuda(cudaMemsetAsync(dst, byte, bytes, stream), "fill", NULL);
}

enum status device_wait(void *stream, struct error *err)
{
    return from_cuda(cudaStreamSynchronize(stream), "device", err);
}

enum status device_time(void (*run)(void *cookie, void *stream), void *cookie, int n, float *ret_ms,
                        struct error *err)
{
    cudaEvent_t begin, end;
    enum status status = from_cuda(cudaEventCreate(&begin), "event", err);
    if (status) {
        return status;
    }
    status = from_cuda(cudaEventCreate(&end), "event", err);
    if (status) {
        goto destroy_begin;
    }
    status = from_cuda(cudaEventRecord(begin, NULL), "event", err);
    for (int i = 0; !status && i < n; i++) {
        run(cookie, NULL);
    }
    if (!status) {
        status = from_cuda(cudaEventRecord(end, NULL), "event", err);
    }
    if (!status) {
        status = from_cuda(cudaEventSynchronize(end), "event", err);
    }
    float ms = 0;
    if (!status) {
        status = from_cuda(cudaEventElapsedTime(&ms, begin, end), "event", err);
    }
    if (!status) {
        *ret_ms = ms;
    }
    (void)cudaEventDestroy(end);
destroy_begin:
    (void)cudaEventDestroy(begin);
    return status;
}
