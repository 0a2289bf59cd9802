#!/usr/bin/env python3
"""test_chat: a whole cluster answers over HTTP as it says it does, and goes on when a decode node dies.

    test_chat.py BUILD [TEST...]
"""
import concurrent.futures
import json
import os
import signal
import threading
import time

from harness import Cluster, check, check_equal, main, wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(text="Hello", **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0, **more}


def whole_text(answer, index=0):
    choice = answer["choices"][index]
    check_equal(choice["index"], index, "index")
    message = choice["message"]
    return (message.get("reasoning_content") or "") + (message["content"] or "")


def compare_whole_and_streamed(cluster):
    for body in (chat(), chat(thinking={"type": "disabled"}), chat("x" * 5000, max_tokens=7),
                 chat(temperature=1, seed=5, n=4), chat(max_tokens=1)):
        status, answer = cluster.post(CHAT, body)
        check_equal(status, 200, f"status of {answer}")
        stream = cluster.stream(CHAT, {**body, "stream_options": {"include_usage": True}}).rest()
        check(stream.done, f"no [DONE]: {stream.broken}")
        check_equal(stream.events[0]["choices"][0]["delta"].get("role"), "assistant", "role of the first delta")
        check_equal(len({event["id"] for event in stream.events}), 1, "ids of one stream")
        for i in range(body.get("n", 1)):
            check_equal(stream.text(i), whole_text(answer, i), f"text of choice {i}")
            check_equal(stream.finish(i), answer["choices"][i]["finish_reason"], "finish_reason")
        for member in ("prompt_tokens", "completion_tokens", "total_tokens"):
            check_equal(stream.usage()[member], answer["usage"][member], member)
        check(answer["usage"]["completion_tokens"] <= body["max_tokens"] * body.get("n", 1), "more than max_tokens")


def compare_tokenize(cluster):
    body = chat()
    _, tokens = cluster.post("/tokenize", {"messages": body["messages"]})
    _, answer = cluster.post(CHAT, body)
    check_equal(answer["usage"]["prompt_tokens"], tokens["count"], "prompt_tokens")
    _, by_ids = cluster.post(COMPLETIONS, {"prompt": tokens["tokens"], "max_tokens": 24, "temperature": 0})
    check_equal(by_ids["usage"]["prompt_tokens"], tokens["count"], "prompt_tokens of the same ids")
    check_equal(by_ids["choices"][0]["text"], whole_text(answer), "text of the same ids")


def several_samples(cluster):
    """Each of n choices is what it is alone: choice 0 draws with the seed itself."""
    body = chat(temperature=1, seed=99, n=4)
    _, four = cluster.post(CHAT, body)
    _, one = cluster.post(CHAT, {**body, "n": 1})
    check_equal(whole_text(four, 0), whole_text(one, 0), "choice 0 of n=4 and of n=1")
    check_equal(four["usage"]["prompt_tokens"], one["usage"]["prompt_tokens"], "the prompt counts once")
    check_equal([c["index"] for c in four["choices"]], [0, 1, 2, 3], "indexes")
    _, prompts = cluster.post(COMPLETIONS, {"prompt": [f"prompt {i}" for i in range(20)], "n": 2, "max_tokens": 3,
                                            "temperature": 0})
    check_equal([c["index"] for c in prompts["choices"]], list(range(40)), "indexes of 20 prompts")
    _, alone = cluster.post(COMPLETIONS, {"prompt": "prompt 7", "max_tokens": 3, "temperature": 0})
    check_equal(prompts["choices"][14]["text"], alone["choices"][0]["text"], "prompt 7 alone and among 20")


