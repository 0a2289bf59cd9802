#!/usr/bin/env python3
"""test_wedged: decode nodes that live and do not progress, and such that only take their time (scripted_node.c).

    test_wedged.py ROUTER SCRIPTED_NODE MODEL
"""
import threading
import time

from scripted import BODY, Setup, check, check_equal, main, wait_for
import lost


def started(setup, name):
    return setup.said(name, "start")


def test_wedged(_):
    """It has work and its counter stands still for a lease: its streams move, and exactly; it gets nothing new until the
    counter moves again."""
    with Setup([("a", ["ok"])]) as setup:
        text = setup.post("/v1/completions", BODY)[1]["choices"][0]["text"]
    with Setup([("a", ["wedge:7:6000", "ok"])]) as setup:
        streams, begun = [], time.monotonic()
        reader = threading.Thread(target=lambda: streams.append(setup.stream("/v1/completions", BODY).rest()))
        reader.start()
        wait_for("the node has the stream", lambda: len(started(setup, "a")) == 1)
        setup.join("b", ["ok"])
        reader.join()
        end = time.monotonic()
        check_equal((streams[0].done, streams[0].text(), streams[0].finish()), (True, text, "length"), "the stream")
        check(end - begun >= 1.5 and lost.within("the stream's move", begun, 4, end),
              f"it moved after {end - begun:.1f} s; the lease is 1.5 s")
        check_equal([s["generated"] for s in started(setup, "b")], [7], "it went on where it was")
        check_equal(len(setup.said("a", "cancel")), 1, "cancels: when it wakes it need not go on")
        state = next(node["state"] for node in setup.workers() if node["id"] == "a")
        check_equal(state, "wedged", "its state")
        for _ in range(6):
            check_equal(setup.post("/v1/completions", BODY)[0], 200, "status")
        check_equal(len(started(setup, "a")), 1, "starts of the wedged node")
        wait_for("it is taken again", lambda: all(node["state"] == "ready" for node in setup.workers()), 10)
        wait_for("it gets work again", lambda: setup.post("/v1/completions", BODY)[0] == 200 and
                 len(started(setup, "a")) > 1, 10)


def test_busy(_):
    """A step that takes four seconds, through which the counter moves: nobody takes the node for dead."""
    with Setup([("a", ["busy:7:4000"])]) as setup:
        status, answer = setup.post("/v1/completions", BODY)
        check_equal((status, answer["usage"]["completion_tokens"]), (200, 40), "answer")
        check_equal((len(started(setup, "a")), len(setup.said("a", "cancel"))), (1, 0), "starts and cancels")
        check_equal([node["state"] for node in setup.workers()], ["ready"], "states")


if __name__ == "__main__":
    main([test_wedged, test_busy])
