/* Times of a GPU's dense operations, one layer at V4-Flash's widths: mean of 20 calls in a row, and
 * the weights that a call reads at least once over that. 16 experts stand for 256 and 32,320 rows
 * of the head for 129,280; each expert has weights of its own, so that those of a call don't stay
 * in the second-level cache. 77 without a device. */
#include "base/loop.h"
#include "tests/kernels/backends.h"

enum { TIMED_VOCAB = 32320 };

static void time_one(const char *name, uint32_t n_rows, double bytes, void (*fn)(void *), void *arg)
{
    enum { TURNS = 20 };
    const struct side *t = &sides[1];
    fn(arg);
    wait_for(t);
    uint64_t from_ns = loop_now_ns();
    for (int i = 0; i < TURNS; i++) {
        fn(arg);
    }
    wait_for(t);
    double each = (double)(loop_now_ns() - from_ns) * 1e-9 / TURNS;
    printf("%-10s %4u rows %10.1f us %8.1f MB of weights %7.0f GB/s\n", name, n_rows, each * 1e6,
           bytes * 1e-6, bytes / each * 1e-9);
}

struct timed {
    struct ops_rows rows;
    struct ops_layer layer;
    struct ops_globals globals;
    float *x, *o, *qr, *q, *kv, *y, *streams, *mix, *weights, *logits;
    uint32_t *ids;
};

static void t_project(void *p)
{
    struct timed *t = p;
    sides[1].ops->project(sides[1].dev, &t->rows, &t->layer, t->x, t->qr, t->q, t->kv);
}

static void t_oproj(void *p)
{
    struct timed *t = p;
    sides[1].ops->oproj(sides[1].dev, &t->rows, &t->layer, t->o, t->y);
}

static void t_route(void *p)
{
    struct timed *t = p;
    sides[1].ops->route(sides[1].dev, &t->rows, &t->layer, t->x, t->ids, t->weights);
}

static void t_experts(void *p)
{
    struct timed *t = p;
    sides[1].ops->experts(sides[1].dev, &t->rows, &t->layer, t->x, t->ids, t->weights, t->y);
}

static void t_pre(void *p)
{
    struct timed *t = p;
    sides[1].ops->mhc_pre(sides[1].dev, &t->rows, &t->layer.hc_attn, t->layer.attn_norm, t->streams,
                          t->x, t->mix);
}

static void t_post(void *p)
{
    struct timed *t = p;
    sides[1].ops->mhc_post(sides[1].dev, &t->rows, t->y, t->mix, t->streams);
}

static void t_head(void *p)
{
    struct timed *t = p;
    uint32_t which[16];
    uint32_t n = t->rows.n_rows < 16 ? t->rows.n_rows : 16;
    for (uint32_t i = 0; i < n; i++) {
        which[i] = i;
    }
    sides[1].ops->head(sides[1].dev, &t->globals, t->streams, which, n, t->logits, TIMED_VOCAB);
}

/* A matrix for the tested side alone, of bytes that cost little to make. */
static struct ops_matrix second(enum kind kind, uint32_t rows, uint32_t cols)
{
    static const uint32_t half_bytes[] = {[K_F32] = 8, [K_BF16] = 4, [K_FP8] = 2, [K_MXFP4] = 1};
    size_t row_bytes = (size_t)cols * half_bytes[kind] / 2, n = rows * row_bytes;
    uint8_t *data = mem_alloc(n), *scales = mem_alloc(n);
    for (size_t i = 0; i < n; i += 8) {
        uint64_t word = next_random(&seed);
        /* floats and halves of 0.01, e4m3 below 2: no NaN */
        word = kind == K_F32    ? (word & 0x807fffff807fffffu) | 0x3c0000003c000000u
               : kind == K_BF16 ? (word & 0x807f807f807f807fu) | 0x3c003c003c003c00u
               : kind == K_FP8  ? word & 0xbfbfbfbfbfbfbfbfu
                                : word;
        memcpy(data + i, &word, 8);
    }
    memset(scales, 120, n);
    struct ops_source s = {
        .format = (enum ops_format[]){OPS_F32, OPS_BF16, OPS_FP8_BLOCK, OPS_MXFP4}[kind],
        .rows = rows,
        .cols = cols,
        .row_bytes = row_bytes,
        .data = data,
        .scale_format = kind >= K_FP8 ? OPS_SCALE_E8M0 : OPS_SCALE_NONE,
        .block_rows = kind == K_FP8 ? 128 : 1,
        .block_cols = kind == K_FP8 ? 128 : 32,
        .scale_cols = cols / (kind == K_FP8 ? 128 : 32),
        .scale = scales,
        .global_scale = 1.0f};
    struct ops_matrix m;
    if (sides[1].ops->pack(sides[1].dev, &s, &m)) {
        stop("pack", &(struct error){"failed"});
    }
    mem_free(data);
    mem_free(scales);
    return m;
}

static float *second_room(size_t n)
{
    float *x = mem_array(n, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        x[i] = (float)(int)below(&seed, 2001) * 0.001f - 1.0f;
    }
    float *there = need(&sides[1], sides[1].ops->upload(sides[1].dev, x, n * sizeof(float)));
    mem_free(x);
    return there;
}

