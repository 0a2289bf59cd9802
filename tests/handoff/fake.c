/* See fake.h. */
#include "fake.h"

#include "engine/accept.h"
#include "engine/sim.h"
#include "rpc/hello.h"
#include "rpc/proto.h"
#include "transport/put.h"

enum { MAX_SLOTS = 64, MAX_IDS = 4096 };

enum fake_mode fake_mode;
uint32_t fake_n_runs, fake_n_links, fake_n_cancels;

uint64_t fake_n_written;
const char *fake_tls;

static struct transport *transport;
static struct region *source;
static uint8_t *memory; /* of the source: pages, then the tail */
static const size_t memory_bytes = (MAX_SLOTS + 8) * (size_t)PAGE_BYTES;
static struct buf packed;

/* One decode node's link; one run at a time. */
struct fake {
    struct link *link;
    struct put_peer *peer;
    uint32_t preflight_runs[2 * PUT_PREFLIGHT_MAX_SLOTS], n_preflight_runs;
    uint64_t pattern;
    uint64_t transfer;
    uint32_t ids[MAX_IDS], n_ids, n_samples;
    uint32_t slots[MAX_SLOTS], n_slots;
    uint32_t n_pages;
    bool put_done, cancelled;
};

/* What the late writer writes to. */
static struct {
    struct put_peer *peer;
    struct fake *fake;
    bool on, out;
    bool granted[MAX_SLOTS];
    uint64_t draw;
} writer;

struct transport *fake_transport(void)
{
    return transport;
}

static void say(struct fake *fake, const Baton__FromPrefill *message)
{
    proto_pack(&message->base, &packed);
    if (fake->link && link_send(fake->link, packed.data, packed.bytes)) {
        print_message("the fake's link is full or gone\n");
    }
}

static void say_progress(struct fake *fake, uint32_t n_done)
{
    Baton__FromPrefill__Progress progress = BATON__FROM_PREFILL__PROGRESS__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    progress.transfer = fake->transfer;
    progress.tokens_done = n_done;
    message.what_case = BATON__FROM_PREFILL__WHAT_PROGRESS;
    message.progress = &progress;
    say(fake, &message);
}

static void say_first(struct fake *fake)
{
    Baton__FromPrefill__First first = BATON__FROM_PREFILL__FIRST__INIT;
    Baton__FromPrefill__FirstSample samples[2], *list[2] = {&samples[0], &samples[1]};
    Baton__TokenLogprobs empty = BATON__TOKEN_LOGPROBS__INIT, *logprobs[1] = {&empty};
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < fake->n_ids; i++) {
        prefix = sim_prefix_next(prefix, fake->ids[i]);
    }
    uint32_t id = sim_token(prefix, VOCAB);
    if (fake_mode == MODE_FIRST_VOCABULARY) {
        id = VOCAB;
    }
    for (uint32_t i = 0; i < 2; i++) {
        baton__from_prefill__first_sample__init(&samples[i]);
        samples[i].sample = i;
        samples[i].ids = &id;
        samples[i].n_ids = 1;
        samples[i].logprobs = logprobs;
        samples[i].n_logprobs = fake_mode == MODE_FIRST_LOGPROBS;
    }
    first.transfer = fake->transfer;
    first.samples = list;
    first.n_samples = fake_mode == MODE_FIRST_SAMPLES ? 2 : 1;
    message.what_case = BATON__FROM_PREFILL__WHAT_FIRST;
    message.first = &first;
    say(fake, &message);
}

static void say_done(struct fake *fake, uint32_t n_parcels)
{
    Baton__FromPrefill__Done done = BATON__FROM_PREFILL__DONE__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    done.transfer = fake->transfer;
    done.n_parcels = n_parcels;
    message.what_case = BATON__FROM_PREFILL__WHAT_DONE;
    message.done = &done;
    say(fake, &message);
}

static void say_failed(struct fake *fake, int code)
{
    Baton__FromPrefill__Failed failed = BATON__FROM_PREFILL__FAILED__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    failed.transfer = fake->transfer;
    failed.code = (Baton__FailCode)code;
    failed.node = (char *)"f0";
    failed.text = (char *)"as its mode says";
    failed.retryable = true;
    message.what_case = BATON__FROM_PREFILL__WHAT_FAILED;
    message.failed = &failed;
    say(fake, &message);
}

