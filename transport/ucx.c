/* transport/ucx.c - the wall around UCX: context, worker, memory, endpoints, keys, settings, log
 * lines, signals.
 *
 * Only RMA and WAKEUP are asked for: no active messages, tags or streams, so no rendezvous, whose
 * requests may never complete after a peer's death. Endpoints run in PEER error mode on both ends,
 * which is what makes a forced close legal and complete every outstanding put. It refuses to take
 * device memory for host memory.
 *
 * The invariant that matters: nothing here decides. A failure callback only marks its peer;
 * closing, ending puts and freeing keys is the work of peer.c, outside of ucp_worker_progress.
 */
#include "transport/ucx.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ucp/api/ucp.h>
#include <ucs/debug/debug.h>
#include <ucs/debug/log_def.h>

#include "base/log.h"
#include "base/mem.h"
#include "transport/ucx_socket.h"

struct ucx {
    ucp_context_h context;
    ucp_worker_h worker;
    int event_fd;
    struct ucx_version version;
    bool has_device_memory;
    char text[192];   /* which UCX this is */
    uint8_t *address; /* in its envelope */
    size_t address_bytes;
};

struct ucx_memory {
    ucp_mem_h handle;
    ucs_memory_type_t type;
};

struct ucx_ep {
    ucp_ep_h handle;
    void (*failed)(void *cookie, const char *text);
    void *cookie;
};

struct ucx_rkey {
    ucp_rkey_h handle;
};

/* ---- log lines ---- */

/* UCX writes to standard output by default. Its words go to our log instead, one level down: what
 * is an error to it (a peer that died) is an event here, and the function that decides logs it. Any
 * thread. */
__attribute__((format(printf, 6, 0))) static ucs_log_func_rc_t
log_ucx_line(const char *file, unsigned line, const char *function, ucs_log_level_t level,
             const ucs_log_component_config_t *component, const char *message, va_list ap)
{
    (void)function;
    (void)component;
    if (level > UCS_LOG_LEVEL_WARN && !log_enabled(LOG_LEVEL_DEBUG)) {
        return UCS_LOG_FUNC_RC_STOP;
    }
    char text[1024];
    vsnprintf(text, sizeof text, message, ap);
    enum log_level ours = level == UCS_LOG_LEVEL_FATAL   ? LOG_LEVEL_ERROR
                          : level <= UCS_LOG_LEVEL_ERROR ? LOG_LEVEL_WARN
                          : level <= UCS_LOG_LEVEL_WARN  ? LOG_LEVEL_INFO
                                                         : LOG_LEVEL_DEBUG;
    const char *name = strrchr(file, '/');
    log_at(ours, "ucx", "%s (%s:%u)", text, name != NULL ? name + 1 : file, line);
    return UCS_LOG_FUNC_RC_STOP;
}

static enum status status_of(ucs_status_t status)
{
    switch (status) {
    case UCS_OK:
        return STATUS_OK;
    case UCS_INPROGRESS:
        return STATUS_PENDING;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
        return STATUS_EXHAUSTED;
    case UCS_ERR_INVALID_PARAM:
        return STATUS_INVALID;
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
        return STATUS_UNSUPPORTED;
    case UCS_ERR_CANCELED:
        return STATUS_CANCELLED;
    default:
        return STATUS_PEER_LOST;
    }
}

/* ---- signals and settings ---- */

/* Debian's UCX 1.13 installs handlers of fatal signals in a constructor, before main. They print a
 * backtrace through malloc and swallow a core dump; put back what was there. A handler that is not
 * libucs's is left alone. */
static void signals_put_back(void)
{
    static const int signals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE};
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        struct sigaction action;
        Dl_info info;
        if (sigaction(signals[i], NULL, &action) != 0 || action.sa_handler == SIG_DFL ||
            action.sa_handler == SIG_IGN) {
            continue;
        }
        void *handler = NULL;
        memcpy(&handler, &action.sa_sigaction, sizeof handler);
        if (dladdr(handler, &info) == 0 || info.dli_fname == NULL ||
            strstr(info.dli_fname, "libucs") == NULL) {
            continue;
        }
        ucs_debug_disable_signal(signals[i]);
        if (sigaction(signals[i], NULL, &action) == 0 && action.sa_handler != SIG_DFL) {
            memcpy(&handler, &action.sa_sigaction, sizeof handler);
            if (dladdr(handler, &info) != 0 && info.dli_fname != NULL &&
                strstr(info.dli_fname, "libucs") != NULL) {
                signal(signals[i], SIG_DFL);
            }
        }
    }
}

