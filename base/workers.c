/*
 * A pool of threads for the loop.
 *
 * The pool thread sees a job only between its being taken from the queue and its posting to the
 * mailbox; everything else about a job is the loop thread's. Jobs not yet ended are counted on the
 * loop thread and bounded by the queue's bound, the number of threads and what the mailbox holds,
 * so that posting a finished job can never fail: a result is never lost for want of room.
 */
#include "base/workers.h"

#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"

enum {
    WORKERS_MAX_THREADS = 64,
    /* Nothing that runs on the pool recurses without a limit; parse depth is bounded (128). */
    WORKER_STACK_BYTES = 1 << 20,
};

/* Owned by its pool; where it may be touched is said above. */
struct workers_job {
    struct list link; /* in queue while waiting */
    struct list live; /* in live until it has ended */
    workers_run_fn run;
    workers_end_fn done;
    workers_end_fn drop;
    void *cookie;
    bool queued; /* under lock */
    atomic_bool cancelled;
};

/* Owned by its creator; loop thread, the part under lock shared with the pool. */
struct workers {
    struct mailbox *ended;
    struct list live;
    size_t n_live;
    size_t queue_bound;
    size_t live_bound;
    size_t n_threads;
    pthread_t threads[WORKERS_MAX_THREADS];

    pthread_mutex_t lock;
    pthread_cond_t wake;
    struct list queue;
    size_t n_queued;
    bool stopping;
};

static void *worker_main(void *arg)
{
    struct workers *workers = arg;

    pthread_mutex_lock(&workers->lock);
    while (!workers->stopping) {
        struct list *first = list_first(&workers->queue);
        struct workers_job *job;
        enum status s;

        if (!first) {
            pthread_cond_wait(&workers->wake, &workers->lock);
            continue;
        }
        job = list_entry(first, struct workers_job, link);
        list_remove(&job->link);
        job->queued = false;
        workers->n_queued--;
        pthread_mutex_unlock(&workers->lock);

        job->run(job->cookie, job);
        s = mailbox_post(workers->ended, job);
        assert(s == STATUS_OK); /* it has room for every live job */

        pthread_mutex_lock(&workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

static void job_end(struct workers *workers, struct workers_job *job)
{
    bool cancelled = atomic_load(&job->cancelled);
    workers_end_fn fn = cancelled ? job->drop : job->done;
    void *cookie = job->cookie;

    list_remove(&job->live);
    workers->n_live--;
    mem_free(job);
    if (fn) {
        fn(cookie);
    }
}

static void on_ended(void *cookie, void *msg)
{
    job_end(cookie, msg);
}

/* Signals belong to the loop thread: a pool thread that took SIGTERM would delay it. */
static int thread_start(pthread_t *thread, struct workers *workers)
{
    pthread_attr_t attr;
    sigset_t all;
    sigset_t before;
    int rc;

    sigfillset(&all);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, WORKER_STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, &attr, worker_main, workers);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return rc;
}

enum status workers_create(struct loop *loop, size_t n_threads, size_t queue_bound,
                           struct workers **ret_workers)
{
    struct workers *workers;
    enum status s;

    if (n_threads < 1 || n_threads > WORKERS_MAX_THREADS || queue_bound < 1) {
        return STATUS_INVALID;
    }
    workers = mem_zalloc(sizeof(*workers));
    list_init(&workers->queue);
    list_init(&workers->live);
    workers->queue_bound = queue_bound;
    /* waiting, running, and as many again that have run while the loop was busy elsewhere */
    workers->live_bound = 2 * queue_bound + n_threads;
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->wake, NULL);
    s = mailbox_create(loop, workers->live_bound, on_ended, workers, &workers->ended);
    if (s) {
        workers_free(workers);
        return s;
    }
    for (; workers->n_threads < n_threads; workers->n_threads++) {
        if (thread_start(&workers->threads[workers->n_threads], workers) != 0) {
            log_error("workers", "cannot start thread %zu of %zu: %m", workers->n_threads + 1,
                      n_threads);
            workers_free(workers);
            return STATUS_SYSTEM;
        }
    }
    *ret_workers = workers;
    return STATUS_OK;
}

enum status workers_submit(struct workers *workers, workers_run_fn run, workers_end_fn done,
                           workers_end_fn drop, void *cookie, struct workers_job **ret_job)
{
    struct workers_job *job;

    if (workers->n_live >= workers->live_bound ||
        workers_n_queued(workers) >= workers->queue_bound) {
        return STATUS_EXHAUSTED;
    }
    job = mem_zalloc(sizeof(*job));
    job->run = run;
    job->done = done;
    job->drop = drop;
    job->cookie = cookie;
    job->queued = true;
    atomic_init(&job->cancelled, false);
    list_push_back(&workers->live, &job->live);
    workers->n_live++;

    pthread_mutex_lock(&workers->lock);
    list_push_back(&workers->queue, &job->link);
    workers->n_queued++;
    pthread_mutex_unlock(&workers->lock);
    pthread_cond_signal(&workers->wake); /* behind the lock, or the thread wakes to wait for it */
    if (ret_job) {
        *ret_job = job;
    }
    return STATUS_OK;
}

void workers_cancel(struct workers *workers, struct workers_job *job)
{
    bool queued;

    atomic_store(&job->cancelled, true);
    pthread_mutex_lock(&workers->lock);
    queued = job->queued;
    if (queued) {
        list_remove(&job->link);
        workers->n_queued--;
    }
    pthread_mutex_unlock(&workers->lock);
    if (queued) {
        job_end(workers, job);
    }
}

bool workers_job_cancelled(struct workers_job *job)
{
    return atomic_load_explicit(&job->cancelled, memory_order_relaxed);
}

size_t workers_n_queued(struct workers *workers)
{
    size_t n;

    pthread_mutex_lock(&workers->lock);
    n = workers->n_queued;
    pthread_mutex_unlock(&workers->lock);
    return n;
}

size_t workers_n_live(const struct workers *workers)
{
    return workers->n_live;
}

void workers_free(struct workers *workers)
{
    struct workers_job *job;

    if (!workers) {
        return;
    }
    /* Told first, so that long runs see it; the queued ones leave the queue and end here. */
    pthread_mutex_lock(&workers->lock);
    workers->stopping = true;
    workers->n_queued = 0;
    list_init(&workers->queue);
    list_for_each(p, &workers->live)
    {
        atomic_store(&list_entry(p, struct workers_job, live)->cancelled, true);
    }
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->lock);
    for (size_t i = 0; i < workers->n_threads; i++) {
        pthread_join(workers->threads[i], NULL);
    }
    while (!list_empty(&workers->live)) {
        job = list_entry(list_first(&workers->live), struct workers_job, live);
        job_end(workers, job);
    }
    mailbox_free(workers->ended);
    pthread_cond_destroy(&workers->wake);
    pthread_mutex_destroy(&workers->lock);
    mem_free(workers);
}
