#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/opts.h"

/*
 * With arguments it is a small program of its own: it parses them and prints the values as a
 * configuration file, for check_opts.py.
 */

struct values {
    char *model, *token;
    int64_t port, low;
    double share;
    uint64_t memory, timeout;
    bool local, trace;
    int level;
    struct opt_list peers, files;
};

#define AT(field) .offset = offsetof(struct values, field)

static const char *const levels[] = {"error", "warn", "info", NULL};

static const struct opt_spec specs[] = {
    {OPT_GROUP, "Model"},
    {OPT_STRING, "model-path", "DIR", "models/tiny", "Folder of the checkpoint.", AT(model)},
    {OPT_SIZE, "memory", NULL, "1.5G", "Memory for pages.", AT(memory), .min = 1 << 20,
     .max = INT64_C(1) << 40},
    {OPT_REAL, "prefill-share", NULL, "0.5",
     "Share of the time that prompts may take while streams run; the rest goes to them.", AT(share),
     .min = 0, .max = 1},
    {OPT_GROUP, "Service"},
    {OPT_INT, "http-port", "PORT", "8000", "Port for *clients* and snake_case_names.", AT(port),
     .min = 1, .max = 65535},
    {OPT_INT, "low", NULL, NULL, "Any number.", AT(low)},
    {OPT_DURATION, "drain-timeout", NULL, "30s", "Time to end what runs.", AT(timeout),
     .min = 1000000, .max = INT64_C(3600000000000)},
    {OPT_BOOL, "local-prefill", NULL, "yes", "Prefill here when that is sooner.", AT(local)},
    {OPT_BOOL, "trace", NULL, NULL, "Trace.", AT(trace)},
    {OPT_ENUM, "log-level", NULL, "info", "How much is said.", AT(level), .choices = levels},
    {OPT_LIST, "peer", "HOST:PORT", NULL, "A peer to speak to.", AT(peers)},
    {OPT_STRING, "token", NULL, NULL, "A secret.", AT(token)},
    {OPT_OPERANDS, "FILE", NULL, NULL, "What to read.", AT(files)},
};

static const struct opt_program program = {
    .name = "baton-test",
    .version = "1.2.3",
    .summary = "a program for the test of the option table",
    .description = "The first paragraph is long enough that it has to be broken somewhere before "
                   "the right edge.\n\n- the second begins like a list",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
};

static struct values values;
static struct error err;

/* Arguments end at NULL. */
static enum status parse(const char *first, ...)
{
    char *argv[32] = {(char *)(uintptr_t) "baton-test"};
    int argc = 1;
    bool done;
    va_list args;
    va_start(args, first);
    for (const char *p = first; p != NULL; p = va_arg(args, const char *)) {
        argv[argc++] = (char *)(uintptr_t)p;
    }
    va_end(args);
    memset(&values, 0xa5, sizeof(values));
    err.text[0] = '\0';
    enum status status = opts_parse(&program, argc, argv, &values, &done, &err);
    if (status == STATUS_OK) {
        assert_false(done);
    }
    return status;
}

#define accept(...)                                  \
    do {                                             \
        if (parse(__VA_ARGS__, NULL) != STATUS_OK) { \
            fail_msg("%s", err.text);                \
        }                                            \
    } while (0)

#define refuse(message, ...)                                        \
    do {                                                            \
        assert_int_equal(parse(__VA_ARGS__, NULL), STATUS_INVALID); \
        assert_string_equal(err.text, message);                     \
        opts_free(&program, &values);                               \
    } while (0)

static void test_defaults(void **state)
{
    accept(NULL);
    assert_string_equal(values.model, "models/tiny");
    assert_null(values.token);
    assert_int_equal(values.port, 8000);
    assert_int_equal(values.low, 0);
    assert_true(values.share == 0.5);
    assert_true(values.memory == UINT64_C(3) << 29);
    assert_true(values.timeout == UINT64_C(30000000000));
    assert_true(values.local);
    assert_false(values.trace);
    assert_int_equal(values.level, 2);
    assert_int_equal(values.peers.n + values.files.n, 0);
    opts_free(&program, &values);
    assert_null(values.model);
}

