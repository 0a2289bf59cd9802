/* transport/transport.c - the put thread: a turn takes jobs, steps the peers, posts, progresses,
 * and sleeps only when nothing is left to do.
 *
 * It owns the only UCX worker of the process and every object hanging from it. A node that only
 * receives runs the same thread: puts over tcp, and those that UCX emulates, advance only when
 * their target progresses. The invariant: the thread never sleeps while it has work that it could
 * post, and never longer than 100 ms at all, since UCX may fail to wake a sleeper (a dead peer over
 * shared memory is found by a timer inside ucp_worker_progress).
 */
#include "transport/transport.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/log.h"
#include "base/mem.h"
#include "transport/peer.h"
#include "transport/region_internal.h"
#include "transport/thread.h"

enum {
    IDLE_SLEEP_MS = 100, /* nothing outstanding */
    BUSY_SLEEP_MS = 2,   /* something is: bounds the harm of a wake-up that UCX lost */
    PROGRESS_PER_TURN = 64,
};

static const uint64_t stop_limit_ns = 2 * NS_PER_S;

/* ---- queues ---- */

void thread_submit(struct transport *t, struct job *job)
{
    pthread_mutex_lock(&t->lock);
    bool was_empty = list_empty(&t->to_thread);
    list_push_back(&t->to_thread, &job->link);
    pthread_mutex_unlock(&t->lock);
    if (was_empty) {
        uint64_t one = 1;
        ssize_t n = write(t->wake_fd, &one, sizeof one);
        assert(n == sizeof one || errno == EAGAIN);
    }
}

void thread_reply(struct transport *t, struct job *job)
{
    pthread_mutex_lock(&t->lock);
    list_push_back(&t->to_loop, &job->link);
    bool wake = !t->loop_woken;
    t->loop_woken = true;
    pthread_mutex_unlock(&t->lock);
    if (wake) {
        enum status status = mailbox_post(t->mailbox, t);
        assert(status == STATUS_OK); /* one message at most is in it */
    }
}

/* Takes all jobs of a queue at once. */
static void jobs_take(struct transport *t, struct list *from, struct list *to)
{
    list_init(to);
    pthread_mutex_lock(&t->lock);
    while (!list_empty(from)) {
        struct list *first = list_first(from);
        list_remove(first);
        list_push_back(to, first);
    }
    if (from == &t->to_loop) {
        t->loop_woken = false;
    }
    pthread_mutex_unlock(&t->lock);
}

static bool jobs_run(struct transport *t, struct list *from)
{
    struct list jobs;
    jobs_take(t, from, &jobs);
    bool any = !list_empty(&jobs);
    while (!list_empty(&jobs)) {
        struct job *job = list_entry(list_first(&jobs), struct job, link);
        list_remove(&job->link);
        job->run(job);
    }
    return any;
}

static void loop_deliver(void *cookie, void *message)
{
    struct transport *t = cookie;
    (void)message;
    jobs_run(t, &t->to_loop);
}

struct call {
    struct job job;
    struct transport *t;
    void (*fn)(struct transport *t, void *arg);
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
};

static void call_run(struct job *job)
{
    struct call *call = list_entry(job, struct call, job);
    call->fn(call->t, call->arg);
    pthread_mutex_lock(&call->lock);
    call->done = true;
    pthread_cond_signal(&call->ended);
    pthread_mutex_unlock(&call->lock);
}

void thread_call(struct transport *t, void (*fn)(struct transport *t, void *arg), void *arg)
{
    struct call call = {.job = {.run = call_run}, .t = t, .fn = fn, .arg = arg};
    pthread_mutex_init(&call.lock, NULL);
    pthread_cond_init(&call.ended, NULL);
    thread_submit(t, &call.job);
    pthread_mutex_lock(&call.lock);
    while (!call.done) {
        pthread_cond_wait(&call.ended, &call.lock);
    }
    pthread_mutex_unlock(&call.lock);
    pthread_cond_destroy(&call.ended);
    pthread_mutex_destroy(&call.lock);
}

/* ---- the put thread ---- */

static void thread_sleep(struct transport *t, bool outstanding)
{
    struct error err;
    enum status status = ucx_arm(t->ucx, &err);
    if (status == STATUS_PENDING) {
        return;
    }
    int limit_ms = outstanding ? BUSY_SLEEP_MS : IDLE_SLEEP_MS;
    if (status != STATUS_OK) {
        log_warn("transport", "%s", err.text);
        limit_ms = 1;
    }
    struct epoll_event events[2];
    int n = epoll_wait(t->epoll_fd, events, 2, limit_ms);
    for (int i = 0; i < n; i++) {
        if (events[i].data.fd == t->wake_fd) {
            uint64_t count;
            ssize_t got = read(t->wake_fd, &count, sizeof count);
            (void)got;
        }
    }
}

