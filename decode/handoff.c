/* The receiving end of transfers: see handoff.h and the rules of the hand-off in
 * docs/INTERFACES.md.
 *
 * Owns transfers and the jobs that copy their parcels. What must hold: a transfer reaches `ended`
 * with ok only if every byte of every page of the prompt and of the tail was accepted once, each
 * from slots that were granted to it, each with the right checksum, and First and Done came.
 * Anything else is a failure with its code.
 *
 * A copy under way writes to pages of the transfer's sequence from a worker thread; therefore a
 * transfer that failed or was cancelled lives on in `cancelling` until its last job came back, and
 * only then is the sequence freed.
 */
#include "decode/handoff.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/fault.h"
#include "base/hmap.h"
#include "base/list.h"
#include "base/log.h"
#include "base/mem.h"
#include "decode/handoff_internal.h"
#include "engine/accept.h"
#include "node/wire.h"

enum {
    CHECKSUM_RETRY_MS = 1,
    IDS_A_MESSAGE = 16000, /* about 48 KB as varints: nothing waits long behind one part */
};

static void transfer_settle(struct transfer *transfer);
static void job_submit(struct accept_job *job);

enum status handoff_create(const struct handoff_options *options,
                           const struct handoff_events *events, void *cookie,
                           struct handoff **ret_handoff)
{
    struct handoff *handoff = mem_zalloc(sizeof(*handoff));
    handoff->options = *options;
    handoff->events = events;
    handoff->cookie = cookie;
    handoff->by_id = hmap_create();
    list_init(&handoff->open);
    list_init(&handoff->cancelling);
    list_init(&handoff->jobs);
    *ret_handoff = handoff;
    return STATUS_OK;
}

/* ---- ending ---- */

static void transfer_destroy(struct transfer *transfer)
{
    list_remove(&transfer->link);
    engine_seq_free(transfer->seq);
    mem_free(transfer->page_at);
    mem_free(transfer->tail);
    mem_free(transfer->first);
    mem_free(transfer);
}

static void grant_all(void *cookie);

static void grant_soon(struct handoff *handoff)
{
    if (!handoff->granting) {
        handoff->granting = true;
        loop_defer(handoff->options.loop, grant_all, handoff);
    }
}

static void send_cancel(struct transfer *transfer)
{
    Baton__ToPrefill__Cancel cancel = BATON__TO_PREFILL__CANCEL__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    cancel.transfer = transfer->id;
    message.what_case = BATON__TO_PREFILL__WHAT_CANCEL;
    message.cancel = &cancel;
    if (peer_send(transfer->peer, &message) == STATUS_EXHAUSTED) {
        peer_drop(transfer->peer); /* what it does not hear of it would go on with */
    }
}

/* Out of `open`: nothing of it is believed any more, its slots are revoked. */
static void transfer_close(struct transfer *transfer, bool tell_prefill)
{
    struct handoff *handoff = transfer->handoff;
    hmap_remove_u64(handoff->by_id, transfer->id);
    transfer->cancelling = true;
    transfer->owner = NULL;
    list_remove(&transfer->link);
    list_push_back(&handoff->cancelling, &transfer->link);
    if (landing_revoke(handoff->options.landing, transfer->id)) {
        peer_note_undrained(transfer->peer, transfer->id);
    }
    if (tell_prefill) {
        send_cancel(transfer);
    }
    if (transfer->n_jobs == 0) {
        transfer_destroy(transfer);
    }
    grant_soon(handoff);
}

static void transfer_fail(struct transfer *transfer, bool tell_prefill, Baton__FailCode code,
                          const char *node, bool retryable, const char *format, ...)
    PRINTF_LIKE(6, 7);

static void transfer_fail(struct transfer *transfer, bool tell_prefill, Baton__FailCode code,
                          const char *node, bool retryable, const char *format, ...)
{
    struct handoff *handoff = transfer->handoff;
    void *owner = transfer->owner;
    char text[320], where[65];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    snprintf(where, sizeof(where), "%s", node);
    struct handoff_end end = {.code = code, .node = where, .text = text, .retryable = retryable};
    handoff->stats.n_failed++;
    log_debug("handoff", "%016" PRIx64 ": failed: %s", transfer->id, text);
    transfer_close(transfer, tell_prefill);
    handoff->events->ended(handoff->cookie, owner, &end);
}

