#!/usr/bin/env python3
"""check_memory.py SOURCE_ROOT PROGRAM...: the memory sum of a start, with real processes under real limits.

A start that does not fit ends before it allocates and says what would; the same start with that value runs, with one more it ends
again. Under --memory-limit everywhere; under ulimit -v where the build lives with one (AddressSanitizer does not); in a control
group where one can be made here."""
import os
import re
import resource
import signal
import subprocess
import sys

root = sys.argv[1]
programs = sys.argv[2:]
tiny = os.path.join(root, "models/baton-tiny")
SIM = ["--engine", "sim", "--sim-vocab", "3000"]
MIB = 1 << 20


def start(program, *options, before=None):
    """(refusal, log) of a node; one that runs is ended and has no refusal."""
    node = subprocess.Popen([program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=before)
    log = []
    for line in node.stdout:
        log.append(line)
        if "probes on" in line:
            node.send_signal(signal.SIGTERM)
    node.wait(60)
    if any("probes on" in line for line in log):
        assert node.returncode == 0, log
        return None, log
    refusals = [line for line in log if "this start needs" in line]
    assert node.returncode == 1 and len(refusals) == 1, log
    return refusals[0], log


def table(log):
    """{item: MiB}"""
    found = [re.search(r"memory: ? *(.*?)  +([0-9.]+) MiB", line) for line in log]
    return {m[1]: float(m[2]) for m in found if m}


def advice(refusal):
    assert " would fit" in refusal, refusal
    options = re.findall(r"(--[a-z-]+) (\d+)", refusal)
    assert options, refusal
    return options


def follow(program, options, before=None, words="", less=0):
    """Refused, then as advised it runs. What is there under the kernel's limits differs a little from start to start: `less` of the last
    value leaves room for that."""
    refusal, log = start(program, *options, before=before)
    assert refusal and words in refusal, (refusal, log)
    needs, there, short = (float(x) for x in re.search(r"needs ([0-9.]+) MiB and ([0-9.]+) MiB are there .*, ([0-9.]+) MiB too", refusal).groups())
    assert abs(needs - there - short) < 0.11, refusal
    assert abs(table(log)["all on the host"] - needs) < 0.11, log
    advised = advice(refusal)
    last = advised[-1]
    given = [word for pair in advised for word in (pair[0], str(int(pair[1]) - (less if pair == last else 0)))]
    ran, log = start(program, *options, *given, before=before)
    assert ran is None, ran
    return advised, log


for program in programs:
    own = "landing slots" if "decode" in program else "tail buffers"
    # a table that adds up: 256 pages and the daemon's own, of sizes that are known from outside
    refusal, log = start(program, *SIM)
    items = table(log)
    assert refusal is None and abs(items["pages"] - 256 * 901120 / MIB) < 0.06, log
    assert abs(items[own] - (32 * 901120 if "decode" in program else 16 * 4415488) / MIB) < 0.06, log
    assert abs(items["all on the host"] - items["pages"] - items[own]) < 0.11, items

    for limit in (200 * MIB, 100 * MIB, 6 * MIB):
        options = [*SIM, "--memory-limit", str(limit)]
        advised, _ = follow(program, options, words="--memory-limit")
        last = advised[-1]
        more = [w for option, n in advised for w in (option, str(int(n) + ((option, n) == last)))]
        assert start(program, *options, *more)[0], (advised, limit)
    refusal, _ = start(program, *SIM, "--memory-limit", "1M")  # less than a page and one slot or tail
    assert "with the least of everything" in refusal and "--pages" not in refusal, refusal

    # a model: weights and rows of a call stand in the sum, and a long chunk is what gives way
    advised, log = follow(program, ["--model", tiny, "--chunk", "20000", "--memory-limit", "300M"])
    assert dict(advised).keys() == {"--chunk"} and {"weights", "scratch", "rows of a call", "sequence slots", "logits", "pages", own} < table(log).keys()


def address_space(n_bytes):
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))


sanitized = subprocess.run([programs[0], "--version"], capture_output=True, preexec_fn=address_space(4 << 30)).returncode != 0
for program in programs if not sanitized else ():
    follow(program, [*SIM, "--pages", "8000"], before=address_space(4 << 30), words="ulimit -v", less=32)
print("ulimit -v:", "this build can't live under one" if sanitized else "held")


def own_group():
    """A new control group below this process's own, with a limit of 600 MiB; None where none can be made."""
    with open("/proc/self/cgroup", encoding="ascii") as file:
        lines = [line.rstrip("\n").split(":", 2) for line in file]
    for _, words, path in lines:
        if words and "memory" not in words.split(","):
            continue
        mount, knob = ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if words else ("/sys/fs/cgroup", "memory.max")
        folder = f"{mount}{path.rstrip('/')}/baton-check-{os.getpid()}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            with open(os.path.join(folder, knob), "w", encoding="ascii") as file:
                file.write(str(600 * MIB))
            return folder
        except OSError:
            os.rmdir(folder)
    return None


group = own_group()
if group:
    def enter():
        with open(os.path.join(group, "cgroup.procs"), "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    try:
        for program in programs:
            follow(program, [*SIM, "--pages", "2000"], before=enter, words="control group", less=32)
    finally:
        os.rmdir(group)
print("control group:", "held" if group else "none can be made here")
