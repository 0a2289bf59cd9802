#include "base/metrics.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/hmap.h"
#include "base/json_text.h"
#include "base/list.h"
#include "base/mem.h"
#include "base/utf8.h"

/*
 * A family is a name with its kind, help and bounds; a sample is one set of labels in it, spelled
 * once when it is registered. The spelling, with labels sorted by name, is also its identity, so
 * the same labels in another order are the same sample. Values are single relaxed atomics: a
 * reading is exact for each number, and a histogram's count is the sum of the buckets read, so
 * that its lines always agree with one another.
 */

enum {
    LABELS_MAX = 8,
    /* A label value is a name; a peer that sends a novel should not fill every scrape with it. */
    LABEL_VALUE_MAX_BYTES = 128,
};

enum kind { COUNTER, GAUGE, HISTOGRAM };

static const char *const kind_names[] = {"counter", "gauge", "histogram"};

const double metrics_seconds_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                         1,     2.5,    5,     10,   30,    60,   120, 300};
const size_t metrics_seconds_n_bounds =
    sizeof(metrics_seconds_bounds) / sizeof(metrics_seconds_bounds[0]);

struct metric_counter {
    _Atomic uint64_t n;
};

struct metric_gauge {
    _Atomic double value;
};

struct metric_histogram {
    const double *bounds; /* of the family */
    size_t n_bounds;
    _Atomic uint64_t *buckets; /* n_bounds + 1, not cumulative */
    _Atomic double sum;
};

struct sample {
    struct list link;
    char *labels; /* a="b",c="d" without braces; "" for none */
    metric_value_fn fn;
    void *cookie;
    struct metric_counter counter;
    struct metric_gauge gauge;
    struct metric_histogram histogram;
};

struct family {
    struct list link;
    struct list samples;
    struct hmap *by_labels;
    char *name, *help;
    enum kind kind;
    double *bounds;
    size_t n_bounds;
};

struct metrics {
    struct list families;
    struct hmap *by_name;
};

struct metrics *metrics_create(void)
{
    struct metrics *metrics = mem_zalloc(sizeof(*metrics));
    list_init(&metrics->families);
    metrics->by_name = hmap_create();
    return metrics;
}

static void sample_free(struct sample *sample)
{
    list_remove(&sample->link);
    mem_free(sample->histogram.buckets);
    mem_free(sample->labels);
    mem_free(sample);
}

void metrics_free(struct metrics *metrics)
{
    if (metrics == NULL) {
        return;
    }
    list_for_each_safe(f, &metrics->families)
    {
        struct family *family = list_entry(f, struct family, link);
        list_for_each_safe(s, &family->samples)
        {
            sample_free(list_entry(s, struct sample, link));
        }
        hmap_free(family->by_labels);
        mem_free(family->bounds);
        mem_free(family->name);
        mem_free(family->help);
        mem_free(family);
    }
    hmap_free(metrics->by_name);
    mem_free(metrics);
}

/* ---- names ---- */

