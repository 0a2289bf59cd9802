/*
 * Tokens to text: see request_internal.h.
 *
 * A chat token goes through the parser, whose events are reasoning, content and calls; content
 * alone goes through the stop strings. A completion's token is decoded and goes through them. What
 * comes out is added to the whole answer or, in a stream, to the text that the next flush sends: so
 * several tokens of one turn are one event.
 */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "router/request_internal.h"

static void text_out(struct choice *choice, enum chat_event_kind kind, const void *text,
                     size_t bytes)
{
    struct request *request = choice->request;
    if (bytes == 0) {
        return;
    }
    if (request->is_stream) {
        if (choice->pending.bytes && choice->pending_kind != kind) {
            choice_write_events(choice);
        }
        choice->pending_kind = kind;
        buf_append(&choice->pending, text, bytes);
        return;
    }
    struct chat_event event = {.kind = kind, .text = text, .bytes = bytes};
    chat_answer_event(&choice->answer, &event);
}

/* Content, which may hold a stop string. */
static void content_out(struct choice *choice, const char *text, size_t bytes)
{
    if (!choice->stop) {
        text_out(choice, CHAT_EVENT_CONTENT, text, bytes);
        return;
    }
    struct buf *safe = &choice->request->requests->scratch;
    buf_clear(safe);
    if (stop_push(choice->stop, text, bytes, safe)) {
        choice->done_early = true;
    }
    text_out(choice, CHAT_EVENT_CONTENT, safe->data, safe->bytes);
}

static void on_event(void *cookie, const struct chat_event *event)
{
    struct choice *choice = cookie;
    struct request *request = choice->request;
    if (choice->done_early) {
        return; /* the token that completed a stop string may have had more behind it */
    }
    switch (event->kind) {
    case CHAT_EVENT_CONTENT:
        content_out(choice, event->text, event->bytes);
        return;
    case CHAT_EVENT_REASONING:
        text_out(choice, event->kind, event->text, event->bytes);
        return;
    case CHAT_EVENT_CALL:
        if (request->intake->request->options.force_call &&
            !api_may_call(request->intake->request, event->text, event->bytes)) {
            choice->disobeyed = choice->done_early = true;
            return;
        }
        /* fall through */
    case CHAT_EVENT_ARGUMENTS:
        if (request->is_stream) {
            choice_write_events(choice);
            api_event_parsed(&request->head, choice->index, event, &request->out);
        } else {
            chat_answer_event(&choice->answer, event);
        }
        return;
    case CHAT_EVENT_CALL_END:
        if (!request->is_stream) {
            chat_answer_event(&choice->answer, event);
        }
        if (!request->intake->request->parallel_tool_calls) {
            choice->done_early = true;
        }
        return;
    }
}

bool request_is_end_id(const struct request *request, uint32_t id)
{
    const struct requests_options *options = &request->requests->options;
    const struct api_sampling *sampling = &request->intake->request->sampling;
    for (size_t i = 0; i < sampling->n_stop_token_ids; i++) {
        if (sampling->stop_token_ids[i] == id) {
            return true;
        }
    }
    for (size_t i = 0; !sampling->ignore_eos && i < options->n_eos_ids; i++) {
        if (options->eos_ids[i] == id) {
            return true;
        }
    }
    return false;
}

static void keep_id(struct choice *choice, uint32_t id)
{
    if (choice->n_ids == choice->capacity) {
        choice->capacity = choice->capacity ? 2 * choice->capacity : 32;
        choice->ids = mem_realloc_array(choice->ids, choice->capacity, sizeof(*choice->ids));
    }
    choice->ids[choice->n_ids++] = id;
}

static void add_logprobs(struct choice *choice, const Baton__TokenLogprobs *from)
{
    struct api_logprob token = {0, 0}, top[API_MAX_TOP_LOGPROBS];
    size_t n = from->n_top < API_MAX_TOP_LOGPROBS ? from->n_top : API_MAX_TOP_LOGPROBS;
    if (!from->token) {
        return;
    }
    token = (struct api_logprob){from->token->id, from->token->logprob};
    for (size_t i = 0; i < n; i++) {
        top[i] = (struct api_logprob){from->top[i]->id, from->top[i]->logprob};
    }
    api_logprobs_add(choice->logprobs, choice->request->requests->options.tokenizer, &token, top,
                     n);
}

