#!/usr/bin/env python3
"""What a client that leaves costs: four layers at most of a prompt that is computed, and 100 ms until all is free.

    test_cancel_cost.py BUILD_DIR [TEST...]

Real processes. How far the device ran on is read from the engine's own progress between Cancel and Drained, and how long
it took from the node's own clock: the questions asked here take no part in it, and a machine without time makes the
first no worse.
"""
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cases"))
import kit  # noqa: E402  pylint: disable=wrong-import-position
from kit import check, need, wait_for  # noqa: E402  pylint: disable=wrong-import-position

suite = kit.Suite()
PATH = "/v1/completions"
N_LAYERS, CHUNK, N_PROMPT, N_LEAVE = 16, 64, 4096, 4
FOUR_LAYERS = 8  # of the engine's counter: attention and experts of each
BOUND_S, ROUNDS, A_ROUND = 0.1, 8, 4
V4_PAGE, V4_TAIL = 901120, 4412416


def body(n_tokens, max_tokens=4):
    return {"prompt": [7 + i % 2000 for i in range(n_tokens)], "max_tokens": max_tokens, "temperature": 0, "stream": True}


class Histogram:
    """Buckets of a node's histogram, as differences to when it was made."""

    def __init__(self, process, name):
        self.process, self.name = process, name
        self.before = self.read()

    def read(self):
        found = {}
        for series, value in self.process.metrics().items():
            if series.startswith(self.name + "_bucket{"):
                found[float(series.partition('le="')[2].partition('"')[0])] = value
        need(found, f"no histogram {self.name} at {self.process.name}")
        return found

    def counts(self):
        return {bound: n - self.before[bound] for bound, n in self.read().items()}

    def n(self):
        return self.counts()[float("inf")]

    def n_above(self, bound):
        counts = self.counts()
        return counts[float("inf")] - counts[bound]

    def __str__(self):
        last, parts = 0, []
        for bound, n in self.counts().items():
            if n > last:
                parts.append(f"{n - last:.0f} <= {bound:g}")
            last = n
        return ", ".join(parts) or "none"


def is_free(cluster):
    return not any(cluster.pages_listed().values())


def deep_model(folder):
    """The bundled model's shape with more layers, for random weights: four of them are then a small part of a chunk."""
    for name in os.listdir(kit.TINY):
        if name.endswith(".json") and "index" not in name:
            shutil.copy(os.path.join(kit.TINY, name), folder)
    with open(os.path.join(kit.TINY, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    config["num_hidden_layers"] = N_LAYERS
    config["num_nextn_predict_layers"] = 0
    config["compress_ratios"] = [0, 0] + [4, 128] * (N_LAYERS // 2 - 1)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    return folder


@suite.case("layers")
def four_layers_more(build):
    """The CPU engine computes a prompt of many chunks; clients leave amid it."""
    folder = tempfile.mkdtemp(prefix="cancel-")
    rng = random.Random(6)
    try:
        with kit.Cluster(build, engine="model", model=deep_model(folder),
                         extra=["node:--weights=synthetic:6", "node:--threads=1", f"node:--chunk={CHUNK}"]) as c:
            prefill = c.prefill()
            before = prefill.metric("baton_engine_progress_total")
            stream = c.stream(PATH, body(CHUNK + 20, 2), timeout=120)
            need(isinstance(stream, kit.Stream) and stream.done, "a whole answer", stream)
            made = prefill.metric("baton_engine_progress_total") - before
            check("what two chunks advance the counter by", made, 2 * (2 * N_LAYERS + 1))

            layers = Histogram(prefill, "baton_cancel_progress")
            seconds = Histogram(prefill, "baton_cancel_seconds")
            tokens = prefill.metric("baton_prefill_tokens_total")
            for _ in range(N_LEAVE):
                with kit.Wire(c.address) as wire:
                    start = prefill.metric("baton_engine_progress_total")
                    wire.send(kit.frame("POST", PATH, body(N_PROMPT)))
                    # Anywhere in its first two chunks, which is where the counter is, not the clock.
                    far = rng.randrange(1, 4 * N_LAYERS)
                    wait_for("it is computed", lambda: prefill.metric("baton_engine_progress_total") > start + far, 60,
                             0.002)
                    wire.reset()
                wait_for("all is free", lambda: is_free(c), 30, 0.01)
                rests = prefill.metric("baton_engine_progress_total")
                time.sleep(0.05)
                check("progress of an idle prefill node", prefill.metric("baton_engine_progress_total"), rests)
            check("cancels that were measured", layers.n(), N_LEAVE)
            check(f"more than four layers after the cancel ({layers})", layers.n_above(FOUR_LAYERS), 0)
            tokens = prefill.metric("baton_prefill_tokens_total") - tokens
            need(tokens < N_LEAVE * N_PROMPT / 2, "most of the prompts was not computed", tokens)
            print(f"# half layers after a cancel: {layers}; seconds until free: {seconds}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@suite.case("free")
def free_in_100_ms(build):
    """Pages of full size, clients that leave together: while their prompts wait, are computed, wait for landing slots and
    are sent. A round in which the prefill node frees all in 100 ms, and the decode node has its slots back as soon, is
    what must be seen; a busy machine gets several."""
    rng = random.Random(7)
    extra = [f"node:--sim-page-bytes={V4_PAGE}", f"node:--sim-tail-bytes={V4_TAIL}", "node:--pages=120",
             "node:--sim-prefill-speed=20000", "node:--chunk=2048", "decode:--landing-slots=8"]
    with kit.Cluster(build, extra=extra) as c:
        prefill, decode = c.prefill(), c.decode()
        for _ in range(2):
            c.stream(PATH, body(600), timeout=60)
        wait_for("all is free", lambda: is_free(c), 15)
        told = []
        for _ in range(ROUNDS):
            free = Histogram(prefill, "baton_cancel_seconds")
            slots = Histogram(decode, "baton_landing_revoked_seconds")
            started = prefill.metric("baton_transfers_started_total")
            wires = [kit.Wire(c.address) for _ in range(A_ROUND)]
            for wire in wires:
                wire.send(kit.frame("POST", PATH, body(rng.randrange(4000, 7000))))
            wait_for("prefill has them all", lambda: prefill.metric("baton_transfers_started_total") == started + A_ROUND,
                     10, 0.005)
            time.sleep(rng.uniform(0, 0.2))
            leave_at = threading.Barrier(A_ROUND)
            threads = [threading.Thread(target=lambda w: (leave_at.wait(), w.reset()), args=(w,)) for w in wires]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wait_for("all is free", lambda: is_free(c), 15, 0.02)
            told.append(f"free: {free}; slots: {slots}")
            print(f"# {told[-1]}", flush=True)
            if free.n() == A_ROUND and not free.n_above(BOUND_S) and slots.n() > 0 and not slots.n_above(BOUND_S):
                return
        raise kit.Wrong(f"no round of {ROUNDS} in which all was free within 100 ms:\n" + "\n".join(told))


if __name__ == "__main__":
    suite.main()
