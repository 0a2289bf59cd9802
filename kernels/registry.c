/* See registry.h. Each backend's variants are listed by hand: what is here is what can be said at
 * start, and what is not here can't be chosen.
 */
#include "kernels/registry.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/device.h"
#include "kernels/parcel.h"

enum { MAX_GROUP = 16, MAX_DEVICE = 256 };

#ifndef BATON_CUDA
#define BATON_CUDA 0
#endif

/* "cuda:N" */
static enum status find_cuda(const char *device, struct registry_choice *ret_choice,
                             struct error *err)
{
    char *end = NULL;
    bool is_number = strncmp(device, "cuda:", 5) == 0 && device[5] >= '0' && device[5] <= '9';
    unsigned long i = is_number ? strtoul(device + 5, &end, 10) : 0;
    if (is_number && *end == ',') {
        return error_set(err, STATUS_UNSUPPORTED,
                         "device '%s': groups of GPUs are not supported, one is: cuda:%lu", device,
                         i);
    }
    if (!is_number || *end != '\0' || i >= MAX_DEVICE) {
        return error_set(err, STATUS_INVALID,
                         "device '%s' is not understood: cuda:N is GPU N of this host, from 0",
                         device);
    }
#if BATON_CUDA
    enum status status = device_probe((uint32_t)i, err);
    if (!status) {
        *ret_choice = (struct registry_choice){&ops_cuda, 1, (uint32_t)i};
    }
    return status;
#else
    return error_set(err, STATUS_UNSUPPORTED,
                     "device '%s': this build has no CUDA kernels; it was made without nvcc, see "
                     "the build option gpu",
                     device);
#endif
}

enum status registry_find(const char *device, struct registry_choice *ret_choice, struct error *err)
{
    if (strcmp(device, "cpu") == 0) {
        *ret_choice = (struct registry_choice){.ops = &ops_cpu, .n_devices = 1};
        return STATUS_OK;
    }
    if (strncmp(device, "cpu:", 4) == 0) {
        char *end;
        unsigned long n = strtoul(device + 4, &end, 10);
        if (device[4] >= '1' && device[4] <= '9' && *end == '\0' && n <= MAX_GROUP) {
            *ret_choice = (struct registry_choice){.ops = &ops_cpu, .n_devices = (uint32_t)n};
            return STATUS_OK;
        }
        return error_set(err, STATUS_INVALID,
                         "device '%s' is not understood: cpu:N is a group of 1 to %d simulated "
                         "devices",
                         device, MAX_GROUP);
    }
    if (strncmp(device, "cuda", 4) == 0) {
        return find_cuda(device, ret_choice, err);
    }
    return error_set(err, STATUS_INVALID,
                     "device '%s' is unknown: it is 'cpu', 'cpu:N' or 'cuda:N'", device);
}

static const char *const operations[] = {"embed",   "mhc",     "project", "compress",
                                         "indexer", "topk",    "attend",  "oproj",
                                         "route",   "experts", "head",    "comm"};

static void list_cuda(void (*line)(void *cookie, const struct registry_variant *variant),
                      void *cookie)
{
    struct error err = {"this build has no CUDA kernels: it was made without nvcc"};
    bool here = false;
#if BATON_CUDA
    here = device_probe(0, &err) == STATUS_OK;
#endif
    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++) {
        line(cookie, &(struct registry_variant){"cuda", operations[i], "reference", here,
                                                here ? "the only variant; the CPU's bits, any shape"
                                                     : err.text});
    }
}

void registry_list(void (*line)(void *cookie, const struct registry_variant *variant), void *cookie)
{
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
    list_cuda(line, cookie);
}
