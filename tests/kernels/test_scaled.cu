/* Products of elements with scales (arch_mma_mx8, arch_mma_mx4) from fragments: the instructions on
 * sm_120a, what stands for them elsewhere, and that by shuffles in any case, against sums in
 * double.
 *
 * Which lane holds what is written here once more, from the matrices' side: an element (row, k)
 * asks for its lane, word and bits. Lanes and bytes that no selector names hold noise, NaN among
 * it. Matrices: any codes; scales close together, at both ends (2^-127, 2^127), NaN; elements that
 * are NaN: where they are and nowhere else the result must be.
 *
 * test_scaled [cuda:N]. 77 without a GPU.
 */
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/arch.cuh"
#include "tests/kernels/random.h"

namespace
{

enum { LANES = 32, ROWS = 16, COLUMNS = 8, MOST_K = 64, CASES = 48 };
enum kind { MX8_E4M3, MX8_E2M1, MX4 };

struct fragments {
    uint32_t a[4][LANES], b[2][LANES], scale_a[LANES], scale_b[LANES];
    float c[4][LANES], d[2][4][LANES]; /* d: as it is here, and by shuffles */
};

struct matrices {
    uint8_t a[ROWS][MOST_K], b[MOST_K][COLUMNS], scale_a[ROWS][2], scale_b[COLUMNS][2];
    float c[ROWS][COLUMNS];
};

struct selectors {
    unsigned byte_a, thread_a, byte_b, thread_b;
};

template <int KIND, int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
__global__ void __launch_bounds__(LANES) scaled_kernel(fragments *all)
{
    fragments *f = all + blockIdx.x;
    const uint32_t lane = threadIdx.x;
    const uint32_t a[4] = {f->a[0][lane], f->a[1][lane], f->a[2][lane], f->a[3][lane]};
    const uint32_t b[2] = {f->b[0][lane], f->b[1][lane]};
    float here[4], shuffled[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        here[i] = shuffled[i] = f->c[i][lane];
    }
    if constexpr (KIND == MX4) {
        arch_mma_mx4<BYTE_A, THREAD_A, BYTE_B, THREAD_B>(here, a, b, f->scale_a[lane],
                                                         f->scale_b[lane]);
    } else {
        arch_mma_mx8<KIND == MX8_E2M1 ? ARCH_E2M1 : ARCH_E4M3, BYTE_A, THREAD_A, BYTE_B, THREAD_B>(
            here, a, b, f->scale_a[lane], f->scale_b[lane]);
    }
    arch_scaled_by_shuffles<KIND == MX8_E4M3 ? ARCH_E4M3 : ARCH_E2M1, KIND == MX4, BYTE_A, THREAD_A,
                            BYTE_B, THREAD_B>(shuffled, a, b, f->scale_a[lane], f->scale_b[lane]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f->d[0][i][lane] = here[i];
        f->d[1][i][lane] = shuffled[i];
    }
}

uint64_t seed = 20261201;
int n_wrong, n_values, n_nan;
double worst[2];

uint8_t byte()
{
    return (uint8_t)next_random(&seed);
}

unsigned depth_of(enum kind kind)
{
    return kind == MX4 ? 64 : 32;
}

uint8_t scale_of(unsigned how)
{
    switch (how) {
    case 0:
        return (uint8_t)(120 + below(&seed, 15));
    case 1:
        return (uint8_t)(below(&seed, 2) ? below(&seed, 3) : 252 + below(&seed, 3));
    default:
        return below(&seed, 8) ? (uint8_t)(120 + below(&seed, 15)) : 255;
    }
}

/* `how`: 0 and 3 plain, 1 with scales at the ends, 2 with NaN among scales and elements. */
void draw(enum kind kind, unsigned how, matrices *m)
{
    memset(m, 0, sizeof(*m));
    const bool is_e2m1 = kind != MX8_E4M3;
    for (unsigned k = 0; k < depth_of(kind); k++) {
        for (unsigned r = 0; r < ROWS; r++) {
            uint8_t code = is_e2m1 ? byte() & 15 : byte();
            m->a[r][k] = !is_e2m1 && (code & 0x7f) == 0x7f && (how != 2 || r % 3) ? 0x7e : code;
        }
        for (unsigned c = 0; c < COLUMNS; c++) {
            uint8_t code = kind == MX4 ? byte() & 15 : byte();
            m->b[k][c] = kind != MX4 && (code & 0x7f) == 0x7f && (how != 2 || c % 3) ? 0 : code;
        }
    }
    for (unsigned i = 0; i < 2; i++) {
        for (unsigned r = 0; r < ROWS; r++) {
            m->scale_a[r][i] = scale_of(how % 3);
        }
        for (unsigned c = 0; c < COLUMNS; c++) {
            m->scale_b[c][i] = how % 3 == 1 ? (uint8_t)(254 - m->scale_a[c][i]) : scale_of(how % 3);
        }
    }
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned c = 0; c < COLUMNS; c++) {
            m->c[r][c] = how == 3 ? 0.0f : (float)((int)below(&seed, 2001) - 1000) * 0.37f;
        }
    }
}

