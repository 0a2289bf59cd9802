/* See group.h.
 *
 * Between GPUs parts are gathered, and each rank adds what it got in rank order itself. NCCL could
 * add them on the way (all-reduce), but picks its algorithm, and with it the order of the sum, by
 * size: a row's bits would then depend on the rows beside it.
 *
 * Who waits for a rank that never comes waits in a kernel, and the host behind it in the driver: in
 * a wait, or, with the launches of a step outnumbering the driver's queue, in any launch. So no
 * deadline of the computing thread's own would do. The watch reads what each rank's last sum left
 * in pinned memory; if that stands still inside a call while streams have work and a rank has come
 * to the sum that is due, the group has failed: communicators are aborted, which ends NCCL's
 * kernels and so the waits behind them. If the computing thread then does not come back (the rank's
 * GPU hangs, not NCCL), the watch ends the process. Both together take less than 2 s. Ranks that
 * write into each other's memory (push.cu) are watched alike, and end when `stop` is set. Ranks on
 * one GPU wait for each other's events, which nothing ends: there it is always the process. Their
 * recorded calls are left to who waits for them (record.c), for one stream runs all of a call.
 */
#include "kernels/cuda/group.h"

#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "kernels/cuda/nccl.h"

enum {
    STRIDE = 32, /* words between the ranks' counters: a line each */
    RING = 256   /* sums of a call whose places are kept */
};
enum { CLOSING = 1u << CUDA_MAX_GROUP }; /* in in_step */
#define MS INT64_C(1000000)
static const int64_t PERIOD_NS = 20 * MS, STALL_NS = 1300 * MS, GRACE_NS = 300 * MS;
static const int64_t OPEN_NS = 30000 * MS, CLOSE_NS = 10000 * MS;

struct cuda_group {
    uint32_t n, n_open;
    struct ops_device *devices[CUDA_MAX_GROUP];
    char name[64];
    bool has_parts; /* ranks on a GPU each; without, one stream adds, and NCCL is not used */
    bool pushes;    /* sums of few rows are push.cu's */
#if BATON_NCCL
    ncclComm_t comms[CUDA_MAX_GROUP];
#endif
    /* Where each rank came to a sum of this call: what judge reads to name the one that did not. */
    cudaEvent_t reached[CUDA_MAX_GROUP][RING];
    _Atomic uint32_t n_asked; /* sums of this call; ... */
    _Atomic uint32_t base;    /* ... counted from this one of those that were passed */
    uint32_t *passed;         /* pinned: sums that rank k has passed, at k * STRIDE; on one GPU
                               * those of rank 0, whose stream adds for all */
    /* The same of a recorded call, in which nothing can be asked for an event: which of its sums
     * rank k has come to, counted from 1 in each replay. */
    uint32_t *came;
    volatile uint32_t *stop_pushes; /* pinned: not 0 once the group has failed */
    uint32_t n_recorded;            /* sums of the call that is being recorded */
    pthread_mutex_t calls;          /* one thread in NCCL */
    pthread_mutex_t lock;           /* what follows */
    pthread_cond_t wake;            /* of the watch */
    struct error failure;           /* once there is one */
    bool is_watched, stop;
    pthread_t watch;
    _Atomic bool failed, is_aborted;
    _Atomic unsigned in_step; /* bit k: rank k is in a call; or CLOSING */
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 * MS + t.tv_nsec;
}

bool cuda_group_has_parts(const struct cuda_group *g)
{
    return g && g->has_parts;
}

static void fail(struct cuda_group *g, const char *format, ...) PRINTF_LIKE(2, 3);
static void fail(struct cuda_group *g, const char *format, ...)
{
    pthread_mutex_lock(&g->lock);
    if (!atomic_load(&g->failed)) {
        int n = snprintf(g->failure.text, sizeof(g->failure.text), "%s: ", g->name);
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(g->failure.text + n, sizeof(g->failure.text) - (size_t)n, format, arguments);
        va_end(arguments);
        atomic_store(&g->failed, true);
    }
    pthread_mutex_unlock(&g->lock);
}

static cudaError_t use(const struct ops_device *dev)
{
    return cudaSetDevice((int)dev->limits.device_i);
}

static bool is_capturing(const struct ops_device *dev)
{
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing(dev->stream, &capture) == cudaSuccess &&
           capture != cudaStreamCaptureStatusNone;
}

