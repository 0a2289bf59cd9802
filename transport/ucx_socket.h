/* transport/ucx_socket.h - see ucx_socket.c. Private to transport/. */
#ifndef BATON_TRANSPORT_UCX_SOCKET_H
#define BATON_TRANSPORT_UCX_SOCKET_H

#include <stdbool.h>

/* Does UCX's tcp transport send through our function in this process? */
bool ucx_socket_is_ours(void);

#endif
