/* Links to prefill nodes and the preflight of each pair.
 *
 * Owns a list of peers, each with its link. The invariant: a peer is `ready` only between a
 * Verified{ok} that we sent on the present stream and the loss of that stream. Everything that a
 * peer says is checked here for form (one hello, then messages) before a transfer sees it.
 *
 * The preflight writes into slots granted for it from the same ledger as transfers: other pairs
 * hold live parcels meanwhile. Its slots are owned by a number that no transfer can have.
 */
#include "decode/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "rpc/hello.h"
#include "rpc/link.h"
#include "rpc/proto.h"
#include "transport/put.h"
#include "transport/region.h"

enum {
    PREFLIGHT_SLOTS = 4,          /* enough for 16 MiB in page-sized puts over and over */
    PREFLIGHT_TIMEOUT_MS = 10000, /* first mappings of a device cost milliseconds, a tcp peer 1 s */
    RETRY_FIRST_MS = 250,
    RETRY_MAX_MS = 5000,
    HELLO_TIMEOUT_MS = 3000,
    LAST_WORDS_MS = 200, /* of a peer that left the view and whose link stands */
    MAX_UNDRAINED = 64,
    MESSAGE_ARENA_BYTES = 64 << 20,
};

struct peer {
    struct list link_in;
    struct peers *peers;
    struct link *link;
    char node_id[HELLO_NODE_ID_MAX + 1];
    uint64_t incarnation;
    enum peer_state state;
    uint64_t state_ns, put_cost_ns, bandwidth_bytes_per_s;
    char text[256];
    bool greeted, listed;
    bool dropped; /* peer_drop was called: the timer does it */
    bool refused; /* what it said is wrong: not listened to until the link is dialled anew */
    uint64_t preflight_owner; /* of its slots in the ledger; 0: none */
    uint64_t forgotten_owner; /* of the last preflight, if its slots were revoked */
    uint32_t preflight_slots[PREFLIGHT_SLOTS], n_preflight_slots;
    uint32_t retry_ms;
    struct loop_timer *timer; /* of the state: preflight's end, or the next try */
    int pidfd;
    struct loop_fd *pid_watch;
    bool process_ended; /* nothing of it can write any more */
    bool leaving;       /* not in the view any more: what its link has to say is still read */
    bool gone;          /* not a peer any more: only waits to see its process end */
    uint64_t undrained[MAX_UNDRAINED];
    uint32_t n_undrained;
    /* what peers_fill_status hands out */
    Baton__NodeRef ref;
    Baton__ToRouter__Pair pair;
};

struct peers {
    struct peers_options options;
    const struct peers_events *events;
    void *cookie;
    struct list all, gone;
    uint64_t next_preflight_owner;
    Baton__ToRouter__Pair **status_pairs;
    struct buf packed;
};

static void preflight_start(struct peer *peer);

static void peer_set_state(struct peer *peer, enum peer_state state, const char *text)
{
    bool tell = peer->state != state;
    peer->state = state;
    peer->state_ns = loop_now_ns();
    snprintf(peer->text, sizeof(peer->text), "%s", text);
    if (tell) {
        peer->peers->events->changed(peer->peers->cookie);
    }
}

enum status peer_send(struct peer *peer, const Baton__ToPrefill *message)
{
    proto_pack(&message->base, &peer->peers->packed);
    return link_send_message(peer->link, &message->base, peer->peers->packed.data,
                             peer->peers->packed.bytes);
}

static void pid_forget(struct peer *peer)
{
    loop_fd_free(peer->pid_watch);
    peer->pid_watch = NULL;
    if (peer->pidfd >= 0) {
        close(peer->pidfd);
        peer->pidfd = -1;
    }
}

static void peer_free(struct peer *peer);

static void process_ended(struct peer *peer)
{
    peer->process_ended = true;
    for (uint32_t i = 0; i < peer->n_undrained; i++) {
        landing_drained(peer->peers->options.landing, peer->undrained[i]);
    }
    peer->n_undrained = 0;
}

