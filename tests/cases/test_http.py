"""HTTP: framing, limits, preflights, shapes of messages and of answers."""
import http.server
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

import kit
from kit import CRLF, PATIENCE, Wire, check, frame, need

suite = kit.Suite()
TEXT = " red green blue yellow black white one two three four five six seven eight nine ten"


def plain_text(build):
    """Every answer is the same words, again and again."""
    return [{"ids": kit.Tokenizer(build).ids(TEXT)[0], "loop": True}]


case = suite.cluster(script=plain_text)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def user(text):
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------ HTTP-01


def nested(n):
    return "[" * n + "]" * n


def deep_bodies(n):
    deep = nested(n)
    ask = '"messages":[{"role":"user","content":"x"}],"max_tokens":1'
    yield deep
    yield "[" * n
    yield '{"a":' * n + "1" + "}" * n
    yield '{%s,"unknown":%s}' % (ask, deep)
    yield '{%s,"metadata":%s}' % (ask, deep)
    yield '{%s,"tools":[{"type":"function","function":{"name":"f","parameters":{"p":%s}}}]}' % (ask, deep)
    yield '{%s,"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":{"a":%s}}}}' % (ask, deep)
    yield '{"messages":%s}' % deep


@case("HTTP-01")
def deep_nesting(c):
    before = {p.name: p.rss_bytes() for p in c.processes.values()}
    for n in (129, 20_000, 200_000):
        for body in deep_bodies(n):
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                if n == 200_000 and path != CHAT:
                    continue
                answer = c.post(path, body.encode())
                check(f"{n} levels at {path}: {body[:40]}", answer.status, 400)
                check("code", answer.error()["code"], "invalid_json")
                need("128" in answer.error()["message"], "the limit is named", answer)
                need(answer.seconds < 2 * PATIENCE, f"it took {answer.seconds:.3f} s")
            answer = c.post(CHAT, body.encode(), {"Accept": "text/event-stream"})
            check("with another Accept", answer.status, 400)
    for n in (20_000, 200_000):
        for node in c.nodes:
            for method in ("POST", "PUT"):
                for path in (CHAT, "/metrics", "/debug/pages"):
                    answer = kit.ask(node.address, method, path, nested(n).encode())
                    need(answer.status in (404, 405, 413), f"a node reads no bodies: {answer!r}")
                    answer.error()
            check("GET afterwards", kit.get(node.address, "/healthz").status, 200)
    for levels in (1, 40, 120):  # well under the limit: taken and ignored
        answer = c.post(CHAT, b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"metadata":{"a":%s}}'
                        % nested(levels).encode())
        check(f"{levels} levels in an unknown field", answer.status, 200)
    for process in c.processes.values():
        grown = process.rss_bytes() - before[process.name]
        need(grown < (64 << 20 if c.sanitized else 8 << 20), f"{process.name} has grown by {grown >> 20} MiB")


# ------------------------------------------------------------------------------------------------ HTTP-03


