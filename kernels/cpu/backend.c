/* The CPU backend: opening a device, its memory, its table.
 *
 * The reference of every other backend, and what answers where there is no GPU. All scratch is
 * made at open for the largest call; most of it is touched only when such a call comes.
 */
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/cpu/cpu.h"
#include "kernels/source.h"

enum { ALIGN = 64, MAX_DEFAULT_THREADS = 16 };

struct cpu_memory {
    struct cpu_memory *next;
    void *data;
};

static void *cpu_alloc(struct ops_device *dev, size_t bytes)
{
    if (dev->limits.only_plan) {
        dev->allocated += bytes;
        return dev; /* an address that is not NULL; never read */
    }
    void *data = mem_try_aligned(ALIGN, bytes ? bytes : 1);
    if (!data) {
        return NULL;
    }
    memset(data, 0, bytes);
    struct cpu_memory *item = mem_zalloc(sizeof(*item));
    *item = (struct cpu_memory){dev->memory, data};
    dev->memory = item;
    dev->allocated += bytes;
    return data;
}

static size_t cpu_allocated(const struct ops_device *dev)
{
    return dev->allocated;
}

static void cpu_close(struct ops_device *dev)
{
    if (!dev) {
        return;
    }
    cpu_threads_free(dev->threads);
    while (dev->memory) {
        struct cpu_memory *item = dev->memory;
        dev->memory = item->next;
        mem_free(item->data);
        mem_free(item);
    }
    mem_free(dev);
}

static enum status cpu_pack(struct ops_device *dev, const struct ops_source *source,
                            struct ops_matrix *ret_matrix)
{
    struct ops_matrix m = {.rows = source->rows, .cols = source->cols};
    m.data = cpu_alloc(dev, cpu_matrix_bytes(source, &m.form));
    if (!m.data) {
        return STATUS_EXHAUSTED;
    }
    m.quant_input =
        !source->plain_inputs && source->format != OPS_F32 && source->format != OPS_BF16;
    if (!dev->limits.only_plan) {
        cpu_matrix_pack(source, m.form, m.data);
    }
    *ret_matrix = m;
    return STATUS_OK;
}

static void *cpu_upload(struct ops_device *dev, const void *data, size_t bytes)
{
    void *copy = cpu_alloc(dev, bytes);
    if (copy && !dev->limits.only_plan) {
        memcpy(copy, data, bytes);
    }
    return copy;
}

static void *cpu_alloc_shown(struct ops_device *dev, size_t bytes, enum ops_memory *ret_kind)
{
    *ret_kind = OPS_MEMORY_HOST;
    return cpu_alloc(dev, bytes);
}

static enum status cpu_share(struct ops_device *dev, void *memory, size_t bytes, struct error *err)
{
    return STATUS_OK; /* all memory is */
}

static void cpu_write(struct ops_device *dev, void *memory, const void *data, size_t bytes)
{
    memcpy(memory, data, bytes);
}

static void cpu_read(struct ops_device *dev, void *ret_data, const void *memory, size_t bytes)
{
    memcpy(ret_data, memory, bytes);
}

static void cpu_unshare(struct ops_device *dev, void *memory)
{
}

static enum status cpu_move(struct ops_device *dev, void *dst, const void *src, size_t bytes,
                            struct error *err)
{
    memcpy(dst, src, bytes);
    return STATUS_OK;
}

static enum status cpu_accept(struct ops_device *dev, const struct parcel_key *key,
                              const struct parcel_piece *pieces, uint32_t n,
                              struct parcel_sum *ret_sum, struct error *err)
{
    struct parcel_sum sum = {{0, 0}};
    uint64_t words = 0;
    for (uint32_t i = 0; i < n; i++) {
        parcel_copy_sum(key, &sum, pieces[i].dst, pieces[i].src, pieces[i].bytes, words);
        words += pieces[i].bytes / 8;
    }
    *ret_sum = sum;
    return STATUS_OK;
}

