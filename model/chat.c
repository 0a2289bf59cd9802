/*
 * The prompt encoding. Messages are first made into turns: results of tools and what users say are
 * blocks of one user turn, the results in the order of the calls that they answer. Then the
 * reasoning of turns long past is dropped, unless there are tools. What is left is written mark by
 * mark; the marks are text here and become single tokens in tokenizer_encode, as in the reference,
 * which also renders to one string first.
 *
 * With spans, whoever renders learns which bytes came from messages, so that marks inside those
 * can be told from the encoding's own.
 */
#include "model/chat.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/chat_table.h"

struct block {
    bool is_result;
    struct chat_text text, call_id;
};

struct turn {
    enum chat_role role; /* never CHAT_ROLE_TOOL */
    const struct chat_message *message;
    enum chat_task task;
    size_t first_block, n_blocks; /* of a user */
};

/* One call of chat_render. */
struct render {
    const struct chat_format *format;
    const struct chat_options *options;
    bool thinking, keep_reasoning;
    struct turn *turns;
    size_t n_turns;
    size_t last_user_i; /* of a user or developer; SIZE_MAX: there is none */
    struct block *blocks;
    size_t n_blocks;
    struct buf *out, *spans;
};

/* --------------------------------------------------------------------------------------- turns */

/* Step 1: messages to turns. */
static void merge_messages(struct render *r, const struct chat_message *messages, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct chat_message *m = &messages[i];
        struct turn *last = r->n_turns > 0 ? &r->turns[r->n_turns - 1] : NULL;
        bool is_result = m->role == CHAT_ROLE_TOOL;
        bool is_block = is_result || m->role == CHAT_ROLE_USER;
        bool joins = is_block && last != NULL && last->role == CHAT_ROLE_USER &&
                     (is_result || last->task == CHAT_TASK_NONE);
        if (!joins) {
            last = &r->turns[r->n_turns++];
            *last = (struct turn){
                .role = is_result ? CHAT_ROLE_USER : m->role,
                .message = m,
                .task = m->role == CHAT_ROLE_USER ? m->task : CHAT_TASK_NONE,
                .first_block = r->n_blocks,
            };
        }
        if (is_block) {
            r->blocks[r->n_blocks++] = (struct block){is_result, m->content, m->tool_call_id};
            last->n_blocks++;
        }
    }
}

static size_t call_index(const struct chat_message *assistant, struct chat_text id)
{
    size_t found = 0; /* results of unknown calls go with the first */
    for (size_t i = 0; i < assistant->n_calls; i++) {
        const struct chat_text *have = &assistant->calls[i].id;
        if (id.bytes > 0 && have->bytes == id.bytes && memcmp(have->data, id.data, id.bytes) == 0) {
            found = i;
        }
    }
    return found;
}

struct ordered {
    size_t call_i, block_i;
};

static int compare_ordered(const void *a, const void *b)
{
    const struct ordered *x = a, *y = b;
    if (x->call_i != y->call_i) {
        return x->call_i < y->call_i ? -1 : 1;
    }
    return x->block_i < y->block_i ? -1 : x->block_i > y->block_i;
}

/* Step 2 for one turn: its results, among their own places, in the order of the calls. */
static void sort_results(struct render *r, const struct turn *turn,
                         const struct chat_message *assistant)
{
    struct block *blocks = &r->blocks[turn->first_block];
    struct ordered *order = mem_array(turn->n_blocks, sizeof(*order));
    struct block *sorted = mem_array(turn->n_blocks, sizeof(*sorted));
    size_t n = 0;
    for (size_t i = 0; i < turn->n_blocks; i++) {
        if (blocks[i].is_result) {
            order[n++] = (struct ordered){call_index(assistant, blocks[i].call_id), i};
        }
    }
    qsort(order, n, sizeof(*order), compare_ordered);
    for (size_t i = 0; i < n; i++) {
        sorted[i] = blocks[order[i].block_i];
    }
    n = 0;
    for (size_t i = 0; i < turn->n_blocks; i++) {
        if (blocks[i].is_result) {
            blocks[i] = sorted[n++];
        }
    }
    mem_free(sorted);
    mem_free(order);
}

