/* See memory.h. The engine's items come from a device that is opened to be planned with
 * (ops_limits.only_plan): the same code that loads a model runs over it, so there is no second list
 * of what a model allocates that could fall behind.
 */
#include "engine/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "engine/graphs.h"
#include "engine/layout.h"
#include "engine/model_load.h"
#include "engine/sim.h"
#include "engine/store.h"
#include "kernels/registry.h"

/* As engine.c and model_engine.c have them; test_memory.c notices when they part. */
enum {
    DEFAULT_CONTEXT_TOKENS = 131072,
    DEFAULT_CHUNK_TOKENS = 512,
    DEFAULT_BATCH_ROWS = 16,
    DEFAULT_SEQUENCES = 16,
    SIM_CONTEXT_TOKENS = 1 << 20
};

static uint64_t times(uint64_t n, uint64_t each)
{
    size_t bytes;
    return size_mul(n, each, &bytes) ? bytes : UINT64_MAX;
}

void engine_memory_add(struct engine_memory *memory, const char *name, const char *option,
                       uint64_t n, uint64_t each, bool on_device)
{
    if (memory->n_items < ENGINE_MEMORY_MAX_ITEMS) {
        memory->items[memory->n_items++] =
            (struct engine_memory_item){name, option, n, option ? 1 : n, each, on_device};
    }
}

uint64_t engine_memory_sum(const struct engine_memory *memory, bool on_device)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < memory->n_items; i++) {
        const struct engine_memory_item *item = &memory->items[i];
        uint64_t bytes = item->on_device == on_device ? times(item->n, item->each) : 0;
        sum = bytes > UINT64_MAX - sum ? UINT64_MAX : sum + bytes;
    }
    return sum;
}

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value ? value : otherwise;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void plan_sim(const struct engine_options *options, struct engine_memory *memory)
{
    memory->page_bytes = options->sim_page_bytes ? options->sim_page_bytes : SIM_PAGE_BYTES;
    memory->tail_bytes = options->sim_tail_bytes ? options->sim_tail_bytes : SIM_TAIL_BYTES;
    snprintf(memory->device, sizeof(memory->device), "sim");
    uint32_t page_tokens = MODEL_PAGE_TOKENS;
    uint32_t context = or_default(options->max_context_tokens, SIM_CONTEXT_TOKENS);
    engine_memory_add(memory, "pages", "--pages",
                      or_default(options->n_pages, (context + page_tokens - 1) / page_tokens),
                      memory->page_bytes, false);
}

static enum status plan_model(const struct engine_options *options, struct engine_memory *memory,
                              struct error *err)
{
    struct registry_choice choice;
    struct model_config *config = mem_zalloc(sizeof(*config));
    struct layout *layout = mem_zalloc(sizeof(*layout));
    struct model_load_plan plan, small;
    uint64_t a_row = 0;
    enum status status = registry_find(options->device ? options->device : "cpu", &choice, err);
    if (!status) {
        status = model_load_rank(options->rank, &choice, err);
    }
    if (!status) {
        status = model_config_load(options->model_dir, config, err);
    }
    if (!status) {
        status = layout_make(config, options->exact, layout, err);
    }
    if (status) {
        goto done;
    }
    uint32_t context = least(or_default(options->max_context_tokens, DEFAULT_CONTEXT_TOKENS),
                             config->max_position_embeddings);
    uint32_t chunk = or_default(options->max_chunk_tokens, DEFAULT_CHUNK_TOKENS);
    uint32_t rows = or_default(options->max_batch_rows, DEFAULT_BATCH_ROWS);
    uint32_t n_sequences = or_default(options->max_sequences, DEFAULT_SEQUENCES);
    uint32_t page_tokens = layout->page_tokens;
    uint32_t n_pages = or_default(options->n_pages, (context + page_tokens - 1) / page_tokens);
    struct ops_limits limits = {.n_rows = chunk > rows ? chunk : rows,
                                .n_seqs = rows,
                                .n_tokens = context,
                                .page_tokens = page_tokens,
                                .heavy_ratio = config->heavy_ratio,
                                .n_threads = options->n_threads,
                                .only_plan = true};
    choice.apart = choice.apart || options->apart;
    status = model_load_plan(&choice, config, layout, options->model_dir, options->weights,
                             options->exact, &limits, true, &plan, err);
    /* What a call of fewer rows saves: sizes grow with the rows, beside a part that doesn't. */
    limits.n_rows = rows;
    if (!status && chunk > rows) {
        status = model_load_plan(&choice, config, layout, NULL, NULL, options->exact, &limits,
                                 false, &small, err);
        a_row = status ? 0 : (plan.scratch_bytes - small.scratch_bytes) / (chunk - rows);
    }
    if (status) {
        goto done;
    }
    bool on_device = choice.device.has_memory;
    memory->page_bytes = layout->page_bytes;
    memory->tail_bytes = layout_tail_max_bytes(layout);
    memory->device_free_bytes =
        choice.device.free_bytes * (choice.n_cards > 1 ? choice.n_cards : 1);
    snprintf(memory->device, sizeof(memory->device), "%s", choice.device.text);
    engine_memory_add(memory, "weights", NULL, 1, plan.weights_bytes, on_device);
    if (choice.n_cards > 1) { /* GPUs are filled alike: what is free on some helps none */
        engine_memory_add(memory, "uneven shares", NULL, 1, plan.uneven_bytes, on_device);
    }
    engine_memory_add(memory, "scratch", NULL, 1, plan.scratch_bytes - a_row * chunk, on_device);
    engine_memory_add(memory, "rows of a call", "--chunk", chunk, a_row, on_device);
    memory->items[memory->n_items - 1].least = least(rows, chunk);
    bool apart = options->apart || choice.apart;
    uint32_t n_memories = apart ? choice.n_devices : 1; /* each holds the whole KV */
    uint64_t slot_bytes = n_memories * (uint64_t)(layout->window_bytes + layout->state_bytes);
    engine_memory_add(memory, "sequence slots", "--max-sequences", n_sequences, slot_bytes,
                      on_device);
    engine_memory_add(memory, "logits", NULL, least(rows, n_sequences) + 1,
                      (uint64_t)config->vocab_size * sizeof(float), false);
    engine_memory_add(memory, "pages", "--pages", n_pages,
                      n_memories * (uint64_t)layout->page_bytes, on_device);
    if (!options->no_graphs && graphs_are_here(choice.ops)) {
        engine_memory_add(memory, "graphs", NULL, graphs_sizes(least(rows, n_sequences), NULL),
                          choice.n_devices * graphs_planned_bytes(config->n_layers), on_device);
    }
    if (apart) {
        engine_memory_add(memory, "empty slot", NULL, 1, slot_bytes, on_device);
        engine_memory_add(memory, "slot image", NULL, 1, store_image_bytes(layout), false);
    }
    if (apart && options->sends) {
        engine_memory_add(memory, "page copies", "--pages", n_pages, layout->page_bytes, false);
    }
done:
    mem_free(layout);
    mem_free(config);
    return status;
}

