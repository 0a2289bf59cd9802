/* test_record: what a device does with calls that it keeps, beside what test_graphs shows of whole
 * steps: sums of a group, what is refused, and a device that hangs. 77 without a GPU.
 */
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <time.h>

#include "kernels/cuda/cuda.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/small.h"

enum { HIDDEN = 256, ROWS = 5, DEVICES = 3 };

static struct ops_seq seqs[ROWS];
static uint32_t tokens[ROWS], positions[ROWS], seq_of[ROWS];

static void expect(bool is_so, const char *what)
{
    n_compared++;
    if (!is_so) {
        n_failed++;
        printf("NOT SO: %s\n", what);
    }
}

static struct ops_device *open_one(void)
{
    struct ops_dims dims = small_dims(HIDDEN);
    struct ops_limits limits = {.n_rows = ROWS, .n_tokens = 64, .early_launches = early_launches()};
    struct ops_device *device;
    struct error err;
    dims.is_partial = true;
    if (ops_cuda.open(&dims, &limits, &device, &err)) {
        stop("open", &err);
    }
    return device;
}

/* n rows, each a sequence of its own, or one that only fills up. */
static struct ops_rows rows_of(uint32_t n)
{
    for (uint32_t i = 0; i < ROWS; i++) {
        seqs[i] = (struct ops_seq){.slot = OPS_NO_SLOT, .first_row = i, .n_rows = 1};
        seq_of[i] = i;
    }
    return (struct ops_rows){.n_rows = n,
                             .n_seqs = n,
                             .tokens = tokens,
                             .positions = positions,
                             .seq_of = seq_of,
                             .seqs = seqs};
}

/* A sum over devices, recorded once and done three times with other parts; what is asked for
 * between the replays keeps its order with them on every device. */
static void group(uint32_t n)
{
    struct ops_device *devices[DEVICES];
    float *y[DEVICES];
    struct ops_recording recording;
    struct error err;
    const struct ops_rows rows = rows_of(ROWS);
    const size_t n_floats = (size_t)ROWS * HIDDEN;
    for (uint32_t k = 0; k < n; k++) {
        devices[k] = open_one();
        y[k] = ops_cuda.alloc(devices[k], n_floats * sizeof(float));
        ops_cuda.begin(devices[k], &rows);
    }
    ops_cuda.comm(devices, n, ROWS, y); /* as a recording asks */
    for (uint32_t k = 0; k < n; k++) {
        wait_for(&(struct side){&ops_cuda, devices[k]});
    }
    uint64_t before = ops_cuda.launches(devices[0]);
    if (ops_cuda.record_begin(devices, n, &err)) {
        stop("record_begin", &err);
    }
    for (uint32_t k = 0; k < n; k++) {
        ops_cuda.begin(devices[k], &rows);
    }
    ops_cuda.comm(devices, n, ROWS, y);
    ops_cuda.record_progress(devices[0], 7);
    if (ops_cuda.record_end(devices, n, &recording, &err)) {
        stop("record_end", &err);
    }
    expect(recording.n_rows == ROWS && recording.n_seqs == ROWS, "the numbers of a recording");
    expect(recording.n_launches == 2 * n + 2, "the kernels of a recording");
    expect(ops_cuda.launches(devices[0]) == before, "what is recorded was not launched");
    for (int pass = 0; pass < 3; pass++) {
        float *parts[DEVICES], *want = mem_array(n_floats, sizeof(float));
        for (uint32_t k = 0; k < n; k++) {
            parts[k] = random_floats(&seed, n_floats, 1.0f);
            ops_cuda.write(devices[k], y[k], parts[k], n_floats * sizeof(float));
        }
        ops_cuda.replay(devices, n, &recording, &rows);
        expect(ops_cuda.launches(devices[0]) == before + 1 + (uint64_t)pass, "one launch");
        for (size_t i = 0; i < n_floats; i++) {
            want[i] = parts[0][i];
            for (uint32_t k = 1; k < n; k++) {
                want[i] += parts[k][i];
            }
            want[i] = bf16_round(want[i]);
        }
        for (uint32_t k = n; k-- > 0;) {
            uint32_t *got = fetch(&(struct side){&ops_cuda, devices[k]}, y[k], n_floats);
            compare_words("a recorded sum", (const uint32_t *)(const void *)want, got, n_floats);
            mem_free(got);
            mem_free(parts[k]);
        }
        mem_free(want);
    }
    expect(*devices[0]->passed == 7, "a replay says how far it came");
    ops_cuda.recording_free(devices[0], &recording);
    for (uint32_t k = 0; k < n; k++) {
        ops_cuda.close(devices[k]);
    }
}

