/* The sending end of transfers: see handoff.h.
 *
 * Owns runs, their parcels and the tail buffers. What must hold: a Parcel is sent only after the
 * flush of its put completed and its checksum was taken over bytes that nobody changes any more
 * (full pages, or the partial page and the tail after engine_tail_write); parcels are told in the
 * order of their numbers; and a page or tail buffer is not given back while a put reads it.
 */
#include "prefill/handoff.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/hmap.h"
#include "base/json.h"
#include "base/ledger.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/accept.h"
#include "engine/sampler.h"

enum {
    MAX_PARCEL_PAGES = 32, /* 28 MB of V4-Flash: one flush a parcel is then far below 1 % */
    MAX_SAMPLES = 16,
    MAX_STOP_IDS = 64,
    MAX_BIASES = 1024,
    MAX_HELD_SLOTS = 4096,
    PROGRESS_EVERY_MS = 500,
};

enum run_state { RUN_RECEIVING, RUN_QUEUED, RUN_COMPUTING, RUN_SENDING, RUN_ENDING, N_RUN_STATES };
static const char *const run_state_names[] = {"receiving", "queued", "computing", "sending",
                                              "ending"};

enum tail_state { TAIL_FREE, TAIL_USED, N_TAIL_STATES };
static const char *const tail_state_names[] = {"free", "used"};

struct run;

struct parcel {
    struct list link; /* in its run, in order of seq */
    struct run *run;
    struct put *put;
    uint32_t seq;
    bool is_tail, put_out, sum_out, put_ok;
    uint32_t first_page, n_pages, n_slots;
    uint32_t slots[MAX_PARCEL_PAGES];
    uint64_t offset, bytes, checksum;
    uint32_t n_pieces;
    struct accept_piece pieces[MAX_PARCEL_PAGES];
};

struct run {
    struct list in_state, in_target;
    struct runs *runs;
    struct run_target *target; /* NULL: lost */
    uint64_t id, request;
    enum run_state state;
    uint32_t *ids;
    uint32_t n_ids, n_ids_total, n_generated;
    uint32_t n_samples;
    struct engine_sampling sampling[MAX_SAMPLES];
    struct engine_bias *biases;
    uint32_t banned[MAX_STOP_IDS + 1];
    struct engine_seq *seq;
    struct batch_prompt prompt;
    bool prompt_out, call_out, told_failed;
    uint32_t n_done;
    struct engine_draw draws[MAX_SAMPLES];
    uint32_t slots[MAX_HELD_SLOTS]; /* granted and not used yet, a ring */
    uint32_t slots_first, n_slots;
    uint32_t n_pages, pages_ready, next_page, next_seq;
    int64_t tail; /* buffer, or -1 */
    bool tail_ready;
    uint64_t tail_bytes, tail_at;
    struct list parcels;
    uint64_t arrival_ns, start_ns, computed_ns, progress_ns, put_ns, bytes;
};

struct runs {
    struct runs_options options;
    struct batcher *batcher;
    struct region *pool_region, *tail_region;
    uint8_t *tails;
    size_t tail_stride, tails_bytes;
    struct ledger *tail_ledger;
    void (*broken)(void *cookie, enum status status);
    void *cookie;
    struct list states[N_RUN_STATES];
    uint32_t n_in_state[N_RUN_STATES];
    struct runs_stats stats;
    bool starting, reaping;
};

static void start_soon(struct runs *runs);
static void run_pump(struct run *run);
static void run_fail(struct run *run, Baton__FailCode code, bool retryable, const char *format, ...)
    PRINTF_LIKE(4, 5);

static void run_move(struct run *run, enum run_state state)
{
    log_debug("run", "%016" PRIx64 ": %s -> %s", run->id, run_state_names[run->state],
              run_state_names[state]);
    if (list_linked(&run->in_state)) {
        list_remove(&run->in_state);
        run->runs->n_in_state[run->state]--;
    }
    run->state = state;
    run->runs->n_in_state[state]++;
    list_push_back(&run->runs->states[state], &run->in_state);
}

static enum status run_send(struct run *run, Baton__FromPrefill *message)
{
    return run->target ? run->target->send(run->target, message) : STATUS_PEER_LOST;
}

/* ---- ending ---- */

static void target_forget(struct run *run)
{
    struct run_target *target = run->target;
    if (target) {
        run->target = NULL;
        list_remove(&run->in_target);
        hmap_remove_u64(target->by_id, run->id);
        if (list_empty(&target->runs)) {
            target->idle(target);
        }
    }
}

static void run_destroy(struct run *run)
{
    struct runs *runs = run->runs;
    list_remove(&run->in_state);
    runs->n_in_state[run->state]--;
    engine_seq_free(run->seq);
    if (run->tail >= 0) {
        ledger_move(runs->tail_ledger, (size_t)run->tail, TAIL_USED, TAIL_FREE, 0, NULL);
    }
    target_forget(run);
    mem_free(run->ids);
    mem_free(run->biases);
    mem_free(run);
    start_soon(runs);
}

