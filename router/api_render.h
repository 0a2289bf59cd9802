#ifndef BATON_ROUTER_API_RENDER_H
#define BATON_ROUTER_API_RENDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "model/chat_parse.h"
#include "model/tokenizer.h"
#include "router/api.h"

/*
 * The OpenAI-compatible surface, the way out: results to the bytes of an answer. Everything appends
 * to a struct buf of the caller. No network, no state but in the structs here; any thread, one at a
 * time for each struct. Text is given out as UTF-8 with JSON's escapes; bytes that are no UTF-8
 * become U+FFFD.
 *
 * Functions named api_event_* append one whole server-sent event (`data: ...`, blank line). An
 * event is built without a tree: what all events of a request share is rendered once, in the head.
 */

/* ------------------------------------------------------------------------------------- the head */

/* What every answer and chunk of one request has in common. In the caller's memory. */
struct api_head {
    bool is_chat;
    bool include_usage;
    struct buf identity; /* `"created":N,"model":"...","system_fingerprint":"..."` */
    struct buf event;    /* an event up to the choice's number: `data: {...,"choices":[{"index":` */
    struct buf id;       /* "chatcmpl-..." or "cmpl-..." */
};

/*
 * request must be chat or completions. unique makes the id ("chatcmpl-" or "cmpl-" before it):
 * letters, digits, `-` and `_`. created_s is Unix time; fingerprint may be NULL (then null).
 * Both stay the same across a failover.
 */
void api_head_init(struct api_head *head, const struct api_request *request, const char *unique,
                   int64_t created_s, const char *fingerprint);
void api_head_fini(struct api_head *head);

/* ------------------------------------------------------------------------------------- logprobs */

struct api_logprob {
    uint32_t id;
    float logprob; /* natural; not finite is written as -9999, as OpenAI does */
};

/*
 * Logprobs of tokens in the form of one endpoint, rendered as they are added. One a choice. In the
 * caller's memory. Whole answer: add all, give it with the choice. Stream: add those of the tokens
 * that a piece came from, give it with the piece; the event takes them out, offsets go on. The end
 * token has no text: leave it out.
 */
struct api_logprobs {
    bool is_chat;
    size_t n;                           /* tokens since it was last taken */
    uint64_t text_offset;               /* completions: characters before the next token */
    struct buf a, tokens, top, offsets; /* a: chat's content, or token_logprobs */
};

/* text_offset is 0, or the characters of an echoed prompt. */
void api_logprobs_init(struct api_logprobs *logprobs, bool is_chat, uint64_t text_offset);
void api_logprobs_fini(struct api_logprobs *logprobs);

/*
 * Adds one token: its own logprob and n_top alternatives, best first. Completions: the map has the
 * token itself too, and no text twice (the better one stays); the text of a token that is not
 * UTF-8 is written as OpenAI did, `bytes:\xe4\xbd`. Chat: token has U+FFFD there, bytes has them.
 */
void api_logprobs_add(struct api_logprobs *logprobs, const struct tokenizer *tokenizer,
                      const struct api_logprob *token, const struct api_logprob *top, size_t n_top);

/* ---------------------------------------------------------------------------------- stream events
 */

enum api_finish {
    API_FINISH_STOP, /* end token, stop string, stop id */
    API_FINISH_LENGTH,
    API_FINISH_TOOL_CALLS,
};

/* "stop", "length", "tool_calls". */
const char *api_finish_text(enum api_finish finish);

/* Whether calls were made decides between stop and tool_calls; a cut answer ends by length. */
enum api_finish api_finish_of(bool was_cut, unsigned n_calls);

struct api_usage {
    uint64_t prompt_tokens; /* of each prompt once, whatever n is */
    uint64_t completion_tokens;
    uint64_t cached_tokens, reasoning_tokens; /* of the two above */
};

/* Chat: the first delta of a choice, role and empty content. Completions: nothing. */
void api_event_role(const struct api_head *head, unsigned choice_i, struct buf *out);

/* A piece of the answer; logprobs may be NULL. The text may be empty if there are logprobs. */
void api_event_text(const struct api_head *head, unsigned choice_i, const char *text, size_t bytes,
                    struct api_logprobs *logprobs, struct buf *out);

/* Chat: a piece of the reasoning. */
void api_event_reasoning(const struct api_head *head, unsigned choice_i, const char *text,
                         size_t bytes, struct api_logprobs *logprobs, struct buf *out);

/* Chat: a call starts: its index, id, type and name, with empty arguments. */
void api_event_call(const struct api_head *head, unsigned choice_i, unsigned call_i, const char *id,
                    const char *name, size_t name_bytes, struct buf *out);

/* Chat: the next bytes of a call's arguments. */
void api_event_arguments(const struct api_head *head, unsigned choice_i, unsigned call_i,
                         const char *text, size_t bytes, struct buf *out);

/* Whichever of the four above the parser's event asks for; its end of a call is none. */
void api_event_parsed(const struct api_head *head, unsigned choice_i,
                      const struct chat_event *event, struct buf *out);

/* The last of a choice: empty delta and finish_reason; logprobs that are left go with it. */
void api_event_finish(const struct api_head *head, unsigned choice_i, enum api_finish finish,
                      struct api_logprobs *logprobs, struct buf *out);

/* With include_usage: the chunk without choices. Without: nothing. */
void api_event_usage(const struct api_head *head, const struct api_usage *usage, struct buf *out);

/* `data: [DONE]`. */
void api_event_done(struct buf *out);

/* The error as an event; the connection is cut behind it. */
void api_event_error(const struct api_error *error, struct buf *out);

/* A comment line that keeps proxies awake, `: text`; text has no line ends. */
void api_event_comment(const char *text, struct buf *out);

/* -------------------------------------------------------------------------------- whole answers */

/* A choice that is done. Plain data that borrows. */
struct api_choice {
    enum api_finish finish;
    const struct chat_answer *answer; /* chat */
    const char *text;                 /* completions; what echo asks for is in it */
    size_t text_bytes;
    struct api_logprobs *logprobs; /* NULL: none were asked for */
};

/* The `chat.completion` or `text_completion` of n choices, in the order of their indexes. */
void api_render_answer(const struct api_head *head, const struct api_choice *choices, size_t n,
                       const struct api_usage *usage, struct buf *out);

/* `{"error": {...}}`. */
void api_render_error(const struct api_error *error, struct buf *out);

/* GET /v1/models: the served name, then the aliases. created_s: when the router started. */
void api_render_models(const struct api_context *context, int64_t created_s, struct buf *out);

/* GET /v1/models/{id}. STATUS_NOT_FOUND with *ret_error for an unknown name. */
enum status api_render_model(const struct api_context *context, const char *name, size_t bytes,
                             int64_t created_s, struct buf *out,
                             struct api_error *ret_error) must_check;

/* The answer of /tokenize. */
void api_render_tokens(const struct api_context *context, const struct token_ids *ids,
                       struct buf *out);

/* The answer of /detokenize, for a request of that kind. */
void api_render_text(const struct api_request *request, const struct api_context *context,
                     struct buf *out);

#endif
