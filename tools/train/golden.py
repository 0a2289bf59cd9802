#!/usr/bin/env python3
"""Greedy continuations of the prompts in probes.json by the served arithmetic, for the tests.

    golden.py MODEL_DIR DATA OUT.json [--tokens 64]

Each entry: name, prompt text and ids, the ids and text of the continuation (EOS included, if it came), and per token the gap between the two largest
logits, so that a test can tell a near tie from an error.  Guesses (the MTP block's, or what followed the same two tokens before) only save passes:
every token is the argmax of a pass over the whole sequence.
"""
import argparse
import json
import sys

import torch
from tokenizers import Tokenizer

import export
from model import SERVED


def guess_repeat(ids, n=12):
    for i in range(len(ids) - 3, 1, -1):
        if ids[i - 1:i + 1] == ids[-2:]:
            return ids[i + 1:i + 1 + n]
    return []


def greedy(m, prompt, most):
    ids, gaps, draft = list(prompt), [], []
    while len(gaps) < most and (not gaps or ids[-1] != 1):
        z, z2 = m.run(ids + draft, SERVED, mtp=True, rows=slice(len(ids) - 1, len(ids) + len(draft)))
        for i in range(len(draft) + 1):
            top = z[i].topk(2)
            tok = int(top.indices[0])
            ids.append(tok)
            gaps.append(round(float(top.values[0] - top.values[1]), 4))
            if tok == 1 or len(gaps) >= most or i == len(draft) or draft[i] != tok:
                break
        follow = int(z2[i].argmax())                  # the MTP block saw the token after each row only where that token was in the pass
        draft = guess_repeat(ids) or ([follow] if i < len(draft) else [])
    return ids[len(prompt):], gaps


def main():
    p = argparse.ArgumentParser()
    p.add_argument('model')
    p.add_argument('data')
    p.add_argument('out')
    p.add_argument('--tokens', type=int, default=64)
    a = p.parse_args()
    torch.set_num_threads(1)
    m = export.load(a.model)
    tok = Tokenizer.from_file(f'{a.model}/tokenizer.json')
    out = []
    for g in json.load(open(f'{a.data}/probes.json'))['golden']:
        ids, gaps = greedy(m, g['tokens'], a.tokens)
        out.append(dict(g, continuation=ids, continuation_text=tok.decode(ids, skip_special_tokens=False), gaps=gaps))
        print(g['name'], repr(out[-1]['continuation_text']), min(gaps), file=sys.stderr, flush=True)
    with open(a.out, 'w', encoding='utf-8') as f:
        f.write('[\n' + ',\n'.join(json.dumps(x, ensure_ascii=False) for x in out) + '\n]\n')


if __name__ == '__main__':
    main()
