#ifndef BATON_ROUTER_API_RENDER_PARTS_H
#define BATON_ROUTER_API_RENDER_PARTS_H

#include "router/api_render.h"

/* What the files of api_render.h share; of no use outside them. */

/* Appends the value of a choice's `logprobs` and takes the tokens out; NULL gives null. */
void api_logprobs_put(struct api_logprobs *logprobs, struct buf *out);

/* The same for a piece of a stream: null also when no token waits. */
void api_logprobs_put_piece(struct api_logprobs *logprobs, struct buf *out);

/* Appends the object `usage`. */
void api_usage_put(const struct api_usage *usage, struct buf *out);

#endif
