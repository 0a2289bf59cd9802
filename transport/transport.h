/* transport/transport.h - the object that moves bytes between node processes.
 *
 * One `struct transport` a process. It owns the UCX context, the only UCX worker and the one thread
 * that makes every UCX call (the put thread). Regions (region.h) are memory registered with it,
 * peers and puts (put.h) are what it moves. It knows no layer, page, request or lease: a cookie is
 * all it carries of its caller.
 *
 * Threads. Every function of transport/ is called on the loop thread and every callback runs there,
 * from the event loop, never from inside a call (transport_close excepted, which says so). Only
 * transport_stats may be called from any thread.
 *
 * Trust. A peer can write to the landing regions whose keys it was given, and to nothing else; over
 * shared memory nothing stops it from writing there after its endpoint is gone (no fence exists).
 * Lengths, headers and checksums of foreign bytes (addresses, region keys) are checked before UCX
 * sees them, which guards against damage and mismatched builds; UCX has no defence against a peer
 * that forges well-formed ones, so the network it runs on must be trusted.
 */
#ifndef BATON_TRANSPORT_TRANSPORT_H
#define BATON_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct loop;
struct metrics;
struct transport;

enum {
    TRANSPORT_MAX_ADDRESS_BYTES = 16384, /* most bytes of a worker address on the wire */
    TRANSPORT_MAX_RKEY_BYTES = 4096,     /* most bytes of a region key on the wire */
};

/* What a transport is opened with; all zero is a good default. Strings are borrowed for the call.
 */
struct transport_options {
    size_t window_bytes; /* bytes posted and not completed, per peer; 0 = 8 MiB */
    uint32_t max_puts;   /* puts not ended yet, of all peers together; 0 = 1024 */
    uint64_t stall_ns;   /* bytes outstanding and no completion for so long: stalled; 0 = 1.5 s */
    uint64_t connect_timeout_ns; /* from put_peer_connect to up; 0 = 5 s */
    uint64_t spin_ns;            /* polling before the put thread sleeps; 0 = 50 us */
    bool device_regions; /* device memory will be registered: shared memory is left out of the
                            transports unless `tls` says otherwise (its failures hide deaths) */
    void (*attach)(void *cookie); /* runs first of all on the put thread, and on the caller's before
                                     UCX is opened: there the device becomes theirs; or NULL */
    void *attach_cookie;          /* must outlive the transport */
    const char *tls;              /* UCX transport list, NULL = UCX's choice */
    const char *net_devices;      /* UCX device list, NULL = all */
    const char *tcp_port_range;   /* "low-high" the tcp transport may bind, NULL = any */
};

/* Opens UCX and starts the put thread. `loop` is where callbacks run; it must outlive the
 * transport. A UCX_ variable that the operator has set is never overridden. UCX's handlers of fatal
 * signals are put back to what was there before. Logs the UCX version, settings and memory kinds.
 * Call it before any CUDA allocation. Errors: STATUS_SYSTEM (UCX or threads), STATUS_INVALID
 * (options). */
must_check enum status transport_open(struct loop *loop, const struct transport_options *options,
                                      struct transport **ret_transport, struct error *err);

/* Ends everything: closes each peer by force, ends each put (its done callback runs inside this
 * call with STATUS_CANCELLED, or its result if it had one), runs the done callback of each peer
 * close that is under way, unmaps every region, joins the thread, frees all of it: peers, puts and
 * regions are gone when it returns. Other callbacks do not run any more. Takes at most about two
 * seconds when a network is cut. NULL is legal. */
void transport_close(struct transport *transport);

/* The bytes a peer needs to connect to this process, at most TRANSPORT_MAX_ADDRESS_BYTES. Owned by
 * the transport, fixed from open to close. They carry the UCX version: both ends must run the same
 * one. */
const uint8_t *transport_worker_address(const struct transport *transport, size_t *ret_bytes);

/* Can memory of this kind be registered (region.h)? `device` asks for CUDA memory; host is always
 * yes. */
bool transport_has_device_memory(const struct transport *transport);

/* The UCX that is used, as "UCX 1.22.0 of /opt/ucx/lib/libucp.so.0"; of the transport. */
const char *transport_ucx_text(const struct transport *transport);

/* Counters since open and gauges of now. */
struct transport_stats {
    uint64_t puts_submitted, puts_done, puts_failed,
        puts_cancelled;                   /* submitted - others = alive */
    uint64_t bytes_submitted, bytes_done; /* of whole puts, done = flushed */
    uint64_t posts;                       /* UCX puts posted after merging and cutting */
    uint64_t peers_connected, peers_failed, peers_stalled, peers_closed;
    uint64_t bytes_in_flight; /* gauge: posted, not completed */
    uint64_t puts_alive;      /* gauge */
    uint64_t peers_alive;     /* gauge: connected objects not closed yet */
    uint64_t region_bytes;    /* gauge: mapped */
};

/* Any thread. A snapshot: the fields are read one after the other. */
void transport_stats(const struct transport *transport, struct transport_stats *ret_stats);

/* Registers all of them as baton_transport_*, read when they are written. The registry must not be
 * written any more once the transport is closed. */
void transport_metrics(struct transport *transport, struct metrics *metrics);

#endif
