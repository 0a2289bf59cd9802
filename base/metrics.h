#ifndef BATON_BASE_METRICS_H
#define BATON_BASE_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

/*
 * Counters, gauges and histograms, and their text exposition (Prometheus 0.0.4). A metric is one
 * sample (or one histogram): a name and a fixed set of labels, registered once at start or when a
 * peer joins. Registering, forgetting and writing belong to one thread (the loop); counting is
 * atomic and may be done by any thread. Names that break the rules, a name registered with another
 * kind, help or bounds, and a counter not ending in _total are our own bugs and asserted; label
 * values may be foreign (they are cut at 128 bytes, made valid UTF-8 and escaped).
 */
struct metrics;
struct metric_counter;
struct metric_gauge;
struct metric_histogram;

struct metric_label {
    const char *name, *value;
};

/* Labels as two arguments: metrics_counter(m, "x_total", "help", METRIC_LABELS({"side", "in"})). */
#define METRIC_LABELS(...)                      \
    (const struct metric_label[]){__VA_ARGS__}, \
        sizeof((const struct metric_label[]){__VA_ARGS__}) / sizeof(struct metric_label)
#define METRIC_NO_LABELS NULL, 0

struct metrics *metrics_create(void) __attribute__((returns_nonnull)) must_check;

/* Releases the registry and all that was registered; NULL is allowed. */
void metrics_free(struct metrics *metrics);

/*
 * Each returns the metric of this name and these labels, made now or, if there already, the same
 * one again: a sample never appears twice. It belongs to the registry. name, help and labels are
 * copied; at most 8 labels. help is one sentence without a unit of its own; units are in the name
 * (_seconds, _bytes).
 */
struct metric_counter *metrics_counter(struct metrics *metrics, const char *name, const char *help,
                                       const struct metric_label *labels, size_t n_labels)
    __attribute__((returns_nonnull));
struct metric_gauge *metrics_gauge(struct metrics *metrics, const char *name, const char *help,
                                   const struct metric_label *labels, size_t n_labels)
    __attribute__((returns_nonnull));

/* Upper bounds strictly increasing and finite, without +Inf, which is always added; copied. */
struct metric_histogram *metrics_histogram(struct metrics *metrics, const char *name,
                                           const char *help, const double *bounds, size_t n_bounds,
                                           const struct metric_label *labels, size_t n_labels)
    __attribute__((returns_nonnull));

/* Bounds for latencies in seconds, 1 ms to 5 minutes. */
extern const double metrics_seconds_bounds[];
extern const size_t metrics_seconds_n_bounds;

/*
 * A gauge or counter whose value is asked for when it is written. fn runs on the thread that
 * writes; cookie must outlive the registry. Registering it again replaces fn and cookie.
 */
typedef double (*metric_value_fn)(void *cookie);
void metrics_gauge_call(struct metrics *metrics, const char *name, const char *help,
                        const struct metric_label *labels, size_t n_labels, metric_value_fn fn,
                        void *cookie);
void metrics_counter_call(struct metrics *metrics, const char *name, const char *help,
                          const struct metric_label *labels, size_t n_labels, metric_value_fn fn,
                          void *cookie);

/* Removes and frees every metric that has this label value, for a peer that left. */
void metrics_forget(struct metrics *metrics, const char *label, const char *value);

/* Counting; any thread. */
void metric_counter_add(struct metric_counter *counter, uint64_t n);
uint64_t metric_counter_value(const struct metric_counter *counter);
void metric_gauge_set(struct metric_gauge *gauge, double value);
void metric_gauge_add(struct metric_gauge *gauge, double difference);
double metric_gauge_value(const struct metric_gauge *gauge);
void metric_histogram_observe(struct metric_histogram *histogram, double value);

/* Appends the whole exposition, families in order of first registration. */
void metrics_write(const struct metrics *metrics, struct buf *out);

/* The media type of what metrics_write makes. */
#define METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

#endif