static void sort_all_results(struct render *r)
{
    const struct chat_message *assistant = NULL;
    for (size_t i = 0; i < r->n_turns; i++) {
        const struct turn *turn = &r->turns[i];
        if (turn->role == CHAT_ROLE_ASSISTANT && turn->message->n_calls > 0) {
            assistant = turn->message;
        } else if (turn->role == CHAT_ROLE_USER && turn->n_blocks > 1 && assistant != NULL) {
            sort_results(r, turn, assistant);
        }
    }
}

static void find_last_user(struct render *r)
{
    r->last_user_i = SIZE_MAX;
    for (size_t i = 0; i < r->n_turns; i++) {
        if (r->turns[i].role == CHAT_ROLE_USER || r->turns[i].role == CHAT_ROLE_DEVELOPER) {
            r->last_user_i = i;
        }
    }
}

/*
 * Step 4: developers before the last user go altogether. The reasoning of that past is left out in
 * put_assistant.
 */
static void drop_developers(struct render *r)
{
    size_t kept = 0;
    for (size_t i = 0; i < r->n_turns; i++) {
        if (r->turns[i].role != CHAT_ROLE_DEVELOPER || i >= r->last_user_i) {
            r->turns[kept++] = r->turns[i];
        }
    }
    r->n_turns = kept;
    find_last_user(r);
}

/* ------------------------------------------------------------------------------------- writing */

static void put(struct render *r, const char *text)
{
    buf_append_text(r->out, text);
}

static void put_text(struct render *r, struct chat_text text)
{
    buf_append(r->out, text.data, text.bytes);
}

/* Ends a span of message text that began at begin. */
static void end_span(struct render *r, size_t begin)
{
    struct tokenizer_span span = {begin, r->out->bytes};
    if (r->spans != NULL && span.begin < span.end) {
        buf_append(r->spans, &span, sizeof(span));
    }
}

static void put_content(struct render *r, struct chat_text text)
{
    size_t begin = r->out->bytes;
    put_text(r, text);
    end_span(r, begin);
}

static void put_json(struct render *r, const struct json *value)
{
    size_t begin = r->out->bytes;
    json_dump_python(value, r->out);
    end_span(r, begin);
}

static void put_tools(struct render *r, const struct chat_message *m)
{
    if (m->n_tools > 0) {
        put(r, "\n\n");
        put_text(r, r->format->tools_prefix);
        for (size_t i = 0; i < m->n_tools; i++) {
            put(r, i == 0 ? "" : "\n");
            put_json(r, m->tools[i]);
        }
        put_text(r, r->format->tools_suffix);
    }
    if (m->response_format != NULL) {
        put(r, "\n\n");
        put_text(r, r->format->response_heading);
        put(r, "\n\n");
        put_text(r, r->format->response_instruction);
        put(r, "\n");
        put_json(r, m->response_format);
    }
}

static void put_user(struct render *r, const struct turn *turn)
{
    put(r, CHAT_MARK_USER);
    for (size_t i = 0; i < turn->n_blocks; i++) {
        const struct block *block = &r->blocks[turn->first_block + i];
        put(r, i == 0 ? "" : "\n\n");
        put(r, block->is_result ? "<tool_result>" : "");
        put_content(r, block->text);
        put(r, block->is_result ? "</tool_result>" : "");
    }
}

static void put_parameter(struct render *r, struct chat_text key, const struct json *value,
                          struct chat_text text)
{
    put(r, CHAT_MARK_PARAMETER);
    put_content(r, key);
    put(r, text.data != NULL ? "\" string=\"true\">" : "\" string=\"false\">");
    if (text.data != NULL) {
        put_content(r, text);
    } else {
        put_json(r, value);
    }
    put(r, CHAT_MARK_END_PARAMETER);
}

