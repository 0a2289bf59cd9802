/* See graphs.h.
 *
 * A size is recorded in two passes over the same rows of no sequence: once done, so that whatever a
 * driver loads at a first use is loaded, then kept. What the device reads of a sequence it finds
 * where `replay` puts the rows of a step, so one recording serves any sequences at any length.
 *
 * Who waits for a step must not take a long one for a hang, nor wait for one: the recording tells
 * how far it is every few layers, each of which ticks, and the wait ends once nothing has come for
 * GRAPHS_STALL_NS.
 */
#include "engine/graphs.h"

#include <string.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "engine/engine.h"

/* An allowance: on an H200 graphs of V4-Flash took 2.9 KB a launch where they had 50 a layer, and 5
 * KB where they had 25, which is less for each layer. */
enum { EVERY = 32, LAYERS_A_SIGN = 4, LAUNCHES_A_LAYER = 52, LAUNCH_BYTES = 4096 };

const char *const engine_graphs_names[] = {"off", "on", "auto", NULL};

bool engine_graphs_wanted(int choice, const char *device)
{
    return choice == 1 || (choice == 2 && !strchr(device, ','));
}

bool graphs_are_here(const struct ops *ops)
{
    return ops->record_begin != NULL;
}

/* The size behind `size`: at most an eighth of the batch is filled up with. */
static uint64_t next_size(uint64_t size)
{
    uint64_t step = 1;
    while (size >= EVERY && 2 * step <= size / 8) {
        step *= 2;
    }
    return size + step;
}

uint32_t graphs_sizes(uint32_t max_rows, uint32_t *ret_sizes)
{
    uint32_t n = 0;
    uint64_t size = 0;
    while (size < max_rows) {
        size = size ? next_size(size) : 1;
        size = size < max_rows ? size : max_rows;
        if (ret_sizes) {
            ret_sizes[n] = (uint32_t)size;
        }
        n++;
    }
    return n;
}

uint64_t graphs_planned_bytes(uint32_t n_layers)
{
    return (uint64_t)n_layers * LAUNCHES_A_LAYER * LAUNCH_BYTES;
}

/* Rows [from, n) of the call become rows of no sequence. */
static void fill_up(struct graphs *g, uint32_t from, uint32_t n, uint32_t token)
{
    for (uint32_t i = from; i < n; i++) {
        g->seqs[i] = (struct ops_seq){.slot = OPS_NO_SLOT, .first_row = i, .n_rows = 1};
        g->tokens[i] = token; /* the same for all: they ask for the same experts */
        g->positions[i] = 0;
        g->seq_of[i] = i;
        g->draws[i] = (struct ops_draw){.is_drawn = 0};
    }
}

static struct ops_rows rows_of(const struct graphs *g, uint32_t n)
{
    return (struct ops_rows){.n_rows = n,
                             .n_seqs = n,
                             .tokens = g->tokens,
                             .positions = g->positions,
                             .seq_of = g->seq_of,
                             .seqs = g->seqs,
                             .draws = g->forward->logits ? g->draws : NULL};
}

/* While recording: a sign every few layers. */
struct signs {
    struct forward *forward;
    uint32_t told; /* layers */
    bool on;
};

static void layer_done(void *cookie, uint32_t n_layers)
{
    struct signs *signs = cookie;
    if (signs->on && n_layers >= signs->told + LAYERS_A_SIGN) {
        signs->told = n_layers;
        signs->forward->ops->record_progress(signs->forward->ranks[0].device, n_layers);
    }
}

static enum status ask(struct graphs *g, uint32_t n, const uint32_t *which, float *logits,
                       bool records)
{
    struct signs signs = {.forward = g->forward, .on = records};
    struct ops_rows rows = rows_of(g, n);
    enum status status = forward_run(g->forward, &rows, NULL, layer_done, &signs);
    if (!status && g->forward->logits) {
        forward_draw(g->forward, &rows, which);
    } else if (!status) {
        forward_ask_logits(g->forward, which, n, logits);
    }
    return status;
}

