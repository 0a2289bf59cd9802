#!/usr/bin/env python3
"""check_cli.py BATON_EVAL MODEL: the commands agree with one another, and bad input ends with a message."""
import json
import math
import subprocess
import sys

binary, model = sys.argv[1:3]


def run(command, text, *options):
    return subprocess.run([binary, command, '--model', model, '--threads', '1', *options], input=text, capture_output=True, text=True)


def lines(command, *requests, options=()):
    done = run(command, ''.join(json.dumps(r) + '\n' for r in requests), *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def largest(row):
    return row.index(max(row))


# generate takes the largest logit, step after step; logits says the same whether a token came in the prompt or was forced
prompt = [0, 17, 300, 41, 9]
ids = lines('generate', {'tokens': prompt, 'n': 6}, options=['--ignore-eos'])[0]['ids']
assert len(ids) == 6
forced = [r['logits'] for r in lines('logits', {'tokens': prompt, 'forced': ids[:5]})]
assert [largest(row) for row in forced] == ids
whole = [r['logits'] for r in lines('logits', {'tokens': prompt + ids[:3]}, {'tokens': prompt + ids[:5]})]
assert whole == [forced[3], forced[5]]
assert lines('logits', {'tokens': prompt + ids[:5]}, options=['--chunk', '3'])[0]['logits'] == forced[5]
exact = lines('logits', {'tokens': prompt}, options=['--exact'])[0]['logits']
assert 0 < max(abs(a - b) for a, b in zip(exact, forced[0])) < 10

# a text of one token: its bits are those of the first logits after the start token
one = json.loads(run('bits', 'a').stdout)
assert (one['bytes'], one['tokens']) == (1, 1), one
start = lines('logits', {'tokens': [0]})[0]['logits']
total = math.log2(sum(math.exp(v - max(start)) for v in start)) + max(start) / math.log(2)
assert any(abs(total - v / math.log(2) - one['bits_per_byte']) < 1e-5 for v in start)
text = 'He went to the door and looked out. ' * 6
apart, together = (json.loads(run('bits', text, '--context', '24', '--batch', str(n)).stdout) for n in (1, 3))
assert apart == together and 0 < apart['bits_per_byte'] < 8

for command, text, options, words in (
        ('logits', '{"tokens": [0, 99999999]}', [], 'no id below'), ('logits', '{"tokens": []}', [], 'at least one'),
        ('logits', '{"tokens": [1, 2, 3]}', ['--context', '2'], 'context'), ('logits', 'not json', [], 'line 1'),
        ('generate', '{"tokens": [1], "n": 0}', [], '"n"'), ('bits', '', [], '1 to'),
        ('logits', '{"tokens": [1]}', ['--device', 'tpu'], 'tpu'), ('logits', '{"tokens": [1]}', ['--device', 'cpu:3'], '3 devices')):
    done = run(command, text, *options)
    assert done.returncode == 1 and words in done.stderr and not done.stdout, (command, text, done)
assert run('sing', '').returncode == 2
