#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "decode/handoff.h"
#include "engine/accept.h"
#include "engine/sim.h"
#include "rpc/proto.h"
#include "transport/region.h"

/*
 * One transfer at a decode node, and a prefill node whose words are the input. Each step is a byte
 * that says which message, a byte that says which of its fields are wrong, and those fields'
 * values; or a message as raw bytes. The landing area holds what an honest node would have put
 * there.
 *
 * Whatever is said: the transfer ends well only if the pool holds the prompt's pages, bit for bit;
 * after it has ended or was cancelled every slot, page and sequence is free.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

enum {
    PAGE_BYTES = 4096,
    TAIL_BYTES = 8192,
    N_IDS = 600,
    N_PAGES = 3,
    N_SLOTS = 8,
    N_GRANTS = 64, /* pieces of pages make a transfer want more slots: three a step at most */
    STEPS_MAX = 16
};

struct peer {
    uint32_t slots[N_GRANTS], n_slots;
    uint64_t transfer;
};

static struct loop *loop;
static struct loop_timer *timer;
static struct transport *transport;
static struct engine *engine;
static struct workers *workers;
static struct landing *landing;
static struct handoff *handoff;
static struct transfer *transfer;
static struct engine_seq *sequence;
static struct peer peer;
static uint32_t ids[N_IDS];
static uint8_t images[N_PAGES * PAGE_BYTES + TAIL_BYTES];
static bool is_ended, is_ok;

struct bytes {
    const uint8_t *at;
    size_t n;
};

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

/* ---- what decode/handoff.c asks of decode/peers.c ---- */

enum status peer_send(struct peer *to, const Baton__ToPrefill *message)
{
    if (message->what_case == BATON__TO_PREFILL__WHAT_SLOTS) {
        const Baton__ToPrefill__Slots *slots = message->slots;
        for (size_t r = 0; r < slots->n_slot_runs; r += 2) {
            for (uint32_t k = 0; k < slots->slot_runs[r + 1]; k++) {
                require(to->n_slots < N_GRANTS);
                to->slots[to->n_slots++] = slots->slot_runs[r] + k;
            }
        }
    } else if (message->what_case == BATON__TO_PREFILL__WHAT_RUN) {
        to->transfer = message->run->transfer;
    }
    return STATUS_OK;
}

const char *peer_name(const struct peer *of)
{
    return "p";
}

void peer_note_undrained(struct peer *of, uint64_t which)
{
}

void peer_drop(struct peer *of)
{
}

/* ---- the owner of the transfer ---- */

static void on_started(void *cookie, void *owner)
{
    require(engine_seq_create(engine, 1, &sequence) == STATUS_OK);
    require(engine_seq_history_set(sequence, ids, N_IDS, 0) == STATUS_OK);
    handoff_open(transfer, sequence);
}

static void on_ended(void *cookie, void *owner, const struct handoff_end *end)
{
    require(!is_ended);
    is_ended = true;
    is_ok = end->ok;
    transfer = NULL;
    if (!end->ok) {
        sequence = NULL; /* freed by the hand-off */
        require(end->text[0] != '\0');
    }
}

static const struct handoff_events events = {.started = on_started, .ended = on_ended};

static void on_freed(void *cookie)
{
}

static void on_timer(void *cookie)
{
    loop_stop(loop);
}

static void turn(uint64_t ns)
{
    loop_timer_arm(timer, ns);
    require(loop_run(loop) == STATUS_OK);
}

static void tear_down(void)
{
    workers_free(workers);
    handoff_free(handoff);
    landing_free(landing);
    transport_close(transport);
    engine_close(engine);
    loop_timer_free(timer);
    loop_free(loop);
}

