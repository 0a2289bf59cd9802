#include "base/opts.h"

#include <ctype.h>
#include <string.h>

#include "base/opts_value.h"

/*
 * What the table says to people and tools: help for a terminal, a man page in scdoc's notation, a
 * completion for bash, a configuration file. Nothing here is written twice by hand: the options
 * that every program has are a table as well.
 */

enum {
    HELP_COLUMNS = 80,
    HELP_INDENT = 28,
};

static const struct opt_spec general[] = {
    {OPT_GROUP, .name = "General"},
    {OPT_STRING, .name = "config", .value = "FILE",
     .help = "Read options from FILE: lines \"name = value\", # starts a comment."},
    {OPT_BOOL, .name = "help", .help = "Print this text and exit."},
    {OPT_BOOL, .name = "version", .help = "Print the version and exit."},
    {OPT_BOOL, .name = "print-man", .help = "Print the man page as scdoc source and exit."},
    {OPT_BOOL, .name = "print-completion", .help = "Print a completion for bash and exit."},
};

static const size_t n_general = sizeof(general) / sizeof(general[0]);

/* The program's own options, then those of every program. */
static const struct opt_spec *spec_at(const struct opt_program *program, size_t i)
{
    return i < program->n_specs               ? &program->specs[i]
           : i < program->n_specs + n_general ? &general[i - program->n_specs]
                                              : NULL;
}

static const struct opt_spec *operands_of(const struct opt_program *program)
{
    for (size_t i = 0; i < program->n_specs; i++) {
        if (program->specs[i].kind == OPT_OPERANDS) {
            return &program->specs[i];
        }
    }
    return NULL;
}

/* Help with what the table knows beyond it: choices, default, range, whether it repeats. */
static void full_help(const struct opt_spec *spec, struct buf *out)
{
    struct buf range = BUF_INIT;
    buf_append_text(out, spec->help);
    if (spec->choices != NULL) {
        buf_append_text(out, " One of");
        for (size_t i = 0; spec->choices[i] != NULL; i++) {
            buf_printf(out, "%s %s", i > 0 ? "," : "", spec->choices[i]);
        }
        buf_append_text(out, ".");
    }
    if (spec->kind == OPT_LIST) {
        buf_append_text(out, " May be given several times.");
    }
    opts_value_range(spec, &range);
    if (range.bytes > 0) {
        buf_printf(out, " Range %s.", buf_text(&range));
    }
    buf_fini(&range);
    if (spec->required) {
        buf_append_text(out, " Must be given.");
    } else if (spec->initial != NULL && spec->initial[0] != '\0') {
        buf_printf(out, " Default %s.", spec->initial);
    }
}

/* Bytes that are not the middle of a UTF-8 character: near enough to columns for help texts. */
static size_t columns(const char *text, size_t bytes)
{
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) {
        n += ((unsigned char)text[i] & 0xc0) != 0x80;
    }
    return n;
}

/* Words of text from the given column on, broken at HELP_COLUMNS, later lines indented. */
static void wrap(struct buf *out, const char *text, size_t column, size_t indent)
{
    bool first = true;
    for (const char *p = text; *p != '\0';) {
        if (p[0] == '\n' && p[1] == '\n') {
            buf_append_text(out, "\n\n");
            buf_printf(out, "%*s", (int)indent, "");
            column = indent;
            first = true;
        }
        if (isspace((unsigned char)*p)) {
            p++;
            continue;
        }
        size_t bytes = strcspn(p, " \t\n"), width = columns(p, bytes);
        if (!first && column + 1 + width > HELP_COLUMNS) {
            buf_printf(out, "\n%*s", (int)indent, "");
            column = indent;
        } else if (!first) {
            buf_append_byte(out, ' ');
            column++;
        }
        buf_append(out, p, bytes);
        column += width;
        p += bytes;
        first = false;
    }
    buf_append_byte(out, '\n');
}

static void help_option(const struct opt_spec *spec, struct buf *out)
{
    struct buf head = BUF_INIT, help = BUF_INIT;
    bool on_by_default =
        spec->kind == OPT_BOOL && spec->initial != NULL && strcmp(spec->initial, "yes") == 0;
    buf_printf(&head, "  --%s%s", on_by_default ? "[no-]" : "", spec->name);
    if (spec->kind != OPT_BOOL) {
        buf_printf(&head, " %s", opts_value_name(spec));
    }
    full_help(spec, &help);
    if (head.bytes + 2 > HELP_INDENT) {
        buf_printf(out, "%s\n%*s", buf_text(&head), HELP_INDENT, "");
    } else {
        buf_printf(out, "%-*s", HELP_INDENT, buf_text(&head));
    }
    wrap(out, buf_text(&help), HELP_INDENT, HELP_INDENT);
    buf_fini(&head);
    buf_fini(&help);
}

