/* See cluster.h. */
#include "cluster.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <arpa/inet.h>

#include "base/log.h"
#include "engine/sim.h"
#include "rpc/hello.h"
#include "rpc/proto.h"

enum { MAX_REQUESTS = 512, SLOW = 4 /* sanitizers and a busy machine */ };

/* In callbacks an assertion may not jump out of the loop: the program ends. The daemons end with
 * their parent. */
#define must(condition)                                                         \
    do {                                                                        \
        if (!(condition)) {                                                     \
            print_error("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                            \
        }                                                                       \
    } while (0)

struct loop *loop;
struct rpc_core *core;
struct rpc_server *server;
const char *build_folder;
void (*cluster_streams)(void);

static struct test_node nodes[MAX_TEST_NODES];
static uint32_t n_nodes;
static uint64_t generation;
static struct test_request *requests[MAX_REQUESTS];
static uint32_t n_requests;
static uint64_t next_request = 1;
static Baton__Hello hello;
static struct buf packed;

static void on_run_end(void *cookie)
{
    loop_stop(loop);
}

void run_ms(unsigned ms)
{
    struct loop_timer *timer = loop_timer_create(loop, on_run_end, NULL);
    loop_timer_arm(timer, ms * NS_PER_MS);
    assert_int_equal(loop_run(loop), STATUS_OK);
    loop_timer_free(timer);
}

/* ---- Cluster.Join ---- */

struct test_node *node_find(const char *name)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        if (strcmp(nodes[i].name, name) == 0) {
            return &nodes[i];
        }
    }
    return NULL;
}

void view_push(void)
{
    Baton__ToNode__Peer peers[MAX_TEST_NODES], *list[MAX_TEST_NODES];
    Baton__NodeRef refs[MAX_TEST_NODES];
    Baton__Address addresses[MAX_TEST_NODES];
    Baton__ToNode__View view = BATON__TO_NODE__VIEW__INIT;
    Baton__ToNode message = BATON__TO_NODE__INIT;
    for (uint32_t i = 0; i < n_nodes; i++) {
        if (!nodes[i].listed) {
            continue;
        }
        size_t n = view.n_peers;
        baton__to_node__peer__init(&peers[n]);
        baton__node_ref__init(&refs[n]);
        baton__address__init(&addresses[n]);
        refs[n].node_id = nodes[i].name;
        refs[n].incarnation = nodes[i].incarnation;
        addresses[n].host = nodes[i].host;
        addresses[n].port = nodes[i].port;
        peers[n].node = &refs[n];
        peers[n].role = (Baton__Role)nodes[i].role;
        peers[n].grpc = &addresses[n];
        list[view.n_peers++] = &peers[n];
    }
    view.generation = ++generation;
    view.peers = list;
    message.what_case = BATON__TO_NODE__WHAT_VIEW;
    message.view = &view;
    proto_pack(&message.base, &packed);
    for (uint32_t i = 0; i < n_nodes; i++) {
        if (nodes[i].join && link_send(nodes[i].join, packed.data, packed.bytes)) {
            print_message("%s is going\n", nodes[i].name); /* its `closed` is on the way */
        }
    }
}

static void serve_dial(struct test_node *node);

static void join_hello(struct link *link, const Baton__Hello *theirs, struct test_node **slot)
{
    struct test_node *node = node_find(theirs->node_id);
    must(node != NULL);
    node->incarnation = theirs->incarnation;
    snprintf(node->host, sizeof(node->host), "%s", theirs->grpc->host);
    node->port = theirs->grpc->port;
    node->http_port = theirs->http->port;
    node->fingerprint_bytes = theirs->fingerprint.len;
    must(theirs->fingerprint.len <= sizeof(node->fingerprint));
    memcpy(node->fingerprint, theirs->fingerprint.data, theirs->fingerprint.len);
    node->listed = true;
    node->join = link;
    *slot = node;
    Baton__ToNode message = BATON__TO_NODE__INIT;
    message.what_case = BATON__TO_NODE__WHAT_HELLO;
    message.hello = &hello;
    proto_pack(&message.base, &packed);
    must(link_send(link, packed.data, packed.bytes) == STATUS_OK);
    view_push();
    if (node->role == BATON__ROLE__ROLE_DECODE && !node->serve) {
        serve_dial(node);
    }
}

static void join_status(struct test_node *node, const Baton__ToRouter__Status *status)
{
    struct said *said = &node->said;
    said->n++;
    said->n_queued = status->n_queued;
    said->n_running = status->n_running;
    said->pages_free = status->pages_free;
    said->pages_total = status->pages_total;
    said->slots_free = status->slots_free;
    said->slots_total = status->slots_total;
    said->sequences_free = status->sequences_free;
    said->draining = status->draining;
    said->n_pairs = 0;
    for (size_t i = 0; i < status->n_pairs && i < MAX_TEST_PAIRS; i++) {
        const Baton__ToRouter__Pair *pair = status->pairs[i];
        snprintf(said->pairs[i].id, sizeof(said->pairs[i].id), "%s", pair->prefill->node_id);
        snprintf(said->pairs[i].text, sizeof(said->pairs[i].text), "%s", pair->text);
        said->pairs[i].incarnation = pair->prefill->incarnation;
        said->pairs[i].state = (int)pair->state;
        said->n_pairs++;
    }
}

/* The cookie of a Join link: which node it turned out to be. */
static void join_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct test_node **slot = cookie;
    struct arena *arena = arena_create(0);
    ProtobufCMessage *unpacked;
    struct error err = {""};
    must(proto_unpack(&baton__to_router__descriptor, bytes, n_bytes, arena, &unpacked, &err) ==
         STATUS_OK);
    const Baton__ToRouter *message = (const Baton__ToRouter *)(void *)unpacked;
    if (message->what_case == BATON__TO_ROUTER__WHAT_HELLO) {
        join_hello(link, message->hello, slot);
    } else if (message->what_case == BATON__TO_ROUTER__WHAT_STATUS && *slot) {
        join_status(*slot, message->status);
    }
    arena_free(arena);
}

