/* The engine without arithmetic: see sim.h for what it computes.
 *
 * Owns one prefix hash a slot, and the script. Its invariant is its purpose: the bytes of page i of
 * a sequence are sim_image(prefix after 256 (i + 1) ids), those of the partial page and the tail
 * sim_image(prefix after all ids), so a receiver that knows the prompt recomputes every byte. A
 * wrong byte is STATUS_CORRUPT and a log line, never a token.
 *
 * Time is slept on the compute thread in slices of at most 5 ms, and every slice ticks the progress
 * counter and looks at the cancel flag, as the layers of a model would.
 */
#include "engine/sim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "engine/engine_ops.h"
#include "engine/sampler.h"
#include "engine/sim_script.h"

enum { SIM_PAGE_TOKENS = 256, SIM_SLICE_US = 5000, SIM_FIRST_ID = 3, SIM_N_PLAIN_IDS = 94 };

struct sim {
    double prefill_tokens_per_s, step_ms;
    uint64_t *prefixes; /* a slot */
    struct sim_script *script;
};

uint64_t sim_prefix_next(uint64_t prefix, uint32_t id)
{
    uint64_t z = (prefix ^ id) * 0x9e3779b97f4a7c15u;
    return z ^ (z >> 29) ^ (z << 31);
}

/* Printable ASCII in DeepSeek's vocabulary and in every one that orders its byte alphabet the same
 * way: whatever is sampled can be shown, and never ends a sequence. */
uint32_t sim_token(uint64_t prefix, uint32_t vocab_size)
{
    uint32_t n_plain = vocab_size > SIM_FIRST_ID + SIM_N_PLAIN_IDS ? SIM_N_PLAIN_IDS
                       : vocab_size > SIM_FIRST_ID                 ? vocab_size - SIM_FIRST_ID
                                                                   : 1;
    uint64_t z = (prefix ^ (prefix >> 32)) * 0xbf58476d1ce4e5b9u;
    return SIM_FIRST_ID % vocab_size + (uint32_t)((z >> 33) % n_plain);
}

static uint64_t image_word(uint64_t prefix, uint64_t i)
{
    return (prefix + i * 0x9e3779b97f4a7c15u) ^ (i << 17);
}

/* Bytes [from, to) of the image at dst. */
static void image_fill_part(uint8_t *dst, size_t from, size_t to, uint64_t prefix)
{
    for (size_t i = from / 8; i < to / 8; i++) {
        uint64_t word = image_word(prefix, i);
        memcpy(dst + 8 * i, &word, 8);
    }
}

void sim_image_fill(void *dst, size_t bytes, uint64_t prefix)
{
    image_fill_part(dst, 0, bytes, prefix);
}

size_t sim_image_check(const void *src, size_t bytes, uint64_t prefix)
{
    const uint8_t *at = src;
    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word;
        memcpy(&word, at + 8 * i, 8);
        if (word != image_word(prefix, i)) {
            return 8 * i;
        }
    }
    return bytes;
}

/* Sleeps `us`, ticking; CANCELLED as soon as the flag is seen. */
static enum status sim_sleep(struct engine *engine, double us, const _Atomic bool *cancel)
{
    for (;;) {
        engine_tick(engine);
        if (cancel && atomic_load_explicit(cancel, memory_order_relaxed)) {
            return STATUS_CANCELLED;
        }
        if (us <= 0) {
            return STATUS_OK;
        }
        double slice = us < SIM_SLICE_US ? us : SIM_SLICE_US;
        struct timespec wait = {.tv_nsec = (long)(slice * 1000)};
        nanosleep(&wait, NULL);
        us -= slice;
    }
}

