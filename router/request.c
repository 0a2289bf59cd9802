/*
 * The life of requests: see request.h for the states of a leg.
 *
 * Three ends, one function each: request_complete (all choices ended), request_fail (an error, as
 * status or inside the stream) and on_close (the client left). Each ends with request_free, which
 * first takes back what still runs on nodes. What a turn of the loop brings is kept with the
 * choices and written once, at its end, by flush.
 */
#include "router/request.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "router/request_internal.h"

enum {
    TICK_MS = 1000,
    PUMP_MS = 5,
    DEADLINE_MARGIN_MS = 3000, /* behind what the nodes hold themselves to */
};

static void flush(void *cookie);

uint64_t requests_random(struct requests *requests)
{
    uint64_t z = requests->jitter += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* ---- legs ---- */

static void on_retry(void *cookie)
{
    (void)!leg_start(cookie);
}

struct leg *leg_create(struct request *request, size_t prompt_i, unsigned first_choice,
                       unsigned n_choices)
{
    struct leg *leg = mem_zalloc(sizeof(*leg));
    leg->request = request;
    leg->id = request->requests->next_id++;
    leg->prompt_i = prompt_i;
    leg->first_choice = first_choice;
    leg->n_choices = n_choices;
    for (unsigned i = 0; i < n_choices; i++) {
        struct choice *choice = &request->choices[first_choice + i];
        choice->leg = choice->finished ? NULL : leg;
    }
    list_push_back(&request->legs, &leg->in_request);
    request->n_legs++;
    return leg;
}

void leg_detach(struct leg *leg, enum policy_outcome outcome)
{
    struct requests *requests = leg->request->requests;
    if (leg->state != LEG_RUNNING) {
        return;
    }
    struct node *prefill = NULL;
    if (leg->prefill.id[0]) {
        prefill =
            registry_find(requests->options.registry, leg->prefill.id, leg->prefill.incarnation);
    }
    policy_ended(requests->options.policy, leg->node, prefill, outcome,
                 loop_now_ns() - leg->started_ns);
    hmap_remove_u64(requests->legs, leg->id);
    list_remove(&leg->in_node);
    list_remove(&leg->in_unsent);
    list_remove(&leg->in_starved);
    leg->node = NULL;
    leg->state = LEG_WAITING;
}

void leg_free(struct leg *leg)
{
    assert(leg->state != LEG_RUNNING);
    list_remove(&leg->in_request);
    leg->request->n_legs--;
    loop_timer_free(leg->retry);
    mem_free(leg->history);
    mem_free(leg);
}

void leg_start_later(struct leg *leg, unsigned delay_ms)
{
    struct requests *requests = leg->request->requests;
    if (!leg->retry) {
        leg->retry = loop_timer_create(requests->options.loop, on_retry, leg);
    }
    leg->state = LEG_WAITING;
    loop_timer_arm(leg->retry, delay_ms * NS_PER_MS);
}

bool leg_start(struct leg *leg)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    const struct leg_history *history = leg->history;
    struct policy_choice choice;
    uint64_t wait_ns = 0;
    uint32_t n_prompt = (uint32_t)request->intake->prompts[leg->prompt_i].n;
    leg->n_generated = leg->n_choices == 1 ? request->choices[leg->first_choice].n_ids : 0;
    leg->n_ids = n_prompt + leg->n_generated;
    struct policy_question question = {.n_ids = leg->n_ids, .n_samples = leg->n_choices};
    if (history) {
        question.tried = history->tried;
        question.n_tried =
            history->n_tried < POLICY_MAX_TRIED ? history->n_tried : POLICY_MAX_TRIED;
        question.full = history->full;
        question.n_full = history->n_full;
    }
    enum status status = policy_choose(requests->options.policy, &question, &choice, &wait_ns);
    if (status) {
        return leg_refused(leg, status, wait_ns);
    }
    leg->state = LEG_RUNNING;
    leg->attempt++;
    leg->node = choice.decode;
    leg->prefill = choice.prefill ? choice.prefill->ref : (struct node_ref){"", 0};
    leg->started_ns = loop_now_ns();
    leg->admitted = leg->has_first = false;
    leg->n_live = 0;
    for (unsigned i = 0; i < leg->n_choices; i++) {
        leg->n_live += !request->choices[leg->first_choice + i].finished;
    }
    hmap_put_u64(requests->legs, leg->id, leg);
    list_push_back(&leg->node->legs, &leg->in_node);
    log_debug("request", "%016" PRIx64 ".%" PRIu32 ": %" PRIu32 " ids to %s, prefill %s", leg->id,
              leg->attempt, leg->n_ids, leg->node->ref.id,
              leg->prefill.id[0] ? leg->prefill.id : "local");
    status = leg_send_start(leg);
    if (status == STATUS_EXHAUSTED) {
        return leg_failed(leg, BATON__FAIL_CODE__FAIL_QUEUE_FULL, leg->node->ref.id, true,
                          "the node does not take messages as fast as they come");
    }
    if (status) {
        return leg_failed(leg, BATON__FAIL_CODE__FAIL_PEER_LOST, leg->node->ref.id, true,
                          "the link to the node is lost");
    }
    if (!leg_send_ids(leg)) {
        list_push_back(&requests->unsent, &leg->in_unsent);
        requests_pump_soon(requests);
    }
    return true;
}

