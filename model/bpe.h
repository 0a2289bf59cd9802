#ifndef BATON_MODEL_BPE_H
#define BATON_MODEL_BPE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "model/tokenizer.h"

/*
 * Byte pair encoding of one piece: two neighbours become one, the pair of lowest rank first and of
 * equal ones the leftmost, until no pair has a merge. Built once, then read by any thread.
 */
struct bpe_merge {
    uint32_t left, right; /* ids; BPE_NONE in left marks a free slot */
    uint32_t rank;
    uint32_t id; /* what they become */
};

enum { BPE_MAX_MERGES = 1 << 22 };
#define BPE_NONE UINT32_MAX

struct bpe {
    uint32_t byte_id[256];  /* the token of each single byte */
    struct bpe_merge *slot; /* open addressing, at most half full */
    uint32_t n_slots;       /* a power of two */
};

/* Room for n_merges <= BPE_MAX_MERGES. */
void bpe_init(struct bpe *bpe, uint32_t n_merges);
void bpe_fini(struct bpe *bpe);

/* STATUS_EXISTS when the pair has a merge already. No more than n_merges may be added. */
enum status bpe_add(struct bpe *bpe, struct bpe_merge merge) must_check;

/* Appends the ids of the piece. STATUS_EXHAUSTED, and ids as it was. */
enum status bpe_encode(const struct bpe *bpe, const uint8_t *piece, size_t bytes,
                       struct token_ids *ids) must_check;

#endif
