/* Attention of each row over its window and its chosen entries, with a sink in the denominator.
 *
 * The order of the attended set is fixed: window positions ascending, then entries ascending. Rows
 * of this call are read from kv_rows, older ones from the ring; both hold the same quantised
 * values. Only after every row has read does the ring take the new rows, so a chunk may be longer
 * than the ring. The maximum includes the sink, and probabilities stay floats until the end: of the
 * two roundings that the sources leave open (q norm, probabilities) neither is made here.
 */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"

struct attend_run {
    struct ops_device *dev;
    const struct ops_rows *rows;
    const struct ops_layer *layer;
    const float *q, *kv_rows, *rope;
    const struct ops_selection *selection;
    const struct ops_kv *kv;
    float *o;
    uint32_t n_parts; /* the heads of a row are shared among as many items */
    void (*heads)(const struct ops_dims *d, const struct ops_layer *layer, const float *q,
                  uint32_t h0, uint32_t h1, const float *const *attended, uint32_t n, float *logits,
                  float *o);
};

static void ring_entry(const struct attend_run *run, const struct ops_seq *seq, uint32_t position,
                       uint8_t **ret_body, uint8_t **ret_scales)
{
    const struct ops_dims *d = &run->dev->d;
    const struct ops_place *p = &run->layer->place;
    uint8_t *slot = run->kv->windows + (uint64_t)seq->slot * run->kv->window_bytes;
    size_t i = position % d->ring;
    *ret_body = slot + p->window + i * formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    *ret_scales = slot + p->window_scale +
                  i * formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
}

/* Everything row r attends to, as rows of floats; returns how many. */
static uint32_t gather(const struct attend_run *run, uint32_t r, struct cpu_scratch *scratch)
{
    const struct ops_dims *d = &run->dev->d;
    const struct ops_place *p = &run->layer->place;
    const struct ops_seq *seq = &run->rows->seqs[run->rows->seq_of[r]];
    uint32_t t = run->rows->positions[r], n = 0;
    float *room = scratch->entries;
    uint8_t *body, *scales;
    for (uint32_t k = t + 1 > d->window ? t + 1 - d->window : 0; k <= t; k++) {
        if (k >= seq->position) {
            scratch->attended[n++] =
                run->kv_rows + (size_t)(seq->first_row + k - seq->position) * d->head_dim;
            continue;
        }
        ring_entry(run, seq, k, &body, &scales);
        cpu_entry_load(d, body, scales, room);
        scratch->attended[n++] = room;
        room += d->head_dim;
    }
    uint32_t n_entries = p->ratio == 0                  ? 0
                         : p->ratio == OPS_SPARSE_RATIO ? run->selection->n[r]
                                                        : (t + 1) / p->ratio;
    const uint32_t *chosen =
        p->ratio == OPS_SPARSE_RATIO ? run->selection->index + (size_t)r * d->index_topk : NULL;
    for (uint32_t i = 0; i < n_entries; i++) {
        cpu_page_entry(d, run->kv, p, seq->pages, chosen ? chosen[i] : i, false, &body, &scales);
        cpu_entry_load(d, body, scales, room);
        scratch->attended[n++] = room;
        room += d->head_dim;
    }
    return n;
}

/* Weighted sum of the attended rows, sequential in a for each channel. */
static inline __attribute__((always_inline)) void
mix_rows(const float *p, uint32_t n, uint32_t n_ch, const float *const *attended, float z, float *o)
{
    uint32_t ch = 0;
    for (; ch + 32 <= n_ch; ch += 32) {
        v8 sum[4] = {{0}, {0}, {0}, {0}};
        for (uint32_t a = 0; a < n; a++) {
            v8 all = {p[a], p[a], p[a], p[a], p[a], p[a], p[a], p[a]};
            for (int j = 0; j < 4; j++) {
                sum[j] += all * *(const v8 *)(attended[a] + ch + 8 * j);
            }
        }
        for (int j = 0; j < 4; j++) {
            for (int i = 0; i < 8; i++) {
                o[ch + 8 * j + i] = sum[j][i] / z;
            }
        }
    }
    for (; ch < n_ch; ch++) {
        float sum = 0.0f;
        for (uint32_t a = 0; a < n; a++) {
            sum += p[a] * attended[a][ch];
        }
        o[ch] = sum / z;
    }
}

