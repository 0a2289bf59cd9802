#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/mem.h"
#include "router/api_render.h"

/*
 * The bytes of events, and that a stream and a whole answer say the same. Shapes are the business
 * of check_openai_schema.py. usage: test_api_render MODEL_FOLDER
 */
static struct api_context context;

#define CHAT_BODY "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"stream\":true"

static struct api_request *take(enum api_kind kind, const char *body)
{
    struct api_request *request = NULL;
    struct api_error error;
    if (api_parse(kind, body, strlen(body), &context, &request, &error) != STATUS_OK) {
        fail_msg("%s: %s", body, error.message.text);
    }
    return request;
}

static void expect(struct buf *out, const char *text)
{
    assert_string_equal(buf_text(out), text);
    buf_clear(out);
}

#define HEAD                                                                     \
    "data: {\"id\":\"chatcmpl-1f\",\"object\":\"chat.completion.chunk\","        \
    "\"created\":1700000000,\"model\":\"tiny\",\"system_fingerprint\":\"fp_a\"," \
    "\"choices\":["
#define END ",\"logprobs\":null,\"finish_reason\":null}]}\n\n"

static void test_chat_events(void **state)
{
    struct api_request *request = take(API_KIND_CHAT, CHAT_BODY "}");
    struct api_head head;
    struct buf out = BUF_INIT;
    api_head_init(&head, request, "1f", 1700000000, "fp_a");
    api_event_role(&head, 0, &out);
    expect(&out, HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" END);
    api_event_text(&head, 15, "a\n\"\0\xc3\xa9\xff", 7, NULL, &out);
    expect(&out, HEAD
           "{\"index\":15,\"delta\":{\"content\":\"a\\n\\\"\\u0000\xc3\xa9\xef\xbf\xbd\"}" END);
    api_event_reasoning(&head, 0, "so", 2, NULL, &out);
    expect(&out, HEAD "{\"index\":0,\"delta\":{\"reasoning_content\":\"so\"}" END);
    api_event_call(&head, 0, 2, "call_1", "add", 3, &out);
    expect(&out, HEAD "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":2,\"id\":\"call_1\","
                      "\"type\":\"function\",\"function\":{\"name\":\"add\","
                      "\"arguments\":\"\"}}]}" END);
    api_event_arguments(&head, 0, 2, "{\"a\"", 4, &out);
    expect(&out, HEAD "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":2,\"function\":"
                      "{\"arguments\":\"{\\\"a\\\"\"}}]}" END);
    api_event_finish(&head, 0, API_FINISH_TOOL_CALLS, NULL, &out);
    expect(&out, HEAD "{\"index\":0,\"delta\":{},\"logprobs\":null,"
                      "\"finish_reason\":\"tool_calls\"}]}\n\n");
    api_event_usage(&head, &(struct api_usage){1, 2, 0, 0}, &out); /* was not asked for */
    expect(&out, "");
    api_event_done(&out);
    expect(&out, "data: [DONE]\n\n");
    api_event_comment("waiting", &out);
    expect(&out, ": waiting\n\n");
    api_head_fini(&head);
    api_request_free(request);
    buf_fini(&out);
}

static void test_completion_events(void **state)
{
    static const char head_text[] =
        "data: {\"id\":\"cmpl-1f\",\"object\":\"text_completion\",\"created\":7,\"model\":\"tiny\","
        "\"system_fingerprint\":null,\"choices\":[";
    struct api_request *request =
        take(API_KIND_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":true,"
                                   "\"stream_options\":{\"include_usage\":true}}");
    struct api_head head;
    struct buf out = BUF_INIT;
    char want[512];
    api_head_init(&head, request, "1f", 7, NULL);
    api_event_role(&head, 0, &out); /* completions have no role */
    expect(&out, "");
    api_event_text(&head, 1, "b", 1, NULL, &out);
    snprintf(want, sizeof(want),
             "%s{\"index\":1,\"text\":\"b\",\"logprobs\":null,"
             "\"finish_reason\":null}],\"usage\":null}\n\n",
             head_text);
    expect(&out, want);
    api_event_usage(&head, &(struct api_usage){10, 20, 3, 4}, &out);
    snprintf(want, sizeof(want),
             "%s],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":20,\"total_tokens\":30,"
             "\"prompt_tokens_details\":{\"cached_tokens\":3},"
             "\"completion_tokens_details\":{\"reasoning_tokens\":4}}}\n\n",
             head_text);
    expect(&out, want);
    api_head_fini(&head);
    api_request_free(request);
    buf_fini(&out);
}

static void test_errors(void **state)
{
    struct api_error error;
    struct buf out = BUF_INIT;
    char *text = mem_alloc(4000);
    memset(text, 'm', 3999);
    text[3999] = '\0';
    api_error_set(&error, API_CODE_QUEUE_FULL, NULL, "%d waiting", 32);
    api_render_error(&error, &out);
    expect(&out, "{\"error\":{\"message\":\"32 waiting\",\"type\":\"rate_limit_error\","
                 "\"param\":null,\"code\":\"queue_full\"}}");
    api_error_set(&error, API_CODE_INVALID_VALUE, "messages.2.content", "no");
    api_event_error(&error, &out);
    expect(&out, "data: {\"error\":{\"message\":\"no\",\"type\":\"invalid_request_error\","
                 "\"param\":\"messages.2.content\",\"code\":\"invalid_value\"}}\n\n");
    api_error_set(&error, API_CODE_INVALID_VALUE, text, "%s", text); /* both cut, not overrun */
    assert_int_equal(strlen(error.param), API_PARAM_BYTES - 1);
    assert_int_equal(strlen(error.message.text), sizeof(error.message.text) - 1);
    mem_free(text);
    buf_fini(&out);
}

static void test_finish(void **state)
{
    assert_string_equal(api_finish_text(api_finish_of(false, 0)), "stop");
    assert_string_equal(api_finish_text(api_finish_of(false, 2)), "tool_calls");
    assert_string_equal(api_finish_text(api_finish_of(true, 0)), "length");
    assert_string_equal(api_finish_text(api_finish_of(true, 1)), "length");
}

/* ------------------------------------------------------------------------- stream against whole */

struct sink {
    struct api_head *head;
    struct buf stream;
    struct chat_answer answer;
};

static void on_event(void *cookie, const struct chat_event *event)
{
    struct sink *sink = cookie;
    api_event_parsed(sink->head, 0, event, &sink->stream);
    chat_answer_event(&sink->answer, event);
}

static struct json *parse(const char *text, size_t bytes)
{
    struct json *value = NULL;
    struct error err = {""};
    if (json_parse(text, bytes, NULL, &value, &err) != STATUS_OK) {
        fail_msg("%.*s: %s", (int)bytes, text, err.text);
    }
    return value;
}

static void append_text(struct buf *out, const struct json *text)
{
    size_t bytes = 0;
    const char *data = json_text(text, &bytes);
    if (data != NULL) {
        buf_append(out, data, bytes);
    }
}

/* What a client puts together from the deltas of choice 0. */
struct client {
    struct buf content, reasoning;
    struct buf id[4], name[4], arguments[4];
    size_t n_calls;
};

static void client_take(struct client *client, const struct json *delta)
{
    append_text(&client->content, json_get(delta, "content"));
    append_text(&client->reasoning, json_get(delta, "reasoning_content"));
    const struct json *calls = json_get(delta, "tool_calls");
    for (size_t i = 0; i < json_array_n(calls); i++) {
        const struct json *call = json_array_at(calls, i);
        int64_t index = -1;
        assert_true(json_int(json_get(call, "index"), &index));
        assert_in_range(index, 0, 3);
        if (json_get(call, "id") != NULL) {
            assert_int_equal(index, client->n_calls); /* in order, and only in the first delta */
            client->n_calls++;
        }
        assert_true(index < client->n_calls);
        append_text(&client->id[index], json_get(call, "id"));
        append_text(&client->name[index], json_get(json_get(call, "function"), "name"));
        append_text(&client->arguments[index], json_get(json_get(call, "function"), "arguments"));
    }
}

static void client_read(struct client *client, struct buf *stream)
{
    for (const char *at = buf_text(stream); *at != '\0';) {
        const char *blank = strstr(at, "\n\n");
        assert_non_null(blank);
        assert_memory_equal(at, "data: ", 6);
        struct json *chunk = parse(at + 6, (size_t)(blank - at - 6));
        const struct json *choice = json_array_at(json_get(chunk, "choices"), 0);
        client_take(client, json_get(choice, "delta"));
        json_free(chunk);
        at = blank + 2;
    }
}

static void same(struct buf *piecewise, const struct json *whole)
{
    size_t bytes = 0;
    const char *text = json_text(whole, &bytes);
    assert_int_equal(piecewise->bytes, bytes);
    assert_memory_equal(buf_text(piecewise), text != NULL ? text : "", bytes);
    buf_fini(piecewise);
}

static void check_stream(const char *completion, size_t piece)
{
    struct api_request *request = take(API_KIND_CHAT, CHAT_BODY "}");
    struct api_head head;
    struct sink sink = {&head, BUF_INIT};
    struct chat_parse_options options = {
        .thinking = true, .id_seed = "9", .fn = on_event, .cookie = &sink};
    struct chat_parse *parser = chat_parse_create(&options);
    api_head_init(&head, request, "1f", 7, NULL);
    chat_answer_init(&sink.answer);
    size_t bytes = strlen(completion);
    for (size_t i = 0; i < bytes; i += piece) {
        chat_parse_text(parser, completion + i, bytes - i < piece ? bytes - i : piece);
    }
    chat_parse_finish(parser, false);

    struct buf whole = BUF_INIT;
    struct api_choice choice = {.finish = api_finish_of(false, sink.answer.n_calls),
                                .answer = &sink.answer};
    api_render_answer(&head, &choice, 1, &(struct api_usage){1, 1, 0, 0}, &whole);
    struct json *answer = parse((const char *)whole.data, whole.bytes);
    const struct json *message = json_get(json_array_at(json_get(answer, "choices"), 0), "message");
    const struct json *calls = json_get(message, "tool_calls");
    struct client client = {0};
    client_read(&client, &sink.stream);
    assert_int_equal(client.n_calls, json_array_n(calls));
    if (client.n_calls > 0 && client.content.bytes == 0) {
        assert_true(json_kind_of(json_get(message, "content")) == JSON_KIND_NULL);
    } else {
        assert_true(json_kind_of(json_get(message, "content")) == JSON_KIND_STRING);
    }
    same(&client.content, json_get(message, "content"));
    same(&client.reasoning, json_get(message, "reasoning_content"));
    for (size_t i = 0; i < client.n_calls; i++) {
        const struct json *call = json_array_at(calls, i);
        same(&client.id[i], json_get(call, "id"));
        same(&client.name[i], json_get(json_get(call, "function"), "name"));
        same(&client.arguments[i], json_get(json_get(call, "function"), "arguments"));
    }
    json_free(answer);
    buf_fini(&whole);
    buf_fini(&sink.stream);
    chat_answer_fini(&sink.answer);
    chat_parse_free(parser);
    api_head_fini(&head);
    api_request_free(request);
}

static void test_stream_equals_whole(void **state)
{
    static const char *const completions[] = {
        "",
        "only thoughts",
        "thoughts</think>an answer",
        "</think>\xc3\xa9\xe2\x80\xa6 \"quoted\"\n",
        "add</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"add\">\n"
        "<｜DSML｜parameter name=\"a\" string=\"true\">x \"y\"\n</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"sub\">\n"
        "<｜DSML｜parameter name=\"b\" string=\"false\">[1, {}]</｜DSML｜parameter>\n"
        "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"add\">\n\n</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>",
    };
    for (size_t i = 0; i < sizeof(completions) / sizeof(completions[0]); i++) {
        for (size_t piece = 1; piece < 200; piece = piece * 3 + 1) {
            check_stream(completions[i], piece);
        }
    }
}

/* ------------------------------------------------------------------------------------ logprobs */

/* Offsets count characters also where tokens cut one, and go on from piece to piece. */
static void test_text_offsets(void **state)
{
    static const char text[] = "h\xc3\xa9llo \xe2\x82\xac 1\xf0\x9f\x98\x80";
    struct api_request *request = take(API_KIND_COMPLETIONS, "{\"prompt\":\"a\",\"stream\":true}");
    struct token_ids ids = TOKEN_IDS_INIT;
    struct api_logprobs logprobs;
    struct api_head head;
    struct buf out = BUF_INIT, sum = BUF_INIT;
    struct error err = {""};
    assert_int_equal(
        tokenizer_encode(context.tokenizer, text, strlen(text), NULL, 0, 100, &ids, &err),
        STATUS_OK);
    api_head_init(&head, request, "1", 7, NULL);
    api_logprobs_init(&logprobs, false, 100);
    uint64_t characters = 100;
    for (size_t i = 0; i < ids.n; i++) {
        const struct api_logprob token = {ids.id[i], -1};
        size_t bytes;
        const char *piece = tokenizer_token(context.tokenizer, ids.id[i], &bytes);
        api_logprobs_add(&logprobs, context.tokenizer, &token, &token, 1);
        buf_clear(&out);
        api_event_text(&head, 0, piece, bytes, &logprobs, &out);
        const char *at = strstr(buf_text(&out), "\"text_offset\":[");
        assert_non_null(at);
        assert_int_equal(strtoull(at + 15, NULL, 10), characters);
        for (size_t j = 0; j < bytes; j++) {
            characters += ((unsigned char)piece[j] & 0xc0) != 0x80;
        }
        buf_append(&sum, piece, bytes);
    }
    assert_string_equal(buf_text(&sum), text);
    assert_int_equal(characters, 100 + 10); /* as Python's len has it */
    assert_int_equal(logprobs.text_offset, characters);
    api_logprobs_fini(&logprobs);
    api_head_fini(&head);
    token_ids_fini(&ids);
    buf_fini(&out);
    buf_fini(&sum);
    api_request_free(request);
}

int main(int argc, char **argv)
{
    struct error err = {""};
    struct tokenizer *tokenizer = NULL;
    struct chat_format *format = NULL;
    if (argc != 2 || tokenizer_open(argv[1], &tokenizer, &err) != STATUS_OK ||
        chat_format_open(argv[1], &format, &err) != STATUS_OK) {
        fprintf(stderr, "usage: test_api_render MODEL_FOLDER: %s\n", err.text);
        return 1;
    }
    context = (struct api_context){.model = "tiny",
                                   .tokenizer = tokenizer,
                                   .format = format,
                                   .max_context_tokens = 4096,
                                   .temperature = 1,
                                   .top_p = 1};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat_events),
        cmocka_unit_test(test_completion_events),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_finish),
        cmocka_unit_test(test_stream_equals_whole),
        cmocka_unit_test(test_text_offsets),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    chat_format_close(format);
    tokenizer_close(tokenizer);
    return failed != 0;
}
