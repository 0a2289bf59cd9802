"""Tool calls and reasoning: what is rendered, and what comes back."""
import json
import os
import re
import sys

import kit
from kit import check, need

sys.path.insert(0, os.path.join(kit.TOP, "tests", "oracle"))
import chat_reference  # noqa: E402  pylint: disable=wrong-import-position

suite = kit.Suite()
CHAT = "/v1/chat/completions"
D = "｜DSML｜"


def call(name, **arguments):
    rows = "".join(f'<{D}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
                   f'{v if isinstance(v, str) else json.dumps(v)}</{D}parameter>\n' for k, v in arguments.items())
    return f'<{D}invoke name="{name}">\n{rows}</{D}invoke>\n'


def block(*calls):
    return f"\n\n<{D}tool_calls>\n{''.join(calls)}</{D}tool_calls>"


THREE = [("weather", {"city": "Łódź", "days": 3}), ("weather", {"city": "Rio", "days": 1}), ("clock", {"zone": "UTC"})]


def script(build):
    outputs = {
        "three": block(*(call(name, **arguments) for name, arguments in THREE)),
        "thought": "I need a tool.</think>" + block(call("clock", zone="UTC")),
        "words": "Let me see." + block(call("clock", zone="UTC")),
        "lone": block(call("clock", zone="UTC"), call("stranger")),
        "plain": "red green blue.",
        "reasoned": "first I think</think>then I say",
        # what follows the forced opening of a call block, after its name or before it
        "rest": f'<{D}parameter name="zone" string="true">CET</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>',
        "named": f'clock">\n<{D}parameter name="zone" string="true">CET</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>',
    }
    outputs["other"] = f'other">\n</{D}invoke>\n</{D}tool_calls>'  # after the forced opening: no such tool
    tokenizer = kit.Tokenizer(build)
    return kit.scripted(tokenizer, outputs) + [{"ids": tokenizer.ids("red green blue.")[0]}]


case = suite.cluster(script=script)
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string"}}}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
NAMED = {"type": "function", "function": {"name": "clock"}}


def user(key):
    return {"role": "user", "content": f"Do it. {kit.digits(key)}"}


def no_marks(text):
    for mark in ("DSML", "<think>", "</think>", "tool_calls", "<｜"):
        need(mark not in (text or ""), f"a mark in the text: {mark}", text)


def both(c, messages, **fields):
    """(content, reasoning, calls, finish) of an answer, the same whole and streamed."""
    answer = c.good_chat(messages, **fields)
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [{"id": k["id"], "name": k["function"]["name"], "arguments": k["function"]["arguments"]}
             for k in message.get("tool_calls", [])]
    stream = c.good_stream(messages, **fields)
    streamed = stream.calls()
    check("calls, streamed", [(k["name"], k["arguments"]) for k in streamed], [(k["name"], k["arguments"]) for k in calls])
    need(not {k["id"] for k in calls} & {k["id"] for k in streamed}, "ids of calls are unique", calls, streamed)
    check("content, streamed", stream.text(), message["content"] or "")
    check("reasoning, streamed", stream.reasoning(), message.get("reasoning_content") or "")
    check("finish, streamed", stream.finish(), choice["finish_reason"])
    check("usage, streamed", stream.usage(), answer["usage"])
    no_marks(message["content"])
    no_marks(message.get("reasoning_content"))
    return message["content"], message.get("reasoning_content"), calls, choice["finish_reason"], answer["usage"]


