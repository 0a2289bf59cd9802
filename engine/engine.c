/* What all engines share: argument checks, sequences, page tables, history.
 *
 * Owns the pool and every sequence. The invariant: the pages of a sequence always cover the tokens
 * it holds, and a sequence gives back exactly what it took. An engine behind the table never
 * allocates or frees a page.
 */
#include "engine/engine.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "engine/accept.h"
#include "engine/engine_ops.h"
#include "engine/sampler.h"

static const struct engine_ops *const engines[] = {
#ifdef ENGINE_HAVE_MODEL
    &engine_model_ops,
#endif
    &engine_sim_ops,
};

static const struct engine_ops *find_ops(const char *kind)
{
    for (size_t i = 0; i < sizeof(engines) / sizeof(engines[0]); i++) {
        if (strcmp(engines[i]->kind, kind) == 0) {
            return engines[i];
        }
    }
    return NULL;
}

enum status engine_open(const struct engine_options *options, _Atomic uint64_t *progress,
                        struct engine **ret_engine, struct error *err)
{
    const struct engine_ops *ops = find_ops(options->kind);
    if (!ops) {
        return error_set(err, STATUS_INVALID, "engine '%s' is unknown: it is 'model' or 'sim'",
                         options->kind);
    }
    struct engine *engine = mem_zalloc(sizeof(*engine));
    engine->ops = ops;
    engine->progress = progress;
    enum status status = ops->open(engine, options, err);
    if (status) {
        goto free_engine;
    }
    if (options->lookahead && !engine->draws) {
        status = error_set(err, STATUS_INVALID,
                           "--lookahead on asks for steps before the host has seen their tokens, "
                           "so a device must draw them: on one GPU, with --kernel sample=device");
        goto close_ops;
    }
    engine->lookahead = options->lookahead;
    struct engine_info *info = &engine->info;
    info->max_sequences = options->max_sequences ? options->max_sequences : 16;
    if (info->max_batch_rows > info->max_sequences) {
        info->max_batch_rows = info->max_sequences;
    }
    uint32_t pages_a_context =
        (info->max_context_tokens + info->page_tokens - 1) / info->page_tokens;
    info->n_pages = options->n_pages ? options->n_pages : pages_a_context;
    /* A context that the pool can't hold can't be served: the smaller of the two is what is
     * promised. */
    if (info->n_pages < pages_a_context) {
        info->max_context_tokens = info->n_pages * info->page_tokens;
    }
    status = pool_create(info->n_pages, info->page_bytes, !engine->pool_is_apart,
                         info->max_sequences, &engine->pool, err);
    if (status) {
        goto close_ops;
    }
    info->pool_base = engine->pool_is_apart ? NULL : pool_page(engine->pool, 0);
    status = ops->ready ? ops->ready(engine, err) : STATUS_OK;
    if (status) {
        goto close_ops;
    }
    *ret_engine = engine;
    return STATUS_OK;

close_ops:
    ops->close(engine); /* first: a device may have the pool pinned */
    pool_free(engine->pool);
free_engine:
    mem_free(engine);
    return status;
}

void engine_close(struct engine *engine)
{
    if (!engine) {
        return;
    }
    engine->ops->close(engine);
    pool_free(engine->pool);
    mem_free(engine);
}

const struct engine_info *engine_info(const struct engine *engine)
{
    return &engine->info;
}

void engine_memory_report(const struct engine *engine,
                          void (*line)(void *cookie, const char *item, size_t bytes), void *cookie)
{
    if (engine->ops->memory_report) {
        engine->ops->memory_report(engine, line, cookie);
    }
    line(cookie, "pages", (size_t)engine->info.n_pages * engine->info.page_bytes);
}

void engine_graphs_report(const struct engine *engine, struct engine_graphs *ret_graphs)
{
    *ret_graphs = (struct engine_graphs){.n = 0};
    if (engine->ops->graphs_report) {
        engine->ops->graphs_report(engine, ret_graphs);
    }
}

void engine_graphs_use(struct engine *engine, bool use)
{
    if (engine->ops->graphs_use) {
        engine->ops->graphs_use(engine, use);
    }
}

