#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/log.h"
#include "model/config.h"

/*
 * The bytes up to the first NUL are a config.json, those after it, if there are any, a
 * generation_config.json. What is accepted keeps the promises of the header: the sums and products
 * that others form of it can't overflow.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

static void check(const struct model_config *c)
{
    require(c->n_layers > 0 && c->n_layers + c->n_extra_layers <= MODEL_MAX_LAYERS);
    uint32_t n_sparse = 0, n_heavy = 0;
    for (uint32_t i = 0; i < c->n_layers + c->n_extra_layers; i++) {
        require(c->layers[i].ratio == 0 || MODEL_PAGE_TOKENS % c->layers[i].ratio == 0);
        require((c->layers[i].ratio == 0) == (c->layers[i].kind == MODEL_LAYER_WINDOW));
        n_sparse += i < c->n_layers && c->layers[i].kind == MODEL_LAYER_SPARSE;
        n_heavy += i < c->n_layers && c->layers[i].kind == MODEL_LAYER_HEAVY;
    }
    require(n_sparse == c->n_sparse && n_heavy == c->n_heavy);
    require(c->rope_dim % 2 == 0 && c->rope_dim <= c->head_dim && c->n_heads % c->o_groups == 0);
    require((uint64_t)c->n_heads * c->head_dim <= 1 << 20);
    require(c->n_experts_used > 0 && c->n_experts_used <= MODEL_MAX_TOP_K);
    require(c->n_experts_used <= c->n_experts && c->n_experts <= MODEL_MAX_EXPERTS);
    require(c->hc_mult == MODEL_HC_MULT && c->n_hash_layers <= c->n_layers);
    require(c->n_sparse == 0 || (c->index_n_heads > 0 && c->index_topk > 0));
    require(c->bos_id < c->vocab_size && c->n_eos > 0 && c->n_eos <= MODEL_MAX_EOS);
    for (uint32_t i = 0; i < c->n_eos; i++) {
        require(c->eos_ids[i] < c->vocab_size);
    }
    require(c->rms_norm_eps > 0 && c->hc_eps > 0 && c->route_scale > 0 && c->swiglu_limit >= 0);
    require(c->temperature >= 0 && c->top_p >= 0 && c->top_p <= 1 && c->top_k >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const uint8_t *end = bytes ? memchr(data, 0, bytes) : NULL;
    size_t config_bytes = end ? (size_t)(end - data) : bytes;
    struct model_config config;
    struct error err;
    log_set_level(LOG_LEVEL_ERROR); /* else a line for each unknown field */
    enum status status = model_config_parse("m", data, config_bytes, end ? end + 1 : NULL,
                                            end ? bytes - config_bytes - 1 : 0, &config, &err);
    if (status == STATUS_OK) {
        struct buf text = BUF_INIT;
        check(&config);
        model_config_describe(&config, &text);
        require(text.bytes > 0);
        buf_fini(&text);
    } else {
        require(status == STATUS_CORRUPT || status == STATUS_INVALID ||
                status == STATUS_UNSUPPORTED || status == STATUS_TOO_LARGE);
        require(strstr(err.text, "config.json") != NULL);
    }
    return 0;
}