static void join_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct test_node **slot = cookie;
    struct test_node *node = *slot;
    link_close(link);
    mem_free(slot);
    if (node && node->join == link) {
        node->join = NULL;
        node->listed = false;
        view_push();
    }
}

static void join_ended(void *cookie, struct link *link)
{
    join_closed(cookie, link, STATUS_OK, "");
}

static const struct link_events join_events = {
    .message = join_message, .ended = join_ended, .closed = join_closed};

static void on_join(void *cookie, struct link *link)
{
    link_attach(link, &join_events, mem_zalloc(sizeof(struct test_node *)));
}

/* ---- Decode.Serve ---- */

static struct test_request *request_find(uint64_t id)
{
    for (uint32_t i = 0; i < n_requests; i++) {
        if (requests[i]->id == id) {
            return requests[i];
        }
    }
    return NULL;
}

static void serve_row(const Baton__FromDecode__Row *row)
{
    struct test_request *request = request_find(row->request);
    if (!request) {
        return;
    }
    must(row->attempt == request->attempt);
    must(row->sample < request->n_samples);
    uint32_t *n = &request->n_tokens[row->sample];
    must(row->first_index == request->n_generated + *n);
    request->tokens_after_end += request->ended ? (uint32_t)row->n_ids : 0;
    for (size_t i = 0; i < row->n_ids; i++) {
        must(*n < MAX_TEST_TOKENS);
        request->tokens[row->sample][(*n)++] = row->ids[i];
    }
    if (row->timings) {
        request->timings = *row->timings;
        request->have_timings = true;
    }
}

