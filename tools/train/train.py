#!/usr/bin/env python3
"""Train the bundled model on one GPU, in runs that resume.

    train.py DATA STATE [--seconds S] [--steps N] [--tokens N] [--out DIR]

DATA is what prepare.py wrote.  STATE is the checkpoint file: read if it is there, written every two minutes and at the end.  The run is over after S seconds,
whatever the machine's speed: how far the plan has come, x from 0 to 1, moves by the time that a step takes.  With --steps it moves by 1/N a step and S
only interrupts: call the same line again to go on.  Either way x is a function of the step by a table in STATE, so what was made before an interruption is the
same as without it.  DIR gets the loss curve (log.json, one entry every 20 steps).

The plan: rows of 1,152 tokens, then 2,304 from 40 %, then 4,608 from 70 %; the indexer learns from 5 %, chooses from 50 %; quantisers from 70 %; the step
size falls linearly from 50 % on.
"""
import argparse
import json
import os
import sys
import time

import torch

import evaluate
from model import CONFIG, Mode, Model, piece
from muon import Optimiser
from rows import Feeder, Rows, split

SEED = 20261130


BLOCK = 20                      # steps between two entries of the log and of the pace


def plan(x):
    """what is on at part x of the run"""
    return dict(T=1152 if x < .40 else 2304 if x < .70 else 4608, mix='first' if x < .08 else 'short' if x < .40 else 'middle' if x < .70 else 'long', index=x >= .05, topk=x >= .50, quant=x >= .70,
                lr=min(1.0, max(.01, (1 - x) / .5)), mtp=.3 if x < .5 else .1, move_bias=x < .9)


class Pace:
    """x of each step.  table: [first step of a block, x there, growth a step]; a block's entry is made one block before it begins, so that its rows can be made ahead."""
    def __init__(s, table):
        s.table = table

    def x(s, step):
        b = next(e for e in reversed(s.table) if e[0] <= step)
        return min(1.0, b[1] + (step - b[0]) * b[2])

    def known(s):
        return s.table[-1][0] + BLOCK if s.table else 0

    def grow(s, by):
        at = s.known()
        x = s.x(at) if s.table else 0.0
        s.table.append([at, x, by(x)])


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


def save(path, m, opt, step, log, pace):
    torch.save({'params': {k: w.detach() for k, w in m.p.items()}, 'opt': opt.state(), 'step': step, 'log': log, 'pace': pace.table, 'config': m.c, 'tid2eid': m.tid2eid}, path + '.new')
    os.replace(path + '.new', path)


@torch.no_grad()
def restore(path, m, opt):
    """Into a fresh model and optimiser, in place: the optimiser holds the same tensors.  Returns (step, log, pace)."""
    st = torch.load(path, map_location=m.device)
    for k, w in st['params'].items():
        m.p[k].copy_(w)
    opt.restore(st['opt'])
    return st['step'], st['log'], Pace(st['pace'])


