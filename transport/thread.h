/* transport/thread.h - the put thread and its two queues. Private to transport/.
 *
 * A job is embedded in the object that it concerns (put, peer, a waiting call), travels to the put
 * thread by thread_submit or to the loop by thread_reply, and is in at most one queue at a time. So
 * neither queue allocates and both are bounded by the number of objects, which put_submit and
 * put_peer_connect bound. Order is kept.
 */
#ifndef BATON_TRANSPORT_THREAD_H
#define BATON_TRANSPORT_THREAD_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/list.h"
#include "base/loop.h"
#include "transport/transport.h"
#include "transport/ucx.h"

enum { TRANSPORT_MAX_PEERS = 1024, TRANSPORT_N_METRICS = 15 };

/* The cookie of a metric's callback. */
struct transport_metric {
    const struct transport *transport;
    size_t i;
};

struct job {
    struct list link;
    void (*run)(struct job *job);
};

/* Written by the put thread, submitted by the loop; read by anyone. */
struct thread_counters {
    atomic_uint_fast64_t puts_submitted, puts_done, puts_failed, puts_cancelled;
    atomic_uint_fast64_t bytes_submitted, bytes_done, posts;
    atomic_uint_fast64_t peers_connected, peers_failed, peers_stalled, peers_closed;
    atomic_uint_fast64_t bytes_in_flight, region_bytes;
};

struct transport {
    struct loop *loop;
    struct transport_options options; /* defaults filled in; its strings are gone */
    struct ucx *ucx;
    pthread_t thread;
    struct thread_counters counters;

    /* both sides, under lock */
    pthread_mutex_t lock;
    struct list to_thread, to_loop;
    bool loop_woken;

    int wake_fd; /* eventfd: to_thread is not empty */
    int epoll_fd;
    struct mailbox *mailbox; /* wakes the loop: to_loop is not empty */

    /* loop thread */
    struct list regions; /* the put thread unmaps them after `stop`, while the loop waits for it */
    uint32_t n_puts, n_peers;
    bool closing;
    struct transport_metric metrics[TRANSPORT_N_METRICS];

    /* put thread */
    struct list peers;
    struct list orphans; /* operations that outlived their peer's close */
    bool stop;
    uint64_t now_ns; /* of this turn */
    uint64_t stop_ns;
};

void thread_submit(struct transport *t, struct job *job);
void thread_reply(struct transport *t, struct job *job);

/* Runs fn(arg) on the put thread and waits for it. Loop thread. */
void thread_call(struct transport *t, void (*fn)(struct transport *t, void *arg), void *arg);

#endif
