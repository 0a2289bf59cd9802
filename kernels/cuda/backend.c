/* The CUDA backend: opening a device, its memory, what fails on it, its table.
 *
 * Memory comes from the driver in large blocks and is handed out from their front, for a model has
 * thousands of matrices; it is given back whole at close. The rows of a call travel through pinned
 * buffers that take turns, so that the host may prepare a call while the one before still runs.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/group.h"
#include "kernels/source.h"

enum {
    ALIGN = 256,
    BLOCK_BYTES = 64 << 20,
    N_STAGES = 2,
};

struct cuda_memory {
    struct cuda_memory *next;
    char *data;
    size_t bytes, used;
};

/* One image of the rows of a call, in pinned and in device memory: sequences and, where rows are
 * drawn there, how; then words, pages last. So where anything but the pages lies follows from the
 * numbers of rows and sequences and from that, which is what a recorded call is bound to; pages are
 * found by the pointers in the sequences. */
struct cuda_staging {
    size_t bytes, max_pages;
    uint8_t *device;
    uint8_t *host[N_STAGES];
    cudaEvent_t sent[N_STAGES];
    uint32_t n_calls;
};

void cuda_failed(struct ops_device *dev, enum status status, const char *format, ...)
{
    if (dev->failed) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(dev->failure.text, sizeof(dev->failure.text), format, arguments);
    va_end(arguments);
    dev->failed = status;
}

bool cuda_kept(struct ops_device *dev, cudaError_t code, const char *what)
{
    if (code != cudaSuccess) {
        (void)cudaGetLastError();
        cuda_failed(dev, STATUS_SYSTEM, "cuda:%u: %s: %s", dev->limits.device_i, what,
                    cudaGetErrorString(code));
    }
    return code == cudaSuccess;
}

void cuda_enter(struct ops_device *dev)
{
    (void)cuda_kept(dev, cudaSetDevice((int)dev->limits.device_i), "choosing the device");
}

void cuda_launched(struct ops_device *dev, const char *what)
{
    dev->n_launches++;
    (void)cuda_kept(dev, cudaGetLastError(), what);
}

/* What cuda_alloc would take from the driver: the block that is begun, or a new one. */
static void *plan_alloc(struct ops_device *dev, size_t wanted)
{
    struct cuda_memory *block = dev->memory;
    if (!block || block->bytes - block->used < wanted) {
        struct cuda_memory *next = block;
        block = mem_zalloc(sizeof(*block));
        block->next = next;
        block->bytes = wanted > BLOCK_BYTES ? wanted : BLOCK_BYTES;
        dev->memory = block;
        dev->allocated += block->bytes;
    }
    block->used += wanted;
    return dev; /* an address that is not NULL; never read */
}

static void *cuda_alloc(struct ops_device *dev, size_t bytes)
{
    size_t wanted;
    if (!size_add(bytes ? bytes : 1, ALIGN - 1, &wanted)) {
        return NULL;
    }
    wanted = wanted / ALIGN * ALIGN;
    if (dev->limits.only_plan) {
        return plan_alloc(dev, wanted);
    }
    cuda_enter(dev);
    struct cuda_memory *block = dev->memory;
    if (!block || block->bytes - block->used < wanted) {
        size_t all = wanted > BLOCK_BYTES ? wanted : BLOCK_BYTES;
        void *data;
        if (cudaMalloc(&data, all) != cudaSuccess) {
            (void)cudaGetLastError(); /* being out of memory ends this call alone */
            return NULL;
        }
        block = mem_zalloc(sizeof(*block));
        *block = (struct cuda_memory){.next = dev->memory, .data = data, .bytes = all};
        dev->memory = block;
        (void)cuda_kept(dev, cudaMemsetAsync(data, 0, all, cuda_stream_for(dev)),
                        "clearing memory");
    }
    void *memory = block->data + block->used;
    block->used += wanted;
    dev->allocated += wanted;
    return memory;
}

