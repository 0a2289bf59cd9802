/* baton-eval: an engine without a network, for checking a checkpoint or a kernel.
 *
 *   logits    JSON lines {"tokens": [ids], "forced": [ids]} in; for each 1 + len(forced) lines
 *             {"logits": [...]} out: of the token after the prompt, then after each forced one
 *   generate  JSON lines {"tokens": [ids], "n": k} in; {"ids": [...]} out, greedy, to the end token
 *   bits      text in; bits per byte of it under the model
 *   encode    JSON lines {"text": "...", "plain": false} in; {"ids": [...]} out, no weights read;
 *             plain: added tokens that stand in the text are text like any other
 *   info      what the engine says of itself, and which kernels were chosen
 *
 * What comes in is bounded by the engine's own limits; a line that breaks them ends the run.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/hostmem.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/opts.h"
#include "engine/engine.h"
#include "engine/kernels.h"
#include "engine/memory.h"
#include "model/tokenizer.h"

enum { MAX_TEXT_BYTES = 64 << 20, BITS_ROWS = 16 };

struct options {
    char *model, *weights, *device, *rank;
    bool exact, ignore_eos, list_kernels;
    int graphs, early_launches;
    int64_t chunk, threads, context, n, batch;
    struct opt_list operands, kernels, allow_reference;
};

#define FIELD(name) offsetof(struct options, name)
static const char *const switch_names[] = {"off", "on", NULL};
static const struct opt_spec specs[] = {
    {.kind = OPT_OPERANDS,
     .name = "command",
     .value = "COMMAND",
     .help = "logits, generate, bits, encode or info.",
     .offset = FIELD(operands)},
    {.kind = OPT_STRING,
     .name = "model",
     .value = "DIR",
     .help = "Folder of the checkpoint. Needed but for --list-kernels.",
     .offset = FIELD(model)},
    {.kind = OPT_STRING,
     .name = "weights",
     .value = "synthetic:SEED",
     .help = "Random weights of the model's shape in place of the checkpoint's: only its "
             "config.json is read.",
     .offset = FIELD(weights)},
    {.kind = OPT_STRING,
     .name = "device",
     .initial = "cpu",
     .help = "cpu, cpu:N for a group of N simulated devices, cuda:N for GPU N, cuda:N,N for a "
             "group of GPUs.",
     .offset = FIELD(device)},
    {.kind = OPT_STRING,
     .name = "rank",
     .value = "K/N",
     .help = "Measure rank K of a group of N, alone on --device: it takes its share of the weights "
             "and sums its own part only, so what it says means nothing.",
     .offset = FIELD(rank)},
    {.kind = OPT_LIST,
     .name = "kernel",
     .value = "OPERATION=VARIANT",
     .help = "Compute an operation by this variant, which must serve this device, the cache's "
             "layout and the model's shapes. Default: the best that serves.",
     .offset = FIELD(kernels)},
    {.kind = OPT_LIST,
     .name = "allow-reference",
     .value = "NAME",
     .help = "Let the reference kernel of this operation compute, which is right but slow, where "
             "no tuned one serves: a name, several with commas, or all. Without it such a start is "
             "refused. On the CPU no operation needs it.",
     .offset = FIELD(allow_reference)},
    {.kind = OPT_BOOL,
     .name = "list-kernels",
     .help = "Print for each operation which variant --device runs and why each other doesn't, "
             "with --model for its shapes, and exit: 1 if a start would fail. Takes no COMMAND.",
     .offset = FIELD(list_kernels)},
    {.kind = OPT_ENUM,
     .name = "graphs",
     .initial = "auto",
     .choices = engine_graphs_names,
     .help =
         "on: a GPU records its decode steps at start, one graph for each size of batch, and a "
         "start that can't is refused; off: every kernel is launched by itself; auto: on with one "
         "GPU, off with a group, whose sums no card has recorded yet. The same bits.",
     .offset = FIELD(graphs)},
    {.kind = OPT_ENUM,
     .name = "early-launches",
     .initial = "off",
     .choices = switch_names,
     .help = "on: a kernel of a GPU begins while the one in front of it ends, and waits for it on "
             "the card; off: one after the other. The same bits. A CPU has no kernels.",
     .offset = FIELD(early_launches)},
    {.kind = OPT_BOOL,
     .name = "exact",
     .help = "Exact arithmetic: no rounding to bfloat16, no simulated quantisation.",
     .offset = FIELD(exact)},
    {.kind = OPT_INT,
     .name = "chunk",
     .value = "N",
     .initial = "512",
     .help = "Tokens of one piece of a prompt.",
     .offset = FIELD(chunk),
     .min = 1,
     .max = 65536},
    {.kind = OPT_INT,
     .name = "threads",
     .value = "N",
     .initial = "0",
     .help = "Threads of the CPU; 0 is one a core.",
     .offset = FIELD(threads),
     .min = 0,
     .max = 64},
    {.kind = OPT_INT,
     .name = "context",
     .value = "N",
     .initial = "8192",
     .help = "Longest sequence; bits reads the text in pieces of so many tokens.",
     .offset = FIELD(context),
     .min = 2,
     .max = 1 << 20},
    {.kind = OPT_INT,
     .name = "n",
     .value = "N",
     .initial = "32",
     .help = "Tokens to generate where a line does not say.",
     .offset = FIELD(n),
     .min = 1,
     .max = 1 << 20},
    {.kind = OPT_INT,
     .name = "batch",
     .value = "N",
     .initial = "1",
     .help = "Sequences of one step for bits.",
     .offset = FIELD(batch),
     .min = 1,
     .max = BITS_ROWS},
    {.kind = OPT_BOOL,
     .name = "ignore-eos",
     .help = "Let generate go on past the end token.",
     .offset = FIELD(ignore_eos)},
};

static const struct opt_program program = {
    .name = "baton-eval",
    .version = BATON_VERSION,
    .summary = "compute with a checkpoint, without a server",
    .description =
        "Reads standard input and writes standard output: JSON, one object a line, but for the "
        "text of "
        "bits.\n\n"
        "logits: {\"tokens\": [ids], \"forced\": [ids]} in; {\"logits\": [...]} out, of the token "
        "after "
        "the prompt, then after each forced one.\n\n"
        "generate: {\"tokens\": [ids], \"n\": 8} in; {\"ids\": [...]} out, greedy, up to the end "
        "token.\n\n"
        "bits: text in; bits per byte of it under the model out.\n\n"
        "encode: {\"text\": \"...\", \"plain\": false} in; {\"ids\": [...]} out, as generate takes "
        "them; "
        "plain: added tokens in the text are text like any other.\n\n"
        "info: reads nothing; what the engine says of itself, and which kernels were chosen.",
    .specs = specs,
    .n_specs = sizeof(specs) / sizeof(specs[0]),
};

struct eval {
    struct options options;
    struct engine_options engine_options;
    struct engine *engine;
    const struct engine_info *info;
    struct tokenizer *tokenizer; /* encode only */
    struct buf out;
    float *logits; /* [BITS_ROWS, vocab] */
};

