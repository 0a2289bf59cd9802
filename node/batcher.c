/* Continuous batching: see batcher.h for the policy.
 *
 * One unit of work is in flight at a time: a step, a chunk or a call. Everything that joins, leaves
 * or pauses does so on the loop; the unit holds copies of what the compute thread needs, so the
 * lists may change under it. The invariant: a row is in exactly one of active, paused or nowhere,
 * and n_begun counts the steps begun and not over that hold its sequence, so that nobody gets it
 * back, and with it its pages, before it is 0.
 *
 * Looking ahead, a unit begins a step and then ends the one before it, which was begun in the unit
 * before: while it waits for that one the device already has the next, and while the loop tells the
 * tokens of the one that ended, the device computes. Rows of the next whose token isn't known
 * follow their row of the one that runs. Only where that can't be done is a step ended without
 * another (a drain), and the choice is then made as if nobody had looked ahead: before chunks and
 * calls; when a row of the step that runs is drawn by the host; and when pages run short, so that
 * what is taken from whom is decided with every token known.
 *
 * Choice is made in one place (schedule), deferred to the end of a loop turn, so that all rows that
 * join in one turn are in the same step.
 */
#include "node/batcher.h"

#include <assert.h>
#include <string.h>

#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/workers.h"

enum unit_kind { UNIT_NONE, UNIT_STEP, UNIT_CHUNK, UNIT_CALL };

/* Shares are taken over about the last second: long enough to smooth single chunks, short enough to
 * forget a burst. */
enum { SHARE_WINDOW_MS = 1000, MAX_CALLS = 256 };

struct call {
    struct list link;
    void (*run)(void *cookie);
    void (*done)(void *cookie);
    void *cookie;
};

/* The rows of a step, max_rows at most. */
struct step {
    struct engine_row *rows;
    struct batch_row **members;
    uint32_t n_rows;
    bool is_hosts; /* the host draws a row: no step is begun before it is over */
};

struct unit {
    enum unit_kind kind;
    enum status status;
    uint64_t start_ns, end_ns;
    struct step *begins, *ends;  /* a step's: what it begins and what it ends; one may be NULL */
    struct batch_prompt *prompt; /* a chunk's */
    uint32_t n_tokens;
    struct engine_pieces pieces; /* n_pieces < 2: none */
    _Atomic size_t pieces_ready; /* bytes of a page, told by the compute thread */
    struct engine_row last;
    struct call *call;
};

struct batcher {
    struct loop *loop;
    struct engine *engine;
    struct workers *compute;
    struct mailbox *pieces; /* wakes the loop: the word itself is in the unit */
    struct batcher_options options;
    const struct batcher_events *events;
    void *cookie;
    struct list active, paused, calls;
    struct prompt_queue *prompts;
    struct unit unit;
    struct step steps[2];
    struct step *begun; /* in an earlier unit, and not ended: looking ahead only */
    uint32_t n_active, n_paused, n_calls;
    bool scheduled, broken;
    uint32_t n_tokens_since_step;         /* of prompts, computed since the last step */
    double step_share_ns, chunk_share_ns; /* decayed time of each kind */
    uint64_t share_ns, last_step_start_ns;
    struct batcher_stats stats;
};

static void schedule(void *cookie);

/* A word that comes late, when another unit runs, finds that one's bytes: none, or as true. */
static void on_pieces(void *cookie, void *message)
{
    struct batcher *batcher = cookie;
    struct unit *unit = &batcher->unit;
    if (unit->kind != UNIT_CHUNK || unit->prompt->leaving) {
        return;
    }
    size_t page_bytes = atomic_load(&unit->pieces_ready);
    if (page_bytes > 0) {
        batcher->events->prompt_pieces(batcher->cookie, unit->prompt, page_bytes);
    }
}

/* Compute thread. */
static void pieces_ready(void *cookie, size_t page_bytes)
{
    struct batcher *batcher = cookie;
    atomic_store(&batcher->unit.pieces_ready, page_bytes);
    /* Full: a word is on its way already, and will find these bytes. */
    enum status status = mailbox_post(batcher->pieces, batcher);
    (void)status;
}

