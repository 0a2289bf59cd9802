/* See prompt.h for the policy. A list in order of arrival; queues are bounded by admission to some
 * hundreds, so the scan is cheaper than any heap that would have to be kept in order while n_done
 * moves. */
#include "engine/prompt.h"

#include <stddef.h>

#include "base/mem.h"

struct prompt_queue {
    uint32_t max_chunk_tokens, page_tokens;
    uint32_t length;
    struct prompt *oldest, *newest;
};

struct prompt_queue *prompt_queue_create(uint32_t max_chunk_tokens, uint32_t page_tokens)
{
    struct prompt_queue *queue = mem_zalloc(sizeof(*queue));
    queue->max_chunk_tokens = max_chunk_tokens;
    queue->page_tokens = page_tokens;
    return queue;
}

void prompt_queue_free(struct prompt_queue *queue)
{
    mem_free(queue);
}

void prompt_queue_add(struct prompt_queue *queue, struct prompt *prompt)
{
    prompt->prev = queue->newest;
    prompt->next = NULL;
    prompt->n_overtaken = 0;
    prompt->queued = true;
    if (queue->newest) {
        queue->newest->next = prompt;
    } else {
        queue->oldest = prompt;
    }
    queue->newest = prompt;
    queue->length++;
}

void prompt_queue_remove(struct prompt_queue *queue, struct prompt *prompt)
{
    if (!prompt->queued) {
        return;
    }
    if (prompt->prev) {
        prompt->prev->next = prompt->next;
    } else {
        queue->oldest = prompt->next;
    }
    if (prompt->next) {
        prompt->next->prev = prompt->prev;
    } else {
        queue->newest = prompt->prev;
    }
    prompt->queued = false;
    queue->length--;
}

uint32_t prompt_queue_length(const struct prompt_queue *queue)
{
    return queue->length;
}

static uint32_t tokens_left(const struct prompt *prompt)
{
    return prompt->n_total - prompt->n_done;
}

uint64_t prompt_queue_tokens_left(const struct prompt_queue *queue)
{
    uint64_t sum = 0;
    for (const struct prompt *at = queue->oldest; at; at = at->next) {
        sum += tokens_left(at);
    }
    return sum;
}

uint32_t prompt_queue_ahead(const struct prompt_queue *queue, const struct prompt *prompt)
{
    uint32_t n = 0;
    for (const struct prompt *at = queue->oldest; at && at != prompt; at = at->next) {
        n += tokens_left(at) <= tokens_left(prompt);
    }
    return n;
}

struct prompt *prompt_queue_next(struct prompt_queue *queue, uint32_t max_tokens,
                                 uint32_t *ret_n_tokens)
{
    struct prompt *oldest = queue->oldest, *best = oldest;
    if (!oldest) {
        return NULL;
    }
    if (oldest->n_overtaken < PROMPT_MAX_OVERTAKEN) {
        for (struct prompt *at = oldest->next; at; at = at->next) {
            if (tokens_left(at) < tokens_left(best)) {
                best = at;
            }
        }
    }
    if (best != oldest) {
        oldest->n_overtaken++;
    } else {
        oldest->n_overtaken = 0;
    }
    uint32_t n = queue->max_chunk_tokens;
    if (max_tokens && max_tokens < n) {
        n = max_tokens;
    }
    if (tokens_left(best) <= n) {
        n = tokens_left(best);
    } else {
        uint32_t over = (best->n_done + n) % queue->page_tokens;
        if (over < n) {
            n -= over;
        }
    }
    *ret_n_tokens = n;
    return best;
}
