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
#include "node/kv.h"
#include "prefill/handoff_internal.h"

static const char *const run_state_names[] = {"receiving", "queued", "computing", "sending",
                                              "ending"};
static const char *const tail_state_names[] = {"free", "used"};

static void start_soon(struct runs *runs);
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

enum status run_send(struct run *run, Baton__FromPrefill *message)
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

void run_destroy(struct run *run)
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
    mem_free(run->pages_sent);
    wire_sampling_fini(&run->wire);
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
void run_settle(struct run *run)
{
    struct runs *runs = run->runs;
    if (run_settled(run) && !runs->reaping) {
        runs->reaping = true;
        loop_defer(runs->options.loop, reap, runs);
    }
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
            run_parcel_drop(parcel);
        }
    }
    run_settle(run);
}

void run_fail(struct run *run, Baton__FailCode code, bool retryable, const char *format, ...)
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
    size_t at = (size_t)run->tail * runs->tail_stride;
    uint8_t *tail = runs->sources[0].tails + at;
    enum status status = engine_tail_write(runs->options.engine, run->seq, tail, runs->tail_stride);
    if (!status && run->tail_to_device) {
        status = engine_device_move(runs->options.engine, runs->sources[1].tails + at, tail,
                                    run->tail_bytes);
    }
    if (status) {
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

static void tail_start(struct run *run)
{
    struct runs *runs = run->runs;
    run->tail_bytes = engine_tail_bytes(runs->options.engine, run->n_ids);
    run->tail_to_device = run->target && run->target->from_device;
    run->call_out = true;
    if (batcher_call(runs->batcher, tail_run, tail_done, run)) {
        run->call_out = false;
        run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true, "too many tails wait");
    }
}

/* The first Progress: the decode node's clock of the prefill runs from here, and it grants slots.
 */
static void on_prompt_started(void *cookie, struct batch_prompt *prompt)
{
    struct run *run = prompt->cookie;
    if (run->state == RUN_COMPUTING) {
        run->started = true;
        run->start_ns = loop_now_ns();
        send_progress(run);
    }
}

/* The pages that the prompt's last chunk completes may leave before it ends, where they take long
 * enough. */
static uint32_t plan_pieces(void *cookie, const struct batch_prompt *prompt, uint32_t n_tokens)
{
    struct runs *runs = cookie;
    struct run *run = prompt->cookie;
    const struct engine_info *info = engine_info(runs->options.engine);
    uint32_t first = (run->n_ids - n_tokens) / info->page_tokens;
    uint32_t n_pages = run->n_ids / info->page_tokens - first;
    if (n_pages == 0 || run->state != RUN_COMPUTING || !run->target || !run->target->peer) {
        return 1;
    }
    if (runs->options.n_pieces) {
        return runs->options.n_pieces;
    }
    return put_plan_pieces(run->target->peer, n_pages * (uint64_t)info->page_bytes, n_pages,
                           MAX_PAGE_PIECES);
}

