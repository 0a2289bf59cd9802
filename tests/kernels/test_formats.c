/* Number formats, the quantisers on them, and the stored forms of entries and keys. */
#include "util.h"

/* Nearest of `n` ascending values, ties to the even index. */
static uint32_t nearest(const double *values, uint32_t n, double x)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        double a = fabs(values[i] - x), b = fabs(values[best] - x);
        if (a < b || (a == b && i % 2 == 0)) {
            best = i;
        }
    }
    return best;
}

static void test_e4m3(void **state)
{
    double values[127];
    for (uint32_t i = 0; i < 127; i++) {
        uint32_t e = i >> 3, m = i & 7;
        values[i] = e ? ldexp(8 + m, (int)e - 10) : ldexp(m, -9);
        assert_true((double)e4m3_decode((uint8_t)i) == values[i]);
        assert_true((double)e4m3_decode((uint8_t)(i | 128)) == -values[i]);
        assert_int_equal(e4m3_encode((float)values[i]), i);
        assert_int_equal(e4m3_encode(-(float)values[i]), i | 128);
    }
    assert_true(isnan(e4m3_decode(0x7f)) && isnan(e4m3_decode(0xff)));
    uint64_t seed = 1;
    for (int i = 0; i < 50000; i++) {
        double x =
            ldexp(1.0 + (double)(next_random(&seed) >> 11) * 0x1p-53, (int)below(&seed, 22) - 13);
        x = (double)(float)(x > 448.0 ? 448.0 : x);
        uint32_t want = nearest(values, 127, x);
        assert_int_equal(e4m3_encode((float)x), want);
        assert_true((double)e4m3_round(-(float)x) == -values[want]);
    }
    for (uint32_t i = 0; i + 1 < 127; i++) { /* exact ties */
        float tie = (float)((values[i] + values[i + 1]) / 2);
        assert_int_equal(e4m3_encode(tie), i % 2 ? i + 1 : i);
        float row[1] = {tie}, out[1];
        cpu_quant8(row, 1, 1, out); /* scales differ, but the value stays within half a step */
        assert_true(fabsf(out[0] - tie) <= tie / 16 + 1e-7f);
    }
}