static bool name_valid(const char *name, bool colon)
{
    if (!isalpha((unsigned char)name[0]) && name[0] != '_') {
        return false;
    }
    for (const char *p = name; *p != '\0'; p++) {
        if (!isalnum((unsigned char)*p) && *p != '_' && !(colon && *p == ':')) {
            return false;
        }
    }
    return true;
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static void check_name(const char *name, const char *help, enum kind kind)
{
    assert(name_valid(name, true) && "a metric name is [a-zA-Z_:][a-zA-Z0-9_:]*");
    assert(ends_with(name, "_total") == (kind == COUNTER) &&
           "counters and only they end in _total");
    assert(!ends_with(name, "_bucket") && !ends_with(name, "_sum") && !ends_with(name, "_count") &&
           "these endings belong to histograms");
    assert(help != NULL && help[0] != '\0');
}

static int label_order(const void *a, const void *b)
{
    return strcmp(((const struct metric_label *)a)->name, ((const struct metric_label *)b)->name);
}

static void append_label_value(struct buf *out, const char *value)
{
    size_t bytes = strlen(value);
    size_t end = bytes > LABEL_VALUE_MAX_BYTES ? LABEL_VALUE_MAX_BYTES : bytes;
    for (size_t i = 0; i < end;) {
        size_t n = utf8_next(value + i, bytes - i, NULL);
        if (n == 0) {
            buf_append_text(out, "\xef\xbf\xbd");
            i++;
            continue;
        }
        if (i + n > end) {
            break;
        }
        if (value[i] == '\\' || value[i] == '"') {
            buf_append_byte(out, '\\');
        }
        if (value[i] == '\n') {
            buf_append_text(out, "\\n");
        } else {
            buf_append(out, value + i, n);
        }
        i += n;
    }
}

/* One pair as it stands in a line; also how metrics_forget finds a label again. */
static char *spell_label(const char *name, const char *value)
{
    struct buf out = BUF_INIT;
    buf_printf(&out, "%s=\"", name);
    append_label_value(&out, value);
    buf_append_byte(&out, '"');
    return buf_take(&out, NULL);
}

static char *spell_labels(const struct metric_label *labels, size_t n_labels)
{
    assert(n_labels <= LABELS_MAX);
    struct metric_label sorted[LABELS_MAX];
    struct buf out = BUF_INIT;
    if (n_labels > 0) {
        memcpy(sorted, labels, n_labels * sizeof(sorted[0]));
        qsort(sorted, n_labels, sizeof(sorted[0]), label_order);
    }
    for (size_t i = 0; i < n_labels; i++) {
        assert(name_valid(sorted[i].name, false) && strncmp(sorted[i].name, "__", 2) != 0);
        assert(strcmp(sorted[i].name, "le") != 0 && "le belongs to histograms");
        assert((i == 0 || strcmp(sorted[i - 1].name, sorted[i].name) != 0) && "a label twice");
        char *text = spell_label(sorted[i].name, sorted[i].value);
        buf_printf(&out, "%s%s", i > 0 ? "," : "", text);
        mem_free(text);
    }
    return buf_take(&out, NULL);
}

/* ---- registration ---- */

static struct family *family_get(struct metrics *metrics, const char *name, const char *help,
                                 enum kind kind, const double *bounds, size_t n_bounds)
{
    check_name(name, help, kind);
    struct family *family = hmap_get_text(metrics->by_name, name);
    if (family != NULL) {
        assert(family->kind == kind && strcmp(family->help, help) == 0);
        assert(family->n_bounds == n_bounds);
        assert(n_bounds == 0 || memcmp(family->bounds, bounds, n_bounds * sizeof(*bounds)) == 0);
        return family;
    }
    family = mem_zalloc(sizeof(*family));
    list_init(&family->samples);
    family->by_labels = hmap_create();
    family->name = mem_strdup(name);
    family->help = mem_strdup(help);
    family->kind = kind;
    family->n_bounds = n_bounds;
    family->bounds = mem_dup(bounds, n_bounds * sizeof(*bounds));
    for (size_t i = 0; i < n_bounds; i++) {
        assert(isfinite(bounds[i]) && (i == 0 || bounds[i] > bounds[i - 1]));
    }
    list_push_back(&metrics->families, &family->link);
    hmap_put_text(metrics->by_name, name, family);
    return family;
}

static struct sample *sample_get(struct family *family, const struct metric_label *labels,
                                 size_t n_labels)
{
    char *spelled = spell_labels(labels, n_labels);
    struct sample *sample = hmap_get_text(family->by_labels, spelled);
    if (sample != NULL) {
        mem_free(spelled);
        return sample;
    }
    sample = mem_zalloc(sizeof(*sample));
    sample->labels = spelled;
    if (family->kind == HISTOGRAM) {
        sample->histogram.bounds = family->bounds;
        sample->histogram.n_bounds = family->n_bounds;
        sample->histogram.buckets =
            mem_array(family->n_bounds + 1, sizeof(sample->histogram.buckets[0]));
    }
    list_push_back(&family->samples, &sample->link);
    hmap_put_text(family->by_labels, spelled, sample);
    return sample;
}

struct metric_counter *metrics_counter(struct metrics *metrics, const char *name, const char *help,
                                       const struct metric_label *labels, size_t n_labels)
{
    return &sample_get(family_get(metrics, name, help, COUNTER, NULL, 0), labels, n_labels)
                ->counter;
}

struct metric_gauge *metrics_gauge(struct metrics *metrics, const char *name, const char *help,
                                   const struct metric_label *labels, size_t n_labels)
{
    return &sample_get(family_get(metrics, name, help, GAUGE, NULL, 0), labels, n_labels)->gauge;
}

struct metric_histogram *metrics_histogram(struct metrics *metrics, const char *name,
                                           const char *help, const double *bounds, size_t n_bounds,
                                           const struct metric_label *labels, size_t n_labels)
{
    struct family *family = family_get(metrics, name, help, HISTOGRAM, bounds, n_bounds);
    return &sample_get(family, labels, n_labels)->histogram;
}

void metrics_gauge_call(struct metrics *metrics, const char *name, const char *help,
                        const struct metric_label *labels, size_t n_labels, metric_value_fn fn,
                        void *cookie)
{
    struct family *family = family_get(metrics, name, help, GAUGE, NULL, 0);
    struct sample *sample = sample_get(family, labels, n_labels);
    sample->fn = fn;
    sample->cookie = cookie;
}

void metrics_counter_call(struct metrics *metrics, const char *name, const char *help,
                          const struct metric_label *labels, size_t n_labels, metric_value_fn fn,
                          void *cookie)
{
    struct family *family = family_get(metrics, name, help, COUNTER, NULL, 0);
    struct sample *sample = sample_get(family, labels, n_labels);
    sample->fn = fn;
    sample->cookie = cookie;
}

/* Whether pair is one of the pairs in spelled; quotes inside values are escaped, so none fools. */
static bool has_pair(const char *spelled, const char *pair)
{
    size_t bytes = strlen(pair);
    const char *p = spelled;
    while (*p != '\0') {
        const char *end = strchr(p, '"') + 1;
        while (*end != '"') {
            end += *end == '\\' ? 2 : 1;
        }
        end++;
        if ((size_t)(end - p) == bytes && memcmp(p, pair, bytes) == 0) {
            return true;
        }
        p = *end == ',' ? end + 1 : end;
    }
    return false;
}

void metrics_forget(struct metrics *metrics, const char *label, const char *value)
{
    char *pair = spell_label(label, value);
    list_for_each(f, &metrics->families)
    {
        struct family *family = list_entry(f, struct family, link);
        list_for_each_safe(s, &family->samples)
        {
            struct sample *sample = list_entry(s, struct sample, link);
            if (has_pair(sample->labels, pair)) {
                hmap_remove_text(family->by_labels, sample->labels);
                sample_free(sample);
            }
        }
    }
    mem_free(pair);
}

/* ---- counting ---- */

static void atomic_add_double(_Atomic double *to, double difference)
{
    double old = atomic_load_explicit(to, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(to, &old, old + difference, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}

void metric_counter_add(struct metric_counter *counter, uint64_t n)
{
    atomic_fetch_add_explicit(&counter->n, n, memory_order_relaxed);
}

uint64_t metric_counter_value(const struct metric_counter *counter)
{
    return atomic_load_explicit(&counter->n, memory_order_relaxed);
}

void metric_gauge_set(struct metric_gauge *gauge, double value)
{
    atomic_store_explicit(&gauge->value, value, memory_order_relaxed);
}

void metric_gauge_add(struct metric_gauge *gauge, double difference)
{
    atomic_add_double(&gauge->value, difference);
}

double metric_gauge_value(const struct metric_gauge *gauge)
{
    return atomic_load_explicit(&gauge->value, memory_order_relaxed);
}

void metric_histogram_observe(struct metric_histogram *histogram, double value)
{
    size_t i = 0;
    /* A value that is no number counts above every bound and would spoil the sum for ever. */
    if (isnan(value)) {
        i = histogram->n_bounds;
        value = 0;
    }
    while (i < histogram->n_bounds && value > histogram->bounds[i]) {
        i++;
    }
    atomic_fetch_add_explicit(&histogram->buckets[i], 1, memory_order_relaxed);
    atomic_add_double(&histogram->sum, value);
}

/* ---- exposition ---- */

static void write_number(struct buf *out, double value)
{
    if (isnan(value)) {
        buf_append_text(out, "NaN");
    } else if (isinf(value)) {
        buf_append_text(out, value > 0 ? "+Inf" : "-Inf");
    } else if (value == floor(value) && fabs(value) < 1e15) {
        buf_printf(out, "%.0f", value);
    } else {
        json_text_real(out, value);
    }
}

static void write_help(struct buf *out, const char *help)
{
    for (const char *p = help; *p != '\0'; p++) {
        if (*p == '\\' || *p == '\n') {
            buf_append_text(out, *p == '\n' ? "\\n" : "\\\\");
        } else {
            buf_append_byte(out, (uint8_t)*p);
        }
    }
}

static void write_name(struct buf *out, const char *name, const char *suffix, const char *labels)
{
    buf_printf(out, labels[0] ? "%s%s{%s} " : "%s%s%s ", name, suffix, labels);
}

static void write_histogram(struct buf *out, const struct family *family,
                            const struct sample *sample)
{
    const struct metric_histogram *histogram = &sample->histogram;
    uint64_t total = 0;
    for (size_t i = 0; i <= histogram->n_bounds; i++) {
        total += atomic_load_explicit(&histogram->buckets[i], memory_order_relaxed);
        buf_printf(out, "%s_bucket{%s%sle=\"", family->name, sample->labels,
                   sample->labels[0] ? "," : "");
        write_number(out, i < histogram->n_bounds ? histogram->bounds[i] : INFINITY);
        buf_printf(out, "\"} %" PRIu64 "\n", total);
    }
    write_name(out, family->name, "_sum", sample->labels);
    write_number(out, atomic_load_explicit(&histogram->sum, memory_order_relaxed));
    buf_append_byte(out, '\n');
    write_name(out, family->name, "_count", sample->labels);
    buf_printf(out, "%" PRIu64 "\n", total);
}

static void write_sample(struct buf *out, const struct family *family, const struct sample *sample)
{
    if (family->kind == HISTOGRAM) {
        write_histogram(out, family, sample);
        return;
    }
    write_name(out, family->name, "", sample->labels);
    if (sample->fn != NULL) {
        write_number(out, sample->fn(sample->cookie));
    } else if (family->kind == COUNTER) {
        buf_printf(out, "%" PRIu64, metric_counter_value(&sample->counter));
    } else {
        write_number(out, metric_gauge_value(&sample->gauge));
    }
    buf_append_byte(out, '\n');
}

void metrics_write(const struct metrics *metrics, struct buf *out)
{
    list_for_each(f, &metrics->families)
    {
        const struct family *family = list_entry(f, struct family, link);
        if (list_empty(&family->samples)) {
            continue;
        }
        buf_printf(out, "# HELP %s ", family->name);
        write_help(out, family->help);
        buf_printf(out, "\n# TYPE %s %s\n", family->name, kind_names[family->kind]);
        list_for_each(s, &family->samples)
        {
            write_sample(out, family, list_entry(s, struct sample, link));
        }
    }
}