static void run_times(void)
{
    enum { N_EXPERTS = 16, MOST = 512 };
    struct ops_dims d = {.hidden = 4096,
                         .vocab = TIMED_VOCAB,
                         .n_heads = 64,
                         .head_dim = 512,
                         .rope_dim = 64,
                         .q_lora = 1024,
                         .o_groups = 8,
                         .o_lora = 1024,
                         .window = 128,
                         .ring = 136,
                         .n_experts = N_EXPERTS,
                         .n_experts_used = 6,
                         .expert_end = N_EXPERTS,
                         .expert_width = 2048,
                         .has_shared = true,
                         .route_scale = 1.5f,
                         .swiglu_limit = 10.0f,
                         .hc_iters = 20,
                         .hc_eps = 1e-6f,
                         .rms_eps = 1e-6f,
                         .rope_theta = 10000.0,
                         .compress_theta = 160000.0};
    struct ops_limits limits = {.n_rows = MOST, .n_tokens = 1024};
    struct error err;
    if (sides[1].ops->open(&d, &limits, &sides[1].dev, &err)) {
        stop("open", &err);
    }
    seed = 11;
    snprintf(where, sizeof(where), "times");
    struct timed t = {.layer = {.place = {.ratio = 4}}};
    struct ops_matrix groups[8];
    static struct ops_expert experts[N_EXPERTS];
    t.layer.wq_a = second(K_FP8, 1024, 4096);
    t.layer.wq_b = second(K_FP8, 32768, 1024);
    t.layer.wkv = second(K_FP8, 512, 4096);
    t.layer.wo_b = second(K_FP8, 4096, 8192);
    for (int g = 0; g < 8; g++) {
        groups[g] = second(K_FP8, 1024, 4096);
    }
    for (int e = 0; e < N_EXPERTS; e++) {
        experts[e] = (struct ops_expert){second(K_MXFP4, 2048, 4096), second(K_MXFP4, 2048, 4096),
                                         second(K_MXFP4, 4096, 2048)};
    }
    t.layer.wo_a = groups;
    t.layer.experts = experts;
    t.layer.shared = (struct ops_expert){second(K_FP8, 2048, 4096), second(K_FP8, 2048, 4096),
                                         second(K_FP8, 4096, 2048)};
    t.layer.gate = second(K_BF16, N_EXPERTS, 4096);
    t.layer.hc_attn = (struct ops_hc){second(K_F32, 24, 16384), second_room(24), second_room(3)};
    t.layer.q_norm = second_room(1024);
    t.layer.kv_norm = second_room(512);
    t.layer.attn_norm = second_room(4096);
    t.layer.gate_bias = second_room(N_EXPERTS);
    t.globals =
        (struct ops_globals){.head = second(K_BF16, TIMED_VOCAB, 4096),
                             .norm = t.layer.attn_norm,
                             .hc_head = {second(K_F32, 4, 16384), second_room(4), second_room(1)}};
    t.x = second_room((size_t)MOST * 4096);
    t.o = second_room((size_t)MOST * 32768);
    t.qr = second_room((size_t)MOST * 1024);
    t.q = second_room((size_t)MOST * 32768);
    t.kv = second_room((size_t)MOST * 512);
    t.y = second_room((size_t)MOST * 4096);
    t.streams = second_room((size_t)MOST * 16384);
    t.mix = second_room((size_t)MOST * 24);
    t.weights = second_room((size_t)MOST * 6);
    t.logits = second_room((size_t)16 * TIMED_VOCAB);
    t.ids = (uint32_t *)(void *)second_room((size_t)MOST * 6); /* `route` fills it */
    for (uint32_t n = 1; n <= MOST; n = n == 1 ? 16 : n * 32) {
        uint32_t zeros[MOST] = {0};
        struct ops_seq seq = {.n_rows = n};
        t.rows = (struct ops_rows){.n_rows = n,
                                   .n_seqs = 1,
                                   .tokens = zeros,
                                   .positions = zeros,
                                   .seq_of = zeros,
                                   .seqs = &seq};
        sides[1].ops->begin(sides[1].dev, &t.rows);
        double used = n == 1 ? 6 : N_EXPERTS;
        time_one("mhc_pre", n, 24 * 16384 * 4, t_pre, &t);
        time_one("mhc_post", n, 0, t_post, &t);
        time_one("project", n, 1024 * 4096 + 32768 * 1024 + 512 * 4096, t_project, &t);
        time_one("oproj", n, 4096.0 * 8192 + 8 * 1024.0 * 4096, t_oproj, &t);
        time_one("route", n, N_EXPERTS * 4096 * 2, t_route, &t);
        time_one("experts", n, used * 3 * 2048 * 4096 * 0.53125 + 3 * 2048 * 4096.0, t_experts, &t);
        time_one("head", n, (double)TIMED_VOCAB * 4096 * 2, t_head, &t);
    }
    sides[1].ops->close(sides[1].dev);
}

/* [reference | OPERATION=VARIANT ...]: the kernels that give the CPU's bits, or these, in place of
 * the best that serve. */
int main(int argc, char **argv)
{
    static struct ops table;
    struct registry_choice choice;
    struct registry_wishes wishes;
    struct error err;
    char all_text[] = "all", *all = all_text;
    const bool reference = argc > 1 && strcmp(argv[1], "reference") == 0;
    if (registry_find("cuda:0", &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    if (registry_wishes_parse(argv + 1, reference ? 0 : (size_t)argc - 1, &all, 1, &wishes, &err)) {
        stop("arguments", &err);
    }
    struct registry_query query = {.backend = choice.backend,
                                   .device = &choice.device,
                                   .wishes = &wishes,
                                   .layout = FORMATS_ENTRY_PACKED};
    if (registry_select(&query, &table, NULL, NULL, &err)) {
        stop("kernels", &err);
    }
    sides[1].ops = reference ? choice.ops : &table;
    run_times();
    return 0;
}
