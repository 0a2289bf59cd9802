/* The dense operations of one backend against another's: "cuda:0" against "cpu".
 *
 * Fresh random inputs, poisoned outputs, random shapes, formats and batches. The reference kernels
 * of a device have the CPU's order of sums, so the bound is equality of every bit, exact or
 * quantised; what differs is counted and the worst of it told in units of the value. Then every row
 * once more in a call of its own, and rows whose offsets go beyond 2^31 elements.
 *
 * test_cuda [cpu|cuda] [small|all|big]: cpu compares that backend with itself, a check of this
 * program. 77 without a device.
 */
#include "tests/kernels/backends.h"
#include "tests/kernels/small.h"

enum {
    N_CASES = 56,
    N_SMALL = 10,
    MAX_ROWS = 160,
    MAX_OUT = 4,
    BIG_ROWS = 140000,
    TIMED_VOCAB = 32320
};

/* --- one case: shapes, rows, every operation */

struct shape {
    struct ops_dims d;
    struct ops_limits limits;
    uint32_t n_rows;
    struct ops_rows rows;
    uint32_t tokens[MAX_ROWS], positions[MAX_ROWS], seq_of[MAX_ROWS];
    struct ops_seq seqs[MAX_ROWS];
};

static void draw_shape(struct shape *s, bool wide)
{
    bool exact = below(&seed, 3) == 0;
    uint32_t groups = PICK(1, 2, 4, 8), rope = PICK(8, 16, 64);
    s->d =
        (struct ops_dims){.hidden = wide ? 4096 : PICK(64, 72, 128, 200, 256, 260, 300, 512, 1024),
                          .vocab = wide ? 4001 : PICK(3, 50, 257, 1000),
                          .n_heads = groups * PICK(1, 2, 3),
                          .head_dim = exact ? PICK(64, 72, 128, 136) : 64 * PICK(1, 2, 7) + rope,
                          .rope_dim = rope,
                          .q_lora = wide ? 1024 : PICK(33, 64, 128, 200, 384),
                          .o_groups = groups,
                          .o_lora = wide ? 1024 : PICK(12, 32, 100, 128, 130),
                          .window = 128,
                          .ring = 136,
                          .n_experts = PICK(7, 8, 32, 33, 70),
                          .expert_width = wide ? 2048 : PICK(24, 64, 128, 192, 300),
                          .has_shared = below(&seed, 4) != 0,
                          .is_partial = below(&seed, 4) == 0,
                          .route_scale = 1.5f,
                          .swiglu_limit = below(&seed, 3) ? 0.7f : 0.0f,
                          .hc_iters = PICK(1, 2, 20),
                          .hc_eps = 1e-6f,
                          .rms_eps = 1e-6f,
                          .exact = exact,
                          .entry_kind = exact ? FORMATS_ENTRY_F32 : FORMATS_ENTRY_PACKED,
                          .rope_theta = 10000.0,
                          .compress_theta = 160000.0,
                          .has_yarn = below(&seed, 2),
                          .yarn_factor = 16,
                          .yarn_beta_fast = 32,
                          .yarn_beta_slow = 1,
                          .yarn_original = 65536};
    struct ops_dims *d = &s->d;
    d->n_experts = wide ? 5 : d->n_experts;
    d->n_experts_used = 1 + below(&seed, d->n_experts < 8 ? d->n_experts : 8);
    d->expert_first = below(&seed, 3) ? 0 : below(&seed, d->n_experts);
    d->expert_end = d->expert_first + 1 + below(&seed, d->n_experts - d->expert_first);
    if (below(&seed, 2)) {
        d->expert_first = 0;
        d->expert_end = d->n_experts;
    }
    s->n_rows =
        wide ? PICK(1, 5, 16)
             : PICK(1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129);
    s->limits = (struct ops_limits){.n_rows = MAX_ROWS,
                                    .n_tokens = 1024,
                                    .heavy_ratio = 128,
                                    .early_launches = early_launches()};
    uint32_t n = 0;
    s->rows = (struct ops_rows){.n_rows = s->n_rows,
                                .tokens = s->tokens,
                                .positions = s->positions,
                                .seq_of = s->seq_of,
                                .seqs = s->seqs};
    while (n < s->n_rows) { /* sequences of mixed lengths */
        uint32_t m = below(&seed, 3) ? 1 : 1 + below(&seed, 40);
        m = m < s->n_rows - n ? m : s->n_rows - n;
        uint32_t position = below(&seed, below(&seed, 2) ? 300 : 1000000);
        s->seqs[s->rows.n_seqs] = (struct ops_seq){
            .slot = s->rows.n_seqs, .first_row = n, .n_rows = m, .position = position};
        for (uint32_t i = 0; i < m; i++, n++) {
            s->tokens[n] = below(&seed, s->d.vocab);
            s->positions[n] = position + i;
            s->seq_of[n] = s->rows.n_seqs;
        }
        s->rows.n_seqs++;
    }
}

