/* decode/request_internal.h - what the files of the request machine share. Not for others.
 *
 * request.c holds the states and admission, request_tell.c what leaves on a router's link,
 * request_start.c what is read from a Start.
 */
#ifndef BATON_DECODE_REQUEST_INTERNAL_H
#define BATON_DECODE_REQUEST_INTERNAL_H

#include "decode/request.h"
#include "node/wire.h"

enum request_state {
    REQUEST_RECEIVING,
    REQUEST_QUEUED,
    REQUEST_TRANSFER,
    REQUEST_OPENING,
    REQUEST_LOCAL,
    REQUEST_RUNNING,
    REQUEST_ENDED,
    N_REQUEST_STATES
};

struct sample {
    struct list dirty; /* in its sink */
    struct request *request;
    uint32_t index;
    struct batch_row row;
    struct engine_sampling sampling;
    uint32_t n_generated; /* all attempts */
    uint32_t credit;
    /* told so far, and what waits to be */
    uint32_t n_told;
    struct engine_draw *pending;
    uint32_t n_pending, pending_capacity;
    bool live, finished, end_told;
    Baton__FromDecode__Reason reason;
};

struct request {
    struct list in_state, in_sink;
    struct requests *requests;
    struct request_sink *sink; /* NULL: the router is gone */
    uint64_t id;
    uint32_t attempt;
    enum request_state state;
    uint32_t *ids;
    uint32_t n_ids, n_ids_total, n_generated;
    uint32_t credit;
    bool front, admission_told;
    Baton__Deadlines deadlines;
    bool remote;
    char prefill_id[65];
    uint64_t prefill_incarnation, cache_salt;
    struct wire_sampling draws;
    Baton__Sampling wire; /* for Run */
    Baton__LogitBias *wire_biases, **wire_bias_list;
    struct transfer *transfer;
    struct batch_prompt prompt;
    bool prompt_out;        /* the batcher has it */
    bool computing;         /* local: its first chunk has begun */
    struct engine_seq *seq; /* of the prompt, until samples take it */
    uint32_t claimed_pages, claimed_slots;
    struct sample samples[WIRE_MAX_SAMPLES];
    uint32_t n_samples;
    uint32_t cached_tokens;
    uint64_t arrival_ns, state_ns, first_token_ns;
    Baton__Timings timings;
    bool timings_told;
};

struct requests {
    struct requests_options options;
    struct peers *peers;
    struct handoff *handoff;
    struct batcher *batcher;
    void (*broken)(void *cookie, enum status status);
    void *cookie;
    struct list states[N_REQUEST_STATES];
    uint32_t n_in_state[N_REQUEST_STATES];
    uint32_t claimed_pages, claimed_slots;
    struct list sinks_dirty;
    struct requests_stats stats;
    bool admitting, flushing, reaping;
};

/* request.c: the one place where a request changes its state; and its end, once all is told. */
void request_move(struct request *request, enum request_state state);
void request_settle(struct request *request);

extern const char *const request_state_names[];

/* request_tell.c: has the sample's tokens or end sent at the end of the turn. */
void request_tell_soon(struct requests *requests, struct sample *sample);
void requests_flush_all(void *cookie);
/* Once, to a request that waits for its first token. */
void request_tell_admitted(struct request *request, uint32_t n_ahead);
void request_tell_failed(struct requests *requests, struct request_sink *sink, uint64_t id,
                         uint32_t attempt, Baton__FailCode code, const char *node, bool retryable,
                         const char *text);

/* request_start.c: pages that must be free before a request is admitted. */
uint32_t request_pages_needed(const struct request *request);
/* Whether this node can ever serve a Start; if not, the numbers of both. */
must_check bool request_start_fits(const struct requests *requests,
                                   const Baton__ToDecode__Start *start, char *ret_text,
                                   size_t text_bytes);
/* What is wrong with a Start, or NULL; and the samples that it asks for. */
const char *request_start_wrong(const struct requests *requests,
                                const Baton__ToDecode__Start *start);
void request_sampling_copy(struct request *request, const Baton__Sampling *s);

#endif
