/* engine/prompt.h - which chunk of which prompt next.
 *
 * Shared by prefill nodes and by the local prefill of decode nodes. A prompt is n_total tokens of
 * which n_done are computed; each call of prompt_queue_next picks one prompt and says how many of
 * its tokens the next chunk holds.
 *
 * Policy: the prompt with the fewest tokens left goes first, so that a short one does not wait
 * behind a long one; but the prompt that has waited longest is taken once it has been overtaken
 * PROMPT_MAX_OVERTAKEN times, so that a steady flow of short ones can't starve it. Chunks end on
 * page boundaries except a prompt's last, so that every finished chunk finishes pages.
 *
 * Thread: loop. Bound: the caller's (it admits).
 */
#ifndef BATON_ENGINE_PROMPT_H
#define BATON_ENGINE_PROMPT_H

#include <stdbool.h>
#include <stdint.h>

/* At 2,048-token chunks a 60,000-token prompt still finishes within 9 x its own time under a flood
 * of short ones. */
enum { PROMPT_MAX_OVERTAKEN = 8 };

struct prompt_queue;

/* Embedded by the caller in whatever a prompt belongs to. Zero it, fill n_total and n_done, add it.
 */
struct prompt {
    uint32_t n_total, n_done;
    /* the queue's own */
    struct prompt *prev, *next;
    uint32_t n_overtaken;
    bool queued;
};

struct prompt_queue *prompt_queue_create(uint32_t max_chunk_tokens, uint32_t page_tokens);
void prompt_queue_free(struct prompt_queue *queue);
/* Oldest last. */
void prompt_queue_add(struct prompt_queue *queue, struct prompt *prompt);
/* Also while it is not queued: no effect. */
void prompt_queue_remove(struct prompt_queue *queue, struct prompt *prompt);
uint32_t prompt_queue_length(const struct prompt_queue *queue);
uint64_t prompt_queue_tokens_left(const struct prompt_queue *queue);
/* Prompts that are computed before one of n_tokens that came now: what `Queued{ahead}` says. */
uint32_t prompt_queue_ahead(const struct prompt_queue *queue, const struct prompt *prompt);
/* Picks; NULL if nothing is queued. The prompt stays queued: the caller adds *ret_n_tokens to
 * n_done when the chunk is done, and removes the prompt after its last. At most `max_tokens` (0: no
 * further bound). */
struct prompt *prompt_queue_next(struct prompt_queue *queue, uint32_t max_tokens,
                                 uint32_t *ret_n_tokens);

#endif
