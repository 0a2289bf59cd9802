#!/usr/bin/env python3
"""check_kernels.py BATON_EVAL SOURCE_ROOT PROGRAM...: what --list-kernels, --kernel and --allow-reference say and do.

The last, on a GPU, is for tests/eval/check_cuda.py; here a start on one must end with one clear line."""
import json
import os
import subprocess
import sys

evaluate, root = sys.argv[1:3]
programs = [evaluate, *sys.argv[3:]]
tiny = os.path.join(root, "models/baton-tiny")
OPERATIONS = "embed mhc project compress indexer topk attend oproj route experts head comm products sample parcel".split()


def run(program, *options, text=""):
    return subprocess.run([program, *options], input=text, capture_output=True, text=True, timeout=100)


def table(done):
    """{(operation, variant): (chosen, reason)} of the lines behind the first."""
    assert done.stdout.startswith("device "), done
    rows = [line.split(None, 3) for line in done.stdout.splitlines()[1:]]
    return {(row[0], row[1]): (row[2] == "chosen", row[3]) for row in rows}


for program in programs:
    name = os.path.basename(program)
    for model in ([], ["--model", tiny]):
        for device in "cpu", "cpu:2":
            done = run(program, "--list-kernels", "--device", device, *model)
            assert done.returncode == 0 and not done.stderr, done
            rows = table(done)
            assert device in done.stdout.splitlines()[0] and (not model or "tiny" in done.stdout.splitlines()[0]), done
            assert sorted(op for (op, _), (chosen, _) in rows.items() if chosen) == sorted(OPERATIONS), rows
            assert all(reason for _, reason in rows.values())
    rows = table(run(program, "--list-kernels", "--kernel", "products=generic", "--kernel", "parcel=generic"))
    assert rows["products", "generic"][0] and rows["parcel", "generic"][0] and not rows["products", "avx2"][0]
    for options, code, words in (
            (["--kernel", "top=plain"], 2, "no such operation"), (["--kernel", "topk"], 2, "OPERATION=VARIANT"),
            (["--kernel", "topk=plain", "--kernel", "topk=quick"], 2, "as well"), (["--allow-reference", "top"], 2, "no such operation"),
            (["--kernel", "topk=quick"], 1, "this operation has the variants plain"), (["--device", "cpu:3", "--model", tiny], 1, "3 devices"),
            (["--device", "tpu"], 1, "tpu"), (["--model", "/nonexistent"], 1, "/nonexistent/config.json"),
            (["--device", "cuda:0,0,1"], 1, "all different"), (["--device", "cuda:0,x"], 1, "cuda:N,N"),
            (["--device", "cuda:250,251"], 1, "device 'cuda:250")):
        done = run(program, "--list-kernels", *options)
        assert done.returncode == code and words in done.stderr and done.stderr.count("\n") == 1, (options, done)
        assert done.stderr.startswith(name + ": "), done
    done = run(program, "--list-kernels", "--device", "cuda:250")  # a GPU that no host has
    assert done.returncode == 1 and "device 'cuda:250': " in done.stderr and done.stderr.count("\n") == 1, done
    # where there is one, a tuned kernel serves for every operation; for exact arithmetic there are references, which are not let in
    done = run(program, "--list-kernels", "--device", "cuda:0", "--model", tiny)
    if done.returncode == 0:
        rows = table(done)
        assert sorted(op for (op, _), (chosen, _) in rows.items() if chosen) == sorted(OPERATIONS), rows
        assert not any(chosen for (_, variant), (chosen, _) in rows.items() if variant == "reference"), rows
    else:
        assert done.returncode == 1 and "cuda:0" in done.stderr and done.stderr.count("\n") == 1, done
    done = run(program, "--list-kernels", "--device", "cuda:0", "--model", tiny, "--exact")
    assert done.returncode == 1 and "cuda:0" in done.stderr and done.stderr.count("\n") == 1, done

# the start itself: what was asked for by name runs, with the same bits; what can't be stops it
ask = json.dumps({"tokens": [0, 17, 300, 41, 9]}) + "\n"
plain = run(evaluate, "logits", "--model", tiny, text=ask)
forced = run(evaluate, "logits", "--model", tiny, "--kernel", "products=generic", text=ask)
assert plain.returncode == 0 and plain.stdout == forced.stdout and not plain.stderr, (plain, forced)
assert "products  generic    chosen" in run(evaluate, "info", "--model", tiny, "--kernel", "products=generic").stdout
for program in programs:
    start = ["logits"] if program == evaluate else []
    for options, words in ((["--kernel", "topk=quick"], "--kernel topk=quick: on cpu this operation has the variants plain"),
                           (["--device", "cuda:250"], "device 'cuda:250': ")):
        done = run(program, *start, "--model", tiny, *options, text=ask)
        errors = [line for line in done.stderr.splitlines() if " info " not in line]
        assert done.returncode == 1 and len(errors) == 1 and words in errors[0], done
