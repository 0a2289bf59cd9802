#!/usr/bin/env python3
"""check_group_hangs.py BATON_EVAL SOURCE_ROOT: a rank of two emulated GPUs stops amid an answer: the program ends and says why.

How fast a rank is given up is measured in kernels/test_group.c; here the whole engine ends instead of waiting.
"""
import pathlib
import subprocess
import sys

program, root = sys.argv[1], pathlib.Path(sys.argv[2])
command = [program, "generate", "--device", "cuda:0,1", "--model", str(root / "models/baton-tiny"),
           "--chunk", "8", "--context", "512", "--ignore-eos", "--graphs", "off"]  # the hang is counted in operations asked for
done = subprocess.run(command, input='{"tokens": [0, 13, 7], "n": 20}\n', capture_output=True, text=True, check=False, timeout=500,
                      env={"EMULATED_DEVICES": "2", "EMULATED_NCCL_HANG": "1@40", "PATH": "/usr/bin:/bin"})
said = [line for line in done.stderr.splitlines() if "cuda:0,1: a sum hangs: all 2 ranks came to it" in line]
print(done.stderr[-2000:])
sys.exit(0 if done.returncode == 1 and said and not done.stdout.strip() else 1)
