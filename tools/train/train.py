#!/usr/bin/env python3
"""Train the bundled model on one GPU, in runs that resume.

    train.py DATA STATE [--settle MODEL_DIR] [--steps N] [--seconds S] [--tokens N] [--out DIR]

DATA is what prepare.py wrote.  STATE is the checkpoint file: read if it is there, written when the time is up and at the end.  A run stops after S
seconds; call the same line again until it says that all N steps are done.  With the same versions of everything and the same seed the same steps are
made, however they are cut into runs.  DIR gets the loss curve (log.json, one entry every 20 steps) and, at the end, params.pt.

The plan, in parts of all steps: rows of 1,152 tokens, then 2,304 from 35 %, then 4,608 from 72 %; the indexer learns from 10 %, chooses from 55 %;
quantisers from 72 %; the step size falls linearly from 50 % on.

With --settle the last part: from the exported MODEL_DIR on, all of that on, rows of 4,608 tokens from other DATA (prepare.py --settle), the step size
falling from a half.
"""
import argparse
import json
import os
import sys
import time

import torch

import export
from model import CONFIG, Mode, Model, piece
from muon import Optimiser
from rows import SETTLE, Rows

SEED = 20261130


def plan(x):
    """what is on at part x of the run"""
    return dict(T=1152 if x < .35 else 2304 if x < .72 else 4608, index=x >= .10, topk=x >= .55, quant=x >= .72, lr=min(1.0, max(0.01, (1 - x) / .5)), mtp=.3 if x < .55 else .1, move_bias=x < .9)


def settle(x):
    return dict(T=4608, index=True, topk=True, quant=True, lr=max(.005, .5 * (1 - x)), mtp=.1, move_bias=False)


def losses(m, ids, learn, mode, step, pl):
    """(loss to minimise, parts for the log)"""
    B, T = ids.shape[0], ids.shape[1] - 2
    m.index_losses.clear()
    m.loads.clear()
    X = m.streams(ids[:, :T], mode, step if pl['index'] else None)
    f = lambda t: t.reshape(-1)
    h = m.hidden(X, mode)
    w1, w2 = f(learn[:, 1:T + 1]), f(learn[:, 2:])
    ce = piece('p_loss', mode)(h, m.p['head.weight'], f(ids[:, 1:T + 1]).contiguous(), w1, mode) / w1.sum().clamp(min=1)
    h2 = m.mtp_hidden(X, ids[:, 1:T + 1].contiguous(), B, T, mode)
    ce2 = piece('p_loss', mode)(h2, m.p['head.weight'], f(ids[:, 2:]).contiguous(), w2, mode) / w2.sum().clamp(min=1)
    loss = ce + pl['mtp'] * ce2
    kl = sum(m.index_losses) if m.index_losses else None
    if kl is not None:
        loss = loss + kl
    return loss, (ce.detach(), ce2.detach(), (kl.detach() / len(m.index_losses)) if kl is not None else torch.zeros_like(ce.detach()))


def learnable(m):
    for k, w in m.p.items():
        w.requires_grad_(not k.endswith('gate.bias'))


def save(path, m, opt, step, log):
    torch.save({'params': {k: w.detach() for k, w in m.p.items()}, 'opt': opt.state(), 'step': step, 'log': log, 'config': m.c, 'tid2eid': m.tid2eid}, path)


@torch.no_grad()
def restore(path, m, opt):
    """Into a fresh model and optimiser, in place: the optimiser holds the same tensors.  Returns (step, log)."""
    st = torch.load(path, map_location=m.device)
    for k, w in st['params'].items():
        m.p[k].copy_(w)
    opt.restore(st['opt'])
    return st['step'], st['log']


def main():
    p = argparse.ArgumentParser()
    p.add_argument('data')
    p.add_argument('state')
    p.add_argument('--settle', metavar='MODEL_DIR')
    p.add_argument('--steps', type=int, default=6000)
    p.add_argument('--seconds', type=float, default=520)
    p.add_argument('--tokens', type=int, default=64512, help='tokens a step; a multiple of 4,608')
    p.add_argument('--out', default='.')
    p.add_argument('--device', default='cuda')
    p.add_argument('--eager', action='store_true', help='do not compile')
    p.add_argument('--probe', help='time this many steps at every stage of the plan and stop')
    a = p.parse_args()
    begin = time.time()
    say = lambda *x: print(f'{time.time() - begin:6.1f}', *x, file=sys.stderr, flush=True)
    os.makedirs(a.out, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    rows = Rows(a.data, SEED)
    say(f'{len(rows.tokens):,} tokens')
    if a.settle:
        m = export.load(a.settle, a.device)
    else:
        m = Model(CONFIG, a.device).init(SEED)
        m.set_hash(rows.meta['unigram'])
    opt = Optimiser(m.p, m.c)
    step, log = restore(a.state, m, opt) if os.path.exists(a.state) else (0, [])
    if step:
        say(f'resumed at step {step}')
    learnable(m)
    half = a.device != 'cpu'

    def one(step, x):
        pl = settle(x) if a.settle else plan(x)
        mode = Mode(half=half, quant=pl['quant'], topk=pl['topk'], compiled=not a.eager)
        ids, learn = rows.batch(step, max(1, a.tokens // pl['T']), pl['T'], SETTLE if a.settle else None)
        ids, learn = (torch.from_numpy(t).to(a.device, non_blocking=True) for t in (ids, learn))
        loss, parts = losses(m, ids, learn, mode, step, pl)
        loss.backward()
        opt.step(pl['lr'] * min(1.0, (step + 1) / 100))
        if pl['move_bias']:
            with torch.no_grad():
                for k, load in m.loads.items():
                    m.p[k] += 0.001 * torch.sign(load.mean() - load)
        return pl, parts

    if a.probe:
        for x in (0.05, 0.2, 0.4, 0.6, 0.8):
            for i in range(2):
                pl, parts = one(i, x)
            say('warm', pl, [round(float(q), 3) for q in parts])
            t = time.time()
            for i in range(int(a.probe)):
                pl, parts = one(i, x)
            v = [round(float(q), 3) for q in parts]
            dt = (time.time() - t) / int(a.probe)
            say(f'T {pl["T"]} topk {pl["topk"]} quant {pl["quant"]}: {dt * 1e3:.1f} ms a step, {a.tokens / dt:,.0f} tokens/s, losses {v}', f'{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB' if half else '')
        return
    t0, s0 = time.time(), step
    while step < a.steps and time.time() - begin < a.seconds:
        pl, parts = one(step, step / a.steps)
        step += 1
        if step % 20 == 0 or step == a.steps:
            v = [round(float(q), 4) for q in parts]
            log.append([step] + v + [pl['T']])
            if v[0] != v[0]:
                say('the loss is not a number any more')
                sys.exit(1)
            if step % 100 == 0:
                say(f'step {step}/{a.steps} T {pl["T"]} loss {v[0]:.3f} mtp {v[1]:.3f} index {v[2]:.3f} lr {pl["lr"]:.3f} {(step - s0) * a.tokens / (time.time() - t0):,.0f} tokens/s')
    save(a.state, m, opt, step, log)
    json.dump({'columns': ['step', 'loss', 'mtp', 'index', 'T'], 'steps': a.steps, 'tokens_per_step': a.tokens, 'rows': log}, open(f'{a.out}/log.json', 'w'))
    say(f'step {step} of {a.steps}: ' + ('all done' if step >= a.steps else 'call again to go on'))


if __name__ == '__main__':
    main()
