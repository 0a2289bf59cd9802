/* Load on a running router, over real sockets: what it adds, what it takes, what it delivers.
 *
 *   bench_router closed PORT CONNECTIONS SECONDS [PID...]
 *                       most requests a second: each connection asks again at once
 *   bench_router open PORT RATE SECONDS [PID...]
 *                       a request every 1/RATE s, whatever the answers do
 *   bench_router streams PORT STREAMS TOKENS [PID...]
 *                       that many event streams of TOKENS tokens each
 *
 * One thread, one epoll: it must be given a core of its own, as the router one of its own. Latency
 * is counted from the moment a request was due, so that a stall shows in every request that it
 * delayed. `added` is the time at the client less what the decode node itself reports in
 * Server-Timing (its queue, prefill, transfer): what router, HTTP and the links to it cost. Of each
 * PID the CPU time is printed, which other work on the machine disturbs less than the clock on the
 * wall; with streams also the memory that each of them took.
 */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/loop.h"
#include "base/mem.h"

enum { BUFFER_BYTES = 16384, MAX_CONNECTIONS = 20000, MAX_SAMPLES = 4000000, MAX_PIDS = 16 };

struct connection {
    int fd;
    bool busy, is_stream;
    uint64_t due_ns, first_ns, last_ns;
    uint32_t n_tokens; /* of this stream */
    size_t n_bytes;    /* of the answer in data */
    char *data;
};

static struct connection *connections;
static int n_connections, epoll_fd;
static int pids[MAX_PIDS], n_pids;
static double before_s[MAX_PIDS];
static char request_text[4096];
static int request_bytes;
static float *latencies_ms, *added_ms, *gaps_ms;
static size_t n_latencies, n_added, n_gaps;
static uint64_t n_done, n_errors, n_tokens, n_events, n_short;
/* streams: the time in which all of them run, and what came in it */
static uint64_t all_started_ns, first_end_ns, steady_ns, n_steady;
static int n_started;
static uint32_t n_stream_tokens;

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void connection_open(struct connection *connection, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection->fd < 0 ||
        connect(connection->fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        die("connect");
    }
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    fcntl(connection->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, connection->fd, &event) < 0) {
        die("epoll_ctl");
    }
    connection->data = mem_alloc(BUFFER_BYTES);
}

static void connection_ask(struct connection *connection, uint64_t due_ns)
{
    connection->busy = true;
    connection->due_ns = due_ns;
    connection->n_bytes = 0;
    connection->n_tokens = 0;
    connection->first_ns = 0;
    if (write(connection->fd, request_text, (size_t)request_bytes) != request_bytes) {
        die("write");
    }
}

static void note(float *list, size_t *n, double ms)
{
    if (*n < MAX_SAMPLES) {
        list[(*n)++] = (float)ms;
    }
}

/* One part of the head's Server-Timing; 0 where it is missing. */
static double part_ms(const char *head, const char *name)
{
    const char *part = strcasestr(head, name);
    return part ? strtod(part + strlen(name), NULL) : 0;
}

/* The answer of a request that does not stream, once it is whole. */
static void answer_check(struct connection *connection, uint64_t now_ns)
{
    char *head_end = memmem(connection->data, connection->n_bytes, "\r\n\r\n", 4);
    if (!head_end) {
        return;
    }
    *head_end = 0;
    const char *length = strcasestr(connection->data, "\ncontent-length:");
    size_t head = (size_t)(head_end - connection->data) + 4;
    size_t body = length ? strtoul(length + 16, NULL, 10) : 0;
    if (connection->n_bytes < head + body) {
        *head_end = '\r';
        return;
    }
    double ms = (double)(now_ns - connection->due_ns) * 1e-6;
    note(latencies_ms, &n_latencies, ms);
    if (strcasestr(connection->data, "\nserver-timing:")) {
        note(added_ms, &n_added,
             ms - part_ms(connection->data, "queue;dur=") -
                 part_ms(connection->data, "prefill;dur=") -
                 part_ms(connection->data, "transfer;dur="));
    }
    n_errors += strncmp(connection->data + 9, "200", 3) != 0;
    n_done++;
    connection->busy = false;
}

