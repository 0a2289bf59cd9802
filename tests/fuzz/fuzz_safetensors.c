#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/safetensors.h"

/*
 * Whatever the bytes of a file: no crash, no read beyond them, every refusal names the file, and a
 * file that is accepted is refused as soon as it is a byte longer or shorter.
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
    struct error err;
    size_t n_tensors;
    enum status status = safetensors_check_header("the-file", data, bytes, bytes, &n_tensors, &err);
    if (status != STATUS_OK) {
        require(status == STATUS_CORRUPT || status == STATUS_UNSUPPORTED ||
                status == STATUS_TOO_LARGE);
        require(strncmp(err.text, "the-file", 8) == 0);
        return 0;
    }
    require(bytes > 8 && n_tensors < bytes);
    require(safetensors_check_header("the-file", data, bytes, bytes + 1, NULL, &err) ==
            STATUS_CORRUPT);
    require(strstr(err.text, "1 bytes beyond") != NULL);
    status = safetensors_check_header("the-file", data, bytes - 1, bytes - 1, NULL, &err);
    require(status == STATUS_CORRUPT);
    require(strstr(err.text, "1 bytes short") != NULL);
    return 0;
}
