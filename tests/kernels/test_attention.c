/* Compressor, index, top-k and attention over a sequence: against their equations in double over
 * the whole prompt, and bit for bit against themselves however the prompt is cut. On the CPU, or on
 * the device that the first argument names. */
#include "util.h"

enum { TOKENS = 70, PAGE_TOKENS = 32, N_PAGES = 8, PAGE_BYTES = 16384, SLOTS = 3 };

struct fixture {
    struct ops_dims d;
    struct ops_device *dev;
    struct ops_device *cpu; /* for its rotation table */
    struct ops_layer layer;
    struct ops_kv kv, host; /* the device's, and a copy that reset_state and fetch bring in line */
    uint64_t seed;
    float *x, *q, *kv_rows; /* of every token */
    float *wkv, *wgate, *ape, *norm, *sink;
    uint32_t pages[3]; /* of the sequence */
    uint32_t width;
};

static void reset_state(struct fixture *f)
{
    memset(f->host.pool, 0xff, N_PAGES * PAGE_BYTES);
    memset(f->host.windows, 0xff, SLOTS * f->kv.window_bytes);
    for (size_t i = 0; i < SLOTS * f->kv.state_bytes / sizeof(float); i++) {
        ((float *)(void *)f->host.states)[i] = 0.0f;
    }
    for (uint32_t s = 0; s < SLOTS; s++) {
        float *state = (float *)(void *)(f->host.states + s * f->kv.state_bytes);
        if (f->layer.place.ratio != 4) {
            for (uint32_t ch = 0; ch < f->d.head_dim; ch++) {
                state[ch] = -INFINITY;
            }
            continue;
        }
        for (uint32_t row = 0; row < 2 * OPS_STATE_RING; row++) {
            uint32_t d = row < OPS_STATE_RING ? f->d.head_dim : f->d.index_dim;
            for (uint32_t ch = 0; ch < 2 * d; ch++) {
                state[2 * d + ch] = -INFINITY;
            }
            state += 4 * (size_t)d;
        }
    }
    backend->write(f->dev, f->kv.pool, f->host.pool, N_PAGES * PAGE_BYTES);
    backend->write(f->dev, f->kv.windows, f->host.windows, SLOTS * f->kv.window_bytes);
    backend->write(f->dev, f->kv.states, f->host.states, SLOTS * f->kv.state_bytes);
}

/* Pages and slots as the device left them. */
static void fetch(struct fixture *f)
{
    struct error err;
    backend->read(f->dev, f->host.pool, f->kv.pool, N_PAGES * PAGE_BYTES);
    backend->read(f->dev, f->host.windows, f->kv.windows, SLOTS * f->kv.window_bytes);
    backend->read(f->dev, f->host.states, f->kv.states, SLOTS * f->kv.state_bytes);
    if (backend->wait(f->dev, &err)) {
        fail_msg("%s", err.text);
    }
}

