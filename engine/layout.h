/* engine/layout.h - page image, window slot, state slot and tail image of a model.
 *
 * One page holds 256 tokens of all layers. First, for each sparse layer in order, a slice: its
 * entries' bodies, their scales, its index keys, their scales. Then the entries of all heavy layers
 * together: bodies of every layer, then scales of every layer. Slices are padded to 256 bytes, the
 * page to 4 KiB; padding is zero. A window slot is, layer after layer, a ring of window + draft
 * bodies and their scales. A state slot is, for each sparse layer, 16 rows of K and S for the
 * entries and then for the keys; for each heavy layer the triple (m, z, a).
 *
 * A tail image after n tokens has, layer after layer: the window rows of the last min(n, window)
 * positions in ascending order (bodies, then scales); for a sparse layer with n >= 4 the first-half
 * K and S of the last complete window, then whole K and S rows of the n % 4 open tokens, entries
 * before keys; for a heavy layer whose window is open, the triple. Plain data; any thread.
 */
#ifndef BATON_ENGINE_LAYOUT_H
#define BATON_ENGINE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "kernels/ops.h"
#include "model/config.h"

enum { LAYOUT_DRAFT_TOKENS = 8, LAYOUT_PAGE_ALIGN = 4096, LAYOUT_SLICE_ALIGN = 256 };

struct layout {
    enum formats_entry_kind entry_kind;
    uint32_t n_layers, page_tokens;
    uint32_t head_dim, index_dim, window, ring;
    size_t entry_bytes, entry_scale_bytes; /* of one entry */
    size_t key_bytes, key_scale_bytes;     /* of one key */
    size_t page_used_bytes, page_bytes;    /* without and with padding to 4 KiB */
    size_t window_bytes, state_bytes;      /* of one slot */
    struct ops_place places[MODEL_MAX_LAYERS];
};

/* INVALID: sizes that packed entries can't have, with what they may be. */
must_check enum status layout_make(const struct model_config *config, bool exact,
                                   struct layout *ret_layout, struct error *err);
/* Words that say the whole layout, for the fingerprint: equal text, equal images. */
void layout_describe(const struct layout *layout, struct buf *out);

/* Bytes from the start of a full page that are final once the first n_layers layers have written
 * theirs; a multiple of 8, the whole page after the last layer. */
size_t layout_page_final(const struct layout *layout, uint32_t n_layers);

size_t layout_tail_bytes(const struct layout *layout, uint32_t n_tokens);
size_t layout_tail_max_bytes(const struct layout *layout);
/* Between a sequence's slots and its tail image. */
void layout_tail_write(const struct layout *layout, const uint8_t *window, const uint8_t *state,
                       uint32_t n_tokens, uint8_t *dst);
/* The slots become those of a sequence of n_tokens; what the image does not say is as at start. */
void layout_tail_read(const struct layout *layout, uint32_t n_tokens, const uint8_t *src,
                      uint8_t *window, uint8_t *state);
/* A state slot at 0 tokens: K 0, S and m -inf, z and a 0. */
void layout_state_reset(const struct layout *layout, uint8_t *state);
/* Zeroes the entries and keys of `page` (page_i of its sequence) that n_tokens do not complete. */
void layout_page_trim(const struct layout *layout, uint8_t *page, uint32_t page_i,
                      uint32_t n_tokens);

#endif