static enum status record_one(struct graphs *g, uint32_t n, const uint32_t *which, float *logits,
                              struct ops_recording *ret_recording, struct error *err)
{
    struct forward *f = g->forward;
    struct ops_device *devices[FORWARD_MAX_RANKS];
    for (uint32_t k = 0; k < f->n_ranks; k++) {
        devices[k] = f->ranks[k].device;
    }
    enum status status = ask(g, n, which, logits, false);
    status = status ? status : forward_wait(f, err);
    status = status ? status : f->ops->record_begin(devices, f->n_ranks, err);
    if (status) {
        return status;
    }
    enum status asked = ask(g, n, which, logits, true); /* without a cancel it can't fail */
    status = f->ops->record_end(devices, f->n_ranks, ret_recording, err);
    return status ? status : asked;
}

enum status graphs_record(struct graphs *g, struct forward *forward, uint32_t max_rows,
                          float *logits, void (*tick)(void *cookie), void *cookie,
                          struct error *err)
{
    uint32_t sizes[GRAPHS_MAX], n = graphs_sizes(max_rows, sizes);
    uint64_t begin_ns = loop_now_ns();
    *g = (struct graphs){.forward = forward};
    g->seqs = mem_array(max_rows, sizeof(*g->seqs));
    g->tokens = mem_array(max_rows, sizeof(*g->tokens));
    g->positions = mem_array(max_rows, sizeof(*g->positions));
    g->seq_of = mem_array(max_rows, sizeof(*g->seq_of));
    g->draws = mem_array(max_rows, sizeof(*g->draws));
    uint32_t *which = mem_array(max_rows, sizeof(*which));
    for (uint32_t i = 0; i < max_rows; i++) {
        which[i] = i;
    }
    fill_up(g, 0, max_rows, 0);
    enum status status = STATUS_OK;
    for (uint32_t i = 0; i < n && !status; i++) {
        status = record_one(g, sizes[i], which, logits, &g->recordings[i], err);
        if (!status) {
            g->bytes += g->recordings[i].bytes;
            g->n = i + 1;
        }
        tick(cookie);
    }
    mem_free(which);
    g->seconds = (double)(loop_now_ns() - begin_ns) * 1e-9;
    return status;
}

/* The smallest recording that holds n rows, of which there is one for the most that are asked for.
 */
static const struct ops_recording *recording_for(const struct graphs *g, uint32_t n)
{
    uint32_t i = n - 1 < EVERY ? n - 1 : EVERY - 1;
    while (g->recordings[i].n_rows < n) {
        i++;
    }
    return &g->recordings[i];
}

static void gather(const struct graphs *g, struct ops_device *devices[FORWARD_MAX_RANKS])
{
    for (uint32_t k = 0; k < g->forward->n_ranks; k++) {
        devices[k] = g->forward->ranks[k].device;
    }
}

void graphs_start(struct graphs *g, const struct ops_rows *rows)
{
    struct forward *f = g->forward;
    const struct ops_recording *recording = recording_for(g, rows->n_rows);
    struct ops_device *devices[FORWARD_MAX_RANKS];
    struct ops_rows filled = *rows;
    uint32_t n = recording->n_rows;
    gather(g, devices);
    if (n > rows->n_rows) {
        for (uint32_t i = 0; i < rows->n_rows; i++) {
            g->seqs[i] = rows->seqs[i];
            g->tokens[i] = rows->tokens[i];
            g->positions[i] = rows->positions[i];
            g->seq_of[i] = rows->seq_of[i];
            if (rows->draws) {
                g->draws[i] = rows->draws[i];
            }
        }
        fill_up(g, rows->n_rows, n, rows->tokens[0]);
        filled = rows_of(g, n);
    }
    f->ops->replay(devices, f->n_ranks, recording, &filled);
}

enum status graphs_run(struct graphs *g, const struct ops_rows *rows, void (*tick)(void *cookie),
                       void *cookie, struct error *err)
{
    struct forward *f = g->forward;
    struct ops_device *devices[FORWARD_MAX_RANKS];
    gather(g, devices);
    graphs_start(g, rows);
    return f->ops->wait_moving(devices, f->n_ranks, GRAPHS_STALL_NS, tick, cookie, err);
}

void graphs_free(struct graphs *g)
{
    for (uint32_t i = 0; i < g->n; i++) {
        g->forward->ops->recording_free(g->forward->ranks[0].device, &g->recordings[i]);
    }
    mem_free(g->seqs);
    mem_free(g->tokens);
    mem_free(g->positions);
    mem_free(g->seq_of);
    mem_free(g->draws);
    *g = (struct graphs){.n = 0};
}
