/* See batch.h. */
#include "engine/batch.h"

#include "base/mem.h"
#include "engine/sampler.h"

void batch_init(struct batch *batch, uint32_t max_rows, uint32_t max_seqs)
{
    batch->seqs = mem_array(max_rows, sizeof(*batch->seqs));
    batch->tokens = mem_array(max_rows, sizeof(*batch->tokens));
    batch->positions = mem_array(max_rows, sizeof(*batch->positions));
    batch->seq_of = mem_array(max_rows, sizeof(*batch->seq_of));
    batch->draws = mem_array(max_seqs, sizeof(*batch->draws));
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
    mem_free(batch->draws);
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
    batch->rows.draws = NULL;
    add_seq(batch, seq, ids, n);
}

void batch_set_step(struct batch *batch, const struct engine_row *rows, uint32_t n)
{
    batch->rows.n_rows = batch->rows.n_seqs = 0;
    batch->rows.draws = NULL;
    for (uint32_t i = 0; i < n; i++) {
        add_seq(batch, rows[i].seq, &rows[i].token, 1);
    }
}

void batch_set_drawn_step(struct batch *batch, const struct engine_row *rows, uint32_t n)
{
    batch_set_step(batch, rows, n);
    batch->rows.draws = batch->draws;
    for (uint32_t i = 0; i < n; i++) {
        const struct engine_row *row = &rows[i];
        bool there = row->sampling && sampler_can_be_there(row->sampling, row->n_generated);
        batch->draws[i] = there ? sampler_there(row->sampling) : (struct ops_draw){.is_drawn = 0};
        if (row->follows) {
            batch->tokens[i] = OPS_FOLLOWS(row->follows - 1);
        }
    }
}
