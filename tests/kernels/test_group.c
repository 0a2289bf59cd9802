/* test_group DEVICE [push] [hang|stuck|absent]: what ranks on a GPU each do together; DEVICE is
 * cuda:N,N,... 77 without.
 *
 * Sums of every size are those of a loop in rank order, whatever else the call has, by comm=plain
 * or comm=push. With `hang`, a rank's stream is stopped before a sum: the wait must end within 2 s
 * and name the rank, or, where nothing ends the wait, as among ranks on one GPU, the process must.
 * That runs in a child, since nothing brings the stream back.
 */
#include <cuda_runtime_api.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/loop.h"
#include "base/mem.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tuned.h"
#include "kernels/registry.h"
#include "random.h"
#include "small.h"
#include "tests/lost.h"

enum { HIDDEN = 200, MAX_ROWS = 70, TESTED_SUMS = 40, SUMS_BEFORE = 7 };

struct group {
    const struct ops *ops;
    uint32_t n;
    struct ops_device *devices[REGISTRY_MAX_GROUP];
    float *y[REGISTRY_MAX_GROUP];
};

static void stop(const char *what, const struct error *err)
{
    fprintf(stderr, "%s: %s\n", what, err->text);
    _exit(1);
}

static struct ops table; /* what is tested */

static void open_group(const struct registry_choice *choice, struct group *g)
{
    struct ops_limits limits = {
        .n_rows = MAX_ROWS, .n_tokens = 64, .early_launches = early_launches()};
    struct error err;
    *g = (struct group){.ops = &table, .n = choice->n_devices};
    for (uint32_t k = 0; k < g->n; k++) {
        struct ops_dims dims = small_dims(HIDDEN);
        dims.exact = dims.is_partial = true;
        limits.device_i = choice->devices_i[k];
        if (g->ops->open(&dims, &limits, &g->devices[k], &err)) {
            stop("open", &err);
        }
    }
    if (g->n > 1 && g->ops->join(g->devices, g->n, &err)) {
        stop("join", &err);
    }
    for (uint32_t k = 0; k < g->n; k++) {
        g->y[k] = g->ops->alloc(g->devices[k], MAX_ROWS * HIDDEN * sizeof(float));
        if (!g->y[k]) {
            _exit(1);
        }
    }
}

static void close_group(struct group *g)
{
    for (uint32_t k = 0; k < g->n; k++) {
        g->ops->close(g->devices[k]);
    }
}

static void wait_all(struct group *g)
{
    struct error err;
    for (uint32_t k = 0; k < g->n; k++) {
        if (g->ops->wait(g->devices[k], &err)) {
            stop("wait", &err);
        }
    }
}

static int compare_sums(const struct registry_choice *choice)
{
    struct group g;
    uint64_t seed = 20261130;
    size_t most = (size_t)MAX_ROWS * HIDDEN;
    float *parts[REGISTRY_MAX_GROUP], *want = mem_array(most, sizeof(float)),
                                      *got = mem_array(most, sizeof(float));
    int n_wrong = 0;
    open_group(choice, &g);
    for (int i = 0; i < TESTED_SUMS; i++) {
        uint32_t n_rows = i == 0 ? MAX_ROWS : 1 + below(&seed, MAX_ROWS);
        size_t n = (size_t)n_rows * HIDDEN;
        for (uint32_t k = 0; k < g.n; k++) {
            parts[k] = random_floats(&seed, n, 1.0f);
            g.ops->write(g.devices[k], g.y[k], parts[k], n * sizeof(float));
        }
        uint32_t n_times = 1 + below(&seed, 4); /* not waited for: sums of sums */
        for (uint32_t t = 0; t < n_times; t++) {
            g.ops->comm(g.devices, g.n, n_rows, g.y);
            for (size_t j = 0; j < n; j++) {
                float first = t ? want[j] : parts[0][j];
                want[j] = first;
                for (uint32_t k = 1; k < g.n; k++) {
                    want[j] += t ? first : parts[k][j];
                }
            }
        }
        for (uint32_t k = 0; k < g.n; k++) {
            g.ops->read(g.devices[k], got, g.y[k], n * sizeof(float));
            wait_all(&g);
            n_wrong += memcmp(want, got, n * sizeof(float)) != 0;
            mem_free(parts[k]);
        }
    }
    close_group(&g);
    mem_free(want);
    mem_free(got);
    printf("%d sums over %u ranks, %d differ\n", TESTED_SUMS, choice->n_devices, n_wrong);
    return n_wrong != 0;
}

/* --- a rank that hangs */

#ifdef BATON_EMULATED
void emulated_nccl_hang(int rank); /* tests/emulate/nccl.cc */
void emulated_stream_hang(cudaStream_t stream);
static void plant(const char *how, struct ops_device *dev, int rank)
{
    if (strcmp(how, "absent") == 0) {
        emulated_nccl_hang(rank);
    } else {
        emulated_stream_hang(dev->stream);
    }
}
#else
static void sleep_on(void *cookie)
{
    sleep(60);
}

