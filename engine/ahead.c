/* See ahead.h. */
#include "engine/ahead.h"

#include "base/mem.h"

void ahead_init(struct ahead *a, struct forward *forward, struct graphs *graphs, uint32_t max_rows,
                uint32_t *ids)
{
    *a = (struct ahead){.forward = forward, .graphs = graphs, .ids = ids, .max_rows = max_rows};
    a->which = mem_array(max_rows, sizeof(*a->which));
    for (uint32_t i = 0; i < max_rows; i++) {
        a->which[i] = i;
    }
}

void ahead_fini(struct ahead *a)
{
    mem_free(a->which);
}

struct ticker {
    void (*tick)(void *cookie);
    void *cookie;
};

static void layer_done(void *cookie, uint32_t n_layers)
{
    const struct ticker *ticker = cookie;
    ticker->tick(ticker->cookie);
}

void ahead_begin(struct ahead *a, const struct ops_rows *rows, bool by_graph,
                 const uint32_t *host_rows, uint32_t n_host, float *ret_logits,
                 void (*tick)(void *cookie), void *cookie)
{
    struct forward *f = a->forward;
    struct ops_device *device = f->ranks[0].device;
    uint32_t turn = a->n_begun++ % OPS_FENCES;
    struct ticker ticker = {tick, cookie};
    if (by_graph) {
        graphs_start(a->graphs, rows);
    } else {
        enum status status = forward_run(f, rows, NULL, layer_done, &ticker);
        (void)status; /* without a cancel it can't fail */
        forward_draw(f, rows, a->which);
    }
    for (uint32_t i = 0; i < n_host; i++) {
        size_t at = (size_t)host_rows[i] * f->vocab;
        f->ops->read(device, ret_logits + at, f->logits + at, f->vocab * sizeof(float));
    }
    f->ops->drawn(device, a->ids + (size_t)turn * a->max_rows, rows->n_rows);
    f->ops->fence(device, turn);
    a->by_graph[turn] = by_graph;
}

enum status ahead_end(struct ahead *a, const uint32_t **ret_ids, void (*tick)(void *cookie),
                      void *cookie, struct error *err)
{
    struct forward *f = a->forward;
    uint32_t turn = a->n_ended++ % OPS_FENCES;
    enum status status = f->ops->wait_fence(
        f->ranks[0].device, turn, a->by_graph[turn] ? GRAPHS_STALL_NS : 0, tick, cookie, err);
    *ret_ids = a->ids + (size_t)turn * a->max_rows;
    return status;
}
