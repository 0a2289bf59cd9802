/* See accept.h. Pieces follow each other in the parcel: the word index runs on from one to the
 * next, so that two pieces in the wrong order have another sum. */
#include "engine/accept.h"

#include <stdbool.h>

static uint64_t sum_pieces(uint64_t transfer_id, uint32_t parcel_seq,
                           const struct parcel_piece *pieces, uint32_t n_pieces, bool copy)
{
    struct parcel_key key;
    struct parcel_sum sum = {{0, 0}};
    uint64_t bytes = 0;
    parcel_key_make(&key, transfer_id, parcel_seq);
    for (uint32_t i = 0; i < n_pieces; i++) {
        parcel_copy_sum(&key, &sum, copy ? pieces[i].dst : NULL, pieces[i].src, pieces[i].bytes,
                        bytes / 8);
        bytes += pieces[i].bytes;
    }
    return parcel_digest(&sum, bytes);
}

enum status accept_parcel(uint64_t transfer_id, uint32_t parcel_seq,
                          const struct parcel_piece *pieces, uint32_t n_pieces,
                          uint64_t expected_checksum)
{
    uint64_t sum = sum_pieces(transfer_id, parcel_seq, pieces, n_pieces, true);
    return sum == expected_checksum ? STATUS_OK : STATUS_CHECKSUM;
}

uint64_t accept_parcel_checksum(uint64_t transfer_id, uint32_t parcel_seq,
                                const struct parcel_piece *pieces, uint32_t n_pieces)
{
    return sum_pieces(transfer_id, parcel_seq, pieces, n_pieces, false);
}
