/*
 * The values. A group's tensors are read in the order of the file, in pieces that stay in the cache
 * while they are looked at once: a byte that is not a number anywhere in the weights would
 * otherwise surface as NaN logits much later, in some requests and not in others.
 *
 * Synthetic weights come the same way, without files behind them.
 *
 * Memory is private and anonymous. Nothing is mapped from the files, so a file that is replaced or
 * cut under a running server changes nothing.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "base/buf.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/weights.h"
#include "model/weights_file.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

enum {
    ALIGNMENT = 64,
    PIECE_BYTES = 1 << 20, /* fits the second-level cache of any server */
    SAMPLE_BYTES = 4096,
};

/* Bytes between tensors: a read beyond one is then seen by the address sanitiser. */
static const size_t gap_bytes = ALIGNMENT;

struct progress {
    weights_progress_fn fn; /* or NULL */
    void *cookie;
    uint64_t done_bytes, total_bytes;
};

void weights_group_add(struct weights_group *group, enum weights_task_kind kind,
                       const struct safetensors_tensor *tensor, size_t bytes, void *slot)
{
    if (group->n_tasks == group->capacity) {
        group->capacity = group->capacity ? 2 * group->capacity : 64;
        group->tasks = mem_realloc_array(group->tasks, group->capacity, sizeof(*group->tasks));
    }
    group->tasks[group->n_tasks++] = (struct weights_task){
        .kind = kind,
        .tensor = tensor,
        .bytes = bytes,
        .offset = group->bytes,
        .slot = slot,
    };
    /* No overflow: every tensor's bytes are in a file, and memory is at most twice of it. */
    group->bytes += (bytes + gap_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void slot_set(void *slot, const void *data)
{
    memcpy(slot, &data, sizeof(data));
}

void weights_group_release(struct weights *weights, struct weights_group *group)
{
    if (!group->slab) {
        return;
    }
    for (size_t i = 0; i < group->n_tasks; i++) {
        slot_set(group->tasks[i].slot, NULL);
    }
    mem_free(group->slab);
    group->slab = NULL;
    weights->loaded_bytes -= group->bytes;
}

/* --- values --- */

/* Index of the first element of n that is not a number, or n. */
static size_t find_bad(enum safetensors_dtype dtype, const uint8_t *p, size_t n)
{
    size_t bad = 0;
    switch (dtype) {
    case SAFETENSORS_F8_E8M0: {
        const uint8_t *at = memchr(p, 255, n);
        return at ? (size_t)(at - p) : n;
    }
    case SAFETENSORS_F8_E4M3:
        for (size_t i = 0; i < n; i++) {
            bad += (p[i] & 0x7F) == 0x7F;
        }
        for (size_t i = 0; bad && i < n; i++) {
            if ((p[i] & 0x7F) == 0x7F) {
                return i;
            }
        }
        return n;
    case SAFETENSORS_BF16:
        for (size_t i = 0; i < n; i++) {
            bad += (get_le16(p + 2 * i) & 0x7F80) == 0x7F80;
        }
        for (size_t i = 0; bad && i < n; i++) {
            if ((get_le16(p + 2 * i) & 0x7F80) == 0x7F80) {
                return i;
            }
        }
        return n;
    case SAFETENSORS_F32:
        for (size_t i = 0; i < n; i++) {
            bad += (get_le32(p + 4 * i) & 0x7F800000) == 0x7F800000;
        }
        for (size_t i = 0; bad && i < n; i++) {
            if ((get_le32(p + 4 * i) & 0x7F800000) == 0x7F800000) {
                return i;
            }
        }
        return n;
    default:
        return n; /* FP4: every byte is two numbers */
    }
}

static enum status check_piece(const struct weights_file *file,
                               const struct safetensors_tensor *tensor, uint64_t offset,
                               const uint8_t *p, size_t bytes, struct error *err)
{
    size_t width = safetensors_dtype_bytes(tensor->dtype);
    size_t n = bytes / width;
    size_t bad = find_bad(tensor->dtype, p, n);
    if (bad == n) {
        return STATUS_OK;
    }
    return error_set(
        err, STATUS_CORRUPT, "%.120s in %.80s: element %llu (%s) is not a finite number",
        tensor->name, safetensors_shard_name(file->st, tensor->shard_i),
        (unsigned long long)(offset / width + bad), safetensors_dtype_name(tensor->dtype));
}

static enum status read_piece(const struct weights_file *file,
                              const struct safetensors_tensor *tensor, uint64_t offset,
                              size_t bytes, void *data, struct error *err)
{
    if (file->synthetic) {
        synthetic_read(tensor, offset, bytes, data);
        return STATUS_OK;
    }
    return safetensors_read(file->st, tensor, offset, bytes, data, err);
}

/* Reads the tensor to data piece by piece, checking on the way. */
static enum status load_bytes(const struct weights_file *file,
                              const struct safetensors_tensor *tensor, uint8_t *data,
                              struct progress *progress, struct error *err)
{
    for (uint64_t at = 0; at < tensor->bytes;) {
        size_t bytes = tensor->bytes - at < PIECE_BYTES ? tensor->bytes - at : PIECE_BYTES;
        enum status status = read_piece(file, tensor, at, bytes, data + at, err);
        if (status == STATUS_OK) {
            status = check_piece(file, tensor, at, data + at, bytes, err);
        }
        if (status != STATUS_OK) {
            return status;
        }
        at += bytes;
        progress->done_bytes += bytes;
        if (progress->fn &&
            !progress->fn(progress->cookie, progress->done_bytes, progress->total_bytes)) {
            return error_set(err, STATUS_CANCELLED, "loading was stopped");
        }
    }
    return STATUS_OK;
}

static enum status load_floats(const struct weights_file *file,
                               const struct safetensors_tensor *tensor, uint8_t *data,
                               struct progress *progress, struct error *err)
{
    size_t n = tensor->n_elements;
    bool is_narrow = tensor->dtype == SAFETENSORS_BF16;
    /* A bfloat16 goes to the upper half first: widening upwards never overtakes what it reads. */
    uint8_t *raw = is_narrow ? data + 2 * n : data;
    enum status status = load_bytes(file, tensor, raw, progress, err);
    if (status == STATUS_OK && is_narrow) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)get_le16(raw + 2 * i) << 16;
            memcpy(data + 4 * i, &bits, 4);
        }
    }
    return status;
}