static void on_pump(void *cookie)
{
    struct requests *requests = cookie;
    list_for_each_safe(at, &requests->unsent)
    {
        struct leg *leg = list_entry(at, struct leg, in_unsent);
        if (leg_send_ids(leg)) {
            list_remove(&leg->in_unsent);
        }
    }
    list_for_each_safe(at, &requests->starved)
    {
        leg_top_up(list_entry(at, struct leg, in_starved));
    }
    if (!list_empty(&requests->unsent) || !list_empty(&requests->starved)) {
        requests_pump_soon(requests);
    }
}

void requests_pump_soon(struct requests *requests)
{
    if (!loop_timer_armed(requests->pump)) {
        loop_timer_arm(requests->pump, PUMP_MS * NS_PER_MS);
    }
}

/* ---- the end of a request ---- */

static void request_free(struct request *request)
{
    struct requests *requests = request->requests;
    list_for_each_safe(at, &request->legs)
    {
        struct leg *leg = list_entry(at, struct leg, in_request);
        leg_send_cancel(leg);
        leg_detach(leg, POLICY_CANCELLED);
        leg_free(leg);
    }
    for (unsigned i = 0; i < request->n_choices; i++) {
        choice_fini(&request->choices[i]);
    }
    sse_close(&request->sse);
    list_remove(&request->in_dirty);
    list_remove(&request->in_requests);
    requests->n_live--;
    api_head_fini(&request->head);
    buf_fini(&request->out);
    intake_free(request->intake);
    mem_free(request->cached);
    mem_free(request);
}

static void on_close(void *cookie, struct httpd_request *http)
{
    struct request *request = cookie;
    log_debug("request", "%016" PRIx64 ": the client left", request->id);
    metric_counter_add(request->requests->count.cancelled, 1);
    request_free(request);
}

static void add_timing(struct request *request)
{
    char text[160];
    const Baton__Timings *t = &request->timings;
    if (!request->has_timings) {
        return;
    }
    snprintf(text, sizeof(text),
             "queue;dur=%.3f, prefill;dur=%.3f, transfer;dur=%.3f, first;dur=%.3f",
             (double)t->queue_ns * 1e-6, (double)t->prefill_ns * 1e-6,
             (double)t->transfer_ns * 1e-6, (double)(request->first_ns - request->start_ns) * 1e-6);
    (void)!httpd_header_add(request->http, "Server-Timing", text);
}