/* Characters of an event's text. The sim engine's tokens are one printable character each, so these
 * are its tokens, however many of them share an event. */
static uint32_t event_characters(const char *at, const char *end)
{
    static const char mark[] = "content\":\""; /* also of reasoning_content */
    uint32_t n = 0;
    while ((at = memmem(at, (size_t)(end - at), mark, sizeof(mark) - 1)) != NULL) {
        for (at += sizeof(mark) - 1; at < end && *at != '"'; n++) {
            at += *at != '\\' ? 1 : at + 1 < end && at[1] == 'u' ? 6 : 2;
        }
        at = at < end ? at : end;
    }
    return n;
}

static void stream_line(struct connection *connection, const char *line, const char *end,
                        uint64_t now_ns)
{
    if (end - line < 7 || memcmp(line, "data: ", 6) != 0) {
        return;
    }
    if (line[6] == '[') {
        n_done++;
        connection->busy = false;
        first_end_ns = first_end_ns ? first_end_ns : now_ns;
        n_short += connection->n_tokens != n_stream_tokens;
        return;
    }
    uint32_t n = event_characters(line, end);
    if (n == 0) {
        return; /* role, finish reason */
    }
    n_events++;
    connection->n_tokens += n;
    n_tokens += n;
    if (!connection->first_ns) {
        connection->first_ns = now_ns;
        if (++n_started == n_connections) {
            all_started_ns = now_ns;
        }
    } else {
        note(gaps_ms, &n_gaps, (double)(now_ns - connection->last_ns) * 1e-6);
    }
    connection->last_ns = now_ns;
    if (all_started_ns && !first_end_ns) {
        n_steady += n;
        steady_ns = now_ns;
    }
}

/* Whole lines are looked at, the rest is kept for the next read. */
static void stream_read(struct connection *connection, size_t n, uint64_t now_ns)
{
    char *at = connection->data, *end = connection->data + connection->n_bytes + n, *newline;
    while ((newline = memchr(at, '\n', (size_t)(end - at))) != NULL) {
        stream_line(connection, at, newline, now_ns);
        at = newline + 1;
    }
    connection->n_bytes = (size_t)(end - at);
    memmove(connection->data, at, connection->n_bytes);
}

static bool connection_read(struct connection *connection)
{
    ssize_t n = read(connection->fd, connection->data + connection->n_bytes,
                     BUFFER_BYTES - connection->n_bytes);
    if (n < 0 && errno == EAGAIN) {
        return true;
    }
    if (n <= 0) {
        n_errors++;
        connection->busy = false;
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
        return false;
    }
    uint64_t now_ns = loop_now_ns();
    if (connection->is_stream) {
        stream_read(connection, (size_t)n, now_ns);
    } else {
        connection->n_bytes += (size_t)n;
        answer_check(connection, now_ns);
    }
    return true;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void print_quantiles(const char *name, float *list, size_t n)
{
    if (n == 0) {
        printf("%-10s nothing measured\n", name);
        return;
    }
    qsort(list, n, sizeof(*list), by_value);
    printf("%-10s p50 %8.3f  p90 %8.3f  p99 %8.3f  p99.9 %8.3f  max %8.3f ms  (%zu)\n", name,
           list[n / 2], list[n * 9 / 10], list[n * 99 / 100], list[n * 999 / 1000], list[n - 1], n);
}

/* CPU time of all threads of a process that live now, to the nanosecond. */
static double cpu_seconds(int pid)
{
    char path[64];
    double sum_s = 0;
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    struct dirent *thread;
    while (threads && (thread = readdir(threads)) != NULL) {
        char name[sizeof(path) + sizeof(thread->d_name) + 16];
        unsigned long long ns;
        snprintf(name, sizeof(name), "%s/%s/schedstat", path, thread->d_name);
        FILE *file = thread->d_name[0] != '.' ? fopen(name, "re") : NULL;
        if (file && fscanf(file, "%llu", &ns) == 1) {
            sum_s += (double)ns * 1e-9;
        }
        if (file) {
            fclose(file);
        }
    }
    if (threads) {
        closedir(threads);
    }
    return sum_s;
}

static void pids_before(void)
{
    for (int i = 0; i < n_pids; i++) {
        before_s[i] = cpu_seconds(pids[i]);
    }
}

static void pids_print(const char *what, uint64_t n)
{
    for (int i = 0; i < n_pids; i++) {
        double spent_s = cpu_seconds(pids[i]) - before_s[i];
        printf("pid %d: %.2f s of CPU, %.2f us a %s\n", pids[i], spent_s,
               n ? spent_s * 1e6 / (double)n : 0, what);
    }
}

static long resident_kib(int pid)
{
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof(path), "/proc/%d/status", pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (sscanf(line, "VmRSS: %ld", &kib) == 1) {
            break;
        }
    }
    if (file) {
        fclose(file);
    }
    return kib;
}

