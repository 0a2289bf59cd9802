/*
 * The server side: binding, token, TLS, unknown methods, health, unary calls, and the order in
 * which things may end. Client and server are of one process here.
 */
#include "rpc_test.h"

#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/health.pb-c.h"
#include "proto/node.pb-c.h"
#include "rpc/client.h"
#include "rpc/health.h"
#include "rpc/hello.h"
#include "rpc/proto.h"
#include "rpc/server.h"

struct answer {
    bool done;
    enum status status;
    enum rpc_code code;
    char text[1200];
    uint8_t bytes[256];
    size_t n_bytes;
};

static void on_answer(void *cookie, enum status status, enum rpc_code code, const char *text,
                      const uint8_t *bytes, size_t n_bytes)
{
    struct answer *answer = cookie;
    assert_false(answer->done);
    answer->done = true;
    answer->status = status;
    answer->code = code;
    snprintf(answer->text, sizeof answer->text, "%s", text);
    answer->n_bytes = n_bytes < sizeof answer->bytes ? n_bytes : sizeof answer->bytes;
    memcpy(answer->bytes, bytes != NULL ? bytes : answer->bytes, answer->n_bytes);
}

static struct rpc_server_call *kept_call;

static void on_drain(void *cookie, struct rpc_server_call *call, const uint8_t *bytes,
                     size_t n_bytes)
{
    struct arena *arena = arena_create(0);
    ProtobufCMessage *message;
    if (proto_unpack(&baton__drain_request__descriptor, bytes, n_bytes, arena, &message, NULL) !=
        STATUS_OK) {
        rpc_server_call_fail(call, RPC_INVALID_ARGUMENT, "not a DrainRequest");
    } else if (((Baton__DrainRequest *)(void *)message)->stop) {
        kept_call = call; /* answered later, or never */
    } else {
        Baton__DrainReply reply = BATON__DRAIN_REPLY__INIT;
        struct buf out = BUF_INIT;
        reply.drained = true;
        reply.n_left = ((Baton__DrainRequest *)(void *)message)->deadline_ms;
        proto_pack(&reply.base, &out);
        rpc_server_call_reply(call, out.data, out.bytes);
        buf_fini(&out);
    }
    arena_free(arena);
}

static struct link *server_link;
static bool server_link_closed;

static void link_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    assert_int_equal(link_send(link, bytes, n_bytes), STATUS_OK);
}

static void link_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    server_link_closed = true;
}

static const struct link_events server_link_events = {
    .message = link_message,
    .closed = link_closed,
};

static void on_stream(void *cookie, struct link *link)
{
    server_link = link;
    link_attach(link, &server_link_events, NULL);
}

struct fixture {
    struct rpc_server *server;
    struct health *health;
    struct rpc_call_options call;
};

static void server_start(struct fixture *f, const char *host, struct rpc_security security)
{
    struct error err = {""};
    struct rpc_server_options options = {.host = host, .security = security};
    enum status status = rpc_server_create(core, &options, &f->server, &err);
    if (status != STATUS_OK) {
        fail_msg("%s", err.text);
    }
    f->health = health_create(f->server);
    rpc_server_add_unary(f->server, "/baton.Node/Drain", on_drain, NULL);
    rpc_server_add_stream(f->server, "/test.Peer/Serve", on_stream, NULL);
    rpc_server_start(f->server);
    f->call = (struct rpc_call_options){.host = host,
                                        .port = rpc_server_port(f->server),
                                        .method = "/baton.Node/Drain",
                                        .deadline_ns = 3 * NS_PER_S};
}

static void server_end(struct fixture *f)
{
    health_free(f->health);
    rpc_server_free(f->server);
}

static void ask(struct fixture *f, const char *method, const char *token, const void *bytes,
                size_t n_bytes, struct answer *answer)
{
    struct error err = {""};
    struct rpc_call_options options = f->call;
    options.method = method;
    options.security.token = token;
    *answer = (struct answer){.done = false};
    assert_int_equal(rpc_call_start(core, &options, bytes, n_bytes, on_answer, answer, NULL, &err),
                     STATUS_OK);
    assert_true(run_until(&answer->done, 5000));
}

static void ask_drain(struct fixture *f, const char *token, struct answer *answer)
{
    const uint8_t request[] = {0x08, 0x05}; /* deadline_ms: 5 */
    ask(f, "/baton.Node/Drain", token, request, sizeof request, answer);
}

