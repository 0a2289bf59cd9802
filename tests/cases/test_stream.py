"""Streams: stop strings, usage, slow readers, clients that leave."""
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import kit
from kit import PATIENCE, Wire, check, frame, need, wait_for

suite = kit.Suite()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ANSWER = "red green blue."
LOOP = "one two three four five six seven eight nine ten "


def byte_ids(model, text):
    """Ids of single bytes: a character of two bytes is then split over two tokens."""
    with open(os.path.join(model, "tokenizer.json"), encoding="utf-8") as file:
        vocabulary = json.load(file)["model"]["vocab"]
    # The byte alphabet: printable ones stand for themselves, the others for what follows 255.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [vocabulary[letters[b]] for b in text.encode()]


def script(build):
    tokenizer = kit.Tokenizer(build)
    outputs = {
        "answer": ANSWER,
        "bytes": byte_ids(kit.TINY, "a ñ 你 🙂."),
        "reasoned": "red green b is my thought</think>yellow black",
        "loop": tokenizer.ids(LOOP)[0],
    }
    entries = kit.scripted(tokenizer, outputs)
    entries[-1]["loop"] = True
    return entries + [{"ids": tokenizer.ids(LOOP)[0], "loop": True}]


ROOM = ["node:--max-sequences=48", "node:--pages=1024"] if kit.LONG else []
case = suite.cluster(script=script, extra=ROOM)


def prompt(key):
    return f"Say it. {kit.digits(key)}"


