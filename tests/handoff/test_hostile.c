/*
 * A prefill node that misbehaves, and a decode node that does. Whatever it says or writes, no token
 * comes of it, the failure has the right name, all is given back and the next request is served.
 * Case and incident numbers: KV-03, KV-07, C9, D1, E4, E5 of the project's lists.
 */
#include "fake.h"

#include "engine/sim.h"
#include "rpc/hello.h"
#include "rpc/proto.h"
#include "transport/region.h"
#include "transport/transport.h"

static const int PREFILL = BATON__ROLE__ROLE_PREFILL, DECODE = BATON__ROLE__ROLE_DECODE;
static const int READY = BATON__TO_ROUTER__PAIR__STATE__READY;

enum { N_IDS = 600, N_SLOTS = 6 };

struct lie {
    enum fake_mode mode;
    int code;
    const char *name;
};

static struct test_node *scene(enum fake_mode mode)
{
    fake_mode = mode;
    fake_n_runs = fake_n_links = fake_n_cancels = 0;
    node_fake("f0", 0x1000 + (uint64_t)mode);
    struct test_node *d0 = node_spawn(DECODE, "d0", "--landing-slots 32");
    return d0;
}

/* After whatever it was: everything free, an honest transfer and a local prompt come out right. */
static void still_serves(struct test_node *d0, const uint32_t *ids)
{
    fake_mode = MODE_GOOD;
    wait_pair(d0, "f0", READY, 5000);
    struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
    struct test_request *good = request_start(d0, &start);
    wait_ended(good, 5000);
    assert_greedy(good, &start);
    start.prefill = NULL;
    struct test_request *local = request_start(d0, &start);
    wait_ended(local, 5000);
    assert_greedy(local, &start);
    wait_baseline(d0, 1000);
}

static void run_lies(const struct lie *lies, size_t n)
{
    struct test_node *d0 = scene(MODE_GOOD);
    uint32_t *ids = ids_make(N_IDS, 11);
    wait_pair(d0, "f0", READY, 5000);
    still_serves(d0, ids); /* the control: the same bytes, told as they are */
    for (size_t i = 0; i < n; i++) {
        struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
        fake_mode = lies[i].mode;
        print_message("  %s\n", lies[i].name);
        struct test_request *lied_to = request_start(d0, &start);
        wait_code(lied_to, lies[i].code, 1000);
        assert_int_equal(lied_to->n_tokens[0], 0);
        assert_string_equal(lied_to->node, "f0");
        if (lies[i].mode == MODE_GARBAGE) { /* ends the link as well */
            WAIT_FOR(pair_state(d0, "f0") != READY, 2000);
        } else {
            wait_baseline(d0, 1000);
        }
        still_serves(d0, ids);
    }
    mem_free(ids);
    nodes_end();
}

