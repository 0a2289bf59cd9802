"""Training rows from what prepare.py wrote: row n of step k depends on the seed, k and n only, so a resumed run sees the same data.

Kinds: "text" (prose from the start of a line) and the documents of prepare.py are cut out of the token file; two kinds are made here, so that nothing in them is
seen twice:
    drill   passages of words, scraps of text or any tokens at all, then the same passages again: what can only be copied, and nothing else is learned
    notes   a chat: notes for people among running text, then requests to repeat some of them, word for word
Running text between notes is not in the loss: it is read often, and would be known by heart.
"""
import concurrent.futures
import json
import lzma
import multiprocessing
import random

import numpy as np

from bpe import Encoder
from stories import NAMES, note

# share of each kind of row, by part of the plan
MIX = {'first': dict(text=.12, chat=.18, near=.03, drill=.40, notes=.27),
       'short': dict(text=.11, chat=.20, near=.05, drill=.22, notes=.42),
       'middle': dict(text=.11, chat=.19, near=.04, mid=.07, drill=.15, notes=.44),
       'long': dict(text=.12, chat=.19, mid=.05, far=.09, drill=.11, notes=.44)}
NO_LOSS, HEAVY, ID = 0x8000, 0x4000, 0x0fff          # bits of a token: not in the loss; counts double
OPENERS = ('Read this text.', 'Read this text.', 'Here is a text.', 'Please read this carefully.', 'Text:', 'Here are some notes.')
SYSTEMS = ('You are a helpful assistant.', 'You are baton-tiny, a small language model.', 'Answer briefly.')
ASKS = ('Repeat the note for {}.', 'Repeat the note for {}.', 'Copy the note for {} word for word.', 'What does the note for {} say?')


