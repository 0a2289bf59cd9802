/*
 * What is said to decode nodes: Start and the parts of long prompts, Credit, Cancel.
 *
 * Credit. A streaming client's leg may have REQUEST_CREDIT tokens of each sample under way; it gets
 * more when half of that has come and the client's connection has not fallen behind. So a slow
 * reader stops its own rows, and nobody's else. An answer that is sent whole is bounded by its
 * max_tokens, which is granted at once.
 */
#include <string.h>

#include "base/mem.h"
#include "router/request_internal.h"
#include "rpc/link.h"

enum {
    PART_IDS = 12000,          /* at most five bytes each: under 64 KB */
    UNSENT_BYTES = 256 * 1024, /* of a link's queue, beyond which a long prompt waits */
    PENDING_BYTES = 16 * 1024, /* of a client's connection, beyond which it gets no credit */
};

/* The finaliser of splitmix64, as engine/sampler.h has it for n > 1. */
uint64_t request_sample_seed(uint64_t seed, uint32_t sample_i)
{
    if (sample_i == 0) {
        return seed;
    }
    uint64_t z = seed ^ (sample_i * 0xd1342543de82ef95ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Ids [first, first + n) of the attempt: the prompt, then what its one choice has generated. */
static void copy_ids(const struct leg *leg, uint32_t first, uint32_t n, uint32_t *to)
{
    const struct request *request = leg->request;
    const struct token_ids *prompt = &request->intake->prompts[leg->prompt_i];
    const struct choice *choice = &request->choices[leg->first_choice];
    for (uint32_t i = 0; i < n; i++) {
        size_t at = first + i;
        to[i] = at < prompt->n ? prompt->id[at] : choice->ids[at - prompt->n];
    }
}

static uint32_t ms_of(uint64_t ns)
{
    uint64_t ms = (ns + NS_PER_MS - 1) / NS_PER_MS;
    return ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
}

static void fill_sampling(const struct leg *leg, Baton__Sampling *sampling, struct arena *arena)
{
    const struct request *request = leg->request;
    const struct api_sampling *from = &request->intake->request->sampling;
    const struct requests_options *options = &request->requests->options;
    const struct token_ids *prompt = &request->intake->prompts[leg->prompt_i];
    sampling->temperature = (float)from->temperature;
    sampling->top_p = (float)from->top_p;
    sampling->top_k = from->top_k;
    sampling->min_p = (float)from->min_p;
    sampling->presence_penalty = (float)from->presence_penalty;
    sampling->frequency_penalty = (float)from->frequency_penalty;
    sampling->repetition_penalty = (float)from->repetition_penalty;
    sampling->n_logit_bias = from->n_logit_bias;
    sampling->logit_bias =
        arena_alloc(arena, (from->n_logit_bias + 1) * sizeof(*sampling->logit_bias));
    for (size_t i = 0; i < from->n_logit_bias; i++) {
        Baton__LogitBias *bias = arena_alloc(arena, sizeof(*bias));
        baton__logit_bias__init(bias);
        bias->id = from->logit_bias[i].id;
        bias->bias = from->logit_bias[i].bias;
        sampling->logit_bias[i] = bias;
    }
    uint32_t n = request->intake->request->n;
    sampling->n = leg->n_choices;
    /* A leg of one choice draws as that choice did among its siblings. */
    sampling->seed = request_sample_seed(request->seed, leg->first_choice % n);
    sampling->logprobs = from->logprobs;
    sampling->n_top_logprobs = from->n_top_logprobs;
    sampling->ignore_eos = from->ignore_eos;
    sampling->min_tokens = from->min_tokens;
    sampling->max_tokens =
        api_max_tokens(request->intake->request, &request->intake->context, prompt->n);
    /* The node knows one end token; a model that has several needs the rest said. */
    size_t n_more = !from->ignore_eos && options->n_eos_ids > 1 ? options->n_eos_ids - 1 : 0;
    size_t n_stops = from->n_stop_token_ids;
    sampling->stop_token_ids = arena_alloc(arena, (n_stops + n_more + 1) * sizeof(uint32_t));
    for (size_t i = 0; i < n_stops; i++) {
        sampling->stop_token_ids[sampling->n_stop_token_ids++] = from->stop_token_ids[i];
    }
    for (size_t i = 0; i < n_more && sampling->n_stop_token_ids < API_MAX_STOP_IDS; i++) {
        sampling->stop_token_ids[sampling->n_stop_token_ids++] = options->eos_ids[1 + i];
    }
}

enum status leg_send_start(struct leg *leg)
{
    struct request *request = leg->request;
    const struct requests_options *options = &request->requests->options;
    const struct token_ids *prompt = &request->intake->prompts[leg->prompt_i];
    struct arena *arena = arena_create(0);
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    Baton__ToDecode__Start start = BATON__TO_DECODE__START__INIT;
    Baton__Sampling sampling = BATON__SAMPLING__INIT;
    Baton__Deadlines deadlines = BATON__DEADLINES__INIT;
    Baton__NodeRef prefill = BATON__NODE_REF__INIT;
    uint32_t n_first = leg->n_ids < PART_IDS ? leg->n_ids : PART_IDS;
    fill_sampling(leg, &sampling, arena);
    deadlines.queue_ms = ms_of(options->queue_timeout_ns);
    deadlines.prefill_ms = ms_of(options->prefill_timeout_ns);
    deadlines.transfer_ms = ms_of(options->transfer_timeout_ns);
    deadlines.generation_ms = ms_of(options->generation_timeout_ns);
    start.request = leg->id;
    start.attempt = leg->attempt;
    start.n_ids_total = leg->n_ids;
    start.n_ids = n_first;
    if (n_first <= prompt->n) {
        start.ids = prompt->id;
    } else {
        start.ids = arena_alloc(arena, n_first * sizeof(uint32_t));
        copy_ids(leg, 0, n_first, start.ids);
    }
    start.n_generated = leg->n_generated;
    start.sampling = &sampling;
    start.deadlines = &deadlines;
    if (leg->prefill.id[0]) {
        prefill.node_id = leg->prefill.id;
        prefill.incarnation = leg->prefill.incarnation;
        start.prefill = &prefill;
    }
    leg->credit = request->is_stream ? REQUEST_CREDIT : sampling.max_tokens - leg->n_generated;
    leg->received = 0;
    start.credit = leg->credit;
    start.front = leg->front;
    message.what_case = BATON__TO_DECODE__WHAT_START;
    message.start = &start;
    enum status status = registry_send(leg->node, &message);
    if (!status) {
        leg->n_sent = n_first;
    }
    arena_free(arena);
    return status;
}

bool leg_send_ids(struct leg *leg)
{
    struct link_stats stats;
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    Baton__IdsPart part = BATON__IDS_PART__INIT;
    if (leg->n_sent == leg->n_ids) {
        return true; /* most prompts: all of it was in Start */
    }
    uint32_t *ids = mem_array(PART_IDS, sizeof(*ids));
    message.what_case = BATON__TO_DECODE__WHAT_IDS;
    message.ids = &part;
    part.key = leg->id;
    part.attempt = leg->attempt;
    part.ids = ids;
    while (leg->n_sent < leg->n_ids) {
        link_stats(leg->node->serve, &stats);
        if (stats.queued_bytes > UNSENT_BYTES) {
            break;
        }
        uint32_t n = leg->n_ids - leg->n_sent;
        n = n < PART_IDS ? n : PART_IDS;
        copy_ids(leg, leg->n_sent, n, ids);
        part.first = leg->n_sent;
        part.n_ids = n;
        if (registry_send(leg->node, &message)) {
            break; /* full: again later; lost: `lost` tells */
        }
        leg->n_sent += n;
    }
    mem_free(ids);
    return leg->n_sent == leg->n_ids;
}

static void send_cancel(struct leg *leg, bool all, uint32_t sample_i)
{
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    Baton__ToDecode__Cancel cancel = BATON__TO_DECODE__CANCEL__INIT;
    cancel.request = leg->id;
    cancel.attempt = leg->attempt;
    cancel.all_samples = all;
    cancel.sample = sample_i;
    message.what_case = BATON__TO_DECODE__WHAT_CANCEL;
    message.cancel = &cancel;
    if (registry_send(leg->node, &message) == STATUS_EXHAUSTED) {
        /* 8192 messages wait for this node: it does not read, and a link that is dialled anew
         * cancels everything. */
        registry_drop_serve(leg->node, "it does not read");
    }
}

void leg_send_cancel(struct leg *leg)
{
    if (leg->state == LEG_RUNNING) {
        send_cancel(leg, true, 0);
    }
}

void leg_send_cancel_sample(struct leg *leg, unsigned sample_i)
{
    if (leg->state == LEG_RUNNING) {
        send_cancel(leg, false, sample_i);
    }
}

void leg_top_up(struct leg *leg)
{
    struct request *request = leg->request;
    struct requests *requests = request->requests;
    if (leg->state != LEG_RUNNING || !request->is_stream ||
        leg->credit - leg->received > REQUEST_CREDIT / 2) {
        list_remove(&leg->in_starved);
        return;
    }
    Baton__ToDecode message = BATON__TO_DECODE__INIT;
    Baton__ToDecode__Credit credit = BATON__TO_DECODE__CREDIT__INIT;
    credit.request = leg->id;
    credit.attempt = leg->attempt;
    credit.tokens = REQUEST_CREDIT - (leg->credit - leg->received);
    message.what_case = BATON__TO_DECODE__WHAT_CREDIT;
    message.credit = &credit;
    if (httpd_stream_pending_bytes(request->http) <= PENDING_BYTES &&
        registry_send(leg->node, &message) == STATUS_OK) {
        leg->credit += credit.tokens;
        list_remove(&leg->in_starved);
    } else if (!list_linked(&leg->in_starved)) {
        list_push_back(&requests->starved, &leg->in_starved);
        requests_pump_soon(requests);
    }
}