enum status engine_memory_plan(const struct engine_options *options,
                               struct engine_memory *ret_memory, struct error *err)
{
    struct engine_memory memory = {.n_items = 0};
    enum status status = STATUS_OK;
    if (strcmp(options->kind, "sim") == 0) {
        plan_sim(options, &memory);
    } else {
        status = plan_model(options, &memory, err);
    }
    if (!status) {
        *ret_memory = memory;
    }
    return status;
}

/* --- what does not fit, and what would */

struct size_text {
    char text[32];
};

static struct size_text size_of(uint64_t bytes)
{
    struct size_text t;
    if (bytes >= UINT64_C(10) << 30) {
        snprintf(t.text, sizeof(t.text), "%.1f GiB", (double)bytes / (1 << 30));
    } else {
        snprintf(t.text, sizeof(t.text), "%.1f MiB", (double)bytes / (1 << 20));
    }
    return t;
}

/* Takes from the largest item that an option gives, then from the next, until `over` bytes are
 * gone; the least of each stays. Whether they are gone; the options are in ret_text. */
static bool shrink(const struct engine_memory *memory, bool on_device, uint64_t over,
                   char *ret_text, size_t text_bytes)
{
    bool used[ENGINE_MEMORY_MAX_ITEMS] = {false};
    size_t n = 0;
    ret_text[0] = '\0';
    for (uint32_t round = 0; round < memory->n_items && over > 0; round++) {
        int best = -1;
        for (uint32_t i = 0; i < memory->n_items; i++) {
            const struct engine_memory_item *item = &memory->items[i];
            if (item->option && item->on_device == on_device && !used[i] && item->n > item->least &&
                item->each > 0 &&
                (best < 0 || times(item->n, item->each) >
                                 times(memory->items[best].n, memory->items[best].each))) {
                best = (int)i;
            }
        }
        if (best < 0) {
            return false;
        }
        const struct engine_memory_item *item = &memory->items[best];
        uint64_t fewer = over / item->each + (over % item->each != 0);
        fewer = fewer < item->n - item->least ? fewer : item->n - item->least;
        used[best] = true;
        over = fewer * item->each >= over ? 0 : over - fewer * item->each;
        if (n < text_bytes) {
            n += (size_t)snprintf(ret_text + n, text_bytes - n, "%s%s %" PRIu64, n ? " " : "",
                                  item->option, item->n - fewer);
        }
    }
    return over == 0;
}

static enum status check_one(const struct engine_memory *memory, bool on_device,
                             uint64_t free_bytes, const char *limit, struct error *err)
{
    uint64_t sum = engine_memory_sum(memory, on_device);
    char options[160];
    if (sum <= free_bytes) {
        return STATUS_OK;
    }
    uint64_t over = sum - free_bytes, rest = 0;
    if (sum != UINT64_MAX && shrink(memory, on_device, over, options, sizeof(options))) {
        return error_set(err, STATUS_EXHAUSTED,
                         "this start needs %s and %s are there (%s), %s too little: %s would fit",
                         size_of(sum).text, size_of(free_bytes).text, limit, size_of(over).text,
                         options);
    }
    for (uint32_t i = 0; i < memory->n_items; i++) {
        const struct engine_memory_item *item = &memory->items[i];
        rest += item->on_device == on_device ? times(item->least, item->each) : 0;
    }
    return error_set(err, STATUS_EXHAUSTED,
                     "this start needs %s and %s are there (%s), %s too little: with the least "
                     "of everything that options count it still takes %s",
                     size_of(sum).text, size_of(free_bytes).text, limit, size_of(over).text,
                     size_of(rest).text);
}

enum status engine_memory_check(const struct engine_memory *memory, uint64_t host_bytes,
                                const char *limit, struct error *err)
{
    enum status status = STATUS_OK;
    if (engine_memory_sum(memory, true)) {
        status = check_one(memory, true, memory->device_free_bytes, memory->device, err);
    }
    return status ? status : check_one(memory, false, host_bytes, limit, err);
}
