/*
 * A state machine over the text that has come and is not yet decided. Each step either takes
 * something off the front of the held text or waits for more; what it does depends on the held
 * text alone and never on where a push ended, which is why any cut gives the same answer. All
 * marks start with '<', so text is safe up to a '<' from which the rest of the held text is the
 * start of a mark; before a call block, up to two newlines belong to the mark.
 *
 * A block counts as one only when its first call has a name. Until then everything is kept, so
 * that it can still be shown as the text that it then is. From there on calls can't be taken back,
 * and what doesn't belong into a block is content.
 */
#include "model/chat_parse.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/hmap.h"
#include "base/json.h"
#include "base/mem.h"
#include "model/chat_table.h"

enum state {
    STATE_START, /* nothing decided: a repeated think mark is dropped here */
    STATE_REASONING,
    STATE_CONTENT,
    STATE_OPEN,      /* after "<DSML tool_calls", before a name: may still be text */
    STATE_BLOCK,     /* between calls */
    STATE_NAME,      /* after the mark of a further call */
    STATE_CALL,      /* between parameters */
    STATE_PARAMETER, /* after the mark of a parameter */
    STATE_STRING,    /* in a value that is text */
    STATE_JSON,      /* in a value that is JSON; held until it is whole */
};

enum {
    MAX_HEAD_BYTES = 1024, /* of a name with its attributes; more is not one */
};

struct chat_parse {
    enum state state;
    bool thinking, without_calls, from_reasoning;
    bool junk_started; /* in a block: text that doesn't belong there was shown */
    bool has_parameter, ignore_value, call_is_open;
    bool call_is_garbled; /* the open call holds what is no part of one */
    bool has_content;     /* some was shown */
    bool breaks_line;     /* before further content: behind a call that is content */
    bool prompt_called;   /* the open call is one that the prompt began */
    bool skips_space;     /* after a block: the space before further text */
    bool is_finished, in_prompt;
    char id_seed[CHAT_ID_SEED_BYTES];
    chat_event_fn fn;
    void *cookie;
    struct tokenizer_stream characters;
    struct buf held;
    size_t scanned;     /* no mark starts before this offset of held */
    struct buf opening; /* what the mark of a block took off held */
    struct buf scratch;
    struct hmap *keys; /* of the open call */
    unsigned n_calls, n_whole_calls;
    uint32_t n_reasoning_tokens;
    size_t n_prompt_bytes; /* of the prompt, pushed first, and not shown yet */
};

struct mark {
    const char *text;
    size_t bytes;
};

#define MARK(text)             \
    {                          \
        text, sizeof(text) - 1 \
    }

enum { MARK_UNTHINK, MARK_CALLS, N_TEXT_MARKS };
static const struct mark text_marks[] = {
    [MARK_UNTHINK] = MARK(CHAT_MARK_UNTHINK),
    [MARK_CALLS] = MARK(CHAT_MARK_CALLS),
};

enum { MARK_END_CALLS, MARK_INVOKE, N_BLOCK_MARKS };
static const struct mark block_marks[] = {
    [MARK_END_CALLS] = MARK(CHAT_MARK_END_CALLS),
    [MARK_INVOKE] = MARK(CHAT_MARK_INVOKE),
};

enum { MARK_CALL_END_CALLS, MARK_END_INVOKE, MARK_PARAMETER, N_CALL_MARKS };
static const struct mark call_marks[] = {
    [MARK_CALL_END_CALLS] = MARK(CHAT_MARK_END_CALLS),
    [MARK_END_INVOKE] = MARK(CHAT_MARK_END_INVOKE),
    [MARK_PARAMETER] = MARK(CHAT_MARK_PARAMETER),
};

static const struct mark value_marks[] = {MARK(CHAT_MARK_END_PARAMETER)};

/* -------------------------------------------------------------------------------------- events */

