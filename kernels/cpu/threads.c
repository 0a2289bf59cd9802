/* A pool of threads for the operations of one device.
 *
 * Owns n - 1 threads; the caller is the first. A run is a generation number: workers wait for it to
 * change, briefly spinning (a decode step has some hundred runs, and waking a thread takes longer
 * than most of them) and then sleeping, so an idle engine takes no processor. Items are handed out
 * by one counter. The invariant: when a run returns, no worker touches its cookie any more.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"

enum {
    SPINS = 4000,      /* about 20 us: longer than the gap between two operations of a step */
    SMALL_WORK = 20000 /* multiply-adds, about 2 us: less than it takes to share them */
};

struct cpu_threads {
    uint32_t n; /* with the caller */
    pthread_t ids[CPU_MAX_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t wake;
    uint32_t n_asleep; /* under lock */
    _Atomic uint32_t generation, next_item, n_busy;
    _Atomic bool stop;
    uint32_t n_items; /* of this run; written before generation changes */
    cpu_item_fn fn;
    void *cookie;
};

struct worker_start {
    struct cpu_threads *threads;
    uint32_t thread_i;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void run_items(struct cpu_threads *t, uint32_t thread_i)
{
    for (;;) {
        uint32_t item = atomic_fetch_add_explicit(&t->next_item, 1, memory_order_relaxed);
        if (item >= t->n_items) {
            return;
        }
        t->fn(t->cookie, item, thread_i);
    }
}

/* Waits until the generation is not `seen` and returns it. */
static uint32_t await_generation(struct cpu_threads *t, uint32_t seen)
{
    for (uint32_t i = 0; i < SPINS; i++) {
        uint32_t now = atomic_load_explicit(&t->generation, memory_order_acquire);
        if (now != seen) {
            return now;
        }
        relax();
    }
    pthread_mutex_lock(&t->lock);
    t->n_asleep++;
    while (atomic_load_explicit(&t->generation, memory_order_acquire) == seen) {
        pthread_cond_wait(&t->wake, &t->lock);
    }
    t->n_asleep--;
    pthread_mutex_unlock(&t->lock);
    return atomic_load_explicit(&t->generation, memory_order_acquire);
}

static void *worker_main(void *cookie)
{
    struct worker_start start = *(struct worker_start *)cookie;
    mem_free(cookie);
    struct cpu_threads *t = start.threads;
    uint32_t seen = 0;
    for (;;) {
        seen = await_generation(t, seen);
        if (atomic_load_explicit(&t->stop, memory_order_relaxed)) {
            return NULL;
        }
        run_items(t, start.thread_i);
        atomic_fetch_sub_explicit(&t->n_busy, 1, memory_order_release);
    }
}

struct cpu_threads *cpu_threads_create(uint32_t n)
{
    struct cpu_threads *t = mem_zalloc(sizeof(*t));
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->wake, NULL);
    t->n = 1;
    for (uint32_t i = 1; i < n && i < CPU_MAX_THREADS; i++) {
        struct worker_start *start = mem_zalloc(sizeof(*start));
        *start = (struct worker_start){t, i};
        if (pthread_create(&t->ids[i], NULL, worker_main, start)) {
            mem_free(start);
            break; /* fewer threads give the same bits, later */
        }
        t->n++;
    }
    return t;
}

/* Starts the next generation and wakes who sleeps. */
static void announce(struct cpu_threads *t)
{
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add_explicit(&t->generation, 1, memory_order_release);
    if (t->n_asleep) {
        pthread_cond_broadcast(&t->wake);
    }
    pthread_mutex_unlock(&t->lock);
}

void cpu_threads_free(struct cpu_threads *t)
{
    if (!t) {
        return;
    }
    atomic_store_explicit(&t->stop, true, memory_order_relaxed);
    announce(t);
    for (uint32_t i = 1; i < t->n; i++) {
        pthread_join(t->ids[i], NULL);
    }
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->wake);
    mem_free(t);
}

void cpu_threads_run(struct cpu_threads *t, uint32_t n_items, uint64_t work, cpu_item_fn fn,
                     void *cookie)
{
    if (!t || t->n == 1 || n_items < 2 || work < SMALL_WORK) {
        for (uint32_t i = 0; i < n_items; i++) {
            fn(cookie, i, 0);
        }
        return;
    }
    t->n_items = n_items;
    t->fn = fn;
    t->cookie = cookie;
    atomic_store_explicit(&t->next_item, 0, memory_order_relaxed);
    atomic_store_explicit(&t->n_busy, t->n - 1, memory_order_relaxed);
    announce(t);
    run_items(t, 0);
    for (uint32_t i = 0; atomic_load_explicit(&t->n_busy, memory_order_acquire); i++) {
        if (i < SPINS) {
            relax();
        } else {
            usleep(20); /* a worker lost its processor to someone else */
        }
    }
}
