/* kernels/cuda/tuned.h - the tuned variants, as the registry sees them: whether they serve, and
 * their places in the table.
 */
#ifndef BATON_KERNELS_CUDA_TUNED_H
#define BATON_KERNELS_CUDA_TUNED_H

#include "kernels/ops.h"

bool tuned_tensor_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                         struct error *why);
void tuned_tensor_project(struct ops *table);
void tuned_joined_project(struct ops *table);
/* Of what goes together: inputs with both `tensor` that it stands for. */
void tuned_finish(struct ops *table);
void tuned_tensor_compress(struct ops *table);
void tuned_tensor_indexer(struct ops *table);
void tuned_tensor_oproj(struct ops *table);
void tuned_tensor_route(struct ops *table);
void tuned_tensor_experts(struct ops *table);
void tuned_tensor_head(struct ops *table);
bool tuned_stream_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                         struct error *why);
void tuned_stream_experts(struct ops *table);
void tuned_blocks_experts(struct ops *table);
bool tuned_tensor_topk_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                              struct error *why);
void tuned_tensor_topk(struct ops *table);
void tuned_scaled_project(struct ops *table);
void tuned_scaled_indexer(struct ops *table);
void tuned_scaled_oproj(struct ops *table);
/* MXFP4 matrices are packed as CUDA_FP4_SCALED then, those of other operations too: their variants
 * read both. */
void tuned_scaled_experts(struct ops *table);
void tuned_scaled_topk(struct ops *table);
bool tuned_push_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                       struct error *why);
void tuned_push_comm(struct ops *table);
void tuned_tiles_products(struct ops *table);
void tuned_turn_mhc(struct ops *table);
void tuned_split_mhc(struct ops *table);
bool tuned_tensor_attend_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                                struct error *why);
void tuned_tensor_attend(struct ops *table);
void tuned_leaves_attend(struct ops *table);
bool tuned_device_sample_serves(const struct ops_dims *dims, const struct ops_limits *limits,
                                struct error *why);
void tuned_device_sample(struct ops *table);

#endif
