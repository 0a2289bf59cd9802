#include "rpc/queue.h"

#include <assert.h>
#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <grpc/support/time.h>

#include "base/log.h"
#include "base/mem.h"

/*
 * Who waits. gRPC moves bytes only while some thread is inside grpc_completion_queue_next. If that
 * is a thread of its own, each message costs two switches of threads (that thread wakes, then the
 * loop), which is more than all else that a small message costs. So the loop does it: gRPC watches
 * its sockets through one epoll descriptor, the loop watches that descriptor, and when it is ready
 * asks the queue without waiting, until it has nothing. gRPC does not hand the descriptor out; it
 * is the one that grpc_init opens. Where it can't be told which one that is (another core than the
 * one this was written against, another way of polling chosen by GRPC_POLL_STRATEGY), a thread
 * waits in the queue as gRPC means it, and posts what comes to the loop's mailbox.
 *
 * What that leaves open, a second thread closes. gRPC has threads too, for its timers and names,
 * and what completes there shows on no descriptor; and a loop that is held up by its own work must
 * not keep the peers' pings waiting, or they would take a busy process for a dead one. So the
 * thread asks the queue every LOOK_EVERY_MS, also without waiting, and posts what it finds. It
 * matters for connections that come and go and for a loop that is stuck, not for messages.
 *
 * Ends of batches. A completed batch is a tag, a tag is a struct rpc_op, and its fn runs on the
 * loop thread; the thread never looks into a tag: whether the batch succeeded rides in the lowest
 * bit of the pointer. All batches are started on the loop thread. So no object of rpc/ needs a
 * lock, and the calls of grpc_call_start_batch on one call are serial as gRPC asks. Two batches of
 * one call may be told in another order than they completed; each kind is out once at a time, and
 * streams wait for all of them. When the mailbox is full the thread waits: gRPC's own flow control
 * then holds the peers.
 *
 * Most writes, and reads of what has arrived already, complete inside the call that starts them.
 * gRPC hands such an event back (the queue's cache for this thread), and the loop takes it at the
 * end of its turn, with whatever else has come by then. If a call completes more than one batch, as
 * a write does that finds the connection broken, the others are seen when the broken socket shows
 * on the descriptor, or by the thread.
 */

enum {
    MAILBOX_CAPACITY = 16384,
    /* Completions in one go; then timers and descriptors have their turn. */
    BATCH = 256,
    /*
     * Empty answers in a row after which nothing has come. One may be empty because gRPC thinks
     * that it was woken, and each time gRPC looks at one of the sockets that are ready, where there
     * may be nothing but an acknowledgement.
     */
    EMPTY_LOOKS = 2,
    LOOK_EVERY_MS = 20,
    MAX_DESCRIPTORS = 64,
};

/* The core whose polling is known here; the version of gRPC itself is another (1.51). */
static const char known_core[] = "29.";

struct rpc_queue {
    struct loop *loop;
    grpc_completion_queue *grpc;
    struct mailbox *mailbox;
    struct loop_fd *watch; /* NULL: the thread waits, and the loop does not look */
    bool looking;          /* inside look */
    bool look_deferred;
    void **ready; /* completed inside the call that started them; as in the mailbox */
    size_t n_ready, ready_capacity, ready_first;

    pthread_t thread;
    pthread_mutex_t lock; /* of the rest */
    pthread_cond_t wake;
    bool stopping;
};

static void short_sleep(long ns)
{
    struct timespec pause = {.tv_nsec = ns};
    nanosleep(&pause, NULL);
}

static void *message_of(const void *tag, bool ok)
{
    return (void *)((uintptr_t)tag | ok);
}

static void on_message(void *cookie, void *msg)
{
    struct rpc_op *op = (struct rpc_op *)((uintptr_t)msg & ~(uintptr_t)1);
    op->fn(op, ((uintptr_t)msg & 1) != 0);
}

/* ---- the thread ---- */

static void post(struct rpc_queue *queue, const grpc_event *event)
{
    while (mailbox_post(queue->mailbox, message_of(event->tag, event->success != 0)) != STATUS_OK) {
        short_sleep(200000);
    }
}

static void *waiting_thread(void *arg)
{
    struct rpc_queue *queue = arg;
    for (;;) {
        grpc_event event =
            grpc_completion_queue_next(queue->grpc, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            return NULL;
        }
        if (event.type == GRPC_OP_COMPLETE) {
            post(queue, &event);
        }
    }
}

