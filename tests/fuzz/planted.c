#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Breaks when an input lost its closing bracket but kept its opening one: the driver must find it.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    if (bytes > 0 && data[0] == '[' && memchr(data, ']', bytes) == NULL) {
        abort();
    }
    return 0;
}
