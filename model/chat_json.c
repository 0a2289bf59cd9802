/*
 * OpenAI's messages and tools to ours. Lenient where clients differ (a null content, parts for any
 * role, arguments as an object), strict about types and about what would be lost in silence: a
 * part that is no text is refused and not skipped. Texts are borrowed from the tree and keep their
 * length, so NUL is a character like any other; only joined parts are copied.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/chat.h"

enum {
    DEFAULT_MAX_MESSAGES = 65536,
    DEFAULT_MAX_TOOLS = 1024,
    DEFAULT_MAX_TEXT_BYTES = 64 << 20,
    MAX_CALLS = 1024, /* of one message: each result is looked up among them */
    MAX_NAME_BYTES = 128,
};

/* One call of chat_thread_from_json. */
struct reader {
    struct arena *arena;
    size_t text_bytes_left;
    size_t message_i;
    char *param;
    struct error *err;
};

#define REFUSE(reader, status, path_args, ...) \
    (set_param path_args, error_set((reader)->err, status, __VA_ARGS__))

static void set_param(struct reader *r, const char *format, ...) PRINTF_LIKE(2, 3);

static void set_param(struct reader *r, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(r->param, CHAT_PARAM_BYTES, format, args);
    va_end(args);
}

static bool is_absent(const struct json *value)
{
    return json_kind_of(value) == JSON_KIND_NULL;
}

/* Counts text against the limit. */
static enum status count_text(struct reader *r, size_t bytes)
{
    if (bytes > r->text_bytes_left) {
        return REFUSE(r, STATUS_TOO_LARGE, (r, "messages"), "the messages are too long");
    }
    r->text_bytes_left -= bytes;
    return STATUS_OK;
}

/* A member that is a string or absent; key names it in the path of the message. */
static enum status read_text(struct reader *r, const struct json *object, const char *key,
                             struct chat_text *ret)
{
    const struct json *value = json_get(object, key);
    struct chat_text text = {NULL, 0};
    if (!is_absent(value)) {
        text.data = json_text(value, &text.bytes);
        if (text.data == NULL) {
            return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.%s", r->message_i, key),
                          "%s must be a string, not %s", key, json_kind_name(json_kind_of(value)));
        }
    }
    *ret = text;
    return count_text(r, text.bytes);
}

/* ------------------------------------------------------------------------------------- content */

/* The text of one part: {"type": "text", "text": ...}, or a refusal brought back. */
static enum status read_part(struct reader *r, const struct json *part, size_t part_i,
                             struct chat_text *ret)
{
    const struct json *type = json_get(part, "type");
    const char *key = json_text_is(type, "refusal") ? "refusal" : "text";
    if (!json_text_is(type, "text") && !json_text_is(type, "refusal")) {
        size_t bytes;
        const char *name = json_text(type, &bytes);
        set_param(r, "messages.%zu.content.%zu.type", r->message_i, part_i);
        if (name == NULL) {
            return error_set(r->err, STATUS_INVALID, "a content part needs a type");
        }
        return error_set(r->err, STATUS_UNSUPPORTED,
                         "content parts of type '%.40s' are not supported by this model", name);
    }
    ret->data = json_text(json_get(part, key), &ret->bytes);
    if (ret->data == NULL) {
        return REFUSE(r, STATUS_INVALID,
                      (r, "messages.%zu.content.%zu.%s", r->message_i, part_i, key),
                      "a %s part needs a string '%s'", key, key);
    }
    return STATUS_OK;
}

static enum status join_parts(struct reader *r, const struct json *parts, struct chat_text *ret)
{
    size_t n = json_array_n(parts), total = 0;
    struct chat_text text;
    for (size_t i = 0; i < n; i++) {
        enum status status = read_part(r, json_array_at(parts, i), i, &text);
        if (status == STATUS_OK) {
            status = count_text(r, text.bytes);
        }
        if (status != STATUS_OK) {
            return status;
        }
        total += text.bytes;
    }
    char *joined = arena_try_alloc(r->arena, total + 1), *to = joined;
    if (joined == NULL) {
        return REFUSE(r, STATUS_EXHAUSTED, (r, "messages"), "no memory for the messages");
    }
    for (size_t i = 0; i < n; i++) {
        enum status status = read_part(r, json_array_at(parts, i), i, &text);
        if (status != STATUS_OK) {
            return status;
        }
        memcpy(to, text.data, text.bytes);
        to += text.bytes;
    }
    *ret = (struct chat_text){joined, (size_t)(to - joined)};
    return STATUS_OK;
}

