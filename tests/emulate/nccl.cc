/* The functions of NCCL that kernels/cuda/nccl.h names, for emulated devices.
 *
 * As the real ones do for one thread and communicators that don't block: what a group of calls asks
 * for is said to be in progress and done soon after; an operation waits in its stream until the
 * streams of all ranks have come to theirs, and then moves everyone's data at once. Data goes from
 * device to device without peer access, as NCCL's goes through the host's memory then.
 */
#include <map>
#include <memory>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <nccl.h>

#include "tests/emulate/runtime.h"

using emulate::fault;

namespace
{

enum { N_IN_PROGRESS = 3 }; /* answers before one that all is done */

struct gather {
    size_t count = 0, n_posted = 0;
    std::vector<const float *> from;
    std::vector<float *> to;
    std::vector<char> is_waiting, is_moved; /* the rank's stream came to it; and may go on */
};

struct clique {
    int n = 0;
    std::vector<ncclComm_t> comms; /* NULL: that rank has not come yet */
    std::vector<std::shared_ptr<gather>> gathers;
    bool aborted = false;
};

struct call {
    ncclComm_t comm;
    const void *from;
    void *to;
    size_t count;
    cudaStream_t stream;
};

} /* namespace */

struct ncclComm {
    std::shared_ptr<clique> all;
    int rank, device;
    size_t n_calls = 0;
    int n_in_progress = 0;
    bool hangs = false;
};

namespace
{

std::recursive_mutex lock;
std::map<uint64_t, std::shared_ptr<clique>> cliques;
std::vector<ncclComm_t> everyone;
uint64_t last_id = 0;
thread_local int depth = 0;
thread_local std::vector<call> calls;

bool all_of(const std::vector<char> &flags)
{
    for (char flag : flags) {
        if (!flag) {
            return false;
        }
    }
    return true;
}

bool none_of(const std::vector<char> &flags)
{
    for (char flag : flags) {
        if (flag) {
            return false;
        }
    }
    return true;
}

void move(const clique &all, const gather &g)
{
    open_all_memory();
    for (int k = 0; k < all.n; k++) {
        for (int j = 0; j < all.n; j++) {
            memcpy(g.to[(size_t)k] + (size_t)j * g.count, g.from[(size_t)j],
                   g.count * sizeof(float));
        }
    }
}

/* A rank's stream is at it; whether it may go on. */
bool come(clique &all, gather &g, int rank)
{
    guard hold(lock);
    if (all.aborted) {
        return true;
    }
    g.is_waiting[(size_t)rank] = true;
    if (all_of(g.is_waiting) && none_of(g.is_moved)) {
        move(all, g);
        g.is_moved.assign((size_t)all.n, true);
    }
    return g.is_moved[(size_t)rank];
}

/* EMULATED_NCCL_HANG=RANK@N: that rank posts N operations and no more. */
bool hangs_by_environment(int rank, size_t n_posted)
{
    const char *text = getenv("EMULATED_NCCL_HANG");
    int hung = 0;
    size_t n = 0;
    return text && sscanf(text, "%d@%zu", &hung, &n) == 2 && rank == hung && n_posted >= n;
}

void post(const call &c)
{
    std::shared_ptr<clique> all = c.comm->all;
    size_t i = c.comm->n_calls++, rank = (size_t)c.comm->rank;
    if (i == all->gathers.size()) {
        std::shared_ptr<gather> made = std::make_shared<gather>();
        made->count = c.count;
        made->from.resize((size_t)all->n);
        made->to.resize((size_t)all->n);
        made->is_waiting.resize((size_t)all->n);
        made->is_moved.resize((size_t)all->n);
        all->gathers.push_back(made);
    }
    std::shared_ptr<gather> g = all->gathers[i];
    if (g->count != c.count) {
        fault("NCCL: rank %d gathers %zu floats, another %zu", c.comm->rank, c.count, g->count);
    }
    g->from[rank] = static_cast<const float *>(c.from);
    g->to[rank] = static_cast<float *>(c.to);
    c.comm->hangs = c.comm->hangs || hangs_by_environment(c.comm->rank, i);
    bool hangs = c.comm->hangs;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(c.stream, &capture);
    g->n_posted++;
    if (capture != cudaStreamCaptureStatusNone) {
        /* An emulated graph is one queue, of what was asked for in order: all ranks' parts are
         * there once the last of them has come. */
        if (g->n_posted == (size_t)all->n) {
            emulate::enqueue(
                c.stream, "ncclAllGather", [=]() { return !hangs || all->aborted; },
                [=]() { move(*all, *g); });
        }
        return;
    }
    emulate::enqueue(
        c.stream, "ncclAllGather",
        [=]() { return hangs ? all->aborted : come(*all, *g, (int)rank); },
        [=]() {
            guard hold(lock);
            g->is_waiting[rank] = g->is_moved[rank] = false;
        });
}

} /* namespace */

