#!/usr/bin/env python3
"""Write tests/golden/tokenizer_small.json and tokenizer_vectors.json, with HF `tokenizers`.

usage: tests/oracle/make_tokenizer_vectors.py OUT_DIR

The small tokenizer has the pipeline of DeepSeek's, a vocabulary of some thousand, and added tokens of every awkward sort:
ones that are prefixes of each other, ones that overlap ones of the other pass, plain ASCII, special and not. The vectors
are texts and the ids that the library gives. Needs the PyPI packages tokenizers 0.23.3 and gflanguages.
"""
import json
import random
import sys
from pathlib import Path

from gflanguages import LoadLanguages
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parent))
from check_tokenizer import CHARACTERS  # noqa: E402

SPLITS = [r'\p{N}{1,3}', '[一-龥\u3040-ゟ゠-ヿ]+',
          '[!"#$%&\'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+']
SPECIALS = ['<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>']
# content, special, normalized
ADDED = [('<｜User｜>', False, True), ('<｜Assistant｜>', False, True), ('<think>', False, True), ('</think>', False, True), ('｜DSML｜', False, True),
         ('<dsml:', False, True), ('</dsml:', False, True), ('<|a', False, True), ('<|a|', False, True), ('<|a|>', False, True), ('<|a|>b', True, False),
         ('xyz', False, True), ('yzw', True, False), ('zwv', False, True), ('\n\n\t', False, True), ('<｜hole｜>', True, False)]
HARD = ['', ' ', 'Übergröße', 'U\u0308bergro\u0308ße', '\u2029 \ua015', '\u2029\u2029 \ua015 x', '  indented\n\n\tcode', "don't", "'tis", 'a b c d', 'Hello, world!',
        *('1234567890123'[:n] for n in range(1, 13)), 'abc123def', '１２３４', '٣٤٥٦', '²³½', 'ⅣⅤ', 'a1 b2', '漢字kanji漢字', '日本語 テスト', 'カタカナabc', '龥龦', '〇', '〆',
        '\u3040\u3097\u3099', 'ー・ー', '👨\u200d👩\u200d👧', '👍🏽', '🇩🇪', 'e\u0301', '\u0301', ' \u0301x', '\u0301\u0301', '\u200b\u200b', '\u200bx', '\u200b\u200bx', '\u200b ', '\ufeffa',
        '\x00', '\x00\x00a', 'a\x00b', '\x7f', '\x1b[0m', '\u180e', ' \u180e ', '\u180ex', '\u00a0', '\u00a0\u00a0x', '\u3000', 'a\u3000b', '\x85', '\x85\x85', '\x0b\x0c', ' \n', '\n ',
        ' \n \n x', '\r\n', '\r\n\r\n  x', '\n\n\n', 'a\n\n', '   ', '   x', '   1', '   漢', '   .', '\t.', ' .', '..\n\n', ' ..\r\n\r\nx', '\t\tx', '\u2003\u2003x', '$x', '$ x', '.x.y', '_a_b',
        '-x-1', '|a|', '<｜User｜>', '<|User|>', '<|a', '<|a|', '<|a|>', '<|a|>b', '<|a|>bc', '<|a<|a|<|a|>', '<|<|a', 'x<|a|>', '<|a|>x', 'xyzw', 'xyzwv', 'xyz', 'yzw', 'xyyzwzwv', ' xyz ', 'wxyzw',
        '<think>a</think>', ' <think> ', '<thin', '</think', '<dsml:x', '</dsml:', '\n\n\t', '\n\n\n\t', '\n\n\t\t', '<｜hole｜>' * 3, '<｜end▁of▁sentence｜>', 'a<｜end▁of▁sentence｜>b', '｜DSML｜tool_calls', '<｜DSML｜x',
        'a' * 63, 'a' * 64, 'a' * 65, 'a' * 500, ' ' * 200, '\n' * 130, 'ab' * 90, '=' * 100, '1' * 100, '漢' * 100, 'é' * 80, '\u1c89', '\ua7cb\ua7cc', '\U0002ebf0', '\U0010ffff', '\ue000', '\u0378', '\U000e0001x']


def train():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(x), 'isolated') for x in SPLITS]
                                                      + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [v for language in LoadLanguages().values() for _, v in language.sample_text.ListFields()]
    tokenizer.train_from_iterator(sorted(texts), trainers.BpeTrainer(vocab_size=1500, special_tokens=SPECIALS, show_progress=False,
                                                                     initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    for content, special, normalized in ADDED:
        token = AddedToken(content, normalized=normalized, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def main():
    out = Path(sys.argv[1])
    tokenizer = train()
    tokenizer.save(str(out / 'tokenizer_small.json'), pretty=False)
    rng = random.Random(16)
    pool = CHARACTERS + [x[0] for x in ADDED] + SPECIALS + ['the ', 'x', 'y', 'z', 'w', '<|', 'in', '<', '>']
    codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = HARD + [''.join(rng.choice(pool) if rng.random() < .8 else chr(rng.choice(codes)) for _ in range(rng.randint(1, 12))) for _ in range(2500)]
    with open(out / 'tokenizer_vectors.json', 'w', encoding='utf-8') as f:
        f.write('[\n' + ',\n'.join(json.dumps([t, tokenizer.encode(t, add_special_tokens=False).ids]) for t in texts) + '\n]\n')
    print(tokenizer.get_vocab_size(), 'tokens,', len(texts), 'texts')


if __name__ == '__main__':
    main()
