/* See cancels.h. Owns an entry for each Cancel that waits for its Drained, by link and transfer.
 *
 * What was made is an upper bound where other prompts are computed meanwhile: the engine's counter
 * is one for all.
 */
#include "prefill/cancels.h"

#include <string.h>

#include "base/hmap.h"
#include "base/loop.h"
#include "base/mem.h"
#include "base/metrics.h"
#include "node/node.h"

struct cancel {
    uint64_t came_ns, progress;
};

struct key {
    uint64_t client, transfer;
};

struct cancels {
    const struct node *node;
    struct hmap *waiting;
    struct metric_histogram *seconds, *progress;
};

static const double seconds_bounds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
                                        0.1,   0.25,   0.5,   1,    2.5,   10};
static const double progress_bounds[] = {0, 1, 2, 4, 8, 16, 32, 64, 128, 1024};

#define N(bounds) (sizeof(bounds) / sizeof((bounds)[0]))

static struct key key_of(const void *client, uint64_t transfer)
{
    return (struct key){(uint64_t)(uintptr_t)client, transfer};
}

struct cancels *cancels_create(const struct node *node, struct metrics *metrics)
{
    struct cancels *cancels = mem_zalloc(sizeof(*cancels));
    cancels->node = node;
    cancels->waiting = hmap_create();
    cancels->seconds = metrics_histogram(
        metrics, "baton_cancel_seconds",
        "From a transfer's Cancel until all that it held was free and its Drained was said.",
        seconds_bounds, N(seconds_bounds), METRIC_NO_LABELS);
    cancels->progress =
        metrics_histogram(metrics, "baton_cancel_progress",
                          "The engine's progress between a transfer's Cancel and its Drained, "
                          "other prompts' with it; two a layer.",
                          progress_bounds, N(progress_bounds), METRIC_NO_LABELS);
    return cancels;
}

void cancels_free(struct cancels *cancels)
{
    if (!cancels) {
        return;
    }
    size_t at = 0;
    void *value;
    while (hmap_next(cancels->waiting, &at, NULL, NULL, &value)) {
        mem_free(value);
    }
    hmap_free(cancels->waiting);
    mem_free(cancels);
}

void cancels_came(struct cancels *cancels, const void *client, uint64_t transfer, uint64_t came_ns)
{
    struct key key = key_of(client, transfer);
    if (hmap_get(cancels->waiting, &key, sizeof(key))) {
        return;
    }
    struct cancel *cancel = mem_alloc(sizeof(*cancel));
    *cancel = (struct cancel){came_ns, node_progress(cancels->node)};
    hmap_put(cancels->waiting, &key, sizeof(key), cancel);
}

void cancels_drained(struct cancels *cancels, const void *client, uint64_t transfer)
{
    struct key key = key_of(client, transfer);
    struct cancel *cancel = hmap_remove(cancels->waiting, &key, sizeof(key));
    if (cancel) {
        metric_histogram_observe(cancels->seconds,
                                 (double)(loop_now_ns() - cancel->came_ns) * 1e-9);
        metric_histogram_observe(cancels->progress,
                                 (double)(node_progress(cancels->node) - cancel->progress));
        mem_free(cancel);
    }
}

void cancels_forget(struct cancels *cancels, const void *client)
{
    size_t at = 0;
    const void *key_bytes;
    void *value;
    while (hmap_next(cancels->waiting, &at, &key_bytes, NULL, &value)) {
        struct key key;
        memcpy(&key, key_bytes, sizeof(key));
        if (key.client == (uint64_t)(uintptr_t)client) {
            hmap_remove(cancels->waiting, &key, sizeof(key));
            mem_free(value);
        }
    }
}
