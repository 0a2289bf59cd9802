#!/usr/bin/env python3
"""test_waiting: clients that wait for tokens, on the wire, and clients that leave while they wait. The nodes hold their
answers back by a script.

    test_waiting.py ROUTER SCRIPTED_NODE MODEL [TEST...]
"""
import json
import re
import socket
import threading
import time

from scripted import BODY, Setup, check, check_equal, main, wait_for
import lost

COMMENT = b": waiting\n\n"


def framed(body):
    body = json.dumps(body).encode()
    return (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" %
            len(body)) + body


def connect(setup):
    client = socket.create_connection(("127.0.0.1", setup.port), timeout=40)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


class Watched:
    """One request, and each piece of its answer with the second it came."""

    def __init__(self, setup, stream=True):
        self.pieces, self.start = [], 0.0
        self.thread = threading.Thread(target=self.watch, args=(setup, stream))
        self.thread.start()

    def watch(self, setup, stream):
        self.start = start = time.monotonic()
        with connect(setup) as client:
            client.sendall(framed({**BODY, "stream": stream}))
            try:
                while piece := client.recv(65536):
                    self.pieces.append((time.monotonic() - start, piece))
                    if b"[DONE]" in piece or not stream:
                        return
            except ConnectionResetError:
                pass
            self.pieces.append((time.monotonic() - start, b"<end>"))

    def came(self, what, second, low, high, since=0.0):
        """It came in this range of seconds after `since`; the machine may have made `since` late, and it itself."""
        early = second - since + (lost.between(self.start + since - 2, self.start + since) if since else 0.0)
        check(early > low and lost.within(what, self.start + since, high, self.start + second),
              f"{what} after {second - since:.2f} s, wanted {low} to {high}")

    def bytes(self):
        self.thread.join()
        return b"".join(piece for _, piece in self.pieces)

    def when(self, what):
        """The seconds at which a piece with these bytes came."""
        self.thread.join()
        return [second for second, piece in self.pieces if what in piece]


def test_silence(_):
    """The headers after 10 s with a comment, a comment after each 15 s of silence; and what then follows: the answer, or
    an error inside the stream. Each second of it on the wire."""
    with Setup([("a", ["after:0:26500", "after:4:16500", "fail:0:11500", "after:0:11500", "fail:0:11500", "ok"])]) as setup:
        asked = []
        for stream in (True, True, True, False, False):
            asked.append(Watched(setup, stream))
            wait_for("it is started", lambda: len(setup.said("a", "start")) == len(asked))
        late, midway, failed, whole, whole_failed = asked
        quick = setup.stream("/v1/completions", BODY).rest()
        check(quick.done and quick.comments == 0, "comments in an answer that never paused")

        first, data = late.pieces[0] if late.bytes() else None
        late.came("headers", first, 9.9, 11.5)
        check(data.startswith(b"HTTP/1.1 200 OK\r\n") and b"text/event-stream" in data, f"head: {data!r}")
        seconds = late.when(COMMENT)
        check(len(seconds) == 2, f"comments at {seconds}")
        late.came("a comment", seconds[0], 9.9, 11.5)
        late.came("another", seconds[1], 14.9, 16.5, since=seconds[0])
        late.came("the first token", late.when(b"data: {")[0], 26, 28.5)
        check(b"[DONE]" in late.bytes() and b'"finish_reason":"length"' in late.bytes(), "the answer is whole")

        tokens = midway.when(b"data: {")[0]
        midway.came("the first tokens, at once,", tokens, 0, 2)
        seconds = midway.when(COMMENT)
        check(len(seconds) == 1, f"comments at {seconds}")
        midway.came("a comment", seconds[0], 14.9, 16.5, since=tokens)
        check(b"[DONE]" in midway.bytes(), "it ends well")

        failed.came("headers before the failure", failed.bytes() and failed.pieces[0][0], 9.9, 11.5)
        check(failed.bytes().startswith(b"HTTP/1.1 200"), f"{failed.pieces}")
        errors = re.findall(rb"data: (\{\"error\".*\})\n\n", failed.bytes())
        check_equal([json.loads(error)["error"]["code"] for error in errors], ["internal_error"], "the error event")
        check(b"[DONE]" not in failed.bytes() and failed.pieces[-1][1] == b"<end>", "then it is cut")
        check(not failed.bytes().replace(b"<end>", b"").endswith(b"0\r\n\r\n"), "without a last chunk")

        # An answer that is sent whole has its status when it has its text, however long that takes.
        for one, status in ((whole, b"HTTP/1.1 200"), (whole_failed, b"HTTP/1.1 500")):
            check(one.bytes().startswith(status), f"{one.pieces}")
            one.came("an answer that is sent whole", one.pieces[0][0], 11, 13.5)
        check_equal(setup.requests(), [], "live requests")


def leave(client, how):
    if how == "half-close":
        client.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    client.close()


def test_leaving(_):
    """A client that leaves before the first token, between tokens, and while its request waits for a node that is there
    again: the node is told once, and the router forgets it."""
    for how in ("close", "reset", "half-close"):
        with Setup([("a", ["hold:0", "hold:3", "hold:0", "hold:3", "preempt"])]) as setup:
            for i, (stream, n_tokens) in enumerate(((True, 0), (True, 3), (False, 0), (False, 3))):
                with connect(setup) as client:
                    client.sendall(framed({**BODY, "stream": stream, "n": 2}))
                    wait_for("it runs", lambda: len(setup.said("a", "start")) == i + 1)
                    wait_for("its tokens are here", lambda: [leg["tokens"] for r in setup.requests() for leg in r["legs"]]
                             == [2 * n_tokens] or setup.requests())
                    check_equal(setup.said("a", "cancel")[i:], [], "cancels before it left")
                    leave(client, how)
                    wait_for("the node is told", lambda: len(setup.said("a", "cancel")) == i + 1, 2)
                    wait_for("it is forgotten", lambda: setup.requests() == [], 2)
                last = setup.said("a", "cancel")[-1]
                check_equal((last["cancel"], last["all"]), (setup.said("a", "start")[-1]["start"], 1), "the cancel")
            check_equal(setup.metric("baton_requests_cancelled_total"), 4, "cancelled")
            check_equal(setup.metric("baton_requests_failed_total"), 0, "failed")
    # Waiting for a node: the only one is gone, with three tokens of the answer.
    with Setup([("a", ["hold:3"])]) as setup:
        with connect(setup) as client:
            client.sendall(framed({**BODY, "stream": True}))
            client.recv(65536)
            setup.children[1].kill()
            setup.children.pop(1).wait()
            wait_for("the node is gone", lambda: setup.workers() == [])
            check_equal(len(setup.requests()), 1, "it waits for another node")
            leave(client, "reset")
            wait_for("it is forgotten", lambda: setup.requests() == [], 2)
        check_equal(setup.metric("baton_requests_cancelled_total"), 1, "cancelled")
        check_equal(setup.metric("baton_requests_failed_total"), 0, "failed")


if __name__ == "__main__":
    main([test_silence, test_leaving])
