/* transport/ucx.h - the wall around UCX: the only file pair that sees ucp.h. Private to transport/.
 *
 * Thread: everything but ucx_open, ucx_close and the getters is called on the put thread alone, and
 * the callbacks run on it, from ucx_progress. ucx_open may run elsewhere before that thread exists,
 * ucx_close after it ended. UCX codes stop here: what comes out is `enum status` and text.
 */
#ifndef BATON_TRANSPORT_UCX_H
#define BATON_TRANSPORT_UCX_H

#include "transport/envelope.h"
#include "transport/region.h"
#include "transport/transport.h"

struct ucx;
struct ucx_ep;
struct ucx_memory;
struct ucx_rkey;

/* An operation that may complete later. Owned by the caller, who keeps it until `done` ran. */
struct ucx_op {
    void (*done)(struct ucx_op *op, enum status status);
};

/* Applies the settings of design, opens a context and its worker. */
must_check enum status ucx_open(const struct transport_options *options, struct ucx **ret_ucx,
                                struct error *err);

/* All endpoints closed, all memory unmapped (unmapping after the worker is gone hangs). */
void ucx_close(struct ucx *ucx);

struct ucx_version ucx_version(const struct ucx *ucx);
bool ucx_has_device_memory(const struct ucx *ucx);
const char *ucx_text(const struct ucx *ucx); /* transport_ucx_text */

/* This worker's address in its envelope; owned by ucx. */
const uint8_t *ucx_address(const struct ucx *ucx, size_t *ret_bytes);

/* A descriptor that is readable when there is something to progress, once armed. */
int ucx_event_fd(const struct ucx *ucx);

/* STATUS_OK: armed, the caller may sleep. STATUS_PENDING: progress again first. */
must_check enum status ucx_arm(struct ucx *ucx, struct error *err);

/* Runs what is due; how much it was (0: nothing). */
unsigned ucx_progress(struct ucx *ucx);

/* ---- memory ---- */

must_check enum status ucx_memory_allocate(struct ucx *ucx, size_t bytes,
                                           struct ucx_memory **ret_memory, uint8_t **ret_base,
                                           struct error *err);
must_check enum status ucx_memory_register(struct ucx *ucx, void *base, size_t bytes,
                                           enum region_memory kind, bool landing,
                                           struct ucx_memory **ret_memory, struct error *err);

/* The key of a landing area in its envelope; caller frees. */
must_check enum status ucx_memory_pack(struct ucx *ucx, struct ucx_memory *memory,
                                       uint8_t **ret_rkey, size_t *ret_bytes, struct error *err);
void ucx_memory_free(struct ucx *ucx, struct ucx_memory *memory);

/* ---- endpoints ---- */

/* `failed` runs from ucx_progress when UCX reports the peer's failure; it may only mark. `address`
 * as from envelope_open. */
must_check enum status ucx_ep_create(struct ucx *ucx, const uint8_t *address,
                                     void (*failed)(void *cookie, const char *text), void *cookie,
                                     struct ucx_ep **ret_ep, struct error *err);

/* Both: STATUS_OK when complete already (op->done will not run), STATUS_PENDING when op->done
 * comes, else an error. */
must_check enum status ucx_ep_put(struct ucx_ep *ep, const struct ucx_memory *memory,
                                  const uint8_t *source, size_t bytes, const struct ucx_rkey *rkey,
                                  uint64_t remote_address, struct ucx_op *op);
must_check enum status ucx_ep_flush(struct ucx_ep *ep, struct ucx_op *op);

/* Closes by force. Result as above (an error counts as closed). Once closed, and only then,
 * ucx_ep_free. */
must_check enum status ucx_ep_close(struct ucx_ep *ep, struct ucx_op *op);
void ucx_ep_free(struct ucx_ep *ep);

/* What ucp says about an endpoint: transports as text, and whether anything but tcp, and any device
 * transport or RDMA, is among them. */
struct ucx_lanes {
    char text[480]; /* with its suffix: PUT_MAX_LANES_TEXT */
    bool beyond_tcp;
    bool device_capable;
};
must_check enum status ucx_ep_lanes(struct ucx_ep *ep, struct ucx_lanes *ret_lanes);

must_check enum status ucx_rkey_unpack(struct ucx_ep *ep, const uint8_t *rkey,
                                       struct ucx_rkey **ret_rkey, struct error *err);
void ucx_rkey_free(struct ucx_rkey *rkey);

/* Is the peer's memory mapped into this process? */
bool ucx_rkey_is_direct(const struct ucx_rkey *rkey, uint64_t remote_base);

#endif
