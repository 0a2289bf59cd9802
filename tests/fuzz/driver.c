#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * Runs a fuzz target without libFuzzer, so that any compiler tests it on every run:
 *
 *     fuzz_x PATH [MUTATIONS]      each seed (a file, or all files of a folder), then cut short at
 *                                  many lengths, then MUTATIONS deterministic changes of it
 *     fuzz_x --one FILE NUMBER     only that variant, to look at one that failed
 *
 * A variant that kills the process is named on standard error. Each input is handed over in an
 * allocation of exactly its size, so that a sanitizer sees a read past its end.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
void __sanitizer_set_death_callback(void (*callback)(void)) __attribute__((weak));

enum {
    MUTATIONS_DEFAULT = 500,
    CUTS_MAX = 300,
    SEED_MAX_BYTES = 1 << 20,
    GROWTH_MAX_BYTES = 4096,
    VARIANT_SECONDS_MAX = 20, /* far beyond any input here, also under a sanitizer: a hang */
};

static struct {
    const char *seed;
    unsigned long variant;
} now;

static void say_where(void)
{
    char text[512];
    int n = snprintf(text, sizeof(text), "\nfailed on: --one %s %lu\n", now.seed, now.variant);
    if (n > 0 && write(STDERR_FILENO, text, (size_t)n < sizeof(text) ? (size_t)n : 511) < 0) {
        _exit(1);
    }
}

static void on_abort(int number)
{
    say_where();
    signal(number, SIG_DFL);
    raise(number);
}

/* xorshift: the same sequence on every machine. */
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static size_t pick(uint64_t *state, size_t n)
{
    return n == 0 ? 0 : (size_t)(next_random(state) % n);
}

static size_t change_once(uint8_t *data, size_t bytes, size_t capacity, uint64_t *random)
{
    static const uint8_t edges[] = {0, 1, 0x7f, 0x80, 0xff, '"', '\\', '{', '[', '-', '9', '\n'};
    size_t at = pick(random, bytes), n = 1 + pick(random, 16), to;
    switch (pick(random, 7)) {
    case 0:
        if (bytes > 0) {
            data[at] ^= (uint8_t)(1u << pick(random, 8));
        }
        break;
    case 1:
        if (bytes > 0) {
            data[at] = edges[pick(random, sizeof(edges))];
        }
        break;
    case 2: /* leave a piece out */
        n = n > bytes - at ? bytes - at : n;
        memmove(data + at, data + at + n, bytes - at - n);
        return bytes - n;
    case 3: /* put new bytes in */
        if (bytes + n <= capacity) {
            memmove(data + at + n, data + at, bytes - at);
            for (size_t i = 0; i < n; i++) {
                data[at + i] = pick(random, 2) ? edges[pick(random, sizeof(edges))]
                                               : (uint8_t)next_random(random);
            }
            return bytes + n;
        }
        break;
    case 4: /* say a piece twice */
        n = 1 + pick(random, 256);
        n = n > bytes - at ? bytes - at : n;
        if (bytes + n <= capacity) {
            memmove(data + at + n, data + at, bytes - at);
            return bytes + n;
        }
        break;
    case 5: /* overwrite a piece by another */
        to = pick(random, bytes);
        n = n > bytes - at ? bytes - at : n;
        n = n > bytes - to ? bytes - to : n;
        memmove(data + to, data + at, n);
        break;
    default: /* an integer of four or eight bytes at its edges */
        n = pick(random, 2) ? 4 : 8;
        if (bytes >= n) {
            memset(data + pick(random, bytes - n + 1), pick(random, 2) ? 0xff : 0, n);
        }
        break;
    }
    return bytes;
}

static unsigned long n_cuts(size_t bytes)
{
    return bytes < CUTS_MAX ? bytes : CUTS_MAX;
}

/* Variant 0 is the seed itself, then come the cuts, then the changes. */
static void run_variant(const uint8_t *seed, size_t seed_bytes, unsigned long variant)
{
    size_t capacity = seed_bytes + GROWTH_MAX_BYTES, bytes = seed_bytes;
    uint8_t *work = malloc(capacity);
    unsigned long cuts = n_cuts(seed_bytes);
    memcpy(work, seed, seed_bytes);
    if (variant > 0 && variant <= cuts) {
        bytes = (size_t)((variant - 1) * (double)seed_bytes / (double)cuts);
    } else if (variant > cuts) {
        uint64_t random = (variant + 1) * UINT64_C(0x9e3779b97f4a7c15);
        size_t changes = 1 + pick(&random, 4);
        for (size_t i = 0; i < changes; i++) {
            bytes = change_once(work, bytes, capacity, &random);
        }
    }
    uint8_t *exact = malloc(bytes ? bytes : 1);
    memcpy(exact, work, bytes);
    free(work);
    now.variant = variant;
    alarm(VARIANT_SECONDS_MAX);
    LLVMFuzzerTestOneInput(exact, bytes);
    free(exact);
}

static uint8_t *load(const char *path, size_t *ret_bytes)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    uint8_t *data = malloc(SEED_MAX_BYTES);
    *ret_bytes = fread(data, 1, SEED_MAX_BYTES, file);
    fclose(file);
    return data;
}

static unsigned long run_seed(const char *path, unsigned long mutations)
{
    size_t bytes;
    uint8_t *seed = load(path, &bytes);
    unsigned long n = 1 + n_cuts(bytes) + mutations;
    now.seed = path;
    for (unsigned long variant = 0; variant < n; variant++) {
        run_variant(seed, bytes, variant);
    }
    free(seed);
    return n;
}

static int visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static unsigned long run_folder(const char *path, unsigned long mutations)
{
    struct dirent **entries;
    unsigned long n = 0;
    int n_entries = scandir(path, &entries, visible, alphasort);
    if (n_entries <= 0) {
        fprintf(stderr, "%s: no seeds\n", path);
        exit(1);
    }
    for (int i = 0; i < n_entries; i++) {
        char file[4096];
        snprintf(file, sizeof(file), "%s/%s", path, entries[i]->d_name);
        n += run_seed(file, mutations);
        free(entries[i]);
    }
    free(entries);
    return n;
}

int main(int argc, char **argv)
{
    struct stat stat_path;
    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: %s PATH [MUTATIONS] | --one FILE NUMBER\n", argv[0]);
        return 2;
    }
    signal(SIGABRT, on_abort);
    signal(SIGALRM, on_abort);
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(say_where);
    }
    if (strcmp(argv[1], "--one") == 0 && argc == 4) {
        size_t bytes;
        uint8_t *seed = load(argv[2], &bytes);
        now.seed = argv[2];
        run_variant(seed, bytes, strtoul(argv[3], NULL, 10));
        free(seed);
        return 0;
    }
    unsigned long mutations = argc > 2 ? strtoul(argv[2], NULL, 10) : MUTATIONS_DEFAULT;
    if (stat(argv[1], &stat_path) != 0) {
        perror(argv[1]);
        return 1;
    }
    unsigned long n =
        S_ISDIR(stat_path.st_mode) ? run_folder(argv[1], mutations) : run_seed(argv[1], mutations);
    printf("%lu inputs\n", n);
    return 0;
}
