/* kernels/cuda/launch.cuh - the one place from which kernels get into a device's stream, and how a
 * kernel may begin before the one in front of it ends.
 *
 * A decode step is hundreds of launches of a few microseconds, and between two the card stands: it
 * has to see that the first is through before it hands out blocks of the second. An early launch
 * (CUDA's programmatic dependent launch; ops_limits.early_launches) hides that: the second's blocks
 * are handed out while the first still works, read what they may, and wait on the card.
 *
 * The rule that makes it right, of every kernel that cuda_run launches:
 *
 *   1. arch_grid_go() is its first statement.
 *   2. arch_grid_wait() follows before it reads or writes anything that another launch, a copy or a
 *      fill may write or read: inputs, rows, scratch, counters, results. Every thread comes to it,
 *      before any return.
 *   3. Between the two it may use its arguments, which are its own, and read weights and tables,
 *      which nothing has written since the model was loaded.
 *
 * Why that is enough (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
 * Synchronization"; PTX ISA, griddepcontrol):
 *
 *   - The wait returns when all grids that this one depends on have completed and what they wrote
 *     is visible to it. It is no matter when those said go: go is about handing out blocks alone.
 *   - A grid depends on the one in front of it alone, so completion must hand on what was in front
 *     of that: it does since every thread of every grid waits. A kernel that did not would be
 *     through early, and the one behind it would then overtake what is in front of both.
 *   - A kernel's own part before the wait may run beside more than one grid in front of it. So rule
 *     3 is about all launches, not about the last one.
 *   - Blocks of the next grid are handed out once every block of this one has said go or has ended.
 *     None is then still to be placed, so waiting blocks never hold a place that this grid needs,
 *     whatever they take of shared memory or registers, and whatever its blocks wait for among
 *     themselves (experts_stream.cu, push.cu). By the same rule all grids but the last have all
 *     their blocks placed: the first of them depends on nothing that is still to come.
 *   - Only kernels can begin early and be overtaken. What else is put in a stream (copies, fills,
 *     events, NCCL's kernels, graphs) is ordered as ever in front of a usual launch, so the first
 *     kernel behind such a thing is launched as usual: see cuda_stream_for. That keeps edges
 * between streams, where a graph joins several, as they were.
 *   - A captured stream keeps the attribute as a programmatic edge between two kernels of its graph
 *     (cudaGraphKernelNodePortProgrammatic), with the same meaning.
 *   - Both intrinsics do nothing in a grid that was launched as usual.
 *
 * So where the waiting ends, a kernel finds the world as if everything had run one after the other:
 * the bits are the same. tests/emulate starts a few blocks of each early launch before the grid in
 * front of it, and ends the process when a thread ends that has not waited; tests/kernels/
 * check_cubins.py looks for memory in front of the wait in the machine code.
 */
#ifndef BATON_KERNELS_CUDA_LAUNCH_CUH
#define BATON_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include "kernels/cuda/arch.cuh"
#include "kernels/cuda/cuda.h"

/* Both, for a kernel that has nothing to do in between. */
__device__ __forceinline__ void cuda_grid_begin()
{
    arch_grid_go();
    arch_grid_wait();
}

/* Launches a kernel for `what` behind all that is in the device's stream. A failure is kept. */
template <typename... P, typename... A>
void cuda_run(struct ops_device *dev, const char *what, void (*kernel)(P...), dim3 grid, dim3 block,
              size_t shared_bytes, A &&...arguments)
{
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = dev->stream;
    config.attrs = &early;
    config.numAttrs = dev->limits.early_launches && dev->behind_kernel ? 1 : 0;
    (void)cudaLaunchKernelEx(&config, kernel, static_cast<A &&>(arguments)...);
    dev->behind_kernel = true;
    cuda_launched(dev, what);
}

#endif