static void say_drained(struct fake *fake)
{
    Baton__FromPrefill__Drained drained = BATON__FROM_PREFILL__DRAINED__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    drained.transfer = fake->transfer;
    message.what_case = BATON__FROM_PREFILL__WHAT_DRAINED;
    message.drained = &drained;
    say(fake, &message);
}

/* The parcel of pages [first, first + n) or of the tail, as it should be. */
static void parcel_right(struct fake *fake, Baton__FromPrefill__Parcel *parcel, uint32_t seq,
                         int64_t first, uint32_t n, uint32_t *runs)
{
    struct parcel_piece pieces[MAX_SLOTS];
    uint32_t n_slots = first < 0 ? (TAIL_BYTES + PAGE_BYTES - 1) / PAGE_BYTES : n;
    uint32_t from = first < 0 ? fake->n_pages : (uint32_t)first;
    size_t left = first < 0 ? TAIL_BYTES : n * (size_t)PAGE_BYTES;
    baton__from_prefill__parcel__init(parcel);
    parcel->transfer = fake->transfer;
    parcel->seq = seq;
    parcel->kind = first < 0 ? BATON__FROM_PREFILL__PARCEL__KIND__TAIL
                             : BATON__FROM_PREFILL__PARCEL__KIND__PAGES;
    parcel->first_page = first < 0 ? 0 : (uint32_t)first;
    parcel->n_pages = first < 0 ? 0 : n;
    parcel->bytes = left;
    parcel->total_bytes = first < 0 ? TAIL_BYTES : 0;
    for (uint32_t i = 0; i < n_slots; i++) {
        runs[2 * i] = fake->slots[from + i];
        runs[2 * i + 1] = 1;
        pieces[i].src = memory + (size_t)(from + i) * PAGE_BYTES;
        pieces[i].bytes = left < PAGE_BYTES ? left : PAGE_BYTES;
        left -= pieces[i].bytes;
    }
    parcel->slot_runs = runs;
    parcel->n_slot_runs = 2 * n_slots;
    parcel->checksum = accept_parcel_checksum(fake->transfer, seq, pieces, n_slots);
}

/* Of each page only the first half. */
static void parcel_halve(struct fake *fake, Baton__FromPrefill__Parcel *parcel)
{
    struct parcel_piece pieces[MAX_SLOTS];
    for (uint32_t i = 0; i < parcel->n_pages; i++) {
        pieces[i].src = memory + (size_t)(parcel->first_page + i) * PAGE_BYTES;
        pieces[i].bytes = PAGE_BYTES / 2;
    }
    parcel->bytes = parcel->n_pages * (uint64_t)PAGE_BYTES / 2;
    parcel->checksum = accept_parcel_checksum(fake->transfer, parcel->seq, pieces, parcel->n_pages);
}

static void say_parcel(struct fake *fake, Baton__FromPrefill__Parcel *parcel)
{
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    message.what_case = BATON__FROM_PREFILL__WHAT_PARCEL;
    message.parcel = parcel;
    say(fake, &message);
}

static void images_fill(struct fake *fake, bool other)
{
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < fake->n_ids; i++) {
        prefix = sim_prefix_next(prefix, other && i == 0 ? fake->ids[0] ^ 1 : fake->ids[i]);
        if (i % PAGE_TOKENS == PAGE_TOKENS - 1 || i == fake->n_ids - 1) {
            sim_image_fill(memory + (size_t)(i / PAGE_TOKENS) * PAGE_BYTES, PAGE_BYTES, prefix);
        }
    }
    sim_image_fill(memory + (size_t)fake->n_pages * PAGE_BYTES, TAIL_BYTES, prefix);
}