void handoff_cancel(struct transfer *transfer)
{
    transfer->handoff->stats.n_cancelled++;
    transfer_close(transfer, true);
}

static struct accept_job *job_new(struct transfer *transfer)
{
    struct accept_job *job = mem_zalloc(sizeof(*job));
    job->transfer = transfer;
    list_push_back(&transfer->handoff->jobs, &job->link);
    return job;
}

static struct accept_job *job_free(struct accept_job *job)
{
    list_remove(&job->link);
    loop_timer_free(job->retry);
    mem_free(job->pieces);
    mem_free(job->slots);
    mem_free(job);
    return NULL;
}

void handoff_free(struct handoff *handoff)
{
    if (!handoff) {
        return;
    }
    /* The daemon frees its workers first: of the jobs that did not come back none runs. */
    loop_defer_cancel(handoff->options.loop, grant_all, handoff);
    list_for_each_safe(at, &handoff->jobs)
    {
        job_free(list_entry(at, struct accept_job, link));
    }
    list_for_each_safe(at, &handoff->open)
    {
        transfer_destroy(list_entry(at, struct transfer, link));
    }
    list_for_each_safe(at, &handoff->cancelling)
    {
        transfer_destroy(list_entry(at, struct transfer, link));
    }
    hmap_free(handoff->by_id);
    mem_free(handoff);
}

/* ---- slots ---- */

static enum status send_slots(struct transfer *transfer, const uint32_t *slots, uint32_t n)
{
    uint32_t *runs = mem_array(2 * (size_t)n, sizeof(*runs));
    uint32_t n_runs = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (n_runs && runs[n_runs - 2] + runs[n_runs - 1] == slots[i]) {
            runs[n_runs - 1]++;
        } else {
            runs[n_runs++] = slots[i];
            runs[n_runs++] = 1;
        }
    }
    Baton__ToPrefill__Slots message_slots = BATON__TO_PREFILL__SLOTS__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    message_slots.transfer = transfer->id;
    message_slots.slot_runs = runs;
    message_slots.n_slot_runs = n_runs;
    message.what_case = BATON__TO_PREFILL__WHAT_SLOTS;
    message.slots = &message_slots;
    enum status status = peer_send(transfer->peer, &message);
    mem_free(runs);
    return status;
}

/* Deals free slots out, to each transfer its share: with more transfers than slots each still gets
 * one in its turn, and one is enough to go on. */
static void grant_all(void *cookie)
{
    struct handoff *handoff = cookie;
    struct landing *landing = handoff->options.landing;
    handoff->granting = false;
    uint32_t n_hungry = 0;
    list_for_each(at, &handoff->open)
    {
        struct transfer *transfer = list_entry(at, struct transfer, link);
        n_hungry += transfer->seq && transfer->n_slots_granted_all < transfer->n_slots_wanted;
    }
    if (!n_hungry) {
        return;
    }
    uint32_t share = landing_n_slots(landing) / n_hungry;
    if (share < 1) {
        share = 1;
    }
    if (share > handoff->options.max_slots_a_transfer) {
        share = handoff->options.max_slots_a_transfer;
    }
    list_for_each_safe(at, &handoff->open)
    {
        struct transfer *transfer = list_entry(at, struct transfer, link);
        uint32_t slots[256];
        if (!transfer->seq || transfer->n_slots_held >= share) {
            continue;
        }
        uint32_t n = transfer->n_slots_wanted - transfer->n_slots_granted_all;
        n = n < share - transfer->n_slots_held ? n : share - transfer->n_slots_held;
        n = n < 256 ? n : 256;
        n = FAULT_HIT(ACCEPT_GRANT) == FAULT_FAIL ? 0
                                                  : landing_grant(landing, transfer->id, n, slots);
        if (n == 0) {
            continue;
        }
        transfer->n_slots_granted_all += n;
        transfer->n_slots_held += n;
        if (send_slots(transfer, slots, n)) {
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_PEER_LOST,
                          peer_name(transfer->peer), true, "the link to %s is full",
                          peer_name(transfer->peer));
            return; /* granting goes on by itself: the close asked for it */
        }
    }
    /* Who got a slot goes to the back, so that the next free one is another's. */
    struct list *first = list_first(&handoff->open);
    if (first && list_entry(first, struct transfer, link)->n_slots_held > 0) {
        list_remove(first);
        list_push_back(&handoff->open, first);
    }
}