/* Is a transport over shared memory possible with this list? UCX warns about settings that no
 * transport took. */
static bool tls_has_shared_memory(const char *tls)
{
    if (tls == NULL) {
        return true;
    }
    bool named = strstr(tls, "posix") != NULL || strstr(tls, "sysv") != NULL ||
                 strstr(tls, "sm") != NULL || strstr(tls, "shm") != NULL;
    return tls[0] == '^' ? !named : named || strstr(tls, "all") != NULL;
}

static enum status config_set(ucp_config_t *config, const char *key, const char *value,
                              struct error *err)
{
    char variable[64];
    snprintf(variable, sizeof variable, "UCX_%s", key);
    const char *operators = getenv(variable);
    if (operators != NULL) {
        log_info("transport", "%s is %s by the environment", variable, operators);
        return STATUS_OK;
    }
    ucs_status_t status = ucp_config_modify(config, key, value);
    if (status != UCS_OK) {
        return error_set(err, STATUS_INVALID, "UCX refuses %s=%s: %s", key, value,
                         ucs_status_string(status));
    }
    log_debug("transport", "UCX setting %s=%s", key, value);
    return STATUS_OK;
}

/* Keys with the name of a transport in front are only taken from the environment by 1.13, although
 * ucp_config_modify answers Success. Both segment sizes or neither: a transmit size above the
 * receive size makes tcp fail to open. Default segments hold 36 KiB puts over tcp to a third of
 * what these reach. */
static void config_set_tcp_segments(void)
{
    if (getenv("UCX_TCP_TX_SEG_SIZE") == NULL && getenv("UCX_TCP_RX_SEG_SIZE") == NULL) {
        setenv("UCX_TCP_TX_SEG_SIZE", "256K", 0);
        setenv("UCX_TCP_RX_SEG_SIZE", "1M", 0);
    }
}

