#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "router/api.h"

/*
 * Bodies in, requests or errors out, with the tokenizer and encoding of a real model folder.
 * usage: test_api MODEL_FOLDER
 */
static struct api_context context;

static const char *const aliases[] = {"other-name", "deepseek-chat"};

/* ---------------------------------------------------------------------------- what is refused */

struct refusal {
    enum api_kind kind;
    const char *body;
    const char *code, *param; /* param NULL: none */
    const char *says;         /* a part of the message */
};

#define CHAT(members) "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" members "}"
#define TEXT(members) "{\"prompt\":\"hi\"" members "}"
#define TOOL \
    "{\"type\":\"function\",\"function\":{\"name\":\"add\",\"parameters\":{\"type\":\"object\"}}}"
#define C API_KIND_CHAT
#define T API_KIND_COMPLETIONS
#define JSON_BAD "invalid_json"
#define VALUE "invalid_value"
#define UNSUPPORTED "unsupported_value"

static const struct refusal refusals[] = {
    /* not one object */
    {C, "", JSON_BAD, NULL, "JSON"},
    {C, "[]", JSON_BAD, NULL, "an array"},
    {C, "null", JSON_BAD, NULL, "null"},
    {C, "{\"messages\":[]", JSON_BAD, NULL, "JSON"},
    {C, "{} {}", JSON_BAD, NULL, "JSON"},
    {C, "{\"a\":1,\"a\":1}", JSON_BAD, NULL, "JSON"},
    {C, CHAT(",\"temperature\":NaN"), JSON_BAD, NULL, "JSON"},
    {C, CHAT(",\"seed\":9223372036854775808"), JSON_BAD, NULL, "JSON"},
    {T, "{\"prompt\":[9223372036854775808]}", JSON_BAD, NULL, "JSON"},
    /* model */
    {C, CHAT(",\"model\":\"gpt-4o\""), "model_not_found", "model", "'gpt-4o'"},
    {T, TEXT(",\"model\":\"\""), "model_not_found", "model", "tiny"},
    {C, CHAT(",\"model\":\"tiny\\u0000x\""), "model_not_found", "model", "tiny"},
    {C, CHAT(",\"model\":7"), VALUE, "model", "7"},
    /* messages */
    {C, "{}", VALUE, "messages", "missing: it must be an array"},
    {C, "{\"messages\":null}", VALUE, "messages", "missing: it must be an array"},
    {C, "{\"messages\":5}", VALUE, "messages", "an array of messages, not 5"},
    {C, "{\"messages\":[]}", VALUE, "messages", "at least one"},
    {C, "{\"messages\":\"hi\"}", VALUE, "messages", "'hi'"},
    {C, "{\"messages\":[{\"role\":\"robot\",\"content\":\"\"}]}", VALUE, "messages.0.role", "role"},
    {C, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":7}]}",
     VALUE, "messages.1.content", "string"},
    {C,
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
     "{\"type\":\"image_url\",\"image_url\":{\"url\":\"data:\"}}]}]}",
     UNSUPPORTED, "messages.0.content.1.type", "image_url"},
    {C,
     "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_audio\","
     "\"input_audio\":{}}]}]}",
     UNSUPPORTED, "messages.0.content.0.type", "input_audio"},
    /* tools */
    {C, CHAT(",\"tools\":{}"), VALUE, "tools", "array"},
    {C, CHAT(",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a\\u0000b\"}}]"), VALUE,
     "tools.0.function.name", "name"},
    {C, CHAT(",\"tools\":[" TOOL "],\"tool_choice\":\"any\""), VALUE, "tool_choice", "'any'"},
    {C, CHAT(",\"tool_choice\":\"required\""), VALUE, "tool_choice", "no tools"},
    {C, CHAT(",\"tools\":[],\"tool_choice\":\"required\""), VALUE, "tool_choice", "no tools"},
    {C,
     CHAT(",\"tools\":[" TOOL
          "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"sub\"}}"),
     VALUE, "tool_choice.function.name", "'sub'"},
    {C,
     CHAT(",\"tools\":[" TOOL
          "],\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"add\\u0000\"}}"),
     VALUE, "tool_choice.function.name", "not in tools"},
    {C, CHAT(",\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"function\"}"), VALUE,
     "tool_choice.function.name", "string"},
    {C, CHAT(",\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"allowed_tools\"}"), UNSUPPORTED,
     "tool_choice.type", "allowed_tools"},
    {C, CHAT(",\"tools\":[" TOOL "],\"tool_choice\":7"), VALUE, "tool_choice", "7"},
    {C, CHAT(",\"parallel_tool_calls\":1"), VALUE, "parallel_tool_calls", "boolean"},
    /* limits */
    {C, CHAT(",\"max_tokens\":0"), VALUE, "max_tokens", "not 0"},
    {C, CHAT(",\"max_tokens\":-1"), VALUE, "max_tokens", "not -1"},
    {C, CHAT(",\"max_tokens\":1.5"), VALUE, "max_tokens", "1.5"},
    {C, CHAT(",\"max_tokens\":\"16\""), VALUE, "max_tokens", "'16'"},
    {C, CHAT(",\"max_completion_tokens\":0"), VALUE, "max_completion_tokens", "not 0"},
    {C, CHAT(",\"max_completion_tokens\":8,\"max_tokens\":9"), VALUE, "max_completion_tokens",
     "max_tokens is 9"},
    {C, CHAT(",\"min_tokens\":-1"), VALUE, "min_tokens", "-1"},
    {C, CHAT(",\"n\":0"), VALUE, "n", "from 1 to 16"},
    {C, CHAT(",\"n\":17"), VALUE, "n", "not 17"},
    {T, TEXT(",\"n\":17"), VALUE, "n", "not 17"},
    /* stops */
    {C, CHAT(",\"stop\":\"\""), VALUE, "stop", "1024"},
    {C, CHAT(",\"stop\":[\"a\",\"\"]"), VALUE, "stop.1", "not 0"},
    {C, CHAT(",\"stop\":[\"a\",1]"), VALUE, "stop.1", "string"},
    {C, CHAT(",\"stop\":7"), VALUE, "stop", "string"},
    {C,
     CHAT(",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"10\",\"11\",\"12\","
          "\"13\",\"14\",\"15\",\"16\",\"17\"]"),
     VALUE, "stop", "17"},
    {C, CHAT(",\"stop_token_ids\":[1,129280]"), VALUE, "stop_token_ids.1", "vocabulary"},
    {C, CHAT(",\"stop_token_ids\":[-1]"), VALUE, "stop_token_ids.0", "-1"},
    {C, CHAT(",\"stop_token_ids\":7"), VALUE, "stop_token_ids", "array"},
    {C, CHAT(",\"stop_token_ids\":[null]"), VALUE, "stop_token_ids.0", "null"},
    {C, CHAT(",\"ignore_eos\":\"yes\""), VALUE, "ignore_eos", "'yes'"},
    /* sampling */
    {C, CHAT(",\"temperature\":-0.1"), VALUE, "temperature", "-0.1"},
    {C, CHAT(",\"temperature\":2.1"), VALUE, "temperature", "2.1"},
    {C, CHAT(",\"temperature\":\"hot\""), VALUE, "temperature", "'hot'"},
    {C, CHAT(",\"temperature\":true"), VALUE, "temperature", "true"},
    {C, CHAT(",\"top_p\":1.01"), VALUE, "top_p", "1.01"},
    {C, CHAT(",\"min_p\":-1"), VALUE, "min_p", "-1"},
    {C, CHAT(",\"top_k\":-2"), VALUE, "top_k", "-2"},
    {C, CHAT(",\"top_k\":0.5"), VALUE, "top_k", "0.5"},
    {C, CHAT(",\"presence_penalty\":2.5"), VALUE, "presence_penalty", "2.5"},
    {C, CHAT(",\"frequency_penalty\":-3"), VALUE, "frequency_penalty", "-3"},
    {C, CHAT(",\"repetition_penalty\":0"), VALUE, "repetition_penalty", "not 0"},
    {C, CHAT(",\"repetition_penalty\":11"), VALUE, "repetition_penalty", "11"},
    {C, CHAT(",\"seed\":1.5"), VALUE, "seed", "1.5"},
    {C, CHAT(",\"seed\":1e30"), VALUE, "seed", "integer"},
    {C, CHAT(",\"logit_bias\":{\"999999\":1}"), VALUE, "logit_bias.999999", "vocabulary"},
    {C, CHAT(",\"logit_bias\":{\"-1\":1}"), VALUE, "logit_bias.-1", "vocabulary"},
    {C, CHAT(",\"logit_bias\":{\"01\":1}"), VALUE, "logit_bias", "'01'"},
    {C, CHAT(",\"logit_bias\":{\"\":1}"), VALUE, "logit_bias", "''"},
    {C, CHAT(",\"logit_bias\":{\"hello\":1}"), VALUE, "logit_bias", "'hello'"},
    {C, CHAT(",\"logit_bias\":{\"99999999999999999999\":1}"), VALUE, "logit_bias", "ids"},
    {C, CHAT(",\"logit_bias\":{\"1\":101}"), VALUE, "logit_bias.1", "101"},
    {C, CHAT(",\"logit_bias\":{\"1\":null}"), VALUE, "logit_bias.1", "null"},
    {C, CHAT(",\"logit_bias\":[1]"), VALUE, "logit_bias", "an array"},
    /* logprobs */
    {C, CHAT(",\"logprobs\":1"), VALUE, "logprobs", "boolean"},
    {C, CHAT(",\"logprobs\":true,\"top_logprobs\":21"), VALUE, "top_logprobs", "21"},
    {C, CHAT(",\"top_logprobs\":2"), VALUE, "top_logprobs", "logprobs is not true"},
    {T, TEXT(",\"logprobs\":true"), VALUE, "logprobs", "true"},
    {T, TEXT(",\"logprobs\":21"), VALUE, "logprobs", "21"},
    /* streams */
    {C, CHAT(",\"stream\":\"true\""), VALUE, "stream", "boolean"},
    {C, CHAT(",\"stream\":true,\"stream_options\":[]"), VALUE, "stream_options", "object"},
    {C, CHAT(",\"stream\":true,\"stream_options\":{\"include_usage\":1}"), VALUE,
     "stream_options.include_usage", "boolean"},
    /* thinking */
    {C, CHAT(",\"reasoning_effort\":\"huge\""), VALUE, "reasoning_effort", "'huge'"},
    {C, CHAT(",\"reasoning_effort\":\"low\\u0000\""), VALUE, "reasoning_effort", "low"},
    {C, CHAT(",\"thinking\":true"), VALUE, "thinking", "object"},
    {C, CHAT(",\"thinking\":{\"type\":\"auto\"}"), VALUE, "thinking.type", "'auto'"},
    {C, CHAT(",\"chat_template_kwargs\":[]"), VALUE, "chat_template_kwargs", "object"},
    {C, CHAT(",\"chat_template_kwargs\":{\"thinking\":\"on\"}"), VALUE,
     "chat_template_kwargs.thinking", "'on'"},
    {C, CHAT(",\"thinking\":{\"type\":\"disabled\"},\"reasoning_effort\":\"high\""), VALUE,
     "reasoning_effort", "thinking.type is 'disabled' and reasoning_effort is 'high'"},
    {C, CHAT(",\"chat_template_kwargs\":{\"thinking\":true,\"enable_thinking\":false}"), VALUE,
     "chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking is true"},
    {C, CHAT(",\"thinking\":{\"type\":\"enabled\"},\"chat_template_kwargs\":{\"thinking\":false}"),
     VALUE, "chat_template_kwargs.thinking", "thinking.type is 'enabled'"},
    /* formats */
    {C, CHAT(",\"response_format\":{\"type\":\"json_object\"}"), UNSUPPORTED,
     "response_format.type", "json_object"},
    {C, CHAT(",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}"), UNSUPPORTED,
     "response_format.type", "json_schema"},
    {C, CHAT(",\"response_format\":{\"type\":\"xml\"}"), VALUE, "response_format.type", "'xml'"},
    {C, CHAT(",\"response_format\":\"text\""), VALUE, "response_format", "object"},
    /* prompts */
    {T, "{}", VALUE, "prompt", "missing"},
    {T, "{\"prompt\":null}", VALUE, "prompt", "missing"},
    {T, "{\"prompt\":\"\"}", VALUE, "prompt", "empty"},
    {T, "{\"prompt\":7}", VALUE, "prompt", "7"},
    {T, "{\"prompt\":{}}", VALUE, "prompt", "an object"},
    {T, "{\"prompt\":[]}", VALUE, "prompt", "empty"},
    {T, "{\"prompt\":[[]]}", VALUE, "prompt.0", "empty"},
    {T, "{\"prompt\":[\"\"]}", VALUE, "prompt.0", "empty"},
    {T, "{\"prompt\":[\"a\",1]}", VALUE, "prompt.1", "string"},
    {T, "{\"prompt\":[1,\"a\"]}", VALUE, "prompt.1", "'a'"},
    {T, "{\"prompt\":[[1],2]}", VALUE, "prompt.1", "array"},
    {T, "{\"prompt\":[[1],[2,\"x\"]]}", VALUE, "prompt.1.1", "'x'"},
    {T, "{\"prompt\":[true]}", VALUE, "prompt.0", "true"},
    {T, "{\"prompt\":[-1]}", VALUE, "prompt.0", "-1"},
    {T, "{\"prompt\":[[1,2],[129280]]}", VALUE, "prompt.1.0", "129280"},
    {T, "{\"prompt\":[9007199254740993]}", VALUE, "prompt.0", "9007199254740993"},
    {T, TEXT(",\"suffix\":\"end\""), UNSUPPORTED, "suffix", "suffix"},
    {T, TEXT(",\"max_tokens\":0,\"echo\":true,\"logprobs\":1"), UNSUPPORTED, "echo", "logprobs"},
    {T, TEXT(",\"echo\":1"), VALUE, "echo", "boolean"},
    /* tokenize, detokenize */
    {API_KIND_TOKENIZE, "{}", VALUE, "prompt", "string"},
    {API_KIND_TOKENIZE, "{\"prompt\":[1]}", VALUE, "prompt", "string"},
    {API_KIND_TOKENIZE, CHAT(",\"prompt\":\"a\""), VALUE, "prompt", "both"},
    {API_KIND_TOKENIZE, "{\"messages\":[]}", VALUE, "messages", "at least one"},
    {API_KIND_DETOKENIZE, "{}", VALUE, "tokens", "array"},
    {API_KIND_DETOKENIZE, "{\"tokens\":[129280]}", VALUE, "tokens.0", "vocabulary"},
    {API_KIND_DETOKENIZE, "{\"tokens\":[1.5]}", VALUE, "tokens.0", "1.5"},
};