static bool run_settled(const struct run *run)
{
    return run->state == RUN_ENDING && !run->prompt_out && !run->call_out &&
           list_empty(&run->parcels);
}

static void reap(void *cookie)
{
    struct runs *runs = cookie;
    runs->reaping = false;
    list_for_each_safe(at, &runs->states[RUN_ENDING])
    {
        struct run *run = list_entry(at, struct run, in_state);
        if (!run_settled(run)) {
            continue;
        }
        Baton__FromPrefill__Drained drained = BATON__FROM_PREFILL__DRAINED__INIT;
        Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
        drained.transfer = run->id;
        message.what_case = BATON__FROM_PREFILL__WHAT_DRAINED;
        message.drained = &drained;
        if (run_send(run, &message)) {
            log_debug("run", "%016" PRIx64 ": drained could not be said", run->id);
        }
        run_destroy(run);
    }
}

/* An ending run goes when nothing computes for it and no put of it is alive; at the end of the
 * turn, so that whoever ended it may still look at it. */
static void run_settle(struct run *run)
{
    struct runs *runs = run->runs;
    if (run_settled(run) && !runs->reaping) {
        runs->reaping = true;
        loop_defer(runs->options.loop, reap, runs);
    }
}

static void parcel_drop(struct parcel *parcel)
{
    list_remove(&parcel->link);
    mem_free(parcel);
}

static void run_end(struct run *run)
{
    struct runs *runs = run->runs;
    run_move(run, RUN_ENDING);
    if (run->prompt_out && batcher_prompt_remove(runs->batcher, &run->prompt)) {
        run->prompt_out = false;
    }
    list_for_each_safe(at, &run->parcels)
    {
        struct parcel *parcel = list_entry(at, struct parcel, link);
        if (parcel->put) {
            put_cancel(parcel->put);
        } else if (!parcel->put_out && !parcel->sum_out) {
            parcel_drop(parcel);
        }
    }
    run_settle(run);
}

static void run_fail(struct run *run, Baton__FailCode code, bool retryable, const char *format, ...)
{
    struct runs *runs = run->runs;
    char text[320];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (run->state == RUN_ENDING) {
        return;
    }
    log_debug("run", "%016" PRIx64 ": failed: %s", run->id, text);
    runs->stats.n_failed++;
    Baton__FromPrefill__Failed failed = BATON__FROM_PREFILL__FAILED__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    failed.transfer = run->id;
    failed.code = code;
    failed.node = (char *)runs->options.node_id;
    failed.text = text;
    failed.retryable = retryable;
    message.what_case = BATON__FROM_PREFILL__WHAT_FAILED;
    message.failed = &failed;
    if (run_send(run, &message)) {
        log_debug("run", "%016" PRIx64 ": the failure could not be said", run->id);
    }
    run_end(run);
}

/* ---- parcels ---- */

static void parcels_tell(struct run *run);

static void parcel_told(struct run *run, struct parcel *parcel)
{
    uint32_t runs_packed[2 * MAX_PARCEL_PAGES], n = 0;
    for (uint32_t i = 0; i < parcel->n_slots; i++) {
        if (n && runs_packed[n - 2] + runs_packed[n - 1] == parcel->slots[i]) {
            runs_packed[n - 1]++;
        } else {
            runs_packed[n++] = parcel->slots[i];
            runs_packed[n++] = 1;
        }
    }
    Baton__FromPrefill__Parcel told = BATON__FROM_PREFILL__PARCEL__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    told.transfer = run->id;
    told.seq = parcel->seq;
    told.kind = parcel->is_tail ? BATON__FROM_PREFILL__PARCEL__KIND__TAIL
                                : BATON__FROM_PREFILL__PARCEL__KIND__PAGES;
    told.first_page = parcel->first_page;
    told.n_pages = parcel->n_pages;
    told.slot_runs = runs_packed;
    told.n_slot_runs = n;
    told.bytes = parcel->bytes;
    told.checksum = parcel->checksum;
    told.offset = parcel->offset;
    told.total_bytes = parcel->is_tail ? run->tail_bytes : 0;
    message.what_case = BATON__FROM_PREFILL__WHAT_PARCEL;
    message.parcel = &told;
    run->runs->stats.n_parcels++;
    run->runs->stats.n_bytes += parcel->bytes;
    run->bytes += parcel->bytes;
    if (run_send(run, &message)) {
        run_fail(run, BATON__FAIL_CODE__FAIL_PEER_LOST, true, "the link to %s is full",
                 run->target ? run->target->name : "the decode node");
    }
}

static void parcel_ready(struct parcel *parcel)
{
    struct run *run = parcel->run;
    if (parcel->put_out || parcel->sum_out) {
        return;
    }
    if (run->state == RUN_ENDING) {
        parcel_drop(parcel);
        run_settle(run);
    } else {
        parcels_tell(run);
    }
}

