/* decode/peers.h - the prefill nodes of a decode node: links, preflight, pairs.
 *
 * One peer for each prefill node that a router's view lists, by (node_id, incarnation). A pair is
 * `ready` after a preflight in which a pattern was put into every region and read back here; only
 * then may a transfer use it. A pair that failed is tried again by itself, with backoff, for ever:
 * probes bring it back, never user traffic.
 *
 * Thread: loop; callbacks from the event loop.
 */
#ifndef BATON_DECODE_PEERS_H
#define BATON_DECODE_PEERS_H

#include <stdbool.h>
#include <stdint.h>

#include "decode/landing.h"
#include "proto/cluster.pb-c.h"
#include "proto/prefill.pb-c.h"
#include "rpc/core.h"

struct peers;
struct peer;

enum peer_state { PEER_CONNECTING, PEER_PREFLIGHT, PEER_READY, PEER_FAILED };

struct peers_events {
    /* A message about a transfer, of a peer whose hello was accepted. */
    void (*message)(void *cookie, struct peer *peer, const Baton__FromPrefill *message);
    /* The link is gone, with all transfers on it. `peer` stays and dials again, or is freed after
     * the call if the view dropped it. */
    void (*lost)(void *cookie, struct peer *peer, const char *text);
    /* A pair changed its state: routers want to know at once. */
    void (*changed)(void *cookie);
};

struct peers_options {
    struct loop *loop;
    struct rpc_core *rpc;
    struct landing *landing;
    struct rpc_security security;
    const Baton__Hello *hello; /* ours; read whenever a link opens */
    const uint8_t *ucx_address;
    size_t ucx_address_bytes;
};

must_check enum status peers_create(const struct peers_options *options,
                                    const struct peers_events *events, void *cookie,
                                    struct peers **ret_peers);
/* Closes all links; `lost` does not run. NULL is fine. */
void peers_free(struct peers *peers);

/* The prefill nodes that should be linked now; others are let go (`lost` runs for them). */
void peers_set_view(struct peers *peers, const Baton__ToNode__Peer *const *nodes, size_t n_nodes);
/* Drops and dials every link anew: after this process found that it had been paused. */
void peers_reset(struct peers *peers);

/* The peer of a reference, if the pair is ready; else NULL and why in ret_text (256 bytes). */
struct peer *peers_find_ready(struct peers *peers, const Baton__NodeRef *ref, char *ret_text);
const char *peer_name(const struct peer *peer);
/* Sends to the peer: as link_send. */
must_check enum status peer_send(struct peer *peer, const Baton__ToPrefill *message);
/* It does not take what it must be told: at the next turn its link is given up and `lost` runs. */
void peer_drop(struct peer *peer);
/* A transfer of this peer ended with slots that it might still write: they are free at once if the
 * peer's process is seen to end. */
void peer_note_undrained(struct peer *peer, uint64_t transfer);

/* Appends all pairs to a Status; what is appended lives until the next call. */
void peers_fill_status(struct peers *peers, Baton__ToRouter__Status *status);
uint32_t peers_n_ready(const struct peers *peers);
uint32_t peers_n(const struct peers *peers);

#endif