static void check_error(const struct api_error *error, const char *body, const char *code,
                        const char *param, const char *says)
{
    if (strcmp(error->code, code) != 0 || strcmp(error->param, param != NULL ? param : "") != 0 ||
        strstr(error->message.text, says) == NULL) {
        fail_msg("%s\n  %d %s at '%s': %s\n  but %s at '%s', with \"%s\" is expected", body,
                 error->status, error->code, error->param, error->message.text, code,
                 param != NULL ? param : "", says);
    }
    assert_int_equal(error->status, strcmp(code, "model_not_found") == 0 ? 404 : 400);
    assert_string_equal(error->type, "invalid_request_error");
}

static void test_refusals(void **state)
{
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const struct refusal *row = &refusals[i];
        struct api_request *request = NULL;
        struct api_error error;
        if (api_parse(row->kind, row->body, strlen(row->body), &context, &request, &error) !=
            STATUS_INVALID) {
            fail_msg("%s was taken", row->body);
        }
        assert_null(request); /* written only on success */
        check_error(&error, row->body, row->code, row->param, row->says);
    }
}

/* Deep nesting: refused past 128 levels wherever it stands, known field or not. */
static void test_depth(void **state)
{
    static const char *const befores[] = {
        "", "{\"x\":", "{\"metadata\":",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"tools\":[{\"type\":\"function\","
        "\"function\":{\"name\":\"f\",\"parameters\":"};
    for (size_t i = 0; i < sizeof(befores) / sizeof(befores[0]); i++) {
        for (size_t n = 126; n <= 200000; n = n < 200 ? n + 1 : n * 10) {
            struct buf body = BUF_INIT;
            struct api_request *request = NULL;
            struct api_error error;
            buf_append_text(&body, befores[i]);
            for (size_t j = 0; j < n; j++) {
                buf_append_byte(&body, '[');
            }
            assert_int_equal(
                api_parse(API_KIND_CHAT, body.data, body.bytes, &context, &request, &error),
                STATUS_INVALID);
            assert_string_equal(error.code, "invalid_json");
            buf_fini(&body);
        }
    }
    /* 127 arrays in the body's object are 128 levels; one more is too deep */
    for (size_t n = 127; n <= 128; n++) {
        struct buf body = BUF_INIT;
        struct api_request *request = NULL;
        struct api_error error;
        buf_append_text(&body, "{\"prompt\":\"a\",\"x\":");
        for (size_t j = 0; j < n; j++) {
            buf_append_byte(&body, '[');
        }
        for (size_t j = 0; j < n; j++) {
            buf_append_byte(&body, ']');
        }
        buf_append_byte(&body, '}');
        enum status status =
            api_parse(API_KIND_COMPLETIONS, body.data, body.bytes, &context, &request, &error);
        assert_int_equal(status, n == 127 ? STATUS_OK : STATUS_INVALID);
        if (status == STATUS_OK) {
            api_request_free(request);
        } else {
            assert_string_equal(error.code, "invalid_json");
        }
        buf_fini(&body);
    }
}