static void on_put_done(void *cookie, const struct put_result *result)
{
    struct parcel *parcel = cookie;
    struct run *run = parcel->run;
    struct runs *runs = run->runs;
    parcel->put = NULL;
    parcel->put_out = false;
    parcel->put_ok = result->status == STATUS_OK;
    run->put_ns += result->span_ns;
    runs->stats.put_ns += result->span_ns;
    if (!parcel->is_tail) {
        for (uint32_t i = 0; i < parcel->n_pages; i++) {
            engine_page_sent(runs->options.engine,
                             engine_seq_page(run->seq, parcel->first_page + i));
        }
    }
    if (!parcel->put_ok && run->state != RUN_ENDING) {
        bool stalled = result->status == STATUS_STALLED;
        run_fail(run, stalled ? BATON__FAIL_CODE__FAIL_STALLED : BATON__FAIL_CODE__FAIL_PEER_LOST,
                 true, "a put to %s ended with %s",
                 run->target ? run->target->name : "its decode node", status_name(result->status));
        return; /* the parcel is gone if its sum was back */
    }
    parcel_ready(parcel);
}

/* Worker thread. */
static void sum_run(void *cookie, struct workers_job *job)
{
    struct parcel *parcel = cookie;
    parcel->checksum =
        accept_parcel_checksum(parcel->run->id, parcel->seq, parcel->pieces, parcel->n_pieces);
}

static void sum_done(void *cookie)
{
    struct parcel *parcel = cookie;
    parcel->sum_out = false;
    parcel_ready(parcel);
}

/* Starts put and checksum of a parcel whose slots, pieces and bytes are filled in. */
static void parcel_go(struct parcel *parcel, struct region *source, const uint64_t *source_offsets)
{
    struct run *run = parcel->run;
    struct run_target *target = run->target;
    struct put_run puts[MAX_PARCEL_PAGES];
    struct error err = {""};
    for (uint32_t i = 0; i < parcel->n_slots; i++) {
        puts[i] = (struct put_run){
            .source_offset = source_offsets[i],
            .remote_region = target->region_id,
            .remote_offset = (parcel->slots[i] - target->first_slot) * target->slot_bytes,
            .bytes = parcel->pieces[i].bytes,
        };
    }
    parcel->seq = run->next_seq++;
    list_push_back(&run->parcels, &parcel->link);
    if (workers_submit(run->runs->options.workers, sum_run, sum_done, NULL, parcel, NULL)) {
        parcel->checksum =
            accept_parcel_checksum(run->id, parcel->seq, parcel->pieces, parcel->n_pieces);
    } else {
        parcel->sum_out = true;
    }
    enum status status = put_submit(target->peer, source, puts, parcel->n_slots, on_put_done,
                                    parcel, &parcel->put, &err);
    if (status) {
        parcel->put = NULL;
        run_fail(run, BATON__FAIL_CODE__FAIL_PEER_LOST, true, "a put to %s was refused: %.200s",
                 target->name, err.text);
        return;
    }
    parcel->put_out = true;
    if (!parcel->is_tail) {
        for (uint32_t i = 0; i < parcel->n_pages; i++) {
            engine_page_sending(run->runs->options.engine,
                                engine_seq_page(run->seq, parcel->first_page + i));
        }
    }
}

static struct parcel *parcel_new(struct run *run, uint32_t n_slots)
{
    struct parcel *parcel = mem_zalloc(sizeof(*parcel));
    parcel->run = run;
    parcel->n_slots = parcel->n_pieces = n_slots;
    for (uint32_t i = 0; i < n_slots; i++) {
        parcel->slots[i] = run->slots[run->slots_first];
        run->slots_first = (run->slots_first + 1) % MAX_HELD_SLOTS;
        run->n_slots--;
    }
    return parcel;
}

static void send_pages(struct run *run)
{
    const struct engine_info *info = engine_info(run->runs->options.engine);
    uint32_t n = run->pages_ready - run->next_page;
    n = n < run->n_slots ? n : run->n_slots;
    n = n < MAX_PARCEL_PAGES ? n : MAX_PARCEL_PAGES;
    struct parcel *parcel = parcel_new(run, n);
    uint64_t offsets[MAX_PARCEL_PAGES];
    parcel->first_page = run->next_page;
    parcel->n_pages = n;
    parcel->bytes = n * (uint64_t)info->page_bytes;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t page = engine_seq_page(run->seq, run->next_page + i);
        offsets[i] = page * info->page_bytes;
        parcel->pieces[i].src = info->pool_base + offsets[i];
        parcel->pieces[i].bytes = info->page_bytes;
    }
    run->next_page += n;
    parcel_go(parcel, run->runs->pool_region, offsets);
}