void handoff_slots_freed(struct handoff *handoff)
{
    grant_soon(handoff);
}

void handoff_open(struct transfer *transfer, struct engine_seq *seq)
{
    const struct landing *landing = transfer->handoff->options.landing;
    size_t slot_bytes = landing_slot_bytes(landing);
    transfer->seq = seq;
    transfer->tail_bytes =
        engine_tail_bytes(transfer->handoff->options.engine, transfer->request.n_ids);
    transfer->tail = mem_try_alloc(transfer->tail_bytes ? transfer->tail_bytes : 1);
    transfer->page_at = mem_array(transfer->n_pages, sizeof(*transfer->page_at));
    memset(transfer->page_at, 0, transfer->n_pages * sizeof(*transfer->page_at));
    transfer->n_slots_wanted =
        transfer->n_pages + (uint32_t)((transfer->tail_bytes + slot_bytes - 1) / slot_bytes);
    grant_soon(transfer->handoff);
}

/* ---- starting ---- */

static uint64_t random_id(struct handoff *handoff)
{
    uint64_t id = 0;
    do {
        if (getrandom(&id, sizeof(id), 0) != sizeof(id)) {
            id = loop_now_ns() * 0x9e3779b97f4a7c15u;
        }
        /* The top bit keeps transfers apart from preflights in the slot ledger. */
        id |= 1ull << 63;
    } while (hmap_get_u64(handoff->by_id, id));
    return id;
}

static enum status send_run(struct transfer *transfer)
{
    const struct handoff_request *request = &transfer->request;
    Baton__ToPrefill__Run run = BATON__TO_PREFILL__RUN__INIT;
    Baton__Deadlines deadlines = BATON__DEADLINES__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    uint32_t n_first = request->n_ids < IDS_A_MESSAGE ? request->n_ids : IDS_A_MESSAGE;
    deadlines.queue_ms = request->queue_ms;
    deadlines.prefill_ms = request->prefill_ms;
    deadlines.transfer_ms = request->transfer_ms;
    run.transfer = transfer->id;
    run.n_ids_total = request->n_ids;
    run.ids = (uint32_t *)request->ids;
    run.n_ids = n_first;
    run.n_generated = request->n_generated;
    run.sampling = (Baton__Sampling *)request->sampling;
    run.deadlines = &deadlines;
    run.request = request->request;
    run.attempt = request->attempt;
    run.cache_salt = request->cache_salt;
    message.what_case = BATON__TO_PREFILL__WHAT_RUN;
    message.run = &run;
    enum status status = peer_send(transfer->peer, &message);
    for (uint32_t at = n_first; !status && at < request->n_ids; at += IDS_A_MESSAGE) {
        Baton__IdsPart part = BATON__IDS_PART__INIT;
        uint32_t n = request->n_ids - at < IDS_A_MESSAGE ? request->n_ids - at : IDS_A_MESSAGE;
        part.key = transfer->id;
        part.first = at;
        part.ids = (uint32_t *)request->ids + at;
        part.n_ids = n;
        message.what_case = BATON__TO_PREFILL__WHAT_IDS;
        message.ids = &part;
        status = peer_send(transfer->peer, &message);
        if (status) {
            send_cancel(transfer); /* the Run went out: it must not wait for the rest over there */
        }
    }
    return status;
}

