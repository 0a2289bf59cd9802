#ifndef BATON_BASE_HMAP_H
#define BATON_BASE_HMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 * A map from byte keys to pointers. Keys are copied; values are borrowed and may not be NULL. The
 * hash is seeded at random for each map, so that foreign keys can't be chosen to collide. Order of
 * iteration is the order of insertion, whatever the seed. One thread at a time. Growth aborts when
 * memory is out, so the caller bounds how many keys a peer can make.
 */
struct hmap;

struct hmap *hmap_create(void) __attribute__((returns_nonnull)) must_check;

/* Releases the map and its keys, not the values; NULL is allowed. */
void hmap_free(struct hmap *map);

/* Sets the value of key and returns the one that it replaced, or NULL. Replacing keeps the place.
 */
void *hmap_put(struct hmap *map, const void *key, size_t key_bytes, void *value);

/* The value of key, or NULL. */
void *hmap_get(const struct hmap *map, const void *key, size_t key_bytes) must_check;

/* Takes key out and returns its value, or NULL when it was not there. */
void *hmap_remove(struct hmap *map, const void *key, size_t key_bytes);

/* Number of keys. */
size_t hmap_n(const struct hmap *map);

/* The same with a string or an integer as the key. */
void *hmap_put_text(struct hmap *map, const char *key, void *value);
void *hmap_get_text(const struct hmap *map, const char *key) must_check;
void *hmap_remove_text(struct hmap *map, const char *key);
void *hmap_put_u64(struct hmap *map, uint64_t key, void *value);
void *hmap_get_u64(const struct hmap *map, uint64_t key) must_check;
void *hmap_remove_u64(struct hmap *map, uint64_t key);

/*
 * Steps through the map. *position starts at 0; each call that returns true gives the next entry.
 * Keys and values may be removed while stepping, the current one included; nothing may be put.
 * ret_key and ret_key_bytes may be NULL; the key is good until it is removed or something is put.
 */
bool hmap_next(const struct hmap *map, size_t *position, const void **ret_key,
               size_t *ret_key_bytes, void **ret_value);

#endif