static void serve_finished(const Baton__FromDecode__Finished *finished)
{
    struct test_request *request = request_find(finished->request);
    if (!request) {
        return;
    }
    must(!request->ended);
    must(finished->sample < request->n_samples);
    must(finished->n_generated == request->n_generated + request->n_tokens[finished->sample]);
    request->reason[finished->sample] = (int)finished->reason;
    request->prompt_tokens = finished->usage->prompt_tokens;
    if (++request->n_finished == request->n_samples) {
        request->ended = true;
        request->end_ns = loop_now_ns();
    }
}

static void serve_failed(const Baton__FromDecode__Failed *failed)
{
    struct test_request *request = request_find(failed->request);
    if (!request) {
        return;
    }
    must(!request->ended);
    request->ended = request->failed = true;
    request->end_ns = loop_now_ns();
    request->code = (int)failed->code;
    request->retryable = failed->retryable;
    snprintf(request->node, sizeof(request->node), "%s", failed->node);
    snprintf(request->text, sizeof(request->text), "%s", failed->text);
}

static void serve_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct test_node *node = cookie;
    struct arena *arena = arena_create(0);
    ProtobufCMessage *unpacked;
    struct error err = {""};
    must(proto_unpack(&baton__from_decode__descriptor, bytes, n_bytes, arena, &unpacked, &err) ==
         STATUS_OK);
    const Baton__FromDecode *message = (const Baton__FromDecode *)(void *)unpacked;
    switch (message->what_case) {
    case BATON__FROM_DECODE__WHAT_HELLO:
        node->serving = true;
        break;
    case BATON__FROM_DECODE__WHAT_ADMITTED: {
        struct test_request *request = request_find(message->admitted->request);
        if (request) {
            request->admitted = true;
        }
        break;
    }
    case BATON__FROM_DECODE__WHAT_STEP:
        for (size_t i = 0; i < message->step->n_rows; i++) {
            serve_row(message->step->rows[i]);
        }
        break;
    case BATON__FROM_DECODE__WHAT_FINISHED:
        serve_finished(message->finished);
        break;
    case BATON__FROM_DECODE__WHAT_FAILED:
        serve_failed(message->failed);
        break;
    default:
        must(!"an empty message");
    }
    arena_free(arena);
}

static void serve_send(struct test_node *node, const Baton__ToDecode *message)
{
    proto_pack(&message->base, &packed);
    must(link_send(node->serve, packed.data, packed.bytes) == STATUS_OK);
}

static void serve_opened(void *cookie, struct link *link)
{
    struct test_node *node = cookie;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    message.what_case = BATON__TO_DECODE__WHAT_HELLO;
    message.hello = &hello;
    serve_send(node, &message);
}

static void serve_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct test_node *node = cookie;
    node->serving = false;
}

static const struct link_events serve_events = {
    .opened = serve_opened, .message = serve_message, .closed = serve_closed};

static void serve_dial(struct test_node *node)
{
    struct error err;
    struct link_options options = {.host = node->host,
                                   .port = (uint16_t)node->port,
                                   .method = "/baton.Decode/Serve",
                                   .name = node->name};
    must(link_connect(core, &options, &serve_events, node, &node->serve, &err) == STATUS_OK);
}

/* ---- requests ---- */

uint32_t *ids_make(uint32_t n, uint64_t seed)
{
    uint32_t *ids = mem_array(n, sizeof(*ids));
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        ids[i] = 3 + (uint32_t)(seed >> 33) % (VOCAB - 3);
    }
    return ids;
}