enum status handoff_start(struct handoff *handoff, struct peer *peer,
                          const struct handoff_request *request, void *owner,
                          struct transfer **ret_transfer)
{
    if (hmap_n(handoff->by_id) >= handoff->options.max_transfers) {
        return STATUS_EXHAUSTED;
    }
    struct transfer *transfer = mem_zalloc(sizeof(*transfer));
    transfer->handoff = handoff;
    transfer->peer = peer;
    transfer->owner = owner;
    transfer->id = random_id(handoff);
    transfer->request = *request;
    transfer->n_pages = engine_pages_for(handoff->options.engine, request->n_ids);
    transfer->start_ns = transfer->phase_ns = loop_now_ns();
    list_init(&transfer->link);
    enum status status = send_run(transfer);
    if (status) {
        mem_free(transfer);
        return status == STATUS_EXHAUSTED ? status : STATUS_PEER_LOST;
    }
    list_push_back(&handoff->open, &transfer->link);
    hmap_put_u64(handoff->by_id, transfer->id, transfer);
    handoff->stats.n_started++;
    log_debug("handoff", "%016" PRIx64 ": run of %" PRIu32 " tokens at %s", transfer->id,
              request->n_ids, peer_name(peer));
    *ret_transfer = transfer;
    return STATUS_OK;
}

/* ---- parcels ---- */

/* A tail goes to the transfer's own memory. From a device's the copy is the driver's, and the sum
 * is taken over what it left there. */
static enum status tail_accept(struct accept_job *job)
{
    const struct landing *landing = job->transfer->handoff->options.landing;
    if (!landing_on_device(landing)) {
        return accept_parcel(job->transfer_id, job->seq, job->pieces, job->n_pieces, job->checksum);
    }
    struct parcel_piece *copied = mem_array(job->n_pieces, sizeof(*copied));
    enum status status = STATUS_OK;
    for (uint32_t i = 0; i < job->n_pieces && !status; i++) {
        const struct parcel_piece *piece = &job->pieces[i];
        status = landing_read(landing, piece->src, piece->bytes, piece->dst);
        copied[i] = (struct parcel_piece){NULL, piece->dst, piece->bytes};
    }
    if (!status && accept_parcel_checksum(job->transfer_id, job->seq, copied, job->n_pieces) !=
                       job->checksum) {
        status = STATUS_CHECKSUM;
    }
    mem_free(copied);
    return status;
}

/* The fault point's: one bit of what landed. */
static void job_damage(struct accept_job *job)
{
    struct handoff_options *options = &job->transfer->handoff->options;
    uint8_t *at = (uint8_t *)job->pieces[0].src + job->pieces[0].bytes / 2, byte;
    if (landing_read(options->landing, at, 1, &byte)) {
        return;
    }
    byte ^= 1;
    if (!landing_on_device(options->landing)) {
        *at = byte;
    } else if (engine_device_move(options->engine, at, &byte, 1)) {
        log_warn("handoff", "a fault point could not damage a slot");
    }
}

/* Worker thread. */
static void job_run(void *cookie, struct workers_job *worker_job)
{
    struct accept_job *job = cookie;
    enum fault_action fault = FAULT_WAIT(ACCEPT_COPY);
    if (fault == FAULT_CORRUPT) {
        job_damage(job);
    }
    job->status = job->is_tail ? tail_accept(job)
                               : engine_accept_parcel(job->transfer->handoff->options.engine,
                                                      job->transfer_id, job->seq, job->pieces,
                                                      job->n_pieces, job->checksum);
    job->status = fault == FAULT_FAIL ? STATUS_CHECKSUM : job->status;
}

static void job_again(void *cookie)
{
    job_submit(cookie);
}

