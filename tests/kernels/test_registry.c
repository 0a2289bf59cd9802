/* The choice among variants, on a backend made up for it: five variants of topk with different
 * needs, on devices that have some of them. The real backends' lists are held to their rules at the
 * end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/registry.h"

/* What a table's topk is, told apart by address alone. */
#define TOPK(name)                                                                    \
    static void name(struct ops_device *device, const struct ops_rows *rows,          \
                     const struct ops_layer *layer, const float *iq, const float *iw, \
                     const struct ops_kv *kv, struct ops_selection *ret_selection)    \
    {                                                                                 \
        ret_selection->n = NULL;                                                      \
    }                                                                                 \
    static void install_##name(struct ops *table)                                     \
    {                                                                                 \
        table->topk = name;                                                           \
    }
TOPK(huge_topk)
TOPK(packed_topk)
TOPK(narrow_topk)
TOPK(slow_topk)

static bool serves_narrow(const struct ops_dims *dims, const struct ops_limits *limits,
                          struct error *why)
{
    if (dims->index_topk <= 512) {
        return true;
    }
    (void)error_set(why, STATUS_UNSUPPORTED, "chooses 512 entries at most, not %u",
                    dims->index_topk);
    return false;
}

static const uint32_t hopper[] = {90, 0}, both[] = {90, 120, 0};

static const struct registry_variant variants[] = {
    {.operation = "embed", .name = "only", .note = "anywhere"},
    {.operation = "topk",
     .name = "huge",
     .note = "all in shared memory",
     .archs = hopper,
     .shared_bytes = 200000,
     .install = install_huge_topk},
    {.operation = "topk",
     .name = "packed",
     .note = "reads packed keys",
     .archs = both,
     .shared_bytes = 99000,
     .layouts = REGISTRY_LAYOUT(FORMATS_ENTRY_PACKED),
     .serves = serves_narrow,
     .install = install_packed_topk},
    {.operation = "topk",
     .name = "narrow",
     .note = "any layout",
     .archs = both,
     .serves = serves_narrow,
     .install = install_narrow_topk},
    {.operation = "topk", .name = "new", .note = "tried by nobody", .is_untried = true},
    {.operation = "topk",
     .name = "slow",
     .note = "to compare with",
     .is_reference = true,
     .install = install_slow_topk},
};

static const struct ops no_ops = {.name = "made-up"};
static const struct registry_backend backend = {"made-up", &no_ops, variants,
                                                sizeof(variants) / sizeof(variants[0])};
static const struct registry_device h200 = {"cuda:0 (sm_90)", 90, 232448};
static const struct registry_device rtx = {"cuda:0 (sm_120)", 120, 101376};
static const struct registry_device small = {"cuda:0 (sm_90, small)", 90, 49152};
static const struct registry_device old = {"cuda:0 (sm_80)", 80, 166912};

/* The lines of one choice, as text. */
struct heard {
    char text[4096];
    size_t bytes, n_chosen;
};

static void hear(void *cookie, const struct registry_line *line)
{
    struct heard *h = cookie;
    h->n_chosen += line->is_chosen;
    h->bytes += (size_t)snprintf(h->text + h->bytes, sizeof(h->text) - h->bytes, "%s %s %s: %s\n",
                                 line->operation, line->variant, line->is_chosen ? "yes" : "no",
                                 line->reason);
    assert_true(h->bytes < sizeof(h->text));
}

struct outcome {
    enum status status;
    struct ops table;
    struct heard heard;
    struct error err;
};

/* The choice on a device for f32 or packed entries and index_topk entries (0: no model is known),
 * with what is asked for by name. */
static struct outcome choose(const struct registry_device *device, enum formats_entry_kind layout,
                             uint32_t index_topk, const char *forced, const char *allowed)
{
    struct outcome o = {.err = {""}};
    struct registry_wishes wishes;
    struct ops_dims dims = {.index_topk = index_topk, .entry_kind = layout};
    struct ops_limits limits = {.n_rows = 1};
    char *forced_items[] = {(char *)(uintptr_t)forced},
         *allowed_items[] = {(char *)(uintptr_t)allowed};
    assert_int_equal(registry_wishes_parse(forced_items, forced != NULL, allowed_items,
                                           allowed != NULL, &wishes, &o.err),
                     STATUS_OK);
    struct registry_query query = {.backend = &backend,
                                   .device = device,
                                   .wishes = &wishes,
                                   .layout = layout,
                                   .dims = index_topk ? &dims : NULL,
                                   .limits = &limits};
    o.status = registry_select(&query, &o.table, hear, &o.heard, &o.err);
    /* Every variant has one line, and a text either way. */
    size_t n_lines = 0;
    for (size_t i = 0; i < o.heard.bytes; i++) {
        n_lines += o.heard.text[i] == '\n';
    }
    assert_int_equal(n_lines, backend.n_variants);
    assert_true(o.status != STATUS_OK || o.heard.n_chosen == 2);
    assert_true(o.status == STATUS_OK || o.table.name == NULL); /* written only on success */
    assert_int_equal(o.status == STATUS_OK, o.err.text[0] == '\0');
    assert_null(strchr(o.err.text, '\n'));
    return o;
}