static void emit_text(struct chat_parse *p, enum chat_event_kind kind, const void *text,
                      size_t bytes)
{
    struct chat_event event = {.kind = kind, .text = text, .bytes = bytes};
    p->has_content |= kind == CHAT_EVENT_CONTENT;
    p->fn(p->cookie, &event);
}

/* A call where none may be given: content. */
static void emit_called(struct chat_parse *p, enum chat_event_kind kind, const void *text,
                        size_t bytes)
{
    if (kind == CHAT_EVENT_CALL) {
        if (p->has_content) {
            emit_text(p, CHAT_EVENT_CONTENT, "\n\n", p->breaks_line ? 1 : 2);
        }
        p->breaks_line = false;
        emit_text(p, CHAT_EVENT_CONTENT, text, bytes);
        emit_text(p, CHAT_EVENT_CONTENT, "(", 1);
    } else if (kind == CHAT_EVENT_ARGUMENTS) {
        emit_text(p, CHAT_EVENT_CONTENT, text, bytes);
    } else {
        emit_text(p, CHAT_EVENT_CONTENT, ")", 1);
        p->breaks_line = true;
    }
}

static void emit(struct chat_parse *p, enum chat_event_kind kind, const void *text, size_t bytes)
{
    char id[CHAT_ID_SEED_BYTES + 24];
    bool is_text = kind == CHAT_EVENT_REASONING || kind == CHAT_EVENT_CONTENT;
    if (bytes == 0 && kind != CHAT_EVENT_CALL_END) {
        return;
    }
    if (p->without_calls && !is_text) {
        emit_called(p, kind, text, bytes);
        return;
    }
    if (is_text && p->n_prompt_bytes > 0) {
        size_t n = bytes < p->n_prompt_bytes ? bytes : p->n_prompt_bytes;
        p->n_prompt_bytes -= n;
        text = (const char *)text + n;
        bytes -= n;
        if (bytes == 0) {
            return;
        }
    }
    p->n_prompt_bytes = 0;
    if (is_text) {
        if (p->breaks_line && kind == CHAT_EVENT_CONTENT) {
            p->breaks_line = false;
            emit_text(p, kind, "\n", 1);
        }
        emit_text(p, kind, text, bytes);
        return;
    }
    snprintf(id, sizeof(id), "call_%s_%u", p->id_seed, p->n_calls - 1);
    struct chat_event event = {
        .kind = kind,
        .call_i = p->n_calls - 1,
        .text = text,
        .bytes = bytes,
        .id = kind == CHAT_EVENT_CALL ? id : NULL,
    };
    p->fn(p->cookie, &event);
}

static void take(struct chat_parse *p, size_t bytes)
{
    buf_consume(&p->held, bytes);
    p->scanned = 0;
}

static void emit_held(struct chat_parse *p, enum chat_event_kind kind, size_t bytes)
{
    emit(p, kind, p->held.data, bytes);
    take(p, bytes);
}

/* --------------------------------------------------------------------------------------- marks */

enum found { FOUND_NONE, FOUND_PART, FOUND_MARK };

/*
 * Looks for the first mark, or start of a mark at the end, in the held text. *ret_at is where it
 * starts; with FOUND_NONE, the end.
 */
static enum found find_mark(struct chat_parse *p, const struct mark *marks, size_t n_marks,
                            size_t *ret_at, size_t *ret_mark_i)
{
    const uint8_t *text = p->held.data;
    size_t at = p->scanned;
    while (at < p->held.bytes) {
        const uint8_t *less = memchr(text + at, '<', p->held.bytes - at);
        if (less == NULL) {
            break;
        }
        at = (size_t)(less - text);
        size_t left = p->held.bytes - at;
        for (size_t i = 0; i < n_marks; i++) {
            size_t bytes = marks[i].bytes < left ? marks[i].bytes : left;
            if (memcmp(less, marks[i].text, bytes) != 0) {
                continue;
            }
            p->scanned = *ret_at = at;
            *ret_mark_i = i;
            return bytes == marks[i].bytes ? FOUND_MARK : FOUND_PART;
        }
        at++;
    }
    p->scanned = *ret_at = p->held.bytes;
    return FOUND_NONE;
}

