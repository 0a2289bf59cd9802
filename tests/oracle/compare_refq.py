#!/usr/bin/env python3
"""Compare quantised arithmetic with refq.py, by counting rows that agree exactly; and NVFP4 decoding with the same weights in fp32.

usage: compare_refq.py BATON_EVAL [--models 4] [--first-seed 0]

Rounding amplifies any last-bit difference, so an error limit can't tell a missing rounding point from noise. Counted are
*exact* rows: equal to 2 % of the distance between exact and quantised arithmetic, against the best of refq's four variants of
the two roundings that the sources leave open. Of whole nets with one-token prompts at least 15 % must be exact (a missing step
leaves 0), of one-layer nets with prompts over 100 tokens 40 %. Half of the models have rows whose magnitudes differ by 2^10 and
more. Needs numpy.
"""
import argparse
import sys
import tempfile

import interpreter

interpreter.need('numpy')

import numpy as np

import engine
import make_checkpoint
import refnp
import refq

VARIANTS = [(), ('-qn16',), ('-p16',), ('-qn16', '-p16')]


def one_token_prompts(c, n=24):
    return [([t], []) for t in np.random.default_rng(5).permutation(c.V)[:n]]


def long_prompt(c, cut=110, n=170):
    ids = np.random.default_rng(6).integers(0, c.V, n)
    return [(ids[:cut], ids[cut:])]


def rows_of(checkpoint, mode, flags, requests):
    model = refq.Model(checkpoint, mode, flags)
    return np.concatenate([model.run(list(t) + list(f), len(f) + 1) for t, f in requests])


def exact_share(got, checkpoint, requests):
    unquantised = rows_of(checkpoint, 'f', (), requests)
    best = (0.0, ())
    for flags in VARIANTS:
        want = rows_of(checkpoint, 'q', flags, requests)
        distance = abs(want - unquantised).max(1)
        share = float((abs(got - want).max(1) <= 0.02 * distance).mean())
        best = max(best, (share, flags))
    return best


def teeth(got, checkpoint, requests, flags, ratio):
    """Exact shares against refq with one step left out or changed: what this test would say of such an engine."""
    steps = ['-q8', '-s8w', '-r16', '+woq', '+g8', '+s8r'] + ['-s8c'] * bool(ratio) + ['-had', '-s4', '-i16'] * (ratio == 4)
    unquantised, out = rows_of(checkpoint, 'f', (), requests), {}
    for step in steps:
        want = rows_of(checkpoint, 'q', flags + (step,), requests)
        out[step] = float((abs(got - want).max(1) <= 0.02 * abs(want - unquantised).max(1)).mean())
    return out


def check_quantised(args, seed, one_layer):
    c, rng = make_checkpoint.shape(seed, True, one_layer), np.random.default_rng(seed)
    c.D = 256 if seed % 2 else c.D
    P = refnp.randparams(c, rng)
    if seed % 2:
        make_checkpoint.rough(c, P, rng)
    requests = one_token_prompts(c) if one_layer is None else long_prompt(c)
    least = 0.15 if one_layer is None else 0.40
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint.write(directory, c, P, 'fp8')
        got = np.concatenate(engine.logits(args.eval, directory, requests, chunk=64))
        share, flags = exact_share(got, refq.Checkpoint(directory), requests)
        without = teeth(got, refq.Checkpoint(directory), requests, flags, one_layer) if one_layer is not None else {}
        exact = np.concatenate(engine.logits(args.eval, directory, requests, exact=True, chunk=64))
        want = rows_of(refq.Checkpoint(directory), 'f', (), requests)
    error = abs(exact - want).max() / np.ptp(want)
    # An engine without a step that always acts would have had no chance; the width of groups shows in rough rows alone, and
    # what acts on compressed entries shows where an index has to choose among them.
    always = ['-q8', '-s8w', '-r16', '+woq', '+s8r'] + ['+g8'] * (seed % 2) if without else []
    often = ['-s8c', '-had', '-s4'] * (one_layer == 4)
    seen = all(without[step] < 0.1 for step in always) and all(without[step] < min(share, 0.6) for step in often)
    ok = share >= least and error < 2e-4 and seen
    if not seen:
        print('     an engine without a step would have passed: %s' % without)
    print('%s seed %d %s: %.0f %% of %d rows exact (at least %.0f) against q %s; exact mode %.1e of the range' % (
        'ok  ' if ok else 'FAIL', seed, 'ratios %s, one token' % c.ratios if one_layer is None else 'one layer of ratio %d, %d tokens' % (one_layer, len(requests[0][0])),
        100 * share, len(got), 100 * least, ' '.join(flags), error), flush=True)
    return ok


def check_nvfp4(args, seed):
    """The same numbers as NVFP4 and as fp32 must give the same logits in exact arithmetic."""
    c, rng = make_checkpoint.shape(seed, True), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as directory:
        stored = make_checkpoint.write(directory + '/nvfp4', c, refnp.randparams(c, rng), 'nvfp4')
        make_checkpoint.write(directory + '/f32', c, stored, 'f32')
        requests = one_token_prompts(c, 4) + long_prompt(c, 20, 30)
        a, b = (np.concatenate(engine.logits(args.eval, directory + '/' + kind, requests, exact=True)) for kind in ('nvfp4', 'f32'))
        quantised = np.concatenate(engine.logits(args.eval, directory + '/nvfp4', requests))
    error, apart = abs(a - b).max() / np.ptp(b), abs(quantised - b).max() / np.ptp(b)
    ok = error < 2e-4 and 1e-3 < apart < 1
    print('%s seed %d NVFP4 against its own numbers in fp32: %.1e of the range apart; quantised arithmetic %.1e' % ('ok  ' if ok else 'FAIL', seed, error, apart), flush=True)
    return ok


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('eval')
    parser.add_argument('--models', type=int, default=4)
    parser.add_argument('--first-seed', type=int, default=0)
    args = parser.parse_args()
    ok = True
    for seed in range(args.first_seed, args.first_seed + args.models):
        ok &= check_quantised(args, seed, None)
    for k, ratio in enumerate((0, 4, 128)):
        ok &= check_quantised(args, args.first_seed + 100 + k, ratio)
        ok &= check_quantised(args, args.first_seed + 101 + k, ratio)
    for seed in range(args.first_seed, args.first_seed + 2):
        ok &= check_nvfp4(args, seed)
    sys.exit(0 if ok else 1)


if __name__ == '__main__':
    main()