static void pid_ended(void *cookie, unsigned events)
{
    struct peer *peer = cookie;
    pid_forget(peer);
    process_ended(peer);
    if (peer->gone) {
        peer_free(peer);
    }
}

static void pid_watch(struct peer *peer, const Baton__Hello *hello)
{
    uint8_t boot_id[16];
    size_t n = hello_host_boot_id(boot_id);
    if (peer->pidfd >= 0 || n == 0 || hello->host_boot_id.len != n || hello->pid == 0 ||
        memcmp(hello->host_boot_id.data, boot_id, n) != 0) {
        return;
    }
    peer->pidfd = (int)syscall(SYS_pidfd_open, (pid_t)hello->pid, 0);
    peer->process_ended = peer->pidfd < 0 && errno == ESRCH;
    if (peer->pidfd >= 0 && loop_fd_create(peer->peers->options.loop, peer->pidfd, LOOP_READ,
                                           pid_ended, peer, &peer->pid_watch)) {
        close(peer->pidfd);
        peer->pidfd = -1;
    }
}

void peer_note_undrained(struct peer *peer, uint64_t transfer)
{
    if (peer->process_ended) { /* it was seen before the link was */
        landing_drained(peer->peers->options.landing, transfer);
        return;
    }
    if (peer->n_undrained == MAX_UNDRAINED) {
        memmove(peer->undrained, peer->undrained + 1,
                (MAX_UNDRAINED - 1) * sizeof(peer->undrained[0]));
        peer->n_undrained--;
    }
    peer->undrained[peer->n_undrained++] = transfer;
}

static void preflight_forget(struct peer *peer)
{
    if (peer->preflight_owner) {
        if (landing_revoke(peer->peers->options.landing, peer->preflight_owner)) {
            peer->forgotten_owner = peer->preflight_owner;
            peer_note_undrained(peer, peer->preflight_owner);
        }
        peer->preflight_owner = 0;
        peer->n_preflight_slots = 0;
    }
}

/* The pair is of no use now. It is tried again after a while that grows with each failure. */
static void pair_fail(struct peer *peer, const char *text)
{
    if (peer->state != PEER_FAILED || strcmp(peer->text, text) != 0) {
        log_warn("pairs", "%s: %s", peer->node_id, text);
    }
    preflight_forget(peer);
    peer_set_state(peer, PEER_FAILED, text);
    peer->retry_ms = peer->retry_ms ? peer->retry_ms * 2 : RETRY_FIRST_MS;
    if (peer->retry_ms > RETRY_MAX_MS) {
        peer->retry_ms = RETRY_MAX_MS;
    }
    /* Jitter from the clock's low bits is enough to keep many nodes from trying in step. */
    uint64_t jitter_ms = loop_now_ns() / 1000 % (peer->retry_ms / 2 + 1);
    loop_timer_arm(peer->timer, (peer->retry_ms + jitter_ms) * NS_PER_MS);
}

/* Of no use for a while, and nothing that ran on this link is believed any more. */
static void pair_reset(struct peer *peer, const char *text)
{
    bool had = peer->greeted;
    pair_fail(peer, text);
    peer->greeted = false;
    if (had) {
        peer->peers->events->lost(peer->peers->cookie, peer, peer->text);
    }
    link_reset(peer->link);
}

void peer_drop(struct peer *peer)
{
    if (peer->greeted) {
        peer->dropped = true;
        loop_timer_arm(peer->timer, 0);
    }
}

static void peer_left(struct peer *peer);

