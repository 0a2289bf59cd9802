/* Streams, events and graphs of the emulated runtime, see runtime.cc. */
#include <time.h>

#include "tests/emulate/runtime.h"

CUstream_st *stream_of(cudaStream_t stream)
{
    bool legacy = stream == NULL || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
    return legacy ? &rt().devices[(size_t)current_device]->legacy : stream;
}

bool is_idle(const CUstream_st *s)
{
    return s->queue.empty() && !s->running;
}

/* An emulated graph is one queue, of what was asked for in order: the same kernel on one device
 * after the other runs on all of them together. */
static bool may_run(const CUstream_st *s)
{
    if (s->queue.empty()) {
        return false;
    }
    const operation &op = s->queue.front();
    bool joins = op.device >= 0 && op.name == s->kernel;
    return (!s->running || joins) && !(op.device >= 0 && rt().running >> op.device & 1) &&
           (!op.ready || op.ready());
}

/* What may begin before `op`, the kernel in front of it, does. */
static void begin_behind(CUstream_st *s, const operation &op)
{
    enum { FARTHEST = 3 };
    for (size_t i = 0; i < FARTHEST && i < s->queue.size() && op.kernel_of >= 0 && !rt().peers;
         i++) {
        operation &next = s->queue[i];
        if (!next.begin || next.kernel_of != op.kernel_of) {
            return;
        }
        next.begun = next.begun ? next.begun : next.begin();
    }
}

/* Runs one operation that is ready, of any stream; whether there was one. */
bool step()
{
    for (CUstream_st *s : rt().streams) {
        if (!may_run(s)) {
            continue;
        }
        operation op = std::move(s->queue.front());
        s->queue.pop_front();
        rt().stepping = s;
        begin_behind(s, op);
        if (op.begun) {
            emulate::end_grid(op.begun.get());
        } else {
            op.run();
        }
        rt().changed.notify_all();
        return true;
    }
    return false;
}

void push(CUstream_st *s, operation op)
{
    s->behind_kernel = op.kernel_of >= 0;
    if (s->capture) {
        s->capture->operations.push_back(std::move(op));
        return;
    }
    s->queue.push_back(std::move(op));
    while (!rt().lazy && step()) {
    }
}

cudaError_t refuse_in_capture()
{
    cudaError_t code = cudaSuccess;
    for (CUstream_st *s : rt().streams) {
        if (s->capture) {
            s->capture->broken = true;
            code = cudaErrorStreamCaptureUnsupported;
        }
    }
    return told(code);
}

namespace
{

double now_s()
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

} /* namespace */

extern "C" {

/* --- streams */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *ret, unsigned)
{
    guard hold(rt().lock);
    CUstream_st *s = new CUstream_st();
    s->device = current_device;
    rt().streams.push_back(s);
    *ret = s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    CUstream_st *s = stream_of(stream);
    {
        guard hold(rt().lock);
        if (s->capture) {
            s->capture->broken = true;
            return told(cudaErrorStreamCaptureUnsupported);
        }
    }
    wait_until([=] { return is_idle(s); });
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    guard hold(rt().lock);
    while (step()) {
    }
    return is_idle(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    wait_until([=] { return !stream->running; });
    guard hold(rt().lock);
    while (step()) {
    }
    std::vector<CUstream_st *> &all = rt().streams;
    for (size_t i = 0; i < all.size(); i++) {
        if (all[i] == stream) {
            all.erase(all.begin() + (ptrdiff_t)i);
            delete stream;
            return cudaSuccess;
        }
    }
    return told(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void *cookie)
{
    guard hold(rt().lock);
    push(stream_of(stream), {"a host function", nullptr, [=]() { fn(cookie); }});
    return cudaSuccess;
}

/* --- events */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *ret, unsigned flags)
{
    *ret = new CUevent_st();
    (*ret)->timed = !(flags & cudaEventDisableTiming);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *ret)
{
    return cudaEventCreateWithFlags(ret, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    std::shared_ptr<event_state> state = event->state;
    s->behind_kernel = false;
    if (s->capture) {
        state->graph = s->capture;
        return cudaSuccess;
    }
    state->graph = NULL;
    uint64_t id = ++state->recorded;
    push(s, {"an event", nullptr, [=]() {
                 state->reached = id;
                 state->reached_s = now_s();
             }});
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    std::shared_ptr<event_state> state = event->state;
    uint64_t id = state->recorded;
    wait_until([=] { return state->reached >= id; });
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    guard hold(rt().lock);
    while (step()) {
    }
    return event->state->reached >= event->state->recorded ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ret_ms, cudaEvent_t first, cudaEvent_t last)
{
    guard hold(rt().lock);
    for (cudaEvent_t event : {first, last}) {
        if (!event || !event->timed || event->state->recorded == 0) {
            return told(cudaErrorInvalidResourceHandle);
        }
        if (event->state->reached < event->state->recorded) {
            return told(cudaErrorNotReady);
        }
    }
    *ret_ms = (float)(1e3 * (last->state->reached_s - first->state->reached_s));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    std::shared_ptr<event_state> state = event->state;
    s->behind_kernel = false;
    if (state->graph) { /* the stream joins the recording */
        if (s->capture && s->capture != state->graph) {
            s->capture->broken = true;
            return told(cudaErrorStreamCaptureUnsupported);
        }
        if (!s->capture) {
            s->capture = state->graph;
            s->is_origin = false;
        }
        return cudaSuccess;
    }
    if (s->capture) { /* would make the graph wait for something outside it */
        s->capture->broken = true;
        return told(cudaErrorStreamCaptureUnsupported);
    }
    uint64_t id = state->recorded;
    push(s, {"a wait", [=]() { return state->reached >= id; }, []() {}});
    return cudaSuccess;
}

/* --- graphs */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    if (s->capture) {
        return told(cudaErrorStreamCaptureUnsupported);
    }
    s->capture = new CUgraph_st();
    s->behind_kernel = false;
    s->is_origin = true;
    return cudaSuccess;
}

/* Streams that joined are taken to have been joined again: an operation of theirs behind the last
 * wait of the origin is not noticed. */
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *ret)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    cudaGraph_t graph = s->capture;
    if (!graph || !s->is_origin) {
        return told(cudaErrorIllegalState);
    }
    for (CUstream_st *other : rt().streams) {
        if (other->capture == graph) {
            other->capture = NULL;
            other->is_origin = other->behind_kernel = false;
        }
    }
    *ret = NULL;
    if (graph->broken) {
        delete graph;
        return told(cudaErrorStreamCaptureInvalidated);
    }
    *ret = graph;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *ret)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    *ret = !s->capture          ? cudaStreamCaptureStatusNone
           : s->capture->broken ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *ret, cudaGraph_t graph, unsigned long long)
{
    *ret = new CUgraphExec_st();
    (*ret)->operations = graph->operations;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t)
{
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    guard hold(rt().lock);
    CUstream_st *s = stream_of(stream);
    if (s->capture) {
        s->capture->broken = true;
        return told(cudaErrorStreamCaptureUnsupported);
    }
    s->queue.insert(s->queue.end(), exec->operations.begin(), exec->operations.end());
    s->behind_kernel = false;
    while (!rt().lazy && step()) {
    }
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    delete exec;
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return mode ? cudaSuccess : cudaErrorInvalidValue;
}

} /* extern "C" */