/* Row r of the call as a call of its own. */
static struct ops_rows just(const struct shape *s, uint32_t r, struct ops_seq *ret_seq,
                            uint32_t *zero)
{
    *zero = 0;
    *ret_seq = (struct ops_seq){.slot = 0, .n_rows = 1, .position = s->positions[r]};
    return (struct ops_rows){.n_rows = 1,
                             .n_seqs = 1,
                             .tokens = s->tokens + r,
                             .positions = s->positions + r,
                             .seq_of = zero,
                             .seqs = ret_seq};
}

/* What an operation is given on one side, and where it leaves what. in[] and out[] have rows of
 * the widths below; words of out may be ids. */
struct run {
    const char *name;
    const struct shape *shape;
    struct ops_layer layer[2];
    struct ops_globals globals[2];
    struct ops_hc hc[2];
    const float *norm[2];
    struct ops_matrix table[2];
    const float *in[3][2];
    size_t in_width[3];
    float *out[3][2];
    size_t out_width[3];
    void (*call)(const struct run *run, int side, const struct ops_rows *rows,
                 const float *const *in, float *const *out);
};

/* All rows on both sides, then some of them alone on the second. */
static void run_both(struct run *run)
{
    const struct shape *s = run->shape;
    for (int i = 0; i < 2; i++) {
        const float *in[3] = {run->in[0][i], run->in[1][i], run->in[2][i]};
        float *out[3] = {run->out[0][i], run->out[1][i], run->out[2][i]};
        sides[i].ops->begin(sides[i].dev, &s->rows);
        run->call(run, i, &s->rows, in, out);
        wait_for(&sides[i]);
    }
    for (int k = 0; k < 3 && run->out_width[k]; k++) {
        char what[64];
        snprintf(what, sizeof(what), "%s, output %d", run->name, k);
        compare(what, run->out[k], s->n_rows * run->out_width[k]);
    }
    float *alone[3] = {NULL};
    const struct side *t = &sides[1];
    for (int k = 0; k < 3 && run->out_width[k]; k++) {
        alone[k] = need(t, t->ops->alloc(t->dev, run->out_width[k] * sizeof(float)));
    }
    for (uint32_t turn = 0; turn < 3; turn++) {
        uint32_t r = turn == 0 ? 0 : (turn == 1 ? s->n_rows - 1 : below(&seed, s->n_rows)), zero;
        struct ops_seq seq;
        struct ops_rows one = just(s, r, &seq, &zero);
        const float *in[3];
        for (int k = 0; k < 3; k++) {
            in[k] = run->in[k][1] ? run->in[k][1] + r * run->in_width[k] : NULL;
            if (alone[k]) {
                poison(t, alone[k], run->out_width[k]);
            }
        }
        t->ops->begin(t->dev, &one);
        run->call(run, 1, &one, in, alone);
        for (int k = 0; k < 3 && run->out_width[k]; k++) {
            char what[64];
            snprintf(what, sizeof(what), "%s, output %d, row %u alone", run->name, k, r);
            uint32_t *want = fetch(t, run->out[k][1] + r * run->out_width[k], run->out_width[k]);
            uint32_t *got = fetch(t, alone[k], run->out_width[k]);
            compare_words(what, want, got, run->out_width[k]);
            mem_free(want);
            mem_free(got);
        }
    }
}