static void peer_timer(void *cookie)
{
    struct peer *peer = cookie;
    if (peer->gone) {
        peer_free(peer);
    } else if (peer->leaving) {
        peer_left(peer);
    } else if (peer->dropped) {
        peer->dropped = false;
        pair_reset(peer, "it does not read");
    } else if (!peer->greeted && peer->link && link_is_open(peer->link) && !peer->refused) {
        pair_reset(peer, "no hello came");
    } else if (peer->state == PEER_PREFLIGHT && peer->preflight_owner) {
        pair_reset(peer, "the preflight was not answered in time");
    } else if (peer->state == PEER_PREFLIGHT) {
        preflight_start(peer); /* there was no free slot */
    } else if (peer->state == PEER_FAILED && peer->greeted) {
        preflight_start(peer);
    } else if (peer->refused) {
        peer->refused = false;
        link_reset(peer->link);
    }
}

static void preflight_start(struct peer *peer)
{
    struct peers *peers = peer->peers;
    peer_set_state(peer, PEER_PREFLIGHT, "preflight");
    if (peer->forgotten_owner) {
        /* A pair that fails over and over may not use up the landing area of the others: it gets
         * the slots back that its last preflight left revoked. */
        landing_drained(peers->options.landing, peer->forgotten_owner);
        peer->forgotten_owner = 0;
    }
    peer->preflight_owner = ++peers->next_preflight_owner;
    peer->n_preflight_slots = landing_grant(peers->options.landing, peer->preflight_owner,
                                            PREFLIGHT_SLOTS, peer->preflight_slots);
    if (!peer->n_preflight_slots) {
        peer->preflight_owner = 0;
        loop_timer_arm(peer->timer, 100 * NS_PER_MS);
        return;
    }
    uint32_t runs[2 * PREFLIGHT_SLOTS];
    for (uint32_t i = 0; i < peer->n_preflight_slots; i++) {
        runs[2 * i] = peer->preflight_slots[i];
        runs[2 * i + 1] = 1;
    }
    Baton__ToPrefill__Slots slots = BATON__TO_PREFILL__SLOTS__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    slots.slot_runs = runs;
    slots.n_slot_runs = 2 * peer->n_preflight_slots;
    message.what_case = BATON__TO_PREFILL__WHAT_SLOTS;
    message.slots = &slots;
    if (peer_send(peer, &message)) {
        pair_fail(peer, "the link is full");
        return;
    }
    loop_timer_arm(peer->timer, PREFLIGHT_TIMEOUT_MS * NS_PER_MS);
}

static bool preflight_right(struct peer *peer, const Baton__FromPrefill__Preflight *preflight,
                            char *ret_text, size_t text_bytes)
{
    struct landing *landing = peer->peers->options.landing;
    uint32_t at = 0;
    if (preflight->bytes == 0 || preflight->bytes % 8 ||
        preflight->bytes > landing_slot_bytes(landing)) {
        snprintf(ret_text, text_bytes, "preflight of %" PRIu64 " bytes in slots of %zu",
                 preflight->bytes, landing_slot_bytes(landing));
        return false;
    }
    for (size_t r = 0; r + 1 < preflight->n_slot_runs; r += 2) {
        for (uint32_t k = 0; k < preflight->slot_runs[r + 1]; k++, at++) {
            if (at >= peer->n_preflight_slots ||
                peer->preflight_slots[at] != preflight->slot_runs[r] + k) {
                snprintf(ret_text, text_bytes, "preflight into slots that were not granted");
                return false;
            }
            size_t offset = 0;
            uint8_t *copy = mem_alloc(preflight->bytes);
            bool right = !landing_read(landing, landing_slot(landing, peer->preflight_slots[at]),
                                       preflight->bytes, copy) &&
                         put_pattern_check(copy, preflight->bytes,
                                           put_pattern_seed(preflight->pattern, at), &offset);
            mem_free(copy);
            if (!right) {
                snprintf(ret_text, text_bytes,
                         "the preflight's pattern is wrong from byte %zu of slot %" PRIu32
                         " on (transport %s)",
                         offset, peer->preflight_slots[at], preflight->transport);
                return false;
            }
        }
    }
    if (at != peer->n_preflight_slots) {
        snprintf(ret_text, text_bytes, "preflight of %" PRIu32 " slots, %" PRIu32 " were granted",
                 at, peer->n_preflight_slots);
        return false;
    }
    return true;
}

