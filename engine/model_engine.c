/* The engine that computes: engine.h's calls in terms of the layer graph.
 *
 * Owns the devices, the store of pages and slots, and the logits of the last call. The invariant:
 * all that a sequence is lies in its pages and its slot, so a tail image plus pages is the
 * sequence.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/ahead.h"
#include "engine/batch.h"
#include "engine/engine_ops.h"
#include "engine/forward.h"
#include "engine/graphs.h"
#include "engine/layout.h"
#include "engine/model_load.h"
#include "engine/sampler.h"
#include "engine/store.h"
#include "model/tokenizer.h"

enum {
    DEFAULT_CONTEXT_TOKENS = 131072, /* scratch of a longer one must be asked for */
    DEFAULT_CHUNK_TOKENS = 512,
    DEFAULT_BATCH_ROWS = 16
};

struct model_engine {
    struct model_config config;
    struct layout layout;
    struct forward forward;
    struct batch batch;
    struct store store;
    bool apart;            /* the store's, and the ranks' */
    float *logits;         /* [max_batch_rows, vocab] of the last step */
    uint32_t *which;       /* [max_batch_rows] */
    float *prefill_logits; /* [vocab] of the last prefill that drew */
    uint32_t drawn_tokens; /* tokens before them; 0: there was none */
    struct sampler *sampler;
    struct graphs graphs;
    struct ahead ahead; /* where the device draws */
    uint32_t *ids;      /* its */
    bool records;       /* steps are to have graphs */
    char device_name[64];
};

static void tick(void *cookie)
{
    engine_tick(cookie);
}

/* One call of forward_run. */
struct watch {
    struct engine *engine;
    const struct engine_pieces *pieces; /* NULL: nobody waits for them */
    size_t due;                         /* bytes of a page to be told next */
    const uint32_t *pages;              /* those that the call completes, ... */
    uint32_t n_pages;
    size_t mirrored; /* ... and how many bytes of each were asked to the mirror */
};

/* The first `bytes` of the pages that the call completes are final once what was asked for is done.
 */
static void mirror(struct watch *watch, size_t bytes)
{
    struct model_engine *m = watch->engine->impl;
    for (uint32_t i = 0; i < watch->n_pages; i++) {
        store_mirror(&m->store, watch->pages[i], watch->mirrored, bytes);
    }
    watch->mirrored = bytes;
}

static void layer_done(void *cookie, uint32_t n_layers)
{
    struct watch *watch = cookie;
    struct model_engine *m = watch->engine->impl;
    engine_tick(watch->engine);
    if (!watch->pieces) {
        return;
    }
    size_t bytes = layout_page_final(&m->layout, n_layers);
    struct error err;
    if (bytes < watch->due || bytes == m->layout.page_bytes) {
        return;
    }
    mirror(watch, bytes);
    if (forward_wait(&m->forward, &err)) {
        return; /* a device that failed says so again at the end of the run */
    }
    watch->pieces->ready(watch->pieces->cookie, bytes);
    watch->due = bytes + m->layout.page_bytes / watch->pieces->n_pieces;
}

/* Hash over the weights' identity, the tokenizer and the layout; not over how many devices there
 * are. */
static enum status fingerprint(const struct model_engine *m, const char *dir,
                               const uint8_t identity[16], uint8_t *ret, struct error *err)
{
    struct buf text;
    buf_init(&text);
    buf_printf(&text, "baton page 1; model ");
    for (int i = 0; i < 16; i++) {
        buf_printf(&text, "%02x", identity[i]);
    }
    struct tokenizer *tokenizer = NULL;
    enum status status = tokenizer_open(dir, &tokenizer, err);
    if (status == STATUS_NOT_FOUND) {
        status = STATUS_OK; /* a folder of weights alone can be computed with */
    } else if (!status) {
        uint8_t digest[TOKENIZER_DIGEST_BYTES];
        tokenizer_digest(tokenizer, digest);
        buf_printf(&text, "; tokenizer ");
        for (int i = 0; i < TOKENIZER_DIGEST_BYTES; i++) {
            buf_printf(&text, "%02x", digest[i]);
        }
        tokenizer_close(tokenizer);
    }
    buf_printf(&text, "; ");
    layout_describe(&m->layout, &text);
    XXH128_canonical_t hash;
    XXH128_canonicalFromHash(&hash, XXH3_128bits(text.data, text.bytes));
    memcpy(ret, hash.digest, ENGINE_FINGERPRINT_BYTES);
    buf_fini(&text);
    return status;
}

