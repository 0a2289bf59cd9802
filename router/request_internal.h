#ifndef BATON_ROUTER_REQUEST_INTERNAL_H
#define BATON_ROUTER_REQUEST_INTERNAL_H

#include "base/hmap.h"
#include "base/list.h"
#include "model/chat_parse.h"
#include "model/stop.h"
#include "router/api_render.h"
#include "router/request.h"

/*
 * What the files of request.c share; nobody else includes it. request.c moves requests and legs,
 * request_retry.c decides what a failure means, request_leg.c speaks to decode nodes,
 * request_choice.c turns tokens into text, request_show.c counts and lists.
 */

enum {
    REQUEST_MAX_LEGS = 8,      /* of one request that run at once */
    REQUEST_CREDIT = 64,       /* tokens of a sample that may be under way to a streaming client */
    REQUEST_MAX_PREEMPTED = 2, /* re-runs of a leg after that */
};

enum leg_state { LEG_WAITING, LEG_RUNNING, LEG_ENDED };

/* What a leg has been refused by; made when something has gone wrong. */
struct leg_history {
    struct policy_tried tried[POLICY_MAX_TRIED];
    size_t n_tried; /* ever; the last POLICY_MAX_TRIED are kept */
    struct node_ref full[POLICY_MAX_TRIED];
    size_t n_full;
};

/* One prompt with its choices on one decode node. Owned by its request. */
struct leg {
    struct request *request;
    struct list in_request, in_node, in_unsent, in_starved;
    enum leg_state state;
    uint64_t id;      /* on the wire */
    uint32_t attempt; /* from 1; counts every Start */
    size_t prompt_i;
    unsigned first_choice, n_choices; /* of the request's choices */
    unsigned n_live;                  /* choices of the attempt that have not ended */
    struct node *node;                /* running: the decode node */
    struct node_ref prefill;          /* running: "" for local */
    uint64_t started_ns;              /* the attempt */
    uint64_t first_ns;                /* when its first token came */
    uint64_t waiting_ns;              /* since when it can't be started for want of a node */
    uint32_t n_ids, n_generated;      /* of the attempt: all its ids; of them generated before */
    uint32_t n_sent;                  /* ids that are on their way */
    uint32_t credit, received;        /* tokens of each sample: granted; most received */
    bool admitted, has_first, front;
    unsigned n_attempts, n_preempted; /* that failed */
    struct loop_timer *retry;         /* NULL until the first */
    struct leg_history *history;
};

/* One answer. Part of its request. */
struct choice {
    struct request *request;
    struct leg *leg; /* NULL once finished */
    unsigned index;  /* of the answer */
    bool finished;   /* the client was told, or will be with the next flush */
    bool was_cut;
    bool saw_end;    /* the last id is an end token */
    bool done_early; /* a stop string, or the one call that was allowed */
    bool disobeyed;  /* a call was asked for by tool_choice, and this is none of those */
    uint32_t *ids;   /* generated so far, all attempts together */
    uint32_t n_ids, capacity;
    uint64_t token_ns;              /* the last came */
    struct chat_parse *parse;       /* chat */
    struct tokenizer_stream stream; /* completions */
    struct stop *stop;              /* NULL: no stop strings */
    enum chat_event_kind pending_kind;
    struct buf pending;            /* stream: text of pending_kind not given out yet */
    struct chat_answer answer;     /* whole answers; completions have their text in content */
    struct api_logprobs *logprobs; /* NULL: not asked for */
};

struct request {
    struct requests *requests;
    struct list in_requests, in_dirty;
    uint64_t id;
    struct intake *intake; /* owns the parsed request, its context and the ids of its prompts */
    struct httpd_request *http;
    struct sse_stream sse; /* of a streamed answer */
    struct api_head head;
    bool is_stream, is_chat;
    bool disobeyed; /* a choice has: the request fails with the next flush */
    bool has_timings;
    Baton__Timings timings; /* of the first leg that had a first token */
    uint64_t start_ns, first_ns;
    uint64_t seed;
    struct list legs;
    size_t n_legs;
    unsigned retry_after_s; /* of an error; 0: a second */
    size_t next_prompt;     /* not started yet */
    uint32_t *cached;       /* tokens of each prompt that were reused */
    struct buf out;         /* stream: events to send with the next flush */
    unsigned n_choices, n_finished;
    struct choice choices[];
};

