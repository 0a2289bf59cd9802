/*
 * The other process of test_link: a server with one stream method. Says its port on standard
 * output. What it does with the messages is told by the first byte of the first one:
 *   'e' echoes everything; 'c' expects numbers 1, 2, 3 ... and answers each 'end' with how many;
 *   'p' reads nothing for two seconds, then as 'c'; 'r' refuses the link by a hello_check that
 *   fails; 'f' answers and finishes; 'h' hangs (never answers, the loop sleeps).
 * With "dial PORT" it is a client that dials the parent's server and says "e"; with "talk PORT" it
 * goes on with 300 bytes every 10 ms.
 * argv: port, token. The incarnation in the hello is the process id. Health says that "" serves,
 * and "flip" changes every 100 ms.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "rpc/health.h"
#include "rpc/hello.h"
#include "rpc/server.h"

static struct loop *loop;

struct peer {
    struct link *link;
    struct loop_timer *timer;
    char mode;
    uint32_t next;
    bool in_order;
};

static void say(struct peer *peer, const char *text)
{
    if (link_send(peer->link, text, strlen(text)) != STATUS_OK) {
        fprintf(stderr, "link_peer: an answer was not taken\n");
    }
}

static void refuse(struct peer *peer)
{
    uint8_t a[16] = {1, 2, 3, 4, 5, 6, 7, 8}, b[16] = {9, 10, 11, 12};
    Baton__Hello mine = BATON__HELLO__INIT, theirs = BATON__HELLO__INIT;
    mine.node_id = (char *)"decode-0";
    mine.protocol = theirs.protocol = HELLO_PROTOCOL;
    mine.role = theirs.role = BATON__ROLE__ROLE_DECODE;
    mine.incarnation = 1;
    theirs.incarnation = 2;
    theirs.node_id = (char *)"prefill-0";
    mine.fingerprint = (ProtobufCBinaryData){16, a};
    theirs.fingerprint = (ProtobufCBinaryData){16, b};
    struct error err = {""};
    if (hello_check(&mine, &theirs, &err) != STATUS_PEER_REFUSED) {
        abort();
    }
    link_refuse(peer->link, err.text);
    loop_timer_free(peer->timer);
    mem_free(peer);
}

static void on_resume(void *cookie)
{
    struct peer *peer = cookie;
    link_pause(peer->link, false);
}

static void on_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
    struct peer *peer = cookie;
    if (peer->mode == 0) {
        peer->mode = n_bytes > 0 ? (char)bytes[0] : 'e';
        char text[64];
        snprintf(text, sizeof text, "hello %d", (int)getpid());
        if (peer->mode == 'r') {
            refuse(peer);
            return;
        }
        if (peer->mode == 'h') {
            sleep(60);
        }
        say(peer, text);
        if (peer->mode == 'p') {
            link_pause(link, true);
            loop_timer_arm(peer->timer, 2 * NS_PER_S);
        } else if (peer->mode == 'f') {
            link_finish(link);
        }
        return;
    }
    if (peer->mode == 'e') {
        if (link_send(link, bytes, n_bytes) != STATUS_OK) {
            fprintf(stderr, "link_peer: echo queue is full\n");
        }
        return;
    }
    if (n_bytes == 3 && memcmp(bytes, "end", 3) == 0) {
        char text[64];
        snprintf(text, sizeof text, "%u %s", peer->next, peer->in_order ? "in order" : "mixed up");
        say(peer, text);
        return;
    }
    peer->in_order = peer->in_order && n_bytes >= 4 && get_le32(bytes) == peer->next + 1;
    peer->next++;
}

static void on_closed(void *cookie, struct link *link, enum status status, const char *text)
{
    struct peer *peer = cookie;
    link_close(link);
    loop_timer_free(peer->timer);
    mem_free(peer);
}

static const struct link_events events = {.message = on_message, .closed = on_closed};

static void on_stream(void *cookie, struct link *link)
{
    struct peer *peer = mem_zalloc(sizeof *peer);
    peer->link = link;
    peer->in_order = true;
    peer->timer = loop_timer_create(loop, on_resume, peer);
    link_attach(link, &events, peer);
}

static struct loop_timer *talk_timer;

static void on_talk(void *cookie)
{
    struct link *const *link = cookie;
    uint8_t bytes[300] = {0};
    if (link_is_open(*link) && link_send(*link, bytes, sizeof bytes) == STATUS_OK) {
        loop_timer_arm(talk_timer, NS_PER_S / 100);
    }
}

static void dial_opened(void *cookie, struct link *link)
{
    if (link_send(link, "e", 1) != STATUS_OK) {
        fprintf(stderr, "link_peer: the first message was not taken\n");
    }
    if (talk_timer) {
        loop_timer_arm(talk_timer, NS_PER_S / 100);
    }
}

static void dial_message(void *cookie, struct link *link, const uint8_t *bytes, size_t n_bytes)
{
}

static void dial_closed(void *cookie, struct link *link, enum status status, const char *text)
{
}

static const struct link_events dial_events = {
    .opened = dial_opened,
    .message = dial_message,
    .closed = dial_closed,
};

static int dial(struct rpc_core *core, uint16_t port, bool talk)
{
    struct link *link;
    talk_timer = talk ? loop_timer_create(loop, on_talk, &link) : NULL;
    struct error err = {""};
    struct link_options options = {
        .host = "127.0.0.1", .port = port, .method = "/test.Parent/Serve"};
    if (link_connect(core, &options, &dial_events, NULL, &link, &err) != STATUS_OK) {
        fprintf(stderr, "link_peer: %s\n", err.text);
        return 1;
    }
    printf("%u\n", port);
    fflush(stdout);
    return loop_run(loop) == STATUS_OK ? 0 : 1;
}

static struct health *health;
static struct loop_timer *flip_timer;

static void on_flip(void *cookie)
{
    static bool serving;
    serving = !serving;
    health_set(health, "flip", serving);
    loop_timer_arm(flip_timer, NS_PER_S / 10);
}

int main(int argc, char **argv)
{
    struct rpc_core *core;
    struct rpc_server *server;
    struct error err = {""};
    struct rpc_server_options options = {.host = "127.0.0.1",
                                         .port = (uint16_t)(argc > 1 ? atoi(argv[1]) : 0),
                                         .security.token = argc > 2 ? argv[2] : NULL};
    log_init(LOG_LEVEL_ERROR, false, "peer");
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when the test fails while this process is stopped */
    if (loop_create(&loop) != STATUS_OK || rpc_core_create(loop, &core, &err) != STATUS_OK) {
        fprintf(stderr, "link_peer: %s\n", err.text);
        return 1;
    }
    if (argc > 2 && (strcmp(argv[1], "dial") == 0 || strcmp(argv[1], "talk") == 0)) {
        return dial(core, (uint16_t)atoi(argv[2]), argv[1][0] == 't');
    }
    if (rpc_server_create(core, &options, &server, &err) != STATUS_OK) {
        fprintf(stderr, "link_peer: %s\n", err.text);
        return 1;
    }
    rpc_server_add_stream(server, "/test.Peer/Serve", on_stream, NULL);
    health = health_create(server);
    health_set(health, "", true);
    flip_timer = loop_timer_create(loop, on_flip, NULL);
    on_flip(NULL);
    rpc_server_start(server);
    printf("%u\n", rpc_server_port(server));
    fflush(stdout);
    return loop_run(loop) == STATUS_OK ? 0 : 1;
}
