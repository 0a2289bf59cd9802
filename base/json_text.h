#ifndef BATON_BASE_JSON_TEXT_H
#define BATON_BASE_JSON_TEXT_H

#include <stddef.h>

#include "base/buf.h"

/* How single values are spelled; shared by json.c and json_write.c, and of no use to others. */

/* The string with its quotes, escaped; bytes that are not UTF-8 become U+FFFD. */
void json_text_string(struct buf *out, const char *text, size_t bytes);

/* A finite double as Python's repr: shortest digits that read back, 1.0, 1e+16, 1e-05. */
void json_text_real(struct buf *out, double value);

/* The same for a float: shortest digits that read back as the same float. */
void json_text_float(struct buf *out, float value);

#endif
