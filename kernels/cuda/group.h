/* kernels/cuda/group.h - devices that sum their parts: how they are joined, and what watches them.
 *
 * Of ranks on one GPU comm.cu reads every part where it lies; ranks on a GPU each have an NCCL
 * communicator. Which of the two a group is, cuda_join decides, and nothing else. Either has a
 * watch, a thread that sees whether the group gets on. Thread: the one that computes, but for the
 * watch's own.
 */
#ifndef BATON_KERNELS_CUDA_GROUP_H
#define BATON_KERNELS_CUDA_GROUP_H

#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CUDA_MAX_GROUP = 16,
    CUDA_PUSH_ROWS = 64 /* most rows that are pushed: more take longer than NCCL's start */
};

/* See `join` in kernels/ops.h. Without a GPU, of devices that are only planned with, it counts.
 * The second is for cuda_comm_push: each GPU must reach the others' memory, else UNSUPPORTED. */
must_check enum status cuda_join(struct ops_device *const *devices, uint32_t n, struct error *err);
must_check enum status cuda_join_push(struct ops_device *const *devices, uint32_t n,
                                      struct error *err);

/* Every rank's `count` floats y[rank] behind each other into its gathered room, in its stream.
 * False: the group failed, now or before, and nothing may be asked of it. */
bool cuda_group_gather(struct cuda_group *group, float *const *y, size_t count);
/* What comes before any sum of a group: notes where each rank comes to it. In a call that is
 * recorded the rank itself must do so: it writes ret_came_to to cuda_group_came, which is 0 where
 * nothing has to be written. False as above. */
bool cuda_group_next(struct cuda_group *group, bool writes_itself, uint32_t *ret_came_to);
volatile uint32_t *cuda_group_came(struct cuda_group *group, uint32_t rank);
/* Whether ranks write into each other's memory, in places for so many pairs of floats each; and
 * what ends those that wait there, once it is not 0. */
bool cuda_group_pushes(const struct cuda_group *group);
size_t cuda_push_pairs(const struct ops_device *dev);
const volatile uint32_t *cuda_group_stop(const struct cuda_group *group);
/* Whether its ranks have a GPU each, and so must gather their parts. */
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