struct requests {
    struct requests_options options;
    struct sse *sse;
    struct hmap *legs; /* by id: those that run */
    struct list live, dirty;
    struct list unsent;  /* legs with ids that the link did not take yet */
    struct list starved; /* legs that are owed credit: their client, or the link, is slow */
    size_t n_live;
    bool flushing;
    uint64_t next_id, jitter;
    struct loop_timer *tick;                   /* deadlines behind the nodes' own */
    struct loop_timer *pump;                   /* long prompts, in parts */
    uint8_t checkpoint[HELLO_FINGERPRINT_MAX]; /* of the decode nodes that serve, or did last */
    size_t checkpoint_bytes;
    char fingerprint[64]; /* system_fingerprint; "" until a node is known */
    struct buf scratch;
    struct {
        struct metric_counter *begun, *finished, *failed, *cancelled, *retried, *failed_over;
        struct metric_counter *preempted, *stray, *tokens_in, *tokens_out, *refused;
        struct metric_histogram *first_s, *gap_s, *all_s;
    } count;
};

/* ---- request.c ---- */

/* Writes what the request has at the end of the turn. */
void request_dirty(struct request *request);

/* Ends the request with an error: as an answer, or inside the stream. The request is gone. */
void request_fail(struct request *request, const struct api_error *error);

/* Starts the leg on a node, lets it wait, or fails the request. False: the request is gone. */
bool must_check leg_start(struct leg *leg);

/* Starts it in about delay_ms. */
void leg_start_later(struct leg *leg, unsigned delay_ms);

struct leg *leg_create(struct request *request, size_t prompt_i, unsigned first_choice,
                       unsigned n_choices);
void leg_free(struct leg *leg);

/* The attempt is over on the node, well or not: forgets it there and tells the policy. */
void leg_detach(struct leg *leg, enum policy_outcome outcome);

/* The choice has ended. */
void choice_ended(struct choice *choice, bool was_cut);

/* Looks at unsent and starved legs a moment later. */
void requests_pump_soon(struct requests *requests);

uint64_t requests_random(struct requests *requests);

/* ---- request_retry.c ---- */

/* The attempt failed, at node: another follows, or the end. False: the request is gone. The leg may
 * be gone in any case. */
bool must_check leg_failed(struct leg *leg, Baton__FailCode code, const char *node, bool retryable,
                           const char *text);

/* No node would take it: it waits for one if the answer has begun or others of it run. False: the
 * request is gone. */
bool must_check leg_refused(struct leg *leg, enum status status, uint64_t wait_ns);

/* ---- request_leg.c ---- */

/* Sends Start to leg->node. STATUS_EXHAUSTED, STATUS_PEER_LOST. */
enum status must_check leg_send_start(struct leg *leg);

/* Sends what is left of the ids, in parts; stops when the link has enough. True: all is sent. */
bool leg_send_ids(struct leg *leg);

void leg_send_cancel(struct leg *leg);
void leg_send_cancel_sample(struct leg *leg, unsigned sample_i);

/* Grants more tokens if the client keeps up. */
void leg_top_up(struct leg *leg);

/* The seed of sample i, as the nodes make it: that of sample 0 is the request's own. */
uint64_t request_sample_seed(uint64_t seed, uint32_t sample_i);

/* ---- request_choice.c ---- */

void choice_init(struct choice *choice, struct request *request, unsigned index);
void choice_fini(struct choice *choice);

/* Takes the next token; logprobs may be NULL. */
void choice_token(struct choice *choice, uint32_t id, const Baton__TokenLogprobs *logprobs);

/* No more tokens come; gives out what was held back. */
void choice_text_end(struct choice *choice);

/* Whether the choice, which has ended, lacks the call that tool_choice asked for. */
bool choice_disobeyed(const struct choice *choice);

/* Stream: what has become of the choice since the last flush, as events. */
void choice_write_events(struct choice *choice);

/* Whether id ends an answer of this request. */
bool request_is_end_id(const struct request *request, uint32_t id);

uint32_t choice_n_reasoning_tokens(const struct choice *choice);
unsigned choice_n_calls(const struct choice *choice);

/* ---- request_show.c ---- */

void requests_metrics_register(struct requests *requests, struct metrics *metrics);

#endif