static enum status config_fill(ucp_config_t *config, const struct transport_options *options,
                               struct error *err)
{
    /* Shared memory would hide the death of a peer of a GPU endpoint: puts into a dead process go
     * on "succeeding" for as long as the mapping lives. */
    const char *tls = options->tls;
    if (tls == NULL && options->device_regions) {
        tls = "^sm";
    }
    const char *effective_tls = getenv("UCX_TLS") != NULL ? getenv("UCX_TLS") : tls;
    const struct {
        const char *key, *value;
    } settings[] = {
        /* without it PEER mode rules shared memory out, and a same-host pair silently gets tcp */
        {"MM_ERROR_HANDLING", tls_has_shared_memory(effective_tls) ? "y" : NULL},
        {"KEEPALIVE_INTERVAL", "1s"}, /* 20 s by default; a death is to be seen within one */
        {"MEMTYPE_CACHE", "n"},       /* else memory from before ucp_init passes for host memory */
        {"TLS", tls},
        {"NET_DEVICES", options->net_devices},
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        if (settings[i].value == NULL) {
            continue;
        }
        enum status status = config_set(config, settings[i].key, settings[i].value, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

/* ---- context and worker ---- */

static enum status context_open(struct ucx *ucx, const struct transport_options *options,
                                struct error *err)
{
    ucp_config_t *config = NULL;
    config_set_tcp_segments();
    if (options->tcp_port_range != NULL) {
        setenv("UCX_TCP_PORT_RANGE", options->tcp_port_range, 0);
    }
    ucs_status_t ucs = ucp_config_read(NULL, NULL, &config);
    if (ucs != UCS_OK) {
        return error_set(err, STATUS_SYSTEM, "UCX can't read its settings (a UCX_ variable?): %s",
                         ucs_status_string(ucs));
    }
    enum status status = config_fill(config, options, err);
    if (status == STATUS_OK) {
        ucp_params_t params = {
            .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
            .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP,
            .name = "baton",
        };
        ucs = ucp_init(&params, config, &ucx->context);
        if (ucs != UCS_OK) {
            status = error_set(err, STATUS_SYSTEM, "UCX can't open its context: %s",
                               ucs_status_string(ucs));
        }
    }
    ucp_config_release(config);
    return status;
}

static enum status worker_open(struct ucx *ucx, struct error *err)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    ucs_status_t ucs = ucp_worker_create(ucx->context, &params, &ucx->worker);
    if (ucs != UCS_OK) {
        return error_set(err, STATUS_SYSTEM,
                         "UCX can't open a worker (transport or device list, port range?): %s",
                         ucs_status_string(ucs));
    }
    ucp_address_t *address = NULL;
    size_t address_bytes = 0;
    ucs = ucp_worker_get_efd(ucx->worker, &ucx->event_fd);
    if (ucs == UCS_OK) {
        ucs = ucp_worker_get_address(ucx->worker, &address, &address_bytes);
    }
    if (ucs != UCS_OK) {
        ucp_worker_destroy(ucx->worker);
        return error_set(err, STATUS_SYSTEM, "UCX worker: %s", ucs_status_string(ucs));
    }
    ucx->address =
        envelope_seal(ENVELOPE_ADDRESS, ucx->version, address, address_bytes, &ucx->address_bytes);
    ucp_worker_release_address(ucx->worker, address);
    return STATUS_OK;
}

/* Which library the loader found, and whether it has what the headers of this build promised: newer
 * libraries serve older headers, never the other way round. */
static enum status library_look(struct ucx *ucx, struct error *err)
{
    unsigned major, minor, patch;
    Dl_info info = {0};
    void *function = dlsym(RTLD_DEFAULT, "ucp_get_version"); /* the library's own address */
    ucp_get_version(&major, &minor, &patch);
    ucx->version = (struct ucx_version){(uint8_t)major, (uint8_t)minor};
    bool found = function != NULL && dladdr(function, &info) != 0 && info.dli_fname != NULL;
    snprintf(ucx->text, sizeof ucx->text, "UCX %u.%u.%u of %.150s", major, minor, patch,
             found ? info.dli_fname : "?");
    if (major != UCP_API_MAJOR || minor < UCP_API_MINOR) {
        return error_set(err, STATUS_UNSUPPORTED,
                         "built with the headers of UCX %d.%d, but the loader found %s: put the "
                         "libraries of the build first (LD_LIBRARY_PATH), or build with these",
                         UCP_API_MAJOR, UCP_API_MINOR, ucx->text);
    }
    return STATUS_OK;
}

enum status ucx_open(const struct transport_options *options, struct ucx **ret_ucx,
                     struct error *err)
{
    static bool log_is_ours;
    if (!log_is_ours) {
        ucs_log_push_handler(log_ucx_line);
        log_is_ours = true;
    }
    signals_put_back();
    if (!ucx_socket_is_ours() || !ucx_pool_is_ours()) {
        log_warn("transport", "this UCX passes us by: a tcp peer's death may abort this process");
    }
    struct ucx *ucx = mem_zalloc(sizeof *ucx);
    enum status status = library_look(ucx, err);
    if (status == STATUS_OK) {
        status = context_open(ucx, options, err);
    }
    if (status != STATUS_OK) {
        goto free_ucx;
    }
    ucp_context_attr_t attr = {.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES};
    if (ucp_context_query(ucx->context, &attr) == UCS_OK) {
        ucx->has_device_memory = (attr.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
    }
    status = worker_open(ucx, err);
    if (status != STATUS_OK) {
        goto cleanup_context;
    }
    if (ucx->address_bytes > TRANSPORT_MAX_ADDRESS_BYTES) {
        status = error_set(err, STATUS_TOO_LARGE,
                           "the worker's address has %zu bytes: fewer network devices, please",
                           ucx->address_bytes);
        goto destroy_worker;
    }
    log_info("transport", "%s, memory kinds: %s, address %zu bytes", ucx->text,
             ucx->has_device_memory ? "host, device" : "host", ucx->address_bytes);
    *ret_ucx = ucx;
    return STATUS_OK;

destroy_worker:
    ucp_worker_destroy(ucx->worker);
    mem_free(ucx->address);
cleanup_context:
    ucp_cleanup(ucx->context);
free_ucx:
    mem_free(ucx);
    return status;
}

void ucx_close(struct ucx *ucx)
{
    if (ucx == NULL) {
        return;
    }
    ucp_worker_destroy(ucx->worker);
    ucp_cleanup(ucx->context);
    mem_free(ucx->address);
    mem_free(ucx);
}

struct ucx_version ucx_version(const struct ucx *ucx)
{
    return ucx->version;
}

const char *ucx_text(const struct ucx *ucx)
{
    return ucx->text;
}

bool ucx_has_device_memory(const struct ucx *ucx)
{
    return ucx->has_device_memory;
}

const uint8_t *ucx_address(const struct ucx *ucx, size_t *ret_bytes)
{
    *ret_bytes = ucx->address_bytes;
    return ucx->address;
}

int ucx_event_fd(const struct ucx *ucx)
{
    return ucx->event_fd;
}

enum status ucx_arm(struct ucx *ucx, struct error *err)
{
    ucs_status_t ucs = ucp_worker_arm(ucx->worker);
    if (ucs == UCS_OK) {
        return STATUS_OK;
    }
    if (ucs == UCS_ERR_BUSY) {
        return STATUS_PENDING;
    }
    return error_set(err, STATUS_SYSTEM, "UCX can't arm its worker: %s", ucs_status_string(ucs));
}

unsigned ucx_progress(struct ucx *ucx)
{
    return ucp_worker_progress(ucx->worker);
}

/* ---- memory ---- */

static enum status memory_query(const struct ucx_memory *memory, ucp_mem_attr_t *attr,
                                struct error *err)
{
    attr->field_mask =
        UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_LENGTH | UCP_MEM_ATTR_FIELD_MEM_TYPE;
    ucs_status_t ucs = ucp_mem_query(memory->handle, attr);
    if (ucs != UCS_OK) {
        return error_set(err, STATUS_SYSTEM, "UCX can't say what it mapped: %s",
                         ucs_status_string(ucs));
    }
    return STATUS_OK;
}

enum status ucx_memory_allocate(struct ucx *ucx, size_t bytes, struct ucx_memory **ret_memory,
                                uint8_t **ret_base, struct error *err)
{
    struct ucx_memory *memory = mem_zalloc(sizeof *memory);
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS |
                      UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .length = bytes,
        .flags = UCP_MEM_MAP_ALLOCATE,
        .prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE |
                UCP_MEM_MAP_PROT_REMOTE_WRITE,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    ucs_status_t ucs = ucp_mem_map(ucx->context, &params, &memory->handle);
    if (ucs != UCS_OK) {
        mem_free(memory);
        return error_set(err, STATUS_EXHAUSTED,
                         "no shared memory for a landing area of %zu bytes (%s): enlarge /dev/shm "
                         "or kernel.shmmax, or make the area smaller",
                         bytes, ucs_status_string(ucs));
    }
    ucp_mem_attr_t attr;
    enum status status = memory_query(memory, &attr, err);
    if (status != STATUS_OK) {
        ucx_memory_free(ucx, memory);
        return status;
    }
    memory->type = UCS_MEMORY_TYPE_HOST;
    *ret_memory = memory;
    *ret_base = attr.address;
    return STATUS_OK;
}

enum status ucx_memory_register(struct ucx *ucx, void *base, size_t bytes, enum region_memory kind,
                                bool landing, struct ucx_memory **ret_memory, struct error *err)
{
    if (kind == REGION_DEVICE && !ucx->has_device_memory) {
        return error_set(
            err, STATUS_UNSUPPORTED,
            "this UCX (%u.%u) has no CUDA support and would take device memory for host "
            "memory: use a UCX built with CUDA, or host landing areas",
            ucx->version.major, ucx->version.minor);
    }
    struct ucx_memory *memory = mem_zalloc(sizeof *memory);
    memory->type = kind == REGION_DEVICE ? UCS_MEMORY_TYPE_CUDA : UCS_MEMORY_TYPE_HOST;
    ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_PROT | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = base,
        .length = bytes,
        .prot = landing ? UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_LOCAL_WRITE |
                              UCP_MEM_MAP_PROT_REMOTE_WRITE
                        : UCP_MEM_MAP_PROT_LOCAL_READ,
        .memory_type = memory->type,
    };
    ucs_status_t ucs = ucp_mem_map(ucx->context, &params, &memory->handle);
    if (ucs != UCS_OK) {
        mem_free(memory);
        return error_set(err, status_of(ucs) == STATUS_EXHAUSTED ? STATUS_EXHAUSTED : STATUS_SYSTEM,
                         "UCX can't register %zu bytes: %s", bytes, ucs_status_string(ucs));
    }
    ucp_mem_attr_t attr;
    enum status status = memory_query(memory, &attr, err);
    if (status == STATUS_OK && attr.mem_type != memory->type) {
        status = error_set(err, STATUS_UNSUPPORTED,
                           "UCX takes this %s memory for kind %d: open the transport before the "
                           "first device allocation",
                           kind == REGION_DEVICE ? "device" : "host", (int)attr.mem_type);
    }
    if (status != STATUS_OK) {
        ucx_memory_free(ucx, memory);
        return status;
    }
    *ret_memory = memory;
    return STATUS_OK;
}

enum status ucx_memory_pack(struct ucx *ucx, struct ucx_memory *memory, uint8_t **ret_rkey,
                            size_t *ret_bytes, struct error *err)
{
    void *packed = NULL;
    size_t bytes = 0;
    ucs_status_t ucs = ucp_rkey_pack(ucx->context, memory->handle, &packed, &bytes);
    if (ucs != UCS_OK) {
        return error_set(err, STATUS_SYSTEM, "UCX can't pack the key of a landing area: %s",
                         ucs_status_string(ucs));
    }
    enum status status = STATUS_OK;
    if (bytes + ENVELOPE_HEADER_BYTES > TRANSPORT_MAX_RKEY_BYTES) {
        status = error_set(err, STATUS_TOO_LARGE, "the key of a landing area has %zu bytes", bytes);
    } else {
        *ret_rkey = envelope_seal(ENVELOPE_RKEY, ucx->version, packed, bytes, ret_bytes);
    }
    ucp_rkey_buffer_release(packed);
    return status;
}

void ucx_memory_free(struct ucx *ucx, struct ucx_memory *memory)
{
    if (memory == NULL) {
        return;
    }
    ucs_status_t ucs = ucp_mem_unmap(ucx->context, memory->handle);
    if (ucs != UCS_OK) {
        log_warn("transport", "UCX can't unmap a region: %s", ucs_status_string(ucs));
    }
    mem_free(memory);
}

/* ---- endpoints ---- */

static void ep_failed(void *arg, ucp_ep_h handle, ucs_status_t ucs)
{
    struct ucx_ep *ep = arg;
    (void)handle;
    ep->failed(ep->cookie, ucs_status_string(ucs));
}

enum status ucx_ep_create(struct ucx *ucx, const uint8_t *address,
                          void (*failed)(void *cookie, const char *text), void *cookie,
                          struct ucx_ep **ret_ep, struct error *err)
{
    struct ucx_ep *ep = mem_zalloc(sizeof *ep);
    ep->failed = failed;
    ep->cookie = cookie;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)(const void *)address,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = ep_failed, .arg = ep},
    };
    ucs_status_t ucs = ucp_ep_create(ucx->worker, &params, &ep->handle);
    if (ucs != UCS_OK) {
        mem_free(ep);
        return error_set(err, STATUS_PEER_LOST, "UCX can't reach the peer: %s",
                         ucs_status_string(ucs));
    }
    *ret_ep = ep;
    return STATUS_OK;
}