static void assert_drain_answered(const struct answer *answer)
{
    const uint8_t want[] = {0x08, 0x01, 0x10, 0x05}; /* drained: true, n_left: 5 */
    assert_string_equal(answer->text, "finished");
    assert_int_equal(answer->status, STATUS_OK);
    assert_int_equal(answer->n_bytes, sizeof want);
    assert_memory_equal(answer->bytes, want, sizeof want);
}

static void test_unary(void **state)
{
    struct fixture f;
    struct answer answer;
    server_start(&f, "127.0.0.1", (struct rpc_security){0});
    ask_drain(&f, NULL, &answer);
    assert_drain_answered(&answer);
    ask(&f, "/baton.Node/Drain", NULL, "\xff\xff", 2, &answer);
    assert_int_equal(answer.code, RPC_INVALID_ARGUMENT);
    ask(&f, "/baton.Node/Nope", NULL, "", 0, &answer);
    assert_int_equal(answer.code, RPC_UNIMPLEMENTED);
    assert_int_equal(answer.status, STATUS_UNSUPPORTED);
    server_end(&f);
}

static void test_deadline_and_cancel(void **state)
{
    struct fixture f;
    struct answer answer = {.done = false};
    struct error err = {""};
    struct rpc_call *call;
    const uint8_t stop[] = {0x10, 0x01}; /* stop: true, so the handler keeps the call */
    server_start(&f, "127.0.0.1", (struct rpc_security){0});
    f.call.deadline_ns = 300 * NS_PER_MS;
    kept_call = NULL;
    uint64_t start_ns = loop_now_ns();
    ask(&f, "/baton.Node/Drain", NULL, stop, sizeof stop, &answer);
    uint64_t end_ns = loop_now_ns();
    assert_int_equal(answer.status, STATUS_DEADLINE);
    assert_true(end_ns - start_ns >= 290 * NS_PER_MS);
    assert_within("a deadline of 300 ms", start_ns, end_ns, 1000);
    assert_non_null(kept_call);
    run_ms(20);
    rpc_server_call_reply(kept_call, "", 0); /* to nobody: not an error */

    kept_call = NULL;
    answer.done = false;
    f.call.deadline_ns = 5 * NS_PER_S;
    assert_int_equal(
        rpc_call_start(core, &f.call, stop, sizeof stop, on_answer, &answer, &call, &err),
        STATUS_OK);
    RUN_WHILE(kept_call == NULL, 2000);
    assert_non_null(kept_call);
    rpc_call_cancel(call);
    run_ms(50);
    assert_false(answer.done);
    server_end(&f); /* the kept call is never answered: the server ends it */

    f.call.deadline_ns = 0;
    assert_int_equal(rpc_call_start(core, &f.call, "", 0, on_answer, &answer, NULL, &err),
                     STATUS_INVALID);
    /* and nobody is there any more */
    f.call.deadline_ns = NS_PER_S;
    answer.done = false;
    assert_int_equal(rpc_call_start(core, &f.call, "", 0, on_answer, &answer, NULL, &err),
                     STATUS_OK);
    assert_true(run_until(&answer.done, 3000));
    assert_int_equal(answer.status, STATUS_PEER_LOST);
}

static const uint8_t check_all[1]; /* a HealthCheckRequest of no bytes: service "" */

static void test_token(void **state)
{
    struct fixture f;
    struct answer answer;
    const char *wrong[] = {NULL, "", "s3cre", "s3cret2", "S3cret", "s3cretx"};
    server_start(&f, "127.0.0.1", (struct rpc_security){.token = "s3cret"});
    for (unsigned i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ask_drain(&f, wrong[i], &answer);
        assert_int_equal(answer.code, RPC_UNAUTHENTICATED);
        assert_int_equal(answer.status, STATUS_PEER_REFUSED);
        ask(&f, "/baton.Node/Nope", wrong[i], "", 0, &answer);
        assert_int_equal(answer.code, RPC_UNAUTHENTICATED);
        ask(&f, "/grpc.health.v1.Health/Nope", wrong[i], "", 0, &answer);
        assert_int_equal(answer.code, RPC_UNAUTHENTICATED);
        ask(&f, "//baton.Node/Drain", wrong[i], "", 0, &answer);
        assert_int_equal(answer.code, RPC_UNAUTHENTICATED);
    }
    ask_drain(&f, "s3cret", &answer);
    assert_drain_answered(&answer);
    ask(&f, "/baton.Node/Nope", "s3cret", "", 0, &answer);
    assert_int_equal(answer.code, RPC_UNIMPLEMENTED);
    ask(&f, "/grpc.health.v1.Health/Check", NULL, check_all, 0, &answer);
    assert_int_equal(answer.status, STATUS_OK);
    struct rpc_server_stats stats;
    rpc_server_stats(f.server, &stats);
    assert_int_equal(stats.n_unauthenticated, 24);
    assert_int_equal(stats.n_unimplemented, 1);
    server_end(&f);
}

