#!/usr/bin/env python3
"""Writes tests/golden: two small checkpoints and their logits from transformers and refq, for tests that run without Python.

usage: make_golden.py DIR

toy/ is exact arithmetic's (bf16 weights, every kind of layer; logits of HF in float32). toy_fp8/ is quantised arithmetic's (FP8
blocks, MXFP4 experts, one sparse layer whose index has to choose; logits of refq, both of the variant that the CPU follows and exact).
"""
import json
import os
import sys

import interpreter

interpreter.need('numpy', 'torch', 'transformers')

import numpy as np

import compare_hf
import make_checkpoint
import refnp
import refq


def save(path, **fields):
    with open(path, 'w') as f:
        json.dump(fields, f)
        f.write('\n')


def rows(logits, which):
    return [[float('%.7g' % v) for v in logits[r]] for r in which]


def main():
    directory = sys.argv[1]
    os.makedirs(directory, exist_ok=True)
    c, rng = make_checkpoint.shape(1), np.random.default_rng(1)
    c.V, c.D, c.inter, c.ne, c.ratios, c.nl, c.nhash = 64, 40, 16, 6, [0, 4, 16], 3, 1
    c.r128, c.nh, c.og, c.win, c.lim = 16, 4, 2, 8, 0.5
    P = make_checkpoint.write(directory + '/toy', c, refnp.randparams(c, rng), 'bf16')
    ids = rng.integers(0, c.V, 70)
    which = [0, 5, 36, 69]
    save(directory + '/toy.json', ids=ids.tolist(), rows=which, logits=rows(compare_hf.hf_logits(c, P, ids), which))

    c, rng = make_checkpoint.shape(2, True, 4), np.random.default_rng(2)
    c.V, c.D, c.hd, c.ihd, c.nh, c.og, c.ol, c.inter, c.ne, c.topk, c.nhash, c.win = 64, 128, 128, 64, 2, 1, 128, 128, 4, 2, 0, 32
    make_checkpoint.write(directory + '/toy_fp8', c, refnp.randparams(c, rng), 'fp8')
    ids = rng.integers(0, c.V, 120)
    which = list(range(0, 120, 6))
    checkpoint = refq.Checkpoint(directory + '/toy_fp8')
    quantised, exact = (refq.Model(checkpoint, mode, flags).run(ids) for mode, flags in (('q', ('-qn16', '-p16')), ('f', ())))
    save(directory + '/toy_fp8.json', ids=ids.tolist(), rows=which, logits=rows(quantised, which), exact=rows(exact, which))


if __name__ == '__main__':
    main()