static void job_done(void *cookie)
{
    struct accept_job *job = cookie;
    struct transfer *transfer = job->transfer;
    struct handoff *handoff = transfer->handoff;
    if (job->status == STATUS_CHECKSUM && !job->retried && !transfer->cancelling) {
        /* The put was flushed, so the bytes should be there; a device may need another moment. */
        job->retried = true;
        handoff->stats.n_checksum_retries++;
        job->retry = loop_timer_create(handoff->options.loop, job_again, job);
        loop_timer_arm(job->retry, CHECKSUM_RETRY_MS * NS_PER_MS);
        return;
    }
    enum status status = job->status;
    uint32_t seq = job->seq;
    for (uint32_t i = 0; i < job->n_pieces; i++) {
        landing_release(handoff->options.landing, job->slots[i]);
    }
    transfer->n_slots_held -=
        job->n_pieces < transfer->n_slots_held ? job->n_pieces : transfer->n_slots_held;
    transfer->n_jobs--;
    job_free(job);
    grant_soon(handoff);
    if (transfer->cancelling) {
        if (transfer->n_jobs == 0) {
            transfer_destroy(transfer);
        }
        return;
    }
    if (status && status != STATUS_CHECKSUM) {
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_INTERNAL, "", true,
                      "this node could not take parcel %" PRIu32 " from %s: %s", seq,
                      peer_name(transfer->peer), status_name(status));
        return;
    }
    if (status) {
        handoff->stats.n_checksum_failures++;
        log_error("handoff",
                  "%016" PRIx64 ": parcel %" PRIu32 " from %s has a wrong checksum, twice",
                  transfer->id, seq, peer_name(transfer->peer));
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_CHECKSUM, peer_name(transfer->peer),
                      true, "parcel %" PRIu32 " from %s was damaged on its way", seq,
                      peer_name(transfer->peer));
        return;
    }
    Baton__ToPrefill__Accepted accepted = BATON__TO_PREFILL__ACCEPTED__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    accepted.transfer = transfer->id;
    accepted.seq = seq;
    message.what_case = BATON__TO_PREFILL__WHAT_ACCEPTED;
    message.accepted = &accepted;
    if (peer_send(transfer->peer, &message)) {
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_PEER_LOST, peer_name(transfer->peer),
                      true, "the link to %s is full", peer_name(transfer->peer));
        return;
    }
    transfer_settle(transfer);
}

static void job_submit(struct accept_job *job)
{
    struct handoff *handoff = job->transfer->handoff;
    if (workers_submit(handoff->options.workers, job_run, job_done, NULL, job, NULL)) {
        /* Every worker is busy and their queue is full: a moment later there is room again. */
        if (!job->retry) {
            job->retry = loop_timer_create(handoff->options.loop, job_again, job);
        }
        loop_timer_arm(job->retry, CHECKSUM_RETRY_MS * NS_PER_MS);
    }
}

/* The slots of a parcel, each granted to the transfer and now landed. False: one was not. */
static bool parcel_land(struct transfer *transfer, const Baton__FromPrefill__Parcel *parcel,
                        struct accept_job *job)
{
    uint32_t at = 0;
    for (size_t r = 0; r + 1 < parcel->n_slot_runs; r += 2) {
        for (uint32_t k = 0; k < parcel->slot_runs[r + 1]; k++) {
            uint32_t slot = parcel->slot_runs[r] + k;
            if (at == job->n_pieces ||
                !landing_land(transfer->handoff->options.landing, slot, transfer->id)) {
                goto give_back;
            }
            job->slots[at++] = slot;
        }
    }
    if (at == job->n_pieces) {
        return true;
    }
give_back:
    while (at > 0) {
        landing_release(transfer->handoff->options.landing, job->slots[--at]);
    }
    return false;
}

static void pages_took(struct transfer *transfer, const Baton__FromPrefill__Parcel *parcel)
{
    size_t at = parcel->offset + parcel->bytes / parcel->n_pages;
    for (uint32_t i = 0; i < parcel->n_pages; i++) {
        transfer->page_at[parcel->first_page + i] = at;
    }
    if (at == landing_slot_bytes(transfer->handoff->options.landing)) {
        transfer->n_pages_whole += parcel->n_pages;
    } else {
        transfer->n_slots_wanted += parcel->n_pages; /* what is left of them needs as many again */
        grant_soon(transfer->handoff);
    }
}

