/* engine/engine.h - the one compute header the daemons include.
 *
 * An engine is one model on one device group together with its page pool. A sequence (`engine_seq`)
 * is the KV state of one sample: a table of pages, a window slot and a state slot. Two engines
 * stand behind this header: the model itself (engine/forward.c over a kernel table) and `sim`
 * (engine/sim.c), which has no arithmetic but moves full-size pages whose contents and tokens are a
 * function of the prompt.
 *
 * Threads. Two threads may hold an engine: the loop thread owns sequences (create, reserve, fork,
 * free, tables, numbers) and one compute thread runs the calls under "Compute", one at a time.
 * What says "any thread" may run beside a compute call, provided that the sequence whose pages or
 * slot it touches is not in that call. A sequence handed to a compute call may not be
 * touched by the loop until the call returned.
 *
 * Determinism. What a call computes for a row depends on that row's sequence and inputs alone: not
 * on the batch, its order, or how a prompt was cut into chunks. Tests hold every engine to it bit
 * for bit.
 */
#ifndef BATON_ENGINE_ENGINE_H
#define BATON_ENGINE_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct engine;
struct engine_seq;
struct json_writer;
struct metrics;
struct parcel_piece; /* kernels/parcel.h */

enum { ENGINE_FINGERPRINT_BYTES = 16, ENGINE_MAX_LOGPROBS = 20 };

/* What an engine is opened with. Zero in a limit means "as the model and the memory allow". */
struct engine_options {
    const char *kind;       /* "model" or "sim" */
    const char *model_dir;  /* checkpoint folder; for "sim" NULL */
    const char *weights;    /* NULL: the checkpoint's; "synthetic:SEED": random ones of its shape */
    const char *device;     /* "cpu", "cpu:N", or "cuda:N" or "cuda:N,N" where built and there */
    const char *rank;       /* NULL, or "K/N": the device is rank K of a group of N whose others are
                               missing. Sums over the group hold its own part, logits its share of
                               the vocabulary (the lowest float elsewhere): for measurements */
    bool exact;             /* turn the quantisers' simulation off (f32 cache entries) */
    uint32_t n_threads;     /* of the CPU backend; 0 = one per core */
    uint32_t max_sequences; /* window and state slots */
    uint32_t n_pages;       /* pool size */
    uint32_t max_context_tokens;
    uint32_t max_chunk_tokens; /* longest prompt piece of one engine_prefill call */
    uint32_t max_batch_rows;   /* most rows of one engine_step call */
    bool no_graphs; /* steps run one operation at a time also on a device that records them whole */
    bool early_launches; /* kernels of a GPU begin before those in front of them end: ops_limits */
    bool lookahead; /* steps are begun before the one before is over (engine_step_begin): needs a
                       device that draws */
    bool sends; /* pages leave from host memory: a device with memory of its own keeps a copy there
                   of what is final */
    bool apart; /* tests: what a device with memory of its own needs, also where it has none */
    /* sim only */
    double sim_prefill_tokens_per_s, sim_step_ms;
    size_t sim_page_bytes, sim_tail_bytes;
    uint32_t sim_vocab_size;
    const char *sim_script; /* file of scripted outputs (engine/sim.h), or NULL */
};

/* --graphs, of which `choice` is an index of the names: whether steps are recorded. `auto` is `on`
 * where a card has run it: with one GPU, not with a group. */
extern const char *const engine_graphs_names[]; /* off, on, auto */
bool engine_graphs_wanted(int choice, const char *device);

/* Facts fixed at open. Owner: the engine. */
struct engine_info {
    uint8_t fingerprint[ENGINE_FINGERPRINT_BYTES]; /* of model identity and layout (handoff.md,
                                                      Identity) */
    const char *model_name;
    const char *device_name;
    uint32_t vocab_size;
    uint32_t n_layers;
    uint32_t page_tokens; /* 256 */
    size_t page_bytes;    /* one page image, a multiple of 4 KiB */
    size_t tail_bytes;    /* largest tail image: window + state, without the partial page */
    uint32_t n_pages, max_sequences;
    uint32_t max_context_tokens, max_chunk_tokens, max_batch_rows;
    uint32_t bos_id, eos_id;
    uint8_t *pool_base; /* where page 0 leaves from: page i at pool_base + i * page_bytes, with the
                           bytes that engine_prefill, its pieces and engine_tail_write said are
                           final. Host memory; NULL: pages lie in a device, and none is sent */
};

