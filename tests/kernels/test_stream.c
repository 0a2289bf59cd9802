/* The experts in two launches (experts=stream, or experts=scaled), or in one (experts=blocks), as
 * the registry installs them.
 *
 * Random weights in every format that it takes, random inputs, outputs poisoned: a call of all rows
 * is held to the CPU within the bound that is stated, and where a row is outside to that bound and
 * what its values on an edge of the quantiser may change (edges.h); and to cuda_experts_tensor (or
 * ..._scaled) bit by bit; then calls of 1 to 70 rows from random rows on, whose bits must be the
 * same. Rows are spread over the experts, or all at the same, or nobody's; devices own all experts,
 * some, or none, with and without the shared one, and one of several leaves the rounding to the
 * sum.
 *
 * test_stream cuda:N [tiny|small|all [experts=VARIANT]]. tiny: one shape, few calls; small: fewer
 * calls and no wide shapes, for tools that slow it down. What it refuses is checked without a
 * device too. 77 without it.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tuned.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/edges.h"
#include "tests/kernels/small.h"

enum { ROWS = 70, MOST_STREAMED = 64, MAX_EXPERTS = 24, SPARE = 32 };

enum spread { SPREAD, SAME, LEAST }; /* over all; all rows alike; all but a few rows nobody's */

struct shape {
    const char *name;
    uint32_t hidden, width, n_experts, first, end, used;
    bool has_shared, is_partial, is_wide;
    enum kind kind, shared_kind;
    enum spread spread;
    float limit, scale;
};

static const struct shape shapes[] = {
    {"as V4-Flash", 256, 128, 24, 0, 24, 6, true, false, false, K_MXFP4, K_FP8, SPREAD, 10, 0.1f},
    {"rank 0 of 2", 384, 256, 16, 0, 8, 4, true, true, false, K_MXFP4, K_FP8, SPREAD, 10, 0.1f},
    {"rank 1 of 2", 256, 384, 16, 8, 16, 4, false, true, false, K_MXFP4, K_FP8, SPREAD, 10, 0.1f},
    {"all the same", 256, 128, 8, 0, 8, 3, true, false, false, K_MXFP4, K_FP8, SAME, 0.5f, 0.1f},
    {"nobody's", 256, 128, 16, 12, 16, 2, false, false, false, K_MXFP4, K_FP8, LEAST, 10, 0.1f},
    {"nobody's, shared", 256, 128, 16, 12, 16, 2, true, false, false, K_MXFP4, K_FP8, LEAST, 10,
     0.1f},
    {"shared only", 256, 128, 8, 8, 8, 2, true, true, false, K_MXFP4, K_FP8, SPREAD, 10, 0.1f},
    {"large scales", 256, 128, 8, 0, 8, 2, true, false, false, K_MXFP4, K_MXFP4, SPREAD, 0, 20},
    {"FP8, bfloat16", 256, 128, 8, 0, 8, 2, true, false, false, K_FP8, K_BF16, SPREAD, 10, 0.1f},
    {"bfloat16, groups", 1024, 128, 8, 0, 8, 2, true, false, false, K_BF16, K_FP8, SPREAD, 10,
     0.1f},
    {"one choice", 128, 128, 4, 0, 4, 1, true, false, false, K_MXFP4, K_BF16, SPREAD, 10, 0.1f},
    {"V4-Flash", 4096, 2048, 24, 0, 24, 6, true, true, true, K_MXFP4, K_FP8, SPREAD, 10, 0.02f},
    {"V4-Flash, same", 4096, 2048, 8, 0, 8, 6, true, false, true, K_MXFP4, K_FP8, SAME, 10, 0.02f},
};

static void wrong(const char *what, uint32_t n, size_t i, float got, float want)
{
    if (n_failed++ < 20) {
        printf("WRONG %s, %s, %u rows: [%zu] is %.9g (%08x), should be %.9g (%08x)\n", where, what,
               n, i, (double)got, f32_bits(got), (double)want, f32_bits(want));
    }
}

