/* transport/preflight.c - the first puts to a peer: are the bytes right, what does a put cost, how
 * fast is it.
 *
 * A chain of ordinary puts on the loop thread, one at a time: the pattern into every slot (which
 * also pays the milliseconds of the first mapping), small puts, 16 MiB, the pattern again. Times
 * are taken by the put thread. Timing uses the same slots over and over, since the rest of the
 * landing area holds live parcels.
 *
 * Under test nothing is assumed of the peer but its slots; the pattern's check is the peer's
 * (put_pattern_check), because this side can't know what arrived.
 */
#include "transport/preflight.h"

#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "transport/peer.h"

enum {
    SMALL_BYTES = 4096,
    N_SMALL = 256,
    BULK_BYTES = 16 << 20,
};

static const uint64_t max_slot_bytes = 16 << 20;

enum stage { STAGE_WARM, STAGE_SMALL, STAGE_BULK_WARM, STAGE_BULK, STAGE_PATTERN, STAGE_END };

/* Owner: its peer, on the loop thread. */
struct preflight {
    struct put_peer *peer;
    uint64_t seed;
    put_preflight_fn done;
    void *cookie;
    struct region *source;
    uint8_t *memory;
    struct put_preflight_source from; /* its region NULL: puts read `memory` itself */
    enum stage stage;
    uint32_t slot_i;
    uint64_t put_cost_ns, bandwidth_bytes_per_s;
    uint32_t n_slots;
    struct put_slot slots[PUT_PREFLIGHT_MAX_SLOTS];
};

/* ---- pattern ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static uint64_t pattern_word(uint64_t seed, uint64_t word_i)
{
    return mix(seed + (word_i + 1) * 0x9e3779b97f4a7c15ull);
}

uint64_t put_pattern_seed(uint64_t seed, uint32_t slot_i)
{
    return mix(seed ^ mix(slot_i + 1));
}

void put_pattern_fill(uint8_t *bytes, size_t n_bytes, uint64_t seed)
{
    for (size_t i = 0; i < n_bytes; i += 8) {
        uint8_t word[8];
        put_le64(word, pattern_word(seed, i / 8));
        memcpy(bytes + i, word, n_bytes - i < 8 ? n_bytes - i : 8);
    }
}

bool put_pattern_check(const uint8_t *bytes, size_t n_bytes, uint64_t seed, size_t *ret_offset)
{
    for (size_t i = 0; i < n_bytes; i += 8) {
        uint8_t word[8];
        put_le64(word, pattern_word(seed, i / 8));
        if (memcmp(bytes + i, word, n_bytes - i < 8 ? n_bytes - i : 8) != 0) {
            if (ret_offset != NULL) {
                *ret_offset = i;
            }
            return false;
        }
    }
    return true;
}

/* ---- the chain ---- */

static void preflight_put_done(void *cookie, const struct put_result *result);

void preflight_free(struct preflight *preflight)
{
    mem_free(preflight->memory);
    mem_free(preflight);
}

static void preflight_end(struct preflight *preflight, enum status status)
{
    struct put_peer *peer = preflight->peer;
    struct put_preflight_result result = {.status = status, .lanes = peer->lanes};
    if (status == STATUS_OK) {
        result.direct = peer->is_direct;
        result.put_cost_ns = peer->put_cost_ns = preflight->put_cost_ns;
        result.bandwidth_bytes_per_s = peer->bandwidth_bytes_per_s =
            preflight->bandwidth_bytes_per_s;
    }
    peer->preflight = NULL;
    if (!preflight->from.region) {
        region_free(preflight->source);
    }
    put_preflight_fn done = preflight->done;
    void *cookie = preflight->cookie;
    preflight_free(preflight);
    done(cookie, &result);
}

static uint32_t runs_pattern(const struct preflight *preflight, struct put_run *runs)
{
    const struct put_slot *slot = &preflight->slots[preflight->slot_i];
    runs[0] = (struct put_run){preflight->from.offset, slot->remote_region, slot->remote_offset,
                               slot->bytes};
    return 1;
}

