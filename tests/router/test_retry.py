#!/usr/bin/env python3
"""test_retry: the real router, over HTTP, on decode nodes that fail by a script (scripted_node.c).

    test_retry.py ROUTER SCRIPTED_NODE MODEL
"""
import json

from scripted import BODY, Setup, check, check_equal, main, wait_for


def wanted(n=1):
    """The texts that nodes give when nothing fails."""
    with Setup([("a", ["ok"])]) as setup:
        status, answer = setup.post("/v1/completions", {**BODY, "n": n})
        check_equal(status, 200, f"status of {answer}")
        return [choice["text"] for choice in answer["choices"]]


def run(setup, n=1):
    """Streamed and whole, one after the other."""
    stream = setup.stream("/v1/completions", {**BODY, "n": n, "stream_options": {"include_usage": True}}).rest()
    check(stream.done, f"no [DONE]: {stream.events[-1:]} {stream.broken}")
    for i in range(n):
        check_equal(stream.finish(i), "length", f"finish_reason of {i}")
    check_equal(stream.usage()["completion_tokens"], 40 * n, "completion_tokens")
    check_equal(stream.usage()["prompt_tokens"], 3, "prompt_tokens")
    return [stream.text(i) for i in range(n)]


def test_failover(_):
    """Tokens, then a failure, in every way in which one can come: the text goes on exactly."""
    texts = wanted(4)
    check_equal(len(set(texts)), 4, "different texts of 4 samples")
    for n in (1, 4):
        for action in ("die:0", "die:1", "die:17", "die:40", "lost:9", "gap:9", "short:9"):
            with Setup([("a", [action, "ok"])], ["--attempts", "3"]) as setup:
                check_equal(run(setup, n), texts[:n], f"texts after {action}, n={n}")
                starts = setup.said("a", "start")
                check(len(starts) > 1 or action == "die:40", f"{action}: started once")
                n_before = int(action.split(":")[1])
                if n == 1 and 0 < n_before < 40:
                    check_equal([s["generated"] for s in starts], [0, n_before], "n_generated")
                    check_equal([s["ids"] for s in starts], [3, 3 + n_before], "ids")
                check_equal(setup.requests(), [], "live requests")


def test_attempts(_):
    with Setup([("a", ["die:0"])], ["--attempts", "3"]) as setup:
        status, answer = setup.post("/v1/completions", BODY)
        check_equal((status, answer["error"]["code"]), (503, "attempts_exhausted"), "answer")
        check_equal(len(setup.said("a", "start")), 3, "starts")
        check_equal(len({s["attempt"] for s in setup.said("a", "start")}), 3, "attempts")
    with Setup([("a", ["die:2"])], ["--attempts", "3"]) as setup:
        stream = setup.stream("/v1/completions", BODY).rest()
        check(not stream.done and stream.broken, "a failed stream ended as if it were whole")
        check_equal(stream.events[-1]["error"]["code"], "attempts_exhausted", "last event")
        check_equal([s["generated"] for s in setup.said("a", "start")], [0, 2, 4], "it went on each time")


def test_codes(_):
    for action, status, code in (("invalid", 400, "invalid_value"), ("long", 400, "context_length_exceeded"),
                                 ("queue", 504, "queue_timeout"), ("prefill", 504, "prefill_timeout"),
                                 ("transfer", 504, "transfer_timeout"), ("generation", 504, "generation_timeout"),
                                 ("broken", 500, "internal_error"), ("full", 429, "queue_full")):
        with Setup([("a", [action])]) as setup:
            found, headers, body = setup.request("POST", "/v1/completions", BODY)
            check_equal((found, json.loads(body)["error"]["code"]), (status, code), f"answer to {action}")
            check_equal(len(setup.said("a", "start")), 1, f"starts of {action}")
            if status == 429:
                check(int(headers["Retry-After"]) >= 1, "Retry-After")