@case("HTTP-03")
def nul_in_texts(c):
    def messages(nul):
        return [user(f"one{nul}two"), user("three")]

    with_nul, without = c.tokens(messages=messages("\0")), c.tokens(messages=messages(""))
    need(len(with_nul) >= len(without), "tokens with NUL", len(with_nul), len(without))
    need(with_nul[-6:] == without[-6:], "the last message and the cue are seen", with_nul, without)
    for role in ("system", "assistant", "tool"):
        turns = [user("zero"), {"role": role, "content": "one\0two"}, user("three")]
        if role == "tool":
            turns[1]["tool_call_id"] = "a"
            turns.insert(1, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]})
        found = c.tokens(messages=turns)
        turns[-2]["content"] = "onetwo"
        wanted = c.tokens(messages=turns)
        need(len(found) >= len(wanted) and found[-6:] == wanted[-6:], f"NUL in a message of {role}", found, wanted)
    check("its tokens say the NUL", c.post("/detokenize", {"tokens": with_nul}).json()["prompt"].count("one\0two"), 1)

    usage = c.good_chat(messages("\0"), max_tokens=1)["usage"]
    check("prompt tokens", usage["prompt_tokens"], len(with_nul))
    check("prompt tokens, streamed", c.good_stream(messages("\0"), max_tokens=1).usage()["prompt_tokens"], len(with_nul))
    check("prompt tokens of a completion", c.good_completion("a\0b", max_tokens=1)["usage"]["prompt_tokens"],
          len(c.tokens(prompt="a\0b")))

    # A stop with NUL inside stops at nothing shorter: the text before it is the whole answer's.
    ask = {"max_tokens": 12, "temperature": 0, "reasoning_effort": "none"}
    whole = c.good_chat("x", **ask)["choices"][0]["message"]["content"]
    check("a stop of NUL and more", c.good_chat("x", stop="green\0blue", **ask)["choices"][0]["message"]["content"], whole)
    check("streamed", c.good_stream("x", stop=["\0"], **ask).text(), whole)
    c.refused(CHAT, {"messages": [user("x")], "model": "baton-tiny\0"}, 404, "model_not_found")
    c.refused(CHAT, {"messages": [user("x")], "model": "\0"}, 404, "model_not_found")
    tools = [{"type": "function", "function": {"name": "f\0g", "parameters": {"type": "object"}}}]
    answer = c.chat("x", tools=tools, max_tokens=1)
    need(answer.status in (200, 400), "NUL in a tool's name", answer)
    c.refused(CHAT, {"messages": [user("x")], "tools": [
        {"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "f\0"}}},
              400, "invalid_value", "tool_choice.function.name")
    need(c.post("/tokenize", {"prompt": "a", "a\0b": 1}).status in (200, 400), "NUL in a key")


# ------------------------------------------------------------------------------------------------ HTTP-06


def chunked(body, size, extension=b""):
    pieces = [body[i:i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(p), extension, p) for p in pieces) + b"0\r\n\r\n"


def wire_ask(c, head, *parts):
    with Wire(c.address) as wire:
        wire.send(head)
        for part in parts:
            wire.send(part)
        return wire.answer()


@case("HTTP-06")
def bodies_in_all_framings(c):
    def head(path, *lines):
        first = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        return first + CRLF.join(line.encode() for line in lines) + CRLF + CRLF

    def body(filler):
        return kit.encode({"messages": [user("hello " + "word " * filler)], "max_tokens": 3, "temperature": 0})

    def same(answer):
        check(f"status ({answer.body[:200]!r})", answer.status, 200)
        value = kit.has_shape(answer.json(), "Chat")
        return value["choices"], value["usage"]

    small, long = body(4), body(1000)
    for data in (small, long):
        wanted = same(c.post(CHAT, data))
        for size, extension in ((1, b""), (7, b";a=b"), (1000, b";x"), (len(data), b';name="v;w"')):
            if size == 1 and data is long:
                data_here, wanted_here = small, same(c.post(CHAT, small))
            else:
                data_here, wanted_here = data, wanted
            answer = wire_ask(c, head(CHAT, "Transfer-Encoding: chunked"), chunked(data_here, size, extension))
            check(f"chunks of {size}{extension!r}", same(answer), wanted_here)
        check("upper case hex, trailer", same(wire_ask(
            c, head(CHAT, "Transfer-Encoding: chunked"),
            b"%X\r\n%s\r\n0\r\nX-Trailer: 1\r\n\r\n" % (len(data), data))), wanted)
    megabyte = kit.encode({"prompt": "word " * 200_000})
    plain = c.post("/tokenize", megabyte).json()
    check("a megabyte in chunks", wire_ask(c, head("/tokenize", "Transfer-Encoding: chunked"),
                                           chunked(megabyte, 16384)).json(), plain)

    for coding in ([f"Content-Length: {len(small)}"], ["Transfer-Encoding: chunked"]):
        with Wire(c.address) as wire:
            wire.send(head(CHAT, "Expect: 100-continue", *coding))
            start = time.monotonic()
            check("interim answer", wire.head()[0], 100)
            kit.in_time("100 Continue", start, 0.5)  # curl waits for a second, and then sends its body unasked
            wire.send(small if "Length" in coding[0] else chunked(small, 100))
            check("after 100", same(wire.answer()), same(c.post(CHAT, small)))
            wire.send(frame("GET", "/healthz"))
            check("the connection goes on", wire.answer().status, 200)
    for expect in ("200-ok", "100-continue, other", "nonsense"):
        answer = wire_ask(c, head(CHAT, f"Expect: {expect}", f"Content-Length: {len(small)}"))
        check(f"Expect: {expect}", (answer.status, answer.error()["code"], answer.interim), (417, "expectation_failed", []))
    limit = 32 << 20
    for lines in (["Expect: 100-continue"], []):
        answer = wire_ask(c, head(CHAT, *lines, f"Content-Length: {limit + 1}"))
        check(f"too long, {lines}", (answer.status, answer.error()["code"], answer.interim),
              (413, "request_too_large", []))
        check("it closes", answer.header("connection"), "close")
    check("neither length nor chunks", wire_ask(c, head(CHAT)).status, 411)
    for lines in (["Transfer-Encoding: chunked", "Content-Length: 5"], ["Content-Length: 5", "Content-Length: 6"],
                  ["Content-Length: +5"], ["Content-Length: 5, 5"], ["Transfer-Encoding: gzip, chunked"],
                  ["Transfer-Encoding: chunked, chunked"], ["Transfer-Encoding: xchunked"]):
        answer = wire_ask(c, head(CHAT, *lines))
        check(f"{lines}", (answer.status, answer.error()["code"]), (400, "invalid_http"))
    for junk in (b"zz\r\nabc\r\n", b"-1\r\n\r\n", b"0x5\r\nhello\r\n", b"5\nhello\r\n0\r\n\r\n",
                 b"5\r\nhelloX\r\n0\r\n\r\n", b"ffffffffffffffff1\r\n"):
        answer = wire_ask(c, head(CHAT, "Transfer-Encoding: chunked"), junk)
        check(f"{junk!r}", (answer.status, answer.error()["code"]), (400, "invalid_http"))


# ------------------------------------------------------------------------------------------------ HTTP-10


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}


@case("HTTP-10")
def messages_in_all_forms(c):
    def talk(form):
        return [{"role": "system", "content": form("be ", "brief")}, user(form("one ", "two")),
                {"role": "assistant", "content": form("three ", "four")}, user(form("a", "b")), CALL,
                {"role": "tool", "tool_call_id": "a", "content": form("re", "sult")}, user(form("last ", "words"))]

    def joined(*texts):
        return "".join(texts)

    strings, lists = c.tokens(messages=talk(joined)), c.tokens(messages=talk(parts))
    check("parts and strings", lists, strings)
    for form in (joined, parts):
        check("prompt tokens", c.good_chat(talk(form), max_tokens=1)["usage"]["prompt_tokens"], len(strings))
        check("prompt tokens, streamed", c.good_stream(talk(form), max_tokens=1).usage()["prompt_tokens"], len(strings))
    text = c.post("/detokenize", {"tokens": strings}).json()["prompt"]
    places = [text.find(piece) for piece in ("be brief", "one two", "three four", "ab", "result", "last words")]
    need(-1 not in places and places == sorted(places), "every text is in the prompt, in order", places, text)
    need(c.tokens(messages=[user(parts("two ", "one"))]) != c.tokens(messages=[user(parts("one ", "two"))]), "order counts")

    system, developer = (c.tokens(messages=[{"role": role, "content": "x"}, user("y")]) for role in ("system", "developer"))
    check("developer is system", developer, system)
    for messages in ([user("a"), {"role": "assistant", "content": ""}, user("b")],
                     [user("a"), CALL, {"role": "tool", "tool_call_id": "a", "content": ""}],
                     [{"role": "system", "content": "only this"}],
                     [user("")], [user(parts(""))], [{"role": "user", "content": "x", "name": "bob"}],
                     [user("a"), {"role": "assistant", "content": "b"}]):
        answer = c.chat(messages, max_tokens=1)
        check(f"{messages} ({answer.body[:200]!r})", answer.status, 200)
        kit.has_shape(answer.json(), "Chat")
    for messages, param, code in (
            ([], "messages", "invalid_value"),
            (None, "messages", "invalid_value"),
            ("hello", "messages", "invalid_value"),
            (["hello"], "messages.0", "invalid_value"),
            ([user("a"), {"role": "wizard", "content": "b"}], "messages.1.role", "invalid_value"),
            ([{"content": "b"}], "messages.0.role", "invalid_value"),
            ([{"role": 1, "content": "b"}], "messages.0.role", "invalid_value"),
            ([user(1)], "messages.0.content", "invalid_value"),
            ([user(None)], "messages.0.content", "invalid_value"),
            ([user([{"type": "image_url", "image_url": {"url": "data:,x"}}])], "messages.0.content.0", "unsupported_value"),
            ([user(parts("a") + [{"type": "input_audio", "input_audio": {}}])], "messages.0.content.1",
             "unsupported_value"),
            ([user([{"type": "magic"}])], "messages.0.content.0", None),
            ([user([{"type": "text"}])], "messages.0.content.0.text", "invalid_value"),
            ([user([{"type": "text", "text": 5}])], "messages.0.content.0.text", "invalid_value"),
            ([user([{"text": "x"}])], "messages.0.content.0", "invalid_value")):
        error = c.refused(CHAT, {"messages": messages}, 400, code)
        need(error["param"] and error["param"].startswith(param), f"param {error['param']!r} for {messages}", error)


# ------------------------------------------------------------------------------------------------ HTTP-12


@case("HTTP-12")
def limits_and_echo(c):
    error = c.refused(COMPLETIONS, {"prompt": "a b c", "max_tokens": 1, "echo": True, "logprobs": 1}, 400,
                      "unsupported_value", "echo")
    need("logprobs" in error["message"], "it says what is not served", error)
    c.refused(COMPLETIONS, {"prompt": "a b c", "max_tokens": 0, "echo": True, "logprobs": 1})
    answer = c.good_completion("a b c", max_tokens=2, echo=True)
    need(answer["choices"][0]["text"].startswith("a b c"), "echo", answer)
    check("echo costs nothing", answer["usage"]["completion_tokens"], 2)
    stream = c.stream(COMPLETIONS, {"prompt": "a b c", "max_tokens": 2, "echo": True}).check("completion")
    check("echo, streamed", stream.text(), answer["choices"][0]["text"])
    for field in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, 1.5, "5", True):
            c.refused(CHAT, {"messages": [user("x")], field: value}, 400, "invalid_value", field)
        for value in (2**63, -2**63, 10**400):  # beyond 64 bits: no number that the parser takes
            c.refused(CHAT, {"messages": [user("x")], field: value}, 400)
        for effort in ("none", "high"):
            answer = c.good_chat("x", **{field: 1, "reasoning_effort": effort})
            check("one token", (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]), (1, "length"))
            stream = c.good_stream("x", **{field: 1, "reasoning_effort": effort})
            check("one token, streamed", (stream.usage()["completion_tokens"], stream.finish()), (1, "length"))
    check("both, equal", c.good_chat("x", max_tokens=3, max_completion_tokens=3)["usage"]["completion_tokens"], 3)
    error = c.refused(CHAT, {"messages": [user("x")], "max_tokens": 3, "max_completion_tokens": 4}, 400, "invalid_value")
    need("max_tokens" in error["message"] and "max_completion_tokens" in error["message"], "both are named", error)
    check("null is absent", c.good_chat("x", max_tokens=None, max_completion_tokens=2)["usage"]["completion_tokens"], 2)
    # The script never closes the reasoning: a limit ends inside it, and all tokens are reasoning.
    answer = c.good_chat("x", max_tokens=5, reasoning_effort="high")
    message, usage = answer["choices"][0]["message"], answer["usage"]
    check("a limit inside the reasoning", (usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"],
                                           answer["choices"][0]["finish_reason"]), (5, 5, "length"))
    need(message["reasoning_content"] and not message["content"], "the text is in the reasoning", message)
    stream = c.good_stream("x", max_tokens=5, reasoning_effort="high")
    check("streamed", (stream.reasoning(), stream.text(), stream.usage()), (message["reasoning_content"], "", usage))


