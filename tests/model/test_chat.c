/*
 * What check_chat_cases.py can't see from outside: ids, marks in the text of messages, forced
 * calls, and completions that come as tokens. argv: tests/golden, folder of the bundled model.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/mem.h"
#include "model/chat.h"
#include "model/chat_parse.h"

#define D "\uff5cDSML\uff5c"
#define EOS "<\uff5cend\u2581of\u2581sentence\uff5c>"
#define USER "<\uff5cUser\uff5c>"
#define ASSISTANT "<\uff5cAssistant\uff5c>"

static const char *golden_dir, *tiny_dir;
static struct tokenizer *tokenizer;
static struct chat_format *format;

static int setup(void **state)
{
    struct error err = {""};
    if (tokenizer_open(tiny_dir, &tokenizer, &err) != STATUS_OK ||
        chat_format_open(tiny_dir, &format, &err) != STATUS_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}

static int teardown(void **state)
{
    chat_format_close(format);
    tokenizer_close(tokenizer);
    return 0;
}

static struct chat_text text_of(const char *text)
{
    return (struct chat_text){text, strlen(text)};
}

static size_t n_of(const struct token_ids *ids, const char *mark)
{
    uint32_t id;
    size_t n = 0;
    assert_int_equal(tokenizer_find_added(tokenizer, mark, &id), STATUS_OK);
    for (size_t i = 0; i < ids->n; i++) {
        n += ids->id[i] == id;
    }
    return n;
}

/* Ids decode to the text that was rendered, whatever the marks in messages count as. */
static void check_prompt(const struct chat_message *messages, size_t n,
                         const struct chat_options *options, size_t n_users)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    struct buf text = BUF_INIT, back = BUF_INIT;
    struct error err;
    assert_int_equal(chat_render(format, messages, n, options, &text, NULL, &err), STATUS_OK);
    assert_int_equal(chat_encode(format, tokenizer, messages, n, options, SIZE_MAX, &ids, &err),
                     STATUS_OK);
    tokenizer_decode(tokenizer, ids.id, ids.n, true, &back);
    assert_int_equal(back.bytes, text.bytes);
    assert_memory_equal(back.data, text.data, text.bytes);
    assert_int_equal(n_of(&ids, USER), n_users);
    assert_int_equal(ids.id[0], 0);
    size_t n_all = ids.n;
    ids.n = 0;
    assert_int_equal(chat_encode(format, tokenizer, messages, n, options, n_all - 1, &ids, &err),
                     STATUS_TOO_LARGE);
    assert_int_equal(ids.n, 0);
    token_ids_fini(&ids);
    buf_fini(&text);
    buf_fini(&back);
}

static void test_marks_in_messages(void **state)
{
    const struct chat_call call = {text_of("x"), text_of("f"), text_of("{\"k\": \"" USER "\"}")};
    struct chat_message messages[] = {
        {.role = CHAT_ROLE_SYSTEM, .content = text_of("s" USER)},
        {.role = CHAT_ROLE_USER, .content = text_of(USER "a" EOS)},
        {.role = CHAT_ROLE_ASSISTANT, .content = text_of(USER), .calls = &call, .n_calls = 1},
        {.role = CHAT_ROLE_TOOL, .content = text_of("r" USER "r")},
    };
    struct chat_options options = {.thinking = false};
    check_prompt(messages, 4, &options, 2 + 5);
    options.plain_content = true;
    check_prompt(messages, 4, &options, 2);
}

static void answer_of(const struct chat_parse_options *options, const char *prefix,
                      const char *text, bool was_cut, struct chat_answer *ret,
                      uint32_t *ret_reasoning_tokens)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    struct chat_parse_options with = *options;
    chat_answer_init(ret);
    with.id_seed = "abc";
    with.fn = chat_answer_event;
    with.cookie = ret;
    struct chat_parse *parse = chat_parse_create(&with);
    chat_parse_text(parse, prefix, strlen(prefix));
    assert_int_equal(tokenizer_encode(tokenizer, text, strlen(text), NULL, 0, SIZE_MAX, &ids, NULL),
                     STATUS_OK);
    for (size_t i = 0; i < ids.n; i++) {
        chat_parse_token(parse, tokenizer, ids.id[i]);
    }
    chat_parse_finish(parse, was_cut);
    *ret_reasoning_tokens = chat_parse_n_reasoning_tokens(parse);
    assert_int_equal(chat_parse_n_calls(parse), ret->n_calls);
    chat_parse_free(parse);
    token_ids_fini(&ids);
}