static enum status sim_open(struct engine *engine, const struct engine_options *options,
                            struct error *err)
{
    struct engine_info *info = &engine->info;
    struct sim *sim = mem_zalloc(sizeof(*sim));
    sim->prefill_tokens_per_s = options->sim_prefill_tokens_per_s;
    sim->step_ms = options->sim_step_ms;
    info->model_name = "sim";
    info->device_name = "sim";
    info->vocab_size = options->sim_vocab_size ? options->sim_vocab_size : SIM_VOCAB_SIZE;
    info->n_layers = 43;
    info->page_tokens = SIM_PAGE_TOKENS;
    info->page_bytes = options->sim_page_bytes ? options->sim_page_bytes : SIM_PAGE_BYTES;
    info->tail_bytes = options->sim_tail_bytes ? options->sim_tail_bytes : SIM_TAIL_BYTES;
    info->max_context_tokens = options->max_context_tokens ? options->max_context_tokens : 1u << 20;
    info->max_chunk_tokens = options->max_chunk_tokens ? options->max_chunk_tokens : 2048;
    info->max_batch_rows = options->max_batch_rows ? options->max_batch_rows : 64;
    info->bos_id = 0;
    info->eos_id = 1;
    if (info->page_bytes % 4096 || info->tail_bytes % 8) {
        mem_free(sim);
        return error_set(err, STATUS_INVALID,
                         "sim page size %zu must be a multiple of 4096 and tail size %zu of 8",
                         info->page_bytes, info->tail_bytes);
    }
    char identity[160];
    snprintf(identity, sizeof(identity), "sim page %zu tail %zu vocab %" PRIu32, info->page_bytes,
             info->tail_bytes, info->vocab_size);
    uint64_t hash[2] = {SIM_PREFIX_START, ~SIM_PREFIX_START};
    for (const char *at = identity; *at; at++) {
        hash[0] = sim_prefix_next(hash[0], (uint8_t)*at);
        hash[1] = sim_prefix_next(hash[1], (uint8_t)*at);
    }
    memcpy(info->fingerprint, hash, ENGINE_FINGERPRINT_BYTES);
    if (options->sim_script) {
        enum status status =
            sim_script_open(options->sim_script, info->vocab_size, &sim->script, err);
        if (status) {
            mem_free(sim);
            return status;
        }
    }
    engine->impl = sim;
    return STATUS_OK;
}

static enum status sim_ready(struct engine *engine, struct error *err)
{
    struct sim *sim = engine->impl;
    sim->prefixes = mem_array(engine->info.max_sequences, sizeof(uint64_t));
    return STATUS_OK;
}

static void sim_close(struct engine *engine)
{
    struct sim *sim = engine->impl;
    if (sim) {
        sim_script_close(sim->script);
        mem_free(sim->prefixes);
        mem_free(sim);
    }
}

static void sim_slot_reset(struct engine *engine, struct engine_seq *seq)
{
    struct sim *sim = engine->impl;
    sim->prefixes[seq->slot] = SIM_PREFIX_START;
}

static enum status sim_slot_copy(struct engine *engine, struct engine_seq *dst,
                                 const struct engine_seq *src)
{
    struct sim *sim = engine->impl;
    sim->prefixes[dst->slot] = sim->prefixes[src->slot];
    return STATUS_OK;
}

/* The token after the sequence as it stands, `n_generated` having been generated before it. */
static double sim_draw(struct engine *engine, const struct engine_seq *seq,
                       const struct engine_sampling *sampling, uint32_t n_generated,
                       struct engine_draw *draw)
{
    struct sim *sim = engine->impl;
    uint64_t prefix = sim->prefixes[seq->slot];
    double pause_ms = 0;
    if (sampling->temperature > 0) {
        prefix ^= sampling->seed * 0xd1342543de82ef95u;
    }
    draw->id = sim_token(prefix, engine->info.vocab_size);
    if (sim->script && seq->history) {
        sim_script_next(sim->script, seq->history, seq->n_history - seq->n_history_generated,
                        n_generated, engine->info.eos_id, &draw->id, &pause_ms);
    }
    draw->n_top = 0;
    draw->logprob = 0;
    if (sampling->want_logprobs) {
        /* A believable distribution: the drawn id at 1/2, its neighbours at 1/4, 1/8, ... */
        draw->logprob = -0.6931472f;
        draw->n_top = sampling->n_top_logprobs;
        for (uint32_t i = 0; i < draw->n_top; i++) {
            draw->top[i].id = (draw->id + i) % engine->info.vocab_size;
            draw->top[i].logprob = -0.6931472f * (float)(i + 1);
        }
    }
    return pause_ms;
}

/* Bytes [from, to) of every page that the ids complete. Returns the prefix after them. */
static uint64_t fill_pages(struct engine *engine, struct engine_seq *seq, const uint32_t *ids,
                           uint32_t n_ids, size_t from, size_t to)
{
    struct sim *sim = engine->impl;
    uint64_t prefix = sim->prefixes[seq->slot];
    for (uint32_t i = 0; i < n_ids; i++) {
        prefix = sim_prefix_next(prefix, ids[i]);
        uint32_t position = seq->n_tokens + i;
        if (position % SIM_PAGE_TOKENS == SIM_PAGE_TOKENS - 1) {
            image_fill_part(pool_page(engine->pool, seq->pages[position / SIM_PAGE_TOKENS]), from,
                            to, prefix);
        }
    }
    return prefix;
}

