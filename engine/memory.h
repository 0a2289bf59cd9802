/* engine/memory.h - the memory of a start, summed before anything is allocated.
 *
 * A plan is a list of items: what the engine will take, to which a daemon adds its own (landing
 * slots, send buffers). It is made from config.json, the headers of the checkpoint's files and the
 * backend's own sizes, so it is what will be taken, not an estimate: tests hold it to what an
 * engine then has allocated. But for the graphs of a GPU's decode steps, of which only a driver
 * knows what they take: they stand there with an allowance. Plain data; any thread.
 */
#ifndef BATON_ENGINE_MEMORY_H
#define BATON_ENGINE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct engine_options;

enum { ENGINE_MEMORY_MAX_ITEMS = 16 };

struct engine_memory_item {
    const char *name;   /* static: "weights" */
    const char *option; /* static: the option that gives n, "--pages"; NULL: none does */
    uint64_t n;         /* how many ... */
    uint64_t least;     /* ... of which the option can leave so many ... */
    uint64_t each;      /* ... of how many bytes */
    bool on_device;     /* in the memory of a GPU, not of the host */
};

struct engine_memory {
    struct engine_memory_item items[ENGINE_MEMORY_MAX_ITEMS];
    uint32_t n_items;
    size_t page_bytes, tail_bytes; /* of one page, and of the largest tail: as in engine_info */
    char device[64];               /* "cpu", "cuda:0 (sm_90)" */
    uint64_t device_free_bytes;    /* of a GPU; 0 without */
};

/* What engine_open would take with these options. Errors: those of engine_open that need no
 * memory (device, config, checkpoint). Blocking: reads the headers of the checkpoint. */
must_check enum status engine_memory_plan(const struct engine_options *options,
                                          struct engine_memory *ret_memory, struct error *err);
/* At least one of them, if an option counts them. */
void engine_memory_add(struct engine_memory *memory, const char *name, const char *option,
                       uint64_t n, uint64_t each, bool on_device);
/* Of the host, or of the device. Never wraps: at most UINT64_MAX. */
uint64_t engine_memory_sum(const struct engine_memory *memory, bool on_device);
/* EXHAUSTED if the device's sum is above device_free_bytes, or the host's above `host_bytes`, which
 * `limit` names: one line that says what is needed and there, by how much it is too much, and which
 * options with which values would make it fit, if any do. */
must_check enum status engine_memory_check(const struct engine_memory *memory, uint64_t host_bytes,
                                           const char *limit, struct error *err);

#endif
