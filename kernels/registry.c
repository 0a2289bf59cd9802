/* See registry.h. Each backend's variants are listed by hand: what is here is what can be said at
 * start, and what is not here can't be chosen.
 */
#include "kernels/registry.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/parcel.h"

enum { MAX_GROUP = 16 };

enum status registry_find(const char *device, struct registry_choice *ret_choice, struct error *err)
{
    if (strcmp(device, "cpu") == 0) {
        *ret_choice = (struct registry_choice){&ops_cpu, 1};
        return STATUS_OK;
    }
    if (strncmp(device, "cpu:", 4) == 0) {
        char *end;
        unsigned long n = strtoul(device + 4, &end, 10);
        if (device[4] >= '1' && device[4] <= '9' && *end == '\0' && n <= MAX_GROUP) {
            *ret_choice = (struct registry_choice){&ops_cpu, (uint32_t)n};
            return STATUS_OK;
        }
        return error_set(err, STATUS_INVALID,
                         "device '%s' is not understood: cpu:N is a group of 1 to %d simulated "
                         "devices",
                         device, MAX_GROUP);
    }
    if (strncmp(device, "cuda", 4) == 0) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "device '%s': this build has no CUDA operations for the model, only 'cpu' "
                         "and 'cpu:N'",
                         device);
    }
    return error_set(err, STATUS_INVALID, "device '%s' is unknown: it is 'cpu' or 'cpu:N'", device);
}

void registry_list(void (*line)(void *cookie, const struct registry_variant *variant), void *cookie)
{
    static const char *const operations[] = {"embed",   "mhc",     "project", "compress",
                                             "indexer", "topk",    "attend",  "oproj",
                                             "route",   "experts", "head",    "comm"};
    bool avx2 = strcmp(cpu_gemm_variant(), "avx2") == 0;
    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
        line(cookie, &(struct registry_variant){"cpu", operations[i], "reference", true,
                                                "the only variant; needs nothing"});
    }
    line(cookie, &(struct registry_variant){"cpu", "products", "avx2", avx2,
                                            avx2 ? "this processor has AVX2"
                                                 : "needs AVX2, which this processor lacks"});
    line(cookie,
         &(struct registry_variant){"cpu", "products", "generic", !avx2,
                                    avx2 ? "gives the same bits more slowly" : "needs nothing"});
    line(cookie, &(struct registry_variant){"cpu", "sample", "host", true,
                                            "tokens are drawn by the engine on the host"});
    line(cookie, &(struct registry_variant){"cpu", "parcel", parcel_variant(), true,
                                            "fastest that this processor has; same bits"});
}