static void parcel_arrived(struct transfer *transfer, const Baton__FromPrefill__Parcel *parcel)
{
    struct handoff *handoff = transfer->handoff;
    const struct engine_info *info = engine_info(handoff->options.engine);
    size_t slot_bytes = landing_slot_bytes(handoff->options.landing);
    uint32_t n_slots = transfer->seq && transfer->tail && parcel->seq == transfer->next_seq
                           ? handoff_parcel_n_slots(transfer, parcel)
                           : 0;
    bool is_tail = parcel->kind == BATON__FROM_PREFILL__PARCEL__KIND__TAIL;
    if (n_slots == 0) {
        handoff->stats.n_protocol++;
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_TILING, peer_name(transfer->peer),
                      true, "parcel %" PRIu32 " from %s does not fit the prompt", parcel->seq,
                      peer_name(transfer->peer));
        return;
    }
    if (!is_tail) {
        uint64_t end = ((uint64_t)parcel->first_page + n_slots) * info->page_tokens;
        uint32_t n_tokens = end < transfer->request.n_ids ? (uint32_t)end : transfer->request.n_ids;
        if (FAULT_HIT(ACCEPT_ROOM) == FAULT_FAIL || engine_seq_reserve(transfer->seq, n_tokens)) {
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_NO_ROOM, "", true,
                          "the page pool ran short during a transfer");
            return;
        }
    }
    struct accept_job *job = job_new(transfer);
    job->transfer_id = transfer->id;
    job->seq = parcel->seq;
    job->checksum = parcel->checksum;
    job->is_tail = is_tail;
    job->n_pieces = n_slots;
    job->pieces = mem_array(n_slots, sizeof(*job->pieces));
    job->slots = mem_array(n_slots, sizeof(*job->slots));
    if (!parcel_land(transfer, parcel, job)) {
        job_free(job);
        handoff->stats.n_protocol++;
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_TILING, peer_name(transfer->peer),
                      true, "parcel %" PRIu32 " from %s lies in slots that it was not granted",
                      parcel->seq, peer_name(transfer->peer));
        return;
    }
    for (uint32_t i = 0; i < n_slots; i++) {
        struct parcel_piece *piece = &job->pieces[i];
        piece->src = landing_slot(handoff->options.landing, job->slots[i]);
        piece->bytes = slot_bytes;
        if (is_tail) {
            size_t at = (size_t)i * slot_bytes;
            piece->dst = transfer->tail + transfer->tail_at + at;
            piece->bytes = parcel->bytes - at < slot_bytes ? parcel->bytes - at : slot_bytes;
        } else {
            uint32_t page = engine_seq_page(transfer->seq, parcel->first_page + i);
            piece->dst = engine_page_address(handoff->options.engine, page) + parcel->offset;
            piece->bytes = parcel->bytes / n_slots;
        }
    }
    transfer->next_seq++;
    transfer->bytes += parcel->bytes;
    if (is_tail) {
        transfer->tail_at += parcel->bytes;
    } else {
        pages_took(transfer, parcel);
    }
    handoff->stats.n_parcels++;
    handoff->stats.n_bytes += parcel->bytes;
    transfer->n_jobs++;
    job_submit(job);
}

/* ---- the end of a transfer that went well ---- */

/* Worker thread: the sequence is in no compute call. */
static void tail_run(void *cookie, struct workers_job *worker_job)
{
    struct accept_job *job = cookie;
    struct transfer *transfer = job->transfer;
    job->status = engine_tail_read(transfer->handoff->options.engine, transfer->seq,
                                   transfer->request.n_ids, transfer->tail, transfer->tail_bytes);
}

static void tail_done(void *cookie)
{
    struct accept_job *job = cookie;
    struct transfer *transfer = job->transfer;
    struct handoff *handoff = transfer->handoff;
    enum status status = job->status;
    transfer->n_jobs--;
    job_free(job);
    if (transfer->cancelling) {
        if (transfer->n_jobs == 0) {
            transfer_destroy(transfer);
        }
        return;
    }
    if (status) {
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_CHECKSUM, peer_name(transfer->peer),
                      true, "the tail from %s is not one of this prompt",
                      peer_name(transfer->peer));
        return;
    }
    struct handoff_end end = {
        .ok = true,
        .first = transfer->first,
        .n_samples = transfer->request.n_samples,
        .cached_tokens = transfer->cached_tokens,
        .queue_ns = transfer->computing_ns - transfer->start_ns,
        .prefill_ns = transfer->computed_ns - transfer->computing_ns,
        .transfer_ns = loop_now_ns() - transfer->computed_ns,
        .bytes = transfer->bytes,
    };
    void *owner = transfer->owner;
    struct handoff_first *first = transfer->first;
    transfer->first = NULL;
    transfer->seq = NULL; /* the owner's again */
    handoff->stats.n_done++;
    hmap_remove_u64(handoff->by_id, transfer->id);
    landing_revoke(handoff->options.landing, transfer->id);
    landing_drained(handoff->options.landing, transfer->id); /* Done: nothing more is written */
    transfer_destroy(transfer);
    handoff->events->ended(handoff->cookie, owner, &end);
    mem_free(first);
}