/* ------------------------------------------------------------------------------- what is taken */

static struct api_request *take_n(enum api_kind kind, const char *body, size_t bytes)
{
    struct api_request *request = NULL;
    struct api_error error;
    char *copy = mem_dup(body, bytes); /* the request may not need the body afterwards */
    if (api_parse(kind, copy, bytes, &context, &request, &error) != STATUS_OK) {
        fail_msg("%.400s\n  %s at '%s': %s", body, error.code, error.param, error.message.text);
    }
    memset(copy, 'x', bytes);
    mem_free(copy);
    return request;
}

static struct api_request *take(enum api_kind kind, const char *body)
{
    return take_n(kind, body, strlen(body));
}

static void test_defaults(void **state)
{
    static const char *const bodies[] = {
        CHAT(""),
        CHAT(",\"model\":null,\"n\":null,\"stream\":null,\"stop\":null,\"temperature\":null,"
             "\"top_p\":null,\"top_k\":null,\"min_p\":null,\"seed\":null,\"logit_bias\":null,"
             "\"logprobs\":null,\"top_logprobs\":null,\"max_tokens\":null,\"min_tokens\":null,"
             "\"max_completion_tokens\":null,\"stop_token_ids\":null,\"ignore_eos\":null,"
             "\"presence_penalty\":null,\"frequency_penalty\":null,\"repetition_penalty\":null,"
             "\"tools\":null,\"tool_choice\":null,\"parallel_tool_calls\":null,"
             "\"stream_options\":null,\"reasoning_effort\":null,\"thinking\":null,"
             "\"chat_template_kwargs\":null,\"response_format\":null,\"user\":null"),
        CHAT(",\"tools\":[],\"stream\":false,\"stream_options\":7,\"stop\":[],\"thinking\":{},"
             "\"chat_template_kwargs\":{},\"response_format\":{\"type\":\"text\"},\"model\":"
             "\"tiny\""),
    };
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        struct api_request *r = take(API_KIND_CHAT, bodies[i]);
        assert_string_equal(r->model, "tiny");
        assert_true(r->is_chat);
        assert_int_equal(r->thread.n_messages, 1);
        assert_int_equal(r->n_prompts, 1);
        assert_int_equal(r->n, 1);
        assert_int_equal(r->tool_choice, API_TOOL_CHOICE_NONE);
        assert_true(r->parallel_tool_calls);
        assert_false(r->stream || r->include_usage || r->echo);
        assert_true(r->sampling.temperature == 0.7 && r->sampling.top_p == 0.9);
        assert_true(r->sampling.min_p == 0 && r->sampling.repetition_penalty == 1);
        assert_true(r->sampling.presence_penalty == 0 && r->sampling.frequency_penalty == 0);
        assert_int_equal(r->sampling.top_k, 0);
        assert_false(r->sampling.seed_given || r->sampling.ignore_eos || r->sampling.logprobs);
        assert_int_equal(r->sampling.max_tokens, 0);
        assert_int_equal(r->n_stops, 0);
        assert_int_equal(r->n_unknown, 0);
        assert_true(r->options.thinking && r->in_reasoning);
        assert_int_equal(r->options.effort, CHAT_EFFORT_HIGH);
        api_request_free(r);
    }
}