static void out(struct run *run, int k, size_t width)
{
    run->out_width[k] = width;
    poisoned_rooms(run->shape->n_rows * width, run->out[k]);
}

static void in(struct run *run, int k, size_t width, float scale)
{
    run->in_width[k] = width;
    size_t n = run->shape->n_rows * width;
    if (run->shape->d.exact) {
        give_floats(n, scale, run->in[k]);
    } else {
        give_halves(n, scale, run->in[k]);
    }
}

static void call_embed(const struct run *run, int i, const struct ops_rows *rows,
                       const float *const *in, float *const *out)
{
    sides[i].ops->embed(sides[i].dev, rows, &run->table[i], out[0]);
}

static void case_embed(const struct shape *s)
{
    struct run run = {.name = "embed", .shape = s, .call = call_embed};
    pack_matrix(below(&seed, 2) ? K_BF16 : any_kind(), s->d.vocab, s->d.hidden, 1.0f, true,
                run.table);
    out(&run, 0, (size_t)OPS_HC * s->d.hidden);
    run_both(&run);
}

static void call_pre(const struct run *run, int i, const struct ops_rows *rows,
                     const float *const *in, float *const *out)
{
    sides[i].ops->mhc_pre(sides[i].dev, rows, &run->hc[i], run->norm[i], in[0], out[0], out[1]);
}

static void make_hc(uint32_t n_out, uint32_t hidden, uint32_t n_scales, struct ops_hc ret[2])
{
    struct ops_matrix fn[2];
    const float *base[2], *scale[2];
    pack_matrix(K_F32, n_out, 4 * hidden, 0.1f, false, fn);
    give_floats(n_out, 1.0f, base);
    give_floats(n_scales, 1.0f, scale);
    for (int i = 0; i < 2; i++) {
        ret[i] = (struct ops_hc){fn[i], base[i], scale[i]};
    }
}

static void case_mhc_pre(const struct shape *s)
{
    struct run run = {.name = "mhc_pre", .shape = s, .call = call_pre};
    make_hc(OPS_HC_OUT, s->d.hidden, 3, run.hc);
    give_floats(s->d.hidden, 1.0f, run.norm);
    in(&run, 0, (size_t)OPS_HC * s->d.hidden, 1.0f);
    out(&run, 0, s->d.hidden);
    out(&run, 1, OPS_HC_OUT);
    run_both(&run);
}

/* streams are input and output: a copy goes in. */
static void call_post(const struct run *run, int i, const struct ops_rows *rows,
                      const float *const *in, float *const *out)
{
    size_t n = (size_t)rows->n_rows * OPS_HC * run->shape->d.hidden;
    uint32_t *copy = fetch(&sides[i], in[2], n);
    sides[i].ops->write(sides[i].dev, out[0], copy, n * 4);
    sides[i].ops->mhc_post(sides[i].dev, rows, in[0], in[1], out[0]);
    mem_free(copy);
}

static void case_mhc_post(const struct shape *s)
{
    struct run run = {.name = "mhc_post", .shape = s, .call = call_post};
    in(&run, 0, s->d.hidden, 1.0f);
    in(&run, 1, OPS_HC_OUT, 1.0f);
    in(&run, 2, (size_t)OPS_HC * s->d.hidden, 1.0f);
    out(&run, 0, (size_t)OPS_HC * s->d.hidden);
    run_both(&run);
}

static void call_project(const struct run *run, int i, const struct ops_rows *rows,
                         const float *const *in, float *const *out)
{
    sides[i].ops->project(sides[i].dev, rows, &run->layer[i], in[0], out[0], out[1], out[2]);
}

