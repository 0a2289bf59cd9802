/*
 * The HTTP server alone.
 *
 *     bench_httpd serve PORT                    answers GET /hello, for a load generator
 *     bench_httpd streams N TOKENS INTERVAL_MS  N clients of one event stream each, all given a
 *                                               token each interval; server and clients are two
 *                                               processes
 *
 * `streams` prints what the server spent a stream and a token, what the clients received, and the
 * longest time between two tokens of one client against the interval: a floor that holds on any
 * machine that keeps up.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/httpd.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/service.h"

enum {
    READ_BYTES = 65536,
};

/* --- server --- */

struct server {
    struct loop *loop;
    struct httpd *httpd;
    struct loop_timer *beat;
    struct httpd_request **streams;
    size_t n;
    size_t n_wanted;
    size_t tokens_left;
    uint64_t interval_ns;
    long rss_empty_kib;
};

static long rss_kib(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    if (!file || fscanf(file, "%*d %ld", &pages) != 1) {
        pages = 0;
    }
    if (file) {
        fclose(file);
    }
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static double cpu_seconds(void)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void on_hello(void *cookie, struct httpd_request *request)
{
    httpd_reply(request, 200, "text/plain", "hello", 5);
}

static void on_close(void *cookie, struct httpd_request *request)
{
    fprintf(stderr, "a client left early\n");
    exit(1);
}

static void on_stopped(void *cookie)
{
    loop_stop(((struct server *)cookie)->loop);
}

static void on_beat(void *cookie)
{
    static const char token[] =
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n";
    struct server *server = cookie;

    server->tokens_left--;
    if (server->tokens_left > 0) {
        loop_timer_arm(server->beat, server->interval_ns);
    }
    for (size_t i = 0; i < server->n; i++) {
        if (httpd_stream_write(server->streams[i], token, sizeof(token) - 1) != STATUS_OK) {
            exit(1);
        }
        if (server->tokens_left == 0) {
            httpd_stream_end(server->streams[i]);
        }
    }
    if (server->tokens_left == 0) {
        printf("server: %.2f KiB of memory a stream, %.2f s of CPU in all\n",
               (double)(rss_kib() - server->rss_empty_kib) / (double)server->n, cpu_seconds());
        fflush(stdout);
        httpd_stop(server->httpd, on_stopped, server);
    }
}

static void on_stream(void *cookie, struct httpd_request *request)
{
    struct server *server = cookie;

    httpd_request_on_close(request, on_close, server);
    httpd_stream_start(request, 200, "text/event-stream");
    server->streams[server->n++] = request;
    if (server->n == server->n_wanted) {
        loop_timer_arm(server->beat, server->interval_ns);
    }
}

static void server_create(struct server *server, uint16_t port)
{
    struct httpd_config config;
    struct error err = {.text = "no loop"};

    httpd_config_init(&config);
    config.port = port;
    config.max_connections = 100000;
    if (loop_create(&server->loop) != STATUS_OK ||
        httpd_create(server->loop, &config, &err, &server->httpd) != STATUS_OK) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    httpd_route_add(server->httpd, &(struct httpd_route){HTTPD_GET, "/hello", 0, on_hello, NULL});
    httpd_route_add(server->httpd,
                    &(struct httpd_route){HTTPD_GET, "/stream", 0, on_stream, server});
    server->beat = loop_timer_create(server->loop, on_beat, server);
}

static int server_run(struct server *server)
{
    server->rss_empty_kib = rss_kib();
    return loop_run(server->loop) == STATUS_OK ? 0 : 1;
}

/* --- clients --- */

struct client {
    int fd;
    size_t n_tokens;
    uint64_t last_ns;
    uint64_t gap_max_ns;
};

static int client_connect(uint16_t port)
{
    static const char ask[] = "GET /stream HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\n"
                              "Accept: text/event-stream\r\nConnection: close\r\n\r\n";
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
        send(fd, ask, sizeof(ask) - 1, 0) != (ssize_t)(sizeof(ask) - 1)) {
        perror("client");
        exit(1);
    }
    return fd;
}

static size_t tokens_in(const char *text, size_t n)
{
    size_t count = 0;
    const char *end = text + n;

    while ((text = memmem(text, (size_t)(end - text), "data: ", 6))) {
        count++;
        text += 6;
    }
    return count;
}

static int clients_run(uint16_t port, size_t n, size_t tokens, uint64_t interval_ns)
{
    static char text[READ_BYTES + 1];
    struct client *clients = mem_array(n, sizeof(*clients));
    struct epoll_event events[512];
    uint64_t start = loop_now_ns();
    uint64_t gap_max = 0;
    size_t total = 0;
    size_t open = n;
    int ep = epoll_create1(0);

    for (size_t i = 0; i < n; i++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[i]};

        clients[i].fd = client_connect(port);
        epoll_ctl(ep, EPOLL_CTL_ADD, clients[i].fd, &event);
    }
    printf("clients: %zu connected in %.2f s\n", n, (double)(loop_now_ns() - start) / 1e9);
    while (open > 0) {
        int ready = epoll_wait(ep, events, 512, -1);

        for (int i = 0; i < ready; i++) {
            struct client *client = events[i].data.ptr;
            ssize_t got = recv(client->fd, text, READ_BYTES, 0);
            uint64_t now = loop_now_ns();
            size_t seen;

            if (got <= 0) {
                close(client->fd);
                open--;
                continue;
            }
            seen = tokens_in(text, (size_t)got); /* a write of the server is one segment here */
            if (seen > 0) {
                if (client->last_ns && now - client->last_ns > gap_max) {
                    gap_max = now - client->last_ns;
                }
                client->last_ns = now;
                total += seen;
            }
        }
    }
    printf("clients: %zu of %zu tokens; longest gap %.2f intervals\n", total, n * tokens,
           (double)gap_max / (double)interval_ns);
    mem_free(clients);
    close(ep);
    return total == n * tokens ? 0 : 1;
}

static int streams(size_t n, size_t tokens, uint64_t interval_ns)
{
    struct server server = {.n_wanted = n, .tokens_left = tokens, .interval_ns = interval_ns};
    int status = 1;
    int rc;
    pid_t child;

    server.streams = mem_array(n, sizeof(*server.streams));
    server_create(&server, 0);
    fflush(stdout);
    child = fork();
    if (child == 0) {
        _exit(server_run(&server));
    }
    rc = clients_run(httpd_port(server.httpd), n, tokens, interval_ns);
    waitpid(child, &status, 0);
    return rc ? rc : !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv)
{
    service_init();
    if (argc == 3 && strcmp(argv[1], "serve") == 0) {
        struct server server = {.n = 0};

        server_create(&server, (uint16_t)atoi(argv[2]));
        printf("serving on http://%s/hello\n", httpd_address(server.httpd));
        fflush(stdout);
        return server_run(&server);
    }
    if (argc == 5 && strcmp(argv[1], "streams") == 0) {
        return streams((size_t)atoi(argv[2]), (size_t)atoi(argv[3]),
                       (uint64_t)atoi(argv[4]) * NS_PER_MS);
    }
    fprintf(stderr, "usage: bench_httpd serve PORT | streams N TOKENS INTERVAL_MS\n");
    return 2;
}
