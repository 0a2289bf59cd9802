#!/usr/bin/env python3
"""Checks of the recipe that need no GPU and no data: selftest.py (a minute or two on two idle cores; exit status 0 or 1)

quantisers against their definitions, the Sinkhorn backward pass against autograd, the pace of a run, the small encoder against the library, export and load, and a
resumed run against an uninterrupted one."""
import os
import random
import sys
import tempfile

import torch

import export
import quant
import sinkhorn
import stories
import train
from bpe import SHOWN, Encoder
from model import CONFIG, EXACT, SERVED, Mode, Model
from muon import Optimiser


def check(what, ok):
    print('ok  ' if ok else 'FAIL', what)
    return ok


def quantisers():
    v = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5, 6, -.25])
    good = check('E2M1 ties go to the even code', quant.e2m1(v).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0])
    x = torch.randn(64, 448) * torch.exp2(torch.randint(-12, 12, (64, 448)).float())
    y = quant.s8(x, 64)
    s = torch.exp2(torch.ceil(torch.log2(x.double().unflatten(-1, (-1, 64)).abs().amax(-1, keepdim=True) / 448)))
    z = y.double().unflatten(-1, (-1, 64)) / s
    good &= check('S8 uses the smallest power of two that fits', bool((z.abs() <= 448).all() and (z.abs().amax(-1) > 216).all()))
    good &= check('S8 rounds to the nearest E4M3', bool(((x.unflatten(-1, (-1, 64)) / s - z).abs() <= torch.clamp(z.abs() * 2 ** -4 * 1.01, min=2 ** -10)).all()))
    for f in (quant.fp8, quant.mx4):
        w = torch.randn(256, 128)
        good &= check(f'{f.__name__} of its own result changes nothing', torch.equal(f(f(w)), f(w)))
    return good


def mixing():
    L = torch.randn(100, 4, 4).requires_grad_()
    C = sinkhorn.plain(L, 20, 1e-6)
    good = check('rows and columns sum to one', bool((C.sum(1) - 1).abs().max() < 1e-5 and (C.sum(2) - 1).abs().max() < 1e-2))
    if os.environ.get('TRITON_INTERPRET') == '1' and sinkhorn.Fused is not None:
        G = torch.randn(100, 4, 4)
        C.backward(G)
        want, L.grad = L.grad, None
        sinkhorn.Fused.apply(L, 20, 1e-6).backward(G)
        good &= check('the kernel gives the gradient of the plain form', bool((want - L.grad).abs().max() < 1e-5))
    return good


def round_trip(data):
    m = export.randomise(Model(CONFIG), 3)
    with tempfile.TemporaryDirectory() as d:
        export.write(m, data, d)
        back = export.load(d)
    ids = torch.randint(0, 2560, (130,), generator=torch.Generator().manual_seed(1)).tolist()
    a, b = m.run(ids, Mode(quant=True, rounded=True)), back.run(ids, SERVED)
    good = check('the loaded checkpoint is what the quantisers said', torch.equal(a, b))
    one = back.run(ids[:50], EXACT)
    return good & check('nothing looks ahead', bool((back.run(ids, EXACT)[:50] - one).abs().max() < 1e-4))


def resume():
    pl = dict(index=True, topk=True, mtp=.3)

    def steps(m, opt, a, b):
        for i in range(a, b):
            g = torch.Generator().manual_seed(i)
            loss, _ = train.losses(m, torch.randint(0, 2560, (1, 130), generator=g), torch.ones(1, 130), Mode(), i, pl)
            loss.backward()
            opt.step(1.0)

    def fresh():
        m = Model(CONFIG).init(7)
        m.set_hash([1] * 2560)
        return m, Optimiser(m.p, m.c)
    m, opt = fresh()
    train.learnable(m)
    steps(m, opt, 0, 1)
    with tempfile.TemporaryDirectory() as d:
        train.save(f'{d}/state', m, opt, 1, [], train.Pace([[0, 0.0, .01]]))
        n, opt2 = fresh()
        at, _, pace = train.restore(f'{d}/state', n, opt2)
    train.learnable(n)
    steps(m, opt, 1, 2)
    steps(n, opt2, at, 2)
    return check('a resumed run makes the same steps', pace.x(7) == .07 and all(torch.equal(m.p[k], n.p[k]) for k in m.p))


def paced():
    left, pace = [90.0], train.Pace([])
    step = 0
    while True:                                             # a machine that becomes slower on the way: the plan still ends with the time
        while pace.known() < step + 2 * train.BLOCK:
            pace.grow(lambda x: (1 - x) / max(train.BLOCK, left[0] / .1 - (pace.known() - step)))
        if pace.x(step) >= 1:
            break
        left[0] -= .1 if step < 300 else .11
        step += 1
    good = check('the plan ends with its time', abs(left[0]) < 6)
    return good & check('the plan never goes back', all(pace.x(i) <= pace.x(i + 1) for i in range(step)))


def tokens(model):
    encode, r, good = Encoder(f'{model}/tokenizer.json'), random.Random(4), True
    shown = {v: k for k, v in SHOWN.items()}
    back = {i: ''.join(shown.get(c, c) for c in t) for t, i in encode.vocab.items()}
    texts = [stories.note(r) + '\n\n' for _ in range(50)]
    good &= check('what the small encoder made reads as the text', all(''.join(back[i] for i in encode(t)) == t for t in texts))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return good
    tok = Tokenizer.from_file(f'{model}/tokenizer.json')
    return good & check('the small encoder agrees with the library', all(tok.encode(t, add_special_tokens=False).ids == encode(t) for t in texts))


if __name__ == '__main__':
    torch.manual_seed(0)
    model = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), '../../models/baton-tiny')
    sys.exit(0 if all([quantisers(), mixing(), paced(), tokens(model), round_trip(model), resume()]) else 1)