enum status engine_seq_create(struct engine *engine, uint64_t owner, struct engine_seq **ret_seq)
{
    uint32_t slot;
    enum status status = pool_slot_acquire(engine->pool, owner, &slot);
    if (status) {
        return status;
    }
    struct engine_seq *seq = mem_zalloc(sizeof(*seq));
    seq->engine = engine;
    seq->owner = owner;
    seq->slot = slot;
    engine->ops->slot_reset(engine, seq);
    *ret_seq = seq;
    return STATUS_OK;
}

void engine_seq_free(struct engine_seq *seq)
{
    if (!seq) {
        return;
    }
    assert(atomic_load(&seq->n_begun) == 0); /* a step still writes to its pages */
    for (uint32_t i = 0; i < seq->n_pages; i++) {
        pool_page_release(seq->engine->pool, seq->pages[i]);
    }
    pool_slot_release(seq->engine->pool, seq->slot);
    mem_free(seq->pages);
    mem_free(seq->history);
    mem_free(seq->counts);
    mem_free(seq);
}

uint32_t engine_pages_for(const struct engine *engine, uint32_t n_tokens)
{
    return n_tokens / engine->info.page_tokens + (n_tokens % engine->info.page_tokens != 0);
}

/* Makes room for `wanted` ids. What a sequence may once need (4 MB of history at a context of 1M
 * tokens) is not what it takes at the start: a node has thousands of them. Twice as much each time,
 * so that few steps have to copy. */
static uint32_t *ids_grow(uint32_t *ids, uint32_t *capacity, uint32_t wanted)
{
    enum { FIRST_IDS = 8 };
    if (wanted <= *capacity) {
        return ids;
    }
    uint32_t twice = *capacity < UINT32_MAX / 2 ? 2 * *capacity : UINT32_MAX;
    *capacity = wanted > twice ? wanted : twice;
    *capacity = *capacity > FIRST_IDS ? *capacity : FIRST_IDS;
    return mem_realloc_array(ids, *capacity, sizeof(*ids));
}

static void history_grow(struct engine_seq *seq, uint32_t n_ids)
{
    seq->history = ids_grow(seq->history, &seq->history_capacity, n_ids);
}

enum status engine_seq_reserve(struct engine_seq *seq, uint32_t n_tokens)
{
    struct engine *engine = seq->engine;
    if (n_tokens > engine->info.max_context_tokens) {
        return STATUS_TOO_LARGE;
    }
    uint32_t n_wanted = engine_pages_for(engine, n_tokens), n_before = seq->n_pages;
    seq->pages = ids_grow(seq->pages, &seq->pages_capacity, n_wanted);
    if (seq->history) {
        history_grow(seq, n_wanted * engine->info.page_tokens); /* not within a step */
    }
    while (seq->n_pages < n_wanted) {
        uint32_t page;
        enum status status = pool_page_acquire(engine->pool, seq->owner, &page);
        if (status) {
            while (seq->n_pages > n_before) {
                pool_page_release(engine->pool, seq->pages[--seq->n_pages]);
            }
            return status;
        }
        seq->pages[seq->n_pages++] = page;
    }
    return STATUS_OK;
}

enum status engine_seq_fork(struct engine_seq *seq, uint64_t owner, struct engine_seq **ret_seq)
{
    struct engine *engine = seq->engine;
    struct engine_seq *copy;
    enum status status = engine_seq_create(engine, owner, &copy);
    if (status) {
        return status;
    }
    uint32_t n_full = seq->n_tokens / engine->info.page_tokens;
    copy->pages = ids_grow(copy->pages, &copy->pages_capacity, n_full);
    for (uint32_t i = 0; i < n_full; i++) {
        pool_page_share(engine->pool, seq->pages[i]);
        copy->pages[copy->n_pages++] = seq->pages[i];
    }
    status = engine_seq_reserve(copy, seq->n_tokens);
    if (status) {
        engine_seq_free(copy);
        return status;
    }
    if (seq->n_tokens % engine->info.page_tokens) {
        status = engine_page_copy(engine, copy->pages[n_full], seq->pages[n_full]);
    }
    if (!status) {
        status = engine->ops->slot_copy(engine, copy, seq);
    }
    if (status) {
        engine_seq_free(copy);
        return status;
    }
    copy->n_tokens = seq->n_tokens;
    if (seq->history) {
        status =
            engine_seq_history_set(copy, seq->history, seq->n_history, seq->n_history_generated);
        if (status) {
            engine_seq_free(copy);
            return status;
        }
    }
    *ret_seq = copy;
    return STATUS_OK;
}

