#ifndef BATON_BASE_LOOP_H
#define BATON_BASE_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 * The event loop: one thread that owns all state of a process (libevent stands behind it).
 *
 * Everything here is called on the loop thread, except loop_now_ns and mailbox_post, which any
 * thread may call. Whatever can be waited for can be cancelled, and once the cancelling call
 * (disarm, set to nothing, free) has returned its callback never runs again, not even when it was
 * already due. A callback may disarm or free its own timer, signal, watch or mailbox.
 */

struct loop;
struct loop_timer;
struct loop_signal;
struct loop_fd;
struct mailbox;

typedef void (*loop_fn)(void *cookie);

/* events is a mask of LOOP_READ and LOOP_WRITE */
typedef void (*loop_fd_fn)(void *cookie, unsigned events);

/* msg is what mailbox_post was given; the callback owns it */
typedef void (*mailbox_fn)(void *cookie, void *msg);

enum {
    LOOP_READ = 1u << 0,
    LOOP_WRITE = 1u << 1,
};

#define NS_PER_US 1000ull
#define NS_PER_MS 1000000ull
#define NS_PER_S 1000000000ull

/* Monotonic time in nanoseconds. Never goes back, and does not follow the wall clock. */
uint64_t loop_now_ns(void);

/* STATUS_SYSTEM when the kernel gives no event queue. */
enum status must_check loop_create(struct loop **ret_loop);

/* All timers, signals, watches and mailboxes of the loop must have been freed. NULL is allowed. */
void loop_free(struct loop *loop);

/*
 * Runs callbacks until loop_stop. Returns STATUS_OK then, STATUS_SYSTEM when the kernel refuses to
 * wait. May be called again after it returned.
 */
enum status must_check loop_run(struct loop *loop);

/* The running loop returns after the current turn, its deferred calls included. */
void loop_stop(struct loop *loop);

/*
 * Runs fn(cookie) once on the loop thread, after all events of this turn and before the loop waits
 * again: the place to coalesce what a turn produced. Calls run in the order of deferring; what they
 * defer in their turn waits for the next one. Cannot be cancelled singly: the owner of cookie calls
 * loop_defer_cancel before it dies.
 */
void loop_defer(struct loop *loop, loop_fn fn, void *cookie);

/* Forgets every deferred call with this fn and cookie. */
void loop_defer_cancel(struct loop *loop, loop_fn fn, void *cookie);

/* Number of turns since loop_create, for tests and the progress gauge. */
uint64_t loop_n_turns(const struct loop *loop);

/* Timers. One shot; a callback arms its timer again for a period. Created disarmed. */
struct loop_timer *loop_timer_create(struct loop *loop, loop_fn fn, void *cookie);

/* Due delay_ns from now, never earlier. Arming an armed timer moves it. */
void loop_timer_arm(struct loop_timer *timer, uint64_t delay_ns);

void loop_timer_disarm(struct loop_timer *timer);

bool loop_timer_armed(const struct loop_timer *timer);

/* Disarms. NULL is allowed. */
void loop_timer_free(struct loop_timer *timer);

/*
 * Calls fn(cookie) on the loop thread after the process got the signal; several deliveries between
 * two turns may be seen as one. Only one loop of a process may watch signals.
 * STATUS_SYSTEM when the handler cannot be installed.
 */
enum status must_check loop_signal_create(struct loop *loop, int signo, loop_fn fn, void *cookie,
                                          struct loop_signal **ret_signal);

/* Restores the disposition that the signal had before. NULL is allowed. */
void loop_signal_free(struct loop_signal *sig);

/*
 * Watches a descriptor, level-triggered: fn runs each turn in which a wanted event is ready. fd is
 * borrowed and must stay open until loop_fd_free. An error or hang-up of the descriptor is reported
 * as every wanted event: the read or write that follows tells. STATUS_SYSTEM if fd cannot be
 * polled.
 */
enum status must_check loop_fd_create(struct loop *loop, int fd, unsigned events, loop_fd_fn fn,
                                      void *cookie, struct loop_fd **ret_fd);

/* Replaces the wanted events; 0 watches nothing. */
enum status must_check loop_fd_set(struct loop_fd *watch, unsigned events);

/* NULL is allowed. */
void loop_fd_free(struct loop_fd *watch);

/*
 * Mailbox: the way by which other threads talk to the loop. Holds at most capacity messages;
 * fn runs on the loop thread, once a message, in the order in which each thread posted. Messages
 * are drained in bounded batches, so that timers and sockets have their turn under a flood.
 * STATUS_SYSTEM when the kernel gives no eventfd.
 */
enum status must_check mailbox_create(struct loop *loop, size_t capacity, mailbox_fn fn,
                                      void *cookie, struct mailbox **ret_mailbox);

/*
 * Any thread. Takes msg (not NULL) on STATUS_OK. STATUS_EXHAUSTED when the mailbox is full: msg
 * stays the caller's. Never blocks but for a short lock.
 */
enum status must_check mailbox_post(struct mailbox *mailbox, void *msg);

/* Any thread. Messages posted and not yet handed to fn, and the most there have ever been. */
size_t mailbox_depth(struct mailbox *mailbox);
size_t mailbox_depth_max(struct mailbox *mailbox);

/* Takes the oldest message out without running fn, or NULL: to empty a mailbox before its free. */
void *mailbox_take(struct mailbox *mailbox);

/* No thread may post any more; messages left inside are forgotten (mailbox_take). NULL allowed. */
void mailbox_free(struct mailbox *mailbox);

#endif
