/*
 * Values by counting: word i of a tensor is a mix of the seed, the tensor's name and i, so any part
 * can be made by itself, and what it becomes depends on the dtype. Matrices are scaled by one over
 * the root of their inputs, as a trained one roughly is; norms lie around one. Nothing else is like
 * a trained model: what such a model says is noise, what it costs is not.
 */
#include "model/synthetic.h"

#include <string.h>

#include <xxhash.h>

#include "base/buf.h"
#include "base/made.h"
#include "base/mem.h"

struct made_tensor {
    struct safetensors_tensor tensor; /* first: what is handed out */
    struct made made;                 /* of a matrix and its scales; of others the key alone */
    bool is_norm;
    uint64_t n_experts;
};

struct synthetic {
    uint64_t seed;
    struct model_config config;
    struct arena *arena;
};

struct synthetic *synthetic_create(uint64_t seed, const struct model_config *config)
{
    struct synthetic *s = mem_zalloc(sizeof(*s));
    *s = (struct synthetic){.seed = seed, .config = *config, .arena = arena_create(0)};
    return s;
}

void synthetic_free(struct synthetic *s)
{
    if (s) {
        arena_free(s->arena);
        mem_free(s);
    }
}

/* -log2(sqrt(n)), to the nearest integer. */
static int exponent_of(uint64_t n)
{
    int log2_n = 0;
    while (n > 1) {
        n /= 2;
        log2_n++;
    }
    return -((log2_n + 1) / 2);
}

static enum made_kind kind_of(enum safetensors_dtype dtype)
{
    switch (dtype) {
    case SAFETENSORS_F8_E4M3:
        return MADE_E4M3;
    case SAFETENSORS_F8_E8M0:
        return MADE_E8M0;
    case SAFETENSORS_BF16:
        return MADE_BF16;
    case SAFETENSORS_F32:
    case SAFETENSORS_I64:
        return MADE_NONE;
    default:
        return MADE_E2M1;
    }
}

const struct safetensors_tensor *synthetic_tensor(struct synthetic *s, const char *name,
                                                  enum safetensors_dtype dtype, uint32_t n_dims,
                                                  const uint64_t *dims, uint64_t n_inputs)
{
    struct made_tensor *m = arena_alloc(s->arena, sizeof(*m));
    memset(m, 0, sizeof(*m));
    m->tensor.name = arena_strdup(s->arena, name);
    m->tensor.dtype = dtype;
    m->tensor.n_dims = n_dims;
    m->tensor.n_elements = 1;
    for (uint32_t i = 0; i < n_dims; i++) {
        m->tensor.dims[i] = dims[i];
        m->tensor.n_elements *= dims[i];
    }
    m->tensor.bytes = m->tensor.n_elements * safetensors_dtype_bytes(dtype);
    m->made = (struct made){.key = XXH3_64bits_withSeed(name, strlen(name), s->seed),
                            .exponent = exponent_of(n_inputs),
                            .kind = kind_of(dtype)};
    m->is_norm = strstr(name, "norm") != NULL;
    m->n_experts = s->config.n_experts;
    return &m->tensor;
}

static uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

/* One fp32 number: around 1 for norms, else around 0. */
static uint32_t float_of(const struct made_tensor *m, uint32_t random)
{
    float even = (float)((int32_t)random >> 8) * 0x1p-23f; /* -1 .. 1 */
    float size =
        m->tensor.n_dims == 2 && m->made.exponent < 0 ? (float)(1ull << -m->made.exponent) : 2.0f;
    return float_bits(m->is_norm ? 1.0f + 0.25f * even : even / size);
}

/* Eight bytes of the tensor. */
static uint64_t bytes_of(const struct made_tensor *m, uint64_t i)
{
    if (m->tensor.dtype == SAFETENSORS_F32) {
        uint64_t random = made_word(m->made.key, i);
        return float_of(m, (uint32_t)random) | (uint64_t)float_of(m, (uint32_t)(random >> 32))
                                                   << 32;
    }
    if (m->tensor.dtype == SAFETENSORS_I64) { /* expert ids: those of a row follow each other */
        uint64_t used = m->tensor.dims[1];
        return (made_word(m->made.key, i / used) % m->n_experts + i % used) % m->n_experts;
    }
    return made_eight(&m->made, i);
}

struct made synthetic_made(const struct safetensors_tensor *tensor)
{
    return ((const struct made_tensor *)tensor)->made;
}

void synthetic_read(const struct safetensors_tensor *tensor, uint64_t offset, size_t bytes,
                    void *ret_data)
{
    const struct made_tensor *m = (const struct made_tensor *)tensor;
    uint8_t *to = ret_data;
    for (uint64_t i = offset / 8; bytes > 0; i++) {
        uint64_t word = bytes_of(m, i);
        size_t n = bytes < 8 ? bytes : 8;
        memcpy(to, &word, n);
        to += n;
        bytes -= n;
    }
}

void synthetic_identity(const struct synthetic *s, uint8_t ret_identity[16])
{
    struct buf text = BUF_INIT;
    model_config_describe(&s->config, &text);
    buf_printf(&text, "synthetic 1 %llu\n", (unsigned long long)s->seed);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(text.data, text.bytes));
    memcpy(ret_identity, canonical.digest, 16);
    buf_fini(&text);
}
