/* transport/ucx_socket.c - keeps a dying peer from aborting this process.
 *
 * UCX (1.13 and still 1.22) emulates puts over tcp by active messages, and their target answers
 * each one. When the writer is gone by then, send() fails, and UCX treats a failure at that place
 * as a bug of its own: "Fatal: unexpected error", abort(). So a prefill node that is killed at the
 * wrong moment would take the decode node with it. tests/transport/test_failure.c
 * (writer_gone_meanwhile) shows it.
 *
 * The way out: libuct calls ucs_socket_send_nb of libucs through the dynamic linker, and a
 * program's own definition comes first. Ours reports a broken connection as "nothing sent now". The
 * next read of the same socket, in the same turn of the event set, then reports the end of the
 * connection by the path that UCX handles well: it fails the endpoint and calls the error handler.
 * If a UCX is ever linked in a way that passes us by, ucx_open warns.
 */
#include "transport/ucx_socket.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include <ucs/sys/sock.h>

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

bool ucx_socket_is_ours(void)
{
    ucs_status_t (*ours)(int, const void *, size_t *) = ucs_socket_send_nb;
    void *found = dlsym(RTLD_DEFAULT, "ucs_socket_send_nb");
    return memcmp(&found, &ours, sizeof found) == 0;
}
