#ifndef BATON_MODEL_WEIGHTS_FILE_H
#define BATON_MODEL_WEIGHTS_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/config.h"
#include "model/safetensors.h"
#include "model/synthetic.h"
#include "model/weights.h"

/*
 * Between weights.c, which knows names and shapes, and weights_load.c, which knows values. Nobody
 * else includes this.
 */

enum weights_task_kind {
    WEIGHTS_TASK_BYTES,      /* as the file has them, checked by dtype */
    WEIGHTS_TASK_FLOATS,     /* F32 or BF16, widened to float */
    WEIGHTS_TASK_EXPERT_IDS, /* I64, narrowed to uint16_t, checked against the config */
};

struct weights_task {
    enum weights_task_kind kind;
    const struct safetensors_tensor *tensor;
    size_t bytes;  /* in memory */
    size_t offset; /* in the group's slab */
    void *slot;    /* address of the data pointer to set */
};

/* What is loaded and released together. */
struct weights_group {
    struct weights_task *tasks;
    size_t n_tasks, capacity;
    size_t bytes;  /* of the slab */
    uint8_t *slab; /* NULL: not loaded */
};

struct weights_file {
    struct safetensors *st;
    struct synthetic *synthetic; /* in place of files, or NULL */
    bool only_small;             /* then: without the bytes of matrices */
    struct model_config config;
    struct weights_group *groups; /* one a layer, then that of the globals */
    uint32_t n_groups;
};

/* slot: address of a `const T *`, set to NULL until the group is loaded. */
void weights_group_add(struct weights_group *group, enum weights_task_kind kind,
                       const struct safetensors_tensor *tensor, size_t bytes, void *slot);
void weights_group_release(struct weights *weights, struct weights_group *group);

enum status must_check weights_identity(const struct weights_file *file, uint8_t ret_identity[16],
                                        struct error *err);

#endif
