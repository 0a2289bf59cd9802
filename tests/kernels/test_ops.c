/* The operations without cache, each against its equation in double, in exact arithmetic: what
 * quantised arithmetic adds is rounding, which tests/oracle checks against the reference. Outputs
 * are poisoned first, and every row is computed once more alone: its bits may not change. */
#include "util.h"

enum { ROWS = 9 };

static double logistic(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static void rms_rows(const double *x, const float *w, uint32_t n, double *ret_y)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < n; i++) {
        sum += x[i] * x[i];
    }
    for (uint32_t i = 0; i < n; i++) {
        ret_y[i] = x[i] / sqrt(sum / n + 1e-6) * (w ? (double)w[i] : 1.0);
    }
}

/* Rotation of the last rope_dim of n channels by position * frequency. */
static void rotate(double *x, uint32_t n, uint32_t rope_dim, double base, uint32_t position)
{
    for (uint32_t i = 0; i < rope_dim / 2; i++) {
        double angle = (double)((float)position * (float)pow(base, -2.0 * i / rope_dim));
        double *at = x + n - rope_dim + 2 * i, even = at[0], odd = at[1];
        at[0] = even * cos(angle) - odd * sin(angle);
        at[1] = even * sin(angle) + odd * cos(angle);
    }
}

/* got within 0.501 units in the last place of want. */
static void assert_ulp(float got, double want)
{
    double unit = ldexp(1.0, ilogb(want == 0.0 ? 1e-45 : want) - 23);
    unit = unit < 0x1p-149 ? 0x1p-149 : unit;
    assert_close(got, want, 0.501 * unit);
}

static void test_functions(void **state)
{
    uint64_t seed = 71;
    for (int i = 0; i < 400000; i++) {
        float x = (float)((double)(next_random(&seed) >> 11) * 0x1p-53 * 2.0 - 1.0);
        assert_ulp(cpu_exp(x * 88.0f), exp((double)(x * 88.0f)));
        assert_ulp(cpu_exp(x), exp((double)x));
        assert_ulp(cpu_softplus(x * 30.0f), log1p(exp((double)(x * 30.0f))));
        float angle = fabsf(x) * (i % 2 ? 1048576.0f : 8.0f), s, c;
        cpu_sincos(angle, &s, &c);
        assert_close(s, sin((double)angle), 3.1e-8);
        assert_close(c, cos((double)angle), 3.1e-8);
    }
    assert_true(cpu_exp(0.0f) == 1.0f && cpu_exp(-INFINITY) == 0.0f && isinf(cpu_exp(INFINITY)));
    assert_ulp(cpu_exp(-100.0f), exp(-100.0));
}

/* The vector of model.md, section 9. */
static void test_mhc_vector(void **state)
{
    static const double pre[4] = {0.2994339, 0.3893618, 0.3543447, 0.4501670};
    static const double post[4] = {0.6416426, 0.5988657, 0.8026247, 0.7550813};
    static const double comb[16] = {
        0.2249784, 0.2932059, 0.2568365, 0.2249783, 0.2568364, 0.1931202, 0.2932059, 0.2568365,
        0.2249784, 0.2932059, 0.2568365, 0.2249783, 0.2932058, 0.2204670, 0.1931202, 0.2932059};
    float m[24], base[24], scale[3] = {0.5f, 1.0f, 2.0f}, got_pre[4], got_post[4], got[16];
    for (int i = 0; i < 24; i++) {
        m[i] = 0.1f * (float)(i - 12);
        base[i] = 0.05f * (float)((7 * i) % 11 - 5);
    }
    cpu_mhc_split(m, scale, base, 20, 1e-6f, got_pre, got_post, got);
    for (int k = 0; k < 4; k++) {
        assert_close(got_pre[k], pre[k], 2e-7);
        assert_close(got_post[k], post[k], 2e-7);
    }
    for (int i = 0; i < 16; i++) {
        assert_close(got[i], comb[i], 2e-7);
    }
}

