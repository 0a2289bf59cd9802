/* engine/engine_ops.h - what stands behind engine.h: the table an engine fills, and the sequence
 * all engines share.
 *
 * engine.c owns sequences, the page pool and the slots, checks arguments, and calls through the
 * table; an engine ("model", "sim") owns its weights and the contents of pages and slots. To add
 * one: write the table below, give it a name in engine.c. Included by engine/ only.
 */
#ifndef BATON_ENGINE_ENGINE_OPS_H
#define BATON_ENGINE_ENGINE_OPS_H

#include "engine/engine.h"
#include "engine/pool.h"

/* Owner: engine.c. Thread: loop, but for a compute call that was given it. */
struct engine_seq {
    struct engine *engine;
    uint64_t owner;
    uint32_t slot; /* window and state slot, 0 .. max_sequences-1 */
    uint32_t n_tokens;
    uint32_t n_pages;
    uint32_t *pages; /* page id of tokens [256 i, 256 i + 256) */
    uint32_t pages_capacity;
    uint32_t *history; /* ids so far, or NULL before engine_seq_history_set; room for all tokens
                          that pages are reserved for */
    uint32_t history_capacity;
    uint32_t n_history; /* of these the last n_history_generated were generated */
    uint32_t n_history_generated;
    _Atomic uint32_t n_begun; /* steps begun and not ended that it is in */
    uint32_t *counts; /* penalties: vocab_size words, bit 31 = seen in the prompt, low bits = times
                         generated; made on need */
};

struct engine_ops {
    const char *kind;
    /* Fills engine->info (all but n_pages/max_sequences/pool_base, which engine.c takes from the
     * options), engine->pool_is_apart, engine->draws and engine->impl. */
    enum status (*open)(struct engine *engine, const struct engine_options *options,
                        struct error *err);
    /* Called once pool and slots exist (info.pool_base set). May be NULL. */
    enum status (*ready)(struct engine *engine, struct error *err);
    void (*close)(struct engine *engine);
    /* As in engine.h; NULL where steps are never recorded. */
    void (*graphs_report)(const struct engine *engine, struct engine_graphs *ret_graphs);
    void (*graphs_use)(struct engine *engine, bool use);
    void (*memory_report)(const struct engine *engine,
                          void (*line)(void *cookie, const char *item, size_t bytes), void *cookie);
    /* A slot starts at 0 tokens: window empty, K 0, S -inf. Loop thread; where the slot is a
     * device's, an engine may leave it to the first compute call. */
    void (*slot_reset)(struct engine *engine, struct engine_seq *seq);
    /* Fork: dst's slot becomes a copy of src's. */
    enum status (*slot_copy)(struct engine *engine, struct engine_seq *dst,
                             const struct engine_seq *src);
    /* As in engine.h; all NULL where pages are host memory, in the pool. */
    uint8_t *(*page_address)(const struct engine *engine, uint32_t page);
    enum status (*page_copy)(struct engine *engine, uint32_t dst, uint32_t src);
    enum status (*page_read)(struct engine *engine, uint32_t page, void *ret_bytes);
    enum status (*accept_parcel)(struct engine *engine, uint64_t transfer_id, uint32_t parcel_seq,
                                 const struct parcel_piece *pieces, uint32_t n_pieces,
                                 uint64_t expected_checksum);
    enum status (*share)(struct engine *engine, void *memory, size_t bytes, struct error *err);
    void (*unshare)(struct engine *engine, void *memory);
    /* As in engine.h; all NULL where no device has memory of its own. */
    enum status (*device_alloc)(struct engine *engine, size_t bytes, uint8_t **ret_memory,
                                enum engine_memory_kind *ret_kind, struct error *err);
    void (*device_attach)(struct engine *engine);
    enum status (*device_move)(struct engine *engine, void *dst, const void *src, size_t bytes);
    enum status (*device_sum)(struct engine *engine, uint64_t transfer_id, uint32_t parcel_seq,
                              const struct parcel_piece *pieces, uint32_t n_pieces,
                              uint64_t *ret_checksum);
    /* As in engine.h. n_tokens of the sequence is advanced by engine.c after success; inside the
     * call the position of ids[0] is seq->n_tokens. Draws go through sampler.h. */
    enum status (*prefill)(struct engine *engine, struct engine_seq *seq, const uint32_t *ids,
                           uint32_t n_ids, struct engine_row *row, const _Atomic bool *cancel,
                           const struct engine_pieces *pieces);
    enum status (*step)(struct engine *engine, struct engine_row *rows, uint32_t n_rows);
    /* A step in two parts, where engine->draws; else NULL. The begin is asked with n_tokens as
     * before, the end, of the oldest, finds it advanced; `step` is not asked then. */
    enum status (*step_begin)(struct engine *engine, struct engine_row *rows, uint32_t n_rows);
    enum status (*step_end)(struct engine *engine, struct engine_row *rows, uint32_t n_rows);
    enum status (*draw_again)(struct engine *engine, struct engine_seq *seq,
                              const struct engine_sampling *sampling, uint32_t n_generated,
                              struct engine_draw *ret_draw);
    size_t (*tail_bytes)(const struct engine *engine, uint32_t n_tokens);
    enum status (*tail_write)(struct engine *engine, struct engine_seq *seq, void *dst);
    enum status (*tail_read)(struct engine *engine, struct engine_seq *seq, uint32_t n_tokens,
                             const void *src);
};

struct engine {
    const struct engine_ops *ops;
    struct engine_info info;
    struct pool *pool;
    bool pool_is_apart; /* pages lie in a device and none is sent: the pool has no memory */
    _Atomic uint64_t *progress;
    bool draws;     /* the device draws, steps are begun and ended; fixed by open */
    bool lookahead; /* two of them at a time */
    struct engine_begun {
        struct engine_row *rows;
        uint32_t n_rows;
    } begun[2]; /* the older first; compute thread */
    uint32_t n_begun;
    bool by_graph;               /* how the engine behind makes its steps; compute thread */
    _Atomic uint64_t n_steps[2]; /* asked for one operation at a time, and by graph */
    void *impl;
};

/* Counts for sampler.h, made at the first draw that needs them; NULL without a history. Compute
 * thread. */
const uint32_t *engine_seq_counts(struct engine_seq *seq);

extern const struct engine_ops engine_model_ops; /* engine/model_engine.c */
extern const struct engine_ops engine_sim_ops;   /* engine/sim.c */

static inline void engine_tick(struct engine *engine)
{
    if (engine->progress) {
        atomic_fetch_add_explicit(engine->progress, 1, memory_order_relaxed);
    }
}

#endif
