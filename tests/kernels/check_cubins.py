#!/usr/bin/env python3
"""check_cubins.py NVCC SOURCE_ROOT FILE.cu...: what ptxas says of every kernel on sm_90a and sm_120a.

A kernel may use at most 99 KiB of shared memory (what sm_120 has), spill nothing and have no stack frame (an array that went
to memory). What a launch asks for beside it, the sources bound. Prints the table; exit 1 on a breach.
"""
import re
import subprocess
import sys

MAX_SHARED_BYTES = 99 * 1024


def main():
    nvcc, root, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    breaches, rows = [], 0
    print(f"{'file':<16} {'arch':<8} {'kernel':<32} {'registers':>9} {'shared':>8} {'spills':>7}")
    for file in files:
        for arch in ("90a", "120a"):
            done = subprocess.run([nvcc, "-cubin", "-o", "/dev/null", "-O3", "-fmad=false", "-std=c++17", "-I" + root, "-Xptxas", "-v",
                                   f"-gencode=arch=compute_{arch},code=sm_{arch}", file],
                                  capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            for part in done.stderr.split("Compiling entry function '")[1:]:
                name = part.split("'")[0]
                plain = [m[1] for m in re.findall(r"(?=(\d{1,2})([a-z][a-z_0-9]*_kernel))", name) if int(m[0]) == len(m[1])]
                stack = int((re.search(r"(\d+) bytes stack frame", part) or [0, 0])[1])
                spill = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
                registers = int(re.search(r"Used (\d+) registers", part).group(1))
                shared = int((re.search(r"(\d+) bytes smem", part) or [0, 0])[1])
                rows += 1
                label = plain[0] if plain else name[:32]
                print(f"{file.rsplit('/', 1)[-1]:<16} {arch:<8} {label:<32} {registers:>9} {shared:>8} {spill:>7}")
                if spill or stack or shared > MAX_SHARED_BYTES:
                    breaches.append(f"{label} on sm_{arch}: {spill} bytes spilled, {stack} of stack, {shared} of shared memory")
    if not rows:
        sys.exit("no kernel was found: the check checks nothing")
    for breach in breaches:
        print(breach, file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
