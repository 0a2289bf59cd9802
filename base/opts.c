#include "base/opts.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/opts_value.h"

/*
 * Where values come from, weakest first: defaults, configuration file, environment, command line.
 * Each source goes through the same opts_value_set, so that a value is right or wrong alike
 * wherever it stands. The command line is walked twice by the same step function: once for what
 * must be known first (--help, --config), once for the values.
 */

enum source { SOURCE_NONE, SOURCE_DEFAULT, SOURCE_FILE, SOURCE_ENVIRONMENT, SOURCE_ARGV };

enum {
    /* A configuration is written by hand; what is larger is the wrong file. */
    CONFIG_MAX_BYTES = 1 << 20,
};

static const char *const builtins[] = {"help",      "version",          "config",
                                       "print-man", "print-completion", NULL};

struct parse {
    const struct opt_program *program;
    void *values;
    enum source *sources; /* one a spec: who set it last */
    struct error *err;
};

/* ---- the table ---- */

static bool named(const struct opt_spec *spec)
{
    return spec->kind != OPT_GROUP && spec->kind != OPT_OPERANDS;
}

static bool is_builtin(const char *name)
{
    for (size_t i = 0; builtins[i] != NULL; i++) {
        if (strcmp(name, builtins[i]) == 0) {
            return true;
        }
    }
    return false;
}

static int64_t find(const struct opt_program *program, const char *name, size_t bytes)
{
    for (size_t i = 0; i < program->n_specs; i++) {
        const struct opt_spec *spec = &program->specs[i];
        if (named(spec) && strlen(spec->name) == bytes && memcmp(spec->name, name, bytes) == 0) {
            return (int64_t)i;
        }
    }
    return -1;
}

static void check_table(const struct opt_program *program)
{
    size_t n_operands = 0;
    for (size_t i = 0; i < program->n_specs; i++) {
        const struct opt_spec *spec = &program->specs[i];
        n_operands += spec->kind == OPT_OPERANDS;
        assert(n_operands <= 1);
        if (!named(spec)) {
            continue;
        }
        assert(strspn(spec->name, "abcdefghijklmnopqrstuvwxyz0123456789-") == strlen(spec->name));
        assert(isalpha((unsigned char)spec->name[0]) && strncmp(spec->name, "no-", 3) != 0);
        assert(!is_builtin(spec->name) && "the name belongs to every program");
        assert(find(program, spec->name, strlen(spec->name)) == (int64_t)i && "a name twice");
        assert(spec->help != NULL && spec->min <= spec->max);
        assert((spec->kind == OPT_ENUM) == (spec->choices != NULL));
        assert((spec->kind != OPT_SIZE && spec->kind != OPT_DURATION) || spec->min >= 0);
    }
}

/* ---- the nearest name ---- */

/* Edits (insert, delete, replace, swap of neighbours) from one name to the other. */
static size_t distance(const char *a, const char *b)
{
    enum { MAX = 48 };
    size_t n = strlen(a), m = strlen(b), rows[3][MAX + 1];
    if (n > MAX || m > MAX) {
        return MAX;
    }
    for (size_t j = 0; j <= m; j++) {
        rows[0][j] = j;
    }
    for (size_t i = 1; i <= n; i++) {
        size_t *row = rows[i % 3], *above = rows[(i + 2) % 3], *above2 = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                above2[j - 2] + 1 < best) {
                best = above2[j - 2] + 1;
            }
            row[j] = best;
        }
    }
    return rows[n % 3][m];
}

static enum status unknown(const struct opt_program *program, const char *where, const char *dashes,
                           const char *name, struct error *err)
{
    const char *nearest = NULL;
    size_t least = strlen(name) / 3 + 2; /* further away, a suggestion only misleads */
    for (size_t i = 0; i < program->n_specs; i++) {
        const struct opt_spec *spec = &program->specs[i];
        if (named(spec) && distance(name, spec->name) < least) {
            least = distance(name, spec->name);
            nearest = spec->name;
        }
    }
    for (size_t i = 0; builtins[i] != NULL && dashes[0] != '\0'; i++) {
        if (distance(name, builtins[i]) < least) {
            least = distance(name, builtins[i]);
            nearest = builtins[i];
        }
    }
    if (nearest != NULL) {
        return error_set(err, STATUS_INVALID, "%sunknown option %s%.80s: did you mean %s%s?", where,
                         dashes, name, dashes, nearest);
    }
    return error_set(err, STATUS_INVALID, "%sunknown option %s%.80s", where, dashes, name);
}