# ------------------------------------------------------------------------------------------------ HTTP-13


@case("HTTP-13")
def shapes_of_answers_and_errors(c):
    """Shapes of good answers are tested wherever one comes (kit.has_shape); here are those that no other case asks for,
    and errors of every status that this cluster can give."""
    chat = c.good_chat("x", max_tokens=3, logprobs=True, top_logprobs=2, n=2)
    check("choices", [choice["index"] for choice in chat["choices"]], [0, 1])
    for choice in chat["choices"]:
        need(choice["logprobs"]["content"], "logprobs of a chat", choice)
        check("alternatives", [len(t["top_logprobs"]) for t in choice["logprobs"]["content"]], [2, 2, 2])
    stream = c.good_stream("x", max_tokens=3, logprobs=True, top_logprobs=1)
    tokens = [t for p in stream.pieces() if p["logprobs"] for t in p["logprobs"]["content"]]
    check("logprobs in a stream", len(tokens), 3)
    completion = c.good_completion(["a", "b"], max_tokens=3, logprobs=2)
    check("logprobs of completions", [len(choice["logprobs"]["tokens"]) for choice in completion["choices"]], [3, 3])
    stream = c.stream(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3, "stream_options": {"include_usage": True}})
    stream.check("completion", 2, include_usage=True)
    kit.has_shape(c.ask("GET", "/v1/models").json(), "Models")
    model = c.ask("GET", "/v1/models").json()["data"][0]["id"]
    kit.has_shape(c.ask("GET", f"/v1/models/{model}").json(), "Model")
    kit.has_shape(c.post("/tokenize", {"prompt": "a"}).json(), "Tokens")
    kit.has_shape(c.post("/detokenize", {"tokens": [5]}).json(), "Text")

    ask = {"messages": [user("x")]}
    for status, code, answer in (
            (400, "invalid_json", c.post(CHAT, b"{")),
            (400, "invalid_json", c.post(CHAT, b"[]")),
            (400, "invalid_json", c.post(CHAT, b"")),
            (400, "invalid_json", c.post(CHAT, b'{"messages":[],"messages":[]}')),
            (400, "invalid_json", c.post(CHAT, b'{"messages":"\xff"}')),
            (400, "invalid_value", c.post(CHAT, {**ask, "temperature": "hot"})),
            (400, "invalid_value", c.post(CHAT, {**ask, "n": 17})),
            (400, "unsupported_value", c.post(CHAT, {**ask, "response_format": {"type": "json_object"}})),
            (400, "context_length_exceeded", c.post(COMPLETIONS, {"prompt": [5] * 70000})),
            (404, "model_not_found", c.post(CHAT, {**ask, "model": "gpt-x"})),
            (404, "model_not_found", c.ask("GET", "/v1/models/gpt-x")),
            (404, "unknown_url", c.ask("GET", "/nowhere")),
            (404, "unknown_url", c.post("/v1/chat", ask)),
            (404, "unknown_url", c.ask("GET", "/v1/models/")),
            (405, "method_not_supported", c.ask("GET", CHAT)),
            (405, "method_not_supported", c.ask("DELETE", "/v1/models")),
            (413, "request_too_large", c.post(CHAT, b"x", {"Content-Length": str(1 << 40)})),
            (415, "unsupported_media_type", c.post(CHAT, ask, {"Content-Type": "text/plain"})),
            (415, "unsupported_media_type", c.post(CHAT, ask, {"Content-Encoding": "gzip"})),
            (431, "headers_too_large", c.ask("GET", "/v1/models", None, {"X-Long": "x" * 40000}))):
        check(f"status ({answer.body!r:.200})", answer.status, status)
        check("code", answer.error()["code"], code)
        check("type", answer.error()["type"], "invalid_request_error")
        if status == 405:
            need(answer.header("allow"), "405 with Allow", answer)
    for node in c.nodes:
        check("a node's 404", kit.get(node.address, "/nowhere").error()["code"], "unknown_url")
        check("a node's 405", kit.ask(node.address, "POST", "/metrics", {}).error()["code"], "method_not_supported")


