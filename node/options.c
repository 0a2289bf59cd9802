/* See options.h. */
#include "node/options.h"

#include <stdio.h>
#include <string.h>

#include "engine/kernels.h"

const char *const node_kv_buffer_names[] = {"cpu", "cuda", "auto", NULL};
const char *const node_engine_names[] = {"model", "sim", NULL};
const char *const node_switch_names[] = {"off", "on", NULL};

void node_engine_options(const struct node_options *options, struct engine_options *ret_options)
{
    *ret_options = (struct engine_options){
        .kind = node_engine_names[options->engine],
        .model_dir = options->model,
        .weights = options->weights,
        .device = options->device,
        .exact = options->exact,
        .no_graphs = !engine_graphs_wanted(options->graphs, options->device),
        .lookahead = options->lookahead != 0,
        .early_launches = options->early_launches != 0,
        .n_threads = (uint32_t)options->threads,
        .max_sequences = (uint32_t)options->max_sequences,
        .n_pages = (uint32_t)options->pages,
        .max_context_tokens = (uint32_t)options->max_context_tokens,
        .max_chunk_tokens = (uint32_t)options->chunk_tokens,
        .max_batch_rows = (uint32_t)options->max_sequences,
        .sim_prefill_tokens_per_s = options->sim_prefill_tokens_per_s,
        .sim_step_ms = options->sim_step_ms,
        .sim_page_bytes = options->sim_page_bytes,
        .sim_tail_bytes = options->sim_tail_bytes,
        .sim_vocab_size = (uint32_t)options->sim_vocab_size,
        .sim_script = options->script,
    };
}

bool node_options_answered(const struct node_options *options, const char *program, int *ret_code)
{
    struct error err = {""};
    const struct opt_list *forced = &options->kernels, *allowed = &options->allow_reference;
    enum status status =
        engine_kernels_wish(forced->items, forced->n, allowed->items, allowed->n, &err);
    int code = status ? 2 : 0;
    if (!status && options->list_kernels) {
        struct engine_options engine;
        node_engine_options(options, &engine);
        status = engine_kernels_print(&engine, stdout, &err);
        code = status ? 1 : 0;
    }
    if (status) {
        fflush(stdout);
        fprintf(stderr, "%s: %s\n", program, err.text);
    }
    *ret_code = code;
    return status || options->list_kernels;
}