static inline __attribute__((always_inline)) void
attend_heads(const struct ops_dims *d, const struct ops_layer *layer, const float *q, uint32_t h0,
             uint32_t h1, const float *const *attended, uint32_t n, float *logits, float *o)
{
    float scale = (float)(1.0 / sqrt((double)d->head_dim));
    for (uint32_t a = 0; a < n; a++) {
        for (uint32_t h = h0; h < h1; h++) {
            logits[(size_t)h * n + a] =
                cpu_dot_inline(q + (size_t)h * d->head_dim, attended[a], d->head_dim) * scale;
        }
    }
    for (uint32_t h = h0; h < h1; h++) {
        float *l = logits + (size_t)h * n, sink = layer->attn_sink[h], most = sink, z = 0.0f;
        for (uint32_t a = 0; a < n; a++) {
            most = l[a] > most ? l[a] : most;
        }
        for (uint32_t a = 0; a < n; a++) {
            l[a] = cpu_exp(l[a] - most);
            z += l[a];
        }
        z += cpu_exp(sink - most);
        mix_rows(l, n, d->head_dim, attended, z, o + (size_t)h * d->head_dim);
    }
}

static void heads_generic(const struct ops_dims *d, const struct ops_layer *layer, const float *q,
                          uint32_t h0, uint32_t h1, const float *const *attended, uint32_t n,
                          float *logits, float *o)
{
    attend_heads(d, layer, q, h0, h1, attended, n, logits, o);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void
heads_avx2(const struct ops_dims *d, const struct ops_layer *layer, const float *q, uint32_t h0,
           uint32_t h1, const float *const *attended, uint32_t n, float *logits, float *o)
{
    attend_heads(d, layer, q, h0, h1, attended, n, logits, o);
}
#endif

static void attend_item(void *cookie, uint32_t item, uint32_t thread_i)
{
    struct attend_run *run = cookie;
    const struct ops_dims *d = &run->dev->d;
    struct cpu_scratch *scratch = &run->dev->scratch[thread_i];
    uint32_t r = item / run->n_parts, part = item % run->n_parts;
    uint32_t h0 = d->n_heads * part / run->n_parts, h1 = d->n_heads * (part + 1) / run->n_parts;
    uint32_t n = gather(run, r, scratch);
    float *o = run->o + (size_t)r * d->n_heads * d->head_dim;
    run->heads(d, run->layer, run->q + (size_t)r * d->n_heads * d->head_dim, h0, h1,
               scratch->attended, n, scratch->logits, o);
    for (uint32_t h = h0; h < h1; h++) {
        float *oh = o + (size_t)h * d->head_dim;
        if (!d->exact) {
            cpu_round_row(oh, d->head_dim);
        }
        cpu_rope_row(oh, d->head_dim, d->rope_dim, run->rope + (size_t)r * d->rope_dim, true,
                     !d->exact);
    }
}

static void store_window(const struct attend_run *run)
{
    const struct ops_dims *d = &run->dev->d;
    for (uint32_t s = 0; s < run->rows->n_seqs; s++) {
        const struct ops_seq *seq = &run->rows->seqs[s];
        if (seq->slot == OPS_NO_SLOT) {
            continue;
        }
        for (uint32_t i = seq->n_rows > d->ring ? seq->n_rows - d->ring : 0; i < seq->n_rows; i++) {
            uint8_t *body, *scales;
            ring_entry(run, seq, seq->position + i, &body, &scales);
            cpu_entry_store(d, run->kv_rows + (size_t)(seq->first_row + i) * d->head_dim, body,
                            scales);
        }
    }
}

void cpu_attend(struct ops_device *dev, const struct ops_rows *rows, const struct ops_layer *layer,
                const float *q, const float *kv_rows, const struct ops_selection *selection,
                const struct ops_kv *kv, float *ret_o)
{
    struct attend_run run = {.dev = dev,
                             .rows = rows,
                             .layer = layer,
                             .q = q,
                             .kv_rows = kv_rows,
                             .rope = dev->rope[layer->place.ratio != 0],
                             .selection = selection,
                             .kv = kv,
                             .o = ret_o,
                             .n_parts = 1,
                             .heads = heads_generic};
#if defined(__x86_64__)
    if (strcmp(cpu_gemm_variant(), "avx2") == 0) {
        run.heads = heads_avx2;
    }
#endif
    if (rows->n_rows < dev->n_threads) {
        run.n_parts = dev->n_threads < dev->d.n_heads ? dev->n_threads : dev->d.n_heads;
    }
    cpu_threads_run(dev->threads, rows->n_rows * run.n_parts,
                    (uint64_t)rows->n_rows * dev->d.n_heads * dev->d.head_dim * 64, attend_item,
                    &run);
    if (kv->stores_window) {
        store_window(&run);
    }
}
