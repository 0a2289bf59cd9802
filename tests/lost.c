/* tests/lost.c - see the header. A ticker sleeps until an instant and looks how much later it is;
 * it is pinned, for a thread that may move finds the processor that is left. It needs next to
 * nothing, so that on a machine that is merely busy it is on time: a share of a processor is no
 * excuse, a processor that is gone is.
 */
#include "tests/lost.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/loop.h"
#include "base/mem.h"

enum {
    TICK_MS = 4,
    LATE_MS = 4,          /* less is how schedulers are */
    MAX_PROCESSORS = 64,  /* that many are watched of more */
    MAX_SPELLS = 1 << 12, /* the last so many of each are remembered */
};

struct spell {
    uint64_t from_ns, to_ns;
};

struct ticker {
    int processor;
    atomic_uint_fast64_t ticked_ns; /* what lies before it is noted */
    pthread_mutex_t lock;
    uint64_t n;
    struct spell spells[MAX_SPELLS]; /* under the lock */
};

static struct ticker *tickers[MAX_PROCESSORS];
static unsigned n_tickers;

static void sleep_until(uint64_t ns)
{
    struct timespec until = {.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {
    }
}

static void *ticker_run(void *cookie)
{
    struct ticker *ticker = cookie;
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET((size_t)ticker->processor, &only);
    (void)pthread_setaffinity_np(pthread_self(), sizeof only, &only); /* else it ticks anywhere */
    for (uint64_t due_ns = loop_now_ns();;) {
        sleep_until(due_ns);
        uint64_t now_ns = loop_now_ns();
        if (now_ns > due_ns + LATE_MS * NS_PER_MS) {
            pthread_mutex_lock(&ticker->lock);
            ticker->spells[ticker->n++ % MAX_SPELLS] = (struct spell){due_ns, now_ns};
            pthread_mutex_unlock(&ticker->lock);
        }
        atomic_store(&ticker->ticked_ns, now_ns);
        due_ns = now_ns + TICK_MS * NS_PER_MS;
    }
    return NULL;
}

void lost_watch(void)
{
    cpu_set_t ours;
    if (n_tickers > 0 || sched_getaffinity(0, sizeof ours, &ours) != 0) {
        return;
    }
    for (int i = 0; i < CPU_SETSIZE && n_tickers < MAX_PROCESSORS; i++) {
        if (!CPU_ISSET((size_t)i, &ours)) {
            continue;
        }
        struct ticker *ticker = mem_zalloc(sizeof *ticker);
        pthread_t thread;
        ticker->processor = i;
        pthread_mutex_init(&ticker->lock, NULL);
        if (pthread_create(&thread, NULL, ticker_run, ticker) != 0) {
            mem_free(ticker);
            break;
        }
        pthread_detach(thread); /* it ticks as long as the process lives */
        tickers[n_tickers++] = ticker;
    }
}

static int spell_compare(const void *one, const void *other)
{
    const struct spell *a = one, *b = other;
    return a->from_ns < b->from_ns ? -1 : a->from_ns > b->from_ns;
}

/* Appends the ticker's spells, cut to [from_ns, to_ns). */
static unsigned spells_take(struct ticker *ticker, uint64_t from_ns, uint64_t to_ns,
                            struct spell *ret_spells)
{
    unsigned n = 0;
    while (atomic_load(&ticker->ticked_ns) < to_ns) {
        sleep_until(loop_now_ns() + NS_PER_MS);
    }
    pthread_mutex_lock(&ticker->lock);
    for (uint64_t i = 0; i < ticker->n && i < MAX_SPELLS; i++) {
        struct spell spell = ticker->spells[i];
        spell.from_ns = spell.from_ns < from_ns ? from_ns : spell.from_ns;
        spell.to_ns = spell.to_ns > to_ns ? to_ns : spell.to_ns;
        if (spell.from_ns < spell.to_ns) {
            ret_spells[n++] = spell;
        }
    }
    pthread_mutex_unlock(&ticker->lock);
    return n;
}

uint64_t lost_ns(uint64_t from_ns, uint64_t to_ns)
{
    assert(n_tickers > 0);
    uint64_t now_ns = loop_now_ns(), sum_ns = 0, end_ns = from_ns;
    to_ns = to_ns > now_ns ? now_ns : to_ns;
    struct spell *spells = mem_array((size_t)n_tickers * MAX_SPELLS, sizeof *spells);
    unsigned n = 0;
    for (unsigned i = 0; i < n_tickers; i++) {
        n += spells_take(tickers[i], from_ns, to_ns, spells + n);
    }
    qsort(spells, n, sizeof *spells, spell_compare);
    for (unsigned i = 0; i < n; i++) { /* what two processors lost at once was lost once */
        uint64_t begin_ns = spells[i].from_ns > end_ns ? spells[i].from_ns : end_ns;
        if (spells[i].to_ns > begin_ns) {
            sum_ns += spells[i].to_ns - begin_ns;
            end_ns = spells[i].to_ns;
        }
    }
    mem_free(spells);
    return sum_ns;
}

bool lost_within(const char *what, uint64_t from_ns, uint64_t to_ns, unsigned limit_ms)
{
    uint64_t took_ns = to_ns > from_ns ? to_ns - from_ns : 0;
    if (took_ns <= limit_ms * NS_PER_MS) {
        return true;
    }
    uint64_t lost = lost_ns(from_ns, to_ns);
    bool within = took_ns <= limit_ms * NS_PER_MS + lost;
    printf("%s took %.0f ms, the limit is %u ms and the machine lost %.0f ms: %s\n", what,
           (double)took_ns / 1e6, limit_ms, (double)lost / 1e6, within ? "within" : "too late");
    return within;
}

bool lost_over(uint64_t from_ns, uint64_t ms)
{
    uint64_t now_ns = loop_now_ns();
    return now_ns - from_ns > ms * NS_PER_MS &&
           now_ns - from_ns > ms * NS_PER_MS + lost_ns(from_ns, now_ns);
}
