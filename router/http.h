#ifndef BATON_ROUTER_HTTP_H
#define BATON_ROUTER_HTTP_H

#include "base/httpd.h"
#include "base/metrics.h"
#include "base/service.h"
#include "base/workers.h"
#include "router/api.h"
#include "router/registry.h"
#include "router/request.h"

/*
 * The routes of the router, but those that every process has (service.h). Loop thread.
 */
struct http;

struct http_options {
    struct service *service;
    struct workers *workers;
    struct registry *registry;
    struct requests *requests;
    struct api_context context;  /* what it points to is borrowed */
    uint32_t max_context_tokens; /* of the model, while no node says what it can hold */
};

/* Adds the routes; the server is freed before this. */
struct http *http_create(const struct http_options *options, struct httpd *server,
                         struct metrics *metrics) __attribute__((returns_nonnull)) must_check;

/* NULL is allowed. */
void http_free(struct http *http);

/* Nodes have changed: how long a context may be. */
void http_nodes_changed(struct http *http);

#endif
