#ifndef BATON_RPC_ACCEPT_H
#define BATON_RPC_ACCEPT_H

#include "rpc/link.h"

struct stream;

/* Makes a server's end of an accepted stream, which it takes. Internal to rpc/. Loop thread. */
struct link *link_accept(struct rpc_core *core, struct stream *stream)
    __attribute__((returns_nonnull)) must_check;

#endif
