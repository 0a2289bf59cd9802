/* tests/emulate/emulate.h - CUDA kernels on the processor: what translated sources call.
 *
 * Where no GPU is, every kernel can still be run: a build with -Dgpu_emulated=true compiles
 * kernels/cuda with the C++ compiler, through translate.py and the headers in include/, and links
 * this in place of the CUDA runtime. It is there to find wrong code, never to be fast:
 *
 *   - a block's threads are fibers of one host thread, blocks run on EMULATED_SMS host threads, in
 *     any order, several at once. `__shared__` is thread-local, so each running block has its own.
 *   - warps and lanes take turns in an order that differs from launch to launch (EMULATED_ORDER=N
 *     starts another sequence; 0: in order): what a missing barrier hides shows sooner or later.
 *   - shared and device memory start as 0xff; what a kernel reads past the end of dynamic shared
 *     memory, or of an allocation, is a fault, told with the kernel, block and thread.
 *   - lanes that meet in a collective must all be there, alive, and at the same one; a barrier that
 *     can't be reached ends the process with where each thread stands.
 *   - streams are queues: with EMULATED_LAZY=1 nothing runs before somebody waits or asks, the
 *     slowest device there can be; else at once.
 *   - a launch that may begin before the one in front of it ends does: its first block and its last
 *     run as far as they come, before that one begins, and so do those of the next such launches.
 *     That needs launches that are asked for together: in a graph, or with EMULATED_LAZY=1; not
 *     where devices run beside each other. Always, a thread of what cudaLaunchKernelEx launched
 *     must have waited when it ends, and such a launch must follow a kernel in its stream.
 *   - EMULATED_DEVICES=N, 1 unless said, 0: none. Another device's memory is out of a kernel's
 *     reach until peer access is asked for. From then on devices run their kernels beside each
 *     other, so that these may wait for each other.
 *   - EMULATED_MEMORY_MB: of each device, 65536 unless said.
 *
 * What it can't tell: time, memory coalescing, what nvcc makes of the code, and a GPU's weaker
 * order of memory. What ran here alone has not run on a card, and no document may say it has.
 */
#ifndef BATON_TESTS_EMULATE_EMULATE_HH
#define BATON_TESTS_EMULATE_EMULATE_HH

#include <cuda_runtime_api.h>
#include <functional>
#include <memory>
#include <stddef.h>
#include <stdint.h>
#include <tuple>

namespace emulate
{

enum { WARP = 32, VALUE_BYTES = 64 };

/* Who runs. */
struct position {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};
const position &self();

/* Its place in the warp. */
uint32_t self_lane();

/* Dynamic shared memory of the running block. */
void *shared();

/* What a lane brings to a meeting. */
union value {
    uint8_t bytes[VALUE_BYTES];
    uint32_t words[VALUE_BYTES / 4];
    float floats[VALUE_BYTES / 4];
    uint64_t longs[VALUE_BYTES / 8];
};

/* Waits until every lane of the mask came with the same `what` (a literal); returns what each
 * brought, [32], valid until the calling lane's next meeting. */
const value *meet(uint32_t mask, const char *what, const value &mine);

/* Waits until n_threads of the block came; 0: all that still run. */
void barrier(uint32_t id, uint32_t n_threads);

/* Copies of the calling thread that are made when it waits for them: those since the last close are
 * a group, and a wait makes all groups but the last n_left. */
void copy_later(void *to, const void *from, size_t bytes);
void copies_close();
void copies_wait(uint32_t n_left);

/* Of a thread: the launch behind its own may begin; and until the one in front has ended. */
void grid_go();
void grid_wait();

/* The calling thread spins: others run first. */
void spin();

/* Ends the process: a kernel does what it must not. */
[[noreturn]] void fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* --- threads.cc, by the runtime: runs a grid to its end, or begins to and calls `ended` then. */
struct launched {
    const char *name;
    dim3 grid, block;
    size_t shared_bytes;
    int device;
    bool waits; /* threads call grid_wait */
};
void run_grid(const launched &what, const std::function<void()> &body);
void start_grid(const launched &what, std::function<void()> body, std::function<void()> ended);
/* The same as run_grid, in two parts: some blocks up to where they wait, and everything. */
struct begun;
std::shared_ptr<begun> begin_grid(const launched &what, const std::function<void()> &body);
void end_grid(begun *begun);

/* --- runtime.cc: how a kernel is launched */
enum way { AS_USUAL, WAITING, EARLY /* and it may begin before what is in front of it ends */ };
cudaError_t enqueue_kernel(const void *kernel, const char *name, dim3 grid, dim3 block,
                           size_t shared_bytes, cudaStream_t stream, enum way way,
                           std::function<void()> body);
/* What a kernel is called in the source; returns it. */
const char *name_of(const void *kernel, const char *name);
template <typename... P> auto named(void (*kernel)(P...), const char *name)
{
    (void)name_of(reinterpret_cast<const void *>(kernel), name);
    return kernel;
}

/* Work of a library on a stream: `ready` says whether it may run by now. */
void enqueue(cudaStream_t stream, const char *name, std::function<bool()> ready,
             std::function<void()> run);

template <typename... P, typename... A>
void launch(void (*kernel)(P...), const char *name, dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, A... arguments)
{
    std::tuple<std::decay_t<P>...> kept(arguments...);
    (void)enqueue_kernel(reinterpret_cast<const void *>(kernel), name, grid, block, shared_bytes,
                         stream, AS_USUAL, [=]() { std::apply(kernel, kept); });
}

} /* namespace emulate */

#endif