uint32_t engine_seq_n_tokens(const struct engine_seq *seq)
{
    return seq->n_tokens;
}

uint32_t engine_seq_page(const struct engine_seq *seq, uint32_t page_i)
{
    return seq->pages[page_i];
}

uint32_t engine_seq_n_pages(const struct engine_seq *seq)
{
    return seq->n_pages;
}

static void count_ids(uint32_t *counts, const uint32_t *ids, uint32_t n_ids, uint32_t n_generated)
{
    for (uint32_t i = 0; i < n_ids; i++) {
        counts[ids[i]] =
            i < n_ids - n_generated ? counts[ids[i]] | 0x80000000u : counts[ids[i]] + 1;
    }
}

enum status engine_seq_history_set(struct engine_seq *seq, const uint32_t *ids, uint32_t n_ids,
                                   uint32_t n_generated)
{
    const struct engine_info *info = &seq->engine->info;
    if (n_ids > info->max_context_tokens || n_generated > n_ids) {
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < n_ids; i++) {
        if (ids[i] >= info->vocab_size) {
            return STATUS_INVALID;
        }
    }
    uint32_t n_reserved = seq->n_pages * info->page_tokens;
    history_grow(seq, n_ids > n_reserved ? n_ids : n_reserved);
    memcpy(seq->history, ids, (size_t)n_ids * sizeof(uint32_t));
    seq->n_history = n_ids;
    seq->n_history_generated = n_generated;
    if (seq->counts) {
        memset(seq->counts, 0, (size_t)info->vocab_size * sizeof(uint32_t));
        count_ids(seq->counts, ids, n_ids, n_generated);
    }
    return STATUS_OK;
}

const uint32_t *engine_seq_counts(struct engine_seq *seq)
{
    if (!seq->counts && seq->history) {
        seq->counts = mem_zalloc((size_t)seq->engine->info.vocab_size * sizeof(uint32_t));
        count_ids(seq->counts, seq->history, seq->n_history, seq->n_history_generated);
    }
    return seq->counts;
}

static void history_append(struct engine_seq *seq, uint32_t id)
{
    if (seq->n_history < seq->history_capacity) {
        seq->history[seq->n_history++] = id;
        seq->n_history_generated++;
        if (seq->counts) {
            seq->counts[id]++;
        }
    }
}

uint32_t engine_pages_free(const struct engine *engine)
{
    return pool_pages_free(engine->pool);
}

uint32_t engine_slots_free(const struct engine *engine)
{
    return pool_slots_free(engine->pool);
}

void engine_debug_json(const struct engine *engine, struct json_writer *w)
{
    pool_debug_json(engine->pool, w);
}

static double steps_value(void *cookie)
{
    return (double)atomic_load_explicit((_Atomic uint64_t *)cookie, memory_order_relaxed);
}

void engine_metrics_register(struct engine *engine, struct metrics *metrics)
{
    static const char *const how[] = {"operations", "graph"};
    for (int i = 0; i < 2; i++) {
        metrics_counter_call(metrics, "baton_engine_steps_total",
                             "Decode steps that the engine made, by how the device was asked for "
                             "them.",
                             METRIC_LABELS({"by", how[i]}), steps_value, &engine->n_steps[i]);
    }
    pool_register(engine->pool, metrics);
}

void engine_page_sending(struct engine *engine, uint32_t page)
{
    pool_page_sending(engine->pool, page);
}

void engine_page_sent(struct engine *engine, uint32_t page)
{
    pool_page_sent(engine->pool, page);
}

uint8_t *engine_page_address(const struct engine *engine, uint32_t page)
{
    return engine->ops->page_address ? engine->ops->page_address(engine, page)
                                     : pool_page(engine->pool, page);
}

enum status engine_page_copy(struct engine *engine, uint32_t dst, uint32_t src)
{
    if (engine->ops->page_copy) {
        return engine->ops->page_copy(engine, dst, src);
    }
    memcpy(pool_page(engine->pool, dst), pool_page(engine->pool, src), engine->info.page_bytes);
    return STATUS_OK;
}

enum status engine_page_read(struct engine *engine, uint32_t page, void *ret_bytes)
{
    if (engine->ops->page_read) {
        return engine->ops->page_read(engine, page, ret_bytes);
    }
    memcpy(ret_bytes, pool_page(engine->pool, page), engine->info.page_bytes);
    return STATUS_OK;
}

