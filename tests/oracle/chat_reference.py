#!/usr/bin/env python3
"""The prompt encoding of DeepSeek V4 once more, written from its description alone, to be compared with model/chat.c.

usage: tests/oracle/chat_reference.py CHAT_TOOL ENCODING_JSON [--n 3000] [--seed 1]

Compares prompts of random conversations, random completions back to messages (strictly as the encoding defines them, cut
into random pieces), and for completions that are broken: that any cut into pieces gives the same answer.
"""
import argparse
import json
import random
import re
import subprocess
import sys

BOS, EOS, USER, ASSISTANT = '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>'
D = '｜DSML｜'
TASKS = ['action', 'query', 'authority', 'domain', 'title', 'read_url']


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------- messages to a prompt

def merged(messages):
    out = []
    for m in messages:
        if m['role'] not in ('tool', 'user'):
            out.append(dict(m))
            continue
        block = {'result': m['role'] == 'tool', 'text': m.get('content') or '', 'id': m.get('tool_call_id') or ''}
        last = out[-1] if out else None
        if last and last['role'] == 'user' and (block['result'] or 'task' not in last):
            last['blocks'].append(block)
        else:
            new = {'role': 'user', 'blocks': [block]}
            if m['role'] == 'user' and m.get('task'):
                new['task'] = m['task']
            out.append(new)
    order = {}
    for m in out:
        if m['role'] == 'assistant' and m.get('tool_calls'):
            order = {c['id']: i for i, c in enumerate(m['tool_calls']) if c.get('id')}
        elif m['role'] == 'user':
            results = sorted((b for b in m['blocks'] if b['result']), key=lambda b: order.get(b['id'], 0))
            m['blocks'] = [results.pop(0) if b['result'] else b for b in m['blocks']]
    return out


def calls_text(calls):
    text = f'\n\n<{D}tool_calls>\n'
    for c in calls:
        try:
            arguments = json.loads(c['function']['arguments'])
            if not isinstance(arguments, dict):
                raise ValueError
        except ValueError:
            arguments = {'arguments': c['function']['arguments']}
        lines = []
        for k, v in arguments.items():
            is_text = isinstance(v, str)
            lines.append(f'<{D}parameter name="{k}" string="{"true" if is_text else "false"}">{v if is_text else dumps(v)}</{D}parameter>')
        text += f'<{D}invoke name="{c["function"]["name"]}">\n' + '\n'.join(lines) + f'\n</{D}invoke>\n'
    return text + f'</{D}tool_calls>'


def render(texts, messages, thinking=False, effort='none', keep_reasoning=False):
    if not keep_reasoning:
        keep_reasoning = any(m.get('tools') for m in messages)
    turns = merged(messages)

    def last_user():
        return max((i for i, m in enumerate(turns) if m['role'] in ('user', 'developer')), default=-1)

    if thinking and not keep_reasoning:
        u = last_user()
        turns = [m for i, m in enumerate(turns) if i >= u or m['role'] != 'developer']
    u = last_user()
    out = BOS
    if thinking and turns:
        out += texts['effort'][effort]
    for i, m in enumerate(turns):
        sections = ''
        if m.get('tools'):
            sections += '\n\n' + texts['tools_prefix'] + '\n'.join(dumps(t['function']) for t in m['tools']) + texts['tools_suffix']
        if m.get('response_format'):
            sections += f"\n\n{texts['response_format_heading']}\n\n{texts['response_format_instruction']}\n{dumps(m['response_format'])}"
        content = m.get('content') or ''
        if m['role'] == 'system':
            out += content + sections
        elif m['role'] == 'developer':
            out += USER + content + sections
        elif m['role'] == 'latest_reminder':
            out += '<｜latest_reminder｜>' + content
        elif m['role'] == 'user':
            out += USER + '\n\n'.join(f'<tool_result>{b["text"]}</tool_result>' if b['result'] else b['text'] for b in m['blocks'])
        else:
            if thinking and not (i > 0 and turns[i - 1].get('task')) and (keep_reasoning or i > u):
                out += (m.get('reasoning_content') or '') + '</think>'
            out += content + (calls_text(m['tool_calls']) if m.get('tool_calls') else '') + ('' if m.get('wo_eos') else EOS)
        if i + 1 < len(turns) and turns[i + 1]['role'] not in ('assistant', 'latest_reminder'):
            continue
        task = m.get('task') if m['role'] == 'user' else None
        if task == 'action':
            out += ASSISTANT + ('<think>' if thinking else '</think>') + '<｜action｜>'
        elif task:
            out += f'<｜{task}｜>'
        elif m['role'] in ('user', 'developer'):
            out += ASSISTANT + ('<think>' if thinking and (keep_reasoning or i >= u) else '</think>')
    return out


