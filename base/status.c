#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/*
 * Names of the results, and the one way to write down why something failed. A switch without a
 * default makes the compiler name a value that was added and forgotten here.
 */

const char *status_name(enum status status)
{
    switch (status) {
    case STATUS_OK:
        return "ok";
    case STATUS_PENDING:
        return "pending";
    case STATUS_INVALID:
        return "invalid";
    case STATUS_EXHAUSTED:
        return "exhausted";
    case STATUS_NOT_FOUND:
        return "not_found";
    case STATUS_EXISTS:
        return "exists";
    case STATUS_UNSUPPORTED:
        return "unsupported";
    case STATUS_SYSTEM:
        return "system";
    case STATUS_CORRUPT:
        return "corrupt";
    case STATUS_TOO_LARGE:
        return "too_large";
    case STATUS_CANCELLED:
        return "cancelled";
    case STATUS_DEADLINE:
        return "deadline";
    case STATUS_CHECKSUM:
        return "checksum";
    case STATUS_PREEMPTED:
        return "preempted";
    case STATUS_PEER_LOST:
        return "peer_lost";
    case STATUS_PEER_REFUSED:
        return "peer_refused";
    case STATUS_STALLED:
        return "stalled";
    case STATUS_DRAINING:
        return "draining";
    case STATUS_FATAL:
        return "fatal";
    }
    return "unknown";
}

enum status error_set(struct error *err, enum status status, const char *format, ...)
{
    if (err == NULL) {
        return status;
    }
    /* Formatted apart first: the arguments may be the old text. */
    char text[sizeof(err->text)];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n < 0) {
        text[0] = '\0';
    } else if ((size_t)n >= sizeof(text)) {
        /* Cut before the lead byte of the character that no longer fits whole. */
        size_t end = sizeof(text) - 1;
        size_t lead = end;
        while (lead > 0 && end - lead < 4 && ((unsigned char)text[lead - 1] & 0xc0) == 0x80) {
            lead--;
        }
        if (lead > 0 && (unsigned char)text[lead - 1] >= 0xc0) {
            unsigned char c = (unsigned char)text[lead - 1];
            size_t need = c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : 2;
            if (end - (lead - 1) < need) {
                end = lead - 1;
            }
        }
        text[end] = '\0';
    }
    memcpy(err->text, text, strlen(text) + 1);
    return status;
}
