/* A kernel table that calls another one and notes what each call took and what it had to touch.
 *
 * Time comes from marks in the device's stream where the backend has them, else from the host's
 * clock around the call. What a call has to touch is what no variant can do without: the packed
 * weights, once however many rows there are, and the cache entries and keys that the rows see. So
 * the share of the floor compares variants; it does not depend on how one of them is made.
 */
#include "engine/profile_table.h"

#include <assert.h>
#include <string.h>

#include "base/loop.h"
#include "base/mem.h"
#include "engine/forward.h"
#include "engine/profile.h"

enum cell {
    BEGIN,
    EMBED,
    MHC,
    PROJECT,
    COMPRESS,
    INDEXER,
    TOPK,
    ATTEND,
    OPROJ,
    ROUTE,
    EXPERTS,
    HEAD,
    SAMPLE,
    COMM
};

static const char *const cell_names[PROFILE_N_CELLS] = {
    "begin",  "embed", "mhc",   "project", "compress", "indexer", "topk",
    "attend", "oproj", "route", "experts", "head",     "sample",  "comm"};

enum { MAX_CALLS = OPS_MAX_MARKS / 2, SLAB_BYTES = 4 << 20, SLAB_ALIGN = 4096 };

/* One call whose numbers wait for the device. */
struct call {
    struct ops_device *device;
    enum cell cell;
    uint32_t first_mark; /* of its two */
    const struct ops_layer *layer;
    uint32_t *experts; /* [n_rows, n_experts_used], or NULL */
    uint32_t n_rows;
};

static struct {
    bool on;       /* tables given out are this one */
    bool measures; /* what passes is noted: steps, not how the sequences came to be, ... */
    bool records;  /* ... nor a call that is only recorded */
    void (*alter)(struct ops *table);
    struct ops inner;
    struct profile_cell cells[PROFILE_N_CELLS];
    struct {
        struct ops_device *device;
        struct ops_dims dims;
    } devices[FORWARD_MAX_RANKS];
    uint32_t n_devices;
    struct call calls[MAX_CALLS];
    uint32_t n_calls;
    uint8_t *slab; /* shared with the first device, so that it copies without the host: ids */
    size_t slab_used;
} now;

static const struct ops_dims *dims_of(const struct ops_device *device)
{
    for (uint32_t i = 0; i < now.n_devices; i++) {
        if (now.devices[i].device == device) {
            return &now.devices[i].dims;
        }
    }
    assert(!"a device that the profile did not open");
    return NULL;
}

/* --- a call and its time */

struct span {
    struct ops_device *device;
    enum cell cell;
    uint32_t mark;
    double begin_s;
    uint64_t launches; /* of the device before it */
};

static double host_s(void)
{
    return (double)loop_now_ns() * 1e-9;
}

static struct call *call_add(struct ops_device *device, enum cell cell)
{
    assert(now.n_calls < MAX_CALLS); /* 64 layers of 16 devices need a fifth of it */
    struct call *call = &now.calls[now.n_calls++];
    *call = (struct call){.device = device, .cell = cell};
    return call;
}

static uint64_t launches_of(const struct ops_device *device)
{
    return now.inner.launches ? now.inner.launches(device) : 0;
}

/* GPUs of a group work at the same time, so the first one's share is what a step takes. */
static bool notes(const struct ops_device *device)
{
    bool is_counted = !now.inner.own_memory || device == now.devices[0].device;
    return now.measures && !now.records && is_counted;
}

static struct span span_begin(struct ops_device *device, enum cell cell)
{
    struct span span = {.device = device, .cell = cell, .launches = launches_of(device)};
    if (!notes(device)) {
        return span;
    }
    if (now.inner.mark) {
        span.mark = 2 * now.n_calls;
        now.inner.mark(device, span.mark);
    } else {
        span.begin_s = host_s();
    }
    return span;
}

static void span_end(const struct span *span, double bytes, double multiply_adds)
{
    struct profile_cell *cell = &now.cells[span->cell];
    if (!notes(span->device)) {
        return;
    }
    if (now.inner.mark) {
        now.inner.mark(span->device, span->mark + 1);
        call_add(span->device, span->cell)->first_mark = span->mark;
    } else {
        cell->s += host_s() - span->begin_s;
    }
    cell->n_calls++;
    cell->n_launches += now.inner.launches ? launches_of(span->device) - span->launches : 1;
    cell->bytes += bytes;
    cell->multiply_adds += multiply_adds;
}