static void set_up(void)
{
    struct transport_options with = {.tls = "self"};
    struct engine_options sim = {.kind = "sim",
                                 .max_sequences = 4,
                                 .n_pages = 16,
                                 .max_context_tokens = 2048,
                                 .max_chunk_tokens = 256,
                                 .max_batch_rows = 4,
                                 .sim_prefill_tokens_per_s = 1e6,
                                 .sim_step_ms = 1,
                                 .sim_page_bytes = PAGE_BYTES,
                                 .sim_tail_bytes = TAIL_BYTES,
                                 .sim_vocab_size = 1000};
    static _Atomic uint64_t progress;
    struct error err = {""};
    uint64_t prefix = SIM_PREFIX_START;
    log_set_level(LOG_LEVEL_ERROR);
    require(loop_create(&loop) == STATUS_OK);
    timer = loop_timer_create(loop, on_timer, NULL);
    require(transport_open(loop, &with, &transport, &err) == STATUS_OK);
    require(engine_open(&sim, &progress, &engine, &err) == STATUS_OK);
    require(workers_create(loop, 1, 16, &workers) == STATUS_OK);
    struct region *region;
    require(region_create_landing(transport, (size_t)N_SLOTS * PAGE_BYTES, &region, &err) ==
            STATUS_OK);
    require(landing_create(loop, region, PAGE_BYTES, NULL, on_freed, NULL, &landing, &err) ==
            STATUS_OK);
    struct handoff_options options = {.loop = loop,
                                      .engine = engine,
                                      .landing = landing,
                                      .workers = workers,
                                      .max_transfers = 4,
                                      .max_slots_a_transfer = N_SLOTS};
    require(handoff_create(&options, &events, NULL, &handoff) == STATUS_OK);
    atexit(tear_down);
    for (uint32_t i = 0; i < N_IDS; i++) {
        ids[i] = (i * 31 + 7) % 1000;
        prefix = sim_prefix_next(prefix, ids[i]);
        if (i % 256 == 255 || i == N_IDS - 1) {
            sim_image_fill(images + (size_t)(i / 256) * PAGE_BYTES, PAGE_BYTES, prefix);
        }
    }
    sim_image_fill(images + (size_t)N_PAGES * PAGE_BYTES, TAIL_BYTES, prefix);
}

/* ---- the input ---- */

static uint8_t take(struct bytes *in)
{
    in->n -= in->n > 0;
    return in->n > 0 ? *in->at++ : 0;
}

/* The value as it should be, unless its bit says that the input has another. */
static uint64_t field(struct bytes *in, uint8_t wrong, unsigned bit, uint64_t right)
{
    if (!(wrong & (1u << bit))) {
        return right;
    }
    uint64_t value = take(in);
    if (value == 255) { /* a large one */
        for (int i = 0; i < 8; i++) {
            value = value << 8 | take(in);
        }
    }
    return value;
}

static void say(Baton__FromPrefill *message)
{
    handoff_message(handoff, &peer, message);
}

