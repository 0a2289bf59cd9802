/* kernels/registry.h - backends and variants: what each needs, which is chosen, why not the rest.
 *
 * There is no silent fallback. A device text names a backend, and if that one can't run here the
 * answer is an error that says what is missing. An operation has one or more variants, best first;
 * each states the architecture, the shared memory, the cache layout and the shapes it serves. The
 * first that serves is chosen, unless one is asked for by name.
 *
 * A *reference* variant is there to be compared with, not to serve from: it is right and slow, and
 * is chosen only where its operation was allowed by name. Of CUDA's operations topk has nothing
 * else yet, nor have products in exact arithmetic. On the CPU nothing is one: who says `--device
 * cpu` has named the backend that the others are compared with, and each of its operations has one
 * variant, `plain`.
 *
 * What is asked for by name (struct registry_wishes) belongs to the process, like the instruction
 * set that the products use: it is set once at start, before any device is opened.
 *
 * To add a variant: a row in its backend's table, above those it is better than.
 */
#ifndef BATON_KERNELS_REGISTRY_H
#define BATON_KERNELS_REGISTRY_H

#include <stdint.h>

#include "base/status.h"
#include "kernels/ops.h"

enum { REGISTRY_N_OPERATIONS = 15, REGISTRY_NAME_BYTES = 24, REGISTRY_MAX_GROUP = 16 };

/* The operations by name, those of struct ops first; then what runs on the host beside a device:
 * "products" (of the CPU backend), "sample", which a GPU may do too, "parcel". */
extern const char *const registry_operations[REGISTRY_N_OPERATIONS];

/* A device, as far as the needs of variants go. */
struct registry_device {
    char text[64];       /* "cuda:0 (sm_90)" */
    uint32_t arch;       /* 90 for sm_90; 0: none */
    size_t shared_bytes; /* most that a block can have */
    bool has_memory;     /* its own, beside the host's; ... */
    size_t free_bytes;   /* ... of which so much was free when it was looked for: of a group, on
                            the device that had least */
};

/* One variant of one operation. Static. */
struct registry_variant {
    const char *operation, *name;
    const char *note; /* what it is, for the list */
    bool is_reference;
    bool is_untried; /* it ran emulated alone: serves where --kernel asks for it, never by itself */
    const uint32_t *archs; /* 0 at the end; NULL: any that the build has code for */
    size_t shared_bytes;   /* most that a block takes */
    unsigned layouts;      /* REGISTRY_LAYOUT of each entry kind it serves; 0: all */
    /* Whether this host has what it needs; on false `why` says what is missing. NULL: it has. */
    bool (*is_here)(struct error *why);
    /* Whether it serves these shapes; on false `why` says which it does. NULL: all. */
    bool (*serves)(const struct ops_dims *dims, const struct ops_limits *limits, struct error *why);
    /* Puts its functions into the table. NULL: they are there. */
    void (*install)(struct ops *table);
};
#define REGISTRY_LAYOUT(entry_kind) (1u << (entry_kind))

struct registry_backend {
    const char *name;
    const struct ops *ops;
    const struct registry_variant *variants; /* of an operation: best first */
    size_t n_variants;
    /* Once variants are installed: takes back what goes with some and not with others. NULL:
     * nothing. */
    void (*finish)(struct ops *table);
};

/* What a device text ("cpu", "cpu:2", "cuda:0", "cuda:0,1") asks for. */
struct registry_choice {
    const struct registry_backend *backend;
    const struct ops *ops; /* the backend's, as it is without a choice among variants */
    uint32_t n_devices;
    uint32_t devices_i[REGISTRY_MAX_GROUP]; /* each N of cuda:N,N, for struct ops_limits */
    uint32_t n_cards; /* GPUs that the devices are on: 1, or as many as devices; 0: the host */
    /* The devices are ranks rank_first .. of a group of n_ranks: all of it, 0 .. n_devices, but
     * where a rank runs alone (engine/model_load.h). */
    uint32_t rank_first, n_ranks;
    bool apart; /* each device has memory of its own, which the others and the host don't use */
    struct registry_device device;
};

/* What was asked for by name. All zero: nothing. */
struct registry_wishes {
    char forced[REGISTRY_N_OPERATIONS][REGISTRY_NAME_BYTES]; /* the variant, or "" */
    bool allowed[REGISTRY_N_OPERATIONS];                     /* the reference may serve */
};

/* One line of the list. */
struct registry_line {
    const char *operation, *variant;
    bool is_chosen, is_reference;
    const char *reason; /* why it was chosen, or was not */
};
typedef void (*registry_line_fn)(void *cookie, const struct registry_line *line);

/* Errors: INVALID (not a device text), UNSUPPORTED (a backend that this build or host lacks, with
 * what it needs). */
must_check enum status registry_find(const char *device, struct registry_choice *ret_choice,
                                     struct error *err);

/* forced: "OPERATION=VARIANT" each; allowed: "OPERATION", "OPERATION,OPERATION" or "all" each.
 * INVALID: an operation that is none, or forced twice. Whether a device has the variant is asked
 * by registry_select. */
must_check enum status registry_wishes_parse(char *const *forced, size_t n_forced,
                                             char *const *allowed, size_t n_allowed,
                                             struct registry_wishes *ret_wishes, struct error *err);
/* From now on in this process; copied. Before a device is opened. */
void registry_wishes_set(const struct registry_wishes *wishes);
const struct registry_wishes *registry_wishes_now(void);

/* What is chosen from. */
struct registry_query {
    const struct registry_backend *backend;
    const struct registry_device *device;
    const struct registry_wishes *wishes;
    enum formats_entry_kind layout;
    const struct ops_dims *dims; /* NULL: no model is known, so shapes are not asked for */
    const struct ops_limits *limits;
};

/* Chooses a variant of every operation and gives the table of them (ret_table may be NULL: only to
 * know). `line` (may be NULL) is called for each variant, chosen or not, also when there will be an
 * error. UNSUPPORTED: an operation that nothing serves, or only a reference that was not allowed;
 * INVALID: a variant asked for by name that is none or does not serve here. One line with the
 * reason and what to do. */
must_check enum status registry_select(const struct registry_query *query, struct ops *ret_table,
                                       registry_line_fn line, void *cookie, struct error *err);

#endif
