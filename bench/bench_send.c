/* The floor of many streams: what the kernel takes to send a few hundred bytes on each of many
 * connections in turn, with nothing else done.
 *
 *   bench_send SOCKETS BYTES
 *
 * The writer is timed by its CPU time, on the core that it was given; the reader is a process of
 * its own on another. A router that sends one event a token can't do it for less.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"

enum { ROUNDS = 12, PAUSE_US = 50000, MAX_SOCKETS = 20000, MAX_BYTES = 4096 };

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static double cpu_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

/* Reads and throws away until the writer ends. */
static void reader(const struct sockaddr_in *address, int n)
{
    static char bytes[65536];
    struct epoll_event events[512], wanted = {.events = EPOLLIN};
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    for (int i = 0; i < n; i++) {
        wanted.data.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(wanted.data.fd, (const struct sockaddr *)address, sizeof(*address)) < 0 ||
            epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wanted.data.fd, &wanted) < 0) {
            die("connect");
        }
    }
    for (;;) {
        int n_ready = epoll_wait(epoll_fd, events, 512, -1);
        for (int i = 0; i < n_ready; i++) {
            if (read(events[i].data.fd, bytes, sizeof(bytes)) <= 0) {
                exit(0);
            }
        }
    }
}

static void writer(const int *fds, int n, size_t n_bytes)
{
    char bytes[MAX_BYTES];
    double best_us = 1e9, sum_us = 0;
    memset(bytes, 'x', sizeof(bytes));
    for (int round = 0; round < ROUNDS; round++) {
        double start_us = cpu_us();
        for (int i = 0; i < n; i++) {
            if (send(fds[i], bytes, n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
                die("send");
            }
        }
        double us = (cpu_us() - start_us) / n;
        best_us = us < best_us ? us : best_us;
        sum_us += us;
        usleep(PAUSE_US);
    }
    printf("the kernel's send of %zu bytes over %d sockets: best %.2f, mean %.2f us\n", n_bytes, n,
           best_us, sum_us / ROUNDS);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 0, n_bytes = argc > 2 ? atoi(argv[2]) : 0;
    if (n < 1 || n > MAX_SOCKETS || n_bytes < 1 || n_bytes > MAX_BYTES) {
        fprintf(stderr, "usage: bench_send SOCKETS BYTES\n");
        return 2;
    }
    struct rlimit files = {MAX_SOCKETS + 100, MAX_SOCKETS + 100};
    setrlimit(RLIMIT_NOFILE, &files);
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t address_bytes = sizeof(address);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (bind(listener, (struct sockaddr *)&address, sizeof(address)) < 0 ||
        listen(listener, 1000) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &address_bytes) < 0) {
        die("listen");
    }
    pid_t child = fork();
    if (child == 0) {
        cpu_set_t others;
        CPU_ZERO(&others);
        for (int i = 1; i < CPU_SETSIZE; i++) {
            CPU_SET(i, &others);
        }
        sched_setaffinity(0, sizeof(others), &others);
        reader(&address, n);
    }
    int *fds = mem_array((size_t)n, sizeof(*fds));
    for (int i = 0; i < n; i++) {
        fds[i] = accept(listener, NULL, NULL);
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    }
    writer(fds, n, (size_t)n_bytes);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    mem_free(fds);
    return 0;
}