/* --- what a call has to touch */

static double bytes_of(const struct ops_matrix *matrix)
{
    return matrix->data ? (double)now.inner.matrix_bytes(matrix) : 0;
}

static double products_of(const struct ops_matrix *matrix, double n_rows)
{
    return matrix->data ? (double)matrix->rows * matrix->cols * n_rows : 0;
}

static void add_matrix(const struct ops_matrix *matrix, double n_rows, double *bytes, double *work)
{
    *bytes += bytes_of(matrix);
    *work += products_of(matrix, n_rows);
}

static double streams_bytes(const struct ops_device *device, const struct ops_rows *rows)
{
    return (double)rows->n_rows * OPS_HC * dims_of(device)->hidden * sizeof(float);
}

static double entry_bytes(const struct ops_dims *d)
{
    return (double)(formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim) +
                    formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim));
}

static double key_bytes(const struct ops_dims *d)
{
    return (double)(formats_key_bytes(d->entry_kind, d->index_dim) +
                    formats_key_scale_bytes(d->entry_kind, d->index_dim));
}

/* Entries that all rows see together in a layer of this ratio. */
static double seen_entries(const struct ops_rows *rows, uint32_t ratio, uint32_t most)
{
    double n = 0;
    for (uint32_t t = 0; t < rows->n_rows && ratio; t++) {
        uint32_t entries = (rows->positions[t] + 1) / ratio;
        n += entries < most ? entries : most;
    }
    return n;
}

static double attended_entries(const struct ops_dims *d, const struct ops_rows *rows,
                               uint32_t ratio)
{
    return seen_entries(rows, 1, d->window) +
           seen_entries(rows, ratio, ratio == OPS_SPARSE_RATIO ? d->index_topk : UINT32_MAX);
}

/* --- the table */

/* Room for n ids that `device` will write, until profile_table_collect: in memory that it shares if
 * it can, since a copy to other memory makes the host wait and the device then wait for the host.
 */
static uint32_t *ids_room(struct ops_device *device, size_t n)
{
    struct error err;
    size_t bytes = n * sizeof(uint32_t);
    if (now.inner.mark && !now.slab && device == now.devices[0].device) {
        now.slab = mem_try_aligned(SLAB_ALIGN, SLAB_BYTES);
        if (now.slab && now.inner.share(device, now.slab, SLAB_BYTES, &err)) {
            now.slab_used = SLAB_BYTES;
        }
    }
    if (now.slab && device == now.devices[0].device && bytes <= SLAB_BYTES - now.slab_used) {
        uint32_t *ids = (uint32_t *)(void *)(now.slab + now.slab_used);
        now.slab_used += bytes;
        return ids;
    }
    return mem_array(n, sizeof(uint32_t));
}

static bool in_slab(const uint32_t *ids)
{
    const uint8_t *at = (const uint8_t *)ids;
    return now.slab && at >= now.slab && at < now.slab + SLAB_BYTES;
}

static enum status timed_open(const struct ops_dims *dims, const struct ops_limits *limits,
                              struct ops_device **ret_device, struct error *err)
{
    enum status status = now.inner.open(dims, limits, ret_device, err);
    if (!status) {
        assert(now.n_devices < FORWARD_MAX_RANKS);
        now.devices[now.n_devices].device = *ret_device;
        now.devices[now.n_devices++].dims = *dims;
    }
    return status;
}

static void timed_begin(struct ops_device *device, const struct ops_rows *rows)
{
    struct span span = span_begin(device, BEGIN);
    now.inner.begin(device, rows);
    span_end(&span, 0, 0);
}

