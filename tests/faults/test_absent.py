"""A build without -Dfault_points=true holds no fault point: not a name, not a function, not an option.

    test_absent.py BUILD_DIR
"""
import os
import re
import subprocess
import sys

build = sys.argv[1]
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "base", "fault.h"), encoding="utf-8") as file:
    header = file.read()
names = re.findall(r'^\s+P\(\w+, "([\w.]+)"', header, re.M)
assert len(names) > 40, f"the table of {len(names)} points is not read"
# "link.open" and the like could stand in any text; what nobody else says is told apart.
marks = [name.encode() + b"\0" for name in names] + [b"fault_hit", b"fault_start", b"link_fault", b"parcel_put_fault",
                                                     b"--list-fault-points", b"BATON_FAULT", b"/debug/faults"]
failed = False
for role in ("router", "prefill", "decode"):
    path = os.path.join(build, role, f"baton-{role}")
    with open(path, "rb") as file:
        program = file.read()
    found = [mark for mark in marks if mark in program]
    symbols = subprocess.run(["nm", "-a", path], capture_output=True, text=True, check=False).stdout
    found += re.findall(r"\b\w*fault_(?:hit|arm|start|find|point)\w*", symbols)
    if found:
        failed = True
        print(f"{path} holds {found}")
    for option in ("--fault-point=put.pages=fail", "--list-fault-points"):
        done = subprocess.run([path, option], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 2 or "unknown option" not in done.stderr:
            failed = True
            print(f"{path} {option}: exit {done.returncode}, {done.stderr!r}")
sys.exit(failed)
