/* A decode node that fails on purpose: it joins a router, serves Decode.Serve with the real links,
 * and plays one action for each Start, in the order of its arguments, the last one for ever.
 *
 *     scripted_node NAME ROUTER_PORT VOCABULARY ACTION...
 *
 *   ok            all tokens
 *   die:N         N tokens of each sample, then Failed{INTERNAL, retryable}
 *   lost:N        N tokens of each sample, then the link is closed and opened anew
 *   gap:N         N tokens, then one with a number too high
 *   short:N       N tokens, then an end that counts one more
 *   hold:N        N tokens of each sample, and nothing more
 *   after:N:MS    N tokens of each sample, so many milliseconds later the others
 *   busy:N:MS     the same, and meanwhile it says that a step runs and its counter moves
 *   wedge:N:MS    the same, and meanwhile it says that a step runs and its counter stands still
 *   fail:N:MS     N tokens of each sample, so many milliseconds later Failed{INTERNAL}
 *   full, preempt, stalled, invalid, queue, prefill, transfer, generation, broken: Failed with that
 * code
 *
 * Token i of any answer is 300 + (7 * i + sample's seed) % 200, whoever generates it. What was
 * generated before a failover is checked against that. Prints one line of JSON for each Start,
 * Credit and Cancel. One loop thread. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/list.h"
#include "base/loop.h"
#include "base/mem.h"
#include "proto/cluster.pb-c.h"
#include "proto/decode.pb-c.h"
#include "rpc/hello.h"
#include "rpc/link.h"
#include "rpc/proto.h"
#include "rpc/server.h"

enum { STATUS_EVERY_MS = 200, MAX_SAMPLES = 16 };

static struct loop *loop;
static struct rpc_core *core;
static struct rpc_server *server;
static struct link *join, *serve;
static struct loop_timer *timer;
static struct list laters;
static Baton__Hello hello = BATON__HELLO__INIT;
static Baton__Limits limits = BATON__LIMITS__INIT;
static Baton__Address address = BATON__ADDRESS__INIT;
static char **actions;
static int n_actions, action_i;
static bool joined;
static uint64_t busy_until_ns, wedged_until_ns;

static void die(const char *text)
{
    fprintf(stderr, "scripted_node: %s\n", text);
    exit(1);
}

static void send_packed(struct link *link, const ProtobufCMessage *message)
{
    struct buf packed = BUF_INIT;
    proto_pack(message, &packed);
    if (link && link_send(link, packed.data, packed.bytes)) {
        fprintf(stderr, "scripted_node: a message was not taken\n");
    }
    buf_fini(&packed);
}

/* ---- Join ---- */

static void send_status(void *cookie)
{
    static uint64_t progress;
    Baton__ToRouter message = BATON__TO_ROUTER__INIT;
    Baton__ToRouter__Status status = BATON__TO_ROUTER__STATUS__INIT;
    message.what_case = BATON__TO_ROUTER__WHAT_STATUS;
    message.status = &status;
    status.ready = true;
    status.sequences_free = 16;
    if (loop_now_ns() < busy_until_ns) {
        status.unit = BATON__TO_ROUTER__STATUS__UNIT__STEP;
        status.n_running = 1;
    }
    progress += loop_now_ns() >= wedged_until_ns;
    status.progress = progress;
    if (joined) {
        send_packed(join, &message.base);
    }
    loop_timer_arm(timer, STATUS_EVERY_MS * NS_PER_MS);
}

static void join_opened(void *cookie, struct link *link)
{
    Baton__ToRouter message = BATON__TO_ROUTER__INIT;
    message.what_case = BATON__TO_ROUTER__WHAT_HELLO;
    message.hello = &hello;
    send_packed(link, &message.base);
}

static void join_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    if (!joined) {
        joined = true;
        send_status(NULL);
    }
}

static void join_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    printf("{\"closed\": \"%s\"}\n", text);
    joined = false;
}

static const struct link_events join_events = {
    .opened = join_opened,
    .message = join_message,
    .closed = join_closed,
};

/* ---- Serve ---- */

