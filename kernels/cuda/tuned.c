/* See tuned.h. */
#include "kernels/cuda/tuned.h"

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/group.h"
#include "kernels/sample.h"

bool tuned_tensor_serves(const struct ops_dims *d, const struct ops_limits *limits,
                         struct error *why)
{
    uint32_t o_inputs = d->o_groups ? d->n_heads * d->head_dim / d->o_groups : 0;
    if (d->exact) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it multiplies bfloat16 values, exact arithmetic has others") == STATUS_OK;
    }
    if (d->hidden % 8 || d->q_lora % 8 || d->expert_width % 8 || o_inputs % 8 ||
        d->o_groups * d->o_lora % 8) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it takes inputs by the eight: hidden %u, q_lora %u, expert width %u, "
                         "%u and %u of the output projection",
                         d->hidden, d->q_lora, d->expert_width, o_inputs,
                         d->o_groups * d->o_lora) == STATUS_OK;
    }
    return true;
}

void tuned_tensor_project(struct ops *table)
{
    table->project = cuda_project_tensor;
}

void tuned_joined_project(struct ops *table)
{
    table->project = cuda_project_tensor;
    table->inputs = cuda_inputs_joined;
}

void tuned_finish(struct ops *table)
{
    if (table->compress != cuda_compress_tensor || table->indexer != cuda_indexer_tensor) {
        table->inputs = NULL;
    }
}

void tuned_tensor_compress(struct ops *table)
{
    table->compress = cuda_compress_tensor;
}

void tuned_tensor_indexer(struct ops *table)
{
    table->indexer = cuda_indexer_tensor;
}

void tuned_tensor_oproj(struct ops *table)
{
    table->oproj = cuda_oproj_tensor;
}

void tuned_tensor_route(struct ops *table)
{
    table->route = cuda_route_tensor;
}

void tuned_tensor_experts(struct ops *table)
{
    table->experts = cuda_experts_tensor;
}

void tuned_tensor_head(struct ops *table)
{
    table->head = cuda_head_tensor;
}

bool tuned_stream_serves(const struct ops_dims *d, const struct ops_limits *limits,
                         struct error *why)
{
    if (!tuned_tensor_serves(d, limits, why)) { /* longer calls are its */
        return false;
    }
    if (d->hidden % 128 || d->expert_width % 128) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it takes inputs by the group of 128: hidden %u, expert width %u",
                         d->hidden, d->expert_width) == STATUS_OK;
    }
    return true;
}

void tuned_stream_experts(struct ops *table)
{
    table->experts = cuda_experts_stream;
}

void tuned_blocks_experts(struct ops *table)
{
    table->experts = cuda_experts_blocks;
}

bool tuned_tensor_topk_serves(const struct ops_dims *d, const struct ops_limits *limits,
                              struct error *why)
{
    if (d->exact) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it multiplies e2m1 keys, exact arithmetic has others") == STATUS_OK;
    }
    if (d->index_topk &&
        (d->index_heads > 64 || d->index_dim > 128 || d->index_dim % 32 || d->index_dim == 96)) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "it takes up to 64 index heads of 32, 64 or 128 channels, not %u of "
                         "%u",
                         d->index_heads, d->index_dim) == STATUS_OK;
    }
    return true;
}

void tuned_tensor_topk(struct ops *table)
{
    table->topk = cuda_topk_tensor;
}

void tuned_scaled_project(struct ops *table)
{
    table->project = cuda_project_scaled;
}

void tuned_scaled_indexer(struct ops *table)
{
    table->indexer = cuda_indexer_scaled;
}

void tuned_scaled_oproj(struct ops *table)
{
    table->oproj = cuda_oproj_scaled;
}

void tuned_scaled_experts(struct ops *table)
{
    table->experts = cuda_experts_scaled;
    table->pack = cuda_pack_scaled;
}

void tuned_scaled_topk(struct ops *table)
{
    table->topk = cuda_topk_scaled;
}

bool tuned_push_serves(const struct ops_dims *d, const struct ops_limits *limits, struct error *why)
{
    if (d->hidden % 2) {
        return error_set(why, STATUS_UNSUPPORTED, "it takes channels by the pair: hidden %u",
                         d->hidden) == STATUS_OK;
    }
    return true;
}

void tuned_tiles_products(struct ops *table)
{
    table->open = cuda_open_tiles;
}

void tuned_push_comm(struct ops *table)
{
    table->join = cuda_join_push;
    table->comm = cuda_comm_push;
}

void tuned_turn_mhc(struct ops *table)
{
    table->mhc_pre = cuda_mhc_pre_split;
    table->mhc_turn = cuda_mhc_turn;
}

void tuned_split_mhc(struct ops *table)
{
    table->mhc_pre = cuda_mhc_pre_split;
}

bool tuned_tensor_attend_serves(const struct ops_dims *d, const struct ops_limits *limits,
                                struct error *why)
{
    return cuda_attend_tensor_serves(d, why);
}

void tuned_tensor_attend(struct ops *table)
{
    table->attend = cuda_attend_tensor;
}

void tuned_leaves_attend(struct ops *table)
{
    table->attend = cuda_attend_leaves;
}

bool tuned_device_sample_serves(const struct ops_dims *d, const struct ops_limits *limits,
                                struct error *why)
{
    if (d->is_partial) {
        return error_set(why, STATUS_UNSUPPORTED,
                         "draws from logits that one device has: a group's are shared out") ==
               STATUS_OK;
    }
    if (d->vocab > SAMPLE_MAX_IDS) {
        return error_set(why, STATUS_UNSUPPORTED, "draws one of %d ids at most, not of %u",
                         SAMPLE_MAX_IDS, d->vocab) == STATUS_OK;
    }
    return true;
}

void tuned_device_sample(struct ops *table)
{
    table->sample = cuda_sample;
}