static void say_parcel(struct bytes *in, bool tail)
{
    uint8_t wrong = take(in);
    uint32_t first = (uint32_t)field(in, wrong, 0, tail ? N_PAGES : 0);
    uint32_t n = (uint32_t)field(in, wrong, 1, tail ? TAIL_BYTES / PAGE_BYTES : N_PAGES) % 16;
    uint32_t half = (uint32_t)field(in, wrong, 7, 0) % 3; /* of each page; 0: the whole */
    uint32_t slot = (uint32_t)field(in, wrong, 7, first);
    size_t from_byte = !tail && half == 2 ? PAGE_BYTES / 2 : 0;
    size_t piece_bytes = !tail && half ? PAGE_BYTES / 2 : PAGE_BYTES;
    uint32_t runs[34];
    struct parcel_piece pieces[16];
    Baton__FromPrefill__Parcel parcel = BATON__FROM_PREFILL__PARCEL__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t from = (first + i) % (N_PAGES + TAIL_BYTES / PAGE_BYTES);
        runs[2 * i] = peer.slots[(slot + i) % N_GRANTS];
        runs[2 * i + 1] = 1;
        pieces[i].src = images + (size_t)from * PAGE_BYTES + from_byte;
        pieces[i].bytes = piece_bytes;
        if (runs[2 * i] < N_SLOTS) { /* as if it had been put */
            memcpy(landing_slot(landing, runs[2 * i]), pieces[i].src, piece_bytes);
        }
    }
    parcel.transfer = peer.transfer;
    parcel.seq = (uint32_t)field(in, wrong, 2, tail);
    parcel.kind =
        (Baton__FromPrefill__Parcel__Kind)(tail ? BATON__FROM_PREFILL__PARCEL__KIND__TAIL
                                                : BATON__FROM_PREFILL__PARCEL__KIND__PAGES);
    parcel.first_page = tail ? 0 : first;
    parcel.n_pages = tail ? 0 : n;
    parcel.bytes = field(in, wrong, 3, n * (uint64_t)piece_bytes);
    parcel.total_bytes = tail ? TAIL_BYTES : 0;
    parcel.offset = tail ? (uint64_t)(first % 8 - N_PAGES % 8) * PAGE_BYTES : from_byte;
    parcel.checksum = accept_parcel_checksum(parcel.transfer, parcel.seq, pieces, n);
    parcel.checksum ^= field(in, wrong, 4, 0);
    parcel.slot_runs = runs;
    parcel.n_slot_runs = field(in, wrong, 5, 2 * (uint64_t)n) % 34;
    for (size_t i = 2 * (size_t)n; i < parcel.n_slot_runs; i++) {
        runs[i] = take(in);
    }
    if ((wrong & (1u << 6)) && n > 0) {
        runs[0] = (uint32_t)field(in, wrong, 6, 0);
        runs[1] = (uint32_t)field(in, wrong, 6, 1);
    }
    message.what_case = BATON__FROM_PREFILL__WHAT_PARCEL;
    message.parcel = &parcel;
    say(&message);
}

static void say_first(struct bytes *in)
{
    uint8_t wrong = take(in);
    uint32_t token[2] = {(uint32_t)field(in, wrong, 0, 5), 6};
    Baton__FromPrefill__First first = BATON__FROM_PREFILL__FIRST__INIT;
    Baton__FromPrefill__FirstSample samples[2], *list[2] = {&samples[0], &samples[1]};
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    for (uint32_t i = 0; i < 2; i++) {
        baton__from_prefill__first_sample__init(&samples[i]);
        samples[i].sample = (uint32_t)field(in, wrong, 1, i);
        samples[i].ids = token;
        samples[i].n_ids = field(in, wrong, 2, 1) % 3;
    }
    first.transfer = peer.transfer;
    first.samples = list;
    first.n_samples = field(in, wrong, 3, 1) % 3;
    message.what_case = BATON__FROM_PREFILL__WHAT_FIRST;
    message.first = &first;
    say(&message);
}

static void say_other(struct bytes *in, unsigned what)
{
    uint8_t wrong = take(in);
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    Baton__FromPrefill__Done done = BATON__FROM_PREFILL__DONE__INIT;
    Baton__FromPrefill__Progress progress = BATON__FROM_PREFILL__PROGRESS__INIT;
    Baton__FromPrefill__Failed failed = BATON__FROM_PREFILL__FAILED__INIT;
    Baton__FromPrefill__Drained drained = BATON__FROM_PREFILL__DRAINED__INIT;
    uint64_t id = field(in, wrong, 0, peer.transfer);
    if (what == 3) {
        done.transfer = id;
        done.n_parcels = (uint32_t)field(in, wrong, 1, 2);
        done.cached_tokens = (uint32_t)field(in, wrong, 2, 0);
        message.what_case = BATON__FROM_PREFILL__WHAT_DONE;
        message.done = &done;
    } else if (what == 4) {
        progress.transfer = id;
        progress.tokens_done = (uint32_t)field(in, wrong, 1, N_IDS);
        message.what_case = BATON__FROM_PREFILL__WHAT_PROGRESS;
        message.progress = &progress;
    } else if (what == 5) {
        failed.transfer = id;
        failed.code = (Baton__FailCode)field(in, wrong, 1, BATON__FAIL_CODE__FAIL_NO_ROOM);
        message.what_case = BATON__FROM_PREFILL__WHAT_FAILED;
        message.failed = &failed;
    } else {
        drained.transfer = id;
        message.what_case = BATON__FROM_PREFILL__WHAT_DRAINED;
        message.drained = &drained;
    }
    say(&message);
}