static void test_values(void **state)
{
    struct api_request *r = take(
        API_KIND_CHAT,
        CHAT(",\"model\":\"deepseek-chat\",\"n\":16,\"stream\":true,"
             "\"stream_options\":{\"include_usage\":true,\"continuous_usage_stats\":true},"
             "\"stop\":[\"a\\u0000b\",\"\\u00f1\"],\"temperature\":0,\"top_p\":1,\"top_k\":-1,"
             "\"min_p\":0.05,\"seed\":-9223372036854775808,\"logit_bias\":{\"0\":-100,\"7\":1.5},"
             "\"logprobs\":true,\"top_logprobs\":20,\"max_tokens\":16.0,"
             "\"max_completion_tokens\":16,\"min_tokens\":3,\"stop_token_ids\":[1,2],"
             "\"ignore_eos\":true,\"presence_penalty\":-2,\"frequency_penalty\":2,"
             "\"repetition_penalty\":1.1,\"user\":\"u\",\"return_token_ids\":false,"
             "\"bootstrap_room\":3"));
    assert_string_equal(r->model, "deepseek-chat");
    assert_int_equal(r->n, 16);
    assert_true(r->stream && r->include_usage);
    assert_int_equal(r->n_stops, 2);
    assert_int_equal(r->stop_bytes[0], 3);
    assert_memory_equal(r->stops[0], "a\0b", 3);
    assert_int_equal(r->stop_bytes[1], 2);
    assert_memory_equal(r->stops[1], "\xc3\xb1", 2);
    assert_true(r->sampling.temperature == 0 && r->sampling.top_p == 1);
    assert_int_equal(r->sampling.top_k, 0);
    assert_true(r->sampling.min_p == 0.05);
    assert_true(r->sampling.seed_given && r->sampling.seed == INT64_MIN);
    assert_int_equal(r->sampling.n_logit_bias, 2);
    assert_int_equal(r->sampling.logit_bias[1].id, 7);
    assert_true(r->sampling.logit_bias[0].bias == -100 && r->sampling.logit_bias[1].bias == 1.5);
    assert_true(r->sampling.logprobs);
    assert_int_equal(r->sampling.n_top_logprobs, 20);
    assert_int_equal(r->sampling.max_tokens, 16);
    assert_int_equal(r->sampling.min_tokens, 3);
    assert_int_equal(r->sampling.n_stop_token_ids, 2);
    assert_int_equal(r->sampling.stop_token_ids[1], 2);
    assert_true(r->sampling.ignore_eos);
    assert_true(r->sampling.presence_penalty == -2 && r->sampling.frequency_penalty == 2);
    assert_true(r->sampling.repetition_penalty == 1.1);
    assert_int_equal(r->n_unknown, 2);
    api_request_free(r);
    r = take(API_KIND_CHAT, CHAT(",\"seed\":9223372036854775807,\"top_k\":5000000000,"
                                 "\"max_tokens\":5000000000,\"stop\":\"x\""));
    assert_true(r->sampling.seed == INT64_MAX);
    assert_true(r->sampling.top_k == INT32_MAX && r->sampling.max_tokens == UINT32_MAX);
    assert_int_equal(r->n_stops, 1);
    api_request_free(r);
    r = take(API_KIND_COMPLETIONS,
             TEXT(",\"logprobs\":0,\"suffix\":\"\",\"messages\":1,\"best_of\":1"));
    assert_true(r->sampling.logprobs && r->sampling.n_top_logprobs == 0);
    assert_int_equal(r->n_unknown, 2);
    api_request_free(r);
}

