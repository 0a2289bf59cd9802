#ifndef BATON_ROUTER_INTAKE_H
#define BATON_ROUTER_INTAKE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/httpd.h"
#include "base/workers.h"
#include "router/api.h"

/*
 * From the body of a request to a checked request and its ids: at once when the body is small, else
 * on a worker thread, so that a prompt of megabytes stalls no stream. Loop thread.
 */

/* What came of a body. Owned by whoever it was given to: intake_free. */
struct intake {
    struct httpd_request *http;
    struct api_context context;  /* as it was when the body came */
    struct api_request *request; /* NULL: refused, see error */
    struct token_ids *prompts;   /* one a prompt of the request; not for API_KIND_DETOKENIZE */
    size_t n_prompts;
    bool failed;
    struct api_error *error; /* failed: why; else NULL, a stream need not carry it */

    /* private */
    enum api_kind kind;
    struct buf body;
    struct workers *workers;
    struct workers_job *job;
    void (*done)(void *cookie, struct intake *intake);
    void *cookie;
};

/*
 * Takes the body of http and calls done, now or later, with an intake that done owns; not if the
 * client leaves first. Until done the intake holds http's on_close. STATUS_EXHAUSTED: too many
 * bodies are waiting; http is then as it was.
 */
enum status must_check intake_start(struct workers *workers, struct httpd_request *http,
                                    enum api_kind kind, const struct api_context *context,
                                    void (*done)(void *cookie, struct intake *intake),
                                    void *cookie);

/* NULL is allowed. */
void intake_free(struct intake *intake);

#endif