/* Behind the block that is being filled, which others are not to see. */
static void *cuda_alloc_shown(struct ops_device *dev, size_t bytes, enum ops_memory *ret_kind)
{
    cuda_enter(dev);
    void *data;
    struct cudaPointerAttributes attributes;
    if (cudaMalloc(&data, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    (void)cuda_kept(dev, cudaMemsetAsync(data, 0, bytes, cuda_stream_for(dev)), "clearing memory");
    (void)cuda_kept(dev, cudaPointerGetAttributes(&attributes, data), "asking what memory is");
    *ret_kind = attributes.type == cudaMemoryTypeDevice ? OPS_MEMORY_CUDA : OPS_MEMORY_HOST;
    struct cuda_memory *block = mem_zalloc(sizeof(*block));
    struct cuda_memory **at = dev->memory ? &dev->memory->next : &dev->memory;
    *block = (struct cuda_memory){.next = *at, .data = data, .bytes = bytes, .used = bytes};
    *at = block;
    dev->allocated += bytes;
    return data;
}

/* What fails here, fails again where the memory is used. */
static void cuda_attach(struct ops_device *dev)
{
    (void)cudaSetDevice((int)dev->limits.device_i);
    (void)cudaGetLastError();
}

/* Registered memory is pinned and has one address for host and device. Of a group the first device
 * that is told registers it for all; that it is `used` says that another has, or a transport: a
 * UCX with CUDA registers what it is given as well. */
static enum status cuda_share(struct ops_device *dev, void *memory, size_t bytes, struct error *err)
{
    cuda_enter(dev);
    unsigned flags = cudaHostRegisterMapped | (dev->group ? cudaHostRegisterPortable : 0);
    cudaError_t code = cudaHostRegister(memory, bytes, flags);
    bool is_anothers = code == cudaErrorHostMemoryAlreadyRegistered;
    if (is_anothers) {
        (void)cudaGetLastError();
    } else if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return error_set(err, code == cudaErrorMemoryAllocation ? STATUS_EXHAUSTED : STATUS_SYSTEM,
                         "cuda:%u: %zu MiB of host memory can't be pinned: %s",
                         dev->limits.device_i, bytes >> 20, cudaGetErrorString(code));
    }
    struct cuda_memory *item = mem_zalloc(sizeof(*item));
    *item = (struct cuda_memory){
        .next = dev->shared, .data = memory, .bytes = bytes, .used = is_anothers};
    dev->shared = item;
    void *there = NULL, *end = NULL, *last = (char *)memory + bytes - 1;
    code = cudaHostGetDevicePointer(&there, memory, 0);
    if (code == cudaSuccess) {
        code = cudaHostGetDevicePointer(&end, last, 0);
    }
    if (code != cudaSuccess || there != memory || end != last) {
        (void)cudaGetLastError();
        return error_set(err, STATUS_UNSUPPORTED,
                         "cuda:%u: this device can't use host memory at its own address",
                         dev->limits.device_i);
    }
    return STATUS_OK;
}

static void cuda_unshare(struct ops_device *dev, void *memory)
{
    cuda_enter(dev);
    for (struct cuda_memory **at = &dev->shared; *at; at = &(*at)->next) {
        struct cuda_memory *item = *at;
        if (item->data == memory) {
            if (!item->used) {
                (void)cuda_kept(dev, cudaHostUnregister(memory), "giving host memory back");
            }
            *at = item->next;
            mem_free(item);
            return;
        }
    }
}

static bool lies_in(const struct cuda_memory *list, const char *first, size_t bytes)
{
    for (const struct cuda_memory *item = list; item; item = item->next) {
        if (first >= item->data && first + bytes <= item->data + item->bytes) {
            return true;
        }
    }
    return false;
}

bool cuda_is_usable(const struct ops_device *dev, const void *memory, size_t bytes)
{
    return lies_in(dev->shared, memory, bytes) || lies_in(dev->memory, memory, bytes);
}

static size_t cuda_allocated(const struct ops_device *dev)
{
    return dev->allocated;
}

void *cuda_room(struct ops_device *dev, size_t n, size_t m, bool *ok)
{
    size_t bytes;
    void *data = size_mul(n, m, &bytes) && size_mul(bytes, sizeof(float), &bytes)
                     ? cuda_alloc(dev, bytes)
                     : NULL;
    *ok = *ok && data;
    return data;
}

static void plan_close(struct ops_device *dev)
{
    while (dev->memory) {
        struct cuda_memory *block = dev->memory;
        dev->memory = block->next;
        mem_free(block);
    }
    mem_free(dev->staging);
    cuda_beside_free(dev->beside);
    mem_free(dev);
}

/* Devices that hang: still there, so that what they may write to is. */
static struct ops_device *given_up;

static void cuda_close(struct ops_device *dev)
{
    if (!dev) {
        return;
    }
    if (dev->limits.only_plan) {
        plan_close(dev);
        return;
    }
    if (dev->given_up) {
        /* Any call could wait for it. The process that ends now gives all of it back. */
        dev->given_up_before = given_up;
        given_up = dev;
        return;
    }
    struct cuda_group *group = dev->group;
    cuda_group_leave(dev);
    cuda_enter(dev);
    if (dev->stream) {
        (void)cudaStreamSynchronize(dev->stream);
    }
    if (dev->staging) {
        for (int i = 0; i < N_STAGES; i++) {
            if (dev->staging->sent[i]) {
                (void)cudaEventDestroy(dev->staging->sent[i]);
            }
            if (dev->staging->host[i]) {
                (void)cudaFreeHost(dev->staging->host[i]);
            }
        }
        mem_free(dev->staging);
    }
    cuda_beside_free(dev->beside);
    while (dev->shared) {
        struct cuda_memory *item = dev->shared;
        dev->shared = item->next;
        if (!item->used) {
            (void)cudaHostUnregister(item->data);
        }
        mem_free(item);
    }
    while (dev->memory) {
        struct cuda_memory *block = dev->memory;
        dev->memory = block->next;
        (void)cudaFree(block->data);
        mem_free(block);
    }
    cuda_marks_free(dev);
    cuda_record_free(dev);
    if (dev->reached) {
        (void)cudaEventDestroy(dev->reached);
    }
    if (dev->stream) {
        (void)cudaStreamDestroy(dev->stream);
    }
    (void)cudaGetLastError();
    mem_free(dev);
    cuda_group_left(group);
}

static void cuda_write(struct ops_device *dev, void *memory, const void *data, size_t bytes)
{
    cuda_enter(dev);
    /* From pageable memory the call may return before it has read it all; this one may not. */
    if (bytes &&
        cuda_kept(dev,
                  cudaMemcpyAsync(memory, data, bytes, cudaMemcpyDefault, cuda_stream_for(dev)),
                  "writing memory")) {
        (void)cuda_kept(dev, cudaStreamSynchronize(dev->stream), "writing memory");
    }
}

static void cuda_read(struct ops_device *dev, void *ret_data, const void *memory, size_t bytes)
{
    cuda_enter(dev);
    if (bytes) {
        (void)cuda_kept(
            dev, cudaMemcpyAsync(ret_data, memory, bytes, cudaMemcpyDefault, cuda_stream_for(dev)),
            "reading memory");
    }
}

static enum status pack(struct ops_device *dev, const struct ops_source *source, bool scaled,
                        struct ops_matrix *ret_matrix)
{
    struct ops_matrix m = {.rows = source->rows, .cols = source->cols};
    size_t bytes = cuda_matrix_bytes(source, scaled, &m.form);
    m.quant_input =
        !source->plain_inputs && source->format != OPS_F32 && source->format != OPS_BF16;
    m.data = cuda_alloc(dev, bytes);
    if (dev->limits.only_plan) {
        *ret_matrix = m;
        return STATUS_OK;
    }
    if (m.data && !source->data && source->made.kind) {
        cuda_fill(dev, source, m.form, m.data);
        *ret_matrix = m;
        return STATUS_OK;
    }
    void *image = m.data ? mem_try_alloc(bytes) : NULL;
    if (!image) {
        return STATUS_EXHAUSTED;
    }
    cuda_matrix_pack(source, m.form, image);
    cuda_write(dev, m.data, image, bytes);
    mem_free(image);
    *ret_matrix = m;
    return STATUS_OK;
}

static enum status cuda_pack(struct ops_device *dev, const struct ops_source *source,
                             struct ops_matrix *ret_matrix)
{
    return pack(dev, source, false, ret_matrix);
}

enum status cuda_pack_scaled(struct ops_device *dev, const struct ops_source *source,
                             struct ops_matrix *ret_matrix)
{
    return pack(dev, source, true, ret_matrix);
}

static void *cuda_upload(struct ops_device *dev, const void *data, size_t bytes)
{
    void *copy = cuda_alloc(dev, bytes);
    if (copy && !dev->limits.only_plan) {
        cuda_write(dev, copy, data, bytes);
    }
    return copy;
}

static enum status cuda_wait(struct ops_device *dev, struct error *err)
{
    if (!dev->given_up) {
        cuda_enter(dev);
        (void)cuda_kept(dev, cudaStreamSynchronize(dev->stream), "an operation");
    }
    cuda_group_end(dev);
    return dev->failed ? error_set(err, dev->failed, "%s", dev->failure.text) : STATUS_OK;
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static bool make_staging(struct ops_device *dev)
{
    const struct ops_limits *l = &dev->limits;
    struct cuda_staging *s = mem_zalloc(sizeof(*s));
    dev->staging = s;
    s->max_pages = l->page_tokens ? (size_t)l->n_seqs * (l->n_tokens / l->page_tokens + 1) : 0;
    s->bytes = l->n_seqs * (sizeof(struct ops_seq) + sizeof(struct ops_draw)) +
               (3 * (size_t)l->n_rows + s->max_pages) * sizeof(uint32_t);
    s->device = cuda_alloc(dev, s->bytes);
    bool ok = s->device;
    for (int i = 0; i < N_STAGES && ok && !l->only_plan; i++) {
        void *host = NULL;
        ok = cudaHostAlloc(&host, s->bytes, cudaHostAllocDefault) == cudaSuccess;
        s->host[i] = host;
        ok = ok && cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming) == cudaSuccess;
    }
    return ok;
}

static bool make_scratch(struct ops_device *dev)
{
    const struct ops_dims *d = &dev->d;
    size_t t = dev->limits.n_rows, narrow = (size_t)d->o_groups * d->o_lora;
    size_t n_own = d->expert_end - d->expert_first;
    size_t used = d->n_experts_used < n_own ? d->n_experts_used : n_own;
    size_t lanes = t * (used + d->has_shared);
    bool ok = true;
    for (int k = 0; k < 2; k++) {
        dev->freqs[k] = cuda_room(dev, d->rope_dim, 1, &ok);
        dev->rope[k] = cuda_room(dev, t, d->rope_dim, &ok);
    }
    dev->quant = cuda_room(dev, t, most(most(d->hidden, d->q_lora), narrow), &ok);
    size_t wide = most(2 * (size_t)most(d->head_dim, d->index_dim), most(narrow, d->n_experts));
    dev->wide = cuda_room(dev, t, wide, &ok);
    dev->wide2 = cuda_room(dev, t, wide, &ok);
    dev->which = cuda_room(dev, t, 1, &ok);
    dev->ids = cuda_room(dev, dev->limits.n_seqs, 1, &ok);
    dev->head_x = cuda_room(dev, t, d->hidden, &ok);
    dev->lane_y = cuda_room(dev, lanes, d->hidden, &ok);
    dev->lane_a = cuda_room(dev, lanes, d->expert_width, &ok);
    dev->lane_b = cuda_room(dev, lanes, d->expert_width, &ok);
    dev->lane_row = cuda_room(dev, lanes, 1, &ok);
    dev->lane_weight = cuda_room(dev, lanes, 1, &ok);
    dev->lane_of = cuda_room(dev, t, d->n_experts_used, &ok);
    dev->expert_lanes = cuda_room(dev, n_own, 1, &ok);
    size_t n_tiles = t * used / CUDA_TILE_ROWS + n_own;
    dev->tiles = cuda_room(dev, n_tiles, sizeof(struct cuda_tile) / sizeof(uint32_t), &ok);
    dev->tile_count = cuda_room(dev, 2, 1, &ok);
    return ok && cuda_tensor_room(dev) && cuda_few_room(dev) && cuda_inputs_room(dev) &&
           cuda_stream_room(dev) && cuda_experts_blocks_room(dev) && cuda_mhc_split_room(dev) &&
           cuda_attention_room(dev) && (!dev->tiles_wanted || cuda_tiles_room(dev));
}

static enum status fits(const struct ops_dims *d, struct error *err)
{
    if (d->expert_end - d->expert_first > CUDA_MAX_EXPERTS) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "a CUDA device takes %d experts of a layer, not %u: share them among more "
                         "devices",
                         CUDA_MAX_EXPERTS, d->expert_end - d->expert_first);
    }
    if (d->n_experts > CUDA_MAX_ROUTED) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "the CUDA backend routes among %d experts at most, not %u",
                         CUDA_MAX_ROUTED, d->n_experts);
    }
    if (d->rope_dim > CUDA_MAX_ROPE) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "the CUDA backend rotates %d channels at most, not %u", CUDA_MAX_ROPE,
                         d->rope_dim);
    }
    if (d->n_experts_used > CUDA_MAX_CHOICES) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "the CUDA backend routes a row to %d experts at most, not %u",
                         CUDA_MAX_CHOICES, d->n_experts_used);
    }
    return cuda_attention_check(d, err);
}

