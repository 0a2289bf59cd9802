/*
 * Reading safetensors files that anyone may have made or half downloaded. A file is 8 bytes of
 * little-endian length, so many bytes of JSON, and the data. The one invariant: once a checkpoint
 * is open, every tensor's byte range lies in a regular file that was of exactly the right size, no
 * two ranges overlap, no byte belongs to no tensor, and every name is there once. So a shard cut
 * short, a Git LFS pointer, and an index that disagrees with its shards are all found at start and
 * by name, and never as strange text from a model that runs.
 *
 * What the index does not name is ignored: folders collect stray files.
 */
#include "model/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/hmap.h"
#include "base/json.h"
#include "base/mem.h"

/* The format's own cap on a header, and bounds that real checkpoints (135,235 tensors in about 50
 * shards) are far from. Shards stay open while the weights load, so they count against the limit
 * of open files. */
#define MAX_HEADER_BYTES ((uint64_t)100 * 1000 * 1000)
#define MAX_TENSORS ((size_t)1 << 20)
#define MAX_SHARDS 512
#define MAX_NAME_BYTES 1024
#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define LFS_MARK "version https://git-lfs"

struct shard {
    char *name;
    int fd;
    uint64_t file_bytes;
};

struct tensor_list {
    struct safetensors_tensor *items;
    size_t n, capacity;
    struct arena *names;
};

struct safetensors {
    char *dir;
    int dir_fd;
    struct shard *shards;
    size_t n_shards;
    struct tensor_list tensors;
    struct hmap *by_name;
    uint64_t data_bytes;
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[SAFETENSORS_N_DTYPES] = {
    [SAFETENSORS_BOOL] = {"BOOL", 1},       [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_I8] = {"I8", 1},           [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1}, [SAFETENSORS_F8_E8M0] = {"F8_E8M0", 1},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_I16] = {"I16", 2},
    [SAFETENSORS_F16] = {"F16", 2},         [SAFETENSORS_BF16] = {"BF16", 2},
    [SAFETENSORS_U32] = {"U32", 4},         [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_F32] = {"F32", 4},         [SAFETENSORS_U64] = {"U64", 8},
    [SAFETENSORS_I64] = {"I64", 8},         [SAFETENSORS_F64] = {"F64", 8},
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype)
{
    return (unsigned)dtype < SAFETENSORS_N_DTYPES ? dtypes[dtype].name : "unknown";
}

size_t safetensors_dtype_bytes(enum safetensors_dtype dtype)
{
    return (unsigned)dtype < SAFETENSORS_N_DTYPES ? dtypes[dtype].bytes : 0;
}

/* --- one header --- */

static struct safetensors_tensor *tensor_list_add(struct tensor_list *list)
{
    if (list->n == list->capacity) {
        list->capacity = list->capacity ? list->capacity * 2 : 256;
        list->items = mem_realloc_array(list->items, list->capacity, sizeof(*list->items));
    }
    struct safetensors_tensor *tensor = &list->items[list->n++];
    memset(tensor, 0, sizeof(*tensor));
    return tensor;
}

static enum status tensor_parse_dtype(const char *file, const struct json *value,
                                      struct safetensors_tensor *tensor, struct error *err)
{
    const char *text = json_text(value, NULL);
    if (!text) {
        return error_set(err, STATUS_CORRUPT, "%s: %.120s has no dtype", file, tensor->name);
    }
    for (unsigned i = 0; i < SAFETENSORS_N_DTYPES; i++) {
        if (strcmp(text, dtypes[i].name) == 0) {
            tensor->dtype = i;
            return STATUS_OK;
        }
    }
    return error_set(err, STATUS_UNSUPPORTED, "%s: %.120s has the unknown dtype %.40s", file,
                     tensor->name, text);
}