def both(c, key, **fields):
    """(text, finish, completion tokens) of an answer, the same whole and streamed, chat and completions."""
    fields = {"max_tokens": 64, **fields}
    chat = c.good_chat(prompt(key), **{"reasoning_effort": "none", **fields})
    choice = chat["choices"][0]
    found = (choice["message"]["content"] or "", choice["finish_reason"], chat["usage"]["completion_tokens"])
    stream = c.good_stream(prompt(key), **{"reasoning_effort": "none", **fields})
    check(f"{fields} streamed", (stream.text(), stream.finish(), stream.usage()["completion_tokens"]), found)
    fields.pop("reasoning_effort", None)
    if fields.get("stop") is not None and "thought" in str(fields["stop"]):
        return found
    plain = c.good_completion(prompt(key), **fields)
    stream = c.stream(COMPLETIONS, {"prompt": prompt(key), **fields, "stream_options": {"include_usage": True}})
    stream.check("completion", include_usage=True)
    check(f"{fields} of a completion, streamed", (stream.text(), stream.finish(), stream.usage()["completion_tokens"]),
          (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"], plain["usage"]["completion_tokens"]))
    if key != "reasoned":
        check(f"{fields} of a completion", (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]), found[:2])
    return found


@case("STR-02")
def stop_strings(c):
    whole = both(c, "answer")
    check("without a stop", whole[:2], (ANSWER, "stop"))
    for stop, text in ((["blue\nZZ"], ANSWER), (["green b"], "red "), ("green b", "red "), (["\n", "red g"], ""),
                       (["."], "red green blue"), (["blue."], "red green "), (["blue.!"], ANSWER), (["r"], ""),
                       (["a", "b", "c", "d", "e"], "r"), (["lue", "blue"], "red green "), (["zz", "n b", "green"], "red "),
                       ([f"never {i}" for i in range(15)] + ["n b"], "red gree"), (["red green blue. and"], ANSWER),
                       (["x" * 1024], ANSWER), (None, ANSWER), ([], ANSWER)):
        found = both(c, "answer", stop=stop)
        check(f"text and finish for stop {stop}", found[:2], (text, "stop"))
        need(found[2] <= whole[2], f"tokens of {stop}", found, whole)
    for stop, text in ((["ñ"], "a "), (["你"], "a ñ "), (["🙂"], "a ñ 你 "), (["🙂!"], "a ñ 你 🙂."), ([" 你 "], "a ñ"), (None,
                                                                                                       "a ñ 你 🙂.")):
        check(f"characters over several tokens, stop {stop}", both(c, "bytes", stop=stop)[:2], (text, "stop"))
    # A stop that occurs in the reasoning alone does not end it; behind it it does.
    for stop, text in ((["green b"], "yellow black"), (["thought"], "yellow black"), (["w b"], "yello"), (["low"], "yel")):
        found = both(c, "reasoned", stop=stop, reasoning_effort="high")
        check(f"stop {stop} with reasoning", found[:2], (text, "stop"))
        message = c.good_chat(prompt("reasoned"), stop=stop, reasoning_effort="high", max_tokens=64)["choices"][0]["message"]
        check("the reasoning is whole", message["reasoning_content"], "red green b is my thought")
    c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": [""]}, 400, "invalid_value", "stop.0")
    c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": ""}, 400, "invalid_value", "stop")
    c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": ["a"] * 17}, 400, "invalid_value", "stop")
    c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": ["a" * 1025]}, 400, "invalid_value", "stop.0")
    c.refused(CHAT, {"messages": [{"role": "user", "content": "x"}], "stop": [5]}, 400, "invalid_value", "stop.0")
    check("sixteen are taken", both(c, "answer", stop=["q"] * 16)[0], ANSWER)

    # Generation really ends: the script would go on for ever.
    before = c.decode().metric("baton_tokens_generated_total")
    for stream in (False, True):
        ask = {"stop": ["three f"], "max_tokens": 4000, "reasoning_effort": "none"}
        answer = c.good_stream(prompt("loop"), **ask) if stream else c.good_chat(prompt("loop"), **ask)
        text = answer.text() if stream else answer["choices"][0]["message"]["content"]
        check("text before the stop", text, "one two ")
    wait_for("free pages", lambda: c.decode().metric("baton_batch_rows") == 0, 1)
    made = c.decode().metric("baton_tokens_generated_total") - before
    need(made < 500, "generation went on after the stop", made)


@case("STR-03")
def usage_in_streams(c):
    for path, kind, body in ((CHAT, "chat", {"messages": [{"role": "user", "content": prompt("answer")}]}),
                             (COMPLETIONS, "completion", {"prompt": prompt("answer")})):
        whole = c.post(path, {**body, "max_tokens": 3})
        usage = kit.has_shape(whole.json(), "Chat" if kind == "chat" else "Completion")["usage"]
        for options, wanted in (({"include_usage": True}, True), ({"include_usage": False}, False), ({}, False),
                                (None, False), ({"include_usage": None}, False), ({"include_usage": True, "x": 1}, True)):
            for n in (1, 3):
                stream = c.stream(path, {**body, "max_tokens": 3, "stream_options": options, "n": n})
                stream.check(kind, n, include_usage=wanted)
                if wanted:
                    check("tokens", stream.usage(), {**usage, "completion_tokens": 3 * n,
                                                     "total_tokens": usage["prompt_tokens"] + 3 * n,
                                                     "completion_tokens_details": stream.usage()["completion_tokens_details"]})
                if kind == "chat":
                    first = stream.events[0]["choices"][0]["delta"]
                    check("first delta", first, {"role": "assistant", "content": ""})
            answer = c.post(path, {**body, "max_tokens": 3, "stream": False, "stream_options": options})
            check(f"stream_options {options} without stream", (answer.status, answer.json().get("usage")), (200, usage))
        for options in (5, "x", [], {"include_usage": "yes"}, {"include_usage": 1}):
            c_error = c.stream(path, {**body, "stream_options": options})
            check(f"stream_options {options}", (c_error.status, c_error.error()["code"]), (400, "invalid_value"))
            need(c_error.error()["param"].startswith("stream_options"), "param", c_error.error())
    # A true time to the first token: its event comes when it was made, not with the rest.
    with Wire(c.address) as wire:
        start = time.monotonic()
        wire.send(frame("POST", COMPLETIONS, {"prompt": prompt("loop"), "max_tokens": 300, "stream": True}))
        stream = kit.read_stream(wire).check("completion")
    texts = [t for t, e in zip(stream.times, stream.events) if e["choices"][0]["text"]]
    need(len(texts) > 20 and texts[-1] - texts[0] > 0.15, "tokens come one by one", len(texts), texts[-1] - texts[0])
    first = kit.given(start, texts[0])
    need(first < 0.25 * (texts[-1] - start) + 0.2, "the first token comes first", first, texts[-1] - start)


# ------------------------------------------------------------------------------------------------ STR-07


def stopped_reader(c, **fields):
    """A client that reads the head of its answer and then nothing more."""
    wire = Wire.__new__(Wire)
    wire.socket, wire.data = socket.socket(), b""
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.socket.settimeout(20 * PATIENCE)
    wire.socket.connect(c.address)
    wire.send(frame("POST", CHAT, {"messages": [{"role": "user", "content": prompt("loop")}], "stream": True, **fields}))
    check("status", wire.head()[0], 200)
    return wire


def gaps(stream):
    times = sorted(stream.times)
    return sorted(b - a for a, b in zip(times, times[1:]))


@contextlib.contextmanager
def curls(c, n, *options, **fields):
    """So many curls that stream the loop and throw it away."""
    body = {"messages": [{"role": "user", "content": prompt("loop")}], "stream": True, **fields}
    children = [subprocess.Popen(["curl", "-sN", "-o", "/dev/null", *options, "-H", "Content-Type: application/json", "-d",
                                  json.dumps(body), f"http://{c.address[0]}:{c.address[1]}{CHAT}"]) for _ in range(n)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


@contextlib.contextmanager
def slow_readers(c):
    """Four that read nothing, curls of 50 bytes a second and ones that are stopped; the curls, once no row moves."""
    # twenty alternatives with each token make some 2 KB an event: the kernel's buffers are soon full
    fat = {"max_tokens": 30000, "logprobs": True, "top_logprobs": 20}
    children = []
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.callback(stopped_reader(c, **fat).close)
        if shutil.which("curl") is not None:  # what these do not read lies in the kernel
            dripping = stack.enter_context(curls(c, 20 if kit.LONG else 3, "--limit-rate", "50", max_tokens=4000))
            halted = stack.enter_context(curls(c, 5 if kit.LONG else 1, max_tokens=4000))
            children = dripping + halted
            wait_for("they stream", lambda: c.router.metric("baton_http_live_streams") == 4 + len(children))
            for child in halted:
                child.send_signal(signal.SIGSTOP)

        def made():
            return c.decode().metric("baton_tokens_generated_total")

        def stands():
            first = made()
            time.sleep(0.5)
            return made() == first
        wait_for("the stopped readers' rows stand still, for want of credit", stands, 30)
        yield children


@case("STR-07")
def slow_readers_hold_nobody(c):
    router_rss = c.router.rss_bytes()
    with slow_readers(c) as children:
        pending = c.router.metric("baton_http_pending_output_bytes")
        need(0 < pending <= 4 * (1 << 20), "output held for them is bounded", pending)
        normal = kit.together([lambda: c.good_stream(prompt("loop"), max_tokens=400) for _ in range(4)])
        for stream in normal:
            check("a normal reader gets all", (stream.finish(), stream.usage()["completion_tokens"]), ("length", 400))
            worst = gaps(stream)[int(0.98 * len(stream.times))]
            need(worst < 1 * PATIENCE, f"it waited for a slow one: a gap of {worst:.3f} s between tokens")
        grown = c.router.rss_bytes() - router_rss
        need(grown < (96 << 20), f"the router has grown by {grown >> 20} MiB")
        check("curls that ended or were cut", [child.poll() for child in children], [None] * len(children))
        if kit.LONG:
            time.sleep(300)
            check("after five minutes", [child.poll() for child in children], [None] * len(children))


@suite.beside("STR-07-dropped")
def slow_readers_are_dropped(build):
    """Who takes nothing for 30 s is dropped, and its row ends."""
    with kit.Cluster(build, "split", script=script(build), extra=ROOM) as c:
        kit.warm(c)
        baseline = c.baseline()
        with slow_readers(c) as children:
            def dropped():
                return c.router.metric("baton_http_slow_readers_dropped_total")
            # At 50 bytes a second a TCP window opens once in many minutes: to us that reader takes nothing either.
            n_most = 4 + len(children)
            with contextlib.suppress(kit.Wrong):
                wait_for("", lambda: dropped() == n_most, 64, every=0.5)
            need(4 <= dropped() <= n_most, f"{dropped()} of {n_most} that read nothing were dropped")
            wait_for("their rows are gone", lambda: c.decode().metric("baton_batch_rows") == 0, 2)
        baseline.check()


# ------------------------------------------------------------------------------------------------ STR-08

slow = suite.cluster(script=script, extra=[
    "decode:--max-sequences=4", "prefill:--sim-prefill-speed=4000", "decode:--sim-prefill-speed=4000", "node:--sim-step=5",
    "decode:--landing-slots=2", "decode:--slots-per-transfer=1", "node:--chunk=256"])

KILLED = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(sys.stdin.buffer.read())
print("sent", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def killable(c, request):
    """A client that is a process of its own; kill -9 is then what it says."""
    child = subprocess.Popen([sys.executable, "-c", KILLED, *map(str, c.address)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    try:
        child.stdin.write(request)
        child.stdin.close()
        check("a client's line", child.stdout.readline(), b"sent\n")
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def long_prompt(n_words, seed=0):
    return f"{seed} " + "word " * n_words


def request_of(n_words, stream, seed=0, **fields):
    return frame("POST", CHAT, {"messages": [{"role": "user", "content": long_prompt(n_words, seed)}], "stream": stream,
                                "max_tokens": 2000, **fields})


def quiet(c):
    """Nothing runs or waits, and no page is held, anywhere."""
    return not any(c.pages_listed().values()) and c.router.metric("baton_requests_live") == 0 and not any(
        node.metric("baton_requests_queued") + node.metric("baton_requests_running") +
        node.metric("baton_transfers_in_flight") for node in c.nodes)


def waiting(c):
    """Requests and transfers of the whole cluster that have not begun to generate."""
    return sum(node.metric("baton_requests_queued") + node.metric("baton_transfers_in_flight") for node in c.nodes)


def counts(c):
    return {name: c.router.metric(f"baton_requests_{name}_total") for name in ("cancelled", "failed", "finished")} | {
        "begun": c.router.metric("baton_requests_total")}


def leaves(c, phase, request, arrived, how):
    """A client leaves once arrived() is true; within two seconds all is as if it had never been."""
    before = counts(c)
    if how == "kill":
        with killable(c, request) as child:
            wait_for(f"{phase} before the client leaves", arrived, 10, every=0.005)
            child.send_signal(signal.SIGKILL)
            child.wait()
    else:
        with Wire(c.address) as wire:
            wire.send(request)
            wait_for(f"{phase} before the client leaves", arrived, 10, every=0.005)
            if how == "half":
                wire.socket.shutdown(socket.SHUT_WR)
                wait_for("a half-close counts as leaving", lambda: counts(c)["cancelled"] == before["cancelled"] + 1, 2)
            else:
                wire.reset()
    wait_for(f"{phase}, {how}: counted as cancelled", lambda: counts(c)["cancelled"] == before["cancelled"] + 1, 2)
    check("failed", counts(c)["failed"], before["failed"])


@slow("STR-08")
def clients_leave_in_each_phase(c):
    computing = c.prefill() if c.layout == "split" else c.decode()

    def prefilling():
        if c.layout == "split":
            return computing.metric("baton_requests_running") >= 1
        return computing.metric("baton_requests_running") >= 1 and computing.metric("baton_batch_rows") == 0

    phases = [("prefilling", request_of(3000, False), prefilling),
              ("prefilling, streamed", request_of(3000, True), prefilling),
              ("decoding", request_of(3, False), lambda: c.decode().metric("baton_batch_rows") >= 1),
              ("decoding, streamed", request_of(3, True), lambda: c.decode().metric("baton_batch_rows") >= 1)]
    if c.layout == "split":
        transfers = c.decode().metric("baton_parcels_total")

        def transferring():
            return c.decode().metric("baton_parcels_total") > transfers and c.decode().metric("baton_batch_rows") == 0
        phases.append(("transferring", request_of(3000, True, 7), transferring))
    for how in ("kill", "half", "reset"):
        for phase, request, arrived in phases:
            transfers = c.decode().metric("baton_parcels_total")
            leaves(c, phase, request, arrived, how)
            wait_for(f"{phase}, {how}: all is free", lambda: quiet(c), 2)
    # queued: four rows hold every sequence
    with contextlib.ExitStack() as stack:
        for i in range(4):
            wire = stack.enter_context(Wire(c.address))
            wire.send(request_of(3, True, i, max_tokens=20000))
            check("a row that runs", wire.head()[0], 200)
        for how in ("kill", "half", "reset"):
            for stream in (False, True):
                leaves(c, "queued", request_of(3, stream), lambda: c.router.metric("baton_requests_live") == 5, how)
                wait_for("the queue is empty", lambda: waiting(c) == 0, 2)
                check("rows of the others", c.decode().metric("baton_batch_rows"), 4)
    wait_for("all is free", lambda: quiet(c), 2)


@slow("STR-08-anytime")
def clients_leave_at_any_moment(c):
    """The gaps between the phases too: one request's life in steps of a few milliseconds."""
    start = time.monotonic()
    c.good_chat(long_prompt(1200), max_tokens=20)
    life = kit.given(start)
    before = counts(c)
    n, done = 40, []

    def visit(i):
        with Wire(c.address) as wire:
            wire.send(request_of(1200, i % 2 == 0, i, max_tokens=20))
            wire.socket.settimeout(max(0.001, life * 1.1 * i / n))
            with contextlib.suppress(socket.timeout):
                end = time.monotonic() + life * 1.1 * i / n
                while time.monotonic() < end:
                    wire.socket.settimeout(max(0.001, end - time.monotonic()))
                    if not wire.more():
                        break
            done.append(i)
            wire.reset()

    kit.together([lambda i=i: visit(i) for i in range(n)], 4)
    check("visits", len(done), n)
    wait_for("all is free", lambda: quiet(c), 2)
    after = counts(c)
    check("failed", after["failed"], before["failed"])
    ended = after["cancelled"] + after["finished"] - before["cancelled"] - before["finished"]
    need(n - 3 <= after["begun"] - before["begun"] <= n, "requests that were read before their client was gone", after)
    check("every request has an end", ended, after["begun"] - before["begun"])
    need(after["cancelled"] - before["cancelled"] > n / 2, "most were cancelled", after)


# A pool that runs short while rows generate.
short = suite.cluster(script=script, extra=["decode:--pages=10", "prefill:--pages=16", "node:--sim-step=2",
                                            "decode:--max-sequences=8"])


@short("STR-08-preempted")
def clients_leave_when_preempted(c):
    before, preempted = counts(c), c.decode().metric("baton_requests_preempted_total")
    with contextlib.ExitStack() as stack:
        wires = []
        for i in range(4):
            wire = stack.enter_context(Wire(c.address))
            wire.send(request_of(200, True, i, max_tokens=1500))
            wires.append(wire)
        readers = [threading.Thread(target=drain, args=(wire,)) for wire in wires]
        for reader in readers:
            reader.start()
        wait_for("a preemption", lambda: c.decode().metric("baton_requests_preempted_total") > preempted, 20)
        for wire in wires:
            wire.socket.shutdown(socket.SHUT_RDWR)
        for reader in readers:
            reader.join()
    wait_for("all is free", lambda: quiet(c), 2)
    after = counts(c)
    check("failed", after["failed"], before["failed"])
    check("cancelled", after["cancelled"], before["cancelled"] + 4)


def drain(wire):
    with contextlib.suppress(OSError):
        while wire.more():
            wire.data = b""


if __name__ == "__main__":
    suite.main()