static void op_done(void *request, ucs_status_t ucs, void *user_data)
{
    struct ucx_op *op = user_data;
    ucp_request_free(request);
    op->done(op, status_of(ucs));
}

static enum status op_started(ucs_status_ptr_t request)
{
    if (request == NULL) {
        return STATUS_OK;
    }
    if (UCS_PTR_IS_ERR(request)) {
        return status_of(UCS_PTR_STATUS(request));
    }
    return STATUS_PENDING;
}

static ucp_request_param_t op_params(struct ucx_op *op)
{
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
        .cb.send = op_done,
        .user_data = op,
    };
}

enum status ucx_ep_put(struct ucx_ep *ep, const struct ucx_memory *memory, const uint8_t *source,
                       size_t bytes, const struct ucx_rkey *rkey, uint64_t remote_address,
                       struct ucx_op *op)
{
    ucp_request_param_t params = op_params(op);
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    params.memh = memory->handle;
    params.memory_type = memory->type;
    return op_started(
        ucp_put_nbx(ep->handle, source, bytes, remote_address, rkey->handle, &params));
}

enum status ucx_ep_flush(struct ucx_ep *ep, struct ucx_op *op)
{
    ucp_request_param_t params = op_params(op);
    return op_started(ucp_ep_flush_nbx(ep->handle, &params));
}

