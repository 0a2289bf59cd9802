/* The sum of a completion's events. One collector for both modes keeps them equal. */
#include "base/mem.h"
#include "model/chat_parse.h"

void chat_answer_init(struct chat_answer *answer)
{
    *answer = (struct chat_answer){0};
}

void chat_answer_fini(struct chat_answer *answer)
{
    for (unsigned i = 0; i < answer->n_calls; i++) {
        buf_fini(&answer->calls[i].id);
        buf_fini(&answer->calls[i].name);
        buf_fini(&answer->calls[i].arguments);
    }
    mem_free(answer->calls);
    buf_fini(&answer->content);
    buf_fini(&answer->reasoning);
    chat_answer_init(answer);
}

static void add_call(struct chat_answer *answer, const struct chat_event *event)
{
    answer->calls = mem_realloc_array(answer->calls, answer->n_calls + 1u, sizeof(*answer->calls));
    struct chat_answer_call *call = &answer->calls[answer->n_calls++];
    *call = (struct chat_answer_call){0};
    buf_append_text(&call->id, event->id);
    buf_append(&call->name, event->text, event->bytes);
    buf_text(&call->arguments); /* allocates: none are an empty text and not NULL */
}

void chat_answer_event(void *cookie, const struct chat_event *event)
{
    struct chat_answer *answer = cookie;
    switch (event->kind) {
    case CHAT_EVENT_REASONING:
        answer->has_reasoning = true;
        buf_append(&answer->reasoning, event->text, event->bytes);
        break;
    case CHAT_EVENT_CONTENT:
        answer->has_content = true;
        buf_append(&answer->content, event->text, event->bytes);
        break;
    case CHAT_EVENT_CALL:
        add_call(answer, event);
        break;
    case CHAT_EVENT_ARGUMENTS:
        buf_append(&answer->calls[event->call_i].arguments, event->text, event->bytes);
        break;
    case CHAT_EVENT_CALL_END:
        answer->calls[event->call_i].is_whole = true;
        break;
    }
}
