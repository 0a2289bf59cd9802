/* kernels/cuda/cache.cuh - pages, window slots and state slots as the device's kernels see them.
 *
 * The device's side of kernels/cpu/cache.c: the same bits go in and the same floats come out, since
 * both use kernels/formats.h. A `cache_view` is passed by value to a kernel; all offsets are
 * size_t, for a pool is larger than 2^31 bytes. Bodies are read four bytes at a time and have to be
 * aligned to four: engine/layout and cuda_attention_check see to that.
 */
#ifndef BATON_KERNELS_CUDA_CACHE_CUH
#define BATON_KERNELS_CUDA_CACHE_CUH

#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/cuda.cuh"
#include "kernels/formats.h"
#include "kernels/ops.h"

struct cache_view {
    struct ops_kv kv;
    struct ops_place place;
    enum formats_entry_kind kind;
    uint32_t head_dim, rope_dim, index_dim, window, ring;
    size_t entry_bytes, entry_scale_bytes, key_bytes, key_scale_bytes;
};

static inline struct cache_view cache_view_make(const struct ops_dims *d, const struct ops_kv *kv,
                                                const struct ops_place *place)
{
    struct cache_view v;
    v.kv = *kv;
    v.place = *place;
    v.kind = d->entry_kind;
    v.head_dim = d->head_dim;
    v.rope_dim = d->rope_dim;
    v.index_dim = d->index_dim;
    v.window = d->window;
    v.ring = d->ring;
    v.entry_bytes = formats_entry_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    v.entry_scale_bytes = formats_entry_scale_bytes(d->entry_kind, d->head_dim, d->rope_dim);
    v.key_bytes = formats_key_bytes(d->entry_kind, d->index_dim);
    v.key_scale_bytes = formats_key_scale_bytes(d->entry_kind, d->index_dim);
    return v;
}

/* Where an entry, a key or a window row lies. */
struct cache_at {
    uint8_t *body, *scales;
};

static __device__ __forceinline__ struct cache_at cache_entry_at(const struct cache_view &v,
                                                                 const uint32_t *pages, uint32_t j)
{
    uint8_t *page = v.kv.pool + (size_t)pages[j / v.place.entries_a_page] * v.kv.page_bytes;
    size_t i = j % v.place.entries_a_page;
    return {page + v.place.entry + i * v.entry_bytes,
            page + v.place.entry_scale + i * v.entry_scale_bytes};
}

static __device__ __forceinline__ struct cache_at cache_key_at(const struct cache_view &v,
                                                               const uint32_t *pages, uint32_t j)
{
    uint8_t *page = v.kv.pool + (size_t)pages[j / v.place.entries_a_page] * v.kv.page_bytes;
    size_t i = j % v.place.entries_a_page;
    return {page + v.place.key + i * v.key_bytes, page + v.place.key_scale + i * v.key_scale_bytes};
}

static __device__ __forceinline__ struct cache_at cache_window_at(const struct cache_view &v,
                                                                  uint32_t slot, uint32_t position)
{
    uint8_t *base = v.kv.windows + (size_t)slot * v.kv.window_bytes;
    size_t i = position % v.ring;
    return {base + v.place.window + i * v.entry_bytes,
            base + v.place.window_scale + i * v.entry_scale_bytes};
}

/* The state of a slot: floats, of the compressor or of the index's. */
static __device__ __forceinline__ float *cache_state_at(const struct cache_view &v, uint32_t slot,
                                                        bool index)
{
    return reinterpret_cast<float *>(v.kv.states + (size_t)slot * v.kv.state_bytes +
                                     (index ? v.place.index_state : v.place.state));
}

/* Channels ch .. ch + 3 of an entry; ch is a multiple of 4. */
static __device__ __forceinline__ float4 cache_entry_load(const struct cache_view &v,
                                                          struct cache_at at, uint32_t ch)
{
    if (v.kind == FORMATS_ENTRY_F32) {
        const float *x = reinterpret_cast<const float *>(at.body) + ch;
        return make_float4(x[0], x[1], x[2], x[3]);
    }
    uint32_t n = v.head_dim - v.rope_dim;
    if (ch < n) {
        uint32_t four = *reinterpret_cast<const uint32_t *>(at.body + ch);
        float scale = e8m0_decode(at.scales[ch / FORMATS_KV_GROUP]);
        return make_float4(
            e4m3_decode((uint8_t)four) * scale, e4m3_decode((uint8_t)(four >> 8)) * scale,
            e4m3_decode((uint8_t)(four >> 16)) * scale, e4m3_decode((uint8_t)(four >> 24)) * scale);
    }
    const uint32_t *halves = reinterpret_cast<const uint32_t *>(at.body + n + 2 * (size_t)(ch - n));
    uint32_t lo = halves[0], hi = halves[1];
    return make_float4(f32_from_bits(lo << 16), f32_from_bits(lo & 0xffff0000u),
                       f32_from_bits(hi << 16), f32_from_bits(hi & 0xffff0000u));
}

