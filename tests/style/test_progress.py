#!/usr/bin/env python3
"""test_progress.py SETUP: what a step of quickstart or check shows without a terminal while it takes long, and how it ends."""
import re
import subprocess
import sys
import tempfile

LONG = "for i in 1 2 3; do echo line $i; sleep 1.2; done"


def run(setup, command, progress_s=1):
    with tempfile.TemporaryDirectory() as folder:
        script = f'. {setup}; log_dir={folder}; step "a step" bash -c {command!r}; echo "status $?"'
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True,
                              env={"PATH": "/usr/bin:/bin", "BATON_PROGRESS_S": str(progress_s)}).stdout


said = run(sys.argv[1], LONG)
assert re.search(r"^a step +\n +\d+s  line [123]\n.* line [123]\na step +ok +\d+s\nstatus 0\n$", said, re.S), said
said = run(sys.argv[1], "true", progress_s=30)  # no step so short takes that, however slow the machine
assert re.fullmatch(r"a step + ok +\d+s\nstatus 0\n", said), said
said = run(sys.argv[1], LONG + "; false")
assert re.search(r" line [23]\na step +failed after \d+s\n    line 1\n", said) and said.endswith("status 1\n"), said
print("3 steps shown")
