/*
 * See intake.h. A job's intake belongs to the worker while it runs; if the client leaves meanwhile
 * the job is cancelled and the intake freed when the worker is done with it.
 */
#include "router/intake.h"

#include "base/mem.h"

/* Bodies up to this size are read and tokenized at once: some tens of microseconds. */
enum { INLINE_BYTES = 2048 };

void intake_free(struct intake *intake)
{
    if (!intake) {
        return;
    }
    for (size_t i = 0; i < intake->n_prompts; i++) {
        token_ids_fini(&intake->prompts[i]);
    }
    mem_free(intake->prompts);
    mem_free(intake->error);
    api_request_free(intake->request);
    buf_fini(&intake->body);
    mem_free(intake);
}

static void refuse(struct intake *intake, const struct api_error *error)
{
    intake->failed = true;
    intake->error = mem_alloc(sizeof(*intake->error));
    *intake->error = *error;
}

static void intake_run(struct intake *intake, const uint8_t *body, size_t bytes,
                       struct workers_job *job)
{
    struct api_error error;
    if (api_parse(intake->kind, body, bytes, &intake->context, &intake->request, &error)) {
        intake->request = NULL;
        refuse(intake, &error);
        return;
    }
    if (intake->kind == API_KIND_DETOKENIZE) {
        return;
    }
    intake->n_prompts = intake->request->n_prompts;
    intake->prompts = mem_array(intake->n_prompts + 1, sizeof(*intake->prompts));
    for (size_t i = 0; i < intake->n_prompts && !intake->failed; i++) {
        if (job && workers_job_cancelled(job)) {
            return;
        }
        if (api_encode(intake->request, &intake->context, i, &intake->prompts[i], &error)) {
            refuse(intake, &error);
        }
    }
}

static void run(void *cookie, struct workers_job *job)
{
    struct intake *intake = cookie;
    intake_run(intake, intake->body.data, intake->body.bytes, job);
    buf_fini(&intake->body);
}

static void done(void *cookie)
{
    struct intake *intake = cookie;
    intake->job = NULL;
    httpd_request_on_close(intake->http, NULL, NULL);
    intake->done(intake->cookie, intake);
}

static void drop(void *cookie)
{
    intake_free(cookie);
}

static void on_close(void *cookie, struct httpd_request *http)
{
    struct intake *intake = cookie;
    workers_cancel(intake->workers, intake->job);
}

enum status intake_start(struct workers *workers, struct httpd_request *http, enum api_kind kind,
                         const struct api_context *context,
                         void (*done_fn)(void *cookie, struct intake *intake), void *cookie)
{
    struct intake *intake = mem_zalloc(sizeof(*intake));
    size_t bytes;
    const uint8_t *body = httpd_request_body(http, &bytes);
    intake->http = http;
    intake->context = *context;
    intake->kind = kind;
    intake->workers = workers;
    intake->done = done_fn;
    intake->cookie = cookie;
    if (bytes <= INLINE_BYTES) {
        intake_run(intake, body, bytes, NULL);
        done_fn(cookie, intake);
        return STATUS_OK;
    }
    httpd_request_take_body(http, &intake->body);
    enum status status = workers_submit(workers, run, done, drop, intake, &intake->job);
    if (status) {
        intake_free(intake);
        return status;
    }
    httpd_request_on_close(http, on_close, intake);
    return STATUS_OK;
}