static void setup(struct fixture *f, uint64_t seed, uint32_t ratio, bool exact)
{
    *f = (struct fixture){.d = small_dims(exact), .seed = seed, .pages = {6, 1, 3}};
    struct ops_dims *d = &f->d;
    f->dev = open_device(d, TOKENS, 96, 16);
    f->cpu = open_on(&ops_cpu, d, &(struct ops_limits){.n_rows = 1, .n_threads = 1});
    f->width = (ratio == 4 ? 2 : 1) * d->head_dim;
    f->x = random_floats(&f->seed, (size_t)TOKENS * d->hidden, 1.0f);
    f->q = random_floats(&f->seed, (size_t)TOKENS * d->n_heads * d->head_dim, 1.0f);
    f->kv_rows = random_floats(&f->seed, (size_t)TOKENS * d->head_dim, 1.0f);
    f->wkv = random_floats(&f->seed, (size_t)f->width * d->hidden, 0.2f);
    f->wgate = random_floats(&f->seed, (size_t)f->width * d->hidden, 0.2f);
    f->ape = random_floats(&f->seed, (size_t)16 * f->width, 0.5f);
    f->norm = random_floats(&f->seed, d->head_dim, 1.0f);
    f->sink = random_floats(&f->seed, d->n_heads, 1.0f);
    size_t entry = formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    size_t scale = formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    struct ops_place *p = &f->layer.place;
    p->ratio = ratio;
    p->entries_a_page = ratio ? PAGE_TOKENS / ratio : 0;
    p->entry = 64;
    p->entry_scale = p->entry + p->entries_a_page * entry;
    p->key = p->entry_scale + p->entries_a_page * scale + 32;
    p->key_scale = p->key + p->entries_a_page * formats_key_bytes(d->entry_kind, d->index_dim);
    p->window_scale = d->ring * entry;
    p->index_state = (size_t)OPS_STATE_RING * 4 * d->head_dim * sizeof(float);
    const float *ape = to_device(backend, f->dev, f->ape, (size_t)16 * f->width * sizeof(float));
    const float *norm = to_device(backend, f->dev, f->norm, d->head_dim * sizeof(float));
    f->layer.compressor =
        (struct ops_compressor){.wkv = pack_floats(f->dev, f->wkv, f->width, d->hidden),
                                .wgate = pack_floats(f->dev, f->wgate, f->width, d->hidden),
                                .ape = ape,
                                .norm = norm};
    f->layer.index_compressor =
        (struct ops_compressor){.wkv = pack_floats(f->dev, f->wkv, 2 * d->index_dim, d->hidden),
                                .wgate = pack_floats(f->dev, f->wgate, 2 * d->index_dim, d->hidden),
                                .ape = ape,
                                .norm = norm};
    f->layer.attn_sink = to_device(backend, f->dev, f->sink, d->n_heads * sizeof(float));
    f->kv = (struct ops_kv){.pool = backend->alloc(f->dev, (size_t)N_PAGES * PAGE_BYTES),
                            .page_bytes = PAGE_BYTES,
                            .window_bytes = d->ring * (entry + scale),
                            .state_bytes = p->index_state + (size_t)OPS_STATE_RING * 4 *
                                                                d->index_dim * sizeof(float),
                            .stores_window = true};
    f->kv.windows = backend->alloc(f->dev, SLOTS * f->kv.window_bytes);
    f->kv.states = backend->alloc(f->dev, SLOTS * f->kv.state_bytes);
    f->host = f->kv;
    f->host.pool = mem_array(N_PAGES, PAGE_BYTES);
    f->host.windows = mem_array(SLOTS, f->kv.window_bytes);
    f->host.states = mem_array(SLOTS, f->kv.state_bytes);
    reset_state(f);
}

static void teardown(struct fixture *f)
{
    void *all[] = {f->x,    f->q,    f->kv_rows,   f->wkv,          f->wgate,      f->ape,
                   f->norm, f->sink, f->host.pool, f->host.windows, f->host.states};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    backend->close(f->dev);
    ops_cpu.close(f->cpu);
}

/* Entry j in double: its raw sum, norm and rotation. */
static void entry_of(const struct fixture *f, uint32_t j, uint32_t d, double *ret)
{
    uint32_t ratio = f->layer.place.ratio, width = ratio == 4 ? 2 * d : d;
    uint32_t first = ratio == 4 && j > 0 ? 4 * (j - 1) : ratio * j, n = ratio * (j + 1) - first;
    double *k = mem_array((size_t)n * width, sizeof(double));
    double *s = mem_array((size_t)n * width, sizeof(double)), square = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        const float *x = f->x + (size_t)(first + i) * f->d.hidden;
        product(f->wkv, x, width, f->d.hidden, k + (size_t)i * width);
        product(f->wgate, x, width, f->d.hidden, s + (size_t)i * width);
        for (uint32_t ch = 0; ch < width; ch++) {
            s[(size_t)i * width + ch] += (double)f->ape[(first + i) % ratio * width + ch];
        }
    }
    for (uint32_t ch = 0; ch < d; ch++) {
        double z = 0.0, a = 0.0;
        for (uint32_t i = 0; i < n; i++) {
            bool current = ratio == 4 && first + i >= 4 * j;
            size_t at = (size_t)i * width + (current ? d + ch : ch);
            z += exp(s[at]);
            a += exp(s[at]) * k[at];
        }
        ret[ch] = a / z;
        square += ret[ch] * ret[ch];
    }
    for (uint32_t ch = 0; ch < d; ch++) {
        ret[ch] = ret[ch] / sqrt(square / d + 1e-6) * (double)f->norm[ch];
    }
    for (uint32_t i = 0; i < f->d.rope_dim / 2; i++) {
        double angle = (double)((float)(j * ratio) * f->cpu->freqs[1][i]);
        double *at = ret + d - f->d.rope_dim + 2 * i, even = at[0], odd = at[1];
        at[0] = even * cos(angle) - odd * sin(angle);
        at[1] = even * sin(angle) + odd * cos(angle);
    }
    mem_free(k);
    mem_free(s);
}