static enum status sim_prefill(struct engine *engine, struct engine_seq *seq, const uint32_t *ids,
                               uint32_t n_ids, struct engine_row *row, const _Atomic bool *cancel,
                               const struct engine_pieces *pieces)
{
    struct sim *sim = engine->impl;
    uint32_t n_pieces = pieces ? pieces->n_pieces : 1;
    size_t page_bytes = engine->info.page_bytes, from = 0;
    double us = sim->prefill_tokens_per_s > 0 ? n_ids * 1e6 / sim->prefill_tokens_per_s : 0;
    uint64_t prefix = 0;
    for (uint32_t i = 1; i <= n_pieces; i++) {
        size_t to = i == n_pieces ? page_bytes : from + (page_bytes / n_pieces + 7) / 8 * 8;
        enum status status = sim_sleep(engine, us / n_pieces, cancel);
        if (status) {
            return status;
        }
        prefix = fill_pages(engine, seq, ids, n_ids, from, to);
        if (i < n_pieces) {
            pieces->ready(pieces->cookie, to);
        }
        from = to;
    }
    sim->prefixes[seq->slot] = prefix;
    if (row && row->logits) {
        memset(row->logits, 0, engine->info.vocab_size * sizeof(float));
        row->logits[sim_token(prefix, engine->info.vocab_size)] = 1;
    }
    if (row && row->sampling) {
        double pause_ms = sim_draw(engine, seq, row->sampling, row->n_generated, &row->draw);
        return sim_sleep(engine, pause_ms * 1000, cancel);
    }
    return STATUS_OK;
}

static enum status sim_step(struct engine *engine, struct engine_row *rows, uint32_t n_rows)
{
    struct sim *sim = engine->impl;
    double wait_ms = sim->step_ms;
    for (uint32_t i = 0; i < n_rows; i++) {
        struct engine_row *row = &rows[i];
        uint64_t *prefix = &sim->prefixes[row->seq->slot];
        *prefix = sim_prefix_next(*prefix, row->token);
        if (row->sampling) {
            double pause_ms =
                sim_draw(engine, row->seq, row->sampling, row->n_generated, &row->draw);
            wait_ms = pause_ms > wait_ms ? pause_ms : wait_ms;
        }
    }
    return sim_sleep(engine, wait_ms * 1000, NULL);
}

static enum status sim_draw_again(struct engine *engine, struct engine_seq *seq,
                                  const struct engine_sampling *sampling, uint32_t n_generated,
                                  struct engine_draw *ret_draw)
{
    sim_draw(engine, seq, sampling, n_generated, ret_draw);
    return STATUS_OK;
}

static size_t sim_tail_bytes(const struct engine *engine, uint32_t n_tokens)
{
    return engine->info.tail_bytes;
}

static enum status sim_tail_write(struct engine *engine, struct engine_seq *seq, void *dst)
{
    struct sim *sim = engine->impl;
    uint64_t prefix = sim->prefixes[seq->slot];
    if (seq->n_tokens % SIM_PAGE_TOKENS) {
        sim_image_fill(pool_page(engine->pool, seq->pages[seq->n_tokens / SIM_PAGE_TOKENS]),
                       engine->info.page_bytes, prefix);
    }
    sim_image_fill(dst, engine->info.tail_bytes, prefix);
    return STATUS_OK;
}

static enum status sim_tail_read(struct engine *engine, struct engine_seq *seq, uint32_t n_tokens,
                                 const void *src)
{
    struct sim *sim = engine->impl;
    if (!seq->history || seq->n_history < n_tokens) {
        return STATUS_INVALID;
    }
    uint64_t prefix = SIM_PREFIX_START;
    for (uint32_t i = 0; i < n_tokens; i++) {
        prefix = sim_prefix_next(prefix, seq->history[i]);
        if (i % SIM_PAGE_TOKENS != SIM_PAGE_TOKENS - 1 && i != n_tokens - 1) {
            continue;
        }
        uint32_t page_i = i / SIM_PAGE_TOKENS;
        const uint8_t *image = pool_page(engine->pool, seq->pages[page_i]);
        size_t right = sim_image_check(image, engine->info.page_bytes, prefix);
        if (right != engine->info.page_bytes) {
            log_error("sim",
                      "page %" PRIu32 " of sequence %016" PRIx64 " is wrong from byte %zu on",
                      page_i, seq->owner, right);
            return STATUS_CORRUPT;
        }
        engine_tick(engine);
    }
    size_t right = sim_image_check(src, engine->info.tail_bytes, prefix);
    if (right != engine->info.tail_bytes) {
        log_error("sim", "tail of sequence %016" PRIx64 " is wrong from byte %zu on", seq->owner,
                  right);
        return STATUS_CORRUPT;
    }
    sim->prefixes[seq->slot] = prefix;
    return STATUS_OK;
}

const struct engine_ops engine_sim_ops = {
    .kind = "sim",
    .open = sim_open,
    .ready = sim_ready,
    .close = sim_close,
    .slot_reset = sim_slot_reset,
    .slot_copy = sim_slot_copy,
    .prefill = sim_prefill,
    .step = sim_step,
    .draw_again = sim_draw_again,
    .tail_bytes = sim_tail_bytes,
    .tail_write = sim_tail_write,
    .tail_read = sim_tail_read,
};