static void send_tail(struct run *run)
{
    struct runs *runs = run->runs;
    uint64_t slot_bytes = run->target->slot_bytes;
    uint64_t left = run->tail_bytes - run->tail_at;
    uint64_t n = (left + slot_bytes - 1) / slot_bytes;
    n = n < run->n_slots ? n : run->n_slots;
    n = n < MAX_PARCEL_PAGES ? n : MAX_PARCEL_PAGES;
    struct parcel *parcel = parcel_new(run, (uint32_t)n);
    uint64_t offsets[MAX_PARCEL_PAGES];
    parcel->is_tail = true;
    parcel->offset = run->tail_at;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = run->tail_bytes - run->tail_at;
        bytes = bytes < slot_bytes ? bytes : slot_bytes;
        offsets[i] = (uint64_t)run->tail * runs->tail_stride + run->tail_at;
        parcel->pieces[i].src = runs->tails + offsets[i];
        parcel->pieces[i].bytes = bytes;
        parcel->bytes += bytes;
        run->tail_at += bytes;
    }
    parcel_go(parcel, runs->tail_region, offsets);
}

/* Sends whatever there is to send and slots for. */
static void run_pump(struct run *run)
{
    while (run->n_slots > 0 && (run->state == RUN_COMPUTING || run->state == RUN_SENDING)) {
        if (run->next_page < run->pages_ready) {
            send_pages(run);
        } else if (run->tail_ready && run->tail_at < run->tail_bytes) {
            send_tail(run);
        } else {
            break;
        }
    }
}

static void send_done(struct run *run)
{
    Baton__FromPrefill__Done done = BATON__FROM_PREFILL__DONE__INIT;
    Baton__Timings timings = BATON__TIMINGS__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    timings.queue_ns = run->start_ns - run->arrival_ns;
    timings.prefill_ns = run->computed_ns - run->start_ns;
    timings.transfer_ns = loop_now_ns() - run->computed_ns;
    timings.put_ns = run->put_ns;
    timings.bytes = run->bytes;
    done.transfer = run->id;
    done.n_parcels = run->next_seq;
    done.timings = &timings;
    message.what_case = BATON__FROM_PREFILL__WHAT_DONE;
    message.done = &done;
    if (run_send(run, &message)) {
        run_fail(run, BATON__FAIL_CODE__FAIL_PEER_LOST, true, "the link is full");
        return;
    }
    run->runs->stats.n_done++;
    run_destroy(run);
}

/* Tells finished parcels in order; after the last, Done. */
static void parcels_tell(struct run *run)
{
    struct list *first;
    while ((first = list_first(&run->parcels)) != NULL) {
        struct parcel *parcel = list_entry(first, struct parcel, link);
        if (parcel->put_out || parcel->sum_out) {
            return;
        }
        list_remove(&parcel->link);
        parcel_told(run, parcel);
        mem_free(parcel);
        if (run->state == RUN_ENDING) {
            return; /* telling failed */
        }
    }
    if (run->tail_ready && run->tail_at == run->tail_bytes && run->next_page == run->n_pages) {
        send_done(run);
    }
}

/* ---- computing ---- */

static void send_progress(struct run *run)
{
    Baton__FromPrefill__Progress progress = BATON__FROM_PREFILL__PROGRESS__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    progress.transfer = run->id;
    progress.tokens_done = run->n_done;
    message.what_case = BATON__FROM_PREFILL__WHAT_PROGRESS;
    message.progress = &progress;
    run->progress_ns = loop_now_ns();
    if (run_send(run, &message)) {
        log_debug("run", "%016" PRIx64 ": progress could not be said", run->id);
    }
}

/* Compute thread. */
static void tail_run(void *cookie)
{
    struct run *run = cookie;
    struct runs *runs = run->runs;
    if (engine_tail_write(runs->options.engine, run->seq,
                          runs->tails + (size_t)run->tail * runs->tail_stride, runs->tail_stride)) {
        run->tail_bytes = 0; /* told on the loop */
    }
}

static void tail_done(void *cookie)
{
    struct run *run = cookie;
    run->call_out = false;
    if (run->state == RUN_ENDING) {
        run_settle(run);
        return;
    }
    if (run->tail_bytes == 0) {
        run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true, "the tail could not be written");
        return;
    }
    run->tail_ready = true;
    run->pages_ready = run->n_pages;
    run_pump(run);
}

/* A computed prompt needs a send buffer for its tail; with none free it waits for one. */
static void tail_start(struct run *run)
{
    struct runs *runs = run->runs;
    size_t tail;
    if (run->tail >= 0 ||
        !ledger_take(runs->tail_ledger, TAIL_FREE, TAIL_USED, run->id, "tail", &tail)) {
        return;
    }
    run->tail = (int64_t)tail;
    run->tail_bytes = engine_tail_bytes(runs->options.engine, run->n_ids);
    run->call_out = true;
    if (batcher_call(runs->batcher, tail_run, tail_done, run)) {
        run->call_out = false;
        run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true, "too many tails wait");
    }
}

