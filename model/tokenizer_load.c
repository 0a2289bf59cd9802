/*
 * tokenizer.json to the compact table. The file is a description of a pipeline; this reader knows
 * one pipeline, compares each stage with it and refuses, by name, whatever would change ids or
 * text. Of the model it checks what encoding relies on: ids dense and unique, a token for every
 * byte, merges that join two tokens into a third, added tokens that agree with the vocabulary.
 */
#include <string.h>
#include <sys/stat.h>

#include <xxhash.h>

#include "base/json.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "model/pretoken.h"
#include "model/tokenizer.h"
#include "model/tokenizer_table.h"

/* Of an added token: the cost of looking for it at one place of a text. */
enum { MAX_ADDED_BYTES = 512 };

/* What reading needs beside the table. */
struct load {
    struct tokenizer *t;
    const struct json *root;
    const struct json **added; /* by id; NULL: not an added token */
    const char **token;        /* by id: the text in the file */
    size_t *token_bytes;
    uint32_t n_model;       /* ids of the model's own vocabulary */
    int16_t byte_of[0x144]; /* byte alphabet to byte; -1: not of the alphabet */
    struct error *err;
};

/* ---------------------------------------------------------------------------------- the stages */

static enum status unsupported(struct load *l, const char *what, const struct json *value)
{
    size_t bytes;
    const char *text = json_text(value, &bytes);
    if (text == NULL) {
        text = json_kind_name(json_kind_of(value));
    }
    return error_set(l->err, STATUS_UNSUPPORTED, "tokenizer.json: %s '%.80s' is not implemented",
                     what, text);
}

static bool is_absent(const struct json *value)
{
    return json_kind_of(value) == JSON_KIND_NULL;
}

/* Whether a flag is off or absent. */
static bool is_off(const struct json *object, const char *key)
{
    const struct json *value = json_get(object, key);
    bool flag = false;
    return is_absent(value) || (json_bool(value, &flag) && !flag);
}

static enum status check_split(struct load *l, const struct json *split, const char *pattern)
{
    const struct json *type = json_get(split, "type");
    if (!json_text_is(type, "Split")) {
        return unsupported(l, "pre-tokenizer", type);
    }
    const struct json *regex = json_get(json_get(split, "pattern"), "Regex");
    if (!json_text_is(regex, pattern)) {
        return unsupported(l, "split pattern", regex);
    }
    if (!json_text_is(json_get(split, "behavior"), "Isolated")) {
        return unsupported(l, "split behavior", json_get(split, "behavior"));
    }
    if (!is_off(split, "invert")) {
        return unsupported(l, "inverted split", json_get(split, "invert"));
    }
    return STATUS_OK;
}

static enum status check_pre_tokenizer(struct load *l)
{
    const struct json *pre = json_get(l->root, "pre_tokenizer");
    if (!json_text_is(json_get(pre, "type"), "Sequence")) {
        return unsupported(l, "pre-tokenizer", json_get(pre, "type"));
    }
    const struct json *stages = json_get(pre, "pretokenizers");
    for (size_t i = 0; i < PRETOKEN_N_PATTERNS; i++) {
        enum status status = check_split(l, json_array_at(stages, i), pretoken_patterns[i]);
        if (status != STATUS_OK) {
            return status;
        }
    }
    const struct json *bytes = json_array_at(stages, PRETOKEN_N_PATTERNS);
    if (!json_text_is(json_get(bytes, "type"), "ByteLevel")) {
        return unsupported(l, "pre-tokenizer", json_get(bytes, "type"));
    }
    bool flag;
    if (!is_off(bytes, "add_prefix_space")) {
        return unsupported(l, "add_prefix_space", json_get(bytes, "add_prefix_space"));
    }
    if (!json_bool(json_get(bytes, "use_regex"), &flag) || flag) {
        return unsupported(l, "use_regex", json_get(bytes, "use_regex"));
    }
    if (json_array_n(stages) != PRETOKEN_N_PATTERNS + 1) {
        return unsupported(l, "pre-tokenizer after", json_get(bytes, "type"));
    }
    return STATUS_OK;
}