static void thread_look(struct rpc_queue *queue)
{
    for (unsigned n_empty = 0; n_empty < EMPTY_LOOKS;) {
        grpc_event event =
            grpc_completion_queue_next(queue->grpc, gpr_inf_past(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            return;
        }
        if (event.type == GRPC_OP_COMPLETE) {
            post(queue, &event);
            n_empty = 0;
        } else {
            n_empty++;
        }
    }
}

static void *looking_thread(void *arg)
{
    struct rpc_queue *queue = arg;
    pthread_mutex_lock(&queue->lock);
    while (!queue->stopping) {
        uint64_t until_ns = loop_now_ns() + LOOK_EVERY_MS * NS_PER_MS;
        struct timespec until = {.tv_sec = (time_t)(until_ns / NS_PER_S),
                                 .tv_nsec = (long)(until_ns % NS_PER_S)};
        pthread_cond_timedwait(&queue->wake, &queue->lock, &until);
        pthread_mutex_unlock(&queue->lock);
        thread_look(queue);
        pthread_mutex_lock(&queue->lock);
    }
    pthread_mutex_unlock(&queue->lock);
    return NULL;
}

/* ---- the loop ---- */

static void *ready_take(struct rpc_queue *queue)
{
    if (queue->ready_first == queue->n_ready) {
        queue->ready_first = queue->n_ready = 0;
        return NULL;
    }
    return queue->ready[queue->ready_first++];
}

/* The next event that has come, or NULL. */
static void *event_take(struct rpc_queue *queue)
{
    void *msg = ready_take(queue);
    unsigned n_empty = queue->watch != NULL ? 0 : EMPTY_LOOKS;
    while (msg == NULL && n_empty < EMPTY_LOOKS) {
        grpc_event event =
            grpc_completion_queue_next(queue->grpc, gpr_inf_past(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_OP_COMPLETE) {
            msg = message_of(event.tag, event.success != 0);
        }
        n_empty++;
    }
    return msg;
}

/* Handles what has come, at most BATCH events of it. */
static void look(struct rpc_queue *queue)
{
    unsigned n = 0;
    void *msg;
    queue->looking = true;
    while (n < BATCH && (msg = event_take(queue)) != NULL) {
        on_message(queue, msg);
        n++;
    }
    queue->looking = false;
    if (n == BATCH) {
        rpc_queue_look(queue);
    }
}

static void on_turn_end(void *cookie)
{
    struct rpc_queue *queue = cookie;
    queue->look_deferred = false;
    look(queue);
}

static void on_readable(void *cookie, unsigned events)
{
    look(cookie);
}

void rpc_queue_look(struct rpc_queue *queue)
{
    if (!queue->look_deferred && !queue->looking) {
        queue->look_deferred = true;
        loop_defer(queue->loop, on_turn_end, queue);
    }
}

bool rpc_queue_batch_start(struct rpc_queue *queue, grpc_call *call, const grpc_op *ops,
                           size_t n_ops, struct rpc_op *op)
{
    void *tag;
    int ok;
    grpc_completion_queue_thread_local_cache_init(queue->grpc);
    grpc_call_error error = grpc_call_start_batch(call, ops, n_ops, op, NULL);
    bool at_once = grpc_completion_queue_thread_local_cache_flush(queue->grpc, &tag, &ok) != 0;
    if (at_once) {
        if (queue->n_ready == queue->ready_capacity) {
            queue->ready_capacity = queue->ready_capacity > 0 ? 2 * queue->ready_capacity : 64;
            queue->ready =
                mem_realloc_array(queue->ready, queue->ready_capacity, sizeof *queue->ready);
        }
        queue->ready[queue->n_ready++] = message_of(tag, ok != 0);
        rpc_queue_look(queue);
    }
    if (error != GRPC_CALL_OK) {
        /* only a batch that breaks gRPC's rules is refused: our own bug */
        log_error("rpc", "grpc refuses a batch: %s", grpc_call_error_to_string(error));
        assert(error == GRPC_CALL_OK);
    }
    return at_once;
}

bool rpc_queue_take(struct rpc_queue *queue)
{
    void *msg = mailbox_take(queue->mailbox);
    if (msg == NULL) {
        msg = event_take(queue);
    }
    if (msg == NULL) {
        return false;
    }
    on_message(queue, msg);
    return true;
}

grpc_completion_queue *rpc_queue_grpc(struct rpc_queue *queue)
{
    return queue->grpc;
}

size_t rpc_queue_depth(struct rpc_queue *queue)
{
    return mailbox_depth(queue->mailbox);
}

/* ---- life ---- */

/* The epoll descriptors of this process, at most MAX_DESCRIPTORS. */
static size_t epoll_descriptors(int fds[MAX_DESCRIPTORS])
{
    size_t n = 0;
    DIR *folder = opendir("/proc/self/fd");
    struct dirent *entry;
    while (folder != NULL && n < MAX_DESCRIPTORS && (entry = readdir(folder)) != NULL) {
        char target[64];
        ssize_t bytes = readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1);
        target[bytes > 0 ? bytes : 0] = '\0';
        if (strcmp(target, "anon_inode:[eventpoll]") == 0) {
            fds[n++] = atoi(entry->d_name);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return n;
}

/* Starts gRPC; the epoll descriptor that it opened, or -1 if that is not clear. */
static int grpc_start(void)
{
    int before[MAX_DESCRIPTORS], after[MAX_DESCRIPTORS], found = -1;
    size_t n_before = epoll_descriptors(before);
    grpc_init();
    size_t n_after = epoll_descriptors(after);
    size_t n_new = 0;
    for (size_t i = 0; i < n_after; i++) {
        bool is_old = false;
        for (size_t k = 0; k < n_before; k++) {
            is_old = is_old || after[i] == before[k];
        }
        if (!is_old) {
            found = after[i];
            n_new++;
        }
    }
    bool is_known = strncmp(grpc_version_string(), known_core, sizeof known_core - 1) == 0;
    return is_known && n_new == 1 && n_after < MAX_DESCRIPTORS ? found : -1;
}

static void grpc_end(struct rpc_queue *queue)
{
    while (grpc_completion_queue_next(queue->grpc, gpr_inf_future(GPR_CLOCK_REALTIME), NULL).type !=
           GRPC_QUEUE_SHUTDOWN) {
    }
    grpc_completion_queue_destroy(queue->grpc);
    grpc_shutdown_blocking();
}

static void queue_release(struct rpc_queue *queue)
{
    mailbox_free(queue->mailbox);
    pthread_cond_destroy(&queue->wake);
    pthread_mutex_destroy(&queue->lock);
    mem_free(queue->ready);
    mem_free(queue);
}

enum status rpc_queue_create(struct loop *loop, struct rpc_queue **ret_queue, struct error *err)
{
    struct rpc_queue *queue = mem_zalloc(sizeof *queue);
    pthread_condattr_t monotonic;
    queue->loop = loop;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&queue->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    enum status status = mailbox_create(loop, MAILBOX_CAPACITY, on_message, queue, &queue->mailbox);
    if (status != STATUS_OK) {
        error_set(err, status, "no mailbox for the thread of grpc");
        goto release_queue;
    }
    int fd = grpc_start();
    queue->grpc = grpc_completion_queue_create_for_next(NULL);
    if (fd >= 0 && loop_fd_create(loop, fd, LOOP_READ, on_readable, queue, &queue->watch)) {
        queue->watch = NULL;
    }
    log_debug("rpc", "grpc %s: %s", grpc_version_string(),
              queue->watch != NULL ? "the loop asks its queue" : "a thread waits in its queue");
    int rc = pthread_create(&queue->thread, NULL,
                            queue->watch != NULL ? looking_thread : waiting_thread, queue);
    if (rc != 0) {
        status = error_set(err, STATUS_SYSTEM, "no thread for grpc: %s", strerror(rc));
        goto end_grpc;
    }
    pthread_setname_np(queue->thread, "rpc");
    *ret_queue = queue;
    return STATUS_OK;

end_grpc:
    loop_fd_free(queue->watch);
    grpc_completion_queue_shutdown(queue->grpc);
    grpc_end(queue);
release_queue:
    queue_release(queue);
    return status;
}

void rpc_queue_free(struct rpc_queue *queue)
{
    loop_defer_cancel(queue->loop, on_turn_end, queue);
    loop_fd_free(queue->watch); /* before gRPC closes the descriptor */
    grpc_completion_queue_shutdown(queue->grpc);
    pthread_mutex_lock(&queue->lock);
    queue->stopping = true;
    pthread_cond_signal(&queue->wake);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    grpc_end(queue);
    queue_release(queue);
}