static uint64_t seed_of(uint64_t seed, uint32_t sample_i)
{
    uint64_t z = seed ^ (sample_i * 0xd1342543de82ef95u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return sample_i == 0 ? seed : z ^ (z >> 31);
}

static uint32_t token_of(uint64_t seed, uint32_t i)
{
    return 300 + (uint32_t)((7 * i + seed % 200) % 200);
}

static void send_failed(const Baton__ToDecode__Start *start, Baton__FailCode code, bool retryable)
{
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    Baton__FromDecode__Failed failed = BATON__FROM_DECODE__FAILED__INIT;
    message.what_case = BATON__FROM_DECODE__WHAT_FAILED;
    message.failed = &failed;
    failed.request = start->request;
    failed.attempt = start->attempt;
    failed.code = code;
    failed.node = hello.node_id;
    failed.text = (char *)"as the script says";
    failed.retryable = retryable;
    send_packed(serve, &message.base);
}

static void send_finished(const Baton__ToDecode__Start *start, uint32_t sample_i, uint32_t n)
{
    Baton__FromDecode message = BATON__FROM_DECODE__INIT;
    Baton__FromDecode__Finished finished = BATON__FROM_DECODE__FINISHED__INIT;
    message.what_case = BATON__FROM_DECODE__WHAT_FINISHED;
    message.finished = &finished;
    finished.request = start->request;
    finished.attempt = start->attempt;
    finished.sample = sample_i;
    finished.reason = BATON__FROM_DECODE__REASON__REASON_LENGTH;
    finished.n_generated = n;
    send_packed(serve, &message.base);
}

/* Tokens [first, end) of a sample, one a row. */
static void send_rows(const Baton__ToDecode__Start *start, uint32_t sample_i, uint32_t first,
                      uint32_t end)
{
    uint64_t seed = seed_of(start->sampling->seed, sample_i);
    for (uint32_t i = first; i < end; i++) {
        Baton__FromDecode message = BATON__FROM_DECODE__INIT;
        Baton__FromDecode__Step step = BATON__FROM_DECODE__STEP__INIT;
        Baton__FromDecode__Row row = BATON__FROM_DECODE__ROW__INIT;
        Baton__FromDecode__Row *rows[] = {&row};
        uint32_t id = token_of(seed, i);
        message.what_case = BATON__FROM_DECODE__WHAT_STEP;
        message.step = &step;
        step.n_rows = 1;
        step.rows = rows;
        row.request = start->request;
        row.attempt = start->attempt;
        row.sample = sample_i;
        row.first_index = i;
        row.n_ids = 1;
        row.ids = &id;
        send_packed(serve, &message.base);
    }
}

static void check_history(const Baton__ToDecode__Start *start)
{
    const Baton__Sampling *s = start->sampling;
    for (uint32_t i = 0; i < start->n_generated; i++) {
        if (start->ids[start->n_ids_total - start->n_generated + i] != token_of(s->seed, i)) {
            die("the ids of a failover are not those that were generated");
        }
    }
}

static Baton__FailCode code_of(const char *action)
{
    static const struct {
        const char *name;
        Baton__FailCode code;
    } codes[] = {
        {"full", BATON__FAIL_CODE__FAIL_QUEUE_FULL},
        {"preempt", BATON__FAIL_CODE__FAIL_PREEMPTED},
        {"invalid", BATON__FAIL_CODE__FAIL_INVALID},
        {"long", BATON__FAIL_CODE__FAIL_TOO_LONG},
        {"queue", BATON__FAIL_CODE__FAIL_DEADLINE_QUEUE},
        {"prefill", BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL},
        {"transfer", BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER},
        {"generation", BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION},
        {"broken", BATON__FAIL_CODE__FAIL_INTERNAL},
        {"stalled", BATON__FAIL_CODE__FAIL_STALLED},
    };
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        if (strcmp(codes[i].name, action) == 0) {
            return codes[i].code;
        }
    }
    die(action);
    return BATON__FAIL_CODE__FAIL_UNKNOWN;
}

/* The rest of an answer that pauses, until it is cancelled. */
struct later {
    struct list in_laters;
    struct loop_timer *timer;
    Baton__ToDecode__Start start; /* with this sampling, and no ids */
    Baton__Sampling sampling;
    uint32_t at;
    bool fails;
};