def test_full_goes_elsewhere(_):
    texts = wanted()
    with Setup([("a", ["full"]), ("b", ["ok"])]) as setup:
        for _ in range(8):
            status, answer = setup.post("/v1/completions", BODY)
            check_equal(status, 200, f"status of {answer}")
            check_equal(answer["choices"][0]["text"], texts[0], "text")
        check_equal(len(setup.said("b", "start")), 8, "starts of the node that has room")


def test_stalled(_):
    """A transfer whose puts no longer complete: a failure of the pair, and the request goes on, exactly."""
    texts = wanted()
    with Setup([("a", ["stalled", "stalled", "ok"])], ["--attempts", "3"]) as setup:
        check_equal(run(setup), texts, "text after two transfers that stalled")
        check_equal(len(setup.said("a", "start")), 3, "starts")
    with Setup([("a", ["stalled"])], ["--attempts", "2"]) as setup:
        status, answer = setup.post("/v1/completions", BODY)
        check_equal((status, answer["error"]["code"]), (503, "attempts_exhausted"), "answer")
        check("as the script says" in answer["error"]["message"], f"the last reason is told: {answer}")


def test_preempted(_):
    texts = wanted()
    with Setup([("a", ["preempt", "preempt", "ok"])], ["--attempts", "1"]) as setup:
        check_equal(run(setup), texts, "text after two preemptions")
        check_equal([s["front"] for s in setup.said("a", "start")], [0, 1, 1], "front")
    with Setup([("a", ["preempt"])], ["--attempts", "1"]) as setup:
        status, answer = setup.post("/v1/completions", BODY)
        check_equal((status, answer["error"]["code"]), (503, "attempts_exhausted"), "answer")
        check_equal(len(setup.said("a", "start")), 3, "starts: the first and two more")


def test_elsewhere(_):
    """What failed on one node goes on at the other, and the same one is not asked again."""
    texts = wanted()
    with Setup([("a", ["die:5"]), ("b", ["die:5"])], ["--attempts", "2"]) as setup:
        stream = setup.stream("/v1/completions", BODY).rest()
        check(not stream.done, "it can't have ended well")
        check_equal(stream.text(), texts[0][:len(stream.text())], "text so far")
        check_equal([len(setup.said(name, "start")) for name in "ab"], [1, 1], "starts")


def test_stop_cancels(_):
    """A stop string in one of several samples ends that one; the last ends the request."""
    texts = wanted(2)
    stop = texts[0][6:10]
    with Setup([("a", ["ok"])]) as setup:
        _, answer = setup.post("/v1/completions", {**BODY, "n": 2, "stop": [stop]})
        for text, choice in zip(texts, answer["choices"]):
            at = text.find(stop)
            check_equal(choice["text"], text if at < 0 else text[:at], "text")
            check_equal(choice["finish_reason"], "length" if at < 0 else "stop", "finish_reason")
        wait_for("the cancel", lambda: bool(setup.said("a", "cancel")))


def test_joining(_):
    """A second node of the same name, and one of another vocabulary, are refused in words that help."""
    with Setup([("a", ["ok"])]) as setup:
        setup.join("a", ["ok"])
        setup.join("c", ["ok"], vocabulary=1000)
        setup.outputs["a2"] = setup.outputs["a"]
        for name, words in (("a", ("is taken by the node at 127.0.0.1:", "needs another --node-id")),
                            ("c", ("1000 ids", "2560"))):
            wait_for(f"{name} is refused", lambda n=name: bool(setup.said(n, "closed")) or setup.said(n, "closed"))
            text = setup.said(name, "closed")[0]["closed"]
            check(all(word in text for word in words), f"refusal: {text}")
        check_equal([node["id"] for node in setup.workers()], ["a"], "nodes")
        lines = [line for line in setup.log().splitlines() if "needs another --node-id" in line]
        n_refused = setup.metric("baton_joins_refused_total")
        check(lines and len(lines) <= n_refused, f"{len(lines)} lines of {n_refused} refusals: each is logged once")
        check_equal(setup.post("/v1/completions", BODY)[0], 200, "status")


if __name__ == "__main__":
    main([test_failover, test_attempts, test_codes, test_full_goes_elsewhere, test_stalled, test_preempted, test_elsewhere,
          test_stop_cancels, test_joining])
