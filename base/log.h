#ifndef BATON_BASE_LOG_H
#define BATON_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

/*
 * Log lines on standard error, one write() a line, so that lines of several threads and processes
 * never mix. Levels are by volume: error and warn (something a person may act on), info (per
 * lifecycle event), debug (per request), trace (per step). The arguments of a line below the level
 * are not evaluated. Prose is lower case, values bare, errno's text at the end by %m. Text from
 * peers and clients may be passed as an argument: control bytes are written as \xNN.
 */

enum log_level {
    LOG_LEVEL_ERROR,
    LOG_LEVEL_WARN,
    LOG_LEVEL_INFO,
    LOG_LEVEL_DEBUG,
    LOG_LEVEL_TRACE
};

/* Names in the order of enum log_level, NULL at the end: the choices of a --log-level option. */
extern const char *const log_level_names[];

/*
 * Sets level, form (text, or one JSON object a line) and a prefix that every line bears, such as
 * "decode-0"; prefix is copied and may be NULL. Before the first call: info, text, no prefix. Call
 * it before other threads run.
 */
void log_init(enum log_level level, bool json, const char *prefix);

/* Changes the level alone; any thread. */
void log_set_level(enum log_level level);

/* The level now. */
enum log_level log_level_now(void);

/* Whether a line of this level would be written; for work done only to be logged. */
#define log_enabled(level) ((level) <= log_level_now())

/*
 * Writes one line of at most 4 KiB (the rest is cut and marked). component is a short static word.
 * Use the macros below. Keeps errno. Any thread.
 */
void log_write(enum log_level level, const char *component, const char *format, ...)
    PRINTF_LIKE(3, 4);

#define log_at(level, component, ...)                     \
    do {                                                  \
        if (log_enabled(level)) {                         \
            log_write((level), (component), __VA_ARGS__); \
        }                                                 \
    } while (0)

#define log_error(component, ...) log_at(LOG_LEVEL_ERROR, component, __VA_ARGS__)
#define log_warn(component, ...) log_at(LOG_LEVEL_WARN, component, __VA_ARGS__)
#define log_info(component, ...) log_at(LOG_LEVEL_INFO, component, __VA_ARGS__)
#define log_debug(component, ...) log_at(LOG_LEVEL_DEBUG, component, __VA_ARGS__)
#define log_trace(component, ...) log_at(LOG_LEVEL_TRACE, component, __VA_ARGS__)

/*
 * Formats one line as log_write would write it at wall-clock time unix_ns, newline included, into
 * out (terminated when out_bytes > 0); returns the bytes of the line. What the tests read.
 */
size_t log_format(char *out, size_t out_bytes, bool json, const char *prefix, long long unix_ns,
                  enum log_level level, const char *component, const char *text);

#endif
