"""Clients: each asks, reads its answer, compares it with the right one, and asks again until it is told to end.

Every request ends in one of these, and never in none:

    right, wrong       a whole answer
    error CODE         the server said that it failed
    cut, refused       the connection broke, or none was to be had (only where the router itself is drilled)
    left               the client went away, as it was to
    unanswered         nothing of the above inside the deadline
"""
import contextlib
import dataclasses
import json
import random
import socket
import threading
import time

import kit

from . import oracle

DEADLINE_S = {"sim": 30.0, "cpu": 90.0}  # of a request, whatever happens to it; undisturbed ones take a second or few


@dataclasses.dataclass
class Ask:
    path: str
    body: dict
    right: oracle.Right
    is_chat: bool = False
    leave: str = None  # "before" the first token, or "after": the client goes away


@dataclasses.dataclass
class Verdict:
    start: float
    end: float
    outcome: str
    code: str = ""
    wrong: int = 0         # tokens
    other: list = dataclasses.field(default_factory=list)
    stall: float = 0.0     # the longest wait for a next event, once the answer had begun
    first: float = 0.0     # until the first token
    shown: int = 0         # characters that the client had seen

    def is_answer(self):
        return self.outcome in ("right", "wrong")


class Late(Exception):
    """The deadline has passed."""


class DeadlineWire(kit.Wire):
    """A connection on which everything must be over at one moment."""

    def __init__(self, address, deadline):
        self.deadline = deadline
        super().__init__(address, timeout=max(0.1, deadline - time.monotonic()) / kit.PATIENCE)

    def more(self):
        self.socket.settimeout(max(0.001, self.deadline - time.monotonic()))
        try:
            return super().more()
        except socket.timeout:
            raise Late() from None


class Received:
    """An answer as it comes, of both endpoints, streamed or whole."""

    def __init__(self, n_choices, is_chat):
        self.right = oracle.Right([oracle.Choice("", None) for _ in range(n_choices)], 0, 0)
        self.is_chat, self.ids, self.shown = is_chat, set(), 0

    def take(self, event):
        """One object of the stream, or the whole answer."""
        self.ids.add((event["id"], event["created"], event["model"]))
        for piece in event["choices"]:
            choice = self.right.choices[piece["index"]]
            source = piece.get("delta") or piece.get("message") or piece
            for member in ("reasoning_content", "content", "text"):
                choice.text += source.get(member) or ""
            choice.finish = choice.finish or piece["finish_reason"]
            if piece.get("logprobs"):
                self.take_logprobs(choice, piece["logprobs"])
        self.shown = sum(len(choice.text) for choice in self.right.choices)
        if event.get("usage"):
            self.right.prompt_tokens = event["usage"]["prompt_tokens"]
            self.right.completion_tokens = event["usage"]["completion_tokens"]

    def take_logprobs(self, choice, logprobs):
        if choice.tokens is None:
            choice.tokens, choice.logprobs, choice.top = [], [], []
        if self.is_chat:
            entries = logprobs.get("content") or []
            choice.tokens += [entry["token"] for entry in entries]
            choice.logprobs += [entry["logprob"] for entry in entries]
            choice.top += [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries]
        else:
            choice.tokens += logprobs["tokens"]
            choice.logprobs += logprobs["token_logprobs"]
            choice.top += logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])

    def all_finished(self):
        return all(choice.finish for choice in self.right.choices)


def events_of(wire):
    """The texts of a stream's events, then "cut" unless the body came to its end."""
    data = b""
    try:
        for piece in wire.chunks():
            data += piece
            *whole, data = data.split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:]
    except (EOFError, ConnectionError):
        yield b"cut"


def read_stream(wire, ask, received, verdict):
    """Reads to the end, or until it is time to leave; the outcome."""
    last, done = None, False
    for event in events_of(wire):
        if event == b"cut":
            return "error" if verdict.code else "right" if done else "cut"
        if event == b"[DONE]":
            done = True
            continue
        event = json.loads(event)
        if "error" in event:
            verdict.code = event["error"]["code"]
            continue
        now = time.monotonic()
        before = received.shown
        received.take(event)
        if received.shown > before:
            if last is None:
                verdict.first = now - verdict.start
            else:
                verdict.stall = max(verdict.stall, now - last)
            last = now
            if ask.leave == "after" and received.shown >= 3:
                return "left"
    return "error" if verdict.code else "right" if done else "cut"


def read_answer(wire, ask, received, verdict):
    status, _, headers = wire.head()
    fields = dict(headers)
    if ask.body.get("stream") and status == 200:
        return read_stream(wire, ask, received, verdict)
    body = wire.take(int(fields["content-length"])) if "content-length" in fields else b"".join(wire.chunks())
    value = json.loads(body)
    if status != 200:
        verdict.code = value["error"]["code"]
        return "error"
    received.take(value)
    return "right"


def leave(wire, how):
    """The ways in which clients go: closed, reset, half closed and then closed."""
    if how == 0:
        wire.reset()
    elif how == 1:
        with contextlib.suppress(OSError):
            wire.socket.shutdown(socket.SHUT_WR)
            time.sleep(0.02)