static enum status open_device(const struct ops_dims *dims, const struct ops_limits *limits,
                               bool tiles, struct ops_device **ret_device, struct error *err)
{
    enum status status = fits(dims, err);
    if (!status && !limits->only_plan) {
        status = device_probe(limits->device_i, err);
    }
    if (status) {
        return status;
    }
    struct ops_device *dev = mem_zalloc(sizeof(*dev));
    dev->d = *dims;
    dev->limits = *limits;
    dev->tiles_wanted = tiles;
    dev->limits.n_seqs = limits->n_seqs ? limits->n_seqs : limits->n_rows;
    dev->max_entries = limits->n_tokens / OPS_SPARSE_RATIO + 1;
    uint32_t n_heavy = limits->heavy_ratio ? limits->n_tokens / limits->heavy_ratio + 1 : 0;
    uint32_t n_chosen = dims->index_topk < dev->max_entries ? dims->index_topk : dev->max_entries;
    dev->max_attended = dims->window + (n_heavy > n_chosen ? n_heavy : n_chosen);
    if (limits->only_plan) { /* what counts can't fail */
        (void)(make_staging(dev) && make_scratch(dev) && cuda_beside_make(dev));
        *ret_device = dev;
        return STATUS_OK;
    }
    int n_sms = 0;
    if (cuda_kept(dev, cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking),
                  "a stream") &&
        cuda_kept(dev, cudaEventCreateWithFlags(&dev->reached, cudaEventDisableTiming),
                  "an event") &&
        cuda_kept(
            dev,
            cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, (int)limits->device_i),
            "its number of multiprocessors") &&
        !(make_staging(dev) && make_scratch(dev) && cuda_beside_make(dev) &&
          cuda_record_make(dev))) {
        size_t free_bytes = 0, all_bytes = 0;
        (void)cudaMemGetInfo(&free_bytes, &all_bytes);
        cuda_failed(dev, STATUS_EXHAUSTED,
                    "cuda:%u: no memory for the scratch of calls of %u rows over %u tokens: %zu "
                    "MiB were taken before it ended, %zu of %zu MiB are free",
                    limits->device_i, limits->n_rows, limits->n_tokens, dev->allocated >> 20,
                    free_bytes >> 20, all_bytes >> 20);
    }
    dev->n_sms = (uint32_t)n_sms;
    for (int k = 0; k < 2 && !dev->failed; k++) {
        float freqs[CUDA_MAX_ROPE / 2];
        ops_rope_freqs(&dev->d, k == 1, freqs);
        cuda_write(dev, dev->freqs[k], freqs, dims->rope_dim / 2 * sizeof(float));
    }
    status = cuda_wait(dev, err);
    if (status) {
        cuda_close(dev);
        return status;
    }
    *ret_device = dev;
    return STATUS_OK;
}

