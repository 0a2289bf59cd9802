/*
 * The event loop on libevent.
 *
 * libevent multiplexes; the turn is ours: loop_run lets libevent dispatch what is ready once, then
 * runs the timers that are due and the deferred calls, so that "after all events of this turn" is
 * exact. Nothing here takes a lock but the mailbox, whose ring is the only state that other threads
 * see; libevent's own thread support stays off. A mailbox wakes its loop through an eventfd that is
 * written when the ring goes from empty to not empty and read back when the last message is taken.
 *
 * Timers are a heap of our own with one timerfd as alarm clock. libevent sets its timerfd anew each
 * time it waits, which on a virtual machine costs more than most callbacks; here it is set only
 * when the earliest time has become earlier than what it is set to. Timers that were moved later or
 * disarmed leave it as it is: it then wakes the loop once for nothing.
 *
 * Deferred calls that defer others need no look at the descriptors in between; every fourth turn
 * has one, so that a chain of them starves nobody.
 */
#include "base/loop.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <event2/event.h>

#include "base/log.h"
#include "base/mem.h"

enum {
    /* Messages handed out a turn. Large enough to make the turn's fixed cost (some microseconds)
     * vanish, small enough that a timer is late by one batch only. */
    MAILBOX_BATCH = 256,
    /* Turns of deferred calls alone between two looks at the descriptors. */
    QUICK_TURNS = 3,
};

struct deferred {
    loop_fn fn; /* NULL once cancelled */
    void *cookie;
};

/* Owned by main; loop thread. */
struct loop {
    struct event_base *base;
    bool stopping;
    uint64_t n_turns;

    struct deferred *deferred;
    size_t n_deferred;
    size_t deferred_capacity;
    size_t deferred_i; /* next one to run; those before it are done */

    struct loop_timer **timers; /* heap: the earliest first */
    size_t n_timers;
    size_t timers_capacity;
    uint64_t alarm_ns; /* what alarm_fd is set to; 0: it is not */
    int alarm_fd;
    struct loop_fd *alarm_watch;
};

struct loop_timer {
    struct loop *loop;
    loop_fn fn;
    void *cookie;
    uint64_t due_ns;
    size_t place; /* in the heap, from 1; 0: not armed */
};

struct loop_signal {
    struct event *event;
    loop_fn fn;
    void *cookie;
};

struct loop_fd {
    struct event *event;
    struct loop *loop;
    loop_fd_fn fn;
    void *cookie;
    int fd;
    unsigned events;
};

/* Owned by its creator; the ring is shared with posting threads under lock, the rest is the loop
 * thread's. */
struct mailbox {
    pthread_mutex_t lock;
    void **ring;
    size_t capacity;
    size_t head; /* oldest message */
    size_t depth;
    size_t depth_max;

    int wake_fd;
    struct loop_fd *watch;
    mailbox_fn fn;
    void *cookie;
    bool handing_out; /* inside on_mailbox: a free then leaves the struct to it */
    bool freed;
};

uint64_t loop_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* The loop is awake, and that was the point: timers_run does the rest. */
static void on_alarm(void *cookie, unsigned events)
{
    struct loop *loop = cookie;
    uint64_t count;

    while (read(loop->alarm_fd, &count, sizeof(count)) < 0 && errno == EINTR) {
    }
    loop->alarm_ns = 0;
}

enum status loop_create(struct loop **ret_loop)
{
    struct event_config *config = event_config_new();
    struct event_base *base = NULL;
    struct loop *loop;

    if (!config) {
        return STATUS_SYSTEM;
    }
    if (event_config_set_flag(config, EVENT_BASE_FLAG_NOLOCK) == 0) {
        base = event_base_new_with_config(config);
    }
    event_config_free(config);
    if (!base) {
        return STATUS_SYSTEM;
    }
    loop = mem_zalloc(sizeof(*loop));
    loop->base = base;
    loop->alarm_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (loop->alarm_fd < 0 ||
        loop_fd_create(loop, loop->alarm_fd, LOOP_READ, on_alarm, loop, &loop->alarm_watch)) {
        loop_free(loop);
        return STATUS_SYSTEM;
    }
    *ret_loop = loop;
    return STATUS_OK;
}

void loop_free(struct loop *loop)
{
    if (!loop) {
        return;
    }
    loop_fd_free(loop->alarm_watch);
    if (loop->alarm_fd >= 0) {
        close(loop->alarm_fd);
    }
    event_base_free(loop->base);
    mem_free(loop->timers);
    mem_free(loop->deferred);
    mem_free(loop);
}