# ---------------------------------------------------------------------------------------------- a completion to a message

def parse(text, thinking):
    """The strict parser: None for what it refuses."""
    reasoning = None
    if not text.endswith(EOS):
        return None
    text = text[:-len(EOS)]
    if thinking:
        reasoning, found, text = text.partition('</think>')
        if not found:
            return None
    content, found, rest = text.partition(f'\n\n<{D}tool_calls')
    for part in (reasoning or '', content):
        if any(x in part for x in (BOS, EOS, '<think>', '</think>', D)):
            return None
    calls = []
    if found:
        body = re.fullmatch(rf'>\n((?:<{D}invoke name=".*?">\n.*?</{D}invoke>\n)*?)</{D}tool_calls>', rest, re.S)
        if not body:
            return None
        for name, inner in re.findall(rf'<{D}invoke name="(.*?)">\n(.*?)</{D}invoke>\n', body[1], re.S):
            entries, pattern = {}, rf'<{D}parameter name="(.*?)" string="(true|false)">(.*?)</{D}parameter>\n'
            if re.sub(pattern, '', inner, flags=re.S) not in ('', '\n'):
                return None
            for k, is_text, v in re.findall(pattern, inner, re.S):
                if k in entries:
                    return None
                entries[k] = dumps(v) if is_text == 'true' else v
            calls.append([name, '{' + ', '.join(f'{dumps(k)}: {v}' for k, v in entries.items()) + '}', True])
    return {'reasoning': reasoning or None, 'content': content or None, 'calls': calls}


# ------------------------------------------------------------------------------------------------------ random material

WORDS = ['', 'a', 'Hello', 'two words', 'line\nbreak', '\n\n', 'Übergröße', '日本語', '😀', '"quoted"', 'back\\slash', 'nul\x00byte', '</', '<', '<tool_result>',
         '<｜User｜>', 'tab\t', '{"x": 1}', "<b>html</b>", '\x7f\x1f', '\u2028']


def random_text(rng, words=WORDS):
    return ''.join(rng.choice(words) for _ in range(rng.randint(0, 4)))


def random_value(rng, depth=0):
    kind = rng.randint(0, 7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, -1, 7, 2**53, -2**63, 2**63 - 1])
    if kind == 2:
        return rng.choice([0.5, 1e100, -2.5e-7, 3.0, 0.1, 1e16, 123456.789])
    if kind < 6:
        return random_text(rng)
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {f'k{i}': random_value(rng, depth + 1) for i in range(rng.randint(0, 3))}


def random_calls(rng):
    calls = []
    for i in range(rng.randint(1, 4)):
        arguments = dumps({rng.choice(['city', 'größe', 'a b', 'x']) + str(k): random_value(rng) for k in range(rng.randint(0, 3))})
        if rng.random() < .15:
            arguments = rng.choice(['', 'not json', '[1, 2]', '7', '"text"', '{"cut": '])
        call = {'type': 'function', 'function': {'name': rng.choice(['get_weather', 'f', 'mcp.search']), 'arguments': arguments}}
        if rng.random() < .9:
            call['id'] = f'call_{rng.randint(0, 5)}'
        calls.append(call)
    return calls


def random_conversation(rng):
    messages = []
    for _ in range(rng.randint(1, 9)):
        role = rng.choice(['system', 'user', 'user', 'assistant', 'assistant', 'tool', 'tool', 'developer', 'latest_reminder'])
        m = {'role': role, 'content': random_text(rng)}
        if role == 'user' and rng.random() < .25:
            m['task'] = rng.choice(TASKS)
        if role == 'tool':
            m['tool_call_id'] = f'call_{rng.randint(0, 5)}'
        if role == 'assistant':
            if rng.random() < .6:
                m['reasoning_content'] = random_text(rng)
            if rng.random() < .4:
                m['tool_calls'] = random_calls(rng)
            if rng.random() < .1:
                m['wo_eos'] = True
        if role in ('system', 'developer'):
            m['content'] += 'x' if role == 'developer' else ''
            if rng.random() < .15:
                m['tools'] = [{'type': 'function', 'function': {'name': f't{i}', 'description': random_text(rng),
                                                                'parameters': {'type': 'object', 'properties': random_value(rng)}}}
                              for i in range(rng.randint(0, 3))]
            if rng.random() < .15:
                m['response_format'] = {'type': 'object', 'x': random_value(rng)}
        messages.append(m)
    return messages