/* --- input */

/* The ids of an array; NULL with err set if they are not ids of this model. */
static enum status read_ids(const struct eval *eval, const struct json *array, size_t limit,
                            struct token_ids *ids, struct error *err)
{
    size_t n = json_array_n(array);
    if (n > limit) {
        return error_set(err, STATUS_TOO_LARGE, "%zu ids are more than the context of %zu", n,
                         limit);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        if (!json_int(json_array_at(array, i), &id) || id < 0 || id >= eval->info->vocab_size) {
            return error_set(err, STATUS_INVALID, "element %zu is no id below %" PRIu32, i,
                             eval->info->vocab_size);
        }
        uint32_t word = (uint32_t)id;
        enum status status = token_ids_append(ids, &word, 1);
        if (status) {
            return status;
        }
    }
    return STATUS_OK;
}

/* Runs the prompt; row gets what it asks for of the token after it. */
static enum status run_prompt(struct eval *eval, struct engine_seq *seq,
                              const struct token_ids *ids, uint32_t n_more, struct engine_row *row)
{
    enum status status = engine_seq_reserve(seq, (uint32_t)ids->n + n_more);
    for (size_t at = 0; at < ids->n && !status;) {
        size_t rest = ids->n - at,
               n = rest < eval->info->max_chunk_tokens ? rest : eval->info->max_chunk_tokens;
        status = engine_prefill(eval->engine, seq, ids->id + at, (uint32_t)n,
                                at + n == ids->n ? row : NULL, NULL, NULL);
        at += n;
    }
    return status;
}

static void print_logits(struct eval *eval, const float *logits)
{
    buf_clear(&eval->out);
    buf_printf(&eval->out, "{\"logits\": [");
    for (uint32_t i = 0; i < eval->info->vocab_size; i++) {
        buf_printf(&eval->out, "%s%.9g", i ? ", " : "", (double)logits[i]);
    }
    buf_printf(&eval->out, "]}\n");
    fwrite(eval->out.data, 1, eval->out.bytes, stdout);
    fflush(stdout);
}

/* --- logits */

