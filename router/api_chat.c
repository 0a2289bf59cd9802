/*
 * What shapes a chat prompt: messages, tools, the choice among them, and the four switches of
 * thinking that clients know. The messages themselves are read by model/chat.
 */
#include <stdio.h>
#include <string.h>

#include "router/api_read.h"

/* ----------------------------------------------------------------------------------- thinking */

/* What was said so far, and by which field. */
struct thinking {
    const char *path; /* NULL: nothing yet */
    bool on;
    struct api_shown shown;
};

static enum status say(struct api_reader *r, struct thinking *so_far, const char *path, bool on,
                       const struct json *value)
{
    struct api_shown shown = api_read_show(value);
    if (so_far->path != NULL && so_far->on != on) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, path,
                               "%s is %s and %s is %s: one switches thinking on and the other off",
                               so_far->path, so_far->shown.text, path, shown.text);
    }
    *so_far = (struct thinking){path, on, shown};
    return STATUS_OK;
}

/* {"type": "enabled"} or {"type": "disabled"}. */
static enum status read_thinking_type(struct api_reader *r, struct thinking *so_far)
{
    const struct json *thinking = api_read_field(r, "thinking"), *type = json_get(thinking, "type");
    if (thinking == NULL) {
        return STATUS_OK;
    }
    if (json_kind_of(thinking) != JSON_KIND_OBJECT) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "thinking",
                               "thinking must be an object with a type, not %s",
                               api_read_show(thinking).text);
    }
    if (json_kind_of(type) == JSON_KIND_NULL) {
        return STATUS_OK;
    }
    if (!json_text_is(type, "enabled") && !json_text_is(type, "disabled")) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "thinking.type",
                               "thinking.type must be 'enabled' or 'disabled', not %s",
                               api_read_show(type).text);
    }
    return say(r, so_far, "thinking.type", json_text_is(type, "enabled"), type);
}

static enum status read_template_switches(struct api_reader *r, struct thinking *so_far)
{
    static const struct {
        const char *key, *path;
    } switches[] = {
        {"thinking", "chat_template_kwargs.thinking"},
        {"enable_thinking", "chat_template_kwargs.enable_thinking"},
    };
    const struct json *kwargs = api_read_field(r, "chat_template_kwargs");
    if (kwargs != NULL && json_kind_of(kwargs) != JSON_KIND_OBJECT) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "chat_template_kwargs",
                               "chat_template_kwargs must be an object, not %s",
                               api_read_show(kwargs).text);
    }
    for (size_t i = 0; i < sizeof(switches) / sizeof(switches[0]); i++) {
        const struct json *value = json_get(kwargs, switches[i].key);
        bool on = false;
        if (json_kind_of(value) == JSON_KIND_NULL) {
            continue;
        }
        enum status status = api_read_bool(r, value, switches[i].path, &on);
        if (status == STATUS_OK) {
            status = say(r, so_far, switches[i].path, on, value);
        }
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status read_effort(struct api_reader *r, struct thinking *so_far)
{
    const struct json *value = api_read_field(r, "reasoning_effort");
    enum chat_effort effort;
    size_t bytes = 0;
    const char *text = json_text(value, &bytes);
    if (value == NULL) {
        return STATUS_OK;
    }
    if (text == NULL || chat_effort_from_text(text, bytes, &effort) != STATUS_OK) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "reasoning_effort",
                               "reasoning_effort must be none, minimal, low, medium, high, xhigh "
                               "or max, not %s",
                               api_read_show(value).text);
    }
    r->request->options.effort = effort;
    return say(r, so_far, "reasoning_effort", effort != CHAT_EFFORT_NONE, value);
}

static enum status read_thinking(struct api_reader *r)
{
    struct thinking said = {NULL};
    r->request->options.effort = r->context->effort;
    enum status status = read_thinking_type(r, &said);
    if (status == STATUS_OK) {
        status = read_template_switches(r, &said);
    }
    if (status == STATUS_OK) {
        status = read_effort(r, &said);
    }
    r->request->options.thinking = said.path != NULL ? said.on : r->context->thinking;
    return status;
}

/* -------------------------------------------------------------------------------------- tools */

/* Whether there is a tool that can be called: those of unknown type are skipped. */
static bool have_functions(const struct json *tools)
{
    for (size_t i = 0; i < json_array_n(tools); i++) {
        if (json_text_is(json_get(json_array_at(tools, i), "type"), "function")) {
            return true;
        }
    }
    return false;
}

static enum status read_named_choice(struct api_reader *r, const struct json *choice,
                                     const struct json *tools)
{
    const struct json *type = json_get(choice, "type");
    const struct json *name = json_get(json_get(choice, "function"), "name");
    struct chat_text text;
    if (!json_text_is(type, "function")) {
        bool known = json_text_is(type, "allowed_tools") || json_text_is(type, "custom");
        return api_read_refuse(r, known ? API_CODE_UNSUPPORTED_VALUE : API_CODE_INVALID_VALUE,
                               "tool_choice.type", "tool_choice.type must be 'function', not %s",
                               api_read_show(type).text);
    }
    text.data = json_text(name, &text.bytes);
    if (text.data == NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "tool_choice.function.name",
                               "tool_choice.function.name must be a string, not %s",
                               api_read_show(name).text);
    }
    if (!chat_tools_have(tools, text.data, text.bytes)) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "tool_choice.function.name",
                               "tool_choice names %s, which is not in tools",
                               api_read_show(name).text);
    }
    r->request->tool_choice = API_TOOL_CHOICE_NAMED;
    r->request->options.forced_name = text;
    return STATUS_OK;
}