/* How one token is drawn: http.md section 4 fixes the order of the steps. Owner: the request; read
 * only here. */
struct engine_sampling {
    float temperature; /* 0 = greedy */
    float top_p, min_p;
    int32_t top_k; /* <= 0 off */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint32_t n_logit_bias;
    const struct engine_bias {
        uint32_t id;
        float bias;
    } * logit_bias;
    uint64_t seed;
    uint32_t n_banned; /* ids that may not be drawn while n_generated < min_tokens */
    const uint32_t *banned;
    uint32_t min_tokens;
    bool want_logprobs;
    uint32_t n_top_logprobs; /* 0..ENGINE_MAX_LOGPROBS alternatives beside the drawn token's own */
};

struct engine_logprob {
    uint32_t id;
    float logprob; /* natural log, of the raw distribution */
};

/* One drawn token. */
struct engine_draw {
    uint32_t id;
    float logprob; /* valid if want_logprobs */
    uint32_t n_top;
    struct engine_logprob top[ENGINE_MAX_LOGPROBS]; /* best first, ties by lowest id */
};

/* One row of a decode step: `token` is appended to the sequence at its next position, then the
 * following token is drawn. History for penalties is kept by the sequence (engine_seq_history_*).
 */
struct engine_row {
    struct engine_seq *seq;
    uint32_t token;
    uint32_t follows;                       /* of engine_step_begin alone, else 0 */
    const struct engine_sampling *sampling; /* NULL: draw nothing */
    uint32_t n_generated; /* tokens generated before the one drawn now: min_tokens counts these */
    float *logits;        /* vocab_size floats to fill, or NULL */
    struct engine_draw draw; /* out */
};

/* The pages that a chunk completes fill from their start as layers finish. Whoever sends them need
 * not wait for the chunk's end: `ready` says that the first page_bytes bytes of each of them are
 * final. It runs on the compute thread, with a rising number each time, at least page_bytes of a
 * page / n_pieces apart, and never with the whole page: that is what the call's return says. */
struct engine_pieces {
    uint32_t n_pieces; /* >= 2 */
    void (*ready)(void *cookie, size_t page_bytes);
    void *cookie;
};

/* Opens an engine and allocates all it will ever need: nothing below allocates pool memory again.
 * Errors: INVALID (bad option or unsupported model, named), NOT_FOUND, CORRUPT (file), EXHAUSTED
 * (memory; the text says how much is missing). `progress` (may be NULL) is advanced by one at least
 * at every layer of a running chunk and every few of a step, so that a long one is not taken for a
 * hang; it must outlive the engine. */
must_check enum status engine_open(const struct engine_options *options, _Atomic uint64_t *progress,
                                   struct engine **ret_engine, struct error *err);
/* All sequences must be freed before. NULL is fine. */
void engine_close(struct engine *engine);
const struct engine_info *engine_info(const struct engine *engine);
/* One line a memory item (weights, pool, slots, activations) into `line` callbacks, for the
 * start-up table. */
void engine_memory_report(const struct engine *engine,
                          void (*line)(void *cookie, const char *item, size_t bytes), void *cookie);

/* Decode steps that the device has recorded whole, at open: how many sizes of batch, the seconds
 * that it took and the bytes of the device that it took, and the kernels of the largest. */
struct engine_graphs {
    uint32_t n; /* 0: there are none, by wish or because the device records none */
    uint32_t n_launches;
    double seconds;
    uint64_t bytes;
};
void engine_graphs_report(const struct engine *engine, struct engine_graphs *ret_graphs);
/* Whether the steps that follow use them, which they do after open. For measurements and tests:
 * what a step computes is the same bits. */
void engine_graphs_use(struct engine *engine, bool use);

/* --- Sequences: loop thread
 * --------------------------------------------------------------------------- */

/* A sequence of 0 tokens. `owner` labels its pages and slots in the debug listing. EXHAUSTED: no
 * window/state slot. */
must_check enum status engine_seq_create(struct engine *engine, uint64_t owner,
                                         struct engine_seq **ret_seq);
