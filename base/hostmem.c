#include "base/hostmem.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/*
 * A control group's limit counts the page cache, which the kernel gives up before it kills: what a
 * group leaves is its limit less what it uses, with its file pages counted as free. Limits are
 * looked at in the process's own group and in every one above it, down to the root of the mount; in
 * a container the path in /proc/self/cgroup may be one that is not to be seen inside, and then the
 * root of the mount is the group.
 */

enum { TEXT_BYTES = 16384, PATH_BYTES = 4096 };

/* Of an address space limit this much belongs to the process itself: stacks of threads (8 MiB each)
 * and arenas of the allocator (64 MiB each) are address space, hardly any of it memory, and come
 * when they like. A fixed share, so that two starts find the same left. */
static const uint64_t PROCESS_KIB = 1 << 20, SPARE_KIB = 64 << 10;

static void consider(struct hostmem *least, uint64_t free_bytes, const char *limit)
{
    if (free_bytes < least->free_bytes) {
        *least = (struct hostmem){free_bytes, limit};
    }
}

/* The file as text; false if it can't be read. */
static bool read_text(const char *path, char *ret_text)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    size_t n = fread(ret_text, 1, TEXT_BYTES - 1, file);
    fclose(file);
    ret_text[n] = '\0';
    return true;
}

/* A file of one number; "max" and what is no number are false. */
static bool read_number(const char *folder, const char *name, uint64_t *ret_number)
{
    char path[PATH_BYTES + 64], text[TEXT_BYTES];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    if (!read_text(path, text) || text[0] < '0' || text[0] > '9') {
        return false;
    }
    *ret_number = strtoull(text, NULL, 10);
    return true;
}

/* The number behind `key` at the start of a line of `text`, or 0. */
static uint64_t number_of(const char *text, const char *key)
{
    size_t n = strlen(key);
    for (const char *at = text; at != NULL && *at; at = strchr(at, '\n')) {
        at += *at == '\n';
        if (strncmp(at, key, n) == 0) {
            return strtoull(at + n, NULL, 10);
        }
    }
    return 0;
}

static void consider_group(const char *folder, bool is_v2, struct hostmem *least)
{
    uint64_t limit, used, files = 0;
    char path[PATH_BYTES + 64], text[TEXT_BYTES];
    if (!read_number(folder, is_v2 ? "memory.max" : "memory.limit_in_bytes", &limit) ||
        !read_number(folder, is_v2 ? "memory.current" : "memory.usage_in_bytes", &used)) {
        return;
    }
    snprintf(path, sizeof(path), "%s/memory.stat", folder);
    if (read_text(path, text)) {
        files = number_of(text, is_v2 ? "inactive_file " : "total_inactive_file ") +
                number_of(text, is_v2 ? "active_file " : "total_active_file ");
    }
    used = used > files ? used - files : 0;
    consider(least, limit > used ? limit - used : 0, "memory of its control group");
}

/* The group at `path` below `mount`, and all above it. */
static void consider_groups(const char *mount, const char *path, bool is_v2, struct hostmem *least)
{
    char folder[PATH_BYTES];
    size_t n_mount = strlen(mount);
    snprintf(folder, sizeof(folder), "%s%s", mount, path);
    for (;;) {
        consider_group(folder, is_v2, least);
        char *slash = strrchr(folder, '/');
        if (slash == NULL || (size_t)(slash - folder) < n_mount) {
            return;
        }
        *slash = '\0';
    }
}

/* Whether `word` is one of the comma separated ones. */
static bool has_word(const char *words, size_t n_words, const char *word)
{
    size_t n = strlen(word);
    for (size_t at = 0; at + n <= n_words; at++) {
        if ((at == 0 || words[at - 1] == ',') && strncmp(words + at, word, n) == 0 &&
            (at + n == n_words || words[at + n] == ',')) {
            return true;
        }
    }
    return false;
}

/* Lines "ID:CONTROLLERS:PATH". */
static void consider_own_groups(const char *root, struct hostmem *least)
{
    char path[PATH_BYTES], text[TEXT_BYTES], mount[PATH_BYTES];
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    if (!read_text(path, text)) {
        return;
    }
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char *words = strchr(line, ':'), *group = words ? strchr(words + 1, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        bool is_v2 = group == words + 1;
        if (!is_v2 && !has_word(words + 1, (size_t)(group - words - 1), "memory")) {
            continue;
        }
        group = strcmp(group + 1, "/") == 0 ? group + 2 : group + 1;
        snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup%s", root, is_v2 ? "" : "/memory");
        consider_groups(mount, group, is_v2, least);
        if (is_v2) {
            snprintf(mount, sizeof(mount), "%s/sys/fs/cgroup/unified", root);
            consider_groups(mount, group, true, least);
        }
    }
}

void hostmem_read_at(const char *root, struct hostmem *ret_memory)
{
    char path[PATH_BYTES], text[TEXT_BYTES];
    struct hostmem least = {UINT64_MAX, "nothing"};
    snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    if (read_text(path, text) && number_of(text, "MemAvailable:")) {
        consider(&least, number_of(text, "MemAvailable:") * 1024, "memory of the host");
    }
    consider_own_groups(root, &least);
    *ret_memory = least;
}

static void consider_rlimit(int resource, uint64_t used_kib, const char *name,
                            struct hostmem *least)
{
    struct rlimit limit;
    if (getrlimit((__rlimit_resource_t)resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        uint64_t used = used_kib * 1024;
        consider(least, limit.rlim_cur > used ? limit.rlim_cur - used : 0, name);
    }
}

void hostmem_read(struct hostmem *ret_memory)
{
    char text[TEXT_BYTES];
    struct hostmem least;
    hostmem_read_at("", &least);
    if (read_text("/proc/self/status", text)) {
        uint64_t used_kib = number_of(text, "VmSize:") + SPARE_KIB;
        consider_rlimit(RLIMIT_AS, used_kib > PROCESS_KIB ? used_kib : PROCESS_KIB,
                        "address space (ulimit -v)", &least);
        consider_rlimit(RLIMIT_DATA, number_of(text, "VmData:"), "data segment (ulimit -d)",
                        &least);
    }
    *ret_memory = least;
}