static enum status do_logits(struct eval *eval, const struct json *line, struct error *err)
{
    struct token_ids ids = TOKEN_IDS_INIT, forced = TOKEN_IDS_INIT;
    struct engine_seq *seq = NULL;
    size_t limit = eval->info->max_context_tokens;
    enum status status = read_ids(eval, json_get(line, "tokens"), limit, &ids, err);
    if (!status) {
        status = read_ids(eval, json_get(line, "forced"), limit - ids.n, &forced, err);
    }
    if (!status && ids.n == 0) {
        status = error_set(err, STATUS_INVALID, "\"tokens\" must hold at least one id");
    }
    if (!status) {
        status = engine_seq_create(eval->engine, 1, &seq);
    }
    struct engine_row row = {.logits = eval->logits};
    if (!status) {
        status = run_prompt(eval, seq, &ids, (uint32_t)forced.n, &row);
    }
    for (size_t i = 0; !status; i++) {
        print_logits(eval, eval->logits);
        if (i == forced.n) {
            break;
        }
        row = (struct engine_row){.seq = seq, .token = forced.id[i], .logits = eval->logits};
        status = engine_step(eval->engine, &row, 1);
    }
    engine_seq_free(seq);
    token_ids_fini(&ids);
    token_ids_fini(&forced);
    return status;
}

/* --- generate */

static enum status do_generate(struct eval *eval, const struct json *line, struct error *err)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    struct engine_seq *seq = NULL;
    size_t limit = eval->info->max_context_tokens;
    int64_t n;
    if (!json_int(json_get(line, "n"), &n)) {
        n = eval->options.n;
    }
    enum status status = read_ids(eval, json_get(line, "tokens"), limit, &ids, err);
    if (!status && (ids.n == 0 || n < 1 || (uint64_t)n > limit - ids.n)) {
        status =
            error_set(err, STATUS_INVALID,
                      "\"tokens\" must hold at least one id, and with \"n\" at most %zu", limit);
    }
    if (!status) {
        status = engine_seq_create(eval->engine, 1, &seq);
    }
    struct engine_sampling greedy = {.top_p = 1.0f, .repetition_penalty = 1.0f};
    struct engine_row row = {.sampling = &greedy};
    if (!status) {
        status = run_prompt(eval, seq, &ids, (uint32_t)n, &row);
    }
    buf_clear(&eval->out);
    struct json_writer w;
    json_writer_init(&w, &eval->out);
    json_begin_object(&w);
    json_key(&w, "ids");
    json_begin_array(&w);
    for (int64_t i = 0; !status; i++) {
        uint32_t id = row.draw.id;
        json_put_uint(&w, id);
        if (i == n - 1 || (id == eval->info->eos_id && !eval->options.ignore_eos)) {
            break;
        }
        row = (struct engine_row){
            .seq = seq, .token = id, .sampling = &greedy, .n_generated = (uint32_t)i + 1};
        status = engine_step(eval->engine, &row, 1);
    }
    json_end_array(&w);
    json_end_object(&w);
    if (!status) {
        printf("%.*s\n", (int)eval->out.bytes, (const char *)eval->out.data);
        fflush(stdout);
    }
    engine_seq_free(seq);
    token_ids_fini(&ids);
    return status;
}

/* --- bits */

/* -log2 of the probability of `id`. */
static double surprise(const float *logits, uint32_t n, uint32_t id)
{
    double most = logits[0], sum = 0.0;
    for (uint32_t i = 1; i < n; i++) {
        most = logits[i] > most ? (double)logits[i] : most;
    }
    for (uint32_t i = 0; i < n; i++) {
        sum += exp((double)logits[i] - most);
    }
    return (log(sum) + most - (double)logits[id]) / log(2.0);
}

/* Pieces [first, first + n) of the text, piece p being ids [p * length, (p + 1) * length), one step
 * of all of them at a time; each begins with the start token. */
static enum status run_pieces(struct eval *eval, const struct token_ids *ids, size_t first,
                              uint32_t n, size_t length, double *bits)
{
    struct engine_seq *seqs[BITS_ROWS] = {NULL};
    enum status status = STATUS_OK;
    for (uint32_t p = 0; p < n && !status; p++) {
        status = engine_seq_create(eval->engine, p, &seqs[p]);
    }
    for (size_t i = 0; i < length && !status; i++) {
        struct engine_row rows[BITS_ROWS];
        uint32_t wanted[BITS_ROWS], m = 0;
        for (uint32_t p = 0; p < n && !status; p++) {
            size_t at = (first + p) * length + i;
            if (at >= ids->n) {
                continue;
            }
            status = engine_seq_reserve(seqs[p], (uint32_t)i + 1);
            wanted[m] = ids->id[at];
            rows[m] =
                (struct engine_row){.seq = seqs[p],
                                    .token = i ? ids->id[at - 1] : eval->info->bos_id,
                                    .logits = eval->logits + (size_t)m * eval->info->vocab_size};
            m++;
        }
        if (m && !status) {
            status = engine_step(eval->engine, rows, m);
        }
        for (uint32_t k = 0; k < m && !status; k++) {
            *bits += surprise(rows[k].logits, eval->info->vocab_size, wanted[k]);
        }
    }
    for (uint32_t p = 0; p < n; p++) {
        engine_seq_free(seqs[p]);
    }
    return status;
}

