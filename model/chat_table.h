#ifndef BATON_MODEL_CHAT_TABLE_H
#define BATON_MODEL_CHAT_TABLE_H

#include "model/chat.h"

/* What chat_format.c reads and chat.c writes into prompts; private to the two. */
struct chat_format {
    struct json *root; /* owner of the texts */
    struct chat_text release, tools_prefix, tools_suffix;
    struct chat_text effort[CHAT_N_EFFORTS];
    struct chat_text response_heading, response_instruction;
};

/* The marks of the encoding: those before CHAT_MARK_CALLS are one added token each. */
#define CHAT_MARK_BOS "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
#define CHAT_MARK_EOS "<\uff5cend\u2581of\u2581sentence\uff5c>"
#define CHAT_MARK_USER "<\uff5cUser\uff5c>"
#define CHAT_MARK_ASSISTANT "<\uff5cAssistant\uff5c>"
#define CHAT_MARK_REMINDER "<\uff5clatest_reminder\uff5c>"
#define CHAT_MARK_THINK "<think>"
#define CHAT_MARK_UNTHINK "</think>"
#define CHAT_MARK_DSML "\uff5cDSML\uff5c"
#define CHAT_MARK_CALLS "<" CHAT_MARK_DSML "tool_calls"
#define CHAT_MARK_END_CALLS "</" CHAT_MARK_DSML "tool_calls>"
#define CHAT_MARK_INVOKE "<" CHAT_MARK_DSML "invoke name=\""
#define CHAT_MARK_END_INVOKE "</" CHAT_MARK_DSML "invoke>"
#define CHAT_MARK_PARAMETER "<" CHAT_MARK_DSML "parameter name=\""
#define CHAT_MARK_END_PARAMETER "</" CHAT_MARK_DSML "parameter>"

#endif