static const char *short_name(const struct opt_program *program)
{
    return strncmp(program->name, "baton-", 6) == 0 ? program->name + 6 : program->name;
}

/* How the environment and the file are used; an example from the table says more than a rule. */
static void sources_text(const struct opt_program *program, struct buf *out)
{
    const struct opt_spec *example = NULL;
    for (size_t i = 0; example == NULL; i++) {
        const struct opt_spec *spec = spec_at(program, i);
        example = spec->kind == OPT_GROUP || spec->kind == OPT_OPERANDS ? NULL : spec;
    }
    struct buf upper = BUF_INIT;
    buf_printf(&upper, "BATON_%s_%s", short_name(program), example->name);
    for (size_t i = 0; i < upper.bytes; i++) {
        upper.data[i] = upper.data[i] == '-' ? '_' : (uint8_t)toupper(upper.data[i]);
    }
    size_t own = strlen("BATON_") + strlen(short_name(program)) + 1;
    buf_printf(
        out,
        "Every option can also be set in the environment: --%s as %s or BATON_%s (the first "
        "wins), and in the file that --config names; in both, lists are split at commas. The "
        "command line beats the environment, that the file, that the defaults.",
        example->name, buf_text(&upper), buf_text(&upper) + own);
    buf_fini(&upper);
}

void opts_write_help(const struct opt_program *program, struct buf *out)
{
    const struct opt_spec *operands = operands_of(program);
    struct buf text = BUF_INIT;
    buf_printf(out, "%s - %s\n\nUsage: %s [options]", program->name, program->summary,
               program->name);
    if (operands != NULL) {
        buf_printf(out, operands->required ? " %s..." : " [%s...]", operands->name);
    }
    buf_append_text(out, "\n");
    if (program->description != NULL) {
        buf_append_text(out, "\n");
        wrap(out, program->description, 0, 0);
    }
    if (operands != NULL) {
        buf_printf(out, "\n%-*s", HELP_INDENT, operands->name);
        full_help(operands, &text);
        wrap(out, buf_text(&text), HELP_INDENT, HELP_INDENT);
    }
    for (size_t i = 0; spec_at(program, i) != NULL; i++) {
        const struct opt_spec *spec = spec_at(program, i);
        if (spec->kind == OPT_GROUP) {
            buf_printf(out, "\n%s:\n", spec->name);
        } else if (spec->kind != OPT_OPERANDS) {
            help_option(spec, out);
        }
    }
    buf_append_text(out, "\n");
    buf_clear(&text);
    sources_text(program, &text);
    wrap(out, buf_text(&text), 0, 0);
    buf_fini(&text);
}

/* ---- man page ---- */

/* A paragraph of scdoc: its marks are escaped, and so is what would open a list or heading. */
static void man_text(const char *text, const char *indent, struct buf *out)
{
    bool line_start = true;
    for (const char *p = text; *p != '\0'; p++) {
        if (*p == '\n') {
            bool paragraph = p[1] == '\n';
            buf_printf(out, paragraph ? "\n\n%s" : "\n%s", indent);
            p += paragraph;
            line_start = true;
            continue;
        }
        if (strchr("_*\\<", *p) != NULL || (line_start && strchr("#-.|[]`;", *p) != NULL)) {
            buf_append_byte(out, '\\');
        }
        buf_append_byte(out, (uint8_t)*p);
        line_start = false;
    }
}

static void man_option(const struct opt_spec *spec, struct buf *out)
{
    struct buf help = BUF_INIT;
    buf_printf(out, "*--%s*", spec->name);
    if (spec->kind == OPT_BOOL && spec->initial != NULL && strcmp(spec->initial, "yes") == 0) {
        buf_printf(out, ", *--no-%s*", spec->name);
    } else if (spec->kind != OPT_BOOL) {
        buf_printf(out, " _%s_", opts_value_name(spec));
    }
    buf_append_text(out, "\n\t");
    full_help(spec, &help);
    man_text(buf_text(&help), "\t", out);
    buf_append_text(out, "\n\n");
    buf_fini(&help);
}