/* What the first parcel says wrongly. */
static void parcel_spoil(struct fake *fake, Baton__FromPrefill__Parcel *pages, uint32_t *runs)
{
    switch (fake_mode) {
    case MODE_WRONG_CHECKSUM:
        pages->checksum ^= 1;
        break;
    case MODE_SLOT_OF_OTHERS:
        runs[2] = 31; /* the last of the landing area: nobody has it */
        break;
    case MODE_SLOT_TWICE:
        runs[2] = runs[0];
        break;
    case MODE_SLOT_RUN_HUGE:
        runs[0] = UINT32_MAX;
        runs[1] = UINT32_MAX;
        pages->n_slot_runs = 2;
        break;
    case MODE_SLOT_RUN_ODD:
        pages->n_slot_runs--;
        break;
    case MODE_FEW_SLOTS:
        pages->n_slot_runs -= 2;
        break;
    case MODE_TOO_MANY_PAGES:
        pages->n_pages = UINT32_MAX;
        break;
    case MODE_NO_PAGES:
        pages->n_pages = 0;
        pages->bytes = 0;
        pages->n_slot_runs = 0;
        break;
    case MODE_SEQ_GAP:
        pages->seq = 1;
        break;
    case MODE_KIND_UNKNOWN:
        pages->kind = (Baton__FromPrefill__Parcel__Kind)7;
        break;
    case MODE_PIECE_LATER:
        pages->offset = PAGE_BYTES / 2;
        pages->bytes /= 2;
        break;
    case MODE_PIECE_DUST:
        pages->bytes = 8 * (uint64_t)pages->n_pages;
        break;
    case MODE_PIECE_LONG:
        pages->bytes += 8 * (uint64_t)pages->n_pages;
        break;
    case MODE_PIECE_ODD:
        pages->bytes -= 8;
        break;
    case MODE_PIECE_AGAIN:
    case MODE_HALF_PAGES:
        parcel_halve(fake, pages);
        break;
    default:
        break;
    }
}

/* Everything lies in the slots: tell it, as the mode has it. */
static void tell(struct fake *fake)
{
    uint32_t runs[2 * MAX_SLOTS], tail_runs[2 * MAX_SLOTS];
    Baton__FromPrefill__Parcel pages, tail, more;
    bool half = fake_mode == MODE_DONE_AFTER_HALF || fake_mode == MODE_FAILED_HALF_WAY ||
                fake_mode == MODE_OVERLAP;
    uint32_t gap = fake_mode == MODE_GAP;
    parcel_right(fake, &pages, 0, gap, half ? 1 : fake->n_pages - gap, runs);
    parcel_spoil(fake, &pages, runs);
    say_parcel(fake, &pages);
    if (fake_mode == MODE_FAILED_HALF_WAY || fake_mode == MODE_FAILED_STALLED) {
        say_failed(fake, fake_mode == MODE_FAILED_STALLED ? BATON__FAIL_CODE__FAIL_STALLED
                                                          : BATON__FAIL_CODE__FAIL_NO_ROOM);
        say_drained(fake);
        return;
    }
    if (fake_mode == MODE_PIECE_AGAIN) {
        pages.seq = 1;
        parcel_halve(fake, &pages);
        say_parcel(fake, &pages);
        return;
    }
    if (fake_mode == MODE_OVERLAP) {
        parcel_right(fake, &more, 1, 0, 1, tail_runs);
        tail_runs[0] = fake->slots[1];
        say_parcel(fake, &more);
        return;
    }
    parcel_right(fake, &tail, 1, -1, 0, tail_runs);
    if (fake_mode == MODE_TAIL_LONG) {
        tail.total_bytes += 8;
    } else if (fake_mode == MODE_TAIL_OFFSET) {
        tail.offset = PAGE_BYTES;
    }
    if (fake_mode != MODE_DONE_NO_TAIL && fake_mode != MODE_DONE_AFTER_HALF) {
        say_parcel(fake, &tail);
    }
    if (fake_mode != MODE_DONE_NO_FIRST) {
        say_first(fake);
    }
    if (fake_mode == MODE_FIRST_TWICE) {
        say_first(fake);
    }
    say_done(fake, fake_mode == MODE_DONE_COUNT                                          ? 3
                   : fake_mode == MODE_DONE_NO_TAIL || fake_mode == MODE_DONE_AFTER_HALF ? 1
                                                                                         : 2);
}