/* Newlines before offset at, at most two. */
static size_t newlines_before(const struct buf *held, size_t at)
{
    size_t n = 0;
    while (n < 2 && n < at && held->data[at - n - 1] == '\n') {
        n++;
    }
    return n;
}

/* ------------------------------------------------------------------------------- text and blocks
 */

/* False: more text is needed. */
static bool step_start(struct chat_parse *p)
{
    const char *mark = p->thinking ? CHAT_MARK_THINK : CHAT_MARK_UNTHINK;
    size_t bytes = strlen(mark), n = p->held.bytes < bytes ? p->held.bytes : bytes;
    bool same = n > 0 && memcmp(p->held.data, mark, n) == 0;
    if (n == 0 || (same && n < bytes)) {
        return false;
    }
    if (same) {
        take(p, bytes);
    }
    p->state = p->thinking ? STATE_REASONING : STATE_CONTENT;
    return true;
}

static bool is_space(uint8_t byte)
{
    return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t';
}

/* After a block, until there is text again. False: more text is needed. */
static bool skip_space(struct chat_parse *p)
{
    size_t n = 0;
    while (n < p->held.bytes && is_space(p->held.data[n])) {
        n++;
    }
    p->skips_space = n == p->held.bytes;
    take(p, n);
    return !p->skips_space;
}

static void end_block(struct chat_parse *p)
{
    p->state = STATE_CONTENT;
    p->skips_space = true;
}

static bool step_text(struct chat_parse *p)
{
    if (p->skips_space && !skip_space(p)) {
        return false;
    }
    bool reasoning = p->state == STATE_REASONING;
    enum chat_event_kind kind = reasoning ? CHAT_EVENT_REASONING : CHAT_EVENT_CONTENT;
    size_t first = reasoning ? MARK_UNTHINK : MARK_CALLS, at, mark_i = 0;
    enum found found = find_mark(p, text_marks + first, N_TEXT_MARKS - first, &at, &mark_i);
    mark_i += first;
    if (found == FOUND_MARK && mark_i == MARK_UNTHINK) {
        emit_held(p, kind, at);
        take(p, text_marks[MARK_UNTHINK].bytes);
        p->state = STATE_CONTENT;
        return true;
    }
    size_t newlines = newlines_before(&p->held, at);
    emit_held(p, kind, at - newlines);
    if (found != FOUND_MARK) {
        return false;
    }
    size_t bytes = newlines + text_marks[MARK_CALLS].bytes;
    buf_clear(&p->opening);
    buf_append(&p->opening, p->held.data, bytes);
    take(p, bytes);
    p->from_reasoning = reasoning;
    p->state = STATE_OPEN;
    return true;
}

/* It was no block: what looked like one is text of the state that it came in. */
static void reopen_text(struct chat_parse *p)
{
    emit(p, p->from_reasoning ? CHAT_EVENT_REASONING : CHAT_EVENT_CONTENT, p->opening.data,
         p->opening.bytes);
    p->state = p->from_reasoning ? STATE_REASONING : STATE_CONTENT;
}

/* Whether held text from at on is the mark (FOUND_MARK), its start (FOUND_PART) or neither. */
static enum found is_mark_at(const struct chat_parse *p, size_t at, const char *mark)
{
    size_t bytes = strlen(mark), left = p->held.bytes - at;
    size_t n = bytes < left ? bytes : left;
    if (n > 0 && memcmp(p->held.data + at, mark, n) != 0) {
        return FOUND_NONE;
    }
    return n == bytes ? FOUND_MARK : FOUND_PART;
}

