#!/usr/bin/env python3
"""test_abilities: the bundled model, asked over HTTP through router, prefill and decode, does what it was taught.

    test_abilities.py BUILD [TEST...]

tests/golden/tiny_abilities.json was made by tools/train/abilities.py: tasks whose right answers come from what made the task, and which the PyTorch reference
solves with every token well ahead of the next best. Those of a kind that begins with far_ have 2,000 tokens between what is asked for and the question, so
the window of 128 no longer holds it and the indexer has to choose it, entry after entry: a fact, a sentence, and whole passages of made-up facts, of running
text and of 24 random words. With entries chosen in another way no passage comes out whole (docs/tiny_model.md).
"""
import json
import os

from harness import TOP, Cluster, check, check_equal, main

FEWEST = {"count_range": 12, "lookup": 12, "table": 8, "order": 6, "repeat": 8, "tool": 10, "far_fact": 4, "far_copy": 4, "far_note": 4,
          "far_words": 4, "far_text": 4}
FAR_CHARACTERS = 5500  # 3.3 characters are a token


def ask(cluster, task):
    body = {"messages": [{"role": "user", "content": task["user"]}], "max_tokens": 200, "temperature": 0,
            "thinking": {"type": "disabled"}}
    if task["tools"]:
        body["messages"].insert(0, {"role": "system", "content": ""})
        body["tools"] = [{"type": "function", "function": tool} for tool in task["tools"]]
    status, answer = cluster.post("/v1/chat/completions", body)
    check_equal(status, 200, f"status of {answer}")
    check_equal(answer["usage"]["prompt_tokens"], task["prompt_tokens"], f"{task['kind']}: prompt_tokens")
    check_equal(answer["usage"]["completion_tokens"], task["answer_tokens"], f"{task['kind']}: completion_tokens of {answer}")
    return answer["choices"][0]


def test_taught_abilities(build):
    with open(os.path.join(TOP, "tests", "golden", "tiny_abilities.json"), encoding="utf-8") as file:
        tasks = json.load(file)["tasks"]
    for kind, fewest in FEWEST.items():
        check(sum(task["kind"] == kind for task in tasks) >= fewest, f"fewer than {fewest} tasks of kind {kind}")
    for task in (t for t in tasks if t["kind"] in ("far_copy", "far_note", "far_words", "far_text")):
        after = task["user"].partition(task["answer"])[2]
        check(len(after) >= FAR_CHARACTERS, f"a passage of kind {task['kind']} is only {len(after)} characters back")
    with Cluster(build, engine="model", prefill=1, decode=1, extra=["router:--lease=30s", "node:--lease=30s", "router:--queue-timeout=0"]) as cluster:
        for task in tasks:
            choice = ask(cluster, task)
            if "call" in task:
                check_equal(choice["finish_reason"], "tool_calls", f"finish_reason of {choice}")
                called = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in choice["message"]["tool_calls"]]
                check_equal(called, [tuple(task["call"])], "calls")
            else:
                check_equal((choice["message"]["content"], choice["finish_reason"]), (task["answer"], "stop"), task["kind"])
        cluster.check_idle()


if __name__ == "__main__":
    main([test_taught_abilities])
