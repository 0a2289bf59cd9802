/*
 * See http.h. A handler answers at once, or gives the request to intake and then to the requests;
 * what it says is rendered by api_render.
 */
#include "router/http.h"

#include <string.h>
#include <time.h>

#include "base/json.h"
#include "base/mem.h"
#include "router/api_render.h"
#include "router/intake.h"

struct http {
    struct http_options options;
    int64_t created_s;
    struct metric_counter *unknown_fields, *refused;
};

static const char json_type[] = "application/json";

static void reply_error(struct httpd_request *request, const struct api_error *error)
{
    httpd_reply_error(request, error->status, error->type, error->code,
                      error->param[0] ? error->param : NULL, "%s", error->message.text);
}

static void reply_buf(struct httpd_request *request, struct buf *out)
{
    httpd_reply(request, 200, json_type, out->data, out->bytes);
    buf_fini(out);
}

/* ---- bodies ---- */

static void on_intake(void *cookie, struct intake *intake)
{
    struct http *http = cookie;
    struct buf out = BUF_INIT;
    if (intake->failed) {
        metric_counter_add(http->refused, 1);
        reply_error(intake->http, intake->error);
        intake_free(intake);
        return;
    }
    metric_counter_add(http->unknown_fields, intake->request->n_unknown);
    switch (intake->kind) {
    case API_KIND_CHAT:
    case API_KIND_COMPLETIONS:
        requests_begin(http->options.requests, intake);
        return;
    case API_KIND_TOKENIZE:
        api_render_tokens(&intake->context, &intake->prompts[0], &out);
        break;
    case API_KIND_DETOKENIZE:
        api_render_text(intake->request, &intake->context, &out);
        break;
    }
    reply_buf(intake->http, &out);
    intake_free(intake);
}

static void take(struct http *http, struct httpd_request *request, enum api_kind kind)
{
    struct api_error error;
    bool is_work = kind == API_KIND_CHAT || kind == API_KIND_COMPLETIONS;
    if (is_work && service_draining(http->options.service)) {
        api_error_set(&error, API_CODE_DRAINING, NULL, "this router is shutting down");
        httpd_retry_after(request, 1);
        httpd_close_after(request);
        reply_error(request, &error);
        return;
    }
    if ((is_work && !requests_have_room(http->options.requests)) ||
        intake_start(http->options.workers, request, kind, &http->options.context, on_intake,
                     http)) {
        api_error_set(&error, API_CODE_QUEUE_FULL, NULL,
                      "this router has as many requests as it takes at once");
        httpd_retry_after(request, 1);
        reply_error(request, &error);
    }
}

static void on_chat(void *cookie, struct httpd_request *request)
{
    take(cookie, request, API_KIND_CHAT);
}

static void on_completions(void *cookie, struct httpd_request *request)
{
    take(cookie, request, API_KIND_COMPLETIONS);
}

static void on_tokenize(void *cookie, struct httpd_request *request)
{
    take(cookie, request, API_KIND_TOKENIZE);
}

static void on_detokenize(void *cookie, struct httpd_request *request)
{
    take(cookie, request, API_KIND_DETOKENIZE);
}

/* ---- questions ---- */

static void on_models(void *cookie, struct httpd_request *request)
{
    struct http *http = cookie;
    struct buf out = BUF_INIT;
    api_render_models(&http->options.context, http->created_s, &out);
    reply_buf(request, &out);
}

static void on_model(void *cookie, struct httpd_request *request)
{
    struct http *http = cookie;
    struct buf out = BUF_INIT;
    struct api_error error;
    const char *name = httpd_request_rest(request);
    if (api_render_model(&http->options.context, name, strlen(name), http->created_s, &out,
                         &error)) {
        reply_error(request, &error);
        return;
    }
    reply_buf(request, &out);
}

static void on_workers(void *cookie, struct httpd_request *request)
{
    struct http *http = cookie;
    struct buf out = BUF_INIT;
    struct json_writer w;
    json_writer_init(&w, &out);
    json_begin_object(&w);
    json_key(&w, "workers");
    registry_write_json(http->options.registry, &w);
    json_end_object(&w);
    reply_buf(request, &out);
}

static void on_debug_requests(void *cookie, struct httpd_request *request)
{
    struct http *http = cookie;
    struct buf out = BUF_INIT;
    struct json_writer w;
    json_writer_init(&w, &out);
    json_begin_object(&w);
    json_key(&w, "requests");
    requests_write_json(http->options.requests, &w);
    json_end_object(&w);
    reply_buf(request, &out);
}

/* ---- life ---- */

struct http *http_create(const struct http_options *options, struct httpd *server,
                         struct metrics *metrics)
{
    struct http *http = mem_zalloc(sizeof(*http));
    const unsigned body = HTTPD_ROUTE_BODY | HTTPD_ROUTE_JSON;
    http->options = *options;
    http->created_s = (int64_t)time(NULL);
    http->unknown_fields =
        metrics_counter(metrics, "baton_unknown_fields_total",
                        "Fields of bodies that were not known and ignored.", METRIC_NO_LABELS);
    http->refused = metrics_counter(metrics, "baton_requests_invalid_total",
                                    "Requests whose body was refused.", METRIC_NO_LABELS);
    http_nodes_changed(http);
    const struct httpd_route routes[] = {
        {HTTPD_POST, "/v1/chat/completions", body, on_chat, http},
        {HTTPD_POST, "/v1/completions", body, on_completions, http},
        {HTTPD_POST, "/tokenize", body, on_tokenize, http},
        {HTTPD_POST, "/detokenize", body, on_detokenize, http},
        {HTTPD_GET, "/v1/models", 0, on_models, http},
        {HTTPD_GET, "/v1/models/", 0, on_model, http},
        {HTTPD_GET, "/workers", 0, on_workers, http},
        {HTTPD_GET, "/debug/requests", 0, on_debug_requests, http},
    };
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        httpd_route_add(server, &routes[i]);
    }
    return http;
}

void http_free(struct http *http)
{
    mem_free(http);
}

void http_nodes_changed(struct http *http)
{
    uint32_t n = registry_max_context_tokens(http->options.registry);
    if (n) {
        http->options.context.max_context_tokens = n;
    } else if (!http->options.context.max_context_tokens) {
        http->options.context.max_context_tokens = http->options.max_context_tokens;
    }
}