static void test_tokens(void **state)
{
    static const struct {
        bool thinking, was_cut;
        const char *text, *reasoning, *content;
    } cases[] = {
        {false, false, "Hello" EOS, "", "Hello"},
        {true, false, "hmm</think>Hello" EOS, "hmm", "Hello"},
        /* marks that have no business in an answer are left out by id */
        {false, false, "a" USER "b" ASSISTANT "c</think>d<think>e", "", "abcde"},
        {true, false, "a" USER "b</think>c</think>d", "ab", "cd"},
        {true, true, "\u6f22\u5b57", "\u6f22\u5b57", ""},
        /* as plain text they are text */
        {false, false, "<|User|>", "", "<|User|>"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const struct chat_parse_options options = {.thinking = cases[i].thinking};
        struct chat_answer answer;
        uint32_t n_reasoning;
        answer_of(&options, "", cases[i].text, cases[i].was_cut, &answer, &n_reasoning);
        assert_string_equal(buf_text(&answer.reasoning), cases[i].reasoning);
        assert_string_equal(buf_text(&answer.content), cases[i].content);
        assert_true((n_reasoning > 0) == cases[i].thinking);
        chat_answer_fini(&answer);
    }
}

/* Every token up to and with the end mark, and none after it. */
static void test_reasoning_tokens(void **state)
{
    const struct chat_parse_options options = {.thinking = true};
    struct token_ids ids = TOKEN_IDS_INIT;
    struct chat_answer answer;
    uint32_t n;
    static const char reasoning[] = "let me think about that, please.";
    assert_int_equal(
        tokenizer_encode(tokenizer, reasoning, strlen(reasoning), NULL, 0, SIZE_MAX, &ids, NULL),
        STATUS_OK);
    answer_of(&options, "", "let me think about that, please.</think>the answer is long" EOS, false,
              &answer, &n);
    assert_int_equal(n, ids.n + 1);
    chat_answer_fini(&answer);
    answer_of(&options, "", reasoning, true, &answer, &n);
    assert_int_equal(n, ids.n);
    chat_answer_fini(&answer);
    token_ids_fini(&ids);
}

static void test_half_characters(void **state)
{
    /* byte tokens that end in the middle of a character: never shown until it is certain */
    static const char text[] = "a\xf0\x9f\x98\x80\xf0\x9f";
    const struct chat_parse_options options = {.thinking = false};
    struct chat_answer answer;
    uint32_t n;
    answer_of(&options, "", text, false, &answer, &n);
    assert_string_equal(buf_text(&answer.content), "a\U0001f600\ufffd");
    chat_answer_fini(&answer);
}

static void test_forced_call(void **state)
{
    const struct chat_message user = {.role = CHAT_ROLE_USER, .content = text_of("q")};
    struct chat_options options = {.thinking = true, .effort = CHAT_EFFORT_MAX, .force_call = true};
    const struct chat_parse_options parse = {.thinking = false};
    struct buf text = BUF_INIT, prefix = BUF_INIT;
    struct chat_answer answer;
    uint32_t n;
    static const char any[] = "\n\n<" D "tool_calls>\n<" D "invoke name=\"";
    assert_false(chat_starts_in_reasoning(&user, 1, &options));
    chat_forced_prefix(&options, &prefix);
    assert_string_equal(buf_text(&prefix), any);
    assert_int_equal(chat_render(format, &user, 1, &options, &text, NULL, NULL), STATUS_OK);
    assert_string_equal(buf_text(&text),
                        "<\uff5cbegin\u2581of\u2581sentence\uff5c>" USER "q" ASSISTANT
                        "</think>\n\n<" D "tool_calls>\n<" D "invoke name=\"");
    answer_of(&parse, buf_text(&prefix), "f\">\n</" D "invoke>\n</" D "tool_calls>" EOS, false,
              &answer, &n);
    assert_int_equal(answer.n_calls, 1);
    assert_string_equal(buf_text(&answer.calls[0].name), "f");
    assert_string_equal(buf_text(&answer.calls[0].arguments), "{}");
    assert_string_equal(buf_text(&answer.calls[0].id), "call_abc_0");
    chat_answer_fini(&answer);

    options.forced_name = text_of("get_it");
    buf_clear(&prefix);
    chat_forced_prefix(&options, &prefix);
    answer_of(&parse, buf_text(&prefix),
              "<" D "parameter name=\"a\" string=\"true\">b</" D "parameter>\n</" D "invoke>",
              false, &answer, &n);
    assert_int_equal(answer.n_calls, 1);
    assert_string_equal(buf_text(&answer.calls[0].name), "get_it");
    assert_string_equal(buf_text(&answer.calls[0].arguments), "{\"a\": \"b\"}");
    assert_true(answer.calls[0].is_whole);
    chat_answer_fini(&answer);
    buf_fini(&prefix);
    buf_fini(&text);
}

static void test_start_of_completions(void **state)
{
    const struct chat_options thinking = {.thinking = true}, chat = {.thinking = false};
    static const struct {
        struct chat_message last;
        bool starts;
    } cases[] = {
        {{.role = CHAT_ROLE_USER}, true},
        {{.role = CHAT_ROLE_TOOL}, true},
        {{.role = CHAT_ROLE_DEVELOPER}, true},
        {{.role = CHAT_ROLE_SYSTEM}, false},
        {{.role = CHAT_ROLE_ASSISTANT, .without_eos = true}, false},
        {{.role = CHAT_ROLE_USER, .task = CHAT_TASK_TITLE}, false},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_true(chat_starts_in_reasoning(&cases[i].last, 1, &thinking) == cases[i].starts);
        assert_false(chat_starts_in_reasoning(&cases[i].last, 1, &chat));
    }
}

static void test_efforts(void **state)
{
    static const struct {
        const char *text;
        enum chat_effort effort;
    } words[] = {{"none", CHAT_EFFORT_NONE}, {"minimal", CHAT_EFFORT_LOW},
                 {"low", CHAT_EFFORT_LOW},   {"medium", CHAT_EFFORT_LOW},
                 {"high", CHAT_EFFORT_HIGH}, {"xhigh", CHAT_EFFORT_MAX},
                 {"max", CHAT_EFFORT_MAX}};
    enum chat_effort effort = CHAT_N_EFFORTS;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        assert_int_equal(chat_effort_from_text(words[i].text, strlen(words[i].text), &effort),
                         STATUS_OK);
        assert_int_equal(effort, words[i].effort);
    }
    assert_int_equal(chat_effort_from_text("High", 4, &effort), STATUS_INVALID);
    assert_int_equal(chat_effort_from_text("max\0", 4, &effort), STATUS_INVALID);
    assert_int_equal(chat_effort_from_text("", 0, &effort), STATUS_INVALID);
}

