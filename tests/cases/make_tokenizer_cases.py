#!/usr/bin/env python3
"""make_tokenizer_cases.py TOKENIZER_JSON > tests/golden/tokenizer_cases.json: ids of TOK-01's fixed list by HF tokenizers
(0.23.3), for the bundled model. Run again when its tokenizer changes."""
import json
import sys
import unicodedata

from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[1])
added = [token["content"] for token in json.load(open(sys.argv[1], encoding="utf-8"))["added_tokens"]]
texts = ["Übergröße", "\u2029 \ua015", "\u2029\ua015", " \u2029", "a\u2029b", *("1234567890123"[:n] for n in range(1, 14)),
         "0" * 12, "12 345 6789", "中文text中文", "日本語とEnglishと한국어", "x中y文z", "👨‍👩‍👧‍👦", "👩🏽‍🚀 🇩🇪", "a👍🏿b",
         unicodedata.normalize("NFC", "é ñ ü ệ Å"), unicodedata.normalize("NFD", "é ñ ü ệ Å"), "   ", "a   b", "\n\n\n",
         " \n \n ", "a\n\nb", "\t\t x", "a \n", "\r\n\r\n", "  leading", "trailing  ", "\u00a0\u2003x", "<|User|>", "<|user|>hello",
         "<｜User", "｜User｜>", "hello<｜User｜>", "<｜User｜>", "<｜User｜><｜User｜>", "a<｜Assistant｜>b", "<think>x</think>",
         "</think", "<think><think>", "<｜begin▁of▁sentence｜>x<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜", "x < y > z",
         "don't I'll we've", "DON'T", "snake_case CamelCase kebab-case", "3.14e-10", "$%^&*()", "日本。「は」", "नमस्ते दुनिया", "שלום עולם",
         "مرحبا بالعالم", "ไทยภาษา", "Привет, мир!", "Γειά σου", "\ufeffbom", "a\u0301\u0302", "\u200b\u200d", "ﬁ ﬂ ½ ²",
         "if (x == 1) {\n\treturn;\n}\n", "https://example.com/a?b=c#d", "x" * 300, " " * 100, "\n" * 50,
         *(token for token in added), *(f"a{token}b" for token in added), *(token[:-1] for token in added)]
seen = set()
rows = []
for text in texts:
    if text not in seen:
        seen.add(text)
        rows.append([text, tokenizer.encode(text, add_special_tokens=False).ids])
print("[" + ",\n".join(json.dumps(row) for row in rows) + "]")