static void make_request(bool stream, int max_tokens)
{
    char body[512];
    int n = snprintf(body, sizeof(body),
                     "{\"messages\":[{\"role\":\"user\",\"content\":\"Say something short.\"}],"
                     "\"max_tokens\":%d,\"temperature\":0,\"ignore_eos\":true,\"stream\":%s}",
                     max_tokens, stream ? "true" : "false");
    request_bytes = snprintf(request_text, sizeof(request_text),
                             "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                             "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                             n, body);
}

/* Sleeps, and does not poll: the nodes may share this core. */
static void wait_events(uint64_t timeout_ns, bool again)
{
    struct epoll_event events[512];
    struct timespec timeout = {.tv_sec = (time_t)(timeout_ns / 1000000000),
                               .tv_nsec = (long)(timeout_ns % 1000000000)};
    int n = epoll_pwait2(epoll_fd, events, 512, &timeout, NULL);
    for (int i = 0; i < n; i++) {
        struct connection *connection = events[i].data.ptr;
        bool was_busy = connection->busy;
        if (connection_read(connection) && was_busy && !connection->busy && again) {
            connection_ask(connection, loop_now_ns());
        }
    }
}

static void run_closed(double seconds)
{
    make_request(false, 1);
    pids_before();
    uint64_t start_ns = loop_now_ns(), end_ns = start_ns + (uint64_t)(seconds * 1e9);
    for (int i = 0; i < n_connections; i++) {
        connection_ask(&connections[i], start_ns);
    }
    while (loop_now_ns() < end_ns) {
        wait_events(100 * NS_PER_MS, true);
    }
    double spent_s = (double)(loop_now_ns() - start_ns) * 1e-9;
    printf("%d connections: %.0f requests/s, %lu errors\n", n_connections, (double)n_done / spent_s,
           n_errors);
    print_quantiles("latency", latencies_ms, n_latencies);
    pids_print("request", n_done);
}

static void run_open(double rate, double seconds)
{
    make_request(false, 1);
    pids_before();
    uint64_t start_ns = loop_now_ns(), n_sent = 0;
    uint64_t n_all = (uint64_t)(rate * seconds);
    while (n_done < n_all && loop_now_ns() < start_ns + (uint64_t)((seconds + 5) * 1e9)) {
        uint64_t now_ns = loop_now_ns();
        uint64_t due_ns = start_ns + (uint64_t)((double)n_sent * 1e9 / rate);
        bool late = false;
        if (n_sent < n_all && now_ns >= due_ns) {
            struct connection *free_one = NULL;
            for (int i = 0; !free_one && i < n_connections; i++) {
                free_one = connections[i].busy ? NULL : &connections[i];
            }
            if (free_one) {
                connection_ask(free_one, due_ns);
                n_sent++;
            } else {
                late = true;
            }
        }
        due_ns = start_ns + (uint64_t)((double)n_sent * 1e9 / rate);
        now_ns = loop_now_ns();
        wait_events(n_sent == n_all || late ? NS_PER_MS
                    : due_ns > now_ns       ? due_ns - now_ns
                                            : 0,
                    false);
    }
    printf("%.0f requests/s asked, %lu of %lu answered, %lu errors\n", rate, n_done, n_all,
           n_errors);
    print_quantiles("latency", latencies_ms, n_latencies);
    print_quantiles("added", added_ms, n_added);
    pids_print("request", n_done);
}