/* What a link saw. */
struct seen {
    bool opened, message, closed, failed;
    enum status status;
    unsigned n_messages;
    uint8_t last[64];
    char text[1200];
};

static void seen_opened(void *cookie, struct link *link)
{
    ((struct seen *)cookie)->opened = true;
}

static void seen_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct seen *seen = cookie;
    seen->message = true;
    seen->n_messages++;
    memcpy(seen->last, bytes, n_bytes < 64 ? n_bytes : 64);
}

static void seen_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct seen *seen = cookie;
    seen->closed = true;
    seen->status = status;
    snprintf(seen->text, sizeof seen->text, "%s", text);
}

static void seen_failed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct seen *seen = cookie;
    seen->failed = true;
    seen->status = status;
    snprintf(seen->text, sizeof seen->text, "%s", text);
}

static const struct link_events seen_events = {
    .opened = seen_opened,
    .message = seen_message,
    .closed = seen_closed,
    .failed = seen_failed,
};

static struct link *link_to(struct fixture *f, const char *method, struct rpc_security security,
                            struct seen *seen)
{
    struct link_options options = {
        .host = f->call.host, .port = f->call.port, .method = method, .security = security};
    struct error err = {""};
    struct link *link;
    *seen = (struct seen){.opened = false};
    assert_int_equal(link_connect(core, &options, &seen_events, seen, &link, &err), STATUS_OK);
    return link;
}

static void test_link_refused(void **state)
{
    struct fixture f;
    struct seen seen;
    server_start(&f, "127.0.0.1", (struct rpc_security){.token = "s3cret"});
    struct link *link = link_to(&f, "/test.Peer/Serve", (struct rpc_security){0}, &seen);
    assert_true(run_until(&seen.failed, 3000));
    assert_false(seen.opened);
    assert_int_equal(seen.status, STATUS_PEER_REFUSED);
    assert_non_null(strstr(seen.text, "token"));
    link_close(link);
    link = link_to(&f, "/test.Peer/Nope", (struct rpc_security){.token = "s3cret"}, &seen);
    assert_true(run_until(&seen.failed, 3000));
    assert_int_equal(seen.status, STATUS_UNSUPPORTED);
    link_close(link);
    /* a unary method dialled as a link, and left alone: no message is not an answer */
    link = link_to(&f, "/test.Peer/Serve", (struct rpc_security){.token = "s3cret"}, &seen);
    assert_true(run_until(&seen.opened, 3000));
    server_link_closed = false;
    link_close(link);
    assert_true(run_until(&server_link_closed, 3000));
    link_close(server_link);
    server_end(&f);
}

/* Calls at once are bounded: those with the token by the option, those of health by themselves. */
static void test_bounds(void **state)
{
    enum { N_HEALTH = 64, MAX_CALLS = 70 };
    struct error err = {""};
    struct fixture f = {.server = NULL};
    struct answer answer;
    struct rpc_server_options options = {
        .host = "127.0.0.1", .max_calls = MAX_CALLS, .security.token = "t"};
    assert_int_equal(rpc_server_create(core, &options, &f.server, &err), STATUS_OK);
    f.health = health_create(f.server);
    rpc_server_add_stream(f.server, "/test.Peer/Serve", on_stream, NULL);
    rpc_server_start(f.server);
    f.call = (struct rpc_call_options){
        .host = "127.0.0.1", .port = rpc_server_port(f.server), .deadline_ns = 3 * NS_PER_S};

    struct seen seen[N_HEALTH], guarded[10];
    struct link *watchers[N_HEALTH], *links[10], *accepted[10];
    for (unsigned i = 0; i < N_HEALTH; i++) {
        watchers[i] =
            link_to(&f, "/grpc.health.v1.Health/Watch", (struct rpc_security){0}, &seen[i]);
        assert_true(run_until(&seen[i].opened, 3000));
    }
    ask(&f, "/grpc.health.v1.Health/Check", NULL, check_all, 0, &answer);
    assert_int_equal(answer.code, RPC_RESOURCE_EXHAUSTED);
    unsigned n_links = MAX_CALLS - N_HEALTH; /* these are not in the way of others */
    for (unsigned i = 0; i < n_links; i++) {
        links[i] =
            link_to(&f, "/test.Peer/Serve", (struct rpc_security){.token = "t"}, &guarded[i]);
        assert_true(run_until(&guarded[i].opened, 3000));
        accepted[i] = server_link;
    }
    struct seen one_more;
    struct link *link =
        link_to(&f, "/test.Peer/Serve", (struct rpc_security){.token = "t"}, &one_more);
    assert_true(run_until(&one_more.failed, 3000));
    assert_int_equal(one_more.status, STATUS_EXHAUSTED);
    link_close(watchers[0]);
    assert_true(run_until(&one_more.opened, 5000)); /* it dials again by itself */
    link_close(server_link);
    link_close(link);
    for (unsigned i = 0; i < n_links; i++) {
        link_close(links[i]);
        link_close(accepted[i]);
    }
    for (unsigned i = 1; i < N_HEALTH; i++) {
        link_close(watchers[i]);
    }
    server_end(&f);
}