def stop_strings(cluster):
    body = {"prompt": "stop here", "max_tokens": 24, "temperature": 0}
    _, answer = cluster.post(COMPLETIONS, body)
    text = answer["choices"][0]["text"]
    check(len(text) >= 10, f"too short to cut: {text!r}")
    stop = text[5:8]
    at = text.index(stop)
    _, cut = cluster.post(COMPLETIONS, {**body, "stop": [stop]})
    check_equal(cut["choices"][0]["text"], text[:at], "text before the stop string")
    check_equal(cut["choices"][0]["finish_reason"], "stop", "finish_reason")
    check(cut["usage"]["completion_tokens"] < answer["usage"]["completion_tokens"], "it went on after the stop")
    stream = cluster.stream(COMPLETIONS, {**body, "stop": stop}).rest()
    check_equal(stream.text(), text[:at], "streamed text before the stop string")
    check_equal(stream.finish(), "stop", "finish_reason")
    check(stream.done, "no [DONE]")
    cluster.check_idle()


def server_timing(cluster):
    status, headers, _ = cluster.request("POST", CHAT, chat())
    check_equal(status, 200, "status")
    names = [part.split(";")[0].strip() for part in headers["Server-Timing"].split(",")]
    check_equal(names, ["queue", "prefill", "transfer", "first"], "Server-Timing")


def errors(cluster):
    for path, body, status, code in (
            (CHAT, {"messages": []}, 400, "invalid_value"),
            (CHAT, chat(model="no such model"), 404, "model_not_found"),
            (CHAT, chat(response_format={"type": "json_object"}), 400, "unsupported_value"),
            (COMPLETIONS, {"prompt": "x" * 4000000, "max_tokens": 1}, 400, "context_length_exceeded"),
            ("/v1/nothing", {}, 404, "unknown_url")):
        found, answer = cluster.post(path, body)
        check_equal((found, answer["error"]["code"]), (status, code), f"answer to {str(body)[:60]}")
        check_equal(sorted(answer["error"]), ["code", "message", "param", "type"], "members of error")
    check_equal(cluster.get("/v1/models/baton-tiny")[1]["id"], "baton-tiny", "id of the model")


def leaving(cluster):
    """A client that leaves takes its request with it, streamed or not, and everything is back."""
    before = cluster.metric("baton_requests_cancelled_total")
    streams = [cluster.stream(CHAT, chat(f"leave {i}", max_tokens=2000, ignore_eos=True, n=2)) for i in range(4)]
    for stream in streams:
        for _ in range(6):
            next(stream)
        stream.close()
    waiting = cluster.connect()
    waiting.request("POST", CHAT, json.dumps(chat("whole", max_tokens=2000, ignore_eos=True)).encode(),
                    {"Content-Type": "application/json"})
    wait_for("the last one runs", lambda: len(cluster.requests()) == 1 or cluster.requests())
    waiting.close()
    cluster.check_idle()
    check_equal(cluster.metric("baton_requests_cancelled_total") - before, 5, "cancelled requests")


def test_answers(build):
    with Cluster(build, prefill=1, decode=1, extra=["node:--sim-step=2"]) as cluster:
        for part in (compare_whole_and_streamed, compare_tokenize, several_samples, stop_strings, server_timing, errors,
                     leaving):
            part(cluster)
        cluster.check_idle()


def test_local_only(build):
    """One decode node alone is a complete server."""
    with Cluster(build, prefill=0, decode=1, extra=["node:--sim-step=2"]) as cluster:
        compare_whole_and_streamed(cluster)
        cluster.check_idle()


def decode_of(cluster, n_requests):
    """Decode node by request, once all run."""
    wait_for("all generate", lambda: [leg["state"] for r in cluster.requests() for leg in r["legs"]] ==
             ["generating"] * n_requests or cluster.requests())
    return [leg["decode"] for r in cluster.requests() for leg in r["legs"]]


