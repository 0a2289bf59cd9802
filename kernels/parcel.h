/* kernels/parcel.h - the checksum of the hand-off, and the pass that copies and sums at once.
 *
 * A parcel is a run of 8-byte little-endian words w_0 .. w_{n-1}, in the order: pieces as the
 * parcel lists them, bytes as they lie. With lo_i, hi_i the halves of w_i and eight 32-bit keys
 * drawn from (transfer_id, parcel seq), two lanes are
 *
 *     L_j = sum_i ((lo_i + a_j + b_j i) mod 2^32) * ((hi_i + c_j + d_j i) mod 2^32)      mod 2^64,
 * j = 0, 1
 *
 * and the digest is mix(L_0 ^ n*8) + rotl(mix(L_1), 32), mix being the finaliser of splitmix64.
 * This is NH (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, CRYPTO 1999, section 4) with keys
 * linear in the word's index, b_j and d_j odd: the index makes it notice words that changed places,
 * and a sum has no order, so any number of threads on any device gives the same value. It guards
 * against torn, late, misdirected and duplicated writes, not against a peer that lies.
 *
 * Test vectors (transfer 0x0123456789abcdef, seq 7) stand in tests/kernels/test_parcel.c; every
 * backend must meet them.
 */
#ifndef BATON_KERNELS_PARCEL_H
#define BATON_KERNELS_PARCEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct parcel_key {
    uint32_t a[2], b[2], c[2], d[2];
};

struct parcel_sum {
    uint64_t lane[2];
};

/* One of the runs of bytes that a parcel is made of, and where it is to lie. */
struct parcel_piece {
    void *dst;
    const void *src;
    size_t bytes; /* a multiple of 8, as both addresses are */
};

/* Keys of one parcel of one transfer. */
void parcel_key_make(struct parcel_key *ret_key, uint64_t transfer_id, uint32_t parcel_seq);
/* Copies `bytes` (a multiple of 8) from src to dst and adds the words *as written to dst* to `sum`;
 * the first word has index first_word in its parcel. dst may be NULL: sum src in place. src and dst
 * may be 8-byte aligned only; no overlap. */
void parcel_copy_sum(const struct parcel_key *key, struct parcel_sum *sum, void *dst,
                     const void *src, size_t bytes, uint64_t first_word);
/* The digest of a parcel of n_bytes in all. */
uint64_t parcel_digest(const struct parcel_sum *sum, uint64_t n_bytes);
/* The instruction set in use ("avx2", "generic"): for the start-up log and the bench. */
const char *parcel_variant(void);
/* Use the generic loop whatever the processor has: see kernels/registry.h. Before any sum. */
void parcel_force_generic(bool on);

#endif
