/* Which variant of each operation: see registry.h.
 *
 * Every variant gets exactly one verdict with one reason, in the order of the needs: what the host
 * has, architecture, shared memory, layout, shapes, and whether a reference was allowed. The choice
 * is read off the verdicts, so that what the list says and what runs can't differ.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/registry.h"

/* Set before devices are opened and only read after. */
static struct registry_wishes process_wishes;

/* Index of the operation of n letters at `name`, or -1. */
static int operation_of(const char *name, size_t n)
{
    for (int i = 0; i < REGISTRY_N_OPERATIONS; i++) {
        if (strlen(registry_operations[i]) == n && memcmp(registry_operations[i], name, n) == 0) {
            return i;
        }
    }
    return -1;
}

/* "a, b, c" of the operations that `has`. */
static void list_operations(const bool *has, const char *between, char *ret_text, size_t bytes)
{
    size_t n = 0;
    ret_text[0] = '\0';
    for (int i = 0; i < REGISTRY_N_OPERATIONS && n < bytes; i++) {
        if (has[i]) {
            n += (size_t)snprintf(ret_text + n, bytes - n, "%s%s", n ? between : "",
                                  registry_operations[i]);
        }
    }
}

static enum status no_operation(const char *option, const char *text, struct error *err)
{
    char names[256];
    bool all[REGISTRY_N_OPERATIONS];
    memset(all, true, sizeof(all));
    list_operations(all, ", ", names, sizeof(names));
    return error_set(err, STATUS_INVALID, "%s %.60s: no such operation; they are %s", option, text,
                     names);
}

static enum status parse_forced(const char *text, struct registry_wishes *wishes, struct error *err)
{
    const char *equals = strchr(text, '=');
    size_t n = equals ? strlen(equals + 1) : 0;
    if (n == 0 || n >= REGISTRY_NAME_BYTES) {
        return error_set(err, STATUS_INVALID,
                         "--kernel %.60s: it is OPERATION=VARIANT, as --list-kernels shows them",
                         text);
    }
    int i = operation_of(text, (size_t)(equals - text));
    if (i < 0) {
        return no_operation("--kernel", text, err);
    }
    if (wishes->forced[i][0]) {
        return error_set(err, STATUS_INVALID, "--kernel %s: %s=%s was asked for as well", text,
                         registry_operations[i], wishes->forced[i]);
    }
    memcpy(wishes->forced[i], equals + 1, n + 1);
    return STATUS_OK;
}

static enum status parse_allowed(const char *text, struct registry_wishes *wishes,
                                 struct error *err)
{
    if (strcmp(text, "all") == 0) {
        memset(wishes->allowed, true, sizeof(wishes->allowed));
        return STATUS_OK;
    }
    for (const char *at = text;; at++) {
        size_t n = strcspn(at, ",");
        int i = operation_of(at, n);
        if (i < 0) {
            return no_operation("--allow-reference", text, err);
        }
        wishes->allowed[i] = true;
        at += n;
        if (!*at) {
            return STATUS_OK;
        }
    }
}

enum status registry_wishes_parse(char *const *forced, size_t n_forced, char *const *allowed,
                                  size_t n_allowed, struct registry_wishes *ret_wishes,
                                  struct error *err)
{
    struct registry_wishes wishes = {0};
    enum status status = STATUS_OK;
    for (size_t i = 0; i < n_forced && !status; i++) {
        status = parse_forced(forced[i], &wishes, err);
    }
    for (size_t i = 0; i < n_allowed && !status; i++) {
        status = parse_allowed(allowed[i], &wishes, err);
    }
    if (!status) {
        *ret_wishes = wishes;
    }
    return status;
}

void registry_wishes_set(const struct registry_wishes *wishes)
{
    process_wishes = *wishes;
}

const struct registry_wishes *registry_wishes_now(void)
{
    return &process_wishes;
}

/* --- the verdict on one variant */

