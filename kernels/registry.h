/* kernels/registry.h - backends and variants: what each needs, which was chosen, why not the rest.
 *
 * There is no silent fallback: a device text names a backend, and if that one can't run here the
 * answer is an error that says what is missing. Any thread; nothing is kept.
 */
#ifndef BATON_KERNELS_REGISTRY_H
#define BATON_KERNELS_REGISTRY_H

#include <stdint.h>

#include "base/status.h"
#include "kernels/ops.h"

/* What a device text ("cpu", "cpu:2", "cuda:0,1") asks for. */
struct registry_choice {
    const struct ops *ops;
    uint32_t n_devices;
    uint32_t device_i; /* N of cuda:N, for struct ops_limits */
};

/* One variant of one operation: its state here and the reason. */
struct registry_variant {
    const char *backend, *operation, *variant;
    bool chosen;
    const char *reason; /* what it needs, and whether that is here */
};

/* Errors: INVALID (not a device text), UNSUPPORTED (a backend that this build or host lacks, with
 * what it needs). */
must_check enum status registry_find(const char *device, struct registry_choice *ret_choice,
                                     struct error *err);
/* Calls `line` for every variant known to this build, chosen or not. */
void registry_list(void (*line)(void *cookie, const struct registry_variant *variant),
                   void *cookie);

#endif