static enum status do_bits(struct eval *eval, struct error *err)
{
    struct tokenizer *tokenizer;
    enum status status = tokenizer_open(eval->options.model, &tokenizer, err);
    if (status) {
        return status;
    }
    struct buf text;
    buf_init(&text);
    char block[65536];
    size_t got;
    while ((got = fread(block, 1, sizeof(block), stdin)) > 0 && text.bytes <= MAX_TEXT_BYTES) {
        buf_append(&text, block, got);
    }
    struct token_ids ids = TOKEN_IDS_INIT;
    struct tokenizer_span all = {0, text.bytes};
    if (text.bytes == 0 || text.bytes > MAX_TEXT_BYTES) {
        status =
            error_set(err, STATUS_INVALID, "the text must have 1 to %d bytes", (int)MAX_TEXT_BYTES);
    } else {
        status =
            tokenizer_encode(tokenizer, text.data, text.bytes, &all, 1, MAX_TEXT_BYTES, &ids, err);
    }
    double bits = 0.0;
    size_t length = eval->info->max_context_tokens;
    size_t n_pieces = status ? 0 : (ids.n + length - 1) / length;
    for (size_t p = 0; p < n_pieces && !status; p += (size_t)eval->options.batch) {
        size_t n =
            n_pieces - p < (size_t)eval->options.batch ? n_pieces - p : (size_t)eval->options.batch;
        status = run_pieces(eval, &ids, p, (uint32_t)n, length, &bits);
    }
    if (!status) {
        printf("{\"bits_per_byte\": %.6f, \"bits_per_token\": %.6f, \"bytes\": %zu, \"tokens\": "
               "%zu}\n",
               bits / (double)text.bytes, bits / (double)ids.n, text.bytes, ids.n);
    }
    token_ids_fini(&ids);
    buf_fini(&text);
    tokenizer_close(tokenizer);
    return status;
}

/* --- encode */

static enum status encode_line(struct eval *eval, const struct json *line, struct error *err)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    size_t bytes;
    const char *text = json_text(json_get(line, "text"), &bytes);
    bool plain = false;
    if (!text || (json_get(line, "plain") && !json_bool(json_get(line, "plain"), &plain))) {
        return error_set(err, STATUS_INVALID,
                         "a line must be {\"text\": \"...\"}, with \"plain\" true or false");
    }
    struct tokenizer_span all = {0, bytes};
    enum status status =
        tokenizer_encode(eval->tokenizer, text, bytes, &all, plain, MAX_TEXT_BYTES, &ids, err);
    if (!status) {
        printf("{\"ids\": [");
        for (size_t i = 0; i < ids.n; i++) {
            printf("%s%" PRIu32, i ? ", " : "", ids.id[i]);
        }
        printf("]}\n");
        fflush(stdout);
    }
    token_ids_fini(&ids);
    return status;
}

/* --- info */

static void print_item(void *cookie, const char *item, size_t bytes)
{
    printf("%-28s %zu bytes\n", item, bytes);
}

static enum status do_info(struct eval *eval, struct error *err)
{
    const struct engine_info *info = eval->info;
    printf("model %s on %s: %" PRIu32 " layers, vocabulary %" PRIu32 "\n", info->model_name,
           info->device_name, info->n_layers, info->vocab_size);
    printf("page %zu bytes for %" PRIu32 " tokens, tail at most %zu, context %" PRIu32 "\n",
           info->page_bytes, info->page_tokens, info->tail_bytes, info->max_context_tokens);
    printf("fingerprint ");
    for (int i = 0; i < ENGINE_FINGERPRINT_BYTES; i++) {
        printf("%02x", info->fingerprint[i]);
    }
    printf("\n");
    engine_memory_report(eval->engine, print_item, NULL);
    return engine_kernels_print(&eval->engine_options, stdout, err);
}

/* --- */

