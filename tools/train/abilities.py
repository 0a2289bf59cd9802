#!/usr/bin/env python3
"""Which tasks with one right answer the model solves, by the served arithmetic, for the tests.

    abilities.py MODEL_DIR DATA OUT.json [--gap 1.0] [--far 5]

The right answers come from what made the tasks, not from any model. A task is solved when every token of the answer, end included, is the greedy choice. OUT
gets the solved ones in which each token leads the next best by more than the gap, so that another right implementation must solve them too, and how many
of each kind were tried and solved. Those with 2,000 tokens in between are long: of each such kind it gets the first few only.
"""
import argparse
import json
import sys

import torch
from tokenizers import Tokenizer

import chatformat as cf
import export
from model import SERVED


PASSAGES = dict(copy='far_words', copy_text='far_text')      # kinds of probes, and what they are called as tasks


def asked(text):
    """what the user said, of a prompt without a system message"""
    head, tail = '<｜begin▁of▁sentence｜><｜User｜>', '<｜Assistant｜></think>'
    assert text.startswith(head) and text.endswith(tail), text
    return text[len(head):-len(tail)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument('model')
    p.add_argument('data')
    p.add_argument('out')
    p.add_argument('--gap', type=float, default=1.0)
    p.add_argument('--far', type=int, default=5)
    a = p.parse_args()
    m = export.load(a.model)
    tok = Tokenizer.from_file(f'{a.model}/tokenizer.json')
    encode = lambda t: tok.encode(t, add_special_tokens=False).ids
    decode = lambda ids: tok.decode(ids, skip_special_tokens=False)
    tried, solved, kept = {}, {}, []
    probes = json.load(open(f'{a.data}/probes.json'))
    passages = [dict(user=asked(decode(ids)), tools=[], answer=decode(answer[:-1]), kind=name)        # an answer ends with the end token
                for kind, name in PASSAGES.items() for ids, answer in probes[kind]['2000'][:16]]
    for task in probes['abilities'] + passages:
        kind = task['kind']
        answer = task['answer'] if 'answer' in task else cf.calls_block([task['call']])
        text, end = cf.prompt_text(cf.document([(task['user'], '', answer)], system='' if task['tools'] else None, tools=task['tools']))
        prompt, ids = encode(text), encode(end)
        with torch.no_grad():
            z = m.run(prompt + ids, SERVED, rows=slice(len(prompt) - 1, len(prompt) + len(ids) - 1))
        top = z.topk(2).values
        right = bool((z.argmax(-1).cpu() == torch.tensor(ids)).all())
        gap = float((top[:, 0] - top[:, 1]).min())
        tried[kind], solved[kind] = tried.get(kind, 0) + 1, solved.get(kind, 0) + right
        enough = kind.startswith('far_') and sum(x['kind'] == kind for x in kept) >= a.far
        if right and gap > a.gap and not enough:
            kept.append(dict(task, prompt_tokens=len(prompt), answer_tokens=len(ids), gap=round(gap, 3)))
        print(kind, len(prompt), len(ids), right, round(gap, 3), file=sys.stderr, flush=True)
    with open(a.out, 'w', encoding='utf-8') as f:
        f.write(json.dumps(dict(tried=tried, solved=solved))[:-1] + ', "tasks": [\n' + ',\n'.join(json.dumps(x, ensure_ascii=False) for x in kept) + '\n]}\n')
    print(tried, solved, len(kept), file=sys.stderr)


if __name__ == '__main__':
    main()