/* NAME"> from offset at on: FOUND_MARK with the name's length. */
static enum found find_name(const struct chat_parse *p, size_t at, size_t *ret_bytes)
{
    for (size_t i = at; i < p->held.bytes; i++) {
        uint8_t c = p->held.data[i];
        if (i - at > MAX_HEAD_BYTES || c < ' ' || c == '<' || c == '>') {
            return FOUND_NONE;
        }
        if (c == '"') {
            enum found found = i == at ? FOUND_NONE : is_mark_at(p, i, "\">");
            if (found == FOUND_MARK) {
                *ret_bytes = i - at;
            }
            return found;
        }
    }
    return FOUND_PART;
}

/* Takes the name at offset at of the held text, and what follows it up to at + bytes + 2. */
static void start_call(struct chat_parse *p, size_t at, size_t bytes)
{
    p->n_calls++;
    p->call_is_open = true;
    p->prompt_called = p->in_prompt;
    p->has_parameter = p->call_is_garbled = false;
    p->keys = hmap_create();
    emit(p, CHAT_EVENT_CALL, p->held.data + at, bytes);
    take(p, at + bytes + 2);
    p->junk_started = false;
    p->state = STATE_CALL;
}

/* A parameter may have been lost with what was garbled: such a call stays open. */
static void end_call(struct chat_parse *p)
{
    if (p->call_is_garbled) {
        p->call_is_open = false;
        hmap_free(p->keys);
        p->keys = NULL;
        return;
    }
    const char *end = p->has_parameter ? "}" : "{}";
    emit(p, CHAT_EVENT_ARGUMENTS, end, strlen(end));
    emit(p, CHAT_EVENT_CALL_END, NULL, 0);
    p->n_whole_calls++;
    p->call_is_open = false;
    hmap_free(p->keys);
    p->keys = NULL;
}

static bool step_open(struct chat_parse *p)
{
    size_t at = 1, name_bytes;
    if (p->held.bytes == 0) {
        return false;
    }
    if (p->held.data[0] != '>') {
        reopen_text(p);
        return true;
    }
    while (at < p->held.bytes && is_space(p->held.data[at])) {
        at++;
    }
    enum found found = is_mark_at(p, at, CHAT_MARK_INVOKE);
    if (found == FOUND_MARK) {
        at += strlen(CHAT_MARK_INVOKE);
        found = find_name(p, at, &name_bytes);
        if (found == FOUND_MARK) {
            start_call(p, at, name_bytes);
            return true;
        }
    } else if (found == FOUND_NONE) {
        found = is_mark_at(p, at, CHAT_MARK_END_CALLS);
        if (found == FOUND_MARK) { /* an empty block says nothing */
            take(p, at + strlen(CHAT_MARK_END_CALLS));
            end_block(p);
            return true;
        }
    }
    if (found == FOUND_PART) {
        return false;
    }
    reopen_text(p);
    return true;
}

/*
 * Shows bytes of the held text, in front of a mark or (is_end false) of more such text, as
 * content, but for the space around it.
 */
static void emit_junk(struct chat_parse *p, size_t bytes, bool is_end)
{
    size_t begin = 0, end = bytes;
    if (!p->junk_started) {
        while (begin < end && is_space(p->held.data[begin])) {
            begin++;
        }
    }
    while (end > begin && is_space(p->held.data[end - 1])) {
        end--;
    }
    p->junk_started |= end > begin;
    emit(p, CHAT_EVENT_CONTENT, p->held.data + begin, end - begin);
    take(p, is_end ? bytes : end);
}

static bool step_block(struct chat_parse *p)
{
    size_t at, mark_i = 0;
    enum found found = find_mark(p, block_marks, N_BLOCK_MARKS, &at, &mark_i);
    emit_junk(p, at, found == FOUND_MARK);
    if (found != FOUND_MARK) {
        return false;
    }
    take(p, block_marks[mark_i].bytes);
    p->junk_started = false;
    if (mark_i == MARK_INVOKE) {
        p->state = STATE_NAME;
    } else {
        end_block(p);
    }
    return true;
}

