#ifndef BATON_RPC_LINK_FAULT_H
#define BATON_RPC_LINK_FAULT_H

#ifdef BATON_FAULT_POINTS

#include "rpc/link.h"

/* What the fault points of a link hold back. Loop thread. */
struct link_fault;

/* The stream is over: what was held back is gone with it. NULL is allowed. */
void link_fault_clear(struct link_fault *fault);
void link_fault_free(struct link_fault *fault);

/* link.c: where a link keeps it, its loop, and the two events that a fault brings about. The link
 * may be closed inside the last two. */
struct link_fault **link_fault_of(struct link *link);
struct loop *link_fault_loop(struct link *link);
void link_fault_cut(struct link *link);
void link_fault_writable(struct link *link);

#endif
#endif