static void schedule_soon(struct batcher *batcher)
{
    if (!batcher->scheduled && batcher->unit.kind == UNIT_NONE && !batcher->broken) {
        batcher->scheduled = true;
        loop_defer(batcher->loop, schedule, batcher);
    }
}

enum status batcher_create(struct loop *loop, struct engine *engine,
                           const struct batcher_options *options,
                           const struct batcher_events *events, void *cookie,
                           struct batcher **ret_batcher)
{
    const struct engine_info *info = engine_info(engine);
    struct workers *compute;
    enum status status = workers_create(loop, 1, 1, &compute);
    if (status) {
        return status;
    }
    struct batcher *batcher = mem_zalloc(sizeof(*batcher));
    status = mailbox_create(loop, 1, on_pieces, batcher, &batcher->pieces);
    if (status) {
        workers_free(compute);
        mem_free(batcher);
        return status;
    }
    batcher->loop = loop;
    batcher->engine = engine;
    batcher->compute = compute;
    batcher->options = *options;
    if (!batcher->options.max_rows || batcher->options.max_rows > info->max_batch_rows) {
        batcher->options.max_rows = info->max_batch_rows;
    }
    batcher->events = events;
    batcher->cookie = cookie;
    list_init(&batcher->active);
    list_init(&batcher->paused);
    list_init(&batcher->calls);
    batcher->prompts = prompt_queue_create(info->max_chunk_tokens, info->page_tokens);
    for (int i = 0; i < 2; i++) {
        struct step *step = &batcher->steps[i];
        step->rows = mem_array(batcher->options.max_rows, sizeof(*step->rows));
        step->members = mem_array(batcher->options.max_rows, sizeof(*step->members));
    }
    batcher->stats.running = "idle";
    batcher->stats.running_since_ns = loop_now_ns();
    *ret_batcher = batcher;
    return STATUS_OK;
}

void batcher_free(struct batcher *batcher)
{
    if (!batcher) {
        return;
    }
    loop_defer_cancel(batcher->loop, schedule, batcher);
    batcher->broken = true; /* what ends now starts nothing */
    workers_free(batcher->compute);
    while (engine_n_begun(batcher->engine)) { /* its sequences may be freed after this */
        enum status status = engine_step_end(batcher->engine);
        (void)status;
    }
    mailbox_free(batcher->pieces);
    list_for_each_safe(at, &batcher->calls)
    {
        mem_free(list_entry(at, struct call, link));
    }
    mem_free(batcher->unit.call);
    prompt_queue_free(batcher->prompts);
    for (int i = 0; i < 2; i++) {
        mem_free(batcher->steps[i].rows);
        mem_free(batcher->steps[i].members);
    }
    mem_free(batcher);
}

static void list_of(struct batcher *batcher, struct batch_row *row, bool add)
{
    uint32_t *n = row->paused ? &batcher->n_paused : &batcher->n_active;
    if (add) {
        list_push_back(row->paused ? &batcher->paused : &batcher->active, &row->link);
        ++*n;
    } else {
        list_remove(&row->link);
        --*n;
    }
}

void batcher_row_add(struct batcher *batcher, struct batch_row *row)
{
    assert(!row->joined);
    row->joined = true;
    row->leaving = row->paused = false;
    row->n_begun = 0;
    list_of(batcher, row, true);
    schedule_soon(batcher);
}

bool batcher_row_remove(struct batcher *batcher, struct batch_row *row)
{
    if (row->joined) {
        list_of(batcher, row, false);
        row->joined = false;
    }
    row->leaving = row->n_begun > 0;
    return row->n_begun == 0;
}

void batcher_row_pause(struct batcher *batcher, struct batch_row *row, bool paused)
{
    if (!row->joined || row->paused == paused) {
        return;
    }
    list_of(batcher, row, false);
    row->paused = paused;
    list_of(batcher, row, true);
    schedule_soon(batcher);
}

