/* Synthetic weights that a device fills by itself against the same ones made on the host and
 * packed: every byte of the packed form, for matrices and cuts of them in all formats, on and off
 * the groups of their scales.
 *
 * test_fill [cuda:N]: the fill of the device; without, the same function run here. 77 without it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/fill.h"
#include "kernels/registry.h"
#include "tests/kernels/random.h"
#include "tests/kernels/small.h"

enum { N_CASES = 300, N_FORMS = CUDA_FP4_SCALED + 1 };
static uint64_t seed = 11;
static int n_of_form[N_FORMS];

struct matrix {
    struct ops_source source;
    uint8_t *data, *scale;
};

static uint8_t *bytes_of(const struct made *made, size_t bytes)
{
    uint8_t *data = mem_alloc(bytes + 8);
    for (size_t i = 0; 8 * i < bytes; i++) {
        uint64_t eight = made_eight(made, i);
        memcpy(data + 8 * i, &eight, 8);
    }
    return data;
}

static uint64_t draw64(void)
{
    return (uint64_t)below(&seed, UINT32_MAX) << 32 | below(&seed, UINT32_MAX);
}

/* A part of a matrix, with its bytes as the host makes them. */
static struct matrix draw_matrix(bool big)
{
    static const enum ops_format formats[] = {OPS_BF16, OPS_FP8_BLOCK, OPS_MXFP4};
    enum ops_format format = formats[below(&seed, 3)];
    uint32_t rows = 1 + below(&seed, big ? 3000 : 200), cols = 1 + below(&seed, big ? 3000 : 500);
    cols = format == OPS_MXFP4 || below(&seed, 2) ? (cols + 127) / 128 * 128 : cols;
    uint32_t step = format == OPS_BF16 ? 1 : (below(&seed, 2) ? 128 : 2);
    uint32_t row_first = below(&seed, 2) ? below(&seed, rows) : 0;
    uint32_t col_first = below(&seed, 2) ? below(&seed, (cols + step - 1) / step) * step : 0;
    bool table = format == OPS_BF16 && below(&seed, 4) == 0;
    struct matrix m = {
        .source = {.format = format,
                   .rows = 1 + below(&seed, rows - row_first),
                   .cols = below(&seed, 2) ? cols - col_first : 1 + below(&seed, cols - col_first),
                   .row_first = row_first,
                   .col_first = col_first,
                   .row_bytes = format == OPS_BF16        ? (size_t)cols * 2
                                : format == OPS_FP8_BLOCK ? cols
                                                          : cols / 2,
                   .global_scale = 1.0f,
                   .is_table = table,
                   .made = {.key = draw64(),
                            .exponent = -(int32_t)below(&seed, 8),
                            .kind = format == OPS_BF16        ? MADE_BF16
                                    : format == OPS_FP8_BLOCK ? MADE_E4M3
                                                              : MADE_E2M1}}};
    struct ops_source *s = &m.source;
    s->block_rows = format == OPS_FP8_BLOCK ? 128 : 1;
    s->block_cols = format == OPS_FP8_BLOCK ? 128 : (format == OPS_MXFP4 ? 32 : 1);
    m.data = bytes_of(&s->made, rows * s->row_bytes);
    if (format != OPS_BF16) {
        s->scale_format = OPS_SCALE_E8M0;
        s->made_scale = (struct made){
            .key = draw64(), .exponent = -(int32_t)below(&seed, 9), .kind = MADE_E8M0};
        s->scale_cols = (cols + s->block_cols - 1) / s->block_cols;
        m.scale = bytes_of(&s->made_scale,
                           (size_t)((rows + s->block_rows - 1) / s->block_rows) * s->scale_cols);
    }
    return m;
}

