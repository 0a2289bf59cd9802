#!/usr/bin/env python3
"""Worked cases of the prompt encoding and of completions, each written out by hand from the rules.

usage: check_chat_cases.py CHAT_TOOL ENCODING_JSON CASES_JSON

In the cases {BOS} {EOS} {U} {A} {D} stand for the marks. A case has `render` or `http` (with `prompt`, or with `param` and a
`word` of the error), or `parse` (with `want`), which is tried whole, cut into characters, and in pieces of two to seven.
"""
import json
import subprocess
import sys

MARKS = {'{BOS}': '<｜begin▁of▁sentence｜>', '{EOS}': '<｜end▁of▁sentence｜>', '{U}': '<｜User｜>', '{A}': '<｜Assistant｜>', '{D}': '｜DSML｜'}


def expand(value):
    text = json.dumps(value, ensure_ascii=False)
    for mark, full in MARKS.items():
        text = text.replace(mark, full)
    return json.loads(text)


def main():
    tool, encoding, path = sys.argv[1:]
    lines, checks = [], []
    for case in expand(json.load(open(path, encoding='utf-8'))):
        if 'parse' in case:
            text = case['parse']
            for n in (len(text) or 1, 1, 2, 3, 5, 7):
                lines.append({**case, 'parse': [text[i:i + n] for i in range(0, len(text), n)]})
                checks.append((case, f'pieces of {n}'))
        else:
            lines.append(case)
            checks.append((case, ''))
    data = ''.join(json.dumps(x, ensure_ascii=False) + '\n' for x in lines).encode()
    out = subprocess.run([tool, encoding], input=data, stdout=subprocess.PIPE, check=True).stdout.decode().split('\n')[:-1]
    bad = 0
    for (case, how), line in zip(checks, out, strict=True):
        got = json.loads(line)
        if 'word' in case:
            good = isinstance(got, dict) and got['param'] == case['param'] and case['word'] in got['error']
        else:
            good = got == case.get('prompt', case.get('want'))
        if not good:
            bad += 1
            print(f'{case["name"]} {how}\n  got  {got!r}\n  want {case.get("prompt", case.get("want", case.get("param")))!r}')
    print(f'{len(checks)} checks, {bad} wrong')
    return bad != 0 or not checks


if __name__ == '__main__':
    sys.exit(main())