/* --- NCCL */

#if BATON_NCCL

/* Until NCCL has done what it was asked for, `code` being its answer. A communicator that does not
 * block says so later. */
static bool settle(struct cuda_group *g, ncclResult_t code, int64_t limit_ns, const char *what)
{
    int64_t begin_ns = now_ns();
    for (uint32_t k = 0; k < g->n && (code == ncclSuccess || code == ncclInProgress); k++) {
        code = ncclInProgress;
        while (code == ncclInProgress && !atomic_load(&g->failed)) {
            ncclResult_t asked = nccl.async_error(g->comms[k], &code);
            code = asked == ncclSuccess ? code : asked;
            if (code == ncclInProgress && now_ns() - begin_ns > limit_ns) {
                fail(g, "a rank hangs: NCCL did not come to the end of %s in %.1f s", what,
                     (double)limit_ns * 1e-9);
            } else if (code == ncclInProgress) {
                sched_yield();
            }
        }
    }
    if (code != ncclSuccess && code != ncclInProgress) {
        fail(g, "NCCL refuses %s: %s", what, nccl.error_text(code));
    }
    return !atomic_load(&g->failed);
}

static bool gather_locked(struct cuda_group *g, float *const *y, size_t count, int64_t limit_ns)
{
    ncclResult_t code = nccl.group_start();
    for (uint32_t k = 0; k < g->n && code == ncclSuccess; k++) {
        struct ops_device *dev = g->devices[k];
        code = nccl.all_gather(y[k], dev->gathered, count, ncclFloat32, g->comms[k],
                               cuda_stream_for(dev));
        code = code == ncclInProgress ? ncclSuccess : code;
    }
    ncclResult_t end = nccl.group_end();
    return settle(g, code == ncclSuccess ? end : code, limit_ns, "a sum");
}

/* What the watch asks while all is well: whether a communicator noticed a failure itself. */
static void ask_comms(struct cuda_group *g)
{
    for (uint32_t k = 0; k < g->n; k++) {
        ncclResult_t state = ncclSuccess;
        if (nccl.async_error(g->comms[k], &state) == ncclSuccess && state != ncclSuccess &&
            state != ncclInProgress) {
            fail(g, "rank %u (cuda:%u) is lost: NCCL says %s", k, g->devices[k]->limits.device_i,
                 nccl.error_text(state));
        }
    }
}

static void end_comms(struct cuda_group *g, ncclResult_t (*end)(ncclComm_t comm))
{
    pthread_mutex_lock(&g->calls);
    for (uint32_t k = 0; k < g->n; k++) {
        if (g->comms[k]) {
            (void)end(g->comms[k]);
            g->comms[k] = NULL;
        }
    }
    pthread_mutex_unlock(&g->calls);
}

static void abort_comms(struct cuda_group *g)
{
    end_comms(g, nccl.abort);
}

static void destroy_comms(struct cuda_group *g)
{
    end_comms(g, nccl.destroy);
}

static bool init_comms(struct cuda_group *g)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t code = nccl.unique_id(&id);
    config.blocking = 0;
    if (code != ncclSuccess) {
        fail(g, "NCCL refuses a group: %s", nccl.error_text(code));
        return false;
    }
    code = nccl.group_start();
    for (uint32_t k = 0; k < g->n && code == ncclSuccess; k++) {
        (void)use(g->devices[k]);
        code = nccl.init(&g->comms[k], (int)g->n, id, (int)k, &config);
        code = code == ncclInProgress ? ncclSuccess : code;
    }
    ncclResult_t end = nccl.group_end();
    return settle(g, code == ncclSuccess ? end : code, OPEN_NS, "making a group");
}

#else

static bool gather_locked(struct cuda_group *g, float *const *y, size_t count, int64_t limit_ns)
{
    return false;
}

static void ask_comms(struct cuda_group *g)
{
}

static void abort_comms(struct cuda_group *g)
{
}

static void destroy_comms(struct cuda_group *g)
{
}

static bool init_comms(struct cuda_group *g)
{
    return false;
}

#endif

/* --- the watch */

/* Whether a rank's counter is another than when it was looked at last. */
static bool has_moved(const struct cuda_group *g, uint32_t *seen)
{
    bool moved = false;
    for (uint32_t k = 0; k < g->n; k++) {
        uint32_t passed = *(const volatile uint32_t *)&g->passed[k * STRIDE];
        moved = moved || passed != seen[k];
        seen[k] = passed;
    }
    return moved;
}

