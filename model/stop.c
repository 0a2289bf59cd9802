/*
 * At most sixteen strings of at most a kilobyte, so no automaton: a first-byte table finds where
 * one may start, and only what lies behind the earliest such start is held back.
 */
#include "model/stop.h"

#include <string.h>

#include "base/mem.h"

struct stop {
    size_t n;
    char *text[STOP_MAX_STRINGS];
    size_t bytes[STOP_MAX_STRINGS];
    bool starts[256]; /* bytes that a string starts with */
    bool is_found;
    struct buf held;
};

enum status stop_create(const char *const *strings, const size_t *bytes, size_t n,
                        struct stop **ret, struct error *err)
{
    if (n > STOP_MAX_STRINGS) {
        return error_set(err, STATUS_INVALID, "at most %d stop strings, not %zu", STOP_MAX_STRINGS,
                         n);
    }
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == 0 || bytes[i] > STOP_MAX_BYTES) {
            return error_set(err, STATUS_INVALID, "a stop string has 1 to %d bytes, not %zu",
                             STOP_MAX_BYTES, bytes[i]);
        }
    }
    struct stop *stop = mem_zalloc(sizeof(*stop));
    stop->n = n;
    for (size_t i = 0; i < n; i++) {
        stop->text[i] = mem_strndup(strings[i], bytes[i]);
        stop->bytes[i] = bytes[i];
        stop->starts[(uint8_t)strings[i][0]] = true;
    }
    *ret = stop;
    return STATUS_OK;
}

void stop_free(struct stop *stop)
{
    if (stop == NULL) {
        return;
    }
    for (size_t i = 0; i < stop->n; i++) {
        mem_free(stop->text[i]);
    }
    buf_fini(&stop->held);
    mem_free(stop);
}

/*
 * The match in the held text that ends first, and of those the one that starts first. Returns
 * false, and how much of the text no string can start in, when there is none.
 */
static bool find_match(const struct stop *stop, size_t *ret_safe)
{
    const struct buf *held = &stop->held;
    size_t safe = held->bytes, match_end = SIZE_MAX, match_at = 0;
    for (size_t at = 0; at < held->bytes; at++) {
        size_t left = held->bytes - at;
        if (!stop->starts[held->data[at]]) {
            continue;
        }
        for (size_t i = 0; i < stop->n; i++) {
            size_t n = stop->bytes[i] < left ? stop->bytes[i] : left;
            if (memcmp(held->data + at, stop->text[i], n) != 0) {
                continue;
            }
            safe = at < safe ? at : safe;
            if (n == stop->bytes[i] && at + n < match_end) {
                match_end = at + n;
                match_at = at;
            }
        }
    }
    *ret_safe = match_end != SIZE_MAX ? match_at : safe;
    return match_end != SIZE_MAX;
}

bool stop_push(struct stop *stop, const char *text, size_t bytes, struct buf *out)
{
    if (stop->is_found) {
        return true;
    }
    if (stop->n == 0) {
        buf_append(out, text, bytes);
        return false;
    }
    size_t safe;
    buf_append(&stop->held, text, bytes);
    stop->is_found = find_match(stop, &safe);
    buf_append(out, stop->held.data, safe);
    buf_consume(&stop->held, safe);
    if (stop->is_found) {
        buf_clear(&stop->held);
    }
    return stop->is_found;
}

void stop_finish(struct stop *stop, struct buf *out)
{
    if (!stop->is_found) {
        buf_append(out, stop->held.data, stop->held.bytes);
    }
    buf_clear(&stop->held);
}

bool stop_found(const struct stop *stop)
{
    return stop->is_found;
}