/* One row of tid2eid: every expert exists and none is there twice. */
static enum status check_expert_row(const struct weights_file *file,
                                    const struct safetensors_tensor *tensor, uint64_t row,
                                    const uint8_t *ids, uint16_t *ret, struct error *err)
{
    uint32_t n = file->config.n_experts_used;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t id = get_le64(ids + 8 * i);
        if (id >= file->config.n_experts) {
            return error_set(err, STATUS_CORRUPT,
                             "%.120s in %.80s: token %llu has expert %lld of %u", tensor->name,
                             safetensors_shard_name(file->st, tensor->shard_i),
                             (unsigned long long)row, (long long)id, file->config.n_experts);
        }
        for (uint32_t j = 0; j < i; j++) {
            if (ret[j] == id) {
                return error_set(err, STATUS_CORRUPT,
                                 "%.120s in %.80s: token %llu has expert %llu twice", tensor->name,
                                 safetensors_shard_name(file->st, tensor->shard_i),
                                 (unsigned long long)row, (unsigned long long)id);
            }
        }
        ret[i] = (uint16_t)id;
    }
    return STATUS_OK;
}

static enum status load_expert_ids(const struct weights_file *file,
                                   const struct safetensors_tensor *tensor, uint8_t *data,
                                   struct progress *progress, struct error *err)
{
    uint32_t used = file->config.n_experts_used;
    uint8_t ids[8 * MODEL_MAX_TOP_K * 64];
    uint16_t *to = (uint16_t *)data;
    for (uint64_t row = 0; row < file->config.vocab_size;) {
        uint64_t left = file->config.vocab_size - row;
        size_t n_rows = left < 64 ? left : 64;
        size_t bytes = n_rows * used * 8;
        enum status status = read_piece(file, tensor, row * used * 8, bytes, ids, err);
        for (size_t i = 0; status == STATUS_OK && i < n_rows; i++) {
            status = check_expert_row(file, tensor, row + i, ids + i * used * 8,
                                      to + (row + i) * used, err);
        }
        if (status != STATUS_OK) {
            return status;
        }
        row += n_rows;
        progress->done_bytes += bytes;
    }
    return STATUS_OK;
}