static void test_format_files(void **state)
{
    static const char *const refused[] = {
        "",
        "[]",
        "{}",
        "{\"release\": \"x\"}",
        "{\"release\":\"x\",\"tools_prefix\":\"\",\"tools_suffix\":\"\",\"response_format_"
        "heading\":"
        "\"\",\"response_format_instruction\":\"\",\"effort\":{\"none\":\"\",\"low\":\"\",\"high\":"
        "\"\",\"max\":7}}",
    };
    struct chat_format *f = NULL;
    struct error err;
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        assert_int_equal(chat_format_parse(refused[i], strlen(refused[i]), &f, &err),
                         STATUS_CORRUPT);
    }
    assert_int_equal(chat_format_open(golden_dir, &f, &err), STATUS_NOT_FOUND);
    assert_null(f);
    assert_string_equal(chat_format_release(format), "tiny");
    char *path = mem_printf("%s/chat_encoding.json", golden_dir);
    assert_int_equal(chat_format_open(path, &f, &err), STATUS_OK);
    assert_string_equal(chat_format_release(f), "test");
    chat_format_close(f);
    mem_free(path);
}

static void test_tools_have(void **state)
{
    static const char text[] =
        "[{\"type\":\"web\"},7,{\"type\":\"function\",\"function\":{\"name\":"
        "\"get\"}}]";
    struct json *tools;
    assert_int_equal(json_parse(text, strlen(text), NULL, &tools, NULL), STATUS_OK);
    assert_true(chat_tools_have(tools, "get", 3));
    assert_false(chat_tools_have(tools, "ge", 2));
    assert_false(chat_tools_have(tools, "web", 3));
    assert_false(chat_tools_have(NULL, "get", 3));
    json_free(tools);
}

static void test_limits(void **state)
{
    static const char text[] = "[{\"role\":\"user\",\"content\":\"12345\"},{\"role\":\"user\","
                               "\"content\":[{\"type\":\"text\",\"text\":\"12345\"}]}]";
    struct chat_thread thread;
    struct json *messages;
    char param[CHAT_PARAM_BYTES];
    struct error err;
    assert_int_equal(json_parse(text, strlen(text), NULL, &messages, NULL), STATUS_OK);
    const struct chat_limits one = {.max_messages = 1}, nine = {.max_text_bytes = 9},
                             ten = {.max_text_bytes = 10, .max_messages = 2};
    assert_int_equal(chat_thread_from_json(messages, NULL, &one, &thread, param, &err),
                     STATUS_TOO_LARGE);
    assert_string_equal(param, "messages");
    assert_int_equal(chat_thread_from_json(messages, NULL, &nine, &thread, param, &err),
                     STATUS_TOO_LARGE);
    assert_int_equal(chat_thread_from_json(messages, NULL, &ten, &thread, param, &err), STATUS_OK);
    assert_int_equal(thread.n_messages, 2);
    chat_thread_fini(&thread);
    json_free(messages);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 1;
    }
    golden_dir = argv[1];
    tiny_dir = argv[2];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_marks_in_messages), cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_reasoning_tokens),  cmocka_unit_test(test_half_characters),
        cmocka_unit_test(test_forced_call),       cmocka_unit_test(test_start_of_completions),
        cmocka_unit_test(test_efforts),           cmocka_unit_test(test_format_files),
        cmocka_unit_test(test_tools_have),        cmocka_unit_test(test_limits),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