static enum status run_lines(struct eval *eval,
                             enum status (*run)(struct eval *eval, const struct json *line,
                                                struct error *err),
                             struct error *err)
{
    char *text = NULL;
    size_t room = 0;
    ssize_t bytes;
    enum status status = STATUS_OK;
    while (!status && (bytes = getline(&text, &room, stdin)) > 0) {
        struct json *line;
        status = json_parse(text, (size_t)bytes, NULL, &line, err);
        if (!status) {
            status = run(eval, line, err);
            json_free(line);
        }
    }
    free(text);
    return status;
}

static enum status do_encode(struct eval *eval, struct error *err)
{
    enum status status = tokenizer_open(eval->options.model, &eval->tokenizer, err);
    if (!status) {
        status = run_lines(eval, encode_line, err);
        tokenizer_close(eval->tokenizer);
    }
    return status;
}

static enum status run_command(struct eval *eval, const char *command, struct error *err)
{
    if (strcmp(command, "logits") == 0) {
        return run_lines(eval, do_logits, err);
    }
    if (strcmp(command, "generate") == 0) {
        return run_lines(eval, do_generate, err);
    }
    return strcmp(command, "bits") == 0 ? do_bits(eval, err) : do_info(eval, err);
}

/* Opens the engine if what it takes is there. */
static enum status open_engine(struct eval *eval, struct error *err)
{
    struct engine_memory memory;
    struct hostmem host;
    enum status status = engine_memory_plan(&eval->engine_options, &memory, err);
    for (uint32_t i = 0; i < memory.n_items && !status; i++) {
        memory.items[i].least = memory.items[i].n; /* no option of this program counts them alone */
    }
    if (!status) {
        hostmem_read(&host);
        status = engine_memory_check(&memory, host.free_bytes, host.limit, err);
    }
    return status ? status : engine_open(&eval->engine_options, NULL, &eval->engine, err);
}

static enum status check_options(const struct options *o, const char *command, struct error *err)
{
    enum status status = engine_kernels_wish(o->kernels.items, o->kernels.n,
                                             o->allow_reference.items, o->allow_reference.n, err);
    if (status || o->list_kernels) {
        return status;
    }
    if (strcmp(command, "logits") && strcmp(command, "generate") && strcmp(command, "bits") &&
        strcmp(command, "encode") && strcmp(command, "info")) {
        return error_set(err, STATUS_INVALID, "say one of logits, generate, bits, encode, info");
    }
    return o->model
               ? STATUS_OK
               : error_set(err, STATUS_INVALID, "--model must be given: folder of the checkpoint");
}

int main(int argc, char **argv)
{
    struct eval eval = {0};
    struct options *o = &eval.options;
    struct error err = {""};
    opts_parse_or_exit(&program, argc, argv, o);
    log_set_level(LOG_LEVEL_WARN); /* standard error is for what went wrong */
    const char *command = o->operands.n == 1 ? o->operands.items[0] : "";
    if (check_options(o, command, &err)) {
        fprintf(stderr, "baton-eval: %s\n", err.text);
        opts_free(&program, o);
        return 2;
    }
    uint32_t n_rows = strcmp(command, "bits") == 0 ? (uint32_t)o->batch : 1;
    eval.engine_options = (struct engine_options){
        .kind = "model",
        .model_dir = o->model,
        .weights = o->weights,
        .device = o->device,
        .rank = o->rank,
        .exact = o->exact,
        .no_graphs = !engine_graphs_wanted(o->graphs, o->device),
        .early_launches = o->early_launches != 0,
        .n_threads = (uint32_t)o->threads,
        .max_sequences = n_rows,
        .n_pages = (uint32_t)((o->context + 255) / 256) * n_rows,
        .max_context_tokens = (uint32_t)o->context,
        .max_chunk_tokens = (uint32_t)o->chunk,
        .max_batch_rows = n_rows,
    };
    enum status status;
    if (o->list_kernels) {
        status = engine_kernels_print(&eval.engine_options, stdout, &err);
        fflush(stdout);
    } else if (strcmp(command, "encode") == 0) {
        status = do_encode(&eval, &err);
    } else {
        status = open_engine(&eval, &err);
    }
    if (!status && eval.engine) {
        eval.info = engine_info(eval.engine);
        buf_init(&eval.out);
        eval.logits = mem_array((size_t)n_rows * eval.info->vocab_size, sizeof(float));
        status = run_command(&eval, command, &err);
        mem_free(eval.logits);
        buf_fini(&eval.out);
        engine_close(eval.engine);
    }
    if (status) {
        fprintf(stderr, "baton-eval: %s\n", err.text[0] ? err.text : status_name(status));
    }
    opts_free(&program, o);
    return status ? 1 : 0;
}