struct test_request *request_start(struct test_node *decode, const struct start *start)
{
    struct test_request *request = mem_zalloc(sizeof(*request));
    assert_true(n_requests < MAX_REQUESTS);
    requests[n_requests++] = request;
    request->id = next_request++;
    request->attempt = 1;
    request->n_samples = start->n ? start->n : 1;
    request->n_generated = start->n_generated;
    request->start_ns = loop_now_ns();
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    Baton__Deadlines deadlines = BATON__DEADLINES__INIT;
    Baton__NodeRef prefill = BATON__NODE_REF__INIT;
    Baton__ToDecode__Start wire = BATON__TO_DECODE__START__INIT;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    sampling.temperature = start->temperature;
    sampling.top_p = 1;
    sampling.repetition_penalty = 1;
    sampling.seed = 7 + request->id * (start->temperature > 0 ? 0 : 1);
    sampling.n = request->n_samples;
    sampling.ignore_eos = true;
    sampling.max_tokens = start->max_tokens ? start->max_tokens : 12;
    deadlines.queue_ms = start->queue_ms ? start->queue_ms : 60000;
    deadlines.prefill_ms = start->prefill_ms ? start->prefill_ms : 60000;
    deadlines.transfer_ms = start->transfer_ms ? start->transfer_ms : 60000;
    deadlines.generation_ms = start->generation_ms;
    wire.request = request->id;
    wire.attempt = request->attempt;
    wire.n_ids_total = start->n_ids;
    wire.ids = (uint32_t *)start->ids;
    wire.n_ids = start->n_ids < 5000 ? start->n_ids : 5000;
    if (start->n_sent) {
        wire.n_ids = start->n_sent;
    }
    wire.n_generated = start->n_generated;
    wire.sampling = &sampling;
    wire.deadlines = &deadlines;
    wire.credit = start->credit ? start->credit : 100000;
    if (start->prefill) {
        struct test_node *node = node_find(start->prefill);
        prefill.node_id = (char *)start->prefill;
        prefill.incarnation = node ? node->incarnation : 1;
        wire.prefill = &prefill;
    }
    message.what_case = BATON__TO_DECODE__WHAT_START;
    message.start = &wire;
    serve_send(decode, &message);
    for (uint32_t at = 5000; !start->n_sent && at < start->n_ids; at += 5000) {
        Baton__IdsPart part = BATON__IDS_PART__INIT;
        part.key = request->id;
        part.attempt = request->attempt;
        part.first = at;
        part.ids = (uint32_t *)start->ids + at;
        part.n_ids = start->n_ids - at < 5000 ? start->n_ids - at : 5000;
        message.what_case = BATON__TO_DECODE__WHAT_IDS;
        message.ids = &part;
        serve_send(decode, &message);
    }
    return request;
}

void request_cancel(struct test_node *decode, const struct test_request *request)
{
    Baton__ToDecode__Cancel cancel = BATON__TO_DECODE__CANCEL__INIT;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    cancel.request = request->id;
    cancel.attempt = request->attempt;
    cancel.all_samples = true;
    message.what_case = BATON__TO_DECODE__WHAT_CANCEL;
    message.cancel = &cancel;
    serve_send(decode, &message);
}

void request_credit(struct test_node *decode, const struct test_request *request, uint32_t tokens)
{
    Baton__ToDecode__Credit credit = BATON__TO_DECODE__CREDIT__INIT;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    credit.request = request->id;
    credit.attempt = request->attempt;
    credit.tokens = tokens;
    message.what_case = BATON__TO_DECODE__WHAT_CREDIT;
    message.credit = &credit;
    serve_send(decode, &message);
}

void wait_ended(const struct test_request *request, unsigned ms)
{
    WAIT_FOR(request->ended, ms * SLOW);
    if (request->failed) {
        print_error("request %llu failed with %d at %s: %s\n", (unsigned long long)request->id,
                    request->code, request->node, request->text);
    }
    assert_false(request->failed);
}

void wait_code(const struct test_request *request, int code, unsigned ms)
{
    WAIT_FOR(request->ended, ms * SLOW);
    if (!request->failed || request->code != code) {
        print_error("request %llu: %s %d at %s: %s\n", (unsigned long long)request->id,
                    request->failed ? "failed with" : "finished", request->code, request->node,
                    request->text);
    }
    assert_true(request->failed);
    assert_int_equal(request->code, code);
    assert_true(request->text[0] != 0 && request->node[0] != 0);
    assert_int_equal(request->tokens_after_end, 0);
}