/* With few rounds the order of the two normalisations shows, which twenty hide. */
static void test_mhc_rounds(void **state)
{
    uint64_t seed = 72;
    for (uint32_t iters = 1; iters <= 4; iters++) {
        float m[24], base[24], scale[3] = {0.5f, 1.0f, 2.0f}, pre[4], post[4], got[16];
        double c[4][4];
        for (int i = 0; i < 24; i++) {
            m[i] = normal(&seed);
            base[i] = normal(&seed);
        }
        cpu_mhc_split(m, scale, base, iters, 1e-6f, pre, post, got);
        for (int j = 0; j < 4; j++) {
            double sum = 0.0;
            for (int k = 0; k < 4; k++) {
                c[j][k] = exp((double)m[8 + 4 * j + k] * 2.0 + (double)base[8 + 4 * j + k]);
                sum += c[j][k];
            }
            for (int k = 0; k < 4; k++) {
                c[j][k] = c[j][k] / sum + 1e-6;
            }
        }
        for (uint32_t pass = 1; pass < 2 * iters; pass++) { /* columns, rows, columns, ... */
            for (int a = 0; a < 4; a++) {
                double sum = 1e-6;
                for (int b = 0; b < 4; b++) {
                    sum += pass & 1 ? c[b][a] : c[a][b];
                }
                for (int b = 0; b < 4; b++) {
                    *(pass & 1 ? &c[b][a] : &c[a][b]) /= sum;
                }
            }
        }
        for (int i = 0; i < 16; i++) {
            assert_close(got[i], c[i / 4][i % 4], 1e-6);
        }
    }
}

struct fixture {
    struct ops_dims d;
    struct ops_device *dev;
    struct call call;
    uint64_t seed;
};

static void setup(struct fixture *f, uint64_t seed)
{
    f->d = small_dims(true);
    f->seed = seed;
    f->dev = open_device(&f->d, ROWS, 200, 16);
    call_clear(&f->call);
    call_add(&f->call, NULL, 0, 3, ROWS - 2);
    call_add(&f->call, NULL, 1, 90, 2);
    for (uint32_t r = 0; r < ROWS; r++) {
        f->call.tokens[r] = below(&f->seed, f->d.vocab);
    }
    ops_cpu.begin(f->dev, &f->call.rows);
}

static struct ops_rows just(const struct fixture *f, uint32_t r)
{
    struct ops_rows one = f->call.rows;
    one.n_rows = one.n_seqs = 1;
    one.tokens += r;
    one.positions += r;
    return one;
}

static void test_embed(void **state)
{
    struct fixture f;
    setup(&f, 21);
    uint32_t n = f.d.hidden;
    float *table = random_floats(&f.seed, (size_t)f.d.vocab * n, 1.0f);
    float *streams = poisoned((size_t)ROWS * 4 * n);
    struct ops_source source = {.format = OPS_F32,
                                .rows = f.d.vocab,
                                .cols = n,
                                .row_bytes = n * sizeof(float),
                                .data = table,
                                .block_rows = 1,
                                .block_cols = 1,
                                .global_scale = 1.0f,
                                .is_table = true};
    struct ops_matrix m;
    assert_int_equal(ops_cpu.pack(f.dev, &source, &m), STATUS_OK);
    ops_cpu.embed(f.dev, &f.call.rows, &m, streams);
    for (uint32_t i = 0; i < ROWS * 4; i++) {
        assert_memory_equal(streams + (size_t)i * n, table + (size_t)f.call.tokens[i / 4] * n,
                            n * sizeof(float));
    }
    mem_free(table);
    mem_free(streams);
    ops_cpu.close(f.dev);
}

/* pre and post of one row in double; mix is what pre left. */
static void mhc_row(const float *streams, const float *fn, const float *scale, const float *base,
                    const float *norm, uint32_t n, double *ret_x, const float *mix)
{
    double m[24], sum = 0.0, u[256];
    for (uint32_t i = 0; i < 4 * n; i++) {
        sum += (double)streams[i] * (double)streams[i];
    }
    product(fn, streams, 24, 4 * n, m);
    for (uint32_t i = 0; i < n; i++) {
        u[i] = 0.0;
    }
    for (int k = 0; k < 4; k++) {
        double root = sqrt(sum / (4 * n) + 1e-6);
        double pre = logistic(m[k] / root * (double)scale[0] + (double)base[k]) + 1e-6;
        double post = 2 * logistic(m[4 + k] / root * (double)scale[1] + (double)base[4 + k]);
        assert_close(mix[k], post, 3e-6);
        for (uint32_t i = 0; i < n; i++) {
            u[i] += pre * (double)streams[k * n + i];
        }
    }
    rms_rows(u, norm, n, ret_x);
}