static void fill_info(struct engine *engine, const struct model_engine *m,
                      const struct engine_options *options)
{
    struct engine_info *info = &engine->info;
    const struct model_config *c = &m->config;
    uint32_t longest = c->max_position_embeddings;
    info->model_name = c->name;
    info->device_name = m->device_name;
    info->vocab_size = c->vocab_size;
    info->n_layers = c->n_layers;
    info->page_tokens = m->layout.page_tokens;
    info->page_bytes = m->layout.page_bytes;
    info->tail_bytes = layout_tail_max_bytes(&m->layout);
    info->max_context_tokens =
        options->max_context_tokens ? options->max_context_tokens : DEFAULT_CONTEXT_TOKENS;
    if (info->max_context_tokens > longest) {
        info->max_context_tokens = longest;
    }
    info->max_chunk_tokens =
        options->max_chunk_tokens ? options->max_chunk_tokens : DEFAULT_CHUNK_TOKENS;
    info->max_batch_rows = options->max_batch_rows ? options->max_batch_rows : DEFAULT_BATCH_ROWS;
    info->bos_id = c->bos_id;
    info->eos_id = c->eos_ids[0];
}

static enum status model_open(struct engine *engine, const struct engine_options *options,
                              struct error *err)
{
    struct model_engine *m = mem_zalloc(sizeof(*m));
    struct engine_info *info = &engine->info;
    const char *device = options->device ? options->device : "cpu";
    struct registry_choice choice;
    enum status status = registry_find(device, &choice, err);
    if (!status) {
        status = model_load_rank(options->rank, &choice, err);
    }
    if (!status) {
        status = model_config_load(options->model_dir, &m->config, err);
    }
    if (!status) {
        status = layout_make(&m->config, options->exact, &m->layout, err);
    }
    if (status) {
        goto free_model;
    }
    snprintf(m->device_name, sizeof(m->device_name), "%s%s%s%s", device,
             options->rank ? " rank " : "", options->rank ? options->rank : "",
             options->exact ? " (exact)" : "");
    fill_info(engine, m, options);
    struct ops_limits limits = {.n_rows = info->max_chunk_tokens > info->max_batch_rows
                                              ? info->max_chunk_tokens
                                              : info->max_batch_rows,
                                .n_seqs = info->max_batch_rows,
                                .n_tokens = info->max_context_tokens,
                                .page_tokens = info->page_tokens,
                                .heavy_ratio = m->config.heavy_ratio,
                                .n_threads = options->n_threads,
                                .early_launches = options->early_launches};
    uint8_t identity[16];
    choice.apart = choice.apart || options->apart;
    m->apart = choice.apart;
    status = model_load(&m->forward, &choice, &m->config, &m->layout, options->model_dir,
                        options->weights, options->exact, &limits, tick, engine, identity, err);
    if (status) {
        goto free_model;
    }
    status = fingerprint(m, options->model_dir, identity, info->fingerprint, err);
    if (status) {
        goto unload;
    }
    batch_init(&m->batch, limits.n_rows, limits.n_seqs);
    engine->draws = m->forward.logits != NULL;
    m->sampler = sampler_create(info->vocab_size);
    m->records = !options->no_graphs && graphs_are_here(m->forward.ops);
    engine->pool_is_apart = m->apart && !options->sends;
    engine->impl = m;
    return STATUS_OK;

unload:
    model_unload(&m->forward);
free_model:
    mem_free(m);
    return status;
}

/* Memory of the engine that the devices use too, in pages of its own. */
static enum status shared_room(struct model_engine *m, size_t n, size_t each, void **ret_memory,
                               struct error *err)
{
    size_t bytes = 0;
    bool ok = size_mul(n, each, &bytes) && size_add(bytes, LAYOUT_PAGE_ALIGN - 1, &bytes);
    bytes = bytes / LAYOUT_PAGE_ALIGN * LAYOUT_PAGE_ALIGN;
    void *memory = ok ? mem_try_aligned(LAYOUT_PAGE_ALIGN, bytes) : NULL;
    if (!memory) {
        return error_set(err, STATUS_EXHAUSTED, "no memory for %zu times %zu bytes", n, each);
    }
    *ret_memory = memory; /* freed by close, whatever comes now */
    return forward_share(&m->forward, memory, bytes, err);
}

