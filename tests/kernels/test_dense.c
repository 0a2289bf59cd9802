/* project and oproj in one launch each (--kernel project=stream, oproj=stream), as the registry
 * installs them.
 *
 * Random weights of those formats that they take, and of one that they don't, random inputs,
 * outputs poisoned: calls of 1 to 17 rows from random rows on must give, bit by bit, what a call of
 * all rows gives by cuda_project_tensor and cuda_oproj_tensor, which test_tensor.c holds to the
 * CPU; calls of up to 16 rows in one launch. Shapes are such that every order of sums there is
 * comes up. What they refuse is checked without a device too.
 *
 * test_dense cuda:N [small|all]: small leaves the widths of V4-Flash out. 77 without a device.
 */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/tuned.h"
#include "tests/kernels/backends.h"
#include "tests/kernels/small.h"

enum { ROWS = 20, MOST_STREAMED = 8, MAX_GROUPS = 8, SPARE = 32 };

struct shape {
    const char *name;
    uint32_t hidden, q_lora, n_heads, head_dim, o_groups, o_lora;
    enum kind kind, wo_a_kind;
    float scale;
    bool is_partial, is_wide, is_refused;
};

static const struct shape shapes[] = {
    {"runs", 1024, 1024, 4, 512, 2, 512, K_FP8, K_FP8, 0.02f, false, false, false},
    {"groups of runs", 4096, 1024, 8, 512, 1, 1024, K_FP8, K_BF16, 0.02f, true, false, false},
    {"two groups a warp", 1024, 1024, 16, 512, 2, 512, K_FP8, K_BF16, 0.02f, true, false, false},
    {"large scales", 1024, 1024, 4, 256, 1, 1024, K_FP8, K_FP8, 700, false, false, false},
    {"one group, uneven runs", 1024, 1024, 12, 512, 1, 1024, K_FP8, K_FP8, 0.02f, false, false,
     false},
    {"other weights", 1024, 1024, 4, 256, 1, 1024, K_MXFP4, K_MXFP4, 0.02f, false, false, true},
    {"V4-Flash, rank 0 of 2", 4096, 1024, 32, 512, 4, 1024, K_FP8, K_FP8, 0.02f, true, true, false},
};

static void must_refuse(struct ops_dims d, const char *reason)
{
    const struct ops_limits limits = {.n_rows = 1};
    struct error why = {""};
    if (tuned_dense_serves(&d, &limits, &why) || !strstr(why.text, reason)) {
        n_failed++;
        printf("REFUSAL: '%s', should say '%s'\n", why.text, reason);
    }
}

static void check_refusals(void)
{
    struct ops_dims d = small_dims(1024);
    const struct ops_limits limits = {.n_rows = 1};
    struct error why = {""};
    d.q_lora = d.head_dim = d.o_lora = 1024;
    if (!tuned_dense_serves(&d, &limits, &why)) {
        n_failed++;
        printf("REFUSED: %s\n", why.text);
    }
    d.exact = true;
    must_refuse(d, "exact arithmetic");
    d.exact = false;
    d.hidden = 1152;
    must_refuse(d, "hidden 1152, q_lora 1024, 1024 and 1024");
}

struct call {
    struct ops_matrix groups[2][MAX_GROUPS];
    struct ops_layer layer[2];
    const float *x, *o;
    float *qr, *q, *kv, *y;
};

static void make_layer(const struct shape *s, struct call *c)
{
    const uint32_t wide = s->n_heads * s->head_dim;
    struct ops_matrix m[4][2];
    const float *norms[2][2], *x[2], *o[2];
    pack_part(s->kind, s->q_lora, s->hidden, s->scale, false, 0, 0, m[0]);
    pack_part(s->kind, s->head_dim, s->hidden, s->scale, false, 0, 0, m[1]);
    pack_part(s->kind, wide, s->q_lora, s->scale, false, 0, 0, m[2]);
    pack_part(s->kind, s->hidden, s->o_groups * s->o_lora, s->scale, false, 0, 0, m[3]);
    for (uint32_t g = 0; g < s->o_groups; g++) {
        struct ops_matrix wo_a[2];
        pack_part(s->wo_a_kind, s->o_lora, wide / s->o_groups, s->scale, false, 0, 0, wo_a);
        for (int i = 0; i < 2; i++) {
            wo_a[i].quant_input = false; /* as plain_inputs in its source */
            c->groups[i][g] = wo_a[i];
        }
    }
    give_floats(s->q_lora, 1.0f, norms[0]);
    give_floats(s->head_dim, 1.0f, norms[1]);
    give_halves((size_t)ROWS * s->hidden, 1.0f, x);
    give_halves((size_t)ROWS * wide, 1.0f, o);
    for (int i = 0; i < 2; i++) {
        c->layer[i] = (struct ops_layer){.wq_a = m[0][i],
                                         .wkv = m[1][i],
                                         .wq_b = m[2][i],
                                         .wo_b = m[3][i],
                                         .wo_a = c->groups[i],
                                         .q_norm = norms[0][i],
                                         .kv_norm = norms[1][i],
                                         .place = {.ratio = 4}};
    }
    c->x = x[1];
    c->o = o[1];
}