/* All from the same place of the source, so that no two are adjacent in both memories and merge. */
static uint32_t runs_small(const struct preflight *preflight, struct put_run *runs)
{
    for (uint32_t i = 0; i < N_SMALL; i++) {
        const struct put_slot *slot = &preflight->slots[i % preflight->n_slots];
        runs[i] = (struct put_run){preflight->from.offset, slot->remote_region, slot->remote_offset,
                                   SMALL_BYTES};
    }
    return N_SMALL;
}

static uint32_t runs_bulk(const struct preflight *preflight, struct put_run *runs)
{
    uint32_t n = 0;
    for (uint64_t bytes = 0; bytes < BULK_BYTES && n < PUT_MAX_RUNS; n++) {
        const struct put_slot *slot = &preflight->slots[n % preflight->n_slots];
        uint64_t piece = slot->bytes < BULK_BYTES - bytes ? slot->bytes : BULK_BYTES - bytes;
        runs[n] = (struct put_run){preflight->from.offset, slot->remote_region, slot->remote_offset,
                                   piece};
        bytes += piece;
    }
    return n;
}

static enum status preflight_next(struct preflight *preflight, struct error *err)
{
    const struct put_preflight_source *from = &preflight->from;
    struct put_run *runs = mem_array(PUT_MAX_RUNS, sizeof runs[0]);
    uint32_t n;
    if (preflight->stage == STAGE_WARM || preflight->stage == STAGE_PATTERN) {
        uint64_t bytes = preflight->slots[preflight->slot_i].bytes;
        put_pattern_fill(preflight->memory, bytes,
                         put_pattern_seed(preflight->seed, preflight->slot_i));
        enum status status =
            from->region ? from->write(from->cookie, region_base(from->region) + from->offset,
                                       preflight->memory, bytes)
                         : STATUS_OK;
        if (status != STATUS_OK) {
            mem_free(runs);
            return error_set(err, status, "the pattern can't be written where puts read it");
        }
        n = runs_pattern(preflight, runs);
    } else if (preflight->stage == STAGE_SMALL) {
        n = runs_small(preflight, runs);
    } else {
        n = runs_bulk(preflight, runs);
    }
    enum status status = put_submit(preflight->peer, preflight->source, runs, n, preflight_put_done,
                                    preflight, NULL, err);
    mem_free(runs);
    return status;
}

static void preflight_put_done(void *cookie, const struct put_result *result)
{
    struct preflight *preflight = cookie;
    if (result->status != STATUS_OK) {
        preflight_end(preflight, result->status);
        return;
    }
    if (preflight->stage == STAGE_SMALL) {
        uint64_t cost_ns = result->post_ns / result->n_posts;
        preflight->put_cost_ns = cost_ns > 0 ? cost_ns : 1;
    } else if (preflight->stage == STAGE_BULK) {
        double seconds = (double)(result->span_ns > 0 ? result->span_ns : 1) * 1e-9;
        preflight->bandwidth_bytes_per_s = (uint64_t)((double)result->bytes / seconds);
    }
    bool pattern = preflight->stage == STAGE_WARM || preflight->stage == STAGE_PATTERN;
    if (pattern && preflight->slot_i + 1 < preflight->n_slots) {
        preflight->slot_i++;
    } else {
        preflight->slot_i = 0;
        preflight->stage++;
    }
    if (preflight->stage == STAGE_END) {
        preflight_end(preflight, STATUS_OK);
        return;
    }
    struct error err;
    enum status status = preflight_next(preflight, &err);
    if (status != STATUS_OK) {
        preflight_end(preflight, preflight->peer->is_closing ? STATUS_CANCELLED : status);
    }
}

