#!/usr/bin/env python3
"""bench_cancel: how soon a client's leaving frees what it held.

    bench/bench_cancel.py BUILD_DIR [--runs N] [--assert]

A router, a prefill node that computes the bundled model on the CPU, and a decode node. A client asks with a long prompt
and leaves with a reset while its prompt is computed. From that moment the prefill node is asked for its gauges over and
over: until nothing is computed there any more, and until no page and no sequence is held. Printed beside it: the time of
four layers, from the prompt speed that the node shows and its chunk, which is what a cancel may cost. The times contain
the HTTP questions themselves (printed as `asking`). --assert fails when the median frees later than four layers and
half a second; the speeds themselves are for docs/performance.md.
"""
import argparse
import json
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "cases"))
import kit  # noqa: E402  pylint: disable=wrong-import-position


def held(metrics):
    return sum(value for series, value in metrics.items() if series.startswith("baton_ledger_items{") and
               'state="free"' not in series)


def one(c, n_tokens):
    """(seconds to idle, seconds to free, seconds of asking) of one client that leaves."""
    prefill = c.prefill()
    with kit.Wire(c.address) as wire:
        wire.send(kit.frame("POST", "/v1/completions", {"prompt": [5 + i % 2000 for i in range(n_tokens)], "max_tokens": 4,
                                                        "stream": True}))
        kit.wait_for("the prompt is computed", lambda: prefill.metric("baton_requests_running") > 0, 20, 0.002)
        time.sleep(0.05)
        wire.reset()
        left = time.monotonic()
    idle = asking = None
    while True:
        asked = time.monotonic()
        metrics = prefill.metrics()
        now = time.monotonic()
        asking = now - asked
        if idle is None and metrics.get("baton_requests_running", 0) == 0:
            idle = now - left
        if held(metrics) == 0:
            return idle or now - left, now - left, asking
        if now - left > 30:
            raise SystemExit("bench_cancel: not free after 30 s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=3000, help="of the prompt that is left (default: 3000)")
    parser.add_argument("--assert", dest="must", action="store_true")
    args = parser.parse_args()
    with open(os.path.join(kit.TINY, "config.json"), encoding="utf-8") as file:
        n_layers = json.load(file)["num_hidden_layers"]
    with kit.Cluster(os.path.abspath(args.build), "split", engine="model", extra=["node:--threads=1"]) as c:
        c.post("/v1/completions", {"prompt": list(range(5, 900)), "max_tokens": 2}, timeout=60)
        speed = next(w for w in c.workers() if w["role"] == "prefill")["prefill_tokens_per_s"]
        rows = [one(c, args.tokens) for _ in range(args.runs)]
        tokens = c.prefill().metric("baton_prefill_tokens_total")
        chunk = min(2048, 895)
    idles, frees, asks = ([1e3 * row[i] for row in rows] for i in range(3))
    four_ms = 1e3 * chunk / speed * 4 / n_layers
    print(f"runs {args.runs}, prompt speed {speed:.0f} tokens/s, {n_layers} layers, {tokens:.0f} tokens computed in all")
    print(f"four layers of a chunk of {chunk}: {four_ms:.1f} ms")
    for name, values in (("idle after", idles), ("free after", frees), ("asking", asks)):
        print(f"{name:10s} median {statistics.median(values):7.1f} ms, worst {max(values):7.1f} ms")
    if args.must and statistics.median(frees) > four_ms + 500:
        raise SystemExit("bench_cancel: slower than four layers and half a second")


if __name__ == "__main__":
    main()
