/* test_sample [DEVICE small|all|time]: tokens drawn from logits. The host's arithmetic against sums
 * of library exponentials in long double, sorted by qsort; and with a DEVICE its ids against the
 * host's, which have to be the same without exception: over sizes of vocabulary up to 129,280,
 * ties, rows that are all equal, infinities and what is no number. `time` prints microseconds
 * of 1 and 16 rows of 129,280 in place of that. 77 where the device isn't.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/registry.h"
#include "kernels/sample.h"
#include "tests/kernels/random.h"
#include "tests/kernels/small.h"

static uint64_t seed = 11;
static unsigned n_checked, n_failed;

static void expect(bool is_so, const char *what, uint32_t n, uint32_t got, uint32_t want)
{
    n_checked++;
    if (!is_so && n_failed++ < 20) {
        printf("WRONG: %s of %" PRIu32 " ids: %" PRIu32 ", should be %" PRIu32 "\n", what, n, got,
               want);
    }
}

/* --- rows and how they are drawn */

enum { NORMAL, WIDE, TIES, EQUAL, NOTHING, HOLES, NO_NUMBERS, FIRST_NONE, INFINITE, PEAK, N_KINDS };
static const char *const kinds[] = {"normal", "wide",       "ties",       "equal",    "nothing",
                                    "holes",  "no numbers", "first none", "infinite", "peak"};

static void fill(float *x, uint32_t n, int kind)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = normal(&seed) * (kind == WIDE ? 60.0f : 4.0f);
        if (kind == TIES) {
            x[i] = (float)below(&seed, 5);
        } else if (kind == EQUAL) {
            x[i] = -3.25f;
        } else if (kind == NOTHING || (kind == HOLES && below(&seed, 2))) {
            x[i] = -INFINITY;
        } else if (kind == NO_NUMBERS && below(&seed, 3) == 0) {
            x[i] = NAN;
        }
    }
    if (kind == FIRST_NONE) {
        x[0] = NAN;
    } else if (kind == INFINITE) {
        x[below(&seed, n)] = INFINITY;
    } else if (kind == PEAK) {
        x[below(&seed, n)] = 40.0f;
    }
}

static struct ops_draw how(uint32_t n)
{
    static const float temperatures[] = {0, 1, 0.7f, 0.05f, 3, 1e-30f},
                       parts[] = {1, 0.9f, 0.5f, 0.01f, 0, 0.999f}, leasts[] = {0, 0.1f, 0.9f, 1};
    uint32_t k = below(&seed, 4);
    return (struct ops_draw){.seed = next_random(&seed),
                             .temperature = temperatures[below(&seed, 6)],
                             .top_p = parts[below(&seed, 6)],
                             .min_p = below(&seed, 2) ? 0 : leasts[below(&seed, 4)],
                             .top_k = k == 0 ? 0 : (k == 1 ? -1 : 1 + (int32_t)below(&seed, n)),
                             .is_drawn = 1};
}

static uint32_t by_host(const float *logits, uint32_t n, const struct ops_draw *draw,
                        uint64_t position)
{
    float *copy = mem_array(n, sizeof(float));
    uint32_t *sorted = mem_array(n, sizeof(*sorted));
    uint8_t *keep = mem_alloc(n);
    memcpy(copy, logits, n * sizeof(float));
    uint32_t id = sample_draw(copy, n, draw, position, sorted, keep);
    mem_free(copy);
    mem_free(sorted);
    mem_free(keep);
    return id;
}

/* --- the host's, against long double */

struct item {
    uint32_t id;
    float logit;
    long double weight;
    bool kept;
};

static int by_weight(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return x->logit != y->logit ? (x->logit > y->logit ? -1 : 1)
                                : (x->id > y->id) - (x->id < y->id);
}

static int by_id(const void *a, const void *b)
{
    const struct item *x = a, *y = b;
    return (x->id > y->id) - (x->id < y->id);
}

