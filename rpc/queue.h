#ifndef BATON_RPC_QUEUE_H
#define BATON_RPC_QUEUE_H

#include <grpc/grpc.h>

#include "base/loop.h"
#include "rpc/wall.h"

/*
 * gRPC's completion queue, as events of the loop. Internal to rpc/: part of rpc_core. Loop thread.
 */

struct rpc_queue;

/* Starts gRPC. STATUS_SYSTEM when a thread or the mailbox can't be had. */
enum status must_check rpc_queue_create(struct loop *loop, struct rpc_queue **ret_queue,
                                        struct error *err);

/* Nothing may be under way any more (rpc_queue_take). Ends gRPC. */
void rpc_queue_free(struct rpc_queue *queue);

grpc_completion_queue *rpc_queue_grpc(struct rpc_queue *queue);

/* As rpc_core_batch_start. */
bool rpc_queue_batch_start(struct rpc_queue *queue, grpc_call *call, const grpc_op *ops,
                           size_t n_ops, struct rpc_op *op);

/* After any other call into gRPC that may complete something: looks at the queue when the turn
 * ends. */
void rpc_queue_look(struct rpc_queue *queue);

/* Runs the fn of one event that has come, outside the loop: for the end. False: there is none. */
bool rpc_queue_take(struct rpc_queue *queue);

/* Events that a thread has posted and the loop has not handled. */
size_t rpc_queue_depth(struct rpc_queue *queue);

#endif