static enum status cuda_open(const struct ops_dims *dims, const struct ops_limits *limits,
                             struct ops_device **ret_device, struct error *err)
{
    return open_device(dims, limits, false, ret_device, err);
}

enum status cuda_open_tiles(const struct ops_dims *dims, const struct ops_limits *limits,
                            struct ops_device **ret_device, struct error *err)
{
    return open_device(dims, limits, true, ret_device, err);
}

/* dev->rows for a call of such numbers; returns where the page numbers begin. */
static size_t lay_out(struct ops_device *dev, const struct ops_rows *rows)
{
    const uint8_t *image = dev->staging->device;
    size_t words = rows->n_seqs * sizeof(struct ops_seq), n = rows->n_rows * sizeof(uint32_t);
    dev->rows = (struct ops_rows){.n_rows = rows->n_rows, .n_seqs = rows->n_seqs};
    dev->rows.seqs = (const struct ops_seq *)(const void *)image;
    if (rows->draws) {
        dev->rows.draws = (const struct ops_draw *)(const void *)(image + words);
        words += rows->n_rows * sizeof(struct ops_draw);
    }
    dev->rows.tokens = (const uint32_t *)(const void *)(image + words);
    dev->rows.positions = (const uint32_t *)(const void *)(image + words + n);
    dev->rows.seq_of = (const uint32_t *)(const void *)(image + words + 2 * n);
    return words + 3 * n;
}

