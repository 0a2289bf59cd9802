#!/usr/bin/env python3
"""What the trained model can do, measured.

    evaluate.py MODEL_DIR DATA OUT.json [--params CHECKPOINT] [--device cuda] [--rows N] [--probes N] [--batch N]
    evaluate.py MODEL_DIR DATA OUT.json --blind N          what copying is worth if not the indexer chooses

Bits per byte on held-out text (exact arithmetic, served arithmetic), the indexer's recall of the true top-k, copy accuracy at several distances with
the choice of entries on and off, and how often the MTP block's guess is the main model's next token.  With --params the exact figures are also taken
on the weights before they were quantised for the checkpoint.
"""
import argparse
import dataclasses
import json
import math
import sys
import time

import numpy as np
import torch

import export
from model import EXACT, SERVED

COPIES = ('copy_note', 'copy', 'copy_text')
T = 2304                        # row length for bits per byte; --length changes it


def byte_lengths(tokenizer):
    vocab = json.load(open(tokenizer))
    n = {i: len(t) for t, i in vocab['model']['vocab'].items()}
    n.update({a['id']: len(a['content'].encode()) for a in vocab['added_tokens']})
    return torch.tensor([n[i] for i in range(len(n))], dtype=torch.float64)


def windows(ids, most):
    """rows of BOS + T - 1 tokens, spread over the text, padded at the end; and how many tokens of each count"""
    n = T - 1
    k = max(1, len(ids) // n)
    pick = np.unique(np.linspace(0, k - 1, min(k, most)).astype(int))
    out, real = [], []
    for i in pick:
        a = ids[i * n:(i + 1) * n].astype(np.int64)
        out.append(np.concatenate([[0], a, np.full(n - len(a), 2)]))
        real.append(len(a))
    return torch.from_numpy(np.stack(out)), real


@torch.no_grad()
def bits(m, sets, lengths, mode, most):
    """per set: bits per byte, and MTP agreement over all sets"""
    out, same, total, all_bits, all_bytes = {}, 0, 0, 0.0, 0.0
    for name, ids in sets.items():
        rows, real = windows(ids, most)
        b = by = 0.0
        for row, n in zip(rows, real):
            row = row[None].to(m.device)
            X = m.streams(row, mode)
            z = m.logits(m.hidden(X, mode), mode)
            nll = torch.logsumexp(z[:n], -1) - z[torch.arange(n), row[0, 1:n + 1]]
            b += float(nll.double().sum()) / math.log(2)
            by += float(lengths[row[0, 1:n + 1].cpu()].sum())
            z2 = m.logits(m.mtp_hidden(X, torch.roll(row, -1, 1), 1, T, mode), mode)
            same += int((z2[:n - 1].argmax(-1) == z[1:n].argmax(-1)).sum())
            total += n - 1
        out[name] = b / by
        all_bits, all_bytes = all_bits + b, all_bytes + by
    out['all'] = all_bits / all_bytes
    return out, same / total


@torch.no_grad()
def recall(m, sets, mode, most):
    """share of the index_topk entries with most attention that the indexer also chose, and the share of attention on compressed entries it kept"""
    k, got = m.c['index_topk'], {}
    long = np.concatenate([v for v in sets.values()])
    n = 4608
    for i in range(most):
        at = (len(long) - n) * i // most
        row = torch.from_numpy(np.concatenate([[0], long[at:at + n - 1]]).astype(np.int64))[None].to(m.device)
        m.keep_scores = []
        m.streams(row, mode)
        for layer, (sc, C, vis) in enumerate(m.keep_scores):
            C = (C.float() * m.c['head_dim'] ** -0.5).masked_fill(~vis[:, :, None], float('-inf'))
            p = torch.softmax(C[:, 2 * 4 * k:], -1).sum(2)              # queries with at least twice as many entries as are chosen
            p = p / p.sum(-1, keepdim=True)
            best = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.topk(k, -1)[1], True)
            mine = m.choose(sc[:, 2 * 4 * k:], vis[:, 2 * 4 * k:])
            r = got.setdefault(layer, [[], [], []])
            r[0].append(float((best & mine).sum() / best.sum()))
            r[1].append(float((p * mine).sum(-1).mean()))
            r[2].append(float((p * best).sum(-1).mean()))
        m.keep_scores = None
    return {f'layer {i}': dict(recall=float(np.mean(r[0])), attention_kept=float(np.mean(r[1])), best_possible=float(np.mean(r[2]))) for i, r in zip((2, 4), got.values())}


