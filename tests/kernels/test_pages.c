/* Pages beyond 2 and 4 GiB: the pool of a V4-Flash node is one range, page i at i * 901,120 bytes.
 * A 32-bit product somewhere would read zeroes or rubbish from page 2,384 (2^31) or 4,767 (2^32)
 * on. The same sequence is computed with its page at indexes before and beyond both; every byte and
 * every bit must be the same. The range is mapped without memory behind it.
 */
#include "util.h"

#include <sys/mman.h>

enum { PAGE = 901120, LAST = 20000, TOKENS = 256 };

static const uint32_t indexes[] = {1, 2065, 2066, 2383, 2384, 4766, 4767, LAST};

/* Entries and keys of one page, then a step that attends to them. */
static void compute(struct ops_device *dev, const struct ops_layer *layer, struct ops_kv *kv,
                    uint32_t page, const float *x, const float *q, const float *kv_rows,
                    const float *iq, const float *iw, float *ret_o, uint32_t *ret_chosen)
{
    static struct call call;
    struct ops_dims *d = &dev->d;
    struct ops_selection selection = {mem_array(TOKENS, 4), mem_array(TOKENS * d->index_topk, 4)};
    memset(kv->windows, 0, kv->window_bytes);
    memset(kv->states, 0, kv->state_bytes);
    call_clear(&call);
    call_add(&call, &page, 0, 0, TOKENS);
    ops_cpu.begin(dev, &call.rows);
    ops_cpu.compress(dev, &call.rows, layer, true, x, kv);
    ops_cpu.compress(dev, &call.rows, layer, false, x, kv);
    ops_cpu.topk(dev, &call.rows, layer, iq, iw, kv, &selection);
    ops_cpu.attend(dev, &call.rows, layer, q, kv_rows, &selection, kv, ret_o);
    memcpy(ret_chosen, selection.index + (size_t)(TOKENS - 1) * d->index_topk, d->index_topk * 4);
    mem_free(selection.n);
    mem_free(selection.index);
}

static void test_far_pages(void **state)
{
    struct ops_dims d = small_dims(false);
    d.head_dim = 512;
    d.index_dim = 128;
    d.n_heads = 2;
    d.index_topk = 16;
    d.hidden = 64;
    uint64_t seed = 61;
    uint8_t *pool = mmap(NULL, (size_t)(LAST + 1) * PAGE, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(pool, MAP_FAILED);
    struct ops_device *dev = open_device(&d, TOKENS, TOKENS, 0);
    float *w = random_floats(&seed, (size_t)1024 * d.hidden, 0.2f),
          *vectors = random_floats(&seed, 4096, 1.0f);
    struct ops_compressor wide = {.wkv = pack_floats(dev, w, 1024, d.hidden),
                                  .wgate = pack_floats(dev, w, 1024, d.hidden),
                                  .ape = vectors,
                                  .norm = vectors},
                          narrow = {.wkv = pack_floats(dev, w, 256, d.hidden),
                                    .wgate = pack_floats(dev, w, 256, d.hidden),
                                    .ape = vectors,
                                    .norm = vectors};
    struct ops_layer layer = {.place = {.ratio = 4,
                                        .entries_a_page = 64,
                                        .entry = 20 * 41728, /* the last slice of a page */
                                        .entry_scale = 20 * 41728 + 64 * 576,
                                        .key = 20 * 41728 + 64 * 584,
                                        .key_scale = 20 * 41728 + 64 * 648,
                                        .window_scale = 16 * 576,
                                        .index_state = OPS_STATE_RING * 4 * 512 * 4},
                              .compressor = wide,
                              .index_compressor = narrow,
                              .attn_sink = vectors};
    struct ops_kv kv = {.pool = pool,
                        .page_bytes = PAGE,
                        .windows = mem_zalloc(16 * 584),
                        .states = mem_zalloc(OPS_STATE_RING * 4 * 640 * 4),
                        .window_bytes = 16 * 584,
                        .state_bytes = OPS_STATE_RING * 4 * 640 * 4,
                        .stores_window = true};
    float *x = random_floats(&seed, (size_t)TOKENS * d.hidden, 1.0f);
    float *q = random_floats(&seed, (size_t)TOKENS * 1024, 1.0f);
    float *kv_rows = random_floats(&seed, (size_t)TOKENS * 512, 1.0f);
    float *iq = random_floats(&seed, (size_t)TOKENS * 3 * 128, 1.0f);
    float *iw = random_floats(&seed, (size_t)TOKENS * 3, 1.0f);
    float *first = poisoned((size_t)TOKENS * 1024), *o = poisoned((size_t)TOKENS * 1024);
    uint32_t chosen[16], now[16];
    compute(dev, &layer, &kv, indexes[0], x, q, kv_rows, iq, iw, first, chosen);
    bool all_zero = true;
    for (size_t i = 0; i < 41728; i++) {
        all_zero = all_zero && pool[(size_t)indexes[0] * PAGE + layer.place.entry + i] == 0;
    }
    assert_false(all_zero);
    for (size_t k = 1; k < sizeof(indexes) / sizeof(indexes[0]); k++) {
        compute(dev, &layer, &kv, indexes[k], x, q, kv_rows, iq, iw, o, now);
        assert_memory_equal(now, chosen, sizeof(now));
        assert_memory_equal(o, first, (size_t)TOKENS * 1024 * sizeof(float));
        assert_memory_equal(pool + (size_t)indexes[k] * PAGE, pool + (size_t)indexes[0] * PAGE,
                            PAGE);
    }
    void *all[] = {w, vectors, kv.windows, kv.states, x, q, kv_rows, iq, iw, first, o};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops_cpu.close(dev);
    munmap(pool, (size_t)(LAST + 1) * PAGE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_far_pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