static void case_project(const struct shape *s)
{
    const struct ops_dims *d = &s->d;
    struct run run = {.name = "project", .shape = s, .call = call_project};
    uint32_t wide = d->n_heads * d->head_dim, ratio = PICK(0, 4, 128);
    struct ops_matrix wq_a[2], wq_b[2], wkv[2];
    const float *q_norm[2], *kv_norm[2];
    pack_matrix(any_kind(), d->q_lora, d->hidden, 0.1f, false, wq_a);
    pack_matrix(any_kind(), wide, d->q_lora, 0.1f, false, wq_b);
    pack_matrix(any_kind(), d->head_dim, d->hidden, 0.1f, false, wkv);
    give_floats(d->q_lora, 1.0f, q_norm);
    give_floats(d->head_dim, 1.0f, kv_norm);
    for (int i = 0; i < 2; i++) {
        run.layer[i] = (struct ops_layer){.place = {.ratio = ratio},
                                          .wq_a = wq_a[i],
                                          .wq_b = wq_b[i],
                                          .wkv = wkv[i],
                                          .q_norm = q_norm[i],
                                          .kv_norm = kv_norm[i]};
    }
    in(&run, 0, d->hidden, 1.0f);
    out(&run, 0, d->q_lora);
    out(&run, 1, wide);
    out(&run, 2, d->head_dim);
    run_both(&run);
}

static void call_oproj(const struct run *run, int i, const struct ops_rows *rows,
                       const float *const *in, float *const *out)
{
    sides[i].ops->oproj(sides[i].dev, rows, &run->layer[i], in[0], out[0]);
}

static void case_oproj(const struct shape *s)
{
    const struct ops_dims *d = &s->d;
    struct run run = {.name = "oproj", .shape = s, .call = call_oproj};
    uint32_t wide = d->n_heads * d->head_dim;
    struct ops_matrix groups[2][8], one[2], wo_b[2];
    enum kind kind = below(&seed, 2) ? K_BF16 : any_kind();
    for (uint32_t g = 0; g < d->o_groups; g++) {
        pack_matrix(kind, d->o_lora, wide / d->o_groups, 0.1f, false, one);
        groups[0][g] = one[0];
        groups[1][g] = one[1];
    }
    pack_matrix(any_kind(), d->hidden, d->o_groups * d->o_lora, 0.1f, false, wo_b);
    for (int i = 0; i < 2; i++) {
        run.layer[i] = (struct ops_layer){.wo_a = groups[i], .wo_b = wo_b[i]};
    }
    in(&run, 0, wide, 1.0f);
    out(&run, 0, d->hidden);
    run_both(&run);
}

static void call_route(const struct run *run, int i, const struct ops_rows *rows,
                       const float *const *in, float *const *out)
{
    sides[i].ops->route(sides[i].dev, rows, &run->layer[i], in[0], (uint32_t *)(void *)out[0],
                        out[1]);
}

static void case_route(const struct shape *s, bool hash)
{
    const struct ops_dims *d = &s->d;
    struct run run = {.name = hash ? "route by token" : "route", .shape = s, .call = call_route};
    struct ops_matrix gate[2];
    const float *bias[2];
    const void *table[2];
    uint32_t n = d->vocab * d->n_experts_used;
    uint16_t *ids = mem_array(n, sizeof(*ids));
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = (uint16_t)((i / d->n_experts_used + i % d->n_experts_used) % d->n_experts);
    }
    float *biases = random_floats(&seed, d->n_experts, 1.0f);
    for (uint32_t e = 0; e < d->n_experts; e++) { /* large and equal: ties */
        biases[e] = below(&seed, 3) ? biases[e] : 1e9f;
    }
    pack_matrix(below(&seed, 2) ? K_BF16 : K_F32, d->n_experts, d->hidden, 0.1f, false, gate);
    give(ids, n * sizeof(*ids), table);
    const void *given[2];
    give(biases, d->n_experts * sizeof(float), given);
    bias[0] = given[0];
    bias[1] = given[1];
    for (int i = 0; i < 2; i++) {
        run.layer[i] = (struct ops_layer){
            .gate = gate[i], .gate_bias = hash ? NULL : bias[i], .tid2eid = hash ? table[i] : NULL};
    }
    in(&run, 0, d->hidden, 1.0f);
    out(&run, 0, d->n_experts_used);
    out(&run, 1, d->n_experts_used);
    run_both(&run);
    mem_free(ids);
    mem_free(biases);
}