static enum status slots_check(const struct put_slot *slots, uint32_t n_slots,
                               uint64_t *ret_max_bytes, struct error *err)
{
    uint64_t max_bytes = 0;
    if (n_slots == 0 || n_slots > PUT_PREFLIGHT_MAX_SLOTS) {
        return error_set(err, STATUS_INVALID, "a preflight over %u slots (1 to %d)", n_slots,
                         PUT_PREFLIGHT_MAX_SLOTS);
    }
    for (uint32_t i = 0; i < n_slots; i++) {
        if (slots[i].bytes % 8 != 0 || slots[i].bytes < SMALL_BYTES ||
            slots[i].bytes > max_slot_bytes) {
            return error_set(err, STATUS_INVALID, "a preflight slot of %llu bytes",
                             (unsigned long long)slots[i].bytes);
        }
        if (slots[i].bytes > max_bytes) {
            max_bytes = slots[i].bytes;
        }
    }
    *ret_max_bytes = max_bytes;
    return STATUS_OK;
}

enum status put_preflight(struct put_peer *peer, const struct put_slot *slots, uint32_t n_slots,
                          uint64_t seed, put_preflight_fn done, void *cookie, struct error *err)
{
    return put_preflight_from(peer, NULL, slots, n_slots, seed, done, cookie, err);
}

enum status put_preflight_from(struct put_peer *peer, const struct put_preflight_source *source,
                               const struct put_slot *slots, uint32_t n_slots, uint64_t seed,
                               put_preflight_fn done, void *cookie, struct error *err)
{
    uint64_t max_bytes = 0;
    enum status status = slots_check(slots, n_slots, &max_bytes, err);
    if (status != STATUS_OK) {
        return status;
    }
    if (peer->preflight != NULL) {
        return error_set(err, STATUS_EXISTS, "a preflight of peer %s is running", peer->name);
    }
    if (source != NULL && source->bytes < max_bytes) {
        return error_set(err, STATUS_INVALID, "a preflight over slots of %llu bytes from %llu",
                         (unsigned long long)max_bytes, (unsigned long long)source->bytes);
    }
    struct preflight *preflight = mem_zalloc(sizeof *preflight);
    preflight->peer = peer;
    preflight->seed = seed;
    preflight->done = done;
    preflight->cookie = cookie;
    preflight->n_slots = n_slots;
    memcpy(preflight->slots, slots, n_slots * sizeof slots[0]);
    preflight->memory = mem_try_aligned(4096, max_bytes);
    if (preflight->memory == NULL) {
        mem_free(preflight);
        return error_set(err, STATUS_EXHAUSTED, "no memory for a preflight of %llu bytes",
                         (unsigned long long)max_bytes);
    }
    if (source != NULL) {
        preflight->from = *source;
        preflight->source = source->region;
    } else {
        status = region_register_source(peer->transport, preflight->memory, max_bytes, REGION_HOST,
                                        &preflight->source, err);
    }
    if (status == STATUS_OK) {
        status = preflight_next(preflight, err);
    }
    if (status != STATUS_OK) {
        if (source == NULL) {
            region_free(preflight->source);
        }
        preflight_free(preflight);
        return status;
    }
    peer->preflight = preflight;
    return STATUS_OK;
}

/* ---- plan ---- */

uint32_t put_plan_pieces_of(uint64_t put_cost_ns, uint64_t bandwidth_bytes_per_s, uint64_t bytes,
                            uint32_t n_puts_per_piece, uint32_t max_pieces)
{
    if (bandwidth_bytes_per_s == 0 || max_pieces <= 1) {
        return 1;
    }
    double whole_ns = (double)bytes / (double)bandwidth_bytes_per_s * 1e9;
    double piece_ns = (double)(put_cost_ns > 0 ? put_cost_ns : 1) *
                      (double)(n_puts_per_piece > 0 ? n_puts_per_piece : 1);
    if (whole_ns < 1e6) {
        return 1;
    }
    double pieces = 0.1 * whole_ns / piece_ns;
    return pieces < 1 ? 1 : pieces < max_pieces ? (uint32_t)pieces : max_pieces;
}

uint32_t put_plan_pieces(const struct put_peer *peer, uint64_t bytes, uint32_t n_puts_per_piece,
                         uint32_t max_pieces)
{
    return put_plan_pieces_of(peer->put_cost_ns, peer->bandwidth_bytes_per_s, bytes,
                              n_puts_per_piece, max_pieces);
}
