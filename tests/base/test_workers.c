/* The pool: every job ends exactly once, cancelled jobs never report. */
#include "base/workers.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static struct loop *loop;
static pthread_t loop_thread;

static int setup(void **state)
{
    loop_thread = pthread_self();
    return loop_create(&loop);
}

static int teardown(void **state)
{
    loop_free(loop);
    return 0;
}

struct job {
    atomic_bool started;
    atomic_bool release;
    bool wait;
    int n_run;
    int n_done;
    int n_drop;
    bool saw_cancel;
};

static int n_ended;
static int n_wanted;

static void ended(void)
{
    assert_true(pthread_equal(pthread_self(), loop_thread));
    if (++n_ended == n_wanted) {
        loop_stop(loop);
    }
}

static void run_job(void *cookie, struct workers_job *self)
{
    struct job *job = cookie;

    job->n_run++;
    atomic_store(&job->started, true);
    while (job->wait && !atomic_load(&job->release)) {
        usleep(100);
    }
    job->saw_cancel = workers_job_cancelled(self);
}

static void done_job(void *cookie)
{
    ((struct job *)cookie)->n_done++;
    ended();
}

static void drop_job(void *cookie)
{
    ((struct job *)cookie)->n_drop++;
    ended();
}

static void expect(int n)
{
    n_ended = 0;
    n_wanted = n;
}

static void await_start(struct job *job)
{
    while (!atomic_load(&job->started)) {
        usleep(100);
    }
}

static void test_each_job_is_done_once(void **state)
{
    enum {
        N = 200,
    };
    static struct job jobs[N];
    struct workers *workers = NULL;

    assert_int_equal(workers_create(loop, 3, N, &workers), STATUS_OK);
    expect(N);
    for (int i = 0; i < N; i++) {
        assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &jobs[i], NULL),
                         STATUS_OK);
    }
    assert_int_equal(loop_run(loop), STATUS_OK);
    for (int i = 0; i < N; i++) {
        assert_int_equal(jobs[i].n_run, 1);
        assert_int_equal(jobs[i].n_done, 1);
        assert_int_equal(jobs[i].n_drop, 0);
    }
    assert_int_equal(workers_n_live(workers), 0);
    workers_free(workers);
}

static void test_bound_and_cancel(void **state)
{
    struct job running = {.wait = true};
    struct job waiting = {.wait = false};
    struct job other = {.wait = false};
    struct workers *workers = NULL;
    struct workers_job *running_job = NULL;
    struct workers_job *waiting_job = NULL;

    assert_int_equal(workers_create(loop, 1, 1, &workers), STATUS_OK);
    expect(2);
    assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &running, &running_job),
                     STATUS_OK);
    await_start(&running);
    assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &waiting, &waiting_job),
                     STATUS_OK);
    assert_int_equal(workers_n_queued(workers), 1);
    assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &other, NULL),
                     STATUS_EXHAUSTED);

    workers_cancel(workers, waiting_job);
    assert_int_equal(waiting.n_drop, 1); /* before the call returned */
    assert_int_equal(waiting.n_run, 0);

    workers_cancel(workers, running_job);
    assert_int_equal(running.n_drop, 0); /* it still holds its cookie */
    atomic_store(&running.release, true);
    assert_int_equal(loop_run(loop), STATUS_OK);
    assert_int_equal(running.n_drop, 1);
    assert_int_equal(running.n_done, 0);
    assert_true(running.saw_cancel);
    assert_int_equal(other.n_run + other.n_done + other.n_drop, 0);
    workers_free(workers);
}

static void test_cancel_after_run_before_done(void **state)
{
    struct job job = {.wait = false};
    struct workers *workers = NULL;
    struct workers_job *self = NULL;

    assert_int_equal(workers_create(loop, 1, 4, &workers), STATUS_OK);
    expect(1);
    assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &job, &self), STATUS_OK);
    await_start(&job);
    usleep(5000); /* most likely in the mailbox now */
    workers_cancel(workers, self);
    assert_int_equal(loop_run(loop), STATUS_OK);
    assert_int_equal(job.n_done, 0);
    assert_int_equal(job.n_drop, 1);
    workers_free(workers);
}

static void test_free_ends_every_job(void **state)
{
    enum {
        N = 20,
    };
    static struct job jobs[N];
    struct workers *workers = NULL;

    assert_int_equal(workers_create(loop, 2, N, &workers), STATUS_OK);
    expect(-1);
    for (int i = 0; i < N; i++) {
        assert_int_equal(workers_submit(workers, run_job, done_job, drop_job, &jobs[i], NULL),
                         STATUS_OK);
    }
    workers_free(workers);
    for (int i = 0; i < N; i++) {
        assert_int_equal(jobs[i].n_done, 0);
        assert_int_equal(jobs[i].n_drop, 1);
    }
    workers_free(NULL);
}

static void test_refuses_senseless_sizes(void **state)
{
    struct workers *workers = NULL;

    assert_int_equal(workers_create(loop, 0, 1, &workers), STATUS_INVALID);
    assert_int_equal(workers_create(loop, 65, 1, &workers), STATUS_INVALID);
    assert_int_equal(workers_create(loop, 1, 0, &workers), STATUS_INVALID);
    assert_null(workers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_each_job_is_done_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bound_and_cancel, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancel_after_run_before_done, setup, teardown),
        cmocka_unit_test_setup_teardown(test_free_ends_every_job, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refuses_senseless_sizes, setup, teardown),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