static void on_prompt_pieces(void *cookie, struct batch_prompt *prompt, size_t page_bytes)
{
    struct run *run = prompt->cookie;
    if (run->state == RUN_COMPUTING) {
        run->pages_open = run->n_ids / engine_info(run->runs->options.engine)->page_tokens;
        run->open_bytes = page_bytes;
        run_pump(run);
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
    run_first_send(run);
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
    .prompt_started = on_prompt_started,
    .plan_pieces = plan_pieces,
    .prompt_pieces = on_prompt_pieces,
    .prompt_progress = on_prompt_progress,
    .prompt_done = on_prompt_done,
    .broken = on_broken,
};

/* False: no room for it yet. */
static bool run_start(struct run *run)
{
    struct runs *runs = run->runs;
    struct engine *engine = runs->options.engine;
    size_t tail;
    if (engine_pages_free(engine) < run->n_pages || ledger_n(runs->tail_ledger, TAIL_FREE) == 0 ||
        engine_seq_create(engine, run->id, &run->seq)) {
        return false;
    }
    if (engine_seq_history_set(run->seq, run->ids, run->n_ids, run->n_generated) ||
        engine_seq_reserve(run->seq, run->n_ids)) {
        engine_seq_free(run->seq);
        run->seq = NULL;
        return false;
    }
    /* Its tail's send buffer comes with the start. Runs that hold landing slots (granted once they
     * compute) and wait for a buffer, next to runs that hold buffers and wait for slots, would
     * stand for ever. */
    if (ledger_take(runs->tail_ledger, TAIL_FREE, TAIL_USED, run->id, "tail", &tail)) {
        run->tail = (int64_t)tail;
    }
    run_move(run, RUN_COMPUTING);
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

/* The decode node holds the deadlines and cancels. This is behind them, for a Cancel that never
 * came. */
static uint64_t life_of(const Baton__Deadlines *d)
{
    if (!d || !d->queue_ms || !d->prefill_ms || !d->transfer_ms) {
        return 0;
    }
    return (uint64_t)d->queue_ms + d->prefill_ms + d->transfer_ms + LIFE_MARGIN_MS;
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
    if (wire_sampling_wrong(message->sampling, info->vocab_size) || message->n_ids_total == 0 ||
        message->n_ids > message->n_ids_total || message->n_generated >= message->n_ids_total ||
        message->skip_pages != 0 || !wire_ids_fit(message->ids, message->n_ids, info->vocab_size)) {
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
    run->pages_sent = mem_array(run->n_pages, sizeof(*run->pages_sent));
    memset(run->pages_sent, 0, run->n_pages * sizeof(*run->pages_sent));
    run->tail = -1;
    run->arrival_ns = loop_now_ns();
    run->life_ms = life_of(message->deadlines);
    list_init(&run->parcels);
    run->ids = mem_array(message->n_ids_total, sizeof(*run->ids));
    memcpy(run->ids, message->ids, message->n_ids * sizeof(*run->ids));
    run->n_ids = (uint32_t)message->n_ids;
    wire_sampling_read(&run->wire, message->sampling, info->eos_id);
    run->n_samples = message->sampling->n;
    for (uint32_t i = 0; i < run->n_samples; i++) {
        run->sampling[i] = wire_sampling_of(&run->wire, i);
    }
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
        !wire_ids_fit(part->ids, part->n_ids, engine_info(runs->options.engine)->vocab_size)) {
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
#ifdef BATON_FAULT_POINTS
    if (target->peer) {
        parcel_put_fault_lost(target->peer);
    }
#endif
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
            if (run->started && now_ns - run->progress_ns > PROGRESS_EVERY_MS * NS_PER_MS) {
                send_progress(run);
            }
        }
    }
    list_for_each_safe(at, &runs->states[RUN_RECEIVING])
    {
        struct run *run = list_entry(at, struct run, in_state);
        if (now_ns - run->arrival_ns > RECEIVING_TIMEOUT_MS * NS_PER_MS) {
            run_fail(run, BATON__FAIL_CODE__FAIL_INVALID, true, "the ids did not come whole");
        }
    }
    static const enum run_state alive[] = {RUN_QUEUED, RUN_COMPUTING, RUN_SENDING};
    for (size_t s = 0; s < 3; s++) {
        list_for_each_safe(at, &runs->states[alive[s]])
        {
            struct run *run = list_entry(at, struct run, in_state);
            if (run->life_ms && now_ns - run->arrival_ns > run->life_ms * NS_PER_MS) {
                run_fail(run, BATON__FAIL_CODE__FAIL_DEADLINE_TRANSFER, false,
                         "it outlived its deadlines, and no cancel came");
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

static enum status host_source_open(struct runs *runs, struct error *err)
{
    struct run_source *source = &runs->sources[0];
    struct transport *transport = runs->options.transport;
    const struct engine_info *info = engine_info(runs->options.engine);
    source->pool = info->pool_base;
    enum status status =
        region_register_source(transport, source->pool, (size_t)info->n_pages * info->page_bytes,
                               REGION_HOST, &source->pool_region, err);
    if (!status) {
        status = region_register_source(transport, source->tails, runs->tails_bytes, REGION_HOST,
                                        &source->tail_region, err);
    }
    return status;
}

/* Pages leave from where they were made. Tails are made by the host and go by a buffer of the
 * device; behind those buffers lie the places for preflights. */
static enum status device_source_open(struct runs *runs, struct error *err)
{
    struct run_source *source = &runs->sources[1];
    struct engine *engine = runs->options.engine;
    struct transport *transport = node_kv_transport(runs->options.kv);
    enum region_memory memory = node_kv_memory(runs->options.kv);
    const struct engine_info *info = engine_info(engine);
    size_t bytes = runs->tails_bytes + N_PREFLIGHTS * info->page_bytes;
    enum engine_memory_kind kind;
    struct error why;
    enum status status = engine_device_alloc(engine, bytes, &source->tails, &kind, err);
    if (!status) {
        source->pool = engine_page_address(engine, 0);
        status = region_register_source(transport, source->pool,
                                        (size_t)info->n_pages * info->page_bytes, memory,
                                        &source->pool_region, err);
    }
    if (!status) {
        status = region_register_source(transport, source->tails, bytes, memory,
                                        &source->tail_region, err);
    }
    if (!status && engine_share(engine, runs->sources[0].tails, runs->tails_bytes, &why)) {
        log_warn("run", "tails are copied by way of the driver, which is slower: %s", why.text);
    } else if (!status) {
        runs->shares_tails = true;
    }
    return status;
}

bool runs_have_host_copy(const struct runs *runs)
{
    return runs->sources[0].pool != NULL;
}

static enum status preflight_write(void *cookie, void *dst, const void *src, size_t bytes)
{
    return engine_device_move(cookie, dst, src, bytes);
}

enum status runs_preflight_take(struct runs *runs, struct put_preflight_source *ret_source)
{
    size_t page_bytes = engine_info(runs->options.engine)->page_bytes;
    for (uint32_t i = 0; i < N_PREFLIGHTS; i++) {
        if (!(runs->preflights_out & 1u << i)) {
            runs->preflights_out |= 1u << i;
            *ret_source = (struct put_preflight_source){
                .region = runs->sources[1].tail_region,
                .offset = runs->tails_bytes + i * page_bytes,
                .bytes = page_bytes,
                .write = preflight_write,
                .cookie = runs->options.engine,
            };
            return STATUS_OK;
        }
    }
    return STATUS_EXHAUSTED;
}

void runs_preflight_give(struct runs *runs, const struct put_preflight_source *source)
{
    size_t page_bytes = engine_info(runs->options.engine)->page_bytes;
    runs->preflights_out &= ~(1u << (source->offset - runs->tails_bytes) / page_bytes);
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
    void *tails =
        mmap(NULL, runs->tails_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    runs->sources[0].tails = tails == MAP_FAILED ? NULL : tails;
    if (tails == MAP_FAILED) {
        error_set(err, STATUS_EXHAUSTED, "no memory for %" PRIu32 " tail buffers of %zu bytes",
                  options->n_tails, runs->tail_stride);
        runs_free(runs);
        return STATUS_EXHAUSTED;
    }
    enum status status = info->pool_base ? host_source_open(runs, err) : STATUS_OK;
    if (!status && options->kv) {
        status = device_source_open(runs, err);
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
#ifdef BATON_FAULT_POINTS
    parcel_put_fault_stop();
#endif
    batcher_free(runs->batcher);
    for (int s = 0; s < N_RUN_STATES; s++) {
        struct list *first;
        while ((first = list_first(&runs->states[s])) != NULL) {
            struct run *run = list_entry(first, struct run, in_state);
            list_for_each_safe(at, &run->parcels)
            {
                run_parcel_drop(list_entry(at, struct parcel, link));
            }
            run_destroy(run);
        }
    }
    /* The regions went with the transport. */
    if (runs->shares_tails) {
        engine_unshare(runs->options.engine, runs->sources[0].tails);
    }
    if (runs->sources[0].tails) {
        munmap(runs->sources[0].tails, runs->tails_bytes);
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
    ret_stats->n_computing = 0;
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
        if (run->started) {
            ret_stats->n_computing++;
        } else {
            ret_stats->n_queued++; /* it has its room and waits for the device */
        }
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

void runs_debug_requests_json(const struct runs *runs, struct json_writer *w)
{
    uint64_t now_ns = loop_now_ns();
    for (int s = 0; s < N_RUN_STATES; s++) {
        list_for_each(at, &runs->states[s])
        {
            const struct run *run = list_entry(at, struct run, in_state);
            bool waits = run->state == RUN_SENDING && run->n_slots == 0;
            json_begin_object(w);
            json_pair_uint(w, "owner", run->id);
            json_pair_uint(w, "request", run->request);
            json_pair_string(w, "state", run_state_names[run->state]);
            json_pair_real(w, "age_seconds", (double)((now_ns - run->arrival_ns) / 1000000) / 1e3);
            json_pair_string(w, "reason",
                             !run->target                 ? "its decode node is gone"
                             : !list_empty(&run->parcels) ? "puts are under way"
                             : waits                      ? "waits for landing slots"
                                                          : "");
            json_pair_string(w, "decode", run->target ? run->target->name : "");
            json_pair_uint(w, "prompt_tokens", run->n_ids_total);
            json_pair_uint(w, "tokens_done", run->n_done);
            json_pair_uint(w, "landing_slots", run->n_slots);
            json_end_object(w);
        }
    }
}