static void call_experts(const struct run *run, int i, const struct ops_rows *rows,
                         const float *const *in, float *const *out)
{
    sides[i].ops->experts(sides[i].dev, rows, &run->layer[i], in[0],
                          (const uint32_t *)(const void *)in[1], in[2], out[0]);
}

static void pack_expert(enum kind kind, uint32_t column, const struct ops_dims *d,
                        struct ops_expert *ret0, struct ops_expert *ret1)
{
    struct ops_matrix m[2];
    pack_part(kind, d->expert_width, d->hidden, 0.1f, false, below(&seed, 9), column, m);
    ret0->w1 = m[0], ret1->w1 = m[1];
    pack_part(kind, d->expert_width, d->hidden, 0.1f, false, below(&seed, 9), column, m);
    ret0->w3 = m[0], ret1->w3 = m[1];
    pack_part(kind, d->hidden, d->expert_width, 0.1f, false, below(&seed, 9), column, m);
    ret0->w2 = m[0], ret1->w2 = m[1];
}

static void case_experts(const struct shape *s)
{
    const struct ops_dims *d = &s->d;
    struct run run = {.name = "experts", .shape = s, .call = call_experts};
    struct ops_expert experts[2][80], shared[2];
    enum kind kind = any_kind();
    uint32_t column = any_column();
    for (uint32_t e = d->expert_first; e < d->expert_end; e++) {
        pack_expert(kind, column, d, &experts[0][e], &experts[1][e]);
    }
    pack_expert(any_kind(), any_column(), d, &shared[0], &shared[1]);
    for (int i = 0; i < 2; i++) {
        run.layer[i] = (struct ops_layer){.experts = experts[i], .shared = shared[i]};
    }
    uint32_t n = s->n_rows * d->n_experts_used;
    uint32_t *ids = mem_array(n, sizeof(*ids));
    for (uint32_t r = 0; r < s->n_rows; r++) { /* distinct, in any order, some favoured */
        for (uint32_t k = 0; k < d->n_experts_used; k++) {
            uint32_t *id = &ids[r * d->n_experts_used + k];
            bool again = true;
            while (again) {
                *id = below(&seed, below(&seed, 2) ? d->n_experts : d->n_experts_used);
                again = false;
                for (uint32_t j = 0; j < k; j++) {
                    again = again || ids[r * d->n_experts_used + j] == *id;
                }
            }
        }
    }
    const void *given[2];
    give(ids, n * sizeof(*ids), given);
    run.in[1][0] = given[0];
    run.in[1][1] = given[1];
    run.in_width[1] = d->n_experts_used;
    in(&run, 0, d->hidden, 1.0f);
    run.in_width[2] = d->n_experts_used;
    give_floats(n, 0.5f, run.in[2]);
    out(&run, 0, d->hidden);
    run_both(&run);
    mem_free(ids);
}

static void call_head(const struct run *run, int i, const struct ops_rows *rows,
                      const float *const *in, float *const *out)
{
    uint32_t which[MAX_ROWS];
    for (uint32_t r = 0; r < rows->n_rows; r++) {
        which[r] = r;
    }
    if (rows->n_rows > 1) { /* another order, and stride beyond the vocabulary */
        which[0] = 1;
        which[1] = 0;
    }
    sides[i].ops->head(sides[i].dev, &run->globals[i], in[0], which, rows->n_rows, out[0],
                       run->out_width[0]);
}