def pieces_of(rng, text):
    if rng.random() < .2:
        return [text]
    out, at = [], 0
    while at < len(text):
        n = rng.choice([1, 1, 2, 3, 5, 8, 21])
        out.append(text[at:at + n])
        at += n
    return out


def random_completion(rng, thinking):
    """A completion that the strict parser takes."""
    plain = [w for w in WORDS if w != '<｜User｜>']
    text = random_text(rng, plain) + '</think>' if thinking else ''
    text += random_text(rng, plain)
    if rng.random() < .6:
        calls = [c for c in random_calls(rng)]
        text += calls_text(calls)
    return text


def mutated(rng, text):
    parts = [f'<{D}tool_calls', '>\n', f'<{D}invoke name="f">\n', f'</{D}invoke>\n', f'</{D}tool_calls>', '\n\n', D, '</think>', '<think>', '"', '>', '<',
             f'<{D}parameter name="k" string="false">', f'</{D}parameter>\n', ' ', 'junk', '']
    for _ in range(rng.randint(1, 4)):
        a = rng.randint(0, len(text))
        b = min(len(text), a + rng.choice([0, 0, 1, 3, 12, 40]))
        text = text[:a] + rng.choice(parts) + text[b:]
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('tool')
    parser.add_argument('encoding')
    parser.add_argument('--n', type=int, default=3000)
    parser.add_argument('--seed', type=int, default=1)
    args = parser.parse_args()
    rng, texts = random.Random(args.seed), json.load(open(args.encoding, encoding='utf-8'))
    lines, wanted, kinds = [], [], []

    def add(kind, line, want):
        kinds.append(kind)
        lines.append(line)
        wanted.append(want)

    for _ in range(args.n):
        messages, thinking, effort = random_conversation(rng), rng.random() < .7, rng.choice(['none', 'low', 'high', 'max'])
        keep = rng.random() < .3
        add('prompt', {'render': messages, 'thinking': thinking, 'effort': effort, 'keep_reasoning': keep}, render(texts, messages, thinking, effort, keep))
    n_strict = 0
    for _ in range(args.n):
        thinking = rng.random() < .5
        text = random_completion(rng, thinking)
        want = parse(text + EOS, thinking)
        if want is not None:
            n_strict += 1
            add('completion', {'parse': pieces_of(rng, text), 'thinking': thinking}, want)
    for i in range(args.n):
        thinking, was_cut = rng.random() < .5, rng.random() < .5
        text = mutated(rng, random_completion(rng, thinking))
        for pieces in ([text], list(text), pieces_of(rng, text)):
            add('broken', {'parse': pieces, 'thinking': thinking, 'was_cut': was_cut}, i)
    data = ''.join(dumps(x) + '\n' for x in lines).encode()
    out = subprocess.run([args.tool, args.encoding], input=data, stdout=subprocess.PIPE, check=True).stdout.decode()
    bad, first = 0, {}
    for kind, line, want, got in zip(kinds, lines, wanted, out.split('\n'), strict=False):
        got = json.loads(got)
        if kind == 'broken':
            for name, arguments, is_whole in got['calls']:
                try:
                    json.loads(arguments)
                    is_json = True
                except ValueError:
                    is_json = False
                assert is_json == is_whole, (line, name, arguments)
            want = first.setdefault(want, got)
        if got != want:
            bad += 1
            if bad < 5:
                print(f'DIFF {kind} {dumps(line)}\n  ours   {got!r}\n  theirs {want!r}')
    print(f'{args.n} prompts, {n_strict} completions, {args.n} broken ones in 3 cuts: {bad} differences')
    return bad != 0 or n_strict < args.n // 2


if __name__ == '__main__':
    sys.exit(main())
