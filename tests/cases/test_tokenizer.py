"""The tokenizer against vectors that HF tokenizers made. 100,000 random strings and real text in ten scripts are in
tests/oracle/check_tokenizer.py; here is the fixed list, through the router's /tokenize and /detokenize."""
import json
import os
import random

import kit
from kit import check, need

suite = kit.Suite()
case = suite.cluster()


@case("TOK-01")
def the_fixed_list(c):
    with open(os.path.join(kit.TOP, "tests", "golden", "tokenizer_cases.json"), encoding="utf-8") as file:
        golden = json.load(file)
    need(len(golden) >= 60, "vectors", len(golden))
    for text, ids in golden:
        check(f"ids of {text!r}", c.tokens(prompt=text) if text else [], ids)
        if ids:
            check(f"text of the ids of {text!r}", c.post("/detokenize", {"tokens": ids}).json()["prompt"], text)


@case("TOK-01-random")
def there_and_back(c):
    rng = random.Random(7036)
    ranges = ((32, 127), (0xa0, 0x250), (0x300, 0x370), (0x3040, 0x3100), (0x4e00, 0x9fa6), (0xa000, 0xa490), (0x1f300, 0x1f650),
              (0x2000, 0x2070), (1, 32), (0xac00, 0xd7a4), (0x10000, 0x10080))
    for _ in range(300):
        text = "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(1, 60)))
        check(f"{text!r}", c.post("/detokenize", {"tokens": c.tokens(prompt=text)}).json()["prompt"], text)


if __name__ == "__main__":
    suite.main()