static struct ops_recording record_rows(struct ops_device *device)
{
    struct ops_recording recording;
    struct error err;
    const struct ops_rows rows = rows_of(2);
    ops_cuda.begin(device, &rows);
    wait_for(&(struct side){&ops_cuda, device});
    if (ops_cuda.record_begin(&device, 1, &err)) {
        stop("record_begin", &err);
    }
    ops_cuda.begin(device, &rows);
    if (ops_cuda.record_end(&device, 1, &recording, &err)) {
        stop("record_end", &err);
    }
    return recording;
}

/* What goes wrong is told, and the device then serves no more. */
static void refusals(void)
{
    struct error err = {""};
    struct ops_recording recording = {.n_rows = 99};
    struct ops_device *device = open_one();
    const struct ops_rows many = rows_of(ROWS);
    struct ops_rows more = many;
    more.n_rows = more.n_seqs = ROWS + 1;
    if (ops_cuda.record_begin(&device, 1, &err)) {
        stop("record_begin", &err);
    }
    ops_cuda.begin(device, &more);
    expect(ops_cuda.record_end(&device, 1, &recording, &err) == STATUS_INVALID &&
               recording.n_rows == 99 && strstr(err.text, "larger than the device was opened for"),
           "a recording of more rows than there is room for is refused");
    expect(ops_cuda.wait(device, &err) == STATUS_INVALID, "such a device serves no more");
    ops_cuda.close(device);

    device = open_one();
    if (ops_cuda.record_begin(&device, 1, &err)) {
        stop("record_begin", &err);
    }
    expect(ops_cuda.wait(device, &err) == STATUS_SYSTEM, "waiting while recording is an error");
    expect(ops_cuda.record_end(&device, 1, &recording, &err) == STATUS_SYSTEM &&
               recording.n_rows == 99,
           "and ends the recording");
    ops_cuda.close(device);

    device = open_one();
    recording = record_rows(device);
    ops_cuda.replay(&device, 1, &recording, &many);
    expect(ops_cuda.wait(device, &err) == STATUS_INVALID &&
               strstr(err.text, "not the one that was recorded"),
           "other numbers of rows than those recorded are refused");
    ops_cuda.recording_free(device, &recording);
    ops_cuda.close(device);
}

static void count_moved(void *cookie)
{
    ++*(int *)cookie;
}

/* --- a device that hangs: a function of the host stands in its stream until it is let go */

enum { STANDS_MS = 3000 };
static atomic_bool let_go, was_let_go;

static void CUDART_CB stand(void *cookie)
{
    for (int i = 0; i < STANDS_MS && !atomic_load(&let_go); i++) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    atomic_store(&was_let_go, true);
}

static void hang(void)
{
    struct error err = {""};
    struct ops_device *device = open_one();
    struct ops_recording recording = record_rows(device);
    const struct ops_rows rows = rows_of(2);
    int n_moved = 0;
    ops_cuda.replay(&device, 1, &recording, &rows);
    expect(ops_cuda.wait_moving(&device, 1, UINT64_C(5000000000), count_moved, &n_moved, &err) ==
               STATUS_OK,
           "a replay ends");
    if (cudaLaunchHostFunc(device->stream, stand, NULL) != cudaSuccess) {
        stop("a function of the host in the stream", NULL);
    }
    if (cudaStreamQuery(device->stream) == cudaSuccess) {
        printf("a device that hangs was not tried: who asks this one does its work\n");
        ops_cuda.recording_free(device, &recording);
        ops_cuda.close(device);
        return;
    }
    ops_cuda.replay(&device, 1, &recording, &rows);
    expect(ops_cuda.wait_moving(&device, 1, UINT64_C(200000000), count_moved, &n_moved, &err) ==
                   STATUS_SYSTEM &&
               strstr(err.text, "hangs"),
           "a device that hangs is given up");
    expect(ops_cuda.wait(device, &err) == STATUS_SYSTEM, "and stays so");
    ops_cuda.recording_free(device, &recording);
    ops_cuda.close(device);
    expect(!atomic_load(&was_let_go), "and nothing waited for it");
    atomic_store(&let_go, true);
    while (!atomic_load(&was_let_go)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    (void)cudaDeviceSynchronize();
}

int main(int argc, char **argv)
{
    struct registry_choice choice;
    struct error err;
    if (registry_find("cuda:0", &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 11;
    snprintf(where, sizeof(where), "recorded calls");
    for (uint32_t n = 1; n <= DEVICES; n++) {
        group(n);
    }
    refusals();
    hang();
    printf("%d compared, %d failed\n", n_compared, n_failed);
    return n_failed ? 1 : 0;
}