static void case_head(const struct shape *s)
{
    const struct ops_dims *d = &s->d;
    struct run run = {.name = "head", .shape = s, .call = call_head};
    struct ops_hc hc[2];
    struct ops_matrix head[2];
    make_hc(4, d->hidden, 1, hc);
    give_floats(d->hidden, 1.0f, run.norm);
    pack_matrix(below(&seed, 2) ? K_BF16 : K_F32, d->vocab, d->hidden, 0.1f, false, head);
    for (int i = 0; i < 2; i++) {
        run.globals[i] =
            (struct ops_globals){.head = head[i], .norm = run.norm[i], .hc_head = hc[i]};
    }
    in(&run, 0, (size_t)OPS_HC * d->hidden, 1.0f);
    out(&run, 0, d->vocab + 5); /* the poison behind each row stays */
    if (s->n_rows == 1) {
        n_spare = 5;
        run_both(&run);
        n_spare = 0;
        return;
    }
    for (int i = 0; i < 2; i++) {
        float *to[3] = {run.out[0][i]};
        const float *from[3] = {run.in[0][i]};
        call_head(&run, i, &s->rows, from, to);
        wait_for(&sides[i]);
    }
    n_spare = (size_t)s->n_rows * 5;
    compare("head, all rows", run.out[0], s->n_rows * run.out_width[0]);
    n_spare = 0;
    uint32_t last = s->n_rows - 1;
    float *alone[2], *among;
    poisoned_rooms(run.out_width[0], alone);
    for (int i = 0; i < 2; i++) {
        sides[i].ops->head(sides[i].dev, &run.globals[i], run.in[0][i], &last, 1, alone[i],
                           run.out_width[0]);
    }
    among = run.out[0][1] + (last == 1 ? 0 : last) * run.out_width[0];
    uint32_t *want = fetch(&sides[1], among, d->vocab);
    uint32_t *got = fetch(&sides[1], alone[1], d->vocab);
    compare_words("head, a row alone", want, got, d->vocab);
    mem_free(want);
    mem_free(got);
}

/* Groups of one to three devices on one GPU. */
static void case_comm(const struct shape *s)
{
    uint32_t n = 1 + below(&seed, 3);
    size_t n_floats = (size_t)s->n_rows * s->d.hidden;
    struct ops_device *devices[2][3];
    float *y[2][3];
    float *random[3];
    for (uint32_t k = 0; k < n; k++) {
        random[k] = random_floats(&seed, n_floats, 1.0f);
    }
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < n; k++) {
            struct error err;
            if (k == 0) {
                devices[i][k] = sides[i].dev;
            } else if (sides[i].ops->open(&s->d, &s->limits, &devices[i][k], &err)) {
                stop("comm", &err);
            }
            struct side of = {sides[i].ops, devices[i][k]};
            y[i][k] = need(&of, of.ops->upload(of.dev, random[k], n_floats * sizeof(float)));
        }
        sides[i].ops->comm(devices[i], n, s->n_rows, y[i]);
    }
    for (uint32_t k = 0; k < n; k++) {
        struct side a = {sides[0].ops, devices[0][k]}, b = {sides[1].ops, devices[1][k]};
        uint32_t *want = fetch(&a, y[0][k], n_floats), *got = fetch(&b, y[1][k], n_floats);
        compare_words("comm", want, got, n_floats);
        mem_free(want);
        mem_free(got);
        mem_free(random[k]);
    }
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 1; k < n; k++) {
            sides[i].ops->close(devices[i][k]);
        }
    }
}