static void timed_mhc_turn(struct ops_device *device, const struct ops_rows *rows, const float *y,
                           const struct ops_hc *hc, const float *norm, float *streams, float *ret_x,
                           float *mix)
{
    double bytes = streams_bytes(device, rows), work = bytes / sizeof(float) * OPS_HC;
    struct span span = span_begin(device, MHC);
    now.inner.mhc_turn(device, rows, y, hc, norm, streams, ret_x, mix);
    add_matrix(&hc->fn, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

static void timed_embed(struct ops_device *device, const struct ops_rows *rows,
                        const struct ops_matrix *table, float *ret_streams)
{
    struct span span = span_begin(device, EMBED);
    now.inner.embed(device, rows, table, ret_streams);
    span_end(&span, bytes_of(table) / table->rows * rows->n_rows, 0);
}

static void timed_mhc_pre(struct ops_device *device, const struct ops_rows *rows,
                          const struct ops_hc *hc, const float *norm, const float *streams,
                          float *ret_x, float *ret_mix)
{
    double bytes = streams_bytes(device, rows), work = 0;
    struct span span = span_begin(device, MHC);
    now.inner.mhc_pre(device, rows, hc, norm, streams, ret_x, ret_mix);
    add_matrix(&hc->fn, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

static void timed_mhc_post(struct ops_device *device, const struct ops_rows *rows, const float *y,
                           const float *mix, float *streams)
{
    struct span span = span_begin(device, MHC);
    now.inner.mhc_post(device, rows, y, mix, streams);
    double bytes = streams_bytes(device, rows);
    span_end(&span, bytes, bytes / sizeof(float) * OPS_HC);
}

static void timed_project(struct ops_device *device, const struct ops_rows *rows,
                          const struct ops_layer *layer, const float *x, float *ret_qr,
                          float *ret_q, float *ret_kv)
{
    double bytes = 0, work = 0;
    struct span span = span_begin(device, PROJECT);
    now.inner.project(device, rows, layer, x, ret_qr, ret_q, ret_kv);
    add_matrix(&layer->wq_a, rows->n_rows, &bytes, &work);
    add_matrix(&layer->wq_b, rows->n_rows, &bytes, &work);
    add_matrix(&layer->wkv, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

/* What is asked for as one can't be told apart: all of it is project's. */
static void timed_inputs(struct ops_device *device, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *x, const struct ops_kv *kv,
                         float *ret_qr, float *ret_q, float *ret_kv, float *ret_iq, float *ret_iw)
{
    const struct ops_compressor *const c[] = {&layer->compressor, &layer->index_compressor};
    const bool is_sparse = layer->place.ratio == OPS_SPARSE_RATIO;
    const struct ops_matrix *const m[] = {&layer->wq_a, &layer->wq_b, &layer->wkv,
                                          &layer->index_wq_b, &layer->index_weights};
    double bytes = 0, work = 0;
    struct span span = span_begin(device, PROJECT);
    now.inner.inputs(device, rows, layer, x, kv, ret_qr, ret_q, ret_kv, ret_iq, ret_iw);
    for (int i = 0; i < (is_sparse ? 5 : 3); i++) {
        add_matrix(m[i], rows->n_rows, &bytes, &work);
    }
    for (int i = 0; i < (is_sparse ? 2 : layer->place.ratio != 0); i++) {
        add_matrix(&c[i]->wkv, rows->n_rows, &bytes, &work);
        add_matrix(&c[i]->wgate, rows->n_rows, &bytes, &work);
    }
    span_end(&span, bytes, work);
}

static void timed_compress(struct ops_device *device, const struct ops_rows *rows,
                           const struct ops_layer *layer, bool index, const float *x,
                           const struct ops_kv *kv)
{
    const struct ops_compressor *c = index ? &layer->index_compressor : &layer->compressor;
    double bytes = 0, work = 0;
    struct span span = span_begin(device, COMPRESS);
    now.inner.compress(device, rows, layer, index, x, kv);
    add_matrix(&c->wkv, rows->n_rows, &bytes, &work);
    add_matrix(&c->wgate, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

static void timed_indexer(struct ops_device *device, const struct ops_rows *rows,
                          const struct ops_layer *layer, const float *x, const float *qr,
                          float *ret_iq, float *ret_iw)
{
    double bytes = 0, work = 0;
    struct span span = span_begin(device, INDEXER);
    now.inner.indexer(device, rows, layer, x, qr, ret_iq, ret_iw);
    add_matrix(&layer->index_wq_b, rows->n_rows, &bytes, &work);
    add_matrix(&layer->index_weights, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

static void timed_topk(struct ops_device *device, const struct ops_rows *rows,
                       const struct ops_layer *layer, const float *iq, const float *iw,
                       const struct ops_kv *kv, struct ops_selection *ret_selection)
{
    const struct ops_dims *d = dims_of(device);
    double n = seen_entries(rows, layer->place.ratio, UINT32_MAX);
    struct span span = span_begin(device, TOPK);
    now.inner.topk(device, rows, layer, iq, iw, kv, ret_selection);
    span_end(&span, n * key_bytes(d), n * d->index_heads * d->index_dim);
}

static void timed_attend(struct ops_device *device, const struct ops_rows *rows,
                         const struct ops_layer *layer, const float *q, const float *kv_rows,
                         const struct ops_selection *selection, const struct ops_kv *kv,
                         float *ret_o)
{
    const struct ops_dims *d = dims_of(device);
    double n = attended_entries(d, rows, layer->place.ratio);
    struct span span = span_begin(device, ATTEND);
    now.inner.attend(device, rows, layer, q, kv_rows, selection, kv, ret_o);
    span_end(&span, n * entry_bytes(d), n * 2 * d->n_heads * d->head_dim);
}

static void timed_oproj(struct ops_device *device, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *o, float *ret_y)
{
    double bytes = 0, work = 0;
    struct span span = span_begin(device, OPROJ);
    now.inner.oproj(device, rows, layer, o, ret_y);
    for (uint32_t g = 0; g < dims_of(device)->o_groups; g++) {
        add_matrix(&layer->wo_a[g], rows->n_rows, &bytes, &work);
    }
    add_matrix(&layer->wo_b, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

static void timed_route(struct ops_device *device, const struct ops_rows *rows,
                        const struct ops_layer *layer, const float *x, uint32_t *ret_experts,
                        float *ret_weights)
{
    double bytes = 0, work = 0;
    struct span span = span_begin(device, ROUTE);
    now.inner.route(device, rows, layer, x, ret_experts, ret_weights);
    add_matrix(&layer->gate, rows->n_rows, &bytes, &work);
    span_end(&span, bytes, work);
}

/* Which experts it had to read is in the device's memory: copied behind the call, and counted once
 * the step is done. */
static void timed_experts(struct ops_device *device, const struct ops_rows *rows,
                          const struct ops_layer *layer, const float *x, const uint32_t *experts,
                          const float *weights, float *ret_y)
{
    size_t n = (size_t)rows->n_rows * dims_of(device)->n_experts_used;
    struct span span = span_begin(device, EXPERTS);
    now.inner.experts(device, rows, layer, x, experts, weights, ret_y);
    span_end(&span, 0, 0);
    if (!notes(device)) {
        return;
    }
    struct call *call = now.inner.mark ? &now.calls[now.n_calls - 1] : call_add(device, EXPERTS);
    call->layer = layer;
    call->n_rows = rows->n_rows;
    call->experts = ids_room(device, n);
    now.inner.read(device, call->experts, experts, n * sizeof(*experts));
}

static void timed_head(struct ops_device *device, const struct ops_globals *globals,
                       const float *streams, const uint32_t *which, uint32_t n, float *ret_logits,
                       size_t stride)
{
    double bytes = 0, work = 0;
    struct span span = span_begin(device, HEAD);
    now.inner.head(device, globals, streams, which, n, ret_logits, stride);
    add_matrix(&globals->head, n, &bytes, &work);
    add_matrix(&globals->hc_head.fn, n, &bytes, &work);
    span_end(&span, bytes, work);
}

/* Its floor: the logits, read once. */
static void timed_sample(struct ops_device *device, const struct ops_rows *rows,
                         const float *logits, size_t stride)
{
    struct span span = span_begin(device, SAMPLE);
    now.inner.sample(device, rows, logits, stride);
    span_end(&span, (double)rows->n_rows * dims_of(device)->vocab * sizeof(float), 0);
}

static void timed_comm(struct ops_device *const *devices, uint32_t n_devices, uint32_t n_rows,
                       float *const *y)
{
    struct span span = span_begin(devices[0], COMM);
    now.inner.comm(devices, n_devices, n_rows, y);
    span_end(&span, (double)n_devices * n_rows * dims_of(devices[0])->hidden * sizeof(float), 0);
}

/* A call that is recorded is asked for and not done: its operations pass through. */
static enum status timed_record_begin(struct ops_device *const *devices, uint32_t n_devices,
                                      struct error *err)
{
    enum status status = now.inner.record_begin(devices, n_devices, err);
    now.records = !status;
    return status;
}

static enum status timed_record_end(struct ops_device *const *devices, uint32_t n_devices,
                                    struct ops_recording *ret_recording, struct error *err)
{
    now.records = false;
    return now.inner.record_end(devices, n_devices, ret_recording, err);
}

enum status engine_profile_wrap(struct ops *table, struct error *err)
{
    if (!now.on) {
        return STATUS_OK;
    }
    if (!table->rates || !table->matrix_bytes) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "a step can't be profiled on this device: backend '%s' has no floors to "
                         "hold it against yet",
                         table->name);
    }
    if (now.alter) {
        now.alter(table);
    }
    now.inner = *table;
    table->open = timed_open;
    table->begin = timed_begin;
    table->embed = timed_embed;
    table->mhc_pre = timed_mhc_pre;
    table->mhc_post = timed_mhc_post;
    table->mhc_turn = table->mhc_turn ? timed_mhc_turn : NULL;
    table->project = timed_project;
    table->inputs = table->inputs ? timed_inputs : NULL;
    table->compress = timed_compress;
    table->indexer = timed_indexer;
    table->topk = timed_topk;
    table->attend = timed_attend;
    table->oproj = timed_oproj;
    table->route = timed_route;
    table->experts = timed_experts;
    table->head = timed_head;
    table->sample = table->sample ? timed_sample : NULL;
    table->comm = timed_comm;
    if (table->record_begin) {
        table->record_begin = timed_record_begin;
        table->record_end = timed_record_end;
    }
    return STATUS_OK;
}

/* --- for profile.c */

void profile_table_begin(void (*alter)(struct ops *table))
{
    assert(!now.on);
    memset(&now, 0, sizeof(now));
    now.on = true;
    now.alter = alter;
}

void profile_table_end(void)
{
    profile_table_collect();
    now.on = now.measures = false;
}

void profile_table_pause(void)
{
    profile_table_collect();
    now.measures = false;
}

void profile_table_free(void)
{
    mem_free(now.slab);
    now.slab = NULL;
}

void profile_table_reset(void)
{
    profile_table_collect();
    now.measures = true;
    for (int i = 0; i < PROFILE_N_CELLS; i++) {
        now.cells[i] = (struct profile_cell){.operation = cell_names[i]};
    }
}

/* The experts of one call that are this device's: their matrices once, their lanes all. */
static void collect_experts(struct call *call)
{
    const struct ops_dims *d = dims_of(call->device);
    struct profile_cell *cell = &now.cells[EXPERTS];
    bool *seen = mem_array(d->n_experts, sizeof(*seen));
    for (size_t i = 0; i < (size_t)call->n_rows * d->n_experts_used; i++) {
        uint32_t id = call->experts[i];
        if (id < d->expert_first || id >= d->expert_end) {
            continue;
        }
        const struct ops_expert *e = &call->layer->experts[id];
        double bytes = seen[id] ? 0 : bytes_of(&e->w1) + bytes_of(&e->w2) + bytes_of(&e->w3);
        seen[id] = true;
        cell->bytes += bytes;
        cell->multiply_adds +=
            products_of(&e->w1, 1) + products_of(&e->w2, 1) + products_of(&e->w3, 1);
    }
    if (d->has_shared) {
        const struct ops_expert *e = &call->layer->shared;
        add_matrix(&e->w1, call->n_rows, &cell->bytes, &cell->multiply_adds);
        add_matrix(&e->w2, call->n_rows, &cell->bytes, &cell->multiply_adds);
        add_matrix(&e->w3, call->n_rows, &cell->bytes, &cell->multiply_adds);
    }
    mem_free(seen);
    if (!in_slab(call->experts)) {
        mem_free(call->experts);
    }
}

void profile_table_collect(void)
{
    for (uint32_t i = 0; i < now.n_calls; i++) {
        struct call *call = &now.calls[i];
        if (now.inner.mark) {
            now.cells[call->cell].s +=
                now.inner.between_s(call->device, call->first_mark, call->first_mark + 1);
        }
        if (call->experts) {
            collect_experts(call);
        }
    }
    now.n_calls = 0;
    now.slab_used = now.slab_used == SLAB_BYTES ? SLAB_BYTES : 0;
}

const struct profile_cell *profile_table_cells(void)
{
    return now.cells;
}

enum status profile_table_rates(struct ops_rates *ret_rates, struct error *err)
{
    return now.inner.rates(now.devices[0].device, ret_rates, err);
}
