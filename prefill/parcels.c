/* Parcels: cut to the slots at hand, put, summed, told.
 *
 * A Parcel is told only after the flush of its put completed and its checksum was taken over bytes
 * that nobody changes any more, and in the order of its number. A page is not given back while a
 * put reads it.
 */
#include "prefill/handoff_internal.h"

#include <inttypes.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"

static void parcels_tell(struct run *run);

void run_parcel_drop(struct parcel *parcel)
{
    list_remove(&parcel->link);
    mem_free(parcel);
}

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
        run_parcel_drop(parcel);
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

/* Where the parcel lies. Any thread. */
static void parcel_sum(struct parcel *parcel)
{
    struct run *run = parcel->run;
    if (!parcel->from_device) {
        parcel->checksum =
            accept_parcel_checksum(run->id, parcel->seq, parcel->pieces, parcel->n_pieces);
    } else if (engine_device_sum(run->runs->options.engine, run->id, parcel->seq, parcel->pieces,
                                 parcel->n_pieces, &parcel->checksum)) {
        parcel->sum_failed = true;
    }
}

/* Worker thread. */
static void sum_run(void *cookie, struct workers_job *job)
{
    parcel_sum(cookie);
}

static void sum_done(void *cookie)
{
    struct parcel *parcel = cookie;
    struct run *run = parcel->run;
    parcel->sum_out = false;
    if (parcel->sum_failed && run->state != RUN_ENDING) {
        run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true, "the device could not sum a parcel");
        return; /* the parcel is gone if its put was back */
    }
    parcel_ready(parcel);
}

/* Starts put and checksum of a parcel whose slots, pieces and bytes are filled in. */
static void parcel_go(struct parcel *parcel, struct region *source, const uint64_t *source_offsets)
{
    struct run *run = parcel->run;
    parcel->from_device = run->target->from_device;
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
        parcel_sum(parcel);
        if (parcel->sum_failed) {
            run_fail(run, BATON__FAIL_CODE__FAIL_INTERNAL, true,
                     "the device could not sum a parcel");
            return;
        }
    } else {
        parcel->sum_out = true;
    }
    enum status status = PARCEL_PUT(parcel, source, puts, on_put_done, &err);
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

static const struct run_source *run_source_of(const struct run *run)
{
    return &run->runs->sources[run->target->from_device];
}

static size_t page_ready(const struct run *run, uint32_t page)
{
    return page < run->pages_ready  ? engine_info(run->runs->options.engine)->page_bytes
           : page < run->pages_open ? run->open_bytes
                                    : 0;
}

/* The next pages that have as many bytes ready and as many of them gone, as one parcel. False:
 * nothing is ready. */
static bool send_pages(struct run *run)
{
    const struct engine_info *info = engine_info(run->runs->options.engine);
    uint32_t first = run->next_page, n = 0;
    while (first < run->n_pages && page_ready(run, first) == run->pages_sent[first]) {
        if (page_ready(run, first++) == 0) {
            return false;
        }
    }
    if (first == run->n_pages) {
        return false;
    }
    size_t from = run->pages_sent[first], to = page_ready(run, first);
    uint32_t most = run->n_slots < MAX_PARCEL_PAGES ? run->n_slots : MAX_PARCEL_PAGES;
    while (n < most && first + n < run->n_pages && run->pages_sent[first + n] == from &&
           page_ready(run, first + n) == to) {
        run->pages_sent[first + n++] = to;
    }
    while (run->next_page < run->n_pages && run->pages_sent[run->next_page] == info->page_bytes) {
        run->next_page++;
    }
    struct parcel *parcel = parcel_new(run, n);
    uint64_t offsets[MAX_PARCEL_PAGES];
    parcel->first_page = first;
    parcel->n_pages = n;
    parcel->offset = from;
    parcel->bytes = n * (uint64_t)(to - from);
    const struct run_source *source = run_source_of(run);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t page = engine_seq_page(run->seq, first + i);
        offsets[i] = page * info->page_bytes + from;
        parcel->pieces[i].src = source->pool + offsets[i];
        parcel->pieces[i].bytes = to - from;
    }
    if (first >= run->pages_ready) {
        run->runs->stats.n_early_bytes += parcel->bytes;
    }
    parcel_go(parcel, source->pool_region, offsets);
    return true;
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
    const struct run_source *source = run_source_of(run);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t bytes = run->tail_bytes - run->tail_at;
        bytes = bytes < slot_bytes ? bytes : slot_bytes;
        offsets[i] = (uint64_t)run->tail * runs->tail_stride + run->tail_at;
        parcel->pieces[i].src = source->tails + offsets[i];
        parcel->pieces[i].bytes = bytes;
        parcel->bytes += bytes;
        run->tail_at += bytes;
    }
    parcel_go(parcel, source->tail_region, offsets);
}

/* Sends whatever there is to send and slots for. */
void run_pump(struct run *run)
{
    while (run->n_slots > 0 && (run->state == RUN_COMPUTING || run->state == RUN_SENDING)) {
        if (send_pages(run)) {
            continue;
        }
        if (!run->tail_ready || run->tail_at == run->tail_bytes) {
            break;
        }
        send_tail(run);
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

void run_first_send(struct run *run)
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
            sample->n_logprobs = 1;
            sample->logprobs = arena_alloc(arena, sizeof(*sample->logprobs));
            sample->logprobs[0] = wire_logprobs_make(draw, arena);
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