void batcher_prompt_add(struct batcher *batcher, struct batch_prompt *prompt)
{
    assert(!prompt->joined);
    memset(&prompt->prompt, 0, sizeof(prompt->prompt));
    prompt->prompt.n_total = prompt->n_ids;
    atomic_store(&prompt->cancelled, false);
    prompt->joined = true;
    prompt->running = prompt->leaving = false;
    prompt_queue_add(batcher->prompts, &prompt->prompt);
    schedule_soon(batcher);
}

bool batcher_prompt_remove(struct batcher *batcher, struct batch_prompt *prompt)
{
    if (prompt->running) {
        prompt->leaving = true;
        atomic_store(&prompt->cancelled, true);
        return false;
    }
    if (prompt->joined) {
        prompt_queue_remove(batcher->prompts, &prompt->prompt);
        prompt->joined = false;
    }
    return true;
}

enum status batcher_call(struct batcher *batcher, void (*run)(void *cookie),
                         void (*done)(void *cookie), void *cookie)
{
    if (batcher->n_calls >= MAX_CALLS) {
        return STATUS_EXHAUSTED;
    }
    struct call *call = mem_zalloc(sizeof(*call));
    call->run = run;
    call->done = done;
    call->cookie = cookie;
    list_push_back(&batcher->calls, &call->link);
    batcher->n_calls++;
    schedule_soon(batcher);
    return STATUS_OK;
}

/* Compute thread. A begin that fails leaves what was begun before it to batcher_free. */
static enum status run_step(struct engine *engine, const struct unit *unit)
{
    if (unit->begins == unit->ends) {
        return engine_step(engine, unit->begins->rows, unit->begins->n_rows);
    }
    enum status status = STATUS_OK;
    if (unit->begins) {
        status = engine_step_begin(engine, unit->begins->rows, unit->begins->n_rows);
    }
    return !status && unit->ends ? engine_step_end(engine) : status;
}

/* Compute thread. */
static void unit_run(void *cookie, struct workers_job *job)
{
    struct batcher *batcher = cookie;
    struct unit *unit = &batcher->unit;
    unit->start_ns = loop_now_ns();
    if (unit->kind == UNIT_STEP && FAULT_WAIT(COMPUTE_STEP) == FAULT_FAIL) {
        unit->status = STATUS_FATAL;
    } else if (unit->kind == UNIT_STEP) {
        unit->status = run_step(batcher->engine, unit);
    } else if (unit->kind == UNIT_CHUNK && FAULT_WAIT(COMPUTE_CHUNK) == FAULT_FAIL) {
        unit->status = STATUS_FATAL;
    } else if (unit->kind == UNIT_CHUNK) {
        struct batch_prompt *prompt = unit->prompt;
        uint32_t n_done = prompt->prompt.n_done;
        bool last = n_done + unit->n_tokens == prompt->n_ids;
        unit->status = engine_prefill(batcher->engine, prompt->seq, prompt->ids + n_done,
                                      unit->n_tokens, last ? &unit->last : NULL, &prompt->cancelled,
                                      unit->pieces.n_pieces > 1 ? &unit->pieces : NULL);
    } else {
        unit->call->run(unit->call->cookie);
    }
    unit->end_ns = loop_now_ns();
}

static void decayed_mean(double *mean, double value)
{
    *mean = *mean == 0 ? value : 0.8 * *mean + 0.2 * value;
}

