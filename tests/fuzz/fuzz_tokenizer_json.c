#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer.h"

/*
 * Whatever the bytes: a tokenizer.json is refused with words, or gives a tokenizer that encodes
 * the very same bytes and decodes them back.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct tokenizer *t;
    struct error err = {""};
    struct token_ids ids = TOKEN_IDS_INIT;
    struct buf back = BUF_INIT;
    enum status status = tokenizer_parse(data, bytes, &t, &err);
    if (status != STATUS_OK) {
        require(status == STATUS_CORRUPT || status == STATUS_UNSUPPORTED ||
                status == STATUS_TOO_LARGE);
        require(err.text[0] != '\0');
        return 0;
    }
    require(tokenizer_encode(t, data, bytes, NULL, 0, SIZE_MAX, &ids, &err) == STATUS_OK);
    for (size_t i = 0; i < ids.n; i++) {
        require(ids.id[i] < tokenizer_n_vocab(t));
    }
    tokenizer_decode(t, ids.id, ids.n, true, &back);
    require(back.bytes == bytes && memcmp(back.data, data, bytes) == 0);
    buf_fini(&back);
    token_ids_fini(&ids);
    tokenizer_close(t);
    return 0;
}
