"""Requests framed by hand, answers and event streams judged as they come: what the cases speak with. See kit.py."""
import contextlib
import json
import os
import re
import socket
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests"))
import lost  # noqa: E402  pylint: disable=wrong-import-position

TINY = os.path.join(TOP, "models", "baton-tiny")
CRLF = b"\r\n"
LONG = bool(os.environ.get("CASES_LONG"))  # the numbers of the reports, where they take minutes
PATIENCE = float(os.environ.get("CASES_PATIENCE", "1"))  # sanitizers and busy machines: every limit times this


class Wrong(AssertionError):
    """What was found is not what the case asks for."""


class Skip(Exception):
    """The case cannot run here; the text says why."""


def check(what, found, wanted):
    if found != wanted:
        raise Wrong(f"{what}: found {found!r:.600}, wanted {wanted!r:.600}")


def need(holds, what, *found):
    if not holds:
        raise Wrong(what + "".join(f"\n  {item!r:.1200}" for item in found))


def wait_for(what, condition, seconds=5.0, every=0.02):
    """Waits until condition() is true, and returns what it gave. What the machine lost meanwhile is added."""
    start = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        if lost.over(start, seconds * PATIENCE):
            raise Wrong(f"not within {seconds * PATIENCE:.1f} s: {what}")
        time.sleep(every)


def in_time(what, start, seconds, end=None):
    """It has taken no more than this since `start`, beside what the machine lost."""
    if not lost.within(what, start, seconds * PATIENCE, end):
        raise Wrong(f"{what}: not within {seconds * PATIENCE:.1f} s")


def given(start, end=None):
    """Seconds since `start` that the machine gave."""
    end = time.monotonic() if end is None else end
    return end - start - lost.between(start, end)


# ------------------------------------------------------------------------------------------------ OpenAI's shapes

sys.path.insert(0, os.path.join(TOP, "tests", "router"))
from check_openai_schema import breaches  # noqa: E402  pylint: disable=wrong-import-position

with open(os.path.join(TOP, "tests", "router", "openai_schema.json"), encoding="utf-8") as _file:
    SHAPES = json.load(_file)["$defs"]


def has_shape(value, name):
    """Every answer goes through here, so that each case also tests the shape of what it gets."""
    found = list(breaches(value, SHAPES[name], SHAPES))
    need(not found, f"not a {name}: {found[:6]}", value)
    return value


# ------------------------------------------------------------------------------------------------ HTTP


class Answer:
    """One whole answer. interim: statuses of 1xx answers before it, each with the second it came."""

    def __init__(self, status, reason, headers, body, interim, seconds):
        self.status, self.reason, self.headers, self.body = status, reason, headers, body
        self.interim, self.seconds = interim, seconds

    def header(self, name, default=None):
        return next((value for key, value in self.headers if key == name.lower()), default)

    def json(self):
        try:
            return json.loads(self.body)
        except ValueError as problem:
            raise Wrong(f"no JSON in the answer {self.status}: {self.body!r:.300} ({problem})") from None

    def error(self):
        """The error object, checked: OpenAI's nested form, with all four members."""
        check("content type of an error", self.header("content-type"), "application/json")
        return has_shape(self.json(), "Error")["error"]

    def __repr__(self):
        return f"<{self.status} {dict(self.headers)} {self.body[:400]!r}>"