/* A start that asked for graphs gets them or ends: steps that quietly take twice as long would be
 * found out by the users. */
static enum status record(struct engine *engine, struct error *err)
{
    struct model_engine *m = engine->impl;
    struct error why = {""};
    enum status status = graphs_record(&m->graphs, &m->forward, engine->info.max_batch_rows,
                                       m->logits, tick, engine, &why);
    if (status) {
        return error_set(err, status,
                         "decode steps can't be recorded as graphs: %s; --graphs off starts "
                         "without them",
                         why.text);
    }
    engine->by_graph = true;
    struct engine_graphs graphs;
    engine_graphs_report(engine, &graphs);
    log_info("engine",
             "graphs: %" PRIu32 " recorded in %.2f s, the largest of %" PRIu32
             " kernels; they take "
             "%.1f MiB on the device",
             graphs.n, graphs.seconds, graphs.n_launches, (double)graphs.bytes / (1 << 20));
    return STATUS_OK;
}

static enum status model_ready(struct engine *engine, struct error *err)
{
    struct model_engine *m = engine->impl;
    const struct engine_info *info = &engine->info;
    size_t logits_bytes = (size_t)info->vocab_size * sizeof(float);
    void *logits = NULL, *prefill_logits = NULL;
    enum status status = store_open(&m->store, &m->forward, &m->layout, info->n_pages,
                                    info->max_sequences, info->pool_base, err);
    if (!status) {
        status = shared_room(m, info->max_batch_rows, logits_bytes, &logits, err);
    }
    if (!status) {
        status = shared_room(m, 1, logits_bytes, &prefill_logits, err);
    }
    m->logits = logits;
    m->prefill_logits = prefill_logits;
    if (!status) {
        forward_clear_logits(&m->forward, m->logits, info->max_batch_rows);
        forward_clear_logits(&m->forward, m->prefill_logits, 1);
        m->which = mem_array(info->max_batch_rows, sizeof(*m->which));
    }
    if (!status && engine->draws) {
        void *ids = NULL;
        status = shared_room(m, info->max_batch_rows, OPS_FENCES * sizeof(uint32_t), &ids, err);
        m->ids = ids;
        ahead_init(&m->ahead, &m->forward, &m->graphs, info->max_batch_rows, m->ids);
    }
    return !status && m->records ? record(engine, err) : status;
}

static void model_close(struct engine *engine)
{
    struct model_engine *m = engine->impl;
    if (!m) {
        return;
    }
    graphs_free(&m->graphs);
    model_unload(&m->forward);
    store_close(&m->store);
    batch_fini(&m->batch);
    sampler_free(m->sampler);
    mem_free(m->logits);
    mem_free(m->which);
    ahead_fini(&m->ahead);
    mem_free(m->ids);
    mem_free(m->prefill_logits);
    mem_free(m);
}

static void model_graphs_report(const struct engine *engine, struct engine_graphs *ret_graphs)
{
    const struct graphs *g = &((const struct model_engine *)engine->impl)->graphs;
    *ret_graphs = (struct engine_graphs){.n = g->n, .seconds = g->seconds, .bytes = g->bytes};
    ret_graphs->n_launches = g->n ? g->recordings[g->n - 1].n_launches : 0;
}

static void model_graphs_use(struct engine *engine, bool use)
{
    struct model_engine *m = engine->impl;
    engine->by_graph = use && m->graphs.n > 0;
}