static void on_put_done(void *cookie, const struct put_result *result)
{
    struct fake *fake = cookie;
    if (result->status != STATUS_OK) {
        print_message("the fake's put ended with %s\n", status_name(result->status));
        return;
    }
    fake->put_done = true;
    if (fake_mode != MODE_LATE || fake->cancelled) {
        tell(fake);
    }
}

/* All slots are here: write. */
static void put_all(struct fake *fake)
{
    struct put_run puts[MAX_SLOTS];
    struct error err = {""};
    images_fill(fake, fake_mode == MODE_OTHER_PROMPT);
    for (uint32_t i = 0; i < fake->n_slots; i++) {
        puts[i] = (struct put_run){.source_offset = (uint64_t)i * PAGE_BYTES,
                                   .remote_offset = (uint64_t)fake->slots[i] * PAGE_BYTES,
                                   .bytes = PAGE_BYTES};
    }
    if (fake_mode == MODE_TORN) {
        puts[0].source_offset = PAGE_BYTES; /* slot 0 holds page 1 */
    }
    if (put_submit(fake->peer, source, puts, fake->n_slots, on_put_done, fake, NULL, &err)) {
        print_message("the fake can't put: %s\n", err.text);
    }
}

static void write_more(void);

static void on_written(void *cookie, const struct put_result *result)
{
    writer.out = false;
    if (result->status == STATUS_OK) {
        fake_n_written += (uint64_t)(uintptr_t)cookie;
        write_more();
    } else {
        print_message("the late writer's put ended with %s\n", status_name(result->status));
    }
}

static void write_more(void)
{
    struct put_run puts[MAX_SLOTS];
    struct error err = {""};
    uint8_t *noise = memory + MAX_SLOTS * (size_t)PAGE_BYTES;
    uint32_t n = 0;
    for (size_t i = 0; i < PAGE_BYTES; i += 8) {
        writer.draw = writer.draw * 6364136223846793005u + 1442695040888963407u;
        memcpy(noise + i, &writer.draw, 8);
    }
    for (uint32_t i = 0; i < MAX_SLOTS; i++) {
        if (writer.granted[i]) {
            puts[n++] = (struct put_run){.source_offset = MAX_SLOTS * (uint64_t)PAGE_BYTES,
                                         .remote_offset = i * (uint64_t)PAGE_BYTES,
                                         .bytes = PAGE_BYTES};
        }
    }
    if (!writer.on || writer.out || n == 0) {
        return;
    }
    writer.out = true;
    if (put_submit(writer.peer, source, puts, n, on_written, (void *)(uintptr_t)n, NULL, &err)) {
        writer.out = false;
        print_message("the late writer can't put: %s\n", err.text);
    }
}

void fake_write_on(bool on)
{
    writer.on = on;
    if (on) {
        write_more();
    }
}

void fake_link_close(void)
{
    if (writer.fake && writer.fake->link) {
        link_close(writer.fake->link);
        writer.fake->link = NULL;
    }
}

static void on_run(struct fake *fake, const Baton__ToPrefill__Run *run)
{
    fake->transfer = run->transfer;
    fake->n_ids = (uint32_t)run->n_ids < MAX_IDS ? (uint32_t)run->n_ids : MAX_IDS;
    fake->n_samples = run->sampling->n;
    memcpy(fake->ids, run->ids, fake->n_ids * sizeof(fake->ids[0]));
    fake->n_pages = (fake->n_ids + PAGE_TOKENS - 1) / PAGE_TOKENS;
    fake->n_slots = 0;
    fake->cancelled = fake->put_done = false;
    fake_n_runs++;
    if (fake_mode == MODE_SILENT) {
        return;
    }
    if (fake_mode == MODE_PARCEL_UNASKED) {
        uint32_t runs[2 * MAX_SLOTS];
        Baton__FromPrefill__Parcel pages;
        parcel_right(fake, &pages, 0, 0, 1, runs);
        say_parcel(fake, &pages);
        return;
    }
    if (fake_mode == MODE_FAILED_ODD_CODE) {
        say_failed(fake, 999);
        say_drained(fake);
        return;
    }
    if (fake_mode == MODE_GARBAGE) {
        if (link_send(fake->link, "\xff\xff\xff\xff\xff", 5)) {
            print_message("no room for garbage\n");
        }
        return;
    }
    say_progress(fake, 0);
}

