"""The tokenizer for generated English (ASCII text without special tokens), from tokenizer.json alone: rows are made on machines that have no tokenizer library.
selftest.py and prepare.py compare it with the library."""
import json
import re

WORDS = re.compile(r'''[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n!-/:-@\[-`{-~A-Za-z]?[A-Za-z]+| ?[!-/:-@\[-`{-~]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+''')
DIGITS = re.compile(r'[0-9]{1,3}|[^0-9]+')
SHOWN = {' ': 'Ġ', '\n': 'Ċ', '\t': 'ĉ', '\r': 'č'}


class Encoder:
    def __init__(s, path):
        j = json.load(open(path))
        s.vocab = dict(j['model']['vocab'])
        s.special = {a['content']: a['id'] for a in j['added_tokens']}
        s.rank = {tuple(m) if isinstance(m, list) else tuple(m.split(' ')): i for i, m in enumerate(j['model']['merges'])}
        s.known = {}

    def word(s, w):
        parts = [SHOWN.get(c, c) for c in w]
        while len(parts) > 1:
            best, at = min((s.rank.get((a, b), 1 << 30), i) for i, (a, b) in enumerate(zip(parts, parts[1:])))
            if best == 1 << 30:
                break
            pair = parts[at], parts[at + 1]
            out, i = [], 0
            while i < len(parts):                          # every place of that pair, from the left
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
                    out.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    out.append(parts[i])
                    i += 1
            parts = out
        return [s.vocab[p] for p in parts]

    def __call__(s, text):
        out = []
        for piece in DIGITS.findall(text):
            for w in [piece] if piece[0].isdigit() else WORDS.findall(piece):
                ids = s.known.get(w)
                if ids is None:
                    ids = s.known[w] = s.word(w)
                out += ids
        return out