static void test_command_line(void **state)
{
    accept("--http-port", "1", "one", "--http-port=65535", "--low", "-7", "--no-local-prefill",
           "--trace", "--peer", "a:1", "--peer=b:2", "--token=--x=y", "--log-level", "warn",
           "--memory=64MiB", "--drain-timeout", "1.5s", "-", "--", "--two", "--");
    assert_int_equal(values.port, 65535);
    assert_int_equal(values.low, -7);
    assert_false(values.local);
    assert_true(values.trace);
    assert_int_equal(values.level, 1);
    assert_int_equal(values.peers.n, 2);
    assert_string_equal(values.peers.items[0], "a:1");
    assert_string_equal(values.peers.items[1], "b:2");
    assert_string_equal(values.token, "--x=y");
    assert_true(values.memory == 64 << 20);
    assert_true(values.timeout == 1500000000);
    assert_int_equal(values.files.n, 4);
    assert_string_equal(values.files.items[1], "-");
    assert_string_equal(values.files.items[2], "--two");
    opts_free(&program, &values);
    accept("--trace=off", "--local-prefill=No");
    assert_false(values.trace || values.local);
    opts_free(&program, &values);
}

static void test_refused(void **state)
{
    refuse("unknown option --http-prot: did you mean --http-port?", "--http-prot", "1");
    refuse("unknown option --halp: did you mean --help?", "--halp");
    refuse("unknown option --zzzzzzzz", "--zzzzzzzz=1");
    refuse("unknown option --no-http-port: did you mean --http-port?", "--no-http-port");
    refuse("unknown option -p: options begin with --", "-p");
    refuse("--http-port: 65536 is out of range: 1 to 65535", "--http-port", "65536");
    refuse("--http-port: 0 is out of range: 1 to 65535", "--http-port=0");
    refuse("--http-port: \"80 \" is no whole number", "--http-port", "80 ");
    refuse("--http-port: \"\" is no whole number", "--http-port=");
    refuse("--http-port: \" 80\" is no whole number", "--http-port", " 80");
    refuse("--low: \"9223372036854775808\" is no whole number", "--low", "9223372036854775808");
    refuse("--http-port needs a value", "--http-port");
    refuse("--http-port needs a value (if it begins with --, join the two with =)", "--http-port",
           "--trace");
    refuse("--memory: 1K is out of range: 1M to 1T", "--memory", "1K");
    refuse("--memory: \"1X\" is no size: write 4096, 64K, 1.5G or 2GB", "--memory", "1X");
    refuse("--drain-timeout: \"5\" is no duration: write a number and its unit, as in 250ms, 1.5s, "
           "2m or 1h",
           "--drain-timeout", "5");
    refuse("--drain-timeout: 2h is out of range: 1ms to 1h", "--drain-timeout", "2h");
    refuse("--prefill-share: 1.01 is out of range: 0 to 1", "--prefill-share", "1.01");
    refuse("--prefill-share: \"nan\" is no number", "--prefill-share", "nan");
    refuse("--prefill-share: \"0x1\" is no number", "--prefill-share", "0x1");
    refuse("--trace: \"maybe\" is neither yes nor no", "--trace=maybe");
    refuse("--log-level: \"loud\" is none of: error, warn, info", "--log-level", "loud");
}

