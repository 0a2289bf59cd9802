#!/usr/bin/env python3
"""check_cuda.py BATON_EVAL SOURCE_ROOT [DEVICE]: the whole model on DEVICE (cuda:0) gives the CPU's logits, every digit of them, with
its reference kernels, and logits within a tenth of their range with its tuned ones (their tokens: check_golden.py). A group of GPUs,
cuda:0,1, is held to a group of as many CPU devices, which sums in the same order.

Random prompts across page and window borders, exact and quantised, cut into chunks of several lengths, and a greedy continuation.
Exit 77 where DEVICE can't be used.
"""
import json
import pathlib
import random
import subprocess
import sys


GPU = sys.argv[3] if len(sys.argv) > 3 else "cuda:0"
N_RANKS = GPU.count(",") + 1
CPU = "cpu" if N_RANKS == 1 else f"cpu:{N_RANKS}"
TUNED = ["mhc", "project", "compress", "indexer", "topk", "attend", "oproj", "route", "experts", "head"]


def ask(program, command, options, device, lines, tuned=False):
    forced = [] if tuned or not device.startswith("cuda") else [x for op in TUNED for x in ("--kernel", op + "=reference")]
    done = subprocess.run([program, command, "--device", device, "--allow-reference", "all", *forced, *options], input="".join(json.dumps(x) + "\n" for x in lines),
                          capture_output=True, text=True, check=False)
    if done.returncode:
        if device == GPU and "cuda:" in done.stderr and "logits" not in done.stdout:
            print(done.stderr)
            sys.exit(77 if any(x in done.stderr for x in ("can be used", "no CUDA", "numbered from 0")) else 1)
        sys.exit(f"{command} on {device}: {done.stderr}")
    return done.stdout


def main():
    program, root = sys.argv[1], pathlib.Path(sys.argv[2])
    draw = random.Random(5)
    prompts = [{"tokens": [0] + [draw.randrange(10, 2500) for _ in range(n - 1)], "forced": [draw.randrange(10, 2500) for _ in range(f)]}
               for n, f in ((5, 3), (130, 4), (2060, 6))]
    toys = [{"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5], "forced": [1, 2, 3]}]
    tiny = ["--model", str(root / "models/baton-tiny")]
    cases = [("logits", tiny, prompts), ("logits", tiny + ["--exact"], prompts), ("logits", tiny + ["--chunk", "100"], prompts),
             ("logits", ["--model", str(root / "tests/golden/toy"), "--exact"], toys),
             ("logits", ["--model", str(root / "tests/golden/toy_fp8")], toys),
             ("logits", tiny + ["--weights", "synthetic:7"], prompts), ("logits", tiny + ["--weights", "synthetic:8", "--rank", "1/2"], prompts[:2]),
             ("generate", tiny + ["--ignore-eos", "--n", "100"], [{"tokens": [0, 15, 22]}])]
    if N_RANKS > 1:  # one output group, and a rank alone, are no group's
        cases = [case for case in cases if "--rank" not in case[1] and not case[1][1].endswith("toy_fp8")]
    n_wrong = 0
    for command, options, lines in cases:
        there = ask(program, command, options, GPU, lines)
        here = ask(program, command, options, CPU, lines)
        same = here == there and len(here) > 100
        n_wrong += not same
        print(f"{command} {' '.join(options)}: {len(here)} bytes, {'the same' if same else 'DIFFERS'}")
    # tuned kernels: logits that differ by roundings
    rows = [[json.loads(x)["logits"] for x in ask(program, "logits", tiny, d, prompts[:2], tuned=True).splitlines()] for d in (CPU, GPU)]
    off = max(abs(a - b) for x, y in zip(*rows) for a, b in zip(x, y))
    span = max(abs(a) for x in rows[0] for a in x)
    n_wrong += off > 0.1 * span
    print(f"tuned: logits within {off:.3g} of {span:.3g}")
    # weights that nobody trained are made by each device itself, whole or in shares
    made = tiny + ["--weights", "synthetic:7"]
    marks = []
    for device in ("cpu", "cpu:2", GPU):
        marks.append([x for x in ask(program, "info", made, device, []).splitlines() if x.startswith("fingerprint")])
    n_wrong += marks[0] != marks[1] or marks[0] != marks[2] or len(marks[0]) != 1
    print(f"synthetic weights on cpu, cpu:2, {GPU}: {marks}")
    # every operation has a tuned variant, none with exact arithmetic: references don't serve without leave
    served = subprocess.run([program, "info", "--device", GPU, *tiny], capture_output=True, text=True, check=False)
    refused = subprocess.run([program, "info", "--device", GPU, "--exact", *tiny], capture_output=True, text=True, check=False)
    n_wrong += served.returncode != 0 or refused.returncode != 1 or "no tuned kernel of project" not in refused.stderr
    print(f"without --allow-reference: {served.stderr.strip()}; exact: {refused.stderr.strip()}")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