static void send_first(struct run *run)
{
    Baton__FromPrefill__First first = BATON__FROM_PREFILL__FIRST__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    struct arena *arena = arena_create(0);
    first.transfer = run->id;
    first.n_samples = run->n_samples;
    first.samples = arena_alloc(arena, run->n_samples * sizeof(*first.samples));
    for (uint32_t i = 0; i < run->n_samples; i++) {
        const struct engine_draw *draw = &run->draws[i];
        Baton__FromPrefill__FirstSample *sample = arena_alloc(arena, sizeof(*sample));
        baton__from_prefill__first_sample__init(sample);
        sample->sample = i;
        sample->n_ids = 1;
        sample->ids = arena_alloc(arena, sizeof(uint32_t));
        sample->ids[0] = draw->id;
        if (run->sampling[i].want_logprobs) {
            Baton__TokenLogprobs *logprobs = arena_alloc(arena, sizeof(*logprobs));
            Baton__Logprob *entries = arena_alloc(arena, (draw->n_top + 1) * sizeof(*entries));
            baton__token_logprobs__init(logprobs);
            logprobs->top = arena_alloc(arena, (draw->n_top + 1) * sizeof(*logprobs->top));
            logprobs->n_top = draw->n_top;
            for (uint32_t k = 0; k <= draw->n_top; k++) {
                baton__logprob__init(&entries[k]);
                entries[k].id = k ? draw->top[k - 1].id : draw->id;
                entries[k].logprob = k ? draw->top[k - 1].logprob : draw->logprob;
                if (k) {
                    logprobs->top[k - 1] = &entries[k];
                }
            }
            logprobs->token = &entries[0];
            sample->n_logprobs = 1;
            sample->logprobs = arena_alloc(arena, sizeof(*sample->logprobs));
            sample->logprobs[0] = logprobs;
        }
        first.samples[i] = sample;
    }
    message.what_case = BATON__FROM_PREFILL__WHAT_FIRST;
    message.first = &first;
    enum status status = run_send(run, &message);
    arena_free(arena);
    if (status) {
        run_fail(run, BATON__FAIL_CODE__FAIL_PEER_LOST, true, "the link is full");
    }
}

static void on_prompt_progress(void *cookie, struct batch_prompt *prompt, uint32_t n_done)
{
    struct run *run = prompt->cookie;
    if (run->state != RUN_COMPUTING) {
        return;
    }
    run->n_done = n_done;
    run->pages_ready = n_done / engine_info(run->runs->options.engine)->page_tokens;
    send_progress(run);
    run_pump(run);
}

static void on_prompt_done(void *cookie, struct batch_prompt *prompt, enum status status,
                           const struct engine_draw *draw)
{
    struct runs *runs = cookie;
    struct run *run = prompt->cookie;
    run->prompt_out = false;
    if (run->state == RUN_ENDING) {
        run_settle(run);
        return;
    }
    run->draws[0] = *draw;
    for (uint32_t i = 1; !status && i < run->n_samples; i++) {
        status = engine_draw_again(runs->options.engine, run->seq, &run->sampling[i],
                                   run->n_generated, &run->draws[i]);
    }
    if (status) {
        run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true, "the engine failed in prefill: %s",
                 status_name(status));
        return;
    }
    run->computed_ns = loop_now_ns();
    run_move(run, RUN_SENDING);
    send_first(run);
    if (run->state == RUN_SENDING) {
        tail_start(run);
    }
}

static void on_broken(void *cookie, enum status status)
{
    struct runs *runs = cookie;
    runs->broken(runs->cookie, status);
}

static const struct batcher_events batcher_events = {
    .prompt_progress = on_prompt_progress,
    .prompt_done = on_prompt_done,
    .broken = on_broken,
};

/* False: no room for it yet. */
static bool run_start(struct run *run)
{
    struct runs *runs = run->runs;
    struct engine *engine = runs->options.engine;
    if (engine_pages_free(engine) < run->n_pages || engine_seq_create(engine, run->id, &run->seq)) {
        return false;
    }
    if (engine_seq_history_set(run->seq, run->ids, run->n_ids, run->n_generated) ||
        engine_seq_reserve(run->seq, run->n_ids)) {
        engine_seq_free(run->seq);
        run->seq = NULL;
        return false;
    }
    run->start_ns = loop_now_ns();
    run_move(run, RUN_COMPUTING);
    send_progress(run);
    run->prompt = (struct batch_prompt){
        .seq = run->seq,
        .ids = run->ids,
        .n_ids = run->n_ids,
        .sampling = &run->sampling[0],
        .n_generated = run->n_generated,
        .cookie = run,
    };
    run->prompt_out = true;
    batcher_prompt_add(runs->batcher, &run->prompt);
    return true;
}

static void start_some(void *cookie)
{
    struct runs *runs = cookie;
    runs->starting = false;
    list_for_each_safe(at, &runs->states[RUN_SENDING])
    {
        tail_start(list_entry(at, struct run, in_state));
    }
    struct list *first;
    while ((first = list_first(&runs->states[RUN_QUEUED])) != NULL) {
        if (!run_start(list_entry(first, struct run, in_state))) {
            break;
        }
    }
}

static void start_soon(struct runs *runs)
{
    if (!runs->starting) {
        runs->starting = true;
        loop_defer(runs->options.loop, start_some, runs);
    }
}

/* ---- messages ---- */

