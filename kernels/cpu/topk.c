/* Index scores of every visible entry, and the best of them.
 *
 * Only the set matters to attention; it is given in ascending order so that the sums over it have
 * one order. Scores that are equal are common (with few heads every ReLU may be 0): the lowest
 * index wins.
 */
#include <string.h>

#include "kernels/cpu/cpu.h"

/* A word that orders as the float does. */
static uint32_t sortable(float x)
{
    uint32_t u = f32_bits(x + 0.0f); /* -0 becomes 0: they tie */
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

void cpu_topk_select(const float *scores, uint32_t n, uint32_t k, uint32_t *keys,
                     uint32_t *ret_index)
{
    for (uint32_t i = 0; i < n; i++) {
        keys[i] = sortable(scores[i]);
    }
    /* The k-th largest word, a byte at a time from the top. */
    uint32_t prefix = 0, mask = 0, wanted = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t count[256] = {0};
        for (uint32_t i = 0; i < n; i++) {
            if ((keys[i] & mask) == prefix) {
                count[keys[i] >> shift & 255]++;
            }
        }
        uint32_t byte = 255;
        while (count[byte] < wanted) {
            wanted -= count[byte--];
        }
        prefix |= byte << shift;
        mask |= 255u << shift;
    }
    /* Everything above it, and the first `wanted` that equal it. */
    uint32_t m = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (keys[i] > prefix || (keys[i] == prefix && wanted && wanted--)) {
            ret_index[m++] = i;
        }
    }
}

struct topk_run {
    struct ops_device *dev;
    const struct ops_rows *rows;
    const struct ops_layer *layer;
    const struct ops_kv *kv;
    const float *iq, *iw;
    struct ops_selection *selection;
};

static void score_row(const struct topk_run *run, uint32_t r, uint32_t n, float *key, float *scores)
{
    const struct ops_dims *d = &run->dev->d;
    const struct ops_seq *seq = &run->rows->seqs[run->rows->seq_of[r]];
    const float *q = run->iq + (size_t)r * d->index_heads * d->index_dim;
    const float *w = run->iw + (size_t)r * d->index_heads;
    for (uint32_t j = 0; j < n; j++) {
        uint8_t *body, *scales;
        cpu_page_entry(d, run->kv, &run->layer->place, seq->pages, j, true, &body, &scales);
        cpu_key_load(d, body, scales, key);
        float sum = 0.0f;
        for (uint32_t h = 0; h < d->index_heads; h++) {
            float dot = cpu_dot_inline(q + (size_t)h * d->index_dim, key, d->index_dim);
            if (d->exact) {
                sum += (dot > 0.0f ? dot : 0.0f) * w[h];
            } else {
                dot = bf16_round(dot);
                sum += bf16_round((dot > 0.0f ? dot : 0.0f) * w[h]);
            }
        }
        scores[j] = d->exact ? sum : bf16_round(sum);
    }
}

static void topk_row(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct topk_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    struct cpu_scratch *scratch = &run->dev->scratch[thread_i];
    uint32_t n = (run->rows->positions[r] + 1) / OPS_SPARSE_RATIO;
    uint32_t *index = run->selection->index + (size_t)r * d->index_topk;
    if (n <= d->index_topk) {
        for (uint32_t j = 0; j < n; j++) {
            index[j] = j;
        }
        run->selection->n[r] = n;
        return;
    }
    score_row(run, r, n, scratch->row, scratch->scores);
    cpu_topk_select(scratch->scores, n, d->index_topk, scratch->keys, index);
    run->selection->n[r] = d->index_topk;
}

void cpu_topk(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
              const float *iq, const float *iw, const struct ops_kv *kv,
              struct ops_selection *ret_selection)
{
    struct topk_run run = {dev, rows, layer, kv, iq, iw, ret_selection};
    uint64_t work = 0;
    for (uint32_t r = 0; r < rows->n_rows; r++) {
        work +=
            (uint64_t)rows->positions[r] / OPS_SPARSE_RATIO * dev->d.index_dim * dev->d.index_heads;
    }
    cpu_threads_run(dev->threads, rows->n_rows, work, topk_row, &run);
}