void choice_token(struct choice *choice, uint32_t id, const Baton__TokenLogprobs *logprobs)
{
    struct request *request = choice->request;
    const struct tokenizer *tokenizer = request->requests->options.tokenizer;
    keep_id(choice, id);
    if (request_is_end_id(request, id)) {
        choice->saw_end = true; /* it has no text */
        return;
    }
    if (choice->logprobs && logprobs) {
        add_logprobs(choice, logprobs);
    }
    if (choice->parse) {
        chat_parse_token(choice->parse, tokenizer, id);
        return;
    }
    struct buf text = BUF_INIT;
    tokenizer_stream_push(&choice->stream, tokenizer, id, &text);
    content_out(choice, (const char *)text.data, text.bytes);
    buf_fini(&text);
}

void choice_text_end(struct choice *choice)
{
    struct buf text = BUF_INIT;
    if (choice->parse && !choice->done_early) {
        chat_parse_finish(choice->parse, choice->was_cut);
    } else if (!choice->done_early) {
        tokenizer_stream_finish(&choice->stream, &text);
        content_out(choice, (const char *)text.data, text.bytes);
        buf_clear(&text);
    }
    if (choice->stop) {
        stop_finish(choice->stop, &text);
        text_out(choice, CHAT_EVENT_CONTENT, text.data, text.bytes);
    }
    buf_fini(&text);
}

void choice_write_events(struct choice *choice)
{
    struct request *request = choice->request;
    struct buf *pending = &choice->pending;
    if (!pending->bytes && !(choice->logprobs && choice->logprobs->n)) {
        return;
    }
    if (pending->bytes && choice->pending_kind == CHAT_EVENT_REASONING) {
        api_event_reasoning(&request->head, choice->index, buf_text(pending), pending->bytes,
                            choice->logprobs, &request->out);
    } else {
        api_event_text(&request->head, choice->index, buf_text(pending), pending->bytes,
                       choice->logprobs, &request->out);
    }
    buf_clear(pending);
}

bool choice_disobeyed(const struct choice *choice)
{
    const struct api_request *api = choice->request->intake->request;
    return choice->disobeyed ||
           (api->options.force_call && !choice->was_cut && choice_n_calls(choice) == 0);
}

uint32_t choice_n_reasoning_tokens(const struct choice *choice)
{
    return choice->parse ? chat_parse_n_reasoning_tokens(choice->parse) : 0;
}

unsigned choice_n_calls(const struct choice *choice)
{
    return choice->parse ? chat_parse_n_whole_calls(choice->parse) : 0;
}

static void parse_create(struct choice *choice)
{
    struct request *request = choice->request;
    const struct api_request *api = request->intake->request;
    char id_seed[CHAT_ID_SEED_BYTES];
    snprintf(id_seed, sizeof(id_seed), "%016llx%u", (unsigned long long)request->id, choice->index);
    struct chat_parse_options options = {
        .thinking =
            chat_starts_in_reasoning(api->thread.messages, api->thread.n_messages, &api->options),
        .without_calls = api->tool_choice == API_TOOL_CHOICE_NONE,
        .id_seed = id_seed,
        .fn = on_event,
        .cookie = choice,
    };
    choice->parse = chat_parse_create(&options);
    if (api->options.force_call) {
        struct buf prefix = BUF_INIT;
        chat_forced_prefix(&api->options, &prefix);
        chat_parse_prompt(choice->parse, (const char *)prefix.data, prefix.bytes);
        buf_fini(&prefix);
    }
}

void choice_init(struct choice *choice, struct request *request, unsigned index)
{
    const struct api_request *api = request->intake->request;
    uint64_t n_echoed = 0;
    choice->request = request;
    choice->index = index;
    chat_answer_init(&choice->answer);
    if (api->n_stops &&
        stop_create(api->stops, api->stop_bytes, api->n_stops, &choice->stop, NULL)) {
        choice->stop = NULL; /* api_parse has checked them: our own bounds are the same */
    }
    if (!request->is_chat) {
        tokenizer_stream_init(&choice->stream, false);
        if (api->echo) {
            struct buf text = BUF_INIT;
            api_prompt_text(api, &request->intake->context, index / api->n, &text);
            for (size_t i = 0; i < text.bytes; i++) {
                n_echoed += (text.data[i] & 0xc0) != 0x80;
            }
            text_out(choice, CHAT_EVENT_CONTENT, text.data, text.bytes);
            buf_fini(&text);
        }
    }
    if (api->sampling.logprobs) {
        choice->logprobs = mem_alloc(sizeof(*choice->logprobs));
        api_logprobs_init(choice->logprobs, request->is_chat, n_echoed);
    }
    if (request->is_chat) {
        parse_create(choice);
    }
}

void choice_fini(struct choice *choice)
{
    chat_parse_free(choice->parse);
    stop_free(choice->stop);
    buf_fini(&choice->pending);
    chat_answer_fini(&choice->answer);
    if (choice->logprobs) {
        api_logprobs_fini(choice->logprobs);
        mem_free(choice->logprobs);
    }
    mem_free(choice->ids);
}
