/* The script file of the sim engine. One JSON object a line; see sim.h. Bounded: 64 MiB of file,
 * 10,000 entries. */
#include "engine/sim_script.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"

enum { SCRIPT_MAX_ENTRIES = 10000, SCRIPT_MAX_PAUSES = 64 };

struct pause {
    uint32_t index;
    double ms;
};

struct entry {
    uint32_t *when, *ids;
    uint32_t n_when, n_ids;
    double pause_ms;
    struct pause pauses[SCRIPT_MAX_PAUSES];
    uint32_t n_pauses;
    bool loop;
};

struct sim_script {
    struct entry *entries;
    size_t n_entries;
};

static enum status read_ids(const struct json *value, const char *name, uint32_t vocab_size,
                            uint32_t **ret_ids, uint32_t *ret_n, struct error *err)
{
    if (json_kind_of(value) != JSON_KIND_ARRAY) {
        return error_set(err, STATUS_INVALID, "'%s' must be a list of token ids", name);
    }
    size_t n = json_array_n(value);
    uint32_t *ids = mem_array(n ? n : 1, sizeof(*ids));
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        if (!json_int(json_array_at(value, i), &id) || id < 0 || id >= vocab_size) {
            mem_free(ids);
            return error_set(err, STATUS_INVALID, "'%s' member %zu is not an id below %u", name, i,
                             vocab_size);
        }
        ids[i] = (uint32_t)id;
    }
    *ret_ids = ids;
    *ret_n = (uint32_t)n;
    return STATUS_OK;
}

static enum status read_pauses(const struct json *object, struct entry *entry, struct error *err)
{
    struct json_iter it = json_iterate(object);
    while (json_iterate_next(&it)) {
        char *end;
        unsigned long index = strtoul(it.key, &end, 10);
        double ms;
        if (*end || end == it.key || !json_number(it.value, &ms) || ms < 0) {
            return error_set(err, STATUS_INVALID, "'pauses' maps an output index to milliseconds");
        }
        if (entry->n_pauses == SCRIPT_MAX_PAUSES) {
            return error_set(err, STATUS_TOO_LARGE, "more than %d pauses", SCRIPT_MAX_PAUSES);
        }
        entry->pauses[entry->n_pauses++] = (struct pause){(uint32_t)index, ms};
    }
    return STATUS_OK;
}

static enum status read_entry(const struct json *object, uint32_t vocab_size, struct entry *entry,
                              struct error *err)
{
    enum status status =
        read_ids(json_get(object, "ids"), "ids", vocab_size, &entry->ids, &entry->n_ids, err);
    if (!status && json_get(object, "when_ids")) {
        status = read_ids(json_get(object, "when_ids"), "when_ids", vocab_size, &entry->when,
                          &entry->n_when, err);
    }
    const struct json *pause = json_get(object, "pause_ms");
    if (!status && pause && (!json_number(pause, &entry->pause_ms) || entry->pause_ms < 0)) {
        status = error_set(err, STATUS_INVALID, "'pause_ms' must be a number of milliseconds");
    }
    const struct json *loop = json_get(object, "loop");
    if (!status && loop && !json_bool(loop, &entry->loop)) {
        status = error_set(err, STATUS_INVALID, "'loop' must be true or false");
    }
    if (!status && json_get(object, "pauses")) {
        status = read_pauses(json_get(object, "pauses"), entry, err);
    }
    return status;
}

enum status sim_script_open(const char *path, uint32_t vocab_size, struct sim_script **ret_script,
                            struct error *err)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        return error_set(err, STATUS_NOT_FOUND, "script %s: %s", path, strerror(errno));
    }
    struct sim_script *script = mem_zalloc(sizeof(*script));
    char *line = NULL;
    size_t capacity = 0, line_n = 0;
    ssize_t bytes;
    enum status status = STATUS_OK;
    while (!status && (bytes = getline(&line, &capacity, file)) > 0) {
        struct json *object = NULL;
        struct error why = {""};
        line_n++;
        if (line[strspn(line, " \t\r\n")] == 0) {
            continue;
        }
        status = script->n_entries == SCRIPT_MAX_ENTRIES
                     ? error_set(&why, STATUS_TOO_LARGE, "more than %d entries", SCRIPT_MAX_ENTRIES)
                     : json_parse(line, (size_t)bytes, NULL, &object, &why);
        if (!status) {
            script->entries =
                mem_realloc(script->entries, (script->n_entries + 1) * sizeof(*script->entries));
            struct entry *entry = &script->entries[script->n_entries++];
            memset(entry, 0, sizeof(*entry));
            status = read_entry(object, vocab_size, entry, &why);
        }
        json_free(object);
        if (status) {
            error_set(err, status, "script %s, line %zu: %s", path, line_n, why.text);
        }
    }
    free(line);
    fclose(file);
    if (status) {
        sim_script_close(script);
        return status;
    }
    *ret_script = script;
    return STATUS_OK;
}

void sim_script_close(struct sim_script *script)
{
    if (!script) {
        return;
    }
    for (size_t i = 0; i < script->n_entries; i++) {
        mem_free(script->entries[i].ids);
        mem_free(script->entries[i].when);
    }
    mem_free(script->entries);
    mem_free(script);
}

static bool occurs(const uint32_t *needle, uint32_t n_needle, const uint32_t *hay, uint32_t n_hay)
{
    for (uint32_t at = 0; at + n_needle <= n_hay; at++) {
        if (memcmp(hay + at, needle, (size_t)n_needle * sizeof(*needle)) == 0) {
            return true;
        }
    }
    return false;
}

void sim_script_next(const struct sim_script *script, const uint32_t *prompt, uint32_t n_prompt,
                     uint32_t n_generated, uint32_t eos_id, uint32_t *ret_id, double *ret_pause_ms)
{
    for (size_t e = 0; e < script->n_entries; e++) {
        const struct entry *entry = &script->entries[e];
        if (entry->n_when && !occurs(entry->when, entry->n_when, prompt, n_prompt)) {
            continue;
        }
        uint32_t at = entry->loop && entry->n_ids ? n_generated % entry->n_ids : n_generated;
        *ret_id = at < entry->n_ids ? entry->ids[at] : eos_id;
        *ret_pause_ms = entry->pause_ms;
        for (uint32_t i = 0; i < entry->n_pauses; i++) {
            if (entry->pauses[i].index == n_generated) {
                *ret_pause_ms = entry->pauses[i].ms;
            }
        }
        return;
    }
}
