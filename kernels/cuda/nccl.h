/* kernels/cuda/nccl.h - the library that sums between GPUs go over, found at build and at run time.
 *
 * A build that met nccl.h knows how to call it; the library itself, which is larger than all of
 * this project, is loaded when a group of several GPUs is asked for, so that a node without one
 * neither needs nor pays for it. Thread: any.
 */
#ifndef BATON_KERNELS_CUDA_NCCL_H
#define BATON_KERNELS_CUDA_NCCL_H

#include "kernels/cuda/device.h"

#ifndef BATON_NCCL
#define BATON_NCCL 0 /* the build met no nccl.h */
#endif
#ifndef BATON_NCCL_LINKED
#define BATON_NCCL_LINKED 0 /* 1: a test's library is part of the program */
#endif

#if BATON_NCCL
#include <nccl.h>

/* The functions that are used; filled by device_find_nccl. */
struct nccl {
    ncclResult_t (*version)(int *ret_version);
    ncclResult_t (*unique_id)(ncclUniqueId *ret_id);
    ncclResult_t (*init)(ncclComm_t *ret_comm, int n_ranks, ncclUniqueId id, int rank,
                         ncclConfig_t *config);
    ncclResult_t (*async_error)(ncclComm_t comm, ncclResult_t *ret_code);
    ncclResult_t (*all_gather)(const void *part, void *ret_all, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    ncclResult_t (*abort)(ncclComm_t comm);
    ncclResult_t (*destroy)(ncclComm_t comm);
    const char *(*error_text)(ncclResult_t code);
};
extern struct nccl nccl;
#endif

#endif