static void test_mhc(void **state)
{
    struct fixture f;
    setup(&f, 22);
    uint32_t n = f.d.hidden;
    float *streams = random_floats(&f.seed, (size_t)ROWS * 4 * n, 1.0f);
    float *fn = random_floats(&f.seed, (size_t)24 * 4 * n, 0.1f);
    float *base = random_floats(&f.seed, 24, 1.0f), *scale = random_floats(&f.seed, 3, 1.0f);
    float *norm = random_floats(&f.seed, n, 1.0f),
          *y = random_floats(&f.seed, (size_t)ROWS * n, 1.0f);
    float *x = poisoned((size_t)ROWS * n), *mix = poisoned((size_t)ROWS * 24), one_x[256],
          one_mix[24];
    struct ops_hc hc = {.fn = pack_floats(f.dev, fn, 24, 4 * n), .base = base, .scale = scale};
    ops_cpu.mhc_pre(f.dev, &f.call.rows, &hc, norm, streams, x, mix);
    for (uint32_t r = 0; r < ROWS; r++) {
        double want[256];
        mhc_row(streams + (size_t)r * 4 * n, fn, scale, base, norm, n, want, mix + r * 24);
        for (uint32_t i = 0; i < n; i++) {
            assert_close(x[r * n + i], want[i], 1e-5);
        }
        struct ops_rows alone = just(&f, r);
        ops_cpu.mhc_pre(f.dev, &alone, &hc, norm, streams + (size_t)r * 4 * n, one_x, one_mix);
        assert_memory_equal(one_x, x + r * n, n * sizeof(float));
        assert_memory_equal(one_mix, mix + r * 24, sizeof(one_mix));
    }
    float *before = mem_dup(streams, (size_t)ROWS * 4 * n * sizeof(float));
    ops_cpu.mhc_post(f.dev, &f.call.rows, y, mix, streams);
    for (uint32_t i = 0; i < ROWS * 4 * n; i++) {
        uint32_t r = i / (4 * n), k = i / n % 4, ch = i % n;
        double want = (double)mix[r * 24 + k] * (double)y[r * n + ch];
        for (uint32_t j = 0; j < 4; j++) { /* the first index of the matrix is the source */
            want += (double)mix[r * 24 + 4 + 4 * j + k] * (double)before[(r * 4 + j) * n + ch];
        }
        assert_close(streams[i], want, 1e-5);
    }
    float *all[] = {streams, fn, base, scale, norm, y, x, mix, before};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops_cpu.close(f.dev);
}

/* Frequencies of model.md, 2.3. */
static void test_frequencies(void **state)
{
    static const struct {
        int i;
        double plain, compressed;
    } want[] = {{0, 1, 1},
                {1, 0.749894, 0.687656},
                {8, 0.1, 0.05},
                {15, 0.0133352, 0.00363554},
                {16, 0.01, 0.002265625},
                {17, 7.49894e-3, 1.39680e-3},
                {20, 3.16228e-3, 2.96978e-4},
                {24, 1e-3, 1.953125e-5},
                {25, 7.49894e-4, 5.37231e-6},
                {31, 1.33352e-4, 5.68053e-7}};
    struct ops_dims d = small_dims(false);
    d.has_yarn = true;
    d.yarn_factor = 16;
    d.yarn_beta_fast = 32;
    d.yarn_beta_slow = 1;
    d.yarn_original = 65536;
    struct ops_device *dev = open_device(&d, 1, 64, 0);
    for (size_t k = 0; k < sizeof(want) / sizeof(want[0]); k++) {
        assert_close(dev->freqs[0][want[k].i], want[k].plain, want[k].plain * 4e-6);
        assert_close(dev->freqs[1][want[k].i], want[k].compressed, want[k].compressed * 4e-6);
    }
    float table[64];
    cpu_rope_table(dev->freqs[0], 64, 1000003, table);
    for (int i = 0; i < 32; i++) { /* the angle is a float, its cosine is accurate */
        double angle = (double)(1000003.0f * dev->freqs[0][i]);
        assert_close(table[2 * i], cos(angle), 2e-7);
        assert_close(table[2 * i + 1], sin(angle), 2e-7);
    }
    ops_cpu.close(dev);
}

