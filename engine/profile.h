/* engine/profile.h - where the time of a decode step goes, operation by operation.
 *
 * Every entry of the kernel table is timed as the engine calls it, on the device's own clock where
 * it has one, and held against three floors that are measured in the same run: reading the bytes
 * that the operation can't do without (weights, and cache entries of the rows' sequences), its
 * multiply-adds at the rate of a product that stays in cache, and its launches. The floor that
 * explains most of the time names the bound; if none explains a quarter of it, the operation waits
 * for itself: latency.
 *
 * One profile at a time in a process; blocking.
 */
#ifndef BATON_ENGINE_PROFILE_H
#define BATON_ENGINE_PROFILE_H

#include <stdint.h>
#include <stdio.h>

#include "base/status.h"

struct engine_options;
struct json_writer;
struct ops;

enum { ENGINE_PROFILE_MAX_LINES = 16 };

struct engine_profile_line {
    const char *operation;
    const char *bound;   /* "launches", "bandwidth", "tensor" (multiply-adds), "latency" */
    double launches;     /* of kernels a step; of a host, calls */
    double us;           /* a step */
    double share;        /* of the step */
    double bytes;        /* a step */
    double byte_share;   /* of the floor: time to read the bytes / time; above 1 from a cache */
    double tensor_share; /* the same of its multiply-adds */
};

struct engine_profile {
    char device[64], model[64];
    uint32_t batch, context, n_steps;
    double step_us;  /* mean of the n_steps */
    double other_us; /* of that, outside the operations: the batch, draws, the graph's own code */
    double bytes;    /* of all operations */
    /* Where steps are recorded (engine/graphs.h): a step without marks between its operations, and
     * by its recording, which is one launch of so many kernels. 0: they are not. */
    double whole_us, graph_us;
    uint32_t graph_kernels;
    double read_bytes_per_s, multiply_adds_per_s, launch_us;
    uint32_t n_lines; /* longest first */
    struct engine_profile_line lines[ENGINE_PROFILE_MAX_LINES];
};

struct engine_profile_request {
    uint32_t batch;                   /* rows of the step */
    uint32_t context;                 /* tokens that each row's sequence holds */
    void (*alter)(struct ops *table); /* for tests: changes the table before it is timed; or NULL */
};

/* "BATCH,CONTEXT". INVALID. */
must_check enum status engine_profile_parse(const char *text,
                                            struct engine_profile_request *ret_request,
                                            struct error *err);
/* Opens an engine of its own with room for the request: of the options, max_sequences, n_pages,
 * max_batch_rows and, if it is too short, max_context_tokens are replaced. The sequences hold the
 * KV of random tokens. Errors: UNSUPPORTED (the sim engine; a backend that can't be timed), those
 * of engine_memory_check and engine_open. */
must_check enum status engine_profile_run(const struct engine_options *options,
                                          const struct engine_profile_request *request,
                                          struct engine_profile *ret_profile, struct error *err);
void engine_profile_print(const struct engine_profile *profile, FILE *out);
/* One object. */
void engine_profile_json(const struct engine_profile *profile, struct json_writer *w);

/* For model_load.c: while a profile runs, the table becomes one that times. UNSUPPORTED. */
must_check enum status engine_profile_wrap(struct ops *table, struct error *err);

#endif