/* Nothing of this backend can fail once it is open. */
static enum status cpu_wait(struct ops_device *dev, struct error *err)
{
    return STATUS_OK;
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Rows of floats, or words, for the whole device. */
static void *room(struct ops_device *dev, size_t n, size_t m, bool *ok)
{
    void *data = cpu_alloc(dev, n * m * sizeof(float));
    *ok = *ok && data;
    return data;
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
        dev->freqs[k] = room(dev, d->rope_dim, 1, &ok);
        dev->rope[k] = room(dev, t, d->rope_dim, &ok);
    }
    dev->quant = room(dev, t, most(d->hidden, d->q_lora), &ok);
    size_t wide = most(2 * (size_t)most(d->head_dim, d->index_dim), most(narrow, d->n_experts));
    dev->wide = room(dev, t, wide, &ok);
    dev->wide2 = room(dev, t, wide, &ok);
    dev->lane_x = room(dev, lanes, d->hidden, &ok);
    dev->lane_y = room(dev, lanes, d->hidden, &ok);
    dev->lane_a = room(dev, lanes, d->expert_width, &ok);
    dev->lane_b = room(dev, lanes, d->expert_width, &ok);
    dev->lane_row = room(dev, lanes, 1, &ok);
    dev->lane_weight = room(dev, lanes, 1, &ok);
    dev->lane_first = room(dev, n_own + 1, 1, &ok);
    dev->row_lanes = room(dev, t, d->n_experts_used + 1, &ok);
    dev->jobs = cpu_alloc(dev, (2 * n_own + 2) * sizeof(struct cpu_job));
    dev->head_x = room(dev, t, d->hidden, &ok);
    dev->scratch = cpu_alloc(dev, dev->n_threads * sizeof(struct cpu_scratch));
    if (!ok || !dev->jobs || !dev->scratch) {
        return false;
    }
    for (uint32_t i = 0; i < dev->n_threads; i++) {
        struct cpu_scratch planned, *s = dev->limits.only_plan ? &planned : &dev->scratch[i];
        s->entries = room(dev, dev->max_attended, d->head_dim, &ok);
        s->logits = room(dev, dev->max_attended, d->n_heads, &ok);
        s->scores = room(dev, dev->max_entries, 1, &ok);
        s->keys = room(dev, dev->max_entries, 1, &ok);
        s->row = room(dev, most(d->head_dim, d->index_dim), 1, &ok);
        s->attended = cpu_alloc(dev, dev->max_attended * sizeof(float *));
        ok = ok && s->attended;
    }
    return ok;
}

static uint32_t thread_count(uint32_t wanted)
{
    if (wanted == 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        wanted = n < 1 ? 1 : (n > MAX_DEFAULT_THREADS ? MAX_DEFAULT_THREADS : (uint32_t)n);
    }
    return wanted > CPU_MAX_THREADS ? CPU_MAX_THREADS : wanted;
}

static enum status cpu_open(const struct ops_dims *dims, const struct ops_limits *limits,
                            struct ops_device **ret_device, struct error *err)
{
    struct ops_device *dev = mem_zalloc(sizeof(*dev));
    dev->d = *dims;
    dev->limits = *limits;
    dev->n_threads = thread_count(limits->n_threads);
    dev->max_entries = limits->n_tokens / OPS_SPARSE_RATIO + 1;
    uint32_t n_heavy = limits->heavy_ratio ? limits->n_tokens / limits->heavy_ratio + 1 : 0;
    uint32_t n_chosen = dims->index_topk < dev->max_entries ? dims->index_topk : dev->max_entries;
    dev->max_attended = dims->window + (n_heavy > n_chosen ? n_heavy : n_chosen);
    if (!make_scratch(dev)) {
        enum status status = error_set(err, STATUS_EXHAUSTED,
                                       "no memory for the scratch of calls of %u rows over %u "
                                       "tokens: %zu MiB were taken before it ended",
                                       limits->n_rows, limits->n_tokens, dev->allocated >> 20);
        cpu_close(dev);
        return status;
    }
    if (!limits->only_plan) {
        for (int k = 0; k < 2; k++) {
            ops_rope_freqs(&dev->d, k == 1, dev->freqs[k]);
        }
        dev->threads = cpu_threads_create(dev->n_threads);
    }
    *ret_device = dev;
    return STATUS_OK;
}

const struct ops ops_cpu = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .alloc_shown = cpu_alloc_shown,
    .allocated = cpu_allocated,
    .pack = cpu_pack,
    .upload = cpu_upload,
    .share = cpu_share,
    .unshare = cpu_unshare,
    .write = cpu_write,
    .read = cpu_read,
    .wait = cpu_wait,
    .move = cpu_move,
    .accept = cpu_accept,
    .begin = cpu_begin,
    .embed = cpu_embed,
    .mhc_pre = cpu_mhc_pre,
    .mhc_post = cpu_mhc_post,
    .project = cpu_project,
    .compress = cpu_compress,
    .indexer = cpu_indexer,
    .topk = cpu_topk,
    .attend = cpu_attend,
    .oproj = cpu_oproj,
    .route = cpu_route,
    .experts = cpu_experts,
    .head = cpu_head,
    .comm = cpu_comm,
    .rates = cpu_rates,
    .matrix_bytes = cpu_packed_bytes,
};
