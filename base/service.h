#ifndef BATON_BASE_SERVICE_H
#define BATON_BASE_SERVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/httpd.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "base/status.h"

/*
 * What the daemons share: signals, liveness and readiness, drain and stop, the probe routes, death
 * of the parent, notification of the service manager. One a process, on the loop thread; only
 * service_progress_add may be called from any thread.
 *
 * Life: service_init (first thing in main) -> service_create -> service_attach_httpd -> reasons
 * cleared -> service_run. SIGTERM or SIGINT begins the drain: readiness drops, on_drain runs. The
 * daemon calls service_drained when its work is done. When the grace has passed first, on_grace_end
 * runs (to end running streams with an error), and the process stops half a second later. A second
 * signal stops at once.
 */

struct service;

struct service_config {
    const char *name;       /* "baton-router" */
    const char *version;    /* project version */
    const char *commit;     /* of the build, or "" */
    uint64_t lease_ns;      /* 1.5 s: without progress for that long the process is not alive */
    uint64_t grace_ns;      /* 30 s for the drain */
    bool die_with_parent;   /* SIGTERM when the parent goes */
    bool version_needs_key; /* /version asks for the key (router) */
    loop_fn on_drain;       /* may be NULL: then the drain ends once all requests are answered */
    loop_fn on_grace_end;   /* may be NULL */
    /* the loop stood still for more than half a lease (the process was stopped); may be NULL */
    void (*on_pause)(void *cookie, uint64_t gap_ns);
    /* appends further members to /version, each as ,"key":value; may be NULL */
    void (*version_extra)(void *cookie, struct buf *out);
    void *cookie;
};

void service_config_init(struct service_config *config);

/*
 * Before all else, before threads: SIGPIPE ignored, crash handlers that libraries installed behind
 * our back (UCX does) put back to default, the soft limit of open files raised to the hard one.
 */
void service_init(void);

/*
 * Config strings are borrowed for the life of the service. STATUS_INVALID, STATUS_SYSTEM;
 * STATUS_CANCELLED when die_with_parent is set and the parent died since service_init. The kernel
 * signals the death of the parent's thread that started us: a launcher starts us from one that
 * lasts.
 */
enum status must_check service_create(struct loop *loop, const struct service_config *config,
                                      struct error *err, struct service **ret_service);

/*
 * Adds /healthz, /livez, /readyz, /health, /metrics and /version to the server, registers the
 * server's and the service's metrics, and drains the server with the service. metrics may be NULL:
 * then /metrics has only these. May be called for several servers, before service_run. All of
 * them are freed after the last turn of the loop, in any order.
 */
void service_attach_httpd(struct service *service, struct httpd *server, struct metrics *metrics);

/*
 * Readiness: ready while no reason stands and no drain has begun. A reason is named by what, which
 * is at most 63 bytes and replaces the one before; it is created with the reason "starting".
 */
void service_reason_set(struct service *service, const char *what, const char *fmt, ...)
    PRINTF_LIKE(3, 4);
void service_reason_clear(struct service *service, const char *what);
bool service_ready(const struct service *service);
bool service_draining(const struct service *service);

/*
 * Liveness. The counter advances by itself while nothing is busy, and only by service_progress_add
 * while something is: not alive when it stood still for a lease. Busy nests.
 */
void service_progress_add(struct service *service);
uint64_t service_progress(const struct service *service);
void service_busy_begin(struct service *service);
void service_busy_end(struct service *service);
bool service_alive(const struct service *service);

/* Begins the drain as a first signal would; does nothing when it has begun. */
void service_drain(struct service *service);

/* The daemon's own work is done: answers are flushed (at most half a second), then service_run
 * returns. Does nothing before a drain. */
void service_drained(struct service *service);

/* Stops now; service_run returns this exit code. */
void service_stop(struct service *service, int exit_code);

/*
 * Tells the service manager once the service is first ready, runs the loop, returns the exit code:
 * 0 after a drain, a passed grace or a second signal, else what service_stop said.
 */
int service_run(struct service *service);

/* NULL is allowed. */
void service_free(struct service *service);

#endif