static void preflight_return(struct peer *peer)
{
    struct landing *landing = peer->peers->options.landing;
    for (uint32_t i = 0; i < peer->n_preflight_slots; i++) {
        if (landing_land(landing, peer->preflight_slots[i], peer->preflight_owner)) {
            landing_release(landing, peer->preflight_slots[i]);
        }
    }
    peer->preflight_owner = 0;
    peer->n_preflight_slots = 0;
}

static void preflight_arrived(struct peer *peer, const Baton__FromPrefill__Preflight *preflight)
{
    char text[256];
    bool ok = false;
    if (peer->state != PEER_PREFLIGHT || !peer->preflight_owner) {
        return;
    }
    loop_timer_disarm(peer->timer);
    /* It answers when its puts have ended, well or not: nothing more is written. */
    if (preflight->error[0]) {
        snprintf(text, sizeof(text), "%s", preflight->error);
    } else if (preflight->region != 0) {
        snprintf(text, sizeof(text), "preflight of region %" PRIu32 ", there is only region 0",
                 preflight->region);
    } else {
        ok = preflight_right(peer, preflight, text, sizeof(text));
    }
    preflight_return(peer);
    Baton__ToPrefill__Verified verified = BATON__TO_PREFILL__VERIFIED__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    verified.ok = ok;
    verified.text = ok ? (char *)"" : text;
    message.what_case = BATON__TO_PREFILL__WHAT_VERIFIED;
    message.verified = &verified;
    if (peer_send(peer, &message) && ok) {
        ok = false;
        snprintf(text, sizeof(text), "the link is full");
    }
    if (!ok) {
        pair_fail(peer, text);
        return;
    }
    peer->retry_ms = 0;
    peer->put_cost_ns = preflight->put_cost_ns;
    peer->bandwidth_bytes_per_s = preflight->bandwidth_bytes_per_s;
    log_info(
        "pairs", "%s is ready: %s into %s memory, %.1f us a put, %.2f GB/s", peer->node_id,
        preflight->transport, landing_on_device(peer->peers->options.landing) ? "device" : "host",
        (double)preflight->put_cost_ns * 1e-3, (double)preflight->bandwidth_bytes_per_s * 1e-9);
    peer_set_state(peer, PEER_READY, preflight->transport);
}

/* ---- the link ---- */

static void link_opened(void *cookie, struct link *link)
{
    struct peer *peer = cookie;
    peer->refused = false;
    struct peers *peers = peer->peers;
    struct landing *landing = peers->options.landing;
    size_t rkey_bytes;
    const uint8_t *rkey = region_rkey(landing_region(landing), &rkey_bytes);
    Baton__Region region = BATON__REGION__INIT, *regions[] = {&region};
    Baton__PrefillHello hello = BATON__PREFILL_HELLO__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    region.address = (uint64_t)(uintptr_t)region_base(landing_region(landing));
    region.bytes = region_bytes(landing_region(landing));
    region.rkey = (ProtobufCBinaryData){rkey_bytes, (uint8_t *)rkey};
    region.memory = region_memory(landing_region(landing)) == REGION_DEVICE
                        ? BATON__MEMORY_KIND__MEMORY_DEVICE
                        : BATON__MEMORY_KIND__MEMORY_HOST;
    region.n_slots = landing_n_slots(landing);
    region.slot_bytes = landing_slot_bytes(landing);
    hello.hello = (Baton__Hello *)peers->options.hello;
    hello.ucx_address = (ProtobufCBinaryData){peers->options.ucx_address_bytes,
                                              (uint8_t *)peers->options.ucx_address};
    hello.n_regions = 1;
    hello.regions = regions;
    message.what_case = BATON__TO_PREFILL__WHAT_HELLO;
    message.hello = &hello;
    peer->greeted = peer->dropped = false;
    loop_timer_arm(peer->timer, HELLO_TIMEOUT_MS * NS_PER_MS);
    if (peer_send(peer, &message)) {
        link_reset(link);
    }
}