# ------------------------------------------------------------------------------------------------ HTTP-08

ORIGIN = "http://localhost:5173"
keyed = suite.cluster(script=plain_text, extra=["router:--api-key=sesame", f"router:--cors-origin={ORIGIN}"])


def lists(value):
    return {item.strip().lower() for item in (value or "").split(",") if item.strip()}


@keyed("HTTP-08")
def browsers(c):
    asked = "authorization,content-type,x-stainless-os"
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked}
    for path in (CHAT, COMPLETIONS, "/v1/models", "/health"):
        answer = kit.ask(c.address, "OPTIONS", path, None, preflight)
        check(f"a preflight without a key: {answer!r}", (answer.status, answer.body), (204, b""))
        check("origin", answer.header("access-control-allow-origin"), ORIGIN)
        need(lists(answer.header("access-control-allow-headers")) >= lists(asked), "headers that were asked for", answer)
        need("post" in lists(answer.header("access-control-allow-methods")) or "GET" in str(answer), "methods", answer)
        check("no length and no body", answer.header("content-length"), None)
    answer = kit.ask(c.address, "OPTIONS", CHAT, None, {**preflight, "Origin": "http://elsewhere"})
    check("a foreign origin", answer.header("access-control-allow-origin"), None)

    for path in ("/health", "/readyz", "/healthz", "/metrics", "/livez"):
        answer = kit.ask(c.address, "HEAD", path, None, {"Origin": ORIGIN})
        check(f"HEAD {path}", (answer.status, answer.body), (200, b""))
        need(int(answer.header("content-length", "0")) > 0, "a HEAD names the length", answer)
        check("CORS of a HEAD", answer.header("access-control-allow-origin"), ORIGIN)
        with Wire(c.address) as wire:  # and nothing but headers was sent
            wire.send(frame("HEAD", path) + frame("GET", "/livez"))
            wire.answer(is_head=True)
            check("the next answer", wire.answer().status, 200)
    for method, path in (("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", "/v1/models")):
        answer = c.ask(method, path)
        check(f"{method} {path}", (answer.status, answer.error()["code"]), (405, "method_not_supported"))
        need(lists(answer.header("allow")) & {"post", "get"}, "Allow", answer)
    answer = c.ask("TRACE", "/")
    need(answer.status in (404, 405), "TRACE", answer)
    need(b"sesame" not in answer.body and b"Bearer" not in answer.body, "TRACE gives nothing back", answer)

    # What a page does: preflight, then fetch with the key, and reads the stream as it comes.
    with Wire(c.address) as wire:
        wire.send(frame("OPTIONS", CHAT, None, preflight))
        check("preflight", wire.answer().status, 204)
        wire.send(frame("POST", CHAT, {"messages": [user("x")], "max_tokens": 5, "stream": True},
                        {"Origin": ORIGIN, "Authorization": "Bearer sesame", "Accept": "text/event-stream",
                         "Sec-Fetch-Mode": "cors", "Referer": ORIGIN + "/"}))
        stream = kit.read_stream(wire)
        need(isinstance(stream, kit.Stream), "a stream", stream)
        stream.check()
        check("CORS of a stream", dict(stream.headers).get("access-control-allow-origin"), ORIGIN)
        wire.send(frame("POST", CHAT, {"messages": []}, {"Origin": ORIGIN, "Authorization": "Bearer sesame"}))
        answer = wire.answer()
        check("an error that the page may read", (answer.status, answer.header("access-control-allow-origin")),
              (400, ORIGIN))
        wire.send(frame("POST", CHAT, {"messages": [user("x")]}, {"Origin": ORIGIN}))
        answer = wire.answer()
        check("without a key", (answer.status, answer.error()["code"], answer.header("www-authenticate")),
              (401, "invalid_api_key", "Bearer"))
        check("CORS of 401", answer.header("access-control-allow-origin"), ORIGIN)


