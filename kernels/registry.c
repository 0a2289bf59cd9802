/* See registry.h. Each backend's variants are listed by hand: what is here is what can be said at
 * start, and what is not here can't be chosen.
 */
#include "kernels/registry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/tuned.h"
#include "kernels/parcel.h"

enum { MAX_GROUP = REGISTRY_MAX_GROUP, MAX_DEVICE = 256 };

#ifndef BATON_CUDA
#define BATON_CUDA 0
#endif

const char *const registry_operations[REGISTRY_N_OPERATIONS] = {
    "embed", "mhc",     "project", "compress", "indexer",  "topk",   "attend", "oproj",
    "route", "experts", "head",    "comm",     "products", "sample", "parcel"};

/* --- what the host does, whatever the device */

static bool has_avx2(struct error *why)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return true;
    }
#endif
    return error_set(why, STATUS_UNSUPPORTED, "needs AVX2, which this processor lacks") ==
           STATUS_OK;
}

static void install_products(struct ops *table)
{
    cpu_gemm_force_generic(false);
}

static void install_generic_products(struct ops *table)
{
    cpu_gemm_force_generic(true);
}

static void install_parcel(struct ops *table)
{
    parcel_force_generic(false);
}

static void install_generic_parcel(struct ops *table)
{
    parcel_force_generic(true);
}

/* clang-format off */
#define HOST_VARIANTS                                                                              \
    {.operation = "sample", .name = "host", .note = "tokens are drawn by the engine on the host"}, \
    {.operation = "parcel", .name = "avx2", .note = "the host's checksum of the hand-off",         \
     .is_here = has_avx2, .install = install_parcel},                                              \
    {.operation = "parcel", .name = "generic", .note = "the same sums on any processor",           \
     .install = install_generic_parcel}

/* --- cpu */

#define PLAIN(operation_) \
    {.operation = operation_, .name = "plain", .note = "any processor, any shape"}

static const struct registry_variant cpu_variants[] = {
    PLAIN("embed"),   PLAIN("mhc"),    PLAIN("project"), PLAIN("compress"),
    PLAIN("indexer"), PLAIN("topk"),   PLAIN("attend"),  PLAIN("oproj"),
    PLAIN("route"),   PLAIN("experts"), PLAIN("head"),   PLAIN("comm"),
    {.operation = "products", .name = "avx2", .note = "of the operations above: eight sums at once",
     .is_here = has_avx2, .install = install_products},
    {.operation = "products", .name = "generic", .note = "the same bits on any processor, slowly",
     .install = install_generic_products},
    HOST_VARIANTS,
};

static const struct registry_backend cpu_backend = {
    "cpu", &ops_cpu, cpu_variants, sizeof(cpu_variants) / sizeof(cpu_variants[0]), NULL};

/* --- cuda */

#if BATON_CUDA
/* Static shared memory ends at 48 KiB, and none of these asks for more at launch. */
#define CUDA_REFERENCE(operation_)                                                          \
    {.operation = operation_, .name = "reference", .note = "the CPU's bits, not yet its GPU's speed", \
     .is_reference = true, .shared_bytes = 48 << 10}