/* Runs compressor, index and attention over the tokens cut at `cuts`; o of every token. */
static void run(struct fixture *f, const uint32_t *cuts, uint32_t n_cuts, const float *iq,
                const float *iw, float *ret_o)
{
    const struct ops_dims *d = &f->d;
    size_t wide = (size_t)d->n_heads * d->head_dim, one_iq = (size_t)d->index_heads * d->index_dim;
    const struct ops *ops = backend;
    struct ops_device *dev = f->dev;
    struct ops_selection selection = {poisoned_on(ops, dev, TOKENS * 4),
                                      poisoned_on(ops, dev, (size_t)TOKENS * d->index_topk * 4)};
    const float *x_d = to_device(ops, dev, f->x, TOKENS * (size_t)d->hidden * 4);
    const float *q_d = to_device(ops, dev, f->q, TOKENS * wide * 4);
    const float *rows_d = to_device(ops, dev, f->kv_rows, TOKENS * (size_t)d->head_dim * 4);
    const float *iq_d = to_device(ops, dev, iq, TOKENS * one_iq * 4);
    const float *iw_d = to_device(ops, dev, iw, TOKENS * (size_t)d->index_heads * 4);
    float *o_d = poisoned_on(ops, dev, TOKENS * wide * 4);
    uint32_t at = 0;
    for (uint32_t c = 0; c <= n_cuts; c++) {
        uint32_t end = c < n_cuts ? cuts[c] : TOKENS;
        struct call call;
        call_clear(&call);
        call_add(&call, f->pages, 1, at, end - at);
        ops->begin(dev, &call.rows);
        const float *x = x_d + (size_t)at * d->hidden;
        if (f->layer.place.ratio == 4) {
            ops->compress(dev, &call.rows, &f->layer, true, x, &f->kv);
            ops->topk(dev, &call.rows, &f->layer, iq_d + at * one_iq, iw_d + at * d->index_heads,
                      &f->kv, &selection);
        }
        if (f->layer.place.ratio) {
            ops->compress(dev, &call.rows, &f->layer, false, x, &f->kv);
        }
        ops->attend(dev, &call.rows, &f->layer, q_d + at * wide, rows_d + (size_t)at * d->head_dim,
                    &selection, &f->kv, o_d + at * wide);
        at = end;
    }
    float *o = from_device(ops, dev, o_d, TOKENS * wide * 4);
    memcpy(ret_o, o, TOKENS * wide * 4);
    mem_free(o);
    fetch(f);
}

/* The entries that token t attends to, in double. */
static uint32_t chosen_of(const struct fixture *f, uint32_t t, const float *iq, const float *iw,
                          double (*keys)[64], bool *ret_in)
{
    const struct ops_dims *d = &f->d;
    uint32_t n = (t + 1) / f->layer.place.ratio, n_in = 0;
    double score[TOKENS];
    for (uint32_t j = 0; j < n; j++) {
        score[j] = 0.0;
        for (uint32_t h = 0; h < d->index_heads; h++) {
            double dot = 0.0;
            for (uint32_t i = 0; i < d->index_dim; i++) {
                dot += (double)iq[(t * d->index_heads + h) * d->index_dim + i] * keys[j][i];
            }
            score[j] += fmax(dot, 0.0) * (double)iw[t * d->index_heads + h];
        }
    }
    for (uint32_t j = 0; j < n; j++) {
        uint32_t better = 0;
        for (uint32_t i = 0; i < n; i++) {
            better += score[i] > score[j] || (score[i] == score[j] && i < j);
        }
        ret_in[j] = f->layer.place.ratio != 4 || better < d->index_topk;
        n_in += ret_in[j];
    }
    return n_in;
}

