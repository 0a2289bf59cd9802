/* See batch.h. */
#include "engine/batch.h"

#include "base/mem.h"

void batch_init(struct batch *batch, uint32_t max_rows)
{
    batch->seqs = mem_array(max_rows, sizeof(*batch->seqs));
    batch->tokens = mem_array(max_rows, sizeof(*batch->tokens));
    batch->positions = mem_array(max_rows, sizeof(*batch->positions));
    batch->seq_of = mem_array(max_rows, sizeof(*batch->seq_of));
    batch->rows = (struct ops_rows){.tokens = batch->tokens,
                                    .positions = batch->positions,
                                    .seq_of = batch->seq_of,
                                    .seqs = batch->seqs};
}

void batch_fini(struct batch *batch)
{
    mem_free(batch->seqs);
    mem_free(batch->tokens);
    mem_free(batch->positions);
    mem_free(batch->seq_of);
}

static void add_seq(struct batch *batch, const struct engine_seq *seq, const uint32_t *ids,
                    uint32_t n)
{
    struct ops_rows *rows = &batch->rows;
    batch->seqs[rows->n_seqs] = (struct ops_seq){.pages = seq->pages,
                                                 .slot = seq->slot,
                                                 .first_row = rows->n_rows,
                                                 .n_rows = n,
                                                 .position = seq->n_tokens};
    for (uint32_t i = 0; i < n; i++) {
        batch->tokens[rows->n_rows] = ids[i];
        batch->positions[rows->n_rows] = seq->n_tokens + i;
        batch->seq_of[rows->n_rows++] = rows->n_seqs;
    }
    rows->n_seqs++;
}

void batch_set_prefill(struct batch *batch, const struct engine_seq *seq, const uint32_t *ids,
                       uint32_t n)
{
    batch->rows.n_rows = batch->rows.n_seqs = 0;
    add_seq(batch, seq, ids, n);
}

void batch_set_step(struct batch *batch, const struct engine_row *rows, uint32_t n)
{
    batch->rows.n_rows = batch->rows.n_seqs = 0;
    for (uint32_t i = 0; i < n; i++) {
        add_seq(batch, rows[i].seq, &rows[i].token, 1);
    }
}
