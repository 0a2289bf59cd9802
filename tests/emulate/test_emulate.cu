/* What the emulated device must notice, and what it must do right: each fault is made on purpose in
 * a child process, whose last words are read.
 */
#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cuda/arch.cuh"

namespace
{

enum { THREADS = 128, WORDS = 1024 };

__global__ void __launch_bounds__(THREADS) sum_kernel(const uint32_t *x, uint32_t *y, bool wrong)
{
    __shared__ uint32_t shared[THREADS];
    shared[threadIdx.x] = x[blockIdx.x * THREADS + threadIdx.x];
    for (uint32_t half = THREADS / 2; half; half /= 2) {
        if (!wrong) {
            __syncthreads();
        }
        if (threadIdx.x < half) {
            shared[threadIdx.x] += shared[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        y[blockIdx.x] = shared[0];
    }
}

__global__ void past_kernel(uint32_t *x, size_t i)
{
    x[i] = 1;
}

__global__ void half_kernel(uint32_t *y)
{
    if (threadIdx.x % 32 >= 16) {
        return;
    }
    y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, threadIdx.x, 1);
}

__global__ void apart_kernel(uint32_t *y)
{
    if (threadIdx.x % 2) {
        __syncwarp();
    } else {
        y[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    }
}

__global__ void never_kernel(uint32_t *y)
{
    if (threadIdx.x < 32) {
        arch_copy_close();
        y[threadIdx.x] = 1;
        __syncthreads();
        __syncthreads();
    } else {
        __syncwarp();
        __syncthreads();
        if (threadIdx.x == 40) {
            __syncwarp();
        }
        __syncthreads();
    }
}

__global__ void copy_kernel(const uint32_t *x, uint32_t *y, bool wait)
{
    __shared__ __align__(16) uint32_t shared[4];
    shared[0] = 7;
    arch_copy_16(shared, x);
    arch_copy_close();
    if (wait) {
        arch_copy_wait<0>();
    }
    y[0] = shared[0];
}

/* Block b hands on to block b + 1: all of them must run at once, or one after the other. */
__global__ void chain_kernel(uint32_t *turn)
{
    if (threadIdx.x == 0) {
        while (arch_load_acquire(turn) != blockIdx.x) {
        }
        __threadfence();
        (void)atomicAdd(turn, 1u);
    }
}

/* y = x + add, for what may begin early: GO and WAIT as it should, or not. */
enum { GO = 1, WAIT = 2, READ_BEFORE = 4 };
__global__ void early_kernel(uint32_t how, const uint32_t *x, uint32_t *y, uint32_t add)
{
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t value = 0;
    if (how & GO) {
        arch_grid_go();
    }
    if (how & READ_BEFORE) {
        value = x[i];
    }
    if (how & WAIT) {
        arch_grid_wait();
    }
    y[i] = ((how & READ_BEFORE) ? value : x[i]) + add;
}

void must(bool yes, const char *what)
{
    if (!yes) {
        fprintf(stderr, "not so: %s\n", what);
        exit(1);
    }
}

void ok(cudaError_t code)
{
    must(code == cudaSuccess, cudaGetErrorString(code));
}

uint32_t *words(size_t n)
{
    void *memory;
    ok(cudaMalloc(&memory, n * sizeof(uint32_t)));
    return static_cast<uint32_t *>(memory);
}

uint32_t *pinned(size_t n)
{
    void *memory;
    ok(cudaHostAlloc(&memory, n * sizeof(uint32_t), 0));
    return static_cast<uint32_t *>(memory);
}

cudaStream_t new_stream()
{
    cudaStream_t stream;
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

/* How many of `times` launches gave the right sums. */
int right_sums(bool wrong, int times)
{
    uint32_t *x = words(WORDS), *y = words(WORDS), host[WORDS], sums[WORDS / THREADS];
    for (uint32_t i = 0; i < WORDS; i++) {
        host[i] = i * i;
    }
    ok(cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice));
    int n = 0;
    for (int t = 0; t < times; t++) {
        sum_kernel<<<WORDS / THREADS, THREADS, 0, NULL>>>(x, y, wrong);
        ok(cudaMemcpy(sums, y, sizeof(sums), cudaMemcpyDeviceToHost));
        bool right = true;
        for (uint32_t b = 0; b < WORDS / THREADS; b++) {
            uint32_t sum = 0;
            for (uint32_t i = b * THREADS; i < (b + 1) * THREADS; i++) {
                sum += host[i];
            }
            right = right && sums[b] == sum;
        }
        n += right;
    }
    return n;
}

void in_order()
{
    must(right_sums(false, 20) == 20, "a sum with its barriers is right, whatever the order");
    must(right_sums(true, 20) < 20, "a sum without barriers is wrong in some order");
    uint32_t *turn = words(1), n = 0;
    ok(cudaMemset(turn, 0, sizeof(n)));
    chain_kernel<<<64, 32>>>(turn);
    ok(cudaMemcpy(&n, turn, sizeof(n), cudaMemcpyDeviceToHost));
    must(n == 64, "blocks that wait for those before them end");
}

void copies()
{
    uint32_t *x = words(4), *y = words(1), host[4] = {1, 2, 3, 4}, got;
    ok(cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice));
    copy_kernel<<<1, 1>>>(x, y, true);
    ok(cudaMemcpy(&got, y, sizeof(got), cudaMemcpyDeviceToHost));
    must(got == 1, "a copy that was waited for is there");
    copy_kernel<<<1, 1>>>(x, y, false);
    ok(cudaMemcpy(&got, y, sizeof(got), cudaMemcpyDeviceToHost));
    must(got == 7, "a copy that was not waited for is not there yet");
}

/* In a child with EMULATED_LAZY: nothing runs before it is waited for. */
void lazily()
{
    cudaStream_t stream = new_stream();
    uint32_t *x = words(1), *from = pinned(1), *to = pinned(1);
    *from = 1;
    *to = 0;
    ok(cudaMemcpyAsync(x, from, 4, cudaMemcpyDefault, stream));
    ok(cudaMemcpyAsync(to, x, 4, cudaMemcpyDefault, stream));
    *from = 2;
    must(*to == 0, "nothing has run");
    ok(cudaStreamSynchronize(stream));
    must(*to == 2, "pinned memory is read when the copy runs");
}

void graphs()
{
    cudaStream_t stream = new_stream(), beside = new_stream();
    cudaEvent_t fork, join;
    ok(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    ok(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    uint32_t *x = words(THREADS), *y = words(2), *from = pinned(THREADS), got[2];
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    ok(cudaMemcpyAsync(x, from, THREADS * 4, cudaMemcpyDefault, stream));
    ok(cudaEventRecord(fork, stream));
    ok(cudaStreamWaitEvent(beside, fork, 0));
    sum_kernel<<<1, THREADS, 0, beside>>>(x, y + 1, false);
    ok(cudaEventRecord(join, beside));
    sum_kernel<<<1, THREADS, 0, stream>>>(x, y, false);
    ok(cudaStreamWaitEvent(stream, join, 0));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphDestroy(graph));
    for (uint32_t turn = 1; turn <= 3; turn++) {
        for (uint32_t i = 0; i < THREADS; i++) {
            from[i] = turn;
        }
        ok(cudaGraphLaunch(exec, stream));
        ok(cudaStreamSynchronize(stream));
        ok(cudaMemcpy(got, y, sizeof(got), cudaMemcpyDeviceToHost));
        must(got[0] == turn * THREADS && got[1] == got[0], "a graph reads what is there by then");
    }
    ok(cudaGraphExecDestroy(exec));
    void *none;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    must(cudaMalloc(&none, 4) == cudaErrorStreamCaptureUnsupported, "no memory while recording");
    must(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated,
         "what broke a recording is told at its end");
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    must(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported,
         "nobody waits while recording");
    must(cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureInvalidated, "told again");
    (void)cudaGetLastError();
}

enum { EARLY_BLOCKS = 5, EARLY_THREADS = 64, EARLY_WORDS = EARLY_BLOCKS * EARLY_THREADS };

void launch_early(cudaStream_t stream, bool early, uint32_t how, const uint32_t *x, uint32_t *y)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = EARLY_BLOCKS;
    config.blockDim = EARLY_THREADS;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early;
    ok(cudaLaunchKernelEx(&config, early_kernel, how, x, y, 1u));
}

/* Three kernels of a graph, each adding one to what the one before it wrote: how many words of the
 * third's are right, and those that are not are what the third found before the first had run. */
uint32_t right_early(uint32_t how)
{
    cudaStream_t stream = new_stream();
    uint32_t *x = words(EARLY_WORDS), *y = words(EARLY_WORDS), *z = words(EARLY_WORDS);
    uint32_t host[EARLY_WORDS] = {}, n_right = 0, n_stale = 0;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ok(cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice));
    ok(cudaMemcpy(z, host, sizeof(host), cudaMemcpyHostToDevice));
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch_early(stream, false, GO | WAIT, x, y);
    launch_early(stream, true, GO | WAIT, y, x);
    launch_early(stream, true, how, x, z);
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphLaunch(exec, stream));
    ok(cudaStreamSynchronize(stream));
    ok(cudaMemcpy(host, z, sizeof(host), cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < EARLY_WORDS; i++) {
        n_right += host[i] == 3;
        n_stale += host[i] == 1;
    }
    must(n_right + n_stale == EARLY_WORDS, "a word is right, or of before the first kernel");
    return n_right;
}

void early()
{
    must(right_early(GO | WAIT) == EARLY_WORDS, "who waits finds what was written");
    must(right_early(GO | READ_BEFORE | WAIT) == EARLY_WORDS - 2 * EARLY_THREADS,
         "the first block and the last read what was there before, if they don't wait");
}

void early_without_wait()
{
    launch_early(new_stream(), false, GO, words(EARLY_WORDS), words(EARLY_WORDS));
}

void early_without_go()
{
    launch_early(new_stream(), false, WAIT, words(EARLY_WORDS), words(EARLY_WORDS));
}

void early_behind_a_copy()
{
    cudaStream_t stream = new_stream();
    uint32_t *x = words(EARLY_WORDS);
    launch_early(stream, false, GO | WAIT, x, words(EARLY_WORDS));
    ok(cudaMemsetAsync(x, 0, sizeof(*x), stream));
    launch_early(stream, true, GO | WAIT, x, words(EARLY_WORDS));
}

void refusals()
{
    uint32_t *y = words(1);
    (void)cudaGetLastError();
    past_kernel<<<dim3(1, 65536), 1>>>(y, 0);
    must(cudaGetLastError() == cudaErrorInvalidConfiguration, "a grid beyond what CUDA takes");
    past_kernel<<<1, 1, 64 << 10>>>(y, 0);
    must(cudaGetLastError() == cudaErrorInvalidValue, "more shared memory than was asked for");
    ok(cudaFuncSetAttribute(past_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    past_kernel<<<1, 1, 64 << 10>>>(y, 0);
    must(cudaGetLastError() == cudaSuccess, "asked for, it is there");
    must(cudaFuncSetAttribute(past_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              100 << 10) != cudaSuccess,
         "more than sm_120 has");
    (void)cudaGetLastError();
}

void past_the_end()
{
    uint32_t *x = words(WORDS);
    past_kernel<<<1, 1>>>(x, WORDS);
}

void lanes_gone()
{
    half_kernel<<<1, 32>>>(words(32));
}

void lanes_apart()
{
    apart_kernel<<<1, 32>>>(words(32));
}

void no_way_on()
{
    never_kernel<<<1, 64>>>(words(64));
}

void not_its_own()
{
    uint32_t *x = words(1);
    ok(cudaSetDevice(1));
    past_kernel<<<1, 1>>>(x, 0);
}

/* Runs it in a child with one variable set; NULL wanted: it must end well, else with these words.
 */
bool told(const char *name, void (*run)(), const char *set, const char *wanted)
{
    int ends[2];
    if (pipe(ends)) {
        exit(2);
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        if (set) {
            putenv(strdup(set));
        }
        run();
        _exit(0);
    }
    close(ends[1]);
    char text[8192];
    size_t n = 0;
    for (ssize_t got;
         n < sizeof(text) - 1 && (got = read(ends[0], text + n, sizeof(text) - 1 - n)) > 0;) {
        n += (size_t)got;
    }
    text[n] = '\0';
    close(ends[0]);
    int status = 0;
    waitpid(pid, &status, 0);
    bool as_it_should = wanted ? status != 0 && strstr(text, wanted) : status == 0;
    printf("%s: %s\n", name, as_it_should ? "as it should" : "NOT as it should");
    if (!as_it_should) {
        printf("%s", text);
    }
    return as_it_should;
}

} /* namespace */

int main()
{
    bool all = told("order", in_order, NULL, NULL);
    all = told("copies", copies, NULL, NULL) && all;
    all = told("lazy", lazily, "EMULATED_LAZY=1", NULL) && all;
    all = told("graphs", graphs, NULL, NULL) && all;
    all = told("graphs, lazy", graphs, "EMULATED_LAZY=1", NULL) && all;
    all = told("refusals", refusals, NULL, NULL) && all;
    all = told("early", early, NULL, NULL) && all;
    all = told("early, lazy", early, "EMULATED_LAZY=1", NULL) && all;
    all = told("no wait", early_without_wait, NULL, "has not waited for the launch") && all;
    all = told("no go", early_without_go, NULL, "before it lets the next begin") && all;
    all = told("behind a copy", early_behind_a_copy, NULL, "is no kernel") && all;
    all = told("past the end", past_the_end, NULL, "past_kernel") && all;
    all = told("lanes gone", lanes_gone, NULL, "have ended") && all;
    all = told("lanes apart", lanes_apart, NULL, "lanes of a warp meet in") && all;
    all = told("no way on", no_way_on, NULL, "no thread of the block can go on") && all;
    all = told("another's memory", not_its_own, "EMULATED_DEVICES=2", "past_kernel") && all;
    return all ? 0 : 1;
}
