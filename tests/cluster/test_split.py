#!/usr/bin/env python3
"""Split over processes = one process, bit for bit: 50 random prompts with the bundled model, every draw's log probability.

The reference is baton-eval, one process, for the greedy tokens, and a lone decode node for the log probabilities (printed
with the nine digits that give a float back). Against it: one prefill node and one decode node with small chunks, two of each
with another chunk, and requests in batches. Lengths at the bounds of windows, pages and chunks are asked for greedily and
sampled, the others by turns. A tensor-parallel group of two is held to the same among its own.
"""
import json
import os
import random
import subprocess
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import TINY, Cluster, check, check_equal, main

# On a busy machine a chunk may take seconds, and that is no hang.
PATIENT = ["router:--lease=30s", "node:--lease=30s", "router:--queue-timeout=0"]  # the model computes all of it
N_PROMPTS, N_BOUNDS, N_TOKENS = 50, 14, 12
VOCABULARY = 2500  # text tokens: below the special ones


def prompts(n=N_PROMPTS):
    draw = random.Random(20261130)
    lengths = [1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257, 511, 512, 513]
    lengths += [draw.randrange(1, 500) for _ in range(n - len(lengths))]
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths[:n]]


def by_turns(ids):
    """What is asked for greedily, and what is sampled: the fixed lengths both, the drawn ones in turn."""
    bounds, drawn = ids[:N_BOUNDS], ids[N_BOUNDS:]
    return bounds + drawn[0::2], bounds + drawn[1::2]


def ask(cluster, ids, temperature):
    status, answer = cluster.post("/v1/completions", {
        "prompt": [ids], "max_tokens": N_TOKENS, "ignore_eos": True, "temperature": temperature, "seed": 7 + len(ids),
        "logprobs": 5})
    check_equal(status, 200, f"a prompt of {len(ids)} tokens: {answer}")
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def ask_all(cluster, wanted_ids, temperature, at_once):
    """Answers in the order of the prompts, `at_once` requests in flight."""
    answers, problems, lock, left = {}, [], threading.Lock(), list(enumerate(wanted_ids))

    def work():
        while True:
            with lock:
                if not left or problems:
                    return
                i, ids = left.pop(0)
            try:
                answers[i] = ask(cluster, ids, temperature)
            except Exception as problem:  # told by the thread that joins
                problems.append(f"prompt {i}: {problem}")

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(not problems, "; ".join(problems))
    return [answers[i] for i in range(len(wanted_ids))]


def eval_greedy(build, wanted_ids):
    lines = "".join(json.dumps({"tokens": ids, "n": N_TOKENS}) + "\n" for ids in wanted_ids)
    done = subprocess.run([os.path.join(build, "eval", "baton-eval"), "generate", "--model", TINY, "--ignore-eos",
                           "--chunk", "100"], input=lines, capture_output=True, text=True, timeout=500, check=True)
    return [json.loads(line)["ids"] for line in done.stdout.splitlines()]


def same(found, wanted, what):
    for i, (a, b) in enumerate(zip(found, wanted)):
        check(a == b, f"{what}, prompt {i}: {a[:2]} is not {b[:2]}")
    check_equal(len(found), len(wanted), what)


def check_notes(cluster, n_nodes):
    """What the model has and is not used is said once by each node, and by nobody else."""
    said = [line.split()[0] for line in cluster.log().splitlines() if "speculative" in line]
    check(len(said) == len(set(said)) == n_nodes and "router" not in said, f"who said it: {said}")


def test_split_is_whole(build):
    greedy_ids, sampled_ids = by_turns(prompts())
    with Cluster(build, engine="model", prefill=0, decode=1, extra=[*PATIENT, "router:--local-prefill=only"]) as cluster:
        greedy = ask_all(cluster, greedy_ids, 0, 1)
        sampled = ask_all(cluster, sampled_ids, 1.0, 8)
        for i, reference in enumerate(eval_greedy(build, greedy_ids)):
            shown = [token for token in reference if token > 2]  # no text shows BOS, EOS and padding
            _, answer = cluster.post("/detokenize", {"tokens": shown})
            check_equal(greedy[i][0], answer["prompt"], f"greedy text of prompt {i} against baton-eval")
        cluster.check_idle()
    for prefill, decode, chunk, pieces in ((1, 1, 64, 0), (2, 2, 300, 3)):
        with Cluster(build, engine="model", prefill=prefill, decode=decode,
                     extra=[*PATIENT, "router:--local-prefill=never", f"prefill:--chunk={chunk}",
                            f"prefill:--last-chunk-pieces={pieces}"]) as cluster:
            what = f"{prefill} prefill and {decode} decode nodes, chunks of {chunk}"
            same(ask_all(cluster, greedy_ids, 0, 6), greedy, what + ", greedy")
            same(ask_all(cluster, sampled_ids, 1.0, 3), sampled, what + ", sampled")
            check_notes(cluster, prefill + decode)
            cluster.check_idle()


def test_group_of_two(build):
    ids = prompts(20)
    with Cluster(build, engine="model", prefill=0, decode=1,
                 extra=[*PATIENT, "router:--local-prefill=only", "node:--device=cpu:2"]) as cluster:
        whole = ask_all(cluster, ids, 0, 4)
    with Cluster(build, engine="model", extra=[*PATIENT, "router:--local-prefill=never", "node:--device=cpu:2",
                                               "prefill:--chunk=100"]) as cluster:
        same(ask_all(cluster, ids, 0, 2), whole, "a group of two, split")
    with Cluster(build, engine="model", prefill=0, decode=1, extra=[*PATIENT, "router:--local-prefill=only"]) as cluster:
        single = ask_all(cluster, ids, 0, 4)
    # Sums are made in another order, so the last bits differ; the first draw of each prompt is before any token can.
    for i, (a, b) in enumerate(zip(whole, single)):
        check(abs(a[1][0] - b[1][0]) < 0.25, f"prompt {i}: {a[1][0]} with two devices, {b[1][0]} with one")


if __name__ == "__main__":
    main([test_split_is_whole, test_group_of_two])
