/* kernels/cuda/parcel.h - the copy-and-checksum pass of the hand-off on a device.
 *
 * The same sum as kernels/parcel.h, whose contract this is held to: what is summed is what was
 * stored. `src` may be device memory, a peer's, or pinned host memory.
 */
#ifndef BATON_KERNELS_CUDA_PARCEL_H
#define BATON_KERNELS_CUDA_PARCEL_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/parcel.h"

#ifdef __cplusplus
extern "C" {
#endif

struct parcel_piece_device {
    void *dst;
    const void *src; /* may be dst: then it is summed where it lies */
    uint64_t bytes;  /* a multiple of 8, as the addresses are; of 16, and all three: faster */
    uint64_t first_word;
};

/* Enqueues on `stream` (a cudaStream_t) one launch over n_pieces pieces. `pieces` is
 * device-readable; the two lanes are added to sums[0..1] (device memory, zeroed by the caller on
 * the same stream). Never synchronises. SYSTEM: the launch was refused. */
must_check enum status parcel_copy_sum_launch(const struct parcel_key *key,
                                              const struct parcel_piece_device *pieces,
                                              uint32_t n_pieces, uint64_t *sums, void *stream);

#ifdef __cplusplus
}
#endif

#endif