static void test_e2m1(void **state)
{
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    static const float ties[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    static const float to[7] = {0, 1, 1, 2, 2, 4, 4};
    for (uint32_t i = 0; i < 7; i++) {
        assert_true(e2m1_decode(e2m1_encode(ties[i])) == to[i]);
        assert_true(e2m1_decode(e2m1_encode(-ties[i])) == -to[i]);
    }
    uint64_t seed = 2;
    for (int i = 0; i < 20000; i++) {
        float x = (float)((double)(next_random(&seed) >> 11) * 0x1p-53 * 6.0);
        assert_int_equal(e2m1_encode(x), nearest(values, 8, (double)x));
    }
    for (uint32_t i = 0; i < 8; i++) {
        assert_true((double)e2m1_decode((uint8_t)i) == values[i]);
        assert_int_equal(e2m1_encode((float)values[i]), i);
    }
}

static void test_scales(void **state)
{
    /* Every normal bfloat16 from 1e-4 on: the exponent is exactly ceil(log2(amax / 448)). */
    uint32_t n = 0;
    for (uint32_t u = 0x0080; u < 0x7f80; u++) {
        float amax = bf16_decode((uint16_t)u);
        if (amax < 1e-4f) {
            continue;
        }
        n++;
        int e;
        double m = frexp((double)amax / 448.0, &e);
        assert_int_equal(e8m0_scale_for(amax, 1.0f / 448.0f), (m > 0.5 ? e : e - 1) + 127);
        m = frexp((double)amax / 6.0, &e);
        assert_int_equal(e8m0_scale_for(amax, 1.0f / 6.0f), (m > 0.5 ? e : e - 1) + 127);
    }
    assert_true(n > 15000);
    for (int b = 1; b < 255; b++) {
        assert_true(e8m0_decode((uint8_t)b) == ldexpf(1.0f, b - 127));
    }
    assert_true(e8m0_decode(0) == ldexpf(1.0f, -127));
    assert_true(bf16_round(1.00390625f) == 1.0f && bf16_round(1.01171875f) == 1.015625f);
}

static void test_quant8(void **state)
{
    uint64_t seed = 3;
    float x[300], y[300];
    for (int round = 0; round < 200; round++) {
        for (int i = 0; i < 300; i++) {
            x[i] = bf16_round(normal(&seed) * ldexpf(1.0f, (int)below(&seed, 24) - 16));
        }
        memset(y, 0xff, sizeof(y));
        cpu_quant8(x, 300, 128, y);
        for (uint32_t i = 0; i < 300; i++) {
            double amax = 1e-4;
            for (uint32_t k = i / 128 * 128; k < 300 && k < i / 128 * 128 + 128; k++) {
                amax = fmax(amax, fabs((double)x[k]));
            }
            double scale = exp2(ceil(log2(amax / 448.0)));
            double want = (double)e4m3_decode(e4m3_encode((float)((double)x[i] / scale))) * scale;
            assert_true((double)y[i] == want);
        }
    }
}

static void test_hadamard(void **state)
{
    uint64_t seed = 4;
    for (uint32_t n = 16; n <= 128; n *= 2) {
        float *x = random_floats(&seed, n, 1.0f), y[128];
        memcpy(y, x, n * sizeof(float));
        cpu_hadamard(y, n);
        for (uint32_t a = 0; a < n; a++) {
            double want = 0.0;
            for (uint32_t b = 0; b < n; b++) {
                want += (__builtin_popcount(a & b) & 1 ? -1.0 : 1.0) * (double)x[b];
            }
            assert_close(y[a], want / sqrt(n), 1e-6);
        }
        mem_free(x);
    }
}

/* What is stored comes back bit for bit, of whatever went through the quantiser before. */
static void test_stored_forms(void **state)
{
    struct ops_dims d = small_dims(false);
    uint64_t seed = 5;
    d.head_dim = 512;
    d.index_dim = 128;
    float x[512], y[512];
    uint8_t body[576 + 8], scales[8 + 8], key[64 + 8], key_scales[4 + 4];
    for (int round = 0; round < 500; round++) {
        for (int i = 0; i < 512; i++) {
            x[i] = bf16_round(normal(&seed) * ldexpf(1.0f, (int)below(&seed, 30) - 20));
        }
        memset(body, 0xa5, sizeof(body));
        memset(scales, 0xa5, sizeof(scales));
        cpu_quant8(x, 448, 64, x);
        cpu_entry_store(&d, x, body, scales);
        memset(y, 0xff, sizeof(y));
        cpu_entry_load(&d, body, scales, y);
        assert_memory_equal(x, y, sizeof(x));
        assert_int_equal(scales[7], 0);
        assert_int_equal(body[576], 0xa5);
        assert_int_equal(scales[8], 0xa5);
        cpu_quant4(x, 128);
        memset(key, 0xa5, sizeof(key));
        memset(key_scales, 0xa5, sizeof(key_scales));
        cpu_key_store(&d, x, key, key_scales);
        cpu_key_load(&d, key, key_scales, y);
        assert_memory_equal(x, y, 128 * sizeof(float));
        assert_int_equal(key[64], 0xa5);
        assert_int_equal(key_scales[4], 0xa5);
    }
}

static void test_sizes(void **state)
{
    assert_int_equal(formats_entry_bytes(FORMATS_ENTRY_PACKED, 512, 64), 576);
    assert_int_equal(formats_entry_scale_bytes(FORMATS_ENTRY_PACKED, 512, 64), 8);
    assert_int_equal(formats_key_bytes(FORMATS_ENTRY_PACKED, 128), 64);
    assert_int_equal(formats_key_scale_bytes(FORMATS_ENTRY_PACKED, 128), 4);
    assert_int_equal(formats_entry_bytes(FORMATS_ENTRY_F32, 40, 8), 160);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3),     cmocka_unit_test(test_e2m1),
        cmocka_unit_test(test_scales),   cmocka_unit_test(test_quant8),
        cmocka_unit_test(test_hadamard), cmocka_unit_test(test_stored_forms),
        cmocka_unit_test(test_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
