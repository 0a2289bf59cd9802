/* tests/lost_main.c - lost: the ticks of lost.h for programs in other languages (lost.py).
 *
 * Says "ready"; then answers each line "FROM_NS TO_NS", instants of CLOCK_MONOTONIC, with how many
 * nanoseconds of it were lost. Ends with its input.
 */
#include <inttypes.h>
#include <stdio.h>

#include "tests/lost.h"

int main(void)
{
    char line[128];
    uint64_t from_ns, to_ns;
    lost_watch();
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (sscanf(line, "%" SCNu64 " %" SCNu64, &from_ns, &to_ns) != 2) {
            return 1;
        }
        printf("%" PRIu64 "\n", lost_ns(from_ns, to_ns));
        fflush(stdout);
    }
    return 0;
}