/* Returns pages and slots. NULL is fine. */
void engine_seq_free(struct engine_seq *seq);
/* Makes sure that pages exist for positions below n_tokens. EXHAUSTED leaves the sequence as it
 * was. */
must_check enum status engine_seq_reserve(struct engine_seq *seq, uint32_t n_tokens);
/* A second sequence with the same contents: full pages shared, the partial page, window and state
 * copied. Loop thread, while no compute call holds `seq`. */
must_check enum status engine_seq_fork(struct engine_seq *seq, uint64_t owner,
                                       struct engine_seq **ret_seq);
/* Tokens whose KV is in the sequence. */
uint32_t engine_seq_n_tokens(const struct engine_seq *seq);
/* Page of tokens [256 i, 256 i + 256). */
uint32_t engine_seq_page(const struct engine_seq *seq, uint32_t page_i);
uint32_t engine_seq_n_pages(const struct engine_seq *seq);
/* Tells the sampler what was there before: `ids` are prompt + emitted tokens, the last n_generated
 * of them generated. Needed only if the sampling has penalties or the engine is scripted; copies.
 */
must_check enum status engine_seq_history_set(struct engine_seq *seq, const uint32_t *ids,
                                              uint32_t n_ids, uint32_t n_generated);

/* Pages a sequence of n_tokens needs. */
uint32_t engine_pages_for(const struct engine *engine, uint32_t n_tokens);
uint32_t engine_pages_free(const struct engine *engine);
uint32_t engine_slots_free(const struct engine *engine);
/* All pages and slots that are not free, with owner, age and reason: /debug/pages. */
void engine_debug_json(const struct engine *engine, struct json_writer *w);
/* Gauges of the pool's ledgers; the registry must be gone before the engine. */
void engine_metrics_register(struct engine *engine, struct metrics *metrics);
/* Marks a page as `sending` / back to `live` (prefill: bytes are being read by puts). A sending
 * page whose sequence is freed stays out of the pool until engine_page_sent. Counted: pairs must
 * match. */
void engine_page_sending(struct engine *engine, uint32_t page);
void engine_page_sent(struct engine *engine, uint32_t page);

/* Where page lies in the memory of the device that computes: to be named as `dst` of the pieces of
 * engine_accept_parcel, else not to be touched. */
uint8_t *engine_page_address(const struct engine *engine, uint32_t page);
/* The whole page from one place to another, or to host memory. Any thread. SYSTEM: the device
 * failed. */
must_check enum status engine_page_copy(struct engine *engine, uint32_t dst, uint32_t src);
must_check enum status engine_page_read(struct engine *engine, uint32_t page, void *ret_bytes);
/* Makes host memory that pieces of parcels will lie in fast to read for the device, until
 * engine_unshare, before which it may not go. Before the first of the other and after the last. An
 * error leaves things as they were: the pieces can be accepted all the same. */
must_check enum status engine_share(struct engine *engine, void *memory, size_t bytes,
                                    struct error *err);
void engine_unshare(struct engine *engine, void *memory);

/* --- Memory of the device, for bytes that leave from it and land in it without a stop in the
 * host's. Pages lie in it where engine_page_address says, one after the other from page 0 on.
 * UNSUPPORTED: there is no device with memory of its own.
 * --------------------------------------------------- */

/* What a transport has to take it for. */
enum engine_memory_kind { ENGINE_MEMORY_HOST, ENGINE_MEMORY_CUDA };

/* Zeroed memory of the device that accepts parcels, an allocation of its own; freed by
 * engine_close. Loop thread, before the first compute call. EXHAUSTED. */
must_check enum status engine_device_alloc(struct engine *engine, size_t bytes,
                                           uint8_t **ret_memory, enum engine_memory_kind *ret_kind,
                                           struct error *err);
/* The calling thread is going to use that memory by way of a library that asks the driver. Any
 * thread. */
void engine_device_attach(struct engine *engine);
/* Copies between it and the host's, or within either. Any thread. SYSTEM. */
must_check enum status engine_device_move(struct engine *engine, void *dst, const void *src,
                                          size_t bytes);
/* The checksum of a parcel that lies in it, over its pieces in place (dst ignored). Any thread.
 * SYSTEM. */
must_check enum status engine_device_sum(struct engine *engine, uint64_t transfer_id,
                                         uint32_t parcel_seq, const struct parcel_piece *pieces,
                                         uint32_t n_pieces, uint64_t *ret_checksum);