def main():
    p = argparse.ArgumentParser()
    p.add_argument('data')
    p.add_argument('state')
    p.add_argument('--steps', type=int, help='steps in all; without it the plan ends with --seconds')
    p.add_argument('--seconds', type=float, default=1000)
    p.add_argument('--since', type=float, help='time.time() at which the seconds began (default: now)')
    p.add_argument('--tokens', type=int, default=64512, help='tokens a step; a multiple of 4,608')
    p.add_argument('--out', default='.')
    p.add_argument('--device', default='cuda')
    p.add_argument('--workers', type=int, default=8, help='processes that make rows ahead')
    p.add_argument('--eager', action='store_true', help='do not compile')
    p.add_argument('--checks', type=int, default=16, help='passages of each kind that are asked for every minute; 0: none')
    p.add_argument('--probe', help='time this many steps at every stage of the plan and stop')
    a = p.parse_args()
    begin = a.since or time.time()
    left = lambda: a.seconds - (time.time() - begin)
    say = lambda *x: print(f'{time.time() - begin:6.1f}', *x, file=sys.stderr, flush=True)
    os.makedirs(a.out, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    rows = Rows(a.data, SEED)
    feeder = Feeder(rows, a.workers)
    probes = json.load(open(f'{a.data}/probes.json'))
    say(f'{len(rows.tokens):,} tokens')
    m = Model(CONFIG, a.device).init(SEED)
    m.set_hash(rows.meta['unigram'])
    opt = Optimiser(m.p, m.c)
    step, log, pace = restore(a.state, m, opt) if os.path.exists(a.state) else (0, [], Pace([]))
    if step:
        say(f'resumed at step {step}')
    learnable(m)
    half = a.device != 'cpu'

    def batch(step, x):
        pl = plan(x)
        return step, max(1, a.tokens // pl['T']), pl['T'], pl['mix']

    def one(step, x):
        pl = plan(x)
        mode = Mode(half=half, quant=pl['quant'], topk=pl['topk'], compiled=not a.eager)
        ids, learn = (torch.from_numpy(t).to(a.device, non_blocking=True) for t in split(feeder.get(batch(step, x))))
        loss, parts = losses(m, ids, learn, mode, step, pl)
        loss.backward()
        opt.step(pl['lr'] * min(1.0, (step + 1) / 100))
        if pl['move_bias']:
            with torch.no_grad():
                for k, load in m.loads.items():
                    m.p[k] += 0.001 * torch.sign(load.mean() - load)
        return pl, parts

    def check(pl):
        """copying, by teacher forcing, in the arithmetic of the training"""
        mode = Mode(half=half, quant=pl['quant'], topk=pl['topk'])
        for kind in ('copy', 'copy_text', 'copy_note'):
            for dist in ('500', '2000'):
                right = evaluate.answers(m, probes[kind][dist][:a.checks], mode, 8)
                yield f'{kind} {dist}: {sum(map(sum, right)) / sum(map(len, right)):.4f} a token, {sum(map(all, right))} of {len(right)} whole'

    if a.probe:
        for x in (0.02, 0.2, 0.45, 0.6, 0.8):
            for i in range(2):
                pl, parts = one(i, x)
            say('warm', pl, [round(float(q), 3) for q in parts])
            t = time.time()
            for i in range(int(a.probe)):
                pl, parts = one(i, x)
            v = [round(float(q), 3) for q in parts]
            dt = (time.time() - t) / int(a.probe)
            say(f'{pl}: {dt * 1e3:.1f} ms a step, {a.tokens / dt:,.0f} tokens/s, losses {v}', f'{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB' if half else '')
        feeder.close()
        return

    speeds = [.1 if half else 10.0]
    if a.steps:
        by = lambda x: 1 / a.steps
    else:
        by = lambda x: (1 - x) / max(BLOCK, (left() - 1) / min(speeds[-3:]) - max(0, pace.known() - step))
    at, checked, saved = time.time(), time.time() - 30, time.time()
    while True:
        while pace.known() < step + 2 * BLOCK:
            pace.grow(by)
        if pace.x(step) >= 1 or left() <= 0:
            break
        for i in range(step, min(step + 2 * a.workers, pace.known())):
            feeder.ahead(batch(i, pace.x(i)))
        pl, parts = one(step, pace.x(step))
        step += 1
        if step % BLOCK == 0:
            v = [round(float(q), 4) for q in parts]
            log.append([step] + v + [pl['T'], round(pace.x(step), 5)])
            if v[0] != v[0]:
                say('the loss is not a number any more')
                sys.exit(1)
            speeds.append((time.time() - at) / BLOCK)
            if step % (5 * BLOCK) == 0:
                say(f'step {step} x {pace.x(step):.4f} T {pl["T"]} loss {v[0]:.3f} mtp {v[1]:.3f} index {v[2]:.3f} lr {pl["lr"]:.3f} {speeds[-1] * 1e3:.1f} ms a step')
            if a.checks and time.time() - checked > 60:
                for line in check(pl):
                    say('   ', line)
                checked = time.time()
            if time.time() - saved > 120:
                save(a.state, m, opt, step, log, pace)
                saved = time.time()
            at = time.time()
    save(a.state, m, opt, step, log, pace)
    json.dump({'columns': ['step', 'loss', 'mtp', 'index', 'T', 'x'], 'steps': step, 'tokens_per_step': a.tokens, 'rows': log}, open(f'{a.out}/log.json', 'w'))
    feeder.close()
    say(f'step {step}, x {pace.x(step):.4f}: ' + ('all done' if pace.x(step) >= 1 else 'the time is over, call again to go on'))


if __name__ == '__main__':
    main()
