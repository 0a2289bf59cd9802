/* Calls that are kept: one CUDA graph each, captured from the streams that the operations launch
 * on.
 *
 * What a graph is bound to. A launch keeps its grid and its arguments, so these may follow from the
 * numbers of rows and sequences and from what the device was opened with, and from nothing else:
 * not from positions, pages or slots. So it is throughout: what depends on those is read from the
 * image of the rows, which lies at one address (backend.c), grids are those of the longest context,
 * and a block without work ends. The image is sent ahead of the graph and not by it: a copy's
 * length follows the pages in use, where a node of the graph would send room for the longest
 * context each time, and the pinned buffers keep taking turns. A buffer is written again only once
 * the event behind its last copy has passed, however many replays are queued; and the image in
 * device memory is overwritten in the stream's order, behind the replay that reads it.
 *
 * A group's streams become one graph: the first device's stream is captured, the others join it
 * through an event and end in it, and the events of `comm` become edges. The graph is launched into
 * the first one's stream, between two pairs of events that keep the others' order.
 *
 * While a graph runs the host hears nothing of it but a word of pinned memory, which small kernels
 * of the graph write (record_progress). Who waits looks at the word and at the stream in turn: a
 * cudaStreamSynchronize could not be left when a device hangs.
 *
 * Who asks for the next replay before this one is done waits for an event behind this one alone
 * (fences): the stream is not through then. The word may be the next one's by that time, which
 * shows as well that something moves.
 */
#include <sched.h>
#include <string.h>

#include "base/loop.h"
#include "kernels/cuda/cuda.h"

bool cuda_record_make(struct ops_device *dev)
{
    void *word = NULL;
    if (cudaHostAlloc(&word, sizeof(*dev->passed), cudaHostAllocDefault) != cudaSuccess) {
        return false;
    }
    dev->passed = word;
    *dev->passed = 0;
    for (int i = 0; i < OPS_FENCES; i++) {
        if (cudaEventCreateWithFlags(&dev->fences[i], cudaEventDisableTiming) != cudaSuccess) {
            return false;
        }
    }
    return true;
}

void cuda_record_free(struct ops_device *dev)
{
    if (dev->passed) {
        (void)cudaFreeHost((void *)(uintptr_t)dev->passed);
    }
    for (int i = 0; i < OPS_FENCES; i++) {
        if (dev->fences[i]) {
            (void)cudaEventDestroy(dev->fences[i]);
        }
    }
}

/* What `stream` does next comes after all that `behind` was asked for. */
static void join(struct ops_device *dev, struct ops_device *behind, const char *what)
{
    cuda_enter(behind);
    if (cuda_kept(behind, cudaEventRecord(behind->reached, cuda_stream_for(behind)), what)) {
        cuda_enter(dev);
        (void)cuda_kept(dev, cudaStreamWaitEvent(cuda_stream_for(dev), behind->reached, 0), what);
    }
}

static enum status failure_of(struct ops_device *const *devices, uint32_t n, struct error *err)
{
    for (uint32_t k = 0; k < n; k++) {
        if (devices[k]->failed) {
            return error_set(err, devices[k]->failed, "%s", devices[k]->failure.text);
        }
    }
    return STATUS_OK;
}

enum status cuda_record_begin(struct ops_device *const *devices, uint32_t n_devices,
                              struct error *err)
{
    struct ops_device *first = devices[0];
    cuda_enter(first);
    /* Of this thread: what others ask of the driver meanwhile is no matter of the capture. */
    if (!cuda_kept(first,
                   cudaStreamBeginCapture(cuda_stream_for(first), cudaStreamCaptureModeThreadLocal),
                   "beginning to record a call")) {
        return failure_of(devices, 1, err);
    }
    for (uint32_t k = 0; k < n_devices; k++) {
        devices[k]->recording = true;
        devices[k]->launches_before = devices[k]->n_launches;
        if (k) {
            join(devices[k], first, "recording with a group");
        }
    }
    return STATUS_OK; /* a failure since is told by record_end, which has to end the capture */
}

/* The graph's executable form, with its memory on the device. */
static void make_executable(struct ops_device *dev, cudaGraph_t graph,
                            struct ops_recording *recording)
{
    size_t before = 0, after = 0, all = 0;
    cudaGraphExec_t exec = NULL;
    (void)cudaMemGetInfo(&before, &all);
    cudaError_t code = cudaGraphInstantiate(&exec, graph, 0);
    if (code == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        cuda_failed(dev, STATUS_EXHAUSTED, "cuda:%u: no memory for a recorded call",
                    dev->limits.device_i);
    } else if (cuda_kept(dev, code, "a recorded call")) {
        recording->graph = exec;
        (void)cuda_kept(dev, cudaGraphUpload(exec, cuda_stream_for(dev)),
                        "sending a recorded call");
        (void)cuda_kept(dev, cudaStreamSynchronize(dev->stream), "sending a recorded call");
    }
    (void)cudaMemGetInfo(&after, &all);
    recording->bytes = before > after ? before - after : 0;
}

