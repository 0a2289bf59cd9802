/*
 * encoding.json: the fixed texts of a checkpoint's prompts. It is written by
 * scripts/import-encoding from the checkpoint's own encoding file, or shipped with a model of our
 * own. All of it is text that goes into prompts as it stands, so all that can be checked is that it
 * is there.
 */
#include <string.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "model/chat_table.h"

static enum status read_text(const struct json *object, const char *key, struct chat_text *ret,
                             struct error *err)
{
    ret->data = json_text(json_get(object, key), &ret->bytes);
    if (ret->data == NULL) {
        return error_set(err, STATUS_CORRUPT, "encoding.json: no text '%s'", key);
    }
    return STATUS_OK;
}

static enum status read_format(struct chat_format *format, struct error *err)
{
    static const char *const efforts[CHAT_N_EFFORTS] = {
        [CHAT_EFFORT_NONE] = "none",
        [CHAT_EFFORT_LOW] = "low",
        [CHAT_EFFORT_HIGH] = "high",
        [CHAT_EFFORT_MAX] = "max",
    };
    const struct {
        const char *key;
        struct chat_text *to;
    } texts[] = {
        {"release", &format->release},
        {"tools_prefix", &format->tools_prefix},
        {"tools_suffix", &format->tools_suffix},
        {"response_format_heading", &format->response_heading},
        {"response_format_instruction", &format->response_instruction},
    };
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
        enum status status = read_text(format->root, texts[i].key, texts[i].to, err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    for (size_t i = 0; i < CHAT_N_EFFORTS; i++) {
        const struct json *table = json_get(format->root, "effort");
        enum status status = read_text(table, efforts[i], &format->effort[i], err);
        if (status != STATUS_OK) {
            return status;
        }
    }
    return STATUS_OK;
}

/* Takes root, also on failure. */
static enum status make_format(struct json *root, struct chat_format **ret, struct error *err)
{
    struct chat_format *format = mem_zalloc(sizeof(*format));
    format->root = root;
    enum status status = read_format(format, err);
    if (status != STATUS_OK) {
        chat_format_close(format);
        return status;
    }
    *ret = format;
    return STATUS_OK;
}

static const struct json_limits file_limits = {.max_bytes = 1 << 20, .max_depth = 8};

enum status chat_format_parse(const void *json, size_t bytes, struct chat_format **ret,
                              struct error *err)
{
    struct json *root;
    enum status status = json_parse(json, bytes, &file_limits, &root, err);
    if (status != STATUS_OK) {
        return status == STATUS_INVALID ? STATUS_CORRUPT : status;
    }
    return make_format(root, ret, err);
}

enum status chat_format_open(const char *path, struct chat_format **ret, struct error *err)
{
    struct json *root;
    struct stat st;
    bool is_folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    char *file = mem_printf("%s%s", path, is_folder ? "/encoding.json" : "");
    enum status status = json_parse_file(file, &file_limits, &root, err);
    mem_free(file);
    if (status != STATUS_OK) {
        return status == STATUS_INVALID ? STATUS_CORRUPT : status;
    }
    return make_format(root, ret, err);
}

void chat_format_close(struct chat_format *format)
{
    if (format != NULL) {
        json_free(format->root);
        mem_free(format);
    }
}

const char *chat_format_release(const struct chat_format *format)
{
    return format->release.data;
}

enum status chat_effort_from_text(const char *text, size_t bytes, enum chat_effort *ret)
{
    /* the release's own table then decides what each of the four means */
    static const struct {
        const char *text;
        enum chat_effort effort;
    } words[] = {
        {"none", CHAT_EFFORT_NONE},  {"minimal", CHAT_EFFORT_LOW}, {"low", CHAT_EFFORT_LOW},
        {"medium", CHAT_EFFORT_LOW}, {"high", CHAT_EFFORT_HIGH},   {"xhigh", CHAT_EFFORT_MAX},
        {"max", CHAT_EFFORT_MAX},
    };
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (strlen(words[i].text) == bytes && memcmp(words[i].text, text, bytes) == 0) {
            *ret = words[i].effort;
            return STATUS_OK;
        }
    }
    return STATUS_INVALID;
}