static void enqueue(struct run *run)
{
    Baton__FromPrefill__Queued queued = BATON__FROM_PREFILL__QUEUED__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    queued.transfer = run->id;
    queued.n_ahead = run->runs->n_in_state[RUN_QUEUED];
    message.what_case = BATON__FROM_PREFILL__WHAT_QUEUED;
    message.queued = &queued;
    if (run_send(run, &message)) {
        log_debug("run", "%016" PRIx64 ": queued could not be said", run->id);
    }
    run_move(run, RUN_QUEUED);
    start_soon(run->runs);
}

static void copy_sampling(struct run *run, const Baton__Sampling *s)
{
    uint32_t n_banned = 0;
    run->n_samples = s->n;
    run->biases = mem_array(s->n_logit_bias + 1, sizeof(*run->biases));
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        run->biases[i] = (struct engine_bias){s->logit_bias[i]->id, s->logit_bias[i]->bias};
    }
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        run->banned[n_banned++] = s->stop_token_ids[i];
    }
    if (!s->ignore_eos) {
        run->banned[n_banned++] = engine_info(run->runs->options.engine)->eos_id;
    }
    for (uint32_t i = 0; i < s->n; i++) {
        run->sampling[i] = (struct engine_sampling){
            .temperature = s->temperature,
            .top_p = s->top_p,
            .min_p = s->min_p,
            .top_k = s->top_k,
            .presence_penalty = s->presence_penalty,
            .frequency_penalty = s->frequency_penalty,
            .repetition_penalty = s->repetition_penalty,
            .n_logit_bias = (uint32_t)s->n_logit_bias,
            .logit_bias = run->biases,
            .seed = sampler_seed(s->seed, i),
            .n_banned = n_banned,
            .banned = run->banned,
            .min_tokens = s->min_tokens,
            .want_logprobs = s->logprobs,
            .n_top_logprobs = s->n_top_logprobs,
        };
    }
}

static bool ids_in_vocabulary(const struct runs *runs, const uint32_t *ids, size_t n)
{
    uint32_t vocab_size = engine_info(runs->options.engine)->vocab_size;
    for (size_t i = 0; i < n; i++) {
        if (ids[i] >= vocab_size) {
            return false;
        }
    }
    return true;
}

static bool sampling_fits(const struct runs *runs, const Baton__Sampling *s)
{
    bool fits = s && s->n > 0 && s->n <= MAX_SAMPLES && s->n_stop_token_ids <= MAX_STOP_IDS &&
                s->n_logit_bias <= MAX_BIASES && s->n_top_logprobs <= ENGINE_MAX_LOGPROBS &&
                ids_in_vocabulary(runs, s->stop_token_ids, s->n_stop_token_ids);
    for (size_t i = 0; fits && i < s->n_logit_bias; i++) {
        fits = ids_in_vocabulary(runs, &s->logit_bias[i]->id, 1);
    }
    return fits;
}

static void refuse(struct runs *runs, struct run_target *target, uint64_t transfer,
                   Baton__FailCode code, bool retryable, const char *text)
{
    Baton__FromPrefill__Failed failed = BATON__FROM_PREFILL__FAILED__INIT;
    Baton__FromPrefill__Drained drained = BATON__FROM_PREFILL__DRAINED__INIT;
    Baton__FromPrefill message = BATON__FROM_PREFILL__INIT;
    runs->stats.n_refused++;
    failed.transfer = transfer;
    failed.code = code;
    failed.node = (char *)runs->options.node_id;
    failed.text = (char *)text;
    failed.retryable = retryable;
    message.what_case = BATON__FROM_PREFILL__WHAT_FAILED;
    message.failed = &failed;
    enum status status = target->send(target, &message);
    drained.transfer = transfer;
    message.what_case = BATON__FROM_PREFILL__WHAT_DRAINED;
    message.drained = &drained;
    if (status || target->send(target, &message)) {
        log_debug("run", "%016" PRIx64 ": the refusal could not be said", transfer);
    }
}