/* Whether a rank's stream has work, which is asked without waiting. */
static bool is_busy(struct cuda_group *g)
{
    bool busy = false;
    for (uint32_t k = 0; k < g->n; k++) {
        struct ops_device *dev = g->devices[k];
        (void)use(dev);
        if (is_capturing(dev)) {
            return false;
        }
        cudaError_t code = cudaStreamQuery(dev->stream);
        if (code != cudaSuccess && code != cudaErrorNotReady) {
            (void)cudaGetLastError();
            fail(g, "rank %u (cuda:%u) is lost: %s", k, dev->limits.device_i,
                 cudaGetErrorString(code));
            return false;
        }
        busy = busy || code == cudaErrorNotReady;
    }
    return busy;
}

enum arrivals { ALL_THERE, SOME_LATE, ALL_LATE, NOT_KNOWN };

static bool has_come(const struct cuda_group *g, uint32_t k, uint32_t sum, bool is_replay)
{
    if (is_replay) {
        return *(const volatile uint32_t *)&g->came[k * STRIDE] > sum;
    }
    (void)use(g->devices[k]);
    bool is_late = cudaEventQuery(g->reached[k][sum % RING]) == cudaErrorNotReady;
    (void)cudaGetLastError();
    return !is_late;
}

/* Which ranks have come to the sum that is due; the first that has not is in ret_late. A call whose
 * sums nobody asked for is a replay. */
static enum arrivals who_is_there(const struct cuda_group *g, uint32_t *ret_late)
{
    uint32_t least = UINT32_MAX, n_late = 0;
    uint32_t n_asked = atomic_load(&g->n_asked), base = atomic_load(&g->base);
    for (uint32_t k = 0; k < (g->has_parts ? g->n : 1); k++) {
        uint32_t passed = *(const volatile uint32_t *)&g->passed[k * STRIDE] - base;
        least = passed < least ? passed : least;
    }
    if (n_asked && (least >= n_asked || n_asked - least > RING)) {
        return NOT_KNOWN;
    }
    for (uint32_t k = g->n; k-- > 0;) {
        bool is_late = !has_come(g, k, least, n_asked == 0);
        n_late += is_late;
        *ret_late = is_late ? k : *ret_late;
    }
    return n_late == 0 ? ALL_THERE : (n_late < g->n ? SOME_LATE : ALL_LATE);
}

/* Streams had work for STALL_NS, and none passed a sum. If none has come to one either, all
 * compute: a long chunk, or what would hang on one GPU too. */
static void judge(struct cuda_group *g)
{
    double stall_s = (double)STALL_NS * 1e-9;
    uint32_t late = 0;
    switch (who_is_there(g, &late)) {
    case SOME_LATE:
        fail(g, "rank %u (cuda:%u) hangs: others waited %.1f s for its part of a sum", late,
             g->devices[late]->limits.device_i, stall_s);
        break;
    case ALL_THERE:
        fail(g, "a sum hangs: all %u ranks came to it, and none passed it in %.1f s", g->n,
             stall_s);
        break;
    case NOT_KNOWN:
        fail(g, "a rank hangs: none of %u passed a sum in %.1f s", g->n, stall_s);
        break;
    case ALL_LATE:
        break;
    }
}

static void *abort_run(void *cookie)
{
    struct cuda_group *g = cookie;
    abort_comms(g);
    atomic_store(&g->is_aborted, true);
    return NULL;
}

/* The group has failed: once, says so and lets those who wait go. On a thread of its own, since to
 * abort may hang too. */
static void give_up(struct cuda_group *g)
{
    pthread_t thread;
    *g->stop_pushes = 1;
    log_error("group", "%s", g->failure.text);
    if (pthread_create(&thread, NULL, abort_run, g) == 0) {
        (void)pthread_detach(thread);
    }
}