void opts_write_man(const struct opt_program *program, struct buf *out)
{
    const struct opt_spec *operands = operands_of(program);
    struct buf text = BUF_INIT;
    buf_printf(out, "%s(1) \"\" \"%s %s\"\n\n# NAME\n\n%s - ", program->name, program->name,
               program->version, program->name);
    man_text(program->summary, "", out);
    buf_printf(out, "\n\n# SYNOPSIS\n\n*%s* [_options_]", program->name);
    if (operands != NULL) {
        buf_printf(out, operands->required ? " _%s_..." : " [_%s_...]", operands->name);
    }
    buf_append_text(out, "\n\n# DESCRIPTION\n\n");
    man_text(program->description ? program->description : program->summary, "", out);
    buf_append_text(out, "\n\n");
    if (operands != NULL) {
        buf_printf(out, "_%s_\n\t", operands->name);
        full_help(operands, &text);
        man_text(buf_text(&text), "\t", out);
        buf_append_text(out, "\n\n");
    }
    buf_append_text(out, "# OPTIONS\n\n");
    for (size_t i = 0; spec_at(program, i) != NULL; i++) {
        const struct opt_spec *spec = spec_at(program, i);
        if (spec->kind == OPT_GROUP) {
            buf_printf(out, "## %s\n\n", spec->name);
        } else if (spec->kind != OPT_OPERANDS) {
            man_option(spec, out);
        }
    }
    buf_append_text(out, "# ENVIRONMENT AND CONFIGURATION FILE\n\n");
    buf_clear(&text);
    sources_text(program, &text);
    man_text(buf_text(&text), "", out);
    buf_append_text(out, "\n\n# EXIT STATUS\n\n0 on success, 1 for a start or a run that failed, 2 "
                         "for options that make no sense.\n");
    buf_fini(&text);
}

/* ---- completion ---- */

static bool names_a_file(const struct opt_spec *spec)
{
    const char *name = opts_value_name(spec);
    return strcmp(name, "FILE") == 0 || strcmp(name, "DIR") == 0 || strcmp(name, "PATH") == 0;
}

static void completion_case(const struct opt_spec *spec, struct buf *out)
{
    buf_printf(out, "    --%s)\n        ", spec->name);
    if (spec->choices != NULL) {
        buf_append_text(out, "COMPREPLY=($(compgen -W '");
        for (size_t i = 0; spec->choices[i] != NULL; i++) {
            buf_printf(out, "%s%s", i > 0 ? " " : "", spec->choices[i]);
        }
        buf_append_text(out, "' -- \"$word\"))\n        ");
    } else if (names_a_file(spec)) {
        buf_append_text(out, "COMPREPLY=($(compgen -f -- \"$word\"))\n        ");
    }
    buf_append_text(out, "return ;;\n");
}

void opts_write_completion(const struct opt_program *program, struct buf *out)
{
    struct buf function = BUF_INIT;
    for (const char *p = program->name; *p != '\0'; p++) {
        buf_append_byte(&function, isalnum((unsigned char)*p) ? (uint8_t)*p : '_');
    }
    /* Bash breaks words at "=", so --name=val arrives as three of them. */
    buf_printf(out,
               "# bash completion for %s\n"
               "_%s()\n"
               "{\n"
               "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}\n"
               "    if [[ $word == = ]]; then\n"
               "        word=\n"
               "    elif [[ $before == = ]]; then\n"
               "        before=${COMP_WORDS[COMP_CWORD-2]}\n"
               "    fi\n"
               "    COMPREPLY=()\n"
               "    case $before in\n",
               program->name, buf_text(&function));
    for (size_t i = 0; spec_at(program, i) != NULL; i++) {
        const struct opt_spec *spec = spec_at(program, i);
        if (spec->kind != OPT_GROUP && spec->kind != OPT_OPERANDS && spec->kind != OPT_BOOL) {
            completion_case(spec, out);
        }
    }
    buf_append_text(out, "    esac\n    COMPREPLY=($(compgen -W '");
    bool first = true;
    for (size_t i = 0; spec_at(program, i) != NULL; i++) {
        const struct opt_spec *spec = spec_at(program, i);
        if (spec->kind == OPT_GROUP || spec->kind == OPT_OPERANDS) {
            continue;
        }
        buf_printf(out, "%s--%s", first ? "" : " ", spec->name);
        if (spec->kind == OPT_BOOL && i < program->n_specs) {
            buf_printf(out, " --no-%s", spec->name);
        }
        first = false;
    }
    buf_printf(out, "' -- \"$word\"))\n}\ncomplete -o default -F _%s %s\n", buf_text(&function),
               program->name);
    buf_fini(&function);
}

/* ---- configuration file ---- */

void opts_write_config(const struct opt_program *program, const void *values, struct buf *out)
{
    for (size_t i = 0; i < program->n_specs; i++) {
        const struct opt_spec *spec = &program->specs[i];
        const void *field = (const char *)values + spec->offset;
        if (spec->kind == OPT_GROUP) {
            buf_printf(out, "%s# %s\n", out->bytes > 0 ? "\n" : "", spec->name);
        } else if (spec->kind == OPT_LIST) {
            const struct opt_list *list = field;
            for (size_t k = 0; k < list->n; k++) {
                buf_printf(out, "%s = ", spec->name);
                opts_value_quote(list->items[k], out);
                buf_append_byte(out, '\n');
            }
        } else if (spec->kind == OPT_STRING && *(char *const *)field == NULL) {
            buf_printf(out, "# %s is not set\n", spec->name);
        } else if (spec->kind != OPT_OPERANDS) {
            buf_printf(out, "%s = ", spec->name);
            opts_value_text(spec, values, out);
            buf_append_byte(out, '\n');
        }
    }
}