static void test_thinking(void **state)
{
    static const struct {
        const char *body;
        bool thinking, in_reasoning;
        enum chat_effort effort;
    } rows[] = {
        {CHAT(",\"reasoning_effort\":\"none\""), false, false, CHAT_EFFORT_NONE},
        {CHAT(",\"reasoning_effort\":\"low\""), true, true, CHAT_EFFORT_LOW},
        {CHAT(",\"reasoning_effort\":\"xhigh\""), true, true, CHAT_EFFORT_MAX},
        {CHAT(",\"thinking\":{\"type\":\"disabled\",\"budget_tokens\":7}"), false, false,
         CHAT_EFFORT_HIGH},
        {CHAT(",\"thinking\":{\"type\":\"disabled\"},\"reasoning_effort\":\"none\""), false, false,
         CHAT_EFFORT_NONE},
        {CHAT(",\"chat_template_kwargs\":{\"thinking\":true,\"enable_thinking\":true}"), true, true,
         CHAT_EFFORT_HIGH},
        {CHAT(",\"chat_template_kwargs\":{\"enable_thinking\":false}"), false, false,
         CHAT_EFFORT_HIGH},
        {CHAT(",\"tools\":[" TOOL "],\"tool_choice\":\"required\""), false, false,
         CHAT_EFFORT_HIGH},
        {"{\"messages\":[{\"role\":\"system\",\"content\":\"s\"}]}", true, false, CHAT_EFFORT_HIGH},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"s\"},"
         "{\"role\":\"assistant\",\"content\":\"so\",\"prefix\":true}]}",
         true, false, CHAT_EFFORT_HIGH},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct api_request *r = take(API_KIND_CHAT, rows[i].body);
        struct buf text = BUF_INIT;
        struct error err = {""};
        if (r->options.thinking != rows[i].thinking || r->in_reasoning != rows[i].in_reasoning ||
            r->options.effort != rows[i].effort) {
            fail_msg("%s", rows[i].body);
        }
        /* in_reasoning is what the prompt really ends in */
        assert_int_equal(chat_render(context.format, r->thread.messages, r->thread.n_messages,
                                     &r->options, &text, NULL, &err),
                         STATUS_OK);
        bool ends = text.bytes >= 7 && memcmp(text.data + text.bytes - 7, "<think>", 7) == 0;
        assert_int_equal(ends, r->in_reasoning);
        buf_fini(&text);
        api_request_free(r);
    }
}