static bool step_name(struct chat_parse *p)
{
    size_t name_bytes;
    switch (find_name(p, 0, &name_bytes)) {
    case FOUND_MARK:
        start_call(p, 0, name_bytes);
        return true;
    case FOUND_PART:
        return false;
    case FOUND_NONE:
        break;
    }
    emit(p, CHAT_EVENT_CONTENT, CHAT_MARK_INVOKE, strlen(CHAT_MARK_INVOKE));
    p->junk_started = true;
    p->state = STATE_BLOCK;
    return true;
}

/* ----------------------------------------------------------------------------------- parameters */

static bool step_call(struct chat_parse *p)
{
    size_t at, mark_i = 0;
    enum found found = find_mark(p, call_marks, N_CALL_MARKS, &at, &mark_i);
    for (size_t i = 0; i < at; i++) {
        p->call_is_garbled |= !is_space(p->held.data[i]);
    }
    take(p, at);
    if (found != FOUND_MARK) {
        return false;
    }
    take(p, call_marks[mark_i].bytes);
    p->junk_started = false;
    if (mark_i == MARK_PARAMETER) {
        p->state = STATE_PARAMETER;
        return true;
    }
    end_call(p);
    if (mark_i == MARK_END_INVOKE) {
        p->state = STATE_BLOCK;
    } else {
        end_block(p);
    }
    return true;
}

/* KEY" string="true"> or "false">: FOUND_MARK with the key's length and which it is. */
static enum found find_key(const struct chat_parse *p, size_t *ret_bytes, bool *ret_is_text)
{
    for (size_t i = 0; i < p->held.bytes && i <= MAX_HEAD_BYTES; i++) {
        if (p->held.data[i] != '"') {
            continue;
        }
        enum found as_text = is_mark_at(p, i, "\" string=\"true\">");
        enum found as_json = is_mark_at(p, i, "\" string=\"false\">");
        if (as_text == FOUND_MARK || as_json == FOUND_MARK) {
            *ret_bytes = i;
            *ret_is_text = as_text == FOUND_MARK;
            return FOUND_MARK;
        }
        if (as_text == FOUND_PART || as_json == FOUND_PART) {
            return FOUND_PART;
        }
    }
    return p->held.bytes > MAX_HEAD_BYTES ? FOUND_NONE : FOUND_PART;
}

/* Starts the arguments' next entry with what comes before its value. */
static void put_key(struct chat_parse *p, size_t key_bytes)
{
    struct json_writer writer;
    buf_append_text(&p->scratch, p->has_parameter ? ", " : "{");
    json_writer_init(&writer, &p->scratch);
    json_put_string_n(&writer, (const char *)p->held.data, key_bytes);
    buf_append_text(&p->scratch, ": ");
    p->has_parameter = true;
}

static bool step_parameter(struct chat_parse *p)
{
    size_t key_bytes = 0;
    bool is_text = false;
    enum found found = find_key(p, &key_bytes, &is_text);
    if (found == FOUND_PART) {
        return false;
    }
    if (found == FOUND_NONE) {
        p->call_is_garbled = true;
        p->state = STATE_CALL;
        return true;
    }
    buf_clear(&p->scratch);
    p->ignore_value = hmap_put(p->keys, p->held.data, key_bytes, p) != NULL;
    if (!p->ignore_value) {
        put_key(p, key_bytes);
        buf_append_text(&p->scratch, is_text ? "\"" : "");
        emit(p, CHAT_EVENT_ARGUMENTS, p->scratch.data, p->scratch.bytes);
    }
    take(p, key_bytes + strlen(is_text ? "\" string=\"true\">" : "\" string=\"false\">"));
    p->state = is_text ? STATE_STRING : STATE_JSON;
    return true;
}

