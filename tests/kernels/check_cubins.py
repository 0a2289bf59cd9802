#!/usr/bin/env python3
"""check_cubins.py NVCC SOURCE_ROOT FILE.cu...: what ptxas says of every kernel on sm_90a and sm_120a.

A kernel may use at most 99 KiB of shared memory (what sm_120 has), spill nothing and have no stack frame (an array that went
to memory). What a launch asks for beside it, the sources bound. Kernels that are there for the tensor cores must have their
opcode in the machine code, and nobody else's has it: of those that multiply elements with scales each instance has, on sm_120a,
either HMMA or the block-scaled ones, and some instance has them; on sm_90a, where these are emulated, an instance may have none.
Every kernel but those that are launched alone says go and waits as kernels/cuda/launch.cuh wants it, and has no instruction
that reaches memory in front of its wait. Prints the table; exit 1 on a breach.
"""
import os
import re
import struct
import subprocess
import sys
import tempfile

MAX_SHARED_BYTES = 99 * 1024
# Low twelve bits of an instruction of 16 bytes. nvdisasm calls them HMMA on both architectures, and on sm_120a
# QMMA.SF.16832...E8 (kind::mxf8f6f4) and OMMA.SF.16864...E8 (kind::mxf4).
OPCODES = {"HMMA": 0x23C, "QMMA.SF": 0x47A, "OMMA.SF": 0x47F}
ON_TENSOR_CORES = {"tensor.cu": {"tensor_few_kernel", "tensor_many_kernel", "tensor_experts_kernel"}, "few.cu": {"few_kernel"}, "experts_stream.cu": {"stream_kernel"},
                   "experts_blocks.cu": {"experts_blocks_kernel"},
                   "attend_tensor.cu": {"attend_tensor_kernel"}, "tiles.cu": {"tiles_kernel", "tiles_experts_kernel"}, "topk_tensor.cu": {"topk_tensor_kernel"},
                   "rates.cu": {"product_kernel"}}
# Kernels with instances that multiply elements with scales, by the opcode that these have on sm_120a.
SCALED = {"tensor.cu": {kernel: "QMMA.SF" for kernel in ON_TENSOR_CORES["tensor.cu"]},
          "experts_stream.cu": {"stream_kernel": "QMMA.SF"}, "topk_tensor.cu": {"topk_tensor_kernel": "OMMA.SF"}}
# The instructions of launch.cuh's rule, and those that read or write memory that other kernels reach.
GO, WAIT = 0x82D, 0x82E  # PREEXIT, ACQBULK
MEMORY = {0x980: "LD", 0x981: "LDG", 0x985: "ST", 0x986: "STG", 0x98E: "RED", 0x3A8: "ATOMG", 0x9A8: "ATOMG", 0x3A9: "ATOMG.CAS",
          0xFAE: "LDGSTS"}
WEIGHTS_AHEAD = {"few_kernel": {"LDGSTS"}, "tensor_few_kernel": {"LDG"}, "mhc_turn_kernel": {"LDG"},
                 "mhc_chunks_kernel": {"LDG"}}
LAUNCHED_ALONE = {"parcel.cu"}  # not by cuda_run


def opcodes_of(cubin):
    """{mangled kernel: the opcode of each instruction} of an ELF file's .text sections."""
    section_at, = struct.unpack_from("<Q", cubin, 0x28)
    size, n, names_i = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, section_at + i * size) for i in range(n)]  # name, type, flags, addr, offset, size
    names_at = sections[names_i][4]
    codes = {}
    for section in sections:
        start = names_at + section[0]
        name = cubin[start:cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            words = struct.iter_unpack("<QQ", cubin[section[4]:section[4] + section[5] // 16 * 16])
            codes[name[len(".text."):]] = [low & 0xFFF for low, _ in words]
    return codes


def against_the_rule(codes, kernel):
    """What of launch.cuh's rule a kernel breaks, or None."""
    if GO not in codes or WAIT not in codes:
        return "does not say go, or does not wait"
    ahead = {MEMORY[code] for code in codes[:codes.index(WAIT)] if code in MEMORY} - WEIGHTS_AHEAD.get(kernel, set())
    return f"reaches memory before it waits: {' '.join(sorted(ahead))}" if ahead else None


def main():
    nvcc, root, files = sys.argv[1], sys.argv[2], sys.argv[3:]
    breaches, rows = [], 0
    print(f"{'file':<16} {'arch':<8} {'kernel':<32} {'registers':>9} {'shared':>8} {'spills':>7} " + " ".join(f"{what:>8}" for what in OPCODES))
    for file in files:
        for arch in ("90a", "120a"):
            with tempfile.TemporaryDirectory() as folder:
                cubin = os.path.join(folder, "cubin")
                done = subprocess.run([nvcc, "-cubin", "-o", cubin, "-O3", "-fmad=false", "-std=c++17", "-I" + root, "-Xptxas", "-v",
                                       f"-gencode=arch=compute_{arch},code=sm_{arch}", file],
                                      capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                with open(cubin, "rb") as code:
                    opcodes = opcodes_of(code.read())
            base = os.path.basename(file)
            have_scaled = set()
            for part in done.stderr.split("Compiling entry function '")[1:]:
                name = part.split("'")[0]
                plain = [m[1] for m in re.findall(r"(?=(\d{1,2})([a-z][a-z_0-9]*_kernel))", name) if int(m[0]) == len(m[1])]
                stack = int((re.search(r"(\d+) bytes stack frame", part) or [0, 0])[1])
                spill = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
                registers = int(re.search(r"Used (\d+) registers", part).group(1))
                shared = int((re.search(r"(\d+) bytes smem", part) or [0, 0])[1])
                rows += 1
                label = plain[0] if plain else name[:32]
                n_of = {what: opcodes[name].count(code) for what, code in OPCODES.items()}
                rule = None if base in LAUNCHED_ALONE else against_the_rule(opcodes[name], label)
                if rule:
                    breaches.append(f"{label} on sm_{arch}: {rule}")
                print(f"{file.rsplit('/', 1)[-1]:<16} {arch:<8} {label:<32} {registers:>9} {shared:>8} {spill:>7} " + " ".join(f"{n:>8}" for n in n_of.values()))
                if spill or stack or shared > MAX_SHARED_BYTES:
                    breaches.append(f"{label} on sm_{arch}: {spill} bytes spilled, {stack} of stack, {shared} of shared memory")
                scaled = SCALED.get(base, {}).get(label)
                n_scaled = sum(n_of.values()) - n_of["HMMA"]
                if scaled and arch == "120a" and n_scaled == n_of[scaled] > 0:
                    have_scaled.add(label)
                may_have_none = scaled and arch != "120a"
                if n_scaled and (not scaled or label not in have_scaled):
                    breaches.append(f"{label} on sm_{arch}: {n_scaled} block-scaled instructions that it should not have")
                elif (n_of["HMMA"] + n_scaled > 0) != (label in ON_TENSOR_CORES.get(base, ())) and not may_have_none:
                    breaches.append(f"{label} on sm_{arch}: {n_of['HMMA'] + n_scaled} instructions for tensor cores")
            if arch == "120a":
                breaches += [f"{label} on sm_120a: no instance has {what}" for label, what in SCALED.get(base, {}).items()
                             if label not in have_scaled]
    if not rows:
        sys.exit("no kernel was found: the check checks nothing")
    for breach in breaches:
        print(breach, file=sys.stderr)
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