static void run_streams(void)
{
    long before_kib[MAX_PIDS] = {0}, most_kib[MAX_PIDS] = {0};
    make_request(true, (int)n_stream_tokens);
    for (int i = 0; i < n_pids; i++) {
        before_kib[i] = resident_kib(pids[i]);
    }
    pids_before();
    uint64_t start_ns = loop_now_ns(), look_ns = start_ns;
    for (int i = 0; i < n_connections; i++) {
        connections[i].is_stream = true;
        connection_ask(&connections[i], start_ns);
        if (i % 64 == 0) {
            wait_events(0, false);
        }
    }
    while (n_done + n_errors < (uint64_t)n_connections &&
           loop_now_ns() < start_ns + 300ull * 1000000000) {
        wait_events(100 * NS_PER_MS, false);
        if (loop_now_ns() - look_ns > 200000000) {
            look_ns = loop_now_ns();
            for (int i = 0; i < n_pids; i++) {
                long kib = resident_kib(pids[i]);
                most_kib[i] = kib > most_kib[i] ? kib : most_kib[i];
            }
        }
    }
    for (int i = 0; i < n_connections; i++) {
        struct connection *c = &connections[i];
        if (c->first_ns) {
            note(latencies_ms, &n_latencies, (double)(c->first_ns - c->due_ns) * 1e-6);
        }
    }
    double steady_s = (double)(steady_ns - all_started_ns) * 1e-9;
    printf("%d streams of %u tokens: %lu ended, %lu of them short, %lu errors, %lu tokens in %lu "
           "events\n",
           n_connections, n_stream_tokens, n_done, n_short, n_errors, n_tokens, n_events);
    printf("all at once for %.1f s: %.0f tokens/s\n", steady_s,
           n_steady ? (double)n_steady / steady_s : 0);
    print_quantiles("first", latencies_ms, n_latencies);
    print_quantiles("gap", gaps_ms, n_gaps);
    for (int i = 0; i < n_pids; i++) {
        printf("pid %d: %.1f KiB a stream\n", pids[i],
               (double)(most_kib[i] - before_kib[i]) / n_connections);
    }
    pids_print("token", n_tokens);
}

int main(int argc, char **argv)
{
    if (argc < 5) {
        fprintf(stderr, "usage: bench_router closed PORT CONNECTIONS SECONDS [PID...]\n"
                        "       bench_router open PORT RATE SECONDS [PID...]\n"
                        "       bench_router streams PORT STREAMS TOKENS [PID...]\n");
        return 2;
    }
    int port = atoi(argv[2]);
    bool is_open = strcmp(argv[1], "open") == 0;
    struct rlimit files = {MAX_CONNECTIONS + 100, MAX_CONNECTIONS + 100};
    setrlimit(RLIMIT_NOFILE, &files);
    n_connections = is_open ? 256 : atoi(argv[3]);
    if (n_connections < 1 || n_connections > MAX_CONNECTIONS) {
        fprintf(stderr, "1 to %d connections\n", MAX_CONNECTIONS);
        return 2;
    }
    for (int i = 5; i < argc && n_pids < MAX_PIDS; i++) {
        pids[n_pids++] = atoi(argv[i]);
    }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    connections = mem_array((size_t)n_connections, sizeof(*connections));
    latencies_ms = mem_array(MAX_SAMPLES, sizeof(float));
    added_ms = mem_array(MAX_SAMPLES, sizeof(float));
    gaps_ms = mem_array(MAX_SAMPLES, sizeof(float));
    for (int i = 0; i < n_connections; i++) {
        connection_open(&connections[i], port);
    }
    if (is_open) {
        run_open(atof(argv[3]), atof(argv[4]));
    } else if (strcmp(argv[1], "closed") == 0) {
        run_closed(atof(argv[4]));
    } else {
        n_stream_tokens = (uint32_t)atoi(argv[4]);
        run_streams();
    }
    return n_errors > 0;
}
