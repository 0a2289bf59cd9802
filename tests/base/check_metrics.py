#!/usr/bin/env python3
"""check_metrics.py PROGRAM ARGS...: runs it and holds the exposition that it prints against the
format's rules, also those that promtool does not test; then promtool, where it is installed (77
without it). Any program that prints an exposition can be checked with it."""
import re
import shutil
import subprocess
import sys

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')


def labels_of(text):
    labels, at = {}, 0
    while at < len(text):
        match = LABEL.match(text, at)
        assert match, f"bad labels: {text!r}"
        assert match[1] not in labels, f"label twice: {text!r}"
        labels[match[1]] = match[2]
        at = match.end()
    return labels


def check(text):
    assert text.endswith("\n"), "no newline at the end"
    kinds, helps, seen, histograms = {}, set(), set(), {}
    current = None
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helps, f"HELP twice: {name}"
            helps.add(name)
        elif line.startswith("# TYPE "):
            _, _, current, kind = line.split(" ")
            assert current not in kinds and current in helps, f"TYPE out of place: {line}"
            kinds[current] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"bad sample: {line!r}"
            name, labels, value = match[1], labels_of(match[2] or ""), float(match[3])
            family = name
            if kinds[current] == "histogram":
                family = re.sub("_(bucket|sum|count)$", "", name)
                assert family != name, f"bare sample in a histogram: {line!r}"
            assert family == current, f"{line!r} stands under {current}"
            key = (name, tuple(sorted(labels.items())))
            assert key not in seen, f"sample twice: {line!r}"
            seen.add(key)
            if kinds[current] == "histogram":
                bound = labels.pop("le", None)
                entry = histograms.setdefault((family, tuple(sorted(labels.items()))), {})
                if name.endswith("_bucket"):
                    entry.setdefault("buckets", []).append((float(bound), value))
                else:
                    entry[name[len(family):]] = value
    for key, entry in histograms.items():
        bounds = [b for b, _ in entry["buckets"]]
        counts = [c for _, c in entry["buckets"]]
        assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf"), f"bounds of {key}"
        assert counts == sorted(counts), f"counts of {key} fall"
        assert counts[-1] == entry["_count"], f"+Inf and _count of {key} differ"
        assert "_sum" in entry, f"no _sum for {key}"
    assert seen, "no samples"
    print(f"{len(kinds)} families, {len(seen)} samples")


def main():
    done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True)
    check(done.stdout.decode("utf-8"))
    if shutil.which("promtool") is None:
        print("promtool is not installed")
        sys.exit(77)
    lint = subprocess.run(["promtool", "check", "metrics"], input=done.stdout,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    print(lint.stdout.decode(), end="")
    sys.exit(1 if lint.returncode else 0)


main()