static enum status check_around(struct load *l)
{
    if (!is_absent(json_get(l->root, "truncation"))) {
        return unsupported(l, "stage", json_get(l->root, "truncation"));
    }
    if (!is_absent(json_get(l->root, "padding"))) {
        return unsupported(l, "stage", json_get(l->root, "padding"));
    }
    const struct json *normalizer = json_get(l->root, "normalizer");
    if (!is_absent(normalizer)) {
        const struct json *type = json_get(normalizer, "type");
        const struct json *steps = json_get(normalizer, "normalizers");
        if (!json_text_is(type, "Sequence") || json_kind_of(steps) != JSON_KIND_ARRAY) {
            return unsupported(l, "normalizer", type);
        }
        if (json_array_n(steps) > 0) {
            return unsupported(l, "normalizer", json_get(json_array_at(steps, 0), "type"));
        }
    }
    /* the byte-level one only moves offsets */
    const struct json *post = json_get(l->root, "post_processor");
    if (!is_absent(post) && !json_text_is(json_get(post, "type"), "ByteLevel")) {
        return unsupported(l, "post-processor", json_get(post, "type"));
    }
    const struct json *decoder = json_get(json_get(l->root, "decoder"), "type");
    if (!json_text_is(decoder, "ByteLevel")) {
        return unsupported(l, "decoder", decoder);
    }
    return STATUS_OK;
}

static enum status check_model(struct load *l, const struct json *model)
{
    static const char *const absent[] = {"dropout", "unk_token", "continuing_subword_prefix",
                                         "end_of_word_suffix"};
    static const char *const off[] = {"fuse_unk", "byte_fallback", "ignore_merges"};
    if (json_kind_of(model) != JSON_KIND_OBJECT) {
        return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: no model");
    }
    const struct json *type = json_get(model, "type");
    if (!is_absent(type) && !json_text_is(type, "BPE")) {
        return unsupported(l, "model", type);
    }
    for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
        if (!is_absent(json_get(model, absent[i]))) {
            return unsupported(l, absent[i], json_get(model, absent[i]));
        }
    }
    for (size_t i = 0; i < sizeof(off) / sizeof(off[0]); i++) {
        if (!is_off(model, off[i])) {
            return unsupported(l, off[i], json_get(model, off[i]));
        }
    }
    return STATUS_OK;
}

/* -------------------------------------------------------------------------------------- tokens */

static void make_byte_alphabet(struct load *l)
{
    memset(l->byte_of, 0xff, sizeof(l->byte_of));
    unsigned next = 0x100;
    for (unsigned b = 0; b < 256; b++) {
        bool shown = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        l->byte_of[shown ? b : next++] = (int16_t)b;
    }
}

/* Maps text of the byte alphabet to bytes at ret (room for TOKENIZER_MAX_TOKEN_BYTES). */
static bool unmap(const struct load *l, const char *text, size_t bytes, uint8_t *ret,
                  size_t *ret_bytes)
{
    size_t n = 0, at = 0;
    while (at < bytes) {
        uint32_t code;
        size_t step = utf8_next(text + at, bytes - at, &code);
        if (step == 0 || code >= sizeof(l->byte_of) / sizeof(l->byte_of[0]) ||
            l->byte_of[code] < 0 || n == TOKENIZER_MAX_TOKEN_BYTES) {
            return false;
        }
        ret[n++] = (uint8_t)l->byte_of[code];
        at += step;
    }
    *ret_bytes = n;
    return true;
}

static enum status read_vocab(struct load *l, const struct json *vocab)
{
    struct json_iter it = json_iterate(vocab);
    while (json_iterate_next(&it)) {
        int64_t id;
        if (!json_int(it.value, &id) || id < 0 || id >= l->n_model) {
            return error_set(l->err, STATUS_CORRUPT,
                             "tokenizer.json: token '%.80s' has no id below %u", it.key,
                             l->n_model);
        }
        if (l->token[id] != NULL) {
            return error_set(l->err, STATUS_CORRUPT,
                             "tokenizer.json: tokens '%.80s' and '%.80s' share the id %d",
                             l->token[id], it.key, (int)id);
        }
        if (it.key_bytes == 0 || it.key_bytes > TOKENIZER_MAX_TOKEN_BYTES) {
            return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: token %d has %zu bytes",
                             (int)id, it.key_bytes);
        }
        l->token[id] = it.key;
        l->token_bytes[id] = it.key_bytes;
    }
    return STATUS_OK;
}

