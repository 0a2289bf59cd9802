#!/usr/bin/env python3
"""project=joined, which serves a GPU by itself, against project=tensor: the same bytes.

    check_joined.py BATON_EVAL ROOT [TOKENS]       of the prompt; 145, so that a heavy layer has an entry

Logits of models/baton-tiny (window-only, ratio-4 and heavy layers) behind a prompt in chunks of 16 tokens, so that joined has all of it, and of steps
of one row. 77 without a device.
"""
import json
import pathlib
import subprocess
import sys

DEVICE = "cuda:0"


def logits(program, root, n_tokens, project):
    line = json.dumps({"tokens": [0] + [10 + 37 * i % 900 for i in range(n_tokens - 1)], "forced": [15, 22, 300]})
    done = subprocess.run([program, "logits", "--device", DEVICE, "--model", str(root / "models/baton-tiny"), "--chunk", "16",
                           "--kernel", f"project={project}"], input=line + "\n", capture_output=True, text=True, check=False)
    if done.returncode and any(x in done.stderr for x in ("can be used", "no CUDA", "numbered from 0")):
        sys.exit(77)
    if done.returncode:
        sys.exit(f"project={project}: {done.stderr}")
    return done.stdout


def main():
    program, root, n_tokens = sys.argv[1], pathlib.Path(sys.argv[2]), int((sys.argv[3:] or ["145"])[0])
    joined, apart = (logits(program, root, n_tokens, x) for x in ("joined", "tensor"))
    same = joined == apart and len(joined) > 10000
    print(f"{len(joined)} bytes, {'the same' if same else 'DIFFER'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
