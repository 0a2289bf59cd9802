"""Training rows from what prepare.py wrote: row n of step k depends on the seed, k and n only, so a resumed run sees the same data."""
import json
import lzma

import numpy as np

# share of each kind of row, by row length
MIX = {1152: dict(text=.50, chat=.25, near=.15, echo=.10), 2304: dict(text=.45, chat=.22, near=.10, mid=.17, echo=.06), 4608: dict(text=.40, chat=.22, near=.05, mid=.08, far=.22, echo=.03)}
NO_LOSS = 0x8000


class Rows:
    def __init__(s, data, seed):
        s.seed, s.meta = seed, json.load(open(f'{data}/meta.json'))
        with lzma.open(f'{data}/tokens.xz') as f:
            s.tokens = np.frombuffer(f.read(), '<u2')
        vocab = json.load(open(f'{data}/tokenizer.json'))['model']['vocab']
        ends = np.zeros(s.meta['vocab'], bool)
        for t, i in vocab.items():
            ends[i] = t.endswith('Ċ')
        s.text, s.docs = [], {}
        for g in s.meta['groups']:
            a = s.tokens[g['offset']:g['offset'] + g['length']]
            if g['kind'] == 'text':
                s.text.append((a, np.flatnonzero(ends[a]) + 1, g['weight']))
            else:
                s.docs[g['name']] = a, np.flatnonzero((a & 0x7fff) == 0)
        w = np.array([t[2] for t in s.text], float)
        s.weights = w / w.sum()

    def row(s, rng, kind, n):
        if kind == 'text':
            a, starts, _ = s.text[rng.choice(len(s.text), p=s.weights)]
            k = np.searchsorted(starts, len(a) - n)
            at = starts[rng.integers(k)] if k else 0
            return np.concatenate([np.array([NO_LOSS], np.uint16), a[at:at + n - 1]])
        a, starts = s.docs[kind]
        k = np.searchsorted(starts, len(a) - n)
        at = starts[rng.integers(max(k, 1))]
        return a[at:at + n]

    def batch(s, step, rows, T):
        """ids [rows, T + 2] int64 and learn [rows, T + 2] float32"""
        rng = np.random.default_rng((s.seed, step))
        kinds, p = zip(*MIX[T].items())
        out = np.zeros((rows, T + 2), np.uint16)
        want = np.concatenate([np.full(int(round(q * rows)), i) for i, q in enumerate(p)])[:rows]
        want = np.concatenate([want, np.zeros(rows - len(want), int)]).astype(int)
        for i, k in enumerate(want):
            r = s.row(rng, kinds[k], T + 2)
            out[i, :len(r)] = r
            out[i, len(r):] = NO_LOSS | 2
        return (out & 0x7fff).astype(np.int64), (out < NO_LOSS).astype(np.float32)