static void says(const char *text, const char *words)
{
    if (!strstr(text, words)) {
        fail_msg("'%s' is not in: %s", words, text);
    }
}

static void test_best_that_serves(void **state)
{
    struct outcome o = choose(&h200, FORMATS_ENTRY_PACKED, 512, NULL, NULL);
    assert_ptr_equal(o.table.topk, huge_topk);
    says(o.heard.text, "topk huge yes: all in shared memory");
    says(o.heard.text, "topk packed no: huge is better and serves");
    says(o.heard.text, "topk slow no: a reference, which serves only with --allow-reference topk");

    o = choose(&rtx, FORMATS_ENTRY_PACKED, 512, NULL, NULL);
    assert_ptr_equal(o.table.topk, packed_topk);
    says(o.heard.text, "topk huge no: needs sm_90, this is cuda:0 (sm_120)");

    o = choose(&small, FORMATS_ENTRY_PACKED, 512, NULL, NULL);
    assert_ptr_equal(o.table.topk, narrow_topk);
    says(o.heard.text, "topk huge no: needs 200000 bytes of shared memory a block");
    says(o.heard.text, "has 49152");

    o = choose(&rtx, FORMATS_ENTRY_F32, 512, NULL, NULL);
    assert_ptr_equal(o.table.topk, narrow_topk);
    says(o.heard.text, "topk packed no: can't read this cache layout: entries are f32 (--exact), "
                       "it serves packed ones");

    /* A reference that was let in serves only where nothing else does. */
    o = choose(&rtx, FORMATS_ENTRY_PACKED, 512, NULL, "all");
    assert_ptr_equal(o.table.topk, packed_topk);
    says(o.heard.text, "topk slow no: packed is better and serves");
}

static void test_nothing_silent(void **state)
{
    /* A shape, and a device, that no tuned variant serves. */
    struct outcome o = choose(&rtx, FORMATS_ENTRY_PACKED, 1024, NULL, NULL);
    assert_int_equal(o.status, STATUS_UNSUPPORTED);
    says(o.heard.text, "topk narrow no: chooses 512 entries at most, not 1024");
    says(o.err.text, "no tuned kernel of topk serves on cuda:0 (sm_120)");
    says(o.err.text, "--allow-reference topk");
    o = choose(&old, FORMATS_ENTRY_PACKED, 512, NULL, NULL);
    assert_int_equal(o.status, STATUS_UNSUPPORTED);
    says(o.heard.text, "topk narrow no: needs sm_90 or sm_120, this is cuda:0 (sm_80)");

    /* Leave for another operation changes nothing; for this one, or for all, it does. */
    assert_int_equal(choose(&old, FORMATS_ENTRY_PACKED, 512, NULL, "embed").status,
                     STATUS_UNSUPPORTED);
    o = choose(&old, FORMATS_ENTRY_PACKED, 512, NULL, "embed,topk");
    assert_ptr_equal(o.table.topk, slow_topk);
    says(o.heard.text, "topk slow yes: to compare with; let in by --allow-reference");
    assert_ptr_equal(choose(&old, FORMATS_ENTRY_PACKED, 512, NULL, "all").table.topk, slow_topk);

    /* Without a model its shapes are not asked for. */
    assert_ptr_equal(choose(&rtx, FORMATS_ENTRY_PACKED, 0, NULL, NULL).table.topk, packed_topk);
}

