#!/usr/bin/env python3
"""check_golden.py BATON_EVAL ROOT [OPTIONS]: the bundled model's greedy tokens against those of the PyTorch reference.

tests/golden/tiny_continuations.json was made by tools/train/golden.py, with the quantisers, and holds for each token how far
the second best logit was. Each golden token is fed in its turn, so every position is compared: where the gap is wider than
GAP the token must be the same, and of all positions at least SHARE must be. Two right implementations sum in other orders; a
rounding that then falls the other way, five layers deep, was seen to move a logit of this model by half of 1 (of a range of
37). Then the model runs by itself, up to the first place where it may part.

OPTIONS are baton-eval's (--device cuda:0, ...); exit 77 where the device can't be used. A GPU's tuned kernels sum in yet other
orders: there the gap may be twice as wide, and SHARE is demanded all the same.
"""
import json
import os
import subprocess
import sys

GAP, SHARE = 1.0, 0.95


def run(command, requests):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    baton_eval, root, *options = sys.argv[1:]
    model = [*options, "--model", os.path.join(root, "models", "baton-tiny")]
    lead = 2 * GAP if options else GAP
    there = subprocess.run([baton_eval, "info", *model], capture_output=True, text=True, check=False)
    if there.returncode and options and "no tuned kernel" not in there.stderr:
        print(f"skipped: {there.stderr.strip()}")
        return 77
    with open(os.path.join(root, "tests", "golden", "tiny_continuations.json"), encoding="utf-8") as file:
        cases = json.load(file)
    answers = iter(run([baton_eval, "logits", *model],
                       [{"tokens": c["tokens"], "forced": c["continuation"][:-1]} for c in cases]))
    n, n_same, widest, bad = 0, 0, 0.0, []
    for case in cases:
        for i, (token, gap) in enumerate(zip(case["continuation"], case["gaps"])):
            logits = next(answers)["logits"]
            same = max(range(len(logits)), key=lambda k: (logits[k], -k)) == token
            n, n_same = n + 1, n_same + same
            if not same:
                widest = max(widest, gap)
                if gap > lead:
                    bad.append(f"{case['name']}, token {i}: not {token}, although it led by {gap}")
    print(f"{n_same} of {n} tokens are the reference's; the widest gap that was lost is {widest}")
    alone = run([baton_eval, "generate", *model, "--ignore-eos"],
                [{"tokens": c["tokens"], "n": len(c["continuation"])} for c in cases])
    for case, answer in zip(cases, alone):
        for i, (found, token) in enumerate(zip(answer["ids"], case["continuation"])):
            if found != token:
                if case["gaps"][i] > lead:
                    bad.append(f"{case['name']}, generated token {i}: {found}, not {token} with a lead of {case['gaps'][i]}")
                break
    for line in bad:
        print(line, file=sys.stderr)
    if n < 320 or len(cases) < 10 or n_same < SHARE * n:
        print(f"{len(cases)} cases, {n} tokens, {n_same} the same: too few", file=sys.stderr)
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