void put(uint32_t *word, unsigned bit, unsigned bits, uint32_t value)
{
    const uint32_t mask = ((1u << bits) - 1) << bit;
    *word = (*word & ~mask) | value << bit;
}

void place(enum kind kind, const selectors &s, const matrices &m, fragments *f)
{
    const unsigned bits = kind == MX4 ? 4 : 8, n = 32 / bits, depth = depth_of(kind);
    memset(f, 0, sizeof(*f));
    for (unsigned l = 0; l < LANES; l++) {
        f->scale_a[l] = (uint32_t)next_random(&seed);
        f->scale_b[l] = (uint32_t)next_random(&seed) | 0xff000000u;
    }
    for (unsigned k = 0; k < depth; k++) {
        const unsigned of_half = k % (depth / 2), second = k >= depth / 2;
        for (unsigned r = 0; r < ROWS; r++) {
            const uint32_t code = kind == MX8_E2M1 ? m.a[r][k] << 2 : m.a[r][k];
            put(&f->a[2 * second + (r >= 8)][r % 8 * 4 + of_half / n], of_half % n * bits, bits,
                code);
        }
        for (unsigned c = 0; c < COLUMNS; c++) {
            put(&f->b[second][c * 4 + of_half / n], of_half % n * bits, bits, m.b[k][c]);
        }
    }
    for (unsigned i = 0; i < (kind == MX4 ? 2 : 1); i++) {
        for (unsigned r = 0; r < ROWS; r++) {
            put(&f->scale_a[r % 8 * 4 + 2 * s.thread_a + r / 8], 8 * (s.byte_a + i), 8,
                m.scale_a[r][i]);
        }
        for (unsigned c = 0; c < COLUMNS; c++) {
            put(&f->scale_b[c * 4 + s.thread_b], 8 * (s.byte_b + i), 8, m.scale_b[c][i]);
        }
    }
    for (unsigned r = 0; r < ROWS; r++) {
        for (unsigned c = 0; c < COLUMNS; c++) {
            f->c[r / 8 * 2 + c % 2][r % 8 * 4 + c / 2] = m.c[r][c];
        }
    }
}

double power_of(uint8_t code)
{
    return code == 255 ? (double)NAN : ldexp(1.0, (int)code - 127);
}

double e4m3(uint8_t code)
{
    const int e = code >> 3 & 15, bits = code & 7;
    if ((code & 0x7f) == 0x7f) {
        return (double)NAN;
    }
    const double size = e ? ldexp(8.0 + bits, e - 10) : ldexp((double)bits, -9);
    return code & 0x80 ? -size : size;
}