/* ---- setting ---- */

/* A list that a stronger source speaks of starts anew; everything else is simply overwritten. */
static enum status set(struct parse *parse, size_t spec_i, enum source source, const char *text,
                       const char *where)
{
    const struct opt_spec *spec = &parse->program->specs[spec_i];
    /* Mostly a variable of a script that was not set. An empty host would be every interface, an
     * empty token none: what nobody chose is not guessed. */
    if (source != SOURCE_DEFAULT && text[0] == '\0' &&
        (spec->kind == OPT_STRING || spec->kind == OPT_LIST)) {
        return error_set(parse->err, STATUS_INVALID, "%s: is empty; leave it out to have none",
                         where);
    }
    if (parse->sources[spec_i] != source &&
        (spec->kind == OPT_LIST || spec->kind == OPT_OPERANDS)) {
        opts_value_clear(spec, parse->values);
    }
    parse->sources[spec_i] = source;
    return opts_value_set(spec, parse->values, text, where, parse->err);
}

/* A default is ours: it must be right. */
static void set_defaults(struct parse *parse)
{
    for (size_t i = 0; i < parse->program->n_specs; i++) {
        const struct opt_spec *spec = &parse->program->specs[i];
        if (spec->initial != NULL && spec->kind != OPT_GROUP) {
            enum status status = set(parse, i, SOURCE_DEFAULT, spec->initial, "default");
            assert(status == STATUS_OK && "a default breaks its own bounds");
        }
    }
}

/* ---- the configuration file ---- */

static char *trim(char *text)
{
    while (isspace((unsigned char)*text)) {
        text++;
    }
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) {
        text[--n] = '\0';
    }
    return text;
}

/* The items of a list that is one text. */
static enum status set_items(struct parse *parse, size_t spec_i, enum source source,
                             const char *text, const char *where)
{
    enum status status = STATUS_OK;
    char *copy = mem_strdup(text), *rest = copy, *item;
    while (status == STATUS_OK && (item = strsep(&rest, ",")) != NULL) {
        status = set(parse, spec_i, source, trim(item), where);
    }
    mem_free(copy);
    return status;
}

/* Undoes the quotes of opts_value_quote in place; false when they do not close at the end. */
static bool unquote(char *text)
{
    char *to = text;
    const char *p = text + 1;
    for (; *p != '"'; p++) {
        if (*p == '\\' && p[1] != '\0') {
            p++;
            *to++ = *p == 'n' ? '\n' : *p;
        } else if (*p == '\0') {
            return false;
        } else {
            *to++ = *p;
        }
    }
    *to = '\0';
    return p[1] == '\0';
}

static enum status config_line(struct parse *parse, const char *place, char *line)
{
    char *name = trim(line);
    if (name[0] == '\0' || name[0] == '#') {
        return STATUS_OK;
    }
    char *equals = strchr(name, '=');
    if (equals == NULL) {
        return error_set(parse->err, STATUS_INVALID, "%s: expected a line \"name = value\"", place);
    }
    *equals = '\0';
    char *value = trim(equals + 1);
    name = trim(name);
    int64_t spec_i = find(parse->program, name, strlen(name));
    if (spec_i < 0) {
        char *where = mem_printf("%s: ", place);
        enum status status = unknown(parse->program, where, "", name, parse->err);
        mem_free(where);
        return status;
    }
    bool is_quoted = value[0] == '"';
    if (is_quoted && !unquote(value)) {
        return error_set(parse->err, STATUS_INVALID, "%s: the quotes of %s do not close", place,
                         name);
    }
    char *where = mem_printf("%s: %s", place, name);
    bool is_items = parse->program->specs[spec_i].kind == OPT_LIST && !is_quoted;
    enum status status = is_items ? set_items(parse, (size_t)spec_i, SOURCE_FILE, value, where)
                                  : set(parse, (size_t)spec_i, SOURCE_FILE, value, where);
    mem_free(where);
    return status;
}