void assert_greedy(const struct test_request *request, const struct start *start)
{
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < start->n_ids; i++) {
        prefix = sim_prefix_next(prefix, start->ids[i]);
    }
    uint32_t n = (start->max_tokens ? start->max_tokens : 12) - start->n_generated;
    for (uint32_t s = 0; s < request->n_samples; s++) {
        uint64_t at = prefix;
        assert_int_equal(request->n_tokens[s], n);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t id = sim_token(at, VOCAB);
            assert_int_equal(request->tokens[s][i], id);
            at = sim_prefix_next(at, id);
        }
    }
    assert_int_equal(request->prompt_tokens, start->n_ids - start->n_generated);
}

/* ---- logs ---- */

static void log_path(const char *name, char *ret_path, size_t capacity)
{
    snprintf(ret_path, capacity, "%s/tests/handoff/%d-%s.log", build_folder, (int)getpid(), name);
}

/* The last line that has the text, from there on; "" if none has. */
static void log_last(const struct test_node *node, const char *text, char *ret_rest,
                     size_t capacity)
{
    char path[512], line[2048];
    ret_rest[0] = 0;
    log_path(node->name, path, sizeof(path));
    FILE *file = fopen(path, "re");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file)) {
        const char *at = strstr(line, text);
        if (at) {
            snprintf(ret_rest, capacity, "%s", at);
        }
    }
    fclose(file);
}

bool node_said(const struct test_node *node, const char *text)
{
    char rest[64];
    log_last(node, text, rest, sizeof(rest));
    return rest[0] != 0;
}

void request_state(const struct test_node *decode, const struct test_request *request,
                   char *ret_state, size_t capacity)
{
    char name[64], rest[256];
    snprintf(name, sizeof(name), "%016llx.%u: ", (unsigned long long)request->id, request->attempt);
    log_last(decode, name, rest, sizeof(rest));
    char *arrow = strstr(rest, " -> ");
    rest[strcspn(rest, "\n")] = 0;
    snprintf(ret_state, capacity, "%s", arrow ? arrow + 4 : "");
}

/* ---- HTTP ---- */

char *node_get(const struct test_node *node, const char *path)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)node->http_port)};
    struct timeval limit = {.tv_sec = 10};
    char request[256];
    struct buf answer = BUF_INIT;
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    int n = snprintf(request, sizeof(request),
                     "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || write(fd, request, (size_t)n) != n) {
        close(fd);
        return NULL;
    }
    ssize_t got;
    do {
        uint8_t *at = buf_reserve(&answer, 65536);
        got = read(fd, at, 65536);
        answer.bytes += got > 0 ? (size_t)got : 0;
    } while (got > 0);
    close(fd);
    buf_append(&answer, "", 1);
    char *text = buf_take(&answer, NULL);
    char *body = strstr(text, "\r\n\r\n");
    char *ret = body ? mem_strdup(body + 4) : NULL;
    mem_free(text);
    return ret;
}

double node_metric(const struct test_node *node, const char *series)
{
    char *body = node_get(node, "/metrics");
    size_t n = strlen(series);
    double value = -1;
    assert_non_null(body);
    for (char *line = body; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, series, n) == 0 && line[n] == ' ') {
            value = strtod(line + n, NULL);
            break;
        }
    }
    mem_free(body);
    return value;
}

/* The ledgers of /metrics: items in a state that is not free. */
static uint32_t n_not_free(const struct test_node *node, char *body, bool print)
{
    uint32_t n_ledgers = 0, n_busy = 0;
    assert_non_null(body);
    for (char *line = body; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "baton_ledger_items{", 19) != 0) {
            continue;
        }
        n_ledgers++;
        int bytes = (int)strcspn(line, "\n");
        char *blank = strchr(line, ' ');
        if (!strstr(line, "state=\"free\"") || strstr(line, "state=\"free\"") > blank) {
            double value = strtod(blank, NULL);
            n_busy += (uint32_t)value;
            if (value > 0 && print) {
                print_error("%s: %.*s\n", node->name, bytes, line);
            }
        }
    }
    assert_true(n_ledgers >= 4); /* two states of two ledgers at least: something was looked at */
    return n_busy;
}