static enum status hello_accept(struct peer *peer, const Baton__PrefillHello *prefill,
                                struct error *err)
{
    const Baton__Hello *hello = prefill->hello;
    if (!hello) {
        return error_set(err, STATUS_CORRUPT, "a hello without a hello");
    }
    enum status status = hello_check(peer->peers->options.hello, hello, err);
    if (status) {
        return status;
    }
    if (hello->role != BATON__ROLE__ROLE_PREFILL || strcmp(hello->node_id, peer->node_id) != 0 ||
        hello->incarnation != peer->incarnation) {
        return error_set(err, STATUS_PEER_REFUSED,
                         "%s of incarnation %016" PRIx64 " answers where the router saw %s of "
                         "incarnation %016" PRIx64,
                         hello->node_id, hello->incarnation, peer->node_id, peer->incarnation);
    }
    return STATUS_OK;
}

static void link_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct peer *peer = cookie;
    struct error err = {""};
    if (peer->refused) {
        return;
    }
    struct arena *arena = arena_create(MESSAGE_ARENA_BYTES);
    ProtobufCMessage *unpacked;
    enum status status =
        proto_unpack(&baton__from_prefill__descriptor, bytes, n_bytes, arena, &unpacked, &err);
    if (status) {
        goto refuse;
    }
    const Baton__FromPrefill *message = (const Baton__FromPrefill *)unpacked;
    if (message->what_case == BATON__FROM_PREFILL__WHAT_HELLO) {
        status = peer->greeted ? error_set(&err, STATUS_CORRUPT, "a second hello")
                               : hello_accept(peer, message->hello, &err);
        if (status) {
            goto refuse;
        }
        peer->greeted = true;
        pid_watch(peer, message->hello->hello);
        preflight_start(peer);
    } else if (!peer->greeted) {
        status = error_set(&err, STATUS_CORRUPT, "the first message is no hello");
        goto refuse;
    } else if (message->what_case == BATON__FROM_PREFILL__WHAT_PREFLIGHT) {
        if (!peer->leaving) {
            preflight_arrived(peer, message->preflight);
        }
    } else {
        peer->peers->events->message(peer->peers->cookie, peer, message);
    }
    arena_free(arena);
    return;

refuse:
    arena_free(arena);
    bool had = peer->greeted;
    peer->greeted = false;
    peer->refused = true;
    pair_fail(peer, err.text); /* its timer dials anew: later with each failure */
    if (had) {
        peer->peers->events->lost(peer->peers->cookie, peer, err.text);
    }
}

static void link_lost(void *cookie, struct link *link, enum status status, const char *text)
{
    struct peer *peer = cookie;
    bool had = peer->greeted;
    char why[224];
    snprintf(why, sizeof(why), "%s", text[0] ? text : status_name(status));
    peer->greeted = peer->dropped = false;
    loop_timer_disarm(peer->timer);
    preflight_forget(peer);
    log_warn("pairs", "%s: link lost: %s", peer->node_id, why);
    if (peer->leaving) {
        peer->greeted = had;
        peer_left(peer);
        return;
    }
    peer_set_state(peer, PEER_CONNECTING, why);
    if (had) {
        peer->peers->events->lost(peer->peers->cookie, peer, why);
    }
}

static void link_failed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct peer *peer = cookie;
    peer_set_state(peer, PEER_CONNECTING, text[0] ? text : status_name(status));
}

static const struct link_events peer_link_events = {
    .opened = link_opened,
    .message = link_message,
    .closed = link_lost,
    .failed = link_failed,
};

/* ---- the set ---- */

