/* What project=joined stands for: the inputs of a table are there where it serves and both kernels
 * that go with it do, and nowhere else. Of its bits: tests/eval/check_joined.py.
 *
 * test_joined [cuda:N]. 77 without it.
 */
#include "tests/kernels/backends.h"

static int check(const struct registry_choice *choice, const char *forced, bool wanted)
{
    struct ops table;
    struct registry_wishes wishes;
    struct error err = {""};
    char *item = (char *)(uintptr_t)forced, all[] = "all", *allowed = all;
    const struct registry_query query = {.backend = choice->backend,
                                         .device = &choice->device,
                                         .wishes = &wishes,
                                         .layout = FORMATS_ENTRY_PACKED};
    if (registry_wishes_parse(&item, forced ? 1 : 0, &allowed, 1, &wishes, &err) ||
        registry_select(&query, &table, NULL, NULL, &err)) {
        stop("registry", &err);
    }
    const bool is_there = table.inputs != NULL;
    printf("%s: %s\n", forced ? forced : "by itself", is_there ? "joined" : "apart");
    return is_there != wanted;
}

int main(int argc, char **argv)
{
    struct registry_choice choice;
    struct error err = {""};
    if (registry_find(argc > 1 ? argv[1] : "cuda:0", &choice, &err)) {
        printf("skipped: %s\n", err.text);
        return 77;
    }
    const int n_wrong =
        check(&choice, NULL, true) + check(&choice, "project=joined", true) +
        check(&choice, "project=tensor", false) + check(&choice, "indexer=reference", false) +
        check(&choice, "indexer=scaled", false) + check(&choice, "compress=reference", false);
    printf("%d wrong\n", n_wrong);
    return n_wrong ? 1 : 0;
}