static enum status read_added_token(struct load *l, const struct json *entry)
{
    static const char *const off[] = {"single_word", "lstrip", "rstrip"};
    int64_t id;
    size_t bytes;
    const char *text = json_text(json_get(entry, "content"), &bytes);
    if (text == NULL || bytes == 0 || bytes > MAX_ADDED_BYTES) {
        return error_set(l->err, STATUS_CORRUPT,
                         "tokenizer.json: an added token without a content of 1 to %d bytes",
                         MAX_ADDED_BYTES);
    }
    if (!json_int(json_get(entry, "id"), &id) || id < 0 || id >= l->t->n_vocab) {
        return error_set(l->err, STATUS_CORRUPT,
                         "tokenizer.json: added token '%.80s' has no id below %u", text,
                         l->t->n_vocab);
    }
    for (size_t i = 0; i < sizeof(off) / sizeof(off[0]); i++) {
        if (!is_off(entry, off[i])) {
            return error_set(l->err, STATUS_UNSUPPORTED,
                             "tokenizer.json: %s of added token '%.80s' is not implemented", off[i],
                             text);
        }
    }
    bool is_other = l->token[id] != NULL &&
                    (l->token_bytes[id] != bytes || memcmp(l->token[id], text, bytes) != 0);
    if (l->added[id] != NULL || is_other) {
        return error_set(l->err, STATUS_CORRUPT,
                         "tokenizer.json: tokens '%.80s' and '%.80s' share the id %d", l->token[id],
                         text, (int)id);
    }
    l->added[id] = entry;
    l->token[id] = text;
    l->token_bytes[id] = bytes;
    return STATUS_OK;
}

static uint32_t tree_node(struct added_tree *tree, uint8_t byte)
{
    if (tree->n_nodes == tree->capacity) {
        tree->capacity = tree->capacity == 0 ? 64 : 2 * tree->capacity;
        tree->node = mem_realloc_array(tree->node, tree->capacity, sizeof(*tree->node));
    }
    tree->node[tree->n_nodes] = (struct added_node){.id = BPE_NONE, .byte = byte};
    return tree->n_nodes++;
}

/* False when the tree has that token already. */
static bool tree_add(struct added_tree *tree, const uint8_t *text, size_t bytes, uint32_t id)
{
    uint32_t at = 0;
    tree->starts[text[0]] = true;
    for (size_t i = 0; i < bytes; i++) {
        uint32_t child = tree->node[at].child;
        while (child != 0 && tree->node[child].byte != text[i]) {
            child = tree->node[child].sibling;
        }
        if (child == 0) {
            child = tree_node(tree, text[i]);
            tree->node[child].sibling = tree->node[at].child;
            tree->node[at].child = child;
        }
        at = child;
    }
    if (tree->node[at].id != BPE_NONE) {
        return false;
    }
    tree->node[at].id = id;
    return true;
}

static enum status read_added(struct load *l, const struct json *added)
{
    size_t n = json_array_n(added);
    for (unsigned pass = 0; pass < N_ADDED_PASSES; pass++) {
        (void)tree_node(&l->t->added[pass], 0);
    }
    for (size_t i = 0; i < n; i++) {
        enum status status = read_added_token(l, json_array_at(added, i));
        if (status != STATUS_OK) {
            return status;
        }
    }
    for (uint32_t id = 0; id < l->t->n_vocab; id++) {
        if (l->token[id] == NULL) {
            return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: no token has the id %u", id);
        }
        if (l->added[id] == NULL) {
            continue;
        }
        const struct json *special = json_get(l->added[id], "special");
        bool flag = false;
        l->t->flags[id] |= TOKEN_ADDED;
        if (json_bool(special, &flag) && flag) {
            l->t->flags[id] |= TOKEN_SPECIAL;
        }
        /* absent means: normalized unless special, as the reference reads it */
        bool is_normalized = !flag;
        (void)!json_bool(json_get(l->added[id], "normalized"), &is_normalized);
        if (!tree_add(&l->t->added[is_normalized], (const uint8_t *)l->token[id],
                      l->token_bytes[id], id)) {
            return error_set(l->err, STATUS_CORRUPT,
                             "tokenizer.json: added token '%.80s' is there twice", l->token[id]);
        }
    }
    return STATUS_OK;
}

