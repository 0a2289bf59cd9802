/* Frames of addresses and keys as a peer sends them: first byte the kind, the rest the frame. What
 * is accepted must be exactly what sealing its contents gives, and be followed by the promised
 * margin of zeroes.
 */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "base/mem.h"
#include "transport/envelope.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    enum envelope_kind kind = data[0] & 1 ? ENVELOPE_ADDRESS : ENVELOPE_RKEY;
    struct ucx_version version = {1, 13};
    uint8_t *frame = mem_dup(data + 1, bytes - 1); /* exact size, so that overreads are seen */
    uint8_t *contents;
    size_t n;
    struct error err;
    if (envelope_open(kind, version, frame, bytes - 1, 4096, &contents, &n, &err) == STATUS_OK) {
        size_t sealed_bytes;
        uint8_t *sealed = envelope_seal(kind, version, contents, n, &sealed_bytes);
        assert(sealed_bytes == bytes - 1 && memcmp(sealed, frame, sealed_bytes) == 0);
        for (size_t i = 0; i < ENVELOPE_MARGIN_BYTES; i++) {
            assert(contents[n + i] == 0);
        }
        mem_free(sealed);
        mem_free(contents);
    }
    mem_free(frame);
    return 0;
}