/* What the row is cut to; false where a sum is so near to top_p that rounding may decide. */
static bool cut(struct item *items, uint32_t n, const struct ops_draw *draw)
{
    uint32_t k = draw->top_k > 0 && (uint32_t)draw->top_k < n ? (uint32_t)draw->top_k : n;
    long double total = 0, sum = 0;
    qsort(items, n, sizeof(*items), by_weight);
    for (uint32_t i = 0; i < k; i++) {
        total += items[i].weight;
    }
    bool is_clear = k == n || items[k].logit < items[k - 1].logit - 1e-4f;
    for (uint32_t i = 0; i < k && (i == 0 || sum < draw->top_p * total || draw->top_p >= 1); i++) {
        items[i].kept = true;
        sum += items[i].weight;
        is_clear =
            is_clear && (draw->top_p >= 1 || fabsl(sum - draw->top_p * total) > 1e-5L * total);
    }
    for (uint32_t i = 0; i < n; i++) {
        is_clear = is_clear && (draw->min_p == 0 || fabsl(items[i].weight - draw->min_p) > 1e-6L ||
                                items[i].weight == 1);
        items[i].kept = items[i].kept && items[i].weight >= draw->min_p;
    }
    qsort(items, n, sizeof(*items), by_id);
    return is_clear;
}

static bool check_host(uint32_t n)
{
    float *x = random_floats(&seed, n, 2.0f);
    struct item *items = mem_zalloc(n * sizeof(*items));
    struct ops_draw draw = how(n);
    draw.temperature = draw.temperature < 0.1f ? 1.0f : draw.temperature;
    uint64_t position = below(&seed, 1u << 20);
    long double top = x[0], total = 0, sum = 0;
    for (uint32_t i = 1; i < n; i++) {
        top = x[i] > top ? x[i] : top;
    }
    for (uint32_t i = 0; i < n; i++) {
        items[i] = (struct item){i, x[i], expl((x[i] - top) / draw.temperature), false};
    }
    bool is_clear = cut(items, n, &draw);
    uint32_t got = by_host(x, n, &draw, position);
    for (uint32_t i = 0; i < n; i++) {
        total += items[i].kept ? items[i].weight : 0;
    }
    for (uint32_t i = 0; i < got; i++) {
        sum += items[i].kept ? items[i].weight : 0;
    }
    long double target = sample_uniform(draw.seed, position) * 0x1p-53L * total;
    bool is_there = items[got].kept && sum <= target + 1e-5L * total &&
                    sum + items[got].weight >= target - 1e-5L * total;
    if (is_clear) {
        expect(is_there, "an id out of its place", n, got, got);
    }
    mem_free(items);
    mem_free(x);
    return is_clear;
}

static void host(void)
{
    unsigned n_clear = 0, n_all = 400;
    for (unsigned i = 0; i < n_all; i++) {
        n_clear += check_host(1 + below(&seed, i % 2 ? 20 : 3000));
    }
    expect(n_clear > n_all / 2, "cases that rounding does not decide", n_all, n_clear, n_all);
    double most = 0;
    for (uint32_t i = 0; i < 2000000; i++) {
        float e = -(float)i * (87.0f / 2000000.0f), got = sample_exp(e);
        double want = exp((double)e), off = fabs((double)got - want) / want;
        most = off > most ? off : most;
        n_failed += got > 1.0f;
    }
    expect(most < 0x1p-22, "e^x within 2^-22", 0, (uint32_t)(most * 0x1p32), 0);
    expect(sample_exp(0) == 1 && sample_exp(-INFINITY) == 0 && sample_exp(NAN) == 0, "e^x at ends",
           0, 0, 0);
    expect(sample_units(1) == UINT64_C(1) << 43 && sample_units(0x1p-43f) == 1 &&
               sample_units(0x1.8p-43f) == 1 && sample_units(0x1p-44f) == 0 &&
               sample_units(0) == 0 && sample_units(0.75f) == UINT64_C(3) << 41,
           "units", 0, 0, 0);
    for (uint32_t n = 1; n < 200; n += 7) {
        float *x = mem_array(n, sizeof(float));
        const struct ops_draw greedy = {.is_drawn = 1};
        fill(x, n, TIES);
        uint32_t want = 0;
        for (uint32_t i = n; i-- > 0;) {
            want = x[i] >= x[want] ? i : want;
        }
        expect(by_host(x, n, &greedy, 3) == want, "greedy", n, by_host(x, n, &greedy, 3), want);
        fill(x, n, NOTHING);
        expect(by_host(x, n, &greedy, 3) == 0, "greedy among none", n, by_host(x, n, &greedy, 3),
               0);
        mem_free(x);
    }
}