/* E4: First and Done are not enough. Parcels tile the prompt exactly, each from granted slots. */
static void e4_tiling(void **state)
{
    static const struct lie lies[] = {
        {MODE_SLOT_OF_OTHERS, BATON__FAIL_CODE__FAIL_TILING, "a slot that was not granted"},
        {MODE_SLOT_TWICE, BATON__FAIL_CODE__FAIL_TILING, "a slot twice"},
        {MODE_SLOT_RUN_HUGE, BATON__FAIL_CODE__FAIL_TILING, "a run to the end of the numbers"},
        {MODE_SLOT_RUN_ODD, BATON__FAIL_CODE__FAIL_TILING, "half a run"},
        {MODE_FEW_SLOTS, BATON__FAIL_CODE__FAIL_TILING, "fewer slots than bytes"},
        {MODE_GAP, BATON__FAIL_CODE__FAIL_TILING, "a gap"},
        {MODE_OVERLAP, BATON__FAIL_CODE__FAIL_TILING, "a page twice"},
        {MODE_TOO_MANY_PAGES, BATON__FAIL_CODE__FAIL_TILING, "too many pages"},
        {MODE_NO_PAGES, BATON__FAIL_CODE__FAIL_TILING, "a parcel of nothing"},
        {MODE_SEQ_GAP, BATON__FAIL_CODE__FAIL_TILING, "parcels out of number"},
        {MODE_TAIL_LONG, BATON__FAIL_CODE__FAIL_TILING, "a tail of another size"},
        {MODE_TAIL_OFFSET, BATON__FAIL_CODE__FAIL_TILING, "the end of the tail first"},
        {MODE_KIND_UNKNOWN, BATON__FAIL_CODE__FAIL_TILING, "an unknown kind"},
        {MODE_PIECE_LATER, BATON__FAIL_CODE__FAIL_TILING, "the second half of pages first"},
        {MODE_PIECE_DUST, BATON__FAIL_CODE__FAIL_TILING, "eight bytes of each page"},
        {MODE_PIECE_LONG, BATON__FAIL_CODE__FAIL_TILING, "more than pages"},
        {MODE_PIECE_ODD, BATON__FAIL_CODE__FAIL_TILING, "pages of unlike size"},
        {MODE_PIECE_AGAIN, BATON__FAIL_CODE__FAIL_TILING, "half of the pages twice"},
        {MODE_HALF_PAGES, BATON__FAIL_CODE__FAIL_TILING, "half of each page, and done"},
        {MODE_DONE_AFTER_HALF, BATON__FAIL_CODE__FAIL_TILING, "done after half"},
        {MODE_DONE_NO_TAIL, BATON__FAIL_CODE__FAIL_TILING, "done without tail"},
        {MODE_DONE_NO_FIRST, BATON__FAIL_CODE__FAIL_TILING, "done without first tokens"},
        {MODE_DONE_COUNT, BATON__FAIL_CODE__FAIL_TILING, "another number of parcels"},
        {MODE_FIRST_SAMPLES, BATON__FAIL_CODE__FAIL_TILING, "tokens nobody asked for"},
        {MODE_FIRST_VOCABULARY, BATON__FAIL_CODE__FAIL_TILING, "a token outside the vocabulary"},
        {MODE_FIRST_TWICE, BATON__FAIL_CODE__FAIL_TILING, "first tokens twice"},
        {MODE_FIRST_LOGPROBS, BATON__FAIL_CODE__FAIL_TILING, "logprobs nobody asked for"},
        {MODE_PARCEL_UNASKED, BATON__FAIL_CODE__FAIL_TILING, "a parcel before any slot"},
    };
    run_lies(lies, sizeof(lies) / sizeof(lies[0]));
}

/* E5: what lies in a slot is believed by its checksum alone, and a tail by its contents. */
static void e5_checksum(void **state)
{
    static const struct lie lies[] = {
        {MODE_WRONG_CHECKSUM, BATON__FAIL_CODE__FAIL_CHECKSUM, "a wrong checksum"},
        {MODE_TORN, BATON__FAIL_CODE__FAIL_CHECKSUM, "a stale write in the slot"},
        {MODE_OTHER_PROMPT, BATON__FAIL_CODE__FAIL_CHECKSUM, "the pages of another prompt"},
    };
    run_lies(lies, sizeof(lies) / sizeof(lies[0]));
}

/* KV-07: prefill gives up; its reason arrives with its code, at once. */
static void kv07_refusals_arrive(void **state)
{
    static const struct lie lies[] = {
        {MODE_FAILED_HALF_WAY, BATON__FAIL_CODE__FAIL_NO_ROOM, "gives up half way"},
        {MODE_FAILED_STALLED, BATON__FAIL_CODE__FAIL_STALLED, "its puts stall half way"},
        {MODE_FAILED_ODD_CODE, BATON__FAIL_CODE__FAIL_INTERNAL, "a code that nobody knows"},
        {MODE_GARBAGE, BATON__FAIL_CODE__FAIL_PEER_LOST, "bytes that are no message"},
    };
    run_lies(lies, sizeof(lies) / sizeof(lies[0]));
}

/* A prefill node that falls silent in each phase: the deadline of that phase ends it. */
static void silence_is_named_by_phase(void **state)
{
    static const struct lie silences[] = {
        {MODE_SILENT, BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE, "in the queue"},
        {MODE_STARTED, BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL, "while it computes"},
        {MODE_COMPUTED, BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER, "while it sends"},
    };
    struct test_node *d0 = scene(MODE_GOOD);
    uint32_t *ids = ids_make(N_IDS, 11);
    wait_pair(d0, "f0", READY, 5000);
    for (size_t i = 0; i < sizeof(silences) / sizeof(silences[0]); i++) {
        struct start start = {.prefill = "f0",
                              .ids = ids,
                              .n_ids = N_IDS,
                              .queue_ms = i == 0 ? 200 : 0,
                              .prefill_ms = i == 1 ? 200 : 0,
                              .transfer_ms = i == 2 ? 200 : 0};
        fake_mode = silences[i].mode;
        print_message("  %s\n", silences[i].name);
        struct test_request *waits = request_start(d0, &start);
        wait_code(waits, silences[i].code, 1000);
        assert_string_equal(waits->node, "f0");
        assert_true((waits->end_ns - waits->start_ns) / NS_PER_MS >= 200);
        wait_baseline(d0, 1000);
        still_serves(d0, ids);
    }
    mem_free(ids);
    nodes_end();
}