static enum status read_content(struct reader *r, const struct json *message,
                                struct chat_message *ret)
{
    const struct json *content = json_get(message, "content");
    switch (json_kind_of(content)) {
    case JSON_KIND_NULL:
        if (ret->role == CHAT_ROLE_ASSISTANT) {
            ret->content = (struct chat_text){"", 0};
            return STATUS_OK;
        }
        break;
    case JSON_KIND_STRING:
        return read_text(r, message, "content", &ret->content);
    case JSON_KIND_ARRAY:
        /* for any role: parts say the same as their text in one string */
        return join_parts(r, content, &ret->content);
    default:
        break;
    }
    return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.content", r->message_i),
                  "content must be a string or an array of text parts, not %s",
                  json_kind_name(json_kind_of(content)));
}

/* --------------------------------------------------------------------------------------- calls */

/*
 * Names of functions stand raw inside quotes and angle brackets, in prompts and in completions, so
 * what would break out of those is refused.
 */
static bool is_name(const char *text, size_t bytes)
{
    if (text == NULL || bytes == 0 || bytes > MAX_NAME_BYTES) {
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c <= ' ' || c == 0x7f || c == '"' || c == '<' || c == '>') {
            return false;
        }
    }
    return true;
}

/* Arguments: text, or the object itself as some clients send it. */
static enum status read_arguments(struct reader *r, const struct json *function, size_t call_i,
                                  struct chat_text *ret)
{
    const struct json *arguments = json_get(function, "arguments");
    struct buf text = BUF_INIT;
    switch (json_kind_of(arguments)) {
    case JSON_KIND_STRING:
        ret->data = json_text(arguments, &ret->bytes);
        return count_text(r, ret->bytes);
    case JSON_KIND_OBJECT:
        json_dump_python(arguments, &text);
        ret->data = arena_strndup(r->arena, (const char *)text.data, text.bytes);
        ret->bytes = text.bytes;
        buf_fini(&text);
        return count_text(r, ret->bytes);
    case JSON_KIND_NULL:
        *ret = (struct chat_text){"{}", 2};
        return STATUS_OK;
    default:
        break;
    }
    return REFUSE(r, STATUS_INVALID,
                  (r, "messages.%zu.tool_calls.%zu.function.arguments", r->message_i, call_i),
                  "arguments must be a string of JSON, not %s",
                  json_kind_name(json_kind_of(arguments)));
}

static enum status read_call(struct reader *r, const struct json *json, size_t call_i,
                             struct chat_call *ret)
{
    const struct json *type = json_get(json, "type"), *id = json_get(json, "id");
    const struct json *function = json_get(json, "function");
    char path[CHAT_PARAM_BYTES];
    snprintf(path, sizeof(path), "messages.%zu.tool_calls.%zu", r->message_i, call_i);
    if (!is_absent(type) && !json_text_is(type, "function")) {
        return REFUSE(r, STATUS_UNSUPPORTED, (r, "%s.type", path),
                      "the one supported type of tool call is 'function'");
    }
    if (!is_absent(id)) {
        ret->id.data = json_text(id, &ret->id.bytes);
        if (ret->id.data == NULL) {
            return REFUSE(r, STATUS_INVALID, (r, "%s.id", path), "id must be a string");
        }
    }
    ret->name.data = json_text(json_get(function, "name"), &ret->name.bytes);
    if (!is_name(ret->name.data, ret->name.bytes)) {
        return REFUSE(r, STATUS_INVALID, (r, "%s.function.name", path),
                      "a call needs a function name of 1 to %d characters without spaces, quotes "
                      "and angle brackets",
                      MAX_NAME_BYTES);
    }
    return read_arguments(r, function, call_i, &ret->arguments);
}

