#!/usr/bin/env python3
"""Every message, field and enum value of proto/ is in docs/INTERFACES.md.

usage: check_interfaces.py ROOT
"""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
document = (root / "docs/INTERFACES.md").read_text()
words = set(re.findall(r"[A-Za-z0-9_]+", document))
missing = []
n = 0
for path in sorted((root / "proto").glob("*.proto")):
    text = re.sub(r"//.*", "", path.read_text())
    names = re.findall(r"\bmessage (\w+)", text)
    names += re.findall(r"\b(\w+) = \d+;", text)
    names += re.findall(r"\brpc (\w+)", text)
    for name in names:
        n += 1
        name = re.sub(r"^(FAIL|REASON|ROLE|MEMORY)_", "", name)
        if name not in words and name != "UNKNOWN":
            missing.append(f"{path.name}: {name}")
print(f"{n} names, {len(missing)} missing", *missing, sep="\n")
sys.exit(1 if missing or n < 150 else 0)