static enum status read_config(struct parse *parse, const char *path)
{
    enum status status = STATUS_OK;
    char *line = NULL;
    size_t capacity = 0, number = 0, total = 0;
    ssize_t bytes;
    FILE *file = NULL;
    struct stat found;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO would wait for a writer */
    if (fd < 0 || fstat(fd, &found) != 0) {
        status = error_set(parse->err, STATUS_SYSTEM, "configuration file %s: %m", path);
    } else if (!S_ISREG(found.st_mode)) {
        status = error_set(parse->err, STATUS_INVALID, "%s: not a file", path);
    } else if ((uint64_t)found.st_size > CONFIG_MAX_BYTES) {
        status = error_set(parse->err, STATUS_INVALID, "%s: more than 1 MiB", path);
    } else if ((file = fdopen(fd, "r")) == NULL) {
        status = error_set(parse->err, STATUS_SYSTEM, "configuration file %s: %m", path);
    }
    if (status) {
        if (fd >= 0) {
            close(fd);
        }
        return status;
    }
    while (status == STATUS_OK && (bytes = getline(&line, &capacity, file)) >= 0) {
        char *place = mem_printf("%s:%zu", path, ++number);
        total += (size_t)bytes;
        if (total > CONFIG_MAX_BYTES) {
            status = error_set(parse->err, STATUS_INVALID, "%s: more than 1 MiB", path);
        } else if (memchr(line, '\0', (size_t)bytes) != NULL) {
            status = error_set(parse->err, STATUS_INVALID, "%s: a NUL byte", place);
        } else {
            status = config_line(parse, place, line);
        }
        mem_free(place);
    }
    if (status == STATUS_OK && ferror(file)) {
        status = error_set(parse->err, STATUS_SYSTEM, "configuration file %s: %m", path);
    }
    free(line);
    fclose(file);
    return status;
}

/* ---- the environment ---- */

static char *variable_name(const struct opt_program *program, const char *name)
{
    const char *short_name = program ? program->name : "";
    if (strncmp(short_name, "baton-", 6) == 0) {
        short_name += 6;
    }
    char *variable = mem_printf("BATON_%s%s%s", short_name, program ? "_" : "", name);
    for (char *p = variable; *p != '\0'; p++) {
        *p = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    }
    return variable;
}

/* The variable of this program, else the one of all; an empty one counts as not set. */
static const char *variable_get(const struct opt_program *program, const char *name,
                                char **ret_variable)
{
    for (int all = 0; all < 2; all++) {
        char *variable = variable_name(all ? NULL : program, name);
        const char *value = getenv(variable);
        if (value != NULL && value[0] != '\0') {
            *ret_variable = variable;
            return value;
        }
        mem_free(variable);
    }
    return NULL;
}

static enum status read_environment(struct parse *parse)
{
    enum status status = STATUS_OK;
    for (size_t i = 0; i < parse->program->n_specs && status == STATUS_OK; i++) {
        const struct opt_spec *spec = &parse->program->specs[i];
        char *variable;
        const char *value =
            named(spec) ? variable_get(parse->program, spec->name, &variable) : NULL;
        if (value == NULL) {
            continue;
        }
        if (spec->kind == OPT_LIST) {
            status = set_items(parse, i, SOURCE_ENVIRONMENT, value, variable);
        } else {
            status = set(parse, i, SOURCE_ENVIRONMENT, value, variable);
        }
        mem_free(variable);
    }
    return status;
}

/* ---- the command line ---- */

