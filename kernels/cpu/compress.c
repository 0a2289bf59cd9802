/* Tokens to cache entries (or index keys), with the state that lives between calls.
 *
 * Sparse layers keep raw rows (K, S) in a ring of 16 and pool eight slots whenever four tokens are
 * complete. Heavy layers keep, for each channel, the online triple (m, z, a) and fold each token in
 * by itself, in order: how a prompt is cut can't show. Channels are independent until the norm, so
 * threads share the channels first and the finished entries afterwards.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

enum { CHANNEL_GROUP = 64 };

struct compress_run {
    struct ops_device *dev;
    const struct ops_rows *rows;
    const struct ops_layer *layer;
    const struct ops_compressor *c;
    const struct ops_kv *kv;
    bool index;
    uint32_t d, width; /* of an entry; of a row of K: d or 2 d */
    float *k, *s;      /* [T, width]; a completed entry's sums replace K of its last token */
};

/* The state of `seq` in this layer. */
static float *state_of(const struct compress_run *run, const struct ops_seq *seq)
{
    const struct ops_place *p = &run->layer->place;
    return (float *)(void *)(run->kv->states + (uint64_t)seq->slot * run->kv->state_bytes +
                             (run->index ? p->index_state : p->state));
}

/* Softmax over the eight slots of entry j, weighted sum, channels [ch0, ch1). */
static void pool_slots(const float *ring, uint32_t d, uint32_t last, uint32_t ch0, uint32_t ch1,
                       float *ret)
{
    size_t row = 4 * (size_t)d;
    const float *slot[8];
    for (uint32_t i = 0; i < 8; i++) {
        /* last - 7 + i, which for the first entry goes below zero: unsigned arithmetic lands on
         * ring rows that still are as at the start, K 0 and S -inf. */
        slot[i] = ring + (last - 7 + i) % OPS_STATE_RING * row + (i < 4 ? 0 : d);
    }
    for (uint32_t ch = ch0; ch < ch1; ch++) {
        float most = -INFINITY, sum = 0.0f, e[8], pooled = 0.0f;
        for (int i = 0; i < 8; i++) {
            float s = slot[i][2 * (size_t)d + ch];
            most = s > most ? s : most;
        }
        for (int i = 0; i < 8; i++) {
            e[i] = cpu_exp(slot[i][2 * (size_t)d + ch] - most);
            sum += e[i];
        }
        for (int i = 0; i < 8; i++) {
            pooled += slot[i][ch] * (e[i] / sum);
        }
        ret[ch] = pooled;
    }
}

static void sparse_channels(struct compress_run *run, const struct ops_seq *seq, uint32_t ch0,
                            uint32_t ch1)
{
    uint32_t d = run->d;
    float *ring = state_of(run, seq);
    for (uint32_t i = 0; i < seq->n_rows; i++) {
        uint32_t position = seq->position + i;
        size_t at = (size_t)(seq->first_row + i) * run->width;
        float *to = ring + position % OPS_STATE_RING * 4 * (size_t)d;
        const float *ape = run->c->ape + position % OPS_SPARSE_RATIO * 2 * (size_t)d;
        for (int half = 0; half < 2; half++) {
            for (uint32_t ch = ch0 + half * d; ch < ch1 + half * d; ch++) {
                to[ch] = run->k[at + ch];
                to[2 * (size_t)d + ch] = run->s[at + ch] + ape[ch];
            }
        }
        if (position % OPS_SPARSE_RATIO == OPS_SPARSE_RATIO - 1) {
            pool_slots(ring, d, position, ch0, ch1, run->k + at);
        }
    }
}

static void heavy_channels(struct compress_run *run, const struct ops_seq *seq, uint32_t ch0,
                           uint32_t ch1)
{
    uint32_t d = run->d, ratio = run->layer->place.ratio;
    float *m = state_of(run, seq), *z = m + d, *a = z + d;
    for (uint32_t i = 0; i < seq->n_rows; i++) {
        uint32_t position = seq->position + i;
        float *k = run->k + (size_t)(seq->first_row + i) * d;
        const float *s = run->s + (size_t)(seq->first_row + i) * d;
        const float *ape = run->c->ape + position % ratio * (size_t)d;
        bool last = position % ratio == ratio - 1;
        for (uint32_t ch = ch0; ch < ch1; ch++) {
            float score = s[ch] + ape[ch], most = score > m[ch] ? score : m[ch];
            float keep = cpu_exp(m[ch] - most), add = cpu_exp(score - most);
            z[ch] = z[ch] * keep + add;
            a[ch] = a[ch] * keep + k[ch] * add;
            m[ch] = most;
            if (last) {
                k[ch] = a[ch] / z[ch];
                m[ch] = -INFINITY;
                z[ch] = a[ch] = 0.0f;
            }
        }
    }
}

