"""Training rows from what prepare.py wrote: row n of step k depends on the seed, k and n only, so a resumed run sees the same data."""
import json
import lzma

import numpy as np

# share of each kind of row, by row length.  An answer that copies is some 60 tokens of a document of thousands; rows of kind "twice" are made here, of
# text that comes again far behind, so that in half of their tokens the indexer and the copying are what is learned.
MIX = {1152: dict(text=.46, chat=.25, near=.13, echo=.06, twice=.10), 2304: dict(text=.41, chat=.22, near=.08, mid=.13, echo=.04, twice=.12),
       4608: dict(text=.34, chat=.22, near=.04, mid=.06, far=.18, echo=.02, twice=.14)}
SETTLE = dict(text=.44, chat=.20, near=.03, mid=.04, far=.16, echo=.01, twice=.12)
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

    def slice(s, rng, n):
        """n tokens of running text, from the start of a line"""
        a, starts, _ = s.text[rng.choice(len(s.text), p=s.weights)]
        k = np.searchsorted(starts, len(a) - n)
        at = starts[rng.integers(k)] if k else 0
        return a[at:at + n]

    def twice(s, rng, n):
        """text, a passage, text, the passage again.  Every other passage is of scraps of 2 to 11 tokens, which nothing but copying foretells: their
        first showing is not in the loss."""
        most = (n - 1) // 2
        size = int(24 * (most / 24) ** rng.random())
        before = int(rng.integers(n - 2 * size)) if rng.random() < .5 else 0
        if rng.random() < .5:
            first = again = s.slice(rng, size)
        else:
            a = s.slice(rng, 4 * size)
            at = rng.integers(0, max(1, len(a) - 11), size)
            again = np.concatenate([a[i:i + k] for i, k in zip(at, rng.integers(2, 12, size))])[:size] & 0x7fff
            first = again | NO_LOSS
        rest = n - 1 - before - len(first) - len(again)
        return np.concatenate([np.array([NO_LOSS], np.uint16), s.slice(rng, before), first, s.slice(rng, rest), again])

    def row(s, rng, kind, n):
        if kind == 'text':
            return np.concatenate([np.array([NO_LOSS], np.uint16), s.slice(rng, n - 1)])
        if kind == 'twice':
            return s.twice(rng, n)
        a, starts = s.docs[kind]
        k = np.searchsorted(starts, len(a) - n)
        at = starts[rng.integers(max(k, 1))]
        return a[at:at + n]

    def batch(s, step, rows, T, mix=None):
        """ids [rows, T + 2] int64 and learn [rows, T + 2] float32"""
        rng = np.random.default_rng((s.seed, step))
        kinds, p = zip(*(mix or MIX[T]).items())
        out = np.zeros((rows, T + 2), np.uint16)
        want = np.concatenate([np.full(int(round(q * rows)), i) for i, q in enumerate(p)])[:rows]
        want = np.concatenate([want, np.zeros(rows - len(want), int)]).astype(int)
        for i, k in enumerate(want):
            r = s.row(rng, kinds[k], T + 2)
            out[i, :len(r)] = r
            out[i, len(r):] = NO_LOSS | 2
        return (out & 0x7fff).astype(np.int64), (out < NO_LOSS).astype(np.float32)