def decode_goes(build, how, comes_back):
    """A decode node goes mid-stream: the client sees the text that it would have seen, one id, right usage."""
    # Small pages: where they take no time on the way the pairs are equal, whatever their preflight measured, and requests
    # spread.
    small = ["node:--sim-page-bytes=8192", "node:--sim-tail-bytes=16384"]
    with Cluster(build, prefill=1, decode=2, extra=["node:--sim-step=20", *small], lease=None) as cluster:
        bodies = [chat(f"question {i}", max_tokens=100, ignore_eos=True, seed=i, temperature=1, n=1 + i % 3)
                  for i in range(6)]
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:  # what they are does not hang on what runs beside
            wanted = [answer for _, answer in pool.map(lambda body: cluster.post(CHAT, body), bodies)]
        cluster.check_idle()
        streams = [cluster.stream(CHAT, {**body, "stream_options": {"include_usage": True}}) for body in bodies]
        threads = [threading.Thread(target=stream.rest) for stream in streams]
        for stream in streams:
            next(stream)
        for thread in threads:
            thread.start()
        homes = decode_of(cluster, len(bodies))
        check(set(homes) == {"decode-0", "decode-1"}, f"not spread: {homes}")
        time.sleep(0.5)
        how(cluster)
        for thread in threads:
            thread.join(60)
        for body, stream, answer in zip(bodies, streams, wanted):
            check(stream.done, f"no [DONE] for {body}: {stream.broken} {stream.events[-1]}")
            check_equal(len({event["id"] for event in stream.events}), 1, "ids of one stream")
            for i in range(body["n"]):
                check_equal(stream.text(i), whole_text(answer, i), f"text of choice {i} across the failover")
                check_equal(stream.finish(i), "length", "finish_reason")
            for member in ("prompt_tokens", "completion_tokens"):
                check_equal(stream.usage()[member], answer["usage"][member], member)
        check(cluster.metric("baton_failovers_total") > 0, "nothing failed over: the test killed too late")
        before = {node["incarnation"] for node in cluster.workers()}
        comes_back(cluster)
        wait_for("it joins again", lambda: sum(n["state"] == "ready" for n in cluster.workers()) == 3 or
                 cluster.workers(), 30)
        check(not {node["incarnation"] for node in cluster.workers()} <= before, "the same incarnation came back")
        cluster.check_idle()


def test_decode_dies(build):
    decode_goes(build, lambda cluster: cluster.kill("decode-0"), lambda cluster: cluster.start("decode-0"))


def test_decode_stands_still(build):
    """SIGSTOP: missed by the lease; when it wakes it is another node and holds nothing."""
    def send(cluster, what):
        os.kill(cluster.process("decode-0")["pid"], what)
    decode_goes(build, lambda cluster: send(cluster, signal.SIGSTOP), lambda cluster: send(cluster, signal.SIGCONT))


def test_last_decode_dies(build):
    """No other node: a stream ends with an error event and a cut connection, others with 503."""
    with Cluster(build, prefill=0, decode=1, extra=["node:--sim-step=20"]) as cluster:
        stream = cluster.stream(CHAT, chat(max_tokens=2000, ignore_eos=True))
        next(stream)
        cluster.kill("decode-0")
        status, answer = cluster.post(CHAT, chat())
        check_equal((status, answer["error"]["code"]), (503, "no_ready_node"), "answer with no node")
        check_equal(cluster.get("/readyz")[0], 503, "readyz with no node")
        stream.rest()
        check(not stream.done and stream.broken, "the stream ended as if it were whole")
        check_equal(stream.events[-1].get("error", {}).get("code"), "attempts_exhausted", "last event")
        check_equal(cluster.requests(), [], "live requests")


def test_prefill_dies(build):
    """Kill the only prefill node while prompts run there: decode prefills them itself."""
    with Cluster(build, prefill=1, decode=1, extra=["prefill:--sim-prefill-speed=2000", "decode:--sim-step=2"]) as cluster:
        body = chat("word " * 1500, max_tokens=8)
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(cluster.post(CHAT, body))) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for("a prompt runs there", lambda: any(n["role"] == "prefill" and n["running"] for n in cluster.workers()) or
                 cluster.workers())
        cluster.kill("prefill-0")
        for thread in threads:
            thread.join(60)
        check_equal([status for status, _ in answers], [200] * 3, f"answers {answers}")
        check_equal(len({whole_text(answer) for _, answer in answers}), 1, "texts of one prompt")
        cluster.check_idle()


if __name__ == "__main__":
    main([test_answers, test_local_only, test_decode_dies, test_decode_stands_still, test_last_decode_dies, test_prefill_dies])