PAGE = """<script type="module">
const found = {};
const ask = (path, more) => fetch("%(url)s" + path, {headers: {"Authorization": "Bearer sesame",
    "Content-Type": "application/json", "X-Stainless-OS": "Linux"}, ...more});
const body = (fields) => JSON.stringify({messages: [{role: "user", content: "x"}], ...fields});
try {
    found.models = (await (await ask("/v1/models")).json()).data.length;
    found.health = (await fetch("%(url)s/health")).status;
    const whole = await ask("%(chat)s", {method: "POST", body: body({max_tokens: 5})});
    found.whole = (await whole.json()).choices[0].finish_reason;
    const wrong = await ask("%(chat)s", {method: "POST", body: "{}"});
    found.wrong = [wrong.status, (await wrong.json()).error.param];
    const noKey = await fetch("%(url)s%(chat)s", {method: "POST", body: body(), headers: {"Content-Type": "application/json"}});
    found.no_key = [noKey.status, (await noKey.json()).error.code];
    const stream = await ask("%(chat)s", {method: "POST", body: body({max_tokens: 300, stream: true})});
    const reader = stream.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", pieces = 0;
    for (let piece; !(piece = await reader.read()).done; pieces++) text += piece.value;
    const events = text.split("\\n\\n").filter(e => e);
    found.stream = [stream.headers.get("content-type").split(";")[0], events.at(-1), events.length > 3, pieces > 3];
    const leaves = new AbortController();
    const left = await ask("%(chat)s", {method: "POST", body: body({max_tokens: 20000, stream: true}), signal: leaves.signal});
    await left.body.getReader().read();
    leaves.abort();
} catch (problem) {
    found.problem = String(problem);
}
await fetch("/found", {method: "POST", body: JSON.stringify(found)});
</script>"""