/* Lays the tokens out by id and enters the model's own into the table. */
static enum status build_table(struct load *l)
{
    struct tokenizer *t = l->t;
    size_t total = 0;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        total += l->token_bytes[id];
    }
    t->text = mem_alloc(total);
    t->n_slots = 2;
    while (t->n_slots < 2 * l->n_model) {
        t->n_slots *= 2;
    }
    t->slot = mem_alloc(t->n_slots * sizeof(t->slot[0]));
    memset(t->slot, 0xff, t->n_slots * sizeof(t->slot[0]));
    uint32_t used = 0;
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        uint8_t *to = t->text + used;
        size_t bytes = 0;
        bool is_mapped = id < l->n_model && unmap(l, l->token[id], l->token_bytes[id], to, &bytes);
        bool is_added = l->added[id] != NULL;
        if (is_added && is_mapped &&
            (bytes != l->token_bytes[id] || memcmp(to, l->token[id], bytes) != 0)) {
            return error_set(l->err, STATUS_UNSUPPORTED,
                             "tokenizer.json: added token '%.80s' is other text as a token of the "
                             "model, which is not implemented",
                             l->token[id]);
        }
        if (!is_added && !is_mapped) {
            return error_set(l->err, STATUS_CORRUPT,
                             "tokenizer.json: token '%.80s' is not of the byte alphabet",
                             l->token[id]);
        }
        if (!is_mapped) {
            bytes = l->token_bytes[id];
            memcpy(to, l->token[id], bytes);
        }
        used += (uint32_t)bytes;
        t->offset[id + 1] = used;
        t->longest_bytes = bytes > t->longest_bytes ? (uint32_t)bytes : t->longest_bytes;
        if (is_mapped) {
            t->slot[tokenizer_table_slot(t, to, bytes)] = id;
        }
    }
    return STATUS_OK;
}

/* -------------------------------------------------------------------------------------- merges */

/* The two texts of a merge: ["a", "b"], or "a b" in older files. */
static bool merge_texts(const struct json *merge, const char *text[2], size_t bytes[2])
{
    if (json_kind_of(merge) == JSON_KIND_ARRAY) {
        text[0] = json_text(json_array_at(merge, 0), &bytes[0]);
        text[1] = json_text(json_array_at(merge, 1), &bytes[1]);
        return json_array_n(merge) == 2 && text[0] != NULL && text[1] != NULL;
    }
    size_t n;
    text[0] = json_text(merge, &n);
    const char *space = text[0] == NULL ? NULL : memchr(text[0], ' ', n);
    if (space == NULL) {
        return false;
    }
    bytes[0] = (size_t)(space - text[0]);
    text[1] = space + 1;
    bytes[1] = n - bytes[0] - 1;
    return memchr(text[1], ' ', bytes[1]) == NULL;
}

static enum status read_merge(struct load *l, const struct json *json, uint32_t rank,
                              struct bpe_merge *ret)
{
    const char *text[2];
    size_t bytes[2], n[2];
    uint8_t joined[2 * TOKENIZER_MAX_TOKEN_BYTES];
    if (!merge_texts(json, text, bytes)) {
        return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: merge %u is not a pair", rank);
    }
    if (!unmap(l, text[0], bytes[0], joined, &n[0]) ||
        !unmap(l, text[1], bytes[1], joined + n[0], &n[1])) {
        return error_set(l->err, STATUS_CORRUPT,
                         "tokenizer.json: merge %u is not of the byte alphabet", rank);
    }
    struct bpe_merge merge = {
        .left = tokenizer_table_find(l->t, joined, n[0]),
        .right = tokenizer_table_find(l->t, joined + n[0], n[1]),
        .rank = rank,
        .id = tokenizer_table_find(l->t, joined, n[0] + n[1]),
    };
    if (merge.left == BPE_NONE || merge.right == BPE_NONE || merge.id == BPE_NONE) {
        return error_set(l->err, STATUS_CORRUPT,
                         "tokenizer.json: merge %u ('%.*s' and '%.*s') joins or makes what is no "
                         "token",
                         rank, (int)(bytes[0] < 80 ? bytes[0] : 80), text[0],
                         (int)(bytes[1] < 80 ? bytes[1] : 80), text[1]);
    }
    *ret = merge;
    return STATUS_OK;
}