static void model_memory_report(const struct engine *engine,
                                void (*line)(void *cookie, const char *item, size_t bytes),
                                void *cookie)
{
    const struct model_engine *m = engine->impl;
    size_t bytes = 0;
    for (uint32_t k = 0; k < m->forward.n_ranks; k++) {
        bytes += m->forward.ops->allocated(m->forward.ranks[k].device);
    }
    size_t n_slots = (size_t)m->store.n_slots * forward_n_memories(&m->forward);
    line(cookie, "weights and activations", bytes - store_device_bytes(&m->store));
    line(cookie, "windows", n_slots * m->layout.window_bytes);
    line(cookie, "states", n_slots * m->layout.state_bytes);
    if (m->apart) {
        line(cookie, "empty slot",
             forward_n_memories(&m->forward) * (m->layout.window_bytes + m->layout.state_bytes));
        line(cookie, "slot image", store_image_bytes(&m->layout));
    }
    if (forward_n_memories(&m->forward) > 1) {
        line(cookie, "pages of the other devices",
             (forward_n_memories(&m->forward) - 1) * engine->info.n_pages * m->layout.page_bytes);
    }
    if (m->graphs.n) {
        line(cookie, "graphs", m->graphs.bytes);
    }
    if (m->store.mirror) {
        line(cookie, "page copies", engine->info.n_pages * m->layout.page_bytes);
    }
}

/* Apart this is left to the first compute call: the device is not the loop's to use. */
static void model_slot_reset(struct engine *engine, struct engine_seq *seq)
{
    struct model_engine *m = engine->impl;
    if (!m->apart) {
        store_slot_reset(&m->store, seq->slot);
    }
}

static void begin_seq(struct model_engine *m, const struct engine_seq *seq)
{
    if (m->apart && seq->n_tokens == 0) {
        store_slot_reset(&m->store, seq->slot);
    }
}

/* Logits and draw of one row, as it asks for them; position is that of the token drawn. */
static void finish_row(struct engine *engine, struct engine_seq *seq, struct engine_row *row,
                       const float *logits, uint32_t position)
{
    struct model_engine *m = engine->impl;
    if (row->logits) {
        memcpy(row->logits, logits, (size_t)engine->info.vocab_size * sizeof(float));
    }
    if (row->sampling) {
        const uint32_t *counts =
            sampler_has_penalties(row->sampling) ? engine_seq_counts(seq) : NULL;
        sampler_draw(m->sampler, logits, row->sampling, counts, row->n_generated, position,
                     &row->draw);
    }
}

/* What a failed device computed can't be trusted, nor can the pages and slots it wrote: the end of
 * the node. */
static enum status checked(enum status status, const struct error *err)
{
    if (status) {
        log_error("engine", "the device failed: %s", err->text);
        return STATUS_FATAL;
    }
    return STATUS_OK;
}

/* The same of a call beside the compute thread's. */
static enum status told(enum status status, const struct error *err)
{
    if (status == STATUS_SYSTEM) {
        log_error("engine", "the device failed: %s", err->text);
    }
    return status;
}

static enum status model_slot_copy(struct engine *engine, struct engine_seq *dst,
                                   const struct engine_seq *src)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_slot_copy(&m->store, dst->slot, src->slot, &err), &err);
}

static uint8_t *model_page_address(const struct engine *engine, uint32_t page)
{
    const struct model_engine *m = engine->impl;
    return store_page(&m->store, page);
}

static enum status model_page_copy(struct engine *engine, uint32_t dst, uint32_t src)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_page_copy(&m->store, dst, src, &err), &err);
}

static enum status model_page_read(struct engine *engine, uint32_t page, void *ret_bytes)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_page_read(&m->store, page, ret_bytes, &err), &err);
}

static enum status model_accept_parcel(struct engine *engine, uint64_t transfer_id,
                                       uint32_t parcel_seq, const struct parcel_piece *pieces,
                                       uint32_t n_pieces, uint64_t expected_checksum)
{
    struct model_engine *m = engine->impl;
    struct error err;
    enum status status =
        store_accept(&m->store, transfer_id, parcel_seq, pieces, n_pieces, expected_checksum, &err);
    return told(status, &err);
}

static enum status model_share(struct engine *engine, void *memory, size_t bytes, struct error *err)
{
    struct model_engine *m = engine->impl;
    return m->apart ? forward_share(&m->forward, memory, bytes, err) : STATUS_OK;
}

static void model_unshare(struct engine *engine, void *memory)
{
    struct model_engine *m = engine->impl;
    if (m->apart) {
        forward_unshare(&m->forward, memory);
    }
}