/* Channels ch .. ch + 7 of a key; ch is a multiple of 8. */
static __device__ __forceinline__ void
cache_key_load(const struct cache_view &v, struct cache_at at, uint32_t ch, float ret_x[8])
{
    if (v.kind == FORMATS_ENTRY_F32) {
        const float *x = reinterpret_cast<const float *>(at.body) + ch;
        for (int i = 0; i < 8; i++) {
            ret_x[i] = x[i];
        }
        return;
    }
    uint32_t eight = *reinterpret_cast<const uint32_t *>(at.body + ch / 2);
    float scale = e8m0_decode(at.scales[ch / FORMATS_KEY_GROUP]);
    for (int i = 0; i < 8; i++) {
        ret_x[i] = e2m1_decode((uint8_t)(eight >> (4 * i) & 15u)) * scale;
    }
}

/* Stores x [head_dim]. Whole warps, warp_i of n_warps, share the groups; what
 * x holds is visible to all of them. */
static __device__ __forceinline__ void cache_entry_store(const struct cache_view &v, const float *x,
                                                         struct cache_at at, uint32_t warp_i,
                                                         uint32_t n_warps)
{
    uint32_t lane = cuda_lane();
    if (v.kind == FORMATS_ENTRY_F32) {
        float *to = reinterpret_cast<float *>(at.body);
        for (uint32_t ch = warp_i * CUDA_WARP + lane; ch < v.head_dim; ch += n_warps * CUDA_WARP) {
            to[ch] = x[ch];
        }
        return;
    }
    uint32_t n = v.head_dim - v.rope_dim, n_groups = n / FORMATS_KV_GROUP;
    for (uint32_t g = warp_i; g < n_groups; g += n_warps) {
        uint32_t ch = g * FORMATS_KV_GROUP + lane;
        float a = x[ch], b = x[ch + CUDA_WARP];
        float most = warp_largest(x + g * FORMATS_KV_GROUP, FORMATS_KV_GROUP, 1e-4f);
        uint8_t code = e8m0_scale_for(most, 1.0f / 448.0f);
        float inverse = 1.0f / e8m0_decode(code);
        at.body[ch] = e4m3_encode(a * inverse);
        at.body[ch + CUDA_WARP] = e4m3_encode(b * inverse);
        if (lane == 0) {
            at.scales[g] = code;
        }
    }
    if (warp_i == 0) {
        for (uint32_t g = n_groups + lane; g < v.entry_scale_bytes; g += CUDA_WARP) {
            at.scales[g] = 0;
        }
    }
    uint16_t *tail = reinterpret_cast<uint16_t *>(at.body + n);
    for (uint32_t i = warp_i * CUDA_WARP + lane; i < v.rope_dim; i += n_warps * CUDA_WARP) {
        tail[i] = bf16_encode(x[n + i]);
    }
}

/* Stores x [index_dim], like cache_entry_store. */
static __device__ __forceinline__ void cache_key_store(const struct cache_view &v, const float *x,
                                                       struct cache_at at, uint32_t warp_i,
                                                       uint32_t n_warps)
{
    uint32_t lane = cuda_lane();
    if (v.kind == FORMATS_ENTRY_F32) {
        float *to = reinterpret_cast<float *>(at.body);
        for (uint32_t ch = warp_i * CUDA_WARP + lane; ch < v.index_dim; ch += n_warps * CUDA_WARP) {
            to[ch] = x[ch];
        }
        return;
    }
    for (uint32_t g = warp_i; g < v.index_dim / FORMATS_KEY_GROUP; g += n_warps) {
        uint32_t ch = g * FORMATS_KEY_GROUP + lane;
        float most =
            warp_largest(x + g * FORMATS_KEY_GROUP, FORMATS_KEY_GROUP, 6.0f * 1.17549435e-38f);
        uint8_t code = e8m0_scale_for(most, 1.0f / 6.0f);
        uint32_t nibble = e2m1_encode(x[ch] / e8m0_decode(code));
        uint32_t above = __shfl_down_sync(0xffffffffu, nibble, 1);
        if (lane % 2 == 0) {
            at.body[ch / 2] = (uint8_t)(nibble | above << 4);
        }
        if (lane == 0) {
            at.scales[g] = code;
        }
    }
}

#endif
