/* The hand-off's checksum: against a plain reading of its formula, and for what it must notice. */
#include "kernels/parcel.h"

#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

static uint64_t plain_mix(uint64_t z)
{
    z ^= z >> 30;
    z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 27;
    z *= 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The formula of the header, word by word. */
static uint64_t plain_digest(const struct parcel_key *k, const uint8_t *data, size_t bytes)
{
    uint64_t lane[2] = {0, 0};
    for (uint64_t i = 0; i < bytes / 8; i++) {
        const uint8_t *p = data + 8 * i;
        uint32_t lo = p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        uint32_t hi = p[4] | (uint32_t)p[5] << 8 | (uint32_t)p[6] << 16 | (uint32_t)p[7] << 24;
        for (int j = 0; j < 2; j++) {
            uint32_t x = (uint32_t)(lo + k->a[j] + k->b[j] * i),
                     y = (uint32_t)(hi + k->c[j] + k->d[j] * i);
            lane[j] += (uint64_t)x * y;
        }
    }
    uint64_t h = plain_mix(lane[1]);
    return plain_mix(lane[0] ^ bytes) + (h << 32 | h >> 32);
}

static uint64_t digest_of(const struct parcel_key *key, const void *data, size_t bytes)
{
    struct parcel_sum sum = {{0, 0}};
    parcel_copy_sum(key, &sum, NULL, data, bytes, 0);
    return parcel_digest(&sum, bytes);
}

static uint8_t *random_bytes(size_t bytes, unsigned seed)
{
    uint8_t *data = malloc(bytes + 8);
    srandom(seed);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)random();
    }
    return data;
}

static void test_formula(void **state)
{
    struct parcel_key key;
    for (unsigned round = 0; round < 40; round++) {
        size_t bytes = 8 * (size_t)(1 + round * round * 7);
        uint8_t *data = random_bytes(bytes, 100 + round);
        parcel_key_make(&key, 0x1111111111111111u * round, round);
        assert_int_equal(digest_of(&key, data, bytes), plain_digest(&key, data, bytes));
        free(data);
    }
}

/* Cut anywhere into pieces, in any order, copied or not: one value. */
static void test_pieces(void **state)
{
    enum { BYTES = 901120 };
    struct parcel_key key;
    uint8_t *data = random_bytes(BYTES, 5), *copy = malloc(BYTES);
    parcel_key_make(&key, 42, 3);
    uint64_t want = plain_digest(&key, data, BYTES);
    for (unsigned round = 0; round < 20; round++) {
        srandom(round);
        size_t cut = 8 * (size_t)(random() % (BYTES / 8));
        struct parcel_sum sum = {{0, 0}};
        memset(copy, 0xa5, BYTES);
        parcel_copy_sum(&key, &sum, copy + cut, data + cut, BYTES - cut, cut / 8);
        parcel_copy_sum(&key, &sum, copy, data, cut, 0);
        assert_int_equal(parcel_digest(&sum, BYTES), want);
        assert_memory_equal(copy, data, BYTES);
    }
    free(copy);
    free(data);
}

static void test_notices(void **state)
{
    enum { BYTES = 4096 };
    struct parcel_key key, other;
    static uint8_t bad[BYTES];
    uint8_t *data = random_bytes(BYTES, 6);
    parcel_key_make(&key, 42, 3);
    uint64_t good = digest_of(&key, data, BYTES);
    for (unsigned i = 0; i < 500; i++) {
        memcpy(bad, data, BYTES);
        bad[(i * 37) % BYTES] ^= (uint8_t)(1u << (i % 8));
        assert_int_not_equal(digest_of(&key, bad, BYTES), good);
    }
    memcpy(bad, data, BYTES);
    memcpy(bad, data + 2048, 2048);
    memcpy(bad + 2048, data, 2048);
    assert_int_not_equal(digest_of(&key, bad, BYTES), good);
    assert_int_not_equal(digest_of(&key, data, BYTES - 8), good);
    parcel_key_make(&other, 43, 3);
    assert_int_not_equal(digest_of(&other, data, BYTES), good);
    parcel_key_make(&other, 42, 4);
    assert_int_not_equal(digest_of(&other, data, BYTES), good);
    memset(bad, 0, BYTES);
    uint64_t zeros = digest_of(&key, bad, BYTES);
    assert_int_not_equal(zeros, digest_of(&key, bad, BYTES - 8));
    assert_int_not_equal(zeros, 0);
    free(data);
}

/* Frozen values: a digest is on the wire, so a change here is a new protocol version. */
static void test_vectors(void **state)
{
    struct parcel_key key;
    uint8_t data[64];
    for (unsigned i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)(i * 11 + 3);
    }
    parcel_key_make(&key, 0x0123456789abcdefu, 7);
    assert_int_equal(digest_of(&key, data, 8), 0x3126bdffabca4e3du);
    assert_int_equal(digest_of(&key, data, 64), 0xbd65a769db984eb8u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formula),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_notices),
        cmocka_unit_test(test_vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