static void on_slots(struct fake *fake, const Baton__ToPrefill__Slots *slots)
{
    uint32_t n_wanted = fake->n_pages + (TAIL_BYTES + PAGE_BYTES - 1) / PAGE_BYTES;
    for (size_t r = 0; r + 1 < slots->n_slot_runs; r += 2) {
        for (uint32_t k = 0; k < slots->slot_runs[r + 1] && fake->n_slots < MAX_SLOTS; k++) {
            fake->slots[fake->n_slots++] = slots->slot_runs[r] + k;
        }
    }
    if (fake_mode == MODE_WRITER) {
        writer.fake = fake;
        writer.peer = fake->peer;
        for (uint32_t i = 0; i < fake->n_slots; i++) {
            writer.granted[fake->slots[i]] = true;
        }
        return;
    }
    if (fake_mode == MODE_STARTED) {
        return;
    }
    if (fake_mode == MODE_COMPUTED) {
        say_progress(fake, fake->n_ids);
        return;
    }
    if (fake->n_slots == n_wanted) {
        put_all(fake);
    }
}

static void on_preflight(void *cookie, const struct put_preflight_result *result)
{
    struct fake *fake = cookie;
    Baton__FromPrefill__Preflight preflight = BATON__FROM_PREFILL__PREFLIGHT__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    if (!fake->link) {
        return;
    }
    preflight.slot_runs = fake->preflight_runs;
    preflight.n_slot_runs = fake->n_preflight_runs;
    preflight.pattern = fake->pattern ^ (fake_mode == MODE_PATTERN);
    preflight.bytes = PAGE_BYTES;
    preflight.transport = (char *)"fake";
    preflight.put_cost_ns = 1000;
    preflight.bandwidth_bytes_per_s = 1000000000;
    if (fake_mode == MODE_PREFLIGHT_SLOTS) {
        fake->preflight_runs[0] ^= 31;
    }
    message.what_case = BATON__FROM_PREFILL__WHAT_PREFLIGHT;
    message.preflight = &preflight;
    say(fake, &message);
}

static void preflight(struct fake *fake, const Baton__ToPrefill__Slots *message)
{
    struct put_slot slots[PUT_PREFLIGHT_MAX_SLOTS];
    struct error err = {""};
    uint32_t n = 0;
    fake->n_preflight_runs = 0;
    for (size_t r = 0; r + 1 < message->n_slot_runs; r += 2) {
        for (uint32_t k = 0; k < message->slot_runs[r + 1]; k++) {
            uint32_t slot = message->slot_runs[r] + k;
            slots[n++] = (struct put_slot){0, (uint64_t)slot * PAGE_BYTES, PAGE_BYTES};
            fake->preflight_runs[fake->n_preflight_runs++] = slot;
            fake->preflight_runs[fake->n_preflight_runs++] = 1;
        }
    }
    fake->pattern = 0x1234;
    if (put_preflight(fake->peer, slots, n, fake->pattern, on_preflight, fake, &err)) {
        print_message("the fake's preflight: %s\n", err.text);
    }
}

static void on_peer_failed(void *cookie, struct put_peer *peer, enum status status,
                           const char *text)
{
    print_message("the fake's peer failed: %s\n", text);
}

static void on_peer_up(void *cookie, struct put_peer *peer)
{
}

static const struct put_peer_events peer_events = {.up = on_peer_up, .failed = on_peer_failed};