class Wire:
    """One connection, with the bytes in the caller's hands."""

    def __init__(self, address, timeout=20.0):
        self.socket = socket.create_connection(address, timeout=timeout * PATIENCE)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.data = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.socket.close()

    def reset(self):
        """Closes with RST, as a killed peer's machine may."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def more(self):
        piece = self.socket.recv(65536)
        self.data += piece
        return bool(piece)

    def take(self, n):
        while len(self.data) < n:
            if not self.more():
                raise EOFError(f"the connection ended {n - len(self.data)} bytes early")
        piece, self.data = self.data[:n], self.data[n:]
        return piece

    def line(self):
        while CRLF not in self.data:
            if not self.more():
                raise EOFError(f"the connection ended inside a line: {self.data[:200]!r}")
        line, self.data = self.data.split(CRLF, 1)
        return line

    def head(self):
        """(status, reason, headers) of the next answer's head; header names in lower case."""
        line = self.line()
        match = re.fullmatch(rb"HTTP/1\.[01] (\d{3}) ([\t -~]*)", line)
        need(match, "not a status line", line)
        headers = []
        while True:
            line = self.line()
            if not line:
                return int(match[1]), match[2].decode(), headers
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.lower(), value.strip()))

    def chunks(self):
        """The chunks of a chunked body, each as it comes."""
        while True:
            size = int(self.line().split(b";")[0], 16)
            if size == 0:
                check("after the last chunk", self.line(), b"")
                return
            piece = self.take(size)
            check("end of a chunk", self.take(2), CRLF)
            yield piece

    def answer(self, is_head=False):
        start, interim = time.monotonic(), []
        while True:
            status, reason, headers = self.head()
            if status >= 200:
                break
            interim.append((status, time.monotonic() - start))
        fields = dict(headers)
        if is_head or status in (204, 304):
            body = b""
        elif fields.get("transfer-encoding") == "chunked":
            body = b"".join(self.chunks())
        elif "content-length" in fields:
            body = self.take(int(fields["content-length"]))
        else:
            while self.more():
                pass
            body, self.data = self.data, b""
        return Answer(status, reason, headers, body, interim, time.monotonic() - start)

    def ended(self, seconds=3.0):
        """Whether the peer closes (or resets) without another byte within this time."""
        self.socket.settimeout(seconds * PATIENCE)
        try:
            return not self.data and not self.socket.recv(1)
        except ConnectionResetError:
            return True
        except socket.timeout:
            return False


def encode(body):
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")


def frame(method, path, body=None, headers=(), host="localhost"):
    """The bytes of one request, with a length where there is a body."""
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), f"Host: {host}".encode()]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in dict(headers).items()]
    if body is not None:
        body = encode(body)
        named = {name.lower() for name in dict(headers)}
        if "content-type" not in named:
            lines.append(b"Content-Type: application/json")
        if "content-length" not in named and "transfer-encoding" not in named:
            lines.append(b"Content-Length: %d" % len(body))
    return CRLF.join(lines) + CRLF + CRLF + (body or b"")


def ask(address, method, path, body=None, headers=(), timeout=20.0):
    """One request on a connection of its own, and its whole answer."""
    with Wire(address, timeout) as wire:
        # A server may answer and close before it has read all of a body that it refuses.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            wire.send(frame(method, path, body, headers))
        return wire.answer(is_head=method == "HEAD")


def get(address, path, headers=()):
    return ask(address, "GET", path, None, headers)


# ------------------------------------------------------------------------------------------------ event streams