void request_fail(struct request *request, const struct api_error *error)
{
    struct requests *requests = request->requests;
    struct httpd_request *http = request->http;
    metric_counter_add(requests->count.failed, 1);
    /* Refusals come in floods, and are counted. */
    enum log_level level =
        error->status < 500 || error->status == 503 ? LOG_LEVEL_DEBUG : LOG_LEVEL_INFO;
    log_at(level, "request", "%016" PRIx64 " failed: %d %s: %s", request->id, error->status,
           error->code, error->message.text);
    if (request->is_stream && request->sse.started) {
        for (unsigned i = 0; i < request->n_choices; i++) {
            choice_write_events(&request->choices[i]);
        }
        api_event_error(error, &request->out);
        if (sse_write(&request->sse, &request->out) == STATUS_OK) {
            sse_abort(&request->sse);
        } else {
            httpd_request_on_close(http, NULL, NULL);
        }
        request_free(request);
        return;
    }
    if (error->status == 429 || error->status == 503) {
        httpd_retry_after(http, request->retry_after_s ? request->retry_after_s : 1);
    }
    request_free(request);
    httpd_reply_error(http, error->status, error->type, error->code,
                      error->param[0] ? error->param : NULL, "%s", error->message.text);
}

/* An answer without the call that was asked for is no answer: a client would act on its words. */
static void request_fail_disobeyed(struct request *request)
{
    struct api_error error;
    api_error_set(
        &error, API_CODE_INTERNAL_ERROR, "tool_choice",
        "tool_choice asks for a call, and the model made none to a tool that it may call");
    request_fail(request, &error);
}

static void usage_of(const struct request *request, struct api_usage *ret_usage)
{
    struct api_usage usage = {0, 0, 0, 0};
    for (size_t i = 0; i < request->intake->n_prompts; i++) {
        usage.prompt_tokens += request->intake->prompts[i].n;
        usage.cached_tokens += request->cached[i];
    }
    for (unsigned i = 0; i < request->n_choices; i++) {
        usage.completion_tokens += request->choices[i].n_ids;
        usage.reasoning_tokens += choice_n_reasoning_tokens(&request->choices[i]);
    }
    *ret_usage = usage;
}

static void complete_whole(struct request *request, const struct api_usage *usage)
{
    struct httpd_request *http = request->http;
    struct buf out = BUF_INIT;
    struct api_choice *choices = mem_array(request->n_choices, sizeof(*choices));
    for (unsigned i = 0; i < request->n_choices; i++) {
        struct choice *choice = &request->choices[i];
        choices[i] = (struct api_choice){
            .finish = api_finish_of(choice->was_cut, choice_n_calls(choice)),
            .answer = request->is_chat ? &choice->answer : NULL,
            .text = request->is_chat ? NULL : buf_text(&choice->answer.content),
            .text_bytes = choice->answer.content.bytes,
            .logprobs = choice->logprobs,
        };
    }
    api_render_answer(&request->head, choices, request->n_choices, usage, &out);
    mem_free(choices);
    add_timing(request);
    request_free(request);
    httpd_reply(http, 200, "application/json", out.data, out.bytes);
    buf_fini(&out);
}

/* All choices have ended. */
static void request_complete(struct request *request)
{
    struct requests *requests = request->requests;
    struct api_usage usage;
    usage_of(request, &usage);
    metric_counter_add(requests->count.finished, 1);
    metric_histogram_observe(requests->count.all_s,
                             (double)(loop_now_ns() - request->start_ns) * 1e-9);
    if (!request->is_stream) {
        complete_whole(request, &usage);
        return;
    }
    api_event_usage(&request->head, &usage, &request->out);
    api_event_done(&request->out);
    if (!request->sse.started) {
        add_timing(request);
    }
    if (sse_write(&request->sse, &request->out) == STATUS_OK) {
        sse_end(&request->sse);
        request_free(request);
    } /* else on_close follows, and frees it */
}