/* Runs what was deferred before this call; later entries wait for the next turn. */
static void deferred_run(struct loop *loop)
{
    size_t n = loop->n_deferred;

    for (loop->deferred_i = 0; loop->deferred_i < n; loop->deferred_i++) {
        struct deferred call = loop->deferred[loop->deferred_i];

        loop->deferred[loop->deferred_i].fn = NULL;
        if (call.fn) {
            call.fn(call.cookie);
        }
    }
    for (size_t i = n; i < loop->n_deferred; i++) {
        loop->deferred[i - n] = loop->deferred[i];
    }
    loop->n_deferred -= n;
    loop->deferred_i = 0;
}

/* Sets the alarm to the earliest timer, unless it rings before that anyway. */
static void alarm_set(struct loop *loop)
{
    struct itimerspec when = {{0, 0}, {0, 0}};
    uint64_t due_ns;
    int rc;

    if (loop->n_timers == 0) {
        return;
    }
    due_ns = loop->timers[0]->due_ns;
    if (loop->alarm_ns != 0 && loop->alarm_ns <= due_ns) {
        return;
    }
    when.it_value.tv_sec = (time_t)(due_ns / NS_PER_S);
    when.it_value.tv_nsec = (long)(due_ns % NS_PER_S);
    rc = timerfd_settime(loop->alarm_fd, TFD_TIMER_ABSTIME, &when, NULL);
    assert(rc == 0);
    (void)rc;
    loop->alarm_ns = due_ns;
}

/* Runs what was due when it began: a timer that its own callback arms to ring at once waits a
 * turn. */
static void timers_run(struct loop *loop)
{
    uint64_t now_ns;

    if (loop->n_timers == 0) {
        return;
    }
    now_ns = loop_now_ns();
    while (loop->n_timers > 0 && loop->timers[0]->due_ns <= now_ns) {
        struct loop_timer *timer = loop->timers[0];

        loop_timer_disarm(timer);
        timer->fn(timer->cookie);
    }
}

enum status loop_run(struct loop *loop)
{
    unsigned n_quick = 0;

    loop->stopping = false;
    while (!loop->stopping) {
        int flags = EVLOOP_ONCE | EVLOOP_NO_EXIT_ON_EMPTY;

        if (loop->n_deferred > 0 && n_quick < QUICK_TURNS) {
            n_quick++;
        } else {
            n_quick = 0;
            if (loop->n_deferred > 0) {
                flags |= EVLOOP_NONBLOCK;
            } else {
                alarm_set(loop);
            }
            if (event_base_loop(loop->base, flags) < 0) {
                return STATUS_SYSTEM;
            }
            timers_run(loop);
        }
        loop->n_turns++;
        deferred_run(loop);
    }
    return STATUS_OK;
}

void loop_stop(struct loop *loop)
{
    loop->stopping = true;
}

uint64_t loop_n_turns(const struct loop *loop)
{
    return loop->n_turns;
}

void loop_defer(struct loop *loop, loop_fn fn, void *cookie)
{
    if (loop->n_deferred == loop->deferred_capacity) {
        loop->deferred_capacity = loop->deferred_capacity ? loop->deferred_capacity * 2 : 16;
        loop->deferred =
            mem_realloc(loop->deferred, loop->deferred_capacity * sizeof(*loop->deferred));
    }
    loop->deferred[loop->n_deferred].fn = fn;
    loop->deferred[loop->n_deferred].cookie = cookie;
    loop->n_deferred++;
}

void loop_defer_cancel(struct loop *loop, loop_fn fn, void *cookie)
{
    for (size_t i = 0; i < loop->n_deferred; i++) {
        if (loop->deferred[i].fn == fn && loop->deferred[i].cookie == cookie) {
            loop->deferred[i].fn = NULL;
        }
    }
}

/* --- timers --- */

/* A heap of four children a place: flat, and the children lie side by side. */
enum { HEAP_WIDTH = 4 };

static void heap_put(struct loop *loop, size_t i, struct loop_timer *timer)
{
    loop->timers[i] = timer;
    timer->place = i + 1;
}

/* Finds the place of timer from i towards the first one. */
static void heap_up(struct loop *loop, size_t i, struct loop_timer *timer)
{
    while (i > 0) {
        size_t parent = (i - 1) / HEAP_WIDTH;

        if (loop->timers[parent]->due_ns <= timer->due_ns) {
            break;
        }
        heap_put(loop, i, loop->timers[parent]);
        i = parent;
    }
    heap_put(loop, i, timer);
}

/* Finds the place of timer from i towards the last ones. */
static void heap_down(struct loop *loop, size_t i, struct loop_timer *timer)
{
    for (;;) {
        size_t first = i * HEAP_WIDTH + 1;
        size_t best = first;

        if (first >= loop->n_timers) {
            break;
        }
        for (size_t k = first + 1; k < first + HEAP_WIDTH && k < loop->n_timers; k++) {
            if (loop->timers[k]->due_ns < loop->timers[best]->due_ns) {
                best = k;
            }
        }
        if (timer->due_ns <= loop->timers[best]->due_ns) {
            break;
        }
        heap_put(loop, i, loop->timers[best]);
        i = best;
    }
    heap_put(loop, i, timer);
}

