/*
 * Addresses and listening sockets.
 *
 * The trap this file closes is a second server on a port: SO_REUSEPORT is never set, so the kernel
 * refuses the second bind, and the refusal is turned into a sentence that names the holder.
 * Literals and names go through getaddrinfo alike; brackets exist in URLs only and are taken off
 * here.
 */
#include "base/net.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>

/* --- text --- */

static bool port_parse(const char *text, uint16_t *ret_port)
{
    unsigned value = 0;

    if (*text == '\0') {
        return false;
    }
    for (; *text; text++) {
        if (!isdigit((unsigned char)*text)) {
            return false;
        }
        value = value * 10 + (unsigned)(*text - '0');
        if (value > 65535) {
            return false;
        }
    }
    *ret_port = (uint16_t)value;
    return true;
}

static bool host_valid(const char *host, size_t bytes)
{
    if (bytes >= NET_HOST_MAX) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        if (!isalnum((unsigned char)host[i]) && !strchr(".-_:%", host[i])) {
            return false;
        }
    }
    return true;
}

enum status net_address_parse(const char *text, struct net_address *ret_address, struct error *err)
{
    struct net_address address = {.has_port = false};
    const char *host = text;
    const char *port = NULL;
    size_t bytes;

    if (text[0] == '[') {
        const char *end = strchr(text, ']');

        if (!end || (end[1] != '\0' && end[1] != ':')) {
            return error_set(err, STATUS_INVALID,
                             "address '%.300s': want [IPv6]:PORT with a closing bracket", text);
        }
        host = text + 1;
        bytes = (size_t)(end - host);
        port = end[1] == ':' ? end + 2 : NULL;
    } else {
        const char *colon = strchr(text, ':');

        if (colon && strchr(colon + 1, ':')) {
            colon = NULL; /* an IPv6 literal: the last group can't be told from a port */
        }
        bytes = colon ? (size_t)(colon - text) : strlen(text);
        port = colon ? colon + 1 : NULL;
    }
    if (!host_valid(host, bytes)) {
        return error_set(err, STATUS_INVALID,
                         "address '%.300s': the host has a byte that no name or literal has, or is "
                         "longer than %d bytes",
                         text, NET_HOST_MAX - 1);
    }
    memcpy(address.host, host, bytes);
    if (port) {
        if (!port_parse(port, &address.port)) {
            return error_set(err, STATUS_INVALID,
                             "address '%.300s': want a port of 0 to 65535 after the colon", text);
        }
        address.has_port = true;
    }
    *ret_address = address;
    return STATUS_OK;
}

void net_address_format(const char *host, uint16_t port, char *ret_text, size_t capacity)
{
    if (strchr(host, ':')) {
        const char *scope = strchr(host, '%');
        int literal = scope ? (int)(scope - host) : (int)strlen(host);

        snprintf(ret_text, capacity, "[%.*s%s%s]:%u", literal, host, scope ? "%25" : "",
                 scope ? scope + 1 : "", port);
    } else {
        snprintf(ret_text, capacity, "%s:%u", host, port);
    }
}

void net_sockaddr_format(const struct sockaddr *address, socklen_t bytes, char *ret_text,
                         size_t capacity)
{
    char host[NI_MAXHOST];
    char port[NI_MAXSERV];

    if (getnameinfo(address, bytes, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        snprintf(ret_text, capacity, "unknown");
        return;
    }
    snprintf(ret_text, capacity, address->sa_family == AF_INET6 ? "[%s]:%s" : "%s:%s", host, port);
}

bool net_host_is_wildcard(const char *host)
{
    struct in6_addr v6;
    struct in_addr v4;

    if (host[0] == '\0') {
        return true;
    }
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return v4.s_addr == htonl(INADDR_ANY);
    }
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

bool net_host_is_loopback(const char *host)
{
    struct in6_addr v6;
    struct in_addr v4;

    if (strcmp(host, "localhost") == 0) {
        return true;
    }
    if (inet_pton(AF_INET, host, &v4) == 1) {
        return ntohl(v4.s_addr) >> 24 == 127;
    }
    return inet_pton(AF_INET6, host, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

/* --- who holds a port --- */

/* The inode of the socket that listens on port in a /proc/net/tcp table; 0 if none. */
static unsigned long listener_inode(const char *path, uint16_t port)
{
    FILE *file = fopen(path, "re");
    char line[512];
    unsigned long inode = 0;

    if (!file) {
        return 0;
    }
    while (inode == 0 && fgets(line, sizeof(line), file)) {
        unsigned local_port;
        unsigned state;
        unsigned long found;

        if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*u %*u %lu",
                   &local_port, &state, &found) == 3 &&
            local_port == port && state == TCP_LISTEN) {
            inode = found;
        }
    }
    fclose(file);
    return inode;
}

static bool process_has_socket(const char *pid, const char *target)
{
    char path[300];
    char link[64];
    struct dirent *entry;
    bool found = false;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%.20s/fd", pid);
    dir = opendir(path);
    if (!dir) {
        return false;
    }
    while (!found && (entry = readdir(dir))) {
        ssize_t n = readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1);

        if (n > 0) {
            link[n] = '\0';
            found = strcmp(link, target) == 0;
        }
    }
    closedir(dir);
    return found;
}