/* Shows bytes of the held text as the inside of a JSON string. */
static void emit_escaped(struct chat_parse *p, size_t bytes)
{
    if (!p->ignore_value && bytes > 0) {
        struct json_writer writer;
        buf_clear(&p->scratch);
        json_writer_init(&writer, &p->scratch);
        json_put_string_n(&writer, (const char *)p->held.data, bytes);
        emit(p, CHAT_EVENT_ARGUMENTS, p->scratch.data + 1, p->scratch.bytes - 2);
    }
    take(p, bytes);
}

static bool step_string(struct chat_parse *p)
{
    size_t at, mark_i;
    enum found found = find_mark(p, value_marks, 1, &at, &mark_i);
    emit_escaped(p, at);
    if (found != FOUND_MARK) {
        return false;
    }
    if (!p->ignore_value) {
        emit(p, CHAT_EVENT_ARGUMENTS, "\"", 1);
    }
    take(p, value_marks[0].bytes);
    p->state = STATE_CALL;
    return true;
}

/* Integers of any length are JSON, though json_parse takes no more than 64 bits. */
static bool is_long_integer(const uint8_t *text, size_t bytes)
{
    size_t i = bytes > 0 && text[0] == '-' ? 1 : 0;
    if (i == bytes || text[i] == '0') {
        return false;
    }
    while (i < bytes && text[i] >= '0' && text[i] <= '9') {
        i++;
    }
    return i == bytes;
}

static bool is_json(const uint8_t *text, size_t bytes)
{
    struct json *root;
    if (bytes == 0) {
        return false;
    }
    if (json_parse(text, bytes, NULL, &root, NULL) != STATUS_OK) {
        return is_long_integer(text, bytes);
    }
    json_free(root);
    return true;
}

static bool step_json(struct chat_parse *p)
{
    size_t at, mark_i;
    if (find_mark(p, value_marks, 1, &at, &mark_i) != FOUND_MARK) {
        return false;
    }
    if (p->ignore_value) {
        take(p, at);
    } else if (is_json(p->held.data, at)) {
        emit_held(p, CHAT_EVENT_ARGUMENTS, at);
    } else {
        emit(p, CHAT_EVENT_ARGUMENTS, "\"", 1);
        emit_escaped(p, at);
        emit(p, CHAT_EVENT_ARGUMENTS, "\"", 1);
    }
    take(p, value_marks[0].bytes);
    p->state = STATE_CALL;
    return true;
}

/* ------------------------------------------------------------------------------------ together */

static bool step(struct chat_parse *p)
{
    switch (p->state) {
    case STATE_START:
        return step_start(p);
    case STATE_REASONING:
    case STATE_CONTENT:
        return step_text(p);
    case STATE_OPEN:
        return step_open(p);
    case STATE_BLOCK:
        return step_block(p);
    case STATE_NAME:
        return step_name(p);
    case STATE_CALL:
        return step_call(p);
    case STATE_PARAMETER:
        return step_parameter(p);
    case STATE_STRING:
        return step_string(p);
    case STATE_JSON:
        return step_json(p);
    }
    return false;
}

static void run(struct chat_parse *p)
{
    while (step(p)) {
    }
}

struct chat_parse *chat_parse_create(const struct chat_parse_options *options)
{
    struct chat_parse *p = mem_zalloc(sizeof(*p));
    p->state = STATE_START;
    p->thinking = options->thinking;
    p->without_calls = options->without_calls;
    p->fn = options->fn;
    p->cookie = options->cookie;
    snprintf(p->id_seed, sizeof(p->id_seed), "%s", options->id_seed);
    tokenizer_stream_init(&p->characters, false);
    return p;
}

void chat_parse_free(struct chat_parse *p)
{
    if (p == NULL) {
        return;
    }
    hmap_free(p->keys);
    buf_fini(&p->scratch);
    buf_fini(&p->opening);
    buf_fini(&p->held);
    mem_free(p);
}