/* --- groups --- */

static int by_place_in_file(const void *a, const void *b)
{
    const struct safetensors_tensor *x = ((const struct weights_task *)a)->tensor;
    const struct safetensors_tensor *y = ((const struct weights_task *)b)->tensor;
    return (x > y) - (x < y); /* the checkpoint's list is in that order */
}

static enum status load_group(struct weights *weights, struct weights_group *group,
                              struct progress *progress, struct error *err)
{
    const struct weights_file *file = weights->file;
    if (group->slab) {
        return STATUS_OK;
    }
    if (group == &file->groups[weights->n_layers] && weights->n_skipped > 0) {
        log_info("model", "%u tensors of speculative blocks (mtp.*, %llu bytes) are not loaded",
                 weights->n_skipped, (unsigned long long)weights->skipped_bytes);
    }
    uint8_t *slab = mem_try_aligned(ALIGNMENT, group->bytes);
    if (!slab) {
        return error_set(err, STATUS_EXHAUSTED,
                         "no memory for %zu bytes of weights (%llu of %llu are loaded)",
                         group->bytes, (unsigned long long)weights->loaded_bytes,
                         (unsigned long long)weights->total_bytes);
    }
    if (!file->synthetic) {
        qsort(group->tasks, group->n_tasks, sizeof(*group->tasks), by_place_in_file);
    }
    for (size_t i = 0; i < group->n_tasks; i++) {
        const struct weights_task *task = &group->tasks[i];
        uint8_t *data = slab + task->offset;
        enum status status = task->kind == WEIGHTS_TASK_BYTES
                                 ? load_bytes(file, task->tensor, data, progress, err)
                             : task->kind == WEIGHTS_TASK_FLOATS
                                 ? load_floats(file, task->tensor, data, progress, err)
                                 : load_expert_ids(file, task->tensor, data, progress, err);
        if (status != STATUS_OK) {
            mem_free(slab);
            return status;
        }
    }
    for (size_t i = 0; i < group->n_tasks; i++) {
        const struct weights_task *task = &group->tasks[i];
        slot_set(task->slot, slab + task->offset);
#if defined(__SANITIZE_ADDRESS__)
        ASAN_POISON_MEMORY_REGION(slab + task->offset + task->bytes, gap_bytes);
#endif
    }
    group->slab = slab;
    weights->loaded_bytes += group->bytes;
    return STATUS_OK;
}

static uint64_t group_file_bytes(const struct weights_group *group)
{
    uint64_t bytes = 0;
    for (size_t i = 0; !group->slab && i < group->n_tasks; i++) {
        bytes += group->tasks[i].tensor->bytes;
    }
    return bytes;
}