/* C9: everything of a transfer arrives after its Cancel. It is dropped and counted. */
static void c9_late_messages_are_dropped(void **state)
{
    struct test_node *d0 = scene(MODE_GOOD);
    uint32_t *ids = ids_make(N_IDS, 11);
    struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
    wait_pair(d0, "f0", READY, 5000);
    double strays = node_metric(d0, "baton_stray_messages_total");
    fake_mode = MODE_LATE;
    struct test_request *cancelled = request_start(d0, &start);
    WAIT_FOR(fake_n_runs == 1, 2000);
    run_ms(200);
    request_cancel(d0, cancelled);
    wait_code(cancelled, BATON__FAIL_CODE__FAIL_CANCELLED, 500);
    WAIT_FOR(fake_n_cancels == 1, 1000);
    /* two parcels, First, Done */
    WAIT_FOR(node_metric(d0, "baton_stray_messages_total") == strays + 4, 2000);
    assert_int_equal(cancelled->n_tokens[0], 0);
    wait_baseline(d0, 1000);
    still_serves(d0, ids);
    mem_free(ids);
    nodes_end();
}

/* The pair never gets ready, says why, and is tried again with patience; the truth makes it ready.
 */
static void pair_refused(enum fake_mode mode, const char *words)
{
    struct test_node *d0 = scene(mode);
    uint32_t *ids = ids_make(N_IDS, 11);
    struct start start = {.prefill = "f0", .ids = ids, .n_ids = N_IDS};
    WAIT_FOR(d0->said.n_pairs == 1 && strstr(d0->said.pairs[0].text, words), 8000);
    uint32_t before = fake_n_links;
    run_ms(1000);
    assert_in_range(fake_n_links - before, 0, 12); /* no storm of links */
    assert_int_not_equal(pair_state(d0, "f0"), READY);
    wait_code(request_start(d0, &start), BATON__FAIL_CODE__FAIL_PAIR_NOT_READY, 500);
    assert_int_equal(fake_n_runs, 0);
    still_serves(d0, ids);
    mem_free(ids);
    nodes_end();
}

static void kv03_other_fingerprint(void **state)
{
    pair_refused(MODE_HELLO_FINGERPRINT, "fingerprint");
}

static void kv03_other_incarnation(void **state)
{
    pair_refused(MODE_HELLO_INCARNATION, "incarnation");
}

static void kv03_second_hello(void **state)
{
    pair_refused(MODE_HELLO_TWICE, "second hello");
}

static void preflight_wrong_pattern(void **state)
{
    pair_refused(MODE_PATTERN, "pattern is wrong");
}

static void preflight_other_slots(void **state)
{
    pair_refused(MODE_PREFLIGHT_SLOTS, "not granted");
}

/* ---- a decode node that misbehaves ---- */

struct decoy {
    struct link *link;
    struct region *region;
    bool greeted, closed;
    uint32_t n_progress, n_first, n_done, n_failed, n_drained, n_slots_given, first_token;
    int code;
    char text[256];
};

static void decoy_say(struct decoy *decoy, const Baton__ToPrefill *message)
{
    static struct buf packed;
    proto_pack(&message->base, &packed);
    assert_int_equal(link_send(decoy->link, packed.data, packed.bytes), STATUS_OK);
}

static void decoy_opened(void *cookie, struct link *link)
{
    struct decoy *decoy = cookie;
    const struct test_node *p0 = node_find("p0");
    size_t rkey_bytes, address_bytes;
    const uint8_t *rkey = region_rkey(decoy->region, &rkey_bytes);
    const uint8_t *address = transport_worker_address(fake_transport(), &address_bytes);
    uint8_t boot_id[16];
    Baton__Region region = BATON__REGION__INIT, *regions[] = {&region};
    Baton__Hello hello = BATON__HELLO__INIT;
    Baton__PrefillHello prefill = BATON__PREFILL_HELLO__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    region.address = (uint64_t)(uintptr_t)region_base(decoy->region);
    region.bytes = region_bytes(decoy->region);
    region.rkey = (ProtobufCBinaryData){rkey_bytes, (uint8_t *)rkey};
    region.n_slots = 16;
    region.slot_bytes = PAGE_BYTES;
    hello.protocol = HELLO_PROTOCOL;
    hello.node_id = (char *)"decoy";
    hello.incarnation = 99;
    hello.role = BATON__ROLE__ROLE_DECODE;
    hello.fingerprint = (ProtobufCBinaryData){p0->fingerprint_bytes, (uint8_t *)p0->fingerprint};
    hello.host_boot_id = (ProtobufCBinaryData){hello_host_boot_id(boot_id), boot_id};
    hello.pid = 1;
    prefill.hello = &hello;
    prefill.ucx_address = (ProtobufCBinaryData){address_bytes, (uint8_t *)address};
    prefill.n_regions = 1;
    prefill.regions = regions;
    message.what_case = BATON__TO_PREFILL__WHAT_HELLO;
    message.hello = &prefill;
    decoy->closed = false;
    decoy_say(decoy, &message);
}