/* A pause of this process (a stop, a stalled machine) is not the peers' fault: their clocks stood
 * still with it. They do not restart: where pauses are many a stall would never be seen. */
static void turn_begin(struct transport *t)
{
    uint64_t now_ns = loop_now_ns(), paused_ns = now_ns - t->now_ns;
    if (paused_ns > 500 * NS_PER_MS) {
        log_warn("transport", "the put thread was paused for %llu ms",
                 (unsigned long long)(paused_ns / NS_PER_MS));
        list_for_each(p, &t->peers)
        {
            peer_excuse(list_entry(p, struct put_peer, link), now_ns, paused_ns);
        }
    }
    t->now_ns = now_ns;
}

struct turn {
    bool active;      /* something happened */
    bool postable;    /* work is left that could be posted at once */
    bool outstanding; /* operations have not completed, or a peer is on its way somewhere */
};

static struct turn thread_turn(struct transport *t)
{
    struct turn turn = {0};
    turn_begin(t);
    turn.active = jobs_run(t, &t->to_thread);
    list_for_each_safe(p, &t->peers)
    {
        struct put_peer *peer = list_entry(p, struct put_peer, link);
        if (t->stop) {
            peer_close(peer);
        }
        if (!peer_step(peer)) {
            continue; /* closed: it belongs to the loop again */
        }
        turn.active |= peer_post(peer);
        turn.postable |= peer_can_post(peer);
        turn.outstanding |= peer_is_busy(peer);
    }
    for (int i = 0; i < PROGRESS_PER_TURN && ucx_progress(t->ucx) != 0; i++) {
        turn.active = true;
    }
    return turn;
}

/* What is unmapped here must be unmapped while the worker still progresses: afterwards it would
 * hang. */
static void thread_end(struct transport *t)
{
    list_for_each_safe(p, &t->peers)
    {
        peer_abandon(list_entry(p, struct put_peer, link));
    }
    list_for_each(p, &t->regions)
    {
        region_unmap(t, list_entry(p, struct region, link));
        ucx_progress(t->ucx);
    }
}

static void *thread_main(void *arg)
{
    struct transport *t = arg;
    uint64_t idle_since_ns = 0;
    if (t->options.attach) {
        t->options.attach(t->options.attach_cookie);
    }
    t->now_ns = loop_now_ns();
    for (;;) {
        struct turn turn = thread_turn(t);
        if (t->stop && (list_empty(&t->peers) || t->now_ns - t->stop_ns > stop_limit_ns)) {
            break;
        }
        if (turn.active) {
            idle_since_ns = 0;
        } else if (idle_since_ns == 0) {
            idle_since_ns = t->now_ns;
        }
        if (turn.active || turn.postable || t->now_ns - idle_since_ns < t->options.spin_ns) {
            continue;
        }
        thread_sleep(t, turn.outstanding);
    }
    thread_end(t);
    return NULL;
}

/* ---- open and close ---- */

static enum status options_fill(struct transport_options *options, struct error *err)
{
    if (options->window_bytes == 0) {
        options->window_bytes = 8u << 20;
    }
    if (options->max_puts == 0) {
        options->max_puts = 1024;
    }
    if (options->stall_ns == 0) {
        options->stall_ns = 1500 * NS_PER_MS;
    }
    if (options->connect_timeout_ns == 0) {
        options->connect_timeout_ns = 5 * NS_PER_S;
    }
    if (options->spin_ns == 0) {
        options->spin_ns = 50 * NS_PER_US;
    }
    if (options->window_bytes < 65536) {
        return error_set(err, STATUS_INVALID, "a put window of %zu bytes: at least 65536",
                         options->window_bytes);
    }
    return STATUS_OK;
}