/* The packed image, word by word, as the kernels of fill.cu write it. */
static void fill_here(const struct ops_source *s, uint8_t form, uint8_t *to)
{
    struct fill_sizes n = fill_sizes_of(s, form);
    for (size_t i = 0; i < n.n_elements; i++) {
        uint16_t half =
            bf16_encode(fill_element(s, (uint32_t)(i / s->cols), (uint32_t)(i % s->cols)));
        memcpy(to + 2 * i, &half, 2);
    }
    for (size_t i = 0; i < n.n_words; i++) {
        uint64_t word = fill_word(s, form, i);
        memcpy(to + 8 * i, &word, 8);
    }
    for (size_t i = 0; i < n.n_scales; i++) {
        to[8 * n.n_words + i] = fill_scale(s, form, i);
    }
    if (n.n_words) {
        memcpy(to + 8 * n.n_words + n.n_scales, &s->global_scale, 4);
    }
}

static void fill_there(const struct ops *ops, struct ops_device *dev, const struct ops_source *s,
                       bool scaled, size_t bytes, uint8_t *to)
{
    struct ops_matrix packed;
    struct error err;
    if (scaled ? cuda_pack_scaled(dev, s, &packed) : ops->pack(dev, s, &packed)) {
        printf("no memory on the device\n");
        exit(1);
    }
    ops->read(dev, to, packed.data, bytes);
    if (ops->wait(dev, &err)) {
        printf("%s\n", err.text);
        exit(1);
    }
}

static bool run_case(uint32_t i, const struct ops *ops, struct ops_device *dev)
{
    struct matrix m = draw_matrix(ops && i % 20 == 19);
    struct ops_source *s = &m.source;
    uint8_t form;
    s->data = m.data;
    s->scale = m.scale;
    const bool scaled = i % 2;
    size_t bytes = cuda_matrix_bytes(s, scaled, &form);
    uint8_t *want = mem_alloc(bytes), *got = mem_alloc(bytes);
    cuda_matrix_pack(s, form, want);
    memset(got, 0xa5, bytes);
    s->data = s->scale = NULL;
    if (ops) {
        fill_there(ops, dev, s, scaled, bytes, got);
    } else {
        fill_here(s, form, got);
    }
    n_of_form[form]++;
    size_t at = 0;
    while (at < bytes && got[at] == want[at]) {
        at++;
    }
    if (at < bytes) {
        printf("case %u, format %d form %d, %u x %u from (%u, %u): byte %zu of %zu is %02x, should "
               "be %02x\n",
               i, s->format, form, s->rows, s->cols, s->row_first, s->col_first, at, bytes, got[at],
               want[at]);
    }
    mem_free(want);
    mem_free(got);
    mem_free(m.data);
    mem_free(m.scale);
    return at == bytes;
}

int main(int argc, char **argv)
{
    struct registry_choice choice;
    struct error err = {""};
    struct ops_device *dev = NULL;
    const struct ops *ops = NULL;
    int n_wrong = 0;
    if (argc > 1) {
        const struct ops_dims dims = small_dims(64);
        const struct ops_limits limits = {.n_rows = 4, .n_tokens = 16};
        if (registry_find(argv[1], &choice, &err)) {
            printf("skipped: %s\n", err.text);
            return 77;
        }
        ops = choice.ops;
        if (!ops->makes || ops->open(&dims, &limits, &dev, &err)) {
            printf("%s makes no weights: %s\n", argv[1], err.text);
            return 1;
        }
    }
    for (uint32_t i = 0; i < N_CASES; i++) {
        n_wrong += !run_case(i, ops, dev);
    }
    if (ops) {
        ops->close(dev);
    }
    static const uint8_t forms[] = {CUDA_BF16, CUDA_FP8, CUDA_FP4_E8M0, CUDA_TABLE_BF16,
                                    CUDA_FP4_SCALED};
    for (size_t i = 0; i < sizeof(forms); i++) {
        if (n_of_form[forms[i]] < 10) {
            printf("form %u came only %d times\n", forms[i], n_of_form[forms[i]]);
            n_wrong++;
        }
    }
    printf("%d matrices, %d wrong\n", N_CASES, n_wrong);
    return n_wrong ? 1 : 0;
}
