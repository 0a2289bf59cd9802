#!/usr/bin/env python3
"""What a router would refuse is refused by the node itself, before it reads a checkpoint: the one named here is missing."""
import subprocess
import sys

CASES = [
    (["--node-id=a b"], '--node-id "a b"'),
    (["--node-id="], '--node-id: is empty'),
    (["--node-id=" + "x" * 65], "want 1 to 64"),
    (["--router=10.0.0.1:8001", "--router=nohost"], "--router nohost: it needs a host and a port"),
    (["--router=h:99999"], "--router h:99999"),
    (["--host=0.0.0.0"], "--advertise-host"),
    (["--node-id=" + "x" * 64, "--router=h:1"], "/nonexistent/config.json"),
]

failed = 0
for program in sys.argv[1:]:
    for options, wanted in CASES:
        end = subprocess.run([program, "--model=/nonexistent", *options], capture_output=True, text=True, timeout=60)
        if end.returncode not in (1, 2) or wanted not in end.stderr:
            print(f"{program} {options}: ended with {end.returncode}, no '{wanted}' in: {end.stderr}")
            failed += 1
sys.exit(failed > 0)