static enum status tensor_parse_shape(const char *file, const struct json *value,
                                      struct safetensors_tensor *tensor, struct error *err)
{
    size_t n_dims = json_array_n(value);
    if (json_kind_of(value) != JSON_KIND_ARRAY || n_dims > SAFETENSORS_MAX_DIMS) {
        return error_set(err, STATUS_CORRUPT,
                         "%s: %.120s needs a shape, a list of at most %d numbers", file,
                         tensor->name, SAFETENSORS_MAX_DIMS);
    }
    size_t n_elements = 1;
    for (size_t i = 0; i < n_dims; i++) {
        int64_t dim;
        if (!json_int(json_array_at(value, i), &dim) || dim < 0 ||
            !size_mul(n_elements, (size_t)dim, &n_elements)) {
            return error_set(err, STATUS_CORRUPT,
                             "%s: dimension %zu of %.120s is not a size, or too large", file, i,
                             tensor->name);
        }
        tensor->dims[i] = (uint64_t)dim;
    }
    tensor->n_dims = (uint32_t)n_dims;
    tensor->n_elements = n_elements;
    return STATUS_OK;
}

/* Sets offset relative to the start of the data. */
static enum status tensor_parse_offsets(const char *file, const struct json *value,
                                        struct safetensors_tensor *tensor, struct error *err)
{
    int64_t begin, end;
    if (json_array_n(value) != 2 || !json_int(json_array_at(value, 0), &begin) ||
        !json_int(json_array_at(value, 1), &end) || begin < 0 || end < begin) {
        return error_set(err, STATUS_CORRUPT,
                         "%s: %.120s needs data_offsets, two numbers in rising order", file,
                         tensor->name);
    }
    size_t bytes;
    if (!size_mul(tensor->n_elements, safetensors_dtype_bytes(tensor->dtype), &bytes) ||
        bytes != (uint64_t)(end - begin)) {
        return error_set(err, STATUS_CORRUPT,
                         "%s: %.120s is %lld bytes, which its shape and dtype %s contradict", file,
                         tensor->name, (long long)(end - begin),
                         safetensors_dtype_name(tensor->dtype));
    }
    tensor->offset = (uint64_t)begin;
    tensor->bytes = bytes;
    return STATUS_OK;
}

static enum status tensor_parse(const char *file, const struct json_iter *it,
                                struct tensor_list *list, uint32_t shard_i, struct error *err)
{
    if (it->key_bytes == 0 || it->key_bytes > MAX_NAME_BYTES) {
        return error_set(err, STATUS_CORRUPT, "%s: a tensor's name is empty or over %d bytes", file,
                         MAX_NAME_BYTES);
    }
    if (list->n >= MAX_TENSORS) {
        return error_set(err, STATUS_TOO_LARGE, "%s: more than %zu tensors", file, MAX_TENSORS);
    }
    struct safetensors_tensor *tensor = tensor_list_add(list);
    tensor->name = arena_strndup(list->names, it->key, it->key_bytes);
    tensor->shard_i = shard_i;
    if (json_kind_of(it->value) != JSON_KIND_OBJECT || json_object_n(it->value) != 3) {
        return error_set(err, STATUS_CORRUPT,
                         "%s: %.120s must be an object of exactly dtype, shape and data_offsets",
                         file, tensor->name);
    }
    enum status status = tensor_parse_dtype(file, json_get(it->value, "dtype"), tensor, err);
    if (status == STATUS_OK) {
        status = tensor_parse_shape(file, json_get(it->value, "shape"), tensor, err);
    }
    if (status == STATUS_OK) {
        status = tensor_parse_offsets(file, json_get(it->value, "data_offsets"), tensor, err);
    }
    return status;
}

