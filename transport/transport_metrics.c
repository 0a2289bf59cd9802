/* transport/transport_metrics.c - the counters and gauges of a transport, in the process's
 * registry. */
#include "base/metrics.h"

#include "transport/thread.h"

static const struct {
    const char *name, *help;
    size_t offset; /* of a uint64_t in struct transport_stats */
} metrics_table[TRANSPORT_N_METRICS] = {
#define FIELD(name, help, field)                                               \
    {                                                                          \
        "baton_transport_" name, help, offsetof(struct transport_stats, field) \
    }
    FIELD("puts_submitted_total", "Puts accepted.", puts_submitted),
    FIELD("puts_done_total", "Puts flushed to the peer.", puts_done),
    FIELD("puts_failed_total", "Puts ended by the failure of their peer.", puts_failed),
    FIELD("puts_cancelled_total", "Puts ended early on request.", puts_cancelled),
    FIELD("submitted_bytes_total", "Bytes of accepted puts.", bytes_submitted),
    FIELD("done_bytes_total", "Bytes of flushed puts.", bytes_done),
    FIELD("posts_total", "Operations posted to UCX, after merging and cutting.", posts),
    FIELD("peers_connected_total", "Connections begun.", peers_connected),
    FIELD("peers_failed_total", "Peers lost.", peers_failed),
    FIELD("peers_stalled_total", "Peers lost because nothing completed for too long.",
          peers_stalled),
    FIELD("peers_closed_total", "Connections closed.", peers_closed),
    FIELD("in_flight_bytes", "Bytes posted and not completed.", bytes_in_flight),
    FIELD("puts", "Puts not ended.", puts_alive),
    FIELD("peers", "Connections not closed.", peers_alive),
    FIELD("region_bytes", "Memory registered.", region_bytes),
#undef FIELD
};

enum { FIRST_GAUGE = 11 };

static double metric_value(void *cookie)
{
    const struct transport_metric *metric = cookie;
    struct transport_stats stats;
    transport_stats(metric->transport, &stats);
    return (double)*(const uint64_t *)(const void *)((const char *)&stats +
                                                     metrics_table[metric->i].offset);
}

void transport_metrics(struct transport *t, struct metrics *metrics)
{
    for (size_t i = 0; i < TRANSPORT_N_METRICS; i++) {
        t->metrics[i] = (struct transport_metric){t, i};
        if (i < FIRST_GAUGE) {
            metrics_counter_call(metrics, metrics_table[i].name, metrics_table[i].help,
                                 METRIC_NO_LABELS, metric_value, &t->metrics[i]);
        } else {
            metrics_gauge_call(metrics, metrics_table[i].name, metrics_table[i].help,
                               METRIC_NO_LABELS, metric_value, &t->metrics[i]);
        }
    }
}