/* One output of rows first .. first + n - 1, width floats each, against those of all rows. */
static void same_bits(const char *what, uint32_t first, uint32_t n, size_t width,
                      const float *there, const uint32_t *want)
{
    uint32_t *got = fetch(&sides[1], there, n * width + SPARE);
    size_t n_wrong = 0, at = 0;
    for (size_t i = 0; i < n * width + SPARE; i++) {
        uint32_t right = i < n * width ? want[first * width + i] : 0xffffffffu;
        at = got[i] != right && n_wrong++ == 0 ? i : at;
    }
    if (n_wrong) {
        n_failed++;
        printf("WRONG %s, %s, %u rows: %zu of %zu values, the first [%zu] is %.9g (%08x), should "
               "be %08x\n",
               where, what, n, n_wrong, n * width, at, (double)f32_from_bits(got[at]), got[at],
               want[first * width + at]);
    }
    mem_free(got);
}

static void must_launch(const struct shape *s, const char *what, uint64_t before, uint32_t n)
{
    const uint64_t launches = sides[1].ops->launches(sides[1].dev) - before;
    if ((launches == 1) != (n <= MOST_STREAMED && !s->is_refused)) {
        n_failed++;
        printf("LAUNCHES %s, %s: %u for %u rows\n", where, what, (unsigned)launches, n);
    }
}

static void check(const struct shape *s, const struct ops *table)
{
    static struct call c;
    struct side *t = &sides[1];
    struct ops_dims d = small_dims(s->hidden);
    const struct ops_limits limits = {.n_rows = ROWS, .n_tokens = 64, .early_launches = true};
    struct error err = {""};
    const int before = n_failed;
    uint32_t zeros[ROWS] = {0}, positions[ROWS], n_calls = 0;
    d.q_lora = s->q_lora;
    d.n_heads = s->n_heads;
    d.head_dim = s->head_dim;
    d.o_groups = s->o_groups;
    d.o_lora = s->o_lora;
    d.is_partial = s->is_partial;
    snprintf(where, sizeof(where), "%s", s->name);
    for (int i = 0; i < 2; i++) {
        if (sides[i].ops->open(&d, &limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
    }
    make_layer(s, &c);
    const size_t widths[] = {s->q_lora, (size_t)s->n_heads * s->head_dim, s->head_dim, s->hidden};
    float *room[4];
    uint32_t *want[4];
    for (int k = 0; k < 4; k++) {
        room[k] = need(t, t->ops->alloc(t->dev, (ROWS * widths[k] + SPARE) * sizeof(float)));
    }
    for (uint32_t r = 0; r < ROWS; r++) {
        positions[r] = 3 * r;
    }
    for (uint32_t n = ROWS; n > 0; n--) { /* all of them first, by the other variant */
        if (n < ROWS && (n > MOST_STREAMED + 1 || (s->is_wide && n != 1 && n != 3 && n != 12) ||
                         (n > 2 && n % 4 != 1 && n < 15))) {
            continue;
        }
        const uint32_t first = below(&seed, ROWS - n + 1);
        const struct ops_seq seq = {.n_rows = n, .position = positions[first]};
        const struct ops_rows rows = {.n_rows = n,
                                      .n_seqs = 1,
                                      .tokens = zeros,
                                      .seq_of = zeros,
                                      .positions = positions + first,
                                      .seqs = &seq};
        for (int k = 0; k < 4; k++) {
            poison(t, room[k], ROWS * widths[k] + SPARE);
        }
        t->ops->begin(t->dev, &rows);
        uint64_t launches = t->ops->launches(t->dev);
        (n == ROWS ? cuda_project_tensor : table->project)(
            t->dev, &rows, &c.layer[1], c.x + first * widths[3], room[0], room[1], room[2]);
        must_launch(s, "project", launches, n);
        launches = t->ops->launches(t->dev);
        (n == ROWS ? cuda_oproj_tensor : table->oproj)(t->dev, &rows, &c.layer[1],
                                                       c.o + first * widths[1], room[3]);
        must_launch(s, "oproj", launches, n);
        static const char *const names[] = {"qr", "q", "kv", "y"};
        for (int k = 0; k < 4; k++) {
            if (n == ROWS) {
                want[k] = fetch(t, room[k], n * widths[k]);
            } else {
                same_bits(names[k], first, n, widths[k], room[k], want[k]);
            }
        }
        n_calls++;
    }
    printf("%s: %u calls, %d wrong\n", where, n_calls, n_failed - before);
    for (int k = 0; k < 4; k++) {
        mem_free(want[k]);
    }
    sides[0].ops->close(sides[0].dev);
    sides[1].ops->close(sides[1].dev);
}

int main(int argc, char **argv)
{
    static struct ops both;
    struct ops project;
    setvbuf(stdout, NULL, _IOLBF, 0);
    check_refusals();
    const char *device = argc > 1 ? argv[1] : "cuda:0";
    const bool small = argc > 2 && strcmp(argv[2], "small") == 0;
    if (!choose_sides(device, "project=stream", &project) ||
        !choose_sides(device, "oproj=stream", &both)) {
        return n_failed ? 1 : 77;
    }
    both.project = project.project;
    seed = 20261201;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (!small || !shapes[i].is_wide) {
            check(&shapes[i], &both);
        }
    }
    printf("%d wrong\n", n_failed);
    return n_failed ? 1 : 0;
}
