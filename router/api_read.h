#ifndef BATON_ROUTER_API_READ_H
#define BATON_ROUTER_API_READ_H

#include "base/json.h"
#include "router/api.h"

/*
 * The parts of api_parse, of no use outside it. Each reads some fields of the body into the
 * request; STATUS_INVALID comes with the reader's error filled in.
 */
struct api_reader {
    const struct api_context *context;
    const struct json *root; /* an object */
    struct api_request *request;
    struct api_error *error;
};

/* Fills the error and returns STATUS_INVALID, so that a refusal is one line. */
enum status api_read_refuse(struct api_reader *reader, enum api_code code, const char *param,
                            const char *format, ...) PRINTF_LIKE(4, 5) must_check;

/* A member of the body; NULL also for null: both mean absent. */
const struct json *api_read_field(const struct api_reader *reader, const char *key) must_check;

/* For messages: a short form of the value that was found, such as `-1` or `an array`. */
struct api_shown {
    char text[48];
};
struct api_shown api_read_show(const struct json *value);

/*
 * A value of one type within bounds; path names it in the error. NULL and null leave *ret alone.
 * Integers may be written as reals without a fraction (1.0, 1e3), as JSON Schema has it.
 */
enum status api_read_bool(struct api_reader *reader, const struct json *value, const char *path,
                          bool *ret) must_check;
enum status api_read_int(struct api_reader *reader, const struct json *value, const char *path,
                         int64_t min, int64_t max, int64_t *ret) must_check;
enum status api_read_number(struct api_reader *reader, const struct json *value, const char *path,
                            double min, double max, double *ret) must_check;

/* A token id of the vocabulary. */
enum status api_read_id(struct api_reader *reader, const struct json *value, const char *path,
                        uint32_t *ret) must_check;

/* All of an array of ids; it may be empty. Elements are named path.0, path.1, ... */
enum status api_read_ids(struct api_reader *reader, const struct json *array, const char *path,
                         const uint32_t **ret, size_t *ret_n) must_check;

/* Groups of fields: api_sampling.c, api_prompt.c, api_chat.c. */
enum status api_read_sampling(struct api_reader *reader) must_check; /* with n, stops and limits */
enum status api_read_prompts(struct api_reader *reader) must_check;  /* completions */
enum status api_read_tokenize(struct api_reader *reader) must_check; /* prompt or messages */
enum status api_read_detokenize(struct api_reader *reader) must_check;
enum status api_read_chat(struct api_reader *reader) must_check;

#endif