static enum status model_device_alloc(struct engine *engine, size_t bytes, uint8_t **ret_memory,
                                      enum engine_memory_kind *ret_kind, struct error *err)
{
    struct model_engine *m = engine->impl;
    enum ops_memory kind = OPS_MEMORY_HOST;
    enum status status = store_alloc_shown(&m->store, bytes, ret_memory, &kind, err);
    if (!status) {
        *ret_kind = kind == OPS_MEMORY_CUDA ? ENGINE_MEMORY_CUDA : ENGINE_MEMORY_HOST;
    }
    return status;
}

static void model_device_attach(struct engine *engine)
{
    struct model_engine *m = engine->impl;
    if (m->forward.ops->attach) {
        m->forward.ops->attach(m->forward.ranks[0].device);
    }
}

static enum status model_device_move(struct engine *engine, void *dst, const void *src,
                                     size_t bytes)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_move(&m->store, dst, src, bytes, &err), &err);
}

static enum status model_device_sum(struct engine *engine, uint64_t transfer_id,
                                    uint32_t parcel_seq, const struct parcel_piece *pieces,
                                    uint32_t n_pieces, uint64_t *ret_checksum)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_sum(&m->store, transfer_id, parcel_seq, pieces, n_pieces, ret_checksum, &err),
                &err);
}

/* Runs the rows of m->batch. Without logits to wait for, waits here: who hands the pages on must
 * find them written. */
static enum status run(struct watch *watch, const uint32_t *which, uint32_t n, float *ret_logits,
                       const _Atomic bool *cancel)
{
    struct model_engine *m = watch->engine->impl;
    struct error err;
    enum status status = forward_run(&m->forward, &m->batch.rows, cancel, layer_done, watch);
    if (!status) {
        mirror(watch, m->layout.page_bytes);
    }
    if (status || n == 0) {
        enum status waited = checked(forward_wait(&m->forward, &err), &err);
        return waited ? waited : status;
    }
    return checked(forward_logits(&m->forward, which, n, ret_logits, &err), &err);
}

static enum status model_prefill(struct engine *engine, struct engine_seq *seq, const uint32_t *ids,
                                 uint32_t n_ids, struct engine_row *row, const _Atomic bool *cancel,
                                 const struct engine_pieces *pieces)
{
    struct model_engine *m = engine->impl;
    uint32_t last = n_ids - 1, page_tokens = m->layout.page_tokens;
    uint32_t first_page = seq->n_tokens / page_tokens;
    struct watch watch = {.engine = engine,
                          .pieces = pieces,
                          .due = pieces ? m->layout.page_bytes / pieces->n_pieces : 0,
                          .pages = seq->pages + first_page,
                          .n_pages = (seq->n_tokens + n_ids) / page_tokens - first_page};
    batch_set_prefill(&m->batch, seq, ids, n_ids);
    begin_seq(m, seq);
    enum status status = run(&watch, &last, row ? 1 : 0, m->prefill_logits, cancel);
    if (status || !row) {
        return status;
    }
    m->drawn_tokens = seq->n_tokens + n_ids;
    finish_row(engine, seq, row, m->prefill_logits, seq->n_tokens + n_ids);
    return STATUS_OK;
}

/* The step of m->batch, with the logits of rows m->which[0 .. n). */
static enum status run_step(struct engine *engine, uint32_t n)
{
    struct model_engine *m = engine->impl;
    struct watch watch = {.engine = engine};
    struct error err;
    if (!engine->by_graph) {
        return run(&watch, m->which, n, m->logits, NULL);
    }
    return checked(graphs_run(&m->graphs, &m->batch.rows, tick, engine, &err), &err);
}

static enum status model_step(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    struct model_engine *m = engine->impl;
    batch_set_step(&m->batch, rows, n_rows);
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_rows; i++) {
        begin_seq(m, rows[i].seq);
        if (rows[i].sampling || rows[i].logits) {
            m->which[n++] = i;
        }
    }
    enum status status = run_step(engine, n);
    if (status) {
        return status;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct engine_row *row = &rows[m->which[i]];
        size_t at = engine->by_graph ? m->which[i] : i; /* a recording has the logits of all rows */
        finish_row(engine, row->seq, row, m->logits + at * engine->info.vocab_size,
                   row->seq->n_tokens + 1);
    }
    return STATUS_OK;
}

