/* See nccl.h. */
#include "kernels/cuda/nccl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#if BATON_NCCL

enum { LEAST_VERSION = 21400 }; /* the first whose communicators need not block */

struct nccl nccl;

/* A test's library is linked in; else that of the host, then that of the build's toolkit. */
#if BATON_NCCL_LINKED
#define FIND(library, to, name) ((to) = (name), true)
static void *load(struct error *err)
{
    return &nccl;
}
#else
static void *symbol(void *library, const char *name)
{
    return dlsym(library, name);
}
#define FIND(library, to, name) (*(void **)(void *)&(to) = symbol((library), #name), (to) != NULL)
static void *load(struct error *err)
{
    static const char *const names[] = {"libnccl.so.2", BATON_NCCL_FILE};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library) {
            return library;
        }
    }
    (void)error_set(err, STATUS_UNSUPPORTED,
                    "sums between GPUs go over NCCL, which this host lacks: %.200s; one GPU, "
                    "cuda:N, needs none",
                    dlerror());
    return NULL;
}
#endif

static bool bind(void *library)
{
    return FIND(library, nccl.version, ncclGetVersion) &&
           FIND(library, nccl.unique_id, ncclGetUniqueId) &&
           FIND(library, nccl.init, ncclCommInitRankConfig) &&
           FIND(library, nccl.async_error, ncclCommGetAsyncError) &&
           FIND(library, nccl.all_gather, ncclAllGather) &&
           FIND(library, nccl.group_start, ncclGroupStart) &&
           FIND(library, nccl.group_end, ncclGroupEnd) &&
           FIND(library, nccl.abort, ncclCommAbort) &&
           FIND(library, nccl.destroy, ncclCommDestroy) &&
           FIND(library, nccl.error_text, ncclGetErrorString);
}

enum status device_find_nccl(int *ret_version, struct error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *library;
    int version = 0;
    enum status status = STATUS_OK;
    pthread_mutex_lock(&lock);
    void *loaded = library ? library : load(err);
    if (!loaded) {
        status = STATUS_UNSUPPORTED;
    } else if (!library && !bind(loaded)) {
        status = error_set(err, STATUS_UNSUPPORTED,
                           "the NCCL of this host lacks functions that sums between GPUs need; "
                           "one GPU, cuda:N, needs none");
    } else {
        library = loaded;
    }
    if (!status && (nccl.version(&version) != ncclSuccess || version < LEAST_VERSION)) {
        status = error_set(err, STATUS_UNSUPPORTED,
                           "the NCCL of this host has the version code %d, and sums between GPUs "
                           "need %d (2.14) at least; one GPU, cuda:N, needs none",
                           version, LEAST_VERSION);
    }
    pthread_mutex_unlock(&lock);
    if (!status && ret_version) {
        *ret_version = version;
    }
    return status;
}

#else

enum status device_find_nccl(int *ret_version, struct error *err)
{
    return error_set(err, STATUS_UNSUPPORTED,
                     "sums between GPUs go over NCCL, which this build was made without: it found "
                     "no nccl.h, see the build option gpu_toolkit; one GPU, cuda:N, needs none");
}

#endif