/* --- what it refuses */

static void must_refuse(struct ops_dims d, const char *reason)
{
    const struct ops_limits limits = {.n_rows = 1};
    struct error why = {""};
    if (tuned_stream_serves(&d, &limits, &why) || !strstr(why.text, reason)) {
        n_failed++;
        printf("REFUSAL: '%s', should say '%s'\n", why.text, reason);
    }
}

static void check_refusals(void)
{
    struct ops_dims d = small_dims(256);
    const struct ops_limits limits = {.n_rows = 1};
    struct error why = {""};
    d.expert_width = 128;
    if (!tuned_stream_serves(&d, &limits, &why)) {
        n_failed++;
        printf("REFUSED: %s\n", why.text);
    }
    d.exact = true;
    must_refuse(d, "exact arithmetic");
    d.exact = false;
    d.expert_width = 192;
    must_refuse(d, "hidden 256, expert width 192");
    d = small_dims(264);
    d.expert_width = 128;
    must_refuse(d, "hidden 264, expert width 128");
}

/* --- calls */

struct layer {
    struct ops_expert experts[2][MAX_EXPERTS], shared[2];
    struct ops_layer layer[2];
    const float *x[2], *weights[2];
    const uint32_t *ids[2];
};

static void pack_expert(enum kind kind, const struct shape *s, struct ops_expert *ret0,
                        struct ops_expert *ret1)
{
    struct ops_matrix m[3][2];
    for (int k = 0; k < 3; k++) {
        pack_part(kind, k == 2 ? s->hidden : s->width, k == 2 ? s->width : s->hidden, s->scale,
                  false, 0, 0, m[k]);
    }
    *ret0 = (struct ops_expert){m[0][0], m[1][0], m[2][0]};
    *ret1 = (struct ops_expert){m[0][1], m[1][1], m[2][1]};
}

/* Distinct experts a row, in any order. */
static void choose(const struct shape *s, uint32_t *ids)
{
    for (uint32_t r = 0; r < ROWS; r++) {
        bool is_nobodys = s->spread == LEAST && r % 16 != 5;
        for (uint32_t k = 0; k < s->used; k++) {
            uint32_t *id = &ids[r * s->used + k];
            bool again = true;
            while (again) {
                *id = s->spread == SAME ? k * 2 % s->n_experts + (k * 2 >= s->n_experts)
                                        : below(&seed, is_nobodys ? s->first : s->n_experts);
                again = false;
                for (uint32_t j = 0; j < k; j++) {
                    again = again || ids[r * s->used + j] == *id;
                }
            }
        }
    }
}

static void make_layer(const struct shape *s, struct layer *l)
{
    for (uint32_t e = s->first; e < s->end; e++) {
        pack_expert(s->kind, s, &l->experts[0][e], &l->experts[1][e]);
    }
    pack_expert(s->shared_kind, s, &l->shared[0], &l->shared[1]);
    give_halves((size_t)ROWS * s->hidden, 1.0f, l->x);
    uint32_t n = ROWS * s->used;
    uint32_t *ids = mem_array(n, sizeof(*ids));
    float *weights = mem_array(n, sizeof(*weights));
    choose(s, ids);
    for (uint32_t i = 0; i < n; i++) {
        weights[i] = 0.05f + 0.01f * (float)below(&seed, 70);
    }
    const void *given[2], *given_weights[2];
    give(ids, n * sizeof(*ids), given);
    give(weights, n * sizeof(*weights), given_weights);
    for (int i = 0; i < 2; i++) {
        l->ids[i] = given[i];
        l->weights[i] = given_weights[i];
        l->layer[i] = (struct ops_layer){.experts = l->experts[i], .shared = l->shared[i]};
    }
    mem_free(ids);
    mem_free(weights);
}

typedef void experts_fn(struct ops_device *, const struct ops_rows *, const struct ops_layer *,
                        const float *, const uint32_t *, const float *, float *);

