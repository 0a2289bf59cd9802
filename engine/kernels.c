/* See kernels.h. What is printed before a start and what the start does come from one call of
 * registry_select with the same question.
 */
#include "engine/kernels.h"

#include "base/buf.h"
#include "base/log.h"
#include "engine/engine.h"
#include "engine/model_load.h"
#include "kernels/registry.h"

enum status engine_kernels_wish(char *const *forced, size_t n_forced, char *const *allowed,
                                size_t n_allowed, struct error *err)
{
    struct registry_wishes wishes;
    enum status status = registry_wishes_parse(forced, n_forced, allowed, n_allowed, &wishes, err);
    if (!status) {
        registry_wishes_set(&wishes);
    }
    return status;
}

static enum status ask(const struct registry_choice *choice, enum formats_entry_kind layout,
                       const struct ops_dims *dims, const struct ops_limits *limits,
                       struct ops *ret_table, registry_line_fn line, void *cookie,
                       struct error *err)
{
    struct registry_query query = {.backend = choice->backend,
                                   .device = &choice->device,
                                   .wishes = registry_wishes_now(),
                                   .layout = layout,
                                   .dims = dims,
                                   .limits = limits};
    return registry_select(&query, ret_table, line, cookie, err);
}

static void print_line(void *cookie, const struct registry_line *line)
{
    fprintf(cookie, "%-9s %-10s %-6s  %s\n", line->operation, line->variant,
            line->is_chosen ? "chosen" : "no", line->reason);
}

enum status engine_kernels_print(const struct engine_options *options, FILE *out, struct error *err)
{
    struct registry_choice choice;
    struct ops_dims dims;
    struct model_config config;
    const struct ops_dims *asked = NULL;
    enum status status = registry_find(options->device ? options->device : "cpu", &choice, err);
    if (!status) {
        status = model_load_rank(options->rank, &choice, err);
    }
    if (!status && options->model_dir) {
        status = model_config_load(options->model_dir, &config, err);
        if (!status) {
            status = model_load_dims(&config, options->exact, choice.rank_first, choice.n_ranks,
                                     &dims, err);
        }
        asked = &dims;
    }
    if (status) {
        return status;
    }
    struct ops_limits limits = {.n_rows = options->max_chunk_tokens,
                                .n_seqs = options->max_batch_rows,
                                .n_tokens = options->max_context_tokens};
    fprintf(out, "device %s, %s, %s cache entries\n", choice.device.text,
            asked ? config.name : "any shape (no model was named)",
            options->exact ? "f32" : "packed");
    return ask(&choice, options->exact ? FORMATS_ENTRY_F32 : FORMATS_ENTRY_PACKED, asked, &limits,
               NULL, print_line, out, err);
}

static void log_line(void *cookie, const struct registry_line *line)
{
    struct buf *chosen = cookie;
    if (!line->is_chosen) {
        log_info("kernels", "%s %s is not used: %s", line->operation, line->variant, line->reason);
        return;
    }
    buf_printf(chosen, "%s%s %s", chosen->bytes ? ", " : "", line->operation, line->variant);
    if (line->is_reference) {
        log_warn("kernels", "%s %s: %s", line->operation, line->variant, line->reason);
    }
}

enum status engine_kernels_choose(const struct registry_choice *choice, const struct ops_dims *dims,
                                  const struct ops_limits *limits, struct ops *ret_table,
                                  struct error *err)
{
    struct buf chosen;
    buf_init(&chosen);
    enum status status =
        ask(choice, dims->entry_kind, dims, limits, ret_table, log_line, &chosen, err);
    if (!status) {
        log_info("kernels", "%s: %.*s", choice->device.text, (int)chosen.bytes,
                 (const char *)chosen.data);
    }
    buf_fini(&chosen);
    return status;
}

void engine_kernels_guess(const struct registry_choice *choice, const struct ops_dims *dims,
                          const struct ops_limits *limits, struct ops *table)
{
    struct ops chosen = *table;
    if (!choice->backend) { /* a device that only counts has no variants */
        return;
    }
    enum status status = ask(choice, dims->entry_kind, dims, limits, &chosen, NULL, NULL, NULL);
    if (!status) {
        *table = chosen;
    }
}
