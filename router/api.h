#ifndef BATON_ROUTER_API_H
#define BATON_ROUTER_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/status.h"
#include "model/chat.h"
#include "model/tokenizer.h"

/*
 * The OpenAI-compatible surface, the way in: the bytes of a body to a checked request. No network,
 * no state: every function is pure and may run on any thread. Each field, its values and what
 * refuses it are in docs/INTERFACES.md, HTTP. The way out is router/api_render.h.
 */

enum {
    API_MAX_PROMPTS = 1024, /* of one completions request */
    API_MAX_CHOICES = 2048, /* prompts * n */
    API_MAX_N = 16,
    API_MAX_STOPS = 16,
    API_MAX_STOP_BYTES = 1024,
    API_MAX_STOP_IDS = 64,
    API_MAX_LOGIT_BIASES = 1024,
    API_MAX_TOP_LOGPROBS = 20,
    API_MAX_JSON_DEPTH = 128,
    API_PARAM_BYTES = 128,
    API_NAME_BYTES = 128, /* of a model name that an error repeats */
};

/* --------------------------------------------------------------------------------------- errors */

/* Every way in which an answer over HTTP can fail. Status, type and code text follow from it. */
enum api_code {
    API_CODE_INVALID_JSON,
    API_CODE_INVALID_VALUE,
    API_CODE_UNSUPPORTED_VALUE,
    API_CODE_CONTEXT_LENGTH_EXCEEDED,
    API_CODE_INVALID_HTTP,
    API_CODE_INVALID_API_KEY,
    API_CODE_MODEL_NOT_FOUND,
    API_CODE_UNKNOWN_URL,
    API_CODE_METHOD_NOT_SUPPORTED,
    API_CODE_REQUEST_TIMEOUT,
    API_CODE_LENGTH_REQUIRED,
    API_CODE_REQUEST_TOO_LARGE,
    API_CODE_UNSUPPORTED_MEDIA_TYPE,
    API_CODE_EXPECTATION_FAILED,
    API_CODE_QUEUE_FULL,
    API_CODE_HEADERS_TOO_LARGE,
    API_CODE_INTERNAL_ERROR,
    API_CODE_NO_READY_NODE,
    API_CODE_ATTEMPTS_EXHAUSTED,
    API_CODE_DRAINING,
    API_CODE_QUEUE_TIMEOUT,
    API_CODE_PREFILL_TIMEOUT,
    API_CODE_TRANSFER_TIMEOUT,
    API_CODE_GENERATION_TIMEOUT,
    API_N_CODES,
};

/* Plain data; copy it freely. */
struct api_error {
    int status;                  /* of HTTP */
    const char *type;            /* "invalid_request_error", ...; static */
    const char *code;            /* "invalid_value", ...; static */
    char param[API_PARAM_BYTES]; /* path of the field, "messages.2.content"; empty: null */
    struct error message;        /* one sentence for the client */
};

/* Fills *ret from the code and a formatted sentence. param may be NULL. */
void api_error_set(struct api_error *ret, enum api_code code, const char *param, const char *format,
                   ...) PRINTF_LIKE(4, 5);

/* Status of HTTP, type and code text of a code. */
int api_code_status(enum api_code code);
const char *api_code_type(enum api_code code);
const char *api_code_text(enum api_code code);

/* ------------------------------------------------------------------------------------- requests */

enum api_kind {
    API_KIND_CHAT,        /* POST /v1/chat/completions */
    API_KIND_COMPLETIONS, /* POST /v1/completions */
    API_KIND_TOKENIZE,    /* POST /tokenize: prompt, or what a chat request has */
    API_KIND_DETOKENIZE,  /* POST /detokenize */
};

/*
 * What requests are judged by. All that it points to is the caller's, outlives the call and, for
 * api_encode, the request. Read only, so one may serve any number of threads.
 */
struct api_context {
    const char *model; /* the served name: what an absent model means */
    const char *const *aliases;
    size_t n_aliases;
    const struct tokenizer *tokenizer;
    const struct chat_format *format;
    uint32_t n_vocab;            /* ids of a request are below it; 0: the tokenizer's */
    uint32_t max_context_tokens; /* prompt and answer together: max_model_len */
    double temperature, top_p;   /* of generation_config.json, used where a request is silent */
    bool thinking;               /* likewise: options of the router */
    enum chat_effort effort;
};

struct api_logit_bias {
    uint32_t id;
    float bias;
};

