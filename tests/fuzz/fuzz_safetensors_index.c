#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "model/safetensors.h"

/*
 * Whatever the bytes of model.safetensors.index.json beside one good shard of two tensors: refused
 * with words, or both tensors are found in that shard and can be read.
 */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static char folder[] = "/tmp/fuzz-index-XXXXXX";
static char index_path[64], shard_path[64];

static void require(int truth)
{
    if (!truth) {
        abort();
    }
}

static void file_write(const char *path, const void *data, size_t bytes)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    require(fd >= 0);
    while (bytes > 0) {
        ssize_t n = write(fd, data, bytes);
        require(n > 0);
        data = (const uint8_t *)data + n;
        bytes -= (size_t)n;
    }
    close(fd);
}

static void folder_remove(void)
{
    unlink(index_path);
    unlink(shard_path);
    rmdir(folder);
}

static void folder_make(void)
{
    static const char header[] = "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"b\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[8,12]}}";
    uint8_t shard[8 + sizeof(header) - 1 + 12] = {0};
    shard[0] = sizeof(header) - 1;
    memcpy(shard + 8, header, sizeof(header) - 1);
    require(mkdtemp(folder) != NULL);
    snprintf(index_path, sizeof(index_path), "%s/model.safetensors.index.json", folder);
    snprintf(shard_path, sizeof(shard_path), "%s/model-00001-of-00001.safetensors", folder);
    file_write(shard_path, shard, sizeof(shard));
    atexit(folder_remove);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct safetensors *st;
    struct error err = {""};
    if (index_path[0] == '\0') {
        folder_make();
        log_set_level(LOG_LEVEL_ERROR);
    }
    file_write(index_path, data, bytes);
    if (safetensors_open(folder, &st, &err) != STATUS_OK) {
        require(err.text[0] != '\0');
        return 0;
    }
    const struct safetensors_tensor *a = safetensors_find(st, "a"), *b = safetensors_find(st, "b");
    uint8_t read[8];
    require(safetensors_n(st) == 2 && safetensors_n_shards(st) == 1 && a && b);
    require(a->bytes == 8 && b->bytes == 4 && safetensors_data_bytes(st) == 12);
    require(safetensors_read(st, a, 0, 8, read, NULL) == STATUS_OK);
    require(safetensors_read(st, b, 0, 4, read, NULL) == STATUS_OK);
    safetensors_close(st);
    return 0;
}