enum status ucx_ep_close(struct ucx_ep *ep, struct ucx_op *op)
{
    ucp_request_param_t params = op_params(op);
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    params.flags = UCP_EP_CLOSE_FLAG_FORCE;
    return op_started(ucp_ep_close_nbx(ep->handle, &params));
}

void ucx_ep_free(struct ucx_ep *ep)
{
    mem_free(ep);
}

/* Adds a transport's name once. */
static void lanes_add(struct ucx_lanes *lanes, const char *name, size_t bytes)
{
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)(bytes < 60 ? bytes : 60), name);
    if (strncmp(word, "tcp/", 4) != 0) {
        lanes->beyond_tcp = true;
    }
    static const char *const capable[] = {"cuda_ipc", "rc_", "dc_", "ud_", "gdr_copy", "rocm_ipc"};
    for (size_t i = 0; i < sizeof capable / sizeof capable[0]; i++) {
        if (strncmp(word, capable[i], strlen(capable[i])) == 0) {
            lanes->device_capable = true;
        }
    }
    size_t used = strlen(lanes->text);
    if (strstr(lanes->text, word) == NULL && used + strlen(word) + 2 < sizeof lanes->text) {
        snprintf(lanes->text + used, sizeof lanes->text - used, "%s%s", used > 0 ? " " : "", word);
    }
}