static enum status thread_open(struct transport *t, struct error *err)
{
    t->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (t->wake_fd < 0 || t->epoll_fd < 0) {
        return error_set(err, STATUS_SYSTEM, "descriptors of the put thread: %s", strerror(errno));
    }
    struct epoll_event wake = {.events = EPOLLIN, .data.fd = t->wake_fd};
    struct epoll_event ucx = {.events = EPOLLIN, .data.fd = ucx_event_fd(t->ucx)};
    if (epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->wake_fd, &wake) != 0 ||
        epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, ucx.data.fd, &ucx) != 0) {
        return error_set(err, STATUS_SYSTEM, "epoll of the put thread: %s", strerror(errno));
    }
    /* signals belong to the loop thread */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&t->thread, NULL, thread_main, t);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error != 0) {
        return error_set(err, STATUS_SYSTEM, "the put thread: %s", strerror(error));
    }
    pthread_setname_np(t->thread, "put");
    return STATUS_OK;
}

static void transport_free(struct transport *t)
{
    if (t->epoll_fd >= 0) {
        close(t->epoll_fd);
    }
    if (t->wake_fd >= 0) {
        close(t->wake_fd);
    }
    mailbox_free(t->mailbox);
    ucx_close(t->ucx);
    peer_orphans_free(t);
    pthread_mutex_destroy(&t->lock);
    mem_free(t);
}

enum status transport_open(struct loop *loop, const struct transport_options *options,
                           struct transport **ret_transport, struct error *err)
{
    struct transport *t = mem_zalloc(sizeof *t);
    t->loop = loop;
    t->options = *options;
    t->wake_fd = t->epoll_fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    list_init(&t->to_thread);
    list_init(&t->to_loop);
    list_init(&t->regions);
    list_init(&t->peers);
    list_init(&t->orphans);
    enum status status = options_fill(&t->options, err);
    if (status == STATUS_OK && options->attach) {
        options->attach(options->attach_cookie);
    }
    if (status == STATUS_OK) {
        status = ucx_open(options, &t->ucx, err);
    }
    if (status == STATUS_OK && mailbox_create(loop, 2, loop_deliver, t, &t->mailbox) != STATUS_OK) {
        status = error_set(err, STATUS_SYSTEM, "the mailbox of the transport: %s", strerror(errno));
    }
    if (status == STATUS_OK) {
        status = thread_open(t, err);
    }
    if (status != STATUS_OK) {
        transport_free(t);
        return status;
    }
    t->options.tls = t->options.net_devices = t->options.tcp_port_range = NULL;
    *ret_transport = t;
    return STATUS_OK;
}

static void stop_run(struct transport *t, void *arg)
{
    (void)arg;
    t->stop = true;
    t->stop_ns = t->now_ns;
}

void transport_close(struct transport *t)
{
    if (t == NULL) {
        return;
    }
    t->closing = true;
    thread_call(t, stop_run, NULL);
    pthread_join(t->thread, NULL);
    jobs_run(t, &t->to_thread); /* what a callback of the loop submitted while the thread ended */
    while (jobs_run(t, &t->to_loop)) {
        jobs_run(t, &t->to_thread);
    }
    assert(t->n_puts == 0 && t->n_peers == 0);
    regions_free(t);
    transport_free(t);
}

const uint8_t *transport_worker_address(const struct transport *t, size_t *ret_bytes)
{
    return ucx_address(t->ucx, ret_bytes);
}

const char *transport_ucx_text(const struct transport *t)
{
    return ucx_text(t->ucx);
}

bool transport_has_device_memory(const struct transport *t)
{
    return ucx_has_device_memory(t->ucx);
}

void transport_stats(const struct transport *t, struct transport_stats *ret_stats)
{
    const struct thread_counters *c = &t->counters;
    struct transport_stats stats = {
        .puts_submitted = atomic_load(&c->puts_submitted),
        .puts_done = atomic_load(&c->puts_done),
        .puts_failed = atomic_load(&c->puts_failed),
        .puts_cancelled = atomic_load(&c->puts_cancelled),
        .bytes_submitted = atomic_load(&c->bytes_submitted),
        .bytes_done = atomic_load(&c->bytes_done),
        .posts = atomic_load(&c->posts),
        .peers_connected = atomic_load(&c->peers_connected),
        .peers_failed = atomic_load(&c->peers_failed),
        .peers_stalled = atomic_load(&c->peers_stalled),
        .peers_closed = atomic_load(&c->peers_closed),
        .bytes_in_flight = atomic_load(&c->bytes_in_flight),
        .region_bytes = atomic_load(&c->region_bytes),
    };
    uint64_t ended = stats.puts_done + stats.puts_failed + stats.puts_cancelled;
    stats.puts_alive = stats.puts_submitted > ended ? stats.puts_submitted - ended : 0;
    stats.peers_alive =
        stats.peers_connected > stats.peers_closed ? stats.peers_connected - stats.peers_closed : 0;
    *ret_stats = stats;
}