/* Rows first .. first + n - 1 on a side; what is behind them stays poison. The caller frees. */
static float *call(const struct shape *s, const struct layer *l, int i, experts_fn *fn,
                   uint32_t first, uint32_t n, float *there)
{
    const size_t n_values = (size_t)n * s->hidden;
    const struct ops_rows rows = {.n_rows = n};
    poison(&sides[i], there, n_values + SPARE);
    fn(sides[i].dev, &rows, &l->layer[i], l->x[i] + (size_t)first * s->hidden,
       l->ids[i] + first * s->used, l->weights[i] + first * s->used, there);
    uint32_t *got = fetch(&sides[i], there, n_values + SPARE);
    for (uint32_t k = 0; k < SPARE; k++) {
        if (got[n_values + k] != 0xffffffffu) {
            wrong("behind the rows", n, n_values + k, f32_from_bits(got[n_values + k]), NAN);
        }
    }
    return (float *)(void *)got;
}

static void same_bits(const char *what, uint32_t n, const float *got, const float *want, size_t k)
{
    for (size_t i = 0; i < k; i++) {
        if (f32_bits(got[i]) != f32_bits(want[i])) {
            wrong(what, n, i, got[i], want[i]);
        }
    }
}

/* What the row's values on an edge may change, of its experts here. */
static uint32_t row_edges(const struct shape *s, const struct ops_dims *d, const struct layer *l,
                          uint32_t r, double *ret_off)
{
    const float *x = l->x[0] + (size_t)r * s->hidden;
    uint32_t n = 0;
    for (uint32_t k = 0; k < s->used; k++) {
        uint32_t id = l->ids[0][r * s->used + k];
        if (id >= s->first && id < s->end) {
            n += edges_of_expert(d, &l->experts[0][id], x, l->weights[0][r * s->used + k], ret_off);
        }
    }
    return n + (s->has_shared ? edges_of_expert(d, &l->shared[0], x, 1, ret_off) : 0);
}

/* The largest share of the bound that a value of the row takes; tells, if it is to. */
static double row_within(const struct shape *s, const float *got, const float *want, uint32_t r,
                         const double *off, bool tells)
{
    const size_t first = (size_t)r * s->hidden;
    double most = 0, worst = 0;
    for (size_t i = first; i < first + s->hidden; i++) {
        most = fmax(most, fabs((double)want[i]));
    }
    for (size_t i = first; i < first + s->hidden; i++) {
        double a = (double)got[i], b = (double)want[i];
        double bound = 0.003 * (fabs(b) + most) + off[i - first];
        if (fabs(a - b) <= bound) {
            worst = fmax(worst, bound > 0 ? fabs(a - b) / bound : 0);
        } else { /* also where one is no number */
            worst = fmax(worst, fabs(a - b) > bound && bound > 0 ? fabs(a - b) / bound : INFINITY);
            if (tells) {
                wrong("bound", ROWS, i, (float)a, (float)b);
            }
        }
    }
    return worst;
}

/* The bound in cuda.h: 0.003 of each value and of the row's largest, and what edges may change. */
static double within_bound(const struct shape *s, const struct ops_dims *d, const struct layer *l,
                           const float *got, const float *want)
{
    double worst = 0, *none = mem_zalloc(s->hidden * sizeof(double)),
           *off = mem_zalloc(s->hidden * sizeof(double));
    for (uint32_t r = 0; r < ROWS; r++) {
        double share = row_within(s, got, want, r, none, false);
        if (share > 1) {
            memset(off, 0, s->hidden * sizeof(double));
            uint32_t n = row_edges(s, d, l, r, off);
            double rest = row_within(s, got, want, r, off, true);
            printf("%s: row %u is at %.3f of the bound; with %u values on an edge at %.3f\n", where,
                   r, share, n, rest);
            share = rest;
        }
        worst = fmax(worst, share);
    }
    mem_free(none);
    mem_free(off);
    return worst;
}