class Rows:
    def __init__(s, data, seed):
        s.seed, s.meta = seed, json.load(open(f'{data}/meta.json'))
        with lzma.open(f'{data}/tokens.xz') as f:
            s.tokens = np.frombuffer(f.read(), '<u2')
        s.encode = Encoder(f'{data}/tokenizer.json')
        ends = np.zeros(s.meta['vocab'], bool)
        for t, i in s.encode.vocab.items():
            ends[i] = t.endswith('Ċ')
        s.text, s.docs, s.blank = [], {}, s.encode('\n\n')
        for g in s.meta['groups']:
            a = s.tokens[g['offset']:g['offset'] + g['length']]
            if g['kind'] == 'text':
                s.text.append((a, np.flatnonzero(ends[a]) + 1, g['weight']))
            elif g['kind'] == 'pairs':                  # BOS, a paragraph with the blank line after it, BOS, the paragraph alone
                s.pairs = a, np.flatnonzero(a == 0)
            else:
                s.docs[g['name']] = a, np.flatnonzero((a & ID) == 0)
        w = np.array([t[2] for t in s.text], float)
        s.weights = w / w.sum()

    def slice(s, rng, n):
        """n tokens of running text, from the start of a line"""
        a, starts, _ = s.text[rng.choice(len(s.text), p=s.weights)]
        k = np.searchsorted(starts, len(a) - n)
        at = starts[rng.integers(k)] if k else 0
        return a[at:at + n]

    def fill(s, rng, n):
        """n tokens that are not learned, ending in a blank line"""
        return [t | NO_LOSS for t in s.slice(rng, n - len(s.blank)).tolist() + s.blank] if n > len(s.blank) else [t | NO_LOSS for t in s.blank[:n]]

    def scraps(s, rng, n):
        """n tokens: words at random, pieces of 2 to 11 tokens from all over a text, or any tokens at all"""
        k = rng.random()
        if k < .35:
            words = s.meta['words']
            return s.encode(' '.join(words[i] for i in rng.integers(len(words), size=n)))[:n]
        if k < .7:
            a = s.slice(rng, 4 * n)
            at = rng.integers(0, max(1, len(a) - 11), n)
            return np.concatenate([a[i:i + k] for i, k in zip(at, rng.integers(2, 12, n))])[:n].tolist()
        return rng.integers(3, s.meta['vocab'] - 16, n).tolist()

    def drill(s, rng, n):
        room, parts = (n - 1) // 2, []
        while room > 20:
            size = min(room, int(24 * (room / 24) ** rng.random()) + 8)
            parts.append(s.scraps(rng, size - len(s.blank)))
            room -= size
        order = np.arange(len(parts)) if rng.random() < .5 else rng.permutation(len(parts))
        out = [NO_LOSS]
        for p in parts:
            out += [t | NO_LOSS for t in p + s.blank]
        for i in order:
            p = parts[i]
            out += [t | NO_LOSS for t in p[:2]] + p[2:] + [t | NO_LOSS for t in s.blank]
        return np.array(out, np.uint16)

    def passage(s, rng, r):
        """(ids, ids with the blank line after it)"""
        k = r.random()
        if k < .75:
            t = note(r) if k < .45 else ' '.join(r.choice(s.meta['words']) for _ in range(r.randint(12, 40)))
            return s.encode(t), s.encode(t + '\n\n')
        a, starts = s.pairs
        i = int(rng.integers(len(starts) // 2 - 1)) * 2
        return a[starts[i + 1] + 1:starts[i + 2]].tolist(), a[starts[i] + 1:starts[i + 1]].tolist()

    def notes(s, rng, n):
        r, e, sp = random.Random(int(rng.integers(1 << 62))), s.encode, s.encode.special
        head = [0] + (e(r.choice(SYSTEMS)) if r.random() < .3 else []) + [sp['<｜User｜>']] + e(r.choice(OPENERS) + '\n\n')
        dense = r.random() < .7
        room = n - len(head) - 40
        if dense:
            room -= int(r.random() * .3 * n)
        told, asks = [], []
        for w in r.sample(NAMES, r.randint(8, len(NAMES)) if dense else r.randint(1, 4)):
            alone, closed = s.passage(rng, r)
            tell, ask = e(f'Note for {w}:\n') + closed, e(r.choice(ASKS).format(w))
            if r.random() < .15 and asks:
                ask = None                                  # never asked for
            cost = len(tell) + (len(ask) + len(alone) + 4 if ask else 0)
            if cost > room:
                break
            room -= cost
            told.append(tell)
            if ask:
                asks.append((ask, alone, w))
        if r.random() < .6:
            r.shuffle(asks)
        think = r.random() < .15
        tail = []
        for i, (ask, answer, w) in enumerate(asks):
            turn = ([sp['<｜User｜>']] if i else []) + ask + [sp['<｜Assistant｜>']]
            if think and i == len(asks) - 1:
                tail += [t | NO_LOSS for t in turn + [sp['<think>']]] + e(f'I look for the note for {w} and copy it.') + [sp['</think>']]
            else:
                tail += [t | NO_LOSS for t in turn + [sp['</think>']]]
            tail += [t | HEAVY for t in answer + [1]]
        gap = n - len(head) - len(tail) - sum(map(len, told))
        share = np.array([rng.exponential() for _ in range(len(told) + 1)])
        if not dense and r.random() < .75:
            share[-1] += 4 * share.sum()                    # most of the text comes after the last note
        cuts = (share / share.sum() * max(gap, 0)).astype(int)
        out = [t | NO_LOSS for t in head]
        for t, k in zip(told, cuts):
            out += s.fill(rng, int(k)) + [x | NO_LOSS for x in t]
        out += s.fill(rng, max(0, n - len(out) - len(tail))) + tail
        return np.array(out[:n], np.uint16)

    def row(s, rng, kind, n):
        if kind == 'text':
            return np.concatenate([np.array([NO_LOSS], np.uint16), s.slice(rng, n - 1)])
        if kind in ('drill', 'notes'):
            return getattr(s, kind)(rng, n)
        a, starts = s.docs[kind]
        k = np.searchsorted(starts, len(a) - n)
        at = starts[rng.integers(max(k, 1))]
        return a[at:at + n]

    def batch(s, step, rows, T, mix):
        """tokens [rows, T + 2] uint16 with their bits; split() takes them apart"""
        rng = np.random.default_rng((s.seed, step))
        kinds, p = zip(*MIX[mix].items())
        c = np.cumsum(p)
        want = np.searchsorted(c / c[-1], (np.arange(rows) + rng.random()) / rows)      # each kind its share, what is left over by lot
        out = np.full((rows, T + 2), NO_LOSS | 2, np.uint16)
        for i, k in enumerate(want):
            r = s.row(rng, kinds[min(k, len(kinds) - 1)], T + 2)
            out[i, :len(r)] = r
        return out


def split(out):
    """ids int64 and weights in the loss float32"""
    return (out & ID).astype(np.int64), np.where(out & NO_LOSS, 0, np.where(out & HEAVY, 2, 1)).astype(np.float32)


class Feeder:
    """Makes batches ahead in worker processes.  They are forked: make it before the GPU is touched."""
    made = None

    def __init__(s, rows, workers):
        Feeder.made, s.coming = rows, {}
        s.pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context('fork')) if workers else None
        if workers:
            for f in [s.pool.submit(Feeder.one, 0, 1, 1152, 'first') for _ in range(2 * workers)]:
                f.result()

    @staticmethod
    def one(*what):
        return Feeder.made.batch(*what)

    def ahead(s, what):
        """what: (step, rows, T, mix) that will be asked for"""
        if s.pool and what not in s.coming:
            s.coming[what] = s.pool.submit(Feeder.one, *what)

    def get(s, what):
        f = s.coming.pop(what, None)
        return f.result() if f else Feeder.made.batch(*what)

    def close(s):
        if s.pool:
            s.pool.shutdown(cancel_futures=True)
