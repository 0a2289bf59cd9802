/* node/kv.h - the transport between the memories of devices, where there is one.
 *
 * Thread: loop.
 */
#ifndef BATON_NODE_KV_H
#define BATON_NODE_KV_H

#include "node/options.h"
#include "transport/region.h"

struct loop;
struct node_kv;

/* As --kv-buffer-device says, of an engine that was just opened. *ret_kv is NULL where KV goes by
 * way of host memory: by wish, or because it has to, which is logged. Errors, of a start that
 * insists on device memory: UNSUPPORTED (no such memory, no such UCX), and those of opening and of
 * putting; the text says what is missing. */
must_check enum status node_kv_open(struct loop *loop, struct engine *engine,
                                    const struct node_options *options, struct node_kv **ret_kv,
                                    struct error *err);
/* Ends its puts and peers; before the engine is closed. NULL is fine. */
void node_kv_close(struct node_kv *kv);

struct transport *node_kv_transport(const struct node_kv *kv);
/* As what regions of the device's memory are registered. */
enum region_memory node_kv_memory(const struct node_kv *kv);

#endif
