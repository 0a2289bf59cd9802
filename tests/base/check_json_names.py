#!/usr/bin/env python3
"""check_json_names.py PROGRAM: no function of ours bears a name that the JSON library exports. It
would call ours in place of its own, since a program's symbols come before a library's. 77 where nm
or ldd is missing or the library is linked statically."""
import re
import shutil
import subprocess
import sys


def names(*args):
    out = subprocess.run(["nm", "--defined-only", "-g", *args], stdout=subprocess.PIPE, text=True,
                         check=True).stdout
    return {re.sub("@.*", "", line.split()[-1]) for line in out.splitlines() if " T " in line}


def main():
    if shutil.which("nm") is None or shutil.which("ldd") is None:
        sys.exit(77)
    program = sys.argv[1]
    linked = subprocess.run(["ldd", program], stdout=subprocess.PIPE, text=True, check=True).stdout
    match = re.search(r"libjansson\S* => (\S+)", linked)
    if match is None:
        sys.exit(77)
    theirs, ours = names("-D", match[1]), names(program)
    assert "json_loadb" in theirs and "json_parse" in ours, "nm reads neither"
    assert not theirs & ours, f"names of both: {sorted(theirs & ours)}"
    print(f"{len(theirs)} names of theirs and {len(ours)} of ours have none in common")


main()