static size_t pages_of(const struct ops_device *dev, const struct ops_seq *seq)
{
    uint32_t page_tokens = dev->limits.page_tokens;
    size_t end = (size_t)seq->position + seq->n_rows;
    return page_tokens && seq->slot != OPS_NO_SLOT ? (end + page_tokens - 1) / page_tokens : 0;
}

static bool fits_limits(struct ops_device *dev, const struct ops_rows *rows)
{
    const struct ops_limits *l = &dev->limits;
    size_t n_pages = 0;
    for (uint32_t i = 0; i < rows->n_seqs && i < l->n_seqs && !dev->recording; i++) {
        n_pages += pages_of(dev, &rows->seqs[i]);
    }
    if (rows->n_rows > l->n_rows || rows->n_seqs > l->n_seqs || n_pages > dev->staging->max_pages ||
        (rows->draws && rows->n_rows != rows->n_seqs)) {
        cuda_failed(dev, STATUS_INVALID,
                    "cuda:%u: a call of %u rows of %u sequences with %zu pages is larger than the "
                    "device was opened for",
                    l->device_i, rows->n_rows, rows->n_seqs, n_pages);
        return false;
    }
    return true;
}

static void put_words(uint8_t *image, size_t *at, const uint32_t *words, size_t n)
{
    if (n) {
        memcpy(image + *at, words, n * sizeof(*words));
    }
    *at += n * sizeof(*words);
}