/* n_one_launch: calls of up to so many rows are one; 0: of up to MOST_STREAMED two. */
static void check(const struct shape *s, experts_fn *stream, experts_fn *all_rows,
                  uint32_t n_one_launch, bool small, bool tiny)
{
    static struct layer l;
    struct ops_dims d = small_dims(s->hidden);
    struct error err = {""};
    const struct ops_limits limits = {
        .n_rows = ROWS, .n_tokens = 16, .early_launches = early_launches()};
    const int before = n_failed;
    d.n_experts = s->n_experts;
    d.expert_first = s->first;
    d.expert_end = s->end;
    d.n_experts_used = s->used;
    d.expert_width = s->width;
    d.has_shared = s->has_shared;
    d.is_partial = s->is_partial;
    d.swiglu_limit = s->limit;
    snprintf(where, sizeof(where), "%s", s->name);
    for (int i = 0; i < 2; i++) {
        if (sides[i].ops->open(&d, &limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
    }
    make_layer(s, &l);
    const size_t n_values = (size_t)ROWS * s->hidden;
    float *there[2];
    for (int i = 0; i < 2; i++) {
        there[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, (n_values + SPARE) * 4));
    }
    float *cpu = call(s, &l, 0, sides[0].ops->experts, 0, ROWS, there[0]);
    float *tensor = call(s, &l, 1, all_rows, 0, ROWS, there[1]);
    double worst = within_bound(s, &d, &l, tensor, cpu);
    uint32_t n_calls = 0;
    for (uint32_t n = 1; n <= ROWS; n++) {
        if ((tiny && n != 2 && n != 17 && n <= MOST_STREAMED) ||
            (small && n > 3 && n % 8 > 1 && n != MOST_STREAMED + 1) ||
            (s->is_wide && n > 5 && n % 16 > 1)) {
            continue;
        }
        const uint32_t first = n == MOST_STREAMED ? 0 : below(&seed, ROWS - n + 1);
        uint64_t launches = sides[1].ops->launches(sides[1].dev);
        float *got = call(s, &l, 1, stream, first, n, there[1]);
        launches = sides[1].ops->launches(sides[1].dev) - launches;
        if (n_one_launch ? (launches == 1) != (n <= n_one_launch)
                         : n <= MOST_STREAMED && launches != 2) {
            n_failed++;
            printf("LAUNCHES %s: %u for %u rows\n", where, (unsigned)launches, n);
        }
        same_bits("bits", n, got, tensor + (size_t)first * s->hidden, (size_t)n * s->hidden);
        mem_free(got);
        n_calls++;
    }
    printf("%s: worst %.3f of the bound, %u calls, %d wrong\n", where, worst, n_calls,
           n_failed - before);
    mem_free(cpu);
    mem_free(tensor);
    sides[0].ops->close(sides[0].dev);
    sides[1].ops->close(sides[1].dev);
}

int main(int argc, char **argv)
{
    static struct ops table;
    setvbuf(stdout, NULL, _IOLBF, 0);
    check_refusals();
    const char *variant = argc > 3 ? argv[3] : "experts=stream";
    const bool tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    const bool small = tiny || (argc > 2 && strcmp(argv[2], "small") == 0);
    if (!choose_sides(argc > 1 ? argv[1] : "cuda:0", variant, &table)) {
        return n_failed ? 1 : 77;
    }
    seed = 20261130;
    for (size_t i = 0; i < (tiny ? 1 : sizeof(shapes) / sizeof(shapes[0])); i++) {
        if (!small || !shapes[i].is_wide) {
            check(&shapes[i], table.experts,
                  strcmp(variant, "experts=scaled") ? cuda_experts_tensor
                                                    : cuda_experts_tensor_scaled,
                  strcmp(variant, "experts=blocks") ? 0 : 4, small, tiny);
        }
    }
    printf("%d wrong\n", n_failed);
    return n_failed ? 1 : 0;
}