@case("TOOL-02")
def tool_choice(c):
    def tokens(**fields):
        return c.tokens(messages=[user("plain")], **fields)

    without = tokens()
    check("none renders no tools", tokens(tools=[CLOCK], tool_choice="none"), without)
    check("an empty list of tools", tokens(tools=[]), without)
    need(len(tokens(tools=[CLOCK])) > len(without) + 10, "auto renders them")
    check("auto is the default", tokens(tools=[CLOCK], tool_choice="auto"), tokens(tools=[CLOCK]))
    for fields in ({}, {"tools": [CLOCK], "tool_choice": "none"}, {"tools": []}):
        check("prompt tokens", c.good_chat([user("plain")], **fields)["usage"]["prompt_tokens"], len(without))
        # The model writes a call all the same: it is no call, nor raw marks, and does not vanish.
        for key, words in (("words", 'Let me see.\n\nclock({"zone": "UTC"})'), ("lone", 'clock({"zone": "UTC"})\nstranger({})')):
            content, _, calls, finish, _ = both(c, [user(key)], reasoning_effort="none", **fields)
            check(f"{fields}", (content, calls, finish), (words, [], "stop"))
    content, _, calls, finish, _ = both(c, [user("words")], reasoning_effort="none", tools=[CLOCK])
    check("auto", (content, [k["name"] for k in calls], finish), ("Let me see.", ["clock"], "tool_calls"))
    check("arguments", json.loads(calls[0]["arguments"]), {"zone": "UTC"})
    for choice, key in (("required", "named"), (NAMED, "rest")):
        _, _, calls, finish, _ = both(c, [user(key)], tools=[CLOCK, WEATHER], tool_choice=choice, reasoning_effort="none")
        check(f"tool_choice {choice}", ([k["name"] for k in calls], finish), (["clock"], "tool_calls"))
        check("arguments", json.loads(calls[0]["arguments"]), {"zone": "CET"})
        # Words where a call is due, a call to a tool that there is not, or nothing: an error, no answer without a call.
        failed = c.router.metric("baton_requests_failed_total")
        for other in ("plain", "other") if choice == "required" else ("plain",):
            body = {"messages": [user(other)], "tools": [CLOCK, WEATHER], "tool_choice": choice}
            answer = c.post(CHAT, body)
            check(f"{choice}, {other}: {answer.body!r:.200}", (answer.status, answer.error()["code"], answer.error()["param"]),
                  (500, "internal_error", "tool_choice"))
            stream = c.stream(CHAT, body)
            if isinstance(stream, kit.Stream):  # its words had begun
                need(not stream.done and not stream.whole and stream.finish() is None, "no good end", stream.events[-2:])
                check("the error event", (stream.error["code"], stream.error["param"]), ("internal_error", "tool_choice"))
                for text in (stream.text(), *(k["name"] + k["arguments"] for k in stream.calls())):
                    no_marks(text)
                    need("other" not in text, "a call to a tool that there is not", text)
            else:
                check("status of a stream that had not begun", (stream.status, stream.error()["code"]), (500, "internal_error"))
        check("failed", c.router.metric("baton_requests_failed_total") - failed, 4 if choice == "required" else 2)
        # A limit is no disobedience: `length` says that there may have been more.
        content, _, calls, finish, _ = both(c, [user("plain")], tools=[CLOCK, WEATHER], tool_choice=choice, max_tokens=2)
        check("cut", (finish, [k["name"] for k in calls if k["name"] != "clock"]), ("length", []))
    body = {"messages": [user("plain")], "tools": [CLOCK]}
    c.refused(CHAT, {**body, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, 400, "invalid_value",
              "tool_choice.function.name")
    c.refused(CHAT, {**body, "tools": [], "tool_choice": NAMED}, 400, "invalid_value")
    c.refused(CHAT, {"messages": [user("plain")], "tool_choice": "required"}, 400, "invalid_value")
    c.refused(CHAT, {**body, "tool_choice": "perhaps"}, 400, "invalid_value", "tool_choice")
    c.refused(CHAT, {**body, "tool_choice": 5}, 400, "invalid_value", "tool_choice")


@case("TOOL-04")
def parallel_calls(c):
    content, _, calls, finish, _ = both(c, [user("three")], tools=[CLOCK, WEATHER], reasoning_effort="none")
    check("three calls", [(k["name"], json.loads(k["arguments"])) for k in calls], THREE)
    check("content and finish", (content, finish), (None, "tool_calls"))
    check("ids", len({k["id"] for k in calls}), 3)
    stream = c.good_stream([user("three")], tools=[CLOCK, WEATHER], reasoning_effort="none")
    deltas = [d for p in stream.pieces() for d in p["delta"].get("tool_calls", [])]
    indexes = [d["index"] for d in deltas]
    check("indexes in order", (sorted(indexes), sorted(set(indexes))), (indexes, [0, 1, 2]))
    for i in range(3):
        own = [d for d in deltas if d["index"] == i]
        check("id, type and name in the first delta alone",
              [("id" in d, "type" in d, "name" in d["function"]) for d in own],
              [(True, True, True)] + [(False, False, False)] * (len(own) - 1))
        check("arguments put together", json.loads("".join(d["function"]["arguments"] for d in own)), THREE[i][1])
    # n > 1: each choice has its own three, and ids differ over all.
    stream = c.good_stream([user("three")], n=3, tools=[CLOCK, WEATHER], reasoning_effort="none")
    ids = [k["id"] for i in range(3) for k in stream.calls(i)]
    check("ids over all choices", (len(ids), len(set(ids))), (9, 9))
    _, reasoning, calls, finish, _ = both(c, [user("thought")], tools=[CLOCK], reasoning_effort="high")
    check("reasoning, then a call", (reasoning, [k["name"] for k in calls], finish),
          ("I need a tool.", ["clock"], "tool_calls"))
    # A limit inside the block: what came is shown as cut, never closed into a whole call.
    answer = c.good_chat([user("three")], tools=[CLOCK, WEATHER], reasoning_effort="none", max_tokens=40)
    check("finish when cut", answer["choices"][0]["finish_reason"], "length")
    no_marks(answer["choices"][0]["message"]["content"])


# ------------------------------------------------------------------------------------------------ TOOL-05


def reference(messages, **how):
    """The prompt as the second, independent encoder writes it."""
    with open(os.path.join(kit.TINY, "encoding.json"), encoding="utf-8") as file:
        texts = json.load(file)
    return chat_reference.render(texts, messages, **how)


def history(reasoning):
    """Two turns with a call each, with and without the reasoning that came with them."""
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What time is it?"}]
    for i, zone in enumerate(("UTC", "CET")):
        turn = {"role": "assistant", "content": "", "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": "clock", "arguments": json.dumps({"zone": zone})}}]}
        if reasoning:
            turn["reasoning_content"] = f"I think of {zone}."
        turns += [turn, {"role": "tool", "tool_call_id": f"call_{i}", "content": f"12:0{i}"}]
    turns.append({"role": "user", "content": f"And now? {kit.digits('reasoned')}"})
    return turns


