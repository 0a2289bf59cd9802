/*
 * What the fault points of a drill build do: see fault.h.
 *
 * Owns the rules, in the order in which they were armed; the first that matches a pass, has passes
 * to let go no more, and draws its probability, decides. One lock guards all of it, since compute
 * and copy threads come here too; a drill build is not measured for speed.
 *
 * The invariant: with the same seed and the same order of passes the same faults happen.
 */
#include "base/fault.h"

#include <assert.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/httpd.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"

enum { MAX_RULES = 512, MAX_SPEC = 256 };

struct rule {
    enum fault_point point;
    enum fault_action action;
    double probability;
    uint64_t n_left, n_after;
    uint32_t ms;
};

static const struct {
    const char *name;
    unsigned actions;
    const char *what;
} points[FAULT_N_POINTS] = {
#define ROW(id, name, actions, what) {name, actions, what},
    FAULT_POINTS(ROW)
#undef ROW
};

static const char *const action_names[FAULT_N_ACTIONS] = {
    "off", "fail", "drop", "delay", "duplicate", "reorder", "corrupt", "cut", "kill", "stop"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct rule rules[MAX_RULES];
static size_t n_rules;
static uint64_t random_state = 1;
static struct {
    uint64_t n_passes, n_faults;
} counts[FAULT_N_POINTS];

static double draw(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

struct fault_hit fault_hit(enum fault_point point)
{
    struct fault_hit hit = {FAULT_NONE, 0};
    assert(point < FAULT_N_POINTS);
    pthread_mutex_lock(&lock);
    counts[point].n_passes++;
    for (size_t i = 0; i < n_rules && hit.action == FAULT_NONE; i++) {
        struct rule *rule = &rules[i];
        if (rule->point != point || rule->n_left == 0) {
            continue;
        }
        if (rule->n_after > 0) {
            rule->n_after--;
        } else if (rule->probability >= 1 || draw() < rule->probability) {
            rule->n_left--;
            counts[point].n_faults++;
            hit = (struct fault_hit){rule->action, rule->ms};
        }
    }
    pthread_mutex_unlock(&lock);
    if (hit.action != FAULT_NONE) {
        log_warn("fault", "%s: %s", points[point].name, action_names[hit.action]);
    }
    if (hit.action == FAULT_KILL || hit.action == FAULT_STOP) {
        raise(hit.action == FAULT_KILL ? SIGKILL : SIGSTOP);
        hit.action = FAULT_NONE;
    }
    return hit;
}

enum fault_action fault_hit_wait(enum fault_point point)
{
    struct fault_hit hit = fault_hit(point);
    if (hit.action == FAULT_DELAY) {
        struct timespec time = {hit.ms / 1000, (long)(hit.ms % 1000) * 1000000};
        nanosleep(&time, NULL);
    }
    return hit.action;
}

enum fault_point fault_find(const char *message, const char *field)
{
    size_t n = strlen(message);
    for (int i = 0; i < FAULT_N_POINTS; i++) {
        const char *name = points[i].name;
        if (strncmp(name, message, n) == 0 && name[n] == '.' && strcmp(name + n + 1, field) == 0) {
            return (enum fault_point)i;
        }
    }
    return FAULT_N_POINTS;
}

const char *fault_name(enum fault_point point)
{
    return points[point].name;
}

/* ---- arming ---- */

static bool option_read(struct rule *rule, const char *key, const char *value)
{
    char *end;
    double number = strtod(value, &end);
    if (end == value || *end || !(number >= 0) || number > 1e15) {
        return false;
    }
    if (strcmp(key, "p") == 0 && number <= 1) {
        rule->probability = number;
    } else if (strcmp(key, "n") == 0) {
        rule->n_left = (uint64_t)number;
    } else if (strcmp(key, "after") == 0) {
        rule->n_after = (uint64_t)number;
    } else if (strcmp(key, "ms") == 0 && number <= 3600000) {
        rule->ms = (uint32_t)number;
    } else {
        return false;
    }
    return true;
}

static void rules_forget(enum fault_point point)
{
    size_t n = 0;
    for (size_t i = 0; i < n_rules; i++) {
        if (rules[i].point != point) {
            rules[n++] = rules[i];
        }
    }
    n_rules = n;
}

/* With the lock. */
static enum status rules_apply(const char *pattern, const struct rule *rule, struct error *err)
{
    size_t n_found = 0, n_armed = 0;
    for (int i = 0; i < FAULT_N_POINTS; i++) {
        if (fnmatch(pattern, points[i].name, 0) != 0) {
            continue;
        }
        n_found++;
        if (rule->action == FAULT_NONE) {
            rules_forget((enum fault_point)i);
            n_armed++;
        } else if (points[i].actions & (1u << rule->action)) {
            if (n_rules == MAX_RULES) {
                return error_set(err, STATUS_EXHAUSTED, "more than %d fault rules", MAX_RULES);
            }
            rules[n_rules] = *rule;
            rules[n_rules++].point = (enum fault_point)i;
            n_armed++;
        }
    }
    if (n_found == 0) {
        return error_set(err, STATUS_INVALID, "no fault point is called %s", pattern);
    }
    if (n_armed == 0) {
        return error_set(err, STATUS_INVALID, "%s can't %s", pattern, action_names[rule->action]);
    }
    return STATUS_OK;
}

enum status fault_arm(const char *spec, struct error *err)
{
    char text[MAX_SPEC], *rest = text;
    struct rule rule = {
        .action = FAULT_N_ACTIONS, .probability = 1, .n_left = UINT64_MAX, .ms = 100};
    if ((size_t)snprintf(text, sizeof(text), "%s", spec) >= sizeof(text)) {
        return error_set(err, STATUS_INVALID, "a fault point's text is longer than %d", MAX_SPEC);
    }
    const char *pattern = strsep(&rest, "=");
    const char *action = strsep(&rest, ",");
    for (int i = 0; action && i < FAULT_N_ACTIONS; i++) {
        if (strcmp(action, action_names[i]) == 0) {
            rule.action = (enum fault_action)i;
        }
    }
    if (rule.action == FAULT_N_ACTIONS) {
        return error_set(err, STATUS_INVALID,
                         "%s: want NAME=ACTION[,p=][,n=][,after=][,ms=]; --list-fault-points",
                         spec);
    }
    while (rest) {
        const char *value = strsep(&rest, ",");
        char *at = strchr(value, '=');
        if (at) {
            *at = '\0';
        }
        if (!at || !option_read(&rule, value, at + 1)) {
            return error_set(err, STATUS_INVALID, "%s: %s is no number that %s can have", spec,
                             at ? at + 1 : "nothing", value);
        }
    }
    pthread_mutex_lock(&lock);
    enum status status = rules_apply(pattern, &rule, err);
    pthread_mutex_unlock(&lock);
    return status;
}

/* Several, with `separator` between; empty ones are skipped. */
static enum status arm_all(const char *text, const char *separator, struct error *err)
{
    char *copy = mem_strdup(text), *rest = copy;
    enum status status = STATUS_OK;
    const char *spec;
    while (!status && (spec = strsep(&rest, separator)) != NULL) {
        if (spec[0]) {
            status = fault_arm(spec, err);
        }
    }
    mem_free(copy);
    return status;
}

/* ---- start ---- */

static void list_print(void)
{
    for (int i = 0; i < FAULT_N_POINTS; i++) {
        printf("%-22s ", points[i].name);
        const char *comma = "";
        for (int a = FAULT_FAIL; a < FAULT_N_ACTIONS; a++) {
            if (points[i].actions & (1u << a)) {
                printf("%s%s", comma, action_names[a]);
                comma = ",";
            }
        }
        printf("  %s\n", points[i].what);
    }
}

static const char *option_value(const char *name, int argc, char **argv, int *at)
{
    size_t n = strlen(name);
    if (strncmp(argv[*at], name, n) != 0 || (argv[*at][n] && argv[*at][n] != '=')) {
        return NULL;
    }
    if (argv[*at][n] == '=') {
        return argv[*at] + n + 1;
    }
    return *at + 1 < argc ? argv[++*at] : "";
}

void fault_start(int *argc, char **argv)
{
    struct error err = {""};
    const char *seed = getenv("BATON_FAULT_SEED"), *armed = getenv("BATON_FAULT_POINT"), *value;
    enum status status = armed ? arm_all(armed, ";", &err) : STATUS_OK;
    int n = 1;
    for (int i = 1; i < *argc && !status; i++) {
        if (strcmp(argv[i], "--list-fault-points") == 0) {
            list_print();
            exit(0);
        }
        if ((value = option_value("--fault-point", *argc, argv, &i)) != NULL) {
            status = fault_arm(value, &err);
        } else if ((value = option_value("--fault-seed", *argc, argv, &i)) != NULL) {
            seed = value;
        } else {
            argv[n++] = argv[i];
        }
    }
    if (status) {
        fprintf(stderr, "fault points: %s\n", err.text);
        exit(2);
    }
    argv[ *argc = n] = NULL;
    random_state = seed ? strtoull(seed, NULL, 0) : 1;
}

/* ---- while it runs ---- */

static void on_faults(void *cookie, struct httpd_request *request)
{
    size_t n_bytes;
    const uint8_t *bytes = httpd_request_body(request, &n_bytes);
    struct error err = {""};
    struct buf text = BUF_INIT;
    buf_append(&text, bytes, n_bytes);
    char *specs = buf_take(&text, NULL);
    enum status status = arm_all(specs, "\n", &err);
    mem_free(specs);
    if (status) {
        httpd_reply_error(request, 400, "invalid_request_error", NULL, NULL, "%s", err.text);
    } else {
        httpd_reply(request, 200, "text/plain", "armed\n", 6);
    }
}

static void on_show(void *cookie, struct httpd_request *request)
{
    struct buf out = BUF_INIT;
    struct json_writer w;
    json_writer_init(&w, &out);
    json_begin_object(&w);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < FAULT_N_POINTS; i++) {
        json_key(&w, points[i].name);
        json_begin_object(&w);
        json_pair_uint(&w, "passes", counts[i].n_passes);
        json_pair_uint(&w, "faults", counts[i].n_faults);
        json_end_object(&w);
    }
    pthread_mutex_unlock(&lock);
    json_end_object(&w);
    httpd_reply(request, 200, "application/json", out.data, out.bytes);
    buf_fini(&out);
}

void fault_attach_httpd(struct httpd *server)
{
    httpd_route_add(server, &(struct httpd_route){HTTPD_GET, "/debug/faults", 0, on_show, NULL});
    httpd_route_add(server, &(struct httpd_route){HTTPD_POST, "/debug/faults", HTTPD_ROUTE_BODY,
                                                  on_faults, NULL});
}