static void plant(const char *how, struct ops_device *dev, int rank)
{
    if (strcmp(how, "absent") == 0) {
        fprintf(stderr, "skipped: only an emulated NCCL can be told to\n");
        _exit(77);
    }
    if (cudaSetDevice((int)dev->limits.device_i) != cudaSuccess ||
        cudaLaunchHostFunc(dev->stream, sleep_on, NULL) != cudaSuccess) {
        _exit(1);
    }
}
#endif

static void sum_once(struct group *g, const struct ops_rows *rows)
{
    for (uint32_t k = 0; k < g->n; k++) {
        g->ops->enter(g->devices[k]);
        g->ops->begin(g->devices[k], rows);
    }
    g->ops->comm(g->devices, g->n, rows->n_rows, g->y);
    g->ops->comm(g->devices, g->n, rows->n_rows, g->y); /* behind it, as in a step */
}

/* The child: exits 3 once a wait failed, having said why and closed all. */
static void hang(const struct registry_choice *choice, const char *how)
{
    struct group g;
    struct error err;
    uint32_t token = 0;
    const struct ops_seq seq = {.n_rows = 1};
    const struct ops_rows rows = {1, 1, &token, &token, &token, &seq};
    open_group(choice, &g);
    for (int i = 0; i < SUMS_BEFORE; i++) {
        sum_once(&g, &rows);
        wait_all(&g);
    }
    plant(how, g.devices[g.n - 1], (int)g.n - 1);
    fprintf(stderr, "planted\n");
    sum_once(&g, &rows);
    for (uint32_t i = 0; i < g.n; i++) {
        uint32_t k = strcmp(how, "stuck") == 0 ? g.n - 1 - i : i;
        if (g.ops->wait(g.devices[k], &err)) {
            fprintf(stderr, "failed: %s\n", err.text);
            close_group(&g); /* waits for nothing */
            _exit(3);
        }
    }
    fprintf(stderr, "the waits ended as if nothing had happened\n");
    _exit(2);
}

static int watch_child(pid_t child, int from, const char *how, uint32_t last_rank, bool one_gpu)
{
    static char text[16384];
    size_t n = 0;
    char named[64];
    uint64_t planted_ns = 0;
    struct pollfd fd = {.fd = from, .events = POLLIN};
    while (n < sizeof(text) - 1 && poll(&fd, 1, 30000) > 0) {
        ssize_t got = read(from, text + n, sizeof(text) - 1 - n);
        if (got <= 0) {
            break;
        }
        n += (size_t)got;
        if (!planted_ns && strstr(text, "planted\n")) {
            planted_ns = loop_now_ns();
        }
    }
    uint64_t ended_ns = loop_now_ns();
    int code = 0;
    (void)kill(child, SIGKILL); /* if it still is */
    (void)waitpid(child, &code, 0);
    printf("%s%lld ms after the rank was stopped, status %x\n", text,
           (long long)((ended_ns - planted_ns) / 1000000), (unsigned)code);
    if (WIFEXITED(code) && WEXITSTATUS(code) == 77) {
        return 77;
    }
    if (strcmp(how, "absent") == 0) {
        snprintf(named, sizeof(named), "a sum hangs");
    } else {
        snprintf(named, sizeof(named), "rank %u (cuda:", last_rank);
    }
    bool is_stuck = one_gpu || strcmp(how, "stuck") == 0;
#ifdef BATON_EMULATED /* threads that spin look so slowly there that the process may end before */
    is_stuck = is_stuck || (table.comm == cuda_comm_push && strstr(text, "so the process does"));
#endif
    bool is_told = strstr(text, named) && strstr(text, "hangs") &&
                   strstr(text, is_stuck ? "so the process does" : "failed: ");
    bool has_ended = WIFEXITED(code) && WEXITSTATUS(code) == (is_stuck ? EXIT_FAILURE : 3);
    bool in_time = planted_ns && lost_within("the end", planted_ns, ended_ns, 2000);
    return is_told && has_ended && in_time ? 0 : 1;
}

int main(int argc, char **argv)
{
    int ends[2];
    struct registry_choice choice;
    struct error err;
    bool pushes = argc > 2 && strcmp(argv[2], "push") == 0;
    const char *how = argc == 3 + pushes ? argv[2 + pushes] : NULL;
    if (argc < 2 || argc > 3 + pushes) {
        return 2;
    }
    if (pushes) {
        tuned_push_comm(&table);
    }
    if (how) {
        if (pipe(ends)) {
            return 1;
        }
        pid_t child = fork(); /* before CUDA is touched: it does not survive a fork */
        if (child > 0) {
            lost_watch();
            close(ends[1]);
            uint32_t n = 1;
            bool one_gpu = true;
            for (const char *c = argv[1]; *c; c++) {
                n += *c == ',';
                one_gpu = one_gpu && (*c != ',' || atoi(c + 1) == atoi(strchr(argv[1], ':') + 1));
            }
            return watch_child(child, ends[0], how, n - 1, one_gpu);
        }
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
    }
    if (registry_find(argv[1], &choice, &err)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        return 77;
    }
    table = *choice.ops;
    if (pushes) {
        tuned_push_comm(&table);
    }
    if (how) {
        hang(&choice, how);
    }
    return compare_sums(&choice);
}
