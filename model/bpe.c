/*
 * Two ways to the same result. A short piece (nearly all of them) looks through its few pairs for
 * the lowest rank again and again, in arrays on the stack. A long one keeps its pairs in a heap,
 * so that a prompt of four megabytes without a space takes n log n steps and not n squared.
 * Entries of the heap are not removed when their pair vanishes; the rank kept for each position
 * tells whether an entry still speaks of what is there. A merge takes one entry out and puts at
 * most two in, so twice the length of the piece is room enough.
 */
#include "model/bpe.h"

#include <assert.h>
#include <string.h>

#include "base/mem.h"

/* Below this, scanning for the least rank beats the heap's bookkeeping. */
enum { SHORT_BYTES = 64 };

static uint32_t slot_of(const struct bpe *bpe, uint32_t left, uint32_t right)
{
    uint64_t h = ((uint64_t)left << 32 | right) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(h >> 32) & (bpe->n_slots - 1);
}

void bpe_init(struct bpe *bpe, uint32_t n_merges)
{
    assert(n_merges <= BPE_MAX_MERGES);
    uint32_t n_slots = 2;
    while (n_slots < 2 * n_merges) {
        n_slots *= 2;
    }
    bpe->n_slots = n_slots;
    bpe->slot = mem_array(n_slots, sizeof(bpe->slot[0]));
    for (uint32_t i = 0; i < n_slots; i++) {
        bpe->slot[i].left = BPE_NONE;
    }
    for (unsigned b = 0; b < 256; b++) {
        bpe->byte_id[b] = BPE_NONE;
    }
}

void bpe_fini(struct bpe *bpe)
{
    mem_free(bpe->slot);
    bpe->slot = NULL;
}

enum status bpe_add(struct bpe *bpe, struct bpe_merge merge)
{
    uint32_t i = slot_of(bpe, merge.left, merge.right);
    while (bpe->slot[i].left != BPE_NONE) {
        if (bpe->slot[i].left == merge.left && bpe->slot[i].right == merge.right) {
            return STATUS_EXISTS;
        }
        i = (i + 1) & (bpe->n_slots - 1);
    }
    bpe->slot[i] = merge;
    return STATUS_OK;
}

static const struct bpe_merge *find(const struct bpe *bpe, uint32_t left, uint32_t right)
{
    uint32_t i = slot_of(bpe, left, right);
    while (bpe->slot[i].left != BPE_NONE) {
        if (bpe->slot[i].left == left && bpe->slot[i].right == right) {
            return &bpe->slot[i];
        }
        i = (i + 1) & (bpe->n_slots - 1);
    }
    return NULL;
}

static uint32_t rank_of(const struct bpe *bpe, uint32_t left, uint32_t right)
{
    const struct bpe_merge *merge = find(bpe, left, right);
    return merge == NULL ? BPE_NONE : merge->rank;
}

static enum status encode_short(const struct bpe *bpe, const uint8_t *piece, size_t n,
                                struct token_ids *ids)
{
    uint32_t id[SHORT_BYTES], rank[SHORT_BYTES];
    for (size_t i = 0; i < n; i++) {
        id[i] = bpe->byte_id[piece[i]];
    }
    for (size_t i = 0; i + 1 < n; i++) {
        rank[i] = rank_of(bpe, id[i], id[i + 1]);
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++) {
            best = rank[i] < rank[best] ? i : best;
        }
        if (rank[best] == BPE_NONE) {
            break;
        }
        id[best] = find(bpe, id[best], id[best + 1])->id;
        memmove(&id[best + 1], &id[best + 2], (n - best - 2) * sizeof(id[0]));
        if (best + 2 < n) {
            memmove(&rank[best + 1], &rank[best + 2], (n - best - 2) * sizeof(rank[0]));
        }
        n--;
        if (best > 0) {
            rank[best - 1] = rank_of(bpe, id[best - 1], id[best]);
        }
        if (best + 1 < n) {
            rank[best] = rank_of(bpe, id[best], id[best + 1]);
        }
    }
    return token_ids_append(ids, id, n);
}

