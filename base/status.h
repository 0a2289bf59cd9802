#ifndef BATON_BASE_STATUS_H
#define BATON_BASE_STATUS_H

/*
 * The closed set of results. A function that can fail returns `enum status` and is marked
 * must_check; it writes its ret_* outputs only when it returns STATUS_OK. The values are grouped
 * by what the failure ends: this call, the request it served, the link to a peer, or the node.
 * They never travel between processes as numbers.
 */

enum status {
    STATUS_OK = 0,
    STATUS_PENDING = 1, /* started; the answer comes by callback */

    /* this call: nothing else is affected */
    STATUS_INVALID = -1,     /* an argument, option or input is wrong; saying it again won't help */
    STATUS_EXHAUSTED = -2,   /* a bounded pool, queue or the memory is full; later may succeed */
    STATUS_NOT_FOUND = -3,   /* what was named does not exist */
    STATUS_EXISTS = -4,      /* what was to be made exists already */
    STATUS_UNSUPPORTED = -5, /* well formed, and not something that this build or device does */
    STATUS_SYSTEM = -6,      /* the operating system refused; the text holds errno's words */
    STATUS_CORRUPT = -7,     /* foreign bytes break their format */
    STATUS_TOO_LARGE = -8,   /* well formed, and over a stated limit */

    /* the request that this call served */
    STATUS_CANCELLED = -20, /* its client or owner gave it up */
    STATUS_DEADLINE = -21,  /* its time ran out */
    STATUS_CHECKSUM = -22,  /* bytes arrived that are not the bytes sent */
    STATUS_PREEMPTED = -23, /* its place was given to another */

    /* the link to a peer */
    STATUS_PEER_LOST = -40,    /* the peer died or the connection broke */
    STATUS_PEER_REFUSED = -41, /* the peer answers and says no: version, fingerprint, policy */
    STATUS_STALLED = -42,      /* the peer is connected and makes no progress */

    /* this node */
    STATUS_DRAINING = -60, /* takes no new work */
    STATUS_FATAL = -61,    /* can't go on; the process must end */
};

#define must_check __attribute__((warn_unused_result))
#define PRINTF_LIKE(format_i, first_i) __attribute__((format(printf, format_i, first_i)))

/* The text of the error that was decided, for a person; always terminated. */
struct error {
    char text[512];
};

#ifdef __cplusplus
extern "C" {
#endif

/* Lower-case name such as "not_found", of static life; "unknown" for a value outside the set. */
const char *status_name(enum status status);

/*
 * Writes the formatted text into err, cut to fit at a character boundary, and returns status, so
 * that a failure is one line: return error_set(err, STATUS_INVALID, "...", ...). err may be NULL:
 * then only the status is returned. The arguments may point into err->text itself. Any thread.
 */
enum status error_set(struct error *err, enum status status, const char *format, ...)
    PRINTF_LIKE(3, 4);

#ifdef __cplusplus
}
#endif

#endif