/* Pausing holds a message that was read already, and the end of the stream behind it. */
static void test_pause(void **state)
{
    struct fixture f;
    struct seen seen;
    server_start(&f, "127.0.0.1", (struct rpc_security){0});
    struct link *link = link_to(&f, "/test.Peer/Serve", (struct rpc_security){0}, &seen);
    assert_true(run_until(&seen.opened, 3000));
    link_pause(link, true);
    for (unsigned i = 0; i < 10; i++) {
        assert_int_equal(link_send(link, "abc", 3), STATUS_OK);
    }
    link_finish(link); /* the server echoes, sees our end and finishes too */
    run_ms(200);
    assert_int_equal(seen.n_messages, 0);
    assert_false(seen.closed);
    link_pause(link, false);
    assert_true(run_until(&seen.closed, 3000));
    assert_int_equal(seen.n_messages, 10);
    assert_int_equal(seen.status, STATUS_OK);
    link_close(link);
    link_close(server_link);
    server_end(&f);
}

static void test_ports(void **state)
{
    struct fixture f, v6;
    struct answer answer;
    struct error err = {""};
    struct rpc_server *second;
    server_start(&f, "127.0.0.1", (struct rpc_security){0});
    struct rpc_server_options options = {.host = "127.0.0.1", .port = rpc_server_port(f.server)};
    assert_int_equal(rpc_server_create(core, &options, &second, &err), STATUS_EXISTS);
    print_message("%s\n", err.text);
    char port_text[8];
    snprintf(port_text, sizeof port_text, "%u", rpc_server_port(f.server));
    assert_non_null(strstr(err.text, port_text));
    options.host = "0.0.0.0"; /* includes the address that is taken */
    assert_int_equal(rpc_server_create(core, &options, &second, &err), STATUS_EXISTS);
    options.host = "no-such-host.invalid";
    assert_int_equal(rpc_server_create(core, &options, &second, &err), STATUS_NOT_FOUND);
    server_end(&f);

    server_start(&v6, "::1", (struct rpc_security){0});
    ask_drain(&v6, NULL, &answer);
    assert_drain_answered(&answer);
    v6.call.host = "127.0.0.1"; /* bound to ::1 only */
    ask_drain(&v6, NULL, &answer);
    assert_int_equal(answer.status, STATUS_PEER_LOST);
    server_end(&v6);

    server_start(&f, "::", (struct rpc_security){0});
    f.call.host = "127.0.0.1";
    ask_drain(&f, NULL, &answer);
    assert_drain_answered(&answer);
    f.call.host = "::1";
    ask_drain(&f, NULL, &answer);
    assert_drain_answered(&answer);
    f.call.host = "localhost";
    ask_drain(&f, NULL, &answer);
    assert_drain_answered(&answer);
    server_end(&f);
}

static char *file_read(const char *folder, const char *name)
{
    char path[512];
    static char text[16384];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = '\0';
    return mem_strdup(text);
}

static void shell(const char *folder, const char *command)
{
    char line[1024];
    snprintf(line, sizeof line, "cd %s && { %s; } >/dev/null 2>&1", folder, command);
    assert_int_equal(system(line), 0);
}

/* Certificates are made before gRPC starts: it must not be running across a fork. */
static char certificates[] = "/tmp/baton-test-rpc-XXXXXX";

static void certificates_make(void)
{
    assert_non_null(mkdtemp(certificates));
    shell(certificates, "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out "
                        "cert.pem -subj /CN=baton-test -addext subjectAltName=DNS:baton.test");
    shell(certificates, "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key2.pem -out "
                        "cert2.pem -subj /CN=other -addext subjectAltName=DNS:baton.test");
}

