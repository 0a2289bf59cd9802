/* transport/ucx_socket.h - see ucx_socket.c and ucx_pool.c. Private to transport/. */
#ifndef BATON_TRANSPORT_UCX_SOCKET_H
#define BATON_TRANSPORT_UCX_SOCKET_H

#include <stdbool.h>

/* Does UCX's tcp transport come through our functions in this process? */
bool ucx_socket_is_ours(void);
/* Do its requests come from our memory? */
bool ucx_pool_is_ours(void);

#endif