enum status peers_create(const struct peers_options *options, const struct peers_events *events,
                         void *cookie, struct peers **ret_peers)
{
    struct peers *peers = mem_zalloc(sizeof(*peers));
    peers->options = *options;
    peers->events = events;
    peers->cookie = cookie;
    list_init(&peers->all);
    list_init(&peers->gone);
    *ret_peers = peers;
    return STATUS_OK;
}

static void peer_free(struct peer *peer)
{
    link_close(peer->link);
    preflight_forget(peer);
    loop_timer_free(peer->timer);
    pid_forget(peer);
    list_remove(&peer->link_in);
    mem_free(peer);
}

void peers_free(struct peers *peers)
{
    if (!peers) {
        return;
    }
    list_for_each_safe(at, &peers->all)
    {
        peer_free(list_entry(at, struct peer, link_in));
    }
    list_for_each_safe(at, &peers->gone)
    {
        peer_free(list_entry(at, struct peer, link_in));
    }
    mem_free(peers->status_pairs);
    buf_fini(&peers->packed);
    mem_free(peers);
}

/* The view dropped it. Its slots come back at once if its process is seen to end, and a router that
 * lost the same process drops it from the view before that can be seen. */
static void peer_let_go(struct peer *peer)
{
    preflight_forget(peer);
    if (peer->n_undrained == 0 || peer->pidfd < 0) {
        peer_free(peer);
        return;
    }
    link_close(peer->link);
    peer->link = NULL;
    peer->gone = true;
    list_remove(&peer->link_in);
    list_push_back(&peer->peers->gone, &peer->link_in);
    loop_timer_arm(peer->timer, LANDING_REVOKED_MS * NS_PER_MS);
}

/* Nothing more is heard of it. */
static void peer_left(struct peer *peer)
{
    struct peers *peers = peer->peers;
    if (peer->greeted) {
        peers->events->lost(peers->cookie, peer, "the node left the cluster");
    }
    peer_let_go(peer);
    peers->events->changed(peers->cookie);
}

static void peer_add(struct peers *peers, const Baton__ToNode__Peer *node)
{
    struct peer *peer = mem_zalloc(sizeof(*peer));
    struct error err;
    snprintf(peer->node_id, sizeof(peer->node_id), "%s", node->node->node_id);
    peer->incarnation = node->node->incarnation;
    peer->peers = peers;
    peer->pidfd = -1;
    peer->state = PEER_CONNECTING;
    peer->state_ns = loop_now_ns();
    peer->listed = true;
    peer->timer = loop_timer_create(peers->options.loop, peer_timer, peer);
    list_push_back(&peers->all, &peer->link_in);
    struct link_options options = {
        .host = node->grpc->host,
        .port = (uint16_t)node->grpc->port,
        .method = "/baton.Prefill/Serve",
        .name = peer->node_id,
        .security = peers->options.security,
    };
    if (link_connect(peers->options.rpc, &options, &peer_link_events, peer, &peer->link, &err)) {
        log_error("pairs", "%s: %s", peer->node_id, err.text);
        peer_free(peer);
    }
}

static struct peer *peer_find(struct peers *peers, const char *node_id, uint64_t incarnation)
{
    list_for_each(at, &peers->all)
    {
        struct peer *peer = list_entry(at, struct peer, link_in);
        if (peer->incarnation == incarnation && strcmp(peer->node_id, node_id) == 0) {
            return peer;
        }
    }
    return NULL;
}