double e2m1(uint8_t code)
{
    static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

void compare(enum kind kind, const matrices &m, const fragments &f)
{
    const unsigned depth = depth_of(kind);
    for (unsigned i = 0; i < ROWS * COLUMNS; i++) {
        const unsigned r = i / COLUMNS, c = i % COLUMNS;
        double want = (double)m.c[r][c], sizes = fabs(want);
        for (unsigned k = 0; k < depth; k++) {
            const unsigned scale = kind == MX4 ? k / 32 : 0;
            const double p = (kind == MX8_E4M3 ? e4m3(m.a[r][k]) : e2m1(m.a[r][k])) *
                             (kind == MX4 ? e2m1(m.b[k][c]) : e4m3(m.b[k][c])) *
                             power_of(m.scale_a[r][scale]) * power_of(m.scale_b[c][scale]);
            want += p;
            sizes += fabs(p);
        }
        for (int which = 0; which < 2; which++) {
            const float got = f.d[which][r / 8 * 2 + c % 2][r % 8 * 4 + c / 2];
            const double off = fabs((double)got - want);
            n_values++;
            n_nan += which == 0 && isnan(want);
            const bool right = isnan(want)          ? isnan(got)
                               : isinf((float)want) ? (float)want == got
                                                    : off <= sizes * 0x1p-22 + 0x1p-140;
            if (!isnan(want) && !isinf((float)want) && sizes > 0x1p-100 &&
                off / sizes > worst[which]) {
                worst[which] = off / sizes;
            }
            if (!right && n_wrong++ < 20) {
                printf("WRONG kind %d, %s, (%u, %u): %.9g, should be %.9g\n", kind,
                       which ? "by shuffles" : "here", r, c, (double)got, want);
            }
        }
    }
}

void ok(cudaError_t code)
{
    if (code != cudaSuccess) {
        printf("%s\n", cudaGetErrorString(code));
        exit(1);
    }
}

template <int KIND, int BYTE_A, int THREAD_A, int BYTE_B, int THREAD_B>
void check(matrices *m, fragments *f, fragments *there)
{
    const selectors s = {BYTE_A, THREAD_A, BYTE_B, THREAD_B};
    const enum kind kind = (enum kind)KIND;
    for (unsigned i = 0; i < CASES; i++) {
        draw(kind, i % 4, &m[i]);
        place(kind, s, m[i], &f[i]);
    }
    ok(cudaMemcpy(there, f, CASES * sizeof(*f), cudaMemcpyHostToDevice));
    scaled_kernel<KIND, BYTE_A, THREAD_A, BYTE_B, THREAD_B><<<CASES, LANES>>>(there);
    ok(cudaGetLastError());
    ok(cudaMemcpy(f, there, CASES * sizeof(*f), cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < CASES; i++) {
        compare(kind, m[i], f[i]);
    }
}

} /* namespace */

int main(int argc, char **argv)
{
    int n_devices = 0;
    const int which = argc > 1 && strncmp(argv[1], "cuda:", 5) == 0 ? atoi(argv[1] + 5) : 0;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || which >= n_devices) {
        printf("skipped: no GPU %d\n", which);
        return 77;
    }
    ok(cudaSetDevice(which));
    matrices *m = static_cast<matrices *>(calloc(CASES, sizeof(matrices)));
    fragments *f = static_cast<fragments *>(calloc(CASES, sizeof(fragments)));
    void *there;
    ok(cudaMalloc(&there, CASES * sizeof(fragments)));
    fragments *on_card = static_cast<fragments *>(there);
    check<MX8_E4M3, 0, 0, 0, 0>(m, f, on_card);
    check<MX8_E4M3, 3, 1, 1, 3>(m, f, on_card);
    check<MX8_E4M3, 2, 0, 3, 2>(m, f, on_card);
    check<MX8_E2M1, 0, 0, 0, 0>(m, f, on_card);
    check<MX8_E2M1, 1, 1, 2, 1>(m, f, on_card);
    check<MX8_E2M1, 2, 1, 0, 0>(m, f, on_card);
    check<MX8_E2M1, 3, 0, 3, 3>(m, f, on_card);
    check<MX4, 0, 0, 0, 0>(m, f, on_card);
    check<MX4, 2, 1, 0, 3>(m, f, on_card);
    check<MX4, 0, 1, 2, 1>(m, f, on_card);
    check<MX4, 2, 0, 2, 2>(m, f, on_card);
    for (int i = 0; i < 2; i++) {
        printf("%s: worst 2^%.1f of the sizes\n", i ? "by shuffles" : "here",
               worst[i] > 0 ? log2(worst[i]) : -99.0);
    }
    printf("%d values, %d of them NaN, %d wrong\n", n_values, n_nan, n_wrong);
    ok(cudaFree(there));
    free(m);
    free(f);
    return n_wrong || n_nan < 100 || n_nan > n_values / 4 ? 1 : 0;
}
