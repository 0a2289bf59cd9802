#ifndef BATON_MODEL_CHAT_PARSE_H
#define BATON_MODEL_CHAT_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "model/tokenizer.h"

/*
 * A completion back to reasoning, answer and tool calls, while it comes. Whatever might be the
 * start of a mark is held back until that is decided; how the text was cut into pushes changes
 * nothing in the sum of the events. The same events make the streamed and the whole answer.
 *
 * What a strict parser would refuse is still shown: a call block without `</think>` before it ends
 * the reasoning; a block that is not one is text; text between the calls of a block is content; a
 * parameter given twice counts once; a value said to be JSON that is not becomes a string. A call
 * that was cut is left open (its arguments are then no whole JSON): closing it would have a client
 * run half of a command. So is one that the prompt opened and that the model did not go on with,
 * and one that holds text which is no part of a call: a parameter may have been lost with it. That
 * text is not shown.
 */
enum chat_event_kind {
    CHAT_EVENT_REASONING, /* text */
    CHAT_EVENT_CONTENT,   /* text */
    CHAT_EVENT_CALL,      /* a call starts: call_i, id and name (text) */
    CHAT_EVENT_ARGUMENTS, /* call_i, the next bytes of the arguments (text) */
    CHAT_EVENT_CALL_END,  /* call_i; the arguments are whole */
};

/* Valid during the callback. Text is whole characters, at least one byte. */
struct chat_event {
    enum chat_event_kind kind;
    unsigned call_i; /* 0, 1, ... in order */
    const char *text;
    size_t bytes;
    const char *id; /* CHAT_EVENT_CALL: "call_", id_seed, "_" and call_i */
};

typedef void (*chat_event_fn)(void *cookie, const struct chat_event *event);

enum { CHAT_ID_SEED_BYTES = 64 };

struct chat_parse_options {
    bool thinking; /* the prompt ended in <think> */
    /* There were no tools, or none may be called: what the model calls all the same is content,
     * without the marks: NAME({...}), one a line. */
    bool without_calls;
    /* Makes ids of calls unique: up to CHAT_ID_SEED_BYTES - 1 bytes, equal on every attempt of one
     * choice. */
    const char *id_seed;
    chat_event_fn fn;
    void *cookie;
};

/* Owned by its creator; one thread at a time. */
struct chat_parse;

struct chat_parse *chat_parse_create(const struct chat_parse_options *options)
    __attribute__((returns_nonnull)) must_check;
void chat_parse_free(struct chat_parse *parse);

/*
 * Takes the next token. Special ones, and the marks of turns, are left out; incomplete characters
 * wait. tokenizer must be the same in all calls.
 */
void chat_parse_token(struct chat_parse *parse, const struct tokenizer *tokenizer, uint32_t id);

/* Takes the next text (UTF-8, marks as text). */
void chat_parse_text(struct chat_parse *parse, const char *text, size_t bytes);

/*
 * First of all: what the prompt ends in that belongs to the completion (chat_forced_prefix). It
 * opens a call; if none comes of it, it is not shown as text: the model did not write it.
 */
void chat_parse_prompt(struct chat_parse *parse, const char *text, size_t bytes);

/*
 * The completion ends: by itself, or was_cut (a limit, a stop, a failure). Gives out what was held
 * back and is text. Nothing may be pushed afterwards.
 */
void chat_parse_finish(struct chat_parse *parse, bool was_cut);

/* Tokens that were taken while in the reasoning, its end mark included. */
uint32_t chat_parse_n_reasoning_tokens(const struct chat_parse *parse);

/* Calls that were started, and of them those that are whole. */
unsigned chat_parse_n_calls(const struct chat_parse *parse);
unsigned chat_parse_n_whole_calls(const struct chat_parse *parse);

/* ----------------------------------------------------------------------------- whole answers */

struct chat_answer_call {
    struct buf id, name, arguments;
    bool is_whole;
};

/* What the events add up to. In the caller's memory; chat_answer_init makes it empty. */
struct chat_answer {
    struct buf reasoning, content;
    bool has_reasoning, has_content; /* whether there was an event of the kind */
    struct chat_answer_call *calls;
    unsigned n_calls;
};

void chat_answer_init(struct chat_answer *answer);
void chat_answer_fini(struct chat_answer *answer);

/* A chat_event_fn whose cookie is the answer. */
void chat_answer_event(void *answer, const struct chat_event *event);

#endif