enum status weights_load(struct weights *weights, weights_progress_fn fn, void *cookie,
                         struct error *err)
{
    struct weights_file *file = weights->file;
    struct progress progress = {.fn = fn, .cookie = cookie};
    for (uint32_t i = 0; i < file->n_groups; i++) {
        progress.total_bytes += group_file_bytes(&file->groups[i]);
    }
    for (uint32_t i = 0; i < file->n_groups; i++) {
        enum status status = load_group(weights, &file->groups[i], &progress, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

enum status weights_load_globals(struct weights *weights, struct error *err)
{
    struct progress progress = {0};
    return load_group(weights, &weights->file->groups[weights->n_layers], &progress, err);
}

enum status weights_load_layer(struct weights *weights, uint32_t layer_i, struct error *err)
{
    struct progress progress = {0};
    if (layer_i >= weights->n_layers) {
        return error_set(err, STATUS_INVALID, "layer %u of %u", layer_i, weights->n_layers);
    }
    return load_group(weights, &weights->file->groups[layer_i], &progress, err);
}

void weights_release_globals(struct weights *weights)
{
    weights_group_release(weights, &weights->file->groups[weights->n_layers]);
}

void weights_release_layer(struct weights *weights, uint32_t layer_i)
{
    if (layer_i < weights->n_layers) {
        weights_group_release(weights, &weights->file->groups[layer_i]);
    }
}

/* --- identity --- */

static int by_name(const void *a, const void *b)
{
    const struct safetensors_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

/*
 * Of content and not of packaging: the same model in other shards is the same model. Every tensor
 * gives 4 KiB from its middle (all of it if it is smaller), so that two fine-tunes differ.
 */
enum status weights_identity(const struct weights_file *file, uint8_t ret_identity[16],
                             struct error *err)
{
    size_t n = safetensors_n(file->st);
    const struct safetensors_tensor **order = mem_array(n + 1, sizeof(*order));
    XXH3_state_t *state = XXH3_createState();
    struct buf text = BUF_INIT;
    enum status status = STATUS_OK;
    uint8_t sample[SAMPLE_BYTES];

    for (size_t i = 0; i < n; i++) {
        order[i] = safetensors_at(file->st, i);
    }
    qsort(order, n, sizeof(*order), by_name);
    XXH3_128bits_reset(state);
    model_config_describe(&file->config, &text);
    for (size_t i = 0; i < n && status == STATUS_OK; i++) {
        const struct safetensors_tensor *tensor = order[i];
        buf_printf(&text, "%s %s", tensor->name, safetensors_dtype_name(tensor->dtype));
        for (uint32_t d = 0; d < tensor->n_dims; d++) {
            buf_printf(&text, " %llu", (unsigned long long)tensor->dims[d]);
        }
        buf_append_byte(&text, '\n');
        size_t bytes = tensor->bytes < SAMPLE_BYTES ? tensor->bytes : SAMPLE_BYTES;
        status =
            safetensors_read(file->st, tensor, (tensor->bytes - bytes) / 2, bytes, sample, err);
        if (status == STATUS_OK) {
            XXH3_128bits_update(state, text.data, text.bytes);
            XXH3_128bits_update(state, sample, bytes);
            buf_clear(&text);
        }
    }
    if (status == STATUS_OK) {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
        memcpy(ret_identity, canonical.digest, 16);
    }
    XXH3_freeState(state);
    buf_fini(&text);
    mem_free(order);
    return status;
}

/* --- single elements --- */

static double e4m3_value(uint8_t b)
{
    int exponent = b >> 3 & 15, mantissa = b & 7;
    double v = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return b & 0x80 ? -v : v;
}

static double float_at(const void *p, size_t i)
{
    float v;
    memcpy(&v, (const uint8_t *)p + 4 * i, 4);
    return v;
}

static double bf16_at(const void *p, size_t i)
{
    uint32_t bits = (uint32_t)get_le16((const uint8_t *)p + 2 * i) << 16;
    return float_at(&bits, 0);
}

double weight_element(const struct weight *weight, uint32_t row, uint32_t col)
{
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const uint8_t *data = weight->data;
    size_t row_at = row * weight->row_bytes;
    double value;
    switch (weight->format) {
    case WEIGHT_F32:
        return float_at(data + row_at, col);
    case WEIGHT_BF16:
        return bf16_at(data + row_at, col);
    case WEIGHT_FP8_BLOCK:
        value = e4m3_value(data[row_at + col]);
        break;
    default: {
        uint8_t nibble = data[row_at + col / 2] >> (col % 2 * 4) & 15;
        value = nibble & 8 ? -e2m1[nibble & 7] : e2m1[nibble & 7];
    }
    }
    size_t scale_i =
        (size_t)(row / weight->block_rows) * weight->scale_cols + col / weight->block_cols;
    const uint8_t *scale = weight->scale;
    switch (weight->scale_format) {
    case WEIGHT_SCALE_E8M0:
        return ldexp(value, scale[scale_i] - 127) * weight->global_scale;
    case WEIGHT_SCALE_E4M3:
        return value * e4m3_value(scale[scale_i]) * weight->global_scale;
    default:
        return value * float_at(scale, scale_i) * weight->global_scale;
    }
}