static void request_flush(struct request *request)
{
    list_remove(&request->in_dirty);
    if (request->disobeyed) {
        request_fail_disobeyed(request);
        return;
    }
    if (request->is_stream) {
        for (unsigned i = 0; i < request->n_choices; i++) {
            choice_write_events(&request->choices[i]);
        }
    }
    if (request->n_finished == request->n_choices) {
        request_complete(request);
        return;
    }
    if (request->is_stream && request->out.bytes) {
        if (!request->sse.started) {
            add_timing(request);
        }
        (void)!sse_write(&request->sse, &request->out); /* if it is refused, on_close follows */
        buf_fini(&request->out);                        /* it is sent, and the next token is far */
    }
}

static void flush(void *cookie)
{
    struct requests *requests = cookie;
    struct list *first;
    requests->flushing = false;
    while ((first = list_first(&requests->dirty)) != NULL) {
        request_flush(list_entry(first, struct request, in_dirty));
    }
}

void request_dirty(struct request *request)
{
    struct requests *requests = request->requests;
    if (!list_linked(&request->in_dirty)) {
        list_push_back(&requests->dirty, &request->in_dirty);
    }
    if (!requests->flushing) {
        requests->flushing = true;
        loop_defer(requests->options.loop, flush, requests);
    }
}

/* ---- the beginning of a request ---- */

/* Starts prompts that have not been started, as many as may run at once. The request may be gone
 * afterwards. */
static void request_start_more(struct request *request)
{
    uint32_t n = request->intake->request->n;
    bool is_there = true;
    while (is_there && request->next_prompt < request->intake->n_prompts &&
           request->n_legs < REQUEST_MAX_LEGS) {
        size_t i = request->next_prompt++;
        is_there = leg_start(leg_create(request, i, (unsigned)(i * n), n));
    }
}

void requests_begin(struct requests *requests, struct intake *intake)
{
    const struct api_request *api = intake->request;
    unsigned n_choices = (unsigned)(intake->n_prompts * api->n);
    struct request *request =
        mem_zalloc(sizeof(*request) + n_choices * sizeof(request->choices[0]));
    char unique[17];
    request->requests = requests;
    request->id = requests->next_id++;
    request->intake = intake;
    request->http = intake->http;
    request->is_stream = api->stream;
    request->is_chat = api->is_chat;
    request->start_ns = httpd_request_start_ns(intake->http);
    request->seed =
        api->sampling.seed_given ? (uint64_t)api->sampling.seed : requests_random(requests);
    request->cached = mem_array(intake->n_prompts + 1, sizeof(*request->cached));
    request->n_choices = n_choices;
    list_init(&request->legs);
    list_push_back(&requests->live, &request->in_requests);
    requests->n_live++;
    metric_counter_add(requests->count.begun, 1);
    snprintf(unique, sizeof(unique), "%016" PRIx64, request->id);
    api_head_init(&request->head, api, unique, (int64_t)time(NULL),
                  requests->fingerprint[0] ? requests->fingerprint : NULL);
    if (request->is_stream) {
        sse_open(requests->sse, &request->sse, request->http);
        for (unsigned i = 0; i < n_choices; i++) {
            api_event_role(&request->head, i, &request->out);
        }
    }
    for (unsigned i = 0; i < n_choices; i++) {
        choice_init(&request->choices[i], request, i);
    }
    for (size_t i = 0; i < intake->n_prompts; i++) {
        metric_counter_add(requests->count.tokens_in, intake->prompts[i].n);
    }
    httpd_request_on_close(request->http, on_close, request);
    request_start_more(request);
}

/* ---- tokens ---- */

void choice_ended(struct choice *choice, bool was_cut)
{
    struct request *request = choice->request;
    struct leg *leg = choice->leg;
    assert(!choice->finished);
    choice->was_cut = was_cut;
    choice_text_end(choice);
    choice->finished = true;
    choice->leg = NULL;
    request->n_finished++;
    if (leg) {
        leg->n_live -= leg->n_live > 0;
    }
    request->disobeyed |= choice_disobeyed(choice);
    if (request->is_stream && !request->disobeyed) {
        choice_write_events(choice);
        api_event_finish(&request->head, choice->index,
                         api_finish_of(was_cut, choice_n_calls(choice)), choice->logprobs,
                         &request->out);
    }
    request_dirty(request);
}