static void *watch_run(void *cookie)
{
    struct cuda_group *g = cookie;
    uint32_t seen[CUDA_MAX_GROUP] = {0};
    int64_t last_ns = now_ns(), stalled_ns = 0, failed_ns = 0;
    bool gave_up = false;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed; /* others may record */
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    pthread_mutex_lock(&g->lock);
    while (!g->stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)PERIOD_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        (void)pthread_cond_timedwait(&g->wake, &g->lock, &until);
        pthread_mutex_unlock(&g->lock);
        /* A process that was stopped goes on where it was: only what was watched counts. */
        int64_t at_ns = now_ns(), passed_ns = at_ns - last_ns;
        passed_ns = passed_ns < 5 * PERIOD_NS ? passed_ns : 5 * PERIOD_NS;
        last_ns = at_ns;
        unsigned in_step = atomic_load(&g->in_step);
        if (!atomic_load(&g->failed)) {
            if (g->has_parts) {
                ask_comms(g);
            }
            bool stands = !has_moved(g, seen) && in_step && is_busy(g); /* else the host is slow */
            stalled_ns = stands ? stalled_ns + passed_ns : 0;
            if (stalled_ns >= STALL_NS) {
                stalled_ns = 0;
                judge(g);
            }
        }
        if (atomic_load(&g->failed) && !gave_up) {
            gave_up = true;
            give_up(g);
        } else if (gave_up) {
            failed_ns = in_step ? failed_ns + passed_ns : 0;
            if (failed_ns >= (in_step & CLOSING ? CLOSE_NS : GRACE_NS)) {
                log_error("group", "%s: the call under way does not end, so the process does",
                          g->name);
                _exit(EXIT_FAILURE);
            }
        }
        pthread_mutex_lock(&g->lock);
    }
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

static void stop_watch(struct cuda_group *g)
{
    if (!g->is_watched) {
        return;
    }
    pthread_mutex_lock(&g->lock);
    g->stop = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
    (void)pthread_join(g->watch, NULL);
    g->is_watched = false;
}

/* --- joining */

/* How many GPUs the devices lie on. */
static uint32_t count_cards(struct ops_device *const *devices, uint32_t n)
{
    uint32_t n_cards = 0;
    for (uint32_t k = 0; k < n; k++) {
        bool is_new = true;
        for (uint32_t j = 0; j < k; j++) {
            is_new = is_new && devices[j]->limits.device_i != devices[k]->limits.device_i;
        }
        n_cards += is_new;
    }
    return n_cards;
}

static void set_name(struct cuda_group *g)
{
    size_t at = 0;
    for (uint32_t k = 0; k < g->n && at < sizeof(g->name); k++) {
        at += (size_t)snprintf(g->name + at, sizeof(g->name) - at, k ? ",%u" : "cuda:%u",
                               g->devices[k]->limits.device_i);
    }
}

static void tell(const struct cuda_group *g, int version)
{
    uint32_t n_pairs = 0, n_peers = 0;
    for (uint32_t a = 0; a < g->n; a++) {
        for (uint32_t b = 0; b < g->n; b++) {
            int can = 0;
            if (a != b && cudaDeviceCanAccessPeer(&can, (int)g->devices[a]->limits.device_i,
                                                  (int)g->devices[b]->limits.device_i)) {
                (void)cudaGetLastError();
            }
            n_pairs += a != b;
            n_peers += can != 0;
        }
    }
    log_info("group",
             "%s: parts are %sgathered by NCCL %d.%d.%d, each GPU adds them in rank order; "
             "peer access between %s",
             g->name, g->pushes ? "written into each other's memory, or in long calls " : "",
             version / 10000, version / 100 % 100, version % 100,
             n_peers == n_pairs ? "all: NCCL copies from GPU to GPU"
             : n_peers          ? "some: NCCL goes through the host's memory for the others"
                                : "none: NCCL goes through the host's memory");
}

/* Until all streams are through. */
static bool drained(struct cuda_group *g)
{
    bool ok = true;
    int64_t begin_ns = now_ns();
    for (uint32_t k = 0; k < g->n && ok; k++) {
        struct ops_device *dev = g->devices[k];
        cudaError_t code = cudaErrorNotReady;
        (void)use(dev);
        while (code == cudaErrorNotReady && now_ns() - begin_ns < OPEN_NS) {
            code = cudaStreamQuery(dev->stream);
            sched_yield();
        }
        (void)cudaGetLastError();
        ok = code == cudaSuccess;
        if (!ok) {
            fail(g, "rank %u (cuda:%u): a first sum of the group: %s", k, dev->limits.device_i,
                 cudaGetErrorString(code));
        }
    }
    return ok;
}

