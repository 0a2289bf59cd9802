#!/usr/bin/env python3
"""test_streams: slow readers stop their own rows and nobody else's; a router that is told to end lets streams finish.

    test_streams.py BUILD [TEST...]
"""
import json
import os
import signal
import socket
import time

from harness import Cluster, Stream, check, check_equal, lost, main, wait_for

CHAT = "/v1/chat/completions"


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "ignore_eos": True, **more}


def test_slow_reader(build):
    """One client reads nothing: its tokens stop, another's do not; when it reads again it gets all of them."""
    n_tokens = 30000
    with Cluster(build, prefill=0, decode=1, extra=["node:--sim-step=0"]) as cluster:
        connection = cluster.connect()
        connection.sock = socket.socket()
        connection.sock.settimeout(60)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.sock.connect(("127.0.0.1", cluster.port))
        connection.request("POST", CHAT, json.dumps({**chat("slow", max_tokens=n_tokens), "stream": True,
                                                     "stream_options": {"include_usage": True}}).encode(),
                           {"Content-Type": "application/json"})
        answer = connection.getresponse()

        def tokens():
            return [leg["tokens"] for request in cluster.requests() for leg in request["legs"]]

        seen = []

        def stands_still():
            seen.append(tokens())
            return len(seen) > 10 and seen[-10:] == [seen[-1]] * 10 and seen[-1][0] > 100 or seen[-1]

        wait_for("the slow reader's tokens stand still", stands_still, 30)
        check(seen[-1][0] < n_tokens, f"it was given all: {seen[-1]}")
        start = time.monotonic()
        status, whole = cluster.post(CHAT, chat("quick", max_tokens=50))
        check_equal((status, whole["usage"]["completion_tokens"]), (200, 50), "answer beside a slow reader")
        check(lost.within("the answer", start, 5), "it waited for the slow reader")
        check_equal(tokens(), seen[-1], "tokens of the slow reader meanwhile")
        stream = Stream(connection, answer).rest()
        check(stream.done, f"no [DONE]: {stream.broken}")
        check_equal(stream.usage()["completion_tokens"], n_tokens, "completion_tokens")
        cluster.check_idle()


def test_router_drains(build):
    """SIGTERM: the stream goes on to its end, new work is told 503 with Connection: close, and the router ends."""
    with Cluster(build, prefill=0, decode=1, extra=["node:--sim-step=20"]) as cluster:
        stream = cluster.stream(CHAT, chat("long", max_tokens=150))
        next(stream)
        os.kill(cluster.process("router")["pid"], signal.SIGTERM)
        wait_for("not ready", lambda: cluster.get("/readyz")[0] == 503 or "still ready")
        status, headers, body = cluster.request("POST", CHAT, chat("late", max_tokens=1))
        check_equal((status, json.loads(body)["error"]["code"]), (503, "draining"), "answer while draining")
        check_equal(headers["Connection"], "close", "Connection")
        check(int(headers["Retry-After"]) >= 1, "Retry-After")
        stream.rest()
        check(stream.done, f"the stream was not let finish: {stream.broken} {stream.events[-1]}")
        wait_for("the router ends well", lambda: cluster.process("router")["exit"] == 0 or cluster.process("router"))


if __name__ == "__main__":
    main([test_slow_reader, test_router_drains])
