/* node/kv.c - whether KV is handed over from and into the memory of the device itself.
 *
 * Device memory has a transport of its own, since its endpoints leave shared memory out and those
 * of host memory want it. It is opened when --kv-buffer-device asks for it, and kept if UCX says
 * that it reaches the device's memory and has just shown it: a put to ourselves, compared. What
 * fails there ends a start that insisted (`cuda`), and sends one that did not (`auto`) by way of
 * pinned host memory, with the reason in one line.
 */
#include "node/kv.h"

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "transport/put.h"
#include "transport/region.h"

enum { PROBE_BYTES = 65536 };

struct node_kv {
    struct engine *engine;
    struct transport *transport;
    enum region_memory memory;
};

static void attach(void *cookie)
{
    engine_device_attach(cookie);
}

static enum status kv_transport_open(struct node_kv *kv, struct loop *loop,
                                     const struct node_options *options, struct error *err)
{
    struct transport_options transport = {
        .device_regions = kv->memory == REGION_DEVICE,
        .attach = attach,
        .attach_cookie = kv->engine,
        .tls = options->ucx_tls,
        .net_devices = options->ucx_net_devices,
        .tcp_port_range = options->ucx_tcp_port_range,
    };
    enum status status = transport_open(loop, &transport, &kv->transport, err);
    if (!status && kv->memory == REGION_DEVICE && !transport_has_device_memory(kv->transport)) {
        status = error_set(err, STATUS_UNSUPPORTED,
                           "%s does not reach CUDA memory: it was built without, or its CUDA "
                           "modules find no driver. A UCX with CUDA is another package (PyPI's "
                           "libucx-cu13, a vendor's): -Ducx_path at build time, or its folder "
                           "first in LD_LIBRARY_PATH",
                           transport_ucx_text(kv->transport));
    }
    return status;
}

/* One put from one half of `memory` into the other, looked at from the host. */
static enum status probe(struct node_kv *kv, uint8_t *memory, struct region_probe *ret_probe,
                         struct error *err)
{
    struct region *source = NULL, *landing = NULL;
    uint8_t *bytes = mem_alloc(PROBE_BYTES);
    const uint64_t seed = loop_now_ns();
    size_t at;
    put_pattern_fill(bytes, PROBE_BYTES, seed);
    enum status status = engine_device_move(kv->engine, memory, bytes, PROBE_BYTES);
    if (status) {
        error_set(err, status, "the device's memory can't be written");
        goto done;
    }
    status = region_register_source(kv->transport, memory, PROBE_BYTES, kv->memory, &source, err);
    if (!status) {
        status = region_register_landing(kv->transport, memory + PROBE_BYTES, PROBE_BYTES,
                                         kv->memory, &landing, err);
    }
    if (!status) {
        status = region_probe(source, landing, PROBE_BYTES, ret_probe, err);
    }
    if (!status &&
        (engine_device_move(kv->engine, bytes, memory + PROBE_BYTES, PROBE_BYTES) != STATUS_OK ||
         !put_pattern_check(bytes, PROBE_BYTES, seed, &at))) {
        status = error_set(err, STATUS_CORRUPT,
                           "a put to ourselves in the device's memory left wrong bytes (%s)",
                           transport_ucx_text(kv->transport));
    }
    region_free(landing);
    region_free(source);
done:
    mem_free(bytes);
    return status;
}

static enum status try_device(struct node_kv *kv, struct loop *loop,
                              const struct node_options *options, struct error *err)
{
    enum engine_memory_kind kind;
    uint8_t *memory;
    struct region_probe result;
    enum status status =
        engine_device_alloc(kv->engine, 2 * (size_t)PROBE_BYTES, &memory, &kind, err);
    if (status) {
        return status;
    }
    kv->memory = kind == ENGINE_MEMORY_CUDA ? REGION_DEVICE : REGION_HOST;
    status = kv_transport_open(kv, loop, options, err);
    if (!status) {
        status = probe(kv, memory, &result, err);
    }
    if (!status) {
        log_info("kv",
                 "KV is handed over in the memory of %s (%s memory to UCX) by %s; %d KiB put to "
                 "ourselves were right after %.1f us over %s",
                 engine_info(kv->engine)->device_name,
                 kv->memory == REGION_DEVICE ? "CUDA" : "host", transport_ucx_text(kv->transport),
                 PROBE_BYTES >> 10, (double)result.put_ns * 1e-3, result.lanes);
    }
    return status;
}

enum status node_kv_open(struct loop *loop, struct engine *engine,
                         const struct node_options *options, struct node_kv **ret_kv,
                         struct error *err)
{
    if (options->kv_buffer_device == NODE_KV_CPU) {
        *ret_kv = NULL;
        return STATUS_OK;
    }
    struct node_kv *kv = mem_zalloc(sizeof(*kv));
    struct error why = {""};
    kv->engine = engine;
    enum status status = try_device(kv, loop, options, &why);
    if (!status) {
        *ret_kv = kv;
        return STATUS_OK;
    }
    node_kv_close(kv);
    if (options->kv_buffer_device == NODE_KV_CUDA) {
        return error_set(err, status, "--kv-buffer-device cuda: %s", why.text);
    }
    log_warn("kv", "KV is handed over in host memory: %s", why.text);
    *ret_kv = NULL;
    return STATUS_OK;
}

void node_kv_close(struct node_kv *kv)
{
    if (kv) {
        transport_close(kv->transport);
        mem_free(kv);
    }
}

struct transport *node_kv_transport(const struct node_kv *kv)
{
    return kv->transport;
}

enum region_memory node_kv_memory(const struct node_kv *kv)
{
    return kv->memory;
}