/* Parts of every size are gathered once: NCCL chooses its way by size, and connects when it goes
 * one for the first time, which takes longer than a step may. */
static bool first_sums(struct cuda_group *g)
{
    float *parts[CUDA_MAX_GROUP];
    uint32_t most = g->devices[0]->limits.n_rows;
    bool ok = true;
    for (uint32_t k = 0; k < g->n; k++) {
        parts[k] = g->devices[k]->head_x;
    }
    for (uint64_t n_rows = 1; ok && n_rows < 2 * (uint64_t)most; n_rows *= 2) {
        size_t n = n_rows < most ? n_rows : most;
        ok = gather_locked(g, parts, n * g->devices[0]->d.hidden, OPEN_NS) && drained(g);
    }
    return ok;
}

/* Each GPU reaches the memory of all others. */
static enum status open_peers(struct cuda_group *g, struct error *err)
{
    for (uint32_t a = 0; a < g->n; a++) {
        for (uint32_t b = 0; b < g->n; b++) {
            uint32_t from = g->devices[a]->limits.device_i, to = g->devices[b]->limits.device_i;
            if (a == b) {
                continue;
            }
            cudaError_t code = use(g->devices[a]);
            code = code == cudaSuccess ? cudaDeviceEnablePeerAccess((int)to, 0) : code;
            if (code != cudaSuccess) {
                (void)cudaGetLastError();
            }
            if (code != cudaSuccess && code != cudaErrorPeerAccessAlreadyEnabled) {
                return error_set(err, STATUS_UNSUPPORTED,
                                 "%s: comm=push writes from GPU to GPU, and cuda:%u does not reach "
                                 "cuda:%u: %s; comm=plain goes over NCCL",
                                 g->name, from, to, cudaGetErrorString(code));
            }
        }
    }
    return STATUS_OK;
}

/* What the watch reads. */
static enum status open_signs(struct cuda_group *g, struct error *err)
{
    void *passed = NULL;
    size_t bytes = (2 * (size_t)g->n + 1) * STRIDE * sizeof(uint32_t);
    if (use(g->devices[0]) != cudaSuccess ||
        cudaHostAlloc(&passed, bytes, cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
        (void)cudaGetLastError();
        return error_set(err, STATUS_EXHAUSTED, "%s: no pinned memory for the group", g->name);
    }
    g->passed = passed;
    g->came = g->passed + (size_t)g->n * STRIDE;
    g->stop_pushes = g->came + (size_t)g->n * STRIDE;
    *g->stop_pushes = 0;
    for (uint32_t k = 0; k < g->n; k++) {
        g->passed[k * STRIDE] = g->came[k * STRIDE] = 0;
        g->devices[k]->sums_there = &g->passed[k * STRIDE];
        bool ok = use(g->devices[k]) == cudaSuccess;
        for (uint32_t i = 0; i < RING && ok; i++) {
            ok = cudaEventCreateWithFlags(&g->reached[k][i], cudaEventDisableTiming) == cudaSuccess;
        }
        if (!ok) {
            (void)cudaGetLastError();
            return error_set(err, STATUS_SYSTEM, "%s: no events for the group", g->name);
        }
    }
    return STATUS_OK;
}

static enum status open_watch(struct cuda_group *g, struct error *err)
{
    if (pthread_create(&g->watch, NULL, watch_run, g)) {
        return error_set(err, STATUS_EXHAUSTED, "%s: no thread to watch the group", g->name);
    }
    g->is_watched = true;
    return STATUS_OK;
}

/* Ranks on a GPU each. */
static enum status open_parts(struct cuda_group *g, struct error *err)
{
    int version = 0;
    enum status status = device_find_nccl(&version, err);
    if (!status && g->pushes) {
        status = open_peers(g, err);
    }
    status = status ? status : open_signs(g, err);
    if (!status && (!init_comms(g) || !first_sums(g))) {
        status = error_set(err, STATUS_SYSTEM, "%s", g->failure.text);
    }
    status = status ? status : open_watch(g, err);
    if (!status) {
        tell(g, version);
    }
    return status;
}

static enum status open_one_gpu(struct cuda_group *g, struct error *err)
{
    enum status status = open_signs(g, err);
    status = status ? status : open_watch(g, err);
    if (!status) {
        log_info("group", "%s: ranks on one GPU, which adds their parts where they lie", g->name);
    }
    return status;
}

static void group_free(struct cuda_group *g)
{
    stop_watch(g);
    for (uint32_t k = 0; k < g->n; k++) {
        for (uint32_t i = 0; i < RING && g->reached[k][i]; i++) {
            (void)cudaEventDestroy(g->reached[k][i]);
        }
    }
    if (g->passed) {
        (void)cudaFreeHost(g->passed);
    }
    pthread_mutex_destroy(&g->calls);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->wake);
    mem_free(g);
}