static bool arch_serves(const struct registry_query *q, const struct registry_variant *v,
                        struct error *why)
{
    char names[96] = "";
    size_t n = 0;
    for (const uint32_t *arch = v->archs; arch && *arch; arch++) {
        if (*arch == q->device->arch) {
            return true;
        }
        if (n < sizeof(names)) {
            n += (size_t)snprintf(names + n, sizeof(names) - n, "%ssm_%" PRIu32, n ? " or " : "",
                                  *arch);
        }
    }
    if (!v->archs) {
        return true;
    }
    (void)error_set(why, STATUS_UNSUPPORTED, "needs %s, this is %s", names, q->device->text);
    return false;
}

static bool layout_serves(const struct registry_query *q, const struct registry_variant *v,
                          struct error *why)
{
    if (v->layouts == 0 || v->layouts & REGISTRY_LAYOUT(q->layout)) {
        return true;
    }
    (void)error_set(why, STATUS_UNSUPPORTED,
                    "can't read this cache layout: entries are %s, it serves %s",
                    q->layout == FORMATS_ENTRY_PACKED ? "packed" : "f32 (--exact)",
                    v->layouts & REGISTRY_LAYOUT(FORMATS_ENTRY_PACKED) ? "packed ones" : "f32");
    return false;
}

/* Whether it could run here, allowed or not. */
static bool can_serve(const struct registry_query *q, const struct registry_variant *v,
                      struct error *why)
{
    if ((v->is_here && !v->is_here(why)) || !arch_serves(q, v, why)) {
        return false;
    }
    if (v->shared_bytes > q->device->shared_bytes) {
        (void)error_set(why, STATUS_UNSUPPORTED,
                        "needs %zu bytes of shared memory a block, %s has %zu", v->shared_bytes,
                        q->device->text, q->device->shared_bytes);
        return false;
    }
    if (!layout_serves(q, v, why)) {
        return false;
    }
    return !q->dims || !v->serves || v->serves(q->dims, q->limits, why);
}

/* --- the choice */

/* One operation's variants, and what became of them. */
struct verdict {
    const struct registry_variant *chosen;
    const struct registry_variant *not_allowed; /* a reference that could serve */
    struct error first_why;                     /* of the first that can't */
    bool is_known, has_forced;
};

static bool is_of(const struct registry_variant *v, int operation_i)
{
    return strcmp(v->operation, registry_operations[operation_i]) == 0;
}

static void tell(const struct registry_variant *v, bool is_chosen, const char *reason,
                 registry_line_fn line, void *cookie)
{
    if (line) {
        line(cookie, &(struct registry_line){.operation = v->operation,
                                             .variant = v->name,
                                             .is_chosen = is_chosen,
                                             .is_reference = v->is_reference,
                                             .reason = reason});
    }
}

static void judge_one(const struct registry_query *q, int i, const struct registry_variant *v,
                      struct verdict *verdict, registry_line_fn line, void *cookie)
{
    const char *forced = q->wishes->forced[i];
    bool is_forced = strcmp(v->name, forced) == 0;
    struct error why = {""};
    verdict->is_known = true;
    verdict->has_forced |= is_forced;
    if (!can_serve(q, v, &why)) {
        if (is_forced || (!forced[0] && !verdict->first_why.text[0])) {
            verdict->first_why = why;
        }
    } else if (forced[0] && !is_forced) {
        (void)error_set(&why, STATUS_OK, "--kernel %s=%s was asked for", v->operation, forced);
    } else if (v->is_untried && !is_forced) {
        (void)error_set(&why, STATUS_OK, "it has not run on a card yet: --kernel %s=%s tries it",
                        v->operation, v->name);
    } else if (v->is_reference && !q->wishes->allowed[i]) {
        (void)error_set(&why, STATUS_OK, "a reference, which serves only with --allow-reference %s",
                        v->operation);
        verdict->not_allowed = v;
    } else if (verdict->chosen) {
        (void)error_set(&why, STATUS_OK, "%s is better and serves", verdict->chosen->name);
    } else {
        verdict->chosen = v;
        (void)error_set(&why, STATUS_OK, "%s%s%s", v->note,
                        v->is_reference ? "; let in by --allow-reference" : "",
                        is_forced ? "; asked for by --kernel" : "");
        tell(v, true, why.text, line, cookie);
        return;
    }
    tell(v, false, why.text, line, cookie);
}

