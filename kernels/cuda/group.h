/* kernels/cuda/group.h - devices that sum their parts: how they are joined, and what watches them.
 *
 * Ranks on one GPU need nothing: comm.cu reads every part where it lies. Ranks on a GPU each have
 * an NCCL communicator and a watch, a thread that sees whether the group gets on. Which of the two
 * a group is, cuda_join decides, and nothing else. Thread: the one that computes, but for the
 * watch's own.
 */
#ifndef BATON_KERNELS_CUDA_GROUP_H
#define BATON_KERNELS_CUDA_GROUP_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { CUDA_MAX_GROUP = 16 };

/* See `join` in kernels/ops.h. Without a GPU, of devices that are only planned with, it counts. */
must_check enum status cuda_join(struct ops_device *const *devices, uint32_t n, struct error *err);

/* Every rank's `count` floats y[rank] behind each other into its gathered room, in its stream.
 * False: the group failed, now or before, and nothing may be asked of it. */
bool cuda_group_gather(struct cuda_group *group, float *const *y, size_t count);
/* Of ranks on a GPU each: what cuda_group_gather fills, of CUDA_MAX_GROUP times the largest call;
 * and two counters of the sums that a rank has passed, its own and the one that the watch reads. */
bool cuda_group_has_parts(const struct cuda_group *group);

/* A call begins; one begins that is only recorded; it is over. `end` keeps a failure of the group
 * as the device's. */
void cuda_group_begin(struct ops_device *dev);
void cuda_group_record(struct ops_device *dev);
void cuda_group_end(struct ops_device *dev);

/* First and last of a device's close. */
void cuda_group_leave(struct ops_device *dev);
void cuda_group_left(struct cuda_group *group);

#ifdef __cplusplus
}
#endif

#endif