static void channels_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    struct compress_run *run = cookie;
    uint32_t n_groups = (run->d + CHANNEL_GROUP - 1) / CHANNEL_GROUP;
    const struct ops_seq *seq = &run->rows->seqs[item / n_groups];
    uint32_t ch0 = item % n_groups * CHANNEL_GROUP;
    uint32_t ch1 = run->d - ch0 < CHANNEL_GROUP ? run->d : ch0 + CHANNEL_GROUP;
    if (seq->slot == OPS_NO_SLOT) {
        return;
    }
    if (run->layer->place.ratio == OPS_SPARSE_RATIO) {
        sparse_channels(run, seq, ch0, ch1);
    } else {
        heavy_channels(run, seq, ch0, ch1);
    }
}

/* The entry that row r completes, if any: norm, rotation at its first token, quantiser, page. */
static void entry_item(void *cookie, uint32_t r, uint32_t thread_i)
{
    struct compress_run *run = cookie;
    const struct ops_dims *dims = &run->dev->d;
    uint32_t ratio = run->layer->place.ratio, position = run->rows->positions[r], d = run->d;
    if (position % ratio != ratio - 1) {
        return;
    }
    bool round = !dims->exact;
    float *e = run->k + (size_t)r * run->width;
    if (round) {
        cpu_round_row(e, d);
    }
    cpu_rms_norm(e, run->c->norm, d, dims->rms_eps, round, e);
    float *table = run->dev->scratch[thread_i].row;
    cpu_rope_table(run->dev->freqs[1], dims->rope_dim, position + 1 - ratio, table);
    cpu_rope_row(e, d, dims->rope_dim, table, false, round);
    if (round && run->index) {
        cpu_hadamard(e, d);
        cpu_round_row(e, d);
        cpu_quant4(e, d);
    } else if (round) {
        cpu_quant8(e, d - dims->rope_dim, FORMATS_KV_GROUP, e);
    }
    const struct ops_seq *seq = &run->rows->seqs[run->rows->seq_of[r]];
    uint8_t *body, *scales;
    cpu_page_entry(dims, run->kv, &run->layer->place, seq->pages, position / ratio, run->index,
                   &body, &scales);
    if (run->index) {
        cpu_key_store(dims, e, body, scales);
    } else {
        cpu_entry_store(dims, e, body, scales);
    }
}

void cpu_compress(struct ops_device *dev, const struct ops_rows *rows,
                  const struct ops_layer *layer, bool index, const float *x,
                  const struct ops_kv *kv)
{
    struct compress_run run = {.dev = dev,
                               .rows = rows,
                               .layer = layer,
                               .c = index ? &layer->index_compressor : &layer->compressor,
                               .kv = kv,
                               .index = index,
                               .d = index ? dev->d.index_dim : dev->d.head_dim,
                               .k = dev->wide,
                               .s = dev->wide2};
    run.width = run.c->wkv.rows;
    struct cpu_job jobs[2] = {{.matrix = &run.c->wkv,
                               .x = x,
                               .x_stride = dev->d.hidden,
                               .n_rows = rows->n_rows,
                               .y = run.k,
                               .y_stride = run.width},
                              {.matrix = &run.c->wgate,
                               .x = x,
                               .x_stride = dev->d.hidden,
                               .n_rows = rows->n_rows,
                               .y = run.s,
                               .y_stride = run.width}};
    cpu_gemm(dev->threads, jobs, 2);
    uint64_t work = (uint64_t)rows->n_rows * run.d * 32;
    cpu_threads_run(dev->threads, rows->n_seqs * ((run.d + CHANNEL_GROUP - 1) / CHANNEL_GROUP),
                    work, channels_item, &run);
    cpu_threads_run(dev->threads, rows->n_rows, work / 4, entry_item, &run);
}
