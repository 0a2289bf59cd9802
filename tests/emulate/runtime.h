/* tests/emulate/runtime.h - what the emulated runtime's files share, see runtime.cc. */
#ifndef BATON_TESTS_EMULATE_RUNTIME_H
#define BATON_TESTS_EMULATE_RUNTIME_H

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/emulate/emulate.h"

enum { EMULATED_MAX_DEVICES = 16 };

struct operation {
    const char *name;
    std::function<bool()> ready; /* empty: always */
    std::function<void()> run;
    int device = -1;    /* of a kernel that runs beside those of other devices */
    int kernel_of = -1; /* device of a kernel */
    /* Of one that may begin early, and then has. */
    std::function<std::shared_ptr<emulate::begun>()> begin;
    std::shared_ptr<emulate::begun> begun;
};

struct allocation {
    size_t bytes;
    int device; /* -1: host memory that was pinned */
    bool registered;
};

/* Times that an event was recorded, and how many of those were reached. */
struct event_state {
    uint64_t recorded = 0, reached = 0;
    double reached_s = 0;
    cudaGraph_t graph = NULL; /* recorded into one */
};

struct CUstream_st {
    int device;
    std::deque<operation> queue;
    uint64_t running = 0; /* devices with a grid of this stream: several only in a graph, ... */
    const char *kernel = NULL; /* ... of this kernel */
    cudaGraph_t capture = NULL;
    bool is_origin = false;
    bool behind_kernel = false; /* what was asked for last is one */
};

struct CUevent_st {
    std::shared_ptr<event_state> state = std::make_shared<event_state>();
    bool timed;
};

struct CUgraph_st {
    std::vector<operation> operations;
    bool broken = false;
    uint32_t n_joined = 0; /* streams beside the one that began */
};

struct CUgraphExec_st {
    std::vector<operation> operations;
};

struct device {
    size_t used = 0;
    CUstream_st legacy;
};

struct runtime {
    std::recursive_mutex lock;
    std::condition_variable_any changed;
    std::map<char *, allocation> memory; /* by first byte */
    std::vector<std::unique_ptr<device>> devices;
    std::vector<CUstream_st *> streams;
    std::map<const void *, size_t> shared_limits; /* of kernels that asked for more */
    size_t memory_bytes = 0;
    bool lazy = false;
    bool peers = false;           /* devices reach each other's memory, and run beside each other */
    uint64_t running = 0;         /* devices that run a grid */
    CUstream_st *stepping = NULL; /* whose operation is begun now */
    int open_for = -1;            /* whose memory a kernel may touch now, where there are several */
};

using guard = std::lock_guard<std::recursive_mutex>;

extern thread_local int current_device;

runtime &rt();
uint32_t number_of(const char *name, uint32_t standard);
/* Keeps a failure for cudaGetLastError; returns it. */
cudaError_t told(cudaError_t code);

/* For what moves memory between devices itself; under the lock, in an operation. */
void open_all_memory();

/* --- streams.cc */
bool is_idle(const CUstream_st *s);
CUstream_st *stream_of(cudaStream_t stream);
bool step();
void push(CUstream_st *s, operation op);
/* What may not be called while a stream of anyone records: it ends the recording. */
cudaError_t refuse_in_capture();

/* Until `done`; others may post meanwhile what it waits for. */
template <typename DONE> void wait_until(DONE done)
{
    std::unique_lock<std::recursive_mutex> hold(rt().lock);
    while (!done()) {
        if (!step()) {
            rt().changed.wait_for(hold, std::chrono::milliseconds(1));
        }
    }
}

#endif