/* --- a device's, against the host's */

enum { ROWS = 6 };

static void device(const struct ops *ops, uint32_t n, unsigned n_calls)
{
    struct ops_dims dims = small_dims(256);
    struct ops_limits limits = {
        .n_rows = ROWS, .n_seqs = ROWS, .n_tokens = 64, .early_launches = early_launches()};
    struct ops_device *dev;
    struct error err;
    dims.vocab = n;
    if (ops->open(&dims, &limits, &dev, &err)) {
        printf("open: %s\n", err.text);
        exit(1);
    }
    size_t stride = n + 5; /* more than a row: it may not be read */
    float *there = ops->alloc(dev, ROWS * stride * sizeof(float)), *x = poisoned(ROWS * stride);
    uint32_t tokens[ROWS] = {0}, positions[ROWS], seq_of[ROWS], got[ROWS];
    struct ops_seq seqs[ROWS];
    struct ops_draw draws[ROWS];
    struct ops_rows rows = {
        .tokens = tokens, .positions = positions, .seq_of = seq_of, .seqs = seqs, .draws = draws};
    for (unsigned call = 0; call < n_calls; call++) {
        rows.n_rows = rows.n_seqs = 1 + below(&seed, ROWS);
        int kind[ROWS];
        for (uint32_t i = 0; i < rows.n_rows; i++) {
            seqs[i] = (struct ops_seq){.slot = OPS_NO_SLOT, .first_row = i, .n_rows = 1};
            seq_of[i] = i;
            positions[i] = below(&seed, 1u << 20);
            kind[i] = (int)((call + i) % N_KINDS);
            draws[i] = how(n);
            draws[i].is_drawn = below(&seed, 8) != 0;
            fill(x + i * stride, n, kind[i]);
        }
        ops->write(dev, there, x, ROWS * stride * sizeof(float));
        uint32_t before[ROWS];
        ops->drawn(dev, before, ROWS);
        ops->begin(dev, &rows);
        ops->sample(dev, &rows, there, stride);
        ops->drawn(dev, got, ROWS);
        ops->fence(dev, call % OPS_FENCES);
        if (ops->wait_fence(dev, call % OPS_FENCES, 0, NULL, NULL, &err)) {
            printf("wait: %s\n", err.text);
            exit(1);
        }
        for (uint32_t i = 0; i < ROWS; i++) {
            bool is_drawn = i < rows.n_rows && draws[i].is_drawn;
            uint32_t want =
                is_drawn ? by_host(x + i * stride, n, &draws[i], positions[i] + 1ull) : before[i];
            expect(got[i] == want, is_drawn ? kinds[kind[i]] : "not drawn", n, got[i], want);
        }
    }
    mem_free(x);
    ops->close(dev);
}

/* --- how long */