enum status engine_share(struct engine *engine, void *memory, size_t bytes, struct error *err)
{
    return engine->ops->share ? engine->ops->share(engine, memory, bytes, err) : STATUS_OK;
}

void engine_unshare(struct engine *engine, void *memory)
{
    if (engine->ops->unshare) {
        engine->ops->unshare(engine, memory);
    }
}

enum status engine_device_alloc(struct engine *engine, size_t bytes, uint8_t **ret_memory,
                                enum engine_memory_kind *ret_kind, struct error *err)
{
    if (!engine->ops->device_alloc) {
        return error_set(err, STATUS_UNSUPPORTED, "%s has no memory but the host's",
                         engine->info.device_name);
    }
    return engine->ops->device_alloc(engine, bytes, ret_memory, ret_kind, err);
}

void engine_device_attach(struct engine *engine)
{
    if (engine->ops->device_attach) {
        engine->ops->device_attach(engine);
    }
}

enum status engine_device_move(struct engine *engine, void *dst, const void *src, size_t bytes)
{
    return engine->ops->device_move ? engine->ops->device_move(engine, dst, src, bytes)
                                    : STATUS_UNSUPPORTED;
}

enum status engine_device_sum(struct engine *engine, uint64_t transfer_id, uint32_t parcel_seq,
                              const struct parcel_piece *pieces, uint32_t n_pieces,
                              uint64_t *ret_checksum)
{
    return engine->ops->device_sum ? engine->ops->device_sum(engine, transfer_id, parcel_seq,
                                                             pieces, n_pieces, ret_checksum)
                                   : STATUS_UNSUPPORTED;
}

enum status engine_prefill(struct engine *engine, struct engine_seq *seq, const uint32_t *ids,
                           uint32_t n_ids, struct engine_row *row, const _Atomic bool *cancel,
                           const struct engine_pieces *pieces)
{
    if (engine->n_begun || n_ids == 0 || n_ids > engine->info.max_chunk_tokens ||
        engine_pages_for(engine, seq->n_tokens + n_ids) > seq->n_pages) {
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < n_ids; i++) {
        if (ids[i] >= engine->info.vocab_size) {
            return STATUS_INVALID;
        }
    }
    enum status status = engine->ops->prefill(engine, seq, ids, n_ids, row, cancel, pieces);
    if (!status) {
        seq->n_tokens += n_ids;
    }
    engine_tick(engine);
    return status;
}

bool engine_looks_ahead(const struct engine *engine)
{
    return engine->lookahead;
}

bool engine_draws_there(const struct engine *engine, const struct engine_sampling *sampling,
                        uint32_t n_generated)
{
    return engine->draws && sampler_can_be_there(sampling, n_generated);
}

uint32_t engine_n_begun(const struct engine *engine)
{
    return engine->n_begun;
}

/* Whether the host has nothing to do for the row when its step is over but to take the id. */
static bool is_drawn_there(const struct engine *engine, const struct engine_row *row)
{
    return !row->logits &&
           (!row->sampling || engine_draws_there(engine, row->sampling, row->n_generated));
}

/* Whether the row's token is known, or is what a row of the step before draws. */
static bool has_token(const struct engine *engine, const struct engine_row *row)
{
    const struct engine_begun *before = &engine->begun[0];
    if (row->follows == 0) {
        return row->token < engine->info.vocab_size && atomic_load(&row->seq->n_begun) == 0;
    }
    return engine->n_begun == 1 && row->follows <= before->n_rows &&
           before->rows[row->follows - 1].seq == row->seq &&
           before->rows[row->follows - 1].sampling;
}

static enum status step_begin(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    bool fits = n_rows > 0 && n_rows <= engine->info.max_batch_rows && engine->n_begun < 2;
    for (uint32_t i = 0; fits && engine->n_begun && i < engine->begun[0].n_rows; i++) {
        fits = is_drawn_there(engine, &engine->begun[0].rows[i]);
    }
    for (uint32_t i = 0; fits && i < n_rows; i++) {
        fits = has_token(engine, &rows[i]) &&
               engine_pages_for(engine, rows[i].seq->n_tokens + 1) <= rows[i].seq->n_pages;
    }
    enum status status = fits ? engine->ops->step_begin(engine, rows, n_rows) : STATUS_INVALID;
    if (status) {
        return status;
    }
    engine->begun[engine->n_begun++] = (struct engine_begun){rows, n_rows};
    for (uint32_t i = 0; i < n_rows; i++) {
        rows[i].seq->n_tokens++;
        atomic_fetch_add(&rows[i].seq->n_begun, 1);
    }
    return STATUS_OK;
}

