#ifndef BATON_BASE_OPTS_H
#define BATON_BASE_OPTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * The options of a program, from one table: command line, configuration file, environment, --help,
 * man page and shell completion. Values are written into the caller's own struct, at the offset
 * that the table gives, in the type of the kind:
 *
 *   kind           field               written as
 *   OPT_STRING     char *              any text; NULL when there is no default
 *   OPT_INT        int64_t             decimal
 *   OPT_REAL       double              decimal, finite
 *   OPT_SIZE       uint64_t, bytes     4096, 64K, 1.5G, 2GiB (1024), 2GB (1000); K is 1024
 *   OPT_DURATION   uint64_t, ns        250ms, 1.5s, 2m, 1h, 10us; 0 needs no unit
 *   OPT_BOOL       bool                --x, --no-x, or x = yes|no|true|false|on|off|1|0
 *   OPT_ENUM       int, index          one of choices
 *   OPT_LIST       struct opt_list     any text; each use adds one
 *   OPT_OPERANDS   struct opt_list     what stands on the command line without a name
 *   OPT_GROUP      -                   no option: a heading, its name is the text
 *
 * Later beats earlier: default, configuration file (--config FILE or BATON_CONFIG), environment
 * (BATON_<NAME>, then BATON_<PROGRAM>_<NAME>; the program baton-router is ROUTER; an empty variable
 * counts as not set), command line. A list is split at commas in the environment and in the file,
 * where quotes keep them ("a,b" is one); on the command line they are text. A list given by a later
 * source replaces that of an earlier one. The options --help, --version, --config, --print-man and
 * --print-completion are there by themselves.
 */
enum opt_kind {
    OPT_GROUP,
    OPT_STRING,
    OPT_INT,
    OPT_REAL,
    OPT_SIZE,
    OPT_DURATION,
    OPT_BOOL,
    OPT_ENUM,
    OPT_LIST,
    OPT_OPERANDS,
};

struct opt_list {
    char **items;
    size_t n;
};

struct opt_spec {
    enum opt_kind kind;
    const char *name;           /* lower case with hyphens: "http-port" */
    const char *value;          /* how help names the value: "PORT"; NULL: by kind */
    const char *initial;        /* default, as a user would write it; NULL: zero or NULL */
    const char *help;           /* a sentence or several */
    const char *const *choices; /* OPT_ENUM: NULL at the end */
    size_t offset;              /* offsetof(struct ..., field) */
    int64_t min, max;           /* INT, REAL, SIZE (bytes), DURATION (ns); both 0: no bound */
    bool required;              /* must be given by some source */
};

struct opt_program {
    const char *name;        /* "baton-router" */
    const char *version;     /* "0.1.0" */
    const char *summary;     /* one line, lower case, without full stop */
    const char *description; /* paragraphs for help and man page, "\n\n" between; may be NULL */
    const struct opt_spec *specs;
    size_t n_specs;
};

/*
 * Fills values, which need not be initialised. STATUS_OK with *ret_exit false: run with them.
 * STATUS_OK with *ret_exit true: --help or the like was answered on standard output; exit 0.
 * STATUS_INVALID: err says which option, what is wrong and what would be right; exit 2.
 * STATUS_SYSTEM: the configuration file can't be read. In every case opts_free is legal after it.
 * A table that contradicts itself (a bad default, a name twice) is our own bug and asserted.
 */
enum status opts_parse(const struct opt_program *program, int argc, char *const *argv, void *values,
                       bool *ret_exit, struct error *err) must_check;

/* Releases the strings and lists in values and clears those fields. */
void opts_free(const struct opt_program *program, void *values);

/* The main() idiom: parses, prints an error as "<program>: <text>", exits itself when it should. */
void opts_parse_or_exit(const struct opt_program *program, int argc, char *const *argv,
                        void *values);

/* What --help, --print-man (scdoc source) and --print-completion (bash) print. */
void opts_write_help(const struct opt_program *program, struct buf *out);
void opts_write_man(const struct opt_program *program, struct buf *out);
void opts_write_completion(const struct opt_program *program, struct buf *out);

/* The values as a configuration file that opts_parse reads back to the same values. */
void opts_write_config(const struct opt_program *program, const void *values, struct buf *out);

/* One size or duration in the notation above; for values that come from elsewhere. */
enum status opts_parse_size(const char *text, uint64_t *ret_bytes, struct error *err) must_check;
enum status opts_parse_duration(const char *text, uint64_t *ret_ns, struct error *err) must_check;

#endif
