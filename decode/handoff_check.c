/* What a prefill node says of a transfer, held against what was asked for: see handoff_internal.h.
 */
#include "decode/handoff_internal.h"

#include "base/mem.h"
#include "node/wire.h"

enum {
    MAX_PARCEL_SLOTS = 4096,
    MAX_PAGE_PIECES =
        16, /* a piece that does not end its page has at least as small a part of it */
};

/* Do these pages go on where each of them ended, in pieces that are no dust? */
static bool pages_fit(const struct transfer *transfer, const Baton__FromPrefill__Parcel *parcel)
{
    uint64_t page_bytes = landing_slot_bytes(transfer->handoff->options.landing);
    if (parcel->n_pages == 0 || parcel->n_pages > MAX_PARCEL_SLOTS ||
        parcel->first_page > transfer->n_pages ||
        parcel->n_pages > transfer->n_pages - parcel->first_page ||
        parcel->bytes % parcel->n_pages || parcel->offset > page_bytes) {
        return false;
    }
    uint64_t bytes = parcel->bytes / parcel->n_pages, left = page_bytes - parcel->offset;
    if (bytes == 0 || bytes % 8 || bytes > left ||
        (bytes < left && bytes < page_bytes / MAX_PAGE_PIECES)) {
        return false;
    }
    for (uint32_t i = 0; i < parcel->n_pages; i++) {
        if (transfer->page_at[parcel->first_page + i] != parcel->offset) {
            return false;
        }
    }
    return true;
}

uint32_t handoff_parcel_n_slots(const struct transfer *transfer,
                                const Baton__FromPrefill__Parcel *parcel)
{
    size_t slot_bytes = landing_slot_bytes(transfer->handoff->options.landing);
    if (parcel->n_slot_runs % 2) {
        return 0;
    }
    if (parcel->kind == BATON__FROM_PREFILL__PARCEL__KIND__PAGES) {
        return pages_fit(transfer, parcel) ? parcel->n_pages : 0;
    }
    if (parcel->kind == BATON__FROM_PREFILL__PARCEL__KIND__TAIL) {
        bool fits = parcel->offset == transfer->tail_at && parcel->bytes > 0 &&
                    parcel->bytes % 8 == 0 && parcel->total_bytes == transfer->tail_bytes &&
                    parcel->bytes <= transfer->tail_bytes - transfer->tail_at;
        uint64_t n = (parcel->bytes + slot_bytes - 1) / slot_bytes;
        return fits && n <= MAX_PARCEL_SLOTS ? (uint32_t)n : 0;
    }
    return 0;
}

bool handoff_first_read(struct transfer *transfer, const Baton__FromPrefill__First *first)
{
    uint32_t vocab_size = engine_info(transfer->handoff->options.engine)->vocab_size;
    if (transfer->have_first || first->n_samples != transfer->request.n_samples) {
        return false;
    }
    transfer->first = mem_array(first->n_samples, sizeof(*transfer->first));
    for (size_t i = 0; i < first->n_samples; i++) {
        const Baton__FromPrefill__FirstSample *sample = first->samples[i];
        struct engine_draw *draw = &transfer->first[i].draw;
        if (sample->sample != i || sample->n_ids != 1 || sample->ids[0] >= vocab_size ||
            sample->n_logprobs != (transfer->request.sampling->logprobs ? 1 : 0) ||
            (sample->n_logprobs == 1 && !sample->logprobs[0]->token)) {
            return false;
        }
        draw->id = sample->ids[0];
        if (sample->n_logprobs == 1 && !wire_logprobs_read(sample->logprobs[0], vocab_size, draw)) {
            return false;
        }
    }
    transfer->have_first = true;
    return true;
}
