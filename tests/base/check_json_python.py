#!/usr/bin/env python3
"""Holds base/json against Python's json module: same bytes out, same texts refused."""
import json
import math
import random
import struct
import subprocess
import sys


def ask(program, lines, *args):
    done = subprocess.run([program, *args], input="\n".join(lines).encode() + b"\n",
                          stdout=subprocess.PIPE, check=True)
    answers = done.stdout.decode().split("\n")[:-1]
    assert len(answers) == len(lines), (len(answers), len(lines))
    return answers


def doubles(rng, n):
    for e in range(-1074, 1024):
        for near in (2.0 ** e, math.nextafter(2.0 ** e, 0), math.nextafter(2.0 ** e, math.inf)):
            if not math.isinf(near):
                yield near
    for e in range(-323, 309):
        yield float(f"1e{e}")
        yield -float(f"9.5e{e}") if e < 308 else 1.0
    for _ in range(n):
        value = struct.unpack("<d", rng.randbytes(8))[0]
        if math.isfinite(value):
            yield value
        yield rng.uniform(-1000, 1000)
        yield round(rng.uniform(-10, 10), rng.randrange(6))
    yield from (0.0, -0.0, 1.0, 1e15, 1e16, 123456789012345680.0, 0.0001, 0.00001, 5e-324)


def text(rng):
    pool = ["a", '"', "\\", "/", "\b", "\f", "\n", "\r", "\t", "\0", "\x1f", "\x7f", "\u0080",
            "\u20ac", "\u2028", "\uffff", "\U0001f600", "\U0010ffff", "key"]
    return "".join(rng.choice(pool) for _ in range(rng.randrange(8)))


def tree(rng, depth):
    kind = rng.randrange(8 if depth < 6 else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.randrange(-2 ** 63, 2 ** 63)
    if kind == 2:
        return rng.uniform(-1e6, 1e6)
    if kind < 6:
        return text(rng)
    if kind == 6:
        return [tree(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {text(rng).replace("\0", ""): tree(rng, depth + 1) for _ in range(rng.randrange(6))}


def check_same(program, texts, what):
    for sent, got in zip(texts, ask(program, texts)):
        want = json.dumps(json.loads(sent), ensure_ascii=False)
        assert got == want, f"{what}: {sent!r}: got {got!r}, python says {want!r}"
    print(f"{what}: {len(texts)} alike")


def main():
    program = sys.argv[1]
    rng = random.Random(20260101)

    check_same(program, [repr(v) for v in doubles(rng, 3000)], "doubles")
    check_same(program, ["1e2", "1E+2", "-0", "-0.0", "0.1e1", "123456789.0e-3", "1e-400", "9e-5",
                         "100000000000000000000.0", "-9223372036854775808", "9223372036854775807"],
               "spellings")
    trees = [tree(rng, 0) for _ in range(3000)]
    check_same(program, [json.dumps(t) for t in trees], "escaped trees")
    check_same(program, [json.dumps(t, ensure_ascii=False, separators=(",", ":")) for t in trees],
               "plain trees")

    floats = []
    for _ in range(6000):
        value = struct.unpack("<f", rng.randbytes(4))[0]
        if math.isfinite(value):
            floats.append(value)
    floats += [2.0 ** e for e in range(-149, 128)]
    for value, got in zip(floats, ask(program, [repr(v) for v in floats], "float")):
        back = struct.unpack("<f", struct.pack("<f", float(got)))[0]
        assert back == value, (value, got)
        digits = len(got.split("e")[0].lstrip("-").replace(".", "").strip("0"))
        assert digits <= 9, (value, got)
    print(f"floats: {len(floats)} read back")

    # Python is laxer in places (NaN, duplicates, big integers); what it refuses, we refuse.
    bad = ['{"a":1,"a":2}', "NaN", "Infinity", "-Infinity", "1e999", "9223372036854775808",
           "[1,]", '{"a":1,}', "[1] x", "'a'", "01", "+1", ".5", "1.", '"\\ud800"', '"\\x41"',
           '"\x01"', "\ufeff1", "[", '{"a"}', "tru", '"a', "// x", "", "[1 2]", '{"a\\u0000":1}']
    for sent, got in zip(bad, ask(program, bad)):
        assert got.startswith("!invalid line "), (sent, got)
    print(f"bad texts: {len(bad)} refused")


main()