static void test_project(void **state)
{
    struct fixture f;
    setup(&f, 23);
    const struct ops_dims *d = &f.d;
    uint32_t wide = d->n_heads * d->head_dim;
    float *x = random_floats(&f.seed, (size_t)ROWS * d->hidden, 1.0f);
    float *wq_a = random_floats(&f.seed, (size_t)d->q_lora * d->hidden, 0.2f);
    float *wq_b = random_floats(&f.seed, (size_t)wide * d->q_lora, 0.2f);
    float *wkv = random_floats(&f.seed, (size_t)d->head_dim * d->hidden, 0.2f);
    float *q_norm = random_floats(&f.seed, d->q_lora, 1.0f);
    float *kv_norm = random_floats(&f.seed, d->head_dim, 1.0f);
    float *qr = poisoned((size_t)ROWS * d->q_lora), *q = poisoned((size_t)ROWS * wide);
    float *kv = poisoned((size_t)ROWS * d->head_dim);
    for (uint32_t ratio = 0; ratio <= 4; ratio += 4) {
        struct ops_layer layer = {.place = {.ratio = ratio},
                                  .wq_a = pack_floats(f.dev, wq_a, d->q_lora, d->hidden),
                                  .wq_b = pack_floats(f.dev, wq_b, wide, d->q_lora),
                                  .wkv = pack_floats(f.dev, wkv, d->head_dim, d->hidden),
                                  .q_norm = q_norm,
                                  .kv_norm = kv_norm};
        ops_cpu.project(f.dev, &f.call.rows, &layer, x, qr, q, kv);
        for (uint32_t r = 0; r < ROWS; r++) {
            double a[64], b[64], kv_want[64], base = ratio ? 160000.0 : 10000.0;
            float low[64];
            product(wq_a, x + r * d->hidden, d->q_lora, d->hidden, a);
            rms_rows(a, q_norm, d->q_lora, b);
            for (uint32_t i = 0; i < d->q_lora; i++) {
                assert_close(qr[r * d->q_lora + i], b[i], 1e-5);
                low[i] = qr[r * d->q_lora + i];
            }
            for (uint32_t h = 0; h < d->n_heads; h++) {
                product(wq_b + (size_t)h * d->head_dim * d->q_lora, low, d->head_dim, d->q_lora, a);
                rms_rows(a, NULL, d->head_dim, b);
                rotate(b, d->head_dim, d->rope_dim, base, f.call.positions[r]);
                for (uint32_t i = 0; i < d->head_dim; i++) {
                    assert_close(q[r * wide + h * d->head_dim + i], b[i], 1e-5);
                }
            }
            product(wkv, x + r * d->hidden, d->head_dim, d->hidden, a);
            rms_rows(a, kv_norm, d->head_dim, kv_want);
            rotate(kv_want, d->head_dim, d->rope_dim, base, f.call.positions[r]);
            for (uint32_t i = 0; i < d->head_dim; i++) {
                assert_close(kv[r * d->head_dim + i], kv_want[i], 2e-5);
            }
        }
    }
    float *all[] = {x, wq_a, wq_b, wkv, q_norm, kv_norm, qr, q, kv};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops_cpu.close(f.dev);
}

static void test_oproj(void **state)
{
    struct fixture f;
    setup(&f, 24);
    const struct ops_dims *d = &f.d;
    uint32_t wide = d->n_heads * d->head_dim, in = wide / d->o_groups,
             mid = d->o_groups * d->o_lora;
    float *o = random_floats(&f.seed, (size_t)ROWS * wide, 1.0f),
          *y = poisoned((size_t)ROWS * d->hidden);
    float *wo_a = random_floats(&f.seed, (size_t)mid * in, 0.2f);
    float *wo_b = random_floats(&f.seed, (size_t)d->hidden * mid, 0.2f);
    struct ops_matrix groups[2];
    for (uint32_t g = 0; g < 2; g++) {
        groups[g] = pack_floats(f.dev, wo_a + (size_t)g * d->o_lora * in, d->o_lora, in);
    }
    struct ops_layer layer = {.wo_a = groups, .wo_b = pack_floats(f.dev, wo_b, d->hidden, mid)};
    ops_cpu.oproj(f.dev, &f.call.rows, &layer, o, y);
    for (uint32_t r = 0; r < ROWS; r++) {
        double z[24], want[72];
        float narrow[24];
        for (uint32_t g = 0; g < 2; g++) {
            product(wo_a + (size_t)g * d->o_lora * in, o + r * wide + g * in, d->o_lora, in,
                    z + g * d->o_lora);
        }
        for (uint32_t i = 0; i < mid; i++) {
            narrow[i] = (float)z[i];
        }
        product(wo_b, narrow, d->hidden, mid, want);
        for (uint32_t i = 0; i < d->hidden; i++) {
            assert_close(y[r * d->hidden + i], want[i], 2e-5);
        }
    }
    float *all[] = {o, y, wo_a, wo_b};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops_cpu.close(f.dev);
}

