/*
 * The routes of the harness for clients that others wrote: prints its port, serves until standard
 * input ends. /stream gets two events and a clean end as soon as it is asked for, /cut the same
 * without the end.
 */
#include "httpd_harness.h"

#include <stdio.h>
#include <unistd.h>

static void two_events(struct httpd_request *request)
{
    httpd_stream_start(request, 200, "text/event-stream");
    for (int i = 1; i <= 2; i++) {
        char text[32];
        int n = snprintf(text, sizeof(text), "data: %d\n\n", i);

        if (httpd_stream_write(request, text, (size_t)n) != STATUS_OK) {
            return; /* dropped: it is not ours any more */
        }
    }
}

static void on_whole(void *cookie, struct httpd_request *request)
{
    two_events(request);
    httpd_stream_end(request);
}

static void on_cut(void *cookie, struct httpd_request *request)
{
    two_events(request);
    httpd_stream_abort(request);
}

static void add_routes(struct harness *h, void *cookie)
{
    httpd_route_add(h->server, &(struct httpd_route){HTTPD_GET, "/whole", 0, on_whole, NULL});
    httpd_route_add(h->server, &(struct httpd_route){HTTPD_GET, "/cut", 0, on_cut, NULL});
}

int main(void)
{
    struct httpd_config config;
    struct harness h;
    char byte;

    httpd_config_init(&config);
    harness_start(&h, &config);
    harness_call(&h, add_routes, NULL);
    printf("%u\n", h.port);
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0) {
    }
    harness_stop(&h);
    return 0;
}