static void on_hello(struct fake *fake, const Baton__PrefillHello *theirs)
{
    const struct test_node *self = node_find("f0");
    const Baton__Region *region = theirs->regions[0];
    Baton__Hello hello = BATON__HELLO__INIT;
    Baton__PrefillHello answer = BATON__PREFILL_HELLO__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    uint8_t fingerprint[16];
    struct error err = {""};
    struct put_remote_region remote = {.base = region->address,
                                       .bytes = region->bytes,
                                       .rkey = region->rkey.data,
                                       .rkey_bytes = region->rkey.len};
    struct put_peer_options options = {.name = "decode",
                                       .address = theirs->ucx_address.data,
                                       .address_bytes = theirs->ucx_address.len,
                                       .regions = &remote,
                                       .n_regions = 1,
                                       .allow_slow = true,
                                       .events = &peer_events,
                                       .cookie = fake};
    if (put_peer_connect(transport, &options, &fake->peer, &err)) {
        print_error("the fake can't connect: %s\n", err.text);
        abort();
    }
    memcpy(fingerprint, theirs->hello->fingerprint.data, sizeof(fingerprint));
    fingerprint[0] ^= fake_mode == MODE_HELLO_FINGERPRINT;
    hello.protocol = HELLO_PROTOCOL;
    hello.node_id = (char *)"f0";
    hello.role = BATON__ROLE__ROLE_PREFILL;
    hello.incarnation = self->incarnation + (fake_mode == MODE_HELLO_INCARNATION);
    hello.fingerprint = (ProtobufCBinaryData){sizeof(fingerprint), fingerprint};
    answer.hello = &hello;
    message.what_case = BATON__FROM_PREFILL__WHAT_HELLO;
    message.hello = &answer;
    say(fake, &message);
    if (fake_mode == MODE_HELLO_TWICE) {
        say(fake, &message);
    }
}

static void on_cancel(struct fake *fake)
{
    fake_n_cancels++;
    fake->cancelled = true;
    if (fake_mode == MODE_LATE && fake->put_done) {
        tell(fake); /* as if the Cancel had never been */
    }
    say_drained(fake);
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct fake *fake = cookie;
    struct arena *arena = arena_create(0);
    ProtobufCMessage *unpacked;
    struct error err = {""};
    if (proto_unpack(&baton__to_prefill__descriptor, bytes, n_bytes, arena, &unpacked, &err)) {
        print_error("decode sends what is no message: %s\n", err.text);
        abort();
    }
    const Baton__ToPrefill *message = (const Baton__ToPrefill *)(void *)unpacked;
    switch (message->what_case) {
    case BATON__TO_PREFILL__WHAT_HELLO:
        on_hello(fake, message->hello);
        break;
    case BATON__TO_PREFILL__WHAT_RUN:
        on_run(fake, message->run);
        break;
    case BATON__TO_PREFILL__WHAT_SLOTS:
        if (message->slots->transfer == 0) {
            preflight(fake, message->slots);
        } else if (message->slots->transfer == fake->transfer) {
            on_slots(fake, message->slots);
        }
        break;
    case BATON__TO_PREFILL__WHAT_CANCEL:
        if (message->cancel->transfer == fake->transfer) {
            on_cancel(fake);
        }
        break;
    default:
        break;
    }
    arena_free(arena);
}

static void on_peer_closed(void *cookie, struct put_peer *peer)
{
    mem_free(cookie);
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct fake *fake = cookie;
    link_close(link);
    fake->link = NULL;
    if (fake == writer.fake) {
        return; /* it goes on writing */
    }
    if (fake->peer) {
        put_peer_close(fake->peer, on_peer_closed, fake);
    } else {
        mem_free(fake);
    }
}

static void on_ended(void *cookie, struct link *link)
{
    on_closed(cookie, link, STATUS_OK, "");
}

static const struct link_events events = {
    .message = on_message, .ended = on_ended, .closed = on_closed};

static void on_stream(void *cookie, struct link *link)
{
    struct fake *fake = mem_zalloc(sizeof(*fake));
    fake->link = link;
    fake_n_links++;
    link_attach(link, &events, fake);
}

void fake_streams(void)
{
    struct transport_options options = {.tls = fake_tls};
    struct error err = {""};
    memory = aligned_alloc(4096, memory_bytes);
    memset(memory, 0, memory_bytes);
    assert_int_equal(transport_open(loop, &options, &transport, &err), STATUS_OK);
    assert_int_equal(
        region_register_source(transport, memory, memory_bytes, REGION_HOST, &source, &err),
        STATUS_OK);
    rpc_server_add_stream(server, "/baton.Prefill/Serve", on_stream, NULL);
}

void fake_close(void)
{
    writer.on = false;
    transport_close(transport);
    if (writer.fake) {
        link_close(writer.fake->link);
        mem_free(writer.fake);
    }
    free(memory);
    buf_fini(&packed);
}