static struct token_ids encode(const struct api_request *r, size_t prompt_i)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    struct api_error error;
    if (api_encode(r, &context, prompt_i, &ids, &error) != STATUS_OK) {
        fail_msg("%s", error.message.text);
    }
    return ids;
}

static size_t n_ids(enum api_kind kind, const char *body)
{
    struct api_request *r = take(kind, body);
    struct token_ids ids = encode(r, 0);
    size_t n = ids.n;
    token_ids_fini(&ids);
    api_request_free(r);
    return n;
}

static void check_same_prompt(const char *a, const char *b)
{
    struct api_request *ra = take(API_KIND_CHAT, a), *rb = take(API_KIND_TOKENIZE, b);
    struct token_ids ia = encode(ra, 0), ib = encode(rb, 0);
    assert_int_equal(ia.n, ib.n);
    assert_memory_equal(ia.id, ib.id, ia.n * sizeof(*ia.id));
    token_ids_fini(&ia);
    token_ids_fini(&ib);
    api_request_free(ra);
    api_request_free(rb);
}

static void test_tools(void **state)
{
    /* none renders no tools; tools of unknown type are as if there were none */
    check_same_prompt(CHAT(",\"tools\":[" TOOL "],\"tool_choice\":\"none\""), CHAT(""));
    check_same_prompt(CHAT(",\"tools\":[]"), CHAT(""));
    check_same_prompt(CHAT(",\"tools\":[{\"type\":\"web_search\"}]"), CHAT(""));
    assert_true(n_ids(API_KIND_CHAT, CHAT(",\"tools\":[" TOOL "]")) >
                n_ids(API_KIND_CHAT, CHAT("")) + 10);
    struct api_request *r =
        take(API_KIND_CHAT,
             CHAT(",\"tools\":[" TOOL "],\"tool_choice\":{\"type\":\"function\",\"function\":"
                  "{\"name\":\"add\"}},\"parallel_tool_calls\":false"));
    assert_int_equal(r->tool_choice, API_TOOL_CHOICE_NAMED);
    assert_true(r->options.force_call);
    assert_false(r->parallel_tool_calls);
    assert_int_equal(r->options.forced_name.bytes, 3);
    assert_memory_equal(r->options.forced_name.data, "add", 3);
    api_request_free(r);
    r = take(API_KIND_CHAT, CHAT(",\"tools\":[" TOOL "]"));
    assert_int_equal(r->tool_choice, API_TOOL_CHOICE_AUTO);
    assert_false(r->options.force_call);
    api_request_free(r);
}