static enum status read_merges(struct load *l, const struct json *merges, XXH3_state_t *digest)
{
    size_t n = json_array_n(merges);
    if (n > BPE_MAX_MERGES) {
        return error_set(l->err, STATUS_TOO_LARGE, "tokenizer.json: %zu merges, at most %d", n,
                         BPE_MAX_MERGES);
    }
    bpe_init(&l->t->bpe, (uint32_t)n);
    for (unsigned b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        l->t->bpe.byte_id[b] = tokenizer_table_find(l->t, &byte, 1);
        if (l->t->bpe.byte_id[b] == BPE_NONE) {
            return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: no token for the byte %#04x",
                             b);
        }
    }
    for (uint32_t rank = 0; rank < n; rank++) {
        struct bpe_merge merge;
        enum status status = read_merge(l, json_array_at(merges, rank), rank, &merge);
        if (status != STATUS_OK) {
            return status;
        }
        if (bpe_add(&l->t->bpe, merge) != STATUS_OK) {
            return error_set(l->err, STATUS_CORRUPT, "tokenizer.json: merge %u is there twice",
                             rank);
        }
        uint8_t pair[8];
        put_le32(pair, merge.left);
        put_le32(pair + 4, merge.right);
        XXH3_128bits_update(digest, pair, sizeof(pair));
    }
    return STATUS_OK;
}

/* ----------------------------------------------------------------------------------- together */

/* Marks the tokens whose bytes, as a piece of their own, encode to the token. */
static enum status mark_whole(struct load *l)
{
    struct token_ids ids = TOKEN_IDS_INIT;
    enum status status = STATUS_OK;
    for (uint32_t i = 0; i < l->t->n_slots && status == STATUS_OK; i++) {
        uint32_t id = l->t->slot[i];
        if (id == BPE_NONE) {
            continue;
        }
        size_t bytes;
        const char *text = tokenizer_token(l->t, id, &bytes);
        ids.n = 0;
        status = bpe_encode(&l->t->bpe, (const uint8_t *)text, bytes, &ids);
        if (status == STATUS_OK && ids.n == 1 && ids.id[0] == id) {
            l->t->flags[id] |= TOKEN_WHOLE;
        }
    }
    token_ids_fini(&ids);
    return status;
}

static void digest_tokens(const struct tokenizer *t, const struct load *l, XXH3_state_t *digest)
{
    uint8_t head[8];
    put_le32(head, t->n_vocab);
    put_le32(head + 4, l->n_model);
    XXH3_128bits_update(digest, head, sizeof(head));
    for (uint32_t id = 0; id < t->n_vocab; id++) {
        bool is_normalized = false;
        (void)!json_bool(json_get(l->added[id], "normalized"), &is_normalized);
        size_t bytes;
        const char *text = tokenizer_token(t, id, &bytes);
        put_le32(head, (uint32_t)bytes);
        put_le32(head + 4, t->flags[id] | (is_normalized ? 1u << 8 : 0));
        XXH3_128bits_update(digest, head, sizeof(head));
        XXH3_128bits_update(digest, text, bytes);
    }
}

static enum status load_all(struct load *l, XXH3_state_t *digest)
{
    const struct json *model = json_get(l->root, "model");
    const struct json *vocab = json_get(model, "vocab");
    const struct json *added = json_get(l->root, "added_tokens");
    enum status status = check_around(l);
    if (status == STATUS_OK) {
        status = check_pre_tokenizer(l);
    }
    if (status == STATUS_OK) {
        status = check_model(l, model);
    }
    if (status == STATUS_OK) {
        status = read_vocab(l, vocab);
    }
    if (status == STATUS_OK) {
        status = read_added(l, added);
    }
    if (status == STATUS_OK) {
        status = build_table(l);
    }
    if (status == STATUS_OK) {
        digest_tokens(l->t, l, digest);
        status = read_merges(l, json_get(model, "merges"), digest);
    }
    if (status == STATUS_OK) {
        status = mark_whole(l);
    }
    return status;
}