static void check_row(const struct fixture *f, uint32_t t, double (*entries)[64], const bool *in,
                      const float *o)
{
    const struct ops_dims *d = &f->d;
    uint32_t hd = d->head_dim, n = f->layer.place.ratio ? (t + 1) / f->layer.place.ratio : 0;
    for (uint32_t h = 0; h < d->n_heads; h++) {
        const float *q = f->q + ((size_t)t * d->n_heads + h) * hd;
        double z = exp((double)f->sink[h]), want[64] = {0};
        for (uint32_t a = 0; a < n + d->window; a++) {
            double kv[64], dot = 0.0;
            if (a < n ? !in[a] : t + n < a) {
                continue;
            }
            for (uint32_t i = 0; i < hd; i++) {
                kv[i] = a < n ? entries[a][i] : (double)f->kv_rows[(size_t)(t + n - a) * hd + i];
                dot += (double)q[i] * kv[i];
            }
            double p = exp(dot / sqrt(hd));
            z += p;
            for (uint32_t i = 0; i < hd; i++) {
                want[i] += p * kv[i];
            }
        }
        for (uint32_t i = 0; i < hd; i++) {
            want[i] /= z;
        }
        for (uint32_t i = 0; i < d->rope_dim / 2; i++) { /* back, at the query's position */
            double angle = (double)((float)t * f->cpu->freqs[f->layer.place.ratio != 0][i]);
            double *at = want + hd - d->rope_dim + 2 * i, even = at[0], odd = at[1];
            at[0] = even * cos(angle) + odd * sin(angle);
            at[1] = odd * cos(angle) - even * sin(angle);
        }
        for (uint32_t i = 0; i < hd; i++) {
            assert_close(o[((size_t)t * d->n_heads + h) * hd + i], want[i], 3e-5);
        }
    }
}

static void check_sequence(uint32_t ratio)
{
    struct fixture f;
    setup(&f, 31 + ratio, ratio, true);
    const struct ops_dims *d = &f.d;
    size_t wide = (size_t)d->n_heads * d->head_dim;
    float *iq = random_floats(&f.seed, (size_t)TOKENS * d->index_heads * d->index_dim, 1.0f);
    float *iw = random_floats(&f.seed, (size_t)TOKENS * d->index_heads, 1.0f);
    float *o = poisoned(TOKENS * wide);
    /* Scores of the first window are far above the later ones: what it leaves behind would drown
     * them. */
    for (size_t i = 0; ratio == 16 && i < (size_t)16 * d->hidden; i++) {
        f.x[i] *= 90.0f;
    }
    static double entries[TOKENS][64], keys[TOKENS][64];
    run(&f, NULL, 0, iq, iw, o);
    for (uint32_t j = 0; ratio && j < TOKENS / ratio; j++) {
        uint8_t *body, *scales;
        float stored[64];
        entry_of(&f, j, d->head_dim, entries[j]);
        cpu_page_entry(d, &f.host, &f.layer.place, f.pages, j, false, &body, &scales);
        assert_ptr_equal(body, f.host.pool + (size_t)f.pages[j * ratio / PAGE_TOKENS] * PAGE_BYTES +
                                   64 + j % (PAGE_TOKENS / ratio) * d->head_dim * sizeof(float));
        cpu_entry_load(d, body, scales, stored);
        for (uint32_t i = 0; i < d->head_dim; i++) {
            assert_close(stored[i], entries[j][i], 2e-5);
        }
        if (ratio == 4) {
            entry_of(&f, j, d->index_dim, keys[j]);
        }
    }
    for (uint32_t t = 0; t < TOKENS; t++) {
        bool in[TOKENS] = {false};
        if (ratio) {
            chosen_of(&f, t, iq, iw, keys, in);
        }
        check_row(&f, t, entries, in, o);
    }
    float *all[] = {iq, iw, o};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    teardown(&f);
}