static void test_sizes_and_durations(void **state)
{
    static const struct {
        const char *text;
        uint64_t want;
    } sizes[] = {{"0", 0},          {"4096", 4096},      {"64k", 65536},
                 {"64KiB", 65536},  {"64KB", 64000},     {"1.5G", 1610612736},
                 {"0.1M", 104857},  {"2gb", 2000000000}, {"18446744073709551615", UINT64_MAX},
                 {"1T", 1ull << 40}};
    uint64_t got;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        assert_int_equal(opts_parse_size(sizes[i].text, &got, NULL), STATUS_OK);
        assert_true(got == sizes[i].want);
    }
    static const char *const bad[] = {"",
                                      "K",
                                      "-1",
                                      "1.",
                                      ".5",
                                      "1 K",
                                      "18446744073709551616",
                                      "16777216T",
                                      "1e3",
                                      "0x10",
                                      "99999999999999999999999999"};
    got = 77;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(opts_parse_size(bad[i], &got, NULL), STATUS_INVALID);
    }
    assert_true(got == 77);
    assert_int_equal(opts_parse_duration("0", &got, NULL), STATUS_OK);
    assert_true(got == 0);
    assert_int_equal(opts_parse_duration("0.25ms", &got, NULL), STATUS_OK);
    assert_true(got == 250000);
    assert_int_equal(opts_parse_duration("90m", &got, NULL), STATUS_OK);
    assert_true(got == UINT64_C(5400000000000));
    assert_int_equal(opts_parse_duration("300000d", &got, NULL), STATUS_INVALID);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void test_sources(void **state)
{
    char path[] = "/tmp/test_opts_XXXXXX";
    close(mkstemp(path));
    write_file(path, "# comment\n\n  http-port=1000\nlow = 1\nmodel-path = \" a \\\"b\\\\ #=\" \n"
                     "peer = x\npeer = y, z\npeer = \" p,q\"\ntrace = on\ndrain-timeout = 2s");
    setenv("BATON_LOW", "2", 1);
    setenv("BATON_HTTP_PORT", "2000", 1);
    setenv("BATON_TEST_HTTP_PORT", "3000", 1);
    setenv("BATON_TEST_LOG_LEVEL", "", 1);
    accept("--low=3", "--config", path);
    assert_int_equal(values.low, 3);
    assert_int_equal(values.port, 3000);
    assert_true(values.trace);
    assert_string_equal(values.model, " a \"b\\ #=");
    assert_int_equal(values.peers.n, 4);
    assert_string_equal(values.peers.items[1], "y");
    assert_string_equal(values.peers.items[2], "z");
    assert_string_equal(values.peers.items[3], " p,q");
    assert_true(values.timeout == 2000000000);
    assert_int_equal(values.level, 2);
    opts_free(&program, &values);

    /* A list of a stronger source replaces the weaker one whole. */
    setenv("BATON_PEER", "p, q,r", 1);
    setenv("BATON_CONFIG", path, 1);
    accept(NULL);
    assert_int_equal(values.peers.n, 3);
    assert_string_equal(values.peers.items[1], "q");
    assert_int_equal(values.low, 2);
    opts_free(&program, &values);
    accept("--peer", "only");
    assert_int_equal(values.peers.n, 1);
    opts_free(&program, &values);

    char want[600];
    setenv("BATON_LOW", "x", 1);
    refuse("BATON_LOW: \"x\" is no whole number", "--trace");
    unsetenv("BATON_LOW");
    write_file(path, "low = 1\nhttp-prt = 1\n");
    snprintf(want, sizeof(want), "%s:2: unknown option http-prt: did you mean http-port?", path);
    refuse(want, "--trace");
    write_file(path, "low = 1\n\nhttp-port = 0\n");
    snprintf(want, sizeof(want), "%s:3: http-port: 0 is out of range: 1 to 65535", path);
    refuse(want, "--trace");
    write_file(path, "low\n");
    snprintf(want, sizeof(want), "%s:1: expected a line \"name = value\"", path);
    refuse(want, "--trace");
    write_file(path, "token = \"a\" b\n");
    snprintf(want, sizeof(want), "%s:1: the quotes of token do not close", path);
    refuse(want, "--trace");
    write_file(path, "token =\n");
    snprintf(want, sizeof(want), "%s:1: token: is empty; leave it out to have none", path);
    refuse(want, "--trace");
    write_file(path, "peer = x,,y\n");
    snprintf(want, sizeof(want), "%s:1: peer: is empty; leave it out to have none", path);
    refuse(want, "--trace");
    unlink(path);
    setenv("BATON_CONFIG", "/dev/zero", 1); /* endless */
    refuse("/dev/zero: not a file", "--trace");
    setenv("BATON_CONFIG", path, 1);
    assert_int_equal(mkfifo(path, 0600), 0); /* and nobody who would write */
    snprintf(want, sizeof(want), "%s: not a file", path);
    refuse(want, "--trace");
    unlink(path);
    assert_int_equal(parse("--trace", NULL), STATUS_SYSTEM);
    opts_free(&program, &values);
    unsetenv("BATON_CONFIG");
    unsetenv("BATON_PEER");
    unsetenv("BATON_HTTP_PORT");
    unsetenv("BATON_TEST_HTTP_PORT");
    unsetenv("BATON_TEST_LOG_LEVEL");
}

