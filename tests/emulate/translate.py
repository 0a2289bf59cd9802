#!/usr/bin/env python3
"""translate: a CUDA source becomes C++ for tests/emulate.

translate.py IN.cu OUT.cc

What C++ has no words for is put otherwise, and kernels get names; lines keep their numbers:

  kernel<X><<<grid, block, shared, stream>>>(arguments);   a call of emulate::launch
  cuda_run(dev, "what", kernel<X>, ...)                     the kernel becomes emulate::named(kernel<X>, "kernel<X>")
  extern __shared__ T name[];                               a pointer to the block's memory
"""

import re
import sys

NAME = re.compile(r"[A-Za-z_]\w*(?:<[^<>;{}()]*>)?\s*$")
EXTERN = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:]+(?:\s+[\w:]+)?)\s+(\w+)\[\];")


def closing(text, at, opening, closing_):
    """The place behind what closes the bracket at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opening) - (text[i] == closing_)
        if depth == 0:
            return i + 1
    raise ValueError("a bracket that stays open")


def parts(text):
    """Split at commas outside brackets."""
    found, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            found.append(text[begin:i])
            begin = i + 1
    return found + [text[begin:]]


def named(text):
    """Every cuda_run(device, what, kernel, ...) tells the kernel's name."""
    at = 0
    while (at := text.find("cuda_run(", at)) >= 0:
        call = at + len("cuda_run")
        last = closing(text, call, "(", ")")
        given = parts(text[call + 1 : last - 1])
        while given[2].count("<") != given[2].count(">"):
            given[2:4] = [given[2] + "," + given[3]]
        kernel = " ".join(given[2].split())
        given[2] = f'emulate::named({given[2]}, "{kernel}")'
        text = text[: call + 1] + ",".join(given) + text[last - 1 :]
        at = call
    return text


def translate(text):
    text = named(text)
    text = EXTERN.sub(lambda m: f"{m[1]} *{m[2]} = static_cast<{m[1]} *>(emulate::shared());", text)
    while (at := text.find("<<<")) >= 0:
        name = NAME.search(text, 0, at)
        if not name:
            raise ValueError(f"no kernel before {text[at:at + 60]!r}")
        end = text.index(">>>", at)
        config = parts(text[at + 3 : end])
        if not 2 <= len(config) <= 4:
            raise ValueError(f"a launch with {len(config)} parts")
        config += ["0", "NULL"][len(config) - 2 :]
        call = text.index("(", end)
        last = closing(text, call, "(", ")")
        kernel, arguments = name[0].strip(), text[call + 1 : last - 1]
        lines = text.count("\n", name.start(), at)  # between the name and the brackets
        text = (
            text[: name.start()]
            + f'emulate::launch({kernel}, "{kernel}", '
            + ",".join(config)
            + "\n" * (lines - kernel.count("\n"))
            + (", " + arguments if arguments.strip() else "")
            + ")"
            + text[last:]
        )
    return text


def main():
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        text = file.read()
    with open(target, "w", encoding="utf-8") as file:
        file.write(f'#line 1 "{source}"\n' + translate(text))


if __name__ == "__main__":
    main()
