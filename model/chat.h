#ifndef BATON_MODEL_CHAT_H
#define BATON_MODEL_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/status.h"
#include "model/tokenizer.h"

/*
 * Messages and tools to the prompt of a DeepSeek V4 model. The rules of the encoding are code; the
 * fixed texts in it belong to a checkpoint and are read from encoding.json of the model folder.
 * The way back, from a completion to a message, is chat_parse.h.
 */

/* Text with a length; data NULL: absent. May hold NUL bytes. */
struct chat_text {
    const char *data;
    size_t bytes;
};

enum chat_role {
    CHAT_ROLE_SYSTEM,
    CHAT_ROLE_USER,
    CHAT_ROLE_ASSISTANT,
    CHAT_ROLE_TOOL,
    /* The two below can't be said over HTTP, where "developer" means system. */
    CHAT_ROLE_DEVELOPER,
    CHAT_ROLE_LATEST_REMINDER,
};

struct chat_call {
    struct chat_text id; /* absent: one that no result names */
    struct chat_text name;
    struct chat_text arguments; /* JSON as the client or model wrote it, perhaps broken */
};

/* What a user message asks for other than an answer: one token that a classifier reads. */
enum chat_task {
    CHAT_TASK_NONE,
    CHAT_TASK_ACTION,
    CHAT_TASK_QUERY,
    CHAT_TASK_AUTHORITY,
    CHAT_TASK_DOMAIN,
    CHAT_TASK_TITLE,
    CHAT_TASK_READ_URL,
};

/* Plain data; all that it points to is the caller's and outlives the message. */
struct chat_message {
    enum chat_role role;
    struct chat_text content;      /* absent counts as empty */
    struct chat_text reasoning;    /* assistant */
    const struct chat_call *calls; /* assistant */
    size_t n_calls;
    struct chat_text tool_call_id;   /* tool */
    const struct json *const *tools; /* system and developer: function objects */
    size_t n_tools;
    const struct json *response_format; /* system and developer: a schema, or NULL */
    enum chat_task task;                /* user */
    bool without_eos;                   /* assistant: the turn goes on */
};

/* ------------------------------------------------------------------------ from OpenAI's JSON */

struct chat_limits {
    size_t max_messages;   /* 0: 65536 */
    size_t max_tools;      /* 0: 1024 */
    size_t max_text_bytes; /* of all messages together; 0: 64 MiB */
};

enum { CHAT_PARAM_BYTES = 96 };

/* Messages with the memory that their joined parts need. Owned by whoever read them. */
struct chat_thread {
    struct chat_message *messages;
    size_t n_messages;
    struct arena *arena;
};

/*
 * Reads the members `messages` and `tools` of a chat request (tools may be NULL or JSON null, and
 * must be NULL when tool_choice is none). System stands for developer; parts are joined; tools go
 * to the first message if that is a system one, else to an empty system message before it. Tools
 * of unknown type are skipped. `prefix` of a last assistant message leaves its turn open.
 * STATUS_INVALID, STATUS_TOO_LARGE (a limit) or STATUS_UNSUPPORTED (images, files, custom tools);
 * err then holds a sentence for the client and ret_param the path of the field
 * ("messages.2.content"). The result borrows from both trees.
 */
enum status chat_thread_from_json(const struct json *messages, const struct json *tools,
                                  const struct chat_limits *limits, struct chat_thread *ret,
                                  char ret_param[CHAT_PARAM_BYTES], struct error *err) must_check;

void chat_thread_fini(struct chat_thread *thread);

/* Whether one of the tools (a JSON array, may be NULL) is a function of this name. */
bool chat_tools_have(const struct json *tools, const char *name, size_t name_bytes) must_check;

/* ------------------------------------------------------------------------------- the encoding */

enum chat_effort {
    CHAT_EFFORT_NONE, /* no thinking */
    CHAT_EFFORT_LOW,
    CHAT_EFFORT_HIGH,
    CHAT_EFFORT_MAX,
    CHAT_N_EFFORTS,
};

/* Reads a reasoning_effort: none, minimal, low, medium, high, xhigh, max. STATUS_INVALID. */
enum status chat_effort_from_text(const char *text, size_t bytes, enum chat_effort *ret) must_check;

/* The texts of a checkpoint. Never changes after it was opened; any thread. */
struct chat_format;

/* Reads an encoding.json, or the one in the folder at path. */
enum status chat_format_open(const char *path, struct chat_format **ret,
                             struct error *err) must_check;
enum status chat_format_parse(const void *json, size_t bytes, struct chat_format **ret,
                              struct error *err) must_check;
void chat_format_close(struct chat_format *format);

/* "preview", "official", "tiny": which table of efforts this is. */
const char *chat_format_release(const struct chat_format *format);

struct chat_options {
    bool thinking;           /* off: effort counts as none */
    enum chat_effort effort; /* of thinking; none adds no text */
    bool keep_reasoning;     /* keep the reasoning of earlier turns also when there are no tools */
    bool plain_content; /* added tokens inside the content of messages are mere text. Off, as in
                           the reference: who writes a turn mark into a message gets one */
    /* The answer must be a call: of forced_name if present, else of any tool. Thinking is then off,
     * and the prompt ends inside a call block (chat_forced_prefix). */
    bool force_call;
    struct chat_text forced_name;
};

/* Whether the completion of this prompt starts inside the reasoning (chat_parse_options.thinking).
 */
bool chat_starts_in_reasoning(const struct chat_message *messages, size_t n_messages,
                              const struct chat_options *options) must_check;

/* What a prompt with force_call ends in; the parser of the completion must be fed it first. */
void chat_forced_prefix(const struct chat_options *options, struct buf *out);

/*
 * Appends the prompt's text to out; with spans non-NULL, also the struct tokenizer_span of each
 * content (bytes of the buffer: spans->bytes / sizeof(struct tokenizer_span) of them).
 * STATUS_INVALID for messages that have no encoding (a developer message without content).
 */
enum status chat_render(const struct chat_format *format, const struct chat_message *messages,
                        size_t n_messages, const struct chat_options *options, struct buf *out,
                        struct buf *spans, struct error *err) must_check;

/* The same as ids, at most max_ids of them, appended to ids: chat_render, then tokenizer_encode. */
enum status chat_encode(const struct chat_format *format, const struct tokenizer *tokenizer,
                        const struct chat_message *messages, size_t n_messages,
                        const struct chat_options *options, size_t max_ids, struct token_ids *ids,
                        struct error *err) must_check;

#endif