static int by_offset(const void *a, const void *b)
{
    const struct safetensors_tensor *x = a, *y = b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Sorts this file's tensors and makes sure that they are all of its data and nothing else. */
static enum status check_tiling(const char *file, struct safetensors_tensor *tensors, size_t n,
                                uint64_t data_start, uint64_t file_bytes, struct error *err)
{
    if (n > 0) { /* of none there is no array */
        qsort(tensors, n, sizeof(*tensors), by_offset);
    }
    uint64_t cursor = 0;
    for (size_t i = 0; i < n; i++) {
        if (tensors[i].offset != cursor) {
            return error_set(err, STATUS_CORRUPT, "%s: %s %.120s, at byte %llu of the data", file,
                             tensors[i].offset > cursor ? "nothing fills the gap before"
                                                        : "another tensor overlaps",
                             tensors[i].name, (unsigned long long)tensors[i].offset);
        }
        cursor += tensors[i].bytes; /* both below 2^63 */
        tensors[i].offset += data_start;
    }
    uint64_t data_bytes = file_bytes - data_start;
    if (cursor > data_bytes) {
        return error_set(err, STATUS_CORRUPT,
                         "%s is %llu bytes short: it has %llu bytes and its header needs %llu; "
                         "download it again",
                         file, (unsigned long long)(cursor - data_bytes),
                         (unsigned long long)file_bytes, (unsigned long long)(data_start + cursor));
    }
    if (cursor < data_bytes) {
        return error_set(err, STATUS_CORRUPT,
                         "%s has %llu bytes beyond its last tensor: it has %llu bytes and its "
                         "header accounts for %llu",
                         file, (unsigned long long)(data_bytes - cursor),
                         (unsigned long long)file_bytes, (unsigned long long)(data_start + cursor));
    }
    return STATUS_OK;
}

static enum status check_metadata(const char *file, const struct json *value, struct error *err)
{
    bool good = json_kind_of(value) == JSON_KIND_OBJECT;
    struct json_iter it = json_iterate(value);
    while (good && json_iterate_next(&it)) {
        good = json_kind_of(it.value) == JSON_KIND_STRING;
    }
    if (!good) {
        return error_set(err, STATUS_CORRUPT, "%s: __metadata__ must be an object of strings",
                         file);
    }
    return STATUS_OK;
}

/* json: json_bytes bytes after the length. Appends the file's tensors to list. */
static enum status header_parse(const char *file, const void *json, size_t json_bytes,
                                uint64_t file_bytes, uint32_t shard_i, struct tensor_list *list,
                                struct error *err)
{
    const struct json_limits limits = {.max_bytes = MAX_HEADER_BYTES, .max_depth = 8};
    struct json *root;
    struct error why;
    size_t first = list->n;

    enum status status = json_parse(json, json_bytes, &limits, &root, &why);
    if (status != STATUS_OK) {
        return error_set(err, STATUS_CORRUPT, "%s: header: %s", file, why.text);
    }
    if (json_kind_of(root) != JSON_KIND_OBJECT) {
        status = error_set(err, STATUS_CORRUPT, "%s: the header is not an object", file);
    }
    struct json_iter it = json_iterate(root);
    while (status == STATUS_OK && json_iterate_next(&it)) {
        if (it.key_bytes == 12 && memcmp(it.key, "__metadata__", 12) == 0) {
            status = check_metadata(file, it.value, err);
        } else {
            status = tensor_parse(file, &it, list, shard_i, err);
        }
    }
    if (status == STATUS_OK) {
        status = check_tiling(file, list->n > first ? list->items + first : NULL, list->n - first,
                              8 + json_bytes, file_bytes, err);
    }
    json_free(root);
    return status;
}

/* What the first bytes say: the length of the JSON, once it is known to be in the file. */
static enum status head_check(const char *file, const uint8_t *head, size_t head_bytes,
                              uint64_t file_bytes, uint64_t *ret_json_bytes, struct error *err)
{
    if (head_bytes >= strlen(LFS_MARK) && memcmp(head, LFS_MARK, strlen(LFS_MARK)) == 0) {
        return error_set(err, STATUS_CORRUPT,
                         "%s is a Git LFS pointer and not the file itself: run `git lfs pull`",
                         file);
    }
    if (head_bytes < 8 || file_bytes < 8) {
        return error_set(err, STATUS_CORRUPT,
                         "%s is at least %llu bytes short: it has %llu bytes; download it again",
                         file, (unsigned long long)(8 - (file_bytes < 8 ? file_bytes : 0)),
                         (unsigned long long)file_bytes);
    }
    uint64_t json_bytes = get_le64(head);
    if (json_bytes == 0 || json_bytes > MAX_HEADER_BYTES) {
        return error_set(err, STATUS_CORRUPT,
                         "%s is not a safetensors file: its header would be %llu bytes (1 to %llu "
                         "allowed)",
                         file, (unsigned long long)json_bytes,
                         (unsigned long long)MAX_HEADER_BYTES);
    }
    if (json_bytes > file_bytes - 8) {
        return error_set(err, STATUS_CORRUPT,
                         "%s is at least %llu bytes short: it has %llu bytes and ends inside its "
                         "header; download it again",
                         file, (unsigned long long)(json_bytes - (file_bytes - 8)),
                         (unsigned long long)file_bytes);
    }
    *ret_json_bytes = json_bytes;
    return STATUS_OK;
}

enum status safetensors_check_header(const char *file, const void *head, size_t head_bytes,
                                     uint64_t file_bytes, size_t *ret_n_tensors, struct error *err)
{
    uint64_t json_bytes = 0;
    enum status status = head_check(file, head, head_bytes, file_bytes, &json_bytes, err);
    if (status != STATUS_OK) {
        return status;
    }
    if (json_bytes > head_bytes - 8) {
        return error_set(err, STATUS_INVALID, "%s: only %zu bytes of the header were given", file,
                         head_bytes);
    }
    struct tensor_list list = {.names = arena_create(0)};
    status = header_parse(file, (const uint8_t *)head + 8, json_bytes, file_bytes, 0, &list, err);
    if (status == STATUS_OK && ret_n_tensors) {
        *ret_n_tensors = list.n;
    }
    mem_free(list.items);
    arena_free(list.names);
    return status;
}

/* --- files --- */

/* Reads exactly bytes bytes; CORRUPT at the end of the file. */
static enum status read_exact(const struct shard *shard, uint64_t offset, size_t bytes, void *data,
                              struct error *err)
{
    uint8_t *to = data;
    size_t done = 0;
    while (done < bytes) {
        size_t piece = bytes - done < ((size_t)1 << 30) ? bytes - done : (size_t)1 << 30;
        ssize_t n = pread(shard->fd, to + done, piece, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return error_set(err, STATUS_SYSTEM, "%s: reading %zu bytes at %llu: %m", shard->name,
                             piece, (unsigned long long)(offset + done));
        }
        if (n == 0) {
            struct stat st;
            uint64_t now = fstat(shard->fd, &st) == 0 ? (uint64_t)st.st_size : 0;
            return error_set(
                err, STATUS_CORRUPT,
                "%s was cut while it was read: it had %llu bytes and is now %llu bytes "
                "short",
                shard->name, (unsigned long long)shard->file_bytes,
                (unsigned long long)(shard->file_bytes > now ? shard->file_bytes - now : 0));
        }
        done += (size_t)n;
    }
    return STATUS_OK;
}

/* why: "" or a few words on who names the file. */
static enum status shard_open(const struct safetensors *st, struct shard *shard, const char *why,
                              struct error *err)
{
    /* O_NONBLOCK, for a FIFO or a device must neither block nor be set off by being opened. */
    int fd = openat(st->dir_fd, shard->name, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        return error_set(err, errno == ENOENT ? STATUS_NOT_FOUND : STATUS_SYSTEM, "%s/%s%s: %m",
                         st->dir, shard->name, why);
    }
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        close(fd);
        return error_set(err, STATUS_CORRUPT, "%s/%s is not a regular file", st->dir, shard->name);
    }
    shard->fd = fd;
    shard->file_bytes = (uint64_t)info.st_size;
    return STATUS_OK;
}

