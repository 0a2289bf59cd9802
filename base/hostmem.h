#ifndef BATON_BASE_HOSTMEM_H
#define BATON_BASE_HOSTMEM_H

#include <stdint.h>

/*
 * How much memory of this host the process may still take: the least of what the kernel says is
 * available without swapping, what the limits of its control groups (v1 and v2, and the groups
 * above) leave, and what its own limits (RLIMIT_AS, RLIMIT_DATA) leave.
 */
struct hostmem {
    uint64_t free_bytes; /* UINT64_MAX where nothing is known */
    const char *limit;   /* which is the least: "memory of the host", ...; of static life */
};

/* Reads /proc and /sys/fs/cgroup; what can't be read limits nothing. Any thread; blocking. */
void hostmem_read(struct hostmem *ret_memory);

/*
 * The same from another root than "/", for tests: proc/meminfo, proc/self/cgroup,
 * sys/fs/cgroup/... below it. Without the process's own limits.
 */
void hostmem_read_at(const char *root, struct hostmem *ret_memory);

#endif