/* Has everything come? */
static void transfer_settle(struct transfer *transfer)
{
    struct handoff *handoff = transfer->handoff;
    if (transfer->n_jobs > 0 || !transfer->have_done || transfer->phase == PHASE_READING) {
        return;
    }
    if (!transfer->have_first || transfer->n_pages_whole != transfer->n_pages ||
        transfer->tail_at != transfer->tail_bytes ||
        transfer->n_parcels_said != transfer->next_seq) {
        handoff->stats.n_protocol++;
        transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_TILING, peer_name(transfer->peer),
                      true,
                      "%s says done after %" PRIu32 " of %" PRIu32 " pages and %zu of %zu bytes "
                      "of tail",
                      peer_name(transfer->peer), transfer->n_pages_whole, transfer->n_pages,
                      transfer->tail_at, transfer->tail_bytes);
        return;
    }
    struct accept_job *job = job_new(transfer);
    if (workers_submit(handoff->options.workers, tail_run, tail_done, NULL, job, NULL)) {
        job_free(job);
        return; /* the tick comes here again */
    }
    transfer->phase = PHASE_READING;
    transfer->n_jobs++;
}

/* ---- messages ---- */

static void progress_arrived(struct transfer *transfer,
                             const Baton__FromPrefill__Progress *progress)
{
    struct handoff *handoff = transfer->handoff;
    if (transfer->phase == PHASE_QUEUED) {
        transfer->phase = PHASE_COMPUTING;
        transfer->phase_ns = transfer->computing_ns = loop_now_ns();
        handoff->events->started(handoff->cookie, transfer->owner);
    } else if (transfer->phase == PHASE_COMPUTING &&
               progress->tokens_done >= transfer->request.n_ids) {
        transfer->phase = PHASE_COMPUTED;
        transfer->phase_ns = transfer->computed_ns = loop_now_ns();
    }
}

static void done_arrived(struct transfer *transfer, const Baton__FromPrefill__Done *done)
{
    if (transfer->have_done) {
        return;
    }
    transfer->have_done = true;
    transfer->n_parcels_said = done->n_parcels;
    transfer->cached_tokens =
        done->cached_tokens < transfer->request.n_ids ? done->cached_tokens : 0;
    if (transfer->phase != PHASE_COMPUTED) {
        transfer->computed_ns = loop_now_ns();
        if (!transfer->computing_ns) {
            transfer->computing_ns = transfer->computed_ns;
        }
    }
    transfer_settle(transfer);
}

/* The prefill node's own words; a code that no build of ours has says that something is wrong over
 * there. */
static void failed_arrived(struct transfer *transfer, const Baton__FromPrefill__Failed *failed)
{
    const char *name = peer_name(transfer->peer);
    Baton__FailCode code = failed->code;
    if (code <= BATON__FAIL_CODE__FAIL_UNKNOWN || code > BATON__FAIL_CODE__FAIL_INTERNAL) {
        transfer->handoff->stats.n_protocol++;
        code = BATON__FAIL_CODE__FAIL_INTERNAL;
    }
    transfer_fail(transfer, false, code, failed->node[0] ? failed->node : name, failed->retryable,
                  "%.300s", failed->text[0] ? failed->text : "no reason was given");
}

static uint64_t message_transfer(const Baton__FromPrefill *message)
{
    switch (message->what_case) {
    case BATON__FROM_PREFILL__WHAT_QUEUED:
        return message->queued->transfer;
    case BATON__FROM_PREFILL__WHAT_PROGRESS:
        return message->progress->transfer;
    case BATON__FROM_PREFILL__WHAT_PARCEL:
        return message->parcel->transfer;
    case BATON__FROM_PREFILL__WHAT_FIRST:
        return message->first->transfer;
    case BATON__FROM_PREFILL__WHAT_DONE:
        return message->done->transfer;
    case BATON__FROM_PREFILL__WHAT_FAILED:
        return message->failed->transfer;
    default:
        return 0;
    }
}

