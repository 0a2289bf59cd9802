#ifndef BATON_TESTS_BASE_HTTPD_HARNESS_H
#define BATON_TESTS_BASE_HTTPD_HARNESS_H

/*
 * A real server on a loop thread of its own, and raw client sockets on the test's thread. The test
 * reaches the loop only by harness_call, which runs a function there and waits for it.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/httpd.h"
#include "base/loop.h"
#include "tests/lost.h"

struct harness {
    struct loop *loop;
    struct httpd *server;
    struct mailbox *mailbox;
    pthread_t thread;
    uint16_t port;

    /* loop thread */
    struct httpd_request *held; /* the request of /hold and /stream that waits */
    int n_drained;
    bool flood_done;

    atomic_int n_held;
    atomic_int n_closed;
};

/* Starts with the routes below; keys, origins and limits from config. */
void harness_start(struct harness *h, const struct httpd_config *config);
void harness_stop(struct harness *h);

/* Runs fn(h, cookie) on the loop thread and returns when it has. */
void harness_call(struct harness *h, void (*fn)(struct harness *, void *), void *cookie);
struct httpd_stats harness_stats(struct harness *h);

/* Waits up to two seconds, beside what the machine lost, for *value to be at least wanted. */
bool harness_await(atomic_int *value, int wanted);

/* Asks until it is so, for as long. */
#define EVENTUALLY(condition)                                 \
    do {                                                      \
        uint64_t begin_ns_ = loop_now_ns();                   \
        while (!(condition) && !lost_over(begin_ns_, 2000)) { \
            usleep(1000);                                     \
        }                                                     \
        assert_true(condition);                               \
    } while (0)

/* Blocking client socket with a read time-out of five seconds. */
int client_connect(const struct harness *h);
void client_send(int fd, const void *bytes, size_t n);
void client_text(int fd, const char *text);

/* Reads until the server closes (true) or is silent for wait_ms after its first bytes (false). */
bool client_read_all(int fd, struct buf *out, int wait_ms);

/* Reads one answer with Content-Length (or without body): status, and its text in out. */
int client_answer(int fd, bool is_head, struct buf *out);

/* Sends text on a fresh connection, returns the status of the first answer (0: none), and whether
 * the server closed; reads until it is silent for 40 ms. */
int exchange(struct harness *h, const char *text, size_t n, bool *ret_closed, struct buf *out);

#endif
