#ifndef BATON_MODEL_SAFETENSORS_H
#define BATON_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 * The tensors of a model folder: model.safetensors, or the shards that model.safetensors.index.json
 * names. Headers are read and checked whole when it is opened: each file's tensors tile its data
 * without gap or overlap, its size is exactly what its header needs, and the index names every
 * tensor once, in the shard that has it. Files that the index does not name are not looked at.
 * Data is read by pread into the caller's memory, never mapped, so a file that is cut while the
 * process runs can't hurt it. Read-only after opening: any thread, several at once.
 */
struct safetensors;

enum { SAFETENSORS_MAX_DIMS = 8 };

enum safetensors_dtype {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_F32,
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_N_DTYPES
};

/* Owned by the checkpoint it came from. */
struct safetensors_tensor {
    const char *name;
    enum safetensors_dtype dtype;
    uint32_t n_dims; /* 0: a scalar */
    uint64_t dims[SAFETENSORS_MAX_DIMS];
    uint64_t n_elements;
    uint32_t shard_i;
    uint64_t offset; /* from the start of the file */
    uint64_t bytes;
};

/* "F8_E4M3"; and bytes of one element. */
const char *safetensors_dtype_name(enum safetensors_dtype dtype);
size_t safetensors_dtype_bytes(enum safetensors_dtype dtype);

/*
 * Opens every file and checks every header. Errors: NOT_FOUND (neither file, or a shard that the
 * index names), CORRUPT (which file, what, and for a short one how many bytes are missing),
 * UNSUPPORTED (a dtype not listed), SYSTEM, TOO_LARGE. Blocking.
 */
enum status must_check safetensors_open(const char *dir, struct safetensors **ret_st,
                                        struct error *err);

/* Closes the files; NULL is allowed. */
void safetensors_close(struct safetensors *st);

/* By name, NULL if there is none; and all of them in order of shard and offset. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *st, const char *name);
size_t safetensors_n(const struct safetensors *st);
const struct safetensors_tensor *safetensors_at(const struct safetensors *st, size_t i);

/* Shards in order of name; bytes of data in all files. */
size_t safetensors_n_shards(const struct safetensors *st);
const char *safetensors_shard_name(const struct safetensors *st, size_t shard_i);
uint64_t safetensors_data_bytes(const struct safetensors *st);

/*
 * Reads bytes bytes from offset on within the tensor; the range must lie in it (INVALID). CORRUPT
 * if the file has become shorter, with the number of bytes that are missing.
 */
enum status must_check safetensors_read(const struct safetensors *st,
                                        const struct safetensors_tensor *tensor, uint64_t offset,
                                        size_t bytes, void *ret_data, struct error *err);

/*
 * Checks one header by itself, as safetensors_open does for each file: head_bytes bytes of the
 * start of a file of file_bytes bytes, at least 8 + the header's length of them. What the fuzz
 * target calls. file names it in errors. ret_n_tensors may be NULL.
 */
enum status must_check safetensors_check_header(const char *file, const void *head,
                                                size_t head_bytes, uint64_t file_bytes,
                                                size_t *ret_n_tensors, struct error *err);

#endif
