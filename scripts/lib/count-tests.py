#!/usr/bin/env python3
"""Adds up a meson testlog.json: prints "passed failed skipped"."""
import json
import sys

counts = {"OK": 0, "SKIP": 0}
failed = 0
try:
    with open(sys.argv[1]) as log:
        for line in log:
            result = json.loads(line)["result"]
            if result in ("OK", "EXPECTEDFAIL"):
                counts["OK"] += 1
            elif result == "SKIP":
                counts["SKIP"] += 1
            else:
                failed += 1
except OSError:
    failed += 1
print(counts["OK"], failed, counts["SKIP"])