/* A leg whose choices have all ended is over; then the next prompt has its turn. */
static void leg_settle(struct leg *leg, bool cancel)
{
    struct request *request = leg->request;
    if (leg->n_live > 0) {
        return;
    }
    if (cancel) {
        leg_send_cancel(leg);
    }
    leg_detach(leg, POLICY_FINISHED);
    leg_free(leg);
    request_start_more(request);
}

static void note_first(struct leg *leg, const Baton__FromDecode__Row *row)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    uint64_t now_ns = loop_now_ns();
    leg->has_first = true;
    leg->first_ns = now_ns;
    if (!request->first_ns) {
        request->first_ns = now_ns;
        metric_histogram_observe(requests->count.first_s,
                                 (double)(now_ns - request->start_ns) * 1e-9);
    }
    if (row->timings && !request->has_timings) {
        request->timings = *row->timings;
        request->has_timings = true;
    }
}

/* The node says what can't be: takes the attempt from it. */
static void attempt_broken(struct leg *leg, const char *text)
{
    leg_send_cancel(leg);
    (void)!leg_failed(leg, BATON__FAIL_CODE__FAIL_INTERNAL, leg->node->ref.id, true, text);
}

static void on_row(struct leg *leg, const Baton__FromDecode__Row *row)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    struct choice *choice = &request->choices[leg->first_choice + row->sample];
    uint32_t n_vocab = tokenizer_n_vocab(requests->options.tokenizer);
    uint32_t n_before = choice->n_ids;
    bool has_logprobs = row->n_logprobs == row->n_ids;
    if (choice->finished) {
        return; /* its cancel is on the way */
    }
    if (row->first_index > choice->n_ids) {
        attempt_broken(leg, "tokens are missing");
        return;
    }
    if (!leg->has_first) {
        note_first(leg, row);
    }
    for (size_t i = choice->n_ids - row->first_index;
         i < row->n_ids && !choice->done_early && !choice->saw_end; i++) {
        if (row->ids[i] >= n_vocab) {
            attempt_broken(leg, "a token is outside the vocabulary");
            return;
        }
        choice_token(choice, row->ids[i], has_logprobs ? row->logprobs[i] : NULL);
    }
    uint32_t n_new = choice->n_ids - n_before;
    uint64_t now_ns = loop_now_ns();
    metric_counter_add(requests->count.tokens_out, n_new);
    if (choice->token_ns && n_new) {
        metric_histogram_observe(requests->count.gap_s,
                                 (double)(now_ns - choice->token_ns) * 1e-9 / n_new);
    }
    choice->token_ns = now_ns;
    uint32_t n_received = choice->n_ids - leg->n_generated;
    leg->received = n_received > leg->received ? n_received : leg->received;
    request_dirty(request);
    if (choice->done_early) {
        unsigned sample_i = row->sample;
        choice_ended(choice, false);
        if (leg->n_live > 0) {
            leg_send_cancel_sample(leg, sample_i);
        }
        leg_settle(leg, true);
        return;
    }
    leg_top_up(leg);
}

static void on_finished(struct leg *leg, const Baton__FromDecode__Finished *finished)
{
    struct request *request = leg->request;
    struct choice *choice = &request->choices[leg->first_choice + finished->sample];
    if (choice->finished) {
        return;
    }
    if (finished->n_generated != choice->n_ids ||
        finished->reason == BATON__FROM_DECODE__REASON__REASON_CANCELLED) {
        attempt_broken(leg, "the end came before the last token");
        return;
    }
    if (finished->usage && finished->usage->cached_tokens > request->cached[leg->prompt_i] &&
        finished->usage->cached_tokens <= request->intake->prompts[leg->prompt_i].n &&
        leg->attempt == 1) {
        request->cached[leg->prompt_i] = finished->usage->cached_tokens;
    }
    choice_ended(choice, finished->reason == BATON__FROM_DECODE__REASON__REASON_LENGTH ||
                             finished->reason == BATON__FROM_DECODE__REASON__REASON_CONTEXT);
    leg_settle(leg, false);
}