struct loop_timer *loop_timer_create(struct loop *loop, loop_fn fn, void *cookie)
{
    struct loop_timer *timer = mem_zalloc(sizeof(*timer));

    timer->loop = loop;
    timer->fn = fn;
    timer->cookie = cookie;
    return timer;
}

void loop_timer_arm(struct loop_timer *timer, uint64_t delay_ns)
{
    struct loop *loop = timer->loop;
    uint64_t now_ns = loop_now_ns();

    loop_timer_disarm(timer);
    /* the kernel's clock is signed; a time beyond it is for ever */
    timer->due_ns = delay_ns < (uint64_t)INT64_MAX - now_ns ? now_ns + delay_ns : INT64_MAX;
    if (loop->n_timers == loop->timers_capacity) {
        loop->timers_capacity = loop->timers_capacity ? loop->timers_capacity * 2 : 16;
        loop->timers = mem_realloc(loop->timers, loop->timers_capacity * sizeof(*loop->timers));
    }
    loop->n_timers++;
    heap_up(loop, loop->n_timers - 1, timer);
}

void loop_timer_disarm(struct loop_timer *timer)
{
    struct loop *loop = timer->loop;
    struct loop_timer *last;
    size_t i;

    if (timer->place == 0) {
        return;
    }
    i = timer->place - 1;
    timer->place = 0;
    loop->n_timers--;
    last = loop->timers[loop->n_timers];
    if (last == timer) {
        return;
    }
    if (last->due_ns < timer->due_ns) {
        heap_up(loop, i, last);
    } else {
        heap_down(loop, i, last);
    }
}

bool loop_timer_armed(const struct loop_timer *timer)
{
    return timer->place != 0;
}

void loop_timer_free(struct loop_timer *timer)
{
    if (!timer) {
        return;
    }
    loop_timer_disarm(timer);
    mem_free(timer);
}

/* --- signals --- */

/* libevent fails to make an event only for want of memory or for a wrong argument of ours */
static struct event *event_must(struct event *event)
{
    assert(event);
    return event;
}

static void on_signal(evutil_socket_t signo, short what, void *arg)
{
    struct loop_signal *sig = arg;

    sig->fn(sig->cookie);
}

enum status loop_signal_create(struct loop *loop, int signo, loop_fn fn, void *cookie,
                               struct loop_signal **ret_signal)
{
    struct loop_signal *sig = mem_zalloc(sizeof(*sig));

    sig->fn = fn;
    sig->cookie = cookie;
    sig->event = event_must(evsignal_new(loop->base, signo, on_signal, sig));
    if (event_add(sig->event, NULL) < 0) {
        event_free(sig->event);
        mem_free(sig);
        return STATUS_SYSTEM;
    }
    *ret_signal = sig;
    return STATUS_OK;
}

void loop_signal_free(struct loop_signal *sig)
{
    if (!sig) {
        return;
    }
    event_free(sig->event);
    mem_free(sig);
}

/* --- descriptors --- */

static void on_fd(evutil_socket_t fd, short what, void *arg)
{
    struct loop_fd *watch = arg;
    unsigned events = 0;

    if (what & EV_READ) {
        events |= LOOP_READ;
    }
    if (what & EV_WRITE) {
        events |= LOOP_WRITE;
    }
    watch->fn(watch->cookie, events);
}

enum status loop_fd_create(struct loop *loop, int fd, unsigned events, loop_fd_fn fn, void *cookie,
                           struct loop_fd **ret_fd)
{
    struct loop_fd *watch = mem_zalloc(sizeof(*watch));
    enum status s;

    watch->loop = loop;
    watch->fn = fn;
    watch->cookie = cookie;
    watch->fd = fd;
    watch->event = event_must(event_new(loop->base, fd, EV_READ | EV_PERSIST, on_fd, watch));
    s = loop_fd_set(watch, events);
    if (s) {
        loop_fd_free(watch);
        return s;
    }
    *ret_fd = watch;
    return STATUS_OK;
}

enum status loop_fd_set(struct loop_fd *watch, unsigned events)
{
    short what = EV_PERSIST;

    if (events == watch->events) {
        return STATUS_OK;
    }
    event_del(watch->event);
    watch->events = 0;
    if (events == 0) {
        return STATUS_OK;
    }
    if (events & LOOP_READ) {
        what |= EV_READ;
    }
    if (events & LOOP_WRITE) {
        what |= EV_WRITE;
    }
    if (event_assign(watch->event, watch->loop->base, watch->fd, what, on_fd, watch) < 0 ||
        event_add(watch->event, NULL) < 0) {
        return STATUS_SYSTEM;
    }
    watch->events = events;
    return STATUS_OK;
}