static void process_describe(const char *pid, char *ret_text, size_t capacity)
{
    char path[64];
    char name[64] = "?";
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%.20s/comm", pid);
    file = fopen(path, "re");
    if (file) {
        if (fgets(name, sizeof(name), file)) {
            name[strcspn(name, "\n")] = '\0';
        }
        fclose(file);
    }
    snprintf(ret_text, capacity, "pid %.20s (%s)", pid, name);
}

bool net_port_holder(uint16_t port, char *ret_text, size_t capacity)
{
    unsigned long inode = listener_inode("/proc/net/tcp", port);
    char target[64];
    struct dirent *entry;
    bool found = false;
    DIR *proc;

    if (capacity > 0) {
        ret_text[0] = '\0';
    }
    if (inode == 0) {
        inode = listener_inode("/proc/net/tcp6", port);
    }
    if (inode == 0) {
        return false;
    }
    proc = opendir("/proc");
    if (!proc) {
        return false;
    }
    snprintf(target, sizeof(target), "socket:[%lu]", inode);
    while (!found && (entry = readdir(proc))) {
        if (isdigit((unsigned char)entry->d_name[0]) && process_has_socket(entry->d_name, target)) {
            process_describe(entry->d_name, ret_text, capacity);
            found = true;
        }
    }
    closedir(proc);
    return found;
}

/* --- listening --- */

/* Returns the descriptor or -1 with errno. */
static int listen_one(const struct addrinfo *ai, bool dual_stack, int backlog)
{
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
    int on = 1;
    int only_v6 = !dual_stack;
    int saved;

    if (fd < 0) {
        return -1;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) < 0) {
        goto close_fd;
    }
    if (ai->ai_family == AF_INET6 &&
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &only_v6, sizeof(only_v6)) < 0) {
        goto close_fd;
    }
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0 || listen(fd, backlog) < 0) {
        goto close_fd;
    }
    return fd;

close_fd:
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static uint16_t bound_port(int fd)
{
    struct sockaddr_storage address;
    socklen_t bytes = sizeof(address);

    if (getsockname(fd, (struct sockaddr *)&address, &bytes) < 0) {
        return 0;
    }
    if (address.ss_family == AF_INET6) {
        return ntohs(((struct sockaddr_in6 *)&address)->sin6_port);
    }
    return ntohs(((struct sockaddr_in *)&address)->sin_port);
}

static enum status bind_error(const char *host, uint16_t port, int error, struct error *err)
{
    char holder[128];
    char where[NET_HOST_MAX + 16];

    net_address_format(host[0] ? host : "*", port, where, sizeof(where));
    if (error == EADDRINUSE) {
        if (net_port_holder(port, holder, sizeof(holder))) {
            return error_set(err, STATUS_EXISTS, "port %u is taken: cannot listen on %s, %s does",
                             port, where, holder);
        }
        return error_set(err, STATUS_EXISTS,
                         "port %u is taken: cannot listen on %s, another process does", port,
                         where);
    }
    return error_set(err, STATUS_SYSTEM, "cannot listen on %s: %s", where, strerror(error));
}

enum status net_listen(const char *host, uint16_t port, int backlog, int *ret_fd,
                       uint16_t *ret_port, struct error *err)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = AI_PASSIVE | AI_NUMERICSERV,
    };
    struct addrinfo *list = NULL;
    char name[NET_HOST_MAX] = "";
    char service[8];
    int first_error = 0;
    int fd = -1;
    int rc;

    if (host && host[0] == '[') {
        size_t bytes = strlen(host);

        if (host[bytes - 1] != ']' || bytes - 2 >= sizeof(name)) {
            return error_set(err, STATUS_INVALID, "host '%.300s': no closing bracket", host);
        }
        memcpy(name, host + 1, bytes - 2);
    } else if (host) {
        if (strlen(host) >= sizeof(name)) {
            return error_set(err, STATUS_INVALID, "host of %zu bytes; the limit is %d",
                             strlen(host), NET_HOST_MAX - 1);
        }
        memcpy(name, host, strlen(host) + 1);
    }
    snprintf(service, sizeof(service), "%u", port);
    rc = getaddrinfo(name[0] ? name : NULL, service, &hints, &list);
    if (rc != 0) {
        return error_set(err, STATUS_NOT_FOUND, "host '%s' does not resolve: %s", name,
                         rc == EAI_SYSTEM ? strerror(errno) : gai_strerror(rc));
    }
    /* With no host the v6 wildcard goes first, since only it can serve both families. */
    for (int pass = name[0] ? 1 : 0; pass < 2 && fd < 0; pass++) {
        for (struct addrinfo *ai = list; ai && fd < 0; ai = ai->ai_next) {
            if (pass == 0 && ai->ai_family != AF_INET6) {
                continue;
            }
            fd = listen_one(ai, net_host_is_wildcard(name), backlog);
            if (fd < 0 && (first_error == 0 || errno == EADDRINUSE)) {
                first_error = errno;
            }
            /* A taken port is the answer: falling back to the other family would share it. */
            if (fd < 0 && errno == EADDRINUSE) {
                freeaddrinfo(list);
                return bind_error(name, port, first_error, err);
            }
        }
    }
    freeaddrinfo(list);
    if (fd < 0) {
        return bind_error(name, port, first_error, err);
    }
    *ret_fd = fd;
    *ret_port = bound_port(fd);
    return STATUS_OK;
}
