/* Logits to a token on the host: see kernels/sample.h. What survives the cuts is defined by a total
 * order, so it can't depend on how it was found. A sampled draw costs a pass for the maximum, one
 * for the weights, and a sort of what top_k leaves only where top_k or top_p is set: a few hundred
 * microseconds at 129,280 ids. */
#include "kernels/sample.h"

#include <math.h>
#include <string.h>

uint32_t sample_best(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    float most = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (logits[i] > most) {
            most = logits[i];
            best = i;
        }
    }
    return best;
}

/* Strict order: larger value first, then the lower id. */
static bool before(const float *values, uint32_t a, uint32_t b)
{
    return values[a] > values[b] || (values[a] == values[b] && a < b);
}

static void sift_down(const float *values, uint32_t *heap, uint32_t n, uint32_t at)
{
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= n) {
            return;
        }
        if (child + 1 < n && before(values, heap[child], heap[child + 1])) {
            child++;
        }
        if (before(values, heap[child], heap[at])) {
            return;
        }
        uint32_t held = heap[at];
        heap[at] = heap[child];
        heap[child] = held;
        at = child;
    }
}

/* A heap whose root is the last of those kept. */
uint32_t sample_top(const float *values, uint32_t n, uint32_t k, uint32_t *ids)
{
    if (k > n) {
        k = n;
    }
    for (uint32_t i = 0; i < k; i++) {
        ids[i] = i;
    }
    for (uint32_t i = k / 2; i-- > 0;) {
        sift_down(values, ids, k, i);
    }
    for (uint32_t i = k; i < n && k > 0; i++) {
        if (before(values, i, ids[0])) {
            ids[0] = i;
            sift_down(values, ids, k, 0);
        }
    }
    for (uint32_t left = k; left-- > 1;) {
        uint32_t held = ids[0];
        ids[0] = ids[left];
        ids[left] = held;
        sift_down(values, ids, left, 0);
    }
    return k;
}

/* Cuts by top_k and top_p: marks survivors in keep. */
static void cut(const float *weights, uint32_t n, const struct ops_draw *draw, uint32_t *sorted,
                uint8_t *keep)
{
    uint32_t k = draw->top_k > 0 && (uint32_t)draw->top_k < n ? (uint32_t)draw->top_k : n;
    if (k == n && !(draw->top_p < 1)) {
        memset(keep, 1, n);
        return;
    }
    uint32_t n_sorted = sample_top(weights, n, k, sorted);
    uint64_t total = 0, sum = 0;
    for (uint32_t i = 0; i < n_sorted; i++) {
        total += sample_units(weights[sorted[i]]);
    }
    memset(keep, 0, n);
    for (uint32_t i = 0; i < n_sorted; i++) {
        keep[sorted[i]] = 1;
        sum += sample_units(weights[sorted[i]]);
        if (draw->top_p < 1 && sample_enough(sum, draw->top_p, total)) {
            break;
        }
    }
}

uint32_t sample_draw(float *logits, uint32_t n, const struct ops_draw *draw, uint64_t position,
                     uint32_t *sorted, uint8_t *keep)
{
    uint32_t best = sample_best(logits, n);
    float top = logits[best], *weights = logits;
    if (draw->temperature <= 0 || !sample_is_finite(top)) {
        return best;
    }
    for (uint32_t i = 0; i < n; i++) {
        weights[i] = sample_weight(weights[i], top, draw->temperature);
    }
    cut(weights, n, draw, sorted, keep);
    uint64_t total = 0, sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        keep[i] = keep[i] && !(weights[i] < draw->min_p);
        total += keep[i] ? sample_units(weights[i]) : 0;
    }
    uint64_t target = sample_target(draw->seed, position, total);
    for (uint32_t i = 0; i < n; i++) {
        sum += keep[i] ? sample_units(weights[i]) : 0;
        if (sum > target) {
            return i;
        }
    }
    return best; /* min_p above 1 leaves nothing */
}
