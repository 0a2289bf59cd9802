#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/json.h"
#include "router/api.h"
#include "router/api_render.h"

/*
 * The first byte chooses the kind of request, the rest is the body. Whatever it is: no crash;
 * what is taken is within every bound that the nodes rely on, and encodes or is refused; what is
 * refused gives an error that is whole JSON of the known shape.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

/* With a real tokenizer and encoding; opened once and kept. */
static const struct api_context *context_of_bundled_model(void)
{
    static struct api_context context;
    struct tokenizer *tokenizer = NULL;
    struct chat_format *format = NULL;
    struct error err = {""};
    if (context.model != NULL) {
        return &context;
    }
    if (tokenizer_open(BUNDLED_MODEL, &tokenizer, &err) != STATUS_OK ||
        chat_format_open(BUNDLED_MODEL, &format, &err) != STATUS_OK) {
        fprintf(stderr, "fuzz_api: %s\n", err.text);
        exit(1);
    }
    context = (struct api_context){
        .model = "tiny",
        .tokenizer = tokenizer,
        .format = format,
        .max_context_tokens = 512,
        .temperature = 1,
        .top_p = 1,
        .thinking = true,
        .effort = CHAT_EFFORT_HIGH,
    };
    return &context;
}

static void check_error(const struct api_error *error)
{
    struct buf out = BUF_INIT;
    struct json *value = NULL;
    api_render_error(error, &out);
    require(json_parse(out.data, out.bytes, NULL, &value, NULL) == STATUS_OK);
    const struct json *body = json_get(value, "error");
    require(json_object_n(body) == 4);
    require(json_kind_of(json_get(body, "message")) == JSON_KIND_STRING);
    require(json_kind_of(json_get(body, "code")) == JSON_KIND_STRING);
    require(error->status == 400 || error->status == 404);
    json_free(value);
    buf_fini(&out);
}

static void check_numbers(const struct api_request *r, uint32_t n_vocab)
{
    const struct api_sampling *s = &r->sampling;
    require(r->n >= 1 && r->n <= API_MAX_N);
    require(r->kind == API_KIND_DETOKENIZE || r->n_prompts * r->n <= API_MAX_CHOICES);
    require(s->temperature >= 0 && s->temperature <= 2);
    require(s->top_p >= 0 && s->top_p <= 1 && s->min_p >= 0 && s->min_p <= 1);
    require(s->top_k >= 0);
    require(s->n_top_logprobs <= API_MAX_TOP_LOGPROBS);
    require(r->stream || !r->include_usage);
    require(r->n_stops <= API_MAX_STOPS);
    for (size_t i = 0; i < r->n_stops; i++) {
        require(r->stop_bytes[i] >= 1 && r->stop_bytes[i] <= API_MAX_STOP_BYTES);
        require(r->stops[i][r->stop_bytes[i]] == '\0');
    }
    require(s->n_stop_token_ids <= API_MAX_STOP_IDS);
    for (size_t i = 0; i < s->n_stop_token_ids; i++) {
        require(s->stop_token_ids[i] < n_vocab);
    }
    require(s->n_logit_bias <= API_MAX_LOGIT_BIASES);
    for (size_t i = 0; i < s->n_logit_bias; i++) {
        require(s->logit_bias[i].id < n_vocab);
        require(s->logit_bias[i].bias >= -100 && s->logit_bias[i].bias <= 100);
    }
}

static void check_prompts(const struct api_request *r, const struct api_context *context)
{
    struct buf text = BUF_INIT;
    for (size_t i = 0; i < r->n_prompts && i < 4; i++) {
        struct token_ids ids = TOKEN_IDS_INIT;
        struct api_error error;
        enum status status = api_encode(r, context, i, &ids, &error);
        if (status != STATUS_OK) {
            require(status == STATUS_INVALID && ids.n == 0);
            check_error(&error);
        } else if (r->kind != API_KIND_TOKENIZE) {
            require(ids.n >= 1 && ids.n < context->max_context_tokens);
            uint32_t max = api_max_tokens(r, context, ids.n);
            require(max >= 1 && max + ids.n <= context->max_context_tokens);
        }
        for (size_t j = 0; j < ids.n; j++) {
            require(ids.id[j] < tokenizer_n_vocab(context->tokenizer));
        }
        if (!r->is_chat) {
            api_prompt_text(r, context, i, &text);
        }
        token_ids_fini(&ids);
    }
    buf_fini(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const struct api_context *context = context_of_bundled_model();
    struct api_request *request = NULL;
    struct api_error error;
    if (bytes == 0) {
        return 0;
    }
    enum api_kind kind = (enum api_kind)(data[0] & 3);
    if (api_parse(kind, data + 1, bytes - 1, context, &request, &error) != STATUS_OK) {
        require(request == NULL);
        check_error(&error);
        return 0;
    }
    check_numbers(request, tokenizer_n_vocab(context->tokenizer));
    if (kind == API_KIND_DETOKENIZE) {
        struct buf out = BUF_INIT;
        struct json *value = NULL;
        api_render_text(request, context, &out);
        require(json_parse(out.data, out.bytes, NULL, &value, NULL) == STATUS_OK);
        json_free(value);
        buf_fini(&out);
    } else {
        check_prompts(request, context);
    }
    api_request_free(request);
    return 0;
}
