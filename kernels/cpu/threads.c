/* A pool of threads for the operations of one device.
 *
 * Owns n - 1 threads; the caller is the first. A run is one word: generation, number of items, next
 * item. Taking an item is a compare-and-swap on it, so a thread that comes late can't take one of a
 * run that is over, and the caller waits for the items that were taken, never for a thread that the
 * system has not woken. Workers spin for a moment before they sleep (a decode step has some hundred
 * runs, and waking a thread takes longer than most of them): an idle engine takes no processor. The
 * invariant: while an item is out, its run's function and cookie stand.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"

enum {
    SPINS = 4000,       /* about 20 us: longer than the gap between two operations of a step */
    SMALL_WORK = 20000, /* multiply-adds, about 2 us: less than it takes to share them */
    ITEM_BITS = 22
};

#define ITEM_MASK ((UINT64_C(1) << ITEM_BITS) - 1)

struct cpu_threads {
    uint32_t n; /* with the caller */
    pthread_t ids[CPU_MAX_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t wake;
    uint32_t n_asleep;     /* under lock */
    _Atomic uint64_t word; /* generation, n_items, next item */
    _Atomic uint32_t n_done;
    _Atomic bool stop;
    cpu_item_fn fn; /* of this run; written before word changes */
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

static uint64_t generation_of(uint64_t word)
{
    return word >> (2 * ITEM_BITS);
}

/* Takes and runs items of one generation until there are none left. */
static void run_items(struct cpu_threads *t, uint64_t generation, uint32_t thread_i)
{
    uint64_t word = atomic_load_explicit(&t->word, memory_order_acquire);
    for (;;) {
        uint64_t item = word & ITEM_MASK, n_items = word >> ITEM_BITS & ITEM_MASK;
        if (generation_of(word) != generation || item >= n_items) {
            return;
        }
        if (!atomic_compare_exchange_weak_explicit(&t->word, &word, word + 1, memory_order_acq_rel,
                                                   memory_order_acquire)) {
            continue;
        }
        t->fn(t->cookie, (uint32_t)item, thread_i);
        atomic_fetch_add_explicit(&t->n_done, 1, memory_order_release);
        word = atomic_load_explicit(&t->word, memory_order_acquire);
    }
}

static bool is_new(struct cpu_threads *t, uint64_t seen)
{
    return generation_of(atomic_load_explicit(&t->word, memory_order_acquire)) != seen;
}

/* Waits until the generation is not `seen` and returns it. */
static uint64_t await_generation(struct cpu_threads *t, uint64_t seen)
{
    for (uint32_t i = 0; i < SPINS && !is_new(t, seen); i++) {
        relax();
    }
    if (!is_new(t, seen)) {
        pthread_mutex_lock(&t->lock);
        t->n_asleep++;
        while (!is_new(t, seen)) {
            pthread_cond_wait(&t->wake, &t->lock);
        }
        t->n_asleep--;
        pthread_mutex_unlock(&t->lock);
    }
    return generation_of(atomic_load_explicit(&t->word, memory_order_acquire));
}

static void *worker_main(void *cookie)
{
    struct worker_start start = *(struct worker_start *)cookie;
    mem_free(cookie);
    struct cpu_threads *t = start.threads;
    uint64_t seen = 0;
    for (;;) {
        seen = await_generation(t, seen);
        if (atomic_load_explicit(&t->stop, memory_order_relaxed)) {
            return NULL;
        }
        run_items(t, seen, start.thread_i);
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

/* Starts a run of n_items and wakes who sleeps; returns its generation. */
static uint64_t announce(struct cpu_threads *t, uint32_t n_items)
{
    uint64_t before = atomic_load_explicit(&t->word, memory_order_relaxed);
    uint64_t generation = (generation_of(before) + 1) & ((UINT64_C(1) << (64 - 2 * ITEM_BITS)) - 1);
    pthread_mutex_lock(&t->lock);
    atomic_store_explicit(&t->word, generation << (2 * ITEM_BITS) | (uint64_t)n_items << ITEM_BITS,
                          memory_order_release);
    if (t->n_asleep) {
        pthread_cond_broadcast(&t->wake);
    }
    pthread_mutex_unlock(&t->lock);
    return generation;
}

void cpu_threads_free(struct cpu_threads *t)
{
    if (!t) {
        return;
    }
    atomic_store_explicit(&t->stop, true, memory_order_relaxed);
    announce(t, 0);
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
    if (!t || t->n == 1 || n_items < 2 || n_items > ITEM_MASK || work < SMALL_WORK) {
        for (uint32_t i = 0; i < n_items; i++) {
            fn(cookie, i, 0);
        }
        return;
    }
    t->fn = fn;
    t->cookie = cookie;
    atomic_store_explicit(&t->n_done, 0, memory_order_relaxed);
    run_items(t, announce(t, n_items), 0);
    for (uint32_t i = 0; atomic_load_explicit(&t->n_done, memory_order_acquire) < n_items; i++) {
        if (i < SPINS) {
            relax();
        } else {
            usleep(20); /* a worker lost its processor to someone else */
        }
    }
}