/* Weights from the unbiased scores, choice by the biased ones, hash routing by token. */
static void test_route(void **state)
{
    struct fixture f;
    setup(&f, 25);
    const struct ops_dims *d = &f.d;
    uint32_t n = d->n_experts, k_n = d->n_experts_used, ids[ROWS * 3];
    float *x = random_floats(&f.seed, (size_t)ROWS * d->hidden, 1.0f), w[ROWS * 3];
    float *gate = random_floats(&f.seed, (size_t)n * d->hidden, 0.2f);
    float *bias = random_floats(&f.seed, n, 2.0f);
    memcpy(gate + 2 * d->hidden, gate + 5 * d->hidden, d->hidden * sizeof(float));
    bias[2] = bias[5] = 9.0f; /* a tie at the top: the lower id goes first */
    uint16_t tid2eid[50 * 3];
    for (uint32_t t = 0; t < d->vocab; t++) {
        for (uint32_t k = 0; k < k_n; k++) {
            tid2eid[t * k_n + k] = (uint16_t)((t + 2 * k) % n);
        }
    }
    for (int hash = 0; hash < 2; hash++) {
        struct ops_layer layer = {.gate = pack_floats(f.dev, gate, n, d->hidden),
                                  .gate_bias = hash ? NULL : bias,
                                  .tid2eid = hash ? tid2eid : NULL};
        memset(ids, 0xff, sizeof(ids));
        ops_cpu.route(f.dev, &f.call.rows, &layer, x, ids, w);
        for (uint32_t r = 0; r < ROWS; r++) {
            double z[7], sum = 0.0;
            product(gate, x + r * d->hidden, n, d->hidden, z);
            for (uint32_t k = 0; k < k_n; k++) {
                uint32_t id = ids[r * k_n + k];
                assert_true(id < n);
                sum += sqrt(log1p(exp(z[id])));
            }
            for (uint32_t k = 0; k < k_n; k++) {
                uint32_t id = ids[r * k_n + k];
                assert_close(w[r * k_n + k], 1.5 * sqrt(log1p(exp(z[id]))) / sum, 1e-5);
                if (hash) {
                    assert_int_equal(id, tid2eid[f.call.tokens[r] * k_n + k]);
                    continue;
                }
                for (uint32_t e = 0; e < n; e++) { /* nobody better was left out */
                    bool in = e == ids[r * k_n] || e == ids[r * k_n + 1] || e == ids[r * k_n + 2];
                    assert_true(in || sqrt(log1p(exp(z[e]))) + (double)bias[e] <=
                                          sqrt(log1p(exp(z[id]))) + (double)bias[id] + 1e-6);
                }
            }
            assert_true(hash || (ids[r * k_n] == 2 && ids[r * k_n + 1] == 5));
        }
    }
    mem_free(x);
    mem_free(gate);
    mem_free(bias);
    ops_cpu.close(f.dev);
}

/* One expert on one row, added to y. */
static void expert_row(const float *const *w, const float *x, const struct ops_dims *d,
                       double weight, double *y)
{
    double a[24], b[24], out[72], limit = (double)d->swiglu_limit;
    float h[24];
    product(w[0], x, d->expert_width, d->hidden, a);
    product(w[1], x, d->expert_width, d->hidden, b);
    for (uint32_t i = 0; i < d->expert_width; i++) {
        double gate = fmin(a[i], limit), up = fmax(-limit, fmin(b[i], limit));
        h[i] = (float)(gate * logistic(gate) * up * weight);
    }
    product(w[2], h, d->hidden, d->expert_width, out);
    for (uint32_t i = 0; i < d->hidden; i++) {
        y[i] += out[i];
    }
}