void runs_run(struct runs *runs, struct run_target *target, const Baton__ToPrefill__Run *message,
              bool draining)
{
    const struct engine_info *info = engine_info(runs->options.engine);
    uint32_t n_waiting = runs->n_in_state[RUN_QUEUED] + runs->n_in_state[RUN_RECEIVING];
    if (message->transfer == 0 || hmap_get_u64(target->by_id, message->transfer)) {
        /* The first of that number goes on; the second has none to answer under. */
        runs->stats.n_refused++;
        log_warn("run", "%s: transfer %016" PRIx64 " exists already", target->name,
                 message->transfer);
        return;
    }
    if (draining) {
        refuse(runs, target, message->transfer, BATON__FAIL_CODE__FAIL_DRAINING, true,
               "this node takes no new work");
        return;
    }
    if (!sampling_fits(runs, message->sampling) || message->n_ids_total == 0 ||
        message->n_ids > message->n_ids_total || message->n_generated >= message->n_ids_total ||
        message->skip_pages != 0 || !ids_in_vocabulary(runs, message->ids, message->n_ids)) {
        refuse(runs, target, message->transfer, BATON__FAIL_CODE__FAIL_INVALID, false,
               "the run contradicts itself or this node's vocabulary");
        return;
    }
    if (message->n_ids_total > info->max_context_tokens ||
        engine_pages_for(runs->options.engine, message->n_ids_total) > info->n_pages) {
        char text[128];
        snprintf(text, sizeof(text), "%" PRIu32 " tokens; this node takes %" PRIu32,
                 message->n_ids_total, info->max_context_tokens);
        refuse(runs, target, message->transfer, BATON__FAIL_CODE__FAIL_TOO_LONG, true, text);
        return;
    }
    if (n_waiting >= runs->options.max_queued) {
        refuse(runs, target, message->transfer, BATON__FAIL_CODE__FAIL_QUEUE_FULL, true,
               "the queue of this node is full");
        return;
    }
    struct run *run = mem_zalloc(sizeof(*run));
    run->runs = runs;
    run->target = target;
    run->id = message->transfer;
    run->request = message->request;
    run->n_ids_total = message->n_ids_total;
    run->n_generated = message->n_generated;
    run->n_pages = engine_pages_for(runs->options.engine, message->n_ids_total);
    run->tail = -1;
    run->arrival_ns = loop_now_ns();
    list_init(&run->parcels);
    run->ids = mem_array(message->n_ids_total, sizeof(*run->ids));
    memcpy(run->ids, message->ids, message->n_ids * sizeof(*run->ids));
    run->n_ids = (uint32_t)message->n_ids;
    copy_sampling(run, message->sampling);
    list_push_back(&target->runs, &run->in_target);
    hmap_put_u64(target->by_id, run->id, run);
    runs->stats.n_started++;
    run_move(run, RUN_RECEIVING);
    if (run->n_ids == run->n_ids_total) {
        enqueue(run);
    }
}

void runs_ids(struct runs *runs, struct run_target *target, const Baton__IdsPart *part)
{
    struct run *run = hmap_get_u64(target->by_id, part->key);
    if (!run || run->state != RUN_RECEIVING) {
        return;
    }
    if (part->first != run->n_ids || part->n_ids == 0 ||
        part->n_ids > run->n_ids_total - run->n_ids ||
        !ids_in_vocabulary(runs, part->ids, part->n_ids)) {
        run_fail(run, BATON__FAIL_CODE__FAIL_INVALID, false, "a part of the ids does not fit");
        return;
    }
    memcpy(run->ids + run->n_ids, part->ids, part->n_ids * sizeof(*run->ids));
    run->n_ids += (uint32_t)part->n_ids;
    if (run->n_ids == run->n_ids_total) {
        enqueue(run);
    }
}

void runs_slots(struct runs *runs, struct run_target *target, const Baton__ToPrefill__Slots *slots)
{
    struct run *run = hmap_get_u64(target->by_id, slots->transfer);
    if (!run || (run->state != RUN_COMPUTING && run->state != RUN_SENDING)) {
        return;
    }
    for (size_t r = 0; r + 1 < slots->n_slot_runs; r += 2) {
        uint32_t first = slots->slot_runs[r], n = slots->slot_runs[r + 1];
        if (first < target->first_slot || first - target->first_slot >= target->n_slots ||
            n > target->n_slots - (first - target->first_slot) ||
            n > MAX_HELD_SLOTS - run->n_slots) {
            run_fail(run, BATON__FAIL_CODE__FAIL_INVALID, false, "slots outside the landing area");
            return;
        }
        for (uint32_t k = 0; k < n; k++) {
            run->slots[(run->slots_first + run->n_slots++) % MAX_HELD_SLOTS] = first + k;
        }
    }
    run_pump(run);
}

void runs_cancel(struct runs *runs, struct run_target *target, uint64_t transfer)
{
    struct run *run = hmap_get_u64(target->by_id, transfer);
    if (!run) {
        return; /* its Run came first on this link, so it has ended */
    }
    if (run->state != RUN_ENDING) {
        runs->stats.n_cancelled++;
        run_end(run);
    }
}

void run_target_init(struct run_target *target)
{
    list_init(&target->runs);
    target->by_id = hmap_create();
}

void run_target_fini(struct run_target *target)
{
    hmap_free(target->by_id);
}

void runs_target_lost(struct runs *runs, struct run_target *target)
{
    struct list *first;
    while ((first = list_first(&target->runs)) != NULL) {
        struct run *run = list_entry(first, struct run, in_target);
        list_remove(&run->in_target);
        hmap_remove_u64(target->by_id, run->id);
        run->target = NULL;
        if (run->state != RUN_ENDING) {
            runs->stats.n_cancelled++;
            run_end(run);
        }
    }
}

/* ---- time, life, numbers ---- */

void runs_tick(struct runs *runs)
{
    uint64_t now_ns = loop_now_ns();
    static const enum run_state busy[] = {RUN_COMPUTING, RUN_SENDING};
    for (size_t s = 0; s < 2; s++) {
        list_for_each(at, &runs->states[busy[s]])
        {
            struct run *run = list_entry(at, struct run, in_state);
            if (now_ns - run->progress_ns > PROGRESS_EVERY_MS * NS_PER_MS) {
                send_progress(run);
            }
        }
    }
    start_soon(runs);
}