/* A node of the piece as it stands; the node of a pair is its left one. */
struct node {
    uint32_t id, rank; /* rank of the pair that starts here, or BPE_NONE */
    uint32_t previous, next;
};

struct heap {
    uint64_t *entry; /* rank << 32 | position: the least is the next merge, leftmost first */
    size_t n;
};

static void sift_down(struct heap *heap, size_t i)
{
    uint64_t moved = heap->entry[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= heap->n) {
            break;
        }
        if (child + 1 < heap->n && heap->entry[child + 1] < heap->entry[child]) {
            child++;
        }
        if (heap->entry[child] >= moved) {
            break;
        }
        heap->entry[i] = heap->entry[child];
        i = child;
    }
    heap->entry[i] = moved;
}

static void heap_push(struct heap *heap, uint64_t entry)
{
    size_t i = heap->n++;
    while (i > 0 && heap->entry[(i - 1) / 2] > entry) {
        heap->entry[i] = heap->entry[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap->entry[i] = entry;
}

static uint64_t heap_pop(struct heap *heap)
{
    uint64_t least = heap->entry[0];
    heap->entry[0] = heap->entry[--heap->n];
    if (heap->n > 0) {
        sift_down(heap, 0);
    }
    return least;
}

static void rank_pair(const struct bpe *bpe, struct node *node, uint32_t at, struct heap *heap)
{
    uint32_t next = node[at].next;
    node[at].rank = next == BPE_NONE ? BPE_NONE : rank_of(bpe, node[at].id, node[next].id);
    if (node[at].rank != BPE_NONE) {
        heap_push(heap, (uint64_t)node[at].rank << 32 | at);
    }
}

static void merge_all(const struct bpe *bpe, struct node *node, struct heap *heap)
{
    while (heap->n > 0) {
        uint64_t entry = heap_pop(heap);
        uint32_t at = (uint32_t)entry;
        if (node[at].rank != (uint32_t)(entry >> 32)) {
            continue;
        }
        uint32_t gone = node[at].next;
        node[at].id = find(bpe, node[at].id, node[gone].id)->id;
        node[at].next = node[gone].next;
        if (node[at].next != BPE_NONE) {
            node[node[at].next].previous = at;
        }
        node[gone].rank = BPE_NONE;
        rank_pair(bpe, node, at, heap);
        if (node[at].previous != BPE_NONE) {
            rank_pair(bpe, node, node[at].previous, heap);
        }
    }
}

static enum status encode_long(const struct bpe *bpe, const uint8_t *piece, size_t n,
                               struct token_ids *ids)
{
    enum status status = STATUS_EXHAUSTED;
    if (n >= UINT32_MAX / 2) {
        return STATUS_EXHAUSTED;
    }
    struct node *node = mem_try_array(n, sizeof(*node));
    struct heap heap = {mem_try_array(2 * n, sizeof(uint64_t)), 0};
    if (node == NULL || heap.entry == NULL) {
        goto out;
    }
    for (uint32_t i = 0; i < n; i++) {
        node[i].id = bpe->byte_id[piece[i]];
        node[i].previous = i == 0 ? BPE_NONE : i - 1;
        node[i].next = i + 1 == n ? BPE_NONE : i + 1;
    }
    for (uint32_t i = 0; i < n; i++) {
        rank_pair(bpe, node, i, &heap);
    }
    merge_all(bpe, node, &heap);
    size_t n_before = ids->n;
    status = STATUS_OK;
    for (uint32_t i = 0; i != BPE_NONE && status == STATUS_OK; i = node[i].next) {
        status = token_ids_append(ids, &node[i].id, 1);
    }
    if (status != STATUS_OK) {
        ids->n = n_before;
    }
out:
    mem_free(heap.entry);
    mem_free(node);
    return status;
}

enum status bpe_encode(const struct bpe *bpe, const uint8_t *piece, size_t bytes,
                       struct token_ids *ids)
{
    if (bytes == 0) {
        return STATUS_OK;
    }
    return bytes <= SHORT_BYTES ? encode_short(bpe, piece, bytes, ids)
                                : encode_long(bpe, piece, bytes, ids);
}
