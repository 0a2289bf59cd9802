/* Copies beside the operations: what lands is taken into pages, and slots and pages are moved,
 * while the compute thread's stream runs.
 *
 * All of it goes over one stream of its own, one call at a time: there is one path to the device's
 * memory anyway. Who calls sleeps until it is done; a decode node has few cores to spin on. What
 * fails here is told to the caller alone: `failed` of the device is the compute thread's, which
 * meets a broken context by itself.
 */
#include <pthread.h>

#include "base/mem.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/parcel.h"

enum { PIECES_A_LAUNCH = 256 };

/* Pinned: read by copies that are under way when the call that asked for them goes on. */
struct accept_host {
    struct parcel_piece_device pieces[PIECES_A_LAUNCH];
    uint64_t sums[2];
};

struct cuda_beside {
    pthread_mutex_t lock;
    cudaStream_t stream;
    cudaEvent_t done;
    struct accept_host *host;
    struct parcel_piece_device *pieces; /* device memory, as are sums */
    uint64_t *sums;
};

bool cuda_beside_make(struct ops_device *dev)
{
    struct cuda_beside *b = mem_zalloc(sizeof(*b));
    bool ok = true;
    dev->beside = b;
    pthread_mutex_init(&b->lock, NULL);
    b->pieces = cuda_room(dev, PIECES_A_LAUNCH, sizeof(*b->pieces) / sizeof(float), &ok);
    b->sums = cuda_room(dev, 2, sizeof(*b->sums) / sizeof(float), &ok);
    if (!ok || dev->limits.only_plan) {
        return ok;
    }
    void *host = NULL;
    unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync;
    ok = cudaHostAlloc(&host, sizeof(*b->host), cudaHostAllocDefault) == cudaSuccess;
    b->host = host;
    return ok && cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking) == cudaSuccess &&
           cudaEventCreateWithFlags(&b->done, flags) == cudaSuccess;
}

void cuda_beside_free(struct cuda_beside *b)
{
    if (!b) {
        return;
    }
    if (b->stream) {
        (void)cudaStreamSynchronize(b->stream);
        (void)cudaStreamDestroy(b->stream);
    }
    if (b->done) {
        (void)cudaEventDestroy(b->done);
    }
    if (b->host) {
        (void)cudaFreeHost(b->host);
    }
    pthread_mutex_destroy(&b->lock);
    mem_free(b);
}

static enum status told(struct ops_device *dev, cudaError_t code, const char *what,
                        struct error *err)
{
    if (code == cudaSuccess) {
        return STATUS_OK;
    }
    (void)cudaGetLastError();
    return error_set(err, STATUS_SYSTEM, "cuda:%u: %s: %s", dev->limits.device_i, what,
                     cudaGetErrorString(code));
}

/* Until all that was asked for is done; with the failure of asking, if there was one. Then too
 * nothing may go on: what was being written, the caller gives to others. */
static cudaError_t finish(struct cuda_beside *b, cudaError_t code)
{
    if (code == cudaSuccess) {
        code = cudaEventRecord(b->done, b->stream);
    }
    if (code == cudaSuccess) {
        return cudaEventSynchronize(b->done);
    }
    (void)cudaStreamSynchronize(b->stream);
    return code;
}

enum status cuda_move(struct ops_device *dev, void *dst, const void *src, size_t bytes,
                      struct error *err)
{
    struct cuda_beside *b = dev->beside;
    if (bytes == 0) {
        return STATUS_OK;
    }
    pthread_mutex_lock(&b->lock);
    cudaError_t code = cudaSetDevice((int)dev->limits.device_i);
    if (code == cudaSuccess) {
        code = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, b->stream);
    }
    code = finish(b, code);
    pthread_mutex_unlock(&b->lock);
    return told(dev, code, "moving memory", err);
}

/* Copies at most PIECES_A_LAUNCH pieces and adds them to the sums. Memory that the device can't use
 * by its address is copied first, and summed where it then lies. */
static cudaError_t take_some(struct ops_device *dev, const struct parcel_key *key,
                             const struct parcel_piece *pieces, uint32_t n, uint64_t *words)
{
    struct cuda_beside *b = dev->beside;
    cudaError_t code = cudaSuccess;
    for (uint32_t i = 0; i < n && code == cudaSuccess; i++) {
        const struct parcel_piece *piece = &pieces[i];
        bool usable = cuda_is_usable(dev, piece->src, piece->bytes);
        b->host->pieces[i] = (struct parcel_piece_device){
            piece->dst, usable ? piece->src : piece->dst, piece->bytes, *words};
        *words += piece->bytes / 8;
        if (!usable && !piece->dst) {
            code = cudaErrorInvalidValue;
        } else if (!usable && piece->bytes) {
            code =
                cudaMemcpyAsync(piece->dst, piece->src, piece->bytes, cudaMemcpyDefault, b->stream);
        }
    }
    if (code == cudaSuccess) {
        code = cudaMemcpyAsync(b->pieces, b->host->pieces, n * sizeof(b->host->pieces[0]),
                               cudaMemcpyHostToDevice, b->stream);
    }
    if (code == cudaSuccess && parcel_copy_sum_launch(key, b->pieces, n, b->sums, b->stream)) {
        code = cudaErrorLaunchFailure;
    }
    return finish(b, code); /* the list of pieces is free for the next */
}

enum status cuda_accept(struct ops_device *dev, const struct parcel_key *key,
                        const struct parcel_piece *pieces, uint32_t n, struct parcel_sum *ret_sum,
                        struct error *err)
{
    struct cuda_beside *b = dev->beside;
    uint64_t words = 0;
    pthread_mutex_lock(&b->lock);
    cudaError_t code = cudaSetDevice((int)dev->limits.device_i);
    if (code == cudaSuccess) {
        code = cudaMemsetAsync(b->sums, 0, sizeof(b->host->sums), b->stream);
    }
    for (uint32_t at = 0; at < n && code == cudaSuccess; at += PIECES_A_LAUNCH) {
        uint32_t some = n - at < PIECES_A_LAUNCH ? n - at : PIECES_A_LAUNCH;
        code = take_some(dev, key, pieces + at, some, &words);
    }
    if (code == cudaSuccess) {
        code = cudaMemcpyAsync(b->host->sums, b->sums, sizeof(b->host->sums),
                               cudaMemcpyDeviceToHost, b->stream);
    }
    code = finish(b, code);
    struct parcel_sum sum = {{b->host->sums[0], b->host->sums[1]}};
    pthread_mutex_unlock(&b->lock);
    enum status status = told(dev, code, "taking what landed", err);
    if (!status) {
        *ret_sum = sum;
    }
    return status;
}
