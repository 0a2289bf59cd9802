/* node/batcher.h - what the compute thread does next: decode steps, and prompt chunks between
 * them.
 *
 * Owns the one compute thread of a node (a prefill node has prompts only) and the order of its
 * work. Rows (samples being generated) join and leave between steps; prompts prefilled here are cut
 * into chunks by engine/prompt. Between two steps at most one chunk's tokens are computed, of one
 * long or of several short prompts, and chunks get at most `prefill_share` of the time while rows
 * are waiting for steps; with no row to step they get all of it.
 *
 * With an engine that looks ahead a step is begun while the one before it runs, on the assumption
 * that every row goes on. What that assumption costs is a row too many where one ended by what it
 * drew or was removed: its draw is dropped, and until that step is over the row stays where a row
 * in a step is. Nothing else differs: the tokens that are told, and who is told them.
 *
 * Thread: loop. Every callback runs from the event loop, never inside a call. Owner of rows and
 * prompts: the caller; while linked here they may not be freed. Bounds: the caller's admission.
 */
#ifndef BATON_NODE_BATCHER_H
#define BATON_NODE_BATCHER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/loop.h"
#include "engine/engine.h"
#include "engine/prompt.h"

struct batcher;

/* One sample. The caller fills the first block and adds it. */
struct batch_row {
    struct engine_seq *seq;
    const struct engine_sampling *sampling;
    uint32_t token;       /* drawn last, not yet in the sequence */
    uint32_t n_generated; /* with `token` */
    void *cookie;
    /* the batcher's own */
    struct list link;
    bool joined, paused, leaving;
    uint32_t n_begun; /* steps begun and not over that hold its sequence */
};

/* One prompt to be prefilled here: ids are borrowed until it ended. */
struct batch_prompt {
    struct engine_seq *seq;
    const uint32_t *ids;
    uint32_t n_ids;
    const struct engine_sampling *sampling;
    uint32_t n_generated;
    void *cookie;
    /* the batcher's own */
    struct prompt prompt;
    _Atomic bool cancelled;
    bool joined, running, leaving;
};

struct batcher_events {
    /* A row's next token. The row may be removed or paused here. */
    void (*token)(void *cookie, struct batch_row *row, const struct engine_draw *draw);
    /* All tokens of a step have been told: the moment to send. */
    void (*step_done)(void *cookie);
    /* batcher_row_remove answered false; now the row and its sequence are the caller's again. */
    void (*row_released)(void *cookie, struct batch_row *row);
    /* Asked with an engine that looks ahead, of a row in the step that runs: does it go on after
     * the token drawn there, whichever it is? False if that is its last by length, or if it would
     * be paused then. NULL: it does. */
    bool (*goes_on)(void *cookie, const struct batch_row *row);
    /* No page is free for `row`'s next token. Free some (end rows; nothing is stepping now) and
     * answer true, or answer false: the row is then paused until somebody frees pages and unpauses
     * it. */
    bool (*short_of_pages)(void *cookie, struct batch_row *row);
    /* The prompt's first chunk goes to the compute thread now; may be NULL. The prompt may not be
     * removed here. */
    void (*prompt_started)(void *cookie, struct batch_prompt *prompt);
    /* Into how many pieces should the pages that the prompt's last chunk completes be cut, so that
     * they can leave while it computes? < 2: none. May be NULL. */
    uint32_t (*plan_pieces)(void *cookie, const struct batch_prompt *prompt, uint32_t n_tokens);
    /* While the last chunk runs: the first page_bytes bytes of the pages that it completes are
     * final. The latest word only, if the loop was late. May be NULL if plan_pieces is. */
    void (*prompt_pieces)(void *cookie, struct batch_prompt *prompt, size_t page_bytes);
    /* A chunk is done, n_done tokens of the prompt so far. */
    void (*prompt_progress)(void *cookie, struct batch_prompt *prompt, uint32_t n_done);
    /* The prompt ended: OK with the first draw, CANCELLED (after batcher_prompt_remove answered
     * false), or an error of the engine. It is the caller's again; further draws (samples 1..n-1)
     * may be made inside with engine_draw_again. */
    void (*prompt_done)(void *cookie, struct batch_prompt *prompt, enum status status,
                        const struct engine_draw *draw);
    /* The engine failed a step: nothing in it can be trusted. The node must end. */
    void (*broken)(void *cookie, enum status status);
};

struct batcher_options {
    double prefill_share; /* 0 .. 1 */
    uint32_t max_rows;    /* of one step */
};

/* What /metrics and Status show. */
struct batcher_stats {
    uint64_t n_steps, n_step_rows, n_chunks, n_chunk_tokens;
    uint64_t n_ahead;           /* steps that were begun before the one before was over */
    uint64_t n_too_many;        /* rows of steps whose draw nobody wanted any more */
    uint64_t step_ns, chunk_ns; /* time spent in each */
    uint64_t max_gap_ns; /* longest time between the starts of two successive steps while a row was
                            waiting */
    uint32_t rows, rows_paused, prompts;
    uint64_t prompt_tokens_left;
    const char *running; /* "step", "chunk" or "idle" */
    uint64_t running_since_ns;
    double tokens_per_s_prefill; /* decayed mean of chunks; 0 before the first */
    double step_s;               /* decayed mean of steps */
};

must_check enum status batcher_create(struct loop *loop, struct engine *engine,
                                      const struct batcher_options *options,
                                      const struct batcher_events *events, void *cookie,
                                      struct batcher **ret_batcher);
/* Waits for the unit in flight. Rows and prompts still linked are forgotten. NULL is fine. */
void batcher_free(struct batcher *batcher);

void batcher_row_add(struct batcher *batcher, struct batch_row *row);
/* True: the row is the caller's again. False: it is in a step that runs, or that was begun behind
 * it; row_released follows when the last of them is over, and no token does. */
bool batcher_row_remove(struct batcher *batcher, struct batch_row *row);
/* A paused row keeps its place and pages and is in no step. */
void batcher_row_pause(struct batcher *batcher, struct batch_row *row, bool paused);

void batcher_prompt_add(struct batcher *batcher, struct batch_prompt *prompt);
/* True: it is the caller's again. False: its chunk is running; prompt_done with CANCELLED follows.
 */
bool batcher_prompt_remove(struct batcher *batcher, struct batch_prompt *prompt);

/* Runs `run` on the compute thread between two units, then `done` on the loop: for calls of
 * engine.h that need the compute thread (engine_tail_read of a large tail). */
must_check enum status batcher_call(struct batcher *batcher, void (*run)(void *cookie),
                                    void (*done)(void *cookie), void *cookie);

void batcher_stats(const struct batcher *batcher, struct batcher_stats *ret_stats);

#endif