struct step {
    int at;              /* next argument to look at */
    bool only_operands;  /* "--" was seen */
    int64_t spec_i;      /* of this option, -1 for a builtin or an operand */
    const char *builtin; /* its name, or NULL */
    const char *value;
};

/* The value of an option: behind its "=", or the next argument unless that looks like an option. */
static enum status take_value(struct step *step, int argc, char *const *argv, const char *equals,
                              struct error *err)
{
    const char *option = argv[step->at - 1];
    if (equals != NULL) {
        step->value = equals + 1;
        return STATUS_OK;
    }
    if (step->at >= argc || strncmp(argv[step->at], "--", 2) == 0) {
        return error_set(err, STATUS_INVALID, "%.80s needs a value%s", option,
                         step->at < argc ? " (if it begins with --, join the two with =)" : "");
    }
    step->value = argv[step->at++];
    return STATUS_OK;
}

/* One argument (with its value), without touching any field. */
static enum status step_next(const struct opt_program *program, struct step *step, int argc,
                             char *const *argv, struct error *err)
{
    const char *argument = argv[step->at++];
    step->spec_i = -1;
    step->builtin = step->value = NULL;
    if (!step->only_operands && strcmp(argument, "--") == 0) {
        step->only_operands = true;
        return STATUS_OK;
    }
    if (step->only_operands || argument[0] != '-' || argument[1] == '\0') {
        step->value = argument;
        return STATUS_OK;
    }
    if (strcmp(argument, "-h") == 0) {
        argument = "--help";
    }
    if (argument[1] != '-') {
        return error_set(err, STATUS_INVALID, "unknown option %.80s: options begin with --",
                         argument);
    }
    const char *name = argument + 2, *equals = strchr(name, '=');
    size_t bytes = equals ? (size_t)(equals - name) : strlen(name);
    for (size_t i = 0; builtins[i] != NULL; i++) {
        if (strlen(builtins[i]) == bytes && memcmp(builtins[i], name, bytes) == 0) {
            step->builtin = builtins[i];
            return strcmp(builtins[i], "config") == 0 ? take_value(step, argc, argv, equals, err)
                                                      : STATUS_OK;
        }
    }
    step->spec_i = find(program, name, bytes);
    if (step->spec_i >= 0 && program->specs[step->spec_i].kind == OPT_BOOL) {
        step->value = equals ? equals + 1 : "yes";
        return STATUS_OK;
    }
    if (step->spec_i >= 0) {
        return take_value(step, argc, argv, equals, err);
    }
    if (bytes > 3 && strncmp(name, "no-", 3) == 0 && equals == NULL) {
        step->spec_i = find(program, name + 3, bytes - 3);
        if (step->spec_i >= 0 && program->specs[step->spec_i].kind == OPT_BOOL) {
            step->value = "no";
            return STATUS_OK;
        }
    }
    char *copy = mem_strndup(name, bytes);
    enum status status = unknown(program, "", "--", copy, err);
    mem_free(copy);
    return status;
}

static void answer(const struct opt_program *program, const char *builtin)
{
    struct buf out = BUF_INIT;
    if (strcmp(builtin, "help") == 0) {
        opts_write_help(program, &out);
    } else if (strcmp(builtin, "print-man") == 0) {
        opts_write_man(program, &out);
    } else if (strcmp(builtin, "print-completion") == 0) {
        opts_write_completion(program, &out);
    } else {
        buf_printf(&out, "%s %s\n", program->name, program->version);
    }
    fwrite(out.data, 1, out.bytes, stdout);
    fflush(stdout);
    buf_fini(&out);
}

/* What must be known before any value: a question that ends the program, or the file to read. */
static enum status look_ahead(struct parse *parse, int argc, char *const *argv,
                              const char **ret_config, bool *ret_exit)
{
    struct step step = {.at = 1};
    *ret_config = NULL;
    *ret_exit = false;
    while (step.at < argc) {
        enum status status = step_next(parse->program, &step, argc, argv, parse->err);
        if (status != STATUS_OK) {
            return status;
        }
        if (step.builtin == NULL) {
            continue;
        }
        if (strcmp(step.builtin, "config") == 0) {
            *ret_config = step.value;
            continue;
        }
        answer(parse->program, step.builtin);
        *ret_exit = true;
        return STATUS_OK;
    }
    return STATUS_OK;
}