#define CUDA_TENSOR(operation_)                                                                    \
    {.operation = #operation_, .name = "tensor",                                                   \
     .note = "FP8, MXFP4 and bfloat16 on tensor cores, within 2^-18 of the products' sizes; other " \
             "matrices by the reference's products",                                               \
     .shared_bytes = 48 << 10, .serves = tuned_tensor_serves, .install = tuned_tensor_##operation_}

#define CUDA_SCALED(operation_, layout_)                                                           \
    {.operation = #operation_, .name = "scaled",                                                   \
     .note = "FP8 and MXFP4 with FP8 inputs by block-scaled mma: sm_120a's, elsewhere an emulation " \
             "for tests; the rest as tensor" layout_,                                              \
     .is_untried = true, .shared_bytes = 48 << 10, .serves = tuned_tensor_serves, .install = tuned_scaled_##operation_}

/* Bytes moved once, with the CPU's bits: no other kernel would do it better. */
#define CUDA_PLAIN(operation_, note_) \
    {.operation = operation_, .name = "plain", .note = note_}

static const struct registry_variant cuda_variants[] = {
    CUDA_PLAIN("embed", "rows of the table, copied; the CPU's bits"),
    {.operation = "mhc", .name = "turn", .note = "from a sublayer to the next in one launch or two, within the same bound as split",
     .shared_bytes = 48 << 10, .install = tuned_turn_mhc},
    {.operation = "mhc", .name = "split", .note = "a row's channels over many blocks, within two units of bfloat16",
     .shared_bytes = 48 << 10, .install = tuned_split_mhc},
    CUDA_REFERENCE("mhc"),
    {.operation = "project", .name = "joined", .note = "as tensor; up to 16 rows with the products of the indexer's and the compressors' tensor, which it goes with, in two launches",
     .shared_bytes = 99 << 10, .serves = tuned_tensor_serves, .install = tuned_joined_project},
    CUDA_TENSOR(project), CUDA_SCALED(project, ""), CUDA_REFERENCE("project"),
    CUDA_TENSOR(compress), CUDA_REFERENCE("compress"),
    CUDA_TENSOR(indexer), CUDA_SCALED(indexer, ""), CUDA_REFERENCE("indexer"),
    {.operation = "topk", .name = "tensor", .note = "one launch, scores on tensor cores; the CPU's choice but for scores within 2^-18 of each other",
     .shared_bytes = 48 << 10, .serves = tuned_tensor_topk_serves, .install = tuned_tensor_topk},
    {.operation = "topk", .name = "scaled", .note = "the same by block-scaled mma on e2m1 as pages have it: sm_120a's, elsewhere an emulation for tests",
     .is_untried = true, .shared_bytes = 48 << 10, .serves = tuned_tensor_topk_serves, .install = tuned_scaled_topk},
    CUDA_REFERENCE("topk"),
    {.operation = "attend", .name = "tensor", .note = "one launch on tensor cores, within 2^-16 of the terms' sizes",
     .shared_bytes = 99 << 10, .serves = tuned_tensor_attend_serves, .install = tuned_tensor_attend},
    {.operation = "attend", .name = "leaves", .note = "a row's entries over many blocks, within 2^-19 of the terms' sizes",
     .shared_bytes = 48 << 10, .install = tuned_leaves_attend},
    CUDA_REFERENCE("attend"),
    CUDA_TENSOR(oproj), CUDA_SCALED(oproj, ""), CUDA_REFERENCE("oproj"),
    CUDA_TENSOR(route), CUDA_REFERENCE("route"),
    {.operation = "experts", .name = "blocks", .note = "tensor's bits; up to 4 rows in one launch, weights streamed; more as tensor",
     .shared_bytes = 99 << 10, .serves = tuned_stream_serves, .install = tuned_blocks_experts},
    CUDA_TENSOR(experts),
    {.operation = "experts", .name = "stream", .note = "tensor's bits; up to 64 rows in two launches, weights streamed",
     .shared_bytes = 48 << 10, .serves = tuned_stream_serves, .install = tuned_stream_experts},
    CUDA_SCALED(experts, "; up to 64 rows in two launches as stream; MXFP4 is packed by four scale groups then"),
    CUDA_REFERENCE("experts"),
    CUDA_TENSOR(head), CUDA_REFERENCE("head"),
    {.operation = "products", .name = "tiles", .note = "of the operations' `tensor`: calls of 64 rows and more by 128 outputs of 64 rows a block; the same bits",
     .shared_bytes = 99 << 10, .serves = tuned_tensor_serves, .install = tuned_tiles_products},
    CUDA_PLAIN("products", "of the operations' `tensor`: every call by 32 outputs a block"),
    {.operation = "comm", .name = "push", .note = "up to 64 rows in one launch from GPU to GPU, more as below; the CPU's bits",
     .is_untried = true, .serves = tuned_push_serves, .install = tuned_push_comm},
    CUDA_PLAIN("comm", "one pass over the parts, which NCCL gathers from several GPUs, in rank order; the CPU's bits"),
    {.operation = "sample", .name = "device", .note = "ids that need nothing but logits, by the host's arithmetic: its tokens; the rest on the host",
     .shared_bytes = 48 << 10, .serves = tuned_device_sample_serves, .install = tuned_device_sample},
    HOST_VARIANTS,
};

static const struct registry_backend cuda_backend = {
    "cuda", &ops_cuda, cuda_variants, sizeof(cuda_variants) / sizeof(cuda_variants[0]), tuned_finish};
#endif
/* clang-format on */

/* --- from a device text */

/* "cuda:N" or "cuda:N,N,...": fills devices_i, n_devices and n_cards. */
static enum status parse_cuda(const char *device, struct registry_choice *choice, struct error *err)
{
    const char *at = device + 4; /* ':', then ',' */
    choice->n_devices = choice->n_cards = 0;
    while (*at == (choice->n_devices ? ',' : ':') && at[1] >= '0' && at[1] <= '9' &&
           choice->n_devices < MAX_GROUP) {
        char *end;
        unsigned long i = strtoul(at + 1, &end, 10);
        if (i >= MAX_DEVICE) {
            break;
        }
        bool is_new = true;
        for (uint32_t k = 0; k < choice->n_devices; k++) {
            is_new = is_new && choice->devices_i[k] != i;
        }
        choice->n_cards += is_new;
        choice->devices_i[choice->n_devices++] = (uint32_t)i;
        at = end;
    }
    if (*at || choice->n_devices == 0) {
        return error_set(err, STATUS_INVALID,
                         "device '%s' is not understood: cuda:N is GPU N of this host, from 0, and "
                         "cuda:N,N,... a group of up to %d",
                         device, MAX_GROUP);
    }
    if (choice->n_cards != 1 && choice->n_cards != choice->n_devices) {
        return error_set(err, STATUS_INVALID,
                         "device '%s': the GPUs of a group are all different or, to try a group "
                         "out, all the same",
                         device);
    }
    return STATUS_OK;
}

#if BATON_CUDA
/* Every GPU of the list can be used, and they are alike. */
static enum status probe_cuda(const char *device, struct registry_choice *choice, struct error *err)
{
    struct registry_device *found = &choice->device;
    enum status status = STATUS_OK;
    for (uint32_t k = 0; k < choice->n_devices && !status; k++) {
        uint32_t arch = 0, i = choice->devices_i[k];
        size_t shared_bytes = 0, free_bytes = 0;
        status = device_probe(i, err);
        if (!status) {
            status = device_shape(i, &arch, &shared_bytes, &free_bytes, err);
        }
        if (!status && k > 0 && (arch != found->arch || shared_bytes != found->shared_bytes)) {
            status = error_set(err, STATUS_UNSUPPORTED,
                               "device '%s': the GPUs of a group must be of one kind, and cuda:%u "
                               "is sm_%u, cuda:%u sm_%u",
                               device, choice->devices_i[0], found->arch, i, arch);
        }
        found->arch = arch;
        found->shared_bytes = shared_bytes;
        if (k == 0 || free_bytes < found->free_bytes) {
            found->free_bytes = free_bytes;
        }
    }
    return !status && choice->n_cards > 1 ? device_find_nccl(NULL, err) : status;
}
#endif

static enum status find_cuda(const char *device, struct registry_choice *ret_choice,
                             struct error *err)
{
    struct registry_choice choice = {0};
    enum status status = parse_cuda(device, &choice, err);
    if (status) {
        return status;
    }
#if BATON_CUDA
    choice.backend = &cuda_backend;
    choice.ops = &ops_cuda;
    choice.n_ranks = choice.n_devices;
    choice.apart = ops_cuda.own_memory;
    choice.device.has_memory = true;
    status = probe_cuda(device, &choice, err);
    if (!status) {
        snprintf(choice.device.text, sizeof(choice.device.text), "%.48s (sm_%u)", device,
                 choice.device.arch);
        *ret_choice = choice;
    }
    return status;
#else
    return error_set(err, STATUS_UNSUPPORTED,
                     "device '%s': this build has no CUDA kernels; it was made without nvcc, see "
                     "the build option gpu",
                     device);
#endif
}

static void find_cpu(const char *device, uint32_t n_devices, struct registry_choice *ret_choice)
{
    *ret_choice = (struct registry_choice){.backend = &cpu_backend,
                                           .ops = &ops_cpu,
                                           .n_devices = n_devices,
                                           .n_ranks = n_devices,
                                           .apart = ops_cpu.own_memory};
    snprintf(ret_choice->device.text, sizeof(ret_choice->device.text), "%s", device);
}

enum status registry_find(const char *device, struct registry_choice *ret_choice, struct error *err)
{
    if (strcmp(device, "cpu") == 0) {
        find_cpu(device, 1, ret_choice);
        return STATUS_OK;
    }
    if (strncmp(device, "cpu:", 4) == 0) {
        char *end;
        unsigned long n = strtoul(device + 4, &end, 10);
        if (device[4] >= '1' && device[4] <= '9' && *end == '\0' && n <= MAX_GROUP) {
            find_cpu(device, (uint32_t)n, ret_choice);
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
                     "device '%s' is unknown: it is 'cpu', 'cpu:N', 'cuda:N' or 'cuda:N,N'",
                     device);
}