static bool host_wants(const struct engine_row *row)
{
    return row->logits || (row->sampling && !sampler_can_be_there(row->sampling, row->n_generated));
}

static enum status model_step_begin(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    struct model_engine *m = engine->impl;
    uint32_t n = 0;
    batch_set_drawn_step(&m->batch, rows, n_rows);
    for (uint32_t i = 0; i < n_rows; i++) {
        begin_seq(m, rows[i].seq);
        if (host_wants(&rows[i])) {
            m->which[n++] = i;
        }
    }
    ahead_begin(&m->ahead, &m->batch.rows, engine->by_graph, m->which, n, m->logits, tick, engine);
    return STATUS_OK;
}

/* A row that the host has to finish is in the last step that was begun, so its sequence's tokens
 * are those after the step. */
static enum status model_step_end(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    struct model_engine *m = engine->impl;
    const uint32_t *ids;
    struct error err;
    enum status status = checked(ahead_end(&m->ahead, &ids, tick, engine, &err), &err);
    for (uint32_t i = 0; i < n_rows && !status; i++) {
        struct engine_row *row = &rows[i];
        if (host_wants(row)) {
            finish_row(engine, row->seq, row, m->logits + (size_t)i * engine->info.vocab_size,
                       row->seq->n_tokens);
        }
        if (row->sampling && sampler_can_be_there(row->sampling, row->n_generated)) {
            row->draw = (struct engine_draw){.id = ids[i]};
        }
    }
    return status;
}

static enum status model_draw_again(struct engine *engine, struct engine_seq *seq,
                                    const struct engine_sampling *sampling, uint32_t n_generated,
                                    struct engine_draw *ret_draw)
{
    struct model_engine *m = engine->impl;
    if (m->drawn_tokens == 0 || m->drawn_tokens != seq->n_tokens) {
        return STATUS_INVALID;
    }
    const uint32_t *counts = sampler_has_penalties(sampling) ? engine_seq_counts(seq) : NULL;
    sampler_draw(m->sampler, m->prefill_logits, sampling, counts, n_generated, seq->n_tokens,
                 ret_draw);
    return STATUS_OK;
}

static size_t model_tail_bytes(const struct engine *engine, uint32_t n_tokens)
{
    const struct model_engine *m = engine->impl;
    return layout_tail_bytes(&m->layout, n_tokens);
}

static enum status model_tail_write(struct engine *engine, struct engine_seq *seq, void *dst)
{
    struct model_engine *m = engine->impl;
    struct error err;
    uint32_t page_i = seq->n_tokens / m->layout.page_tokens;
    uint32_t page = page_i < seq->n_pages ? seq->pages[page_i] : 0; /* used if it is partial */
    return checked(store_tail_write(&m->store, seq->slot, seq->n_tokens, page, dst, &err), &err);
}

static enum status model_tail_read(struct engine *engine, struct engine_seq *seq, uint32_t n_tokens,
                                   const void *src)
{
    struct model_engine *m = engine->impl;
    struct error err;
    return told(store_tail_read(&m->store, seq->slot, n_tokens, src, &err), &err);
}

const struct engine_ops engine_model_ops = {
    .kind = "model",
    .open = model_open,
    .ready = model_ready,
    .close = model_close,
    .graphs_report = model_graphs_report,
    .graphs_use = model_graphs_use,
    .memory_report = model_memory_report,
    .slot_reset = model_slot_reset,
    .slot_copy = model_slot_copy,
    .page_address = model_page_address,
    .page_copy = model_page_copy,
    .page_read = model_page_read,
    .accept_parcel = model_accept_parcel,
    .device_alloc = model_device_alloc,
    .device_attach = model_device_attach,
    .device_move = model_device_move,
    .device_sum = model_device_sum,
    .share = model_share,
    .unshare = model_unshare,
    .prefill = model_prefill,
    .step = model_step,
    .step_begin = model_step_begin,
    .step_end = model_step_end,
    .draw_again = model_draw_again,
    .tail_bytes = model_tail_bytes,
    .tail_write = model_tail_write,
    .tail_read = model_tail_read,
};