/* Arguments that are no JSON object go out as they are, under a name that says so. */
static void put_arguments(struct render *r, struct chat_text arguments)
{
    const struct json_limits limits = {.max_bytes = arguments.bytes, .max_depth = 128};
    struct json *root = NULL;
    if (arguments.bytes == 0 ||
        json_parse(arguments.data, arguments.bytes, &limits, &root, NULL) != STATUS_OK ||
        json_kind_of(root) != JSON_KIND_OBJECT) {
        struct chat_text raw = {arguments.data != NULL ? arguments.data : "", arguments.bytes};
        put_parameter(r, (struct chat_text){"arguments", 9}, NULL, raw);
        json_free(root);
        return;
    }
    struct json_iter it = json_iterate(root);
    for (bool first = true; json_iterate_next(&it); first = false) {
        struct chat_text text = {NULL, 0};
        put(r, first ? "" : "\n");
        text.data = json_text(it.value, &text.bytes);
        put_parameter(r, (struct chat_text){it.key, it.key_bytes}, it.value, text);
    }
    json_free(root);
}

static void put_calls(struct render *r, const struct chat_message *m)
{
    if (m->n_calls == 0) {
        return;
    }
    put(r, "\n\n" CHAT_MARK_CALLS ">\n");
    for (size_t i = 0; i < m->n_calls; i++) {
        put(r, CHAT_MARK_INVOKE);
        put_content(r, m->calls[i].name);
        put(r, "\">\n");
        put_arguments(r, m->calls[i].arguments);
        put(r, "\n" CHAT_MARK_END_INVOKE "\n");
    }
    put(r, CHAT_MARK_END_CALLS);
}

static void put_assistant(struct render *r, size_t turn_i)
{
    const struct turn *turn = &r->turns[turn_i];
    const struct chat_message *m = turn->message;
    bool after_task = turn_i > 0 && r->turns[turn_i - 1].task != CHAT_TASK_NONE;
    bool is_now = r->keep_reasoning || r->last_user_i == SIZE_MAX || turn_i > r->last_user_i;
    if (r->thinking && !after_task && is_now) {
        put_content(r, m->reasoning);
        put(r, CHAT_MARK_UNTHINK);
    }
    put_content(r, m->content);
    put_calls(r, m);
    if (!m->without_eos) {
        put(r, CHAT_MARK_EOS);
    }
}

static const char *const task_marks[] = {
    [CHAT_TASK_ACTION] = "<\uff5caction\uff5c>",
    [CHAT_TASK_QUERY] = "<\uff5cquery\uff5c>",
    [CHAT_TASK_AUTHORITY] = "<\uff5cauthority\uff5c>",
    [CHAT_TASK_DOMAIN] = "<\uff5cdomain\uff5c>",
    [CHAT_TASK_TITLE] = "<\uff5ctitle\uff5c>",
    [CHAT_TASK_READ_URL] = "<\uff5cread_url\uff5c>",
};

/* What hands the word to the model, after a turn that another's follows. */
static void put_transition(struct render *r, size_t turn_i)
{
    const struct turn *turn = &r->turns[turn_i];
    if (turn_i + 1 < r->n_turns) {
        enum chat_role next = r->turns[turn_i + 1].role;
        if (next != CHAT_ROLE_ASSISTANT && next != CHAT_ROLE_LATEST_REMINDER) {
            return;
        }
    }
    if (turn->task != CHAT_TASK_NONE && turn->task != CHAT_TASK_ACTION) {
        put(r, task_marks[turn->task]);
        return;
    }
    if (turn->role != CHAT_ROLE_USER && turn->role != CHAT_ROLE_DEVELOPER) {
        return;
    }
    bool is_now = r->keep_reasoning || turn_i >= r->last_user_i;
    put(r, CHAT_MARK_ASSISTANT);
    if (turn->task == CHAT_TASK_ACTION) {
        put(r, r->thinking ? CHAT_MARK_THINK : CHAT_MARK_UNTHINK);
        put(r, task_marks[CHAT_TASK_ACTION]);
        return;
    }
    put(r, r->thinking && is_now ? CHAT_MARK_THINK : CHAT_MARK_UNTHINK);
}

