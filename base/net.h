#ifndef BATON_BASE_NET_H
#define BATON_BASE_NET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/status.h"

/*
 * Addresses of listeners: parsing, printing, binding, and who holds a port. Any thread; name
 * resolution blocks, so these belong to start-up.
 */

enum {
    NET_HOST_MAX = 256, /* a DNS name has at most 253 bytes, a scoped IPv6 literal fewer */
};

struct net_address {
    char host[NET_HOST_MAX]; /* without brackets */
    uint16_t port;
    bool has_port;
};

/*
 * Reads "host", "host:port", "[v6]", "[v6]:port", "v6" or ":port" (host empty: every address). An
 * unbracketed text with two or more colons is an IPv6 literal without a port.
 * STATUS_INVALID with what is wrong in err.
 */
enum status must_check net_address_parse(const char *text, struct net_address *ret_address,
                                         struct error *err);

/* "host:port" fit for a URL: brackets around IPv6 literals only, '%' of a scope as "%25". */
void net_address_format(const char *host, uint16_t port, char *ret_text, size_t capacity);

/* Numeric text of a socket address, "a.b.c.d:port" or "[v6%scope]:port". */
void net_sockaddr_format(const struct sockaddr *address, socklen_t bytes, char *ret_text,
                         size_t capacity);

/* Whether host is a wildcard (empty, 0.0.0.0, ::) and whether it names only this machine. */
bool net_host_is_wildcard(const char *host);
bool net_host_is_loopback(const char *host);

/*
 * A listening, non-blocking, close-on-exec TCP socket on host (a name, an IPv4 or IPv6 literal,
 * with or without brackets; empty or NULL: all addresses) and port (0: the kernel picks).
 * SO_REUSEADDR is set, SO_REUSEPORT never: a second server on the port fails. "::" and an empty
 * host listen for IPv4 too where the system has both. A name is bound at its first address that
 * works. ret_port is the port bound.
 * STATUS_EXISTS when the port is taken (err names it, and the holder where /proc shows it),
 * STATUS_NOT_FOUND when the name does not resolve, STATUS_SYSTEM else.
 */
enum status must_check net_listen(const char *host, uint16_t port, int backlog, int *ret_fd,
                                  uint16_t *ret_port, struct error *err);

/*
 * Who listens on a TCP port of this machine, as "pid 1234 (name)", as far as /proc lets us look.
 * False, and an empty text, when it cannot tell.
 */
bool net_port_holder(uint16_t port, char *ret_text, size_t capacity);

#endif
