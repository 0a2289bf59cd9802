"""Right answers of the bundled model: what the cluster said while nothing disturbed it, asked whole and streamed.

The requests cover what a failover must carry on: greedy and seeded draws, penalties, several samples, logprobs with
alternatives, stop strings, chat and plain completions.
"""
import os

import kit

from . import load

TEXT = os.path.join(kit.TOP, "docs", "INTERFACES.md")


def bodies():
    with open(TEXT, encoding="utf-8") as file:
        text = file.read()
    parts = [text[at:at + size] for at, size in ((0, 200), (3000, 320), (7000, 140), (9000, 700), (12000, 260))]
    plain = {"ignore_eos": True, "temperature": 0}
    drawn = {"ignore_eos": True, "temperature": 0.8, "top_p": 0.9, "seed": 17}
    yield "/v1/completions", {**plain, "prompt": parts[0], "max_tokens": 110, "logprobs": 3}
    yield "/v1/completions", {**drawn, "prompt": parts[1], "max_tokens": 120, "logprobs": 1}
    yield "/v1/completions", {**drawn, "prompt": parts[2], "max_tokens": 100, "frequency_penalty": 0.6,
                              "presence_penalty": 0.4, "logprobs": 1}
    yield "/v1/completions", {**drawn, "prompt": parts[3], "max_tokens": 40, "n": 2}
    yield "/v1/chat/completions", {**plain, "messages": [{"role": "user", "content": parts[4]}], "max_tokens": 60,
                                   "logprobs": True, "top_logprobs": 2}
    yield "/v1/chat/completions", {**drawn, "messages": [{"role": "system", "content": "Answer briefly."},
                                                         {"role": "user", "content": parts[2]}], "max_tokens": 70}


def ask_once(cluster, path, body):
    answer = cluster.post(path, body, timeout=120)
    kit.check(f"status of an undisturbed request ({answer.body!r:.200})", answer.status, 200)
    received = load.Received(body.get("n", 1), "chat" in path)
    received.take(answer.json())
    return received.right


def record(cluster):
    asks = []
    for path, body in bodies():
        right = ask_once(cluster, path, body)
        asks.append(load.Ask(path, body, right, is_chat="chat" in path))
    text = asks[0].right.choices[0].text
    stopped = {**asks[0].body, "stop": [text[len(text) // 2:][:5]]}
    asks.append(load.Ask(asks[0].path, stopped, ask_once(cluster, asks[0].path, stopped)))
    kit.check("finish of the request with a stop string", asks[-1].right.choices[0].finish, "stop")
    for ask in asks:  # streamed it is the same, or nothing below means anything
        body = {**ask.body, "stream": True, "stream_options": {"include_usage": True}}
        streamed = load.Ask(ask.path, body, ask.right, ask.is_chat)
        verdict = load.send(cluster.address, streamed)
        kit.need(verdict.outcome == "right", "an undisturbed stream differs from the whole answer", verdict.other)
    return asks
