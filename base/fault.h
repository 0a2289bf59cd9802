#ifndef BATON_BASE_FAULT_H
#define BATON_BASE_FAULT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 * Fault points: places at which a build made for drills (meson -Dfault_points=true) can be told to
 * go wrong. Any other build holds none of them: the macros below vanish, fault.c is not compiled.
 *
 * A point is told what to do by --fault-point or BATON_FAULT_POINT (several: ';' between) when the
 * program starts, or by POST to /debug/faults (one a line) while it runs:
 *
 *   NAME=ACTION[,p=PROBABILITY][,n=COUNT][,after=COUNT][,ms=TIME]
 *
 * NAME may be a pattern (fnmatch), which arms each matching point that knows the action; p is 1 by
 * default, n is without end, after lets that many passes go unharmed, ms is 100. NAME=off forgets
 * what was said before of the same points. --fault-seed (BATON_FAULT_SEED) seeds the draws.
 * --list-fault-points prints this table and exits; GET /debug/faults counts passes and faults.
 *
 *   fail       the operation returns its error (a message: the queue was full, room comes later)
 *   drop       it is left out, and its caller believes that it was done
 *   delay      it happens ms later; what follows on the same link waits behind it
 *   duplicate  it happens twice
 *   reorder    it happens after the one that follows, or ms later
 *   corrupt    its bytes are damaged
 *   cut        the link it was for is lost instead
 *   kill stop  the process gets SIGKILL or SIGSTOP when it comes here
 *
 * Messages are named as in the .proto files. A damaged message is one that does not parse: links
 * are TCP or TLS, and what these vouch for is not checked again. The bytes of pages and tails are.
 */
enum fault_action {
    FAULT_NONE,
    FAULT_FAIL,
    FAULT_DROP,
    FAULT_DELAY,
    FAULT_DUPLICATE,
    FAULT_REORDER,
    FAULT_CORRUPT,
    FAULT_CUT,
    FAULT_KILL,
    FAULT_STOP,
    FAULT_N_ACTIONS
};

#define FAULT_BIT(action) (1u << FAULT_##action)
#define FAULT_ENDS (FAULT_BIT(KILL) | FAULT_BIT(STOP))
#define FAULT_MESSAGE                                                              \
    (FAULT_BIT(FAIL) | FAULT_BIT(DROP) | FAULT_BIT(DELAY) | FAULT_BIT(DUPLICATE) | \
     FAULT_BIT(REORDER) | FAULT_BIT(CORRUPT) | FAULT_BIT(CUT) | FAULT_ENDS)
#define FAULT_PUT                                                                     \
    (FAULT_BIT(FAIL) | FAULT_BIT(DELAY) | FAULT_BIT(DUPLICATE) | FAULT_BIT(REORDER) | \
     FAULT_BIT(CORRUPT) | FAULT_ENDS)