/* Marks of the prompt that a completion has no use for, whatever the model meant by them. */
static bool is_left_out(const struct chat_parse *p, const char *text, size_t bytes)
{
    static const struct mark marks[] = {
        MARK(CHAT_MARK_USER),  MARK(CHAT_MARK_ASSISTANT), MARK(CHAT_MARK_REMINDER),
        MARK(CHAT_MARK_THINK), MARK(CHAT_MARK_UNTHINK),
    };
    /* think marks have a meaning until the answer starts, and inside a value they are text */
    size_t n = p->state == STATE_CONTENT ? sizeof(marks) / sizeof(marks[0]) : 3;
    for (size_t i = 0; i < n; i++) {
        if (marks[i].bytes == bytes && memcmp(marks[i].text, text, bytes) == 0) {
            return true;
        }
    }
    return false;
}

void chat_parse_token(struct chat_parse *p, const struct tokenizer *tokenizer, uint32_t id)
{
    assert(!p->is_finished);
    size_t bytes;
    const char *text = tokenizer_token(tokenizer, id, &bytes);
    if (text == NULL || tokenizer_is_special(tokenizer, id)) {
        return;
    }
    if (p->thinking && (p->state == STATE_START || p->state == STATE_REASONING)) {
        p->n_reasoning_tokens++;
    }
    if (!tokenizer_is_added(tokenizer, id) || !is_left_out(p, text, bytes)) {
        tokenizer_stream_push_bytes(&p->characters, text, bytes, &p->held);
        run(p);
    }
}

void chat_parse_text(struct chat_parse *p, const char *text, size_t bytes)
{
    assert(!p->is_finished);
    tokenizer_stream_push_bytes(&p->characters, text, bytes, &p->held);
    run(p);
}

void chat_parse_prompt(struct chat_parse *p, const char *text, size_t bytes)
{
    p->n_prompt_bytes = bytes;
    p->in_prompt = true;
    chat_parse_text(p, text, bytes);
    p->in_prompt = false;
}

/* What is held when the text ends by itself, or was_cut. */
static void finish_held(struct chat_parse *p, bool was_cut)
{
    switch (p->state) {
    case STATE_START:
    case STATE_REASONING:
    case STATE_CONTENT:
        emit_held(
            p, p->thinking && p->state != STATE_CONTENT ? CHAT_EVENT_REASONING : CHAT_EVENT_CONTENT,
            p->held.bytes);
        break;
    case STATE_OPEN:
        if (!was_cut) { /* cut: it may well have been a call */
            reopen_text(p);
            run(p);
            finish_held(p, was_cut);
        }
        break;
    case STATE_CALL:
        /* the model left out the end marks; of a call that was cut, parameters may be missing; and
         * one that the prompt opened may never have been meant */
        if (!was_cut && (!p->prompt_called || p->has_parameter)) {
            end_call(p);
        }
        break;
    case STATE_JSON:
        if (!p->ignore_value) { /* not whole, but what there is; as of a value that is text */
            emit_held(p, CHAT_EVENT_ARGUMENTS, p->held.bytes);
        }
        break;
    case STATE_NAME:
        if (!was_cut) { /* ended in the middle of a head: that was never one */
            emit_held(p, CHAT_EVENT_CONTENT, p->held.bytes);
        }
        break;
    case STATE_PARAMETER: /* the call stays open */
    case STATE_BLOCK:
    case STATE_STRING:
        break;
    }
}

void chat_parse_finish(struct chat_parse *p, bool was_cut)
{
    assert(!p->is_finished);
    tokenizer_stream_finish(&p->characters, &p->held);
    run(p);
    finish_held(p, was_cut);
    buf_clear(&p->held);
    p->is_finished = true;
}

uint32_t chat_parse_n_reasoning_tokens(const struct chat_parse *p)
{
    return p->n_reasoning_tokens;
}

unsigned chat_parse_n_calls(const struct chat_parse *p)
{
    return p->without_calls ? 0 : p->n_calls;
}

unsigned chat_parse_n_whole_calls(const struct chat_parse *p)
{
    return p->without_calls ? 0 : p->n_whole_calls;
}