static void test_tls(void **state)
{
    char *cert = file_read(certificates, "cert.pem"), *key = file_read(certificates, "key.pem");
    char *cert2 = file_read(certificates, "cert2.pem"), *key2 = file_read(certificates, "key2.pem");
    struct fixture f;
    struct answer answer;
    server_start(&f, "127.0.0.1",
                 (struct rpc_security){.tls_cert = cert, .tls_key = key, .token = "t"});
    f.call.security = (struct rpc_security){.tls_ca = cert, .tls_name = "baton.test"};
    ask_drain(&f, "t", &answer);
    assert_drain_answered(&answer);
    ask_drain(&f, "u", &answer);
    assert_int_equal(answer.code, RPC_UNAUTHENTICATED);
    f.call.security.tls_ca = cert2; /* signed by somebody else */
    ask_drain(&f, "t", &answer);
    assert_int_equal(answer.status, STATUS_PEER_LOST);
    f.call.security = (struct rpc_security){.tls_ca = cert, .tls_name = "other.test"};
    ask_drain(&f, "t", &answer);
    assert_int_equal(answer.status, STATUS_PEER_LOST);
    f.call.security = (struct rpc_security){0}; /* plain text to a tls port */
    ask_drain(&f, "t", &answer);
    assert_int_equal(answer.status, STATUS_PEER_LOST);
    server_end(&f);

    /* both show certificates */
    server_start(&f, "127.0.0.1",
                 (struct rpc_security){.tls_ca = cert2, .tls_cert = cert, .tls_key = key});
    f.call.security = (struct rpc_security){
        .tls_ca = cert, .tls_name = "baton.test", .tls_cert = cert2, .tls_key = key2};
    ask_drain(&f, NULL, &answer);
    assert_drain_answered(&answer);
    f.call.security.tls_cert = f.call.security.tls_key = NULL;
    ask_drain(&f, NULL, &answer);
    assert_int_equal(answer.status, STATUS_PEER_LOST);
    server_end(&f);

    struct error err = {""};
    struct rpc_server *bad;
    struct rpc_server_options options = {.host = "127.0.0.1", .security = {.tls_cert = cert}};
    assert_int_equal(rpc_server_create(core, &options, &bad, &err), STATUS_INVALID);
    options.security.tls_key = key2; /* not the certificate's */
    assert_int_equal(rpc_server_create(core, &options, &bad, &err), STATUS_INVALID);
    print_message("%s\n", err.text);
    options.security = (struct rpc_security){.token = "with space"};
    assert_int_equal(rpc_server_create(core, &options, &bad, &err), STATUS_INVALID);
    mem_free(cert);
    mem_free(key);
    mem_free(cert2);
    mem_free(key2);
}

static void test_health(void **state)
{
    struct fixture f;
    struct answer answer;
    struct seen seen;
    const uint8_t serving[] = {0x08, 0x01}, not_serving[] = {0x08, 0x02}, unknown[] = {0x08, 0x03};
    const uint8_t ask_x[] = {0x0a, 0x01, 'x'}, ask_nul[] = {0x0a, 0x01, 0};
    server_start(&f, "127.0.0.1", (struct rpc_security){0});
    ask(&f, "/grpc.health.v1.Health/Check", NULL, check_all, 0, &answer);
    assert_int_equal(answer.status, STATUS_OK);
    assert_memory_equal(answer.bytes, not_serving, 2);
    health_set(f.health, "", true);
    ask(&f, "/grpc.health.v1.Health/Check", NULL, check_all, 0, &answer);
    assert_memory_equal(answer.bytes, serving, 2);
    ask(&f, "/grpc.health.v1.Health/Check", NULL, ask_x, sizeof ask_x, &answer);
    assert_int_equal(answer.code, RPC_NOT_FOUND);
    ask(&f, "/grpc.health.v1.Health/Check", NULL, ask_nul, sizeof ask_nul, &answer);
    assert_int_equal(answer.code, RPC_INVALID_ARGUMENT);

    struct link *watch =
        link_to(&f, "/grpc.health.v1.Health/Watch", (struct rpc_security){0}, &seen);
    assert_true(run_until(&seen.opened, 3000));
    assert_int_equal(link_send(watch, ask_x, sizeof ask_x), STATUS_OK);
    assert_true(run_until(&seen.message, 3000));
    assert_memory_equal(seen.last, unknown, 2);
    seen.message = false;
    health_set(f.health, "x", true);
    assert_true(run_until(&seen.message, 3000));
    assert_memory_equal(seen.last, serving, 2);
    health_set(f.health, "x", true); /* no change, no message */
    health_set(f.health, "x", false);
    RUN_WHILE(seen.n_messages < 3, 1000);
    assert_int_equal(seen.n_messages, 3);
    assert_memory_equal(seen.last, not_serving, 2);
    server_end(&f); /* with a watcher open */
    assert_true(run_until(&seen.closed, 3000));
    link_close(watch);
}

