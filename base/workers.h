#ifndef BATON_BASE_WORKERS_H
#define BATON_BASE_WORKERS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/loop.h"
#include "base/status.h"

/*
 * A small pool of threads for work that must not block the loop (tokenizing a 4 MB prompt, reading
 * a file). The pool belongs to the loop thread: only workers_job_cancelled may be called elsewhere.
 *
 * A job's cookie is used by one side at a time: by the pool thread from submit until run returned,
 * then by the loop thread. It ends in exactly one call on the loop thread: done, or drop when the
 * job was cancelled.
 */

struct workers;
struct workers_job;

/* Pool thread. Touches nothing but its cookie. */
typedef void (*workers_run_fn)(void *cookie, struct workers_job *job);
/* Loop thread. */
typedef void (*workers_end_fn)(void *cookie);

/* Starts n_threads (1-64). STATUS_SYSTEM when a thread cannot be started. */
enum status must_check workers_create(struct loop *loop, size_t n_threads, size_t queue_bound,
                                      struct workers **ret_workers);

/*
 * Queues a job: run(cookie) on a pool thread, then done(cookie) on the loop thread. drop (may be
 * NULL) is called instead of done when the job is cancelled. ret_job may be NULL; it is valid until
 * done or drop begins. STATUS_EXHAUSTED when queue_bound jobs wait already: nothing is called.
 */
enum status must_check workers_submit(struct workers *workers, workers_run_fn run,
                                      workers_end_fn done, workers_end_fn drop, void *cookie,
                                      struct workers_job **ret_job);

/*
 * After this done never runs. A job that still waits is never run, and drop runs before this
 * returns. One that is running keeps its cookie: drop runs from the loop once run has returned.
 */
void workers_cancel(struct workers *workers, struct workers_job *job);

/* Pool thread, inside run: whether the result is still wanted. Long jobs ask now and then. */
bool workers_job_cancelled(struct workers_job *job);

/* Jobs that wait, and jobs not yet ended (waiting, running, or with done not yet called). */
size_t workers_n_queued(struct workers *workers);
size_t workers_n_live(const struct workers *workers);

/* Cancels all jobs, waits for those that run, calls each drop, joins the threads. NULL allowed. */
void workers_free(struct workers *workers);

#endif