static void later_free(struct later *later)
{
    list_remove(&later->in_laters);
    loop_timer_free(later->timer);
    mem_free(later);
}

static void on_later(void *cookie)
{
    struct later *later = cookie;
    const Baton__Sampling *s = &later->sampling;
    if (later->fails) {
        send_failed(&later->start, BATON__FAIL_CODE__FAIL_INTERNAL, false);
    }
    for (uint32_t i = 0; i < s->n && !later->fails; i++) {
        send_rows(&later->start, i, later->at, s->max_tokens);
        send_finished(&later->start, i, s->max_tokens);
    }
    later_free(later);
}

static void later_create(const Baton__ToDecode__Start *start, uint32_t at, unsigned ms, bool fails)
{
    struct later *later = mem_zalloc(sizeof(*later));
    baton__sampling__init(&later->sampling);
    later->sampling.n = start->sampling->n;
    later->sampling.seed = start->sampling->seed;
    later->sampling.max_tokens = start->sampling->max_tokens;
    baton__to_decode__start__init(&later->start);
    later->start.request = start->request;
    later->start.attempt = start->attempt;
    later->start.sampling = &later->sampling;
    later->at = at;
    later->fails = fails;
    later->timer = loop_timer_create(loop, on_later, later);
    loop_timer_arm(later->timer, ms * NS_PER_MS);
    list_push_back(&laters, &later->in_laters);
}

static void laters_cancel(const Baton__ToDecode__Cancel *cancel)
{
    list_for_each_safe(at, &laters)
    {
        struct later *later = list_entry(at, struct later, in_laters);
        if (later->start.request == cancel->request && cancel->all_samples) {
            later_free(later);
        }
    }
}

static void on_start(const Baton__ToDecode__Start *start)
{
    const char *action = actions[action_i < n_actions - 1 ? action_i++ : n_actions - 1];
    const char *colon = strchr(action, ':');
    const Baton__Sampling *s = start->sampling;
    uint32_t n_prefix = colon ? (uint32_t)atoi(colon + 1) : s->max_tokens;
    printf("{\"start\": \"%016" PRIx64 "\", \"attempt\": %u, \"ids\": %u, \"generated\": %u, "
           "\"n\": %u, \"seed\": %" PRIu64 ", \"front\": %d, \"credit\": %u, \"action\": \"%s\"}\n",
           start->request, start->attempt, start->n_ids_total, start->n_generated, s->n, s->seed,
           start->front, start->credit, action);
    if (start->n_ids != start->n_ids_total || s->n > MAX_SAMPLES) {
        die("the script is for short prompts");
    }
    check_history(start);
    if (!colon && strcmp(action, "ok") != 0) {
        Baton__FailCode code = code_of(action);
        send_failed(start, code,
                    code == BATON__FAIL_CODE__FAIL_QUEUE_FULL ||
                        code == BATON__FAIL_CODE__FAIL_PREEMPTED ||
                        code == BATON__FAIL_CODE__FAIL_STALLED);
        return;
    }
    bool wedges = strncmp(action, "wedge", 5) == 0, is_busy = strncmp(action, "busy", 4) == 0;
    bool pauses = strncmp(action, "hold", 4) == 0 || strncmp(action, "after", 5) == 0 ||
                  strncmp(action, "fail", 4) == 0 || wedges || is_busy;
    uint32_t end = start->n_generated + n_prefix;
    end = end < s->max_tokens ? end : s->max_tokens;
    for (uint32_t i = 0; i < s->n; i++) {
        /* Samples are of different progress when the node fails; not when it only pauses. */
        uint32_t behind = pauses || !colon ? 0 : i;
        send_rows(start, i, start->n_generated, end > behind ? end - behind : 0);
        if (!colon) {
            send_finished(start, i, end);
        }
    }
    if (strncmp(action, "die", 3) == 0) {
        send_failed(start, BATON__FAIL_CODE__FAIL_INTERNAL, true);
    } else if (strncmp(action, "gap", 3) == 0) {
        send_rows(start, 0, end + 1, end + 2);
    } else if (strncmp(action, "short", 5) == 0) {
        send_finished(start, 0, end + 1);
    } else if (pauses && action[0] != 'h') {
        const char *ms = strchr(colon + 1, ':');
        unsigned pause_ms = ms ? (unsigned)atoi(ms + 1) : 0;
        if (wedges || is_busy) {
            busy_until_ns = loop_now_ns() + pause_ms * NS_PER_MS;
            wedged_until_ns = wedges ? busy_until_ns : 0;
        }
        later_create(start, end, pause_ms, action[0] == 'f');
    } else if (strncmp(action, "lost", 4) == 0) {
        link_finish(serve); /* what was sent arrives, then the stream ends */
    }
}