/* Everything is open when everything ends, in both orders; and all comes back. */
static void test_end(void **state)
{
    for (unsigned order = 0; order < 2; order++) {
        struct fixture f;
        struct seen seen[20];
        struct link *links[20];
        struct link *accepted[20];
        server_start(&f, "127.0.0.1", (struct rpc_security){0});
        for (unsigned i = 0; i < 20; i++) {
            links[i] = link_to(&f, "/test.Peer/Serve", (struct rpc_security){0}, &seen[i]);
            assert_true(run_until(&seen[i].opened, 3000));
            accepted[i] = server_link;
            assert_int_equal(link_send(links[i], "abc", 3), STATUS_OK);
        }
        if (order == 0) {
            server_end(&f);
            run_ms(50);
        }
        for (unsigned i = 0; i < 20; i++) {
            link_close(accepted[i]);
            link_close(links[i]);
        }
        if (order == 1) {
            rpc_server_stop(f.server);
            run_ms(20);
            server_end(&f);
        }
        RUN_WHILE(rpc_core_n_live(core) > 0, 2000);
        assert_int_equal(rpc_core_n_live(core), 0);
    }
}

static void test_hello(void **state)
{
    uint8_t a[16] = {1}, b[16] = {2};
    Baton__Hello mine = BATON__HELLO__INIT, theirs = BATON__HELLO__INIT;
    struct error err = {""};
    mine.node_id = (char *)"router-0";
    theirs.node_id = (char *)"decode-1";
    mine.protocol = theirs.protocol = HELLO_PROTOCOL;
    mine.role = BATON__ROLE__ROLE_ROUTER;
    theirs.role = BATON__ROLE__ROLE_DECODE;
    mine.incarnation = 1;
    theirs.incarnation = 2;
    theirs.fingerprint = (ProtobufCBinaryData){16, a};
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_OK);
    mine.fingerprint = (ProtobufCBinaryData){16, b};
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_PEER_REFUSED);
    mine.fingerprint = (ProtobufCBinaryData){15, a};
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_PEER_REFUSED);
    mine.fingerprint = (ProtobufCBinaryData){16, a};
    theirs.protocol = 7;
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_PEER_REFUSED);
    assert_non_null(strstr(err.text, "router-0 speaks 2, decode-1 speaks 7"));
    theirs.protocol = HELLO_PROTOCOL;
    theirs.incarnation = 1;
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_PEER_REFUSED);
    theirs.incarnation = 0;
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_CORRUPT);
    theirs.incarnation = 2;
    theirs.node_id = (char *)"a b";
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_CORRUPT);
    theirs.node_id = (char *)"";
    assert_int_equal(hello_check(&mine, &theirs, &err), STATUS_CORRUPT);
    uint64_t x, y;
    assert_int_equal(hello_incarnation_draw(&x, &err), STATUS_OK);
    assert_int_equal(hello_incarnation_draw(&y, &err), STATUS_OK);
    assert_true(x != y && x != 0);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    setenv("http_proxy", "http://127.0.0.1:9", 1); /* must not be asked */
    log_init(LOG_LEVEL_ERROR, false, NULL);
    certificates_make();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_unary, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deadline_and_cancel, setup, teardown),
        cmocka_unit_test_setup_teardown(test_token, setup, teardown),
        cmocka_unit_test_setup_teardown(test_link_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_bounds, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pause, setup, teardown),
        cmocka_unit_test_setup_teardown(test_ports, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tls, setup, teardown),
        cmocka_unit_test_setup_teardown(test_health, setup, teardown),
        cmocka_unit_test_setup_teardown(test_end, setup, teardown),
        cmocka_unit_test(test_hello),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    for (const char *const *name =
             (const char *const[]){"cert.pem", "key.pem", "cert2.pem", "key2.pem", NULL};
         *name != NULL; name++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", certificates, *name);
        unlink(path);
    }
    rmdir(certificates);
    return rc;
}