static void account(struct batcher *batcher, enum unit_kind kind, uint64_t start_ns,
                    uint64_t end_ns)
{
    uint64_t spent_ns = end_ns - start_ns;
    if (end_ns - batcher->share_ns > SHARE_WINDOW_MS * NS_PER_MS) {
        batcher->step_share_ns /= 2;
        batcher->chunk_share_ns /= 2;
        batcher->share_ns = end_ns;
    }
    if (kind == UNIT_STEP && !batcher->unit.ends) {
        batcher->stats.step_ns += spent_ns; /* asked for, no more */
    } else if (kind == UNIT_STEP) {
        batcher->stats.n_steps++;
        batcher->stats.n_step_rows += batcher->unit.ends->n_rows;
        batcher->stats.step_ns += spent_ns;
        batcher->step_share_ns += (double)spent_ns;
        decayed_mean(&batcher->stats.step_s, (double)spent_ns * 1e-9);
    } else if (kind == UNIT_CHUNK) {
        batcher->stats.n_chunks++;
        batcher->stats.n_chunk_tokens += batcher->unit.n_tokens;
        batcher->stats.chunk_ns += spent_ns;
        batcher->chunk_share_ns += (double)spent_ns;
        if (spent_ns > 0) {
            decayed_mean(&batcher->stats.tokens_per_s_prefill,
                         batcher->unit.n_tokens * 1e9 / (double)spent_ns);
        }
    }
    if (kind == UNIT_STEP) {
        batcher->n_tokens_since_step = 0;
    } else if (kind == UNIT_CHUNK) {
        batcher->n_tokens_since_step += batcher->unit.n_tokens;
    }
}

static void finish_step(struct batcher *batcher, struct step *step)
{
    for (uint32_t i = 0; i < step->n_rows; i++) {
        struct batch_row *row = step->members[i];
        row->n_begun--;
        if (row->leaving) {
            batcher->stats.n_too_many++;
            if (row->n_begun == 0) {
                row->leaving = false;
                batcher->events->row_released(batcher->cookie, row);
            }
            continue;
        }
        row->token = step->rows[i].draw.id;
        row->n_generated++;
        /* More rows than a step holds: those that had their turn go to the back. */
        if (row->joined && !row->paused && batcher->n_active > batcher->options.max_rows) {
            list_of(batcher, row, false);
            list_of(batcher, row, true);
        }
        batcher->events->token(batcher->cookie, row, &step->rows[i].draw);
    }
    batcher->events->step_done(batcher->cookie);
}

static void finish_chunk(struct batcher *batcher, enum status status)
{
    struct batch_prompt *prompt = batcher->unit.prompt;
    prompt->running = false;
    if (prompt->leaving) {
        status = STATUS_CANCELLED;
    }
    if (!status) {
        prompt->prompt.n_done += batcher->unit.n_tokens;
        batcher->events->prompt_progress(batcher->cookie, prompt, prompt->prompt.n_done);
        if (prompt->leaving) {
            status = STATUS_CANCELLED;
        }
    }
    if (status || prompt->prompt.n_done == prompt->n_ids) {
        prompt_queue_remove(batcher->prompts, &prompt->prompt);
        prompt->joined = prompt->leaving = false;
        batcher->events->prompt_done(batcher->cookie, prompt, status, &batcher->unit.last.draw);
    }
}

static void unit_done(void *cookie)
{
    struct batcher *batcher = cookie;
    struct unit *unit = &batcher->unit;
    enum unit_kind kind = unit->kind;
    enum status status = unit->status;
    account(batcher, kind, unit->start_ns, unit->end_ns);
    unit->kind = UNIT_NONE;
    batcher->stats.running = "idle";
    batcher->stats.running_since_ns = unit->end_ns;
    if (kind == UNIT_STEP && status) {
        batcher->broken = true;
        log_error("batcher", "a decode step failed: %s", status_name(status));
        batcher->events->broken(batcher->cookie, status);
        return;
    }
    if (kind == UNIT_STEP) {
        batcher->begun = unit->begins != unit->ends ? unit->begins : NULL;
        if (unit->ends) {
            finish_step(batcher, unit->ends);
        }
    } else if (kind == UNIT_CHUNK) {
        finish_chunk(batcher, status);
    } else {
        struct call *call = unit->call;
        unit->call = NULL;
        call->done(call->cookie);
        mem_free(call);
    }
    schedule_soon(batcher);
}