static enum status shard_read_header(struct safetensors *st, uint32_t shard_i, struct error *err)
{
    const struct shard *shard = &st->shards[shard_i];
    uint8_t head[64];
    size_t head_bytes = shard->file_bytes < sizeof(head) ? shard->file_bytes : sizeof(head);
    uint64_t json_bytes = 0;

    enum status status = read_exact(shard, 0, head_bytes, head, err);
    if (status == STATUS_OK) {
        status = head_check(shard->name, head, head_bytes, shard->file_bytes, &json_bytes, err);
    }
    if (status != STATUS_OK) {
        return status;
    }
    void *json = mem_try_alloc(json_bytes);
    if (!json) {
        return error_set(err, STATUS_EXHAUSTED, "%s: no memory for a header of %llu bytes",
                         shard->name, (unsigned long long)json_bytes);
    }
    status = read_exact(shard, 8, json_bytes, json, err);
    if (status == STATUS_OK) {
        status = header_parse(shard->name, json, json_bytes, shard->file_bytes, shard_i,
                              &st->tensors, err);
    }
    mem_free(json);
    return status;
}

/* --- the index --- */

static bool is_plain_name(const char *name, size_t bytes)
{
    return bytes > 0 && bytes <= 255 && name[0] != '.' && !memchr(name, '/', bytes) &&
           !memchr(name, 0, bytes);
}