bool cuda_stage(struct ops_device *dev, const struct ops_rows *rows)
{
    struct cuda_staging *s = dev->staging;
    cuda_enter(dev);
    cuda_group_begin(dev);
    if (!fits_limits(dev, rows)) {
        return false;
    }
    uint32_t turn = s->n_calls++ % N_STAGES;
    if (!cuda_kept(dev, cudaEventSynchronize(s->sent[turn]), "the rows of an earlier call")) {
        return false;
    }
    uint8_t *host = s->host[turn];
    struct ops_seq *seqs = (struct ops_seq *)(void *)host;
    size_t n_rows = rows->n_rows, at = rows->n_seqs * sizeof(*seqs);
    size_t pages = lay_out(dev, rows);
    if (rows->draws && n_rows) {
        memcpy(host + at, rows->draws, n_rows * sizeof(*rows->draws));
        at += n_rows * sizeof(*rows->draws);
    }
    put_words(host, &at, rows->tokens, n_rows);
    put_words(host, &at, rows->positions, n_rows);
    put_words(host, &at, rows->seq_of, n_rows);
    for (uint32_t i = 0; i < rows->n_seqs; i++) {
        const struct ops_seq *seq = &rows->seqs[i];
        size_t n = pages_of(dev, seq);
        seqs[i] = *seq;
        seqs[i].pages = (const uint32_t *)(const void *)(s->device + pages);
        put_words(host, &pages, seq->pages, n);
    }
    return cuda_kept(dev,
                     cudaMemcpyAsync(s->device, host, pages, cudaMemcpyHostToDevice,
                                     cuda_stream_for(dev)),
                     "sending the rows of a call") &&
           cuda_kept(dev, cudaEventRecord(s->sent[turn], cuda_stream_for(dev)),
                     "sending the rows of a call");
}