def pages_that_ask(url_of):
    """A handler that serves the page, and a queue of what its script found."""
    found = queue.Queue()

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # pylint: disable=invalid-name
            page = (PAGE % {"url": url_of, "chat": CHAT}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self):  # pylint: disable=invalid-name
            found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    return Pages, found


def chromium():
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if shutil.which(name):
            return name
    raise kit.Skip("Chromium is not installed")


@suite.case("HTTP-08-chromium")
def a_page_in_chromium(build):
    """A page of one origin that is allowed, and the same page of one that is not."""
    program = chromium()
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) for _ in range(2)]
    origins = [f"http://localhost:{server.server_port}" for server in servers]
    with kit.Cluster(build, "split", script=plain_text(build), extra=[
            "router:--api-key=sesame", f"router:--cors-origin={origins[0]}", "node:--sim-step=5"]) as c:
        handler, found = pages_that_ask(f"http://127.0.0.1:{c.address[1]}")
        for server, origin in zip(servers, origins):
            server.RequestHandlerClass = handler
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with tempfile.TemporaryDirectory() as folder:
                child = subprocess.Popen([program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                                          "--disable-dev-shm-usage", "--disable-background-networking",
                                          f"--user-data-dir={folder}", origin + "/"], stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL, start_new_session=True,
                                         env={k: v for k, v in os.environ.items() if "SAN_OPTIONS" not in k})
                try:
                    said = found.get(timeout=60 * PATIENCE)
                except queue.Empty:
                    raise kit.Wrong("the page said nothing") from None
                finally:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    server.shutdown()
                    server.server_close()
            if origin == origins[1]:
                check("a page of another origin sees nothing", said, {"problem": "TypeError: Failed to fetch"})
                continue
            check("what the page saw", said, {
                "models": 1, "health": 200, "whole": "length", "wrong": [400, "messages"], "no_key": [401, "invalid_api_key"],
                "stream": ["text/event-stream", "data: [DONE]", True, True]})
            kit.wait_for("the stream that the page left is cancelled",
                         lambda: c.router.metric("baton_requests_cancelled_total") == 1, 5)