def send(address, ask, rng=None, deadline_s=90.0):
    """One request, and what became of it."""
    start = time.monotonic()
    verdict = Verdict(start, start, "unanswered")
    received = Received(len(ask.right.choices), ask.is_chat)
    try:
        with DeadlineWire(address, start + deadline_s) as wire:
            wire.send(kit.frame("POST", ask.path, ask.body))
            if ask.leave == "before":
                time.sleep((rng or random).uniform(0, 0.08))
                verdict.outcome = "left"
                leave(wire, (rng or random).randrange(3))
            else:
                verdict.outcome = read_answer(wire, ask, received, verdict)
                if verdict.outcome == "left":
                    leave(wire, (rng or random).randrange(3))
    except Late:
        verdict.outcome = "unanswered"
    except ConnectionRefusedError:
        verdict.outcome = "refused"
    except (EOFError, OSError) as problem:
        late = time.monotonic() >= start + deadline_s
        verdict.outcome, verdict.code = ("unanswered" if late else "cut"), type(problem).__name__
    except (ValueError, KeyError, IndexError, kit.Wrong) as problem:
        verdict.outcome, verdict.other = "wrong", [f"not an answer: {problem!r:.300}"]
    verdict.end = time.monotonic()
    verdict.shown = received.shown
    judge(verdict, ask, received)
    return verdict


def judge(verdict, ask, received):
    whole = verdict.outcome == "right"
    wrong, other = oracle.differences(received.right, ask.right, whole)
    if len(received.ids) > 1:
        other.append(f"{len(received.ids)} ids in one answer")
    verdict.wrong += wrong
    verdict.other += other
    if verdict.wrong or verdict.other:
        verdict.outcome = "wrong"
        verdict.other.append(f"of {json.dumps(ask.body)[:200]}: {received.right.choices!r:.300}, "
                             f"right is {ask.right.choices!r:.300}")


class SimMix:
    """Requests to the sim engine: prompts of ids, of 300 to 2000 tokens, no two alike."""

    def __init__(self, letters, vocab, prompt=(300, 2000), answer=(4, 60), leave_share=0.0, plain=False):
        self.letters, self.vocab = letters, vocab
        self.prompt, self.answer, self.leave_share, self.plain = prompt, answer, leave_share, plain

    def make(self, rng):
        n = rng.randint(*self.answer)
        ids = rng.choices(range(100, self.vocab - 100), k=rng.randint(*self.prompt))
        body = {"prompt": ids, "max_tokens": n, "temperature": 0, "ignore_eos": True}
        options = {"seed": None, "n_choices": 1, "want_logprobs": False, "stop": None}
        kind = 1.0 if self.plain else rng.random()
        if kind < 0.3:
            body.update(temperature=0.7, seed=rng.randrange(1 << 31))
            options["seed"] = body["seed"]
        elif kind < 0.4:
            body["n"] = options["n_choices"] = 2
        elif kind < 0.5:
            ahead = oracle.sim_right(ids, n, self.letters, self.vocab).choices[0].text
            body["stop"] = options["stop"] = ahead[2 * n // 3:][:3]
        if rng.random() < 0.3 and not self.plain:
            body["logprobs"], options["want_logprobs"] = 1, True
        if rng.random() < 0.7:
            body.update(stream=True, stream_options={"include_usage": True})
        right = oracle.sim_right(ids, n, self.letters, self.vocab, **options)
        gone = None
        if rng.random() < self.leave_share:
            gone = "after" if body.get("stream") and rng.random() < 0.5 else "before"
        return Ask("/v1/completions", body, right, leave=gone)


class FixedMix:
    """The same requests again and again, whose right answers were recorded."""

    def __init__(self, asks, leave_share=0.0):
        self.asks, self.leave_share = asks, leave_share

    def make(self, rng):
        ask = rng.choice(self.asks)
        stream = rng.random() < 0.7
        body = dict(ask.body, **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}))
        gone = None
        if rng.random() < self.leave_share:
            gone = "after" if stream and rng.random() < 0.5 else "before"
        return dataclasses.replace(ask, body=body, leave=gone)


class Load:
    """n clients in threads. verdicts grows while they run."""

    def __init__(self, address, mix, n, seed, pause=0.02, deadline_s=30.0):
        self.address, self.mix, self.n, self.seed, self.pause = address, mix, n, seed, pause
        self.deadline_s = deadline_s
        self.verdicts, self.lock = [], threading.Lock()
        self.ending = threading.Event()
        self.threads, self.in_flight = [], 0

    def __enter__(self):
        for i in range(self.n):
            thread = threading.Thread(target=self.work, args=(i,), daemon=True)
            thread.start()
            self.threads.append(thread)
        return self

    def __exit__(self, *_):
        self.end()

    def work(self, i):
        rng = random.Random(f"{self.seed} {i}")
        while not self.ending.is_set():
            ask = self.mix.make(rng)
            with self.lock:
                self.in_flight += 1
            verdict = send(self.address, ask, rng, self.deadline_s)
            with self.lock:
                self.in_flight -= 1
                self.verdicts.append(verdict)
            if verdict.outcome in ("refused", "error", "cut"):
                self.ending.wait(0.1)
            self.ending.wait(rng.uniform(0, 2 * self.pause))

    def end(self):
        """No new requests; those that run come to their end."""
        self.ending.set()
        for thread in self.threads:
            thread.join(self.deadline_s + 10)
        stuck = sum(thread.is_alive() for thread in self.threads)
        with self.lock:
            now = time.monotonic()
            self.verdicts += [Verdict(now - self.deadline_s, now, "unanswered", "the client itself hangs")] * stuck
        self.threads = []

    def count(self):
        """{outcome: how many}, errors by their code."""
        found = {}
        with self.lock:
            for verdict in self.verdicts:
                name = verdict.outcome + (" " + verdict.code if verdict.code else "")
                found[name] = found.get(name, 0) + 1
        return found