static int by_shard_name(const void *a, const void *b)
{
    return strcmp(((const struct shard *)a)->name, ((const struct shard *)b)->name);
}

/* Fills in st->shards from weight_map. */
static enum status index_list_shards(struct safetensors *st, const struct json *weight_map,
                                     struct error *err)
{
    enum status status = STATUS_OK;
    struct hmap *seen = hmap_create();
    struct json_iter it = json_iterate(weight_map);
    st->shards = mem_array(MAX_SHARDS, sizeof(*st->shards));
    while (status == STATUS_OK && json_iterate_next(&it)) {
        size_t bytes = 0;
        const char *name = json_text(it.value, &bytes);
        if (!name || !is_plain_name(name, bytes)) {
            status = error_set(err, STATUS_CORRUPT,
                               INDEX_NAME ": %.120s is said to be in \"%.120s\", which is not the "
                                          "name of a file in this folder",
                               it.key, name ? name : "(not a string)");
        } else if (!hmap_get(seen, name, bytes)) {
            if (st->n_shards == MAX_SHARDS) {
                status = error_set(err, STATUS_TOO_LARGE, INDEX_NAME " names over %d shards",
                                   MAX_SHARDS);
                break;
            }
            struct shard *shard = &st->shards[st->n_shards++];
            shard->name = mem_strndup(name, bytes);
            shard->fd = -1;
            hmap_put(seen, name, bytes, st);
        }
    }
    hmap_free(seen);
    qsort(st->shards, st->n_shards, sizeof(*st->shards), by_shard_name);
    return status;
}

/* Both ways: what the index says is so, and nothing that a shard holds was left out. */
static enum status index_check(const struct safetensors *st, const struct json *weight_map,
                               struct error *err)
{
    struct json_iter it = json_iterate(weight_map);
    while (json_iterate_next(&it)) {
        const char *said = json_text(it.value, NULL);
        const struct safetensors_tensor *tensor = hmap_get(st->by_name, it.key, it.key_bytes);
        if (!tensor) {
            return error_set(err, STATUS_CORRUPT,
                             INDEX_NAME " says that %.120s is in %.120s, but neither this nor any "
                                        "other shard has it",
                             it.key, said);
        }
        if (strcmp(said, st->shards[tensor->shard_i].name) != 0) {
            return error_set(err, STATUS_CORRUPT,
                             INDEX_NAME " says that %.120s is in %.120s, but it is in %.120s",
                             it.key, said, st->shards[tensor->shard_i].name);
        }
    }
    for (size_t i = 0; i < st->tensors.n; i++) {
        const struct safetensors_tensor *tensor = &st->tensors.items[i];
        if (!json_get(weight_map, tensor->name)) {
            return error_set(err, STATUS_CORRUPT, INDEX_NAME " leaves out %.120s, which %.120s has",
                             tensor->name, st->shards[tensor->shard_i].name);
        }
    }
    return STATUS_OK;
}

static enum status index_load(const struct safetensors *st, struct json **ret_root,
                              const struct json **ret_map, struct error *err)
{
    struct error why;
    struct json *root;
    char *path = mem_printf("%s/" INDEX_NAME, st->dir);
    enum status status = json_parse_file(path, NULL, &root, &why);
    mem_free(path);
    if (status != STATUS_OK) {
        return error_set(err, status == STATUS_INVALID ? STATUS_CORRUPT : status, "%s", why.text);
    }
    const struct json *map = json_get(root, "weight_map");
    if (json_kind_of(root) != JSON_KIND_OBJECT || json_kind_of(map) != JSON_KIND_OBJECT ||
        json_object_n(map) == 0) {
        json_free(root);
        return error_set(err, STATUS_CORRUPT,
                         "%s/" INDEX_NAME
                         " must be an object whose weight_map names at least one tensor",
                         st->dir);
    }
    *ret_root = root;
    *ret_map = map;
    return STATUS_OK;
}

/* --- opening --- */

