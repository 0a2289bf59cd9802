#ifndef BATON_BASE_OPTS_VALUE_H
#define BATON_BASE_OPTS_VALUE_H

#include "base/opts.h"

/* One value of one option: text to field and back. Shared by the files of base/opts; no others. */

/*
 * Reads text into the field, replacing what it holds (a list gets one more item). where begins the
 * error text: "--http-port", "BATON_HTTP_PORT", "router.conf:3: http-port".
 */
enum status opts_value_set(const struct opt_spec *spec, void *values, const char *text,
                           const char *where, struct error *err) must_check;

/* Empties the field: releases what it holds and makes it zero. */
void opts_value_clear(const struct opt_spec *spec, void *values);

/* What help calls the value: the spec's own name for it, or one by its kind. */
const char *opts_value_name(const struct opt_spec *spec);

/* Appends "1 to 65535" in the notation of the kind; nothing when there is no bound. */
void opts_value_range(const struct opt_spec *spec, struct buf *out);

/* Appends a size or a duration so that it reads back exactly. */
void opts_value_size(uint64_t bytes, struct buf *out);
void opts_value_duration(uint64_t ns, struct buf *out);

/* Appends one scalar field (not a list) as it would be written in a configuration file. */
void opts_value_text(const struct opt_spec *spec, const void *values, struct buf *out);

/* The text in double quotes with its escapes, as the configuration file reads it. */
void opts_value_quote(const char *text, struct buf *out);

#endif
