#!/usr/bin/env python3
"""check_profile.py SOURCE_ROOT BATON_DECODE: --profile-step of the program itself, as a table and as JSON."""
import json
import os
import subprocess
import sys

root, decode = sys.argv[1:3]
tiny = os.path.join(root, "models/baton-tiny")


def run(*options):
    return subprocess.run([decode, *options], capture_output=True, text=True, timeout=200)


done = run("--model", tiny, "--profile-step", "3,600", "--json")
assert done.returncode == 0, done
profile = json.loads(done.stdout)
assert (profile["batch"], profile["context"], profile["device"], profile["model"]) == (3, 600, "cpu", "baton-tiny"), profile
operations = {line["operation"]: line for line in profile["operations"]}
assert set(operations) == {"begin", "embed", "mhc", "project", "compress", "indexer", "topk", "attend", "oproj", "route", "experts", "head"}
assert abs(sum(line["us"] for line in operations.values()) + profile["other_us"] - profile["step_us"]) < 0.001 * profile["step_us"]
assert abs(sum(line["bytes"] for line in operations.values()) - profile["bytes"]) < 1
assert all(line["bound"] in ("launches", "bandwidth", "tensor", "latency") for line in operations.values())

# bytes that can be worked out from config.json alone: the head, bf16 rows padded to 32, and the hyper-connections of the head
with open(os.path.join(tiny, "config.json"), encoding="utf-8") as file:
    config = json.load(file)
hidden, vocab = config["hidden_size"], config["vocab_size"]
head = operations["head"]["bytes"]
assert head in {-(-vocab // 32) * 32 * hidden * w + 32 * 4 * hidden * 4 for w in (2, 4)}, (head, vocab, hidden)

done = run("--model", tiny, "--profile-step", "1,20")
lines = done.stdout.splitlines()
assert done.returncode == 0 and lines[0].startswith("baton-tiny on cpu: a step of 1 rows at 20 tokens"), done
assert " of the step at " in lines[-1] and "its bound: " in lines[-1], lines

for options, code, words in ((["--profile-step", "16"], 2, "BATCH,CONTEXT"), (["--profile-step", "1,1"], 2, "--model"),
                             (["--engine", "sim", "--profile-step", "1,1"], 1, "no kernels to profile"),
                             (["--model", tiny, "--profile-step", "1,1048576"], 1, "tokens"),
                             (["--model", tiny, "--profile-step", "1,1", "--device", "cuda:250"], 1, "device 'cuda:250'")):
    done = run(*options)
    assert done.returncode == code and words in done.stderr and not done.stdout, (options, done)