static enum status read_calls(struct reader *r, const struct json *message,
                              struct chat_message *ret)
{
    const struct json *calls = json_get(message, "tool_calls");
    if (is_absent(calls)) {
        return STATUS_OK;
    }
    size_t n = json_array_n(calls);
    if (json_kind_of(calls) != JSON_KIND_ARRAY || n > MAX_CALLS) {
        return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.tool_calls", r->message_i),
                      "tool_calls must be an array of at most %d calls", MAX_CALLS);
    }
    struct chat_call *to = arena_alloc(r->arena, n * sizeof(*to));
    for (size_t i = 0; i < n; i++) {
        enum status status = read_call(r, json_array_at(calls, i), i, &to[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    ret->calls = to;
    ret->n_calls = n;
    return STATUS_OK;
}

/* ------------------------------------------------------------------------------------ messages */

static bool read_role(const struct json *role, enum chat_role *ret)
{
    static const struct {
        const char *name;
        enum chat_role role;
    } roles[] = {
        {"system", CHAT_ROLE_SYSTEM}, {"developer", CHAT_ROLE_SYSTEM},
        {"user", CHAT_ROLE_USER},     {"assistant", CHAT_ROLE_ASSISTANT},
        {"tool", CHAT_ROLE_TOOL},
    };
    for (size_t i = 0; i < sizeof(roles) / sizeof(roles[0]); i++) {
        if (json_text_is(role, roles[i].name)) {
            *ret = roles[i].role;
            return true;
        }
    }
    return false;
}

static enum status read_assistant(struct reader *r, const struct json *json, bool is_last,
                                  struct chat_message *ret)
{
    const struct json *prefix = json_get(json, "prefix");
    bool is_prefix = false;
    enum status status = read_text(r, json, "reasoning_content", &ret->reasoning);
    if (status == STATUS_OK && ret->reasoning.data == NULL) {
        status = read_text(r, json, "reasoning", &ret->reasoning); /* its other common name */
    }
    if (status == STATUS_OK) {
        status = read_calls(r, json, ret);
    }
    if (status != STATUS_OK) {
        return status;
    }
    if (!is_absent(prefix) && !json_bool(prefix, &is_prefix)) {
        return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.prefix", r->message_i),
                      "prefix must be a boolean");
    }
    if (is_prefix && (!is_last || ret->n_calls > 0)) {
        return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.prefix", r->message_i),
                      "only the last message, and one without calls, can be a prefix");
    }
    ret->without_eos = is_prefix;
    return STATUS_OK;
}

static enum status read_message(struct reader *r, const struct json *json, bool is_last,
                                struct chat_message *ret)
{
    const struct json *role = json_get(json, "role");
    struct chat_text name;
    if (json_kind_of(json) != JSON_KIND_OBJECT) {
        return REFUSE(r, STATUS_INVALID, (r, "messages.%zu", r->message_i),
                      "a message must be an object, not %s", json_kind_name(json_kind_of(json)));
    }
    if (!read_role(role, &ret->role)) {
        return REFUSE(r, STATUS_INVALID, (r, "messages.%zu.role", r->message_i),
                      "role must be system, developer, user, assistant or tool");
    }
    enum status status = read_content(r, json, ret);
    if (status == STATUS_OK) {
        status = read_text(r, json, "name", &name); /* the encoding has no place for it */
    }
    if (status == STATUS_OK && ret->role == CHAT_ROLE_TOOL) {
        status = read_text(r, json, "tool_call_id", &ret->tool_call_id);
    }
    if (status == STATUS_OK && ret->role == CHAT_ROLE_ASSISTANT) {
        status = read_assistant(r, json, is_last, ret);
    }
    return status;
}

/* --------------------------------------------------------------------------------------- tools */

/* The function of a tool; NULL for a tool of another type. */
static const struct json *function_of(const struct json *tool)
{
    return json_text_is(json_get(tool, "type"), "function") ? json_get(tool, "function") : NULL;
}

bool chat_tools_have(const struct json *tools, const char *name, size_t name_bytes)
{
    for (size_t i = 0; i < json_array_n(tools); i++) {
        size_t bytes;
        const char *have =
            json_text(json_get(function_of(json_array_at(tools, i)), "name"), &bytes);
        if (have != NULL && bytes == name_bytes && memcmp(have, name, bytes) == 0) {
            return true;
        }
    }
    return false;
}

static enum status check_function(struct reader *r, const struct json *function, size_t tool_i)
{
    const struct json *parameters = json_get(function, "parameters");
    const struct json *description = json_get(function, "description");
    size_t bytes = 0;
    const char *name = json_text(json_get(function, "name"), &bytes);
    if (!is_name(name, bytes)) {
        return REFUSE(r, STATUS_INVALID, (r, "tools.%zu.function.name", tool_i),
                      "a function needs a name of 1 to %d characters without spaces, quotes and "
                      "angle brackets",
                      MAX_NAME_BYTES);
    }
    if (!is_absent(parameters) && json_kind_of(parameters) != JSON_KIND_OBJECT) {
        return REFUSE(r, STATUS_INVALID, (r, "tools.%zu.function.parameters", tool_i),
                      "parameters must be an object");
    }
    if (!is_absent(description) && json_kind_of(description) != JSON_KIND_STRING) {
        return REFUSE(r, STATUS_INVALID, (r, "tools.%zu.function.description", tool_i),
                      "description must be a string");
    }
    return STATUS_OK;
}