/* Once is enough: a pair that is tried again takes slots for its preflight at any later moment. */
void wait_baseline(const struct test_node *node, unsigned ms)
{
    uint64_t begin_ns = loop_now_ns();
    for (;;) {
        char *body = node_get(node, "/metrics");
        bool late = lost_over(begin_ns, ms * SLOW);
        uint32_t n_busy = n_not_free(node, body, late);
        mem_free(body);
        if (n_busy == 0) {
            return;
        }
        assert_false(late);
        run_ms(20);
    }
}

/* ---- pairs ---- */

int pair_state(const struct test_node *decode, const char *prefill)
{
    const struct test_node *node = node_find(prefill);
    for (uint32_t i = 0; i < decode->said.n_pairs; i++) {
        if (strcmp(decode->said.pairs[i].id, prefill) == 0 && node &&
            decode->said.pairs[i].incarnation == node->incarnation) {
            return decode->said.pairs[i].state;
        }
    }
    return -1;
}

void wait_pair(const struct test_node *decode, const char *prefill, int state, unsigned ms)
{
    WAIT_FOR(pair_state(decode, prefill) == state, ms * SLOW);
}

/* ---- processes ---- */

struct test_node *node_spawn(int role, const char *name, const char *args)
{
    extern char **environ;
    struct test_node *node = node_find(name);
    char program[512], router[32], log[512], text[512];
    const char *kind = role == BATON__ROLE__ROLE_PREFILL ? "prefill" : "decode";
    char *argv[64];
    int n = 0;
    if (!node) {
        assert_true(n_nodes < MAX_TEST_NODES);
        node = &nodes[n_nodes++];
    }
    assert_true(node->pid == 0 && !node->serve);
    memset(node, 0, sizeof(*node));
    snprintf(node->name, sizeof(node->name), "%s", name);
    node->role = role;
    snprintf(program, sizeof(program), "%s/%s/baton-%s", build_folder, kind, kind);
    snprintf(router, sizeof(router), "127.0.0.1:%u", (unsigned)rpc_server_port(server));
    log_path(name, log, sizeof(log));
    /* What stands still for half a lease joins anew. A machine that takes its processors away for a
     * while is no part of a test: the lease is longer than that, unless a test asks for its own. */
    const char *lease = strstr(args, "--lease") != NULL ? "" : "--lease 10s ";
    snprintf(text, sizeof(text),
             "--engine sim --sim-vocab %d --sim-page-bytes %d --sim-tail-bytes %d --sim-step 1 "
             "--sim-prefill-speed 400000 --log-level debug %s%s",
             VOCAB, PAGE_BYTES, TAIL_BYTES, lease, args);
    argv[n++] = program;
    argv[n++] = (char *)"--node-id";
    argv[n++] = node->name;
    argv[n++] = (char *)"--router";
    argv[n++] = router;
    argv[n++] = (char *)"--die-with-parent";
    char *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) {
        assert_true(n < 63);
        argv[n++] = word;
    }
    argv[n] = NULL;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, log, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_int_equal(posix_spawn(&node->pid, program, &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    WAIT_FOR(node->join && node->said.n > 0 && (role != BATON__ROLE__ROLE_DECODE || node->serving),
             20000);
    return node;
}

struct test_node *node_fake(const char *name, uint64_t incarnation)
{
    struct test_node *node = node_find(name);
    if (!node) {
        assert_true(n_nodes < MAX_TEST_NODES);
        node = &nodes[n_nodes++];
    }
    memset(node, 0, sizeof(*node));
    snprintf(node->name, sizeof(node->name), "%s", name);
    node->role = BATON__ROLE__ROLE_PREFILL;
    node->incarnation = incarnation;
    snprintf(node->host, sizeof(node->host), "127.0.0.1");
    node->port = rpc_server_port(server);
    node->listed = true;
    view_push();
    return node;
}

static void node_reap(struct test_node *node, unsigned ms)
{
    uint64_t begin_ns = loop_now_ns();
    pid_t got = 0;
    while (got == 0 && !lost_over(begin_ns, ms)) {
        run_ms(5);
        got = waitpid(node->pid, &node->exit_status, WNOHANG);
    }
    if (got == 0) {
        print_error("%s does not end\n", node->name);
        kill(node->pid, SIGKILL);
        waitpid(node->pid, &node->exit_status, 0);
        node->pid = 0;
        fail();
    }
    node->pid = 0;
}

void node_kill(struct test_node *node)
{
    kill(node->pid, SIGKILL);
    node_reap(node, 10000);
    link_close(node->serve);
    node->serve = NULL;
    node->serving = false;
}

void nodes_end(void)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        struct test_node *node = &nodes[i];
        if (node->pid) {
            kill(node->pid, SIGTERM);
        }
        node->listed = false;
    }
    for (uint32_t i = 0; i < n_nodes; i++) {
        struct test_node *node = &nodes[i];
        if (node->pid) {
            node_reap(node, 40000);
            if (!WIFEXITED(node->exit_status) || WEXITSTATUS(node->exit_status) != 0) {
                print_error("%s ended with status %x\n", node->name, (unsigned)node->exit_status);
            }
            assert_true(WIFEXITED(node->exit_status) && WEXITSTATUS(node->exit_status) == 0);
        }
        link_close(node->serve);
        node->serve = NULL;
        node->serving = false;
    }
    WAIT_FOR(true, 1);
    for (uint32_t i = 0; i < n_nodes; i++) {
        WAIT_FOR(!nodes[i].join, 5000);
    }
    n_nodes = 0;
    for (uint32_t i = 0; i < n_requests; i++) {
        mem_free(requests[i]);
    }
    n_requests = 0;
}