static void test_experts(void **state)
{
    struct fixture f;
    setup(&f, 26);
    const struct ops_dims *d = &f.d;
    float *w[8][3], *x = random_floats(&f.seed, (size_t)ROWS * d->hidden, 1.0f);
    float *y = poisoned((size_t)ROWS * d->hidden), alone[72], weights[ROWS * 3];
    struct ops_expert experts[8];
    uint32_t ids[ROWS * 3];
    for (uint32_t e = 0; e < 8; e++) { /* the eighth is the shared one */
        for (int k = 0; k < 3; k++) {
            w[e][k] = random_floats(&f.seed, (size_t)d->expert_width * d->hidden, 0.3f);
        }
        experts[e].w1 = pack_floats(f.dev, w[e][0], d->expert_width, d->hidden);
        experts[e].w3 = pack_floats(f.dev, w[e][1], d->expert_width, d->hidden);
        experts[e].w2 = pack_floats(f.dev, w[e][2], d->hidden, d->expert_width);
    }
    for (uint32_t i = 0; i < ROWS * 3; i++) {
        ids[i] = (i / 3 + 2 * (i % 3)) % 7;
        weights[i] = 0.2f + 0.1f * (float)below(&f.seed, 9);
    }
    struct ops_layer layer = {.experts = experts, .shared = experts[7]};
    ops_cpu.experts(f.dev, &f.call.rows, &layer, x, ids, weights, y);
    for (uint32_t r = 0; r < ROWS; r++) {
        double want[72] = {0};
        const float *row = x + r * d->hidden;
        for (uint32_t k = 0; k < 3; k++) {
            expert_row((const float *const *)w[ids[r * 3 + k]], row, d, (double)weights[r * 3 + k],
                       want);
        }
        expert_row((const float *const *)w[7], row, d, 1.0, want);
        for (uint32_t i = 0; i < d->hidden; i++) {
            assert_close(y[r * d->hidden + i], want[i], 2e-5);
        }
        struct ops_rows one = just(&f, r);
        ops_cpu.experts(f.dev, &one, &layer, row, ids + r * 3, weights + r * 3, alone);
        assert_memory_equal(alone, y + r * d->hidden, sizeof(alone));
    }
    for (uint32_t e = 0; e < 8; e++) {
        for (int k = 0; k < 3; k++) {
            mem_free(w[e][k]);
        }
    }
    mem_free(x);
    mem_free(y);
    ops_cpu.close(f.dev);
}

static void test_head(void **state)
{
    struct fixture f;
    setup(&f, 27);
    const struct ops_dims *d = &f.d;
    uint32_t n = d->hidden, which[3] = {8, 0, 4};
    float *streams = random_floats(&f.seed, (size_t)ROWS * 4 * n, 1.0f);
    float *fn = random_floats(&f.seed, (size_t)16 * n, 0.1f),
          *norm = random_floats(&f.seed, n, 1.0f);
    float *head = random_floats(&f.seed, (size_t)d->vocab * n, 0.2f);
    float *base = random_floats(&f.seed, 4, 1.0f), scale[1] = {1.3f};
    float *logits = poisoned(3 * ((size_t)d->vocab + 5));
    struct ops_globals globals = {
        .head = pack_floats(f.dev, head, d->vocab, n),
        .norm = norm,
        .hc_head = {.fn = pack_floats(f.dev, fn, 4, 4 * n), .base = base, .scale = scale}};
    ops_cpu.head(f.dev, &globals, streams, which, 3, logits, d->vocab + 5);
    for (uint32_t i = 0; i < 3; i++) {
        const float *x = streams + (size_t)which[i] * 4 * n;
        double m[4], sum = 0.0, h[72] = {0}, y[72], want[50];
        float row[72];
        product(fn, x, 4, 4 * n, m);
        for (uint32_t k = 0; k < 4 * n; k++) {
            sum += (double)x[k] * (double)x[k];
        }
        for (int k = 0; k < 4; k++) {
            double weight =
                logistic(m[k] / sqrt(sum / (4 * n) + 1e-6) * 1.3 + (double)base[k]) + 1e-6;
            for (uint32_t c = 0; c < n; c++) {
                h[c] += weight * (double)x[k * n + c];
            }
        }
        rms_rows(h, norm, n, y);
        for (uint32_t c = 0; c < n; c++) {
            row[c] = (float)y[c];
        }
        product(head, row, d->vocab, n, want);
        for (uint32_t v = 0; v < d->vocab + 5; v++) {
            float got = logits[i * (d->vocab + 5) + v];
            if (v < d->vocab) {
                assert_close(got, want[v], 2e-5);
            } else {
                assert_int_equal(f32_bits(got), 0xffffffff);
            }
        }
    }
    float *all[] = {streams, fn, norm, head, base, logits};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops_cpu.close(f.dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_functions),  cmocka_unit_test(test_mhc_vector),
        cmocka_unit_test(test_mhc_rounds), cmocka_unit_test(test_embed),
        cmocka_unit_test(test_mhc),        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_project),    cmocka_unit_test(test_oproj),
        cmocka_unit_test(test_route),      cmocka_unit_test(test_experts),
        cmocka_unit_test(test_head)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