extern "C" {

/* From now on this rank's operations never begin. */
void emulated_nccl_hang(int rank)
{
    guard hold(lock);
    for (ncclComm_t comm : everyone) {
        comm->hangs = comm->hangs || comm->rank == rank;
    }
}

/* A kernel that never ends. */
void emulated_stream_hang(cudaStream_t stream)
{
    emulate::enqueue(
        stream, "a hang", []() { return false; }, []() {});
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    guard hold(lock);
    memset(id, 0, sizeof(*id));
    last_id++;
    memcpy(id, &last_id, sizeof(last_id));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *ret, int n, ncclUniqueId id, int rank,
                                    ncclConfig_t *config)
{
    guard hold(lock);
    uint64_t key;
    int device = -1;
    memcpy(&key, &id, sizeof(key));
    if (depth == 0 || !config || config->blocking != 0 || rank < 0 || rank >= n ||
        cudaGetDevice(&device) != cudaSuccess) {
        return ncclInvalidArgument;
    }
    std::shared_ptr<clique> &all = cliques[key];
    if (!all) {
        all = std::make_shared<clique>();
        all->n = n;
        all->comms.resize((size_t)n);
    }
    for (ncclComm_t other : all->comms) {
        if (other && (other->device == device || other->rank == rank)) {
            return ncclInvalidUsage; /* a GPU twice */
        }
    }
    *ret = all->comms[(size_t)rank] = new ncclComm();
    (*ret)->all = all;
    (*ret)->rank = rank;
    (*ret)->device = device;
    (*ret)->n_in_progress = N_IN_PROGRESS;
    everyone.push_back(*ret);
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *ret)
{
    guard hold(lock);
    bool all_here = true;
    for (ncclComm_t other : comm->all->comms) {
        all_here = all_here && other;
    }
    if (comm->n_in_progress > 0) {
        comm->n_in_progress--;
    }
    *ret = all_here && comm->n_in_progress == 0 ? ncclSuccess : ncclInProgress;
    return ncclSuccess;
}

/* A thread that has several ranks posts them as one group, or waits for itself. */
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream)
{
    if (depth == 0 || type != ncclFloat32 || comm->n_in_progress > 0) {
        return ncclInvalidUsage;
    }
    calls.push_back({comm, from, to, count, stream});
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (depth == 0) {
        return ncclInvalidUsage;
    }
    if (--depth > 0) {
        return ncclSuccess;
    }
    for (const call &c : calls) {
        post(c);
        guard hold(lock);
        c.comm->n_in_progress = N_IN_PROGRESS;
    }
    calls.clear();
    return ncclInProgress;
}

static ncclResult_t end(ncclComm_t comm, bool aborts)
{
    guard hold(lock);
    comm->all->aborted = comm->all->aborted || aborts;
    for (size_t i = 0; i < everyone.size(); i++) {
        if (everyone[i] == comm) {
            everyone.erase(everyone.begin() + (ptrdiff_t)i);
            delete comm;
            return ncclSuccess;
        }
    }
    return ncclInvalidArgument;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    return end(comm, true);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    return end(comm, false);
}

const char *ncclGetErrorString(ncclResult_t code)
{
    switch (code) {
    case ncclSuccess:
        return "no error";
    case ncclInProgress:
        return "operation in progress";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclInvalidArgument:
        return "invalid argument";
    default:
        return "some error";
    }
}

} /* extern "C" */
