#ifndef BATON_TESTS_MODEL_FOLDER_H
#define BATON_TESTS_MODEL_FOLDER_H

#include <assert.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"

/* Throw-away model folders for the tests of model/. */

struct folder {
    char path[64];
};

static inline struct folder folder_create(void)
{
    struct folder folder = {"/tmp/baton-model-XXXXXX"};
    const char *made = mkdtemp(folder.path);
    assert(made);
    return folder;
}

static inline const char *folder_file(const struct folder *folder, const char *name)
{
    static char path[2][512]; /* two may be in use in one expression */
    static unsigned turn;
    turn ^= 1;
    snprintf(path[turn], sizeof(path[turn]), "%s/%s", folder->path, name);
    return path[turn];
}

static inline void folder_write(const struct folder *folder, const char *name, const void *data,
                                size_t bytes)
{
    FILE *f = fopen(folder_file(folder, name), "wb");
    assert(f);
    size_t n = fwrite(data, 1, bytes, f);
    assert(n == bytes);
    int rc = fclose(f);
    assert(rc == 0);
}

static inline void folder_write_text(const struct folder *folder, const char *name,
                                     const char *text)
{
    folder_write(folder, name, text, strlen(text));
}

/* A safetensors file: the length, the header, data_bytes bytes that count 0, 1, 2 ... */
static inline void folder_write_tensors(const struct folder *folder, const char *name,
                                        const char *header, size_t data_bytes)
{
    struct buf buf = BUF_INIT;
    uint8_t length[8];
    put_le64(length, strlen(header));
    buf_append(&buf, length, 8);
    buf_append_text(&buf, header);
    for (size_t i = 0; i < data_bytes; i++) {
        buf_append_byte(&buf, (uint8_t)i);
    }
    folder_write(folder, name, buf.data, buf.bytes);
    buf_fini(&buf);
}

/* The whole file in ret, which the caller releases. */
static inline void folder_read(const char *path, struct buf *ret)
{
    FILE *f = fopen(path, "rb");
    assert(f);
    buf_init(ret);
    size_t n;
    do {
        n = fread(buf_reserve(ret, 65536), 1, 65536, f);
        ret->bytes += n;
    } while (n > 0);
    fclose(f);
}

static inline void folder_copy(const char *from, const struct folder *to)
{
    DIR *dir = opendir(from);
    assert(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') {
            continue;
        }
        char path[512];
        struct buf data;
        snprintf(path, sizeof(path), "%s/%s", from, entry->d_name);
        folder_read(path, &data);
        folder_write(to, entry->d_name, data.data, data.bytes);
        buf_fini(&data);
    }
    closedir(dir);
}

/* Replaces every occurrence of old, which must be there, in a file; lengths may differ. */
static inline void folder_replace(const struct folder *folder, const char *name, const char *old,
                                  const char *new)
{
    struct buf data, out = BUF_INIT;
    folder_read(folder_file(folder, name), &data);
    size_t at = 0, n_found = 0;
    while (at < data.bytes) {
        if (data.bytes - at >= strlen(old) && memcmp(data.data + at, old, strlen(old)) == 0) {
            buf_append_text(&out, new);
            at += strlen(old);
            n_found++;
        } else {
            buf_append_byte(&out, data.data[at++]);
        }
    }
    assert(n_found > 0);
    folder_write(folder, name, out.data, out.bytes);
    buf_fini(&data);
    buf_fini(&out);
}

static inline void folder_truncate(const struct folder *folder, const char *name, off_t by)
{
    struct stat st;
    int rc = stat(folder_file(folder, name), &st);
    assert(rc == 0);
    rc = truncate(folder_file(folder, name), st.st_size - by);
    assert(rc == 0);
}

static inline void folder_remove(const struct folder *folder)
{
    DIR *dir = opendir(folder->path);
    assert(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            int rc = unlinkat(dirfd(dir), entry->d_name, 0);
            if (rc != 0) {
                rc = unlinkat(dirfd(dir), entry->d_name, AT_REMOVEDIR);
            }
            assert(rc == 0);
        }
    }
    closedir(dir);
    rmdir(folder->path);
}

#endif