static void unit_start(struct batcher *batcher, enum unit_kind kind, const char *name)
{
    batcher->unit.kind = kind;
    batcher->unit.status = STATUS_OK;
    batcher->stats.running = name;
    batcher->stats.running_since_ns = loop_now_ns();
    enum status status = workers_submit(batcher->compute, unit_run, unit_done, NULL, batcher, NULL);
    assert(status == STATUS_OK); /* one unit in flight, a queue of one */
    (void)status;
}

/* Makes sure that every row of the coming step has a page to write to. False: the lists changed,
 * choose anew. */
static bool reserve_pages(struct batcher *batcher)
{
    list_for_each(at, &batcher->active)
    {
        struct batch_row *row = list_entry(at, struct batch_row, link);
        if (engine_seq_reserve(row->seq, engine_seq_n_tokens(row->seq) + 1)) {
            if (!batcher->events->short_of_pages(batcher->cookie, row)) {
                batcher_row_pause(batcher, row, true);
            }
            return false;
        }
    }
    return true;
}

static void add_row(struct batcher *batcher, struct step *step, struct batch_row *row,
                    uint32_t follows)
{
    struct engine_row *next = &step->rows[step->n_rows];
    *next = (struct engine_row){.seq = row->seq,
                                .token = row->token,
                                .follows = follows,
                                .sampling = row->sampling,
                                .n_generated = row->n_generated + (follows > 0)};
    step->is_hosts =
        step->is_hosts || !engine_draws_there(batcher->engine, row->sampling, next->n_generated);
    step->members[step->n_rows++] = row;
    row->n_begun++;
}

static struct step *empty_step(struct batcher *batcher)
{
    struct step *step = &batcher->steps[batcher->begun == &batcher->steps[0]];
    step->n_rows = 0;
    step->is_hosts = false;
    return step;
}

static void submit_step(struct batcher *batcher, struct step *begins, struct step *ends)
{
    uint64_t now_ns = loop_now_ns();
    if (begins && batcher->last_step_start_ns &&
        now_ns - batcher->last_step_start_ns > batcher->stats.max_gap_ns) {
        batcher->stats.max_gap_ns = now_ns - batcher->last_step_start_ns;
    }
    batcher->last_step_start_ns = begins ? now_ns : batcher->last_step_start_ns;
    batcher->unit.begins = begins;
    batcher->unit.ends = ends;
    unit_start(batcher, UNIT_STEP, "step");
}

/* Which row of the step it is, from 1; 0: none. */
static uint32_t place_of(const struct step *step, const struct batch_row *row)
{
    for (uint32_t i = 0; i < step->n_rows && row->n_begun; i++) {
        if (step->members[i] == row) {
            return i + 1;
        }
    }
    return 0;
}

/* The rows of the step behind the one that was begun; false where none can be begun before that is
 * over. Pages that it reserves are the sequences' own, used or not. */
static bool choose_ahead(struct batcher *batcher, struct step *next)
{
    const struct step *begun = batcher->begun;
    if (begun->is_hosts) {
        return false;
    }
    list_for_each(at, &batcher->active)
    {
        struct batch_row *row = list_entry(at, struct batch_row, link);
        uint32_t follows = place_of(begun, row);
        if (next->n_rows == batcher->options.max_rows) {
            break;
        }
        if (follows && batcher->events->goes_on &&
            !batcher->events->goes_on(batcher->cookie, row)) {
            continue;
        }
        if (engine_seq_reserve(row->seq, engine_seq_n_tokens(row->seq) + 1)) {
            return false;
        }
        add_row(batcher, next, row, follows);
    }
    return next->n_rows > 0;
}

/* With a step begun: begins the next and ends that one; or, where that can't be, only ends it. */
static void start_ahead(struct batcher *batcher, bool drains)
{
    struct step *next = empty_step(batcher);
    if (drains || !choose_ahead(batcher, next)) {
        for (uint32_t i = 0; i < next->n_rows; i++) {
            next->members[i]->n_begun--;
        }
        submit_step(batcher, NULL, batcher->begun);
        return;
    }
    batcher->stats.n_ahead++;
    submit_step(batcher, next, batcher->begun);
}