static void test_forced(void **state)
{
    struct outcome o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "topk=narrow", NULL);
    assert_ptr_equal(o.table.topk, narrow_topk);
    says(o.heard.text, "topk narrow yes: any layout; asked for by --kernel");
    says(o.heard.text, "topk huge no: --kernel topk=narrow was asked for");

    /* What was asked for and does not serve is not replaced: layout, architecture, shape. */
    o = choose(&h200, FORMATS_ENTRY_F32, 512, "topk=packed", "all");
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "--kernel topk=packed: it can't read this cache layout");
    o = choose(&rtx, FORMATS_ENTRY_PACKED, 512, "topk=huge", "all");
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "--kernel topk=huge: it needs sm_90");
    o = choose(&h200, FORMATS_ENTRY_PACKED, 1024, "topk=narrow", NULL);
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "--kernel topk=narrow: it chooses 512 entries at most");

    o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "topk=quick", NULL);
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "this operation has the variants huge, packed, narrow, new, slow");
    o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "head=quick", NULL);
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "has no variant");

    /* What no card has run is never chosen by itself, not even where nothing else serves. */
    o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "topk=new", NULL);
    assert_int_equal(o.status, STATUS_OK);
    says(o.heard.text, "topk new yes: tried by nobody; asked for by --kernel");
    o = choose(&old, FORMATS_ENTRY_PACKED, 512, NULL, NULL);
    assert_int_equal(o.status, STATUS_UNSUPPORTED);
    says(o.heard.text, "topk new no: it has not run on a card yet: --kernel topk=new tries it");

    /* A reference by name needs leave by name as well. */
    o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "topk=slow", NULL);
    assert_int_equal(o.status, STATUS_INVALID);
    says(o.err.text, "--allow-reference topk");
    o = choose(&h200, FORMATS_ENTRY_PACKED, 512, "topk=slow", "topk");
    assert_ptr_equal(o.table.topk, slow_topk);
}

static void refused(const char *forced, const char *also, const char *allowed, const char *words)
{
    struct registry_wishes wishes;
    struct error err = {""};
    char *forced_items[] = {(char *)(uintptr_t)forced, (char *)(uintptr_t)also};
    char *allowed_items[] = {(char *)(uintptr_t)allowed};
    assert_int_equal(registry_wishes_parse(forced_items, (forced != NULL) + (also != NULL),
                                           allowed_items, allowed != NULL, &wishes, &err),
                     STATUS_INVALID);
    says(err.text, words);
}

static void test_bad_wishes(void **state)
{
    refused("topk", NULL, NULL, "OPERATION=VARIANT");
    refused("topk=", NULL, NULL, "OPERATION=VARIANT");
    refused("topk=a-name-that-is-longer-than-any", NULL, NULL, "OPERATION=VARIANT");
    refused("=slow", NULL, NULL, "no such operation");
    refused("top=slow", NULL, NULL, "they are embed, mhc,");
    refused("topk=a", "topk=b", NULL, "topk=a was asked for as well");
    refused(NULL, NULL, "", "no such operation");
    refused(NULL, NULL, "topk,", "no such operation");
    refused(NULL, NULL, "topk,al", "no such operation");
}

/* The CPU's own list: every operation is served without leave, and what the processor lacks or has
 * decides between the rest; by name the generic code is to be had anywhere. */
static void test_cpu(void **state)
{
    struct registry_choice choice;
    struct error err;
    struct registry_wishes none = {0}, generic;
    struct heard heard = {"", 0, 0};
    assert_int_equal(registry_find("cpu:2", &choice, &err), STATUS_OK);
    struct registry_query query = {.backend = choice.backend,
                                   .device = &choice.device,
                                   .wishes = &none,
                                   .layout = FORMATS_ENTRY_F32};
    assert_int_equal(registry_select(&query, NULL, hear, &heard, &err), STATUS_OK);
    assert_int_equal(heard.n_chosen, REGISTRY_N_OPERATIONS);
    for (int i = 0; i < REGISTRY_N_OPERATIONS; i++) {
        says(heard.text, registry_operations[i]);
    }
    char *items[] = {(char *)(uintptr_t) "products=generic"};
    assert_int_equal(registry_wishes_parse(items, 1, NULL, 0, &generic, &err), STATUS_OK);
    query.wishes = &generic;
    heard = (struct heard){"", 0, 0};
    assert_int_equal(registry_select(&query, NULL, hear, &heard, &err), STATUS_OK);
    says(heard.text, "products generic yes: ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best_that_serves),
        cmocka_unit_test(test_nothing_silent),
        cmocka_unit_test(test_forced),
        cmocka_unit_test(test_bad_wishes),
        cmocka_unit_test(test_cpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