/* One prompt of completions, tokenize or detokenize: text or ids. */
struct api_prompt {
    struct chat_text text; /* data NULL: ids */
    const uint32_t *ids;
    size_t n_ids;
};

/* Every number is final: defaults are filled in. Off is written as in proto's Sampling. */
struct api_sampling {
    double temperature, top_p, min_p;
    double presence_penalty, frequency_penalty, repetition_penalty;
    int32_t top_k; /* 0: off */
    bool seed_given;
    int64_t seed;                            /* if given; else the router draws one */
    const struct api_logit_bias *logit_bias; /* no id twice */
    size_t n_logit_bias;
    const uint32_t *stop_token_ids;
    size_t n_stop_token_ids;
    bool ignore_eos;
    uint32_t min_tokens;
    uint32_t max_tokens; /* 0: what fits (api_max_tokens) */
    bool logprobs;
    uint32_t n_top_logprobs; /* 0 to 20; only with logprobs */
};

enum api_tool_choice {
    API_TOOL_CHOICE_NONE, /* also: there are no tools. What is called all the same is text */
    API_TOOL_CHOICE_AUTO,
    API_TOOL_CHOICE_REQUIRED,
    API_TOOL_CHOICE_NAMED, /* options.forced_name */
};

/*
 * A checked request. Owned by whoever parsed it, never changed afterwards: several threads may read
 * it at once. Everything it points to lives until api_request_free, and not in the body.
 */
struct api_request {
    enum api_kind kind;
    char *model;        /* the name that answers bear: what the client wrote, or the served name */
    unsigned n_unknown; /* unknown top-level fields that were ignored, to be counted */
    bool is_chat;       /* messages were given: kind chat, or tokenize with messages */

    struct chat_thread thread; /* is_chat: ready for chat_encode with options */
    struct chat_options options;
    bool in_reasoning; /* the prompt ends in the mark that opens reasoning: chat_parse's thinking */
    enum api_tool_choice tool_choice;
    bool parallel_tool_calls; /* false: the client asks for at most one call */

    struct api_prompt *prompts; /* not is_chat */
    size_t n_prompts;           /* 1 for chat: api_encode takes 0 */
    uint32_t n;                 /* choices a prompt; choice i of prompt p has index p * n + i */

    bool stream, include_usage; /* include_usage only with stream */
    bool echo;                  /* api_prompt_text goes out before the answer */
    struct api_sampling sampling;

    size_t n_stops; /* as stop_create takes them: text with lengths, may hold NUL */
    const char *const *stops;
    const size_t *stop_bytes;

    struct arena *arena; /* private from here */
    struct json *tree;
};

/*
 * Parses a body and checks all of it. STATUS_OK and *ret, which the caller releases with
 * api_request_free; or STATUS_INVALID (EXHAUSTED when memory is out) and *ret_error to be sent.
 * Nothing is read after it has returned. Takes time in proportion to bytes (about 10 ns a byte): a
 * long body belongs on a worker thread.
 */
enum status api_parse(enum api_kind kind, const void *body, size_t bytes,
                      const struct api_context *context, struct api_request **ret,
                      struct api_error *ret_error) must_check;

/* Whether a function of this name is among those that tool_choice lets the model call. */
bool must_check api_may_call(const struct api_request *request, const char *name, size_t bytes);

/* NULL is allowed. */
void api_request_free(struct api_request *request);

/*
 * Appends the ids of prompt prompt_i to ids. STATUS_INVALID with *ret_error: the prompt is empty,
 * can't be encoded, or leaves no room for a token within max_context_tokens (tokenize alone takes
 * any length). Long work for long prompts: run it on a worker thread.
 */
enum status api_encode(const struct api_request *request, const struct api_context *context,
                       size_t prompt_i, struct token_ids *ids,
                       struct api_error *ret_error) must_check;

/*
 * The limit to generate to behind a prompt of n_prompt ids: what was asked for, or what fits if
 * that is less or nothing was. At least 1 for a prompt that api_encode let through.
 */
uint32_t api_max_tokens(const struct api_request *request, const struct api_context *context,
                        size_t n_prompt) must_check;

/* Appends the text that echo repeats: the prompt's own, or its ids decoded (special ones too). */
void api_prompt_text(const struct api_request *request, const struct api_context *context,
                     size_t prompt_i, struct buf *out);

/*
 * The name that a model of this name is known by (name itself if it is the served one or an alias),
 * or NULL. bytes counts: a name with NUL in it is no other.
 */
const char *api_model_find(const struct api_context *context, const char *name,
                           size_t bytes) must_check;

#endif
