/* tests/transport/pair.h - two real processes: the test, which puts, and a child, which is put
 * into.
 *
 * The child is this program again (exec, so that no state of UCX is shared) with a transport and a
 * landing area; it answers commands on a socket. pair_main must be called first thing in main.
 */
#ifndef BATON_TESTS_TRANSPORT_PAIR_H
#define BATON_TESTS_TRANSPORT_PAIR_H

#include <stdarg.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <cmocka.h>

#include "base/loop.h"
#include "tests/lost.h"
#include "transport/put.h"

enum { CANARY_SEED = 77 }; /* a landing area starts out holding this pattern */

/* Runs the child if this process is one (and then does not return). Otherwise sets the environment.
 */
void pair_main(int argc, char **argv);

/* ---- this side ---- */

struct side {
    struct loop *loop;
    struct transport *transport;
    struct loop_timer *timer;
    bool timed_out;
};

void side_open(struct side *side, const struct transport_options *options);
void side_close(struct side *side);

/* Runs the loop until *flag or for so long beside what the machine lost; whether the flag came. */
bool side_wait(struct side *side, const bool *flag, unsigned timeout_ms);

/* Runs the loop for so long. */
void side_run(struct side *side, unsigned ms);

/* ---- the other side ---- */

struct pair {
    pid_t pid;
    int fd;
    uint8_t address[TRANSPORT_MAX_ADDRESS_BYTES];
    size_t address_bytes;
    uint8_t rkey[TRANSPORT_MAX_RKEY_BYTES];
    size_t rkey_bytes;
    uint64_t base, bytes;
};

void pair_start(struct pair *pair, const char *tls, size_t landing_bytes);

/* Does the child's landing area hold the pattern at [offset, +bytes)? */
bool pair_check(struct pair *pair, uint64_t offset, uint64_t bytes, uint64_t seed);

/* The same, but as part of a pattern that began `skip` bytes before offset (the canary's is offset
 * itself). */
bool pair_check_canary(struct pair *pair, uint64_t offset, uint64_t bytes);

/* Turns the child into a writer: it connects to a landing area of ours and puts into [0,
 * slot_bytes) of it for ever. */
void pair_write_for_ever(struct pair *pair, const uint8_t *address, size_t address_bytes,
                         uint64_t base, uint64_t bytes, const uint8_t *rkey, size_t rkey_bytes,
                         uint64_t slot_bytes);

/* Ends the child in an orderly way, or with SIGKILL; both reap it. */
void pair_end(struct pair *pair);
void pair_kill(struct pair *pair);

/* ---- a peer with its events counted ---- */

struct watched {
    struct put_peer *peer;
    bool up, failed, closed;
    enum status failure;
    char failure_text[512];
    uint64_t failed_ns, closed_ns;
};

/* Region number 5 is the pair's landing area. */
enum { REGION_ID = 5 };
enum status watched_try(struct watched *watched, struct side *side, const struct pair *pair,
                        bool same_host, bool allow_slow, struct error *err);
void watched_connect(struct watched *watched, struct side *side, const struct pair *pair);
void watched_close(struct watched *watched, struct side *side);

/* ---- a put with its end noted ---- */

struct noted {
    bool done;
    unsigned n_done;
    uint64_t done_ns;
    struct put_result result;
    struct put *put;
};
void noted_done(void *cookie, const struct put_result *result);

#endif