void handoff_message(struct handoff *handoff, struct peer *peer, const Baton__FromPrefill *message)
{
    if (message->what_case == BATON__FROM_PREFILL__WHAT_DRAINED) {
        landing_drained(handoff->options.landing, message->drained->transfer);
        return;
    }
    struct transfer *transfer = hmap_get_u64(handoff->by_id, message_transfer(message));
    if (!transfer || transfer->peer != peer) {
        handoff->stats.n_stray++;
        if (!transfer && message->what_case == BATON__FROM_PREFILL__WHAT_DONE) {
            /* It crossed our Cancel, which found no run any more, so no Drained will come. */
            landing_drained(handoff->options.landing, message->done->transfer);
        }
        return;
    }
    switch (message->what_case) {
    case BATON__FROM_PREFILL__WHAT_PROGRESS:
        progress_arrived(transfer, message->progress);
        break;
    case BATON__FROM_PREFILL__WHAT_PARCEL:
        parcel_arrived(transfer, message->parcel);
        break;
    case BATON__FROM_PREFILL__WHAT_FIRST:
        if (!handoff_first_read(transfer, message->first)) {
            handoff->stats.n_protocol++;
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_TILING, peer_name(peer), true,
                          "the first tokens from %s are not what was asked for", peer_name(peer));
        }
        break;
    case BATON__FROM_PREFILL__WHAT_DONE:
        done_arrived(transfer, message->done);
        break;
    case BATON__FROM_PREFILL__WHAT_FAILED:
        failed_arrived(transfer, message->failed);
        break;
    default:
        break;
    }
}

void handoff_peer_lost(struct handoff *handoff, struct peer *peer, const char *text)
{
    bool again = true;
    while (again) { /* `ended` may start or end others */
        again = false;
        list_for_each(at, &handoff->open)
        {
            struct transfer *transfer = list_entry(at, struct transfer, link);
            if (transfer->peer == peer) {
                transfer_fail(transfer, false, BATON__FAIL_CODE__FAIL_PEER_LOST, peer_name(peer),
                              true, "prefill node %s was lost: %.200s", peer_name(peer), text);
                again = true;
                break;
            }
        }
    }
    /* The peer may be freed after this: nothing may point to it. */
    list_for_each(at, &handoff->cancelling)
    {
        struct transfer *transfer = list_entry(at, struct transfer, link);
        if (transfer->peer == peer) {
            transfer->peer = NULL;
        }
    }
}

static bool overdue(const struct transfer *transfer, uint64_t now_ns, uint32_t limit_ms)
{
    return limit_ms && now_ns - transfer->phase_ns > limit_ms * NS_PER_MS;
}

void handoff_tick(struct handoff *handoff)
{
    uint64_t now_ns = loop_now_ns();
    list_for_each(at, &handoff->open)
    {
        struct transfer *transfer = list_entry(at, struct transfer, link);
        const struct handoff_request *request = &transfer->request;
        const char *name = peer_name(transfer->peer);
        if (transfer->phase == PHASE_QUEUED && overdue(transfer, now_ns, request->queue_ms)) {
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, name, false,
                          "waited %" PRIu32 " ms in the queue of %s", request->queue_ms, name);
        } else if (transfer->phase == PHASE_COMPUTING &&
                   overdue(transfer, now_ns, request->prefill_ms)) {
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL, name, false,
                          "prefill at %s took more than %" PRIu32 " ms", name, request->prefill_ms);
        } else if (transfer->phase >= PHASE_COMPUTED &&
                   overdue(transfer, now_ns, request->transfer_ms)) {
            transfer_fail(transfer, true, BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER, name, true,
                          "the transfer from %s took more than %" PRIu32 " ms", name,
                          request->transfer_ms);
        } else {
            bool waits = transfer->have_done && transfer->n_jobs == 0;
            if (waits) {
                transfer_settle(transfer);
                return; /* it may have ended: the list is another */
            }
            continue;
        }
        return; /* one a tick: the list changed under us */
    }
}

void handoff_stats(const struct handoff *handoff, struct handoff_stats *ret_stats)
{
    *ret_stats = handoff->stats;
    ret_stats->n_open = (uint32_t)hmap_n(handoff->by_id);
    list_for_each(at, &handoff->cancelling)
    {
        ret_stats->n_cancelling++;
    }
}

uint64_t handoff_transfer_id(const struct transfer *transfer)
{
    return transfer->id;
}