static void say_raw(struct bytes *in)
{
    size_t n = take(in);
    n = n < in->n ? n : in->n;
    struct arena *arena = arena_create(0);
    ProtobufCMessage *message;
    if (proto_unpack(&baton__from_prefill__descriptor, in->at, n, arena, &message, NULL) ==
        STATUS_OK) {
        handoff_message(handoff, &peer, (const Baton__FromPrefill *)message);
    }
    arena_free(arena);
    in->at += n;
    in->n -= n;
}

static void step(struct bytes *in)
{
    unsigned what = take(in) % 8;
    if (what < 2) {
        say_parcel(in, what == 1);
    } else if (what == 2) {
        say_first(in);
    } else if (what == 7) {
        say_raw(in);
    } else {
        say_other(in, what);
    }
    turn(0);
}

static void check_pool(void)
{
    const struct engine_info *info = engine_info(engine);
    for (uint32_t i = 0; i < N_PAGES; i++) {
        const uint8_t *page =
            info->pool_base + (size_t)engine_seq_page(sequence, i) * info->page_bytes;
        require(memcmp(page, images + (size_t)i * PAGE_BYTES, PAGE_BYTES) == 0);
    }
    engine_seq_free(sequence);
    sequence = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static Baton__Sampling sampling = BATON__SAMPLING__INIT;
    struct handoff_request request = {.request = 1,
                                      .attempt = 1,
                                      .ids = ids,
                                      .n_ids = N_IDS,
                                      .sampling = &sampling,
                                      .n_samples = 1};
    struct bytes in = {data, bytes};
    struct handoff_stats stats;
    if (!loop) {
        set_up();
    }
    memset(&peer, 0, sizeof(peer));
    is_ended = is_ok = false;
    require(handoff_start(handoff, &peer, &request, &peer, &transfer) == STATUS_OK);
    Baton__FromPrefill__Progress progress = BATON__FROM_PREFILL__PROGRESS__INIT;
    Baton__FromPrefill begun = BATON__FROM_PREFILL__INIT;
    progress.transfer = peer.transfer;
    begun.what_case = BATON__FROM_PREFILL__WHAT_PROGRESS;
    begun.progress = &progress;
    say(&begun);
    turn(0);
    for (int i = 0; i < STEPS_MAX && in.n > 0 && !is_ended; i++) {
        step(&in);
    }
    for (int i = 0; i < 5 && !is_ended; i++) { /* copies and their second look come back */
        turn(NS_PER_MS);
        handoff_tick(handoff);
    }
    if (!is_ended) {
        handoff_cancel(transfer);
        sequence = NULL;
    } else if (is_ok) {
        check_pool();
    }
    landing_drained(landing, peer.transfer);
    for (int i = 0; i < 1000; i++) {
        handoff_stats(handoff, &stats);
        if (stats.n_cancelling == 0) {
            break;
        }
        turn(NS_PER_MS / 10);
    }
    require(stats.n_open == 0 && stats.n_cancelling == 0);
    landing_drained(landing, peer.transfer);
    require(landing_n_free(landing) == N_SLOTS);
    require(engine_pages_free(engine) == 16 && engine_slots_free(engine) == 4);
    return 0;
}
