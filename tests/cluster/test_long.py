#!/usr/bin/env python3
"""Prompts whose ids go in parts, split and local: 16,001 to 60,000 tokens; and a text of megabytes beside running streams."""
import os
import random
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Cluster, check, check_equal, main

SMALL = ["node:--sim-page-bytes=4096", "node:--sim-tail-bytes=8192", "node:--sim-prefill-speed=0", "node:--sim-step=1",
         "node:--pages=1200", "node:--max-context=100000"]


def ask(cluster, ids):
    status, answer = cluster.post("/v1/completions", {"prompt": [ids], "max_tokens": 8, "temperature": 0})
    check_equal(status, 200, f"{len(ids)} tokens: {answer}")
    check_equal(answer["usage"]["prompt_tokens"], len(ids), "prompt tokens")
    return answer["choices"][0]["text"]


def test_ids_in_parts(build):
    draw = random.Random(4)
    prompts = [[draw.randrange(3, 2000) for _ in range(n)] for n in (16000, 16001, 20000, 32000, 60000)]
    texts = []
    for path in ("never", "only"):
        with Cluster(build, extra=[*SMALL, f"router:--local-prefill={path}"]) as cluster:
            texts.append([ask(cluster, ids) for ids in prompts])
            # The engine's output hangs on every id: one that was lost or came twice would show.
            other = list(prompts[2])
            other[16500] += 1
            check(ask(cluster, other) != texts[-1][2], "another id in the second part changes nothing")
            cluster.check_idle()
    check_equal(texts[0], texts[1], "split and local")


def test_megabytes_beside_streams(build):
    with Cluster(build, extra=[*SMALL, "node:--sim-step=10"]) as cluster:
        stamps, problems = [], []

        def stream():
            try:
                running = cluster.stream("/v1/chat/completions", {
                    "messages": [{"role": "user", "content": "go on"}], "max_tokens": 400, "ignore_eos": True})
                for _ in running:
                    stamps.append(time.monotonic())
                check(running.done, f"the stream broke: {running.broken}")
            except Exception as problem:  # told below
                problems.append(repr(problem))

        thread = threading.Thread(target=stream)
        thread.start()
        text = "All work and no play makes Jack a dull boy. " * 100000  # 4.4 MB, far beyond the context
        start = time.monotonic()
        status, answer = cluster.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        took = time.monotonic() - start
        check_equal((status, answer["error"]["code"]), (400, "context_length_exceeded"), "4.4 MB")
        thread.join()
        check(not problems, "; ".join(problems))
        check(len(stamps) > 300, f"{len(stamps)} events")
        print(f"      the text took {took:.2f} s; the longest gap between two events of the stream was "
              f"{max(b - a for a, b in zip(stamps, stamps[1:])):.3f} s")
        cluster.check_idle()


if __name__ == "__main__":
    main([test_ids_in_parts, test_megabytes_beside_streams])