void cuda_drawn(struct ops_device *dev, uint32_t *ret_ids, uint32_t n)
{
    cuda_read(dev, ret_ids, dev->ids, n * sizeof(*ret_ids));
}

static void cuda_begin(struct ops_device *dev, const struct ops_rows *rows)
{
    if (dev->recording) {
        cuda_enter(dev);
        cuda_group_record(dev);
        if (fits_limits(dev, rows)) {
            (void)lay_out(dev, rows);
            cuda_positions(dev);
        }
    } else if (cuda_stage(dev, rows)) {
        cuda_positions(dev);
    }
}

const struct ops ops_cuda = {
    .name = "cuda",
    .makes = true,
    .own_memory = true,
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .alloc_shown = cuda_alloc_shown,
    .allocated = cuda_allocated,
    .pack = cuda_pack,
    .upload = cuda_upload,
    .share = cuda_share,
    .unshare = cuda_unshare,
    .write = cuda_write,
    .read = cuda_read,
    .wait = cuda_wait,
    .move = cuda_move,
    .accept = cuda_accept,
    .attach = cuda_attach,
    .join = cuda_join,
    .enter = cuda_enter,
    .begin = cuda_begin,
    .embed = cuda_embed,
    .mhc_pre = cuda_mhc_pre,
    .mhc_post = cuda_mhc_post,
    .project = cuda_project,
    .compress = cuda_compress,
    .indexer = cuda_indexer,
    .topk = cuda_topk,
    .attend = cuda_attend,
    .oproj = cuda_oproj,
    .route = cuda_route,
    .experts = cuda_experts,
    .head = cuda_head,
    .drawn = cuda_drawn,
    .fence = cuda_fence,
    .wait_fence = cuda_wait_fence,
    .comm = cuda_comm,
    .record_begin = cuda_record_begin,
    .record_end = cuda_record_end,
    .record_progress = cuda_record_progress,
    .replay = cuda_replay,
    .recording_free = cuda_recording_free,
    .wait_moving = cuda_wait_moving,
    .rates = cuda_rates,
    .matrix_bytes = cuda_packed_bytes,
    .mark = cuda_mark,
    .between_s = cuda_between_s,
    .launches = cuda_launches,
};