static void start_step(struct batcher *batcher)
{
    struct step *step = empty_step(batcher);
    while (!reserve_pages(batcher)) {
        if (list_empty(&batcher->active)) {
            schedule_soon(batcher);
            return;
        }
    }
    list_for_each(at, &batcher->active)
    {
        add_row(batcher, step, list_entry(at, struct batch_row, link), 0);
        if (step->n_rows == batcher->options.max_rows) {
            break;
        }
    }
    bool stays_begun = engine_looks_ahead(batcher->engine) && !step->is_hosts;
    submit_step(batcher, step, stays_begun ? NULL : step);
}

/* How many prompt tokens may be computed before the next step. Short prompts share the room of one
 * chunk, or each of them would wait for a step of its own; what is left of it is used only if it
 * has room for a page, since chunks end with pages. */
static uint32_t chunk_room(const struct batcher *batcher)
{
    const struct engine_info *info = engine_info(batcher->engine);
    uint32_t used = batcher->n_tokens_since_step, most = info->max_chunk_tokens;
    if (used == 0) {
        return most;
    }
    return used < most && most - used >= info->page_tokens ? most - used : 0;
}

static void start_chunk(struct batcher *batcher, uint32_t max_tokens)
{
    struct unit *unit = &batcher->unit;
    struct prompt *prompt = prompt_queue_next(batcher->prompts, max_tokens, &unit->n_tokens);
    unit->prompt = list_entry(prompt, struct batch_prompt, prompt);
    unit->prompt->running = true;
    memset(&unit->last, 0, sizeof(unit->last));
    unit->last.sampling = unit->prompt->sampling;
    unit->last.n_generated = unit->prompt->n_generated;
    unit->pieces = (struct engine_pieces){.ready = pieces_ready, .cookie = batcher};
    atomic_store(&unit->pieces_ready, 0);
    if (batcher->events->plan_pieces && prompt->n_done + unit->n_tokens == prompt->n_total) {
        unit->pieces.n_pieces =
            batcher->events->plan_pieces(batcher->cookie, unit->prompt, unit->n_tokens);
    }
    unit_start(batcher, UNIT_CHUNK, "chunk");
    if (unit->prompt->prompt.n_done == 0 && batcher->events->prompt_started) {
        batcher->events->prompt_started(batcher->cookie, unit->prompt);
    }
}

static void schedule(void *cookie)
{
    struct batcher *batcher = cookie;
    batcher->scheduled = false;
    if (batcher->unit.kind != UNIT_NONE || batcher->broken) {
        return;
    }
    struct list *first_call = list_first(&batcher->calls);
    bool have_rows = !list_empty(&batcher->active);
    bool have_prompts = prompt_queue_length(batcher->prompts) > 0;
    double busy_ns = batcher->step_share_ns + batcher->chunk_share_ns;
    bool within_share = batcher->chunk_share_ns <= batcher->options.prefill_share * busy_ns;
    if (!have_rows) {
        batcher->last_step_start_ns = 0;
        batcher->n_tokens_since_step = 0;
    }
    uint32_t room = chunk_room(batcher);
    bool wants_chunk = have_prompts && (!have_rows || (within_share && room > 0));
    if (batcher->begun) {
        start_ahead(batcher, first_call || wants_chunk);
    } else if (first_call) {
        list_remove(first_call);
        batcher->n_calls--;
        batcher->unit.call = list_entry(first_call, struct call, link);
        unit_start(batcher, UNIT_CALL, "call");
    } else if (wants_chunk) {
        start_chunk(batcher, room);
    } else if (have_rows) {
        start_step(batcher);
    }
}

void batcher_stats(const struct batcher *batcher, struct batcher_stats *ret_stats)
{
    *ret_stats = batcher->stats;
    ret_stats->rows = batcher->n_active + batcher->n_paused;
    ret_stats->rows_paused = batcher->n_paused;
    ret_stats->prompts = prompt_queue_length(batcher->prompts);
    ret_stats->prompt_tokens_left = prompt_queue_tokens_left(batcher->prompts);
}
