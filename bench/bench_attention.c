/* Microseconds of the cache's operations in the shape of V4-Flash, on a device.
 *
 *   bench_attention [DEVICE [OPERATION=VARIANT]...]        cuda:0, and what a start would choose
 *
 * A layer of each kind with random weights, pages and windows; calls of one token of each of some
 * sequences, and pieces of a prompt. The best of three rounds by the host's clock, each of several
 * calls that end in one wait. Floor: what attention of a sparse layer must multiply and add, by the
 * datasheet's rate of 67 TFLOP/s for fp32 on an H200, at which the reference kernels, which keep
 * the two roundings of a product and a sum apart, can't do more than half.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/loop.h"
#include "base/mem.h"
#include "kernels/registry.h"

enum {
    HIDDEN = 4096,
    MAX_ROWS = 2048,
    MAX_SEQS = 32,
    PAGES = 4400,
    PAGE_BYTES = 65536,
    SEQ_PAGES = 260,
    WINDOW_BYTES = 136 * 584,
    STATE_BYTES = OPS_STATE_RING * 4 * 640 * 4,
};

struct bench {
    const struct ops *ops;
    struct ops_device *dev;
    uint64_t seed;
    struct ops_layer sparse, heavy;
    struct ops_kv kv;
    struct ops_selection selection;
    float *x, *qr, *q, *kv_rows, *iq, *iw, *o;
    struct ops_rows rows;
};

static const struct ops_dims dims = {.hidden = HIDDEN,
                                     .vocab = 16,
                                     .n_heads = 64,
                                     .head_dim = 512,
                                     .rope_dim = 64,
                                     .q_lora = 1024,
                                     .o_groups = 8,
                                     .o_lora = 1024,
                                     .window = 128,
                                     .ring = 136,
                                     .index_heads = 64,
                                     .index_dim = 128,
                                     .index_topk = 512,
                                     .n_experts = 8,
                                     .n_experts_used = 2,
                                     .expert_end = 8,
                                     .expert_width = 64,
                                     .route_scale = 1.0f,
                                     .hc_iters = 20,
                                     .hc_eps = 1e-6f,
                                     .rms_eps = 1e-6f,
                                     .entry_kind = FORMATS_ENTRY_PACKED,
                                     .rope_theta = 1e4,
                                     .compress_theta = 1.6e5};

static uint32_t random_word(struct bench *b)
{
    b->seed = b->seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(b->seed >> 32);
}

static void *need(void *memory)
{
    if (!memory) {
        fprintf(stderr, "bench_attention: no memory\n");
        exit(1);
    }
    return memory;
}

static void wait_for(struct bench *b)
{
    struct error err;
    if (b->ops->wait(b->dev, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        exit(1);
    }
}

/* n bfloat16 values within -size .. size, as floats. */
static float *values(struct bench *b, size_t n, float size)
{
    float *host = mem_array(n, sizeof(float));
    for (size_t i = 0; i < n; i++) {
        host[i] = bf16_round((float)(int32_t)random_word(b) * 0x1p-31f * size);
    }
    float *there = need(b->ops->upload(b->dev, host, n * sizeof(float)));
    mem_free(host);
    return there;
}

static struct ops_matrix matrix(struct bench *b, uint32_t rows, uint32_t cols)
{
    size_t n = (size_t)rows * cols;
    uint16_t *host = mem_array(n, sizeof(uint16_t));
    for (size_t i = 0; i < n; i++) {
        host[i] = bf16_encode((float)(int32_t)random_word(b) * 0x1p-36f);
    }
    struct ops_source source = {.format = OPS_BF16,
                                .rows = rows,
                                .cols = cols,
                                .row_bytes = (size_t)cols * 2,
                                .data = host,
                                .block_rows = 1,
                                .block_cols = 1,
                                .global_scale = 1.0f};
    struct ops_matrix m;
    if (b->ops->pack(b->dev, &source, &m)) {
        need(NULL);
    }
    mem_free(host);
    return m;
}

static struct ops_compressor compressor(struct bench *b, uint32_t width, const float *vectors)
{
    return (struct ops_compressor){matrix(b, width, HIDDEN), matrix(b, width, HIDDEN), vectors,
                                   vectors};
}