void peers_set_view(struct peers *peers, const Baton__ToNode__Peer *const *nodes, size_t n_nodes)
{
    list_for_each(at, &peers->all)
    {
        list_entry(at, struct peer, link_in)->listed = false;
    }
    for (size_t i = 0; i < n_nodes; i++) {
        const Baton__ToNode__Peer *node = nodes[i];
        if (node->role != BATON__ROLE__ROLE_PREFILL || !node->node || !node->grpc ||
            !node->grpc->port || !node->node->node_id[0]) {
            continue;
        }
        struct peer *peer = peer_find(peers, node->node->node_id, node->node->incarnation);
        if (peer) {
            peer->listed = true;
            if (peer->leaving) {
                peer->leaving = false;
                pair_reset(peer, "it left the cluster and came back");
            }
        } else {
            peer_add(peers, node);
        }
    }
    list_for_each_safe(at, &peers->all)
    {
        struct peer *peer = list_entry(at, struct peer, link_in);
        if (!peer->listed && !peer->leaving) {
            log_info("pairs", "%s: it left the cluster", peer->node_id);
            if (!peer->greeted || !link_is_open(peer->link)) {
                peer_left(peer);
                continue;
            }
            /* The view came from the router. What a node that drained said last comes on its own
             * link, and may be there and not read yet. */
            peer->leaving = true;
            preflight_forget(peer);
            peer_set_state(peer, PEER_CONNECTING, "the node left the cluster");
            loop_timer_arm(peer->timer, LAST_WORDS_MS * NS_PER_MS);
        }
    }
    peers->events->changed(peers->cookie);
}

void peers_reset(struct peers *peers)
{
    list_for_each_safe(at, &peers->all)
    {
        struct peer *peer = list_entry(at, struct peer, link_in);
        if (peer->leaving) {
            peer_left(peer);
            continue;
        }
        bool had = peer->greeted;
        peer->greeted = false;
        preflight_forget(peer);
        peer_set_state(peer, PEER_CONNECTING, "this node was paused");
        if (had) {
            peers->events->lost(peers->cookie, peer, "this node was paused");
        }
        link_reset(peer->link);
    }
}

struct peer *peers_find_ready(struct peers *peers, const Baton__NodeRef *ref, char *ret_text)
{
    static const char *const names[] = {"connecting", "in preflight", "ready", "failed"};
    struct peer *peer = peer_find(peers, ref->node_id, ref->incarnation);
    if (!peer) {
        snprintf(ret_text, 256,
                 "prefill node %.64s of incarnation %016" PRIx64 " is not known here", ref->node_id,
                 ref->incarnation);
        return NULL;
    }
    if (peer->state != PEER_READY) {
        snprintf(ret_text, 256, "the pair with %s is %s: %.120s", peer->node_id, names[peer->state],
                 peer->text);
        return NULL;
    }
    return peer;
}

const char *peer_name(const struct peer *peer)
{
    return peer->node_id;
}

uint32_t peers_n(const struct peers *peers)
{
    uint32_t n = 0;
    list_for_each(at, &peers->all)
    {
        n++;
    }
    return n;
}

uint32_t peers_n_ready(const struct peers *peers)
{
    uint32_t n = 0;
    list_for_each(at, &peers->all)
    {
        n += list_entry(at, struct peer, link_in)->state == PEER_READY;
    }
    return n;
}

void peers_fill_status(struct peers *peers, Baton__ToRouter__Status *status)
{
    uint32_t n = peers_n(peers), i = 0;
    uint64_t now_ns = loop_now_ns();
    peers->status_pairs =
        mem_realloc_array(peers->status_pairs, n ? n : 1, sizeof(*peers->status_pairs));
    list_for_each(at, &peers->all)
    {
        struct peer *peer = list_entry(at, struct peer, link_in);
        baton__node_ref__init(&peer->ref);
        baton__to_router__pair__init(&peer->pair);
        peer->ref.node_id = peer->node_id;
        peer->ref.incarnation = peer->incarnation;
        peer->pair.prefill = &peer->ref;
        peer->pair.state = (Baton__ToRouter__Pair__State)peer->state;
        peer->pair.text = peer->text;
        peer->pair.put_cost_ns = peer->put_cost_ns;
        peer->pair.bandwidth_bytes_per_s = peer->bandwidth_bytes_per_s;
        peer->pair.age_ms = (now_ns - peer->state_ns) / NS_PER_MS;
        peers->status_pairs[i++] = &peer->pair;
    }
    status->n_pairs = n;
    status->pairs = peers->status_pairs;
}