class Stream:
    """A streamed answer as it was received. events: the parsed JSON of each, times: when each came."""

    def __init__(self, headers):
        self.headers, self.events, self.times, self.comments = headers, [], [], []
        self.done = False   # [DONE] came
        self.whole = False  # the body ended as its framing says
        self.error = None   # the object of an error event

    def check(self, kind="chat", n=1, include_usage=False):
        """The rules of every good stream. Returns self."""
        need(self.error is None, "the stream ended with an error", self.error)
        need(self.done, "no [DONE]", self.events[-2:])
        need(self.whole, "the body was cut")
        need(self.events, "a stream without events")
        object_name = "chat.completion.chunk" if kind == "chat" else "text_completion"
        for field in ("id", "created", "model", "system_fingerprint"):
            values = {json.dumps(event.get(field, "absent")) for event in self.events}
            check(f"values of {field} in one stream", len(values), 1)
        need(self.events[0]["id"].startswith("chatcmpl-" if kind == "chat" else "cmpl-"), "id", self.events[0]["id"])
        finished, begun = {}, set()
        for at, event in enumerate(self.events):
            check("object", event["object"], object_name)
            if kind == "chat":
                has_shape(event, "ChatChunkWithUsage" if include_usage else "ChatChunk")
            else:
                has_shape(event if include_usage else {**event, "usage": None}, "CompletionChunkWithUsage")
            is_last = at == len(self.events) - 1
            if include_usage and is_last:
                check("choices of the chunk with usage", event["choices"], [])
                self.check_usage(event["usage"])
                continue
            if include_usage:
                need(event["usage"] is None, "usage is null until the last chunk", event)
            else:
                need("usage" not in event, "usage that was not asked for", event)
            need(event["choices"], "a chunk without choices that brings no usage", event)
            for choice in event["choices"]:
                index = choice["index"]
                need("finish_reason" in choice and "logprobs" in choice, "members of a choice", choice)
                need(index not in finished, "a chunk after the finish_reason of its index", event)
                if kind == "chat":
                    if index not in begun:
                        check("role of the first delta", choice["delta"].get("role"), "assistant")
                    else:
                        need("role" not in choice["delta"], "the role came twice", event)
                begun.add(index)
                if choice["finish_reason"] is not None:
                    finished[index] = choice["finish_reason"]
        check("indexes that finished", sorted(finished), list(range(n)))
        if kind == "chat":
            check("indexes that began", sorted(begun), list(range(n)))
        return self

    @staticmethod
    def check_usage(usage):
        for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
            need(isinstance(usage[field], int) and usage[field] >= 0, "a count", usage)
        check("total", usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])

    def usage(self):
        return self.events[-1]["usage"]

    def pieces(self, index=0):
        for event in self.events:
            for choice in event["choices"]:
                if choice["index"] == index:
                    yield choice

    def finish(self, index=0):
        return next((c["finish_reason"] for c in self.pieces(index) if c["finish_reason"] is not None), None)

    def text(self, index=0):
        """The answer's content; of completions their text."""
        parts = [c["delta"].get("content") if "delta" in c else c["text"] for c in self.pieces(index)]
        return "".join(part for part in parts if part)

    def reasoning(self, index=0):
        return "".join(c["delta"].get("reasoning_content") or "" for c in self.pieces(index))

    def calls(self, index=0):
        """The tool calls of a choice, put together under the rules that clients rely on."""
        calls = []
        for choice in self.pieces(index):
            for delta in choice["delta"].get("tool_calls") or []:
                at, function = delta["index"], delta["function"]
                if at == len(calls):
                    check("type in the first delta of a call", delta["type"], "function")
                    need(delta["id"] and function["name"], "id and name in the first delta of a call", delta)
                    calls.append({"id": delta["id"], "name": function["name"], "arguments": function["arguments"]})
                else:
                    check("a delta belongs to the last call", at, len(calls) - 1)
                    check("members of a later delta", (sorted(delta), list(function)),
                          (["function", "index"], ["arguments"]))
                    calls[at]["arguments"] += function["arguments"]
        check("ids of calls that differ", len({call["id"] for call in calls}), len(calls))
        return calls


def read_stream(wire):
    """Reads a streamed answer to its end; an answer that is no stream is returned as an Answer."""
    start = time.monotonic()
    status, reason, headers = wire.head()
    fields = dict(headers)
    if status != 200 or not fields.get("content-type", "").startswith("text/event-stream"):
        if "content-length" in fields:
            body = wire.take(int(fields["content-length"]))
        else:
            body = b"".join(wire.chunks())
        return Answer(status, reason, headers, body, [], time.monotonic() - start)
    need("content-length" not in fields, "a stream has no length", headers)
    check("transfer coding of a stream", fields.get("transfer-encoding"), "chunked")
    stream = Stream(headers)
    for event in events_of(wire, stream):
        take_event(stream, event)
    return stream


def events_of(wire, stream):
    """Each event's bytes without its blank line, as soon as it is whole."""
    data = b""
    try:
        for piece in wire.chunks():
            data += piece
            while b"\n\n" in data:
                event, data = data.split(b"\n\n", 1)
                yield event
        check("bytes after the last event", data, b"")
        stream.whole = True
    except (EOFError, ConnectionResetError):
        pass


def take_event(stream, event):
    text = event.decode("utf-8")  # whole code points, or this raises
    if text.startswith(":"):
        stream.comments.append(text)
        return
    need(not stream.done, "an event after [DONE]", text)
    need(text.startswith("data: ") and "\n" not in text, "an event is one line of data", text)
    text = text[len("data: "):]
    if text == "[DONE]":
        stream.done = True
        return
    value = json.loads(text)
    if "error" in value:
        check("members of an error event", sorted(value["error"]), ["code", "message", "param", "type"])
        stream.error = value["error"]
        return
    stream.events.append(value)
    stream.times.append(time.monotonic())


def post_stream(address, path, body, headers=(), timeout=30.0):
    """A request with "stream": true; a Stream, or an Answer if it was refused."""
    with Wire(address, timeout) as wire:
        wire.send(frame("POST", path, {**body, "stream": True}, headers))
        return read_stream(wire)