static enum status read_tools(struct reader *r, const struct json *tools, size_t max_tools,
                              const struct json *const **ret, size_t *ret_n)
{
    size_t n = json_array_n(tools), n_functions = 0;
    if (!is_absent(tools) && json_kind_of(tools) != JSON_KIND_ARRAY) {
        return REFUSE(r, STATUS_INVALID, (r, "tools"), "tools must be an array");
    }
    if (n > max_tools) {
        return REFUSE(r, STATUS_TOO_LARGE, (r, "tools"), "there are %zu tools, at most %zu", n,
                      max_tools);
    }
    const struct json **functions = arena_alloc(r->arena, n * sizeof(*functions));
    for (size_t i = 0; i < n; i++) {
        const struct json *tool = json_array_at(tools, i);
        if (json_kind_of(json_get(tool, "type")) != JSON_KIND_STRING) {
            return REFUSE(r, STATUS_INVALID, (r, "tools.%zu.type", i), "a tool needs a type");
        }
        if (!json_text_is(json_get(tool, "type"), "function")) {
            continue;
        }
        const struct json *function = function_of(tool);
        enum status status = check_function(r, function, i);
        if (status != STATUS_OK) {
            return status;
        }
        functions[n_functions++] = function;
    }
    *ret = functions;
    *ret_n = n_functions;
    return STATUS_OK;
}

/* ------------------------------------------------------------------------------------ together */

static enum status read_thread(struct reader *r, const struct json *messages,
                               const struct json *tools, const struct chat_limits *limits,
                               struct chat_thread *thread)
{
    size_t n = json_array_n(messages), n_tools = 0;
    size_t max = limits->max_messages != 0 ? limits->max_messages : DEFAULT_MAX_MESSAGES;
    size_t max_tools = limits->max_tools != 0 ? limits->max_tools : DEFAULT_MAX_TOOLS;
    const struct json *const *functions = NULL;
    if (n == 0) {
        return REFUSE(r, STATUS_INVALID, (r, "messages"),
                      "messages must be an array of at least one message");
    }
    if (n > max) {
        return REFUSE(r, STATUS_TOO_LARGE, (r, "messages"), "there are %zu messages, at most %zu",
                      n, max);
    }
    enum status status = read_tools(r, tools, max_tools, &functions, &n_tools);
    if (status != STATUS_OK) {
        return status;
    }
    /* room for a system message before all others, which is dropped again if not needed */
    struct chat_message *to = arena_alloc(r->arena, (n + 1) * sizeof(*to));
    for (size_t i = 0; i < n; i++) {
        r->message_i = i;
        status = read_message(r, json_array_at(messages, i), i + 1 == n, &to[i + 1]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    bool adds_system = n_tools > 0 && to[1].role != CHAT_ROLE_SYSTEM;
    to[0].role = CHAT_ROLE_SYSTEM;
    thread->messages = adds_system ? to : to + 1;
    thread->n_messages = adds_system ? n + 1 : n;
    thread->messages[0].tools = n_tools > 0 ? functions : NULL;
    thread->messages[0].n_tools = n_tools;
    return STATUS_OK;
}

enum status chat_thread_from_json(const struct json *messages, const struct json *tools,
                                  const struct chat_limits *limits, struct chat_thread *ret,
                                  char ret_param[CHAT_PARAM_BYTES], struct error *err)
{
    static const struct chat_limits defaults = {0};
    char param[CHAT_PARAM_BYTES] = "";
    struct chat_thread thread = {.arena = arena_create(0)};
    struct reader reader = {.arena = thread.arena, .param = param, .err = err};
    limits = limits != NULL ? limits : &defaults;
    reader.text_bytes_left =
        limits->max_text_bytes != 0 ? limits->max_text_bytes : DEFAULT_MAX_TEXT_BYTES;
    enum status status = read_thread(&reader, messages, tools, limits, &thread);
    if (status != STATUS_OK) {
        memcpy(ret_param, param, sizeof(param));
        arena_free(thread.arena);
        return status;
    }
    *ret = thread;
    return STATUS_OK;
}

void chat_thread_fini(struct chat_thread *thread)
{
    arena_free(thread->arena);
    *thread = (struct chat_thread){0};
}