static void test_required(void **state)
{
    static const struct opt_spec needs[] = {
        {OPT_STRING, "name", NULL, NULL, "Who it is.", AT(model), .required = true}};
    static const struct opt_program strict = {.name = "x", .specs = needs, .n_specs = 1};
    char *argv[] = {(char *)(uintptr_t) "x", (char *)(uintptr_t) "--name=", NULL};
    bool done;
    assert_int_equal(opts_parse(&strict, 1, argv, &values, &done, &err), STATUS_INVALID);
    assert_string_equal(err.text, "--name must be given: Who it is.");
    assert_int_equal(opts_parse(&strict, 2, argv, &values, &done, &err), STATUS_INVALID);
    assert_string_equal(err.text, "--name: is empty; leave it out to have none");
    opts_free(&strict, &values);
    argv[1] = (char *)(uintptr_t) "extra";
    assert_int_equal(opts_parse(&strict, 2, argv, &values, &done, &err), STATUS_INVALID);
    assert_string_equal(err.text, "unexpected argument \"extra\"");
    opts_free(&strict, &values);
}

static void test_config_round_trip(void **state)
{
    char path[] = "/tmp/test_opts_XXXXXX";
    close(mkstemp(path));
    accept("--memory", "1234567", "--drain-timeout", "1500us", "--prefill-share", "0.1", "--token",
           " q\"\\\n# ", "--peer", "a = b,c", "--peer", " ", "--low=-9", "--no-local-prefill");
    struct buf first = BUF_INIT, second = BUF_INIT;
    opts_write_config(&program, &values, &first);
    opts_free(&program, &values);
    write_file(path, buf_text(&first));
    accept("--config", path);
    assert_string_equal(values.token, " q\"\\\n# ");
    assert_int_equal(values.memory, 1234567);
    assert_int_equal(values.timeout, 1500000);
    opts_write_config(&program, &values, &second);
    assert_string_equal(buf_text(&first), buf_text(&second));
    opts_free(&program, &values);
    buf_fini(&first);
    buf_fini(&second);
    unlink(path);
}

static void test_help_fits(void **state)
{
    struct buf out = BUF_INIT;
    opts_write_help(&program, &out);
    size_t column = 0;
    for (const char *p = buf_text(&out); *p != '\0'; p++) {
        column = *p == '\n' ? 0 : column + 1;
        assert_true(column <= 80);
    }
    for (size_t i = 0; i < program.n_specs; i++) {
        assert_non_null(strstr(buf_text(&out), specs[i].name));
    }
    assert_non_null(strstr(buf_text(&out), "  --http-port PORT          Port for *clients*"));
    assert_non_null(strstr(buf_text(&out), "Default 8000.\n"));
    assert_non_null(strstr(buf_text(&out), "  --[no-]local-prefill "));
    assert_non_null(strstr(buf_text(&out), "BATON_TEST_MODEL_PATH or"));
    buf_fini(&out);
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        struct buf out = BUF_INIT;
        opts_parse_or_exit(&program, argc, argv, &values);
        opts_write_config(&program, &values, &out);
        fwrite(out.data, 1, out.bytes, stdout);
        buf_fini(&out);
        opts_free(&program, &values);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),          cmocka_unit_test(test_command_line),
        cmocka_unit_test(test_refused),           cmocka_unit_test(test_sizes_and_durations),
        cmocka_unit_test(test_sources),           cmocka_unit_test(test_required),
        cmocka_unit_test(test_config_round_trip), cmocka_unit_test(test_help_fits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
