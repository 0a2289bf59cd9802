#include "base/hmap.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include <xxhash.h>

#include "base/mem.h"

/*
 * Two arrays: entries in order of insertion, and a table of their numbers, probed linearly. A
 * removed entry leaves a hole in both, so that positions stay valid while someone steps; holes go
 * when the next put finds either array full and rebuilds. At most three quarters of the table are
 * in use, holes included, so a probe always ends.
 */

enum {
    TABLE_FIRST = 16,
    SLOT_EMPTY = 0,
    SLOT_HOLE = 1,
    SLOT_BASE = 2, /* slot value of entry 0 */
};

struct entry {
    uint64_t hash;
    void *key; /* NULL: a hole */
    size_t key_bytes;
    void *value;
};

struct hmap {
    uint64_t seed;
    struct entry *entries;
    size_t n_entries, n_live; /* with and without holes */
    uint32_t *table;
    size_t table_n; /* a power of two; entries has room for three quarters of it */
};

struct hmap *hmap_create(void)
{
    struct hmap *map = mem_zalloc(sizeof(*map));
    if (getrandom(&map->seed, sizeof(map->seed), 0) != (ssize_t)sizeof(map->seed)) {
        abort(); /* eight bytes never come short once the kernel is seeded */
    }
    return map;
}

void hmap_free(struct hmap *map)
{
    if (map == NULL) {
        return;
    }
    for (size_t i = 0; i < map->n_entries; i++) {
        mem_free(map->entries[i].key);
    }
    mem_free(map->entries);
    mem_free(map->table);
    mem_free(map);
}

static uint64_t hash_of(const struct hmap *map, const void *key, size_t key_bytes)
{
    return XXH3_64bits_withSeed(key, key_bytes, map->seed);
}

/* The table slot that holds key, or NULL. */
static uint32_t *find(const struct hmap *map, uint64_t hash, const void *key, size_t key_bytes)
{
    if (map->n_live == 0) {
        return NULL;
    }
    for (size_t i = hash;; i++) {
        uint32_t *slot = &map->table[i & (map->table_n - 1)];
        if (*slot == SLOT_EMPTY) {
            return NULL;
        }
        if (*slot == SLOT_HOLE) {
            continue;
        }
        const struct entry *entry = &map->entries[*slot - SLOT_BASE];
        if (entry->hash == hash && entry->key_bytes == key_bytes &&
            (key_bytes == 0 || memcmp(entry->key, key, key_bytes) == 0)) {
            return slot;
        }
    }
}

static void place(struct hmap *map, size_t entry_i)
{
    size_t i = map->entries[entry_i].hash;
    while (map->table[i & (map->table_n - 1)] != SLOT_EMPTY) {
        i++;
    }
    map->table[i & (map->table_n - 1)] = (uint32_t)(entry_i + SLOT_BASE);
}

static size_t room(size_t table_n)
{
    return table_n / 4 * 3;
}

/* New arrays without holes, half full or less. */
static void rebuild(struct hmap *map)
{
    size_t table_n = TABLE_FIRST;
    while (room(table_n) < 2 * map->n_live + 1) {
        table_n *= 2;
    }
    assert(table_n <= UINT32_MAX);
    struct entry *entries = mem_array(room(table_n), sizeof(*entries));
    size_t n = 0;
    for (size_t i = 0; i < map->n_entries; i++) {
        if (map->entries[i].key != NULL) {
            entries[n++] = map->entries[i];
        }
    }
    mem_free(map->entries);
    mem_free(map->table);
    map->entries = entries;
    map->n_entries = n;
    map->table = mem_array(table_n, sizeof(*map->table));
    map->table_n = table_n;
    for (size_t i = 0; i < n; i++) {
        place(map, i);
    }
}

void *hmap_put(struct hmap *map, const void *key, size_t key_bytes, void *value)
{
    assert(value != NULL);
    uint64_t hash = hash_of(map, key, key_bytes);
    uint32_t *slot = find(map, hash, key, key_bytes);
    if (slot != NULL) {
        struct entry *entry = &map->entries[*slot - SLOT_BASE];
        void *old = entry->value;
        entry->value = value;
        return old;
    }
    /* Every entry, hole or not, has used one slot of the table: one bound serves both. */
    if (map->n_entries == room(map->table_n)) {
        rebuild(map);
    }
    map->entries[map->n_entries] = (struct entry){
        .hash = hash, .key = mem_dup(key, key_bytes), .key_bytes = key_bytes, .value = value};
    place(map, map->n_entries++);
    map->n_live++;
    return NULL;
}

void *hmap_get(const struct hmap *map, const void *key, size_t key_bytes)
{
    const uint32_t *slot = find(map, hash_of(map, key, key_bytes), key, key_bytes);
    return slot ? map->entries[*slot - SLOT_BASE].value : NULL;
}

void *hmap_remove(struct hmap *map, const void *key, size_t key_bytes)
{
    uint32_t *slot = find(map, hash_of(map, key, key_bytes), key, key_bytes);
    if (slot == NULL) {
        return NULL;
    }
    struct entry *entry = &map->entries[*slot - SLOT_BASE];
    void *value = entry->value;
    *slot = SLOT_HOLE;
    mem_free(entry->key);
    *entry = (struct entry){.key = NULL};
    map->n_live--;
    return value;
}

size_t hmap_n(const struct hmap *map)
{
    return map->n_live;
}

void *hmap_put_text(struct hmap *map, const char *key, void *value)
{
    return hmap_put(map, key, strlen(key), value);
}

void *hmap_get_text(const struct hmap *map, const char *key)
{
    return hmap_get(map, key, strlen(key));
}

void *hmap_remove_text(struct hmap *map, const char *key)
{
    return hmap_remove(map, key, strlen(key));
}

void *hmap_put_u64(struct hmap *map, uint64_t key, void *value)
{
    return hmap_put(map, &key, sizeof(key), value);
}

void *hmap_get_u64(const struct hmap *map, uint64_t key)
{
    return hmap_get(map, &key, sizeof(key));
}

void *hmap_remove_u64(struct hmap *map, uint64_t key)
{
    return hmap_remove(map, &key, sizeof(key));
}

bool hmap_next(const struct hmap *map, size_t *position, const void **ret_key,
               size_t *ret_key_bytes, void **ret_value)
{
    while (*position < map->n_entries) {
        const struct entry *entry = &map->entries[(*position)++];
        if (entry->key == NULL) {
            continue;
        }
        if (ret_key != NULL) {
            *ret_key = entry->key;
        }
        if (ret_key_bytes != NULL) {
            *ret_key_bytes = entry->key_bytes;
        }
        *ret_value = entry->value;
        return true;
    }
    return false;
}
