/* transport/ucx_pool.c - zeroed memory for UCX's requests.
 *
 * The target of a put over tcp sends an acknowledgement from a request of which UCX (1.13) fills in
 * four members. If the writer's connection fails while that still waits to be sent, UCX gives the
 * request back as if it were a put of its own, and reads what was never written: with memory that
 * held other things before, that is a crash of the node whose peer died. Zeroes mean "nothing to
 * give back". killed_writers in tests/transport/test_failure.c crashes without it, in a release
 * build, every time.
 *
 * UCX takes its requests from pools that grow by these two functions of libucs, which come through
 * the dynamic linker and so to us: see ucx_socket.c. Huge pages, which the originals try first, are
 * of no use to some hundred requests.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "transport/ucx_socket.h"

#include <ucs/datastruct/mpool.h>

ucs_status_t ucs_mpool_hugetlb_malloc(ucs_mpool_t *pool, size_t *bytes, void **ret_chunk)
{
    void *chunk = calloc(1, *bytes);
    if (chunk == NULL) {
        return UCS_ERR_NO_MEMORY;
    }
    *ret_chunk = chunk;
    return UCS_OK;
}

void ucs_mpool_hugetlb_free(ucs_mpool_t *pool, void *chunk)
{
    free(chunk);
}

bool ucx_pool_is_ours(void)
{
    ucs_status_t (*ours)(ucs_mpool_t *, size_t *, void **) = ucs_mpool_hugetlb_malloc;
    void *found = dlsym(RTLD_DEFAULT, "ucs_mpool_hugetlb_malloc");
    return memcmp(&found, &ours, sizeof found) == 0;
}