@case("HTTP-08-off")
def no_cors_by_default(c):
    answer = c.ask("GET", "/v1/models", None, {"Origin": ORIGIN})
    check("no CORS unless it is asked for", answer.header("access-control-allow-origin"), None)
    answer = c.ask("OPTIONS", CHAT, None, {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"})
    check("OPTIONS", (answer.status, answer.header("access-control-allow-origin")), (405, None))


# ------------------------------------------------------------------------------------------------ HTTP-13, overload

full = suite.cluster(script=plain_text, layouts=("lone",), extra=[
    "decode:--queue=1", "decode:--max-sequences=1", "node:--sim-step=30", "router:--max-requests=64"])


@full("HTTP-13-429")
def errors_when_full(c):
    with Wire(c.address) as wire, Wire(c.address) as waits:
        wire.send(frame("POST", CHAT, {"messages": [user("x")], "max_tokens": 400, "stream": True}))
        wire.head()  # it runs
        waits.send(frame("POST", CHAT, {"messages": [user("x")], "max_tokens": 400}))
        kit.wait_for("one that waits", lambda: c.decode().metric("baton_requests_queued") == 1)
        for stream in (False, True):
            answer = (c.chat_stream if stream else c.chat)("y", max_tokens=2)
            check(f"status ({answer!r})", answer.status, 429)
            check("error", (answer.error()["type"], answer.error()["code"]), ("rate_limit_error", "queue_full"))
            need(int(answer.header("retry-after")) >= 1, "Retry-After in whole seconds", answer)
    kit.wait_for("room", lambda: c.chat("y", max_tokens=2).status == 200)


@suite.case("HTTP-13-503")
def errors_without_nodes(build):
    with kit.Cluster(build, "lone", script=plain_text(build)) as c:
        c.supervisor({"do": "kill", "name": "decode-0"})
        answer = kit.wait_for("a 503", lambda: (lambda a: a if a.status == 503 else None)(c.chat("x", max_tokens=2)), 8)
        check("error", (answer.error()["type"], answer.error()["code"]), ("server_error", "no_ready_node"))
        need(int(answer.header("retry-after")) >= 1, "Retry-After", answer)
        answer = c.chat_stream("x", max_tokens=2)
        check("streamed", (answer.status, answer.error()["code"]), (503, "no_ready_node"))
        ready = c.ask("GET", "/readyz")
        check("readiness", ready.status, 503)
        c.supervisor({"do": "start", "name": "decode-0"})
        kit.wait_for("a good answer again", lambda: c.chat("x", max_tokens=2).status == 200, 10)


if __name__ == "__main__":
    suite.main()
