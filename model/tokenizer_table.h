#ifndef BATON_MODEL_TOKENIZER_TABLE_H
#define BATON_MODEL_TOKENIZER_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/bpe.h"
#include "model/tokenizer.h"

/* What tokenizer_load.c builds and tokenizer.c reads; private to the two. */

enum token_flags {
    TOKEN_ADDED = 1,
    TOKEN_SPECIAL = 2,
    TOKEN_WHOLE = 4, /* a piece with exactly these bytes becomes this token */
};

/* Added tokens of one pass, as a tree over their bytes. Node 0 is the root. */
struct added_node {
    uint32_t child, sibling; /* 0: none */
    uint32_t id;             /* token that ends here, or BPE_NONE */
    uint8_t byte;
};

struct added_tree {
    struct added_node *node;
    uint32_t n_nodes, capacity;
    bool starts[256]; /* bytes that a token starts with */
};

/* The reference looks for tokens that are not normalized first, for the others in what is left. */
enum { N_ADDED_PASSES = 2 };

struct tokenizer {
    uint32_t n_vocab;
    uint32_t longest_bytes; /* of a token */
    uint8_t *text;          /* of all tokens, one after the other */
    uint32_t *offset;       /* n_vocab + 1: token i is [offset[i], offset[i + 1]) */
    uint8_t *flags;         /* enum token_flags of each */
    uint32_t *slot;         /* open addressing from bytes to id, at most half full */
    uint32_t n_slots;       /* a power of two */
    struct added_tree added[N_ADDED_PASSES];
    struct bpe bpe;
    uint8_t digest[TOKENIZER_DIGEST_BYTES];
};

/* The token of the model's vocabulary with these bytes, or BPE_NONE. */
uint32_t tokenizer_table_find(const struct tokenizer *tokenizer, const uint8_t *bytes, size_t n);

/* Slot where a token of these bytes is or belongs. */
uint32_t tokenizer_table_slot(const struct tokenizer *tokenizer, const uint8_t *bytes, size_t n);

#endif