static void times(const struct ops *ops)
{
    enum { IDS = 129280, MOST = 16, TIMES = 50 };
    static const struct {
        const char *name;
        struct ops_draw draw;
    } ways[] = {
        {"greedy", {.top_p = 1, .is_drawn = 1}},
        {"temperature 1", {.temperature = 1, .top_p = 1, .is_drawn = 1}},
        {"top_k 50", {.temperature = 1, .top_p = 1, .top_k = 50, .is_drawn = 1}},
        {"top_p 0.95", {.temperature = 1, .top_p = 0.95f, .is_drawn = 1}},
        {"top_k 50, top_p 0.95", {.temperature = 1, .top_p = 0.95f, .top_k = 50, .is_drawn = 1}}};
    struct ops_dims dims = small_dims(256);
    struct ops_limits limits = {
        .n_rows = MOST, .n_seqs = MOST, .n_tokens = 64, .early_launches = early_launches()};
    struct ops_device *dev;
    struct error err;
    dims.vocab = IDS;
    if (ops->open(&dims, &limits, &dev, &err)) {
        printf("open: %s\n", err.text);
        exit(1);
    }
    float *x = random_floats(&seed, (size_t)MOST * IDS, 3.0f);
    float *there = ops->alloc(dev, (size_t)MOST * IDS * sizeof(float));
    uint32_t tokens[MOST] = {0}, positions[MOST] = {0}, seq_of[MOST], n_rows[] = {1, MOST};
    struct ops_seq seqs[MOST];
    struct ops_draw draws[MOST];
    ops->write(dev, there, x, (size_t)MOST * IDS * sizeof(float));
    for (size_t way = 0; way < sizeof(ways) / sizeof(ways[0]); way++) {
        for (int k = 0; k < 2; k++) {
            struct ops_rows rows = {n_rows[k], n_rows[k], tokens, positions, seq_of, seqs, draws};
            for (uint32_t i = 0; i < MOST; i++) {
                seqs[i] = (struct ops_seq){.slot = OPS_NO_SLOT, .first_row = i, .n_rows = 1};
                seq_of[i] = i;
                draws[i] = ways[way].draw;
                draws[i].seed = i;
            }
            ops->begin(dev, &rows);
            ops->sample(dev, &rows, there, IDS);
            ops->mark(dev, 0);
            for (int i = 0; i < TIMES; i++) {
                ops->sample(dev, &rows, there, IDS);
            }
            ops->mark(dev, 1);
            if (ops->wait(dev, &err)) {
                printf("%s\n", err.text);
                exit(1);
            }
            printf("%-22s %2u rows of %d ids: %7.1f us\n", ways[way].name, n_rows[k], IDS,
                   ops->between_s(dev, 0, 1) * 1e6 / TIMES);
        }
    }
    mem_free(x);
    ops->close(dev);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        host();
    } else {
        struct registry_choice choice;
        struct error err;
        struct registry_wishes wishes;
        struct ops_limits limits = {.n_rows = 0};
        char asked[] = "sample=device", *forced[] = {asked}, all[] = "all", *allowed[] = {all};
        if (registry_find(argv[1], &choice, &err)) {
            printf("skipped: %s\n", err.text);
            return 77;
        }
        struct ops ops = *choice.ops;
        struct registry_query query = {.backend = choice.backend,
                                       .device = &choice.device,
                                       .wishes = &wishes,
                                       .limits = &limits};
        if (registry_wishes_parse(forced, 1, allowed, 1, &wishes, &err) ||
            registry_select(&query, &ops, NULL, NULL, &err)) {
            printf("%s\n", err.text);
            return 1;
        }
        static const uint32_t sizes[] = {1,   2,    31,   32,   33,    64,     511,   512,
                                         513, 1000, 2049, 4096, 16384, 129280, 131073};
        if (argc > 2 && strcmp(argv[2], "time") == 0) {
            times(&ops);
            return 0;
        }
        bool is_small = argc > 2 && strcmp(argv[2], "small") == 0;
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            device(&ops, sizes[i], is_small ? (sizes[i] > 5000 ? 2 : 6) : 40);
        }
    }
    printf("%u checked, %u wrong\n", n_checked, n_failed);
    return n_failed ? 1 : 0;
}