static enum status step_end(struct engine *engine)
{
    const struct engine_begun over = engine->begun[0];
    for (uint32_t i = 0; i < over.n_rows; i++) {
        history_append(over.rows[i].seq, over.rows[i].token);
    }
    enum status status = engine->ops->step_end(engine, over.rows, over.n_rows);
    engine->begun[0] = engine->begun[1];
    engine->n_begun--;
    for (uint32_t i = 0; i < over.n_rows; i++) {
        atomic_fetch_sub(&over.rows[i].seq->n_begun, 1);
    }
    for (uint32_t i = 0; engine->n_begun && i < engine->begun[0].n_rows; i++) {
        struct engine_row *row = &engine->begun[0].rows[i];
        if (row->follows) {
            row->token = over.rows[row->follows - 1].draw.id;
            row->follows = 0;
        }
    }
    if (!status) {
        atomic_fetch_add_explicit(&engine->n_steps[engine->by_graph], 1, memory_order_relaxed);
    }
    engine_tick(engine);
    return status;
}

enum status engine_step_begin(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    return engine->lookahead ? step_begin(engine, rows, n_rows) : STATUS_INVALID;
}

enum status engine_step_end(struct engine *engine)
{
    return engine->n_begun ? step_end(engine) : STATUS_INVALID;
}

enum status engine_step(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    if (engine->draws) {
        enum status begun = engine->n_begun ? STATUS_INVALID : step_begin(engine, rows, n_rows);
        return begun ? begun : step_end(engine);
    }
    if (n_rows == 0 || n_rows > engine->info.max_batch_rows) {
        return STATUS_INVALID;
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        struct engine_seq *seq = rows[i].seq;
        if (rows[i].token >= engine->info.vocab_size ||
            engine_pages_for(engine, seq->n_tokens + 1) > seq->n_pages) {
            return STATUS_INVALID;
        }
        history_append(seq, rows[i].token);
    }
    enum status status = engine->ops->step(engine, rows, n_rows);
    if (!status) {
        atomic_fetch_add_explicit(&engine->n_steps[engine->by_graph], 1, memory_order_relaxed);
    }
    for (uint32_t i = 0; !status && i < n_rows; i++) {
        rows[i].seq->n_tokens++;
    }
    engine_tick(engine);
    return status;
}

enum status engine_draw_again(struct engine *engine, struct engine_seq *seq,
                              const struct engine_sampling *sampling, uint32_t n_generated,
                              struct engine_draw *ret_draw)
{
    return engine->ops->draw_again(engine, seq, sampling, n_generated, ret_draw);
}

size_t engine_tail_bytes(const struct engine *engine, uint32_t n_tokens)
{
    return engine->ops->tail_bytes(engine, n_tokens);
}

enum status engine_tail_write(struct engine *engine, struct engine_seq *seq, void *dst,
                              size_t dst_bytes)
{
    if (engine->n_begun) {
        return STATUS_INVALID;
    }
    if (dst_bytes < engine_tail_bytes(engine, seq->n_tokens)) {
        return STATUS_TOO_LARGE;
    }
    return engine->ops->tail_write(engine, seq, dst);
}

enum status engine_accept_parcel(struct engine *engine, uint64_t transfer_id, uint32_t parcel_seq,
                                 const struct parcel_piece *pieces, uint32_t n_pieces,
                                 uint64_t expected_checksum)
{
    return engine->ops->accept_parcel
               ? engine->ops->accept_parcel(engine, transfer_id, parcel_seq, pieces, n_pieces,
                                            expected_checksum)
               : accept_parcel(transfer_id, parcel_seq, pieces, n_pieces, expected_checksum);
}

enum status engine_tail_read(struct engine *engine, struct engine_seq *seq, uint32_t n_tokens,
                             const void *src, size_t src_bytes)
{
    if (seq->n_tokens != 0 || engine_pages_for(engine, n_tokens) > seq->n_pages ||
        src_bytes != engine_tail_bytes(engine, n_tokens)) {
        return STATUS_CORRUPT;
    }
    enum status status = engine->ops->tail_read(engine, seq, n_tokens, src);
    if (!status) {
        seq->n_tokens = n_tokens;
    }
    return status;
}