/* The running leg that a message of this node is about, or NULL. */
static struct leg *find(struct requests *requests, const struct node *node, uint64_t id,
                        uint32_t attempt)
{
    struct leg *leg = hmap_get_u64(requests->legs, id);
    if (!leg || leg->attempt != attempt || leg->node != node) {
        metric_counter_add(requests->count.stray, 1);
        return NULL;
    }
    return leg;
}

static void on_step(struct requests *requests, struct node *node,
                    const Baton__FromDecode__Step *step)
{
    for (size_t i = 0; i < step->n_rows; i++) {
        const Baton__FromDecode__Row *row = step->rows[i];
        struct leg *leg = find(requests, node, row->request, row->attempt);
        if (leg && row->sample < leg->n_choices) {
            on_row(leg, row);
        }
    }
}

void requests_message(struct requests *requests, struct node *node,
                      const Baton__FromDecode *message)
{
    struct leg *leg;
    switch (message->what_case) {
    case BATON__FROM_DECODE__WHAT_ADMITTED:
        leg = find(requests, node, message->admitted->request, message->admitted->attempt);
        if (leg) {
            leg->admitted = true;
        }
        break;
    case BATON__FROM_DECODE__WHAT_STEP:
        on_step(requests, node, message->step);
        break;
    case BATON__FROM_DECODE__WHAT_FINISHED:
        leg = find(requests, node, message->finished->request, message->finished->attempt);
        if (leg && message->finished->sample < leg->n_choices) {
            on_finished(leg, message->finished);
        }
        break;
    case BATON__FROM_DECODE__WHAT_FAILED:
        leg = find(requests, node, message->failed->request, message->failed->attempt);
        if (leg) {
            (void)!leg_failed(leg, message->failed->code, message->failed->node,
                              message->failed->retryable, message->failed->text);
        }
        break;
    default:
        metric_counter_add(requests->count.stray, 1);
        break;
    }
}

/* ---- nodes ---- */

void requests_node_lost(struct requests *requests, struct node *node, const char *text)
{
    struct list *first;
    while ((first = list_first(&node->legs)) != NULL) {
        struct leg *leg = list_entry(first, struct leg, in_node);
        if (node->serving) {
            leg_send_cancel(leg); /* wedged: when it wakes it need not go on */
        }
        (void)!leg_failed(leg, BATON__FAIL_CODE__FAIL_PEER_LOST, node->ref.id, true, text);
    }
}

void requests_node_writable(struct requests *requests, struct node *node)
{
    requests_pump_soon(requests);
}

/* The last node of a checkpoint left, and one of another serves: nobody can end what was begun. */
static void checkpoint_change(struct requests *requests, const struct node *node)
{
    if (requests->checkpoint_bytes > 0 && requests->n_live > 0) {
        requests_fail_all(requests, API_CODE_NO_READY_NODE,
                          "the nodes that began this answer have left, and those that serve now "
                          "have another checkpoint");
    }
    memcpy(requests->checkpoint, node->fingerprint, node->fingerprint_bytes);
    requests->checkpoint_bytes = node->fingerprint_bytes;
    snprintf(requests->fingerprint, sizeof(requests->fingerprint), "fp_%02x%02x%02x%02x_%.40s",
             node->fingerprint[0], node->fingerprint[1], node->fingerprint[2], node->fingerprint[3],
             requests->options.version);
}

void requests_nodes_changed(struct requests *requests)
{
    list_for_each(at, registry_nodes(requests->options.registry))
    {
        const struct node *node = list_entry(at, struct node, in_registry);
        if (node->role != BATON__ROLE__ROLE_DECODE || !registry_node_usable(node) ||
            node->fingerprint_bytes < 4) {
            continue;
        }
        if (requests->checkpoint_bytes != node->fingerprint_bytes ||
            memcmp(requests->checkpoint, node->fingerprint, node->fingerprint_bytes) != 0) {
            checkpoint_change(requests, node);
        }
        return; /* the decode nodes that have joined are of one checkpoint */
    }
}