/* The one table: enumerator, name, actions, what passes there. */
/* clang-format off */
#define FAULT_POINTS(P)                                                                            \
    P(TO_ROUTER_HELLO, "ToRouter.hello", FAULT_MESSAGE, "node -> router: it joins")                \
    P(TO_ROUTER_STATUS, "ToRouter.status", FAULT_MESSAGE, "node -> router: the lease is renewed")  \
    P(TO_NODE_HELLO, "ToNode.hello", FAULT_MESSAGE, "router -> node: it is taken")                 \
    P(TO_NODE_VIEW, "ToNode.view", FAULT_MESSAGE, "router -> node: the peers to know")             \
    P(TO_DECODE_HELLO, "ToDecode.hello", FAULT_MESSAGE, "router -> decode: the link opens")        \
    P(TO_DECODE_START, "ToDecode.start", FAULT_MESSAGE, "router -> decode: a request")             \
    P(TO_DECODE_IDS, "ToDecode.ids", FAULT_MESSAGE, "router -> decode: more ids of its prompt")    \
    P(TO_DECODE_CREDIT, "ToDecode.credit", FAULT_MESSAGE, "router -> decode: room for tokens")     \
    P(TO_DECODE_CANCEL, "ToDecode.cancel", FAULT_MESSAGE, "router -> decode: the client left")     \
    P(FROM_DECODE_HELLO, "FromDecode.hello", FAULT_MESSAGE, "decode -> router: the link is open")  \
    P(FROM_DECODE_ADMITTED, "FromDecode.admitted", FAULT_MESSAGE, "decode -> router: it waits")    \
    P(FROM_DECODE_STEP, "FromDecode.step", FAULT_MESSAGE, "decode -> router: the token stream")    \
    P(FROM_DECODE_FINISHED, "FromDecode.finished", FAULT_MESSAGE, "decode -> router: its end")     \
    P(FROM_DECODE_FAILED, "FromDecode.failed", FAULT_MESSAGE, "decode -> router: its failure")     \
    P(TO_PREFILL_HELLO, "ToPrefill.hello", FAULT_MESSAGE, "decode -> prefill: regions and keys")   \
    P(TO_PREFILL_RUN, "ToPrefill.run", FAULT_MESSAGE, "decode -> prefill: a transfer")             \
    P(TO_PREFILL_IDS, "ToPrefill.ids", FAULT_MESSAGE, "decode -> prefill: more ids of its prompt") \
    P(TO_PREFILL_SLOTS, "ToPrefill.slots", FAULT_MESSAGE, "decode -> prefill: landing slots")      \
    P(TO_PREFILL_ACCEPTED, "ToPrefill.accepted", FAULT_MESSAGE, "decode -> prefill: the ack")      \
    P(TO_PREFILL_CANCEL, "ToPrefill.cancel", FAULT_MESSAGE, "decode -> prefill: no more of it")    \
    P(TO_PREFILL_VERIFIED, "ToPrefill.verified", FAULT_MESSAGE, "decode -> prefill: preflight")    \
    P(FROM_PREFILL_HELLO, "FromPrefill.hello", FAULT_MESSAGE, "prefill -> decode: the pair opens") \
    P(FROM_PREFILL_PREFLIGHT, "FromPrefill.preflight", FAULT_MESSAGE, "prefill -> decode: put it") \
    P(FROM_PREFILL_QUEUED, "FromPrefill.queued", FAULT_MESSAGE, "prefill -> decode: it waits")     \
    P(FROM_PREFILL_PROGRESS, "FromPrefill.progress", FAULT_MESSAGE, "prefill -> decode: computes") \
    P(FROM_PREFILL_PARCEL, "FromPrefill.parcel", FAULT_MESSAGE, "prefill -> decode: it is put")    \
    P(FROM_PREFILL_FIRST, "FromPrefill.first", FAULT_MESSAGE, "prefill -> decode: first tokens")   \
    P(FROM_PREFILL_DONE, "FromPrefill.done", FAULT_MESSAGE, "prefill -> decode: all is sent")      \
    P(FROM_PREFILL_FAILED, "FromPrefill.failed", FAULT_MESSAGE, "prefill -> decode: its failure")  \
    P(FROM_PREFILL_DRAINED, "FromPrefill.drained", FAULT_MESSAGE, "prefill -> decode: is silent")  \
    P(LINK_OPEN, "link.open", FAULT_BIT(FAIL) | FAULT_ENDS, "a link is dialled")                   \
    P(LINK_RECEIVE, "link.receive", FAULT_BIT(CUT) | FAULT_ENDS, "any message has come")           \
    P(PUT_PAGES, "put.pages", FAULT_PUT, "prefill: full pages are put into landing slots")         \
    P(PUT_TAIL, "put.tail", FAULT_PUT, "prefill: the tail is put into landing slots")              \
    P(PUT_PREFLIGHT, "put.preflight", FAULT_BIT(FAIL) | FAULT_BIT(CORRUPT) | FAULT_ENDS,           \
      "prefill: the preflight's puts")                                                             \
    P(ACCEPT_COPY, "accept.copy", FAULT_BIT(FAIL) | FAULT_BIT(DELAY) | FAULT_BIT(CORRUPT) |        \
      FAULT_ENDS, "decode: slots are copied and summed")                                           \
    P(ACCEPT_GRANT, "accept.grant", FAULT_BIT(FAIL) | FAULT_ENDS, "decode: slots are granted")     \
    P(ACCEPT_ROOM, "accept.room", FAULT_BIT(FAIL) | FAULT_ENDS, "decode: pages for a parcel")      \
    P(COMPUTE_STEP, "compute.step", FAULT_BIT(FAIL) | FAULT_BIT(DELAY) | FAULT_ENDS,               \
      "a decode step on the compute thread")                                                       \
    P(COMPUTE_CHUNK, "compute.chunk", FAULT_BIT(FAIL) | FAULT_BIT(DELAY) | FAULT_ENDS,             \
      "a prompt chunk on the compute thread")                                                      \
    P(COMPUTE_LOOP, "compute.loop", FAULT_BIT(DELAY) | FAULT_ENDS, "a tick of the node's loop")
/* clang-format on */

#ifdef BATON_FAULT_POINTS

enum fault_point {
#define FAULT_POINT_ENUM(id, name, actions, what) FAULT_##id,
    FAULT_POINTS(FAULT_POINT_ENUM)
#undef FAULT_POINT_ENUM
        FAULT_N_POINTS
};

struct fault_hit {
    enum fault_action action;
    uint32_t ms;
};

/* Any thread. What happens to what passes the point now; kill and stop happen inside. */
struct fault_hit fault_hit(enum fault_point point);

/* The same where the thread may sleep: a delay is slept here. */
enum fault_action fault_hit_wait(enum fault_point point);

/* Index of the point "message.field", or FAULT_N_POINTS. */
enum fault_point fault_find(const char *message, const char *field);

const char *fault_name(enum fault_point point);

/* One NAME=ACTION,... as above. STATUS_INVALID: err says what would be right. */
enum status fault_arm(const char *spec, struct error *err) must_check;

/* First thing in main: takes its options out of argv, reads the environment, answers --list-. */
void fault_start(int *argc, char **argv);

struct httpd;
void fault_attach_httpd(struct httpd *server);

#define FAULT_START(argc, argv) fault_start(argc, argv)
#define FAULT_HIT(point) (fault_hit(FAULT_##point).action)
#define FAULT_WAIT(point) fault_hit_wait(FAULT_##point)

#else

#define FAULT_START(argc, argv) ((void)0)
#define FAULT_HIT(point) FAULT_NONE
#define FAULT_WAIT(point) FAULT_NONE

#endif

#endif