@torch.no_grad()
def answers(m, rows, mode, batch):
    """per probe (prompt, answer): for each token of the answer, EOS included, whether it is the greedy choice after the right answer so far"""
    out = []
    for at in range(0, len(rows), batch):
        some = rows[at:at + batch]
        n = -(-max(len(p) + len(a) for p, a in some) // 128) * 128
        ids = torch.full((len(some), n), 2, dtype=torch.int64)
        for i, (p, a) in enumerate(some):
            ids[i, :len(p) + len(a)] = torch.tensor(p + a)
        X = m.streams(ids.to(m.device), mode).unflatten(0, ids.shape)
        for i, (p, a) in enumerate(some):
            z = m.logits(m.hidden(X[i, len(p) - 1:len(p) + len(a) - 1], mode), mode)
            out.append((z.argmax(-1).cpu() == torch.tensor(a)).tolist())
    return out


def copying(m, probes, mode, most, batch):
    """per distance: share of answers that are right to the end, share of tokens"""
    out = {}
    for dist, rows in probes.items():
        right = answers(m, rows[:most], mode, batch)
        out[dist] = dict(prompts=len(right), whole=sum(map(all, right)), tokens=round(sum(map(sum, right)) / sum(map(len, right)), 4))
    return out


BLIND = {'the lowest scores': lambda sc: -sc, 'by lot': lambda sc: torch.rand(sc.shape, generator=torch.Generator().manual_seed(1)).to(sc), 'none': None}


def blind(m, probes, most, batch):
    """copying from 2,000 tokens back where the entries are chosen otherwise than by the indexer's highest scores"""
    right, out = m.choose, {}
    for name, scores in BLIND.items():
        m.choose = lambda sc, vis: right(scores(sc), vis) if scores else torch.zeros_like(vis.expand(sc.shape))
        out[name] = {kind: copying(m, {'2000': probes[kind]['2000']}, SERVED, most, batch)['2000'] for kind in COPIES}
    m.choose = right
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument('model')
    p.add_argument('data')
    p.add_argument('out')
    p.add_argument('--params')
    p.add_argument('--device', default='cuda')
    p.add_argument('--rows', type=int, default=6)
    p.add_argument('--probes', type=int, default=64)
    p.add_argument('--length', type=int, default=T)
    p.add_argument('--batch', type=int, default=8, help='copy probes at once')
    p.add_argument('--recall', type=int, default=8)
    p.add_argument('--blind', type=int, default=0)
    a = p.parse_args()
    globals()['T'] = a.length
    begin = time.time()
    m = export.load(a.model, a.device)
    sets = dict(np.load(f'{a.data}/heldout.npz'))
    probes = json.load(open(f'{a.data}/probes.json'))
    lengths = byte_lengths(f'{a.data}/tokenizer.json')
    res = {}

    def put(name, value):
        res[name] = value
        print(f'{time.time() - begin:6.1f}', name, json.dumps(value), file=sys.stderr, flush=True)
        json.dump(res, open(a.out, 'w'), indent=1)
    dense = lambda x: dataclasses.replace(x, topk=False)
    if a.blind:
        return put('copying from 2,000 tokens back, served, other entries', blind(m, probes, a.blind, a.batch))
    for kind in COPIES:
        put(f'{kind}, served, top-k on', copying(m, probes[kind], SERVED, a.probes, a.batch))
    b, acc = bits(m, sets, lengths, SERVED, a.rows)
    put('bits per byte, served', b)
    put('mtp acceptance, served', acc)
    put('bits per byte, checkpoint in exact arithmetic', bits(m, sets, lengths, EXACT, a.rows)[0])
    for kind in COPIES:
        put(f'{kind}, served, top-k off', copying(m, probes[kind], dense(SERVED), a.probes, a.batch))
    put('index recall, served', recall(m, sets, dense(SERVED), a.recall))
    if a.params:
        for k, w in torch.load(a.params, map_location=a.device)['params'].items():
            m.p[k].copy_(w)
        b, acc = bits(m, sets, lengths, EXACT, a.rows)
        put('bits per byte, fp32 weights', b)
        put('mtp acceptance, fp32 weights', acc)


if __name__ == '__main__':
    main()