def encoder_form(messages, tools):
    """What our HTTP form means in the encoder's: tools stand at the first system message."""
    found = [dict(message) for message in messages]
    if tools:
        found[0]["tools"] = tools
    return found


@case("TOOL-05")
def histories_and_switches(c):
    for reasoning in (False, True):
        for tools in ([], [CLOCK]):
            for effort, thinking, level in (("none", False, "none"), ("low", True, "low"), ("high", True, "high"),
                                            ("max", True, "max")):
                messages = history(reasoning)
                fields = {"tools": tools or None, "reasoning_effort": effort}
                found = c.tokens(messages=messages, **fields)
                text = c.post("/detokenize", {"tokens": found}).json()["prompt"]
                check(f"prompt with reasoning {reasoning}, {len(tools)} tools, effort {effort}", text,
                      reference(encoder_form(messages, tools), thinking=thinking, effort=level))
                usage = both(c, messages, **fields, max_tokens=50)[4]
                check("prompt tokens", usage["prompt_tokens"], len(found))
    content, reasoning, _, finish, usage = both(c, history(True), reasoning_effort="high")
    check("answer", (content, reasoning, finish), ("then I say", "first I think", "stop"))
    need(0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"], "reasoning tokens", usage)

    messages = [user("plain")]
    off, on = c.tokens(messages=messages, reasoning_effort="none"), c.tokens(messages=messages, reasoning_effort="high")
    need(off != on, "the switch does something")
    for switch, wanted in (({"thinking": {"type": "disabled"}}, off), ({"thinking": {"type": "enabled"}}, on),
                           ({"chat_template_kwargs": {"thinking": False}}, off),
                           ({"chat_template_kwargs": {"thinking": True}}, on),
                           ({"chat_template_kwargs": {"enable_thinking": False}}, off),
                           ({"chat_template_kwargs": {"enable_thinking": True}}, on),
                           ({"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}, off),
                           ({"thinking": {"type": "disabled"}, "reasoning_effort": "none"}, off),
                           ({"chat_template_kwargs": {"other": 1}}, on), ({"thinking": None, "chat_template_kwargs": None}, on)):
        check(f"{switch}", c.tokens(messages=messages, **switch), wanted)
        check("prompt tokens", c.good_chat(messages, max_tokens=1, **switch)["usage"]["prompt_tokens"], len(wanted))
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        check(f"effort {effort} is accepted", c.chat(messages, max_tokens=1, reasoning_effort=effort).status, 200)
    check("xhigh is max", c.tokens(messages=messages, reasoning_effort="xhigh"),
          c.tokens(messages=messages, reasoning_effort="max"))
    for contradiction, names in (
            ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, ("thinking.type", "reasoning_effort")),
            ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, ("thinking.type", "reasoning_effort")),
            ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
             ("thinking.type", "chat_template_kwargs.thinking")),
            ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, ("thinking", "enable_thinking"))):
        error = c.refused(CHAT, {"messages": messages, **contradiction}, 400, "invalid_value")
        need(all(name in error["message"] for name in names), f"both are named for {contradiction}", error)
    for wrong in ({"reasoning_effort": "huge"}, {"reasoning_effort": 5}, {"thinking": {"type": "maybe"}}, {"thinking": 1},
                  {"chat_template_kwargs": {"thinking": "yes"}}, {"chat_template_kwargs": []}):
        c.refused(CHAT, {"messages": messages, **wrong}, 400, "invalid_value")