/* --- Compute: the compute thread, one call at a time
 * --------------------------------------------------- */

/* Appends n ids (n <= max_chunk_tokens) to the sequence; pages must be reserved. With `row`
 * non-NULL, row->seq and row->token are ignored: logits / draw of the token after the last id are
 * made. `cancel` (may be NULL) is looked at before every layer: CANCELLED leaves the sequence good
 * for nothing but engine_seq_free. `pieces` may be NULL. */
must_check enum status engine_prefill(struct engine *engine, struct engine_seq *seq,
                                      const uint32_t *ids, uint32_t n_ids, struct engine_row *row,
                                      const _Atomic bool *cancel,
                                      const struct engine_pieces *pieces);
/* One decode step of n_rows distinct sequences. */
must_check enum status engine_step(struct engine *engine, struct engine_row *rows, uint32_t n_rows);
/* A step in two parts, of an engine opened with lookahead: two may be begun and not ended, and the
 * second is then asked of the device before the host has seen what the first drew. `rows` are the
 * engine's until the end, which fills them as engine_step does; ends come in the order of the
 * begins. A row of the second whose sequence is in the first doesn't know its token: with `follows`
 * = i + 1 it is what row i of the first draws, of the same sequence, and is written to `token` when
 * that ended. The device must draw it (engine_draws_there), and the host must want no logits and no
 * draw of its own of any row of the first: INVALID.
 *
 * From the begin to the end the sequences are the engine's: a row that turns out to have been one
 * too many writes to its own pages and slot, which must be there until it has, so engine_seq_free
 * of such a sequence is a fault of ours that ends the process. n_tokens counts the token from the
 * begin on. No other compute call in between. An end that fails has ended too. */
must_check enum status engine_step_begin(struct engine *engine, struct engine_row *rows,
                                         uint32_t n_rows);
must_check enum status engine_step_end(struct engine *engine);
/* Steps begun and not ended. */
uint32_t engine_n_begun(const struct engine *engine);
/* Whether it was opened with lookahead. Any thread. */
bool engine_looks_ahead(const struct engine *engine);
/* Whether the device draws such a row, in place of the host: with the host's token. What needs more
 * than logits and an id (log probabilities, penalties, biases, banned ids) the host draws. Any
 * thread. */
bool engine_draws_there(const struct engine *engine, const struct engine_sampling *sampling,
                        uint32_t n_generated);
/* A further draw from the logits of the last engine_prefill (samples 1..n-1 of a request with n >
 * 1). */
must_check enum status engine_draw_again(struct engine *engine, struct engine_seq *seq,
                                         const struct engine_sampling *sampling,
                                         uint32_t n_generated, struct engine_draw *ret_draw);

/* --- Hand-off: images
 * -------------------------------------------------------------------------------- */

/* Page images are parts of the pool. A tail image is window + compressor state as they stand after
 * n_tokens; its size depends only on the engine and n_tokens, and the fingerprint covers its form.
 * Sender: after the last engine_prefill, on the thread that computed. Entries of the partial page
 * beyond n_tokens are zeroed in the same call. */
size_t engine_tail_bytes(const struct engine *engine, uint32_t n_tokens);
must_check enum status engine_tail_write(struct engine *engine, struct engine_seq *seq, void *dst,
                                         size_t dst_bytes);
/* Receiver: copies the pieces of a parcel of pages, 8 bytes aligned all, from landing slots to
 * where they belong, and compares the checksum of what then lies there (kernels/parcel.h). Any
 * thread. CHECKSUM: they hold rubbish that nobody may use; SYSTEM: the device failed, with the
 * same. */
must_check enum status engine_accept_parcel(struct engine *engine, uint64_t transfer_id,
                                            uint32_t parcel_seq, const struct parcel_piece *pieces,
                                            uint32_t n_pieces, uint64_t expected_checksum);
/* Receiver: the sequence, empty until now, has n_tokens tokens after this; its pages must have been
 * accepted. CORRUPT if the image is not one of this engine; SYSTEM. Any thread. */
must_check enum status engine_tail_read(struct engine *engine, struct engine_seq *seq,
                                        uint32_t n_tokens, const void *src, size_t src_bytes);

#endif
