/* engine/accept.h - from landing slot to pool: copy and checksum in one pass.
 *
 * Thread: any; it touches only the memory the job names. What lies in a landing slot may change
 * under us (handoff.md, The idea), so nothing is read from it but by this copy, and the checksum is
 * that of the copy.
 */
#ifndef BATON_ENGINE_ACCEPT_H
#define BATON_ENGINE_ACCEPT_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "kernels/parcel.h"

/* Copies the pieces of one parcel, from landing slots to memory that is private, and compares. OK,
 * or CHECKSUM: dst then holds rubbish that nobody may read. */
must_check enum status accept_parcel(uint64_t transfer_id, uint32_t parcel_seq,
                                     const struct parcel_piece *pieces, uint32_t n_pieces,
                                     uint64_t expected_checksum);
/* The sender's side of the same sum, over pieces in place (dst ignored). */
uint64_t accept_parcel_checksum(uint64_t transfer_id, uint32_t parcel_seq,
                                const struct parcel_piece *pieces, uint32_t n_pieces);

#endif