/* What ucp_ep_print_info writes of a lane: "# lane[0]:  2:posix/memory.0 md[2] -> ..." */
enum status ucx_ep_lanes(struct ucx_ep *ep, struct ucx_lanes *ret_lanes)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    if (stream == NULL) {
        return STATUS_SYSTEM;
    }
    ucp_ep_print_info(ep->handle, stream);
    fclose(stream);
    struct ucx_lanes lanes = {.text = ""};
    for (const char *at = strstr(text, "lane["); at != NULL; at = strstr(at + 1, "lane[")) {
        const char *name = strchr(at, ':');
        name = name != NULL ? strchr(name + 1, ':') : NULL;
        if (name == NULL) {
            break;
        }
        name++;
        lanes_add(&lanes, name, strcspn(name, " \n."));
    }
    free(text);
    *ret_lanes = lanes;
    return STATUS_OK;
}

enum status ucx_rkey_unpack(struct ucx_ep *ep, const uint8_t *rkey, struct ucx_rkey **ret_rkey,
                            struct error *err)
{
    struct ucx_rkey *unpacked = mem_zalloc(sizeof *unpacked);
    ucs_status_t ucs = ucp_ep_rkey_unpack(ep->handle, rkey, &unpacked->handle);
    if (ucs != UCS_OK) {
        mem_free(unpacked);
        return error_set(err, STATUS_PEER_LOST, "UCX can't use the key of a region of the peer: %s",
                         ucs_status_string(ucs));
    }
    *ret_rkey = unpacked;
    return STATUS_OK;
}

void ucx_rkey_free(struct ucx_rkey *rkey)
{
    if (rkey != NULL) {
        ucp_rkey_destroy(rkey->handle);
        mem_free(rkey);
    }
}

bool ucx_rkey_is_direct(const struct ucx_rkey *rkey, uint64_t remote_base)
{
    void *local = NULL;
    return ucp_rkey_ptr(rkey->handle, remote_base, &local) == UCS_OK;
}