bool api_may_call(const struct api_request *request, const char *name, size_t bytes)
{
    const struct chat_text *forced = &request->options.forced_name;
    switch (request->tool_choice) {
    case API_TOOL_CHOICE_NONE:
        return false;
    case API_TOOL_CHOICE_NAMED:
        return forced->bytes == bytes && memcmp(forced->data, name, bytes) == 0;
    case API_TOOL_CHOICE_AUTO:
    case API_TOOL_CHOICE_REQUIRED:
        break;
    }
    return chat_tools_have(json_get(request->tree, "tools"), name, bytes);
}

static enum status read_tool_choice(struct api_reader *r, const struct json *tools)
{
    const struct json *choice = api_read_field(r, "tool_choice");
    bool have = have_functions(tools);
    if (choice == NULL || json_text_is(choice, "auto")) {
        r->request->tool_choice = have ? API_TOOL_CHOICE_AUTO : API_TOOL_CHOICE_NONE;
        return STATUS_OK;
    }
    if (json_text_is(choice, "none")) {
        r->request->tool_choice = API_TOOL_CHOICE_NONE;
        return STATUS_OK;
    }
    if (json_text_is(choice, "required")) {
        r->request->tool_choice = API_TOOL_CHOICE_REQUIRED;
        if (!have) {
            return api_read_refuse(r, API_CODE_INVALID_VALUE, "tool_choice",
                                   "tool_choice is 'required' and there are no tools");
        }
        return STATUS_OK;
    }
    if (json_kind_of(choice) == JSON_KIND_OBJECT) {
        return read_named_choice(r, choice, tools);
    }
    return api_read_refuse(r, API_CODE_INVALID_VALUE, "tool_choice",
                           "tool_choice must be 'none', 'auto', 'required' or a function, not %s",
                           api_read_show(choice).text);
}

static enum status read_tools(struct api_reader *r, const struct json **ret_tools)
{
    struct api_request *request = r->request;
    const struct json *tools = api_read_field(r, "tools");
    if (tools != NULL && json_kind_of(tools) != JSON_KIND_ARRAY) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "tools", "tools must be an array, not %s",
                               api_read_show(tools).text);
    }
    enum status status = read_tool_choice(r, tools);
    if (status != STATUS_OK) {
        return status;
    }
    request->parallel_tool_calls = true;
    request->options.force_call = request->tool_choice == API_TOOL_CHOICE_REQUIRED ||
                                  request->tool_choice == API_TOOL_CHOICE_NAMED;
    *ret_tools = request->tool_choice == API_TOOL_CHOICE_NONE ? NULL : tools;
    return api_read_bool(r, api_read_field(r, "parallel_tool_calls"), "parallel_tool_calls",
                         &request->parallel_tool_calls);
}

/* ----------------------------------------------------------------------------------- together */

static enum status read_messages(struct api_reader *r, const struct json *tools)
{
    const struct json *messages = api_read_field(r, "messages");
    char param[CHAT_PARAM_BYTES] = "messages";
    struct error err = {""};
    if (json_kind_of(messages) == JSON_KIND_NULL) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "messages",
                               "messages is missing: it must be an array of messages");
    }
    if (json_kind_of(messages) != JSON_KIND_ARRAY) {
        return api_read_refuse(r, API_CODE_INVALID_VALUE, "messages",
                               "messages must be an array of messages, not %s",
                               api_read_show(messages).text);
    }
    enum status status =
        chat_thread_from_json(messages, tools, NULL, &r->request->thread, param, &err);
    switch (status) {
    case STATUS_OK:
        return STATUS_OK;
    case STATUS_UNSUPPORTED:
        return api_read_refuse(r, API_CODE_UNSUPPORTED_VALUE, param, "%s", err.text);
    case STATUS_EXHAUSTED:
        api_error_set(r->error, API_CODE_INTERNAL_ERROR, NULL, "%s", err.text);
        return STATUS_EXHAUSTED;
    default:
        return api_read_refuse(r, API_CODE_INVALID_VALUE, param, "%s", err.text);
    }
}

enum status api_read_chat(struct api_reader *reader)
{
    struct api_request *request = reader->request;
    const struct json *tools = NULL;
    request->is_chat = true;
    enum status status = read_tools(reader, &tools);
    if (status == STATUS_OK) {
        status = read_messages(reader, tools);
    }
    if (status == STATUS_OK) {
        status = read_thinking(reader);
    }
    if (status == STATUS_OK) {
        status = api_read_sampling(reader);
    }
    if (status != STATUS_OK) {
        return status;
    }
    /* a prompt that ends inside a call has no place for thinking, nor one that ends in a turn of
     * the assistant */
    enum chat_role last = request->thread.messages[request->thread.n_messages - 1].role;
    request->options.thinking = request->options.thinking && !request->options.force_call;
    request->in_reasoning =
        request->options.thinking && (last == CHAT_ROLE_USER || last == CHAT_ROLE_TOOL);
    request->n_prompts = 1;
    return STATUS_OK;
}
