#ifndef BATON_ROUTER_OPTIONS_H
#define BATON_ROUTER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/opts.h"

/*
 * The options of baton-router.
 */
struct options {
    /* network */
    char *host, *grpc_host, *cluster_token, *tls_cert, *tls_key, *tls_ca;
    int64_t http_port, grpc_port;
    struct opt_list api_keys, cors_origins;
    uint64_t max_body_bytes;
    int64_t max_connections, max_requests;
    /* model */
    char *model, *encoding;
    struct opt_list served_names;
    int effort;
    bool thinking;
    /* requests */
    uint64_t queue_timeout_ns, prefill_timeout_ns, transfer_timeout_ns, generation_timeout_ns;
    int64_t n_attempts, n_workers;
    int local_prefill;
    /* process */
    uint64_t grace_ns, lease_ns;
    int log_level;
    bool log_json, die_with_parent;
};

/* Words of a request's reasoning_effort, by options.effort; the last is NULL. */
extern const char *const options_efforts[];

extern const struct opt_program options_program;

#endif