void runs_fail_all(struct runs *runs, Baton__FailCode code, const char *text)
{
    for (int s = 0; s < RUN_ENDING; s++) {
        struct list *first;
        while ((first = list_first(&runs->states[s])) != NULL) {
            run_fail(list_entry(first, struct run, in_state), code, true, "%s", text);
        }
    }
}

enum status runs_create(const struct runs_options *options,
                        void (*broken)(void *cookie, enum status status), void *cookie,
                        struct runs **ret_runs, struct error *err)
{
    const struct engine_info *info = engine_info(options->engine);
    struct runs *runs = mem_zalloc(sizeof(*runs));
    struct batcher_options batching = {.prefill_share = 1};
    runs->options = *options;
    runs->broken = broken;
    runs->cookie = cookie;
    for (int s = 0; s < N_RUN_STATES; s++) {
        list_init(&runs->states[s]);
    }
    runs->tail_stride = (info->tail_bytes + 4095) / 4096 * 4096;
    runs->tails_bytes = runs->tail_stride * options->n_tails;
    runs->tail_ledger =
        ledger_create("tail_buffers", options->n_tails, tail_state_names, N_TAIL_STATES);
    runs->tails =
        mmap(NULL, runs->tails_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (runs->tails == MAP_FAILED) {
        runs->tails = NULL;
        error_set(err, STATUS_EXHAUSTED, "no memory for %" PRIu32 " tail buffers of %zu bytes",
                  options->n_tails, runs->tail_stride);
        runs_free(runs);
        return STATUS_EXHAUSTED;
    }
    enum status status = region_register_source(options->transport, info->pool_base,
                                                (size_t)info->n_pages * info->page_bytes,
                                                REGION_HOST, &runs->pool_region, err);
    if (!status) {
        status = region_register_source(options->transport, runs->tails, runs->tails_bytes,
                                        REGION_HOST, &runs->tail_region, err);
    }
    if (!status) {
        status = batcher_create(options->loop, options->engine, &batching, &batcher_events, runs,
                                &runs->batcher);
        if (status) {
            error_set(err, status, "the compute thread can't be started");
        }
    }
    if (status) {
        runs_free(runs);
        return status;
    }
    *ret_runs = runs;
    return STATUS_OK;
}

void runs_free(struct runs *runs)
{
    if (!runs) {
        return;
    }
    loop_defer_cancel(runs->options.loop, start_some, runs);
    loop_defer_cancel(runs->options.loop, reap, runs);
    runs->starting = runs->reaping = true;
    batcher_free(runs->batcher);
    for (int s = 0; s < N_RUN_STATES; s++) {
        struct list *first;
        while ((first = list_first(&runs->states[s])) != NULL) {
            struct run *run = list_entry(first, struct run, in_state);
            list_for_each_safe(at, &run->parcels)
            {
                parcel_drop(list_entry(at, struct parcel, link));
            }
            run_destroy(run);
        }
    }
    /* The regions went with the transport. */
    if (runs->tails) {
        munmap(runs->tails, runs->tails_bytes);
    }
    ledger_free(runs->tail_ledger);
    mem_free(runs);
}

struct batcher *runs_batcher(struct runs *runs)
{
    return runs->batcher;
}

uint32_t runs_n_live(const struct runs *runs)
{
    uint32_t n = 0;
    for (int s = 0; s < N_RUN_STATES; s++) {
        n += runs->n_in_state[s];
    }
    return n;
}

void runs_stats(const struct runs *runs, struct runs_stats *ret_stats)
{
    *ret_stats = runs->stats;
    ret_stats->n_queued = runs->n_in_state[RUN_QUEUED] + runs->n_in_state[RUN_RECEIVING];
    ret_stats->n_computing = runs->n_in_state[RUN_COMPUTING];
    ret_stats->n_sending = runs->n_in_state[RUN_SENDING];
    ret_stats->n_ending = runs->n_in_state[RUN_ENDING];
    uint64_t now_ns = loop_now_ns();
    list_for_each(at, &runs->states[RUN_QUEUED])
    {
        const struct run *run = list_entry(at, struct run, in_state);
        uint64_t age_ns = now_ns - run->arrival_ns;
        ret_stats->queued_tokens += run->n_ids;
        if (age_ns > ret_stats->oldest_queued_ns) {
            ret_stats->oldest_queued_ns = age_ns;
        }
    }
    list_for_each(at, &runs->states[RUN_COMPUTING])
    {
        const struct run *run = list_entry(at, struct run, in_state);
        ret_stats->queued_tokens += run->n_ids - run->n_done;
    }
}

void runs_register(struct runs *runs, struct metrics *metrics)
{
    ledger_register(runs->tail_ledger, metrics, "baton_ledger_items");
}

void runs_debug_json(const struct runs *runs, struct json_writer *w)
{
    ledger_write_json(runs->tail_ledger, w, 0);
}