/* ---- deadlines behind the nodes' own ---- */

/* Whether a leg has waited for its first token, or for its end, longer than any node may let it. */
static bool is_overdue(const struct leg *leg, uint64_t now_ns)
{
    const struct requests_options *o = &leg->request->requests->options;
    if (leg->state == LEG_RUNNING && leg->has_first && o->generation_timeout_ns) {
        return now_ns - leg->first_ns > o->generation_timeout_ns + DEADLINE_MARGIN_MS * NS_PER_MS;
    }
    if (leg->state != LEG_RUNNING || leg->has_first || !o->queue_timeout_ns ||
        !o->prefill_timeout_ns || !o->transfer_timeout_ns) {
        return false;
    }
    /* The queues of both nodes have the queue's time each. */
    uint64_t limit_ns = 2 * o->queue_timeout_ns + o->prefill_timeout_ns + o->transfer_timeout_ns +
                        DEADLINE_MARGIN_MS * NS_PER_MS;
    return now_ns - leg->started_ns > limit_ns;
}

static void request_look(struct request *request, uint64_t now_ns)
{
    list_for_each(at, &request->legs)
    {
        struct leg *leg = list_entry(at, struct leg, in_request);
        if (is_overdue(leg, now_ns)) {
            leg_send_cancel(leg);
            (void)!leg_failed(leg,
                              leg->has_first ? BATON__FAIL_CODE__FAIL_DEADLINE_GENERATION
                                             : BATON__FAIL_CODE__FAIL_DEADLINE_PREFILL,
                              leg->node->ref.id, false, "the node let its own deadlines pass");
            return; /* the request is gone */
        }
    }
}

static void on_tick(void *cookie)
{
    struct requests *requests = cookie;
    uint64_t now_ns = loop_now_ns();
    list_for_each_safe(at, &requests->live)
    {
        request_look(list_entry(at, struct request, in_requests), now_ns);
    }
    loop_timer_arm(requests->tick, TICK_MS * NS_PER_MS);
}

/* ---- life ---- */

bool requests_have_room(const struct requests *requests)
{
    return requests->n_live < requests->options.max_requests;
}

size_t requests_n_live(const struct requests *requests)
{
    return requests->n_live;
}

void requests_fail_all(struct requests *requests, enum api_code code, const char *text)
{
    struct list *first;
    while ((first = list_first(&requests->live)) != NULL) {
        struct api_error error;
        api_error_set(&error, code, NULL, "%s", text);
        request_fail(list_entry(first, struct request, in_requests), &error);
    }
}

struct requests *requests_create(const struct requests_options *options, struct metrics *metrics)
{
    struct requests *requests = mem_zalloc(sizeof(*requests));
    uint64_t random[2] = {0, 0};
    requests->options = *options;
    requests->sse = sse_create(options->loop);
    requests->legs = hmap_create();
    list_init(&requests->live);
    list_init(&requests->dirty);
    list_init(&requests->unsent);
    list_init(&requests->starved);
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        log_warn("request", "no random bytes: ids and seeds follow the clock");
        random[0] = random[1] = loop_now_ns();
    }
    requests->next_id = random[0];
    requests->jitter = random[1];
    requests->tick = loop_timer_create(options->loop, on_tick, requests);
    requests->pump = loop_timer_create(options->loop, on_pump, requests);
    loop_timer_arm(requests->tick, TICK_MS * NS_PER_MS);
    requests_metrics_register(requests, metrics);
    return requests;
}

void requests_free(struct requests *requests)
{
    if (!requests) {
        return;
    }
    loop_defer_cancel(requests->options.loop, flush, requests);
    list_for_each_safe(at, &requests->live)
    {
        request_free(list_entry(at, struct request, in_requests));
    }
    loop_timer_free(requests->tick);
    loop_timer_free(requests->pump);
    sse_free(requests->sse);
    hmap_free(requests->legs);
    buf_fini(&requests->scratch);
    mem_free(requests);
}
