/* transport/ucx_socket.c - keeps a dying or unreachable peer from aborting or holding up this
 * process.
 *
 * Three functions of libucs that libuct calls through the dynamic linker are ours: a program's own
 * definition comes first. If a UCX is ever linked in a way that passes us by, ucx_open warns.
 *
 * Send.
 * UCX (1.13 and still 1.22) emulates puts over tcp by active messages, and their target answers
 * each one. When the writer is gone by then, send() fails, and UCX treats a failure at that place
 * as a bug of its own: "Fatal: unexpected error", abort(). So a prefill node that is killed at the
 * wrong moment would take the decode node with it. tests/transport/test_failure.c
 * (writer_gone_meanwhile) shows it.
 *
 * Ours reports a broken connection as "nothing sent now". The next read of the same socket, in the
 * same turn of the event set, then reports the end of the connection by the path that UCX handles
 * well: it fails the endpoint and calls the error handler.
 *
 * Connect. UCX waits in connect(), on the put thread, for as long as the kernel tries: with the way
 * to one peer cut that is up to two minutes in which no put of any peer moves. Ours gives up after
 * CONNECT_MS. (UCX's own non-blocking mode is no way out: where such a connection is refused, it
 * trips over a reply that it still had to send, and ends the process.)
 *
 * Options. A connection whose peer was cut off lives on until the kernel has tried for a quarter of
 * an hour. UCX takes it for alive, hangs the next endpoint of the same peer on it, and when the
 * peer answers "no such connection" it ends the process: "Assertion (ep->tx.length == 0)". So the
 * kernel is told to give up what nobody has acknowledged for as long as a peer may be silent.
 * scripts/drill stopped-then-cut shows both.
 */
#include "transport/ucx_socket.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <ucs/sys/sock.h>

enum {
    CONNECT_MS = 400,  /* a round trip, and a busy machine */
    SILENCE_MS = 1000, /* below the lease: a lost pair's connections are gone before it is back */
};

ucs_status_t ucs_socket_send_nb(int fd, const void *data, size_t *length_p)
{
    ssize_t sent = send(fd, data, *length_p, MSG_NOSIGNAL);
    *length_p = sent > 0 ? (size_t)sent : 0;
    if (sent >= 0) {
        return UCS_OK;
    }
    switch (errno) {
    case EAGAIN:
    case EINTR:
    case ENOBUFS:
    case EPIPE:
    case ECONNRESET:
    case ECONNABORTED:
    case ETIMEDOUT:
        return UCS_ERR_NO_PROGRESS;
    default:
        return UCS_ERR_IO_ERROR;
    }
}

static void option_set(int fd, int level, int name, int value)
{
    /* what a kernel does not know it does without: the rules above this file still hold */
    (void)setsockopt(fd, level, name, &value, sizeof value);
}

/* UCX sets TCP_NODELAY on every socket that it connects or accepts, and so tells us of each. */
ucs_status_t ucs_socket_setopt(int fd, int level, int optname, const void *optval, socklen_t optlen)
{
    if (setsockopt(fd, level, optname, optval, optlen) < 0) {
        return UCS_ERR_IO_ERROR;
    }
    if (level == IPPROTO_TCP && optname == TCP_NODELAY) {
        option_set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, SILENCE_MS);
        option_set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 1);
        option_set(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
        option_set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    }
    return UCS_OK;
}

/* Waits for a connection that is under way; 0 or an errno. */
static int connect_wait(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLOUT};
    int n, problem = 0;
    socklen_t bytes = sizeof problem;
    do {
        n = poll(&ready, 1, CONNECT_MS);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) {
        return n == 0 ? ETIMEDOUT : errno;
    }
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &problem, &bytes) < 0 ? errno : problem;
}

ucs_status_t ucs_socket_connect(int fd, const struct sockaddr *address)
{
    socklen_t bytes =
        address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        return UCS_ERR_IO_ERROR;
    }
    int problem = connect(fd, address, bytes) == 0 ? 0 : errno;
    if ((problem == EINPROGRESS || problem == EINTR) && !(flags & O_NONBLOCK)) {
        problem = connect_wait(fd);
    }
    if (fcntl(fd, F_SETFL, flags) < 0) {
        return UCS_ERR_IO_ERROR;
    }
    switch (problem) {
    case 0:
        return UCS_OK;
    case EINPROGRESS:
        return UCS_INPROGRESS;
    case EISCONN:
        return UCS_ERR_ALREADY_EXISTS;
    case ETIMEDOUT:
        return UCS_ERR_TIMED_OUT;
    default:
        return UCS_ERR_UNREACHABLE;
    }
}

bool ucx_socket_is_ours(void)
{
    ucs_status_t (*our_send)(int, const void *, size_t *) = ucs_socket_send_nb;
    ucs_status_t (*our_connect)(int, const struct sockaddr *) = ucs_socket_connect;
    ucs_status_t (*our_setopt)(int, int, int, const void *, socklen_t) = ucs_socket_setopt;
    const struct {
        const char *name;
        const void *ours;
    } all[] = {{"ucs_socket_send_nb", &our_send},
               {"ucs_socket_connect", &our_connect},
               {"ucs_socket_setopt", &our_setopt}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        void *found = dlsym(RTLD_DEFAULT, all[i].name);
        if (memcmp(&found, all[i].ours, sizeof found) != 0) {
            return false;
        }
    }
    return true;
}
