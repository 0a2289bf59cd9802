/* Pages beyond 2 and 4 GiB: the pool of a V4-Flash node is one range, page i at i * 901,120 bytes.
 * A 32-bit product somewhere would read zeroes or rubbish from page 2,384 (2^31) or 4,767 (2^32)
 * on. The same sequence is computed with its page at indexes before and beyond both; every byte and
 * every bit must be the same. On the CPU the range is mapped without memory behind it.
 */
#include "util.h"

#include <sys/mman.h>

enum { PAGE = 901120, LAST = 20000, TOKENS = 256 };

static const uint32_t indexes[] = {1, 2065, 2066, 2383, 2384, 4766, 4767, LAST};

/* Entries and keys of one page, then a step that attends to them. */
static void compute(struct ops_device *dev, const struct ops_dims *d, const struct ops_layer *layer,
                    struct ops_kv *kv, uint32_t page, const float *x, const float *q,
                    const float *kv_rows, const float *iq, const float *iw, float *ret_o,
                    uint32_t *ret_chosen)
{
    static struct call call;
    const struct ops *ops = backend;
    struct error err;
    struct ops_selection selection = {poisoned_on(ops, dev, TOKENS * 4),
                                      poisoned_on(ops, dev, (size_t)TOKENS * d->index_topk * 4)};
    float *o = poisoned_on(ops, dev, (size_t)TOKENS * d->n_heads * d->head_dim * 4);
    uint8_t *zeros =
        mem_zalloc(kv->window_bytes > kv->state_bytes ? kv->window_bytes : kv->state_bytes);
    ops->write(dev, kv->windows, zeros, kv->window_bytes);
    ops->write(dev, kv->states, zeros, kv->state_bytes);
    call_clear(&call);
    call_add(&call, &page, 0, 0, TOKENS);
    ops->begin(dev, &call.rows);
    ops->compress(dev, &call.rows, layer, true, x, kv);
    ops->compress(dev, &call.rows, layer, false, x, kv);
    ops->topk(dev, &call.rows, layer, iq, iw, kv, &selection);
    ops->attend(dev, &call.rows, layer, q, kv_rows, &selection, kv, o);
    ops->read(dev, ret_chosen, selection.index + (size_t)(TOKENS - 1) * d->index_topk,
              d->index_topk * 4);
    ops->read(dev, ret_o, o, (size_t)TOKENS * d->n_heads * d->head_dim * 4);
    if (ops->wait(dev, &err)) {
        fail_msg("%s", err.text);
    }
    mem_free(zeros);
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
    const struct ops *ops = backend;
    struct ops_limits limits = {
        .n_rows = TOKENS, .n_tokens = TOKENS, .page_tokens = TOKENS, .n_threads = 2};
    struct ops_device *dev = open_on(ops, &d, &limits);
    /* On a device with as many GiB: all of it. */
    uint8_t *mapped = mmap(NULL, (size_t)(LAST + 1) * PAGE, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(mapped, MAP_FAILED);
    uint8_t *pool = ops == &ops_cpu ? mapped : ops->alloc(dev, (size_t)(LAST + 1) * PAGE);
    assert_non_null(pool);
    float *w = random_floats(&seed, (size_t)1024 * d.hidden, 0.2f),
          *host_vectors = random_floats(&seed, 4096, 1.0f);
    const float *vectors = to_device(ops, dev, host_vectors, 4096 * sizeof(float));
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
                        .windows = ops->alloc(dev, 16 * 584),
                        .states = ops->alloc(dev, OPS_STATE_RING * 4 * 640 * 4),
                        .window_bytes = 16 * 584,
                        .state_bytes = OPS_STATE_RING * 4 * 640 * 4,
                        .stores_window = true};
    const size_t lengths[] = {(size_t)TOKENS * d.hidden, TOKENS * 1024, TOKENS * 512,
                              TOKENS * 3 * 128, TOKENS * 3};
    const float *in[5]; /* x, q, kv_rows, iq, iw */
    for (int i = 0; i < 5; i++) {
        float *host = random_floats(&seed, lengths[i], 1.0f);
        in[i] = to_device(ops, dev, host, lengths[i] * sizeof(float));
        mem_free(host);
    }
    float *first = poisoned((size_t)TOKENS * 1024), *o = poisoned((size_t)TOKENS * 1024);
    uint32_t chosen[16], now[16];
    uint8_t *first_page = NULL;
    for (size_t k = 0; k < sizeof(indexes) / sizeof(indexes[0]); k++) {
        compute(dev, &d, &layer, &kv, indexes[k], in[0], in[1], in[2], in[3], in[4],
                k == 0 ? first : o, k == 0 ? chosen : now);
        uint8_t *page = from_device(ops, dev, pool + (size_t)indexes[k] * PAGE, PAGE);
        if (k == 0) {
            bool all_zero = true;
            for (size_t i = 0; i < 41728; i++) {
                all_zero = all_zero && page[layer.place.entry + i] == 0;
            }
            assert_false(all_zero);
            first_page = page;
            continue;
        }
        assert_memory_equal(now, chosen, sizeof(now));
        assert_memory_equal(o, first, (size_t)TOKENS * 1024 * sizeof(float));
        assert_memory_equal(page, first_page, PAGE);
        mem_free(page);
    }
    void *all[] = {w, host_vectors, first, o, first_page};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        mem_free(all[i]);
    }
    ops->close(dev);
    munmap(mapped, (size_t)(LAST + 1) * PAGE);
}

int main(int argc, char **argv)
{
    backend_choose(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_far_pages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