static enum status read_argv(struct parse *parse, int argc, char *const *argv)
{
    const struct opt_program *program = parse->program;
    struct step step = {.at = 1};
    while (step.at < argc) {
        enum status status = step_next(program, &step, argc, argv, parse->err);
        if (status != STATUS_OK) {
            return status;
        }
        if (step.builtin != NULL || step.value == NULL) {
            continue;
        }
        int64_t spec_i = step.spec_i;
        for (size_t i = 0; spec_i < 0 && i < program->n_specs; i++) {
            spec_i = program->specs[i].kind == OPT_OPERANDS ? (int64_t)i : -1;
        }
        if (spec_i < 0) {
            return error_set(parse->err, STATUS_INVALID, "unexpected argument \"%.80s\"",
                             step.value);
        }
        char *where = mem_printf("%s%s", step.spec_i < 0 ? "" : "--", program->specs[spec_i].name);
        status = set(parse, (size_t)spec_i, SOURCE_ARGV, step.value, where);
        mem_free(where);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

static enum status check_required(struct parse *parse)
{
    for (size_t i = 0; i < parse->program->n_specs; i++) {
        const struct opt_spec *spec = &parse->program->specs[i];
        if (spec->required && parse->sources[i] <= SOURCE_DEFAULT) {
            return error_set(parse->err, STATUS_INVALID, "%s%s must be given: %s",
                             named(spec) ? "--" : "", spec->name, spec->help);
        }
    }
    return STATUS_OK;
}

enum status opts_parse(const struct opt_program *program, int argc, char *const *argv, void *values,
                       bool *ret_exit, struct error *err)
{
    check_table(program);
    struct parse parse = {.program = program, .values = values, .err = err};
    const char *config = NULL;
    char *variable = NULL;
    bool done = false;
    for (size_t i = 0; i < program->n_specs; i++) {
        /* The fields hold whatever the caller's stack held: nothing there is ours to release. */
        const struct opt_spec *spec = &program->specs[i];
        void *field = (char *)values + spec->offset;
        if (spec->kind == OPT_STRING) {
            *(char **)field = NULL;
        } else if (spec->kind == OPT_LIST || spec->kind == OPT_OPERANDS) {
            *(struct opt_list *)field = (struct opt_list){NULL, 0};
        } else {
            opts_value_clear(spec, values);
        }
    }
    parse.sources = mem_array(program->n_specs, sizeof(*parse.sources));
    set_defaults(&parse);
    enum status status = look_ahead(&parse, argc, argv, &config, &done);
    if (status == STATUS_OK && !done) {
        if (config == NULL) {
            config = variable_get(program, "config", &variable);
        }
        if (config != NULL) {
            status = read_config(&parse, config);
        }
        if (status == STATUS_OK) {
            status = read_environment(&parse);
        }
        if (status == STATUS_OK) {
            status = read_argv(&parse, argc, argv);
        }
        if (status == STATUS_OK) {
            status = check_required(&parse);
        }
    }
    mem_free(variable);
    mem_free(parse.sources);
    if (status == STATUS_OK) {
        *ret_exit = done;
    }
    return status;
}

void opts_free(const struct opt_program *program, void *values)
{
    for (size_t i = 0; i < program->n_specs; i++) {
        opts_value_clear(&program->specs[i], values);
    }
}

void opts_parse_or_exit(const struct opt_program *program, int argc, char *const *argv,
                        void *values)
{
    struct error err;
    bool done;
    enum status status = opts_parse(program, argc, argv, values, &done, &err);
    if (status != STATUS_OK) {
        fprintf(stderr, "%s: %s\ntry %s --help\n", program->name, err.text, program->name);
    }
    if (status != STATUS_OK || done) {
        opts_free(program, values);
        exit(status == STATUS_OK ? 0 : 2);
    }
}