static enum status open_files(struct safetensors *st, bool by_index, struct error *err)
{
    for (size_t i = 0; i < st->n_shards; i++) {
        enum status status =
            shard_open(st, &st->shards[i], by_index ? ", which " INDEX_NAME " names" : "", err);
        if (status == STATUS_OK) {
            status = shard_read_header(st, (uint32_t)i, err);
        }
        if (status != STATUS_OK) {
            return status;
        }
    }
    for (size_t i = 0; i < st->tensors.n; i++) {
        struct safetensors_tensor *tensor = &st->tensors.items[i];
        const struct safetensors_tensor *other = hmap_put_text(st->by_name, tensor->name, tensor);
        if (other) {
            return error_set(err, STATUS_CORRUPT, "%.120s is in both %.120s and %.120s",
                             tensor->name, st->shards[other->shard_i].name,
                             st->shards[tensor->shard_i].name);
        }
        st->data_bytes += tensor->bytes;
    }
    return STATUS_OK;
}

enum status safetensors_open(const char *dir, struct safetensors **ret_st, struct error *err)
{
    struct json *root = NULL;
    const struct json *weight_map = NULL;
    struct stat info;
    enum status status;

    struct safetensors *st = mem_zalloc(sizeof(*st));
    st->dir = mem_strdup(dir);
    st->by_name = hmap_create();
    st->tensors.names = arena_create(0);
    st->dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (st->dir_fd < 0) {
        status = error_set(err, errno == ENOENT ? STATUS_NOT_FOUND : STATUS_SYSTEM,
                           "model folder %s: %m", dir);
        goto fail;
    }
    bool by_index = fstatat(st->dir_fd, INDEX_NAME, &info, AT_SYMLINK_NOFOLLOW) == 0;
    if (by_index) {
        status = index_load(st, &root, &weight_map, err);
        if (status == STATUS_OK) {
            status = index_list_shards(st, weight_map, err);
        }
    } else if (fstatat(st->dir_fd, SINGLE_NAME, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        st->shards = mem_array(1, sizeof(*st->shards));
        st->shards[0] = (struct shard){.name = mem_strdup(SINGLE_NAME), .fd = -1};
        st->n_shards = 1;
        status = STATUS_OK;
    } else {
        status =
            error_set(err, STATUS_NOT_FOUND, "%s has neither " INDEX_NAME " nor " SINGLE_NAME, dir);
    }
    if (status == STATUS_OK) {
        status = open_files(st, by_index, err);
    }
    if (status == STATUS_OK && by_index) {
        status = index_check(st, weight_map, err);
    }
    json_free(root);
    if (status != STATUS_OK) {
        goto fail;
    }
    *ret_st = st;
    return STATUS_OK;

fail:
    safetensors_close(st);
    return status;
}

void safetensors_close(struct safetensors *st)
{
    if (!st) {
        return;
    }
    for (size_t i = 0; i < st->n_shards; i++) {
        if (st->shards[i].fd >= 0) {
            close(st->shards[i].fd);
        }
        mem_free(st->shards[i].name);
    }
    if (st->dir_fd >= 0) {
        close(st->dir_fd);
    }
    mem_free(st->shards);
    mem_free(st->tensors.items);
    arena_free(st->tensors.names);
    hmap_free(st->by_name);
    mem_free(st->dir);
    mem_free(st);
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *st, const char *name)
{
    return hmap_get_text(st->by_name, name);
}

size_t safetensors_n(const struct safetensors *st)
{
    return st->tensors.n;
}

const struct safetensors_tensor *safetensors_at(const struct safetensors *st, size_t i)
{
    return i < st->tensors.n ? &st->tensors.items[i] : NULL;
}

size_t safetensors_n_shards(const struct safetensors *st)
{
    return st->n_shards;
}

const char *safetensors_shard_name(const struct safetensors *st, size_t shard_i)
{
    return shard_i < st->n_shards ? st->shards[shard_i].name : NULL;
}

uint64_t safetensors_data_bytes(const struct safetensors *st)
{
    return st->data_bytes;
}

enum status safetensors_read(const struct safetensors *st, const struct safetensors_tensor *tensor,
                             uint64_t offset, size_t bytes, void *ret_data, struct error *err)
{
    if (offset > tensor->bytes || bytes > tensor->bytes - offset) {
        return error_set(err, STATUS_INVALID, "%.120s has %llu bytes; %zu at %llu were asked for",
                         tensor->name, (unsigned long long)tensor->bytes, bytes,
                         (unsigned long long)offset);
    }
    return read_exact(&st->shards[tensor->shard_i], tensor->offset + offset, bytes, ret_data, err);
}
