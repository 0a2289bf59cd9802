#include "base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/utf8.h"

/*
 * Log lines. A line is made whole on the stack and written by one write(), so there is no lock and
 * no allocation, and lines of many processes on one pipe stay whole (PIPE_BUF is 4096). What the
 * pipe does not take is lost and counted rather than waited for: a log must not stall a stream, and
 * a reader that stands still, or a full disk, must not stop a process.
 */

enum {
    LINE_MAX_BYTES = 4096, /* PIPE_BUF on Linux: longer writes may interleave */
    TEXT_MAX_BYTES = 3072, /* leaves room for time, prefix and escapes */
};

const char *const log_level_names[] = {"error", "warn", "info", "debug", "trace", NULL};

static struct {
    _Atomic int level;
    bool json;
    char prefix[64];
} state = {.level = LOG_LEVEL_INFO};

void log_init(enum log_level level, bool json, const char *prefix)
{
    atomic_store_explicit(&state.level, (int)level, memory_order_relaxed);
    state.json = json;
    snprintf(state.prefix, sizeof(state.prefix), "%s", prefix ? prefix : "");
}

void log_set_level(enum log_level level)
{
    atomic_store_explicit(&state.level, (int)level, memory_order_relaxed);
}

enum log_level log_level_now(void)
{
    return (enum log_level)atomic_load_explicit(&state.level, memory_order_relaxed);
}

/* A line being made: what does not fit is dropped, the last byte is kept for the newline. */
struct line {
    char *out;
    size_t capacity, bytes;
};

static void line_put(struct line *line, const char *text, size_t bytes)
{
    for (size_t i = 0; i < bytes && line->bytes + 1 < line->capacity; i++) {
        line->out[line->bytes++] = text[i];
    }
}

static void line_text(struct line *line, const char *text)
{
    line_put(line, text, strlen(text));
}

/* Puts all of the text or none of it: a cut must leave no half escape or half character. */
static void line_whole(struct line *line, const char *text, size_t bytes)
{
    if (line->capacity - line->bytes > bytes) {
        line_put(line, text, bytes);
    } else {
        line->capacity = line->bytes + 1;
    }
}

/*
 * Control bytes would let a peer forge lines or drive a terminal; JSON also needs its quotes, and
 * bytes that are UTF-8.
 */
static void line_escaped(struct line *line, const char *text, bool json)
{
    size_t bytes = strlen(text), n;
    for (size_t i = 0; i < bytes; i += n) {
        unsigned char c = (unsigned char)text[i];
        char escape[8];
        n = utf8_next(text + i, bytes - i, NULL);
        if (json && (c == '"' || c == '\\')) {
            line_whole(line, (const char[]){'\\', (char)c}, 2);
        } else if (n == 0 || c < 0x20 || c == 0x7f) {
            if (json && n == 0) {
                line_whole(line, "\xef\xbf\xbd", 3);
            } else {
                int m = snprintf(escape, sizeof(escape), json ? "\\u%04x" : "\\x%02x", c);
                line_whole(line, escape, (size_t)m);
            }
            n = n ? n : 1;
        } else {
            line_whole(line, text + i, n);
        }
    }
}

static void line_time(struct line *line, long long unix_ns)
{
    time_t seconds = (time_t)(unix_ns / 1000000000LL);
    struct tm tm;
    char text[64];
    gmtime_r(&seconds, &tm);
    size_t n = strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &tm);
    line_put(line, text, n);
    int m = snprintf(text, sizeof(text), ".%06lldZ", unix_ns % 1000000000LL / 1000);
    line_put(line, text, (size_t)m);
}

size_t log_format(char *out, size_t out_bytes, bool json, const char *prefix, long long unix_ns,
                  enum log_level level, const char *component, const char *text)
{
    /* Room is kept for the tail, so that a cut line still ends as a line (or as an object). */
    const char *tail = json ? "\"}\n" : "\n";
    size_t tail_bytes = strlen(tail);
    if (out_bytes < tail_bytes + 2) {
        if (out_bytes > 0) {
            out[0] = '\0';
        }
        return 0;
    }
    struct line line = {.out = out, .capacity = out_bytes - tail_bytes};
    bool has_prefix = prefix != NULL && prefix[0] != '\0';
    line_text(&line, json ? "{\"time\":\"" : "");
    line_time(&line, unix_ns);
    line_text(&line, json ? "\",\"level\":\"" : " ");
    line_text(&line, log_level_names[level]);
    line_text(&line, json ? "\"" : " ");
    if (has_prefix) {
        line_text(&line, json ? ",\"node\":\"" : "");
        line_escaped(&line, prefix, json);
        line_text(&line, json ? "\"" : " ");
    }
    line_text(&line, json ? ",\"component\":\"" : "");
    line_escaped(&line, component, json);
    line_text(&line, json ? "\",\"text\":\"" : ": ");
    line_escaped(&line, text, json);
    line.capacity = out_bytes;
    line_put(&line, tail, tail_bytes);
    out[line.bytes] = '\0';
    return line.bytes;
}

/* A pipe that poll calls writable takes PIPE_BUF bytes at once, so this write does not wait, unless
 * another process fills the same pipe between the two calls. */
static void line_write(const char *out, size_t bytes)
{
    static _Atomic uint64_t n_lost;
    struct pollfd to = {.fd = STDERR_FILENO, .events = POLLOUT};
    char text[80];
    uint64_t lost = atomic_load_explicit(&n_lost, memory_order_relaxed);
    if (poll(&to, 1, 0) != 1 || !(to.revents & POLLOUT)) {
        atomic_fetch_add_explicit(&n_lost, 1, memory_order_relaxed);
        return;
    }
    if (lost && atomic_compare_exchange_strong(&n_lost, &lost, 0)) {
        int n = snprintf(text, sizeof(text), "log: %" PRIu64 " lines could not be written\n", lost);
        struct iovec parts[] = {{text, (size_t)n}, {(void *)(uintptr_t)out, bytes}};
        bool fits = (size_t)n + bytes <= LINE_MAX_BYTES; /* else the count goes alone */
        if (writev(STDERR_FILENO, parts, fits ? 2 : 1) < 0) {
            atomic_fetch_add_explicit(&n_lost, lost + 1, memory_order_relaxed);
        }
        return;
    }
    ssize_t done;
    do {
        done = write(STDERR_FILENO, out, bytes);
    } while (done < 0 && errno == EINTR);
    if (done < 0) {
        atomic_fetch_add_explicit(&n_lost, 1, memory_order_relaxed);
    }
}

void log_write(enum log_level level, const char *component, const char *format, ...)
{
    int saved = errno;
    char text[TEXT_MAX_BYTES], out[LINE_MAX_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n >= (int)sizeof(text)) {
        memcpy(text + sizeof(text) - 4, "...", 4);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    size_t bytes = log_format(out, sizeof(out), state.json, state.prefix,
                              now.tv_sec * 1000000000LL + now.tv_nsec, level, component, text);
    line_write(out, bytes);
    errno = saved;
}