/* Entries and keys in the packed form, all of them numbers near 1. */
static uint8_t *pages(struct bench *b, const struct ops_place *p)
{
    uint8_t *host = mem_array(PAGES, PAGE_BYTES);
    for (size_t i = 0; i < (size_t)PAGES * PAGE_BYTES; i++) {
        host[i] = (uint8_t)random_word(b) & 0xbe;
    }
    for (size_t page = 0; page < PAGES; page++) {
        uint8_t *at = host + page * PAGE_BYTES;
        for (size_t i = 0; i < 64; i++) {
            for (size_t k = 449; k < 576; k += 2) { /* the upper bytes of bfloat16 */
                at[i * 576 + k] &= 0x3f;
            }
            memset(at + p->entry_scale + i * 8, 121, 8);
            memset(at + p->key_scale + i * 4, 126, 4);
        }
    }
    uint8_t *there = need(b->ops->upload(b->dev, host, (size_t)PAGES * PAGE_BYTES));
    mem_free(host);
    return there;
}

static void setup(struct bench *b)
{
    struct ops_limits limits = {.n_rows = MAX_ROWS,
                                .n_seqs = MAX_SEQS,
                                .n_tokens = 65536,
                                .page_tokens = 256,
                                .heavy_ratio = 128};
    struct error err;
    if (b->ops->open(&dims, &limits, &b->dev, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        exit(1);
    }
    const float *vectors = values(b, (size_t)128 * 1024, 1.0f);
    b->sparse = (struct ops_layer){.place = {.ratio = 4,
                                             .entries_a_page = 64,
                                             .entry_scale = 64 * 576,
                                             .key = 64 * 584,
                                             .key_scale = 64 * 648,
                                             .window_scale = 136 * 576,
                                             .index_state = OPS_STATE_RING * 4 * 512 * 4},
                                   .attn_sink = vectors,
                                   .compressor = compressor(b, 1024, vectors),
                                   .index_compressor = compressor(b, 256, vectors),
                                   .index_wq_b = matrix(b, 64 * 128, 1024),
                                   .index_weights = matrix(b, 64, HIDDEN)};
    b->heavy = b->sparse;
    b->heavy.place.ratio = 128;
    b->heavy.place.entries_a_page = 2;
    b->heavy.compressor = compressor(b, 512, vectors);
    uint8_t *windows = mem_alloc((size_t)MAX_SEQS * WINDOW_BYTES);
    memset(windows, 0x36, (size_t)MAX_SEQS * WINDOW_BYTES);
    b->kv = (struct ops_kv){
        .pool = pages(b, &b->sparse.place),
        .page_bytes = PAGE_BYTES,
        .windows = need(b->ops->upload(b->dev, windows, (size_t)MAX_SEQS * WINDOW_BYTES)),
        .states = (uint8_t *)values(b, (size_t)MAX_SEQS * STATE_BYTES / 4, 1.0f),
        .window_bytes = WINDOW_BYTES,
        .state_bytes = STATE_BYTES,
        .stores_window = true};
    mem_free(windows);
    b->x = values(b, (size_t)MAX_ROWS * HIDDEN, 1.0f);
    b->qr = values(b, (size_t)MAX_ROWS * 1024, 1.0f);
    b->q = values(b, (size_t)MAX_ROWS * 64 * 512, 1.0f);
    b->kv_rows = values(b, (size_t)MAX_ROWS * 512, 1.0f);
    b->iq = need(b->ops->alloc(b->dev, (size_t)MAX_ROWS * 64 * 128 * sizeof(float)));
    b->iw = need(b->ops->alloc(b->dev, (size_t)MAX_ROWS * 64 * sizeof(float)));
    b->o = need(b->ops->alloc(b->dev, (size_t)MAX_ROWS * 64 * 512 * sizeof(float)));
    b->selection.n = need(b->ops->alloc(b->dev, MAX_ROWS * sizeof(uint32_t)));
    b->selection.index = need(b->ops->alloc(b->dev, (size_t)MAX_ROWS * 512 * sizeof(uint32_t)));
}

enum { INDEXER, KEYS, TOPK, ENTRIES_4, ATTEND_4, ENTRIES_128, ATTEND_128, N_OPERATIONS };

static void once(struct bench *b, int operation)
{
    const struct ops *ops = b->ops;
    switch (operation) {
    case INDEXER:
        ops->indexer(b->dev, &b->rows, &b->sparse, b->x, b->qr, b->iq, b->iw);
        return;
    case KEYS:
    case ENTRIES_4:
        ops->compress(b->dev, &b->rows, &b->sparse, operation == KEYS, b->x, &b->kv);
        return;
    case TOPK:
        ops->topk(b->dev, &b->rows, &b->sparse, b->iq, b->iw, &b->kv, &b->selection);
        return;
    case ENTRIES_128:
        ops->compress(b->dev, &b->rows, &b->heavy, false, b->x, &b->kv);
        return;
    default:
        ops->attend(b->dev, &b->rows, operation == ATTEND_4 ? &b->sparse : &b->heavy, b->q,
                    b->kv_rows, &b->selection, &b->kv, b->o);
    }
}

static double microseconds(struct bench *b, int operation, int n)
{
    double best = 1e18;
    for (int round = 0; round < 3; round++) {
        wait_for(b);
        uint64_t begin_ns = loop_now_ns();
        for (int i = 0; i < n; i++) {
            once(b, operation);
        }
        wait_for(b);
        double us = (double)(loop_now_ns() - begin_ns) * 1e-3 / n;
        best = us < best ? us : best;
    }
    return best;
}

static void run_call(struct bench *b, uint32_t n_seqs, uint32_t n, uint32_t position)
{
    static uint32_t table[MAX_SEQS][SEQ_PAGES], tokens[MAX_ROWS], positions[MAX_ROWS], of[MAX_ROWS];
    static struct ops_seq seqs[MAX_SEQS];
    uint32_t t = 0;
    double floor_us = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        seqs[s] = (struct ops_seq){table[s], s, t, n, position};
        for (uint32_t i = 0; i < SEQ_PAGES; i++) {
            table[s][i] = (s * 67 + i * 13) % PAGES;
        }
        for (uint32_t i = 0; i < n; i++, t++) {
            uint32_t p = position + i, window = p + 1 < 128 ? p + 1 : 128;
            uint32_t entries = (p + 1) / 4 < 512 ? (p + 1) / 4 : 512;
            positions[t] = p;
            of[t] = s;
            floor_us += 4.0 * 64 * 512 * (window + entries) / 67e6;
        }
    }
    b->rows = (struct ops_rows){t, n_seqs, tokens, positions, of, seqs};
    b->ops->begin(b->dev, &b->rows);
    printf("| %u x %u from %u |", n_seqs, n, position);
    for (int operation = 0; operation < N_OPERATIONS; operation++) {
        double us = microseconds(b, operation, t > 100 ? 2 : 20);
        printf(operation == ATTEND_4 ? " %.0f (%.1f %%) |" : " %.0f |", us, 100 * floor_us / us);
        fflush(stdout);
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    static const uint32_t calls[][3] = {{1, 1, 8191}, {16, 1, 8191},   {32, 1, 8191}, {1, 1, 65530},
                                        {1, 512, 0},  {1, 2048, 6144}, {1, 2048, 0}};
    static struct bench b = {.seed = 7};
    static struct ops table;
    struct registry_choice choice;
    struct registry_wishes wishes;
    struct error err;
    char all[] = "all", *allowed = all;
    if (registry_find(argc > 1 ? argv[1] : "cuda:0", &choice, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        return 77;
    }
    const struct registry_query query = {.backend = choice.backend,
                                         .device = &choice.device,
                                         .wishes = &wishes,
                                         .layout = FORMATS_ENTRY_PACKED};
    if (registry_wishes_parse(argv + 2, argc > 2 ? (size_t)argc - 2 : 0, &allowed, 1, &wishes,
                              &err) ||
        registry_select(&query, &table, NULL, NULL, &err)) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        return 1;
    }
    b.ops = &table;
    setup(&b);
    printf("| sequences x rows | indexer | keys | topk | entries, 4 | attend, 4 (of its floor) | "
           "entries, 128 | attend, 128 |\n|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        run_call(&b, calls[i][0], calls[i][1], calls[i][2]);
    }
    b.ops->close(b.dev);
    return 0;
}