@suite.case("TOOL-05-option")
def what_a_request_does_not_say(build):
    """--reasoning-effort and --thinking of the router are what a request says that does not say otherwise."""
    messages = [user("plain")]

    def tokens_of(*options):
        """{what the request says: its prompt}, by a router with these options; it needs no nodes for that."""
        with kit.Daemon(build, "router", f"--model={kit.TINY}", "--http-port=0", "--grpc-port=0", *options) as router:
            port = int(re.search(r"HTTP on \S+:(\d+),", router.says("HTTP on", 10))[1])

            def ask(**fields):
                answer = kit.ask(("127.0.0.1", port), "POST", "/tokenize", {"messages": messages, **fields})
                check(f"/tokenize ({answer.body[:200]!r})", answer.status, 200)
                return answer.json()["tokens"]

            return {said: ask(**({"reasoning_effort": said} if said else {})) for said in (None, *EFFORTS)}

    plain = tokens_of()
    check("the default is high", plain[None], plain["high"])
    need(len({tuple(plain[effort]) for effort in ("none", "high", "max")}) == 3, "efforts differ", plain)
    for effort in EFFORTS:
        found = tokens_of(f"--reasoning-effort={effort}")
        check(f"--reasoning-effort={effort}", found[None], plain[effort])
        if effort in ("none", "max"):
            check("a request that says is not changed", {k: v for k, v in found.items() if k}, {k: v for k, v in plain.items() if k})
    check("--no-thinking", tokens_of("--no-thinking")[None], plain["none"])
    with kit.Daemon(build, "router", f"--model={kit.TINY}", "--reasoning-effort=huge") as router:
        code = router.ends(5)
        need(code > 0 and "minimal" in router.said(), f"what is right is said, exit {code}", router.said())


if __name__ == "__main__":
    suite.main()