static void open_sides(const struct ops_dims *d, const struct ops_limits *limits)
{
    for (int i = 0; i < 2; i++) {
        struct error err;
        if (sides[i].ops->open(d, limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
    }
}

static void close_sides(void)
{
    for (int i = 0; i < 2; i++) {
        wait_for(&sides[i]);
        sides[i].ops->close(sides[i].dev);
    }
}

static void run_case(uint32_t case_i, bool wide)
{
    static struct shape s;
    seed = 1000 + case_i;
    memset(&s, 0, sizeof(s));
    draw_shape(&s, wide);
    const struct ops_dims *d = &s.d;
    snprintf(where, sizeof(where),
             "case %u (%s, %u rows, hidden %u, heads %u x %u, experts %u of %u [%u, %u) x %u)",
             case_i, d->exact ? "exact" : "quantised", s.n_rows, d->hidden, d->n_heads, d->head_dim,
             d->n_experts_used, d->n_experts, d->expert_first, d->expert_end, d->expert_width);
    open_sides(d, &s.limits);
    case_embed(&s);
    case_mhc_pre(&s);
    case_mhc_post(&s);
    case_project(&s);
    case_oproj(&s);
    case_route(&s, false);
    case_route(&s, true);
    case_experts(&s);
    case_head(&s);
    case_comm(&s);
    close_sides();
}

/* The last rows of a call whose streams have more than 2^31 elements. */
static void run_big(void)
{
    enum { LAST = 3, WIDTH = OPS_HC * 4096 };
    struct ops_dims d = small_dims(4096);
    uint32_t n_rows[2] = {LAST, BIG_ROWS};
    struct ops_hc hc[2];
    const float *norm[2];
    float *streams[2], *x[2], *mix[2], *y[2], *outs[2];
    snprintf(where, sizeof(where), "%d rows", BIG_ROWS);
    seed = 7;
    for (int i = 0; i < 2; i++) {
        struct error err;
        struct ops_limits limits = {
            .n_rows = n_rows[i], .n_seqs = 1, .n_tokens = 16, .early_launches = early_launches()};
        if (sides[i].ops->open(&d, &limits, &sides[i].dev, &err)) {
            stop("open", &err);
        }
        size_t n = n_rows[i];
        streams[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, n * WIDTH * 4));
        x[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, n * d.hidden * 4));
        y[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, n * d.hidden * 4));
        mix[i] = need(&sides[i], sides[i].ops->alloc(sides[i].dev, n * OPS_HC_OUT * 4));
    }
    make_hc(OPS_HC_OUT, d.hidden, 3, hc);
    give_floats(d.hidden, 1.0f, norm);
    float *f = random_floats(&seed, (size_t)LAST * WIDTH, 1.0f);
    float *from = random_floats(&seed, (size_t)LAST * d.hidden, 1.0f);
    for (int i = 0; i < 2; i++) {
        size_t first = n_rows[i] - LAST;
        struct ops_rows rows = {.n_rows = n_rows[i]};
        sides[i].ops->write(sides[i].dev, streams[i] + first * WIDTH, f, (size_t)LAST * WIDTH * 4);
        sides[i].ops->write(sides[i].dev, y[i] + first * d.hidden, from,
                            (size_t)LAST * d.hidden * 4);
        sides[i].ops->mhc_pre(sides[i].dev, &rows, &hc[i], norm[i], streams[i], x[i], mix[i]);
        sides[i].ops->mhc_post(sides[i].dev, &rows, y[i], mix[i], streams[i]);
        wait_for(&sides[i]);
        x[i] += first * d.hidden;
        outs[i] = streams[i] + first * WIDTH;
    }
    compare("mhc_pre", x, (size_t)LAST * d.hidden);
    compare("mhc_post", outs, (size_t)LAST * WIDTH);
    mem_free(f);
    mem_free(from);
    close_sides();
}

int main(int argc, char **argv)
{
    const char *backend = argc > 1 ? argv[1] : "cuda", *what = argc > 2 ? argv[2] : "all";
    struct registry_choice choice;
    struct error err;
    setvbuf(stdout, NULL, _IOLBF, 0);
    sides[0].ops = &ops_cpu;
    sides[1].ops = &ops_cpu;
    if (strcmp(backend, "cpu") != 0) {
        if (registry_find("cuda:0", &choice, &err)) {
            printf("skipped: %s\n", err.text);
            return 77;
        }
        sides[1].ops = choice.ops;
    }
    bool small = strcmp(what, "small") == 0, all = strcmp(what, "all") == 0;
    for (uint32_t i = 0; (small || all) && i < (small ? N_SMALL : N_CASES); i++) {
        run_case(i, !small && i % 19 == 18);
    }
    if (all || strcmp(what, "big") == 0) {
        if (strcmp(backend, "cpu") != 0) {
            run_big();
        }
    }
    printf("%d comparisons, %d differ\n", n_compared, n_failed);
    return n_failed ? 1 : 0;
}