static struct cuda_group *group_new(struct ops_device *const *devices, uint32_t n)
{
    struct cuda_group *g = mem_zalloc(sizeof(*g));
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&g->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&g->calls, NULL);
    pthread_mutex_init(&g->lock, NULL);
    g->n = g->n_open = n;
    for (uint32_t k = 0; k < n; k++) {
        g->devices[k] = devices[k];
    }
    set_name(g);
    return g;
}

/* A group that could not be opened: nothing may be left in the devices' streams, which are closed
 * next. */
static void end_failed(struct cuda_group *g)
{
    struct timespec pause = {0, (long)PERIOD_NS};
    int64_t begin_ns = now_ns();
    pthread_t thread;
    if (!g->has_parts || pthread_create(&thread, NULL, abort_run, g)) {
        return;
    }
    (void)pthread_detach(thread);
    while (!atomic_load(&g->is_aborted)) {
        if (now_ns() - begin_ns > CLOSE_NS) {
            log_error("group", "%s: the group can't be given up, so the process ends",
                      g->failure.text[0] ? g->failure.text : g->name);
            _exit(EXIT_FAILURE);
        }
        nanosleep(&pause, NULL);
    }
}

/* What a device takes for the sums. */
static enum status take_rooms(struct ops_device *const *devices, uint32_t n, bool has_parts,
                              bool pushes, struct error *err)
{
    bool ok = true;
    for (uint32_t k = 0; k < n; k++) {
        struct ops_device *dev = devices[k];
        dev->sums = cuda_room(dev, 1, 1, &ok);
        if (has_parts) {
            dev->gathered = cuda_room(dev, (size_t)n * dev->limits.n_rows, dev->d.hidden, &ok);
        }
        if (has_parts && pushes) { /* by turns two places for each rank, of four words a pair */
            dev->inbox = cuda_room(dev, 2 * (size_t)n * 4, cuda_push_pairs(dev), &ok);
            dev->push_left = cuda_room(dev, 1, 1, &ok);
        }
    }
    return ok ? STATUS_OK
              : error_set(err, STATUS_EXHAUSTED, "no device memory for the parts of %u ranks", n);
}

static enum status join(struct ops_device *const *devices, uint32_t n, bool pushes,
                        struct error *err)
{
    uint32_t n_cards = count_cards(devices, n);
    if (n > CUDA_MAX_GROUP || (n_cards != 1 && n_cards != n)) {
        return error_set(
            err, STATUS_UNSUPPORTED,
            "a group of %u ranks on %u GPUs: it has %d ranks at most, each on a GPU of "
            "its own or, to try a group out, all on one",
            n, n_cards, CUDA_MAX_GROUP);
    }
    enum status status = take_rooms(devices, n, n_cards > 1, pushes, err);
    if (status || devices[0]->limits.only_plan) {
        return status;
    }
    struct cuda_group *g = group_new(devices, n);
    g->has_parts = n_cards > 1;
    g->pushes = g->has_parts && pushes;
    status = g->has_parts ? open_parts(g, err) : open_one_gpu(g, err);
    if (status) {
        end_failed(g);
        group_free(g);
        return status;
    }
    for (uint32_t k = 0; k < n; k++) {
        devices[k]->group = g;
    }
    return STATUS_OK;
}

enum status cuda_join(struct ops_device *const *devices, uint32_t n, struct error *err)
{
    return join(devices, n, false, err);
}

enum status cuda_join_push(struct ops_device *const *devices, uint32_t n, struct error *err)
{
    return join(devices, n, true, err);
}

/* --- calls */

bool cuda_group_pushes(const struct cuda_group *g)
{
    return g && g->pushes;
}