static enum status forced_failed(const struct registry_query *q, int i, const struct verdict *v,
                                 struct error *err)
{
    const char *operation = registry_operations[i], *forced = q->wishes->forced[i];
    char names[128] = "";
    size_t n = 0;
    if (v->has_forced && v->not_allowed) {
        return error_set(err, STATUS_INVALID,
                         "--kernel %s=%s: that is a reference, right but slow: let it serve with "
                         "--allow-reference %s",
                         operation, forced, operation);
    }
    if (v->has_forced) {
        return error_set(err, STATUS_INVALID, "--kernel %s=%s: it %s", operation, forced,
                         v->first_why.text);
    }
    for (size_t k = 0; k < q->backend->n_variants && n < sizeof(names); k++) {
        if (is_of(&q->backend->variants[k], i)) {
            n += (size_t)snprintf(names + n, sizeof(names) - n, "%s%s", n ? ", " : "",
                                  q->backend->variants[k].name);
        }
    }
    return error_set(err, STATUS_INVALID, "--kernel %s=%s: on %s this operation has %s%s",
                     operation, forced, q->device->text, n ? "the variants " : "no variant", names);
}

/* Of all operations at once: one start shall say all that is missing. */
static enum status choice_failed(const struct registry_query *q, const struct verdict *verdicts,
                                 struct error *err)
{
    bool missing[REGISTRY_N_OPERATIONS] = {false};
    bool any = false;
    char names[160], option[160];
    for (int i = 0; i < REGISTRY_N_OPERATIONS; i++) {
        const struct verdict *v = &verdicts[i];
        if (v->chosen || (!v->is_known && !q->wishes->forced[i][0])) {
            continue;
        }
        if (q->wishes->forced[i][0]) {
            return forced_failed(q, i, v, err);
        }
        if (!v->not_allowed) {
            return error_set(err, STATUS_UNSUPPORTED, "no kernel of %s serves on %s: it %s",
                             registry_operations[i], q->device->text, v->first_why.text);
        }
        missing[i] = any = true;
    }
    if (!any) {
        return STATUS_OK;
    }
    list_operations(missing, ", ", names, sizeof(names));
    list_operations(missing, ",", option, sizeof(option));
    return error_set(err, STATUS_UNSUPPORTED,
                     "no tuned kernel of %s serves on %s (--list-kernels says why); the reference "
                     "is right but slow, and serves with --allow-reference %s",
                     names, q->device->text, option);
}

enum status registry_select(const struct registry_query *q, struct ops *ret_table,
                            registry_line_fn line, void *cookie, struct error *err)
{
    struct verdict verdicts[REGISTRY_N_OPERATIONS];
    memset(verdicts, 0, sizeof(verdicts));
    for (int i = 0; i < REGISTRY_N_OPERATIONS; i++) {
        for (size_t k = 0; k < q->backend->n_variants; k++) {
            const struct registry_variant *v = &q->backend->variants[k];
            if (is_of(v, i)) {
                judge_one(q, i, v, &verdicts[i], line, cookie);
            }
        }
    }
    enum status status = choice_failed(q, verdicts, err);
    if (status || !ret_table) {
        return status;
    }
    struct ops table = *q->backend->ops;
    for (int i = 0; i < REGISTRY_N_OPERATIONS; i++) {
        if (verdicts[i].chosen && verdicts[i].chosen->install) {
            verdicts[i].chosen->install(&table);
        }
    }
    if (q->backend->finish) {
        q->backend->finish(&table);
    }
    *ret_table = table;
    return STATUS_OK;
}
