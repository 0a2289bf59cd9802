/*
 * Renders answers and streams of every shape, as lines `SCHEMA<tab>JSON` for
 * check_openai_schema.py; SCHEMA is a name of openai_schema.json. Events of streams are taken apart
 * here as a client would: `data: `, JSON, blank line.
 * usage: api_samples MODEL_FOLDER
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "router/api_render.h"

static struct api_context context;

static void fail(const char *what)
{
    fprintf(stderr, "api_samples: %s\n", what);
    exit(1);
}

static struct api_request *take(enum api_kind kind, const char *body)
{
    struct api_request *request = NULL;
    struct api_error error;
    if (api_parse(kind, body, strlen(body), &context, &request, &error) != STATUS_OK) {
        fail(error.message.text);
    }
    return request;
}

static void print(const char *schema, const struct buf *json)
{
    printf("%s\t%.*s\n", schema, (int)json->bytes, (const char *)json->data);
}

/* Prints each event of a stream and empties it. */
static void print_events(const char *schema, struct buf *stream)
{
    const char *at = buf_text(stream);
    while (*at != '\0') {
        const char *blank = strstr(at, "\n\n");
        if (blank == NULL || strncmp(at, "data: ", 6) != 0 ||
            memchr(at, '\n', blank - at) != NULL) {
            fail("an event is not one line of data and a blank one");
        }
        if (strncmp(at, "data: [DONE]\n", 13) != 0) {
            printf("%s\t%.*s\n", strncmp(at, "data: {\"error\"", 14) == 0 ? "Error" : schema,
                   (int)(blank - at - 6), at + 6);
        }
        at = blank + 2;
    }
    buf_clear(stream);
}

static void add_logprobs(struct api_logprobs *logprobs)
{
    static const struct api_logprob top[] = {{40, -0.1f}, {41, -3.5f}, {200, -INFINITY}};
    for (uint32_t id = 3; id < 260; id += 50) {
        const struct api_logprob token = {id, -0.25f};
        api_logprobs_add(logprobs, context.tokenizer, &token, top, 3);
    }
}

/* ---------------------------------------------------------------------------------------- chat */