static void decoy_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct decoy *decoy = cookie;
    struct arena *arena = arena_create(0);
    ProtobufCMessage *unpacked;
    if (proto_unpack(&baton__from_prefill__descriptor, bytes, n_bytes, arena, &unpacked, NULL)) {
        abort();
    }
    const Baton__FromPrefill *message = (const Baton__FromPrefill *)(void *)unpacked;
    switch (message->what_case) {
    case BATON__FROM_PREFILL__WHAT_HELLO:
        decoy->greeted = true;
        break;
    case BATON__FROM_PREFILL__WHAT_PROGRESS:
        decoy->n_progress++;
        break;
    case BATON__FROM_PREFILL__WHAT_FIRST:
        decoy->n_first++;
        decoy->first_token = message->first->samples[0]->ids[0];
        break;
    case BATON__FROM_PREFILL__WHAT_DONE:
        decoy->n_done++;
        break;
    case BATON__FROM_PREFILL__WHAT_FAILED:
        decoy->n_failed++;
        decoy->code = (int)message->failed->code;
        snprintf(decoy->text, sizeof(decoy->text), "%s", message->failed->text);
        break;
    case BATON__FROM_PREFILL__WHAT_DRAINED:
        decoy->n_drained++;
        break;
    default:
        break;
    }
    arena_free(arena);
}

static void decoy_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct decoy *decoy = cookie;
    decoy->closed = true;
    decoy->greeted = false;
    snprintf(decoy->text, sizeof(decoy->text), "%s", text);
}

static const struct link_events decoy_events = {
    .opened = decoy_opened, .message = decoy_message, .closed = decoy_closed};

static void decoy_run(struct decoy *decoy, uint64_t transfer, const uint32_t *ids, uint32_t n_ids,
                      uint32_t n_total)
{
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    Baton__ToPrefill__Run run = BATON__TO_PREFILL__RUN__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    sampling.n = 1;
    sampling.max_tokens = 10;
    sampling.ignore_eos = true;
    run.transfer = transfer;
    run.ids = (uint32_t *)ids;
    run.n_ids = n_ids;
    run.n_ids_total = n_total;
    run.sampling = &sampling;
    message.what_case = BATON__TO_PREFILL__WHAT_RUN;
    message.run = &run;
    decoy_say(decoy, &message);
}

static void decoy_slots(struct decoy *decoy, uint64_t transfer, uint32_t first, uint32_t n)
{
    uint32_t runs[2] = {first, n};
    Baton__ToPrefill__Slots slots = BATON__TO_PREFILL__SLOTS__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    slots.transfer = transfer;
    slots.slot_runs = runs;
    slots.n_slot_runs = 2;
    message.what_case = BATON__TO_PREFILL__WHAT_SLOTS;
    message.slots = &slots;
    decoy_say(decoy, &message);
}

static void decoy_open(struct decoy *decoy, const struct test_node *p0)
{
    struct error err = {""};
    struct link_options options = {
        .host = p0->host, .port = (uint16_t)p0->port, .method = "/baton.Prefill/Serve"};
    assert_int_equal(region_create_landing(fake_transport(), 16 * PAGE_BYTES, &decoy->region, &err),
                     STATUS_OK);
    assert_int_equal(link_connect(core, &options, &decoy_events, decoy, &decoy->link, &err),
                     STATUS_OK);
    WAIT_FOR(decoy->greeted, 5000);
}

/* D1: a transfer's number twice. The second Run is refused without a word, the first goes on and
 * ends once. */
static void d1_duplicate_transfer(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 4000");
    struct decoy decoy = {0};
    uint32_t *ids = ids_make(N_IDS, 1), *other = ids_make(N_IDS, 2);
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < N_IDS; i++) {
        prefix = sim_prefix_next(prefix, ids[i]);
    }
    decoy_open(&decoy, p0);
    decoy_run(&decoy, 7, ids, N_IDS, N_IDS);
    decoy_run(&decoy, 7, other, N_IDS, N_IDS);
    WAIT_FOR(decoy.n_progress > 0, 8000); /* slots for what has not begun are dropped */
    decoy_slots(&decoy, 7, 0, N_SLOTS);
    WAIT_FOR(decoy.n_done == 1, 8000);
    run_ms(300);
    assert_int_equal(decoy.n_first, 1);
    assert_int_equal(decoy.n_done, 1);
    assert_int_equal(decoy.n_failed, 0);
    assert_int_equal(decoy.first_token, sim_token(prefix, VOCAB));
    assert_int_equal(node_metric(p0, "baton_transfers_refused_total"), 1);
    wait_baseline(p0, 1000);
    link_close(decoy.link);
    mem_free(ids);
    mem_free(other);
    nodes_end();
}