/* Added tokens whose ids lie beyond the model's, each of which makes the vocabulary longer. */
static size_t count_beyond(const struct json *added, size_t n_model)
{
    size_t n = 0;
    for (size_t i = 0; i < json_array_n(added); i++) {
        int64_t id;
        if (json_int(json_get(json_array_at(added, i), "id"), &id) && id >= (int64_t)n_model) {
            n++;
        }
    }
    return n;
}

static enum status load(const struct json *root, struct tokenizer **ret, struct error *err)
{
    const struct json *vocab = json_get(json_get(root, "model"), "vocab");
    size_t n_model = json_object_n(vocab);
    size_t n_vocab = n_model + count_beyond(json_get(root, "added_tokens"), n_model);
    if (n_model == 0 || n_vocab > TOKENIZER_MAX_VOCAB) {
        return error_set(err, STATUS_CORRUPT, "tokenizer.json: %zu tokens, must be 1 to %d",
                         n_vocab, TOKENIZER_MAX_VOCAB);
    }
    struct tokenizer *t = mem_zalloc(sizeof(*t));
    t->n_vocab = (uint32_t)n_vocab;
    t->offset = mem_array(n_vocab + 1, sizeof(t->offset[0]));
    t->flags = mem_array(n_vocab, 1);
    struct load l = {.t = t, .root = root, .n_model = (uint32_t)n_model, .err = err};
    l.added = mem_array(n_vocab, sizeof(l.added[0]));
    l.token = mem_array(n_vocab, sizeof(l.token[0]));
    l.token_bytes = mem_array(n_vocab, sizeof(l.token_bytes[0]));
    make_byte_alphabet(&l);
    XXH3_state_t *digest = XXH3_createState();
    enum status status = error_set(err, STATUS_EXHAUSTED, "no memory for a tokenizer");
    if (digest != NULL && XXH3_128bits_reset(digest) == XXH_OK) {
        status = load_all(&l, digest);
    }
    if (status == STATUS_OK) {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(digest));
        memcpy(t->digest, canonical.digest, TOKENIZER_DIGEST_BYTES);
        *ret = t;
    } else {
        tokenizer_close(t);
    }
    XXH3_freeState(digest);
    mem_free(l.token_bytes);
    mem_free(l.token);
    mem_free(l.added);
    return status;
}

enum status tokenizer_parse(const void *json, size_t bytes, struct tokenizer **ret,
                            struct error *err)
{
    const struct json_limits limits = {.max_bytes = TOKENIZER_MAX_FILE_BYTES, .max_depth = 16};
    struct json *root;
    enum status status = json_parse(json, bytes, &limits, &root, err);
    if (status != STATUS_OK) {
        return status == STATUS_INVALID ? STATUS_CORRUPT : status;
    }
    status = load(root, ret, err);
    json_free(root);
    return status;
}

enum status tokenizer_open(const char *path, struct tokenizer **ret, struct error *err)
{
    const struct json_limits limits = {.max_bytes = TOKENIZER_MAX_FILE_BYTES, .max_depth = 16};
    struct json *root;
    struct stat st;
    bool is_folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    char *file = mem_printf("%s%s", path, is_folder ? "/tokenizer.json" : "");
    enum status status = json_parse_file(file, &limits, &root, err);
    if (status == STATUS_OK) {
        status = load(root, ret, err);
        json_free(root);
    } else if (status == STATUS_INVALID) {
        status = STATUS_CORRUPT;
    }
    mem_free(file);
    return status;
}

void tokenizer_close(struct tokenizer *t)
{
    if (t == NULL) {
        return;
    }
    for (unsigned pass = 0; pass < N_ADDED_PASSES; pass++) {
        mem_free(t->added[pass].node);
    }
    bpe_fini(&t->bpe);
    mem_free(t->slot);
    mem_free(t->flags);
    mem_free(t->offset);
    mem_free(t->text);
    mem_free(t);
}