size_t cuda_push_pairs(const struct ops_device *dev)
{
    size_t rows = dev->limits.n_rows < CUDA_PUSH_ROWS ? dev->limits.n_rows : CUDA_PUSH_ROWS;
    return rows * dev->d.hidden / 2;
}

const volatile uint32_t *cuda_group_stop(const struct cuda_group *g)
{
    return g->stop_pushes;
}

volatile uint32_t *cuda_group_came(struct cuda_group *g, uint32_t rank)
{
    return &g->came[rank * STRIDE];
}

bool cuda_group_next(struct cuda_group *g, bool writes_itself, uint32_t *ret_came_to)
{
    bool ok = !atomic_load(&g->failed);
    bool records = is_capturing(g->devices[0]);
    uint32_t i = atomic_load(&g->n_asked);
    for (uint32_t k = 0; k < g->n && ok && records && g->has_parts && !writes_itself; k++) {
        (void)use(g->devices[k]);
        cuda_run_progress(g->devices[k], cuda_group_came(g, k), g->n_recorded + 1);
    }
    g->n_recorded += records;
    *ret_came_to = records ? g->n_recorded : 0;
    for (uint32_t k = 0; k < g->n && ok && !records; k++) {
        struct ops_device *dev = g->devices[k];
        if (use(dev) != cudaSuccess ||
            cudaEventRecord(g->reached[k][i % RING], cuda_stream_for(dev)) != cudaSuccess) {
            fail(g, "rank %u (cuda:%u) is lost: %s", k, dev->limits.device_i,
                 cudaGetErrorString(cudaGetLastError()));
            ok = false;
        }
    }
    if (!records) {
        atomic_store(&g->n_asked, i + 1);
        atomic_store(&g->in_step, (1u << g->n) - 1); /* also where a wait came between */
    }
    return ok;
}

bool cuda_group_gather(struct cuda_group *g, float *const *y, size_t count)
{
    uint32_t came_to;
    pthread_mutex_lock(&g->calls);
    bool ok = cuda_group_next(g, false, &came_to) && gather_locked(g, y, count, STALL_NS);
    pthread_mutex_unlock(&g->calls);
    return ok;
}

void cuda_group_begin(struct ops_device *dev)
{
    struct cuda_group *g = dev->group;
    if (g && !atomic_load(&g->in_step)) {
        atomic_store(&g->n_asked, 0);
        for (uint32_t k = 0; k < g->n; k++) {
            *(volatile uint32_t *)&g->came[k * STRIDE] = 0;
        }
        atomic_store(&g->base, *(const volatile uint32_t *)g->passed);
    }
    for (uint32_t k = 0; g && k < g->n; k++) {
        if (g->devices[k] == dev) {
            atomic_fetch_or(&g->in_step, 1u << k);
        }
    }
}

void cuda_group_record(struct ops_device *dev)
{
    if (dev->group) {
        dev->group->n_recorded = 0;
    }
}

void cuda_group_end(struct ops_device *dev)
{
    struct cuda_group *g = dev->group;
    for (uint32_t k = 0; g && k < g->n; k++) {
        if (g->devices[k] == dev) {
            atomic_fetch_and(&g->in_step, ~(1u << k));
        }
    }
    if (g && atomic_load(&g->failed)) {
        atomic_store(&g->in_step, 0);
        pthread_mutex_lock(&g->lock);
        cuda_failed(dev, STATUS_SYSTEM, "%s", g->failure.text);
        pthread_mutex_unlock(&g->lock);
        for (uint32_t k = 0; k < g->n; k++) { /* to wait for what hangs would keep the node */
            g->devices[k]->given_up = true;
        }
    }
}

/* A failed group keeps its watch while its devices are closed, which may hang. */
void cuda_group_leave(struct ops_device *dev)
{
    struct cuda_group *g = dev->group;
    if (!g || g->n_open < g->n) {
        return;
    }
    if (atomic_load(&g->failed)) {
        atomic_store(&g->in_step, CLOSING);
        return;
    }
    stop_watch(g);
    destroy_comms(g);
}

void cuda_group_left(struct cuda_group *g)
{
    if (!g || --g->n_open > 0) {
        return;
    }
    struct timespec pause = {0, (long)PERIOD_NS};
    while (g->is_watched && !atomic_load(&g->is_aborted)) {
        nanosleep(&pause, NULL); /* the watch ends the process if this takes too long */
    }
    group_free(g);
}