static const char CHAT_BODY[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                                "\"stream\":true,\"stream_options\":{\"include_usage\":%s}}";

static void feed(chat_event_fn fn, void *cookie, const char *text)
{
    struct chat_parse_options options = {
        .thinking = true, .id_seed = "7f", .fn = fn, .cookie = cookie};
    struct chat_parse *parse = chat_parse_create(&options);
    chat_parse_text(parse, text, strlen(text));
    chat_parse_finish(parse, false);
    chat_parse_free(parse);
}

static const char ANSWER[] = "so \xe2\x80\xa6 \"two\"</think>It is\n4.";
static const char CALLS[] =
    "add them</think>\n\n<｜DSML｜tool_calls>\n"
    "<｜DSML｜invoke name=\"add\">\n"
    "<｜DSML｜parameter name=\"a\" string=\"false\">2</｜DSML｜parameter>\n"
    "<｜DSML｜parameter name=\"b\" string=\"true\">two \"2\"</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"add\">\n\n</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>";

struct stream {
    struct api_head *head;
    struct buf out;
};

static void stream_event(void *cookie, const struct chat_event *event)
{
    struct stream *stream = cookie;
    api_event_parsed(stream->head, 1, event, &stream->out);
}

static void chat_streams(const struct api_usage *usage)
{
    for (int include = 0; include < 2; include++) {
        char *body = mem_printf(CHAT_BODY, include ? "true" : "false");
        struct api_request *request = take(API_KIND_CHAT, body);
        struct api_head head;
        struct api_logprobs logprobs;
        api_head_init(&head, request, "a1", 1700000000, include ? "fp_1" : NULL);
        struct stream stream = {&head, BUF_INIT};
        api_logprobs_init(&logprobs, true, 0);
        api_event_role(&head, 0, &stream.out);
        feed(stream_event, &stream, ANSWER);
        feed(stream_event, &stream, CALLS);
        add_logprobs(&logprobs);
        api_event_text(&head, 0, "x", 1, &logprobs, &stream.out);
        api_event_text(&head, 0, "y", 1, &logprobs, &stream.out); /* none wait: null */
        add_logprobs(&logprobs);
        api_event_finish(&head, 0, API_FINISH_STOP, &logprobs, &stream.out);
        api_event_finish(&head, 1, API_FINISH_TOOL_CALLS, NULL, &stream.out);
        api_event_usage(&head, usage, &stream.out);
        api_event_done(&stream.out);
        print_events(include ? "ChatChunkWithUsage" : "ChatChunk", &stream.out);
        api_logprobs_fini(&logprobs);
        api_head_fini(&head);
        buf_fini(&stream.out);
        api_request_free(request);
        mem_free(body);
    }
}

static void chat_answers(const struct api_usage *usage)
{
    static const char *const texts[] = {ANSWER, CALLS, "</think>", "cut", "\xff</think>\xff"};
    struct api_request *request =
        take(API_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}");
    struct api_head head;
    struct chat_answer answers[5];
    struct api_choice choices[5];
    struct api_logprobs logprobs;
    struct buf out = BUF_INIT;
    api_head_init(&head, request, "a2", 1700000000, "fp_\"quoted\"");
    api_logprobs_init(&logprobs, true, 0);
    add_logprobs(&logprobs);
    for (int i = 0; i < 5; i++) {
        chat_answer_init(&answers[i]);
        feed(chat_answer_event, &answers[i], texts[i]);
        choices[i] = (struct api_choice){
            .finish = api_finish_of(i == 3, answers[i].n_calls),
            .answer = &answers[i],
            .logprobs = i == 0 ? &logprobs : NULL,
        };
    }
    api_render_answer(&head, choices, 5, usage, &out);
    print("Chat", &out);
    for (int i = 0; i < 5; i++) {
        chat_answer_fini(&answers[i]);
    }
    api_logprobs_fini(&logprobs);
    api_head_fini(&head);
    buf_fini(&out);
    api_request_free(request);
}

/* --------------------------------------------------------------------------------- completions */

static void completions(const struct api_usage *usage)
{
    struct api_request *request =
        take(API_KIND_COMPLETIONS,
             "{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    struct api_head head;
    struct api_logprobs logprobs;
    struct buf out = BUF_INIT;
    api_head_init(&head, request, "b1", 1700000000, "fp");
    api_logprobs_init(&logprobs, false, 5);
    add_logprobs(&logprobs);
    struct api_choice choices[2] = {
        {.finish = API_FINISH_LENGTH, .text = "a\0b", .text_bytes = 3, .logprobs = &logprobs},
        {.finish = API_FINISH_STOP},
    };
    api_render_answer(&head, choices, 2, usage, &out);
    print("Completion", &out);
    buf_clear(&out);
    add_logprobs(&logprobs);
    api_event_role(&head, 0, &out);
    api_event_text(&head, 0, "one\n", 4, &logprobs, &out);
    api_event_text(&head, 1, "two", 3, NULL, &out);
    api_event_finish(&head, 0, API_FINISH_LENGTH, &logprobs, &out);
    api_event_usage(&head, usage, &out);
    struct api_error error;
    api_error_set(&error, API_CODE_GENERATION_TIMEOUT, NULL, "60 s have passed");
    api_event_error(&error, &out);
    print_events("CompletionChunkWithUsage", &out);
    api_logprobs_fini(&logprobs);
    api_head_fini(&head);
    buf_fini(&out);
    api_request_free(request);
}

/* ------------------------------------------------------------------------------------ the rest */

static void errors_and_lists(void)
{
    struct api_error error;
    struct buf out = BUF_INIT;
    struct token_ids ids = TOKEN_IDS_INIT;
    for (int i = 0; i < API_N_CODES; i++) {
        api_error_set(&error, (enum api_code)i, i % 2 ? "messages.0" : NULL, "a \"%s\"\xff\n",
                      "quoted");
        api_render_error(&error, &out);
        print("Error", &out);
        buf_clear(&out);
    }
    api_render_models(&context, 1700000000, &out);
    print("Models", &out);
    buf_clear(&out);
    if (api_render_model(&context, "alias", 5, 1700000000, &out, &error) != STATUS_OK) {
        fail("an alias is not found");
    }
    print("Model", &out);
    buf_clear(&out);
    if (api_render_model(&context, "alias\0", 6, 0, &out, &error) != STATUS_NOT_FOUND) {
        fail("a name with NUL is found");
    }
    struct api_request *request = take(API_KIND_TOKENIZE, "{\"prompt\":\"h\xc3\xa9 \\u0000 7\"}");
    if (api_encode(request, &context, 0, &ids, &error) != STATUS_OK) {
        fail(error.message.text);
    }
    api_render_tokens(&context, &ids, &out);
    print("Tokens", &out);
    buf_clear(&out);
    api_request_free(request);
    request = take(API_KIND_DETOKENIZE, "{\"tokens\":[0,3,4,5,200]}");
    api_render_text(request, &context, &out);
    print("Text", &out);
    api_request_free(request);
    token_ids_fini(&ids);
    buf_fini(&out);
}

int main(int argc, char **argv)
{
    static const char *const aliases[] = {"alias"};
    static const struct api_usage usage = {5, 7, 3, 2};
    struct error err = {""};
    struct tokenizer *tokenizer = NULL;
    struct chat_format *format = NULL;
    if (argc != 2 || tokenizer_open(argv[1], &tokenizer, &err) != STATUS_OK ||
        chat_format_open(argv[1], &format, &err) != STATUS_OK) {
        fprintf(stderr, "usage: api_samples MODEL_FOLDER: %s\n", err.text);
        return 1;
    }
    context = (struct api_context){
        .model = "tiny \"quoted\"",
        .aliases = aliases,
        .n_aliases = 1,
        .tokenizer = tokenizer,
        .format = format,
        .max_context_tokens = 4096,
        .temperature = 1,
        .top_p = 1,
    };
    chat_streams(&usage);
    chat_answers(&usage);
    completions(&usage);
    errors_and_lists();
    chat_format_close(format);
    tokenizer_close(tokenizer);
    return 0;
}