static void test_window(void **state)
{
    check_sequence(0);
}

static void test_sparse(void **state)
{
    check_sequence(4);
}

static void test_heavy(void **state)
{
    check_sequence(16);
}

/* However the prompt is cut: the same output, pages, window and state, in both kinds of entry. */
static void test_cuts(void **state)
{
    for (int round = 0; round < 24; round++) {
        static const uint32_t ratios[] = {0, 4, 16};
        struct fixture f;
        setup(&f, 41 + (uint64_t)round % 6, ratios[round % 3], round % 6 < 3);
        const struct ops_dims *d = &f.d;
        size_t wide = (size_t)d->n_heads * d->head_dim;
        for (size_t i = 0; !d->exact && i < (size_t)TOKENS * d->head_dim; i += d->head_dim) {
            cpu_quant8(f.kv_rows + i, d->head_dim - d->rope_dim, FORMATS_KV_GROUP, f.kv_rows + i);
            cpu_round_row(f.kv_rows + i, d->head_dim);
        }
        float *iq = random_floats(&f.seed, (size_t)TOKENS * d->index_heads * d->index_dim, 1.0f);
        float *iw = random_floats(&f.seed, (size_t)TOKENS * d->index_heads, 1.0f);
        float *o = poisoned(TOKENS * wide), *again = poisoned(TOKENS * wide);
        run(&f, NULL, 0, iq, iw, o);
        uint8_t *pool = mem_dup(f.host.pool, N_PAGES * PAGE_BYTES);
        uint8_t *windows = mem_dup(f.host.windows, SLOTS * f.kv.window_bytes);
        uint8_t *states = mem_dup(f.host.states, SLOTS * f.kv.state_bytes);
        uint32_t cuts[TOKENS], n = 0;
        uint64_t seed = 100 + (uint64_t)round;
        for (uint32_t t = 1; t < TOKENS; t++) { /* singly in the first rounds */
            if (round < 6 || below(&seed, 12) == 0) {
                cuts[n++] = t;
            }
        }
        reset_state(&f);
        run(&f, cuts, n, iq, iw, again);
        assert_memory_equal(again, o, TOKENS * wide * sizeof(float));
        assert_memory_equal(f.host.pool, pool, N_PAGES * PAGE_BYTES);
        assert_memory_equal(f.host.windows, windows, SLOTS * f.kv.window_bytes);
        assert_memory_equal(f.host.states, states, SLOTS * f.kv.state_bytes);
        void *all[] = {iq, iw, o, again, pool, windows, states};
        for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
            mem_free(all[i]);
        }
        teardown(&f);
    }
}

static void test_select(void **state)
{
    uint64_t seed = 51;
    for (int round = 0; round < 3000; round++) {
        float score[200];
        uint32_t n = 1 + below(&seed, 200), k = 1 + below(&seed, n), keys[200], got[200], m = 0;
        for (uint32_t i = 0; i < n; i++) {
            score[i] = round % 2 ? normal(&seed) : (float)below(&seed, 5) - 2.0f;
            score[i] = score[i] == 0.0f && below(&seed, 2) ? -0.0f : score[i];
        }
        cpu_topk_select(score, n, k, keys, got);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t better = 0;
            for (uint32_t j = 0; j < n; j++) {
                better += score[j] > score[i] || (score[j] == score[i] && j < i);
            }
            if (better < k) {
                assert_int_equal(got[m++], i);
            }
        }
        assert_int_equal(m, k);
    }
}

int main(int argc, char **argv)
{
    backend_choose(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_window), cmocka_unit_test(test_sparse),
                                       cmocka_unit_test(test_heavy), cmocka_unit_test(test_cuts),
                                       cmocka_unit_test(test_select)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