enum status cuda_record_end(struct ops_device *const *devices, uint32_t n_devices,
                            struct ops_recording *ret_recording, struct error *err)
{
    struct ops_device *first = devices[0];
    struct ops_recording recording = {.n_rows = first->rows.n_rows,
                                      .n_seqs = first->rows.n_seqs,
                                      .draws = first->rows.draws != NULL};
    cudaGraph_t graph = NULL;
    for (uint32_t k = 1; k < n_devices; k++) {
        join(first, devices[k], "recording with a group");
    }
    cuda_enter(first);
    (void)cuda_kept(first, cudaStreamEndCapture(cuda_stream_for(first), &graph),
                    "recording a call");
    for (uint32_t k = 0; k < n_devices; k++) {
        struct ops_device *dev = devices[k];
        recording.n_launches += (uint32_t)(dev->n_launches - dev->launches_before);
        dev->n_launches = dev->launches_before;
        dev->recording = false;
    }
    enum status status = failure_of(devices, n_devices, err);
    if (!status && graph) {
        make_executable(first, graph, &recording);
        status = failure_of(devices, n_devices, err);
    }
    if (graph) {
        (void)cudaGraphDestroy(graph);
    }
    if (status) {
        cuda_recording_free(first, &recording);
        return status;
    }
    *ret_recording = recording;
    return STATUS_OK;
}

void cuda_record_progress(struct ops_device *dev, uint32_t value)
{
    cuda_enter(dev);
    cuda_run_progress(dev, dev->passed, value);
}

void cuda_recording_free(struct ops_device *dev, struct ops_recording *recording)
{
    if (recording->graph && !dev->given_up) {
        cuda_enter(dev);
        (void)cudaGraphExecDestroy(recording->graph);
    }
    recording->graph = NULL;
}

void cuda_replay(struct ops_device *const *devices, uint32_t n_devices,
                 const struct ops_recording *recording, const struct ops_rows *rows)
{
    struct ops_device *first = devices[0];
    if (rows->n_rows != recording->n_rows || rows->n_seqs != recording->n_seqs ||
        (rows->draws != NULL) != recording->draws) {
        cuda_failed(first, STATUS_INVALID,
                    "cuda:%u: a call of %u rows of %u sequences is not the one that was recorded",
                    first->limits.device_i, rows->n_rows, rows->n_seqs);
        return;
    }
    for (uint32_t k = 0; k < n_devices; k++) {
        if (!cuda_stage(devices[k], rows)) {
            return;
        }
        if (k) {
            join(first, devices[k], "the rows of a group");
        }
    }
    *first->passed = 0;
    cuda_enter(first);
    if (cuda_kept(first, cudaGraphLaunch(recording->graph, cuda_stream_for(first)),
                  "a recorded call")) {
        first->n_launches++;
    }
    for (uint32_t k = 1; k < n_devices; k++) {
        join(devices[k], first, "a recorded call of a group");
    }
}

/* Nothing may be asked of them from now on, for that could wait. */
static void give_up(struct ops_device *const *devices, uint32_t n_devices, uint64_t stall_ns)
{
    struct ops_device *first = devices[0];
    for (uint32_t k = 0; k < n_devices; k++) {
        cuda_failed(devices[k], STATUS_SYSTEM,
                    "cuda:%u: the device hangs: nothing has come of a step for %.1f s; the last "
                    "sign was %u",
                    first->limits.device_i, (double)stall_ns * 1e-9, *first->passed);
        devices[k]->given_up = true;
    }
}

/* Until the device came to the fence, or with NULL is through; or for stall_ns no sign came: false.
 */
static bool watch(struct ops_device *dev, cudaEvent_t fence, uint64_t stall_ns,
                  void (*moved)(void *cookie), void *cookie)
{
    uint64_t looked_ns = loop_now_ns(), moved_ns = looked_ns;
    uint32_t seen = *dev->passed;
    cuda_enter(dev);
    while (!dev->failed) {
        cudaError_t code = fence ? cudaEventQuery(fence) : cudaStreamQuery(dev->stream);
        uint64_t now_ns = loop_now_ns();
        uint32_t passed = *dev->passed;
        if (code != cudaErrorNotReady) {
            (void)cuda_kept(dev, code, "an operation");
            break;
        }
        /* Who did not look for so long stood still itself (a debugger, a host at its limits). */
        if (passed != seen || now_ns - looked_ns > stall_ns / 2) {
            moved_ns = now_ns;
        }
        if (passed != seen) {
            seen = passed;
            moved(cookie);
        } else if (now_ns - moved_ns > stall_ns) {
            return false;
        }
        looked_ns = now_ns;
        (void)sched_yield();
    }
    return true;
}

enum status cuda_wait_moving(struct ops_device *const *devices, uint32_t n_devices,
                             uint64_t stall_ns, void (*moved)(void *cookie), void *cookie,
                             struct error *err)
{
    if (!watch(devices[0], NULL, stall_ns, moved, cookie)) {
        give_up(devices, n_devices, stall_ns);
    }
    /* The first stream is through, so the others, which only wait for it, are. */
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < n_devices; k++) {
        enum status waited = ops_cuda.wait(devices[k], status ? NULL : err);
        status = status ? status : waited;
    }
    return status;
}

void cuda_fence(struct ops_device *dev, uint32_t fence_i)
{
    cuda_enter(dev);
    (void)cuda_kept(dev, cudaEventRecord(dev->fences[fence_i], cuda_stream_for(dev)),
                    "marking a call");
}

enum status cuda_wait_fence(struct ops_device *dev, uint32_t fence_i, uint64_t stall_ns,
                            void (*moved)(void *cookie), void *cookie, struct error *err)
{
    if (!dev->given_up && stall_ns == 0) {
        cuda_enter(dev);
        (void)cuda_kept(dev, cudaEventSynchronize(dev->fences[fence_i]), "an operation");
    } else if (!dev->given_up && !watch(dev, dev->fences[fence_i], stall_ns, moved, cookie)) {
        give_up(&dev, 1, stall_ns);
    }
    return dev->failed ? error_set(err, dev->failed, "%s", dev->failure.text) : STATUS_OK;
}