int nodes_abandon(void **state)
{
    for (uint32_t i = 0; i < n_nodes; i++) {
        if (nodes[i].pid) {
            kill(nodes[i].pid, SIGKILL);
            waitpid(nodes[i].pid, NULL, 0);
            nodes[i].pid = 0;
        }
    }
    if (n_nodes) {
        nodes_end();
    }
    return 0;
}

int cluster_setup(void **state)
{
    struct error err = {""};
    static Baton__Limits limits = BATON__LIMITS__INIT;
    log_init(LOG_LEVEL_ERROR, false, NULL);
    lost_watch();
    signal(SIGPIPE, SIG_IGN);
    assert_int_equal(loop_create(&loop), STATUS_OK);
    assert_int_equal(rpc_core_create(loop, &core, &err), STATUS_OK);
    struct rpc_server_options options = {.host = "127.0.0.1"};
    assert_int_equal(rpc_server_create(core, &options, &server, &err), STATUS_OK);
    baton__hello__init(&hello);
    hello.protocol = HELLO_PROTOCOL;
    hello.node_id = (char *)"test-router";
    hello.role = BATON__ROLE__ROLE_ROUTER;
    hello.limits = &limits;
    assert_int_equal(hello_incarnation_draw(&hello.incarnation, &err), STATUS_OK);
    rpc_server_add_stream(server, "/baton.Cluster/Join", on_join, NULL);
    if (cluster_streams) {
        cluster_streams();
    }
    rpc_server_start(server);
    return 0;
}

int cluster_teardown(void **state)
{
    rpc_server_free(server);
    rpc_core_free(core);
    loop_free(loop);
    buf_fini(&packed);
    return 0;
}