static void serve_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct error err = {""};
    struct arena *arena = arena_create(16 << 20);
    ProtobufCMessage *unpacked;
    if (proto_unpack(&baton__to_decode__descriptor, bytes, n_bytes, arena, &unpacked, &err)) {
        die(err.text);
    }
    const Baton__ToDecode *message = (const Baton__ToDecode *)unpacked;
    if (message->what_case == BATON__TO_DECODE__WHAT_HELLO) {
        Baton__FromDecode answer = BATON__FROM_DECODE__INIT;
        answer.what_case = BATON__FROM_DECODE__WHAT_HELLO;
        answer.hello = &hello;
        send_packed(link, &answer.base);
    } else if (message->what_case == BATON__TO_DECODE__WHAT_START) {
        on_start(message->start);
    } else if (message->what_case == BATON__TO_DECODE__WHAT_CANCEL) {
        laters_cancel(message->cancel);
        printf("{\"cancel\": \"%016" PRIx64 "\", \"all\": %d, \"sample\": %u}\n",
               message->cancel->request, message->cancel->all_samples, message->cancel->sample);
    } else if (message->what_case == BATON__TO_DECODE__WHAT_CREDIT) {
        printf("{\"credit\": \"%016" PRIx64 "\", \"tokens\": %u}\n", message->credit->request,
               message->credit->tokens);
    }
    arena_free(arena);
}

static void serve_over(struct link *link)
{
    link_close(link);
    serve = link == serve ? NULL : serve;
}

static void serve_ended(void *cookie, struct link *link)
{
    serve_over(link);
}

static void serve_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    serve_over(link);
}

static const struct link_events serve_events = {
    .message = serve_message,
    .ended = serve_ended,
    .closed = serve_closed,
};

static void on_stream(void *cookie, struct link *link)
{
    serve = link;
    link_attach(link, &serve_events, NULL);
}

int main(int argc, char **argv)
{
    struct error err = {""};
    if (argc < 5) {
        die("usage: scripted_node NAME ROUTER_PORT VOCABULARY ACTION...");
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    list_init(&laters);
    actions = argv + 4;
    n_actions = argc - 4;
    if (loop_create(&loop) || rpc_core_create(loop, &core, &err)) {
        die(err.text);
    }
    struct rpc_server_options options = {.host = "127.0.0.1"};
    if (rpc_server_create(core, &options, &server, &err)) {
        die(err.text);
    }
    rpc_server_add_stream(server, "/baton.Decode/Serve", on_stream, NULL);
    rpc_server_start(server);
    address.host = (char *)"127.0.0.1";
    address.port = rpc_server_port(server);
    limits.max_context_tokens = 65536;
    limits.max_sequences = 16;
    limits.max_samples = MAX_SAMPLES;
    limits.vocab_size = (uint32_t)atoi(argv[3]);
    hello.protocol = HELLO_PROTOCOL;
    hello.node_id = argv[1];
    hello.role = BATON__ROLE__ROLE_DECODE;
    hello.limits = &limits;
    hello.grpc = &address;
    if (hello_incarnation_draw(&hello.incarnation, &err)) {
        die(err.text);
    }
    timer = loop_timer_create(loop, send_status, NULL);
    struct link_options join_options = {
        .host = "127.0.0.1",
        .port = (uint16_t)atoi(argv[2]),
        .method = "/baton.Cluster/Join",
    };
    if (link_connect(core, &join_options, &join_events, NULL, &join, &err) || loop_run(loop)) {
        die(err.text);
    }
    return 0;
}