void loop_fd_free(struct loop_fd *watch)
{
    if (!watch) {
        return;
    }
    event_free(watch->event);
    mem_free(watch);
}

/* --- mailbox --- */

static void wake_drain(struct mailbox *mailbox)
{
    uint64_t count;

    /* EAGAIN only says that nobody has written since */
    while (read(mailbox->wake_fd, &count, sizeof(count)) < 0 && errno == EINTR) {
    }
}

/* The eventfd is readable exactly while the ring is not empty: both change under the lock. */
void *mailbox_take(struct mailbox *mailbox)
{
    void *msg = NULL;

    pthread_mutex_lock(&mailbox->lock);
    if (mailbox->depth > 0) {
        msg = mailbox->ring[mailbox->head];
        mailbox->head = (mailbox->head + 1) % mailbox->capacity;
        mailbox->depth--;
        if (mailbox->depth == 0) {
            wake_drain(mailbox);
        }
    }
    pthread_mutex_unlock(&mailbox->lock);
    return msg;
}

/*
 * Takes one message at a time rather than a batch into an array, so that mailbox_take and a free
 * inside fn see every message that was not yet handed out.
 */
static void on_mailbox(void *cookie, unsigned events)
{
    struct mailbox *mailbox = cookie;

    mailbox->handing_out = true;
    for (int i = 0; i < MAILBOX_BATCH && !mailbox->freed; i++) {
        void *msg = mailbox_take(mailbox);

        if (!msg) {
            break;
        }
        mailbox->fn(mailbox->cookie, msg);
    }
    mailbox->handing_out = false;
    if (mailbox->freed) {
        mem_free(mailbox);
    }
}

enum status mailbox_create(struct loop *loop, size_t capacity, mailbox_fn fn, void *cookie,
                           struct mailbox **ret_mailbox)
{
    struct mailbox *mailbox = mem_zalloc(sizeof(*mailbox));
    enum status s = STATUS_SYSTEM;

    assert(capacity > 0);
    mailbox->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (mailbox->wake_fd < 0) {
        log_error("loop", "no eventfd for a mailbox: %m");
        goto free_mailbox;
    }
    mailbox->fn = fn;
    mailbox->cookie = cookie;
    s = loop_fd_create(loop, mailbox->wake_fd, LOOP_READ, on_mailbox, mailbox, &mailbox->watch);
    if (s) {
        goto close_fd;
    }
    mailbox->capacity = capacity;
    mailbox->ring = mem_array(capacity, sizeof(*mailbox->ring));
    pthread_mutex_init(&mailbox->lock, NULL);
    *ret_mailbox = mailbox;
    return STATUS_OK;

close_fd:
    close(mailbox->wake_fd);
free_mailbox:
    mem_free(mailbox);
    return s;
}

enum status mailbox_post(struct mailbox *mailbox, void *msg)
{
    static const uint64_t one = 1;
    bool was_empty;

    assert(msg);
    pthread_mutex_lock(&mailbox->lock);
    if (mailbox->depth == mailbox->capacity) {
        pthread_mutex_unlock(&mailbox->lock);
        return STATUS_EXHAUSTED;
    }
    was_empty = mailbox->depth == 0;
    mailbox->ring[(mailbox->head + mailbox->depth) % mailbox->capacity] = msg;
    mailbox->depth++;
    if (mailbox->depth > mailbox->depth_max) {
        mailbox->depth_max = mailbox->depth;
    }
    /* Under the lock: a loop that empties the ring and is told to free the mailbox by this very
     * message must not close the eventfd between our unlock and our write. */
    if (was_empty) {
        while (write(mailbox->wake_fd, &one, sizeof(one)) < 0 && errno == EINTR) {
        }
    }
    pthread_mutex_unlock(&mailbox->lock);
    return STATUS_OK;
}

size_t mailbox_depth(struct mailbox *mailbox)
{
    size_t depth;

    pthread_mutex_lock(&mailbox->lock);
    depth = mailbox->depth;
    pthread_mutex_unlock(&mailbox->lock);
    return depth;
}

size_t mailbox_depth_max(struct mailbox *mailbox)
{
    size_t depth_max;

    pthread_mutex_lock(&mailbox->lock);
    depth_max = mailbox->depth_max;
    pthread_mutex_unlock(&mailbox->lock);
    return depth_max;
}

void mailbox_free(struct mailbox *mailbox)
{
    if (!mailbox) {
        return;
    }
    loop_fd_free(mailbox->watch);
    close(mailbox->wake_fd);
    pthread_mutex_destroy(&mailbox->lock);
    mem_free(mailbox->ring);
    mailbox->freed = true;
    if (!mailbox->handing_out) {
        mem_free(mailbox);
    }
}