/* NUL inside a text is a character: nothing behind it is lost. */
static void test_nul(void **state)
{
    size_t with =
        n_ids(API_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"one\\u0000two\"},"
                             "{\"role\":\"user\",\"content\":\"three\"}]}");
    size_t without =
        n_ids(API_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"onetwo\"},"
                             "{\"role\":\"user\",\"content\":\"three\"}]}");
    assert_true(with >= without);
    assert_true(n_ids(API_KIND_COMPLETIONS, "{\"prompt\":\"a\\u0000b\"}") >
                n_ids(API_KIND_COMPLETIONS, "{\"prompt\":\"a\"}"));
}

static void test_roles_and_parts(void **state)
{
    check_same_prompt("{\"messages\":[{\"role\":\"developer\",\"content\":\"be kind\"},"
                      "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                      "{\"type\":\"text\",\"text\":\"b\"}]}]}",
                      "{\"messages\":[{\"role\":\"system\",\"content\":\"be kind\"},"
                      "{\"role\":\"user\",\"content\":\"ab\",\"name\":\"ann\"}]}");
    /* a history with reasoning and one without are both taken */
    assert_true(n_ids(API_KIND_CHAT,
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":"
                      "\"assistant\",\"content\":null,\"reasoning_content\":\"r\",\"tool_calls\":[{"
                      "\"id\":\"c1\",\"type\":\"function\",\"function\":{\"name\":\"add\","
                      "\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c1\","
                      "\"content\":\"4\"}],\"tools\":[" TOOL "]}") > 0);
}

static void test_prompts(void **state)
{
    struct api_request *r =
        take(API_KIND_COMPLETIONS, "{\"prompt\":[\"a\",\"b c\"],\"n\":3,\"echo\":true}");
    struct buf text = BUF_INIT;
    assert_int_equal(r->n_prompts, 2);
    assert_false(r->is_chat);
    api_prompt_text(r, &context, 1, &text);
    assert_string_equal(buf_text(&text), "b c");
    struct token_ids ids = encode(r, 1);
    api_request_free(r);
    /* the same prompt as ids gives the same ids, and the same text back */
    struct buf body = BUF_INIT;
    buf_append_text(&body, "{\"echo\":true,\"prompt\":[[0],[");
    for (size_t i = 0; i < ids.n; i++) {
        buf_printf(&body, "%s%u", i > 0 ? "," : "", (unsigned)ids.id[i]);
    }
    buf_append_text(&body, "]]}");
    r = take_n(API_KIND_COMPLETIONS, (const char *)body.data, body.bytes);
    assert_int_equal(r->n_prompts, 2);
    struct token_ids again = encode(r, 1);
    assert_int_equal(again.n, ids.n);
    assert_memory_equal(again.id, ids.id, ids.n * sizeof(*ids.id));
    buf_clear(&text);
    api_prompt_text(r, &context, 1, &text);
    assert_string_equal(buf_text(&text), "b c");
    api_request_free(r);
    r = take(API_KIND_COMPLETIONS, "{\"prompt\":[3,4,5]}");
    assert_int_equal(r->n_prompts, 1);
    assert_int_equal(r->prompts[0].n_ids, 3);
    api_request_free(r);
    token_ids_fini(&ids);
    token_ids_fini(&again);
    buf_fini(&text);
    buf_fini(&body);
}

/* Bounds that are too long for a table of literals. */
static void test_counts(void **state)
{
    static const struct {
        enum api_kind kind;
        const char *before, *item, *after;
        size_t max;
        const char *param;
    } rows[] = {
        {API_KIND_COMPLETIONS, "{\"prompt\":[", "\"a\"", "]}", API_MAX_PROMPTS, "prompt"},
        {API_KIND_COMPLETIONS, "{\"n\":16,\"prompt\":[", "\"a\"", "]}", API_MAX_CHOICES / 16, "n"},
        {API_KIND_CHAT,
         "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"stop_token_ids\":[", "1", "]}",
         API_MAX_STOP_IDS, "stop_token_ids"},
        {API_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"stop\":[", "\"s\"",
         "]}", API_MAX_STOPS, "stop"},
        {API_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"logit_bias\":{",
         NULL, "}}", API_MAX_LOGIT_BIASES, "logit_bias"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        for (size_t n = rows[i].max; n <= rows[i].max + 1; n++) {
            struct buf body = BUF_INIT;
            struct api_request *request = NULL;
            struct api_error error;
            buf_append_text(&body, rows[i].before);
            for (size_t j = 0; j < n; j++) {
                buf_append_text(&body, j > 0 ? "," : "");
                if (rows[i].item != NULL) {
                    buf_append_text(&body, rows[i].item);
                } else {
                    buf_printf(&body, "\"%zu\":1", j);
                }
            }
            buf_append_text(&body, rows[i].after);
            enum status status =
                api_parse(rows[i].kind, body.data, body.bytes, &context, &request, &error);
            assert_int_equal(status, n == rows[i].max ? STATUS_OK : STATUS_INVALID);
            if (status != STATUS_OK) {
                check_error(&error, rows[i].before, VALUE, rows[i].param, "at most");
            }
            api_request_free(request);
            buf_fini(&body);
        }
    }
    char stop[API_MAX_STOP_BYTES + 2];
    memset(stop, 's', sizeof(stop));
    for (size_t n = API_MAX_STOP_BYTES; n <= API_MAX_STOP_BYTES + 1; n++) {
        struct api_request *request = NULL;
        struct api_error error;
        char *body = mem_printf("{\"prompt\":\"a\",\"stop\":\"%.*s\"}", (int)n, stop);
        assert_int_equal(
            api_parse(API_KIND_COMPLETIONS, body, strlen(body), &context, &request, &error),
            n == API_MAX_STOP_BYTES ? STATUS_OK : STATUS_INVALID);
        api_request_free(request);
        mem_free(body);
    }
}

/* A prompt that leaves room for one token is taken, the next longer one is not. */
static void test_context_length(void **state)
{
    struct api_context small = context;
    struct api_request *text = take(API_KIND_COMPLETIONS, "{\"prompt\":\"one two three four\"}");
    struct api_request *chat = take(API_KIND_CHAT, CHAT(""));
    struct api_request *tokenize = take(API_KIND_TOKENIZE, CHAT(""));
    const struct api_request *both[] = {text, chat};
    for (size_t i = 0; i < 2; i++) {
        struct token_ids ids = encode(both[i], 0), none = TOKEN_IDS_INIT;
        struct api_error error;
        uint32_t n = (uint32_t)ids.n;
        small.max_context_tokens = n + 1;
        ids.n = 0;
        assert_int_equal(api_encode(both[i], &small, 0, &ids, &error), STATUS_OK);
        assert_int_equal(api_max_tokens(both[i], &small, n), 1);
        for (uint32_t max = n; max >= n - 1; max--) { /* just too long, and longer than allowed */
            small.max_context_tokens = max;
            assert_int_equal(api_encode(both[i], &small, 0, &none, &error), STATUS_INVALID);
            assert_int_equal(none.n, 0);
            check_error(&error, "", "context_length_exceeded", i == 0 ? "prompt" : "messages",
                        "tokens");
        }
        token_ids_fini(&ids);
        token_ids_fini(&none);
    }
    small.max_context_tokens = 1; /* tokenize takes any length */
    struct token_ids ids = TOKEN_IDS_INIT;
    struct api_error error;
    assert_int_equal(api_encode(tokenize, &small, 0, &ids, &error), STATUS_OK);
    token_ids_fini(&ids);
    /* ids are refused before they are copied */
    struct api_request *request = NULL;
    small.max_context_tokens = 3;
    assert_int_equal(
        api_parse(API_KIND_COMPLETIONS, "{\"prompt\":[1,2,3]}", 18, &small, &request, &error),
        STATUS_INVALID);
    check_error(&error, "", "context_length_exceeded", "prompt", "3 tokens");
    api_request_free(text);
    api_request_free(chat);
    api_request_free(tokenize);
}

static void test_max_tokens(void **state)
{
    struct api_request *r = take(API_KIND_COMPLETIONS, TEXT(",\"max_tokens\":16"));
    assert_int_equal(api_max_tokens(r, &context, 10), 16);
    assert_int_equal(api_max_tokens(r, &context, context.max_context_tokens - 7), 7);
    api_request_free(r);
    r = take(API_KIND_COMPLETIONS, TEXT(""));
    assert_int_equal(api_max_tokens(r, &context, 10), context.max_context_tokens - 10);
    api_request_free(r);
}

/* Every code has all three parts, and its own name. */
static void test_codes(void **state)
{
    for (int i = 0; i < API_N_CODES; i++) {
        int status = api_code_status((enum api_code)i);
        assert_true(status >= 400 && status < 600);
        assert_string_equal(api_code_type((enum api_code)i), status >= 500 ? "server_error"
                                                             : status == 429
                                                                 ? "rate_limit_error"
                                                                 : "invalid_request_error");
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(api_code_text((enum api_code)i),
                                    api_code_text((enum api_code)j));
        }
    }
}

int main(int argc, char **argv)
{
    struct error err = {""};
    struct tokenizer *tokenizer = NULL;
    struct chat_format *format = NULL;
    if (argc != 2 || tokenizer_open(argv[1], &tokenizer, &err) != STATUS_OK ||
        chat_format_open(argv[1], &format, &err) != STATUS_OK) {
        fprintf(stderr, "usage: test_api MODEL_FOLDER: %s\n", err.text);
        return 1;
    }
    context = (struct api_context){
        .model = "tiny",
        .aliases = aliases,
        .n_aliases = 2,
        .tokenizer = tokenizer,
        .format = format,
        .max_context_tokens = 4096,
        .temperature = 0.7,
        .top_p = 0.9,
        .thinking = true,
        .effort = CHAT_EFFORT_HIGH,
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_thinking),
        cmocka_unit_test(test_tools),
        cmocka_unit_test(test_nul),
        cmocka_unit_test(test_roles_and_parts),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_context_length),
        cmocka_unit_test(test_max_tokens),
        cmocka_unit_test(test_codes),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    chat_format_close(format);
    tokenizer_close(tokenizer);
    return failed != 0;
}
