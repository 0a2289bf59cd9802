/* What the kernel's files say, in trees made up for it, and this process's own limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hostmem.h"

enum { MIB = 1 << 20 };

static char root[] = "/tmp/baton-hostmem-XXXXXX";

/* Writes root/path, with the folders above it. */
static void put(const char *path, const char *text)
{
    char full[512];
    int n = snprintf(full, sizeof(full), "%s/%s", root, path);
    for (int i = (int)strlen(root) + 1; i < n; i++) {
        if (full[i] == '/') {
            full[i] = '\0';
            (void)mkdir(full, 0700);
            full[i] = '/';
        }
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void sweep(void)
{
    char command[sizeof(root) + 32];
    snprintf(command, sizeof(command), "rm -rf %s", root);
    assert_int_equal(system(command), 0);
}

static int fresh(void **state)
{
    strcpy(root + strlen(root) - 6, "XXXXXX");
    assert_non_null(mkdtemp(root));
    return 0;
}

static int gone(void **state)
{
    sweep();
    return 0;
}

static uint64_t left(const char *limit)
{
    struct hostmem memory;
    hostmem_read_at(root, &memory);
    if (!strstr(memory.limit, limit)) {
        fail_msg("'%s' is the least, not '%s'", memory.limit, limit);
    }
    return memory.free_bytes;
}

static void test_host(void **state)
{
    assert_true(left("nothing") == UINT64_MAX);
    put("proc/meminfo", "MemTotal: 8192 kB\nMemAvailable:    2048 kB\n");
    put("proc/self/cgroup", "no colons\n1:\n2:cpu:/x\n");
    assert_int_equal(left("of the host"), 2 * MIB);
}

static void test_v2(void **state)
{
    put("proc/meminfo", "MemAvailable:  1048576 kB\n");
    put("proc/self/cgroup", "0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    put("sys/fs/cgroup/a/b/memory.current", "1\n");
    assert_int_equal(left("of the host"), 1024 * MIB);
    /* The group above limits too; its file pages count as free. */
    put("sys/fs/cgroup/a/memory.max", "104857600\n");
    put("sys/fs/cgroup/a/memory.current", "73400320\n");
    put("sys/fs/cgroup/a/memory.stat",
        "anon 5\ninactive_file 10485760\nactive_file 10485760\nfile 3\n");
    assert_int_equal(left("control group"), 50 * MIB);
    put("sys/fs/cgroup/a/memory.current", "999999999999\n");
    assert_int_equal(left("control group"), 0);
    /* Inside a container the group is the root of the mount, whatever its path is outside. */
    put("proc/self/cgroup", "0::/not/to/be/seen\n");
    put("sys/fs/cgroup/memory.max", "20971520\n");
    put("sys/fs/cgroup/memory.current", "0\n");
    assert_int_equal(left("control group"), 20 * MIB);
}

static void test_v1(void **state)
{
    put("proc/meminfo", "MemAvailable:  1048576 kB\n");
    put("proc/self/cgroup", "5:cpu,cpuacct:/c\n4:hugetlb,memory:/c\n3:memory2:/d\n0::/\n");
    put("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "52428800\n");
    put("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "20971520\n");
    put("sys/fs/cgroup/memory/c/memory.stat",
        "inactive_file 1\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
    put("sys/fs/cgroup/memory/d/memory.limit_in_bytes", "1\n");
    put("sys/fs/cgroup/memory/d/memory.usage_in_bytes", "1\n");
    assert_int_equal(left("control group"), 31 * MIB);
    /* The number that means "none" limits nothing. */
    put("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(left("of the host"), 1024 * MIB);
}

/* The real files, and a limit that a child sets itself. */
static void test_here(void **state)
{
    struct hostmem memory;
    hostmem_read(&memory);
    assert_true(memory.free_bytes > 0 && memory.free_bytes < UINT64_MAX);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {0, RLIM_INFINITY};
        hostmem_read(&memory); /* the files once, so that reading them takes nothing new */
        limit.rlim_cur = 0;
        (void)setrlimit(RLIMIT_DATA, &limit);
        hostmem_read(&memory);
        _exit(memory.free_bytes == 0 && strstr(memory.limit, "ulimit -d") ? 0 : 1);
    }
    int code;
    assert_int_equal(waitpid(child, &code, 0), child);
    assert_int_equal(code, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_host, fresh, gone),
        cmocka_unit_test_setup_teardown(test_v2, fresh, gone),
        cmocka_unit_test_setup_teardown(test_v1, fresh, gone),
        cmocka_unit_test(test_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
