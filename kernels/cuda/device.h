/* kernels/cuda/device.h - devices, their memory and streams, as the rest of the code may see them.
 *
 * CUDA's codes become enum status here, and a sticky error is cleared where it is turned. Thread:
 * one per device; a handle is not shared. What is NULL-safe says so.
 */
#ifndef BATON_KERNELS_CUDA_DEVICE_H
#define BATON_KERNELS_CUDA_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Devices that can be used now; 0 where there is no driver. */
int device_count(void);
/* Whether the model's operations run on device `device_i`, which becomes the calling thread's.
 * UNSUPPORTED: no driver, no such device, or no code for its architecture; SYSTEM: it refuses. */
must_check enum status device_probe(uint32_t device_i, struct error *err);
/* What the needs of variants and models are held against: 90 for sm_90, the shared memory that a
 * block can have at most, and the memory that is free now on device_i, which must have been probed
 * by this thread. SYSTEM. */
must_check enum status device_shape(uint32_t device_i, uint32_t *ret_arch, size_t *ret_shared_bytes,
                                    size_t *ret_free_bytes, struct error *err);
/* What sums between GPUs go over (nccl.h), loaded by the first call; ret_version (may be NULL) as
 * 22809 for 2.28.9. Any thread. UNSUPPORTED: the build had no nccl.h, or this host has no such
 * library, or one that is too old. */
must_check enum status device_find_nccl(int *ret_version, struct error *err);
/* Makes `device_i` the calling thread's device and describes it, e.g. "NVIDIA H200, sm_90, 132 SMs,
 * 139 GiB". */
must_check enum status device_select(int device_i, char *ret_text, size_t text_bytes,
                                     struct error *err);
/* Device memory; EXHAUSTED says how much was free. device_free(NULL) is fine. */
must_check enum status device_alloc(size_t bytes, void **ret_memory, struct error *err);
void device_free(void *memory);
/* Whether others, a transport for one, must take it for CUDA memory. */
bool device_memory_is_cuda(const void *memory);
/* Host memory becomes the device's to read at its own address, if it isn't yet, or no more so. */
must_check enum status device_pin(void *memory, size_t bytes, struct error *err);
void device_unpin(void *memory);
/* Between host and device or device and device, in the order of `stream` (NULL: the default one).
 */
must_check enum status device_copy(void *dst, const void *src, size_t bytes, void *stream);
must_check enum status device_fill(void *dst, int byte, size_t bytes, void *stream);
/* Waits for everything on `stream`: at start and in tests, never inside a step. */
must_check enum status device_wait(void *stream, struct error *err);
/* Milliseconds that `n` calls of run(cookie, stream) took on the device, by events. */
must_check enum status device_time(void (*run)(void *cookie, void *stream), void *cookie, int n,
                                   float *ret_ms, struct error *err);

#endif