static enum status put_turn(struct render *r, size_t turn_i, struct error *err)
{
    const struct turn *turn = &r->turns[turn_i];
    switch (turn->role) {
    case CHAT_ROLE_SYSTEM:
        put_content(r, turn->message->content);
        put_tools(r, turn->message);
        break;
    case CHAT_ROLE_DEVELOPER:
        if (turn->message->content.bytes == 0) {
            return error_set(err, STATUS_INVALID, "a developer message needs a content");
        }
        put(r, CHAT_MARK_USER);
        put_content(r, turn->message->content);
        put_tools(r, turn->message);
        break;
    case CHAT_ROLE_LATEST_REMINDER:
        put(r, CHAT_MARK_REMINDER);
        put_content(r, turn->message->content);
        break;
    case CHAT_ROLE_ASSISTANT:
        put_assistant(r, turn_i);
        break;
    case CHAT_ROLE_USER:
    case CHAT_ROLE_TOOL:
        put_user(r, turn);
        break;
    }
    put_transition(r, turn_i);
    return STATUS_OK;
}

void chat_forced_prefix(const struct chat_options *options, struct buf *out)
{
    buf_append_text(out, "\n\n" CHAT_MARK_CALLS ">\n" CHAT_MARK_INVOKE);
    if (options->forced_name.data != NULL) {
        buf_append(out, options->forced_name.data, options->forced_name.bytes);
        buf_append_text(out, "\">\n");
    }
}

static bool is_thinking(const struct chat_options *options)
{
    return options->thinking && !options->force_call;
}

bool chat_starts_in_reasoning(const struct chat_message *messages, size_t n_messages,
                              const struct chat_options *options)
{
    if (!is_thinking(options) || n_messages == 0) {
        return false;
    }
    const struct chat_message *last = &messages[n_messages - 1];
    return last->role == CHAT_ROLE_TOOL || last->role == CHAT_ROLE_DEVELOPER ||
           (last->role == CHAT_ROLE_USER && last->task == CHAT_TASK_NONE);
}

enum status chat_render(const struct chat_format *format, const struct chat_message *messages,
                        size_t n_messages, const struct chat_options *options, struct buf *out,
                        struct buf *spans, struct error *err)
{
    struct render r = {.format = format, .options = options, .out = out, .spans = spans};
    r.thinking = is_thinking(options);
    r.keep_reasoning = options->keep_reasoning;
    for (size_t i = 0; i < n_messages; i++) {
        r.keep_reasoning |= messages[i].n_tools > 0;
    }
    r.turns = mem_array(n_messages, sizeof(*r.turns));
    r.blocks = mem_array(n_messages, sizeof(*r.blocks));
    merge_messages(&r, messages, n_messages);
    sort_all_results(&r);
    find_last_user(&r);
    if (r.thinking && !r.keep_reasoning) {
        drop_developers(&r);
    }
    put(&r, CHAT_MARK_BOS);
    if (r.thinking && r.n_turns > 0) {
        put_text(&r, format->effort[options->effort]);
    }
    enum status status = STATUS_OK;
    for (size_t i = 0; i < r.n_turns && status == STATUS_OK; i++) {
        status = put_turn(&r, i, err);
    }
    if (status == STATUS_OK && options->force_call) {
        chat_forced_prefix(options, out);
    }
    mem_free(r.blocks);
    mem_free(r.turns);
    return status;
}

enum status chat_encode(const struct chat_format *format, const struct tokenizer *tokenizer,
                        const struct chat_message *messages, size_t n_messages,
                        const struct chat_options *options, size_t max_ids, struct token_ids *ids,
                        struct error *err)
{
    struct buf text = BUF_INIT, spans = BUF_INIT;
    enum status status = chat_render(format, messages, n_messages, options, &text,
                                     options->plain_content ? &spans : NULL, err);
    if (status == STATUS_OK) {
        /* spans->data comes from malloc and so is aligned for its elements */
        status = tokenizer_encode(tokenizer, text.data, text.bytes,
                                  (const struct tokenizer_span *)(const void *)spans.data,
                                  spans.bytes / sizeof(struct tokenizer_span), max_ids, ids, err);
    }
    buf_fini(&spans);
    buf_fini(&text);
    return status;
}