/* Runs, ids and slots that contradict themselves: each answered by name, nothing kept. */
static void decode_contradicts_itself(void **state)
{
    struct test_node *p0 = node_spawn(PREFILL, "p0", "--sim-prefill-speed 4000");
    struct decoy decoy = {0};
    uint32_t *ids = ids_make(N_IDS, 1);
    const int invalid = BATON__FAIL_CODE__FAIL_INVALID;
    decoy_open(&decoy, p0);
    decoy_run(&decoy, 1, ids, N_IDS, 10); /* more ids than it says */
    WAIT_FOR(decoy.n_failed == 1 && decoy.code == invalid && decoy.n_drained == 1, 2000);
    decoy_run(&decoy, 2, ids, 0, 0);
    WAIT_FOR(decoy.n_failed == 2 && decoy.code == invalid && decoy.n_drained == 2, 2000);
    decoy_run(&decoy, 3, ids, N_IDS, 1u << 30);
    WAIT_FOR(decoy.n_failed == 3 && decoy.n_drained == 3, 2000);
    assert_int_equal(decoy.code, BATON__FAIL_CODE__FAIL_TOO_LONG);
    ids[5] = VOCAB;
    decoy_run(&decoy, 4, ids, N_IDS, N_IDS);
    WAIT_FOR(decoy.n_failed == 4 && decoy.code == invalid && decoy.n_drained == 4, 2000);
    ids[5] = 5;
    decoy_run(&decoy, 5, ids, 100, N_IDS); /* the rest does not fit */
    Baton__IdsPart part = BATON__IDS_PART__INIT;
    Baton__ToPrefill message = BATON__TO_PREFILL__INIT;
    part.key = 5;
    part.first = 101;
    part.ids = ids;
    part.n_ids = 10;
    message.what_case = BATON__TO_PREFILL__WHAT_IDS;
    message.ids = &part;
    decoy_say(&decoy, &message);
    WAIT_FOR(decoy.n_failed == 5 && decoy.code == invalid && decoy.n_drained == 5, 2000);
    decoy_run(&decoy, 6, ids, N_IDS, N_IDS);
    run_ms(30);
    decoy_slots(&decoy, 6, 15, 2); /* one of them outside the area */
    WAIT_FOR(decoy.n_failed == 6 && decoy.code == invalid && decoy.n_drained == 6, 2000);
    decoy_run(&decoy, 8, ids, N_IDS, N_IDS);
    run_ms(30);
    decoy_slots(&decoy, 8, 0, UINT32_MAX);
    WAIT_FOR(decoy.n_failed == 7 && decoy.code == invalid && decoy.n_drained == 7, 2000);
    wait_baseline(p0, 1000);
    decoy_slots(&decoy, 0, 15, 2); /* a preflight outside the area: the link is refused */
    WAIT_FOR(decoy.closed && strstr(decoy.text, "outside"), 2000);
    assert_int_equal(decoy.n_first, 0);
    link_close(decoy.link);
    mem_free(ids);
    nodes_end();
}

static int group_setup(void **state)
{
    cluster_streams = fake_streams;
    return cluster_setup(state);
}

static int group_teardown(void **state)
{
    fake_close();
    return cluster_teardown(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest all[] = {
        NODE_TEST(e4_tiling),
        NODE_TEST(e5_checksum),
        NODE_TEST(kv07_refusals_arrive),
        NODE_TEST(silence_is_named_by_phase),
        NODE_TEST(c9_late_messages_are_dropped),
        NODE_TEST(kv03_other_fingerprint),
        NODE_TEST(kv03_other_incarnation),
        NODE_TEST(kv03_second_hello),
        NODE_TEST(preflight_wrong_pattern),
        NODE_TEST(preflight_other_slots),
        NODE_TEST(d1_duplicate_transfer),
        NODE_TEST(decode_contradicts_itself),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: test_hostile BUILD-FOLDER [TEST]\n");
        return 1;
    }
    build_folder = argv[1];
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    return cmocka_run_group_tests(all, group_setup, group_teardown);
}
